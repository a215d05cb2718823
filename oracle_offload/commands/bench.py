"""The command `bench`: what each option of a training saves and costs, compared with resident."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import FileError, naming, put
from ..observe.metrics import read_metrics
from .exits import Exit

DESCRIPTION = """\
Train the same again and again, each time with one option on or off, every training in a process of
its own, and show time, memory, bytes over the link and whether the bits are those of the resident
training.

  oracle-offload bench --matrix examples/llm_lora.py -- --model ./llama --data texts.jsonl
  oracle-offload bench --matrix examples/llm_lora.py --steps 20 --json -- ... > matrix.json

SCRIPT is an example of the repository, or takes the flags that these have: it writes metrics.jsonl
into --output, says "note: " and why where an option cannot be had, and prints the file of what it
trained last. What comes after -- are its flags, for every training."""

SCHEMA = schema("bench-matrix", 1)
_WARM_UP_STEPS = 2  # in which the engine learns the order


@dataclass(frozen=True)
class Cell:
    """One training of the matrix.

    Attributes
    ----------
    name : str
        What is other than in the row "managed".
    flags : tuple of str
        Of the script.
    keeps_bits : bool
        Whether what it trains must be that of the resident training.
    """

    name: str
    flags: tuple[str, ...]
    keeps_bits: bool


CELLS = (
    Cell("resident", ("--resident",), True),
    Cell("managed", (), True),
    Cell("half offloaded", ("--offload-percent", "0.5"), True),
    Cell("budget that adapts", ("--vram-budget", "auto"), True),
    Cell("no checkpointing", ("--no-checkpointing",), True),
    Cell("no mixed precision", ("--no-amp",), False),
    Cell("8-bit optimizer", ("--optimizer", "adamw8bit"), False),
    Cell("Adafactor", ("--optimizer", "adafactor"), False),
    Cell("no buckets", ("--bucket-pool", "0"), False),
    Cell("chunks of 64", ("--chunk-size", "64"), False),
    Cell("chunks of 64, window 64", ("--chunk-size", "64", "--window-size", "64"), False),
)


@dataclass(frozen=True)
class Row:
    """What came of one training; None where it was not measured, or failed.

    Attributes
    ----------
    name, keeps_bits
        Of its cell.
    failed : str
        The last line of what it said, where it failed.
    note : str
        Why an option could not be had.
    seconds_per_step : float or None
        Median, without the first two steps.
    device_peak_bytes, host_peak_bytes : int or None
        By torch, unknown on the simulated device; of the process, its libraries included.
    h2d_bytes_per_step, h2d_gbps : float or None
        Over the link, in the mean; 1e9 bytes/s while a copy was under way.
    watts : float or None
        Of the card, in the mean, by NVML.
    optimizer_bytes : int or None
        Of its states.
    loss : float or None
        Of the last step.
    same_bits : bool or None
        Whether what it trained is that of the resident training.
    """

    name: str
    keeps_bits: bool
    failed: str = ""
    note: str = ""
    seconds_per_step: float | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    h2d_bytes_per_step: float | None = None
    h2d_gbps: float | None = None
    watts: float | None = None
    optimizer_bytes: int | None = None
    loss: float | None = None
    same_bits: bool | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether it has other bits than it must have."""
        return self.keeps_bits and self.same_bits is False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench` takes."""
    add = parser.add_argument
    add("--matrix", metavar="SCRIPT", required=True, help="every option of this training")
    add("--steps", metavar="N", default="8", help="of each training (default: 8)")
    add("--device", metavar="NAME", default="cuda", help="cuda, or cpu: simulated")
    add("--json", action="store_true", help="print JSON, not a table")
    add("more", nargs="*", metavar="FLAG", help="flags of the script, after --")


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    if not Path(args.matrix).is_file():
        print(f"bench: --matrix {args.matrix}: there is no such script", file=sys.stderr)
        return Exit.USAGE
    flags = [*args.more, "--steps", args.steps, "--device", args.device]
    with tempfile.TemporaryDirectory() as folder:
        rows = list(trained(args.matrix, flags, Path(folder), CELLS))
    try:
        with naming("write", "standard output"):
            if args.json:
                document = {"schema": SCHEMA, "rows": [asdict(row) for row in rows]}
                put(sys.stdout, json.dumps(document, indent=2) + "\n")
            else:
                put(sys.stdout, to_text(rows))
            if args.device == "cpu" and not args.json:
                put(sys.stdout, "The device is simulated: seconds are those of this processor.\n")
            sys.stdout.flush()
    except FileError as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR
    if any(row.is_wrong for row in rows):
        return Exit.CHECK_FAILED
    failed = rows[0].failed or all(row.failed for row in rows[1:])
    return Exit.ERROR if failed else Exit.OK


def trained(
    script: str, flags: Sequence[str], folder: Path, cells: Sequence[Cell]
) -> Iterator[Row]:
    """Train once for each cell, one after the other, and yield its row.

    Parameters
    ----------
    script : str
        What trains.
    flags : sequence of str
        Of the script, for all of them; without ``--output``.
    folder : Path
        Where their outputs go.
    cells : sequence of Cell
        The first one is what the others are compared with.
    """
    expected: bytes | None = None
    # The package that runs this is the one that is measured, installed or not.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for number, cell in enumerate(cells):
        print(f"{number + 1}/{len(cells)}: {cell.name}", file=sys.stderr, flush=True)
        output = folder / f"{number:02}"
        done = subprocess.run(
            [sys.executable, script, *flags, *cell.flags, "--output", str(output)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            failed = lines[-1] if lines else f"it ended with {done.returncode}"
            yield Row(cell.name, cell.keeps_bits, failed)
            continue
        made = Path(done.stdout.strip().splitlines()[-1]).read_bytes()
        expected = made if number == 0 else expected
        notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
        yield Row(
            cell.name,
            cell.keeps_bits,
            note="; ".join(line.removeprefix("note: ") for line in notes),
            same_bits=None if expected is None else made == expected,
            **_figures(output / "metrics.jsonl"),
        )


def _figures(path: Path) -> dict[str, Any]:
    records = read_metrics(path)[-1].records

    def known(name: str) -> list[Any]:
        return [record[name] for record in records if record.get(name) is not None]

    def one(reduce: Callable[[Iterable[Any]], Any], values: list[Any]) -> Any:
        return reduce(values) if values else None

    seconds = [after - before for before, after in pairwise(known("time_s"))]
    counted = seconds[_WARM_UP_STEPS - 1 :] or seconds  # the first step has no difference
    return {
        "seconds_per_step": one(statistics.median, counted),
        "device_peak_bytes": one(max, known("peak_bytes")),
        "host_peak_bytes": one(max, known("host_peak_bytes")),
        "h2d_bytes_per_step": one(statistics.mean, known("h2d_bytes")),
        "h2d_gbps": one(statistics.mean, known("h2d_gbps")),
        "watts": one(statistics.mean, known("power_w")),
        "optimizer_bytes": one(max, known("optimizer_bytes")),
        "loss": one(lambda values: list(values)[-1], known("loss")),
    }


def to_text(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    heads = tuple("|step|device peak|host peak|link, a step|GB/s|W|optimizer|loss|bits".split("|"))
    table = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    lines += [f"{row.name} failed: {row.failed}" for row in rows if row.failed]
    lines += [f"{row.name}: {row.note}" for row in rows if row.note]
    wrong = [row.name for row in rows if row.is_wrong]
    lines += [f"{name} has other bits than resident, and must not" for name in wrong]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    def told(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    def size(nbytes: float) -> str:
        return format_size(round(nbytes))

    return (
        row.name,
        told(row.seconds_per_step, "{:.3f} s".format),
        told(row.device_peak_bytes, size),
        told(row.host_peak_bytes, size),
        told(row.h2d_bytes_per_step, size),
        told(row.h2d_gbps, "{:.1f}".format),
        told(row.watts, "{:.0f}".format),
        told(row.optimizer_bytes, size),
        told(row.loss, "{:.4f}".format),
        {None: "-", True: "same", False: "other"}[row.same_bits],
    )
