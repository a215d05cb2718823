"""The ways in: context manager, decorator, hooks of the interpreter, IPython extension."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from oracle_offload.diagnose.explain import explained_oom, hooks

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; "
FULL += "22.00 GiB already allocated; 0.50 GiB free; 22.50 GiB reserved in total by PyTorch)"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


def test_the_context_manager_adds_the_report_and_lets_the_error_pass() -> None:
    error = RuntimeError(FULL)
    with pytest.raises(RuntimeError) as caught, explained_oom() as explained:
        raise error
    assert caught.value is error
    assert str(error) == FULL
    assert explained.report is not None and explained.report.cause.name == "too_big"
    shown = "".join(traceback.format_exception(error))
    assert "What to change first" in shown.split(FULL)[1]  # under the traceback, not above


def test_another_error_passes_untouched() -> None:
    with pytest.raises(ValueError) as caught, explained_oom() as explained:
        raise ValueError("memory_format")
    assert explained.report is None
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_leaving_on_purpose_is_not_explained(kind: type[BaseException]) -> None:
    with pytest.raises(kind), explained_oom() as explained:
        raise kind("CUDA error: out of memory")
    assert explained.report is None


def test_it_decorates_and_nests_with_one_note_and_prints_where_asked() -> None:
    out = io.StringIO()

    @explained_oom()
    def train() -> None:
        with explained_oom(file=out):
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        train()
    assert len(caught.value.__notes__) == 1
    assert "\x1b" not in out.getvalue()
    assert "Host memory" in out.getvalue()


def test_what_was_explained_before_is_no_matter_of_the_next_block() -> None:
    explained = explained_oom()
    assert explained.report is None
    with pytest.raises(MemoryError), explained:
        raise MemoryError
    assert explained.report is not None
    with explained:
        assert explained.report is None
    assert explained.report is None


def test_notes_of_others_are_no_explanation() -> None:
    error = MemoryError()
    error.add_note("of somebody else")
    error.__notes__.append(5)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(MemoryError), explained_oom():
            raise error
    assert len(error.__notes__) == 3
    heading, *_ = error.__notes__[2].splitlines()
    assert heading.startswith(hooks.HEADING) and len(heading) == 60


def test_a_stream_that_cannot_write_does_not_hide_the_error() -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(MemoryError), explained_oom(file=closed):
        raise MemoryError


def test_the_history_reaches_the_report() -> None:
    records = [{"step": 0, "phase": "forward"}, {"step": 0, "phase": "backward"}]
    with pytest.raises(RuntimeError), explained_oom(history=records) as explained:
        raise RuntimeError(FULL)
    assert explained.report is not None and explained.report.cause.name == "first_backward"


def test_the_hook_explains_an_uncaught_error_under_its_traceback() -> None:
    ended = run(
        f"""
        from oracle_offload.diagnose import explain
        explain.install(); explain.install()
        raise RuntimeError({FULL!r})
        """
    )
    assert ended.returncode == 1
    assert ended.stderr.index("Traceback") < ended.stderr.index("What to change first")
    assert ended.stderr.count("What to change first") == 1
    assert "\x1b" not in ended.stderr


def test_hooks_come_back_unless_somebody_replaced_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(*args: object) -> None:
        """Act as the hook of a framework."""

    def later(*args: object) -> None:
        """Act as one that came after ours."""

    monkeypatch.setattr(threading, "excepthook", mine)
    monkeypatch.setattr(sys, "excepthook", mine)
    hooks.uninstall()  # nothing was installed
    assert (sys.excepthook, threading.excepthook) == (mine, mine)
    hooks.install()
    assert threading.excepthook is not mine
    hooks.install()
    hooks.uninstall()
    assert (sys.excepthook, threading.excepthook) == (mine, mine)
    for module, left in ((threading, (mine, later)), (sys, (later, mine))):
        monkeypatch.setattr(threading, "excepthook", mine)
        monkeypatch.setattr(sys, "excepthook", mine)
        hooks.install()
        monkeypatch.setattr(module, "excepthook", later)
        hooks.uninstall()
        assert (sys.excepthook, threading.excepthook) == left


def test_the_hooks_that_were_there_are_called_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mine(*args: object) -> None:
        print("mine", file=sys.stderr)

    monkeypatch.setattr(threading, "excepthook", mine)
    monkeypatch.setattr(sys, "excepthook", mine)
    hooks.install()
    try:
        error, noted, oom = MemoryError(), MemoryError(), "CUDA error: out of memory"
        noted.add_note(hooks.HEADING)
        sys.excepthook(MemoryError, error, None)
        told = capsys.readouterr().err
        first, heading, *_ = told.splitlines()
        assert first == "mine" and heading.startswith(hooks.HEADING) and len(heading) == 60
        assert told.count("What to change first") == 1
        for silent in (KeyboardInterrupt(oom), SystemExit(oom), ValueError("x"), noted):
            sys.excepthook(type(silent), silent, None)
            assert capsys.readouterr().err == "mine\n"
        threading.excepthook(threading.ExceptHookArgs((ValueError, None, None, None)))
        assert capsys.readouterr().err == "mine\n"
        for fails, count in (([].index, 0), (bytearray, 1)):
            thread = threading.Thread(target=fails, args=(1 << 62,))
            thread.start()
            thread.join()
            told = capsys.readouterr().err
            assert told.startswith("mine\n") and told.count("What to change first") == count
        monkeypatch.setattr(sys, "stderr", None)
        hooks._excepthook(MemoryError, error, None)
    finally:
        hooks.uninstall()


def test_a_cell_is_explained_once_and_only_if_it_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    display = SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    callbacks: dict[str, list[Callable[[object], None]]] = {"post_run_cell": []}
    events = SimpleNamespace(
        register=lambda name, call: callbacks[name].append(call),
        unregister=lambda name, call: callbacks[name].remove(call),
    )
    hooks.load_ipython_extension(SimpleNamespace(events=events))
    (after,) = callbacks["post_run_cell"]
    noted = MemoryError()
    noted.add_note(hooks.HEADING)
    for cell, reports in (
        (SimpleNamespace(error_in_exec=None, error_before_exec=None), 0),
        (SimpleNamespace(error_in_exec=ValueError("x"), error_before_exec=None), 0),
        (SimpleNamespace(error_in_exec=noted, error_before_exec=None), 0),
        (SimpleNamespace(error_in_exec="MemoryError", error_before_exec=None), 0),
        (SimpleNamespace(error_in_exec=MemoryError(), error_before_exec=None), 1),
        (SimpleNamespace(error_in_exec=None, error_before_exec=MemoryError()), 1),
        (SimpleNamespace(), 0),
    ):
        shown.clear()
        after(cell)
        assert len(shown) == reports, cell
    hooks.unload_ipython_extension(SimpleNamespace(events=events))
    assert callbacks["post_run_cell"] == []


IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("%load_ext oracle_offload.diagnose.explain")
shell.run_cell("raise ValueError('memory')")
print("-- first")
shell.run_cell("raise MemoryError")
print("-- second")
shell.run_cell("%unload_ext oracle_offload.diagnose.explain")
shell.run_cell("raise MemoryError")
"""


def test_the_ipython_extension_shows_the_report_under_the_cell() -> None:
    pytest.importorskip("IPython", reason="IPython is not installed")
    ended = run(IPYTHON)
    assert ended.returncode == 0, ended.stderr
    other, _, rest = ended.stdout.partition("-- first")
    shown, _, after = rest.partition("-- second")
    assert "What to change first" not in other
    assert shown.index("MemoryError") < shown.index("What to change first")
    assert "What to change first" not in after


def test_a_hook_that_is_left_behind_does_what_python_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have kept ours, and call it after it was uninstalled."""
    error: Exception = ValueError("from a thread")
    hooks._thread_excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, None))
    )
    assert "ValueError: from a thread" in capsys.readouterr().err
    hooks._excepthook(type(error), error, None)
    assert "ValueError: from a thread" in capsys.readouterr().err
    monkeypatch.setattr(sys, "excepthook", hooks._excepthook)
    hooks.uninstall()  # it was never installed, so what was there is not known
    assert sys.excepthook is hooks._excepthook
