"""What torch.compile sees of a managed layer: one operator, with nothing of the loan in it.

Each kind has two operators, forward and backward. They take the layer's masters for their geometry
alone, and a `key` that names the layer: one compiled block so serves all blocks. What they run is
the loan of `oracle_offload.layers.loan`, so the bits are those without a compiler.

A compiler may drop what it believes to be pure. So ``advance`` follows each use, which says that it
writes a tensor that lives on, `Attachment.sequence`. No operator reads that: a checkpoint's
recompute of one block would need that of all blocks before it, and all would be computed again
before the first backward. ``advance`` is an operator of its own, because a checkpoint cannot save
one of several results of an operator at a block's end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from ..engine.exemption import exempt
from ..engine.geometry import count_writes
from ..errors import OffloadError, StaleWeightsError
from .autocast import cast_dtype, cast_input
from .gradients import note_trainable
from .handle import Readable
from .leaf import Leaf, Structure, version_of
from .loan import Borrower, Layer, forward_kind, once_differentiable
from .swap import answering_class, is_exporting, refuse_tracing, untraced

if TYPE_CHECKING:
    from ..engine.engines import DeviceState

NAMESPACE = "oracle_offload"
_library = torch.library.Library(NAMESPACE, "DEF")
after_autograd = torch._C._after_autograd_keyset
functorch_active = torch._C._are_functorch_transforms_active
_graph_task = torch._C._current_graph_task_id
_constant: Callable[..., Any] = torch.compiler.assume_constant_result  # to a compiler
_numbers = itertools.count()
layers: dict[int, weakref.ref[Numbered]] = {}
_kernels: dict[Any, Callable[..., Any]] = {}  # what an operator runs, for a mode that sees it first
_asks: list[weakref.ref[Numbered]] = []  # the leaf whose weight is read where a compiler traces
# What a compiler believes that such a read returns, and of which leaf's tensor: it counts writes.
_believed: list[tuple[Tensor, weakref.ref[Numbered], str]] = []
_computes: dict[Any, Callable[..., Tensor]] = {}  # what it computes, with tensors on the device

# Whether autograd records a call: no, by the operator's own node, or by one of the whole graph.
NOT, HERE, BY_GRAPH = range(3)
# Both move bytes as they like: no part of a CUDA graph.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("cudagraph_unsafe", "needs_exact_strides")
    if hasattr(torch.Tag, name)
)
_FORWARD = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor key, ScalarType? dtype, int recorded{}) "
    "-> Tensor"
)
_BACKWARD = (
    "(Tensor grad, Tensor? x, SymInt[] size, SymInt[] stride, Tensor weight, Tensor? bias, "
    "Tensor key, ScalarType? dtype, bool[] needs{}) -> (Tensor, Tensor, Tensor)"
)


def kernel_of(func: Any) -> Callable[..., Any] | None:
    """Return what an operator of ours runs; None for any other operator."""
    return _kernels.get(func)


class Numbered(Leaf):
    """A leaf that compiled code names by a small tensor."""

    # Of what the compiled code that uses this leaf writes to: the tensor's name, and its leaf's.
    beside_write: tuple[str, str] | None = None

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        super().__init__(module, name, structure)
        self.number = next(_numbers)
        layers[self.number] = weakref.ref(self, functools.partial(layers.pop, self.number))
        with torch.inference_mode(False):
            self.key = torch.tensor(self.number, device="cpu")

    def traced_read(self, module: nn.Module, key: str) -> Tensor | None:
        """`read`, in compiled code: a copy on the device, whose gradient goes to the master."""
        name, master = self.name_of(module, key), module._parameters.get(key)
        if name is None or master is None or not self.is_inside():
            return None
        found = read(master, self.key, self.state.device, name)
        return cast("Tensor", found)

    @_constant
    def is_inside(self) -> bool:
        """Whether the model computes where a compiler traces."""
        _asks[:] = [weakref.ref(self)]
        return self.structure.is_inside()

    def refuse_written(self) -> None:
        """Raise where the compiled code that uses this leaf writes to what it has read: a copy.

        Raises
        ------
        OffloadError
            It does; from then on each use says so.
        """
        while _believed:
            made, reference, name = _believed.pop()
            layer = reference()
            if layer is not None and count_writes(made):
                self.beside_write = name, layer.name
        if self.beside_write:
            name, leaf = self.beside_write
            raise OffloadError(
                f"compiled code writes to the {name} of managed layer '{leaf}', which it has read: "
                "the write would be lost. Write outside the compiled code "
                "(torch.compiler.disable), or leave the layer resident with ignore_modules=[...]."
            )


class Traced(Numbered, Layer, Readable):
    """A layer that is one operator to a compiler, and can be given what its backward needs."""

    operator: ClassVar[Any]  # of those that `_define` made

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """Compute by one operator; torch.compile traces this."""
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        dtype = cast_dtype(self.device_type)
        if dtype is not None:
            x = cast_input(x, dtype)
        return self.operate(module, x, dtype)

    def operate(self, module: Any, x: Tensor, dtype: torch.dtype | None, *arguments: Any) -> Tensor:
        """Call the operator; `arguments` are what it takes in addition to tensors."""
        if functorch_active():
            return cast("Tensor", untraced(self, x))  # which refuses
        if is_exporting():
            refuse_tracing("torch.export")
        y = self.operator(x, *self.given(module), self.key, dtype, NOT, *arguments)
        advance(self.attachment.sequence, y)
        return cast("Tensor", y)

    # ---- what an operator asks for ----

    def given(self, module: Any) -> tuple[Any, Any]:
        """Return what represents weight and bias where a compiler traces."""
        masters = module._parameters
        return masters["weight"], masters.get("bias")

    def is_given(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether what an operator was given are the masters that are there now, all of them."""
        return self.is_master("weight", weight) and self.is_master("bias", bias)

    def is_master(self, name: str, used: Tensor | None) -> bool:
        """Whether `used` is the master of this name, all of it."""
        now = self.parameters.get(name)
        if now is None or used is None:
            return now is used
        return (
            self.has_only_moved(used.data_ptr(), now.data_ptr())
            and now.dtype is used.dtype
            and now.shape == used.shape
            and now.stride() == used.stride()
        )

    def check_given(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raise where what backward reads is not what forward saw, by the versions unnoticed."""
        for name, used in (("weight", weight), ("bias", bias)):
            if name in self.backward_reads and used is not None and not self.is_master(name, used):
                raise StaleWeightsError(
                    f"the {name} of managed layer '{self.name}' is not what its compiled forward "
                    "computed with: it was replaced through .data, which is for after backward, or "
                    "the compiled code writes it or computes it (functional_call), which is for "
                    "forwards without grad."
                )

    def taking(self, *arguments: Any) -> AbstractContextManager[None]:
        """Compute with the arguments of an operator, whatever the module's are."""
        return contextlib.nullcontext()

    def as_told(self, y: Tensor, *arguments: Any) -> Tensor:
        """Return a result as a compiler expects it."""
        return y

    def compute_given(
        self, x: Tensor, given: tuple[Any, Any], dtype: Any, *arguments: Any
    ) -> Tensor:
        """Compute with the tensors that an operator was given, brought to the compute device."""
        with exempt():
            brought = self.bring([tensor for tensor, _ in zip(given, self.names, strict=False)])
            cast = (t if t is None else t.to(_autocast_of(t, dtype)) for t in brought)
            weight, bias = (*cast, None)[:2]
            return _computes[self.operator](x.to(self.state.device), weight, bias, *arguments)

    def differentiate(self, ctx: Any, grad: Tensor, needs: list[bool]) -> list[Tensor | None]:
        """Return the gradients of input, weight and bias, None where `needs` says so."""
        gx, *others = self.derivative(ctx, grad, tuple(needs[: 1 + len(self.names)]))
        pairs = zip(self.masters.tensors, others, strict=False)
        return [gx, *(self.to_host(master, g) for master, g in pairs), None][:3]

    def to_host(self, master: Any, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient in the dtype of its parameter, on the host as that is."""
        if gradient is None:
            return None
        gradient = gradient.to(master.dtype)
        return self.attachment.gradients.to_host(gradient)

    @abstractmethod
    def restore(
        self, ctx: Any, x: Tensor | None, shape: torch.Size, stride: Any, *arguments: Any
    ) -> None:
        """Put into `ctx` what `record` had kept there.

        Parameters
        ----------
        ctx
            Used in the place of the autograd function's.
        x : Tensor or None
            The input, where a weight is trained.
        shape, stride : tuple of int
            Of the input.
        *arguments
            What the operator takes in addition to tensors.
        """


class WithInherited(Traced):
    """A kind of modules that may have a forward of their own; `x` is what that of `base` gets.

    What such a forward asks ``super()`` for is computed as a call is; a weight that it reads is a
    handle.
    """

    base: ClassVar[Any]  # subclass of nn.Module
    has_buffers = True

    @classmethod
    def computes(cls, module_class: Any) -> bool:
        """Whether modules of this class are such as `base` makes."""
        return issubclass(module_class, cls.base)

    @classmethod
    def stands_below(cls, module_class: Any) -> Any:
        """Return the class that answers, where the module's class has a forward of its own."""
        inherits = module_class.forward is cls.base_forward
        return None if inherits else answering_class(cls.base, cls.base_forward)


# ---- what the operators run ----


class Kept:
    """Replaces autograd's ``ctx`` where the compiled graph keeps what backward needs."""

    saved_tensors: tuple[Tensor, ...] = ()
    loan: Any = None

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep them."""
        self.saved_tensors = tensors


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Call torch as eager code does, so that dispatch modes see the same operators."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradOther, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        yield


def layer_by_number(number: int) -> Numbered | None:
    """Return a leaf by its number; None where it is gone."""
    reference = layers.get(number)
    return None if reference is None else reference()


def layer_of(key: Tensor) -> Any:
    """Return the leaf that a forward of compiled code names."""
    layer = layer_by_number(int(key))
    if layer is None or layer.member < 0:
        raise OffloadError(
            "compiled code computes with a managed layer that was detached since; call the "
            "compiled model again from its first layer on."
        )
    layer.refuse_written()
    return layer


def layer_in_backward(key: Tensor) -> Any:
    """Return the leaf that a backward of compiled code names."""
    layer = layer_by_number(int(key))
    if layer is None:
        raise OffloadError(
            "a managed layer of compiled code was detached between forward and backward; run "
            "backward first, then detach."
        )
    if layer.member < 0:
        layer.refuse_detached()
    return layer


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: Tensor,
    dtype: torch.dtype | None,
    recorded: int,
    *arguments: Any,
) -> Tensor:
    layer = layer_of(key)
    training = recorded == BY_GRAPH or torch.is_grad_enabled()
    with above_autograd():
        # A compiler hands over what a weight was before it is written, or what takes its place.
        own = layer.ready(x) and layer.is_given(weight, bias)
        if not own and recorded == HERE:
            raise computed_weight_error(layer.name)
        if not own:
            return cast("Tensor", layer.compute_given(x, (weight, bias), dtype, *arguments))
        with layer.taking(*arguments), torch.no_grad():
            if recorded == HERE:
                y = _lend_recorded(layer, x, dtype)
            else:
                y = layer.lend_unrecorded(x, dtype, training)
        return cast("Tensor", layer.as_told(y, *arguments))


def _autocast_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return what autocast to `dtype`, where it is on, makes of a tensor's dtype."""
    casts = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return (casts and dtype) or tensor.dtype


def computed_weight_error(name: str) -> OffloadError:
    """Return what says that an operator was given other tensors than the masters."""
    return OffloadError(
        f"managed layer '{name}' has a computed weight (a parametrisation, functional_call, a "
        "write in the compiled code), or was moved to the device, inside a compiled forward. Leave "
        "it resident with ignore_modules=[...], or do not compile the model."
    )


def _lend_recorded(layer: Traced, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Compute where a graph records the layer; as `loan.Loan` does, which keeps more."""
    state, masters, task = layer.state, layer.masters, _graph_task()
    seconds = layer.forward_seconds(x) if state.simulated else 0.0
    kind = forward_kind(task, True)
    trained = tuple([t if t is not None and t.requires_grad else None for t in masters.tensors])
    kept = Kept()
    _begin_forward(state)
    y: Tensor = layer.lend(kind, task, seconds, dtype, lambda t: layer.record(kept, x, trained, t))
    if any(t is not None for t in trained):
        note_trainable(state, task)
    return y


def _backward(
    grad: Tensor,
    x: Tensor | None,
    size: list[int],
    stride: list[int],
    weight: Tensor,
    bias: Tensor | None,
    key: Tensor,
    dtype: torch.dtype | None,
    needs: list[bool],
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    layer = layer_in_backward(key)
    state, masters, task = layer.state, layer.masters, _graph_task()
    state.turned = True
    layer.check_given(weight, bias)
    kept = Kept()
    kept.loan = layer, dtype, task, masters, version_of(masters.read)
    layer.restore(kept, x, torch.Size(size), tuple(stride), *arguments)
    with above_autograd(), torch.no_grad():
        found = layer.differentiate(kept, grad, needs)
    if True in needs[1:]:
        note_trainable(state, task)
    nothing = grad.new_empty(0)
    return tuple([nothing if g is None else g for g in found])  # type: ignore[return-value]


# ---- what a compiler knows of them ----


def _on(device: torch.device, tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a tensor of the same geometry on another device, as autocast would cast it."""
    if tensor is None:
        return None
    return torch.empty_like(tensor, device=device, dtype=_autocast_of(tensor, dtype))


def _reads_rows(x: Tensor, bias: Tensor | None, *arguments: Any) -> bool:
    """A row number is no value to differentiate by, and what backward is made of."""
    return not x.is_floating_point()


def _like_weight(grad: Tensor, x: Tensor | None, weight: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(weight)


def _define(
    name: str,
    schema: str,
    compute: Callable[..., Tensor],
    gradient: Callable[..., Tensor],
    weight_gradient: Callable[..., Tensor] = _like_weight,
    reads_input: Callable[..., bool] = _reads_rows,
) -> Any:
    """Define the two operators of a kind; return what calls the first.

    From `compute` and the gradients (of input and weight) a compiler learns geometry alone.
    `reads_input`: whether backward does, where no weight is trained.
    """

    def fake_forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        key: Tensor,
        dtype: torch.dtype | None,
        recorded: int,
        *arguments: Any,
    ) -> Tensor:
        tensors = [_on(x.device, tensor, dtype) for tensor in (weight, bias)]
        return compute(x, *tensors, *arguments)

    def fake_backward(
        grad: Tensor,
        x: Tensor | None,
        size: list[int],
        stride: list[int],
        weight: Tensor,
        bias: Tensor | None,
        key: Tensor,
        dtype: torch.dtype | None,
        needs: list[bool],
        *arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gx = gw = gb = grad.new_empty(0)
        if needs[0]:
            like = torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device)
            gx = gradient(grad, like, _on(grad.device, weight, dtype), *arguments)
        if needs[1]:
            gw = weight_gradient(grad, x, weight, *arguments)
        if needs[2] and bias is not None:
            gb = torch.empty_like(bias)
        return gx, gw, gb

    for suffix, form, kernel, fake in (
        ("", _FORWARD, _forward, fake_forward),
        ("_backward", _BACKWARD, _backward, fake_backward),
    ):
        define_operator(name + suffix, form.format(schema), kernel, fake)
    forward = _overload(name)
    _computes[forward] = compute
    kernel = _autograd(forward, _overload(f"{name}_backward"), name == "convolution", reads_input)
    differentiate_by(name, kernel)
    return forward


def define_operator(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Define an operator that runs `kernel`, and that compilers trace by `fake`."""
    _library.define(name + schema, tags=_TAGS)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _kernels[_overload(name)] = kernel
    return _overload(name)


def differentiate_by(name: str, kernel: Callable[..., Any]) -> None:
    """Let `kernel` run in an operator's place where autograd is active; it gets the key set too."""
    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _overload(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _autograd(
    forward: Any, backward: Any, reads_always: bool, reads_input: Callable[..., bool]
) -> Callable[..., Any]:
    """Return an Autograd kernel that keeps no weight, and the input where a weight is trained.

    `reads_always`: its backward reads the weight for whatever gradient, as torch counts it.
    """

    def run(keyset: Any, recorded: int, *given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return forward.redispatch(keyset & after_autograd, *given[:5], recorded, *given[6:])

    class Managed(Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *given: Any) -> Any:
            x, weight = given[:2]
            # Aliases: they stay where the masters are now, and know of writes to them.
            ctx.given = *(t if t is None else t.detach() for t in given[1:3]), *given[3:]
            ctx.version = count_writes(weight)
            ctx.geometry = x.shape, x.stride()
            ctx.keeps_input = weight.requires_grad or reads_input(x, given[2], *given[6:])
            if ctx.keeps_input:
                ctx.save_for_backward(x)
            return run(keyset, HERE if type(given[3]) is Tensor else BY_GRAPH, *given)

        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            weight, bias, key, dtype, _, *arguments = ctx.given
            x = ctx.saved_tensors[0] if ctx.keeps_input else None
            needs = list(ctx.needs_input_grad[1:4])
            if count_writes(weight) != ctx.version and (reads_always or needs[0]):
                raise StaleWeightsError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation: the weight of a managed layer in compiled code is at "
                    f"version {weight._version}; expected version {ctx.version} instead. Change "
                    "weights after backward."
                )
            found = backward(grad, x, *ctx.geometry, weight, bias, key, dtype, needs, *arguments)
            gradients = [g if need else None for g, need in zip(found, needs, strict=True)]
            return None, *gradients, *(None for _ in ctx.given[2:])

    apply: Any = Managed.apply

    def kernel(keyset: Any, *given: Any) -> Any:
        tensors = (tensor for tensor in given[:3] if tensor is not None)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return apply(keyset, *given)
        key, recorded = given[3], given[5]
        if type(key) is not Tensor:  # a compiler makes a graph, of training under grad mode
            recorded = BY_GRAPH if torch.is_grad_enabled() else recorded
        elif recorded:
            _begin_forward(layer_of(key).state)
        return run(keyset, recorded, *given)

    return kernel


def _begin_forward(state: DeviceState) -> None:
    """Note that a forward, for which there is to be a backward, begins after a backward."""
    if state.turned and _graph_task() == -1:
        state.begin_forward()


def _advance(sequence: Tensor, after: Tensor) -> None:
    """Nothing: that it is said to write `sequence` is all it is for."""


advance = define_operator(
    "advance", "(Tensor(a!) sequence, Tensor after) -> ()", _advance, _advance
)
_library.impl("advance", torch.library.fallthrough_kernel, "Autograd")


def _read(weight: Tensor, key: Tensor, device: torch.device, name: str) -> Tensor:
    layer = layer_of(key)
    task, place = _graph_task(), layer.names.index(name)
    layer.look_again()
    if not (layer.masters.are(layer.parameters) or layer.adopt()) or not layer.is_master(
        name, weight
    ):
        with exempt():  # a tensor that replaces it for a while
            return weight.to(device, copy=True)
    if weight.requires_grad:
        note_trainable(layer.state, task)
    kind = forward_kind(task, torch.is_grad_enabled())
    made = Borrower.lend(layer, kind, task, 0.0, None, lambda tensors: tensors[place].clone())
    return cast("Tensor", made)


def _give_back(grad: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    layer = layer_in_backward(key)
    layer.state.turned = True
    note_trainable(layer.state, _graph_task())
    return cast("Tensor", layer.attachment.gradients.to_host(grad))


def _like_read(weight: Tensor, key: Tensor, device: torch.device, name: str) -> Tensor:
    made = torch.empty_like(weight, device=device)
    if _asks:  # a compiler that writes down what code does, before it makes that functional
        _believed.append((made, _asks.pop(), name))
    return made


def _like_given_back(grad: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    return torch.empty_like(weight)


read = define_operator(
    "read", "(Tensor weight, Tensor key, Device device, str name) -> Tensor", _read, _like_read
)
give_back = define_operator(
    "give_back", "(Tensor grad, Tensor weight, Tensor key) -> Tensor", _give_back, _like_given_back
)


def _note_read(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _read_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return give_back(grad, *ctx.saved_tensors), None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::read", _read_backward, setup_context=_note_read, lib=_library
)


def _linear_gradient(grad: Tensor, like: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(grad, weight).reshape(like.shape)


def _convolution_gradient(grad: Tensor, like: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    stride, padding, dilation, groups = arguments
    window = stride, padding, dilation, False, [0] * len(stride), groups
    wanted = [True, False, False]
    found = torch.ops.aten.convolution_backward(grad, like, weight, None, *window, wanted)
    return cast("Tensor", found[0])


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    stride, padding, dilation, groups = arguments
    nothing = [0] * len(stride)
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, nothing, groups)


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    return F.embedding(x, weight)


def _library_code(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    features, dtype, *_ = arguments
    return x.new_empty((*x.shape[:-1], features), dtype=dtype)


def _like_input(grad: Tensor, like: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    _, _, dtype, *_ = arguments
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def _reads_what_it_says(x: Tensor, bias: Tensor | None, *arguments: Any) -> bool:
    return arguments[-1] or (bias is not None and bias.requires_grad)


def _no_gradient(grad: Tensor, like: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    raise AssertionError("row numbers have no gradient")


def _rows_gradient(
    grad: Tensor, x: Tensor | None, weight: Tensor, padding: int, scales: bool, sparse: bool
) -> Tensor:
    if not sparse:
        return torch.empty_like(weight)
    # Which rows it has depends on values: a compiler is given none, and asks for none.
    return weight.new_empty(weight.shape, layout=torch.sparse_coo)


linear = _define("linear", "", F.linear, _linear_gradient)
convolution = _define(
    "convolution",
    ", int[] steps, SymInt[] padding, int[] dilation, int groups",
    _convolution,
    _convolution_gradient,
)
embedding = _define(
    "embedding",
    ", int padding_idx, bool scale_grad_by_freq, bool sparse",
    _rows,
    _no_gradient,
    _rows_gradient,
)
quantised = _define(
    "quantised",
    ", SymInt features, ScalarType result, ScalarType given, ScalarType? autocast, bool reads",
    _library_code,
    _like_input,
    reads_input=_reads_what_it_says,
)
