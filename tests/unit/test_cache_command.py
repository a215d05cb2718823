"""The command that tells what compressed weights take of the disk, and removes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oracle_offload import cli
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


def test_keep_removes_what_was_not_used_longest(store: Store) -> None:
    assert store.read("oldest" + CODED) is not None  # which is a use
    assert cli.main(["cache", "--keep", "2MiB"]) == 0
    assert names(store) == {"new" + CODED, "oldest" + CODED, "notes.txt"}


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
