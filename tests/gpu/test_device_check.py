"""The first things to hold on a real card: the driver answers, and the embedded kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import oracle_offload
from oracle_offload import _core

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def engine() -> Iterator[_core.Engine]:
    torch.zeros(1, device="cuda")  # torch makes its context first, as in every training program
    found = _core.Engine(None, 0)
    yield found
    torch.cuda.synchronize()
    found.close()


def test_the_driver_answers_and_counts_the_devices_that_torch_sees() -> None:
    version, devices = _core.driver_probe()
    assert version >= 12000
    assert devices == torch.cuda.device_count()


def test_an_engine_on_the_card_sees_the_device_that_torch_sees(engine: _core.Engine) -> None:
    assert not engine.simulated
    assert engine.device_name == torch.cuda.get_device_name(0)
    assert engine.mem_info()[1] == torch.cuda.mem_get_info(0)[1]


def test_spin_keeps_its_stream_busy_for_the_time_asked_and_no_other(engine: _core.Engine) -> None:
    kernels = oracle_offload.host.build_info()["kernels"]
    if not kernels["built"]:
        pytest.skip(f"built without kernels: {kernels['why_not']}")
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    engine.spin(busy.cuda_stream, 1000)  # the first launch loads the code
    with torch.cuda.stream(free):
        torch.ones(1000, device="cuda").sum()
    torch.cuda.synchronize()

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(busy)
    engine.spin(busy.cuda_stream, 200_000_000)
    end.record(busy)
    assert not busy.query(), "the launch itself must not wait"
    with torch.cuda.stream(free):
        other = torch.ones(1000, device="cuda").sum()
    free.synchronize()
    assert other.item() == 1000
    assert not busy.query()
    busy.synchronize()
    # The kernel's clock ticks once in a microsecond, or on some cards once in a millisecond.
    assert 0.198 <= start.elapsed_time(end) / 1e3 < 0.4
