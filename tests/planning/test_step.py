"""What a step of a model without memory asks of the engine and of the device, use by use."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload._core import BACKWARD, FORWARD, RECOMPUTE
from oracle_offload.engine import simulator
from oracle_offload.engine.simulated_time import SimulatedTime
from oracle_offload.host.sizes import parse_size
from oracle_offload.planning import measure
from oracle_offload.planning.measure import Stage, Step, _Tracer, stages_of
from oracle_offload.train import activations

ROWS = 4


def stepped(model: nn.Module, **options: Any) -> Step:
    """The step of a plan; where the weights are does not matter to it."""
    model.eval()
    given: dict[str, Any] = dict(card=24, ram="64GB", rank=2)
    step = oracle_offload.plan(model, **{**given, **options}).step
    assert not model.training
    return step


def uses(step: Step) -> list[tuple[str, int]]:
    """Which leaf the engine is asked for, and why."""
    names = {number: name for name, number in step.numbers.items()}
    return [(names[event[1]], event[2]) for event in step.events if event[0] == "acquire"]


def products(step: Step) -> list[tuple[float, int, torch.dtype, bool]]:
    """The matrix products, which each torch computes alike."""
    works = [work for event in step.events if event[0] == "work" for work in event[1]]
    return [work for work in works if work[0]]


def product(rows: int, inner: int, columns: int, more: int = 0, size: int = 4) -> tuple[float, int]:
    """Operations and bytes of one."""
    moved = rows * inner + inner * columns + rows * columns + more
    return 2.0 * rows * inner * columns, size * moved


class Net(nn.Module):
    """A table, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 64)
        self.first = nn.Linear(64, 32, bias=False)
        self.last = nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(self.table(ids)))
        return result


def test_the_uses_and_the_work_of_a_lora() -> None:
    """Rows of a table are read over the link; below the LoRA nothing is computed backward."""
    step = stepped(Net(), sample={"ids": ((ROWS,), "int64")}, targets="first")
    assert step.why == "" and step.note == "no checkpointing, for which the class has no switch"
    assert step.numbers == {"table": 0, "first": 1, "last": 2} and step.regions == {}
    assert uses(step) == [("first", FORWARD), ("last", FORWARD), ("last", BACKWARD)]
    kinds = [event[0] for event in step.events]
    one = ["acquire", "work", "release", "work"]
    assert kinds == ["work", *one, *one, *one]
    acquired = [event[3] for event in step.events if event[0] == "acquire"]
    assert acquired == [event[1] for event in step.events if event[0] == "release"] == [1, 2, 3]
    rows = 4 * (2 * ROWS * 64) + ROWS * 8 - 4 * ROWS * 64  # what is read, and the numbers of rows
    assert step.events[0] == ("work", [(0.0, rows, torch.float32, True)])
    down, up = product(ROWS, 64, 2), product(ROWS, 2, 32)
    assert [work[:2] for work in products(step)] == [
        product(ROWS, 64, 32),
        down,
        up,
        product(ROWS, 32, 16, more=16),  # the bias
        product(ROWS, 16, 32),
        product(32, ROWS, 2),
        product(ROWS, 32, 2),
        product(2, ROWS, 64),
    ]
    assert {work[2:] for work in products(step)} == {(torch.float32, False)}
    assert step.used() == ({1, 2}, {2})


def test_the_work_of_a_full_training_in_bfloat16() -> None:
    given = {"ids": ((ROWS,), "int64")}
    step = stepped(Net(), sample=given, train="full", dtype="bf16", checkpointing=False)
    assert step.note == ""
    forward = [("first", FORWARD), ("last", FORWARD)]
    assert uses(step) == [*forward, ("last", BACKWARD), ("first", BACKWARD)]
    found = products(step)
    last, first = product(ROWS, 16, 32, size=2), product(ROWS, 32, 64, size=2)
    assert [work[:2] for work in found[:2]] == [
        product(ROWS, 64, 32, size=2),
        product(ROWS, 32, 16, more=16, size=2),
    ]
    assert {last, first, product(16, ROWS, 32, size=2), product(32, ROWS, 64, size=2)} == {
        work[:2] for work in found[2:]
    }
    assert {work[2:] for work in found} == {(torch.bfloat16, False)}


