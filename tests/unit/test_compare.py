"""benchmarks/compare.py: pairs of runs of two checkouts, and how sure their median is."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
from compare import median_interval  # noqa: E402


@pytest.mark.parametrize("n", [6, 20, 21])
def test_the_interval_holds_the_median_in_95_of_100_samples(n):
    seeded = random.Random(5)
    held = 0
    for _ in range(2000):
        low, high = median_interval([seeded.lognormvariate(0, 1) for _ in range(n)])
        held += low <= 1.0 <= high
    assert 0.94 <= held / 2000 <= 0.985


def test_the_interval_of_few_values_is_all_of_them():
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([3.0]) == (3.0, 3.0)


def checkout(folder, seconds):
    (folder / "benchmarks").mkdir(parents=True)
    for name in ("run.py", "common.py", "compare.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
    (folder / "benchmarks/bench_one.py").write_text(
        "def benchmarks(device):\n"
        f"    print('{folder.name}', file=open({str(folder.parent / 'order')!r}, 'a'))\n"
        f"    yield {{'name': 'row', 'took_s': {seconds}, 'size_bytes': 7}}\n"
    )
    return folder


@pytest.mark.parametrize(("limit", "code"), [("1.4", 1), ("1.6", 0)])
def test_each_pair_is_run_in_turn(tmp_path, limit, code):
    before, after = checkout(tmp_path / "before", 2.0), checkout(tmp_path / "after", 3.0)
    command = [after / "benchmarks/compare.py", before, "--rounds", "3", "--limit", limit, "one"]
    run = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == code, run.stderr
    assert re.fullmatch(r"row: took_s: 1\.500 \(1\.500 to 1\.500\)\n", run.stdout)
    order = (tmp_path / "order").read_text().split()
    assert order == ["after", "before", "before", "after", "after", "before"]
