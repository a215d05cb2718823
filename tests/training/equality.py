"""What every test of a managed model checks: same bits, nothing touched that must not be."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import oracle_offload
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from oracle_offload.model.witness import Witness

_COPIES = ("h2d_bytes", "d2h_bytes", "left_bytes", "returned_bytes", "brought_bytes")
DEVICE = "cpu"  # of a model that is attached or compared without a word of another
RUNS = 2  # of each step that models are compared in: alone, and under the witness


def is_simulated(device: str) -> bool:
    """Whether `device` is one over the simulated driver: "cpu", or the tests' own device type."""
    return not device.startswith("cuda")


class Recorder:
    """Wraps an engine and keeps what it answered; everything else passes through."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.fetched: list[int] = []
        self.acquired: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def use(self, member: int, *rest: Any) -> Any:
        *request, stamp_units = rest

        def stamp(units: tuple[int, ...]) -> None:
            self.fetched.extend(units)
            stamp_units(units)

        used = self._engine.use(member, *request, stamp)
        self.acquired.append(member)
        return used


class Through:
    """Another object, but for what a test answers itself, by name or by methods of a subclass."""

    def __init__(self, real: Any, **answers: Any) -> None:
        self.real = real
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class FailsAt(TorchDispatchMode):
    """Memory runs out at one operator, counted from the first one while `counts` says so."""

    def __init__(self, number: int | None, counts: Callable[[], bool]) -> None:
        super().__init__()
        self.number, self.counts, self.count = number, counts, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counts()
        if self.counts() and self.count == self.number:
            raise torch.OutOfMemoryError(f"planted at operator {self.count}")
        return func(*args, **(kwargs or {}))


class Products(TorchDispatchMode):
    """Keeps which products run, and the geometry of what they multiply or add."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "add")

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").removesuffix("_")  # in place or not
        if name in self.NAMES:
            tensors = [a for a in args if isinstance(a, Tensor)]
            self.ran.append((name, *map(self.geometry, tensors)))
        return result

    @staticmethod
    def geometry(tensor: Tensor) -> list[tuple[int, int]]:
        """Return sizes and strides; the stride of a single element means nothing."""
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        return [(size, stride if size > 1 else 0) for size, stride in sizes]