class Convolved(nn.Module):
    """Frozen convolutions, one with a LoRA; its results are named, and not all of them numbers."""

    def __init__(self, kind: type[Any] = nn.Conv2d, **options: Any) -> None:
        super().__init__()
        self.first = kind(4, 8, 3, bias=False, **options)
        self.last = kind(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mask": x > 0, "y": self.last(self.first(x)), "detached": x * 2}


@pytest.mark.parametrize(
    ("kind", "dims"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)], ids=["1d", "2d", "3d"]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_work_of_a_lora_on_a_convolution(kind: type[Any], dims: int, stride: int) -> None:
    options = dict(stride=stride, padding=1)
    model = Convolved(kind, **options)
    sample = {"x": (4, *[8] * dims)}
    step = stepped(model, sample=sample, targets="first", batch=3)
    assert uses(step) == [("first", FORWARD), ("last", FORWARD), ("last", BACKWARD)]
    places = 3 * (8 // stride) ** dims
    # Of the layer, of the two matrices of its LoRA, and of the last layer.
    assert [work[0] for work in products(step)[:4]] == [
        2.0 * places * 4 * 8 * 3**dims,
        2.0 * places * 4 * 2 * 3**dims,
        2.0 * places * 2 * 8,
        2.0 * places * 8 * 2,
    ]
    x, y = 3 * 4 * 8**dims, 8 * places
    assert products(step)[0][1] == 4 * (x + 4 * 8 * 3**dims + y)


class Blocks(nn.Module):
    """Blocks that are computed again in backward once the switch is turned on."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 32, bias=False)
        self.config = SimpleNamespace(use_cache=True)
        self.reentrant, self.checkpoints, self.asked = reentrant, False, False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpoints = True

    def enable_input_require_grads(self) -> None:
        self.asked = True

    def forward(self, x: Tensor) -> Any:
        assert self.training and not self.config.use_cache
        if self.asked:
            x = x.requires_grad_()
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(self.pair, block, x, use_reentrant=self.reentrant)
            else:
                x = self.pair(block, x)
        return SimpleNamespace(loss=self.head(x).square().mean())

    def pair(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(block(x))
        return y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_used_twice_more(reentrant: bool) -> None:
    """With reentrant ones the input has to ask for a gradient, as peft lets it."""
    given = dict(sample={"x": (32,)}, batch=ROWS, targets="all-linear", rank=1)
    names = [f"blocks.{number}" for number in range(3)]
    forward = [(name, FORWARD) for name in [*names, "head"]]
    plain = stepped(Blocks(reentrant), checkpointing=False, **given)
    assert plain.regions == {} and plain.note == ""
    # The input of the first block wants no gradient.
    backward = [("head", BACKWARD), *((name, BACKWARD) for name in names[:0:-1])]
    assert uses(plain) == [*forward, *backward]
    step = stepped(Blocks(reentrant), **given)
    assert step.regions == {0: 1, 1: 2, 2: 3} and step.note == ""
    again = [(n, kind) for n in reversed(names) for kind in (RECOMPUTE, BACKWARD)]
    assert uses(step) == [*forward, ("head", BACKWARD), *again]
    assert len(step.stages) == 5, "forward, backward of the head, and of each block"
    full = stepped(Blocks(), train="full", **given)
    assert uses(full)[-1] == ("blocks.0", RECOMPUTE), "the gradient of the input is not needed"
    assert step.used() == ({0, 1, 2, 3}, {0, 1, 2, 3})


class Deep(Blocks):
    """A dozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))


WIDE = dict(sample={"x": (32,)}, batch=1 << 13, targets="all-linear", rank=1, card=24, ram="64GB")
STATE = 32 * 4 << 13  # bytes: what is as large leaves


def said_of(plan: Any) -> str:
    (said,) = [text for text in plan.assumptions if "offload_activations" in text]
    return str(said)


def test_what_checkpoints_keep_may_leave_and_the_plan_says_what_that_buys() -> None:
    plan = oracle_offload.plan(Deep(), **WIDE)
    left, whole = plan.step.leaving(), plan.step.activations
    assert left is not None and whole is not None and plan.step.largest == STATE
    assert left.host_bytes == 14 * STATE, "the input of each block, the head's, and its result"
    # Four of the 14 stay, and two are in use where the most lives.
    assert left.device_bytes == whole - 8 * STATE
    assert left.longer == whole / left.device_bytes > 1.2
    assert said_of(plan).endswith(f"room for {left.longer:.1f} times the sequence")
    assert plan.to_dict()["activations_leaving"] == left._asdict()


