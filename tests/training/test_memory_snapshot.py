"""What a recording tells of a GPU whose memory ran out: more than what is in the arena.

Torch's allocator of a GPU is not here: its snapshot is made up, of the real addresses of a model
that is attached to the simulated device.
"""

from __future__ import annotations

import json

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload.engine import engines, simulator
from oracle_offload.engine.geometry import stored_bytes
from oracle_offload.observe import snapshot
from oracle_offload.observe.snapshot_file import held, read_snapshot

MIB = 1 << 20
LINE = {"filename": "/home/me/train.py", "line": 31, "name": "forward"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def block(address, size, frames=()):
    state = "active_allocated" if address else "inactive"
    return {
        "address": address, "size": size, "requested_size": size, "state": state,
        "frames": list(frames),
    }  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """A model that has trained a step, and torch's snapshot of its addresses."""
    model = Net()
    for block_ in model.blocks:
        block_.requires_grad_(False)
    with attached(model, offload_percent=0.5) as manager:
        model(torch.randn(3, 64)).sum().backward()
        simulator.finish()
        arena = manager.state.segments[0]
        blocks = [
            block(arena.base, arena.storage.nbytes()),
            block(model.scale.data_ptr(), stored_bytes(model.scale)),
            block(model.scale.grad.data_ptr(), stored_bytes(model.scale.grad)),
            block(1 << 60, 7 * MIB, [LINE]),
            block(0, 5 * MIB),
        ]
        found = {
            "segments": [
                {"address": b["address"], "total_size": b["size"], "blocks": [b]} for b in blocks
            ],
            "device_traces": [],
        }
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: json.loads(json.dumps(found)))
        yield manager


def test_who_held_the_bytes_is_named_beside_what_lies_in_the_arena(run, tmp_path, monkeypatch):
    manager = run
    path = tmp_path / "run.jsonl"
    with oracle_offload.record(path) as recorder:
        monkeypatch.setattr(snapshot, "_listeners", (recorder._ran_out,))
        snapshot._ran_out(0, 6 * MIB, 0, MIB)
        assert not recorder.recording().of("memory"), "no recording of that device"
        recorder._ran_out("cpu", 6 * MIB, MIB)
    assert snapshot._listeners == (), "the recorder has gone"
    (event,) = oracle_offload.observe.read_recording(path).of("memory")
    rows = {(row["kind"], row["who"]): row["bytes"] for row in event["holders"]}
    assert rows == {
        ("arena", "oracle_offload"): manager.state.segments[0].storage.nbytes(),
        ("weights", "Net"): 64 * 4,
        ("gradients", "Net"): 64 * 4,
        ("tensors", "train.py:31 in forward"): 7 * MIB,
    }
    there = {unit: nbytes for unit, _, nbytes, _ in manager.state.engine.residents()}
    names = manager.attachment.unit_layers()
    assert {row["who"]: row["bytes"] for row in event["arena"]} == {
        f"Net: {names[unit]}": nbytes for unit, nbytes in there.items()
    }
    assert there and event["asked_bytes"] == 6 * MIB and event["free_bytes"] == MIB
    assert event["file"] == str(tmp_path / "run.snapshot.pickle")
    told = held(read_snapshot(event["file"]))
    assert {key: event[key] for key in told if key != "device"} == {
        key: value for key, value in told.items() if key != "device"
    }
    for shown in (str(recorder.recording()), recorder.recording().to_html()):
        assert "ran out of memory: 6.00 MiB were asked for" in shown
        assert "tensors: train.py:31 in forward" in shown and "run.snapshot.pickle" in shown
        assert "what was in the arena" in shown


def test_without_a_path_nothing_is_written_and_a_failure_fails_no_training(run, monkeypatch):
    with oracle_offload.record() as recorder:
        recorder._ran_out("cpu", 1, 1)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": None})
        recorder._ran_out("cpu", 1, 1)
    (event,) = recorder.recording().of("memory")
    assert event["file"] is None
    assert ["format" in error["what"] for error in recorder.recording().of("error")] == [True]


def test_who_held_the_bytes_is_told_though_the_file_cannot_be_written(run, tmp_path):
    (tmp_path / "run.snapshot.pickle").mkdir()
    with oracle_offload.record(tmp_path / "run.jsonl") as recorder:
        recorder._ran_out("cpu", 6 * MIB, MIB)
    recording = oracle_offload.observe.read_recording(tmp_path / "run.jsonl")
    (event,) = recording.of("memory")
    assert event["file"] is None and event["holders"]
    (error,) = recording.of("error")
    assert "run.snapshot.pickle" in error["what"]


def test_torch_is_asked_once_and_tells_who_listens_now(monkeypatch):
    put = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", put.append, raising=False)
    monkeypatch.setattr(snapshot, "_attached", False)
    heard = []

    def told(*what):
        heard.append(what)

    snapshot.listen(told)
    snapshot.listen(told)
    assert len(put) == 1, "there is no way to take it off"
    put[0](1, 512, 4096, 64)
    assert heard == [("cuda:1", 512, 64)]
    snapshot.ignore(told)
    put[0](1, 512, 4096, 64)
    assert len(heard) == 1


@pytest.mark.parametrize(("wanted", "others"), [(False, False), (True, False), (True, True)])
def test_lines_are_noted_while_the_recording_wants_them(monkeypatch, wanted, others):
    calls = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: others, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *a, **k: calls.append((a, k))
    )
    monkeypatch.setattr(snapshot, "_attached", True)
    with oracle_offload.record(max_events=77, lines_of_allocations=wanted) as recorder:
        recorder._listen()  # as for a GPU
        recorder._listen()
        assert snapshot._listeners == (recorder._ran_out,)
    on = (("all",), {"context": "alloc", "stacks": "python", "max_entries": 77})
    ours = wanted and not others  # what the user began ends when the user says so
    assert calls == ([on, ((), {"enabled": None})] if ours else [])
    assert snapshot._listeners == ()
    with recorder:  # and again
        recorder._listen()
    assert calls == ([on, ((), {"enabled": None})] * 2 if ours else [])


@pytest.mark.parametrize("refuses", [False, True])
def test_a_gpu_is_listened_to_as_far_as_its_allocator_tells_anything(monkeypatch, caplog, refuses):
    def attach(observer):
        if refuses:
            raise RuntimeError("this allocator has no observers")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    monkeypatch.setattr(snapshot, "_attached", False)
    with engines.opened(torch.device("cpu")) as state, monkeypatch.context() as patch:
        with oracle_offload.record():
            assert snapshot._listeners == (), "memory of the host does not run out so"
        patch.setattr(state, "device", torch.device("cuda", 0))
        with oracle_offload.record() as recorder:
            assert snapshot._listeners == (() if refuses else (recorder._ran_out,))
    assert [row["device"] for row in recorder.recording().header["devices"]] == ["cuda:0"]
    told = [error["what"] for error in recorder.recording().of("error")]
    why = "recording cuda:0 failed: RuntimeError: this allocator has no observers"
    assert told == ([why] if refuses else [])
    assert ("recording cuda:0: this allocator has no observers" in caplog.text) == refuses


def test_an_allocator_without_observers_is_not_listened_to(monkeypatch):
    def refuse(observer):
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    monkeypatch.setattr(snapshot, "_attached", False)
    with pytest.raises(RuntimeError, match="cudaMallocAsync"):
        snapshot.listen(print)
    assert snapshot._listeners == () and not snapshot._attached
