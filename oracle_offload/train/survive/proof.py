"""A first-step proof: one block of an attached model against a resident copy, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...errors import OffloadError
from ...manager import ATTRIBUTE, MemoryManager
from .random_state import RandomState

logger = logging.getLogger("oracle_offload")

_MOST_RUNS = 8  # of the resident copy, where something differs that it has repeated so far


@dataclass
class FirstStepProof:
    """What `first_step_proof` has compared, filled in when its block ends.

    Attributes
    ----------
    block : str
        The name of the block.
    layers : int
        Of those in it, how many are managed.
    compared : int
        Tensors that were compared: results, gradients of inputs and of trainable parameters.
    differing : list of str
        Those that differ in any bit.
    not_deterministic : list of str
        Tensors that the resident copy itself does not repeat bit for bit. They are not compared.
    """

    block: str
    layers: int = 0
    compared: int = 0
    differing: list[str] | None = None
    not_deterministic: list[str] | None = None

    @property
    def equal(self) -> bool:
        """Whether something was compared, and all of it was equal."""
        return self.compared > 0 and not self.differing


class _Call:
    """The first call of a block: its arguments, the generators, the autocast around it."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.arguments: tuple[Any, Any] | None = None
        self._device = device
        self._hook = block.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self.arguments is None:
            self.arguments = tree_map(_kept, (args, kwargs))
            self._random = RandomState()
            kind = self._device.type
            self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def end(self) -> None:
        self._hook.remove()

    def repeat(self, block: nn.Module) -> dict[str, Tensor | None]:
        """Call `block` the same way; return its results and the gradients of a sum over them."""
        self._random.restore()
        args, kwargs = tree_map(_as_input, self.arguments)
        enabled, dtype = self._autocast
        with (
            torch.enable_grad(),
            torch.autocast(self._device.type, dtype, enabled=enabled, cache_enabled=False),
        ):
            results = block(*args, **kwargs)
        found: dict[str, Tensor | None] = {
            f"result {index}": tensor.detach() for index, tensor in enumerate(_tensors(results))
        }
        wanted = {f"input {i}": tensor for i, tensor in enumerate(_tensors((args, kwargs)))}
        wanted |= dict(block.named_parameters())
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        ends = [tensor for tensor in _tensors(results) if tensor.requires_grad]
        if ends and wanted:
            upstream = [torch.ones_like(tensor) for tensor in ends]
            gradients = torch.autograd.grad(
                ends, list(wanted.values()), upstream, allow_unused=True
            )
            found |= {
                f"gradient of {name}": gradient
                for name, gradient in zip(wanted, gradients, strict=True)
            }
        return found


@contextlib.contextmanager
def first_step_proof(model: nn.Module, block: str | None = None) -> Iterator[FirstStepProof]:
    """Prove, around a first training step, that a block computes the same bits as when resident.

    The block's first call is repeated once the ``with`` block ends: managed, and twice by a copy
    that is on the device. Results and gradients are compared bit for bit, as far as the copy
    agrees with itself: some kernels of GPUs (the backward of flash attention, for one) do not
    repeat their own bits. Training is not disturbed: generators and buffers are as before, and
    ``.grad`` is not touched. It costs three more forwards and backwards of the block, and the
    memory of one block on the device.

    Parameters
    ----------
    model : nn.Module
        An attached model.
    block : str, optional
        A submodule, by name; by default the first of the longest list of modules.

    Yields
    ------
    FirstStepProof
        What was compared, once the block has ended.

    Raises
    ------
    ValueError
        There is no such block.
    OffloadError
        The model is not attached, the block has no managed layer, it was not called, or bits
        differ.

    Examples
    --------
    In a loop::

        with oracle_offload.train.first_step_proof(model) as proof:
            train_step(batch)
        assert proof.equal
    """
    manager = model.__dict__.get(ATTRIBUTE)
    if not isinstance(manager, MemoryManager):
        raise OffloadError(f"{type(model).__name__} is not attached; a proof needs a managed model")
    name = _first_block(model) if block is None else block
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"block={block!r}: the model has no module of this name")
    module = modules[name]
    inside = {id(each) for each in module.modules()}
    proof = FirstStepProof(name)
    proof.layers = sum(id(layer.module()) in inside for layer in manager.layers)
    if not proof.layers:
        raise OffloadError(f"no layer in '{name}' is managed; name a block that has one")
    call = _Call(module, manager.device)
    try:
        yield proof
    finally:
        call.end()
    if call.arguments is None:
        raise OffloadError(
            f"'{name}' was not called in the step that was to be proved; name another block"
        )
    _compare(proof, call, module, manager.device)
    unsteady = proof.not_deterministic
    if not proof.compared and not unsteady:
        raise OffloadError(f"'{name}' returned no tensor to compare; name a block that does")
    if proof.differing:
        raise OffloadError(
            f"'{name}' does not compute the resident block's bits: {_named(proof.differing)}"
            f" differ ({len(proof.differing)} of {proof.compared}), in which the resident copy "
            "agrees with itself. Report it, and train without attach until then."
        )
    if unsteady:
        logger.warning(
            "first-step proof: '%s' is not deterministic when resident: %s (%d of %d tensors) do "
            "not repeat their own bits, and were not compared. To compare them too, set "
            "torch.use_deterministic_algorithms(True).",
            name,
            _named(unsteady),
            len(unsteady),
            len(unsteady) + proof.compared,
        )
    if proof.compared:
        logger.info(
            "first-step proof: '%s' computes the resident block's bits, %d tensors compared",
            name,
            proof.compared,
        )


def _named(tensors: list[str]) -> str:
    return ", ".join(tensors[:4]) + (", ..." if len(tensors) > 4 else "")


def _compare(proof: FirstStepProof, call: _Call, module: nn.Module, device: torch.device) -> None:
    ambient = RandomState()
    resident = _resident_copy(module, device)
    try:
        found = _repeat(call, module)
        expected = _repeat(call, resident)
        steady = list(expected)
        # A tensor of few elements may agree with itself by luck: what differs is asked again.
        for _ in range(1, _MOST_RUNS):
            again = _repeat(call, resident)
            steady = [name for name in steady if _same_bits(expected[name], again[name])]
            differing = [name for name in steady if not _same_bits(found.get(name), expected[name])]
            if not differing:
                break
    finally:
        ambient.restore()
    proof.differing = differing
    proof.compared = len(steady)
    proof.not_deterministic = [name for name in expected if name not in steady]


def _repeat(call: _Call, module: nn.Module) -> dict[str, Tensor | None]:
    """Repeat `call`; the buffers are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        return call.repeat(module)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _resident_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return an ordinary copy on the device; plain weights go there without a copy on the host."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if type(tensor) in (nn.Parameter, Tensor):
            moved = tensor.detach().to(device, copy=True)
            trains = tensor.requires_grad
            is_parameter = type(tensor) is nn.Parameter
            memo[id(tensor)] = nn.Parameter(moved, trains) if is_parameter else moved
    return copy.deepcopy(module, memo).to(device)


def _first_block(model: nn.Module) -> str:
    """Return the first of the longest list of modules; the model itself where there is none."""
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)
    ]
    if not lists:
        return ""
    _, longest = max(lists, key=lambda each: each[0])
    return f"{longest}.0".removeprefix(".")


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _as_input(value: Any) -> Any:
    """Return a leaf: what reaches a block in training has a gradient, whatever was captured."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _tensors(value: Any) -> Sequence[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, Tensor) else None, value)
    return found


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)
