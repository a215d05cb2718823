"""The memory limit a control group puts on a process: cgroup v1, v2 and the hybrid of both.

A limit binds wherever it is set on the way from the process's own group up to the root, so the
smallest over every visible ancestor counts. The version is chosen by the hierarchy that owns the
memory controller and not by whether a cgroup2 mount exists: on a hybrid system both do.
Formats: the kernel's Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .files import NO_SIZE, Reading, below, parse_count, read_text
from .mounts import parse_mounts


@dataclass(frozen=True)
class MemoryLimit:
    """What the memory controller says about one process. Every size is in bytes or None: unknown.

    Attributes
    ----------
    version : str or None
        "v1" or "v2": the hierarchy that owns the memory controller; None when none was found.
    hybrid : bool
        A cgroup2 mount exists next to the v1 memory controller.
    group : str
        The group of the process, as the process sees it ("/" in a container of its own).
    limit_bytes : int or None
        The smallest hard limit over the group and its visible ancestors; None is "no limit" when
        `version` is set.
    limited_by : str or None
        The directory that holds that limit.
    high_bytes : int or None
        The smallest `memory.high`: above it the kernel slows the process down (v2 only).
    swap_limit_bytes : int or None
        How much may be swapped out (v2 `memory.swap.max`; v1 memsw minus memory).
    usage_bytes, reclaimable_bytes, peak_bytes : int or None
        In the group that holds the limit: charged now, of it inactive page cache that the kernel
        can drop, and the highest so far.
    oom_kills : int or None
        Processes the kernel has killed in the process's own group for running out of memory.
    missing : tuple of str
        What could not be read, and why.
    """

    version: str | None = None
    hybrid: bool = False
    group: str = "/"
    limit_bytes: int | None = None
    limited_by: str | None = None
    high_bytes: int | None = None
    swap_limit_bytes: int | None = None
    usage_bytes: int | None = None
    reclaimable_bytes: int | None = None
    peak_bytes: int | None = None
    oom_kills: int | None = None
    missing: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes that can still be charged before the limit, dropping page cache first."""
        if self.limit_bytes is None or self.usage_bytes is None:
            return None
        return max(0, self.limit_bytes - self.usage_bytes + (self.reclaimable_bytes or 0))


@dataclass(frozen=True)
class _Mount:
    """A hierarchy that may own the memory controller."""

    version: str
    root: str
    point: str


def read_memory_limit(root: str = "/", pid: int | str = "self") -> MemoryLimit:
    """Return the memory limit on process `pid`.

    Parameters
    ----------
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.
    pid : int or str
        A process id, or "self".

    Returns
    -------
    MemoryLimit
        Never raises: what could not be read is None and explained in `missing`.
    """
    missing: list[str] = []
    groups = _process_groups(root, pid, missing)
    mounts = _mounts(root, pid, missing)
    v1 = next((m for m in mounts if m.version == "v1"), None)
    v2 = next((m for m in mounts if m.version == "v2"), None)
    if v1 is not None and (groups is None or "memory" in groups):
        group = (groups or {}).get("memory", "/")
        return _read_v1(root, v1, group, v2 is not None, missing)
    if v2 is not None and (groups is None or "" in groups):
        return _read_v2(root, v2, (groups or {}).get("", "/"), missing)
    if not missing:
        missing.append("no memory controller is mounted")
    return MemoryLimit(missing=tuple(missing))


def _process_groups(root: str, pid: int | str, missing: list[str]) -> dict[str, str] | None:
    """Map each controller to the group of the process; "" is the v2 hierarchy."""
    reading = read_text(root, f"/proc/{pid}/cgroup")
    if reading.text is None:
        missing.append(reading.why)
        return None
    groups: dict[str, str] = {}
    for line in reading.text.splitlines():
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found:
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts(root: str, pid: int | str, missing: list[str]) -> list[_Mount]:
    """Return the mounts, from the mount table or, where it is hidden, the usual places."""
    reading = read_text(root, f"/proc/{pid}/mountinfo")
    if reading.text is None:
        missing.append(reading.why)
        usual = (
            _Mount("v1", "/", "/sys/fs/cgroup/memory"),
            _Mount("v2", "/", "/sys/fs/cgroup"),
        )
        probes = ("memory.limit_in_bytes", "memory.max")
        return [
            mount
            for mount, probe in zip(usual, probes, strict=True)
            if os.path.exists(below(root, f"{mount.point}/{probe}"))
        ]
    mounts = []
    for mount in parse_mounts(reading.text):
        if mount.kind == "cgroup2":
            mounts.append(_Mount("v2", mount.root, mount.point))
        elif mount.kind == "cgroup" and "memory" in mount.options.split(","):
            mounts.append(_Mount("v1", mount.root, mount.point))
    return mounts


