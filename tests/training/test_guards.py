"""Guards: levels of memory, copies of models, a pause for a hot card, budgets; and the manager."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from equality import assert_same, attached
from torch import nn

from oracle_offload import NoRoomError
from oracle_offload.errors import OffloadError
from oracle_offload.train import (
    Cleanup,
    CopyCounter,
    PressureMonitor,
    ThermalPause,
    VramManager,
    track_copies,
    worker_budgets,
)
from oracle_offload.train.survive import pressure, thermal
from oracle_offload.train.survive.pressure import Reading, limit_of

GB = 1_000_000_000


class Host:
    """A machine with a memory limit of 1000 kB on the control group, as files."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
        self.write("proc/self/cgroup", "0::/job\n")
        self.write("proc/self/mountinfo", "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self.write("sys/fs/cgroup/job/memory.max", "1000000\n")
        self.use(0)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def use(self, permille):
        self.write("sys/fs/cgroup/job/memory.current", f"{permille * 1000 + 50000}\n")
        self.write("sys/fs/cgroup/job/memory.stat", "inactive_file 50000\n")


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "root")


def device_of(monitor, monkeypatch, used, total=16 * GB):
    monkeypatch.setattr(monitor, "_device_memory", lambda: (total - used, total))


def test_levels_of_the_host_rise_at_their_threshold_and_fall_below_it(host, caplog):
    told, saved = [], []
    monitor = PressureMonitor(
        device="cpu",
        root=str(host.root),
        on_warn=lambda reading: told.append(("warn", reading.used_bytes)),
        on_critical=lambda reading: told.append(("critical", reading.used_bytes)),
        checkpoint=saved.append,
    )
    seen = []
    sequence = [849, 850, 801, 799, 850, 949, 950, 901, 950, 899, 850, 799, 960, 700]
    with caplog.at_level(logging.WARNING):
        for step, permille in enumerate(sequence, 1):
            host.use(permille)
            seen.append(monitor.step(step))
            assert monitor.host.used_bytes == permille * 1000
    assert seen == [
        *("calm", "warn", "warn", "calm", "warn", "warn", "critical", "critical", "critical"),
        *("warn", "warn", "calm", "critical", "calm"),
    ]
    assert [level for level, _ in told] == ["warn", "warn", "critical", "critical"]
    assert told[0][1] == 850_000
    assert saved == [7, 13]  # once per excursion
    assert len(caplog.records) == 4
    assert "memory is at 'critical': host 927.73 KiB (95%) critical" in caplog.text


def test_levels_of_the_device_are_shares_or_sizes(host, monkeypatch):
    for options, limits in (
        ({}, (0.85 * 16, 0.93 * 16)),
        ({"warn": "10GB", "critical": 14 * GB}, (10, 14)),
        ({"warn": 0.5, "critical": "14GB"}, (8, 14)),
        ({"warn": 0.5, "critical": 1.0}, (8, 16)),
    ):
        monitor = PressureMonitor(root=str(host.root), hysteresis=0.0, **options)
        for level, limit in zip(("warn", "critical"), limits, strict=True):
            device_of(monitor, monkeypatch, int(limit * GB) - 1)
            assert monitor.step(1) == {"warn": "calm", "critical": "warn"}[level]
            device_of(monitor, monkeypatch, int(limit * GB))
            assert monitor.step(1) == level
        device_of(monitor, monkeypatch, 0)
        assert monitor.step(1) == "calm"


def test_a_threshold_is_a_share_only_as_a_fraction():
    assert limit_of(1.0, 100) == 100 and limit_of(1, 100) == 1
    assert limit_of(0.5, 100) == 50 and limit_of("50", 100) == 50
    both = PressureMonitor(device="cpu", warn=0.9, critical=0.9)
    assert both.device.level == "calm"


