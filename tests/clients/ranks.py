"""Ranks of one machine, for `test_several.py`: forked from one process that has imported all.

python ranks.py FOLDER RANKS SCENARIO...

A scenario is one of the functions below, NAME@4 with another number of ranks. Prints, for each in
turn, a line of JSON: how each rank ended and what it said. What a process imports and prepares is
paid for once; its ranks are forked while it has one thread.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ORACLE_OFFLOAD_HEARTBEAT"] = "0"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict as dcp_state  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload import OffloadError  # noqa: E402
from oracle_offload.aitoolkit.memory_manager import SHARE, MemoryManager  # noqa: E402
from oracle_offload.engine import simulator  # noqa: E402
from oracle_offload.host import ranks as host_ranks  # noqa: E402
from oracle_offload.observe import heartbeat, live  # noqa: E402

WIDTH, LAYERS, RANK = 192, 6, 4
MEETINGS = 3  # gloo's own, on a busy machine: it may not connect its ranks
PATIENCE_S = 60  # of a rank, for the others
told = -1  # where a rank writes what it says
LIMIT_S = 60  # of a scenario, from its first rank's start: nothing waits so long

# ---- a model with adapters ----


class Adapted(torch.nn.Module):
    """A frozen Linear with a trained adapter."""

    def __init__(self, dtype):
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False, dtype=dtype)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(torch.nn.Module):
    """Blocks in a row, of which `skip` leaves one out: then its adapter is not used."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = torch.nn.ModuleList(Adapted(dtype) for _ in range(LAYERS))

    def forward(self, x, skip=-1):
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        return x


def frozen(model):
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def adapters(model):
    return [block for one in model.blocks for block in (one.down, one.up)]


def attach(model, share="node", **options):
    """Attach on the simulated device, with little room there; adapters stay resident."""
    options = {"ignore_modules": adapters(model), "offload_percent": 0.9, **options}
    manager = oracle_offload.attach(model, "cpu", share=share, **options)
    assert len(manager.layers) == LAYERS, manager.resident
    return manager


def inputs(rank, number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, WIDTH, generator=generator).to(dtype)


# ---- what ranks do; each is given its number, how many there are, and the scenario's folder ----

