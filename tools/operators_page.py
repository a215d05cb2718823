"""The tables of docs/operators.md, from docs/operators.json and docs/ways.json: none is typed.

python benchmarks/run.py operators --output docs/operators.json   # measure
python benchmarks/run.py ways --output docs/ways.json
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
RECORD_OF_WAYS = ROOT / "docs" / "ways.json"
TABLE_OF_WAYS = re.compile(
    r"(<!-- ways: python tools/operators_page.py -->\n).*?(<!-- end of ways -->\n)", re.DOTALL
)
WAYS_TO_COMPUTE = {
    "resident": "torch's module",
    "loan": "a call: the loan",
    "handle": "a read: a handle",
    "lent": "the same, lent",
}
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
KINDS = {
    "linear": "nn.Linear",
    "conv1d": "nn.Conv1d",
    "conv2d": "nn.Conv2d",
    "conv3d": "nn.Conv3d",
    "embedding": "nn.Embedding",
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
    return "\n".join([*lines, "", _where(record)]) + "\n"


def table_of_ways(record: Mapping[str, Any]) -> str:
    """Return the table of what each way to compute with a weight costs, and of it over the loan."""
    head = " | ".join(WAYS_TO_COMPUTE.values())
    lines = [f"| microseconds per use | {head} |", "| --- " * (len(WAYS_TO_COMPUTE) + 1) + "|"]
    rows: Sequence[Mapping[str, Any]] = record["benchmarks"]
    for row in rows:
        kind, trained, what = row["name"].split("_", 2)
        cells = [_cell(row, way, "loan") for way in WAYS_TO_COMPUTE]
        lines.append(f"| `{KINDS[kind]}`, {trained}: {WAYS[what]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _where(record)]) + "\n"


def _where(record: Mapping[str, Any]) -> str:
    loads = sorted({row["load_count"] for row in record["benchmarks"]})
    load = " to ".join(f"{count:g}" for count in dict.fromkeys((loads[0], loads[-1])))
    return (
        f"torch {record['torch']}, {record['cpus_count']} processors, load average {load} "
        f"meanwhile; {record['date'][:10]}."
    )


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


def _cell(row: Mapping[str, Any], column: str, over: str = "least") -> str:
    seconds = row.get(f"{column}_s")
    if seconds is None:
        return "-"
    ratio = row.get(f"{column}_over_{over}_ratio")
    return f"{1e6 * seconds:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def page(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with its table written again."""
    found, count = TABLE.subn(lambda match: match[1] + table(record) + match[2], text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table of operators")
    return found


def page_with_ways(text: str, record: Mapping[str, Any]) -> str:
    """Return the page with the table of ways written again."""
    found, count = TABLE_OF_WAYS.subn(
        lambda match: match[1] + table_of_ways(record) + match[2], text
    )
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table of ways")
    return found


def main() -> int:
    """Write the page from the records."""
    record, ways = (json.loads(p.read_text(encoding="utf-8")) for p in (RECORD, RECORD_OF_WAYS))
    written = page_with_ways(page(PAGE.read_text(encoding="utf-8"), record), ways)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
