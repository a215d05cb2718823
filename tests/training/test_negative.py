"""The suite's own checks must fail where the promise is broken; these stay for ever."""

from __future__ import annotations

import pytest
import torch
from equality import (
    Through,
    agreement_with_itself,
    as_deterministic_as,
    assert_models_agree,
    attached,
    gradients,
    resident_pair,
)
from torch import nn
from torch.nn.attention.flex_attention import _create_empty_block_mask
from torch.testing._internal.two_tensor import TwoTensor

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.layers.loan import Layer
from oracle_offload.model import admission, witness


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def step(model):
    x = torch.randn(3, 32).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


def test_an_attach_that_leaves_the_modules_unpatched_fails_the_suite(monkeypatch):
    """Results would be right, computed on the host masters: only counters and witness can tell."""
    monkeypatch.setattr(admission, "swap_in", lambda module, layer: None)
    managed, resident = resident_pair(build())
    with attached(managed, "cpu"):
        with pytest.raises(AssertionError, match="no layer was managed"):
            assert_models_agree(managed, resident, step)
        with (
            pytest.raises(OffloadError, match="reads the host master of '0"),
            witness.Witness(),
        ):
            step(managed)


def test_an_attach_that_manages_only_some_modules_fails_the_suite(monkeypatch):
    real = admission.swap_in
    left_out = []

    def all_but_one(module: nn.Module, layer: Layer) -> None:
        if layer.name == "2":
            left_out.append(layer.name)
        else:
            real(module, layer)

    monkeypatch.setattr(admission, "swap_in", all_but_one)
    managed, resident = resident_pair(build())
    with attached(managed, "cpu"), pytest.raises(OffloadError, match="host master of '2"):
        assert_models_agree(managed, resident, step)
    assert left_out == ["2"]


def test_a_driver_whose_copies_do_nothing_fails_the_suite(sim):
    managed, resident = resident_pair(build())
    sim.copy_nothing(True)
    with attached(managed, "cpu"), pytest.raises(AssertionError, match="differs from resident"):
        assert_models_agree(managed, resident, step)
    sim.copy_nothing(False)


def test_a_missing_wait_fails_the_suite(sim):
    """A compute stream that never waits for a copy reads poison, or the detector reports it."""
    managed, resident = resident_pair(build())
    manager_ = oracle_offload.attach(managed, "cpu")
    state = manager_.state
    other = sim.create_stream()
    engine = state.engine
    state.engine = Through(engine, use=lambda member, _, *rest: engine.use(member, other, *rest))
    try:
        assert_models_agree(managed, resident, step)
        noticed = bool(sim.reports())
    except AssertionError:
        noticed = True
    state.engine = engine
    assert noticed
    sim.clear_reports()
    sim.destroy_stream(other)
    manager_.detach()
    sim.clear_reports()


zeros_like_out = torch.ops.aten.zeros_like.out
TOUCHES = {
    "a view": lambda w: w.t()[1:, ::2] + 1,
    "a saved slice": lambda w: w.detach().view(-1)[-1:].clone(),
    "in place": lambda w: w.detach().mul_(2),
    "in place through a view": lambda w: w.detach().t()[0].zero_(),
    "an out= argument": lambda w: torch.add(torch.ones(32, 32), 1, out=w.detach()),
    "an out= argument of a factory": lambda w: zeros_like_out(torch.ones(32, 32), out=w.detach()),
    "a list": lambda w: torch.stack([torch.ones(32, 32), w.detach()]),
    "foreach": lambda w: torch._foreach_add([w.detach()], 1),
    "foreach in place": lambda w: torch._foreach_mul_([torch.ones(2), w.detach()], 2),
    "a keyword": lambda w: torch.where(condition=torch.ones(1) > 0, input=torch.ones(1), other=w),
    "one element": lambda w: w[3, 4].item(),
    "comparison": lambda w: torch.equal(w, torch.ones(32, 32)),
    "a random fill": lambda w: w.detach().normal_(),
    "a copy from": lambda w: torch.empty(32, 32).copy_(w),
    "a wrapper subclass": lambda w: TwoTensor(w.detach(), torch.ones(32, 32)) + 1,
    "a higher-order operator": lambda w: higher_order(w.detach().view(1, 1, 32, 32)),
    "autograd's saved tensor": lambda w: torch.ones(2, 32, requires_grad=True) @ w.detach(),
}


def higher_order(q):
    return torch.ops.higher_order.flex_attention(
        q, q, q, lambda score, *_: score, _create_empty_block_mask(q, q).as_tuple(), 1.0, {}
    )


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_the_witness_sees_every_way_to_touch_a_master(touch):
    model = build()
    with attached(model, "cpu"):
        model(torch.ones(1, 32))
        with witness.Witness(), pytest.raises(OffloadError, match=r"host master of '0\.weight'"):
            touch(model[0].weight)


def test_the_witness_lets_geometry_pass():
    model = build()
    with attached(model, "cpu"):
        model(torch.ones(1, 32))
        weight = model[0].weight
        with witness.Witness():
            made = [torch.empty_like(weight), torch.zeros_like(weight), weight.new_ones(2, 2)]
            assert weight.t().shape == made[0].shape == made[1].shape == (32, 32)


def test_an_optimizer_step_that_fails_leaves_the_witness_strict():
    model = build()
    with attached(model, "cpu"):
        step(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        failing = witness.Witness()
        with failing:
            model[0].weight.grad = None
            optimizer.param_groups[0]["lr"] = "much"
            with pytest.raises(TypeError):
                optimizer.step()
            with pytest.raises(OffloadError, match=r"host master of '0\.weight'"):
                model[0].weight + 1


def test_a_model_that_refuses_strict_determinism_is_compared_without_fused_attention():
    """Under warnings alone those kernels sum in another order each time."""

    def refuses(model):
        if torch.get_deterministic_debug_mode() == 2:
            raise RuntimeError("histc does not have a deterministic implementation")
        return []

    for step, mode in ((refuses, 1), (lambda model: [], 2)):
        with as_deterministic_as(nn.Linear(1, 1), step):
            assert torch.get_deterministic_debug_mode() == mode
            assert torch.backends.cuda.flash_sdp_enabled() == (mode == 2)
        assert torch.get_deterministic_debug_mode() == 0
        assert torch.backends.cuda.flash_sdp_enabled()


def test_a_difference_says_whether_the_resident_model_agrees_with_itself():
    resident = nn.Linear(4, 4)

    def step(model):
        y = model(torch.randn(2, 4))
        y.sum().backward()
        return [y]

    torch.manual_seed(1)
    expected = step(resident)
    wanted = gradients(resident)
    said = agreement_with_itself(resident, step, 1, expected, wanted)
    assert said.endswith("agrees with itself")

    def another(model):
        return [y + 1 for y in step(model)]

    said = agreement_with_itself(resident, another, 1, expected, wanted)
    assert "not the engine's" in said
