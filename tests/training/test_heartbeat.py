"""The heartbeat: written once a second and whole, gone with its process, shown as it is."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from equality import attached
from torch import nn

from oracle_offload import OffloadError
from oracle_offload.commands import watch as watching
from oracle_offload.engine import simulator
from oracle_offload.host.cache import folder
from oracle_offload.host.processes import machine
from oracle_offload.observe import heartbeat, live
from oracle_offload.observe.heartbeat import Heartbeat
from oracle_offload.observe.meter import Meter

ROOT = Path(__file__).resolve().parents[2]


def net(depth=5):
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(depth)))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(3, 64)).sum().backward()
        simulator.finish()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the clock of a heartbeat shows that is made after this."""
    now = [50.0]
    shown = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(heartbeat, "time", shown)
    return now


@pytest.fixture
def heart(tmp_path, monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "new"))
    return Heartbeat()


def test_every_figure_is_a_counter_or_what_the_report_says():
    model = net()
    with attached(model, "cpu") as manager:
        meter = Meter()
        meter.read()
        train(model, 4)
        found = heartbeat.pulse(meter)
        stats = manager.state.engine.stats()
        (device,) = found["devices"]
        assert found["numbers"]["h2d_bytes"] == stats["h2d_bytes"] > 0
        assert device["steps"] == found["numbers"]["steps"] == 4
        (usage,) = manager.memory_summary().devices
        assert device["sentence"] == usage.verdict.sentence("cpu")
        parts = device["memory"]["parts"]
        assert parts["arena"] == stats["arena_bytes"]
        assert sum(filter(None, parts.values())) == device["memory"]["total_bytes"]
        assert not {"weights", "gradients", "activations"} & parts.keys(), (
            "they are not distinguished"
        )
        assert found["host"]["parts"]["page-locked"] == stats["locked_bytes"] > 0
        assert json.loads(json.dumps(found)) == found
    assert heartbeat.pulse(meter)["devices"] == []


def test_it_is_written_at_most_once_a_second(clock, heart, monkeypatch):
    writes = []
    monkeypatch.setattr(heart, "write", lambda: writes.append(clock[0]))
    for later in (0.0, 0.5, 0.49, 0.02, 0.99, 0.01, 5.0, 0.0):
        clock[0] += later
        heart.after_step()
    assert writes == [50.0, pytest.approx(51.01), pytest.approx(52.01), pytest.approx(57.01)]


def test_the_file_is_replaced_whole_and_this_user_s_alone(heart):
    model = net()
    with attached(model, "cpu"):
        train(model, 2)
        heart.write()
        first = heart.path.stat()
        if os.name == "posix":  # elsewhere the folder says who may read
            assert first.st_mode & 0o777 == 0o600
        train(model)
        heart.write()
        assert heart.path.stat().st_ino != first.st_ino
        assert [path.name for path in heart.path.parent.iterdir()] == [
            f"heartbeat-{machine()}-{os.getpid()}.json"
        ]
        shown = live.read(heart.path)
        assert shown.document["devices"][0]["steps"] == 3
        assert live.heartbeats() == [heart.path]
    heart.remove()
    assert live.heartbeats() == []
    heart.remove()


def test_a_fork_neither_writes_nor_removes_its_parent_s(heart, monkeypatch):
    heart.write()
    child = os.getpid() + 1
    monkeypatch.setattr(heartbeat.os, "getpid", lambda: child)
    assert not heart.is_mine
    heart.remove()
    monkeypatch.setattr(heart, "write", lambda: pytest.fail("it wrote"))
    heart.after_step()
    assert heart.path.exists()


def refuse(*_):
    raise PermissionError(errno.EACCES, "another process has it open")


def test_one_refusal_is_tried_again_at_the_next_second(clock, heart, monkeypatch):
    heart.after_step()
    for _ in range(2):  # that it failed before does not count when it fails again
        first = heart.path.read_bytes()
        with monkeypatch.context() as windows:
            windows.setattr(heartbeat.os, "replace", refuse)
            clock[0] += 1
            heart.after_step()
        assert heart.path.read_bytes() == first
        clock[0] += 1
        heart.after_step()
        assert heart.path.read_bytes() != first


