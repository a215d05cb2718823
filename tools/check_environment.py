"""Say what an environment that someone else owns lacks; install nothing into it."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent

# What a target cannot do without. The rest of the pinned set is optional: tests that need it skip
# and say so, but for tests/clients, which fail.
NEEDED = {
    "test": ("torch", "numpy", "setuptools", "pytest", "hypothesis", "tqdm", "platformdirs"),
    "lint": ("ruff", "mypy", "clang-format"),
    "analysis": ("clang-tidy", "cppcheck"),
    "site": ("torch", "Sphinx", "myst-parser", "furo"),
    "screenshots": ("torch", "nbconvert", "ipykernel"),
}


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins(what: str) -> dict[str, str]:
    """Return name -> version from tools/requirements-`what`.txt and the torch set."""
    found: dict[str, str] = {}
    for name in (what, "torch"):
        text = (TOOLS / f"requirements-{name}.txt").read_text(encoding="utf-8")
        found.update(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE))
    return found


def complaint(what: str) -> str:
    """Return what is missing and the command that installs it, or an empty string."""
    if sys.version_info < (3, 11):  # noqa: UP036 - PYTHON may name any version
        return f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or later is needed"
    missing = [name for name in NEEDED[what] if installed(name) is None]
    if not missing:
        return ""
    if "torch" in missing:
        return (
            f"{sys.executable} has no torch; install the build that fits this machine, or leave "
            "PYTHON unset: `make` then creates .venv with everything pinned"
        )
    pinned = pins(what)
    wanted = [f"{name}=={pinned[name]}" if name in pinned else name for name in missing]
    # Naming the installed torch keeps pip from replacing it.
    wanted.append(f"torch=={installed('torch')}")
    return (
        f"{sys.executable} lacks {', '.join(missing)}; install with\n"
        f"  {sys.executable} -m pip install {' '.join(wanted)}"
    )


def main() -> int:
    """Exit 0 when the environment is fit for the target named by the first argument."""
    if len(sys.argv) != 2 or sys.argv[1] not in NEEDED:
        print(f"usage: check_environment.py {{{','.join(NEEDED)}}}", file=sys.stderr)
        return 2
    said = complaint(sys.argv[1])
    if said:
        print(said, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
