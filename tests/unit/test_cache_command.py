"""The command that tells what compressed weights take of the disk, and removes them."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from oracle_offload import cli
from oracle_offload.commands import cache
from oracle_offload.compress.store import CODED, RAW, Store


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
    assert capsys.readouterr().out == f"{store.folder}: 3.00 MiB of compressed weights\n"
    assert len(names(store)) == 4


def test_clear_removes_what_is_the_caches(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 3.00 MiB\n")
    assert names(store) == {"notes.txt"}
    assert (store.folder.parent / "heartbeat-1.json").exists()
    assert cli.main(["cache", "--clear"]) == 0


def test_keep_removes_what_was_not_used_longest(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.read("oldest" + CODED) is not None  # which is a use
    assert cli.main(["cache", "--keep", "2MiB"]) == 0
    left = f"{store.folder}: 2.00 MiB of compressed weights\n"
    assert capsys.readouterr().out == f"removed 1.00 MiB\n{left}"
    assert names(store) == {"new" + CODED, "oldest" + CODED, "notes.txt"}


def test_the_command_returns_the_code_it_was_given(store: Store) -> None:
    assert cache.run(argparse.Namespace(clear=False, keep=None), 7, 8) == 7
    assert cache.run(argparse.Namespace(clear=False, keep="much"), 7, 8) == 8


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
    assert "0 B of compressed weights" in capsys.readouterr().out


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
    with pytest.raises(OSError, match=r"^the disk has 1\.00 GiB left$"):
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
        f"{said[0]} (of a reason); it is made anew.",
        f"{said[1]} (of another); it is made anew.",
    ]
    assert "old" + RAW not in names(store)
