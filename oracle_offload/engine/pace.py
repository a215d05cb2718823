"""How fast the steps on one device follow each other, and how often it waits for the host.

At the end of each optimizer step the host's clock and the engine's counters are put down. Of the
uses of weights one in 29 asks, before anything of it is queued, whether the device has run out of
work; so does the first use of each step, because the time before it belongs to the code that brings
the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SAMPLED_ONE_IN = 29  # a prime: in steps of another length each is sampled sooner or later
WARM_UP_STEPS = 2  # the engine learns the order in the first; the arena may grow after it
_MOST_STEPS = 16  # what was longer ago says nothing about now


@dataclass(frozen=True)
class Window:
    """What the steps of a while took and moved, all together, on one device.

    Attributes
    ----------
    steps : int
        How many.
    seconds : float
        From the end of the step before them to the end of the last, by the host's clock.
    passes : int
        Forwards that backward followed: one a step, or more where gradients accumulate.
    looks, idle_looks : int
        How many uses asked whether the device had run out of work, and how many found it so.
    batch_s : float
        Seconds from the end of a step to the first use of the next, where the device had run out
        of work by then.
    counters : dict
        By how much the engine's counters, of all models, have grown.
    """

    steps: int
    seconds: float
    passes: int
    looks: int
    idle_looks: int
    batch_s: float
    counters: Mapping[str, Any]


class Pace:
    """The steps of one device.

    Parameters
    ----------
    now_s : callable
        Answers the host's clock, in seconds.

    Attributes
    ----------
    ended : int
        Steps since models were attached or detached last.
    steps : int
        Steps in all.
    uses : int
        Of weights, so far.
    next_look : int
        At how many uses `look` is to be called.
    passes : int
        Counted by `DeviceState.begin_forward`.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._marks: deque[Mapping[str, Any]] = deque(maxlen=_MOST_STEPS + 1)
        self._ended_s: float | None = None  # when the last step did, until the next has begun
        self._next_sample = 1
        self._looks = 0
        self._idle_looks = 0
        self._batch_s = 0.0
        self.ended = 0
        self.steps = 0
        self.uses = 0
        self.next_look = 1
        self.passes = 0

    def look(self, idle: bool) -> None:
        """A use begins; `idle` says whether the device had run out of work before it."""
        # Threads that train different models look at once: the first takes what had ended.
        ended_s, self._ended_s = self._ended_s, None
        if ended_s is not None:
            if idle:
                self._batch_s += self._now_s() - ended_s
        else:
            self._looks += 1
            self._idle_looks += idle
        while self._next_sample <= self.uses:
            self._next_sample += SAMPLED_ONE_IN
        self.next_look = self._next_sample

    def end_step(self, counters: Mapping[str, Any]) -> bool:
        """An optimizer has stepped; a second one, after which nothing was used, ends no step.

        Parameters
        ----------
        counters : mapping
            The engine's, of all models.

        Returns
        -------
        bool
            Whether it ends a step.
        """
        last = self._marks[-1] if self._marks else None
        if last is not None and last["units"] != counters["units"]:
            self.ended = 0  # the warm-up begins again, and lets go of what was noted
        elif last is not None and last["acquires"] == counters["acquires"]:
            return False
        self.ended += 1
        self.steps += 1
        self._ended_s = self._now_s()
        self.next_look = self.uses + 1
        if self.ended <= WARM_UP_STEPS:
            self._marks.clear()
        self._marks.append(
            {
                **counters,
                "now_s": self._ended_s,
                "passes": self.passes,
                "looks": self._looks,
                "idle_looks": self._idle_looks,
                "batch_s": self._batch_s,
            }
        )
        return True

    def window(self) -> Window | None:
        """Return the last steps after the warm-up; None where there are none yet."""
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        grown = {key: last[key] - first[key] for key in last}
        return Window(
            steps=len(self._marks) - 1,
            seconds=grown.pop("now_s"),
            passes=grown.pop("passes"),
            looks=grown.pop("looks"),
            idle_looks=grown.pop("idle_looks"),
            batch_s=grown.pop("batch_s"),
            counters=grown,
        )
