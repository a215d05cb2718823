"""What torch.compile sees of a module that is lent its weights: one operator, the whole call.

What it runs is the call without a compiler, so the bits are the same. For backward it keeps what
the call was given, and nothing of what autograd records inside. Backward makes the call once more,
where autograd records it. So no slot outlives an operator, and it is a function of its arguments
alone: a compiler may recompute it, or write over what it was given.

Whether a call can be shown like that is found where it is compiled, with tensors that hold nothing
(`_pretend`). Where it cannot, the graph breaks, and the call is made from outside compiled code.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
import sys
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.operators import operator_of
from ..errors import OffloadError, StaleWeightsError
from .autocast import cast_dtype, computing_in, saving
from .leaf import Structure
from .managed import HANDLE
from .swap import base_class, is_exporting, refuse_tracing
from .traced import (
    Numbered,
    above_autograd,
    advance,
    after_autograd,
    computed_weight_error,
    define_operator,
    differentiate_by,
    functorch_active,
    layer_in_backward,
    layer_of,
)

_HOW = "Tensor[] given, Tensor[] own, Tensor key, bool[] needs, str call, SymInt[] numbers"
_FORWARD = f"({_HOW}, ScalarType? dtype, int example) -> Tensor"
_BACKWARD = f"(Tensor grad, {_HOW}, ScalarType? dtype) -> Tensor[]"
_TENSOR, _NUMBER, _OTHER = "...", "b''", "\0"  # their placeholders in a call that is written down
_ASIDE = ("training", "_is_full_backward_hook")  # of a module: the one is written down with a call
_graph_task = torch._C._current_graph_task_id
_constant: Callable[..., Any] = torch.compiler.assume_constant_result  # to a compiler

# What is traced has a number; `_told` has what the compiler expects of it. The first number is
# random: torch's cache on disk does not depend on a module's code, so no other trace may use it.
_traces = itertools.count(int.from_bytes(os.urandom(6), "little"))
_examples: weakref.WeakValueDictionary[int, Whole] = weakref.WeakValueDictionary()
_told: dict[int, _Look] = {}
_Look = tuple[torch.dtype, list[Any], list[Any]]  # dtype, shape, strides; None is not known


# ---- a call, written down ----


def _written(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """Return a literal for `value`; its tensors and whole numbers are added to the lists.

    What has none is `_OTHER` in it.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, float):
        return f"b'{value.hex()}'"  # which a compiler knows to be fixed; no other way tells it so
    if isinstance(value, int):
        numbers.append(value)
        return _NUMBER
    if type(value) is tuple:
        return "(" + "".join([_written(v, tensors, numbers) + "," for v in value]) + ")"
    if type(value) is list:
        return "[" + "".join([_written(v, tensors, numbers) + "," for v in value]) + "]"
    if type(value) is dict:
        rows = [repr(k) + ":" + _written(v, tensors, numbers) + "," for k, v in value.items()]
        return "{" + "".join(rows) + "}"
    return _OTHER


_read = functools.lru_cache(maxsize=4096)(ast.literal_eval)


def _filled(form: Any, tensors: Iterator[Tensor], numbers: Iterator[int]) -> Any:
    """Return what was written down, with these tensors and numbers."""
    if form is ...:
        return next(tensors)
    if isinstance(form, bytes):
        return float.fromhex(form.decode()) if form else next(numbers)
    if isinstance(form, (tuple, list)):
        return type(form)([_filled(part, tensors, numbers) for part in form])
    if isinstance(form, dict):
        return {key: _filled(part, tensors, numbers) for key, part in form.items()}
    return form


# ---- the leaf ----


