"""peft's adapters: put on before attach or after it, trained, switched off, merged."""

from __future__ import annotations

import models
import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from sides import compare, values

from oracle_offload.layers.managed import is_managed

TARGETS = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, use_dora=True, init_lora_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS, init_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "oft": lambda: peft.OFTConfig(
        r=0, oft_block_size=8, target_modules=TARGETS, init_weights=False
    ),
    "boft": lambda: peft.BOFTConfig(
        boft_block_size=8, target_modules=["q_proj"], init_weights=False
    ),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj"], init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=6, target_r=4, total_step=10, target_modules=TARGETS, init_lora_weights=False
    ),
}


def train(side, model, steps=2):
    """Train the adapters for a few steps; return losses and gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    seen = []
    for _ in range(steps):
        ids = torch.randint(0, 100, (2, 9))
        with side.step():
            output = model(input_ids=ids, labels=ids)
            output.loss.backward()
        seen.append(output.loss.detach())
        seen.append([p.grad.clone() for p in trained if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def sample(side, model):
    with side.step(), torch.no_grad():
        return model(input_ids=torch.arange(9)[None]).logits


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind, when):
    def client(side):
        torch.manual_seed(0)
        model = models.llama().train()
        if when == "after":
            side.attach(model, at_least=20)
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, ADAPTERS[kind]())
        for name, parameter in adapted.named_parameters():
            if "ranknum" in name:  # peft moves it to the layer's device, and so has it train
                parameter.requires_grad_(False)
        if when == "before":
            side.attach(adapted, at_least=15)  # BOFT computes with the weights of its layers
        seen = train(side, adapted)
        with adapted.disable_adapter():
            off = sample(side, adapted)
        on = sample(side, adapted)
        assert not torch.equal(on, off)
        return [seen, on, off, values(adapted, True)]

    compare(client)


@pytest.mark.parametrize("when", ["before", "after"])
def test_dora_reads_the_weights_of_any_layer_and_leaves_them_managed(nothing_is_small, when):
    """Of Linear, Embedding and transformers' Conv1D."""

    def client(side):
        torch.manual_seed(0)
        model = models.gpt2().train().requires_grad_(False)
        if when == "after":
            side.attach(model, at_least=10)
        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=4,
            target_modules=["c_attn", "mlp.c_proj", "wte", "score"],
            fan_in_fan_out=True,
            use_dora=True,
            init_lora_weights=False,
        )
        adapted = peft.get_peft_model(model, config)
        if when == "before":
            side.attach(adapted, at_least=10)
        seen = []
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
        for _ in range(2):
            with side.step():
                output = adapted(
                    input_ids=torch.randint(1, 100, (2, 9)), labels=torch.tensor([3, 5])
                )
                output.loss.backward()
            seen.append([output.loss.detach(), output.logits.detach()])
            optimizer.step()
            optimizer.zero_grad()
        for manager in side.managers:
            base = [m for m in adapted.modules() if isinstance(m, BaseTunerLayer)]
            kinds = {type(m.get_base_layer()).__mro__[1].__name__ for m in base}
            assert kinds == {"Linear", "Embedding", "Conv1D"}
            assert all(is_managed(m.get_base_layer()) for m in base)
            assert not [name for name in manager.resident if "lora_" not in name]
        return [seen, values(adapted, True)]

    compare(client)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "ia3", "oft"])
def test_merge_and_unload(kind):
    """A merge writes the masters; what is computed next uses what was written."""

    def client(side):
        torch.manual_seed(0)
        model = models.llama().eval()
        side.attach(model, at_least=20)
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, ADAPTERS[kind]())
        seen = [sample(side, adapted)]
        adapted.merge_adapter()
        seen.append(sample(side, adapted))
        adapted.unmerge_adapter()
        seen.append(sample(side, adapted))
        plain = adapted.merge_and_unload()
        seen.append(sample(side, plain))
        assert not torch.equal(seen[-1], seen[-2]) or kind == "oft"
        return [seen, values(plain)]

    compare(client)


def test_two_adapters_are_switched():
    def client(side):
        torch.manual_seed(0)
        model = side.attach(models.llama().train(), at_least=20)
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, ADAPTERS["lora"](), adapter_name="one")
        adapted.add_adapter("two", ADAPTERS["lora"]())
        seen = []
        for name in ("one", "two", "one"):
            adapted.set_adapter(name)
            seen.append([train(side, adapted, 1), sample(side, adapted)])
        adapted.delete_adapter("two")
        return [seen, sample(side, adapted)]

    compare(client)
