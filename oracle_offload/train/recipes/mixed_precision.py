"""Mixed precision: bfloat16 where the device computes in it, else float16 and a gradient scaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_SHRINKS_TO_TELL = 4  # in a row


def best_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype to compute in: bfloat16 where the device has it, else float16."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.bfloat16
    with torch.cuda.device(device):  # what is asked next answers for the current device
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16


class MixedPrecision:
    """Autocast, and with float16 a scaler, as one object.

    Parameters
    ----------
    device : torch.device or str
        Where the model computes.
    enabled : bool
        Without it every call does what plain float32 code does.
    dtype : torch.dtype, optional
        By default `best_dtype`.

    Attributes
    ----------
    dtype : torch.dtype or None
        What autocast computes in; None where it is off.
    scaler : torch.amp.GradScaler or None
        With float16 alone; what a resumed training needs is in its ``state_dict``.
    skipped : int
        Steps that were left out because a gradient was not finite.
    hint : str
        What to do where float16 is not stable; empty while there is nothing to say.

    Examples
    --------
    ::

        amp = MixedPrecision("cuda")
        with amp.autocast():
            loss = model(batch)
        amp.backward(loss)
        amp.step(optimizer, model.parameters(), max_norm=1.0)
    """

    def __init__(
        self,
        device: torch.device | str,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._device_type = torch.device(device).type
        self.dtype = (dtype or best_dtype(device)) if enabled else None
        self.scaler: torch.amp.GradScaler | None = None
        if self.dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(self._device_type)
        self.skipped = 0
        self._in_a_row = 0
        self.hint = ""

    def autocast(self) -> Any:
        """Return the context in which the forward runs."""
        return torch.autocast(self._device_type, self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Run backward, of the scaled loss where there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[Tensor] = (),
        max_norm: float | None = None,
    ) -> bool:
        """Clip the gradients if asked to, and step; return whether the optimizer stepped.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            It.
        parameters : iterable of Tensor
            Whose gradients are clipped together; by default the optimizer's.
        max_norm : float, optional
            Their norm at most.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if max_norm is not None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(list(parameters) or held, max_norm)
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= _SHRINKS_TO_TELL:
            self.hint = (
                f"{self._in_a_row} steps in a row had gradients that float16 cannot hold: the "
                "model is not stable in it. Compute in bfloat16 or float32, or lower the learning "
                "rate."
            )
        return False
