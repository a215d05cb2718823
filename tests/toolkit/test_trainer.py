"""AI-Toolkit's own trainer on tiny models: to the last bit what it is without offloading."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import tiny
import torch
import trainer
from equality import assert_same
from runs import moved_bytes

import oracle_offload.aitoolkit.together as aitoolkit_together
import oracle_offload.train.micro_batches.accumulate as micro_batches


def as_it_is(checkpoint):
    """Nothing of the model's classes has to be smaller for this checkpoint."""
    return []


def as_local_wan22(checkpoint):
    """Wan 2.2's class has the place of its autoencoder built in."""
    from extensions_built_in.diffusion_models.wan22.wan22_14b_model import Wan2214bModel

    return [(Wan2214bModel, "_wan_vae_path", str(checkpoint / "vae"))]


def _as_small_flux2(kind, model_class):
    """The sizes that FLUX.2's classes have built in."""
    from extensions_built_in.diffusion_models.flux2 import flux2_model

    transformer, vae = tiny.flux2_sizes(kind)
    return [
        (model_class, "get_flux2_params", lambda _: transformer),
        (flux2_model, "AutoEncoderParams", lambda: vae),
    ]


def as_small_klein(checkpoint):
    """Sizes, and the text encoder's place."""
    from extensions_built_in.diffusion_models.flux2.flux2_klein_model import Flux2Klein4BModel

    place = (Flux2Klein4BModel, "flux2_klein_te_path", str(checkpoint / "text_encoder"))
    return [place, *_as_small_flux2("Klein4BParams", Flux2Klein4BModel)]


def as_small_dev(checkpoint):
    """Sizes, and the text encoder's place."""
    from extensions_built_in.diffusion_models.flux2 import flux2_model

    place = (flux2_model, "MISTRAL_PATH", str(checkpoint / "text_encoder"))
    return [place, *_as_small_flux2("Flux2Params", flux2_model.Flux2Model)]


@dataclass(frozen=True)
class Model:
    """One that AI-Toolkit trains.

    Attributes
    ----------
    arch : str
        How AI-Toolkit calls it.
    make : callable
        Writes its checkpoint in small to a folder.
    managed : dict
        The layers of each part that must be managed at least.
    smaller : callable
        From the checkpoint's folder to what its classes are made to be: (owner, name, value).
    unreached : frozenset
        The adapters whose `lora_B` must stay zero: what they compute goes nowhere.
    constant : frozenset
        Those whose `lora_B` may: no result depends on it, so its gradient is zero or rounding.
    """

    arch: str
    make: Callable
    managed: dict[str, int]
    smaller: Callable = as_it_is
    unreached: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()


def of_blocks(blocks, *layers):
    """Return the names of these layers in each of these blocks."""
    return frozenset(f"transformer_blocks.{i}.{layer}" for i in blocks for layer in layers)


