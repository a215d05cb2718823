"""A configuration to paste: Python for this library, YAML for AI-Toolkit."""

from __future__ import annotations

from ..host.sizes import written_size
from .fit import RESIDENT, Fit
from .storage import Recipe

# AI-Toolkit's names of what is kept in the same bytes.
_QTYPES = {"int8": "int8", "fp8": "float8", "qfloat8": "qfloat8"}


def python(fit: Fit, recipe: Recipe, switch: str, *, follows_steps: bool, together: int = 1) -> str:
    """Return lines of Python that train `model` as planned; `switch` turns checkpointing on.

    With `follows_steps` the arena is what the steps leave of the device; so many micro-batches
    go `together`.
    """
    lines = [f"model.{switch}()"] if switch else []
    if recipe.quantize is not None:
        lines = [f"# first quantize the frozen Linear weights: {recipe.quantize}", *lines]
    if fit.verdict == RESIDENT:
        return "\n".join([*lines, 'model.to("cuda")', ""])
    together_bytes = fit.arena_bytes + fit.storage.kept_bytes + fit.storage.staging_bytes
    budget = "auto" if follows_steps else written_size(together_bytes)
    arguments = [f'vram_budget="{budget}"']
    if fit.ram_budget is not None:
        arguments.append(f'ram_budget="{written_size(fit.ram_budget)}"')
    if fit.disk_bytes:
        arguments.append("weights=folder, disk=True")
    if recipe.compress is not None:
        arguments.append(f'compress="{recipe.compress}"')
    lines.append("import oracle_offload")
    lines.append("")
    if recipe.train == "lora":
        lines.append("model.requires_grad_(False)")
    if fit.disk_bytes:
        lines.append(
            "# the model is made inside oracle_offload.empty_weights(), its files are in folder"
        )
    lines.append(f'manager = oracle_offload.attach(model, "cuda", {", ".join(arguments)})')
    if recipe.train == "lora":
        lines.append(f"# then the LoRA of rank {recipe.rank}, for example with peft")
    if recipe.train == "full":
        early = ", during_backward=True" if recipe.during_backward else ""
        lines.append("# then, with the optimizer of all weights:")
        lines.append(f"# oracle_offload.train.stream_optimizer(optimizer{early})")
    if together > 1:
        lines.append(f"# in each step, with its {together} micro-batches:")
        lines.append("# losses = oracle_offload.accumulate(lambda batch: ..., batches)")
    return "\n".join([*lines, ""])


def yaml(fit: Fit, recipe: Recipe, checkpointing: bool, batch: int, micro_batches: int = 1) -> str:
    """Return the part of an AI-Toolkit job that this plan decides, under its own keys."""
    percent = f"{fit.offload_percent:.2f}"
    streams = fit.verdict != RESIDENT
    lines = []
    if recipe.train == "lora":
        lines += [
            "network:",
            "  type: lora",
            f"  linear: {recipe.rank}",
            f"  linear_alpha: {recipe.rank}",
        ]
    lines += [
        "train:",
        f"  batch_size: {batch}",
        *([f"  gradient_accumulation: {micro_batches}"] if micro_batches > 1 else ()),
        f"  gradient_checkpointing: {_said(checkpointing)}",
        f"  optimizer: {recipe.optimizer.name}",
        "  dtype: bf16",
        "model:",
        f"  quantize: {_said(recipe.quantize is not None)}",
    ]
    if recipe.quantize is not None:
        kept = _QTYPES.get(recipe.quantize)
        lines.append(
            f"  qtype: {kept}" if kept else f"  qtype: uint4  # it has no {recipe.quantize}"
        )
    lines.append(f"  layer_offloading: {_said(streams)}")
    if streams:
        lines.append(f"  layer_offloading_transformer_percent: {percent}")
        if micro_batches > 1:
            lines.append("  layer_offloading_accumulate: true")
    return "\n".join([*lines, ""])


def _said(value: bool) -> str:
    return "true" if value else "false"
