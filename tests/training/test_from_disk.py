"""`attach` with ``weights=``: the same model as one that was loaded first, or none at all."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import models
import pytest
import torch
from equality import assert_models_agree, assert_same, attached, step_alike
from safetensors.torch import load_file, save_file
from torch import nn

import oracle_offload
from oracle_offload.disk.checkpoint import Checkpoint, WeightFile
from oracle_offload.disk.conversion import find_sources
from oracle_offload.disk.header import Stored
from oracle_offload.disk.source import Fragment, Source, whole
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from oracle_offload.engine.geometry import memory_of
from oracle_offload.errors import OffloadError
from oracle_offload.model import masters
from oracle_offload.model.loading import Loading


class Tower(nn.Module):
    """Blocks with a norm, a table that no file has, a buffer that it has, and tied ends."""

    def __init__(self, width=64, depth=4, reentrant=None, dtype=torch.float32):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(width, width, bias=False, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.LayerNorm(width, dtype=dtype))
            for _ in range(depth)
        )
        self.last = nn.Linear(width, width, bias=False, dtype=dtype)
        self.last.weight = self.first.weight
        self.stack = nn.Parameter(torch.randn(6, width, width, dtype=dtype) / width)
        self.register_buffer("shift", torch.randn(width, dtype=dtype))
        self.register_buffer("table", torch.linspace(0, 1, width, dtype=dtype), persistent=False)
        self.scale = torch.linspace(1, 2, width, dtype=dtype)  # a plain attribute

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + models.checkpointed(block, x, reentrant=self.reentrant)
        x = torch.einsum("bi,eij->bj", x, self.stack) + self.shift
        return self.last(x * self.table * self.scale.to(x.device))


def tower_step(model):
    device = model.shift.device
    x = torch.randn(3, 64, dtype=model.shift.dtype).to(device).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


def saved(tmp_path, model=None):
    """Return a model with values, one without them, and the file that has them."""
    if model is None:
        torch.manual_seed(0)
        model = Tower()
    path = tmp_path / "model.safetensors"
    state = {name: t for name, t in model.state_dict().items() if name != "last.weight"}
    save_file({name: t.contiguous() for name, t in state.items()}, path)
    return model, without_values(), path


def without_values(*arguments, kind=Tower, **options):
    with oracle_offload.empty_weights():
        return kind(*arguments, **options)


def assert_same_state(found, expected):
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(
            getattr(found, kind)(remove_duplicate=False),
            getattr(expected, kind)(remove_duplicate=False),
            strict=True,
        )
        for (name, one), (other_name, other) in pairs:
            assert name == other_name and one.requires_grad == other.requires_grad
            assert one.stride() == other.stride()
            assert_same(one, other, name)


# ---- the same model ----


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not"])
def test_training_is_that_of_the_resident_model(device, tmp_path, reentrant):
    resident, _, path = saved(tmp_path)
    resident.reentrant = reentrant
    managed = without_values(reentrant=reentrant)
    with attached(managed, device, offload_percent=0.8, weights=path) as manager:
        assert {layer.name for layer in manager.layers} >= {"first", "last", "blocks.3.0"}
        assert managed.last.weight is managed.first.weight
        assert_same_state(managed, resident)
        assert_models_agree(managed, resident, tower_step, device=device)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (managed, resident)]
        step_alike(managed, resident, optimizers, device)
        assert_models_agree(managed, resident, tower_step, device=device)
        assert_same(managed.state_dict(), resident.state_dict())


@pytest.mark.parametrize("name", ["llama-tied", "flux"])
def test_real_models_without_values_are_filled(device, tmp_path, name):
    build, step = {
        "llama-tied": (lambda: models.llama(tie_word_embeddings=True), models.language_step),
        "flux": (models.flux, models.flux_step),
    }[name]
    torch.manual_seed(0)
    resident = build().train()
    resident.save_pretrained(tmp_path, max_shard_size="100KB")
    with oracle_offload.empty_weights():
        managed = build().train()
    assert all(p.is_meta for p in managed.parameters())
    with attached(managed, device, offload_percent=0.8, weights=tmp_path):
        for model in (managed, resident):
            models.enable_checkpointing(model)
        assert_same_state(managed, resident)
        assert_models_agree(managed, resident, step, steps=1, device=device)


def sharded(tmp_path, path):
    state = load_file(path)
    keys = sorted(state)
    weights = {}
    for number, part in enumerate((keys[::2], keys[1::2])):
        weights.update(dict.fromkeys(part, f"shard-{number}.safetensors"))
        save_file({key: state[key] for key in part}, tmp_path / f"shard-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    path.unlink()
    return index


def test_one_file_several_or_a_folder_give_the_same(tmp_path):
    resident, _, path = saved(tmp_path)
    for weights in (str(path), tmp_path, lambda: sharded(tmp_path, path), tmp_path):
        weights = weights() if callable(weights) else weights
        managed = without_values()
        with attached(managed, "cpu", weights=weights):
            assert_same_state(managed, resident)
        assert_same_state(managed, resident)  # after detach, too
        del managed


def test_values_lie_in_masters_and_nowhere_else(tmp_path):
    """Every managed tensor was read into its master, also where one is cut into many reads."""
    resident, managed, path = saved(tmp_path)
    before = dict(managed.named_parameters())
    optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
    targets = []
    original = WeightFile.read_into

    def read_into(self, view, offset):
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        targets.append((address, address + len(view)))
        original(self, view, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFile, "read_into", read_into)
        patch.setattr("oracle_offload.disk.reading.BLOCK_BYTES", 1000)
        manager = oracle_offload.attach(managed, "cpu", weights=path)
    places = {memory_of(t) for layer in manager.layers for t in layer.tensors()}
    for start, end in places:
        assert manager.attachment.pieces.at(start) is not None
        assert sum(stop - at for at, stop in targets if start <= at < end) == end - start
    assert len(targets) > 3 * len(places)
    for name, parameter in managed.named_parameters():
        assert parameter is before[name]  # the optimizer made before has it
    for model in (managed, resident):
        torch.manual_seed(1)
        tower_step(model)
    optimizer.step()
    torch.optim.SGD(resident.parameters(), lr=0.1).step()
    assert_same_state(managed, resident)
    manager.detach()


def test_several_threads_read(tmp_path, monkeypatch):
    """Reads wait for one another here: one thread alone would wait for ever."""
    import threading

    from oracle_offload.disk import reading

    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 10)
    meeting = threading.Barrier(reading.THREADS)
    met = []
    original = WeightFile.read_into

    def read_into(self, view, offset):
        if not met:
            meeting.wait(20)
            met.append(threading.current_thread().name)
        original(self, view, offset)

    monkeypatch.setattr(WeightFile, "read_into", read_into)
    resident, managed, path = saved(tmp_path)
    with attached(managed, "cpu", weights=path):
        assert_same_state(managed, resident)
    assert reading.THREADS > 1
    assert not [t for t in threading.enumerate() if t.name.startswith("oracle_offload-read")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_model_says_the_dtype_and_values_are_converted_as_torch_does(
    tmp_path, dtype, monkeypatch
):
    monkeypatch.setattr("oracle_offload.disk.reading.BLOCK_BYTES", 1000)
    resident, _, path = saved(tmp_path)
    managed = without_values(dtype=dtype)
    table, scale = managed.table.clone(), managed.scale.clone()
    with attached(managed, "cpu", weights=path):
        expected = resident.to(dtype)
        for name, tensor in expected.state_dict().items():
            assert_same(managed.state_dict()[name], tensor, name)
        assert_same(managed.table, table)
        assert_same(managed.scale, scale)
        expected.table, expected.scale = table, scale
        assert_models_agree(managed, expected, tower_step, steps=1)


def test_a_layout_of_the_models_own_is_kept(device, tmp_path):
    resident = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64))
    path = tmp_path / "conv.safetensors"
    save_file(resident.state_dict(), path)
    resident.to(memory_format=torch.channels_last)
    with oracle_offload.empty_weights():
        managed = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64))
    managed.to(memory_format=torch.channels_last)

    def step(model):
        x = torch.randn(2, 8, 8, 8).to(model[2].running_mean.device)
        y = model(x.to(memory_format=torch.channels_last))
        y.sum().backward()
        return (y.detach(),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oracle_offload.disk.reading.BLOCK_BYTES", 1000)
        manager = oracle_offload.attach(managed, device, weights=path)
    assert_same_state(managed, resident)
    assert_models_agree(managed, resident, step, steps=1, device=device)
    manager.detach()


def test_narrow_floats_are_widened(tmp_path):
    path = tmp_path / "narrow.safetensors"
    values = torch.randn(128, 128).to(torch.float8_e4m3fn)
    save_file({"weight": values}, path)
    with oracle_offload.empty_weights():
        managed = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    with attached(managed, "cpu", weights=path):
        assert_same(managed.weight, values.to(torch.bfloat16))


def test_what_has_values_already_keeps_them_unless_the_file_has_others(tmp_path):
    resident, managed, path = saved(tmp_path)
    state = load_file(path)
    del state["shift"]
    save_file(state, path)
    own = managed.shift.clone()
    assert not torch.equal(own, resident.shift)
    with attached(managed, "cpu", weights=path):
        assert_same(managed.shift, own)
    managed = without_values()
    state["shift"] = resident.shift
    save_file(state, path)
    with attached(managed, "cpu", weights=path):
        assert_same(managed.shift, resident.shift)


def test_keys_that_the_class_ignores_are_ignored(tmp_path):
    resident, managed, path = saved(tmp_path)
    save_file({**load_file(path), "old.inv_freq": torch.zeros(3)}, path)
    managed._keys_to_ignore_on_load_unexpected = [r"old\.inv"]
    with attached(managed, "cpu", weights=path):
        assert_same_state(managed, resident)


class KeepsMore(Tower):
    """With a state that is no tensor, and that no file of tensors has."""

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        raise AssertionError("no file has it")


def test_a_state_that_is_no_tensor_is_left_as_it_is(tmp_path):
    resident, _, path = saved(tmp_path)
    managed = without_values(kind=KeepsMore)
    with attached(managed, "cpu", weights=path):
        found = {k: v for k, v in managed.state_dict().items() if k != "_extra_state"}
        assert_same(found, dict(resident.state_dict()))


@pytest.mark.parametrize("missing", ["transformers.conversion_mapping", "transformers"])
def test_names_are_the_model_s_before_transformers_converted_them(missing, tmp_path, monkeypatch):
    model = models.llama()
    model.save_pretrained(tmp_path)
    opened = Checkpoint(tmp_path)
    opened.close()
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "transformers":
        monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    found = find_sources(model, opened)
    assert found.keys() == opened.tensors.keys()
    assert all(source.fragments[0].name == name for name, source in found.items())


# ---- with the other arguments ----


@pytest.mark.parametrize(
    "options",
    [
        {"ram_budget": 50_000},
        {"ram_budget": "offloaded", "offload_percent": 0.5},
        {"lock": "never"},
        {"lock": 40_000, "vram_budget": "auto"},
        {"vram_budget": 300_000},
        {"ignore_modules": ["blocks.1", "last"]},
    ],
    ids=lambda options: "-".join(options),
)
def test_with_the_other_arguments(device, tmp_path, options):
    resident, managed, path = saved(tmp_path)
    with attached(managed, device, weights=path, **options) as manager:
        assert manager.layers
        if "ram_budget" in options:
            assert manager.attachment.kept_bytes > 0
        assert_same_state(managed, resident)
        assert_models_agree(managed, resident, tower_step, steps=1, device=device)


def test_the_order_is_kept_from_run_to_run(tmp_path):
    resident, _, path = saved(tmp_path)
    order = tmp_path / "order"
    order.mkdir()
    told = []
    for _ in range(2):
        managed = without_values()
        with attached(managed, "cpu", weights=path, order_file=order, offload_percent=0.9) as found:
            told.append(found.attachment.order)
            assert_models_agree(managed, copy.deepcopy(resident), tower_step, steps=2)
    assert len(list(order.iterdir())) == 1


def test_a_life_after_it(device, tmp_path):
    """`load_state_dict` writes into masters; a copy, and what detach leaves, are ordinary."""
    resident, managed, path = saved(tmp_path)
    manager = oracle_offload.attach(managed, device, weights=path)
    other = {name: torch.randn_like(t) for name, t in resident.state_dict().items()}
    other["last.weight"] = other["first.weight"]
    managed.load_state_dict(other)
    resident.load_state_dict(other)
    assert_models_agree(managed, resident, tower_step, steps=1, device=device)
    if device != "simgpu":  # whose storages cannot be copied
        assert_same_state(copy.deepcopy(managed), resident)
    manager.detach()
    managed.to(device)
    torch.manual_seed(1)
    found = tower_step(managed)
    torch.manual_seed(1)
    assert_same(found, tower_step(resident))
    if device != "simgpu":  # whose tensors take no data of another device
        with attached(managed, device):
            assert_models_agree(managed, resident, tower_step, steps=1, device=device)


# ---- nothing at all where it fails ----


def damage(tmp_path, path, what):
    state = load_file(path)
    if what == "missing":
        del state["blocks.1.0.weight"], state["blocks.2.1.bias"]
    elif what == "unexpected":
        state["more"] = torch.zeros(2)
    elif what == "shape":
        state["blocks.1.0.weight"] = torch.zeros(64, 63)
    elif what == "transposed":
        state["stack"] = torch.zeros(64, 64, 6)
    elif what == "integers":
        state["blocks.1.0.weight"] = torch.zeros(64, 64, dtype=torch.int32)
    save_file(state, path)
    data = path.read_bytes()
    if what == "truncated":
        path.write_bytes(data[:-100])
    elif what == "corrupt":
        path.write_bytes(data.replace(b'"shape"', b'"shbpe"', 1))
    elif what == "absent":
        path.unlink()


REFUSED = {
    "missing": "does not fit Tower: it lacks: 'blocks.1.0.weight', 'blocks.2.1.bias'[.]",
    "unexpected": "does not fit Tower: the model has no: 'more'[.]",
    "shape": r"'blocks.1.0.weight' has shape \(64, 63\), but the model's has \(64, 64\)",
    "transposed": "'stack' has shape",
    "integers": "'blocks.1.0.weight' is I32, which does not become torch.float32",
    "truncated": "is cut off",
    "corrupt": "has a damaged header",
    "absent": "there is no such file",
}


def assert_untouched(model, before):
    """The model has no values, nothing is locked, and nothing knows it."""
    assert not open_states()
    live = simulator.live()
    assert (live.registrations, live.adopted_bytes, live.streams) == (0, 0, 0)
    assert "_memory_manager" not in model.__dict__
    for (name, tensor), (other_name, other, meta) in zip(tensors(model), before, strict=True):
        assert name == other_name and tensor is other, name
        assert tensor.is_meta is meta, name
        assert "Managed" not in type(tensor).__name__
    assert model.blocks[0][0].__class__ is nn.Linear


def tensors(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def before_it(model):
    return [(name, tensor, tensor.is_meta) for name, tensor in tensors(model)]


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, what):
    resident, managed, path = saved(tmp_path)
    good = path.read_bytes()
    damage(tmp_path, path, what)
    before, shift, files = before_it(managed), managed.shift.clone(), open_files()
    with pytest.raises(OffloadError, match=REFUSED[what]) as raised:
        oracle_offload.attach(managed, "cpu", weights=path)
    assert open_files() == files
    assert str(path) in str(raised.value)
    assert_untouched(managed, before)
    assert_same(managed.shift, shift)
    path.write_bytes(good)
    with attached(managed, "cpu", weights=path):
        assert_models_agree(managed, resident, tower_step, steps=1)


def test_values_that_no_file_has_are_refused_by_name(tmp_path):
    _, _, path = saved(tmp_path)
    with torch.device("meta"):
        lost = Tower()
    before = before_it(lost)
    with pytest.raises(OffloadError, match=r"'table', 'scale' are on the meta device.*empty_weigh"):
        oracle_offload.attach(lost, "cpu", weights=path)
    assert_untouched(lost, before)
    lost.table = torch.zeros(64)
    with pytest.raises(OffloadError, match="'scale' is on the meta device, and no file"):
        oracle_offload.attach(lost, "cpu", weights=path)


@pytest.mark.parametrize("device_of_budget", ["too small", "unknown"])
def test_what_attach_itself_refuses_changes_nothing(tmp_path, device_of_budget):
    _, managed, path = saved(tmp_path)
    before = before_it(managed)
    options = {"too small": {"vram_budget": 1000}, "unknown": {"ignore_modules": ["nothing"]}}
    with pytest.raises(
        (OffloadError, ValueError), match=r"vram_budget=1000|no module or parameter named"
    ):
        oracle_offload.attach(managed, "cpu", weights=path, **options[device_of_budget])
    assert_untouched(managed, before)


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["error", "shrunk", "interrupt"])
@pytest.mark.parametrize("at", [0, 3, 8, 13])
def test_an_end_in_the_middle_changes_nothing(request, tmp_path, monkeypatch, how, at):
    """Some pieces are locked already then; an interrupt comes while the threads read."""
    resident, managed, path = saved(tmp_path)
    before, shift = before_it(managed), managed.shift.clone()
    monkeypatch.setattr(masters, "PIECE_BYTES", 40_000)
    monkeypatch.setattr("oracle_offload.disk.reading.THREADS", 1)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heard))
    original, count = WeightFile.read_into, [0]
    before_it_locked = simulator.call_count("cuMemHostRegister")

    def read_into(self, view, offset):
        count[0] += 1
        if count[0] > at:
            if how == "error":
                raise Stop
            if how == "shrunk":
                os.truncate(path, 700)
            if how == "interrupt" and count[0] == at + 1:
                signal.raise_signal(signal.SIGINT)
        original(self, view, offset)

    with monkeypatch.context() as patch:
        patch.setattr(WeightFile, "read_into", read_into)
        kind = {"error": Stop, "shrunk": OffloadError, "interrupt": KeyboardInterrupt}[how]
        with pytest.raises(kind) as raised:
            oracle_offload.attach(managed, "cpu", weights=path)
    assert count[0] > at
    assert (simulator.call_count("cuMemHostRegister") > before_it_locked) == (at > 0)
    if how == "shrunk":
        assert f"'{path}' ended at byte" in str(raised.value)
    assert_untouched(managed, before)
    assert_same(managed.shift, shift)
    del raised
    *_, path = saved(tmp_path, resident)
    with attached(managed, "cpu", weights=path):
        assert_models_agree(managed, resident, tower_step, steps=1)


def test_a_driver_that_fails_changes_nothing(tmp_path):
    """Whichever call fails: the model has its values, or none and can be attached again."""
    resident, _, path = saved(tmp_path)
    refused = 0
    for nth in range(1, 40, 2):
        managed = without_values()
        before = before_it(managed)
        with simulator.fault(None, nth):
            try:
                manager = oracle_offload.attach(managed, "cpu", weights=path)
            except (OffloadError, MemoryError):
                refused += 1
                assert_untouched(managed, before)
                manager = None
        if manager is None:
            manager = oracle_offload.attach(managed, "cpu", weights=path)
        assert_same_state(managed, resident)
        manager.detach()
    assert refused > 3


def test_something_that_holds_a_parameter_is_named(tmp_path):
    import weakref

    _, managed, path = saved(tmp_path)
    before = before_it(managed)
    held = weakref.ref(managed.blocks[2][0].weight)
    with pytest.raises(OffloadError, match=r"'blocks\.2\.0\.weight' cannot be given values, becau"):
        oracle_offload.attach(managed, "cpu", weights=path)
    assert_untouched(managed, before)
    del held
    with attached(managed, "cpu", weights=path):
        pass


# ---- models without weights ----


def test_empty_weights_leaves_out_parameters_alone():
    with oracle_offload.empty_weights():
        model = Tower()
        other = nn.Linear(2, 2)
        shared = nn.Parameter(torch.zeros(3))
        other.a, other.b = shared, nn.Module()
        other.b.c = shared
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.last.weight is model.first.weight
    assert other.a is other.b.c and other.a.is_meta
    assert_same(model.table, torch.linspace(0, 1, 64))
    assert_same(model.scale, torch.linspace(1, 2, 64))
    assert not nn.Linear(2, 2).weight.is_meta
    assert {p.requires_grad for p in model.parameters()} == {True}


def test_empty_weights_keeps_what_is_said_of_a_parameter_and_other_kinds():
    class Own(nn.Parameter):
        pass

    module = nn.Module()
    with oracle_offload.empty_weights():
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        frozen.note = "kept"
        module.frozen, module.own = frozen, Own(torch.ones(2))
        module.register_parameter("none", None)
        module.again = frozen
    assert module.frozen is module.again is frozen
    assert frozen.is_meta and not frozen.requires_grad and frozen.note == "kept"
    assert type(module.own) is Own and not module.own.is_meta and module.none is None


def test_what_a_loading_still_has_to_read_and_has_read_is_told(tmp_path):
    resident, managed, path = saved(tmp_path)
    before = open_files()
    loading = Loading(managed, path)
    assert loading.piece_bytes is None
    first, shift, table = managed.first.weight, managed.shift, managed.table
    assert loading.have(first) and loading.have(shift) and not loading.have(table)
    assert loading.bytes_of(first) == 4 * 64 * 64 and loading.bytes_of(table) == 4 * 64
    with loading:
        there = torch.empty(64)
        told = []
        loading.read([(shift, there)], told.append)
        assert_same(there, resident.shift)
        assert sum(told) == loading._read_bytes == 256 and not loading.have(shift)
        assert managed.stack.untyped_storage().nbytes() == 0
        where = loading.origin(first)
        begin, end = where.skipped, where.skipped + 4 * 64 * 64
        assert where.memory[begin:end] == resident.first.weight.detach().numpy().tobytes()
        loading.skip(first)
        assert not loading.have(first)
        loading._read_bytes += (3 << 30) - 256
        loading._began = time.monotonic() - 2
        said = f"3.000 GiB from '{path}' in 2.0 s (1.61 GB/s)"
        assert loading.done() == said
    assert not managed.last.weight.is_meta  # kept from `done` on
    assert open_files() == before
    with pytest.raises(RuntimeError, match="after shutdown"):
        loading.read([(managed.stack, torch.empty(6, 64, 64))], told.append)


def open_files():
    """Return how many files are open; 0 where the system does not tell."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_what_is_quantised_is_copied_in_small_pieces(tmp_path):
    _, _, path = saved(tmp_path)
    assert Loading(without_values(), path, lambda module: None).piece_bytes == 64 << 20


