"""Find the mutants of the engine: what tools/mutate.py tries, read off the source by rules alone.

Of every call of the driver's table, and of the engine's own functions that wrap one such call:

delete          the call is replaced by its success
other stream    the stream it is given becomes each other stream of the engine
other event     the event it is given becomes the one that the function used before
swap            its statement changes places with the one above, and with the one below

Of every comparison on a line that speaks of a generation, version, reference count or capacity:

negate          == becomes !=, < becomes >=, and so on

Of every chain of && or ||, in all files but those of the plan (PLANNING):

drop            one of its terms

Of the lines of the files that only calculate (CALCULATING), SAMPLE of each file, those whose keys'
SHA-256 comes first, so that the others stay where one line changes:

operator        < becomes <=, == becomes !=, + becomes -, << becomes >>, & becomes |, and so on,
                also in +=
number          one more

What is not a mutant, by rule:

- A number in the length of an array that is declared: no code reads the one more. Nor the 1 of
  `return 1;`, which says that something is true.
- A term dropped in a file of the plan: a wrong decision there costs a copy that comes late, never a
  wrong byte (plan.h), and half of the terms bound a search. Comparisons are mutants as everywhere.
- A swap is of two whole statements of one block, neither of which carries a label or is a jump
  (moving a call behind a jump deletes it, which is a mutant already).
- A swap with a statement that only adds to a counter in `stats`, when the call's statement does not
  mention that counter and cannot leave the block between the two: nothing in between can read it.
- A swap with a statement that takes an event from the engine's free list, or gives one back, which
  the call's statement does not mention: no driver call sees that list, and where either fails the
  function gives back what it took and returns the failure.
- A swap with a declaration that is initialised from plain names and numbers alone, or arithmetic of
  them: a call that is given no address of a local changes none, and the call's statement cannot
  mention what is declared after it. Nor with one that takes the address of an entry of the engine's
  tables and that the call's statement does not use: only oo_*_add moves those, and no mutant is of
  such a call.
- A swap of what only informs the simulator of a host access with a statement that is no such call:
  the detector judges it by what was queued and waited for, which the other does not change. A swap
  with a statement that names bytes for its reports: names are read when a report is written.
- A swap of two statements that only create, name, destroy or wait for different objects
  (COMMUTING): such calls queue no work and are ordered by nothing; where one fails, the other's
  object is released by the same clean-up either way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import c_build
from c_build import ROOT

# What passes messages on, what this machine's compiler does not see, and what its processor may
# not run (test_codec compares each of its bytes with those of codec_portable.c).
LEFT_OUT = re.compile(r"status\.c|driver\.c|\w+_win32\.c|codec_x86\.c")
STREAMS = ("engine->h2d", "engine->d2h", "engine->compute")
# Where it is used, the one that decodes as well.
DECODE = "engine->decoder.stream"
GUARDED = re.compile(
    r"generation|stamp|sweep|references|pins|capacity|fingerprint|n_uses|n_waited|stale|placed|"
    r"counted|lost|held|n_known|->engines|maker|OO_MAX_FETCHED|OO_SPANS|OO_STREAMS|OO_RING_PIECES|"
    r"n_threads|n_active|n_running|n_parts|decodes|loose|skipped|decoded"
)
GUARDED_HOST = re.compile(r"host->bytes|alive")

CALL = re.compile(
    r"OO_(?:DRIVE|GIVE_BACK)\(engine, (\w+)|engine->driver\.(\w+)\("
    r"|(?<!status )\b(oo__(?:synchronize|order_after_uses|order_after_copy|mark_use|"
    r"event_await|await_first_read|await_reads|await_copies|mark_read|span_begin|span_end|"
    r"finish_download|refuse_capture|host_access|adopt|disown|"
    r"launch|declare_kernel|declare_access|slot_wait|feed_await|await_fed|feed_stop|feed_forget|feeds_await|"
    r"part_send|piece_take|piece_decode|piece_give|arrival_record|decodes_settle|coded_check))\("
)
EVENT = re.compile(r"[\w>\-.\[\]]+->handle")
STREAM = re.compile(r"(?<![\w.>])(?:\w+(?:\[\w+\])?(?:->|\.))*stream\b")
COMPARISON = re.compile(r"(?<![<>=!\-])(==|!=|<=|>=|<|>)(?![<>=])")
CHAINED = re.compile(r"&&|\|\|")
# Where an operand can end at its own depth of brackets, except the operators of its chain.
BOUND = re.compile(r"[,;?:{}]|(?<![<>=!])=(?!=)")
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
BOUNDARIES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
# Files that only calculate, and how many of those mutants are tried of each.
PLANNING = ("plan.c", "forecast.c", "stays.c", "places.c", "fetch.c")
CALCULATING = ("codec.c", "codec_portable.c")
SAMPLE = 70
# As clang-format writes them: a space on either side distinguishes them from pointers and signs.
OPERATOR = re.compile(r"(?<= )(<=|>=|<<|>>|==|!=|[-+*/%&|^<>])(=?)(?=[ \n])")
OTHER = (
    BOUNDARIES
    | {"==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*", "%": "/"}
    | {"<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|"}
)
NUMBER = re.compile(r"(?<![\w.])(?:0[xX][0-9a-fA-F]+|[0-9]+)[uU]?(?![\w.])")
LENGTH = re.compile(r"^ *(?:static |const )*(?:struct )?\w+ \w+\[")
COUNTER = re.compile(r"[\w.>\-\[\]]*\bstats(?:->|\.)(\w+)\s*(?:\+\+|\+=[^;=]*);")
LEAVES = re.compile(r"\b(?:OO_TRY|return|goto|break|continue)\b")
EVENT_LIST = re.compile(
    r"(?:OO_TRY\()?oo__event_(?:take\(engine, [^;,]+|give\(engine), &?([\w>\-.\[\]]+)\)\)?;"
)
PLAIN = re.compile(r"(?:const )?(?:struct |enum )?\w+ \*?\w+ = (?:\{[\w, ]+\}|\w+);")
ARITHMETIC = re.compile(r"const \w+ \w+ =[\w\s+\-*/%<?:]+;")
ADDRESS = re.compile(r"(?:const )?struct \w+ \*{1,2}(\w+) = &[\w>\-.]+(?:\[[\w>\-.]+\])?;")
COMMUTING = {
    "cuStreamCreateWithPriority",
    "oo__events_reserve",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuStreamDestroy",
    "oo__kernels_free",
    "oo__synchronize",
    "oo__await_reads",
    "oo__await_copies",
}
CALLED = re.compile(r"OO_(?:DRIVE|GIVE_BACK)\(engine, (\w+)|driver\.(\w+)\(|\b(oo_\w+)\(")
JUMP = re.compile(r"(?:return|goto|break|continue)\b")


@dataclass(frozen=True)
class Mutant:
    """One change: characters [begin, end) of `file` become `text`."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    text: str
    original: str

    @property
    def name(self) -> str:
        """Where and what, for people."""
        return f"{self.file}:{self.line} {self.kind}"

    @property
    def key(self) -> str:
        """What is changed, without a line number that moves."""
        code = re.sub(r"/\*.*?\*/", "", self.original, flags=re.DOTALL)
        return f"{self.file} | {self.kind} | {' '.join(code.split())}"


