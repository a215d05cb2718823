"""How many driver calls one use of a unit makes, counted by name on the simulated driver.

A use is an acquire and its release, here of hits (the unit is in the arena) and of streamed uses
(each brings a copy), in the steady state: of the engine alone, on a thread whose current context is
the device's, and of a model on a thread whose context was not set. `other` are calls that have no
column; `copies` are there to show how many uses were streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

UNITS = 16
WIDTH = 1024  # of the model's layers: each is a unit of its own
ROUNDS = 64
CALLS = (
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuStreamIsCapturing",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync",
    "cuEventElapsedTime",
)


def counted(round_of_uses: Callable[[], None], engine: Any) -> dict[str, float]:
    """Return the calls of one use by name, after as many rounds as it takes to settle."""
    from oracle_offload.engine import simulator

    for _ in range(ROUNDS):
        round_of_uses()
    before, stats = [simulator.call_count(name) for name in (*CALLS, None)], engine.stats()
    for _ in range(ROUNDS):
        round_of_uses()
    calls = [
        simulator.call_count(name) - count
        for name, count in zip((*CALLS, None), before, strict=True)
    ]
    moved = {name: engine.stats()[name] - stats[name] for name in ("acquires", "h2d_copies")}
    *named, total = [count / moved["acquires"] for count in calls]
    return {
        "calls_count": total,
        **{f"{name}_count": count for name, count in zip(CALLS, named, strict=True)},
        "other_count": total - sum(named),
        "copies_count": moved["h2d_copies"] / moved["acquires"],
    }


def engine_alone(streamed: bool) -> dict[str, float]:
    """Count forward sweeps over all units; the arena holds two of them, or all."""
    import ctypes

    from oracle_offload import _core
    from oracle_offload.engine import simulator

    nbytes = 1 << 16
    driver = ctypes.CDLL(str(simulator.library_path()))
    engine = _core.Engine(str(simulator.library_path()), 0)
    stream = engine.compute_stream
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    lease, model = engine.add_lease(), engine.add_model()
    arena = _core.HostBuffer((2 if streamed else UNITS) * nbytes)
    engine.add_segment(lease, arena.address, arena.nbytes, stream)
    masters = _core.HostBuffer(UNITS * nbytes)
    engine.lock(masters)
    members = []
    for number in range(UNITS):
        place = masters.address + number * nbytes
        _, added = engine.add_unit(model, [[(place, nbytes)]], False)
        members.append(added[0][0])

    def sweep() -> None:
        for member in members:
            ticket, _, fetched = engine.acquire(member, stream, 0, _core.FORWARD, -1, 1e-5)
            ahead = engine.release(ticket, stream)
            engine.stamp([(members[unit], 0) for unit in (*(fetched or ()), *(ahead or ()))])

    found = counted(sweep, engine)
    simulator.finish()
    engine.remove_lease(lease)
    engine.remove_model(model)
    engine.unlock(masters)
    engine.close()
    assert driver.cuCtxPopCurrent_v2(None) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    return found


def model_on_device(streamed: bool, trained: bool) -> dict[str, float]:
    """Count forwards of a model without gradients, or forwards and backwards of a frozen one."""
    import torch

    import oracle_offload

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(1, WIDTH, requires_grad=trained)
    with oracle_offload.attach(model, "cpu", offload_percent=float(streamed)) as manager:

        def forward() -> None:
            y = model(x)
            if trained:
                y.sum().backward()

        return counted(forward, manager.state.engine)


def benchmarks(device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield one row for each kind of use; the driver that counts is the simulated one."""
    for streamed in (False, True):
        use = "streamed" if streamed else "hit"
        yield {"name": f"engine alone, {use}", **engine_alone(streamed)}
        yield {"name": f"model, {use}", **model_on_device(streamed, trained=False)}
        yield {"name": f"model with backward, {use}", **model_on_device(streamed, trained=True)}
