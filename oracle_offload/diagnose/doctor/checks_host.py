"""Checks of the host: memory, its limits, and where the process runs."""

from __future__ import annotations

import os

from ...host.files import NO_SIZE, parse_count
from ...host.sizes import GIB, KIB, MIB, split_size
from .finding import Finding, size, worst
from .system import System

# Weights live in host memory, so little of it is the first thing to stop a run. Below the first
# figure even a small model does not fit; below the second only small ones do.
_BAD_FREE, _LOW_FREE = 2 * GIB, 8 * GIB
# Without swap, a machine below this size has no room for a short peak.
_SMALL_RAM = 64 * GIB
# DataLoader workers hand batches over through /dev/shm; docker gives 64 MiB.
_SMALL_SHM = 1 * GIB


def check_ram(system: System) -> Finding:
    """Memory that new allocations can have."""
    total, free = system.meminfo.get("MemTotal"), system.meminfo.get("MemAvailable")
    reason = "" if system.live else "not recorded"
    if system.linux:
        reason = system.read("/proc/meminfo").why
    if total is None and system.live:
        total, free, reason = _memory_from_system_calls(reason)
    if not total:
        why = reason or "/proc/meminfo has no MemTotal that is a size"
        return Finding("ram", "unknown", "not visible", why)
    facts = {"total_bytes": total, "available_bytes": free}
    if free is None:
        why = "kernels before 3.14 do not say how much is available"
        return Finding("ram", "unknown", f"{size(total)} in all", why, facts=facts)
    if free > total:
        text = f"{size(free)} available of {size(total)}"
        return Finding("ram", "unknown", text, "more cannot be available than there is")
    verdict = "bad" if free < _BAD_FREE else "warn" if free < _LOW_FREE else "ok"
    huge = system.meminfo.get("HugePages_Free", 0) * system.meminfo.get("Hugepagesize", 0)
    fix = "close what uses memory, or offload less" if verdict != "ok" else ""
    if huge > total // 4:
        verdict, fix = worst(verdict, "warn"), "give back huge pages: sysctl vm.nr_hugepages=0"
    text = f"{size(free)} available of {size(total)}"
    if huge:
        text += f", {size(huge)} more set aside as huge pages"
        facts["huge_pages_free_bytes"] = huge
    why = "offloaded weights live here, page-locked" if verdict != "ok" else ""
    return Finding("ram", verdict, text, why, fix, facts)


def _memory_from_system_calls(reason: str) -> tuple[int | None, int | None, str]:
    """Total and available memory where there is no /proc/meminfo."""
    try:
        import psutil
    except ImportError:
        pass
    else:
        try:
            memory = psutil.virtual_memory()
            total, free = int(memory.total), int(memory.available)
            if 0 < total < NO_SIZE and 0 <= free < NO_SIZE:
                return total, free, ""
            reason = f"psutil: {total} bytes in all, {free} available"
        except Exception as error:  # psutil reads /proc on Linux, which may be what is hidden
            reason = f"{reason}; psutil: {error}" if reason else f"psutil: {error}"
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (total if 0 < total < NO_SIZE else None), None, reason
    except (AttributeError, ValueError, OSError):
        return None, None, reason or "install psutil to see it on this system"


def check_swap(system: System) -> Finding:
    """Swap: room for short peaks, and a sign that memory ran out before."""
    total, free = system.meminfo.get("SwapTotal"), system.meminfo.get("SwapFree", 0)
    if not system.linux:
        return Finding("swap", "unknown", "not examined", "only Linux is examined for it")
    if total is None:
        why = system.read("/proc/meminfo").why or "/proc/meminfo has no SwapTotal that is a size"
        return Finding("swap", "unknown", "not visible", why)
    if free > total:
        text = f"{size(free)} free of {size(total)}"
        return Finding("swap", "unknown", text, "more cannot be free than there is")
    used = total - free
    facts = {"total_bytes": total, "used_bytes": used}
    ram = system.meminfo.get("MemTotal", 0)
    limit = system.memory_limit.swap_limit_bytes
    if total and limit == 0:
        why = "the control group may not swap: a peak above its limit kills the process"
        return Finding("swap", "ok", f"{size(total)}, none for this group", why, facts=facts)
    if not total:
        why = "a peak above the memory ends with the kernel killing the process, without a message"
        if ram and ram < _SMALL_RAM:
            fix = "add a swap file of 8 GiB or more, or leave more memory free"
            return Finding("swap", "warn", "none", why, fix, facts)
        return Finding("swap", "ok", "none", why, facts=facts)
    text = f"{size(used)} used of {size(total)}"
    if used > total // 2:
        why = "memory ran short before; what is swapped out comes back slowly"
        return Finding("swap", "warn", text, why, "close what uses memory", facts)
    return Finding("swap", "ok", text, facts=facts)


