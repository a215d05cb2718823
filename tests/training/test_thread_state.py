"""What a thread, or the whole process, has set: noted for one micro-batch, and put back."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import oracle_offload
from oracle_offload.engine import exemption
from oracle_offload.train.micro_batches import kernel_flags, thread_state
from oracle_offload.train.micro_batches.thread_state import Generators, ThreadStates, can_take_turns

# ---- thread state ----


def sees(kind: type) -> Any:
    """Return a mode that changes nothing."""
    method = "__torch_function__" if kind is TorchFunctionMode else "__torch_dispatch__"

    def through(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    return type("Sees", (kind,), {method: through})()


@contextlib.contextmanager
def changed(put: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def autocast_three_deep() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


C: Any = torch._C
CHANGES: dict[str, tuple[str, Callable[[], Any]]] = {
    "saved tensors": (
        "hooks",
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ),
    "no saved tensors": (
        "hooks",
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    ),
    "operators": ("modes", lambda: sees(TorchDispatchMode)),
    "functions": ("modes", lambda: sees(TorchFunctionMode)),
    "autocast": ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast three deep": ("autocast", autocast_three_deep),
    "autocast off": ("autocast", lambda: torch.autocast("cpu", enabled=False)),
    "autocast elsewhere": (
        "autocast",
        lambda: changed(
            lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16
        ),
    ),
    "autocast without cache": (
        "autocast",
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ),
    "no gradients": ("switches", torch.no_grad),
    "no forward gradients": ("switches", lambda: changed(C._set_fwd_grad_enabled, False, True)),
    "one thread": ("switches", lambda: torch.autograd.set_multithreading_enabled(False)),
    "views again": ("switches", lambda: torch.autograd._force_original_view_tracking(True)),
    "attention": (
        "switches",
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ),
    "precision": (
        "kernels",
        lambda: changed(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "dtype": (
        "default_dtype",
        lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "phase": ("phase", lambda: oracle_offload.observe.phase("sampling")),
    "exempt": ("exempt_depth", exemption.exempt),
}


def are_same(one: Any, other: Any) -> bool:
    """Whether two states are equal, of whatever they are made."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(are_same, one, other))
    same = one == other
    return bool(same.all() if isinstance(same, Tensor | numpy.ndarray) else same)


def differing(one: Any, other: Any) -> set[str]:
    """Return the fields in which two states differ."""
    fields = zip(one._fields, one, other, strict=True)
    return {name for name, a, b in fields if not are_same(a, b)}


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_is_noted_and_put_back_and_noting_changes_nothing(change: str) -> None:
    field, context = CHANGES[change]
    states = ThreadStates([torch.device("cpu")])
    before = states.now()
    assert not differing(before, states.now())
    with context():
        inside = states.now()
        assert field in differing(before, inside) and not differing(inside, states.now())
        states.restore(before)
        assert not differing(before, states.now())
        states.restore(inside)
        assert not differing(inside, states.now())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            states.restore(inside)
            assert not differing(inside, states.now())
            nested = states.now()
        states.restore(nested)
        assert not differing(inside, states.now())
    states.restore(before)
    assert not differing(before, states.now())
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_hooks_are_put_back_in_their_order() -> None:
    states, called = ThreadStates([]), []
    before = states.now()

    def hooks(name: str) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            called.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    with hooks("outer"), hooks("inner"):
        inside = states.now()
        states.restore(before)
        torch.ones(2, requires_grad=True).exp()
        assert called == []
        states.restore(inside)
        torch.ones(2, requires_grad=True).exp()
        assert called == ["inner"]
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.ones(2, requires_grad=True).exp()
        assert called == ["inner", "outer"]
        states.restore(inside)
    with torch.autograd.graph.disable_saved_tensors_hooks("for now"):
        inside = states.now()
        states.restore(before)
        states.restore(inside)
        with pytest.raises(RuntimeError, match="for now"):
            hooks("refused").__enter__()


def test_generators_are_seeded_and_put_back() -> None:
    generators = Generators([torch.device("cpu")])

    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), numpy.random.rand()]

    before = generators.now()
    first = drawn()
    generators.restore(before)
    assert drawn() == first != drawn()
    seed = 2**40 + 3
    generators.seed(seed)
    found = drawn()
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    assert found == drawn()
    generators.restore(before)


