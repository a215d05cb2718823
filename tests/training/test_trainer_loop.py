"""The loop of `train-lora` over a task of a few layers: what it runs, when, and what it tells."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload.engines import open_states, phase_now
from oracle_offload.recipes import mixed_precision
from oracle_offload.recipes.lengths import LengthBuckets
from oracle_offload.trainer import training
from oracle_offload.trainer.settings import Settings, SettingsError
from oracle_offload.trainer.tasks import Piece

WIDTH = 64


class Model(nn.Module):
    """Frozen layers, and a trained one behind them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.brought = []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        heads = x.view(1, 1, 1, WIDTH)
        return self.adapter(nn.functional.scaled_dot_product_attention(heads, heads, heads))

    def to(self, *arguments, **named):
        self.brought.append(arguments)
        return super().to(*arguments, **named)


class Checkpointed(Model):
    """A model that has gradient checkpointing, by transformers' name."""

    def __init__(self):
        super().__init__()
        self.told = []

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
        self.told.append(gradient_checkpointing_kwargs)


class Idle(Model):
    """A part of it is trained that nobody calls."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2, bias=False)


class Rows:
    """A task of one row a sample; it notes what it is asked for, and how."""

    def __init__(self, kind=Model):
        torch.manual_seed(0)
        self.model = kind()
        self.lengths = [3, 1, 2, 5, 4]
        self.eval_lengths = [1, 2, 3, 4, 5]
        self.notes = ["the first", "the second"]
        self.x = torch.randn(5, WIDTH)
        self.asked, self.computed, self.previews = [], [], []
        self.scale = 1.0

    def pieces(self, indices, device, evaluating):
        indices = list(indices)
        self.asked.append((indices, evaluating, torch.initial_seed()))
        lengths = self.eval_lengths if evaluating else self.lengths
        return [
            Piece(lengths[index], lambda index=index: self.loss(index, lengths[index], evaluating))
            for index in indices
        ]

    def loss(self, index, length, evaluating):
        modes = evaluating, self.model.training, torch.is_grad_enabled(), phase_now()
        self.computed.append((*modes, torch.is_autocast_enabled("cpu")))
        return self.model(self.x[index]).float().square().sum() * length * self.scale

    def preview(self, folder, step, device):
        modes = self.model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        self.previews.append((step, *modes, phase_now()))
        path = folder / f"{step}.txt"
        path.write_text("a preview")
        return path

    def save(self, folder):
        path = folder / "adapter.pt"
        torch.save(self.model.adapter.weight.detach().cpu(), path)
        return path


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Train a task; return the result and what was said."""

    def run(task, *, folder="run", **settings):
        monkeypatch.setattr(training, "load_task", lambda settings: task)
        said = []
        output = str(tmp_path / folder)
        told = Settings("m", "d", output=output, device="cpu", **{"steps": 3, **settings})
        return training.train(told, said.append), said

    return run


def adapter(result):
    return torch.load(result["adapter"])


def logged(result, name):
    path = result["adapter"].replace("adapter.pt", "metrics.jsonl")
    return [row for run in oracle_offload.read_metrics(path) for row in run.series(name)]


