"""The known formats of quantised weights: how they are recognised, and what they need.

A format is recognised by the names of its classes, so that none of the libraries is imported here.
A weight of another class streams as well if it is made of other tensors and says of which.
Every other weight stays resident: its code may keep or rewrite tensors unseen by this library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.exemption import exempt
from .flatten import class_name, is_wrapper, value_at
from .swap import base_class


@dataclass(frozen=True)
class Format:
    """How the modules of one library keep and use quantised weights.

    Parameters
    ----------
    name : str
        For people.
    holders : frozenset of str
        Full names of classes whose objects hold tensors, tensor classes not counted.
    reads_input : bool
        Whether the gradient of the input depends on the input's values, which then are kept.
    settle : callable, optional
        What the library's forward changes on the module, given the input, before it computes.
    """

    name: str
    holders: frozenset[str] = frozenset()
    reads_input: bool = False
    settle: Callable[[Any, Tensor], None] | None = None


def format_of(module: nn.Module) -> Format | None:
    """Return the format of a module's weights; None where they are plain, or not known."""
    if module._modules or isinstance(module, torch.jit.ScriptModule):
        return None
    if _forwards_as(module, "toolkit.util.ostris_quant.OstrisLinear"):
        return _OSTRIS if module._buffers else None  # its weight is a property, computed
    own: dict[str, Tensor | None] = {**module._buffers, **module._parameters}
    weight = own.get("weight")
    if weight is None:
        return None
    for known in _FORMATS:
        found = known(module, weight)
        if found is not None:
            return found
    # torch's own are no weights of a library's (a DTensor is spread over several cards), and what
    # the rows above say no to stays resident.
    is_left = class_name(type(weight)).startswith(("torch.", "torchao.", "optimum.quanto."))
    return _MADE_OF_TENSORS if is_wrapper(weight) and not is_left else None


def holders_beside(module: nn.Module) -> frozenset[str]:
    """Return the classes of objects in which tensors are apart from the weights, if any can be.

    Of any module with a Parameter of bitsandbytes': an embedding, or a layer with a forward of its
    own, is of no known format, and keeps the same.
    """
    kinds = set(map(type, module._parameters.values())) - _PLAIN
    its_own = any(_is_of(base, "bitsandbytes") for kind in kinds for base in kind.__mro__)
    return _HOLDERS if its_own else frozenset()


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module keeps in objects of its kernel, by path.

    They are no Parameters and no buffers; the module's own forward computes with them.
    """
    paths = next((_HELD[n] for n in map(class_name, type(module).__mro__) if n in _HELD), ())
    found = {path: value_at(module, path) for path in paths}
    return {path: tensor for path, tensor in found.items() if type(tensor) is Tensor}


def unknown_format(module: nn.Module, parameter: Tensor) -> str:
    """Return what a quantised parameter of no known format is; empty for any other."""
    plain = type(parameter) in (nn.Parameter, Tensor)  # the latter in loaded TorchScript
    if plain and parameter.is_floating_point() and parameter.element_size() > 1:
        return ""
    if format_of(module) is not None:
        return ""
    what = f"{parameter.dtype}" if plain else class_name(type(parameter))
    return f"{what} in {class_name(base_class(module))}"


def _bitsandbytes_8bit(module: Any, weight: Any) -> Format | None:
    if not _forwards_as(module, "bitsandbytes.nn.modules.Linear8bitLt"):
        return None
    quantised = weight.dtype is torch.int8 and not module.state.has_fp16_weights
    return _BITSANDBYTES_8BIT if quantised else None


def _bitsandbytes_4bit(module: Any, weight: Any) -> Format | None:
    if not _forwards_as(module, "bitsandbytes.nn.modules.Linear4bit"):
        return None
    return None if getattr(weight, "quant_state", None) is None else _BITSANDBYTES_4BIT


def _settle_8bit(module: Any, x: Tensor) -> None:
    """The bias takes the input's dtype, and keeps it."""
    _cast_bias(module, x.dtype)


def _settle_4bit(module: Any, x: Tensor) -> None:
    """The first input decides the dtype of all products; the bias takes it, and keeps it."""
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    _cast_bias(module, module.compute_dtype or x.dtype)


def _cast_bias(module: Any, dtype: torch.dtype) -> None:
    bias = module._parameters.get("bias")
    if bias is not None and bias.dtype is not dtype:
        with exempt(), torch.no_grad():
            bias.data = bias.data.to(dtype)


