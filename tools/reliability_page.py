"""The figures of docs/reliability.md, from docs/reliability.json: no figure there is typed.

    python tools/proof.py --record          # run the proof, write both
    python tools/reliability_page.py        # write the page again from the JSON

The page has blocks between `<!-- figures: NAME -->` and `<!-- end of figures -->`; a function of
`BLOCKS` writes what is in each. A part that was never recorded has no rows.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "docs" / "reliability.json"
SCHEMA = "oracle_offload/proof/1"
BLOCK = re.compile(r"(<!-- figures: ([\w ]+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)

Figures = Mapping[str, Any]


def percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"


# ---- one line for each part ----


def _programs(figures: Figures) -> str:
    programs = figures["programs"].values()
    checks = sum(program["passed"] for program in programs)
    cases = sum(program["cases"] for program in programs)
    return f"{cases:,} cases of {len(programs)} programs, {checks:,} checks"


def _injected(rows: list[Figures], calls: int) -> str:
    ways = f"every one of {calls:,} calls" if all(r["injected"] == r["of"] for r in rows) else ""
    count = sum(row["injected"] for row in rows)
    return f"{count:,} faults, {ways or 'a sample of the calls'}, in {len(rows)} ways"


def _driver_faults(figures: Figures) -> str:
    sweeps = figures["programs"]["test_faults"]
    return _injected(sweeps["faults"], sweeps["calls_in_a_life"])


def _training_faults(figures: Figures) -> str:
    return _injected(figures["faults"], figures["faults"][0]["calls_in_a_life"])


def _mutants(figures: Figures) -> str:
    tried, killed = figures["tried"], figures["killed"]
    return f"{killed:,} of {tried:,} killed ({percent(killed, tried)})"


def _without(figures: Figures) -> str:
    tried, killed = figures["tried"], figures["killed"]
    return f"{tried - killed:,} of {tried:,} mutants of waits and records survive"


def _tiers(figures: Figures) -> str:
    *tiers, all_of_them = figures["tiers"].items()
    whole = all_of_them[1]
    shares = ", ".join(f"`{tier}` {percent(killed, whole)}" for tier, killed in tiers)
    return f"{_mutants(figures)}; of these {shares}"


def _codec(figures: Figures) -> str:
    mutants = figures["mutants"]
    tried, killed = (sum(row[what] for row in mutants) for what in ("tried", "killed"))
    locked = ", ".join(f"{row['share']:.3f} ({row['weights']})" for row in figures["locked"])
    return (
        f"{killed:,} of {tried:,} mutants of the kernels' PTX killed ({percent(killed, tried)}), "
        f"{figures['weights_decoded'][0]:,} weights decoded, "
        f"{figures['flips_noticed'][0]:,} flips noticed; of 1 GiB of weights locked: {locked}; "
        f"{_tests(figures)}"
    )


def _tests(figures: Figures) -> str:
    return f"{figures['tests'] - figures['failed']:,} of {figures['tests']:,} tests pass"


def _coverage(figures: Figures) -> str:
    taken = sum(row["taken"] for row in figures["files"].values())
    branches = sum(row["branches"] for row in figures["files"].values())
    return f"{taken:,} of {branches:,} branches of the engine ({percent(taken, branches)})"


def _fuzz(figures: Figures) -> str:
    rows = figures["targets"].items()
    return ", ".join(f"{row['inputs']:,} inputs of {name}" for name, row in rows)


def _soak(figures: Figures) -> str:
    return f"resident memory grows by {figures['rss_bytes_per_step'][0]:.0f} bytes a step"


def _lease(figures: Figures) -> str:
    (found,) = figures["lease"]
    return (
        f"{found['parts']} parts of the check of a card come home, killed {found['kills']} times, "
        f"over {found['over']}"
    )


def _conformance(figures: Figures) -> str:
    recordings = figures["recordings"]
    real = f"{recordings} recordings of real drivers" if recordings else "no recording to compare"
    return f"{figures['passed']} of {figures['cases']} cases on the simulator; {real}"


SHOWN: dict[str, Callable[[Figures], str]] = {
    "conformance": _conformance,
    "races": _programs,
    "driver faults": _driver_faults,
    "sanitizers": _programs,
    "thread sanitizer": _programs,
    "training faults": _training_faults,
    "mutants": _mutants,
    "without the detector": _without,
    "python mutants": _mutants,
    "tiers of tests": _tiers,
    "codec": _codec,
    "slow tests": _tests,
    "slow tests, simgpu": _tests,
    "cuda": _tests,
    "cuda waits": _mutants,
    "AI-Toolkit": _tests,
    "planted bugs": _tests,
    "coverage": _coverage,
    "fuzz": _fuzz,
    "wheels": _tests,
    "windows": _programs,
    "lease": _lease,
    "soak": _soak,
}


def shown(name: str, figures: Figures) -> str:
    """Return the figures of one part in a line."""
    return SHOWN[name](figures) if figures else "no figures"


# ---- the blocks ----


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table, or a line that says that there is nothing yet."""
    if not rows:
        return "Not recorded yet.\n"
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _summary(parts: Mapping[str, Figures]) -> str:
    rows = [
        (name, line(part["figures"]), f"{part['duration_s']:.0f}", f"`{part['commit']}`")
        for name, line in SHOWN.items()
        if (part := parts.get(name))
    ]
    cpus = sorted({part["cpus"] for part in parts.values()})
    where = f"\nSeconds on {' or '.join(map(str, cpus))} processors, with other work on them.\n"
    return table(("part", "shown", "seconds", "commit"), rows) + (where if rows else "")


