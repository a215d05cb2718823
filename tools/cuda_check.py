"""What `make cuda-check` runs on PyTorch's CUDA build over the simulated driver, without a GPU.

    python tools/cuda_check.py               # every part
    python tools/cuda_check.py core          # what `make cuda-core` runs
    python tools/cuda_check.py gpu demo      # some
    python tools/cuda_check.py --resume      # without those that have passed since they last failed
    python tools/cuda_check.py --patience 4  # limits of a machine that is busy
    python tools/cuda_check.py --list

The parts run one after the other, tests in processes side by side. What a part says goes to
out/cuda-check/; of one that failed the end is printed. The last line has the counts. Tests of which
none ran, as all were skipped, have failed. AI-Toolkit's own code runs in what it pins, in
.venv-aitoolkit: where that or its source is not at hand, the part says so and is left out; who
names the part wants it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
TOOLKIT = ROOT / ".venv-aitoolkit"
SOURCE = Path(os.environ.get("TOOLKIT") or TOOLKIT / "source")
OUTPUT = ROOT / "out" / "cuda-check"
PYTEST = (
    *("-m", "pytest", "-o", "addopts=", "-ra", "--strict-markers", "-q", "-p", "no:cacheprovider"),
    *("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--junitxml={junit}"),
)
ON_CUDA = ("--device", "cuda", "-m", "not slow")


def continue_in_environment() -> None:
    """Go on in the Python of .venv-cuda, where this one is another."""
    if os.environ.get("CUDA_SIM") == "0":
        raise SystemExit("CUDA_SIM=0 leaves out the driver that all of this runs on")
    if "before_torch" in sys.modules:
        return
    if not PYTHON.is_file():
        raise SystemExit("there is no .venv-cuda: make cuda-build makes it")
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


def files(*names: str, folder: str = "training") -> tuple[str, ...]:
    """Return the paths of test files."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


@dataclass(frozen=True)
class Part:
    """One process: its command after the interpreter; {junit} is the file for its counts."""

    name: str
    command: tuple[str, ...]
    limit_s: float = 3600
    environment: tuple[tuple[str, str], ...] = ()
    python: Path = Path(sys.executable)
    needs: tuple[Path, ...] = ()

    @property
    def counted(self) -> bool:
        """Whether it counts tests."""
        return "--junitxml={junit}" in self.command

    def lacking(self) -> str:
        """Return what it needs and is not there; "" where nothing is lacking."""
        return ", ".join(str(path) for path in self.needs if not path.exists())


def gpu_check(name: str, *only: str) -> Part:
    """Return parts of gpu-check: its own code, and the C programs that it measures with."""
    return Part(
        name,
        (
            *("tools/gpu_check.py", "--keep-going", "--budget-s", "3000", "--patience", "8"),
            *("--only", ",".join(only), "--results", str(OUTPUT / "gpu-check")),
        ),
        3300,
        # Its C programs look for the driver as any program does. In a card's sizes a processor
        # multiplies matrices for hours, and lock fills more memory than there is.
        (("LD_LIBRARY_PATH", str(ROOT / "build" / "cuda")), ("GPU_CHECK_SIZES", "small")),
    )


