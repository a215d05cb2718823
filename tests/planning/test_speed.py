"""The time of a planned step, compared with the engine's own step in virtual time."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload import Budget
from oracle_offload._core import BACKWARD, FORWARD
from oracle_offload.engine import simulator
from oracle_offload.engine.geometry import tensor_bytes
from oracle_offload.engine.simulated_time import SimulatedTime
from oracle_offload.model.witness import Witness
from oracle_offload.planning.cards import card_of
from oracle_offload.planning.fit import Fit, fit_step
from oracle_offload.planning.measure import Step
from oracle_offload.planning.speed import Speed, question, speed_of

# Rates that no preset has: link GB/s, device memory GB/s, TFLOP/s, seconds of a launch. From one
# that the link holds up by far to one that computes all the time.
RATES = (
    (0.05, 40.0, 0.02, 2e-6),
    (0.08, 15.0, 0.01, 9e-6),
    (0.2, 60.0, 0.03, 4e-6),
    (0.4, 25.0, 0.008, 12e-6),
    (1.3, 90.0, 0.05, 3e-6),
)
NAMES = ("flux", "llama")
SHARES = (1.0, 0.8, 0.5, 0.2)  # of the weights that have no room
CELLS = list(itertools.product(NAMES, SHARES, RATES))
SAMPLES: dict[str, Any] = {"flux": (128, 128), "llama": 48}


def test_there_are_forty_cells_beside_the_presets() -> None:
    assert len(CELLS) == 40
    for name in simulator.PRESETS:
        known = simulator.preset(name)
        for link, memory, tflops, launch in RATES:
            assert link != known.link_gbps and launch != known.launch_s
            assert (memory, tflops) != (known.memory_gbps, known.tflops)


class Late(torch.nn.Module):
    """What is trained comes after three quarters of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(16))
        self.adapter = torch.nn.Linear(256, 256, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            input = layer(input).tanh()
            if number == 11:
                input = input + self.adapter(input)
        return input


def test_the_least_bytes_are_fewer_where_backward_ends_early(sim: Any) -> None:
    torch.manual_seed(0)
    layer = 256 * 256 * 4
    found = oracle_offload.plan(
        Late(),
        sample={"input": (4, 256)},
        rank=1,
        targets="adapter",
        card=24,
        ram="64GB",
        budget=Budget(offload_percent=1.0),
    )
    arena = found.fit.arena_bytes
    # The adapter is a layer of the planned model, and adapted by a LoRA there.
    assert found.fit.sweep_bytes == (17 * layer, 4 * layer)
    assert found.fit.x_min_bytes == max(0, 17 * layer - arena) + max(0, 4 * layer - arena)
    unknown = oracle_offload.plan(
        Late(),
        measure=False,
        card=24,
        ram="64GB",
        budget=Budget(offload_percent=1.0),
        targets="adapter",
    )
    assert unknown.fit.x_min_bytes == 2 * (17 * layer - arena) > found.fit.x_min_bytes
    assert "in a step that uses all of them forward" in unknown.sentence()
    assert "in a step;" in found.sentence()

    model = Late().requires_grad_(False)
    model.adapter.requires_grad_(True)
    manager = oracle_offload.attach(model, "cpu", vram_budget=arena, ignore_modules=[model.adapter])
    try:
        engine, number = manager.state.engine, manager.attachment.model
        x = torch.randn(4, 256)
        for _ in range(4):
            before = engine.stats(number)["h2d_bytes"]
            model(x).square().mean().backward()
            moved = engine.stats(number)["h2d_bytes"] - before
    finally:
        manager.detach()
    least = max(0, 16 * layer - arena) + max(0, 4 * layer - arena)
    assert least <= moved < 2 * (16 * layer - arena), "the old count was above what moved"


def test_the_bound_is_of_the_weights_that_each_half_computes_with() -> None:
    """Backward ends at the first LoRA; the weight of its layer is not used again either."""
    layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    found = {
        target: oracle_offload.plan(
            model,
            sample={"input": (4, 256)},
            rank=1,
            targets=target,
            card=24,
            ram="64GB",
            budget=Budget(offload_percent=1.0),
            link_gbps=0.5,
        )
        for target in ("11", "0")
    }
    copied = {target: one.speed.bound_s * 1.05 * 0.5e9 for target, one in found.items()}
    nbytes, arena = 4 * 256 * 256, found["0"].fit.arena_bytes
    assert copied["11"] == pytest.approx(12 * nbytes - arena, rel=0.02)
    assert copied["0"] == pytest.approx((12 + 11) * nbytes - 2 * arena, rel=0.02)
    for one in found.values():
        assert one.speed.bound_s <= one.speed.low_s


def test_a_replay_that_fails_leaves_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    options = dict(
        rank=1, card=24, ram="64GB", budget=Budget(offload_percent=1.0), sample={"input": (4, 256)}
    )
    found = oracle_offload.plan(model, **options)
    assert found.verdict == "fits streamed"
    assert found.speed.step_s is None and "failed with code 1: nothing" in str(found)


def sized(name: str) -> tuple[Any, Any]:
    """A model that is wide enough for its weights to count."""
    kind, config = architectures.class_and_config(name)
    if name == "flux":
        wider = dict(attention_head_dim=32, num_attention_heads=4, axes_dims_rope=(8, 12, 12))
        return kind, {**config, **wider, "num_layers": 2, "num_single_layers": 3}
    config.update(dict(hidden_size=192, intermediate_size=384, num_hidden_layers=5))
    return kind, config


def trained(name: str) -> Any:
    """The model with a LoRA, checkpointed, as the plan has it."""
    from peft import LoraConfig, get_peft_model

    kind, config = sized(name)
    torch.manual_seed(0)
    model = kind.from_config(config) if isinstance(config, dict) else kind(config)
    model = model.to(torch.bfloat16).requires_grad_(False).train()
    if name == "flux":
        model.enable_gradient_checkpointing()
        model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"]))


def arguments(name: str, model: Any) -> dict[str, Any]:
    from oracle_offload.planning.sample import inputs

    base = model if name == "flux" else model.get_base_model()
    return inputs(base, SAMPLES[name], 1)[0]


@functools.cache
def planned(name: str) -> oracle_offload.planning.Plan:
    """A plan, whose step is measured once."""
    kind, config = sized(name)
    targets = ["to_q", "to_v"] if name == "flux" else ["q_proj", "v_proj"]
    return oracle_offload.plan(
        kind, config=config, rank=4, targets=targets, sample=SAMPLES[name], card=24, ram="64GB"
    )


def measured(name: str, budget: int) -> tuple[float, int]:
    """Seconds of the third step, in virtual time, and what moved to the device in it."""
    model = trained(name)
    batch = arguments(name, model)
    manager = oracle_offload.attach(model, "cpu", vram_budget=budget)
    engine, number = manager.state.engine, manager.attachment.model
    seconds, moved = 0.0, 0
    try:
        for _ in range(3):
            begin, before = simulator.finish(), engine.stats(number)["h2d_bytes"]
            with Witness(strict=False, clock=True):
                output = model(**batch)
                loss = output.loss if name == "llama" else output.sample.float().square().mean()
                loss.backward()
            seconds, moved = simulator.finish() - begin, engine.stats(number)["h2d_bytes"] - before
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        assert len(manager.layers) > 20 and moved > 0
        return seconds, moved
    finally:
        manager.detach()


def compare(name: str, share: float, rates: tuple[float, ...]) -> None:
    given = dict(zip(("link_gbps", "memory_gbps", "tflops", "launch_s"), rates, strict=True))
    found = planned(name).on(24, ram="64GB", budget=Budget(offload_percent=share), **given)
    with simulator.device("rtx4090", **given):
        seconds, moved = measured(name, found.fit.arena_bytes)
    speed = found.speed
    assert speed.step_s == pytest.approx(seconds, rel=0.03)
    assert speed.h2d_bytes == pytest.approx(moved, rel=0.03)
    assert speed.low_s is not None and speed.high_s is not None and speed.bound_s is not None
    assert speed.low_s <= seconds <= speed.high_s
    assert speed.high_s - speed.low_s <= 0.25 * speed.step_s
    assert speed.bound_s <= 1.03 * seconds


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share", "rates"), CELLS)
def test_a_step_is_within_three_percent_of_the_engines(
    name: str, share: float, rates: tuple[float, ...], sim: Any
) -> None:
    compare(name, share, rates)


@pytest.mark.parametrize("cell", [("flux", 0, 0), ("llama", 1, 1), ("llama", 2, 2), ("flux", 3, 4)])
def test_one_cell_of_each_share(cell: tuple[str, int, int], sim: Any) -> None:
    name, share, rates = cell
    compare(name, SHARES[share], RATES[rates])


def test_a_replay_imports_no_torch() -> None:
    """It would take longer than the replay."""
    code = (
        "import sys, oracle_offload.engine.replay as r; r.main(); sys.exit('torch' in sys.modules)"
    )
    root = Path(oracle_offload.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], input=b"", cwd=root, check=False)
    assert done.returncode == 0


