"""The watch over the first forward of an attached model, and over the first after each change.

What is watched for, and what is let pass, is in `oracle_offload.watch`.

The watch stands in a frame around the call, in ``try``/``finally``: torch runs no forward hook
after a ``KeyboardInterrupt``. It gets there through ``module._compiled_call_impl``, which
``module(...)`` calls in place of ``_call_impl``, and which torch neither copies nor pickles.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .layers import trial
from .layers.swap import HANDLE, is_exporting, is_managed, refuse_tracing
from .locks import Lock
from .operators import autocast_reaches_kernels
from .structure import Structure
from .watch import DirectUses, Watch

_SLOT = "_compiled_call_impl"
_MAX_ENTRIES = 16  # calls of parts of a model that are watched where the model itself is not called
_graph_task = torch._C._current_graph_task_id
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
# Where torch lacks this, a frame that begins under a dispatch mode is never compiled any more.
_COMPILES_UNDER_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")
_thread = threading.local()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Let torch.compile run `function`, and what it calls, as it is."""
    return cast("_Function", torch.compiler.disable(function))


def _untraced_alone(function: _Function) -> _Function:
    """Let torch.compile run `function` as it is, but compile what it calls."""
    return cast("_Function", torch._dynamo.decorators.skip(function))


def is_watched() -> bool:
    """Whether this thread is inside a forward that is watched."""
    return getattr(_thread, "watched", False)


def set_watched(watched: bool) -> None:
    """Say so: such a forward begins or ends, or another micro-batch goes on in this thread."""
    _thread.watched = watched


class FirstForward:
    """Watches the forwards of one attached model until one of them has ended well.

    A forward that failed or was interrupted does not count. Where the model is used through its
    parts (an autoencoder's ``encode``), the first calls of parts are watched instead. `arm` starts
    the watch again. Backward needs no watch: it reads a master only if forward saved it, and the
    operator that did so was seen.

    Parameters
    ----------
    structure : Structure
        Of the model; what it was attached with is reached through it.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._lock = Lock("watch")  # protects what follows
        self._armed = True
        self._entries = 0
        self._parts: list[weakref.ref[nn.Module]]  # as the structure has settled
        # The code that a watched forward had; that of parts is not asked for.
        self._watched: set[int | None] = {None}
        self._ended = False
        self._graph_may_live = False  # forward has built one, and no backward has begun since
        self._root_entry: weakref.ref[_Entry]
        self.structure_settled()
        structure.listeners.append(self)

    def structure_changed(self) -> None:
        """Watch the next forward."""
        with self._lock:
            self._armed, self._entries = True, 0

    def structure_settled(self) -> None:
        """Take the model's parts as they are now."""
        structure = self._structure
        root = structure.module
        if root is None or self._ended:
            return
        with self._lock:
            self._parts = [weakref.ref(part) for part in root.modules()]
            for part in self._modules():
                if part is root or (self._armed and not _has_operator(part)):
                    self._stand_before(part, part is root)

    def _stand_before(self, part: nn.Module, is_root: bool) -> None:
        found = part.__dict__.get(_SLOT)
        if not isinstance(found, _Entry):
            entry = part.__dict__[_SLOT] = _Entry(part, self, found)
            if is_root:
                # `model.compile()` puts another in its place, and drops it: it stands before that.
                self._root_entry = weakref.ref(entry, _look_again_of(self))

    def end(self) -> None:
        """Stop watching for good: the model was detached."""
        self._ended = True
        with self._lock:
            self._step_aside(self._modules())

    def _modules(self) -> list[nn.Module]:
        return [part for reference in self._parts if (part := reference()) is not None]

    def _step_aside(self, modules: list[nn.Module]) -> None:
        for module in modules:
            entry = module.__dict__.get(_SLOT)
            if isinstance(entry, _Entry) and entry.belongs_to(self):
                if entry.call is None:
                    del module.__dict__[_SLOT]
                else:
                    module.__dict__[_SLOT] = entry.call

    def _code(self) -> int:
        """Return a number that changes when another ``forward`` is put on a module or a class.

        Asked at each call of the model: a class is looked at once, however many modules it has.
        """
        parts = self._modules()
        own = [
            (id(part), _code_of(part.__dict__["forward"]))
            for part in parts
            if "forward" in part.__dict__
        ]
        # A class of TorchScript has none.
        of_classes = frozenset(
            [_code_of(getattr(kind, "forward", None)) for kind in set(map(type, parts))]
        )
        return hash((tuple(own), of_classes))

    def watch(
        self, module: nn.Module, inputs: Any, compiling: bool
    ) -> tuple[Watch | None, int | None]:
        """Return the watch that a forward is due, if any, and what `has_passed` is told of it.

        torch.compile must not look on.
        """
        root = self._structure.module
        if root is None or is_watched():
            return None, None
        self._structure.settle()
        if _graph_task() == -1:  # no checkpoint recomputes
            attachment = self._structure.attachment
            if attachment.state.turned:
                self._graph_may_live = False
            if attachment.leaving and not self._graph_may_live:
                trial.finish(attachment)
            self._graph_may_live |= torch.is_grad_enabled()
        code = self._code() if module is root else None
        if not self._armed and code in self._watched:
            return None, None
        if not _COMPILES_UNDER_MODES and (compiling or self._has_compiled_part()):
            return None, None
        return Watch(root, inputs), code

    @_untraced
    def direct_uses(self, watch: Watch, compiling: bool) -> AbstractContextManager[object]:
        """Return what moves weights that a watched forward uses directly, where that is likely.

        That is under adapters, and under a trainer's own ``model.forward``. Elsewhere it would do
        harm: torch takes no fast path while such a mode is active, and torch.compile would break
        its graphs at every operator.
        """
        root = self._structure.module
        parts = self._modules()
        if root is None or compiling or self._has_compiled_part():
            return contextlib.nullcontext()
        adapted = any("base_layer" in part._modules for part in parts)
        if not adapted and "forward" not in root.__dict__:
            return contextlib.nullcontext()
        return DirectUses(self._structure.attachment, watch)

    def _has_compiled_part(self) -> bool:
        return any(is_compiled(part) for part in self._modules())

    @_untraced
    def has_passed(self, code: int | None) -> None:
        """One forward has ended well: of the whole model, which has `_code`, or of a part."""
        with self._lock:
            self._entries += 1
            if code is not None:
                self._watched.add(code)
            elif self._entries < _MAX_ENTRIES:
                return
            self._armed = False
            root = self._structure.module
            if root is not None:
                self._step_aside([part for part in self._modules() if part is not root])


