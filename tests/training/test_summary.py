"""The report is there in every state; each figure is a counter, or arithmetic of counters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload.engine import devices, simulator
from oracle_offload.host.memory import read_meminfo
from oracle_offload.observe import summary
from oracle_offload.observe.verdict import Load
from oracle_offload.train import stream_optimizer

ROOT = Path(__file__).resolve().parents[2]

# What a row of the report is called there, where the engine's counter has another name.
RENAMED = {
    "in_arena_bytes": "resident_bytes",
    "units_in_arena": "resident_units",
    "peak_in_arena_bytes": "peak_resident_bytes",
}
COUNTED = (
    "managed_bytes units acquires hits late stale prefetches evictions waits timed_waits h2d_bytes "
    "h2d_copies d2h_bytes d2h_copies in_arena_bytes units_in_arena"
)
OF_DEVICE = (
    "arena_bytes locked_bytes pageable_bytes lock_refusals ring_bytes host_waits recoveries "
    "allocations in_arena_bytes peak_in_arena_bytes"
)


class Net(nn.Sequential):
    def __init__(self, depth=6, width=64):
        super().__init__(*(nn.Sequential(nn.Linear(width, width)) for _ in range(depth)))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    width = next(model.parameters()).shape[0]
    for _ in range(steps):
        model(torch.randn(3, width, requires_grad=True)).sum().backward()
        simulator.finish()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("seed", range(4))
def test_each_figure_is_a_counter_or_arithmetic_of_counters(seed):
    draw = torch.Generator().manual_seed(seed)
    steps, depth, other = torch.randint(2, 9, (3,), generator=draw).tolist()
    offload = float(torch.rand(1, generator=draw))
    first, second = Net(depth), Net(other, 48)
    with (
        attached(first, "cpu", offload_percent=offload) as one,
        attached(second, "cpu") as two,
    ):
        train(first, steps)
        train(second, 3)
        engine = one.state.engine
        report = oracle_offload.memory_summary()
        (device,) = report.devices
        for usage, names, counters in (
            (device, OF_DEVICE, engine.stats()),
            (device.models[0], COUNTED, engine.stats(one.attachment.model)),
            (device.models[1], COUNTED, engine.stats(two.attachment.model)),
        ):
            for name in names.split():
                assert getattr(usage, name) == counters[RENAMED.get(name, name)], name
        for usage, manager in zip(device.models, (one, two), strict=True):
            counters = engine.stats(manager.attachment.model)
            rate = None
            if counters["h2d_seconds"]:
                rate = counters["h2d_timed_bytes"] / counters["h2d_seconds"] / 1e9
            assert usage.h2d_gbps == (None if rate is None else pytest.approx(rate))
            if rate is None:
                assert usage.overlap is None
            else:
                hidden = 1 - usage.stall_s / (usage.h2d_bytes / rate * 1e-9)
                assert usage.overlap == pytest.approx(max(0.0, hidden))
            weights = sum(p.numel() * 4 for p in manager.module.parameters())
            assert usage.x_min_bytes == 2 * max(0, weights - usage.capacity_bytes)
        card, host = report.memory
        assert card.total_bytes == engine.mem_info()[1] == sum(filter(None, card.parts.values()))
        assert card.parts["arena"] == engine.stats()["arena_bytes"]
        assert card.parts["activations"] is None and "activations unknown" in str(report)
        assert host.parts["page-locked"] == engine.stats()["locked_bytes"] > 0
        verdict = device.verdict
        if verdict.bound_s is not None:
            split = verdict.stall_s + verdict.idle_s + verdict.compute_s
            assert split == pytest.approx(verdict.step_s)
        assert json.loads(report.to_json()) == report.to_dict()


@pytest.mark.parametrize("seed", range(3))
def test_what_the_phases_count_adds_up_to_what_the_engine_counts(seed):
    draw = torch.Generator().manual_seed(seed)
    model = Net(8)
    with attached(model, offload_percent=0.8) as manager:
        counters = manager.state.counters
        marks, names = [counters()], []
        for _ in range(6):
            name = ("training", "sampling", "evaluation")[int(torch.randint(3, (), generator=draw))]
            with oracle_offload.observe.phase(name):
                marks.append(counters())
                names.append("training")
                if name == "training":
                    train(model, 2)
                else:
                    for _ in range(4):  # one copy in 16 is timed
                        model(torch.randn(3, 64))
                    simulator.finish()
                marks.append(counters())
                names.append(name)
        (device,) = oracle_offload.memory_summary().devices
        now = counters()
        names.append("training")
        marks.append(now)
        assert {phase.name for phase in device.phases} == set(names)
        told = (
            "acquires hits late stale evictions waits timed_waits h2d_bytes h2d_copies d2h_bytes "
            "d2h_copies"
        )
        for phase in device.phases:
            for name in told.split():
                expected = sum(
                    after[name] - before[name]
                    for label, before, after in zip(names, marks, marks[1:], strict=False)
                    if label == phase.name
                )
                assert getattr(phase, name) == expected, (phase.name, name)
            seconds = sum(
                after["now_s"] - before["now_s"]
                for label, before, after in zip(names, marks, marks[1:], strict=False)
                if label == phase.name
            )
            assert phase.seconds == pytest.approx(seconds)
            copies_s = phase.h2d_bytes / phase.h2d_gbps / 1e9
            assert phase.bound_s == pytest.approx(max(seconds - phase.stall_s, copies_s))
        for name in told.split():  # all of what was counted before the model came, too
            assert sum(getattr(phase, name) for phase in device.phases) == now[name]
        text = str(oracle_offload.memory_summary())
        for phase in device.phases:
            shown = f"{phase.hits} of {phase.acquires} ({100 * phase.hits / phase.acquires:.1f}%)"
            assert f"| phase {phase.name} " in text and shown in text
            page = oracle_offload.memory_summary()._repr_html_()
            over = f"{phase.seconds / phase.bound_s:.2f} times what its bytes"
            assert over in text and f"{over} need at best" in page and shown in page
        assert "phase" not in str(oracle_offload.memory_summary(abbreviated=True))


def test_each_stall_is_told_of_the_layer_that_waited():
    model, other = Net(6, 256), Net(3, 256)
    with (
        simulator.device("rtx4090", link_gbps=0.05),
        attached(model, offload_percent=0.8) as one,
        attached(other, offload_percent=0.8),
    ):
        engine = one.state.engine
        engine.trace_start()  # every wait is timed
        train(model, 2)
        with oracle_offload.observe.phase("sampling"):
            for net in (model, other):
                net(torch.randn(3, 256))
                simulator.finish()
        train(other, 1)
        engine.trace_stop()
        report = oracle_offload.memory_summary()
        waits, stats = engine.unit_waits(), engine.stats()
    (device,) = report.devices
    seen = {}
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for usage in device.models:
        assert usage.stalls == sum(row.stalls for row in usage.stalled) > 0
        assert usage.stall_s == pytest.approx(sum(row.stall_s for row in usage.stalled))
        seconds = [row.stall_s for row in usage.stalled]
        assert seconds == sorted(seconds, reverse=True)
        assert {row.layers for row in usage.stalled} <= names
        for row in usage.stalled[:3]:
            told = f"{row.stall_s * 1e3:.2f} ms, {row.stalls} of {row.timed_waits} timed waits"
            assert told in str(report) and told in report.to_html()
    for phase in device.phases:
        for row in phase.stalled:
            timed, stalls, stall_s = seen.get(row.layers, (0, 0, 0.0))
            seen[row.layers] = timed + row.timed_waits, stalls + row.stalls, stall_s + row.stall_s
    assert sum(count for _, count, _ in waits.values()) == stats["stalls"]
    assert sum(count for _, count, _ in seen.values()) == stats["stalls"]
    assert sum(s for _, _, s in seen.values()) == pytest.approx(stats["stall_seconds"])
    sampling = next(phase for phase in device.phases if phase.name == "sampling")
    assert 0 < sum(row.timed_waits for row in sampling.stalled) <= sampling.timed_waits


def test_without_a_model_it_shows_the_host():
    report = oracle_offload.memory_summary()
    (host,) = report.memory
    assert report.devices == [] and report.notes == []
    assert str(report).startswith("oracle_offload: no model is attached\n\nhost memory: ")
    table = read_meminfo()
    if table.get("MemTotal") == host.total_bytes:
        assert sum(filter(None, host.parts.values())) == host.total_bytes
    assert host.parts["page-locked"] == 0 and "no model is attached" in report._repr_html_()


def test_of_one_model_is_told_what_is_of_that_model():
    first, second = Net(2), Net(3)
    with attached(first, "cpu") as one, attached(second, "cpu"):
        layers = {
            name: [usage.layers for device in report.devices for usage in device.models]
            for name, report in {
                "all": oracle_offload.memory_summary(),
                "first": oracle_offload.memory_summary(model=first),
                "second": oracle_offload.memory_summary(model=second),
                "part": oracle_offload.memory_summary(model=first[0]),
            }.items()
        }
        assert layers == {"all": [2, 3], "first": [2], "second": [3], "part": []}
        node = one.state.engine.numa_node
        (device,) = oracle_offload.memory_summary().devices
        assert device.numa_node == (None if node < 0 else node)
        nothing = oracle_offload.memory_summary(model=Net(2))
        assert [memory.title for memory in nothing.memory] == ["host memory"]
        assert nothing.notes == []


def test_gradients_and_states_are_in_the_bar_of_the_device_that_holds_them(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    with attached(model, "cpu") as manager:
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(3, 64)).sum().backward()
        report = oracle_offload.memory_summary()
        parts, (usage,) = report.memory[0].parts, report.devices[0].models
        assert (usage.resident_parameters, usage.resident_bytes) == (2, 2 * 64 * 4)
        assert (usage.budget_changes, usage.budget_reason) == (None, None)
        assert parts["weights"] == parts["gradients"] == 2 * 64 * 4
        optimizer.step()

        def told(**options):
            report = oracle_offload.memory_summary(**options)
            return report.memory[0].parts["optimizer state"], report.optimizer_bytes

        # Of a simulated device it may be that of managed weights as well.
        assert told(optimizer=optimizer) == (None, {"cpu": 2 * 64 * 4})
        assert told() == (None, {})
        monkeypatch.setattr(manager.state, "simulated", False)
        assert told(optimizer=optimizer) == (2 * 64 * 4, {"cpu": 2 * 64 * 4})
        assert told() == (None, {})


def test_a_verdict_is_of_the_models_that_are_attached_and_of_one_clock(monkeypatch):
    monkeypatch.setattr(summary, "judge", lambda *asked: asked[2:])
    model = Net(2)
    with attached(model, "cpu", offload_percent=0.5) as manager:
        state, held = manager.state, manager.attachment
        weights, capacity = held.weight_bytes, held.arena.capacity_bytes
        stats = {**state.engine.stats(), "pageable_bytes": 7}
        copied = {**stats, "unlocked_h2d_bytes": 3 * 10**9, "unlocked_h2d_seconds": 2.0}
        assert summary.verdict_on(state, copied) == ([Load(weights, capacity, 0)], 7, None)
        train(model, 3)
        moved = held.traffic.step_h2d_bytes
        monkeypatch.setattr(state, "simulated", False)
        assert summary.verdict_on(state, copied) == ([Load(weights, capacity, moved)], 7, 1.5e9)
        assert summary.verdict_on(state, stats)[2] is None and moved > 0


def test_what_is_no_device_is_said_and_not_raised():
    for device in ("nonsense", "mps", 99, object()):
        report = oracle_offload.memory_summary(device)
        assert report.devices == [] and report.notes[0].startswith("the device could not be read: ")
    with attached(Net(), "cpu"):
        assert oracle_offload.memory_summary("nonsense").devices == []
        assert len(oracle_offload.memory_summary().devices) == 1


def test_what_an_optimizer_holds_is_left_out_where_it_does_not_tell():
    class Odd:
        @property
        def state(self):
            raise RuntimeError("no state yet")

    with attached(Net(), "cpu"):
        report = oracle_offload.memory_summary(optimizer=Odd())
        assert report.notes == ["the optimizer's state could not be read: no state yet"]
        assert len(report.devices) == 1 and report.optimizer_bytes == {}


def test_where_the_driver_does_not_answer_the_counters_are_still_there(sim):
    model = Net()
    with attached(model, "cpu") as manager:
        train(model, 2)
        with sim.fault("cuMemGetInfo", 1, 701, lasting=True):
            report = oracle_offload.memory_summary()
        usage = report.devices[0].models[0]
        assert usage.h2d_bytes == manager.state.engine.stats()["h2d_bytes"] > 0
        assert report.devices[0].free_bytes is None
        assert "device memory free / total             | unknown / unknown" in str(report)
        assert report.memory[0].parts["free"] is None and "free unknown" in report._repr_html_()


def test_after_an_attach_that_found_no_room_it_is_whole(sim):
    model = Net(2, 256)
    with attached(model, "cpu"):
        big = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(Exception, match="vram_budget"):
            oracle_offload.attach(big, "cpu", vram_budget=1)
        assert oracle_offload.memory_summary().devices[0].models[0].layers == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_worker_it_says_whose_model_it_is(forks):
    code = """
