"""The picture of a step: every box at its place, to the last digit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oracle_offload.views.timeline import Stay, block_of, details, timeline_svg, what_to_look_at

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "timeline"
COMPUTE, STALL, H2D, D2H, LANE = "#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f2f2f2"


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
        ("white", 0, 0, 1000, 594),
        (LANE, 170, 102, 800, 34),
        (COMPUTE, 250, 102, 80, 34),
        (COMPUTE, 490, 102, 480, 34),
        (LANE, 170, 146, 800, 34),
        (STALL, 330, 146, 160, 34),
        (LANE, 170, 190, 800, 34),
        (H2D, 170, 190, 80, 34),
        (H2D, 330, 190, 160, 34),
        (LANE, 170, 234, 800, 34),
        (D2H, 890, 234, 80, 34),
        (LANE, 170, 278, 800, 180),
        (COMPUTE, 250, 278, 320, 45),  # a quarter of the bytes; the gap between the two is closed
        ("#9ecae9", 490, 323, 480, 135),
        (COMPUTE, 170, 494, 12, 12),
        (STALL, 170, 512, 12, 12),
        (H2D, 170, 530, 12, 12),
        (D2H, 170, 548, 12, 12),
        (COMPUTE, 170, 566, 12, 12),
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
    assert said[3:17] == [
        ("blocks.0", 250, 96),
        ("blocks.1", 490, 96),
        ("managed layers", 8, 117),
        ("7.00 ms", 8, 132),
        ("stalls", 8, 161),
        ("2.00 ms", 8, 176),
        ("copies to the device", 8, 205),
        ("3.00 ms, 3.81 MiB, 1.3 GB/s", 8, 220),
        ("copies to the host", 8, 249),
        ("1.00 ms, 488.28 KiB, 0.5 GB/s", 8, 264),
        ("arena", 8, 293),
        ("3.81 MiB", 8, 308),
        ("0.00 ms", 170, 482),
        ("2.00 ms", 330, 482),
    ]
    lines = ElementTree.fromstring(text).findall(f"{SVG}line")
    assert [(line.attrib["x1"], line.attrib["y1"], line.attrib["y2"]) for line in lines] == [
        ("250.00", "88", "468"),
        ("490.00", "88", "468"),
        *((f"{170 + 160 * i}.0", "102", "468") for i in range(6)),
    ]


def test_a_box_tells_its_layer_and_its_figures_to_who_points_at_it() -> None:
    told = titles(timeline_svg(ROWS, "", stays=STAYS))
    assert "blocks.1.up, 6.00 ms" in told and "blocks.1.up, 2.00 ms, 2.86 MiB" in told
    assert "d2h, 1.00 ms, 488.28 KiB" not in told and "unit 1, 1.00 ms, 488.28 KiB" in told
    assert "blocks.0.up, 976.56 KiB" in told and "blocks.0" in told


@pytest.mark.parametrize("name", ["step", "part"])
def test_the_picture_is_the_one_on_file(name: str) -> None:
    window = (13e-3, 16e-3) if name == "part" else None
    text = timeline_svg(ROWS, f"a {name}", stays=STAYS, window=window)
    assert text == (GOLDEN / f"{name}.svg").read_text(encoding="utf-8")


def test_a_window_shows_its_part_and_times_since_the_beginning_of_the_recording() -> None:
    text = timeline_svg(ROWS, "", window=(13e-3, 16e-3))
    assert [box for box in boxes(text) if box[0] in (COMPUTE, STALL, H2D) and box[3] > 12] == [
        (COMPUTE, 436.67, 102, 533.33, 34),
        (STALL, 170, 146, 266.67, 34),
        (H2D, 170, 190, 266.67, 34),
    ]
    assert [word for word, _, y in words(text) if word.endswith("ms") and y > 230] == [
        f"{13 + 0.6 * i:.2f} ms" for i in range(6)
    ]


def test_a_lane_without_rows_is_left_out_but_that_of_the_stalls() -> None:
    text = timeline_svg([row("compute", 0.0, 1e-3)], "")
    names = [word for word, x, _ in words(text) if x == 8]
    assert names[-4::2] == ["managed layers", "stalls"]
    assert boxes(text)[0] == ("white", 0, 0, 1000, 244)


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
    assert ("2 together" in titles(text)) == (limit == 2)
    assert ("3 together" in titles(text)) == (limit == 1)


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
        assert len(lines) == count + 6


def test_a_step_of_many_uses_is_cut_into_windows_without_a_gap() -> None:
    rows = [row("compute", i, i + 0.5) for i in range(1512)]
    windows = details(rows)
    assert len(windows) == 19 and windows[0][0] == 0 and windows[-1][1] == pytest.approx(1511.5)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(windows))
    assert details(rows[:80]) == [] and len(details(rows[:81])) == 2
    assert len(details([row("compute", i, i + 0.5) for i in range(5000)])) == 24


def test_one_sentence_says_what_to_look_at() -> None:
    link = [row("h2d", 0.0, 1.0), row("compute", 0.5, 0.6, 0, "a"), row("stall", 0.1, 0.3, 0, "b")]
    assert what_to_look_at(link) == (
        "Look at the red: for 200.00 ms of 1.00 s the device waits for copies, longest for b "
        "(200.00 ms); copies keep the link busy for 100% of the time."
    )
    host = [row("compute", 0.0, 0.2), row("compute", 0.8, 1.0), row("h2d", 0.0, 0.1)]
    assert what_to_look_at(host) == (
        "Look at the gaps between the blue: managed layers compute for 40% of 1.00 s, hardly "
        "anything waits for copies, and copies keep the link busy for 10% of the time; the rest "
        "are other operators, or the host had queued nothing."
    )
    compute = [row("compute", 0.0, 0.9), row("compute", 0.8, 1.0), row("h2d", 0.0, 0.1)]
    assert what_to_look_at(compute) == (
        "Look at the blue: managed layers compute for 100% of 1.00 s, and copies hide behind them; "
        "copies keep the link busy for 10% of the time."
    )
    assert what_to_look_at([]) == "Nothing was timed."
    ElementTree.fromstring(timeline_svg([], "nothing <happened> & so on"))
