"""Torch's memory snapshot: read without torch, safely, and summed up by who held the bytes.

The snapshots are made here in the format that ``torch.cuda.memory._snapshot`` documents and
``torch/cuda/_memory_viz.py`` reads, because no GPU is needed for these tests.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.cli import main
from oracle_offload.observe import snapshot_file
from oracle_offload.observe.memory_holders import SnapshotReport
from oracle_offload.observe.snapshot_file import KEY, held, read_snapshot

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[2]
TRAIN = {"filename": "/home/me/train.py", "line": 31, "name": "forward"}
LINEAR = {"filename": "/env/torch/nn/functional.py", "line": 9, "name": "linear"}
ADAM = {"filename": "/env/torch/optim/adamw.py", "line": 122, "name": "_init_group"}
STEP = {"filename": "/home/me/train.py", "line": 40, "name": "main"}
BACKWARD = {"filename": "/env/torch/autograd/__init__.py", "line": 260, "name": "backward"}
NATIVE = {"filename": "??", "line": 0, "name": "c10::Malloc"}


def block(address: int, size: Any, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    found = {"address": address, "size": size, "requested_size": size, "state": state}
    return {**found, "frames": [], **more}


def segment(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    size = sum(b["size"] for b in blocks)
    active = sum(b["size"] for b in blocks if b["state"] != "inactive")
    found = {
        "device": 0,
        "address": blocks[0].get("address", 0x1000),
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    }
    return {**found, **more}


def event(action: str, address: int = 0, size: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, **more}


def snapshot(*segments: dict[str, Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "segments": list(segments),
        "device_traces": [],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }
    return {**found, **more}


FULL = snapshot(
    segment(block(0, 100 * MIB)),
    segment(
        block(1 << 40, 40 * MIB, frames=[NATIVE, LINEAR, TRAIN, STEP]),
        block((1 << 40) + 40 * MIB, 8 * MIB, "inactive"),
        block((1 << 40) + 48 * MIB, 20 * MIB, "active_awaiting_free", frames=[LINEAR, TRAIN]),
        block((1 << 40) + 68 * MIB, 30 * MIB, frames=[ADAM, STEP]),
        block((1 << 40) + 98 * MIB, 2 * MIB, frames=[BACKWARD, STEP]),
        block((1 << 40) + 100 * MIB, 6 * MIB, "inactive"),
    ),
    segment(
        block(1 << 41, 4 * MIB),
        block((1 << 41) + 4 * MIB, 9 * MIB, "inactive"),
        segment_pool_id=(0, 7),
    ),
    segment(block(1 << 42, 999 * MIB), device=1),
    **{
        KEY: {
            "schema": snapshot_file.SCHEMA,
            "device": 0,
            "asked_bytes": 12 * MIB,
            "free_bytes": 3 * MIB,
            "named": [[256, 90 * MIB, "arena", "oracle_offload"]],
            "arena": [["Net: blocks.0.up", 60 * MIB], ["Net: blocks.0.down", 30 * MIB]],
        }
    },
)


def dumped(tmp_path: Path, what: Any, protocol: int = 4) -> Path:
    path = tmp_path / "run.snapshot.pickle"
    path.write_bytes(pickle.dumps(what, protocol=protocol))
    return path


def test_each_byte_is_someone_s_and_the_sums_are_torch_s(tmp_path: Path) -> None:
    found = held(read_snapshot(dumped(tmp_path, FULL)))
    rows = [
        (row["kind"], row["who"], row["bytes"] // MIB, row["blocks"]) for row in found["holders"]
    ]
    assert rows == [
        ("arena", "oracle_offload", 100, 1),
        ("tensors", "train.py:31 in forward", 60, 2),
        ("optimizer state", "train.py:40 in main", 30, 1),
        ("private pool", "unknown: no line was recorded", 4, 1),
        ("in backward", "train.py:40 in main", 2, 1),
    ]
    assert found["device"] == "cuda:0"
    assert found["held_bytes"] == sum(row["bytes"] for row in found["holders"]) == 196 * MIB
    active = sum(s["active_size"] for s in FULL["segments"] if s["device"] == 0)
    assert found["held_bytes"] == active
    assert (found["cached_bytes"], found["largest_cached_bytes"]) == (14 * MIB, 8 * MIB)
    assert found["reserved_bytes"] == 196 * MIB + 14 * MIB + 9 * MIB
    assert (found["asked_bytes"], found["free_bytes"]) == (12 * MIB, 3 * MIB)
    assert found["peak_bytes"] is None, "without a history it is not known"
    assert [row["who"] for row in found["arena"]] == ["Net: blocks.0.up", "Net: blocks.0.down"]


def test_the_command_shows_it_as_text_json_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, html = dumped(tmp_path, FULL), tmp_path / "page.html"
    assert main(["report", str(path), "--html", str(html)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("cuda:0 ran out of memory: 12.00 MiB were asked for, 3.00 MiB were free")
    assert "14.00 MiB were cached, in pieces of at most 8.00 MiB: enough, but too small." in text
    assert "arena: oracle_offload" in text and "Net: blocks.0.down" in text
    assert max(map(len, text.splitlines())) <= 100 and "\x1b" not in text
    page = html.read_text("utf-8")
    assert "<script" not in page and "train.py:31 in forward" in page and "60.00 MiB" in page
    assert main(["report", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "oracle_offload/memory-holders/1"
    assert found["holders"] == held(FULL)["holders"]
    assert main(["report", str(path), str(path)]) == 1
    assert "nothing to compare" in capsys.readouterr().err


def test_many_holders_end_in_a_sum(tmp_path: Path) -> None:
    blocks = [
        block(i * MIB, (40 - i) * MIB, frames=[{**TRAIN, "line": i, "name": "f" * 120}])
        for i in range(30)
    ]
    text = SnapshotReport("x", held(snapshot(segment(*blocks)))).to_text()
    (more,) = [line.split() for line in text.splitlines() if " more " in line]
    assert more == ["10", "more", f"{sum(40 - i for i in range(20, 30))}.00", "MiB", "10"]
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("On cuda:0 tensors held 765.00 MiB.")


SHOWN = """\
cuda:0 ran out of memory: 2.00 GiB were asked for, 1.00 GiB
were free, tensors held 15.00 GiB.
3.00 GiB were cached, in pieces of at most 1.00 GiB: enough,
but too small.
At the peak, earlier, tensors had asked for 18.00 GiB.

  [AAAAAAAAAAAAAAAAAAAAAA################tt+++++++++++...]
   A arena 8.00 GiB  # weights 6.00 GiB
   t other tensors 1.00 GiB  + cached 4.00 GiB
   . free 1.00 GiB

who held the bytes
  arena: oracle_offload                    8.00 GiB        1
  weights: up<1>.that.just.has.its.bit     6.00 GiB        2
  in backward: a long name of a lin...     1.00 GiB        1

who had asked for the bytes at the peak
  in backward: loss                       18.00 GiB        3

what was in the arena
  Net: blocks.0                            1.00 GiB
"""


def test_the_text_of_a_report() -> None:
    long = "a long name of a line, up"  # two characters more than there is room for
    found = {
        "device": "cuda:0",
        "asked_bytes": 2 * GIB,
        "free_bytes": GIB,
        "reserved_bytes": 19 * GIB,
        "held_bytes": 15 * GIB,
        "cached_bytes": 3 * GIB,
        "largest_cached_bytes": GIB,
        "peak_bytes": 18 * GIB,
        "holders": [
            {"kind": "arena", "who": "oracle_offload", "bytes": 8 * GIB, "blocks": 1},
            {
                "kind": "weights",
                "who": "up<1>.that.just.has.its.bit",
                "bytes": 6 * GIB,
                "blocks": 2,
            },
            {"kind": "in backward", "who": long, "bytes": GIB, "blocks": 1},
        ],
        "holders_at_peak": [{"kind": "in backward", "who": "loss", "bytes": 18 * GIB, "blocks": 3}],
        "arena": [{"who": "Net: blocks.0", "bytes": GIB}],
    }
    report = SnapshotReport("x", found)
    assert report.to_text(width=60) == SHOWN
    bold, *plain = report.to_text(width=100, color=True).split("\n")
    assert bold.startswith("\x1b[1mcuda:0 ran out") and "\x1b" not in "".join(plain)
    page = report.to_html()
    assert page.count('<p class="oo-verdict">') == 1 and page.count('<p class="oo-why">') == 2
    assert (
        '<tr><td>weights: up&lt;1&gt;.that.just.has.its.bit</td><td class="n">6.00 GiB</td>' in page
    )
    bar, keys = re.findall(r'%;(.*?)" title', page), page.count('class="key"')
    assert len(set(bar)) == keys == 5, "each part has a look of its own"
    no_room = SnapshotReport("x", {**found, "free_bytes": None, "cached_bytes": 2 * GIB - 1})
    text = no_room.to_text()
    assert "free unknown" not in text and "too small" not in text
    for change, told in (
        ({"cached_bytes": 2 * GIB}, True),
        ({"largest_cached_bytes": 2 * GIB}, False),
    ):
        assert ("too small" in SnapshotReport("x", {**found, **change}).to_text()) is told
    many = [{"who": f"Net: {i}", "bytes": GIB} for i in range(22)]
    assert (
        SnapshotReport("x", {**found, "arena": many})
        .to_text(width=60)
        .endswith(f"\n  2 more{'2.00 GiB':>43}\n")
    )


def test_the_peak_is_found_by_undoing_what_came_after_it() -> None:
    old = {**TRAIN, "line": 7, "name": "loss"}
    trace = [
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 10 * MIB, frames=[TRAIN]),
        event("alloc", 10 * MIB, 30 * MIB, frames=[old]),
        event("free_requested", 10 * MIB, 30 * MIB, frames=[old]),
        event("free_completed", 10 * MIB, 30 * MIB, frames=[old]),
        event("alloc", 10 * MIB, 5 * MIB, frames=[TRAIN]),
        event("oom", 0, 64 * MIB, device_free=2 * MIB),
    ]
    end = segment(block(0, 10 * MIB, frames=[TRAIN]), block(10 * MIB, 5 * MIB, frames=[TRAIN]))
    found = held(snapshot(end, device_traces=[trace]))
    assert found["peak_bytes"] == 40 * MIB and found["held_bytes"] == 15 * MIB
    assert [(row["who"], row["bytes"] // MIB) for row in found["holders_at_peak"]] == [
        ("train.py:7 in loss", 30),
        ("train.py:31 in forward", 10),
    ]
    assert (found["asked_bytes"], found["free_bytes"]) == (64 * MIB, 2 * MIB)
    assert (
        "At the peak, earlier, tensors had asked for 40.00 MiB."
        in SnapshotReport("x", found).to_text()
    )
    plain = held(snapshot(end, device_traces=[trace[:2]]))
    assert plain["peak_bytes"] == 15 * MIB and plain["holders_at_peak"] == []


def test_the_device_is_the_one_that_ran_out_else_the_one_with_most() -> None:
    both = [segment(block(0, 5 * MIB)), segment(block(0, 9 * MIB), device=1)]
    assert held(snapshot(*both))["device"] == "cuda:1"
    traces = [[event("oom", 0, MIB, device_free=0)], []]
    assert held(snapshot(*both, device_traces=traces))["device"] == "cuda:0"
    assert held(snapshot())["held_bytes"] == 0


def test_snapshots_of_torch_2_0_have_a_history_and_no_addresses() -> None:
    old = {
        "address": 4096,
        "total_size": 3 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            {
                "size": 2 * MIB,
                "state": "active_allocated",
                "history": [{"addr": 4096, "real_size": 2 * MIB - 5, "frames": [LINEAR, TRAIN]}],
            },
            {"size": MIB, "state": "inactive"},
        ],
    }
    found = held(snapshot(old))
    assert found["holders"] == [
        {"kind": "tensors", "who": "train.py:31 in forward", "bytes": 2 * MIB, "blocks": 1}
    ]
    assert found["cached_bytes"] == MIB


class Runs:
    """What a pickle that runs something holds."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_that_a_file_holds_is_run(
    tmp_path: Path, protocol: int, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    path = dumped(tmp_path, {"segments": [Runs(mark)]}, protocol)
    with pytest.raises(ValueError, match=r"mkdir; a memory snapshot holds plain data alone"):
        read_snapshot(path)
    assert main(["report", str(path)]) == 1
    assert "cannot read" in capsys.readouterr().err and not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the file would have done it"


def test_other_classes_and_persistent_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"datetime\.date"):
        read_snapshot(dumped(tmp_path, {"segments": [datetime.date(2026, 1, 1)]}))
    path = tmp_path / "persistent.pickle"
    path.write_bytes(b"\x80\x04\x8c\x01aQ.")
    with pytest.raises(ValueError, match="objects outside the file"):
        read_snapshot(path)


