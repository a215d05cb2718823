"""Train on PyTorch's CUDA build with weights offloaded in several ways: what tells a broken wait.

    .venv-cuda/bin/python tests/cuda/mutant_training.py     # PYTHONPATH: the package that is tried

Each way runs under some schedules of the simulated driver, next to the same model resident on the
card. It ends with 0 where all is equal and nothing was reported, and else says what it saw first.
A way that has not led the life it is there for is an error.

What the host reads and writes of weights and gradients is declared to the simulator, which sees
kernels and copies alone. Nothing waits for the card but what a way waits for by its name.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import simulated_cuda
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import oracle_offload
from oracle_offload import _core
from oracle_offload.errors import DriverError
from oracle_offload.train import offload_activations, stream_optimizer

WIDTH = 256
SCHEDULES = (("DELAYED", 41), ("TIMED", 0), ("RANDOM", 7))
SIMULATOR = simulated_cuda.simulator()
UNMARKED = ("cuEventRecord", 1)  # the end of a use
UNORDERED = ("cuStreamWaitEvent", 1)  # the oldest of more uses than there is room for
RECYCLED_STREAMS = 6  # SIM_RECYCLED_STREAMS: a new stream has the handle of the one that ended last


class Seen(Exception):
    """What tells that something is wrong."""


def led(life: object, what: str) -> None:
    """Check that a way has led the life it is there for."""
    if not life:
        raise RuntimeError(f"not led: {what}")


# ---- a model, and the same resident on the card ----


def chain(trains: bool = False, coded: bool = False, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
    return as_trained(nn.Sequential(*layers).requires_grad_(trains), coded)


def as_trained(model: nn.Sequential, coded: bool) -> nn.Sequential:
    """Have weights as trained ones are: they take fewer bytes in code."""
    for parameter in model.bfloat16().parameters() if coded else ():
        nn.init.normal_(parameter, std=0.02)
    return model


def table(trains: bool) -> nn.Sequential:
    """Return a chain after rows of a table, which kernels read where it is on the host."""
    model = nn.Sequential(nn.Embedding(64, WIDTH), *chain())
    return model.requires_grad_(trains)


def attach(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """Return a copy that is resident, and the manager."""
    resident = copy.deepcopy(model).cuda()
    fill(1)
    return resident, oracle_offload.attach(model, "cuda", **options)


def judge(what: str) -> None:
    torch.cuda.synchronize()
    reports = simulated_cuda.verdict()
    if reports:
        raise Seen(f"{what}: {reports[0].splitlines()[0]}")


def compare(what: str, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        if not torch.equal(one.cpu(), other.cpu()):
            raise Seen(f"{what} has other bits")


def alike(
    model: nn.Module,
    resident: nn.Module,
    step: Callable[[nn.Module, int], list[Tensor]],
    times: int = 3,
) -> None:
    """Do the same with both models, and compare what that gives."""
    for index in range(times):
        made = []
        for each in (model, resident):
            torch.manual_seed(index)
            made.append(step(each, index))
        compare(f"step {index}", *made)
        judge(f"step {index}")


def end(model: nn.Module, resident: nn.Module, manager: Any) -> None:
    manager.detach()
    declare(model.parameters(), writes=True)
    fill(2)
    judge("detach")
    compare("a weight that comes back", list(model.parameters()), list(resident.parameters()))


def declare(tensors: Any, writes: bool) -> None:
    """Tell the simulator that the host reads or writes them now, where they are on the host."""
    for tensor in tensors:
        if tensor.is_cpu:
            SIMULATOR.host_access(tensor.data_ptr(), tensor.nbytes, writes)


def fill(value: float, *nbytes: int) -> None:
    """Write over what torch's allocator has free: the arena may be there next, or has been."""
    for size in nbytes or [4 << exponent for exponent in range(10, 18)]:
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(value)


def inputs(like: nn.Module) -> Tensor:
    weight = next(p for p in like.parameters() if p.dim() == 2)
    return torch.randn(16, weight.shape[1], device="cuda").to(weight.dtype)


def rows() -> Tensor:
    return torch.randint(64, (16,), device="cuda")


@contextlib.contextmanager
def on_streams(count: int, call: Callable[[], Tensor]) -> Iterator[list[Tensor]]:
    """Compute on as many streams at the same time; the current one waits for them at the end."""
    main, streams, made = torch.cuda.current_stream(), [], []
    for _ in range(count):
        streams.append(torch.cuda.Stream())
        streams[-1].wait_stream(main)
    for stream in streams:
        with torch.no_grad(), torch.cuda.stream(stream):
            made.append(call())
    yield made
    for stream in streams:
        main.wait_stream(stream)