def test_what_came_of_a_training_is_returned_and_in_a_file(trained, tmp_path):
    task = Rows()
    before = task.model.adapter.weight.detach().clone()
    result, said = trained(task, seed=3, batch_size=2)
    assert json.loads((tmp_path / "run" / "result.json").read_text("utf-8")) == result
    assert said[:3] == [
        "note: the first",
        "note: the second",
        "note: the model has no gradient checkpointing",
    ]
    assert said[3].startswith("attached: MemoryManager(Model on cpu: ")
    assert said[4:] == [f"step {at}/3  loss {loss:.4f}" for at, loss in logged(result, "loss")]
    assert [at for at, _ in logged(result, "loss")] == [1, 2, 3]
    losses = [loss for _, loss in logged(result, "loss")]
    assert (result["loss_first"], result["loss_last"]) == (losses[0], losses[2])
    assert (result["steps"], result["steps_now"], result["eval_loss"]) == (3, 3, None)
    assert result["managed_layers"] == 5
    assert result["managed_bytes"] == 4 * WIDTH * (4 * (WIDTH + 1) + WIDTH)
    assert result["arena_bytes"] > 0 and result["h2d_bytes"] > 0 and result["d2h_bytes"] >= 0
    assert 0.01 < result["h2d_gbps"] <= 26, "the link of the simulated device has 25 GB/s"
    assert result["gradient_checkpointing"] is False and result["watts"] is None
    assert 10 << 20 < result["host_peak_bytes"] < 1 << 40
    assert result["device_peak_bytes"] is None, "the simulated device counts none"
    assert (result["optimizer"], result["optimizer_note"]) == ("adamw", "")
    assert result["optimizer_bytes"] == 2 * WIDTH * WIDTH * 4 + 4
    assert (result["amp"], result["skipped_steps"]) == ("bfloat16", 0)
    assert result["notes"] == ["the first", "the second"] and result["idle"] == []
    assert 0 < result["seconds_per_step"] < 600 and 0 <= result["padding"] < 1
    assert result["attention"].startswith("1 calls of scaled_dot_product_attention: ")
    assert not torch.equal(adapter(result), before), "it has learned"
    assert task.model.adapter.weight.grad is None and not open_states()
    assert (tmp_path / "run" / "previews").is_dir() and task.previews == []
    assert task.computed == [(False, True, True, "training", True)] * len(task.computed)
    assert task.model.brought == []


def test_a_resident_training_learns_the_same_and_has_no_manager(trained):
    managed, _ = trained(Rows(), folder="managed", amp=False)
    task = Rows()
    resident, said = trained(task, folder="resident", amp=False, resident=True)
    assert torch.equal(adapter(managed), adapter(resident))
    assert task.model.brought == [(torch.device("cpu"),)]
    assert not {"managed_layers", "h2d_bytes", "h2d_gbps"} & resident.keys()
    assert not any(line.startswith("attached") for line in said)
    assert resident["amp"] is None and not any(row[-1] for row in task.computed)


def test_the_batches_and_the_noise_of_a_step_follow_from_its_number(trained):
    """Those of a release are those of the release before, or nobody could resume."""
    buckets = LengthBuckets([3, 1, 2, 5, 4], 2, 3, 50)
    expected = [*buckets.batches(0), *buckets.batches(1)]
    seeds = [3_000_009, 3_000_009, 3_000_010, 3_000_010, 3_000_011, 3_000_011]
    whole = Rows()
    options = {"seed": 3, "batch_size": 2, "gradient_accumulation_steps": 2, "resident": True}
    trained(whole, folder="whole", **options)
    assert whole.asked == [
        (indices, False, seed) for indices, seed in zip(expected, seeds, strict=True)
    ]
    first, rest = Rows(), Rows()
    half, _ = trained(first, folder="parts", **{**options, "steps": 1})
    assert half["steps"] == 1
    result, said = trained(rest, folder="parts", resume=True, **options)
    assert "resumed after step 1" in said and (result["steps"], result["steps_now"]) == (3, 2)
    assert first.asked + rest.asked == whole.asked
    assert torch.equal(rest.model.adapter.weight, whole.model.adapter.weight)
    assert [step for step, _ in logged(result, "loss")] == [1, 2, 3]
    assert [step for step, _ in logged(result, "length")] == [1, 2, 3]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_is_begun_once_and_gone_on_with_afterwards(trained, tmp_path, resume):
    if not resume:
        trained(Rows(), steps=1, resident=True)
    with pytest.raises(SettingsError, match="nothing to resume" if resume else "has the checkpoin"):
        trained(Rows(), steps=1, resident=True, resume=resume)