def test_broken_files_are_named_and_never_more_than_that(tmp_path: Path) -> None:
    whole = pickle.dumps(FULL, protocol=4)
    path = tmp_path / "broken.pickle"
    for length in range(2, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="no memory snapshot"):
            read_snapshot(path)
    for other in ([], {}, {"segments": 5}, "text"):
        with pytest.raises(ValueError, match="no segments"):
            read_snapshot(dumped(tmp_path, other))
    for odd in (
        snapshot({"total_size": 1}),
        snapshot({**segment(block(0, 1)), "blocks": [block(0, "many")]}),
        snapshot(device_traces=[[{}]]),
        snapshot(**{KEY: {"named": [[1]]}}),
        snapshot(**{KEY: {"named": [[0, 8, "weights", ["a"]]]}}),
        snapshot(**{KEY: {"arena": [[["a"], 8]]}}),
        snapshot(**{KEY: {"asked_bytes": ["a"]}}),
        snapshot(segment(block(0, 8, frames=[{**TRAIN, "name": ["a"]}]))),
        snapshot(segment(block(0, 8, frames=[{**TRAIN, "line": ["a"]}]))),
        snapshot(segment(block(0, 8, frames=[{**TRAIN, "filename": ["a"]}]))),
        snapshot(segment(block(0, float("inf")))),
    ):
        with pytest.raises(ValueError):
            held(odd)


