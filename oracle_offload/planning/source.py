"""The model that is planned for, on the meta device: from a name, a class, files or a count.

Only headers of weight files are read, and a network is asked only where `fetch` allows it.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..disk.checkpoint import INDEX_SUFFIX, SUFFIX, find_weights, read_index, read_json, snapshot
from ..disk.empty import empty_weights
from ..disk.header import read_header
from ..disk.source import DTYPES as STORED_DTYPES
from ..errors import OffloadError
from ..host.cache import hub_cache
from ..model.selection import listed
from .estimated import Estimated
from .known import Known, known, similar

logger = logging.getLogger("oracle_offload.planning")

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBT])\s*", re.IGNORECASE)
_PARTS = ("transformer", "unet")  # of a pipeline: what is trained
_DEEPEST = 100  # a name of a tensor, in modules


@dataclass(frozen=True)
class Source:
    """A model to be planned for.

    Attributes
    ----------
    name : str
        Of its class, or of the file it comes from.
    module : nn.Module or None
        On the meta device; None where nothing but a number of parameters is known.
    parameters : int
        How many there are.
    notes : tuple of str
        What was taken for granted.
    runs : bool
        Whether the module's forward is the model's own, so that it can be measured.
    expected : Estimated
        What its weights take compressed.
    """

    name: str
    module: nn.Module | None
    parameters: int
    notes: tuple[str, ...] = ()
    runs: bool = True
    expected: Estimated = field(default_factory=Estimated)


def source_of(
    model: Any, config: Any = None, dtype: torch.dtype | None = None, *, fetch: bool = False
) -> Source:
    """Return the model that `plan` was given.

    Parameters
    ----------
    model : nn.Module, type, path, str or int
        See `oracle_offload.plan`.
    config : mapping, path or config object, optional
        Of a class.
    dtype : torch.dtype, optional
        Of floating-point weights; by default what the module or the files have, or bfloat16.
    fetch : bool
        Whether to ask the hub for the config of a repository.

    Raises
    ------
    ValueError
        Nothing that a model could be made of.
    OffloadError
        A file or class that does not hold what it should, or a hub that cannot be reached.
    """
    if fetch:
        fetch_config(_repository(model))
    if isinstance(model, nn.Module):
        copied = on_meta(model)
        found = _of_module(copied, type(model).__name__, dtype)
        return replace(found, expected=Estimated((copied, model)))
    if isinstance(model, type) and issubclass(model, nn.Module):
        dtype = dtype or torch.bfloat16
        return _of_module(_build(model, _config_dict(config), dtype), model.__name__, dtype)
    count = _count_of(model)
    if count is not None:
        note = "only the number of parameters is known: units, floor and activations are not"
        return Source(f"{count / 1e9:g} B parameters", None, count, (note,), runs=False)
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            f"plan() takes an nn.Module, a class with config=, a path, the name of a model or a "
            f"number of parameters, not {type(model).__name__}"
        )
    found_at = _found(_repository(model) if fetch else model)
    return _of_known(found_at, dtype) if isinstance(found_at, Known) else _of_path(found_at, dtype)


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors hold no memory; the module stays as it is."""
    return copy_with(module, lambda tensor: tensor.detach().to("meta"))


