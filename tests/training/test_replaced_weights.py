"""Weights that are replaced after attach: whose memory is locked, whose is given back, and when."""

from __future__ import annotations

import copy
import gc
import types

import numpy
import pytest
import torch
from equality import assert_models_agree, assert_same, attached, gradients, resident_pair
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import oracle_offload
from oracle_offload import _core
from oracle_offload.layers.leaf import Layout, is_plain_master, unfit_tensor
from oracle_offload.layers.managed import HANDLE
from oracle_offload.model import masters

WIDTH = 96


def chain(layers=6, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    parts = [p for _ in range(layers) for p in (nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh())]
    return nn.Sequential(*parts).to(dtype)


def step(model):
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, WIDTH, dtype=dtype, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


def weight_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


_of_others = [0]


@pytest.fixture(autouse=True)
def memory_of_others():
    """Count what is alive already: torch leaks a graph whose full backward hook raised."""
    gc.collect()
    _of_others[0] = _core.live()["buffer_bytes"]


def host_bytes(manager):
    """Masters: bytes locked, bytes that travel though they are not, bytes allocated for them."""
    gc.collect()
    locked = sum(buffer.nbytes for buffer in manager.attachment.buffers if buffer.locked)
    pageable = manager.state.engine.stats()["pageable_bytes"]
    of_gradients = manager.attachment.gradients.locked_bytes
    return locked, pageable, _core.live()["buffer_bytes"] - of_gradients - _of_others[0]


def agree(managed, resident, witness):
    """Two steps alike, seen by the witness or, as users run it, not."""
    if witness:
        assert_models_agree(managed, resident, step)
        return
    for number in range(2):
        found = []
        for model in (managed, resident):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            found.append((step(model), gradients(model)))
        assert_same(*found)


@pytest.fixture(params=[False, True], ids=["plain", "witness"])
def witness(request):
    return request.param


@pytest.fixture(params=[None, 80_000], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(masters, "PIECE_BYTES", request.param)


def other_weights(model, seed):
    torch.manual_seed(seed)
    return {key: torch.randn_like(value) / 10 for key, value in model.state_dict().items()}


# ---- replaced by plain weights ----


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_assigned_weights_are_locked_and_the_old_ones_freed(trainable, witness, pieces, warnings):
    managed, resident = resident_pair(chain().requires_grad_(trainable))
    with attached(managed, "cpu", offload_percent=0.6) as manager:
        agree(managed, resident, witness)
        before = host_bytes(manager)
        for seed in range(3):
            for model in (managed, resident):
                model.load_state_dict(other_weights(model, seed), assign=True)
            agree(managed, resident, witness)
            after = host_bytes(manager)
            assert after == before
        assert not warnings()


def test_a_file_loaded_with_assign_is_locked(tmp_path):
    """torch.load makes storages of its own kind, mapped ones too."""
    managed, resident = resident_pair(chain())
    torch.save(other_weights(managed, 1), tmp_path / "weights.pt")
    with attached(managed, "cpu") as manager:
        for mapped in (False, True):
            for model in (managed, resident):
                model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=mapped), assign=True)
            agree(managed, resident, True)
            assert host_bytes(manager)[1] == 0


def test_weights_that_a_state_dict_holds_too_stay_its_own_and_are_said_to(warnings):
    managed, resident = resident_pair(chain())
    with attached(managed, "cpu") as manager:
        before = host_bytes(manager)
        agree(managed, resident, True)
        held = other_weights(managed, 1)
        for model in (managed, resident):
            model.load_state_dict(copy.deepcopy(held) if model is resident else held, assign=True)
        agree(managed, resident, True)
        assert host_bytes(manager) == (0, weight_bytes(managed), 0), "the old masters went at once"
        (said,) = warnings()
        assert "assign=True" in said and "refresh()" in said
        for model in (managed, resident):
            with torch.no_grad():
                model[0].weight.mul_(2)
        assert torch.equal(held["0.weight"], managed[0].weight), "one memory, as without attach"
        agree(managed, resident, True)
        del held
        manager.refresh()
        agree(managed, resident, True)
        assert host_bytes(manager) == before
        assert len(warnings()) == 1


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_change_of_dtype_frees_the_old_masters(convert, witness, pieces):
    managed, resident = resident_pair(chain())
    with attached(managed, "cpu", offload_percent=0.5) as manager:
        agree(managed, resident, witness)
        for model in (managed, resident):
            getattr(model, convert)()
            model.zero_grad(set_to_none=True)
        locked, pageable, allocated = host_bytes(manager)
        agree(managed, resident, witness)
        padding = 256 * len(list(managed.parameters()))
        assert weight_bytes(managed) <= locked <= weight_bytes(managed) + padding
        assert pageable == 0
        assert allocated == locked
        assert manager.attachment.weight_bytes == weight_bytes(managed)


