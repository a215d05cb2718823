"""What names a device, and which one it is; a machine with two GPUs is pretended."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError, _core
from oracle_offload.engine import simulator
from oracle_offload.engine.devices import KINDS, Cuda, parse_device
from oracle_offload.engine.engines import open_states


@pytest.fixture
def two_gpus(monkeypatch):
    """CUDA with two devices, of which the second is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize(
    ("named", "index"),
    [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1), (0, 0), (1, 1), (torch.device("cuda"), 1),
     (torch.device("cuda", 0), 0)],
    ids=str,
)  # fmt: skip
def test_a_gpu_has_a_number_and_without_one_it_is_the_current(two_gpus, named, index):
    assert parse_device(named) == torch.device("cuda", index)


@pytest.mark.parametrize("named", ["cuda:2", 2, 7], ids=str)
def test_a_gpu_that_is_not_there_is_refused_with_their_number(two_gpus, named):
    index = str(named).rpartition(":")[2]
    with pytest.raises(OffloadError, match=f"'cuda:{index}', but torch sees 2 CUDA device"):
        parse_device(named)


@pytest.mark.parametrize("named", ["cpu", "cpu:0", torch.device("cpu", 0)], ids=str)
def test_the_simulated_device_has_no_number(named):
    assert parse_device(named) == torch.device("cpu")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("gpu", "device='gpu' is not a device; use 'cuda', 'cuda:0' or 'cpu'"),
        (True, "device=True is not a device"),
        (None, "device=None is not a device"),
        (1.5, "device=1.5 is not a device"),
        pytest.param(object(), "device=<object object at .* is not a device", id="an object"),
        ("mps", "device='mps': only 'cuda' and 'cpu'"),
        ("meta", "device='meta': only 'cuda' and 'cpu'"),
    ],
    ids=str,
)
def test_what_is_no_device_to_attach_to_is_refused_with_its_value(named, said):
    for take in (parse_device, lambda named: oracle_offload.attach(nn.Linear(8, 8), named)):
        with pytest.raises(ValueError, match=said):
            take(named)


@pytest.mark.parametrize("faulty", [False, True], ids=["at once", "once the driver lets it"])
def test_an_engine_that_could_not_be_set_up_is_closed(monkeypatch, faulty):
    def fail(ordinal):
        if faulty:
            simulator.set_fault(None, result=701, lasting=True)
        raise OffloadError("the device does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "get_device", fail)
        with pytest.raises(OffloadError, match="does not answer"):
            oracle_offload.attach(nn.Sequential(nn.Linear(8, 8)), "cpu")
    assert not open_states() and (simulator.live().streams > 0) is faulty
    simulator.clear_faults()
    with attached(nn.Sequential(nn.Linear(8, 8))):
        assert len(open_states()) == 1
    assert simulator.live().streams == 0


# ---- what is asked of a card ----


@pytest.fixture
def card(two_gpus):
    return Cuda(torch.device("cuda", 1))


@pytest.fixture
def entered(monkeypatch):
    """Which device was made the current one, in turn."""
    found = []

    @contextlib.contextmanager
    def current(device):
        found.append(device)
        yield
        found.append("left")

    monkeypatch.setattr(torch.cuda, "device", current)
    return found


def test_what_torch_has_allocated_on_a_card_now_and_at_most(card, monkeypatch):
    told = {}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: told)
    assert card.allocated_and_peak() == (0, 0), "before its first allocation"
    told["allocated_bytes"] = {"all": {"current": 3, "peak": 7}, "large_pool": {"current": 1}}
    assert card.allocated_and_peak() == (3, 7)


def test_what_torch_holds_for_nobody_goes_back_to_the_card(card, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    card.release_cached()
    assert calls == ["emptied"]


class Stream:
    def __init__(self, answer):
        self.answer = answer

    def query(self):
        if self.answer is None:
            raise RuntimeError("the context is lost")
        return self.answer


@pytest.mark.parametrize(
    ("capturing", "answer", "idle"),
    [(False, True, True), (False, False, False), (False, None, False), (True, True, False)],
    ids=str,
)
def test_a_card_is_idle_where_its_stream_has_ended_and_is_in_no_capture(
    card, monkeypatch, capturing, answer, idle
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(answer))
    assert card.is_idle(0) is idle


def test_a_card_whose_context_is_lost_captures_for_all_that_is_known(card, monkeypatch):
    def fail():
        raise RuntimeError("the context is lost")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    assert card.is_capturing(0) is True and card.is_idle(0) is False


@pytest.mark.parametrize(("named", "library"), [("", None), ("libother.so", "libother.so")])
def test_an_engine_of_a_card_is_opened_where_the_card_is_current(
    card, entered, monkeypatch, named, library
):
    monkeypatch.setenv("ORACLE_OFFLOAD_DRIVER", named)
    monkeypatch.setattr(torch.cuda, "init", lambda: entered.append("begun"))
    monkeypatch.setattr(_core, "Engine", lambda *given: entered.append(given) or "the engine")
    assert card.open_engine() == "the engine"
    assert entered == ["begun", 1, (library, 1), "left"]


def test_the_stream_of_a_card_is_torchs_current_one_there(card, monkeypatch):
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False
    )
    assert card.stream_of(None)() == 101


def test_the_link_of_a_card_is_as_fast_as_the_fastest_of_a_few_copies(card, entered, monkeypatch):
    took_ms = iter([9.0, 4.0, 2.0, 8.0, *[5.0] * 100])
    empty, made, buffers = torch.empty, [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.is_over = False

        def record(self):
            entered.append("recorded")

        def synchronize(self):
            self.is_over = True

        def elapsed_time(self, end):
            assert end.is_over and not self.is_over
            return next(took_ms)

    def make(nbytes, *, dtype, **where):
        made.append((nbytes * dtype.itemsize, where))
        buffers.append(empty(4, dtype=dtype).fill_(len(made)))
        return buffers[-1]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", make)
    model = card.model
    (nbytes, host), there = made
    assert host == {"pin_memory": True, "device": "cpu"}
    assert there == (nbytes, {"device": torch.device("cuda", 1)})
    assert entered[:4] == [torch.device("cuda", 1), "recorded", "recorded", "left"]
    assert buffers[1].tolist() == buffers[0].tolist() == [1] * 4
    assert model.link_gbps == pytest.approx(nbytes / 2e-3 / 1e9)
    assert model.memory_bytes == simulator.preset("rtx4090").memory_bytes


def test_the_seconds_of_work_are_those_that_it_takes():
    done = []
    seconds = KINDS["cpu"](torch.device("cpu")).seconds_of(lambda: done.append(time.sleep(0.01)))
    assert done == [None] and seconds >= 0.01