def test_what_stays_resident_is_on_the_host_in_batches(tmp_path, monkeypatch):
    from oracle_offload.model import loading

    resident, managed, path = saved(tmp_path)
    sizes, honest = [], Loading._read_resident

    def read_resident(self, batch, *more):
        sizes.append([tensor.nbytes for tensor, _ in batch])
        honest(self, batch, *more)
        assert batch == []

    monkeypatch.setattr(Loading, "_read_resident", read_resident)
    monkeypatch.setattr(loading, "_BATCH_BYTES", 20_000)
    with attached(managed, "cpu", weights=path, ignore_modules=["blocks"]):
        assert_same_state(managed, resident)
    assert len(sizes) == 3
    assert all(sum(batch) >= 20_000 > sum(batch[:-1]) for batch in sizes[:-1])
    assert sum(sizes[-1]) < 20_000


def test_several_faults_of_a_file_are_told_at_once(tmp_path):
    _, managed, path = saved(tmp_path)
    state = load_file(path)
    del state["stack"]
    save_file({**state, "more": torch.zeros(1)}, path)
    with pytest.raises(OffloadError) as raised:
        oracle_offload.attach(managed, "cpu", weights=path)
    assert str(raised.value) == (
        f"'{path}' does not fit Tower: it lacks: 'stack' and the model has no: 'more'."
    )