def test_new_masters_keep_within_the_limit_of_what_is_locked(pieces):
    managed, resident = resident_pair(chain())
    budget = weight_bytes(managed) // 2
    with attached(managed, "cpu", lock=budget) as manager:
        for convert in ("double", "float"):
            for model in (managed, resident):
                getattr(model, convert)()
            agree(managed, resident, True)
            assert host_bytes(manager)[0] <= budget


def test_an_old_master_that_somebody_holds_stays_as_it_was(witness):
    managed, resident = resident_pair(chain())
    with attached(managed, "cpu") as manager:
        agree(managed, resident, witness)
        held = managed[0].weight.data
        values = held.clone()
        for model in (managed, resident):
            model.to(torch.bfloat16)
            model.zero_grad(set_to_none=True)
        agree(managed, resident, witness)
        assert torch.equal(held, values)
        before = host_bytes(manager)[2]
        del held
        manager.refresh()
        assert host_bytes(manager)[2] < before, "it goes with its last holder"


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_weights_that_are_swapped_for_a_while_come_home(trainable, witness, warnings):
    """As an EMA does for an evaluation: nothing is locked again, nothing copied, nothing said."""
    managed, resident = resident_pair(chain().requires_grad_(trainable))
    with attached(managed, "cpu", offload_percent=0.5) as manager:
        agree(managed, resident, witness)
        before = host_bytes(manager)
        for number in range(3):
            kept = []
            for model in (managed, resident):
                shadow = list(other_weights(model, number).values())
                kept.append([p.data for p in model.parameters()])
                for p, values in zip(model.parameters(), shadow, strict=True):
                    p.data = values
            agree(managed, resident, witness)
            for model, data in zip((managed, resident), kept, strict=True):
                for p, values in zip(model.parameters(), data, strict=True):
                    p.data = values
            del kept, data, values, p, shadow
            agree(managed, resident, witness)
            assert host_bytes(manager) == before
        assert not warnings()


def test_weights_whose_predecessors_an_optimizer_holds_are_said_to_be_pageable(warnings):
    managed = chain()
    optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
    with attached(managed, "cpu"):
        managed.load_state_dict(other_weights(managed, 1), assign=True)
        step(managed)
        assert not warnings(), "perhaps it is swapped back"
        optimizer.step()
        (said,) = warnings()
        assert "an optimizer?" in said


def test_a_layer_that_is_not_called_follows_with_the_others():
    model = chain()
    with attached(model, "cpu") as manager:
        before = host_bytes(manager)
        model.load_state_dict(other_weights(model, 1), assign=True)
        model[0](torch.ones(1, WIDTH))
        assert host_bytes(manager) == before


def test_one_of_two_layers_with_one_parameter_is_enough():
    managed = chain()
    managed[2].weight = managed[0].weight
    managed, resident = resident_pair(managed)
    with attached(managed, "cpu") as manager:
        before = host_bytes(manager)
        for model in (managed, resident):
            torch.manual_seed(3)
            model[0].weight = model[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        agree(managed, resident, True)
        after = host_bytes(manager)
        assert after[1] == 0
        assert after[0] <= 2 * before[0]


def test_a_driver_that_fails_while_old_masters_go_costs_no_step(sim, warnings):
    managed, resident = resident_pair(chain())
    with attached(managed, "cpu") as manager:
        before = host_bytes(manager)
        agree(managed, resident, False)
        for model in (managed, resident):
            model.load_state_dict(other_weights(model, 1), assign=True)
        with sim.fault("cuMemHostUnregister", result=701):
            agree(managed, resident, False)
        assert "given back later" in warnings()[0]
        manager.refresh()
        assert host_bytes(manager) == before


# ---- replaced by what is not managed ----


class Quantised(torch.Tensor):
    """As torchao's: a Parameter of a class of its own, that computes as its values do."""

    @staticmethod
    def of(values):
        return nn.Parameter(values.mul(8).round().div(8).as_subclass(Quantised), False)


def quantise(layer):
    layer.weight = Quantised.of(layer.weight.detach())


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("which", ["all", "some"])
def test_quantised_layers_give_their_masters_back(bias, which, witness, monkeypatch, warnings):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)  # a piece for each unit
    managed, resident = resident_pair(chain(bias=bias).requires_grad_(False))
    with attached(managed, "cpu", offload_percent=0.6) as manager:
        agree(managed, resident, witness)
        locked, _, allocated = host_bytes(manager)
        layers = [0, 2, 4, 6, 8, 10] if which == "all" else [2, 6, 8]
        for model in (managed, resident):
            for number in layers:
                quantise(model[number])
        left = 1 - len(layers) / 6
        if not bias:
            assert host_bytes(manager) == (left * locked, 0, left * allocated), "before any forward"
        agree(managed, resident, witness and which == "some")
        assert host_bytes(manager) == (left * locked, 0, left * allocated)
        assert len(manager.layers) == 6 - len(layers)
        assert manager.state.engine.stats()["managed_bytes"] == left * allocated
        for number in layers:
            assert type(managed[number]) is nn.Linear
            assert HANDLE not in managed[number].__dict__
            assert "Quantised" in manager.resident[f"{number}.weight"]
        (said,) = warnings()
        assert "manager.resident" in said
    assert isinstance(managed[2].weight, Quantised)


