"""A replay, in this process: what it predicts of steps that are known by hand, what it leaves."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest

from oracle_offload import OffloadError
from oracle_offload._core import BACKWARD, FORWARD
from oracle_offload.engine import replay, simulator

SIZE = 1 << 14
SWITCHES = ("poison", "copy_nothing", "detect_races")


@pytest.fixture(autouse=True)
def device() -> Any:
    """A link of 1e9 bytes/s, and nothing else that takes time."""
    simulator.reset()
    rates = dict(link_gbps=1.0, copy_latency_s=0.0, launch_s=0.0)
    with simulator.device("rtx4090", **rates) as found:
        yield found
    assert simulator.reports() == []


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The states of the switches that a replay turns."""
    now: dict[str, bool] = {}

    def noted(name: str) -> Any:
        turn = getattr(simulator, name)

        def noting(on: bool) -> None:
            now[name] = on
            turn(on)

        return noting

    for name in SWITCHES:
        monkeypatch.setattr(simulator, name, noted(name))
    return now


def step(count: int, seconds: float) -> list[tuple[Any, ...]]:
    """The events of a forward through all units, and back."""
    events: list[tuple[Any, ...]] = []
    for ticket in range(2 * count):
        forward = ticket < count
        unit = ticket if forward else 2 * count - 1 - ticket
        use = ("acquire", unit, FORWARD if forward else BACKWARD, -1 if forward else 0, ticket)
        events += [use, ("launch", seconds), ("release", ticket)]
    return events


def units(count: int, *sizes: Any) -> list[list[tuple[int, list[Any]]]]:
    return [[(number, list(sizes or [SIZE]))] for number in range(count)]


def test_weights_that_have_room_are_copied_in_the_first_round_alone() -> None:
    events = step(4, 1e-3)
    first = replay.predict(events, units(4), [8 * SIZE], rounds=1)
    assert first["predicted_h2d_bytes"] == 4 * SIZE
    assert first["predicted_stall_s"] > 0
    assert first["predicted_step_s"] == pytest.approx(8e-3 + first["predicted_stall_s"], rel=1e-3)
    later = replay.predict(events, units(4), [8 * SIZE])
    assert later == {
        "predicted_step_s": pytest.approx(8e-3),
        "predicted_kernels_s": pytest.approx(8e-3),
        "predicted_h2d_bytes": 0,
        "predicted_stall_s": 0.0,
    }


def test_a_step_that_the_link_holds_up_takes_what_its_copies_take() -> None:
    found = replay.predict(step(20, 1e-6), units(20), [8 * SIZE], rounds=4)
    moved = found["predicted_h2d_bytes"]
    assert moved % SIZE == 0 and 2 * 12 * SIZE <= moved <= 2 * 16 * SIZE
    assert found["predicted_step_s"] == pytest.approx(moved / 1e9, rel=0.15)
    assert found["predicted_kernels_s"] == pytest.approx(40e-6)
    waited = found["predicted_stall_s"]
    assert 0.8 * found["predicted_step_s"] < waited <= found["predicted_step_s"] - 39e-6


def test_the_tensors_of_a_unit_are_copied_at_once() -> None:
    """They are one behind the other, as masters are: what a copy takes at least is paid once."""
    with simulator.device("rtx4090", link_gbps=1.0, copy_latency_s=1e-3, launch_s=0.0):
        found = replay.predict(step(1, 1e-6), units(1, SIZE, SIZE, SIZE), [8 * SIZE], rounds=1)
    assert found["predicted_step_s"] == pytest.approx(1e-3 + 3 * SIZE / 1e9, rel=0.02)


def test_tensors_of_any_size_lie_one_behind_the_other() -> None:
    """Each where the engine wants it; what is copied is their own bytes."""
    events = step(3, 1e-3)
    found = replay.predict(events, units(3, 1000, 1, 256, 70000), [1 << 20], rounds=1)
    assert found["predicted_h2d_bytes"] >= 3 * (1000 + 1 + 256 + 70000)
    assert found["predicted_h2d_bytes"] < 3 * (1000 + 1 + 256 + 70000 + 4 * 512)
    assert replay.predict([], [], [1 << 12])["predicted_step_s"] == 0


def test_coded_tensors_take_the_link_for_fewer_bytes() -> None:
    size = 1 << 17
    plain = replay.predict(step(3, 1e-3), units(3, size), [1 << 20], rounds=1)
    coded = replay.predict(
        step(3, 1e-3), units(3, [size, int(0.7 * size)]), [1 << 20], rounds=1, staging=8 * size
    )
    assert plain["predicted_h2d_bytes"] == 3 * size
    assert coded["predicted_h2d_bytes"] == pytest.approx(3 * 0.7 * size, rel=0.05)


def test_a_replay_leaves_the_simulator_as_it_found_it(
    switches: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[dict[str, bool]] = []
    launch = simulator.launch

    def launched(*arguments: Any) -> None:
        during.append(dict(switches))
        launch(*arguments)

    monkeypatch.setattr(simulator, "launch", launched)
    coded = [1 << 17, 3 << 15]
    replay.predict(step(2, 1e-3), units(2, SIZE, coded), [1 << 20], staging=1 << 20)
    assert during[0] == {"poison": False, "copy_nothing": True, "detect_races": False}
    assert switches == {"poison": True, "copy_nothing": False, "detect_races": True}
    live = simulator.live()
    for what in ("streams", "events", "contexts", "registrations", "device_bytes", "queued"):
        assert getattr(live, what) == 0, what
    assert live.host_alloc_bytes == live.adopted_bytes == live.registered_bytes == 0
    simulator.reset()


def test_an_error_in_the_middle_of_a_step_is_told_as_it_is() -> None:
    events = [("acquire", 0, FORWARD, -1, 0), ("acquire", 7, FORWARD, -1, 1)]
    asked = {
        "device": vars(simulator.get_device(0)),
        "events": events,
        "units": units(1),
        "segments": [SIZE],
    }
    with pytest.raises(OffloadError) as raised:
        replay.predict_elsewhere([asked])
    assert str(raised.value) == "the replay of a step failed with code 1: KeyError: 7"


def test_each_line_of_the_input_is_a_question_and_has_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: simulator.Device
) -> None:
    slow = {**vars(device), "link_gbps": 0.5}
    asked = [
        {"device": about, "events": step(4, 1e-6), "units": units(4), "segments": [2 * SIZE]}
        for about in (vars(device), slow)
    ]
    text = "".join(json.dumps(question) + "\n" for question in asked)
    monkeypatch.setattr("sys.stdin", StringIO(text))
    replay.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    fast_s, slow_s = (answer["predicted_step_s"] for answer in answers)
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)
    asked[0]["device"], asked[1]["device"] = vars(device), slow
    assert replay.predict_elsewhere(asked) == answers
