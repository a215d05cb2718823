"""What the examples share: flags, where weights live, and what one training step is."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import oracle_offload
from oracle_offload.train.recipes import OPTIMIZERS
from oracle_offload.train.recipes.attention import AttentionBackends
from oracle_offload.train.recipes.checkpointing import set_checkpointing
from oracle_offload.train.recipes.mixed_precision import MixedPrecision
from oracle_offload.train.recipes.optimizers import make_optimizer, state_bytes

ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# A resumed run may have others of these; what it trains does not change by them.
FREE = set(
    "output steps resume save_every prompt preview_every preview_size checkpointing device "
    "resident offload_percent vram_budget ram_budget record".split()
)


class BadInput(ValueError):
    """A flag or a file makes no sense; the message says which, and what to do."""


def say(line: str) -> None:
    """Tell the user; standard output is kept for the path of what was made."""
    print(line, file=sys.stderr, flush=True)


# ---- flags ----


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of a flag: a whole number, not below `least`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def placing(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the flags that say which model, and where its weights live."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add("--model", metavar="FOLDER", required=True, help="as save_pretrained wrote it")
    add("--output", metavar="FOLDER", default="run", help="where everything goes")
    add("--prompt", metavar="TEXT", default="", help="of what is sampled")
    add("--seed", type=int, default=0, help="decides every draw")
    add("--device", default="cuda", help="cuda, cuda:1, or cpu: a simulated card")
    add("--resident", action="store_true", help="keep all weights on the device")
    add("--offload-percent", type=float, default=1.0, help="share without room on the device")
    add("--vram-budget", metavar="SIZE", help="what weights may take there: 8GiB, 0.5, auto")
    add("--ram-budget", metavar="SIZE", help="what weights may take of the host: 20GiB, auto")
    made.set_defaults(**defaults)
    return made


def training(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the flags of a training."""
    made = placing(description)
    add, switch = made.add_argument, argparse.BooleanOptionalAction
    add("--data", metavar="PATH", required=True, help="what is learnt; docs/examples.md")
    add("--steps", metavar="N", type=at_least(1), default=100, help="optimizer steps in all")
    add("--resume", action="store_true", help="go on behind the last checkpoint in the output")
    add("--save-every", metavar="N", type=at_least(1), default=50, help="steps between checkpoints")
    add("--batch-size", metavar="N", type=at_least(1), default=1, help="samples of a step")
    add(
        "--at-once", metavar="N", type=at_least(0), default=0,
        help="samples of one forward, 0: all of a step; halved, down to 1, where memory runs out",
    )  # fmt: skip
    add("--learning-rate", metavar="X", type=float, default=1e-4, help="of all parameters")
    add("--max-grad-norm", metavar="X", type=float, default=1.0, help="clip to it; 0: never")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="AdamW where it cannot be had")
    add("--amp", action=switch, default=True, help="bfloat16, else float16 with a scaler")
    add("--checkpointing", action=switch, default=True, help="compute again in backward")
    add("--attention", choices=tuple(ATTENTION), help="allow this backend alone")
    add("--preview-every", metavar="N", type=at_least(0), default=0, help="steps between previews")
    add("--preview-size", metavar="N", type=at_least(1), default=32, help="its tokens or steps")
    add("--record", metavar="FILE", help="a profile of the run: .html, .json, .csv or .jsonl")
    made.set_defaults(**defaults)
    return made