def test_a_weight_that_somebody_can_put_back_is_not_given_up():
    """Quantised for a while: the Parameter from before is kept, and comes back."""
    managed, resident = resident_pair(chain().requires_grad_(False))
    with attached(managed, "cpu") as manager:
        agree(managed, resident, False)
        before = host_bytes(manager)
        kept = [model[2].weight for model in (managed, resident)]
        for model in (managed, resident):
            quantise(model[2])
        agree(managed, resident, False)
        for model, weight in zip((managed, resident), kept, strict=True):
            model[2].weight = weight
        del kept, weight
        agree(managed, resident, True)
        assert len(manager.layers) == 6
        assert host_bytes(manager) == before


class Packed(nn.Linear):
    """Buffers instead of the weight."""

    def forward(self, x):
        return nn.functional.linear(x, self.packed.to(x.dtype) / 8, self.bias)


def pack(layer):
    layer.__class__ = Packed
    values = layer._parameters.pop("weight").detach().mul(8).round().to(torch.int8)
    layer.register_buffer("packed", values)


def test_a_layer_whose_class_is_replaced_is_let_go(witness, monkeypatch):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)
    managed, resident = resident_pair(chain().requires_grad_(False))
    with attached(managed, "cpu") as manager:
        agree(managed, resident, witness)
        locked, _, allocated = host_bytes(manager)
        units = manager.state.engine.stats()["units"]
        for model in (managed, resident):
            pack(model[2])
        assert HANDLE not in managed[2].__dict__
        assert manager.state.engine.stats()["units"] == units - 1
        agree(managed, resident, witness)
        assert host_bytes(manager) == (locked * 5 / 6, 0, allocated * 5 / 6)
        assert "Packed" in manager.resident["2.bias"]
        assert manager.resident["2.bias"].bytes == 4 * WIDTH
        moved = copy.deepcopy(managed).to("meta")
        assert moved[2].packed.is_meta
    assert type(managed[2]) is Packed
    assert type(managed[0]) is nn.Linear


def test_a_layer_that_is_replaced_while_it_computes_is_let_go_afterwards():
    managed, resident = resident_pair(chain().requires_grad_(False))

    class During(torch.utils._python_dispatch.TorchDispatchMode):
        done = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in str(func) and not self.done:
                self.done = True
                pack(managed[0])
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, WIDTH)
    with attached(managed, "cpu") as manager, torch.no_grad():
        with During() as mode:
            assert torch.equal(managed(x), resident(x))
        assert mode.done
        pack(resident[0])
        assert torch.equal(managed(x), resident(x))
        assert len(manager.layers) == 5
        assert HANDLE not in managed[0].__dict__


def test_a_weight_that_is_taken_away_makes_its_layer_an_ordinary_one():
    managed, resident = resident_pair(chain().requires_grad_(False))
    with attached(managed, "cpu") as manager:
        agree(managed, resident, True)
        for model in (managed, resident):
            prune.l1_unstructured(model[2], "weight", 0.5)
        agree(managed, resident, False)
        assert len(manager.layers) == 5
        assert "taken away" in manager.resident["2.weight_orig"]


@pytest.mark.parametrize("when", ["at once", "after a step"])
@pytest.mark.parametrize("change", ["prune", "parametrize"])
def test_a_bias_that_is_computed_since_makes_its_layer_an_ordinary_one(device, change, when):
    managed, resident = resident_pair(chain())
    resident.to(device)

    def step_there(model):
        x = torch.randn(5, WIDTH).to(device).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    with attached(managed, device) as manager:
        if when == "after a step":
            assert_models_agree(managed, resident, step_there, device=device)
        for model in (managed, resident):
            if change == "prune":
                prune.l1_unstructured(model[2], "bias", 0.5)
            else:
                parametrize.register_parametrization(model[2], "bias", nn.Tanh())
        assert_models_agree(managed, resident, step_there, device=device)
        assert len(manager.layers) == 5
        assert "its bias was taken away" in manager.resident["2.weight"]
        for model in (managed, resident):
            if change == "prune":
                prune.remove(model[2], "bias")
            else:
                parametrize.remove_parametrizations(model[2], "bias")
        assert_models_agree(managed, resident, step_there, device=device)
        managed[4].bias, resident[4].bias = None, None  # which needs none
        assert_models_agree(managed, resident, step_there, device=device)
        assert len(manager.layers) == (6 if change == "prune" else 5)


