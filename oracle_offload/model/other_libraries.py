"""Code of other libraries that takes a model to be on one device: its tensors are brought together.

For this process, from the first attach on. An average of trained weights is moved where these are,
at each update: its owner made it before attach, or moved it. A merge of adapters into managed
weights computes on the host, where it writes. Where adapters are taken off an attached model with
all that was attached, it is detached first: the rest would have no manager, half of it on the host.
FSDP, which puts shards in the place of Parameters, is refused for what is attached. DDP ignores
what ranks share.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.engines import before_frozen_write, open_states
from ..errors import OffloadError
from ..layers.managed import HANDLE, is_managed
from .answers import MANAGER
from .attachment import Attachment
from .residents import move_residents

logger = logging.getLogger("oracle_offload")

# What updates an average of given parameters, by its module: the class and the method.
_AVERAGES = {
    "diffusers.training_utils": ("EMAModel", "step"),
    "torch_ema.ema": ("ExponentialMovingAverage", "update"),
    "toolkit.ema": ("ExponentialMovingAverage", "update"),
}
# Where `fully_shard` looks for what it is to shard, before it changes anything.
_SHARDS = (
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fully_shard",
)
_TUNERS = "peft.tuners.tuners_utils"
_OF_PLAIN_LAYERS = (
    "peft.tuners.glora.model",
    "GloraModel",
)  # takes layers of torch's own class alone
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # names, of the module that DDP wraps
_HOST = torch.device("cpu")
_done: set[Any] = set()  # functions that replace a library's
_step_hooks: list[Any] = []


def bring_together() -> None:
    """Do so for those libraries that are imported; for averages, also before each step to come."""
    bring_averages()
    bring_merges()
    refuse_shards()
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(lambda *step: bring_averages()))


def bring_averages() -> None:
    """Let averages be brought to their weights."""
    for name, (kind, method) in _AVERAGES.items():
        found = getattr(sys.modules.get(name), kind, None)
        if found is not None:
            _stand_before(found, method, _average)


def bring_merges() -> None:
    """Let merges compute on the host, of all kinds of adapters, and end as a whole."""
    tuners = sys.modules.get(_TUNERS)
    for name, methods, put in (
        ("BaseTunerLayer", ("merge", "unmerge"), _merge),
        ("BaseTuner", ("_unload_and_optionally_merge",), _unload),
    ):
        pending = [getattr(tuners, name, None)]
        while pending:
            kind: Any = pending.pop()
            if kind is not None:
                pending += kind.__subclasses__()
                for method in methods:
                    _stand_before(kind, method, put)
    module, name = _OF_PLAIN_LAYERS
    if (found := getattr(sys.modules.get(module), name, None)) is not None:
        _stand_before(found, "_create_and_replace", _adapt)


def refuse_shards() -> None:
    """Let FSDP shard nothing that is attached."""
    for name in _SHARDS:
        module = sys.modules.get(name)
        if module is not None:
            _stand_before(module, "_get_managed_modules", _shard)
    whole = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if whole is not None:
        _stand_before(whole, "__init__", _wrap)
    parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    if parallel is not None:
        _stand_before(parallel, "__init__", _leave_shared)


def _shard(look: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(roots: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_attached(roots)
        return look(roots, *args, **kwargs)

    return refuse


def _wrap(begin: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _refuse_attached([module])
        return begin(wrapper, module, *args, **kwargs)

    return refuse


def _leave_shared(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Let DDP ignore what ranks share: its first broadcast would write to the shared memory."""

    def leave(parallel: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__
        told = own.get(_IGNORED)
        shared = [
            f"{name}.{key}" if name else key
            for name, part in module.named_modules(remove_duplicate=False)
            if (leaf := vars(part).get(HANDLE)) is not None
            for key, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None and leaf.attachment.is_shared(tensor)
        ]
        if not shared:
            return begin(parallel, module, *args, **kwargs)
        own[_IGNORED] = [*(told or ()), *shared]
        try:
            return begin(parallel, module, *args, **kwargs)
        finally:
            if told is None:
                del own[_IGNORED]
            else:
                own[_IGNORED] = told

    return leave


def _refuse_attached(roots: Any) -> None:
    parts = {name: part for root in roots for name, part in root.named_modules()}
    managed = [name or type(part).__name__ for name, part in parts.items() if is_managed(part)]
    if managed:
        raise OffloadError(
            f"FSDP shards Parameters, and those of {len(managed)} layers ('{managed[0]}' is the "
            "first) are attached, whose weights come from the host: either the one or the other. "
            "For several GPUs leave FSDP away: attach(..., share='node') keeps one host copy of "
            "frozen weights, and DDP trains the adapters. For FSDP, detach first "
            "(MemoryManager.detach)."
        )


def _stand_before(kind: Any, method: str, put: Callable[[Any], Any]) -> None:
    original = vars(kind).get(method)
    if original is not None and original not in _done:
        stands = functools.wraps(original)(put(original))
        _done.add(stands)
        setattr(kind, method, stands)


def _average(update: Callable[..., Any]) -> Callable[..., Any]:
    def bring(average: Any, parameters: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        given = None if parameters is None else list(parameters)
        # None: those that it was made of.
        known = [kept() for kept in average._params_refs] if given is None else given
        if len(known) == len(average.shadow_params):
            average.shadow_params = [
                shadow if parameter is None else shadow.to(parameter.device)
                for shadow, parameter in zip(average.shadow_params, known, strict=True)
            ]
        return update(average, given, *args, **kwargs)

    return bring


def _merge(merge: Callable[..., Any]) -> Callable[..., Any]:
    def bring(adapter: Any, *args: Any, **kwargs: Any) -> Any:
        base = adapter.get_base_layer()
        if not is_managed(base):
            return merge(adapter, *args, **kwargs)
        homes = dict(_homes(adapter, base))
        move_residents(homes, _HOST)
        weights = list(base.parameters())
        try:
            # What a merge makes, a scale say, is made where the weights are.
            with vars(base)[HANDLE].attachment.merging(weights), _HOST:
                before_frozen_write(weights)
                try:
                    return merge(adapter, *args, **kwargs)
                finally:
                    before_frozen_write(weights)  # a merge may have called the layer
        finally:
            for module, home in homes.items():
                move_residents([module], home)

    return bring


def _homes(adapter: nn.Module, base: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the parts of an adapter that are not on the host, each with its device."""
    left_out = set(base.modules())
    for module in adapter.modules():
        if module not in left_out:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.device != _HOST:
                    yield module, tensor.device
                    break


def _unload(unload: Callable[..., Any]) -> Callable[..., Any]:
    def end_first(tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for listener in [each for state in open_states() for each in state.listeners]:
            root = listener.module() if isinstance(listener, Attachment) else None
            if root is not None and (root is tuner or root._modules.get("base_model") is tuner):
                vars(root)[MANAGER].detach()
                logger.warning(
                    "%s is detached: its adapters are taken off, and it with them. Attach what is "
                    "left, or attach the model itself and put adapters on it then.",
                    type(root).__name__,
                )
        return unload(tuner, *args, **kwargs)

    return end_first


def _adapt(adapt: Callable[..., Any]) -> Callable[..., Any]:
    def explain(
        tuner: Any, config: Any, name: str, target: nn.Module, *rest: Any, **more: Any
    ) -> Any:
        try:
            return adapt(tuner, config, name, target, *rest, **more)
        except ValueError as error:
            if not is_managed(getattr(target, "get_base_layer", lambda: target)()):
                raise
            raise OffloadError(
                f"{type(tuner).__name__} adapts layers of torch's own class alone, and those of an "
                "attached model are of a derived one: add the adapter before attach."
            ) from error

    return explain