def test_a_lost_table_of_a_part_is_named_with_its_place(tmp_path):
    _, managed, path = saved(tmp_path)
    managed.blocks[1].scale = torch.ones(2, device="meta")
    with pytest.raises(
        OffloadError, match=r"^'blocks\.1\.scale' is on the meta device, and no file"
    ):
        oracle_offload.attach(managed, "cpu", weights=path)


def test_empty_weights_is_of_one_thread_and_ends_with_an_error():
    import threading

    made = []
    with pytest.raises(Stop), oracle_offload.empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        raise Stop
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_leave_empty_weights_in_any_order_leave_nothing_behind(first):
    original = nn.Module.register_parameter
    entered = [oracle_offload.empty_weights(), oracle_offload.empty_weights()]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        threads = [one, other]
        for thread, within in zip(threads, entered, strict=True):
            thread.submit(within.__enter__).result()
        last = 1 - first
        threads[first].submit(entered[first].__exit__, None, None, None).result()
        assert not threads[first].submit(nn.Linear, 2, 2).result().weight.is_meta
        assert threads[last].submit(nn.Linear, 2, 2).result().weight.is_meta
        threads[last].submit(entered[last].__exit__, None, None, None).result()
    assert nn.Module.register_parameter is original


def test_frozen_and_noted_parameters_stay_so(tmp_path):
    resident, _, path = saved(tmp_path)
    resident.stack.requires_grad_(False)
    with oracle_offload.empty_weights():
        managed = Tower()
        managed.stack = nn.Parameter(managed.stack, requires_grad=False)
    managed.stack.note = "kept"
    with attached(managed, "cpu", weights=path):
        assert managed.stack.note == "kept"
        assert_same_state(managed, resident)
        assert_models_agree(managed, resident, tower_step, steps=1)


def test_bytes_of_a_file_stand_for_a_tensor_only_where_they_are_the_same():
    """A compressed master would otherwise hold another tensor's order or numbers."""

    def mapped(begin, nbytes):
        if begin > 1000:
            raise OSError(19, "maps nothing")
        return begin, nbytes

    file = SimpleNamespace(origin=mapped)

    def origin(part_of=whole, dtype="BF16", begin=64, fragments=1, tensor=None):
        stored = Stored(dtype, (2, 3, 4, 4), begin, 192)
        source = Source(stored.shape, (Fragment("w", file, stored, part_of),) * fragments)
        return source.origin(plain if tensor is None else tensor)

    plain = torch.empty(2, 3, 4, 4, dtype=torch.bfloat16)
    assert origin() == (64, 192) and origin(begin=66) == (66, 192)
    assert origin(fragments=2) is None
    assert origin(part_of=lambda tensor: tensor[:1]) is None
    assert origin(dtype="F16") is None and origin(dtype="F4") is None
    assert origin(tensor=plain.to(memory_format=torch.channels_last)) is None
    assert origin(begin=65) is None
    assert origin(begin=1002) is None
