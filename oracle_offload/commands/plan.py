"""The command `plan`: will a training fit a card and a host, before anything is loaded."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ..views.terminal import FileError, naming, printable, put, show

if TYPE_CHECKING:
    from ..planning import Plan
    from ..planning.verify import Verification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `plan` takes; docs/plan.md explains each."""
    parser.add_argument(
        "model", help="a folder, config.json, safetensors file or index, owner/name or 12B"
    )
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (16)")
    parser.add_argument("--targets", nargs="+", default="all-linear", help="layers with a LoRA")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw8bit, adafactor, sgd ...")
    parser.add_argument("--dtype", help="of the weights: bf16, fp16, fp32, fp8")
    parser.add_argument("--adapter-dtype", default="fp32", help="of the LoRA (fp32)")
    parser.add_argument("--master-dtype", help="of a second copy of trained weights")
    parser.add_argument("--quantise", help="frozen weights: int8, fp8, qfloat8, nf4")
    parser.add_argument("--compress", choices=("lossless", "auto"), help="weights in fewer bytes")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--batch", type=int, default=1, help="samples in a micro-batch (1)")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="of a step, with one fetch for all (1)"
    )
    parser.add_argument(
        "--sample", metavar="SAMPLE", help="tokens, HEIGHTxWIDTH in pixels, or NAME=AxB:dtype,..."
    )
    parser.add_argument(
        "--no-measure", dest="measure", action="store_false", help="leave activations and time out"
    )
    parser.add_argument("--card", help="by name or GB: 8, 12, 16, 24, 32, 48, 80 (24)")
    parser.add_argument("--vram", help="its memory, where that is another: 20GiB")
    parser.add_argument("--ram", help="the host's memory: 32, 64, 128, or 48GB (this machine's)")
    parser.add_argument("--link-gbps", type=float, help="measured: 1e9 bytes/s to the device")
    parser.add_argument("--memory-gbps", type=float, help="measured: 1e9 bytes/s on the device")
    parser.add_argument("--tflops", type=float, help="measured: 1e12 operations a second, bf16")
    parser.add_argument("--launch-s", type=float, help="measured: seconds of a kernel launch")
    parser.add_argument("--offload-percent", type=float, help="what attach is to be told, 0 to 1")
    parser.add_argument("--margin", type=float, default=0.08, help="share left to CUDA (0.08)")
    parser.add_argument(
        "--verify", metavar="RECORDING", help="show the plan beside a recording, run.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="PAGE", help="write the page to PAGE as well")


def run(args: argparse.Namespace, fits: int, error: int, usage: int, does_not_fit: int) -> int:
    """Run the command; return one of the exit codes given."""
    from ..errors import OffloadError
    from ..planning import plan

    options = vars(args).copy()
    for name in ("model", "run", "verify", "json", "html"):
        options.pop(name)
    try:
        with naming("read", args.model):
            try:
                found = plan(args.model, **options)
            except ValueError as problem:
                print(f"plan: {printable(str(problem))}", file=sys.stderr)
                return usage
        shown: Plan | Verification = found
        if args.verify is not None:
            with naming("read", args.verify):
                shown = found.verify(args.verify)
        if args.html:
            with naming("write", args.html), open(args.html, "w", encoding="utf-8") as page:
                page.write(shown.to_html())
        with naming("write", "standard output"):
            if args.json:
                put(sys.stdout, shown.to_json())
                sys.stdout.flush()
            else:
                show(sys.stdout, lambda width, color: shown.to_text(width=width, color=color))
    except (FileError, OffloadError) as problem:
        print(printable(str(problem)), file=sys.stderr)
        return error
    return fits if found.fits else does_not_fit
