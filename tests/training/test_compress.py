"""Coded masters: the resident model's bits over fewer bytes, and ordinary Parameters to Python."""

from __future__ import annotations

import copy
import functools
import gc
import io
import mmap
import os
import pickle
import sys
import threading
from multiprocessing.reduction import ForkingPickler

import compressed_memory
import models
import pytest
import torch
from equality import assert_models_agree, assert_same, attached, resident_pair, step_alike
from safetensors.torch import load_file, save_file
from test_matrix import Block, make_step
from test_models import BUILDS
from tiers import in_turn
from torch import nn

import oracle_offload
from oracle_offload import _core
from oracle_offload.compress import choice, coder, store
from oracle_offload.engine import coded, engines, simulator
from oracle_offload.errors import DriverError, OffloadError, StaleWeightsError
from oracle_offload.model import admission, masters
from oracle_offload.model.arena import Arena

WIDTH = 256  # 128 KiB in bf16


@pytest.fixture(autouse=True)
def cache(cache_folder):
    return cache_folder / "coded"


def build(dtype=torch.bfloat16, depth=4, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    return nn.Sequential(*layers).to(dtype).requires_grad_(False)


def noise():
    """Return values without a pattern, which get no smaller by coding."""
    values = torch.randint(-(2**15), 2**15, (WIDTH, WIDTH), dtype=torch.int16).view(torch.bfloat16)
    return torch.where(values.float().abs() < 1e30, values, 1.0).bfloat16()


def expected_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def coded_layers(manager):
    return [layer for layer in manager.layers if layer.coded]


def lossless(model, device="cpu", **options):
    return attached(model, device, compress="lossless", **options)


def attach_file(path, device="cpu", depth=4, **options):
    """Return a model without values, and what attaches it to those of a file."""
    with oracle_offload.empty_weights():
        model = build(depth=depth).bfloat16()
    model.requires_grad_(False)
    return model, attached(model, device, weights=path, **{"compress": "lossless", **options})


def saved(folder, **options):
    """Return a model, and the file that has its values."""
    model, path = build(**options), folder / "model.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def assert_agree(managed, resident, device="cpu", **options):
    """Assert that both compute the same bits of a batch, forward and back."""
    dtype = next(resident.parameters()).dtype
    step = make_step(torch.randn(6, WIDTH).to(dtype), device, False)
    assert_models_agree(managed, resident, step, device=device, **options)


def x_of(model, device):
    return torch.randn(3, WIDTH, device=device, dtype=next(model.parameters()).dtype)


# ---- the same bits, over fewer bytes ----


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "not"])
def test_training_has_the_residents_bits(device, reentrant, autocast):
    model = Block(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reentrant)
    model = model.to(torch.bfloat16).requires_grad_(False)
    managed, resident = resident_pair(model)
    with lossless(managed, device) as manager:
        assert len(coded_layers(manager)) == len(manager.layers) == 2
        for x in (torch.randn(6, WIDTH), torch.randn(3, 2, WIDTH).transpose(0, 1)):
            step = make_step(x.bfloat16(), device, autocast)
            assert_models_agree(managed, resident, step, device=device)
        stats = manager.state.engine.stats()
        assert stats["decoded_bytes"] > stats["h2d_bytes"] > 0
        assert len(coded_layers(manager)) == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_one_byte_weights_have_the_residents_bits(device, dtype):
    weight = torch.randn(2 * WIDTH, WIDTH) * (10 if dtype is torch.int8 else 0.02)
    weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    model = models.Parts(lambda parts, x: x @ parts.weight.to(x.dtype).t(), weight=weight)
    managed, resident = resident_pair(nn.Sequential(model))
    step = make_step(torch.randn(5, WIDTH), device, False)
    with lossless(managed, device) as manager:
        assert len(coded_layers(manager)) == 1
        assert_models_agree(managed, resident, step, device=device)


def step_bytes(compress):
    """Return the bytes on the link of one step where nothing stays, and those of the weights."""
    model = build(depth=6)
    with attached(model, "cpu", compress=compress, offload_percent=1.0) as manager:
        moved = 0
        for _ in range(3):
            before = manager.state.engine.stats()["h2d_bytes"]
            model(x_of(model, "cpu").requires_grad_()).sum().backward()
            moved = manager.state.engine.stats()["h2d_bytes"] - before
        return moved, manager.attachment.weight_bytes


def test_fewer_bytes_cross_the_link():
    plain, weights = step_bytes(None)
    fewer, _ = step_bytes("lossless")
    assert plain > weights
    assert fewer < 0.78 * plain  # of uniform weights in small tensors


def test_units_of_coded_and_plain_tensors(device):
    """A bias, and a weight without a pattern, travel as they are, together with coded ones."""
    model = build(depth=3)
    model[1].weight.data = noise()
    managed, resident = resident_pair(model)
    with lossless(managed, device) as manager:
        assert [bool(layer.coded) for layer in manager.layers] == [True, False, True]

        def step(module):
            leaf = x_of(model, device).requires_grad_()
            y = module[0](leaf)
            y.sum().backward()
            return [y.detach(), leaf.grad]

        assert_models_agree(managed, resident, step, device=device)


def test_accumulation_and_samples_in_between(device):
    managed, resident = resident_pair(build())

    def step(model):
        leaf = x_of(model, device).requires_grad_()
        found = []
        for _ in range(3):
            y = model(leaf)
            (y * y).sum().backward()
            with torch.no_grad():
                found.append(model(leaf + 1))
        return [*found, leaf.grad]

    with lossless(managed, device) as manager:
        assert_models_agree(managed, resident, step, device=device)
        assert len(coded_layers(manager)) == 4


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


