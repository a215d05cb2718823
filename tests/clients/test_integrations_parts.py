"""The callbacks called as their libraries call them, one call after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oracle_offload import OffloadError, integrations


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


def test_a_module_that_is_missing_without_a_name_is_missing_all_the_same(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("a part of it")

    monkeypatch.setattr(integrations.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"integrations\.postfix needs ") as raised:
        integrations.__getattr__("postfix")
    assert str(raised.value.__cause__) == "a part of it"
