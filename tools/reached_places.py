"""Record which places of the package each test reaches: one half of tools/mutate_python.py.

`marked` writes a call into every place of a module where a mutant shows. What it calls is defined
by executing this file, in every process that imports the package, those that a test starts among
them. What runs while a module is imported belongs to no test.
"""

from __future__ import annotations

import builtins
import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MARK = "_oracle_offload_reached"
FIRST = "from __future__ import annotations"  # the first statement of every module


def marked(source: str, places: Sequence[tuple[int, int]], first: int, folder: str) -> str:
    """Return `source` with a mark at each place; line numbers stay as they are.

    Parameters
    ----------
    source : str
        A module.
    places : sequence of (int, int)
        Each an expression's span, or the beginning of a statement, twice.
    first : int
        The number of the first place; the others follow.
    folder : str
        For `Reached`.
    """
    inserts: list[tuple[int, int, int, str]] = []  # where; closing, statement, expression; depth
    for number, (begin, end) in enumerate(places, first):
        if begin == end:
            inserts.append((begin, 1, 0, f"{MARK}({number}); "))
        else:
            inserts.append((begin, 2, -end, f"({MARK}({number}) or ("))
            inserts.append((end, 0, -begin, "))"))
    for at, _, _, text in sorted(inserts, reverse=True):
        source = source[:at] + text + source[at:]
    start = f'open({__file__!r}).read(), {{"__file__": "", "FOLDER": {folder!r}}}'
    known = f"__import__('builtins').__dict__.get({MARK!r})"
    return source.replace(FIRST, f"{FIRST}; {known} or exec({start})", 1)


class Reached:
    """Where the marks write; each place of each test is a line of a file, once in a process.

    Parameters
    ----------
    folder : str
        Where `current` names the test, and `places` takes the lines.
    """

    def __init__(self, folder: str) -> None:
        self.file = os.path.join(folder, "places")
        # Taken now: tests replace the functions of the module.
        self.open, self.write, self.close = os.open, os.write, os.close
        with open(os.path.join(folder, "current"), encoding="utf-8") as file:
            self.switch(file.read())

    def switch(self, test: str) -> None:
        """Count what follows for another test."""
        self.test = test
        self.seen: set[int] = set()

    def note(self, place: int) -> None:
        """Note a place that the test has come by."""
        if place in self.seen:
            return
        self.seen.add(place)
        # At once: some tests kill the process.
        with contextlib.suppress(OSError):
            file = self.open(self.file, os.O_WRONLY | os.O_APPEND)
            self.write(file, f"{self.test}\t{place}\n".encode())
            self.close(file)


def mark_of(reached: Reached) -> Callable[[int], None]:
    """Return what the marks call; its `switch` counts what follows for another test."""

    def mark(place: int) -> None:
        reached.note(place)

    # What `torch.compiler.assume_constant_result` sets: a compiler calls it while it traces.
    mark.__dict__.update(_dynamo_marked_constant=True, switch=reached.switch)
    return mark


if "FOLDER" in globals():
    setattr(builtins, MARK, mark_of(Reached(globals()["FOLDER"])))
