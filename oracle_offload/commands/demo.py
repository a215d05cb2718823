"""The demonstration: one real training run, offloaded, next to the same run fully resident.

The model is ``diffusers.FluxTransformer2DModel`` at its real depth (19 double and 38 single
blocks) with random weights, trained with a LoRA from ``peft`` under gradient checkpointing. Both
runs see the same noise; their losses must agree to the last bit. Without CUDA the device is
simulated: results are computed by the CPU, and times are the simulator's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..engine.pace import WARM_UP_STEPS
from ..errors import OffloadError
from ..host.patience import quiet_libraries
from ..host.schema import schema
from ..host.sizes import format_size
from ..layers.traffic import stalls_of, stalls_text
from .exits import Exit

SCHEMA = schema("demo", 1)
_IMAGE_TOKENS, _TEXT_TOKENS, _CHANNELS = 64, 16, 64


@dataclass
class DemoResult:
    """What one run showed. Sizes in bytes, times in seconds."""

    device: str
    device_name: str
    simulated: bool
    torch_version: str
    seed: int
    width: int
    parameters: int
    weight_bytes: int
    managed_bytes: int
    offload_percent: float
    losses: list[float]
    resident_losses: list[float]
    equal_steps: int
    weights_equal: bool
    residents_agree: bool | None
    step_s: float
    resident_step_s: float
    wall_s: float
    step_h2d_bytes: int
    x_min_bytes: int
    arena_bytes: int
    peak_in_arena_bytes: int
    stalls: int
    stall_s: float
    waits: int
    timed_waits: int
    svg: str
    summary: dict[str, Any] = field(default_factory=dict)


class Runner:
    """One model in training: the managed one, or a resident one to compare with."""

    def __init__(self, model: Any, device: Any, seed: int) -> None:
        import torch

        self.model, self.device, self.seed = model, device, seed
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, number: int) -> Any:
        """Train one step on noise of its own seed; return the loss on the device."""
        import torch

        generator = torch.Generator().manual_seed(self.seed * 100_003 + number)

        def noise(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(self.device, torch.bfloat16)

        latents, target = noise(1, _IMAGE_TOKENS, _CHANNELS), noise(1, _IMAGE_TOKENS, _CHANNELS)
        sigma = torch.rand(1, generator=generator).to(self.device, torch.bfloat16)
        side = int(_IMAGE_TOKENS**0.5)
        places = torch.zeros(_IMAGE_TOKENS, 3)
        places[:, 1] = torch.arange(_IMAGE_TOKENS) // side
        places[:, 2] = torch.arange(_IMAGE_TOKENS) % side
        predicted = self.model(
            hidden_states=(1 - sigma) * latents + sigma * target,
            encoder_hidden_states=noise(1, _TEXT_TOKENS, 128),
            pooled_projections=noise(1, 128),
            timestep=sigma,
            guidance=torch.full((1,), 3.5, device=self.device, dtype=torch.bfloat16),
            img_ids=places.to(self.device),
            txt_ids=torch.zeros(_TEXT_TOKENS, 3, device=self.device),
        ).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), (target - latents).float())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build_model(width: int, seed: int) -> Any:
    """Return the Flux transformer at real depth, `width` wide, frozen, bfloat16, seeded weights."""
    import diffusers
    import torch

    heads = 4
    head = width // heads
    torch.manual_seed(seed)
    flux: Any = diffusers.FluxTransformer2DModel
    model = flux(
        patch_size=1,
        in_channels=_CHANNELS,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=head,
        num_attention_heads=heads,
        joint_attention_dim=128,
        pooled_projection_dim=128,
        guidance_embeds=True,
        axes_dims_rope=(head // 4, head * 3 // 8, head * 3 // 8),
    )
    model = model.to(torch.bfloat16).requires_grad_(False)
    model.enable_gradient_checkpointing()
    return model.train()


def add_lora(model: Any, seed: int) -> None:
    """Put rank-4 LoRA adapters on the attention projections with peft."""
    import torch
    from peft import LoraConfig

    torch.manual_seed(seed + 1)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets))


def check_arguments(
    device: str | None, width: int, steps: int, offload: float, seed: int, svg: str
) -> None:
    """Raise `ValueError` for an argument of `run_demo` that makes no sense; imports nothing."""
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device={device!r} must be cuda, cuda:N or cpu (simulated)")
    if width < 64 or width % 64:
        raise ValueError(f"width={width} must be a multiple of 64")
    if steps <= WARM_UP_STEPS:
        raise ValueError(
            f"steps={steps} must be at least {WARM_UP_STEPS + 1}: the engine learns the order in "
            "the ones before, and the picture is of a whole step"
        )
    if not 0 <= offload <= 1:
        hint = f"; did you mean {offload / 100}?" if 1 < offload <= 100 else ""
        raise ValueError(f"offload-percent={offload} is a share, from 0 to 1{hint}")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed={seed} must be from 0 to 2^32 - 1")
    if os.path.isdir(svg):
        raise ValueError(f"svg={svg!r} is a folder; name a file")


def run_demo(
    device: str | None = None,
    preset: str | None = None,
    width: int = 128,
    steps: int = 20,
    offload: float = 0.91,
    seed: int = 0,
    svg: str = "out/demo-timeline.svg",
    progress: bool = True,
) -> tuple[DemoResult, str]:
    """Train offloaded and resident side by side.

    Parameters
    ----------
    device : str, optional
        ``"cuda"`` where there is CUDA, else ``"cpu"``, the simulated device.
    preset : str, optional
        Simulated device: rtx3090, rtx4090, rtx5090, h100 or h200.
    width : int
        Hidden size, a multiple of 64 (the real one is 3072).
    steps : int
        Training steps, at least 3.
    offload : float
        ``offload_percent`` of attach.
    seed : int
        Of weights and noise.
    svg : str
        Where the timeline of a step is written: one in the second half, or the third.
    progress : bool
        Show a progress bar on standard error.

    Returns
    -------
    tuple
        The result, and the text of the memory summary.

    Raises
    ------
    ValueError
        An argument that makes no sense.
    """
    check_arguments(device, width, steps, offload, seed, svg)
    if preset is not None:
        os.environ["ORACLE_OFFLOAD_SIM_DEVICE"] = preset
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from tqdm import tqdm

    _quiet_libraries()
    from .. import manager as managers
    from ..engine.devices import parse_device
    from ..observe.recorder import record
    from ..observe.summary import memory_summary

    place = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cuda = place.type == "cuda"
    began = time.perf_counter()
    residents = []
    for _ in range(2 if on_cuda else 1):
        model = build_model(width, seed)
        add_lora(model, seed)
        residents.append(Runner(model.to(place), place, seed))
    model = build_model(width, seed)
    parameters = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    manager = managers.attach(model, place, offload_percent=offload)
    add_lora(model, seed)
    manager.settle()
    managed = Runner(model, place, seed)
    timed = _timer(manager)
    engine = manager.state.engine
    recording_steps = record(timed_every=max(1, steps // 2))
    with _settings_of_torch(on_cuda, width):
        # Before the managed one, and not at the same time: the clock of a step is then its own.
        for number in tqdm(range(steps), desc="resident", unit="step", disable=not progress):
            for runner in residents:
                # A resident step takes the same simulated time whenever it is measured.
                timing = not manager.state.simulated or number >= steps - 3
                loss, seconds = timed(runner, number) if timing else (runner.step(number), None)
                runner.losses.append(float(loss))
                if seconds is not None:
                    runner.seconds.append(seconds)
        bar = tqdm(range(steps), desc="training", unit="step", disable=not progress)
        with recording_steps as recorder, bar:
            for number in bar:
                loss, seconds = timed(managed, number)
                managed.losses.append(float(loss))
                managed.seconds.append(seconds)
                if number == steps - 1:
                    report = memory_summary(place, model=model, optimizer=managed.optimizer)
                equal = managed.losses[number] == residents[0].losses[number]
                bar.set_postfix(loss=f"{managed.losses[-1]:.6f}", same="yes" if equal else "NO")
    stats = engine.stats(manager.attachment.model)
    stalls, stall_s = stalls_of(stats)
    target = Path(svg)
    target.parent.mkdir(parents=True, exist_ok=True)
    recording = recorder.recording()
    step = f"step {recording.timed_steps()[-1][1]} "  # the latest has the steadiest arena
    whole, *parts = (shown for name, shown in recording.pictures() if name.startswith(step))
    target.write_text(whole, encoding="utf-8")
    # The whole of a step has too many uses to tell them apart.
    part = target.with_name(f"{target.stem}-part.svg")
    part.write_text(parts[len(parts) // 4], encoding="utf-8")
    result = DemoResult(
        device=str(place),
        device_name=engine.device_name,
        simulated=manager.state.simulated,
        torch_version=torch.__version__,
        seed=seed,
        width=width,
        parameters=parameters,
        weight_bytes=weight_bytes,
        managed_bytes=manager.attachment.managed_bytes,
        offload_percent=offload,
        losses=managed.losses,
        resident_losses=residents[0].losses,
        equal_steps=_equal(managed.losses, residents[0].losses),
        weights_equal=_same_weights(managed, residents[0]),
        residents_agree=residents[0].losses == residents[1].losses if on_cuda else None,
        step_s=_typical(managed.seconds),
        resident_step_s=_typical(residents[0].seconds),
        wall_s=time.perf_counter() - began,
        step_h2d_bytes=manager.attachment.traffic.step_h2d_bytes or 0,
        x_min_bytes=manager.attachment.x_min_bytes(),
        arena_bytes=manager.attachment.arena.capacity_bytes,
        peak_in_arena_bytes=stats["peak_resident_bytes"],
        stalls=round(stalls),
        stall_s=stall_s,
        waits=stats["waits"],
        timed_waits=stats["timed_waits"],
        svg=str(target),
        summary=report.to_dict(),
    )
    manager.detach()
    return result, str(report)


@contextlib.contextmanager
def _settings_of_torch(on_cuda: bool, width: int) -> Iterator[None]:
    """Compute the same bits in every run; however this ends, torch is as it was."""
    import torch

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    if on_cuda:
        torch.use_deterministic_algorithms(True)
    elif width <= 256:
        # A second thread gains nothing for matrices this small, and other work slows it down much.
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def _timer(manager: Any) -> Callable[[Runner, int], tuple[Any, float]]:
    """Return a function that runs a step and says how long it took, on whichever clock counts."""
    import torch

    def measured(runner: Runner, number: int) -> tuple[Any, float]:
        torch.cuda.synchronize(manager.device)
        begin = time.perf_counter()
        loss = runner.step(number)
        torch.cuda.synchronize(manager.device)
        return loss, time.perf_counter() - begin

    def simulated(runner: Runner, number: int) -> tuple[Any, float]:
        from ..engine import simulator
        from ..model.witness import Witness

        begin = simulator.finish()
        with Witness(clock=True):
            loss = runner.step(number)
        return loss, simulator.finish() - begin

    return simulated if manager.state.simulated else measured


def _quiet_libraries() -> None:
    """Keep notices of other libraries out of the demonstration's output."""
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()


