"""The numbers reach loggers and come from trainers: real libraries, and what each of them shows."""

from __future__ import annotations

import inspect
import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning
import models
import numpy as np
import pytest
import sides
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_lightning import Module, rows
from test_lightning import trainer as lightning_trainer
from test_trainer import losses
from test_trainer import trainer as transformers_trainer
from tqdm import tqdm

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import simulator
from oracle_offload.observe import MetricsFile, read_metrics
from oracle_offload.train import integrations

ROOT = Path(__file__).resolve().parents[2]


class Managed:
    """The managed side of `sides.Side`, alone."""

    name = "managed"
    managed = True

    def step(self):
        return torch.enable_grad()


@pytest.fixture
def model():
    torch.manual_seed(0)
    found = models.llama().train()
    manager = oracle_offload.attach(found, sides.DEVICE)
    assert len(manager.layers) >= 20
    yield found
    manager.detach()


def check(seen, steps):
    """Each step has its numbers; those of the engine are known from the first step on."""
    assert [numbers["step"] for numbers in seen] == steps
    assert all(numbers["steps"] == 1 for numbers in seen)
    assert all(numbers["h2d_bytes"] > 0 for numbers in seen)
    assert all(numbers["in_arena_bytes"] is not None for numbers in seen)


# ---- trainers ----


def test_the_trainer_hands_over_each_step_with_its_loss(tmp_path, model):
    seen = []
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        run = transformers_trainer(Managed(), model, tmp_path)
        run.add_callback(integrations.TrainerCallback(seen.append, metrics.append))
        run.train()
    check(seen, [1, 2, 3])
    assert [numbers["loss"] for numbers in seen] == [float(loss) for loss in losses(run)]
    assert all(numbers["learning_rate"] > 0 for numbers in seen)
    (written,) = read_metrics(tmp_path / "metrics.jsonl")
    assert written.series("loss") == [(n["step"], n["loss"]) for n in seen]
    moved = oracle_offload.memory_summary(model=model).devices[0].models[0].h2d_bytes
    assert sum(numbers["h2d_bytes"] for numbers in seen) == moved


def test_steps_that_the_trainer_does_not_log_have_no_loss(tmp_path, model):
    seen = []
    run = transformers_trainer(Managed(), model, tmp_path, logging_steps=2)
    run.add_callback(integrations.TrainerCallback(seen.append))
    run.train()
    check(seen, [1, 2, 3])
    assert [numbers.get("loss") is not None for numbers in seen] == [False, True, False]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_lightning_hands_over_each_step_and_its_loggers_get_it(tmp_path, model, accumulate):
    seen = []
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    module = Module(Managed(), model)
    callback = integrations.LightningCallback(seen.append)
    options = dict(accumulate_grad_batches=accumulate, callbacks=[callback], logger=logger)
    lightning_trainer(tmp_path, enable_checkpointing=False, **options).fit(module, rows())
    check(seen, [1, 2, 3])
    epoch = len(rows())  # its end ends a step of fewer batches
    last = [
        float(loss)
        for number, loss in enumerate(module.losses)
        if (number % epoch + 1) % accumulate == 0 or (number + 1) % epoch == 0
    ]
    assert [numbers["loss"] for numbers in seen] == last
    logger.save()
    header, *lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("oracle_offload/h2d_bytes")
    logged = [int(float(line.split(",")[column])) for line in lines]
    assert logged == [numbers["h2d_bytes"] for numbers in seen]


