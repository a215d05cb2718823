"""The loan to a module's own forward: turns, what is in the places, what autograd keeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import simgpu
import torch
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    count_acquires,
    resident_pair,
    step_of,
)
from models import Parts
from test_any import (
    WIDTH,
    Dequantises,
    Einsum,
    Halved,
    MadeOfItself,
    held,
    make_step,
    net,
    train_only,
    weights,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from oracle_offload.layers import any as any_module
from oracle_offload.layers.managed import is_managed

pytestmark = pytest.mark.usefixtures("nothing_is_small")
X = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH)


# ---- whose turn it is ----


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Einsum, X),
        (lambda: nn.Linear(WIDTH, WIDTH), X),
        (lambda: nn.Embedding(8, WIDTH), torch.arange(5)),
    ],
    ids=["any", "linear", "embedding"],
)
def test_a_call_does_not_wait_for_who_holds_the_devices_lock(make, x):
    """As `oracle_offload.engine.locks` says: a loan takes no lock but its turn and the engine's
    mutex.
    """
    model = nn.Sequential(make())
    found = []

    def compute():
        with torch.no_grad():
            found.append(model(x))

    with attached(model) as manager:
        compute()
        thread = threading.Thread(target=compute)
        with manager.state.lock:
            thread.start()
            thread.join(20)
            assert len(found) == 2, "the call waits for a lock"
        thread.join(20)
        assert_same(found[0], found[1])


def test_memory_that_was_replaced_is_lent_from_then_on():
    model, resident = resident_pair(nn.Sequential(Einsum()))
    with attached(model) as manager:
        model(X)
        for each in (model, resident):
            each[0].stack.data = each[0].stack.data * 2
        before = count_acquires()
        assert_same(model(X).detach(), resident(X).detach())
        assert count_acquires() == before + 1
        assert manager.attachment.traffic.computed_bytes == {}


def test_a_tensor_that_was_taken_away_makes_the_module_an_ordinary_one():
    def compute(parts, x):
        return x @ parts.matrix if parts.shift is None else x @ parts.matrix + parts.shift

    shifts = Parts(compute, matrix=weights(WIDTH, WIDTH), shift=weights(WIDTH))
    model, resident = resident_pair(nn.Sequential(shifts, nn.Linear(WIDTH, WIDTH)))
    with attached(model) as manager:
        model(X)
        for each in (model, resident):
            each[0]._parameters["shift"] = None  # as some code does that no __setattr__ sees
        structure = manager.layers[0].structure
        assert_same(model[0](X).detach(), resident[0](X).detach())
        assert not structure.changed, "what it has now has been seen to before the call went on"
        for _ in range(2):
            assert_same(model(X).detach(), resident(X).detach())
        assert [layer.name for layer in manager.layers] == ["1"]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_what_a_forward_wrote_is_computed_with_and_is_the_parameters(trainable):
    """The copy on the device stays there between calls, and has what was written."""

    def compute(parts, x):
        if parts.writes:
            with torch.no_grad():
                parts.matrix.mul_(0.5)
        return x @ parts.matrix

    made = net(lambda: Parts(compute, matrix=weights(WIDTH, WIDTH), writes=False))
    model, resident = resident_pair(train_only(made, trainable))
    with attached(model, offload_percent=0.0) as manager, torch.no_grad():
        assert len(manager.layers) >= 3
        assert_same(model(X), resident(X))
        for writes in (True, False):
            model[0].writes = resident[0].writes = writes
            assert_same(model(X), resident(X))
        assert_same(dict(model.state_dict()), dict(resident.state_dict()))


def test_a_backward_that_reads_no_weight_ends_a_pass_too():
    model = nn.Sequential(Parts(lambda parts, x: x + parts.shift, shift=weights(WIDTH)))
    with attached(model) as manager:
        pace = manager.state.pace
        model(X).sum().backward()
        before, found = pace.passes, []
        for _ in range(2):
            y = model(X)
            found.append(pace.passes - before)
            y.sum().backward()
        assert found == [1, 2]


# ---- other tensors in the places ----


class Looks(nn.Module):
    """Notes what it computes with."""

    def __init__(self):
        super().__init__()
        self.matrix, self.shift = weights(WIDTH, WIDTH), weights(WIDTH)

    def forward(self, x):
        self.seen = self.matrix, self.shift
        return x @ self.matrix + self.shift


class Products(TorchFunctionMode):
    """Sees what products are made of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            self.seen = args[1], args[2]
        return func(*args, **(kwargs or {}))


def seen_by(model, others, x):
    """Return the two tensors that the only module of `model` computes with, given others."""
    with Products() as mode:
        torch.func.functional_call(model, others, (x,))
    return getattr(model[0], "seen", None) or mode.seen


