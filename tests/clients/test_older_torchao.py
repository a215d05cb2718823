"""torchao 0.10, whose tensors are nested, in a process of its own: here there is a later one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = Path(sys.prefix) / "beside"


def test_nested_tensors_travel_as_they_are_with_the_residents_bits():
    assert (FOLDER / "torchao").is_dir(), (
        f"there is no torchao in {FOLDER}; make it with: python -m pip install --no-deps "
        f"--target {FOLDER} -r tools/requirements-beside.txt"
    )
    ran = subprocess.run(
        [sys.executable, str(HERE / "older_torchao.py"), str(FOLDER)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    modes = [line.split() for line in ran.stdout.splitlines() if "Config" in line]
    assert [config for config, _ in modes] == (
        ["Int8WeightOnlyConfig"] * 4
        + ["Float8WeightOnlyConfig"] * 4
        + ["Int8DynamicActivationInt8WeightConfig"]
    )
