"""One contender of bench_rivals.py in a process of its own: LoRA steps below a cap, one JSON line.

    python benchmarks/contender.py ours --cap-gib 24 --tokens 4608

The work is the same for all: blocks in the shape of Flux's single ones, frozen, bfloat16, each
checkpointed (non-reentrant) in its own forward, one LoRA per block outside of it, AdamW. Weights
come from one seed on the device, where every contender takes them over; the cap holds from then
on. What a step needs in addition to weights is measured first, with one block; what the cap leaves
is for weights, and each contender has to offload the least that keeps below that
(docs/gpu-check.md).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import bench_step  # noqa: E402 - the folder must be findable first
import common  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

LEARNING_RATE = 1e-2  # so that a few steps show in the losses
WARM_UP_STEPS = 2
LEAST_STEPS, MOST_STEPS = 3, 12
MARGIN = 0.03  # of the cap: what the allocator cannot use, for its pieces have the wrong size
RANK = 4


class Lora(nn.Module):
    """A low-rank addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(width, RANK) / width**0.5)
        self.up = nn.Parameter(torch.zeros(RANK, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added."""
        added: Tensor = x @ self.down @ self.up
        return added


class Block(nn.Module):
    """Flux's single block: modulation, queries, keys, values and MLP in one layer, one way out."""

    lora: Lora
    checkpointed = True

    def __init__(self, width: int, lora: Lora) -> None:
        super().__init__()
        self.width, self.heads = width, max(1, width // 128)
        self.modulation = nn.Linear(width, 3 * width)
        self.enter = nn.Linear(width, 7 * width)
        self.leave = nn.Linear(5 * width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        # Not a part of the block: a contender that moves blocks leaves adapters where they train.
        object.__setattr__(self, "lora", lora)

    def compute(self, x: Tensor, vector: Tensor) -> Tensor:
        """Return the block's output for tokens and what modulates them."""
        scale, gate, shift = self.modulation(F.silu(vector)).chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        parts: list[Tensor] = self.enter(y).split(
            [self.width, self.width, self.width, 4 * self.width], -1
        )
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (parts[0], parts[1], parts[2] + self.lora(y))
        )
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out = self.leave(torch.cat([seen, F.gelu(parts[3], approximate="tanh")], -1))
        added: Tensor = x + gate * out
        return added

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        """Compute; the backward computes again."""
        if not self.checkpointed:
            return self.compute(x, vector)
        found: Tensor = checkpoint(self.compute, x, vector, use_reentrant=False)
        return found


class Model(nn.Module):
    """Blocks in a row; `before` and `after` are called with each (musubi-tuner's calls)."""

    def __init__(self, adapters: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, lora) for lora in adapters)  # type: ignore[arg-type]
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int], None] = lambda number: None

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        """Return the last block's output."""
        for number, block in enumerate(self.blocks):
            self.before(number)
            x = block(x, vector)
            self.after(number)
        return x


def loss_of(output: Tensor) -> Tensor:
    """Return the loss."""
    return output.float().square().mean()


@dataclass
class Work:
    """A training before a contender has taken it over, and how its steps are taken."""

    model: Model
    adapters: nn.ModuleList
    x: Tensor
    vector: Tensor
    device: str
    room_bytes: int  # for weights
    optimizer: Any = None
    before_optimizer: Callable[[], None] = lambda: None
    step: Callable[[], Tensor] = field(init=False)
    manager: Any = None

    def __post_init__(self) -> None:
        self.step = self.ordinary_step
        self.optimizer = torch.optim.AdamW(list(self.adapters.parameters()), lr=LEARNING_RATE)

    def ordinary_step(self) -> Tensor:
        """Forward, backward, optimizer; the loss stays on the device."""
        loss = loss_of(self.model(self.x, self.vector))
        loss.backward()
        self.before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @property
    def where(self) -> torch.device:
        """The device of the tensors, with its number."""
        device = torch.device(self.device)
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device

    @property
    def blocks(self) -> list[Any]:
        """The blocks."""
        return list(self.model.blocks)

    @property
    def block_bytes(self) -> int:
        """The weights of one block."""
        return sum(p.numel() * p.element_size() for p in self.blocks[0].parameters())


