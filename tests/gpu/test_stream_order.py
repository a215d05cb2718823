"""On a real card: copies and kernels race each other on purpose, and the bits are the resident's.

The simulator proves the order of every wait; here the same waits meet a real driver, real copy
engines and torch's caching allocator. `spin` keeps the compute stream busy so that every copy has
the time to arrive too early.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

import oracle_offload

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDTH, LAYERS, SLOW_NS = 1024, 12, 3_000_000


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.requires_grad_(False)
    return model, copy.deepcopy(model).cuda()


def spin_before(model: torch.nn.Module, engine: object) -> None:
    """Make every layer's kernel start late, on whatever stream it runs."""

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        engine.spin(torch.cuda.current_stream().cuda_stream, SLOW_NS)  # type: ignore[attr-defined]

    for layer in model:  # type: ignore[attr-defined]
        layer.register_forward_pre_hook(hook)


def engine_of(device: str = "cuda:0") -> object:
    from oracle_offload.engine.engines import open_state

    return open_state(torch.device(device)).engine


def step(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("offload", [1.0, 0.5])
def test_slow_kernels_keep_their_slots(offload: float) -> None:
    if not oracle_offload.host.build_info()["kernels"]["built"]:
        pytest.skip("built without kernels")
    model, resident = pair()
    manager = oracle_offload.attach(model, "cuda", offload_percent=offload)
    spin_before(model, engine_of())
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(4):
        for found, expected in zip(step(model, x), step(resident, x), strict=True):
            assert torch.equal(found, expected)
    manager.detach()


def test_kernels_wait_for_slow_copies() -> None:
    """Large weights and next to no work: every kernel is ready long before its weight."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(6)))
    model.requires_grad_(False)
    resident = copy.deepcopy(model).cuda()
    manager = oracle_offload.attach(model, "cuda", offload_percent=1.0)
    x = torch.randn(1, 4096, device="cuda")
    for _ in range(4):
        for found, expected in zip(step(model, x), step(resident, x), strict=True):
            assert torch.equal(found, expected)
    manager.detach()


def test_two_streams_use_one_model() -> None:
    if not oracle_offload.host.build_info()["kernels"]["built"]:
        pytest.skip("built without kernels")
    model, resident = pair()
    manager = oracle_offload.attach(model, "cuda", offload_percent=1.0)
    spin_before(model, engine_of())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.randn(64, WIDTH, device="cuda")
    expected = step(resident, x)
    torch.cuda.synchronize()
    results = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(step(model, x))
    torch.cuda.synchronize()
    for found in results:
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    manager.detach()


def test_memory_after_detach_is_nobody_elses() -> None:
    """Detach with everything queued, then let torch reuse the memory at once."""
    model, resident = pair()
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(5):
        manager = oracle_offload.attach(model, "cuda", offload_percent=1.0)
        found = step(model, x)
        manager.detach()
        junk = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda") for _ in range(8)]
        for a, b in zip(found, step(resident, x), strict=True):
            assert torch.equal(a, b)
        del junk
    for p, q in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(p, q.cpu())


def test_the_link_is_measured_and_copies_count() -> None:
    model, _ = pair()
    manager = oracle_offload.attach(model, "cuda", offload_percent=1.0)
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(3):
        step(model, x)
        torch.cuda.synchronize()
    stats = engine_of().stats()  # type: ignore[attr-defined]
    assert stats["h2d_timed_bytes"] > 0 and stats["h2d_seconds"] > 0
    assert 1 < stats["h2d_timed_bytes"] / stats["h2d_seconds"] / 1e9 < 1000
    assert stats["late"] + stats["hits"] == stats["acquires"]
    manager.detach()
