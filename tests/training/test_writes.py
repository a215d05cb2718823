"""After any write to the masters, with no call to us, the next forward is the resident's."""

from __future__ import annotations

import copy
import threading

import models
import pytest
import torch
from equality import (
    Through,
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    is_simulated,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.model.witness import Witness


@pytest.fixture(autouse=True)
def copies_are_made_at_once(sim):
    """A copy that the simulator makes as late as it may would have the new bytes by chance."""
    with sim.schedule(sim.Schedule.EAGER):
        yield


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)
    )


def load_state(model):
    model.load_state_dict({k: v * 1.5 + 0.25 for k, v in copy.deepcopy(model.state_dict()).items()})


def load_assign(model):
    state = {k: v * 1.5 for k, v in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state, assign=True)


def data_copy(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5 + 1)


def data_add(model):
    for parameter in model.parameters():
        parameter.data += 0.125


def data_replace(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def swap(model):
    """An EMA swap: other tensors in, then the old ones back."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 3
    model._kept = kept


def swap_back(model):
    for parameter, old in zip(model.parameters(), model.__dict__.pop("_kept"), strict=True):
        parameter.data = old


def numpy_write(model):
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 0.75


def in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def prune(model):
    """The same address and strides, fewer rows."""
    for parameter in model[-1].parameters():
        parameter.data = parameter.data[: len(parameter) // 2]


WRITES = [
    load_state,
    load_assign,
    data_copy,
    data_add,
    data_replace,
    swap,
    numpy_write,
    in_place,
    prune,
]


def step(model):
    x = torch.randn(5, 64).to(models.compute_device(model)).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_the_next_forward_sees_a_write(device, write, trainable, percent):
    managed = build().requires_grad_(trainable)
    resident = copy.deepcopy(managed)
    with attached(managed, device, offload_percent=percent):
        assert_models_agree(managed, resident, step, device=device)
        for _ in range(2):
            apply_to_both(write, managed, resident, device)
            assert_models_agree(managed, resident, step, device=device)
            if write is swap:
                apply_to_both(swap_back, managed, resident, device)
                assert_models_agree(managed, resident, step, device=device)


def set_data(make):
    """Replace the memory of one parameter."""

    def replace(layer, name):
        parameter = getattr(layer, name)
        parameter.data = make(parameter.data)

    return replace


REPLACED = {
    "values": set_data(lambda data: data * 2),
    "fewer rows": set_data(lambda data: data[:1]),
    "transposed": set_data(lambda data: data.t()),
    "other dtype": set_data(lambda data: data.view(torch.float16)),
    "parameter": lambda layer, name: setattr(
        layer, name, nn.Parameter(getattr(layer, name).detach() * 2)
    ),
    "parameter of the same memory": lambda layer, name: setattr(
        layer, name, nn.Parameter(getattr(layer, name).data)
    ),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_tensor_of_a_layer_is_replaced(name, what):
    """The other one stays as it was; gradients go to the parameter that is there now."""
    if what == "other dtype" and name == "bias":
        pytest.skip("weight and bias have one dtype")
    torch.manual_seed(0)
    # One row of weights leaves nothing that a bias of eight could be added to.
    bias = name == "bias" or what not in ("fewer rows", "other dtype")
    kind = torch.bfloat16 if what == "other dtype" else torch.float32
    managed = nn.Sequential(nn.Linear(8, 8, bias=bias)).to(kind)
    resident = copy.deepcopy(managed)

    def step(model):
        y = model(torch.ones(2, 8, dtype=model[0].weight.dtype))
        (y * torch.arange(1.0, y.shape[1] + 1)).sum().backward()
        return [y]

    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, step)
        for model in (managed, resident):
            REPLACED[what](model[0], name)
        assert_models_agree(managed, resident, step)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "lay_out",
    [lambda t: t[:1].expand(t.shape), lambda t: torch.cat([t, t], -1)[..., ::2]],
    ids=["one element repeated", "every other element"],
)
def test_memory_with_gaps_or_overlaps_is_computed_with_as_it_lies(name, lay_out):
    """No copy of it travels, so it keeps its layout, which decides the last bits."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    resident = copy.deepcopy(managed)

    def step(model):
        x = torch.randn(2, 8, requires_grad=True)
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in model.parameters())]

    with attached(managed, "cpu", offload_percent=0.0) as manager:
        assert_models_agree(managed, resident, step, steps=1)
        for model in (managed, resident):
            set_data(lay_out)(model[0], name)
        before = manager.state.engine.stats()["acquires"]
        for number in range(2):
            torch.manual_seed(number)
            expected = step(resident)
            torch.manual_seed(number)
            assert_same(step(managed), expected)
        # The other layer is managed still, and this one not: forward and backward, twice.
        assert manager.state.engine.stats()["acquires"] - before == 4