def test_a_small_file_of_shared_lists_does_not_take_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_file, "MOST_ROWS", 10_000)
    blocks = [block(i, 1) for i in range(200)]
    shared = {**segment(*blocks[:1]), "blocks": blocks}
    assert held(snapshot(*[shared] * 49))["held_bytes"] == 49 * 200
    path = dumped(tmp_path, snapshot(*[shared] * 51))
    assert path.stat().st_size < 40_000
    with pytest.raises(ValueError, match="more than 10000 rows"):
        held(read_snapshot(path))
    monkeypatch.setattr(snapshot_file, "MOST_BYTES", 1 << 10)
    with pytest.raises(ValueError, match="is not read"):
        read_snapshot(path)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = dumped(tmp_path, FULL)
    code = (
        "import sys; sys.modules['torch'] = None; from oracle_offload.cli import main; "
        f"sys.exit(main(['report', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "arena: oracle_offload" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("address", "size", "is_named"),
    [
        (64, 36, False),  # ends where the named bytes begin
        (64, 37, True),
        (100, 50, True),
        (120, 10, True),
        (149, 10, True),
        (150, 10, False),  # begins where they end
    ],
)
def test_a_block_is_named_by_the_bytes_that_lie_in_it(
    address: int, size: int, is_named: bool
) -> None:
    ours = {KEY: {"named": [[0, 8, "weights", "a"], [100, 50, "arena", "b"], [900, 8, "x", "c"]]}}
    (row,) = held(snapshot(segment(block(address, size)), **ours))["holders"]
    assert (row["kind"] == "arena") is is_named
    assert is_named or row["who"].startswith("unknown")


