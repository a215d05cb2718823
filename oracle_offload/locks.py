"""The locks of the Python layer, and the order in which a thread may take them.

A thread may wait for a lock only while it holds none from the same line on:

1. ``turn``, one per module whose weights are lent to its own forward: which thread computes there.
   It is held for as long as that forward runs, which takes the others as it needs them.
2. ``structure``, one per model: one thread looks again at a model that changed.
3. ``watch``, one per model: whether the next forward is watched, and what stands before it.
4. ``device``, one per device: stamps, segments and listeners of its `DeviceState`, and the arenas,
   layers and pieces of the models that are attached there.
5. ``registry``, one: which device has an engine.
6. The mutex of an engine, in C. Only the lock of a master that engines share is taken under it, or
   that of the engine's copy threads, which take no other.

A lock that this thread holds may be taken again. Modules whose forwards call one another take
turns from the outside in, so a thread may hold several; which code calls which is the model's
matter, so a turn is waited for with a limit. What a lock protects is changed under it. One look-up
(``dict.get``, an attribute that holds a tuple, ``list(layers)``) needs no lock: the GIL makes it
one step. The hot path, a loan, makes such look-ups alone and takes no lock but the mutex, and the
turn where it lends to a module's own forward.

The GIL has no place in the order, because nobody waits with it: Python waits for a lock without it;
the binding tries the mutex, and waits for it only after it has released the GIL; and whoever holds
the mutex asks for the GIL after giving it up.

Any allocation may start the garbage collector, which may delete a model whatever locks this thread
holds. So the end of a deleted model waits for no lock and interrupts no change: it takes those that
it needs if they are free (`Lock.if_free`), and else leaves the work to the next attach or detach.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Lock:
    """A reentrant lock with its line in the order above.

    Parameters
    ----------
    line : str
        ``"turn"``, ``"structure"``, ``"watch"``, ``"device"`` or ``"registry"``.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self._lock = threading.RLock()
        self._depth = 0
        self._owner = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._enter()

    def __exit__(self, *details: object) -> None:
        self._leave()

    def take_within(self, seconds: float) -> bool:
        """Take it, unless other threads hold it for so long; return whether it was taken.

        To be given back as at the end of a ``with`` block, by ``__exit__()``.
        """
        if not self._lock.acquire(timeout=seconds):
            return False
        self._enter()
        return True

    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take it if no thread holds it, this one included; yield whether it was taken."""
        if self.is_held() or not self._lock.acquire(blocking=False):
            yield False
            return
        self._enter()
        try:
            yield True
        finally:
            self._leave()

    def _enter(self) -> None:
        self._depth += 1
        self._owner = threading.get_ident()

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()