class Failing:
    """An engine, of whose calls some meet a driver that fails once."""

    def __init__(self, state: Any, **faults: Sequence[tuple[str, int] | None]) -> None:
        self._engine, self._faults = state.engine, faults
        self._calls = self.failed = 0
        state.engine = self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._engine, name)
        if name not in self._faults:
            return call

        def failing(*args: Any) -> Any:
            try:
                with self._fault(name):
                    return call(*args)
            except DriverError:
                self.failed += 1
                raise

        return failing

    @contextlib.contextmanager
    def use(self, *args: Any) -> Iterator[int]:
        """As that of the engine; its end is the "release" that fails."""
        with contextlib.ExitStack() as after, self._engine.use(*args) as address:
            yield address
            after.enter_context(self._fault("release"))

    @contextlib.contextmanager
    def _fault(self, name: str) -> Iterator[None]:
        faults = self._faults.get(name)
        fault = faults[self._calls % len(faults)] if faults else None
        self._calls += bool(faults)
        if fault:
            SIMULATOR.set_fault(*fault)
        try:
            yield
        finally:
            SIMULATOR.clear_faults()


# ---- ways ----


def trained(trains: bool = False, coded: bool = False, steps: bool = False, **options: Any) -> None:
    """Steps of training, with checkpoints; weights are written in between, but for coded ones."""
    model = chain(trains, coded)
    resident, manager = attach(model, **options)
    led(len(manager.layers) == 8, "8 layers are managed")
    optimizers: dict[nn.Module, Any] = {}
    if steps:  # where the weights are, on the card
        for each in (model, resident):
            optimizers[each] = torch.optim.AdamW(each.parameters(), lr=0.01)
        stream_optimizer(optimizers[model])

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = inputs(each).requires_grad_()
        y = checkpoint_sequential(each, 4, given, use_reentrant=False)
        y.square().mean().backward()
        found = [y, given.grad, *(p.grad for p in each.parameters() if p.grad is not None)]
        found = [value.detach().clone() for value in found]
        if steps:
            optimizers[each].step()
        elif not coded:
            torch.cuda.synchronize()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.99)
        each.zero_grad(set_to_none=True)
        return found

    alike(model, resident, step)
    led(not coded or manager.state.engine.stats()["decoded_bytes"], "chunks are decoded")
    end(model, resident, manager)


def look_up(layer: nn.Module, given: Tensor, is_unmarked: bool) -> Tensor:
    """Compute rows where the table is; the end of what reads it may have no mark."""
    with SIMULATOR.fault(*UNMARKED) if is_unmarked else contextlib.nullcontext():
        return layer(given)


def rewritten(by_rows: bool) -> None:
    """Masters are written while what was queued reads them: by a step, and in a block for that.

    With `by_rows` kernels read them where they are, on more streams than there is room for.
    """
    model = table(True) if by_rows else chain(True)
    resident, manager = attach(model, offload_percent=0.5)
    optimizers = {each: torch.optim.SGD(each.parameters()) for each in (model, resident)}
    optimizers[model].register_step_pre_hook(lambda *_: declare(model.parameters(), True))

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = rows() if by_rows else inputs(each)
        each(given).square().mean().backward()
        found = [p.grad.clone() for p in each.parameters()]  # as soon as they are shown
        look = functools.partial(look_up, each[0], given, each is model and index == 1)
        with torch.no_grad():
            found.append(each(given))
        with on_streams(18 if by_rows else 0, look) as made:
            if each is resident:
                torch.cuda.synchronize()
            optimizers[each].step()
        each.zero_grad()
        with torch.no_grad():
            found += [*made, each(given), each[0](given)]
            with manager.writing() if each is model else contextlib.nullcontext():
                declare(each.parameters(), True)
                for parameter in each.parameters():
                    parameter.data.mul_(0.99)
        return found

    alike(model, resident, step)
    led(manager.state.engine.stats()["lost_uses"] or not by_rows, "an end is not marked")
    end(model, resident, manager)


def streamed(in_backward: bool) -> None:
    """Weights are stepped on the card while other streams read them."""
    model = table(True)
    resident, manager = attach(model, offload_percent=0.5)
    optimizers = {each: torch.optim.SGD(each.parameters()) for each in (model, resident)}
    stream_optimizer(optimizers[model], during_backward=in_backward)

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = rows()
        compute = functools.partial(each, given)
        if in_backward:
            compute = functools.partial(look_up, each[0], given, each is model and index == 1)
        y = each(given)
        if not in_backward:
            y.square().mean().backward()
        with on_streams(2, compute) as made:
            if each is resident:
                torch.cuda.synchronize()
            if in_backward:
                y.square().mean().backward()
            optimizers[each].step()
        each.zero_grad()
        return [y.detach(), *made]

    alike(model, resident, step)
    led(manager.state.engine.stats()["lost_uses"] or not in_backward, "an end is not marked")
    end(model, resident, manager)


