"""The order in which units are used, kept in a file from one run to the next, and their seconds.

The engine learns the order in the first step, whose copies come late for that: what a checkpoint
recomputes cannot be known before. An order that is known before serves the first step as well.
So do the seconds of forwards and the link's speed: by them the first samples are planned. They are
those of a device, and are not used on another.
The file is of one model, known by its fingerprint. A file that is not is passed over with a line in
the log, because what it says would cost late copies; and what this library has not written is never
overwritten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..host.replace import replace_file
from ..host.schema import schema
from .attachment import Attachment

logger = logging.getLogger("oracle_offload")

SCHEMA = schema("order", 1)
MOST_USES = 32768  # OO_MAX_EXPECTED
_MOST_BYTES = 1 << 20
_KINDS = 3
_WRITTEN = {_core.RECORDED: _core.FORWARD}  # what is expected of the one is expected of the other
_MOST_PACE = 2**63  # nanoseconds, and bytes a second
_ABOUT = 1.5  # times as much is about as much
# What a file of ours begins with, of whatever version, also where the rest of it is lost.
_BEGINNING = json.dumps({"schema": schema("order", 1)}).encode()[: -len('1"}')]

Use = tuple[int, int]  # a unit, by its number in the model, and the kind of its use


@dataclass(frozen=True)
class Pace:
    """What a device takes for a model.

    Attributes
    ----------
    device : str
        Its name.
    link_bps : int
        Bytes that it receives in a second, counted as they are on the device.
    forward_ns : tuple of int
        Nanoseconds of a forward of each unit, by its number in the model; 0: not known.
    """

    device: str
    link_bps: int
    forward_ns: tuple[int, ...]

    def covers(self, other: Pace) -> bool:
        """Whether it says of each unit what another pace does, and about as much of all."""
        if self.device != other.device or len(self.forward_ns) != len(other.forward_ns):
            return False
        pairs = [pair for pair in zip(self.forward_ns, other.forward_ns, strict=True) if pair[1]]
        mine, theirs = map(sum, zip(*pairs, strict=True))
        return all(mine for mine, _ in pairs) and all(
            one <= _ABOUT * another and another <= _ABOUT * one
            for one, another in ((mine, theirs), (self.link_bps, other.link_bps))
        )


@dataclass(frozen=True)
class Known:
    """What a run leaves for the next: the uses of a sweep, and the pace where it was measured."""

    uses: list[Use]
    pace: Pace | None = None

    def covers(self, other: Known) -> bool:
        """Whether it says all that another does, and about the same seconds."""
        if self.uses != other.uses or not other.pace:
            return self.uses == other.uses
        return self.pace is not None and self.pace.covers(other.pace)


class UnusableOrder(Exception):
    """A file holds no order of this model; the message says why."""


class OrderFile:
    """The learned order of one attached model, and the file that it is kept in.

    Parameters
    ----------
    path : str or path
        The file, or the folder that it is in; there it is named after the fingerprint.

    Raises
    ------
    ValueError
        Not a path.
    """

    def __init__(self, path: Any) -> None:
        try:
            self.path = os.fspath(path)
        except TypeError as error:
            raise ValueError(f"order_file={path!r} is not a path") from error
        self._fingerprint = ""
        self._numbers: dict[str, int] = {}  # of units, by the names of their layers
        self._known: Known | None = None
        self._steps = 0
        self._is_left_alone = False

    def tell(self, attachment: Attachment) -> None:
        """Tell the engine what the file says, if it is of this model.

        Parameters
        ----------
        attachment : Attachment
            Of the model; all its layers are placed.
        """
        ids = list(dict.fromkeys(layer.unit for layer in attachment.layers))
        number_of = {unit: number for number, unit in enumerate(ids)}
        self._numbers = {layer.name: number_of[layer.unit] for layer in attachment.layers}
        self._fingerprint = fingerprint_of(attachment)
        if os.path.isdir(self.path):
            name = f"oracle_offload-order-{self._fingerprint[:16]}.json"
            self.path = os.path.join(self.path, name)
        try:
            known = read(self.path, self._fingerprint, len(ids))
            engine = attachment.state.engine
            engine.expect([(ids[unit], kind) for unit, kind in known.uses])
            if known.pace and known.pace.device == engine.device_name:
                forward_ns = zip(ids, known.pace.forward_ns, strict=True)
                engine.expect_pace(list(forward_ns), known.pace.link_bps)
            attachment.before_forward()  # the arena grows to the blocks that are known now
        except FileNotFoundError:
            return
        except Exception as error:  # whatever a file does, the model trains without it
            self._is_left_alone = not is_ours(self.path)
            logger.warning(
                "%s: order_file=%r is not used, the order is learned again: %s",
                attachment.name,
                self.path,
                error,
            )
            return
        self._known = known

    def after_step(self, attachment: Attachment) -> None:
        """Keep the order once it repeats: looked for after 2, 4, 8, ... steps of an optimizer."""
        self._steps += 1
        if self._steps > 1 and self._steps & (self._steps - 1) == 0:
            self.keep(attachment)

    def keep(self, attachment: Attachment) -> None:
        """Write what was learned, if it is something else than the file's.

        What fails is logged, and not tried again: no step and no detach fails for a file.
        """
        try:
            found = self._learned(attachment)
            is_known = found and self._known and self._known.covers(found)
            if not found or is_known or self._is_left_alone:
                return
            self._known = found
            write(self.path, self._fingerprint, found)
        except Exception as error:
            self._is_left_alone = True
            logger.warning("order_file=%r cannot be written: %s", self.path, error)

    def _learned(self, attachment: Attachment) -> Known | None:
        numbers = {
            layer.unit: self._numbers[layer.name]
            for layer in list(attachment.layers)
            if layer.name in self._numbers
        }
        engine = attachment.state.engine
        visits = engine.visits(attachment.model)
        uses = [(numbers[u], _WRITTEN.get(kind, kind)) for u, kind in visits if u in numbers]
        sweep = repeated_sweep(uses)
        if sweep is None or len(sweep) > MOST_USES:
            return None
        rows, link_bps = engine.pace(attachment.model)
        forward_ns = [0] * (max(self._numbers.values()) + 1)
        for unit, nanoseconds in rows:
            if unit in numbers:
                forward_ns[numbers[unit]] = nanoseconds
        is_measured = link_bps > 0 and any(forward_ns)
        pace = Pace(engine.device_name, link_bps, tuple(forward_ns)) if is_measured else None
        return Known(sweep, pace)


def fingerprint_of(attachment: Attachment) -> str:
    """Return a hash of what is managed, and in which units: no value of a weight is in it."""
    units: dict[int, list[Any]] = {}
    for layer in attachment.layers:
        tensors = [[str(tensor.dtype), list(tensor.shape)] for tensor in layer.tensors()]
        units.setdefault(layer.unit, []).append([layer.name, tensors])
    text = json.dumps([attachment.name, list(units.values())])
    return hashlib.sha256(text.encode()).hexdigest()


def repeated_sweep(uses: Sequence[Use]) -> list[Use] | None:
    """Return the latest forward and backward that repeats the one before it; None if none does."""
    sweeps, begun = [], 0
    for end in range(1, len(uses) + 1):
        is_over = end == len(uses) or uses[end][1] == _core.FORWARD
        if uses[end - 1][1] == _core.BACKWARD and is_over:
            sweeps.append(list(uses[begun:end]))
            begun = end
    for before, sweep in reversed(list(itertools.pairwise(sweeps))):
        if before == sweep:
            return sweep
    return None


def read(path: str, fingerprint: str, units: int) -> Known:
    """Return what a file knows of a model of `units` units.

    Raises
    ------
    UnusableOrder
        It is none, of another model, or damaged.
    OSError
        It cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise UnusableOrder(f"it has more than {_MOST_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableOrder("it is no JSON document, or only the beginning of one") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UnusableOrder(f"it is not of {SCHEMA}")
    if found.get("fingerprint") != fingerprint:
        raise UnusableOrder("it is of another model, or of other settings")
    codes = found.get("uses")
    if not isinstance(codes, list) or not 0 < len(codes) <= MOST_USES:
        raise UnusableOrder(f"it has not 1 to {MOST_USES} uses")
    if any(type(code) is not int or not 0 <= code < _KINDS * units for code in codes):
        raise UnusableOrder(f"it has uses that no model of {units} units can have")
    if found.get("digest") != _digest(fingerprint, codes):
        raise UnusableOrder("it is damaged")
    pace = _read_pace(found["pace"], fingerprint, units) if "pace" in found else None
    return Known([(code // _KINDS, code % _KINDS) for code in codes], pace)


def _read_pace(found: Any, fingerprint: str, units: int) -> Pace:
    if not isinstance(found, dict):
        raise UnusableOrder("it has a pace that is none")
    values: list[Any] = [found.get(key) for key in ("device", "link_bps", "forward_ns")]
    device, link_bps, forward_ns = values
    if not isinstance(forward_ns, list) or len(forward_ns) != units:
        raise UnusableOrder(f"it has not the seconds of {units} units")
    if any(type(n) is not int or not 0 <= n < _MOST_PACE for n in (link_bps, *forward_ns)):
        raise UnusableOrder("it has seconds, or a speed, that nothing can have")
    if found.get("digest") != _digest(fingerprint, [device, link_bps, forward_ns]):
        raise UnusableOrder("it is damaged")
    return Pace(str(device), link_bps, tuple(forward_ns))


def write(path: str, fingerprint: str, known: Known) -> None:
    """Write what is known in the place of what was there, at once or not at all.

    Raises
    ------
    OSError
        It cannot be written.
    """
    codes = [unit * _KINDS + kind for unit, kind in known.uses]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "fingerprint": fingerprint,
        "digest": _digest(fingerprint, codes),
        "uses": codes,
    }
    if known.pace:
        row = dataclasses.asdict(known.pace)
        document["pace"] = {**row, "digest": _digest(fingerprint, list(row.values()))}
    text = json.dumps(document).encode("ascii")
    replace_file(path, lambda sink: sink.write(text))


def is_ours(path: str) -> bool:
    """Whether a file may be replaced: `write` has written it, or nothing is in it."""
    try:
        with open(path, "rb") as file:
            return _BEGINNING.startswith(file.read(len(_BEGINNING)))  # all of it, or cut short
    except (OSError, ValueError):  # no path, or none of this system
        return False


def _digest(fingerprint: str, values: list[Any]) -> str:
    return hashlib.sha256(json.dumps([fingerprint, values]).encode()).hexdigest()
