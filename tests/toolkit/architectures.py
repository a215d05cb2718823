"""Every model class that AI-Toolkit trains, in small: its own transformer, random, no download.

Each maker gives an instance of the class what its loader would: the model, and of the other parts
what a training step reads. It returns the latents, the prompt and what the batch holds.
"""

from __future__ import annotations

import dataclasses
import importlib
import types

import tiny
import torch
from runs import DEVICE
from toolkit.advanced_prompt_embeds import AdvancedPromptEmbeds
from toolkit.config_modules import ModelConfig
from toolkit.prompt_utils import PromptEmbeds

MODELS = "extensions_built_in.diffusion_models"
TEXT = 32  # features of a prompt's tokens
ONE = {"num_layers": 1, "num_attention_heads": 2}

# Classes that no maker here can build without a download, and why.
NOT_BUILT: dict[str, str] = {}
# Those whose whole job runs in test_trainer.py, from the loader to the saved LoRA.
WHOLE_JOBS = ("wan21", "wan22_14b", "qwen_image", "flux2", "flux2_klein_4b", "zimage", "ltx2")


def noise(*shape):
    return torch.randn(shape)


def prompt(tokens=6, features=TEXT, pooled=None, mask=torch.long):
    """One prompt in one tensor, with a mask."""
    text = noise(1, tokens, features)
    embeds = PromptEmbeds(text if pooled is None else [text, noise(1, pooled)])
    embeds.attention_mask = torch.ones(1, tokens, dtype=mask)
    return embeds


def prompts(tokens=6, features=TEXT, **more):
    """One prompt in a list, of its own length."""
    return AdvancedPromptEmbeds(text_embeds=[noise(tokens, features)], **more)


def named(**values):
    return types.SimpleNamespace(**values)


def picture(size=32):
    return torch.rand(1, 3, size, size)


def of(module, name):
    """Return what a module of the checkout has."""
    return getattr(importlib.import_module(f"{MODELS}.{module}"), name)


def smaller(given, **changes):
    return dataclasses.replace(given, **changes)


# ---- autoencoders that encode a picture to condition on ----


def plain_vae(channels=16):
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=channels,
        norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=0.36, shift_factor=0.11,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def qwen_vae():
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, dim_mult=[1] * 4)


def wan_vae():
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=8, num_res_blocks=1, dim_mult=[1] * 4)


# ---- the models ----


def chroma(sd):
    params = smaller(
        of("chroma.src.model", "chroma_params"), context_in_dim=TEXT, hidden_size=64, num_heads=2,
        depth=1, depth_single_blocks=1, axes_dim=[8, 12, 12], approximator_depth=1,
        approximator_hidden_size=32,
    )  # fmt: skip
    sd.model = of("chroma.src.model", "Chroma")(params)
    sd.model.dtype = torch.float32
    sd.vae = named(config=named(latent_channels=16))
    return noise(1, 16, 8, 8), prompt(), {}


def chroma_radiance(sd):
    params = smaller(
        of("chroma.src.radiance", "chroma_params"), context_in_dim=TEXT, hidden_size=64,
        num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[8, 12, 12], approximator_depth=1,
        approximator_hidden_size=32, nerf_depth=1,
    )  # fmt: skip
    sd.model = of("chroma.src.radiance", "Chroma")(params)
    sd.model.dtype = torch.float32
    return noise(1, 3, 32, 32), prompt(), {}


HIDREAM = {
    "patch_size": 2, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 32, "num_attention_heads": 2, "caption_channels": [TEXT, TEXT],
    "text_emb_dim": TEXT, "axes_dims_rope": (16, 8, 8), "max_resolution": (16, 16),
    "llama_layers": [0, 1],
    # It adds up several experts in place, which has no derivative here, offloaded or not.
    "num_routed_experts": 1, "num_activated_experts": 1,
}  # fmt: skip


def hidream(sd):
    sd.model = sd.hidream_transformer_class(**HIDREAM)
    t5, llama = noise(1, 6, TEXT), noise(2, 1, 6, TEXT)
    return noise(1, 16, 8, 8), PromptEmbeds([[t5, llama], noise(1, TEXT)]), {}


def hidream_e1(sd):
    latents, embeds, _ = hidream(sd)
    sd.vae = plain_vae()
    return latents, embeds, {"control_tensor": picture(64)}


