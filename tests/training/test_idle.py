"""The alarm of training that does nothing: what is idle is named, with the likeliest cause."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from equality import assert_same, attached
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload.train import IdleAlarm

WIDTH = 16


class LoRA(nn.Module):
    """A frozen layer with an adapter, as peft names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.ParameterDict({"default": torch.randn(2, WIDTH)})
        self.lora_B = nn.ParameterDict({"default": torch.zeros(WIDTH, 2)})

    def forward(self, x):
        a, b = self.lora_A["default"], self.lora_B["default"]
        return self.base(x) + x @ a.T @ b.T


class Net(nn.Module):
    """Two adapted layers, and switches for what can go wrong between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = LoRA(), LoRA()
        self.fault = None

    def forward(self, x):
        if self.fault == "no_grad":
            with torch.no_grad():
                x = self.first(x)
        elif self.fault == "reentrant":
            x = checkpoint(self.first, x, use_reentrant=True)
        else:
            x = self.first(x)
        if self.fault == "detach":
            x = x.detach()
        if self.fault == "skip":
            return x
        return self.second(x * 0) if self.fault == "times zero" else self.second(x)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


@pytest.fixture
def watch():
    """Make alarms that end with the test."""
    alarms = []

    def make(model, **options):
        alarms.append(IdleAlarm(model, **options))
        return alarms[-1]

    yield make
    for alarm in alarms:
        alarm.close()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(model, alarm, optimizer, steps, scaler=None, factor=1.0):
    found = []
    device = next(p for p in trainable(model)).device
    for _ in range(steps):
        loss = model(torch.randn(3, WIDTH, device=device)).square().mean() * factor
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found += alarm.step()
        optimizer.zero_grad()
    return found


def adam(model, rate=1e-3):
    return torch.optim.Adam(trainable(model), lr=rate)


def test_a_run_whose_parameters_move_has_no_alarm_and_the_same_bits(device):
    model = net()
    alone = copy.deepcopy(model).to(device)
    with attached(model, device):
        alarm = IdleAlarm(model, steps=3)
        torch.manual_seed(1)
        assert train(model, alarm, adam(model), 9) == []
        assert alarm.idle == {}
        alarm.close()
        torch.manual_seed(1)
        other = IdleAlarm(alone, steps=100)
        train(alone, other, adam(alone), 9)
        other.close()
        assert_same(
            {name: p for name, p in model.named_parameters() if p.requires_grad},
            {name: p for name, p in alone.named_parameters() if p.requires_grad},
        )


def test_a_lora_that_never_moves_is_named_at_the_step_that_was_asked_for(device, caplog, watch):
    model = net()
    with torch.no_grad():
        model.first.lora_A["default"].zero_()
    with attached(model, device):
        alarm = watch(model, steps=4)
        optimizer = adam(model)
        assert train(model, alarm, optimizer, 3) == []
        with caplog.at_level(logging.WARNING):
            found = train(model, alarm, optimizer, 1)
    assert [idle.name for idle in found] == ["first.lora_A.default", "first.lora_B.default"]
    assert all(idle.gradient == "zero" and idle.steps == 4 for idle in found)
    assert "it and its lora_B are both zero" in found[0].cause
    assert "it and its lora_A are both zero" in found[1].cause
    assert "initialise one of the two at random" in found[0].fix
    assert str(found[0]).startswith("first.lora_A.default has not changed for 4 steps: its gr")
    lines = [each.getMessage() for each in caplog.records if "not changed" in each.getMessage()]
    assert len(lines) == 2 and lines[0].startswith("first.lora_A.default: not changed for 4 steps")
    assert set(alarm.idle) == {"first.lora_A.default", "first.lora_B.default"}


FORWARDS = {
    "no_grad": "'first' ran only with gradients switched off",
    "reentrant": "'first' ran only with gradients switched off",
    "detach": "what 'first' returned does not reach the loss",
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("fault", FORWARDS)
def test_a_first_half_without_gradient_is_told_by_its_forward(fault, device, watch):
    model = net()
    model.fault = fault
    with attached(model, device):
        alarm = watch(model, steps=3)
        found = train(model, alarm, adam(model), 3)
    assert {idle.name for idle in found} == {"first.lora_A.default", "first.lora_B.default"}
    for idle in found:
        assert idle.gradient == "none" and FORWARDS[fault] in idle.cause
    assert not any(module._forward_hooks for module in model.first.modules())


def test_a_module_that_does_not_run_is_told(watch):
    model = net()
    model.fault = "skip"
    found = train(model, watch(model, steps=2), adam(model), 2)
    assert {idle.name for idle in found} == {"second.lora_A.default", "second.lora_B.default"}
    assert "'second' did not run" in found[0].cause


def test_a_result_that_does_not_depend_on_the_parameter_is_told(watch):
    model = net()
    model.second.forward = lambda x: x * 2
    found = train(model, watch(model, steps=2), adam(model), 2)
    # The input requires a gradient, so the result does: it is the loss that lacks the parameter.
    assert "what 'second' returned does not reach the loss" in found[0].cause
    model.first.forward = lambda x: x * 2
    alarm = watch(model, steps=2)
    loss = [model(torch.ones(1, WIDTH)).sum() for _ in range(2) if not alarm.step()]
    assert not loss[0].requires_grad
    assert "what 'first' returned did not depend on it" in alarm.idle["first.lora_A.default"].cause


def test_in_one_step_there_is_nothing_to_suspect_with(watch):
    model = net()
    alarm = watch(model, steps=1)
    (found, *_) = alarm.step()
    assert found.cause == "it has had no gradient" and found.steps == 1


def test_a_gradient_of_zero_by_a_factor_is_told(watch):
    model = net()
    model.fault = "times zero"
    found = train(model, watch(model, steps=2), adam(model), 2)
    zero = {idle.name: idle for idle in found if idle.name.startswith("first")}
    assert zero["first.lora_B.default"].gradient == "zero"
    assert "multiplied by zero" in zero["first.lora_B.default"].cause


def test_an_optimizer_of_other_parameters_is_told(watch):
    model = net()
    optimizer = adam(model)
    name = "default"
    for layer in (model.first, model.second):  # as a loader that assigns does
        layer.lora_A[name] = nn.Parameter(layer.lora_A[name].detach().clone())
    alarm = watch(model, steps=2)
    found = train(model, alarm, optimizer, 2)
    assert {idle.name for idle in found} == {"first.lora_A.default", "second.lora_A.default"}
    assert "no optimizer that stepped holds it, and 2 parameters" in found[0].cause
    partial = torch.optim.SGD([model.first.lora_B[name]], lr=0.1)
    found = train(model, watch(model, steps=2), partial, 2)
    assert {idle.cause for idle in found} == {"no optimizer that stepped holds it"}


def test_an_optimizer_that_does_not_step_is_told_from_a_scaler_that_skips(device, watch):
    model = net()
    with attached(model, device):
        idle = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        alarm = watch(model, steps=2)
        for _ in range(2):
            model(torch.randn(2, WIDTH, device=device)).sum().backward()
            alarm.step()
        assert {each.cause for each in alarm.idle.values()} == {"no optimizer stepped"}
        del idle


def test_steps_that_a_scaler_skipped_are_told(watch):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    alarm = watch(model, steps=2, scaler=scaler)
    found = train(model, alarm, adam(model), 2, scaler, factor=float("inf"))
    assert found and all("the scaler skipped every step" in idle.cause for idle in found)
    assert "fell from 1.04858e+06 to 262144" in found[0].cause
    assert found[0].gradient == "not finite"


def test_a_learning_rate_of_zero_and_steps_too_small_for_the_dtype_are_told(watch):
    model = net()
    found = train(model, watch(model, steps=2), adam(model, 0.0), 2)
    assert "the learning rate of its group is 0" in {idle.cause for idle in found}
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(100.0)
    alarm = watch(model, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        alarm.step()
    idle = alarm.idle["weight"]
    assert idle.gradient == "nonzero" and "smaller than bfloat16 can tell" in idle.cause


def test_gradients_that_are_not_finite_without_a_scaler_are_told(watch):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.bias.fill_(float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alarm = watch(model, steps=1)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    alarm.step()
    assert "its gradient is not finite" in alarm.idle["weight"].cause


def test_what_was_frozen_since_is_told_and_what_moves_again_is_taken_off(watch):
    model = net()
    alarm = watch(model, steps=2)
    optimizer = adam(model)
    parameter = model.first.lora_A["default"].requires_grad_(False)
    (found,) = train(model, alarm, optimizer, 2)
    assert found.name == "first.lora_A.default" and "frozen since" in found.cause
    assert train(model, alarm, optimizer, 2) == []  # once
    assert alarm.idle["first.lora_A.default"].steps == 4
    parameter.requires_grad_(True)
    train(model, alarm, optimizer, 2)
    assert alarm.idle == {}


def test_a_change_is_seen_wherever_it_is_and_whoever_makes_it(watch):
    for shape in [(3,), (), (100, 90), (9000,), (7, 30, 40), (0,)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex128):
            model = nn.Module()
            model.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
            alarm = watch(model, steps=1)
            assert len(alarm.step()) == 1
            if model.weight.numel():
                model.weight.data.view(-1)[-1] += 1 / 64
                alarm.step()
                assert alarm.idle == {}, (shape, dtype)
                # Two values that change places: no sum over all of them would tell.
                model.weight.data.view(-1)[[0, -1]] = model.weight.data.view(-1)[[-1, 0]].clone()
                alarm.step()
                assert bool(alarm.idle) == (model.weight.numel() < 2), (shape, dtype)


def test_a_parameter_that_is_ignored_or_comes_later(watch):
    model = net()
    alarm = watch(model, steps=1, ignore=["lora_B", "second"])
    assert [idle.name for idle in alarm.step()] == ["first.lora_A.default"]
    model.later = nn.Parameter(torch.ones(2))
    assert alarm.step() == []
    assert [idle.name for idle in alarm.step()] == ["later"]


def test_steps_count_from_the_last_change(watch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alarm = watch(model, steps=2)
    for rate in (0.1, 0.0, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            alarm.step()
    assert [idle.steps for idle in alarm.idle.values()] == [4, 4]


def test_each_window_looks_at_forwards_of_its_own():
    model = net()
    alarm = IdleAlarm(model, steps=2)
    for fault, cause in (("detach", "does not reach the loss"), ("no_grad", "switched off")):
        model.fault = fault
        train(model, alarm, adam(model), 2)
        assert cause in alarm.idle["first.lora_A.default"].cause
        assert not model.first._forward_hooks
    alarm.close()


def test_gradients_that_are_cleared_before_the_alarm_looks_were_there(watch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    alarm = watch(model, steps=2)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        alarm.step()
    assert [idle.gradient for idle in alarm.idle.values()] == ["nonzero"] * 2
    assert "the learning rate of its group is 0" in alarm.idle["weight"].cause


def test_parameters_that_no_module_with_a_forward_holds_are_watched(watch):
    model = nn.ParameterDict({"one": torch.ones(2)})
    alarm = watch(model, steps=2)
    assert alarm.step() == []
    assert [idle.name for idle in alarm.step()] == ["one"]


def test_an_optimizer_without_a_learning_rate_is_not_blamed_for_it(watch):
    class Still(torch.optim.Optimizer):
        def step(self):
            pass

    model = nn.Linear(2, 2)
    alarm = watch(model, steps=1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = Still(model.parameters(), {})
    optimizer.step()
    alarm.step()
    assert "steps are smaller than float32 can tell" in alarm.idle["weight"].cause


def test_a_half_of_a_lora_that_is_not_zero_is_not_one_of_two_zeros(watch):
    model = LoRA()
    with torch.no_grad():
        model.lora_A["default"].zero_()
        model.lora_B["default"].fill_(1.0)
    still = {"params": [model.lora_A["default"]], "lr": 0.0}
    optimizer = torch.optim.SGD([still, {"params": [model.lora_B["default"]]}], lr=0.1)
    found = train(model, watch(model, steps=1), optimizer, 1)
    causes = {idle.name: idle.cause for idle in found}
    assert "the learning rate of its group is 0" in causes["lora_A.default"]
    assert "what it computes is multiplied by zero" in causes["lora_B.default"]


@pytest.mark.parametrize("wrap", [lambda y: {"y": y}, lambda y: ["text", y], lambda y: ({}, [y])])
def test_what_a_module_returns_is_looked_through(wrap, watch):
    class Wraps(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    model = nn.ModuleList([Wraps(2, 2)])
    alarm = watch(model, steps=2)
    for _ in range(2):
        model[0](torch.ones(1, 2))
        alarm.step()
    assert "what '0' returned does not reach the loss" in alarm.idle["0.weight"].cause


def test_gradients_that_are_sparse_or_of_nothing_are_told(watch):
    model = nn.ModuleDict({"rows": nn.Embedding(5, 2, sparse=True)})
    model.none = nn.Parameter(torch.empty(0))
    alarm = watch(model, steps=1)
    y = model["rows"](torch.tensor([1, 1]))
    ((y * torch.tensor([[1.0], [-1.0]])).sum() + model.none.sum()).backward()
    assert {idle.name: idle.gradient for idle in alarm.step()} == {
        "rows.weight": "zero",  # the two for one row are one another's end
        "none": "zero",
    }
    model["rows"](torch.tensor([1])).sum().backward()
    alarm.step()
    assert alarm.idle["rows.weight"].gradient == "nonzero"


def test_of_a_small_tensor_every_value_is_kept(watch):
    model = nn.ParameterList([torch.ones(4096)])
    model[0].data[0] = 2
    alarm = watch(model, steps=1)
    model[0].data[:2] = torch.tensor([1.0, 2.0])
    assert alarm.step() == []


def test_findings_go_to_a_callback_in_the_place_of_the_log(caplog):
    model = nn.Linear(2, 2)
    seen = []
    alarm = IdleAlarm(model, steps=1, on_alarm=seen.append)
    with caplog.at_level(logging.WARNING):
        found = alarm.step()
    assert seen == [found] and not caplog.records
    assert alarm.step() == [] and seen == [found]  # nothing new

    def stop(found):
        raise RuntimeError("idle")

    alarm.close()
    alarm = IdleAlarm(model, steps=1, on_alarm=stop)
    with pytest.raises(RuntimeError, match="idle"):
        alarm.step()
    alarm.close()


def test_many_of_one_cause_are_one_line(caplog, watch):
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    alarm = watch(model, steps=1)
    with caplog.at_level(logging.WARNING):
        assert len(alarm.step()) == 8
    (record,) = caplog.records
    assert "0.weight, 0.bias, 1.weight, 1.bias and 4 more: not changed" in record.getMessage()
    caplog.clear()
    watch(model[:2], steps=1).step()
    assert "1.bias: not changed for 1 steps: it has had no gradient; look" in caplog.text


def test_an_alarm_that_nobody_holds_is_gone():
    from torch.optim import optimizer as torch_optimizer

    gc.collect()
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    alarm = IdleAlarm(nn.Linear(2, 2))
    assert len(hooks) == before + 1 and alarm.steps == 20
    del alarm
    gc.collect()
    assert len(hooks) == before
    model = net()
    alarm = IdleAlarm(model, steps=3)
    alarm.step()
    assert model.first._forward_hooks
    del alarm
    gc.collect()
    assert len(hooks) == before and not model.first._forward_hooks


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match=f"steps={steps!r} is not a number of steps"):
        IdleAlarm(nn.Linear(2, 2), steps=steps)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="Linear has no trainable parameter to watch"):
        IdleAlarm(nn.Linear(2, 2).requires_grad_(False))


def test_closed_in_the_middle_it_leaves_no_hook_behind():
    model = net()
    model.fault = "skip"
    alarm = IdleAlarm(model, steps=9)
    train(model, alarm, adam(model), 1)
    assert model.second._forward_hooks
    alarm.close()
    assert not model.second._forward_hooks
