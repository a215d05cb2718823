"""Which file uses which: the arrows of the code, its circles and its upward arrows.

`python tools/floors.py` prints the floors, lowest first. tests/unit/test_floors.py holds that
there is no circle and no arrow upwards.

An arrow is an import (at the top, inside a function, by `importlib`, for types alone), an
`#include`, or a symbol that one compiled .c file takes from another.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import c_build

Arrows = dict[str, set[str]]  # each file, and those that it needs

# Lowest first: a folder may use those before it. The simulator knows the driver's types alone.
C_FLOORS = ("csrc/include", "csrc/base", "csrc/driver", "csrc/kernels", "csrc/core", "csrc/python")
SIMULATOR_FLOORS = ("csrc/driver", "csrc/sim")


def circle(arrows: Arrows) -> list[str]:
    """Return one circle of `arrows`, its first file repeated at the end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def by_folder(arrows: Arrows, home_of: dict[str, str]) -> Arrows:
    """Return the arrows between folders."""
    folders: Arrows = {}
    for file, needed in arrows.items():
        home = folders.setdefault(home_of[file], set())
        home |= {home_of[other] for other in needed} - {home_of[file]}
    return folders


def upward(arrows: Arrows, floors: Iterable[str]) -> list[str]:
    """Return the arrows that leave a folder of `floors` for one that is not below it."""
    floors = list(floors)
    found = []
    for file, needed in arrows.items():
        home = _folder(file)
        if home not in floors:
            continue
        allowed = floors[: floors.index(home) + 1]
        found += [f"{file} -> {other}" for other in needed if _folder(other) not in allowed]
    return sorted(found)


def levels(arrows: Arrows) -> list[list[str]]:
    """Return the files by height: those that need none first."""
    sorter = graphlib.TopologicalSorter(arrows)
    sorter.prepare()
    result = []
    while sorter.is_active():
        ready = sorter.get_ready()
        result.append(sorted(ready))
        sorter.done(*ready)
    return result


def _folder(file: str) -> str:
    return str(Path(file).parent.as_posix())


# ---- Python ----


def python_arrows(package: Path) -> Arrows:
    """Return the imports among the modules of `package`, wherever in a module they are.

    Those for type checkers alone (``if TYPE_CHECKING``) are among them: a reader of one of the
    files reads the other. Values that a package's own ``__init__`` assigns (``__version__``) are no
    arrows: it has run already.

    Raises
    ------
    ValueError
        A call of `importlib.import_module` whose argument cannot be read here.
    """
    modules = {}
    for path in sorted(package.rglob("*.py*")):
        if path.suffix not in (".py", ".pyi"):  # a stub describes a compiled module
            continue
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    read = {
        name: _read(
            path.read_text(encoding="utf-8"),
            name,
            name if path.name == "__init__.py" else name.rpartition(".")[0],
        )
        for name, path in modules.items()
    }
    assigned = frozenset().union(*(values for _, values in read.values()))
    arrows: Arrows = {name: set() for name in modules}
    for name, (imports, _) in read.items():
        for found in imports - assigned:
            while found and found not in modules:  # `from .module import name`
                found = found.rpartition(".")[0]
            if found and found != name:
                arrows[name].add(found)
    return arrows


