"""Why memory ran out: rules over the figures of one message and over the text around it.

The order of the rules is the order of certainty. PyTorch asks the driver only after it has given
every wholly unused cached segment back, so "cached but unused" memory at the time of the error is
in segments that are partly in use.
"""

from __future__ import annotations

from typing import NamedTuple

from ...host.sizes import GIB, MIB, PIB
from .facts import compiled, format_size
from .history import Sign, records_in_log, signs
from .parse import Finding
from .templates import DEVICE_BACKENDS

# Small tensors share segments: up to 1 MiB one of 2 MiB, up to 10 MiB one of 20 MiB.
SHARED_SEGMENT = 20 * MIB
# How far back the surroundings of a message are read.
LOOK_BACK = 32 * 1024

TITLES = {
    "too_big": "The work needs more memory than the card has",
    "fragmentation": "Memory is there, but in pieces that are too small",
    "other_process": "Other processes hold the memory",
    "leak": "Memory grows with every step",
    "host_memory": "Host memory (RAM) ran out, not the card",
    "one_tensor": "This one tensor exceeds your RAM",
    "memory_limit": "A memory limit of the container, job or shell was reached",
    "shared_memory": "Shared memory (/dev/shm) is full",
    "locked_memory": "Page-locked (pinned) host memory was refused",
    "allocator_setting": "An allocator setting does not work here",
    "device_cap": "The process reached the cap it was given on the card",
    "driver_refusal": "The driver refused although the card has enough free memory",
    "spilled": "The card is over-full and spills into system memory",
    "bad_size": "The size asked for is a mistake",
    "first_backward": "The first backward pass needs more than the forward pass",
    "optimizer_state": "The first optimizer step allocates the optimizer's states",
    "second_step": "The second step is the first with optimizer states in place",
    "evaluation": "Evaluation needs more memory than training",
    "longest_batch": "One batch is much longer than the others",
    "unknown": "The text does not say what filled it",
}

# Causes that say when or on what the memory ran out; they refine "too big" and "unknown" only.
_REFINING = ("too_big", "unknown")


class Cause(NamedTuple):
    """One explanation: a key of `TITLES`, a confidence (high, medium, low), and its reason."""

    name: str
    confidence: str
    why: str

    @property
    def title(self) -> str:
        """The cause in words."""
        return TITLES[self.name]


def where(cause: str, backend: str | None) -> str:
    """Return what gave out: `device`, `host`, `limit`, `setting`, `program` or `unknown`."""
    fixed = {
        "host_memory": "host",
        "one_tensor": "host",
        "memory_limit": "limit",
        "shared_memory": "limit",
        "locked_memory": "limit",
        "device_cap": "limit",
        "allocator_setting": "setting",
        "bad_size": "program",
    }
    if cause in fixed:
        return fixed[cause]
    if backend in DEVICE_BACKENDS:
        return "device"
    return "host" if backend in ("cpu", "host") else "unknown"


def rank(
    finding: Finding,
    text: str,
    history: list[Sign],
    *,
    expandable: bool | None = None,
    ram: int | None = None,
) -> list[Cause]:
    """Return the causes of one message, the most likely first.

    Parameters
    ----------
    finding : Finding
        The message.
    text : str
        The log it is in: up to 32 KiB before it are read.
    history : list of Sign
        What a step history showed; outweighs what the log shows.
    expandable : bool, optional
        Whether expandable segments were on, where that is known from outside the text.
    ram : int, optional
        Bytes of the machine's memory, where the text is of this machine.
    """
    before = text[max(0, finding.position - LOOK_BACK) : finding.position]
    base = _of_message(finding, before, expandable, ram)
    seen = list(history) or _of_surroundings(before)
    causes = [base]
    device = finding.backend in DEVICE_BACKENDS
    for sign in seen:
        if sign.cause == base.name:
            continue
        cause = Cause(sign.cause, sign.confidence, sign.why)
        if device and base.name in _REFINING and causes[0] is base:
            causes.insert(0, cause)
        else:
            causes.append(cause)
    return causes