def test_a_block_without_an_address_follows_the_one_before_it() -> None:
    blocks: list[dict[str, Any]] = [
        {"size": 16, "state": "active_allocated"},
        {"size": 8, "state": "active_allocated"},
    ]
    old = {"address": 64, "total_size": 24, "blocks": blocks}
    rows = held(snapshot(old, **{KEY: {"named": [[80, 8, "weights", "Net"]]}}))["holders"]
    assert [(row["kind"], row["bytes"]) for row in rows] == [("tensors", 16), ("weights", 8)]


@pytest.mark.parametrize(("name", "kind"), [("backward", "in backward"), ("grad", "tensors")])
def test_only_a_backward_of_autograd_is_one(name: str, kind: str) -> None:
    for frame, expected in (
        ({**BACKWARD, "name": name}, kind),
        ({**LINEAR, "name": name}, "tensors"),
    ):
        (row,) = held(snapshot(segment(block(0, 8, frames=[frame, STEP]))))["holders"]
        assert row["kind"] == expected


def test_all_that_is_told_of_a_snapshot_without_ours() -> None:
    """Of two failures the last one counts; a block that was freed before the history is unknown."""
    trace = [
        event("oom", 0, 7 * MIB, device_free=9 * MIB),
        event("alloc", 1 << 50, 3 * MIB, frames=[LINEAR]),  # and where it went is not known
        event("alloc", 0, 2 * MIB, frames=[TRAIN]),
        event("free_completed", 8 * MIB, 2 * MIB),
        event("oom", 0, 6 * MIB, device_free=MIB),
        event("snapshot"),
    ]
    end = segment(
        block(0, 2 * MIB, frames=[TRAIN], requested_size=2 * MIB - 1),
        block(2 * MIB, 2 * MIB, "active_pending_free", frames=[STEP]),
        block(4 * MIB, 5 * MIB, "inactive"),
    )
    assert held(snapshot(end, device_traces=[trace])) == {
        "device": "cuda:0",
        "asked_bytes": 6 * MIB,
        "free_bytes": MIB,
        "reserved_bytes": 9 * MIB,
        "held_bytes": 4 * MIB,
        "cached_bytes": 5 * MIB,
        "largest_cached_bytes": 5 * MIB,
        "peak_bytes": 6 * MIB - 1,
        "holders": [
            {"kind": "tensors", "who": "train.py:31 in forward", "bytes": 2 * MIB, "blocks": 1},
            {"kind": "tensors", "who": "train.py:40 in main", "bytes": 2 * MIB, "blocks": 1},
        ],
        "holders_at_peak": [
            {"kind": "tensors", "who": "train.py:40 in main", "bytes": 2 * MIB, "blocks": 1},
            {
                "kind": "tensors",
                "who": "unknown: no line was recorded",
                "bytes": 2 * MIB,
                "blocks": 1,
            },
            {"kind": "tensors", "who": "train.py:31 in forward", "bytes": 2 * MIB - 1, "blocks": 1},
        ],
        "arena": [],
    }