class Whole(Numbered):
    """A leaf whose whole call is one operator to a compiler."""

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        super().__init__(module, name, structure)
        self.breaks = False  # a call of such a module was found to be no operator
        self.settings: dict[Any, Any] = {}  # what the module was set to in the last forward
        # Modules that wrap this one and take part in what it computes: peft's wrappers.
        self.wrappers: list[weakref.ref[nn.Module]] = []

    @abstractmethod
    def lend_to(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, with device tensors in the masters' places while it runs."""

    def traced(
        self, module: Any, method: str, otherwise: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call by the operator, or by `otherwise`, from outside; torch.compile traces this."""
        given: list[Tensor] = []
        numbers: list[int] = []
        # Of what the module is set to, this alone is looked at: dropout and norms compute by it.
        training = [each.training for each in module.modules()]
        call = _written((training, method, args, kwargs), given, numbers)
        if self.breaks or self.wrappers or _OTHER in call or functorch_active():
            return otherwise(module, *args, **kwargs)
        if is_exporting():
            refuse_tracing("torch.export")
        own = _own(module)
        dtype = cast_dtype(self.device_type)
        y = lent(given, own, self.key, [], call, numbers, dtype, self.example())
        advance(self.attachment.sequence, y)
        return y

    @_constant  # one compiled block serves all blocks
    def example(self) -> int:
        """Return the number under which a leaf like those in compiled code says what it returns."""
        number = next(_traces)
        _examples[number] = self
        return number

    def own(self) -> list[Tensor]:
        """Return every Parameter and buffer of the module."""
        return _own(self.module())

    def is_own(self, used: Sequence[Tensor]) -> bool:
        """Whether what an operator was given are the Parameters and buffers of now."""
        now = self.own()
        return len(now) == len(used) and all(
            self.has_only_moved(then.data_ptr(), tensor.data_ptr())
            for then, tensor in zip(used, now, strict=True)
        )

    def call(
        self,
        given: Sequence[Tensor],
        call: str,
        numbers: Sequence[int],
        dtype: torch.dtype | None,
        example: int = -1,
    ) -> Tensor:
        """Make a call that was written down; return a tensor with memory of its own."""
        module: Any = self.module()
        training, method, args, kwargs = _filled(_read(call), iter(given), iter(numbers))
        inner = getattr(base_class(module), method)

        def compute() -> Any:
            with _trained(module, training):
                y = inner(module, *args, **kwargs)
            others = (*given, *_own(module))
            return y.clone() if isinstance(y, Tensor) and _is_part(y, others) else y

        with computing_in(self.device_type, dtype):
            y = self.lend_to(compute)
        if type(y) is not Tensor:
            raise self._told_otherwise(type(y).__name__, "one tensor")
        told = _told.get(example)
        if told is not None and not _is_like(y, told):
            raise self._told_otherwise(_describe(_look(y)), _describe(told))
        return y

    def _told_otherwise(self, what: str, told: str) -> OffloadError:
        return OffloadError(
            f"managed layer '{self.name}' returns {what}, and not {told} as compiled code was "
            "traced with. Leave it resident with ignore_modules=[...], do not compile what calls "
            "it, or call torch.compiler.reset() after such a change."
        )


def _own(module: Any) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module.buffers()) if t is not None]


@contextlib.contextmanager
def _trained(module: nn.Module, training: Sequence[bool]) -> Iterator[None]:
    """Let the module and those below it be in the mode that a call was written down in."""
    modules = list(module.modules())
    were = [each.training for each in modules]
    for each, mode in zip(modules, training, strict=True):
        each.__dict__["training"] = mode
    try:
        yield
    finally:
        for each, mode in zip(modules, were, strict=True):
            each.__dict__["training"] = mode


def _settings(module: Any) -> dict[Any, Any]:
    """Return the numbers, switches and strings that the module and those below it keep."""
    return {
        (index, name): value
        for index, each in enumerate(module.modules())
        for name, value in vars(each).items()
        if isinstance(value, (bool, int, float, str)) and name not in _ASIDE
    }


def _look(y: Tensor) -> _Look:
    """Return what a compiler knows of a result before it is there."""
    known = [[n if type(n) is int else None for n in each] for each in (y.shape, y.stride())]
    return y.dtype, known[0], known[1]


def _is_like(y: Tensor, told: _Look) -> bool:
    dtype, shape, stride = told
    return (
        y.dtype is dtype
        and len(shape) == y.dim()
        and all(
            (size is None or n == size) and (step is None or n < 2 or m == step)
            for n, m, size, step in zip(y.shape, y.stride(), shape, stride, strict=True)
        )
    )


def _describe(look: _Look) -> str:
    return f"a tensor of {look[0]}, shape {look[1]} and strides {look[2]}"


def _is_part(tensor: Tensor, of: Sequence[Tensor | None]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(other is not None and other.untyped_storage()._cdata == storage for other in of)


def _uses(result: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of what autograd has recorded, as often as gradients would come to them."""
    waiting: list[Any] = [result.grad_fn]
    met = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                yield following.variable
            else:
                waiting.append(following)


# ---- what the operators run ----


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Return the tensors as leaves of a graph of its own, which asks for these gradients."""
    pairs = zip(tensors, needs, strict=True)
    return [tensor.detach().requires_grad_(need) for tensor, need in pairs]


def _nothing(tensor: Any) -> Any:
    """Return what is kept of a tensor that autograd saves where backward calls once more."""


def _forward(
    given: list[Tensor],
    own: list[Tensor],
    key: Tensor,
    needs: list[bool],
    *how: Any,  # call, numbers, dtype, example
) -> Tensor:
    leaf: Whole = layer_of(key)
    if not leaf.is_own(own):
        raise computed_weight_error(leaf.name)
    leaf.settings = _settings(leaf.module())
    with above_autograd():
        if not needs:
            with torch.no_grad():
                return leaf.call(given, *how)
        # Recorded, for code may choose by that what it runs; kept is nothing.
        with torch.enable_grad(), saving(_nothing, _nothing):
            return leaf.call(_leaves(given, needs[: len(given)]), *how).detach()


def _backward(
    grad: Tensor,
    given: list[Tensor],
    own: list[Tensor],
    key: Tensor,
    needs: list[bool],
    *how: Any,
) -> list[Tensor]:
    leaf: Whole = layer_in_backward(key)
    leaf.state.turned = True
    if not (leaf.is_current() and leaf.is_own(own)):
        raise StaleWeightsError(
            f"the weights or buffers of managed layer '{leaf.name}' are not what its compiled "
            "forward computed with: one was replaced. Change them after backward."
        )
    _check_settings(leaf)
    inputs = [*_leaves(given, needs[: len(given)]), *leaf.own()]
    asked = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
    with above_autograd(), torch.enable_grad():
        y = leaf.call(inputs[: len(given)], *how)
        _check_uses(leaf, y, inputs)
        answers = iter(torch.autograd.grad(y, asked, grad, allow_unused=True))
    found: list[Tensor] = []
    for tensor, need in zip(inputs, needs, strict=True):
        answer = next(answers) if need else grad.new_empty(0)
        answer = torch.zeros_like(tensor) if answer is None else answer
        found.append(_as_told(answer, tensor, (grad, *found)) if need else answer)
    return found


def _check_settings(leaf: Whole) -> None:
    """Raise where the call that backward makes once more would be another."""
    now, then = _settings(leaf.module()), leaf.settings
    for key in (*now, *then):
        if now.get(key) != then.get(key):
            raise StaleWeightsError(
                f"managed layer '{leaf.name}': {key[1]} was {then.get(key)} in its compiled "
                f"forward and is {now.get(key)} in backward, which makes that call once more. "
                "Change what a module is set to after backward."
            )


def _check_uses(leaf: Whole, y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise where gradients would go to a tensor that compiled code knows nothing of."""
    known = {id(tensor) for tensor in inputs}
    for tensor in _uses(y):
        if id(tensor) not in known:
            raise OffloadError(
                f"managed layer '{leaf.name}' computes with a trainable tensor of shape "
                f"{list(tensor.shape)} that is no Parameter of it; in compiled code it would get "
                "no gradient. Leave the layer resident with ignore_modules=[...], or do not "
                "compile what calls it."
            )


def _as_told(answer: Tensor, tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a gradient in the layout and the memory that a compiler expects."""
    stride = torch.empty_like(tensor, device="meta").stride()
    if answer.stride() != stride:
        return answer.new_empty_strided(tensor.shape, stride).copy_(answer)
    return answer.clone() if _is_part(answer, others) else answer


# ---- what a compiler knows of them ----


class _Watch(TorchDispatchMode):
    """Refuse what has another effect, or another result, when it is done again.

    Parameters
    ----------
    read : sequence of Tensor
        What is not to be written.
    """

    def __init__(self, read: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read
        self._graph_task = _graph_task()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _graph_task() != self._graph_task:  # what backward would need is not kept
            raise _NoOperator("it asks autograd for gradients itself")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NoOperator(f"{func} draws random numbers")
        for tensor, written in operator_of(func).tensors(args, kwargs):
            if written and _is_part(tensor, self._read):
                raise _NoOperator(_WRITES)
        return func(*args, **kwargs)


class _NoOperator(Exception):
    """Why a call is none."""


_WRITES = "it writes to its input, or to itself"


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a container with copies of the containers in it; anything else as it is."""
    if id(value) in memo:
        return memo[id(value)]
    made: Any = value
    if isinstance(value, tuple):
        parts = [_copied(part, memo) for part in value]
        same = all(one is other for one, other in zip(parts, value, strict=True))
        made = memo[id(value)] = value if same else tuple.__new__(type(value), parts)
    elif isinstance(value, (dict, list, deque, set)):
        made = memo[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for key, part in value.items():
                made[key] = _copied(part, memo)
        elif not isinstance(value, set):  # whose parts are no containers that can be written to
            made.clear()
            made.extend([_copied(part, memo) for part in value])
    return made


def _identity(value: Any) -> Any:
    """Return what differs once a container, or one in it, was written to."""
    if isinstance(value, dict):
        return [(id(key), _identity(part)) for key, part in value.items()]
    if isinstance(value, (tuple, list, deque, set)):
        return [_identity(part) for part in value]
    return id(value)


def _copy_of(
    module: nn.Module, like: Callable[[Tensor], Tensor], copies: list[Any], memo: dict[int, Any]
) -> Any:
    """Return a module that computes as this one did before attach, on what `like` makes.

    It, and copies of its children, are added to `copies`.
    """

    def each(found: Any, make: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: None if value is None else make(value) for name, value in found.items()}

    made = object.__new__(base_class(module))
    made.__dict__ = {
        key: _copied(value, memo) for key, value in vars(module).items() if key != HANDLE
    }
    made._parameters = each(module._parameters, like)
    made._buffers = each(module._buffers, like)
    made._modules = each(module._modules, lambda child: _copy_of(child, like, copies, memo))
    copies.append(made)
    return made


def _drawn() -> bytes:
    """Return where the generators are that torch knows nothing of."""
    numpy = sys.modules.get("numpy")
    return pickle.dumps((random.getstate(), numpy and numpy.random.get_state()))


def _draw_from(state: bytes) -> None:
    ours, numpys = pickle.loads(state)
    random.setstate(ours)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def _pretend(leaf: Whole, given: Sequence[Tensor], call: str, numbers: Sequence[int]) -> Tensor:
    """Make a call with tensors that hold nothing; return what its result looks like.

    Raises
    ------
    Exception
        It cannot be shown to a compiler as one operator that is made twice.
    """
    module, device = cast("nn.Module", leaf.module()), leaf.state.device

    def like(t: Tensor) -> Tensor:
        told = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        return told.requires_grad_(t.requires_grad)

    if any(True for child in module.children() for _ in child.parameters()):
        raise _NoOperator("modules below it have Parameters of their own")
    copies: list[Any] = []
    made = _copy_of(module, like, copies, {})
    own = [tensor for tensor in made._parameters.values() if tensor is not None]
    buffers = [tensor for each in copies for tensor in each._buffers.values()]
    _, method, args, kwargs = _filled(_read(call), iter(given), iter(numbers))
    before, drawn = [_identity(vars(each)) for each in copies], _drawn()
    try:
        with _Watch([*given, *own, *buffers]):
            y = getattr(base_class(module), method)(made, *args, **kwargs)
        if drawn != _drawn():
            raise _NoOperator("it draws random numbers")
    finally:
        _draw_from(drawn)
    if not isinstance(y, Tensor):
        raise _NoOperator(f"it returns {type(y).__name__}")
    if free_unbacked_symbols(y):
        raise _NoOperator("the size of its result depends on values")
    if before != [_identity(vars(each)) for each in copies]:
        raise _NoOperator(_WRITES)
    if torch.is_grad_enabled():
        _check_pretended(y, given, own)
    return y


def _check_pretended(y: Tensor, given: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Raise where gradients would not be those of a call that autograd records.

    It adds those of several uses to what comes from outside one by one, and makes none of no use.
    """
    uses = [id(tensor) for tensor in _uses(y)]
    once = all(uses.count(id(tensor)) == 1 for tensor in given if tensor.requires_grad)
    if not (once and all(id(tensor) in uses for tensor in own if tensor.requires_grad)):
        raise _NoOperator("it uses an input more than once, or something trained not at all")


def _check_given(given: Sequence[Tensor], needs: Sequence[bool]) -> None:
    """Raise where a tensor is given twice, whose gradients autograd would add as they come."""
    asked = [id(tensor) for tensor, need in zip(given, needs, strict=True) if need]
    if len({*asked}) < len(asked):
        raise _NoOperator("it is given the same tensor more than once")


def _note_break(leaf: Whole) -> None:
    """Call modules like that of `leaf` from outside compiled code from now on."""
    for layer in leaf.attachment.layers:
        if isinstance(layer, Whole) and _base_of(layer) is _base_of(leaf):
            layer.breaks = True


def _base_of(leaf: Whole) -> Any:
    return base_class(cast("nn.Module", leaf.module()))


def _fake_forward(
    given: list[Tensor],
    own: list[Tensor],
    key: Tensor,
    needs: list[bool],
    *how: Any,
) -> Tensor:
    call, numbers, dtype, example = how
    leaf = _examples[example]
    asked = (needs or [False] * len(given))[: len(given)]
    shapes: Any = cast("Any", key).fake_mode.shape_env  # None where all sizes are known
    ignoring = shapes.ignore_fresh_unbacked_symbols() if shapes else contextlib.nullcontext()
    try:
        with (
            above_autograd(),
            torch.set_grad_enabled(bool(needs)),
            computing_in(leaf.device_type, dtype),
            ignoring,  # values that the module asks for are its own, as long as no size is one
        ):
            _check_given(given, asked)
            y = _pretend(leaf, _leaves(given, asked), call, numbers)
    except Exception as error:
        _note_break(leaf)
        first = str(error).partition("\n")[0]
        why = OffloadError(
            f"managed layer '{leaf.name}' is no operator of a compiled graph ({first}). The "
            "graph breaks there; for fullgraph=True leave it resident with ignore_modules=[...]."
        )
        raise DynamicOutputShapeException(lent) from why
    _told[example] = _look(y)
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)


def _fake_backward(
    grad: Tensor,
    given: list[Tensor],
    own: list[Tensor],
    key: Tensor,
    needs: list[bool],
    *how: Any,
) -> list[Tensor]:
    pairs = zip((*given, *own), needs, strict=True)
    return [torch.empty_like(t) if need else grad.new_empty(0) for t, need in pairs]


lent = define_operator("lent", _FORWARD, _forward, _fake_forward)
_lent_backward = define_operator("lent_backward", _BACKWARD, _backward, _fake_backward)


class _Managed(Function):
    """The operator where a compiler differentiates it; nothing computes here."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, count: int, key: Tensor, how: Any, *tensors: Tensor) -> Any:
        given, own = list(tensors[:count]), list(tensors[count:])
        ctx.count, ctx.key, ctx.how = count, key, how[:3]
        ctx.save_for_backward(*tensors)  # the weights, too: torch knows of writes to them
        needs = [tensor.requires_grad for tensor in tensors]
        return _below_autograd(keyset, given, own, key, needs, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        given, own = tensors[: ctx.count], tensors[ctx.count :]
        needs = list(ctx.needs_input_grad[4:])
        found = _lent_backward(grad, given, own, ctx.key, needs, *ctx.how)
        gradients = [g if need else None for g, need in zip(found, needs, strict=True)]
        return None, None, None, None, *gradients


_apply: Any = _Managed.apply


def _below_autograd(keyset: Any, *arguments: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return cast("Tensor", lent.redispatch(keyset & after_autograd, *arguments))


def _differentiable(
    keyset: Any, given: list[Tensor], own: list[Tensor], key: Tensor, needs: list[bool], *how: Any
) -> Tensor:
    """Let autograd record what the module computes; while a compiler traces, the operator."""
    tensors = (*given, *own)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _below_autograd(keyset, given, own, key, needs, *how)
    if type(key) is not Tensor:
        return cast("Tensor", _apply(keyset, len(given), key, how, *tensors))
    leaf: Whole = layer_of(key)
    if not leaf.is_own(own):
        raise computed_weight_error(leaf.name)
    return leaf.call(given, *how)


differentiate_by("lent", _differentiable)