def test_an_exception_in_the_middle_of_a_forward(device):
    managed, resident = resident_pair(build())
    step = make_step(torch.randn(6, WIDTH).bfloat16(), device, False)
    with lossless(managed, device) as manager:
        for module in (managed[1], managed[3]):
            hook = module.register_forward_hook(stop)
            with pytest.raises(Stop):
                step(managed)
            hook.remove()
            assert_models_agree(managed, resident, step, steps=1, device=device)
        assert len(coded_layers(manager)) == 4


def test_an_exception_in_the_middle_of_a_backward(device):
    managed, resident = resident_pair(build())
    with lossless(managed, device) as manager:
        middle = managed[:2](x_of(managed, device).requires_grad_())
        middle.register_hook(stop)
        with pytest.raises(Stop):
            managed[2:](middle).sum().backward()
        assert_agree(managed, resident, device, steps=1)
        assert len(coded_layers(manager)) == 4


@pytest.fixture
def codes_everything(monkeypatch):
    """Small weights, too, and those that grow by it."""
    monkeypatch.setattr(coder, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(coder, "LEAST_SAVED", -100.0)


@in_turn("name,reentrant", BUILDS, [None, True, False])
def test_real_models_have_the_residents_bits(device, name, reentrant, codes_everything):
    """What is trained are norms; they are small, and stay on the device."""
    make, step = BUILDS[name]
    model = make().train().bfloat16().requires_grad_(False)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 and "norm" in key)
    managed, resident = resident_pair(model)

    def step_in_bfloat16(model):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return step(model)

    with lossless(managed, device, offload_percent=0.9) as manager:
        if reentrant is not None:
            for model in (managed, resident):
                models.checkpoint_blocks(model, reentrant)
        assert len(coded_layers(manager)) >= 0.8 * len(manager.layers) > 4
        assert_models_agree(managed, resident, step_in_bfloat16, device=device)
        assert manager.state.engine.stats()["decodes"] > 0
        assert any(parameter.grad is not None for parameter in managed.parameters())


def test_adapters_train_over_coded_weights(device):
    """LoRA: frozen bases are coded, what is trained is not; its gradients are the resident's."""

    def adapted():
        return models.Parts(
            lambda parts, x: parts.base(x) + parts.up(parts.down(x)),
            base=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            down=nn.Linear(WIDTH, 8, bias=False),
            up=nn.Linear(8, WIDTH, bias=False),
        )

    managed, resident = resident_pair(nn.Sequential(adapted(), adapted()).bfloat16())
    with lossless(managed, device) as manager:
        assert [layer.name for layer in coded_layers(manager)] == ["0.base", "1.base"]
        assert_agree(managed, resident, device)


# ---- what a coded master is to Python ----


def test_reading_finds_what_was_there(tmp_path):
    model = build()
    expected, parameters = expected_of(model), dict(model.named_parameters())
    with lossless(model) as manager:
        assert dict(model.named_parameters()).keys() == parameters.keys()
        assert all(model.get_parameter(name) is p for name, p in parameters.items())
        assert_same(model.state_dict(), expected)
        torch.save(model.state_dict(), tmp_path / "all.pt")
        assert_same(torch.load(tmp_path / "all.pt"), expected)
        one = io.BytesIO()
        torch.save(model[0].weight, one)
        assert one.tell() < 2 * model[0].weight.nbytes  # not the file that it is in
        save_file(model.state_dict(), tmp_path / "all.safetensors")
        assert_same(load_file(tmp_path / "all.safetensors"), expected)
        oracle_offload.save_weights(model, tmp_path / "own.safetensors")
        assert_same(load_file(tmp_path / "own.safetensors"), expected)
        assert_same(copy.deepcopy(model).state_dict(), expected)
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        assert_same(average.module.state_dict(), expected)
        assert len(coded_layers(manager)) == 4
        manager.detach()
    assert_same(model.state_dict(), expected)
    assert all(model.get_parameter(name) is p for name, p in parameters.items())


def lora_merge(weight):
    with torch.no_grad():
        merged = torch.randn(WIDTH, 4).bfloat16() @ torch.randn(4, WIDTH).bfloat16()
        weight += merged.to(weight.device)


def whole_write(weight):
    weight.data.copy_(torch.randn(WIDTH, WIDTH))


def one_number(weight):
    weight.data.view(-1)[12345] = 3  # which no version counter sees, nor a sample


def through_numpy(weight):
    host = weight.detach().cpu()  # the managed one's own memory
    host.view(torch.int16).numpy()[7, 9] = 3
    if weight.device.type != "cpu":
        weight.data.copy_(host)


def new_memory(weight):
    weight.data = torch.randn(WIDTH, WIDTH).bfloat16().to(weight.device)


WRITES = [lora_merge, whole_write, one_number, through_numpy, new_memory]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_is_never_missed(device, write):
    managed, resident = resident_pair(build())
    with lossless(managed, device) as manager:
        assert_agree(managed, resident, device, steps=1)
        for model in (managed, resident):
            torch.manual_seed(5)
            write(model[2].weight)
        assert_agree(managed, resident, device)
        assert [bool(layer.coded) for layer in manager.layers] == [True, True, False, True]
        assert manager.state.engine.stats()["pageable_bytes"] == 0  # it is locked as it is


def test_where_the_system_tells_of_no_write_lines_all_over_the_weight_are_compared(monkeypatch):
    monkeypatch.setattr(_core, "pages_written", lambda *span: None)
    memory = torch.zeros(30_000, dtype=torch.uint8)
    tensor = memory[10_000:20_000]
    for at in (0, 63, 30 * 157, 63 * 157 + 63):  # of the first of 64 lines, one between, the last
        master = coded.CodedMaster(tensor, 0, 1, _core.INT8)
        memory[:10_000] += 1
        memory[20_000:] += 1
        assert not master.was_written() and not master.was_written(), "its neighbours alone were"
        tensor[at] += 1
        assert master.was_written()
        tensor[at] -= 1
        assert master.was_written(), "what the engine has may be either"
    line = torch.zeros(64, dtype=torch.uint8)
    master = coded.CodedMaster(line, 0, 1, _core.INT8)
    line[63] += 1
    assert master.was_written(), "of one line"


