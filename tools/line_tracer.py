"""Record which lines of the package each test reaches: one half of tools/mutate_python.py.

It is executed at the end of the package's `__init__`, in a copy of the tree, so that every process
that imports the package is seen, those that a test starts among them. What runs while a module is
imported belongs to no test. It imports next to nothing: what the package imports is tested.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

# Given by who executes it.
PACKAGE: str = globals()["PACKAGE"]  # the folder whose lines are recorded
FOLDER: str = globals()["FOLDER"]  # where `current` names the test, and where the lines go
# A function that brought no new line in so many calls is not followed for the rest of the test.
IDLE_CALLS = 30


class LineTracer:
    """What `sys.settrace` calls; `tests` maps a test and a file to the lines that were reached."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, set[int]]] = {}
        self.files: dict[str, str] = {}  # of each code object's file: its name in the package
        with open(os.path.join(FOLDER, "current"), encoding="utf-8") as file:
            self.switch(file.read())

    def switch(self, test: str) -> None:
        """Count what follows for another test."""
        self.lines = self.tests.setdefault(test, {})
        self.idle: dict[CodeType, tuple[int, int]] = {}  # calls in a row, and lines known then

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        name = self.files.get(code.co_filename)
        if name is None:
            path = os.path.realpath(code.co_filename)
            inside = path.startswith(PACKAGE + os.sep)
            name = os.path.relpath(path, PACKAGE).replace(os.sep, "/") if inside else ""
            self.files[code.co_filename] = name
        if not name or code.co_name == "<module>":
            return None
        reached = self.lines.setdefault(name, set())
        calls, known = self.idle.get(code, (0, 0))
        if known != len(reached):
            calls = 0
        if calls > IDLE_CALLS:
            return None
        self.idle[code] = calls + 1, len(reached)

        def line(frame: FrameType, event: str, argument: object) -> Any:
            reached.add(frame.f_lineno)
            return line

        return line

    def write(self) -> None:
        """Leave the lines in a file of this process: test, file and lines between tabs."""
        with open(os.path.join(FOLDER, f"{os.getpid()}.lines"), "w", encoding="utf-8") as file:
            for test, files in self.tests.items():
                for name, lines in files.items():
                    file.write(f"{test}\t{name}\t{' '.join(map(str, sorted(lines)))}\n")


tracer = LineTracer()
sys._oracle_offload_lines = tracer  # type: ignore[attr-defined]
atexit.register(tracer.write)
if "threading" in sys.modules:
    sys.modules["threading"].settrace(tracer)
sys.settrace(tracer)