def test_a_first_write_that_fails_fails_no_step(heart, monkeypatch):
    monkeypatch.setattr(heartbeat.os, "replace", refuse)
    heart.after_step()
    assert not heart.path.exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files")
def test_no_file_is_left_open(heart, monkeypatch):
    heart.write()
    before = sorted(os.listdir("/proc/self/fd"))
    heart.write()
    monkeypatch.setattr(heartbeat.os, "write", refuse)
    with pytest.raises(PermissionError):
        heart.write()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_engine_that_is_closed_meanwhile_is_passed_over(monkeypatch):
    def stats():
        raise OffloadError("the engine is closed")

    closed = SimpleNamespace(engine=SimpleNamespace(stats=stats))
    monkeypatch.setattr(heartbeat, "open_states", lambda: [closed])
    assert heartbeat.pulse(Meter())["devices"] == []


def test_what_fails_is_said_once_and_tried_again_and_leaves_no_stale_file(
    clock, heart, monkeypatch, caplog
):
    heart.after_step()
    tried = []

    def replace(*_):
        tried.append(clock[0])
        refuse()

    with monkeypatch.context() as windows, caplog.at_level("INFO", "oracle_offload"):
        windows.setattr(heartbeat.os, "replace", replace)
        for _ in range(70):
            clock[0] += 1
            heart.after_step()
            assert heart.path.exists() == (len(tried) < 2)
    assert tried == [51.0, 52.0, 82.0, 112.0]
    assert len([record for record in caplog.records if "not be written" in record.message]) == 1
    assert list(heart.path.parent.iterdir()) == []
    clock[0] = 142.0
    heart.after_step()
    assert live.read(heart.path).document["pid"] == os.getpid()


def test_a_short_write_leaves_the_file_that_was_there(heart, monkeypatch):
    heart.write()
    before = heart.path.read_bytes()
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(heartbeat.os, "write", lambda file, text: real(file, text[:9]))
        with pytest.raises(OSError, match=r"only 9 of [0-9]+ bytes") as failed:
            heart.write()
    assert failed.value.errno == errno.ENOSPC
    assert heart.path.read_bytes() == before
    assert list(heart.path.parent.iterdir()) == [heart.path]


def test_machines_that_share_the_folder_have_a_file_each(heart, monkeypatch):
    heart.write()
    pid = os.getpid() + 1
    there = heart.path.with_name(f"heartbeat-other-0a-{pid}.json")
    told = {**json.loads(heart.path.read_bytes()), "pid": pid, "time_s": time.time() - 60}
    there.write_text(json.dumps({**told, "machine": "other-0a"}))
    assert {heart.path, there} == set(live.heartbeats())
    asked = []
    monkeypatch.setattr(live, "is_alive", lambda pid: asked.append(pid) or False)
    text = str(live.read(there))
    assert text.startswith(f"process {pid} on other-0a\n")
    assert "without a clean exit" not in text and "no step of process" in text and asked == []
    assert "without a clean exit" in str(live.Live(told)) and asked == [pid]
    assert str(live.read(heart.path)).startswith(f"process {os.getpid()}\n")


def test_a_fork_has_a_heartbeat_of_its_own(heart, monkeypatch):
    hooks, ends = [], []
    monkeypatch.setattr(heartbeat, "_running", None)
    monkeypatch.setattr(heartbeat, "_is_hooked", False)
    monkeypatch.setattr(
        heartbeat.torch_optimizer, "register_optimizer_step_post_hook", hooks.append
    )
    monkeypatch.setattr(heartbeat.atexit, "register", ends.append)
    monkeypatch.setenv("ORACLE_OFFLOAD_HEARTBEAT", "1")
    parent = heartbeat.start()
    assert heartbeat.start() is parent
    parent.write()
    child_pid = os.getpid() + 1
    monkeypatch.setattr(heartbeat.os, "getpid", lambda: child_pid)
    child = heartbeat.start()
    assert child is not parent and child.path.name.endswith(f"-{child_pid}.json")
    hooks[0]()
    assert child.path.exists() and len(hooks) == len(ends) == 1, "a fork has its parent's hooks"
    ends[0]()
    assert not child.path.exists() and parent.path.exists()