class Skips(Module):
    """Has no loss for its second batch, which Lightning steps with all the same."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return None if len(self.losses) == 2 else loss


def test_a_batch_without_a_loss_is_a_step_without_one(tmp_path, model):
    seen = []
    module = Skips(Managed(), model)
    callback = integrations.LightningCallback(seen.append)
    lightning_trainer(tmp_path, enable_checkpointing=False, callbacks=[callback]).fit(
        module, rows()
    )
    first, second, third = (numbers.get("loss") for numbers in seen)
    assert (first, second, third) == (float(module.losses[0]), None, float(module.losses[2]))


class ByHand(Module):
    """Steps of its own, whose losses Lightning does not divide, whatever the Trainer says."""

    automatic_optimization = False

    def on_train_start(self):
        self.trainer.accumulate_grad_batches = 4  # refused if it were given to the Trainer

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss if len(self.losses) < 3 else None


def test_the_loss_of_steps_by_hand_is_what_they_return(tmp_path, model):
    seen = []
    module = ByHand(Managed(), model)
    options = dict(
        enable_checkpointing=False, callbacks=[integrations.LightningCallback(seen.append)]
    )
    lightning_trainer(tmp_path, **options).fit(module, rows())
    check(seen, [1, 2, 3])
    returned = [float(loss) for loss in module.losses[:2]]
    assert [numbers["loss"] for numbers in seen] == [*returned, None]


def test_accelerate_hands_over_what_is_logged(tmp_path, model):
    seen = []
    AcceleratorState._reset_state(True)
    try:
        tracker = integrations.AccelerateTracker(seen.append)
        accelerator = Accelerator(cpu=sides.DEVICE == "cpu", log_with=[tracker])
        accelerator.init_trackers("run", {"lr": 0.1})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, rows())
        shown = []
        for step, ids in enumerate(loader):
            loss = prepared(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item(), "note": "text"}, step=step)
            shown.append(loss.item())
        accelerator.end_training()
    finally:
        AcceleratorState._reset_state(True)
    assert seen[0]["h2d_bytes"] is None  # counting began there
    check(seen[1:], [1, 2, 3, 4, 5])
    assert [numbers["loss"] for numbers in seen] == shown and "note" not in seen[0]
    assert tracker.tracker == (seen.append,)


def test_of_what_is_logged_the_numbers_are_handed_over(model):
    seen = []
    AcceleratorState._reset_state(True)
    try:
        tracker = integrations.AccelerateTracker(seen.append)
        accelerator = Accelerator(cpu=sides.DEVICE == "cpu", log_with=[tracker])
        accelerator.init_trackers("run")
        ordinary = {"train_loss": 1.0, "epoch": 0, "step": 5}
        accelerator.log(ordinary, step=5)
        accelerator.log(ordinary, step=6)
        accelerator.log(ordinary)
        accelerator.log(
            {
                "loss": torch.tensor([2.5]),
                "rate": np.float32(0.5),
                "nothing": None,
                "text": "3",
                "losses": {"a": 1.0},
                "histogram": torch.zeros(2),
            }
        )
    finally:
        AcceleratorState._reset_state(True)
    measured = oracle_offload.observe.Meter().read().keys()
    for numbers, step in zip(seen[:3], (5, 6, 5), strict=True):
        assert numbers.items() >= {"train_loss": 1.0, "epoch": 0, "step": step}.items()
        assert numbers.keys() - measured == ordinary.keys()
    logged = {name: value for name, value in seen[3].items() if name not in measured}
    assert logged == {"loss": 2.5, "rate": 0.5, "nothing": None}


def test_what_the_trainer_logs_besides_numbers_is_left_out(model):
    seen = []
    callback = integrations.TrainerCallback(seen.append)
    state = SimpleNamespace(global_step=3)
    callback.on_log(None, state, None, logs={"loss": 1.0, "step": 9, "by_set": {"a": 1.0}})
    (numbers,) = seen
    assert (numbers["loss"], numbers["step"]) == (1.0, 3) and "by_set" not in numbers


# ---- as the libraries call them, one call after the other ----


class Logger:
    def __init__(self):
        self.logged = []

    def log_metrics(self, numbers, step):
        self.logged.append((step, numbers))


@pytest.mark.parametrize("automatic", [True, False])
def test_a_batch_that_ends_no_step_is_passed_over_and_losses_are_of_the_whole_step(automatic):
    seen, logger = [], Logger()
    callback = integrations.LightningCallback(seen.append)
    trainer = SimpleNamespace(global_step=5, accumulate_grad_batches=4, loggers=[logger])
    module = SimpleNamespace(automatic_optimization=automatic)
    callback.on_train_start(trainer, module)

    def end(step, outputs):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, module, outputs, None, 0)

    end(5, {"loss": torch.tensor(9.0)})
    assert seen == [] and logger.logged == []
    end(6, {"loss": torch.tensor(2.0)})
    end(6, torch.tensor(9.0))
    end(7, torch.tensor(3.0))
    end(8, None)
    end(9, {"other": 1})
    by = 4 if automatic else 1
    assert [(row["step"], row.get("loss")) for row in seen] == [
        (6, 2.0 * by), (7, 3.0 * by), (8, None), (9, None),
    ]  # fmt: skip
    assert [step for step, _ in logger.logged] == [6, 7, 8, 9]
    assert logger.logged[0][1]["oracle_offload/loss"] == 2.0 * by
    assert "oracle_offload/loss" not in logger.logged[2][1]


def test_a_step_that_is_logged_waits_for_its_loss_and_the_end_is_no_step():
    seen = []
    callback = integrations.TrainerCallback(seen.append)
    state, control = SimpleNamespace(global_step=1), SimpleNamespace(should_log=False)
    callback.on_train_begin(None, state, control)
    callback.on_step_end(None, state, control)
    state.global_step, control.should_log = 2, True
    callback.on_step_end(None, state, control)
    callback.on_log(None, state, control, logs={"loss": 0.5, "learning_rate": 0.1})
    for nothing in (None, {}, {"train_loss": 0.5}):
        callback.on_log(None, state, control, logs=nothing)
    assert [(row["step"], row.get("loss")) for row in seen] == [(1, None), (2, 0.5)]
    assert seen[1]["learning_rate"] == 0.1


class Steps:
    """What `accumulate_in` needs of a Trainer."""

    def __init__(self, processes=1):
        self.accelerator = SimpleNamespace(num_processes=processes)
        self.weight = torch.ones(2, requires_grad=True)
        self.computed = []

    def get_batch_samples(self, *arguments, **named):
        return [torch.tensor(float(number)) for number in arguments], named

    def training_step(self, model, inputs, *rest, **named):
        self.computed.append((float(inputs), rest, named))
        loss = (self.weight * inputs).sum()
        loss.backward()
        return loss.detach()


def test_the_first_of_a_step_computes_all_and_each_gets_its_own_loss():
    trainer = Steps()
    assert integrations.accumulate_in(trainer) is trainer
    outside = torch.tensor(7.0)
    assert float(trainer.training_step(None, outside)) == 14.0, "no step has begun"
    for first, count in ((1.0, 1), (4.0, 2)):
        trainer.weight.grad = None
        trainer.computed.clear()
        batches, named = trainer.get_batch_samples(first, first + 1, first + 2, device="cpu")
        assert named == {"device": "cpu"}
        for number, batch in enumerate(batches):
            loss = trainer.training_step(None, batch, number, key=count)
            assert float(loss) == 2 * (first + number)
            found = [value for value, _, _ in trainer.computed]
            assert found == [first, first + 1, first + 2], "all of them with the first"
        assert trainer.computed[0][1:] == ((0,), {"key": count})
        assert trainer.weight.grad.tolist() == [3 * first + 3] * 2
    trainer.weight.grad = None
    trainer.computed.clear()
    assert float(trainer.training_step(None, outside)) == 14.0, "its step is over"
    batches, _ = trainer.get_batch_samples(1.0, 2.0)
    assert float(trainer.training_step(None, outside)) == 14.0, "none of its micro-batches"
    assert [value for value, _, _ in trainer.computed] == [7.0, 7.0]


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_a_trainer_of_several_processes_keeps_its_own_loop(processes):
    trainer = Steps(processes)
    if processes == 1:
        integrations.accumulate_in(trainer)
        assert "training_step" in vars(trainer)
        return
    with pytest.raises(OffloadError, match=f"a Trainer of {processes} processes, which shares no"):
        integrations.accumulate_in(trainer)
    assert not {"training_step", "get_batch_samples"} & vars(trainer).keys()


# ---- sinks that fail ----


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_sink_that_fails_is_logged_once_and_ends_no_training(tmp_path, model, caplog):
    seen, calls = [], []

    def broken(numbers):
        calls.append(numbers["step"])
        raise RuntimeError("no connection")

    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        full = os.open("/dev/full", os.O_WRONLY)
        try:
            os.dup2(full, metrics._file)  # the disk is full from now on
        finally:
            os.close(full)
        with pytest.raises(OSError, match="No space left"):
            metrics.log(0)
        callback = integrations.LightningCallback(metrics.append, broken, seen.append)
        run = lightning_trainer(tmp_path, enable_checkpointing=False, callbacks=[callback])
        with caplog.at_level("WARNING", "oracle_offload"):
            run.fit(Module(Managed(), model), rows())
    check(seen, [1, 2, 3])
    assert calls == [1, 2, 3], "it may work again"
    first, second = (r.getMessage() for r in caplog.records if r.name == "oracle_offload")
    assert "MetricsFile.append" in first and "No space left on device" in first
    assert "broken" in second and "RuntimeError('no connection')" in second


def test_an_interrupt_in_a_sink_passes():
    def interrupted(numbers):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        integrations.sinks.Feed(interrupted)(1)


# ---- sinks ----


NUMBERS = {
    "step": 7,
    "loss": 0.51234,
    "step_s": 0.0915,
    "interval_s": 0.183,
    "stall_s": 0.0183,
    "in_arena_bytes": 3 << 30,
    "allocated_bytes": None,
    "h2d_gbps": 24.96,
    "power_w": 312.5,
}


def scalars(folder):
    """The scalars in TensorBoard's files: length, checksum, record, checksum, and so on."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_what_is_known_as_scalars(tmp_path):
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        integrations.tensorboard(writer)(NUMBERS)
    found = {tag: (step, value) for tag, step, value in scalars(tmp_path)}
    assert found.keys() == {
        f"oracle_offload/{name}" for name in NUMBERS if name not in ("step", "allocated_bytes")
    }
    assert found["oracle_offload/power_w"] == (7, 312.5)
    assert found["oracle_offload/in_arena_bytes"] == (7, float(3 << 30))