import os, sys, torch, oracle_offload
from oracle_offload.engine import engines
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
oracle_offload.attach(model, "cpu")
engines._registry_lock.__enter__()  # as another thread may hold it at a fork
pid = os.fork()
if pid == 0:
    report = oracle_offload.memory_summary()
    assert report.devices == [] and str(os.getppid()) in report.notes[0], report
    assert report.memory[0].title == "host memory" and "forked" in str(report)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    run = forks.run(code)
    assert run.stdout.strip() == "7", run.stderr


def test_before_a_model_but_after_cuda_has_started_the_card_is_shown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 << 30)
    card, host = oracle_offload.memory_summary().memory
    assert card.title == "cuda:2" and host.title == "host memory"
    held = {name: size >> 30 for name, size in card.parts.items() if size}
    assert held == {"not distinguished": 7, "cached": 1, "other processes": 3, "free": 5}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 1 / 0)
    report = oracle_offload.memory_summary()
    assert [memory.title for memory in report.memory] == ["host memory"]
    assert report.notes == ["the device's memory could not be read: division by zero"]


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("done", [False, True])
def test_a_card_is_asked_for_its_work_but_not_in_a_capture(monkeypatch, capturing, done):
    card = devices.Cuda(torch.device("cuda", 0))
    asked = []
    stream = SimpleNamespace(query=lambda: asked.append(1) or done)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert card.is_idle(0) == (done and not capturing)
    assert len(asked) == (not capturing)

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lost)
    assert card.is_idle(0) is False
    assert card.now_s() < card.now_s(), "the host's clock runs"