def test_evaluations_and_previews_come_when_they_are_due(trained, tmp_path):
    task = Rows()
    options = {"eval_file": "x", "eval_every": 2, "preview_every": 3, "preview_prompt": "a"}
    result, said = trained(task, steps=5, seed=4, batch_size=2, **options)
    evaluated = [row for row in task.asked if row[1]]
    assert evaluated == [([0, 1], True, 4), ([2, 3], True, 4), ([4], True, 4)] * 3
    losses = logged(result, "eval_loss")
    assert [step for step, _ in losses] == [2, 4, 5] and result["eval_loss"] == losses[-1][1]
    assert [line for line in said if "eval loss" in line] == [
        f"step {step}/5  loss {dict(logged(result, 'loss'))[step]:.4f}  eval loss {loss:.4f}"
        for step, loss in losses
    ]
    modes = {row for row in task.computed if row[0]}
    assert modes == {(True, False, False, "evaluation", True)}
    assert {row for row in task.computed if not row[0]} == {(False, True, True, "training", True)}
    assert task.previews == [(3, False, False, True, "sampling")]
    assert [line for line in said if line.startswith("preview: ")] == [
        f"preview: {tmp_path / 'run' / 'previews' / '3.txt'}"
    ]
    with torch.no_grad():
        total = sum(float(task.loss(index, index + 1, True)) for index in range(5))
    assert result["eval_loss"] == pytest.approx(total / 15, rel=0.05)


def test_a_preview_that_fails_leaves_the_model_in_training_mode(trained):
    task = Rows()

    def fail(*_):
        raise KeyError("planned")

    task.preview = fail
    with pytest.raises(KeyError, match="planned"):
        trained(task, preview_every=1)
    assert task.model.training and not open_states()


def test_a_training_that_fails_leaves_its_model_detached(trained):
    task = Rows()

    def fail(*_):
        assert open_states()
        raise KeyError("planned")

    task.loss = fail
    with pytest.raises(KeyError, match="planned"):
        trained(task)
    assert not open_states()


def clock(monkeypatch, task, seconds):
    """Let each step take what `seconds` says."""
    now, left = [1000.0], iter(seconds)
    ask = task.pieces

    def pieces(*arguments):
        now[0] += next(left)
        return ask(*arguments)

    task.pieces = pieces
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now[0]))


@pytest.mark.parametrize(
    ("seconds", "median"),
    [([100, 50, 1, 3, 2], 2), ([100, 50], 75), ([100, 50, 4], 4), ([100], 100)],
    ids=str,
)
def test_seconds_of_a_step_are_those_after_the_order_is_learned(
    trained, monkeypatch, seconds, median
):
    task = Rows()
    clock(monkeypatch, task, seconds)
    result, _ = trained(task, steps=len(seconds), resident=True)
    assert result["seconds_per_step"] == median


def test_a_training_ends_when_its_time_is_over(trained, monkeypatch):
    task = Rows()
    clock(monkeypatch, task, [20] * 5)
    result, said = trained(task, steps=5, duration="60s", resident=True)
    assert (result["steps"], said[-1]) == (3, "the time is over: 60s")
    again = Rows()
    clock(monkeypatch, again, [])
    result, said = trained(again, steps=3, resume=True, resident=True)
    assert result["steps"] == 3 and result["steps_now"] == 0, "all of it was there already"
    assert (result["seconds_per_step"], result["loss_first"], result["loss_last"]) == (None,) * 3


@pytest.mark.parametrize(
    ("joules", "watts"), [((100.0, 400.0), 5.0), ((None, 400.0), None), ((100.0, None), None)]
)
def test_watts_are_joules_by_seconds(trained, monkeypatch, joules, watts):
    task = Rows()
    clock(monkeypatch, task, [20] * 3)
    told = iter(joules)
    sensors = SimpleNamespace(energy_j=lambda: next(told))
    monkeypatch.setattr(training, "Sensors", lambda uuid: sensors)
    assert trained(task, resident=True)[0]["watts"] == watts


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 5]), (1, [1, 2, 3, 4, 5]), (0, [5])])
def test_it_saves_after_so_many_steps_and_at_the_end(trained, monkeypatch, every, steps):
    saved, honest = [], training.Checkpoint.save

    def save(checkpoint, step, *reason):
        saved.append(step)
        honest(checkpoint, step, *reason)

    monkeypatch.setattr(training.Checkpoint, "save", save)
    trained(Rows(), steps=5, save_every=every, resident=True)
    assert saved == steps