def _of_message(finding: Finding, before: str, expandable: bool | None, ram: int | None) -> Cause:
    template = finding.template
    if finding.absurd:
        return Cause("bad_size", "high", "no card holds an exabyte: the size was computed wrongly")
    requested = finding.value("requested")
    if requested is not None and requested >= PIB:
        why = f"{format_size(requested)} were asked for at once: the size was computed wrongly"
        return Cause("bad_size", "high", why)
    if template.name in ("cuda-runtime-error", "hip-runtime-error") and _pins(before):
        return Cause(
            "locked_memory", "medium", "the failing call was locking host memory (pin_memory)"
        )
    if template.name == "cuda-driver-error":
        if expandable or _sets_expandable(before):
            return Cause("allocator_setting", "high", "expandable_segments was switched on")
        return Cause("allocator_setting", "low", "PyTorch makes such calls for expandable segments")
    if template.cause is not None:
        return Cause(template.cause, _confidence(finding, before), template.says)
    if template.backend == "cpu":
        if ram is not None and requested is not None and requested > ram:
            why = f"{format_size(requested)} were asked for at once, of {format_size(ram)} of RAM"
            return Cause("one_tensor", "high", why)
        asked = f" ({format_size(requested)} asked for)" if requested is not None else ""
        return Cause("host_memory", "high", f"the allocation{asked} was in host memory")
    if template.name == "mps-allocator":
        return _of_mps(finding)
    if template.name in ("device-allocator", "cuda-malloc-async"):
        return _of_device(finding)
    return Cause("unknown", "low", "the message names no figures")


def _confidence(finding: Finding, before: str) -> str:
    """Raise a suspicion where DeepSpeed's own log shows host memory nearly full."""
    confidence = finding.template.confidence
    if finding.template.name == "deepspeed-minus-9":
        used = compiled(r"percent = (\d{1,3}(?:\.\d)?)%").findall(before)
        if used and float(used[-1]) >= 90:
            return "medium"
    return confidence


def _of_mps(finding: Finding) -> Cause:
    cap, allocated = finding.value("cap"), finding.value("allocated")
    if cap is None or allocated is None:
        return Cause("too_big", "medium", "Metal refused the allocation")
    held = allocated + (finding.value("other") or 0)
    why = f"{format_size(held)} of the {format_size(cap)} that Metal recommends were in use"
    return Cause("too_big", "high", why)


def _of_device(finding: Finding) -> Cause:
    asked, total, free = (finding.value(name) for name in ("requested", "total", "free"))
    cap, unused, held = (finding.value(name) for name in ("cap", "unallocated", "reserved"))
    if held is None:
        held = finding.value("allocated")
    if asked is None or total is None:
        return Cause("unknown", "low", "the message was cut off before its figures")
    if asked > total:
        why = (
            f"one allocation of {format_size(asked)} is larger than the card ({format_size(total)})"
        )
        return Cause("too_big", "high", why)
    if cap is not None and cap < total and free is not None and free >= asked:
        why = f"only {format_size(cap)} are allowed, and {format_size(free)} of the card were free"
        return Cause("device_cap", "high", why)
    if held is not None and held > total:
        why = (
            f"{format_size(held)} are held on a card of {format_size(total)}: Windows spills to RAM"
        )
        return Cause("spilled", "high", why)
    if free is not None and free >= asked + asked // 20 + 64 * MIB:
        why = f"{format_size(free)} were free and only {format_size(asked)} asked for"
        return Cause("driver_refusal", "medium", why)
    if unused is not None and held and unused >= asked:
        share = unused / held
        if share >= (0.1 if asked <= SHARED_SEGMENT else 0.03):
            why = f"{format_size(unused)} were cached but unused, more than was asked for"
            return Cause("fragmentation", "high" if share >= 0.1 else "medium", why)
    return _crowded(finding, asked, total, free, held)