def test_what_the_killed_have_left_is_removed(heart, monkeypatch):
    day = 24 * 3600
    monkeypatch.setattr(heartbeat, "is_alive", lambda pid: {1: True, 2: False, 3: None}[pid])
    now = float(int(time.time()))
    monkeypatch.setattr(heartbeat.time, "time", lambda: now)
    heart.path.parent.mkdir()
    kept, gone = [], []
    for name, age, is_kept in (
        (f"{machine()}-1.json", 2 * day, True),
        (f"{machine()}-2.json", day - 60, True),
        (f"{machine()}-2.old", day, True),  # not older than that
        (f"{machine()}-2.new", day + 60, False),
        (f"{machine()}-3.json", 2 * day, True),
        ("other-0a-2.json", 29 * day, True),
        ("other-0b-2.json", 31 * day, False),
        ("9.json", 31 * day, False),
    ):
        path = heart.path.with_name(f"heartbeat-{name}")
        path.write_text("{}")
        os.utime(path, (now - age,) * 2)
        (kept if is_kept else gone).append(path)
    beside = heart.path.with_name("other.json")
    beside.write_text("{}")
    os.utime(beside, (0, 0))
    monkeypatch.setattr(heartbeat, "_running", None)
    monkeypatch.setattr(heartbeat, "_is_hooked", True)
    monkeypatch.setenv("ORACLE_OFFLOAD_HEARTBEAT", "1")
    heartbeat.start()
    assert set(heart.path.parent.iterdir()) == {*kept, beside} and gone


def test_it_may_be_switched_off(monkeypatch):
    monkeypatch.setattr(heartbeat, "_running", None)
    monkeypatch.setenv("ORACLE_OFFLOAD_HEARTBEAT", "0")
    assert heartbeat.start() is None and heartbeat._running is None
    heartbeat._after_step()  # by the hook of another attach


