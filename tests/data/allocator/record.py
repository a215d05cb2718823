"""Record the sequences of this folder: what torch's CPU allocator gave out in each step of a run.

``python tests/data/allocator/record.py`` trains a small Transformer three times and writes, for
every step, the bytes that were held at its end and at most during it (by the allocator's own
events, which the profiler reports), and what another process is meant to hold meanwhile:

- spike: one batch in nine is four times as long.
- leak: the training keeps the output of every step.
- spill: another process takes more and more of the device, as a browser or a game does on Windows.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

STEPS = 60


def sequence(kind: str) -> list[dict[str, int]]:
    """Train and return a row for each step."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3)
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[torch.Tensor] = []
    rows = []
    held = sum(tensor.nbytes for tensor in model.parameters())
    for step in range(STEPS):
        length = 256 if kind == "spike" and step % 9 == 8 else 64
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            output = model(torch.randn(4, length, 64))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if kind == "leak":
                kept.append(output.detach().clone())
            del output
        peak = held
        events = profiled.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        others = 0 if kind != "spill" else min(step, 40) * 65536
        rows.append({"held_bytes": held, "peak_bytes": peak, "others_bytes": others})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in ("spike", "leak", "spill"):
        text = "".join(json.dumps(row) + "\n" for row in sequence(kind))
        Path(__file__).with_name(f"{kind}.jsonl").write_text(text)
