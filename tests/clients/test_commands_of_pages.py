"""Every command of the pages on what a user has to do, run on tiny models and files."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from subprocess import run as run_shell  # the fixture of a matrix replaces the module's

import pytest
import small_models
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import cli
from oracle_offload.commands import bench
from oracle_offload.observe.heartbeat import Heartbeat

ROOT = Path(__file__).parents[2]
PAGES = (
    "killed-without-a-message.md",
    "memory.md",
    "examples.md",
    "bench-matrix.md",
    "resume.md",
    "out-of-memory.md",
    "it-worked-yesterday.md",
)  # tests/planning/test_plan.py runs those of plan.md
# What is not run here, and why.
NOT_RUN = {
    "pip install transformers diffusers peft pillow": "it needs a package index",
    "cat /sys/fs/cgroup/memory.events": "a file of the kernel, where it has cgroup v2",
    "cat /sys/fs/cgroup/memory/memory.oom_control": "a file of the kernel, where it has cgroup v1",
    "%load_ext oracle_offload.diagnose.explain": "tests/unit/test_explain_hooks.py runs it",
}
PROGRAM = "oracle-offload "
EXAMPLE = "python examples/"
# As many steps as show that the command works, and the simulated device in place of a GPU.
SHORTER = {"--steps 200": "--steps 1", "--steps 800": "--steps 3", "--steps 20": "--steps 1"}
# These end with 3, too: it does not fit, a check of this machine failed.
MAY_SAY_NO = ("plan", "doctor")


def commands(page: str) -> list[str]:
    """Return the commands of a page: the lines of its blocks in no other language."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    blocks = [block for language, block in found if language in ("", "bash")]
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


EVERY = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@contextlib.contextmanager
def training():
    """A training under way in this process."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with attached(model):
        model(torch.ones(1, 64)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        yield


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder with what a user of the pages has: a model, data, a run, logs."""
    folder = tmp_path_factory.mktemp("pages")
    small_models.llama(folder / "llama")
    small_models.texts(folder / "texts.jsonl")
    shutil.copytree(ROOT / "examples", folder / "examples")
    command = EXAMPLE + "llm_lora.py --model ./llama --data texts.jsonl --steps 2 --output run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_example(command) == 0
    for name in ("before", "after"):
        (folder / name).mkdir()
        shutil.copy(folder / "run" / "metrics.jsonl", folder / name)
    errors = (ROOT / "tests" / "data" / "oom" / "corpus.jsonl").read_text("utf-8").splitlines()
    log = json.loads(errors[0])["text"]
    (folder / "train.log").write_text(log)
    history = [json.dumps({"step": n, "phase": "forward", "length": 8 + n}) for n in range(9)]
    (folder / "steps.jsonl").write_text("\n".join(history))
    failure = torch.OutOfMemoryError(log.splitlines()[-1].removeprefix("RuntimeError: "))
    record = oracle_offload.record(folder / "run.jsonl")
    with pytest.raises(torch.OutOfMemoryError), record, training():
        raise failure
    return folder


@pytest.fixture
def here(left, tmp_path, monkeypatch, in_this_process):
    """A copy of that folder of this test's own; a matrix of two rows."""
    folder = tmp_path / "here"
    shutil.copytree(left, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "CELLS", bench.CELLS[:2])
    return folder


def arguments(command: str) -> list[str]:
    """Return what the command line gets, on a machine without a GPU, and in few steps."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = shlex.split(command.removeprefix("python -m oracle_offload").removeprefix(PROGRAM))
    few = ["--device", "cpu", *(() if "--steps" in words else ("--steps", "1"))]
    return [words[0], *(few if words[0] == "bench" else ()), *words[1:]]


def run_example(command: str) -> int:
    """Run a command of an example in this process."""
    words = shlex.split(command.removeprefix(EXAMPLE))
    example = importlib.import_module(words[0].removesuffix(".py"))
    if example is small_models:
        small_models.write(Path(words[1]))
        return 0
    few = ("--device", "cpu", *(() if "--steps" in words else ("--steps", "1")))
    return example.main([*words[1:], *few])


@pytest.mark.parametrize("command", [c for c in EVERY if c not in NOT_RUN])
def test_the_command_runs(command, here, capsys, sim):
    if "|" in command:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = run_shell(
            command, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "Out of memory" in done.stdout, done.stderr
        return
    words = arguments(command)
    if command.startswith(EXAMPLE):
        if "--resume" not in words:
            shutil.rmtree("run")  # the training begins
        if "out/small" in command:
            small_models.write(Path("out/small"))
        code = run_example(" ".join(["python", *words[1:]]))
    elif words[0] == "watch":
        with training():
            heart = Heartbeat()
            heart.write()
            code = cli.main(words)
            heart.remove()
    else:
        code = cli.main(words)
    said = capsys.readouterr()
    assert code in ((0, 3) if words[0] in MAY_SAY_NO else (0,)), said.err
    assert said.out or "small_models.py" in command


def test_what_is_left_out_stands_on_a_page():
    assert set(NOT_RUN) <= set(EVERY)
    for long in SHORTER:
        assert any(long in command for command in EVERY), long
    assert all(commands(page) for page in PAGES)
