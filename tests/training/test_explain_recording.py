"""`explain` with a recording names what was special about the step in which memory ran out."""

from __future__ import annotations

import json

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import explain_oom
from oracle_offload.cli import main
from oracle_offload.engine import phases, simulator
from oracle_offload.observe.recording import SCHEMA, Recording

GIB, MIB = 1 << 30, 1 << 20
FULL = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of "
    "which 100.00 MiB is free. Including non-PyTorch memory, this process has 23.90 GiB memory in "
    "use. Of the allocated memory 23.20 GiB is allocated by PyTorch, and 200.00 MiB is reserved by "
    "PyTorch but unallocated."
)


class Failing(torch.autograd.Function):
    """Runs out of memory on the way forward or back, as `where` says."""

    where = None

    @staticmethod
    def forward(ctx, x):
        if Failing.where == "forward":
            raise torch.OutOfMemoryError(FULL)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.where == "backward":
            raise torch.OutOfMemoryError(FULL)
        return grad.clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(64, 64)) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x):
        return self.last(Failing.apply(self.first(x)))


class FailingSGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise torch.OutOfMemoryError(FULL)
        return super().step(closure)


@pytest.fixture(autouse=True)
def quiet():
    yield
    Failing.where = None
    oracle_offload.observe.phase(phases.FIRST)


def run_until(tmp_path, *, done, where, before=0, lengths=(), phase=None):
    """Train `before` steps, record `done` more, and run out of memory in the next."""
    prefix = nn.Parameter(torch.ones(4, 64))
    optimizer = FailingSGD([prefix], lr=0.1)
    model, path = Net(), tmp_path / "run.jsonl"

    def step():
        model(prefix).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        simulator.finish()

    with attached(model):
        for _ in range(before):
            step()
        with pytest.raises(torch.OutOfMemoryError), oracle_offload.record(path) as recorder:
            for number in range(done + 1):
                if lengths:
                    recorder.batch(lengths[number])
                if number == done:
                    Failing.where = where
                    optimizer.fails = where == "optimizer"
                    if phase is not None:
                        recorder.phase(phase)
                step()
    return path, recorder.recording()


CASES = {
    "first_backward": [
        ({"done": 0, "where": "backward"}, True),
        ({"done": 0, "where": "forward"}, False),
        ({"done": 1, "where": "backward"}, False),
        ({"done": 0, "where": "optimizer"}, False),
        ({"done": 0, "where": "backward", "before": 3}, False),
    ],
    "optimizer_state": [
        ({"done": 0, "where": "optimizer"}, True),
        ({"done": 2, "where": "backward"}, False),
    ],
    "second_step": [
        ({"done": 1, "where": "forward"}, True),
        ({"done": 1, "where": "backward"}, True),
        ({"done": 0, "where": "forward", "before": 1}, True),
        ({"done": 2, "where": "forward"}, False),
        ({"done": 1, "where": "forward", "before": 3}, False),
        ({"done": 0, "where": "backward", "before": 3}, False),
    ],
    "evaluation": [
        ({"done": 2, "where": "forward", "phase": "evaluation"}, True),
        ({"done": 2, "where": "forward", "phase": "warming up"}, False),
        ({"done": 2, "where": "forward"}, False),
    ],
    "longest_batch": [
        ({"done": 4, "where": "forward", "lengths": [512, 480, 510, 500, 1024]}, True),
        ({"done": 4, "where": "forward", "lengths": [512, 1024, 510, 500, 1024]}, False),
        ({"done": 4, "where": "forward", "lengths": [512, 512, 512, 512, 512]}, False),
    ],
}


@pytest.mark.parametrize(
    ("cause", "run", "is_it"),
    [(cause, run, is_it) for cause, runs in CASES.items() for run, is_it in runs],
)
def test_the_step_that_failed_names_the_cause(tmp_path, cause, run, is_it):
    path, recording = run_until(tmp_path, **run)
    for history in (path, recording):
        report = explain_oom(FULL, history=history)
        assert (report.cause.name == cause) is is_it, report.causes
        assert (cause in [each.name for each in report.causes]) is is_it
    # The file alone tells it too: it holds the error.
    assert explain_oom(path.read_text()).causes == report.causes


