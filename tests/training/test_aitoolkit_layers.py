"""Layers that AI-Toolkit's own manager hands over one by one; and the memory that it empties."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from equality import assert_same
from models import LoRA
from ostris import to_ostris
from torch import Tensor, nn

from oracle_offload import OffloadError
from oracle_offload.aitoolkit import MemoryManager, memory_manager, single_layers
from oracle_offload.aitoolkit.single_layers import LinearLayerMemoryManager, _ensure_cpu_pinned
from oracle_offload.aitoolkit.together import SETTING
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from oracle_offload.layers.linear import LinearLayer
from oracle_offload.layers.quantised import QuantisedLayer
from oracle_offload.model.witness import Witness

HANDLE = "_layer_memory_manager"


class Original:
    """What `manager.py` of AI-Toolkit keeps of a model, as far as a layer uses it."""

    def __init__(self, module, layers, device="cpu"):
        self.module, self.process_device = module, torch.device(device)
        module._memory_manager = self
        for layer in layers:
            LinearLayerMemoryManager.attach(layer, self)


def mlp(layers=3, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=bias) for _ in range(layers)))


def managed(model):
    return [isinstance(part.__dict__.get(HANDLE), LinearLayer) for part in model]


class Trainer:
    """A process that loads a model, as far as `follow_setting` looks at it."""

    def __init__(self, folder, config):
        self.save_root, self.config, self.seen = str(folder), config, []

    def load(self, model):
        MemoryManager.attach(model, "cpu")
        MemoryManager.detach(model)
        return self.train_single_accumulation.__self__ is not self

    def hook_train_loop(self, batch):
        return [self.train_single_accumulation(one) for one in batch]

    def train_single_accumulation(self, batch):
        self.seen.append(batch)
        return batch


def test_layers_wait_for_a_call_of_the_model_and_no_others_are_managed():
    model = mlp()
    x = torch.randn(2, 32)
    expected = model(x)
    Original(model, model[:2])
    assert not open_states() and type(model[0]) is not nn.Linear
    assert model[1]._memory_management_device == torch.device("cpu")
    assert model[1].weight._is_memory_managed and not hasattr(model[2], HANDLE)
    nn.Sequential(nn.Identity())(x)  # of no interest
    model[2](x)  # as is a layer by itself that was not handed over
    assert not open_states()
    before = simulator.stats().h2d_bytes
    assert_same(model(x), expected)
    assert managed(model) == [True, True, False]
    assert simulator.stats().h2d_bytes - before >= 2 * model[0].weight.nbytes
    assert model[0].weight._is_memory_managed
    del model._memory_manager
    assert not open_states() and [type(part) for part in model] == [nn.Linear] * 3
    assert not hasattr(model[0], "_memory_management_device")
    assert not hasattr(model[0].weight, "_is_memory_managed")
    assert_same(model(x), expected)


def test_a_layer_waits_with_its_plain_weights_on_the_host(monkeypatch):
    class Packed(nn.Parameter):
        """Stays where the library that made it has put it."""

    model, moved, to = mlp(1, bias=False), [], Tensor.to
    model[0].bias = Packed(torch.zeros(32))

    def record(tensor, *where):
        moved.append((tensor.data_ptr(), *where))
        return to(tensor, *where)

    monkeypatch.setattr(Tensor, "to", record)
    Original(model, model)
    assert moved == [(model[0].weight.data_ptr(), "cpu")]
    del model._memory_manager


def test_the_layer_that_is_called_first_computes_as_a_managed_one():
    model = mlp(bias=False)
    x = torch.randn(2, 32)
    expected = model[1](x)
    Original(model, model)
    assert not model[1]._layer_memory_manager.is_lending()
    before = simulator.stats().h2d_bytes
    assert_same(model[1](x), expected)
    assert managed(model) == [True] * 3
    assert simulator.stats().h2d_bytes - before >= model[1].weight.nbytes
    del model._memory_manager
    assert not open_states()


def test_the_model_keeps_the_manager_of_the_original():
    model = mlp()
    original = Original(model, model)
    model(torch.randn(2, 32))
    assert model._memory_manager is original
    LinearLayerMemoryManager.attach(model[0], original)  # it is managed already
    assert managed(model) == [True] * 3
    del original, model._memory_manager
    assert not open_states()


def test_a_model_that_cannot_be_attached_has_its_manager_and_its_layers(monkeypatch):
    model = mlp()
    x = torch.randn(2, 32)
    expected = model(x)
    original = Original(model, model)

    def refuse(*args, **options):
        raise OffloadError("no room")

    monkeypatch.setattr(single_layers.manager, "attach", refuse)
    with pytest.raises(OffloadError, match="no room"):
        model(x)
    assert model._memory_manager is original
    assert [type(part) for part in model] == [nn.Linear] * 3
    assert_same(model(x), expected)


def test_a_model_whose_layers_were_taken_out_is_called_as_it_is():
    model = mlp()
    Original(model, model[:2])
    model[0] = model[1] = nn.Identity()
    x = torch.randn(2, 32)
    assert_same(model(x), model[2](x))
    assert not open_states() and isinstance(model._memory_manager, Original)


def test_layers_that_were_quantised_while_they_waited_stream_what_they_are_now():
    model, resident = (mlp(2).requires_grad_(False) for _ in range(2))
    Original(model, model)
    for part in (*model, *resident):
        to_ostris(part)
    assert not open_states()
    nn.Sequential(nn.Linear(32, 32))(torch.randn(2, 32))
    assert not open_states(), "a stranger's call"
    x, before = torch.randn(2, 32), simulator.stats().h2d_bytes
    assert_same(model(x), resident(x))
    assert [type(part.__dict__[HANDLE]) for part in model] == [QuantisedLayer] * 2
    ((held,),) = (state.listeners for state in open_states())
    assert simulator.stats().h2d_bytes - before >= held.weight_bytes > 2 * 32 * 16
    model[0] = nn.Linear(32, 32).requires_grad_(False)
    model(torch.randn(2, 32))
    assert managed(model) == [True, False] and model[0].weight._is_memory_managed
    assert model[0]._memory_management_device == torch.device("cpu")
    del model._memory_manager


def test_a_part_that_is_attached_already_stays_with_its_manager():
    model = nn.Sequential(mlp(2), nn.Linear(32, 32))
    x = torch.randn(2, 32)
    expected = model(x)
    MemoryManager.attach(model[0], "cpu")
    inner = model[0]._memory_manager
    Original(model, [model[1]])
    assert_same(model(x), expected)
    assert len(inner.layers) == 2 and managed([model[1]]) == [True]
    del model._memory_manager
    assert type(model[1]) is nn.Linear and len(inner.layers) == 2
    MemoryManager.detach(model[0])


def test_a_layer_that_another_manager_has_taken_meanwhile_stays_with_it():
    model = mlp(2).requires_grad_(False)
    Original(model, model)
    to_ostris(model[0])  # it waits no more
    MemoryManager.attach(model[0], "cpu")
    layer = model[0].__dict__[HANDLE]
    model(torch.randn(2, 32))
    assert model[0].__dict__[HANDLE] is layer and managed(model) == [False, True]
    del model._memory_manager
    assert model[0].__dict__[HANDLE] is layer and type(model[1]) is nn.Linear
    MemoryManager.detach(model[0])


def test_a_layer_that_compiled_code_calls_first_attaches_the_model():
    model = mlp(2)
    x = torch.randn(2, 32)
    expected = model[1](x)
    Original(model, model)
    assert_same(torch.compile(lambda x: model[1](x), backend="eager")(x), expected)
    assert managed(model) == [True] * 2
    del model._memory_manager


def test_another_module_at_the_address_of_a_part_that_is_gone_is_none_of_the_models():
    parts = [nn.Sequential(nn.Linear(32, 32)) for _ in range(50)]
    model = nn.Sequential(nn.Linear(32, 32), *parts)
    Original(model, [part for part in model.modules() if isinstance(part, nn.Linear)])
    gone = {id(part) for part in parts}
    del parts, model[1:]
    gc.collect()
    others = []
    while not any(id(part) in gone for part in others):
        others += [nn.Sequential(nn.Identity()) for _ in range(1000)]
        assert len(others) < 50_000
    x = torch.randn(2, 32)
    for stranger in others:
        stranger(x)
    assert not open_states(), "a stranger's call attached the model"
    model(x)
    assert managed(model) == [True]
    del model._memory_manager


def test_an_adapter_before_a_waiting_layer_calls_what_it_found_there():
    model = mlp(2)
    lora = LoRA(model[0])
    kept = lora.org_forward
    x = torch.randn(2, 32)
    expected = model(x)
    Original(model, model)
    assert_same(model(x), expected)
    assert managed(model) == [True] * 2 and lora.org_forward == kept
    with Witness():
        assert_same(model(x), expected)
    del model._memory_manager
    assert lora.org_forward == kept
    assert_same(model(x), expected)


def test_an_adapter_before_a_layer_that_never_ran_has_what_it_found_there():
    model = mlp(2)
    lora = LoRA(model[0])
    kept = lora.org_forward
    Original(model, model)
    del model._memory_manager
    assert lora.org_forward == kept and type(model[0]) is nn.Linear
    assert not hasattr(model[0], HANDLE)
    x = torch.randn(2, 32)
    before = len(open_states())
    model(x)
    assert len(open_states()) == before, "its hook is gone"


def test_a_call_that_began_before_the_model_was_detached_is_that_of_an_ordinary_layer():
    model = mlp(1)
    x = torch.randn(2, 32)
    expected = model[0](x)
    Original(model, model)
    waiting = model[0].__dict__[HANDLE]
    del model._memory_manager
    assert_same(waiting(x), expected)
    assert not open_states() and type(model[0]) is nn.Linear


def test_a_model_that_is_deleted_takes_all_with_it_in_silence(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    model = mlp()
    Original(model, model)
    model(torch.randn(2, 32))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and not open_states() and not said


@pytest.mark.parametrize("called", [False, True])
def test_an_adapter_before_the_model_itself_does_not_keep_it(called):
    model = nn.Linear(32, 32)
    lora = LoRA(model)
    original = Original(model, [model])
    if called:
        model(torch.randn(2, 32))
        assert isinstance(model.__dict__[HANDLE], LinearLayer)
    gone = weakref.ref(original)
    del original, model, lora
    gc.collect()
    assert gone() is None and not open_states()


def test_only_plain_tensors_are_locked_and_only_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: ("locked", tensor))
    plain, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _ensure_cpu_pinned(plain) is plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _ensure_cpu_pinned(plain)[0] == "locked"
    assert _ensure_cpu_pinned(parameter) is parameter
    elsewhere = SimpleNamespace(to=lambda device: ("now on", device))
    assert _ensure_cpu_pinned(elsewhere) == ("now on", "cpu")


def test_caches_of_cuda_are_emptied_only_where_it_has_begun(monkeypatch):
    emptied = []
    monkeypatch.setattr(memory_manager, "trim_heap", lambda: emptied.append("heap"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    MemoryManager.release_cached_memory()
    assert emptied == ["heap"], "asking would begin CUDA"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    MemoryManager.release_cached_memory()
    assert emptied[1:] == ["device", "host", "heap"]
    monkeypatch.delattr(torch._C, "_host_emptyCache")  # older torch
    MemoryManager.release_cached_memory()
    assert emptied[4:] == ["device", "heap"]


def test_free_copies_what_is_held_and_not_what_is_garbage(monkeypatch):
    model = mlp(2)
    MemoryManager.attach(model, "cpu")
    held, garbage = model[0].weight, [model[1].weight]
    values = held.detach().clone()
    garbage.append(garbage)
    del garbage
    copied, emptied, clone = [], [], Tensor.clone
    monkeypatch.setattr(memory_manager, "trim_heap", lambda: emptied.append("heap"))
    monkeypatch.setattr(Tensor, "clone", lambda t, **k: copied.append(t.shape) or clone(t, **k))
    MemoryManager.free(model)
    assert copied == [held.shape], "what no reference reaches is collected before"
    assert emptied == ["heap"]
    assert_same(held.detach(), values)
    assert model[0].weight.is_meta and not held.is_meta


def test_what_is_no_layer_is_told_and_has_no_adapter_attached():
    norm, table = nn.LayerNorm(32), nn.BatchNorm1d(32, affine=False)
    model = nn.Sequential(nn.Linear(32, 32), norm, table, nn.Identity())
    adapter = nn.Linear(32, 32)
    norm.ara_lora_ref = weakref.ref(adapter)
    MemoryManager.attach(model, "cpu")
    assert model._memory_manager.unmanaged_modules == [norm, table]
    assert model._memory_manager.adapters is None and not hasattr(adapter, HANDLE)
    MemoryManager.detach(model)


def test_memory_that_only_garbage_holds_is_given_back():
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.tensor = holder, torch.ones(2)
    gone = weakref.ref(holder)
    gc.disable()
    try:
        del holder
        assert gone() is not None
        MemoryManager.release_cached_memory()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("section", "follows"), [({SETTING: True}, True), ({SETTING: False}, False), ({}, False)]
)
def test_the_trainer_that_attaches_is_changed_where_its_configuration_asks(
    tmp_path, section, follows
):
    trainer = Trainer(tmp_path, {"model": section})
    assert trainer.load(mlp(1)) is follows
    before = vars(trainer).get("train_single_accumulation")
    trainer.load(mlp(1))
    assert vars(trainer).get("train_single_accumulation") is before, "once is enough"
    assert trainer.hook_train_loop([7]) == trainer.seen == [7]
    assert Trainer(tmp_path, {"model": None}).load(mlp(1)) is False
    assert Trainer(tmp_path, {}).load(mlp(1)) is False