@dataclass(frozen=True)
class Statement:
    """A whole statement in a block."""

    begin: int
    end: int
    block: int
    labelled: bool


def blank(source: str) -> str:
    """Return `source` with comments, strings and directives turned to spaces; positions stay."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    code = re.sub(
        r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'", spaces, source, flags=re.DOTALL
    )
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", spaces, code, flags=re.MULTILINE)


class Parser:
    """Reads the statements of all functions of a file, as far as swapping them needs it."""

    WORD = re.compile(r"[A-Za-z_]\w*")
    LABEL = re.compile(r"(?:case\b[^:;{}]*|[A-Za-z_]\w*\s*):(?!:)")

    def __init__(self, code: str) -> None:
        self.code = code
        self.found: list[Statement] = []
        self.blocks = 0
        at = 0
        while (at := code.find("{", at)) >= 0:
            if code[:at].rstrip().endswith(")"):
                at = self.block(at)
            else:
                at = self.matching(at)

    def matching(self, at: int) -> int:
        """Return the index after the bracket that closes the one at `at`."""
        depth = 0
        for index in range(at, len(self.code)):
            depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(self.code[index], 0)
            if depth == 0:
                return index + 1
        raise ValueError(f"no closing bracket after {at}")

    def skip(self, at: int) -> int:
        while self.code[at].isspace():
            at += 1
        return at

    def block(self, at: int) -> int:
        self.blocks += 1
        serial = self.blocks
        at = self.skip(at + 1)
        while self.code[at] != "}":
            label = self.LABEL.match(self.code, at)
            end = self.statement(at)
            self.found.append(Statement(at, end, serial, bool(label)))
            at = self.skip(end)
        return at + 1

    def statement(self, at: int) -> int:
        """Return the index after the statement that begins at `at`."""
        if self.code[at] == "{":
            return self.block(at)
        label = self.LABEL.match(self.code, at)
        if label:
            return self.statement(self.skip(label.end()))
        word = self.WORD.match(self.code, at)
        name = word.group(0) if word else ""
        if name in ("if", "for", "while", "switch"):
            end = self.statement(self.skip(self.matching(self.code.index("(", at))))
            rest = self.skip(end)
            if name == "if" and re.match(r"else\b", self.code[rest : rest + 5]):
                return self.statement(self.skip(rest + 4))
            return end
        if name == "do":
            end = self.statement(self.skip(at + 2))
            return self.code.index(";", self.matching(self.code.index("(", end))) + 1
        while self.code[at] != ";":
            at = self.matching(at) if self.code[at] in "({[" else at + 1
        return at + 1


def may_swap(call: str, other: str) -> bool:
    """Whether exchanging the statement of a call and its neighbour is a mutant."""
    if JUMP.match(call) or JUMP.match(other):
        return False
    counter = COUNTER.fullmatch(other)
    if counter and not LEAVES.search(call) and counter.group(1) not in call:
        return False
    event = EVENT_LIST.fullmatch(other)
    if event and not re.search(rf"(?<![\w>]){re.escape(event.group(1))}\b", call):
        gives = "oo__event_give" in other
        if not (gives and LEAVES.search(call)):
            return False
    if PLAIN.fullmatch(other) or (ARITHMETIC.fullmatch(other) and "&" not in call):
        return False
    address = ADDRESS.fullmatch(other)
    if address and not re.search(rf"\b{address.group(1)}\b", call):
        return False
    if "oo__host_access" in call and not CALL.search(other):
        return False
    if other.startswith("oo__label("):
        return False
    return not all(called(text) and called(text) <= COMMUTING for text in (call, other))


def called(text: str) -> set[str]:
    """Return the functions that a statement calls, by name."""
    return {next(name for name in groups if name) for groups in CALLED.findall(text)}


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    source = path.read_text()
    code = blank(source)
    parser = Parser(code)

    def make(kind: str, begin: int, end: int, text: str) -> Mutant:
        line = source.count("\n", 0, begin) + 1
        return Mutant(path.name, line, kind, begin, end, text, source[begin:end])

    for match in CALL.finditer(code):
        name = next(group for group in match.groups() if group)
        if not name.startswith(("cu", "sim", "oo__")):
            continue
        end = parser.matching(code.index("(", match.start()))
        if not any(s.begin <= match.start() < s.end for s in parser.found):
            continue  # a prototype or a definition
        call = source[match.start() : end]
        yield make(f"delete {name}", match.start(), end, "OO_OK")
        yield from streams(make, name, match.start(), call)
        used = EVENT.search(call)
        if used:
            function = code.rfind("\n}\n", 0, match.start()) + 1
            past = EVENT.findall(code[function : match.start()])
            before = [event for event in past if event != used.group(0)]
            if before:
                changed = call.replace(used.group(0), before[-1])
                yield make(f"{name} with {before[-1]}", match.start(), end, changed)
        yield from swaps(make, name, match.start(), source, parser.found)

    if path.name not in PLANNING:
        yield from dropped(make, source, code)
    if path.name in CALCULATING:
        found = sorted(calculated(make, source, code), key=lambda mutant: digest(mutant.key))
        yield from found[:SAMPLE]
    guarded = GUARDED_HOST if path.name in ("host.c", "os_posix.c") else GUARDED
    for match in COMPARISON.finditer(code):
        line_begin = code.rfind("\n", 0, match.start()) + 1
        line = code[line_begin : code.index("\n", match.start())]
        if guarded.search(line) and not line.lstrip().startswith("for ("):
            opposite = OPPOSITE[match.group(0)]
            # The line and the place in it identify the mutant.
            kind = f"{match.group(0)} becomes {opposite}"
            nth = len(COMPARISON.findall(code[line_begin : match.start()]))
            text = source[line_begin : match.start()] + opposite
            text += source[match.end() : line_begin + len(line)]
            where = f", comparison {nth + 1}" if len(COMPARISON.findall(line)) > 1 else ""
            yield make(kind + where, line_begin, line_begin + len(line), text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def calculated(make, source: str, code: str) -> Iterator[Mutant]:  # type: ignore[no-untyped-def]
    """Yield every line with each of its operators and numbers changed."""
    begin = 0
    for line in code.splitlines(keepends=True):
        changes = [(m, "operator", OTHER[m[1]] + m[2]) for m in OPERATOR.finditer(line)]
        if not (LENGTH.match(line) or line.strip() == "return 1;"):
            changes += [(m, "number", f"({m[0]} + 1)") for m in NUMBER.finditer(line)]
        at, end = begin + len(line) - len(line.lstrip()), begin + len(line.rstrip())
        for match, what, text in changes:
            nth = sum(kind == what and m.start() <= match.start() for m, kind, _ in changes)
            kind = f"{match[0]} becomes {text}, {what} {nth}"
            new = source[at : begin + match.start()] + text + source[begin + match.end() : end]
            yield make(kind, at, end, new)
        begin += len(line)


def operand(code: str, at: int, step: int, stops: tuple[str, ...]) -> int:
    """Return where the operand ends that is after (`step` 1) or before (-1) index `at`."""
    depth = 0
    opens, closes = ("([{", ")]}") if step > 0 else (")]}", "([{")
    while True:
        character = code[at] if step > 0 else code[at - 1]
        if depth == 0:
            here = at if step > 0 else at - 1
            if character in closes or BOUND.match(code, here):
                return at
            if code.startswith(stops, at if step > 0 else at - 2):
                return at
            if step < 0 and re.search(r"\breturn$", code[at - 7 : at]):
                return at
        depth += (character in opens) - (character in closes)
        at += step


def dropped(make, source: str, code: str) -> Iterator[Mutant]:  # type: ignore[no-untyped-def]
    """Yield every chain of one operator without each of its terms."""
    for match in CHAINED.finditer(code):
        operator = match.group(0)
        others = ("||",) if operator == "&&" else ()
        left = operand(code, match.start(), -1, (operator, *others))
        right = operand(code, match.end(), 1, (operator, *others))
        begin = operand(code, match.start(), -1, others)
        end = operand(code, match.end(), 1, others)

        def without(begin: int, first: int, last: int, end: int, term: str) -> Mutant:
            kind = f"drop '{' '.join(term.split())}' of {operator}"  # noqa: B023
            changed: Mutant = make(kind, begin, end, f"{source[begin:first]} {source[last:end]}")
            return changed

        if left == begin:  # the first term of the chain
            yield without(begin, left, match.end(), end, code[left : match.start()])
        yield without(begin, match.start(), right, end, code[match.end() : right])


def streams(make, name: str, begin: int, call: str) -> Iterator[Mutant]:  # type: ignore[no-untyped-def]
    """Yield the call with each other stream of the engine."""
    given = next((stream for stream in (*STREAMS, DECODE) if stream in call), "")
    if not given:
        arguments = call.index(name) + len(name)
        found = STREAM.search(call, arguments)
        given = found.group(0) if found else ""
    for other in STREAMS if given else ():
        if other != given:
            changed = re.sub(rf"(?<![\w.>]){re.escape(given)}\b", other, call)
            yield make(f"{name} on {other}", begin, begin + len(call), changed)


def swaps(  # type: ignore[no-untyped-def]
    make, name: str, begin: int, source: str, statements: list[Statement]
) -> Iterator[Mutant]:
    """Yield the exchanges of the call's statement with its neighbours."""
    holder = max((s for s in statements if s.begin <= begin < s.end), key=lambda s: s.begin)
    row = sorted((s for s in statements if s.block == holder.block), key=lambda s: s.begin)
    at = row.index(holder)
    for step, word in ((-1, "above"), (1, "below")):
        if not 0 <= at + step < len(row):
            continue
        other = row[at + step]
        if holder.labelled or other.labelled:
            continue
        if not may_swap(source[holder.begin : holder.end], source[other.begin : other.end]):
            continue
        first, second = (other, holder) if step < 0 else (holder, other)
        text = source[second.begin : second.end] + source[first.end : second.begin]
        text += source[first.begin : first.end]
        yield make(f"swap {name} with the statement {word}", first.begin, second.end, text)


def all_mutants() -> list[Mutant]:
    """Return every mutant, without those whose text is unchanged or seen already."""
    seen: set[tuple[str, int, int, str]] = set()
    result = []
    for file in c_build.sources(c_build.ENGINE):
        for mutant in [] if LEFT_OUT.fullmatch(Path(file).name) else mutants_of(ROOT / file):
            key = (mutant.file, mutant.begin, mutant.end, mutant.text)
            if mutant.text != mutant.original and key not in seen:
                seen.add(key)
                result.append(mutant)
    return result
