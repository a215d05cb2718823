"""AI-Toolkit's own trainer on tiny models: to the last bit what it is without offloading."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import tiny
import trainer
from equality import assert_same


def as_it_is(checkpoint):
    """Nothing of the model's classes has to be smaller for this checkpoint."""
    return contextlib.nullcontext()


def as_local_wan22(checkpoint):
    """Wan 2.2's class has the place of its autoencoder built in."""
    from extensions_built_in.diffusion_models.wan22.wan22_14b_model import Wan2214bModel

    return mock.patch.object(Wan2214bModel, "_wan_vae_path", str(checkpoint / "vae"))


def as_small_klein(checkpoint):
    """The sizes and the text encoder that the classes of FLUX.2 klein have built in."""
    from extensions_built_in.diffusion_models.flux2 import flux2_klein_model, flux2_model

    transformer, vae = tiny.klein_sizes()
    stack = contextlib.ExitStack()
    klein = flux2_klein_model.Flux2Klein4BModel
    for owner, name, value in (
        (klein, "get_flux2_params", lambda _: transformer),
        (klein, "flux2_klein_te_path", str(checkpoint / "text_encoder")),
        (flux2_model, "AutoEncoderParams", lambda: vae),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    return stack


# How AI-Toolkit calls a model, its checkpoint in small, what its classes are made to be, and the
# layers of each part that must be managed at least.
MODELS = {
    "Qwen-Image": (
        "qwen_image", tiny.qwen_image, as_it_is,
        {"QwenImageTransformer2DModel": 30, "Qwen2_5_VLForConditionalGeneration": 14},
    ),
    "Z-Image": (
        "zimage", tiny.z_image, as_it_is,
        {"ZImageTransformer2DModel": 20, "Qwen3ForCausalLM": 21},
    ),
    "Wan 2.1": (
        "wan21", tiny.wan21, as_it_is,
        {"WanTransformer3DModel": 20, "UMT5EncoderModel": 14},
    ),
    "Wan 2.2": (
        "wan22_14b", tiny.wan22, as_local_wan22,
        {"WanTransformer3DModel": 20, "UMT5EncoderModel": 14},
    ),
    "FLUX.2 klein": (
        "flux2_klein_4b", tiny.flux2_klein, as_small_klein,
        {"Flux2": 10, "Qwen3ForCausalLM": 196},
    ),
}  # fmt: skip


@pytest.fixture
def model(request, tmp_path):
    arch, make, smaller, parts = MODELS[request.param]
    (tmp_path / "checkpoint").mkdir()
    make(tmp_path / "checkpoint")
    with smaller(tmp_path / "checkpoint"):
        yield types.SimpleNamespace(arch=arch, path=tmp_path, parts=parts)


def train(subject, offloading, steps=4, **changes):
    folder = subject.path / f"offloading_{offloading}"
    if not folder.exists():
        trainer.images(folder / "images")
    config = trainer.configuration(
        folder,
        subject.arch,
        subject.path / "checkpoint",
        offloading=offloading,
        steps=steps,
        **changes,
    )
    losses, previews, saved, attached = trainer.run(config)
    if offloading:
        for part, least in subject.parts.items():
            assert len(attached.managed[part]) >= least, attached.managed
        assert attached.link_bytes > 0
    else:
        assert not attached.models
    last = {name: state for name, state in saved.items() if "000000002" not in name}
    assert last  # Wan 2.2 saves two, of its two transformers
    for state in last.values():
        moved = [bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name]
        # What the text stream of Qwen-Image's last block computes goes nowhere.
        assert moved and moved.count(False) <= (4 if subject.arch == "qwen_image" else 0)
    return losses, previews, saved, attached


def assert_both_train_alike(subject, previews, **options):
    """Compare the losses and every saved LoRA; return what the offloaded run had attached."""
    results = []
    for offloading in (False, True):
        losses, shown, saved, attached = train(subject, offloading, **options)
        assert len(shown) == previews
        results.append((losses, saved))
    assert len(results[0][0]) >= 2 and results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])
    return attached


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_training_with_previews_and_saves(model):
    assert_both_train_alike(model, previews=3)


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_training_with_low_vram_cached_prompts_and_an_encoder_quantised_after_attach(model):
    """The encoder is freed once the prompts are cached; until then its quantised bytes stream."""
    attached = assert_both_train_alike(
        model,
        previews=2,
        train={"cache_text_embeddings": True, "skip_first_sample": True},
        model={"low_vram": True, "quantize_te": True, "qtype_te": "float8", "qtype": "float8"},
    )
    kinds = attached.managed["Qwen3ForCausalLM"]
    assert kinds.count("QuantisedLayer") >= 0.9 * len(kinds), kinds
