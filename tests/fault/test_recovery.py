"""What a user meets when the driver fails: which exception, what is logged, what goes on."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_training_faults import release_contexts  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload import DriverError, NoRoomError, OffloadError, _core  # noqa: E402
from oracle_offload.engine import engines, simulator  # noqa: E402
from oracle_offload.model import masters  # noqa: E402
from oracle_offload.train import stepping, stream_optimizer  # noqa: E402

OUT_OF_MEMORY, INVALID_HANDLE, ILLEGAL_ADDRESS, NO_RESOURCES = 2, 400, 700, 701


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    simulator.reset()
    yield
    simulator.clear_faults()
    gc.collect()
    assert not engines.open_states()
    assert not simulator.reports()
    simulator.reset()  # refuses while anything is alive


class Said:
    """The texts that the package warned with."""

    def __init__(self, caplog: Any) -> None:
        self.caplog = caplog

    def __call__(self) -> list[str]:
        return [r.getMessage() for r in self.caplog.records if r.name == "oracle_offload"]

    def clear(self) -> None:
        self.caplog.clear()


@pytest.fixture
def warnings(caplog: Any) -> Said:
    caplog.set_level(logging.WARNING, logger="oracle_offload")
    return Said(caplog)


def frozen(layers: int = 6, width: int = 64) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    return model.requires_grad_(False)


def attach(model: Any) -> Any:
    return oracle_offload.attach(model, "cpu", offload_percent=1.0)


def test_a_refused_registration_is_one_warning_and_the_same_bits(warnings: Said) -> None:
    model, x = frozen(), torch.randn(3, 64)
    wanted = model(x)
    for code in (NO_RESOURCES, OUT_OF_MEMORY, 801):
        simulator.set_fault("cuMemHostRegister", 1, code, lasting=True)
        manager = attach(model)
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        stats = manager.state.engine.stats()
        assert stats["pageable_bytes"] == sum(p.nbytes for p in model.parameters())
        manager.detach()
        simulator.clear_faults()
        assert len(warnings()) == 1, warnings()
        (text,) = warnings()
        assert "page-lock" in text and "cuMemHostRegister" in text and str(code) in text
        assert "lock=" in text
        warnings.clear()


def test_each_wait_of_a_recovery_is_counted() -> None:
    """A use whose end cannot be marked is waited for only before its memory is overwritten."""
    model, x = frozen(width=512), torch.randn(3, 512)
    wanted = model(x)
    manager = attach(model)
    for _ in range(3):
        model(x)
    before, waits = manager.state.engine.stats(), simulator.stats().host_waits
    records = simulator.call_count("cuEventRecord")
    model(x)
    records = simulator.call_count("cuEventRecord") - records
    stats = manager.state.engine.stats()
    assert stats["recoveries"] == before["recoveries"] and simulator.stats().host_waits == waits
    moved = 0
    for nth in range(1, records + 1):
        simulator.set_fault("cuEventRecord", nth, NO_RESOURCES)
        before, waits = manager.state.engine.stats(), simulator.stats().host_waits
        failed = False
        for _ in range(3):
            try:
                assert torch.equal(model(x), wanted)
            except DriverError:
                failed = True
        stats = manager.state.engine.stats()
        recoveries = stats["recoveries"] - before["recoveries"]
        lost = stats["lost_uses"] - before["lost_uses"]
        given_up = stats["prefetch_failures"] - before["prefetch_failures"]
        assert failed or lost or given_up, "no failure was noticed"
        assert recoveries == simulator.stats().host_waits - waits, "a wait that is not counted"
        assert recoveries <= lost
        moved += recoveries
    assert moved > 0
    manager.detach()


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuMemHostUnregister", "cuCtxGetCurrent"])
def test_detach_returns_whatever_lasts_and_the_next_attach_gives_back(
    call: str, warnings: Said
) -> None:
    model, x = frozen(), torch.randn(3, 64)
    wanted = model(x)
    manager = attach(model)
    model(x)
    simulator.set_fault(call, 1, NO_RESOURCES, lasting=True)
    manager.detach()
    assert "_memory_manager" not in model.__dict__
    assert torch.equal(model(x), wanted)
    told = warnings()
    assert len(told) == 2 and "second attempt" in told[0] and "given back yet" in told[1]
    assert all(call in text and str(NO_RESOURCES) in text for text in told)
    if call == "cuCtxGetCurrent":
        for _ in range(2):
            with pytest.raises(DriverError, match=call):
                attach(model)
    simulator.clear_faults()
    manager = attach(model)
    assert torch.equal(model(x), wanted)
    manager.detach()


def test_detach_tries_again_what_failed_once(warnings: Said) -> None:
    model = frozen()
    manager = attach(model)
    simulator.set_fault("cuMemHostUnregister", 1, NO_RESOURCES)
    manager.detach()
    (text,) = warnings()
    assert "second attempt" in text and "cuMemHostUnregister" in text
    assert simulator.live().registrations == 0


def test_a_destroy_that_fails_is_logged(warnings: Said) -> None:
    model = frozen()
    manager = attach(model)
    simulator.set_fault("cuEventDestroy", 3, INVALID_HANDLE)
    manager.detach()
    (text,) = warnings()
    assert "1 driver objects could not be given back, the first: cuEventDestroy" in text
    assert simulator.reports("lint")[0].count("1 events not destroyed") == 1
    simulator.clear_reports()  # the event went with the context


def test_a_destroy_that_fails_where_nobody_can_be_told_is_shown(monkeypatch: Any) -> None:
    """A deallocation cannot raise: Python shows it as it shows exceptions of finalizers."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: shown.append(seen.exc_value))
    engine = _core.Engine(str(simulator.library_path()), 0)
    simulator.set_fault("cuStreamDestroy", 1, INVALID_HANDLE)
    del engine
    assert [error.call for error in shown] == ["cuStreamDestroy"]
    simulator.clear_reports()  # the stream went with the context