def copy_with(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module with what `make` returns in the place of each of its tensors."""
    memo: dict[int, Any] = {}
    kept = (value for inner in module.modules() for value in vars(inner).values())
    computed = [value for value in kept if isinstance(value, Tensor)]  # torch copies no such one
    for tensor in [*module.parameters(), *module.buffers(), *computed]:
        made = make(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    with torch.no_grad():  # TorchScript copies its own tensors, and would record that
        return copy.deepcopy(module, memo)


def _of_module(
    module: nn.Module,
    name: str,
    dtype: torch.dtype | None,
    notes: Iterable[str] = (),
    *,
    runs: bool = True,
) -> Source:
    if dtype is not None:
        cast(module, dtype)
    count = sum(parameter.numel() for parameter in module.parameters())
    if not count:
        raise ValueError(f"{name} has no parameters: there is nothing to plan")
    return Source(name, module, count, tuple(notes), runs)


def switch_of(module: nn.Module | None) -> str:
    """Return the method by which a class turns checkpointing on; empty where it has none."""
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    return next((name for name in names if hasattr(module, name)), "")


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors, but for what the class keeps in float32 as its loader does."""
    kept = _kept_in_float32(module, dtype)
    for name, child in module.named_modules():
        for key, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is None or not tensor.is_floating_point() or tensor.element_size() < 2:
                continue
            if key in child._non_persistent_buffers_set:
                continue  # a loader leaves alone what its files do not hold
            full = f"{name}.{key}".lstrip(".").split(".")
            wanted = torch.float32 if kept & set(full) else dtype
            if tensor.dtype is not wanted:
                tensor.data = tensor.data.to(wanted)


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    strict = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    of_transformers = any(k.__module__.startswith("transformers.") for k in type(module).__mro__)
    return strict | (kept if dtype is torch.float16 or not of_transformers else set())


def _count_of(model: Any) -> int | None:
    if isinstance(model, int | float) and not isinstance(model, bool):
        count = float(model)
    elif isinstance(model, str) and (match := _COUNT.fullmatch(model)):
        count = float(match[1]) * 1000 ** ("KMBT".index(match[2].upper()) + 1)
    else:
        return None
    if not 1 <= count < 1e18:
        raise ValueError(f"model={model!r}: a number of parameters is above zero, and below 1e18")
    return int(count)


# ---- classes and configs ----


def _config_dict(config: Any) -> Any:
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        return _json(path / "config.json" if path.is_dir() else path)
    return {} if config is None else config


def _build(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a module of this class on the meta device, as its loader makes it."""
    values = config
    config_class = getattr(kind, "config_class", None)
    default = torch.get_default_dtype()
    try:
        if isinstance(config, Mapping):
            values = dict(config)
            if config_class is not None:
                values = config_class.from_dict(values)
        if dtype.itemsize > 1:
            torch.set_default_dtype(dtype)
        logger.info("building %s", kind.__name__)
        with empty_weights():
            try:
                with torch.device("meta"):  # tables, too: shapes are all that counts
                    built = _constructed(kind, values)
            except Exception:  # it asks for values, or is wrong otherwise
                built = _constructed(kind, values)
    except Exception as error:  # whatever a class's own code does with a config of anyone's
        said = str(error) or type(error).__name__
        raise OffloadError(f"{kind.__name__} cannot be made of this config: {said}") from error
    finally:
        torch.set_default_dtype(default)
    return on_meta(built)  # its buffers, too


def _constructed(kind: Any, values: Any) -> nn.Module:
    """Return a module made as the class takes its config."""
    found: nn.Module
    if getattr(kind, "config_class", None) is None and isinstance(values, Mapping):
        found = kind.from_config(values) if hasattr(kind, "from_config") else kind(**values)
    else:
        found = kind(values)
    return found


def _class_of(config: Mapping[str, Any], path: Path | str) -> type[nn.Module]:
    """Return the class that a config file is of."""
    if name := config.get("_class_name"):
        library, names = "diffusers", [name]
    elif names := config.get("architectures", []):
        library = "transformers"
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise OffloadError(
            f"{path} names no class ('_class_name' of diffusers, 'architectures' of transformers);"
            " give the class: plan(Class, config=...)"
        )
    module: Any
    logger.info("importing %s", library)
    try:
        if library == "diffusers":
            import diffusers as module
        else:
            import transformers as module
    except ImportError as error:
        raise OffloadError(f"{path} is a config of {library}, which is not installed") from error
    found = getattr(module, names[0], None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise OffloadError(
            f"{path} is of class {names[0]!r}, which {library} {module.__version__} does not have;"
            " give the class: plan(Class, config=...)"
        )
    return found


# ---- files ----


def _found(model: str | os.PathLike[str]) -> Path | Known:
    """Return what is meant: a path, a repository in the local hub cache, or a known model."""
    path = Path(model).expanduser()
    if path.exists():
        return snapshot(path)
    name = str(model)
    is_repository = isinstance(model, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    if is_repository and cached.is_dir():
        return snapshot(cached)
    found = known(name) if isinstance(model, str) else None
    if found is not None:
        return found
    close = f"; known by name are {listed(similar(name))}" if similar(name) else ""
    if is_repository:
        raise ValueError(
            f"{model!r} is neither a path nor in the local hub cache {hub_cache()}; nothing is "
            f"downloaded by default: fetch=True (--fetch) asks the hub for its config{close}"
        )
    raise ValueError(
        f"{name!r} is no file, no folder, no model that is known by name (docs/plan.md lists them) "
        f"and no number of parameters like '12B'{close}"
    )


def _repository(model: Any) -> str:
    """Return the name by which the hub has a model."""
    found = known(model) if isinstance(model, str) else None
    if found is not None:
        return found.repository
    if isinstance(model, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    raise ValueError(
        f"fetch=True (--fetch) takes the name of a repository, 'owner/name': {model!r}"
    )


def fetch_config(repository: str) -> None:
    """Ask the hub for the config of a model, which its cache keeps; of a pipeline, of its part.

    Parameters
    ----------
    repository : str
        ``"owner/name"``.

    Raises
    ------
    OffloadError
        Nothing came: the hub cannot be reached, has no such repository, or asks who you are.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise OffloadError("--fetch needs huggingface_hub, which is not installed") from error
    logger.info("asking the hub for the config of %s", repository)

    def has(name: str) -> bool:
        try:
            hub.hf_hub_download(repository, name)
        except LocalEntryNotFoundError:  # which is how it says that nothing answers
            raise
        except EntryNotFoundError:
            return False
        return True

    try:
        is_pipeline = has("model_index.json")
        names = [f"{part}/config.json" for part in _PARTS] if is_pipeline else ["config.json"]
        if any(has(name) for name in names):
            return
    except Exception as error:  # whatever the hub's library makes of a network
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OffloadError(
            f"the hub has not given the config of {repository}: {said} Without a network give a "
            "folder, a model that is known by name, or a number of parameters."
        ) from error
    raise OffloadError(f"{repository} has none of {', '.join(names)} on the hub")


def _of_known(model: Known, dtype: torch.dtype | None) -> Source:
    """Return a model that is known by name: of its class, or of its size where that is missing."""
    notes = [f"{model.name} is {model.kind} as this release knows it: {model.source}"]
    if dtype is None:
        dtype = torch.bfloat16
        notes.append("weights are taken for bfloat16; dtype= says otherwise")
    try:
        kind = _class_of(model.config, model.name)
    except OffloadError as error:
        notes.append(f"{error}: units, floor and activations are unknown")
        return Source(model.name, None, model.parameters, tuple(notes), runs=False)
    return _of_module(_build(kind, model.config, dtype), model.name, dtype, notes)


def _of_path(path: Path, dtype: torch.dtype | None) -> Source:
    if path.is_dir():
        for part in _PARTS:
            if (path / "model_index.json").is_file() and (path / part / "config.json").is_file():
                path = path / part
        config, files = path / "config.json", _weight_files(path)
        if config.is_file():
            return _of_config(config, files, dtype)
        if not files:
            raise OffloadError(f"{path} holds neither config.json nor safetensors files")
        return _of_headers(path.name, files, dtype)
    if path.name.endswith(INDEX_SUFFIX):
        return _beside(path, _indexed(path), dtype)
    if path.suffix == ".safetensors":
        return _beside(path, [path], dtype)
    if path.suffix == ".json":
        return _of_config(path, [], dtype)
    raise ValueError(f"{path} is neither a safetensors file, an index, a config nor a folder")


def _beside(path: Path, files: list[Path], dtype: torch.dtype | None) -> Source:
    """Return the model of files; the config next to them, where there is one, names its class."""
    config = path.with_name("config.json")
    if config.is_file():
        return _of_config(config, files, dtype)
    return _of_headers(path.name, files, dtype)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a folder means, which may have none."""
    if not any(entry.name.endswith((SUFFIX, INDEX_SUFFIX)) for entry in folder.iterdir()):
        return []
    found = find_weights(folder)
    return _indexed(found) if found.name.endswith(INDEX_SUFFIX) else [found]


def _indexed(index: Path) -> list[Path]:
    return [index.with_name(name) for name in sorted(set(read_index(index).values()))]


def _of_config(path: Path, files: list[Path], dtype: torch.dtype | None) -> Source:
    config = _json(path)
    kind = _class_of(config, path)
    if config.get("quantization_config"):
        raise OffloadError(
            f"{path} is of a model that is quantised already: its library makes other layers for "
            "it; plan the model that it was made of, with quantize="
        )
    notes = []
    stored = Counter[torch.dtype]()
    for file in files if dtype is None else []:
        for kept, shape in _read_tensors(file).values() if file.is_file() else ():
            if kept.is_floating_point:
                stored[kept] += math.prod(shape)
    if stored:
        ((dtype, _),) = stored.most_common(1)
        notes.append(f"weights are {_short(dtype)}, as their files have them")
    elif dtype is None:
        said = config.get("dtype") or config.get("torch_dtype")
        dtype = DTYPES.get(str(said), torch.bfloat16)
        notes.append(f"weights are taken for {_short(dtype)}; dtype= says otherwise")
    return _of_module(_build(kind, config, dtype), kind.__name__, dtype, notes)


def _read_tensors(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a safetensors file, of which the header is read."""
    with open(path, "rb") as file:
        stored = read_header(file, str(path))
    for name, row in stored.items():
        if row.dtype not in STORED_DTYPES:
            raise OffloadError(
                f"{path}: '{name}' is {row.dtype}, which torch {torch.__version__} does not have"
            )
    return {name: (STORED_DTYPES[row.dtype], row.shape) for name, row in stored.items()}


class _Stored(nn.Module):
    """A module of which nothing is known but its tensors."""

    def forward(self) -> None:
        """Nothing is known of it."""


def _of_headers(name: str, files: list[Path], dtype: torch.dtype | None) -> Source:
    """Return modules as the names of tensors have them: what the tensors are for is guessed."""
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise OffloadError(f"{listed(missing)}: named by the index, but not there")
    tensors = {key: row for file in files for key, row in _read_tensors(file).items()}
    owners: dict[str, dict[str, Tensor]] = {}
    for full, (kept, shape) in tensors.items():
        owner, _, key = full.rpartition(".")
        if owner.count(".") >= _DEEPEST:
            raise OffloadError(f"{name}: '{full[:100]}...' is no name of a tensor in any model")
        owners.setdefault(owner, {})[key] = torch.empty(shape, dtype=kept, device="meta")
    root = _Stored()
    for path, own in sorted(owners.items()):  # a module before those inside it
        _place(root, path, own)
    note = "no config.json tells the classes: matrices are taken for Linear layers"
    return _of_module(root, name, dtype, [note], runs=False)


def _place(root: nn.Module, path: str, own: dict[str, Tensor]) -> None:
    # Anything may be a name in a file, so nothing is asked that a module's own methods refuse.
    steps = path.split(".") if path else []
    parent: nn.Module = root
    for number, step in enumerate(steps[:-1]):
        child = parent._modules.get(step)
        if child is None:
            # What has numbers below it is a list of blocks.
            child = nn.ModuleDict() if steps[number + 1].isdigit() else _Stored()
            parent._modules[step] = child
        parent = child
    module = root
    if steps:
        module = parent._modules[steps[-1]] = _leaf(steps[-1], own)
    for key, tensor in own.items():
        module._parameters[key] = nn.Parameter(tensor, requires_grad=False)


def _leaf(name: str, own: dict[str, Tensor]) -> nn.Module:
    weight = own.get("weight")
    if weight is None or set(own) - {"weight", "bias"} or not weight.is_floating_point():
        return _Stored()
    shape = weight.shape
    if weight.dim() == 2 and "emb" in name and "bias" not in own:
        return nn.Embedding(shape[0], shape[1], device="meta")
    if weight.dim() == 2:
        return nn.Linear(shape[1], shape[0], "bias" in own, device="meta")
    if weight.dim() == 4:
        size = (int(shape[2]), int(shape[3]))
        return nn.Conv2d(shape[1], shape[0], size, bias="bias" in own, device="meta")
    return _Stored()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ValueError as error:
        raise OffloadError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OffloadError(f"{path} holds no JSON object")
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
