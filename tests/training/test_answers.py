"""To everybody else an attached model is on the device; a copy, and what detach leaves, on one."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import models
import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.optim.swa_utils import AveragedModel

import oracle_offload
from oracle_offload.engine import optimizer_states
from oracle_offload.layers.managed import HANDLE, is_managed
from oracle_offload.model import residents
from oracle_offload.model.witness import Witness

WIDTH = 160


class Located(nn.Module):
    """Says where it is as transformers' and diffusers' models do."""

    @property
    def device(self):
        """Where the first parameter is."""
        return next(self.parameters()).device


class Part(Located):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        return x + self.norm(self.layer(x)) + self.shift


class Model(Located):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.adapter = nn.Linear(WIDTH, 2, bias=False)
        self.tied = self.parts[0].norm

    def forward(self, x):
        x = x + torch.zeros(1, device=self.device)
        for part in self.parts:
            x = part(x).to(part.device)
        return self.tied(x) + self.adapter(x).sum()


class Lent(Located):
    """Lends its own Parameter: a managed module that says where it is."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) @ self.table.to(self.device)


def made(kind=Model):
    torch.manual_seed(0)
    model = kind()
    if kind is Model:
        for parameter in model.parts.parameters():
            parameter.requires_grad_(False)
    return model


def inputs(device):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def devices_of(model):
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


def type_of(device):
    return torch.device(device).type


@pytest.mark.parametrize("kind", [Model, Lent])
def test_it_and_its_parts_are_on_the_device_until_detach(device, kind):
    model, known = made(kind), {}
    for module in model.modules():
        known[module] = type(module)
    with attached(model, device, offload_percent=1.0) as manager:
        assert any(is_managed(module) for module in model.modules())
        for module, before in known.items():
            assert isinstance(module, before)
            assert (type(module).__name__, type(module).__module__) == (
                before.__name__,
                before.__module__,
            )
            if isinstance(module, Located):
                assert module.device == manager.device
        assert model.__class__.device.__doc__ == "Where the first parameter is."
        for _ in range(2):
            model(inputs(device))
        with Witness():
            model(inputs(device))
    assert {module: type(module) for module in model.modules()} == known
    assert not [name for name in vars(model) if "oracle_offload" in name or "manager" in name]
    assert model.device.type == "cpu"


@pytest.mark.parametrize("to", [None, "there"])
def test_after_detach_all_of_it_is_on_one_device(device, to):
    model = made()
    resident = copy.deepcopy(model)
    before = dict(model.named_parameters())
    manager = oracle_offload.attach(model, device, offload_percent=1.0)
    for one in (model, resident.to(device)):
        one(inputs(device)).square().mean().backward()
    manager.detach(to=None if to is None else device)
    where = "cpu" if to is None else type_of(device)
    assert devices_of(model) == {where} and model.device.type == where
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {where}
    assert model.tied is model.parts[0].norm
    if to is None or where != "simgpu":  # where torch makes another Parameter
        assert all(p is before[name] for name, p in model.named_parameters())
    assert_same(model(inputs(where)), resident(inputs(device)))


def test_what_was_on_the_device_before_goes_back_there(device):
    model = made().to(device)
    with oracle_offload.attach(model, device, offload_percent=1.0) as manager:
        assert len(manager.layers) == 4 and "cpu" in devices_of(model)
        model(inputs(device))
    assert devices_of(model) == {type_of(device)}
    model(inputs(device))


def test_a_device_without_room_leaves_all_of_it_on_the_host(device, monkeypatch, caplog):
    model, moves = made(), []
    manager = oracle_offload.attach(model, device, offload_percent=1.0)
    model(inputs(device))
    move_residents = oracle_offload.manager.move_residents

    def move(modules, where, **rest):
        moves.append(where.type)
        if len(moves) > 1:
            return move_residents(modules, where, **rest)
        first, *_ = modules = list(modules)
        move_residents([first, *list(modules)[1:4]], where, **rest)
        raise torch.OutOfMemoryError("no room. Whatever else it says.")

    monkeypatch.setattr(oracle_offload.manager, "move_residents", move)
    with caplog.at_level(logging.WARNING, logger="oracle_offload"):
        assert manager.detach(to=device) is model
    assert moves == [type_of(device), "cpu"] and devices_of(model) == {"cpu"}
    assert "has no room for it (no room)" in caplog.text
    assert "_memory_manager" not in vars(model) and model.device.type == "cpu"
    model(inputs("cpu"))


