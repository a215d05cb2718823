"""The examples, each run as a user runs it, on small models of the real classes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import flux_lora_24gb
import full_finetune
import llm_lora
import pytest
import sample
import shared
import sides
import small_models
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from oracle_offload import cli
from oracle_offload.commands import bench
from oracle_offload.engine.engines import open_states
from oracle_offload.model.witness import Witness
from oracle_offload.observe import read_metrics, read_recording
from oracle_offload.train.recipes import mixed_precision

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "llm_lora.py": llm_lora,
    "flux_lora_24gb.py": flux_lora_24gb,
    "full_finetune.py": full_finetune,
    "sample.py": sample,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of `small_models`."""
    folder = tmp_path_factory.mktemp("small")
    small_models.write(folder)
    return folder


@pytest.fixture
def run(small, tmp_path, capsys, monkeypatch):
    """Return a function that runs an example in a folder; it returns what it said, by both ways."""
    if sides.DEVICE == "simgpu":  # a device type that is not on their list of those that can
        known = "transformers.training_args.is_torch_bf16_gpu_available"
        monkeypatch.setattr(known, lambda: True)

    def run(example, output, *flags, code=0):
        kind = "flux" if example in (flux_lora_24gb, sample) else "llama"
        told = ["--model", small / kind, "--device", sides.DEVICE, "--output", tmp_path / output]
        if example is not sample:
            data = "pictures" if kind == "flux" else "texts.jsonl"
            told += ["--data", small / data, "--learning-rate", 1e-2, "--batch-size", 2]
        if kind == "flux":
            told += ["--side", 32]
        if example is flux_lora_24gb:
            told += ["--caption-tokens", 8]
        assert example.main([str(flag) for flag in (*told, *flags)]) == code
        assert not open_states(), "nothing is attached any more"
        return capsys.readouterr()

    return run


def weights(said):
    """Return what was trained, from the file that an example names last."""
    return load_file(said.out.splitlines()[-1])


def assert_same(one, other, moved=True):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    if moved:
        assert any(value.abs().max() > 0 for name, value in one.items() if "lora_B" in name)


def records(folder):
    return [record for run in read_metrics(folder / "metrics.jsonl") for record in run.records]


# ---- the bits of the resident training ----

