"""`oracle-offload train-lora`, end to end on tiny random models of both libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace as replace_fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import oracle_offload
from oracle_offload import cli
from oracle_offload.engines import open_states
from oracle_offload.host import replace
from oracle_offload.recipes import mixed_precision
from oracle_offload.trainer import language as language_module
from oracle_offload.trainer import resuming, training
from oracle_offload.trainer.data import Sample
from oracle_offload.trainer.images import Images
from oracle_offload.trainer.settings import Settings

ROOT = Path(__file__).parents[2]
TEXTS = [f"the number {n} " * (n % 4 + 1) for n in range(8)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a language model without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of images, one of them with a caption."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for number in range(3):
        Image.new("RGB", (40, 32), (80 * number, 30, 200)).save(folder / f"{number}.png")
    (folder / "1.txt").write_text("green")
    return folder


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    """The folder of a pipeline with a VAE, a text encoder and a UNet with attention."""
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder = tmp_path_factory.mktemp("pipeline")
    words = folder / "words"
    words.mkdir()
    letters = [chr(code) for code in range(97, 123)]
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *[f"{a}</w>" for a in letters]]
    (words / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(words / "vocab.json"), str(words / "merges.txt"))
    torch.manual_seed(0)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(64, 128),
        layers_per_block=1,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    )
    scheduler = DDIMScheduler(num_train_timesteps=20, clip_sample=False)
    pipeline = StableDiffusionPipeline(
        vae, encoder, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
    )
    pipeline.save_pretrained(folder / "model")
    return folder / "model"


def run(capsys, folder, *flags, code=0):
    """Run the command in this process; return its result and what it said."""
    told = [str(flag) for flag in flags]
    assert cli.main(["train-lora", "--device", "cpu", "--output", str(folder), *told]) == code
    said = capsys.readouterr()
    return (json.loads(said.out) if code == 0 else None), said.err


def adapters(result):
    return load_file(result["adapter"])


def assert_same_adapters(one, other):
    one, other = adapters(one), adapters(other)
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert any(value.abs().max() > 0 for name, value in one.items() if "lora_B" in name)


def losses(folder):
    runs = oracle_offload.read_metrics(folder / "metrics.jsonl")
    return [pair for run in runs for pair in run.series("loss")]


# ---- language ----

LANGUAGE = (
    "--batch-size", 2, "--gradient-accumulation-steps", 2, "--learning-rate", 1e-2, "--rank", 4,
)  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--no-amp", "--no-gradient-checkpointing", "--optimizer", "adafactor"),
        ("--chunk-size", 16, "--use-8bit-optimizer", "--vram-budget", "auto"),
    ],
    ids=["default", "plain", "chunks"],
)
def test_a_language_model_learns_the_same_managed_and_resident(
    capsys, tmp_path, llama, texts, more
):
    flags = ["--model", llama, "--dataset-file", texts, "--steps", 3, *LANGUAGE, *more]
    managed, _ = run(capsys, tmp_path / "managed", *flags)
    resident, _ = run(capsys, tmp_path / "resident", *flags, "--resident")
    assert_same_adapters(managed, resident)
    assert losses(tmp_path / "managed") == losses(tmp_path / "resident")
    assert len(losses(tmp_path / "managed")) == 3
    assert managed["managed_layers"] >= 14 and managed["h2d_bytes"] > managed["managed_bytes"] > 0
    assert "managed_layers" not in resident
    assert managed["steps"] == managed["steps_now"] == 3 and managed["idle"] == []
    assert managed["gradient_checkpointing"] is ("--no-gradient-checkpointing" not in more)
    assert managed["amp"] == (None if "--no-amp" in more else "bfloat16")
    assert managed["optimizer"] in ("adamw", "adafactor", "adamw8bit")
    assert managed["h2d_gbps"] > 0 and managed["watts"] is None, "a simulated card has no sensors"
    assert managed["optimizer_bytes"] > 0 and "scaled_dot_product" in managed["attention"]
    assert json.loads((tmp_path / "managed" / "result.json").read_text()) == managed


@pytest.mark.parametrize("half", [False, True], ids=["bfloat16", "float16"])
def test_a_resumed_run_is_the_uninterrupted_one(capsys, tmp_path, llama, texts, monkeypatch, half):
    if half:
        monkeypatch.setattr(mixed_precision, "best_dtype", lambda device: torch.float16)
    flags = ["--model", llama, "--dataset-file", texts, *LANGUAGE, "--save-every", 1]
    whole, _ = run(capsys, tmp_path / "whole", *flags, "--steps", 4)
    assert whole["amp"] == ("float16" if half else "bfloat16")
    part, _ = run(capsys, tmp_path / "parts", *flags, "--steps", 2)
    assert part["steps"] == 2
    halfway = adapters(part)
    rest, said = run(capsys, tmp_path / "parts", *flags, "--steps", 4, "--resume")
    assert "resumed after step 2" in said and rest["steps_now"] == 2
    assert rest["managed_layers"] > 0 and rest["h2d_bytes"] > 0
    assert_same_adapters(rest, whole)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert any(not torch.equal(value, halfway[name]) for name, value in adapters(rest).items())


def test_a_save_that_fails_leaves_the_state_before(capsys, tmp_path, llama, texts, monkeypatch):
    flags = ["--model", llama, "--dataset-file", texts, *LANGUAGE, "--steps", 1]
    run(capsys, tmp_path, *flags)
    before = (tmp_path / "state.pt").read_bytes()

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(replace.os, "fsync", full)
    _, said = run(capsys, tmp_path, *flags[:-1], 2, "--resume", code=1)
    assert "No space left on device" in said
    assert (tmp_path / "state.pt").read_bytes() == before


def test_a_gradient_is_clipped_to_the_norm_that_is_asked_for(capsys, tmp_path, llama, texts):
    """Far below its epsilon AdamW takes steps that are small beside the learning rate."""
    flags = ["--model", llama, "--dataset-file", texts, "--steps", 1, "--learning-rate", 1e-2]

    def moved(name, norm):
        told, _ = run(capsys, tmp_path / name, *flags, "--no-amp", "--max-grad-norm", norm)
        return max(value.abs().max() for key, value in adapters(told).items() if "lora_B" in key)

    assert 0 < moved("clipped", 1e-9) < 2e-3 < 9e-3 < moved("whole", 0)


@pytest.mark.parametrize("code", [0, 1], ids=["trained", "failed"])
def test_a_training_leaves_its_model_detached(capsys, tmp_path, llama, texts, monkeypatch, code):
    tasks, load, train = [], training.load_task, training._Loop.run

    def keep(settings):
        tasks.append(load(settings))
        return tasks[0]

    def end(loop):
        result = train(loop)
        assert open_states()
        if code:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 MiB.")
        return result

    monkeypatch.setattr(training, "load_task", keep)
    monkeypatch.setattr(training._Loop, "run", end)
    run(capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--steps", 1, code=code)
    assert tasks and not open_states()


class RunsOut(TorchDispatchMode):
    """Memory runs out at one operator."""

    def __init__(self, number):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 MiB.")
        return function(*args, **(kwargs or {}))


def test_memory_that_runs_out_at_any_operator_leaves_a_training_that_goes_on(
    capsys, tmp_path, llama, texts, monkeypatch
):
    flags = ["--model", llama, "--dataset-file", texts, *LANGUAGE, "--save-every", 1]
    whole, _ = run(capsys, tmp_path / "whole", *flags, "--steps", 2)
    run(capsys, tmp_path / "once", *flags, "--steps", 1)
    one_step = training._Loop._one_step

    def go_on(number):
        """Resume, and let memory run out in the step; return how many operators it has."""
        folder, mode = tmp_path / str(number), RunsOut(number)
        shutil.copytree(tmp_path / "once", folder)

        def step(loop):
            with mode:
                return one_step(loop)

        monkeypatch.setattr(training._Loop, "_one_step", step)
        command = [*flags, "--steps", 2, "--resume"]
        _, said = run(capsys, folder, *command, code=1 if number else 0)
        monkeypatch.setattr(training._Loop, "_one_step", one_step)
        if number:
            assert "Out of memory on CUDA" in said and "--resume goes on" in said
            assert not open_states(), "nothing is attached any more"
            rest, said = run(capsys, folder, *command)
            assert "resumed after step 1" in said
            assert_same_adapters(rest, whole)
        return mode.count

    operators = go_on(0)
    assert operators > 300
    for number in range(1, operators, operators // 8):
        assert go_on(number) == number


def test_watts_are_joules_by_seconds(capsys, tmp_path, llama, texts, monkeypatch):
    joules = iter((100.0, 160.0))
    sensors = SimpleNamespace(energy_j=lambda: next(joules))
    monkeypatch.setattr(training, "Sensors", lambda uuid: sensors)
    begin = time.monotonic()
    result, _ = run(capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--steps", 1)
    assert 60 / (time.monotonic() - begin) < result["watts"] < 60 / 1e-3


def test_what_cannot_be_resumed_is_refused(capsys, tmp_path, llama, texts):
    flags = ["--model", llama, "--dataset-file", texts, "--steps", 1, "--resume"]
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert "there is nothing to resume: " in said
    run(capsys, tmp_path, *flags[:-1])
    _, said = run(capsys, tmp_path, *flags, "--rank", 2, "--seed", 3, code=2)
    assert "of another training: seed was 0, is 3; rank was 8, is 2" in said
    (tmp_path / "settings.json").write_text('{"schema": "another"}')
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert "is of another, not of oracle_offload/train-lora-settings/1" in said
    for text in ('{"schema": ', "\xff", "[" * 100_000):
        (tmp_path / "settings.json").write_text(text)
        _, said = run(capsys, tmp_path, *flags, code=2)
        assert "settings.json is damaged (" in said and said.count("\n") == 1
    (tmp_path / "settings.json").write_text("[]")
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert "settings.json is not of oracle_offload/train-lora-settings/1" in said
    (tmp_path / "state.pt").unlink()
    resuming.note_settings(tmp_path, Settings(model=str(llama), dataset_file=str(texts)))
    (tmp_path / "state.pt").write_text("no state")
    _, said = run(capsys, tmp_path, *flags, code=1)
    assert "holds no checkpoint" in said


def test_a_new_training_leaves_the_checkpoint_of_another_alone(capsys, tmp_path, llama, texts):
    """Killed before its first save, it would be resumed from there."""
    flags = ["--model", llama, "--dataset-file", texts, "--steps", 1]
    run(capsys, tmp_path, *flags)
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    _, said = run(capsys, tmp_path, *flags, "--seed", 1, code=2)
    assert "has the checkpoint of a training: go on with it (--resume)" in said
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_evaluation_previews_and_the_adapters_for_peft(capsys, tmp_path, llama, texts):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result, said = run(
        capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--eval-file", texts,
        "--steps", 2, "--eval-every", 1, "--preview-every", 2, "--preview-prompt", "the",
        "--preview-length", 4, "--no-amp", "--batch-size", 8, "--target-modules", "q_proj,v_proj",
    )  # fmt: skip
    assert said.count("eval loss") == 2
    (preview,) = (tmp_path / "previews").iterdir()
    assert preview.name == "step-000002.txt" and preview.read_text("utf-8").startswith("the")
    assert len(adapters(result)) == 2 * 2 * 2
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), tmp_path)
    total = terms = 0.0
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())])
        total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        terms += ids.shape[1] - 1
    assert total / terms == pytest.approx(result["eval_loss"], rel=1e-5)
    runs = oracle_offload.read_metrics(tmp_path / "metrics.jsonl")
    assert runs[0].series("eval_loss")[-1] == (2, result["eval_loss"])
    assert {"late", "h2d_bytes"} & set(runs[0].records[0]) and runs[0].records[0]["length"] > 0


def test_it_says_what_changes_the_training(capsys, tmp_path, llama, texts, monkeypatch):
    flags = ["--model", llama, "--dataset-file", texts, "--steps", 1]
    result, said = run(capsys, tmp_path, *flags, "--chunk-size", 8, "--window-size", 4)
    assert "note: context truncated: " in said and "each byte is a token" in said
    assert "no gradient checkpointing" not in said
    assert any("truncated" in note for note in result["notes"])


def test_a_training_ends_when_its_time_is_over(capsys, tmp_path, llama, texts, monkeypatch):
    now, step = [1000.0], training._Loop._one_step

    def take(loop):
        now[0] += 20
        return step(loop)

    monkeypatch.setattr(training._Loop, "_one_step", take)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    result, said = run(
        capsys, tmp_path, "--model", llama, "--dataset-file", texts,
        "--steps", 1000, "--duration", "60s",
    )  # fmt: skip
    assert "the time is over: 60s" in said
    assert (result["steps"], result["seconds_per_step"]) == (3, 20)


def test_models_and_data_that_do_not_fit_are_refused(
    capsys, tmp_path, llama, texts, stable_diffusion, pictures, monkeypatch
):
    wrong = ["--dataset-file", texts, "--steps", 1]
    _, said = run(capsys, tmp_path, "--model", tmp_path, *wrong, code=2)
    assert "is neither the folder of a transformers model" in said
    _, said = run(capsys, tmp_path, "--model", "no/such-model", *wrong, code=2)
    assert "nor in the local hub cache" in said
    _, said = run(capsys, tmp_path, "--model", "no such model", *wrong, code=2)
    assert "nor in the local hub cache" in said
    model = ["--model", llama, *wrong]
    for flags, told in (
        (["--vram-budget", "much"], "vram_budget='much' is not a size"),
        (["--offload-percent", "2"], "offload_percent=2.0 is outside [0, 1]"),
        (["--device", "nowhere"], "device='nowhere' is not a device"),
    ):
        _, said = run(capsys, tmp_path, *model, *flags, code=2)
        assert said.endswith("\n") and f"train-lora: {told}" in said
    _, said = run(capsys, tmp_path, "--model", llama, *wrong, "--target-modules", "x_proj", code=2)
    assert "no linear layer has such a name" in said
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": "a"}\n')
    _, said = run(capsys, tmp_path, "--model", llama, "--dataset-file", empty, code=2)
    assert "no text has two tokens" in said
    diffusion = ["--model", stable_diffusion, "--dataset-file", pictures]
    _, said = run(capsys, tmp_path, *diffusion, "--chunk-size", 4, code=2)
    assert "chunk_size=4 is for texts, not for images" in said
    _, said = run(capsys, tmp_path, *diffusion, "--resolution", 31, code=2)
    assert "resolution=31 is no multiple of 2" in said
    other = tmp_path / "other"
    shutil.copytree(stable_diffusion, other)
    scheduler = other / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"epsilon"', '"sample"'))
    _, said = run(capsys, tmp_path, "--model", other, "--dataset-file", pictures, code=2)
    assert "predicts 'sample': this trainer knows epsilon and v_prediction" in said
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_text("no image")
    _, said = run(capsys, tmp_path, *diffusion[:2], "--dataset-file", broken, code=2)
    assert "a.png cannot be read" in said


@pytest.mark.parametrize("parts", [["vae"], ["unet", "text_encoder", "text_encoder_2"]], ids=str)
def test_a_pipeline_without_a_unet_or_of_two_text_encoders_is_refused(
    capsys, tmp_path, stable_diffusion, pictures, monkeypatch, parts
):
    from diffusers import DiffusionPipeline

    class OtherPipeline:
        components = dict.fromkeys(parts, torch.nn.Identity())

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: OtherPipeline())
    flags = ["--model", stable_diffusion, "--dataset-file", pictures, "--steps", 1]
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert (
        "is a OtherPipeline: this trainer knows pipelines of a UNet with at most one text" in said
    )


def test_no_model_is_in_the_cache_of_a_library_that_is_not_there(
    capsys, tmp_path, texts, monkeypatch
):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    flags = ["--model", "some/model", "--dataset-file", texts, "--steps", 1]
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert "nor in the local hub cache" in said


def test_a_model_of_few_tokens_needs_its_tokenizer(capsys, tmp_path, texts):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--dataset-file", texts]
    _, said = run(capsys, tmp_path, *flags, code=2)
    assert "100 tokens are too few for bytes" in said
    assert language_module.Bytes().decode([104, 105, 999, 255]) == "hi\ufffd"


def language(llama, texts, **settings):
    return language_module.Language(Settings(str(llama), str(texts), **settings))


def test_a_batch_of_texts_is_padded_and_counts_what_is_predicted(llama, texts):
    """However it is cut: chunks that see all before them have the loss of the whole."""
    model = language(llama, texts).model
    expected = terms = 0.0
    for text in (TEXTS[0], TEXTS[3]):
        ids = torch.tensor([list(text.encode())])
        expected += model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
        terms += ids.shape[1] - 1
    for chunk in (0, 16, 1000):
        task = language(llama, texts, chunk_size=chunk, eval_file=str(texts))
        assert task.lengths == task.eval_lengths == [len(text) for text in TEXTS]
        for evaluating in (False, True):
            pieces = task.pieces([0, 3], torch.device("cpu"), evaluating)
            assert sum(piece.terms for piece in pieces) == terms
            assert len(pieces) == (-(-(len(TEXTS[3]) - 1) // 16) if chunk == 16 else 1)
            found = sum(piece.loss_sum() for piece in pieces)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


def test_a_text_is_cut_and_a_window_is_told(llama, texts):
    task = language(llama, texts, max_length=20, chunk_size=8, window_size=8)
    assert task.lengths == [len(text[:20]) for text in TEXTS]
    without, told = task.notes
    assert without == "the model has no tokenizer that loads: each byte is a token"
    assert told.startswith("context truncated: 1 of 3 chunks do not see all")
    nothing = language(llama, texts, max_length=20, chunk_size=8, window_size=0)
    assert nothing.notes[1].startswith("context truncated: 2 of 3")
    assert language(llama, texts, chunk_size=8).notes[1].startswith("context carried")


def test_a_preview_of_a_language_model_is_its_likeliest_text(llama, texts, tmp_path):
    """Of the end of the prompt, as far as the model is to see it."""
    prompt = "the number"
    task = language(
        llama,
        texts,
        preview_prompt=prompt,
        preview_length=6,
        max_length=13,
    )
    task.model.eval()
    with torch.no_grad():
        path = task.preview(tmp_path, 12, torch.device("cpu"))
        ids = list(prompt.encode())
        for number in range(6):
            seen = torch.tensor([ids[max(0, len(ids) - 13) :]])
            ids.append(int(task.model(input_ids=seen).logits[0, -1].argmax()))
            assert seen.shape[1] == min(13, len(prompt) + number)
    assert path.name == "step-000012.txt"
    assert path.read_text("utf-8") == bytes(ids).decode("utf-8", "replace") + "\n"


def test_an_evaluation_has_every_sample_once_whatever_the_batch(llama, texts):
    found = []
    for size in (1, 3, 8):
        task = language(llama, texts, eval_file=str(texts), batch_size=size)
        loop = SimpleNamespace(
            _settings=task._settings,
            _task=task,
            _device=torch.device("cpu"),
            _amp=mixed_precision.MixedPrecision("cpu", False),
        )
        found.append(training._Loop._evaluate(loop))
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
    assert task.model.training


def test_the_batches_of_steps_go_through_the_epochs():
    buckets = training.LengthBuckets([3, 1, 2, 5, 4], 2, 0, 50)
    loop = SimpleNamespace(
        _settings=Settings(gradient_accumulation_steps=2), _buckets=buckets, _step=0
    )
    found = []
    for loop._step in range(3):
        found += training._Loop._indices(loop)
    assert found == [*buckets.batches(0), *buckets.batches(1)]


def test_it_saves_after_so_many_steps_and_at_the_end(capsys, tmp_path, llama, texts, monkeypatch):
    saved, honest = [], training.Checkpoint.save

    def save(checkpoint, step, *reason):
        saved.append(step)
        honest(checkpoint, step, *reason)

    monkeypatch.setattr(training.Checkpoint, "save", save)
    flags = ["--model", llama, "--dataset-file", texts, "--no-amp", "--max-grad-norm", 0]
    result, _ = run(capsys, tmp_path / "often", *flags, "--steps", 3, "--save-every", 2)
    assert saved == [2, 3]
    assert any(value.any() for name, value in adapters(result).items() if "lora_B" in name), (
        "a norm of 0 clips nothing"
    )
    assert 50 << 20 < result["host_peak_bytes"] < 1 << 40 and result["device_peak_bytes"] is None
    assert 1 < result["h2d_gbps"] <= 25, "the link of the simulated device"
    saved.clear()
    began = time.monotonic()
    result, _ = run(capsys, tmp_path / "once", *flags, "--steps", 2, "--save-every", 0)
    assert saved == [2] and 0 < result["seconds_per_step"] <= time.monotonic() - began


# ---- images ----


def test_a_picture_is_black_at_minus_one_and_white_at_one(tmp_path):
    from PIL import Image

    Image.new("RGB", (40, 32), (255, 0, 51)).save(tmp_path / "x.png")
    task = SimpleNamespace(_side=8, _vae=None)
    pixels = Images._encode_image(task, Sample("", tmp_path / "x.png"))
    expected = torch.tensor([1, -1, -0.6]).view(3, 1, 1).expand(3, 8, 8)
    torch.testing.assert_close(pixels, expected)


def test_a_diffusion_model_learns_the_same_managed_and_resident(
    capsys, tmp_path, stable_diffusion, pictures
):
    from diffusers import StableDiffusionPipeline

    flags = [
        "--model", stable_diffusion, "--dataset-file", pictures, "--steps", 3, "--batch-size", 2,
        "--eval-file", pictures, "--learning-rate", 1e-2, "--preview-every", 3,
        "--preview-prompt", "green", "--preview-length", 2,
    ]  # fmt: skip
    managed, _ = run(capsys, tmp_path / "managed", *flags)
    resident, _ = run(capsys, tmp_path / "resident", *flags, "--resident")
    assert_same_adapters(managed, resident)
    assert losses(tmp_path / "managed") == losses(tmp_path / "resident")
    assert managed["eval_loss"] == resident["eval_loss"]
    assert managed["managed_layers"] > 20 and managed["h2d_bytes"] > managed["managed_bytes"]
    previews = [
        tmp_path / kind / "previews" / "step-000003.png" for kind in ("managed", "resident")
    ]
    assert previews[0].read_bytes() == previews[1].read_bytes()
    pipeline = StableDiffusionPipeline.from_pretrained(stable_diffusion)
    before = {name for name, _ in pipeline.unet.named_parameters()}
    pipeline.load_lora_weights(tmp_path / "managed")
    loaded = {n: p for n, p in pipeline.unet.named_parameters() if n not in before and "lora" in n}
    expected = adapters(managed)
    assert len(loaded) == len(expected)
    for name, parameter in loaded.items():
        key = "unet." + name.replace(".default_0.", ".")
        assert torch.equal(parameter, expected[key]), name


def plain_ddpm(folder):
    """The folder of a pipeline of a UNet alone."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(64, 64),
        layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=10, prediction_type="v_prediction")
    DDPMPipeline(unet, scheduler).save_pretrained(folder)
    return folder