TRAININGS = {
    "plain": {},
    "no_sync": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def train(rank, model, how, manager=None):
    """Train adapters under DDP; return losses and adapters."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(frozen(model)))
    parallel = DistributedDataParallel(model, **TRAININGS[how])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for number in range(4):
        waits = how == "no_sync" and number % 2 == 0
        with parallel.no_sync() if waits else contextlib.nullcontext():
            skip = number % LAYERS if how == "unused" else -1
            loss = parallel(inputs(rank, number), skip).square().mean()
            loss.backward()
        losses.append(loss.detach())
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in trained)]


def bits(rank, size, folder):
    """DDP over shared weights is DDP over resident models, to the last bit."""
    for how in TRAININGS:
        expected = train(rank, Model(), how)
        model = Model()
        before = [p.clone() for p in frozen(model).values()]
        manager = attach(model)
        share = manager.attachment.pieces.share
        assert share.nbytes >= sum(p.nbytes for p in before), share.nbytes
        assert all(
            manager.attachment.pieces.shared_at(p.data_ptr()) for p in frozen(model).values()
        )
        found = train(rank, model, how)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), f"{how}: other bits"
        stats = manager.state.engine.stats(manager.attachment.model)
        assert stats["h2d_bytes"] > 2 * share.nbytes, "nothing was streamed"
        assert all(map(torch.equal, frozen(model).values(), before))
        manager.detach()
    return "equal"


def memory(rank, size, folder):
    """One copy in all: each rank's share of the pages is its part of it."""
    model = Model()
    manager = attach(model)
    assert all(buffer.locked for buffer in manager.attachment.buffers)  # by each rank
    assert len([p.sum() for p in model.parameters()]) > LAYERS  # each page is read by each rank
    dist.barrier()
    ours = mapping("Rss", "Pss")
    dist.barrier()  # until then no rank may end
    return {**ours, "nbytes": manager.attachment.pieces.share.nbytes}


def peak(rank, size, folder):
    """What all ranks take at the most while they fill from files: no rank has a copy of its own."""
    pieces, piece = 8, 8 << 20  # of two layers each
    oracle_offload.model.masters.PIECE_BYTES = piece
    sys.modules["oracle_offload.model.locking"].RING_BYTES = 1 << 20
    sharing = sys.modules["oracle_offload.model.sharing"]
    path = Path(folder) / "peak.safetensors"

    def model():
        layers = (torch.nn.Linear(1024, 1024, bias=False) for _ in range(2 * pieces))
        return torch.nn.Sequential(*layers).requires_grad_(False)

    if rank == 0:
        oracle_offload.save_weights(model(), path)
    dist.barrier()
    with oracle_offload.empty_weights():
        empty = model()
    oracle_offload.model.masters.trim_heap()
    before, taken = memory_of_process(), []
    wait_until_filled = sharing.Share.wait_until_filled

    def filled(self, *args):
        taken.append(memory_of_process() - before)
        wait_until_filled(self, *args)
        taken.append(memory_of_process() - before)

    sharing.Share.wait_until_filled = filled
    manager = oracle_offload.attach(empty, "cpu", share="node", weights=path)
    assert len(manager.attachment.buffers) == pieces and len(taken) == 2 * pieces
    dist.barrier()
    return {"peak": max(taken), "weights": pieces * piece, "piece": piece}


def memory_of_process():
    """Return the process's part of all that it maps, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.split("\nPss:")[1].split()[0])


def mapping(*wanted):
    """Return what the system counts of the shared file's mappings of masters, in bytes."""
    found = dict.fromkeys(wanted, 0)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside = False
    for line in lines:
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = "memfd:oracle_offload" in line and " rw-s " not in line
            assert not inside or " r--s " in line, f"masters may be written: {line}"
        elif inside and name in found:
            found[name] += int(rest.split()[0]) * 1024
    return found


def files(rank, size, folder):
    """Weights come from files, each rank reading a part; compressed, too."""
    for dtype, compress in ((torch.float32, None), (torch.bfloat16, "lossless")):
        model = Model(seed=7, dtype=dtype)
        expected = [model(inputs(rank, 0, dtype)), *(p.clone() for p in frozen(model).values())]
        path = Path(folder) / f"{compress}.safetensors"
        if rank == 0:
            oracle_offload.save_weights(model, path)
        dist.barrier()
        with oracle_offload.empty_weights():
            empty = Model(seed=7, dtype=dtype)
        for one, other in zip(adapters(empty), adapters(model), strict=True):
            one.to_empty(device="cpu").load_state_dict(other.state_dict())
        manager = attach(empty, weights=path, compress=compress)
        found = [empty(inputs(rank, 0, dtype)), *frozen(empty).values()]
        assert all(map(torch.equal, found, expected)), compress
        share = manager.attachment.pieces.share
        whole = sum(p.nbytes for p in frozen(empty).values())
        coded, kept = manager.attachment.coded_bytes()
        if compress:
            assert coded > 0.9 * whole and kept < 0.9 * coded and share.nbytes < 0.9 * whole
        else:
            assert coded == 0 and share.nbytes >= whole
        manager.detach()
    return "equal"


def other_files(rank, size, folder):
    """Files that are not the same ones are an error on all."""
    path = Path(folder) / f"{rank}.safetensors"
    oracle_offload.save_weights(Model(), path)
    with oracle_offload.empty_weights():
        model = Model()
    return refused(lambda: oracle_offload.attach(model, "cpu", share="node", weights=path))


def other_layout(rank, size, folder):
    model = Model()
    if rank == size - 1:
        del model.blocks[3]
    return refused(lambda: oracle_offload.attach(model, "cpu", share="node"))


def other_values(rank, size, folder):
    model = Model()
    with torch.no_grad():
        if rank == size - 1:
            model.blocks[2].base.weight[5, 5] += 1
    before = model.blocks[2].base.weight.clone()
    said = refused(lambda: attach(model))
    with torch.no_grad():
        assert torch.equal(model.blocks[2].base.weight, before)
        model.blocks[0].base.weight.zero_()  # it is this rank's own, as before
    return said


def one_fails(rank, size, folder):
    """What is an error of one rank's own is one on all."""
    options = {"vram_budget": "1KiB"} if rank == size - 1 else {}
    model = Model()
    return refused(lambda: oracle_offload.attach(model, "cpu", share="node", **options))


def waits(rank, size, folder):
    """No rank goes on before all have filled, may be written over, and have been written.

    The last rank comes late each time, once it knows that the first one waits for it.
    """

    def flag(name):
        (Path(folder) / f"{name}-{rank}").touch()

    def seen(name, of):
        return (Path(folder) / f"{name}-{of}").exists()

    def come_late(name, goes_on):
        flag(name)
        if rank == size - 1:
            while not seen(name, 0):
                time.sleep(0.001)
            time.sleep(0.2)  # what does not wait has gone on by then; what waits never does
            assert not seen(goes_on, 0), f"the first rank went on to '{goes_on}' without this one"

    sharing = sys.modules["oracle_offload.model.sharing"]
    wait_until_filled, on_all = sharing.Share.wait_until_filled, sharing.on_all

    def filled(self, *args):
        come_late("filled", "compared")
        wait_until_filled(self, *args)

    def compared(ranks, what, check):
        if what == "compared weights":
            flag("compared")
        on_all(ranks, what, check)

    sharing.Share.wait_until_filled, sharing.on_all = filled, compared
    model = Model()
    manager = attach(model)
    model(inputs(rank, 0))
    come_late("entering", "inside")
    with manager.writing() as mine:
        flag("inside")
        if mine:
            while not seen("inside", size - 1):
                time.sleep(0.001)
            time.sleep(0.2)
            assert not seen("left", size - 1), "a rank left while another writes"
    flag("left")
    return "waited"


class Trainer:
    """A process of AI-Toolkit that loads a model, as far as `MemoryManager` looks at it."""

    def __init__(self, folder, section):
        self.save_root, self.config, self.network = str(folder), {"model": section}, None

    def load(self, model):
        MemoryManager.attach(model, "cpu", 0.9, adapters(model))
        return model._memory_manager


def aitoolkit(rank, size, folder):
    """Its configuration asks for one copy; what it loads is not frozen yet."""
    trainer = Trainer(folder, {SHARE: "node"})
    model = Model().requires_grad_()
    x = inputs(rank, 0)
    expected = model(x)
    manager = trainer.load(model)
    share = manager.attachment.pieces.share
    assert share.nbytes >= sum(b.base.weight.nbytes for b in model.blocks)
    assert torch.equal(model(x), expected)
    trainer.network = Model().requires_grad_()
    own = trainer.load(trainer.network)
    assert own.attachment.pieces.share is None and all(
        p.requires_grad for p in trainer.network.parameters()
    )
    plain = Model()
    assert Trainer(folder, {}).load(plain).attachment.pieces.share is None
    return os.fstat(share._file).st_ino


def nothing_frozen(rank, size, folder):
    return refused(lambda: attach(Model().requires_grad_()))


def partly_trained(rank, size, folder):
    """What is trained from the start is each rank's own; the rest is shared."""
    model = Model()
    model.blocks[2].base.weight.requires_grad_()
    x = inputs(rank, 0)
    expected = model(x)
    manager = attach(model)
    assert torch.equal(model(x), expected)
    shared_at = manager.attachment.pieces.shared_at
    own = [n for n, p in model.named_parameters() if "base" in n and not shared_at(p.data_ptr())]
    assert own == ["blocks.2.base.weight", "blocks.2.base.bias"], own
    optimizer = torch.optim.SGD([model.blocks[2].base.weight], lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    model(x)
    return "trained"


def nodes(rank, size, folder):
    """Two machines of two ranks each, as their launchers would say: a copy on each."""
    there = {"LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in there.items()})
    expected = train(rank, Model(), "plain")
    model = Model()
    manager = attach(model)
    share = manager.attachment.pieces.share
    assert share.ranks.at.local_world == 2
    found = train(rank, model, "plain")
    assert all(map(torch.equal, found, expected))
    return os.fstat(share._file).st_ino


def one_fails_late(rank, size, folder):
    """An error after the weights have moved: all raise it, and each has its weights as before."""
    if rank == size - 1:

        def lend(self, capacity):
            raise torch.OutOfMemoryError("the device has no room for the arena")

        oracle_offload.model.arena.Arena.lend = lend
    model = Model()
    before = [p.clone() for p in model.parameters()]
    try:
        attach(model)
    except (OffloadError, torch.OutOfMemoryError) as error:
        said = str(error)
    assert all(map(torch.equal, model.parameters(), before))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    dist.barrier()
    assert all(torch.all(p == rank) for p in model.parameters()), "another rank's writes"
    return said


def ties(rank, size, folder):
    """Weights that are one on a rank, and two on another, are stored elsewhere there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if rank == 0:
        model[3].weight = model[0].weight
    model.requires_grad_(False)
    return refused(lambda: oracle_offload.attach(model, "cpu", share="node"))


def merges(rank, size, folder):
    """All ranks call a merge of PEFT's; each weight is written once, and each adapter knows it."""
    import peft

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = peft.LoraConfig(r=4, target_modules=["0", "1", "2"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config)
    manager = oracle_offload.attach(tuned, "cpu", share="node")
    pieces = manager.attachment.pieces
    weights = [model[n].base_layer.weight for n in range(3)]
    assert all(pieces.shared_at(w.data_ptr()) for w in weights)
    x = inputs(0, 0)
    before, plain = tuned(x), weights[0].clone()
    assert "writing()" in refused(tuned.merge_adapter)
    for safe in (False, True):
        with manager.writing():
            tuned.merge_adapter(safe_merge=safe)
        assert all(pieces.shared_at(w.data_ptr()) for w in weights)
        assert not torch.allclose(weights[0], plain)
        torch.testing.assert_close(tuned(x), before)
        with manager.writing():
            tuned.unmerge_adapter()
        torch.testing.assert_close(weights[0].detach(), plain)
        torch.testing.assert_close(tuned(x), before)

    def merge_alone():
        with manager.writing() as mine:
            if mine:
                tuned.merge_adapter()

    said = refused(merge_alone)
    check_stale(lambda: tuned(x))
    return said


def check_stale(call):
    """Weights that are half written are used by no rank, from the next forward on."""
    for _ in range(2):
        try:
            with torch.no_grad():
                call()
        except oracle_offload.StaleWeightsError as error:
            assert "Start again" in str(error)
        else:
            raise AssertionError("weights that are half written were used")


def half_written(rank, size, folder):
    """An error of the rank that writes reaches all, and no rank goes on with what it left."""
    model = Model()
    manager = attach(model)
    x = inputs(0, 0)
    expected = model(x)
    with manager.writing() as mine:
        assert "leave the block first" in refused(manager.refresh)
        if mine:
            for p in frozen(model).values():
                p.mul_(1)
    assert torch.equal(model(x), expected)

    def write():
        with manager.writing() as mine:
            if mine:
                next(iter(frozen(model).values())).zero_()
                raise MemoryError("no room for the rest")

    try:
        write()
    except (MemoryError, OffloadError) as error:
        said = str(error)
    check_stale(lambda: model(x))
    return said


def quantised(rank, size, folder):
    """What wrappers are made of is shared too, and written by no call."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    state = copy.deepcopy(model.state_dict())
    x = inputs(0, 0)
    expected = model(x)
    manager = oracle_offload.attach(model, "cpu", share="node")
    assert len(manager.layers) == 3 and manager.attachment.pieces.share.nbytes > 3 * WIDTH**2
    assert torch.equal(model(x), expected)
    assert "together alone" in refused(lambda: model.load_state_dict(state))
    weight = model[0].weight
    assert "about to be written" in refused(
        lambda: oracle_offload.engine.engines.before_frozen_write([weight])
    )
    with manager.writing():
        assert "are quantised" in refused(lambda: model.load_state_dict(state))
    assert torch.equal(model(x), expected)
    manager.detach()
    model.load_state_dict(state)
    return "refused"


def alone(rank, size, folder):
    """DDP that was not prepared, a copy of the model, and a rank that detaches by itself."""
    model = Model()
    x = inputs(rank, 0)
    expected = model(x)
    manager = attach(model)
    parallel = DistributedDataParallel(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert torch.equal(parallel(x), expected)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert torch.equal(parallel(x), expected)
    if rank:
        manager.detach()
        said = ""
    else:
        said = refused(manager.refresh)
    dist.barrier()
    return said


def early(rank, size, folder):
    """What is wrong before anything is shared: all see why at once, and nothing stays open."""

    def opened():
        files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum("memfd:" in os.readlink(file) for file in files if os.path.islink(file))

    def fails(model, **options):
        try:
            oracle_offload.attach(model, "cpu", share="node", **options)
        except (OffloadError, ValueError) as error:
            return str(error)
        raise AssertionError("it was not refused")

    said = [fails(Model(), lock="much" if rank else "auto")]
    core = oracle_offload._core
    make = core.section_create
    if rank == 0:

        def refuse(*args):
            raise OSError("no more of it")

        core.section_create = refuse
    said.append(fails(Model()))
    core.section_create = make
    share_file = host_ranks.LocalRanks.share_file

    def exchanged(self, file):
        os.close(share_file(self, file))
        return os.open(__file__, os.O_RDONLY)

    if rank:
        host_ranks.LocalRanks.share_file = exchanged
    said.append(fails(Model()))
    host_ranks.LocalRanks.share_file = share_file
    for _ in range(2):
        said.append(fails(Model(), ignore_modules=["blocks.1.*"] if rank else ()))
    assert opened() == 0, opened()
    return said


def orphan(rank, size, folder):
    """A rank is gone once it is killed, also while a child lives that it has forked."""
    model = Model()
    manager = attach(model)
    known = Path(folder) / "child"
    if rank:
        child = os.fork()
        if child == 0:
            os.close(told)
            signal.pause()
        known.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    said = refused(manager.refresh)
    child = int(known.read_text())
    has = [os.readlink(file.path) for file in os.scandir(f"/proc/{child}/fd")]
    os.kill(child, signal.SIGKILL)
    assert not any("memfd:" in name for name in has), has
    return said


def abandoned(rank, size, folder):
    """A rank fails between filling and locking: what all have filled is each one's own again."""
    if rank == size - 1:

        def fail():
            raise MemoryError("no room for the heap")

        oracle_offload.model.masters.trim_heap = fail
    model = Model()
    before = [p.clone() for p in model.parameters()]
    try:
        attach(model)
    except (OffloadError, MemoryError) as error:
        said = str(error)
    assert all(map(torch.equal, model.parameters(), before))
    dist.barrier()
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(rank)
    dist.barrier()
    if not rank:  # which has written none of its pages, so that it would see the other's
        assert all(map(torch.equal, model.parameters(), before)), "another rank's writes"
    return said


def no_cache(rank, size, folder):
    """A rank that cannot write the cache leaves its part as it is, and the others go on."""
    coder = sys.modules["oracle_offload.compress.coder"]
    oracle_offload.model.masters.PIECE_BYTES = 300_000  # several
    if rank:

        def full(*args):
            raise OSError("no space is left")

        coder.Coder._code = full
    model = Model(seed=11, dtype=torch.bfloat16)
    x = inputs(0, 0, torch.bfloat16)
    expected = model(x)
    manager = attach(model, compress="lossless")
    assert len(manager.attachment.buffers) > 1
    assert torch.equal(model(x), expected)
    return len(manager.attachment.pieces.coded)


def one_is_late(rank, size, folder):
    if rank == size - 1:
        return "never came"
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
    return refused(lambda: attach(Model()))


def descriptor(rank, size, folder):
    """A process that may open no more files cannot be passed one."""
    if rank:
        opened = max(map(int, os.listdir("/proc/self/fd")))
        receive = host_ranks.socket.recv_fds

        def no_more(*args):
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))
            try:
                return receive(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 100, most))

        host_ranks.socket.recv_fds = no_more
    return refused(lambda: attach(Model()))


def no_group(rank, size, folder):
    dist.destroy_process_group()
    return refused(lambda: attach(Model()))


def no_place(rank, size, folder):
    os.environ.pop("LOCAL_RANK")
    return refused(lambda: attach(Model()))


def local_rank(rank, size, folder):
    """A launcher that says LOCAL_RANK alone, on two machines: Lightning's own does so."""
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ["LOCAL_RANK"] = str(rank % 2)
    assert host_ranks.place() is None
    model = Model()
    share = attach(model).attachment.pieces.share
    assert share.ranks.at == host_ranks.place() == host_ranks.Place(rank, size, rank % 2, 2)
    return os.fstat(share._file).st_ino


def uncounted(rank, size, folder):
    """The environment does not say how many ranks there are, and one of them does not come."""
    del os.environ["LOCAL_WORLD_SIZE"]
    return one_is_late(rank, size, folder)


def other_number(rank, size, folder):
    """The environment of one rank names fewer ranks on this machine."""
    if rank:
        os.environ.update(LOCAL_WORLD_SIZE=str(size + 1), WORLD_SIZE=str(size + 1))
        dist.get_world_size = lambda *group: size + 1
    return refused(lambda: attach(Model()))


def refused(call):
    try:
        call()
    except OffloadError as error:
        return str(error)
    raise AssertionError("it was not refused")


def writes(rank, size, folder):
    """One rank writes, while all wait; what any other call would write is refused."""
    model, changed = Model(), Model(seed=3)
    manager = attach(model)
    x = inputs(0, 0)
    model(x)
    with manager.writing() as mine:
        assert mine == (rank == 0)
        if mine:
            for p in frozen(model).values():
                p.mul_(0.5)
    halved = Model()
    with torch.no_grad():
        for p in frozen(halved).values():
            p.mul_(0.5)
    assert torch.equal(model(x), halved(x))
    said = refused(lambda: model.load_state_dict(changed.state_dict()))
    assert "manager.writing()" in said
    with manager.writing():
        replaces = refused(lambda: model.load_state_dict(changed.state_dict(), assign=True))
        assert "leave assign=True away" in replaces
        model.load_state_dict(changed.state_dict())
    assert torch.equal(model(x), changed(x))
    manager.refresh()
    generation = manager.attachment.pieces.share._generation()
    assert generation == 6, generation
    # A step of an optimizer that would write what is frozen.
    given = next(iter(frozen(model).values()))
    for call in (
        lambda: oracle_offload.engine.engines.before_frozen_write([given]),
        lambda: MeZO([given]).step(),
    ):
        assert "that ranks share were about to be written" in refused(call)
    # What is trained from now on is each rank's own.
    weight = model.blocks[1].base.weight.requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1 * (rank + 1))
    model(x).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight.detach(), before.add(weight.grad, alpha=-0.1 * (rank + 1)))
    assert weight.grad.any()
    assert not manager.attachment.pieces.shared_at(weight.data_ptr())
    changed.blocks[1].base.weight.data.copy_(weight.detach())
    assert torch.equal(model(x), changed(x))
    # A rank that took no part finds its copies stale.
    dist.barrier()
    share = manager.attachment.pieces.share
    if rank == 0:
        share._begin_generation()
    dist.barrier()
    try:
        with torch.no_grad():
            model(x)
    except oracle_offload.StaleWeightsError as error:
        assert "ended before it was done" in str(error)
    else:
        raise AssertionError("stale copies were used")
    dist.barrier()
    # Once detached, a rank's weights are its own: no write reaches the others.
    manager.detach()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)
    dist.barrier()
    assert all(torch.all(p == rank) for p in model.parameters())
    assert "was detached" in refused(lambda: share.ranks.exchange("late"))
    return "done"