def check_huge_pages(system: System) -> Finding:
    """Transparent huge pages, which make page-locking several times faster."""
    name, path = "huge pages", "/sys/kernel/mm/transparent_hugepage/enabled"
    if not system.linux:
        return Finding(name, "ok", "not used here", "transparent huge pages are a Linux matter")
    reading = system.read(path)
    if reading.text is None:
        return Finding(name, "unknown", "not visible", reading.why)
    setting = reading.text.partition("[")[2].partition("]")[0]
    if setting in ("always", "madvise"):
        return Finding(name, "ok", setting, facts={"setting": setting})
    if setting != "never":
        return Finding(name, "unknown", reading.text.strip()[:40], f"{path} has an unknown format")
    return Finding(
        name,
        "warn",
        "never",
        "page-locking takes about 0.5 s per GiB without huge pages, about 0.1 s with them",
        f"echo madvise | sudo tee {path}",
        {"setting": setting},
    )


def check_locked_memory(system: System) -> Finding:
    """The limit on locked memory (ulimit -l)."""
    name = "locked memory"
    if system.platform == "win32":
        return Finding(name, "ok", "no such limit", "see `place` for what Windows locks at most")
    reading = system.read("/proc/self/limits")
    soft: str | None = None
    for line in (reading.text or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
    if soft is None and system.live:
        soft = _memlock_from_system_call()
    if soft == "unlimited":
        return Finding(name, "ok", "unlimited", facts={"limit_bytes": None})
    limit = parse_count(soft)
    if limit is None:
        why = reading.why or f"/proc/self/limits says {soft!r}"
        return Finding(name, "unknown", "not visible", why)
    facts = {"limit_bytes": limit}
    cards = system.names("/sys/class/infiniband")
    # Half of the memory is more than a run registers, and as good as no limit.
    ram = system.meminfo.get("MemTotal")
    if cards and (ram is None or limit < ram // 2):
        return Finding(
            name,
            "bad",
            size(limit),
            f"RDMA through {cards[0]} registers memory against this limit: NCCL fails with "
            "`Cannot allocate memory`",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; slurm: PropagateResourceLimits)",
            facts,
        )
    why = "page-locking through the NVIDIA driver is reported not to count against it; mlock does"
    return Finding(name, "ok", size(limit), why, facts=facts)


def _memlock_from_system_call() -> str | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def check_memory_limit(system: System) -> Finding:
    """The control group's limit: what a container, slurm job or systemd unit may use."""
    name, limit = "memory limit", system.memory_limit
    if limit.version is None:
        if not system.linux:
            return Finding(name, "ok", "none", "control groups are a Linux matter")
        return Finding(name, "unknown", "not visible", "; ".join(limit.missing))
    facts = {
        "version": limit.version,
        "hybrid": limit.hybrid,
        "group": limit.group,
        "limit_bytes": limit.limit_bytes,
        "usage_bytes": limit.usage_bytes,
        "headroom_bytes": limit.headroom_bytes,
        "peak_bytes": limit.peak_bytes,
        "high_bytes": limit.high_bytes,
        "oom_kills": limit.oom_kills,
    }
    kind = f"cgroup {limit.version}{' (hybrid)' if limit.hybrid else ''}"
    total = system.meminfo.get("MemTotal")
    bound = limit.limit_bytes
    verdict, why, fix = "ok", "", ""
    if bound is None or (total is not None and bound >= total):
        text = f"none ({kind})"
        if bound is None and limit.missing:
            verdict, text, why = "unknown", f"none seen ({kind})", "; ".join(limit.missing)
    else:
        text = f"{size(bound)} ({kind}"
        text += f", machine {size(total)})" if total else ")"
        why = f"set in {limit.limited_by}; page-locked memory counts against it"
        headroom = limit.headroom_bytes
        if headroom is None:
            verdict, why = "unknown", "; ".join(limit.missing)
        else:
            text += f", {size(headroom)} left"
            verdict = "bad" if headroom < _BAD_FREE else "warn" if headroom < _LOW_FREE else "ok"
            fix = "ask for more memory, or offload less" if verdict != "ok" else ""
    if limit.high_bytes is not None and (bound is None or limit.high_bytes < bound):
        verdict = worst(verdict, "warn")
        text += f", slowed from {size(limit.high_bytes)}"
        why = f"{why}; " if why else ""
        why += "above memory.high the kernel slows every allocation down"
        fix = fix or "raise memory.high (systemd: MemoryHigh=)"
    if limit.oom_kills:
        verdict = worst(verdict, "warn")
        text += f", {limit.oom_kills} killed"
        why = f"{why}; " if why else ""
        why += "the kernel has killed processes of this group for running out of memory"
        fix = fix or "look for the killed run: its memory peaked above the limit"
    return Finding(name, verdict, text, why, fix, facts)


def check_shared_memory(system: System) -> Finding:
    """/dev/shm, through which DataLoader workers hand over batches."""
    name = "/dev/shm"
    if not system.linux:
        return Finding(name, "ok", "not used here", "DataLoader workers use files on this system")
    total, free = None, None
    reading = system.read("/proc/self/mounts")
    for line in (reading.text or "").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/dev/shm":
            total = _mount_size(fields[3], system.meminfo.get("MemTotal"))
    if system.live:
        try:
            status = os.statvfs("/dev/shm")
        except OSError as error:
            return Finding(name, "bad", "missing", f"/dev/shm: {error.strerror}", _SHM_FIX)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    if total is None:
        if reading.text is None:
            return Finding(name, "unknown", "not visible", reading.why)
        why = "no file system is mounted there: DataLoader workers fail with a bus error"
        return Finding(name, "bad", "not mounted", why, _SHM_FIX)
    if total == 0:  # tmpfs: size=0 is no limit
        return Finding(name, "ok", "no limit of its own", facts=facts)
    text = size(total) if free is None else f"{size(free)} free of {size(total)}"
    room = total if free is None else free
    if total <= 64 * MIB or room < 64 * MIB:
        why = "DataLoader workers fail with `Bus error` or `No space left on device`"
        return Finding(name, "bad", text, why, _SHM_FIX, facts)
    if room < _SMALL_SHM:
        why = "large batches or many DataLoader workers may not fit"
        return Finding(name, "warn", text, why, _SHM_FIX, facts)
    return Finding(name, "ok", text, facts=facts)


_MOUNT_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}
_SHM_FIX = "docker run --shm-size=8g (or --ipc=host); kubernetes: an emptyDir with medium: Memory"