def test_the_examples_of_the_page_are_what_the_command_prints(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import summary_page

    page = summary_page.PAGE.read_text("utf-8")
    assert summary_page.written(page) == page, "python tools/summary_page.py"
    for name in summary_page.DEVICES:
        assert page.count(f"<!-- example: {name} -->\n```\ncpu is {name}-bound: ") == 1


def test_names_of_strangers_steer_no_terminal_and_turn_no_line(device):
    """Nothing that the manager and its report show does, whatever modules and their class say."""
    odd = "a\x1b[2Jb\u202ec"
    block = type(odd, (nn.Sequential,), {})()
    for number in range(3):
        block.add_module(f"{odd}{number}", nn.Linear(64, 64))
    with attached(block, device, offload_percent=1.0) as manager:
        train(block, 2)
        assert manager.layers
        report = oracle_offload.memory_summary(model=block)
        shown = f"{manager!r}{report!r}{report}{report.to_html()}"
    assert "ab c" in shown and not {"\x1b", "\u202e"} & set(shown)


def test_what_a_streamed_step_brings_and_sends_home_has_rows(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with oracle_offload.attach(model, "cpu") as manager:
        optimizer = stream_optimizer(torch.optim.AdamW(model.parameters()))
        with oracle_offload.record(tmp_path / "run.jsonl"):
            for _ in range(3):
                model(torch.randn(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        (device,) = oracle_offload.memory_summary().devices
        stats = manager.state.engine.stats()
        assert (device.brought_bytes, device.brought_copies) == (
            stats["brought_bytes"],
            stats["brought_copies"],
        )
        weights = sum(parameter.nbytes for parameter in model.parameters())
        # Gradients, and states from the second step on; the weights are stepped in the arena.
        assert device.brought_bytes == 3 * weights + 2 * 2 * weights
        rows = str(oracle_offload.memory_summary()).splitlines()
        (row,) = (row for row in rows if "gradients and states brought" in row)
        assert f"| {device.brought_bytes / 1024:.2f} KiB in {device.brought_copies}" in row
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text("utf-8").splitlines()]
    counted = [row["counters"] for row in rows if row.get("event") == "step"]
    assert len(counted) == 3 and all(row["brought_bytes"] > 0 for row in counted)
    assert all(row["d2h_bytes"] >= 3 * weights for row in counted), "gradients, and what is stepped"