def _gguf(module: Any, weight: Any) -> Format | None:
    if not _forwards_as(module, "diffusers.quantizers.gguf.utils.GGUFLinear"):
        return None
    return _GGUF if type(weight).__name__ == "GGUFParameter" else None


def _quanto(module: Any, weight: Any) -> Format | None:
    if not _is_of(base_class(module), "optimum.quanto") or not _is_of(
        type(weight), "optimum.quanto"
    ):
        return None
    return None if module.activation_qtype is not None or not is_wrapper(weight) else _QUANTO


def _torchao(module: Any, weight: Any) -> Format | None:
    if not is_wrapper(weight) or not _is_of(type(weight), "torchao"):
        return None
    if base_class(module).forward is not nn.Linear.forward:
        return None
    return _TORCHAO if _is_weight_only(weight) else _TORCHAO_DYNAMIC


def _fp8(module: Any, weight: Any) -> Format | None:
    if not _forwards_as(module, "transformers.integrations.finegrained_fp8.FP8Linear"):
        return None
    return _FP8 if weight.element_size() == 1 else None


def _nvfp4(module: Any, weight: Any) -> Format | None:
    if not _forwards_as(module, "transformers.integrations.nvfp4.NVFP4Linear"):
        return None
    return _NVFP4 if weight.dtype is torch.uint8 else None


def _comfy(module: Any, weight: Any) -> Format | None:
    """Weights named as in ComfyUI's files, for any class with a forward of its own."""
    own = {*module._parameters, *module._buffers}
    if not {"weight_scale", "comfy_quant"} <= own or weight.element_size() != 1:
        return None
    return None if base_class(module).forward is nn.Linear.forward else _COMFY


def _is_weight_only(weight: Any) -> bool:
    """Whether nothing is computed from the values of the input but the product."""
    if type(weight).__name__ == "AffineQuantizedTensor":
        return True
    meta = weight.__tensor_flatten__()[1]
    switches = ("act_quant_kwargs", "activation_quantization")
    return any(name in meta for name in switches) and not any(map(meta.get, switches))


def _forwards_as(module: nn.Module, name: str) -> bool:
    """Whether the module computes with the forward of the class of this name."""
    base = base_class(module)
    return any(class_name(kind) == name and base.forward is kind.forward for kind in base.__mro__)


def _is_of(kind: type, package: str) -> bool:
    return kind.__module__ == package or kind.__module__.startswith(f"{package}.")


_BITSANDBYTES_8BIT = Format(
    "bitsandbytes int8",
    frozenset({"bitsandbytes.autograd._functions.MatmulLtState"}),
    settle=_settle_8bit,
)
_BITSANDBYTES_4BIT = Format(
    "bitsandbytes 4-bit",
    frozenset({"bitsandbytes.functional.QuantState"}),
    settle=_settle_4bit,
)
_HOLDERS = _BITSANDBYTES_8BIT.holders | _BITSANDBYTES_4BIT.holders
_PLAIN: set[type] = {nn.Parameter, type(None)}
_GGUF = Format("GGUF")
_QUANTO = Format("optimum-quanto")
_OSTRIS = Format("AI-Toolkit's OstrisLinear", reads_input=True)
_TORCHAO = Format("torchao")
_TORCHAO_DYNAMIC = Format("torchao, dynamic activations", reads_input=True)
_FP8 = Format("FP8Linear")
_NVFP4 = Format("NVFP4Linear", reads_input=True)
_COMFY = Format("weight, weight_scale and comfy_quant", reads_input=True)
# A tensor that is made of others says of which: handles replace those, for any library's class.
_MADE_OF_TENSORS = Format("a class of tensors that are made of others", reads_input=True)
_FORMATS: tuple[Callable[[Any, Tensor], Format | None], ...] = (
    _bitsandbytes_8bit,
    _bitsandbytes_4bit,
    _gguf,
    _quanto,
    _torchao,
    _fp8,
    _nvfp4,
    _comfy,
)
# What the weights of an MXFP4 stack are once they are laid out for the kernel, and their scales.
_HELD = {
    "transformers.integrations.mxfp4.Mxfp4GptOssExperts": tuple(
        f"{stack}{where}.storage.data"
        for stack in ("gate_up_proj", "down_proj")
        for where in ("", "_precision_config.weight_scale")
    )
}