def resized(
    streams: int = 0, coded: bool = False, fault: tuple[str, int] | None = None, **options: Any
) -> None:
    """The arena goes back while copies to it are queued, and other streams read it."""
    model = chain(coded=coded)
    if coded:
        for layer in model[::2]:
            layer.bias = None
    resident, manager = attach(model, **options)
    manager.state.kind.release_cached = lambda: None  # it waits for the card
    if fault:
        Failing(manager.state, release=[fault])
    arena = manager.attachment.arena

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = inputs(each)
        with torch.no_grad():
            found = [each(given)]
            with on_streams(streams, lambda: each(given)) as made:
                nbytes, budget = arena.capacity_bytes, contextlib.nullcontext()
                if each is model:
                    budget = manager.set_budget(vram_budget=2 * nbytes + arena.staging_bytes)
                with budget:
                    fill(3, nbytes + _core.ALIGNMENT)
                    found.append(each(given))
        return [*found, *made]

    alike(model, resident, step)
    with torch.no_grad():
        model(inputs(model))
    end(model, resident, manager)


def replaced() -> None:
    """Masters are replaced while what was queued reads the former ones."""
    model = table(False)
    resident, manager = attach(model)

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = rows()
        with torch.no_grad():
            found = [each(given), each[0](given)]
            for parameter in each.parameters():
                parameter.data = parameter.data * 0.99
            if each is model:
                manager.refresh()
            return [*found, each(given)]

    alike(model, resident, step)
    end(model, resident, manager)


def crowded(fault: tuple[str, int] | None = None) -> None:
    """More streams use a layer than there is room to note."""
    model = chain()
    resident, manager = attach(model, offload_percent=0.5)
    if fault:
        Failing(manager.state, release=[fault])
    streams = [torch.cuda.Stream() for _ in range(6)]

    def step(each: nn.Module, index: int) -> list[Tensor]:
        main, given = torch.cuda.current_stream(), inputs(each)
        found = [[given] for _ in streams]  # all of it is kept: torch's allocator knows one stream
        for stream in streams:
            stream.wait_stream(main)
        with torch.no_grad():
            for layer in each:
                for i, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        found[i].append(layer(found[i][-1]))
            last = each(given)
        for stream in streams:
            main.wait_stream(stream)
        return [last, *(made[-1] for made in found)]

    alike(model, resident, step)
    led(manager.state.engine.stats()["recoveries"] or not fault, "a failure is made good")
    end(model, resident, manager)


def leaving() -> None:
    """Activations leave the card and come back, for steps that two streams take in turn."""
    model = chain()
    resident, manager = attach(model, offload_percent=0.5)
    offload = offload_activations(model, least=1024)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def step(each: nn.Module, index: int) -> list[Tensor]:
        found = []
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                given = inputs(each).requires_grad_()
                y = each(given)
                y.square().mean().backward()
                found += [y.detach(), given.grad]
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return found

    alike(model, resident, step)
    led(offload.counts.left_bytes, "activations leave the card")
    model(inputs(model).requires_grad_())
    offload.remove()
    end(model, resident, manager)


def asked() -> None:
    """Gradients are asked for by themselves, and read at once."""
    model = chain(True)
    resident, manager = attach(model, offload_percent=0.5)

    def step(each: nn.Module, index: int) -> list[Tensor]:
        loss = each(inputs(each)).square().mean()
        return [found.clone() for found in torch.autograd.grad(loss, list(each.parameters()))]

    alike(model, resident, step)
    end(model, resident, manager)


def failing() -> None:
    """A gradient's way home fails half-way; backward is begun again."""
    model = chain(True)
    resident, manager = attach(model, lock="never", offload_percent=0.5)
    once = [None] * 24
    engine = Failing(
        manager.state, download=[("cuEventRecord", 2), *once, ("cuEventRecord", 3), *once]
    )

    def step(each: nn.Module, index: int) -> list[Tensor]:
        for _ in range(4):
            each.zero_grad()
            with contextlib.suppress(DriverError):
                each(inputs(each) * 0 + 1).square().mean().backward()
                break
            fill(4)
        return [parameter.grad.clone() for parameter in each.parameters()]

    alike(model, resident, step)
    led(engine.failed, "a gradient fails")
    end(model, resident, manager)