def test_what_is_not_known_has_no_level(host, monkeypatch, caplog):
    monitor = PressureMonitor(root=str(host.root), device="cpu")
    for answer in ((None, GB), (GB, None), (0, 0)):
        monkeypatch.setattr(monitor, "_device_memory", lambda answer=answer: answer)
        assert monitor.step(1) == "calm"
    assert str(Reading("host", None, 5)) == str(Reading("host", 5, None)) == "host unknown"
    host.use(990)
    assert monitor.step(1) == "critical"  # and there is no checkpoint to be made
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_one_of_both_places_makes_the_level_and_the_line_shows_both(host, monkeypatch):
    monitor = PressureMonitor(root=str(host.root), device="cpu")
    host.use(310)
    assert monitor.step(1) == "calm"
    assert monitor.status_line() == "device unknown | host 302.73 KiB (31%) calm"
    device_of(monitor, monkeypatch, 15 * GB)
    assert monitor.step(2) == monitor.level == "critical"
    assert monitor.status_line().startswith("device 13.97 GiB (94%) critical | host")
    assert monitor.device == Reading("device", 15 * GB, 16 * GB, "critical")


def test_it_looks_every_so_many_steps_and_a_failed_checkpoint_ends_no_training(host, caplog):
    def full(step):
        raise OSError("disk full")

    monitor = PressureMonitor(root=str(host.root), device="cpu", every=3, checkpoint=full)
    host.use(990)
    assert monitor.step(1) == monitor.step(2) == "calm"
    with caplog.at_level(logging.ERROR):
        assert monitor.step(3) == "critical"
    assert "the emergency checkpoint of step 3 failed" in caplog.text and "disk full" in caplog.text


def test_a_phase_is_one_line_with_what_it_added_and_its_peak(host):
    monitor = PressureMonitor(root=str(host.root), device="cpu")
    host.use(100)
    assert monitor.phase("load") == "phase 'load' begins: host 97.66 KiB (10%) calm"
    host.use(600)
    monitor.step(1)
    host.use(300)
    assert monitor.phase("train") == ("phase 'load' -> 'train': host +195.31 KiB, peak 585.94 KiB")
    host.use(200)
    assert monitor.phase("x") == "phase 'train' -> 'x': host -97.66 KiB, peak 292.97 KiB"
    assert monitor.phase("y") == "phase 'x' -> 'y': host +0 B, peak 195.31 KiB"


def test_a_phase_in_which_nothing_was_known_added_everything(tmp_path, caplog):
    monitor = PressureMonitor(root=str(tmp_path / "root"), device="cpu")
    with caplog.at_level(logging.INFO):
        assert monitor.phase("a") == "phase 'a' begins: host unknown"
        assert monitor.phase("b") == "phase 'b' begins: host unknown"
        Host(tmp_path / "root").use(100)
        assert monitor.phase("c") == "phase 'b' -> 'c': host +97.66 KiB, peak 97.66 KiB"
    assert caplog.messages[-1] == "phase 'b' -> 'c': host +97.66 KiB, peak 97.66 KiB"


def test_the_device_is_the_one_that_was_asked_for_or_has_models(monkeypatch):
    def state(name, free, listeners=("a model",)):
        def free_bytes():
            if free is None:
                raise OffloadError("closed")
            return free

        engine = SimpleNamespace(mem_info=lambda: (0, 1000))
        return SimpleNamespace(
            device=name, listeners=listeners, free_bytes=free_bytes, engine=engine
        )

    states = [state("cuda:8", 600, ()), state("cuda:9", 700), state("cpu", 800)]
    monkeypatch.setattr(pressure, "open_states", lambda: states)
    assert PressureMonitor().device.used_bytes == 300
    assert PressureMonitor(device="cpu").device.used_bytes == 200
    assert PressureMonitor(device="cuda:9").device.used_bytes == 300  # there is no such card
    states[1] = state("cuda:9", None)
    assert PressureMonitor(device="cuda:9").device.used_bytes is None
    if not torch.cuda.is_available():
        assert PressureMonitor().device.used_bytes is None  # not that of another device


