"""transformers' Trainer: losses, weights and optimizer of the resident run."""

from __future__ import annotations

import models
import pytest
import sides
import torch
from sides import Rows, compare, values
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments, training_args
from transformers.trainer_utils import get_last_checkpoint

from oracle_offload.train.micro_batches import kernel_flags


class OnDevice:
    """Of the arguments of a training: it is on the device of the sides."""

    @property
    def device(self):
        own = super().device
        return torch.device(sides.DEVICE, 0) if sides.DEVICE == "simgpu" else own


class Arguments(OnDevice, TrainingArguments):
    pass


def common():
    return dict(
        use_cpu=sides.DEVICE == "cpu",
        dataloader_pin_memory=sides.DEVICE != "simgpu",
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=11,
        # Norms are summed by device, and another sum clips to other bits.
        max_grad_norm=1.0 if sides.DEVICE == "cpu" else 0.0,
    )


def stepping(side, trainer=Trainer):
    class Stepping(trainer):
        def training_step(self, *arguments, **named):
            with side.step():
                return super().training_step(*arguments, **named)

    return Stepping


if sides.DEVICE == "simgpu":  # a device type that is not on their list of those that can bfloat16
    training_args.is_torch_bf16_gpu_available = lambda: True


def trainer(side, model, folder, **options):
    if sides.DEVICE != "cpu":
        options.pop("max_grad_norm", None)
    arguments = Arguments(output_dir=str(folder), **{**common(), **options})
    return stepping(side)(model, arguments, train_dataset=Rows(12))


def losses(run):
    found = [torch.tensor(line["loss"]) for line in run.state.log_history if "loss" in line]
    assert len(set(map(float, found))) == len(found) > 1, "the loss moves"
    return found


CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
REENTRANT = {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        CHECKPOINTING,
        {"bf16": True},
        {"bf16": True, **REENTRANT},
    ],
    ids=["accumulation", "checkpointing", "bf16", "bf16-reentrant"],
)
def test_training(tmp_path, options):
    def client(side):
        model = side.attach(models.llama(), at_least=20)
        run = trainer(side, model, tmp_path, **options)
        run.train()
        return [losses(run), values(model)]

    compare(client, by_library=True)


@pytest.fixture
def precisions():
    """Put back what transformers allows a card's kernels for a compiled training."""
    before = kernel_flags.now()
    yield
    kernel_flags.restore(before)


def test_compiled_by_the_trainer(tmp_path, precisions):
    def client(side):
        torch._dynamo.reset()
        counters.clear()
        model = side.attach(models.llama(), at_least=20)
        options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
        run = trainer(side, model, tmp_path, **options)
        run.train()
        assert counters["stats"]["calls_captured"] > 100, counters["stats"]
        return [losses(run), values(model)]

    compare(client, by_library=True)


def test_lora(tmp_path):
    def client(side):
        model = models.lora(models.llama(), ["q_proj", "v_proj", "down_proj"])
        side.attach(model, at_least=20)
        run = trainer(side, model, tmp_path, bf16=True)
        run.train()
        return [losses(run), values(model)]

    compare(client, by_library=True)


def test_resume_from_a_checkpoint(tmp_path):
    def client(side):
        folder = tmp_path / side.name
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        first = trainer(side, side.attach(models.llama(), at_least=20), folder, **options)
        first.train()
        torch.manual_seed(99)  # other weights, which resuming must replace
        model = side.attach(models.llama(), at_least=20)
        again = trainer(side, model, folder, **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert get_last_checkpoint(str(folder)).endswith("checkpoint-4")
        assert [line["step"] for line in again.state.log_history if "loss" in line] == [1, 2, 3, 4]
        for name, value in values(first.model).items():
            assert torch.equal(value, values(again.model)[name]), name
        return [losses(again), values(again.model)]

    compare(client, by_library=True)
