"""The command that tells what this package keeps on the disk, and removes it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import oracle_offload
from oracle_offload import cli
from oracle_offload.commands import cache
from oracle_offload.compress.store import CODED, RAW, Store
from oracle_offload.host.cache import folder
from oracle_offload.host.owned import make_folder
from oracle_offload.host.processes import machine
from oracle_offload.host.sizes import format_size


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    made = Store(tmp_path / "coded")
    for age, name in enumerate(("new" + CODED, "old" + RAW, "oldest" + CODED)):
        made.write(name, memoryview(bytes(1 << 20)))
        path = made.path(name)
        os.utime(path, (1e9 - 1000 * age, 1e9 - 1000 * age))
    (tmp_path / "coded" / "notes.txt").write_text("not ours")
    (tmp_path / "heartbeat-1.json").write_text("{}")
    return made


def names(store: Store) -> set[str]:
    return set(os.listdir(store.folder))


def test_it_tells_how_much_there_is(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == (
        f"{store.folder.parent}\n"
        "  compressed weights  3.00 MiB in 3 files\n"
        "  batch sizes         0 B in 0 files\n"
        "  times of steps      0 B in 0 files\n"
        "  heartbeats          2 B in 1 file\n"
        "  in all              3.00 MiB in 4 files\n"
    )
    assert len(names(store)) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_an_output_that_is_full_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert cli.main(["cache"]) == cli.Exit.ERROR
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().err.startswith("cache: cannot write standard output: No space left")


def test_clear_removes_what_is_the_caches(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder.parent / "settings.json").write_text("not ours")
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 3.00 MiB in 4 files\n")
    assert names(store) == {"notes.txt"}
    assert sorted(os.listdir(store.folder.parent)) == ["coded", "settings.json"]
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 0 B in 0 files\n")


def written_by_the_package() -> dict[str, Path]:
    """Let each module that writes into the cache folder do so; return module -> its file."""
    pytest.importorskip("torch")
    from oracle_offload.compress import steps
    from oracle_offload.compress.store import user_store
    from oracle_offload.observe import heartbeat
    from oracle_offload.train.survive import known_sizes

    store = user_store()
    store.write("some" + CODED, memoryview(b"x" * 10))
    for module in (known_sizes, steps):
        module._rows.put("a key", {"size": 1})
    heart = heartbeat.Heartbeat()
    heart.write()
    return {
        "compress/store.py": store.path("some" + CODED),
        "train/survive/known_sizes.py": folder() / "sizes.json",
        "compress/steps.py": folder() / "steps.json",
        "observe/heartbeat.py": heart.path,
    }


def test_all_that_the_package_writes_is_listed_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = Path(oracle_offload.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^from \.*(host\.)?cache import folder$|= Rows\(", text, re.MULTILINE):
            found.add(path.relative_to(package).as_posix())
    reading = {
        "commands/cache.py",
        "commands/watch.py",
        "observe/live.py",
        "host/remembered.py",
    }  # of Rows
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    written = written_by_the_package()
    assert found - reading == set(written), "who else writes into the cache folder?"
    assert {path for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {
        *written.values()
    }
    nbytes = sum(path.stat().st_size for path in written.values())

    assert cli.main(["cache"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" in ")[2] for line in said[1:]] == ["1 file"] * 4 + ["4 files"]
    assert f"{format_size(nbytes)} in 4 files" in said[-1]

    assert cli.main(["cache", "--clear"]) == 0
    assert os.listdir(tmp_path / "cache") == [written["observe/heartbeat.py"].name], (
        "this process lives"
    )
    monkeypatch.setattr(cache, "is_alive", lambda pid: False if pid == os.getpid() else None)
    assert cli.main(["cache", "--clear"]) == 0
    assert os.listdir(tmp_path / "cache") == []


def test_clear_leaves_what_is_being_written_and_the_heartbeats_of_trainings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "is_alive", lambda pid: {1: True, 2: False, 3: None}[pid])
    hour, now = 3600, time.time()
    stays = {
        f"heartbeat-{machine()}-1.json": 9 * hour,
        f"heartbeat-{machine()}-1.new": 9 * hour,
        f"heartbeat-{machine()}-3.json": 0,
        "sizes.json.77.new": hour - 60,
        "coded/.some.raw-77": hour - 60,
        "coded/notes.txt": 9 * hour,
    }
    goes = {
        f"heartbeat-{machine()}-2.json": 0,
        f"heartbeat-{machine()}-2.new": 0,
        "heartbeat-elsewhere-1.json": 0,
        "sizes.json": 0,
        "sizes.json.78.new": hour + 60,
        "steps.json": 0,
        "coded/.some.raw-78": hour + 60,
        "coded/some.raw": 0,
    }
    for name, age in {**stays, **goes}.items():
        path = tmp_path / name
        make_folder(path.parent)
        path.write_bytes(b"x")
        os.utime(path, (now - age, now - age))
    assert cli.main(["cache", "--clear"]) == 0
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(stays)


@pytest.mark.skipif(os.name == "nt", reason="nothing is asked there")
@pytest.mark.parametrize("which", ["", "coded"])
def test_nothing_is_removed_from_a_folder_that_others_can_write(
    store: Store, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.folder.parent / which).chmod(0o777)
    assert cli.main(["cache", "--clear"]) == 1
    assert "can be written by other users" in capsys.readouterr().err
    assert len(names(store)) == 4


def test_keep_removes_what_was_not_used_longest(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.read("oldest" + CODED) is not None  # which is a use
    assert cli.main(["cache", "--keep", "2MiB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("removed 1.00 MiB\n")
    assert "  compressed weights  2.00 MiB in 2 files\n" in said
    assert names(store) == {"new" + CODED, "oldest" + CODED, "notes.txt"}
    assert (store.folder.parent / "heartbeat-1.json").exists()


def test_what_is_no_size_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--keep", "much"]) == 1
    assert "--keep='much' is not a size" in capsys.readouterr().err
    assert len(names(store)) == 4


def test_a_file_appears_whole_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(store)

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("oracle_offload.compress.store.os.replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        store.write("more" + CODED, memoryview(b"x"))
    assert names(store) == before
    assert store.read("more" + CODED) is None


def test_without_a_folder_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "none"))
    assert cli.main(["cache", "--clear"]) == 0
    assert not (tmp_path / "none").exists()
    assert "in all              0 B in 0 files" in capsys.readouterr().out


def test_a_file_is_read_as_a_whole_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 5
    store.write("some" + CODED, memoryview(content))
    found = store.read("some" + CODED)
    assert found is not None and bytes(memoryview(found).cast("B")) == content
    store.path("empty" + CODED).touch()
    assert store.read("empty" + CODED) is store.read("none" + CODED) is None
    real = os.fstat

    def longer(file: int) -> SimpleNamespace:
        found = real(file)
        return SimpleNamespace(
            st_size=found.st_size + 9, st_mode=found.st_mode, st_uid=found.st_uid
        )

    monkeypatch.setattr(os, "fstat", longer)
    assert store.read("some" + CODED) is None, "it was cut off after it was asked for its size"


def test_a_file_is_mapped_where_it_has_the_size_that_is_expected(store: Store) -> None:
    name = "some" + RAW
    store.write(name, memoryview(b"x" * 5000))
    os.utime(store.path(name), (1e9, 1e9))
    assert store.map("none" + RAW, 5000) is store.map(name, 4999) is None
    assert store.path(name).stat().st_mtime == 1e9, "that was no use of it"
    mapped = store.map(name, 5000)
    assert mapped is not None and bytes(mapped) == b"x" * 5000
    assert store.path(name).stat().st_mtime > 1.5e9, "that was"
    assert bytes(store.write_mapped("more" + RAW, memoryview(b"y" * 70))) == b"y" * 70
    assert store.path("more" + RAW).read_bytes() == b"y" * 70


def test_a_file_is_written_piece_by_piece_and_is_this_user_s(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:7]))
    made = Store(tmp_path / "deep" / "new")
    made.write("some" + RAW, memoryview(bytes(range(100))))
    assert made.path("some" + RAW).read_bytes() == bytes(range(100))
    if os.name == "posix":
        assert made.folder.stat().st_mode & 0o777 == 0o700
        assert made.path("some" + RAW).stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files")
def test_no_file_of_the_cache_stays_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    store.write("some" + RAW, memoryview(b"x" * 10))
    monkeypatch.setattr("oracle_offload.compress.store.map_private", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.write_mapped("more" + RAW, memoryview(b"x" * 10))
    monkeypatch.setattr("oracle_offload.compress.store.os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.write("less" + RAW, memoryview(b"x" * 10))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_some_of_the_disk_is_left_to_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [(1 << 30) + 10]
    usage = "oracle_offload.compress.store.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda path: SimpleNamespace(free=free[0]))
    store.write("some" + RAW, memoryview(b"x" * 10))
    free[0] -= 1
    with pytest.raises(OSError, match=r"^the disk has 1\.00 GiB left, and this takes up to 10 B "):
        store.write("more" + RAW, memoryview(b"x" * 10))


def test_what_is_half_written_counts_and_goes_once_it_is_abandoned(store: Store) -> None:
    hour, now = 3600, time.time()
    for name, age in ((".fresh", hour - 60), (".abandoned", hour + 60)):
        path = store.path(name)
        path.write_bytes(bytes(1 << 20))
        os.utime(path, (now - age, now - age))
    assert [path.name for _, _, path in store.files()] == [
        *("oldest" + CODED, "old" + RAW, "new" + CODED, ".abandoned", ".fresh"),
    ]
    assert store.trim(5 << 20) == 0
    assert store.trim((5 << 20) - 1) == 1 << 20 and "oldest" + CODED not in names(store)
    store.write("now" + RAW, memoryview(bytes(1 << 20)))
    assert store.trim(0) == 4 << 20, "what is whole may go, however new it is"
    assert names(store) == {".fresh", "notes.txt"}


def test_a_damaged_file_is_told_and_removed(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.drop("old" + RAW, "of a reason")
    store.drop("none" + RAW, "of another")
    said = [f"'{store.path(name + RAW)}' is damaged" for name in ("old", "none")]
    assert caplog.messages == [
        f"{said[0]} (of a reason); it is made again.",
        f"{said[1]} (of another); it is made again.",
    ]
    assert "old" + RAW not in names(store)
