"""Write the tables of the codec into docs/lossless.md: `python tools/codec_page.py`.

Sizes are those of any machine; speeds are this machine's, of one thread (benchmarks/bench_codec.c),
and the page says which machine that was.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "lossless.md"
TABLE = re.compile(
    r"(<!-- codec: python tools/codec_page.py -->\n).*?(<!-- end of codec -->\n)", re.DOTALL
)
CODERS = ("portable", "avx2", "avx512", "zstd -1")


def table(rows: Iterable[dict[str, Any]], machine: str) -> str:
    """Return the tables of sizes and speeds; a coder that this machine lacks has a dash."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "size_ratio" in row:
            weights, _, coder = row["name"].rpartition(", ")
            found.setdefault(weights, {})[coder] = row
    lines = ["| weights | size | zstd -1 |", "| --- | --- | --- |"]
    for weights, coders in found.items():
        sizes = [_cell(coders, coder, "size_ratio", ".3f") for coder in ("portable", "zstd -1")]
        lines.append(f"| {weights} | {' | '.join(sizes)} |")
    lines += ["", f"GB/s of weights, encoded (and verified) / decoded, one thread; {machine}:", ""]
    lines += [f"| weights | {' | '.join(CODERS)} |", "| --- " * (len(CODERS) + 1) + "|"]
    for weights, coders in found.items():
        speeds = [
            f"{_cell(coders, coder, 'encode_gbps', '.2f')} / "
            f"{_cell(coders, coder, 'decode_gbps', '.2f')}"
            for coder in CODERS
        ]
        lines.append(f"| {weights} | {' | '.join(speeds)} |")
    return "\n".join(lines) + "\n"


def _cell(coders: dict[str, dict[str, Any]], coder: str, key: str, form: str) -> str:
    return format(coders[coder][key], form) if coder in coders else "-"


def machine() -> str:
    """Return the processor's name, as far as the system says it."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def main() -> int:
    """Measure, and rewrite the page."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import bench_codec

    text = PAGE.read_text("utf-8")
    measured = table(bench_codec.benchmarks("cpu"), machine())
    found, count = TABLE.subn(lambda match: match[1] + measured + match[2], text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the tables of the codec")
    PAGE.write_text(found, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
