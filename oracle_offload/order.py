"""The order in which units are used, kept in a file from one run to the next.

The engine learns the order in the first step, whose copies come late for that: a checkpoint
recomputes what nobody could know of. An order that is known before serves the first step as well.
The file is of one model, known by its fingerprint. A file that is not is passed over with a line in
the log, because what it says would cost late copies; and what this library has not written is never
overwritten.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .host.replace import replace_file
from .views.schema import schema

if TYPE_CHECKING:
    from .attachment import Attachment

logger = logging.getLogger("oracle_offload")

SCHEMA = schema("order", 1)
MOST_USES = 32768  # OO_MAX_EXPECTED
_MOST_BYTES = 1 << 20
_KINDS = 3
# What a file of ours begins with, of whatever version, also where the rest of it is lost.
_BEGINNING = json.dumps({"schema": schema("order", 1)}).encode()[: -len('1"}')]

Use = tuple[int, int]  # a unit, by its number in the model, and the kind of its use


class UnusableOrder(Exception):
    """A file holds no order of this model; the message says why."""


class OrderFile:
    """The learned order of one attached model, and the file that it is kept in.

    Parameters
    ----------
    path : str or path
        The file, or the folder that it lies in; there it is named after the fingerprint.

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
        self._known: list[Use] | None = None
        self._steps = 0
        self._is_foreign = False

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
            attachment.state.engine.expect([(ids[unit], kind) for unit, kind in known])
            attachment.before_forward()  # the arena grows to the blocks that are known now
        except FileNotFoundError:
            return
        except Exception as error:  # whatever a file does, the model trains without it
            self._is_foreign = not is_ours(self.path)
            logger.warning(
                "%s: order_file=%r is not used, the order is learned anew: %s",
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
        """Write the order that was learned, if it is another than the file's.

        What fails is logged: no step and no detach fails for a file.
        """
        try:
            found = self._learned(attachment)
            if found is None or found == self._known or self._is_foreign:
                return
            self._known = found
            write(self.path, self._fingerprint, found)
        except Exception as error:
            logger.warning("order_file=%r cannot be written: %s", self.path, error)

    def _learned(self, attachment: Attachment) -> list[Use] | None:
        numbers = {
            layer.unit: self._numbers[layer.name]
            for layer in list(attachment.layers)
            if layer.name in self._numbers
        }
        visits = attachment.state.engine.visits(attachment.model)
        sweep = repeated_sweep([(numbers[u], kind) for u, kind in visits if u in numbers])
        return sweep if sweep is None or len(sweep) <= MOST_USES else None


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


def read(path: str, fingerprint: str, units: int) -> list[Use]:
    """Return the order that a file has of a model of `units` units.

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
    return [(code // _KINDS, code % _KINDS) for code in codes]


def write(path: str, fingerprint: str, uses: Sequence[Use]) -> None:
    """Write an order in the place of what was there, at once or not at all.

    Raises
    ------
    OSError
        It cannot be written.
    """
    codes = [unit * _KINDS + kind for unit, kind in uses]
    document = {
        "schema": SCHEMA,
        "fingerprint": fingerprint,
        "digest": _digest(fingerprint, codes),
        "uses": codes,
    }
    text = json.dumps(document).encode("ascii")
    replace_file(path, lambda sink: sink.write(text))


def is_ours(path: str) -> bool:
    """Whether a file may be replaced: `write` has written it, or nothing is in it."""
    try:
        with open(path, "rb") as file:
            return _BEGINNING.startswith(file.read(len(_BEGINNING)))  # all of it, or cut short
    except (OSError, ValueError):  # no path, or none of this system
        return False


def _digest(fingerprint: str, codes: list[int]) -> str:
    return hashlib.sha256(json.dumps([fingerprint, codes]).encode()).hexdigest()
