"""The call that lets an optimizer step weights of the host on the device."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch.optim import Optimizer

from ..engine.engines import DeviceState
from ..errors import OffloadError
from .in_backward import InBackward
from .step_seconds import predict
from .stepping import STEPPER, Home, Stepper, homes, state_of, streamed, try_steps

logger = logging.getLogger("oracle_offload")


def stream_optimizer(optimizer: Any, *, step: str = "device", during_backward: bool = False) -> Any:
    """Let an optimizer step managed weights on the device, with its states on the host.

    ``optimizer.step()`` then brings Parameters, gradients and states to the device group by group
    and sends Parameters and states home, both at once; hooks, closures, `GradScaler` and schedulers
    see one step. Its ``state_dict`` is what it was, and loads in plain torch.

    Copies of what it steps stay on the device, as those of frozen weights, and so do the norms of
    gradients that `torch.nn.utils.clip_grad_norm_` asks for. Neither is sure to see a write through
    ``.data`` or numpy to a few elements of a weight, or of its gradient between backward and
    clipping: code that makes one does so in ``with manager.writing():``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        That trains Parameters of an attached model; others among its Parameters are stepped where
        they are.
    step : {"device", "host", "auto"}, optional
        Where managed Parameters are stepped. ``"host"`` leaves the optimizer as it is: torch steps
        there, with the host's bits. ``"auto"`` takes what is predicted to be faster: it measures
        small steps in both places, and counts what the link has to move at its measured rate. What
        cannot be streamed is stepped on the host then. The log and `memory_summary` say which it
        took, and why.
    during_backward : bool, optional
        Step each managed Parameter as soon as its gradient is complete: gradients never leave the
        device, ``.grad`` stays None, and ``step()`` steps the rest, once for each backward. What
        needs all gradients at once, or twice, is refused: `GradScaler`, clipping, accumulation over
        several backwards, ``retain_graph=True``.

    Returns
    -------
    torch.optim.Optimizer
        The same object.

    Raises
    ------
    ValueError
        `step` is none of these, or is not ``"device"`` with ``during_backward=True``.
    OffloadError
        It trains no managed Parameter, or is of a class that steps otherwise when it gets its
        Parameters one by one (LBFGS, SAM, Prodigy, schedule-free), or that draws random numbers;
        its states are paged, or it was made with ``capturable=True`` or ``differentiable=True``.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    >>> with oracle_offload.attach(model, "cpu"):
    ...     optimizer = stream_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ...     model(torch.randn(2, 256)).sum().backward()
    ...     optimizer.step()

    Without gradients that leave the device:

    >>> with oracle_offload.attach(model, "cpu"):
    ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ...     optimizer = stream_optimizer(optimizer, during_backward=True)
    ...     model(torch.randn(2, 256)).sum().backward()
    ...     assert model[0].weight.grad is None
    ...     optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    if step not in ("device", "host", "auto"):
        raise ValueError(f"step={step!r} is none of 'device', 'host', 'auto'")
    if during_backward and step != "device":
        raise ValueError(
            f"step={step!r}: with during_backward=True Parameters are stepped on the device. Leave "
            "one of the two out."
        )
    name, at_home = type(optimizer).__name__, homes()
    state = state_of(optimizer, at_home)
    if state is None:
        raise OffloadError(
            f"{name} trains no managed Parameter: attach the model first, and give the optimizer "
            "its Parameters."
        )
    known = optimizer.__dict__.get(STEPPER)
    if known is not None:
        if known.steps_in_backward != during_backward or step == "host":
            raise OffloadError(
                f"{name} is streamed already, with during_backward={known.steps_in_backward}, and "
                "stays so. Make a new optimizer, and load its states."
            )
        return optimizer
    why_host = "as it was asked to" if step == "host" else ""
    said = "in backward, on the device" if during_backward else "after backward, on the device"
    if step != "host":
        try:
            _refuse_by_name(optimizer)
            try_steps(optimizer, type(optimizer), state.device, at_home)
        except OffloadError as error:
            if step == "device":
                raise
            why_host = str(error)
    if step == "auto" and not why_host:
        seconds = predict(optimizer, type(optimizer), state, at_home)
        said += f": {seconds}"
        why_host = str(seconds) if seconds.host_s < seconds.device_s else ""
    if why_host:
        said = f"after backward, on the host: {why_host}"
    else:
        _stream(optimizer, state, at_home, during_backward)
    logger.info("%s steps %s", name, said)
    state.optimizers[optimizer] = said
    return optimizer


def _stream(
    optimizer: Any, state: DeviceState, at_home: dict[int, Home], during_backward: bool
) -> None:
    patched = optimizer.__dict__.pop("step", None)  # a scheduler's, which counts calls
    stepper = InBackward(state, optimizer) if during_backward else Stepper(state)
    stepper.begin_to_cover(optimizer, at_home)
    optimizer.__dict__[STEPPER] = stepper
    kind: Any = type(optimizer)
    optimizer.__class__ = streamed(kind)
    if patched is not None:
        optimizer.__dict__["step"] = _counted_step(optimizer)


def _counted_step(optimizer: Any) -> Any:
    """Return a step that lets schedulers know: they patch one so that exists before they do.

    It does not keep the optimizer, which goes with its last reference, as one of plain torch does.
    """
    made = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        own: Any = made()
        own._opt_called = True
        return type(own).step(own, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _refuse_by_name(optimizer: Any) -> None:
    name = type(optimizer).__name__
    patched = optimizer.__dict__.get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise OffloadError(
            f"{name} cannot be streamed: somebody has put another step into this object. Stream "
            "the optimizer first."
        )
    if getattr(optimizer, "is_paged", False):
        raise OffloadError(
            f"{name} cannot be streamed: its states are paged, so that the system moves them. Use "
            "the class without 'Paged': its states will be on the host all the same."
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise OffloadError(
                    f"{name}({option}=True) cannot be streamed: its Parameters and states do not "
                    "stay on the device. Leave the option out."
                )
