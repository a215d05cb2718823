"""Code of other libraries that takes a model to be on one device: averages, merges, pipelines."""

from __future__ import annotations

import copy
import logging
import sys
from types import ModuleType

import models
import peft
import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, UNet2DModel
from diffusers.training_utils import EMAModel
from equality import assert_same, attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.layers.managed import is_managed
from oracle_offload.model.witness import Witness

IDS = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(0))
LORA = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "up_proj"]}


def adapted(**options):
    torch.manual_seed(0)
    model = models.llama().eval().requires_grad_(False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, **options))


def devices_of(model):
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


def logits(model, device, manager=None):
    with torch.no_grad():
        found = model(input_ids=IDS.to(device)).logits
        if manager is not None:
            with Witness():
                assert_same(model(input_ids=IDS.to(device)).logits, found, "under the witness")
    return found


# ---- merges ----


@pytest.mark.parametrize("safe", [False, True], ids=["at once", "safe"])
def test_a_merge_into_managed_weights_is_the_residents(device, safe):
    managed, resident = adapted(), adapted().to(device)
    with attached(managed, device, offload_percent=1.0) as manager:
        bases = [m.base_layer for m in managed.modules() if hasattr(m, "base_layer")]
        assert len(bases) >= 4 and all(is_managed(base) for base in bases)
        places = {name: p.device for name, p in managed.named_parameters()}
        known = dict(managed.named_parameters())
        assert_same(logits(managed, device, manager), logits(resident, device))
        for step in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
            for model in (managed, resident):
                getattr(model, step)(**({"safe_merge": safe} if step[0] == "m" else {}))
            assert_same(logits(managed, device, manager), logits(resident, device), step)
            assert {name: p.device for name, p in managed.named_parameters()} == places
        assert all(p is known[name] for name, p in managed.named_parameters())


def test_a_merge_of_one_row_is_seen_where_the_device_keeps_its_copy(device):
    """No sample of the weights finds it, and the copies are waited for."""
    managed, resident = (nn.Sequential(nn.Linear(1024, 1024)) for _ in range(2))
    resident.load_state_dict(managed.state_dict())
    options = peft.LoraConfig(r=1, lora_alpha=1, target_modules=["0"])
    managed, resident = (peft.get_peft_model(m, options) for m in (managed, resident))
    for model in (managed, resident):
        layer = model.base_model.model[0]
        with torch.no_grad():
            layer.lora_A["default"].weight.fill_(1.0)
            layer.lora_B["default"].weight[700] = 1.0
    resident.to(device)
    x = torch.ones(1, 1024, device=device)
    with attached(managed, device, offload_percent=0.0), torch.no_grad():
        assert is_managed(managed.base_model.model[0].base_layer)
        for step in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
            assert_same(managed(x), resident(x))
            for model in (managed, resident):
                getattr(model, step)()
        assert_same(managed(x), resident(x))


def test_a_fused_pipelines_part_is_the_residents(device):
    def made():
        torch.manual_seed(0)
        part = models.unet().requires_grad_(False)
        part.add_adapter(
            peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
        )
        return part

    torch.manual_seed(1)
    managed, resident = made(), made()
    resident.load_state_dict(managed.state_dict())
    resident.to(device)
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([1]), torch.randn(1, 3, 32)
    there = [each.to(device) for each in inputs]
    with torch.no_grad(), attached(managed, device, offload_percent=1.0) as manager:
        assert len(manager.layers) > 20
        for step in ("fuse_lora", "unfuse_lora", "fuse_lora"):
            for model in (managed, resident):
                getattr(model, step)()
            assert_same(managed(*there).sample, resident(*there).sample, step)
        with Witness():
            managed(*there)
    assert devices_of(managed) == {"cpu"}
    managed(*inputs)


@pytest.mark.parametrize("kept", ["what is left", "the model"])
def test_a_model_whose_adapters_are_taken_off_is_on_one_device(device, kept, caplog):
    managed, resident = adapted(), adapted()
    root = managed if kept == "what is left" else managed.base_model.model
    with attached(root, device, offload_percent=1.0) as manager:
        assert len(manager.layers) > 10
        logits(managed, device)
        with caplog.at_level(logging.WARNING, logger="oracle_offload"):
            plain = managed.merge_and_unload()
        expected = resident.merge_and_unload()
        is_left = "its adapters are taken off" in caplog.text
        assert is_left is (kept == "what is left") is not manager.finalizer.alive
        if is_left:
            assert devices_of(plain) == {"cpu"} and not any(map(is_managed, plain.modules()))
            assert_same(logits(plain, "cpu"), logits(expected, "cpu"))
        else:
            assert_same(logits(plain, device, manager), logits(expected.to(device), device))


def test_adapters_of_plain_layers_are_added_before_attach():
    config = peft.GloraConfig(r=4, target_modules=["q_proj"])
    model = models.llama().requires_grad_(False)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        with pytest.raises(OffloadError, match=r"GloraModel .* add the adapter before attach"):
            peft.get_peft_model(model, config)
        assert len(manager.layers) > 10
    unknown = peft.GloraConfig(r=4, target_modules=["norm"])
    with pytest.raises(ValueError, match="not a plain"):
        peft.get_peft_model(models.llama(), unknown)
    adapted = peft.get_peft_model(models.llama().requires_grad_(False), config)
    with attached(adapted, "cpu", offload_percent=1.0) as manager:
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        assert len(manager.layers) > 10


# ---- casts ----


