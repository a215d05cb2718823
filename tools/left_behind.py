"""What a test may leave behind in its process, and others rely on: looked at around every test.

Torch's switches and stacks, which a test that fails half-way or forgets a `with` leaves changed,
so that others fail that pass alone; the handlers of signals; the project's variables of the
environment; the simulated device; threads that the interpreter's end would wait for. Nothing is
imported for it: without torch there is nothing of torch to look at.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SIGNALS = [
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
]
# Questions to torch and to torch._C, by name; not every version has each.
SWITCHES = (
    *("is_autocast_cache_enabled", "is_grad_enabled", "is_inference_mode_enabled"),
    *("is_anomaly_enabled", "get_default_dtype", "get_float32_matmul_precision"),
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
)
DEPTHS_AND_FLAGS = (
    *("_len_torch_dispatch_stack", "_len_torch_function_stack"),
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    *("_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_mkldnn_enabled"),
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    *("_get_flash_sdp_enabled", "_get_math_sdp_enabled"),
    *("_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled"),
)
# Of float32, by library and operator.
PRECISIONS = (
    ("generic", "all"),
    *(
        (library, kind)
        for library in ("cuda", "mkldnn")
        for kind in ("all", "matmul", "conv", "rnn")
    ),
)

OWN_SETTINGS = ("ORACLE_OFFLOAD_", "GPU_CHECK_")  # what variables of the environment begin with

State = tuple[tuple[str, ...], list[Any], int]  # names, values, threads


@functools.cache
def questions(torch: Any, simulated: bool) -> tuple[tuple[str, ...], tuple[Callable[[], Any], ...]]:
    """Return what is asked of torch: names, and what answers each."""

    def nesting() -> int:
        depth: int = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return depth

    found: dict[str, Callable[[], Any]] = {
        "depth of autocast": nesting,
        "default generator": lambda: id(torch.default_generator),
        "default device": lambda: getattr(
            sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None
        ),
    }
    for device in ("cpu", "cuda", *(["simgpu"] if simulated else [])):
        found[f"autocast of {device}"] = functools.partial(torch.is_autocast_enabled, device)
        found[f"autocast's type of {device}"] = functools.partial(torch.get_autocast_dtype, device)
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8
    if top_hooks:
        found["hooks of saved tensors"] = functools.partial(top_hooks, False)
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9
    if precision is not None:
        for library, kind in PRECISIONS:
            found[f"precision of {library} {kind}"] = functools.partial(precision, library, kind)
    for place, names in ((torch, SWITCHES), (torch._C, DEPTHS_AND_FLAGS)):
        found |= {name: getattr(place, name) for name in names if hasattr(place, name)}
    return tuple(found), tuple(found.values())


def waited_for() -> int:
    """Return how many threads the interpreter would wait for: pools of libraries end themselves."""
    threads = threading.active_count()
    if threads == 1:
        return threads
    return sum(
        not (thread.daemon or thread.name.startswith("ThreadPoolExecutor"))
        for thread in threading.enumerate()
    )


def simulated_device() -> Any:
    """Return what the first simulated device is like; None where no simulator was loaded."""
    simulator = sys.modules.get("oracle_offload.engine.simulator")
    loaded = simulator is not None and simulator.library.cache_info().currsize
    return simulator.get_device() if simulator is not None and loaded else None


def look(before: State | None = None) -> State:
    """Return what there is now; threads that `before` did not have get two seconds to end."""
    deadline = time.monotonic() + 2
    while before and waited_for() > before[2] and time.monotonic() < deadline:
        time.sleep(0.01)
    handlers: list[Any] = [signal.getsignal(number) for number in SIGNALS]
    handlers.append(
        {name: os.environ[name] for name in os.environ if name.startswith(OWN_SETTINGS)}
    )
    handlers.append(simulated_device())
    threads = waited_for()
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):  # not imported, or not to its end
        return (), handlers, threads
    names, answers = questions(
        torch, bool(getattr(sys.modules.get("simgpu"), "_registrations", ()))
    )
    return names, handlers + [answer() for answer in answers], threads


def difference(before: State, after: State) -> list[str]:
    """Return what has changed, in words."""
    names = [*(number.name for number in SIGNALS), "environment", "simulated device", *before[0]]
    values = zip(names, before[1], after[1], strict=False)
    changed = [
        f"{name}: {old!r} became {new!r}"
        for name, old, new in values
        if old != new and (name != "simulated device" or old is not None)
    ]
    if after[2] > before[2]:
        changed.append(f"threads: {before[2]} became {after[2]}: {threading.enumerate()}")
    return changed