# The norm of gradients on several devices is that of the norms of each, which rounds otherwise.
WHOLE = () if sides.DEVICE == "cpu" else ("--max-grad-norm", 0)
TRAININGS = {
    "lora": (llm_lora, 14, ()),
    "lora in parts, clipped": (llm_lora, 14, ("--at-once", 1, "--max-grad-norm", 0.1)),
    "lora plain": (llm_lora, 14, ("--no-amp", "--no-checkpointing", "--attention", "math")),
    "lora in chunks": (llm_lora, 14, ("--chunk-size", 16, "--optimizer", "adamw8bit")),
    "lora by Trainer": (llm_lora, 14, ("--loop", "trainer", "--at-once", 1)),
    "flux": (flux_lora_24gb, 45, ()),
    "full": (full_finetune, 14, WHOLE),
    "full AdamW": (full_finetune, 14, (*WHOLE, "--optimizer", "adamw", "--chunk-size", 16)),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_it_learns_the_same_managed_and_resident(run, tmp_path, name):
    example, least, flags = TRAININGS[name]
    managed = run(example, "managed", "--steps", 2, *flags)
    resident = run(example, "resident", "--steps", 2, *flags, "--resident")
    attached = managed.err.split("attached: ")[-1].split(f" on {sides.DEVICE}")[1]
    layers = int(attached.split(": ")[1].split()[0])
    assert layers >= least and "attached" not in resident.err
    assert_same(managed, resident, "full" not in name)
    here, there = records(tmp_path / "managed"), records(tmp_path / "resident")
    assert [line["loss"] for line in here] == [line["loss"] for line in there]
    assert len(here) == 2 and here[0]["loss"] > 0
    assert here[1]["h2d_bytes"] > 0 and there[1]["h2d_bytes"] is None
    if "Trainer" not in name:
        assert here[1]["optimizer_bytes"] > 0 and "attention: " in managed.err
        assert here[1]["at_once"] == (1 if "parts" in name else 2)
    # Neither has another kernel, nor has "cuda" without a card.
    without = sides.DEVICE == "simgpu" or not torch.backends.cuda.flash_sdp_enabled()
    assert ("math" in managed.err) is ("Trainer" not in name and (name == "lora plain" or without))


@pytest.mark.parametrize("name", ["lora", "flux", "full"])
def test_no_operator_of_a_step_touches_a_weight_on_the_host(run, monkeypatch, name):
    example, _, flags = TRAININGS[name]
    expected = run(example, "managed", "--steps", 2, *flags)
    step, reads = shared.Training.step, []

    def watched(training, *details):
        with Witness() as witness:
            step(training, *details)
        reads.append(witness.arena_reads)

    monkeypatch.setattr(shared.Training, "step", watched)
    assert_same(run(example, "witnessed", "--steps", 2, *flags), expected, name != "full")
    assert len(reads) == 2 and min(reads) > 40


def test_a_pipeline_samples_the_same_managed_and_resident(run, tmp_path):
    from PIL import Image

    flags = ("--steps", 2, "--prompt", "a fox", "--seed", 3)
    managed, resident = run(sample, "m", *flags), run(sample, "r", *flags, "--resident")
    assert managed.err.count("attached: ") == 4 and "attached: " not in resident.err
    pictures = [Path(said.out.splitlines()[-1]).read_bytes() for said in (managed, resident)]
    assert pictures[0] == pictures[1]
    with Image.open(tmp_path / "m" / "sample.png") as opened:
        assert opened.size == (32, 32) and len(opened.getcolors(32 * 32)) > 3


def test_adapters_are_read_by_peft_and_by_the_pipeline(run, small, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    said = run(llm_lora, "llm", "--steps", 1, "--targets", "q_proj", "v_proj", "--rank", 4)
    assert len(weights(said)) == 2 * 2 * 2
    model = AutoModelForCausalLM.from_pretrained(small / "llama")
    ids = torch.arange(8)[None]
    before = model(ids).logits
    assert not torch.equal(PeftModel.from_pretrained(model, tmp_path / "llm")(ids).logits, before)
    run(flux_lora_24gb, "flux", "--steps", 1)
    flags = ("--steps", 1, "--dtype", "float32")
    plain = run(sample, "plain", *flags)
    adapted = run(sample, "adapted", *flags, "--lora", tmp_path / "flux")
    pictures = [Path(said.out.splitlines()[-1]).read_bytes() for said in (plain, adapted)]
    assert pictures[0] != pictures[1]


def test_trained_weights_are_read_by_transformers(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = weights(run(full_finetune, "full", "--steps", 1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert torch.equal(model.lm_head.weight, trained["lm_head.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "full")
    assert tokenizer.decode(tokenizer.encode("is one more")) == "is one more"


# ---- interrupted, out of memory, resumed ----


@pytest.mark.parametrize("name", ["lora", "float16", "flux", "full", "lora by Trainer"])
def test_a_training_that_is_interrupted_goes_on_with_the_same_bits(
    run, tmp_path, monkeypatch, name
):
    if name == "float16":
        monkeypatch.setattr(mixed_precision, "best_dtype", lambda device: torch.float16)
    example, _, flags = TRAININGS["lora" if name == "float16" else name]
    flags = (*flags, "--steps", 3, "--save-every", 2)
    whole = run(example, "whole", *flags)
    log = shared.oracle_offload.observe.MetricsFile.append

    def interrupt(metrics, numbers):
        if numbers["step"] == 3:
            raise KeyboardInterrupt
        log(metrics, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(shared.oracle_offload.observe.MetricsFile, "append", interrupt)
        if "Trainer" in name:
            patch.setattr(llm_lora, "TrainerCallback", interrupting(patch))
        said = run(example, "parts", *flags, code=130)
    assert "interrupted\n--resume goes on from " in said.err
    again = run(example, "parts", *flags, code=2)
    assert "is of a training: --resume it, or name another --output\n" in again.err
    rest = run(example, "parts", *flags, "--resume")
    assert_same(rest, whole, "full" not in name)
    losses = {line["step"]: line["loss"] for line in records(tmp_path / "parts")}
    assert losses == {line["step"]: line["loss"] for line in records(tmp_path / "whole")}


def interrupting(patch):
    from oracle_offload.train.integrations import TrainerCallback

    class Interrupting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 3:
                raise KeyboardInterrupt

    return Interrupting


class RunsOut(TorchDispatchMode):
    """Memory runs out where more than so many texts are embedded at once."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.embedding.default and len(args[1]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 MiB.")
        return function(*args, **(kwargs or {}))


def test_a_batch_that_does_not_fit_is_halved_down_to_one(run, tmp_path):
    flags = ("--batch-size", 4, "--steps", 2, "--no-checkpointing")
    expected = run(llm_lora, "one", *flags, "--at-once", 1)
    with RunsOut(1):
        said = run(llm_lora, "halved", *flags)
    assert "note: memory ran out; 1 samples at once from now on" in said.err
    assert [line["at_once"] for line in records(tmp_path / "halved")] == [1, 1]
    assert_same(said, expected)


def test_where_not_one_sample_fits_it_is_explained_and_a_checkpoint_goes_on(run):
    flags = ("--no-checkpointing", "--at-once", 1, "--save-every", 1)
    whole = run(llm_lora, "whole", *flags, "--steps", 3)
    run(llm_lora, "parts", *flags, "--steps", 2)
    with RunsOut(0):
        said = run(llm_lora, "parts", *flags, "--steps", 3, "--resume", code=1)
    assert "Out of memory on CUDA" in said.err and "\n--resume goes on from " in said.err
    rest = run(llm_lora, "parts", *flags, "--steps", 3, "--resume")
    assert "resumed behind step 2\n" in rest.err
    assert_same(rest, whole)
    assert_same(run(llm_lora, "parts", *flags, "--steps", 1, "--resume"), whole)
    assert "behind step 3\n" in run(llm_lora, "parts", *flags, "--steps", 3, "--resume").err


def test_what_is_resumed_must_be_the_same_training(run, tmp_path):
    said = run(llm_lora, "run", "--steps", 1, "--resume", code=2)
    assert said.err == f"error: there is nothing to resume in {tmp_path / 'run'}\n"
    run(llm_lora, "run", "--steps", 1)
    before = (tmp_path / "run" / "state.pt").read_bytes()
    said = run(llm_lora, "run", "--steps", 2, "--resume", "--seed", 3, "--no-amp", code=2)
    assert "of another training: --seed was 0, is 3; --amp was True, is False\n" in said.err
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    (tmp_path / "run" / "state.pt").write_text("no state")
    said = run(llm_lora, "run", "--steps", 2, "--resume", code=1)
    assert "holds no checkpoint" in said.err


# ---- what it tells ----


def test_previews_a_profile_and_numbers(run, tmp_path):
    from PIL import Image

    flags = ("--steps", 2, "--preview-every", 2, "--preview-size", 2, "--prompt", "1 is")
    plain = run(llm_lora, "plain", "--steps", 2)
    said = run(llm_lora, "llm", *flags, "--record", tmp_path / "run.jsonl")
    assert_same(said, plain)  # nothing of it changes the training
    preview = tmp_path / "llm" / "previews" / "step-000002.txt"
    assert preview.read_text("utf-8").startswith("1 is") and f"preview: {preview}" in said.err
    recording = read_recording(tmp_path / "run.jsonl")
    assert len(recording.steps()) == 2 and any("sampling" in str(event) for event in recording)
    said = run(flux_lora_24gb, "flux", *flags)
    with Image.open(tmp_path / "flux" / "previews" / "step-000002.png") as opened:
        assert opened.size == (32, 32) and len(opened.getcolors(32 * 32)) > 3


def test_an_optimizer_that_cannot_be_had_is_announced(run, monkeypatch):
    flags = ("--steps", 1, "--optimizer")
    expected = run(llm_lora, "adamw", *flags, "adamw")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    said = run(llm_lora, "fallback", *flags, "adamw8bit")
    (note,) = [line for line in said.err.splitlines() if line.startswith("note: ")]
    assert "bitsandbytes" in note
    assert_same(said, expected)


def test_a_window_is_said_to_train_something_else(run):
    said = run(llm_lora, "run", "--steps", 1, "--chunk-size", 16, "--window-size", 8)
    assert "note: context truncated: " in said.err


@pytest.mark.parametrize(
    ("example", "flags", "told"),
    [
        (llm_lora, ("--model", "nowhere"), "--model nowhere: there is no config.json in it"),
        (sample, ("--model", "nowhere"), "--model nowhere is no folder of a pipeline"),
        (llm_lora, ("--data", "nowhere"), "--data nowhere: it is not like"),
        (llm_lora, ("--data", "{bad}"), "bad.jsonl: it is not like"),
        (llm_lora, ("--data", "{none}"), "none.jsonl holds no texts"),
        (llm_lora, ("--data", "{short}"), "short.jsonl: no text has two tokens"),
        (flux_lora_24gb, ("--data", "nowhere"), "--data nowhere holds no images (.png"),
        (flux_lora_24gb, ("--data", "{broken}"), "0.png cannot be read: "),
        (llm_lora, ("--vram-budget", "much"), "vram_budget="),
        (llm_lora, ("--offload-percent", "2"), "offload_percent="),
        (llm_lora, ("--preview-every", "1"), "--preview-every needs a --prompt"),
        (llm_lora, ("--loop", "trainer", "--chunk-size", "8"), "--chunk-size needs --loop plain"),
        (llm_lora, ("--loop", "trainer", "--at-once", "4"), "2 is no multiple of --at-once 4"),
        (llm_lora, ("--device", "nowhere"), "'nowhere' is not a device"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, example, flags, told):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("bad", "none", "short")}
    files["bad"].write_text('{"text": "a"}\n[1]\n')
    files["none"].write_text("\n")
    files["short"].write_text('{"text": "a"}\n')
    files["broken"] = tmp_path / "broken"
    files["broken"].mkdir()
    (files["broken"] / "0.png").write_text("no picture")
    said = run(example, "run", *(flag.format(**files) for flag in flags), code=2)
    assert told in said.err.splitlines()[-1] and said.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("flags", [("--steps", 0), ("--optimizer", "sgd"), ("--at-once", -1)])
def test_a_flag_that_makes_no_sense_is_usage(run, capsys, flags):
    with pytest.raises(SystemExit) as raised:
        run(llm_lora, "run", *flags)
    assert raised.value.code == 2 and f"argument {flags[0]}: " in capsys.readouterr().err


# ---- the page, and the matrix ----


def commands():
    """Return the commands at the heads of the examples, word by word."""
    for example in (*EXAMPLES.values(), small_models):
        for line in example.__doc__.replace("\\\n", " ").splitlines():
            if line.startswith("    python "):
                yield shlex.split(line)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_at_the_head_of_an_example_are_its_own(name, monkeypatch):
    found = [words[2:] for words in commands() if words[1] == f"examples/{name}"]
    monkeypatch.setattr(shared, "run", lambda example, args: 0)
    assert found and [EXAMPLES[name].main(words) for words in found] == [0] * len(found)


def test_every_example_is_on_the_page():
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    for file in (ROOT / "examples").iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"(../examples/{file.name})" in page, file.name


def matrix(small, *flags):
    data = ["--model", small / "llama", "--data", small / "texts.jsonl"]
    script = ROOT / "examples" / "llm_lora.py"
    flags = ("--device", sides.DEVICE, "--steps", 2, *flags)
    told = ["bench", "--matrix", script, *flags, "--", *data]
    return cli.main([str(word) for word in told])


def test_rows_of_the_matrix_are_of_real_trainings(small, in_this_process, capsys, monkeypatch):
    named = {cell.name: cell for cell in bench.CELLS}
    refused = bench.Cell("refused", ("--rank", "0"), True)
    other = bench.Cell("other", ("--learning-rate", "1"), True)
    cells = (named["resident"], named["managed"], refused, named["Adafactor"], other)
    monkeypatch.setattr(bench, "CELLS", cells)
    documents = []
    as_text = bench.to_text
    monkeypatch.setattr(bench, "to_text", lambda rows: (documents.append(rows), as_text(rows))[1])
    assert matrix(small) == cli.Exit.CHECK_FAILED, "other must not have other bits"
    said = capsys.readouterr()
    assert "2/5: managed\n" in said.err
    assert "\nrefused failed: " in said.out and "--rank: 0 is below 1\n" in said.out
    assert "other has other bits than resident, and must not\n" in said.out
    simulated = "The device is simulated: seconds are those of this processor.\n"
    assert said.out.endswith(simulated) is (sides.DEVICE == "cpu")
    resident, managed, failed, adafactor, _ = map(dataclasses.asdict, documents[0])
    assert resident["h2d_bytes_per_step"] is None and managed["h2d_bytes_per_step"] > 0
    assert resident["same_bits"] and managed["same_bits"] and not adafactor["same_bits"]
    assert managed["loss"] == resident["loss"] > 0
    assert adafactor["optimizer_bytes"] < managed["optimizer_bytes"] / 4
    assert managed["seconds_per_step"] > 0
    if sys.platform == "linux":
        assert managed["host_peak_bytes"] > 1 << 26
    assert failed["loss"] is None and failed["same_bits"] is None


def test_every_option_of_the_matrix_is_one_of_the_example(small, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shared, "run", lambda example, args: asked.append(args) or 0)
    for cell in bench.CELLS:
        data = ["--model", "m", "--data", "d"]
        assert llm_lora.main([*data, *cell.flags]) == 0
    assert len({str(args) for args in asked}) == len(bench.CELLS)


@pytest.mark.slow
def test_the_whole_matrix_in_processes_of_its_own(small, capsys):
    """`python -m pytest -m slow tests/clients/test_examples.py` runs it, in minutes."""
    assert matrix(small) == cli.Exit.OK
    assert capsys.readouterr().out.count(" same\n") == 5


def test_where_nothing_or_resident_alone_could_be_trained_it_is_an_error(
    tmp_path, monkeypatch, capsys
):
    def killed(command, **options):
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(bench.subprocess, "run", killed)
    assert matrix(tmp_path) == cli.Exit.ERROR
    assert "\nmanaged failed: it ended with -9\n" in capsys.readouterr().out
    assert matrix(tmp_path, "--json") == cli.Exit.ERROR
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "oracle_offload/bench-matrix/1"
    assert [row["failed"] for row in document["rows"]] == ["it ended with -9"] * len(bench.CELLS)
    assert cli.main(["bench", "--matrix", str(tmp_path / "no.py")]) == cli.Exit.USAGE
    assert capsys.readouterr().err.endswith("there is no such script\n")
    if Path("/dev/full").exists():
        full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", full)
        assert matrix(tmp_path) == cli.Exit.ERROR
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
        why = "cannot write standard output: No space left on device (ENOSPC, errno 28)\n"
        assert capsys.readouterr().err.endswith(why)


def test_the_table_and_what_it_says_of_rows():
    row = bench.Row(
        "managed", True, "", "no 8 bits", 0.5, 3 << 20, None, 2.0**21, 12.34, 81.6, 1024, 1.25, True
    )
    none = bench.Row("none", True, "no room")
    told = bench.to_text([row, replace(row, same_bits=False, note=""), none])
    head, first, second, third, *rest = told.splitlines()
    heads = "step device peak host peak link, a step GB/s W optimizer loss bits"
    assert head.split() == heads.split()
    assert first == second.replace("other", "same")
    figures = "managed 0.500 s 3.00 MiB - 2.00 MiB 12.3 82 1.00 KiB 1.2500 same"
    assert first.split() == figures.split()
    assert third.split() == ["none", *"---------"]
    assert rest == [
        "none failed: no room",
        "managed: no 8 bits",
        "managed has other bits than resident, and must not",
    ]
    assert not bench.Row("free", False, same_bits=False).is_wrong
