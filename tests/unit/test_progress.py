"""A progress bar appears only for what takes long, and then with what was done already."""

from __future__ import annotations

import io
import sys

import pytest
from tqdm import tqdm

from oracle_offload.host.progress import DelayedBar


def shown(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> tuple[str, list[tqdm[object]]]:
    bars: list[tqdm[object]] = []
    stream = io.StringIO()
    original = tqdm.__init__

    def remember(self: tqdm[object], *args: object, **kwargs: object) -> None:
        original(self, *args, file=stream, mininterval=0, **kwargs)  # type: ignore[misc]
        bars.append(self)

    monkeypatch.setattr(tqdm, "__init__", remember)
    with DelayedBar(4000, "moving", delay_s) as bar:
        bar.update(1000)
        bar.update(500)
        assert [one.n for one in bars] == ([] if delay_s > 0 else [1500])
    return stream.getvalue(), bars


def test_short_work_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, 60.0) == ("", [])
    with DelayedBar(4000, "moving") as bar:
        bar.update(4000)
    assert capsys.readouterr().err == ""


def test_long_work_shows_all_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    text, (bar,) = shown(monkeypatch, 0.0)
    assert "moving" in text and "1.50k" in text and "4.00k" in text and "B" in text
    assert bar.total == 4000 and bar.disable, "a bar that was closed is disabled"


def test_it_appears_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bars: list[dict[str, object]] = []

    def appear(**told: object) -> io.StringIO:
        bars.append(told)
        return io.StringIO()

    monkeypatch.setattr("tqdm.tqdm", appear)
    with DelayedBar(4000, "moving", 2.0) as bar:
        now[0] = 6.999
        bar.update(1)
        assert bars == []
        now[0] = 7.0
        bar.update(2)
    (told,) = bars
    assert (told["total"], told["initial"]) == (4000, 3)


def test_a_bar_that_was_never_shown_imports_nothing() -> None:
    tqdm_modules = {name for name in sys.modules if name.startswith("tqdm")}
    with DelayedBar(1, "x"):
        pass
    assert {name for name in sys.modules if name.startswith("tqdm")} == tqdm_modules
