"""Compare the simulated driver with recordings of real ones, case by case.

    python tools/conformance.py                              # with every committed recording
    python tools/conformance.py out/gpu-check/conformance.txt
    python tools/conformance.py --record FILE [--driver PATH]   # on a machine with a GPU

Recordings are tests/data/conformance/*.txt: what tests/c/conformance.c printed on a real driver,
under a header of `# key: value` lines. conformance.txt of `make gpu-check` is one as it is, without
the header. Where there is none, the cases run on the simulator and "no recording" is said.

Exit codes: 0 no difference, 1 cannot run, 3 a difference, or a case that fails on the simulator.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import c_build
import c_programs
from c_build import ROOT

FOLDER = ROOT / "tests" / "data" / "conformance"
TIMEOUT_S = 120
EXIT_OK, EXIT_CANNOT_RUN, EXIT_DIFFERENT = 0, 1, 3


@dataclass
class Recording:
    """What one driver answered.

    Attributes
    ----------
    header : dict
        Its `# key: value` lines.
    cases : dict
        Outcome by case: "ok", "FAILED what", "skipped why" or "observed value".
    """

    header: dict[str, str]
    cases: dict[str, str]


def parse(text: str) -> Recording:
    """Read the program's lines; those that are no case (its count, what a driver logs) are passed.

    Raises
    ------
    ValueError
        When no line is a case, or one case occurs twice.
    """
    header: dict[str, str] = {}
    cases: dict[str, str] = {}
    for line in text.splitlines():
        if comment := re.fullmatch(r"#\s*([^:]+):\s*(.*)", line):
            header[comment[1].strip()] = comment[2].strip()
        elif case := re.fullmatch(r"(\w+): ((?:ok$|FAILED|skipped|observed).*)", line.rstrip()):
            if case[1] in cases:
                raise ValueError(f"case {case[1]} occurs twice")
            cases[case[1]] = case[2]
    if not cases:
        raise ValueError("holds no line of tests/c/conformance.c: is it its output?")
    return Recording(header, cases)


def kind(outcome: str) -> str:
    """Return an outcome's first word: ok, FAILED, skipped, observed or absent."""
    return outcome.split(maxsplit=1)[0].rstrip(":")


def compare(real: Recording, simulated: Recording) -> tuple[list[str], list[str]]:
    """Return (differences, remarks).

    What the documentation leaves open ("observed") may differ: a remark. So is a case that either
    driver skips, for want of a call. A case that fails on the real driver is a difference even
    where the simulator fails too: the program's expectation is wrong.
    """
    differences, remarks = [], []
    for name in [*real.cases, *(n for n in simulated.cases if n not in real.cases)]:
        there, here = real.cases.get(name, "absent"), simulated.cases.get(name, "absent")
        kinds = {kind(there), kind(here)}
        line = f"{name}: real {there}; simulated {here}"
        if there == "absent":
            remarks.append(f"{line} (newer than the recording)")
        elif here == "absent":
            differences.append(f"{line} (the case is gone or was renamed)")
        elif "FAILED" in kinds:
            differences.append(line)
        elif there != here:
            open_value = kinds == {"observed"} or "skipped" in kinds
            (remarks if open_value else differences).append(line)
    return differences, remarks


def run_program(driver: str | None) -> tuple[int, str]:
    """Run the cases on the simulated driver (None) or on the library `driver` ("": the system's).

    Raises
    ------
    c_build.BuildError
        When it does not compile.
    """
    variant = c_build.checked(warnings="shown")
    built = c_programs.build(variant, ["conformance"])
    if driver is None:
        done = c_programs.run(variant, built, "conformance", timeout_s=TIMEOUT_S)
        return done.returncode, done.stdout
    environment = {k: v for k, v in os.environ.items() if k != "ORACLE_OFFLOAD_DRIVER"}
    command = [str(built.programs["conformance"]), *([driver] if driver else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout


def describe_driver(path: str) -> dict[str, str]:
    """Return device, CUDA version and kernel driver of the library at `path`, for a header.

    Raises
    ------
    OSError
        Without such a library.
    """
    cuda = ctypes.CDLL(path or ("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    version, device = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(256)
    if cuda.cuInit(0) != 0:
        raise OSError("cuInit fails: no device")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, len(name), device)
    found = {
        "device": name.value.decode(),
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
    }
    kernel = Path("/proc/driver/nvidia/version")
    if kernel.is_file():
        found["driver"] = kernel.read_text(encoding="utf-8").splitlines()[0]
    return {**found, "simulated": "yes" if hasattr(cuda, "simReset") else "no"}


def record(target: Path, driver: str) -> int:
    """Write a recording of `driver` to `target`; 0 when every case passed."""
    try:
        header = describe_driver(driver)
    except OSError as error:
        print(f"conformance: no driver to record: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    header["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    status, output = run_program(driver)
    try:
        parse(output)
    except ValueError as error:
        print(f"conformance: the output {error}\n{output}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {key}: {value}" for key, value in header.items()]
    target.write_text("\n".join(lines) + "\n" + output, encoding="utf-8")
    print(f"recorded {header['device']} in {target}; the program ended with {status}")
    return EXIT_OK if status == 0 else EXIT_DIFFERENT


def main(argv: Sequence[str] | None = None) -> int:
    """Compare or record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recordings", nargs="*", type=Path, help="default: all committed ones")
    parser.add_argument("--record", type=Path, help="write this file instead")
    parser.add_argument("--driver", default="", help="library to record; default: the system's")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    try:
        if args.record:
            return record(args.record, args.driver)
        status, output = run_program(None)
    except c_build.BuildError as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    simulated = parse(output)
    print(f"simulated driver: {output.splitlines()[-1]} in {len(simulated.cases)} cases")
    failed = status != 0
    recordings = args.recordings or sorted(FOLDER.glob("*.txt"))
    if failed:
        print("\n".join(f"{n}: {o}" for n, o in simulated.cases.items() if o.startswith("FAILED")))
    if not recordings:
        print(f"no recording in {FOLDER.relative_to(ROOT)}: nothing real to compare with")
    for path in recordings:
        try:
            real = parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return EXIT_CANNOT_RUN
        differences, remarks = compare(real, simulated)
        of = real.header.get("device", "a device that its header does not name")
        print(f"{path.name} ({of}): {len(differences)} differences, {len(remarks)} remarks")
        for line in [*differences, *(f"remark: {remark}" for remark in remarks)]:
            print(line)
        failed |= bool(differences)
    if args.output:
        good = sum(not outcome.startswith("FAILED") for outcome in simulated.cases.values())
        report = {
            "schema": "oracle_offload/conformance/1",
            "cases": len(simulated.cases),
            "passed": good,
            "recordings": len(recordings),
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return EXIT_DIFFERENT if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