def test_the_commands_take_a_recording(tmp_path, capsys):
    path, _ = run_until(tmp_path, done=0, where="backward")
    title = "Out of memory on CUDA device 0: The first backward pass needs more"
    for command in (["explain", str(path)], ["report", str(path), "--html", str(tmp_path / "p")]):
        assert main(command) == 0
        assert title in capsys.readouterr().out
    assert title in (tmp_path / "p").read_text("utf-8")
    assert main(["report", str(path), "--json"]) == 0
    why = json.loads(capsys.readouterr().out)["out_of_memory"]
    assert why["cause"]["name"] == "first_backward"


def test_an_error_that_is_none_of_memory_is_not_explained(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    with attached(Net()), pytest.raises(RuntimeError), oracle_offload.record(path):
        raise RuntimeError("shapes differ")
    assert main(["report", str(path)]) == 0 and "memory on" not in capsys.readouterr().out
    assert main(["explain", str(path)]) == 3


# ---- what only a GPU's recording holds: rows as `record` writes them ----


def recording(allocated, *, memory=None, reserved=None):
    header = {"schema": SCHEMA, "devices": [{"device": "cuda:0", "steps_before": 0}]}
    peak = 0
    rows = []
    for number, nbytes in enumerate(allocated):
        peak = max(peak, nbytes + number * 64 * MIB)  # batches of all lengths: it creeps up
        at = {"step": number, "phase": "training", "device": "cuda:0", "t_s": float(number)}
        rows += [{"event": "compute", "kind": use, **at} for use in ("forward", "backward")]
        rows.append({"event": "step", **at, "allocated_bytes": nbytes, "peak_bytes": peak})
    if memory is not None:
        at = {"step": len(allocated), "phase": "training", "device": "cuda:0", "t_s": 1e3}
        rows.append({"event": "memory", **at, **memory})
    return Recording(header, rows)


def test_growth_of_what_is_in_use_is_a_leak_and_a_growing_cache_is_none():
    leak = explain_oom(FULL, history=recording([(4 * GIB + i * 256 * MIB) for i in range(30)]))
    assert leak.cause.name == "leak" and leak.cause.confidence == "high"
    flat = explain_oom(FULL, history=recording([4 * GIB + i % 3 * MIB for i in range(30)]))
    assert [cause.name for cause in flat.causes] == ["too_big"], "the peak alone grew, or the cache"


@pytest.mark.parametrize(
    ("asked", "cached", "largest", "is_it"),
    [
        (GIB, 3 * GIB, GIB // 2, True),
        (GIB, GIB, GIB - 1, True),
        (GIB, GIB - 1, GIB // 2, False),  # less than was asked for, in all
        (GIB, 3 * GIB, GIB, False),  # a piece was large enough: on another stream
        (None, 3 * GIB, GIB // 2, False),
        (GIB, 0, 0, False),
    ],
)
def test_memory_in_pieces_too_small_is_fragmentation(asked, cached, largest, is_it):
    memory = {"asked_bytes": asked, "cached_bytes": cached, "largest_cached_bytes": largest}
    report = explain_oom(FULL, history=recording([4 * GIB] * 5, memory=memory))
    assert (report.cause.name == "fragmentation") is is_it
    if is_it:
        assert "in pieces of at most" in report.cause.why


def test_what_came_after_memory_had_run_out_is_another_matter():
    memory = {"asked_bytes": 1, "cached_bytes": 0, "largest_cached_bytes": 0}
    first = recording([4 * GIB], memory=memory)
    caught = Recording(first.header, [*first.events, *recording([4 * GIB] * 9).events])
    assert explain_oom(FULL, history=caught).cause.name == "second_step"