def _crowded(finding: Finding, asked: int, total: int, free: int | None, held: int | None) -> Cause:
    """Tell a full card from one that others fill; never blame others on thin evidence."""
    others = finding.value("other_processes")
    if others is not None and others >= GIB and others + (free or 0) >= asked:
        why = f"other processes hold {format_size(others)} of the card"
        return Cause("other_process", "high" if others * 4 >= total else "medium", why)
    if free is not None and held is not None and not finding.processes:
        outside = total - free - held
        if outside >= max(2 * GIB, total // 4) and outside + free >= asked:
            why = f"{format_size(outside)} of the card are held outside this process's allocator"
            return Cause("other_process", "low", why)
    if held is None:
        return Cause("too_big", "medium", "the card was full")
    why = f"PyTorch holds {format_size(held)} of {format_size(total)} and needs more"
    return Cause("too_big", "high", why)


# -- surroundings ---------------------------------------------------------------------------------


def _traceback(before: str) -> str:
    """Return the last traceback that begins before the message."""
    start = before.rfind("Traceback (most recent call last)")
    return before[start:] if start >= 0 else before[-1500:]


def _pins(before: str) -> bool:
    near = _traceback(before)[-4000:]
    return any(
        word in near
        for word in ("pin_memory=True", ".pin_memory(", "pin memory thread", "cudaHostRegister")
    )


def _sets_expandable(before: str) -> bool:
    pattern = r"(?:export |set |environ\S{0,80}|env:)[^\n]{0,80}expandable_segments ?: ?True"
    return compiled(pattern).search(before) is not None


_EVALUATION = (
    r"^(?:_?evaluat\w{0,20}|_?validat\w{0,20}|validation_step|eval_\w{1,20}|val_\w{1,20}|"
    r"evaluation_loop|prediction_step|predict_step|test_step|run_eval\w{0,20})$"
)
_OTHER_BARS = (
    "shards", "Fetching", "Download", "Loading", "Caching", "Quantiz", "Tokeniz", "Saving", "Map",
    "Generating",
)  # fmt: skip


def _of_surroundings(before: str) -> list[Sign]:
    """Read phase, step and growth from a traceback and from the progress lines above it."""
    found = [sign._replace(confidence="medium") for sign in signs(records_in_log(before)[-2000:])]
    trace = _traceback(before)
    frames = compiled(r'File "[^"\n]{0,300}", line \d{1,7}, in (\w{1,80})').findall(trace)
    start = before.rfind("Traceback (most recent call last)")
    label, done, total = _progress(before if start < 0 else before[:start])
    if any(compiled(_EVALUATION).match(frame) for frame in frames) or label:
        why = "the traceback passes through evaluation" if not label else f"progress says {label!r}"
        found.append(Sign("evaluation", "medium", why))
        return found
    stepping = "_init_group" in frames or "optimizer.step(" in trace
    backward = "loss.backward()" in trace or "backward" in frames or "_engine_run_backward" in trace
    if stepping and (done == 0 or "zeros_like" in trace):
        why = "the traceback is in the first optimizer step, which allocates its states"
        found.append(Sign("optimizer_state", "high", why))
    elif backward and done == 0 and total:
        why = "the traceback is in backward and no step was finished"
        found.append(Sign("first_backward", "high", why))
    elif done == 1 and total and total >= 3:
        why = "one step was finished; the second also has optimizer states to hold"
        found.append(Sign("second_step", "medium", why))
    return found


def _progress(head: str) -> tuple[str | None, int | None, int | None]:
    """Return (evaluation label, steps done, steps in all) of the last progress line."""
    lines = head[-6000:].replace("\r", "\n").rstrip().split("\n")[-3:]
    for line in reversed(lines):
        line = line[-400:]
        label = compiled(
            r"(?:\((valid|validation|eval|val)\)|^\W{0,4}(Evaluation|Evaluating|Validation|Validating)\b)"
        ).search(line)
        counts = compiled(r"(\d{1,9})/(\d{1,9}) \[").findall(line)
        if label is not None:
            return label[1] or label[2], None, None
        if counts and not any(word in line for word in _OTHER_BARS):
            return None, int(counts[-1][0]), int(counts[-1][1])
    return None, None, None