@pytest.mark.parametrize("when", ["before", "after", "after a forward"])
def test_weights_that_diffusers_casts_layer_by_layer_are_streamed_as_stored(
    device, when, nothing_is_small
):
    dtypes = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.bfloat16}
    torch.manual_seed(0)
    managed = models.unet().to(torch.bfloat16).eval().requires_grad_(False)
    resident = copy.deepcopy(managed).to(device)
    inputs = torch.randn(1, 4, 8, 8).bfloat16(), torch.tensor([1]), torch.randn(1, 3, 32).bfloat16()
    there = [each.to(device) for each in inputs]
    if when == "before":
        managed.enable_layerwise_casting(**dtypes)
    with torch.no_grad(), attached(managed, device, offload_percent=1.0) as manager:
        if when == "after a forward":
            assert_same(managed(*there).sample, resident(*there).sample)
        if when != "before":
            managed.enable_layerwise_casting(**dtypes)
        resident.enable_layerwise_casting(**dtypes)
        expected = resident(*there).sample
        for _ in range(2):
            assert_same(managed(*there).sample, expected)
        with Witness():
            assert_same(managed(*there).sample, expected)
        assert len(manager.layers) > 100 and not manager.resident
        cast = [p for p in managed.parameters() if p.dtype == torch.float8_e4m3fn]
        assert len(cast) > 100 and {p.device.type for p in cast} == {"cpu"}
    for p, other in zip(managed.parameters(), resident.parameters(), strict=True):
        assert p.dtype == other.dtype and torch.equal(p.float(), other.cpu().float())
    with torch.no_grad():
        managed(*inputs)


# ---- averages ----


class ExponentialMovingAverage:
    """As torch_ema's and AI-Toolkit's: it refers weakly to the parameters that it is made of."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.shadow_params = [p.clone().detach() for p in parameters]
        self._params_refs = [lambda p=p: p for p in parameters]

    def update(self, parameters=None):
        given = [r() for r in self._params_refs] if parameters is None else list(parameters)
        with torch.no_grad():
            for shadow, parameter in zip(self.shadow_params, given, strict=True):
                shadow.sub_(0.5 * (shadow - parameter))

    def to(self, device):
        self.shadow_params = [shadow.to(device) for shadow in self.shadow_params]


@pytest.fixture
def torch_ema(monkeypatch):
    module = ModuleType("torch_ema.ema")
    module.ExponentialMovingAverage = ExponentialMovingAverage
    monkeypatch.setattr(ExponentialMovingAverage, "update", ExponentialMovingAverage.update)
    monkeypatch.setitem(sys.modules, "torch_ema.ema", module)


@pytest.mark.usefixtures("torch_ema")
@pytest.mark.parametrize("trained", ["adapters", "all"])
@pytest.mark.parametrize("when", ["before", "after, moved"])
@pytest.mark.parametrize("kind", ["diffusers", "diffusers foreach", "torch_ema", "torch_ema alone"])
def test_an_average_goes_where_its_weights_are(device, kind, when, trained):
    def make(parameters):
        if kind.startswith("torch_ema"):
            return ExponentialMovingAverage(parameters)
        return EMAModel(parameters, decay=0.5, foreach="foreach" in kind)

    def run(managed):
        model = adapted()
        if trained == "all":
            model.requires_grad_(True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        average = make(parameters) if when.startswith("before") else None
        manager = oracle_offload.attach(model, device, offload_percent=1.0) if managed else None
        if manager is None:
            model.to(device)
        average = average or make(parameters)
        if manager is None or when.endswith("moved"):
            average.to(device)
        given = () if kind.endswith("alone") else (parameters,)
        for _ in range(3):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(0.5)
            update = average.update if kind.startswith("torch_ema") else average.step
            update(*given)
            if manager is not None:
                assert len(manager.layers) > 10
                places = [shadow.device for shadow in average.shadow_params]
                assert places == [parameter.device for parameter in parameters]
        if manager is not None:
            manager.detach()
            with torch.no_grad():
                update(*given)  # all of them on the host again
            return average.shadow_params
        update(*given)
        return average.shadow_params

    assert_same(run(True), run(False))


def test_a_library_is_changed_once():
    model = adapted()
    with attached(model, "cpu", offload_percent=1.0):
        before = EMAModel.step, peft.tuners.lora.Linear.merge
    with attached(model, "cpu", offload_percent=1.0):
        assert (EMAModel.step, peft.tuners.lora.Linear.merge) == before
    assert EMAModel.step.__name__ == "step" and EMAModel.step.__wrapped__


# ---- pipelines ----


def test_a_pipeline_all_of_whose_parts_are_attached_samples(device):
    torch.manual_seed(0)
    managed = UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
    ).eval()
    resident = copy.deepcopy(managed).to(device)
    found = []
    with attached(managed, device, offload_percent=1.0) as manager:
        assert len(manager.layers) > 20
        for model in (managed, resident, managed):
            pipe = DDPMPipeline(model, DDIMScheduler(num_train_timesteps=10))
            pipe.set_progress_bar_config(disable=True)
            assert pipe.device.type == pipe._execution_device.type == torch.device(device).type
            generator = torch.Generator().manual_seed(1)
            with Witness() if len(found) == 2 else torch.no_grad():
                images = pipe(num_inference_steps=2, output_type="np", generator=generator).images
            found.append(torch.from_numpy(images))
    assert_same(found[0], found[1])
    assert_same(found[2], found[1], "under the witness")
    assert isinstance(managed, nn.Module) and managed.device.type == "cpu"
