"""A device type that is not "cpu", on a machine without a GPU: torch's PrivateUse1, named "simgpu".

Its tensors are ordinary torch tensors on device ``simgpu:0`` whose memory is host memory: they have
true addresses and strides (DLPack carries them from one device type to the other), so that the
simulated driver copies into them. Operators run on the host's kernels. What differs from "cpu" is
what differs on CUDA: backward runs on a thread of the device, an operator that mixes a host tensor
with device tensors raises, a copy to the host with ``non_blocking=True`` arrives late (until the
host waits for the device, its target holds NaN), and every question for the device type has another
answer.

torch's hook for it (`_setup_privateuseone_for_python_backend`) is experimental and has no way back:
`install` is for a process of its own. Random numbers come from the host's generator.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from oracle_offload.engine import devices

NAME = "simgpu"

_DL_CPU, _DL_EXTENSION = 1, 12  # DLDeviceType; torch calls the second PrivateUse1
_HOST_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_registrations: list[torch.library.Library] = []  # an operator is registered as long as they live
_late: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not arrived: target, value

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _ManagedTensor(ctypes.Structure):
    """The first fields of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


def is_available() -> bool:
    """Whether this torch lets Python define a device type."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def _relabel(tensor: Tensor, device_type: int) -> Tensor:
    """Return the same memory under another device type; it keeps `tensor`'s storage alive."""
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    head = _ManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    head.device_type = device_type
    relabelled: Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return relabelled


def on_host(tensor: Tensor) -> Tensor:
    """Return a host tensor over the memory of a device tensor."""
    return _relabel(tensor.detach(), _DL_CPU)


def on_device(tensor: Tensor) -> Tensor:
    """Return a device tensor over the memory of a host tensor."""
    return _relabel(tensor.detach(), _DL_EXTENSION)


# ---- operators ----


class _Translation:
    """The arguments of one call on the host, and its results back on the device."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}

    def arguments(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == NAME:
                host = on_host(value)
                self.originals[id(host)] = host, value
                return host
            if value.dim():
                raise RuntimeError(
                    f"{self.operator}: a tensor of shape {tuple(value.shape)} is on "
                    f"{value.device}, others are on {NAME}:0"
                )
            return value
        if isinstance(value, list | tuple):
            return type(value)(map(self.arguments, value))
        if isinstance(value, dict):
            return {key: self.arguments(one) for key, one in value.items()}
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def results(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            same = self.originals.get(id(value))  # changed in place
            return on_device(value) if same is None else same[1]
        if isinstance(value, list | tuple):
            return type(value)(map(self.results, value))
        return value


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator on the host's kernels."""
    returned = [value.alias_info for value in operator._schema.returns]
    if any(alias is not None and not alias.is_write for alias in returned):
        return _view(operator, *args, **kwargs)
    translation = _Translation(operator)
    outs = {a.name: kwargs.pop(a.name) for a in operator._schema.arguments if a.is_out}
    if _takes_number_for_tensor(operator, args):
        operator = operator.overloadpacket
    args, kwargs = translation.arguments(args), translation.arguments(kwargs)
    # A view of foreign memory cannot be resized, which operators do to what they write.
    fresh = {name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()}
    with torch._C._AutoDispatchBelowAutograd():
        results = operator(*args, **kwargs, **fresh)
    for name, out in outs.items():
        _write(out, fresh[name])
    if not outs:
        return translation.results(results)
    return next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())