def test_while_a_layer_uses_a_coded_weight_its_address_is_no_others():
    tensor = torch.zeros(10_000, dtype=torch.uint8)
    master = coded.CodedMaster(tensor, 0, 1, _core.INT8)
    master.uses = 2
    del tensor
    assert master.uses == 2 and not master.is_gone()
    master.uses = 0
    assert master.is_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system maps files so")
def test_nothing_is_copied_of_a_coded_weight_that_is_gone(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    master = coded.CodedMaster(tensor, 0, 1, _core.INT8)
    del tensor, memory
    assert master.is_gone() and master.own()


class Own(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t()


def build_with_own():
    model = build()
    model[1] = Own(WIDTH, WIDTH, bias=False).bfloat16().requires_grad_(False)
    model[1].weight.data.copy_(model[0].weight)
    return model


def double(weight):
    weight.data.mul_(2)


@pytest.mark.parametrize("write", [double, one_number, through_numpy])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "not"])
@pytest.mark.parametrize("make", [build, build_with_own], ids=["layer", "code"])
def test_a_backward_computes_with_a_write_since_forward(device, make, reentrant, write):
    """As the resident model's does, where no version tells: so does its recompute."""
    managed, resident = resident_pair(make())
    x = torch.randn(3, WIDTH, device=device).bfloat16()

    def step(model):
        leaf = x.clone().requires_grad_()
        y = models.checkpointed(model, leaf, reentrant=reentrant)
        write(model[1].weight)
        y.float().square().sum().backward()
        return [y.detach(), leaf.grad]

    resident.to(device)
    with lossless(managed, device) as manager:
        assert len(coded_layers(manager)) == 4
        for _ in range(2):
            assert_same(step(managed), step(resident))
        assert [bool(layer.coded) for layer in manager.layers] == [True, False, True, True]
        assert manager.state.engine.stats()["pageable_bytes"] == 0


@pytest.mark.parametrize("reentrant", [None, False], ids=["nockpt", "not"])
@pytest.mark.parametrize("write", [lora_merge, new_memory], ids=["version", "replaced"])
@pytest.mark.parametrize("make", [build, build_with_own], ids=["layer", "code"])
def test_a_backward_refuses_what_it_refuses_without_codes(device, make, write, reentrant):
    said = []
    for compress in (None, "lossless"):
        model = make()
        with attached(model, device, compress=compress):
            x = x_of(model, device).requires_grad_()
            y = models.checkpointed(model, x, reentrant=reentrant)
            write(model[1].weight)
            with pytest.raises(StaleWeightsError, match="the weight of managed layer '1'") as error:
                y.sum().backward()
            said.append(str(error.value))
            model(x).sum().backward()  # follows
    assert said[0] == said[1]


@pytest.mark.parametrize("held", [False, True], ids=["alone", "held"])
def test_a_weight_that_is_written_while_its_codes_are_in_use_is_an_error(held):
    """Not a result of codes that it is no more."""

    lent = []

    class Keeps(Own):
        def forward(self, x):
            lent.append(self.weight)
            return super().forward(x)

    model = build()
    model[1] = Keeps(WIDTH, WIDTH, bias=False).bfloat16().requires_grad_(False)
    resident = copy.deepcopy(model)
    x = x_of(model, "cpu")
    with lossless(model) as manager:
        model(x)
        assert len(coded_layers(manager)) == 4
        kept = model.state_dict() if held else None
        one_number(model[1].weight)
        with pytest.raises(OffloadError, match="'1' was written while another call computes"):
            model(x)
        lent.clear()
        one_number(resident[1].weight)
        assert_same(model(x), resident(x))
        lent.clear()
        assert len(coded_layers(manager)) == 3
        del kept


def test_a_write_through_what_holds_the_memory_still_reaches_the_model(device):
    managed, resident = resident_pair(build())
    with lossless(managed, device):
        held = managed.state_dict()["1.weight"]
        for number in range(3):
            with torch.no_grad():
                held[number] += 1
                resident[1].weight[number] += 1
            assert_agree(managed, resident, device, steps=1)


def test_a_loaded_state_dict_takes_the_place(device):
    managed, resident = resident_pair(build())
    for assign in (False, True):
        state = build(seed=7).state_dict()
        with lossless(managed, device):
            managed.load_state_dict(state, assign=assign)
            resident.load_state_dict(state)
            assert_agree(managed, resident, device)


def test_weights_that_are_swapped_for_a_while_come_back_coded(device):
    managed, resident = resident_pair(build())
    resident.to(device)
    with lossless(managed, device) as manager:
        other = build(seed=3)[1].weight.data
        kept = [model[1].weight.data for model in (managed, resident)]
        for model in (managed, resident):
            model[1].weight.data = other.clone().to(model[1].weight.device)
        assert_agree(managed, resident, device, steps=1)
        assert len(coded_layers(manager)) == 3
        for model, before in zip((managed, resident), kept, strict=True):
            model[1].weight.data = before
        assert_agree(managed, resident, device, steps=1)
        assert len(coded_layers(manager)) == 4


