"""Find the messages of `templates` in a text and read what they state.

Linear in the length of the text: one literal search per template, then bounded patterns around at
most `MOST_HITS` hits of each, so no input makes it slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...host.terminal import printable
from .facts import SIZE, UNLIMITED, Fact, compiled, parse_size
from .templates import NAMED, PROOF, TEMPLATES, Template

# A log repeats itself; the first hits show what began it and the last what ended it.
FIRST_HITS, LAST_HITS = 3, 9
MOST_HITS = FIRST_HITS + LAST_HITS
# A line is looked for at most this far away, so one endless line costs no more than many short.
LINE_REACH = 600
# A number is quoted with this much before and after it.
NEAR = (60, 55)
# Below this a text in which nothing was found is searched once more with its lines joined.
UNWRAP_LIMIT = 1 << 18

# Most anchors contain one of these: where it is absent, none of its anchors is searched for.
_KEYS = ("emory", "Memory", "MEM", "KILL", "kill", "ALLOC", "SIG", "OOM", "CUDA", "err", "-9")

_APIS = {"CUDA": "cuda", "HIP": "rocm", "XPU": "xpu"}
_EDGES = str.maketrans(dict.fromkeys("│┃║╭╮╰╯─━═╔╗╚╝\x00\ufeff", " "))
_ANSI = r"\x1b\[[0-9;?]{0,20}[A-Za-z]"
_PREFIX = (
    r"(?m)^[ \t]{0,40}"
    r"(?:(?:\[rank\d{1,5}\]:|stderr:|\[\d{1,6},\d{1,6}\]<std(?:err|out)>:|>) ?){1,4}"
)


class Process(NamedTuple):
    """One line of the list of processes on the card: `nbytes` None where it was not known."""

    pid: int | None
    nbytes: int | None
    is_self: bool


class Finding(NamedTuple):
    """One message found in a text."""

    template: Template
    backend: str | None
    device: int | None
    facts: dict[str, Fact]
    processes: tuple[Process, ...]
    position: int
    end: int
    line: int
    quote: str
    absurd: bool = False  # "more than 1EB": a size that is no size

    def value(self, name: str) -> int | None:
        """Return a fact in bytes, or None where the text does not state it."""
        fact = self.facts.get(name)
        return None if fact is None else fact.value


def unwrap(text: str) -> str:
    """Return `text` on one line: colours, box edges, rank prefixes and line breaks removed."""
    text = compiled(_ANSI).sub("", text).translate(_EDGES)
    text = compiled(_PREFIX).sub("", text).replace("\\n", " ")
    return " ".join(text.split())


def find(text: str) -> list[Finding]:
    """Return every message found in `text`, in the order of the text."""
    findings = list(_find(text))
    if not findings and len(text) <= UNWRAP_LIMIT:
        joined = unwrap(text)
        findings = [
            finding._replace(
                line=0,
                facts={name: fact._replace(line=0) for name, fact in finding.facts.items()},
            )
            for finding in _find(joined)
        ]
    findings.sort(key=lambda finding: (finding.position, -finding.template.strength))
    findings = _without_echoes(findings, text)
    return findings if findings and findings[0].line == 0 else _numbered(findings, text)


def _numbered(findings: list[Finding], text: str) -> list[Finding]:
    """Turn the offsets kept in `line` into line numbers, counting every line once."""
    offsets = {finding.position for finding in findings}
    offsets.update(fact.line for finding in findings for fact in finding.facts.values())
    lines, line, last = {}, 1, 0
    for offset in sorted(offsets):
        line += text.count("\n", last, offset)
        lines[offset], last = line, offset
    return [
        finding._replace(
            line=lines[finding.position],
            facts={
                name: fact._replace(line=lines[fact.line]) for name, fact in finding.facts.items()
            },
        )
        for finding in findings
    ]


def _find(text: str) -> Iterator[Finding]:
    absent = [key for key in _KEYS if key not in text]
    for template in TEMPLATES:
        anchor = template.anchor
        if not any(key in anchor for key in absent) and anchor in text:
            for position in _hits(text, anchor):
                finding = _read(template, text, position)
                if finding is not None:
                    yield finding


def _hits(text: str, anchor: str) -> list[int]:
    """Return positions of `anchor`: the first `FIRST_HITS` and the last `LAST_HITS`."""
    hits: list[int] = []
    position = text.find(anchor)
    while position >= 0 and len(hits) < FIRST_HITS:
        hits.append(position)
        position = text.find(anchor, position + len(anchor))
    if position < 0:
        return hits
    floor = position
    last: list[int] = []
    end = len(text)
    while len(last) < LAST_HITS:
        position = text.rfind(anchor, floor, end)
        if position < 0:
            break
        last.append(position)
        end = position
    return hits + last[::-1]


def _read(template: Template, text: str, position: int) -> Finding | None:
    start = max(0, position - template.before) if template.before else _line_start(text, position)
    end = min(len(text), position + len(template.anchor) + template.after)
    if template.strength == PROOF:  # the next message of the kind is another message
        following = text.find(template.anchor, position + len(template.anchor), end)
        if following >= 0 and not template.raw:
            end = max(following - 12, position + len(template.anchor))
    # Not in the middle of a number, or between one and its unit.
    while start < position and text[start - 1 : start].isdigit() and text[start].isdigit():
        start += 1
    while end > position and text[end - 1].isalnum() and text[end : end + 1].isalnum():
        end -= 1
    raw = text[start:end]
    window = raw if template.raw else unwrap(raw)
    match = compiled(template.pattern).search(window)
    if match is None:
        return None
    groups = match.groupdict()
    backend = template.backend
    if groups.get("backend"):
        backend = _APIS[groups["backend"]]
    if groups.get("library") == "HIPBLAS":
        backend = "rocm"
    if groups.get("tfdevice") == "CPU":
        backend = "cpu"
    index = groups.get("device") or groups.get("device2")
    facts = _facts(template, window, raw, text, start)
    processes: tuple[Process, ...] = ()
    if template.name == "device-allocator":
        processes = _processes(window, facts)
        listed = compiled(r"\bProcess\s{1,9}\d").search(raw)
        spot = start + listed.start() if listed else position
        _derive_device(facts, processes, quote(text, spot, 8, 0, 240), spot)
    if template.name.startswith("kernel-"):
        _kernel_rss(facts, window, raw, text, start)
    return Finding(
        template,
        backend,
        int(index) if index is not None else None,
        facts,
        processes,
        position,
        end,
        position + 1,  # an offset until `_numbered`
        quote(text, position, len(template.anchor)),
        "more than 1EB" in window[:200],
    )


def _facts(template: Template, window: str, raw: str, text: str, start: int) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for name, pattern in template.fields:
        if name in facts:
            continue
        match = None
        for match in compiled(pattern).finditer(window):  # noqa: B007
            if template.before <= 1000:
                break  # the first one; with a long look back the nearest, which is the last
        if match is None or _cut(window, match.start(1), match.end(1)):
            continue
        value = parse_size(match[1])
        if value is not None and value * template.unit < UNLIMITED:
            spot = start + _in_raw(raw, window, match)
            facts[name] = Fact(
                name,
                value * template.unit,
                quote(text, spot, len(match[1]), *NEAR),
                spot,  # an offset until `_numbered`
            )
    return facts


def _in_raw(raw: str, window: str, match: re.Match[str]) -> int:
    """Return where a number of the unwrapped text is in the text as it was printed."""
    for needle in (match[1], match[1].split(" ")[0]):  # a break may be between number and unit
        spot = raw.find(needle)
        for _ in range(window.count(needle, 0, match.start(1))):
            spot = raw.find(needle, spot + len(needle)) if spot >= 0 else spot
        if spot >= 0:
            return spot
    return 0


def _cut(window: str, start: int, end: int) -> bool:
    """Return whether more digits follow, so that a bounded pattern saw only a piece of a number."""
    return window[start - 1 : start].isdigit() or window[end : end + 1].isdigit()


def _processes(window: str, facts: dict[str, Fact]) -> tuple[Process, ...]:
    """Read the list of processes; where none is called "this process", infer which one is.

    Inside a container the process sees its own number differently, so PyTorch prints it as
    `Process N`. It must hold at least what its allocator reserved: the smallest such is taken.
    """
    found = []
    pattern = rf"(?:Process (\d{{1,10}})|this process) has {SIZE} memory in use"
    for match in compiled(pattern).finditer(window):
        pid = int(match[1]) if match[1] else None
        found.append(Process(pid, parse_size(match[2]), pid is None))
    if found and not any(process.is_self for process in found):
        held = sum(facts[name].value for name in ("allocated", "unallocated") if name in facts)
        able = [p for p in found if p.nbytes is not None and p.nbytes * 1.01 >= held > 0]
        if able:
            mine = min(able, key=lambda process: process.nbytes or 0)
            found[found.index(mine)] = mine._replace(is_self=True)
    return tuple(found)


def _derive_device(
    facts: dict[str, Fact], processes: tuple[Process, ...], listed: str, spot: int
) -> None:
    """Add what follows from the printed figures: reserved, unallocated, other processes.

    `cached` of torch 1.0 to 1.3 is what is unallocated here: it excluded what tensors used.
    """
    allocated = facts.get("allocated")
    if allocated is not None:
        unallocated, reserved = facts.get("unallocated"), facts.get("reserved")
        if reserved is None and unallocated is not None:
            total = allocated.value + unallocated.value
            facts["reserved"] = unallocated._replace(name="reserved", value=total, derived=True)
        elif reserved is not None and unallocated is None and reserved.value >= allocated.value:
            rest = reserved.value - allocated.value
            facts["unallocated"] = reserved._replace(name="unallocated", value=rest, derived=True)
    mine = [process for process in processes if process.is_self]
    if mine and mine[0].nbytes is not None and "this_process" not in facts:
        facts["this_process"] = Fact("this_process", mine[0].nbytes, listed, spot, derived=True)
    others = [process.nbytes for process in processes if not process.is_self]
    if mine and others and None not in others:
        held = sum(nbytes for nbytes in others if nbytes is not None)
        facts["other_processes"] = Fact("other_processes", held, listed, spot, derived=True)


def _kernel_rss(facts: dict[str, Fact], window: str, raw: str, text: str, start: int) -> None:
    """Sum what the killed process held: anonymous, file and shared pages (pinned memory too)."""
    match = None
    pattern = (
        r"(?<!now )anon-rss:(\d{1,15})kB, ?file-rss:(\d{1,15})kB(?:, ?shmem-rss:(\d{1,15})kB)?"
    )
    for match in compiled(pattern).finditer(window):  # noqa: B007
        pass
    if match is None:
        return
    used = 1024 * sum(int(part) for part in match.groups() if part)
    spot = start + max(raw.find(f"anon-rss:{match[1]}kB"), 0)
    facts["used"] = Fact("used", used, quote(text, spot, 8), spot, derived=True)


def _line_start(text: str, position: int) -> int:
    floor = max(0, position - LINE_REACH)
    return max(text.rfind("\n", floor, position) + 1, floor)


def quote(text: str, position: int, length: int, before: int = 140, after: int = 160) -> str:
    """Return the line around `position`, printable; a long one is cut on both sides."""
    start = _line_start(text, position)
    stop = text.find("\n", position, position + length + LINE_REACH)
    stop = min(len(text), position + length + LINE_REACH) if stop < 0 else stop
    low, high = max(start, position - before), min(stop, position + length + after)
    line = printable(text[low:high].translate(_EDGES)).strip()
    return ("…" if low > start else "") + line + ("…" if high < stop else "")


def _without_echoes(findings: list[Finding], text: str) -> list[Finding]:
    """Drop what only repeats a neighbour, and an exit code that a container says was no kill."""
    kept: list[Finding] = []
    named = [f for f in findings if f.template.name != "out-of-memory-class"]
    for finding in findings:
        name, position = finding.template.name, finding.position
        if name == "out-of-memory-class" and any(
            position <= other.position <= position + 300 for other in named
        ):
            continue
        if name == "exit-137":
            around = text[max(0, position - 400) : position + 400]
            if '"OOMKilled": false' in around or "OOMKilled:false" in around:
                continue
        if kept and name == kept[-1].template.name and finding.template.strength <= NAMED:
            previous = kept[-1]
            if position - previous.position < 400 and not finding.facts:
                continue
        kept.append(finding)
    return kept
