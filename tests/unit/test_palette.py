"""The colours of pages and pictures: enough contrast to be read, and to be distinguished.

The contrast is that of WCAG 2.2: 4.5 to the background for text, and here for marks as well; 3
between what is side by side.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from test_timeline import ROWS, STAYS

from oracle_offload.observe.bars import LOOKS, colour_of, html_bar
from oracle_offload.observe.memory import show_size
from oracle_offload.observe.page import STYLE, fragment, page
from oracle_offload.observe.palette import COLOURS, GROUND
from oracle_offload.observe.timeline import timeline_svg

ROOT = Path(__file__).resolve().parents[2]
THEMES = pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])


def channels(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def luminance(colour: str) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def mixed(colour: str, ground: str, opacity: float) -> str:
    pairs = zip(channels(colour), channels(ground), strict=True)
    shares = (opacity * a + (1 - opacity) * b for a, b in pairs)
    return "#" + "".join(f"{round(255 * share):02x}" for share in shares)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert mixed("#000000", "#ffffff", 0.75) == "#404040"


@THEMES
@pytest.mark.parametrize("name", [name for name in COLOURS if name != "ground"])
def test_every_colour_stands_out_from_its_background(name: str, theme: int) -> None:
    assert contrast(COLOURS[name][theme], GROUND[theme]) >= 4.5


@THEMES
def test_text_that_is_less_than_opaque_can_be_read(theme: int) -> None:
    shares = {float(share) for share in re.findall(r"opacity:([\d.]+)", STYLE)}
    assert shares
    for share in shares:
        said = mixed(COLOURS["ink"][theme], GROUND[theme], share)
        assert contrast(said, GROUND[theme]) >= 4.5


def test_a_mark_on_a_colour_of_its_own_can_be_read() -> None:
    (found,) = re.findall(r"background:(#\w{6});color:#fff\b", STYLE)
    assert contrast(found, "#ffffff") >= 4.5


BESIDE = [
    ("weights", "arena"),
    ("activations", "arena"),
    ("not distinguished", "arena"),
    ("gradients", "arena"),
    ("gradients", "optimizer state"),
    ("optimizer state", "activations"),
    ("arena", "cached"),
    ("cached", "other processes"),
    ("weights", "optimizer state"),
    ("optimizer state", "other tensors"),
    ("page-locked", "pageable"),
    ("pageable", "page cache"),
    ("page cache", "everything else"),
    ("tensors", "cached"),
    ("other processes", "outside"),
]


@THEMES
@pytest.mark.parametrize(("left", "right"), BESIDE, ids=" | ".join)
def test_neighbours_in_a_bar_are_told_apart(left: str, right: str, theme: int) -> None:
    one, other = (COLOURS[colour_of(name)][theme] for name in (left, right))
    assert contrast(one, other) >= 3


BARS = [
    ["weights", "gradients", "optimizer state", "activations", "arena", "cached"],
    ["weights", "gradients", "not distinguished", "arena", "cached", "other processes"],
    ["arena", "weights", "gradients", "optimizer state", "other tensors", "cached"],
    ["page-locked", "pageable", "page cache", "everything else"],
    ["tensors", "cached", "other processes", "outside"],
]


@THEMES
@pytest.mark.parametrize("bar", BARS, ids=lambda bar: str(bar[0]))
def test_no_two_parts_of_a_bar_look_alike(bar: list[str], theme: int) -> None:
    for one, other in combinations(bar, 2):
        pair = [channels(COLOURS[colour_of(name)][theme]) for name in (one, other)]
        # Far apart in hue, or in how light they are: the distance in the cube of red, green, blue.
        far = sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5
        assert far >= 0.2, (one, other)


@THEMES
def test_blocks_in_the_arena_that_follow_one_another_are_told_apart(theme: int) -> None:
    blocks = [pair[theme] for name, pair in COLOURS.items() if name.startswith("arena-")]
    assert len(blocks) >= 4
    for one, other in pairwise([*blocks, blocks[0]]):
        assert contrast(one, other) >= 3


def test_every_part_has_a_colour_and_what_is_free_is_left_empty() -> None:
    assert {colour_of(name) for name in LOOKS} - {""} <= set(COLOURS)
    bar = "\n".join(html_bar([("arena", 3), ("cached", 0), ("free", 1), ("new", 2)], show_size))
    drawn = dict(re.findall(r'<div style="width:[\d.]+%;([^"]*)" title="(\S+)', bar))
    assert drawn == {
        "background:var(--oo-arena)": "arena",
        "": "free",
        "background:var(--oo-unknown)": "unknown",
    }
    assert "gap:2px" in STYLE, "the background shows between two parts"


@pytest.mark.parametrize("what", ["page", "picture", "part of a page"])
def test_no_colour_is_used_that_no_theme_knows(what: str) -> None:
    """Each colour is a variable that light and dark have; a picture's are also written plainly."""
    drawn: dict[str, Any] = {
        "page": lambda: page("x", fragment("x", html_bar([("arena", 1)], show_size))),
        "picture": lambda: timeline_svg(ROWS, "", stays=STAYS),
        "part of a page": lambda: timeline_svg(ROWS, "", stays=STAYS, fluid=True),
    }
    text = drawn[what]()
    used = set(re.findall(r"var\(--oo-([\w-]+)\)", text))
    defined = re.findall(r"--oo-([\w-]+):(#\w{6})", text)
    assert used and used <= {name for name, _ in defined}
    for name, colour in defined:
        assert colour in COLOURS[name]
    for dark in ("prefers-color-scheme:dark", "data-jp-theme-light=false", ".vscode-dark"):
        assert dark in text
    plain = set(re.findall(r'(?:fill|stroke)="(#\w+)"', text))
    assert plain <= {light for light, _ in COLOURS.values()} | {"#fff"}


def test_explaining_draws_with_the_same_colours_where_no_template_can_be_read() -> None:
    code = """if True:
        import sys
        sys.modules["jinja2"] = sys.modules["markupsafe"] = None
        from oracle_offload.diagnose.explain import explain_oom
        print(explain_oom(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 "
            "GiB of which 1.00 GiB is free. Of the allocated memory 20.00 GiB is allocated by "
            "PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated."
        ).to_html())
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "background:var(--oo-tensors)" in done.stdout, done.stderr
