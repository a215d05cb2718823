"""torchao 0.10, whose tensors are nested, in a process of its own: here there is a later one."""

from __future__ import annotations

from pathlib import Path

import beside


def test_nested_tensors_travel_as_they_are_with_the_residents_bits(device):
    script = Path(__file__).resolve().parent / "older_torchao.py"
    printed = beside.run(script, beside.FOLDER, device)
    modes = [line.split() for line in printed.splitlines() if "Config" in line]
    assert [config for config, _ in modes] == (
        ["Int8WeightOnlyConfig"] * 4
        + ["Float8WeightOnlyConfig"] * 4
        + ["Int8DynamicActivationInt8WeightConfig"]
    )
