"""TRL's trainers compute with ``lm_head.weight`` and never call the layer."""

from __future__ import annotations

import models
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from sides import compare, values
from test_trainer import OnDevice, common, stepping
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob


@pytest.fixture(autouse=True)
def in_plain_torch(monkeypatch):
    """TRL's loss folds its tiles as on the host: its kernels want a card."""
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", False)
    monkeypatch.setattr(chunked_logprob, "_MM_OUT_DTYPE", False)


class Sft(OnDevice, SFTConfig):
    pass


class Dpo(OnDevice, DPOConfig):
    pass


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(90))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentence(start, length):
    return " ".join(f"w{(start * 7 + word) % 90}" for word in range(length))


def losses(run):
    found = [torch.tensor(line["loss"]) for line in run.state.log_history if "loss" in line]
    assert len(found) == common()["max_steps"]
    return found


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"bf16": False, "gradient_checkpointing": False}, ()),
        ({"bf16": True, "gradient_checkpointing": True}, ()),
        ({"bf16": False, "gradient_checkpointing": True}, ("lm_head",)),
    ],
    ids=["all-fp32", "all-bf16-checkpointing", "without-lm_head-checkpointing"],
)
def test_sft(tmp_path, options, ignored):
    def client(side):
        model = side.attach(models.llama(), at_least=20, ignore_modules=ignored)
        run = stepping(side, SFTTrainer)(
            model,
            args=Sft(output_dir=str(tmp_path), **common(), **options),
            train_dataset=Dataset.from_dict({"text": [sentence(n, 8) for n in range(12)]}),
            processing_class=tokenizer(),
        )
        run.train()
        for manager in side.managers:
            found = any(name.startswith("lm_head") for name in manager.resident)
            assert found == bool(ignored), manager.resident
        return [losses(run), values(model)]

    compare(client, by_library=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_sft_of_adapters(tmp_path, when):
    """The trainer puts the adapters on; attach comes before it or after it."""

    def client(side):
        model = models.llama()
        if when == "before":
            side.attach(model, at_least=20, ignore_modules=["lm_head"])
        run = stepping(side, SFTTrainer)(
            model,
            args=Sft(output_dir=str(tmp_path), bf16=False, **common()),
            train_dataset=Dataset.from_dict({"text": [sentence(n, 8) for n in range(12)]}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        )
        if when == "after":
            ignored = [name for name, _ in run.model.named_modules() if name.endswith("lm_head")]
            side.attach(run.model, at_least=20, ignore_modules=ignored)
        run.train()
        return [losses(run), values(run.model)]

    compare(client, by_library=True)


def test_dpo_with_an_attached_reference(tmp_path):
    def client(side):
        model, reference = models.llama(), models.llama().requires_grad_(False)
        for one in (model, reference):
            side.attach(one, at_least=20, ignore_modules=["lm_head"])
        rows = {
            "prompt": [sentence(n, 4) for n in range(8)],
            "chosen": [sentence(n + 1, 4) for n in range(8)],
            "rejected": [sentence(n + 2, 5) for n in range(8)],
        }
        run = stepping(side, DPOTrainer)(
            model,
            ref_model=reference,
            args=Dpo(output_dir=str(tmp_path), bf16=False, **common()),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
        run.train()
        return [losses(run), values(model)]

    compare(client, by_library=True)
