"""Steps of several micro-batches with one fetch: memory and time, compared with the engine's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import architectures
import pytest
import torch
from peak import peak_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import Budget, cli
from oracle_offload._core import BACKWARD, FORWARD, RECOMPUTE
from oracle_offload.engine import simulator
from oracle_offload.engine.simulated_time import SimulatedTime
from oracle_offload.model.witness import Witness
from oracle_offload.planning.measure import Stage, Step
from oracle_offload.planning.sample import inputs
from oracle_offload.planning.speed import speed_of

NUMBER = 4
RATES = dict(link_gbps=0.05, memory_gbps=60.0, tflops=0.03, launch_s=4e-6)
TARGETS = ["q_proj", "v_proj"]


def llama() -> tuple[Any, Any]:
    kind, config = architectures.class_and_config("llama")
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=5)
    config.update(sizes)
    return kind, config


def trained(checkpointing: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    kind, config = llama()
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).requires_grad_(False).train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable()
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS))


def measured(model: Any, budget: int) -> tuple[float, int, int, int]:
    """Seconds of the third step, what moved in it, managed layers, and the peak of a fourth."""
    ids = torch.zeros(2, 48, dtype=torch.int64)

    def accumulate() -> None:
        oracle_offload.accumulate(
            lambda batch: model(input_ids=batch, labels=batch).loss / NUMBER, [ids] * NUMBER
        )

    with simulator.device("rtx4090", **RATES):
        manager = oracle_offload.attach(model, "cpu", vram_budget=budget)
        engine, number = manager.state.engine, manager.attachment.model
        try:
            for _ in range(3):
                model.zero_grad()
                begin, before = simulator.finish(), engine.stats(number)["h2d_bytes"]
                with Witness(strict=False, clock=True):
                    accumulate()
            seconds, moved = simulator.finish() - begin, engine.stats(number)["h2d_bytes"] - before
            kept = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            model.zero_grad()
            peak = peak_of(accumulate) - kept  # it makes the gradients again
            return seconds, moved, len(manager.layers), peak
        finally:
            manager.detach()


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "plain"])
def test_a_step_is_as_the_engine_and_the_allocator_have_it(checkpointing: bool, sim: Any) -> None:
    kind, config = llama()
    options: dict[str, Any] = dict(rank=4, targets=TARGETS, sample=48, batch=2, ram="64GB")
    found = oracle_offload.plan(
        kind,
        config=config,
        micro_batches=NUMBER,
        checkpointing=checkpointing,
        budget=Budget(offload_percent=0.5),
        **options,
        **RATES,
    )
    assert found.step.together and found.fit.x_min_bytes > 0
    seconds, moved, layers, peak = measured(trained(checkpointing), found.fit.arena_bytes)
    assert layers > 20
    assert found.speed.step_s == pytest.approx(seconds, rel=0.03)
    assert found.speed.h2d_bytes == pytest.approx(moved, rel=0.03)
    error = found.step.activations / peak - 1
    print(f"{NUMBER} micro-batches, checkpointing={checkpointing}: {100 * error:+.2f}%")
    assert abs(error) <= 0.07


SAMPLES: dict[str, Any] = {"flux": (128, 128), "llama": 48, "unet": (128, 128)}
ADAPTED = {"flux": ["to_q", "to_v"], "llama": TARGETS, "unet": ["to_q", "to_v"]}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "plain"])
@pytest.mark.parametrize("name", SAMPLES)
def test_the_memory_of_micro_batches_is_as_planned(
    name: str, checkpointing: bool, sim: Any
) -> None:
    """All activations of each, or with checkpointing the inputs of blocks and one block."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    kind, config = llama() if name == "llama" else architectures.class_and_config(name)
    options: dict[str, Any] = dict(
        config=config,
        dtype="fp32",
        rank=4,
        targets=ADAPTED[name],
        sample=SAMPLES[name],
        batch=2,
        checkpointing=checkpointing,
        ram="64GB",
        budget=Budget(offload_percent=0.5),
    )
    found = oracle_offload.plan(kind, micro_batches=NUMBER, **options)
    one = oracle_offload.plan(kind, **options).step.activations
    assert found.step.together and one is not None

    model = kind(config) if name == "llama" else architectures.real(name)
    model.requires_grad_(False).train()
    given = inputs(model, SAMPLES[name], 2)[0]
    if name == "llama":
        model.config.use_cache = False
    if checkpointing:
        getattr(model, found.to_dict()["python"].splitlines()[0].split(".")[1][:-2])()
        model.enable_input_require_grads() if name == "llama" else None
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=ADAPTED[name])
    model = get_peft_model(model, lora) if name == "llama" else model
    if name != "llama":
        model.add_adapter(lora)

    def step(_: int) -> torch.Tensor:
        output = model(**given)
        loss: torch.Tensor = (
            output.loss if name == "llama" else output.sample.float().square().mean()
        )
        return loss

    def accumulate() -> None:
        oracle_offload.accumulate(step, range(NUMBER))

    manager = oracle_offload.attach(model, "cpu", vram_budget=found.fit.arena_bytes)
    try:
        assert len(manager.layers) > 10
        accumulate()
        kept = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        model.zero_grad()
        peak = peak_of(accumulate) - kept
    finally:
        manager.detach()
    error = found.step.activations / peak - 1
    print(f"{name}, checkpointing={checkpointing}: {100 * error:+.2f}%, {peak / one:.2f} of one's")
    assert abs(error) <= 0.07
    least = 1.2 if checkpointing else 0.7 * NUMBER
    assert least * one < peak < (0.8 if checkpointing else 1.1) * NUMBER * one


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_arena_below_one_block_fetches_it_for_each_micro_batch(
    reentrant: bool, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region is not divided: its last layer too, which a checkpoint need not compute again."""
    kind, config = llama()
    enable = kind.gradient_checkpointing_enable
    how = {"use_reentrant": reentrant}
    monkeypatch.setattr(
        kind,
        "gradient_checkpointing_enable",
        lambda self: enable(self, gradient_checkpointing_kwargs=how),
    )
    found = oracle_offload.plan(
        kind,
        config=config,
        micro_batches=NUMBER,
        budget=Budget(offload_percent=0.9),
        rank=4,
        targets=TARGETS,
        sample=48,
        batch=2,
        ram="64GB",
        **RATES,
    )
    block = {name for name in found.step.numbers if ".layers.3." in name}
    regions = {found.step.regions[found.step.numbers[name]] for name in block}
    assert len(block) == 7 and len(regions) == 1, "with its last layer"
    little = replace(found.fit, arena_bytes=200_000)
    speed = speed_of(found.step, little, found.question.card)
    model = trained(True)
    model.enable_input_require_grads()
    seconds, moved, _, _ = measured(model, little.arena_bytes)
    assert speed.step_s == pytest.approx(seconds, rel=0.05)
    assert speed.h2d_bytes == pytest.approx(moved, rel=0.05)


def test_what_waits_counts_once_for_each_micro_batch_that_waits() -> None:
    step = Step([Stage(50, 30), Stage(90, 30), Stage(100, 20)])
    assert step.activations == 100 and Step().activations is None
    assert Step(step.stages, micro_batches=3).activations == 100, "a loop keeps those of one"
    assert Step(step.stages, micro_batches=2, together=True).activations == 120
    assert Step(step.stages, micro_batches=3, together=True).activations == 150


def test_a_checkpointed_region_is_computed_as_a_whole_by_one_after_the_other() -> None:
    """Leaf 0 is in a region, leaf 1 is not; each has one operator forward and one backward."""
    work = [(1e6, 10, torch.bfloat16, False)]
    uses = ((0, FORWARD), (1, FORWARD), (1, BACKWARD), (0, RECOMPUTE), (0, BACKWARD))
    events: list[tuple[Any, ...]] = []
    for ticket, (leaf, kind) in enumerate(uses):
        events += [("acquire", leaf, kind, ticket), ("work", work), ("release", ticket)]
    one = Step(events=events, regions={0: 1})
    two = Step(events=events, regions={0: 1}, micro_batches=2, together=True)
    time = SimulatedTime(simulator.get_device(0))
    replayed = two.replayed(time)
    acquired = [event for event in replayed if event[0] == "acquire"]
    assert [(event[1], event[2]) for event in acquired] == [
        *[(0, FORWARD)] * 2,
        (1, FORWARD),
        (1, BACKWARD),
        *[(0, RECOMPUTE), (0, BACKWARD)] * 2,
    ]
    tickets = [event[-1] for event in acquired]
    assert len(set(tickets)) == len(tickets)
    assert tickets == [event[1] for event in replayed if event[0] == "release"]
    single = next(event[1] for event in one.replayed(time) if event[0] == "launch")
    shares = [round(event[1] / single) for event in replayed if event[0] == "launch"]
    assert shares == [1, 1, 2, 2, 1, 1, 1, 1]
    assert sum(two.phases(time)) == pytest.approx(sum(shares) * single)


class Nested(nn.Module):
    """A checkpointed region in another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.outer, self.inner, self.last = (nn.Linear(256, 256) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.outer(x))
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
            return y

        y: torch.Tensor = checkpoint(region, self.first(x), use_reentrant=self.reentrant)
        return torch.tanh(self.last(y))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_inside_another_is_of_that_one(reentrant: bool) -> None:
    """Backward computes the outer one again, and in it the inner one once more."""
    given: dict[str, Any] = dict(train="full", optimizer="sgd", sample={"x": (64, 256)})
    step = oracle_offload.plan(Nested(reentrant), vram="1GiB", ram="1GiB", **given).step
    assert step.regions == {step.numbers["outer"]: 1, step.numbers["inner"]: 1}


def planned(**options: Any) -> oracle_offload.planning.Plan:
    """Of plain blocks, whose activations are what backward needs of each."""
    given = dict(train="full", optimizer="sgd", sample={"input": (64, 256)}, ram="1GiB", margin=0)
    blocks = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    return oracle_offload.plan(blocks, **{"vram": "4MiB", **given, **options})


def test_where_all_weights_have_room_it_is_the_loop() -> None:
    resident = planned(vram="1GiB", micro_batches=4)
    assert resident.verdict == "fits resident" and not resident.step.together
    one = planned(vram="1GiB")
    assert resident.step.activations == one.step.activations
    assert resident.speed.step_s == pytest.approx(4 * one.speed.step_s)
    streamed = planned(micro_batches=4)
    assert streamed.verdict == "fits streamed" and not streamed.step.together
    little = planned(vram="2MiB", micro_batches=4)
    assert little.step.together
    rows = 64 * 256 * 4
    more = little.step.activations - planned(vram="2MiB").step.activations
    assert more >= 3 * 8 * rows, "each waits with what its blocks take"
    assert little.fit.device["activations"] == little.step.activations
    assert little.on(vram="1GiB", ram="1GiB").step.activations == one.step.activations


def test_the_ladder_weighs_micro_batches_against_the_loop() -> None:
    found = planned(vram="2MiB", micro_batches=4)
    rungs = {rung.option: rung for rung in found.alternatives}
    rung = rungs["micro_batches=1"]
    one = planned(vram="2MiB")
    assert rung.saves_device == found.fit.least_device_bytes - one.fit.least_device_bytes > 0
    assert not rung.changes_result and rung.verdict == one.verdict
    wide = planned(vram="2MiB", batch=4)
    rungs = {rung.option: rung for rung in wide.alternatives}
    assert "batch=1" in rungs
    assert all(rung.saves_device > 0 or rung.saves_host > 0 for rung in rungs.values())


def test_what_is_pasted_says_how_many_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(vram="2MiB", micro_batches=2).to_dict()
    assert "2 micro-batches" in said["python"] and "oracle_offload.accumulate(" in said["python"]
    assert "gradient_accumulation: 2\n" in said["aitoolkit"]
    assert "  layer_offloading_accumulate: true\n" in said["aitoolkit"]
    alone = planned(vram="2MiB").to_dict()
    assert "accumulat" not in alone["python"] + alone["aitoolkit"]
    with pytest.raises(ValueError, match=re.escape("micro_batches=0 is not a whole number")):
        planned(micro_batches=0)
    command = ["plan", "1B", "--micro-batches", "3", "--card", "24", "--ram", "64GB"]
    assert cli.main(command) == 0
    assert "gradient_accumulation: 3" in capsys.readouterr().out
