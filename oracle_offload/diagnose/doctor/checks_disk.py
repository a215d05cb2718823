"""The check of the disk: how fast weights come from it where memory does not hold them all."""

from __future__ import annotations

from ...host.disk import DiskSpeed
from ...host.mounts import is_rotational, mount_of
from ...host.sizes import GIB
from .finding import Finding, size
from .system import System

_NAME = "disk"
# A SATA disk without platters reaches 0.55; NVMe ones 2 to 14.
_SLOW_GBPS = 0.5
_MODEL_BYTES = 64 * 10**9  # 32B parameters in bf16
_HELD = 0.9  # of the memory, as ram_budget="auto" takes it
_RAM = 32 * GIB  # of the example, where this machine would hold that model


def check_disk(system: System) -> Finding:
    """The disk that models are read from: what it is, and GB/s of cold reads."""
    view = system.disk
    mount = mount_of(view.path, system.root) if system.linux and view.path else None
    remote = view.remote or (mount.kind if mount is not None and mount.is_network else "")
    turns = None if mount is None else is_rotational(mount, system.root)
    facts: dict[str, object] = {
        "path": view.path,
        "kind": remote or (mount.kind if mount is not None else None),
        "source": mount.source if mount is not None else None,
        "rotational": turns,
        "read_gbps": None,
    }
    on = remote
    if mount is not None:
        on = f"{mount.kind} on {mount.source}" if mount.source != mount.kind else mount.kind
    if remote:
        return Finding(
            _NAME,
            "warn",
            on,
            "weights come as fast as the network, and disk=True of attach refuses it",
            "copy the models to a disk of this machine, and name it by --disk",
            facts,
        )
    if mount is not None and mount.is_memory:
        why = "its files are in memory: there is no disk to measure"
        return Finding(_NAME, "unknown", on, why, facts=facts)
    if view.speed is None:
        why = f"{view.path}: {view.why}; --disk names a large file" if view.path else view.why
        return Finding(_NAME, "unknown", "not measured", why, facts=facts)
    told, measured = _told(view.speed), view.speed.gbps
    facts |= _facts(view.speed)
    text = ", ".join(filter(None, (told, on)))
    ram = system.meminfo.get("MemTotal") or _RAM
    ram = ram if _HELD * ram < _MODEL_BYTES else _RAM
    step_bytes = int(2 * (_MODEL_BYTES - _HELD * ram))
    facts |= {"ram_bytes": ram, "step_bytes": step_bytes, "step_s": step_bytes / measured / 1e9}
    means = (
        f"with {size(ram)} of RAM a training step of a 32B model in bf16 reads {size(step_bytes)} "
        f"from disk: {facts['step_s']:.0f} s"
    )
    if turns:
        return Finding(_NAME, "warn", text, f"it has platters; {means}", _FIX, facts)
    if measured < _SLOW_GBPS:
        return Finding(_NAME, "warn", text, means, _FIX, facts)
    return Finding(_NAME, "ok", text, means, facts=facts)


_FIX = "keep models on an NVMe disk, or have RAM for all of their weights"


def _told(speed: DiskSpeed) -> str:
    each = ", ".join(f"{rate.reads.threads}: {_shown(rate.gbps)}" for rate in speed.rates)
    how = "" if speed.direct else ", through the page cache"
    return f"{_shown(speed.gbps)} GB/s cold (threads {each}{how})"


def _shown(gbps: float) -> str:
    return f"{gbps:.2f}" if gbps < 1 else f"{gbps:.1f}"


def _facts(speed: DiskSpeed) -> dict[str, object]:
    return {
        "read_gbps": speed.gbps,
        "threads": speed.best.reads.threads,
        "direct": speed.direct,
        "read_bytes": speed.nbytes,
        "read_s": speed.seconds,
        "rates": [
            {
                "threads": rate.reads.threads,
                "block_bytes": rate.reads.nbytes,
                "read_gbps": rate.gbps,
            }
            for rate in speed.rates
        ],
    }
