r"""A LoRA of a language model on several GPUs, of one machine or more: one host copy on each.

    torchrun --nproc-per-node 2 examples/several_gpus.py --model ./llama --data texts.jsonl

    # two machines, the same on both; HOST is one of them
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/several_gpus.py --model ./llama --data texts.jsonl

The ranks of one machine read the weights from one copy in its memory, each over its own GPU's link.
Between machines only the gradients of the adapters travel. Without a GPU: ``--device cpu``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import texts
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oracle_offload


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="a folder of save_pretrained")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of texts, or a folder")
    parser.add_argument("--output", type=Path, default=Path("run"), help="for the adapters (run)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for the simulated device")
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer (100)")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (16)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(1e-3)")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a text (512)")
    parser.add_argument("--offload-percent", type=float, default=0.9, help="see attach (0.9)")
    return parser.parse_args(given)


def adapted(model: Any, rank: int) -> Any:
    """Return the model with adapters, which begin alike on all ranks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    manager = model._memory_manager
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    manager.settle()  # adapters to the device, before an optimizer sees them
    return model.train()


def train(args: argparse.Namespace, device: torch.device) -> str:
    """Train, and return what this rank has to say of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rank, world = dist.get_rank(), dist.get_world_size()
    model = adapted(
        oracle_offload.from_pretrained(
            AutoModelForCausalLM,
            args.model,
            device,
            share="node",
            offload_percent=args.offload_percent,
        ),
        args.rank,
    )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    parallel = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    rows = [tokenizer.encode(text)[: args.max_length] for text in texts.read(args.data)]
    for step in range(args.steps):
        row = rows[(step * world + rank) % len(rows)]  # each rank has its own texts
        tokens = torch.tensor([row], device=device)
        loss = parallel(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        model.save_pretrained(args.output)
    usage = oracle_offload.memory_summary().devices[0].models[0]
    content = b"".join(p.detach().cpu().numpy().tobytes() for p in trained)
    return (
        f"rank {rank} of {world}: {usage.shared_bytes / 2**20:.2f} MiB of weights, in one copy for "
        f"{usage.shared_by} ranks; adapters {hashlib.sha256(content).hexdigest()[:12]}"
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run as one rank of a job."""
    args = parse(given)
    if args.device == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    try:
        print(train(args, device), flush=True)
        dist.barrier()  # no rank ends while others still read
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
