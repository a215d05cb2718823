"""Units that stay on the device for good: which they are, and that nothing else changes."""

from __future__ import annotations

import copy
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, gradients, resident_pair
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from oracle_offload.engine.geometry import unit_bytes
from oracle_offload.host import memory
from oracle_offload.host.sizes import MIB
from oracle_offload.layers.managed import is_managed
from oracle_offload.model import kept


class Net(nn.Module):
    """Blocks of a layer of 64 KiB each, checkpointed or not, with adapters or without."""

    def __init__(self, depth=12, trainable=True, reentrant=None, adapted=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(depth))
        self.requires_grad_(trainable)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 2, bias=False), nn.Linear(2, 128, bias=False))
            for _ in range(depth if adapted else 0)
        )
        self.reentrant = reentrant

    def block(self, number, x):
        y = self.blocks[number](x)
        return torch.tanh(y + self.adapters[number](x) if self.adapters else y)

    def forward(self, x):
        for number in range(len(self.blocks)):
            if self.reentrant is None:
                x = self.block(number, x)
            else:
                x = checkpoint(self.block, number, x, use_reentrant=self.reentrant)
        return x


def step_of(device, autocast=False, micro_steps=1):
    def step(model):
        results = []
        for _ in range(micro_steps):
            x = torch.randn(3, 128).to(device).requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = model(x)
            y.float().square().sum().backward()
            results += [y.detach(), x.grad]
        return results

    return step


def kept_of(manager):
    """The names of the Parameters that stay by request."""
    return {name for name, why in manager.resident.items() if why.startswith("kept on the device")}


def masters_of(manager):
    return sum(buffer.nbytes for buffer in manager.attachment.buffers)


# ---- which they are ----


def test_what_is_chosen_fits_and_leaves_less_than_one_over():
    chance = random.Random(0)
    for _ in range(500):
        sizes = [chance.choice((1, 2, 3, 50)) * 256 for _ in range(chance.randint(1, 40))]
        limit = chance.randint(0, sum(sizes))
        chosen = kept.spread(sizes, limit)
        taken = sum(sizes[number] for number in chosen)
        others = [size for number, size in enumerate(sizes) if number not in chosen]
        assert taken <= limit
        assert not others or limit - taken < min(others)
    assert kept.spread([3, 4], 7) == {0, 1}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.7])
def test_equal_units_are_spread_evenly(share):
    chosen = kept.spread([10] * 40, int(share * 400))
    assert len(chosen) == 40 * share
    for number in range(40):
        before = len([one for one in chosen if one <= number])
        assert abs(before - share * (number + 1)) < 1


def test_a_large_unit_is_made_up_for_by_those_after_it():
    assert kept.spread([100, *[10] * 20], 150) == {*range(1, 11), *range(12, 21, 2)}
    assert kept.spread([*[10] * 20, 100], 150) == {*range(1, 20, 2), 0, 2, 4, 6, 8}


def numbers(manager, model):
    return [n for n, layer in enumerate(model.blocks) if f"blocks.{n}.weight" in kept_of(manager)]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_host_holds_the_share_that_is_offloaded(share, device):
    model = Net()
    unit = unit_bytes(list(model.blocks[0].parameters()))
    options = {"offload_percent": share}
    with attached(copy.deepcopy(model), device, **options) as manager:
        whole = manager.attachment.arena.capacity_bytes
    with attached(model, device, **options, ram_budget="offloaded") as manager:
        stays = numbers(manager, model)
        managed = 12 - len(stays)
        assert len(manager.layers) == managed >= 1
        assert masters_of(manager) <= max(share * 12, 1) * unit + unit
        assert manager.attachment.managed_bytes == managed * unit
        assert manager.attachment.kept_bytes == len(stays) * unit <= (1 - share) * 12 * unit
        on_device = manager.attachment.arena.capacity_bytes + manager.attachment.kept_bytes
        assert abs(on_device - whole) < unit, "the card's share is what it was"
        for number, block in enumerate(model.blocks):
            assert is_managed(block) is (number not in stays)
            assert block.weight.device.type == ("cpu" if number not in stays else device)
        names = {f"blocks.{n}.{key}" for n in stays for key in ("weight", "bias")}
        assert kept_of(manager) == names
        assert all(str(share) in manager.resident[name] for name in names)


