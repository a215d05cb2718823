"""`accumulate`: one fetch of each block for several micro-batches.

Each micro-batch's step runs in a greenlet. After each grain (`grains`) it makes room for the next
one, so all have computed a block before any goes on to the block after it. autograd runs the newest
node first, so one backward over all losses visits the blocks in the same way, from the last to the
first. The engine needs to know nothing of this: the other micro-batches' uses of a block are hits.

The micro-batch that comes last starts first. So backward meets them in their own order, and sums
gradients as a loop over them does.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from ...engine.engines import open_states
from ...engine.geometry import count_writes
from ...errors import OffloadError
from ...layers.managed import HANDLE
from ...model import structure
from ...model.attachment import attachments_on
from .attributes import Attributes, missing_or
from .grains import Grains, grains_of
from .leaves import Graph, Leaves, no_graph_task
from .thread_state import ThreadState, ThreadStates, can_take_turns

if TYPE_CHECKING:
    import greenlet

_checkpoint_hook: Any = checkpoint._checkpoint_hook
_CheckpointFrame: Any = checkpoint._CheckpointFrame
_CONTEXT = {"__enter__", "__exit__"}
logger = logging.getLogger("oracle_offload")
Batch = TypeVar("Batch")
_running: list[_Accumulation] = []  # one at a time in a process: what torch calls is replaced


def accumulate(
    step: Callable[[Batch], Any],
    micro_batches: Iterable[Batch],
    *,
    interleave: bool = True,
    own: Iterable[object] = (),
) -> list[Any]:
    """Run `step` for each micro-batch, and one backward for all: each block is fetched once.

    A loop of forward and backward over M micro-batches brings every weight to the device M times.
    Here all micro-batches compute one block before any goes on to the next, forward and backward.
    Gradients have the bits of the loop. See docs/micro-batches.md.

    Parameters
    ----------
    step : callable
        ``step(micro_batch)`` computes one loss, a scalar tensor, and either returns it or calls
        ``loss.backward()`` itself, once (or ``accelerator.backward(loss)``). That call returns
        after the backward of all micro-batches. The step must not step the optimizer.
    micro_batches : iterable
        What `step` is called with, one after the other.
    interleave : bool
        False: forward and backward of each micro-batch before the next begins, with the same random
        numbers. It is the reference, and keeps the activations of one micro-batch alone. So it is
        done where every weight has room on the device, and for a single micro-batch.
    own : iterable of object
        A trainer, say, or a network of adapters: what a step keeps in their attributes (and in
        dicts there, unless it is a module) is each micro-batch's own, also where a checkpoint
        computes again; afterwards they are as the last one leaves them.

    Returns
    -------
    list
        What `step` returned for each micro-batch, tensors detached; where that was None, the loss
        that it called ``backward`` of.

    Raises
    ------
    OffloadError
        A parameter has a gradient already; a step neither returns a loss nor calls ``backward``, or
        calls it twice; or the gradients could not have the loop's bits: batch norm that trains, a
        buffer that a forward writes, an attribute or a global that steps leave different, a
        parameter that one micro-batch uses several times, random numbers drawn in backward; or an
        optimizer steps in backward (`stream_optimizer`).
        Whatever raises, `.grad` is None as before.
    ImportError
        greenlet is not installed: ``pip install greenlet``.

    Notes
    -----
    Each micro-batch draws from generators of its own: torch's on every device, Python's and
    numpy's, seeded from torch's in the order of the micro-batches.

    With checkpointing the device holds the inputs of all blocks for each micro-batch, and the
    activations of one block for one of them; without it, all activations of all micro-batches.

    Examples
    --------
    >>> def step(batch):
    ...     return model(**batch).loss / len(batches)
    >>> losses = oracle_offload.accumulate(step, batches)
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """
    if not no_graph_task() or torch.is_inference_mode_enabled():
        raise OffloadError(
            "accumulate was called inside a backward, or in inference mode; call it where "
            "a step of training begins."
        )
    accumulation = _Accumulation(step, list(micro_batches), list(own))
    if len(accumulation.micro_batches) > 1 and any(state.steppers for state in open_states()):
        raise OffloadError(
            "accumulate was called while an optimizer steps in backward, which would step after "
            "the first micro-batch. Stream it without during_backward=True, or give the "
            "micro-batches to the model as one batch."
        )
    try:
        try:
            accumulation.install()
            if interleave and len(accumulation.micro_batches) > 1 and accumulation.streams():
                return accumulation.interleaved()
            return accumulation.one_by_one()
        finally:
            accumulation.uninstall()
    finally:
        accumulation.uninstall()  # again: Ctrl-C may have cut the first one short


class _Unwound(BaseException):
    """Ends a micro-batch's step because the accumulation has failed elsewhere."""


