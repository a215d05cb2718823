"""Plans with ``compress=``, compared with the attach and the steps that they plan."""

from __future__ import annotations

import copy
import io
import json
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload import Budget, cli
from oracle_offload.engine import simulator
from oracle_offload.host.sizes import parse_size
from oracle_offload.planning.estimated import SHARES, Estimated

SIZE, DEPTH, ROWS = 512, 16, 64
RATES = dict(link_gbps=0.1, memory_gbps=200.0, tflops=0.02, launch_s=2e-6)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))


class Net(nn.Module):
    """Layers whose weights are drawn as trained ones are, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter = nn.Linear(SIZE, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, 0, SIZE**-0.5)
        self.bfloat16()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first = self.adapter(input)
        output = input + first.repeat(1, SIZE // 8)
        for layer in self.layers:
            output = layer(output).tanh()
        return output


def planned(
    model: Any = None, share: float = 0.9, compress: str | None = None, **options: Any
) -> oracle_offload.planning.Plan:
    given: dict[str, Any] = dict(
        sample={"input": ((ROWS // 8, SIZE), "bfloat16")},
        batch=1,
        rank=1,
        targets="adapter",
        checkpointing=False,
        card=24,
        ram="64GB",
        budget=Budget(offload_percent=share, compress=compress),
        **RATES,
    )
    return oracle_offload.plan(Net() if model is None else model, **{**given, **options})


def plan_of(share: float = 0.9, **options: Any) -> oracle_offload.planning.Plan:
    return planned(share=share, sample={"input": (SIZE,)}, batch=ROWS, dtype="bf16", **options)


def measured(
    plan: oracle_offload.planning.Plan, compress: str | None
) -> tuple[float, int, int, int]:
    """Seconds and bytes of a step in virtual time, locked bytes, and how many are compressed."""
    model = Net().requires_grad_(False)
    x = torch.randn(ROWS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    with simulator.device("rtx4090", **RATES):
        manager = oracle_offload.attach(
            model,
            "cpu",
            vram_budget=plan.fit.arena_bytes + plan.storage.staging_bytes,
            compress=compress,
        )
        engine, number = manager.state.engine, manager.attachment.model
        try:
            for _ in range(4):
                begin, before = simulator.finish(), engine.stats(number)["h2d_bytes"]
                model(x).float().square().mean().backward()
                seconds = simulator.finish() - begin
                moved = engine.stats(number)["h2d_bytes"] - before
            coded = sum(bool(layer.coded) for layer in manager.layers)
            stats = engine.stats()
            return seconds, moved, stats["locked_bytes"] - stats["ring_bytes"], coded
        finally:
            manager.detach()


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_compressed_plan_is_within_seven_percent_of_the_attach(sim: Any, share: float) -> None:
    plain, found = plan_of(share), plan_of(share, compress="lossless")
    seconds, moved, locked, coded = measured(found, "lossless")
    assert coded == DEPTH
    host = found.fit.host["weights"] + found.fit.host["padding"]
    assert host == pytest.approx(locked, rel=0.07)
    assert found.speed.h2d_bytes == pytest.approx(moved, rel=0.07)
    assert found.speed.step_s == pytest.approx(seconds, rel=0.07)
    assert found.fit.device["staging"] == found.storage.staging_bytes > 0
    assert found.speed.h2d_bytes < 0.75 * plain.speed.h2d_bytes
    assert found.speed.bound_s is not None and plain.speed.bound_s is not None
    assert found.speed.bound_s < plain.speed.bound_s
    assert found.speed.bound_s <= 1.03 * seconds
    assert host < 0.72 * plain.fit.host_bytes
    assert found.fit.x_min_bytes < 0.72 * plain.fit.x_min_bytes
    assert 0.8 * moved < found.fit.x_min_bytes <= 1.03 * moved


def test_the_weights_tell_what_they_take_where_they_are_there() -> None:
    model = Net()
    for layer in model.layers:
        layer.weight.data.zero_()
    sampled = planned(model, compress="lossless", measure=False)
    drawn = planned(compress="lossless", measure=False)
    known = planned(Net().to("meta"), compress="lossless", measure=False)
    weights = DEPTH * 2 * SIZE * SIZE
    assert sampled.storage.coded_bytes[1] < 0.1 * weights
    assert drawn.storage.coded_bytes[0] == known.storage.coded_bytes[0] == weights
    assert drawn.storage.coded_bytes[1] == pytest.approx(0.68 * weights, rel=0.03)
    share = SHARES[torch.bfloat16]
    assert known.storage.coded_bytes[1] == pytest.approx(share * weights, rel=1e-4)
    assert "encoding parts of them tells: estimated" in str(drawn)
    assert "0.68 of bf16" in str(known).replace("\n         ", " ")
    assert "compress" not in str(planned(measure=False))
    whole = planned(Net().float(), compress="lossless", measure=False, dtype="bf16")
    assert whole.storage.coded_bytes == known.storage.coded_bytes, "what is there is not planned"


def test_where_the_size_of_compressed_weights_is_from_is_said() -> None:
    model, other = nn.Linear(512, 512).bfloat16(), nn.Linear(512, 512, dtype=torch.bfloat16)
    copied = copy.deepcopy(model).to("meta")
    coded = [id(tensor) for tensor in copied.parameters()]
    parts = "compressed weights take what encoding parts of them tells: estimated"
    shares = (
        "compressed weights take 0.68 of bf16, 0.84 of fp8, 0.89 of int8, as drawn ones do: "
        "estimated"
    )
    known = Estimated((copied, model))
    assert known.said(coded) == known.said(coded[:1]) == parts
    assert known.said([*coded, id(other.weight)]) == Estimated().said(coded) == shares
    assert Estimated().bytes_of(other.weight) == int(0.68 * 2 * 512 * 512)


def test_a_host_without_room_for_weights_as_they_are() -> None:
    weights = DEPTH * 2 * SIZE * SIZE
    options = dict(ram=int(0.95 * weights / 0.9), link_gbps=50.0)
    assert plan_of(**options).fit.ram_budget is not None
    found = plan_of(compress="lossless", **options)
    assert found.fit.ram_budget is None and found.fit.storage.kept_bytes == 0
    some = plan_of(compress="auto", **options)
    assert 0 < len(some.storage.coded) < DEPTH and some.fit.ram_budget is None
    assert some.fit.host_bytes <= some.fit.host_room
    assert "ram_budget is" in str(some)


def test_auto_compresses_what_a_step_waits_for() -> None:
    slow = plan_of(compress="auto")
    every = plan_of(compress="lossless")
    fast = plan_of(compress="auto", link_gbps=50.0)
    assert not fast.storage.coded and fast.storage.staging_bytes == 0
    assert "steps do not wait for copies" in str(fast)
    assert 0 < len(slow.storage.coded) <= DEPTH
    assert slow.speed.step_s is not None and every.speed.step_s is not None
    assert slow.speed.step_s <= 1.02 * every.speed.step_s
    part = plan_of(compress="auto", link_gbps=0.28)
    most = plan_of(compress="lossless", link_gbps=0.28)
    assert 0 < len(part.storage.coded) < DEPTH
    assert part.speed.step_s is not None and most.speed.step_s is not None
    assert part.speed.step_s <= 1.02 * most.speed.step_s


@pytest.mark.parametrize("link_gbps", [50.0, 0.28], ids=["none", "some"])
def test_alternatives_are_compared_with_what_is_compressed(link_gbps: float) -> None:
    """Not with all of it: nothing of an adapter's state depends on that."""
    plain, found = (
        plan_of(compress=compress, rank=8, link_gbps=link_gbps) for compress in (None, "auto")
    )
    assert len(found.storage.coded) < DEPTH and bool(found.storage.coded) == (link_gbps < 1)
    same = {rung.name: rung for rung in plain.alternatives}
    rounded = [rung for rung in found.alternatives if rung.name.startswith("frozen weights in")]
    others = [rung for rung in found.alternatives if rung not in rounded]
    assert others and rounded
    for rung in others:
        assert (rung.saves_device, rung.saves_host) == (
            same[rung.name].saves_device,
            same[rung.name].saves_host,
        )
    if link_gbps > 1:  # nothing is compressed there, either
        assert [rung.saves_host for rung in rounded] == [same[r.name].saves_host for r in rounded]


def test_what_is_pasted_and_printed_says_so() -> None:
    found = plan_of(compress="lossless")
    document = json.loads(found.to_json())
    assert 'compress="lossless"' in document["python"]
    budget = found.fit.arena_bytes + found.storage.staging_bytes
    (pasted,) = re.findall(r'vram_budget="([^"]+)"', document["python"])
    assert budget <= parse_size(pasted) <= 1.01 * budget, "no less than it was planned with"
    assert document["compress"] == "lossless"
    assert 0 < document["compressed_host_bytes"] < 0.72 * document["compressed_bytes"]
    assert json.loads(plan_of().to_json())["compressed_bytes"] == 0
    assert "staging" not in plan_of().fit.device


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="compress='zip' is none of None, 'lossless', 'auto'"):
        planned(compress="zip")


def test_the_command_takes_it(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(Net().state_dict(), path)
    out = io.StringIO()
    with redirect_stdout(out):
        cli.main(
            ["plan", str(path), "--compress", "lossless", "--json", "--offload-percent", "0.9"]
        )
    assert json.loads(out.getvalue())["compressed_bytes"] > 0