def test_a_layer_that_is_deleted_gives_its_memory_back(monkeypatch):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)
    model = chain()
    with attached(model, "cpu") as manager:
        locked = host_bytes(manager)[0]
        del model[2]
        gc.collect()
        manager.refresh()
        assert host_bytes(manager)[0] == locked * 5 / 6
        assert len(manager.layers) == 5


def test_detach_keeps_a_class_that_was_derived_from_the_managed_one():
    """A parametrisation that was registered after attach."""
    managed, resident = resident_pair(chain())
    manager = oracle_offload.attach(managed, "cpu")
    for model in (managed, resident):
        torch.manual_seed(0)
        parametrizations.weight_norm(model[2])
    manager.detach()
    assert parametrize.is_parametrized(managed[2])
    agree(managed, resident, False)
    for model in (managed, resident):
        with torch.no_grad():
            model[2].parametrizations.weight.original0.mul_(2)
    agree(managed, resident, False)


def test_what_was_let_go_is_not_managed_by_the_next_attach_unless_it_fits():
    model = chain().requires_grad_(False)
    with attached(model, "cpu"):
        quantise(model[2])
    with attached(model, "cpu") as manager:
        assert len(manager.layers) == 5
        assert "Quantised" in manager.resident["2.weight"]


RESHAPED = {
    "the weight elsewhere": lambda layer: set_data(layer.weight, layer.weight * 2),
    "the bias elsewhere": lambda layer: set_data(layer.bias, layer.bias * 2),
    "the weight turned round": lambda layer: set_data(layer.weight, layer.weight.t()),
    "fewer rows": lambda layer: (
        set_data(layer.weight, layer.weight[:4]),
        set_data(layer.bias, layer.bias[:4]),
    ),
    "one bias for all": lambda layer: set_data(layer.bias, layer.bias[:1]),
    "a bias of two dimensions": lambda layer: set_data(layer.bias, layer.bias.view(1, 8)),
    "the weight read as another type": lambda layer: set_data(
        layer.weight, layer.weight.view(torch.bfloat16)
    ),
    "the bias read as another type": lambda layer: set_data(
        layer.bias, layer.bias.view(torch.bfloat16)
    ),
    "both read as another type": lambda layer: (
        set_data(layer.weight, layer.weight.view(torch.bfloat16)),
        set_data(layer.bias, layer.bias.view(torch.bfloat16)),
    ),
}


def set_data(parameter, data):
    parameter.data = data.detach()


@pytest.mark.parametrize("change", RESHAPED.values(), ids=RESHAPED)
def test_every_property_of_a_weight_or_bias_may_change_alone(change):
    """At the same address too: of a view into its own memory nothing but the geometry is new."""
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(8, 8)).half().requires_grad_(False))

    def computed(model):
        dtype = model[0].weight.dtype
        try:
            return model(torch.linspace(-1, 1, 24).view(3, 8).to(dtype))
        except RuntimeError as error:
            return str(error)  # of mixed types torch refuses some

    with attached(managed):
        assert torch.equal(computed(managed), computed(resident))
        for model in (managed, resident):
            change(model[0])
        for _ in range(2):
            found, expected = computed(managed), computed(resident)
            if isinstance(expected, str):
                assert isinstance(found, str)
            else:
                assert_same(found, expected)


def test_the_engine_stamps_a_leaf_under_the_unit_that_it_is_in_now():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # in one unit
    with attached(model, "cpu") as manager:
        layer, stamps = manager.layers[0], manager.state.stamps
        before, version = layer.unit, Layout.version
        model[0].weight.data = torch.eye(8)
        layer.follow()
        assert layer.unit != before and layer.member not in stamps.get(before, {})
        assert stamps[layer.unit][layer.member]() == layer.stamp()
        assert Layout.version > version, "who knows units by number looks again"


