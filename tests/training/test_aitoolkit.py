"""The drop-in under AI-Toolkit's names: its surface, its manners, and what its callers do."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from equality import assert_models_agree, assert_same, count_acquires, h2d_bytes
from models import LoRA, checkpointed
from ostris import OstrisLinear, to_ostris
from torch import nn

import oracle_offload
from oracle_offload import aitoolkit
from oracle_offload.aitoolkit import MemoryManager, manager_modules, sync_grad_transfers
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states

ROOT = Path(__file__).parent.parent.parent


def mlp(width=64, layers=3, bias=True):
    made = [nn.Linear(width, width, bias=bias) for _ in range(layers)]
    return nn.Sequential(*made).requires_grad_(False)


def attach(model, device="cpu", at_least=1, **options):
    """Attach as AI-Toolkit does; at least so many layers must be managed."""
    assert MemoryManager.attach(model, torch.device(device), **options) is None
    manager = model._memory_manager
    assert len(manager.layers) >= at_least, manager.resident
    return manager


def mending(layer, replaces=True):
    """Return a LoRA that mends a layer's accuracy, which has a weak reference to it."""
    lora = LoRA(layer)
    layer.ara_lora_ref = weakref.ref(lora)
    if not replaces:
        del layer.forward
    return lora


# ---- the surface ----


def test_every_name_of_the_contract_is_there():
    for name in ("attach", "detach", "free", "release_cached_memory"):
        assert callable(getattr(MemoryManager, name))
    for name in (
        "LinearLayerMemoryManager",
        "ConvLayerMemoryManager",
        "OstrisLinearLayerMemoryManager",
    ):
        assert callable(getattr(manager_modules, name).attach)
    assert manager_modules._DEVICE_STATE == {}
    assert manager_modules.sync_grad_transfers is sync_grad_transfers
    assert importlib.import_module("oracle_offload.aitoolkit.manager").MemoryManager is (
        MemoryManager
    )
    assert "MemoryManager" in dir(aitoolkit)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = aitoolkit.nothing_of_the_kind


def test_what_others_read_on_an_attached_model(device):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).requires_grad_(False)
    manager = attach(model, device)
    where = oracle_offload.manager.parse_device(device)
    assert isinstance(manager, MemoryManager) and isinstance(manager, oracle_offload.MemoryManager)
    assert manager.module is model and manager.process_device == where
    assert manager.unmanaged_modules == [model[1]]
    assert model[0]._layer_memory_manager is manager.layers[0]
    assert model[0]._memory_management_device == where
    assert model[0].weight._is_memory_managed and model[0].bias._is_memory_managed
    for other in (model, model[1]):
        assert not hasattr(other, "_layer_memory_manager")
        assert not hasattr(other, "_memory_management_device")
    MemoryManager.detach(model)
    for name in ("_memory_manager", "_layer_memory_manager", "_memory_management_device"):
        assert not any(hasattr(part, name) for part in model.modules())
    assert not hasattr(model[0].weight, "_is_memory_managed")


def test_sync_grad_transfers_costs_nothing(device):
    model = mlp().requires_grad_(True)
    attach(model, device)
    x = torch.randn(2, 64, device=device)
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before = simulator.stats(), [state.engine.stats() for state in open_states()]
    sync_grad_transfers()
    assert (simulator.stats(), [state.engine.stats() for state in open_states()]) == before
    assert_same([p.grad for p in model.parameters()], gradients)
    MemoryManager.detach(model)


# ---- manners ----


def test_a_second_attach_does_nothing():
    model = mlp()
    manager = attach(model)
    assert MemoryManager.attach(model, "cpu", offload_percent=0.5) is None
    assert model._memory_manager is manager
    MemoryManager.detach(model)


def test_a_model_with_nothing_to_manage_is_left_alone():
    model = nn.Sequential(nn.LayerNorm(8), nn.EmbeddingBag(4, 8))
    assert MemoryManager.attach(model, "cpu") is None
    assert not hasattr(model, "_memory_manager") and not open_states()
    assert MemoryManager.detach(model) is None