def _ancestry(root: str, mount: _Mount, group: str) -> list[str]:
    """Return the directories from the process's group up to the mount point, innermost first."""
    inside = group
    if mount.root != "/":
        # A container sees its own group bound as the mount's root while /proc may still name the
        # group from the host's point of view.
        inside = group[len(mount.root) :] if group.startswith(mount.root + "/") else "/"
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:
        parts = []
    chain = [
        mount.point + "".join(f"/{part}" for part in parts[:depth])
        for depth in range(len(parts), -1, -1)
    ]
    existing = [path for path in chain if os.path.isdir(below(root, path))]
    return existing or [mount.point]


def _read_v1(root: str, mount: _Mount, group: str, hybrid: bool, missing: list[str]) -> MemoryLimit:
    chain = _ancestry(root, mount, group)
    limits = []
    for path in chain:
        size = _limit(read_text(root, f"{path}/memory.limit_in_bytes"), path, missing)
        if size is not None:
            limits.append((size, path))
    own_stat = _table(root, f"{chain[0]}/memory.stat")
    # The kernel's own minimum over all ancestors, those outside the container's view included.
    hierarchical = own_stat.get("hierarchical_memory_limit", NO_SIZE)
    if hierarchical < min((size for size, _ in limits), default=NO_SIZE):
        limits.append((hierarchical, chain[0]))
    limit, holder = min(limits, default=(None, None))
    where = holder or chain[0]
    usage = read_text(root, f"{where}/memory.usage_in_bytes")
    if usage.text is None and limit is not None:
        missing.append(usage.why)
    memsw = parse_count(read_text(root, f"{where}/memory.memsw.limit_in_bytes").text)
    stat = own_stat if where == chain[0] else _table(root, f"{where}/memory.stat")
    return MemoryLimit(
        version="v1",
        hybrid=hybrid,
        group=group,
        limit_bytes=limit,
        limited_by=holder,
        swap_limit_bytes=max(0, memsw - limit) if memsw is not None and limit else None,
        usage_bytes=parse_count(usage.text),
        reclaimable_bytes=stat.get("total_inactive_file", stat.get("inactive_file")),
        peak_bytes=parse_count(read_text(root, f"{where}/memory.max_usage_in_bytes").text),
        oom_kills=_table(root, f"{chain[0]}/memory.oom_control").get("oom_kill"),
        missing=tuple(missing),
    )


def _read_v2(root: str, mount: _Mount, group: str, missing: list[str]) -> MemoryLimit:
    chain = _ancestry(root, mount, group)
    readings = [(read_text(root, f"{path}/memory.max"), path) for path in chain]
    if all(reading.text is None for reading, _ in readings):
        # The root group of the host has no memory.max: then its controllers show it.
        controllers = read_text(root, f"{mount.point}/cgroup.controllers").text or ""
        if "memory" not in controllers.split():
            missing.append(f"{mount.point}: the memory controller is not available here")
            return MemoryLimit(group=group, missing=tuple(missing))
    sizes = [(_limit(reading, path, missing), path) for reading, path in readings]
    limit, holder = min(((s, p) for s, p in sizes if s is not None), default=(None, None))
    where = holder or chain[0]
    usage = read_text(root, f"{where}/memory.current")
    if usage.text is None and limit is not None:
        missing.append(usage.why)
    return MemoryLimit(
        version="v2",
        group=group,
        limit_bytes=limit,
        limited_by=holder,
        high_bytes=_smallest(root, chain, "memory.high"),
        swap_limit_bytes=_smallest(root, chain, "memory.swap.max"),
        usage_bytes=parse_count(usage.text),
        reclaimable_bytes=_table(root, f"{where}/memory.stat").get("inactive_file"),
        peak_bytes=parse_count(read_text(root, f"{where}/memory.peak").text),
        oom_kills=_table(root, f"{chain[0]}/memory.events").get("oom_kill"),
        missing=tuple(missing),
    )


def _limit(reading: Reading, path: str, missing: list[str]) -> int | None:
    """Return a limit, None for none; what is neither is put down as missing."""
    size, text = parse_count(reading.text), (reading.text or "max").strip()
    # v1 prints "no limit" as the largest page count times the page size: 9223372036854771712 with
    # 4 KiB pages, a number that is no size.
    if text != "max" and not text.isdecimal():
        missing.append(f"{path}: the limit {text[:40]!r} is no size")
    return size


def _smallest(root: str, chain: list[str], name: str) -> int | None:
    sizes = (parse_count(read_text(root, f"{path}/{name}").text) for path in chain)
    return min((size for size in sizes if size is not None), default=None)


def _table(root: str, path: str) -> dict[str, int]:
    """Read a file of "name number" lines."""
    table = {}
    for line in (read_text(root, path).text or "").splitlines():
        name, _, value = line.partition(" ")
        number = parse_count(value)
        if number is not None:
            table[name] = number
    return table
