"""Each option of `train-lora` on and off, each in a process of its own, beside resident."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..sizes import format_size
from ..views.schema import schema

SCHEMA = schema("bench-matrix", 1)


@dataclass(frozen=True)
class Cell:
    """One training of the matrix.

    Attributes
    ----------
    name : str
        What is other than in the row "managed".
    flags : tuple of str
        Of `train-lora`.
    keeps_bits : bool
        Whether its adapters must be those of the resident training.
    """

    name: str
    flags: tuple[str, ...]
    keeps_bits: bool


CELLS = (
    Cell("resident", ("--resident",), True),
    Cell("managed", (), True),
    Cell("half offloaded", ("--offload-percent", "0.5"), True),
    Cell("budget that adapts", ("--vram-budget", "auto"), True),
    Cell("no checkpointing", ("--no-gradient-checkpointing",), True),
    Cell("no mixed precision", ("--no-amp",), False),
    Cell("8-bit optimizer", ("--use-8bit-optimizer",), False),
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
    name : str
        Of its cell.
    keeps_bits : bool
        Whether its adapters must be those of the resident training.
    failed : str
        The last line of what it said, where it failed.
    note : str
        Why an option could not be had.
    seconds_per_step : float or None
        Median, without the first two steps.
    device_peak_bytes : int or None
        By torch; None on the simulated device.
    host_peak_bytes : int or None
        Of the process, its libraries included.
    h2d_bytes_per_step : float or None
        Over the link.
    h2d_gbps : float or None
        1e9 bytes/s over the link, while a copy was under way.
    watts : float or None
        Of the card, in the mean of the training, by NVML.
    optimizer_bytes : int or None
        Of its states.
    loss : float or None
        Of the last step.
    same_bits : bool or None
        Whether its adapters are those of the resident training.
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


def run_matrix(
    flags: Sequence[str],
    folder: Path,
    say: Callable[[str], object],
    cells: Sequence[Cell] = CELLS,
) -> Iterator[Row]:
    """Train once for each cell, one after the other, and yield its row.

    Parameters
    ----------
    flags : sequence of str
        Of `train-lora`, for all of them; without ``--output``.
    folder : Path
        Where their outputs go.
    say : callable
        Told which one begins.
    cells : sequence of Cell
        The first one is what the others are compared with.
    """
    expected: bytes | None = None
    for number, cell in enumerate(cells):
        say(f"{number + 1}/{len(cells)}: {cell.name}")
        output = folder / f"{number:02}"
        command = [sys.executable, "-m", "oracle_offload", "train-lora", *flags, *cell.flags]
        done = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            failed = lines[-1] if lines else f"it ended with {done.returncode}"
            yield Row(cell.name, cell.keeps_bits, failed)
            continue
        result = json.loads((output / "result.json").read_text("utf-8"))
        adapters = Path(result["adapter"]).read_bytes()
        if number == 0:
            expected = adapters
        steps = result["steps_now"]
        yield Row(
            cell.name,
            cell.keeps_bits,
            note=result["optimizer_note"],
            seconds_per_step=result["seconds_per_step"],
            device_peak_bytes=result["device_peak_bytes"],
            host_peak_bytes=result["host_peak_bytes"],
            h2d_bytes_per_step=result["h2d_bytes"] / steps if "h2d_bytes" in result else None,
            h2d_gbps=result.get("h2d_gbps"),
            watts=result["watts"],
            optimizer_bytes=result["optimizer_bytes"],
            loss=result["loss_last"],
            same_bits=None if expected is None else adapters == expected,
        )


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as JSON text."""
    return json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


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
    def size(nbytes: float | None) -> str:
        return "-" if nbytes is None else format_size(round(nbytes))

    step, loss = row.seconds_per_step, row.loss
    bits = {None: "-", True: "same", False: "other"}[row.same_bits]
    return (
        row.name,
        "-" if step is None else f"{step:.3f} s",
        size(row.device_peak_bytes),
        size(row.host_peak_bytes),
        size(row.h2d_bytes_per_step),
        "-" if row.h2d_gbps is None else f"{row.h2d_gbps:.1f}",
        "-" if row.watts is None else f"{row.watts:.0f}",
        size(row.optimizer_bytes),
        "-" if loss is None else f"{loss:.4f}",
        bits,
    )


def write_sample(folder: Path) -> list[str]:
    """Write a small random language model and texts; return the flags that name them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    texts = folder / "texts.jsonl"
    sentences = [f"{number} is one more than {number - 1}. " for number in range(16)]
    rows = [{"text": sentence * (2 + at % 5)} for at, sentence in enumerate(sentences)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["--model", str(folder / "model"), "--dataset-file", str(texts), "--batch-size", "2"]