def apply_to_both(write, managed, resident, device):
    resident.to("cpu")
    write(managed)
    write(resident)
    resident.to(device)


def bitsandbytes_adamw(parameters):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=16)


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "bitsandbytes": bitsandbytes_adamw,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_optimizers_train_alike(device, make, percent):
    """The optimizer steps on the host masters; the next forward uses what it wrote."""
    managed = build()
    resident = copy.deepcopy(managed).to(device)
    optimizer = make(list(managed.parameters()))
    other = make(list(resident.parameters()))
    with attached(managed, device, offload_percent=percent):
        for number in range(4):
            torch.manual_seed(number)
            expected = step(resident)
            torch.manual_seed(number)
            with Witness(declare=device == "cpu"):
                found = step(managed)
                assert_same(found, expected, "result")
                assert_same(gradients(managed), gradients(resident), "gradient")
                optimizer.step()
            if device == "cpu":
                other.step()
            else:  # a CUDA optimizer rounds differently from the host's, which is the managed one
                resident.load_state_dict(managed.state_dict())
            optimizer.zero_grad()
            other.zero_grad()
            assert_same(list(managed.parameters()), list(resident.parameters()), "weights")


@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_a_step_after_sampling_alone_is_no_race(device, percent):
    """No gradient arrives that would tell the host of the copies; the fixture finds no report."""
    managed = build()
    with attached(managed, device, offload_percent=percent) as manager:
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            step(managed)
            with Witness(declare=is_simulated(device)), torch.no_grad():
                before = manager.state.engine.stats()["h2d_copies"]
                managed(torch.randn(5, 64, device=device))
                assert manager.state.engine.stats()["h2d_copies"] > before
                optimizer.step()


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_autocast_casts_what_was_written(trainable):
    """The casts of one region are of no use in the next, with a gradient and without."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 8))
    managed.requires_grad_(trainable)
    resident = copy.deepcopy(managed)

    def step(model):
        x = torch.randn(2, 3, 5, 5, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            with torch.no_grad():
                sampled = model(x)
        y.float().square().sum().backward()
        return [y, sampled, x.grad]

    with attached(managed, "cpu", offload_percent=0.0):
        for _ in range(3):
            assert_models_agree(managed, resident, step, steps=1)
            in_place(managed)
            in_place(resident)


@pytest.mark.parametrize("safe", [False, True], ids=["unsafe", "safe"])
def test_peft_merges_and_unmerges(safe):
    """peft writes through .data, which bumps no version."""
    torch.manual_seed(0)
    managed = models.lora(models.flux(), ["to_q", "to_v", "proj_out"])
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, models.flux_step)
        for step in (lambda one: one.merge(safe_merge=safe), lambda one: one.unmerge()) * 2:
            for model in (managed, resident):
                for module in adapters(model):
                    step(module)
            assert_models_agree(managed, resident, models.flux_step)


def test_diffusers_fuses_and_unfuses_lora():
    torch.manual_seed(0)
    managed = models.lora(models.flux(), ["to_q", "to_v"])
    managed._hf_peft_config_loaded = True
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, models.flux_step)
        for step, options in (("fuse_lora", {"lora_scale": 0.5}), ("unfuse_lora", {})):
            for model in (managed, resident):
                getattr(model, step)(**options)
            assert_models_agree(managed, resident, models.flux_step)


def adapters(model):
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def forward(model):
    return [model(torch.ones(2, model[0].in_features))]


def sample(model):
    with torch.no_grad():
        return forward(model)


@pytest.mark.parametrize("how", ["refresh", "verify"])
def test_a_write_that_the_samples_miss_is_made_visible(monkeypatch, how):
    """One element, through numpy."""
    if how == "verify":  # which hashes everything
        monkeypatch.setenv("ORACLE_OFFLOAD_VERIFY", "1")
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0) as manager:
        for row in range(3):
            assert_models_agree(managed, resident, sample)
            for model in (managed, resident):
                model[0].weight.detach().numpy()[row, 13] += 8.0
            if how == "refresh":
                manager.refresh()
        assert_models_agree(managed, resident, sample)


def test_an_in_place_change_before_backward_is_an_error(device):
    """In autograd's words: the input gradient needs the weight that forward used."""
    for write in (in_place, data_replace):
        model = build().requires_grad_(False)
        with attached(model, device):
            x = torch.randn(3, 64, device=device, requires_grad=True)
            loss = model(x).sum()
            write(model)
            with pytest.raises(oracle_offload.StaleWeightsError, match="inplace operation"):
                loss.backward()