def test_weights_that_were_written_while_they_were_away(device):
    managed, resident = resident_pair(build())
    resident.to(device)
    with lossless(managed, device) as manager:
        for model in (managed, resident):
            weight = model[1].weight
            kept = weight.data
            weight.data = torch.ones(WIDTH, WIDTH).bfloat16().to(weight.device)
            if model is managed:
                model(x_of(model, device))
            kept[3, 4] = 1.5
            weight.data = kept
        assert_agree(managed, resident, device, steps=1)
        assert len(coded_layers(manager)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_another_dtype_is_another_weight(device, dtype):
    managed, resident = resident_pair(build())
    with lossless(managed, device) as manager:
        for model in (managed, resident):
            model.to(dtype)
        assert_agree(managed, resident, device)
        assert not coded_layers(manager)


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_are_trained_after_attach(device, fused):
    managed, resident = resident_pair(build())
    with lossless(managed, device) as manager:
        assert_agree(managed, resident, device, steps=1)
        optimizers = []
        for model in (managed, resident):
            model[1].weight.requires_grad_()
            optimizers.append(torch.optim.AdamW([model[1].weight], lr=0.01, fused=fused))
        for _ in range(3):
            assert_agree(managed, resident, device, steps=1)
            step_alike(managed, resident, optimizers, device)
        assert_same(managed[1].weight, resident[1].weight)
        assert [bool(layer.coded) for layer in manager.layers] == [True, False, True, True]


def test_weights_that_are_unfrozen_between_backward_and_step(device):
    managed, resident = resident_pair(build())
    with lossless(managed, device) as manager:
        assert_agree(managed, resident, device, steps=1)
        optimizers = []
        for model in (managed, resident):
            weight = model[1].weight.requires_grad_()
            weight.grad = torch.ones_like(weight)
            optimizers.append(torch.optim.SGD([weight], lr=0.1))
        step_alike(managed, resident, optimizers, device)
        assert_same(managed[1].weight, resident[1].weight)
        assert len(coded_layers(manager)) == 3  # before anything is computed with it
        assert_agree(managed, resident, device, steps=1)


@pytest.mark.parametrize("key", ["weight", "bias"])
def test_a_trained_layer_without_codes_takes_them_from_its_neighbours(device, key, monkeypatch):
    monkeypatch.setattr(coder, "SMALLEST_BYTES", 1000)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64))
    managed, resident = resident_pair(model.bfloat16().requires_grad_(False))
    step = make_step(torch.randn(3, 64).bfloat16(), device, False)
    with lossless(managed, device) as manager:
        assert [layer.name for layer in coded_layers(manager)] == ["0"]
        assert len({layer.unit for layer in manager.layers}) == 1
        optimizers = []
        for model in (managed, resident):
            parameter = getattr(model[1], key).requires_grad_()
            optimizers.append(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(2):
            assert_models_agree(managed, resident, step, steps=1, device=device)
            step_alike(managed, resident, optimizers, device)
        assert_same(getattr(managed[1], key), getattr(resident[1], key))
        assert not coded_layers(manager)


def test_a_layer_that_is_stepped_before_a_forward_saw_it_train_is_known_by_its_unit(
    device, monkeypatch
):
    monkeypatch.setattr(coder, "SMALLEST_BYTES", 1000)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).bfloat16().requires_grad_(False)
    with lossless(model, device) as manager:
        model(torch.randn(3, 64).bfloat16().to(device))
        (before,) = {layer.unit for layer in manager.layers}
        weight = model[0].weight.requires_grad_()
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
        assert manager.attachment.trained_units == {manager.layers[0].unit} != {before}


