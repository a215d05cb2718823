"""Classes of managed modules: what `attach` makes of ``nn.Linear`` and its like.

A managed module keeps its identity, its parameters and its class name; its class becomes a cached
subclass whose ``forward`` computes with borrowed weights, or lends them to the class's own. The
state is in one instance attribute, `HANDLE`: without it (a deep copy, a detached module) the same
forward is the base class's.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ..engine.exemption import exempt
from ..errors import OffloadError
from .flatten import is_wrapper
from .leaf import Leaf
from .managed import BASE, HANDLE, casts_layerwise, is_managed

# Methods that compute, where a module has them. Setup methods (diffusers' fuse_projections, weight
# initialisation) are not among them.
ENTRY_METHODS = ("forward", "__call__", "encode", "decode", "forward_features")
_OTHER_ENTRY = re.compile(r"forward.*|generate|get_\w+_features")
ANSWERS_FOR = "_oracle_offload_answers_for"  # the class below; see `oracle_offload.model.answers`


def _is_tracing_for_export() -> bool:
    """Replace ``torch.compiler.is_exporting`` of torch 2.7, except where dynamo traces."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _is_tracing_for_export)


def refuse_tracing(tracer: str) -> NoReturn:
    """Say that `tracer` would keep what a layer has for one call alone."""
    raise OffloadError(
        f"{tracer} cannot trace an attached model: each layer has its weights for one call alone. "
        "Detach the model first, or compile it with torch.compile, which can."
    )


_WHY_OUTSIDE = (
    "a managed layer computes there that cannot be one operator of a compiled graph; "
    "docs/compile.md lists which. Compile without fullgraph=True: the graph breaks at this layer "
    "alone. Or leave the layer resident with ignore_modules=[...]"
)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a graph of torch.compile break at `function`; ``fullgraph=True`` says what to do."""
    told = {}
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # 2.6 has none
        told["reason"] = _WHY_OUTSIDE
    return cast("Callable[..., Any]", torch.compiler.disable(function, **told))


def _call(layer: Any, x: Tensor) -> Any:
    return layer(x)


untraced: Callable[[Any, Tensor], Any] = outside(_call)
_set_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def call(layer: Any, x: Tensor) -> Any:
    """Do what `untraced` does, without the decorator's own bookkeeping: for every eager call."""
    compiler = _set_compiler(None)
    try:
        return layer(x)
    finally:
        _set_compiler(compiler)


@functools.cache
def managed_class(base: Any, below: Any) -> Any:
    """Return the subclass of `base` whose forward borrows its weights; one per base, same name.

    `below`: see `Leaf.stands_below`. A forward that `base` is given later reads its weights.
    """
    known = base.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        layer = self.__dict__.get(HANDLE)
        if layer is None or (base.forward is not known and hasattr(layer, "base_forward")):
            return cast("Tensor", base.forward(self, input))
        if torch.compiler.is_dynamo_compiling():
            return cast("Tensor", layer.traced(self, input))
        y: Tensor = call(layer, input)  # no `cast`, which is a call
        return y

    functools.update_wrapper(forward, base.forward, assigned=("__doc__",), updated=())
    return _derive(base, {} if below else {"forward": forward}, below)


@functools.cache
def answering_class(base: Any, known: Any) -> Any:
    """Return the class between `base` and a managed class with a forward of its own.

    It runs where that calls ``super()``: Bart's and Gemma's embeddings scale the rows, Wan's
    causal convolution pads its input. `known` is the forward of `base` that it replaces.
    """

    def forward(self: Any, input: Tensor) -> Tensor:
        layer = self.__dict__.get(HANDLE)
        if layer is None or base.forward is not known:
            return cast("Tensor", base.forward(self, input))
        if torch.compiler.is_dynamo_compiling():
            return cast("Tensor", layer.traced(self, input))
        return cast("Tensor", call(layer, input))

    functools.update_wrapper(forward, base.forward, assigned=("__doc__",), updated=())
    return type(base.__name__, (base,), {"forward": forward})


