"""Training steps of every model class, by its own code: a LoRA over what is offloaded."""

from __future__ import annotations

import contextlib

import architectures
import pytest
import torch
from architectures import MAKERS, NOT_BUILT, WHOLE_JOBS
from equality import gradients
from runs import compare, network_on

from oracle_offload.model import selection
from oracle_offload.model.witness import Witness


def test_every_model_class_of_the_checkout_is_here():
    """A class that is new there fails here until somebody builds it, or says why not."""
    assert {*architectures.classes()} == {*MAKERS, *NOT_BUILT, *WHOLE_JOBS}


@pytest.mark.parametrize("arch", MAKERS)
def test_two_steps_of_every_model_class_have_the_residents_bits(arch, monkeypatch):
    """The second under the witness: no operator in it may touch a master."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)

    def run(offloaded):
        sd, embeds, batch = architectures.made(arch)
        streaming = [m for m in sd.model.modules() if type(m) is torch.nn.Linear]
        offloaded.attach(sd.model, len(streaming))
        network = network_on(sd.get_model_to_train(), targets=sd.target_lora_modules)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.1)  # those that begin with zeros let no gradient pass
        found = []
        for witnessed in (False, True):
            torch.manual_seed(witnessed)
            noise = torch.randn_like(batch.latents)
            timestep = torch.tensor([400.0])
            noisy = sd.add_noise(batch.latents, noise, timestep)
            noisy = sd.condition_noisy_latents(noisy, batch)
            witness = Witness() if witnessed and offloaded.on else contextlib.nullcontext()
            with witness:
                predicted = sd.predict_noise(
                    latents=noisy, conditional_embeddings=embeds, timestep=timestep, batch=batch
                )
                wanted = sd.get_loss_target(noise=noise, batch=batch, timesteps=timestep)
                (predicted.float() - wanted.float()).square().mean().backward()
            found += [predicted.detach(), gradients(network)]
            network.zero_grad(set_to_none=True)
        reached = [grad.any() for grad in found[1].values() if grad is not None]
        assert sum(reached) > len(reached) / 2
        return found

    compare(run)
