"""Settings of `train-lora`: flags, YAML, and what makes no sense; and the samples of its data."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from oracle_offload import cli
from oracle_offload.trainer.data import Sample, read_samples
from oracle_offload.trainer.settings import Settings, SettingsError, add_arguments, settings_of

LEAST = ["--model", "m", "--dataset-file", "d"]


def parsed(*flags, least=True):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args([*(LEAST if least else []), *flags]))


def test_every_setting_is_a_flag_and_help_tells_all(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train-lora", "--help"])
    told = capsys.readouterr().out
    for one in dataclasses.fields(Settings):
        assert f"--{one.name.replace('_', '-')}" in told
        if isinstance(one.default, bool):
            assert f"--no-{one.name.replace('_', '-')}" in told
    assert "steps between checkpoints; 0: only at the end" in " ".join(told.split())
    for flag in ("--model PATH", "--steps N", "--optimizer NAME", "--vram-budget SIZE"):
        assert f"  {flag} " in told
    for group in ("model and data", "how long", "training", "memory and speed", "what it tells"):
        assert told.count(f"\n{group}:\n") == 1
    assert "(default: 0.0001)" in told and "(default: yes)" in told and "(default: no)" in told


def test_other_data_are_another_training(tmp_path):
    from oracle_offload.trainer.resuming import STATE, note_settings, refuse_another

    settings = parsed("--steps", "1")
    note_settings(tmp_path, settings)
    (tmp_path / STATE).write_bytes(b"")
    refuse_another(tmp_path, settings)
    with pytest.raises(SettingsError, match="dataset_file was 'd', is 'other'"):
        refuse_another(tmp_path, dataclasses.replace(settings, dataset_file="other"))


def test_a_folder_of_a_training_is_not_begun_anew(tmp_path):
    from oracle_offload.trainer.resuming import SCHEMA, STATE, note_settings

    settings = parsed("--steps", "1")
    note_settings(tmp_path, settings)
    noted = json.loads((tmp_path / "settings.json").read_text("ascii"))
    assert noted == {"schema": SCHEMA, **settings.deciding()}
    note_settings(tmp_path, settings)  # nothing was saved yet
    (tmp_path / STATE).write_bytes(b"")
    with pytest.raises(SettingsError) as raised:
        note_settings(tmp_path, settings)
    assert str(raised.value) == (
        f"{tmp_path} has the checkpoint of a training: go on with it (--resume), name another "
        "--output, or delete state.pt there"
    )


@pytest.mark.parametrize(
    ("state", "noted", "told"),
    [
        (False, "{}", "there is nothing to resume: {0}/state.pt does not exist"),
        (True, None, "there is nothing to resume: {0}/settings.json does not exist"),
        (True, "{", "{0}/settings.json is damaged (Expecting property name enclosed in double"),
        (True, "[" * 100_000, "{0}/settings.json is damaged (maximum recursion depth exceeded"),
        (True, "[]", "{0}/settings.json is not of oracle_offload/train-lora-settings/1"),
        (True, '"schema"', "{0}/settings.json is not of oracle_offload/train-lora-settings/1"),
        (True, "{}", "{0}/settings.json is not of oracle_offload/train-lora-settings/1"),
        (True, '{"schema": 3}', "{0}/settings.json is of 3, not of oracle_offload/train-lora-set"),
    ],
)
def test_what_is_no_training_to_go_on_with_is_refused(tmp_path, state, noted, told):
    from oracle_offload.trainer.resuming import STATE, refuse_another

    if state:
        (tmp_path / STATE).write_bytes(b"")
    if noted is not None:
        (tmp_path / "settings.json").write_text(noted)
    with pytest.raises(SettingsError) as raised:
        refuse_another(tmp_path, parsed())
    assert str(raised.value).startswith(told.format(tmp_path))


def test_each_setting_that_is_another_is_named(tmp_path):
    from oracle_offload.trainer.resuming import STATE, note_settings, refuse_another

    note_settings(tmp_path, parsed())
    (tmp_path / STATE).write_bytes(b"")
    other = parsed("--seed", "3", "--no-amp", "--steps", "7", "--output", "elsewhere")
    with pytest.raises(SettingsError) as raised:
        refuse_another(tmp_path, other)
    assert str(raised.value) == (
        f"{tmp_path} is of another training: seed was 0, is 3; amp was True, is False"
    )


def test_the_least_of_each_number_is_taken():
    least = ["--steps", "1", "--rank", "1", "--batch-size", "1", "--max-length", "2"]
    least += ["--gradient-accumulation-steps", "1", "--save-every", "0", "--eval-every", "0"]
    least += ["--preview-every", "0", "--preview-length", "1", "--bucket-pool", "0"]
    least += ["--chunk-size", "1", "--window-size", "0", "--resolution", "0"]
    settings = parsed(*least)
    assert (settings.steps, settings.max_length, settings.window_size) == (1, 2, 0)
    assert parsed("--window-size", "-1").chunk_size == 0
    assert parsed("--preview-every", "1", "--preview-prompt", "x").preview_every == 1
    assert parsed("--optimizer", "adafactor").optimizer_name == "adafactor"
    for name in ("adamw", "adamw8bit"):
        assert parsed("--optimizer", name, "--use-8bit-optimizer").optimizer_name == "adamw8bit"


def test_the_defaults_and_what_follows_from_them():
    settings = parsed()
    assert settings == Settings(model="m", dataset_file="d")
    assert settings.duration_s == math.inf
    assert str(settings.log_path) == "lora-run/metrics.jsonl"
    assert str(parsed("--log-file", "a/b.jsonl").log_path) == "a/b.jsonl"
    assert settings.optimizer_name == "adamw"
    assert parsed("--use-8bit-optimizer").optimizer_name == "adamw8bit"
    assert parsed("--no-amp", "--no-gradient-checkpointing").amp is False
    assert [parsed("--duration", text).duration_s for text in ("90s", "30m", "2h", "7")] == [
        90, 1800, 7200, 7,
    ]  # fmt: skip


def test_a_flag_wins_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: other\ndataset-file: there\nsteps: 7\nlearning_rate: 1e-3\namp: false\n"
    )
    settings = parsed("--config", str(file), "--steps", "9", least=False)
    assert settings == Settings(
        model="other", dataset_file="there", steps=9, learning_rate=1e-3, amp=False
    )
    file.write_text("alpha: 4\nvram_budget: 0.5\nduration: 60\n")
    settings = parsed("--config", str(file))
    assert (settings.alpha, settings.vram_budget, settings.duration_s) == (4.0, "0.5", 60)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepps: 7", "'stepps' is no setting; --help lists them"),
        ("steps: many", "steps: 'many' is no int"),
        ("steps: 1.5", "steps: 1.5 is no int"),
        ("steps: true", "steps: True is no int"),
        ("vram-budget: null", "vram-budget: None is no str"),
        ("preview-prompt: [a]", r"preview-prompt: \['a'\] is no str"),
        ("learning-rate: false", "learning-rate: False is no float"),
        ("amp: 1", "amp: 1 is neither true nor false"),
        ("- steps", "holds no settings"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, told):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=told):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", ""], "--model is missing"),
        (["--dataset-file", ""], "--dataset-file is missing"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--rank", "0"], "rank=0 must be at least 1"),
        (["--batch-size", "-1"], "batch_size=-1 must be at least 1"),
        (["--gradient-accumulation-steps", "0"], "gradient_accumulation_steps=0 must"),
        (["--max-length", "1"], "max_length=1 must be at least 2"),
        (["--save-every", "-1"], "save_every=-1 must be at least 0"),
        (["--eval-every", "-1"], "eval_every=-1 must be at least 0"),
        (["--preview-every", "-1"], "preview_every=-1 must be at least 0"),
        (["--preview-length", "0"], "preview_length=0 must be at least 1"),
        (["--bucket-pool", "-1"], "bucket_pool=-1 must be at least 0"),
        (["--chunk-size", "-1"], "chunk_size=-1 must be at least 0"),
        (["--window-size", "-2"], "window_size=-2 must be at least -1"),
        (["--resolution", "-1"], "resolution=-1 must be at least 0"),
        (["--learning-rate", "0"], "learning_rate=0.0 must be above 0"),
        (["--alpha", "-1"], "alpha=-1.0 must be above 0"),
        (["--optimizer", "sgd"], "optimizer='sgd': there are adamw, "),
        (["--optimizer", "adafactor", "--use-8bit-optimizer"], "name two optimizers"),
        (["--window-size", "4"], "window_size=4 needs a chunk_size"),
        (["--window-size", "0"], "window_size=0 needs a chunk_size"),
        (["--duration", "0s"], "duration='0s' is no time"),
        (["--duration", "inf"], "duration='inf' is no time"),
        (["--preview-every", "4"], "preview_every needs a preview_prompt"),
        (["--duration", "soon"], "duration='soon' is no time"),
        (["--duration=-1s"], "duration='-1s' is no time"),
        (["--duration", "s"], "duration='s' is no time"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(flags, told):
    with pytest.raises(SettingsError, match=told):
        parsed(*flags)


def test_it_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["train-lora", *LEAST, "--steps", "0"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == "train-lora: steps=0 must be at least 1\n"
    assert cli.main(["train-lora", "--config", "/nowhere/at/all"]) == cli.EXIT_USAGE
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("SettingsError", cli.EXIT_USAGE, "train-lora: planted\n"),
        ("OffloadError", cli.EXIT_ERROR, "train-lora: planted\n"),
        ("OSError", cli.EXIT_ERROR, "train-lora: planted\n"),
        ("MemoryError", cli.EXIT_ERROR, "train-lora: planted; --resume goes on behind what was"),
        ("KeyError", None, ""),
        ("", cli.EXIT_OK, "step 1\n"),
    ],
)
def test_how_a_training_ends_is_told_and_in_the_exit_code(kind, code, told, capsys, monkeypatch):
    pytest.importorskip("torch")
    from oracle_offload import errors
    from oracle_offload.trainer import training

    def train(settings, say):
        assert settings.model == "m"
        if kind == "SettingsError":
            raise SettingsError("planted")
        if kind:
            raise getattr(errors, kind, getattr(builtins, kind, None))("planted")
        say("step 1")
        return {"steps": 1}

    monkeypatch.setattr(training, "train", train)
    if code is None:
        with pytest.raises(KeyError):
            cli.main(["train-lora", *LEAST])
        return
    assert cli.main(["train-lora", *LEAST]) == code
    said = capsys.readouterr()
    assert told in said.err and said.out == ("" if kind else '{\n  "steps": 1\n}\n')
    assert (len(said.err.splitlines()) > 1) == (kind == "MemoryError"), "what explains it"


def test_a_library_that_is_missing_is_named_with_what_to_install(capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "run.yaml"
    file.write_text("steps: 1")
    for name, flags in (("yaml", ["--config", str(file)]), ("transformers", [])):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            (tmp_path / "config.json").write_text("{}")
            wanted = ["--model", str(tmp_path), "--dataset-file", "d", "--output", str(tmp_path)]
            code = cli.main(["train-lora", *wanted, "--device", "cpu", *flags])
        assert code == cli.EXIT_ERROR
        said = capsys.readouterr().err
        assert said.startswith("train-lora: ") and name in said
        assert said.endswith("; pip install transformers diffusers peft pyyaml pillow\n")


def test_the_file_of_the_page_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "train-lora.md").read_text("utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    settings = parsed("--config", str(file), least=False)
    assert settings.gradient_accumulation_steps == 4 and settings.vram_budget == "auto"


def test_what_a_resumed_training_must_share():
    deciding = Settings().deciding()
    assert {"model", "seed", "rank", "batch_size", "optimizer", "amp", "chunk_size"} <= set(
        deciding
    )
    assert not {"steps", "output", "device", "vram_budget", "gradient_checkpointing"} & set(
        deciding
    )


def test_samples_of_lines_and_of_folders(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one", "image": "a.png"}\n\n{"text": "two", "image": "b/c.png"}\n')
    assert read_samples(str(file), False) == [Sample("one"), Sample("two")]
    assert read_samples(str(file), True) == [
        Sample("one", tmp_path / "a.png"),
        Sample("two", tmp_path / "b" / "c.png"),
    ]
    for name, text in (("b.txt", "B"), ("a.png", ""), ("b.JPG", ""), ("c.txt", "C")):
        (tmp_path / name).write_text(text)
    assert read_samples(str(tmp_path), False) == [Sample("B"), Sample("C")]
    assert read_samples(str(tmp_path), True) == [
        Sample("", tmp_path / "a.png"),
        Sample("B", tmp_path / "b.JPG"),
    ]


@pytest.mark.parametrize(
    ("text", "images", "told"),
    [
        ("{", False, "line 1: not JSON"),
        ('{"text": "a"}\n[1]', False, 'line 2: it is not like {"text"'),
        ('{"text": 1}', False, 'line 1: it is not like {"text"'),
        ('{"text": "a"}', True, 'line 1: it is not like {"image"'),
        ('{"image": "a.png"}', False, 'line 1: it is not like {"text"'),
        ("\n", False, r"holds no texts \(.txt\)"),
        ("\n", True, r"holds no images \(.png"),
    ],
)
def test_data_that_is_none_is_refused(tmp_path, text, images, told):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=told):
        read_samples(str(file), images)


def test_an_image_needs_no_caption(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"image": "a.png"}')
    found = read_samples(str(tmp_path / "data.jsonl"), True)
    assert found == [Sample("", tmp_path / "a.png")]


def test_a_line_ends_where_json_says_and_a_mark_of_the_encoding_is_no_text(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes('\ufeff{"text": "a\u2028b\x85c"}\r\n{"text": "d"}\r\n'.encode())
    assert read_samples(str(file), False) == [Sample("a\u2028b\x85c"), Sample("d")]
    file.write_bytes('{"text": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(SettingsError, match=r"data\.jsonl is not UTF-8: .*; save it as UTF-8"):
        read_samples(str(file), False)


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="is neither a folder nor a file"):
        read_samples(str(tmp_path / "nothing"), False)
