"""The command line: `oracle-offload` or `python -m oracle_offload`, one function per subcommand.

Exit codes: 0 ok (or fits), 1 error, 2 usage, 3 does not fit or a check failed. Nothing heavy is
imported before a subcommand is known, so `--help` answers at once and needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_CHECK_FAILED = 0, 1, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each subcommand sets `run(args) -> exit code`."""
    parser = argparse.ArgumentParser(
        prog="oracle-offload",
        description="Train PyTorch models whose weights do not fit the GPU.",
    )
    parser.add_argument("--version", action="version", version=f"oracle_offload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_explain(commands)
    _add_watch(commands)
    _add_report(commands)
    _add_train_lora(commands)
    _add_bench(commands)
    _add_aitoolkit(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .demo import add_arguments

    demo = commands.add_parser("demo", help="train a Flux transformer offloaded and resident")
    add_arguments(demo)
    demo.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Train offloaded and resident side by side; exit with 3 when the bits differ."""
    from .demo import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_CHECK_FAILED)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .commands.plan import add_arguments

    plan = commands.add_parser("plan", help="will it fit, and how fast, before loading")
    add_arguments(plan)
    plan.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Plan a training; exit with 3 when it does not fit."""
    from .commands.plan import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_CHECK_FAILED)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="check whether this machine is fit to train")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--html", metavar="FILE", help="write the page to FILE as well")
    doctor.add_argument("--aitoolkit", metavar="PATH", help="examine an AI-Toolkit checkout too")
    doctor.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print one page of checks; exit with 3 when one of them is bad."""
    from .doctor import examine
    from .views.terminal import FileError, naming, show

    if sys.stderr.isatty():
        print("examining, which imports torch once ...", end="\r", file=sys.stderr, flush=True)
    report = examine(aitoolkit=args.aitoolkit)
    if sys.stderr.isatty():
        print(" " * 40, end="\r", file=sys.stderr, flush=True)
    try:
        if args.html:
            with naming("write", args.html), open(args.html, "w", encoding="utf-8") as file:
                file.write(report.to_html())
        with naming("write", "standard output"):
            if args.json:
                print(report.to_json(), end="", flush=True)
            else:
                show(sys.stdout, lambda width, color: report.to_text(width=width, colour=color))
    except FileError as problem:
        print(problem, file=sys.stderr)
        return EXIT_ERROR
    return EXIT_CHECK_FAILED if report.verdict == "bad" else EXIT_OK


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser("explain", help="explain an out-of-memory error in a log")
    explain.add_argument("log", metavar="LOG", help="a log file, or - for standard input")
    explain.add_argument("--follow", action="store_true", help="wait for what is still written")
    explain.add_argument("--json", action="store_true", help="print JSON, one report per line")
    explain.add_argument("--all", action="store_true", help="list every fix, not the first three")
    explain.add_argument("--html", metavar="FILE", help="write the report to FILE as well")
    explain.add_argument("--history", metavar="FILE", help="a step history (JSON lines)")
    explain.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Explain a log; exit with 3 when it holds no out-of-memory error."""
    from .explain.command import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_CHECK_FAILED)


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .commands.watch import add_arguments

    watch = commands.add_parser("watch", help="show what a running training does now")
    add_arguments(watch)
    watch.set_defaults(run=run_watch)


def run_watch(args: argparse.Namespace) -> int:
    """Show a running training until it ends, or once."""
    from .commands.watch import run

    return run(args, EXIT_OK, EXIT_ERROR)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .commands.report import add_arguments

    report = commands.add_parser("report", help="show what a run has left, or compare two")
    add_arguments(report)
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Show a recording, a metrics file or a log; or compare two."""
    from .commands.report import run

    return run(args, EXIT_OK, EXIT_ERROR)


def _add_train_lora(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .commands.train_lora import DESCRIPTION, add_arguments

    train_lora = commands.add_parser(
        "train-lora",
        help="train a LoRA on a local folder of data",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(train_lora)
    train_lora.set_defaults(run=run_train_lora)


def run_train_lora(args: argparse.Namespace) -> int:
    """Train an adapter; exit with 2 where the settings make no sense."""
    from .commands.train_lora import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_USAGE)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .commands.bench import DESCRIPTION, add_arguments

    bench = commands.add_parser(
        "bench",
        help="what each option of a training saves and costs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(bench)
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Train with each option on and off; exit with 3 when bits differ that must not."""
    from .commands.bench import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_CHECK_FAILED)


def _add_aitoolkit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .aitoolkit.command import add_arguments

    aitoolkit = commands.add_parser("aitoolkit", help="offload layers in an AI-Toolkit checkout")
    add_arguments(aitoolkit)
    aitoolkit.set_defaults(run=run_aitoolkit)


def run_aitoolkit(args: argparse.Namespace) -> int:
    """Install into a checkout, or out of it; exit with 3 when it is half installed or unknown."""
    from .aitoolkit.command import run

    return run(args, EXIT_OK, EXIT_ERROR, EXIT_CHECK_FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has gone, and need not hear of the rest
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
