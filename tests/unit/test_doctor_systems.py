"""Recorded machines: what the doctor says about each, and what changes its mind."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle_offload.doctor.cgroup import MemoryLimit, read_memory_limit

TREES = Path(__file__).parent.parent / "data" / "systems"
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


def test_limit_of_an_ancestor_counts_and_is_named(tmp_path: Path) -> None:
    found = limit_of("kubernetes", tmp_path)
    assert found.limited_by is not None
    assert found.limited_by.endswith("/kubepods-burstable-pod7c1e.slice")
    assert found.usage_bytes == 12884901888, "usage is that of the group which holds the limit"
    assert found.high_bytes == 56 * GIB


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


def test_group_outside_of_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    found = limit_of("docker_v2", tmp_path, **{"proc/self/cgroup": "0::/../../elsewhere\n"})
    assert found.limit_bytes == 32 * GIB


def test_v2_without_the_memory_controller_is_unknown_and_says_so(tmp_path: Path) -> None:
    root = build("docker_v2", tmp_path)
    (root / "sys/fs/cgroup/memory.max").unlink()
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpu io\n")
    found = read_memory_limit(str(root))
    assert (found.version, found.limit_bytes) == (None, None)
    assert "memory controller" in found.missing[0]


@pytest.mark.parametrize(
    "text", ["", "garbage", "0::", "4:memory", "\x00\xff:::\n:::", "max\n" * 9]
)
@pytest.mark.parametrize("path", ["proc/self/cgroup", "proc/self/mountinfo"])
def test_damaged_tables_never_raise(tmp_path: Path, path: str, text: str) -> None:
    found = limit_of("docker_v1", tmp_path, **{path: text})
    assert found.limit_bytes in (None, 16 * GIB)


def test_empty_root_names_what_is_missing(tmp_path: Path) -> None:
    found = read_memory_limit(str(tmp_path))
    assert found.version is None
    assert "/proc/self/cgroup: no such file" in found.missing
