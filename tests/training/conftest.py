"""Every test of this folder runs on a fresh simulated device and must leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os

import pytest

torch = pytest.importorskip("torch")


def pytest_generate_tests(metafunc):
    """Tests that take `device` run on the simulated device and, with -m gpu, on CUDA."""
    only = metafunc.config.getoption("--device")
    if "device" in metafunc.fixturenames and not any(
        "device" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")
    ):
        cuda = pytest.param("cuda", marks=pytest.mark.gpu)
        cpu = pytest.param("cpu", marks=pytest.mark.elsewhere)  # in `make device-type`
        metafunc.parametrize("device", [only] if only else [cpu, cuda])


@pytest.fixture(autouse=True)
def same_on_cuda(request):
    """On CUDA a comparison to the last bit needs deterministic kernels."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("device") == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)
    else:
        yield


class Simulation:
    """What tests change about the simulated device."""

    def __init__(self, simulator):
        self.simulator = simulator
        self.original = simulator.get_device(0)

    def __getattr__(self, name):
        return getattr(self.simulator, name)

    def change(self, **shape):
        """Another device from now on: of so many `memory_bytes`, say."""
        device = self.simulator.get_device(0)
        for name, value in shape.items():
            setattr(device, name, value)
        self.simulator.set_device(0, device)

    def slow_link(self, gbps=0.01):
        """A link so slow that copies are always under way."""
        self.change(link_gbps=gbps)

    def create_stream(self):
        """A second compute stream; `destroy_stream` gives it back."""
        stream = ctypes.c_void_p()
        with self._context() as library:
            assert library.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        return stream.value

    def destroy_stream(self, stream):
        with self._context() as library:
            assert library.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0

    @contextlib.contextmanager
    def _context(self):
        library = ctypes.CDLL(str(self.simulator.library_path()))
        context = ctypes.c_void_p()
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert library.cuCtxPushCurrent_v2(context) == 0
        try:
            yield library
        finally:
            assert library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
            assert library.cuDevicePrimaryCtxRelease_v2(0) == 0


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in each test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Tensors of any size are lent, whatever the model's others have."""
    from oracle_offload.model import selection

    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))


@pytest.fixture
def cache_folder(monkeypatch, tmp_path):
    """A cache of the test's own."""
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads_of_torch():
    """As many as at first: a new thread begins with that, and other numbers give other bits."""
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def sim():
    """Fresh simulator; afterwards no race was reported and nothing is alive."""
    from oracle_offload.engine import simulator
    from oracle_offload.engine.engines import open_states

    simulator.reset()
    simulation = Simulation(simulator)
    yield simulation
    if open_states():
        gc.collect()  # a model that is only waiting to be collected
    left = [str(state.device) for state in open_states()]
    reports = simulator.reports()
    live = simulator.live()
    alive = {
        name: getattr(live, name)
        for name in ("streams", "events", "contexts", "registrations", "adopted_bytes", "queued")
        if getattr(live, name)
    }
    for state in open_states():
        for attachment in list(state.listeners):
            getattr(attachment, "close", attachment.forget_views)()  # activations have no such end
    simulator.reset()
    simulator.set_device(0, simulation.original)
    assert not reports, "\n\n".join(reports[:3])
    assert not left, f"still attached after the test: {left}"
    assert not alive, f"still alive in the driver after the test: {alive}"


@pytest.fixture
def warnings(caplog):
    """What the package has warned of so far."""
    caplog.set_level(logging.WARNING, logger="oracle_offload")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "oracle_offload"]


@pytest.fixture(scope="session")
def forks():
    """Processes of their own that have imported torch."""
    from forks import Forks

    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    server = Forks()
    yield server
    server.close()
