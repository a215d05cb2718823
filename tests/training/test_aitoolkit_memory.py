"""Memory of the drop-in: free returns it to the system, and many models leave no trace."""

from __future__ import annotations

import sys

import pytest

START = """
import gc, os
import torch
from torch import nn
from oracle_offload.engine import simulator
from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.engine.engines import open_states

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def model_of(mib):
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(mib)])

def use(model):
    MemoryManager.attach(model, torch.device("cpu"))
    assert len(model._memory_manager.layers) == len(model)
    with torch.no_grad():
        model(torch.ones(1, 512))

small = model_of(2)
use(small)  # what the first attach loads stays loaded
MemoryManager.free(small)
"""


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "never attached"])
def test_free_returns_the_weights_to_the_system(forks, attached):
    said = forks.print(f"""{START}
before = rss()
model = model_of(256)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.01)
held = p  # by an optimizer, say
if {attached}:
    use(model)
full = rss()
moved = simulator.stats().h2d_bytes
MemoryManager.free(model)
MemoryManager.release_cached_memory()
left = rss()
assert full - before > 240 << 20, (before, full)
assert moved > (256 << 20 if {attached} else 0)
assert full - left >= 0.95 * (full - before) - held.nbytes, (before, full, left)
assert not open_states() and (held == 0.01).all()
print("returned")
""")
    assert said == "returned\n"


def test_fifty_models_leave_no_trace(forks):
    said = forks.print(
        START
        + """
def descriptors():
    return len(os.listdir("/proc/self/fd"))

seen = []
for cycle in range(50):
    model = model_of(16)
    use(model)
    if cycle % 2:
        MemoryManager.free(model)
    else:
        MemoryManager.detach(model)
    del model
    MemoryManager.release_cached_memory()
    live = simulator.live()
    assert not (live.streams or live.events or live.registrations or live.adopted_bytes)
    seen.append((rss(), descriptors()))
assert simulator.stats().h2d_bytes >= 50 * 16 << 20
early, late = max(seen[5:10])[0], max(seen[45:])[0]
assert late - early < 8 << 20, (early, late)
assert len({count for _, count in seen[5:]}) == 1
print("no trace")
"""
    )
    assert said == "no trace\n"


def test_ten_cycles_of_resume_train_as_one_run(forks, tmp_path):
    """Start, attach, resume, three steps, save: the losses are those of the run without a break."""
    said = forks.print(f"""{START}
path = {str(tmp_path / "state.pt")!r}

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = model_of(3).requires_grad_(False)
        self.lora = nn.Sequential(nn.Linear(512, 4, bias=False), nn.Linear(4, 512, bias=False))
    def forward(self, x):
        return self.base(x) + self.lora(x)

class Process:
    # It knows where checkpoints go; the loaders that it calls do not.
    def __init__(self):
        self.save_root = os.path.dirname(path)

    def run(self):
        return start(True)

def start(managed):
    torch.manual_seed(0)
    model = Adapted()
    if managed:
        MemoryManager.attach(model, torch.device("cpu"), ignore_modules=[model.lora])
        assert len(model._memory_manager.layers) == 3
    return model, torch.optim.AdamW(model.lora.parameters(), lr=1e-2)

def step(model, optimizer, number):
    torch.manual_seed(number)
    before = simulator.finish()
    loss = model(torch.randn(2, 512).requires_grad_()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(simulator.finish() - before)
    return loss.item()

model, optimizer = start(False)
seconds = []
expected = [step(model, optimizer, n) for n in range(30)]
model, optimizer = start(True)
for n in range(6):
    step(model, optimizer, n)
steady = seconds[-1]
MemoryManager.free(model)
found = []
for cycle in range(10):
    model, optimizer = Process().run()
    if cycle:
        state = torch.load(path)
        model.lora.load_state_dict(state["lora"])
        optimizer.load_state_dict(state["optimizer"])
    before = simulator.stats().h2d_bytes
    found += [step(model, optimizer, n) for n in range(3 * cycle, 3 * cycle + 3)]
    assert simulator.stats().h2d_bytes - before >= 3 << 20
    assert max(seconds[-2:]) <= 1.05 * steady, (cycle, seconds[-3:], steady)
    torch.save({{"lora": model.lora.state_dict(), "optimizer": optimizer.state_dict()}}, path)
    MemoryManager.free(model)
assert found == expected, (found, expected)
orders = [name for name in os.listdir(os.path.dirname(path)) if "order" in name]
assert len(orders) == 1, orders
print("the same")
""")
    assert said == "the same\n"