def travelling() -> None:
    """Bytes leave and come back by calls that fail, or that end in an order of the caller's own."""
    model = chain()
    resident, manager = attach(model)
    engine, nbytes = manager.state.engine, 1 << 16
    buffers = [_core.HostBuffer(nbytes) for _ in range(2)]
    for buffer in buffers:
        engine.lock(buffer)
    first, second = (buffer.address for buffer in buffers)

    def on_card(value: float) -> Tensor:
        return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")

    failed = 0
    # Some are measured: by one more event.
    choices = itertools.product(range(2), ("trip_out", "trip_in"), (False, True), (2, 3))
    for _, call, is_twice, nth in choices:
        there, ticket = on_card(1), None
        ways = (first, there.data_ptr())
        SIMULATOR.set_fault("cuEventRecord", nth)
        if is_twice:  # what is left is waited for by the next trip
            SIMULATOR.set_fault("cuStreamSynchronize", 1)
        try:
            ticket = getattr(engine, call)(*ways[:: 1 if call == "trip_out" else -1], nbytes, 0)
        except DriverError:
            failed += 1
        finally:
            SIMULATOR.clear_faults()
        if ticket is not None:
            engine.trip_await(ticket)
            engine.trip_end(ticket)
        elif is_twice:
            engine.trip_end(engine.trip_out(second, on_card(2).data_ptr(), nbytes, 0))
        SIMULATOR.host_access(first, nbytes, True)
        there.fill_(3)
        judge(f"{call} that fails")
    led(failed >= 8, "a call fails each way, and twice")
    side = torch.cuda.Stream()
    out = engine.trip_out(first, on_card(7).data_ptr(), nbytes, 0)
    with torch.cuda.stream(side):
        there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        back = engine.trip_back(out, there.data_ptr(), side.cuda_stream)
    engine.trip_end(out)
    engine.trip_end(engine.trip_out(first, on_card(8).data_ptr(), nbytes, 0))
    engine.trip_end(back)
    torch.cuda.current_stream().wait_stream(side)
    compare("what comes back", [there], [on_card(7)])
    judge("a trip back")
    for buffer in buffers:
        engine.unlock(buffer)
    end(model, resident, manager)


def recycled() -> None:
    """A stream has the handle of one that has ended, whose kernels go on."""
    model = table(False)
    resident, manager = attach(model)
    driver, given, handles, found = SIMULATOR.library(), rows(), [], []
    torch.cuda.synchronize()
    driver.simSwitch(RECYCLED_STREAMS, 1)
    with torch.no_grad():
        for _ in range(8):
            handle = ctypes.c_void_p()
            driver.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0)
            handles.append(handle.value)
            with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
                found.append(model[0](given))
                if len(handles) % 2:
                    found.append(model[1](found[-1]))
            driver.cuStreamDestroy_v2(handle)
        driver.simSwitch(RECYCLED_STREAMS, 0)
        led(len(set(handles)) == 1, "a handle is used again")
        model(given)
    with manager.writing():
        declare(model.parameters(), True)
    torch.cuda.synchronize()
    compare("a row", found[-1:], [resident[0](given)])
    end(model, resident, manager)


def mixed() -> None:
    """Coded layers with and without a bias, of several sizes, take each other's place."""
    torch.manual_seed(0)
    sizes = ((1, 1, 0), (1, 2, 1), (2, 1, 0), (1, 1, 1), (1, 1, 0), (1, 3, 0), (3, 1, 1), (1, 1, 0))
    layers = [nn.Linear(i * WIDTH, o * WIDTH, bias=bool(bias)) for i, o, bias in sizes]
    model = as_trained(nn.Sequential(*layers).requires_grad_(False), True)
    resident, manager = attach(model, offload_percent=0.8, compress="lossless")

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = inputs(each)
        with torch.no_grad():
            return [each(given), each(given), each[2:](torch.cat([given, given], 1))]

    alike(model, resident, step)
    led(manager.state.engine.stats()["decoded_bytes"], "chunks are decoded")
    end(model, resident, manager)


def from_files() -> None:
    """Weights stay in a file, and nothing more can be page-locked."""
    model = chain(width=1024)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(model.state_dict(), path)
        with oracle_offload.empty_weights():
            empty = chain(width=1024)
        SIMULATOR.set_lock_quota(0)
        manager = oracle_offload.attach(
            empty, "cuda", weights=path, disk=True, ram_budget="9MiB", lock="never"
        )
        resident = model.cuda()

        def step(each: nn.Module, index: int) -> list[Tensor]:
            with torch.no_grad():
                return [each(inputs(each)) for _ in range(2)]

        alike(empty, resident, step, 2)
        led(manager.state.engine.stats()["disk_read_bytes"], "files are read")
        manager.detach()
        SIMULATOR.set_lock_quota(None)


