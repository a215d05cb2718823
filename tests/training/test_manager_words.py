"""What `attach` and a manager say: of arguments, of budgets, of a model that is gone."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from equality import attached
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload import manager as manager_module
from oracle_offload.compress.choice import staging_bytes
from oracle_offload.engine import devices
from oracle_offload.engine.engines import open_states
from oracle_offload.host.sizes import format_size
from oracle_offload.model import masters, selection
from oracle_offload.model.arena import Arena

KIB, MIB = 1 << 10, 1 << 20
LAYER = 64 * KIB  # one of `tower`, a unit of its own


def test_a_manager_says_what_it_holds():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    with attached(model, "cpu") as manager:
        said = repr(manager)
        arena = format_size(manager.attachment.arena.capacity_bytes)
        bytes_managed = format_size(manager.attachment.managed_bytes)
    assert said == (
        f"MemoryManager(Sequential on cpu: 2 layers, {bytes_managed} managed, arena {arena})"
    )


def test_detach_of_the_class_needs_a_model():
    with pytest.raises(TypeError, match="needs the attached module"):
        oracle_offload.MemoryManager.detach()


def test_a_manager_outlives_its_model_and_says_that_it_is_gone():
    model = nn.Sequential(nn.Linear(8, 8))
    model(torch.ones(1, 8))
    manager = oracle_offload.attach(model, "cpu")
    assert manager.module is model
    assert [layer.module() for layer in manager.layers] == [model[0]]
    assert manager.contains(model[0]) and not manager.contains(nn.Linear(8, 8))
    inner = model[0]
    del model
    gc.collect()
    with pytest.raises(OffloadError, match="has been deleted"):
        _ = manager.module
    assert not manager.contains(inner)


# ---- arguments ----


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"module": 3}, ValueError, "attach() takes an nn.Module, not int"),
        (
            {"module": SimpleNamespace(components={"unet": nn.Linear(1, 1), "steps": 3})},
            ValueError,
            "attach() takes an nn.Module, not SimpleNamespace; attach its parts one by one: 'unet'",
        ),
        (
            {"device": "cpu:7"}, OffloadError,
            "device='cpu:7', but there is one simulated device; use 'cpu'",
        ),
        ({"offload_percent": True}, ValueError, "offload_percent=True is not a number in [0, 1]"),
        ({"offload_percent": "1"}, ValueError, "offload_percent='1' is not a number in [0, 1]"),
        ({"offload_percent": None}, ValueError, "offload_percent=None is not a number in [0, 1]"),
        ({"offload_percent": -0.1}, ValueError, "offload_percent=-0.1 is outside [0, 1]"),
        (
            {"offload_percent": 70}, ValueError,
            "offload_percent=70 is outside [0, 1]; did you mean 0.7?",
        ),
        (
            {"offload_percent": 100}, ValueError,
            "offload_percent=100 is outside [0, 1]; did you mean 1.0?",
        ),
        (
            {"offload_percent": 1.5}, ValueError,
            "offload_percent=1.5 is outside [0, 1]; did you mean 0.015?",
        ),
        ({"offload_percent": 101}, ValueError, "offload_percent=101 is outside [0, 1]"),
        (
            {"quantize": len}, ValueError,
            "quantize= is for weights that are read; quantise what is there already",
        ),
        (
            {"compress": "zip"}, ValueError,
            "compress='zip' is none of None, 'lossless', 'auto'",
        ),
        (
            {"lock": "some"}, ValueError,
            "lock='some' is neither 'auto' nor 'never', nor a size",
        ),
    ],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_told_with_its_value(options, error, said):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(error) as refused:
        oracle_offload.attach(**{"module": model, "device": "cpu", **options})
    assert str(refused.value) == said
    assert "_memory_manager" not in model.__dict__


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("budget", ["1MiB", None])
def test_the_one_of_two_budgets_that_is_passed_over_is_named(caplog, budget, share):
    model = nn.Sequential(nn.Linear(256, 256))
    with attached(model, "cpu", vram_budget=budget, offload_percent=share):
        said = (
            "vram_budget='1MiB' says what weights may take on cpu; "
            "offload_percent=0.5 is passed over."
        )
        assert (said in caplog.messages) == (budget is not None and share != 1.0)


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0])
def test_the_ends_of_offload_percent_are_taken(share):
    with attached(nn.Sequential(nn.Linear(8, 8)), "cpu", offload_percent=share) as manager:
        assert len(manager.layers) == 1


def test_a_model_is_attached_once_and_detached_once():
    model, other = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(OffloadError) as refused:
        oracle_offload.MemoryManager.detach(model)
    assert str(refused.value) == (
        "Sequential is not attached; detach takes the module that was given to attach."
    )
    with oracle_offload.attach(model, "cpu") as manager, attached(other, "cpu") as its:
        assert model._memory_manager is manager
        with pytest.raises(OffloadError) as refused:
            oracle_offload.attach(model, "cpu")
        assert str(refused.value) == (
            "Sequential is attached already; detach it first (MemoryManager.detach)."
        )
        with pytest.raises(OffloadError, match=r"^this manager manages another model$"):
            manager.refresh(other)
        manager.refresh(model)
        manager.refresh(model[0])
        its.refresh()
        assert oracle_offload.MemoryManager.detach(model) is model
        assert manager.detach() is model
        assert not hasattr(model, "_memory_manager")
    assert type(model[0]) is nn.Linear
    with oracle_offload.attach(model, "cpu") as manager:
        assert manager.detach() is model
    with oracle_offload.attach(model, "cpu"):
        assert "_memory_manager" in model.__dict__
    assert "_memory_manager" not in model.__dict__, "the end of the block detaches"


def state_of(model):
    """All that is in the modules of a model, by name."""
    return {
        (name, key): dict(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in ("_parameters", "_modules")
    }


def test_after_detach_a_model_holds_what_it_held_before():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    kinds, before = [type(part) for part in model.modules()], state_of(model)
    parameters = [id(parameter) for parameter in model.parameters()]
    for forwards in (0, 1, 2):
        manager = oracle_offload.attach(model, "cpu")
        for _ in range(forwards):
            model(torch.ones(1, 8)).sum().backward()
        assert [type(part) for part in model.modules()] != kinds or state_of(model) != before
        manager.detach()
        assert state_of(model) == before
        assert [type(part) for part in model.modules()] == kinds
        assert [id(parameter) for parameter in model.parameters()] == parameters


def test_an_attach_whose_residents_find_no_room_leaves_an_ordinary_model(monkeypatch):
    refusals = [torch.OutOfMemoryError("no room")]

    def refuse(*arguments, **options):
        if refusals:
            assert type(model[0]) is not nn.Linear
            raise refusals.pop()
        move_residents(*arguments, **options)

    model, move_residents = tower(2), manager_module.move_residents
    with monkeypatch.context() as patched:
        patched.setattr(manager_module, "move_residents", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            oracle_offload.attach(model, "cpu")
    assert "_memory_manager" not in model.__dict__ and type(model[0]) is nn.Linear
    assert open_states() == []
    with attached(model, "cpu") as manager:
        assert len(manager.layers) == 2


def test_a_detached_model_is_looked_at_no_more():
    model = tower(2)
    with attached(model, "cpu") as manager:
        model.append(nn.Linear(8, 8))
        assert manager.structure.changed
        manager.settle()
    model.append(nn.Linear(8, 8))
    assert not manager.structure.changed


def test_a_table_lies_on_the_device_where_it_is_not_locked_as_a_whole():
    """Rows of a locked one are read in place."""
    for lock, layers in (("auto", 2 + 2), ("never", 2 + 4 + 2 * 4)):
        model = nn.Sequential(nn.Embedding(512, 128).requires_grad_(False), *tower(2))
        with attached(model, "cpu", lock=lock, vram_budget="1GiB") as manager:
            assert manager.attachment.arena.capacity_bytes == layers * LAYER


def test_weights_lie_in_locked_memory_and_come_from_there():
    model = tower(4)
    x = torch.ones(2, 128)
    expected = model(x)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with attached(model, "cpu", offload_percent=1.0) as manager:
        (buffer,) = manager.attachment.buffers
        assert buffer.locked and buffer.nbytes == 4 * LAYER
        for parameter, then in zip(model.parameters(), before, strict=True):
            assert buffer.address <= parameter.data_ptr() < buffer.address + buffer.nbytes
            assert parameter.data_ptr() != then
        assert torch.equal(model(x), expected)
        assert manager.state.engine.stats()["h2d_bytes"] == 4 * LAYER


def test_what_torch_has_cached_is_given_back_where_weights_have_left_the_device(monkeypatch):
    calls = []
    monkeypatch.setattr(devices.Simulated, "release_cached", lambda self: calls.append(1))
    with attached(tower(2), "cpu"):
        assert calls == [], "they came from the host"


def test_attach_is_told_in_a_line(caplog):
    caplog.set_level(logging.INFO, logger="oracle_offload")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with attached(model, "cpu", ignore_modules=["1"]) as manager:
        lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        assert f"attached {manager!r}; 2 parameters stay resident" in lines


def test_the_spelling_of_the_class_is_the_same_attach():
    model = tower(4)
    manager = oracle_offload.MemoryManager.attach(model, "cpu", 0.5, ["3"])
    assert manager is model._memory_manager and [layer.name for layer in manager.layers] == [*"012"]
    assert manager.attachment.arena.capacity_bytes == int(1.5 * LAYER) + 2 * LAYER
    (usage,) = manager.memory_summary().devices[0].models
    assert usage.name == "Sequential" and usage.resident_bytes == LAYER
    assert manager.memory_summary(True).devices[0].models[0].name == "Sequential"
    assert oracle_offload.MemoryManager.detach(model) is model


@pytest.mark.parametrize(("lock", "locked"), [("never", 0), ("auto", 4), (2 * LAYER, 2)])
def test_no_more_is_locked_than_was_asked_for(monkeypatch, lock, locked):
    monkeypatch.setattr(masters, "PIECE_BYTES", LAYER)
    with attached(tower(4), "cpu", lock=lock) as manager:
        assert [buffer.locked for buffer in manager.attachment.buffers] == [
            number < locked for number in range(4)
        ]


def test_refresh_forgets_what_lies_on_the_device_and_takes_over_what_is_new():
    model = tower(2)
    x = torch.ones(1, 128)
    with attached(model, "cpu", offload_percent=0.0) as manager:
        moved = []
        for refresh in (False, False, True, False):
            if refresh:
                manager.refresh()
            before = manager.state.engine.stats()["h2d_bytes"]
            with torch.no_grad():
                model(x)
            moved.append(manager.state.engine.stats()["h2d_bytes"] - before)
        assert moved == [2 * LAYER, 0, 2 * LAYER, 0]
        old = manager.attachment.buffers
        for layer in model:
            layer.weight.data = torch.ones(128, 128)
        manager.refresh()
        new = manager.attachment.buffers
        assert all(buffer.locked and buffer not in old for buffer in new)
        for layer in model:
            address = layer.weight.data_ptr()
            assert any(b.address <= address < b.address + b.nbytes for b in new)
        assert torch.equal(
            model(x), F.linear(F.linear(x, torch.ones(128, 128)), torch.ones(128, 128))
        )


class Codes(nn.Module):
    """A quantised layer of a kind that is not known."""

    def __init__(self):
        super().__init__()
        for name, count in (("codes", 16), ("more", 32)):
            codes = torch.zeros(count, dtype=torch.int8)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))

    def forward(self, x):
        return x + self.codes.sum() + self.more.sum()


def test_quantised_weights_that_stay_are_told_by_kind_with_their_bytes(caplog):
    model = nn.Sequential(nn.Linear(64, 64), Codes(), nn.LayerNorm(4), Codes())
    with attached(model, "cpu"):
        (said,) = [r.getMessage() for r in caplog.records]
        assert said == (
            "Sequential: quantised weights of no known format stay on the device: torch.int8 in "
            f"{Codes.__module__}.Codes, 96 B."
        )
    caplog.clear()
    model[1] = model[3] = nn.Tanh()
    with attached(model, "cpu"):
        assert not caplog.records


def test_what_stays_unasked_is_told_beside_what_is_managed_or_kept(caplog):
    with attached(tower(), "cpu", ram_budget=4 * LAYER, ignore_modules=["0", "1"]):
        (said,) = [r.getMessage() for r in caplog.records]
    assert said == (
        "Sequential: only 75% of its 512.00 KiB are managed; 128.00 KiB stay on the device. The "
        "largest: '0.weight', 64.00 KiB (named in ignore_modules); '1.weight', 64.00 KiB (named in "
        "ignore_modules). manager.resident lists all."
    )


def test_modules_that_came_after_attach_are_part_of_the_model_at_the_next_forward():
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model, "cpu") as manager:
        model.append(nn.Linear(8, 8))
        assert not manager.contains(model[1])
        model(torch.ones(1, 8))
        assert manager.contains(model[1])
        model.append(nn.Linear(8, 8))
        manager.settle()
        assert manager.contains(model[2])


def test_copies_of_an_attached_model_are_ordinary_ones():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with attached(model, "cpu") as manager:
        for found in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert not {"_memory_manager", "__reduce_ex__"} & found.__dict__.keys()
            assert found.training and torch.equal(found[0].weight, model[0].weight)
        assert type(copy.deepcopy(model)[0]) is nn.Linear
        assert copy.deepcopy({"manager": manager}) == {"manager": None}
        assert pickle.loads(pickle.dumps(manager)) is None
        assert model._memory_manager is manager
    assert not {"_memory_manager", "__reduce_ex__"} & model.__dict__.keys()


# ---- budgets ----


def tower(depth=8, *more):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(depth)), *more)


def capacity(model, **options):
    with attached(model, "cpu", **options) as manager:
        arena, free = manager.attachment.arena, options.get("vram_budget") in (None, "auto")
        assert arena.may_grow == free, "what was asked for in bytes is kept to"
        assert (manager.attachment.auto_budget is not None) == (
            options.get("vram_budget") == "auto"
        )
        assert arena.floor_bytes <= manager.attachment.weights.most
        beside = 8 * LAYER - options.get("ram_budget", 8 * LAYER)
        assert manager.attachment.kept_bytes == beside, "what the host is not to hold"
        return manager.attachment.arena.capacity_bytes


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, 2),  # the floor: two of the largest units
        ({"offload_percent": 0.5}, 4 + 2),
        ({"offload_percent": 0.0}, 8 + 2),
        ({"vram_budget": "200KiB"}, 200 / 64),
        ({"vram_budget": 200 * KIB + 255}, 200 / 64),  # whole steps of the alignment
        ({"vram_budget": 2 * LAYER}, 2),
        ({"vram_budget": "1GiB"}, 8 + 2),  # never more than can be used
        ({"vram_budget": "200KiB", "offload_percent": 0.1}, 200 / 64),  # replaces it
        ({"vram_budget": "auto"}, 2),  # the steps tell how much more there is
        # What always stays on the device takes no room in the arena.
        ({"ram_budget": 6 * LAYER}, 2),
        ({"ram_budget": 6 * LAYER, "offload_percent": 0.5}, 4 - 2 + 2),
        ({"ram_budget": 4 * LAYER, "offload_percent": 0.5}, 2),
        ({"ram_budget": 2 * LAYER, "offload_percent": 0.5}, 2),
        ({"ram_budget": 6 * LAYER, "vram_budget": 5 * LAYER}, 3),
        ({"ram_budget": 6 * LAYER, "vram_budget": 4 * LAYER}, 2),
        ({"ram_budget": 6 * LAYER, "vram_budget": "1GiB"}, 6 + 2),
    ],
    ids=str,
)
def test_the_arena_has_what_was_asked_for(options, layers):
    assert capacity(tower(), **options) == layers * LAYER


def test_the_budget_is_less_than_the_units_need(monkeypatch, sim):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)

    def refused(model, **options):
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(OffloadError) as found:
            oracle_offload.attach(model, "cpu", **options)
        moved = [p.data_ptr() for p in model.parameters()] != before
        assert not moved or options["vram_budget"] == "auto", "no weight moves in vain"
        return str(found.value)

    assert refused(tower(), vram_budget=2 * LAYER - 1) == (
        f"vram_budget={2 * LAYER - 1} is 128.00 KiB, but two of the largest units need 128.00 KiB; "
        "raise the budget to that."
    )
    large = tower(2, nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False))
    assert refused(large, vram_budget="400KiB") == (
        "vram_budget='400KiB' is 400.00 KiB, but two of the largest units need 512.00 KiB; raise "
        "the budget to that, or leave resident what is too large for it, with ignore_modules: "
        "'2', '3'."
    )
    assert refused(tower(), vram_budget=3 * LAYER, ram_budget=6 * LAYER) == (
        f"vram_budget={3 * LAYER} is 192.00 KiB, but two of the largest units and what ram_budget "
        "keeps on the device need 256.00 KiB; raise the budget to that."
    )

    device = sim.get_device(0)
    device.memory_bytes = 4 * LAYER
    sim.set_device(0, device)
    # 90% of what the two layers that are kept leave.
    assert refused(tower(), vram_budget="auto", ram_budget=6 * LAYER) == (
        "vram_budget='auto' is 115.20 KiB, but two of the largest units need 128.00 KiB; raise the "
        "budget to that."
    )

    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.table, self.inner = nn.Parameter(torch.ones(128)), inner

        def forward(self, x):
            return self.inner(x) * self.table

    around = nn.Sequential(Around(tower(2)))
    assert refused(around, vram_budget=2 * LAYER) == (
        f"vram_budget={2 * LAYER} is 128.00 KiB, but two of the largest units, and what stays lent "
        "around them, need 128.50 KiB; raise the budget to that."
    )


def test_what_compressed_weights_pass_through_is_part_of_the_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    model = codable()
    with pytest.raises(OffloadError) as found:
        oracle_offload.attach(model, "cpu", compress="lossless", vram_budget=2 * MIB)
    what = "two of the largest units and what compressed weights pass through need"
    needed = format_size(2 * MIB + staging_bytes(list(model.parameters())))
    assert str(found.value) == (
        f"vram_budget={2 * MIB} is 2.00 MiB, but {what} {needed}; raise the budget to that."
    )
    assert capacity(model, vram_budget=2 * MIB) == 2 * MIB


def codable():
    torch.manual_seed(0)
    layers = [nn.Linear(*shape, bias=False) for shape in [(512, 1024), (1024, 512)] * 2]
    return nn.Sequential(*layers).bfloat16().requires_grad_(False)


def test_a_device_that_cannot_decode_is_told_before_anything_is_coded(
    sim, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    sim.slow_link(0.01)
    model = codable()
    with (
        caplog.at_level(logging.INFO, logger="oracle_offload"),
        attached(model, "cpu", compress="auto") as manager,
    ):
        assert manager.attachment.coded_bytes()[0] == 4 * MIB
        why = manager.attachment.compressed_because
        said = [r for r in caplog.records if "compress='auto'" in r.getMessage()]
        assert why and [r.getMessage() for r in said] == [f"Sequential: compress='auto': {why}"]
        assert said[0].levelno == logging.INFO, "it is no warning"
    caplog.clear()

    def refuse(arena):
        raise OffloadError("no kernels")

    monkeypatch.setattr(Arena, "check_staging", refuse)
    with attached(model, "cpu", compress="auto") as manager:
        assert manager.attachment.coded_bytes() == (0, 0)
        assert manager.attachment.compressed_because == "the device cannot decode: no kernels"
    (record,) = caplog.records
    assert record.getMessage() == (
        "Sequential: compress='auto': the device cannot decode: no kernels"
    )
    for options in ({"compress": "lossless"}, {"compress": "auto", "ram_budget": 3 * MIB}):
        with pytest.raises(OffloadError, match=r"^no kernels$"):
            oracle_offload.attach(model, "cpu", **options)
    with attached(model, "cpu", offload_percent=0.0, compress="auto") as manager:
        assert manager.attachment.coded_bytes() == (0, 0), "nothing waits, so nothing is coded"
    with attached(model, "cpu") as manager:
        assert manager.attachment.compressed_because == "", "it was not asked for"


# ---- what one attachment holds ----


def test_sizes_and_names_of_what_an_attachment_holds():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(128, 128, bias=False))
    with attached(model, "cpu", vram_budget=200 * KIB) as manager:
        held = manager.attachment
        small = 3 * (8 * 8 + 8) * 4
        assert held.weight_bytes == small + LAYER
        assert held.managed_bytes == 6 * 256 + LAYER
        assert sorted(held.unit_layers().values()) == ["0, 1, 2", "3"]
        assert held.look_ahead_units() == held.arena.capacity_bytes // LAYER - 1
        assert held.coded_bytes() == (0, 0) and held.kept_bytes == 0
        assert held.x_min_bytes() == 0
    with attached(tower(), "cpu") as manager:
        held = manager.attachment
        assert held.x_min_bytes() == 2 * (8 - 2) * LAYER and held.look_ahead_units() == 1


class Keeps(nn.Module):
    """A cache of a weight, as code that means well has one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(128, 128))
        self.cache = []

    def forward(self, x):
        self.cache.append(self.table)
        return x @ self.table