def hidream_o1(sd):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

    given = of("hidream.src.hidream_o1.model_config", "model_config")
    text = given["text_config"] | {
        "head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 300, "bos_token_id": 256,
        "eos_token_id": 258, "dtype": "float32",
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default",
        },
    }  # fmt: skip
    vision = given["vision_config"] | {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    tokens = {
        "image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292,
        "vision_end_token_id": 293,
    }  # fmt: skip
    config = Qwen3VLConfig(**(given | tokens | {"text_config": text, "vision_config": vision}))
    kind = of("hidream.src.hidream_o1.qwen3_vl_transformers", "Qwen3VLForConditionalGeneration")
    sd.model = kind(config)
    pipeline = of("hidream.src.hidream_o1.pipeline", "HiDreamO1Pipeline")
    sd.pipeline = named(model=sd.model)
    sd.pipeline.build_conditioning_sample = types.MethodType(
        pipeline.build_conditioning_sample, sd.pipeline
    )
    return noise(1, 3, 64, 64), AdvancedPromptEmbeds(text_embeds=[torch.arange(8)[None]]), {}


def f_lite(sd):
    with torch.device("cpu"):  # its __init__ multiplies what it makes on the host
        sd.model = of("f_light.src", "DiT")(
            in_channels=16, hidden_size=64, depth=2, num_heads=2, cross_attn_input_size=TEXT
        )
    return noise(1, 16, 8, 8), prompt(), {}


OMNIGEN = {
    "hidden_size": 96, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4,
    "num_kv_heads": 2, "multiple_of": 32, "axes_dim_rope": (8, 8, 8), "axes_lens": (64, 32, 32),
}  # fmt: skip


def omnigen2(sd):
    sd.model = of("omnigen2", "OmniGen2Transformer2DModel")(**OMNIGEN, text_feat_dim=TEXT)
    sd.freqs_cis = of("omnigen2", "OmniGen2RotaryPosEmbed").get_freqs_cis(
        sd.model.config.axes_dim_rope, sd.model.config.axes_lens, theta=10000
    )
    sd.vae = plain_vae()
    return noise(1, 16, 8, 8), prompt(), {"control_tensor": picture(64)}


def boogu(sd):
    sd.model = of("boogu_image.src.transformer", "BooguImageTransformer2DModel")(
        **OMNIGEN, num_double_stream_layers=1,
        instruction_feature_configs={
            "instruction_feat_dim": TEXT, "reduce_type": "mean", "num_instruction_feat_layers": 1,
        },
    )  # fmt: skip
    return noise(1, 16, 8, 8), prompts(), {}


def boogu_edit(sd):
    latents, embeds, _ = boogu(sd)
    sd.vae = plain_vae()
    return latents, embeds, {"control_tensor_list": [[picture(64)]]}


def _flux(sd, channels):
    from diffusers import FluxTransformer2DModel

    sd.model = FluxTransformer2DModel(
        **ONE, num_single_layers=1, in_channels=channels, out_channels=64, attention_head_dim=16,
        joint_attention_dim=TEXT, pooled_projection_dim=TEXT, guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    sd.vae = plain_vae()
    return noise(1, 16, 8, 8), prompt(pooled=TEXT)


def flux_kontext(sd):
    return *_flux(sd, 64), {"control_tensor": picture(64)}


def flex2(sd):
    return *_flux(sd, 4 * (16 + 16 + 1 + 16)), {}


WAN = {
    "num_attention_heads": 4, "attention_head_dim": 32, "text_dim": TEXT, "freq_dim": 32,
    "ffn_dim": 128, "num_layers": 1,
}  # fmt: skip


def wan22_5b(sd):
    from diffusers import WanTransformer3DModel

    sd.model = WanTransformer3DModel(in_channels=16, out_channels=16, **WAN)
    sd.vae = wan_vae()
    settings = named(do_i2v=True)
    first = {"first_frame_latents": noise(1, 16, 1, 8, 8), "dataset_config": settings}
    return noise(1, 16, 2, 8, 8), prompt(), first


def wan21_i2v(sd):
    from diffusers import WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sd.model = WanTransformer3DModel(
        in_channels=36, out_channels=16, image_dim=TEXT, added_kv_proj_dim=128, **WAN
    )
    sd.vae, sd.image_processor = wan_vae(), CLIPImageProcessor()
    sd.image_encoder = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=TEXT, intermediate_size=TEXT, num_hidden_layers=2, num_attention_heads=2,
            image_size=224, patch_size=56,
        )
    ).eval()  # fmt: skip
    return noise(1, 16, 2, 8, 8), prompt(), {"tensor": picture(64)}


