"""accelerate: prepare, accumulate, clip and autocast, with attach before prepare or after it."""

from __future__ import annotations

import models
import pytest
import sides
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientAccumulationPlugin
from sides import compare, values


@pytest.fixture(autouse=True)
def fresh_state():
    """An Accelerator leaves what it was made with behind, for all that follow."""
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("precision", "when"), [("no", "before"), ("no", "after"), ("bf16", "before")]
)
def test_prepare_accumulate_and_clip(precision, when):
    def client(side):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(
            cpu=sides.DEVICE == "cpu",
            mixed_precision=precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )
        model = models.llama().train()
        if when == "before":
            side.attach(model, at_least=20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = torch.utils.data.DataLoader(torch.randint(0, 100, (12, 9)), batch_size=2)
        prepared, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, loader, schedule
        )
        if when == "after":
            side.attach(accelerator.unwrap_model(prepared), at_least=20)
        seen = []
        for ids in loader:
            with accelerator.accumulate(prepared):
                with side.step():
                    loss = prepared(input_ids=ids, labels=ids).loss
                    accelerator.backward(loss)
                if accelerator.sync_gradients and sides.DEVICE == "cpu":
                    seen.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
                elif accelerator.sync_gradients:  # norms are summed by device
                    accelerator.clip_grad_value_(prepared.parameters(), 1e-3)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.append(loss.detach())
        assert len(seen) == (9 if sides.DEVICE == "cpu" else 6)
        return [*seen, values(model)]

    compare(client, by_library=True)