@pytest.mark.parametrize("wants", ["input", "weight", "bias"])
def test_conv2d_refuses_whatever_gradient_after_an_in_place_change(wants):
    """As torch does, which keeps the weight for each: only Linear's own need it not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3)).requires_grad_(False)
    x = torch.randn(1, 2, 5, 5)
    {"input": x, "weight": model[0].weight, "bias": model[0].bias}[wants].requires_grad_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        backward_after(in_place, copy.deepcopy(model), x)
    with attached(model, "cpu"):
        for write in (in_place, data_replace):
            with pytest.raises(oracle_offload.StaleWeightsError, match="inplace operation"):
                backward_after(write, model, x)


def backward_after(write, model, x):
    loss = model(x).sum()
    write(model)
    loss.backward()


# ---- writes that no sample of a master can be relied upon to see ----


def one_element(parameter, index):
    with torch.no_grad():
        parameter.view(-1)[index] += 8.0


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_element_written_through_torch_is_seen(name):
    """Its version tells."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(16, 16384)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        for index in range(5, 16384, 2113):
            for model in (managed, resident):
                one_element(getattr(model[0], name), index)
            assert_models_agree(managed, resident, sample, steps=1)


def a_linear(width):
    return nn.Linear(width, width, bias=False), torch.ones(2, width)


def a_conv2d(width):
    return nn.Conv2d(width, width, 1, bias=False), torch.ones(1, width, 1, 2)


LAYERS = pytest.mark.parametrize("build_layer", [a_linear, a_conv2d], ids=["linear", "conv2d"])


class Encoded(nn.ModuleList):
    """Half of its layers encode, without a gradient, what the other half is trained on."""

    def forward(self, x, mode):
        with torch.set_grad_enabled(mode != "sampling"):
            for number, layer in enumerate(self):
                if mode == "training" and number == 12:
                    x = x.detach().requires_grad_()
                x = torch.tanh(layer(x))
        if mode == "training":
            x.square().sum().backward()
        return x