def test_a_peak_at_the_end_has_no_holders_of_its_own() -> None:
    """Also where as much was asked for before."""
    trace = [event("alloc", 8 * MIB, 2 * MIB), event("free_completed", 8 * MIB, 2 * MIB)]
    trace += [event("alloc", 0, 2 * MIB)]
    found = held(snapshot(segment(block(0, 2 * MIB)), device_traces=[trace]))
    assert (found["peak_bytes"], found["holders_at_peak"]) == (2 * MIB, [])
    without = held(snapshot(segment(block(0, 2 * MIB)), device_traces=[trace[1:2]]))
    assert (without["peak_bytes"], without["holders_at_peak"]) == (None, [])


def test_a_device_without_a_history_is_told_of_beside_one_that_has_one() -> None:
    segments = segment(block(0, MIB)), segment(block(0, 5 * MIB), device=1)
    trace = [event("alloc", 0, MIB)]
    found = held(snapshot(*segments, device_traces=[trace]))
    assert (found["device"], found["peak_bytes"]) == ("cuda:1", None)
    assert held(snapshot(*segments, device_traces=None))["device"] == "cuda:1"
    named = held(snapshot(*segments, device_traces=[trace], **{KEY: {"device": 0}}))
    assert (named["device"], named["held_bytes"], named["peak_bytes"]) == ("cuda:0", MIB, MIB)
    assert held(snapshot(*segments, **{KEY: {"device": 1}}))["device"] == "cuda:1"
    failed = [[], [event("oom", 0, MIB, device_free=0)]]
    assert held(snapshot(*segments, device_traces=failed))["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([LINEAR], ("tensors", "functional.py:9 in linear")),
        ([NATIVE], ("tensors", "unknown: no line was recorded")),
        ([{**TRAIN, "filename": "C:\\me\\train.py"}], ("tensors", "train.py:31 in forward")),
        (
            [{**LINEAR, "filename": "C:\\env\\torch\\optim\\sgd.py"}, STEP],
            ("optimizer state", "train.py:40 in main"),
        ),
        ([ADAM, BACKWARD, STEP], ("optimizer state", "train.py:40 in main")),
        (
            [
                {**LINEAR, "filename": "/x/oracle_offload/model/arena.py", "line": 5, "name": "f"},
                TRAIN,
            ],
            ("tensors", "train.py:31 in forward"),
        ),
    ],
)
def test_the_line_of_a_block_is_the_innermost_of_the_users(
    frames: list[dict[str, Any]], told: tuple[str, str]
) -> None:
    (row,) = held(snapshot(segment(block(0, 8, frames=frames))))["holders"]
    assert (row["kind"], row["who"]) == told


