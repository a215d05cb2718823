"""Who holds memory: the parts of the bars, and how a report shows them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_summary_table import DEVICE, MODEL  # noqa: E402

from oracle_offload.observe.bars import html_bar, text_bar  # noqa: E402
from oracle_offload.observe.memory import (  # noqa: E402
    Memory,
    device_memory,
    host_memory,
    show_size,
)
from oracle_offload.observe.summary import (  # noqa: E402
    MemoryReport,
    PhaseUsage,
    StalledLayer,
    Usage,
)
from oracle_offload.observe.verdict import Verdict  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "data" / "summary" / "page.html"
GIB = 1 << 30
CARD = {
    "allocated": 12 * GIB,
    "cached": GIB,
    "arena": 6 * GIB,
    "weights": 2 * GIB,
    "gradients": GIB // 2,
    "optimizer": GIB,
}
VERDICT = Verdict("link", "", 4, 1.5, 0.5, 0.1, 0.9, 1.2, 0.584, 1.25, 0.0125, 0.0)
GOLDEN = """\
cpu is link-bound: of the 1.50 s of a step it waits 500.00 ms for copies; a step
could take 1.25 s at best (now 1.20 times that); one more GiB of arena would save
12.50 ms, one more GiB of page-locked RAM nothing.
Copies to the device take 1.20 s of a step, of which 58% held nothing up (mean of
4 steps).
cuda:1 could not be read: <lost>

