"""What each check finds at the limits that it knows, on machines of a few files, word for word.

The verdicts are written here, the words and figures in tests/data/systems/findings.json. After a
deliberate change rewrite them with OO_REWRITE_GOLDEN=1, and read the difference.
"""

from __future__ import annotations

import json
import os
import sys
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from oracle_offload.diagnose.doctor import System, examine
from oracle_offload.diagnose.doctor.checks import CHECKS
from oracle_offload.diagnose.doctor.finding import Finding
from oracle_offload.diagnose.doctor.torch_build import TorchView
from oracle_offload.host.gpus import Gpu, GpuProcess, GpuView

GOLDEN = Path(__file__).parent.parent / "data" / "systems" / "findings.json"
MIB, GIB = 1 << 20, 1 << 30


def assert_found(found: Finding, case: str, verdict: str) -> None:
    """The finding has this verdict, and the words that the golden file holds for the case."""
    assert found.verdict == verdict, found
    said = json.loads(json.dumps(asdict(found), default=str))
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if os.environ.get("OO_REWRITE_GOLDEN"):
        golden[f"{found.name}: {case}"] = said
        text = json.dumps(dict(sorted(golden.items())), indent=1, ensure_ascii=False)
        GOLDEN.write_text(text + "\n", encoding="utf-8")
        return
    assert said == golden[f"{found.name}: {case}"]


def meminfo(**sizes: int) -> str:
    """Return /proc/meminfo with sizes in bytes; counts of huge pages as they are."""
    known = {"MemTotal": 128 * GIB, "MemAvailable": 64 * GIB, "SwapTotal": 0, "SwapFree": 0}
    rows = {
        name: str(size) if name.startswith("HugePages_") else f"{size // 1024} kB"
        for name, size in {**known, **sizes}.items()
    }
    return "".join(f"{name}: {text}\n" for name, text in rows.items())


GROUP = "sys/fs/cgroup/job/"
V2 = {
    "proc/self/cgroup": "0::/job\n",
    "proc/self/mountinfo": "33 24 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n",
    GROUP + "memory.max": "max\n",
    GROUP + "memory.current": f"{10 * GIB}\n",
}


