"""What to change, in which order, and what it changes.

Rank: what costs nothing first, what slows training next, what changes its result last. A gain is
given only where the figures of the message bound it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .cause import Cause
from .parse import Finding
from .templates import DEVICE_BACKENDS, SUSPICION


class Fix(NamedTuple):
    """One thing to change.

    Attributes
    ----------
    key : str
        Stable name, for programs.
    title, how : str
        What to change, and the command or code that does it.
    gain_bytes : int or None
        The most it can free, where the message bounds it; None where it is unknown.
    changes_result : bool
        True where training no longer computes the same numbers (beyond rounding).
    """

    key: str
    title: str
    how: str
    gain_bytes: int | None = None
    changes_result: bool = False


# key: (title, how, changes the result of training)
CATALOGUE: dict[str, tuple[str, str, bool]] = {
    "expandable_segments": (
        "Let cached segments grow instead of splitting them",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, before torch is "
        "imported (2.9 ignores the name PYTORCH_ALLOC_CONF for this setting).",
        False,
    ),
    "no_expandable_segments": (
        "Switch expandable segments off",
        "Remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF: WSL2 and "
        "Jetson do not support it.",
        False,
    ),
    "plain_allocator": (
        "Use one allocator setting at a time",
        "Drop max_split_size_mb and garbage_collection_threshold where expandable_segments is on.",
        False,
    ),
    "stop_others": (
        "Free the card of other processes, or use another card",
        "nvidia-smi (rocm-smi, xpu-smi) lists them; CUDA_VISIBLE_DEVICES picks a card. With "
        "several ranks check that each one uses its own device.",
        False,
    ),
    "raise_cap": (
        "Raise the cap",
        "torch.cuda.set_per_process_memory_fraction(1.0), or the option of your trainer that "
        "calls it; or per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF.",
        False,
    ),
    "offload_weights": (
        "Keep the weights in host memory and stream them",
        "oracle_offload.attach(model, 'cuda'): the results stay bit-identical.",
        False,
    ),
    "checkpointing": (
        "Recompute activations in backward",
        "model.gradient_checkpointing_enable(), or torch.utils.checkpoint with "
        "use_reentrant=False; costs about a third more compute.",
        False,
    ),
    "accumulate": (
        "Split the batch and accumulate gradients",
        "Halve the batch, double gradient_accumulation_steps: the same gradient up to rounding "
        "(batch normalisation sees the smaller batch).",
        False,
    ),
    "paged_optimizer": (
        "Page the optimizer's states to host memory",
        "bitsandbytes.optim.PagedAdamW instead of AdamW.",
        False,
    ),
    "chunk_attention": (
        "Avoid the full attention matrix",
        "torch.nn.functional.scaled_dot_product_attention (or flash attention) instead of an "
        "explicit softmax(QK^T).",
        False,
    ),
    "eight_bit_optimizer": (
        "Keep the optimizer's states in 8 bits",
        "bitsandbytes.optim.AdamW8bit: a quarter of AdamW's states.",
        True,
    ),
    "lower_precision": ("Train in bf16", "torch.autocast('cuda', torch.bfloat16).", True),
    "adapter": (
        "Train an adapter instead of all weights",
        "LoRA through peft: gradients and optimizer states of the base disappear.",
        True,
    ),
    "smaller_batch": ("Make the batch smaller", "Lower the batch size.", True),
    "shorter_input": (
        "Shorten the longest input",
        "Cap tokens, frames or resolution of one sample.",
        True,
    ),
    "token_budget": (
        "Form batches by total length",
        "A sampler with a token budget keeps every batch equally large.",
        True,
    ),
    "longest_first": (
        "Run the longest batch first",
        "One step with the longest batch before training shows at once whether it fits.",
        False,
    ),
    "no_grad": (
        "Evaluate without gradients and let results go",
        "torch.inference_mode() around evaluation, predictions moved to the CPU batch by batch "
        "(transformers: eval_accumulation_steps), a smaller evaluation batch.",
        False,
    ),
    "zero_grad": (
        "Free gradients before evaluation",
        "optimizer.zero_grad(set_to_none=True) before it starts.",
        False,
    ),
    "release": (
        "Stop keeping tensors from step to step",
        "loss.item() instead of loss in sums and lists; .detach().cpu() for what is kept; look for "
        "lists that grow and hooks that are added every step.",
        False,
    ),
    "snapshot": (
        "Record what is held",
        "torch.cuda.memory._record_memory_history(), then _dump_snapshot() at two steps.",
        False,
    ),
    "probe_steps": (
        "Measure the peak after two full steps",
        "Optimizer states exist from the first optimizer step on: the second step is the peak.",
        False,
    ),
    "driver_reset": (
        "Start from a fresh process and driver",
        "Restart the process; check the MIG slice or the GPU share of the container; update the "
        "driver. On WSL2 look at .wslconfig and switch expandable segments off.",
        False,
    ),
    "no_sysmem_fallback": (
        "Forbid the driver to spill",
        "NVIDIA control panel: CUDA - Sysmem Fallback Policy, Prefer No Sysmem Fallback. It then "
        "fails early instead of crawling.",
        False,
    ),
    "mps_watermark": (
        "Lift the high watermark",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0: macOS may then swap or freeze.",
        False,
    ),
    "prove_kill": (
        "Look for the proof of a kill",
        "dmesg -T | grep -i 'killed process'; oom_kill in memory.events of the control group. "
        "Without it someone else may have sent the signal.",
        False,
    ),
    "fewer_workers": (
        "Use fewer data workers",
        "Lower num_workers and prefetch_factor; each worker holds its own copy of what it touches.",
        False,
    ),
    "lazy_load": (
        "Load weights without a second copy",
        "safetensors and low_cpu_mem_usage=True; one rank after the other.",
        False,
    ),
    "more_ram": (
        "Give the host more memory",
        "Close other programs, add RAM or swap (Windows: a larger page file, managed by the "
        "system).",
        False,
    ),
    "raise_limit": (
        "Raise the limit",
        "Slurm --mem, docker run --memory, resources.limits.memory in Kubernetes, ulimit -v in a "
        "shell; page-locked memory and /dev/shm count towards it.",
        False,
    ),
    "raise_shm": (
        "Make /dev/shm larger",
        "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium: Memory on "
        "/dev/shm; else mount -o remount,size=16G /dev/shm.",
        False,
    ),
    "shm_strategy": (
        "Share through files rather than descriptors",
        "torch.multiprocessing.set_sharing_strategy('file_system') where the count of mappings "
        "is the limit (vm.max_map_count).",
        False,
    ),
    "raise_memlock": (
        "Raise the limit on locked memory",
        "ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a unit. "
        "WSL2 and Windows lock only part of RAM whatever the limit.",
        False,
    ),
    "pin_less": (
        "Lock less host memory",
        "pin_memory=False in the DataLoader, or smaller pinned buffers.",
        False,
    ),
    "check_size": (
        "Find the size that is wrong",
        "Print the shapes before the failing line: a swapped dimension, a broadcast outer product, "
        "an overflowed or corrupt length.",
        False,
    ),
    "smaller_tensor": (
        "Never have all of it in memory",
        "Compute it in parts, keep it in a file (numpy.memmap, torch.from_file), or in fewer bytes "
        "an element.",
        False,
    ),
    "first_error": (
        "Run once with CUDA_LAUNCH_BLOCKING=1",
        "The failing call is then the one in the traceback.",
        False,
    ),
}

_FULL = (
    "offload_weights", "checkpointing", "accumulate", "paged_optimizer", "mps_watermark",
    "eight_bit_optimizer", "lower_precision", "adapter", "smaller_batch", "shorter_input",
)  # fmt: skip
_HOST = ("fewer_workers", "lazy_load", "more_ram")

PLANS: dict[str, tuple[str, ...]] = {
    "too_big": _FULL,
    "fragmentation": ("expandable_segments", "accumulate", "checkpointing", "token_budget"),
    "other_process": ("stop_others", "offload_weights", "checkpointing", "accumulate"),
    "leak": ("release", "snapshot", "no_grad"),
    "host_memory": ("prove_kill", *_HOST),
    "one_tensor": ("check_size", "smaller_tensor", "more_ram"),
    "memory_limit": ("raise_limit", "fewer_workers", "lazy_load", "pin_less"),
    "shared_memory": ("raise_shm", "fewer_workers", "shm_strategy"),
    "locked_memory": ("raise_memlock", "pin_less"),
    "allocator_setting": ("no_expandable_segments", "plain_allocator", "driver_reset"),
    "device_cap": ("raise_cap", "offload_weights", "checkpointing", "accumulate"),
    "driver_refusal": ("driver_reset", "no_expandable_segments", "stop_others"),
    "spilled": ("no_sysmem_fallback", *_FULL),
    "bad_size": ("check_size",),
    "first_backward": ("checkpointing", "accumulate", "offload_weights", "chunk_attention",
                       "lower_precision", "smaller_batch"),
    "optimizer_state": ("paged_optimizer", "offload_weights", "eight_bit_optimizer", "adapter"),
    "second_step": ("probe_steps", "paged_optimizer", "checkpointing", "accumulate",
                    "offload_weights", "eight_bit_optimizer", "smaller_batch"),
    "evaluation": ("no_grad", "zero_grad", "offload_weights", "smaller_batch"),
    "longest_batch": ("longest_first", "checkpointing", "token_budget", "shorter_input"),
    "unknown": ("first_error", "stop_others", *_FULL),
}  # fmt: skip


def plan(finding: Finding, causes: list[Cause], *, expandable: bool | None = None) -> list[Fix]:
    """Return the fixes for a message, best first, without those that cannot help there.

    Parameters
    ----------
    finding : Finding
        The message.
    causes : list of Cause
        What `cause.rank` returned; fixes of the first lead, the others' follow.
    expandable : bool, optional
        True where expandable segments are known to be on: they are not advised again.
    """
    keys: list[str] = []
    if causes[0].name == "too_big" and _is_giant(finding):
        keys += ["chunk_attention", "check_size"]  # one tensor: what else is held hardly matters
    for cause in causes[:3]:
        for key in PLANS[cause.name]:
            if key not in keys and _applies(key, finding, causes[0], expandable):
                keys.append(key)
    gains = _gains(finding, causes)
    fixes = [Fix(key, *CATALOGUE[key][:2], gains.get(key), CATALOGUE[key][2]) for key in keys]
    # What changes the result comes last, whatever its cause; the order is otherwise kept.
    return sorted(fixes, key=lambda fix: fix.changes_result)


def _is_giant(finding: Finding) -> bool:
    """Return whether a single allocation asks for more than half the card."""
    asked, total = finding.value("requested"), finding.value("total")
    if finding.template.name == "mps-buffer":
        return True
    return asked is not None and total is not None and 2 * asked > total


def _applies(key: str, finding: Finding, first: Cause, expandable: bool | None) -> bool:
    backend = finding.backend
    if key == "expandable_segments":
        return backend in ("cuda", "rocm") and not expandable
    if key == "no_expandable_segments":
        return backend == "cuda" and expandable is not False
    if key in ("first_error", "offload_weights", "eight_bit_optimizer", "paged_optimizer"):
        return backend in ("cuda", "rocm", None)
    if key == "prove_kill":
        return finding.template.strength == SUSPICION
    if key == "mps_watermark":
        return finding.template.name == "mps-allocator"
    if key == "stop_others":
        return backend in DEVICE_BACKENDS
    return key != "raise_shm" or first.name == "shared_memory"


def _gains(finding: Finding, causes: list[Cause]) -> Mapping[str, int]:
    """Bound what a fix can free, from the figures of the message alone."""
    gains: dict[str, int] = {}
    unused, others = finding.value("unallocated"), finding.value("other_processes")
    total, cap, free = (finding.value(name) for name in ("total", "cap", "free"))
    if unused is not None and causes[0].name == "fragmentation":
        gains["expandable_segments"] = unused
    if others is not None:
        gains["stop_others"] = others
    if cap is not None and total is not None and total > cap:
        gains["raise_cap"] = min(total - cap, free) if free is not None else total - cap
    return gains