@pytest.mark.parametrize("make", [Looks, lambda: nn.Linear(WIDTH, WIDTH)], ids=["any", "linear"])
def test_a_tensor_with_gaps_is_computed_with_as_it_lies_and_others_are_copied(make):
    """A copy would close the gaps, and the layout decides the last bits."""
    model = nn.Sequential(make())
    wide, vector = torch.randn(WIDTH, 2 * WIDTH), torch.randn(WIDTH)
    first, second = (name for name, _ in model.named_parameters())
    with attached(model) as manager:
        assert len(manager.layers) == 1
        matrix, other = seen_by(model, {first: wide[:, ::2], second: vector}, X)
        assert matrix.stride() == (2 * WIDTH, 2) and matrix.data_ptr() == wide.data_ptr()
        assert other.data_ptr() != vector.data_ptr() and torch.equal(other, vector)


class Scaled(nn.Module):
    def forward(self, tensor):
        return tensor * 0.5


class Wrapper(nn.Module):
    """As peft's of one Parameter, on which it puts a parametrisation for each forward."""

    def __init__(self, base_layer, name):
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, name

    def forward(self, x):
        below = self.base_layer
        while hasattr(below, "base_layer"):
            below = below.base_layer
        parametrize.register_parametrization(below, self.parameter_name, Scaled())
        try:
            return self.base_layer(x)
        finally:
            parametrize.remove_parametrizations(
                below, self.parameter_name, leave_parametrized=False
            )