card: 24.00 GiB
  [######ggoooaaaaaaaaAAAAAAAAAAAAAAAAAAA+++@@@@@@@............................]
   # weights 2.00 GiB  g gradients 512.00 MiB  o optimizer state 1.00 GiB
   a activations 2.50 GiB  A arena 6.00 GiB  + cached 1.00 GiB
   @ other processes 2.00 GiB  . free 9.00 GiB

|====="""


def sizes(memory: Memory) -> dict[str, int | None]:
    return memory.parts


def test_the_parts_of_a_card_add_up() -> None:
    memory = device_memory("card", 9 * GIB, 24 * GIB, **CARD)
    found = sizes(memory)
    assert found["activations"] == 12 * GIB - 9 * GIB - GIB // 2
    assert found["other processes"] == 24 * GIB - 9 * GIB - 12 * GIB - GIB
    assert (found["cached"], found["free"], found["arena"]) == (GIB, 9 * GIB, 6 * GIB)
    assert sum(size or 0 for size in found.values()) == memory.total_bytes == 24 * GIB
    assert memory.notes == []


def test_activations_are_unknown_without_the_optimizers_state() -> None:
    memory = device_memory("card", 9 * GIB, 24 * GIB, **{**CARD, "optimizer": None})
    found = sizes(memory)
    assert found["activations"] is None and found["optimizer state"] is None
    assert found["not distinguished"] == 12 * GIB - 8 * GIB - GIB // 2
    assert sum(size or 0 for size in found.values()) == 24 * GIB
    assert "optimizer=" in memory.notes[0]
    text = "\n".join(text_bar(list(memory.parts.items()), 82, show_size))
    assert "a activations unknown" in text and "activations 0" not in text
    assert "activations unknown" in "".join(html_bar(list(memory.parts.items()), show_size))


def test_the_simulated_driver_knows_of_the_arena_alone() -> None:
    changed = {**CARD, "allocated": None, "cached": 0, "optimizer": None}
    memory = device_memory("sim", 18 * GIB, 24 * GIB, **changed)
    found = sizes(memory)
    assert found["activations"] is None and "not distinguished" not in found
    assert found["free"] == 18 * GIB - 2 * GIB - GIB // 2 and found["other processes"] == 0
    assert sum(size or 0 for size in found.values()) == 24 * GIB
    assert "simulated" in memory.notes[0]


def test_a_device_that_does_not_answer_is_unknown() -> None:
    for allocated in (None, 12 * GIB):
        found = sizes(device_memory("card", None, None, **{**CARD, "allocated": allocated}))
        assert found["free"] is None and found["other processes"] is None
    # Figures read one after the other may contradict one another.
    odd = sizes(device_memory("card", 23 * GIB, 24 * GIB, **{**CARD, "allocated": GIB}))
    assert odd["activations"] == odd["other processes"] == 0


@pytest.mark.parametrize("allocated", [None, 12 * GIB])
@pytest.mark.parametrize(("free", "total"), [(None, 24 * GIB), (9 * GIB, None)])
def test_other_processes_are_unknown_where_either_figure_is(
    allocated: int | None, free: int | None, total: int | None
) -> None:
    figures: dict[str, Any] = {**CARD, "allocated": allocated}
    memory = device_memory("card", free, total, **figures)
    assert memory.parts["other processes"] is None and memory.total_bytes == total
    assert memory.parts["weights"] == 2 * GIB


def test_a_bar_of_what_is_not_known_is_empty_and_a_line_is_as_long_as_fits() -> None:
    assert text_bar([("free", None)], 82, show_size) == ["  []", "   . free unknown"]
    for room, lines in (
        (20, ["   . free {0}  A arena {0}"]),
        (21, ["   . free {0}", "   A arena {0}"]),
    ):
        (bar, *found) = text_bar([("free", 1), ("arena", 1)], 60, ["", "x" * room].__getitem__)
        assert bar == f"  [{'.' * 27}{'A' * 27}]"
        assert found == [line.format("x" * room) for line in lines]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_hosts_memory(tmp_path: Path) -> None:
    table = "MemTotal: 1000 kB\nMemFree: 400 kB\nBuffers: 20 kB\nCached: 180 kB\n"
    write(tmp_path, "proc/meminfo", table)
    memory = host_memory(100 << 10, 50 << 10, str(tmp_path))
    found = {name: None if size is None else size >> 10 for name, size in memory.parts.items()}
    assert found == {
        "page-locked": 100,
        "pageable": 50,
        "page cache": 200,
        "everything else": 250,
        "free": 400,
    }
    assert memory.total_bytes == 1000 << 10 and memory.notes == []
    crowded = host_memory(900 << 10, 50 << 10, str(tmp_path)).parts
    assert crowded["everything else"] == 0


@pytest.mark.parametrize(
    ("table", "total", "cache", "others", "free"),
    [
        ("Buffers: 20 kB\nCached: 180 kB\n", None, 200, None, None),
        ("MemTotal: 1000 kB\n", 1000, None, None, None),
        ("MemFree: 400 kB\n", None, None, None, 400),
        ("MemTotal: 1000 kB\nMemFree: 400 kB\nCached: 180 kB\n", 1000, None, 450, 400),
    ],
)
def test_what_the_host_does_not_tell_is_unknown(
    tmp_path: Path,
    table: str,
    total: int | None,
    cache: int | None,
    others: int | None,
    free: int | None,
) -> None:
    write(tmp_path, "proc/meminfo", table)
    memory = host_memory(100 << 10, 50 << 10, str(tmp_path))
    found = [memory.total_bytes, *list(memory.parts.values())[2:]]
    assert [None if size is None else size >> 10 for size in found] == [total, cache, others, free]
    assert bool(memory.notes) == (free is None)


@pytest.mark.parametrize(
    ("limit", "holds"), [("600", True), ("999", True), ("1000", False), ("2000000", False)]
)
def test_the_hosts_memory_within_a_control_group(tmp_path: Path, limit: str, holds: bool) -> None:
    table = "MemTotal: 1000 kB\nMemFree: 400 kB\nBuffers: 20 kB\nCached: 180 kB\n"
    write(tmp_path, "proc/meminfo", table)
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    mount = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    write(tmp_path, "proc/self/mountinfo", mount)
    write(tmp_path, "sys/fs/cgroup/a/memory.max", str(int(limit) << 10))
    write(tmp_path, "sys/fs/cgroup/a/memory.current", str(500 << 10))
    write(tmp_path, "sys/fs/cgroup/a/memory.stat", f"inactive_file {70 << 10}\n")
    memory = host_memory(100 << 10, 50 << 10, str(tmp_path))
    found = {name: None if size is None else size >> 10 for name, size in memory.parts.items()}
    if holds:
        assert memory.total_bytes == int(limit) << 10
        assert (found["page cache"], found["everything else"]) == (70, 280)
        assert found["free"] == int(limit) - 500
        assert memory.notes == [
            f"the limit of control group /sys/fs/cgroup/a on {limit}.00 KiB holds here"
        ]
        (tmp_path / "proc/meminfo").unlink()
        assert host_memory(100 << 10, 50 << 10, str(tmp_path)) == memory
    else:
        assert memory.total_bytes == 1000 << 10 and memory.notes == []


def test_a_host_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    memory = host_memory(5, 6, str(tmp_path))
    assert memory.total_bytes is None
    assert memory.parts == {
        "page-locked": 5,
        "pageable": 6,
        "page cache": None,
        "everything else": None,
        "free": None,
    }
    assert "does not tell" in memory.notes[0]


def report() -> MemoryReport:
    card = device_memory("card", 9 * GIB, 24 * GIB, **CARD)
    device = replace(DEVICE, verdict=VERDICT)
    return MemoryReport([device], {"cpu": 7}, False, [card], ["cuda:1 could not be read: <lost>"])


def test_the_text_begins_with_the_verdict_and_the_bars() -> None:
    text = str(report())
    assert text.startswith(GOLDEN)
    assert text.endswith(str(MemoryReport([DEVICE], {"cpu": 7})))


def test_what_a_reader_has_to_know_of_a_bar_stands_below_it() -> None:
    alone = MemoryReport([], memory=[Memory("host memory", 4, {"free": 4}, ["a <limit> holds"])])
    assert str(alone) == (
        "oracle_offload: no model is attached\n\nhost memory: 4 B\n"
        f"  [{'.' * 76}]\n   . free 4 B\n   a <limit> holds"
    )
    page = alone._repr_html_()
    assert page.count("oo-why") == page.count('<p class="oo-why">a &lt;limit&gt; holds</p>') + 1
    assert page.endswith("holds</p>\n</div>\n")


def test_the_page_is_the_one_on_file() -> None:
    stalled = [StalledLayer("blocks.3.<up>", 8, 6, 0.012)]
    model = replace(MODEL, stalled=stalled)
    alike = {name: getattr(model, name) for name in Usage.__dataclass_fields__ if name != "name"}
    times = {"training": (1.5, 1.2), "sampling": (0.25, None)}
    phases = [
        PhaseUsage(name=name, seconds=seconds, bound_s=bound_s, **alike)
        for name, (seconds, bound_s) in times.items()
    ]
    device = replace(DEVICE, verdict=VERDICT, models=[model], phases=phases)
    page = replace(report(), devices=[device]).to_html()
    if os.environ.get("OO_REWRITE_GOLDEN"):  # look at it in a browser after a change
        PAGE.write_text(page, "utf-8")
    assert page == PAGE.read_text("utf-8")


def test_the_page_has_all_of_the_text_and_no_script() -> None:
    page = report().to_html()
    assert page.startswith("<!DOCTYPE html>") and page.count("<style>") == 2
    assert "<script" not in page and "http" not in page and "&lt;lost&gt;" in page
    words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    order = [
        VERDICT.sentence("cpu"),
        VERDICT.copies(),
        "could not be read",
        "card: 24.00 GiB",
        "activations 2.50 GiB",
        "cpu (NVIDIA GeForce RTX 4090, simulated)",
        "arena 26.00 MiB",
        "host waits 41",
        "Net 12 layers in 9 units",
        "hits 100 of 400 (25.0%)",
        "optimizer state on cpu 7 B",
        "late: not in the arena",
    ]
    places = [words.find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    assert 'style="width:8.33%;background:var(--oo-weights)" title="weights 2.00 GiB"' in page
    short = MemoryReport([DEVICE], {}, True).to_html()
    assert "host waits" not in short and "late:" not in short and "optimizer state on" not in short
    assert "no model is attached" in MemoryReport([]).to_html()


def test_json_has_every_field() -> None:
    data = json.loads(report().to_json())
    assert data == report().to_dict()
    assert data["devices"][0]["verdict"]["bound"] == "link"
    assert data["memory"][0]["parts"]["weights"] == 2 * GIB
    assert data["notes"] == ["cuda:1 could not be read: <lost>"]
    assert data["devices"][0]["models"][0]["hits"] == MODEL.hits