@functools.cache
def _read(text: str, name: str, home: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a module imports, and what it assigns at its top, by full names."""
    tree = ast.parse(text)
    assigned = {
        f"{name}.{_called(target)}"
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    return frozenset(_imports(tree, name, home)), frozenset(assigned)


# The rooms, each over those that it needs: no circle among them.
PACKAGES = tuple(
    f"oracle_offload.{room}"
    for room in "host engine layers disk model observe compress planning diagnose train aitoolkit "
    "commands".split()
)


def python_packages(arrows: Arrows) -> dict[str, str]:
    """Return for each module the one of `PACKAGES` that it is part of, or itself."""
    homes = {name: ".".join(name.split(".")[:2]) for name in arrows}
    return {name: home if home in PACKAGES else name for name, home in homes.items()}


def _imports(tree: ast.AST, name: str, home: str) -> Iterator[str]:
    """Yield full names; of ``from x import y`` both ``x.y``: `y` may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ".".join(home.split(".")[: len(home.split(".")) - node.level + 1])
                base = f"{package}.{base}" if base else package
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            yield from _dynamic_import(node.args[0], tree, name, home)


def _called(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _dynamic_import(argument: ast.expr, tree: ast.AST, name: str, home: str) -> Iterator[str]:
    """Yield what ``"a.b"`` or ``f"{__name__}.{TABLE[key]}"`` may name."""
    if isinstance(argument, ast.Constant):
        target = str(argument.value)
        yield f"{home}{target}" if target.startswith(".") else target
        return
    read = re.fullmatch(r"f'\{__name__\}\.\{(\w+)\[\w+\]\}'", ast.unparse(argument))
    for node in ast.walk(tree):
        if read and isinstance(node, ast.Assign) and _called(node.targets[0]) == read[1]:
            for value in ast.literal_eval(node.value).values():
                yield f"{name}.{value}"
            return
    raise ValueError(f"{name}: what does import_module({ast.unparse(argument)}) import?")


# ---- C ----


def include_arrows(root: Path) -> Arrows:
    """Return the includes among the files below ``root/csrc``."""
    files = sorted((root / "csrc").rglob("*.[ch]"))
    known = {path.resolve(): path.relative_to(root).as_posix() for path in files}
    by_name: dict[str, list[str]] = {}
    for path in files:
        by_name.setdefault(path.name, []).append(known[path.resolve()])
    arrows: Arrows = {}
    for path in files:
        needed = arrows.setdefault(known[path.resolve()], set())
        for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            beside = known.get((path.parent / include).resolve())
            found = [beside] if beside else by_name.get(Path(include).name, [])
            if len(found) > 1:
                raise ValueError(f'{path}: "{include}" may be any of {found}')
            needed.update(found)  # none: generated, or the system's
    return arrows


Symbols = dict[str, tuple[set[str], set[str]]]  # of each file: those it defines, and those it takes


def call_arrows(root: Path, *folders: str) -> Arrows:
    """Return which .c file of `folders` uses symbols that another one of them defines."""
    return arrows_of(symbols(root, *folders))


def arrows_of(found: Symbols) -> Arrows:
    """Return which file takes a symbol of which other."""
    home = {symbol: name for name, (defined, _) in found.items() for symbol in defined}
    return {
        name: {home[symbol] for symbol in taken if symbol in home} - {name}
        for name, (_, taken) in found.items()
    }


def symbols(root: Path, *sources: str) -> Symbols:
    """Return the symbols of the .c files of `sources`, files or folders.

    Each is compiled alone, so that what a macro calls counts where the macro is used.
    """
    compiler, includes = c_build.c_compiler(), c_build.preprocessor_flags(c_build.ENGINE)
    given = [root / source for source in sources]
    files = [file for path in given for file in (sorted(path.glob("*.c")) or [path])]
    found: Symbols = {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in files:
            compiled = Path(scratch) / "one.o"
            subprocess.run(
                [*compiler, "-c", "-w", *includes, str(path), "-o", str(compiled)],
                check=True,
                cwd=root,
            )
            listed = subprocess.run(
                ["nm", "--extern-only", "--portability", str(compiled)],
                check=True,
                capture_output=True,
                text=True,
            )
            kinds = [line.split()[:2] for line in listed.stdout.splitlines()]
            found[path.relative_to(root).as_posix()] = (
                {symbol for symbol, kind in kinds if kind != "U"},
                {symbol for symbol, kind in kinds if kind == "U"},
            )
    return found


def main() -> int:
    """Print the floors."""
    everything = {
        "imports": python_arrows(c_build.ROOT / "oracle_offload"),
        "includes": include_arrows(c_build.ROOT),
        "calls": call_arrows(c_build.ROOT, "csrc/base", "csrc/driver", "csrc/core"),
    }
    for kind, arrows in everything.items():
        print(f"{kind}, lowest first:")
        if found := circle(arrows):
            print("  a circle:", " -> ".join(found))
            continue
        for height, files in enumerate(levels(arrows)):
            print(f"  {height:2d}  {'  '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