def test_gradients_are_clipped_to_the_norm_that_is_asked_for_and_forgotten_after_it(trained):
    """Far below its epsilon AdamW takes steps that are small beside the learning rate."""
    before = Rows().model.adapter.weight.detach()
    moved = []
    for norm in (1e-9, 0.0):
        options = {"max_grad_norm": norm, "learning_rate": 1e-2, "amp": False, "resident": True}
        result, _ = trained(Rows(), folder=str(norm), steps=1, **options)
        moved.append(float((adapter(result) - before).abs().max()))
    assert 0 < moved[0] < 2e-3 < 9e-3 < moved[1]


def test_float16_that_is_not_stable_is_told_from_the_fourth_step_on(trained, monkeypatch):
    monkeypatch.setattr(mixed_precision, "best_dtype", lambda device: torch.float16)
    task = Rows()
    task.scale = math.inf
    before = task.model.adapter.weight.detach().clone()
    result, said = trained(task, steps=5, resident=True)
    hints = [line for line in said if "float16 cannot hold" in line]
    assert [line.split()[:3] for line in hints] == [
        ["note:", "4", "steps"],
        ["note:", "5", "steps"],
    ]
    assert (result["amp"], result["skipped_steps"]) == ("float16", 5)
    assert torch.equal(adapter(result), before)


def test_a_hint_is_told_once(trained, monkeypatch):
    class Unstable(mixed_precision.MixedPrecision):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.hint = "not stable"

    monkeypatch.setattr(training, "MixedPrecision", Unstable)
    assert trained(Rows(), resident=True)[1].count("note: not stable") == 1


def test_another_optimizer_than_was_asked_for_is_told_of(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    result, said = trained(Rows(), steps=1, resident=True, use_8bit_optimizer=True)
    why = result["optimizer_note"]
    assert why.startswith("adamw8bit cannot be had") and said.count(f"note: {why}") == 1
    assert result["optimizer"] == "adamw"


@pytest.mark.parametrize("wanted", [True, False])
def test_checkpointing_is_turned_on_where_it_is_wanted_and_there(trained, wanted):
    task = Rows(Checkpointed)
    result, said = trained(task, steps=1, resident=True, gradient_checkpointing=wanted)
    assert result["gradient_checkpointing"] is wanted
    assert task.model.told == [{"use_reentrant": False}] * wanted
    result, more = trained(
        Rows(), folder="without", steps=1, resident=True, gradient_checkpointing=wanted
    )
    assert result["gradient_checkpointing"] is False
    note = "note: the model has no gradient checkpointing"
    assert note not in said and (note in more) is wanted


@pytest.mark.parametrize(("steps", "idle"), [(20, ["unused.weight"]), (19, [])])
def test_what_is_trained_and_no_step_uses_is_named(trained, steps, idle):
    result, _ = trained(Rows(Idle), steps=steps, resident=True)
    assert result["idle"] == idle


@pytest.mark.parametrize(
    "settings",
    [
        {"vram_budget": "much"},
        {"ram_budget": "much"},
        {"offload_percent": 2.0},
    ],
    ids=str,
)
def test_what_attach_refuses_is_a_setting_that_makes_no_sense(trained, settings):
    ((name, _),) = settings.items()
    with pytest.raises(SettingsError, match=f"{name}="):
        trained(Rows(), **settings)
    assert not open_states()


def test_a_device_that_is_none_is_a_setting_that_makes_no_sense(tmp_path):
    settings = Settings("m", "d", output=str(tmp_path), device="nowhere")
    with pytest.raises(SettingsError, match="device='nowhere' is not a device"):
        training.train(settings, print)


def test_the_peak_of_the_host_is_asked_of_whatever_system_there_is(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    for text in (None, "Name:\tpython\nVmPeak:\t 9 kB\n", "VmPeak:\t 9 kB\nVmHWM:\t 70 kB\n"):

        class File:
            def __init__(self, name, text=text):
                self.text = text

            def read_text(self, encoding):
                if self.text is None:
                    raise OSError("there is no such file")
                return self.text

        monkeypatch.setattr(training, "Path", File)
        if text and "HWM" in text:
            assert training._host_peak() == 70 * 1024
            continue
        for system, peak in (("linux", 3000 * 1024), ("darwin", 3000)):
            with monkeypatch.context() as patch:
                patch.setattr(training, "sys", SimpleNamespace(platform=system))
                assert training._host_peak() == peak
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "resource", None)
            assert training._host_peak() is None