def test_detach_and_free_take_what_was_never_attached():
    model = mlp()
    before = copy.deepcopy(model)
    assert MemoryManager.detach(model, unpin_cpu_tensors=False) is None
    assert_same(dict(model.state_dict()), dict(before.state_dict()))
    MemoryManager.free(model)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    MemoryManager.release_cached_memory()


def test_other_errors_are_not_swallowed():
    with pytest.raises(ValueError, match="offload_percent"):
        MemoryManager.attach(mlp(), "cpu", offload_percent=91)
    with pytest.raises(oracle_offload.OffloadError, match="meta"):
        MemoryManager.attach(nn.Linear(4, 4, device="meta"), "cpu")
    with pytest.raises(TypeError, match="attached module"):
        MemoryManager.detach()


def test_attach_of_oracle_offload_keeps_its_own_manners():
    model = mlp()
    oracle_offload.attach(model, "cpu")
    with pytest.raises(oracle_offload.OffloadError, match="attached already"):
        oracle_offload.attach(model, "cpu")
    assert MemoryManager.attach(model, "cpu") is None
    MemoryManager.detach(model)
    with pytest.raises(oracle_offload.OffloadError, match="not attached"):
        oracle_offload.MemoryManager.detach(model)


@pytest.mark.parametrize("unpin", [True, False])
def test_detach_brings_everything_to_the_cpu(unpin, device):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).requires_grad_(False)
    model.register_buffer("table", torch.arange(4))
    parameters = list(model.parameters())
    before = copy.deepcopy(dict(model.state_dict()))
    model.to(device)
    MemoryManager.detach(model)
    there = torch.device(device).type
    assert {p.device.type for p in model.parameters()} == {there}, "it was not attached"
    attach(model, device)
    assert [p.device.type for p in model.parameters()] == ["cpu"] * 2 + [there] * 2
    model(torch.randn(2, 64, device=device))
    MemoryManager.detach(model, unpin_cpu_tensors=unpin)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device.type == "cpu"
    assert_same(dict(model.state_dict()), before)
    assert type(model[0]) is nn.Linear


def test_a_manager_detaches_itself():
    model = mlp()
    attach(model).detach()
    assert not hasattr(model, "_memory_manager") and not open_states()


def test_detach_of_a_model_whose_residents_are_on_meta():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    attach(model)
    model.to("meta")
    MemoryManager.detach(model)
    assert model[1].weight.is_meta and not model[0].weight.is_meta


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_detach_while_an_output_is_alive(device, trained, caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    model.requires_grad_(trained)
    attach(model, device)
    y = model(torch.ones(2, 64).to(device).requires_grad_())
    weight = model[1].weight
    MemoryManager.detach(model)
    assert y.requires_grad and "_memory_manager" not in vars(model)
    if device == "simgpu" and trained:  # where torch cannot move what a graph holds
        assert "LayerNorm.weight stays on simgpu:0: it is trained" in caplog.text
    else:
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        model(torch.ones(2, 64))
    assert not trained or model[1].weight is weight


# ---- same numbers ----


def test_training_through_the_drop_in_has_the_bits_of_the_resident_model(device):
    """Behaviours 2, 3, 4: a LoRA before attach and one after, its optimizer before attach."""
    results = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = mlp(bias=False)
        early = LoRA(model[0]).to(device)
        optimizer = torch.optim.AdamW(early.parameters(), lr=1e-2)
        if managed:
            attach(model, device, at_least=3)
        else:
            model.to(device)
        late = LoRA(model[1]).to(device)
        optimizer.add_param_group({"params": list(late.parameters())})
        before, losses = h2d_bytes(device), []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 64).to(device)
            loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            sync_grad_transfers()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        state = [p.detach().clone() for lora in (early, late) for p in lora.parameters()]
        if managed:
            assert h2d_bytes(device) - before >= sum(p.nbytes for p in model.parameters())
            MemoryManager.detach(model)
        results.append([losses, state, [p.detach().to(device) for p in model.parameters()]])
    assert_same(results[1], results[0])


# ---- .to() ----


