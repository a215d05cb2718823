"""Each number of the dictionary is a counter, a difference of counters, or unknown."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import engines, simulator
from oracle_offload.observe import meter
from oracle_offload.observe.heartbeat import pulse
from oracle_offload.observe.meter import Meter

GROWING = "h2d_bytes d2h_bytes acquires hits late stale evictions host_waits".split()


def net(depth=6, width=64):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for _ in range(depth)))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    width = next(model.parameters()).shape[0]
    for _ in range(steps):
        model(torch.randn(3, width)).sum().backward()
        simulator.finish()
        optimizer.step()
        optimizer.zero_grad()


def test_what_grew_is_the_difference_of_the_engine_s_counters():
    model = net()
    with attached(model, "cpu", offload_percent=0.9) as manager:
        read = Meter("cpu")
        read.read()
        for steps in (1, 3):
            before, began = manager.state.engine.stats(), simulator.now()
            train(model, steps)
            after, ended = manager.state.engine.stats(), simulator.now()
            numbers = read.read()
            assert numbers["steps"] == steps
            assert numbers["interval_s"] == pytest.approx(ended - began) and ended > began
            assert numbers["step_s"] == pytest.approx((ended - began) / steps)
            for name in GROWING:
                assert numbers[name] == after[name] - before[name], name
            assert numbers["h2d_bytes"] > 0 and numbers["late"] > 0
            for name, of in (("arena_bytes",) * 2, ("in_arena_bytes", "resident_bytes")):
                assert numbers[name] == after[of]
            assert numbers["locked_bytes"] == after["locked_bytes"] > 0
            assert numbers["pageable_bytes"] == after["pageable_bytes"]
            assert numbers["host_available_bytes"] > 0
        idle = read.read()
        assert (idle["steps"], idle["step_s"]) == (0, None)
        assert (idle["h2d_bytes"], idle["h2d_gbps"], idle["stalls"]) == (0, None, 0)


def test_rates_and_stalls_are_of_the_interval_alone(sim):
    model = net(12)
    sim.slow_link()
    with attached(model, "cpu") as manager:
        read = Meter()
        train(model, 4)
        read.read()
        before = manager.state.engine.stats()
        train(model, 8)
        after = manager.state.engine.stats()
        grown = {name: after[name] - before[name] for name in after}
        numbers = read.read()
        rate = grown["h2d_timed_bytes"] / grown["h2d_seconds"] / 1e9
        assert numbers["h2d_gbps"] == pytest.approx(rate) == pytest.approx(0.01, rel=0.2)
        share = grown["waits"] / grown["timed_waits"]
        assert numbers["stalls"] == pytest.approx(grown["stalls"] * share) and grown["stalls"]
        assert numbers["stall_s"] == pytest.approx(grown["stall_seconds"] * share)


def test_the_first_reading_has_no_difference_and_what_is_unknown_is_not_zero():
    with attached(net(), "cpu"):
        numbers = Meter().read(step=4, loss=0.25)
    assert list(numbers)[:2] == ["step", "loss"]
    assert (numbers["step"], numbers["loss"]) == (4, 0.25)
    grown = [*GROWING, "steps", "interval_s", "step_s", "h2d_gbps", "d2h_gbps", "stalls", "stall_s"]
    assert [numbers[name] for name in grown] == [None] * len(grown)
    # The simulated driver does not count torch's tensors.
    assert numbers["allocated_bytes"] is numbers["reserved_bytes"] is numbers["peak_bytes"] is None


def test_across_an_attach_or_detach_there_is_no_difference():
    read, first, second = Meter(), net(), net(3, 48)
    with attached(first, "cpu"):
        read.read()
        with attached(second, "cpu"):
            assert read.read()["h2d_bytes"] is None
            assert read.read()["h2d_bytes"] == 0
        assert read.read()["steps"] is None
        assert read.read()["steps"] == 0
    assert read.read()["arena_bytes"] is None
    for _ in range(2):
        with attached(first, "cpu"):  # another engine, whose counters begin at zero
            assert read.read()["acquires"] is None
            assert read.read()["acquires"] == 0


def test_a_device_without_a_model_has_no_numbers(monkeypatch):
    with engines.opened(torch.device("cpu")):  # as an attach in another thread does
        assert Meter().read()["arena_bytes"] is None
    with attached(net(), "cpu") as manager:
        assert Meter().read()["arena_bytes"] > 0
        state = manager.state
    closed = SimpleNamespace(**{**vars(state), "listeners": (manager.attachment,)})
    monkeypatch.setattr(meter, "open_states", lambda: [closed])  # found just before it was closed
    assert Meter().read()["arena_bytes"] is None


def test_stalls_are_unknown_where_no_wait_was_timed():
    with attached(net(), "cpu") as manager:
        before = meter._Reading.of(manager.state)
        for waits, timed, stalls in ((4, 0, None), (4, 2, 2.0), (0, 0, 0.0)):
            more = {"waits": waits, "timed_waits": timed, "stalls": timed // 2}
            counters = {k: v + more.get(k, 0) for k, v in before.counters.items()}
            after = meter._Reading(before.pace, before.now_s, counters)
            numbers = meter._grown(before, after)
            assert numbers["stalls"] == stalls and (numbers["stall_s"] is None) is (stalls is None)


def test_the_keys_are_the_same_without_a_model():
    with attached(net(), "cpu"):
        assert list(Meter().read()) == list(Meter("cpu").read())
        some = list(Meter().read())
    assert list(Meter().read()) == some


def test_a_device_is_chosen_or_refused():
    with pytest.raises(ValueError, match="not a device"):
        Meter("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(OffloadError, match="sees no CUDA device"):
            Meter("cuda")


def test_tensors_of_one_element_are_numbers_and_other_things_are_refused():
    read = Meter()
    assert read.read(loss=torch.tensor([1.5]))["loss"] == 1.5
    assert read.read(loss=None)["loss"] is None
    assert type(read.read(step=3)["step"]) is int
    for odd in ("1.5", torch.zeros(2), [1.0], object()):
        with pytest.raises(TypeError, match="loss"):
            read.read(loss=odd)


@pytest.mark.parametrize("name", ["self", "meter", "step", "loss"])
def test_a_number_may_have_any_name(tmp_path, name):
    assert Meter().read(**{name: 0.5})[name] == 0.5
    assert pulse(Meter(), **{name: 0.5})["numbers"][name] == 0.5
    with oracle_offload.observe.MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        assert metrics.log(**{"step": 1, name: 2})[name] == 2


def test_what_is_slow_is_asked_once_a_second(monkeypatch):
    asked, now = [], [100.0]
    monkeypatch.setattr(meter, "available_bytes", lambda: asked.append(1) or len(asked))
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    read = Meter()
    for later, expected in ((0.0, 1), (0.9, 1), (0.2, 2), (1.0, 3)):
        now[0] += later
        assert read.read()["host_available_bytes"] == expected


class Card:
    """Replaces `Sensors`, whose own tests ask nvidia-ml-py."""

    def __init__(self, uuid):
        self.uuid = uuid
        self.joules = 100.0

    def read(self):
        return {"power_w": 300.0, "temperature_c": None}

    def energy_j(self):
        self.joules += 60.0
        return self.joules


def test_energy_is_of_the_interval_and_of_each_step_in_it(monkeypatch):
    monkeypatch.setattr(meter, "Sensors", Card)
    model = net()
    with attached(model, "cpu"):
        read = Meter(sensors=True)
        first = read.read()
        assert (first["power_w"], first["temperature_c"]) == (300.0, None)
        assert first["energy_j"] is first["energy_per_step_j"] is None
        train(model, 4)
        second = read.read()
        assert (second["energy_j"], second["energy_per_step_j"]) == (60.0, 15.0)
        third = read.read()
        assert (third["energy_j"], third["energy_per_step_j"]) == (60.0, None)
        train(model)
        read._sensors.joules = 0.0  # the driver was loaded again
        fourth = read.read()
        assert fourth["energy_j"] is fourth["energy_per_step_j"] is None
        for joules, used in ((60.0, 0.0), (None, None), (70.0, None)):  # one that is lost, and back
            read._sensors.energy_j = lambda joules=joules: joules
            assert read.read()["energy_j"] == used


def test_sensors_are_those_of_the_card_that_a_model_is_attached_to(monkeypatch):
    cards, now, uuid = {}, [100.0], [None]

    class Numbered(Card):
        def __init__(self, uuid):
            super().__init__(uuid)
            self.joules = 1000.0 * len(cards)
            cards[uuid] = self

        def read(self):
            return {"power_w": None if self.uuid is None else 100.0 * len(self.uuid)}

    monkeypatch.setattr(meter, "Sensors", Numbered)
    monkeypatch.setattr(meter, "uuid_of", lambda device: None if device is None else uuid[0])
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    read = Meter(sensors=True)

    def later():
        now[0] += 2.0
        numbers = read.read()
        return numbers["power_w"], numbers["energy_j"]

    assert later() == (None, None), "no model is attached"
    for uuid[0], watts in (("A", 100.0), ("BB", 200.0)):
        with attached(net(), "cpu"):
            assert later() == (watts, None), "another card's joules are not subtracted"
            assert later() == (watts, 60.0)
        assert later() == (watts, 60.0), "the card is there without a model"
    assert list(cards) == [None, "A", "BB"], "each was opened once"


def test_sensors_are_asked_only_where_they_are_wanted_and_known_only_of_cards(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "power_w" not in Meter().read()
    numbers = Meter(sensors=True).read()
    assert numbers["power_w"] is numbers["energy_j"] is None
    assert meter.uuid_of(None) is meter.uuid_of(torch.device("cpu")) is None


def test_a_card_is_named_as_the_driver_names_it(monkeypatch):
    properties = SimpleNamespace(uuid="1f-2e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert meter.uuid_of(torch.device("cuda", 1)) == "GPU-1f-2e"
    del properties.uuid  # torch before 2.4
    assert meter.uuid_of(torch.device("cuda", 1)) is None


def test_a_loss_that_autograd_records_is_taken_without_a_warning(recwarn):
    assert Meter().read(loss=torch.ones(1, requires_grad=True) * 2)["loss"] == 2.0
    assert not recwarn.list


class Cards:
    """What torch answers of two cards; which of them were asked, and which peaks were reset."""

    def __init__(self, monkeypatch):
        self.reset, self.asked = [], []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._begin)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, self._answer)

    def _begin(self, device):
        if torch.device(device).type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        self.reset.append(str(device))

    def _answer(self, device):
        self.asked.append(str(device))
        return 7


def test_the_peak_begins_anew_on_the_device_that_is_shown(monkeypatch):
    cards = Cards(monkeypatch)
    read = Meter()
    read.reset_peak()
    assert cards.reset == ["cuda:0", "cuda:1"], "which one the next reading is of is unknown"
    named = Meter()
    named._device = "cuda:1"
    named.reset_peak()
    assert cards.reset[2:] == ["cuda:1"]
    assert named.read()["peak_bytes"] == 7 and set(cards.asked) == {"cuda:1"}
    with attached(net(), "cpu"):
        assert named.read()["arena_bytes"] is None, "the model is on another device"
    monkeypatch.setattr(read, "_state", lambda: SimpleNamespace(device=torch.device("cuda", 1)))
    read.reset_peak()
    assert cards.reset[3:] == ["cuda:1"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    read.reset_peak()
    assert len(cards.reset) == 4
    assert named.read()["peak_bytes"] is None, "asking would begin CUDA"


def test_the_simulated_device_has_no_peak_of_a_card(monkeypatch):
    cards = Cards(monkeypatch)
    read = Meter("cpu")
    read.reset_peak()
    assert read.read()["peak_bytes"] is None, "not that of the current card"
    with attached(net(), "cpu"):
        for read in (Meter("cpu"), Meter()):
            read.reset_peak()
            assert read.read()["peak_bytes"] is None
    assert cards.reset == cards.asked == []
