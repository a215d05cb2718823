"""The magics in a real IPython: what they show, complete and explain."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn

import oracle_offload
from oracle_offload.engine import simulator

TRAIN = """
model(torch.randn(3, 64)).sum().backward()
simulator.finish()
optimizer.step()
optimizer.zero_grad()
"""


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    found = InteractiveShell.instance()
    found.user_ns.update(torch=torch, oracle_offload=oracle_offload, simulator=simulator)
    found.run_line_magic("load_ext", "oracle_offload")
    yield found
    if "oo_mem" in found.magics_manager.magics["line"]:
        found.run_line_magic("unload_ext", "oracle_offload")
    found.reset(new_session=False)
    found.displayhook.flush()
    InteractiveShell.clear_instance()


@pytest.fixture
def attached(shell):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = oracle_offload.attach(model, "cpu")
    shell.user_ns.update(model=model, optimizer=optimizer, manager=manager)
    yield shell
    manager.detach()


def run(shell, cell):
    """Run a cell; its output, and the error it ended with."""
    with capture_output() as captured:
        result = shell.run_cell(cell)
    return captured, result.error_in_exec


def reports(captured):
    return [output.data for output in captured.outputs]


def test_the_line_shows_the_summary_as_text_and_page(attached):
    captured, error = run(attached, "%oo_mem")
    assert error is None
    (data,) = reports(captured)
    assert "oracle_offload memory summary" in data["text/plain"]
    assert 'class="oo oo-summary"' in data["text/html"] and "<script" not in data["text/html"]


def test_the_line_takes_options_and_a_model(attached):
    other = nn.Linear(4, 4)
    with oracle_offload.attach(other, "cpu"):
        for option, names in (("model", ["Sequential"]), ("", ["Sequential", "Linear"])):
            captured, _ = run(attached, f"%oo_mem --json {option}")
            (device,) = json.loads(captured.stdout)["devices"]
            assert sorted(usage["name"] for usage in device["models"]) == sorted(names)
    captured, _ = run(attached, "%oo_mem -a -d cpu")
    assert "prefetched" not in reports(captured)[0]["text/plain"]
    captured, _ = run(attached, "%oo_mem --device nonsense")
    assert "could not be read" in reports(captured)[0]["text/plain"]
    captured, error = run(attached, "%oo_mem optimizer")
    assert "optimizer is no variable that holds a model" in captured.stderr + str(error)


def figures(data):
    return {line[:30].strip(): line[30:].strip() for line in data["text/plain"].splitlines()}


def test_the_cell_shows_what_it_moved(attached):
    run(attached, TRAIN)
    before = attached.user_ns["manager"].state.engine.stats()
    captured, error = run(attached, f"%%oo_mem\n{TRAIN}{TRAIN}'done'")
    assert error is None
    after = attached.user_ns["manager"].state.engine.stats()
    report = next(data for data in reports(captured) if "steps" in data["text/plain"])
    assert "'done'" in captured.stdout
    shown = figures(report)
    moved = after["h2d_bytes"] - before["h2d_bytes"]
    assert shown["copied to the device"] == f"{moved / 1024:.2f} KiB"
    assert shown["steps"] == "2"
    assert shown["uses of weights"] == str(after["acquires"] - before["acquires"])
    assert shown["peak of torch's memory"] == shown["allocated by torch"] == "unknown"
    assert shown["arena"].endswith("(+0 B)")
    assert re.fullmatch(r"\d+, \d+\.\d\d ms", shown["stalls"])
    assert re.fullmatch(r"\d+\.\d\d ms", shown["time by the device's clock"])
    assert "<table>" in report["text/html"] and "<script" not in report["text/html"]


def test_the_cell_keeps_its_variables_and_ends_with_its_error(attached):
    captured, error = run(attached, "%%oo_mem\nkept = 4\nnothing = 1 / 0\nlost = 5")
    assert isinstance(error, ZeroDivisionError)
    assert attached.user_ns["kept"] == 4 and "lost" not in attached.user_ns
    assert captured.stdout.count("Traceback") == 1
    assert len(reports(captured)) == 1
    for quiet in ("kept;", "None", "# nothing"):
        captured, error = run(attached, f"%%oo_mem\n{quiet}")
        assert (captured.stdout, error) == ("", None)
    captured, error = run(attached, "%%oo_mem model\nkept")
    assert "name a --device" in captured.stderr + str(error)


def test_the_cell_s_code_is_what_it_is_without_the_magic(attached):
    cell = (
        "%%oo_mem\nimport inspect\n"
        "def double(x: float) -> float:\n    return 2 * x\n"
        "kinds = double.__annotations__\nsource = inspect.getsource(double)\n"
        "line = double.__code__.co_firstlineno"
    )
    captured, error = run(attached, cell)
    assert error is None, captured.stdout
    assert attached.user_ns["kinds"] == {"x": float, "return": float}
    assert attached.user_ns["source"] == "def double(x: float) -> float:\n    return 2 * x\n"
    assert attached.user_ns["line"] == 3, "the magic is on the first"
    run(attached, "%%oo_mem\nfrom __future__ import annotations")
    run(attached, "%%oo_mem\ndef later(x: unheard): pass\nkinds = later.__annotations__")
    assert attached.user_ns["kinds"] == {"x": "unheard"}, "as from any cell"


def test_the_traceback_shows_the_cell_s_line(attached):
    captured, _ = run(attached, "%%oo_mem\nnone = 0\nmany = 1 / none")
    assert "line 3" in captured.stdout and "many = 1 / none" in captured.stdout


def test_a_cell_may_await_where_no_loop_runs(attached):
    captured, error = run(
        attached, "%%oo_mem\nimport asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 41)"
    )
    assert error is None, captured.stdout
    assert "41" in captured.stdout
    assert any("steps" in data["text/plain"] for data in reports(captured))


def test_a_named_device_without_a_card_s_peak_is_no_error(attached, monkeypatch):
    def reset(device=None):
        raise ValueError(f"Expected a cuda device, but got: {device}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    captured, error = run(attached, "%%oo_mem -d cpu\nran = True")
    assert error is None, captured.stdout
    assert attached.user_ns["ran"] and figures(reports(captured)[0])["steps"] == "0"


def test_a_cell_that_cannot_await_says_so(attached):
    async def notebook():
        return run(attached, "%%oo_mem\nimport asyncio\nawait asyncio.sleep(0)")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        captured, error = asyncio.run(notebook())
        said = captured.stderr + str(error)
        del error
        gc.collect()
    assert "cannot await" in said and "SyntaxError" not in captured.stdout
    assert not [warning for warning in warned if "never awaited" in str(warning.message)]


def test_a_cell_that_attaches_says_what_cannot_be_told(shell):
    cell = (
        "%%oo_mem\nfrom torch import nn\n"
        "big = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(5)))\n"
        "held = oracle_offload.attach(big, 'cpu')"
    )
    captured, error = run(shell, cell)
    assert error is None
    shown = figures(reports(captured)[0])
    assert shown["steps"] == shown["copied to the device"] == "unknown"
    assert shown["arena"].endswith(", before unknown")
    run(shell, "held.detach(); del held, big")


def test_an_error_of_memory_is_explained_under_the_cell(shell):
    captured, _ = run(shell, "raise MemoryError")
    (data,) = reports(captured)
    assert "What to change first" in data["text/plain"]


def test_completion_offers_options_and_models(attached):
    def offered(text):
        return attached.complete(text.split()[-1] if text[-1] != " " else "", text)[1]

    assert set(offered("%oo_mem ")) >= {"--device", "--json", "model"}
    assert "optimizer" not in offered("%oo_mem ")
    assert offered("%oo_mem --de") == ["--device"]
    assert set(offered("%oo_watch ")) >= {"start", "stop"}
    assert "model" not in offered("%%oo_mem ") and "--device" in offered("%%oo_mem ")
    attached.user_ns["_last"] = attached.user_ns["model"]
    assert "_last" not in offered("%oo_mem "), "nor what IPython keeps of outputs"


def test_help_texts_name_every_option(attached):
    for name, words in (
        ("oo_mem", ("--device", "--abbreviated", "--json", "model")),
        ("oo_watch", ("--seconds", "stop")),
    ):
        text = attached.find_line_magic(name).__doc__
        assert all(word in text for word in words), text


def test_the_view_is_renewed_until_it_is_stopped(attached):
    captured, error = run(attached, "%oo_watch --seconds 0.05")
    assert error is None
    (first,) = reports(captured)
    assert "steps so far" in first["text/plain"] and "<script" not in first["text/html"]
    watcher = attached.magics_manager.registry["Magic"].watcher
    seen, view = [], watcher._view

    class View:
        def update(self, live):
            seen.append(live)

    watcher._view = View()
    run(attached, TRAIN)
    deadline = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(seen) >= 3
    run(attached, "%oo_watch stop")
    assert not watcher._thread.is_alive() and view is not None
    assert seen[-1].document["devices"][0]["steps"] == 1
    count = len(seen)
    time.sleep(0.2)
    assert len(seen) == count
    captured, error = run(attached, "%oo_watch --seconds 0")
    assert "is not within 0.05 and 3600" in captured.stderr + str(error)
    assert "oo_watch" not in [thread.name for thread in threading.enumerate()]


def test_a_view_that_is_stopped_shows_what_was_last(attached):
    run(attached, "%oo_watch --seconds 3600")
    watcher = attached.magics_manager.registry["Magic"].watcher
    seen = []
    watcher._view = SimpleNamespace(update=seen.append)
    run(attached, TRAIN)
    assert seen == []
    run(attached, "%oo_watch stop")
    (last,) = seen
    assert last.document["devices"][0]["steps"] == 1
    captured, error = run(attached, "%oo_watch --seconds 3601")
    assert "is not within 0.05 and 3600" in captured.stderr + str(error)


def test_a_cell_has_a_peak_of_its_own_on_every_card(shell, monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda card: reset.append(str(card)))
    for number, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated")):
        monkeypatch.setattr(torch.cuda, name, lambda card, number=number: 7 + number)
    captured, error = run(shell, "%%oo_mem\nran = True")
    assert error is None and reset == ["cuda:0", "cuda:1"]
    shown = figures(reports(captured)[0])
    assert shown["peak of torch's memory"] == "9 B" and shown["allocated by torch"] == "7 B (+0 B)"


def test_unloading_takes_everything_back(attached):
    run(attached, "%oo_watch")
    attached.run_line_magic("unload_ext", "oracle_offload")
    for kind in ("line", "cell"):
        assert not [name for name in attached.magics_manager.magics[kind] if "oo_" in name]
    assert "oo_watch" not in [thread.name for thread in threading.enumerate()]
    captured, _ = run(attached, "raise MemoryError")
    assert reports(captured) == []
