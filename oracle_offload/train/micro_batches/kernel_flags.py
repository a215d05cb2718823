"""What decides for the whole process which kernels compute: precision, determinism, libraries.

None of it is kept per thread, so a step that changes it would change it for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.backends import opt_einsum

_C: Any = torch._C
# Switches that are read and set by functions of one name; a torch has those that it knows.
_NAMES = (
    "blas_preferred_backend",
    "cpu_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cudnn_benchmark",
    "cudnn_depthwise_kernel",
    "cudnn_deterministic",
    "cudnn_enabled",
    "deterministic_fill_uninitialized_memory",
    "linalg_preferred_backend",
    "math_sdp_allow_fp16_bf16_reduction",
    "miopen_immediate",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "qengine",
    "rocm_fa_preferred_backend",
    "sdp_priority_order",
)
# Of float32, by library and operator, from torch 2.9 on; one that is "none" is as what it is below.
_PRECISIONS = (
    ("generic", "all"),
    *((library, "all") for library in ("cuda", "mkldnn")),
    *((library, kind) for library in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")),
)

# Those of older torch. Setting them also sets precisions, and for good: cuDNN's are "tf32" by
# default and follow what they are below, which nothing can bring back once they were set.
_OLDER_PRECISIONS = ("float32_matmul_precision", "cudnn_allow_tf32", "onednn_allow_tf32")

_LEAST = 5e-324  # which is zero where a thread flushes what is too small

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _named(name: str) -> Flag | None:
    get, put = getattr(_C, f"_get_{name}", None), getattr(_C, f"_set_{name}", None)
    if get is None or put is None:
        return None

    def value() -> Any:
        try:
            return get()
        except RuntimeError:  # torch does not say what TF32 is in the older words
            return None

    def set_value(value: Any) -> None:
        if isinstance(value, tuple):  # of a reduction: whether it may, and whether in parts
            put(*value)
        elif value is not None:
            put(value)

    return value, set_value


def _precision(library: str, kind: str) -> Flag:
    def set_value(value: str) -> None:
        _C._set_fp32_precision_setter(library, kind, "none")
        if _C._get_fp32_precision_getter(library, kind) != value:
            _C._set_fp32_precision_setter(library, kind, value)

    return lambda: _C._get_fp32_precision_getter(library, kind), set_value


def _attribute(owner: Any, name: str) -> Flag:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _flags() -> Iterator[Flag]:
    yield (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield lambda: _LEAST + 0.0 == 0.0, torch.set_flush_denormal
    yield torch.get_num_threads, torch.set_num_threads
    yield _attribute(opt_einsum, "enabled")
    yield _attribute(opt_einsum, "strategy")
    if torch.backends.cudnn.is_available():
        yield _attribute(torch.backends.cudnn, "benchmark_limit")
    yield from filter(None, map(_named, _NAMES))
    if hasattr(_C, "_set_fp32_precision_setter"):
        yield from (_precision(*one) for one in _PRECISIONS)
    yield from filter(None, map(_named, _OLDER_PRECISIONS))


_FLAGS = tuple(_flags())


def now() -> list[Any]:
    """Return all of it."""
    return [get() for get, _ in _FLAGS]


def restore(values: list[Any]) -> None:
    """Set what is not as it was."""
    for _ in range(2):  # again, as an older switch sets precisions too
        if now() == values:
            return
        for (get, put), value in zip(_FLAGS, values, strict=True):
            if get() != value:
                put(value)
