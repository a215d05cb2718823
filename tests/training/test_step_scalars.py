"""GradScaler and fused optimizers over weights on the host: no scalar is read before it arrived.

On "cpu" there is nothing to wait for, and the same training shows that nothing else changes. On
"simgpu" what torch copies to the host without waiting holds NaN until somebody waits. `Far` is such
a tensor where the device has to be pretended.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import ClassVar

import pytest
import torch
from equality import assert_same, attached, is_simulated
from torch import nn
from torch.amp import grad_scaler

from oracle_offload import OffloadError
from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.engine import step_scalars
from oracle_offload.engine.engines import open_states
from oracle_offload.train import stream_optimizer

SCALE = 1024.0


def build(between=None):
    """A model with managed weights and, in its norm, resident ones."""
    torch.manual_seed(0)
    between = nn.LayerNorm(16) if between is None else between
    return nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8, bias=False))


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    # There is no fused kernel of this one for CUDA.
    "fused adagrad": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, fused=all(one.device.type != "cuda" for one in p)
    ),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": [one], "lr": 1e-2 / (i + 1)} for i, one in enumerate(p)], fused=True
    ),
    "a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
}


def train(model, make, device, overflows=(), clip=False, unscale=False, accumulate=1):
    """Train six steps with a scaler; gradients overflow in those that are named."""
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=2)
    scales = []
    for number in range(6):
        for part in range(accumulate):
            torch.manual_seed(10 * number + part)
            x = torch.randn(4, 8, device=device)
            loss = model(x).square().mean() * (torch.inf if number in overflows else 1.0)
            scaler.scale(loss).backward()
        if unscale or clip:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert all(p.isfinite().all() for p in model.parameters())
    return scales


@contextlib.contextmanager
def attached_by_the_drop_in(model, device, offload_percent):
    """As AI-Toolkit attaches and detaches."""
    MemoryManager.attach(model, torch.device(device), offload_percent)
    yield
    MemoryManager.detach(model)


def assert_trains_alike(device, make, between=None, attached=attached, **how):
    """Compare with the resident model's training, whose optimizer is the host's, too."""
    managed = build(between)
    before = copy.deepcopy(managed)
    resident = copy.deepcopy(managed)
    if is_simulated(device):
        resident.to(device)
    with attached(managed, device, offload_percent=1.0):
        (state,) = open_states()
        found = train(managed, make, device, **how)
        assert state.engine.stats()["d2h_copies"]  # gradients came to the host
        assert {p.device.type for p in managed[0].parameters()} == {"cpu"}
        assert {p.device.type for p in managed[1].parameters()} in ({device}, set())
        if not is_simulated(device):  # a GPU's optimizer rounds otherwise: the scales alone agree
            assert found == train(resident.to(device), make, device, **how)
            return
        assert found == train(resident, make, device, **how)
        for name, weight in managed.state_dict().items():
            assert_same(weight, resident.state_dict()[name], name)
            assert not torch.equal(weight.cpu(), before.state_dict()[name])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale"])
def test_a_scaled_training_is_the_resident_one(device, make, unscale):
    assert_trains_alike(device, make, unscale=unscale)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_that_overflow_are_skipped(device, make):
    """Gradients overflow on the host and on the device at once: one step is skipped, not two."""
    assert_trains_alike(device, make, overflows=(1, 3, 4))


@pytest.mark.parametrize("overflows", [(), (1, 3, 4)], ids=["", "overflows"])
def test_unscaled_gradients_are_clipped(device, overflows):
    """All on the host: a norm over two devices is summed in another order."""
    for make in OPTIMIZERS.values():
        assert_trains_alike(device, make, nn.Tanh(), overflows=overflows, clip=True)


def test_accumulated_gradients_are_scaled_once(device):
    assert_trains_alike(device, OPTIMIZERS["fused"], accumulate=3)


@pytest.mark.parametrize("overflows", [(), (1, 3, 4)], ids=["", "overflows"])
def test_gradients_are_scaled_through_the_drop_in(device, overflows):
    for make in OPTIMIZERS.values():
        assert_trains_alike(device, make, None, attached_by_the_drop_in, overflows=overflows)


@pytest.mark.parametrize("where", [0, 1, 2], ids=["first on the host", "on the device", "last"])
def test_an_overflow_in_one_parameter_alone_skips_all(device, where):
    """The one that overflows may be on the host or on the device."""
    managed = build()
    before = copy.deepcopy(managed).state_dict()
    with attached(managed, device):
        optimizer = torch.optim.AdamW(managed.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=SCALE)
        scaler.scale(managed(torch.ones(2, 8, device=device)).sum()).backward()
        managed[where].weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == SCALE / 2
        assert_same(managed.state_dict(), before)


def test_an_optimizer_of_its_own_for_each_parameter(device):
    """Each steps in the middle of backward, as soon as its gradient is whole."""
    managed = build()
    resident = copy.deepcopy(managed).to(device)

    def step_in_backward(model):
        for parameter in model.parameters():
            one = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9, fused=True)

            def update(parameter, one=one):
                one.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(update)

    with attached(managed, device, offload_percent=1.0):
        for model in (managed, resident):
            step_in_backward(model)
        for number in range(4):
            for model in (managed, resident):
                torch.manual_seed(number)
                model(torch.randn(4, 8, device=device)).square().sum().backward()
            if not is_simulated(device):
                resident.load_state_dict(managed.state_dict())
            for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
                assert_same(one, other, "weights")


# ---- a device that is pretended ----


class Far(torch.Tensor):
    """A number on a device; what is copied from there without waiting holds NaN."""

    copies: ClassVar = []  # where to, and whether without waiting

    @staticmethod
    def __new__(cls, number):
        far = torch.Tensor._make_wrapper_subclass(cls, (), device="meta")
        far.number = number
        return far

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        assert operator is torch.ops.aten._to_copy.default
        cls.copies.append((kwargs["device"].type, kwargs.get("non_blocking", False)))
        late = kwargs.get("non_blocking") and kwargs["device"].type == "cpu"
        return torch.tensor(torch.nan if late else args[0].number, device=kwargs["device"])


def test_a_copy_that_is_not_waited_for_has_not_arrived():
    assert Far(3.0).to("cpu") == 3.0
    assert Far(3.0).to("cpu", non_blocking=True).isnan()


def parameter():
    """A parameter on the host with a gradient."""
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    return one


@pytest.fixture
def torchs_own(monkeypatch):
    """GradScaler as torch made it."""
    while hasattr(grad_scaler._MultiDeviceReplicator.get, "__wrapped__"):
        get = grad_scaler._MultiDeviceReplicator.get.__wrapped__
        monkeypatch.setattr(grad_scaler._MultiDeviceReplicator, "get", get)


def test_the_scaler_waits_for_what_comes_to_the_host(torchs_own):
    host = torch.device("cpu")
    assert grad_scaler._MultiDeviceReplicator(Far(0.5)).get(host).isnan()
    step_scalars.make_scaler_wait()
    copies = grad_scaler._MultiDeviceReplicator(Far(0.5))
    first = copies.get(host)
    assert first == 0.5
    first.fill_(1.0)  # an overflow is remembered in it
    assert copies.get(host) is first and copies._per_device_tensors == {host: first}
    here = torch.tensor(2.0)
    assert grad_scaler._MultiDeviceReplicator(here).get(host) is not here
    assert copies.get(torch.device("meta")).device.type == "meta"
    assert Far.copies[-1] == ("meta", True)


def functions_of_torch():
    """What is replaced while models are attached: methods, and what the clipping functions wrap."""
    clips = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_
    clips += (nn.utils.clip_grad._get_total_norm,)
    wrapped = [cell.cell_contents for clip in clips for cell in clip.__closure__]
    return [grad_scaler._MultiDeviceReplicator.get, grad_scaler.GradScaler.scale, *wrapped]


def test_what_is_replaced_in_torch_is_put_back_with_the_last_model():
    own = functions_of_torch()
    one, other = (nn.Sequential(nn.Linear(128, 128)) for _ in range(2))
    with attached(one):
        with attached(other):
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            stream_optimizer(optimizer, during_backward=True)
            replaced = functions_of_torch()
            assert not any(new is old for new, old in zip(replaced, own, strict=True))
        assert functions_of_torch() == replaced, "another model is attached"
    assert functions_of_torch() == own
    with attached(one):
        assert functions_of_torch()[0] is not own[0]
    assert functions_of_torch() == own


def test_what_somebody_has_wrapped_since_stays(monkeypatch):
    with attached(nn.Sequential(nn.Linear(128, 128))):
        ours = grad_scaler._MultiDeviceReplicator.get

        def theirs(copies, device):
            return ours(copies, device)

        monkeypatch.setattr(grad_scaler._MultiDeviceReplicator, "get", theirs)
    assert grad_scaler._MultiDeviceReplicator.get is theirs


@pytest.mark.parametrize("lacks", ["class", "attribute"])
def test_a_scaler_of_another_torch_is_left_alone_with_a_warning(
    torchs_own, monkeypatch, caplog, lacks
):
    class Other:
        def __init__(self, master):
            self.value = master

        get = None

    if lacks == "class":
        monkeypatch.delattr(grad_scaler, "_MultiDeviceReplicator")
    else:
        monkeypatch.setattr(grad_scaler, "_MultiDeviceReplicator", Other)
    with caplog.at_level(logging.WARNING, "oracle_offload"):
        step_scalars.make_scaler_wait()
    assert torch.__version__ in caplog.text and "without a GradScaler" in caplog.text
    assert Other.get is None


def test_scales_come_to_the_host_before_a_fused_step():
    optimizer = torch.optim.AdamW([parameter()], fused=True)
    optimizer.grad_scale, optimizer.found_inf = Far(4.0), Far(2.0)
    step_scalars.settle(optimizer)
    assert type(optimizer.grad_scale) is torch.Tensor and optimizer.grad_scale == 4.0
    assert optimizer.found_inf == 1.0  # on two devices
    optimizer.found_inf = Far(0.0)
    step_scalars.settle(optimizer)
    assert optimizer.found_inf == 0.0


@pytest.mark.parametrize("why", ["no gradient", "on the device", "no scales"])
def test_scales_stay_where_nothing_on_the_host_is_trained(why):
    one = parameter()
    if why == "no gradient":
        one.grad = None
    if why == "on the device":
        one = nn.Parameter(torch.ones(2, device="meta"))
        one.grad = torch.ones(2, device="meta")
    optimizer = torch.optim.SGD([one], lr=1e-2)
    scale = optimizer.grad_scale = None if why == "no scales" else Far(4.0)
    step_scalars.settle(optimizer)
    assert optimizer.grad_scale is scale and not hasattr(optimizer, "found_inf")


HYPERPARAMETERS = {
    "lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "betas": lambda p: torch.optim.AdamW(
        p, lr=1e-2, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_hyperparameter_that_would_not_be_waited_for_is_refused(name):
    optimizer = HYPERPARAMETERS[name]([parameter()])
    (group,) = optimizer.param_groups
    step_scalars.settle(optimizer)  # on the host it does no harm
    group[name] = Far(1e-2) if name == "lr" else (Far(0.9), Far(0.99))
    with pytest.raises(OffloadError, match=f"AdamW has {name} in a tensor on meta.*as a number"):
        step_scalars.settle(optimizer)
    group["params"][0].grad = None
    step_scalars.settle(optimizer)
    group["params"][0].grad = torch.ones(2)
    group["fused"] = not group["fused"]  # then torch asks for the number, and waits
    step_scalars.settle(optimizer)


def test_a_tensor_lr_on_the_device_is_refused_before_anything_is_written(device):
    managed = build()
    with attached(managed, device):
        lr = torch.tensor(1e-2, device=device)
        optimizer = torch.optim.AdamW(managed.parameters(), lr=lr, fused=True)
        managed(torch.ones(2, 8, device=device)).sum().backward()
        before = copy.deepcopy(managed[0].state_dict())
        if device == "cpu":
            optimizer.step()
            return
        with pytest.raises(OffloadError, match=f"has lr in a tensor on {device}"):
            optimizer.step()
        assert_same(managed[0].state_dict(), before)
