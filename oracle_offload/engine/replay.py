"""A training step replayed on a simulated device, in virtual time, by the engine itself.

The replay has the true sizes and takes no memory for them: its copies move no byte. `python -m
oracle_offload.engine.replay` reads questions from its standard input, one JSON object a line, and
answers each with a line: a process of its own, because the simulator's state is one per process.
"""

from __future__ import annotations

import json
import mmap
import random
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import OffloadError
from . import simulator

_MEM_RESERVE, _MEM_RELEASE, _PAGE_NOACCESS = 0x2000, 0x8000, 0x01
# Bytes of a tensor; of a coded one, these and about what it takes coded.
Size = int | Sequence[int]
# A unit: each member's number, and the sizes of its tensors.
Unit = Sequence[tuple[int, Sequence[Size]]]
# ("launch", seconds), ("acquire", member, kind, graph task or -1, ticket) or ("release", ticket).
Event = Sequence[Any]


def predict(
    events: Sequence[Event],
    units: Sequence[Unit],
    segments: Sequence[int],
    rounds: int = 3,
    staging: int = 0,
) -> dict[str, Any]:
    """Replay on a simulated device with an arena of `segments` (bytes of each).

    Coded tensors pass through `staging` bytes of its memory.

    Returns
    -------
    dict
        ``predicted_step_s``, ``predicted_h2d_bytes``, ``predicted_stall_s`` of the last round, and
        ``predicted_kernels_s``, of all launches.
    """
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    engine = _core.Engine(str(simulator.library_path()), 0)
    arena = [_Reserved(nbytes) for nbytes in segments]
    # All units have the same masters: no code looks at what is copied.
    largest = max(
        (sum(_aligned(_whole(n)) for _, ts in unit for n in ts) for unit in units), default=1
    )
    masters = _Masters(largest)
    passed = _Reserved(staging) if staging else None
    lease, model = engine.add_lease(), engine.add_model()
    stream = engine.compute_stream
    masters.lock(engine, units)
    for piece in arena:
        engine.add_segment(lease, piece.address, piece.nbytes, stream)
    if passed is not None:
        engine.add_staging(lease, passed.address, staging, stream)
    members, inside = _add_units(engine, model, units, masters)
    for number in range(rounds):
        if number == rounds - 1:
            engine.trace_start()  # with a timeline every wait is timed
        begin, before = simulator.finish(), engine.stats(model)
        _play(engine, events, members, inside, stream, number)
    end, after = simulator.finish(), engine.stats(model)
    # For the next question; after an error there is none, and this would hide it.
    engine.remove_lease(lease)
    engine.remove_model(model)
    masters.unlock(engine)
    engine.close()
    simulator.poison(True)
    simulator.copy_nothing(False)
    simulator.detect_races(True)
    return {
        "predicted_step_s": end - begin,
        "predicted_kernels_s": sum(event[1] for event in events if event[0] == "launch"),
        "predicted_h2d_bytes": after["h2d_bytes"] - before["h2d_bytes"],
        "predicted_stall_s": after["stall_seconds"] - before["stall_seconds"],
    }