def _has_operator(part: nn.Module) -> bool:
    """Whether a call of `part` is one managed operator, with no code of its own to watch."""
    return is_managed(part) and not part.__dict__[HANDLE].lends_to_code


def _code_of(forward: Any) -> int:
    return id(getattr(forward, "__code__", forward))


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile` was called; a first forward is heard in the same way."""
    call = module.__dict__.get(_SLOT)
    return call.call is not None if isinstance(call, _Entry) else call is not None


def _look_again_of(first_forward: FirstForward) -> Callable[[Any], None]:
    reference = weakref.ref(first_forward)

    def look_again(_: Any) -> None:
        found = reference()
        if found is not None:
            found.structure_settled()

    return look_again


class _Reaching:
    """`autocast_reaches_kernels` where torch.compile compiles each frame: but none of these."""

    @_untraced_alone
    def __enter__(self) -> None:
        compiler = _set_eval_frame(None)
        try:
            self._reaching = autocast_reaches_kernels()
            self._reaching.__enter__()
        finally:
            _set_eval_frame(compiler)

    @_untraced_alone
    def __exit__(self, *_: object) -> None:
        compiler = _set_eval_frame(None)
        try:
            self._reaching.__exit__(None, None, None)
        finally:
            _set_eval_frame(compiler)


class _Entry:
    """What torch calls for ``module(...)``; false, because nothing was compiled."""

    def __init__(
        self, module: nn.Module, first_forward: FirstForward, call: Callable[..., Any] | None
    ) -> None:
        self._module = weakref.ref(module)
        self._first_forward = first_forward
        self.call = call  # what was there: a compiled module's own

    def belongs_to(self, first_forward: FirstForward) -> bool:
        """Whether `first_forward` put it there."""
        return self._first_forward is first_forward

    def __bool__(self) -> bool:
        return False

    @_untraced_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            refuse_tracing("torch.export")
        module = cast("nn.Module", self._module())
        call = self.call or module._call_impl
        # Asked here: in what torch.compile leaves alone, nothing is compiled. And by setting it:
        # torch 2.6 hands out its callback without a reference where it is asked for.
        compiler = _set_eval_frame(None)
        try:
            compiling = callable(compiler)
            watch, code = self._first_forward.watch(module, (args, kwargs), compiling)
        finally:
            _set_eval_frame(compiler)
        if watch is None:
            if not is_watched():
                return call(*args, **kwargs)
            with _Reaching():  # a region may have begun since the model was called
                return call(*args, **kwargs)
        try:
            set_watched(True)
            with (
                _Reaching(),
                watch,
                self._first_forward.direct_uses(watch, compiling),
            ):
                result = call(*args, **kwargs)
        finally:
            set_watched(False)
        self._first_forward.has_passed(code)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an attached model is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def watch_first_forward(structure: Structure) -> FirstForward:
    """Watch the first forward of a model that has just been attached."""
    return FirstForward(structure)
