"""`accumulate`: what steps keep in attributes and globals is each micro-batch's own."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import functools
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, accumulate
from oracle_offload.model.witness import Witness
from oracle_offload.train.micro_batches.attributes import Places
from oracle_offload.train.micro_batches.grains import grains_of
from oracle_offload.train.micro_batches.thread_state import can_take_turns

pytest.importorskip("greenlet")
pytestmark = pytest.mark.skipif(not can_take_turns(), reason="turns are taken from torch 2.8 on")
WIDTH, BLOCKS = 32, 6
knob = SimpleNamespace(scale=1.0)
level = 1.0
levels = [1.0]


class Kind:
    scale = 1.0


class Slots:
    __slots__ = ("inner", "scale")

    def __init__(self, inner=None):
        self.scale, self.inner = 1.0, inner


class Mapping(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Asked:
    """What code reads of it by calls alone."""

    store = {}  # noqa: RUF012

    def __init__(self):
        self._scale = 1.0

    @property
    def scale(self):
        return self._scale

    def read(self):
        return self._scale

    @classmethod
    def stored(cls):
        return cls.store.get("scale", 1.0)

    class Inner:
        scale = 1.0


def given(options={"scale": 1.0}):  # noqa: B006
    return options["scale"] * given.scale


given.scale = 1.0
slots, deep = Slots(), SimpleNamespace(inner=Slots(SimpleNamespace(scale=1.0)))
queue, mapping, counter = collections.deque([1.0]), Mapping(scale=1.0), collections.Counter(scale=1)
user, parts, array = collections.UserDict(scale=1.0), ([1.0], {"scale": [1.0]}), numpy.ones(1)
asked, other = Asked(), Asked()
bound, part = other.read, functools.partial(lambda options: options["scale"], {"scale": 1.0})
variable = contextvars.ContextVar("variable", default=1.0)
tensor = torch.ones(())


def closed():
    around = 1.0

    def read():
        return around

    def write(value):
        nonlocal around
        around = value

    return read, write


read_around, write_around = closed()


def at_level(x):
    return x * level * levels[0] * Kind.scale * read_around() * in_other_places()


def in_other_places():
    of_objects = slots.scale * deep.inner.inner.scale * asked.scale * bound() * Asked.stored()
    of_containers = queue[0] * mapping.scale * counter["scale"] * user["scale"] * float(array[0])
    of_tuples = parts[0][0] * parts[1]["scale"][0]
    return of_objects * of_containers * of_tuples * given() * part() * Asked.Inner.scale


class Twice(torch.autograd.Function):
    """Computes again in backward what it was given, as checkpoints of other libraries do."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(gradient)
        return None, x.grad


def nested(block, x):
    return checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False) * 1.5, x, use_reentrant=False
    )


RUN = {
    "plain": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "nonreentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "nested": nested,
    "other": Twice.apply,
}


