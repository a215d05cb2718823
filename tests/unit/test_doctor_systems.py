"""Recorded machines: what the doctor says about each, and what changes its mind."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle_offload.diagnose.doctor import CHECKS, System, checks_host, examine
from oracle_offload.diagnose.doctor.checks_gpu import check_other_processes
from oracle_offload.diagnose.doctor.checks_host import check_shared_memory
from oracle_offload.diagnose.doctor.finding import VERDICTS
from oracle_offload.diagnose.doctor.torch_build import TorchView
from oracle_offload.host.cgroup import MemoryLimit, read_memory_limit
from oracle_offload.host.disk import DiskSpeed, DiskView, Rate, Reads
from oracle_offload.host.gpus import Gpu, GpuProcess, GpuView

TREES = Path(__file__).parent.parent / "data" / "systems"
LIMITS = TREES / "limits.json"
NAMES = sorted(path.stem for path in TREES.glob("*.tree"))
GIB = 1 << 30


def sections(name: str) -> dict[str, str]:
    """Split a .tree file into {path: text}; see tests/data/systems/README.md."""
    found: dict[str, str] = {}
    path = None
    for line in (TREES / f"{name}.tree").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("--- "):
            path = line[4:].strip()
            found[path] = ""
        else:
            assert path is not None, f"{name}.tree starts without a section"
            found[path] += line
    return found


def build(name: str, root: Path, **replaced: str) -> Path:
    """Write a recorded machine below `root`; `replaced` maps a path to other text."""
    files = sections(name)
    unknown = set(replaced) - set(files)
    assert not unknown, f"{name}.tree has no {unknown}"
    for path, text in {**files, **replaced}.items():
        target = root / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        elif path != "answers.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    return root


def limit_of(name: str, root: Path, **replaced: str) -> MemoryLimit:
    return read_memory_limit(str(build(name, root, **replaced)))


# --- Control groups ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "hybrid", "limit", "headroom", "kills"),
    [
        ("bare_metal", "v2", False, None, None, 0),
        ("docker_v1", "v1", False, 16 * GIB, 12 * GIB, 2),
        ("docker_v2", "v2", False, 32 * GIB, 6 * GIB, 0),
        ("kubernetes", "v2", False, 64 * GIB, 53 * GIB, 0),
        ("slurm", "v1", False, 128 * GIB, 116 * GIB, 0),
        ("wsl2", "v2", False, None, None, 0),
        ("hidden_proc", "v2", False, 8 * GIB, 7 * GIB, None),
        ("hybrid", "v1", True, 12 * GIB, GIB // 2 + (1 << 27), 0),
        ("no_swap", "v2", False, None, None, 1),
    ],
)
def test_memory_limit_of_each_machine(
    tmp_path: Path,
    name: str,
    version: str,
    hybrid: bool,
    limit: int | None,
    headroom: int | None,
    kills: int | None,
) -> None:
    found = limit_of(name, tmp_path)
    assert (found.version, found.hybrid, found.limit_bytes) == (version, hybrid, limit)
    assert (found.headroom_bytes, found.oom_kills) == (headroom, kills)


def test_v1_limit_above_the_visible_tree_is_found_by_the_hierarchical_figure(
    tmp_path: Path,
) -> None:
    stat = "sys/fs/cgroup/memory/memory.stat"
    found = limit_of("docker_v1", tmp_path, **{stat: "hierarchical_memory_limit 8589934592\n"})
    assert found.limit_bytes == 8 * GIB


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "9223372036854710272", "max"])
def test_v1_unlimited_is_no_limit_on_any_page_size(tmp_path: Path, unlimited: str) -> None:
    base = "sys/fs/cgroup/memory/"
    found = limit_of(
        "docker_v1",
        tmp_path,
        **{
            base + "memory.limit_in_bytes": unlimited + "\n",
            base + "memory.stat": f"hierarchical_memory_limit {unlimited}\n",
        },
    )
    assert (found.version, found.limit_bytes, found.limited_by) == ("v1", None, None)
    assert found.usage_bytes is not None, "that of the process's own group"


def test_group_outside_of_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    found = limit_of("docker_v2", tmp_path, **{"proc/self/cgroup": "0::/../../elsewhere\n"})
    assert found.limit_bytes == 32 * GIB


def test_nothing_above_the_mount_is_taken_for_a_group(tmp_path: Path) -> None:
    root = build("docker_v2", tmp_path, **{"proc/self/cgroup": "0::/..\n"})
    (root / "sys/fs/memory.max").write_text("4096\n")
    assert read_memory_limit(str(root)).limit_bytes == 32 * GIB


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("1 0 0:1 / /cg - cgroup2 none rw", GIB),  # no more fields than are read
        ("1 0 0:1 / /cg rw shared:9 - cgroup none rw,cpu,memory", 2 * GIB),
        ("1 0 0:1 / /with\\040a\\011space - cgroup2 none rw", 3 * GIB),
        ("1 0 0:1 / /cg rw - cgroup none rw,cpu", None),
        ("1 0 0:1 / /cg rw - tmpfs none rw,memory", None),
        ("1 0 0:1 / - cgroup2 none rw", None),
        ("1 0 0:1 / /cg rw - cgroup2 none", None),
    ],
)
def test_a_mount_is_told_by_the_kind_of_its_file_system(
    tmp_path: Path, line: str, limit: int | None
) -> None:
    files = {
        "proc/self/cgroup": "0::/\n4:memory:/\n",
        "proc/self/mountinfo": f"{line}\n",
        "cg/memory.max": str(GIB),
        "cg/memory.limit_in_bytes": str(2 * GIB),
        "with a\tspace/memory.max": str(3 * GIB),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_memory_limit(str(tmp_path))
    assert (found.limit_bytes, found.version is None) == (limit, limit is None)
    assert (found.missing == ("no memory controller is mounted",)) == (limit is None)


def test_group_nested_in_a_container_is_followed_below_the_mount(tmp_path: Path) -> None:
    group = "/docker/5d7f0c3a9be1"
    files = {"proc/self/cgroup": f"9:memory:{group}/inner\n"}
    root = build("docker_v1", tmp_path, **files)
    inner = root / "sys/fs/cgroup/memory/inner"
    inner.mkdir()
    (inner / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert read_memory_limit(str(root)).limited_by == "/sys/fs/cgroup/memory/inner"
    # A name that only begins alike is not inside.
    (root / "proc/self/cgroup").write_text(f"9:memory:{group}f/inner\n")
    assert read_memory_limit(str(root)).limited_by == "/sys/fs/cgroup/memory"


def test_root_group_of_a_host_has_no_limit_and_nothing_is_missing(tmp_path: Path) -> None:
    root = build("docker_v2", tmp_path)
    for file in (root / "sys/fs/cgroup").glob("memory.*"):
        file.unlink()
    found = read_memory_limit(str(root))
    assert (found.version, found.limit_bytes, found.missing) == ("v2", None, ())


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("docker_v1", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
        ("docker_v2", "sys/fs/cgroup/memory.current"),
    ],
)
def test_limit_without_a_usage_is_unknown_and_says_so(
    tmp_path: Path, name: str, usage: str
) -> None:
    files = {"sys/fs/cgroup/memory/memory.oom_control": ""} if name == "docker_v1" else {}
    system = machine(name, tmp_path, **files)
    assert examine(system)["memory limit"].verdict != "unknown"
    (tmp_path / usage).unlink()
    found = examine(machine_at(name, tmp_path))["memory limit"]
    assert (found.verdict, found.why) == ("unknown", f"/{usage}: no such file")
    assert found.facts["limit_bytes"]


def test_v2_without_the_memory_controller_is_unknown_and_says_so(tmp_path: Path) -> None:
    root = build("docker_v2", tmp_path)
    (root / "sys/fs/cgroup/memory.max").unlink()
    controllers = root / "sys/fs/cgroup/cgroup.controllers"
    controllers.write_text("cpu io\n")
    for _ in range(2):
        found = read_memory_limit(str(root))
        assert (found.version, found.limit_bytes) == (None, None)
        assert "memory controller" in found.missing[0]
        controllers.unlink(missing_ok=True)  # not even that, the second time


@pytest.mark.parametrize(
    "text", ["", "garbage", "0::", "4:memory", "\x00\xff:::\n:::", "max\n" * 9]
)
@pytest.mark.parametrize("path", ["proc/self/cgroup", "proc/self/mountinfo"])
def test_damaged_tables_never_raise(tmp_path: Path, path: str, text: str) -> None:
    found = limit_of("docker_v1", tmp_path, **{path: text})
    assert found.limit_bytes in (None, 16 * GIB)


def test_a_line_cut_short_hides_no_other(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": "30 25 0:27 / /sys/fs/cgroup ro - cgroup cgroup\n"}
    assert limit_of("docker_v1", tmp_path, **files).limit_bytes is None


def test_a_mount_that_is_not_there_has_no_limit(tmp_path: Path) -> None:
    root = build("docker_v1", tmp_path)
    (root / "sys/fs/cgroup/memory").rename(root / "sys/fs/elsewhere")
    found = read_memory_limit(str(root))
    assert (found.version, found.limit_bytes) == ("v1", None)


def test_v1_limit_is_found_with_proc_hidden(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    found = read_memory_limit(str(tmp_path))
    assert (found.version, found.limit_bytes, found.headroom_bytes) == ("v1", 4 * GIB, 3 * GIB)


def test_empty_root_names_what_is_missing(tmp_path: Path) -> None:
    found = read_memory_limit(str(tmp_path))
    assert found.version is None
    assert "/proc/self/cgroup: no such file" in found.missing


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_of_a_limit_and_of_what_is_left_without_each_file(
    name: str, tmp_path: Path
) -> None:
    """Every field, byte for byte; OO_REWRITE_GOLDEN=1 after a deliberate change."""
    root = build(name, tmp_path)
    said = ("cgroup", "memory", "mountinfo")
    files = sorted(path for path in root.rglob("*") if any(word in path.name for word in said))
    found = {"": asdict(read_memory_limit(str(root)))}
    for path in filter(Path.is_file, files):
        text = path.read_text("utf-8")
        for how in ("gone", "empty"):
            path.write_text("", "utf-8") if how == "empty" else path.unlink()
            now = asdict(read_memory_limit(str(root)))
            changed = {key: now[key] for key in now if now[key] != found[""][key]}
            found[f"{path.relative_to(root)} {how}"] = changed
        path.write_text(text, "utf-8")
    golden = json.loads(LIMITS.read_text("utf-8")) if LIMITS.exists() else {}
    found = json.loads(json.dumps(found))
    if os.environ.get("OO_REWRITE_GOLDEN"):
        golden = dict(sorted({**golden, name: found}.items()))
        LIMITS.write_text(json.dumps(golden, indent=1) + "\n", "utf-8")
    assert found == golden[name]


# --- Whole machines ----------------------------------------------------------------------------


def machine(name: str, root: Path, **replaced: str) -> System:
    """Return the recorded machine `name`, with some of its files replaced."""
    build(name, root, **replaced)
    return machine_at(name, root, replaced.get("answers.json"))


def machine_at(name: str, root: Path, recorded: str | None = None) -> System:
    """Return the recorded machine `name` whose files are already at `root`."""
    answers = json.loads(recorded or sections(name)["answers.json"])
    gpus = dict(answers["gpus"])
    cards = []
    for card in gpus.pop("gpus", []):
        if card.get("processes") is not None:
            card["processes"] = tuple(GpuProcess(**process) for process in card["processes"])
        cards.append(Gpu(**card))
    if "cuda_version" in gpus:
        gpus["cuda_version"] = tuple(gpus["cuda_version"])
    return System(
        str(root),
        environ=answers["environ"],
        platform=answers["platform"],
        gpus=GpuView(gpus=tuple(cards), **gpus),
        torch=TorchView(**answers["torch"]),
        disk=disk_of(answers["disk"]) if "disk" in answers else None,
    )


def disk_of(answers: dict[str, Any]) -> DiskView:
    """Return what was measured of a disk: GB/s by number of threads."""
    rates = tuple(Rate(Reads(threads, 4 << 20), gbps) for threads, gbps in answers.pop("rates", ()))
    direct = answers.pop("direct", True)
    return DiskView(**answers, speed=DiskSpeed(rates, direct, GIB, 1.5) if rates else None)


def changed(name: str, root: Path, path: str, old: str, new: str) -> System:
    """Return the machine with `old` replaced by `new` in one of its files."""
    text = sections(name)[path]
    assert old in text, f"{path} of {name} does not hold {old!r}"
    return machine(name, root, **{path: text.replace(old, new)})


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\x00\x08\n"


def test_what_the_machine_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Every value a report shows is hostile here: names, variables, files, reasons, versions."""
    build("bare_metal", tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_text(f"{HOSTILE}{path.read_text('utf-8')}", encoding="utf-8")
    card = Gpu(
        0,
        name=f"RTX{HOSTILE}",
        bus_id=HOSTILE,
        driver_model=HOSTILE,
        total_bytes=GIB,
        used_bytes=GIB,
        missing=dict.fromkeys(("link", "memory", "processes", "clock reasons"), HOSTILE),
    )
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_MODULE_LOADING")
    for platform in ("linux", "win32", HOSTILE):
        report = examine(
            System(
                str(tmp_path),
                environ=dict.fromkeys(names, HOSTILE),
                platform=platform,
                gpus=GpuView((card,), driver_version=f"580{HOSTILE}", why=HOSTILE),
                torch=TorchView(
                    version=f"2.13{HOSTILE}",
                    cuda=f"12.8{HOSTILE}",
                    settings=HOSTILE,
                    settings_error=HOSTILE,
                    why=HOSTILE,
                ),
                disk=DiskView(f"/models/{HOSTILE}", HOSTILE, why=HOSTILE),
                aitoolkit=str(tmp_path / HOSTILE),
            )
        )
        shown = [report.to_text(), report.to_json(), report.to_html()]
        assert "evil" in shown[0]
        for text in shown:
            assert {c for c in text if not c.isprintable()} <= {"\n"}


def test_at_least_eight_machines_are_recorded() -> None:
    needed = {"bare_metal", "docker_v1", "docker_v2", "kubernetes", "slurm", "wsl2"}
    assert needed | {"hidden_proc", "no_swap"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_page_of_each_machine(tmp_path: Path, name: str) -> None:
    page = examine(machine(name, tmp_path)).to_text()
    golden = TREES / f"{name}.txt"
    if os.environ.get("OO_REWRITE_GOLDEN"):
        golden.write_text(page, encoding="utf-8")
    assert page == golden.read_text(encoding="utf-8")


def test_json_and_html_of_a_machine(tmp_path: Path) -> None:
    report = examine(machine("slurm", tmp_path))
    for ending, text in (("json", report.to_json()), ("html", report.to_html())):
        golden = TREES / f"slurm.{ending}"
        if os.environ.get("OO_REWRITE_GOLDEN"):
            golden.write_text(text, encoding="utf-8")
        assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_complete_and_narrow(tmp_path: Path, name: str) -> None:
    report = examine(machine(name, tmp_path))
    assert [finding.name for finding in report.findings] == list(CHECKS)
    for finding in report.findings:
        assert finding.verdict in VERDICTS and finding.value, finding
        if finding.verdict in ("bad", "warn"):
            assert finding.why and finding.fix, finding
        if finding.verdict == "unknown":
            assert finding.why, f"{finding.name} does not say why it could not see"
    for width in (40, 60, 80, 100, 200):
        lines = report.to_text(width=width).splitlines()
        assert max(map(len, lines)) <= max(60, min(100, width))


def test_verdicts_stand_worst_first_in_the_text(tmp_path: Path) -> None:
    text = examine(machine("ailing", tmp_path)).to_text()
    order = [line.split()[0] for line in text.splitlines()[2:] if not line.startswith(" ")]
    assert order == sorted(order, key=VERDICTS.index) and order[0] == "bad"


ANSWERS = "answers.json"
MEMINFO = "proc/meminfo"
APP = "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/app-terminal.scope/"


@pytest.mark.parametrize(
    ("name", "path", "old", "new", "check", "before", "after"),
    [
        ("bare_metal", "sys/kernel/mm/transparent_hugepage/enabled", "[madvise]", "madvise",
         "huge pages", "ok", "unknown"),
        ("wsl2", "proc/sys/kernel/osrelease", "microsoft-standard-WSL2", "generic", "allocator",
         "bad", "ok"),
        ("windows", ANSWERS, '"CUDA_LAUNCH_BLOCKING": "1"', '"CUDA_MODULE_LOADING": "LAZY"',
         "switches", "bad", "ok"),
        ("bare_metal", MEMINFO, "MemTotal:       131", "MemTotal: -131", "ram", "ok", "unknown"),
        ("bare_metal", MEMINFO, "MemTotal:       131", "MemTotal: 9999999999131", "ram", "ok",
         "unknown"),
        ("bare_metal", APP + "memory.max", "max", "9" * 4400, "memory limit", "ok", "ok"),
        ("windows", ANSWERS, '"560.94"', '"580.88"', "torch", "bad", "ok"),
        ("bare_metal", ANSWERS, '"580.65.06"', '"520.61.05"', "torch", "ok", "bad"),
        ("bare_metal", ANSWERS, '"cuda": "12.8", ', "", "torch", "ok", "bad"),
        ("no_swap", "sys/bus/pci/devices/0000:01:00.0/current_link_width", "8", "1", "link",
         "unknown", "bad"),
        ("no_swap", "proc/driver/nvidia/version", "560.35.03", "no version", "driver", "ok",
         "bad"),
        ("bare_metal", "sys/block/nvme0n1/queue/rotational", "0", "1", "disk", "ok", "warn"),
        ("bare_metal", "proc/self/mountinfo", "ext4 /dev/nvme0n1p2", "nfs4 server:/home", "disk",
         "ok", "warn"),
        ("bare_metal", "proc/self/mountinfo", "ext4 /dev/nvme0n1p2", "tmpfs tmpfs", "disk", "ok",
         "unknown"),
        ("bare_metal", ANSWERS, '[[1, 2.9], [4, 6.7], [8, 6.9]]', "[[1, 0.2], [4, 0.49]]", "disk",
         "ok", "warn"),
        ("ailing", ANSWERS, "[1, 0.19]", "[1, 1.9]", "disk", "warn", "warn"),  # it has platters
        ("docker_v1", ANSWERS, "[4, 0.55], [8, 0.54]", "[4, 0.45]", "disk", "ok", "ok"),
        ("hybrid", "sys/bus/pci/devices/0000:00:05.0/class", "0x030200", "0x040300", "driver",
         "bad", "bad"),
        ("hybrid", "sys/bus/pci/devices/0000:00:05.0/class", "0x030200", "0x040300", "torch",
         "bad", "ok"),
    ],
)  # fmt: skip
def test_one_changed_value_changes_the_verdict(
    tmp_path: Path, name: str, path: str, old: str, new: str, check: str, before: str, after: str
) -> None:
    assert examine(machine(name, tmp_path / "before"))[check].verdict == before
    found = examine(changed(name, tmp_path / "after", path, old, new))[check]
    assert found.verdict == after, found


# --- Anything in any file ----------------------------------------------------------------------

GARBAGE = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        ["", "max", "-1", "[", "[]", ":", "0::", "1e400", "9" * 40, "9" * 5000, "\x00", "\n" * 9]
    ),
)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_content_of_any_file_makes_a_check_fail(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    files = [path for path in sections(name) if path != ANSWERS and not path.endswith("/")]
    damaged = {
        path: data.draw(GARBAGE)
        for path in data.draw(st.lists(st.sampled_from(files or [""]), unique=True, max_size=5))
        if path
    }
    with tempfile.TemporaryDirectory() as folder:
        report = examine(machine(name, Path(folder), **damaged))
    for finding in report.findings:
        assert "check itself failed" not in finding.why, (name, damaged)
    report.to_html()
    json.loads(report.to_json())


@pytest.mark.parametrize("number", ["9" * 5000, "²", "٣", "-1", "0x10", "1_0", "1.5"])
def test_what_looks_like_a_number_and_is_none_or_huge(tmp_path: Path, number: str) -> None:
    """In every place of every file that holds a number."""
    for name in ("no_swap", "docker_v1", "docker_v2"):
        for path, text in sections(name).items():
            if path == ANSWERS or not re.search(r"\d", text):
                continue
            odd = re.sub(r"(?<![\w.])\d+(?![\w.])", number, text)
            report = examine(machine(name, tmp_path, **{path: odd}))
            failed = [f for f in report.findings if "check itself failed" in f.why]
            assert not failed, (name, path, failed)


@pytest.mark.parametrize("cards", [1, 3])
def test_cards_that_answer_half_of_the_questions(cards: int) -> None:
    """Every field of a card absent in turn: no check may rely on two arriving together."""
    whole = {
        "total_bytes": 8 << 30, "used_bytes": 1 << 30, "link_generation": 3, "link_width": 8,
        "max_link_generation": 4, "card_link_generation": 4, "max_link_width": 16,
        "performance_state": 0, "clock_reasons": 0, "processes": (),
    }  # fmt: skip
    for absent in whole:
        card = Gpu(index=0, **{**whole, absent: None})  # type: ignore[arg-type]
        view = GpuView(gpus=(card,) * cards, driver_version="580.1")
        report = examine(System("/nowhere", environ={}, platform="linux", gpus=view))
        assert not [f for f in report.findings if "check itself failed" in f.why], absent


def test_the_documentation_quotes_a_real_page_and_lists_every_check() -> None:
    text = (TREES.parent.parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")
    quoted = text.split("```\n")
    page = next(block for block in quoted if block.startswith("doctor: "))
    assert (TREES / "docker_v1.txt").read_text(encoding="utf-8").startswith(page)
    table = text.split("## The checks")[1]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1 : len(CHECKS) + 1] == list(CHECKS)


# --- What single answers mean ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "check", "verdict", "words"),
    [
        # Either answer alone shows that a slow link only rests.
        ({"link_generation": 1, "performance_state": 8, "clock_reasons": None}, "link", "ok",
         "resting"),
        ({"link_generation": 1, "performance_state": None, "clock_reasons": 1}, "link", "ok",
         "resting"),
        ({"link_generation": 1, "performance_state": None}, "link", "warn", "card works"),
        ({"link_generation": None}, "link", "unknown", "no NVIDIA card"),
        ({"clock_reasons": None}, "clocks", "ok", "clock reasons: not visible"),
        ({"total_bytes": None}, "other processes", "unknown", "no NVIDIA card"),
    ],
)  # fmt: skip
def test_what_one_answer_of_a_card_means(
    tmp_path: Path, answers: dict[str, object], check: str, verdict: str, words: str
) -> None:
    healthy: dict[str, object] = {
        "total_bytes": 24 << 30, "used_bytes": 0, "link_generation": 4, "link_width": 16,
        "max_link_generation": 4, "card_link_generation": 4, "max_link_width": 16,
        "performance_state": 0, "clock_reasons": 0, "processes": (),
    }  # fmt: skip
    card = Gpu(index=0, **{**healthy, **answers})  # type: ignore[arg-type]
    system = System(str(tmp_path), environ={}, platform="linux", gpus=GpuView(gpus=(card,)))
    found = examine(system)[check]
    assert (found.verdict, words in found.why) == (verdict, True), found


