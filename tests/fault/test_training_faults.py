"""Any driver call of a training run may fail, with any CUresult: attach, three steps, detach.

After a transient fault the run goes on as if it had never failed; while a fault lasts there is the
same clear error each time and never a hang, and detach returns; afterwards nothing is left behind.
After a lost context every call names the first failure, and the weights are there. No fault passes
unnoticed. The default run takes a sample of the calls, `-m proof` takes every one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_offload  # noqa: E402
from oracle_offload import DriverError, OffloadError  # noqa: E402
from oracle_offload.engine import engines, simulator  # noqa: E402
from oracle_offload.model import masters  # noqa: E402

OUT_OF_MEMORY, NO_RESOURCES = 2, 701
TRANSIENT = (NO_RESOURCES, 1, OUT_OF_MEMORY, 400, 600, 801)
STICKY = (700, 719)
STEPS = 3
WORKERS = 2
PATIENCE_S = 60

# Counters that the summary shows.
RARE = ("recoveries", "prefetch_failures", "lost_uses", "lock_refusals")
# Calls whose failure loses a measurement and nothing else.
MEASURES = ("cuEventElapsedTime",)
# Answers and no failures: the caller waits; an older driver does not know where its device is.
ANSWERS = {("cuEventQuery", 600), ("cuDeviceGetAttribute", 1), ("cuDeviceGetAttribute", 801)}
# Every call that can fail; those that a life does not make are left out by their count.
_DRIVER = Path(__file__).resolve().parents[2] / "csrc" / "driver" / "driver.h"
KINDS = re.findall(r"^  X\((cu(?!GetError)\w+),", _DRIVER.read_text("utf-8"), re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """The `nth` call of a name (None: of any) returns `code`, once or from then on."""

    call: str | None
    nth: int
    code: int = NO_RESOURCES
    lasting: bool = False


class Net(torch.nn.Module):
    """Two frozen layers in a checkpoint, a trainable one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.second = torch.nn.Linear(16, 16, bias=False)
        self.last = torch.nn.Linear(16, 8)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def block(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Any) -> Any:
        x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return self.last(torch.tanh(x))


class Run:
    """A model, its optimizer and its data: the same each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.last.parameters(), lr=0.1)
        self.x = torch.randn(4, 16)

    def step(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(self.x.detach().requires_grad_()).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def swap(self) -> None:
        """Put another frozen weight in place, as an EMA does: the engine must follow."""
        self.model.second.weight.data = 2 * self.model.second.weight.data

    def attempts(self) -> Callable[[], Any]:
        """A step that can be repeated: it starts from the weights as they are now."""
        weights = [p.detach().clone() for p in self.model.last.parameters()]

        def attempt() -> Any:
            with torch.no_grad():
                for p, w in zip(self.model.last.parameters(), weights, strict=True):
                    p.copy_(w)
            return self.step()

        return attempt

    def weights(self) -> list[Any]:
        return [p.detach().clone() for p in self.model.parameters()]


def expected() -> tuple[list[Any], list[list[Any]]]:
    """The resident run's losses, and its weights before each step and at the end."""
    run = Run()
    losses, weights = [], [run.weights()]
    for step in range(STEPS):
        if step == 1:
            run.swap()
        losses.append(run.step())
        weights.append(run.weights())
    return losses, weights


LOSSES, WEIGHTS = expected()


class Log(logging.Handler):
    """What the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        # As many handlers do; with a record live its error's frames, and what those hold.
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        text = record.getMessage()
        if record.exc_info:
            text += f": {record.exc_info[1]}"
        self.texts.append(text)

    def __enter__(self) -> Log:
        logging.getLogger("oracle_offload").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("oracle_offload").removeHandler(self)


def attach(run: Run) -> Any:
    return oracle_offload.attach(run.model, "cpu", offload_percent=1.0)


def check_clear(error: Any, fault: Fault) -> None:
    """The error of this fault: the call, the code, torch's own type where memory ran out."""
    assert isinstance(error, DriverError), f"{type(error).__name__}: {error}"
    assert error.code == fault.code, error
    assert error.call and (fault.call in (None, error.call)), error
    assert error.call in str(error) and str(fault.code) in str(error), error
    assert isinstance(error, torch.OutOfMemoryError) == (fault.code == OUT_OF_MEMORY), error


