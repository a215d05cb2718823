"""torchao 0.10, next to the one that is installed: for a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "beside"


def run(*arguments):
    """Run Python so that it imports this torchao; return what it printed."""
    assert (FOLDER / "torchao").is_dir(), (
        f"there is no torchao in {FOLDER}; make it with: python -m pip install --no-deps "
        f"--target {FOLDER} -r tools/requirements-beside.txt"
    )
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
