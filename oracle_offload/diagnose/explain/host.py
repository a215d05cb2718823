"""A process that was killed cannot explain itself: its parent can.

An exit by SIGKILL (-9 from `subprocess`, 137 from a shell or a container) is a suspicion. The proof
is a counter of the control group, or a line of the kernel log, that changed meanwhile.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from .cause import Cause
from .facts import Fact, parse_size
from .fixes import plan
from .parse import find
from .pipeline import explain_oom
from .report import OomReport

SIGKILL = 9
KILLED = frozenset({-SIGKILL, 128 + SIGKILL})


def own_group(root: str = "/") -> Path | None:
    """Return the directory of this process's memory control group, or None where it is hidden.

    cgroup v1, v2 and the hybrid of both: the hierarchy that owns the memory controller counts.
    """
    from ...host.cgroup import read_memory_limit

    limit = read_memory_limit(root)
    if limit.version is None:
        return None
    mount = "sys/fs/cgroup/memory" if limit.version == "v1" else "sys/fs/cgroup"
    for group in (limit.group.strip("/"), ""):  # inside a container the group is the mount itself
        directory = Path(root) / mount / group
        if directory.is_dir():
            return directory
    return None


def kill_counter(group: str | PathLike[str] | None = None) -> int | None:
    """Return how many processes a control group's memory limit has killed so far.

    Parameters
    ----------
    group : path, optional
        The directory of the group; this process's own by default.

    Returns
    -------
    int or None
        None where no counter can be read: v2 keeps it in `memory.events`, v1 (from Linux 4.13)
        in `memory.oom_control`.
    """
    directory = own_group() if group is None else Path(group)
    if directory is None:
        return None
    for name in ("memory.events.local", "memory.events", "memory.oom_control"):
        text = _read(directory / name)
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return None


def explain_exit(
    returncode: int,
    log: str = "",
    *,
    group: str | PathLike[str] | None = None,
    kills_before: int | None = None,
) -> OomReport:
    """Explain how a child process ended. Never raises.

    Parameters
    ----------
    returncode : int
        From `subprocess` or a shell: -9 and 137 mean SIGKILL.
    log : str
        What the child wrote; an out-of-memory message in it comes first.
    group : path, optional
        The control group the child ran in; this process's own by default.
    kills_before : int, optional
        `kill_counter` from before the child was started. Where it has grown since, the kill is
        proven to be the memory limit's.

    Returns
    -------
    OomReport
        Not found where the child was not killed and its log holds no message.
    """
    try:
        return _explain_exit(returncode, log, group, kills_before)
    except Exception:
        import logging

        logging.getLogger("oracle_offload").debug("explain_exit failed", exc_info=True)
        return OomReport()


def _explain_exit(
    returncode: int, log: str, group: str | PathLike[str] | None, kills_before: int | None
) -> OomReport:
    report = explain_oom(log)
    if returncode not in KILLED or (report.found and not report.suspected):
        return report
    finding = find("exited with code 137")[0]
    finding = finding._replace(quote=f"the process ended with code {returncode}", line=0)
    kills = kill_counter(group)
    if kills is None or kills_before is None or kills <= kills_before:
        why = "the process was killed by SIGKILL and no counter says by whom"
        if kills is not None and kills_before is not None:
            why = "the process was killed by SIGKILL, though not at its memory limit"
        causes = [Cause("host_memory", "low", why)]
        return OomReport(finding, causes, plan(finding, causes), [finding])
    proof = find(f"oom_kill {kills}")[0]
    name, limit = _limit(own_group() if group is None else Path(group))
    facts = {} if limit is None else {"limit": Fact("limit", limit, f"{name}: {limit}", 0)}
    proof = proof._replace(
        facts=facts, line=0, quote=f"oom_kill rose from {kills_before} to {kills} meanwhile"
    )
    causes = [Cause("memory_limit", "high", proof.quote)]
    return OomReport(proof, causes, plan(proof, causes), [proof])


def _limit(group: Path | None) -> tuple[str, int | None]:
    if group is not None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = parse_size(_read(group / name).strip())
            if value is not None and value < 1 << 62:  # v1 writes "no limit" as almost 2^63
                return name, value
    return "", None


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
