"""A card's sensors through the real nvidia-ml-py, over a stand-in for the driver's library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_doctor_gpus import compile_stand_in, said_over

from oracle_offload.host.sensors import SENSORS, Sensors

READ = """
import json, sys
from oracle_offload.host.sensors import Sensors
sensors = Sensors(sys.argv[1])
energy = [sensors.energy_j(), sensors.energy_j()]
print(json.dumps([sensors.read(), sensors.why, sensors.missing, energy]))
"""


def read_over(library: Path, uuid: str, **environ: str) -> list[Any]:
    answered: list[Any] = json.loads(said_over(library, READ, uuid, **environ))
    return answered


def test_a_card_is_found_by_its_name_and_answers_in_the_units_of_the_keys(tmp_path: Path) -> None:
    numbers, why, missing, energy = read_over(compile_stand_in(tmp_path), "GPU-first")
    assert (why, missing) == ("", {})
    assert numbers == {
        "power_w": 312.5,
        "temperature_c": 71,
        "sm_clock_mhz": 2520,
        "memory_clock_mhz": 10501,
        "performance_state": 2,
        "clock_reasons": 0x44,
        "link_generation": 3,
        "link_width": 8,
    }
    assert tuple(numbers) == SENSORS
    assert energy == [2.5, 5.0]


def test_what_a_card_does_not_answer_is_unknown_and_says_why(tmp_path: Path) -> None:
    numbers, why, missing, energy = read_over(compile_stand_in(tmp_path), "GPU-slice")
    assert why == "" and energy == [None, None]
    assert numbers == dict.fromkeys(SENSORS)
    assert missing == dict.fromkeys(SENSORS, "Not Supported")


@pytest.mark.parametrize(
    ("uuid", "environ", "why"),
    [
        ("first", {}, "the NVIDIA driver does not answer: Not Found"),
        (
            "GPU-first",
            {"OO_NVML_INIT": "9"},
            "the NVIDIA driver does not answer: Driver Not Loaded",
        ),
    ],
    ids=["no such card", "no driver"],
)
def test_where_nothing_answers_the_reason_is_kept(
    tmp_path: Path, uuid: str, environ: dict[str, str], why: str
) -> None:
    numbers, said, _, energy = read_over(compile_stand_in(tmp_path), uuid, **environ)
    assert said.startswith(why)
    assert numbers == dict.fromkeys(SENSORS) and energy == [None, None]


def test_without_nvidia_ml_py_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensors = Sensors("GPU-first")
    assert sensors.uuid == "GPU-first"
    assert sensors.why == "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    assert sensors.read() == dict.fromkeys(SENSORS) and sensors.energy_j() is None


def test_a_device_that_is_no_card_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensors = Sensors(None)
    assert sensors.why == "the device is no NVIDIA card"
    assert sensors.read() == dict.fromkeys(SENSORS)
