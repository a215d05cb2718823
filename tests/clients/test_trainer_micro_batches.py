"""Micro-batches with one fetch, in the loops of real libraries: the bits of their plain loops."""

from __future__ import annotations

import models
import pytest
import sides
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sides import Side, compare, values
from test_trainer import CHECKPOINTING, REENTRANT, losses, trainer
from transformers import TrainerCallback

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine.engines import open_states
from oracle_offload.train.integrations import accumulate_in

pytest.importorskip("greenlet")


@pytest.fixture(autouse=True)
def fresh_state():
    """An Accelerator leaves what it was made with behind, for all that follow."""
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.1}, {"bf16": True, **REENTRANT}], ids=["plain", "bf16"]
)
def test_a_trainer_accumulates_with_the_bits_of_its_own_loop(tmp_path, options):
    def client(side):
        model = side.attach(models.llama(), at_least=20)
        run = trainer(side, model, tmp_path, gradient_accumulation_steps=3, **options)
        if side.managed:
            assert accumulate_in(run) is run
        run.train()
        return [losses(run), values(model)]

    compare(client, by_library=True)


class Counting(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, *_, **__):
        self.seen.append(sum(state.engine.stats()["h2d_bytes"] for state in open_states()))


def test_a_trainer_moves_the_bytes_of_one_micro_batch(tmp_path):
    moved = {}
    for together in (False, True):

        def client(side, together=together):
            model = models.lora(models.llama(), ["q_proj", "v_proj", "down_proj"])
            side.attach(model, at_least=20)
            options = {"gradient_accumulation_steps": 3, "max_steps": 6, **CHECKPOINTING}
            run = trainer(side, model, tmp_path, **options)
            if together:
                accumulate_in(run)
            counting = Counting()
            run.add_callback(counting)
            run.train()
            moved[together] = counting.seen[-1] - counting.seen[-2]

        Side("managed").run(client, by_library=True)
    assert moved[True] < 0.4 * moved[False], moved


def test_a_step_that_is_asked_for_outside_of_the_loop_is_the_trainers_own(tmp_path):
    model = models.llama()
    run = accumulate_in(trainer(Side("resident"), model, tmp_path))
    run.train()
    ids = torch.randint(0, 100, (2, 9))
    loss = run.training_step(model, {"input_ids": ids, "labels": ids})
    assert loss.ndim == 0 and model.lm_head.weight.grad is not None


def test_a_trainer_of_several_processes_is_refused(tmp_path):
    run = trainer(Side("resident"), models.llama(), tmp_path)
    run.accelerator.state.num_processes = 2
    with pytest.raises(OffloadError, match="a Trainer of 2 processes, which shares no gradients"):
        accumulate_in(run)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_by_accumulate_in_the_loop(precision):
    def client(side):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(
            cpu=sides.DEVICE == "cpu", mixed_precision=precision, gradient_accumulation_steps=3
        )
        model = side.attach(models.llama().train(), at_least=20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(torch.randint(0, 100, (12, 9)), batch_size=2)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches, seen = list(loader), []

        def step(ids):
            with side.step():
                loss = prepared(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            return loss.detach()

        for at in (0, 3):
            some = batches[at : at + 3]
            if side.managed:
                seen += oracle_offload.accumulate(step, some)
            else:
                seen += [step(ids) for ids in some]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, values(model)]

    compare(client, by_library=True)
