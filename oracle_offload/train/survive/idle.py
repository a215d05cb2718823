"""Training that does nothing is noticed: parameters that get no gradient, or do not change.

A loss that falls says little of it, because others may learn; and a LoRA that never moves costs a
night. Every few steps the values of the trainable parameters are compared with those before; of one
that has not changed, what is known of its gradient, of its optimizer and of its forward tells why.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ...engine.exemption import exempt
from ...host.terminal import printable

logger = logging.getLogger("oracle_offload")

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = 4096  # of a tensor with so many values every one is kept, of a larger one sums
_PIECES = 64
_NAMED = 4  # in one line of the log
_LORA_PAIRS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora_a", "lora_b"))


@dataclass(frozen=True)
class Idle:
    """A trainable parameter that training does not change.

    Attributes
    ----------
    name : str
        As in ``model.named_parameters()``.
    steps : int
        For how many steps, at least.
    gradient : {"none", "zero", "not finite", "nonzero"}
        What it had in the last of them; "none" also where it was cleared before it was looked at.
    cause : str
        The likeliest.
    fix : str
        What to do.
    """

    name: str
    steps: int
    gradient: str
    cause: str
    fix: str

    def __str__(self) -> str:
        name = printable(self.name)
        return f"{name} has not changed for {self.steps} steps: {self.cause}; {self.fix}"


class _Forward:
    """What the forwards of one module looked like while it was under suspicion."""

    def __init__(self, module: nn.Module) -> None:
        self.ran = self.with_gradients = self.gave_gradients = False
        self._hook = module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.ran = True
        self.with_gradients |= torch.is_grad_enabled()
        self.gave_gradients |= any(tensor.requires_grad for tensor in _tensors_in(output))

    def end(self) -> None:
        self._hook.remove()


class IdleAlarm:
    """Names trainable parameters that have had no gradient, or no change, for some steps.

    Parameters
    ----------
    model : nn.Module
        The model, attached or not.
    steps : int
        For how many steps a parameter may stay as it is. Every so many steps all trainable values
        are read once; the other steps only look whether there are gradients.
    scaler : torch.amp.GradScaler, optional
        The one that steps the optimizer: steps that it skipped are distinguished from steps
        that were never made.
    on_alarm : callable, optional
        Called with the list of new findings; what it raises ends the step. By default they are
        logged as warnings.
    ignore : iterable of str
        Parts of names; parameters that have one in theirs are not watched (experts that are rarely
        chosen).

    Attributes
    ----------
    idle : dict of str to Idle
        What is idle now, by name: a parameter that moves again is taken off.

    Raises
    ------
    ValueError
        `steps` is no positive number, or the model has nothing trainable.

    Examples
    --------
    In a loop::

        alarm = oracle_offload.train.IdleAlarm(model, steps=20)
        for batch in loader:
            ...
            optimizer.step()
            alarm.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int = 20,
        scaler: Any = None,
        on_alarm: Callable[[list[Idle]], object] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r} is not a number of steps; use 1 or more")
        self.steps = steps
        self.idle: dict[str, Idle] = {}
        self._model = model
        self._scaler = scaler
        self._on_alarm = on_alarm
        self._ignore = tuple(ignore)
        self._count = 0
        self._forwards: dict[str, _Forward] = {}
        self._watched: dict[str, nn.Parameter] = {}
        self._since: dict[str, int] = {}
        self._begin_window()
        if not self._watched:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter to watch; add the adapter, or "
                "set requires_grad, before the alarm is made"
            )
        alarm = weakref.ref(self)  # a hook for all optimizers lives until it is removed

        def before_step(optimizer: Any, *details: Any) -> None:
            found = alarm()
            if found is not None:
                found._before_step(optimizer)

        hook = torch_optimizer.register_optimizer_step_pre_hook(before_step)
        self._finalizer = weakref.finalize(self, _end, hook, self._forwards)

    def close(self) -> None:
        """Watch no more."""
        self._finalizer()

    def step(self) -> list[Idle]:
        """Note that a training step has ended; to be called before its gradients are cleared.

        Returns
        -------
        list of Idle
            What this step has brought up; empty at all steps but each `steps`-th.
        """
        self._look()
        self._count += 1
        if self._count % self.steps:
            if not self._forwards:
                self._suspect()
            return []
        with exempt():
            found = self._unchanged()
        _end_all(self._forwards)
        fresh = [idle for idle in found if idle.name not in self.idle]
        self.idle = {idle.name: idle for idle in found}
        self._begin_window()
        if fresh and self._on_alarm is not None:
            self._on_alarm(fresh)
        elif fresh:
            _log(fresh)
        return fresh

    # ---- a window of steps ----

    def _begin_window(self) -> None:
        """Keep the values of what is trainable now, and of what was: it may have been frozen."""
        named = dict(self._model.named_parameters())
        ours = {id(parameter) for parameter in self._watched.values()}
        self._watched = {
            name: parameter
            for name, parameter in named.items()
            if (parameter.requires_grad or id(parameter) in ours)
            and not any(part in name for part in self._ignore)
        }
        with exempt():
            self._marks = {name: _mark(p) for name, p in self._watched.items()}
        self._since = {name: self._since.get(name, self._count) for name in self._watched}
        self._gradients = dict.fromkeys(self._watched, "none")
        self._with_gradient: set[str] = set()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scale = self._scale_now()

    def _scale_now(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def _before_step(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        self._look()

    def _look(self) -> None:
        """Note which parameters have a gradient; in a window's last step, of what kind."""
        is_last = self._count % self.steps == self.steps - 1
        there = {name: p.grad for name, p in self._watched.items() if p.grad is not None}
        self._with_gradient.update(there)
        if is_last:
            with exempt():
                for name, gradient in there.items():
                    self._gradients[name] = _kind(gradient)

    def _suspect(self) -> None:
        """Watch the next forwards of the modules whose parameters got no gradient."""
        modules = dict(self._model.named_modules())
        for name in self._watched.keys() - self._with_gradient:
            owner = name.rpartition(".")[0]
            # A ParameterDict is not called: who reads from it is.
            while owner and type(modules[owner]).forward is nn.Module.forward:
                owner = owner.rpartition(".")[0]
            if owner not in self._forwards:
                self._forwards[owner] = _Forward(modules[owner])

    # ---- what a window has shown ----

    def _unchanged(self) -> list[Idle]:
        found = []
        ours = {id(parameter) for parameter in self._model.parameters()}
        groups = [group for each in self._optimizers for group in each.param_groups]
        self._rates = {id(p): group.get("lr") for group in groups for p in group["params"]}
        self._foreign = len(self._rates.keys() - ours)
        for name, parameter in self._watched.items():
            if _same(self._marks[name], _mark(parameter)):
                cause, fix = self._why(name, parameter)
                steps = self._count - self._since[name]
                found.append(Idle(name, steps, self._gradients[name], cause, fix))
            else:
                self._since[name] = self._count
        return found

    def _why(self, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        """Return the likeliest cause, and what to do, from what is certain to what is likely."""
        if not parameter.requires_grad:
            return "it was frozen since (requires_grad is off)", "set requires_grad where it trains"
        if name not in self._with_gradient:
            return self._why_no_gradient(name)
        if not self._optimizers:
            return self._why_no_step(name)
        if id(parameter) not in self._rates:
            if self._foreign:
                return (
                    f"no optimizer that stepped holds it, and {self._foreign} parameters that they "
                    "hold are not the model's",
                    "make the optimizer from model.parameters() after adapters are added and "
                    "parameters replaced",
                )
            return "no optimizer that stepped holds it", "add it to the optimizer's parameters"
        kind = self._gradients[name]
        if kind == "not finite":
            return (
                "its gradient is not finite, so its steps are skipped or spoil it",
                "lower the learning rate or the scale, or train in bf16",
            )
        if kind == "zero":
            return self._why_zero(name, parameter)
        rate = self._rates[id(parameter)]
        if rate is not None and float(rate) == 0.0:
            return "the learning rate of its group is 0", "look at the scheduler and the group's lr"
        dtype = str(parameter.dtype).removeprefix("torch.")
        return (
            f"its gradient is {kind}, and no step changes its value: steps are smaller than "
            f"{dtype} can tell, or something writes the old values back",
            "keep trained parameters in float32 or raise the learning rate; look for what loads "
            "weights in each step",
        )

    def _why_no_gradient(self, name: str) -> tuple[str, str]:
        owner = name.rpartition(".")[0]
        while owner and owner not in self._forwards:
            owner = owner.rpartition(".")[0]
        seen = self._forwards.get(owner)
        if seen is None:
            return (
                "it has had no gradient",
                "look whether the loss depends on it, and step the alarm before zero_grad",
            )
        if not seen.ran:
            return (
                f"it has had no gradient, and '{owner}' did not run",
                "a disabled or merged adapter, an expert that is never chosen, or a weight that "
                "is used without its module",
            )
        if not seen.with_gradients:
            return (
                f"it has had no gradient: '{owner}' ran only with gradients switched off",
                "take no_grad or inference_mode from around it; under reentrant checkpointing let "
                "the inputs require gradients (enable_input_require_grads, or use_reentrant=False)",
            )
        if not seen.gave_gradients:
            return (
                f"it has had no gradient: what '{owner}' returned did not depend on it",
                "it is not used there, or what is computed with it is detached inside",
            )
        return (
            f"it has had no gradient: what '{owner}' returned does not reach the loss",
            "look behind it for detach(), .data, item(), no_grad, or a loss of something else; and "
            "step the alarm before zero_grad",
        )

    def _why_no_step(self, name: str) -> tuple[str, str]:
        scale = self._scale_now()
        if scale is not None:
            fell = f" and fell from {self._scale:g} to {scale:g}"
            return (
                "the scaler skipped every step: gradients were not finite"
                + (fell if scale != self._scale else ""),
                "lower the learning rate or the scaler's init_scale, or train in bf16",
            )
        return (
            "no optimizer stepped",
            "call optimizer.step(), through the scaler if there is one",
        )

    def _why_zero(self, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        for one, other in _LORA_PAIRS:
            for mine, theirs in ((one, other), (other, one)):
                partner = self._watched.get(name.replace(mine, theirs)) if mine in name else None
                if partner is not None and not _nonzero(partner) and not _nonzero(parameter):
                    return (
                        f"its gradient is zero because it and its {theirs} are both zero, so "
                        "neither can ever move",
                        "initialise one of the two at random (lora_A), and only the other with "
                        "zeros",
                    )
        return (
            "its gradient is exactly zero: what it computes is multiplied by zero on its way to "
            "the loss",
            "look for a scale, a mask or a weight behind it that is zero",
        )


def _end_all(forwards: dict[str, _Forward]) -> None:
    for forward in forwards.values():
        forward.end()
    forwards.clear()


def _end(hook: Any, forwards: dict[str, _Forward]) -> None:
    hook.remove()
    _end_all(forwards)


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _mark(parameter: Tensor) -> list[Tensor]:
    """Return what tells whether a value has changed: all its bits, or the sums of their lines."""
    bits = parameter.detach()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    bits = bits.view(_BITS[bits.element_size()])
    if bits.numel() <= _WHOLE:
        return [bits.cpu().clone()]
    if bits.ndim > 1:
        return [bits.sum(dim, dtype=torch.int64).cpu() for dim in (0, -1)]
    return [piece.sum(dtype=torch.int64).cpu() for piece in bits.tensor_split(_PIECES)]


def _same(before: list[Tensor], now: list[Tensor]) -> bool:
    return all(map(torch.equal, before, now))


def _nonzero(tensor: Tensor) -> bool:
    return bool(tensor.detach().any())


def _kind(gradient: Tensor) -> str:
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    if not values.numel():
        return "zero"
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        return "not finite"
    return "nonzero" if largest else "zero"


def _log(found: list[Idle]) -> None:
    """Write one line per cause, which may hold for hundreds of parameters."""
    causes: dict[tuple[str, str], list[Idle]] = {}
    for idle in found:
        causes.setdefault((idle.cause, idle.fix), []).append(idle)
    for (cause, fix), idles in causes.items():
        names = ", ".join(idle.name for idle in idles[:_NAMED])
        rest = f" and {len(idles) - _NAMED} more" if len(idles) > _NAMED else ""
        logger.warning(
            "%s%s: not changed for %d steps: %s; %s", names, rest, idles[0].steps, cause, fix
        )
