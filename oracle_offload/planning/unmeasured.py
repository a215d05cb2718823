"""About how long a step computes before any was measured: by a forward without values.

Attach does not know the batches to come. So one sample is taken of the shape that is usual for the
kind of model, and backward is taken to cost what steps with frozen weights take apart from their
forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..compress.steps import FORWARD_CHECKPOINTED_SHARE, FORWARD_SHARE, Pace
from ..engine import simulator
from ..engine.geometry import tensor_bytes
from ..engine.operators import operator_of, tensors_in
from ..engine.simulated_time import SimulatedTime
from .cards import card_named
from .sample import UnknownSample, inputs
from .source import copy_with

logger = logging.getLogger("oracle_offload")


def estimated_pace(
    module: nn.Module, tables: Iterable[str], device: simulator.Device, name: str = ""
) -> tuple[Pace, str] | None:
    """Return about what a step takes, and of which sample; None where it is not known.

    Parameters
    ----------
    module : nn.Module
        The model; it is not touched.
    tables : iterable of str
        Names of modules of whose weight only rows are read.
    device : simulator.Device
        The link, and of a simulated device all of it.
    name : str
        Of a real device: its maker's rates count, for one that is not known those of a fast one,
        since too much that is compressed costs less than too little.
    """
    rates = _rates(device, name) if name else device
    try:
        with (
            torch.inference_mode(False),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
        ):
            model = copy_with(
                module,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"),
            )
            arguments, said = inputs(model, None, 1)
            clock = _Clock(SimulatedTime(rates), [model.get_submodule(table) for table in tables])
            with clock:
                model(**arguments)
    except UnknownSample as error:
        logger.debug("a step cannot be estimated: %s", error)
        return None
    except Exception as error:  # whatever a model's own code does with values that are not there
        logger.info("a step cannot be estimated: its forward does not run: %s", error)
        return None
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in module.modules())
    share = FORWARD_CHECKPOINTED_SHARE if checkpointed else FORWARD_SHARE
    return Pace(clock.seconds / share, share, device), said


def _rates(device: simulator.Device, name: str) -> simulator.Device:
    card = card_named(name)
    if card is None:
        return replace(simulator.preset("h200"), link_gbps=device.link_gbps)
    rates = card.rates(0.5)
    return replace(
        device,
        memory_gbps=rates["memory_gbps"],
        tflops=rates["tflops"],
        launch_s=rates["launch_s"],
    )


class _Clock(TorchDispatchMode):
    """Adds up what operators take."""

    def __init__(self, time: SimulatedTime, tables: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self._time = time
        self._tables = {
            tensor.untyped_storage()._cdata for table in tables for tensor in table.parameters()
        }

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        result = func(*args, **kwargs)
        if not operator.touches_bytes or getattr(func, "namespace", "") == "prim":
            return result  # a question, not a kernel
        outputs: list[Tensor] = list(tensors_in(result))
        read = [tensor for tensor, _ in operator.tensors(args, kwargs)]
        moved = sum(
            tensor_bytes(tensor)
            for tensor in [*read, *outputs]
            if tensor.untyped_storage()._cdata not in self._tables
        )
        flops = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=result)
        dtype = outputs[0].dtype if outputs else torch.float32
        self.seconds += self._time.operator_seconds(float(flops), moved, dtype)
        return result