def in_place(rank, size, folder):
    """A rank that writes past all calls ends there; the others keep their weights and see it."""
    model = Model()
    manager = attach(model)
    before = [p.clone() for p in frozen(model).values()]
    if rank:
        model.blocks[3].base.weight.data.mul_(2)
    said = refused(manager.refresh)
    assert all(map(torch.equal, frozen(model).values(), before))
    return said


class MeZO(torch.optim.Optimizer):
    """Writes what it was given, which has no gradient."""

    def __init__(self, given):
        super().__init__(given, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1)


def saves(rank, size, folder):
    """torch.distributed.checkpoint saves all and loads what is trained; FSDP is refused."""
    model = Model()
    manager = attach(model)
    with torch.no_grad():
        for layer in adapters(model):
            layer.weight.add_(1)
    only = dcp_state.StateDictOptions(ignore_frozen_params=True)
    state = dcp_state.get_model_state_dict(model, options=only)
    assert state.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    dcp.save(state, checkpoint_id=Path(folder) / "adapters")
    dcp.save(model.state_dict(), checkpoint_id=Path(folder) / "all")
    expected = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for layer in adapters(model):
            layer.weight.zero_()
    state = dcp_state.get_model_state_dict(model, options=only)
    dcp.load(state, checkpoint_id=Path(folder) / "adapters")
    dcp_state.set_model_state_dict(model, state, options=dcp_state.StateDictOptions(strict=False))
    assert all(map(torch.equal, model.parameters(), expected))
    other = Model(seed=9)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=Path(folder) / "all")
    assert all(map(torch.equal, other.parameters(), expected))
    for shard in (fully_shard, FullyShardedDataParallel):
        for part in (model, model.blocks[1]):
            said = refused(lambda shard=shard, part=part: shard(part))
            assert "share='node'" in said and "detach first" in said
    assert torch.equal(model(inputs(0, 0)), other(inputs(0, 0)))
    manager.detach()
    return "loaded"


