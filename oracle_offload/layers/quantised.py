"""Managed modules with quantised weights: what travels is the quantised bytes.

The library's own operator runs, on the library's own tensor class made again over the slot
(`flatten.Copy`): a dequantised weight and ``F.linear`` would not have the same bits. Where autograd
records, it is made again over handles (`layers.handle`), and backward is what torch and the library
make of it. Where the library's code asks a weight for its address, and in compiled code, the
operator gets the slot's tensors, and runs once more in backward, where torch records it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..engine.exemption import exempt
from ..engine.geometry import is_dense, tensor_bytes
from ..engine.operators import autocast_reaches_kernels, note_autocast
from ..errors import OffloadError
from . import traced
from .autocast import cast_dtype, computing_in, saving
from .flatten import Copy, Places, copy_tables, is_wrapper, plain_tensors, value_at
from .formats import Format, format_of
from .gradients import landing, note_trainable
from .handle import WantsMemory, WasWritten, handles_of, lent, trained, with_memory
from .leaf import Masters, Structure, Tensors, version_of
from .loan import Cast, Needs, forward_kind, node_of
from .managed import is_managed
from .swap import base_class, untraced
from .traced import Traced, computed_weight_error

_LARGEST_TABLE = 4096  # bytes
_graph_task = torch._C._current_graph_task_id
_autograd: Any = torch._C._autograd
_hooks_allowed = _autograd._saved_tensors_hooks_is_enabled
_constant: Callable[..., Any] = torch.compiler.assume_constant_result  # to a compiler


def _clock_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose version is that of `tensor`, and which holds no memory of it."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        nothing = torch.empty(0, dtype=tensor.dtype, device="cpu")
        if tensor.is_inference():
            return nothing
        clock = tensor.detach()
        clock.data = nothing
        return clock


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _format_of(module: nn.Module) -> Format:
    """Return the format of a module that is known to be quantised."""
    return cast("Format", format_of(module))


class Slot(tuple[Any, ...]):
    """The tensors in one slot, and what was made of them there."""

    wrappers: dict[int, Tensor]


class QuantisedLayer(Traced):
    """A managed module with one input whose weights are of a known `Format`."""

    node = node_of("ManagedQuantised")
    operator = staticmethod(traced.quantised)
    was_tried = False  # it is known what its code asks of its weights

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        self.format = _format_of(module)
        self.names = tuple(self.named_tensors(module))
        self.required = tuple({path.partition(".")[0]: None for path in self.names})
        # What the input's gradient asks for: of plain parameters, the bias alone is not.
        self.backward_reads = tuple(path for path in self.names if path != "bias")
        self._alike: tuple[Masters | None, list[tuple[Tensor | None, ...]]] = None, []
        self._handles: tuple[Masters, int, Slot] | None = None
        super().__init__(module, name, structure)
        self._bring_wrappers_home(module)

    # ---- what it is made of ----

    @classmethod
    def named_tensors(cls, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that hold the bytes, by path."""
        return plain_tensors(module, _format_of(module).holders)[0]

    @classmethod
    def aliases(cls, module: nn.Module) -> dict[int, list[Tensor]]:
        """Return the tensors over the bytes of one of `named_tensors`, by the `id` of that one."""
        tensors, same = plain_tensors(module, _format_of(module).holders)
        return {id(tensors[path]): others for path, others in same.items()}

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        """Say why the module's own tensors keep it from being managed; empty where none does."""
        for path, tensor in cls.named_tensors(module).items():
            if tensor.layout is not torch.strided:
                return f"'{path}' is {tensor.layout}"
            if not is_dense(tensor):
                return f"'{path}' has gaps or overlaps in memory (strides {tensor.stride()})"
        return ""

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """Give the module copies of small tables: a library may share them among all its layers."""
        copy_tables(module, _format_of(module).holders, _LARGEST_TABLE)
        for parameter in module._parameters.values():
            # bitsandbytes' way from the weight to its module, used until it is quantised: the
            # masters would keep a module alive that is replaced.
            if parameter is not None and parameter.__dict__.get("module") is module:
                parameter.__dict__["module"] = None

    def places(self, module: nn.Module) -> Any:
        """Return what finds the tensor that is at a path now."""
        return Places(module)

    def has_plain_masters(self) -> bool:
        """Whether what is there now is quantised like what was there at attach."""
        module = self.module()
        if module is None or format_of(module) is not self.format:
            return False
        found = self.named_tensors(module)
        return tuple(found) == self.names and all(
            tensor.device.type == "cpu" and not self.unfit(module) for tensor in found.values()
        )

    def why_lost(self) -> str:
        """Say why the module is no leaf of ours any more; empty where it is."""
        module = self.module()
        if module is None:
            return "it was deleted"
        if not is_managed(module):
            return f"its class was replaced after attach, by {type(module).__name__}"
        if format_of(module) is not self.format or set(self.named_tensors(module)) != set(
            self.names
        ):
            return "its quantised weights were replaced after attach by others"
        return ""

    def _bring_wrappers_home(self, module: nn.Module) -> None:
        """Correct the device of weights that were quantised on a device: they are on the host now.

        A tensor that is made of others records its device once, when it is made.
        """
        copy = Copy(self._own(), self.format.holders, {})
        for key, parameter in module._parameters.items():
            if is_wrapper(parameter) and parameter is not None and parameter.device.type != "cpu":
                home = nn.Parameter(copy.of(parameter), requires_grad=parameter.requires_grad)
                module._parameters[key] = home
        self.parameters = self.places(module)
        self.masters = type(self.masters)(self, self.parameters)

    def _own(self) -> dict[int, Tensor]:
        return {id(tensor): tensor for tensor in self.masters.present}

    # ---- in compiled code ----

    def placed(self, unit: int, member: int, offsets: list[int]) -> None:
        """Take the engine's answer to where the leaf's unit is."""
        super().placed(unit, member, offsets)
        own = getattr(self.module(), "_parameters", {})
        self.own: dict[str, Callable[[], Any]] = {
            key: weakref.ref(p) for key, p in own.items() if p is not None
        }
        self.clock = _clock_of(self.masters.present[0])
        layout = dict(zip(self.names, self.masters.layout, strict=True))
        layout.pop("bias", None)  # a library may cast it, to the dtype of the input
        self.look = f"{self.format.name}: {layout}"

    def unplaced(self) -> None:
        """Be a leaf no more; what computed with it, and is alive, must not hold its module back."""
        super().unplaced()
        self.own = {}  # torch moves no wrapper that has a weak reference

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """Compute by the operator; torch.compile traces this."""
        features = getattr(module, "out_features", None)
        breaks = not isinstance(features, int)
        for key, own in self.own.items():  # functional_call puts others in their places
            now = module._parameters[key]
            breaks = breaks or now is not own() or (key != "bias" and now.requires_grad)
        if breaks:
            return cast("Tensor", untraced(self, x))
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        autocast = cast_dtype(self.device_type)
        result = self.result_of(self.look, x.dtype, autocast)
        reads = self.format.reads_input
        return self.operate(module, x, None, features, result, x.dtype, autocast, reads)

    @_constant
    def result_of(self, look: str, dtype: torch.dtype, autocast: Cast) -> torch.dtype:
        """Return the dtype of what such a layer makes of such an input, once it is settled.

        The library's code runs over tensors that hold nothing. Where it cannot, the input's dtype
        is likely, and `as_told` sees to it.
        """
        module: Any = self.module()
        device, features = self.state.device, getattr(module, "in_features", 1)
        if self.format.settle is not None:
            self.format.settle(module, torch.empty((2, features), dtype=dtype, device="meta"))
        with FakeTensorMode(), torch.no_grad(), computing_in(self.device_type, autocast):
            x = torch.empty((2, features), dtype=dtype, device=device)
            tensors = [
                t if t is None else torch.empty_strided(t[1], t[2], dtype=t[0], device=device)
                for t in self.masters.layout
            ]
            with contextlib.suppress(Exception):
                return self.base_call(module, x, tuple(tensors)).dtype
        return dtype

    def given(self, module: Any) -> tuple[Any, Any]:
        """Return a tensor that tells of writes to the weight, and the bias."""
        return self.clock, module._parameters.get("bias")

    def is_given(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the bias is the master that is there now; no other tensor is given."""
        return bias is None or self.is_master("bias", bias)

    def check_given(self, weight: Tensor, bias: Tensor | None) -> None:
        """Nothing: backward reads no bias."""

    def taking(self, *arguments: Any) -> AbstractContextManager[Any]:
        """Compute under autocast as it was where the call was compiled."""
        return computing_in(self.device_type, arguments[3])

    def as_told(self, y: Tensor, *arguments: Any) -> Tensor:
        """Return a result as a compiler expects it."""
        features, dtype, *_ = arguments
        if y.dtype is not dtype or y.shape[-1] != features:
            raise OffloadError(
                f"managed layer '{self.name}' returns {y.shape[-1]} features of {y.dtype}, and not "
                f"{features} of {dtype} as compiled code was traced with. Leave it resident with "
                "ignore_modules=[...], or do not compile what calls it."
            )
        return y.contiguous()

    def compute_given(
        self, x: Tensor, given: tuple[Any, Any], dtype: Any, *arguments: Any
    ) -> Tensor:
        """Compute with whatever the module's tensors are now, which the bias has to be too."""
        if not self.is_given(*given):
            raise computed_weight_error(self.name)
        with self.taking(*arguments):
            return self.as_told(self.foreign(x), *arguments)

    def restore(
        self, ctx: Any, x: Tensor | None, shape: torch.Size, stride: Any, *arguments: Any
    ) -> None:
        """Put into `ctx` what `record` had kept there."""
        _, _, dtype, autocast, _ = arguments
        ctx.autocast = autocast is not None, autocast  # where it is off, of none
        ctx.input = shape, stride, dtype
        ctx.keeps_input = x is not None
        if x is not None:
            ctx.save_for_backward(x)

    def differentiate(self, ctx: Any, grad: Tensor, needs: list[bool]) -> list[Tensor | None]:
        """Return the gradients of input, weight (none) and bias, None where `needs` says so."""
        keys = list(cast("Any", self.module())._parameters)
        asked = needs[0], *(needs[2] and key == "bias" for key in keys)
        gx, *others = self.derivative(ctx, grad, asked)
        gb = dict(zip(keys, others, strict=True)).get("bias")
        shape, _, dtype = ctx.input
        if needs[0]:
            gx = grad.new_zeros(shape, dtype=dtype) if gx is None else gx.to(dtype).contiguous()
        return [gx, None, self.to_host(self.parameters.get("bias"), gb)]

    # ---- the copy over a slot ----

    def view_at(self, address: int) -> Tensors:
        """Return the tensors as they are in the slot at `address`."""
        slot = Slot(super().view_at(address))
        slot.wrappers = {}
        self.views[address] = slot
        return slot

    def copy(self, module: nn.Module, tensors: Tensors, *, trains: bool = False) -> Any:
        """Return the module made again over `tensors`, of the class that it had before attach.

        Parameters
        ----------
        module : nn.Module
            The leaf.
        tensors : tuple
            For each of `names`.
        trains : bool
            Whether trainable parameters shall require grad in it.
        """
        replaced = {
            id(tensor): lent
            for alike, lent in zip(self._masters_and_aliases(module), tensors, strict=True)
            for tensor in alike
        }
        wrappers = getattr(tensors, "wrappers", {})
        made = Copy(cast("Any", replaced), self.format.holders, {} if trains else wrappers).module(
            module, base_class(module)
        )
        if trains:
            for key, own in module._parameters.items():
                if own is not None and own.requires_grad:
                    made._parameters[key].requires_grad_()
        return made

    def _masters_and_aliases(self, module: nn.Module) -> list[tuple[Tensor | None, ...]]:
        """Return each master with the tensors over its bytes, which are looked for once."""
        masters, alike = self._alike
        if masters is not self.masters:
            masters, same = self.masters, plain_tensors(module, self.format.holders)[1]
            rows = zip(self.names, masters.tensors, strict=True)
            alike = [(tensor, *same.get(path, ())) for path, tensor in rows]
            self._alike = masters, alike
        return alike

    def forget_masters(self) -> None:
        """Let go of the tensors, so that their memory can go; they are current no more."""
        super().forget_masters()
        self._alike = None, []
        self._handles = None

    # ---- what a kind says ----

    def base_call(self, module: Any, x: Tensor, tensors: Tensors) -> Tensor:
        """Compute what the library does, with the given tensors."""
        made = self.copy(module, tensors)
        with autocast_reaches_kernels():
            return cast("Tensor", base_class(module).forward(made, x))

    def compute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """Compute what the library does."""
        return self.base_call(self.module(), x, tensors)

    def record(self, ctx: Any, x: Tensor, trained: Tensors, tensors: Tensors) -> Tensor:
        """Compute what the library does; the input is kept where backward asks for its values."""
        y = self.compute(x, tensors)
        device = self.device_type
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.input = x.shape, x.stride(), x.dtype
        ctx.keeps_input = self.format.reads_input or any(t is not None for t in trained)
        if ctx.keeps_input:
            ctx.save_for_backward(x)
        # torch forbids in-place changes of a view that a custom function returns.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    def derivative(self, ctx: Any, grad: Tensor, needs: Needs) -> Tensors:
        """Return the gradients of the input and of the trainable parameters."""
        return cast(
            "Tensors",
            self.lend_backward(ctx, grad, needs, lambda t: self._run_again(ctx, grad, needs, t)),
        )

    def _run_again(self, ctx: Any, grad: Tensor, needs: Needs, tensors: Tensors) -> Tensors:
        """Return the gradients that torch finds by recording the operator."""
        module: Any = self.module()
        shape, stride, dtype = ctx.input
        if ctx.keeps_input:
            x = ctx.saved_tensors[0].detach()
        else:  # its values do not matter
            x = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device).zero_()
        enabled, cast_dtype = ctx.autocast
        with (
            torch.enable_grad(),
            torch.autocast(self.device_type, cast_dtype, enabled, cache_enabled=False),
            autocast_reaches_kernels(),
        ):
            x.requires_grad_(needs[0])
            made = self.copy(module, tensors, trains=True)
            y = base_class(module).forward(made, x)
        self.attachment.traffic.note_run_again(self.forward_cost(x)[0])
        wanted = [x, *(made._parameters[key] for key in module._parameters)]
        asked = [t for t, need in zip(wanted, needs, strict=False) if need]
        if not y.requires_grad:
            return (None,) * len(needs)
        found = iter(torch.autograd.grad(y, asked, grad, allow_unused=True))
        return tuple([next(found) if need else None for need in needs])

    def forward_cost(self, x: Tensor) -> tuple[float, int]:
        """2 x rows x weights operations."""
        module: Any = self.module()
        features = x.shape[-1] if x.dim() else 1
        rows = x.numel() // max(1, features)
        outputs = getattr(module, "out_features", features)
        nbytes = sum(tensor_bytes(tensor) for tensor in self.masters.present)
        moved = nbytes + (x.numel() + rows * outputs) * x.element_size()
        return 2.0 * rows * features * outputs, moved

    def backward_cost(self, grad: Tensor, needs: Needs) -> tuple[float, int]:
        """The same for the input's gradient, and for forward where that is run again."""
        flops, moved = self.forward_cost(grad)
        return 2 * flops, 2 * moved

    # ---- the call ----

    def read(self, module: nn.Module, key: str) -> Tensor | None:
        """Return what ``module.<key>`` answers: a tensor of the library's, made of handles."""
        if key in self.names and type(module._parameters.get(key)) is nn.Parameter:
            return super().read(module, key)
        found = value_at(module, key)
        if not isinstance(found, Tensor) or not self.structure.is_inside():
            return None
        self.look_again()
        if not (self.masters.are(self.parameters) or self.adopt()) or self.member < 0:
            return None
        note_autocast()
        made = self._brought(module) if self.wants_memory else self._copy_of_handles(module)
        return cast("Tensor", value_at(made, key))

    def ready(self, x: Tensor) -> bool:
        """Check everything a call depends on, once the library's notes are made."""
        if self.format.settle is not None:
            self.format.settle(self.module(), x)
        return super().ready(x)

    def call(self, x: Tensor) -> Tensor:
        """Compute with borrowed tensors; what autocast does, it does inside the library's code."""
        if torch.is_grad_enabled():
            given = self.trained(None)
            trains = any(tensor is not None for tensor in given)
            if trains or x.requires_grad:
                if not self.wants_memory:
                    return self._use_handles(x, trains)
                return cast("Tensor", self.node(x, self, None, *(given if trains else ())))
        return self.lend_unrecorded(x, None)

    def _use_handles(self, x: Tensor, trains: bool) -> Tensor:
        """Run the library's forward on handles, of which autograd keeps what backward asks for."""
        state, task = self.state, _graph_task()
        if trains:
            note_trainable(state, task)
        if state.turned and task == -1:
            state.begin_forward()
        seconds = self.forward_seconds(x) if state.simulated else 0.0
        y = self.lend(forward_kind(task, True), task, seconds, None, lambda t: self._forward(x, t))
        return self.call(x) if y is None else cast("Tensor", y)

    def _forward(self, x: Tensor, tensors: Tensors) -> Tensor | None:
        """Run the library's forward; None where it is to run in another way from now on."""
        with lent(self, tensors), autocast_reaches_kernels():
            if not self.was_tried:
                self._try(x)
            if self.wants_memory:
                return None
            put_off = self.puts_off
            try:
                y = self._run_on_handles(x)
            except (WantsMemory, WasWritten):
                if not self.wants_memory and self.puts_off is put_off:
                    raise
                return None
            # The code may have caught what says so, and have gone on in a way of its own.
            return None if self.wants_memory or self.puts_off is not put_off else y

    def _try(self, x: Tensor) -> None:
        """Find out, before its first call, what the library's code asks of its weights.

        It leaves random number generators unchanged, and no hook on saved tensors sees it.
        """
        device = self.state.device
        given = x.detach().requires_grad_(x.requires_grad)[...]  # autocast keeps casts of leaves
        generators = [device] if device.type == "cuda" else []
        unnoted = saving(_as_is, _as_is) if _hooks_allowed() else contextlib.nullcontext()
        with torch.random.fork_rng(generators), unnoted:
            for _ in range(2):  # it may be found to write to what it makes, and then to do more
                put_off = self.puts_off
                try:
                    self._run_on_handles(given)
                except (WantsMemory, WasWritten):
                    if not self.wants_memory and self.puts_off is put_off:
                        raise
                if self.wants_memory or self.puts_off is put_off:
                    break
        self.was_tried = True

    def _run_on_handles(self, x: Tensor) -> Tensor:
        module: Any = self.module()
        made = self._copy_of_handles(module)
        return cast("Tensor", with_memory(base_class(module).forward(made, x)))

    def _copy_of_handles(self, module: Any) -> Any:
        """Return the module made again over handles; its trained parameters pass gradients on."""
        version = version_of(self.masters.present)
        if self._handles is None or self._handles[:2] != (self.masters, version):
            slot = Slot(handles_of(self))
            slot.wrappers = {}
            self._handles = self.masters, version, slot
        handles = self._handles[2]
        own = {k: p for k, p in module._parameters.items() if p is not None and p.requires_grad}
        # What gets a gradient is made again for each call.
        made = self.copy(module, tuple(handles) if own else handles)
        for key, parameter in own.items():
            made._parameters[key] = trained(parameter, self, made._parameters[key])
        return made

    def trained(self, dtype: torch.dtype | None) -> Tensors:
        """Return the module's parameters that need a gradient, None for those that do not."""
        module: Any = self.module()
        return tuple(
            [
                landing(self, p) if p is not None and p.requires_grad else None
                for p in module._parameters.values()
            ]
        )

    def foreign(self, x: Tensor) -> Tensor:
        """Compute with whatever the module's tensors are now, brought to the compute device."""
        module: Any = self.module()
        base: Any = base_class(module)
        if not is_managed(module):  # it was let go, and is on the device
            return cast("Tensor", base.forward(module, x))
        with exempt():
            return cast("Tensor", base.forward(self._brought(module), x.to(self.state.device)))

    def _brought(self, module: nn.Module) -> Any:
        """Return the module made again over copies on the device of what is there now."""
        with exempt():
            found, same = plain_tensors(module, self.format.holders)
            replaced = {}
            for path, tensor in found.items():
                copied = tensor.to(self.state.device, copy=tensor.device.type == "cpu")
                replaced.update({id(t): copied for t in (tensor, *same.get(path, ()))})
            nbytes = sum(map(tensor_bytes, found.values()))
            self.attachment.traffic.note_computed(self.name, nbytes)
            copy = Copy(cast("Any", replaced), self.format.holders, {})
            return copy.module(module, base_class(module))
