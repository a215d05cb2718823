"""The table of docs/operators.md, from docs/operators.json: no figure there is typed.

python benchmarks/run.py operators --output docs/operators.json   # measure
python tools/operators_page.py                                    # write the page again
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operators.md"
RECORD = ROOT / "docs" / "operators.json"
TABLE = re.compile(
    r"(<!-- operators: python tools/operators_page.py -->\n).*?(<!-- end of operators -->\n)",
    re.DOTALL,
)
LAYERS = {
    "linear_frozen": "`nn.Linear`, frozen",
    "linear_trained": "`nn.Linear`, trained",
    "conv2d_frozen": "`nn.Conv2d`, frozen",
    "conv2d_trained": "`nn.Conv2d`, trained",
}
WAYS = {
    "forward_without_grad": "forward, nothing recorded",
    "forward": "forward",
    "forward_backward": "forward and backward",
}
COMPILED = {
    "compiled_module": "torch's module",
    "compiled_managed": "managed",
}
COLUMNS = {
    "function": "torch's function",
    "module": "torch's module",
    "least": "the least in Python",
    "toolkit": "AI-Toolkit's manager",
    "managed": "managed",
}


def table(record: Mapping[str, Any]) -> str:
    """Return the table of what was measured, and where; a column that was not has dashes."""
    rows: Sequence[Mapping[str, Any]] = record["benchmarks"]
    found = {row["name"]: row for row in rows}
    lines = _rows(found, COLUMNS)
    lines += ["", "The same modules, compiled by `torch.compile` (inductor):", ""]
    lines += _rows(found, COMPILED)
    loads = sorted({row["load_count"] for row in rows})
    load = " to ".join(f"{count:g}" for count in dict.fromkeys((loads[0], loads[-1])))
    lines += [
        "",
        f"torch {record['torch']}, {record['cpus_count']} processors, load average {load} "
        f"meanwhile; {record['date'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def _rows(found: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    lines = [
        f"| microseconds per layer | {' | '.join(columns.values())} |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for layer, said in LAYERS.items():
        for way, what in WAYS.items():
            cells = [_cell(found[f"{layer}_{way}"], column) for column in columns]
            lines.append(f"| {said}: {what} | {' | '.join(cells)} |")
    return lines


def _cell(row: Mapping[str, Any], column: str) -> str:
    seconds = row.get(f"{column}_s")
    if seconds is None:
        return "-"
    ratio = row.get(f"{column}_over_least_ratio")
    return f"{1e6 * seconds:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with its table written again."""
    found, count = TABLE.subn(lambda match: match[1] + table(record) + match[2], text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table of operators")
    return found


def main() -> int:
    """Write the page from the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