def _mount_size(options: str, ram: int | None) -> int | None:
    """Size of a tmpfs from its mount options; half the memory when they do not say."""
    for option in options.split(","):
        key, _, value = option.partition("=")
        if key == "size":
            number, unit = split_size(value) or (0, "?")
            if unit in _MOUNT_UNITS:
                return int(number * _MOUNT_UNITS[unit])
    return ram // 2 if ram else None


def check_place(system: System) -> Finding:
    """Where the process runs: plain, in a container, in WSL, on Windows and its driver model."""
    name, container = "place", system.container
    inside = f" in a container ({container})" if container else ""
    models = {gpu.index: gpu.driver_model for gpu in system.gpus.gpus if gpu.driver_model}
    facts = {
        "platform": system.platform,
        "wsl": system.wsl,
        "container": container,
        "driver_models": list(models.values()),
    }
    if system.wsl:
        return Finding(
            name,
            "warn",
            f"WSL2{inside}",
            "page-locked memory is limited here: walls from 0.5 GiB to half of the memory are "
            "reported; weights beyond it are copied at pageable speed",
            "run on Linux or Windows itself for large models, or raise memory= in .wslconfig",
            facts,
        )
    if system.platform == "win32":
        wddm = [f"GPU {index}" for index, model in models.items() if model == "WDDM"]
        if not models:
            why = "the driver model is not visible: " + (system.gpus.why or "no card answers")
            return Finding(name, "unknown", "Windows", why, facts=facts)
        if not wddm:
            return Finding(name, "ok", f"Windows, {next(iter(models.values()))}", facts=facts)
        return Finding(
            name,
            "warn",
            f"Windows, WDDM ({', '.join(wddm)})",
            "page-locked memory is capped near half of RAM, and device memory that runs short "
            "spills to host memory silently: slow steps instead of an error",
            "NVIDIA Control Panel: CUDA - Sysmem Fallback Policy = Prefer No Sysmem Fallback",
            facts,
        )
    label = "Linux" if system.linux else system.platform
    return Finding(name, "ok", f"{label}{inside}", facts=facts)
