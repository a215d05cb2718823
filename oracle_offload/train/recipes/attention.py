"""Which kernel ``F.scaled_dot_product_attention`` was really given to, call by call."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.operators import autocast_reaches_kernels, run_in_mode

# aten's operators by what people call the backends.
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_fused_attention_overrideable": "the device's own",
    # The composite path is not dispatched as a whole; this part of it nothing else calls.
    "_safe_softmax": "math",
}


class AttentionBackends(TorchDispatchMode):
    """Counts, while the block runs, which backend each attention was dispatched to.

    What a setting allows is not what a call gets: the choice depends on dtype, shapes, mask and
    device. So the operators are watched that run. Leave the block before training on: watching
    costs time on every operator.

    Attributes
    ----------
    counts : Counter of str to int
        Calls by backend: "flash", "memory-efficient", "cuDNN", "math", ...

    Examples
    --------
    ::

        with AttentionBackends() as attention:
            model(batch)
        print(attention)  # 24 calls of scaled_dot_product_attention: flash 24
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._autocast = contextlib.ExitStack()

    def __enter__(self) -> AttentionBackends:
        self._autocast.enter_context(autocast_reaches_kernels())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._autocast.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _BACKENDS.get(func.overloadpacket.__name__)
        if name is not None:
            self.counts[name] += 1
        return run_in_mode(func, args, kwargs or {})

    def __str__(self) -> str:
        if not self.counts:
            return "no call of scaled_dot_product_attention"
        told = ", ".join(f"{name} {count}" for name, count in self.counts.most_common())
        return f"{self.counts.total()} calls of scaled_dot_product_attention: {told}"
