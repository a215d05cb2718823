"""What importing a module costs, counted and not timed: a busy machine counts the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
for name in sys.argv[2:]:
    __import__(name)
before = set(sys.modules)
events = 0
def count(*_):
    global events
    events += 1
sys.setprofile(count)
__import__(sys.argv[1])
sys.setprofile(None)
print(events, *sorted(set(sys.modules) - before))
"""


@dataclass(frozen=True)
class Import:
    """`modules` are new in a bare interpreter; `events` are calls and returns, less what the
    modules of others cost.
    """

    events: int
    modules: frozenset[str]

    @property
    def foreign(self) -> set[str]:
        """The modules that are neither ours nor of the standard library."""
        known = {"oracle_offload", *sys.stdlib_module_names}
        return {name for name in self.modules if name.partition(".")[0] not in known}


def import_cost(name: str) -> Import:
    """Import `name` in a fresh interpreter."""
    _, *modules = _run(name)
    others = [other for other in modules if not other.startswith("oracle_offload")]
    events, *_ = _run(name, *others)
    return Import(int(events), frozenset(modules))


def _run(*names: str) -> list[str]:
    command = [sys.executable, "-c", CHILD, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