@LAYERS
@pytest.mark.parametrize("mode", ["sampling", "forward", "training"])
def test_one_element_written_after_its_copy_was_fetched_ahead_is_seen(mode, build_layer):
    """Each layer of a unit has the version of its copy, also where it has not computed yet."""
    torch.manual_seed(0)
    managed = Encoded(build_layer(64)[0] for _ in range(24)).requires_grad_(False)
    resident = copy.deepcopy(managed)

    def step(model):
        _, x = build_layer(64)
        return [model(x.requires_grad_(mode == "forward"), mode)]

    with attached(managed, "cpu", offload_percent=1.0) as manager:
        unit = [layer for layer in manager.layers if layer.unit == manager.layers[0].unit]
        assert len(unit) > 2
        assert_models_agree(managed, resident, step, steps=3)
        for number, index in enumerate(range(5, 64 * 64, 64 * 64 // 13)):
            for model in (managed, resident):
                one_element(model[number % len(unit)].weight, index)
            assert_models_agree(managed, resident, step, steps=1)


@LAYERS
@pytest.mark.parametrize("trained", [False, True], ids=["sampling", "forward"])
def test_one_element_written_after_the_copy_that_another_layers_use_began_is_seen(
    build_layer, trained
):
    """The copy brings the whole unit: its other layers have the version of that moment, too."""
    torch.manual_seed(0)
    (first, x), (second, _) = build_layer(64), build_layer(64)
    managed = nn.Sequential(first, second).requires_grad_(False)
    resident = copy.deepcopy(managed)

    def step(model, index):
        y = model[0](x.detach().requires_grad_(trained))
        one_element(model[1].weight, index)
        return [model[1](y)]

    with attached(managed, "cpu", offload_percent=1.0) as manager:
        assert len({layer.unit for layer in manager.layers}) == 1 and len(manager.layers) == 2
        assert_same([managed(x)], [resident(x)])
        for index in range(5, 64 * 64, 64 * 64 // 13):
            manager.refresh()  # the copy is begun by the first layer's own use
            assert_same(step(managed, index), step(resident, index))


@pytest.mark.parametrize("what", ["data", "parameter", "bias"])
@pytest.mark.parametrize("call", ["cuEventCreate", "cuStreamWaitEvent"])
def test_new_memory_that_could_not_be_adopted_is_adopted_by_the_next_forward(sim, call, what):
    """A fault between the swap and the engine's answer must not hide the swap."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    x = torch.randn(2, 64)
    with attached(managed, "cpu", offload_percent=1.0) as manager:
        assert len(manager.layers) == 2
        assert_same([managed(x)], [resident(x)])
        for model in (managed, resident):
            new = model[1].weight.data * 3
            if what == "data":
                model[1].weight.data = new
            elif what == "bias":
                model[1].bias = None
            else:
                model[1].weight = nn.Parameter(new, requires_grad=False)
        with sim.fault(call, 1, 2), pytest.raises(oracle_offload.OffloadError, match=call):
            managed(x)
        for _ in range(3):
            assert_same([managed(x)], [resident(x)])


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
@LAYERS
def test_one_row_written_after_backward_is_seen(build_layer, reentrant, autocast):
    """A trainable master may be rewritten in any way once its backward has ended."""
    torch.manual_seed(0)
    layer, x = build_layer(512)
    x.requires_grad_()
    managed, resident = nn.Sequential(layer), copy.deepcopy(nn.Sequential(layer))

    def step(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            y.float().square().sum().backward()
        return [y]

    with attached(managed, "cpu", offload_percent=0.0):
        for row in range(3, 512, 101):
            assert_models_agree(managed, resident, step, steps=1)
            for model in (managed, resident):
                model[0].weight.detach().numpy()[row] += 1.0


@pytest.mark.parametrize("when", ["trainable", "unfrozen after attach"])
def test_one_row_trained_by_a_fused_optimizer_is_seen(when):
    """It bumps no version, and no graph task ended before it: the gradient was set by hand."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512, bias=False)).requires_grad_(when == "trainable")
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, forward)
        for model in (managed, resident):
            model.requires_grad_(True)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=1.0, fused=True) for m in (managed, resident)
        ]
        for row in range(3, 512, 101):
            for model, optimizer in zip((managed, resident), optimizers, strict=True):
                version = model[0].weight._version
                model[0].weight.grad = torch.zeros(512, 512)
                model[0].weight.grad[row] = 1.0
                optimizer.step()
                assert model[0].weight._version == version, "torch says so now: test it otherwise"
            assert_models_agree(managed, resident, forward, steps=1)


