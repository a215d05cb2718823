"""A thousand steps with everything that accumulates watched: nothing grows, no master changes."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

import oracle_offload  # noqa: E402
from oracle_offload.engine import simulator  # noqa: E402

STEPS, TURN = 1000, 100
MIB = 1 << 20


def frozen_model(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(192, 192) for _ in range(8)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    model.append(torch.nn.LayerNorm(192))  # trained, and resident
    return model


def masters_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def slope(values: list[float]) -> float:
    """Least-squares growth per entry."""
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, sum(values) / n
    over = sum((i - mean_x) ** 2 for i in range(n))
    return sum((i - mean_x) * (v - mean_y) for i, v in enumerate(values)) / over


@pytest.mark.proof
@pytest.mark.slow
def test_a_thousand_steps_leave_everything_as_it_was(record_property: Any) -> None:
    simulator.reset()
    models = [frozen_model(0), frozen_model(1)]
    hashes = [masters_hash(model) for model in models]
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) for model in models
    ]
    x = torch.randn(16, 192)
    process = psutil.Process()
    seen: dict[str, list[float]] = {"rss": [], "locked": [], "arena": [], "events": [], "live": []}
    managers: list[Any] = []
    for step in range(STEPS):
        if step % TURN == 0:
            for manager in managers:
                manager.detach()
            managers = [
                oracle_offload.attach(model, "cpu", offload_percent=0.8) for model in models
            ]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:  # sampling in between
            with torch.no_grad():
                for _ in range(3):
                    models[step // 10 % 2](x)
        if step % TURN == TURN - 1:
            gc.collect()
            stats = managers[0].state.engine.stats()
            live = simulator.live()
            seen["rss"].append(process.memory_info().rss)
            seen["locked"].append(stats["locked_bytes"])
            seen["arena"].append(stats["arena_bytes"])
            seen["events"].append(live.events)
            seen["live"].append(live.streams + live.registrations + live.contexts)
    for manager in managers:
        manager.detach()
    assert [masters_hash(model) for model in models] == hashes, "a frozen master changed"
    for name in ("locked", "arena", "events", "live"):
        assert len(set(seen[name])) == 1, f"{name} is not flat: {seen[name]}"
    growth = slope(seen["rss"][2:]) / TURN  # the first turns warm allocators up
    for name, values in seen.items():
        record_property(name, values)
    record_property("rss_bytes_per_step", growth)
    print(f"soak: RSS grows by {growth:.0f} bytes a step; {seen}")
    assert growth < 2048, f"RSS grows by {growth:.0f} bytes a step: {seen['rss']}"
    assert not simulator.reports(), simulator.reports()[0]
    simulator.reset()
