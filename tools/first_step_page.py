"""Write the table of first steps into docs/ai-toolkit.md: `python tools/first_step_page.py`.

Measured on the simulated clock, by benchmarks/bench_first_step.py: the figures are those of any
machine.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ai-toolkit.md"
TABLE = re.compile(
    r"(<!-- first steps: python tools/first_step_page.py -->\n).*?(<!-- end of first steps -->\n)",
    re.DOTALL,
)
MOST = 1.1  # of its bound that a first step should take
COLUMNS = {
    "offloaded": "share",
    "copying / computing": "balance",
    "first step / bound": "first_over_bound_ratio",
    "forward, then backward / bound": "phased_over_bound_ratio",
    "steady step / bound": "steady_over_bound_ratio",
    "first step / steady step": "first_over_steady_ratio",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of what was measured, with what holds in each row."""
    lines = [f"| {' | '.join(COLUMNS)} | within {MOST} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for row in sorted(rows, key=lambda row: (row["share"], row["balance"])):
        cells = [f"{row['share']:.0%}", f"{row['balance']:g}"]
        cells += [f"{row[key]:.3f}" for key in list(COLUMNS.values())[2:]]
        lines.append(f"| {' | '.join(cells)} | {verdict(row)} |")
    return "\n".join(lines) + "\n"


def verdict(row: dict[str, Any]) -> str:
    """Say whether a first step is as short as it should be, and what keeps it from that."""
    if row["first_over_bound_ratio"] <= MOST:
        return "yes"
    if row["phased_over_bound_ratio"] > MOST:
        return "no step can"
    return "no: nor is the steady step" if row["steady_over_bound_ratio"] > MOST else "no"


def main() -> int:
    """Measure, and rewrite the page."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import bench_first_step

    text = PAGE.read_text("utf-8")
    measured = table(list(bench_first_step.benchmarks("cpu")))
    found, count = TABLE.subn(lambda match: match[1] + measured + match[2], text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table of first steps")
    PAGE.write_text(found, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