def test_one_row_written_by_hand_between_two_backwards_is_seen():
    """No optimizer stepped, no version tells, and samples may miss it: copies end with backward."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512, bias=False))
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        for row in range(3, 512, 101):
            for model in (managed, resident):
                forward(model)[0].sum().backward()  # gradients are accumulated
                version = model[0].weight._version
                model[0].weight.detach().numpy()[row] += 1.0
                assert model[0].weight._version == version
            assert_models_agree(managed, resident, forward, steps=1)


@pytest.mark.parametrize("goes_on", ["trains", "validates"])
def test_one_row_written_after_a_validation_is_seen(device, goes_on):
    """A forward that nothing records says nothing of who writes next, through .data by row."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 8))
    resident = copy.deepcopy(managed)
    x = torch.ones(2, 512)
    with attached(managed, device, offload_percent=0.0) as manager:
        assert len(manager.layers) == 2
        sides = [(managed, x.to(device)), (resident, x)]
        for row in range(3, 512, 101):
            for model, given in sides:
                model(given).sum().backward()  # no optimizer steps
            for _ in range(2):
                with torch.no_grad():
                    found, expected = [model(given).cpu() for model, given in sides]
                assert torch.equal(found, expected), "validation"
                for model, _ in sides:
                    version = model[0].weight._version
                    model[0].weight.data[row] += 1.0
                    model[0].weight.data[row] *= 1.5
                    assert model[0].weight._version == version
                row += 1
            with torch.set_grad_enabled(goes_on == "trains"):
                found, expected = [model(given).cpu() for model, given in sides]
            assert torch.equal(found, expected), goes_on


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "ckpt"])
def test_weights_are_fetched_ahead_in_the_second_micro_batch_of_a_step(reentrant):
    """The first use of a forward tells that it is one of training, wherever it is recorded."""
    torch.manual_seed(0)
    blocks = (nn.Linear(64, 64) for _ in range(24))
    model = nn.Sequential(nn.Embedding(32, 64), models.Tower(*blocks, reentrant=reentrant))
    ids = torch.arange(8)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        assert "0" in [layer.name for layer in manager.layers]
        units = {layer.unit for layer in manager.layers if layer.needs_place}
        assert len(units) > 4
        late = []
        for _ in range(4):  # no optimizer steps
            y = model(ids)
            late.append(manager.state.engine.stats()["late"])
            y.sum().backward()
            late.append(manager.state.engine.stats()["late"])
        assert late[-2] - late[-3] < len(units) / 2, (late, units)


def test_optimizers_that_step_inside_backward_train_alike():
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    managed = build()
    resident = copy.deepcopy(managed)
    for model in (managed, resident):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    for percent in (0.0, 1.0):
        with attached(managed, "cpu", offload_percent=percent):
            assert_models_agree(managed, resident, step, steps=2)
            assert_same(list(managed.parameters()), list(resident.parameters()), "weights")


