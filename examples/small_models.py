r"""Random models of real classes, in small, and data for them.

    python examples/small_models.py out/small
    python examples/llm_lora.py --model out/small/llama --data out/small/texts.jsonl --device cpu \
        --steps 4
    python examples/flux_lora_24gb.py --model out/small/flux --data out/small/pictures \
        --device cpu --steps 4 --side 32 --caption-tokens 8

So the examples run without a card, on the simulated one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


def llama(folder: Path) -> None:
    """Write a language model of two blocks, whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config: Any = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def texts(file: Path) -> None:
    """Write texts of several lengths."""
    sentences = [f"{number} is one more than {number - 1}. " for number in range(1, 17)]
    rows = [{"text": sentence * (1 + at % 4)} for at, sentence in enumerate(sentences)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def flux(folder: Path) -> None:
    """Write a Flux pipeline: a transformer of 2 + 2 blocks, T5, CLIP and a decoder."""
    import transformers
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
    )

    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{sign}</w>" for sign in LETTERS)]
    files = folder.parent / "words"
    files.mkdir(parents=True, exist_ok=True)
    (files / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(words)}))
    (files / "merges.txt").write_text("#version: 0.2\n")
    clip_config: Any = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0)]
    t5_config: Any = T5Config(
        vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    transformer: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    decoder: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        latent_channels=4,  # packed two by two: the 16 of the transformer
        norm_num_groups=8,
        sample_size=32,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    t5_tokenizer: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined, unused-ignore]
    pipeline: Any = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        decoder,
        CLIPTextModel(clip_config),
        CLIPTokenizer(str(files / "vocab.json"), str(files / "merges.txt"), model_max_length=16),
        T5EncoderModel(t5_config),
        t5_tokenizer(vocab=[*pieces, *((sign, -2.0) for sign in LETTERS)], extra_ids=0),
        transformer.bfloat16(),
    )
    pipeline.save_pretrained(folder)


def pictures(folder: Path) -> None:
    """Write three images, one of them with a caption."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for at in range(3):
        Image.new("RGB", (40, 32), (80 * at, 30, 200)).save(folder / f"{at}.png")
    (folder / "1.txt").write_text("green", encoding="utf-8")


def write(folder: Path) -> None:
    """Write all of them."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    llama(folder / "llama")
    texts(folder / "texts.jsonl")
    flux(folder / "flux")
    pictures(folder / "pictures")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "out/small"))