WAN = {"WanTransformer3DModel": 20, "UMT5EncoderModel": 14}
MODELS = {
    # What the text stream of its last block computes goes nowhere.
    "Qwen-Image": Model(
        "qwen_image",
        tiny.qwen_image,
        {"QwenImageTransformer2DModel": 30, "Qwen2_5_VLForConditionalGeneration": 14},
        unreached=of_blocks(
            [1], "attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"
        ),
    ),
    "Z-Image": Model(
        "zimage", tiny.z_image, {"ZImageTransformer2DModel": 20, "Qwen3ForCausalLM": 21}
    ),
    "Wan 2.1": Model("wan21", tiny.wan21, WAN),
    "Wan 2.2": Model("wan22_14b", tiny.wan22, WAN, as_local_wan22),
    "FLUX.2 klein": Model(
        "flux2_klein_4b", tiny.flux2_klein, {"Flux2": 10, "Qwen3ForCausalLM": 196}, as_small_klein
    ),
    "FLUX.2 dev": Model(
        "flux2",
        tiny.flux2_dev,
        {"Flux2": 10, "Mistral3ForConditionalGeneration": 217},
        as_small_dev,
    ),
    # What the last block tells the sound goes nowhere. And a picture has one token of sound: the
    # softmax of an attention to it is 1, whatever queries and keys are.
    "LTX-2": Model(
        "ltx2",
        tiny.ltx2,
        {"LTX2VideoTransformer3DModel": 40, "Gemma3ForConditionalGeneration": 14},
        unreached=of_blocks(
            [1],
            *(f"video_to_audio_attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *("audio_ff.net.0.proj", "audio_ff.net.2"),
        ),
        constant=of_blocks(
            [0, 1],
            *("audio_attn1.to_q", "audio_attn1.to_k"),
            *("audio_to_video_attn.to_q", "audio_to_video_attn.to_k"),
        ),
    ),
}


@pytest.fixture
def model(request, tmp_path):
    """One of `MODELS`, its checkpoint in a folder."""
    spec = MODELS[request.param]
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    spec.make(checkpoint)
    with contextlib.ExitStack() as stack:
        for change in spec.smaller(checkpoint):
            stack.enter_context(mock.patch.object(*change))
        yield types.SimpleNamespace(spec=spec, path=tmp_path, checkpoint=checkpoint)


def train(subject, offloading, steps=4, name="", before_step=None, pictures=2, **changes):
    """Run a job, or go on with that of this name; return what `trainer.run` does."""
    folder = subject.path / f"offloading_{offloading}{name}"
    if not folder.exists():
        trainer.images(folder / "images", pictures)
    config = trainer.configuration(
        folder,
        subject.spec.arch,
        subject.checkpoint,
        offloading=offloading,
        steps=steps,
        **changes,
    )
    losses, previews, saved, attached = trainer.run(config, before_step)
    if offloading:
        for part, least in subject.spec.managed.items():
            assert len(attached.managed[part]) >= least, attached.managed
        assert attached.link_bytes > 0
    else:
        assert not attached.models
    last = {name: state for name, state in saved.items() if "_00000" not in name}
    assert last  # Wan 2.2 saves two, of its two transformers
    for state in last.values():
        second = {name: tensor for name, tensor in state.items() if "lora_B" in name}
        zero = {
            name.removeprefix("diffusion_model.").removesuffix(".lora_B.weight")
            for name, tensor in second.items()
            if not tensor.any()
        }
        assert len(second) > len(zero)
        unreached, constant = subject.spec.unreached, subject.spec.constant
        assert unreached <= zero <= unreached | constant, zero ^ unreached
    return losses, previews, saved, attached


def assert_both_train_alike(subject, previews, **options):
    """Compare the losses and every saved LoRA; return those, and what the second had attached."""
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


@pytest.mark.parametrize("model", ["FLUX.2 dev", "LTX-2"], indirect=True)
def test_training_with_low_vram_and_cached_prompts(model):
    assert_both_train_alike(
        model,
        previews=2,
        train={"cache_text_embeddings": True, "skip_first_sample": True},
        model={"low_vram": True},
    )


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_training_over_an_accuracy_recovery_adapter(model):
    """The LoRA of a first job mends the quantised layers of the second, attached with them."""
    quiet = {"disable_sampling": True}
    train(model, False, steps=2, name="_first", train=quiet)
    (mends,) = model.path.glob("offloading_False_first/tiny/tiny.safetensors")
    attached = assert_both_train_alike(
        model, previews=0, train=quiet, model={"quantize": True, "qtype": f"float8|{mends}"}
    )
    layers = attached.managed["ZImageTransformer2DModel"]
    assert layers.count("QuantisedLayer") >= 10
    assert len(attached.managed["ModuleList"]) >= 20


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_training_an_offloaded_network_with_accumulation_and_an_average(model):
    """The network's weights, gradients and optimizer are on the host; its average is saved."""
    results = []
    for offloading in (False, True):
        losses, _, saved, attached = train(
            model,
            offloading,
            network={"layer_offloading": offloading},
            train={
                "disable_sampling": True,
                "gradient_accumulation": 2,
                "ema_config": {"use_ema": True, "ema_decay": 0.9},
            },
        )
        results.append((losses, saved))
    assert len(results[0][0]) == 4 and results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])
    assert len(attached.managed["LoRASpecialNetwork"]) >= 30


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_one_setting_fetches_a_block_once_for_all_batches_of_a_step(model):
    """To the last bit what the same batches give one after the other, over less of the link."""
    runs = {}
    for together in (False, True):
        asked, moved = [], []

        def accumulate(step, batches, own, together=together, asked=asked):
            asked.append(len(batches))
            return micro_batches.accumulate(step, batches, interleave=together, own=own)

        with mock.patch.object(aitoolkit_together, "accumulate", accumulate):
            losses, _, saved, _ = train(
                model,
                True,
                name=f"_together_{together}",
                before_step=lambda _, moved=moved: moved.append(moved_bytes()),
                train={
                    "disable_sampling": True,
                    "cache_text_embeddings": True,
                    "gradient_accumulation": 3,
                },
                model={"layer_offloading_accumulate": True},
            )
        assert (asked, len(losses)) == ([3] * 4, 4)
        runs[together] = losses, saved, moved[3] - moved[1]
    assert runs[True][0] == runs[False][0]
    assert_same(runs[True][1], runs[False][1])
    print(f"link bytes: {runs[True][2] / runs[False][2]:.3f}")
    assert runs[True][2] < 0.5 * runs[False][2]  # with an arena of one block


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_one_setting_switches_previews_off(model):
    """And with them all forwards that are not training's."""
    calls = []

    def before_step(process):
        if process.step_num == 0:
            process.sd.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    assert_both_train_alike(
        model, previews=0, before_step=before_step, train={"disable_sampling": True}
    )
    assert calls == [True] * 8


@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_ten_runs_that_resume_train_as_one(model):
    """Each starts, attaches, resumes, takes three steps, saves and exits."""
    options = {"pictures": 1, "train": {"disable_sampling": True}, "save": {"save_every": 99}}
    expected, _, whole, _ = train(model, False, steps=30, **options)
    found = []
    for cycle in range(1, 11):
        losses, _, saved, _ = train(model, True, steps=3 * cycle, **options)
        assert len(losses) == 3, "it did not resume"
        found += losses
    assert found == expected
    assert_same(saved, whole)
    orders = list(model.path.glob("offloading_True/tiny/oracle_offload-order-*.json"))
    assert len(orders) == 1, orders  # of what is trained: backward never reaches the text encoder


@pytest.mark.parametrize("when", ["forward", "recompute"])
@pytest.mark.parametrize("model", ["Z-Image"], indirect=True)
def test_the_step_after_an_out_of_memory_error_that_the_trainer_caught(model, when):
    """In the second step, in the middle of the model: the trainer drops the batch and goes on."""
    raised = []

    def before_step(process):
        if process.step_num != 1:
            return
        layer = process.sd.model.layers[1].attention.to_out[0]
        uses = []

        def fail(*_):
            uses.append(None)
            if len(uses) == (1 if when == "forward" else 2):
                hook.remove()
                raised.append(when)
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Planted by a test.")

        hook = layer.register_forward_hook(fail)

    assert_both_train_alike(
        model, previews=0, before_step=before_step, train={"disable_sampling": True}
    )
    assert raised == [when, when]