# ---- with a step by hand ----

LAYER = 512 * 512 * 2  # bytes


def by_hand(
    forward: float, backward: float, host: str | int = "64GB", width: int = 512, **options: Any
) -> tuple[Step, Fit]:
    """A step that uses each of four layers twice, with so many operations in each use."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    found = oracle_offload.plan(
        model,
        dtype="bf16",
        rank=1,
        card=24,
        ram=host,
        vram="4MiB",
        budget=Budget(offload_percent=1.0),
        margin=0,
        measure=False,
        **options,
    )
    events: list[tuple[Any, ...]] = []
    uses = [*((n, FORWARD) for n in range(4)), *((n, BACKWARD) for n in (3, 2, 1))]
    for place, (leaf, kind) in enumerate(uses):
        ticket = place + 1  # leaves and tickets have numbers of their own
        flops = forward if kind == FORWARD else backward
        work = [(flops, 1000, torch.bfloat16, False)]
        events += [("acquire", leaf, kind, ticket), ("work", work), ("release", ticket)]
    step = Step(events=events, numbers={str(n): n for n in range(4)})
    step, fit = fit_step(found.storage, step, 1, found.question.room)
    return step, fit


CARD = card_of(24, link_gbps=20.0, memory_gbps=1000.0, tflops=100.0, launch_s=1e-5)


def test_a_resident_step_computes_all_the_time() -> None:
    step, fit = by_hand(2e9, 1e9)
    found = speed_of(step, replace(fit, verdict="fits resident"), CARD)
    slow, middle, fast = (
        (4 * 2e9 + 3 * 1e9) / (rate * 1e12) + 7 * launch
        for rate, launch in ((95, 1.05e-5), (100, 1e-5), (105, 0.95e-5))
    )
    times = (found.low_s, found.step_s, found.high_s, found.bound_s, found.compute_s)
    assert times == pytest.approx((fast, middle, slow, fast, middle))
    assert (found.link_s, found.h2d_bytes, found.bottleneck, found.why) == (0, 0, "compute", "")


@pytest.mark.parametrize(
    ("forward", "backward", "bottleneck"),
    [(1e6, 1e6, "link"), (1e10, 1e6, "compute"), (1e11, 1e11, "compute")],
)
def test_a_streamed_step_is_bound_in_each_half_by_computing_or_by_copying(
    forward: float, backward: float, bottleneck: str
) -> None:
    step, fit = by_hand(forward, backward)
    assert fit.verdict == "fits streamed" and fit.arena_bytes == 2 * LAYER
    assert fit.sweep_bytes == (4 * LAYER, 3 * LAYER)
    found = speed_of(step, fit, CARD)
    computes = 4 * (forward / 1e14 + 1e-5), 3 * (backward / 1e14 + 1e-5)
    fastest = 4 * (forward / 105e12 + 0.95e-5), 3 * (backward / 105e12 + 0.95e-5)
    copies = 2 * LAYER / 21e9, 1 * LAYER / 21e9
    assert found.bound_s == pytest.approx(sum(map(max, zip(fastest, copies, strict=True))))
    assert found.compute_s == pytest.approx(sum(computes))
    assert found.low_s is not None and found.step_s is not None and found.high_s is not None
    assert found.low_s < found.step_s < found.high_s
    assert found.bound_s <= 1.000001 * found.low_s
    assert 3 * LAYER <= found.h2d_bytes <= 7 * LAYER
    assert found.link_s == pytest.approx(found.h2d_bytes / 20e9)
    assert found.bottleneck == bottleneck


def test_a_time_that_is_unknown_says_why() -> None:
    step, fit = by_hand(1e9, 1e9)
    assert speed_of(Step(why="no forward"), fit, CARD) == Speed(why="no forward")
    assert speed_of(step, replace(fit, verdict="does not fit"), CARD) == Speed(
        why="it does not fit"
    )


def test_what_a_full_training_takes_and_moves() -> None:
    """Of four layers by hand; what is on the host is another training's, of many bytes."""
    step, fit = by_hand(1e9, 1e9)
    recipe = replace(fit.storage.recipe, train="full")
    full = replace(fit, storage=replace(fit.storage, recipe=recipe))
    host = {"weights": 4 << 30, "gradients": 4 << 30, "optimizer state": 8 << 30, "padding": 9}
    full, gib, arena = replace(full, host=host, sweep_bytes=(4 << 30, 3 << 30)), 2**30, 2 * LAYER
    assert full.arena_bytes == arena
    found = speed_of(step, full, CARD)
    assert (found.optimizer, found.why) == ("after backward, on the device", "")
    assert found.h2d_bytes == 7 * gib - 2 * arena + 16 * gib - arena
    assert found.d2h_bytes == 16 * gib
    # At the fastest rates both directions copy as fast as one: 5 % faster than what is given.
    forward, backward, last = 4 * gib - arena, 4 * gib, 16 * gib - arena
    assert found.bound_s == pytest.approx((forward + backward + last) / 21e9)
    assert found.bound_s <= found.low_s <= 1.001 * found.bound_s  # type: ignore[operator]
    # At the slowest, half as fast while both copy: what is more goes on alone.
    alone = 4 * gib - (3 * gib - arena)
    turned = 2 * (3 * gib - arena) + alone, 2 * 12 * gib + 4 * gib - arena
    assert found.high_s == pytest.approx((forward + sum(turned)) / 19e9, rel=1e-3)
    kernels = 4 * (1e9 / 1e14 + 1e-5) + 3 * (1e9 / 1e14 + 1e-5) + (3 * 4 + 2 * 8) * gib / 1e12
    assert found.compute_s == pytest.approx(kernels)
    assert (found.link_s, found.bottleneck) == (found.h2d_bytes / 20e9, "link")

    rounds = speed_of(replace(step, micro_batches=3), full, CARD)
    assert rounds.h2d_bytes == 3 * (7 * gib - 2 * arena) + 2 * 4 * gib + 16 * gib - arena
    assert rounds.d2h_bytes == (3 * 4 + 12) * gib
    coming = 3 * forward + backward + 2 * (7 * gib - arena) + last
    assert rounds.bound_s == pytest.approx(coming / 21e9)

    recipe = replace(recipe, during_backward=True)
    host = {name: size for name, size in host.items() if name != "gradients"}
    early = replace(full, host=host, storage=replace(fit.storage, recipe=recipe))
    found = speed_of(step, early, CARD)
    assert (found.optimizer, found.why) == ("in backward, on the device", "")
    stepped = 3 * gib - arena + 8 * gib
    assert (found.h2d_bytes, found.d2h_bytes) == (forward + stepped, 12 * gib)
    assert stepped < 12 * gib
    assert found.bound_s == pytest.approx((forward + 12 * gib) / 21e9)
    unknown = speed_of(replace(step, why="no forward"), early, CARD)
    assert unknown == Speed(
        h2d_bytes=found.h2d_bytes,
        d2h_bytes=found.d2h_bytes,
        optimizer=found.optimizer,
        why="no forward",
    )
    assert speed_of(step, replace(full, verdict="fits resident"), CARD).why == ""


