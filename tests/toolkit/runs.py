"""A run over AI-Toolkit's classes, resident and offloaded, and what is compared."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import sys
from pathlib import Path

import equality
import torch
from equality import assert_same, copied_bytes, is_simulated
from toolkit.memory_management import MemoryManager, sync_grad_transfers

DEVICE = torch.empty(0, device=equality.DEVICE).device  # with its index


def moved_bytes():
    """Return the bytes that travelled so far: a card's driver counts none, so its engines do."""
    driver, engines = copied_bytes()
    return driver if is_simulated(DEVICE.type) else engines


def load(name):
    """Return a file of AI-Toolkit's memory management as a module: its test has a transformer."""
    path = Path(os.environ["TOOLKIT"]) / "toolkit" / "memory_management" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"toolkit_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformer(blocks=2, width=64):
    """Its own benchmark's transformer, small."""
    if "toolkit_test_memory_manager" not in sys.modules:
        sys.modules["toolkit_test_memory_manager"] = load("test_memory_manager")
    bench = sys.modules["toolkit_test_memory_manager"]
    model = bench.Transformer(width, 4, blocks, 2 * width).requires_grad_(False)
    model.gradient_checkpointing = True
    return model


def network_on(model, kind="lora", targets=None, **options):
    """Its network of adapters on a model, applied as the trainer does; "locon" is LyCORIS'.

    `targets` are the classes of the modules that get adapters: the model's own, where not given.
    """
    from toolkit.config_modules import NetworkConfig
    from toolkit.lora_special import LoRASpecialNetwork
    from toolkit.lycoris_special import LycorisSpecialNetwork

    targets = targets or [type(model).__name__]
    config = NetworkConfig(type=kind, linear=4, linear_alpha=4, transformer_only=True, **options)
    LoRASpecialNetwork.LORA_PREFIX_UNET = "lora_transformer"
    LycorisSpecialNetwork.UNET_TARGET_REPLACE_MODULE = targets
    network_class = LycorisSpecialNetwork if kind == "locon" else LoRASpecialNetwork
    with contextlib.redirect_stdout(io.StringIO()):
        network = network_class(
            text_encoder=None,
            unet=model,
            lora_dim=config.linear,
            conv_lora_dim=config.conv,
            multiplier=1.0,
            alpha=config.linear_alpha,
            conv_alpha=config.conv_alpha,
            train_unet=True,
            train_text_encoder=False,
            network_config=config,
            network_type=config.type,
            transformer_only=config.transformer_only,
            is_transformer=True,
            target_lin_modules=targets,
            target_conv_modules=targets,
            full_train_in_out=False,
        )
        network.apply_to(None, model, apply_text_encoder=False, apply_unet=True)
    network.force_to(DEVICE, torch.float32)
    network._update_torch_multiplier()
    network.is_active = True
    network.train()
    return network


def prepared(network):
    """Return a network's groups of parameters for an optimizer; LyCORIS' takes fewer rates."""
    rates = inspect.signature(network.prepare_optimizer_params).parameters
    return network.prepare_optimizer_params(**dict.fromkeys(rates, 1e-3))


def train(model, networks, steps=3, width=64, optimizer="adamw"):
    """Train as SDTrainer does: forward, backward, sync, clip, step; return the losses."""
    from toolkit.optimizer import get_optimizer

    groups = [group for network in networks for group in prepared(network)]
    trained = [p for group in groups for p in group["params"]]
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = get_optimizer(groups, optimizer, learning_rate=1e-3, optimizer_params={})
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(2, 8, width)
        with torch.no_grad():
            model.to(DEVICE)
        for network in networks:
            network._update_torch_multiplier()
        loss = model(x).square().mean()
        loss.backward()
        sync_grad_transfers()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


class Offloaded:
    """Attaches models; asserts at the end that so many layers were managed, and weights moved."""

    def __init__(self, on):
        self.on, self.models, self.moved = on, [], moved_bytes()

    def attach(self, model, at_least, **options):
        if self.on:
            MemoryManager.attach(model, DEVICE, **options)
            assert len(model._memory_manager.layers) >= at_least, model._memory_manager.resident
            self.models.append(model)
        model.to(DEVICE)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        moved, (_, engines) = moved_bytes(), copied_bytes()
        for model in self.models:
            MemoryManager.detach(model)
        if self.on and error is None:
            assert moved - self.moved > 0 and moved == engines, (moved, engines)


def compare(run):
    """Assert that ``run(offloaded)`` returns the same with offloading as without; return it."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        with Offloaded(on) as offloaded:
            results.append(run(offloaded))
    assert_same(results[1], results[0])
    return results[1]


def adapted(offloaded, kind="lora", width=64):
    """Return a model that is attached if `offloaded` is, and an adapter that came after."""
    model = transformer(2, width)
    offloaded.attach(model, 12)
    return model, network_on(model, kind)


def saved(network):
    """Return copies of what a network saves, by name."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def inputs(width=64):
    """Return a batch that is the same each time."""
    return torch.randn(1, 4, width, generator=torch.Generator(DEVICE).manual_seed(1))