def persist(action: Callable[[], Any], fault: Fault, errors: list[str]) -> Any:
    """Repeat `action` after an error: once, or, while it lasts, twice before it is lifted."""
    said: list[str] = []
    while True:
        try:
            return action()
        except (OffloadError, torch.OutOfMemoryError) as error:
            check_clear(error, fault)
            said.append(str(error))
        errors.append(said[-1])
        # Of any call, the next attempt meets the fault earlier than the first did.
        same = said[1:] if fault.call is None else said
        assert len(set(same)) <= 1, f"not the same each time: {said}"
        assert len(said) <= 3 and (fault.lasting or len(said) == 1), said
        if not fault.lasting or len(said) == 3:
            simulator.clear_faults()


def live_objects() -> dict[str, int]:
    live = simulator.live()
    names = "streams events contexts registrations adopted_bytes host_alloc_bytes queued".split()
    return {name: getattr(live, name) for name in names if getattr(live, name)}


def leave_contexts() -> None:
    """Begin as a thread does: in no context. An earlier life may have left this one in its own."""
    library = ctypes.CDLL(str(simulator.library_path()))
    current = ctypes.c_void_p()
    while library.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value:
        library.cuCtxPopCurrent_v2(ctypes.byref(current))


def release_contexts() -> None:
    """With the last hold on a context goes all that a failed destroy has left in it."""
    library = ctypes.CDLL(str(simulator.library_path()))
    leave_contexts()
    while simulator.live().contexts:
        library.cuDevicePrimaryCtxRelease_v2(0)
    simulator.clear_reports()


def check_ordinary(run: Run, weights: list[Any]) -> None:
    """Detached: an ordinary model, with the weights it should have."""
    assert "_memory_manager" not in run.model.__dict__
    for found, wanted in zip(run.model.parameters(), weights, strict=True):
        assert torch.equal(found, wanted), "a weight differs after detach"
    assert torch.isfinite(run.model(run.x)).all()


def train(run: Run, fault: Fault, errors: list[str]) -> None:
    for step in range(STEPS):
        if step == 1:
            run.swap()
        loss = persist(run.attempts(), fault, errors)
        assert torch.equal(loss, LOSSES[step]), f"step {step} differs"


def check_new_attachment() -> None:
    """Whatever happened, a new attachment works, and leaves nothing behind."""
    run = Run()
    manager = attach(run)
    assert torch.equal(run.step(), LOSSES[0]), "a new attachment differs"
    manager.detach()


def life(fault: Fault) -> None:
    """Attach, train, detach with a fault that passes or is lifted."""
    run: Any = Run()
    errors: list[str] = []
    leave_contexts()
    with Log() as log:
        made = simulator.call_count(fault.call)
        if fault.nth:
            simulator.set_fault(fault.call, fault.nth, fault.code, lasting=fault.lasting)
        manager = persist(lambda: attach(run), fault, errors)
        train(run, fault, errors)
        stats = persist(manager.state.engine.stats, fault, errors)
        manager.detach()
        struck = simulator.call_count(fault.call) - made >= fault.nth > 0
        simulator.clear_faults()
    assert struck or not fault.nth, "it never struck"
    check_ordinary(run, WEIGHTS[STEPS])
    counted = sum(stats[name] for name in RARE)
    noticed = errors or log.texts or counted
    harmless = fault.call in (None, *MEASURES) or (fault.call, fault.code) in ANSWERS
    assert noticed or not struck or harmless, "no failure was noticed"
    assert fault.nth or not noticed, (errors, log.texts)
    if fault.call == "cuMemHostRegister":
        assert not errors and stats["lock_refusals"], "a refusal is no error"
        # Later, the rings make room for a second try.
        assert stats["pageable_bytes"] or (fault.nth > 1 and not fault.lasting)
        told = [text for text in log.texts if "page-lock" in text]
        # The second is of gradients' memory: what is refused once, to them alone, is counted.
        assert len(told) == (fault.nth != 2 or fault.lasting), log.texts
    manager = run = None
    gc.collect()
    if fault.lasting:  # detach has left to the next attach what a lasting fault kept it from
        check_new_attachment()
    lost = [text for text in log.texts if "could not be given back, the first" in text]
    lost += [text for text in errors if "could not be given back, the first" in text]
    if lost:  # logged, and the test cannot repeat it: excluded from the count of leaks
        release_contexts()
    assert not simulator.reports(), simulator.reports()[0]
    assert not live_objects(), live_objects()