def test_without_checkpoints_what_each_layer_saves_leaves() -> None:
    class Tanhs(Deep):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x).tanh()

    plan = oracle_offload.plan(Tanhs(), **{**WIDE, "checkpointing": False})
    left, whole = plan.step.leaving(), plan.step.activations
    assert left is not None and whole is not None
    # The input that adapters keep, and what each tanh has made: what is the loss's is none of it.
    assert left.host_bytes == 14 * STATE
    assert whole - 11 * STATE < left.device_bytes < whole - 8 * STATE
    one = oracle_offload.plan(Tanhs(), **{**WIDE, "checkpointing": False, "batch": 1 << 10})
    assert one.step.leaving() is None, "nothing is large enough"
    assert one.to_dict()["activations_leaving"] is None
    assert not [text for text in one.assumptions if "offload_activations" in text]


def test_what_the_host_has_room_for_bounds_the_sequence() -> None:
    plan = oracle_offload.plan(Deep(), **{**WIDE, "ram": 18 * STATE})
    assert said_of(plan).endswith("room for 1.2 times the sequence, where the host is full")
    plan = oracle_offload.plan(Deep(), **{**WIDE, "ram": 10 * STATE})
    assert said_of(plan).endswith("on the device: the host has no room for that")


def test_of_a_language_model_the_plan_says_how_many_tokens() -> None:
    class Tokens(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(max_position_embeddings=None, use_cache=True)
            self.table = nn.Embedding(10, 32)

        def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
            return super().forward(self.table(input_ids))

    plan = oracle_offload.plan(Tokens(), **{**WIDE, "sample": 4096, "batch": 2})
    left = plan.step.leaving()
    assert left is not None and left.longer > 1.2
    assert said_of(plan).endswith(f" times the sequence, of {int(left.longer * 4096)} tokens")


def test_the_plan_has_the_defaults_of_what_it_plans() -> None:
    default = inspect.signature(activations.offload_activations).parameters["least"].default
    assert parse_size(default) == measure._LEAST
    assert activations._LARGEST_ON_DEVICE == measure._HELD


class Silent(Blocks):
    """It has no method that makes its input require a gradient."""

    enable_input_require_grads: Any = None


class Unswitched(nn.Module):
    """It can be asked, but has no switch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def enable_input_require_grads(self) -> None:
        raise AssertionError("asked without a checkpoint")

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_the_input_is_asked_for_a_gradient_where_a_checkpoint_needs_it() -> None:
    given: dict[str, Any] = dict(sample={"x": (32,)}, targets="all-linear")
    assert stepped(Silent(), **given).why == ""
    assert stepped(Unswitched(), **given).why == ""


def test_a_sample_that_is_unknown_says_what_to_give() -> None:
    step = stepped(nn.Linear(4, 4))
    assert step.why.startswith("what Linear takes is not known: give sample= as a mapping")
    assert step.events == [] and step.stages == []


def test_a_padded_convolution_is_torchs_own_and_keeps_its_input() -> None:
    """One that pads by itself, by the operator, or by a word."""

    def planned(**options: Any) -> int:
        model = nn.Sequential(nn.Conv1d(8, 8, 1), *(nn.Conv1d(8, 8, 3, **options) for _ in "abcd"))
        found = stepped(model, sample={"input": (8, 64)}, targets="0", rank=1).activations
        assert found is not None
        return found

    rows = 8 * 64 * 4
    least = planned(padding=1)
    assert planned(padding="same") >= least + 2 * rows
    assert planned(padding=1, padding_mode="circular") >= least + 2 * rows


class Given(nn.Module):
    """Is given more than it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def test_what_a_step_is_given_counts_and_what_training_keeps_does_not() -> None:
    given: dict[str, Any] = dict(train="full", optimizer="sgd", batch=2)
    plain = stepped(Given(), sample={"x": (128,)}, **given)
    more = stepped(Given(), sample={"x": (128,), "more": (1000,)}, **given)
    assert plain.activations is not None and more.activations is not None
    assert more.activations - plain.activations == 2 * 1000 * 4
    assert plain.activations <= 2 * 128 * 128 * 4 + 10 * 2 * 128 * 4, "one gradient and its sum"
    assert plain.events[-1][0] == "work", "what comes after the last use counts too"
    lora = stepped(Given(), sample={"x": (128,)}, rank=64, batch=2)
    assert lora.activations is not None
    assert lora.activations <= 4 * 64 * 128 * 4 + 40 * 2 * 128 * 4, "not those of six layers"


def test_a_step_replayed_at_other_rates() -> None:
    """Each kind of operator at its rate; the tickets of micro-batches are apart."""
    device = simulator.preset("rtx4090")
    time = SimulatedTime(device)
    work = (1e9, 10**6, torch.bfloat16, False)
    rows = (1e9, 10**6, torch.bfloat16, True)
    events: list[tuple[Any, ...]] = [
        ("work", [rows, work]),
        ("acquire", 0, FORWARD, 1),
        ("release", 1),
        ("acquire", 1, BACKWARD, 2),
        ("work", [work]),
        ("release", 2),
        ("acquire", 0, RECOMPUTE, 3),
        ("release", 3),
    ]
    kernel = time.operator_seconds(1e9, 10**6, torch.bfloat16)
    link = time.link_seconds(10**6)
    assert kernel > 0 and link > 0 and link != kernel
    step = Step(events=events)
    assert step.replayed(time) == [
        ("launch", pytest.approx(link + kernel)),
        ("acquire", 0, FORWARD, -1, 1),
        ("release", 1),
        ("acquire", 1, BACKWARD, 0, 2),
        ("launch", pytest.approx(kernel)),
        ("release", 2),
        ("acquire", 0, RECOMPUTE, 0, 3),
        ("release", 3),
    ]
    assert step.phases(time) == (pytest.approx(link + kernel), pytest.approx(kernel))
    assert step.used() == ({0}, {0, 1})
    three = Step(events=events, regions={0: 1}, micro_batches=3, together=True)
    replayed = three.replayed(time)
    assert replayed[0] == ("launch", pytest.approx(3 * (link + kernel))), "of no region"
    apart = 1 << 32
    assert [event[1:] for event in replayed if event[0] == "acquire"] == [
        *((0, FORWARD, -1, 1 + n * apart) for n in range(3)),
        (1, BACKWARD, 0, 2),
        *((0, RECOMPUTE, 0, 3 + n * apart) for n in range(3)),
    ]
    forward = Step(events=events[:3])
    assert forward.phases(time) == (pytest.approx(link + kernel), 0)
    assert forward.used() == ({0}, set())


def test_memory_is_counted_from_its_first_tensor_to_its_last() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = torch.zeros(4, 4)
    tracer = _Tracer(model)
    first, second = torch.zeros(100), torch.zeros(200)
    tracer.count({"first": first, "view": first[1:], "kept": model.weight})
    tracer.count([second, [first, model.weight.grad], "no tensor"])
    del first
    tracer.end_stage()  # 800 are left of 1200: what forward leaves
    third = torch.zeros(300)
    tracer.count([third])
    del second, third
    last = torch.zeros(25)
    tracer.count([last])
    tracer.end_stage()
    tracer.end_stage()
    assert stages_of(tracer.marks) == [Stage(1200, 800), Stage(2000, 800), Stage(100, 0)]
    kept = torch.zeros(50)
    tracer.keep([kept])
    tracer.count([kept])
    tracer.end_stage()
    assert stages_of(tracer.marks)[3:] == [Stage(100, 100)]


class Wrong(nn.Linear):
    """Its forward fails, or gives nothing that what is trained changes."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(4, 4)
        self.error = error

    def forward(self, x: Tensor) -> Any:
        if self.error is not None:
            raise self.error
        return (x.detach(), [x > 0])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "one"),
        (KeyError(), "KeyError"),
        (None, "no result of the model depends on what is trained"),
    ],
)
def test_a_forward_that_fails_is_said_in_one_line(error: Exception | None, said: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.adapter = Wrong(error), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.wrong(x)

    step = stepped(Outer(), sample={"x": (4,)}, targets="adapter")
    assert step.why == f"its forward or backward cannot be run without values: {said}"
    assert step.events == [] and step.activations is None
