"""What AI-Toolkit does with whole models: unloads, quantises after attach, streams banks itself."""

from __future__ import annotations

import types

import pytest
import torch
from equality import assert_same, is_simulated
from runs import (
    DEVICE,
    compare,
    inputs,
    load,
    moved_bytes,
    network_on,
    saved,
    train,
    transformer,
)
from toolkit.memory_management import MemoryManager
from torch import nn


def test_unload_text_encoder():
    from toolkit.unloader import FakeTextEncoder, unload_text_encoder

    encoders = [transformer(), transformer()]
    model = transformer()
    x = inputs()
    expected = model(x)
    MemoryManager.attach(encoders[0], DEVICE)
    MemoryManager.attach(model, DEVICE)
    assert len(encoders[0]._memory_manager.layers) == 12
    encoders[0](x)
    pipeline = types.SimpleNamespace(text_encoder=encoders[0], text_encoder_2=encoders[1])
    base = types.SimpleNamespace(
        text_encoder=list(encoders),
        pipeline=pipeline,
        device_torch=DEVICE,
        torch_dtype=torch.float32,
    )
    unload_text_encoder(base)
    assert all(isinstance(encoder, FakeTextEncoder) for encoder in base.text_encoder)
    assert {p.device.type for e in encoders for p in e.parameters()} == {"meta"}
    assert_same(model(x), expected)  # the other model is as it was
    MemoryManager.detach(model)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_its_own_benchmark(share, monkeypatch):
    """All of it, in small: a LoRA over bfloat16 and float8 layers, with checkpointing and without.

    What it measures of CUDA is nothing here.
    """
    benchmark = load("test_memory_manager")
    small = {"D_MODEL": 64, "N_HEADS": 4, "N_LAYERS": 2, "D_FF": 128, "SEQ": 8, "LORA_RANK": 4}
    for name, value in {**small, "DEVICE": DEVICE, "WARMUP": 1, "ITERS": 2}.items():
        monkeypatch.setattr(benchmark, name, value)
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    attached, moved = [], []
    detach = MemoryManager.detach

    def detached(model):
        attached.append(len(model._memory_manager.layers))
        moved.append(moved_bytes())
        detach(model)

    monkeypatch.setattr(MemoryManager, "detach", detached)
    before, results = moved_bytes(), []
    for label, quantized, offloaded, checkpointing in benchmark.RUNS:
        benchmark.benchmark(results, label, quantized, offloaded and share, checkpointing)
    assert [result["ok"] for result in results] == [True] * len(benchmark.RUNS) == [True] * 8
    assert attached == [round(12 * share)] * 4
    # An engine's count begins with it.
    earlier = [before, *moved[:-1]] if is_simulated(DEVICE.type) else [0] * len(moved)
    assert all(later > before for before, later in zip(earlier, moved, strict=True))


QTYPES = ["float8", "int8", "uint4", "convrot8", "qfloat8"]


@pytest.mark.parametrize("kind", QTYPES)
@pytest.mark.parametrize("when", ["before attach", "after attach"])
def test_quantised_models_compute_as_without_offloading(kind, when):
    """Half of the model is quantised; the other half is managed whatever becomes of the first."""
    from toolkit.util.quantize import get_qtype, quantize

    def run(offloaded):
        model = nn.Sequential(transformer(1, 256), transformer(1, 256)).to(torch.bfloat16)
        for part in model:
            part.gradient_checkpointing = False
        if when == "after attach":
            offloaded.attach(model, 12)
        from optimum.quanto import freeze

        quantize(model[1], weights=get_qtype(kind))
        freeze(model[1])
        if when == "before attach":
            offloaded.attach(model, 12)
        torch.manual_seed(1)  # new layers draw on the device of the old ones
        x = torch.randn(1, 8, 256, dtype=torch.bfloat16, requires_grad=True)
        found = []
        for _ in range(3):
            y = model(x)
            y.float().sum().backward()
            found += [y.detach(), x.grad.clone()]
        with torch.no_grad():
            found.append(model(x))
        if offloaded.on:
            kinds = [type(layer).__name__ for layer in model._memory_manager.layers]
            assert len(kinds) == 12 and kinds.count("QuantisedLayer") == 6, (
                kinds,
                model._memory_manager.resident,
            )
        return found

    compare(run)


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qfloat8"])
def test_quantos_layers_have_the_residents_gradients(kind):
    """Linear and convolution, of the quanto that it pins."""
    from optimum import quanto

    def run(offloaded):
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(2), nn.Linear(64, 64), nn.Linear(64, 32)
        ).requires_grad_(False)
        quanto.quantize(model, weights=getattr(quanto, kind))
        quanto.freeze(model)
        offloaded.attach(model, 3)
        x = torch.randn(2, 4, 8, 8, requires_grad=True)
        found = []
        for _ in range(2):
            y = model(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad.clone()]
        if offloaded.on:
            modules = [type(layer.module()).__name__ for layer in model._memory_manager.layers]
            assert modules == ["QConv2d", "QLinear", "QLinear"]
        return found

    compare(run)


def test_a_lora_on_a_half_quantised_model():
    from toolkit.util.quantize import get_qtype, quantize

    def run(offloaded):
        model = transformer(2, 256)
        quantize(model.blocks[1], weights=get_qtype("convrot8"))
        offloaded.attach(model, 12)
        network = network_on(model)
        return train(model, [network], width=256), saved(network)

    compare(run)


def test_expert_banks_that_stream_themselves():
    from extensions_built_in.captioner.Qwen3OmniCaptioner import ConvRot8Experts

    def bank(*shape):
        return torch.randint(-127, 127, shape, dtype=torch.int8)

    torch.manual_seed(0)
    experts = ConvRot8Experts(
        bank(4, 32, 16), torch.rand(4, 32, 1), 16, bank(4, 16, 16), torch.rand(4, 16, 1), 16,
        torch.float32,
    )  # fmt: skip

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.experts, self.lm_head = nn.Linear(16, 16), experts, nn.Linear(16, 4)

        def forward(self, x):
            index = torch.arange(x.shape[0])[:, None] % 4
            return self.lm_head(self.experts(self.linear(x), index, torch.ones(x.shape[0], 1)))

    model = Model().to(DEVICE)
    x = torch.randn(5, 16)
    expected = model(x)
    experts.to("cpu")
    experts.enable_offload(DEVICE)
    MemoryManager.attach(model, DEVICE, ignore_modules=[model.lm_head])
    assert [layer.name for layer in model._memory_manager.layers] == ["linear"]
    assert_same(model(x), expected)
    model.to("meta")
    assert experts.gate_up_q.device.type == "cpu" and model.lm_head.weight.is_meta
    MemoryManager.detach(model)
    assert type(experts) is ConvRot8Experts