@pytest.mark.parametrize(
    ("count", "names"), [(1, "'0'"), (3, "'0', '1', '2'"), (5, "'0', '1', '2' and 2 more")]
)
def test_weights_that_code_keeps_refuse_detach_by_name(monkeypatch, count, names):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    model = nn.Sequential(*(Keeps() for _ in range(count)))
    with attached(model, "cpu", offload_percent=0.0) as manager:
        with torch.no_grad():
            model(torch.ones(1, 128))
        with pytest.raises(OffloadError) as refused:
            manager.detach()
        assert str(refused.value) == (
            f"weights of {names} are still held on the device: by a graph that awaits its "
            "backward, or by code that keeps them (a cache of a weight, ctx.weight = weight). Let "
            "go of that, then detach; or leave the layer resident with ignore_modules=[...]."
        )
        assert [layer.name for layer in manager.attachment.held()] == list("01234"[:count])
        assert model._memory_manager is manager, "it stays attached"
        for part in model:
            part.cache.clear()


def test_an_attach_that_reads_the_weights_says_what_it_has_read(tmp_path, caplog):
    path = tmp_path / "model.safetensors"
    save_file(tower(2).state_dict(), path)
    with caplog.at_level("INFO", "oracle_offload"), attached(tower(2), "cpu", weights=path):
        (said,) = [text for text in caplog.messages if text.startswith("Sequential: read ")]
    assert f"0.000 GiB from '{path}' in " in said
