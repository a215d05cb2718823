"""How a child ended, found from its status, its log and the counter of its control group."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from test_explain_command import FULL

from oracle_offload.diagnose.explain import host
from oracle_offload.diagnose.explain.history import records_in_log
from oracle_offload.diagnose.explain.host import explain_exit, kill_counter, own_group
from oracle_offload.diagnose.explain.report import OomReport

MIB = 1 << 20
UNKNOWN_KILLER = "no counter says by whom"
NOT_AT_THE_LIMIT = "though not at its memory limit"


def group(folder: Path, kills: int | None, limit: str = "67108864", file: str = "max") -> Path:
    if kills is not None:
        (folder / "memory.events").write_text(f"low 0\nhigh 1\nmax 9\noom 4\noom_kill {kills}\n")
    names = {"max": "memory.max", "v1": "memory.limit_in_bytes"}
    (folder / names[file]).write_text(limit + "\n")
    return folder


@pytest.mark.parametrize("code", [137, -int(signal.SIGKILL)])
def test_a_counter_that_rose_proves_the_kill_and_names_the_limit(tmp_path: Path, code: int) -> None:
    report = explain_exit(code, "epoch 3\n", group=group(tmp_path, 7), kills_before=5)
    assert report.found and not report.suspected
    assert (report.cause.name, report.cause.confidence) == ("memory_limit", "high")
    assert report.cause.why == "oom_kill rose from 5 to 7 meanwhile"
    assert report.value("limit") == 64 * MIB
    assert report.facts["limit"].quote == "memory.max: 67108864"


@pytest.mark.parametrize(
    ("limit", "file", "expected"),
    [
        ("67108864", "v1", 64 * MIB),
        ("max", "max", None),
        ("9223372036854771712", "v1", None),
        (str(1 << 62), "v1", None),
        (str((1 << 62) - 1), "v1", (1 << 62) - 1),
    ],
)
def test_what_is_written_for_no_limit_is_none(
    tmp_path: Path, limit: str, file: str, expected: int | None
) -> None:
    report = explain_exit(137, "", group=group(tmp_path, 1, limit, file), kills_before=0)
    assert report.cause.name == "memory_limit" and report.value("limit") == expected


@pytest.mark.parametrize(
    ("kills", "before", "why"),
    [
        (5, 5, NOT_AT_THE_LIMIT),
        (4, 5, NOT_AT_THE_LIMIT),
        (5, None, UNKNOWN_KILLER),
        (None, 5, UNKNOWN_KILLER),
        (None, None, UNKNOWN_KILLER),
    ],
)
def test_without_a_counter_that_rose_a_kill_is_a_suspicion(
    tmp_path: Path, kills: int | None, before: int | None, why: str
) -> None:
    report = explain_exit(-9, "", group=group(tmp_path, kills), kills_before=before)
    assert (report.suspected, report.cause.name, report.cause.confidence) == (
        True,
        "host_memory",
        "low",
    )
    assert why in report.cause.why


def test_a_message_of_the_log_comes_before_the_status(tmp_path: Path) -> None:
    report = explain_exit(137, FULL, group=group(tmp_path, 7), kills_before=5)
    assert report.found and report.backend == "cuda"
    # Words of a shell about the kill are no message: the counter knows better.
    report = explain_exit(137, "Killed\n", group=group(tmp_path, 7), kills_before=5)
    assert report.cause.name == "memory_limit"


@pytest.mark.parametrize("code", [0, 1, -15, 143, 9])
def test_another_status_is_explained_by_the_log_alone(tmp_path: Path, code: int) -> None:
    where = group(tmp_path, 7)
    assert not explain_exit(code, "epoch 3\n", group=where, kills_before=5).found
    assert explain_exit(code, FULL, group=where, kills_before=5).backend == "cuda"


def test_the_counter_is_read_from_each_kind_of_group(tmp_path: Path) -> None:
    assert kill_counter(tmp_path) is None
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kill_counter(tmp_path) == 3
    (tmp_path / "memory.events").write_text("oom_kill 4\n")
    assert kill_counter(tmp_path) == 4
    (tmp_path / "memory.events.local").write_text("oom 9\noom_kill 5\n")
    assert kill_counter(tmp_path) == 5
    (tmp_path / "memory.events.local").write_text("oom_kill many\n")
    assert kill_counter(tmp_path) == 4


@pytest.mark.parametrize(
    ("group", "mount", "kind", "folder"),
    [
        ("0::/job/7", "/sys/fs/cgroup", "cgroup2 cgroup2 rw", "sys/fs/cgroup"),
        ("5:memory:/job/7", "/sys/fs/cgroup/memory", "cgroup cgroup rw,memory",
         "sys/fs/cgroup/memory"),
    ],
)  # fmt: skip
def test_the_own_group_is_found_or_in_a_container_the_mount_itself(
    group: str, mount: str, kind: str, folder: str, tmp_path: Path
) -> None:
    process = tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    assert own_group(str(tmp_path)) is None, "nothing tells"
    (process / "cgroup").write_text(f"{group}\n")
    (process / "mountinfo").write_text(f"30 20 0:26 / {mount} rw,nosuid - {kind}\n")
    assert own_group(str(tmp_path)) is None, "no folder of it is there"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "memory.max").write_text("max\n")
    assert own_group(str(tmp_path)) == tmp_path / folder
    (tmp_path / folder / "job" / "7").mkdir(parents=True)
    (tmp_path / folder / "job" / "7" / "memory.max").write_text("max\n")
    assert own_group(str(tmp_path)) == tmp_path / folder / "job" / "7"


def test_where_nothing_can_be_told_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "own_group", lambda: None)
    assert kill_counter() is None
    assert UNKNOWN_KILLER in explain_exit(-9, kills_before=1).cause.why
    monkeypatch.setattr(host, "own_group", lambda: group(tmp_path, 7))
    assert kill_counter() == 7
    report = explain_exit(-9, kills_before=6)
    assert report.cause.name == "memory_limit" and report.value("limit") == 64 * MIB
    monkeypatch.setattr(host, "find", lambda *_: 1 / 0)
    report = explain_exit(-9, "", group=tmp_path, kills_before=1)
    assert isinstance(report, OomReport) and not report.found


def test_records_of_a_log() -> None:
    assert records_in_log("max mem: 5\nx\nmax mem: 7 tokens: 4") == [
        {"peak_bytes": 5 * MIB},
        {"peak_bytes": 7 * MIB},
    ]
    assert records_in_log("tokens: 12 seq_len=13") == [{"length": 12}, {"length": 13}]
    assert records_in_log("nothing") == []