@pytest.mark.parametrize("lay_out", [lambda t: t * 2, lambda t: (t * 2).t()], ids=["row", "column"])
def test_a_layer_called_while_another_thread_follows_its_weight_takes_the_new_one(lay_out):
    """Between the engine's move and the layer's, address, layout and version are of two weights."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8, bias=False)).requires_grad_(False)
    x = torch.randn(2, 8)
    found = []
    with attached(managed, "cpu", offload_percent=0.0) as manager:
        managed(x)
        state, engine = manager.state, manager.state.engine
        checked, moved, real_stream = threading.Event(), threading.Event(), state.stream

        def stream():
            """Hold the other thread between its look at the weight and what it borrows."""
            if threading.current_thread() is thread:
                checked.set()
                moved.wait(30)
            return real_stream()

        def move_member(*arguments):
            answer = engine.move_member(*arguments)
            moved.set()
            thread.join(0.2)  # it has borrowed by then, or waits
            return answer

        state.stream, state.engine = stream, Through(engine, move_member=move_member)
        thread = threading.Thread(target=lambda: found.append(managed(x)))
        thread.start()
        assert checked.wait(30)
        managed[0].weight.data = lay_out(managed[0].weight.data)
        expected = torch.nn.functional.linear(x, managed[0].weight)
        found.append(managed(x))
        thread.join(30)
        state.stream, state.engine = real_stream, engine
        assert len(manager.layers) == 1
    assert len(found) == 2
    for y in found:
        assert torch.equal(y, expected)


def test_a_move_that_the_engine_refuses_leaves_the_layer_as_it_was():
    managed = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(2, 8)
    with attached(managed, "cpu") as manager:
        state, engine = manager.state, manager.state.engine

        def refuse(*arguments):
            raise OffloadError("not now")

        managed(x)
        managed[0].weight.data = managed[0].weight.data * 2
        state.engine = Through(engine, move_member=refuse)
        with pytest.raises(OffloadError, match="not now"):
            managed(x)
        state.engine = engine
        expected = torch.nn.functional.linear(x, managed[0].weight, managed[0].bias)
        assert torch.equal(managed(x), expected)
        assert manager.layers


class Perturbs(torch.optim.Optimizer):
    """Writes what it is given, without gradients."""

    def __init__(self, parameters, told):
        super().__init__(parameters, {})
        self.told = told

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.told(parameter)
                parameter.data[0] += 1.0


@pytest.mark.parametrize("holds", ["masters", "adapters", "views"])
def test_a_step_that_trains_nothing_waits_where_it_may_write_masters(sim, holds):
    """MeZO's, say; one that holds adapters alone does not wait."""
    model, extra = build().requires_grad_(False), nn.Linear(8, 8)
    resident = copy.deepcopy(model)
    x = torch.randn(4, 64)

    def told(parameter):
        nbytes = parameter.numel() * parameter.element_size()
        sim.host_access(parameter.data_ptr(), nbytes, True)

    with attached(model, offload_percent=1.0) as manager:
        assert manager.layers
        written = {
            "masters": list(model.parameters()),
            "adapters": list(extra.parameters()),
            "views": [nn.Parameter(p.data, requires_grad=False) for p in model.parameters()],
        }[holds]
        optimizer = Perturbs(written, told)
        same = Perturbs(extra.parameters() if holds == "adapters" else resident.parameters(), id)
        plain = torch.optim.SGD(written, lr=0.1)  # which passes over what has no gradient
        for _ in range(3):
            assert torch.equal(model(x), resident(x))
            before = manager.state.engine.stats()["resident_units"]
            plain.step()
            assert manager.state.engine.stats()["resident_units"] == before > 0
            optimizer.step()
            if holds != "adapters":
                same.step()
            left = manager.state.engine.stats()["resident_units"]
            assert left == (before if holds == "adapters" else 0)
        assert torch.equal(model(x), resident(x))
        assert sim.reports() == []


class OfAnotherLibrary(torch.optim.Optimizer):
    def step(self):
        """Train what has a gradient: here nothing is left of it."""


def test_an_optimizer_that_was_given_the_whole_model_copies_none_of_it_again():
    """transformers' Adafactor, bitsandbytes' and others of ``model.parameters()``."""
    model = build().requires_grad_(False)
    head = nn.Linear(8, 8)
    optimizer = OfAnotherLibrary([*model.parameters(), *head.parameters()], {})
    with attached(model, offload_percent=0.0) as manager:
        assert manager.layers
        copied = []
        for _ in range(3):
            head(model(torch.ones(4, 64))).sum().backward()
            optimizer.step()
            copied.append(manager.state.engine.stats()["h2d_bytes"])
        assert copied[0] == copied[-1] > 0


@pytest.mark.parametrize("how", ["writing", "load_state_dict"])
def test_a_write_after_a_forward_that_nobody_waited_for(sim, how):
    """A copy that is still queued does not read what the host writes; the strict witness cannot."""
    model = build().requires_grad_(False)
    other = {key: value * 1.5 + 0.25 for key, value in copy.deepcopy(model.state_dict()).items()}
    manager = oracle_offload.attach(model, "cpu", offload_percent=1.0)
    assert manager.layers
    x = torch.randn(4, 64)

    def write():
        for name, parameter in model.named_parameters():
            nbytes = parameter.numel() * parameter.element_size()
            sim.host_access(parameter.data_ptr(), nbytes, True)
            parameter.data.copy_(other[name])

    try:
        model(x)
        write()  # without either: the race that they close
        assert sim.reports()
        sim.clear_reports()
        manager.refresh()
        model(x)
        if how == "writing":
            with manager.writing():
                write()
        else:
            model.load_state_dict(model.state_dict())
            write()
        assert sim.reports() == []
        resident = build().requires_grad_(False)
        resident.load_state_dict(other)
        assert torch.equal(model(x), resident(x))
    finally:
        sim.clear_reports()
        manager.detach()
        sim.clear_reports()