def test_trained_weights_and_gathered_tables_stay_as_they_are():
    model = nn.Sequential(nn.Embedding(300, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = model.bfloat16().requires_grad_(False)
    model[1].bias.requires_grad_()  # which leaves the device together with its weight
    with lossless(model) as manager:
        assert len(manager.layers) == 2 and not coded_layers(manager)
        assert manager.attachment.arena.staging_bytes == 0


# ---- the cache ----


def count_encoded(monkeypatch):
    counted = []
    encode = _core.encode

    def counting(*arguments):
        counted.append(arguments)
        return encode(*arguments)

    monkeypatch.setattr(_core, "encode", counting)
    return counted


def test_a_second_attach_encodes_nothing(monkeypatch, cache):
    model = build()
    with lossless(model):
        pass
    files = sorted(os.listdir(cache))
    assert len(files) == 8 and all(os.stat(cache / name).st_mode & 0o077 == 0 for name in files)
    counted = count_encoded(monkeypatch)
    for again in (model, build()):
        with lossless(again) as manager:
            assert len(coded_layers(manager)) == 4
            assert_same(again.state_dict(), expected_of(build()))
    assert not counted
    assert sorted(os.listdir(cache)) == files


@pytest.mark.parametrize("suffix", [".coded", ".raw"])
@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty"])
def test_damaged_files_are_made_anew(monkeypatch, caplog, cache, suffix, damage):
    managed, resident = resident_pair(build())
    with lossless(managed):
        pass
    path = sorted(path for path in cache.iterdir() if path.suffix == suffix)[0]
    whole = path.read_bytes()
    broken = {
        "bit": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "short": whole[:-7],
        "long": whole + b"x",
        "empty": b"",
    }[damage]
    os.unlink(path)  # what is attached or was, reads the old file
    path.write_bytes(broken)
    managed = copy.deepcopy(resident)
    with lossless(managed) as manager:
        assert len(coded_layers(manager)) == 4
        assert_agree(managed, resident, steps=1)
        assert_same(managed.state_dict(), resident.state_dict())
    assert path.read_bytes() == whole
    told = [r.message for r in caplog.records if "is damaged" in r.message]
    assert len(told) == (damage != "empty" or suffix == ".raw")


def test_weights_of_a_checkpoint_are_coded_once(monkeypatch, tmp_path, cache):
    resident, path = saved(tmp_path)

    counted = count_encoded(monkeypatch)
    for _ in range(2):
        model, context = attach_file(path)
        with context as manager:
            assert len(coded_layers(manager)) == 4
            assert_agree(model, copy.deepcopy(resident), steps=1)
            assert_same(model.state_dict(), resident.state_dict())
        assert len(counted) == 4
        assert str(path) not in shown_files()
    other = build(seed=9)
    save_file(other.state_dict(), path)  # another file by the same name
    model, context = attach_file(path)
    with context:
        assert_same(model.state_dict(), other.state_dict())
        assert_agree(model, other, steps=1)
    assert len(counted) == 8


def test_weights_of_a_checkpoint_that_get_no_smaller_are_read_as_they_are(tmp_path):
    resident, path = saved(tmp_path, depth=2)
    resident[1].weight.data = noise()
    save_file(resident.state_dict(), path)
    model, context = attach_file(path, depth=2)
    with context as manager:
        assert [bool(layer.coded) for layer in manager.layers] == [True, False]
        assert_same(model.state_dict(), resident.state_dict())


def test_a_checkpoint_that_was_written_through_a_mapping(tmp_path):
    """Its size and times need not change by that: its bytes decide."""
    _, path = saved(tmp_path)
    with attach_file(path)[1]:
        pass
    times = path.stat()
    other = build(seed=9)
    save_file(other.state_dict(), path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    model, context = attach_file(path)
    with context as manager:
        assert len(coded_layers(manager)) == 4
        assert_same(model.state_dict(), other.state_dict())
        assert_agree(model, other, steps=1)


@pytest.mark.parametrize("write", ["in place", "save_file", "cut off"])
def test_the_file_that_weights_came_from_may_be_written(device, tmp_path, write):
    """By a program that saves a model where it was loaded from, say; before and after detach."""
    resident, path = saved(tmp_path)
    beside, before = tmp_path / "other.safetensors", path.read_bytes()
    save_file(build(seed=9).state_dict(), beside)
    model, context = attach_file(path, device)
    with context as manager:
        assert len(coded_layers(manager)) == 4
        assert_agree(model, copy.deepcopy(resident), device, steps=1)
        if write == "save_file":
            save_file(model.state_dict(), path)
            assert path.read_bytes() == before
        elif write == "in place":
            with open(path, "r+b") as file:
                file.write(beside.read_bytes())
        else:
            os.truncate(path, 0)
        assert_same(model.state_dict(), resident.state_dict())
        assert_agree(model, copy.deepcopy(resident), device, steps=1)
        assert len(coded_layers(manager)) == 4
    assert_same(model.state_dict(), resident.state_dict())


@pytest.mark.parametrize("compress", [None, "lossless"])
def test_a_file_that_is_written_while_it_is_read_is_refused(monkeypatch, tmp_path, compress):
    """The model is as it was, and can be attached once the file is whole."""
    resident, path = saved(tmp_path)
    model, context = attach_file(path, compress=compress)
    whole = path.read_bytes()
    add_units = admission.add_units

    def write(*arguments):
        with open(path, "r+b") as file:
            file.write(whole)
        os.utime(path, ns=(0, 0))  # whatever the clock of this file system tells apart
        return add_units(*arguments)

    written = pytest.raises(OffloadError, match=r"model.safetensors' was written while .* read")
    with monkeypatch.context() as patch, written:
        patch.setattr(admission, "add_units", write)
        context.__enter__()
    assert not engines.open_states() and all(p.is_meta for p in model.parameters())
    with attached(model, "cpu", weights=path) as manager:
        assert len(manager.layers) == 4
        assert_same(model.state_dict(), resident.state_dict())


def test_written_weights_of_a_checkpoint_are_locked(tmp_path):
    _, path = saved(tmp_path)
    model, context = attach_file(path)
    with context as manager:
        one_number(model[1].weight)
        model(x_of(model, "cpu"))
        assert len(coded_layers(manager)) == 3
        assert manager.state.engine.stats()["pageable_bytes"] == 0


def shown_files():
    """Return the files that this process maps and reads in place."""
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in ranges)


linux_alone = pytest.mark.skipif(sys.platform != "linux", reason="maps files as Linux does")


@linux_alone
def test_a_checkpoint_may_be_cut_off_while_its_weights_are_used(tmp_path):
    resident, path = saved(tmp_path)
    model, context = attach_file(path)
    parameters = dict(model.named_parameters())
    with context as manager:
        assert len(coded_layers(manager)) == 4
        held = model.state_dict()["1.weight"]
        os.truncate(path, 0)
        one_number(model[2].weight)
        assert any(name.startswith(str(tmp_path)) for name in shown_files())
    assert not any(name.startswith(str(tmp_path)) for name in shown_files())
    one_number(resident[2].weight)
    assert_same(model.state_dict(), resident.state_dict())
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert_same(held, resident[1].weight)
    held[3] += 1  # and is the model's memory still
    resident[1].weight.data[3] += 1
    assert_same(model.state_dict(), resident.state_dict())
    with lossless(model) as manager:
        assert len(coded_layers(manager)) == 4
        assert_agree(model, resident, steps=1)


@linux_alone
def test_weights_that_are_coded_no_more_leave_their_file(tmp_path):
    """Those too that something else holds, and which so stay where they are."""
    resident, path = saved(tmp_path, depth=1)
    model, context = attach_file(path, depth=1)
    with context as manager:
        held = model.state_dict()["0.weight"]
        assert any(name.startswith(str(tmp_path)) for name in shown_files())
        for row in range(2):
            held[row] += 1
            resident[0].weight.data[row] += 1
            assert_agree(model, resident, steps=1)
            assert not any(name.startswith(str(tmp_path)) for name in shown_files())
        assert not coded_layers(manager)


def test_codes_go_back_once_their_weight_is_coded_no_more():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16().requires_grad_(False)
    with lossless(model) as manager:
        pieces = manager.attachment.pieces
        (codes,) = pieces.in_order()
        assert codes.uses == 1 and codes.end - codes.start < model[0].weight.nbytes
        model[0].weight.data.mul_(2)
        model(x_of(model, "cpu"))
        manager.refresh()
        assert not coded_layers(manager)
        (plain,) = pieces.in_order()
        assert plain.uses == 1 and plain.end - plain.start >= model[0].weight.nbytes


def test_a_coded_weight_that_was_replaced_and_is_gone_is_no_more_of_the_masters():
    model = build(depth=3)
    with lossless(model) as manager:
        pieces = manager.attachment.pieces
        starts = [module.weight.data_ptr() for module in model]
        model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH).bfloat16(), requires_grad=False)
        manager.refresh()
        gc.collect()
        assert pieces.coded_at(starts[0]) is None
        new = pieces.at(model[0].weight.data_ptr())  # which may be where the old one was
        assert new is not None and pieces.at(starts[0]) in (None, new)
        assert [one.start for one in pieces.coded] == starts[1:]


