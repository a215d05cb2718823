"""The same LoRA step below the same cap of device memory: ours, the rivals, and resident.

Each contender runs in a process of its own (contender.py). Rivals are collected by tools/rivals.py
into .rivals/; what is not there is a row "not run". docs/gpu-check.md says what each is given.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

FOLDER = Path(__file__).resolve().parent
RIVALS = common.ROOT / ".rivals"
WORKER = FOLDER / "contender.py"
# Cap in GiB, tokens, contender: what is worth most first.
RUNS = (
    *((24.0, 4608, who) for who in ("ours", "aitoolkit", "musubi")),
    *((12.0, 1536, who) for who in ("ours", "aitoolkit", "musubi")),
)
# A part of its own (bench_rivals_more.py), which is run later.
MORE_RUNS = (
    *((24.0, 4608, who) for who in ("resident", "fsdp2", "ramtorch")),
    *((12.0, 1536, who) for who in ("resident", "fsdp2", "ramtorch")),
)
# Whose files tools/rivals.py must have collected; the others need none.
NEEDED = {"aitoolkit": "ai-toolkit", "musubi": "musubi-tuner", "ramtorch": "ramtorch"}
LIMIT_S = 75.0  # of one contender, a second try included
LEAST_S = 25.0  # what building, attaching and a few steps take at least
AT_HOME = ("ours", "resident")  # the others need a card
SMALL = ("--blocks", "6", "--width", "128", "--tokens", "48")


def benchmarks(
    device: str,
    runs: tuple[tuple[float, int, str], ...] = RUNS,
    rivals: Path = RIVALS,
    worker: Path = WORKER,
) -> Iterator[dict[str, Any]]:
    """Run the contenders one after the other; none can cost another its row."""
    versions = collected(rivals)
    small = common.is_small(device)
    for cap_gib, tokens, who in runs[:0] if small else runs:
        row = {"name": f"{who}, {cap_gib:.0f} GiB, {tokens} tokens", "contender": who}
        command = [sys.executable, str(worker), who, "--device", device, "--rivals", str(rivals)]
        command += ["--cap-gib", str(cap_gib), "--tokens", str(tokens)]
        yield {**row, **version_of(who, versions), **result(who, command, versions)}
    for who in dict.fromkeys(who for _, _, who in runs) if small else ():
        row = {"name": f"{who}, small", "contender": who}
        command = [sys.executable, str(worker), who, "--device", device, *SMALL]
        if who not in AT_HOME:
            yield {**row, "skipped": f"not run: {missing(who, versions) or 'on a GPU alone'}"}
        else:
            yield {**row, **result(who, command, versions)}


def collected(rivals: Path) -> dict[str, Any]:
    """Return what tools/rivals.py has written of the files it took."""
    try:
        found: dict[str, Any] = json.loads((rivals / "rivals.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def missing(who: str, versions: dict[str, Any]) -> str:
    """Return why a contender has no files here, or an empty string."""
    needed = NEEDED.get(who)
    if needed is None or needed in versions:
        return ""
    return f".rivals has no {needed} (python tools/rivals.py)"


def version_of(who: str, versions: dict[str, Any]) -> dict[str, Any]:
    """Return the commit or version of a rival that was collected."""
    entry = versions.get(NEEDED.get(who, ""))
    return {"version": entry["version"]} if entry else {}


def result(who: str, command: list[str], versions: dict[str, Any]) -> dict[str, Any]:
    """Return a contender's figures; it has a second try where it ran out of memory."""
    why = missing(who, versions)
    limit_s = min(LIMIT_S, common.left_s())
    if not why and limit_s < LEAST_S:
        why = f"{limit_s:.0f} s are left"
    if why:
        return {"skipped": f"not run: {why}"}
    begin = time.monotonic()
    row = run(command, limit_s)
    left_s = limit_s - (time.monotonic() - begin)
    if row.pop("out_of_memory", False) and left_s > LEAST_S:
        again = run([*command, "--less-gib", "1"], left_s)
        again.pop("out_of_memory", None)
        row = {**again, "first_error": row["error"]}
    return {**row, "process_s": time.monotonic() - begin}


def run(command: list[str], limit_s: float) -> dict[str, Any]:
    """Return the last row that a process prints; its end is this function's, whatever it does."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            ended = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit_s:.0f} s"
            end_group(process)
            output, _ = process.communicate()
        except BaseException:
            end_group(process)
            raise
        said.seek(0)
        log = said.read().decode(errors="replace")
    print(log, file=sys.stderr, end="", flush=True)
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            # It printed what it had measured before it ended like this.
            return found if process.returncode == 0 else {**found, "profile_error": ended}
    last = (log.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"{ended}: {last}"}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
