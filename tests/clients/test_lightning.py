"""Lightning's Trainer: fit, accumulation, clipping, autocast, checkpoint and resume."""

from __future__ import annotations

import lightning
import models
import pytest
import sides
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from sides import compare, values


class Module(lightning.LightningModule):
    def __init__(self, side, model):
        super().__init__()
        self.side = side
        self.model = model
        self.losses = []

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def optimizer_step(self, epoch, batch, optimizer, closure):
        def enclosed():  # forward and backward
            with self.side.step():
                return closure()

        super().optimizer_step(epoch, batch, optimizer, enclosed)


class Accelerator(CPUAccelerator):
    """Of a device type that Lightning does not know."""

    def setup_device(self, device):
        pass


def trainer(folder, **options):
    kind = "gpu" if sides.DEVICE == "cuda" else "cpu"
    defaults = dict(accelerator=kind, devices=1, max_steps=3, logger=False)
    if sides.DEVICE == "simgpu":
        defaults["accelerator"] = Accelerator()
        defaults["strategy"] = SingleDeviceStrategy(f"{sides.DEVICE}:0")
        if precision := options.pop("precision", None):
            defaults["plugins"] = MixedPrecision(precision, sides.DEVICE)
    if sides.DEVICE != "cpu" and "gradient_clip_val" in options:  # norms are summed by device
        defaults["gradient_clip_algorithm"] = "value"
    quiet = dict(enable_progress_bar=False, enable_model_summary=False)
    return lightning.Trainer(default_root_dir=folder, **{**defaults, **quiet, **options})


def rows():
    return torch.utils.data.DataLoader(
        torch.randint(0, 100, (12, 9), generator=torch.Generator().manual_seed(3)), batch_size=2
    )


@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=lambda options: next(iter(options)),
)
def test_fit(tmp_path, options):
    def client(side):
        model = side.attach(models.llama().train(), at_least=20)
        module = Module(side, model)
        trainer(tmp_path, enable_checkpointing=False, **options).fit(module, rows())
        assert len(module.losses) == 3 * options.get("accumulate_grad_batches", 1)
        return [module.losses, values(model)]

    compare(client, by_library=True)


def test_resume(tmp_path):
    def client(side):
        path = tmp_path / f"{side.name}.ckpt"
        first = Module(side, side.attach(models.llama().train(), at_least=20))
        run = trainer(tmp_path, max_steps=2, enable_checkpointing=False)
        run.fit(first, rows())
        run.save_checkpoint(path)
        torch.manual_seed(99)  # other weights, which resuming must replace
        again = Module(side, side.attach(models.llama().train(), at_least=20))
        trainer(tmp_path, max_steps=4, enable_checkpointing=False).fit(
            again, rows(), ckpt_path=path
        )
        assert len(again.losses) == 2
        return [first.losses, again.losses, values(again.model)]

    compare(client, by_library=True)
