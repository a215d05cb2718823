"""The picture of a step: every box at its place, to the last digit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oracle_offload.views.timeline import Stay, block_of, details, timeline_svg, what_to_look_at

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "timeline"
COMPUTE, STALL, H2D, D2H, LANE = "#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f2f2f2"
REST, ARENA = "#eeca3b", "#72b7b2"


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
    return [
        (
            element.attrib["fill"],
            *(float(element.attrib.get(name, 0)) for name in ("x", "y", "width", "height")),
        )
        for element in ElementTree.fromstring(text).iter(f"{SVG}rect")
    ]


def words(text: str) -> list[tuple[str, float, float]]:
    return [
        (str(element.text), float(element.attrib["x"]), float(element.attrib["y"]))
        for element in ElementTree.fromstring(text).iter(f"{SVG}text")
    ]


def titles(text: str) -> list[str]:
    return [str(element.text) for element in ElementTree.fromstring(text).iter(f"{SVG}title")]


def test_every_row_is_a_box_at_its_time_in_the_lane_of_its_kind() -> None:
    # 10 ms from 170 to 970: 80 to the millisecond. Names of blocks stand above the lanes.
    text = timeline_svg(ROWS, "a <step>", stays=STAYS)
    assert boxes(text) == [
        ("white", 0, 0, 1000, 656),
        (LANE, 170, 102, 800, 34),
        (COMPUTE, 250, 102, 80, 34),
        (COMPUTE, 490, 102, 480, 34),
        (LANE, 170, 146, 800, 34),
        (STALL, 330, 146, 160, 34),
        (LANE, 170, 190, 800, 34),
        (REST, 170, 190, 80, 34),  # the first three rows together are the whole time
        (LANE, 170, 234, 800, 34),
        (H2D, 170, 234, 80, 34),
        (H2D, 330, 234, 160, 34),
        (LANE, 170, 278, 800, 34),
        (D2H, 890, 278, 80, 34),
        (LANE, 170, 322, 800, 180),
        (ARENA, 250, 322, 320, 45),  # a quarter of the bytes; the gap between the two is closed
        ("#d8c8a8", 490, 367, 480, 135),
        (COMPUTE, 170, 538, 12, 12),
        (STALL, 170, 556, 12, 12),
        (REST, 170, 574, 12, 12),
        (H2D, 170, 592, 12, 12),
        (D2H, 170, 610, 12, 12),
        (ARENA, 170, 628, 12, 12),
    ]
    said = words(text)
    assert said[0] == ("a <step>", 8, 24)
    assert said[1:3] == [
        (
            "Look at the red: for 2.00 ms of 10.00 ms the device waits for copies, longest for "
            "blocks.1.up (2.00 ms); copies keep the link busy for 30%",
            8,
            46,
        ),
        ("of the time.", 8, 62),
    ]
    assert said[3:19] == [
        ("blocks.0", 250, 96),
        ("blocks.1", 490, 96),
        ("managed layers", 8, 117),
        ("7.00 ms", 8, 132),
        ("stalls", 8, 161),
        ("2.00 ms", 8, 176),
        ("neither of the two", 8, 205),
        ("1.00 ms", 8, 220),
        ("copies to the device", 8, 249),
        ("3.00 ms, 3.81 MiB, 1.3 GB/s", 8, 264),
        ("copies to the host", 8, 293),
        ("1.00 ms, 488.28 KiB, 0.5 GB/s", 8, 308),
        ("arena", 8, 337),
        ("3.81 MiB", 8, 352),
        ("0 ms", 170, 526),
        ("2 ms", 330, 526),
    ]
    lines = ElementTree.fromstring(text).findall(f"{SVG}line")
    assert [(line.attrib["x1"], line.attrib["y1"], line.attrib["y2"]) for line in lines] == [
        ("250.00", "88", "512"),
        ("490.00", "88", "512"),
        *((f"{170 + 160 * i}.0", "102", "512") for i in range(6)),
    ]


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
    assert text == (GOLDEN / f"{name}.svg").read_text(encoding="utf-8")


def test_a_window_shows_its_part_and_times_since_the_beginning_of_the_step() -> None:
    text = timeline_svg(ROWS, "", window=(13e-3, 16e-3))
    assert [box for box in boxes(text) if box[0] in (COMPUTE, STALL, H2D) and box[3] > 12] == [
        (COMPUTE, 436.67, 102, 533.33, 34),
        (STALL, 170, 146, 266.67, 34),
        (H2D, 170, 234, 266.67, 34),
    ]
    assert [word for word, _, y in words(text) if y == 292] == [
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
    axis = [(word, x) for word, x, y in words(text) if y == 230]
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
        yield 170 + 800 * (second - begin_s) / max(end_s - begin_s, 1e-12)


def test_pictures_of_several_steps_can_have_one_axis() -> None:
    text = timeline_svg(ROWS, "", span_s=20e-3)
    assert (COMPUTE, 330, 102, 240, 34) in boxes(text), "half as wide"
    assert next(box[1:4:2] for box in boxes(text) if box[0] == REST) == (170, 40)
    assert len([box for box in boxes(text) if box[0] == REST]) == 2, "none after the step's end"
    assert ("20 ms", 970, 336) in words(text)
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
    names = [word for word, x, _ in words(text) if x == 8]
    assert names[-6::2] == ["managed layers", "stalls", "neither of the two"]
    assert boxes(text)[0] == ("white", 0, 0, 1000, 306)


def test_a_box_too_narrow_to_see_is_drawn_a_third_of_a_pixel_wide() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-9), row("compute", 1.0, 2.0)], "")
    assert boxes(text)[2][3] == 0.3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (3, [(170.0, 0.8), (410.0, 0.8), (969.2, 0.8)]),
        (2, [(170.0, 240.8), (969.2, 0.8)]),
        (1, [(170.0, 800.0)]),
    ],
)
def test_no_more_boxes_than_asked_for_the_nearest_are_joined_first(
    limit: int, expected: list[tuple[float, float]]
) -> None:
    rows = [row("compute", start, start + 1.0) for start in (0.0, 300.0, 999.0)]
    text = timeline_svg(rows, "", max_boxes=limit)
    found = [box for box in boxes(text)[1:] if box[0] == COMPUTE and box[3] != 12]
    assert [(x, width) for _, x, _, width, _ in found] == [
        (pytest.approx(x, abs=0.02), pytest.approx(width, abs=0.02)) for x, width in expected
    ]
    told = [told for told in titles(text) if "together" in told]
    assert ("2 together" in told[:1]) == (limit == 2)
    assert ("3 together" in told[:1]) == (limit == 1)


def test_a_box_inside_another_is_counted_once() -> None:
    rows = [row("compute", 0.0, 8.0), row("compute", 2.0, 3.0), row("compute", 9.0, 10.0)]
    assert ("9.00 s", 8, 114) in words(timeline_svg(rows, ""))


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


def test_names_of_blocks_do_not_overlap() -> None:
    for count in (57, 500):
        rows = [row("compute", i, i + 0.5, 0, f"single_blocks.{i}.proj") for i in range(count)]
        named = [(word, x) for word, x, y in words(timeline_svg(rows, "")) if y == 96]
        assert 5 < len(named) < 20
        for (word, x), (_, after) in pairwise(named):
            assert x + 6 * len(word) <= after
        lines = ElementTree.fromstring(timeline_svg(rows, "")).findall(f"{SVG}line")
        assert len([line for line in lines if line.attrib["stroke"] == "#888"]) == count


def test_a_block_is_marked_once_where_it_begins_and_named_where_there_is_room() -> None:
    rows = [
        row("compute", 0.0, 0.1, 0, "first_layers_of_all"),  # a name without a dot is not cut
        row("compute", 0.4, 0.5, 0, "transformer_blocks.0.to_q"),
        row("compute", 0.5, 0.6, 0, "transformer_blocks.0.to_k"),
        {**row("compute", 0.6, 0.7), "layer": None},
        row("compute", 0.96, 1.0, 0, "last"),
    ]
    text = timeline_svg(rows, "")
    lines = ElementTree.fromstring(text).findall(f"{SVG}line")
    marks = [line.attrib["x1"] for line in lines if line.attrib["stroke"] == "#888"]
    assert marks == ["170.00", "490.00", "938.00"]
    named = [(word, x) for word, x, y in words(text) if y == 96]
    assert named == [("first_layers_of_all", 170), ("transform.0", 490), ("last", 938)]
    late = [*rows[:-1], row("compute", 0.97, 1.0, 0, "last_of_all")]
    assert [word for word, _, y in words(timeline_svg(late, "")) if y == 96] == [
        "first_layers_of_all",
        "transform.0",
    ], "there is no room for the name to the right"
    near = [*rows[:1], row("compute", 0.1, 0.2, 0, "b.1"), *rows[1:]]
    assert [word for word, _, y in words(timeline_svg(near, "")) if y == 96][:2] == [
        "first_layers_of_all",
        "transform.0",
    ], "it would lie on the one before"


def test_a_block_that_begins_at_the_end_of_a_window_is_marked() -> None:
    text = timeline_svg(ROWS, "", window=(13e-3, 14e-3))
    lines = ElementTree.fromstring(text).findall(f"{SVG}line")
    marks = [line.attrib["x1"] for line in lines if line.attrib["stroke"] == "#888"]
    assert marks == ["170.00", "970.00"]


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
        "Look at the yellow: for 400.00 ms of 1.00 s no managed layer computes and no copy is "
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