MEMORY = {
    "its own": lambda: (torch.randn(WIDTH, WIDTH), None),
    "seen by a view": lambda: ((weight := torch.randn(WIDTH, WIDTH)), weight[1:]),
    "shared with processes": lambda: (torch.randn(WIDTH, WIDTH).share_memory_(), None),
    "numpy's": lambda: (torch.from_numpy(numpy.ones((WIDTH, WIDTH), "float32")), None),
}


@pytest.mark.parametrize("assigned", [False, True], ids=["data", "parameter"])
@pytest.mark.parametrize("memory", MEMORY)
def test_memory_is_taken_over_where_no_other_tensor_sees_it(memory, assigned):
    """Who else holds numpy's, torch does not count; a Parameter that is put there is for good."""
    model = chain().requires_grad_(False)
    with attached(model, "cpu") as manager:
        weight, _held = MEMORY[memory]()
        if assigned:
            model[0].weight = nn.Parameter(weight, requires_grad=False)
        else:
            model[0].weight.data = weight
        place = weight.data_ptr()
        del weight
        step(model)
        assert len(manager.layers) == 6
        is_taken = memory == "its own" or (memory == "numpy's" and assigned)
        assert (model[0].weight.data_ptr() != place) is is_taken


def test_a_bias_may_go_and_another_may_come():
    """Also one of another kind for a while: a layer needs none."""
    managed, resident = resident_pair(chain().requires_grad_(False))
    with attached(managed, "cpu") as manager:
        for bias in (None, torch.ones(WIDTH), torch.ones(WIDTH, dtype=torch.int8), None):
            for model in (managed, resident):
                given = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
                model[0].bias = given
            if bias is None or bias.is_floating_point():
                agree(managed, resident, False)
            else:
                with pytest.raises(RuntimeError):
                    step(managed)
            assert len(manager.layers) == 6


def test_a_layer_is_lost_to_a_hook_that_replaces_its_weight_around_each_call():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    hook = types.SimpleNamespace(hooks={"layerwise_casting": 1})
    vars(model[0])["_diffusers_hook"] = hook
    with attached(model) as manager:
        lent, layer = manager.layers
        assert lent.lends_to_code and not layer.lends_to_code
        assert (lent.why_lost(), layer.why_lost()) == ("", "")
        vars(model[1])["_diffusers_hook"] = hook
        lost = [each.why_lost() for each in (lent, layer)]
        assert lost == ["", "layerwise casting replaces its weight around each call"]
        del vars(model[1])["_diffusers_hook"]


def computed_parameter():
    """A frozen Parameter that a graph was written into: still of that class, and no leaf."""
    parameter = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    parameter.add_(torch.ones(4, 4, requires_grad=True))
    assert type(parameter) is nn.Parameter
    return parameter


PLAIN = nn.Parameter(torch.ones(4, 4))
INT8 = nn.Parameter(torch.ones(4, 4).char(), requires_grad=False)
GAPS = nn.Parameter(torch.randn(4, 8)[:, :4])
NO_PARAMETER = "'t' is a Parameter, not a plain parameter"
HAS_GAPS = "'t' has gaps or overlaps in memory (strides (8, 1))"


@pytest.mark.parametrize(
    ("tensor", "plain", "why"),
    [
        (PLAIN, True, ""),
        (nn.Parameter(torch.randn(4, 4).bfloat16().t()), True, ""),
        (torch.randn(4, 4), False, "'t' is a Tensor, not a plain parameter"),
        (nn.Parameter(torch.randn(4, 4).to_sparse()), False, NO_PARAMETER),
        (nn.Parameter(torch.eye(4).to_sparse_csr()), False, NO_PARAMETER),
        (nn.Parameter(torch.randn(4, 4, device="meta")), False, ""),
        (INT8, False, "'t' is torch.int8"),
        (nn.Parameter(torch.randn(0, 4)), False, "'t' is empty"),
        (GAPS, False, HAS_GAPS),
        (computed_parameter(), False, ""),
    ],
    ids="plain turned tensor sparse csr meta int8 empty gaps computed".split(),
)
def test_what_can_be_a_master(tensor, plain, why):
    assert (is_plain_master(tensor), unfit_tensor("t", tensor)) == (plain, why)


@pytest.mark.parametrize(
    ("tensor", "options", "why"),
    [
        (PLAIN, {"floating": False}, ""),
        (PLAIN, {"plain": torch.Tensor}, NO_PARAMETER),
        (torch.ones(4), {"plain": torch.Tensor}, ""),
        (INT8, {"floating": False}, ""),
        (GAPS, {"floating": False}, HAS_GAPS),
    ],
)
def test_why_a_tensor_of_another_kind_cannot_become_a_master(tensor, options, why):
    assert unfit_tensor("t", tensor, **options) == why
    assert not is_plain_master(None)
