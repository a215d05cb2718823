"""The picture of a step: every box at its place, to the last digit."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from oracle_offload.views.timeline import timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def row(kind: str, start_s: float, end_s: float, nbytes: int = 0) -> dict[str, object]:
    return {"kind": kind, "unit": 1, "start_s": start_s, "end_s": end_s, "bytes": nbytes}


ROWS = [
    row("h2d", 12e-3, 14e-3, 3_000_000),  # not in the order of time
    row("h2d", 10e-3, 11e-3, 1_000_000),
    row("compute", 11e-3, 12e-3, 5),
    row("compute", 14e-3, 20e-3, 5),
    row("stall", 12e-3, 14e-3),
    row("stall", 14e-3, 14.01e-3),  # as short as two events in a row
    row("stall", 9e-3, 9.005e-3),  # shorter, and before everything else
    row("d2h", 19e-3, 20e-3, 500_000),
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


def test_every_row_is_a_box_at_its_time_in_the_lane_of_its_kind() -> None:
    # 10 ms from 150 to 964: 81.4 to the millisecond.
    text = timeline_svg(ROWS, "a <step>")
    assert boxes(text) == [
        ("white", 0, 0, 1000, 266),
        ("#f2f2f2", 150, 56, 814, 34),
        ("#4c78a8", 231.4, 56, 81.4, 34),
        ("#4c78a8", 475.6, 56, 488.4, 34),
        ("#f2f2f2", 150, 100, 814, 34),
        ("#e45756", 312.8, 100, 162.8, 34),
        ("#f2f2f2", 150, 144, 814, 34),
        ("#54a24b", 150, 144, 81.4, 34),
        ("#54a24b", 312.8, 144, 162.8, 34),
        ("#f2f2f2", 150, 188, 814, 34),
        ("#b279a2", 882.6, 188, 81.4, 34),
    ]
    assert words(text) == [
        ("a <step>", 150, 24),
        ("managed layers", 8, 71),
        ("7.00 ms", 8, 86),
        ("stalls", 8, 115),
        ("2.00 ms", 8, 130),
        ("copies to the device", 8, 159),
        ("3.00 ms, 4.0 MB", 8, 174),
        ("copies to the host", 8, 203),
        ("1.00 ms, 0.5 MB", 8, 218),
        ("0.00 ms", 150, 252),
        ("2.00 ms", 312.8, 252),
        ("4.00 ms", 475.6, 252),
        ("6.00 ms", 638.4, 252),
        ("8.00 ms", 801.2, 252),
        ("10.00 ms", 964, 252),
    ]
    ticks = ElementTree.fromstring(text).findall(f"{SVG}line")
    assert [(tick.attrib["x1"], tick.attrib["x2"]) for tick in ticks][1] == ("312.8", "312.8")
    assert {(tick.attrib["y1"], tick.attrib["y2"]) for tick in ticks} == {("56", "236")}


def test_a_lane_without_rows_is_left_out_but_that_of_the_stalls() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-3)], "")
    assert [word for word, _, _ in words(text) if "ms" not in word][1:] == [
        "managed layers",
        "stalls",
    ]
    assert boxes(text)[0] == ("white", 0, 0, 1000, 178)


def test_a_box_too_narrow_to_see_is_drawn_a_third_of_a_pixel_wide() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-9), row("compute", 1.0, 2.0)], "")
    assert boxes(text)[2][3] == 0.3


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (3, [(150.0, 0.81), (394.2, 0.81), (963.18, 0.81)]),
        (2, [(150.0, 245.01), (963.18, 0.81)]),
        (1, [(150.0, 813.99)]),
    ],
)
def test_no_more_boxes_than_asked_for_the_nearest_are_joined_first(
    limit: int, expected: list[tuple[float, float]]
) -> None:
    rows = [row("compute", start, start + 1.0) for start in (0.0, 300.0, 999.0)]
    found = [box for box in boxes(timeline_svg(rows, "", max_boxes=limit)) if box[0] == "#4c78a8"]
    assert [(x, width) for _, x, _, width, _ in found] == [
        (pytest.approx(x, abs=0.02), pytest.approx(width, abs=0.02)) for x, width in expected
    ]


def test_a_box_inside_another_does_not_shorten_it() -> None:
    rows = [row("compute", 0.0, 8.0), row("compute", 2.0, 3.0), row("compute", 9.0, 10.0)]
    found = [box for box in boxes(timeline_svg(rows, "")) if box[0] == "#4c78a8"]
    assert [(x, width) for _, x, _, width, _ in found] == [(150.0, 651.2), (882.6, 81.4)]
