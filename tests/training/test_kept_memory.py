"""What the host holds where units stay on the device, by the system's own count.

On the device type "simgpu", whose memory is put into shared pages here: the system counts these
apart, so that what it calls anonymous is the host's alone.
"""

from __future__ import annotations

import sys

import pytest
import simgpu

START = """
import gc, mmap, os, threading, time
import torch
from torch import nn
import simgpu

UNIT = 4 << 20
COUNT = 64

def shared(make):
    def allocate(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.device.type != "simgpu" or made.nbytes < UNIT // 4:
            return made
        pages = torch.frombuffer(mmap.mmap(-1, made.untyped_storage().nbytes()), dtype=made.dtype)
        there = pages.as_strided(made.shape, made.stride())
        there.copy_(simgpu.on_host(made))
        return simgpu.on_device(there)
    return allocate

for name in ("empty.memory_format", "empty_strided", "_to_copy"):
    simgpu._OWN[name] = shared(simgpu._OWN[name])
simgpu.install()

import oracle_offload
from oracle_offload.model import masters
from oracle_offload.aitoolkit import MemoryManager

masters.PIECE_BYTES = 64 << 20  # more than both rings, as of real models

def anonymous():
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found["RssAnon"].split()[0]) << 10, int(found["RssShmem"].split()[0]) << 10

def model_of(count):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)])
    return model.requires_grad_(False)

class Peak(threading.Thread):
    def run(self):
        self.bytes, self.on = 0, True
        while self.on:
            self.bytes = max(self.bytes, anonymous()[0])
            time.sleep(0.001)

def settle():
    gc.collect()
    masters.trim_heap()

warm = model_of(2)
MemoryManager.attach(warm, "simgpu", offload_percent=0.5)
warm(torch.ones(1, 1024, device="simgpu"))
MemoryManager.detach(warm)
del warm
settle()
"""


pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.skipif(not simgpu.is_available(), reason="this torch knows no such device type"),
]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_host_holds_no_more_than_the_share_that_is_offloaded(forks, share):
    said = forks.print(f"""{START}
before, before_device = anonymous()
model = model_of(COUNT)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.001)
weights = COUNT * UNIT
full = anonymous()[0]
assert full - before > 0.98 * weights, (before, full)
peak = Peak()
peak.start()
while not hasattr(peak, "on"):
    pass
MemoryManager.attach(model, "simgpu", offload_percent={share})
settle()
peak.on = False
peak.join()
now, device = anonymous()
manager = model._memory_manager
assert len(manager.layers) == COUNT * {share}
assert now - before <= {share} * weights * 1.02 + UNIT, (before, now, weights)
assert peak.bytes - before <= weights + 2 * masters.PIECE_BYTES, (before, peak.bytes)
on_device = (1 - {share}) * weights
assert on_device <= device - before_device + 2 * UNIT, (before_device, device)
y = model(torch.full((1, 1024), 0.001, device="simgpu"))
expected = torch.full((1, 1024), 0.001)
for _ in range(COUNT):
    expected = expected @ torch.full((1024, 1024), 0.001).t()
assert torch.equal(y.cpu(), expected)
stats = manager.state.engine.stats()
assert stats["h2d_bytes"] >= {share} * weights and stats["locked_bytes"] <= {share} * weights * 1.02
MemoryManager.detach(model)
del model, y, manager, p
settle()
left, device = anonymous()
assert left - before < 8 << 20 and device - before_device < 8 << 20, (before, left, device)
print("no more")
""")
    assert said == "no more\n"
