"""Write the table of README.md from what was measured: `python tools/readme_page.py`.

A figure of hardware is a filed row of benchmarks/results; a simulated one is copied from
docs/performance.md, which a command writes as well. No figure there is typed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import measured_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
BLOCK = re.compile(
    r"(<!-- figures: python tools/readme_page.py -->\n).*?(<!-- end of figures -->\n)", re.DOTALL
)
SIMULATED = re.compile(
    r"^train: (\d+) of (\d+) cells take at most ([\d.]+) of the bound, .* on average ([\d.]+) and",
    re.MULTILINE,
)
CONTENDERS = {"ours": "ours", "aitoolkit": "AI-Toolkit", "musubi": "musubi-tuner"}


def hardware(device: str, reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows of a card: a step with all weights on it and without, then next to others."""
    steps = measured_page.steps_of([dict(report) for report in reports])
    resident = next((row for row in steps if row["name"].endswith(", resident")), None)
    moved = next((row for row in steps if "offload" in row), None)
    if resident and moved and "peak_reserved_bytes" in resident:
        size = resident["weights_bytes"] / measured_page.GIB
        yield row(
            f"A step of a LoRA on Flux, all {size:.1f} GiB of its weights on the GPU",
            figures(resident),
            device,
        )
        yield row(
            f"The same, {moved['offload']:.0%} of them in host memory", figures(moved), device
        )
        yield row(
            "Bytes that it copies to the GPU, over the fewest possible",
            f"{moved['over_x_min_ratio']:.3f}",
            device,
        )
    found = measured_page.rows_of([dict(report) for report in reports], "rivals")
    for cap in dict.fromkeys(what(each) for each in found if "step_s" in each):
        of = [each for each in found if what(each) == cap and "step_s" in each]
        if {"ours"} < {each["contender"] for each in of}:
            times = ", ".join(f"{CONTENDERS[e['contender']]} {e['step_s']:.3f} s" for e in of)
            memory, _, tokens = cap.partition(", ")
            yield row(f"A step of {tokens}, within {memory} of the GPU", times, device)


def what(found: Mapping[str, Any]) -> str:
    """Return what contenders were given."""
    return str(found["name"]).partition(", ")[2]


def figures(step: Mapping[str, Any]) -> str:
    """Return the time of a step, and what it takes of the GPU."""
    peak = step["peak_reserved_bytes"] / measured_page.GIB
    return f"{step['step_s']:.3f} s, {peak:.1f} GiB of the GPU"


def simulated(text: str) -> Iterator[str]:
    """Yield the row of what docs/performance.md says of training."""
    found = SIMULATED.search(text)
    if found:
        held, cells, most, average = found.groups()
        yield row(
            f"Training steps of real models in {cells} settings, over the least time possible",
            f"{average} on average, at most {most} in {held} of them",
            "",
        )


def row(what_is: str, value: str, device: str) -> str:
    """Return a row of the table; without a card its figures are simulated."""
    return f"| {what_is} | {value} | {f'hardware: {device}' if device else 'simulated'} |"


def page(text: str, devices: Mapping[str, Sequence[Mapping[str, Any]]], performance: str) -> str:
    """Return the page with its table written again."""
    lines = ["| what was measured | figure | on |", "| --- | --- | --- |"]
    for device, reports in devices.items():
        lines += hardware(device, reports)
    lines += simulated(performance)
    return BLOCK.sub(lambda block: block[1] + "\n".join(lines) + "\n" + block[2], text)


def printed() -> str:
    """Return what the first page of the site has of README.md: its first code, and the table."""
    text = PAGE.read_text("utf-8")
    code = re.search(r"^```python\n.*?^```\n", text, re.MULTILINE | re.DOTALL)
    table = BLOCK.search(text)
    return "\n".join(part[0] for part in (code, table) if part)


def main() -> int:
    """Write the page."""
    devices = measured_page.read(measured_page.RESULTS)
    performance = measured_page.SIMULATED_PAGE.read_text("utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), devices, performance), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
