"""Whole models of every family, in small: the resident's bits, and nothing stays behind."""

from __future__ import annotations

import contextlib

import peft
import pytest
import sides
import torch
from equality import (
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    count_acquires,
    resident_pair,
)
from families import FAMILIES, enable_checkpointing

pytestmark = pytest.mark.usefixtures("nothing_is_small")
HOWS = ["plain", "reentrant", "not-reentrant", "autocast"]
RUNS = [
    *(("trainable", how) for how in HOWS),
    ("frozen", "plain"),
    *(("lora", how) for how in HOWS),
    *(("lora of parameters", how) for how in HOWS),
]


def runs():
    """Yield what there is to run of each family, with a name."""
    for name, family in FAMILIES.items():
        for what, how in RUNS:
            if (how in ("plain", "autocast") or family.checkpoints) and (
                family.stacks or what != "lora of parameters"
            ):
                yield pytest.param(name, what, how, id=f"{name}-{what}-{how}")


def adapt(model, family, what):
    """Say what of the model trains."""
    model.train().requires_grad_(what == "trainable")
    if what.startswith("lora"):
        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=4,
            target_modules=list(family.adapted),
            target_parameters=list(family.stacks) if "parameters" in what else None,
            init_lora_weights=False,
        )
        peft.inject_adapter_in_model(config, model)


def step_of(family, how):
    def step(model):
        with torch.autocast(sides.DEVICE, torch.bfloat16, enabled=how == "autocast"):
            y, x = family.call(model)
        assert_nothing_is_held(model)
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        (y.float() * weights).sum().backward()
        return [y.detach(), x.grad]

    return step


def assert_outputs_agree(managed, resident, step):
    """Of gradients that autocast sums in low precision: docs/how-it-works.md, known differences."""
    resident.to(sides.DEVICE)
    acquires = count_acquires()
    found, expected = (seeded(step, model) for model in (managed, resident))
    assert count_acquires() > acquires
    assert_same(found[:1], expected[:1])
    torch.testing.assert_close(found[1], expected[1], rtol=0.1, atol=0.1)
    for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.1, atol=0.1)


def assert_nothing_is_held(model):
    manager = model.__dict__.get("_memory_manager")
    if manager is not None:
        assert sum(pins for *_, pins in manager.state.engine.residents()) == 0


class Counting(Recorder):
    """Counts the units that are in use at once."""

    most = 0

    def use(self, *arguments):
        answer = super().use(*arguments)
        held = [unit for unit, *_, pins in self.residents() if pins]
        self.most = max(self.most, len(held))
        return answer


def most_at_once(manager):
    """Return how many units the arena's floor counts: a layer's, and what stays lent above it."""
    lenders = {layer.name: layer.unit for layer in manager.layers if layer.lends_to_code}
    return max(
        len({layer.unit, *(unit for name, unit in lenders.items() if is_below(layer.name, name))})
        for layer in manager.layers
    )


def is_below(name, above):
    return not above or name == above or name.startswith(f"{above}.")


@contextlib.contextmanager
def counted(manager):
    """Assert that no more units are in use at once than the arena's floor counts."""
    state, stated = manager.state, most_at_once(manager)
    state.engine = counting = Counting(state.engine)
    try:
        yield
    finally:
        state.engine = counting._engine
    assert 0 < counting.most <= stated, (counting.most, stated)


def assert_all_is_managed(manager):
    assert {key: why for key, why in manager.resident.items() if "adapter of" not in why} == {}


def seeded(step, model):
    torch.manual_seed(0)
    return step(model)


@pytest.mark.parametrize(("name", "what", "how"), runs())
def test_a_whole_model_has_the_residents_bits(name, what, how):
    family = FAMILIES[name]
    torch.manual_seed(0)
    managed, resident = resident_pair(family.make())
    for model in (managed, resident):
        adapt(model, family, what)
        if how.endswith("reentrant"):
            enable_checkpointing(model, how == "reentrant")
    with attached(managed) as manager:
        assert_all_is_managed(manager)
        step = step_of(family, how)
        with counted(manager), sides.default_device():
            if family.repeats and (what, how) == ("trainable", "autocast"):
                assert_outputs_agree(managed, resident, step)
            else:
                assert_models_agree(managed, resident, step, steps=1)
        assert_nothing_is_held(managed)
        assert_all_is_managed(manager)