def test_running_out_of_memory_is_torchs_error_and_ours() -> None:
    model, x = frozen(), torch.randn(3, 64)
    wanted = model(x)
    manager = attach(model)
    simulator.set_fault("cuMemcpyHtoDAsync", 1, OUT_OF_MEMORY, lasting=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x)
    error = caught.value
    assert isinstance(error, DriverError) and error.code == OUT_OF_MEMORY
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.call == error.call
    simulator.clear_faults()
    assert torch.equal(model(x), wanted)
    manager.detach()


def test_an_arena_that_does_not_fit_is_out_of_memory() -> None:
    with (
        simulator.device("rtx4090", memory_bytes=8e4),
        pytest.raises(torch.OutOfMemoryError, match="simAdopt"),
    ):
        attach(frozen(width=128))


def test_no_room_in_the_arena_and_no_host_memory_are_different_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one is cured by a smaller model on the device, the other by more RAM."""
    model, x = frozen(width=128), torch.randn(3, 128)
    manager = attach(model)
    engine, stream = manager.state.engine, manager.state.stream()
    tickets = [
        engine.acquire(layer.member, stream, layer.stamp(), _core.FORWARD, -1, 0.0)[0]
        for layer in manager.layers[:2]  # two units fill the arena
    ]
    with pytest.raises(torch.OutOfMemoryError, match=r"layer '2'.*vram_budget") as e:
        model(x)
    assert isinstance(e.value, NoRoomError) and not isinstance(e.value, MemoryError)
    copy = pickle.loads(pickle.dumps(e.value))
    assert type(copy) is type(e.value) and str(copy) == str(e.value)
    for ticket in tickets:
        engine.release(ticket, stream)
    model(x)
    manager.detach()
    monkeypatch.setattr(masters, "HostBuffer", lambda nbytes, node: _core.HostBuffer(1 << 60))
    with pytest.raises(MemoryError, match=r"no .* GiB of memory left") as e:
        attach(frozen())
    assert not isinstance(e.value, torch.OutOfMemoryError)


def test_a_swapped_weight_is_found_again_after_the_move_failed() -> None:
    """The engine copies from the old memory until it knows of the new one."""
    model, x = frozen(), torch.randn(3, 64)
    manager = attach(model)
    model(x)
    model[2].weight.data = 3 * model[2].weight.data
    wanted = torch.nn.functional.linear(x, model[2].weight.clone(), model[2].bias.clone())
    simulator.set_fault("cuCtxGetCurrent", 1, NO_RESOURCES)
    with pytest.raises(DriverError):
        model[2](x)
    assert torch.equal(model[2](x), wanted), "computed with the weight from before"
    manager.detach()


def test_an_arena_that_could_not_grow_stays_as_it_was(warnings: Said) -> None:
    """Whichever call of the driver fails, the model trains on in the arena that it has."""
    model, x = frozen(8, 512), torch.randn(3, 512)

    def half(layers: Any, y: Any) -> Any:
        for layer in layers:
            y = torch.tanh(layer(y))
        return y

    def step() -> Any:
        y = x.clone().requires_grad_()
        for layers in (model[:4], model[4:]):
            y = torch.utils.checkpoint.checkpoint(half, layers, y, use_reentrant=False)
        return y

    wanted = step()
    for call in ("cuMemGetInfo", "simAdopt", "cuStreamIsCapturing", "cuEventRecord"):
        manager = attach(model)
        arena, engine = manager.attachment.arena, manager.state.engine
        begun = arena.capacity_bytes
        while engine.stats()["learned_block_bytes"] <= arena.floor_bytes:
            step().sum().backward()
        # Nothing but the growth calls these between the begin of a forward and its second layer.
        simulator.set_fault(call, 1, NO_RESOURCES)
        manager.state.begin_forward()
        simulator.clear_faults()
        assert any(f"the arena stays at 2.00 MiB: {call}" in text for text in warnings()), call
        assert arena.capacity_bytes == begun == engine.stats()["arena_bytes"]
        assert list(manager.state.segments) == arena.segments
        for _ in range(3):
            result = step()
            assert torch.equal(result, wanted)
            result.sum().backward()
        manager.detach()


def test_an_attach_that_fails_leaves_nothing_open() -> None:
    """Wherever attach fails, the engine that it opened is closed again."""
    model = frozen()
    made = simulator.call_count()
    manager = attach(model)
    calls = simulator.call_count() - made
    manager.detach()
    failed = 0
    for nth in range(1, calls + 1, 3):
        simulator.set_fault(None, nth, NO_RESOURCES)
        try:
            attach(model).detach()
        except OffloadError as error:
            failed += 1
            assert not engines.open_states(), f"{nth}: {error}"
        simulator.clear_faults()
        live = simulator.live()
        assert live.contexts == live.events == live.registrations == live.adopted_bytes == 0, nth
    assert failed > calls / 6
    simulator.clear_reports()  # of events that a fault kept from being destroyed


# ---- an optimizer that steps on the device ----


class Trained:
    """A model that trains fully, and a copy of it that is resident."""

    def __init__(self, during_backward: bool = False) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(128, 128) for _ in range(5)]
        self.models = torch.nn.Sequential(*layers), copy.deepcopy(torch.nn.Sequential(*layers))
        self.manager = attach(self.models[0])
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in self.models]
        stream_optimizer(self.optimizers[0], during_backward=during_backward)

    def loss(self, seed: int, which: int) -> Any:
        torch.manual_seed(seed)
        return self.models[which](torch.randn(3, 128)).square().mean()

    def backward(self, seed: int, which: int) -> None:
        self.models[which].zero_grad()
        self.loss(seed, which).backward()

    def step(self, seed: int) -> None:
        for which, optimizer in enumerate(self.optimizers):
            self.backward(seed, which)
            optimizer.step()

    def tensors(self, which: int) -> list[Any]:
        """Weights and states, copied."""
        optimizer = self.optimizers[which]
        found = [p.detach() for p in self.models[which].parameters()]
        for parameter in self.models[which].parameters():
            found += optimizer.state.get(parameter, {}).values()
        return [tensor.clone() for tensor in found]


@pytest.fixture
def trained(nothing_is_left: None) -> Any:
    made = Trained()
    yield made
    simulator.clear_faults()
    made.manager.detach()


def rare(trained: Trained) -> int:
    """Count the failed calls of the engine that raise no error and log no warning."""
    stats = trained.manager.state.engine.stats()
    return sum(stats[name] for name in ("recoveries", "prefetch_failures", "lost_uses"))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# What a fault of each call may end as: before anything is stepped, or once something is.
STEP_CALLS = {
    "cuMemcpyHtoDAsync": {"untouched", "completed"},
    "cuMemcpyDtoHAsync": {"completed"},
    "cuEventRecord": {"untouched", "completed"},
    "cuStreamWaitEvent": {"untouched", "completed"},
    "cuEventSynchronize": {"completed"},
}


@pytest.mark.parametrize("call", STEP_CALLS)
def test_a_streamed_step_is_whole_or_not_begun_after_a_fault(
    call: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of one step fails: nothing was stepped, or all was, with the resident's bits."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 4 * 4 * 128**2)  # a layer at a time
    trained.step(0)
    trained.backward(1, 0)
    trained.backward(1, 1)
    before = simulator.call_count(call)
    trained.optimizers[0].step()
    calls = simulator.call_count(call) - before
    trained.optimizers[1].step()
    ends = set()
    for number, nth in enumerate(range(1, calls + 1, 1 + calls // 8), start=2):
        for which in (0, 1):
            trained.backward(number, which)
        began, end = trained.tensors(0), "unnoticed"
        counted, before = rare(trained), simulator.call_count(call)
        with simulator.fault(call, nth, NO_RESOURCES):
            try:
                trained.optimizers[0].step()
            except DriverError as error:
                end = "completed" if getattr(error, "__notes__", ()) else "untouched"
        if end == "unnoticed" and simulator.call_count(call) - before < nth:
            end = "not met"  # this step made fewer calls
        elif end == "unnoticed" and rare(trained) > counted:
            end = "counted"  # something else was done instead
        ends.add(end)
        if end == "untouched":
            assert same(trained.tensors(0), began), "nothing has changed"
            trained.optimizers[0].step()
        trained.optimizers[1].step()
        assert same(trained.tensors(0), trained.tensors(1)), f"call {nth} of {calls}"
    assert ends - {"counted", "not met"} == STEP_CALLS[call]


def test_while_a_fault_lasts_a_streamed_step_is_refused_and_detach_returns(
    trained: Trained,
) -> None:
    trained.step(0)
    for which in (0, 1):
        trained.backward(1, which)
    began = trained.tensors(0)
    with simulator.fault("cuMemcpyHtoDAsync", 1, NO_RESOURCES, lasting=True):
        for _ in range(2):
            with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"):
                trained.optimizers[0].step()
            assert same(trained.tensors(0), began)
    for optimizer in trained.optimizers:
        optimizer.step()
    assert same(trained.tensors(0), trained.tensors(1))
    trained.backward(2, 0)
    with simulator.fault("cuMemcpyDtoHAsync", 1, NO_RESOURCES, lasting=True):
        with pytest.raises(DriverError, match="cuMemcpyDtoHAsync"):
            trained.optimizers[0].step()
        with pytest.raises(OffloadError, match="takes no further step"):
            trained.optimizers[0].step()


@pytest.mark.parametrize("during_backward", [False, True])
@pytest.mark.parametrize("call", STEP_CALLS)
def test_a_context_lost_in_a_streamed_step_steps_nothing_twice_and_is_told(
    during_backward: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some call on the driver refuses all: no step goes on, and what is at home stays so."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 4 * 4 * 128**2)  # a layer at a time
    ends: list[str] = []
    nth = calls = 0
    while nth <= calls:  # the first one is undisturbed, and counts
        trained = Trained(during_backward)
        trained.step(0)
        for which in (0, 1):
            trained.models[which].zero_grad()
        losses = [trained.loss(1, which) for which in (0, 1)]
        losses[1].backward()
        if not during_backward:
            losses.pop(0).backward()
        once, began = trained.optimizers[1], trained.tensors(0)
        once.step()
        met = simulator.call_count(call)
        with simulator.fault(call, nth or 10**9, ILLEGAL_ADDRESS):
            try:
                if during_backward:
                    losses.pop(0).backward()
                trained.optimizers[0].step()
                end = "completed"  # the call was not met, or is none that anybody waits for
            except OffloadError as error:
                end = "stopped"
                assert str(ILLEGAL_ADDRESS) in str(error), error
        losses.clear()
        gc.collect()
        calls = calls if nth else simulator.call_count(call) - met
        ends.append(end)
        now = trained.tensors(0)
        for mine, before, after in zip(now, began, trained.tensors(1), strict=True):
            known = (mine == before) | (mine == after)
            assert known.all(), "stepped twice, or by half"
        if end == "stopped":
            for _ in range(2):
                with pytest.raises(OffloadError, match=r"no further step|restart"):
                    trained.optimizers[0].step()
                with pytest.raises(OffloadError, match=r"restart"):
                    trained.backward(2, 0)
            assert same(trained.tensors(0), now)
        trained.manager.detach()
        assert same(trained.tensors(0), now), "detach leaves the weights where they are"
        del trained, once
        gc.collect()
        simulator.clear_faults()  # a new process
        release_contexts()
        nth += 1 + calls // 12
    assert ends[0] == "completed" and ends.count("stopped") >= len(ends) // 2, ends