@linux_alone
def test_weights_without_room_stay_in_their_file_after_detach(
    tmp_path, cache, monkeypatch, caplog, capsys
):
    resident, path = saved(tmp_path)
    model, context = attach_file(path)
    room = iter([1 << 40, 0, 1 << 40, int(1.05 * model[0].weight.nbytes)])
    with context as manager:
        assert len(coded_layers(manager)) == 4
        monkeypatch.setattr("oracle_offload.host.memory.available_bytes", lambda: next(room))
        at_once = functools.partial(masters.DelayedBar, delay_s=0.0)
        monkeypatch.setattr(masters, "DelayedBar", at_once)
    assert "oracle_offload: detach" in capsys.readouterr().err
    assert any(name.startswith(str(cache)) for name in shown_files())
    told = [r.message for r in caplog.records if "files of the cache" in r.message]
    assert len(told) == 1 and "no memory for 256.00 KiB of its weights" in told[0]
    assert_same(model.state_dict(), resident.state_dict())


@linux_alone
def test_an_attach_that_fails_leaves_weights_in_memory(monkeypatch, cache):
    model = build()

    def fail(*arguments):
        assert any(name.startswith(str(cache)) for name in shown_files())
        raise RuntimeError("units")

    monkeypatch.setattr("oracle_offload.model.admission.add_units", fail)
    with pytest.raises(RuntimeError, match="units"):
        lossless(model).__enter__()
    assert not any(name.startswith(str(cache)) for name in shown_files())
    assert_same(model.state_dict(), expected_of(build()))


@linux_alone
def test_mapped_weights_hold_no_open_files(tmp_path):
    """Of which a process may have about a thousand, and a model has more weights."""
    _, path = saved(tmp_path)
    for attach_one in (lambda: lossless(build(depth=20)), lambda: attach_file(path)[1]):
        before = len(os.listdir("/proc/self/fd"))
        with attach_one() as manager:
            assert len(coded_layers(manager)) == len(manager.layers) >= 4
            assert len(os.listdir("/proc/self/fd")) - before < 4


@linux_alone
def test_the_memory_of_a_detached_weight_goes_with_it(tmp_path):
    """Not with the last one of its file."""
    _, path = saved(tmp_path)
    model, context = attach_file(path)
    with context:
        pass
    gone = [module.weight.data_ptr() for module in model[1:]]
    assert all(map(is_mapped, [*gone, model[0].weight.data_ptr()]))
    del model[1:]
    assert not any(map(is_mapped, gone)) and is_mapped(model[0].weight.data_ptr())


@linux_alone
@pytest.mark.parametrize("held", ["parameter", "alias", "module"])
def test_what_is_held_of_a_deleted_model_is_whole(tmp_path, held):
    """It stays in its file, which may be replaced; all else is given back, the file with it."""
    resident, path = saved(tmp_path)
    with oracle_offload.empty_weights():
        model = build().bfloat16()
    model.requires_grad_(False)
    manager = oracle_offload.attach(model, "cpu", weights=path, compress="lossless")
    assert len(coded_layers(manager)) == 4
    model(x_of(model, "cpu"))
    kept = {"parameter": model[1].weight, "alias": model.state_dict(), "module": model[1]}[held]
    gone = model[2].weight.data_ptr()
    del model, manager
    gc.collect()
    assert not engines.open_states()
    save_file(build(seed=4).state_dict(), tmp_path / "other.safetensors")
    os.replace(tmp_path / "other.safetensors", path)
    if held == "alias":
        assert_same(kept, resident.state_dict())
        kept = kept["1.weight"]
    else:
        assert not is_mapped(gone)
        kept = kept.weight if held == "module" else kept
    assert_same(kept, resident[1].weight)
    one_number(kept)
    one_number(resident[1].weight)
    assert_same(kept, resident[1].weight)
    del kept
    assert not any(name.startswith(str(tmp_path)) for name in shown_files())


def refuse_to_map(*where):
    raise OSError(19, "No such device")


def test_a_file_system_that_maps_nothing(monkeypatch, caplog, tmp_path):
    resident, path = saved(tmp_path)
    monkeypatch.setattr("oracle_offload.disk.checkpoint.map_private", refuse_to_map)
    model, context = attach_file(path)
    with context as manager:  # read, and from a copy in the cache
        assert len(coded_layers(manager)) == 4
        assert_agree(model, resident, steps=1)
    monkeypatch.setattr("oracle_offload.compress.store.map_private", refuse_to_map)
    model, context = attach_file(path)
    with context as manager:
        assert not coded_layers(manager)
        assert_agree(model, resident, steps=1)
    assert any("No such device" in record.message for record in caplog.records)


