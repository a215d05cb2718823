"""File the results of a GPU check: benchmarks/results/<device>/<date>-<commit>.json.

Never overwrites: a second run of the same commit on the same day gets `-2`, and a file that is
already there is named instead of filed twice.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import measured_page
import readme_page
from gpu_check import OBJECTS, ROOT, SCHEMA

RESULTS = ROOT / "benchmarks" / "results"
NEEDED = ("schema", "command", "date", "commit", "device", "driver", "torch")


class ImportRefusedError(RuntimeError):
    """The file is not the result of a GPU check; says why."""


def slug(text: str) -> str:
    """Return text as a folder name: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"


def check(results: Any) -> dict[str, Any]:
    """Return `results` if it has everything a filed result needs.

    Raises
    ------
    ImportRefusedError
        Names what is missing or malformed.
    """
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else type(results).__name__
        raise ImportRefusedError(f"schema is {found!r}, not {SCHEMA!r}: not a GPU check's results")
    missing = [key for key in NEEDED if key not in results]
    # A part that is newer than the check that wrote them has nothing to say.
    parts = {name for name in OBJECTS if name in results} | {"machine", "tests"}
    missing += [name for name in parts if not {"state", "seconds"} <= set(results.get(name, ()))]
    if missing:
        raise ImportRefusedError(f"lacks {', '.join(missing)}")
    if not re.match(r"\d{4}-\d{2}-\d{2}T", str(results["date"])):
        raise ImportRefusedError(f"date is {results['date']!r}, not like 2026-01-31T12:00:00Z")
    return results


def file_results(source: Path, folder: Path = RESULTS) -> Path:
    """Copy `source` to where it belongs below `folder` and return that path.

    Raises
    ------
    ImportRefusedError
        When it is not a GPU check's results.
    """
    try:
        text = source.read_text(encoding="utf-8")
        results = check(json.loads(text))
    except (OSError, ValueError) as error:
        raise ImportRefusedError(str(error)) from error
    # A rehearsal on the simulated driver must never look like hardware.
    device = slug(results["device"])
    if results.get("simulated") and not device.startswith("simulated"):
        device = f"simulated-{device}"
    stem = f"{results['date'][:10]}-{slug(str(results['commit'] or 'unknown'))[:12]}"
    number = 1
    while True:
        target = folder / device / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # "x": created or refused in one step, even if another process files at the same time.
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
            return target
        except FileExistsError:
            if target.read_text(encoding="utf-8") == text:
                return target
            number += 1


def main() -> int:
    """File the results named by the first argument."""
    if len(sys.argv) != 2:
        print("usage: gpu_import.py results.json", file=sys.stderr)
        return 2
    try:
        target = file_results(Path(sys.argv[1]))
    except ImportRefusedError as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    print(f"filed as {target.relative_to(ROOT)}")
    measured_page.main()
    readme_page.main()
    print(f"{measured_page.PAGE.relative_to(ROOT)} and README.md say so")
    results = json.loads(target.read_text(encoding="utf-8"))
    print(measured_page.beside_simulated({results["device"]: [results]}), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
