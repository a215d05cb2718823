"""User code raises at every module boundary of forward and backward: the next step is unharmed.

A boundary is one run of a forward pre-hook, forward hook, backward pre-hook or backward hook of any
module, containers included, also while a checkpoint recomputes. Each is made to raise in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import pytest
import torch
from equality import Recorder, assert_models_agree, assert_same, attached, resident_pair
from models import checkpointed
from torch import Tensor, nn

REGISTER = {
    "forward pre": nn.Module.register_forward_pre_hook,
    "forward": nn.Module.register_forward_hook,
    "backward pre": nn.Module.register_full_backward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 192), nn.Tanh(), nn.Linear(192, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Net(nn.Module):
    """A picture of tokens: resident embedding and norms, managed convolution and linear layers.

    The first block is frozen, the second trains; `reentrant` says how both are checkpointed.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4, bias=False)
        self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2).reshape(-1, 8, 4, 4)
        x = self.conv(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpointed(block, x, reentrant=self.reentrant)
        return self.head(x)


def pair(reentrant: bool | None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return resident_pair(Net(reentrant))


class Stack(nn.Module):
    """Matrices in one Parameter, of which a view is used, and a child inside of the loan."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.einsum("bth,eoh->bto", x, self.matrices.transpose(1, 2))
        return torch.tanh(self.inner(stacked)) * self.matrices[0, 0]


class Lending(Net):
    """The same, with modules whose own forward computes with what it is lent; its norms are."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(reentrant)
        for block in self.blocks:
            block.body = nn.Sequential(Stack(), nn.LayerNorm(8))
        self.blocks[0].requires_grad_(False)


def micro_step(
    model: nn.Module, device: torch.device | None = None, cast: bool = False
) -> list[Tensor]:
    # Where it computes: the norms stay there, the embedding is managed.
    ids = torch.randint(0, 11, (2, 16)).to(device or model.blocks[0].norm.weight.device)
    context = torch.autocast(ids.device.type, torch.bfloat16) if cast else contextlib.nullcontext()
    with context:
        y = model(ids)
        loss = y.float().square().mean()
    loss.backward()
    return [loss, y]


def two_micro_steps(model: nn.Module) -> list[Tensor]:
    """Gradients of two batches are added up, each computed under autocast."""
    return [*micro_step(model, cast=True), *micro_step(model, cast=True)]


class Raising:
    """While it lasts, the hooks of one kind of all modules; the `at`-th run of one raises."""

    def __init__(self, model: nn.Module, kind: str, at: int, error: Exception) -> None:
        self.model, self.kind, self.at, self.error = model, kind, at, error
        self.runs = 0
        self.seen: set[nn.Module] = set()

    def hook(self, module: nn.Module, *_: Any) -> None:
        self.runs += 1
        self.seen.add(module)
        if self.runs == self.at:
            # Who keeps it keeps its frames, with which torch 2.6 ends a checkpoint.
            raise self.__dict__.pop("error")

    def __enter__(self) -> Raising:
        register = REGISTER[self.kind]
        self.handles = [register(module, self.hook) for module in self.model.modules()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def check_nothing_held(manager: Any, where: str) -> None:
    pinned = [row for row in manager.state.engine.residents() if row[-1]]
    assert not pinned, f"{where}: units still in use: {pinned}"


def boundaries(model: nn.Module, kind: str, step: Any) -> int:
    with Raising(model, kind, 0, RuntimeError()) as counting:
        step(model)
    # A ModuleList is never called.
    every = {module for module in model.modules() if not isinstance(module, nn.ModuleList)}
    assert counting.seen == every, "a module without a boundary"
    return counting.runs


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", REGISTER)
def test_an_exception_at_any_boundary_ends_what_is_lent(device, kind, reentrant, nothing_is_small):
    managed, resident = resident_pair(Lending(reentrant))
    resident.to(device)

    def step(model: nn.Module) -> list[Tensor]:
        return micro_step(model, torch.device(device))

    with attached(managed, device, offload_percent=1.0) as manager:
        assert manager.resident == {}
        assert sum(layer.lends_to_code for layer in manager.layers) == 6
        assert_models_agree(managed, resident, step, steps=1, device=device)
        count = boundaries(managed, kind, step)
        for at in range(1, count + 1):
            where = f"{kind} hook {at} of {count}"
            error = RuntimeError(f"raised by user code in {where}")
            with Raising(managed, kind, at, error), pytest.raises(RuntimeError, match="raised by"):
                step(managed)
            error.__traceback__ = None  # which keeps the frames, and what they compute with
            check_nothing_held(manager, where)
        assert_models_agree(managed, resident, step, steps=1, device=device)


def once(step: Any, resident: nn.Module) -> Any:
    """Return the step, which the resident model takes once: from one seed it is the same again."""
    kept: list[Any] = []

    def remembered(model: nn.Module) -> list[Tensor]:
        if model is not resident:
            return step(model)
        if not kept:
            kept.extend([step(model), [p.grad for p in model.parameters()]])
        found, grads = kept
        for parameter, gradient in zip(model.parameters(), grads, strict=True):
            parameter.grad = gradient
        return found

    return remembered


STEPS = {"a step": micro_step, "two micro-steps under autocast": two_micro_steps}


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", REGISTER)
def test_an_exception_at_any_boundary_leaves_the_next_step_identical(device, kind, reentrant, what):
    step = STEPS[what]
    managed, resident = pair(reentrant)
    resident.to(device)
    with attached(managed, device, offload_percent=1.0) as manager:
        assert_models_agree(managed, resident, step, steps=3, device=device)
        count, again = boundaries(managed, kind, step), once(step, resident)
        state = manager.state
        state.engine = recorder = Recorder(state.engine)
        for at in range(1, count + 1):
            where = f"{kind} hook {at} of {count}"
            error = RuntimeError(f"raised by user code in {where}")
            with Raising(managed, kind, at, error), pytest.raises(RuntimeError) as caught:
                step(managed)
            assert caught.value is error
            # The frames keep a checkpoint's hooks of saved tensors in force until they go.
            error.__traceback__ = None
            del caught
            check_nothing_held(manager, where)
            assert_models_agree(managed, resident, again, steps=1, device=device)
        state.engine = recorder._engine
        assert recorder.acquired


class HostStep:
    """AdamW that steps the parameters named in `on_host` on the host, wherever they are.

    An optimizer rounds differently on CUDA. A managed layer's parameters are stepped on the host,
    so those of the resident model are too: as copies, written back.
    """

    def __init__(self, model: nn.Module, on_host: Collection[str]) -> None:
        self.model = model
        self.twins: dict[Tensor, Tensor] = {}
        stepped = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if name in on_host and parameter.device.type != "cpu":
                    self.twins[parameter] = parameter.detach().cpu()
                stepped.append(self.twins.get(parameter, parameter))
        self.optimizer = torch.optim.AdamW(stepped, lr=0.01, foreach=False)

    def step(self) -> None:
        for parameter, twin in self.twins.items():
            twin.grad = None if parameter.grad is None else parameter.grad.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, twin in self.twins.items():
                parameter.copy_(twin)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)


def train(
    model: nn.Module, steps: int, oom_at: int, raising: Any, on_host: Collection[str] = ()
) -> list[Tensor | None]:
    """A loop that catches running out of memory, as AI-Toolkit's does.

    Returns the losses, None for the step that was skipped for it.
    """
    optimizer = HostStep(model, on_host)
    losses: list[Tensor | None] = []
    for number in range(steps):
        torch.manual_seed(number)
        try:
            with raising if number == oom_at else contextlib.nullcontext():
                loss, _ = micro_step(model)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            losses.append(None)
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("kind", REGISTER)
def test_a_loop_that_catches_running_out_of_memory_goes_on_as_the_resident_one(device, kind):
    managed, resident = pair(reentrant=False)
    resident.to(device)
    start = {name: value.clone() for name, value in resident.state_dict().items()}
    with attached(managed, device, offload_percent=1.0) as manager:
        on_host = [name for name, p in managed.named_parameters() if p.device.type == "cpu"]
        assert on_host
        # Wherever it strikes, the step is skipped: for the resident model any place will do.
        oom = Raising(resident, "forward pre", 1, torch.OutOfMemoryError("no memory"))
        expected = train(resident, 4, 1, oom, on_host)
        assert expected[1] is None
        for at in range(1, boundaries(managed, kind, micro_step) + 1):
            managed.zero_grad(set_to_none=True)
            managed.load_state_dict(start)
            oom = Raising(managed, kind, at, torch.OutOfMemoryError("no memory"))
            found = train(managed, 4, 1, oom)
            check_nothing_held(manager, f"{kind} hook {at}")
            assert_same(found, expected, f"{kind} hook {at}: losses")
            assert_same(managed.state_dict(), resident.state_dict(), f"{kind} hook {at}: weights")


def test_the_arena_runs_out_and_the_loop_goes_on():
    """Out of memory of the engine's own, by a driver call that says so, at each call of a step."""
    from oracle_offload.engine import simulator

    managed, resident = pair(reentrant=False)
    start = {name: value.clone() for name, value in resident.state_dict().items()}
    with attached(managed, "cpu", offload_percent=1.0) as manager:
        micro_step(managed)
        calls = simulator.call_count("cuMemcpyHtoDAsync")
        train(managed, 1, -1, None)
        calls = simulator.call_count("cuMemcpyHtoDAsync") - calls
        skipped = 0
        for nth in range(1, calls + 1):
            for model in (managed, resident):
                model.zero_grad(set_to_none=True)
                model.load_state_dict(start)
            simulator.set_fault("cuMemcpyHtoDAsync", nth, 2)
            found = train(managed, 4, -1, None)
            simulator.clear_faults()
            check_nothing_held(manager, f"copy {nth}")
            # A prefetch that fails is given up without harm: then no step is skipped.
            skip = next((number for number, loss in enumerate(found) if loss is None), -1)
            skipped += skip >= 0
            oom = torch.OutOfMemoryError("no memory")
            expected = train(resident, 4, skip, Raising(resident, "forward pre", 1, oom))
            assert_same(found, expected, f"copy {nth}: losses")
            assert_same(managed.state_dict(), resident.state_dict(), f"copy {nth}: weights")
        assert 0 < skipped < calls