def test_where_to_go_is_asked_before_anything_ends(device):
    model = made()
    with attached(model, device, offload_percent=1.0) as manager:
        with pytest.raises(ValueError, match="device='nowhere'"):
            manager.detach(to="nowhere")
        assert len(manager.layers) == 4
        model(inputs(device))


def check_is_ordinary(copied, model, kind):
    assert type(copied) is kind and devices_of(copied) == {"cpu"}
    assert not [name for name in vars(copied) if "oracle_offload" in name or "manager" in name]
    for part in copied.modules():
        assert HANDLE not in vars(part) and "oracle_offload" not in " ".join(vars(part))
        assert not [name for name in vars(type(part)) if name.startswith("_oracle_offload")]
    for (name, p), (other, q) in zip(
        copied.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other and p.requires_grad == q.requires_grad and p is not q
        assert torch.equal(p, q.to("cpu")) and p.data_ptr() != q.data_ptr()


@pytest.mark.parametrize("kind", [Model, Lent])
def test_a_deep_copy_is_an_ordinary_model_on_the_host(device, kind):
    model = made(kind)
    with attached(model, device, offload_percent=1.0) as manager:
        expected = model(inputs(device)).to("cpu")
        copied, average = copy.deepcopy(model), AveragedModel(model)
        check_is_ordinary(copied, model, kind)
        check_is_ordinary(average.module, model, kind)
        if kind is Model:
            assert copied.tied is copied.parts[0].norm
        assert_same(copied(inputs("cpu")), expected)
        part = copy.deepcopy(model.parts[1]) if kind is Model else copied
        assert devices_of(part) == {"cpu"} and type(part) in (Part, Lent)
        average.update_parameters(model)
        assert_same(model(inputs(device)).to("cpu"), expected)
        assert manager.module is model and model.device.type == type_of(device)
    with attached(copied, device, offload_percent=1.0):
        assert_same(copied(inputs(device)).to("cpu"), expected)


class CopiesItself(Model):
    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def test_a_model_that_copies_itself_does_so(device):
    model = made(CopiesItself)
    with attached(model, device, offload_percent=1.0):
        model(inputs(device))
        check_is_ordinary(copy.deepcopy(model), model, CopiesItself)


@pytest.mark.parametrize("kind", [Model, Lent])
def test_what_a_pickle_makes_is_an_ordinary_model(kind):
    model, kept = made(kind), io.BytesIO()
    with attached(model, "cpu", offload_percent=1.0):
        torch.save(model, kept)
        check_is_ordinary(pickle.loads(pickle.dumps(model)), model, kind)
        for part in model.modules():
            shallow = copy.copy(part)
            assert HANDLE not in vars(shallow) and isinstance(part, type(shallow))
    kept.seek(0)
    check_is_ordinary(torch.load(kept, weights_only=False), model, kind)


class Reduces(Model):
    """Says how it is made, and nothing of its state."""

    def __reduce__(self):
        return made, (type(self),)


def test_a_model_that_says_how_it_is_made_is_copied_so(device):
    model, kept = made(Reduces), io.BytesIO()
    with attached(model, device, offload_percent=1.0):
        expected = model(inputs(device)).to("cpu")
        torch.save(model, kept)
        kept.seek(0)
        loaded = torch.load(kept, weights_only=False)
        for copied in (copy.deepcopy(model), copy.copy(model), loaded):
            assert type(copied) is Reduces and copied is not model
            assert_same(copied(inputs("cpu")), expected)


def test_a_deep_copy_of_a_compiled_model_is_an_ordinary_one(device):
    model, resident = torch.compile(made(), backend="eager"), made()
    with attached(model, device, offload_percent=1.0):
        copied = copy.deepcopy(model)
    assert type(copied) is type(model) and devices_of(copied) == {"cpu"}
    assert_same(copied._orig_mod(inputs("cpu")), resident(inputs("cpu")))


class PassesOn(Located):
    """As peft's: what it lacks is asked of the model that it holds."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_deep_copy_of_what_passes_questions_on_is_of_its_own_class(device):
    model = nn.Sequential(made(PassesOn))
    with attached(model, device, offload_percent=1.0) as manager:
        assert len(manager.layers) == 4
        expected = model(inputs(device)).to("cpu")
        for part, kind in ((model, nn.Sequential), (model[0], PassesOn)):
            copied = copy.deepcopy(part)
            check_is_ordinary(copied, part, kind)
            assert_same(copied(inputs("cpu")), expected)


def test_a_graph_of_all_of_it_may_ask_where_it_is(device):
    model, resident = made(), made().to(device)
    with attached(model, device, offload_percent=1.0):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_same(compiled(inputs(device)), resident(inputs(device)))


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_what_something_holds_moves_where_it_can(trained, caplog):
    """To the meta device: torch re-points no tensor of the host there, nor swaps what is held."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        norms = nn.LayerNorm(4, bias=False), nn.LayerNorm(4), nn.BatchNorm1d(4)
        model = nn.ModuleList(norms)
        model.requires_grad_(False)
        model[1].weight = model[0].weight
        model[0].weight.requires_grad_(trained)
        held = model[0].weight * torch.ones(4, requires_grad=True)
        known = model[0].weight
        with caplog.at_level(logging.WARNING, logger="oracle_offload"):
            residents.move_residents(model.modules(), torch.device("meta"))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert held is not None and model[1].weight is model[0].weight
    left = {name for name, t in model.state_dict().items() if not t.is_meta}
    if trained:
        assert left == {"0.weight", "1.weight"} and model[0].weight is known
        assert "LayerNorm.weight stays on cpu: it is trained" in caplog.text
    else:
        assert not left and not caplog.text


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),  # whose state has other shapes
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizers_state_goes_where_its_parameters_went(device, kind):
    """Loaded before attach; and after detach, on the host again."""
    kind, options = OPTIMIZERS[kind]

    def train(managed):
        model = made()
        model.parts[0].requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = kind(trained, **options)
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        manager = oracle_offload.attach(model, device, offload_percent=1.0) if managed else None
        where = device if managed else "cpu"
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs(where)).square().mean().backward()
            optimizer.step()
            if manager is not None:
                manager.detach()
                manager, where = None, "cpu"
        assert {v.device.type for s in optimizer.state.values() for v in s.values()} == {"cpu"}
        return gradients(model), dict(model.named_parameters())

    assert_same(train(True), train(False))


@pytest.mark.parametrize("counts", ["capturable", "fused", "foreach"])
def test_steps_are_counted_on_the_device_where_the_optimizer_counts_there(counts):
    """As torch brings them when a state dict is loaded."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([parameter])
    optimizer.param_groups[0][counts] = True
    state = optimizer.state[parameter] = {"step": torch.ones(()), "mean": torch.zeros(2)}
    optimizer_states.note_moved([parameter])
    optimizer_states.follow(optimizer)
    assert state["mean"].is_meta
    assert state["step"].is_meta == (counts != "foreach")


def test_generate_of_an_attached_decoder_is_the_residents(device):
    managed = models.llama().eval().requires_grad_(False)
    resident = copy.deepcopy(managed).to(device)
    ids = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(0)).to(device)
    with attached(managed, device, offload_percent=1.0) as manager:
        assert manager.layers and managed.device == managed.model.device == manager.device
        for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
            found, expected = (
                model.generate(ids, max_new_tokens=4, do_sample=False, **options)
                for model in (managed, resident)
            )
            assert_same(found, expected)
