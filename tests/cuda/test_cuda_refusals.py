"""What is not there says so by its name, and never returns a wrong value."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import before_torch
import pytest
import torch
from own_process import in_a_process

ROOT = Path(__file__).resolve().parents[2]


def test_a_launch_by_the_runtime_is_an_error_that_names_the_kernel():
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    host, name = ctypes.create_string_buffer(1), b"_Z9my_kernelPf"
    runtime.__cudaRegisterFunction(
        None, ctypes.byref(host), None, name, -1, None, None, None, None, None
    )
    dimensions = (ctypes.c_uint * 3)(1, 1, 1)

    class Dim3(ctypes.Structure):
        _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    one = Dim3(*dimensions)
    runtime.cudaLaunchKernel.argtypes = (
        *(ctypes.c_void_p, Dim3, Dim3),
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    )
    error = runtime.cudaLaunchKernel(ctypes.addressof(host), one, one, None, 0, None)
    assert error == runtime.cudaGetLastError() == 801
    assert b"my_kernel(float*)" in runtime.cudaGetErrorString(error)


def test_an_operator_that_the_cpu_has_not_is_an_error_that_names_it():
    x = torch.ones(2, 2, 4, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 4, 4, 0.0, False, False)


def test_nothing_is_captured_and_no_graph_runs():
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    refused = pytest.raises(NotImplementedError, match="aten::add_: no kernel goes into a graph")
    with refused, torch.cuda.graph(graph):
        x.add_(1)
    torch.cuda.synchronize()
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="cudaGraphLaunch is not there"):
        graph.replay()


def test_memory_is_not_shared_between_processes():
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle is not there"):
        torch.ones(3, device="cuda").untyped_storage()._share_cuda_()


def test_torch_finds_every_call_that_it_imports():
    """A name that is missing would end the process when it is called."""
    runtime = ctypes.CDLL("libcudart.so.13")
    stubs = (before_torch.FOLDER / "runtime_stubs.c").read_text()
    names = re.findall(r"^int (cuda\w+)\(void\) {", stubs, re.MULTILINE)
    assert "cudaGraphLaunch" in names
    for name in names:
        assert hasattr(runtime, name)


def test_torch_may_call_while_the_process_ends():
    """It takes back what it registered, and warns of what failed: words were written into strings
    that had been destroyed. An allocator that checks its heap ends the process for it."""
    in_a_process(
        """
        def refused():
            try:
                torch.ones(3, device="cuda").untyped_storage()._share_cuda_()
            except RuntimeError as error:
                print(error)
        refused()
        event = torch.cuda.Event()
        event.record()
        simulated_cuda.simulator().set_fault("cuEventDestroy", 1, 801, lasting=True)
        """,
        LD_PRELOAD="libc_malloc_debug.so.0",
        MALLOC_CHECK_="3",
        MALLOC_PERTURB_="165",
    )


def test_it_can_be_left_out():
    asks = "import torch; print(torch.cuda.is_available())"
    environment = {**os.environ, "CUDA_SIM": "0"}
    said = subprocess.run(
        [sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"


@pytest.mark.parametrize("asked", ["simgpu", "cuda"])
def test_the_list_of_what_is_skipped_is_that_of_cuda_alone(asked):
    """The list of another device names tests that are not collected here: that was an error."""
    collects = "-m pytest -o addopts= --collect-only -q -p no:cacheprovider".split()
    words = [*collects, "tests/training/test_embedding.py", "--device", asked]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"[{asked}" in done.stdout
