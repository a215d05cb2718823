"""Trainings and saves that are killed, in forked processes.

`python checkpoint_kills.py WHAT DIR [KILLS]` prints one line of JSON. A program of its own, because
a process forks well only before anything has started threads in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["ORACLE_OFFLOAD_HEARTBEAT"] = "0"

import torch
from torch import nn

import oracle_offload

torch.set_num_threads(1)
CALLS = ("open", "write", "fsync", "replace", "close")
STEPS = 24


class Data:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        self.position = 0

    def next(self):
        self.position += 1
        return torch.randn(4, 8, generator=self.generator) * (1 + self.position / 10)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def make(path, every=3):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1).requires_grad_(False)
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    data = Data()
    checkpoint = oracle_offload.train.Checkpoint(
        path,
        model,
        optimizer=optimizer,
        every=every,
        generators=[data.generator],
        scheduler=scheduler,
        data=data,
    )
    return model, optimizer, scheduler, data, checkpoint


def train(path, managed, kill_at=None):
    """Train to the end, or be killed at a moment of a step."""
    model, optimizer, scheduler, data, checkpoint = make(path)
    if managed:
        oracle_offload.attach(model, "cpu")
    torch.manual_seed(1)
    random.seed(1)
    for step in range((checkpoint.load() or 0) + 1, STEPS + 1):
        if kill_at == (step, "forward"):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(data.next() + random.random()).square().mean()
        loss.backward()
        if kill_at == (step, "backward"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpoint.after_step(step)
    return model, optimizer


def forked(call):
    """Run `call` in a child; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def save_killed_at(path, number, half):
    """Save step 2, and be killed at a call, before it or with half of its bytes written."""
    count = 0
    honest = {name: getattr(os, name) for name in CALLS}

    def counted(name):
        def call(*args):
            nonlocal count
            count += 1
            if count == number:
                if half and name == "write":
                    honest["write"](args[0], args[1][: len(args[1]) // 2])
                elif half:
                    honest[name](*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return honest[name](*args)

        return call

    model, *_, checkpoint = make(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    for name in CALLS:
        setattr(os, name, counted(name))
    checkpoint.save(2)


def kills(folder):
    path = folder / "run.pt"
    model, *_, checkpoint = make(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    checkpoint.save(1)
    old = path.read_bytes()
    found = {1: 0, 2: 0}
    for half in (False, True):
        number = 0
        while True:
            number += 1
            path.write_bytes(old)
            killed = forked(lambda number=number, half=half: save_killed_at(path, number, half))
            if not killed:
                break
            model, *_, checkpoint = make(path)
            step = checkpoint.load()
            assert all(bool((p == step).all()) for p in model.parameters() if p.requires_grad)
            found[step] += 1
    return {"old": found[1], "new": found[2]}


def cycles(folder, kills="10"):
    """Kill a managed training so many times, and compare its end with one that ran through."""
    kill_at = [
        (step, ("forward", "backward")[step % 2]) for step in (5, 8, 2, 3, 9, 12, 14, 17, 19, 23)
    ]
    kill_at = sorted(kill_at[: int(kills)])
    killed = sum(forked(lambda at=at: train(folder / "run.pt", True, at)) for at in kill_at)
    model, optimizer = train(folder / "run.pt", True)
    other, its = train(folder / "other.pt", True)
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    states = zip(optimizer.state.values(), its.state.values(), strict=True)
    same = all(torch.equal(one, two) for one, two in pairs) and all(
        torch.equal(one[key], two[key]) for one, two in states for key in one
    )
    for each in (model, other):
        oracle_offload.MemoryManager.detach(each)
    return {"killed": killed, "same": same}


if __name__ == "__main__":
    what, folder, *more = sys.argv[1:]
    print(json.dumps({"kills": kills, "cycles": cycles}[what](Path(folder), *more)))