def timed() -> None:
    """A timeline begins and ends while copies are queued."""
    model = chain()
    resident, manager = attach(model, offload_percent=0.5)
    engine = manager.state.engine

    def step(each: nn.Module, index: int) -> list[Tensor]:
        given = inputs(each)
        with torch.no_grad():
            found = [each(given)]
            if each is model:
                engine.trace_start()
            found.append(each(given))
        if each is model and any(row["start_s"] < 0 for row in engine.trace_stop()):
            raise Seen("a row begins before its timeline")
        return found

    alike(model, resident, step)
    end(model, resident, manager)


def fed() -> None:
    """Copy threads are at a layer while it is asked for, its copy is given up, or its ring goes."""
    model = chain()
    resident, manager = attach(model, lock="never")
    arena, engine, driver = manager.attachment.arena, manager.state.engine, SIMULATOR.library()
    manager.state.kind.release_cached = lambda: None  # it waits for the card
    given, ring = inputs(model), 1 << 15  # bytes of a ring that is smaller than a layer
    engine.reserve_rings(ring)
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    with SIMULATOR.trace() as timeline, torch.no_grad():
        model(given)
    (link,) = {row.stream for row in timeline if row.kind == "h2d" and row.stream}

    def forward(meanwhile: Callable[[], object] = lambda: None) -> None:
        """Compute; after the first layer copy threads are at another, and wait for the link."""
        engine.settle()
        torch.cuda.synchronize()
        driver.cuLaunchHostFunc(ctypes.c_void_p(link), sleep, ctypes.c_void_p(30_000))
        with torch.no_grad():
            y = model[0](given)
            meanwhile()
            compare("fed", [model[1:](y)], [expected])

    def resize() -> None:
        nbytes = arena.capacity_bytes
        with manager.set_budget(vram_budget=2 * nbytes):
            fill(3, nbytes + _core.ALIGNMENT)

    def stop_timeline(before: int) -> None:
        rows = engine.trace_stop()
        engine.settle()
        engine.trace_start()  # counts what copy threads have done since
        engine.trace_stop()
        copied = sum(row["bytes"] for row in rows if row["kind"] == "h2d")
        if copied != engine.stats()["h2d_bytes"] - before:
            raise Seen("copies are missing in the timeline")

    with torch.no_grad():
        expected = resident(given)
    for _ in range(2):
        forward()
        forward(manager.refresh)
        forward()
        forward(lambda: model[10](given))  # which was not foreseen
        forward()
        forward(lambda: engine.reserve_rings(2 * ring))
        forward(lambda: engine.reserve_rings(ring))
        forward(resize)
        forward()
        engine.trace_start()
        before = engine.stats()["h2d_bytes"]
        forward(functools.partial(stop_timeline, before))
        judge("fed")
    led(engine.stats()["stopped_feeds"], "a copy is given up")
    end(model, resident, manager)


WAYS: dict[str, Callable[[], None]] = {
    "rewritten": functools.partial(rewritten, False),
    "read in place": functools.partial(rewritten, True),
    "stepped": functools.partial(streamed, False),
    "stepped in backward": functools.partial(streamed, True),
    "resized": resized,
    "resized under streams": functools.partial(resized, 2, offload_percent=0.4),
    "resized, unmarked": functools.partial(resized, 2, fault=UNMARKED, offload_percent=0.4),
    "resized, coded": functools.partial(resized, coded=True, compress="lossless"),
    "replaced": replaced,
    "crowded": crowded,
    "crowded, unmarked": functools.partial(crowded, UNMARKED),
    "crowded, unordered": functools.partial(crowded, UNORDERED),
    "leaving": leaving,
    "asked": asked,
    "failing": failing,
    "travelling": travelling,
    "recycled": recycled,
    "mixed": mixed,
    "from files": from_files,
    "trained": functools.partial(trained, True, offload_percent=0.5),
    "trained, streamed": functools.partial(trained, True, steps=True, offload_percent=0.5),
    "coded": functools.partial(trained, coded=True, compress="lossless"),
    "timed": timed,
    "fed": fed,
}


def main() -> int:
    for schedule, seed in SCHEDULES:
        for name, way in WAYS.items():
            SIMULATOR.set_schedule(SIMULATOR.Schedule[schedule], seed)
            try:
                way()
            except Seen as error:
                print(f"{schedule.lower()}:{seed}, {name}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