class Streams(nn.Module):
    """As Qwen3-Omni's expert banks: on the host, and what is routed to goes to the device."""

    offload_device = None

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.ones(4, 8, 8, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return F.linear(x, self.bank[1].to(x) * self.scale[1].to(x))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.conv1d = nn.Conv1d(1, 1, 1)
        self.bare = nn.Parameter(torch.zeros(8))
        self.register_buffer("index", torch.arange(8))
        self.experts = Streams()
        self.others = nn.ModuleList(
            [nn.ConvTranspose2d(1, 1, 1), nn.PReLU(), nn.MultiheadAttention(8, 2)]
        )
        self.ignored = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x):
        return self.experts(self.conv1d(self.linear(x)[:, None])[:, 0] + self.bare)


def test_to_moves_all_but_what_streams():
    """Behaviour 5: managed weights and self-streaming banks stay, whatever else is there moves."""
    model = Mixed()
    model.experts.offload_device = torch.device("cpu")
    MemoryManager.attach(model.experts, "cpu")  # in which there is nothing to manage
    attach(model, ignore_modules=[model.ignored])
    kept = type(model.experts)
    assert kept is not Streams and isinstance(model.experts, Streams)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(kept, name) == getattr(Streams, name), name
    bank = model.experts.bank
    assert model.to("meta") is model and model.experts.bank is bank
    left = {name for name, t in model.state_dict().items() if not t.is_meta}
    managed = {f"{name}.{key}" for name in ("linear", "conv1d") for key in ("weight", "bias")}
    assert left == {*managed, "experts.bank", "experts.scale"}
    assert model.index.dtype is torch.int64
    model.to(torch.bfloat16)
    assert model.experts.bank.dtype is torch.int8 and model.experts.scale.dtype is torch.bfloat16
    MemoryManager.detach(model)
    assert type(model.experts) is Streams
    MemoryManager.free(model)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_banks_that_do_not_stream_move_like_everything_else():
    model = Mixed()
    attach(model)
    assert type(model.experts) is Streams
    model.to("meta")
    assert model.experts.bank.is_meta
    MemoryManager.detach(model)


