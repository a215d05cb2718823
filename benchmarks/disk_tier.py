"""A model that is larger than memory, trained from its files: ours, mmap, and torch's own mmap.

    python benchmarks/disk_tier.py                       # 0.5 GiB, on the simulated device
    python benchmarks/disk_tier.py --gib 6 --page        # the whole proof, into docs/from-disk.md
    python benchmarks/disk_tier.py mmap torch --gib 2    # some contenders alone

Frozen Linear layers in bf16, each with a LoRA and checkpointed; the LoRA trains. Each contender is
a process of its own, in a control group whose memory is limited where this machine lets us: to the
RAM and the arena that ours is given, and a GiB for torch. Its files are dropped from the page cache
before it begins. `resident` has all weights in memory, without a limit: its bits are what the
others are compared with. `mmap` has weights in the mapped safetensors file and brings them, layer
by layer, by ``.to(device)``; `torch` does so with ``torch.load(mmap=True)``. On the simulated
device that is a copy within the host's memory.

Said of each: seconds of steps, bytes that were read from the disk (/proc/self/io), the most memory
that the process had and what of it was no file's in the end (/proc/self/status), what of the files
the page cache has in the end (mincore), and whether losses and LoRA have the resident's bits. The
exit code is 3 where bits differ, where ours has more memory than it was given and a GiB, or leaves
its files in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

from common import GIB, ROOT  # noqa: E402 - the folder must be findable first

PAGE = ROOT / "docs" / "from-disk.md"
BEGIN, END = "<!-- tier: python benchmarks/disk_tier.py --page -->", "<!-- end of tier -->"
CONTENDERS = ("resident", "mmap", "torch", "ours")
SAFETENSORS, PICKLED = "model.safetensors", "model.pt"
RANK, ROWS, SEED = 4, 16, 0
TORCH_BYTES = GIB  # of a process that has torch, its libraries included
MOST_CACHED = 0.05  # of the files, for ours


# ---- one contender, in a process of its own ----


def layers_of(nbytes: int, width: int) -> int:
    """Return how many layers have so many bytes."""
    return max(1, nbytes // (2 * width * width))


def base_class() -> Any:
    """Return the class of the frozen part; torch is imported here."""
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    class Base(nn.Module):
        """Layers, each with a LoRA that is given to `forward`."""

        def __init__(self, layers: Sequence[nn.Module]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor, adapters: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
            """Return the output of the last layer."""

            def block(layer: nn.Module, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
                added: Tensor = layer(x) + x @ down @ up
                return (x + added).tanh()

            for layer, pair in zip(self.layers, adapters, strict=True):
                x = checkpoint(block, layer, x, *pair, use_reentrant=False)
            return x

    return Base


def linears(count: int, width: int) -> list[Any]:
    """Return Linear layers, to be made without values."""
    import torch

    made = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    return [layer.requires_grad_(False) for layer in made]


def brought(weights: Sequence[Any], device: Any) -> Any:
    """Return the model of the rivals: each layer's weight comes to the device for each use."""
    import torch
    from torch.nn import functional as F

    class Brought(torch.nn.Module):
        """A Linear whose weight is elsewhere."""

        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = weight  # a plain tensor: no Parameter, and no buffer

        def forward(self, x: Any) -> Any:
            """Return the product."""
            return F.linear(x, self.weight.to(device, copy=True))

    return base_class()([Brought(weight) for weight in weights])


def mapped(folder: Path, args: argparse.Namespace) -> Any:
    """Return `mmap`: the tensors that safetensors maps."""
    from safetensors import safe_open

    with safe_open(folder / SAFETENSORS, "pt") as file:
        count = len(file.keys())
        weights = [file.get_tensor(f"layers.{n}.weight") for n in range(count)]
    return brought(weights, args.device)


def loaded_by_torch(folder: Path, args: argparse.Namespace) -> Any:
    """Return `torch`: ``torch.load(mmap=True)``."""
    import torch

    state = torch.load(folder / PICKLED, mmap=True, weights_only=True)
    return brought([state[f"layers.{n}.weight"] for n in range(len(state))], args.device)


