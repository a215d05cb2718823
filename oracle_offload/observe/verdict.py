"""What holds the steps of one device up, in one sentence; docs/summary.md has the arithmetic.

Every figure comes of the engine's counters and the host's clock over the last steps, and of the
bytes that a step needs at least (`Attachment.x_min_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.pace import WARM_UP_STEPS, Window
from ..host.sizes import GIB
from ..layers.traffic import stalls_of

# A step that computes for this share of its time is held up by nothing else.
_COMPUTES = 0.9


@dataclass(frozen=True)
class Verdict:
    """What bounds a step. Times in seconds per step, None where they are not known.

    Attributes
    ----------
    bound : str
        ``"link"``, ``"compute"``, ``"host"`` or ``"unknown"``.
    why : str
        What is missing, where it is unknown.
    steps : int
        How many the figures are of.
    step_s : float
        What a step takes.
    stall_s, idle_s, compute_s : float
        Of that, the device waits for copies, has nothing queued, and computes.
    link_s : float
        For how long the link is busy with copies to the device.
    overlap : float
        The share of that which no computing waited for; None where nothing was copied.
    bound_s : float
        What a step could take at best: computing and the least bytes side by side.
    arena_gib_s, ram_gib_s : float
        What one more GiB of arena, or of page-locked host memory, would take off.
    """

    bound: str
    why: str = ""
    steps: int = 0
    step_s: float | None = None
    stall_s: float | None = None
    idle_s: float | None = None
    compute_s: float | None = None
    link_s: float | None = None
    overlap: float | None = None
    bound_s: float | None = None
    arena_gib_s: float | None = None
    ram_gib_s: float | None = None

    def sentence(self, device: str) -> str:
        """Return the verdict on `device` as one sentence."""
        if self.bound_s is None or self.step_s is None:
            return f"{device}: what bounds a step is unknown: {self.why}."
        held = {
            "link": f"waits {_time(self.stall_s)} for copies",
            "host": f"has nothing to do for {_time(self.idle_s)}",
            "compute": f"computes {_time(self.compute_s)}",
        }[self.bound]
        ratio = f" (now {self.step_s / self.bound_s:.2f} times that)" if self.bound_s else ""
        return (
            f"{device} is {self.bound}-bound: of the {_time(self.step_s)} of a step it {held}; a "
            f"step could take {_time(self.bound_s)} at best{ratio}; one more GiB of arena would "
            f"save {_saving(self.arena_gib_s)}, one more GiB of page-locked RAM "
            f"{_saving(self.ram_gib_s)}."
        )

    def copies(self) -> str:
        """Return how well copies hide behind computing, as a sentence; empty where unknown."""
        if self.overlap is None or self.bound_s is None:
            return ""
        return (
            f"Copies to the device take {_time(self.link_s)} of a step, of which "
            f"{100 * self.overlap:.0f}% held nothing up (mean of {self.steps} steps)."
        )


@dataclass(frozen=True)
class Load:
    """What one model asks of the link in a step.

    Attributes
    ----------
    weight_bytes, capacity_bytes : int
        Its managed weights, and its part of the arena.
    step_bytes : int
        That moved to the device in the last step.
    """

    weight_bytes: int
    capacity_bytes: int
    step_bytes: int

    def least_bytes(self, passes: float, more_bytes: int = 0) -> float:
        """Bytes that a step cannot do without, with `more_bytes` more of arena.

        As docs/how-it-works.md has it, for each forward and its backward; a model that moves less
        (it did not train) cannot need more than it moves.
        """
        missing = max(0, self.weight_bytes - self.capacity_bytes - more_bytes)
        return min(2 * missing * passes, self.step_bytes)


def judge(
    window: Window | None,
    ended: int,
    loads: Sequence[Load],
    pageable_bytes: int,
    unlocked_rate: float | None,
) -> Verdict:
    """Return what bounds the steps of `window`.

    Parameters
    ----------
    window : Window or None
        The last steps.
    ended : int
        How many have ended in all.
    loads : sequence of Load
        One for each model.
    pageable_bytes : int
        Of masters that are not page-locked.
    unlocked_rate : float or None
        Bytes per second at which those reach the device; None where that was not measured on the
        clock that the steps were.
    """
    if window is None:
        needed = WARM_UP_STEPS + 1
        return Verdict("unknown", f"it takes {needed} optimizer steps to tell; {ended} so far")
    counters, steps = window.counters, window.steps
    step_s = window.seconds / steps
    rate = _per_second(counters["h2d_timed_bytes"], counters["h2d_seconds"])
    moved = counters["h2d_bytes"] / steps
    if moved and rate is None:
        return Verdict("unknown", "no copy to the device was timed yet", steps, step_s)
    link_s = moved / rate if rate else 0.0
    stall_s = stalls_of(counters)[1] / steps
    if step_s <= 0 or link_s > 1.25 * step_s:
        why = "the clock did not wait for the device; end each step with loss.item(), or the like"
        return Verdict("unknown", why, steps, step_s)
    stall_s = min(stall_s, step_s)
    overlap = max(0.0, 1 - stall_s / link_s) if link_s else None
    batch_s = min(window.batch_s / steps, step_s - stall_s)
    idle_share = window.idle_looks / window.looks if window.looks else 0.0
    idle_s = batch_s + idle_share * (step_s - stall_s - batch_s)
    # A host that waits for gradients on their way leaves the device idle: that is the link's doing.
    back_rate = _per_second(counters["d2h_timed_bytes"], counters["d2h_seconds"])
    back_s = counters["d2h_bytes"] / steps / back_rate if back_rate else 0.0
    back_s = min(back_s, idle_s)
    stall_s, idle_s = stall_s + back_s, idle_s - back_s
    compute_s = step_s - stall_s - idle_s

    def bound_s(more_bytes: int = 0) -> float:
        passes = window.passes / steps
        least = sum(load.least_bytes(passes, more_bytes) for load in loads)
        # A link that is measured too slow asks for more than the step took: it took no more.
        return min(step_s, max(compute_s, least / rate if rate else 0.0, back_s))

    if compute_s >= _COMPUTES * step_s:
        waited_s = counters["feed_wait_seconds"] / steps
        if unlocked_rate is not None and waited_s > (1 - _COMPUTES) * step_s:
            why = (
                f"for {_time(waited_s)} of a step the host waited for the threads that copy what "
                "is not page-locked, and whether the device computed meanwhile is not measured"
            )
            return Verdict("unknown", why, steps, step_s)
        bound = "compute"
    else:
        bound = "link" if stall_s >= idle_s else "host"
    return Verdict(
        bound=bound,
        steps=steps,
        step_s=step_s,
        stall_s=stall_s,
        idle_s=idle_s,
        compute_s=compute_s,
        link_s=link_s,
        overlap=overlap,
        bound_s=bound_s(),
        arena_gib_s=bound_s() - bound_s(GIB),
        ram_gib_s=_locking_saves(bound, moved, loads, pageable_bytes, unlocked_rate, rate),
    )


def _locking_saves(
    bound: str,
    moved: float,
    loads: Sequence[Load],
    pageable_bytes: int,
    unlocked_rate: float | None,
    rate: float | None,
) -> float | None:
    """Return what it would save to page-lock one GiB more of the masters; None where unknown."""
    weights = sum(load.weight_bytes for load in loads)
    if bound != "link" or not pageable_bytes or not weights:
        return 0.0
    if rate is None or unlocked_rate is None:
        return None
    # Each byte of the masters travels as often as the others.
    faster = min(GIB, pageable_bytes) / weights * moved
    return max(0.0, faster / unlocked_rate - faster / rate)


def _per_second(nbytes: float, seconds: float) -> float | None:
    return nbytes / seconds if seconds > 0 else None


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _saving(seconds: float | None) -> str:
    return "nothing" if seconds is not None and seconds < 5e-6 else _time(seconds)
