"""Every command of the pages on what a user has to do, run on tiny models and files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from subprocess import run as run_shell  # the fixture of a matrix replaces the module's

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import cli
from oracle_offload.heartbeat import Heartbeat
from oracle_offload.trainer import matrix

ROOT = Path(__file__).parents[2]
PAGES = (
    "killed-without-a-message.md",
    "memory.md",
    "train-lora.md",
    "bench-matrix.md",
    "resume.md",
    "out-of-memory.md",
    "it-worked-yesterday.md",
)  # tests/planning/test_plan.py runs those of plan.md
# What is not run here, and why.
NOT_RUN = {
    "pip install transformers diffusers peft pyyaml pillow": "it needs a package index",
    "cat /sys/fs/cgroup/memory.events": "a file of the kernel, where it has cgroup v2",
    "cat /sys/fs/cgroup/memory/memory.oom_control": "a file of the kernel, where it has cgroup v1",
    "%load_ext oracle_offload.explain": "for a notebook: tests/unit/test_explain_hooks.py runs it",
}
PROGRAM = "oracle-offload "
# As many steps as show that the command works, and the simulated device in place of a GPU.
SHORTER = {"--steps 200": "--steps 2", "--steps 800": "--steps 3", "--steps 20": "--steps 1"}
TRAINING = ("train-lora", "bench")
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
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    rows = [json.dumps({"text": f"the number {number}"}) for number in range(8)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    page = (ROOT / "docs" / "train-lora.md").read_text("utf-8")
    (settings,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.M | re.S)
    (folder / "run.yaml").write_text(settings.replace("steps: 400", "steps: 2\ndevice: cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train-lora", "--config", "run.yaml"]) == 0
    for name in ("before", "after", "run"):
        (folder / name).mkdir()
        shutil.copy(folder / "longer-run" / "metrics.jsonl", folder / name)
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
    rows = tuple(cell for cell in matrix.CELLS if cell.name in ("resident", "managed"))
    monkeypatch.setattr(matrix.run_matrix, "__defaults__", (rows,))
    return folder


def arguments(command: str) -> list[str]:
    """Return what the command line gets, on a machine without a GPU, and in few steps."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = shlex.split(command.removeprefix("python -m oracle_offload").removeprefix(PROGRAM))
    added = ["--device", "cpu"] if words[0] in TRAINING else []
    if added and not {"--steps", "--config"} & set(words):
        added += ["--steps", "1"]
    return [words[0], *added, *words[1:]]


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
    if "--config" in words and "--resume" not in words:
        shutil.rmtree("longer-run")  # the training begins
    if words[0] == "watch":
        with training():
            heart = Heartbeat()
            heart.write()
            code = cli.main(words)
            heart.remove()
    else:
        code = cli.main(words)
    said = capsys.readouterr()
    assert code in ((0, 3) if words[0] in MAY_SAY_NO else (0,)), said.err
    assert said.out


def test_what_is_left_out_stands_on_a_page():
    assert set(NOT_RUN) <= set(EVERY)
    for long in SHORTER:
        assert any(long in command for command in EVERY), long
    assert all(commands(page) for page in PAGES)
