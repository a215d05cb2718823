"""Find the mutants of the binding (csrc/python), by the operators of tools/mutants_python.py.

negate       the condition of an if or a while
drop         one term of && or ||
comparison   < becomes >=, == becomes !=, and so on
boundary     < becomes <=, >= becomes >, and so on
arithmetic   + becomes -, ++ becomes --, and so on
delete       a statement that is no declaration
return       what a function returns becomes NULL, 0, -1 or OO_OK, after its type

What is not a mutant, by rule: a comparison that is the whole of a condition (to negate it says the
same), and what tables and initialisers hold.
What does not compile is none, nor what compiles to the same object code (the gate looks).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import c_build
from c_build import ROOT
from mutants import BOUNDARIES, OPPOSITE, Mutant, Parser, blank, dropped

CONDITION = re.compile(r"\b(?:if|while) (?=\()")
COMPARISON = re.compile(r"(?<= )(==|!=|<=|>=|<|>)(?= )")
ARITHMETIC = re.compile(
    r"(?<=[\w)\]] )([+\-*/%&|]|<<|>>|\+=|-=)(?= [\w(&*])|(?<=\w)(\+\+|--)(?=[;)])"
)
CHANGED = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "*",
    "&": "|",
    "|": "&",
    "<<": ">>",
    ">>": "<<",
    "+=": "-=",
    "-=": "+=",
    "++": "--",
    "--": "++",
}
DECLARATION = re.compile(
    r"(?:static |const |unsigned |struct |enum )|\w+ \**\w+(?:\[\w*\])*(?: =|;|,)|\w+ \(\*"
)
FUNCTION = re.compile(r"^([\w ]+?[ *]+)(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)


class Statements(Parser):
    """The statements without a body, wherever they are."""

    def __init__(self, code: str) -> None:
        self.leaves: list[tuple[int, int]] = []
        super().__init__(code)

    def statement(self, at: int) -> int:
        end = super().statement(at)
        word = self.WORD.match(self.code, at)
        compound = word and word.group(0) in ("if", "for", "while", "switch", "do", "else")
        if self.code[at] != "{" and not compound and not self.LABEL.match(self.code, at):
            self.leaves.append((at, end))
        return end


def returned(kind: str) -> tuple[str, ...]:
    """Return the constants that a function of a type can return."""
    if "*" in kind:
        return ("NULL",)
    if "oo_status" in kind:
        return ("OO_OK",)
    return () if "void" in kind else ("0", "-1") if "int" in kind.split() else ("0",)


def mutants_of(path: Path, source: str | None = None) -> list[Mutant]:
    """Return every mutant of one file, each with a key of its own."""
    source = path.read_text() if source is None else source
    code = blank(source)
    file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    statements = Statements(code)
    functions = list(FUNCTION.finditer(code))
    bodies = [(f.end() - 1, statements.matching(f.end() - 1), f) for f in functions]
    found: list[Mutant] = []

    def inside(at: int) -> re.Match[str] | None:
        return next((f for begin, end, f in bodies if begin < at < end), None)

    def make(kind: str, begin: int, end: int, text: str, shown: str = "") -> None:
        function = inside(begin)
        if function and source[begin:end] != text:
            line = source.count("\n", 0, begin) + 1
            kind = f"{kind} in {function.group(2)}"
            found.append(Mutant(file, line, kind, begin, end, text, shown or source[begin:end]))

    def around(at: int) -> str:
        return source[source.rfind("\n", 0, at) + 1 : source.index("\n", at)]

    for match in CONDITION.finditer(code):
        end = statements.matching(match.end())
        make("negate", match.end(), end, f"(!{source[match.end() : end]})")
    list(dropped(make, source, code))
    for match in COMPARISON.finditer(code):
        word = match.group(1)
        whole = re.fullmatch(r"\s*(?:if|while) \([^()]* [=!<>]=? [^()]*\).*", around(match.start()))
        if not (whole and "&&" not in whole[0] and "||" not in whole[0]):
            make(f"{word} becomes {OPPOSITE[word]}", *match.span(1), OPPOSITE[word],
                 around(match.start()))  # fmt: skip
        if word in BOUNDARIES:
            make(f"{word} becomes {BOUNDARIES[word]}", *match.span(1), BOUNDARIES[word],
                 around(match.start()))  # fmt: skip
    for match in ARITHMETIC.finditer(code):
        word = match.group(1) or match.group(2)
        span = match.span(1) if match.group(1) else match.span(2)
        make(f"{word} becomes {CHANGED[word]}", *span, CHANGED[word], around(match.start()))
    for begin, end in statements.leaves:
        text = code[begin:end]
        function = inside(begin)
        if text.startswith("return") and function and text != "return;":
            for constant in returned(function.group(1)):
                make(f"return {constant}", begin, end, f"return {constant};")
        elif not DECLARATION.match(text) and not text.startswith(("return", "(void)")):
            make("delete", begin, end, ";")
    return numbered(found)


def numbered(found: list[Mutant]) -> list[Mutant]:
    """Return the mutants with a number in the kind of those that would share their key."""
    times: dict[str, int] = {}
    result = []
    for mutant in found:
        nth = times[mutant.key] = times.get(mutant.key, 0) + 1
        result.append(replace(mutant, kind=f"{mutant.kind} ({nth})") if nth > 1 else mutant)
    return result


def all_mutants() -> Iterator[Mutant]:
    """Yield the mutants of every file of the binding."""
    for name in c_build.sources("binding"):
        yield from mutants_of(ROOT / name)
