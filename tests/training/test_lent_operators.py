"""The operator that replaces a whole call of a lent module, called without a compiler."""

from __future__ import annotations

import gc
import random

import numpy
import pytest
import torch
from equality import assert_same, attached, resident_pair
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload.layers import compiled
from oracle_offload.layers.compiled import Whole

pytestmark = pytest.mark.usefixtures("nothing_is_small")

WIDTH = 8
ONE = "([True],'forward',(...,),{})"  # a call with one tensor


class Stack(nn.Module):
    """Multiplies, and notes under which modes it is called with what."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("gain", torch.rand(WIDTH))
        self.power = 2

    def forward(self, x):
        SEEN.append((torch.is_grad_enabled(), x.requires_grad, self.weight.requires_grad))
        return (x @ self.weight * self.gain) ** self.power


SEEN: list[tuple[bool, bool, bool]] = []


class Other(Stack):
    pass


def leaf_of(manager, name="0"):
    (leaf,) = (leaf for leaf in manager.attachment.layers if leaf.name == name)
    assert isinstance(leaf, Whole)
    return leaf


def lent(leaf, given, needs=(), call=ONE, own=None, dtype=None, example=-1):
    own = leaf.own() if own is None else own
    return compiled.lent(given, own, leaf.key, list(needs), call, [], dtype, example)


def lent_in_a_graph(leaf, given, needs):
    """Call the operator as a graph does that was differentiated when it was compiled."""
    with torch.no_grad():
        return lent(leaf, given, needs)


def lent_backward(leaf, grad, given, needs, call=ONE, own=None):
    own = leaf.own() if own is None else own
    operator = torch.ops.oracle_offload.lent_backward
    with torch.no_grad():
        return operator(grad, given, own, leaf.key, list(needs), call, [], None)


def told(leaf, given, needs=(), call=ONE):
    """Return what a compiler sees of a call."""
    fake = FakeTensorMode()
    make = fake.from_tensor
    own, key = [make(t.detach()) for t in leaf.own()], make(leaf.key)
    tensors = [make(t) for t in given]
    with fake:
        return compiled.lent(tensors, own, key, list(needs), call, [], None, leaf.example())


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
def test_a_call_has_the_residents_bits_and_is_recorded_where_it_needs_be(trains):
    managed, resident = resident_pair(nn.Sequential(Stack()).requires_grad_(trains))
    with attached(managed) as manager:
        leaf = leaf_of(manager)
        for x in (torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)):
            results = []
            for compute in (lambda x=x: lent(leaf, [x]), lambda x=x: resident(x)):
                x.grad = None
                y = compute()
                if y.requires_grad:
                    y.sum().backward()
                results.append([y.detach(), x.grad])
                assert y.requires_grad is (trains or x.requires_grad)
            assert_same(*results)
            with torch.no_grad():
                y = lent(leaf, [x])
            assert not y.requires_grad
            assert_same(y, resident(x))
        assert_same(managed[0].weight.grad, resident[0].weight.grad)
        assert not manager.attachment.held()


def test_a_graph_records_nothing_of_a_call_that_runs_as_in_training():
    """Code may choose by grad mode what it computes; a slot's tensors must not be kept."""
    with attached(nn.Sequential(Stack())) as manager, torch.no_grad():
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        SEEN.clear()
        expected = lent(leaf, [x])
        y = lent(leaf, [x], (True, False, False))
        assert not y.requires_grad and torch.equal(y, expected)
        lent(leaf, [x], (False, True, False))
        assert [seen[:2] for seen in SEEN] == [(False, False), (True, True), (True, False)]
        assert not manager.attachment.held()


@pytest.mark.parametrize(
    "needs", [(True, True, False), (True, False, False), (False, True, False), (True, True, True)]
)
def test_backward_makes_the_gradients_that_are_asked_for(needs):
    managed, resident = resident_pair(nn.Sequential(Stack()))
    x = torch.randn(3, WIDTH, requires_grad=True)
    resident[0].gain.requires_grad_()
    y = resident(x)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, resident[0].weight, resident[0].gain), grad)
    with attached(managed) as manager:
        leaf = leaf_of(manager)
        managed[0].gain.requires_grad_(needs[2])
        lent_in_a_graph(leaf, [x.detach()], needs)
        manager.state.turned = False
        found = lent_backward(leaf, grad, [x.detach()], needs)
        assert manager.state.turned, "the next forward begins after a backward"
        for gradient, wanted, need in zip(found, expected, needs, strict=True):
            assert not gradient.requires_grad
            assert_same(gradient, wanted if need else torch.empty(0))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            shapes = lent_backward(leaf, fake.from_tensor(grad), [x.detach()], needs)
        assert [t.shape for t in shapes] == [t.shape for t in found]
        assert not manager.attachment.held()


