"""The picture of a step: every box at its place, to the last digit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oracle_offload.observe.timeline import (
    Stay,
    block_of,
    blocks_within,
    details,
    timeline_svg,
    what_to_look_at,
)

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "timeline"
COMPUTE, STALL, H2D, D2H, REST = "compute", "stall", "h2d", "d2h", "rest"


def row(
    kind: str, start_s: float, end_s: float, nbytes: int = 0, layer: str = ""
) -> dict[str, object]:
    return {
        "kind": kind,
        "unit": 1,
        "start_s": start_s,
        "end_s": end_s,
        "bytes": nbytes,
        "layer": layer,
    }


ROWS = [
    row("h2d", 12e-3, 14e-3, 3_000_000, "blocks.1.up"),  # not in the order of time
    row("h2d", 10e-3, 11e-3, 1_000_000, "blocks.0.up"),
    row("compute", 11e-3, 12e-3, 5, "blocks.0.up"),
    row("compute", 14e-3, 20e-3, 5, "blocks.1.up"),
    row("stall", 12e-3, 14e-3, 0, "blocks.1.up"),
    row("stall", 14e-3, 14.01e-3),  # as short as two events in a row
    row("stall", 9e-3, 9.005e-3),  # shorter, and before everything else
    row("d2h", 19e-3, 20e-3, 500_000),
]
STAYS = [
    Stay("blocks.0.up", 4096, 1_000_000, 11e-3, 15e-3),
    Stay("blocks.1.up", 90_000_000, 3_000_000, 14e-3, 20e-3),
]


def boxes(text: str) -> list[tuple[str, float, float, float, float]]:
    """Return name, place and size of each box, by a picture 1000 wide."""
    return [
        (name_of(group), *(figure(box, name) for name in ("x", "y", "width", "height")))
        for group in ElementTree.fromstring(text).iter(f"{SVG}g")
        for box in group.findall(f"{SVG}rect")
    ]


def name_of(element: ElementTree.Element) -> str:
    return element.attrib["class"].removeprefix("oo-")


def figure(element: ElementTree.Element, name: str) -> float:
    value = element.attrib.get(name, "0")
    return round(10 * float(value[:-1]), 2) if value.endswith("%") else float(value)


def words(text: str) -> list[tuple[str, float, float]]:
    return [
        (str(element.text), figure(element, "x"), figure(element, "y"))
        for element in ElementTree.fromstring(text).iter(f"{SVG}text")
    ]


def marks(text: str, kind: str = "wide") -> list[float]:
    """Return where the lines of blocks are."""
    groups = ElementTree.fromstring(text).iter(f"{SVG}g")
    lines = [
        line for group in groups if name_of(group) == kind for line in group.iter(f"{SVG}line")
    ]
    return [figure(line, "x1") for line in lines if "stroke-dasharray" in line.attrib]


def titles(text: str) -> list[str]:
    return [str(element.text) for element in ElementTree.fromstring(text).iter(f"{SVG}title")]


def test_every_row_is_a_box_at_its_time_in_the_lane_of_its_kind() -> None:
    # 10 ms on 1000: 100 to the millisecond. Names of blocks are above the lanes.
    text = timeline_svg(ROWS, "a <step>", stays=STAYS)
    assert boxes(text) == [
        (COMPUTE, 100, 117, 100, 28),
        (COMPUTE, 400, 117, 600, 28),
        (STALL, 200, 171, 200, 28),
        (REST, 0, 225, 100, 28),  # the first three rows together are the whole time
        (H2D, 0, 279, 100, 28),
        (H2D, 200, 279, 200, 28),
        (D2H, 900, 333, 100, 28),
        ("arena-0", 100, 387, 400, 45),  # a quarter of the bytes; the gap of the two is closed
        ("arena-1", 400, 432, 600, 135),
    ]
    assert words(text) == [
        ("a <step>", 0, 20),
        ("Look at the red: for 2.00 ms of 10.00 ms the device waits for", 0, 37),
        ("copies, longest for blocks.1.up (2.00 ms); copies keep the link", 0, 54),
        ("busy for 30% of the time.", 0, 71),
        ("blocks.0", 100, 93),
        ("blocks.1", 400, 93),
        *((f"{2 * i} ms", 200 * i, 589) for i in range(6)),
        ("managed layers compute", 0, 112),
        ("7.00 ms", 1000, 112),
        ("stalls: the device waits for a copy", 0, 166),
        ("2.00 ms", 1000, 166),
        ("neither: other operators, or nothing queued", 0, 220),
        ("1.00 ms", 1000, 220),
        ("copies to the device: weights", 0, 274),
        ("3.00 ms, 3.81 MiB, 1.3 GB/s", 1000, 274),
        ("copies to the host: gradients", 0, 328),
        ("1.00 ms, 488.28 KiB, 0.5 GB/s", 1000, 328),
        ("arena: weights, a colour for each block, height is bytes", 0, 382),
        ("3.81 MiB", 1000, 382),
    ]
    lines = list(ElementTree.fromstring(text).iter(f"{SVG}line"))
    assert [(figure(line, "x1"), line.attrib["y1"], line.attrib["y2"]) for line in lines] == [
        (100, "83", "575"),
        (400, "83", "575"),
        *((200 * i, "99", "575") for i in range(6)),
    ]


def test_a_file_is_scaled_as_a_whole_and_a_part_of_a_page_is_laid_out_for_two_widths() -> None:
    rows = [row("compute", i, i + 0.5, 0, f"blocks.{i}") for i in range(40)]
    file, part = timeline_svg(rows, ""), timeline_svg(rows, "", fluid=True)
    assert ElementTree.fromstring(file).attrib["viewBox"] == "0 0 1000 282"
    assert "viewBox" not in ElementTree.fromstring(part).attrib
    assert boxes(part) == boxes(file) and not marks(file, "narrow")
    # A file has one layout, whatever the width of what shows it.
    assert 'class="oo-step"' in file and 'class="oo-step oo-fluid"' in part
    hidden = re.findall(r"[{}](\S+) \.oo-(?:wide|narrow)\{display:none", part)
    assert hidden == [".oo-fluid"] * 2
    assert marks(part) == marks(file) and len(marks(file)) > 1.5 * len(marks(part, "narrow")) > 15
    narrow = [g for g in ElementTree.fromstring(part).iter(f"{SVG}g") if name_of(g) == "narrow"]
    told = [(str(t.text), 0.44 * figure(t, "x")) for t in narrow[0].iter(f"{SVG}text")]
    for (word, x), (_, after) in pairwise([word for word in told if "blocks" in word[0]]):
        assert x + 6 * len(word) <= after
    assert [word for word, _ in told if " " in word] == ["0 s", "10 s", "20 s", "30 s"]


def test_a_box_tells_its_layer_and_its_figures_to_who_points_at_it() -> None:
    told = titles(timeline_svg(ROWS, "", stays=STAYS))
    assert "blocks.1.up, 6.00 ms" in told and "blocks.1.up, 2.00 ms, 2.86 MiB" in told
    assert "d2h, 1.00 ms, 488.28 KiB" not in told and "unit 1, 1.00 ms, 488.28 KiB" in told
    assert "blocks.0.up, 976.56 KiB" in told and "blocks.0" in told
    assert "before blocks.0.up, 1.00 ms" in told
    unnamed = [{**row("compute", 0.0, 1.0), "unit": unit} for unit in (0, -1)]
    assert {"unit 0, 1.00 s", "compute, 1.00 s"} <= set(titles(timeline_svg(unnamed, "")))


@pytest.mark.parametrize("name", ["step", "part"])
def test_the_picture_is_the_one_on_file(name: str) -> None:
    window = (13e-3, 16e-3) if name == "part" else None
    text = timeline_svg(ROWS, f"a {name}", stays=STAYS, window=window)
    path = GOLDEN / f"{name}.svg"
    if os.environ.get("OO_REWRITE_GOLDEN"):  # after a deliberate change
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_window_shows_its_part_and_times_since_the_beginning_of_the_step() -> None:
    text = timeline_svg(ROWS, "", window=(13e-3, 16e-3))
    assert [box for box in boxes(text) if box[0] in (COMPUTE, STALL, H2D)] == [
        (COMPUTE, 333.33, 97, 666.67, 28),
        (STALL, 0, 151, 333.33, 28),
        (H2D, 0, 259, 333.33, 28),
    ]
    assert [word for word, _, y in words(text) if y == 309] == [
        f"{3 + 0.5 * i:g} ms" for i in range(7)
    ]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "count", "some"),
    [
        (0.0, 67.1e-3, 7, {0: "0 ms", 6: "60 ms"}),
        (0.0, 12.0, 7, {1: "2 s"}),
        (0.0, 9.0, 5, {1: "2000 ms"}),
        (0.0, 10.0, 6, {5: "10 s"}),
        (0.0, 9.5e-4, 5, {1: "200 us", 4: "800 us"}),
        (0.0, 1e-3, 6, {1: "0.2 ms"}),
        (0.0, 0.0, 1, {0: "0 us"}),
        (129.95e-3, 141e-3, 6, {0: "130 ms", 5: "140 ms"}),  # of a window
    ],
)
def test_times_at_the_axis_are_round_and_few(
    begin_s: float, end_s: float, count: int, some: dict[int, str]
) -> None:
    text = timeline_svg([row("compute", 0.0, end_s)], "", window=(begin_s, end_s))
    axis = [
        (word, x)
        for word, x, y in words(text)
        if " " in word and y == max(y for *_, y in words(text))
    ]
    assert len(axis) == count
    assert {at: axis[at][0] for at in some} == some
    assert all(
        x == pytest.approx(at, abs=0.06)
        for (_, x), at in zip(axis, at_of(axis, begin_s, end_s), strict=True)
    )


def at_of(axis: list[tuple[str, float]], begin_s: float, end_s: float) -> Iterator[float]:
    for word, _ in axis:
        value, unit = word.split()
        second = float(value) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        yield 1000 * (second - begin_s) / max(end_s - begin_s, 1e-12)


def test_pictures_of_several_steps_can_have_one_axis() -> None:
    text = timeline_svg(ROWS, "", span_s=20e-3)
    assert (COMPUTE, 200, 97, 300, 28) in boxes(text), "half as wide"
    assert next(box[1:4:2] for box in boxes(text) if box[0] == REST) == (0, 50)
    assert len([box for box in boxes(text) if box[0] == REST]) == 1, "none after the step's end"
    assert ("20 ms", 1000, 363) in words(text)
    assert timeline_svg(ROWS, "", span_s=9e-3) == timeline_svg(ROWS, "")


def test_what_is_neither_is_the_time_without_computing_and_without_a_stall() -> None:
    rows = [
        row("h2d", 0.0, 4e-3),
        row("stall", 1e-3, 2e-3, 0, "a"),
        row("compute", 2e-3, 6e-3, 0, "a"),
        row("compute", 3e-3, 4e-3, 0, "b"),  # inside another
        row("compute", 6.009e-3, 7e-3, 0, "c"),  # two events in a row
        row("compute", 7.011e-3, 8e-3, 0, "d"),
        row("d2h", 8e-3, 9e-3),
    ]
    assert [
        told for told in titles(timeline_svg(rows, "")) if "before" in told or "end" in told
    ] == [
        "before a, 1.00 ms",
        "before d, 11.0 us",
        "at the end, 1.00 ms",
    ]


def test_a_lane_without_rows_is_left_out_but_those_of_lost_time() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-3)], "")
    lanes = [word for word, x, _ in words(text) if x == 0][-3:]
    assert [lane.split()[0] for lane in lanes] == ["managed", "stalls:", "neither:"]
    assert ElementTree.fromstring(text).attrib["height"] == "247"


def test_a_box_too_narrow_to_see_is_drawn_a_third_of_a_pixel_wide() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-9), row("compute", 1.0, 2.0)], "")
    assert boxes(text)[0][3] == 0.3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (3, [(0.0, 1.0), (300.0, 1.0), (999.0, 1.0)]),
        (2, [(0.0, 301.0), (999.0, 1.0)]),
        (1, [(0.0, 1000.0)]),
    ],
)
def test_no_more_boxes_than_asked_for_the_nearest_are_joined_first(
    limit: int, expected: list[tuple[float, float]]
) -> None:
    rows = [row("compute", start, start + 1.0) for start in (0.0, 300.0, 999.0)]
    text = timeline_svg(rows, "", max_boxes=limit)
    found = [box for box in boxes(text) if box[0] == COMPUTE]
    assert [(x, width) for _, x, _, width, _ in found] == [
        (pytest.approx(x, abs=0.02), pytest.approx(width, abs=0.02)) for x, width in expected
    ]
    told = [told for told in titles(text) if "together" in told]
    assert ("2 together" in told[:1]) == (limit == 2)
    assert ("3 together" in told[:1]) == (limit == 1)


def test_a_box_inside_another_is_counted_once() -> None:
    rows = [row("compute", 0.0, 8.0), row("compute", 2.0, 3.0), row("compute", 9.0, 10.0)]
    assert ("9.00 s", 1000, 74) in words(timeline_svg(rows, ""))


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("transformer_blocks.3.attn.to_q", "transformer_blocks.3"),
        ("0.up", "0"),
        ("blocks.12", "blocks.12"),
        ("blocks.1.a, blocks.2.b", "blocks.1"),
        ("net.layer4.0.conv", "net.layer4.0"),
        ("proj_out", "proj_out"),
        ("", ""),
    ],
)
def test_a_layer_is_of_the_block_with_the_first_number(layer: str, block: str) -> None:
    assert block_of(layer) == block


def names_of_blocks(text: str) -> list[tuple[str, float]]:
    return [
        (str(told.text), figure(told, "x"))
        for told in ElementTree.fromstring(text).iter(f"{SVG}text")
        if told.attrib.get("font-size") == "10"
    ]


@pytest.mark.parametrize("count", [57, 500])
def test_names_of_blocks_do_not_overlap_and_their_lines_are_thinned(count: int) -> None:
    rows = [row("compute", i, i + 0.5, 0, f"single_blocks.{i}.proj") for i in range(count)]
    text = timeline_svg(rows, "")
    named = names_of_blocks(text)
    assert 5 < len(named) < 20
    for (word, x), (_, after) in pairwise(named):
        assert x + 6 * len(word) <= after
    places = marks(text)
    assert {x for _, x in named} <= set(places), "what is named has a line"
    between = [x for x in places if x not in {x for _, x in named}]
    assert 20 < len(places) < 60 and all(b - a >= 24 for a, b in pairwise(between))


def test_a_block_is_marked_once_where_it_begins_and_named_where_there_is_room() -> None:
    rows = [
        row("compute", 0.0, 0.1, 0, "first_layers_of_all"),  # a name without a dot is not cut
        row("compute", 0.4, 0.5, 0, "transformer_blocks.0.to_q"),
        row("compute", 0.5, 0.6, 0, "transformer_blocks.0.to_k"),
        {**row("compute", 0.6, 0.7), "layer": None},
        row("compute", 0.965, 1.0, 0, "last"),
    ]
    text = timeline_svg(rows, "")
    assert marks(text) == [0, 400, 965]
    first, second = ("first_layers_of_all", 0), ("transform.0", 400)
    assert names_of_blocks(text) == [first, second, ("last", 965)]
    late = [*rows[:-1], row("compute", 0.97, 1.0, 0, "last_of_all")]
    assert names_of_blocks(timeline_svg(late, "")) == [first, second], "no room to the right"
    near = [*rows[:1], row("compute", 0.1, 0.2, 0, "b.1"), *rows[1:]]
    text = timeline_svg(near, "")
    assert names_of_blocks(text)[:2] == [first, second], "it would overlap the one before"
    assert marks(text)[:2] == [0, 100], "but there is room for its line"


def test_what_a_part_contains_is_its_first_block_and_its_last() -> None:
    assert blocks_within(ROWS, (10e-3, 20e-3)) == "blocks.0 to blocks.1"
    assert blocks_within(ROWS, (13e-3, 13.5e-3)) == "blocks.0"
    assert blocks_within(ROWS[:2], (10e-3, 20e-3)) == "", "nothing computes"


def test_a_block_that_begins_at_the_end_of_a_window_is_marked() -> None:
    assert marks(timeline_svg(ROWS, "", window=(13e-3, 14e-3))) == [0, 1000]


def test_what_lay_in_the_arena_before_or_after_a_window_is_not_in_its_picture() -> None:
    window = (13e-3, 16e-3)
    there = Stay("blocks.0.up", 0, 64, 12e-3, 14e-3)
    others = [
        there._replace(address=64, begin_s=10e-3, end_s=13e-3),
        there._replace(address=128, begin_s=16e-3, end_s=20e-3),
    ]
    alone = timeline_svg(ROWS, "", stays=[there], window=window)
    assert timeline_svg(ROWS, "", stays=[*others, there], window=window) == alone
    assert timeline_svg(ROWS, "", stays=others, window=window) == timeline_svg(
        ROWS, "", window=window
    )


def test_of_many_weights_those_are_drawn_that_take_most_of_the_picture() -> None:
    small = Stay("blocks.0.up", 0, 10, 11e-3, 12e-3)
    large = Stay("blocks.1.up", 10, 30, 15e-3, 15.5e-3)
    told = titles(timeline_svg(ROWS, "", stays=[small, large], max_boxes=1))
    assert "blocks.1.up, 30 B" in told and "blocks.0.up, 10 B" not in told


def test_the_nearest_boxes_are_joined_first_wherever_they_lie() -> None:
    def left(limit: int, *ends: tuple[float, float]) -> list[str]:
        rows = [row("compute", first, last) for first, last in ends]
        told = titles(timeline_svg(rows, "", max_boxes=limit))
        return [word for word in told if word.startswith(("unit", "2 ", "3 "))]

    late = left(3, (0.0, 1.0), (2.0, 3.0), (900.0, 901.0), (901.5, 902.5))
    assert late == ["unit 1, 1.00 s", "unit 1, 1.00 s", "2 together"]
    # Gaps of 2 and 3 s, looked at with 1, 2 and 4.
    exact = left(3, (0.0, 1.0), (3.0, 4.0), (7.0, 8.0), (19_999.0, 20_000.0))
    assert exact == ["2 together", "unit 1, 1.00 s", "unit 1, 1.00 s"]


def test_gaps_as_short_as_two_events_in_a_row_are_not_told() -> None:
    floor_s = 10e-6
    assert what_to_look_at([row("stall", 0.0, floor_s)]) == "Nothing was timed."
    rows = [row("compute", -1.0, 0.0), row("compute", floor_s, 1.0)]
    assert not [told for told in titles(timeline_svg(rows, "")) if told.startswith("before")]


def test_a_copy_without_a_length_has_no_rate() -> None:
    rows = [row("compute", 0.0, 1e-4), row("h2d", 0.0, 0.0, 1 << 20)]
    text = timeline_svg(rows, "")
    assert "0.00 ms, 1.00 MiB" in [word for word, _, _ in words(text)]
    assert "unit 1, 0.10 ms" in titles(text)


def test_a_step_of_many_uses_is_cut_into_windows_without_a_gap() -> None:
    rows = [row("compute", i, i + 0.5) for i in range(1512)]
    windows = details(rows)
    assert len(windows) == 19 and windows[0][0] == 0 and windows[-1][1] == pytest.approx(1511.5)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(windows))
    assert details(rows[:80]) == [] and len(details(rows[:81])) == 2
    assert len(details([row("compute", i, i + 0.5) for i in range(5000)])) == 24
    assert details([row("compute", i, i + 0.5) for i in range(7, 100)]) == [
        (7, 53.25),
        (53.25, 99.5),
    ]


def test_one_sentence_says_what_to_look_at() -> None:
    link = [
        row("h2d", 0.0, 1.0),
        row("compute", 0.5, 0.6, 0, "a"),
        row("stall", 0.1, 0.5, 0, "b, c"),
    ]
    link += [row("stall", 0.7, 0.8, 0, "c"), row("stall", 0.9, 1.0, 0, "b, c")]
    assert what_to_look_at(link) == (
        "Look at the red: for 600.00 ms of 1.00 s the device waits for copies, longest for b +1 "
        "(500.00 ms); copies keep the link busy for 100% of the time."
    )
    host = [row("compute", 0.0, 0.2), row("compute", 0.5, 0.7, 0, "a"), row("h2d", 0.0, 0.1)]
    host += [row("stall", 0.7, 0.8), row("compute", 0.9, 1.0, 0, "b")]
    assert what_to_look_at(host) == (
        "Look at the orange: for 400.00 ms of 1.00 s no managed layer computes and no copy is "
        "waited for, longest before a (300.00 ms): other operators compute, or the host has "
        "queued nothing; copies keep the link busy for 10% of the time."
    )
    compute = [row("compute", 0.0, 0.9), row("compute", 0.8, 1.0), row("h2d", 0.0, 0.1)]
    assert what_to_look_at(compute) == (
        "Look at the blue: managed layers compute for 100% of 1.00 s, and copies hide behind them; "
        "copies keep the link busy for 10% of the time."
    )
    assert what_to_look_at([]) == "Nothing was timed."
    ElementTree.fromstring(timeline_svg([], "nothing <happened> & so on"))