class _MicroBatch:
    """One micro-batch on its way through its step."""

    def __init__(self, index: int, batch: Any, seed: int) -> None:
        self.index = index
        self.batch = batch
        self.seed = seed
        self.greenlet: greenlet.greenlet | None = None
        self.state: ThreadState  # as it was set aside, or its step ended, last
        self.left: Attributes  # as the step ended: the attributes that are its own
        self.wholes = 0  # that it is inside, and which are not divided
        self.is_due = False  # to make room, as soon as it is inside none
        self.roots: tuple[Tensor, ...] = ()  # what it hands over to backward
        self.gradients: tuple[Tensor | None, ...]  # of these
        self.has_called = False  # backward itself
        self.result: Any  # of the step

    @property
    def has_ended(self) -> bool:
        return self.greenlet is not None and self.greenlet.dead

    def is_divisible(self) -> bool:
        """Whether another may go on now: inference mode cannot be left and entered again."""
        return not self.wholes and not torch.is_inference_mode_enabled()

    def hand_over(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Take the arguments of ``torch.autograd.backward``."""
        if self.roots:
            raise OffloadError(
                "the step called backward twice; add the losses up and call it once."
            )
        if retain_graph or create_graph or inputs is not None or grad_variables is not None:
            raise OffloadError(
                "the step called backward with retain_graph, create_graph or inputs, which a "
                "backward over all micro-batches cannot take; leave them out."
            )
        self.roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
        self.gradients = tuple(given) if given is not None else (None,) * len(self.roots)

    def answer(self) -> Any:
        """Return what `accumulate` returns for it."""
        result = self.roots[0] if self.result is None else self.result
        return result.detach() if isinstance(result, Tensor) else result


class _Accumulation:
    """One call of `accumulate`."""

    def __init__(
        self, step: Callable[[Any], Any], batches: Sequence[Any], own: Sequence[object]
    ) -> None:
        self._step = step
        self._thread = threading.get_ident()
        self._attachments = [a for state in open_states() for a in attachments_on(state)]
        self._states = ThreadStates([state.device for state in open_states()], own)
        self._leaves = Leaves(self._name_of)
        self._backward = torch.autograd.backward
        self._begins_backward = False
        self._apply = Function.__dict__["apply"]
        self._set_attribute = nn.Module.__setattr__
        self._begin_frame = _CheckpointFrame.__init__
        self._begin_hook = RemovableHandle.__init__
        self._again: _MicroBatch | None = None  # whose attributes backward has now
        self._ended_hook = torch.compiler.disable(self._grain_ended)
        self._current: _MicroBatch | None = None  # that computes now
        self._main: greenlet.greenlet  # that lets them take turns
        self._is_interleaved = False
        self._is_unwinding = False
        self._grains: list[Grains] = []
        self._owners: dict[int, int] = {}  # the micro-batch of each node that may run a backward
        seeds = torch.randint(2**62, (len(batches),), device="cpu").tolist()
        self.micro_batches = [
            _MicroBatch(index, batch, seed)
            for index, (batch, seed) in enumerate(zip(batches, seeds, strict=True))
        ]
        self._ambient = self._states.now()

    # ---- what is attached ----

    def _models(self) -> list[nn.Module]:
        return [m for attachment in self._attachments if (m := attachment.module()) is not None]

    def _name_of(self, leaf: Tensor) -> str:
        for model in self._models():
            for name, parameter in model.named_parameters():
                if parameter is leaf:
                    return f"parameter '{name}'"
        return f"a tensor of shape {list(leaf.shape)}"

    def streams(self) -> bool:
        """Whether some model's weights do not all have room on the device."""
        self._grains = [grains_of(attachment) for attachment in self._attachments]
        return any(grains.modules for grains in self._grains)

    # ---- what torch calls instead ----

    def install(self) -> None:
        """Intercept the begin of backward, and functions of autograd, until `uninstall`."""
        _running.append(self)
        if _running[0] is not self:
            raise OffloadError("accumulate is already under way in this process; it runs alone.")
        apply = self._apply

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_whole()
            try:
                result = apply.__get__(None, cls)(*args, **kwargs)
            except BaseException:
                self._end_whole(failed=True)
                raise
            self._end_whole()
            return result

        def checkpoint_begins(hooks: Any) -> None:
            saved_tensors_hooks.__enter__(hooks)
            self._begin_whole()

        def checkpoint_ends(hooks: Any, kind: Any, *details: Any) -> None:
            saved_tensors_hooks.__exit__(hooks, kind, *details)
            self._end_whole(failed=kind is not None)

        set_attribute, begin_frame = self._set_attribute, self._begin_frame
        begin_hook = self._begin_hook

        def attribute_set(module: nn.Module, name: str, value: Any) -> None:
            if torch.compiler.is_dynamo_compiling() or not self._is_interleaved:
                set_attribute(module, name, value)
                return
            before = missing_or(vars(module), name)
            set_attribute(module, name, value)
            if self._here() is not None:
                self._states.places.written(module, name, before)

        def hook_begins(handle: Any, hooks: Any, **more: Any) -> None:
            of_tensor = isinstance(sys._getframe(1).f_locals.get("self"), Tensor)
            if self._is_interleaved and not of_tensor and self._here() is not None:
                self._states.places.hooked(hooks)
            begin_hook(handle, hooks, **more)

        def frame_begins(
            frame: Any, recompute: Callable[..., Any], *rest: Any, **more: Any
        ) -> None:
            # One inside another begins where the other is computed again.
            owner = self._here() or self._again

            def again(*args: Any, **kwargs: Any) -> Any:
                if owner is not None:
                    self._turn_to(owner)
                return recompute(*args, **kwargs)

            begin_frame(frame, again, *rest, **more)

        torch.autograd.backward = self._called_backward
        nn.Module.__setattr__ = attribute_set  # type: ignore[method-assign, assignment]
        _CheckpointFrame.__init__ = frame_begins
        RemovableHandle.__init__ = hook_begins  # type: ignore[assignment]
        Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
        _checkpoint_hook.__enter__ = checkpoint_begins
        _checkpoint_hook.__exit__ = checkpoint_ends
        structure.frames_aside.append(self._frames_aside)

    def uninstall(self) -> None:
        """Undo what `install` did, or the part of it that it came to; done twice it is the same."""
        if _running[:1] == [self]:
            torch.autograd.backward = self._backward
            Function.apply = self._apply  # type: ignore[method-assign]
            nn.Module.__setattr__ = self._set_attribute  # type: ignore[method-assign]
            _CheckpointFrame.__init__ = self._begin_frame
            RemovableHandle.__init__ = self._begin_hook  # type: ignore[method-assign]
            for name in _CONTEXT & vars(_checkpoint_hook).keys():
                delattr(_checkpoint_hook, name)
            if self._frames_aside in structure.frames_aside:
                structure.frames_aside.remove(self._frames_aside)
            self._states.restore(self._ambient)
            self._remove_hooks()
        if self in _running:
            _running.remove(self)

    def _remove_hooks(self) -> None:
        """Remove the hooks at the ends of grains; a handle may not have been kept in time."""
        for module in (module for grains in self._grains for module in grains.modules):
            for key in [k for k, hook in module._forward_hooks.items() if hook is self._ended_hook]:
                module._forward_hooks.pop(key, None)

    def _here(self) -> _MicroBatch | None:
        """Return the micro-batch whose forward runs in this thread now."""
        if threading.get_ident() == self._thread and no_graph_task():
            return self._current
        return None

    def _frames_aside(self) -> Iterator[FrameType]:
        for micro_batch in self.micro_batches:
            frame = None if micro_batch.greenlet is None else micro_batch.greenlet.gr_frame
            if frame is not None:
                yield frame

    def _begin_whole(self) -> None:
        """What comes now is not divided: a function of autograd, or a checkpoint.

        Around a function's forward are frames of torch's own, which keep for this thread where on
        the stack they are: another micro-batch must not find that. A checkpoint's layers divided
        would have backward keep what it computes again for all micro-batches at once.
        """
        micro_batch = self._here()
        if micro_batch is not None:
            micro_batch.wholes += 1

    def _end_whole(self, *, failed: bool = False) -> None:
        """It has ended: a switch that became due inside follows it."""
        micro_batch = self._here()
        if micro_batch is not None:
            micro_batch.wholes -= 1
            if micro_batch.is_due and micro_batch.is_divisible() and not failed:
                self._make_room(micro_batch)

    def _called_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._begins_backward and no_graph_task():
            # A mode of torch functions is active, a default device say, and hands the call on.
            self._backward(tensors, *args, **kwargs)
            return
        micro_batch = self._here()
        if micro_batch is None:
            if not no_graph_task():
                self._note_inner(tensors)
            self._backward(tensors, *args, **kwargs)
            return
        self._check_unwinding()
        micro_batch.hand_over(tensors, *args, **kwargs)
        micro_batch.has_called = True
        if self._is_interleaved:
            self._set_aside(micro_batch)
        else:
            self._backward_of([micro_batch])

    def _note_inner(self, tensors: Any) -> None:
        """A checkpoint's backward begins one of its own, in whatever thread."""
        index = self._owners.get(id(torch._C._current_autograd_node()))
        if index is not None:
            graph = Graph((tensors,) if isinstance(tensors, Tensor) else tensors)
            self._owners.update(dict.fromkeys(graph.functions, index))
            self._leaves.note_inner(graph, index if self._is_interleaved else None)

    # ---- taking turns ----

    def _grain_ended(self, module: nn.Module, *_: Any) -> None:
        micro_batch = self._here()
        if micro_batch is None:
            return
        self._states.places.look_at(module)
        if micro_batch.is_divisible():
            self._make_room(micro_batch)
        else:
            micro_batch.is_due = True

    def _make_room(self, micro_batch: _MicroBatch) -> None:
        """Let the next micro-batch go on; return when it is this one's turn again."""
        micro_batch.is_due = False
        self._check_unwinding()
        self._set_aside(micro_batch)

    def _check_unwinding(self) -> None:
        if self._is_unwinding:
            raise _Unwound

    def _set_aside(self, micro_batch: _MicroBatch) -> None:
        """Go back to the code that lets the micro-batches take turns; return when it goes on."""
        lending = [layer for grains in self._grains for layer in grains.lending]
        paused = [(layer, layer.pause()) for layer in reversed(lending) if layer.is_lending_here()]
        micro_batch.state = self._states.now()
        self._current = None
        try:
            self._main.switch()
        finally:  # it goes on or is unwound
            self._current = micro_batch
            self._states.restore(micro_batch.state)
            for layer, lent in reversed(paused):
                layer.go_on(lent)

    def _go_on(self, micro_batch: _MicroBatch) -> None:
        """Run a micro-batch until it makes room."""
        if micro_batch.greenlet is None:
            micro_batch.greenlet = _greenlet(lambda: self._run(micro_batch))
        try:
            micro_batch.greenlet.switch()
        finally:
            self._current = None

    def _run(self, micro_batch: _MicroBatch) -> None:
        self._current = micro_batch
        self._states.restore(self._ambient)
        self._states.generators.seed(micro_batch.seed)
        self._states.places.look_at_all()  # once it makes room
        micro_batch.result = self._step(micro_batch.batch)
        self._states.places.look_at_all()
        if not micro_batch.roots:
            micro_batch.hand_over(_checked_loss(micro_batch.result))
            micro_batch.state = self._states.now()  # which its backward is to find
        micro_batch.left = self._states.places.now()

    # ---- the two ways ----

    def one_by_one(self) -> list[Any]:
        """Forward and backward of each micro-batch before the next begins."""
        try:
            for micro_batch in self.micro_batches:
                self._run(micro_batch)
                if not micro_batch.has_called:
                    self._backward_of([micro_batch])
                self._current = None
        except BaseException:
            self._leaves.restore()
            raise
        finally:
            self._current = None
        return self._answers()

    def interleaved(self) -> list[Any]:
        """Block by block: the forwards of all, one backward, and what the steps do after it."""
        if not can_take_turns():
            raise OffloadError(
                f"accumulate lets micro-batches take turns from torch 2.8 on, and this is torch "
                f"{torch.__version__}; pass interleave=False."
            )
        self._is_interleaved = True
        self._main = _current_greenlet()
        try:
            self._forwards()
            contextvars.copy_context().run(self._joint_backward)
            for micro_batch in self.micro_batches:
                while not micro_batch.has_ended:
                    self._go_on(micro_batch)
        except BaseException:
            self._unwind()
            self._leaves.restore()
            raise
        return self._answers()

    def _answers(self) -> list[Any]:
        if self.micro_batches:
            left = [micro_batch.left for micro_batch in self.micro_batches]
            self._ambient = self._ambient._replace(owned=self._states.places.last(left))
        return [micro_batch.answer() for micro_batch in self.micro_batches]

    def _forwards(self) -> None:
        carried = _CarriedState(self._models())
        blocks = [module for grains in self._grains for module in grains.modules]
        self._states.places.watch(self._models(), blocks)
        for grains in self._grains:
            for module in grains.modules:
                module.register_forward_hook(self._ended_hook)
        waiting = list(reversed(self.micro_batches))
        while waiting:
            for micro_batch in list(waiting):
                self._go_on(micro_batch)
                if micro_batch.roots:
                    waiting.remove(micro_batch)
        self._remove_hooks()
        carried.check()

    def _joint_backward(self) -> None:
        states = [micro_batch.state for micro_batch in self.micro_batches]
        if any(_context_of(state) != _context_of(states[0]) for state in states):
            raise OffloadError(
                "the steps call backward in different contexts (autocast, modes, saved-tensor "
                "hooks, flags of precision): the backward of all micro-batches has one. Call "
                "backward after the context has ended, or pass interleave=False."
            )
        self._states.places.check([state.owned for state in states])
        self._states.restore(states[0]._replace(generators=self._ambient.generators))
        before = self._states.generators.now()
        self._again = self.micro_batches[0]
        self._backward_of(self.micro_batches)
        self._keep_attributes(self._again)
        self._again = None
        if not _are_equal(before, self._states.generators.now()):
            raise OffloadError(
                "random numbers were drawn in backward (a checkpoint with "
                "preserve_rng_state=False?), which cannot be those of each micro-batch. Pass "
                "interleave=False."
            )

    def _turn_to(self, micro_batch: _MicroBatch) -> None:
        """Let backward find the attributes of a micro-batch: something of its is computed again."""
        if self._again is micro_batch or self._again is None:
            return
        self._keep_attributes(self._again)
        self._states.places.restore(micro_batch.state.owned)
        self._again = micro_batch

    def _keep_attributes(self, micro_batch: _MicroBatch) -> None:
        """Let a micro-batch go on with the attributes that its backward has left."""
        micro_batch.state = micro_batch.state._replace(owned=self._states.places.now())

    def _backward_of(self, micro_batches: Sequence[_MicroBatch]) -> None:
        graphs = [Graph(micro_batch.roots) for micro_batch in micro_batches]
        for micro_batch, graph in zip(micro_batches, graphs, strict=True):
            self._leaves.note(graph)
            self._owners.update(dict.fromkeys(graph.functions, micro_batch.index))
            if self._is_interleaved and self._states.places:
                graph.before_functions(functools.partial(self._turn_to, micro_batch))
        if self._is_interleaved:
            self._leaves.check_order(graphs)
        del graphs, graph  # backward frees what their nodes hold, one after the other
        self._begins_backward = True
        try:
            self._backward(
                [root for micro_batch in micro_batches for root in micro_batch.roots],
                [gradient for micro_batch in micro_batches for gradient in micro_batch.gradients],
            )
        finally:
            self._begins_backward = False

    def _unwind(self) -> None:
        """End the steps that are under way, each in its own state."""
        self._is_unwinding = True
        for micro_batch in self.micro_batches:
            if micro_batch.greenlet is None or micro_batch.has_ended:
                continue
            try:
                micro_batch.greenlet.throw(_Unwound)
            except _Unwound:
                pass
            except BaseException:
                logger.warning(
                    "micro-batch %d failed while it was ended", micro_batch.index, exc_info=True
                )
            finally:
                self._current = None


class _CarriedState:
    """The buffers and weights of models, which forwards that are interleaved must not write."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        for model in self._models:
            for name, module in model.named_modules():
                if (
                    isinstance(module, nn.modules.batchnorm._NormBase)
                    and module.training
                    and module.track_running_stats
                ):
                    raise OffloadError(
                        f"'{name}' ({type(module).__name__}) trains: its statistics depend on the "
                        "order of the micro-batches. Call eval() on it, or pass interleave=False."
                    )
        self._before = self._now()

    def _now(self) -> dict[tuple[int, str], tuple[int, int]]:
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for index, model in enumerate(self._models):
            for kind, named in (
                ("buffer", model.named_buffers()),
                ("weight", model.named_parameters()),
            ):
                for name, tensor in named:
                    found[index, f"{kind} '{name}'"] = id(tensor), count_writes(tensor)
            for name, module in model.named_modules():
                if (leaf := module.__dict__.get(HANDLE)) is not None:
                    found[index, f"a weight of '{name}'"] = 0, getattr(leaf, "data_writes", 0)
        return found

    def check(self) -> None:
        """Raise `OffloadError` where a forward has written to a buffer or a weight."""
        now = self._now()
        for (index, name), before in self._before.items():
            if now.get((index, name)) != before:
                raise OffloadError(
                    f"the forward writes to {name}: what one micro-batch leaves there "
                    "reaches the next in another order. Pass interleave=False."
                )


def _checked_loss(result: Any) -> Tensor:
    if isinstance(result, Tensor) and result.requires_grad:
        return result
    what = "a tensor without a gradient" if isinstance(result, Tensor) else type(result).__name__
    raise OffloadError(
        f"the step returned {what} and did not call backward; return the loss, or call "
        "loss.backward() once."
    )


def _context_of(state: ThreadState) -> Any:
    """Return what decides how a backward computes: of modes and hooks, that they are there."""
    pairs, refused = state.hooks
    kinds = [list(map(type, modes)) for modes in state.modes[:2]]
    flags = state.autocast, state.switches, state.kernels
    return len(pairs), refused, kinds, *flags, state.streams


def _are_equal(one: Any, other: Any) -> bool:
    """Whether states of generators are equal, of whatever they are made."""
    if isinstance(one, tuple | list):
        return all(map(_are_equal, one, other))
    same = one == other
    return bool(same if isinstance(same, bool) else same.all())


def _greenlet(run: Callable[[], None]) -> greenlet.greenlet:
    greenlets = _library()
    made: greenlet.greenlet = greenlets.greenlet(run)
    made.gr_context = contextvars.copy_context()
    return made


def _current_greenlet() -> greenlet.greenlet:
    current: greenlet.greenlet = _library().getcurrent()
    return current


def _library() -> Any:
    try:
        import greenlet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "oracle_offload.accumulate runs micro-batches in greenlets, and greenlet is not "
            "installed: pip install greenlet, or pass interleave=False.",
            name=error.name,
        ) from error
    return greenlet
