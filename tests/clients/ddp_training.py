"""One rank of `test_ddp.py`: train resident and managed under DDP, and compare to the last bit.

python ddp_training.py RANK RENDEZVOUS_FILE
"""

from __future__ import annotations

import contextlib
import functools
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from sides import compare, values  # noqa: E402, I001 - puts the helpers of tests/training on the path
import models  # noqa: E402

from oracle_offload.engine import simulator  # noqa: E402

WORLD = 2


def client(side, rank, lora):
    model = models.llama().train()
    if lora:
        models.lora(model, ["q_proj", "v_proj"])
    side.attach(model, at_least=20)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(rank)  # each rank has its own rows
    losses = []
    for number in range(4):
        ids = torch.randint(0, 100, (2, 9), generator=generator)
        accumulates = number % 2 == 0
        with side.step(), parallel.no_sync() if accumulates else contextlib.nullcontext():
            loss = parallel(input_ids=ids, labels=ids).loss
            loss.backward()
        losses.append(loss.detach())
        if not accumulates:
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [losses, values(model)]


def main(rank, rendezvous):
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", timedelta(seconds=60), world_size=WORLD, rank=rank
    )
    for lora in (False, True):
        _, weights = compare(functools.partial(client, rank=rank, lora=lora))
        everywhere = [torch.zeros(1) for _ in range(WORLD)]
        dist.all_gather(everywhere, sum(value.sum() for value in weights.values()).reshape(1))
        assert torch.equal(*everywhere), "the ranks drifted apart"
    assert not simulator.reports(), simulator.reports()[:3]
    dist.destroy_process_group()
    print(f"rank {rank}: equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