def wan22_14b_i2v(sd):
    from diffusers import WanTransformer3DModel

    both = [WanTransformer3DModel(in_channels=36, out_channels=16, **WAN) for _ in range(2)]
    kind = of("wan22.wan22_14b_model", "DualWanTransformer3DModel")
    sd.model = kind(*both, torch_dtype=torch.float32, device=DEVICE)
    sd.vae = wan_vae()
    return noise(1, 16, 2, 8, 8), prompt(), {"tensor": picture(64)}


def _qwen(sd):
    from diffusers import QwenImageTransformer2DModel

    sd.model = QwenImageTransformer2DModel(
        **ONE, patch_size=2, in_channels=64, out_channels=16, attention_head_dim=32,
        joint_attention_dim=TEXT, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    sd.vae = qwen_vae()
    return noise(1, 16, 8, 8), prompt()


def qwen_edit(sd):
    return *_qwen(sd), {"control_tensor": picture(64)}


def qwen_edit_plus(sd):
    sd.pipeline = named(vae_scale_factor=8)
    sd.model_config.model_kwargs["match_target_res"] = True  # else it encodes a million pixels
    return *_qwen(sd), {"control_tensor_list": [[picture(64), picture(64)]]}


def flux2_klein_9b(sd):
    params, _ = tiny.flux2_sizes("Klein9BParams")
    sd.model = of("flux2.src.model", "Flux2")(smaller(params, context_in_dim=TEXT))
    return noise(1, 128, 4, 4), prompt(), {}


def z_image_l2p(sd):
    sd.model = of("z_image.z_image_l2p_model", "ZImageTransformer2DModel")(
        all_patch_size=(16,), in_channels=3, dim=64, n_layers=1, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=TEXT, axes_dims=[8, 12, 12], axes_lens=[256, 64, 64],
    )  # fmt: skip
    return noise(1, 3, 32, 32), PromptEmbeds([[noise(6, TEXT)], None]), {}


def zeta_chroma(sd):
    params = of("zeta_chroma.zeta_chroma_transformer", "ZImageDCTParams")(
        in_channels=3 * 32 * 32, dim=64, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=TEXT, axes_dims=[8, 12, 12], axes_lens=[1536, 64, 64],
        decoder_hidden_size=64, decoder_num_res_blocks=1,
    )  # fmt: skip
    sd.model = of("zeta_chroma.zeta_chroma_transformer", "ZImageDCT")(params)
    sd.max_sequence_length = 6
    return noise(1, 3, 64, 64), prompt(mask=torch.bool), {}


def ernie(sd):
    from diffusers import ErnieImagePipeline

    sd.model = of("ernie_image.transformer", "ErnieImageTransformer2DModel")(
        hidden_size=64, num_attention_heads=2, num_layers=1, ffn_hidden_size=64, in_channels=16,
        out_channels=16, text_in_dim=TEXT, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip
    sd.vae = named(dtype=torch.float32)
    sd.pipeline = named(transformer=sd.model, _pad_text=ErnieImagePipeline._pad_text)
    return noise(1, 16, 4, 4), prompts(), {}


def nucleus(sd):
    from diffusers import NucleusMoEImagePipeline, NucleusMoEImageTransformer2DModel

    sd.model = NucleusMoEImageTransformer2DModel(
        num_layers=3, num_attention_heads=2, attention_head_dim=32, joint_attention_dim=TEXT,
        axes_dims_rope=(8, 12, 12), num_experts=2, moe_intermediate_dim=64, capacity_factors=2.0,
        dense_moe_strategy="leave_first_block_dense", in_channels=64, out_channels=16,
    )  # fmt: skip
    sd.pipeline = named(
        transformer=sd.model, vae_scale_factor=8,
        _pack_latents=NucleusMoEImagePipeline._pack_latents,
        _unpack_latents=NucleusMoEImagePipeline._unpack_latents,
    )  # fmt: skip
    mask = torch.ones(6, dtype=torch.long)
    return noise(1, 16, 8, 8), prompts(attention_mask=[mask]), {}


def anima(sd):
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    transformer = CosmosTransformer3DModel(
        **ONE, attention_head_dim=32, text_embed_dim=TEXT, adaln_lora_dim=16,
        max_size=(4, 32, 32), extra_pos_embed_type=None,
    )  # fmt: skip
    conditioner = AnimaTextConditioner(
        source_dim=TEXT, target_dim=TEXT, model_dim=TEXT, num_layers=1, num_attention_heads=2,
        target_vocab_size=64, min_sequence_length=8,
    )  # fmt: skip
    sd.model = of("anima.anima", "AnimaTrainableModel")(transformer, conditioner)
    ones = torch.ones(1, 6, dtype=torch.long)
    embeds = of("anima.anima", "AnimaPromptEmbeds")(
        noise(1, 6, TEXT), torch.arange(6)[None], ones, ones
    )
    return noise(1, 16, 8, 8), embeds, {}


def ideogram4(sd):
    config = of("ideogram4.src.transformer", "Ideogram4Config")(
        emb_dim=64, num_layers=2, num_heads=2, intermediate_size=64, adanln_dim=16,
        llm_features_dim=TEXT, mrope_section=(6, 5, 5),
    )  # fmt: skip
    sd.model = of("ideogram4.src.transformer", "Ideogram4Transformer2DModel")(config)
    return noise(1, 128, 4, 4), prompts(), {}


def prx_pixel(sd):
    sd.model = of("prx_pixel_t2i.src.transformer_prx", "PRXTransformer2DModel")(
        in_channels=3, patch_size=16, context_in_dim=TEXT, hidden_size=64, num_heads=2, depth=2,
        axes_dim=[16, 16], bottleneck_size=32, resolution_embeds=True,
    )  # fmt: skip
    return noise(1, 3, 32, 32), prompt(), {}


def krea2(sd):
    config = of("krea2.src.mmdit", "SingleMMDiTConfig")(
        features=64, tdim=16, txtdim=TEXT, heads=2, kvheads=2, multiplier=2, layers=2, patch=2,
        channels=16, txtlayers=2, txtheads=2, txtkvheads=2,
    )  # fmt: skip
    sd.model = of("krea2.src.mmdit", "SingleStreamDiT")(config)
    return noise(1, 16, 8, 8), prompts(features=2 * TEXT), {}


def mageflow(sd):
    params = of("mageflow.src.transformer", "MageFlowParams")(
        in_channels=128, out_channels=128, context_in_dim=TEXT, hidden_size=64, num_heads=2,
        depth=1, axes_dim=[8, 12, 12], checkpoint=False,
    )  # fmt: skip
    sd.model = of("mageflow.src.transformer", "MageFlow")(params)
    return noise(1, 128, 4, 4), prompts(), {}


def minimax_h3(sd):
    params = of("minimax_h3.src.transformer", "MiniMaxH3TransformerParams")(
        hidden_size=64, num_layers=1, token_refiner_num_layers=1, num_attention_heads=2,
        attention_head_dim=32, ffn_hidden_size=64, text_dim=TEXT, timestep_input_dim=32,
        time_embed_hidden_size=64, time_embed_dim=32, rope_inv_freq_len=4,
    )  # fmt: skip
    sd.model = of("minimax_h3.src.transformer", "MiniMaxH3Transformer")(params)
    embeds = prompts(text_token_tags=[torch.ones(6, dtype=torch.long)])
    embeds.frozen_dtype_keys = ["text_token_tags"]
    return noise(1, 24, 2, 4, 4), embeds, {"num_frames": 5}


def ace_step(sd):
    from extensions_built_in.audio_models.ace_step.src.model import AceStep15

    sd.model = AceStep15(
        hidden=64, text_dim=TEXT, n_dit=2, n_lyric=1, n_timbre=1, heads=2, kv=2, head_dim=32,
        inter=64, sliding_window=4,
    )  # fmt: skip
    sd.model.requires_grad_(False)
    return noise(1, 16, 64), prompt(features=64), {}


def _ltx2(sd):
    from diffusers import AutoencoderKLLTX2Audio, LTX2Pipeline

    version = sd.ltx_version
    converted = "ltx2.convert_ltx2_to_diffusers"
    (config, *_), (connector, *_) = (
        of(converted, f"get_ltx2_{part}_config")(version) for part in ("transformer", "connectors")
    )
    from diffusers import LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    sd.model = LTX2VideoTransformer3DModel(
        **config["diffusers_config"]
        | {
            "in_channels": 16, "out_channels": 16, "num_attention_heads": 4,
            "attention_head_dim": 32, "cross_attention_dim": 128, "audio_in_channels": 4,
            "audio_out_channels": 4, "audio_num_attention_heads": 4,
            "audio_attention_head_dim": 16, "audio_cross_attention_dim": 64, "num_layers": 1,
            "caption_channels": TEXT,
        }
    )  # fmt: skip
    if version == "2.5":  # as its loader does
        for block in sd.model.transformer_blocks:
            for layer in (block.ff.net[0].proj, block.ff.net[2]):
                layer.bias = None
    connectors = LTX2TextConnectors(
        **connector["diffusers_config"]
        | {
            "caption_channels": TEXT, "text_proj_in_factor": 1,
            "video_connector_num_attention_heads": 4, "video_connector_attention_head_dim": 32,
            "video_connector_num_layers": 1, "video_connector_num_learnable_registers": None,
            "audio_connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 16,
            "audio_connector_num_layers": 1, "audio_connector_num_learnable_registers": None,
            "video_hidden_dim": 128, "audio_hidden_dim": 64,
        }
    )  # fmt: skip
    audio = AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2,
        mel_bins=8,
    )  # fmt: skip
    sd.pipeline = LTX2Pipeline(
        scheduler=sd.noise_scheduler, vae=None, audio_vae=audio, text_encoder=None,
        tokenizer=None, connectors=connectors.requires_grad_(False), transformer=sd.model,
        vocoder=None,
    )  # fmt: skip
    settings = named(do_i2v=False, do_audio=False, fps=24)
    return noise(1, 16, 1, 4, 4), prompt(), {"dataset_config": settings, "num_frames": 9}


def cogview4(sd):
    from diffusers import CogView4Transformer2DModel

    sd.model = CogView4Transformer2DModel(
        num_layers=1, attention_head_dim=32, num_attention_heads=2, text_embed_dim=TEXT,
        time_embed_dim=32, condition_dim=16, pos_embed_max_size=16, sample_size=16,
        rope_axes_dim=(16, 16),
    )  # fmt: skip
    sd.effective_noise = None
    return noise(1, 16, 8, 8), prompt(), {}


MAKERS = {
    "chroma": chroma,
    "chroma_radiance": chroma_radiance,
    "hidream": hidream,
    "hidream_e1": hidream_e1,
    "hidream_o1": hidream_o1,
    "f-lite": f_lite,
    "omnigen2": omnigen2,
    "boogu_image": boogu,
    "boogu_image_edit": boogu_edit,
    "flux_kontext": flux_kontext,
    "flex2": flex2,
    "wan21_i2v": wan21_i2v,
    "wan22_5b": wan22_5b,
    "wan22_14b_i2v": wan22_14b_i2v,
    "qwen_image_edit": qwen_edit,
    "qwen_image_edit_plus": qwen_edit_plus,
    "flux2_klein_9b": flux2_klein_9b,
    "zimage_l2p": z_image_l2p,
    "zeta_chroma": zeta_chroma,
    "ernie_image": ernie,
    "nucleus_image": nucleus,
    "anima": anima,
    "ideogram4": ideogram4,
    "prx_pixel": prx_pixel,
    "krea2": krea2,
    "mageflow": mageflow,
    "mageflow_edit": mageflow,
    "minimax_h3": minimax_h3,
    "minimax_h3_ref2va": minimax_h3,
    "ace_step_15": ace_step,
    "ace_step_15_xl": ace_step,
    "ltx2.3": _ltx2,
    "ltx2.5": _ltx2,
    "cogview4": cogview4,
}


def classes():
    """Return the checkout's model classes by their name there."""
    from toolkit.util.get_model import BUILT_IN_MODELS

    found = list(BUILT_IN_MODELS)
    for package in ("diffusion_models", "audio_models", "flex2"):
        module = importlib.import_module(f"extensions_built_in.{package}")
        found += module.AI_TOOLKIT_MODELS
    return {kind.arch: kind for kind in found}


def made(arch):
    """Return a model class's instance and the latents, the prompt and the batch of a step."""
    kind = classes()[arch]
    dtypes = dict.fromkeys(("dtype", "vae_dtype", "te_dtype"), "float32")
    sd = kind(
        str(DEVICE), ModelConfig(name_or_path="tiny", arch=arch, **dtypes), dtype="float32",
        noise_scheduler=kind.get_train_scheduler(),
    )  # fmt: skip
    latents, embeds, batch = MAKERS[arch](sd)
    tiny.randomised(sd.model).requires_grad_(False)
    missing = {
        "control_tensor": None, "control_tensor_list": None, "inpaint_tensor": None,
        "mask_tensor": None, "first_frame_latents": None, "audio_latents": None,
        "audio_tensor": None, "audio_target": None, "audio_pred_slot": None, "audio_noise": None,
        "file_items": None, "num_frames": 1, "tensor": picture(64), "latents": latents,
        "dataset_config": named(do_i2v=False, do_audio=False, fps=24),
    }  # fmt: skip
    return sd, embeds, named(**(missing | batch))
