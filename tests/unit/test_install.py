"""The installation of environments of gigabytes: room first, and a download that breaks off."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import install
import pytest


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of the next runs of pip; each takes one away, and needs no network."""
    codes: list[int] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        assert command[-2:] == ["-r", "list.txt"]
        return SimpleNamespace(returncode=codes.pop(0))

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "PAUSE_S", 0.0)
    return codes


def test_a_download_that_breaks_off_twice_is_tried_again(pip: list[int]) -> None:
    pip.extend([1, 2, 0])
    assert install.main(["--gb", "0", "-r", "list.txt"]) == 0
    assert not pip


def test_after_the_third_time_it_is_given_up(
    pip: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    pip.extend([2, 2, 2])
    assert install.main(["--gb", "0", "-r", "list.txt"]) == 2
    assert "attempt 3 of 3" in capsys.readouterr().err


def test_without_room_nothing_is_fetched_and_both_figures_are_said(
    pip: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.main(["--gb", "1e9", "-r", "list.txt"]) == 1
    said = capsys.readouterr().err
    assert "no room on the disk" in said
    assert "GB needed" in said and "GB free" in said


def test_what_is_installed_already_needs_no_room(
    pip: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    with (tmp_path / "torch" / "lib.so").open("wb") as file:
        file.truncate(4 * install.GB)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: usage._replace(free=install.GB))
    pip.append(0)
    assert install.main(["--gb", "4.5", "-r", "list.txt"]) == 0
    assert install.main(["--gb", "5", "-r", "list.txt"]) == 1


def test_folders_of_one_file_system_share_its_room(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    (tmp_path / "other").mkdir()
    one = {tmp_path: 0.7 * free}
    assert not install.lacking(one)
    (line,) = install.lacking(one | {tmp_path / "other": 0.7 * free})
    assert str(tmp_path / "other") in line