ELSEWHERE = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(
    ("available", "initialized", "given", "kept"),
    [
        (False, True, [1], [1]),
        (True, False, [1], [1]),
        (True, True, [], [0, 1]),
        (True, True, [2], [0, 1, 2]),
        (True, True, [1], [0, 1]),
    ],
)
def test_generators_are_those_of_all_devices_that_have_some(
    available: bool,
    initialized: bool,
    given: list[int],
    kept: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two GPUs, and devices of which a state can be read or written alone."""
    cards = {device: torch.Generator() for device in ELSEWHERE}
    half = SimpleNamespace(get_rng_state=lambda device: None)
    other = SimpleNamespace(set_rng_state=lambda state, device: None)
    whole = SimpleNamespace(
        get_rng_state=lambda device: cards[device].get_state(),
        set_rng_state=lambda state, device: cards[device].set_state(state),
    )
    modules = {"cuda": whole, "xpu": half, "mps": other}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [torch.device(kind) for kind in ("cpu", "xpu", "mps")]
    generators = Generators([*devices, *(ELSEWHERE[index] for index in given)])

    def drawn() -> list[float]:
        return [torch.rand((), generator=cards[device]).item() for device in ELSEWHERE]

    before = generators.now()
    first = drawn()
    generators.restore(before)
    again = drawn()
    assert [index for index in range(3) if again[index] == first[index]] == kept


def test_a_state_has_the_generators_and_the_stream_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: dict[str, Any] = {"stream of cuda:0": "first", "stream of cuda:1": "second", "now": 1}
    for name, put in {
        "current_stream": lambda device: (str(device), there[f"stream of {device}"]),
        "current_device": lambda: there["now"],
        "set_stream": lambda stream: there.update({f"stream of {stream[0]}": stream[1], "now": 0}),
        "set_device": lambda device: there.update(now=device),
    }.items():
        monkeypatch.setattr(torch.cuda, name, put)
    modules = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules)
    states = ThreadStates([torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 0)])
    before, then = states.now(), dict(there)
    assert before.streams == [("cuda:1", "second"), ("cuda:0", "first")] and before.cuda_device == 1
    first = torch.rand(()).item()
    there.update({"stream of cuda:0": "another", "stream of cuda:1": "another", "now": 0})
    states.restore(before)
    assert there == then and torch.rand(()).item() == first
    without = ThreadStates([torch.device("cpu")]).now()
    assert (without.streams, without.cuda_device) == ([], None)


def test_a_cast_that_autocast_keeps_is_not_anothers() -> None:
    states = ThreadStates([])
    weight = torch.ones(2, 2, requires_grad=True)

    def cast() -> Any:
        product = (torch.ones(1, 2) @ weight).grad_fn
        assert product is not None
        return next(node for node, _ in product.next_functions if node is not None)

    with torch.autocast("cpu", torch.bfloat16):
        kept = cast()
        assert kept.name() == "ToCopyBackward0" and cast() is kept
        states.restore(states.now())
        assert cast() is not kept


def test_a_torch_that_does_not_name_its_hooks_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_take_turns() is hasattr(C._autograd, "_top_saved_tensors_default_hooks")
    monkeypatch.setattr(thread_state, "_top_hooks", None)
    assert not can_take_turns()
    states = ThreadStates([])
    before = states.now()
    assert before.hooks is None
    called: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: called.append(t) or t, lambda t: t):
        states.restore(before)
        torch.ones(2, requires_grad=True).exp()
    assert len(called) == 1


def test_generators_without_numpy_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "numpy")
    generators = Generators([])
    before = generators.now()
    assert before[3] is None
    first = torch.rand(()).item(), random.random()
    generators.restore(before)
    assert (torch.rand(()).item(), random.random()) == first
    generators.seed(1)


def test_attributes_of_objects_and_of_their_dicts_are_put_back() -> None:
    trainer = SimpleNamespace(step=1, counts={"a": 1}, rows=[1])
    network = nn.Linear(2, 2)
    network.table = {"b": 1}
    counts, table = trainer.counts, network.table
    states = ThreadStates([], [trainer, network])
    before = states.now()
    assert [one for one, _ in before.owned.named] == [vars(trainer), vars(network), counts]
    trainer.step, trainer.late = 2, 3
    trainer.counts["a"], trainer.counts["c"] = 2, 3
    del trainer.rows
    network.mode, table["b"] = "other", 2
    inside = states.now()
    states.restore(before)
    assert vars(trainer) == {"step": 1, "counts": {"a": 1}, "rows": [1]}
    assert trainer.counts is counts and not hasattr(network, "mode")
    assert network.table == {"b": 2}, "a module's dicts are its own"
    states.restore(inside)
    assert vars(trainer) == {"step": 2, "counts": {"a": 2, "c": 3}, "late": 3}
    assert network.mode == "other"


@pytest.mark.parametrize("torchs", ["all flags", "no flags", "flags in Python alone"])
def test_modes_are_put_back_whatever_torch_notes_beside_them(
    torchs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    name = "set_is_in_mode_without_ignore_compile_internals"
    if torchs == "flags in Python alone":
        monkeypatch.delattr(dispatch, name, raising=False)
    else:
        monkeypatch.setattr(dispatch, name, told.append, raising=False)
    if torchs == "no flags":
        monkeypatch.setattr(thread_state, "_FLAGS_OF_MODES", ())
    states, mode = ThreadStates([]), sees(TorchDispatchMode)
    before = states.now()
    dispatch._push_mode(mode)
    inside = states.now()
    _, modes, noted = inside.modes
    assert (modes, len(noted)) == ([mode], len(thread_state._FLAGS_OF_MODES))
    told.clear()
    for state, left in ((before, []), (inside, [mode]), (before, [])):
        states.restore(state)
        assert dispatch._get_current_dispatch_mode_stack() == left
    flags = [state.modes[2][-1] for state in (before, inside, before) if state.modes[2]]
    assert told == ([] if torchs != "all flags" else flags)


NOTING = thread_state, kernel_flags


class StopsAt:
    """Raises KeyboardInterrupt at one instruction, or line, of the modules that it is for."""

    def __init__(self, at: int, event: str, *modules: Any) -> None:
        self.left, self.event = at, event
        self.files = [module.__file__ for module in modules]

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        if event == self.event:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def stops(self, function: Callable[..., Any], *args: Any) -> bool:
        """Whether it raised in a call."""
        sys.settrace(self)
        try:
            function(*args)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def innermost_first() -> list[Any]:
    found: list[Any] = []
    hooks = torch._C._autograd  # type: ignore[attr-defined]
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        found.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        hooks._push_saved_tensors_default_hooks(*pair)
    return found


def autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.mark.skipif(not can_take_turns(), reason="turns are taken from torch 2.8 on")
def test_ctrl_c_at_any_instruction_leaves_what_is_noted_as_it_was() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks
    with torch.autocast("cpu", torch.bfloat16), hooks(repr, eval), hooks(str, eval):
        before = innermost_first(), autocast_depth()
        assert before == ([(str, eval), (repr, eval)], 1)
        for note in (thread_state._Hooks.now, thread_state._Autocast.now):
            at = 0
            while StopsAt(at, "opcode", *NOTING).stops(note):
                assert (innermost_first(), autocast_depth()) == before, at
                at += 1
            assert at > 20
        assert thread_state._Hooks.now() == (before[0], None)
        assert thread_state._Autocast.now()[0] == 1


@pytest.mark.skipif(not can_take_turns(), reason="turns are taken from torch 2.8 on")
def test_ctrl_c_at_any_line_of_putting_back_comes_out_after_it() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *args: Any) -> Any:
            raise AssertionError(func)

    def now() -> Any:
        return [
            innermost_first(),
            overrides._get_current_function_mode_stack(),
            dispatch._get_current_dispatch_mode_stack(),
            autocast_depth(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.backends.cudnn.benchmark,
            random.getstate(),
        ]

    states = ThreadStates([])
    outer, as_outer = states.now(), now()
    with contextlib.ExitStack() as stack:
        for context in (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(repr, eval),
            torch.backends.cudnn.flags(benchmark=True),
            torch.device("cpu"),
        ):
            stack.enter_context(context)
        random.random()
        with Mode():
            inner, as_inner = states.now(), now()
            for at in itertools.count():
                stopped = StopsAt(at, "line", *NOTING).stops(states.restore, outer)
                found = now()
                states.restore(inner)
                assert now() == as_inner
                # Where `restore` itself has done nothing yet, nothing is done.
                assert found == as_outer or (found == as_inner and at < 2), at
                if not stopped:
                    break
            assert at > 30
    random.setstate(as_outer[-1])
    assert now() == as_outer


# ---- flags of the whole process ----


@pytest.mark.parametrize("available", [True, False])
def test_how_long_cudnn_searches_is_a_flag_where_there_is_cudnn(
    available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn: Any = SimpleNamespace(is_available=lambda: available, benchmark_limit=10)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(kernel_flags, "_FLAGS", tuple(kernel_flags._flags()))
    before = kernel_flags.now()
    cudnn.benchmark_limit = 3
    assert (kernel_flags.now() != before) is available
    kernel_flags.restore(before)
    assert cudnn.benchmark_limit == (10 if available else 3)


@pytest.mark.parametrize(("name", "other"), [("enabled", False), ("strategy", "greedy")])
def test_in_which_order_einsum_contracts_is_a_flag(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the library is installed that finds one."""
    einsum = SimpleNamespace(enabled=True, strategy="auto")
    monkeypatch.setattr(kernel_flags, "opt_einsum", einsum)
    monkeypatch.setattr(kernel_flags, "_FLAGS", tuple(kernel_flags._flags()))
    before = kernel_flags.now()
    setattr(einsum, name, other)
    assert kernel_flags.now() != before
    kernel_flags.restore(before)
    assert einsum == SimpleNamespace(enabled=True, strategy="auto")


def others_than(value: Any) -> list[Any]:
    """Return what else a flag may be."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, tuple):
        return [tuple(not one for one in value), (not value[0], *value[1:]), value[::-1]]
    if isinstance(value, list):
        return [value[::-1]]
    return ["ieee", "tf32", "high", "greedy"]


@pytest.mark.filterwarnings("ignore:Please use the new API settings", "ignore:.*is not one of")
def test_every_flag_that_can_be_set_is_put_back() -> None:
    before = kernel_flags.now()
    set_once = 0
    for at, (get, put) in enumerate(kernel_flags._FLAGS):
        for other in others_than(before[at]):
            with contextlib.suppress(Exception):
                put(other)
            if get() != before[at]:
                set_once += 1
                break
        inside = kernel_flags.now()
        kernel_flags.restore(before)
        assert kernel_flags.now() == before, at
        kernel_flags.restore(inside)
        assert kernel_flags.now() == inside, at
        kernel_flags.restore(before)
    assert set_once >= 15, f"{set_once} of {len(before)} could be set"
    assert len(before) >= 30


@pytest.mark.skipif(not hasattr(C, "_set_fp32_precision_setter"), reason="torch 2.9 and later")
@pytest.mark.parametrize("which", kernel_flags._PRECISIONS, ids=".".join)
def test_a_precision_that_others_follow_is_put_back_with_them(which: tuple[str, str]) -> None:
    before = kernel_flags.now()
    get, put = kernel_flags._precision(*which)
    try:
        for value in ("ieee", "tf32", "none", "ieee"):
            C._set_fp32_precision_setter(*which, "ieee" if value != "ieee" else "tf32")
            put(value)
            assert get() == value or value == "none"
            assert get() == C._get_fp32_precision_getter(*which)
        kernel_flags.restore(before)
        assert kernel_flags.now() == before
    finally:
        kernel_flags.restore(before)


DEFAULT = """
import torch
from oracle_offload.train.micro_batches import kernel_flags

def by_default():  # "tf32", but what it is below where that says something
    torch._C._set_fp32_precision_setter("generic", "all", "ieee")
    found = torch._C._get_fp32_precision_getter("cuda", "conv")
    torch._C._set_fp32_precision_setter("generic", "all", "none")
    return found, torch._C._get_fp32_precision_getter("cuda", "conv")

before = kernel_flags.now()
print(*by_default())
torch.backends.fp32_precision = "ieee"
inside = kernel_flags.now()
for values in (before, inside, before):
    kernel_flags.restore(values)
    assert kernel_flags.now() == values
print(*by_default())
"""


@pytest.mark.skipif(not hasattr(C, "_set_fp32_precision_setter"), reason="torch 2.9 and later")
def test_a_default_precision_is_still_one_after_it_was_put_back(forks: Any) -> None:
    before, after = forks.print(DEFAULT).splitlines()
    assert before == after == "ieee tf32"


def test_numbers_that_are_too_small_are_flushed_where_they_were() -> None:
    before = kernel_flags.now()
    tiny = torch.full((), 1e-40)
    for flushes in (True, False):
        torch.set_flush_denormal(flushes)
        inside = kernel_flags.now()
        torch.set_flush_denormal(not flushes)
        kernel_flags.restore(inside)
        assert (tiny.add(0).item() == 0) is flushes
    assert kernel_flags.now() == before


def test_a_flag_that_this_torch_lacks_is_left_out() -> None:
    assert kernel_flags._named("no_such_flag") is None
    other_half = SimpleNamespace(_set_flag=lambda *v: None)
    kept: list[Any] = []
    half = SimpleNamespace(_get_flag=lambda: 1)
    both = SimpleNamespace(_get_flag=lambda: (True, False), _set_flag=lambda *v: kept.append(v))

    def unknown() -> Any:
        raise RuntimeError("in other words")

    refuses = SimpleNamespace(_get_flag=unknown, _set_flag=kept.append)
    with pytest.MonkeyPatch.context() as patch:
        for part in (half, other_half):
            patch.setattr(kernel_flags, "_C", part)
            assert kernel_flags._named("flag") is None
        patch.setattr(kernel_flags, "_C", both)
        get, put = kernel_flags._named("flag") or (None, None)
        assert get is not None and put is not None and get() == (True, False)
        put((True, True))
        put(None)
        put("one")
        patch.setattr(kernel_flags, "_C", refuses)
        get, _ = kernel_flags._named("flag") or (None, None)
        assert get is not None and get() is None
    assert kept == [(True, True), ("one",)]
