"""Managed ``nn.Embedding``: the rows that a batch asks for travel, and not the table.

Masters are page-locked, so the device can read them in host memory: torch's own operator runs on a
device tensor over the host's memory, and only rows cross the link. The gradient needs no weight.
Where the table is not locked it travels as a whole, through the arena if that has room.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.exemption import exempt
from ..engine.geometry import tensor_bytes
from ..errors import NoRoomError, OffloadError
from . import traced
from .leaf import Structure, Tensors
from .loan import Cast, Compute, Needs, node_of
from .swap import untraced
from .traced import WithInherited

_from_dlpack = torch._C._from_dlpack
_backward = torch.ops.aten.embedding_backward


class EmbeddingLayer(WithInherited):
    """A managed ``nn.Embedding``; `x` holds row numbers, of any shape."""

    base = nn.Embedding
    base_forward = staticmethod(nn.Embedding.forward)
    names = ("weight",)
    required = ("weight",)
    backward_reads = ()
    node = node_of("ManagedEmbedding")
    operator = staticmethod(traced.embedding)
    needs_place = False

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        super().__init__(module, name, structure)
        kind = self.state.kind
        self._where = kind.dlpack_type, self.state.ordinal

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        """Say why the module's own tensors keep it from being managed; empty where none does."""
        if getattr(module, "max_norm", None) is not None:
            return "max_norm writes its weight in forward"
        return super().unfit(module)

    def __call__(self, x: Tensor) -> Tensor:
        """Look up the rows `x`; an unlocked table that fits no arena is copied outside of it."""
        try:
            return super().__call__(x)
        except NoRoomError:
            return self.foreign(x)

    # ---- the table ----

    def lend(self, kind: int, task: int, seconds: float, dtype: Cast, compute: Compute) -> Any:
        """Return ``compute`` of the table in host memory, or, if it is not locked, in a slot."""
        state = self.state
        if self.unit in state.rewritten:  # a copy of what is still being written would be torn
            state.await_rewrite(self.unit)
        stream = state.stream()
        state.time.flush(stream)
        masters = self.masters
        (master,) = masters.present
        nbytes = tensor_bytes(master)
        with torch.inference_mode(False), torch.no_grad():
            capsule = state.engine.map(self.member, stream, nbytes, *self._where, seconds)
            if capsule is None:
                return super().lend(kind, task, seconds, dtype, compute)
            memory = _from_dlpack(capsule).untyped_storage()
            nothing = torch.empty(0, dtype=master.dtype, device=state.device)
            table = torch.empty(0, dtype=master.dtype, device=state.device)
            table.set_(memory, 0, master.shape, master.stride())
        rows = None
        try:
            if not self.moving and self.masters is masters:
                with exempt():
                    rows = compute((table,))
        finally:
            # The use ends with the memory. A traceback may keep the table, here and further in.
            with torch.inference_mode(False), torch.no_grad():
                table.set_(nothing.untyped_storage(), 0, (0,), (1,))
            del capsule, memory
        if rows is None:
            with state.lock:  # another thread moves the master; see `Leaf.follow`
                pass
            return self.lend(kind, task, seconds, dtype, compute)
        self.attachment.traffic.note_rows(tensor_bytes(rows))
        return rows

    # ---- what a kind says ----

    def base_call(self, module: Any, x: Tensor, tensors: Any) -> Tensor:
        """``F.embedding`` with the given table."""
        (table,) = tensors
        if module.max_norm is not None:
            raise OffloadError(
                f"max_norm of managed layer '{self.name}' was set after attach; it writes the "
                "table in forward, which is on the host. Set it before attach: the layer stays "
                "resident then."
            )
        return F.embedding(
            x, table, module.padding_idx, None, 2.0, module.scale_grad_by_freq, module.sparse
        )

    def call(self, x: Tensor) -> Tensor:
        """Look up rows; autocast has no part in that."""
        return self.use(x, None)

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """Look up rows by the operator; torch.compile traces this."""
        if module.max_norm is not None:  # which is refused in a sentence
            return cast("Tensor", untraced(self, x))
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        padding = -1 if module.padding_idx is None else module.padding_idx
        return self.operate(module, x, None, padding, module.scale_grad_by_freq, module.sparse)

    def restore(
        self, ctx: Any, x: Tensor | None, shape: torch.Size, stride: Any, *arguments: Any
    ) -> None:
        """Put into `ctx` what `record` had kept there."""
        ctx.save_for_backward(x)
        ctx.how = self.masters.present[0].shape[0], *arguments

    def compute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """``F.embedding`` where autograd records nothing."""
        return self.base_call(self.module(), x, tensors)

    def record(self, ctx: Any, x: Tensor, trained: Tensors, tensors: Tensors) -> Tensor:
        """``F.embedding``; the row numbers are kept, and what the gradient is made by."""
        module: Any = self.module()
        padding = -1 if module.padding_idx is None else module.padding_idx
        ctx.save_for_backward(x)
        ctx.how = module.weight.shape[0], padding, module.scale_grad_by_freq, module.sparse
        return self.compute(x, tensors)

    def derivative(self, ctx: Any, grad: Tensor, needs: Needs) -> Tensors:
        """Return the gradient of the table; dense, unless the module asks for a sparse one."""
        (x,) = ctx.saved_tensors
        return None, _backward(grad, x, *ctx.how) if needs[1] else None

    def forward_seconds(self, x: Tensor) -> float:
        """Return how long the simulated device reads the rows, over the link."""
        _, moved = self.forward_cost(x)
        return self.state.time.link_seconds(moved)

    def forward_cost(self, x: Tensor) -> tuple[float, int]:
        """Read the rows."""
        table = self.masters.present[0]
        return 0.0, x.numel() * table.shape[1] * table.element_size()

    def backward_cost(self, grad: Tensor, needs: Needs) -> tuple[float, int]:
        """Nothing: no loan is taken."""
        return 0.0, 0
