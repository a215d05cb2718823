"""Ways for an explanation to reach the user: under the traceback, wherever that is shown.

Three, for three places::

    with explained_oom():            # one block of code
        train()

    explain.install()                # a whole program: sys.excepthook and threads

    %load_ext oracle_offload.diagnose.explain # IPython and notebooks: under the cell's traceback
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator, suppress
from os import PathLike
from types import TracebackType
from typing import IO, Any

from ...host.terminal import put, wants_color
from .pipeline import explain_oom
from .report import OomReport

# The first line of the note: by it an exception that was explained once is known again.
HEADING = "-- oracle_offload explain "


class explained_oom(ContextDecorator):
    """Attach the explanation to an out-of-memory error that passes through, and let it pass.

    The report becomes a note of the exception (PEP 678), so it is shown under the traceback
    wherever that is printed or logged. The exception itself is neither changed nor replaced. Works
    as a decorator too.

    Parameters
    ----------
    history : path or iterable of mappings, optional
        The step history, see `oracle_offload.diagnose.explain.history`.
    file : writable text stream, optional
        Where to print the report as well, for programs that swallow the exception.

    Attributes
    ----------
    report : OomReport or None
        The report, once an out-of-memory error has passed.

    Examples
    --------
    >>> with explained_oom() as explained:
    ...     pass
    >>> explained.report is None
    True
    """

    def __init__(
        self,
        *,
        history: str | PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
        file: IO[str] | None = None,
    ) -> None:
        self.history = history
        self.file = file
        self.report: OomReport | None = None

    def __enter__(self) -> explained_oom:
        self.report = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        report = explain_oom(error, history=self.history)
        if not report.found:
            return
        self.report = report
        if not _is_explained(error):
            error.add_note(_heading() + "\n" + report.to_text())
        if self.file is not None:
            _write(report, self.file)


def _heading() -> str:
    return HEADING + "-" * (60 - len(HEADING))


def _is_explained(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    return any(isinstance(note, str) and note.startswith(HEADING) for note in notes)


def _write(report: OomReport, stream: IO[str]) -> None:
    """Print a report; a closed or narrow-minded stream is no reason for a second error."""
    text = _heading() + "\n" + report.to_text(color=wants_color(stream))
    with suppress(OSError, ValueError):
        put(stream, text)


def _explain_to_stderr(error: BaseException | None) -> None:
    if error is None or isinstance(error, (KeyboardInterrupt, SystemExit)) or _is_explained(error):
        return
    report = explain_oom(error)
    if report.found and sys.stderr is not None:
        _write(report, sys.stderr)


class _Hooks:
    """The hooks that were in place before ours; None while ours are not installed."""

    before: Any = None
    before_thread: Any = None


def install() -> None:
    """Print an explanation under the traceback of an uncaught out-of-memory error.

    Sets `sys.excepthook` and `threading.excepthook`; the hooks that were there are called first.
    Installing twice changes nothing.
    """
    if _Hooks.before is not None:
        return
    _Hooks.before, _Hooks.before_thread = sys.excepthook, threading.excepthook
    sys.excepthook, threading.excepthook = _excepthook, _thread_excepthook


def uninstall() -> None:
    """Put back the hooks that `install` found, unless someone else has replaced ours since."""
    if _Hooks.before is None:
        return
    if sys.excepthook is _excepthook:
        sys.excepthook = _Hooks.before
    if threading.excepthook is _thread_excepthook:
        threading.excepthook = _Hooks.before_thread
    _Hooks.before = _Hooks.before_thread = None


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    (_Hooks.before or sys.__excepthook__)(kind, error, trace)
    _explain_to_stderr(error)


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    (_Hooks.before_thread or threading.__excepthook__)(args)
    _explain_to_stderr(args.exc_value)


# -- IPython --------------------------------------------------------------------------------------


def _after_cell(result: Any) -> None:
    error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
    if not isinstance(error, BaseException) or _is_explained(error):
        return
    report = explain_oom(error)
    if report.found:
        # By name: IPython is no dependency, and it is here whenever this runs.
        importlib.import_module("IPython.display").display(report)


def load_ipython_extension(ipython: Any) -> None:
    """Show the report under the traceback of a cell: `%load_ext
    oracle_offload.diagnose.explain`.
    """
    ipython.events.register("post_run_cell", _after_cell)


def unload_ipython_extension(ipython: Any) -> None:
    """Undo `load_ipython_extension`."""
    ipython.events.unregister("post_run_cell", _after_cell)