CORE = (
    Part(
        "core",
        (
            *(*PYTEST, *ON_CUDA, *files("matrix", "writes", "exceptions", "models", "compress")),
            *files("any", "convolutions"),
        ),
    ),
    Part("core, the room's own tests", (*PYTEST, "tests/cuda")),
    Part(
        "core, pipelines",
        (*PYTEST, *ON_CUDA, "-k", "pipeline", *files("diffusers", folder="clients")),
    ),
    gpu_check("core, gpu-check", "machine", "conformance", "calls"),
    Part("core, demo", ("-m", "oracle_offload", "demo", "--device", "cuda", "--steps", "3")),
)
PARTS = (
    Part("room", (*PYTEST, "tests/cuda")),
    Part("training", (*PYTEST, "tests/training", *ON_CUDA)),
    # What takes a device has run in "training" with it.
    Part("gpu", (*PYTEST, "tests", "--ignore=tests/cuda", "-m", "gpu", "-k", "not [cuda")),
    Part("clients", (*PYTEST, "tests/clients", *ON_CUDA), 10800),
    Part(
        *("aitoolkit", (*PYTEST, "tests/toolkit", *ON_CUDA), 10800),
        (("TOOLKIT", str(SOURCE)),),
        TOOLKIT / "bin" / "python",
        (
            TOOLKIT / "bin" / "python",
            ROOT / "build" / "aitoolkit" / "liboperators.so",
            SOURCE / "run.py",
        ),
    ),
    Part("notebook", (*PYTEST, *files("notebook_docs", folder="unit"), "-m", "")),
    Part("demo", ("-m", "oracle_offload", "demo", "--device", "cuda", "--steps", "6")),
    # Its tests run above; "faults" fills a card's memory, which is the host's here.
    gpu_check(
        *("gpu-check", "machine", "ram", "conformance", "rates", "link", "step", "rivals", "bits"),
        *("unet", "calls", "layers", "rivals_more", "lock", "memory", "decode", "formats"),
    ),
)


def run(
    part: Part, resume: bool = False, patience: float = 1.0
) -> tuple[bool, dict[str, int], float]:
    """Run a part; return whether it passed, its counts, and its seconds.

    With `resume` what has passed does not run again; it is forgotten when it runs. Its limit is
    longer by `patience`.
    """
    limit_s = part.limit_s * patience
    begun = time.monotonic()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isalnum() else "-" for c in part.name)
    log, junit, record = (OUTPUT / f"{stem}.{kind}" for kind in ("log", "xml", "passed.json"))
    if resume and record.is_file():
        return True, json.loads(record.read_text(encoding="utf-8")), 0.0
    record.unlink(missing_ok=True)
    junit.unlink(missing_ok=True)
    command = [word.replace("{junit}", str(junit)) for word in part.command]
    with log.open("w", encoding="utf-8") as said:
        try:
            code = subprocess.run(
                [str(part.python), *command],
                cwd=ROOT,
                env={**os.environ, **dict(part.environment)},
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            said.write(f"\nended after {limit_s:.0f} s\n")
            code = 1
    counts = {"passed": int(not code), "failed": int(code != 0)}
    if part.counted:
        counts = counted(junit)
        code = code or not counts["passed"]
    if code:
        print(log.read_text(encoding="utf-8")[-6000:])
    else:
        record.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    return code == 0, counts, time.monotonic() - begun


def counted(junit: Path) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    if not junit.is_file():
        return {"passed": 0, "failed": 1, "skipped": 0}
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = sum(any(case.find(k) is not None for k in ("failure", "error")) for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are named; 1 where one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts, or core; default: every part")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    parser.add_argument("--resume", action="store_true", help="leave out parts that have passed")
    parser.add_argument("--patience", type=float, default=1.0, help="by which limits are longer")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    known = {part.name: part for part in PARTS}
    unknown = sorted(set(args.names) - {*known, "core"})
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are core, {', '.join(known)}")
    chosen: list[Part] = []
    for name in args.names or known:
        chosen += CORE if name == "core" else [known[name]]
    if args.list:
        for part in chosen:
            print(f"{part.name:28} python {' '.join(part.command)}")
        return 0
    continue_in_environment()
    total = {"passed": 0, "failed": 0, "skipped": 0}
    good = True
    for part in chosen:
        if lacking := part.lacking():
            good &= part.name not in args.names
            print(f"none {part.name:28} make aitoolkit-environment brings {lacking}", flush=True)
            continue
        print(f"{part.name} ...", flush=True)
        passed, counts, seconds = run(part, args.resume, args.patience)
        good &= passed
        for what, number in counts.items():
            total[what] += number
        shown = ", ".join(f"{number} {what}" for what, number in counts.items())
        row = f"{'ok  ' if passed else 'FAIL'} {part.name:28} {seconds:5.0f} s  {shown}"
        print(row, flush=True)
    print(", ".join(f"{number} {what}" for what, number in total.items()))
    if args.output:
        figures = {"tests": total["passed"] + total["failed"], **total}
        args.output.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