def starts(rank, size, folder):
    model = Model()
    expected = model(inputs(rank, 1))
    manager = attach(model)
    assert torch.equal(model(inputs(rank, 1)), expected)
    return os.fstat(manager.attachment.pieces.share._file).st_ino


def sections(rank, size, folder, name, *more):
    """Another scenario, with ranks that meet and share as they do on Windows.

    Its unnamed sections are files in memory here, one for each piece.
    """
    taken = []
    take = host_ranks.LocalRanks._take

    def count(self, file):
        taken.append(take(self, file))
        return taken[-1]

    host_ranks.LocalRanks._take, host_ranks.LocalRanks.passes_files = count, False
    oracle_offload.model.masters.PIECE_BYTES = 300_000
    found = globals()[name](rank, size, folder, *more)
    assert len(taken) > 1 or name == "killed", "one for the head, and one for each piece"
    return found


def shown(rank, size, folder):
    """A summary, a recording and a watcher say which rank they are of."""
    os.environ["ORACLE_OFFLOAD_HEARTBEAT"] = "1"
    os.environ["ORACLE_OFFLOAD_CACHE_DIR"] = str(Path(folder) / "cache")
    if rank == 0:
        (Path(folder) / "cache").mkdir(mode=0o700)
    dist.barrier()
    model = Model()
    with oracle_offload.record() as recorder:
        manager = attach(model)
        train(rank, model, "plain")
    heartbeat.start().write()
    dist.barrier()  # all are there, and none goes yet
    summary = manager.memory_summary()
    lives = [live.read(path) for path in live.heartbeats()]
    assert len(lives) == size
    (own,) = (one for one in lives if one.document["pid"] == os.getpid())
    beside = live.ranks_beside(own)
    assert [one.rank for one in beside] == [number for number in range(size) if number != rank]
    looked = live.Live(own.document, others=beside)
    dist.barrier()
    recording = recorder.recording()
    usage = summary.devices[0].models[0]
    assert usage.shared_by == size
    assert usage.shared_bytes == manager.attachment.pieces.share.nbytes
    assert recording.header["place"]["rank"] == rank == summary.to_dict()["place"]["rank"]
    manager.detach()
    return [str(summary), str(recording), str(looked)]


