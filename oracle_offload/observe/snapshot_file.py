"""Torch's memory snapshot: read from a file without torch, and summed up by who held the bytes.

``torch.cuda.memory._snapshot()`` is made of dicts, lists, text and numbers, so its pickle needs no
class; one that asks for any is refused, and nothing that a file holds is ever run.
"""

from __future__ import annotations

import bisect
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..host.schema import schema

SCHEMA = schema("memory-snapshot", 1)
KEY = "oracle_offload"  # of what we add to torch's snapshot: see `oracle_offload.observe.snapshot`
FIRST_BYTE = b"\x80"  # of a pickle of protocol 2 or later
MOST_BYTES = 2 << 30
MOST_ROWS = 20_000_000  # blocks, events and frames: shared lists could make more of a small file

_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


class Block(NamedTuple):
    """Bytes of a device: held by a tensor, or cached for the next one."""

    address: int
    nbytes: int  # with what the allocator rounded up
    requested: int
    active: bool
    private: bool  # of a pool of its own, such as that of a CUDA graph
    frames: Sequence[Mapping[str, Any]]  # where it was allocated, innermost first


class _Plain(pickle.Unpickler):
    """Reads data alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}; a memory snapshot holds plain data alone")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to objects outside the file")


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what ``torch.cuda.memory._dump_snapshot``, or a recording, wrote.

    Raises
    ------
    ValueError
        The file is no memory snapshot, holds more than plain data, or is larger than 2 GiB.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ValueError(f"a memory snapshot of more than {MOST_BYTES >> 30} GiB is not read")
        try:
            found = _Plain(file).load()
        except OSError:
            raise
        except Exception as error:  # what broken bytes do to an unpickler is no closed list
            raise ValueError(f"it is no memory snapshot that can be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise ValueError("it is a pickle, but no memory snapshot of torch: it has no segments")
    return found


def held(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return who held the memory of one device: where memory ran out, else where most was held.

    Parameters
    ----------
    snapshot : mapping
        As torch returns it, or `read_snapshot`.

    Returns
    -------
    dict
        ``"device"``; ``"asked_bytes"`` and ``"free_bytes"`` of the allocation that
        failed (None where unknown); ``"reserved_bytes"`` of all segments, of which
        ``"held_bytes"`` were in use, ``"cached_bytes"`` were not, the largest piece of these being
        ``"largest_cached_bytes"``; ``"peak_bytes"``, the most that tensors had asked for at a time,
        as far back as the history goes (None without one); ``"holders"``, ``"holders_at_peak"``
        (empty where the end is the peak) and ``"arena"``: who held how many bytes, most first.

    Raises
    ------
    ValueError
        It is not in torch's format.
    """
    try:
        return _held(snapshot)
    except (AttributeError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise ValueError(f"the memory snapshot is not in torch's format: {error!r}") from error


def _held(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    count = _Count()
    ours = snapshot.get(KEY) or {}
    traces = [list(count.each(trace)) for trace in snapshot.get("device_traces") or ()]
    device = _device(snapshot, ours, traces)
    segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
    blocks = [block for segment in segments for block in _blocks(segment, count)]
    trace = traces[device] if device < len(traces) else []
    failed: Mapping[str, Any] = next((e for e in reversed(trace) if e["action"] == "oom"), {})
    named = _Named(ours.get("named", ()))
    active = [block for block in blocks if block.active]
    cached = [block.nbytes for block in blocks if not block.active and not block.private]
    peak, at_peak = _peak(active, trace)
    return {
        "device": f"cuda:{device}",
        "asked_bytes": _size(ours.get("asked_bytes", failed.get("size"))),
        "free_bytes": _size(ours.get("free_bytes", failed.get("device_free"))),
        "reserved_bytes": sum(int(segment["total_size"]) for segment in segments),
        "held_bytes": sum(block.nbytes for block in active),
        "cached_bytes": sum(cached),
        "largest_cached_bytes": max(cached, default=0),
        "peak_bytes": peak,
        "holders": _holders([(block, block.nbytes) for block in active], named),
        "holders_at_peak": _holders([(b, b.requested) for b in at_peak], named),
        "arena": [{"who": _text(who), "bytes": int(size)} for who, size in ours.get("arena", ())],
    }


def _size(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: Any) -> str:
    """Return text, and nothing else: a small file's shared lists are endless as text."""
    if not isinstance(value, str):
        raise TypeError(f"text was expected, not {type(value).__name__}")
    return value


class _Count:
    """Counts rows, and refuses too many."""

    def __init__(self) -> None:
        self._left = MOST_ROWS

    def each(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return rows that are still within the limit."""
        self._left -= len(rows)
        if self._left < 0:
            raise ValueError(f"the memory snapshot has more than {MOST_ROWS} rows")
        return rows


def _device(
    snapshot: Mapping[str, Any], ours: Mapping[str, Any], traces: Sequence[Sequence[Any]]
) -> int:
    if "device" in ours:
        return int(ours["device"])
    for device, trace in enumerate(traces):
        if any(event["action"] == "oom" for event in trace):
            return device
    sizes: dict[int, int] = {}
    for segment in snapshot["segments"]:
        device = int(segment.get("device", 0))
        sizes[device] = sizes.get(device, 0) + int(segment["total_size"])
    return max(sizes, key=lambda device: sizes[device], default=0)


def _blocks(segment: Mapping[str, Any], count: _Count) -> Iterator[Block]:
    address = int(segment["address"])
    private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    for block in count.each(segment["blocks"]):
        # Until torch 2.1 a block had no address, and its frames were in a history.
        history: Mapping[str, Any] = (block.get("history") or ({},))[0]
        size = int(block["size"])
        yield Block(
            int(block.get("address", address)),
            size,
            int(block.get("requested_size", history.get("real_size", size))),
            block["state"] in _ACTIVE,
            private,
            count.each(block.get("frames") or history.get("frames") or ()),
        )
        address += size


def _peak(active: Sequence[Block], trace: Sequence[Any]) -> tuple[int | None, list[Block]]:
    """Return the most that was asked for at a time, and its blocks where that was not at the end.

    What is there at the end is known; from there each event is undone, the last one first.
    """
    if not any(event["action"] == "alloc" for event in trace):
        return None, []
    live = {block.address: block for block in active}
    total = best = sum(block.requested for block in active)
    best_at = len(trace)
    for at in range(len(trace) - 1, -1, -1):
        total += _undo(trace[at], live)
        if total > best:
            best, best_at = total, at
    if best_at == len(trace):
        return best, []
    live = {block.address: block for block in active}
    for event in reversed(trace[best_at:]):
        _undo(event, live)
    return best, list(live.values())


def _undo(event: Mapping[str, Any], live: dict[int, Block]) -> int:
    """Take an event back; return by how many bytes what was asked for changes."""
    address, size = event.get("addr", 0), int(event.get("size", 0))
    if event["action"] == "alloc":
        gone = live.pop(address, None)
        return 0 if gone is None else -gone.requested
    if event["action"] == "free_completed":
        frames = event.get("frames") or ()
        live[address] = Block(address, size, size, True, False, frames)
        return size
    return 0


class _Named:
    """Addresses whose holders are known: (address, bytes, kind, who)."""

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows = sorted((int(a), int(n), _text(kind), _text(who)) for a, n, kind, who in rows)
        self._starts = [row[0] for row in self._rows]

    def of(self, block: Block) -> tuple[str, str] | None:
        """Return kind and name of what is in a block."""
        at = bisect.bisect_left(self._starts, block.address)
        before = self._rows[at - 1] if at else None
        if before is not None and before[0] + before[1] > block.address:
            return before[2], before[3]  # it reaches into the block
        if at < len(self._rows) and self._starts[at] < block.address + block.nbytes:
            return self._rows[at][2], self._rows[at][3]
        return None


def _holders(sizes: Sequence[tuple[Block, int]], named: _Named) -> list[dict[str, Any]]:
    """Return who held how many bytes in how many blocks, most first."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for block, nbytes in sizes:
        who = named.of(block) or _by_frames(block)
        before = sums.get(who, (0, 0))
        sums[who] = before[0] + nbytes, before[1] + 1
    rows = [
        {"kind": kind, "who": who, "bytes": nbytes, "blocks": blocks}
        for (kind, who), (nbytes, blocks) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-int(str(row["bytes"])), str(row["who"])))


def _by_frames(block: Block) -> tuple[str, str]:
    """Return what allocated a block, and the line of the user's code that led there."""
    python = [frame for frame in block.frames if _text(frame["filename"]).endswith(".py")]
    if not python:
        return ("private pool" if block.private else "tensors"), "unknown: no line was recorded"
    names = [_slashed(frame) for frame in python]
    kind = "tensors"
    if any("/torch/optim/" in name for name in names):
        kind = "optimizer state"
    elif any("/torch/autograd/" in name and "backward" in _text(frame["name"])
             for name, frame in zip(names, python, strict=True)):  # fmt: skip
        kind = "in backward"
    own = [f for f, name in zip(python, names, strict=True) if not _is_library(name)]
    frame = (own or python)[0]
    line = f"{_slashed(frame).rsplit('/', 1)[-1]}:{int(frame['line'])} in {_text(frame['name'])}"
    return kind, line


def _slashed(frame: Mapping[str, Any]) -> str:
    return _text(frame["filename"]).replace("\\", "/")


def _is_library(name: str) -> bool:
    return "/torch/" in name or "/oracle_offload/" in name