def test_torch_s_own_writer_takes_the_same_call():
    source = Path(torch.__file__).parent / "utils" / "tensorboard" / "writer.py"
    call = source.read_text("utf-8").partition("def add_scalar(")[2].partition(")")[0]
    names = [line.split("=")[0].strip(" ,") for line in call.splitlines() if line.strip()]
    assert names[:4] == ["self", "tag", "scalar_value", "global_step"]


def test_a_run_of_wandb_gets_one_call_a_step():
    """A stand-in with the signature of ``wandb.Run.log``; wandb is not installed here."""

    class Run:
        def __init__(self):
            self.logged = []

        def log(self, data, step=None, commit=None):
            self.logged.append((step, data))

    run = Run()
    integrations.wandb(run, prefix="mine/")(NUMBERS)
    integrations.wandb(run)({"loss": 1.0})
    ((step, data), second) = run.logged
    assert step == 7 and data["mine/loss"] == 0.51234
    assert not any(value is None for value in data.values()) and "mine/step" not in data
    assert second == (None, {"oracle_offload/loss": 1.0})


def test_a_bar_shows_what_matters():
    text = io.StringIO()
    with tqdm(total=10, file=text, ascii=True, ncols=140) as bar:
        integrations.postfix(bar)(NUMBERS)
        assert bar.postfix == (
            "loss=0.5123, step=91.5 ms, arena=3.00 GiB, copies=25.0 GB/s, stalled=10%, power=312 W"
        )
        integrations.postfix(bar)({"step_s": 1.5, "allocated_bytes": 1 << 20})
        assert bar.postfix == "step=1.50 s, torch=1.00 MiB"
        for lacking in ({"stall_s": 1.0, "interval_s": 0.0}, {"interval_s": 2.0}, {"stall_s": 1.0}):
            integrations.postfix(bar)(lacking)
            assert bar.postfix == "", "a share takes both"
        integrations.postfix(bar)({"loss": 0.0, "step_s": 1.0, "stall_s": 0.0, "interval_s": 2.0})
        assert bar.postfix == "loss=0, step=1.00 s, stalled=0%"
    assert "\n" not in text.getvalue().strip(), "one bar, not a second one"


