"""AI-Toolkit's adapters over the drop-in: trained to the bits of the run without offloading."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from equality import assert_same
from runs import DEVICE, adapted, compare, inputs, network_on, prepared, saved, train, transformer
from toolkit.memory_management import MemoryManager
from torch import nn
from torch.utils.checkpoint import checkpoint


def assert_every_lora_b_moved(state):
    moved = [bool(tensor.any()) for name, tensor in state.items() if "lora_up" in name]
    assert moved and all(moved)


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("kind", ["lora", "lokr", "dora", "locon"])
def test_networks(kind, when):
    def run(offloaded):
        if when == "before attach":
            model = transformer()
            network = network_on(model, kind)
            offloaded.attach(model, 12)
        else:
            model, network = adapted(offloaded, kind)
        losses = train(model, [network])
        with torch.no_grad():
            network.is_active = False
            plain = model(inputs())
            network.is_active = True
            with_it = model(inputs())
        assert not torch.equal(plain, with_it)
        return losses, saved(network), plain, with_it

    *_, state, _, _ = compare(run)
    if kind in ("lora", "locon"):
        assert_every_lora_b_moved(state)


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("kind", ["LohaModule", "LokrModule", "GLoRAModule", "DyLoraModule"])
def test_lycoris_modules_that_compute_with_the_weight(kind, when):
    """They never call the layer: they read its weight. GLoRA calls what it found there."""
    from lycoris import kohya

    module_class = getattr(kohya, kind)

    def run(offloaded):
        model = transformer(2, 256)
        layers = [layer for block in model.blocks for layer in (block.q, block.k)]
        if when == "after attach":
            offloaded.attach(model, 12)
        adapters = [module_class(f"{i}", layer, 1.0, 4, 4) for i, layer in enumerate(layers)]
        # Which rank DyLoRA trains is drawn where no checkpoint sees it, in recomputes again.
        random.seed(1)
        model.gradient_checkpointing = kind != "DyLoraModule"
        for adapter in adapters:
            for parameter in adapter.parameters():
                if not parameter.any():  # at first they change nothing
                    torch.nn.init.constant_(parameter, 0.1)
            adapter.apply_to()
        if when == "before attach":
            offloaded.attach(model, 12)
        trained = [p for adapter in adapters for p in adapter.parameters()]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        found = []
        for _ in range(3):
            loss = model(inputs(256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        if offloaded.on:
            kinds = [type(layer).__name__ for layer in model._memory_manager.layers]
            assert kinds == ["LinearLayer"] * 12, kinds
        return found, [p.detach().clone() for p in trained]

    compare(run)


class Pictures(nn.Module):
    """Convolutions and a Linear, which are checkpointed together."""

    gradient_checkpointing = True

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 3, padding=1),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.Conv2d(32, 4, 1),
            nn.Linear(64, 64),
        ).requires_grad_(False)

    def forward(self, x):
        return checkpoint(self.layers, x[:, None].expand(-1, 4, -1, -1), use_reentrant=False)


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_networks_on_convolutions(kind, when):
    """Its LoKr computes a convolution's weight from the layer's, which it brings along itself."""

    def run(offloaded):
        model = Pictures()
        networks = []
        for is_network in (False, True) if when == "after attach" else (True, False):
            if is_network:
                networks.append(network_on(model, kind, conv=4, conv_alpha=4))
            else:
                offloaded.attach(model, 4)
        assert len(networks[0].get_all_modules()) == 4
        return train(model, networks), saved(networks[0])

    *_, state = compare(run)
    if kind == "lora":
        assert_every_lora_b_moved(state)


def test_a_moving_average_of_an_offloaded_network():
    """Its average copies the parameters, takes their place for a preview, and goes again."""
    from toolkit.ema import ExponentialMovingAverage

    def run(offloaded):
        model, network = adapted(offloaded)
        offloaded.attach(network, 24)
        trained = [p for group in prepared(network) for p in group["params"]]
        average = ExponentialMovingAverage(trained, decay=0.9)
        found = []
        for _ in range(2):
            found += train(model, [network], steps=2)
            average.update()
        average.eval()
        with torch.no_grad():
            found.append(model(inputs()))
        average.train()
        with torch.no_grad():
            found.append(model(inputs()))
        assert not torch.equal(found[-1], found[-2])
        return found, average.shadow_params, saved(network)

    compare(run)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_network_that_is_offloaded_itself(kind):
    def run(offloaded):
        model, network = adapted(offloaded, kind)
        groups = network.prepare_optimizer_params(1e-3, 1e-3, 1e-3)  # before its attach
        offloaded.attach(network, 24)
        found = train(model, [network]), saved(network)
        now = {id(p) for group in groups for p in group["params"]}
        assert now == {id(p) for p in network.parameters() if p.requires_grad}
        return found

    _, state = compare(run)
    if kind == "lora":
        assert_every_lora_b_moved(state)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor", "prodigy"])
def test_its_optimizers_step_an_offloaded_network(optimizer):
    """The parameters, their gradients and what the optimizer keeps of them are on the host."""

    def run(offloaded):
        model, network = adapted(offloaded)
        offloaded.attach(network, 24)
        return train(model, [network], optimizer=optimizer), saved(network)

    _, state = compare(run)
    assert_every_lora_b_moved(state)


def test_several_networks_at_once():
    def run(offloaded):
        model = transformer()
        first = network_on(model)
        offloaded.attach(model, 12)
        second = network_on(model, "lokr")
        return train(model, [first, second]), saved(first), saved(second)

    compare(run)


def test_full_rank_deltas():
    """FullModule: its delta is in the parameter's place during forward."""
    from toolkit.lora_special import FullModule

    def run(offloaded):
        model, network = adapted(offloaded)
        layers = [model.blocks[1].q, model.blocks[1].ln1]
        for layer in layers:
            layer.__dict__.pop("forward", None)
        full = [FullModule(f"full_{i}", layer, network=network) for i, layer in enumerate(layers)]
        for module in full:
            module.apply_to()
        losses = train(model, [network])
        gradients = [module.diff.grad.clone() for module in full]
        assert all(gradient.any() for gradient in gradients)
        return losses, gradients, saved(network)

    compare(run)


def test_merge_and_unmerge():
    def run(offloaded):
        model, network = adapted(offloaded)
        losses = train(model, [network])
        x = inputs()
        out = []
        with torch.no_grad():
            network.merge_in(1.0)
            out.append(model(x))
            out.append(copy.deepcopy(dict(model.state_dict())))
            network.merge_out(1.0)
            out.append(model(x))
        return losses, out

    compare(run)


def test_a_network_survives_detach_and_free_of_its_model():
    model = transformer()
    network = network_on(model)
    x = inputs()
    torch.manual_seed(0)
    for module in network.get_all_modules():
        torch.nn.init.normal_(module.lora_up.weight)
    expected = model(x)
    MemoryManager.attach(model, DEVICE)
    assert len(model._memory_manager.layers) == 12
    assert_same(model(x), expected)
    MemoryManager.detach(model)
    assert_same(model.to(DEVICE)(x), expected)
    MemoryManager.free(model)
    assert not any(p.is_meta for p in network.parameters())


def test_the_network_asks_where_it_computes():
    model = transformer()
    network = network_on(model)
    MemoryManager.attach(network, DEVICE)
    assert network.get_all_modules()[0].lora_down._memory_management_device == DEVICE
    network.multiplier = 0.5
    network._update_torch_multiplier()
    assert network.torch_multiplier.device == DEVICE
    MemoryManager.detach(network)