class Around(nn.Module):
    """An adapter of another kind, around a layer and not one of its Parameters."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) * 2


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_parametrisation_for_the_length_of_a_forward_is_no_write(after):

    def wrap(model):
        for index in range(2):
            model[index] = Wrapper(Wrapper(model[index], "stack"), "scale")
        model[2] = Around(model[2])

    model, resident = resident_pair(
        nn.Sequential(Einsum(), Einsum(), Einsum()).requires_grad_(False)
    )
    if not after:
        wrap(model)
    with attached(model) as manager:
        if after:
            model(X)
            wrap(model)
        wrap(resident)
        assert_models_agree(model, resident, step_of(X))
        assert len(manager.layers) == 3
        assert list(any_module.find_wrappers(model)) == [], "each is one already"
        assert [type(model[2]), is_managed(model[0]), is_managed(model[2])] == [Around, True, False]


# ---- what autograd keeps ----


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
def test_what_an_inner_module_makes_of_weights_is_counted_where_it_stays(reentrant):
    """It goes through the hooks of both modules, and of the checkpoint around them."""

    def within():
        scale = weights(WIDTH).requires_grad_(False)
        return Parts(
            lambda parts, x: parts.inner(x * parts.scale), scale=scale, inner=Dequantises()
        )

    model, resident = resident_pair(net(within, reentrant))
    with attached(model) as manager:
        assert len(manager.layers) == 6
        assert_models_agree(model, resident, make_step("cpu"), steps=1)
        kept = manager.attachment.traffic.derived_bytes
        made = {f"{i}.inner": 3 * WIDTH * WIDTH * 4 for i in range(3)}
        if reentrant is None:  # the outer module's hooks see it as well
            assert {name: kept.get(name) for name in made} == made
        else:
            assert kept == {}


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [
        (torch.uint8, True),
        (torch.int8, True),
        (torch.int32, False),
        (torch.float16, False),
        (torch.float8_e4m3fn, False),
    ],
    ids=str,
)
def test_only_integers_of_a_byte_may_hold_two_numbers_each(dtype, counted):
    """Autograd keeps a float32 tensor of twice as many numbers as the weight has."""
    values = torch.arange(WIDTH * WIDTH).remainder(2).view(WIDTH, WIDTH)
    packed = nn.Parameter(values.to(dtype), requires_grad=False)
    model = nn.Sequential(
        Parts(lambda parts, x: x @ torch.cat([parts.packed.float()] * 2, -1), packed=packed)
    )
    with attached(model) as manager:
        assert [type(layer).__name__ for layer in manager.layers] == ["AnyLayer"]
        model(X.clone().requires_grad_()).sum().backward()
        nbytes = 2 * WIDTH * WIDTH * 4
        assert manager.attachment.traffic.derived_bytes == ({"0": nbytes} if counted else {})


def test_what_lies_in_the_slot_is_taken_again_and_its_neighbours_are_kept():
    """Which memory is next to a slot is up to the device, so these are asked by themselves."""
    model = nn.Sequential(Einsum())
    with attached(model) as manager:
        (layer,) = manager.layers
        slot = sum(p.nbytes for p in model.parameters())
        memory = torch.zeros(2 * slot, dtype=torch.uint8)
        notes = any_module._Notes(layer, memory[:slot])
        floats = memory.view(torch.float32)
        for inside in (floats[:1], floats[slot // 4 - 1 : slot // 4]):
            assert isinstance(notes.pack(inside), any_module._Note)
            for made in (Halved(inside), Halved(Halved(inside))):
                assert isinstance(notes.pack(made), any_module._Flat)
        outside = floats[slot // 4 :]
        for kept in (outside, Halved(outside), Halved(Halved(outside)), torch.zeros(4)):
            assert notes.unpack(notes.pack(kept)) is kept
        behind = any_module._Notes(layer, memory[4 : slot + 4])
        assert behind.unpack(behind.pack(memory[:4])).data_ptr() == memory.data_ptr()


def test_what_is_made_of_nothing_lent_goes_to_the_hooks_outside_as_it_is():
    """They may keep it elsewhere, and have to get back what they were given."""
    model, resident = resident_pair(nn.Sequential(MadeOfItself()))
    seen = {}

    def step(each):
        def pack(tensor):
            seen.setdefault(id(each), []).append(type(tensor))
            return tensor

        x = X.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = each(x)
        y.sum().backward()
        return [y.detach(), x.grad]

    with attached(model):
        assert_same(step(model), step(resident))
    assert Halved in seen[id(model)]
    assert seen[id(model)] == seen[id(resident)]


def test_what_has_no_address_is_kept_as_it_is():
    """Autograd keeps a sparse tensor here, and one without elements."""

    def compute(parts, x):
        flat = (x @ parts.matrix).flatten(0, 1)
        y = torch.sparse.mm(torch.eye(6).to_sparse(), flat)
        return y + (flat[:, :0] * flat[:, :0].exp()).sum()

    odd = Parts(compute, matrix=weights(WIDTH, WIDTH).requires_grad_(False))
    model, resident = resident_pair(nn.Sequential(odd))
    with attached(model):
        assert_models_agree(model, resident, step_of(X[:2]), steps=1)


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_an_error_in_the_hooks_outside_leaves_torchs_own_as_they_were(named, monkeypatch):
    if not named:  # as torch 2.6 and 2.7
        monkeypatch.setattr(any_module, "_top_hooks", None)
    torch.manual_seed(0)
    model, resident = resident_pair(nn.Sequential(Einsum()))

    counted, asked = [], []

    def refuse(tensor):  # not the tensor that says whether there are hooks, where torch does not
        asked.append(tensor)
        if len(asked) > 1:
            raise KeyError("planted")
        return tensor

    def count(tensor):
        counted.append(tensor)
        return tensor

    step = step_of(X)
    with attached(model) as manager:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            with (
                pytest.raises(KeyError, match="planted"),
                torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor),
            ):
                model(X.clone().requires_grad_())
            assert not counted
            torch.ones(2, requires_grad=True).square()
            assert len(counted) == 1, "the pair outside is in effect as before"
        torch.ones(2, requires_grad=True).square()
        assert len(counted) == 1
        gc.collect()
        assert held(manager) == 0
        assert_same(step(model), step(resident))


# ---- on a device that is not the host ----

ON_A_DEVICE = """
import sys
sys.path.insert(0, {folder!r})
import simgpu
simgpu.install()
import torch
from torch import nn
from test_any_loan import Looks, X, seen_by
import oracle_offload
from oracle_offload.model import selection

selection.SMALL_BYTES, selection.SMALL_TOGETHER = 0, (0, 0)
for make in (Looks, lambda: nn.Linear(16, 16)):
    model = nn.Sequential(make())
    manager = oracle_offload.attach(model, "simgpu")
    assert len(manager.layers) == 1
    first, second = (name for name, _ in model.named_parameters())
    there = torch.randn(16, 16, device="simgpu")
    host = torch.randn(16)
    for given, moved in ((host, host.nbytes), (host.to("simgpu"), 0)):
        traffic = manager.attachment.traffic
        before = sum(traffic.computed_bytes.values())
        others = {{first: there, second: given}}
        one, other = seen_by(model, others, X.to("simgpu"))
        assert one.data_ptr() == there.data_ptr(), "what is on the device is not copied"
        assert other.device.type == "simgpu"
        assert (other.data_ptr() == given.data_ptr()) is (moved == 0)
        assert sum(traffic.computed_bytes.values()) - before == moved
    manager.detach()
"""


@pytest.mark.skipif(not simgpu.is_available(), reason="this torch knows no such device type")
def test_tensors_that_lie_on_the_device_are_computed_with_where_they_lie():
    code = ON_A_DEVICE.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