@pytest.mark.parametrize(("most", "is_read"), [(7, True), (6, False)])
def test_blocks_frames_and_events_count_as_rows(
    monkeypatch: pytest.MonkeyPatch, most: int, is_read: bool
) -> None:
    monkeypatch.setattr(snapshot_file, "MOST_ROWS", most)
    whole = snapshot(
        segment(block(0, 8, frames=[TRAIN, STEP]), block(8, 8)),
        device_traces=[[event("alloc")] * 2, [event("alloc")]],
    )
    if is_read:
        assert held(whole)["held_bytes"] == 16
    else:
        with pytest.raises(ValueError, match=r"^the memory snapshot has more than 6 rows$"):
            held(whole)


def test_the_largest_file_is_read_and_what_the_system_refuses_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dumped(tmp_path, snapshot())
    monkeypatch.setattr(snapshot_file, "MOST_BYTES", path.stat().st_size)
    assert read_snapshot(path) == snapshot()
    monkeypatch.setattr(snapshot_file, "MOST_BYTES", 5 * GIB)
    os.truncate(path, 5 * GIB + 1)
    with pytest.raises(ValueError, match=r"^a memory snapshot of more than 5 GiB is not read$"):
        read_snapshot(path)
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "missing")
    memory = Path("/proc/self/mem")  # nothing is at its beginning
    if memory.exists():
        with pytest.raises(OSError, match="Input/output error"):
            read_snapshot(memory)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (snapshot({"total_size": 1}), "KeyError('address')"),
        (
            snapshot(**{KEY: {"named": [[0, 8, "weights", ["a"]]]}}),
            "TypeError('text was expected, not list')",
        ),
        (
            snapshot(segment(block(0, float("inf")))),
            "OverflowError('cannot convert float infinity to integer')",
        ),
    ],
)
def test_what_is_not_in_torchs_format_says_what_it_lacks(odd: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as refused:
        held(odd)
    assert str(refused.value) == f"the memory snapshot is not in torch's format: {why}"