def death(fault: Fault) -> None:
    """Attach and train until the context is lost; each later call says so, and detach returns."""
    run: Any = Run()
    done, manager = 0, None
    leave_contexts()
    simulator.set_fault(fault.call, fault.nth, fault.code)
    made = simulator.call_count(fault.call)
    with Log() as log:
        try:
            manager = attach(run)
            for step in range(STEPS):
                if step == 1:
                    run.swap()
                run.step()
                done += 1
            manager.state.engine.stats()  # a life makes as many calls
        except DriverError as error:
            check_clear(error, fault)
            assert "restart" in str(error) or manager is None, error
            for action in (lambda: run.model(run.x), run.step, lambda: attach(Run())) * 2:
                if manager is not None:
                    with pytest.raises(DriverError) as caught:
                        action()
                    check_clear(caught.value, fault)
                    assert "restart" in str(caught.value), caught.value
        if manager is not None:
            manager.detach()
    struck = simulator.call_count(fault.call) - made >= fault.nth
    assert struck, "it never struck"
    assert done < STEPS or log.texts, "no failure was noticed"
    # The weights are those before the step that failed, or, where its end failed, those after it.
    frozen = WEIGHTS[done + 1 if done == 1 else done][:3]
    if done == 1 and torch.equal(run.model.second.weight, WEIGHTS[1][2]):
        frozen = WEIGHTS[1][:3]
    trained = list(run.model.last.parameters())
    before, after = WEIGHTS[done][3:], WEIGHTS[min(done + 1, STEPS)][3:]
    assert any(all(map(torch.equal, trained, wanted)) for wanted in (before, after))
    check_ordinary(run, [*frozen, *trained])
    simulator.clear_faults()  # a new process
    release_contexts()
    manager = run = None
    gc.collect()
    assert not live_objects(), live_objects()
    assert not engines.open_states()
    check_new_attachment()


# ---- sweeps, in workers that a life may bring down ----


def keep_freed_memory() -> None:
    """Lives take and give back rings of 16 MiB: do not fault those pages in each time."""
    masters.trim_heap = lambda: None
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def lives(work: list[Fault], sender: Any) -> None:
    """Live with each fault; send its number, or what went wrong with it."""
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("oracle_offload").addHandler(logging.NullHandler())
    gc.collect()
    gc.freeze()  # collections between lives need not look at torch
    for number, fault in enumerate(work):
        try:
            simulator.reset()
            (death if fault.code in STICKY else life)(fault)
            assert not engines.open_states()
        except BaseException:
            sender.send(traceback.format_exc())
            return
        sender.send(number + 1)


class Worker:
    """A forked process that lives with its share of the faults."""

    def __init__(self, work: list[Fault]) -> None:
        self.work, self.done = work, 0
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.receiver.close()
                lives(work, sender)
            finally:
                os._exit(0)
        sender.close()

    def watch(self) -> Iterator[int]:
        """Yield the number of lives so far; raises for one that fails, hangs or crashes."""
        while self.done < len(self.work):
            fault = self.work[self.done]
            assert self.receiver.poll(PATIENCE_S), f"{fault}: it hangs"
            try:
                answer = self.receiver.recv()
            except EOFError:
                raise AssertionError(f"{fault}: the process died") from None
            assert isinstance(answer, int), f"{fault}: {answer}"
            self.done = answer
            yield answer

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.receiver.close()