def test_memory_of_this_process_is_not_somebody_elses() -> None:
    """On the live machine, with a recorded card that this very process fills."""
    mine, other = GpuProcess(os.getpid(), 20 << 30), GpuProcess(1, 3 << 30)
    card = Gpu(0, total_bytes=24 << 30, used_bytes=23 << 30, processes=(mine, other))
    found = check_other_processes(System(gpus=GpuView(gpus=(card,))))
    assert found.verdict == "warn"
    assert found.value == "3.0 GiB of 24.0 GiB in use by process 1 (3.0 GiB)"
    hidden = GpuProcess(os.getpid(), None)
    card = Gpu(0, total_bytes=24 << 30, used_bytes=1 << 30, processes=(hidden,))
    found = check_other_processes(System(gpus=GpuView(gpus=(card,))))
    assert (found.verdict, found.value) == ("ok", "1.0 GiB of 24.0 GiB in use")


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ("rw,size=65536k", 64 << 20),
        ("rw,size=2g,mode=1777", 2 << 30),
        ("rw,size=3G", 3 << 30),
        ("rw,size=512m", 512 << 20),
        ("rw,size=8589934592", 8 << 30),
        ("rw,nr_inodes=99k,size=1g", 1 << 30),
        ("rw,nr_inodes=99k", 8 << 30),
        ("rw,size=garbage", 8 << 30),
    ],
)
def test_size_of_shared_memory_from_its_mount(tmp_path: Path, options: str, total: int) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {16 << 20} kB\n")
    (tmp_path / "proc" / "self" / "mounts").write_text(f"shm /dev/shm tmpfs {options} 0 0\n")
    system = System(str(tmp_path), environ={}, platform="linux", gpus=GpuView())
    assert check_shared_memory(system).facts["total_bytes"] == total


def test_a_system_without_resource_limits_has_none_on_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert checks_host._memlock_from_system_call() is None
