"""The command `plan`: will a training fit a card and a host, before anything is loaded."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from ..host.patience import Patience, quiet_libraries
from ..host.terminal import FileError, naming, printable, put, show
from .exits import Exit

if TYPE_CHECKING:
    from ..planning import Plan
    from ..planning.verify import Verification


_LOGGER = "oracle_offload.planning"

DESCRIPTION = """\
Say whether a training fits a card and a host, and how long a step takes, before anything is loaded.

  oracle-offload plan FLUX.1-dev --card 4090 --ram 64GB
  oracle-offload plan ./my-model --train full --optimizer adafactor
  oracle-offload plan owner/name --fetch --card 12

MODEL is a model that is known by name (docs/plan.md has the list), a folder of diffusers or
transformers, a config.json, a safetensors file or index, owner/name from the local hub cache, or a
number of parameters such as 12B. Nothing uses a network but --fetch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `plan` takes; docs/plan.md explains each."""
    parser.add_argument(
        "model", metavar="MODEL", help="a name, a folder, a file, owner/name, or 12B"
    )
    parser.add_argument(
        "--fetch", action="store_true", help="ask the hub for the config of owner/name"
    )
    parser.add_argument(
        "--train", choices=("lora", "full"), default="lora", help="what is trained (lora)"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (16)")
    parser.add_argument("--targets", nargs="+", default="all-linear", help="layers with a LoRA")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw8bit, adafactor, sgd ...")
    parser.add_argument("--dtype", help="of the weights: bf16, fp16, fp32, fp8")
    parser.add_argument("--adapter-dtype", default="fp32", help="of the LoRA (fp32)")
    parser.add_argument("--master-dtype", help="of a second copy of trained weights")
    parser.add_argument(
        "--during-backward",
        action="store_true",
        help="of a full training: step each weight in backward",
    )
    parser.add_argument("--quantize", help="frozen weights: int8, fp8, qfloat8, nf4")
    parser.add_argument("--compress", choices=("lossless", "auto"), help="weights in fewer bytes")
    parser.add_argument(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        help="keep all activations for backward",
    )
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
    parser.add_argument("--card", help="4090, 'RTX 4090', or GB: 8, 12, 16, 24, 32, 48, 80 (24)")
    parser.add_argument("--vram", help="its memory, where that is another: 20GiB")
    parser.add_argument("--ram", help="the host's memory: 32, 64, 128, or 48GB (this machine's)")
    parser.add_argument("--link-gbps", type=float, help="measured: 1e9 bytes/s to the device")
    parser.add_argument("--memory-gbps", type=float, help="measured: 1e9 bytes/s on the device")
    parser.add_argument("--tflops", type=float, help="measured: 1e12 operations a second, bf16")
    parser.add_argument("--launch-s", type=float, help="measured: seconds of a kernel launch")
    parser.add_argument(
        "--upstream", type=int, default=1, help="cards that share one link upstream (1)"
    )
    parser.add_argument("--offload-percent", type=float, help="value for attach, 0 to 1")
    parser.add_argument("--vram-budget", help="value for attach: 8GiB, or auto")
    parser.add_argument("--ram-budget", help="value for attach: 20GiB, auto or offloaded")
    parser.add_argument(
        "--disk", action="store_true", help="value for attach: weights without room stay in files"
    )
    parser.add_argument("--disk-gbps", type=float, help="measured by doctor: 1e9 bytes/s, cold")
    parser.add_argument("--margin", type=float, default=0.08, help="share left to CUDA (0.08)")
    parser.add_argument(
        "--verify", metavar="RECORDING", help="show the plan next to a recording, run.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="PAGE", help="write the page to PAGE as well")


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    with Patience("plan", _LOGGER), quiet_libraries():
        return _run(args)


def _run(args: argparse.Namespace) -> Exit:
    from ..planning.known import known

    logger = logging.getLogger(_LOGGER)
    model = known(args.model)
    sizes = f"{model.name} has {model.parameters / 1e9:.2f} B parameters; " if model else ""
    logger.info("%simporting torch", sizes)
    from ..errors import OffloadError
    from ..model.budget import Budget
    from ..planning import plan

    options = vars(args).copy()
    for name in ("model", "run", "verify", "json", "html"):
        options.pop(name)
    asked = {
        name: options.pop(name)
        for name in ("offload_percent", "vram_budget", "ram_budget", "compress", "disk")
    }
    try:
        with naming("read", args.model):
            try:
                found = plan(args.model, budget=Budget(**asked), **options)
            except ValueError as problem:
                print(f"plan: {printable(str(problem))}", file=sys.stderr)
                return Exit.USAGE
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
        return Exit.ERROR
    return Exit.OK if found.fits else Exit.CHECK_FAILED