def _takes_number_for_tensor(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch hands a number over as the number that it was before it became a tensor."""
    return any(
        isinstance(value, int | float) and isinstance(argument.type, torch.TensorType)
        for argument, value in zip(operator._schema.arguments, args, strict=False)
    )


def _write(out: Tensor, result: Tensor) -> None:
    if out.shape == result.shape:
        on_host(out).copy_(result)
        return
    storage = on_device(result).untyped_storage()
    _view(
        torch.ops.aten.set_.source_Storage_storage_offset,
        *(out, storage, 0, result.shape, result.stride()),
    )


def _view(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that reads no memory: the host's kernel keeps the tensors' device."""
    return operator.redispatch(_HOST_KERNELS, *args, **kwargs)


def _empty(
    size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    return on_device(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    hosts = [on_host(t) if t.device.type == NAME else t for t in (source, target)]
    if non_blocking and target.device.type == "cpu":
        _late.append((target, hosts[0].clone()))  # what the stream has computed by then
        target.fill_(float("nan") if target.is_floating_point() else -1)
    else:
        _wait_for_device()
        hosts[1].copy_(hosts[0])
    return target


def _to_copy(
    source: Tensor,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """As torch's own, which would take page-locked memory for a copy that is not waited for."""
    result = torch.empty_like(
        on_host(source), dtype=dtype, memory_format=memory_format or torch.preserve_format
    )
    if device is None or device.type == NAME:
        result = on_device(result)
    return _copy_from(source, result, non_blocking)


def _local_scalar_dense(tensor: Tensor) -> Any:
    _wait_for_device()
    return on_host(tensor).item()


def _wait_for_device() -> None:
    while _late:
        target, value = _late.pop(0)
        target.copy_(value)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    bias = [weight.shape[0]]
    found: tuple[Tensor, Tensor, Tensor] = _run(
        torch.ops.aten.convolution_backward.default, grad, x, weight, bias, *rest
    )
    return found


def _histc(values: Tensor, *args: Any) -> Tensor:
    """Counts of integers too, as CUDA has them."""
    return on_device(torch.histc(on_host(values).double(), *args).to(values.dtype))


# For a device that it does not know torch composes these of others, or has none.
_OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar_dense,
    "convolution_overrideable": functools.partial(_run, torch.ops.aten.convolution.default),
    "convolution_backward_overrideable": _convolution_backward,
    "native_layer_norm": functools.partial(_run, torch.ops.aten.native_layer_norm.default),
    "native_group_norm": functools.partial(_run, torch.ops.aten.native_group_norm.default),
    "histc": _histc,
}
_VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)


# ---- autocast ----

# Of torch's list for CUDA (aten/src/ATen/autocast_mode.h) what the tests' models compute with.
_LOWER_PRECISION = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "prelu",
    "scaled_dot_product_attention",
)
_FLOAT32 = ("layer_norm", "group_norm", "softmax.int", "log_softmax.int", "mse_loss", "gelu")

_casts: dict[int, tuple[Tensor, Tensor]] = {}  # by `id` of the leaf, as long as the region lasts


def _lower(value: Any) -> Any:
    """Cast as autocast does (``cached_cast``): once per region for a float32 leaf that trains."""
    dtype = torch.get_autocast_dtype(NAME)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    if value.device.type != NAME or value.dtype == torch.float64:
        return value
    kept = value.dtype == torch.float32 and value.requires_grad and value.is_leaf
    if not (torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
        kept = False
    if not kept or value._is_view():
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(dtype)
    return _casts[id(value)][1]


def _float32(value: Any) -> Any:
    lower = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if lower and value.device.type == NAME else value


def _autocast(operator: Any, cast: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        return operator(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _clone_storage(
    storage: torch.UntypedStorage, clone: Callable[[Any], Any] = torch.UntypedStorage.clone
) -> torch.UntypedStorage:
    """Replace ``UntypedStorage.clone``, for which torch has no memory of this type."""
    if storage.device.type != NAME:
        cloned: torch.UntypedStorage = clone(storage)
        return cloned
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage).clone().untyped_storage()


def _forget_casts(clear: Callable[[], None] = torch.clear_autocast_cache) -> None:
    """Replace ``torch.clear_autocast_cache``, which ends an outermost region."""
    _casts.clear()
    clear()


class _Module:
    """What ``torch.simgpu`` answers."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: Any = 0) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = 0) -> None:
        torch.set_rng_state(state)


SKIPS = Path(__file__).with_name("simgpu_skips.txt")


class SimGpu(devices.Simulated):
    """The device as the package sees it: the simulated driver under another type."""

    dlpack_type = _DL_EXTENSION

    @staticmethod
    def find(device: torch.device) -> torch.device:
        """Return the only one there is."""
        return torch.device(NAME, 0)

    @staticmethod
    def set_data(tensor: Tensor, data: Tensor) -> None:
        """As on any device; torch refuses ``.data =`` across types that it does not know.

        It refuses to swap where weak references are, which follow the object here as there. A
        library's Parameter keeps its class.
        """
        if torch.nn.Parameter not in type(tensor).__mro__:
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(data, tensor.requires_grad))
            return
        if tensor._use_count() > 1 + (tensor.grad_fn is None and tensor.requires_grad):
            raise RuntimeError(f"cannot swap a tensor that {tensor._use_count()} refer to")
        torch._C._swap_tensor_impl(tensor, torch.nn.Parameter(data, tensor.requires_grad))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def install() -> None:
    """Define the device type in this process, for good."""
    if _registrations:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in _OWN.items():
        aten.impl(name, function, "PrivateUse1")
    for name in _VIEWS:
        aten.impl(name, functools.partial(_view, _operator(name)), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, cast in ((_LOWER_PRECISION, _lower), (_FLOAT32, _float32)):
        for name in names:
            casting = functools.partial(_autocast, _operator(name), cast)
            aten.impl(name, casting, "AutocastPrivateUse1")
    torch.clear_autocast_cache = _forget_casts
    torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
    _registrations.extend((every, aten))
    # A moved module keeps its Parameters, as between "cpu" and "cuda".
    torch.__future__.set_swap_module_params_on_conversion(True)
    devices.KINDS[NAME] = SimGpu
