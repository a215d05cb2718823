"""Checkpoints of the models that AI-Toolkit trains, each of a few MiB: real classes, no download.

Each is a folder as its loader expects it, with random weights that are always the same.
"""

from __future__ import annotations

import torch
from tokenizers import pre_tokenizers, processors

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<think>", "</think>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
]  # fmt: skip
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = 272  # of every text encoder here, a little more than the tokenizer has
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(folder):
    """Save and return a tokenizer with one token for each byte."""
    from transformers import Qwen2Tokenizer

    vocabulary = {token: number for number, token in enumerate(LETTERS + SPECIALS)}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=SPECIALS)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return made


def _t5_tokenizer(folder):
    """One token for each letter."""
    from transformers import T5Tokenizer

    letters = [(letter, -float(number)) for number, letter in enumerate(LETTERS)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), *letters]
    T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(folder)


def _gemma_tokenizer(folder):
    """One token for each letter, after one for the beginning."""
    from transformers import GemmaTokenizer

    begin = "<bos>"
    first = ["<pad>", "<eos>", begin, "<unk>", "\u2581"]
    vocabulary = {token: number for number, token in enumerate([*first, *LETTERS])}
    made = GemmaTokenizer(vocab=vocabulary, merges=[])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    made.save_pretrained(folder)


def randomised(model):
    """Give a model random weights, also where it begins with zeros, and so puts out nothing."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
    return model


def _save(model, folder):
    """Save random weights, in the type that they are trained in."""
    randomised(model).to(torch.bfloat16).save_pretrained(folder)


def _qwen3(folder, width=64, layers=3):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        bos_token_id=256, eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    _save(Qwen3ForCausalLM(config), folder)


def qwen_image(root):
    """Qwen-Image."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    _tokenizer(root / "tokenizer")
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 64, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    _save(Qwen2_5_VLForConditionalGeneration(config), root / "text_encoder")
    transformer = QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=64, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    _save(transformer, root / "transformer")
    _save(AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, dim_mult=[1] * 4), root / "vae")


def z_image(root):
    """Z-Image."""
    from diffusers import AutoencoderKL, ZImageTransformer2DModel

    _tokenizer(root / "tokenizer")
    _qwen3(root / "text_encoder")
    transformer = ZImageTransformer2DModel(
        dim=128, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=64,
        axes_dims=[8, 12, 12], axes_lens=[256, 64, 64],
    )  # fmt: skip
    _save(transformer, root / "transformer")
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=16,
        norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=0.36, shift_factor=0.11,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    _save(vae, root / "vae")


def _wan(root):
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

    _t5_tokenizer(root / "tokenizer")
    config = UMT5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    _save(UMT5EncoderModel(config), root / "text_encoder")
    _save(AutoencoderKLWan(base_dim=8, num_res_blocks=1, dim_mult=[1] * 4), root / "vae")


def _wan_transformer(folder):
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=16, out_channels=16,
        text_dim=64, freq_dim=32, ffn_dim=256, num_layers=2,
    )  # fmt: skip
    _save(transformer, folder)


def wan21(root):
    """Wan 2.1."""
    _wan(root)
    _wan_transformer(root / "transformer")


def wan22(root):
    """Wan 2.2: two transformers, for much noise and for little."""
    wan21(root)
    _wan_transformer(root / "transformer_2")


def _flux2(root, file, kind):
    from extensions_built_in.diffusion_models.flux2.src.autoencoder import AutoEncoder
    from extensions_built_in.diffusion_models.flux2.src.model import Flux2
    from safetensors.torch import save_file

    transformer, vae = flux2_sizes(kind)
    for name, model in ((file, Flux2(transformer)), ("ae", AutoEncoder(vae))):
        state = randomised(model).to(torch.bfloat16).state_dict()
        save_file(state, root / f"{name}.safetensors")


def flux2_klein(root):
    """FLUX.2 klein; the sizes that its classes have built in are those of `flux2_sizes` here."""
    _tokenizer(root / "text_encoder")
    _qwen3(root / "text_encoder", width=32, layers=28)  # it takes what the 27th gives
    _flux2(root, "flux-2-klein-base-4b", "Klein4BParams")


def flux2_dev(root):
    """FLUX.2 dev; likewise."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        PixtralImageProcessor,
        PixtralProcessor,
    )

    folder = root / "text_encoder"
    made = _tokenizer(folder)
    PixtralProcessor(
        image_processor=PixtralImageProcessor(), tokenizer=made, chat_template=TEMPLATE
    ).save_pretrained(folder)
    text = {
        "model_type": "mistral", "vocab_size": VOCABULARY, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 31, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
    }  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=264)
    _save(Mistral3ForConditionalGeneration(config), folder)
    _flux2(root, "flux2-dev", "Flux2Params")


def flux2_sizes(kind):
    """Return small sizes of a FLUX.2's transformer, by its own class, and of the autoencoder."""
    from extensions_built_in.diffusion_models.flux2.src import model
    from extensions_built_in.diffusion_models.flux2.src.autoencoder import AutoEncoderParams

    transformer = getattr(model, kind)(
        context_in_dim=96, hidden_size=128, num_heads=4, depth=1, depth_single_blocks=2,
        axes_dim=[8, 8, 8, 8],
    )  # fmt: skip
    return transformer, AutoEncoderParams(ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1)


def ltx2(root):
    """LTX-2, which makes pictures and sound."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    _gemma_tokenizer(root / "tokenizer")
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    _save(Gemma3ForConditionalGeneration(config), root / "text_encoder")
    transformer = LTX2VideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=4, attention_head_dim=32,
        cross_attention_dim=128, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=4, audio_attention_head_dim=16, audio_cross_attention_dim=64,
        num_layers=2, caption_channels=32,
    )  # fmt: skip
    _save(transformer, root / "transformer")
    connectors = LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=3,
        video_connector_num_attention_heads=4, video_connector_attention_head_dim=8,
        video_connector_num_layers=1, video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4, audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1, audio_connector_num_learnable_registers=None,
    )  # fmt: skip
    _save(connectors, root / "connectors")
    vae = AutoencoderKLLTX2Video(
        latent_channels=16, block_out_channels=(8,), decoder_block_out_channels=(8,),
        layers_per_block=(1,), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
        downsample_type=("spatial",), upsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    _save(vae, root / "vae")
    audio = AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2,
        mel_bins=8,
    )  # fmt: skip
    _save(audio, root / "audio_vae")
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=16, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
    )  # fmt: skip
    _save(vocoder, root / "vocoder")
