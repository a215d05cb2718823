"""Predict a step by the simulator: what a step asks of its engine, replayed on a simulated device.

The replay has the true sizes and takes no memory for them: its copies move no byte. Kernels take
what `SimulatedTime` says of the preset named by ORACLE_OFFLOAD_SIM_DEVICE.
"""

from __future__ import annotations

from typing import Any

from oracle_offload import _core, simulator
from oracle_offload.simulated_time import SimulatedTime
from oracle_offload.witness import Witness

PIECE_BYTES = 2**30


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
    """Stands before an engine and notes what is asked of it."""

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


def predict(
    meter: Meter, units: list[list[tuple[int, list[int]]]], segments: list[int], rounds: int = 3
) -> dict[str, Any]:
    """Replay on a simulated device with an arena of `segments` (bytes of each).

    Returns
    -------
    dict
        ``predicted_step_s``, ``predicted_h2d_bytes``, ``predicted_stall_s`` of the last round.
    """
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    engine = _core.Engine(str(simulator.library_path()), 0)
    # Memory that nothing touches is not there: only its addresses are needed.
    arena = [_core.HostBuffer(nbytes) for nbytes in segments]
    masters: list[_core.HostBuffer] = []
    lease, model = engine.add_lease(), engine.add_model()
    try:
        stream = engine.compute_stream
        for piece in arena:
            engine.add_segment(lease, piece.address, piece.nbytes, stream)
        members, inside = _add_units(engine, model, units, masters)
        begin = simulator.finish()
        before = engine.stats(model)
        for number in range(rounds):
            if number == rounds - 1:
                engine.trace_start()  # with a timeline every wait is timed
            begin, before = simulator.finish(), engine.stats(model)
            _play(engine, meter, members, inside, stream, number)
        end, after = simulator.finish(), engine.stats(model)
        engine.trace_stop()
    finally:
        simulator.finish()
        engine.remove_lease(lease)
        engine.remove_model(model)
        for piece in masters:
            engine.unlock(piece)
        engine.close()
        simulator.poison(True)
        simulator.copy_nothing(False)
        simulator.detect_races(True)
    return {
        "predicted_step_s": end - begin,
        "predicted_kernels_s": meter.seconds,
        "predicted_h2d_bytes": after["h2d_bytes"] - before["h2d_bytes"],
        "predicted_stall_s": after["stall_seconds"] - before["stall_seconds"],
    }


def _add_units(
    engine: Any, model: int, units: list[list[tuple[int, list[int]]]], masters: list[Any]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    def aligned(nbytes: int) -> int:
        return -(-nbytes // _core.ALIGNMENT) * _core.ALIGNMENT

    members: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    offset = 0
    for unit in units:
        needed = sum(aligned(nbytes) for _, tensors in unit for nbytes in tensors)
        if not masters or offset + needed > masters[-1].nbytes:
            masters.append(_core.HostBuffer(max(PIECE_BYTES, needed)))
            engine.lock(masters[-1])
            offset = 0
        extents: list[list[tuple[int, int]]] = []
        for _, tensors in unit:
            extents.append([])
            for nbytes in tensors:
                extents[-1].append((masters[-1].address + offset, nbytes))
                offset += aligned(nbytes)
        number, added = engine.add_unit(model, extents, False)
        inside[number] = [member for member, _ in added]
        for (recorded, _), (member, _) in zip(unit, added, strict=True):
            members[recorded] = member
    return members, inside


def _play(
    engine: Any,
    meter: Meter,
    members: dict[int, int],
    inside: dict[int, list[int]],
    stream: int,
    number: int,
) -> None:
    tickets: dict[int, int] = {}

    def stamp(fetched: Any) -> None:
        engine.stamp([(member, 0) for unit in fetched or () for member in inside[unit]])

    for event in meter.events:
        if event[0] == "launch":
            simulator.launch(stream, (), (), event[1])
        elif event[0] == "acquire":
            _, member, kind, task, ticket = event
            # A graph task of its own in each round.
            task = task if task == -1 else task + number * 1_000_000
            answer = engine.acquire(members[member], stream, 0, kind, task, 0.0)
            tickets[ticket] = answer[0]
            stamp(answer[2])
        else:
            stamp(engine.release(tickets.pop(event[1]), stream))
