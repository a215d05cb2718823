"""`plan`: what a training would keep, where it would be, and what else could be done."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..host import memory
from ..host.sizes import GIB, format_size, parse_size
from ..model.budget import Budget, budget_of
from ..observe.recording import Recording, read_recording
from . import report, verify
from .answer import Answer
from .cards import DISK_GBPS, HOSTS_GB, card_of, disk_of
from .codes import chosen
from .fit import Fit, Room, fit_step
from .ladder import ladder, shards
from .measure import Step
from .measure import measure as run_step
from .optimizers import optimizer_of
from .question import Question
from .sample import parse_sample
from .source import DTYPES, source_of
from .speed import speed_of
from .storage import QUANTISED, Recipe, Storage, storage_of

logger = logging.getLogger("oracle_offload.planning")

_STEPS_A_DAY = 86400 // 10  # of ten seconds
_WORTH_TELLING = 1.2  # times the sequence that leaving activations make room for


@dataclass(frozen=True)
class Plan(Answer):
    """The answer of `plan`; ``str()`` is text, a notebook shows a page.

    Attributes
    ----------
    question : Question
        What was asked, with every default filled in.
    storage : Storage
        Persistent bytes, and the units that `attach` would make.
    fit : Fit
        Where they would be.
    step : Step
        What a step takes: its activations, and the work of its operators.
    speed : Speed
        How long it takes.
    alternatives : list of Rung
        What else could be done, cheapest first.
    shards : list of Shard
        The shares of one of several cards under ZeRO, which is absent here.
    assumptions : tuple of str
        What was taken for granted.
    """

    def on(
        self,
        card: str | int | None = None,
        *,
        vram: int | float | str | None = None,
        ram: int | float | str | None = None,
        budget: Budget | None = None,
        disk_gbps: float | None = None,
        **rates: float | None,
    ) -> Plan:
        """Return the plan of the same training elsewhere; the step is not measured again.

        Parameters
        ----------
        card, vram, ram, budget, disk_gbps, **rates
            As in `plan`; what is not given is as there by default, not as it was here, but that
            weights stay compressed.
        """
        recipe, chosen = self.question.recipe, card_of(card, vram=vram, **rates)
        if budget is None:
            budget = Budget(compress=recipe.compress)
        disk = disk_of(disk_gbps)
        room = Room(chosen.memory_bytes, _ram(ram), self.question.room.margin, budget, disk)
        recipe = replace(recipe, compress=budget.compress)
        return answer(replace(self.question, recipe=recipe, card=chosen, room=room), self.step)

    def verify(self, recording: Any) -> verify.Verification:
        """Return what was measured and what was planned, row by row.

        Parameters
        ----------
        recording : Recording or path-like
            Of the planned training: what `oracle_offload.record` made, or the JSONL file of it.

        Returns
        -------
        Verification
            ``print()`` shows it; a row that cannot be compared says why.

        Raises
        ------
        ValueError
            The file is no recording.
        OSError
            The file cannot be read.
        """
        if not isinstance(recording, Recording):
            recording = read_recording(recording)
        return verify.verify(self, recording)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data with a ``"schema"``; sizes in bytes."""
        return report.as_dict(self)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return report.as_json(self)

    def to_text(self, *, width: int = 100, color: bool = False) -> str:
        """Return the plan for a terminal."""
        return report.as_text(self, width, color)

    def to_html(self) -> str:
        """Return one self-contained page without scripts."""
        return report.as_page(self)

    def _repr_html_(self) -> str:
        return report.as_fragment(self)

    def __str__(self) -> str:
        return self.to_text()


