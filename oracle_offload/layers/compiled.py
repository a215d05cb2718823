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
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from ..autocast import cast_dtype, computing_in
from ..errors import OffloadError, StaleWeightsError
from ..operators import operator_of
from .swap import HANDLE, base_class, is_exporting, refuse_tracing
from .traced import (
    Numbered,
    above_autograd,
    advance,
    after_autograd,
    computed_weight_error,
    define_operator,
    differentiate_by,
    functorch_active,
    layer_by_number,
    layer_in_backward,
    layer_of,
)

if TYPE_CHECKING:
    from ..structure import Structure

_HOW = "Tensor[] given, Tensor[] own, Tensor key, bool[] needs, str call, SymInt[] numbers"
_FORWARD = f"({_HOW}, ScalarType? dtype, int example) -> Tensor"
_BACKWARD = f"(Tensor grad, {_HOW}, ScalarType? dtype) -> Tensor[]"
_TENSOR, _NUMBER, _OTHER = "...", "b''", "\0"  # what stands for them in a call that is written down
_constant: Callable[..., Any] = torch.compiler.assume_constant_result  # to a compiler


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
        return repr(value) if value - value == 0 else _OTHER
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
        return next(numbers)
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
        # Modules that stand before this one and take part in what it computes: peft's wrappers.
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
        call = _written((module.training, method, args, kwargs), given, numbers)
        if self.breaks or self.wrappers or _OTHER in call or functorch_active():
            return otherwise(module, *args, **kwargs)
        if is_exporting():
            refuse_tracing("torch.export")
        own = [tensor for tensor in module._parameters.values() if tensor is not None]
        dtype = cast_dtype(self.device_type)
        y = lent(given, own, self.key, [], call, numbers, dtype, self.example())
        advance(self.attachment.sequence, y)
        return y

    @_constant  # one compiled block serves all blocks
    def example(self) -> int:
        """Return the number of a leaf like those that the compiled code calls: of this one."""
        return self.number

    def own(self) -> list[Tensor]:
        """Return every Parameter of the module."""
        module: Any = self.module()
        return [tensor for tensor in module._parameters.values() if tensor is not None]

    def is_own(self, used: Sequence[Tensor]) -> bool:
        """Whether what an operator was given are the Parameters that are there now."""
        now = self.own()
        return len(now) == len(used) and all(
            self.has_only_moved(then.data_ptr(), tensor.data_ptr())
            for then, tensor in zip(used, now, strict=True)
        )

    def call(
        self, given: Sequence[Tensor], call: str, numbers: Sequence[int], dtype: torch.dtype | None
    ) -> Tensor:
        """Make a call that was written down; return a tensor with memory of its own."""
        module: Any = self.module()
        _, method, args, kwargs = _filled(_read(call), iter(given), iter(numbers))
        inner = getattr(base_class(module), method)

        def compute() -> Any:
            y = inner(module, *args, **kwargs)
            others = (*given, *module._parameters.values(), *module._buffers.values())
            return y.clone() if isinstance(y, Tensor) and _is_part(y, others) else y

        with computing_in(self.device_type, dtype):
            y = self.lend_to(compute)
        if type(y) is not Tensor:
            raise OffloadError(
                f"managed layer '{self.name}' returns {type(y).__name__}, and not one tensor as "
                "compiled code was told. Leave it resident with ignore_modules=[...], or do not "
                "compile what calls it."
            )
        return y


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
    with above_autograd():
        if not needs:
            with torch.no_grad():
                return leaf.call(given, *how[:3])
        # Recorded, for code may choose by that what it runs; kept is nothing.
        keeping = torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
        with torch.enable_grad(), keeping:
            return leaf.call(_leaves(given, needs[: len(given)]), *how[:3]).detach()


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
            f"the weights of managed layer '{leaf.name}' are not what its compiled forward "
            "computed with: one was replaced through .data. Change weights after backward."
        )
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
    """Return a gradient in the layout and the memory that a compiler was told of."""
    stride = torch.empty_like(tensor, device="meta").stride()
    if answer.stride() != stride:
        return answer.new_empty_strided(tensor.shape, stride).copy_(answer)
    return answer.clone() if _is_part(answer, others) else answer


# ---- what a compiler is told of them ----


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NoOperator(f"{func} draws random numbers")
        for tensor, written in operator_of(func).tensors(args, kwargs):
            if written and _is_part(tensor, self._read):
                raise _NoOperator(_WRITES)
        return func(*args, **kwargs)


class _NoOperator(Exception):
    """Why a call is none."""


_CONTAINERS = (list, dict, set)
_WRITES = "it writes to its input, or to itself"


def _copy_of(module: nn.Module, like: Callable[[Tensor], Tensor], copies: list[Any]) -> Any:
    """Return a module that computes as this one did before attach, on what `like` makes.

    It, and copies of its children, are added to `copies`.
    """

    def each(found: Any, make: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: None if value is None else make(value) for name, value in found.items()}

    made = object.__new__(base_class(module))
    made.__dict__ = {
        key: copy.copy(value) if isinstance(value, _CONTAINERS) else value
        for key, value in vars(module).items()
        if key != HANDLE
    }
    made._parameters = each(module._parameters, like)
    made._buffers = each(module._buffers, like)
    made._modules = each(module._modules, lambda child: _copy_of(child, like, copies))
    copies.append(made)
    return made


def _state(copies: Sequence[Any]) -> list[Any]:
    """Return what differs once one of the modules was written to."""
    return [
        [*map(id, value.values() if isinstance(value, dict) else value)]
        if isinstance(value, _CONTAINERS)
        else id(value)
        for made in copies
        for value in vars(made).values()
    ]


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
    made = _copy_of(module, like, copies)
    own = [tensor for tensor in made._parameters.values() if tensor is not None]
    buffers = [tensor for each in copies for tensor in each._buffers.values()]
    _, method, args, kwargs = _filled(_read(call), iter(given), iter(numbers))
    before = _state(copies)
    with _Watch([*given, *own, *buffers]):
        y = getattr(base_class(module), method)(made, *args, **kwargs)
    if not isinstance(y, Tensor):
        raise _NoOperator(f"it returns {type(y).__name__}")
    if free_unbacked_symbols(y):
        raise _NoOperator("the size of its result hangs on values")
    if before != _state(copies):
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
    leaf = cast("Whole", layer_by_number(example))
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
    """Let autograd record what the module computes; a compiler that looks on, the operator."""
    tensors = (*given, *own)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _below_autograd(keyset, given, own, key, needs, *how)
    if type(key) is not Tensor:
        return cast("Tensor", _apply(keyset, len(given), key, how, *tensors))
    leaf: Whole = layer_of(key)
    if not leaf.is_own(own):
        raise computed_weight_error(leaf.name)
    return leaf.call(given, *how[:3])


differentiate_by("lent", _differentiable)
