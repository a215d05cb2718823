"""What is kept per thread, or for the whole process, while a step of training is under way.

Micro-batches that take turns in one thread each need their own: `ThreadState.now` notes all of it,
`ThreadState.restore` puts it there again, whatever is there by then.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat, starmap
from operator import call, itemgetter
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.backends import cuda as attention
from torch.utils import _python_dispatch as dispatch

from ...engine import engines, exemption
from . import kernel_flags
from .attributes import Attributes, Places

_autograd: Any = torch._C._autograd
_C: Any = torch._C
# What torch 2.6 and 2.7 lack: there the saved-tensor hooks cannot be exchanged.
_top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
_DEEPER, _LESS_DEEP = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_autocast_kinds = getattr(_C, "_autocast_supported_devices", lambda: ("cpu", "cuda"))
_FLAGS_OF_MODES = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(dispatch, name)
)
# What answers whether a switch of autograd, or of attention's kernels, is on; and what sets it.
_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], Any]], ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    (_C._is_view_replay_enabled, _C._set_view_replay_enabled),
    (attention.flash_sdp_enabled, attention.enable_flash_sdp),
    (attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
    (attention.math_sdp_enabled, attention.enable_math_sdp),
    (attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
)


def _at_once(*calls: Iterable[object]) -> None:
    """Make calls one after the other, from iterators and functions in C alone.

    Ctrl-C is raised between two instructions of Python, and here is none.
    """
    deque(chain(*calls), maxlen=0)


class _Hooks:
    """The saved-tensor hooks: pairs of functions, the innermost first, or why there may be none."""

    @staticmethod
    def now() -> tuple[list[Any], str | None] | None:
        if _top_hooks is None:
            return None
        refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
        pairs: list[Any] = []
        _at_once(_Hooks._take_off(pairs), _Hooks._put_on(pairs, refused))
        return pairs, refused

    @staticmethod
    def restore(value: tuple[list[Any], str | None] | None) -> None:
        if value is not None:
            _at_once(_Hooks._take_off([]), _Hooks._put_on(*value))

    @staticmethod
    def _take_off(pairs: list[Any]) -> Iterator[object]:
        """Return what takes all off and adds them to `pairs`: only the innermost can be seen."""
        pop = _autograd._pop_saved_tensors_default_hooks
        pops = starmap(pop, repeat(()))
        seen_and_popped = zip(iter(partial(_top_hooks, True), None), pops, strict=False)
        allow = map(call, [_autograd._saved_tensors_hooks_enable])
        return chain(allow, map(pairs.append, map(itemgetter(0), seen_and_popped)))

    @staticmethod
    def _put_on(pairs: list[Any], refused: str | None) -> Iterator[object]:
        """Return what puts on again all that `pairs` holds by then."""
        outermost_first = chain.from_iterable(map(reversed, [pairs]))
        refuse = [] if refused is None else [refused]
        return chain(
            starmap(_autograd._push_saved_tensors_default_hooks, outermost_first),
            map(_autograd._saved_tensors_hooks_disable, refuse),
        )


class _Modes:
    """The modes that see operators and functions, the innermost last."""

    @staticmethod
    def now() -> tuple[list[Any], list[Any], list[bool]]:
        return (
            overrides._get_current_function_mode_stack(),
            dispatch._get_current_dispatch_mode_stack(),
            [getattr(dispatch, name) for name in _FLAGS_OF_MODES],
        )

    @staticmethod
    def restore(value: tuple[list[Any], list[Any], list[bool]]) -> None:
        functions, operators, flags = value
        now = _Modes.now()
        for _ in now[0]:
            overrides._pop_mode()
        for mode in functions:
            overrides._push_mode(mode)
        for mode in reversed(now[1]):
            dispatch._pop_mode(getattr(mode, "_dispatch_key", getattr(mode, "_mode_key", None)))
        for mode in operators:
            dispatch._push_mode(mode)
        for name, flag in zip(_FLAGS_OF_MODES, flags, strict=True):
            setattr(dispatch, name, flag)
        if _FLAGS_OF_MODES and hasattr(dispatch, "set_is_in_mode_without_ignore_compile_internals"):
            dispatch.set_is_in_mode_without_ignore_compile_internals(flags[-1])


class _Autocast:
    """Autocast on every type of device, and how deep its regions are nested."""

    @staticmethod
    def now() -> tuple[Any, ...]:
        return (
            _Autocast._depth(),
            torch.is_autocast_cache_enabled(),
            *(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _autocast_kinds()
            ),
        )

    @staticmethod
    def restore(value: tuple[Any, ...]) -> None:
        wanted, cached, *rows = value
        deeper = wanted - _Autocast._depth()
        _at_once(map(call, repeat(_DEEPER if deeper > 0 else _LESS_DEEP, abs(deeper))))
        torch.clear_autocast_cache()  # its casts are of another micro-batch's graph
        torch.set_autocast_cache_enabled(cached)
        for kind, enabled, dtype in rows:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    @staticmethod
    def _depth() -> int:
        """Return the depth, which only a change of it tells."""
        _, depth = tuple(map(call, (_DEEPER, _LESS_DEEP)))
        return depth


class Generators:
    """The generators that a step may draw from: torch's, Python's and numpy's.

    Parameters
    ----------
    devices : sequence of torch.device
        Those that models are attached to; parts of a model may be on other GPUs.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        found = {device for device in devices if device.type != "cpu"}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found |= {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
        self._modules = [
            (module, device)
            for device in found
            for module in [torch.get_device_module(device)]
            if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
        ]

    def now(self) -> tuple[Any, ...]:
        """Return the state of each."""
        numpy: Any = sys.modules.get("numpy")
        return (
            torch.get_rng_state(),
            [module.get_rng_state(device) for module, device in self._modules],
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def restore(self, value: tuple[Any, ...]) -> None:
        """Set the state of each."""
        torch.set_rng_state(value[0])
        for (module, device), state in zip(self._modules, value[1], strict=True):
            module.set_rng_state(state, device)
        random.setstate(value[2])
        if value[3] is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state(value[3])

    @staticmethod
    def seed(seed: int) -> None:
        """Seed every one of them."""
        torch.manual_seed(seed)
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)


def can_take_turns() -> bool:
    """Whether this torch lets all that it keeps per thread be exchanged: 2.8 and later do."""
    return _top_hooks is not None


class ThreadState(NamedTuple):
    """All of it at one moment."""

    hooks: Any
    modes: Any
    autocast: Any
    switches: list[bool]
    kernels: list[Any]
    default_dtype: torch.dtype
    streams: list[Any]
    cuda_device: int | None
    generators: Any
    phase: str
    exempt_depth: int
    owned: Attributes


class ThreadStates:
    """Notes and restores what `ThreadState` lists.

    Parameters
    ----------
    devices : sequence of torch.device
        Those that models are attached to.
    own : sequence of object
        Whose attributes are to be exchanged, too.
    """

    def __init__(self, devices: Sequence[torch.device], own: Sequence[object] = ()) -> None:
        self.generators = Generators(devices)
        self.places = Places(own)
        self._cuda = [device for device in devices if device.type == "cuda"]

    def now(self) -> ThreadState:
        """Return the state of this thread; it stays as it is."""
        return ThreadState(
            hooks=_Hooks.now(),
            modes=_Modes.now(),
            autocast=_Autocast.now(),
            switches=[is_on() for is_on, _ in _SWITCHES],
            kernels=kernel_flags.now(),
            default_dtype=torch.get_default_dtype(),
            streams=[torch.cuda.current_stream(device) for device in self._cuda],
            cuda_device=torch.cuda.current_device() if self._cuda else None,
            generators=self.generators.now(),
            phase=engines.phase_now(),
            exempt_depth=exemption.depth(),
            owned=self.places.now(),
        )

    def restore(self, state: ThreadState) -> None:
        """Make this thread's state what it was; Ctrl-C in the middle of that comes out after it."""
        try:
            self._put(state)
        except BaseException:
            self._put(state)  # each part is put there whatever is there by then
            raise

    def _put(self, state: ThreadState) -> None:
        _Modes.restore(state.modes)  # first: none is to see what the others do
        _Hooks.restore(state.hooks)
        _Autocast.restore(state.autocast)
        for (_, turn), on in zip(_SWITCHES, state.switches, strict=True):
            turn(on)
        kernel_flags.restore(state.kernels)
        torch.set_default_dtype(state.default_dtype)
        for stream in state.streams:  # which makes its device the current one
            torch.cuda.set_stream(stream)
        if state.cuda_device is not None:
            torch.cuda.set_device(state.cuda_device)
        self.generators.restore(state.generators)
        if state.phase != engines.phase_now():
            engines.begin_phase(state.phase)
        exemption.set_depth(state.exempt_depth)
        self.places.restore(state.owned)