def killed(rank, size, folder, victim, stage):
    """One rank is killed as it comes to a stage; the others see it."""
    exchange = host_ranks.LocalRanks.exchange

    def end(*args):
        os.write(told, json.dumps(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def until(self, what, value=None):
        if what == stage:
            end()
        return exchange(self, what, value)

    if rank == int(victim):
        host_ranks.LocalRanks.exchange = until
        if stage == "accept":  # of the first rank, once another has come to its door
            host_ranks._let_in = end
    model = Model()

    def calls():
        manager = attach(model)
        with manager.writing() as mine:
            if mine:
                next(iter(frozen(model).values())).zero_()

    said, heard_s = refused(calls), time.monotonic()
    if stage == "merged":
        check_stale(lambda: model(inputs(0, 0)))
    return [said, heard_s]


# ---- starting and ending them ----


def run(scenario, size, folder, patience_s=PATIENCE_S):
    """Fork the ranks of a scenario and return how each has ended, and what it said."""
    assert len(os.listdir("/proc/self/task")) == 1, "forking needs one thread"
    folder.mkdir()
    begun = time.monotonic()
    ranks, rows = {}, []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _be_rank(scenario, rank, size, folder, writing, patience_s)
        os.close(writing)
        ranks[reading] = rank, pid
    said = dict.fromkeys(range(size), b"")
    open_pipes = set(ranks)
    while open_pipes:
        left = begun + LIMIT_S - time.monotonic()
        ready, _, _ = select.select(list(open_pipes), [], [], max(0, left))
        if not ready:
            for reading in open_pipes:
                os.kill(ranks[reading][1], signal.SIGKILL)
            break
        for reading in ready:
            part = os.read(reading, 1 << 16)
            said[ranks[reading][0]] += part
            if not part:
                open_pipes.discard(reading)
    for reading, (rank, pid) in ranks.items():
        os.close(reading)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        rows.append({"code": code, "said": json.loads(said[rank] or "null")})
    return {"ranks": rows, "seconds": time.monotonic() - begun, "left": left_segments()}


def left_segments():
    """Return the processes that have a segment of ours, among all that can be looked at."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            has = b"memfd:oracle_offload" in Path(f"/proc/{pid}/maps").read_bytes()
            files = os.scandir(f"/proc/{pid}/fd")
            if has or any("memfd:oracle_offload" in os.readlink(file.path) for file in files):
                group = os.getpgid(int(pid))
                if group == os.getpgid(0):  # not those of tests that run meanwhile
                    found.append(int(pid))
    return found


def _be_rank(scenario, rank, size, folder, writing, patience_s):
    global told
    told, code, said = writing, 1, None
    try:
        name, *more = scenario.split(":")
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({key: str(value) for key, value in place.items()})
        patience = timedelta(seconds=patience_s)
        meeting = f"file://{folder}/meet"
        dist.init_process_group("gloo", meeting, patience, world_size=size, rank=rank)
        said = globals()[name](rank, size, folder, *more)
        assert not simulator.reports(), simulator.reports()[:3]
        code = 0
    except BaseException:
        said = traceback.format_exc()
    finally:
        os.write(writing, json.dumps(said).encode())
        os._exit(code)


def prepare():
    """Have everything imported and used once, and no thread left."""
    model = Model()
    with attach(model, None):
        model(inputs(0, 0)).sum().backward()
    copy.deepcopy(model)


def main(folder, size, *scenarios):
    os.setpgid(0, 0)
    prepare()
    if "merges" in scenarios:
        importlib.import_module("peft")
    if "quantised" in scenarios:
        importlib.import_module("torchao.quantization")
    for number, scenario in enumerate(scenarios):
        name, _, own = scenario.partition("@")
        for attempt in range(MEETINGS):
            row = run(name, int(own or size), Path(folder) / f"{number}-{attempt}")
            if not any("connectFullMesh failed" in str(rank["said"]) for rank in row["ranks"]):
                break
        print(json.dumps({"scenario": scenario, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
