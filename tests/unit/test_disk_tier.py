"""benchmarks/disk_tier.py: contenders that train from files, and what is said of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import disk_tier
import pytest

from oracle_offload.host.mounts import mount_of

pytest.importorskip("safetensors")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it counts by Linux's files")

SMALL = ["--gib", "0.002", "--width", "256", "--steps", "2"]  # 16 layers of 128 KiB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    disk_tier.write_weights(tmp_path, 16, 256, pickled=True)
    return tmp_path


def test_the_rivals_train_from_mapped_files_with_the_residents_bits(folder: Path) -> None:
    args = disk_tier.parse(SMALL)
    rows = {name: disk_tier.contend(name, folder, args) for name in ("resident", "mmap", "torch")}
    assert len({row["bits"] for row in rows.values()}) == 1
    assert all(row["loss"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
    weights = 16 * 2 * 256 * 256
    assert all(row["file_bytes"] >= weights for row in rows.values())
    (folder / disk_tier.SAFETENSORS).unlink()
    disk_tier.write_weights(folder, 16, 256, pickled=False)
    args.steps = 3
    assert disk_tier.contend("mmap", folder, args)["bits"] != rows["mmap"]["bits"]


def test_a_file_is_dropped_from_the_page_cache_and_comes_back_when_it_is_read(folder: Path) -> None:
    path = folder / disk_tier.SAFETENSORS
    size = path.stat().st_size
    path.read_bytes()
    assert disk_tier.cached_bytes(path) >= size
    disk_tier.drop(path)
    if os.statvfs(path).f_blocks and disk_tier.cached_bytes(path) >= size:
        pytest.skip("the folder of tests is in memory")
    assert disk_tier.cached_bytes(path) == 0


def test_a_contender_that_ends_badly_ends_the_command_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(disk_tier.tempfile, "tempdir", None)
    monkeypatch.setattr(disk_tier, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# A page\n")
    assert disk_tier.main(["mmap", *SMALL, "--device", "nowhere"]) == 1
    said = capfd.readouterr()
    assert "mmap: it ended with 1" in said.err and "| it ended with 1 |" in said.out
    assert disk_tier.main(["mmap", *SMALL, "--limit-s", "0.01"]) == 1
    assert "mmap: not done in 0.01 s" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"], "nothing is left"


def test_ours_has_the_residents_bits_and_leaves_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mount = mount_of(os.path.realpath(tmp_path))
    if mount is None or mount.is_memory or mount.is_network:
        pytest.skip("the folder of tests is on no disk of this machine")
    monkeypatch.setattr(disk_tier.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(disk_tier, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# A page\n")
    assert disk_tier.main(["resident", "ours", *SMALL, "--page"]) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.count("the resident's |") == 2
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# A page\n\n<!-- tier:") and text.endswith("<!-- end of tier -->\n")


# ---- what is said ----


def row(name: str, **changes: Any) -> dict[str, Any]:
    gib = 1 << 30
    usual = dict(
        name=name, build_s=1.0, first_step_s=2.0, step_s=1.5, step_read_bytes=gib, loss=1.0,
        peak_bytes=gib, own_bytes=gib // 2, cached_bytes=0, file_bytes=gib, bits="ab",
        limit_bytes=2 * gib,
    )  # fmt: skip
    return {**usual, **changes}


def test_each_contender_is_a_row_and_what_is_wrong_is_named() -> None:
    args = disk_tier.parse(["--gib", "6", "--ram-gib", "1", "--vram-gib", "0.5"])
    rows = [row("resident", limit_bytes=None), row("mmap", cached_bytes=1 << 29), row("ours")]
    head, _, *lines = disk_tier.table(rows, args)
    assert head.count("|") == 9 and all(line.count("|") == 9 for line in lines)
    assert lines[1].endswith("| 2.00 | 1.50 | 1.00 | 1.00 | 0.50 | 50% | the resident's |")
    assert lines[2].startswith("| `disk=True`, 1.00 GiB of RAM |")
    assert disk_tier.failures(rows, args) == []
    assert "768 layers of 2048 x 2048 in bf16, 6.00 GiB; 3 steps" in disk_tier.sentence(rows, args)
    assert "with 2.00 GiB of memory" in disk_tier.sentence(rows, args)
    assert "with no limit on memory" in disk_tier.sentence(rows[:1], args)
    wrong = [row("resident"), row("torch", bits="c"), row("ours", peak_bytes=int(2.6 * (1 << 30)))]
    assert disk_tier.failures(wrong, args) == [
        "torch: other bits than the resident's",
        "ours: 2.60 GiB, more than 2.50",
    ]
    cached = [row("ours", cached_bytes=1 << 28)]
    assert disk_tier.failures(cached, args) == ["ours: its file is in the page cache"]
    failed = disk_tier.table([{"name": "mmap", "error": "killed"}], args)
    assert failed[2].count("|") == 9 and "| killed |" in failed[2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["theirs"], "no contender theirs; there are resident, mmap, torch, ours"),
        (["--steps", "1"], "there are two or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        disk_tier.parse(argv)
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_the_arena_has_room_for_four_layers_by_default() -> None:
    small, large = disk_tier.parse(["--gib", "0.06"]), disk_tier.parse(["--gib", "6"])
    assert small.vram_gib == 4 * 2 * 2048**2 / (1 << 30) and large.vram_gib == 0.5
    assert large.ram_gib == 1.0
