"""From an error or a text to the report on it: read, find, weigh the causes, plan the fixes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...host.json_lines import records_in
from .cause import rank
from .collectives import rank_of, waits
from .fixes import plan
from .history import Sign, is_recording, read_history, signs
from .parse import find
from .reading import decode
from .recorded import errors_in, history_of, pieces_in
from .report import OomReport
from .templates import NAMED

# Class names that mean out of memory whatever their text says.
_CLASSES = frozenset({"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"})
_CHAIN_LIMIT = 16


def explain_oom(
    error: BaseException | str | bytes | None,
    *,
    history: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    env: Mapping[str, str] | None = None,
) -> OomReport:
    """Explain an out-of-memory error. Never raises.

    Parameters
    ----------
    error : exception, str or bytes
        The exception, its message, or a whole log (of any length; one pass is made over it).
    history : path or iterable of mappings, optional
        What the steps before the error held: a JSONL file, see
        `oracle_offload.diagnose.explain.history`, or one that a recording was exported to.
    env : mapping, optional
        The environment the error happened in. Default: this process's own for an exception,
        nothing for a text, which may come from elsewhere.

    Returns
    -------
    OomReport
        `report.found` is False where the text holds no out-of-memory error.

    Examples
    --------
    >>> report = explain_oom("MemoryError: Unable to allocate 2.00 GiB for an array with shape")
    >>> report.cause.name, report.value("requested")
    ('host_memory', 2147483648)
    """
    try:
        return explain(error, history, env)
    except Exception:  # the explanation of an error must not become another one
        import logging

        logging.getLogger("oracle_offload").debug("explain_oom failed", exc_info=True)
        return OomReport()


def explain(
    error: BaseException | str | bytes | None,
    history: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None,
    env: Mapping[str, str] | None,
    since: int = 0,
    ram: int | None = None,
) -> OomReport:
    """`explain_oom`, whose own faults show.

    Parameters
    ----------
    since : int
        Where in the text to begin: what is before it was explained already, and stays context.
    ram : int, optional
        Bytes of the memory of the machine that a text is of; an exception is of this one.
    """
    text = _text(error)
    recorded = errors_in(text)
    if recorded is not None:  # the recording of what failed, in the place of its log
        history = history or list(records_in(text.split("\n")))
        text = recorded
    if ram is None and isinstance(error, BaseException):
        ram = machine_ram()
    if env is None:
        env = os.environ if isinstance(error, BaseException) else {}
    findings = [finding for finding in find(text) if finding.position >= since]
    waiting = [wait for wait in waits(text) if since == 0]  # reported once
    if not findings:
        return OomReport(waiting=waiting)
    finding = max(findings, key=lambda item: (item.template.strength, item.position))
    expandable = _expandable(env)
    shown: list[Sign] = []
    if history is not None:
        with contextlib.suppress(OSError):
            rows = read_history(history)
            steps = history_of(rows) if is_recording(rows) else rows
            shown = [*pieces_in(rows), *signs(steps)]
    causes = rank(finding, text, shown, expandable=expandable, ram=ram)
    fixes = plan(finding, causes, expandable=expandable)
    failed = rank_of(text, finding.position)
    return OomReport(finding, causes, fixes, findings, waiting=waiting, rank=failed)


def machine_ram() -> int | None:
    """Return the bytes of this machine's memory; None where the system does not say."""
    from ...host.memory import total_bytes

    try:
        return total_bytes()
    except (OSError, ValueError):
        return None


def is_oom(error: BaseException | None) -> bool:
    """Return whether an exception is an out-of-memory error of a device or of the host.

    A process killed by SIGKILL is only a suspicion and gives False; `explain_oom` explains it.
    Chained and grouped exceptions are looked through. Never raises.
    """
    try:
        if not isinstance(error, BaseException):
            return False
        for link in _chain(error):
            if any(kind.__name__ in _CLASSES for kind in type(link).__mro__):
                return True
        return any(finding.template.strength >= NAMED for finding in find(_messages(error)))
    except Exception:
        return False


def _expandable(env: Mapping[str, str]) -> bool | None:
    """Return whether the environment switches expandable segments on; None where it is silent."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        setting = str(env.get(name, "")).replace(" ", "").lower()
        if "expandable_segments:true" in setting:
            return True
        if "expandable_segments:false" in setting:
            return False
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception, its causes and contexts, and the members of groups, without loops."""
    links: list[BaseException] = []
    waiting: list[BaseException] = [error]
    while waiting and len(links) < _CHAIN_LIMIT:
        link = waiting.pop(0)
        if any(link is known for known in links):
            continue
        links.append(link)
        following = [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            following += link.exceptions
        waiting += [item for item in following if isinstance(item, BaseException)]
    return links


def _message(link: BaseException) -> str:
    name = type(link).__name__
    with contextlib.suppress(Exception):  # a broken __str__
        if said := str(link):
            return f"{name}: {said}"
    return name


def _messages(error: BaseException) -> str:
    # Oldest first, as a traceback prints them; the exception itself is the last word.
    return "\n".join(_message(link) for link in reversed(_chain(error)))


def _text(error: BaseException | str | bytes | None) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, (bytes, bytearray)):
        return decode(bytes(error))
    if not isinstance(error, BaseException):
        return "" if error is None else str(error)
    messages = _messages(error)
    if isinstance(error, MemoryError) and _message(error) == type(error).__name__:
        messages += "\nMemoryError"
    try:
        import traceback

        frames = "".join(traceback.format_tb(error.__traceback__, limit=-64))
    except Exception:
        frames = ""
    head = f"Traceback (most recent call last):\n{frames}" if frames else ""
    return f"{head}{messages}\n"