def test_a_model_with_self_streaming_banks_can_be_copied_and_saved():
    model = Mixed()
    model.experts.offload_device = torch.device("cpu")
    x = torch.randn(2, 8)
    expected = model(x)
    attach(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.experts) is Streams, "a copy moves"
        assert not hasattr(other, "_memory_manager")
        assert_same(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(x).any(), "it computes with its own weights"
    assert_same(model(x), expected)
    assert model.to("meta").experts.bank.device.type == "cpu"  # still in its place
    MemoryManager.detach(model)


def test_to_is_idempotent_and_moves_no_byte(device):
    model = mlp()
    attach(model, device)
    x = torch.randn(2, 64, device=device)
    expected = model(x)
    pointers = [p.data_ptr() for p in model.parameters()]
    before = h2d_bytes(device)
    for _ in range(3):
        assert model.to(device) is model and model.to(device, dtype=torch.float32) is model
        assert model.to("cpu") is model and model.cpu() is model
    assert model.to(device) is model
    assert h2d_bytes(device) == before
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert_same(model(x), expected)
    MemoryManager.detach(model)


# ---- quantised by AI-Toolkit itself ----


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_layers_that_it_has_quantised_stream_their_buffers(bias, checkpointing, autocast, device):
    model = mlp(bias=bias)
    for layer in model:
        to_ostris(layer)
    resident = copy.deepcopy(model).to(device)
    manager = attach(model, device, at_least=3)
    assert type(manager.layers[0]).__name__ == "QuantisedLayer" and not manager.resident
    x = torch.randn(4, 64).to(device)

    def step(module):
        given = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = checkpointed(module, given, reentrant=checkpointing)
        y.float().sum().backward()
        with torch.no_grad():
            return [y.detach(), given.grad, module(x)]

    before = h2d_bytes(device)
    assert_models_agree(model, resident, step, steps=3, device=device)
    assert h2d_bytes(device) > before
    model.to("meta")
    assert not any(buffer.is_meta for buffer in model.buffers())
    MemoryManager.detach(model)
    assert all(type(layer) is OstrisLinear for layer in model)


# ---- several at once ----


def test_adapters_that_mend_a_layer_are_attached_with_it(device):
    """ARA: frozen LoRAs on layers, found by the layers' weak references."""
    model = mlp()
    loras = [mending(layer).requires_grad_(False) for layer in model[:2]]
    x = torch.randn(2, 64)
    plain = model(x)
    for part in (model, *loras):
        part.to(device)
    expected = model(x.to(device))
    for part in (model, *loras):
        part.to("cpu")
    manager = attach(model, device, at_least=3)
    assert len(manager.adapters._memory_manager.layers) == 4
    for lora in loras:
        assert hasattr(lora.down, "_layer_memory_manager")
        assert lora.up._memory_management_device == manager.device
        assert MemoryManager.attach(lora, device) is None  # it is already
    before = h2d_bytes(device)
    assert_same(model(x.to(device)), expected)
    mended = sum(p.nbytes for lora in loras for p in lora.parameters())
    assert h2d_bytes(device) - before >= mended + sum(p.nbytes for p in model.parameters())
    MemoryManager.detach(model)
    assert not any(hasattr(p, "_layer_memory_manager") for lora in loras for p in lora.modules())
    for lora in loras:
        assert lora.up.weight.device.type == "cpu"
    assert_same(model(x), plain)


def test_an_adapter_may_begin_to_mend_a_layer_after_attach(device):
    """It is on the device as any module; attached by itself it streams, too."""
    model = mlp()
    x = torch.randn(2, 64)
    manager = attach(model, device, at_least=3)
    plain = model(x.to(device)).cpu()
    lora = mending(model[0]).requires_grad_(False).to(device)
    before = count_acquires()
    mended = model(x.to(device))
    assert count_acquires() - before == 3 and h2d_bytes(device) > 0
    assert manager.adapters is None and not torch.equal(mended.cpu(), plain)
    attach(lora.to("cpu"), device, at_least=2)
    assert_same(model(x.to(device)), mended)
    MemoryManager.detach(model)
    assert hasattr(lora.up, "_layer_memory_manager")  # what was attached by itself stays so
    MemoryManager.detach(lora)
    assert_same(model(x), mended)


def test_an_adapter_that_is_gone_or_whose_layer_is_ignored_is_not_attached():
    model = mlp()
    kept = mending(model[0], replaces=False)
    mending(model[1], replaces=False)  # and is gone
    gc.collect()
    manager = attach(model, ignore_modules=[model[0]])
    assert manager.adapters is None and len(manager.layers) == 2
    assert not hasattr(kept.up, "_layer_memory_manager")
    MemoryManager.detach(model)


def test_parts_that_are_attached_already_stay_with_their_manager():
    model = nn.Sequential(mlp(), mlp())
    x = torch.randn(2, 64)
    expected = model(x)
    inner = attach(model[0], at_least=3)
    outer = attach(model, at_least=3)
    assert len(outer.layers) == 3 == len(inner.layers)
    before = h2d_bytes()
    assert_same(model(x), expected)
    assert h2d_bytes() - before >= sum(p.nbytes for p in model.parameters())
    assert MemoryManager.attach(model[1], "cpu") is None  # all of it is managed
    assert not hasattr(model[1], "_memory_manager")
    MemoryManager.detach(model)
    assert not open_states()
    assert_same(model(x), expected)


def test_free_of_one_model_leaves_the_others():
    """Behaviour 15: two transformers and an encoder on one device; one is freed."""
    models = [mlp() for _ in range(3)]
    x = torch.randn(2, 64)
    expected = [model(x) for model in models]
    for model in models:
        attach(model, at_least=3)
    assert_same([model(x) for model in models], expected)
    MemoryManager.free(models[1])
    MemoryManager.release_cached_memory()
    assert {p.device.type for p in models[1].parameters()} == {"meta"}
    for index in (0, 2):
        before = count_acquires()
        assert_same(models[index](x), expected[index])
        assert count_acquires() - before == 3
        MemoryManager.detach(models[index])


def test_free_of_a_whole_frees_its_parts_and_its_adapters():
    model = nn.Sequential(mlp(), mlp())
    lora = mending(model[1][0], replaces=False)
    attach(model[0])
    attach(model)
    MemoryManager.free(model)
    assert not open_states()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.device.type for p in lora.parameters()} == {"cpu"}


