"""Compare two checkouts, both built in place: run benchmarks in each in turn, pair by pair.

    python benchmarks/compare.py ../before --rounds 20 host_cost

A pair's two runs follow one another in time, so that both see the same machine; which one goes
first alternates. Printed is, for every time that both print, the median of the pairs' ratios (this
checkout over the other) with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from math import comb
from pathlib import Path

from run import FOLDER

TIMES = ("_s", "_ms", "_us")


def times(checkout: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Run the benchmarks of `checkout` and return every time by its row's name and its key."""
    output = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / "run.py"), "--json", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=checkout,
    ).stdout
    return {
        f"{row['name']}: {key}": value
        for row in json.loads(output)["benchmarks"]
        for key, value in row.items()
        if key.endswith(TIMES)
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return what holds the median with at least 95%, whatever the distribution is.

    The k-th smallest and the k-th largest value, k by the binomial distribution (David and
    Nagaraja, Order Statistics, 7.1). Fewer than six values have no such interval: least, largest.
    """
    ordered, n = sorted(values), len(values)
    k, outside = 0, 2 * 0.5**n
    while outside <= 0.05 and k < n // 2:
        k += 1
        outside += 2 * comb(n, k) * 0.5**n
    low = max(k - 1, 0)
    return ordered[low], ordered[n - 1 - low]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios; 1 if one is certainly above `--limit`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=lambda text: Path(text).resolve(), help="the other checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, help="fail where a median's interval is above it")
    parser.add_argument("only", nargs="+", help="names of benchmark files")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for index in range(args.rounds):
        print(f"round {index + 1} of {args.rounds}", file=sys.stderr, flush=True)
        order = [args.before, FOLDER.parent] if index % 2 else [FOLDER.parent, args.before]
        found = {checkout: times(checkout, args.only) for checkout in order}
        pairs.append((found[args.before], found[FOLDER.parent]))
    above = False
    for name in pairs[0][0].keys() & pairs[0][1].keys():
        ratios = [after[name] / before[name] for before, after in pairs]
        low, high = median_interval(ratios)
        above |= args.limit is not None and low > args.limit
        print(f"{name}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
