"""What the demonstration says of a result, and the exit code it ends with; without training."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from oracle_offload import cli
from oracle_offload.commands import demo
from oracle_offload.commands.demo import DemoResult, describe

MIB = 1 << 20
RESULT = DemoResult(
    device="cpu",
    device_name="NVIDIA GeForce RTX 4090",
    simulated=True,
    torch_version="2.13.0",
    seed=0,
    width=128,
    parameters=12_340_000,
    weight_bytes=24 * MIB,
    managed_bytes=20 * MIB,
    offload_percent=0.91,
    losses=[2.5, 2.25, 2.125],
    resident_losses=[2.5, 2.25, 2.125],
    equal_steps=3,
    weights_equal=True,
    residents_agree=None,
    step_s=0.012,
    resident_step_s=0.010,
    wall_s=9.5,
    step_h2d_bytes=44 * MIB,
    x_min_bytes=40 * MIB,
    arena_bytes=3 * MIB,
    peak_in_arena_bytes=2 * MIB,
    waits=96,
    timed_waits=96,
    stalls=7,
    stall_s=0.0015,
    svg="out/step.svg",
)
SAME = "RESULT: same bits as the resident training"


def test_a_simulated_run_is_told_line_by_line() -> None:
    assert describe(RESULT, "THE SUMMARY").split("\n") == [
        "FluxTransformer2DModel, 19 + 38 blocks, width 128: 12.3 M parameters, 24.00 MiB",
        "device          NVIDIA GeForce RTX 4090, simulated: every time below is",
        "                virtual time of the simulator, not of this machine",
        "losses          2.500000000 ... 2.125000000",
        "  resident      2.500000000 ... 2.125000000",
        "  equal         3 of 3 steps to the last bit; trained LoRA weights equal too",
        "time per step   12.00 ms, resident 10.00 ms: 1.200 x (simulated)",
        "to the device   44.00 MiB = 1.100 x X_min (40.00 MiB) per step",
        "arena           3.00 MiB, peak use 2.00 MiB, for 20.00 MiB of managed weights",
        "stalls          7, 1.50 ms (simulated)",
        "timeline        out/step.svg: a step from its first use of a weight to its last",
        "wall time       9.5 s for everything",
        "",
        "THE SUMMARY",
        "",
        SAME,
    ]


def test_a_measured_run_claims_no_virtual_time() -> None:
    said = describe(replace(RESULT, simulated=False, x_min_bytes=0, resident_step_s=0.0), "")
    assert "simulat" not in said and "X_min" not in said and ": nan x\n" in said
    assert "to the device   44.00 MiB per step\n" in said


@pytest.mark.parametrize(
    ("changes", "agree", "end"),
    [
        ({}, "steps to the last bit; trained LoRA weights equal too", SAME),
        ({"equal_steps": 2}, "2 of 3 steps", "RESULT: THE RUNS DIFFER"),
        ({"weights_equal": False}, "weights DIFFER", "RESULT: THE RUNS DIFFER"),
    ],
)
def test_the_last_line_is_the_verdict(changes: dict[str, Any], agree: str, end: str) -> None:
    said = describe(replace(RESULT, **changes), "")
    assert agree in said and said.endswith(f"\n{end}")
    assert "two resident runs" not in said
    unsure = describe(replace(RESULT, **changes, residents_agree=False), "")
    assert "two resident runs differ from each other" in unsure and unsure.endswith(f"\n{end}")
    assert "two resident runs" not in describe(replace(RESULT, residents_agree=True), "")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, cli.Exit.OK),
        ({"equal_steps": 2}, cli.Exit.CHECK_FAILED),
        ({"weights_equal": False}, cli.Exit.CHECK_FAILED),
        ({"equal_steps": 2, "residents_agree": True}, cli.Exit.CHECK_FAILED),
        ({"equal_steps": 2, "residents_agree": False}, cli.Exit.OK),  # it is the machine
    ],
)
def test_the_exit_code_follows_the_bits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    code: int,
) -> None:
    given: list[Any] = []

    def ended(*arguments: Any) -> tuple[DemoResult, str]:
        given.extend(arguments)
        return replace(RESULT, **changes), "the summary"

    monkeypatch.setattr(demo, "run_demo", ended)
    options = ["--device", "cpu", "--preset", "h200", "--width", "64", "--steps", "5"]
    options += ["--offload-percent", "0.5", "--seed", "3", "--svg", "x.svg"]
    assert cli.main(["demo", *options]) == code
    assert given == ["cpu", "h200", 64, 5, 0.5, 3, "x.svg"]
    assert capsys.readouterr().out == describe(replace(RESULT, **changes), "the summary") + "\n"
    assert cli.main(["demo", "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == "oracle_offload/demo/1" and shown["losses"] == RESULT.losses
    assert given[7:] == [None, None, 128, 20, 0.91, 0, "out/demo-timeline.svg"]


@pytest.mark.parametrize(
    ("seconds", "typical"),
    [([3.0], 3.0), ([9.0, 1.0], 1.0), ([9.0, 8.0, 2.0, 4.0, 3.0], 3.0), ([9, 9, 4, 1, 2, 3], 2)],
)
def test_a_typical_step_is_the_median_of_the_second_half(
    seconds: list[float], typical: float
) -> None:
    assert demo._typical(seconds) == typical


def test_weights_are_the_same_where_all_that_is_trained_is() -> None:
    import torch

    def trained(*values: float) -> Any:
        return SimpleNamespace(trained=[torch.tensor(value) for value in values])

    assert demo._same_weights(trained(1.0, 2.0), trained(1.0, 2.0))
    assert not demo._same_weights(trained(1.0, 2.0), trained(1.0, 2.5))
    assert not demo._same_weights(trained(1.0, 2.0), trained(1.5, 2.0))


def test_what_libraries_say_at_their_import_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bitsandbytes", "peft", "torchao", "torch.utils._pytree")
    before = [logging.getLogger(name).level for name in names]
    during: list[int] = []

    def ended(*given: Any) -> tuple[DemoResult, str]:
        during.extend(logging.getLogger(name).level for name in names)
        return RESULT, ""

    monkeypatch.setattr(demo, "run_demo", ended)
    assert cli.main(["demo"]) == cli.Exit.OK
    assert during == [logging.ERROR] * 4
    assert [logging.getLogger(name).level for name in names] == before


def test_steps_are_equal_one_by_one() -> None:
    assert demo._equal([1.0, 2.0, 3.0], [1.0, 2.5, 3.0]) == 2