class _Reserved:
    """Addresses of `nbytes` that nothing touches, more than the machine has memory if need be."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        import ctypes

        if sys.platform == "win32":
            self.address = _reserve_on_windows(self, ctypes.WinDLL("kernel32", use_last_error=True))
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._held = mmap.mmap(-1, nbytes, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._held))


def _reserve_on_windows(owner: _Reserved, kernel32: Any) -> int:
    """Return addresses without memory behind them, until `owner` ends: else the system commits it.

    Raises
    ------
    OffloadError
        The system has no such range.
    """
    import ctypes

    kernel32.VirtualAlloc.restype = ctypes.c_void_p
    kernel32.VirtualAlloc.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint
    kernel32.VirtualFree.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    address: int | None = kernel32.VirtualAlloc(None, owner.nbytes, _MEM_RESERVE, _PAGE_NOACCESS)
    if address is None:
        code = ctypes.get_last_error()  # type: ignore[attr-defined,unused-ignore]
        raise OffloadError(
            f"the system refused {owner.nbytes} bytes of addresses for a replay (error {code}); "
            "plan for a smaller arena"
        )
    weakref.finalize(owner, kernel32.VirtualFree, address, 0, _MEM_RELEASE)
    return address


class _Masters:
    """What all units are copied from: raw bytes, and coded weights of each size that occurs.

    Parameters
    ----------
    nbytes : int
        Raw ones.
    """

    _CHUNK, _BLOCK, _STEPS = 4 << 20, 1024, 32  # weights; of the share of blocks without a pattern

    def __init__(self, nbytes: int) -> None:
        self.raw = _core.HostBuffer(nbytes)
        self._coded: dict[tuple[int, int], tuple[_core.HostBuffer, int]] = {}
        self._locked: list[_core.HostBuffer] = []
        self._chunks: dict[tuple[int, int], bytes] = {}
        source = random.Random(0)
        drawn = (source.gauss(0, 0.02) for _ in range(16 * self._BLOCK))
        self._drawn = b"".join(struct.pack("<f", weight)[2:] for weight in drawn)
        self._noise = source.randbytes(2 * self._BLOCK)

    def lock(self, engine: Any, units: Sequence[Unit]) -> None:
        """Make all that `units` are copied from known to the engine."""
        sizes = (size for unit in units for _, tensors in unit for size in tensors)
        coded = [self._of(size)[0] for size in sizes if not isinstance(size, int)]
        for buffer in {id(one): one for one in [self.raw, *coded]}.values():
            engine.lock(buffer)
            self._locked.append(buffer)

    def unlock(self, engine: Any) -> None:
        """Undo `lock`."""
        while self._locked:
            engine.unlock(self._locked.pop())

    def extent(self, address: int, size: Size) -> tuple[int, ...]:
        """Return what the engine has to know of a tensor; a raw one is at `address`."""
        if isinstance(size, int):
            return address, size
        buffer, nbytes = self._of(size)
        return buffer.address, size[0], nbytes, _core.BF16

    def _of(self, size: Sequence[int]) -> tuple[_core.HostBuffer, int]:
        """Return the coded weights of a tensor of that size, and their bytes."""
        whole, coded = size
        count = whole // 2
        least = len(self._chunk(min(count, self._CHUNK), 0)) / (2 * min(count, self._CHUNK))
        share = min(1.0, max(0.0, (coded / whole - least) / (1 - least)))
        noisy = min(round(share * self._STEPS), self._STEPS - 3)  # else a chunk stays raw
        if (whole, noisy) not in self._coded:
            counts = [self._CHUNK] * (count // self._CHUNK)
            counts += [count % self._CHUNK] if count % self._CHUNK else []
            content = b""
            for number in counts:
                content = content.ljust(_aligned(len(content)), b"\0") + self._chunk(number, noisy)
            buffer = _core.HostBuffer(len(content))
            memoryview(buffer).cast("B")[: len(content)] = content
            self._coded[whole, noisy] = buffer, len(content)
        return self._coded[whole, noisy]

    def _chunk(self, count: int, noisy: int) -> bytes:
        """Return so many coded weights; `noisy` of `_STEPS` blocks have no pattern."""
        if (count, noisy) not in self._chunks:
            block = 2 * self._BLOCK
            blocks = (
                self._noise
                if (n + 1) * noisy // self._STEPS > n * noisy // self._STEPS
                else self._drawn[n % 16 * block :][:block]
                for n in range(-(-count // self._BLOCK))
            )
            weights = _core.HostBuffer(-(-count // self._BLOCK) * block)
            memoryview(weights).cast("B")[:] = b"".join(blocks)
            coded = _core.HostBuffer(_core.coded_room(_core.BF16, count))
            nbytes = _core.encode(
                _core.BF16, coded.address, coded.nbytes, 1, weights.address, count
            )
            self._chunks[count, noisy] = bytes(memoryview(coded).cast("B")[:nbytes])
        return self._chunks[count, noisy]


def _whole(size: Size) -> int:
    return size if isinstance(size, int) else size[0]


def _aligned(nbytes: int) -> int:  # that of `geometry` would import torch into each replay
    return -(-nbytes // _core.ALIGNMENT) * _core.ALIGNMENT


def _add_units(
    engine: Any, model: int, units: Sequence[Unit], masters: _Masters
) -> tuple[dict[int, int], dict[int, list[int]]]:
    members: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for unit in units:
        extents: list[list[tuple[int, ...]]] = []
        address = masters.raw.address
        for _, tensors in unit:
            extents.append([])
            for size in tensors:
                extents[-1].append(masters.extent(address, size))
                address += _aligned(_whole(size))
        number, added = engine.add_unit(model, extents, False)
        inside[number] = [member for member, _ in added]
        for (recorded, _), (member, _) in zip(unit, added, strict=True):
            members[recorded] = member
    return members, inside


def _play(
    engine: Any,
    events: Sequence[Event],
    members: dict[int, int],
    inside: dict[int, list[int]],
    stream: int,
    number: int,
) -> None:
    tickets: dict[int, int] = {}

    def stamp(fetched: Any) -> None:
        engine.stamp([(member, 0) for unit in fetched or () for member in inside[unit]])

    for event in events:
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


def predict_elsewhere(questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer each question by a replay in a process of its own.

    Parameters
    ----------
    questions : sequence of dict
        ``"device"``, the fields of a `simulator.Device`, and what `predict` takes.

    Raises
    ------
    OffloadError
        The process failed; the message has its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.replay"],
        input="".join(f"{json.dumps(question)}\n" for question in questions),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    if done.returncode:
        (said,) = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise OffloadError(f"the replay of a step failed with code {done.returncode}: {said}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Answer the questions in the standard input."""
    for line in sys.stdin:
        question = json.loads(line)
        simulator.set_device(0, simulator.Device(**question.pop("device")))
        print(json.dumps(predict(**question)))


if __name__ == "__main__":
    main()
