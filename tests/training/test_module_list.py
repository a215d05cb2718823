"""Torch's own list of modules: each that has Parameters, in all its dtypes and constructions.

The list is that of torch's own tests, with their arguments and inputs.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import types
import unittest
from unittest import mock

import pytest
import torch
from equality import as_deterministic_as, attached, count_acquires, gradients, is_simulated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oracle_offload.model.witness import Witness

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own modules' of their arguments
    pytest.mark.usefixtures("nothing_is_small"),
]
MODULES = (
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Bilinear", "Conv1d", "Conv2d", "Conv3d"),
    *("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Embedding", "GRU", "GRUCell"),
    *("GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LSTM", "LSTMCell"),
    *("LayerNorm", "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d"),
    *("LazyConvTranspose2d", "LazyConvTranspose3d", "Linear", "LinearCrossEntropyLoss"),
    *("MultiheadAttention", "PReLU", "RMSNorm", "RNN", "RNNCell", "Transformer"),
    *("TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer"),
)
FEW, MANY = 6, 100  # constructions of a module, by dtype and mode; one has 857


@pytest.fixture(scope="module")
def listed():
    """Torch's list, by name."""
    # Torch's helpers import it for tests of text, which are none of these.
    stand_in = types.SimpleNamespace(TestCase=unittest.TestCase)
    frozen, kept = torch.backends.flags_frozen(), dict(os.environ)
    with mock.patch.dict(sys.modules, {"expecttest": stand_in}):
        common = pytest.importorskip("torch.testing._internal.common_modules")
    if not frozen:  # as the import leaves them
        torch.backends.__allow_nonbracketed_mutation_flag = True
    for key in os.environ.keys() - kept.keys():
        del os.environ[key]
    return {info.name.removeprefix("nn."): info for info in common.module_db}


class Watches(TorchDispatchMode):
    """Does nothing; under any mode torch's composite operators may compute otherwise."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def tensors_in(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def fresh(value, device):
    """Return a copy on a device, which needs a gradient where the original does."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: fresh(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fresh(one, device) for one in value)
    return value


def step_of(given, device):
    """Return a step on one input: results, gradients of inputs and of Parameters, buffers."""

    def step(model):
        model.zero_grad(set_to_none=True)
        args, kwargs = fresh(tuple(given.args), device), fresh(dict(given.kwargs), device)
        torch.manual_seed(0)
        results = tensors_in(model(*args, **kwargs))
        roots = [result for result in results if result.requires_grad]
        grads = [torch.linspace(-1, 1, r.numel()).view(r.shape).to(device, r.dtype) for r in roots]
        torch.autograd.backward(roots, grads)
        inputs = [t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad]
        found = {f"result {number}": result for number, result in enumerate(results)}
        found |= {f"input {number}": tensor.grad for number, tensor in enumerate(inputs)}
        found |= gradients(model)
        return found | dict(model.named_buffers())

    return step


def assert_same_bytes(found, expected, what):
    """Assert equal to the last bit, where a result is no number, too."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        other = found[key]
        if value is None or other is None:
            assert other is value, f"{what}: {key}"
            continue
        assert (other.dtype, other.shape) == (value.dtype, value.shape), f"{what}: {key}"
        pair = [t.detach().cpu().contiguous().view(-1) for t in (other, value)]
        if pair[0].numel():
            assert torch.equal(*(t.view(torch.uint8) for t in pair)), f"{what}: {key}"


def made(info, construction, dtype, training):
    """Return a module of a dtype, as torch's own tests make it."""
    torch.manual_seed(0)
    arguments, given = construction.constructor_input, construction.forward_input
    model = info.module_cls(*arguments.args, **arguments.kwargs)
    if info.name.startswith("nn.Lazy"):
        with torch.no_grad():
            model(*(x.float() if isinstance(x, Tensor) else x for x in given.args), **given.kwargs)
    return model.to(dtype).train(training)


def begin_again(model, start):
    """Give buffers, such as running statistics, the values that they began with."""
    for key, buffer in model.named_buffers():
        buffer.copy_(start[key])


def agree(info, construction, dtype, training, device):
    """Compare a managed module with the resident one; False where torch cannot compute it."""
    resident = made(info, construction, dtype, training)
    if construction.forward_input is None or not any(p.numel() for p in resident.parameters()):
        return False
    managed = copy.deepcopy(resident)
    resident.to(device)
    start = copy.deepcopy(dict(resident.named_buffers()))
    step = step_of(construction.forward_input, device)
    deterministic = contextlib.nullcontext()
    try:
        if not is_simulated(device):
            deterministic = as_deterministic_as(resident, step)
        step(copy.deepcopy(resident))
    except (RuntimeError, NotImplementedError):
        return False
    with deterministic, attached(managed, device) as manager:
        assert manager.layers, manager.resident
        for witness in (None, Witness(declare=is_simulated(device))):
            what = f"{info.name}{construction.desc or ''}, {dtype}, training {training}"
            begin_again(resident, start)
            with Watches() if witness else contextlib.nullcontext():
                expected = step(resident)
            begin_again(managed, start)
            acquires = count_acquires()
            with witness or contextlib.nullcontext():
                found = step(managed)
            # Of an embedding the rows that are asked for travel, without a place in the arena.
            uses_arena = any(layer.needs_place for layer in manager.layers)
            assert count_acquires() > acquires or not uses_arena, f"{what}: no layer was managed"
            assert_same_bytes(found, expected, f"{what}, witness {witness is not None}")
        assert not manager.attachment.held()
    return True


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torchs_list_has_the_residents_bits(name, every, device, listed):
    if name not in listed:
        pytest.skip(f"torch {torch.__version__} has no {name} in its list")
    info, compared = listed[name], 0
    for dtype in info.dtypes:
        for training in (True, False):
            torch.manual_seed(1)
            found = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            found = found[:: -(-len(found) // (MANY if every else FEW))]
            compared += sum(agree(info, one, dtype, training, device) for one in found)
    if not compared and device != "cpu":
        pytest.skip("torch has no kernel for it on this device")
    assert compared >= 2


def test_no_module_with_parameters_is_left_out(listed):
    left = set()
    for name, info in listed.items():
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
        models = [made(info, one, torch.float32, True) for one in inputs[:2]]
        if any([*model.parameters()] for model in models):
            left.add(name)
    assert left <= {*MODULES}