@pytest.mark.parametrize("budget", [200_000, "300KiB", 400_000, 1 << 40])
def test_a_size_bounds_the_masters(budget):
    model = Net()
    unit = unit_bytes(list(model.blocks[0].parameters()))
    with attached(model, "cpu", ram_budget=budget) as manager:
        limit = {"300KiB": 300 << 10}.get(budget, budget)
        assert manager.attachment.managed_bytes == min(limit // unit, 12) * unit
        assert all(repr(budget) in manager.resident[name] for name in kept_of(manager))
        floor = 2 * unit
        assert manager.attachment.arena.capacity_bytes == floor


def test_a_fraction_is_of_the_machines_memory(monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: 1_000_000)
    model = Net()
    with attached(model, "cpu", ram_budget=0.3) as manager:
        assert 200_000 < manager.attachment.managed_bytes <= 300_000


@pytest.mark.parametrize("mapped", [False, True])
def test_auto_takes_what_the_machine_can_spare(monkeypatch, mapped, tmp_path):
    """What the weights occupy comes back; pages of a mapped file count as free already."""
    model = Net()
    unit = unit_bytes(list(model.blocks[0].parameters()))
    total = sum(p.nbytes for p in model.parameters())
    if mapped:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        state = torch.load(tmp_path / "weights.pt", mmap=True)
        model.load_state_dict(state, assign=True)
        del state
    monkeypatch.setattr(memory, "available_bytes", lambda: 400_000)
    with attached(model, "cpu", ram_budget="auto") as manager:
        limit = 0.9 * (400_000 + (0 if mapped else total))
        assert manager.attachment.managed_bytes == min(limit // unit, 12) * unit


def test_auto_needs_a_system_that_tells(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    with pytest.raises(OffloadError, match="does not tell how much memory is free"):
        oracle_offload.attach(Net(), "cpu", ram_budget="auto")
    assert not open_states()


def test_a_budget_below_the_smallest_unit_is_refused_with_its_size():
    model = Net()
    with pytest.raises(OffloadError, match=r"ram_budget='1KiB' is 1\.00 KiB.*needs 64\.50 KiB"):
        oracle_offload.attach(model, "cpu", ram_budget="1KiB")
    assert not any(map(is_managed, model.modules()))


@pytest.mark.parametrize("value", ["plenty", 0, True], ids=str)
def test_a_ram_budget_that_is_none_is_refused_with_its_value(value):
    with pytest.raises(ValueError, match=f"ram_budget={value!r}"):
        oracle_offload.attach(Net(), "cpu", ram_budget=value)


def test_vram_budget_counts_them_as_fixed(sim):
    model = Net()
    unit = unit_bytes(list(model.blocks[0].parameters()))
    with attached(model, "cpu", vram_budget=10 * unit, ram_budget=6 * unit) as manager:
        assert manager.attachment.kept_bytes == 6 * unit
        assert manager.attachment.arena.capacity_bytes == 4 * unit
    with pytest.raises(
        OffloadError, match=r"and what ram_budget keeps on the device need 516\.00 KiB"
    ):
        oracle_offload.attach(model, "cpu", vram_budget=7 * unit, ram_budget=6 * unit)
    device = simulator.get_device(0)
    device.memory_bytes = 10 * unit
    simulator.set_device(0, device)
    with attached(model, "cpu", vram_budget="auto", ram_budget=6 * unit) as manager:
        assert manager.attachment.arena.capacity_bytes == manager.attachment.arena.floor_bytes
    device.memory_bytes = 8 * unit
    simulator.set_device(0, device)
    with pytest.raises(OffloadError, match="vram_budget='auto' is "):
        oracle_offload.attach(model, "cpu", vram_budget="auto", ram_budget=6 * unit)


def test_tied_weights_stay_together():
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(12)])
    model[11].weight = model[0].weight
    model[7].weight = model[3].weight
    expected = copy.deepcopy(model)
    x = torch.randn(2, 128)
    for share in (0.2, 0.4, 0.6, 0.8):
        with attached(model, "cpu", offload_percent=share, ram_budget="offloaded") as manager:
            assert is_managed(model[11]) is is_managed(model[0])
            assert is_managed(model[7]) is is_managed(model[3])
            assert model[11].weight is model[0].weight and model[7].weight is model[3].weight
            distinct = 10 * 128 * 128 * 4
            assert masters_of(manager) <= share * distinct + 2 * 128 * 128 * 4
            assert_same(model(x), expected(x))


class Lending(nn.Module):
    """Weights without an operator, of this module and of a child that it does not call."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(128, 160))
        self.child = nn.ModuleDict({"of": nn.ParameterList([torch.randn(160, 128)])})

    def forward(self, x):
        return torch.tanh(x @ self.own @ self.child["of"][0])


def test_modules_without_an_operator_are_kept_too(device):
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(*[Lending() for _ in range(6)]))
    options = {"offload_percent": 0.5, "ram_budget": "offloaded"}
    with attached(managed, device, **options) as manager:
        assert len(manager.layers) == 3 and len(kept_of(manager)) == 6
        assert "1.child.of.0" in kept_of(manager) and managed[1].own.device.type == device
        assert managed[1].child["of"][0].device.type == device
        assert_models_agree(managed, resident, step_of(device), device=device)


# ---- that nothing else changes ----


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "new", "reentrant"])
@pytest.mark.parametrize("trained", ["weights", "adapters"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_it_computes_as_the_resident_model(checkpointed, trained, autocast, device):
    torch.manual_seed(0)
    weights = trained == "weights"
    model = Net(8, weights, reentrant=checkpointed, adapted=not weights)
    managed, resident = resident_pair(model)
    options = {"offload_percent": 0.5, "ram_budget": "offloaded"}
    with attached(managed, device, **options, ignore_modules=["adapters"]) as manager:
        assert len(manager.layers) == 4 and len(numbers(manager, managed)) == 4
        step = step_of(device, autocast, micro_steps=2)
        assert_models_agree(managed, resident, step, steps=2, device=device)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_error_is_identical(where):
    torch.manual_seed(0)
    managed, resident = resident_pair(Net(8, reentrant=False))

    class Broken(Exception):
        pass

    def fail(*_):
        raise Broken

    with attached(managed, "cpu", offload_percent=0.5, ram_budget="offloaded") as manager:
        stays = numbers(manager, managed)
        for number in (stays[1], next(n for n in range(2, 8) if n not in stays)):
            block = managed.blocks[number]
            hook = (
                block.register_forward_hook(fail)
                if where == "forward"
                else block.register_full_backward_hook(fail)
            )
            with pytest.raises(Broken):
                step_of("cpu")(managed)
            hook.remove()
            assert_models_agree(managed, resident, step_of("cpu"))


def test_an_optimizer_made_before_attach_trains_them(device):
    torch.manual_seed(0)
    managed, resident = resident_pair(Net(8))
    resident.to(device)
    options = {"offload_percent": 0.5, "ram_budget": "offloaded"}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (managed, resident)]
    ids = [id(p) for p in managed.parameters()]
    with attached(managed, device, **options) as manager:
        assert [id(p) for p in managed.parameters()] == ids
        for number in range(3):
            for model, optimizer in zip((managed, resident), optimizers, strict=True):
                torch.manual_seed(number)
                step_of(device)(model)
                optimizer.step()
            assert_same(gradients(managed), gradients(resident))
            for optimizer in optimizers:
                optimizer.zero_grad()
        stays = numbers(manager, managed)
        assert_same(dict(managed.state_dict()), dict(resident.state_dict()))
        moved = managed.blocks[stays[0]].weight
        assert moved.device.type == device
    assert moved.device.type == "cpu", "all of it was there before attach"


@pytest.mark.parametrize("checkpointed", [None, False], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.75])
def test_a_step_moves_as_few_bytes_as_without(checkpointed, share):
    """2 (M - C) either way; none of them are of units that stay."""
    seen, kept_bytes = [], []
    for ram_budget in (None, "offloaded"):
        torch.manual_seed(0)
        model = Net(32, trainable=False, reentrant=checkpointed)
        with attached(model, "cpu", offload_percent=share, ram_budget=ram_budget) as manager:
            step = step_of("cpu")
            for _ in range(4):
                step(model)
            before = simulator.stats().h2d_bytes
            step(model)
            moved = simulator.stats().h2d_bytes - before
            least = manager.attachment.x_min_bytes()
            unit = manager.state.engine.stats()["largest_unit_bytes"]
            assert manager.memory_summary().devices[0].models[0].x_min_bytes == least
            assert least <= moved <= least + 4 * unit
            seen.append(least)
            kept_bytes.append(manager.attachment.kept_bytes)
    assert kept_bytes[0] == 0 < kept_bytes[1]
    assert abs(seen[0] - seen[1]) <= 2 * unit


def test_no_byte_of_what_stays_travels():
    torch.manual_seed(0)
    model = Net(8, trainable=False)
    with attached(model, "cpu", offload_percent=0.5, ram_budget="offloaded") as manager:
        stays = numbers(manager, model)
        before = simulator.stats().h2d_bytes
        for number in stays:
            model.blocks[number](torch.randn(2, 128))
        assert simulator.stats().h2d_bytes == before
        other = next(n for n in range(8) if n not in stays)
        model.blocks[other](torch.randn(2, 128))
        assert simulator.stats().h2d_bytes > before


def test_what_callers_do_to_a_model_works_as_on_resident_layers(device):
    torch.manual_seed(0)
    managed, resident = resident_pair(Net(8, trainable=False))
    resident.to(device)
    x = torch.randn(2, 128).to(device)
    with attached(managed, device, offload_percent=0.5, ram_budget="offloaded") as manager:
        stays = numbers(manager, managed)
        places = [p.data_ptr() for p in managed.parameters()]
        for _ in range(3):
            assert managed.to(device) is managed
        assert [p.data_ptr() for p in managed.parameters()] == places
        expected = resident(x)
        assert_same(copy.deepcopy(managed).to(device)(x), expected)
        assert_same(managed(x), expected)
        # An EMA's weights for a while, then the model's own again.
        ema = {name: torch.full_like(t, 0.01) for name, t in managed.state_dict().items()}
        own = {name: t.clone() for name, t in managed.state_dict().items()}
        for state in (ema, own):
            managed.load_state_dict(state)
            resident.load_state_dict(state)
            manager.refresh()
            assert_same(managed(x), resident(x))
        for model in (managed, resident):
            model.to(torch.bfloat16)
        assert_same(managed(x.bfloat16()), resident(x.bfloat16()))
        assert numbers(manager, managed) == stays


def test_attach_says_nothing_of_what_it_was_asked_to_keep(caplog):
    with caplog.at_level(logging.WARNING), attached(Net(), "cpu", ram_budget="150KiB") as manager:
        assert len(kept_of(manager)) == 20
        assert not caplog.records
        text = str(manager.memory_summary())
        assert "of them kept, to spare host memory | 645.00 KiB" in text
    with attached(Net(), "cpu") as manager:
        assert "of them kept" not in str(manager.memory_summary())
    model = nn.Sequential(Net(), nn.LayerNorm(100_000))
    options = {"ram_budget": "150KiB", "ignore_modules": ["1"]}
    with caplog.at_level(logging.WARNING), attached(model, "cpu", **options):
        (record,) = caplog.records
        assert "only 50% of its" in record.getMessage()
        assert "'1.weight'" in record.getMessage() and "blocks" not in record.getMessage()


def test_a_device_without_room_leaves_everything_where_it_was(monkeypatch, device):
    model = Net()
    before = {name: (p.device, p.clone()) for name, p in model.named_parameters()}
    original = kept.move_residents
    calls = []

    def move(owners, where):
        if not calls:
            calls.append(len(list(owners)))
            original(list(owners)[:2], where)
            raise torch.OutOfMemoryError("no room")
        original(owners, where)

    monkeypatch.setattr(kept, "move_residents", move)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        oracle_offload.attach(model, device, offload_percent=0.5, ram_budget="offloaded")
    assert calls == [6]
    assert not any(map(is_managed, model.modules())) and not open_states()
    for name, parameter in model.named_parameters():
        assert parameter.device == before[name][0]
        assert_same(parameter, before[name][1])
    assert not hasattr(model, "_memory_manager")


def unit_of(module, names=None):
    kind = SimpleNamespace(lends_to_code=names is not None, names=names)
    tensors = [module.get_parameter(key) for key in names or ("weight", "bias")]
    return [SimpleNamespace(name="it", module=module, kind=kind, tensors=lambda: tensors)]


def test_each_owner_goes_back_to_where_it_was(monkeypatch):
    cpu, meta = torch.device("cpu"), torch.device("meta")
    layer, away, block = nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), Net(2)
    units = [unit_of(layer), unit_of(away), unit_of(block, ["blocks.0.weight", "blocks.1.bias"])]
    found = kept.Kept(units, "for a reason")
    there = unit_bytes([*away.parameters()])
    assert found.bytes_to_come(cpu) == there and found.bytes_to_come(meta) == found.bytes - there
    moved = []

    def move(owners, where):
        moved.append((list(owners), where))
        if len(moved) == 1:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kept, "move_residents", move)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        found.move_to(meta)
    owners = [layer, away, block.blocks[0], block.blocks[1]]
    homes = [([owner], meta if owner is away else cpu) for owner in owners]
    assert moved == [(owners, meta), *homes]
    names = {"it": "for a reason", "it.blocks.0.weight": "for a reason"}
    assert found.reasons() == {**names, "it.blocks.1.bias": "for a reason"}


@pytest.mark.parametrize(
    ("units", "tied"),
    [
        (["a", "b", "c"], [[0], [1], [2]]),
        (["a", "b", "a"], [[0, 2], [1]]),
        (["a", "b", "ab", "b"], [[0, 1, 2, 3]]),
        (["a", "b", "c", "bc", "ab", "c"], [[0, 1, 2, 3, 4, 5]]),
        (["a", "b", "c", "ac", "b", "cb", "d", "e"], [[0, 1, 2, 3, 4, 5], [6], [7]]),
        (["ab", "cd", "e", "bd"], [[0, 1, 3], [2]]),
    ],
)
def test_units_that_share_a_tensor_stay_or_stream_together(units, tied):
    tensors = {name: torch.zeros(1) for name in "abcde"}
    leaves = [
        [SimpleNamespace(tensors=lambda unit=unit: [tensors[name] for name in unit])]
        for unit in units
    ]
    assert [sorted(group) for group in kept._tied(leaves)] == tied


# ---- AI-Toolkit's attach does this by default ----


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_aitoolkits_attach_keeps_what_it_does_not_offload(share, device):
    torch.manual_seed(0)
    managed, resident = resident_pair(Net(10, trainable=False))
    MemoryManager.attach(managed, device, offload_percent=share)
    manager = managed._memory_manager
    unit = unit_bytes(list(managed.blocks[0].parameters()))
    assert len(manager.layers) == max(1, 10 * share)
    assert masters_of(manager) <= 10 * share * unit + unit
    stays = [block for block in managed.blocks if not is_managed(block)]
    assert all(block in manager.unmanaged_modules for block in stays)
    resident.to(device)
    x = torch.randn(2, 128).to(device)
    assert_same(managed(x), resident(x))
    MemoryManager.detach(managed)
    assert {p.device.type for p in managed.parameters()} == {"cpu"}
    assert_same(managed(x.cpu()), resident.to("cpu")(x.cpu()))


def test_masters_are_those_of_the_weights_alone():
    """The buffers hold what streams, and no page more than their cuts need."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    with attached(model, "cpu", offload_percent=0.5, ram_budget="offloaded") as manager:
        assert 32 * MIB == manager.attachment.managed_bytes <= masters_of(manager) <= 32.1 * MIB