def test_a_full_training_whose_replay_fails_says_what_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24)))
    found = oracle_offload.plan(
        model, train="full", sample={"input": (4, 512)}, vram="10MiB", ram="1GiB", margin=0.0
    )
    assert found.speed.step_s is None and found.speed.h2d_bytes > 0
    assert "failed with code 1: nothing. The optimizer is taken to step after backward" in str(
        found
    ).replace("\n", " ")


FULL = {"link_gbps": 2.0, "memory_gbps": 60.0, "tflops": 0.5, "launch_s": 4e-6}


@pytest.mark.parametrize("rounds", [1, 3, 0], ids=["one round", "three", "in backward"])
def test_a_full_training_moves_and_takes_what_the_engine_does(rounds: int) -> None:
    """Of a model without biases, whose optimizer keeps two values of each weight."""
    from oracle_offload.train import stepping, stream_optimizer

    width, layers, early = 512, 24, rounds == 0
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    found = oracle_offload.plan(
        model,
        train="full",
        during_backward=early,
        sample={"input": (64, width)},
        vram="10MiB",
        ram="1GiB",
        margin=0.0,
        **FULL,
    )
    assert found.fit.verdict == "fits streamed" and 0 < found.fit.arena_bytes < layers << 20
    assert ("gradients" in found.fit.host) is not early
    step = replace(found.step, micro_batches=rounds or 1, together=False)
    planned = speed_of(step, found.fit, found.question.card)
    before = stepping.BATCH_BYTES, stepping.PART_OF_ARENA
    stepping.BATCH_BYTES, stepping.PART_OF_ARENA = 4 << 20, 2
    try:
        with (
            simulator.device("rtx4090", **FULL, duplex_share=0.75),
            oracle_offload.attach(model, "cpu", vram_budget=found.fit.arena_bytes) as manager,
        ):
            assert len(manager.layers) == layers
            optimizer = stream_optimizer(
                torch.optim.AdamW(model.parameters()), during_backward=early
            )
            moved, times = [], []
            for _ in range(4):
                for _ in range(rounds or 1):
                    with Witness(strict=False, clock=True):
                        model(torch.randn(64, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(simulator.finish())
                stats = manager.state.engine.stats()
                moved.append((stats["h2d_bytes"] + stats["brought_bytes"], stats["d2h_bytes"]))
    finally:
        stepping.BATCH_BYTES, stepping.PART_OF_ARENA = before
    there, home = (after - before for after, before in zip(*moved[:1:-1], strict=True))
    # A place holds a whole layer, and one is brought ahead: at most two layers more in each of the
    # forwards, the backwards and the step. In backward the first layer's copy is not kept.
    phases, layer = 2 if early else 2 * rounds + 1, width * width * 4
    assert 0 <= there - planned.h2d_bytes <= (2 * phases + early) * layer
    assert home == pytest.approx(planned.d2h_bytes, rel=1e-3)
    seconds = times[-1] - times[-2]
    assert planned.step_s == pytest.approx(seconds, rel=0.1)
    assert planned.low_s <= seconds <= planned.high_s  # type: ignore[operator]


def test_what_a_replay_is_asked() -> None:
    step, fit = by_hand(1e9, 1e9)
    asked = question(step, fit, CARD, 1.0)
    assert asked["units"] == [[(n, [LAYER])] for n in range(4)]
    assert (asked["segments"], asked["staging"]) == ([2 * LAYER], 0)
    assert asked["events"] == step.replayed(SimulatedTime(simulator.Device(**asked["device"])))
    assert asked["device"]["link_gbps"] == pytest.approx(21.0)
    assert asked["device"]["tflops"] == pytest.approx(105.0)
    assert asked["device"]["launch_s"] == pytest.approx(0.95e-5)
    assert asked["device"]["memory_gbps"] == pytest.approx(1050.0)

    step, fit = by_hand(1e9, 1e9, host=int(3 * LAYER / 0.9) + 1)
    there = [int(unit[0].name) for unit in fit.storage.units]
    assert len(there) == 3, "one stays on the device for good"
    asked = question(step, fit, CARD, 0.5)
    assert [unit[0][0] for unit in asked["units"]] == there
    used = [event for event in asked["events"] if event[0] == "acquire"]
    assert {event[1] for event in used} == set(there)
    released = [event[1] for event in asked["events"] if event[0] == "release"]
    assert [event[4] for event in used] == released
    assert sum(event[0] == "launch" for event in asked["events"]) == 7

    tensors = [unit[0].tensors()[0] for unit in fit.storage.units]
    packed = replace(fit, storage=replace(fit.storage, coded={id(tensors[0]): 700}))
    asked = question(step, packed, CARD, 0.5)
    assert [unit[0][1] for unit in asked["units"]] == [[[LAYER, 700]], [LAYER], [LAYER]]
    assert asked["staging"] == packed.storage.staging_bytes > 0


def test_a_replay_codes_whole_pairs_of_bytes_alone() -> None:
    for width, as_asked in ((256, [256 * 256, 700]), (257, 257 * 257)):
        step, fit = by_hand(1e9, 1e9, width=width, quantize="int8")
        weight, *others = fit.storage.units[0][0].tensors()
        packed = replace(fit, storage=replace(fit.storage, coded={id(weight): 700}))
        ((_, sizes),) = question(step, packed, CARD, 0.5)["units"][0]
        assert sizes == [as_asked, *map(tensor_bytes, others)]


def test_cards_that_share_a_link_upstream_have_as_much_less_of_it() -> None:
    def of(upstream: int) -> Any:
        return oracle_offload.plan(
            Late(),
            sample={"input": (4, 256)},
            ram="64GB",
            budget=Budget(offload_percent=1.0),
            upstream=upstream,
        )

    alone, shared = of(1), of(4)
    whole = alone.question.card.link_gbps
    assert shared.question.card.link_gbps == tuple(rate / 4 for rate in whole)
    assert shared.speed.link_s == pytest.approx(4 * alone.speed.link_s) and alone.speed.link_s > 0
    assert any("4 cards share the link upstream" in text for text in shared.assumptions)
    with pytest.raises(ValueError, match="upstream=0"):
        of(0)