class Idle(Stack):
    """Leaves a Parameter alone in some of its calls."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x @ self.weight * (self.other if self.power == 3 else 1)


def test_the_gradient_of_what_a_call_did_not_use_is_zero():
    with attached(nn.Sequential(Idle())) as manager:
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        lent_in_a_graph(leaf, [x], (True, True, True, False))
        found = lent_backward(leaf, torch.ones(3, WIDTH), [x], (True, True, True, False))
        assert_same(found[2], torch.zeros(WIDTH))
        assert found[1].any() and found[0].any() and found[3].shape == (0,)


def test_tensors_that_are_not_the_modules_own_are_refused():
    managed, _ = resident_pair(nn.Sequential(Stack()))
    x, needs = torch.randn(3, WIDTH), (True, True, False)
    with attached(managed) as manager:
        leaf = leaf_of(manager)
        others = {
            "another": [torch.randn(WIDTH, WIDTH), managed[0].gain],
            "another buffer": [managed[0].weight, torch.randn(WIDTH)],
            "too few": leaf.own()[:1],
            "too many": [*leaf.own(), x],
        }
        assert leaf.is_own(leaf.own()) and leaf.is_own([t.detach() for t in leaf.own()])
        for own in others.values():
            assert not leaf.is_own(own)
            for given, grad in ((x, False), (x, True), (x.clone().requires_grad_(), True)):
                with (
                    torch.set_grad_enabled(grad),
                    pytest.raises(OffloadError, match="'0' has a computed weight"),
                ):
                    lent(leaf, [given], own=own)
        lent_in_a_graph(leaf, [x], needs)
        own = others["another"]
        with pytest.raises(StaleWeightsError, match="'0' are not what its compiled forward"):
            lent_backward(leaf, x, [x], needs, own=own)
        managed[0].weight.data = managed[0].weight.data * 2
        with pytest.raises(StaleWeightsError, match="'0' are not what its compiled forward"):
            lent_backward(leaf, x, [x], needs)
        lent_in_a_graph(leaf, [x], needs)
        lent_backward(leaf, x, [x], needs)
        assert not manager.attachment.held()


@pytest.mark.parametrize("change", ["set", "added", "taken away", "mode"])
def test_a_module_that_is_set_otherwise_makes_another_call_in_backward(change):
    with attached(nn.Sequential(Stack())) as manager:
        leaf, x, needs = leaf_of(manager), torch.randn(3, WIDTH), (True, True, False)
        module = leaf.module()
        lent_in_a_graph(leaf, [x], needs)
        if change == "set":
            module.power = 3
        elif change == "added":
            module.factor = 1.5
        elif change == "taken away":
            del module.power
        else:  # is written down with the call
            module.eval()
            assert len(lent_backward(leaf, x, [x], needs)) == 3
            return
        what = "factor was None" if change == "added" else "power was 2"
        with pytest.raises(StaleWeightsError, match=rf"'0': {what} in its compiled forward"):
            lent_backward(leaf, x, [x], needs)


# ---- which calls are operators ----


def traced(leaf, *args, **kwargs):
    """Return the result of a call, and whether it was made from outside."""
    outside = []

    def otherwise(module, *args, **kwargs):
        outside.append(1)
        return module(*args, **kwargs)

    return leaf.traced(leaf.module(), "forward", otherwise, args, kwargs), bool(outside)


def test_a_call_is_made_from_outside_where_it_is_no_operator():
    managed, resident = resident_pair(nn.Sequential(Stack(), Other()))
    x = torch.randn(3, WIDTH)
    with attached(managed) as manager, torch.no_grad():
        leaf, other = leaf_of(manager), leaf_of(manager, "1")
        expected = resident[0](x)
        y, outside = traced(leaf, x)
        assert_same(y, expected)
        assert not outside
        assert not traced(leaf, x=x)[1]
        leaf.wrappers.append(lambda: None)
        assert traced(leaf, x)[1]
        leaf.wrappers.clear()
        leaf.breaks = True
        y, outside = traced(leaf, x)
        assert_same(y, expected)
        assert outside and not traced(other, x)[1]


class Taking(Stack):
    def forward(self, x, how=None):
        return x @ self.weight


def test_an_argument_that_cannot_be_written_down_goes_from_outside():
    with attached(nn.Sequential(Taking())) as manager, torch.no_grad():
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        assert not traced(leaf, x, 3)[1] and not traced(leaf, x, how=[1.5, None])[1]
        assert traced(leaf, x, object())[1] and traced(leaf, x, how=[torch.float32])[1]


def test_transforms_of_functions_are_refused_from_outside():
    with attached(nn.Sequential(Stack())) as manager:
        leaf = leaf_of(manager)
        with pytest.raises(OffloadError, match=r"torch\.func transforms over"):
            torch.func.vmap(lambda x: traced(leaf, x)[0])(torch.randn(3, WIDTH))


class Returns(Stack):
    def forward(self, x, which):
        made = {"x": x, "part": x[1:], "weight": self.weight, "new": x + 0, "pair": (x, x)}[which]
        self.made_at = made.data_ptr() if which == "new" else 0
        return made


def test_a_result_is_a_copy_where_it_is_given_or_own_and_else_itself():
    managed = nn.Sequential(Returns())
    x = torch.randn(WIDTH, WIDTH)
    results = {"x": x, "part": x[1:], "weight": managed[0].weight, "new": x}
    with attached(managed) as manager, torch.no_grad():
        leaf = leaf_of(manager)
        for which, expected in results.items():
            y = lent(leaf, [x], call=f"([True],'forward',(...,'{which}'),{{}})")
            assert torch.equal(y, expected)
            assert y.untyped_storage().data_ptr() not in {
                t.untyped_storage().data_ptr() for t in (x, managed[0].weight)
            }
        assert y.data_ptr() == managed[0].made_at
        with pytest.raises(OffloadError, match="'0' returns tuple, and not one tensor"):
            lent(leaf, [x], call="([True],'forward',(...,'pair'),{})")
        assert not manager.attachment.held()


# ---- what a compiler sees ----


class Turns(Stack):
    def forward(self, x):
        return (torch.zeros_like(x, dtype=torch.float64) + x @ self.weight).t()


def test_a_compiler_is_told_the_dtype_and_the_strides_of_a_result():
    with attached(nn.Sequential(Turns())) as manager, torch.no_grad():
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        y, found = lent(leaf, [x]), told(leaf, [x])
        assert (found.shape, found.stride(), found.dtype) == (y.shape, y.stride(), y.dtype)
        assert found.stride() == (1, WIDTH) and found.dtype is torch.float64


def test_a_compiler_is_told_the_geometry_of_a_result():
    with attached(nn.Sequential(Stack())) as manager:
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        for needs in ((), (True, True, False), (False, True, False)):
            SEEN.clear()
            y = told(leaf, [x], needs)
            assert y.shape == (3, WIDTH) and y.dtype is torch.float32 and y.stride() == (WIDTH, 1)
            (seen,) = SEEN
            assert seen == (bool(needs), bool(needs and needs[0]), True)
        assert not leaf.breaks


def kind_of(forward):
    """Return a kind of `Stack` with another forward."""
    return type("Made", (Stack,), {"forward": forward})


class Raises(Stack):
    def forward(self, x):
        random.random()
        if self.power:
            raise ValueError("first line\nsecond line")
        return x @ self.weight


class WritesItsBuffer(Stack):
    def forward(self, x):
        self.gain.add_(1)
        return x @ self.weight


class Notes(Stack):
    """Keeps something in a container of a container."""

    def __init__(self):
        super().__init__()
        self.seen = {"x": ([],)}

    def forward(self, x):
        self.seen["x"][0].append(1)
        return x @ self.weight


class Counts(Stack):
    def forward(self, x):
        self.power += 1
        return x @ self.weight


class NotesBelow(Stack):
    """Has a child keep something."""

    def __init__(self):
        super().__init__()
        self.below = nn.Identity()

    def forward(self, x):
        self.below.seen = x.shape
        return self.below(x @ self.weight)


class Below(Stack):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.below(x @ self.weight)


class Asks(Stack):
    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(z.sin().sum(), z)
        return x @ self.weight * slope


# A trained input is used twice; one that is not may be.
Twice = kind_of(lambda self, x, z=None: x @ self.weight + x)
Unused = kind_of(lambda self, x: x.sin())
Draws = kind_of(lambda self, x: x @ self.weight * random.random())
Drops = kind_of(lambda self, x: torch.nn.functional.dropout(x @ self.weight, 0.5, True))
Numpy = kind_of(lambda self, x: x @ self.weight * float(numpy.random.rand()))
Writes = kind_of(lambda self, x: x.mul_(2) @ self.weight)
WritesWhatItMade = kind_of(lambda self, x: (x @ self.weight).mul_(2))
Pair = kind_of(lambda self, x: (x @ self.weight, x))
NEEDS = (True, True, False)
WROTE = "writes to its input, or to itself"
REFUSED = {
    "raises": (Raises, 1, NEEDS, r"\(first line\)"),
    "raises, unrecorded": (Raises, 1, (), r"\(first line\)"),
    "draws": (Draws, 1, (), "draws random numbers"),
    "draws by numpy": (Numpy, 1, (), "draws random numbers"),
    "draws by torch": (Drops, 1, (), "draws random numbers"),
    "writes": (Writes, 1, (), WROTE),
    "writes its buffer": (WritesItsBuffer, 1, (), WROTE),
    "writes what it made": (WritesWhatItMade, 1, NEEDS, ""),
    "notes": (Notes, 1, (), WROTE),
    "counts": (Counts, 1, (), WROTE),
    "notes below": (NotesBelow, 1, (), WROTE),
    "below": (Below, 1, (), "modules below it have Parameters of their own"),
    "a pair": (Pair, 1, (), "it returns tuple"),
    "asks autograd": (Asks, 1, NEEDS, "asks autograd for gradients itself"),
    "twice": (Twice, 1, NEEDS, "uses an input more than once"),
    "twice, where its gradient is not asked for": (Twice, 1, (False, True, False), ""),
    "twice, unrecorded": (Twice, 1, (), ""),
    "trained but unused": (Unused, 1, NEEDS, "something trained not at all"),
    "unused, unrecorded": (Unused, 1, (), ""),
    "the same twice": (Twice, 2, (True, True, True, False), "the same tensor more than once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_compiler_is_refused_what_cannot_be_made_twice_and_told_why(case):
    kind, count, needs, why = REFUSED[case]
    managed = nn.Sequential(kind(), kind(), Stack())
    with attached(managed) as manager:
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        call = f"([True],'forward',({'...,' * count}),{{}})"
        random.seed(5)
        numpy.random.seed(5)
        before = random.getstate(), numpy.random.random_sample()
        numpy.random.seed(5)
        kept = {**vars(managed[0])}, managed[0].gain.clone()
        if not why:
            assert told(leaf, [x] * count, needs, call).shape == x.shape
        else:
            with pytest.raises(DynamicOutputShapeException) as raised:
                told(leaf, [x] * count, needs, call)
            reason = raised.value.__cause__
            assert isinstance(reason, OffloadError)
            with pytest.raises(OffloadError, match=rf"'0' is no operator.*{why}.*ignore_modules"):
                raise reason
        drawn = random.getstate(), numpy.random.random_sample()
        assert drawn == before, "what is looked at draws nothing"
        assert vars(managed[0]) == kept[0] and torch.equal(managed[0].gain, kept[1])
        breaks = [leaf_of(manager, name).breaks for name in "012"]
        assert breaks == [bool(why), bool(why), False], "modules like it break, others do not"


def test_what_is_told_is_held_against_what_comes():
    with attached(nn.Sequential(Stack())) as manager, torch.no_grad():
        leaf, x = leaf_of(manager), torch.randn(3, WIDTH)
        told(leaf, [x])
        number = max(compiled._told)
        assert compiled._examples[number] is leaf
        lent(leaf, [x], example=number)
        with pytest.raises(OffloadError, match=r"'0' returns .*\[4, 8\].*and not .*\[3, 8\]"):
            lent(leaf, [torch.randn(4, WIDTH)], example=number)
        lent(leaf, [torch.randn(4, WIDTH)])
        assert not manager.attachment.held()
    del leaf, manager
    gc.collect()


def test_a_call_is_made_in_the_dtype_that_autocast_had():
    managed, resident = resident_pair(nn.Sequential(Taking()))
    x = torch.randn(3, WIDTH)
    with attached(managed) as manager, torch.no_grad():
        leaf = leaf_of(manager)
        with torch.autocast("cpu", torch.bfloat16):
            expected = resident(x)
        y = lent(leaf, [x], dtype=torch.bfloat16)
        assert y.dtype is torch.bfloat16
        assert_same(y, expected)
        assert lent(leaf, [x]).dtype is torch.float32
