"""Fetch the wheels that a GPU machine without a network lacks (tools/requirements-gpu.txt).

They are for Python 3.12 on x86_64 Linux, whatever machine this runs on. `make gpu-check WHEELS=dir`
installs them there into a folder of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
PYTHON_VERSION = "3.12"
# pip matches the glibc version of a platform tag exactly.
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
LIMIT_BYTES = 60 * 2**20
# Never carried: the GPU machine's own torch is the one that is tested.
FORBIDDEN = ("torch-", "nvidia_", "triton-", "numpy-")


def download(output: Path, requirements: Path) -> None:
    """Run pip; raises `subprocess.CalledProcessError` when a wheel cannot be had."""
    output.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON_VERSION, "--implementation", "cp"),
        *(word for platform in PLATFORMS for word in ("--platform", platform)),
        *("--dest", str(output), "--requirement", str(requirements)),
    ]
    subprocess.run(command, check=True)


def remove_others(output: Path, requirements: Path) -> None:
    """Delete wheels of other versions: two of one package stop the whole installation."""
    wanted = {
        tuple(normal(part) for part in line.split("=="))
        for line in requirements.read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    }
    for wheel in output.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        if (normal(name), normal(version)) not in wanted:
            wheel.unlink()


def normal(text: str) -> str:
    """Return a distribution's name or version as wheels' file names and pins can be compared."""
    return text.strip().lower().replace("-", "_").replace(".", "_")


def check(output: Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Return the bytes of all wheels.

    Raises
    ------
    ValueError
        When they are too large together, none is there, or one would shadow the machine's torch.
    """
    wheels = sorted(output.glob("*.whl"))
    if not wheels:
        raise ValueError(f"no wheel in {output}")
    forbidden = [w.name for w in wheels if w.name.startswith(FORBIDDEN)]
    if forbidden:
        raise ValueError(f"{', '.join(forbidden)} would replace the GPU machine's own")
    total = sum(w.stat().st_size for w in wheels)
    if total > limit_bytes:
        largest = max(wheels, key=lambda w: w.stat().st_size)
        raise ValueError(
            f"{output} holds {total / 2**20:.1f} MiB, more than {limit_bytes / 2**20:.0f} MiB; the "
            f"largest is {largest.name} ({largest.stat().st_size / 2**20:.1f} MiB)"
        )
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch and check; 1 with a reason when something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(".whl"))
    args = parser.parse_args(argv)
    requirements = TOOLS / "requirements-gpu.txt"
    try:
        download(args.output, requirements)
        remove_others(args.output, requirements)
        total = check(args.output)
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"gpu-wheels: {error}", file=sys.stderr)
        return 1
    count = len(list(args.output.glob("*.whl")))
    print(f"{count} wheels, {total / 2**20:.1f} MiB, in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