def test_where_it_finds_no_folder_models_are_attached_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(heartbeat, "_running", None)
    monkeypatch.setenv("ORACLE_OFFLOAD_HEARTBEAT", "1")
    monkeypatch.delenv("ORACLE_OFFLOAD_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with caplog.at_level("INFO", "oracle_offload"), attached(net(), "cpu") as manager:
        assert manager.layers and heartbeat._running is None
    assert any("no heartbeat" in record.message for record in caplog.records)


TRAINING = """
import sys, time, torch, oracle_offload
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(5)))
manager = oracle_offload.attach(model, "cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
sys.stdin.readline()
"""


def watch(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "oracle_offload", "watch", *arguments],
        env={**os.environ, "ORACLE_OFFLOAD_CACHE_DIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("ends", ["in order", "killed"])
def test_a_training_is_watched_from_another_process(tmp_path, ends):
    environment = {**os.environ, "ORACLE_OFFLOAD_CACHE_DIR": str(tmp_path)}
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        env={**environment, "ORACLE_OFFLOAD_HEARTBEAT": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert training.stdout.readline() == "trained\n"
        done = watch(tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"process {training.pid}\ncpu: what bounds a step is unknown")
        assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
        document = json.loads(watch(tmp_path, str(training.pid), "--once", "--json").stdout)
        assert document["pid"] == training.pid
        if ends == "killed":
            training.kill()
        training.communicate("\n", timeout=60)
    finally:
        training.kill()
        training.wait(timeout=60)
    done = watch(tmp_path, str(training.pid))
    if ends == "killed":
        assert f"process {training.pid} has ended without a clean exit" in done.stdout
    else:
        assert done.returncode == 1 and f"heartbeat-{machine()}-{training.pid}.json" in done.stderr
        assert watch(tmp_path).stderr.startswith("no training has a heartbeat in ")


# ---- what is shown ----


def document(**changes):
    numbers = dict(
        step_s=0.5,
        h2d_bytes=3 << 30,
        h2d_gbps=24.96,
        d2h_bytes=0,
        d2h_gbps=None,
        stalls=3.0,
        stall_s=0.25,
        interval_s=1.0,
        hits=9,
        acquires=10,
    )
    device = dict(
        device="cuda:0",
        uuid="GPU-1",
        steps=7,
        sentence="cuda:0 is link-bound",
        memory={"title": "cuda:0", "total_bytes": 4 << 30, "parts": {"arena": 4 << 30}},
    )
    host = {"title": "host memory", "total_bytes": None, "parts": {"free": None}}
    return {
        "schema": live.SCHEMA,
        "pid": os.getpid(),
        "machine": machine(),
        "time_s": time.time(),
        "numbers": numbers,
        "devices": [device],
        "host": host,
        **changes,
    }


CARD = dict(
    power_w=312.5,
    temperature_c=71,
    sm_clock_mhz=2520,
    memory_clock_mhz=10501,
    clock_reasons=0x44,
    link_generation=4,
    link_width=8,
)


def test_the_whole_view_of_a_training_elsewhere():
    view = live.Live(document(pid=7, machine="there"), CARD)
    assert str(view) == (
        "process 7 on there\ncuda:0 is link-bound\n"
        "\ncuda:0: 4.00 GiB\n"
        f"  [{94 * 'A'}]\n   A arena 4.00 GiB\n"
        "\nhost memory: unknown\n  []\n   . free unknown\n"
        "\n"
        "  steps so far            7\n"
        "  time per step           500.00 ms\n"
        "  to the device           3.00 GiB since the last look, 25.0 GB/s\n"
        "  to the host             0 B since the last look\n"
        "  stalls                  3, 250.00 ms, 25% of the time\n"
        "  hits                    9 of 10 (90.0%)\n"
        "  power                   312 W\n"
        "  temperature             71 degrees C\n"
        "  clocks, SM and memory   2520 MHz, 10501 MHz, held back by: power limit, hardware "
        "thermal slowdown\n"
        "  link                    PCI Express 4.0 x8\n"
    )
    page = view.to_html()
    for part in (
        '<p class="oo-verdict">cuda:0 is link-bound</p>\n<h3>cuda:0: 4.00 GiB</h3>\n<div class=',
        "<table>\n<tr><td>steps so far</td><td>7</td></tr>",
        "<h3>host memory: unknown</h3>",
        "<td>PCI Express 4.0 x8</td></tr>\n</table>",
    ):
        assert part in page
    short = dict(live.Live(document(numbers={**document()["numbers"], "interval_s": 0.2})).rows())
    assert short["stalls"] == "3, 250.00 ms, 100% of the time", "scaled from those timed"


@pytest.mark.parametrize(
    ("known", "label"),
    [
        ({"stalls": 3.0}, "stalls"),
        ({"stall_s": 0.5}, "stalls"),
        ({"hits": 3}, "hits"),
        ({"acquires": 3}, "hits"),
        ({"h2d_gbps": 3.0}, "to the device"),
        ({"link_generation": 4}, "link"),
        ({"link_width": 8}, "link"),
    ],
)
def test_half_of_a_figure_is_unknown(known, label):
    numbers = {**dict.fromkeys([*document()["numbers"], *CARD]), **known}
    assert dict(live.Live(document(numbers=numbers)).rows())[label] == "unknown"


def test_a_heartbeat_that_goes_while_they_are_listed_hides_no_other(heart):
    heart.write()
    (folder() / "heartbeat-gone.json").symlink_to("nowhere")
    assert live.heartbeats() == [live.path_of(os.getpid())]


def test_what_is_unknown_says_so():
    unknown = dict.fromkeys(document()["numbers"])
    view = live.Live(document(numbers=unknown), dict.fromkeys(CARD))
    rows = dict(view.rows())
    assert {label for label, text in rows.items() if "unknown" in text} == rows.keys() - {
        "steps so far"
    }
    assert "0" not in "".join(text for label, text in rows.items() if label != "steps so far")
    assert rows["clocks, SM and memory"] == "unknown, unknown, held back by: unknown"
    assert dict(live.Live(document(devices=[])).rows())["steps so far"] == "none"
    assert "no model is attached" in str(live.Live(document(devices=[])))
    assert dict(live.Live(document(), {**CARD, "clock_reasons": 0}).rows())[
        "clocks, SM and memory"
    ].endswith("held back by: nothing")


def test_a_training_that_stands_still_longer_than_ten_seconds_is_named(monkeypatch):
    told = live.Live(document(time_s=0.0))
    for now, note in ((10.0, ""), (10.5, "10 s"), (60.0, "60 s")):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        for shown in (str(told), told._repr_html_()):
            assert ("no step of process" in shown) is bool(note)
            assert f"no step of process {os.getpid()} has ended for {note}" in shown or not note


def test_text_of_others_cannot_steer_the_terminal():
    odd = document()
    odd["devices"][0]["sentence"] = "\x1b[2Jgone"
    odd["devices"][0]["memory"]["title"] = "a\x1b]0;title\x07b"
    assert "\x1b" not in str(live.Live(odd))
    odd["devices"][0]["sentence"] = "<script>\u202e\x1b"
    page = live.Live(odd).to_html()
    assert "<script>" not in page and not {"\u202e", "\x1b"} & set(page)


def test_a_part_of_a_later_version_is_shown_as_unknown(tmp_path):
    odd = document()
    odd["host"]["parts"] = {"free": 1 << 30, "new\u202e\x1b[2J" + "w" * 99: 2 << 30, "b<": None}
    path = tmp_path / "heartbeat-1.json"
    path.write_text(live.Live(odd).to_json())
    view = live.read(path)
    name = "unknown (new " + "w" * 28 + ")"
    assert f"? {name} 2.00 GiB" in str(view) and "? unknown (b<) unknown" in str(view)
    page = view.to_html()
    assert f"{name} 2.00 GiB</span>" in page and "unknown (b&lt;) unknown</span>" in page
    assert not {"\u202e", "\x1b"} & {*str(view), *page}


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": []},
        {"numbers": {"step_s": "soon"}},
        {"devices": [{}]},
        {"host": None},
        {"host": {"title": "host", "total_bytes": 1, "parts": {"free": "all"}}},
        {"time_s": None},
        {"pid": "mine"},
    ],
    ids=str,
)
def test_a_document_that_is_none_is_refused_in_one_line(tmp_path, monkeypatch, capsys, change):
    from oracle_offload import cli

    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    path = tmp_path / f"heartbeat-{machine()}-5.json"
    path.write_text(json.dumps(document(**change)))
    with pytest.raises(ValueError, match="is no heartbeat of this version"):
        live.read(path)
    assert cli.main(["watch", "--once"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_colour_is_asked_for():
    view = live.Live(document(time_s=0.0))
    assert "\x1b[33m" in view.to_text(color=True) and "\x1b" not in view.to_text()


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "heartbeat-1.json"
    for text in ("{}", "[]", '{"schema": "oracle_offload/heartbeat/99"}', "half"):
        path.write_text(text)
        with pytest.raises(ValueError):
            live.read(path)
    path.write_text(live.Live(document()).to_json())
    assert live.read(path).to_dict()["devices"][0]["steps"] == 7


def test_without_a_named_folder_it_is_the_user_s(monkeypatch):
    monkeypatch.delenv("ORACLE_OFFLOAD_CACHE_DIR", raising=False)
    assert folder().name == "oracle_offload" and folder().is_absolute()


def test_watching_needs_no_torch():
    code = "import sys, oracle_offload.commands.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("terminal", "options", "looks", "drawn"),
    [
        (True, {"once": True}, 1, False),
        (True, {"json": True}, 3, False),
        (True, {"json": True, "once": True}, 1, False),
        (True, {}, 3, True),
        (False, {}, 1, False),
        (False, {"json": True}, 3, False),
    ],
)
def test_it_looks_again_on_a_terminal_or_for_json_and_draws_over_text_alone(
    terminal, options, looks, drawn, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "oracle_offload.observe.screen", None)  # as without rich
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    path = tmp_path / "heartbeat-5.json"
    told = document()
    first, *_ = told["devices"]
    told["devices"] = [{**first, "uuid": None}, first]  # the first card is not known by name
    path.write_text(live.Live(told).to_json())
    waits, asked = [], []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            path.unlink()

    def sensors(uuid):
        asked.append(uuid)
        return SimpleNamespace(read=lambda: CARD)

    monkeypatch.setattr(watching.time, "sleep", sleep)
    monkeypatch.setattr(watching, "Sensors", sensors)
    arguments = SimpleNamespace(**{"pid": None, "once": False, "json": False, **options})
    assert watching.run(arguments) == 0
    captured = capsys.readouterr()
    assert waits == [1.0] * (3 if looks == 3 else 0) and asked == ["GPU-1"]
    assert captured.out.count("\x1b[H\x1b[J") == (3 if drawn else 0)
    if arguments.json:
        rows = [json.loads(line) for line in captured.out.splitlines()]
        assert len(rows) == looks and all(row["pid"] == told["pid"] for row in rows)
    else:
        assert captured.out.count("312 W") == looks
    assert captured.err.startswith("the training has ended") == (looks == 3)
    gone = f"cannot write its heartbeat any more ({path.name} is gone)\n"
    assert captured.err.endswith(gone) == (looks == 3)


def test_where_nobody_trains_it_says_when_there_is_something_to_see(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    assert watching.run(SimpleNamespace(pid=None, once=False, json=True)) == 1
    assert capsys.readouterr().err == (
        f"no training has a heartbeat in {tmp_path}: it begins with the first optimizer step "
        "after attach(), where ORACLE_OFFLOAD_HEARTBEAT is not 0\n"
    )
    for once, code in ((True, 1), (False, 0)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        assert watching.run(SimpleNamespace(pid=1 << 30, once=once, json=False)) == code
        said = capsys.readouterr().err
        assert said.startswith("cannot read " if once else "the training has ended")
    (tmp_path / "heartbeat-5.json").write_text("{")
    assert watching.run(SimpleNamespace(pid=None, once=False, json=True)) == 1
    assert "heartbeat-5.json" in capsys.readouterr().err


def test_a_process_number_means_this_machine_s_first(heart, monkeypatch, capsys):
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)

    def is_read(path):
        """Whether it is the file that is looked at, which is none."""
        watching.run(SimpleNamespace(pid=os.getpid(), once=True, json=True))
        return str(path) in capsys.readouterr().err

    heart.path.parent.mkdir()
    there = heart.path.with_name(f"heartbeat-other-0a-{os.getpid()}.json")
    assert is_read(heart.path)
    there.write_text("{}")
    assert is_read(there)
    heart.path.write_text("{}")
    os.utime(heart.path, (0, 0))
    assert is_read(heart.path)
    there.unlink()
    heart.path.with_name(f"heartbeat-other-0a-1{os.getpid()}.json").write_text("{}")
    heart.path.unlink()
    assert is_read(heart.path)


@pytest.mark.parametrize("refusals", [1, 2])
def test_one_refused_look_is_passed_over(heart, monkeypatch, capsys, refusals):
    heart.write()
    looks, waits, real = [], [], live.read

    def read(path):
        looks.append(path)
        return refuse() if len(looks) <= refusals else real(path)

    monkeypatch.setattr(watching, "read", read)
    monkeypatch.setattr(watching.time, "sleep", waits.append)
    arguments = SimpleNamespace(pid=os.getpid(), once=True, json=False)
    code = watching.run(arguments)
    captured = capsys.readouterr()
    if refusals == 1:
        assert code == 0 and captured.out.startswith(f"process {os.getpid()}\n")
    else:
        assert code == 1 and "EACCES" in captured.err
    assert waits == [1.0] and len(looks) == 2


def test_looks_refused_now_and_then_end_nothing(heart, monkeypatch, capsys):
    heart.write()
    looks, real = [], live.read

    def read(path):
        looks.append(path)
        if len(looks) == 6:
            path.unlink()
        return refuse() if len(looks) in (2, 4) else real(path)

    monkeypatch.setattr(watching, "read", read)
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    arguments = SimpleNamespace(pid=None, once=False, json=True)
    assert watching.run(arguments) == 0
    assert len(looks) == 6 and capsys.readouterr().out.count("\n") == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_a_look_that_cannot_be_written_is_said(as_json, heart, monkeypatch, capsys):
    heart.write()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        arguments = SimpleNamespace(pid=os.getpid(), once=True, json=as_json)
        code = watching.run(arguments)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert code == 1 and "cannot write standard output" in capsys.readouterr().err


# ---- in a terminal ----


def in_terminal(folder, columns, *, rich, until, keys="\x03"):
    """Run `watch` in a pseudo terminal; send it keys once it shows `until`. Return code, output."""
    import fcntl
    import pty
    import termios

    def begin():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # Tests that run in the background, and so this child, ignore it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    hide = "" if rich else "sys.modules['rich'] = None; "
    code = f"import sys; {hide}from oracle_offload.cli import main; sys.exit(main(['watch', '7']))"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, columns))
    modes = termios.tcgetattr(theirs)
    modes[3] |= termios.NOFLSH  # else Control-C takes along what was written and not yet read
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    environment = {**os.environ, "ORACLE_OFFLOAD_CACHE_DIR": str(folder), "TERM": "xterm"}
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-X", "utf8", "-c", code],
        env=environment,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=begin,
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the other side has gone
        while piece := os.read(ours, 65536):
            said += piece
            whole = until in said and not select.select([ours], [], [], 0.3)[0]
            if keys and whole:
                os.write(ours, keys.encode())
                keys = ""
    os.close(ours)
    return process.wait(60), said.decode()


def shown(text):
    """Return the lines that a terminal was sent last, without its control sequences."""
    last = re.split(r"\x1b\[\?1049l|\x1b\[H\x1b\[J", text)[-1]
    plain = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", last).replace("^C", "")
    return [line.rstrip() for line in plain.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo terminal")
@pytest.mark.parametrize("rich", [True, False], ids=["rich", "without rich"])
@pytest.mark.parametrize("columns", [40, 120])
def test_in_a_terminal_of_any_width_it_fits_and_control_c_leaves_it(tmp_path, columns, rich):
    path = tmp_path / f"heartbeat-{machine()}-7.json"
    path.write_text(json.dumps(document(pid=7)))
    path.chmod(0o600)
    code, text = in_terminal(tmp_path, columns, rich=rich, until=b"host memory")
    assert code == 0 and "Traceback" not in text and "interrupted" not in text
    assert ("\x1b[?1049h" in text) == ("\x1b[?1049l" in text) == rich, "the screen is given back"
    lines = shown(text)
    assert max(map(len, lines)) <= min(columns, 100)
    words = " ".join(" ".join(lines).split())
    for part in ("process 7", "cuda:0 is link-bound", "steps so far 7", "A arena 4.00 GiB", "hits"):
        assert part in words
    assert re.search(r"[\[;]32m", text) or not rich, "parts have their colours"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo terminal")
def test_what_was_lately_is_shown_and_names_steer_no_terminal(monkeypatch):
    screen = pytest.importorskip("oracle_offload.observe.screen")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "60")
    told = document()
    told["devices"][0]["sentence"] = "odd [red]\x1b[2J\u202ename[/red]"
    for encoding, marks in (("utf-8", "▁█▄"), ("ascii", "_#=")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        with screen.Screen(stream) as drawn:
            for number, step_s in enumerate((0.1, 0.5, 0.3, 0.3)):
                numbers = {**told["numbers"], "step_s": step_s}
                # A look without a step since the last one is none of a step.
                when = min(number, 2)
                drawn.show(live.Live({**told, "numbers": numbers, "time_s": float(when)}))
        text = stream.buffer.getvalue().decode(encoding)
        last = "\n".join(shown(text))
        assert f"{marks} 100.00 ms to 500.00 ms" in last
        assert "25.0 GB/s all along" in last
        assert "odd [red] name[/red]" in last and "\u202e" not in text