def test_plain_ddpm_learns_without_captions(capsys, tmp_path, pictures):
    model = plain_ddpm(tmp_path / "model")
    result, _ = run(
        capsys, tmp_path / "run", "--model", model, "--dataset-file", pictures,
        "--steps", 2, "--preview-every", 2, "--preview-prompt", "-", "--preview-length", 2,
    )  # fmt: skip
    assert result["managed_layers"] > 5 and result["h2d_bytes"] > 0
    assert (tmp_path / "run" / "previews" / "step-000002.png").exists()


def test_a_step_draws_its_noise_whatever_is_evaluated_before_it(capsys, tmp_path, pictures):
    model = plain_ddpm(tmp_path / "model")
    flags = ["--model", model, "--dataset-file", pictures, "--steps", 2]
    plain, _ = run(capsys, tmp_path / "plain", *flags)
    evaluated, said = run(
        capsys, tmp_path / "evaluated", *flags, "--eval-file", pictures, "--eval-every", 1
    )
    assert said.count("eval loss") == 2
    assert losses(tmp_path / "evaluated") == losses(tmp_path / "plain")
    assert_same_adapters(evaluated, plain)


# ---- the command itself ----


def test_the_command_by_a_file_and_its_metrics(tmp_path, llama, texts):
    config = tmp_path / "run.yaml"
    lines = (f"model: {llama}", f"dataset-file: {texts}", "steps: 2", "device: cpu")
    config.write_text("\n".join([*lines, f"output: {tmp_path / 'run'}"]))
    command = [sys.executable, "-m", "oracle_offload"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train-lora", "--config", str(config)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["managed_layers"] > 0 and result["h2d_bytes"] > 0
    assert "step 2/2  loss " in done.stderr and "attached: MemoryManager(" in done.stderr
    assert cli.main(["report", str(tmp_path / "run" / "metrics.jsonl")]) == 0


def test_notes_of_the_model_the_optimizer_and_the_precision_are_told(
    capsys, tmp_path, llama, texts, monkeypatch
):
    """Each once, though the steps go on."""
    honest = training.make_optimizer

    def make_optimizer(*arguments):
        return replace_fields(honest(*arguments), why="another optimizer instead")

    class Unstable(mixed_precision.MixedPrecision):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.hint = "not stable"

    monkeypatch.setattr(training, "make_optimizer", make_optimizer)
    monkeypatch.setattr(training, "MixedPrecision", Unstable)
    monkeypatch.setattr(training, "set_checkpointing", lambda model: False)
    _, said = run(capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--steps", 3)
    for note in (
        "the model has no gradient checkpointing",
        "another optimizer instead",
        "not stable",
    ):
        assert said.count(f"note: {note}\n") == 1, said


def test_evaluations_previews_and_saves_come_when_they_are_due(capsys, tmp_path, llama, texts):
    result, said = run(
        capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--eval-file", texts,
        "--steps", 5, "--eval-every", 2, "--preview-every", 3, "--preview-prompt", "the",
        "--preview-length", 1, "--batch-size", 8,
    )  # fmt: skip
    (log,) = oracle_offload.read_metrics(tmp_path / "metrics.jsonl")
    assert [step for step, _ in log.series("loss")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in log.series("eval_loss")] == [2, 4, 5]  # and at the end
    assert [path.name for path in (tmp_path / "previews").iterdir()] == ["step-000003.txt"]
    assert said.count("preview: ") == 1 and said.count("eval loss") == 3
    assert (result["steps"], result["steps_now"]) == (5, 5)
    (loss, *_, last) = (value for _, value in log.series("loss"))
    assert (result["loss_first"], result["loss_last"]) == (loss, last)
    more, said = run(
        capsys, tmp_path, "--model", llama, "--dataset-file", texts, "--eval-file", texts,
        "--steps", 7, "--resume", "--batch-size", 8,
    )  # fmt: skip
    assert "resumed after step 5" in said and (more["steps"], more["steps_now"]) == (7, 2)
    assert said.count("eval loss") == 1


def images(model, pictures, **settings):
    return Images(Settings(str(model), str(pictures), **settings))


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_images_and_their_loss_are_those_of_the_pipelines_parts(
    tmp_path, stable_diffusion, pictures, kind
):
    """A VAE and captions with the one, neither with the other."""
    from diffusers import DiffusionPipeline
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image

    model = stable_diffusion if kind == "epsilon" else plain_ddpm(tmp_path)
    task = images(model, pictures, eval_file=str(pictures))
    others = [part for part in (task._vae, task._encoder) if part is not None]
    assert task.model.training and not any(part.training for part in others)
    parts = DiffusionPipeline.from_pretrained(model).components
    vae, scheduler = parts.get("vae"), parts["scheduler"]
    side = 8 if vae is None else 2 * 16
    read = VaeImageProcessor(vae_scale_factor=2)
    torch.manual_seed(0)
    expected = []
    for number in range(3):
        with Image.open(pictures / f"{number}.png") as picture:
            pixels = read.preprocess(picture, side, side)
        if vae is not None:
            pixels = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        expected.append(pixels[0].detach())
    for found, image in zip(task._data, expected, strict=True):
        torch.testing.assert_close(found[0], image, rtol=0.0, atol=1e-3)
    torch.manual_seed(3)
    (piece,) = task.pieces([2, 1], torch.device("cpu"), True)
    torch.manual_seed(3)
    clean = torch.stack([task._data[2][0], task._data[1][0]])
    noise, times = torch.randn(clean.shape), torch.randint(0, len(scheduler.timesteps), (2,))
    more, target = {}, noise
    if vae is None:
        target = scheduler.get_velocity(clean, noise, times)
    else:
        parts["tokenizer"].model_max_length = 16
        ids = parts["tokenizer"](["", "green"], padding="max_length", return_tensors="pt")
        more = {"encoder_hidden_states": parts["text_encoder"](ids.input_ids)[0]}
    noisy = scheduler.add_noise(clean, noise, times)
    predicted = parts["unet"](noisy, times, **more).sample
    assert piece.terms == clean.numel()
    torch.testing.assert_close(piece.loss_sum(), (predicted - target).square().sum())


def test_a_preview_is_what_the_pipeline_makes_of_the_prompt(tmp_path, stable_diffusion, pictures):
    """By a scheduler that scales the noise and what the model sees, with guidance."""
    import numpy
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline
    from PIL import Image

    scheduler = EulerDiscreteScheduler(num_train_timesteps=20)
    pipeline = StableDiffusionPipeline.from_pretrained(stable_diffusion, scheduler=scheduler)
    pipeline.tokenizer.model_max_length = 16
    pipeline.save_pretrained(tmp_path / "model")
    task = images(
        tmp_path / "model", pictures, preview_prompt="green", preview_length=3, resolution=32
    )
    task.model.eval()
    with torch.no_grad():
        path = task.preview(tmp_path, 7, torch.device("cpu"))
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    pipeline.set_progress_bar_config(disable=True)
    (expected,) = pipeline(
        "green", 32, 32, num_inference_steps=3, guidance_scale=5.0, latents=noise
    ).images
    assert path.name == "step-000007.png"
    with Image.open(path) as opened:
        found = numpy.array(opened).astype(int)
    difference = numpy.abs(found - numpy.array(expected).astype(int))
    assert found.std() > 1 and difference.max() <= 1


def test_a_preview_without_a_prompt_is_what_the_pipeline_makes(tmp_path, pictures):
    import numpy
    from diffusers import DDPMPipeline
    from PIL import Image

    model = plain_ddpm(tmp_path)
    task = images(model, pictures, preview_length=4)
    task.model.eval()
    torch.manual_seed(0)
    torch.randn(1, 3, 8, 8)  # which a generator of the preview's own draws
    with torch.no_grad():
        path = task.preview(tmp_path, 1, torch.device("cpu"))
    pipeline = DDPMPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    (expected,) = pipeline(num_inference_steps=4).images
    with Image.open(path) as opened:
        found = numpy.array(opened).astype(int)
    difference = numpy.abs(found - numpy.array(expected).astype(int))
    assert found.std() > 1 and difference.max() <= 1