def plan(
    model: Any,
    *,
    config: Any = None,
    train: str = "lora",
    rank: int = 16,
    targets: str | Iterable[str] = "all-linear",
    optimizer: Any = "adamw",
    dtype: str | torch.dtype | None = None,
    adapter_dtype: str | torch.dtype = "fp32",
    master_dtype: str | torch.dtype | None = None,
    during_backward: bool = False,
    quantize: str | None = None,
    budget: Budget | None = None,
    checkpointing: bool = True,
    batch: int = 1,
    micro_batches: int = 1,
    sample: Any = None,
    measure: bool = True,
    card: str | int | None = None,
    vram: int | float | str | None = None,
    ram: int | float | str | None = None,
    upstream: int = 1,
    margin: float = 0.08,
    disk_gbps: float | None = None,
    fetch: bool = False,
    **rates: float | None,
) -> Plan:
    """Say whether a training fits a card and a host, before anything is loaded.

    Parameters
    ----------
    model : nn.Module, type, str, path or int
        A module (on the meta device, or any other: it is not touched); a class, with `config`; a
        folder of diffusers or transformers, a ``config.json``, a safetensors file or index, of
        which only headers are read; the name of a repository in the local hub cache
        (``"owner/name"``); a model that is known by name (``"FLUX.1-dev"``, docs/plan.md has the
        list); or a number of parameters, ``"12B"``.
    config : mapping, path or config object, optional
        Of a class: what its constructor takes, or its library's config.
    train : {"lora", "full"}
        What is trained.
    rank : int
        Of the LoRA.
    targets : str or iterable of str
        Layers that get a LoRA: names or their ends, as in peft, or ``"all-linear"``.
    optimizer : str or type
        ``"adamw"``, ``"adamw8bit"``, ``"adafactor"``, ``"sgd"`` and others, or the class.
    dtype : str or torch.dtype, optional
        Of the weights: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp8"``; by default what the module
        or the files have, else bf16.
    adapter_dtype : str or torch.dtype
        Of the LoRA's matrices; peft makes them in float32.
    master_dtype : str or torch.dtype, optional
        With ``train="full"``: a second copy of narrower weights, which has the gradients and is
        stepped (``"fp32"``, mixed precision: 18 bytes a parameter with AdamW).
    during_backward : bool
        With ``train="full"``: weights that stream are stepped as
        ``stream_optimizer(optimizer, during_backward=True)`` does, and their gradients take no
        host memory. By default they are stepped after backward, on the device too.
    quantize : {"int8", "fp8", "qfloat8", "nf4"}, optional
        Frozen Linear weights as torchao, optimum-quanto or bitsandbytes keep them.
    budget : Budget, optional
        The arguments for `attach`; by default all that activations leave free is arena. How small
        compressed weights get is found by encoding parts of them where the module has them, else
        estimated from their dtype, and called estimated.
    checkpointing : bool
        Whether blocks are computed again in backward.
    batch : int
        Samples in a micro-batch.
    micro_batches : int
        Of a step, under `oracle_offload.accumulate`: each weight is fetched once for all of them,
        whose activations live at once (with checkpointing, the inputs of their blocks).
    sample : int, tuple of int, mapping, str, optional
        What one sample is: tokens; height and width in pixels; a mapping from the arguments of
        forward to shapes without the batch, ``(4096, 64)`` or ``((77,), "int64")``; or text, as the
        command takes it. By default what is usual for the kind of model.
    measure : bool
        Whether to run a step without memory, for activations and time; it takes seconds.
    card : str or int, optional
        A card by name (``"RTX 4090"``) or by size in GB (8, 12, 16, 24, 32, 48, 80); by default 24.
    vram : int, float or str, optional
        The card's memory, where that is another.
    ram : int, float or str, optional
        The host's memory: 32, 64 or 128 GiB by that number, or a size (``"48GB"``); by default
        this machine's.
    upstream : int
        How many cards share one link upstream, behind a switch, and train at once: each has so
        much less of its own. ``oracle-offload doctor`` shows it.
    margin : float
        Share of the card that is left to CUDA, rounding and what is not foreseen.
    disk_gbps : float, optional
        What was measured of the disk that weights stay on with ``Budget(disk=True)``: 1e9 bytes/s
        of cold reads, as ``oracle-offload doctor`` says; by default what NVMe disks reach.
    fetch : bool
        Whether to ask the hub for the config of a repository; nothing else uses a network.
    **rates : float, optional
        What was measured: ``link_gbps`` and ``memory_gbps``, 1e9 bytes/s to the device and within
        it; ``tflops``, 1e12 operations a second in bf16; ``launch_s``, seconds of a launch.

    Returns
    -------
    Plan
        ``print()`` shows it.

    Raises
    ------
    ValueError
        An argument that makes no sense; the message has its value.
    OffloadError
        A file or a class that does not hold what it should.

    Examples
    --------
    >>> found = oracle_offload.plan("FLUX.1-dev", card="RTX 4090", ram="64GB", measure=False)
    >>> found.verdict  # print(found) shows bytes, alternatives and what to paste
    'weights fit streamed; activations unknown'
    """
    if train not in ("lora", "full"):
        raise ValueError(f"train={train!r} is neither 'lora' nor 'full'")
    if quantize is not None and quantize not in QUANTISED:
        raise ValueError(f"quantize={quantize!r} is not known; there are {', '.join(QUANTISED)}")
    if during_backward and (train != "full" or master_dtype is not None):
        asked = f"train={train!r}" if train != "full" else f"master_dtype={master_dtype!r}"
        raise ValueError(
            f"during_backward=True with {asked}: in backward the weights of a full training are "
            "stepped, with their own gradients"
        )
    if during_backward and micro_batches != 1:
        raise ValueError(
            f"during_backward=True with micro_batches={micro_batches!r}: weights are stepped once "
            "for each backward"
        )
    budget = budget_of(budget)
    for name, value in (
        ("rank", rank),
        ("batch", batch),
        ("micro_batches", micro_batches),
        ("upstream", upstream),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number above zero")
    if isinstance(sample, str):
        sample = parse_sample(sample)
    recipe = Recipe(
        train,
        rank,
        (targets,) if isinstance(targets, str) else tuple(targets),
        _dtype(adapter_dtype, "adapter_dtype"),
        None if master_dtype is None else _dtype(master_dtype, "master_dtype"),
        quantize,
        optimizer_of(optimizer),
        budget.compress,
        during_backward,
    )
    dtype = None if dtype is None else _dtype(dtype, "dtype")
    source = source_of(model, config, dtype, fetch=fetch)
    chosen = card_of(card, vram=vram, **rates).behind(upstream)
    room = Room(chosen.memory_bytes, _ram(ram), margin, budget, disk_of(disk_gbps))
    question = Question(
        source,
        recipe,
        chosen,
        room,
        batch,
        checkpointing,
        sample,
        measure and source.runs,
        micro_batches,
    )
    return answer(question)


def answer(question: Question, step: Step | None = None) -> Plan:
    """Return the plan of a question, whose step may have been measured already."""
    storage = storage_of(question.source, question.recipe)
    if question.room.budget.disk:
        _refuse_disk(question.recipe, storage)
    step = _step(question, storage) if step is None else step
    why = ""
    if question.recipe.compress == "auto":
        storage, choice = chosen(question, storage, step)
        why = choice.why
    step, found = fit_step(storage, step, question.micro_batches, question.room)

    def measured(**changes: Any) -> Step:
        changed = replace(question, **changes)
        return _step(changed, storage_of(changed.source, changed.recipe))

    rungs = ladder(question, step, found, measured)
    storage_of(question.source, question.recipe)  # the ladder marked the module again
    return Plan(
        question,
        storage,
        found,
        step,
        speed_of(step, found, question.card, question.room.disk_gbps),
        rungs,
        shards(storage),
        _assumptions(question, found, step, why),
    )


def _refuse_disk(recipe: Recipe, storage: Storage) -> None:
    """Refuse to leave in files what no file has, and what would be written there all day."""
    if recipe.quantize:
        raise ValueError(
            f"disk=True with quantize={recipe.quantize!r}: weights are quantised while they are "
            "read, and no file has them so; leave one of the two away"
        )
    if recipe.train != "full":
        return
    kinds = ("weights", "master copies", "optimizer state")
    written = sum(row.bytes for row in storage.rows if row.name in kinds)
    a_day = written * _STEPS_A_DAY / 1e12
    raise ValueError(
        f"disk=True with train='full': {format_size(written)} of weights and states would be "
        f"written in each step, {a_day:,.1f} TB a day at a step in ten seconds, and a disk bears "
        "some hundreds in its life; disk=True is for frozen weights: train='lora', or leave it away"
    )


def _step(question: Question, storage: Storage) -> Step:
    logger.info("measuring a step without values; --no-measure leaves it out")
    module = question.source.module if question.source.runs else None
    if module is None:
        return Step(why="no forward is known")
    if not question.measured:
        return Step(why="it was not measured")
    return run_step(
        module,
        [leaf for unit in storage.units for leaf in unit],
        storage.adapters,
        question.recipe.adapter_dtype,
        question.checkpointing,
        question.sample,
        question.batch,
    )


def _assumptions(question: Question, found: Fit, step: Step, why: str) -> tuple[str, ...]:
    card, said = question.card, list(question.source.notes)
    named = [name for name in ("link_gbps", "tflops", "memory_gbps") if name not in card.measured]
    if named:
        said.append(f"{card.name}: {', '.join(named)} are its maker's or reported, not measured")
    said.append(
        f"{100 * question.room.margin:.0f}% of the device are left to CUDA and to rounding, a "
        "tenth of the host to the system"
    )
    if question.source.module is None and question.recipe.train == "lora":
        said.append("the LoRA, its gradients and its state are unknown and counted nowhere")
    if card.upstream > 1:
        said.append(f"{card.upstream} cards share the link upstream, each has as much of it")
    if any(found.read_bytes) and question.room.disk_gbps == DISK_GBPS:
        slow, fast = DISK_GBPS
        said.append(
            f"the disk reads {slow:g} to {fast:g} GB/s, as NVMe disks do: not measured; "
            "oracle-offload doctor measures it, disk_gbps= takes it"
        )
    if found.storage.coded:
        said.append(question.source.expected.said(found.storage.coded))
    if why:
        said.append(f'compress="auto": {why}')
    if step.activations is None:
        said.append(f"activations are unknown and counted nowhere: {step.why}")
    elif step.note:
        said.append(step.note)
    left = step.leaving()
    if left is not None and left.longer > _WORTH_TELLING:
        most = (found.host_room - found.host_bytes) / left.host_bytes
        longer = min(left.longer, most)
        buys = "the host has no room for that"
        if longer > 1:
            buys = f"room for {longer:.1f} times the sequence"
            if isinstance(question.sample, int):
                buys += f", of {int(longer * question.sample)} tokens"
            if most < left.longer:
                buys += ", where the host is full"
        said.append(
            f"with oracle_offload.train.offload_activations {format_size(left.host_bytes)} of the "
            f"activations are on the host and {format_size(left.device_bytes)} on the device: "
            f"{buys}"
        )
    return tuple(said)


def _ram(ram: int | float | str | None) -> int:
    if ram is None:
        return memory.total_bytes()
    if str(ram) in map(str, HOSTS_GB):
        return int(ram) * GIB
    return parse_size(ram, total=memory.total_bytes(), name="ram")


def _dtype(value: str | torch.dtype, name: str) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else DTYPES.get(str(value).lower())
    if found is None or not found.is_floating_point:
        raise ValueError(f"{name}={value!r} is not known; there are {', '.join(DTYPES)}")
    return found
