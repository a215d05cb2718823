"""A recording made by hand: its text, its page and its files are those in tests/data/recording.

After a deliberate change rewrite them with OO_REWRITE_GOLDEN=1, and read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.observe.recording import SCHEMA, Recording, format_of, read_recording
from oracle_offload.observe.timeline import Stay

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "recording"
KIB, MIB = 1 << 10, 1 << 20


def event(what: str, t_s: float, /, **more: Any) -> Any:
    return {
        "event": what,
        "t_s": t_s,
        "step": 3,
        "phase": "training",
        "device": "cuda:0",
        **more,
    }


def timed(what: str, unit: int, start_s: float, end_s: float, /, **more: Any) -> Any:
    """Return an event of the step that was timed."""
    found = {
        "model": "Net",
        "engine": 1,
        "unit": unit,
        "layer": f"blocks.{unit}.up",
        "bytes": (unit + 1) * MIB,
        "start_s": start_s,
        "end_s": end_s,
        "seconds": end_s - start_s,
    }
    return event(what, start_s, **{**found, **more})


def untimed(what: str, unit: int, t_s: float, /, **more: Any) -> Any:
    no_times = dict.fromkeys(("start_s", "end_s", "seconds"))
    return {**timed(what, unit, t_s, t_s, step=0, **more), **no_times}


def step(number: int, seconds: float | None, **more: Any) -> Any:
    counters = {"h2d_bytes": number * MIB, "h2d_copies": number, "evictions": 2, "late": number}
    found = {
        "label": "",
        "timed": False,
        "seconds": seconds,
        "counters": counters,
        "allocated_bytes": None,
        "peak_bytes": number * KIB or None,
    }
    return event("step", 0.1 * (number + 1), **{**found, "step": number, **more})


def phase(before: str, name: str, t_s: float, **more: Any) -> Any:
    sizes = {"allocated_bytes": 5 * KIB, "delta_bytes": -KIB, "peak_bytes": None, "copies": 7}
    return event(
        "phase", t_s, name=name, before=before, counters={"h2d_bytes": 3 * KIB}, **sizes, **more
    )


HEADER: dict[str, Any] = {
    "schema": SCHEMA,
    "dropped": 9,
    "dropped_errors": 2,
    "devices": [
        {"device": "cuda:0", "name": "RTX <4090>", "simulated": False, "dropped_events": 5,
         "dropped_steps": 0, "dropped_timed_steps": 1},
        {"device": "cpu", "name": "simulated", "simulated": True},
    ],
}  # fmt: skip
OOM = event(
    "memory", 0.45, asked_bytes=2 * MIB, free_bytes=MIB, reserved_bytes=24 * MIB,
    held_bytes=20 * MIB, cached_bytes=3 * MIB, largest_cached_bytes=MIB, peak_bytes=22 * MIB,
    holders=[{"kind": "arena", "who": "oracle_offload", "bytes": 20 * MIB, "blocks": 1}],
    holders_at_peak=[{"kind": "tensors", "who": "a.py:1 in <f>", "bytes": 22 * MIB, "blocks": 2}],
    arena=[{"who": "blocks.0.up", "bytes": MIB}], file="run.snapshot.pickle",
)  # fmt: skip
EVENTS = [
    untimed("copy_to_device", 0, 0.01, address=0x1000),
    untimed("wait", 0, 0.011),
    step(0, None, label="warm-up"),
    step(1, 0.1, device="cpu"),
    step(1, 0.2),
    step(2, 0.1),
    timed("copy_to_device", 1, 0.30, 0.32, address=0x200000),
    timed("compute", 0, 0.31, 0.33, kind="forward"),
    timed("wait", 1, 0.33, 0.34),
    timed("wait", 1, 0.341, 0.341005),  # as short as two events in a row
    timed("compute", 1, 0.34, 0.38, kind="forward"),
    timed("decode", 1, 0.315, 0.32, chunks=3),
    timed("compute", 2, 0.345, 0.35, kind="backward"),  # within another
    timed("compute", 3, 0.36, 0.39, kind="backward"),  # longer than the one that it began in
    timed("wait", 2, 0.35, 0.37),
    timed("wait", 0, 0.351, 0.361),
    timed("eviction", 0, 0.36, 0.37, by_unit=2),
    timed("copy_to_device", 2, 0.36, 0.37, address=0x1000),
    timed("copy_to_host", -1, 0.385, 0.395, layer="", bytes=64),
    step(3, 0.1, timed=True),
    step(4, 0.1, label="resume"),
    phase("training", "sampling", 0.42),
    event("arena", 0.43, model="Net", before_bytes=MIB, capacity_bytes=2 * MIB, what="room"),
    event("batch", 0.44, length=17),
    OOM,
    {"event": "error", "t_s": -0.5, "step": 4, "phase": "training", "what": "ValueError: <no>"},
]
RECORDING = Recording(HEADER, EVENTS)


def same_as(name: str, text: str) -> bool:
    """Whether the text is that of the file."""
    path = GOLDEN / name
    if os.environ.get("OO_REWRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return text == path.read_text(encoding="utf-8")


def test_its_text_is_the_one_on_file() -> None:
    assert same_as("run.txt", str(RECORDING)) and repr(RECORDING) == str(RECORDING)


def test_its_page_is_the_one_on_file() -> None:
    assert same_as("run.html", RECORDING.to_html())


def test_its_table_of_events_is_the_one_on_file() -> None:
    assert same_as("run.csv", RECORDING.to_csv())


def test_its_trace_for_perfetto_is_the_one_on_file() -> None:
    rows = json.loads(RECORDING.to_chrome())
    assert rows["otherData"] == {"schema": SCHEMA, "dropped": 9}
    lines = "\n".join(json.dumps(row) for row in rows["traceEvents"])
    assert same_as("run.chrome", f"{rows['displayTimeUnit']}\n{lines}\n")


def test_a_file_holds_the_header_and_every_event(tmp_path: Path) -> None:
    for name in ("run.jsonl", "run.html", "run.json", "run.csv"):
        RECORDING.export(tmp_path / name)
    texts = [RECORDING.to_html(), RECORDING.to_chrome(), RECORDING.to_csv()]
    names = ("run.html", "run.json", "run.csv")
    assert [(tmp_path / name).read_text("utf-8") for name in names] == texts
    read = read_recording(tmp_path / "run.jsonl")
    assert list(read) == [HEADER, *EVENTS]
    least = {"schema": SCHEMA, "devices": [{"device": "cpu", "name": "simulated"}]}
    (tmp_path / "least.jsonl").write_text(json.dumps(least))
    assert list(read_recording(tmp_path / "least.jsonl")) == [least]


def test_averages_are_of_whole_steps_without_a_label_that_were_not_timed() -> None:
    means = RECORDING.averages()
    assert list(means) == ["cuda:0", "cpu"]
    assert means["cuda:0"]["steps"] == 2 and means["cuda:0"]["seconds"] == pytest.approx(0.15)
    counters = {"h2d_bytes": 1.5 * MIB, "h2d_copies": 1.5, "evictions": 2, "late": 1.5}
    assert means["cuda:0"]["counters"] == counters
    assert means["cpu"]["steps"] == 1 and means["cpu"]["seconds"] == 0.1
    none = Recording(HEADER, [step(0, None), step(1, 0.1, label="resume")])
    assert none.averages()["cuda:0"] == {"steps": 0, "seconds": None, "counters": {}}
    assert str(none).startswith(
        "cuda:0: no whole step without a label was recorded, so there is no average\ncpu: no whole"
    )
    empty = Recording({"schema": SCHEMA, "devices": [], "dropped": 0}, [])
    assert str(empty) == "no model was attached while this was recorded\n"


def test_stalls_are_added_up_for_each_layer() -> None:
    found: Any = RECORDING.stalled_layers()
    assert found == [
        ("blocks.2.up", 1, pytest.approx(0.02)),
        ("blocks.0.up", 1, pytest.approx(0.01)),
        ("blocks.1.up", 1, pytest.approx(0.01)),
    ]
    twice = [*EVENTS, timed("wait", 1, 0.5, 0.9), timed("wait", 0, 0.5, 0.50001)]
    longest: Any = Recording(HEADER, twice).stalled_layers()[0]
    assert longest == ("blocks.1.up", 2, pytest.approx(0.41))
    assert Recording(HEADER, [timed("wait", 1, 0.5, 0.6, seconds=10e-6)]).stalled_layers() == []


def stays(*events: Any) -> list[Stay]:
    """Return what was in the arena from 1 s to 3 s, between two uses of another unit."""
    uses = [timed("compute", 9, 1.0, 1.5), timed("compute", 9, 2.5, 3.0)]
    return Recording(HEADER, [*events, *uses])._stays("cuda:0", 3)


def test_what_lay_in_the_arena_came_with_a_copy_and_went_with_an_eviction() -> None:
    before = untimed("copy_to_device", 0, 0.5, address=64)
    copy = timed("copy_to_device", 1, 1.25, 1.5, address=96)
    there = Stay("blocks.0.up", 64, MIB, 1.0, 3.0)
    assert stays(before) == [there]
    assert stays(copy) == [Stay("blocks.1.up", 96, 2 * MIB, 1.5, 3.0)]
    gone = timed("eviction", 0, 2.0, 2.25, by_unit=1)
    assert stays(before, gone) == [there._replace(end_s=2.0)]
    assert stays(gone, before) == [there], "it came after that"
    assert stays(before, untimed("eviction", 0, 0.6, by_unit=1)) == [], "before the step"
    again = timed("copy_to_device", 0, 2.0, 2.25, address=128)
    assert stays(before, again) == [
        there._replace(end_s=2.0),
        Stay("blocks.0.up", 128, MIB, 2.25, 3.0),
    ]
    larger = timed("compute", 1, 1.5, 2.0, bytes=5 * MIB)
    assert stays(copy, larger)[0].nbytes == 5 * MIB, "of compressed weights"


@pytest.mark.parametrize(
    "other",
    [{"step": 4}, {"device": "cpu"}, {"engine": 0, "start_s": None, "end_s": None}],
    ids=["later", "elsewhere", "old"],
)
def test_what_is_not_of_the_step_and_its_arena_is_not_drawn(other: dict[str, Any]) -> None:
    assert stays(timed("copy_to_device", 1, 1.25, 1.5, address=96, **other)) == []


def test_long_tables_have_thirty_rows() -> None:
    many = [step(number, 0.1) for number in range(31)]
    rows = [timed("wait", unit, 0.0, 0.1 + unit) for unit in range(40)]
    phases = [phase(str(number), "next", 0.2) for number in range(33)]
    sizes = {"before_bytes": 1, "capacity_bytes": 2}
    arenas = [event("arena", 0.3, step=n, model="Net", what="so", **sizes) for n in range(34)]
    tables = dict(Recording(HEADER, [*many, *rows, *phases, *arenas])._tables())
    assert {title: len(found) for title, found in tables.items()} == {
        "layers that stalled most, in the timed steps": 31,
        "changes of phase": 31,
        "the last 30 steps": 31,
        "sizes of arenas": 31,
    }
    firsts = {title: found[1][0] for title, found in tables.items()}
    assert list(firsts.values()) == ["blocks.39.up", "3 -> next", "1", "4"]
    assert [title for title, _ in Recording(HEADER, many[:30])._tables()] == ["steps"]


def test_pictures_of_long_steps_have_parts() -> None:
    uses = [timed("compute", 0, 0.5 + i / 100, 0.505 + i / 100) for i in range(81)]
    whole = "step 3 on cuda:0, RTX <4090> (measured by events)"
    titles = [title for title, _ in Recording(HEADER, uses).pictures()]
    assert titles == [whole, f"{whole}, part 1 of 2", f"{whole}, part 2 of 2"]


def test_each_timed_step_of_a_device_has_a_picture_of_its_own() -> None:
    uses = [
        timed("compute", unit, 0.1, 0.2, device=device, step=number)
        for unit, (device, number) in enumerate((("cuda:0", 3), ("cuda:0", 4), ("cpu", 3)))
    ]
    found = dict(Recording(HEADER, uses).pictures())
    assert list(found) == [
        "step 3 on cuda:0, RTX <4090> (measured by events)",
        "step 4 on cuda:0, RTX <4090> (measured by events)",
        "step 3 on cpu, simulated (simulated times)",
    ]
    shown = [[unit for unit in range(3) if f"blocks.{unit}" in text] for text in found.values()]
    assert shown == [[0], [1], [2]]


def test_slices_of_a_track_nest_or_follow_one_another() -> None:
    times = [(0, 10), (5, 15), (10, 12), (11, 12), (11.5, 15), (13, 20), (14, 21)]
    uses = [timed("compute", unit, *pair) for unit, pair in enumerate(times)]
    rows = json.loads(Recording(HEADER, uses).to_chrome())["traceEvents"]
    tracks = {row["name"]: row["tid"] for row in rows if row["ph"] == "X"}
    # One kind of slices has the tracks 1, 7, 13.
    assert list(tracks.values()) == [1, 7, 1, 1, 7, 1, 7 + 6]


@pytest.mark.parametrize("missing", ["start_s", "end_s"])
def test_what_has_no_begin_or_no_end_is_an_instant_on_the_hosts_track(missing: str) -> None:
    odd = timed("compute", 0, 0.1, 0.2, **{missing: None})
    rows = json.loads(Recording(HEADER, [odd]).to_chrome())["traceEvents"]
    (row,) = (row for row in rows if row["ph"] != "M")
    assert (row["ph"], row["tid"], row["ts"]) == ("i", 0, 1e5)


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("run.html", None, "html"),
        ("run.HTM", None, "html"),
        ("run.json", None, "chrome"),
        ("run.csv", None, "csv"),
        ("run.jsonl", None, "jsonl"),
        ("run.csv", "chrome", "chrome"),
        ("run", "jsonl", "jsonl"),
    ],
)
def test_the_format_is_the_one_asked_for_or_that_of_the_suffix(
    name: str, format: str | None, expected: str
) -> None:
    assert format_of(name, format) == expected


@pytest.mark.parametrize(("name", "format"), [("run.txt", None), ("run.html", "text")])
def test_a_format_that_there_is_not_is_refused(name: str, format: str | None) -> None:
    words = f"^{name!r} with format={format!r}: use 'html', 'chrome', 'csv' or 'jsonl', or a file"
    with pytest.raises(ValueError, match=words):
        format_of(name, format)


HEAD = json.dumps({"schema": SCHEMA, "devices": []})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f"begins with nothing, not with {SCHEMA}$"),
        ('{"schema": "other/1"}\n', f"begins with other/1, not with {SCHEMA}$"),
        ('{"event": "step"}\n', "line 1: no part of a recording$"),
        (f'{HEAD}\n{{"schema": 1}}\n', "line 2: no part of a recording$"),
        (f'{HEAD}\n["event"]\n', "line 2: no part of a recording$"),
        (f"{HEAD}\nhalf\n", "line 2: not JSON: Expecting value"),
        (f'{HEAD}\n{{"event": "wait", "layer": "a"}}\n', "line 2 is damaged: wait without seconds"),
        (f'{{"schema": "{SCHEMA}"}}\n', "line 1: .* it names no devices$"),
        (f'{{"schema": "{SCHEMA}", "devices": {{}}}}\n', "line 1: .* it names no devices$"),
        (f'{{"schema": "{SCHEMA}", "devices": [{{"name": "a"}}]}}\n', "it names no devices$"),
        (f'{{"schema": "{SCHEMA}", "devices": [["device", "name"]]}}\n', "it names no devices$"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_line_and_the_reason(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        read_recording(path)
    assert str(caught.value).startswith(str(path))