def machine(root: Path, files: dict[str, str], **options: object) -> System:
    """Return a Linux machine of a few files, without a card, whose torch was not asked."""
    for name, text in {"proc/meminfo": meminfo(), **V2, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text:
            (root / name).write_text(text, encoding="utf-8")
    merged: dict[str, object] = {
        "environ": {},
        "platform": "linux",
        "gpus": GpuView(why="no driver here"),
        "torch": TorchView(why="not asked"),
        **options,
    }
    return System(str(root), **merged)  # type: ignore[arg-type]


def limits(text: str) -> dict[str, str]:
    return {"proc/self/limits": f"Max locked memory         {text}   {text}   bytes\n"}


def mounted(options: str) -> dict[str, str]:
    return {"proc/self/mounts": f"proc /proc proc rw 0 0\nshm /dev/shm tmpfs {options} 0 0\n"}


HUGE = "sys/kernel/mm/transparent_hugepage/enabled"
RDMA = {"sys/class/infiniband/mlx5_0/name": "mlx5_0"}
RAM, SWAP, LIMIT, LOCKED, SHM = "ram", "swap", "memory limit", "locked memory", "/dev/shm"
FILES: list[tuple[str, str, dict[str, str], str]] = [
    (RAM, "8 GiB free", {"proc/meminfo": meminfo(MemAvailable=8 * GIB)}, "ok"),
    (RAM, "less than 8 GiB free", {"proc/meminfo": meminfo(MemAvailable=8 * GIB - 1024)}, "warn"),
    (RAM, "2 GiB free", {"proc/meminfo": meminfo(MemAvailable=2 * GIB)}, "warn"),
    (RAM, "less than 2 GiB free", {"proc/meminfo": meminfo(MemAvailable=2 * GIB - 1024)}, "bad"),
    (RAM, "all is free", {"proc/meminfo": meminfo(MemAvailable=128 * GIB)}, "ok"),
    (RAM, "more free than there is", {"proc/meminfo": meminfo(MemAvailable=129 * GIB)}, "unknown"),
    (RAM, "no word of what is free", {"proc/meminfo": "MemTotal: 1048576 kB\n"}, "unknown"),
    (RAM, "no size in all", {"proc/meminfo": "MemTotal: some kB\n"}, "unknown"),
    (RAM, "no meminfo", {"proc/meminfo": ""}, "unknown"),
    (RAM, "some huge pages",
     {"proc/meminfo": meminfo(HugePages_Free=16384, Hugepagesize=2 * MIB)}, "ok"),
    (RAM, "more than a quarter in huge pages",
     {"proc/meminfo": meminfo(HugePages_Free=16385, Hugepagesize=2 * MIB)}, "warn"),
    (RAM, "huge pages and hardly anything free", {"proc/meminfo": meminfo(
        MemAvailable=GIB, HugePages_Free=16385, Hugepagesize=2 * MIB)}, "bad"),
    (SWAP, "none in 64 GiB", {"proc/meminfo": meminfo(MemTotal=64 * GIB)}, "ok"),
    (SWAP, "none in less", {"proc/meminfo": meminfo(MemTotal=64 * GIB - 1024)}, "warn"),
    (SWAP, "none in an unknown total", {"proc/meminfo": "SwapTotal: 0 kB\n"}, "ok"),
    (SWAP, "half used", {"proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=4 * GIB)}, "ok"),
    (SWAP, "more than half used",
     {"proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=4 * GIB - 1024)}, "warn"),
    (SWAP, "none used", {"proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=8 * GIB)}, "ok"),
    (SWAP, "more free than there is",
     {"proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=9 * GIB)}, "unknown"),
    (SWAP, "no size in all", {"proc/meminfo": "SwapTotal: some kB\n"}, "unknown"),
    (SWAP, "no meminfo", {"proc/meminfo": ""}, "unknown"),
    (SWAP, "a group that may swap a little", {
        "proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=GIB),
        GROUP + "memory.swap.max": "4096"}, "warn"),
    (SWAP, "a group that may not swap", {
        "proc/meminfo": meminfo(SwapTotal=8 * GIB, SwapFree=GIB),
        GROUP + "memory.swap.max": "0"}, "ok"),
    ("huge pages", "always", {HUGE: "[always] madvise never\n"}, "ok"),
    ("huge pages", "never", {HUGE: "always madvise [never]\n"}, "warn"),
    ("huge pages", "some other format", {HUGE: "perhaps " * 9}, "unknown"),
    ("huge pages", "not to be seen", {}, "unknown"),
    (LOCKED, "half of the memory with RDMA", {**limits(str(64 * GIB)), **RDMA}, "ok"),
    (LOCKED, "less than half with RDMA", {**limits(str(64 * GIB - 1)), **RDMA}, "bad"),
    (LOCKED, "less than half without", limits(str(64 * GIB - 1)), "ok"),
    (LOCKED, "with RDMA in an unknown total",
     {**limits(str(64 * GIB)), **RDMA, "proc/meminfo": ""}, "bad"),
    (LOCKED, "none with RDMA", {**limits("unlimited"), **RDMA}, "ok"),
    (LOCKED, "no size", limits("-5"), "unknown"),
    (LOCKED, "not to be seen", {}, "unknown"),
    (LOCKED, "no such line", {"proc/self/limits": "Max cpu time  unlimited\n"}, "unknown"),
    (LIMIT, "none", {}, "ok"),
    (LIMIT, "none, and a kill", {GROUP + "memory.events": "oom_kill 3\n"}, "warn"),
    (LIMIT, "not a size", {GROUP + "memory.max": "-1\n"}, "unknown"),
    (LIMIT, "8 GiB left", {GROUP + "memory.max": str(18 * GIB)}, "ok"),
    (LIMIT, "less than 8 GiB left", {GROUP + "memory.max": str(18 * GIB - 1)}, "warn"),
    (LIMIT, "2 GiB left", {GROUP + "memory.max": str(12 * GIB)}, "warn"),
    (LIMIT, "less than 2 GiB left", {GROUP + "memory.max": str(12 * GIB - 1)}, "bad"),
    (LIMIT, "nothing left", {GROUP + "memory.max": str(9 * GIB)}, "bad"),
    (LIMIT, "page cache that can be dropped is left", {
        GROUP + "memory.max": str(11 * GIB),
        GROUP + "memory.stat": f"inactive_file {7 * GIB}\n"}, "ok"),
    (LIMIT, "the machine's own size", {GROUP + "memory.max": str(128 * GIB)}, "ok"),
    (LIMIT, "the machine's own size, below a group that is not to be read", {
        "proc/self/cgroup": "0::/job/inner\n", GROUP + "memory.max": "-1",
        GROUP + "inner/memory.max": str(128 * GIB),
        GROUP + "inner/memory.current": "1"}, "ok"),
    (LIMIT, "a byte below the machine's size", {GROUP + "memory.max": str(128 * GIB - 1)}, "ok"),
    (LIMIT, "of a machine of unknown size",
     {GROUP + "memory.max": str(40 * GIB), "proc/meminfo": ""}, "ok"),
    (LIMIT, "usage not to be seen",
     {GROUP + "memory.max": str(40 * GIB), GROUP + "memory.current": ""}, "unknown"),
    (LIMIT, "slowed and nothing else", {GROUP + "memory.high": str(20 * GIB)}, "warn"),
    (LIMIT, "slowed below a limit", {
        GROUP + "memory.max": str(40 * GIB), GROUP + "memory.high": str(40 * GIB - 1)}, "warn"),
    (LIMIT, "slowed at the limit", {
        GROUP + "memory.max": str(40 * GIB), GROUP + "memory.high": str(40 * GIB)}, "ok"),
    (LIMIT, "little left, slowed, and kills", {
        GROUP + "memory.max": str(12 * GIB - 1), GROUP + "memory.high": str(11 * GIB),
        GROUP + "memory.events": "oom_kill 1\n"}, "bad"),
    (LIMIT, "slowed, and kills", {
        GROUP + "memory.high": str(11 * GIB), GROUP + "memory.events": "oom_kill 1\n"}, "warn"),
    (LIMIT, "no controller", {"proc/self/cgroup": "", "proc/self/mountinfo": ""}, "unknown"),
    (SHM, "1 GiB", mounted("rw,size=1g"), "ok"),
    (SHM, "less than 1 GiB", mounted("rw,size=1048575k"), "warn"),
    (SHM, "a page above what docker gives", mounted("rw,size=65540k"), "warn"),
    (SHM, "what docker gives", mounted("rw,size=65536k"), "bad"),
    (SHM, "no limit of its own", mounted("rw,size=0"), "ok"),
    (SHM, "half the memory", mounted("rw"), "ok"),
    (SHM, "half of an unknown total", {**mounted("rw"), "proc/meminfo": ""}, "bad"),
    (SHM, "not mounted", {"proc/self/mounts": "proc /proc proc rw 0 0\n/dev/shm\n"}, "bad"),
    (SHM, "not to be seen", {}, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "case", "files", "verdict"), FILES, ids=[f"{row[0]}: {row[1]}" for row in FILES]
)
def test_what_the_files_of_a_host_mean(
    tmp_path: Path, check: str, case: str, files: dict[str, str], verdict: str
) -> None:
    assert_found(CHECKS[check](machine(tmp_path, files)), case, verdict)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_what_is_said_of_systems_that_are_not_linux(tmp_path: Path, platform: str) -> None:
    report = examine(machine(tmp_path, {"proc/meminfo": ""}, platform=platform))
    expected = {"ram": "unknown", "swap": "unknown", "place": "unknown", LOCKED: "ok"}
    if platform == "darwin":
        expected |= {"place": "ok", LOCKED: "unknown"}
    for check in ("ram", "swap", "huge pages", LOCKED, SHM, "place"):
        assert_found(report[check], platform, expected.get(check, "ok"))


# ---- what only the live machine is asked ----

Memory = namedtuple("Memory", "total available")


def live_without_meminfo() -> System:
    """Return the live machine on a platform that has no /proc."""
    system = System(platform="win32", gpus=GpuView(), torch=TorchView())
    system.__dict__["meminfo"] = {}
    return system


@pytest.mark.parametrize(
    ("case", "memory", "verdict"),
    [
        ("psutil answers", Memory(64 * GIB, 32 * GIB), "ok"),
        ("psutil says that nothing is free", Memory(64 * GIB, 0), "bad"),
        ("psutil says that there is nothing", Memory(0, 0), "unknown"),
        ("psutil says less than nothing", Memory(64 * GIB, -1), "unknown"),
        ("psutil says what cannot be", Memory(1 << 62, GIB), "unknown"),
        ("psutil says that more is free than can be", Memory(64 * GIB, 1 << 62), "unknown"),
        ("psutil fails", OSError("hidden"), "unknown"),
        ("no psutil", None, "unknown"),
    ],
)
def test_memory_where_there_is_no_meminfo(
    monkeypatch: pytest.MonkeyPatch, case: str, memory: Memory | Exception | None, verdict: str
) -> None:
    def answer() -> Memory:
        if isinstance(memory, Exception):
            raise memory
        assert memory is not None
        return memory

    psutil = None if memory is None else SimpleNamespace(virtual_memory=answer)
    monkeypatch.setitem(sys.modules, "psutil", psutil)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 22, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert_found(CHECKS["ram"](live_without_meminfo()), case, verdict)


@pytest.mark.parametrize(
    ("case", "pages"), [("no such call", None), ("-1 pages", -1), ("too many", 1 << 50)]
)
def test_memory_where_the_system_call_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, case: str, pages: int | None
) -> None:
    def sysconf(name: str) -> int:
        if pages is None:
            raise ValueError("unrecognized configuration name")
        return {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}[name]

    monkeypatch.setitem(sys.modules, "psutil", None)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert_found(CHECKS["ram"](live_without_meminfo()), case, "unknown")


@pytest.mark.parametrize(
    ("case", "total", "free", "verdict"),
    [
        ("1 GiB free", 8 * GIB, GIB, "ok"),
        ("less than 1 GiB free", 8 * GIB, GIB - 4096, "warn"),
        ("64 MiB free", 8 * GIB, 64 * MIB, "warn"),
        ("less than 64 MiB free", 8 * GIB, 64 * MIB - 4096, "bad"),
        ("64 MiB in all", 64 * MIB, 64 * MIB, "bad"),
    ],
)
def test_room_that_is_left_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, case: str, total: int, free: int, verdict: str
) -> None:
    answer = SimpleNamespace(f_blocks=total // 4096, f_frsize=4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: {"/dev/shm": answer}[path])
    system = System(platform="linux", gpus=GpuView(), torch=TorchView())
    assert_found(CHECKS[SHM](system), case, verdict)


def test_shared_memory_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", fail)
    system = System(platform="linux", gpus=GpuView(), torch=TorchView())
    assert_found(CHECKS[SHM](system), "missing", "bad")


@pytest.mark.parametrize(
    ("case", "soft", "verdict"),
    [("no limit by the system call", -1, "ok"), ("a limit by the system call", 65536, "ok")],
)
def test_the_limit_on_locked_memory_where_proc_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, case: str, soft: int, verdict: str
) -> None:
    resource = ModuleType("resource")
    resource.RLIM_INFINITY, resource.RLIMIT_MEMLOCK = -1, 8  # type: ignore[attr-defined]
    resource.getrlimit = {8: (soft, 1 << 40)}.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "resource", resource)
    system = System(platform="darwin", gpus=GpuView(), torch=TorchView())
    monkeypatch.setattr(System, "read", lambda self, path: SimpleNamespace(text=None, why="none"))
    monkeypatch.setattr(System, "names", lambda self, path: [])
    system.__dict__["meminfo"] = {}
    assert_found(CHECKS[LOCKED](system), case, verdict)


# ---- the card ----

CARD: dict[str, object] = {
    "index": 0, "name": "RTX 4090", "total_bytes": 24 * GIB, "used_bytes": 0,
    "link_generation": 4, "link_width": 16, "max_link_generation": 4, "card_link_generation": 4,
    "max_link_width": 16, "performance_state": 0, "clock_reasons": 0, "processes": (),
}  # fmt: skip
LINK, CLOCKS, OTHERS = "link", "clocks", "other processes"
BUSY = tuple(GpuProcess(10 + i, i * GIB if i else None) for i in range(5))
CARDS: list[tuple[str, str, dict[str, object], str]] = [
    (LINK, "at its best", {}, "ok"),
    (LINK, "PCIe 3.0", {"link_generation": 3, "max_link_generation": 3,
                        "card_link_generation": 3}, "ok"),
    (LINK, "PCIe 6.0, of which no rate is known", {
        "link_generation": 6, "max_link_generation": 6, "card_link_generation": 6}, "ok"),
    (LINK, "best not known", {"max_link_generation": None, "max_link_width": None}, "ok"),
    (LINK, "best lanes not known", {"max_link_width": None}, "ok"),
    (LINK, "best generation not known", {"max_link_generation": None}, "ok"),
    (LINK, "half the lanes", {"link_width": 8}, "warn"),
    (LINK, "five of sixteen lanes", {"link_width": 5}, "warn"),
    (LINK, "a quarter of the lanes", {"link_width": 4}, "bad"),
    (LINK, "half the lanes at rest", {
        "link_width": 8, "link_generation": 1, "performance_state": 8}, "warn"),
    (LINK, "half the lanes, slow at work", {"link_width": 8, "link_generation": 1}, "warn"),
    (LINK, "a slot below the card", {"card_link_generation": 5}, "warn"),
    (LINK, "a slot below the card, at rest",
     {"card_link_generation": 5, "link_generation": 1, "performance_state": 8}, "warn"),
    (LINK, "a slot below the card, rest not visible",
     {"card_link_generation": 5, "link_generation": 1, "performance_state": None,
      "clock_reasons": None}, "warn"),
    (LINK, "rest not visible", {"link_generation": 1, "performance_state": None,
                                "clock_reasons": None}, "unknown"),
    (LINK, "slow in P4", {"link_generation": 3, "performance_state": 4}, "warn"),
    (LINK, "slow in P5", {"link_generation": 3, "performance_state": 5}, "ok"),
    (LINK, "slow and idle", {"link_generation": 3, "clock_reasons": 5}, "ok"),
    (LINK, "no answer", {"link_generation": None, "missing": {"link": "Not Supported"}},
     "unknown"),
    (CLOCKS, "P0", {}, "ok"),
    (CLOCKS, "no state", {"performance_state": None}, "ok"),
    (CLOCKS, "no reasons", {"clock_reasons": None,
                            "missing": {"clock reasons": "Not Supported"}}, "ok"),
    (CLOCKS, "no answer", {"clock_reasons": None, "performance_state": None}, "unknown"),
    (CLOCKS, "power limit and boost", {"clock_reasons": 0x14}, "ok"),
    (CLOCKS, "driver finds it hot", {"clock_reasons": 0x20}, "warn"),
    (CLOCKS, "board finds it hot", {"clock_reasons": 0x60}, "bad"),
    (CLOCKS, "slowed by the board", {"clock_reasons": 0x08}, "bad"),
    (CLOCKS, "power brake", {"clock_reasons": 0x80}, "bad"),
    (OTHERS, "nobody", {}, "ok"),
    (OTHERS, "2 GiB", {"total_bytes": 12 * GIB, "used_bytes": 2 * GIB}, "warn"),
    (OTHERS, "less than 2 GiB", {"total_bytes": 12 * GIB, "used_bytes": 2 * GIB - 1}, "ok"),
    (OTHERS, "a tenth", {"total_bytes": 80 * GIB, "used_bytes": 8 * GIB}, "warn"),
    (OTHERS, "less than a tenth", {"total_bytes": 80 * GIB, "used_bytes": 8 * GIB - 1}, "ok"),
    (OTHERS, "half", {"used_bytes": 12 * GIB}, "bad"),
    (OTHERS, "less than half", {"used_bytes": 12 * GIB - 1}, "warn"),
    (OTHERS, "five processes", {"used_bytes": 10 * GIB, "processes": BUSY}, "warn"),
    (OTHERS, "three processes", {"used_bytes": 10 * GIB, "processes": BUSY[:3]}, "warn"),
    (OTHERS, "not listed", {"used_bytes": 10 * GIB, "processes": None,
                            "missing": {"processes": "Not Supported"}}, "warn"),
    (OTHERS, "not listed, and hardly anything", {"processes": None}, "ok"),
    (OTHERS, "no answer", {"used_bytes": None, "missing": {"memory": "Not Supported"}}, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "case", "answers", "verdict"), CARDS, ids=[f"{row[0]}: {row[1]}" for row in CARDS]
)
def test_what_the_answers_of_a_card_mean(
    tmp_path: Path, check: str, case: str, answers: dict[str, object], verdict: str
) -> None:
    card = Gpu(**{**CARD, **answers})  # type: ignore[arg-type]
    assert_found(CHECKS[check](machine(tmp_path, {}, gpus=GpuView((card,)))), case, verdict)


def test_several_cards_have_all_values_and_the_words_of_the_worst(tmp_path: Path) -> None:
    fine, slow = Gpu(**CARD), Gpu(**{**CARD, "index": 1, "link_width": 4})  # type: ignore[arg-type]
    report = examine(machine(tmp_path, {}, gpus=GpuView((fine, slow))))
    for check, verdict in ((LINK, "bad"), (CLOCKS, "ok"), (OTHERS, "ok")):
        assert_found(report[check], "two cards", verdict)


PCI = "sys/bus/pci/devices/0000:01:00.0/"
SLOT = {
    PCI + "vendor": "0x10de\n",
    PCI + "class": "0x030200\n",
    PCI + "current_link_speed": "8.0 GT/s PCIe\n",
    PCI + "current_link_width": "16\n",
    PCI + "max_link_speed": "16.0 GT/s PCIe\n",
    PCI + "max_link_width": "16\n",
}


@pytest.mark.parametrize(
    ("check", "case", "files", "verdict"),
    [
        (LINK, "by its files", {}, "unknown"),
        (LINK, "by its files, all lanes", {PCI + "max_link_speed": "8.0 GT/s PCIe"}, "ok"),
        (LINK, "by its files, 63 lanes", {PCI + "current_link_width": "63"}, "unknown"),
        (LINK, "by its files, 64 lanes", {PCI + "current_link_width": "64"}, "unknown"),
        (LINK, "by its files, no lanes", {PCI + "current_link_width": "0"}, "unknown"),
        (LINK, "by its files, no speed", {PCI + "current_link_speed": "Unknown"}, "unknown"),
        (LINK, "by its files, empty", {PCI + "current_link_speed": " "}, "unknown"),
        (LINK, "by its files, best lanes unknown", {PCI + "max_link_width": "0"}, "unknown"),
        (LINK, "next to unknown devices", {
            "sys/bus/pci/devices/0000:02:00.0/class": "0x030000",
            "sys/bus/pci/devices/0000:03:00.0/vendor": "0x10de"}, "unknown"),
        (LINK, "of a sound card", {PCI + "class": "0x040300"}, "unknown"),
        (LINK, "of another maker", {PCI + "vendor": "0x1002"}, "unknown"),
        ("driver", "none for the card", {}, "bad"),
        ("driver", "nouveau", {"sys/module/nouveau/version": "1"}, "bad"),
        ("driver", "none in a container", {".dockerenv": "\n"}, "bad"),
        ("driver", "none, and no card", {PCI + "vendor": "0x1002"}, "bad"),
        ("driver", "none, and no card that Windows shows",
         {PCI + "vendor": "0x1002", "proc/sys/kernel/osrelease": "6.6-microsoft"}, "unknown"),
        ("driver", "by its module", {"sys/module/nvidia/version": "550.54.14\n"}, "ok"),
        ("driver", "by its version file", {
            "proc/driver/nvidia/version":
            "x\nNVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun\n"}, "ok"),
    ],
)  # fmt: skip
def test_what_the_files_of_a_card_mean(
    tmp_path: Path, check: str, case: str, files: dict[str, str], verdict: str
) -> None:
    assert_found(CHECKS[check](machine(tmp_path, {**SLOT, **files})), case, verdict)


def test_a_driver_that_answers_is_named_with_its_cards(tmp_path: Path) -> None:
    cards = (Gpu(0, name="A100"), Gpu(1, name="H100"))
    view = GpuView(cards, driver_version="580.65.06", cuda_version=(13, 0))
    found = CHECKS["driver"](machine(tmp_path, {}, gpus=view))
    assert_found(found, "two cards", "ok")
    view = GpuView(driver_version="580.65.06", why="access is refused")
    assert_found(CHECKS["driver"](machine(tmp_path, {}, gpus=view)), "no cards listed", "ok")


@pytest.mark.parametrize(
    ("case", "models", "verdict"),
    [("WDDM", ["WDDM"], "warn"), ("TCC", ["TCC"], "ok"), ("both", ["TCC", "WDDM"], "warn"),
     ("MCDM and one that does not say", ["MCDM", None], "ok"), ("no model", [None], "unknown")],
)  # fmt: skip
def test_the_driver_model_on_windows(
    tmp_path: Path, case: str, models: list[str | None], verdict: str
) -> None:
    cards = tuple(Gpu(index, driver_model=model) for index, model in enumerate(models))
    system = machine(tmp_path, {}, platform="win32", gpus=GpuView(cards))
    assert_found(CHECKS["place"](system), case, verdict)


@pytest.mark.parametrize(
    ("case", "files", "environ", "verdict"),
    [
        ("plain", {}, {}, "ok"),
        ("docker", {".dockerenv": "\n"}, {}, "ok"),
        ("podman", {"run/.containerenv": "\n"}, {}, "ok"),
        ("kubernetes by its variable", {}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "ok"),
        ("kubernetes by its group", {"proc/1/cgroup": "0::/kubepods/pod1\n"}, {}, "ok"),
        ("docker by its group", {"proc/1/cgroup": "4:memory:/docker/5d7f\n"}, {}, "ok"),
        ("lxc by its group", {"proc/1/cgroup": "4:memory:/lxc/box\n"}, {}, "ok"),
        ("no container of that name", {"proc/1/cgroup": "0::/mylxc\n"}, {}, "ok"),
        ("WSL by its release", {"proc/sys/kernel/osrelease": "5.15-microsoft"}, {}, "warn"),
        ("WSL by its version", {"proc/version": "Linux (Microsoft@Microsoft.com)"}, {}, "warn"),
        ("WSL by its library", {"usr/lib/wsl/lib/libcuda.so.1": "ELF"}, {}, "warn"),
        ("a container in WSL", {"proc/version": "microsoft", ".dockerenv": "\n"}, {}, "warn"),
    ],
)
def test_where_the_process_runs(
    tmp_path: Path, case: str, files: dict[str, str], environ: dict[str, str], verdict: str
) -> None:
    assert_found(CHECKS["place"](machine(tmp_path, files, environ=environ)), case, verdict)


# ---- the software ----

DRIVER = {"driver_version": "580.65.06", "cuda_version": (13, 0)}
SETTINGS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("case", "torch", "view", "verdict"),
    [
        ("fits the driver", {"cuda": "12.8"}, DRIVER, "ok"),
        ("not found", {"version": None, "why": "torch is not installed"}, DRIVER, "unknown"),
        ("cannot be imported", {"cuda": "12.8", "import_error": "OSError: x"}, DRIVER, "bad"),
        ("for ROCm", {"hip": "6.2"}, DRIVER, "warn"),
        ("for the CPU, without a card", {}, {}, "ok"),
        ("for the CPU, with a card", {}, {"gpus": (Gpu(0),)}, "bad"),
        ("driver not visible", {"cuda": "12.8"}, {"why": "no NVML"}, "unknown"),
        ("the oldest driver", {"cuda": "12.8"}, {"driver_version": "525.60"}, "ok"),
        ("a driver too old", {"cuda": "12.8"}, {"driver_version": "524.99"}, "bad"),
        ("a driver too old for 13", {"cuda": "13.0"}, {"driver_version": "579.0"}, "bad"),
        ("a driver made for older CUDA", {"cuda": "12.8"},
         {"driver_version": "560.1", "cuda_version": (12, 6)}, "ok"),
        ("a driver made for the same CUDA", {"cuda": "12.8"},
         {"driver_version": "570.1", "cuda_version": (12, 8)}, "ok"),
        ("a CUDA of which no driver is known", {"cuda": "14.1"}, DRIVER, "ok"),
        ("a CUDA that is no number", {"cuda": "nightly"}, DRIVER, "ok"),
    ],
)  # fmt: skip
def test_what_is_said_of_torch(
    tmp_path: Path, case: str, torch: dict[str, str], view: dict[str, object], verdict: str
) -> None:
    asked = TorchView(**{"version": "2.13.0", **torch})  # type: ignore[arg-type]
    system = machine(tmp_path, {}, torch=asked, gpus=GpuView(**view))  # type: ignore[arg-type]
    assert_found(CHECKS["torch"](system), case, verdict)


@pytest.mark.parametrize(
    ("case", "environ", "torch", "verdict"),
    [
        ("defaults", {}, {"settings": ""}, "ok"),
        ("in effect", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, {"settings": SETTINGS}, "ok"),
        ("not in effect", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, {"settings": ""}, "bad"),
        ("others in effect", {}, {"settings": SETTINGS}, "bad"),
        ("refused", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, {"settings_error": "no"}, "bad"),
        ("refused, and known why", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:5"},
         {"settings_error": "no"}, "bad"),
        ("not asked", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, {}, "ok"),
        ("torch cannot say", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}, {"why": "old"}, "ok"),
        ("torch cannot be imported", {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS},
         {"import_error": "OSError: x"}, "ok"),
        ("nothing asked of a torch that cannot say", {}, {"why": "old"}, "ok"),
    ],
)  # fmt: skip
def test_what_is_said_of_the_allocator(
    tmp_path: Path, case: str, environ: dict[str, str], torch: dict[str, str], verdict: str
) -> None:
    asked = TorchView(**{"version": "2.13.0", **torch})  # type: ignore[arg-type]
    system = machine(tmp_path, {}, environ=environ, torch=asked)
    assert_found(CHECKS["allocator"](system), case, verdict)


@pytest.mark.parametrize(
    ("case", "environ", "verdict"),
    [
        ("none", {}, "ok"),
        ("launches that wait", {"CUDA_LAUNCH_BLOCKING": " 1 "}, "bad"),
        ("launches that do not wait", {"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
        ("cards hidden", {"CUDA_VISIBLE_DEVICES": "-1"}, "bad"),
        ("cards hidden by nothing", {"CUDA_VISIBLE_DEVICES": ""}, "bad"),
        ("a card chosen", {"CUDA_VISIBLE_DEVICES": "1"}, "ok"),
        ("all kernels loaded", {"CUDA_MODULE_LOADING": "EAGER"}, "warn"),
        ("kernels loaded as usual", {"CUDA_MODULE_LOADING": "DEFAULT"}, "ok"),
        ("kernels loaded in no known way", {"CUDA_MODULE_LOADING": "eager"}, "warn"),
        ("no effect", {"PYTORCH_CUDA_MEMCHECK": "1", "TORCH_USE_CUDA_DSA": "0"}, "warn"),
        ("several, the bad first", {
            "PYTORCH_CUDA_MEMCHECK": "1", "TORCH_USE_CUDA_DSA": "1",
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "bad"),
    ],
)  # fmt: skip
def test_what_is_said_of_switches(
    tmp_path: Path, case: str, environ: dict[str, str], verdict: str
) -> None:
    assert_found(CHECKS["switches"](machine(tmp_path, {}, environ=environ)), case, verdict)


def test_cards_behind_one_switch_are_named_with_the_link_that_they_share(tmp_path: Path) -> None:
    """Two cards behind a switch on an x8 link, a third on a root port of its own."""
    root, switch = "pci0000:00/0000:00:01.0", "pci0000:00/0000:00:01.0/0000:01:00.0"
    places = {
        "0000:03:00.0": f"{switch}/0000:02:00.0/0000:03:00.0",
        "0000:04:00.0": f"{switch}/0000:02:08.0/0000:04:00.0",
        "0000:81:00.0": "pci0000:80/0000:80:01.0/0000:81:00.0",
        "0000:01:00.0": switch,
        "0000:00:01.0": root,
    }
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for name, place in places.items():
        (tmp_path / "sys/devices" / place).mkdir(parents=True, exist_ok=True)
        (devices / name).symlink_to(f"../../../devices/{place}")
    (devices / "0000:01:00.0/max_link_speed").write_text("16.0 GT/s PCIe\n")
    (devices / "0000:01:00.0/max_link_width").write_text("8\n")
    cards = [
        Gpu(**{**CARD, "index": index, "bus_id": f"0000{name.upper()}"})  # type: ignore[arg-type]
        for index, name in enumerate(("0000:03:00.0", "0000:04:00.0", "0000:81:00.0"))
    ]
    system = System(str(tmp_path), gpus=GpuView(tuple(cards)), torch=TorchView())
    found = CHECKS[LINK](system)
    assert found.verdict == "ok"
    assert found.value.endswith(
        "; GPU 0 and GPU 1 share one link upstream, about 12.5 GB/s together"
    )
    assert found.why == "cards that stream at once divide it: plan --upstream 2"
    shared = {"upstream": "0000:01:00.0", "gpus": [0, 1], "expected_gbps": 12.5}
    assert found.facts["shared"] == [shared]
    alone = CHECKS[LINK](System(str(tmp_path), gpus=GpuView(tuple(cards[1:])), torch=TorchView()))
    assert "shared" not in alone.facts and "upstream" not in alone.value