def test_a_cache_that_is_trimmed_meanwhile(monkeypatch):
    replace = os.replace

    def trimmed(made, path):
        replace(made, path)
        os.unlink(path)

    managed, resident = resident_pair(build())
    monkeypatch.setattr("oracle_offload.compress.store.os.replace", trimmed)
    with lossless(managed) as manager:
        assert len(coded_layers(manager)) == 4
        assert_agree(managed, resident, steps=1)


def test_a_cache_that_is_cleared_while_a_file_is_written(monkeypatch):
    """Weights are compressed all the same: what is half written is not there to be removed."""
    replace = os.replace

    def cleared(made, path):
        store.user_store().trim(0)
        replace(made, path)

    monkeypatch.setattr("oracle_offload.compress.store.os.replace", cleared)
    with lossless(build()) as manager:
        assert len(coded_layers(manager)) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="torch shares by descriptors")
def test_weights_are_sent_to_another_process():
    managed, resident = resident_pair(build())
    with lossless(managed) as manager:
        sent = pickle.loads(ForkingPickler.dumps(managed[1].weight))
        assert_same(sent, resident[1].weight)
        assert_agree(managed, resident)
        assert len(coded_layers(manager)) == 3
    managed.share_memory()
    assert all(parameter.is_shared() for parameter in managed.parameters())
    seen = pickle.loads(ForkingPickler.dumps(managed[0].weight))
    seen.data.fill_(1)
    assert bool((managed[0].weight == 1).all())


def test_damaged_codes_of_a_checkpoint_are_made_anew(caplog, tmp_path, cache):
    resident, path = saved(tmp_path)
    for damaged in (False, True):
        if damaged:
            broken = sorted(cache.iterdir())[0]
            whole = broken.read_bytes()
            broken.write_bytes(whole[:9000] + bytes([whole[9000] ^ 16]) + whole[9001:])
        model, context = attach_file(path)
        with context as manager:
            assert len(coded_layers(manager)) == 4
            assert_agree(model, resident, steps=1)
    assert broken.read_bytes() == whole
    assert sum("is damaged" in record.message for record in caplog.records) == 1


def test_checkpoints_of_another_dtype_are_converted_and_coded(tmp_path):
    resident, path = saved(tmp_path)
    save_file({name: t.float() for name, t in resident.state_dict().items()}, path)
    model, context = attach_file(path)
    with context as manager:
        assert len(coded_layers(manager)) == 4
        assert_same(model.state_dict(), resident.state_dict())
        assert_agree(model, resident, steps=1)


def test_without_a_place_for_the_cache_weights_stay_as_they_are(monkeypatch, caplog, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(blocked))
    managed, resident = resident_pair(build())
    with lossless(managed) as manager:
        assert not coded_layers(manager)
        assert_agree(managed, resident, steps=1)
    told = [r.message for r in caplog.records if "cannot be written" in r.message]
    assert len(told) == 1 and "ORACLE_OFFLOAD_CACHE_DIR" in told[0]


def test_of_two_weights_that_cannot_be_written_at_once_one_is_told(monkeypatch, caplog):
    together = threading.Barrier(2)

    def fail(self, *arguments):
        together.wait(timeout=30)
        raise PermissionError("read-only")

    monkeypatch.setattr(coder.Coder, "_code", fail)
    with lossless(build()) as manager:
        assert not coded_layers(manager)
    assert caplog.text.count("cannot be written: read-only") == 1


def test_a_full_disk_leaves_weights_as_they_are(monkeypatch, caplog):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("oracle_offload.compress.store.shutil.disk_usage", lambda path: usage)
    model = build()
    with lossless(model) as manager:
        assert not coded_layers(manager)
    assert any("has 1000 B left" in r.message for r in caplog.records)


# ---- faults ----

_CALLS_OF_CODES = (
    "cuModuleLoadData cuModuleGetFunction cuLaunchKernel cuMemsetD32Async cuMemcpyHtoDAsync "
    "cuStreamCreateWithPriority cuStreamWaitEvent cuEventCreate cuEventRecord"
).split()


def life(model, call, nth=0):
    """Attach, compute twice, detach; the nth call of a name fails. Return results, and calls."""

    def persist(action):
        try:
            return action()
        except DriverError as error:
            assert nth and error.call == call and error.code == 701
            return action()

    made = simulator.call_count(call)
    if nth:
        simulator.set_fault(call, nth, 701)
    try:
        manager = persist(lambda: oracle_offload.attach(model, "cpu", compress="lossless"))
        assert len(coded_layers(manager)) == len(manager.layers) == 4
        results = [persist(lambda: gradients_of(model)) for _ in range(2)]
        manager.detach()
        calls = simulator.call_count(call) - made
    finally:
        simulator.clear_faults()
    return results, calls


def gradients_of(model):
    torch.manual_seed(1)
    x = x_of(model, "cpu").requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]


def with_one_constant():
    """Weights that are all alike are not decoded by a kernel, but by a fill."""
    model = build()
    model[2].weight.data.fill_(0.5)
    return model