# ---- what is not there ----


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("TrainerCallback", "transformers"),
        ("LightningCallback", "lightning"),
        ("AccelerateTracker", "accelerate"),
    ],
)
def test_a_library_that_is_absent_is_named_when_it_is_needed(name, library):
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from oracle_offload.train import integrations\n"
        "integrations.postfix, integrations.wandb, integrations.tensorboard\n"
        f"try: integrations.{name}\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == (
        f"oracle_offload.train.integrations.{name} needs {library}, which is not installed here: "
        f"pip install {library}\n"
    ), done.stderr


def test_a_module_that_is_missing_without_a_name_is_missing_all_the_same(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("a part of it")

    monkeypatch.setattr(integrations.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"integrations\.postfix needs ") as raised:
        integrations.__getattr__("postfix")
    assert str(raised.value.__cause__) == "a part of it"


def test_only_what_is_there_is_offered():
    with pytest.raises(AttributeError, match="nothing"):
        _ = integrations.nothing
    assert all(inspect.getdoc(getattr(integrations, name)) for name in integrations.__all__)


def test_importing_costs_no_library():
    code = (
        "import sys, oracle_offload.train.integrations as found\n"
        "print([n for n in ('torch', 'transformers', 'lightning') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_loop_of_one_s_own_shows_the_last_interval(model):
    feed = integrations.sinks.Feed(lambda numbers: seen.append(numbers))
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    feed.restart()
    for _ in range(2):
        ids = torch.zeros(1, 4, dtype=torch.long, device=sides.DEVICE)
        model(input_ids=ids).logits.sum().backward()
        simulator.finish()
        optimizer.step()
        optimizer.zero_grad()
    assert feed(2) is seen[0] and seen[0]["steps"] == 2
    assert "step" not in feed(None)