def test_a_simulated_device_is_read_from_its_engine(device):
    model = nn.Linear(256, 256)
    with attached(model, device) as manager:
        free, total = manager.state.engine.mem_info()
        monitor = PressureMonitor(device=device)
        assert (monitor.device.used_bytes, monitor.device.total_bytes) == (
            total - manager.state.free_bytes(),
            total,
        )
        assert PressureMonitor().device.total_bytes == total
        assert free <= manager.state.free_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hysteresis": 1.0}, "hysteresis=1.0"),
        ({"hysteresis": True}, "hysteresis=True"),
        ({"hysteresis": False}, "hysteresis=False"),
        ({"hysteresis": -0.1}, "hysteresis=-0.1"),
        ({"every": 0}, "every=0"),
        ({"warn": 0.95}, "0.95 to warn at is above 0.93"),
        ({"host_warn": "5GB", "host_critical": "4GB"}, "'5GB' to warn at is above '4GB'"),
        ({"critical": -1}, "threshold=-1 must be above zero"),
        ({"warn": "much"}, "threshold='much' is not a size"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PressureMonitor(**options)


@contextlib.contextmanager
def control_group(limit):
    """Make a control group with a memory limit; yield the file that takes processes, or skip."""
    for point, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(point) / f"oracle-offload-test-{os.getpid()}"
        try:
            group.mkdir()
            try:
                (group / name).write_text(str(limit))
                yield group / "cgroup.procs"
                return
            finally:
                group.rmdir()
        except OSError as error:
            why = error
    pytest.skip(f"no control group with a memory limit may be made here: {why}")


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_hog_in_a_control_group_is_noticed_before_it_is_killed():
    limit = 1 << 30
    with control_group(limit) as processes:
        join = f"open({str(processes)!r}, 'w').write('0')"
        hog = Path(__file__).parent / "hog.py"
        code = f"{join}; import runpy; runpy.run_path({str(hog)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["levels"] == ["calm", "warn", "critical", "calm"]
    assert found["total"] == limit and 0.85 <= found["share"] < 1.0 and found["saved"] == 1


# ---- copies ----


def test_deep_copies_of_tracked_models_are_counted_and_are_ordinary_models(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    other = nn.Linear(2, 2)
    nbytes = 4 * (64 * 64 + 5 * 64) + 8
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    counter = track_copies(model)
    with attached(model, "cpu"):
        with caplog.at_level(logging.INFO):
            made = copy.deepcopy(model)
            pair = copy.deepcopy([model, model])
        copy.deepcopy(other)
        assert counter.copies == 2 and counter.copied_bytes == 2 * nbytes
        assert_same(dict(made.state_dict()), expected)
        assert pair[0] is pair[1] and type(made[0]) is nn.Linear
        copy.deepcopy(made)
        assert counter.copies == 2  # a copy is not tracked
        assert "copy 1 of a Sequential: 17." in caplog.text
        counter.record(other)
        assert counter.copied_bytes % nbytes == 24
    with pytest.raises(ValueError, match="Sequential has a __deepcopy__ already"):
        CopyCounter().track(model)
    counter.close()
    count = counter.copies
    copy.deepcopy(model)
    assert counter.copies == count and "__deepcopy__" not in model.__dict__
    other_counter = track_copies(model)
    counter.close()  # once more, when somebody else tracks it
    copy.deepcopy(model)
    assert other_counter.copies == 1


def test_a_tracked_model_can_be_pickled_and_is_an_ordinary_one_then():
    model = nn.Sequential(nn.Linear(4, 4))
    counter = track_copies(model)
    other = pickle.loads(pickle.dumps(model))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    made = copy.deepcopy(other)
    assert made is not other and counter.copies == 0
    again = track_copies(other)
    copy.deepcopy(other)
    copy.deepcopy(model)
    assert (counter.copies, again.copies) == (1, 1)


def test_a_copy_that_fails_is_not_counted_and_tracking_keeps_no_model_alive():
    class Odd(nn.Linear):
        refuses = True

        def __reduce_ex__(self, protocol):
            if self.refuses:
                raise RuntimeError("no copy of me")
            return super().__reduce_ex__(protocol)

    model = Odd(2, 2)
    counter = track_copies(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no copy of me"):
            copy.deepcopy(model)
    assert counter.copies == 0
    model.refuses = False
    copy.deepcopy(model)
    assert counter.copies == 1
    import weakref

    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    counter.close()


# ---- heat ----


class Card:
    """Cools by two degrees a second, by a clock of its own."""

    def __init__(self, degrees):
        self.degrees, self.now = degrees, 100.0

    def sleep(self, seconds):
        self.now += seconds
        self.degrees -= 2 * seconds


def pause_of(card, **options):
    return ThermalPause(
        80,
        70,
        temperature=lambda: card.degrees,
        clock=lambda: card.now,
        sleep=card.sleep,
        **options,
    )


def test_a_hot_card_is_waited_for_until_it_is_cool(caplog):
    card = Card(79.9)
    pause = pause_of(card)
    assert pause.step() == 0.0 and pause.pauses == 0
    card.degrees = 80
    assert pause.step() == 5.0 and card.degrees == 70
    card.degrees = 91
    assert pause.step() == 11.0
    assert (pause.pauses, pause.paused_s) == (2, 16.0)
    assert pause.why == ""
    assert caplog.messages == [
        f"the card is at {degrees} C: paused until it is at 70 C" for degrees in (80, 91)
    ]


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("in_use", [False, True])
def test_a_card_in_use_does_its_queued_work_before_it_cools(available, in_use, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    assert pause_of(Card(80)).step() == 5.0
    assert waits == [1] * (available and in_use)


def test_a_pause_ends_in_time_and_where_the_sensor_falls_silent():
    assert pause_of(Card(500), most_s=3).step() == 3.0
    answers = iter([90, None])
    card = Card(0)
    pause = ThermalPause(
        80, 70, temperature=lambda: next(answers), clock=lambda: card.now, sleep=card.sleep
    )
    assert pause.step() == 1.0
    assert ThermalPause(temperature=lambda: None).step() == 0.0


def test_without_a_sensor_it_says_why_and_never_waits(monkeypatch, caplog):
    if torch.cuda.is_available():
        monkeypatch.setattr(thermal, "uuid_of", lambda device: None)
    with caplog.at_level(logging.WARNING):
        pause = ThermalPause()
    assert pause.why == "the device is no NVIDIA card" and pause.why in caplog.text
    assert pause.step() == 0.0
    for wrong in ({"limit_c": 70, "resume_c": 70}, {"most_s": 0}):
        with pytest.raises(ValueError, match="training has to resume below the limit"):
            ThermalPause(**wrong)


# ---- the manager ----


def test_the_manager_s_words_and_defaults(host, monkeypatch):
    saved = []
    manager = VramManager(root=str(host.root), device="cpu", checkpoint=saved.append)
    monitor = manager.monitor
    assert manager.last_vram_mb is None
    assert manager.step(0) == "calm" and saved == []
    assert manager.status_string() == "VRAM: unknown | Copies: 0 | Cleanups: 0"
    device_of(monitor, monkeypatch, 8192 << 20)
    assert manager.step(10) == "calm" and manager.cleanups == 0  # off by default
    assert manager.last_vram_mb == 8192.0
    for _ in range(35):
        manager.record_model_copy(nn.Linear(1, 1))
    for _ in range(5):
        assert isinstance(manager.force_cleanup(), Cleanup)
    assert manager.status_string() == "VRAM: 8192 MB | Copies: 35 | Cleanups: 5"
    for used, level in ((10 * GB, "warn"), (14 * GB, "critical"), (14 * GB, "critical")):
        device_of(monitor, monkeypatch, used)
        assert manager.step(11) == level
    assert saved == [11]
    assert manager.step(50) == "critical" and saved == [11, 50]
    manager.step(100)
    assert saved == [11, 50, 100] and manager.cleanups == 5
    assert manager.phase("end").startswith("phase 'end' begins: device 13.04 GiB")
    device_of(monitor, monkeypatch, 0)
    manager.step(101)
    device_of(monitor, monkeypatch, 15 * GB)
    manager.step(150)
    assert saved[3:] == [150]  # once, though both ask for it
    model = nn.Linear(1, 1)
    manager.track_copies(model)
    copy.deepcopy(model)
    assert manager.total_copies == 36
    manager.close()
    copy.deepcopy(model)
    assert manager.total_copies == 36


def test_once_enabled_it_cleans_up_every_ten_steps_or_above_twelve_gb(host, monkeypatch):
    manager = VramManager(root=str(host.root), device="cpu", enabled=True)
    assert [step for step in range(25) if manager.should_cleanup(step)] == [10, 20]
    device_of(manager.monitor, monkeypatch, 12 * GB)
    manager.step(1)
    assert not manager.should_cleanup(1) and manager.cleanups == 0
    device_of(manager.monitor, monkeypatch, 12 * GB + 1)
    manager.step(1)
    assert manager.should_cleanup(1) and manager.cleanups == 1
    manager.enabled = False
    assert not manager.should_cleanup(10)
    unknown = VramManager(root=str(host.root), device="cpu", enabled=True)
    assert unknown.step(50) == "calm" and unknown.cleanups == 1  # and nothing is saved
    monkeypatch.setattr(unknown.monitor, "_device_memory", lambda: (None, GB))
    assert unknown.step(51) == "calm" and not unknown.should_cleanup(51)
    half = VramManager(root=str(host.root), device="cpu", enabled=True, every=3, above=0.5)
    device_of(half.monitor, monkeypatch, 9 * GB)
    half.step(1)
    assert half.cleanups == 1 and half.should_cleanup(3)
    for wrong in ({"above": "much"}, {"every": 0}, {"checkpoint_every": 0}, {"warn": "15GB"}):
        with pytest.raises(ValueError, match=r"threshold|every|to warn at"):
            VramManager(root=str(host.root), **wrong)


def test_a_step_with_a_manager_and_a_monitor_has_the_same_bits(device, host):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    resident = copy.deepcopy(model).to(device)
    with attached(model, device) as attached_to:
        manager = VramManager(root=str(host.root), enabled=True, every=1)
        for step in range(3):
            for each in (model, resident):
                torch.manual_seed(step)
                each(torch.randn(2, 16).to(device)).square().sum().backward()
            manager.step(step)
        assert_same(
            {k: p.grad for k, p in model.named_parameters()},
            {k: p.grad for k, p in resident.named_parameters()},
        )
        assert attached_to.state.engine.stats()["acquires"] > 0 and manager.cleanups == 2


# ---- workers ----


def test_a_card_is_divided_among_workers_that_fit_it():
    budgets = worker_budgets(3, "1.5GB", "7.67GB", cpus=8)
    assert [budget.nbytes for budget in budgets] == [1_500_000_000] * 3
    assert [budget.cpus for budget in budgets] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [budget.worker for budget in budgets] == [0, 1, 2]
    assert {budget.share for budget in budgets} == {1.5 / 7.67}
    assert worker_budgets(2, 0.5, "8GB")[1].nbytes == 4 * GB
    assert [b.cpus for b in worker_budgets(3, 1, 10, cpus=2)] == [(0,), (1,), (0,)]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert len(worker_budgets(1, 1, 10)[0].cpus) == usable


@pytest.mark.parametrize(
    ("allowed", "count", "expected"),
    [({5, 2}, 8, (2, 5)), (None, 3, (0, 1, 2)), (None, None, (0,))],
)
def test_the_processors_are_those_that_may_be_used(allowed, count, expected, monkeypatch):
    if allowed is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert worker_budgets(1, 1, 10)[0].cpus == expected


@pytest.mark.parametrize(
    ("workers", "nbytes", "options"),
    [
        (1, "7.76GB", {}),
        (4, "1.94GB", {}),  # 7.76 GB together
        (5, "1.534000001GB", {}),
        (3, "1.5GB", {"context": "1.1GB"}),
        (3, "1.5GB", {"margin": 0.42}),
    ],
)
def test_workers_that_do_not_fit_together_are_refused(workers, nbytes, options):
    with pytest.raises(NoRoomError, match=f"{workers} workers with .* Take fewer workers") as error:
        worker_budgets(workers, nbytes, "7.67GB", **options)
    assert isinstance(error.value, torch.OutOfMemoryError)


def test_budgets_that_just_fit_are_given_and_nonsense_is_refused():
    assert len(worker_budgets(5, "1.534GB", "7.67GB")) == 5
    assert len(worker_budgets(3, "1.5GB", "7.67GB", context="1GB", margin=0.02)) == 3
    for margin in (False, True, -0.1, 1.0, "0.1"):
        with pytest.raises(ValueError, match=r"margin=.* is not in \[0, 1\)"):
            worker_budgets(1, 1, "8GB", margin=margin)
    for wrong in ({"workers": 0}, {"margin": 1}, {"cpus": 0}, {"nbytes": "x"}, {"context": -1}):
        with pytest.raises(ValueError):
            worker_budgets(**{"workers": 1, "nbytes": 1, "capacity": "8GB", **wrong})


def test_a_class_that_copies_itself_cannot_be_tracked():
    class Own(nn.Module):
        def __deepcopy__(self, memo):
            return self

    model = Own()
    with pytest.raises(ValueError, match="Own has a __deepcopy__ already"):
        CopyCounter().track(model)
    assert "__deepcopy__" not in model.__dict__
