"""Run the benchmarks of this folder and write one JSON with all of them.

    python benchmarks/run.py --device cuda --output results.json

A benchmark file is bench_*.py with

    def benchmarks(device: str) -> Iterable[dict]: ...

A generator's rows are written as they come. Each dict has at least "name" and one figure; keys of
figures end in their unit (_bytes, _s, _ms, _us, _gbps, _ratio, _count), as in every JSON of this
project.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SCHEMA = "oracle_offload/benchmarks/1"
UNITS = ("_bytes", "_s", "_ms", "_us", "_gbps", "_ratio", "_count")

sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import common  # noqa: E402 - the folder must be findable first


def files(only: Sequence[str] = (), folder: Path = FOLDER) -> list[Path]:
    """Return the benchmark files, all or those named (``host_cost`` is bench_host_cost.py)."""
    found = sorted(folder.glob("bench_*.py"))
    names = {path.stem.removeprefix("bench_"): path for path in found}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    return [path for name, path in names.items() if not only or name in only]


def run_file(path: Path, device: str) -> Iterator[dict[str, Any]]:
    """Run one file; whatever it raises becomes a row with ``error`` instead of figures."""
    name = path.stem.removeprefix("bench_")
    start = time.perf_counter()
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        for row in module.benchmarks(device):
            try:
                check_row(row)
            except ValueError as error:  # the next row may be well
                row = {"name": str(row.get("name", name)), "error": str(error)}
            yield {"file": name, **row}
    except Exception as error:  # one broken benchmark must not cost the others
        traceback.print_exc()
        yield {"file": name, "name": name, "error": f"{type(error).__name__}: {error}"}
    print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def check_row(row: dict[str, Any]) -> None:
    """Raise `ValueError` for a row without a name or without a figure that carries its unit."""
    if not isinstance(row.get("name"), str):
        raise ValueError(f"a benchmark's row needs a name: {row}")
    figures = [key for key in row if key.endswith(UNITS)]
    if not figures and not {"skipped", "error"} & row.keys():
        raise ValueError(f"{row['name']} has no figure whose key ends in {', '.join(UNITS)}")


def environment(device: str) -> dict[str, Any]:
    """Return what a reader must know to judge the figures."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per row."""
    for row in rows:
        said = row.get("error") or row.get("skipped")
        figures = {k: v for k, v in row.items() if k.endswith(UNITS)}
        text = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
        )
        print(f"{row['file']}: {row['name']}: {said or text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (simulated driver), cuda, cuda:N")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the lines")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="what takes longer leaves rows out"
    )
    parser.add_argument("--artifacts", type=Path, help="where traces and timelines go")
    parser.add_argument("only", nargs="*", help="names of benchmark files; default: all")
    args = parser.parse_args(argv)
    wanted = files(args.only, args.folder)
    common.begin(args.limit_s, args.artifacts)
    faulthandler.enable()
    if args.limit_s < float("inf"):
        faulthandler.dump_traceback_later(args.limit_s)  # where it hung, for the log
    rows: list[dict[str, Any]] = []
    result = {
        "schema": SCHEMA,
        "command": " ".join(["python", "benchmarks/run.py", *(argv or sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **environment(args.device),
        "benchmarks": rows,
    }
    for path in wanted:
        for row in run_file(path, args.device):
            rows.append(row)
            # After each row: a run that is cut short keeps what it has measured.
            if args.output:
                write_atomically(args.output, json.dumps(result, indent=2) + "\n")
    if args.output and not wanted:
        write_atomically(args.output, json.dumps(result, indent=2) + "\n")
    faulthandler.cancel_dump_traceback_later()
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(rows)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