@functools.cache
def lending_class(base: Any, around_call: bool) -> Any:
    """Return the subclass of `base` in whose forward its leaf lends; one per base, same name.

    `around_call`: for as long as a call takes, whatever function ``module.forward`` is.
    """

    def lending(name: str) -> Callable[..., Any]:
        def lend(self: Any, *args: Any, **kwargs: Any) -> Any:
            leaf, inner = self.__dict__.get(HANDLE), getattr(base, name)
            if leaf is None:
                return inner(self, *args, **kwargs)
            return leaf.lend_to(functools.partial(inner, self, *args, **kwargs))

        return outside(lend)

    def method_of(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        lend = lending(name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                leaf = self.__dict__.get(HANDLE)
                if leaf is None:
                    return getattr(base, name)(self, *args, **kwargs)
                return leaf.traced(self, name, lend, args, kwargs)
            return lend(self, *args, **kwargs)

        functools.update_wrapper(method, inner, assigned=("__doc__", "__name__"), updated=())
        return method

    if around_call:
        return _derive(base, {"__call__": lending("__call__")})
    # A parent may call another method of that kind: ``experts.forward_routed(...)``; and others
    # begin with one of transformers' that computes with the model's own Parameters.
    others = (name for name in dir(base) if _OTHER_ENTRY.fullmatch(name))
    methods = {name: getattr(base, name, None) for name in {*ENTRY_METHODS, *others}}
    return _derive(
        base,
        {
            name: method_of(name, inner)
            for name, inner in methods.items()
            if inspect.isfunction(inner) and name != "__call__"
        },
    )


def _derive(base: Any, members: dict[str, Any], below: Any = None) -> Any:
    """Return a subclass of `base` with its name, which keeps masters where they are."""

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not is_managed(self):
            return base._apply(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        apply_to_residents(self, fn)
        leaf: Any = self.__dict__[HANDLE]
        if leaf.lends_to_code and leaf.is_lending_here():
            _apply_to_lent(self, leaf, fn)
        else:
            _apply_to_masters(self, fn)
        return self

    def __getattr__(self: Any, name: str) -> Any:
        own = self.__dict__
        if name in own["_parameters"] or name in own["_buffers"]:
            leaf = own.get(HANDLE)
            if leaf is not None:
                compiling = torch.compiler.is_dynamo_compiling()
                found = leaf.traced_read(self, name) if compiling else leaf.read(self, name)
                if found is not None:
                    return found
        return base.__getattr__(self, name)

    def _load_from_state_dict(
        self: Any, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        leaf: Leaf | None = self.__dict__.get(HANDLE)
        if leaf is not None:  # what is queued may still read what is written here
            leaf.state.engine.settle()
            assign = bool(local_metadata.get("assign_to_params_buffers"))
            others = leaf.attachment.written_elsewhere(leaf, self, state_dict, prefix, assign)
            if others:
                state_dict = {k: v for k, v in state_dict.items() if k.startswith(prefix)}
                for name in others:  # a tensor that is copied to itself is not written
                    state_dict[prefix + name] = self._parameters[name]
        base._load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs)

    def _save_to_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        leaf: Leaf | None = self.__dict__.get(HANDLE)
        if leaf is not None:
            leaf.attachment.before_saving(self)
        base._save_to_state_dict(self, *args, **kwargs)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        leaf: Leaf | None = self.__dict__.get(HANDLE)
        if leaf is not None and name in self.__dict__["_parameters"]:
            value = leaf.placed_again(value)
        base.__setattr__(self, name, value)
        if leaf is not None and (
            name == "__class__"
            or name in _watched(leaf, self)
            or (name == "forward" and casts_layerwise(self))
        ):
            leaf.attachment.let_go_soon(leaf)
        elif leaf is not None and name == "forward" and "_diffusers_hook" in self.__dict__:
            leaf.structure.settle_soon()  # only later it shows which of its hooks came

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        make, arguments, state, *rest = reduced(cast("Any", super(made, self)).__reduce_ex__(2))
        if type(state) is dict:  # else it is made already, by `oracle_offload.model.answers`
            state = {key: value for key, value in state.items() if key != HANDLE}
        return *made_by(make, arguments, made, unanswered(base)), state, *rest

    made = type(
        base.__name__,
        (base,) if below is None else (base, below),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_apply": _apply,
            "__setattr__": __setattr__,
            "__getattr__": __getattr__,
            "_load_from_state_dict": _load_from_state_dict,
            "_save_to_state_dict": _save_to_state_dict,
            "__reduce_ex__": __reduce_ex__,
            BASE: base,
            **members,
        },
    )
    return made


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module.forward`` was set to the class's own: what removing a hook leaves behind."""
    forward = module.__dict__.get("forward")
    base: Any = getattr(type(module), BASE, type(module))
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) in (
        base.forward,
        managed_class(base, None).forward,
        lending_class(base, False).forward,
    )


def swap_in(module: nn.Module, leaf: Leaf) -> None:
    """Make `module` a managed one."""
    _follow_class(module)
    module.__dict__[HANDLE] = leaf
    base = cast("Any", type(module))
    module.__class__ = (
        lending_class(base, leaf.around_call)
        if leaf.lends_to_code
        else managed_class(base, leaf.stands_below(base))
    )


def swap_out(module: nn.Module) -> None:
    """Undo `swap_in`; a class that other code derived or put in its place since then stays."""
    _follow_class(module)
    base = vars(type(module)).get(BASE)
    if base is not None:  # a class that was derived since (a parametrisation's) stays
        object.__setattr__(module, "__class__", base)  # of which the layer need not know
    module.__dict__.pop(HANDLE, None)  # last: after Ctrl-C it is known by this, and undone again


def base_class(module: nn.Module) -> Any:
    """Return the class of a module as it was before attach."""
    return unanswered(getattr(type(module), BASE, type(module)))


def reduced(answer: Any) -> tuple[Any, ...]:
    """Return what an object's ``__reduce_ex__`` answers, with a state: it may have none."""
    make, arguments, *rest = answer
    return make, arguments, *(rest or [None])


def made_by(make: Any, arguments: tuple[Any, ...], kind: Any, base: Any) -> tuple[Any, Any]:
    """Return what makes an object of `base` in a copy or a pickle, for one of the class `kind`.

    pickle insists that what ``__newobj__`` makes has the object's own class; the older
    reconstructor of the standard library does the same without asking.
    """

    def named(given: Any) -> Any:
        return base if isinstance(given, type) and issubclass(given, kind) else given

    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        return copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
    return named(make), tuple(map(named, arguments))


def unanswered(kind: Any) -> Any:
    """Return the class that the user knows, for one by which an attached model answers."""
    return vars(kind).get(ANSWERS_FOR, kind)


def _follow_class(module: nn.Module) -> None:
    """Drop an own forward from the instance: it would hide that of the class to come."""
    if has_own_forward(module):
        del module.__dict__["forward"]


def managed_keys(module: nn.Module) -> set[str]:
    """Return the keys of those Parameters of `module` that are on the host."""
    if not is_managed(module):
        return set()
    leaf: Leaf = module.__dict__[HANDLE]
    return leaf.keys_of(module) if leaf.lends_to_code else set(module._parameters)


def _watched(leaf: Leaf, module: nn.Module) -> Container[str]:
    """Return the attributes of `module` that the leaf computes with."""
    return leaf.keys_of(module) if leaf.lends_to_code else (*leaf.required, *leaf.names)


def resident_tensors(module: nn.Module) -> list[Tensor | None]:
    """Return the Parameters and buffers of a module that are no masters."""
    if not is_managed(module):
        return [*module._parameters.values(), *module._buffers.values()]
    leaf: Leaf = module.__dict__[HANDLE]
    if not leaf.lends_to_code:  # an operator's tensors travel together
        return [*module._buffers.values()] if leaf.has_buffers else []
    managed = managed_keys(module)
    own = (tensor for key, tensor in module._parameters.items() if key not in managed)
    return [*own, *module._buffers.values()]


def apply_to_residents(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """``module._apply(fn)`` of all tensors that are no masters; Parameters keep their order."""
    if all(tensor is None for tensor in resident_tensors(module)):
        return  # the common case, and the one that other threads may compute with meanwhile
    base: Any = base_class(module)
    managed = managed_keys(module)
    if not managed:  # TorchScript, too, whose `_parameters` are no dict
        base._apply(module, fn, recurse=False)
        return
    masters = {key: module._parameters.get(key) for key in managed}
    try:
        module._parameters.update(dict.fromkeys(masters))  # which `_apply` passes over
        base._apply(module, fn, recurse=False)
    finally:
        module._parameters.update(masters)
        if isinstance(module, nn.RNNBase):
            list_weights(module)


def weight_lists(module: nn.RNNBase, standing: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists that ``nn.RNNBase`` keeps of its Parameters, by attribute; see `standing`.

    Parameters
    ----------
    module : nn.RNNBase
        That keeps them.
    standing : mapping
        By key, what is to be there.
    """
    weights = [standing.get(name) for name in module._flat_weights_names]
    references = [None if weight is None else weakref.ref(weight) for weight in weights]
    return {"_flat_weights": weights, "_flat_weight_refs": references}


def list_weights(module: nn.RNNBase) -> None:
    """Let the lists that ``nn.RNNBase`` keeps of its Parameters be of those that it has now."""
    module.__dict__.update(weight_lists(module, module._parameters))


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_Outcome = tuple[torch.dtype, torch.memory_format]
_outcomes: tuple[Any, dict[tuple[int, torch.dtype, torch.memory_format], _Outcome]] = (None, {})


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Return whether a tensor is laid out channels-last; contiguous where it is not."""
    last = _CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _outcome(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> _Outcome:
    """Return the dtype and the format that `fn` gives such a tensor.

    One ``.to()`` asks for every layer with the same `fn`; trainers call it at every step.
    """
    global _outcomes
    if _outcomes[0] is None or _outcomes[0]() is not fn:
        try:
            _outcomes = weakref.ref(fn), {}
        except TypeError:
            _outcomes = None, {}
    key = tensor.dim(), tensor.dtype, _format_of(tensor)
    known = _outcomes[1].get(key)
    if known is None:
        dim, dtype, memory_format = key
        with torch.no_grad():
            probe = torch.zeros((2,) * dim, dtype=dtype, device="cpu")
            result = fn(probe.contiguous(memory_format=memory_format))
        known = _outcomes[1][key] = result.dtype, _format_of(result)
    return known


def _apply_to_lent(module: nn.Module, leaf: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """``module._apply(fn)`` by code that computes with what is lent to it: for this call alone."""
    for key in leaf.keys_of(module):
        tensor = module._parameters.get(key)
        if tensor is not None:
            with torch.no_grad():
                tensor.data = fn(tensor)


def _apply_to_masters(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """``module._apply(fn)`` for masters: a change of dtype or layout is kept, a move is not.

    What `fn` does is read off a small tensor of the same kind, so that no weight travels to a
    device only to come back.
    """
    leaf: Leaf = module.__dict__[HANDLE]
    changed = False
    for key in leaf.keys_of(module):
        parameter = module._parameters.get(key)
        if parameter is None:
            continue
        dtype, memory_format = _outcome(fn, parameter)
        wanted = parameter.data
        if dtype != parameter.dtype:
            wanted = wanted.to(dtype)
        if memory_format is not _format_of(parameter):
            wanted = wanted.contiguous(memory_format=memory_format)
        if wanted.data_ptr() != parameter.data_ptr():
            parameter.data = wanted
            changed = True
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)
    changed |= _cast_others(module, leaf, fn)
    if changed:
        leaf.adopt(lasting=True)


def _cast_others(module: nn.Module, leaf: Leaf, fn: Callable[[Tensor], Tensor]) -> bool:
    """Cast what is replaced rather than re-pointed: parameters made of tensors, and buffers."""
    changed = False
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            replaced = name in leaf.names if tensors is module._buffers else is_wrapper(tensor)
            if tensor is None or not replaced:
                continue
            dtype, _ = _outcome(fn, tensor)
            if dtype != tensor.dtype:
                with exempt(), torch.no_grad():
                    now: Any = tensor.to(dtype)
                if tensors is module._parameters:
                    now = nn.Parameter(now, requires_grad=tensor.requires_grad)
                tensors[name] = now
                changed = True
    return changed