class Block(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net, self.held = [net], {"scale": 1.0}

    def forward(self, x):
        (net,) = self.net
        held = net.held["scale"] * net.options.scale * net.options.parts[0] * self.held["scale"]
        return x + at_level(self.down(torch.tanh(self.up(x)) * knob.scale * net.scale * held))


class Net(nn.Module):
    """Its blocks read attributes, globals, and what those and they themselves hold."""

    def __init__(self, run="plain", sets=None):
        super().__init__()
        self.run, self.sets = RUN[run], sets
        self.scale, self.held = 1.0, {"scale": 1.0}
        self.options = SimpleNamespace(scale=1.0, parts=[1.0])
        self.blocks = nn.ModuleList(Block(self) for _ in range(BLOCKS))

    def forward(self, x):
        if self.sets is not None:
            self.sets(self, x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


@pytest.fixture(autouse=True)
def globals_as_before():
    global level
    yield
    knob.scale = level = levels[0] = Kind.scale = 1.0
    write_around(1.0)
    for put in OTHER_PLACES.values():
        put(1.0)


def pair(*arguments):
    torch.manual_seed(0)
    model = Net(*arguments)
    return model, copy.deepcopy(model)


def inputs(device, count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, generator=generator).to(device) for _ in range(count)]


@contextlib.contextmanager
def streamed(model, device):
    with attached(model, device, offload_percent=1.0) as manager:
        assert len(manager.layers) == 2 * BLOCKS
        assert manager.attachment.managed_bytes > manager.attachment.arena.capacity_bytes
        yield model


def loss_of(model, x):
    return model(x.requires_grad_()).square().mean()


def loop(model, batches, step):
    for batch in batches:
        step(model, batch).backward()


def is_as_the_loop(model, resident, device, step, own):
    """Compare, with and without the witness; no gradient is equal by chance."""
    with streamed(model, device):
        for watched in (contextlib.nullcontext(), Witness()):
            with watched:
                accumulate(lambda x: step(model, x), inputs(device), own=own)
            resident.to(device).zero_grad()
            loop(resident, inputs(device), step)
            assert_same(gradients(model), gradients(resident))
            assert all(gradient.any() for gradient in gradients(model).values())
            model.zero_grad()


def number_of(x):
    return 1.0 + x[0, 0].item()


def turn_knob(model, x):
    knob.scale = number_of(x)
    return loss_of(model, x)


@pytest.mark.parametrize("run", RUN)
def test_a_checkpoint_computes_again_with_the_attributes_of_its_micro_batch(device, run):
    is_as_the_loop(*pair(run), device, turn_knob, own=[knob])


@pytest.mark.parametrize("run", RUN)
def test_attributes_of_a_model_that_are_set_in_its_forward_are_its_micro_batchs(device, run):
    def sets(net, x):
        net.scale = number_of(x)

    model, resident = pair(run, sets)
    is_as_the_loop(model, resident, device, loss_of, own=[model])


@pytest.mark.parametrize("run", RUN)
def test_what_is_as_before_at_the_end_is_each_micro_batchs_meanwhile(device, run):
    """The caller did not name it: that it is written is found out."""

    def step(model, x):
        model.scale = knob.scale = number_of(x)
        y = model(x.requires_grad_())
        model.scale = knob.scale = 1.0
        return y.square().mean()

    is_as_the_loop(*pair(run), device, step, own=[])


def global_level(model, x):
    global level
    level = number_of(x)
    return loss_of(model, x)


def sets_scale(net, x):
    net.scale = number_of(x)


def set_in_blocks(model, value):
    for block in model.blocks:
        block.held["scale"] = value


HELD = {
    f"'levels' of {__name__}": lambda model, value: levels.__setitem__(0, value),
    "'scale' of Kind": lambda model, value: setattr(Kind, "scale", value),
    "'around' of closed.<locals>.read": lambda model, value: write_around(value),
    "'held' of Net": lambda model, value: model.held.update(scale=value),
    "'options' of Net": lambda model, value: setattr(model.options, "scale", value),
    "'parts' of Net": lambda model, value: model.options.parts.__setitem__(0, value),
    "'held' of Block": set_in_blocks,
}


OTHER_PLACES = {
    "'scale' of Slots": lambda value: setattr(slots, "scale", value),
    "'scale' of SimpleNamespace": lambda value: setattr(deep.inner.inner, "scale", value),
    f"'queue' of {__name__}": lambda value: queue.__setitem__(0, value),
    f"'mapping' of {__name__}": lambda value: setattr(mapping, "scale", value),
    f"'counter' of {__name__}": lambda value: counter.update(scale=value - counter["scale"]),
    f"'data' of {__name__}": lambda value: user.update(scale=value),
    f"'array' of {__name__}": lambda value: array.__setitem__(0, value),
    f"'parts' of {__name__}": lambda value: parts[1]["scale"].__setitem__(0, value),
    "'_scale' of Asked": lambda value: setattr(asked, "_scale", value),
    f"'bound' of {__name__}": lambda value: setattr(other, "_scale", value),
    "'store' of Asked": lambda value: Asked.store.update(scale=value),
    "'scale' of Inner": lambda value: setattr(Asked.Inner, "scale", value),
    f"'given' of {__name__}": lambda value: given.__defaults__[0].update(scale=value),
    f"'given' of {__name__} ": lambda value: setattr(given, "scale", value),
    f"'part' of {__name__}": lambda value: part.args[0].update(scale=value),
}
PLACES = HELD | {
    name: lambda model, value, put=put: put(value) for name, put in OTHER_PLACES.items()
}


@pytest.mark.parametrize("run", ["nonreentrant", "nested", "other"])
def test_what_code_finds_anywhere_is_each_micro_batchs(device, run):
    """In containers, classes, closures, slots, queues, arrays and what functions are given."""

    def step(model, x):
        for number, put in enumerate(PLACES.values(), 1):
            put(model, 1.0 + number_of(x) * number / 100)
        y = model(x.requires_grad_())
        for put in PLACES.values():
            put(model, 1.0)
        return y.square().mean()

    is_as_the_loop(*pair(run), device, step, own=[])


@pytest.mark.parametrize("name", PLACES)
def test_what_is_left_for_the_next_micro_batch_is_refused_by_name(device, name):
    model, _ = pair("plain")

    def step(x):
        PLACES[name](model, number_of(x))
        return loss_of(model, x)

    with streamed(model, device):
        with pytest.raises(OffloadError, match=f"leave different {re.escape(name.strip())}:"):
            accumulate(step, inputs(device))
        assert in_other_places() == 1.0, "all is as it was before"
        assert levels == [1.0] and (Kind.scale, read_around()) == (1.0, 1.0)
        assert {model.held["scale"], *(block.held["scale"] for block in model.blocks)} == {1.0}
        assert (model.options.scale, model.options.parts) == (1.0, [1.0])


def hooked(model, x):
    scale = number_of(x)
    handle = model.blocks[2].register_forward_hook(lambda module, given, y: y * scale)
    loss = loss_of(model, x)
    handle.remove()
    return loss


def hooked_everywhere(model, x):
    scale = number_of(x)
    hook = torch.nn.modules.module.register_module_forward_hook
    with hook(lambda module, given, y: y * scale if isinstance(module, Block) else None):
        return loss_of(model, x)


def replaced_in_the_class(model, x):
    scale, own = number_of(x), Block.forward
    Block.forward = lambda block, x: own(block, x) * scale
    try:
        return loss_of(model, x)
    finally:
        Block.forward = own


def replaced_in_an_instance(model, x):
    scale, block = number_of(x), model.blocks[1]
    own = block.forward
    block.forward = lambda x: own(x) * scale
    loss = loss_of(model, x)
    del block.forward
    return loss


def partly_frozen(model, x):
    model.blocks[1].requires_grad_(number_of(x) > 1.0)
    loss = loss_of(model, x)
    model.blocks[1].requires_grad_(True)
    return loss


@pytest.mark.parametrize(
    "step",
    [hooked, hooked_everywhere, replaced_in_the_class, replaced_in_an_instance, partly_frozen],
)
def test_what_a_step_puts_on_modules_is_its_micro_batchs(device, step):
    assert len({number_of(x) > 1.0 for x in inputs(device)}) == 2
    is_as_the_loop(*pair("plain"), device, step, own=[])


def test_a_tensor_that_is_written_in_place_is_refused_by_name(device):
    def sets(net, x):
        net.options.tensor.fill_(number_of(x))
        net.scale = net.options.tensor.item()
        net.options.tensor.fill_(1.0)
        net.scale = 1.0

    model, resident = pair("nonreentrant", sets)
    model.options.tensor = resident.options.tensor = torch.ones(())
    refused = pytest.raises(OffloadError, match="leave different 'tensor' of Net")
    with streamed(model, device), refused:
        accumulate(functools.partial(loss_of, model), inputs(device))


@pytest.mark.parametrize("run", ["reentrant", "nonreentrant"])
def test_a_backward_finds_the_context_variables_that_its_step_has_left(device, run):
    """But where backward has a thread of its own, which has none of them in the loop either."""

    class Varying(Block):
        def forward(self, x):
            return super().forward(x) * variable.get()

    def step(model, x):
        variable.set(number_of(x))
        return loss_of(model, x)

    model, _ = pair(run)
    for block in model.blocks:
        block.__class__ = Varying
    resident = copy.deepcopy(model)
    contextvars.copy_context().run(is_as_the_loop, model, resident, device, step, [])
    assert variable.get() == 1.0


def test_a_variable_of_a_function_around_may_be_missing_before_and_after(device):
    scale = 1.0
    del scale

    class Scaled(Net):
        def forward(self, x):
            return super().forward(x) * scale  # noqa: F821 - it is there meanwhile

    def step(model, x):
        nonlocal scale
        scale = number_of(x)
        loss = loss_of(model, x)
        del scale
        return loss

    models = pair()
    for model in models:
        model.__class__ = Scaled
    is_as_the_loop(*models, device, step, own=[])


def test_what_is_held_there_by_what_is_named_is_each_micro_batchs(device):
    """Its attributes are, and a container or a class that is named itself."""

    def step(model, x):
        for name, put in HELD.items():
            if "closed" not in name:
                put(model, number_of(x))
        return loss_of(model, x)

    model, resident = pair("nonreentrant")
    own = [model, *model.blocks, model.options, Kind, levels]
    is_as_the_loop(model, resident, device, step, own=own)
    last = number_of(inputs(device)[-1])
    assert [*levels, Kind.scale, *model.options.parts, model.held["scale"]] == [last] * 4


def test_each_micro_batch_may_keep_what_it_has_computed_under_a_name_of_its_own(device):
    def sets(net, x):
        net.held.setdefault(number_of(x), torch.ones(2))
        net.held.setdefault("all", torch.ones(2))

    is_as_the_loop(*pair("plain", sets), device, loss_of, own=[])


def test_to_containers_each_adds_its_own_and_they_are_joined_in_order(device):
    def step(net, x):
        number = number_of(x)
        net.options.parts.append(number)
        net.held.setdefault("all", []).append(number)
        net.held.setdefault("numbers", set()).add(number)
        net.scale = net.options.parts[-1]  # its own, though others have added meanwhile
        loss = loss_of(net, x)
        net.scale = 1.0
        return loss

    model, resident = pair("plain")
    is_as_the_loop(model, resident, device, step, own=[])
    assert model.options.parts == resident.options.parts
    assert model.held == resident.held and len(model.held["numbers"]) == len(inputs(device))


def cleared(net, x):
    net.options.parts[:] = [number_of(x)]


def counted(net, x):
    net.held["scale"] += 1


def set_anew(net, x):
    net.held["kept"] = {"x": number_of(x)}


@pytest.mark.parametrize(
    ("sets", "name"), [(cleared, "parts"), (counted, "held"), (set_anew, "held")]
)
def test_what_is_not_only_added_is_refused_by_name(device, sets, name):
    model, _ = pair("plain", sets)
    before = copy.deepcopy((model.options, model.held))
    refused = pytest.raises(OffloadError, match=f"leave different '{name}' of Net:")
    with streamed(model, device), refused:
        accumulate(functools.partial(loss_of, model), inputs(device))
    assert (model.options, model.held) == before


@pytest.mark.parametrize(
    ("step", "sets", "names"),
    [
        (turn_knob, None, "'scale' of SimpleNamespace"),
        (global_level, None, f"'level' of {__name__}"),
        (loss_of, sets_scale, "'scale' of Net"),
    ],
    ids=["object", "global", "model"],
)
def test_what_the_next_micro_batch_would_find_is_refused_by_name(device, step, sets, names):
    model, resident = pair("plain", sets)
    with streamed(model, device):
        with pytest.raises(OffloadError, match=f"leave different {names}"):
            accumulate(lambda x: step(model, x), inputs(device))
        assert all(gradient is None for gradient in gradients(model).values())
        assert (knob.scale, level, model.scale) == (1.0, 1.0, 1.0)
        accumulate(lambda x: step(model, x), inputs(device), interleave=False)
        found = gradients(model)
    loop(resident.to(device), inputs(device), step)
    assert_same(found, gradients(resident))


def test_what_is_computed_once_and_kept_or_only_moved_is_allowed(device):
    def sets(net, x):
        if net.table is None:
            net.table = torch.arange(3.0)
        if net.rope.table is None:
            net.rope.table = [torch.arange(2.0).to(x.device)]
        net.moved = net.moved.to(x.device)
        net.scale = (net.table.sum() + net.rope.table[0].sum().cpu() + net.moved.sum().cpu()).item()

    model, resident = pair("plain", sets)
    for one in (model, resident):
        one.table, one.moved, one.scale = None, torch.ones(2), 6.0
        one.rope = SimpleNamespace(table=None)
    is_as_the_loop(model, resident, device, loss_of, own=[])
    assert model.table.tolist() == [0.0, 1.0, 2.0]
    assert model.rope.table[0].tolist() == [0.0, 1.0]
    assert model.moved.device.type == torch.device(device).type


def test_afterwards_attributes_are_as_the_last_micro_batch_leaves_them(device):
    model, _ = pair("reentrant", sets_scale)
    with streamed(model, device):
        accumulate(lambda x: turn_knob(model, x), inputs(device), own=[knob, model])
        last = number_of(inputs(device)[-1])
        assert (knob.scale, model.scale) == (last, last)


class Handing(nn.Module):
    """The third writes what those after it read, and the fifth takes it away again."""

    def __init__(self, number, third):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.number, self.third, self.kept = number, third, None

    def forward(self, x):
        kept = self.third[0].kept
        kept = kept if isinstance(kept, dict) else vars(kept)
        scale = kept.get("scale", 1.0)
        if self.number == 2:
            kept["scale"] = number_of(x)
        elif self.number == 4:
            kept.clear()
        return x + scale * self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("kept", [{}, SimpleNamespace()], ids=["dict", "object"])
@pytest.mark.parametrize("of_all", [False, True], ids=["of one", "of all"])
def test_what_a_block_leaves_for_a_later_one_is_its_micro_batchs(device, kept, of_all):
    """It is as before where a micro-batch sets out, and where it ends."""
    torch.manual_seed(0)
    third = []
    model = nn.Sequential(*(Handing(number, third) for number in range(16)))
    third.append(model[2])
    for block in model if of_all else third:
        block.kept = kept
    resident = copy.deepcopy(model)
    with attached(model, device, offload_percent=0.5) as manager:
        assert grains_of(manager.attachment).modules == list(model)
        accumulate(lambda x: loss_of(model, x), inputs(device))
        loop(resident.to(device), inputs(device), loss_of)
        assert_same(gradients(model), gradients(resident))


def test_tables_of_many_objects_are_not_looked_at_in_each_turn():
    """As those are by which a library reads the files of all its models."""
    few, many = ([Slots() for _ in range(count)] for count in (10, 600))
    model = nn.Module()
    model.few, model.many = few, many
    places = Places()
    places.watch([model], [])
    watched = [place.name for place in places._watched]
    assert watched.count("few") == 1 and watched.count("scale") >= 10 and "many" not in watched
