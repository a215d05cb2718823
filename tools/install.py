"""Install pinned packages of gigabytes into the environment of the Python that runs this.

    .venv-cuda/bin/python tools/install.py --gb 7 -r tools/requirements-cuda.txt

It looks for the room first: of what is installed, and of the wheels that pip fetches. A download
that breaks off begins again, three times in all. All else is pip's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GB = 10**9
WHEELS = 0.6  # of what is installed, as wheels are packed
TRIES, PAUSE_S = 3, 20.0


def bytes_in(folder: Path) -> int:
    """Return what the files under a folder hold."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )


def lacking(needed: dict[Path, float]) -> list[str]:
    """Return a line for each file system that has no room for what its folders need, in bytes."""
    by_device: dict[int, list[Path]] = {}
    for folder in needed:
        by_device.setdefault(os.stat(folder).st_dev, []).append(folder)
    lines = []
    for folders in by_device.values():
        wanted = sum(needed[folder] for folder in folders)
        free = shutil.disk_usage(folders[0]).free
        if free < wanted:
            where = " and ".join(map(str, folders))
            lines.append(f"{where}: {wanted / GB:.1f} GB needed, {free / GB:.1f} GB free")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Install; pip's exit code, or 1 where there is no room."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, required=True, help="what all takes when installed")
    args, words = parser.parse_known_args(argv)
    environment, fetched = Path(sys.prefix), Path(tempfile.gettempdir())
    left = max(0.0, args.gb * GB - bytes_in(environment))
    found = lacking({environment: left, fetched: WHEELS * left})
    if found:
        print("\n".join(["no room on the disk", *found]), file=sys.stderr)
        return 1
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for attempt in range(TRIES):
        code = subprocess.run([*pip, *words], check=False).returncode
        if not code:
            break
        print(f"pip ended with {code}: attempt {attempt + 1} of {TRIES}", file=sys.stderr)
        if attempt + 1 < TRIES:
            time.sleep(PAUSE_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
