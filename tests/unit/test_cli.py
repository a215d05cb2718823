"""The command line: which function a subcommand reaches, what it prints, and its exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oracle_offload
from oracle_offload import cli
from oracle_offload.diagnose import doctor
from oracle_offload.diagnose.doctor.finding import Finding
from oracle_offload.diagnose.doctor.report import DoctorReport

ROOT = Path(__file__).parent.parent.parent


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let the doctor find one bad thing; the list holds what it was asked to examine."""
    asked: list[object] = []

    def examine(aitoolkit: str | None, disk: str | None) -> DoctorReport:
        asked.append((aitoolkit, disk))
        verdict = "bad" if aitoolkit is None else "warn"
        return DoctorReport((Finding("ram", verdict, "1.0 GiB", "little", "buy some"),))

    monkeypatch.setattr(doctor, "examine", examine)
    return asked


def test_the_doctor_exits_with_3_where_something_is_bad(
    examined: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == cli.Exit.CHECK_FAILED == 3
    assert capsys.readouterr().out.startswith("doctor: 1 bad\n")
    assert cli.main(["doctor", "--aitoolkit", "/a/checkout"]) == cli.Exit.OK == 0
    assert cli.main(["doctor", "--disk", "models"]) == cli.Exit.CHECK_FAILED
    assert examined == [(None, None), ("/a/checkout", None), (None, "models")]


def test_the_doctor_prints_json_and_writes_a_page(
    examined: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    cli.main(["doctor", "--json", "--html", str(page)])
    assert json.loads(capsys.readouterr().out)["verdict"] == "bad"
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_is_one_line_and_an_error(
    examined: list[object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["doctor", "--html", str(tmp_path)]) == cli.Exit.ERROR == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"cannot write {tmp_path}: ") and said.err.count("\n") == 1
    assert said.out == ""


def test_only_a_terminal_is_told_that_examining_takes_a_while(
    examined: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    cli.main(["doctor"])
    shown = "examining, which imports torch once ..."
    assert screen.getvalue() == f"{shown}\r{' ' * 40}\r" and len(shown) < 40
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    cli.main(["doctor"])
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_an_interrupted_command_exits_as_shells_expect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("oracle_offload.commands.doctor.run", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_has_gone_is_no_error_and_hears_no_more() -> None:
    code = (
        "import sys\n"
        "from oracle_offload import cli\n"
        "from oracle_offload.commands import doctor\n"
        "def run(args, *codes):\n"
        "    print('begun', flush=True)\n"
        "    raise BrokenPipeError\n"
        "doctor.run = run\n"
        "code = cli.main(['doctor'])\n"
        "print('into nothing', flush=True)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"oracle_offload {oracle_offload.__version__}\n"),
        (["--help"], 0, "usage: oracle-offload "),
        ([], 2, "usage: oracle-offload "),
        (["doctor", "--nonsense"], 2, "usage: oracle-offload "),
        (["explain"], 2, "usage: oracle-offload explain "),
    ],
)
def test_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    shown = capsys.readouterr()
    assert left.value.code == code
    assert (shown.out or shown.err).startswith(said)


PLAN = {
    "model": "1M", "train": "lora", "rank": 16, "targets": "all-linear", "optimizer": "adamw",
    "fetch": False, "dtype": None, "adapter_dtype": "fp32", "master_dtype": None, "quantize": None,
    "compress": None, "checkpointing": True, "batch": 1, "micro_batches": 1, "sample": None,
    "measure": True, "card": None, "vram": None, "ram": None, "link_gbps": None,
    "memory_gbps": None, "tflops": None, "launch_s": None, "upstream": 1,
    "offload_percent": None, "vram_budget": None, "ram_budget": None, "margin": 0.08,
    "disk": False, "disk_gbps": None,
    "verify": None, "json": False, "html": None, "during_backward": False,
}  # fmt: skip
BENCH = {"matrix": "a.py", "steps": "8", "device": "cuda", "json": False, "more": []}
EXPLAIN = {
    "log": "-", "follow": False, "json": False, "all": False, "html": None, "history": None,
}  # fmt: skip
TAKEN: dict[str, dict[str, object]] = {
    "plan 1M": PLAN,
    "plan 1M --train full --rank 4 --targets a b --optimizer sgd --dtype fp8 --adapter-dtype bf16"
    " --master-dtype fp32 --quantize nf4 --compress auto --no-checkpointing --batch 2"
    " --micro-batches 3 --sample 512 --no-measure --card 16 --vram 20GiB --ram 48GB --link-gbps 25"
    " --memory-gbps 900 --tflops 80 --launch-s 1e-5 --upstream 2 --offload-percent 0.5 --margin 0.1"
    " --vram-budget 9GiB --ram-budget auto --during-backward --disk --disk-gbps 3.5"
    " --verify run.jsonl --json --html page": {
        "model": "1M", "train": "full", "rank": 4, "targets": ["a", "b"], "optimizer": "sgd",
        "fetch": False, "dtype": "fp8", "adapter_dtype": "bf16", "master_dtype": "fp32",
        "quantize": "nf4", "compress": "auto", "checkpointing": False, "batch": 2,
        "micro_batches": 3, "sample": "512", "measure": False, "card": "16", "vram": "20GiB",
        "ram": "48GB", "link_gbps": 25.0, "memory_gbps": 900.0, "tflops": 80.0, "launch_s": 1e-5,
        "upstream": 2, "offload_percent": 0.5, "vram_budget": "9GiB", "ram_budget": "auto",
        "margin": 0.1, "verify": "run.jsonl", "json": True, "during_backward": True,
        "html": "page", "disk": True, "disk_gbps": 3.5,
    },
    "bench --matrix a.py": BENCH,
    "bench --matrix a.py --steps 2 --device cpu --json -- --rank 3": {
        "matrix": "a.py", "steps": "2", "device": "cpu", "json": True, "more": ["--rank", "3"],
    },
    "watch": {"pid": None, "once": False, "json": False},
    "watch 7 --once --json": {"pid": 7, "once": True, "json": True},
    "cache": {"clear": False, "keep": None},
    "cache --clear": {"clear": True, "keep": None},
    "cache --keep 2GiB": {"clear": False, "keep": "2GiB"},
    "explain -": EXPLAIN,
    "explain log --follow --json --all --html page --history steps": {
        "log": "log", "follow": True, "json": True, "all": True, "html": "page",
        "history": "steps",
    },
    "report a": {"file": "a", "after": None, "json": False, "html": None},
    "report a b --json --html page": {"file": "a", "after": "b", "json": True, "html": "page"},
    "doctor": {"json": False, "html": None, "aitoolkit": None, "disk": None},
    "doctor --json --html page --aitoolkit there --disk models": {
        "json": True, "html": "page", "aitoolkit": "there", "disk": "models",
    },
}  # fmt: skip


@pytest.mark.parametrize("line", TAKEN)
def test_each_command_takes_these(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    def run(args: argparse.Namespace) -> int:
        given.append(vars(args))
        return 7

    words = line.split()
    module = f"oracle_offload.commands.{words[0].replace('-', '_')}"
    monkeypatch.setattr(f"{module}.run", run)
    assert cli.main(words) == 7
    (taken,) = given
    assert {name: value for name, value in taken.items() if name != "run"} == TAKEN[line]


@pytest.mark.parametrize(
    "line", ["bench", "cache --clear --keep 2GiB", "plan 1M --train all", "plan 1M --compress x"]
)
def test_what_a_command_does_not_take_is_refused(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(line.split())
    assert left.value.code == 2 and "usage: oracle-offload" in capsys.readouterr().err


def test_a_public_name_is_imported_once_and_an_unknown_one_is_refused() -> None:
    oracle_offload.__dict__.pop("explain_oom", None)
    assert "explain_oom" in dir(oracle_offload)
    found = oracle_offload.explain_oom
    assert oracle_offload.__dict__["explain_oom"] is found
    with pytest.raises(AttributeError, match="module 'oracle_offload' has no attribute 'attatch'"):
        oracle_offload.attatch  # noqa: B018


@pytest.mark.parametrize("missing", ["torch", "numpy", "tqdm"])
def test_a_name_that_needs_what_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.delitem(oracle_offload.__dict__, "attach", raising=False)
    monkeypatch.setattr(oracle_offload.importlib, "import_module", fail)
    expected = f"oracle_offload.attach needs {missing}, which is not installed; .*PyTorch that fits"
    with pytest.raises(ModuleNotFoundError) as said:
        oracle_offload.attach  # noqa: B018
    assert said.value.name == missing
    assert said.match(expected if missing != "tqdm" else "No module named 'tqdm'")


def test_every_command_and_every_option_says_what_it_is_and_how_it_exits() -> None:
    parser = cli.build_parser()
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in found.choices.items():
        assert command.description and len(command.description) > 20, name
        assert command.epilog is not None and command.epilog.startswith("Exit code:\n  0 ok"), name
        for action in command._actions:
            told = action.help or isinstance(action, argparse._SubParsersAction)
            assert told, f"{name} {action.option_strings or action.dest} has no help"
        spelled = {option for action in command._actions for option in action.option_strings}
        assert not spelled & {"--quantise", "--offload", "--percent"}, name
        json_of = [a for a in command._actions if "--json" in a.option_strings]
        assert all(a.help.startswith("print JSON") and a.nargs == 0 for a in json_of), name
