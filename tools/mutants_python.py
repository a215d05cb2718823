"""Find the mutants of the Python layer, for tools/mutate_python.py, by rules on the syntax tree.

negate          the condition of an if, a while, a conditional expression, a comprehension, a guard
drop            one term of an `and` or `or`; a `not`; a minus sign
comparison      < becomes >=, == becomes !=, `in` becomes `not in`, and so on
boundary        < becomes <=, >= becomes >, and so on
arithmetic      + becomes -, * becomes /, & becomes |, and so on, also in +=
delete          a statement: a call, an assignment, a raise, a break, ...
return          the value that a function returns becomes None, True, False, 0, "" or an empty
                container, after the type that the function declares
drop except     what the handler took goes on upwards
drop finally    what is there is done only where nothing was raised and nothing left the block

What is not a mutant, by rule:

- What is there for type checkers, people and the import system: annotations, TYPE_CHECKING blocks,
  docstrings, import statements, and calls of a logger's `debug`.
- A deleted assignment of names that the function binds nowhere else: the next use is a NameError
  on every path, which tests nothing but that there is a next use.
- A comparison that is the whole of a negated condition: negating it says the same.
- `%` and `+` with a string literal, which would be a TypeError.
- What compiles to the same byte code as the original (the gate looks).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType

from c_build import ROOT
from mutants import BOUNDARIES, OPPOSITE, Mutant

PACKAGE = ROOT / "oracle_offload"

COMPARISONS = {  # the words, as a pattern, and what they become
    ast.Lt: ("<", OPPOSITE["<"]),
    ast.LtE: ("<=", OPPOSITE["<="]),
    ast.Gt: (">", OPPOSITE[">"]),
    ast.GtE: (">=", OPPOSITE[">="]),
    ast.Eq: ("==", OPPOSITE["=="]),
    ast.NotEq: ("!=", OPPOSITE["!="]),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
# By the word that the annotation begins with.
CONSTANTS = {
    "bool": ("True", "False"),
    "int": ("0",),
    "float": ("0.0",),
    "str": ('""',),
    "bytes": ('b""',),
    "list": ("[]",),
    "tuple": ("()",),
    "dict": ("{}",),
    "set": ("set()",),
    "frozenset": ("frozenset()",),
}
DEBUG = re.compile(r"(?:\w*log\w*|logging\.getLogger\([^)]*\))\.debug\(")
FINALLY = re.compile(r"^[ \t]*finally", re.MULTILINE)
SIMPLE = (
    *(ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Raise, ast.Assert),
    *(ast.Return, ast.Break, ast.Continue),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class PythonMutant(Mutant):
    """One change of a module, and where a test must come to see it."""

    function: str = ""  # its qualified name; empty for what runs when the module is imported
    # The expression that a test must evaluate; where it is empty, the statement that begins there.
    place: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """What is changed, without a line number that moves."""
        code = " ".join(self.original.split())
        return f"{self.file} | {self.function} | {self.kind} | {code}"


class Finder:
    """Walks one module and collects its mutants."""

    def __init__(self, path: Path, source: str) -> None:
        self.file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = source.splitlines(keepends=True)
        self.found: list[PythonMutant] = []
        self.names: list[str] = []  # of the classes and functions around
        self.functions: list[Function] = []
        self.reached = (0, 0)  # the place of the mutants that are being made
        for statement in ast.parse(source).body:
            self.statement(statement)

    # ---- places ----

    def place(self, line: int, column: int) -> int:
        text = self.lines[line - 1]
        return self.starts[line - 1] + len(text.encode()[:column].decode())

    def begin(self, node: ast.expr | ast.stmt | ast.excepthandler) -> int:
        return self.place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.excepthandler) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.place(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self.begin(node) : self.end(node)]

    def make(self, kind: str, begin: int, end: int, text: str, shown: str = "") -> None:
        line = self.source.count("\n", 0, begin) + 1
        original = shown or self.source[begin:end]
        # As many lines as before, so that the positions in reports stay true.
        missing = "\n" * (self.source.count("\n", begin, end) - text.count("\n"))
        text = text[:-1] + missing + ")" if text.endswith(")") else text + missing
        name = ".".join(self.names) if self.functions else ""
        self.found.append(
            PythonMutant(self.file, line, kind, begin, end, text, original, name, self.reached)
        )

    # ---- statements ----

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        self.reached = self.entry(node)
        if isinstance(node, Function | ast.ClassDef):
            self.definition(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            self.body(node.orelse)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.body(node.body)
            for handler in node.handlers:
                self.handler(handler)
            self.body(node.orelse)
            self.body(node.finalbody)
            if node.finalbody:
                self.finally_clause(node)
        else:
            if isinstance(node, SIMPLE):
                self.simple(node)
            for field, value in ast.iter_fields(node):
                if field in ("annotation", "returns", "type_comment"):
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.stmt):
                        self.statement(child)
                    elif isinstance(child, ast.AST):
                        self.expression(child, node)

    def span(self, node: ast.expr) -> tuple[int, int]:
        return self.begin(node), self.end(node)

    def entry(self, node: ast.stmt) -> tuple[int, int]:
        """Return the place reached whenever `node` is: of a head, what it evaluates first."""
        if isinstance(node, ast.If | ast.While):
            return self.span(node.test)
        if isinstance(node, ast.For | ast.AsyncFor):
            return self.span(node.iter)
        if isinstance(node, ast.With | ast.AsyncWith):
            return self.span(node.items[0].context_expr)
        if isinstance(node, ast.Match):
            return self.span(node.subject)
        if isinstance(node, ast.Try | ast.TryStar):
            return self.entry(node.body[0])
        return self.begin(node), self.begin(node)

    def definition(self, node: Function | ast.ClassDef) -> None:
        self.names.append(node.name)
        if isinstance(node, Function):
            self.functions.append(node)
        self.body(node.body)
        if isinstance(node, Function):
            self.functions.pop()
        self.names.pop()

    def simple(self, node: ast.stmt) -> None:
        if not self.functions:
            return
        if isinstance(node, ast.Return) and node.value is not None:
            for constant in self.constants(self.functions[-1]):
                if constant != self.text(node.value):
                    self.make(
                        f"return {constant}", self.begin(node.value), self.end(node.value), constant
                    )
            return
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
                return
            if DEBUG.match(self.text(node)):
                return
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            old, new = ARITHMETIC[type(node.op)]
            old, new = old + "=", new + "="
            self.operator(f"{old} becomes {new}", node.target, node.value, re.escape(old), new)
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return
        if isinstance(node, ast.Assign | ast.AnnAssign) and self.only_binding(node):
            return
        self.make("delete", self.begin(node), self.end(node), "pass")

    @staticmethod
    def constants(function: Function) -> tuple[str, ...]:
        declared = ast.unparse(function.returns) if function.returns else ""
        first = re.match(r"[\w.]*", declared.strip("'\""))
        word = first.group(0) if first else ""
        if "None" in declared:
            return ("None",)
        return CONSTANTS.get(word, ("None",))

    def only_binding(self, node: ast.Assign | ast.AnnAssign) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names: set[str] = set()
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                part = part.value if isinstance(part, ast.Starred) else part
                if not isinstance(part, ast.Name):
                    return False
                names.add(part.id)
        function = self.functions[-1]
        bound = [
            argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)
        ]
        for inner in ast.walk(function):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                bound.append(inner.id)
            elif isinstance(inner, ast.Global | ast.Nonlocal):
                bound += 2 * inner.names
        return all(bound.count(name) <= 1 for name in names)

    def handler(self, node: ast.ExceptHandler) -> None:
        first = node.body[0]
        self.reached = self.entry(first)
        begin, end = self.begin(first), self.end(node.body[-1])
        if not (len(node.body) == 1 and isinstance(first, ast.Raise) and first.exc is None):
            head = self.source[self.begin(node) : begin]
            self.make("drop except", begin, end, "raise", head.split(":")[0])
        self.body(node.body)

    def finally_clause(self, node: ast.Try | ast.TryStar) -> None:
        if node.orelse:
            return  # none of the package has both
        first = node.finalbody[0]
        self.reached = self.entry(first)
        last = node.handlers[-1].body[-1] if node.handlers else node.body[-1]
        match = FINALLY.search(self.source, self.end(last))
        assert match
        word = match.end() - len("finally")
        body = self.source[self.begin(first) : self.end(node.finalbody[-1])]
        if node.handlers:
            self.make("drop finally", word, word + len("finally"), "if True", body)
        else:
            begin = self.begin(node)
            text = "if True" + self.source[begin + len("try") : word] + "if True"
            self.make("drop finally", begin, word + len("finally"), text, body)

    # ---- expressions ----

    def expression(self, node: ast.AST, parent: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            return  # before Python 3.12 the positions in it are wrong
        conditions: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            conditions = [node.test]
        elif isinstance(node, ast.comprehension):
            conditions = node.ifs
        elif isinstance(node, ast.match_case):
            conditions = [node.guard] if node.guard else []
        elif isinstance(parent, ast.If | ast.While | ast.Assert) and node is parent.test:
            conditions = [parent.test]
        for condition in conditions:
            self.reached = self.span(condition)
            self.condition(condition)
        if isinstance(node, ast.expr):
            self.reached = self.span(node)
        if isinstance(node, ast.BoolOp):
            self.terms(node)
        elif isinstance(node, ast.Compare):
            self.comparison(node, parent)
        elif isinstance(node, ast.BinOp):
            self.arithmetic(node)
        elif isinstance(node, ast.UnaryOp):
            self.unary(node)
        elif isinstance(node, ast.match_case):
            self.body(node.body)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "pattern", "body") and isinstance(node, ast.match_case):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                    self.expression(child, node)

    def condition(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant):
            return
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return  # dropping the `not` says the same
        self.make("negate", self.begin(node), self.end(node), f"not ({self.text(node)})")

    def terms(self, node: ast.BoolOp) -> None:
        word = "and" if isinstance(node.op, ast.And) else "or"
        for nth, term in enumerate(node.values):
            kept = [f"({self.text(value)})" for value in node.values if value is not term]
            text = f" {word} ".join(kept)
            shown = self.text(node)
            kind = f"drop term {nth + 1} of {word}"
            self.make(kind, self.begin(node), self.end(node), f"({text})", shown)

    def operator(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Exchange the operator between two operands."""
        begin, end = self.end(left), self.begin(right)
        match = re.search(old, self.source[begin:end])
        assert match, (self.file, left.lineno)
        at = begin + match.start()
        whole = self.source[self.begin(left) : self.end(right)]
        self.make(kind, at, begin + match.end(), new, whole)

    def comparison(self, node: ast.Compare, parent: ast.AST) -> None:
        whole = isinstance(parent, ast.If | ast.While | ast.Assert | ast.IfExp) and (
            parent.test is node
        )
        whole = whole or (isinstance(parent, ast.comprehension) and node in parent.ifs)
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            old, new = COMPARISONS[type(op)]
            if not (whole and len(node.ops) == 1):
                shown = old.replace(r"\s+", " ")
                word = re.escape(old) if not old[0].isalpha() else rf"\b{old}\b"
                self.operator(f"{shown} becomes {new}", left, right, word, new)
            if old in BOUNDARIES:
                new = BOUNDARIES[old]
                self.operator(f"{old} becomes {new}", left, right, re.escape(old), new)
            left = right

    def arithmetic(self, node: ast.BinOp) -> None:
        if type(node.op) not in ARITHMETIC:
            return
        literals = (ast.JoinedStr, ast.List, ast.Tuple)
        for side in (node.left, node.right):
            if isinstance(side, literals) or (
                isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)
            ):
                return
        old, new = ARITHMETIC[type(node.op)]
        self.operator(f"{old} becomes {new}", node.left, node.right, re.escape(old), new)

    def unary(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.make("drop not", self.begin(node), self.end(node), f"({self.text(node.operand)})",
                      self.text(node))  # fmt: skip
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.make("drop minus", self.begin(node), self.begin(node) + 1, "", self.text(node))


def mutants_of(path: Path, source: str | None = None) -> list[PythonMutant]:
    """Return every mutant of one module, each with a key of its own."""
    finder = Finder(path, path.read_text(encoding="utf-8") if source is None else source)
    times: dict[str, int] = {}
    result = []
    for mutant in finder.found:
        nth = times[mutant.key] = times.get(mutant.key, 0) + 1
        result.append(replace(mutant, kind=f"{mutant.kind} ({nth})") if nth > 1 else mutant)
    return result


def all_mutants() -> Iterator[PythonMutant]:
    """Yield the mutants of every module of the package, file by file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from mutants_of(path)


def byte_code(source: str) -> tuple[object, ...]:
    """Return what a module compiles to, without the positions."""

    def strip(code: CodeType) -> tuple[object, ...]:
        constants = [strip(c) if isinstance(c, CodeType) else (type(c), c) for c in code.co_consts]
        return (
            code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars,
            code.co_cellvars, code.co_flags, code.co_argcount, tuple(constants),
            code.co_exceptiontable,
        )  # fmt: skip

    return strip(compile(source, "module", "exec", dont_inherit=True))