# ---- the ways in ----


def toolkit_of(tmp_path):
    """A checkout with a manager of its own, and a trainer that imports it by both names."""
    folder = tmp_path / "toolkit" / "memory_management"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(
        "from .manager import MemoryManager\nfrom .manager_modules import sync_grad_transfers\n"
    )
    (folder / "manager.py").write_text(ORIGINAL)
    (folder / "manager_modules.py").write_text(
        "_DEVICE_STATE = {}\n"
        "def sync_grad_transfers(): raise AssertionError('the original')\n"
        "class LinearLayerMemoryManager: ...\n"
    )
    (tmp_path / "trainer.py").write_text(
        "from toolkit.memory_management import MemoryManager, sync_grad_transfers\n"
        "from toolkit.memory_management import manager_modules\n"
    )
    return tmp_path


# What our manager_modules.py meets under the original: layers one by one, and no word of the last.
ORIGINAL = """
import torch
from .manager_modules import LinearLayerMemoryManager, _DEVICE_STATE


class MemoryManager:
    def __init__(self, module, process_device):
        self.module, self.process_device, self.unmanaged_modules = module, process_device, []

    def memory_managed_to(self, *args, **kwargs):
        for module in self.unmanaged_modules:
            module.to(*args, **kwargs)
        return self.module

    @classmethod
    def attach(cls, module, device, offload_percent=1.0, ignore_modules=[]):
        if hasattr(module, "_memory_manager"):
            return
        module._memory_manager = cls(module, device)
        module._mm_to = module.to
        module.to = module._memory_manager.memory_managed_to
        for part in module.modules():
            if type(part).__name__ == "Linear" and part not in ignore_modules:
                LinearLayerMemoryManager.attach(part, module._memory_manager)

    @classmethod
    def detach(cls, module):
        module.to = module._mm_to
        del module._mm_to, module._memory_manager
        for child in module.modules():
            found = getattr(child, "_layer_memory_manager", None)
            if found is None:
                continue
            if child.weight.data.is_pinned():
                raise AssertionError("still locked")
            del child._layer_memory_manager
"""