def in_memory(folder: Path, args: argparse.Namespace) -> Any:
    """Return `resident`: all weights on the device."""
    import torch
    from safetensors import safe_open

    with torch.device("meta"):
        model = base_class()(linears(layers_of(int(args.gib * GIB), args.width), args.width))
    with safe_open(folder / SAFETENSORS, "pt") as file:
        for n, layer in enumerate(model.layers):
            weight = file.get_tensor(f"layers.{n}.weight").to(args.device, copy=True)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def ours(folder: Path, args: argparse.Namespace) -> Any:
    """Return `ours`: ``attach(..., disk=True)``."""
    import oracle_offload

    with oracle_offload.empty_weights():
        model = base_class()(linears(layers_of(int(args.gib * GIB), args.width), args.width))
    oracle_offload.attach(
        model,
        args.device,
        weights=folder / SAFETENSORS,
        disk=True,
        ram_budget=int(args.ram_gib * GIB),
        vram_budget=int(args.vram_gib * GIB),
    )
    return model


BUILDERS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "resident": in_memory,
    "mmap": mapped,
    "torch": loaded_by_torch,
    "ours": ours,
}


def contend(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train with one contender in this process, and return what it took."""
    import torch

    before = {path: status_bytes(path) for path in ("RssAnon", "RssShmem")}
    count = layers_of(int(args.gib * GIB), args.width)
    begun = time.perf_counter()
    model = BUILDERS[name](folder, args)
    build_s = time.perf_counter() - begun
    draw = torch.Generator().manual_seed(SEED + 1)
    pairs = [
        (
            torch.randn(args.width, RANK, generator=draw).bfloat16() / args.width**0.5,
            torch.randn(RANK, args.width, generator=draw).bfloat16() / args.width,
        )
        for _ in range(count)
    ]
    adapters = [tuple(part.to(args.device).requires_grad_() for part in pair) for pair in pairs]
    optimizer = torch.optim.AdamW([part for pair in adapters for part in pair], lr=1e-3)
    x = torch.randn(ROWS, args.width, generator=draw).bfloat16().to(args.device)
    seconds, reads, losses = [], [read_bytes()], []
    for _ in range(args.steps):
        begun = time.perf_counter()
        loss = model(x, adapters).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # which waits for the device
        seconds.append(time.perf_counter() - begun)
        reads.append(read_bytes())
    bits = hashlib.sha256(repr([loss.hex() for loss in losses]).encode())
    for pair in adapters:
        for part in pair:
            bits.update(part.detach().cpu().view(torch.uint8).numpy().tobytes())
    file = folder / (PICKLED if name == "torch" else SAFETENSORS)
    own = sum(status_bytes(row) - was for row, was in before.items())
    return {
        "name": name,
        "build_s": build_s,
        "first_step_s": seconds[0],
        "step_s": median(seconds[1:]),
        "step_read_bytes": median(b - a for a, b in pairwise(reads[1:])),
        # Not getrusage's ru_maxrss: that begins with what the process had that started this one.
        "peak_bytes": status_bytes("VmHWM"),
        "own_bytes": own,
        "cached_bytes": cached_bytes(file),
        "file_bytes": file.stat().st_size,
        "loss": losses[-1],
        "bits": bits.hexdigest(),
    }


def status_bytes(name: str) -> int:
    """Return a row of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def read_bytes() -> int:
    """Return what this process has had read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def cached_bytes(path: Path) -> int:
    """Return how much of a file of ours the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, page = path.stat().st_size, mmap.PAGESIZE
    pages = (ctypes.c_ubyte * -(-size // page))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
        held = ctypes.c_char.from_buffer(view)
        address, length = ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size)
        failed = libc.mincore(address, length, pages)
        del held
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return sum(one & 1 for one in pages) * page


# ---- all of them ----


def write_weights(folder: Path, count: int, width: int, pickled: bool) -> None:
    """Write the model's file, and the one that `torch.load` takes; a layer is in memory at a time.

    Their pages are dropped from the page cache.
    """
    import torch

    from oracle_offload.disk.header import write_header

    draw = torch.Generator().manual_seed(SEED)
    names = [f"layers.{n}.weight" for n in range(count)]
    path = folder / SAFETENSORS
    with open(path, "wb") as file:
        file.write(write_header(dict.fromkeys(names, ("BF16", (width, width)))))
        for _ in names:
            weight = torch.randn(width, width, generator=draw).bfloat16() / width**0.5
            file.write(weight.view(torch.uint8).numpy())
    if pickled:
        from safetensors import safe_open

        with safe_open(path, "pt") as source:  # mapped: written part by part
            torch.save({name: source.get_tensor(name) for name in names}, folder / PICKLED)
    for name in (SAFETENSORS, PICKLED):
        drop(folder / name)


def drop(path: Path) -> None:
    """Have the page cache forget a file."""
    if path.exists():
        with open(path, "r+b") as file:
            os.fsync(file.fileno())  # what is not written yet stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def limited(nbytes: int | None) -> Iterator[Path | None]:
    """Make a control group with a memory limit; None where this machine does not let us."""
    group = None
    for parent, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        named = parent / f"oracle-offload-tier-{os.getpid()}"
        if nbytes is None or not (parent / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            named.mkdir()
            group = named
            (named / file).write_text(str(nbytes))
            break
        if group is not None:
            group.rmdir()
            group = None
    try:
        yield group
    finally:
        for _ in range(50 if group is not None else 0):
            try:
                assert group is not None
                group.rmdir()
                break
            except OSError:  # the last process is still being taken down
                time.sleep(0.1)


def run_contender(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in a process of its own, with its files not in the page cache."""
    for file in (SAFETENSORS, PICKLED):
        drop(folder / file)
    limit = int((args.ram_gib + args.vram_gib) * GIB) + TORCH_BYTES
    with limited(None if name == "resident" else limit) as group:
        command = [sys.executable, __file__, name, "--folder", str(folder)]
        for option in ("gib", "width", "steps", "ram_gib", "vram_gib", "device"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        if group is not None:
            command += ["--group", str(group)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                timeout=args.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "error": f"not done in {args.limit_s:g} s"}
        found: dict[str, Any]
        if done.returncode == -9:
            found = {"name": name, "error": f"killed: it needs more than {limit / GIB:.2f} GiB"}
        elif done.returncode:
            found = {"name": name, "error": f"it ended with {done.returncode}"}
        else:
            found = json.loads(done.stdout.splitlines()[-1])
        return {**found, "limit_bytes": limit if group is not None else None}


def table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Return the table as Markdown."""
    lines = [
        "| | first step, s | step, s | read in a step, GiB | most memory, GiB | not files', GiB "
        "| of its file in the page cache | bits |",
        f"| --- |{' ---: |' * 7}",
    ]
    told = {
        "resident": "all in memory, no limit",
        "mmap": "safetensors' mmap, `.to(device)`",
        "torch": "`torch.load(mmap=True)`, `.to(device)`",
        "ours": f"`disk=True`, {args.ram_gib:.2f} GiB of RAM",
    }
    wanted = bits_of(rows)
    for row in rows:
        if "error" in row:
            lines.append(f"| {told[row['name']]} | {row['error']} | | | | | | |")
            continue
        same = "the resident's" if row["bits"] == wanted else "others"
        figures = [
            f"{row['first_step_s']:.2f}",
            f"{row['step_s']:.2f}",
            f"{row['step_read_bytes'] / GIB:.2f}",
            f"{row['peak_bytes'] / GIB:.2f}",
            f"{row['own_bytes'] / GIB:.2f}",
            f"{row['cached_bytes'] / row['file_bytes']:.0%}",
            same if wanted else "",
        ]
        lines.append(f"| {told[row['name']]} | {' | '.join(figures)} |")
    return lines


def bits_of(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the bits of the resident, None where it did not run."""
    return next((row.get("bits") for row in rows if row["name"] == "resident"), None)


def sentence(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return what the table is of."""
    every = [row.get("limit_bytes") for row in rows if row["name"] != "resident"]
    limits = [nbytes for nbytes in every if nbytes is not None]
    within = f"{max(limits) / GIB:.2f} GiB of memory" if limits else "no limit on memory"
    on = "the simulated device" if args.device == "cpu" else args.device
    count = layers_of(int(args.gib * GIB), args.width)
    return (
        f"{count} layers of {args.width} x {args.width} in bf16, "
        f"{count * 2 * args.width**2 / GIB:.2f} GiB; {args.steps} steps on {on}, with {within}, of "
        f"which ours has {args.ram_gib:.2f} for weights and {args.vram_gib:.2f} for the arena."
    )


def failures(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Return what is not as it has to be."""
    wanted, found = bits_of(rows), []
    for row in rows:
        if wanted and row.get("bits") not in (None, wanted):
            found.append(f"{row['name']}: other bits than the resident's")
        if row["name"] != "ours" or "error" in row:
            continue
        most = int((args.ram_gib + args.vram_gib) * GIB) + TORCH_BYTES
        if row["peak_bytes"] > most:
            found.append(f"ours: {row['peak_bytes'] / GIB:.2f} GiB, more than {most / GIB:.2f}")
        if row["cached_bytes"] > MOST_CACHED * row["file_bytes"]:
            found.append("ours: its file is in the page cache")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contenders", nargs="*", metavar="NAME", help=f"{', '.join(CONTENDERS)}")
    parser.add_argument("--gib", type=float, default=0.5, help="of weights (0.5)")
    parser.add_argument("--ram-gib", type=float, help="of them in memory (a sixth)")
    parser.add_argument("--vram-gib", type=float, help="of the arena (a twelfth, or four layers)")
    parser.add_argument("--width", type=int, default=2048, help="of a layer (2048)")
    parser.add_argument("--steps", type=int, default=3, help="2 or more (3)")
    parser.add_argument("--device", default="cpu", help="cpu is the simulated device")
    parser.add_argument("--limit-s", type=float, default=900, help="of each contender (900)")
    parser.add_argument("--page", action="store_true", help="write docs/from-disk.md")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # this is a contender
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.contenders) - set(CONTENDERS):
        parser.error(
            f"no contender {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}"
        )
    if args.steps < 2:
        parser.error("--steps: the first is not counted, so there are two or more")
    args.ram_gib = args.gib / 6 if args.ram_gib is None else args.ram_gib
    if args.vram_gib is None:
        args.vram_gib = max(args.gib / 12, 4 * 2 * args.width**2 / GIB)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a contender has failed, 3 where a figure is not as it has to be."""
    args = parse(argv)
    if args.folder is not None:
        if args.group is not None:
            (args.group / "cgroup.procs").write_text("0")  # before torch is imported
        print(json.dumps(contend(args.contenders[0], args.folder, args)), flush=True)
        return 0
    names = args.contenders or list(CONTENDERS)
    count = layers_of(int(args.gib * GIB), args.width)
    folder = Path(tempfile.mkdtemp(prefix="oracle_offload-"))
    try:
        write_weights(folder, count, args.width, "torch" in names)
        rows = [run_contender(name, folder, args) for name in names]
    finally:
        shutil.rmtree(folder)
    printed = "\n".join([sentence(rows, args), "", *table(rows, args)])
    print(printed)
    wrong = failures(rows, args)
    errors = [f"{row['name']}: {row['error']}" for row in rows if "error" in row]
    for line in (*errors, *wrong):
        print(line, file=sys.stderr)
    if args.page and not any(row["name"] == "ours" and "error" in row for row in rows):
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2] or "\n"
        PAGE.write_text(f"{head.rstrip()}\n\n{BEGIN}\n\n{printed}\n\n{END}{tail}", encoding="utf-8")
    return 1 if errors else 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