def spread(count: int, among: int) -> set[int]:
    """Return `count` numbers below `among`, at even distances."""
    return {(2 * i + 1) * among // (2 * count) for i in range(count)}


def resident(work: Work) -> str:
    """Leave everything on the device."""
    return "no cap"


def ours(work: Work) -> str:
    """Attach with a budget in bytes."""
    import oracle_offload

    work.manager = oracle_offload.attach(work.model, work.device, vram_budget=work.room_bytes)
    return f"vram_budget={work.room_bytes}"


def aitoolkit(work: Work) -> str:
    """AI-Toolkit: its manager, then ``.to``, and its wait before the optimizer."""
    toolkit = importlib.import_module("toolkit.memory_management")
    depth = importlib.import_module("toolkit.memory_management.manager_modules").PIPELINE_DEPTH
    layers = [m for m in work.model.modules() if isinstance(m, nn.Linear)]
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
    # A ring for the forward and one for the backward; a slot is replaced after the next is made.
    rings = 2 * (depth + 1) * sum(sizes) // len(sizes)
    seed = 0
    share = least_share(sizes, work.room_bytes - rings, seed)
    random.seed(seed)
    toolkit.MemoryManager.attach(work.model, work.where, offload_percent=share)
    work.model.to(work.where)
    work.before_optimizer = toolkit.sync_grad_transfers
    return f"offload_percent={share:.4f}, depth {depth}"


def least_share(sizes: Sequence[int], room: int, seed: int) -> float:
    """Return AI-Toolkit's smallest ``offload_percent`` with which the layers that stay fit `room`.

    It draws for each layer, in order, and leaves on the device those above the share.
    """
    dice = random.Random(seed)
    stay = 0
    for draw, size in sorted(((dice.random(), size) for size in sizes), reverse=True):
        stay += size
        if stay > room:
            return draw
    return 0.0


def musubi(work: Work) -> str:
    """musubi-tuner: block swap from host to device alone, locked, with its ring of two."""
    offloading = importlib.import_module("musubi_tuner.modules.custom_offloading_utils")
    blocks = work.blocks
    config = offloading.BlockSwapConfig(
        device=work.where,
        supports_backward=True,
        use_pinned_memory=True,
        h2d_only=True,
        ring_size=2,
    )
    fit = work.room_bytes // work.block_bytes - config.ring_size
    swapped = min(len(blocks), max(1, len(blocks) - fit))
    offloader = offloading.create_offloader("single", blocks, len(blocks), swapped, config)
    offloader.prepare_block_devices_before_forward(blocks)
    work.model.before = offloader.wait_for_block
    work.model.after = lambda number: offloader.submit_move_blocks_forward(blocks, number)
    return f"blocks_to_swap={swapped}, h2d_only, pinned, ring_size=2"


def fsdp2(work: Work) -> str:
    """FSDP2: one group per block, the offloaded ones at even distances; adapters are outside."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "nccl" if work.where.type == "cuda" else "gloo"
    store: Any = vars(dist)["HashStore"]()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = init_device_mesh(work.where.type, (1,))
    # One block is gathered, from copies of its weights that take as much at most.
    fit = work.room_bytes // work.block_bytes - 2
    count = min(len(work.blocks), max(1, len(work.blocks) - fit))
    chosen = spread(count, len(work.blocks))
    policy = CPUOffloadPolicy(pin_memory=work.where.type == "cuda")
    for number in chosen:
        fully_shard(work.blocks[number], mesh=mesh, offload_policy=policy)
    rest = {
        parameter
        for number, block in enumerate(work.blocks)
        if number not in chosen
        for parameter in block.parameters()
    }
    fully_shard(work.model, mesh=mesh, offload_policy=policy, ignored_params=rest)
    return f"CPUOffloadPolicy for {count} of {len(work.blocks)} blocks"


class Chunk(nn.Module):
    """A block as RamTorch calls it: the frozen weights are buffers, for it trains parameters."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        lora = block.lora
        del block.__dict__["lora"]
        block.lora = lora  # a part of it now: RamTorch's gradients are those of its chunks
        block.checkpointed = False  # it checkpoints chunks
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                for name, parameter in list(layer.named_parameters(recurse=False)):
                    delattr(layer, name)
                    layer.register_buffer(name, parameter.data)
        self.block = block

    def forward(self, x: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next chunk's arguments."""
        return self.block(x, vector), vector


def ramtorch(work: Work) -> str:
    """RamTorch: `OffloadModel`, its window of two, and pinned chunks as far as they fit."""
    library = importlib.import_module("ramtorch.offload")
    window = 2
    # Loads do not wait for the computation: one chunk more than the window is being filled.
    fit = work.room_bytes // work.block_bytes - window - 1
    pin = min(len(work.blocks) - 1, max(0, fit))
    chunks = [Chunk(block) for block in work.blocks]
    model = library.OffloadModel(
        chunks, device=work.device, window=window, pin=pin, keep_activations="checkpoint"
    )
    work.optimizer = torch.optim.AdamW(list(model.parameters()), lr=LEARNING_RATE, fused=True)

    def step() -> Tensor:
        result = model.step(
            (work.x, work.vector), loss_fn=lambda output, target: loss_of(output[0])
        )
        model.flush_grads()
        work.optimizer.step()
        work.optimizer.zero_grad()
        loss: Tensor = result.loss
        return loss

    work.step = step
    return f"window=2, pin={pin}, keep_activations='checkpoint'"


CONTENDERS = {
    "ours": ours,
    "aitoolkit": aitoolkit,
    "musubi": musubi,
    "resident": resident,
    "fsdp2": fsdp2,
    "ramtorch": ramtorch,
}


def build(blocks: int, width: int, tokens: int, device: str) -> Work:
    """Return the training, all of it on the device, from one seed."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            adapters = nn.ModuleList(Lora(width) for _ in range(blocks))
            model = Model(adapters, width).requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, width, generator=generator).to(device, torch.bfloat16)
    vector = torch.randn(1, 1, width, generator=generator).to(device, torch.bfloat16)
    return Work(model, adapters, x, vector, device, 0)


def beside_weights(work: Work) -> int:
    """Return what a step needs except weights: every block's input, and one block's work."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = work.x.detach().requires_grad_()
    loss_of(work.blocks[0](x, work.vector)).backward()
    torch.cuda.synchronize()
    one = torch.cuda.max_memory_allocated() - before
    for parameter in work.adapters.parameters():
        parameter.grad = None
    return one + len(work.blocks) * x.numel() * x.element_size()


def cap(arguments: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Find the room that the cap leaves for weights."""
    half = len(work.blocks) * work.block_bytes // 2
    if common.is_simulated(arguments.device):
        work.room_bytes = half
        return {}
    beside = beside_weights(work)
    cap_bytes = int(arguments.cap_gib * common.GIB)
    work.room_bytes = int((1 - MARGIN) * cap_bytes - beside - arguments.less_gib * common.GIB)
    if common.is_small(arguments.device):  # all would fit below the cap
        work.room_bytes = half
    if work.room_bytes < 3 * work.block_bytes:
        raise ValueError(f"{cap_bytes} bytes leave {work.room_bytes} for weights")
    return {"cap_bytes": cap_bytes, "beside_weights_bytes": beside}


def begin_cap(cap_bytes: int) -> None:
    """Let torch have no more from here on; what attaching took and gave back does not count."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total))


def measure(work: Work, seconds: float) -> dict[str, Any]:
    """Warm up, then take as many steps as the seconds allow."""
    cuda = not common.is_simulated(work.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(work.step())

    for _ in range(WARM_UP_STEPS):
        step()
    common.synchronize(work.device)
    engine = work.manager.state.engine if work.manager else None
    before = engine.stats(work.manager.attachment.model) if engine else None
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if cuda else 0
    began, times = time.time(), list[float]()
    least = LEAST_STEPS if cuda else 1
    most = MOST_STEPS if cuda else 1  # virtual times do not scatter
    while len(times) < least or (len(times) < most and time.time() - began < seconds):
        times.append(training.time_step(step, work.device))
    row: dict[str, Any] = {
        "step_s": median(times),
        "least_step_s": min(times),
        "steps_count": len(times),
        "epoch_s": [round(began, 2), round(time.time(), 2)],
        "losses": [float(loss) for loss in losses[:4]],
    }
    if engine and before:
        from bench_step import per_step

        row |= per_step(before, engine.stats(work.manager.attachment.model), len(times))
    if cuda:
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        row |= {
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            "device_used_bytes": total - free,  # with the context, and other processes
            "ooms_count": stats.get("num_ooms", 0),
            "alloc_retries_count": stats.get("num_alloc_retries", 0) - retries,
        }
        row["locked_bytes"] = row.get("locked_bytes", 0) + locked_by_torch()
    return row


def locked_by_torch() -> int:
    """Return the bytes that torch's own allocator has page-locked, as rounded by it."""
    if not hasattr(torch.cuda, "host_memory_stats"):  # torch 2.8
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def profiled(work: Work) -> dict[str, Any]:
    """Take one more step under torch's profiler: what is copied, and when kernels run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # the first one takes long to begin
        torch.zeros(1, device=work.device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return {**device_figures(events), "profiled_step_s": took} if events else {}


def device_figures(events: Sequence[Any]) -> dict[str, Any]:
    """Return the copied bytes and the seconds with kernels, and with copies, of a Chrome trace."""
    copied = {"HtoD": 0, "DtoH": 0}
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "HtoD": []}
    for event in events:
        if event.get("ph") != "X":
            continue
        begin = float(event["ts"])
        span = begin, begin + float(event["dur"])
        if event.get("cat") == "kernel":
            spans["kernel"].append(span)
        elif event.get("cat") == "gpu_memcpy":
            for way in copied:
                if way in event["name"]:
                    copied[way] += int(event.get("args", {}).get("bytes", 0))
                    if way == "HtoD":
                        spans[way].append(span)
    busy_s, copying_s = (1e-6 * covered(spans[kind]) for kind in ("kernel", "HtoD"))
    found: dict[str, Any] = {
        "profiled_h2d_bytes": copied["HtoD"],
        "profiled_d2h_bytes": copied["DtoH"],
        "kernels_s": busy_s,
        "copying_s": copying_s,
    }
    if copying_s:
        found["copy_rate_gbps"] = 1e-9 * copied["HtoD"] / copying_s
    return found


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def contend(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, hand over, measure; return the row."""
    cuda = not common.is_simulated(arguments.device)
    weights = 2 * arguments.blocks * (15 * arguments.width + 11) * arguments.width
    resident_too = arguments.contender == "resident"
    why = common.does_not_fit(
        arguments.device, 0 if resident_too else 2.2 * weights, 1.1 * weights + 4 * common.GIB
    )
    if why and cuda:
        return {"skipped": f"not run: {why}", "weights_bytes": weights}
    began = time.perf_counter()
    work = build(arguments.blocks, arguments.width, arguments.tokens, arguments.device)
    common.synchronize(arguments.device)
    built = time.perf_counter()
    row: dict[str, Any] = {"weights_bytes": len(work.blocks) * work.block_bytes}
    row |= cap(arguments, work)
    fitted = time.perf_counter()
    row["room_bytes"] = work.room_bytes
    row["setting"] = CONTENDERS[arguments.contender](work)
    common.synchronize(arguments.device)
    row |= {"build_s": built - began, "attach_s": time.perf_counter() - fitted}
    if cuda and not resident_too:
        begin_cap(row["cap_bytes"])
    row |= measure(work, arguments.seconds)
    row["rss_peak_bytes"] = rss_peak_bytes()
    if cuda:
        print(json.dumps(row), flush=True)  # a profiler may end the process
        try:
            row |= profiled(work)
        except Exception as error:  # the other figures are worth keeping
            row["profile_error"] = f"{type(error).__name__}: {error}"
        if "kernels_s" in row:
            row["busy_ratio"] = min(1.0, row["kernels_s"] / row["profiled_step_s"])
    # What the engine counts of ours; of the others what the profiler saw.
    if "h2d_bytes" not in row and "profiled_h2d_bytes" in row:
        row["h2d_bytes"] = row["profiled_h2d_bytes"]
    return row


def rss_peak_bytes() -> int:
    """Return the most host memory that this process has had resident."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Print the row, whatever happens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("--device", default="cuda", help="cpu: the simulated one")
    parser.add_argument("--rivals", type=Path, default=common.ROOT / ".rivals")
    parser.add_argument("--cap-gib", type=float, default=24.0)
    parser.add_argument("--less-gib", type=float, default=0.0, help="left free in addition")
    parser.add_argument("--blocks", type=int, default=84)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed steps")
    arguments = parser.parse_args(argv)
    sys.path[:0] = [str(arguments.rivals), *map(str, sorted(arguments.rivals.glob("*.zip")))]
    simulated = common.is_simulated(arguments.device)
    held = contextlib.ExitStack()
    try:
        if simulated:
            held.enter_context(bench_step.clock(arguments.device))
        row = contend(arguments)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}", "out_of_memory": True}
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(row), flush=True)
    sys.stderr.flush()
    if not simulated:
        os._exit(0)  # a worker thread may be waiting, and unlocking is the lock part's figure
    gc.collect()  # what contended is attached still
    held.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
