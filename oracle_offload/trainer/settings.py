"""What `train-lora` is told: flags, a YAML file, or both; a flag wins over the file."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..recipes import OPTIMIZERS


class SettingsError(ValueError):
    """A setting makes no sense; the message has its value, and what to do."""


def _option(
    default: Any, group: str, help: str, *, metavar: str | None = None, decides: bool = False
) -> Any:
    """Return a field; `decides` says that a resumed run must have the same."""
    about = {"group": group, "help": help, "metavar": metavar, "decides": decides}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """All settings of a training; each is a flag of the same name, and a key of the YAML file."""

    model: str = _option(
        "", "model and data", "folder of a transformers model or a diffusers pipeline, or the "
        "name of one in the local hub cache", metavar="PATH", decides=True,
    )  # fmt: skip
    dataset_file: str = _option(
        "", "model and data", 'JSONL, one {"text": ...} or {"image": ..., "text": ...} a line; or '
        "a folder of .txt files, or of images with .txt captions beside them", metavar="PATH",
        decides=True,
    )  # fmt: skip
    eval_file: str = _option(
        "", "model and data", "data of the same kind to evaluate on", metavar="PATH"
    )
    output: str = _option("lora-run", "model and data", "where everything goes", metavar="FOLDER")
    max_length: int = _option(
        1024, "model and data", "most tokens of a text; what is longer is cut off", decides=True
    )
    resolution: int = _option(
        0, "model and data", "pixels of a side; 0: what the model was made for", decides=True
    )
    steps: int = _option(100, "how long", "optimizer steps")
    duration: str = _option("", "how long", "end after this time: 90s, 30m or 2h", metavar="TIME")
    save_every: int = _option(50, "how long", "steps between checkpoints; 0: only at the end")
    resume: bool = _option(False, "how long", "go on from the checkpoint in the output folder")
    seed: int = _option(0, "training", "decides order, noise and the adapter's start", decides=True)
    learning_rate: float = _option(1e-4, "training", "of all parameters", decides=True)
    rank: int = _option(8, "training", "of the adapters", decides=True)
    alpha: float = _option(8.0, "training", "scale of the adapters, over the rank", decides=True)
    target_modules: str = _option(
        "", "training", "comma-separated ends of names of the layers that get an adapter; by "
        "default all linear layers but the head, or the attention's", metavar="NAMES", decides=True,
    )  # fmt: skip
    batch_size: int = _option(1, "training", "samples at once", decides=True)
    gradient_accumulation_steps: int = _option(
        1, "training", "batches of a step, weighted by their tokens", decides=True
    )
    max_grad_norm: float = _option(1.0, "training", "clip gradients to it; 0: never", decides=True)
    bucket_pool: int = _option(
        50, "training", "batches that are sorted by length together; 0: none", decides=True
    )
    chunk_size: int = _option(
        0, "training", "tokens that are computed for at once; 0: the whole text", decides=True
    )
    window_size: int = _option(
        -1, "training", "tokens before a chunk that it sees; -1: all of them", decides=True
    )
    gradient_checkpointing: bool = _option(True, "memory and speed", "recompute in backward")
    amp: bool = _option(
        True, "memory and speed", "mixed precision: bfloat16, else float16 with a scaler",
        decides=True,
    )  # fmt: skip
    optimizer: str = _option("adamw", "memory and speed", ", ".join(OPTIMIZERS), decides=True)
    use_8bit_optimizer: bool = _option(
        False, "memory and speed", "the same as --optimizer adamw8bit", decides=True
    )
    device: str = _option("cuda", "memory and speed", "cuda, cuda:1, or cpu: the simulated one")
    resident: bool = _option(False, "memory and speed", "keep all weights on the device")
    offload_percent: float = _option(
        1.0, "memory and speed", "share of the weights without room on the device"
    )
    vram_budget: str = _option(
        "", "memory and speed", "what weights may take there: 8GiB, 0.5, auto", metavar="SIZE"
    )
    ram_budget: str = _option(
        "", "memory and speed", "what weights may take of the host: 20GiB, auto", metavar="SIZE"
    )
    log_file: str = _option(
        "", "what it tells", "JSONL, a line a step; by default metrics.jsonl in the output folder",
        metavar="FILE",
    )  # fmt: skip
    eval_every: int = _option(0, "what it tells", "steps between evaluations; 0: at the end alone")
    preview_every: int = _option(0, "what it tells", "steps between previews; 0: none")
    preview_prompt: str = _option("", "what it tells", "what previews are of", metavar="TEXT")
    preview_length: int = _option(
        32, "what it tells", "tokens of a previewed text, or steps of denoising an image"
    )

    def deciding(self) -> dict[str, Any]:
        """Return the settings that a resumed training must share with what it goes on from."""
        return {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.metadata["decides"]
        }

    @property
    def duration_s(self) -> float:
        """Most seconds to train; infinite where there is no limit."""
        return _seconds(self.duration) if self.duration else math.inf

    @property
    def log_path(self) -> Path:
        """The metrics file."""
        return Path(self.log_file) if self.log_file else Path(self.output) / "metrics.jsonl"

    @property
    def optimizer_name(self) -> str:
        """The optimizer that was asked for."""
        return "adamw8bit" if self.use_8bit_optimizer else self.optimizer

    def check(self) -> Settings:
        """Return these settings.

        Raises
        ------
        SettingsError
            One of them makes no sense.
        """
        for name in ("model", "dataset_file"):
            if not getattr(self, name):
                raise SettingsError(f"--{name.replace('_', '-')} is missing: it names what to take")
        least = {
            "steps": 1, "rank": 1, "batch_size": 1, "gradient_accumulation_steps": 1,
            "max_length": 2, "save_every": 0, "eval_every": 0, "preview_every": 0,
            "preview_length": 1, "bucket_pool": 0, "chunk_size": 0, "window_size": -1,
            "resolution": 0,
        }  # fmt: skip
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least {lowest}")
        for name in ("learning_rate", "alpha"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name}={getattr(self, name)} must be above 0")
        if self.optimizer not in OPTIMIZERS:
            raise SettingsError(f"optimizer={self.optimizer!r}: there are {', '.join(OPTIMIZERS)}")
        if self.use_8bit_optimizer and self.optimizer not in ("adamw", "adamw8bit"):
            raise SettingsError(
                f"use_8bit_optimizer and optimizer={self.optimizer!r} name two optimizers"
            )
        if self.window_size >= 0 and not self.chunk_size:
            raise SettingsError(f"window_size={self.window_size} needs a chunk_size")
        if self.preview_every and not self.preview_prompt:
            raise SettingsError("preview_every needs a preview_prompt")
        _ = self.duration_s
        return self


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise SettingsError(f"duration={text!r} is no time; write it like 90s, 30m or 2h")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; those that are not given are not in the namespace."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with the settings below; flags win over it"
    )
    groups: dict[str, Any] = {}
    for one in dataclasses.fields(Settings):
        about = one.metadata
        group = groups.get(about["group"]) or parser.add_argument_group(about["group"])
        groups[about["group"]] = group
        flag = f"--{one.name.replace('_', '-')}"
        told = about["help"].replace("%", "%%")
        if isinstance(one.default, bool):
            told += f" (default: {'yes' if one.default else 'no'})"
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=told)
            continue
        if one.default not in ("", 0, -1):
            told += f" (default: {one.default})"
        metavar = about["metavar"] or ("NAME" if isinstance(one.default, str) else "N")
        group.add_argument(
            flag, type=type(one.default), default=argparse.SUPPRESS, metavar=metavar, help=told
        )


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings of parsed flags, and of the file that they name.

    Raises
    ------
    SettingsError
        The file is no YAML of settings, or a setting makes no sense.
    OSError
        The file cannot be read.
    """
    known = {one.name: type(one.default) for one in dataclasses.fields(Settings)}
    told = {} if args.config is None else _read(args.config, known)
    told.update({name: value for name, value in vars(args).items() if name in known})
    return Settings(**told).check()


def _read(path: str, known: Mapping[str, type]) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    with open(path, encoding="utf-8") as file:
        try:
            document = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise SettingsError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise SettingsError(f"{path} holds no settings; write them as `steps: 100`, one a line")
    told: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise SettingsError(f"{path}: {key!r} is no setting; --help lists them")
        kind = known[name]
        if kind is bool and not isinstance(value, bool):
            raise SettingsError(f"{path}: {key}: {value!r} is neither true nor false")
        try:
            told[name] = kind(value)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{path}: {key}: {value!r} is no {kind.__name__}") from error
        # Neither cut off (steps: 1.5) nor spelled out (vram-budget: null, preview-prompt: no).
        if kind is not bool and (
            type(value) not in (str, int, float) or (kind is int and type(value) is float)
        ):
            raise SettingsError(f"{path}: {key}: {value!r} is no {kind.__name__}")
    return told