def run(example: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> int:
    """Run an example; return 0, or 1 after an error, 2 for bad input, 130 once interrupted."""
    try:
        if "resume" in args:
            _check(args)
        print(example(args))
        return 0
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    except BadInput as error:
        say(f"error: {error}")
        return 2
    except Exception as error:
        if oracle_offload.diagnose.is_oom(error):
            say(str(oracle_offload.explain_oom(error)))
        elif not isinstance(error, oracle_offload.OffloadError | OSError):
            raise
        say(f"error: {error}")
        code = 1
    if saved := _saved(Path(args.output)):
        say(f"--resume goes on from {saved[-1]}")
    return code


def _saved(folder: Path) -> list[Path]:
    return [*folder.glob("state.pt"), *sorted(folder.glob("checkpoint-*"))]


def _check(args: argparse.Namespace) -> None:
    """Refuse what would be found out only once the model is loaded, or not at all."""
    if args.preview_every and not args.prompt:
        raise BadInput("--preview-every needs a --prompt")
    folder = Path(args.output)
    saved = _saved(folder)
    if args.resume and not saved:
        raise BadInput(f"there is nothing to resume in {folder}")
    if saved and not args.resume:
        raise BadInput(f"{saved[0]} is of a training: --resume it, or name another --output")
    folder.mkdir(parents=True, exist_ok=True)


# ---- where the weights live ----


@contextlib.contextmanager
def loaded(
    model_class: Any, args: argparse.Namespace, dtype: torch.dtype | None = None, part: str = ""
) -> Iterator[Any]:
    """Load a model of transformers or diffusers, let its weights stream, and detach it at the end.

    They go from the file straight into page-locked memory: the host never holds them twice. With
    ``--resident`` the model is loaded as its library does, onto the device.
    """
    if not (Path(args.model) / part / "config.json").is_file():
        raise BadInput(f"--model {args.model}: there is no {Path(part) / 'config.json'} in it")
    if args.resident:
        name = "torch_dtype" if model_class.__module__.startswith("diffusers") else "dtype"
        more: dict[str, Any] = {name: dtype} if dtype else {}
        model = model_class.from_pretrained(
            args.model, subfolder=part, local_files_only=True, **more
        )
        yield model.to(args.device)
        return
    try:
        model = oracle_offload.from_pretrained(
            model_class,
            args.model,
            args.device,
            dtype=dtype,
            subfolder=part,
            offload_percent=args.offload_percent,
            vram_budget=args.vram_budget,
            ram_budget=args.ram_budget,
        )
    except ValueError as error:  # a device, a share or a budget that is none
        raise BadInput(str(error)) from error
    manager = model._memory_manager
    say(f"attached: {manager!r}")
    try:
        yield model
    finally:
        manager.detach()


def adapted(model: Any, rank: int, targets: Any, seed: int, task: str = "") -> Any:
    """Return the frozen model with float32 adapters, which begin as `seed` decides.

    With a `task` it is in peft's class for it, as Trainer wants it.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type=task or None)
    if task:
        model = get_peft_model(model, config)
    else:
        model.add_adapter(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if hasattr(model, "_memory_manager"):
        model._memory_manager.settle()  # adapters to the device, before an optimizer sees them
    return model


# ---- training ----


class Training:
    """The optimizer, precision, checkpoint and numbers of a run, and its steps.

    Parameters
    ----------
    args : argparse.Namespace
        Of `training`.
    model : nn.Module
        With what is trained.
    loss_of : callable
        The mean loss of a part of a batch.
    weight_of : callable, optional
        What that mean is over; by default samples.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        loss_of: Callable[[Any], Tensor],
        weight_of: Callable[[Any], int] | None = None,
    ) -> None:
        self.args, self.model = args, model
        self.folder = Path(args.output)
        model.train()
        if args.checkpointing and not set_checkpointing(model):
            say("note: the model has no gradient checkpointing")
        self.trained = [p for p in model.parameters() if p.requires_grad]
        made = make_optimizer(args.optimizer, self.trained, args.learning_rate)
        if made.why:
            say(f"note: {made.why}")
        self.optimizer = made.optimizer
        self.amp = MixedPrecision(args.device, args.amp)
        self.parts = oracle_offload.train.AdaptiveBatch(
            model,
            self._in_precision(loss_of),
            size=args.at_once or args.batch_size,
            weight_of=weight_of,
            scaler=self.amp.scaler,
        )
        self.checkpoint = oracle_offload.train.Checkpoint(
            self.folder / "state.pt",
            model,
            optimizer=self.optimizer,
            scaler=self.amp.scaler,
            every=args.save_every,
            settings=_Settings(args),
        )
        self.done = (self.checkpoint.load() or 0) if args.resume else 0
        if self.done:
            say(f"resumed behind step {self.done}")
        self.alarm = oracle_offload.train.IdleAlarm(model, scaler=self.amp.scaler)
        self._seen: AttentionBackends | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Training:
        args = self.args
        path = self.folder / "metrics.jsonl"
        if args.record:
            self._open.enter_context(oracle_offload.record(args.record))
        if args.attention:
            self._open.enter_context(sdpa_kernel([ATTENTION[args.attention]]))
        metrics = oracle_offload.observe.MetricsFile(path, device=args.device, sensors=True)
        self.metrics = self._open.enter_context(metrics)
        return self

    def __exit__(self, *details: Any) -> None:
        self.alarm.close()
        self._open.close()

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left; each decides what is drawn in it."""
        for step in range(self.done + 1, self.args.steps + 1):
            torch.manual_seed(self.args.seed * 1_000_003 + step)
            yield step
            self.done = step
            self.checkpoint.after_step(step)
        if self.checkpoint.saved != self.done:
            self.checkpoint.save(self.done, "the end")

    def step(self, step: int, batches: Iterable[Any]) -> None:
        """Learn from batches whose losses add up: backward, clip, step, and write the numbers."""
        size, loss = self.parts.size, 0.0
        for batch in batches:
            loss += float(self._watched(batch))
        if self.parts.size < size:
            say(f"note: memory ran out; {self.parts.size} samples at once from now on")
        self.amp.step(self.optimizer, self.trained, self.args.max_grad_norm or None)
        self.alarm.step()
        self.optimizer.zero_grad()
        self.metrics.log(
            step,
            loss=loss,
            at_once=self.parts.size,
            optimizer_bytes=state_bytes(self.optimizer),
            host_peak_bytes=host_peak(),
        )
        say(f"step {step}/{self.args.steps}  loss {loss:.4f}")
        if self.amp.hint:
            say(f"note: {self.amp.hint}")
            self.amp.hint = ""

    def is_due(self, step: int) -> bool:
        """Whether a preview is due after a step."""
        return bool(self.args.preview_every) and step % self.args.preview_every == 0

    @contextlib.contextmanager
    def sampling(self, name: str) -> Iterator[Path]:
        """Yield the file of a preview, with the model as it is for sampling."""
        path = self.folder / "previews" / name
        path.parent.mkdir(exist_ok=True)
        self.model.eval()
        try:
            with oracle_offload.observe.phase("sampling"), torch.no_grad(), self.amp.autocast():
                yield path
        finally:
            self.model.train()
        say(f"preview: {path}")

    def _in_precision(self, loss_of: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def loss(part: Any) -> Tensor:
            with self.amp.autocast():
                return loss_of(part)

        return loss

    def _watched(self, batch: Any) -> Tensor:
        """Backward of a batch; the first time, with a look at which attention really runs."""
        if self._seen is not None:
            return self.parts.backward(batch)
        with AttentionBackends() as self._seen:
            loss = self.parts.backward(batch)
        say(f"attention: {self._seen}")
        return loss


class _Settings:
    """The flags that decide what is trained: a part of the checkpoint that refuses others."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._now = {name: value for name, value in vars(args).items() if name not in FREE}

    def state_dict(self) -> dict[str, Any]:
        return self._now

    def load_state_dict(self, then: Mapping[str, Any]) -> None:
        other = [
            f"--{name.replace('_', '-')} was {then.get(name)}, is {value}"
            for name, value in self._now.items()
            if value != then.get(name)
        ]
        if other:
            raise BadInput(f"the checkpoint is of another training: {'; '.join(other)}")


def host_peak() -> int | None:
    """Return the most that this process had in memory, where Linux tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return None
