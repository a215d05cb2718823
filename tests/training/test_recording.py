"""A recording agrees with the engine's counters and the simulator's clock, and calls no driver."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import re
import weakref
from collections import Counter, deque
from pathlib import Path

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import engines, phases, simulator
from oracle_offload.observe import recorder as recorders

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def net(depth=8, width=64):
    torch.manual_seed(depth)
    return nn.Sequential(*(Block(width) for _ in range(depth))).requires_grad_(False)


class Training:
    """Steps of a managed model with one trained tensor before it."""

    def __init__(self, model, device="cpu"):
        self.model = model
        self.prefix = nn.Parameter(torch.ones(4, 64, device=device))
        self.optimizer = torch.optim.SGD([self.prefix], lr=0.1)

    def step(self, times=1):
        for _ in range(times):
            self.model(self.prefix).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            simulator.finish()


@pytest.fixture(autouse=True)
def first_phase():
    yield
    oracle_offload.observe.phase(phases.FIRST)


@pytest.fixture
def training(sim, device):
    if device == "cuda":
        pytest.skip("its expected times are those of the simulator's clock")
    sim.slow_link(1.0)
    model = net()
    with attached(model, device, offload_percent=0.6) as manager:
        run = Training(model, device)
        run.manager = manager
        run.engine = manager.state.engine
        yield run


def test_weights_train_to_the_same_bits_with_a_recording(device):
    resident = Training(net().to(device), device)
    resident.step(7)
    model = net()
    with attached(model, device, offload_percent=0.6) as manager:
        managed = Training(model, device)
        assert len(manager.attachment.layers) == 16
        with oracle_offload.record(timed_every=2):
            managed.step(7)
    assert torch.equal(managed.prefix, resident.prefix)


@pytest.mark.parametrize("timed_every", [0, 1, 3])
def test_every_number_of_a_recording_is_a_counter_or_a_sum_of_them(training, timed_every):
    before = training.engine.stats()
    with oracle_offload.record(timed_every=timed_every) as recorder:
        training.step(9)
        after = training.engine.stats()
        recording = recorder.recording()
    steps = recording.steps()
    grown = phases.growth(after, before)
    assert len(steps) == 9 and recording.header["dropped"] == 0

    def count(kind):
        return len(recording.of(kind))

    assert count("compute") == grown["acquires"] > 0
    assert count("wait") == grown["waits"] > 0
    assert count("copy_to_device") == grown["late"] + grown["prefetches"] == grown["h2d_copies"]
    assert count("eviction") == grown["evictions"] > 0
    assert sum(e["bytes"] for e in recording.of("copy_to_device")) == grown["h2d_bytes"]
    # What grows between two steps is counted in one of them: all but what came after the last.
    for name in ("acquires", "h2d_bytes", "evictions", "late"):
        assert sum(step["counters"][name] for step in steps) == grown[name], name
    # The recorder waits itself in timed ones, which is in no step.
    assert any(step["timed"] for step in steps) is (grown["host_waits"] > 0) is (timed_every > 0)
    assert {step["counters"]["host_waits"] for step in steps} == {0}
    for step in steps:
        mine = [e for e in recording.events if e["step"] == step["step"]]
        assert sum(e["event"] == "compute" for e in mine) == step["counters"]["acquires"]
        assert sum(e["event"] == "eviction" for e in mine) == step["counters"]["evictions"]
    (mean,) = recording.averages().values()
    whole = [s for s in steps if not s["label"] and not s["timed"] and s["seconds"] is not None]
    assert mean["steps"] == len(whole)
    if whole:
        assert mean["seconds"] == sum(s["seconds"] for s in whole) / len(whole)
        expected = sum(s["counters"]["h2d_bytes"] for s in whole) / len(whole)
        assert mean["counters"]["h2d_bytes"] == expected
    stalled = recording.stalled_layers()
    assert sum(seconds for *_, seconds in stalled) == pytest.approx(
        sum(e["seconds"] for e in recording.of("wait") if (e["seconds"] or 0) > 10e-6)
    )


def test_counters_that_do_not_grow_are_those_that_the_header_says_so_of():
    text = (ROOT / "csrc/include/oracle_offload.h").read_text()
    rows = re.findall(r"^    (?:COUNT|SECONDS)\((\w+), (\w+)\)", text, re.M)
    assert len(rows) > 30
    as_they_are = {name for name, of in rows if of == "NOW"} | {"peak_resident_bytes"}
    assert as_they_are == phases.AS_THEY_ARE


def test_warm_up_resumed_and_timed_steps_are_labelled_and_in_no_average(training):
    with oracle_offload.record(timed_every=3) as recorder:
        training.step(6)
        with recorder.phase("sampling"):
            training.model(training.prefix.detach())
        training.step(3)
    steps = recorder.recording().steps()
    assert [(s["label"], s["timed"]) for s in steps] == [
        ("warm-up", False),
        ("warm-up", False),
        ("", True),  # the first whole step
        ("resume", False),  # the host has waited for the timed one
        ("", False),
        ("", False),
        ("resume", False),  # part of it was another phase's
        ("", False),
        ("", True),  # three whole steps came between
    ]
    assert [s["seconds"] is None for s in steps] == [True] + [False] * 8
    assert {s["phase"] for s in steps} == {"training"}, "that before, once the block has ended"
    (mean,) = recorder.recording().averages().values()
    assert mean["steps"] == 3
    with oracle_offload.record(timed_every=0) as late:
        training.step(2)
    assert [s["label"] for s in late.recording().steps()] == ["resume", ""]


def copies_of(rows):
    return sorted((row.start_s, row.end_s, row.bytes) for row in rows if row.kind == "h2d")


def test_times_of_a_timed_step_are_the_simulators(training):
    zero_s = simulator.now()
    with simulator.trace() as rows, oracle_offload.record(timed_every=1) as recorder:
        training.step(7)
    recording = recorder.recording()
    timed = [e for e in recording.of("copy_to_device") if e["start_s"] is not None]
    steps = {e["step"] for e in timed}
    assert steps == {2, 5} and {step for _, step in recording.timed_steps()} == steps
    theirs = {(row.device_ptr, round(row.start_s, 8)): row for row in rows}
    # A float of milliseconds has 24 bits.
    for event in timed:
        near = [
            row
            for (address, _), row in theirs.items()
            if address == event["address"]
            and abs(row.start_s - zero_s - event["start_s"]) < 1e-7
            and abs(row.end_s - zero_s - event["end_s"]) < 1e-7
        ]
        assert len(near) == 1 and near[0].bytes == event["bytes"]
    uses = [e for e in recording.of("compute") if e["step"] == 2]
    assert all(e["end_s"] >= e["start_s"] for e in uses) and len(uses) > 16
    whole = recording.steps()[2]
    for event in uses:  # between the ends of the steps, by the same clock
        assert recording.steps()[1]["t_s"] - 1e-7 <= event["start_s"]
        assert event["end_s"] <= whole["t_s"] + 1e-7
    evicted = [e for e in recording.of("eviction") if e["step"] == 2 and e["start_s"] is not None]
    assert evicted
    for event in evicted:  # bytes are there until what displaces them is copied over them
        assert any(
            e["unit"] == event["by_unit"] and e["start_s"] == event["start_s"] for e in timed
        )
    for event in recording.of("eviction"):
        known = event["start_s"] is not None
        assert event["seconds"] == (0.0 if known else None) and event["end_s"] == event["start_s"]


def test_decodes_of_compressed_weights_are_recorded(sim, monkeypatch, tmp_path):
    """Their sums are the engine's, and in a timed step each follows its copy on the device."""
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    sim.slow_link(1.0)
    model = net(depth=4, width=512).bfloat16()
    model[1].up.weight.requires_grad_()  # as it is, in a unit of its own
    x = torch.ones(4, 512, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD([model[1].up.weight], lr=0.1)
    with attached(model, "cpu", offload_percent=0.6, compress="lossless") as manager:
        engine = manager.state.engine
        coded = {layer.unit: layer for layer in manager.layers if layer.coded}
        assert 4 < len(coded) < len(manager.layers)
        before = engine.stats()
        with oracle_offload.record(timed_every=1) as recorder:
            for _ in range(WARM_UP + 3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        grown = {key: value - before[key] for key, value in engine.stats().items()}
        sizes = {unit: sum(nbytes for _, nbytes in coded[unit].extents()) for unit in coded}
    recording = recorder.recording()
    decodes, copies = recording.of("decode"), recording.of("copy_to_device")
    assert sum(event["bytes"] for event in decodes) == grown["decoded_bytes"] > 0
    assert sum(event["chunks"] for event in decodes) == grown["decodes"]
    assert sum(event["bytes"] for event in copies) == grown["h2d_bytes"]
    assert {event["unit"] for event in decodes} <= coded.keys()
    timed = [event for event in decodes if event["start_s"] is not None]
    assert timed
    for event in timed:  # before any other copy of the unit begins
        (copy,) = (
            one
            for one in copies
            if one["unit"] == event["unit"] and one["t_s"] == event["t_s"] and one["end_s"]
        )
        assert copy["start_s"] < event["start_s"] < event["end_s"]
        assert copy["end_s"] <= event["end_s"]
        link_s = copy["bytes"] / 1e9  # at 1 GB/s: all of its rows, and no waiting between them
        assert copy["seconds"] == pytest.approx(link_s, rel=0.1)
    device, number = recording.timed_steps()[0]
    for stay in recording._stays(device, number):
        assert stay.nbytes >= min(sizes.values())
    assert "decodes of weights" in recording.to_html()
    assert "decodes of weights" in recording.to_chrome()


def test_a_recording_makes_no_driver_call_but_in_timed_steps():
    def calls(**arguments):
        model = net()
        with attached(model, offload_percent=0.6):
            run = Training(model)
            recorder = oracle_offload.record(**arguments)
            with recorder if arguments else contextlib.nullcontext():
                before = simulator.call_count()
                run.step(20)
                made = simulator.call_count() - before
            assert len(recorder.recording().of("compute")) == (20 * 32 if arguments else 0)
            return made

    off = calls()
    assert calls(timed_every=0) == off == calls()
    assert calls(timed_every=5) > off


def test_phases_are_told_in_a_line_each(training, caplog):
    caplog.set_level(logging.INFO, logger="oracle_offload")
    with oracle_offload.record() as recorder:
        training.step(3)
        before = training.engine.stats()
        recorder.phase("sampling")
        training.model(training.prefix.detach())
        recorder.phase("training")
        after = training.engine.stats()
        training.step()
    copied = after["h2d_copies"] - before["h2d_copies"]
    first, second = recorder.lines
    assert re.fullmatch(
        r"Phase transition: training -> sampling \| VRAM: \d+ MB \| Copies: \d+ \| "
        r"Delta: [+-]\d+ MB \| Peak: unknown",
        first,
    )
    assert f"sampling -> training | VRAM: 0 MB | Copies: {copied} |" in second and copied > 0
    assert [r.getMessage() for r in caplog.records if "Phase" in r.getMessage()] == [first, second]
    recording = recorder.recording()
    rows = recording.of("phase")
    assert [(r["before"], r["name"]) for r in rows] == [
        ("training", "sampling"),
        ("sampling", "training"),
    ]
    assert rows[1]["copies"] == copied
    assert sum(e["phase"] == "sampling" for e in recording.of("compute")) == 16
    assert {e["step"] for e in recording.of("compute") if e["phase"] == "sampling"} == {3}


def test_phases_are_told_without_a_recording_and_to_the_one_under_way(training):
    recorder = oracle_offload.record()
    with oracle_offload.observe.phase("sampling"):
        training.model(training.prefix.detach())
        with recorder:
            training.model(training.prefix.detach())
            oracle_offload.observe.phase("evaluation")
            training.model(training.prefix.detach())
    assert engines.phase_now() == phases.FIRST, "the phase before, though another began within"
    assert len(recorder.lines) == 1  # it began within the first phase
    recorder = recorder.recording()
    assert [e["phase"] for e in recorder.of("compute")] == ["sampling"] * 16 + ["evaluation"] * 16
    (device,) = oracle_offload.memory_summary().devices
    assert {p.name: p.acquires for p in device.phases} == {
        "training": 0,
        "sampling": 32,
        "evaluation": 16,
    }


def test_an_exception_passes_and_what_was_recorded_is_written(training, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        oracle_offload.record(tmp_path / "run.jsonl") as recorder,
    ):
        training.step(2)
        training.model(training.prefix)
        raise ZeroDivisionError("half a step")
    read = oracle_offload.observe.read_recording(tmp_path / "run.jsonl")
    assert read.events == json.loads(json.dumps(recorder.recording().events))
    (error,) = read.of("error")
    assert error["what"] == "ZeroDivisionError: half a step" and error["step"] == 2
    assert sum(e["step"] == 2 for e in read.of("compute")) == 16
    assert list(tmp_path.iterdir()) == [tmp_path / "run.jsonl"]
    training.step()  # and the engine goes on


def test_a_file_that_cannot_be_written_hides_no_exception(training, tmp_path, caplog):
    nowhere = tmp_path / "missing" / "run.html"
    with pytest.raises(ZeroDivisionError), oracle_offload.record(nowhere):
        raise ZeroDivisionError
    (said,) = caplog.records
    assert said.getMessage() == f"the recording could not be written to {nowhere}"
    assert said.exc_info[0] is FileNotFoundError
    with pytest.raises(FileNotFoundError), oracle_offload.record(nowhere):
        training.step()


def come_and_go(depths, steps, between=lambda: None):
    """Attach, step and detach models of these depths, one after another."""
    for depth in depths:
        model = net(depth)
        with attached(model, offload_percent=1.0) as manager:
            assert len(manager.attachment.layers) == 2 * depth
            Training(model).step(steps)
        between()


def layers_of(depth):
    return {f"{i}.{n}" for i in range(depth) for n in ("up", "down")}


@pytest.mark.parametrize("anew", [False, True])
def test_models_that_come_and_go_are_recorded(sim, anew):
    """Also where the simulator's clock starts at zero again between them."""
    sim.slow_link(1.0)
    depths = (4, 3, 2)
    took = []  # seconds of each model, by the simulator's clock

    def between():
        took.append(simulator.now() - (0.0 if anew else sum(took)))
        if anew:
            simulator.reset()

    with oracle_offload.record(timed_every=1) as recorder:
        come_and_go(depths, 6, between)
    recording = recorder.recording()
    steps = recording.steps()
    assert [s["step"] for s in steps] == list(range(18))
    times = [s["t_s"] for s in steps]
    ends = [pytest.approx(end, abs=1e-5) for end in itertools.accumulate(took)]
    assert times == sorted(times) and times[5::6] == ends
    assert steps[0]["seconds"] is None
    for before, step in itertools.pairwise(steps):  # but for what the recorder waits for
        assert 0 <= step["seconds"] <= step["t_s"] - before["t_s"] + 1e-12
    assert [s["step"] for s in steps if s["label"] == "warm-up"] == [0, 1, 6, 7, 12, 13]
    assert [s["step"] for s in steps if s["timed"]] == [2, 5, 8, 11, 14, 17]
    assert recording.timed_steps() == [("cpu", n) for n in (8, 11, 14, 17)]  # of six, four are kept
    for number, depth in enumerate(depths):
        mine = [e for e in recording.of("compute") if e["engine"] == number]
        assert len(mine) == 6 * 4 * depth and {e["layer"] for e in mine} == layers_of(depth)
        assert {e["step"] for e in mine} == set(range(6 * number, 6 * number + 6))
        assert {e["kind"] for e in mine} == {"forward", "backward"}
        assert {(e["model"], e["phase"]) for e in mine} == {("Sequential", "training")}
        for event in mine:
            ended = [s["t_s"] for s in steps if s["step"] in (event["step"] - 1, event["step"])]
            begin, end = (0.0, *ended)[-2:]
            assert begin <= event["t_s"] <= end
            if event["start_s"] is not None:
                assert begin - 1e-7 <= event["start_s"] < event["end_s"] <= end + 1e-7
    for title, picture in recording.pictures():
        number = int(title.split()[1]) // 6
        drawn = set(re.findall(r"\d\.(?:up|down)", picture))
        assert drawn == layers_of(depths[number]), title  # nothing of an engine that is closed
    (device,) = recording.header["devices"]
    assert device["engines"] == 3 and device["dropped_timed_steps"] == 2
    assert not recording.of("error")


def test_a_step_and_a_phase_go_on_over_a_detach(sim):
    sim.slow_link(1.0)
    model = net()
    run = Training(model)
    with oracle_offload.record(timed_every=0) as recorder:
        with attached(model, offload_percent=0.6):
            run.model(run.prefix).square().mean().backward()
        recorder.phase("sampling")
        recorder.phase("training")  # on this device nothing was sampled
        with attached(model, offload_percent=0.6):
            run.step(2)
        recorder.phase("sampling")
        with attached(model, offload_percent=0.6):
            run.step()
    recording = recorder.recording()
    copies = recording.of("copy_to_device")
    assert {e["engine"] for e in copies if e["step"] == 0} == {0, 1}
    for step in recording.steps():
        mine = [e for e in copies if e["step"] == step["step"]]
        assert step["counters"]["h2d_bytes"] == sum(e["bytes"] for e in mine) > 0
    (phase,) = recording.of("phase")  # reported by the device's next engine
    assert (phase["before"], phase["name"], phase["step"]) == ("training", "sampling", 2)
    assert phase["copies"] == sum(e["engine"] < 2 for e in copies)
    assert {e["phase"] for e in copies if e["engine"] < 2} == {"training"}
    assert {e["phase"] for e in copies if e["engine"] == 2} == {"sampling"}
    assert len(recorder.lines) == 3 and not recording.of("error")


def test_memory_is_bounded_and_what_was_dropped_is_counted(training, monkeypatch):
    monkeypatch.setattr(recorders, "_MOST_ROWS", 3)
    before = training.engine.stats()
    with oracle_offload.record(max_events=50, timed_every=1) as recorder:
        training.step(12)
        kept = [len(recorder.recording().of("compute")) for _ in range(2)]
        training.step(8)
        grown = phases.growth(training.engine.stats(), before)
    recording = recorder.recording()
    (device,) = recording.header["devices"]
    done = ("compute", "wait", "copy_to_device", "eviction")
    events = [e for e in recording.events if e["event"] in done]
    assert len(events) == 50 and kept[0] == kept[1]
    made = grown["acquires"] + grown["waits"] + grown["h2d_copies"] + grown["evictions"]
    assert device["dropped_events"] == recording.header["dropped"] == made - 50
    assert len(recording.steps()) == 3 and device["dropped_steps"] == 17
    assert recording.steps()[-1]["step"] == 19
    assert device["dropped_timed_steps"] == 2  # of six, four are kept
    assert "dropped" in str(recording)


def test_memory_of_a_device_is_bounded_over_all_its_engines(monkeypatch):
    monkeypatch.setattr(recorders, "_MOST_ROWS", 3)
    states = []
    depths = (2, 1, 1, 1, 1, 1)
    with oracle_offload.record(max_events=50, timed_every=1) as recorder:
        for depth in depths:
            come_and_go([depth], 4, lambda: states.extend(engines.open_states()))
            with attached(net(depth)) as manager:
                states.append(weakref.ref(manager.state))
                recorder.phase(f"after {len(states)}")
            del manager
        gc.collect()
        assert [state() for state in states] == [None] * 6  # nor what torch holds for them
    recording = recorder.recording()
    assert recording.header["dropped"] > 0
    (device,) = recording.header["devices"]
    done = ("compute", "wait", "copy_to_device", "copy_to_host", "eviction")
    assert sum(e["event"] in done for e in recording.events) == 50
    assert [s["step"] for s in recording.steps()] == [21, 22, 23]
    assert (device["dropped_steps"], device["dropped_phases"]) == (21, 3)
    assert len(recording.timed_steps()) <= 4 and device["dropped_timed_steps"] == 2


def test_a_recording_that_fails_leaves_the_training_alone(training, monkeypatch, caplog):
    """Though it fails in each step, it fills neither memory nor log."""
    monkeypatch.setattr(recorders, "_MOST_ROWS", 3)
    with oracle_offload.record() as recorder:
        training.step()
        training.engine.journal_stop()  # as if something had gone wrong with it
        training.step(9)
        recorder.phase("sampling")
        recorder.phase("training")
    assert recorder.lines[0].startswith("Phase transition: training -> sampling | VRAM: unknown")
    assert caplog.text.count("no journal is being kept") == 1
    recording = recorder.recording()
    assert ["no journal" in error["what"] for error in recording.of("error")] == [True] * 3
    assert recording.header["dropped_errors"] == 9  # nine steps, two phases, the end
    assert "dropped, as there was no room: 9 errors" in str(recording)


def test_a_timeline_that_another_records_is_left_to_it(training):
    training.step(3)
    training.engine.trace_start()
    with oracle_offload.record(timed_every=1) as recorder:
        training.step(2)
        assert training.engine.trace_stop()
    assert not any(s["timed"] for s in recorder.recording().steps())
    assert not recorder.recording().of("error")
    training.engine.trace_start()
    with oracle_offload.record(timed_every=3) as recorder:
        training.step(2)
        assert training.engine.trace_stop()
        training.step(4)
    # Not at once, but after as many whole steps as always.
    assert [s["timed"] for s in recorder.recording().steps()] == [False] * 4 + [True, False]


def test_who_wants_each_step_may_raise_and_change_the_phase_and_detach(training, caplog):
    rows = []

    def broken(row):
        raise ZeroDivisionError(f"step {row['step']}")

    def told(row):
        assert not any(state.lock.is_held() for state in engines.open_states())
        rows.append(row)
        recorder.phase(f"after {row['step']}")
        if row["step"] == 2:
            training.manager.detach()

    with oracle_offload.record() as recorder:
        recorder.on_step += [broken, told]
        training.step(3)
    assert rows == recorder.recording().steps() and [row["step"] for row in rows] == [0, 1, 2]
    assert not training.model.__dict__.get("_memory_manager")
    assert caplog.text.count("the training goes on") == 1 and "step 0" in caplog.text
    (error,) = recorder.recording().of("error")
    assert "broken" in error["what"] and "ZeroDivisionError: step 0" in error["what"]
    assert [p["name"] for p in recorder.recording().of("phase")] == [f"after {n}" for n in range(3)]


def test_who_wants_each_step_is_told_once_every_device_goes_on(training):
    """A second device, whose engine was held for the step, too."""
    order, here = [], str(training.manager.state.device)

    class Listener:
        def before_step(self):
            return True

        def after_step(self):  # its engine has been resumed
            order.append("goes on")

    listener = Listener()
    with oracle_offload.record() as recorder:
        recorder.on_step.append(lambda row: order.append(row["device"]))
        with engines.opened(torch.device("cpu", 0)) as other:
            assert other is not training.manager.state
            other.join(listener)
            training.step(2)
            other.leave(listener)
    # What is no model uses no weights: of it the first step alone is one.
    assert order == ["goes on", here, "cpu:0", "goes on", here]


def test_an_engine_ends_under_the_lock_of_its_device(monkeypatch):
    """Also that of an attach that fails: what is recorded is read by other threads."""
    held = []
    with oracle_offload.record() as recorder:
        closing = recorder.closing
        monkeypatch.setattr(
            recorder, "closing", lambda state: (held.append(state.lock.is_held()), closing(state))
        )
        with engines.opened(torch.device("cpu")):
            pass
    assert held == [True]


@pytest.mark.parametrize(
    ("path", "arguments", "says"),
    [
        ("run.txt", {}, r"'run\.txt' with format=None: use 'html'"),
        (None, {"max_events": 0}, "max_events"),
        (None, {"timed_every": -1}, "timed_every"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(path, arguments, says):
    with pytest.raises(ValueError, match=says):
        oracle_offload.record(path, **arguments)


def test_one_event_is_the_least_that_is_kept(training):
    with oracle_offload.record(max_events=1) as recorder:
        training.step()
    recording = recorder.recording()
    assert len(recording.events) == 2 and recording.header["dropped"] > 60  # and the step


# ---- files ----


@pytest.fixture
def recording(training):
    with oracle_offload.record(timed_every=2) as recorder:
        training.step(6)
        with recorder.phase("evaluation"):
            training.model(training.prefix.detach())
    return recorder.recording()


def test_chromes_trace_is_valid_and_monotonic_and_by_the_same_clock(recording):
    document = json.loads(recording.to_chrome())
    rows = document["traceEvents"]
    assert document["otherData"]["schema"] == "oracle_offload/recording/1"
    names = {}
    last = 0.0
    ends = {}
    for row in rows:
        assert {"ph", "pid", "tid", "ts", "name", "args"} <= row.keys()
        assert isinstance(row["pid"], int) and isinstance(row["tid"], int)
        if row["ph"] == "M":
            assert not ends, "names come first"
            names[row["name"], row["pid"], row["tid"]] = row["args"]["name"]
            continue
        assert row["ts"] >= last
        last = row["ts"]
        if row["ph"] == "i":
            assert row["s"] == "t"
            continue
        assert row["ph"] == "X" and row["dur"] >= 0
        nested = ends.setdefault((row["pid"], row["tid"]), [])
        while nested and nested[-1] <= row["ts"]:
            nested.pop()
        assert not nested or row["ts"] + row["dur"] <= nested[-1], "slices of a track overlap"
        nested.append(row["ts"] + row["dur"])
    for pid, tid in ends:
        assert ("thread_name", pid, tid) in names and ("process_name", pid, 0) in names
    assert {names["thread_name", *track] for track in ends} == {
        "host",
        "managed layers",
        "stalls",
        "copies to the device",
    }
    slices = sorted((r["ts"], r["dur"]) for r in rows if r["ph"] == "X" and r["cat"] == "compute")
    timed = [e for e in recording.of("compute") if e["start_s"] is not None]
    assert slices == sorted((e["start_s"] * 1e6, (e["end_s"] - e["start_s"]) * 1e6) for e in timed)
    drawn = [r for r in rows if r["ph"] != "M"]
    assert len(drawn) == len(recording.events)


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(recording, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    path.write_text("old")
    before = os.write

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        recording.export(path)
    monkeypatch.setattr(os, "write", before)
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]
    assert path.read_text() == "old"
    recording.export(path)
    assert path.read_text() != "old" and len(list(tmp_path.iterdir())) == 1


def test_what_is_written_is_read_again_and_in_the_format_that_is_asked_for(recording, tmp_path):
    recording.export(tmp_path / "run.jsonl")
    read = oracle_offload.observe.read_recording(tmp_path / "run.jsonl")
    assert read.header == recording.header and read.events == recording.events
    recording.export(tmp_path / "named.txt", format="csv")
    assert (tmp_path / "named.txt").read_text() == recording.to_csv()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["[" * 100_000], "line 1: not JSON"),
        (["HEADER", "[" * 100_000], "line 2: not JSON"),
        (["HEADER", '{"event": "step"}'], "line 2 is damaged: step without device"),
        (["HEADER", '{"event": "error"}'], "line 2 is damaged: error without what"),
        (["HEADER", '{"event": [1]}', "5"], "line 3: no part of a recording"),
    ],
)
def test_what_is_no_recording_is_refused_by_its_line(lines, says, tmp_path):
    header = '{"schema": "oracle_offload/recording/1", "devices": []}'
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(line.replace("HEADER", header) for line in lines))
    with pytest.raises(ValueError, match=says):
        oracle_offload.observe.read_recording(path)


class Broken:
    """An engine of which nothing can be asked any more."""

    def __getattr__(self, name):
        raise OffloadError(f"{name}: no answer")


def test_whatever_an_engine_does_not_answer_is_an_error_of_the_recording_alone(training):
    with oracle_offload.record() as recorder:
        training.step()
        (state,) = engines.open_states()
        (part,) = recorder._parts.values()
        engine, state.engine = state.engine, Broken()
        try:
            recorder.resized(state, "model", 1, 2, "why")
            recorder.batch(7)
            recorder.opened(state)
            recorder.recording()
        finally:
            state.engine = engine
        assert not part.arenas and not part.batches and part.n_batches == 0
        training.step()
    errors = [error["what"] for error in recorder.recording().of("error")]
    assert len(errors) >= 4 and all("no answer" in what for what in errors)
    assert len(recorder.recording().of("step")) == 2


# ---- what is recorded in addition to what the engine does ----


def test_batches_sizes_of_the_arena_and_an_optimizer_under_way_are_recorded(training, monkeypatch):
    """Each by the device's clock; of more than there is room for, the latest and how many."""
    monkeypatch.setattr(recorders, "_MOST_ROWS", 2)
    (state,) = engines.open_states()
    under_way, ended_s = [], []
    zero_s = simulator.now()

    def steps(*_):
        simulator.advance(1.0)  # no event of the engine falls into it
        under_way.extend(recorder.recording().of("optimizer"))

    training.optimizer.register_step_pre_hook(steps)
    with oracle_offload.record(timed_every=0) as recorder:
        recorder.on_step.append(lambda row: ended_s.append(simulator.now() - zero_s))
        training.step()
        told_s = simulator.now() - zero_s
        recorder.phase("evaluation")
        for number in range(3):
            recorder.batch(10.0 + number)
            recorder.resized(state, "Sequential", number, number + 1, f"for reason {number}")
        training.step()
        recording = recorder.recording()
    device = str(state.device)
    where = {"step": 1, "phase": "evaluation", "device": device, "t_s": told_s}
    assert recording.of("batch") == [{"event": "batch", **where, "length": n} for n in (11, 12)]
    assert recording.of("arena") == [
        {
            "event": "arena", **where, "model": "Sequential", "before_bytes": number,
            "capacity_bytes": number + 1, "what": f"for reason {number}",
        }
        for number in (1, 2)
    ]  # fmt: skip
    (change,) = recording.of("phase")
    assert (change["step"], change["phase"], change["t_s"]) == (1, "evaluation", told_s)
    assert [(row["step"], row["phase"]) for row in under_way] == [
        (0, "training"),
        (1, "evaluation"),
    ]
    assert [row["t_s"] + 1.0 for row in under_way] == pytest.approx(ended_s)
    assert not recording.of("optimizer"), "it has ended"
    assert [step["t_s"] for step in recording.steps()] == pytest.approx(ended_s)
    times = [event["t_s"] for event in recording.events]
    assert times == sorted(times) and times[0] < told_s < times[-1]
    assert all(type(row["length"]) is int for row in recording.of("batch"))
    assert recording.header == {
        "schema": "oracle_offload/recording/1",
        "devices": [
            {
                "device": device, "name": state.engine.device_name, "simulated": True, "engines": 1,
                "steps_before": 0, "dropped_events": 0, "dropped_steps": 0, "dropped_phases": 0,
                "dropped_timed_steps": 0, "dropped_arenas": 1, "dropped_batches": 1,
            }
        ],
        "dropped": 0,
        "dropped_errors": 0,
        "max_events": 100_000,
        "timed_every": 0,
    }  # fmt: skip


def test_a_step_tells_all_that_grew_since_the_one_before(training):
    training.step(3)
    before = training.engine.stats()
    rows = []
    with oracle_offload.record(timed_every=0) as recorder:
        for _ in range(2):
            training.step()
            rows.append(phases.growth(training.engine.stats(), before))
            before = training.engine.stats()
    steps = recorder.recording().steps()
    for name in ("acquires", "h2d_copies", "h2d_bytes", "evictions"):
        assert [step["counters"][name] for step in steps] == [row[name] for row in rows], name
    assert recorder.recording().header["devices"][0]["steps_before"] == 3
    first, second = steps
    assert first["seconds"] is None and second["seconds"] == second["t_s"] - first["t_s"] > 0


def counting(monkeypatch, state, *answers):
    """Let torch count on the simulated device, as it does on a GPU: answers in turn."""
    left = list(answers)
    monkeypatch.setattr(
        state.kind, "allocated_and_peak", lambda: left.pop(0) if len(left) > 1 else left[0]
    )


@pytest.mark.parametrize(
    ("before", "after", "told", "row"),
    [
        (
            (3_000_000, 4_000_000), (10_000_000, 12_000_000),
            "VRAM: 10 MB | Copies: 0 | Delta: +7 MB | Peak: 12 MB",
            (10_000_000, 7_000_000, 12_000_000),
        ),
        (
            (9_000_000, 9_000_000), (0, 9_000_000),
            "VRAM: 0 MB | Copies: 0 | Delta: -9 MB | Peak: 9 MB",
            (0, -9_000_000, 9_000_000),
        ),
    ],
)  # fmt: skip
def test_a_phase_tells_what_torch_has_counted(monkeypatch, training, before, after, told, row):
    (state,) = engines.open_states()
    counting(monkeypatch, state, before, after)
    with oracle_offload.record() as recorder:
        recorder.phase("sampling")
        training.step()
    (change,) = recorder.recording().of("phase")
    found = (change["allocated_bytes"], change["delta_bytes"], change["peak_bytes"])
    assert found == row and change["counters"]["acquires"] == 0
    assert recorder.lines == [f"Phase transition: training -> sampling | {told}"]
    (step,) = recorder.recording().steps()
    assert (step["allocated_bytes"], step["peak_bytes"]) == after


@pytest.mark.parametrize("when", ["first", "later", "never"])
def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_error(sim, training, when):
    total = simulator.get_device(0).memory_bytes
    with sim.fault("cuMemGetInfo", lasting=True) if when == "first" else contextlib.nullcontext():
        recorder = oracle_offload.record().start()
    with sim.fault("cuMemGetInfo", lasting=True) if when == "later" else contextlib.nullcontext():
        recorder.phase("sampling")
    recorder.stop()
    (change,) = recorder.recording().of("phase")
    taken = total - training.engine.mem_info()[0]
    assert change["allocated_bytes"] == (None if when == "later" else taken) and taken > 0
    assert change["delta_bytes"] == (0 if when == "never" else None) and not change["peak_bytes"]
    (line,) = recorder.lines
    assert ("VRAM: unknown" in line) == (when == "later")
    assert ("Delta: unknown" in line) == (when != "never")
    assert not recorder.recording().of("error")


def test_a_phase_of_two_devices_tells_their_sum(training, monkeypatch):
    with engines.opened(torch.device("cpu", 0)) as other, oracle_offload.record() as recorder:
        for state in engines.open_states():
            counting(monkeypatch, state, (5_000_000, 6_000_000))
        recorder.phase("sampling")
        counting(monkeypatch, other, (None, None))
        recorder.phase("training")
    tail = "Copies: 0 | Delta: unknown | Peak"
    assert "VRAM: 10 MB |" in recorder.lines[0] and recorder.lines[0].endswith("Peak: 12 MB")
    assert "VRAM: unknown |" not in recorder.lines[0] and tail not in recorder.lines[0]
    # What one device does not count, the simulator tells of it.
    assert recorder.lines[1].endswith("Peak: unknown")


def test_a_name_that_goes_before_the_step_ends_is_known(training):
    """A layer that is let go has done something, too."""
    with oracle_offload.record() as recorder:
        training.model(training.prefix.detach())
        manager = training.manager
        gone = manager.layers[3]
        assert manager.attachment.let_go(gone, "for a test")
        training.step()
    first = [e for e in recorder.recording().of("compute") if e["t_s"] == 0 or e["step"] == 0]
    assert all(e["layer"] and e["model"] == "Sequential" for e in first)
    assert any(gone.name in e["layer"] for e in first)


def test_a_recorder_that_has_not_begun_or_has_ended_ends_no_other(training):
    oracle_offload.observe.phase("sampling")
    waiting, ended = oracle_offload.record(), oracle_offload.record().start()
    ended.stop()
    with oracle_offload.record() as recorder:
        waiting.stop()
        ended.stop()
        with pytest.raises(OffloadError, match="under way already"):
            oracle_offload.record().start()
        training.step()
    assert len(recorder.recording().steps()) == 1
    waiting.phase("evaluation")
    assert waiting.lines[0].startswith("Phase transition: sampling -> evaluation | VRAM: unknown")
    assert waiting.recording().events == [] and waiting.recording().header["devices"] == []


def test_an_engine_that_closes_while_a_recording_begins_is_left_out(training, monkeypatch):
    with engines.opened(torch.device("cpu", 0)) as gone:
        pass
    observe = engines.observe
    monkeypatch.setattr(engines, "observe", lambda observer: [gone, *observe(observer)])
    with oracle_offload.record() as recorder:
        training.step()
    (row,) = recorder.recording().header["devices"]
    assert row["device"] == str(training.manager.device)
    assert not recorder.recording().of("error")


def test_nothing_is_recorded_of_a_device_that_has_gone(training):
    with oracle_offload.record() as recorder:
        training.step()
        (state,) = engines.open_states()
        training.manager.detach()
        recorder.batch(5)
        recorder._ran_out("cpu", 1, 1)
        recorder.begins_step(state)
        assert recorder.ended_step(state, {}) is None
        recorder.resized(state, "Sequential", 1, 2, "why")
    assert {event["event"] for event in recorder.recording().events} == {
        "compute", "wait", "copy_to_device", "eviction", "step",
    }  # fmt: skip


@pytest.mark.parametrize("anew", [False, True])
def test_time_between_the_last_step_and_the_end_of_an_engine_has_passed(sim, anew):
    model = net(2)
    began_s = simulator.now()
    with oracle_offload.record() as recorder:
        with attached(model):
            Training(model).step()
            simulator.advance(2.0)
        if anew:
            gone_s = simulator.now() - began_s
            simulator.reset()
            began_s = simulator.now() - gone_s
        with attached(model):
            recorder.batch(1)
            now_s = simulator.now() - began_s
    (event,) = recorder.recording().of("batch")
    assert event["t_s"] == pytest.approx(now_s) and now_s > 2.0


def test_names_of_a_model_that_comes_and_goes_within_a_step_are_known(training):
    """Its engine goes on, with the other model."""
    with oracle_offload.record() as recorder:
        training.step()
        guest = net(2)
        with attached(guest, str(training.manager.device), offload_percent=1.0):
            guest(training.prefix.detach())
        training.step()
    uses = recorder.recording().of("compute")
    assert all(event["layer"] and event["model"] == "Sequential" for event in uses)
    assert len(uses) == 2 * 32 + 4


def test_names_of_a_layer_that_came_late_and_went_before_its_model_are_known(training):
    with oracle_offload.record() as recorder:
        training.step()
        guest = net(1)
        with attached(guest, str(training.manager.device), offload_percent=1.0) as manager:
            guest(training.prefix.detach())
            training.step()
            for layer in manager.layers:
                assert manager.attachment.let_go(layer, "for a test")
    uses = recorder.recording().of("compute")
    assert all(event["layer"] and event["model"] == "Sequential" for event in uses)


@pytest.mark.parametrize("asked", [True, False])
def test_names_of_a_model_that_came_last_are_known_when_the_recording_ends(training, asked):
    recorder = oracle_offload.record().start()
    if asked:
        training.step()
    guest = net(1)
    with attached(guest, str(training.manager.device), offload_percent=1.0):
        guest(training.prefix.detach())
        if asked:
            assert all(event["layer"] for event in recorder.recording().of("compute"))
        recorder.stop()
    uses = recorder.recording().of("compute")
    assert len(uses) == 2 + 32 * asked and all(event["layer"] for event in uses)


def test_an_engine_whose_journal_another_keeps_is_not_recorded_and_goes_on(training, caplog):
    training.engine.journal_start(10)
    with oracle_offload.record() as recorder:
        training.step(2)
        recorder.phase("sampling")
        recorder.batch(1)
    training.engine.journal_stop()
    assert recorder.recording().header["devices"] == []
    (error,) = recorder.recording().of("error")
    device = training.manager.device
    assert error["what"] == (
        f"recording {device} failed: OffloadError: a journal is being kept already"
    )
    assert caplog.text.count(f"recording {device}: a journal is being kept already") == 1


def test_a_phase_counts_copies_in_both_directions(sim):
    model = net(2).requires_grad_(True)
    with attached(model, offload_percent=1.0) as manager, oracle_offload.record() as recorder:
        Training(model).step(2)
        simulator.finish()
        recorder.phase("sampling")
        stats = manager.state.engine.stats()
    (change,) = recorder.recording().of("phase")
    assert change["copies"] == stats["h2d_copies"] + stats["d2h_copies"]
    assert stats["d2h_copies"] > 0 and f"Copies: {change['copies']} |" in recorder.lines[0]


@pytest.mark.parametrize(
    ("kind", "nbytes", "span", "left"),
    [
        ("copy_to_device", 12, (1.0, 4.0), 1),
        ("decode", 12, (1.0, 4.0), 1),
        ("decode", 11, (1.0, 4.0), 1),
        ("copy_to_device", 4, (1.0, 2.0), 3),
        ("copy_to_device", 99, (1.0, 6.0), 0),
        ("compute", 99, (1.0, 2.0), 3),
    ],
)
def test_the_chunks_of_a_copy_are_one_and_the_next_ones_are_left(kind, nbytes, span, left):
    rows = deque([(1.0, 2.0, 4), (2.0, 3.0, 4), (3.0, 4.0, 4), (5.0, 6.0, 4)])
    assert recorders._taken(rows, kind, nbytes) == span and len(rows) == left


def test_each_copy_of_a_unit_that_comes_twice_in_a_timed_step_has_its_own_time(sim):
    sim.slow_link(1.0)
    model = net()
    with attached(model, offload_percent=1.0), oracle_offload.record(timed_every=1) as recorder:
        Training(model).step(WARM_UP + 1)
    copies = [e for e in recorder.recording().of("copy_to_device") if e["step"] == WARM_UP]
    assert max(Counter(event["unit"] for event in copies).values()) == 2
    copies.sort(key=lambda event: event["t_s"])
    for event in copies:
        assert event["seconds"] == event["end_s"] - event["start_s"]
        assert event["seconds"] == pytest.approx(event["bytes"] / 1e9, rel=0.2)
    for before, after in itertools.pairwise(copies):  # one after another
        assert before["end_s"] <= after["start_s"] + 1e-7
