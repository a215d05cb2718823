"""What every Python of .venv-cuda loads: the driver before torch, the operators right after it.

Of .venv-aitoolkit, too: each has a build of its own.

A .pth file imports this module when Python starts, and torch calls `after_torch` at the end of its
own import (its entry points "torch.backends"); build_driver.py writes both. ``CUDA_SIM=0`` leaves
all of it out: then torch finds no CUDA driver. ``CUDA_SIM_DEVICES=2`` has two cards.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / Path(sys.prefix).name.removeprefix(".venv-")  # of .venv-cuda: cuda
ON = os.environ.get("CUDA_SIM", "1") != "0"

if ON:
    os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")  # kernels in Triton: nothing runs them
    # Code that asks for these names later finds these libraries: torch, pynvml, an engine.
    for _name in ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(FOLDER / _name))
    # Without kernels for a card bitsandbytes and quanto compute by their own operators in plain
    # torch. Quanto would have nvcc make them, for minutes.
    for _name in ("bitsandbytes.backends.cuda.ops", "optimum.quanto.library.extensions.cuda"):
        sys.modules[_name] = ModuleType(_name)


def after_torch() -> None:
    """Put the operators of the CPU in the place of a card's kernels."""
    if not ON:
        return
    import torch

    if not torch.cuda.is_available():
        return
    library = ctypes.CDLL(str(FOLDER / "liboperators.so"))
    if library.cuda_sim_install_operators() < 1000:
        raise RuntimeError("torch has fewer operators for CUDA than expected: see operators.cpp")
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
