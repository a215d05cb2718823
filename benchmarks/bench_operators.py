"""What a managed layer costs the host, and the least that an autograd function can.

Chains of modules alternate in one run, by the time of the processor, over a driver whose calls cost
nothing, every use a hit: torch's module; the function that it calls; a module with an
``autograd.Function`` that calls torch's operators and does nothing else; a managed module; and,
where there is a compiler, what ``torch.compile`` makes of torch's module and of a managed one. With
``TOOLKIT=checkout of AI-Toolkit`` its own manager is among them. There is no GPU: its streams and
events are replaced, and its copies cost nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_host_cost

ROWS, FEATURES = 8, 64
CHANNELS, SIZE = 8, 8
LAYERS = 8
CALLS = 60
ROUNDS = 7
# Before they are timed. Models of one device share its engine: for 17 passes after another model's
# turn it fetches weights of both, whose copies are no part of what a call costs.
UNTIMED_CALLS = 20
CHECKOUT = "TOOLKIT"


def median_seconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median over rounds of each call's mean, in seconds of the processor."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(UNTIMED_CALLS):
                call()
            start = time.process_time()  # not what others take of a loaded machine
            for _ in range(CALLS):
                call()
            times[name].append((time.process_time() - start) / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


# ---- the kinds of layers ----


def linear() -> tuple[Any, Any, Any]:
    """Return what makes an ``nn.Linear``, calls its function, and does the least."""
    import torch
    from torch.nn import functional as F

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.weight = weight
            if weight.requires_grad:
                ctx.save_for_backward(x)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (grad,) = grads
            if not ctx.needs_input_grad[1]:
                return grad.mm(ctx.weight), None, None
            (x,) = ctx.saved_tensors
            return grad.mm(ctx.weight), grad.t().mm(x), grad.sum(0)

    make = lambda: torch.nn.Linear(FEATURES, FEATURES)  # noqa: E731
    return make, lambda m, x: F.linear(x, m.weight, m.bias), Least


def conv2d() -> tuple[Any, Any, Any]:
    """Return what makes an ``nn.Conv2d``, calls its function, and does the least."""
    import torch
    from torch.nn import functional as F

    backward_of = torch.ops.aten.convolution_backward

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x)
            ctx.weight = weight
            return F.conv2d(x, weight, bias, padding=1)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            needs = ctx.needs_input_grad
            window = [CHANNELS], (1, 1), (1, 1), (1, 1), False, (0, 0), 1
            found = backward_of(grads[0], x, ctx.weight, *window, needs)
            return tuple(g if need else None for g, need in zip(found, needs, strict=True))

    make = lambda: torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)  # noqa: E731
    return make, lambda m, x: F.conv2d(x, m.weight, m.bias, padding=1), Least


def shapes() -> dict[str, tuple[Callable[[], tuple[Any, Any, Any]], tuple[int, ...]]]:
    """Return the kinds, with the shape of an input."""
    return {
        "linear": (linear, (ROWS, FEATURES)),
        "conv2d": (conv2d, (1, CHANNELS, SIZE, SIZE)),
    }


# ---- AI-Toolkit's manager ----


class Device(str):
    """The host's memory, which AI-Toolkit's manager takes for that of a GPU."""

    type = "cuda"


class Stream:
    """Replaces a stream, and an event: nothing is queued, so there is nothing to order."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""

    def record(self) -> None:
        """Record nothing."""


@contextlib.contextmanager
def toolkit() -> Iterator[Callable[[Any], None] | None]:
    """Yield what attaches AI-Toolkit's manager to a module; None without a checkout."""
    import torch

    checkout = os.environ.get(CHECKOUT)
    if not checkout:
        yield None
        return
    path = Path(checkout) / "toolkit" / "memory_management" / "manager_modules.py"
    spec = importlib.util.spec_from_file_location("toolkit_manager_modules", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{CHECKOUT}={checkout}: {path} is not there")
    theirs: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    stream, nothing = Stream(), contextlib.nullcontext()
    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "Event", Stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "device", lambda *_: nothing),
        mock.patch.object(torch.cuda, "stream", lambda *_: nothing),
    ):
        state = theirs._get_device_state(torch.device("cuda"))
        theirs._DEVICE_STATE[torch.device("cpu")] = state
        manager = SimpleNamespace(process_device=Device("cpu"))

        def attach(module: Any) -> None:
            kinds = theirs.LinearLayerMemoryManager, theirs.ConvLayerMemoryManager
            kinds[not isinstance(module, torch.nn.Linear)].attach(module, manager)

        yield attach


# ---- the chains ----


@contextlib.contextmanager
def chains(kind: str, trained: bool) -> Iterator[dict[str, Any]]:
    """Yield what runs each chain of one kind, attached for so long."""
    import torch

    import oracle_offload

    make, function, least = shapes()[kind][0]()

    def chain() -> Any:
        made = torch.nn.Sequential(*(make() for _ in range(LAYERS)))
        return made.requires_grad_(trained)

    def through(call: Callable[[Any, Any], Any], model: Any) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for layer in model:
                x = call(layer, x)
            return x

        return run

    models: dict[str, Any] = {name: chain() for name in ("module", "function", "least")}
    runs = {"module": models["module"]}
    runs["function"] = through(function, models["function"])
    runs["least"] = through(lambda m, x: least.apply(x, m.weight, m.bias), models["least"])
    with contextlib.ExitStack() as stack:
        attach_theirs = stack.enter_context(toolkit())
        if attach_theirs is not None:
            runs["toolkit"] = models["toolkit"] = chain()
            for layer in models["toolkit"]:
                attach_theirs(layer)
        runs["managed"] = models["managed"] = chain()
        manager = oracle_offload.attach(models["managed"], "cpu", offload_percent=0.0)
        stack.callback(manager.detach)
        assert len(manager.layers) == LAYERS
        if any(map(shutil.which, ("g++", "clang++"))):
            torch.compiler.reset()
            for name in ("module", "managed"):
                runs[f"compiled_{name}"] = torch.compile(models[name], fullgraph=True)
                models[f"compiled_{name}"] = models[name]
        yield {name: (run, models[name]) for name, run in runs.items()}


def ways(kind: str) -> dict[str, Callable[[Any, Any], Callable[[], object]]]:
    """Return what is timed, of a chain and its model."""
    import torch

    x = torch.randn(shapes()[kind][1])
    leaf, ones = x.clone().requires_grad_(), torch.ones_like(x)

    def without_grad(run: Any, model: Any) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                run(x)

        return call

    def both(run: Any, model: Any) -> Callable[[], object]:
        def call() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            leaf.grad = None
            run(leaf).backward(ones)

        return call

    return {
        "forward_without_grad": without_grad,
        "forward": lambda run, model: lambda: run(leaf),
        "forward_backward": both,
    }


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    import torch

    torch.set_num_threads(1)
    with bench_host_cost.null_driver():
        for kind in shapes():
            for trained in (False, True):
                with chains(kind, trained) as found:
                    for what, made in ways(kind).items():
                        calls = {name: made(*each) for name, each in found.items()}
                        load = os.getloadavg()[0]
                        seconds = {n: s / LAYERS for n, s in median_seconds(calls).items()}
                        yield {
                            "name": f"{kind}_{'trained' if trained else 'frozen'}_{what}",
                            "load_count": round(load, 1),
                            **{f"{name}_s": value for name, value in seconds.items()},
                            **{
                                f"{name}_over_least_ratio": value / seconds["least"]
                                for name, value in seconds.items()
                                if name not in ("function", "least")
                            },
                        }
