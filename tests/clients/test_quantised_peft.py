"""peft's LoRA on a quantised language model, put on before attach or after it."""

from __future__ import annotations

import models
import optimum.quanto.tensor.weights.marlin  # noqa: F401  which makes tensors: on the host
import peft
import pytest
import torch
from optimum import quanto
from quantised import bitsandbytes_like, on_device, quantised_layers
from sides import compare
from torch import nn
from torchao import quantization as ao

TARGETS = ["q_proj", "v_proj", "down_proj"]


def is_quantised(module, name):
    return type(module) is nn.Linear and not name.endswith("lm_head")


def torchao_int8(model):
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), filter_fn=is_quantised)


def quanto_qint8(model):
    quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
    quanto.freeze(model)


def bitsandbytes_linear(kind, **options):
    def convert(model):
        for name, module in list(model.named_modules()):
            if is_quantised(module, name):
                with torch.device("cpu"):  # from where alone it quantises
                    model.set_submodule(name, bitsandbytes_like(module, kind, **options))
        model.to("cpu")

    return convert


LIBRARIES = {
    "torchao": torchao_int8,
    "quanto": quanto_qint8,
    "bitsandbytes-int8": bitsandbytes_linear("Linear8bitLt", has_fp16_weights=False),
    "bitsandbytes-nf4": bitsandbytes_linear("Linear4bit", quant_type="nf4"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_lora_on_a_quantised_model(library, when):
    def client(side):
        model = models.llama()
        LIBRARIES[library](model)
        if not side.managed:
            on_device(model)
        if when == "after":
            side.attach(model)
        config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if when == "before":
            side.attach(adapted)
        for manager in side.managers:
            # Seven of each of three blocks.
            assert len(quantised_layers(manager)) == 21, manager.resident
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        seen = []
        for _ in range(2):
            ids = torch.randint(0, 100, (2, 9))
            with side.step():
                loss = adapted(input_ids=ids, labels=ids).loss
                loss.backward()
            seen.append((loss.detach(), [p.grad.clone() for p in trained]))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    compare(client)