def run(code, path, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = """
import torch, trainer
from toolkit.memory_management.manager import MemoryManager as Same
assert Same is trainer.MemoryManager, (Same, trainer.MemoryManager)
assert Same.__module__ == "oracle_offload.aitoolkit.memory_manager", Same.__module__
from oracle_offload.engine import simulator
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
x = torch.randn(2, 64)
expected = model(x)
trainer.MemoryManager.attach(model, torch.device("cpu"))
assert len(model._memory_manager.layers) == 2
assert torch.equal(model(x), expected) and simulator.stats().h2d_bytes > 0
trainer.sync_grad_transfers()
assert trainer.manager_modules.RELEASE and trainer.manager_modules._ensure_cpu_pinned(None) is None
import toolkit.memory_management
assert toolkit.memory_management.MemoryManager is Same
trainer.MemoryManager.detach(model)
print("done")
"""


def test_install_over_an_original_that_has_fewer_names(tmp_path):
    """As it was before `sync_grad_transfers`."""
    path = toolkit_of(tmp_path)
    package = path / "toolkit" / "memory_management" / "__init__.py"
    package.write_text("from .manager import MemoryManager\n")
    code = (
        "import toolkit.memory_management as original\n"
        "import oracle_offload.aitoolkit as ours; ours.install()\n"
        "from toolkit.memory_management import MemoryManager\n"
        "assert MemoryManager is original.MemoryManager is ours.MemoryManager\n"
    )
    run(code, path)


@pytest.mark.parametrize("when", ["first", "after the trainer"])
def test_install_in_the_process(tmp_path, when):
    code = "import oracle_offload.aitoolkit; oracle_offload.aitoolkit.install()\n"
    if when != "first":
        code = "import trainer\nassert trainer.MemoryManager.__module__.startswith('toolkit')\n"
        code += "import oracle_offload.aitoolkit; oracle_offload.aitoolkit.install()\n"
    again = "oracle_offload.aitoolkit.install()\n"
    back = """
oracle_offload.aitoolkit.uninstall()
oracle_offload.aitoolkit.uninstall()
import importlib
assert trainer.MemoryManager.__module__ == "toolkit.memory_management.manager"
assert importlib.import_module("toolkit.memory_management").MemoryManager is trainer.MemoryManager
assert oracle_offload.aitoolkit.MemoryManager.__module__.startswith("oracle_offload"), "still ours"
"""
    assert run(code + again + TRAIN + back, toolkit_of(tmp_path)) == "done\n"


def test_install_after_the_original_has_attached_is_refused(tmp_path):
    code = """
import trainer, oracle_offload.aitoolkit
trainer.manager_modules._DEVICE_STATE["cuda:0"] = {}
try:
    oracle_offload.aitoolkit.install()
except RuntimeError as error:
    assert "first line of" in str(error)
    assert trainer.MemoryManager.__module__ == "toolkit.memory_management.manager"
    print("refused")
"""
    assert run(code, toolkit_of(tmp_path)) == "refused\n"


def test_install_on_disk(tmp_path):
    from oracle_offload.aitoolkit import checkout

    folder = toolkit_of(tmp_path) / "toolkit" / "memory_management"
    for name in checkout.NAMES:
        (folder / name).write_bytes((ROOT / "oracle_offload" / "aitoolkit" / name).read_bytes())
    assert run(TRAIN, tmp_path) == "done\n"


def test_the_package_can_be_copied_or_put_in_the_place_of_the_original(tmp_path):
    code = "import sys, oracle_offload.aitoolkit as ours\n"
    code += "sys.modules['toolkit.memory_management'] = ours\n"
    tail = TRAIN.replace("import toolkit.memory_management\nassert toolkit.memory", "")
    tail = tail.replace("_management.MemoryManager is Same\n", "")
    assert run(code + tail, toolkit_of(tmp_path)) == "done\n"


ALONE = """
import torch, trainer
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
MemoryManager = trainer.MemoryManager
assert MemoryManager.__module__ == "toolkit.memory_management.manager"

class LoRA(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.down, self.org_module = torch.nn.Linear(64, 64), [module]
        self.org_forward, module.forward = module.forward, self.forward
    def forward(self, x):
        return self.org_forward(x) + self.down(x)

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)], torch.nn.LayerNorm(64))
model.requires_grad_(False)
loras = [LoRA(model[0])]
x = torch.randn(2, 64)
MemoryManager.attach(model, torch.device("cpu"), ignore_modules=[model[3]])
original = model._memory_manager
loras.append(LoRA(model[1]))
waiting = model[2]._layer_memory_manager
assert waiting is not None and not open_states()
assert model[2]._memory_management_device == torch.device("cpu")
MemoryManager.attach(model, torch.device("cpu"))
y = model(x)
assert model._memory_manager is original and model[2]._layer_memory_manager is not waiting
(state,) = open_states()
(held,) = state.listeners
assert len(held.layers) == 3 and simulator.stats().h2d_bytes >= 3 * 4 * 64 * 65
y.square().mean().backward()
gradients = [p.grad.clone() for lora in loras for p in lora.parameters()]
assert len(gradients) == 4
assert model.to("meta") is model and not model[0].weight.is_meta
del original, held, state
MemoryManager.detach(model)
assert not open_states() and not any("_layer_memory_manager" in p.__dict__ for p in model.modules())
for lora in loras:
    lora.zero_grad()
again = model(x)
assert torch.equal(again, y)
again.square().mean().backward()
assert all(
    torch.equal(p.grad, g)
    for p, g in zip((p for lora in loras for p in lora.parameters()), gradients)
)
model[0].weight.data.zero_()
assert not torch.equal(model(x), y)
print("done")
"""


def test_our_manager_modules_alone_under_the_original_manager(tmp_path):
    folder = toolkit_of(tmp_path) / "toolkit" / "memory_management"
    ours = ROOT / "oracle_offload" / "aitoolkit" / "manager_modules.py"
    (folder / "manager_modules.py").write_bytes(ours.read_bytes())
    assert run(ALONE, tmp_path) == "done\n"
