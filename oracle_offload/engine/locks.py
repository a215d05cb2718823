"""The locks of the Python layer, and the order in which a thread may take them.

A thread may wait for a lock only while it holds none from the same line on:

1. ``turn``, one per module whose weights are lent to its own forward: which thread computes there.
   It is held for as long as that forward runs, which takes the others as it needs them.
2. ``structure``, one per model: one thread looks again at a model that changed.
3. ``activations``, one per offloader of activations: what has left, and what is on its way.
4. ``gradients``, one per device: what graph tasks have on its way to the host.
5. ``device``, one per device: stamps, segments and listeners of its `DeviceState`, and the arenas,
   layers and pieces of the models that are attached there.
6. ``registry``, one: which device has an engine.
7. The mutex of an engine, in C. Only the lock of a master that engines share is taken under it, or
   that of the engine's copy threads, which take no other.

A lock that this thread holds may be taken again. Modules whose forwards call one another take
turns from the outside in, so a thread may hold several; which code calls which is the model's
matter, so a turn is waited for with a limit. What a lock protects is changed under it. One look-up
(``dict.get``, an attribute that holds a tuple, ``list(layers)``) needs no lock: the GIL makes it
one step. The hot path, a loan, makes such look-ups alone and takes no lock but the mutex, and the
turn where it lends to a module's own forward. Once what memory keeps of a file has arrived, or
a sweep has brought no more of it, a loan takes the device's to lock it; so does one after the
first, and one after a backward, to choose what memory keeps. So a loan may begin only where that
may be taken.

The GIL has no place in the order, because no thread waits with it: Python waits for a lock without
it; the binding tries the mutex, and waits for it only after it has released the GIL; and the thread
that holds the mutex asks for the GIL after giving it up.

Any allocation may start the garbage collector, which may delete a model whatever locks this thread
holds. So the end of a deleted model waits for no lock and interrupts no change: it takes those that
it needs if they are free (`Lock.if_free`), and else leaves the work to the next attach or detach.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
from contextlib import AbstractContextManager

from .._core import Taken


class Lock(_thread.RLock):  # type: ignore[misc] # the interpreter allows it
    """A reentrant lock with its line in the order above.

    A ``with`` block takes it and gives it back in C: no interrupt comes in between, up to CPython
    3.13.

    Parameters
    ----------
    line : str
        ``"turn"``, ``"structure"``, ``"activations"``, ``"gradients"``,
        ``"device"`` or ``"registry"``.
    """

    line: str

    def __new__(cls, line: str) -> Lock:
        """Make one of a line."""
        made = super().__new__(cls)
        made.line = line
        return made

    def is_held(self) -> bool:
        """Whether this thread holds it."""
        owned: bool = self._is_owned()  # type: ignore[attr-defined]
        return owned

    def within(self, seconds: float) -> AbstractContextManager[bool]:
        """Take it for a ``with`` block, unless other threads hold it for so long; say whether."""
        return Taken(functools.partial(self.acquire, True, seconds), self.release)

    def if_free(self) -> AbstractContextManager[bool]:
        """Take it for a ``with`` block, if no thread holds it, this one included; say whether."""
        if self.is_held():
            return contextlib.nullcontext(False)
        return Taken(functools.partial(self.acquire, False), self.release)
