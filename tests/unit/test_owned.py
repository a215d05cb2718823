"""What is on disk is used only where no other user could have written it."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oracle_offload.compress.store import CODED, RAW, Store
from oracle_offload.host.owned import ForeignError, check_folder, create_own, make_folder, open_own
from oracle_offload.host.remembered import Rows
from oracle_offload.host.replace import replace_file
from oracle_offload.observe import live

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
STRANGER = 12345
Change = Callable[[Path], object]


def give_away(path: Path) -> None:
    """Make a file another user's, a link itself where it is one."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def link(path: Path) -> None:
    """Replace a file with a link to another file of this user."""
    other = path.with_name(f"{path.name}-elsewhere")
    path.rename(other)
    path.symlink_to(other)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FOREIGN: dict[str, tuple[Change, str]] = {
    "another user's": (give_away, r"belongs to user 12345, this process to user \d+"),
    "writable by its group": (lambda p: p.chmod(0o620), r"written by other users \(mode 620\)"),
    "writable by all": (lambda p: p.chmod(0o602), r"written by other users \(mode 602\).*go-w"),
}
FILES = {**FOREIGN, "a link": (link, "is a link"), "a pipe": (pipe, "is no file")}
foreign_files = pytest.mark.parametrize(("change", "why"), FILES.values(), ids=FILES)
foreign_folders = pytest.mark.parametrize(("change", "why"), FOREIGN.values(), ids=FOREIGN)


@foreign_files
def test_a_file_that_others_could_have_written_is_not_read(
    tmp_path: Path, change: Change, why: str
) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    with open(open_own(path)) as file:
        assert file.read() == "content"
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    change(path)
    with pytest.raises(ForeignError, match=why):
        open_own(path)
    assert not opened or len(os.listdir("/proc/self/fd")) == opened


@foreign_folders
def test_a_folder_that_others_could_write_is_not_used(
    tmp_path: Path, change: Change, why: str
) -> None:
    path = tmp_path / "deep" / "folder"
    make_folder(path)
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in (path, path.parent))
    make_folder(path)
    change(path)
    for use in (check_folder, make_folder):
        with pytest.raises(ForeignError, match=why):
            use(path)


def test_a_folder_is_made_for_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_folder(tmp_path / "deep" / "folder")
    finally:
        os.umask(before)
    check_folder(tmp_path / "deep")


def test_threads_may_make_the_same_folder(tmp_path: Path) -> None:
    for nth in range(50):
        path, begin = tmp_path / str(nth) / "deep" / "folder", threading.Barrier(4)

        def make(path: Path = path, begin: threading.Barrier = begin) -> None:
            begin.wait(30)
            make_folder(path)

        with ThreadPoolExecutor(4) as pool:
            for made in [pool.submit(make) for _ in range(4)]:
                made.result()
        assert path.is_dir()


def test_what_root_owns_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root owns what root does")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    (tmp_path / "file").write_text("x")
    check_folder(tmp_path)
    os.close(open_own(tmp_path / "file"))


def test_a_link_to_a_folder_is_followed_where_it_is_this_user_s(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "here").symlink_to("there")
    check_folder(tmp_path / "here")
    make_folder(tmp_path / "here")
    give_away(tmp_path / "here")
    with pytest.raises(ForeignError, match=r"here' belongs to user 12345"):
        check_folder(tmp_path / "here")


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)


def victim_of(path: Path) -> Path:
    """Plant a link at `path` that leads to a file of this user's."""
    victim = path.parent / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    return victim


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = victim_of(tmp_path / "new")
    with open(create_own(tmp_path / "new"), "w") as file:
        file.write("ours")
    assert victim.read_text() == "precious" and (tmp_path / "new").read_text() == "ours"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_a_link_that_is_planted_again_in_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, real = victim_of(tmp_path / "new"), os.unlink

    def lose_the_race(path: Path) -> None:
        real(path)
        os.symlink(victim, path)

    monkeypatch.setattr(os, "unlink", lose_the_race)
    with pytest.raises(FileExistsError):
        create_own(tmp_path / "new")
    assert victim.read_text() == "precious"


def test_a_file_that_replaces_another_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = victim_of(tmp_path / f"weights.{os.getpid()}.new")
    replace_file(tmp_path / "weights", lambda sink: sink.write(b"ours"))
    assert victim.read_text() == "precious" and (tmp_path / "weights").read_text() == "ours"


def test_what_was_looked_at_is_what_is_read_however_often_it_is_exchanged(tmp_path: Path) -> None:
    """A file that is exchanged between the look and the reading is never read."""
    path, good, bad = tmp_path / "file", tmp_path / "good", tmp_path / "bad"
    end = threading.Event()

    def exchange() -> None:
        while not end.is_set():
            for each, mode in ((good, 0o600), (bad, 0o666)):
                each.write_text(each.name)
                each.chmod(mode)
                os.replace(each, path)

    good.write_text("good")
    good.rename(path)
    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        read = refused = 0
        while min(read, refused) < 50:
            try:
                with open(open_own(path)) as file:
                    assert file.read() == "good"
                read += 1
            except ForeignError:
                refused += 1
    finally:
        end.set()
        thread.join()


# ---- the users of it ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@foreign_files
def test_compressed_weights_of_others_are_as_none(tmp_path: Path, change: Change, why: str) -> None:
    store = Store(tmp_path / "coded")
    for name in ("a" + CODED, "b" + RAW):
        store.write(name, memoryview(b"x" * 100))
    assert store.read("a" + CODED) is not None and store.map("b" + RAW, 100) is not None
    for name in ("a" + CODED, "b" + RAW):
        change(store.path(name))
    assert store.read("a" + CODED) is None and store.map("b" + RAW, 100) is None
    store.write("a" + CODED, memoryview(b"y" * 100))
    assert store.read("a" + CODED) is not None, "one's own takes its place"


@foreign_folders
def test_a_cache_that_others_can_write_is_neither_written_nor_emptied(
    tmp_path: Path, change: Change, why: str
) -> None:
    store = Store(tmp_path / "coded")
    store.write("a" + CODED, memoryview(b"x" * 100))
    change(store.folder)
    with pytest.raises(ForeignError, match=why):
        store.write("b" + CODED, memoryview(b"x" * 100))
    with pytest.raises(ForeignError, match=why):
        store.trim(0)
    assert os.listdir(store.folder) == ["a" + CODED]


@foreign_files
def test_what_others_remembered_is_not_believed(folder: Path, change: Change, why: str) -> None:
    rows = Rows("rows.json", "schema", "rows", "it")
    rows.put("key", {"value": 1})
    assert rows.get("key") == {"value": 1}
    change(folder / "rows.json")
    assert rows.get("key") == {}


@foreign_files
def test_a_heartbeat_that_others_wrote_is_not_shown(folder: Path, change: Change, why: str) -> None:
    folder.mkdir(mode=0o700)
    path = folder / "heartbeat-here-1.json"
    host = {"title": "host", "total_bytes": 1, "parts": {}}
    document = {"schema": live.SCHEMA, "pid": 1, "machine": "here", "time_s": 0.0, "host": host}
    path.write_text(json.dumps({**document, "numbers": {}, "devices": []}))
    assert live.heartbeats() == [path] and live.read(path).numbers == {}
    change(path)
    assert live.heartbeats() == []
    with pytest.raises(ForeignError, match=why):
        live.read(path)