@pytest.mark.parametrize("call", _CALLS_OF_CODES)
def test_a_driver_call_that_fails_changes_no_bit(call):
    wanted = [gradients_of(with_one_constant())] * 2
    found, calls = life(with_one_constant(), call)
    assert_same(found, wanted)
    assert calls > 0
    for nth in range(1, calls + 1, max(1, calls // 6)):
        model = with_one_constant()
        found, again = life(model, call, nth)
        assert again >= nth, "it never struck"
        assert_same(found, wanted)
        assert_same(model.state_dict(), expected_of(with_one_constant()))


# ---- arguments, budgets, memory ----


def test_the_summary_tells_both_sizes():
    model = build()
    with lossless(model) as manager:
        weights = sum(module.weight.nbytes for module in model)
        (usage,) = manager.memory_summary().devices[0].models
        assert usage.compressed_bytes == weights
        assert 0.5 * weights < usage.compressed_host_bytes < 0.8 * weights
        assert usage.staging_bytes == manager.attachment.arena.staging_bytes > 0
        assert usage.x_min_bytes < 0.8 * 2 * (
            manager.attachment.weight_bytes - usage.capacity_bytes
        )
        text = str(manager.memory_summary())
        assert "of them compressed on the host" in text and "512.00 KiB in " in text
    with attached(model, "cpu") as manager:
        assert "compressed" not in str(manager.memory_summary())


@pytest.mark.parametrize("value", ["zip", True, 3, "LOSSLESS"])
def test_other_values_are_refused(value):
    with pytest.raises(
        ValueError, match=rf"compress={value!r} is none of None, 'lossless', 'auto'"
    ):
        oracle_offload.attach(build(), "cpu", compress=value)


def test_the_staging_memory_is_part_of_the_budget():
    model = build(depth=8)
    with lossless(model, vram_budget="2MiB") as manager:
        arena = manager.attachment.arena
        assert 0 < arena.staging_bytes <= _core.STAGING_BYTES
        assert arena.capacity_bytes + arena.staging_bytes <= 2 << 20
    staging = choice.staging_bytes(list(model.parameters()))
    with pytest.raises(OffloadError, match="what compressed weights pass through"):
        lossless(model, vram_budget=staging + 1000).__enter__()


@pytest.mark.parametrize("compress", ["lossless", "auto"])
def test_more_weights_find_room_in_a_ram_budget(compress):
    """What fits it compressed need not stay on the device, and takes no more than it allows."""
    model = build(depth=12)
    weights = sum(p.nbytes for p in model.parameters())
    budget = int(0.8 * weights)
    with attached(model, "cpu", ram_budget=budget) as manager:
        assert len(manager.layers) < 12
    with attached(model, "cpu", ram_budget=budget, compress=compress) as manager:
        assert len(manager.layers) == len(coded_layers(manager)) == 12
        stats = manager.state.engine.stats()
        assert stats["locked_bytes"] + stats["pageable_bytes"] <= budget
    with attached(model, "cpu", ram_budget=2 * weights, offload_percent=0, compress="auto") as m:
        assert not coded_layers(m)  # there is room for them as they are, and nothing travels


def test_a_ram_budget_that_parts_of_weights_have_promised_is_held():
    """Weights whose looked at parts have a pattern, and whose others have none."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, False) for _ in range(4)))
    model.bfloat16().requires_grad_(False)
    for layer in model:
        parts = layer.weight.data.view(choice._SAMPLES, -1)  # each begins with what is looked at
        parts[:, choice._SAMPLE :].view(torch.int16).random_(1 << 14)
    before = copy.deepcopy(model.state_dict())
    budget = int(0.8 * sum(p.nbytes for p in model.parameters()))
    with pytest.raises(OffloadError, match=rf"^ram_budget={budget} is .*, but the weights take"):
        lossless(model, ram_budget=budget).__enter__()
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("short", [False, True], ids=["any", "budget"])
@pytest.mark.parametrize("compress", ["lossless", "auto"])
def test_a_device_that_cannot_decode_is_asked_before_anything_is_coded(
    monkeypatch, cache, compress, short
):
    def refuse(self, nbytes):
        raise OffloadError("this build has no kernels: build with nvcc")

    monkeypatch.setattr(Arena, "lend_staging", refuse)
    model = build(depth=12)
    weights = sum(p.nbytes for p in model.parameters())
    options = dict(compress=compress, ram_budget=int(0.8 * weights) if short else None)
    if compress == "auto" and not short:
        with attached(model, "cpu", **options) as manager:
            assert not coded_layers(manager)
            why = "the device cannot decode: this build has no kernels"
            assert manager.attachment.compressed_because.startswith(why)
        with attached(model, "cpu", offload_percent=0.0, **options) as manager:
            why = "all weights have room on the device"
            assert manager.attachment.compressed_because == why, "the device need not decode"
    else:
        with pytest.raises(OffloadError, match="this build has no kernels"):
            attached(model, "cpu", **options).__enter__()
    assert not cache.exists(), "something was coded"


def test_a_ram_budget_that_needs_codes_needs_the_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "file"))
    model = build(depth=12)
    budget = int(0.8 * sum(p.nbytes for p in model.parameters()))
    with pytest.raises(OffloadError, match=f"ram_budget={budget} has room .* cannot be written"):
        lossless(model, ram_budget=budget).__enter__()
    assert_same(model.state_dict(), expected_of(build(depth=12)))


def test_staging_memory_is_taken_only_for_codes(monkeypatch):
    model = build(depth=8)
    with attached(model, "cpu") as manager:
        place = manager.attachment.weights.most
    with attached(model, "cpu", compress="auto", vram_budget=place) as manager:
        assert not coded_layers(manager)
        assert manager.attachment.arena.capacity_bytes == place
    with attached(model, "cpu", compress="auto", vram_budget="auto") as manager:
        assert not coded_layers(manager)
    monkeypatch.setattr(coder, "LEAST_SAVED", 1.0)  # nothing gets smaller
    with lossless(model, vram_budget="1MiB") as manager:
        assert not coded_layers(manager)
        arena = manager.attachment.arena
        assert arena.staging_bytes == 0
        assert arena.capacity_bytes == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", compressed_memory.MOST)
def test_locked_memory_falls_and_no_copy_stays(kind):
    """128 MiB of weights, in a process of their own; the slow test has 1 GiB."""
    compressed_memory.check(kind, 16)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", compressed_memory.MOST)
def test_locked_memory_falls_at_a_gibibyte(kind, record_property):
    share = compressed_memory.check(kind, 128)
    record_property("locked", {"weights": kind, "share": share})
