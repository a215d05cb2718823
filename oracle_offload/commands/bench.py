"""The command `bench`: what each option of a training saves and costs, beside resident."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ..views.terminal import FileError, naming, put

DESCRIPTION = """\
Train the same LoRA again and again, each time with one option on or off, every training in a
process of its own, and show time, memory, bytes over the link and whether the bits are those of
the resident training.

  oracle-offload bench --matrix
  oracle-offload bench --matrix --model ./llama --dataset-file texts.jsonl --steps 20
  oracle-offload bench --matrix --json matrix.json -- --max-length 512

What stands after -- are flags of train-lora, for every training."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench` takes."""
    parser.add_argument("--matrix", action="store_true", required=True, help="every option")
    parser.add_argument("--model", metavar="PATH", help="as in train-lora; by default a small one")
    parser.add_argument("--dataset-file", metavar="PATH", help="as in train-lora")
    parser.add_argument("--steps", metavar="N", default="8", help="of each training (default: 8)")
    parser.add_argument("--device", metavar="NAME", default="cuda", help="cuda, or cpu: simulated")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("more", nargs="*", metavar="FLAG", help="flags of train-lora, after --")


def run(args: argparse.Namespace, shown: int, error: int, usage: int, wrong: int) -> int:
    """Run the command; return one of the four exit codes given."""
    from ..trainer.matrix import run_matrix, to_json, to_text, write_sample

    if (args.model is None) != (args.dataset_file is None):
        print("bench: --model and --dataset-file go together", file=sys.stderr)
        return usage
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.model is None:
            try:
                flags = write_sample(folder)
            except ModuleNotFoundError as problem:
                print(f"bench: {problem}; pip install transformers", file=sys.stderr)
                return error
        else:
            flags = ["--model", args.model, "--dataset-file", args.dataset_file]
        flags += ["--steps", args.steps, "--device", args.device, *args.more]
        for row in run_matrix(flags, folder, lambda line: print(line, file=sys.stderr, flush=True)):
            rows.append(row)
    try:
        with naming("write", "standard output"):
            put(sys.stdout, to_text(rows))
            if args.device == "cpu":
                put(sys.stdout, "The device is simulated: seconds are those of this processor.\n")
        if args.json:  # last: a file that cannot be written takes no table along
            with naming("write", args.json):
                Path(args.json).write_text(to_json(rows), encoding="utf-8")
    except FileError as problem:
        print(problem, file=sys.stderr)
        return error
    if any(row.is_wrong for row in rows):
        return wrong
    return error if rows[0].failed or all(row.failed for row in rows[1:]) else shown
