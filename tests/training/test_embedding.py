"""Managed ``nn.Embedding``: the resident's bits, and rows on the link where the table was."""

from __future__ import annotations

import contextlib
import copy
import threading
import time

import pytest
import torch
from equality import (
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    is_simulated,
    resident_pair,
    step_alike,
)
from models import Parts, checkpointed
from torch import nn
from torch.nn import functional as F

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import simulator
from oracle_offload.layers.any import AnyLayer
from oracle_offload.layers.embedding import EmbeddingLayer
from oracle_offload.layers.swap import answering_class, base_class

ROWS, WIDTH, IDS = 50, 16, (2, 7)
TABLE_BYTES = 4 * ROWS * WIDTH
READ_BYTES = 4 * WIDTH * IDS[0] * IDS[1]


class Scaled(nn.Embedding):
    """As Gemma's: ``super()`` looks up, and the weight is asked for its dtype alone."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("scale", torch.tensor(3.7), persistent=False)

    def forward(self, input):
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Shifted(Scaled):
    """A forward above another one."""

    def forward(self, input):
        return super().forward((input + 2) % ROWS)


class Net(nn.Module):
    def __init__(self, make=nn.Embedding, reentrant=None, **options):
        super().__init__()
        self.tokens = make(ROWS, WIDTH, **options)
        self.inner, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def block(self, ids, anchor):
        return torch.tanh(self.inner(self.tokens(ids) + anchor))

    def forward(self, ids, anchor):
        return checkpointed(self.block, ids, anchor, reentrant=self.reentrant)


def ids_of(step=0):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, IDS, generator=generator)
    ids[0, :3] = ids[0, 0]  # some rows more than once
    return ids


def make_step(device, dtype=torch.float32, autocast=False, ids=None):
    ids = ids_of() if ids is None else ids

    def step(model):
        anchor = torch.full((WIDTH,), 0.5).to(device, dtype).requires_grad_()
        context = contextlib.nullcontext()
        if autocast:
            context = torch.autocast(torch.device(device).type, torch.bfloat16)
        with context:
            y = model(ids.to(device), anchor)
        (y.float().square() * torch.linspace(-1, 1, WIDTH, device=y.device)).sum().backward()
        return [y.detach(), anchor.grad]

    return step


def trained(model, trainable):
    model.tokens.requires_grad_(trainable)
    return model


def table_of(manager):
    """Return the layer of the only table; nothing is resident."""
    assert manager.resident == {}
    (layer,) = (layer for layer in manager.layers if isinstance(layer, EmbeddingLayer))
    return layer


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("make", [nn.Embedding, Scaled, Shifted])
def test_an_embedding_has_the_residents_bits(device, make, trainable, reentrant):
    managed, resident = resident_pair(trained(Net(make, reentrant), trainable))
    with attached(managed, device) as manager:
        table_of(manager)
        assert_models_agree(managed, resident, make_step(device), device=device)
        assert (managed.tokens.weight.grad is not None) is trainable


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("make", [nn.Embedding, Scaled])
def test_low_precision_has_the_residents_bits(device, make, trainable, how):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    managed, resident = resident_pair(trained(Net(make, False), trainable).to(dtype))
    with attached(managed, device) as manager:
        table_of(manager)
        step = make_step(device, dtype, how == "autocast")
        assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 3},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"padding_idx": 0, "scale_grad_by_freq": True},
    ],
    ids=str,
)
def test_the_gradient_is_made_as_the_module_says(device, options):
    managed, resident = resident_pair(Net(**options))
    ids = ids_of()
    ids[1, :4] = torch.tensor([0, 3, ROWS - 1, 3])
    with attached(managed, device) as manager:
        table_of(manager)
        assert_models_agree(managed, resident, make_step(device, ids=ids), device=device)
        plain = copy.deepcopy(resident).cpu()
        plain.tokens = nn.Embedding.from_pretrained(plain.tokens.weight.detach(), freeze=False)
        make_step("cpu", ids=ids)(plain)
        assert not torch.equal(plain.tokens.weight.grad, managed.tokens.weight.grad)


@pytest.mark.parametrize("ids", [torch.arange(3), torch.zeros(0, dtype=torch.int64)], ids=str)
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_row_numbers_of_any_shape_and_kind(device, ids, trainable):
    managed, resident = resident_pair(trained(Net(), trainable))
    resident.to(device)
    with attached(managed, device) as manager:
        table_of(manager)
        for kind in (torch.int64, torch.int32):
            step = make_step(device, ids=ids.to(kind))
            assert_same(step(managed), step(resident))
            assert_same(managed.tokens.weight.grad, resident.tokens.weight.grad)


def test_sparse_gradients_are_the_residents(device):
    if device == "simgpu":
        pytest.skip("the tests' device type has no sparse tensors")
    managed, resident = resident_pair(Net(sparse=True))
    resident.to(device)
    with attached(managed, device) as manager:
        table_of(manager)
        for number in range(3):  # the second and third add to what is there
            step = make_step(device, ids=ids_of(number))
            assert_same(step(managed), step(resident))
            found, expected = managed.tokens.weight.grad, resident.tokens.weight.grad
            assert found.is_sparse and found.device.type == "cpu" and found.shape == expected.shape
            if is_simulated(device):
                assert found.is_coalesced() == expected.is_coalesced()
            else:  # a card lines up what it adds, the host merges rows that are the same
                found, expected = found.coalesce(), expected.coalesce()
            assert_same(found._indices(), expected._indices())
            assert_same(found._values(), expected._values())
        optimizers = [
            torch.optim.SparseAdam([m.tokens.weight], lr=0.1) for m in (managed, resident)
        ]
        for optimizer in optimizers:
            optimizer.step()
        if is_simulated(device):
            assert_same(managed.state_dict(), resident.state_dict())


def test_rows_travel_and_not_the_table(device):
    managed = trained(Net(), False)
    managed.inner.requires_grad_(False)
    with attached(managed, device) as manager:
        table = table_of(manager)
        step = make_step(device)
        step(managed)
        traffic = manager.attachment.traffic
        before = manager.state.engine.stats()
        read = traffic.rows_read, traffic.rows_bytes
        step(managed)
        after = manager.state.engine.stats()
        assert (traffic.rows_read - read[0], traffic.rows_bytes - read[1]) == (1, READ_BYTES)
        assert after["h2d_bytes"] - before["h2d_bytes"] <= 2 * (4 * WIDTH * (WIDTH + 1) + 256)
        assert table.unit not in {unit for unit, *_ in manager.state.engine.residents()}
        assert manager.attachment.arena.capacity_bytes < TABLE_BYTES
        usage = manager.memory_summary().devices[0].models[0]
        assert usage.rows_bytes == traffic.rows_bytes == 2 * READ_BYTES
        assert "rows read from the host, in all" in str(manager.memory_summary())
        assert f"{2 * READ_BYTES / 1024:.2f} KiB in 2" in str(manager.memory_summary())


def test_a_step_counts_rows_with_what_it_moved(device):
    managed = Net()
    with attached(managed, device) as manager:
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
        for _ in range(2):
            make_step(device)(managed)
            before = manager.state.engine.stats()["h2d_bytes"]
            optimizer.step()
            optimizer.zero_grad()
        moved = manager.attachment.traffic.step_h2d_bytes
        make_step(device)(managed)
        copied = manager.state.engine.stats()["h2d_bytes"] - before
        optimizer.step()
        assert manager.attachment.traffic.step_h2d_bytes == copied + READ_BYTES == moved
        # What is read in place needs no room, and no step has to move it.
        assert manager.attachment.x_min_bytes() < 2 * TABLE_BYTES


@pytest.mark.parametrize("before_s", [0.0, 0.5], ids=["at once", "after other work"])
def test_the_device_takes_the_links_time_for_the_rows(sim, before_s):
    sim.slow_link(1e-6)  # 1,000 bytes a second
    expected_s = before_s + READ_BYTES / 1000
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH))
    with attached(model, "cpu") as manager, torch.no_grad():
        before = simulator.now()
        manager.state.time.pending_kernel_s = before_s
        model(ids_of())
        manager.state.engine.hold()  # waits for who reads
        assert expected_s <= simulator.now() - before < 1.01 * expected_s


def test_optimizer_steps_have_the_residents_bits(device):
    managed, resident = resident_pair(Net(padding_idx=1))
    with attached(managed, device) as manager:
        table_of(manager)
        resident.to(device)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (managed, resident))
        for number in range(3):
            step = make_step(device, ids=ids_of(number))
            for model in (managed, resident):  # accumulated, and sampled from in between
                step(model)
                with torch.no_grad():
                    model(ids_of(9).to(device), torch.zeros(WIDTH).to(device))
            assert_same(step(managed), step(resident))
            step_alike(managed, resident, (ours, theirs), device)
        assert_same(managed.state_dict(), resident.state_dict())


def test_a_step_after_sampling_alone_is_no_race(device, sim):
    if is_simulated(device):
        sim.slow_link(1e-3)
    managed = Net()
    with attached(managed, device):
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
        make_step(device)(managed)
        with torch.no_grad(), oracle_offload.model.witness.Witness(declare=is_simulated(device)):
            managed.tokens(ids_of().to(device))
            optimizer.step()  # the fixture finds no report


def test_inference_has_the_residents_bits(device):
    managed, resident = resident_pair(Net(Scaled))
    resident.to(device)
    ids, anchor = ids_of().to(device), torch.ones(WIDTH).to(device)
    with attached(managed, device) as manager:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in range(2):
                    assert_same(managed(ids, anchor), resident(ids, anchor))
        assert manager.attachment.traffic.rows_read == 4


def test_row_numbers_on_the_host_are_brought_to_the_device(device):
    managed, resident = resident_pair(nn.Sequential(nn.Embedding(ROWS, WIDTH)))
    with attached(managed, device):
        found = managed(ids_of())
        assert found.device.type == torch.device(device).type
        assert_same(found, resident(ids_of()))


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_an_error_leaves_nothing_behind(device, trainable):
    managed, resident = resident_pair(trained(Net(), trainable))
    with attached(managed, device) as manager:
        for bad in (torch.tensor([ROWS]), torch.tensor([0.5])):
            if device != "cuda":  # where the kernel fails the context
                with pytest.raises((IndexError, RuntimeError)) as raised:
                    managed.tokens(bad.to(device))
                assert "offload" not in str(raised.value)
        # The last traceback is alive, with all frames that knew the table.
        manager.state.engine.remove_member(table_of(manager).member)  # it is in use no more
        manager.detach()
        with attached(managed, device):
            assert_models_agree(managed, resident, make_step(device), device=device)


def test_an_error_in_between_leaves_the_next_step_as_it_was(device, monkeypatch):
    managed, resident = resident_pair(Net())

    def fail(*_):
        raise torch.OutOfMemoryError("planted")

    with attached(managed, device):
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddingLayer, "derivative", fail)
            with pytest.raises(torch.OutOfMemoryError, match="planted"):
                make_step(device)(managed)
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddingLayer, "base_call", fail)
            with pytest.raises(torch.OutOfMemoryError, match="planted"):
                make_step(device)(managed)
        assert_models_agree(managed, resident, make_step(device), device=device)


# ---- tables that cannot be read in place ----


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_an_unlocked_table_streams_whole(device, trainable):
    managed, resident = resident_pair(trained(Net(), trainable))
    with attached(managed, device, lock="never") as manager:
        table = table_of(manager)
        assert manager.attachment.arena.capacity_bytes >= 2 * TABLE_BYTES
        assert_models_agree(managed, resident, make_step(device), device=device)
        assert manager.attachment.traffic.rows_read == 0
        with torch.no_grad():
            managed.tokens(ids_of().to(device))
        assert table.unit in {unit for unit, *_ in manager.state.engine.residents()}


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_a_table_that_is_unlocked_later_is_copied_beside_the_arena(device, trainable):
    managed, resident = resident_pair(trained(Net(), trainable))
    with attached(managed, device) as manager:
        assert manager.attachment.arena.capacity_bytes < TABLE_BYTES
        held = torch.randn(ROWS, WIDTH)
        managed.tokens.weight.data = held  # which stays somebody's
        resident.tokens.weight.data = held.clone()
        assert_models_agree(managed, resident, make_step(device), device=device)
        assert manager.attachment.traffic.rows_read == 0
        assert manager.attachment.traffic.computed_bytes == {"tokens": TABLE_BYTES}


def test_a_model_of_tables_alone(device):
    managed, resident = resident_pair(nn.Sequential(nn.Embedding(ROWS, WIDTH)))
    resident.to(device)
    with attached(managed, device, offload_percent=0.5) as manager:
        assert manager.resident == {}
        for number in range(2):
            ids = ids_of(number).to(device)
            for model in (managed, resident):
                model(ids).square().sum().backward()
        assert_same(managed[0].weight.grad, resident[0].weight.grad)


# ---- tables that move while they are read ----


def test_a_table_that_is_being_moved_is_waited_for():
    managed, resident = resident_pair(nn.Sequential(nn.Embedding(ROWS, WIDTH)))
    with attached(managed) as manager:
        table, begun = table_of(manager), threading.Event()

        def move():
            with table.state.lock:
                table.moving = True
                begun.set()
                time.sleep(0.2)
                table.moving = False

        thread = threading.Thread(target=move)
        thread.start()
        assert begun.wait(30)
        found = managed(ids_of())
        assert not table.moving
        thread.join()
        assert_same(found, resident(ids_of()))


def test_a_table_that_is_replaced_as_a_call_begins_is_read_in_its_new_layout(monkeypatch):
    managed, resident = resident_pair(nn.Sequential(nn.Embedding(ROWS, WIDTH)))
    with attached(managed) as manager:
        table = table_of(manager)

        class Replacing(Recorder):
            def map(self, *arguments):
                if managed[0].weight.is_contiguous():
                    managed[0].weight.data = managed[0].weight.data.t().contiguous().t()
                    table.follow()
                return self._engine.map(*arguments)

        monkeypatch.setattr(table.state, "engine", Replacing(table.state.engine))
        assert_same(managed(ids_of()), resident(ids_of()))
        assert not managed[0].weight.is_contiguous()


def test_a_refusal_of_the_engine_is_not_tried_again(monkeypatch):
    managed = nn.Sequential(nn.Embedding(ROWS, WIDTH))
    with attached(managed) as manager:

        class Refusing(Recorder):
            def map(self, *arguments):
                raise OffloadError("planted")

        engine = manager.state.engine
        monkeypatch.setattr(manager.state, "engine", Refusing(engine))
        with pytest.raises(OffloadError, match="planted"):
            managed(ids_of())
        monkeypatch.setattr(manager.state, "engine", engine)


# ---- who shares a table ----


class Tied(nn.Module):
    """A language model in small."""

    def __init__(self, make):
        super().__init__()
        self.tokens, self.inner = make(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, anchor):
        return self.head(torch.tanh(self.inner(self.tokens(ids) + anchor)))[..., :WIDTH]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("make", [nn.Embedding, Scaled])
def test_a_tied_head_is_the_tables_only_copy_in_the_arena(device, make, trainable):
    managed, resident = resident_pair(trained(Tied(make), trainable))
    with attached(managed, device) as manager:
        table = table_of(manager)
        (head,) = (layer for layer in manager.layers if layer.name == "head")
        assert head.tensors()[0] is table.tensors()[0] is managed.tokens.weight
        assert_models_agree(managed, resident, make_step(device), device=device)
        with torch.no_grad():
            make_units = managed(ids_of().to(device), torch.zeros(WIDTH).to(device))
        assert make_units is not None
        units = {unit for unit, *_ in manager.state.engine.residents()}
        assert head.unit in units and table.unit not in units


# ---- which modules these are ----


class Reads(nn.Embedding):
    """Computes with its weight itself."""

    def forward(self, input):
        return F.embedding(input, self.weight * 2)


class ReadsToo(nn.Embedding):
    def forward(self, input):
        return super().forward(input) + self.weight.sum()


class AsksTheDevice(nn.Embedding):
    def forward(self, input):
        return super().forward(input.to(self.weight.device))


class ReadsInside(nn.Embedding):
    """In a function that is written inside its forward."""

    def forward(self, input):
        rows = super().forward(input)
        return sum((self.weight[i] for i in range(2)), rows)


@pytest.mark.parametrize("make", [Reads, ReadsToo, AsksTheDevice, ReadsInside])
def test_a_forward_that_reads_the_weight_itself_streams_it(device, make, nothing_is_small):
    managed, resident = resident_pair(Net(make))
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert isinstance(table_of(manager), EmbeddingLayer)
        assert_models_agree(managed, resident, make_step(device), device=device)


def test_a_class_with_a_forward_of_its_own_is_itself_again_after_detach(device):
    managed = Net(Shifted)
    with attached(managed, device) as manager:
        table_of(manager)
        made = type(managed.tokens)
        below = answering_class(nn.Embedding, nn.Embedding.forward)
        assert made.__mro__[1:5] == (Shifted, Scaled, below, nn.Embedding)
        assert made.__name__ == "Shifted" and isinstance(managed.tokens, Shifted)
        assert base_class(managed.tokens) is Shifted
        assert managed.tokens.scale.device.type == torch.device(device).type
        assert managed.tokens.weight.device.type == "cpu"
        managed.to(torch.bfloat16)
        assert {managed.tokens.scale.dtype, managed.tokens.weight.dtype} == {torch.bfloat16}
        make_step(device, torch.bfloat16)(managed)
    assert type(managed.tokens) is Shifted


def test_a_copy_is_an_ordinary_module():
    managed = Net(Shifted)
    with attached(managed, "cpu"):
        copied = copy.deepcopy(managed)
        assert type(copied.tokens) is Shifted
        left = object.__new__(type(managed.tokens))
        left.__dict__.update(copied.tokens.__dict__)  # without a layer it is the base class
        assert_same(left(ids_of()), copied.tokens(ids_of()))


def test_max_norm_stays_and_a_bag_is_lent(device, nothing_is_small):
    def compute(parts, ids, anchor):
        return parts.inner(parts.tokens(ids) + parts.bag(ids) + parts.renormed(ids[:, 0]) + anchor)

    if device == "simgpu":
        pytest.skip("the tests' device type has no EmbeddingBag")
    model = Parts(
        compute,
        tokens=nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=3),
        renormed=nn.Embedding(ROWS, WIDTH, max_norm=1.0),
        bag=nn.EmbeddingBag(ROWS, WIDTH, max_norm=1.0),
        inner=nn.Linear(WIDTH, WIDTH),
    )
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert set(manager.resident) == {"renormed.weight", "bag.weight"}
        assert set(manager.resident.values()) == {"max_norm writes its weight in forward"}
        (bag,) = (layer for layer in manager.layers if layer.name == "tokens")
        assert isinstance(bag, AnyLayer)
        assert_models_agree(managed, resident, make_step(device), device=device)


def test_max_norm_that_is_set_after_attach_is_refused_by_name(device):
    managed, resident = resident_pair(Net())
    with attached(managed, device):
        managed.tokens.max_norm = 1.0
        for context in (torch.enable_grad, torch.no_grad):
            with (
                context(),
                pytest.raises(OffloadError, match="max_norm of managed layer 'tokens' was set"),
            ):
                managed(ids_of().to(device), torch.zeros(WIDTH).to(device))
        managed.tokens.max_norm = None
        assert_models_agree(managed, resident, make_step(device), device=device)


def test_double_backward_is_refused(device):
    managed = Net()
    with attached(managed, device):
        y = managed(ids_of().to(device), torch.zeros(WIDTH).to(device))
        (grad,) = torch.autograd.grad(y.square().sum(), managed.tokens.weight, create_graph=True)
        with pytest.raises(OffloadError, match="double backward"):
            grad.sum().backward()


def test_a_steady_step_creates_nothing(device):
    managed = Net(Scaled)
    with attached(managed, device) as manager:
        for _ in range(3):
            make_step(device)(managed)
        before = manager.state.engine.stats()["allocations"]
        for _ in range(3):
            make_step(device)(managed)
        assert manager.state.engine.stats()["allocations"] == before
