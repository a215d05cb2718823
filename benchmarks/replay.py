"""What a step asks of its engine, recorded for `oracle_offload.engine.replay`.

Kernels take what `SimulatedTime` says of the preset named by ORACLE_OFFLOAD_SIM_DEVICE.
"""

from __future__ import annotations

from typing import Any

from oracle_offload.engine import simulator
from oracle_offload.engine.simulated_time import SimulatedTime
from oracle_offload.model.witness import Witness


class Meter(SimulatedTime):
    """What happened in a step: acquires, releases, and the kernels' seconds between them."""

    def __init__(self) -> None:
        super().__init__(simulator.get_device(0))
        self.time = self  # as a `DeviceState` has it
        self.seconds = 0.0
        self.events: list[tuple[Any, ...]] = []

    def stream(self) -> int:
        """Return a stream; there is none."""
        return 0

    def flush(self, stream: int = 0) -> None:
        """Note the kernels since the last event."""
        if self.pending_kernel_s:
            self.events.append(("launch", self.pending_kernel_s))
            self.seconds += self.pending_kernel_s
            self.pending_kernel_s = 0.0


class Charge(Witness):
    """Charges every operator to a meter, on any device."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(strict=False, declare=False)
        self.meter = meter

    def __enter__(self) -> Any:
        """Watch, with the meter as the one clock."""
        super().__enter__()
        self._clocked = [self.meter]  # type: ignore[list-item]
        return self


class Recorder:
    """Wraps an engine and records the calls of it."""

    def __init__(self, engine: Any, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def acquire(self, member: int, *rest: Any) -> Any:
        """Note and pass on."""
        self._meter.flush()
        answer = self._engine.acquire(member, *rest)
        kind, task = rest[2], rest[3]
        self._meter.events.append(("acquire", member, kind, task, answer[0]))
        return answer

    def release(self, ticket: int, *rest: Any) -> Any:
        """Note and pass on."""
        self._meter.flush()
        self._meter.events.append(("release", ticket))
        return self._engine.release(ticket, *rest)


def record(manager: Any, step: Any) -> Meter:
    """Run a step of a managed model and return what it asked of its engine."""
    meter, state = Meter(), manager.state
    engine = state.engine
    state.engine = Recorder(engine, meter)
    try:
        with Charge(meter):
            step()
        meter.flush()
    finally:
        state.engine = engine
    return meter


def units_of(manager: Any) -> list[list[tuple[int, list[int]]]]:
    """Return each unit as [(member, [bytes of each tensor])]."""
    layers: dict[int, list[Any]] = {}
    for layer in manager.layers:
        layers.setdefault(layer.unit, []).append(layer)
    return [
        [(layer.member, [nbytes for _, nbytes in layer.extents()]) for layer in unit]
        for unit in layers.values()
    ]