SWEPT: list[dict[str, int | str]] = []  # by the test that runs


@pytest.fixture(autouse=True)
def figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Put what a test swept into the report that --junitxml writes: tools/proof.py reads it."""
    SWEPT.clear()
    yield
    for row in SWEPT:
        record_property("faults", json.dumps({**row, "calls_in_a_life": plain().calls}))


def sweep(what: str, work: list[Fault], of: int) -> None:
    """Live with all of `work`, in parallel; say how far it is when that takes long."""
    workers = [Worker(work[first::WORKERS]) for first in range(WORKERS)]
    start = said = time.monotonic()
    try:
        turns = [worker.watch() for worker in workers]
        while turns:
            turns = [turn for turn in turns if next(turn, None) is not None]
            if time.monotonic() - said > 2:
                said = time.monotonic()
                done = sum(worker.done for worker in workers)
                print(f"{what}: {done} of {len(work)}", flush=True)
    finally:
        for worker in workers:
            worker.end()
    seconds = time.monotonic() - start
    print(f"faults: {len(work)} of {of} calls, {what} ({seconds:.0f} s)", flush=True)
    SWEPT.append({"injected": len(work), "of": of, "what": what})


@dataclass(frozen=True)
class Plain:
    """The calls of a life without a fault: all, and by kind."""

    calls: int
    kinds: dict[str, int]


@functools.cache
def plain() -> Plain:
    """Live once without a fault, in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            simulator.reset()
            run = Run()
            manager = attach(run)
            train(run, Fault(None, 0), [])
            manager.state.engine.stats()
            manager.detach()
            kinds = {kind: simulator.call_count(kind) for kind in KINDS}
            sender.send((simulator.call_count(), kinds))
        except BaseException:
            sender.send(traceback.format_exc())
        finally:
            os._exit(0)
    answer = receiver.recv()
    os.waitpid(child, 0)
    assert isinstance(answer, tuple), answer
    total, kinds = answer
    assert sum(kinds.values()) == total > 500, "a kind of call is missing in KINDS"
    return Plain(total, {kind: count for kind, count in kinds.items() if count})


def by_kind(codes: tuple[int, ...], *, lasting: bool = False) -> list[Fault]:
    """Each call of each kind with each code."""
    return [
        Fault(kind, nth, code, lasting)
        for code in codes
        for kind, count in plain().kinds.items()
        for nth in range(1, count + 1)
    ]


def test_a_call_fails_once() -> None:
    work = by_kind(TRANSIENT)
    sweep("once, six codes", work[::61], len(work))


def test_a_kind_of_call_fails_for_a_while() -> None:
    work = by_kind(TRANSIENT, lasting=True)
    sweep("with all of their kind until lifted, six codes", work[::89], len(work))


def test_all_calls_fail_for_a_while() -> None:
    total = plain().calls
    work = [Fault(None, nth, lasting=True) for nth in range(1, total + 1)]
    sweep("and every one after it until lifted", work[::41], total)


def test_the_context_is_lost() -> None:
    work = by_kind(STICKY)
    sweep("losing the context, two codes", work[::53], len(work))


@pytest.mark.proof
@pytest.mark.slow
def test_every_call_fails_once() -> None:
    work = by_kind(TRANSIENT)
    sweep("once, six codes", work, len(work))


@pytest.mark.proof
@pytest.mark.slow
def test_every_kind_of_call_fails_for_a_while() -> None:
    work = by_kind((NO_RESOURCES, OUT_OF_MEMORY), lasting=True)
    sweep("with all of their kind until lifted, two codes", work, len(work))


@pytest.mark.proof
@pytest.mark.slow
def test_all_calls_fail_for_a_while_from_every_one_on() -> None:
    total = plain().calls
    work = [Fault(None, nth, lasting=True) for nth in range(1, total + 1)]
    sweep("and every one after it until lifted", work, total)


@pytest.mark.proof
@pytest.mark.slow
def test_the_context_is_lost_at_every_call() -> None:
    work = by_kind(STICKY)
    sweep("losing the context, two codes", work, len(work))