def _fault_rows(rows: list[Figures]) -> list[tuple[str, ...]]:
    return [(row["what"], f"{row['injected']:,} of {row['of']:,}") for row in rows]


def _faults(parts: Mapping[str, Figures]) -> str:
    part = parts.get("driver faults")
    rows = []
    if part:
        programs = part["figures"]["programs"]
        rows = _fault_rows(programs["test_faults"]["faults"])
        memory = programs["test_memory"]
        failed, of = memory["allocations_failed"], memory["allocations_in_a_life"]
        rows.append(("allocations fail once", f"{failed:,} of {of:,}"))
    return table(("what fails", "injected"), rows)


def _training(parts: Mapping[str, Figures]) -> str:
    part = parts.get("training faults")
    return table(("what fails", "injected"), _fault_rows(part["figures"]["faults"]) if part else [])


def _gate(parts: Mapping[str, Figures]) -> str:
    rows = []
    names = {"mutants": "engine", "python mutants": "Python layer and binding, a sample"}
    for name, of in names.items():
        if part := parts.get(name):
            figures = part["figures"]
            tried, killed = figures["tried"], figures["killed"]
            survive = f"{tried - killed:,} ({percent(tried - killed, tried)})"
            no_mutants, seconds = f"{figures['no_mutants']:,}", f"{part['duration_s']:.0f}"
            rows.append((of, f"{killed:,} of {tried:,}", survive, no_mutants, seconds))
    return table(("of", "killed", "survive", "candidates that are no mutants", "seconds"), rows)


def _tier_rows(parts: Mapping[str, Figures]) -> str:
    part = parts.get("tiers of tests")
    killed = part["figures"]["tiers"] if part else {}
    whole = max(killed.values(), default=0)
    rows = [(f"`{tier}`", f"{n:,}", percent(n, whole)) for tier, n in killed.items()]
    return table(("tier", "mutants killed", "of those that are killed"), rows)


def _detector(parts: Mapping[str, Figures]) -> str:
    part = parts.get("without the detector")
    if not part:
        return "Not recorded yet.\n"
    return (
        f"With the race detector off {_without(part['figures'])}, all of them killed by the gate.\n"
    )


def _branches(parts: Mapping[str, Figures]) -> str:
    part = parts.get("coverage")
    files = part["figures"]["files"] if part else {}
    rows = [
        (f"`{name}`", f"{taken} of {branches}", percent(taken, branches))
        for name, row in files.items()
        for taken, branches in [(row["taken"], row["branches"])]
    ]
    return table(("file", "branches taken", ""), rows)


BLOCKS: dict[str, Callable[[Mapping[str, Figures]], str]] = {
    "summary": _summary,
    "faults": _faults,
    "gate": _gate,
    "detector": _detector,
    "tiers": _tier_rows,
    "coverage": _branches,
    "training": _training,
}


# ---- the page and the record ----


def read_record() -> dict[str, Any]:
    """Return the committed record: part -> commit, seconds and figures."""
    if not RECORD.is_file():
        return {"schema": SCHEMA, "parts": {}}
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def page(text: str, parts: Mapping[str, Figures]) -> str:
    """Return the page with its blocks written again."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](parts) + found[3], text)


def write() -> None:
    """Write the page from the record."""
    text = page(PAGE.read_text(encoding="utf-8"), read_record()["parts"])
    PAGE.write_text(text, encoding="utf-8")


def record(name: str, commit: str, seconds: float, figures: Figures) -> None:
    """Put what one part showed into the record, in the order of the page, and write the page."""
    parts = read_record()["parts"]
    seconds = round(seconds, 1)
    cpus = os.cpu_count()
    parts[name] = {"commit": commit, "duration_s": seconds, "cpus": cpus, "figures": figures}
    ordered = {name: parts[name] for name in SHOWN if name in parts}
    text = json.dumps({"schema": SCHEMA, "parts": ordered}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    write()


if __name__ == "__main__":
    write()
    sys.exit(0)