def resident_pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the model to attach and an equal one that stays resident."""
    return model, copy.deepcopy(model)


@contextlib.contextmanager
def attached(model: nn.Module, device: str = "", **options: Any) -> Iterator[Any]:
    """Attach for a while."""
    manager = oracle_offload.attach(model, device or DEVICE, **options)
    try:
        yield manager
    finally:
        if model.__dict__.get("_memory_manager") is not None:
            manager.detach()


def assert_same(found: Any, expected: Any, what: str = "value") -> None:
    """Assert equal to the last bit, and in dtype; containers element by element."""
    if expected is None or found is None:
        assert found is None and expected is None, f"{what}: {found is None} != {expected is None}"
        return
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, f"{what}: {found.dtype} != {expected.dtype}"
        found, expected = found.detach().cpu(), expected.detach().cpu()
        assert torch.isfinite(expected).all(), f"{what}: the resident result is not finite"
        if not torch.equal(found, expected):
            difference = (found.double() - expected.double()).abs().max()
            raise AssertionError(f"{what} differs from resident by up to {difference:.3e}")
        return
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key in expected:
            assert_same(found[key], expected[key], f"{what}[{key!r}]")
        return
    assert len(found) == len(expected), what
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same(one, other, f"{what}[{index}]")


def step_of(given: Tensor, device: str = "") -> Callable[[nn.Module], list[Tensor]]:
    """Return a step on such an input, of the model's dtype: the result and the input's gradient."""

    def step(model: nn.Module) -> list[Tensor]:
        x = given.to(device or DEVICE, next(model.parameters()).dtype).detach().clone()
        y = model(x.requires_grad_())
        y.square().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    return step


def step_alike(
    managed: nn.Module, resident: nn.Module, optimizers: Sequence[Any], device: str
) -> None:
    """Step the managed model's optimizer and the resident one's, in this order, and zero both.

    A card's optimizer rounds differently from the host's, which is the managed one: there the
    resident model takes the weights that the host has stepped.
    """
    ours, theirs = optimizers
    ours.step()
    if is_simulated(device):
        theirs.step()
    else:
        resident.load_state_dict(managed.state_dict())
    for optimizer in optimizers:
        optimizer.zero_grad()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return each parameter's gradient by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def copied_bytes() -> tuple[int, int]:
    """Return the bytes that travelled so far: by the simulator's count, and by the engines'.

    Where copy threads may be under way, whose copies each counts at another moment, it looks until
    both stay as they are.
    """
    found = [_counted()]
    while found[-1][0] and len(found) < 400 and (len(found) < 4 or len({*found[-4:]}) > 1):
        time.sleep(0.005)
        found.append(_counted())
    return found[-1][1:]


def _counted() -> tuple[bool, int, int]:
    copied = simulator.stats()
    counts = [state.engine.stats() for state in open_states()]
    return (
        any(count[name] for count in counts for name in ("pageable_bytes", "unlocked_h2d_bytes")),
        copied.h2d_bytes + copied.d2h_bytes,
        sum(count[name] for count in counts for name in _COPIES),
    )


def h2d_bytes(device: str = "cpu") -> int:
    """Return the bytes that travelled to the device: by the driver's count where it is simulated.

    A real driver counts nothing: there it is the engines' count.
    """
    if is_simulated(device):
        return simulator.stats().h2d_bytes
    return sum(state.engine.stats()["h2d_bytes"] for state in open_states())


def count_acquires() -> int:
    """Return how often layers asked their engines for a slot so far."""
    return sum(state.engine.stats()["acquires"] for state in open_states())


def assert_models_agree(
    managed: nn.Module,
    resident: nn.Module,
    step: Callable[[nn.Module], Sequence[Tensor]],
    *,
    steps: int = 2,
    device: str = "",
    clock: bool = False,
) -> None:
    """Run `step` on both and compare to the last bit, with a strict witness and without one.

    The witness declares what operators read to the simulated driver, which thereby executes the
    copies they need: only the run without it shows that the layers see to that themselves.
    """
    device = device or DEVICE
    if any(p.device.type != torch.device(device).type for p in resident.parameters()):
        resident.to(device)
    deterministic = contextlib.nullcontext()
    if not is_simulated(device):
        deterministic = as_deterministic_as(resident, step)
    with deterministic:
        _compare(managed, resident, step, steps, device, clock)


def _try(resident: nn.Module, step: Callable[[nn.Module], Sequence[Tensor]]) -> None:
    """Take a step that leaves nothing: with a copy of the model, where there is such a thing."""
    parameters = list(resident.parameters())
    if any(type(p) is not nn.Parameter for p in parameters):
        # Of a library: quanto's cannot be copied, and a copy of bitsandbytes' is on the host.
        before = [parameter.data for parameter in parameters]
        step(resident)
        for parameter, was in zip(parameters, before, strict=True):
            parameter.grad = None
            if type(parameter) is nn.Parameter:  # bitsandbytes casts a bias to the input's dtype
                parameter.data = was
        return
    # What a hook computes again before each forward is not copied. Nothing is compiled for a copy.
    attributes = [value for module in resident.modules() for value in vars(module).values()]
    computed = [v for v in attributes if isinstance(v, Tensor) and not v.is_leaf]
    with torch.compiler.set_stance("force_eager"):
        step(copy.deepcopy(resident, {id(value): value for value in computed}))


@contextlib.contextmanager
def as_deterministic_as(
    resident: nn.Module, step: Callable[[nn.Module], Sequence[Tensor]]
) -> Iterator[None]:
    """Strict determinism on CUDA where the model has no operator that refuses it.

    Under warnings alone the fused attention kernels stay nondeterministic: they are left out then.
    """
    kinds = ("flash", "mem_efficient", "cudnn")
    fused = [getattr(torch.backends.cuda, f"enable_{kind}_sdp") for kind in kinds]
    enabled = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds]
    before = torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        try:
            _try(resident, step)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            torch.use_deterministic_algorithms(True, warn_only=True)
            for enable in fused:
                enable(False)
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        for enable, was in zip(fused, enabled, strict=True):
            enable(was)


def agreement_with_itself(
    resident: nn.Module,
    step: Callable[[nn.Module], Sequence[Tensor]],
    seed: int,
    expected: Sequence[Tensor],
    expected_gradients: dict[str, Tensor | None],
) -> str:
    """Return whether the resident model, run again from the same seed, computes the same bits."""
    resident.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    again = step(resident)
    try:
        assert_same(again, expected, "result")
        assert_same(gradients(resident), expected_gradients, "gradient")
    except AssertionError as error:
        return f"the resident model does not agree with itself either ({error}): not the engine's"
    return "the resident model, run again, agrees with itself"


def _compare(
    managed: nn.Module,
    resident: nn.Module,
    step: Callable[[nn.Module], Sequence[Tensor]],
    steps: int,
    device: str,
    clock: bool,
) -> None:
    simulated = is_simulated(device)
    for number in range(steps):
        for watched in (False, True):
            what = f"step {number} {'under the witness' if watched else 'alone'}"
            for model in (managed, resident):
                model.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            expected = step(resident)
            torch.manual_seed(number)
            before = copied_bytes() if simulated else None
            acquires = count_acquires()
            witness = Witness(declare=simulated, clock=clock) if watched else None
            with witness or contextlib.nullcontext():
                found = step(managed)
            if before is not None:
                driver, engine = (
                    now - then for now, then in zip(copied_bytes(), before, strict=True)
                )
                assert driver == engine, f"{what}: the driver copied other bytes than were counted"
            assert count_acquires() > acquires, f"{what}: no layer was managed"
            if witness is not None:
                assert witness.arena_reads > 0, f"{what}: no operator read the arena"
            try:
                assert_same(found, expected, f"{what}: result")
                assert_same(gradients(managed), gradients(resident), f"{what}: gradient")
            except AssertionError as error:
                if simulated:
                    raise
                wanted = gradients(resident)
                itself = agreement_with_itself(resident, step, number, expected, wanted)
                raise AssertionError(f"{error}; {itself}") from error
