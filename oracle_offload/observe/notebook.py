"""Memory and traffic in a notebook: ``%load_ext oracle_offload`` brings three magics.

``%oo_mem`` shows the summary, ``%%oo_mem`` what a cell took and moved, ``%oo_watch`` a view that is
renewed while later cells train. An out-of-memory error is explained under its cell.
"""

# IPython's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import threading
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display
from torch import nn

from ..host.sizes import format_size
from . import heartbeat
from .live import Live
from .meter import Meter, Numbers
from .sections import Section, render
from .summary import memory_summary

_LEVELS = (
    ("allocated by torch", "allocated_bytes"),
    ("arena", "arena_bytes"),
    ("  weights in it", "in_arena_bytes"),
    ("host memory, page-locked", "locked_bytes"),
    ("host memory that can be had", "host_available_bytes"),
)
_GREW = (("steps", "steps"), ("uses of weights", "acquires"), ("  late", "late"))


class CellReport:
    """What a cell took and moved.

    Attributes
    ----------
    before, after : dict
        As `Meter.read` returns them; what `after` says of an interval is of the cell.
    """

    def __init__(self, before: Numbers, after: Numbers) -> None:
        self.before = before
        self.after = after

    def rows(self) -> list[tuple[str, str]]:
        """Return label and text of each figure; what is unknown says so."""
        value = self.after.get
        rows = [("peak of torch's memory", _size(value("peak_bytes")))]
        rows += [(label, self._level(key)) for label, key in _LEVELS]
        rows += [
            ("copied to the device", _size(value("h2d_bytes"))),
            ("copied to the host", _size(value("d2h_bytes"))),
        ]
        rows += [(label, _count(value(key))) for label, key in _GREW]
        rows += [
            ("stalls", _stalls(value("stalls"), value("stall_s"))),
            ("time by the device's clock", _seconds(value("interval_s"))),
        ]
        return rows

    def _level(self, key: str) -> str:
        before, after = self.before.get(key), self.after.get(key)
        if after is None:
            return "unknown"
        if before is None:
            return f"{format_size(after)}, before unknown"
        sign = "+" if after >= before else "-"
        return f"{format_size(after)} ({sign}{format_size(abs(after - before))})"

    def __str__(self) -> str:
        return "".join(f"{label:<30}{text}\n" for label, text in self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render("cell", [Section(rows=self.rows())])


def _size(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)


def _count(number: float | None) -> str:
    return "unknown" if number is None else str(number)


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _stalls(stalls: float | None, seconds: float | None) -> str:
    return "unknown" if stalls is None else f"{stalls:.0f}, {_seconds(seconds)}"


class Watcher:
    """Renews one view in the notebook, from a thread of its own.

    Parameters
    ----------
    every_s : float
        Seconds between two looks.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._meter = Meter()
        self._ended = threading.Event()
        self._view = display(self._look(), display_id=True)
        self._thread = threading.Thread(target=self._run, name="oo_watch", daemon=True)
        self._thread.start()

    def _look(self) -> Live:
        return Live(heartbeat.pulse(self._meter))

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            # A look may meet a model that is just being detached: the next one will do.
            with contextlib.suppress(Exception):
                self._view.update(self._look())

    def stop(self) -> None:
        """Leave the view as it is now."""
        self._ended.set()
        self._thread.join()
        self._view.update(self._look())


@magics_class
class Magic(Magics):  # type: ignore[misc,unused-ignore]
    """The magics, and the watcher that runs."""

    shell: Any  # the notebook's, wherever a magic runs
    watcher: Watcher | None = None

    @magic_arguments()
    @argument("model", nargs="?", help="a variable that holds an attached model: only this one")
    @argument("-d", "--device", help="only this device, as cuda:1; by default all")
    @argument("-a", "--abbreviated", action="store_true", help="leave counters out")
    @argument("-j", "--json", action="store_true", help="print JSON")
    @line_cell_magic
    def oo_mem(self, line: str, cell: str | None = None) -> None:
        """Show memory and traffic of attached models: now, or of the cell that it heads.

        `%oo_mem` shows `oracle_offload.memory_summary()`. `%%oo_mem` runs the cell and shows what
        it took and moved; for torch's peak it resets the peak statistics of that CUDA device, or
        of all while no model is attached.
        """
        wanted = parse_argstring(self.oo_mem, line)
        if cell is None:
            report = memory_summary(
                wanted.device, wanted.abbreviated, model=self._model(wanted.model)
            )
            if wanted.json:
                print(report.to_json(), end="")
            else:
                display(report)
            return
        if wanted.model is not None:
            raise UsageError("%%oo_mem counts what all models of a device do: name a --device")
        meter = Meter(wanted.device)
        meter.reset_peak()
        before = meter.read()
        try:
            self._run(cell)
        finally:
            display(CellReport(before, meter.read()))

    def _model(self, name: str | None) -> nn.Module | None:
        if name is None:
            return None
        found = self.shell.user_ns.get(name)
        if not isinstance(found, nn.Module):
            raise UsageError(f"{name} is no variable that holds a model")
        return found

    def _run(self, cell: str) -> None:
        """Run a cell as the notebook does, so that an error ends this one, with one traceback.

        `shell.run_cell` would show the error itself, and the outer cell would show it again.
        """
        shell = self.shell
        text = "\n" + shell.transform_cell(cell)  # its lines have the numbers of the notebook's
        name = shell.compile.cache(text, shell.displayhook.prompt_count)
        tree = shell.transform_ast(shell.compile.ast_parse(text, name))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._evaluate(tree, name, "exec")
        if last is not None:
            value = self._evaluate(ast.Expression(last.value), name, "eval")
            if not cell.rstrip().endswith(";"):
                shell.displayhook(value)

    def _evaluate(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> Any:
        shell = self.shell
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0
        with shell.compile.extra_flags(flags):
            # The shell's compiler: this module's __future__ imports are not the cell's.
            code = shell.compile(tree, name, mode)
        value = eval(code, shell.user_global_ns, shell.user_ns)
        if not code.co_flags & inspect.CO_COROUTINE:
            return value
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return shell.loop_runner(value)
        value.close()
        raise UsageError(
            "%%oo_mem cannot await: the notebook's own event loop is waiting for this cell. Await "
            "in a cell without %%oo_mem, and show %oo_mem before and after."
        )

    @magic_arguments()
    @argument("what", nargs="?", choices=["start", "stop"], default="start", help="begin, or end")
    @argument("-s", "--seconds", type=float, default=1.0, help="between two looks; 1 by default")
    @line_magic
    def oo_watch(self, line: str) -> None:
        """Show what the training does, renewed while later cells run; `%oo_watch stop` ends it."""
        wanted = parse_argstring(self.oo_watch, line)
        if not 0.05 <= wanted.seconds <= 3600:
            raise UsageError(f"--seconds {wanted.seconds:g} is not within 0.05 and 3600")
        self.end()
        if wanted.what == "start":
            self.watcher = Watcher(wanted.seconds)

    def end(self) -> None:
        """End the watcher, if one runs."""
        if self.watcher is not None:
            watcher, self.watcher = self.watcher, None
            watcher.stop()


_OPTIONS = {
    "oo_mem": ["--abbreviated", "--device", "--json"],
    "oo_watch": ["--seconds", "start", "stop"],
}


def _complete_mem(shell: Any, event: Any) -> list[str]:
    """Return what may follow: options, and variables that hold a model."""
    models = [
        name
        for name, value in shell.user_ns.items()
        if isinstance(value, nn.Module) and not name.startswith("_")
    ]
    cell = event.line.lstrip().startswith("%%")
    return _OPTIONS["oo_mem"] + ([] if cell else sorted(models))


def _complete_watch(shell: Any, event: Any) -> list[str]:
    return _OPTIONS["oo_watch"]


def load(ipython: Any) -> None:
    """Register the magics and their completion."""
    ipython.register_magics(Magic)
    for prefix in ("%", "%%"):
        ipython.set_hook("complete_command", _complete_mem, str_key=f"{prefix}oo_mem")
    ipython.set_hook("complete_command", _complete_watch, str_key="%oo_watch")


def unload(ipython: Any) -> None:
    """Undo `load`; completion stays, and finds nothing to complete."""
    magic = ipython.magics_manager.registry.pop("Magic", None)
    if magic is not None:
        magic.end()
    for kind, name in (("line", "oo_mem"), ("cell", "oo_mem"), ("line", "oo_watch")):
        ipython.magics_manager.magics[kind].pop(name, None)