def _typical(seconds: list[float]) -> float:
    """Median of the second half: the first steps learn the order and fill the arena."""
    late = sorted(seconds[len(seconds) // 2 :])
    return late[len(late) // 2]


def _equal(one: list[float], other: list[float]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def _same_weights(one: Runner, other: Runner) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(one.trained, other.trained, strict=True))


def describe(result: DemoResult, summary: str) -> str:
    """Return the demonstration's text."""
    steps = len(result.losses)
    same = result.equal_steps == steps and result.weights_equal
    clock = " (simulated)" if result.simulated else ""
    lines = [
        f"FluxTransformer2DModel, 19 + 38 blocks, width {result.width}: "
        f"{result.parameters / 1e6:.1f} M parameters, {format_size(result.weight_bytes)}",
        f"device          {result.device_name}"
        + (", simulated: every time below is" if clock else ""),
    ]
    if clock:
        lines.append("                virtual time of the simulator, not of this machine")
    lines += [
        f"losses          {result.losses[0]:.9f} ... {result.losses[-1]:.9f}",
        f"  resident      {result.resident_losses[0]:.9f} ... {result.resident_losses[-1]:.9f}",
        f"  equal         {result.equal_steps} of {steps} steps to the last bit; trained LoRA "
        f"weights {'equal too' if result.weights_equal else 'DIFFER'}",
    ]
    if result.residents_agree is False:
        lines.append(
            "  note          two resident runs differ from each other on this machine: its kernels "
            "are not deterministic"
        )
    ratio = result.step_s / result.resident_step_s if result.resident_step_s else float("nan")
    lines.append(
        f"time per step   {result.step_s * 1e3:.2f} ms, "
        f"resident {result.resident_step_s * 1e3:.2f} ms: {ratio:.3f} x{clock}"
    )
    moved = format_size(result.step_h2d_bytes)
    if result.x_min_bytes:
        share = result.step_h2d_bytes / result.x_min_bytes
        moved += f" = {share:.3f} x X_min ({format_size(result.x_min_bytes)})"
    lines += [
        f"to the device   {moved} per step",
        f"arena           {format_size(result.arena_bytes)}, peak use "
        f"{format_size(result.peak_in_arena_bytes)}, for {format_size(result.managed_bytes)} of "
        "managed weights",
        "stalls          "
        + stalls_text(result.stalls, result.stall_s, result.timed_waits, result.waits)
        + clock,
        f"timeline        {result.svg}: a step from its first use of a weight to its last",
        f"wall time       {result.wall_s:.1f} s for everything",
        "",
        summary,
        "",
        "RESULT: " + ("same bits as the resident training" if same else "THE RUNS DIFFER"),
    ]
    return "\n".join(lines)


DESCRIPTION = """\
Train a LoRA of a Flux transformer at its real depth with 91% of its weights offloaded, after the
same training with all of them resident, and compare each loss and each trained weight by bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``oracle-offload demo``."""
    parser.add_argument(
        "--device", help="cuda or cpu (simulated); default: cuda where there is one"
    )
    parser.add_argument(
        "--preset",
        choices=("rtx3090", "rtx4090", "rtx5090", "h100", "h200"),
        help="which device is simulated (default: rtx4090)",
    )
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--steps", type=int, default=20, help="of each training (20)")
    parser.add_argument(
        "--offload-percent",
        dest="offload",
        type=float,
        default=0.91,
        help="share of the weights, 0 to 1 (0.91)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and noise (0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--svg", default="out/demo-timeline.svg", help="where the timeline goes")


def run(args: argparse.Namespace) -> Exit:
    """Run the command; the check fails where the two trainings differ."""
    try:
        check_arguments(args.device, args.width, args.steps, args.offload, args.seed, args.svg)
    except ValueError as problem:
        print(f"oracle-offload demo: {problem}", file=sys.stderr)
        return Exit.USAGE
    with quiet_libraries():
        return _run(args)


def _run(args: argparse.Namespace) -> Exit:
    try:
        import diffusers  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
    except ImportError as missing:
        print(
            f"the demo needs {missing.name}: pip install torch diffusers peft (or make demo)",
            file=sys.stderr,
        )
        return Exit.ERROR
    try:
        result, summary = run_demo(
            args.device,
            args.preset,
            args.width,
            args.steps,
            args.offload,
            args.seed,
            args.svg,
        )
    except (ValueError, OffloadError) as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return Exit.ERROR
    if args.json:
        print(json.dumps({"schema": SCHEMA, **asdict(result)}, indent=2))
    else:
        print(describe(result, summary))
    agree = result.equal_steps == len(result.losses) and result.weights_equal
    return Exit.OK if agree or result.residents_agree is False else Exit.CHECK_FAILED
