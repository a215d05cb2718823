"""An interrupt at any instruction of a loan gives back what was taken, and training goes on."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Container

import pytest
import torch
from equality import assert_same, attached
from torch import nn

from oracle_offload import attach
from oracle_offload import manager as managers
from oracle_offload.engine import engines, exemption, locks
from oracle_offload.layers import any as lent
from oracle_offload.layers import autocast, embedding, loan, swap
from oracle_offload.layers.managed import is_managed
from oracle_offload.model import answers, arena, attachment, selection

FILES = {module.__file__ for module in (loan, lent, embedding, locks, exemption, autocast)}
FILES.add(__file__)
# What takes, and what gives back.
BORROWS = set(
    "lend lend_to _lend_to borrow _keep _with_foreign take_again lending restore _putting "
    "_exchanging within exempt saving kept_cast as_an_optimizer".split()
)
# What gives back at detach; what these take is given back by their ends.
CLOSES = set(
    "_end end close _close_patiently _let_go_of_layers _release_layer swap_out remove take_back "
    "_give_back_segments _give_back exchange_segments leave close_if_unused _close_engine".split()
)
CLOSERS = {m.__file__ for m in (managers, engines, swap, answers, arena, attachment)}


class Pair(nn.Module):
    """Two rows of weights in one module, which no operator is known of."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(64, 64))
        self.right = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x @ self.left @ self.right


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8)

    def forward(self, x):
        return self.inner(x[:, :8])[0].repeat(1, 8)


KINDS = {
    "linear": lambda: nn.Linear(64, 64),
    "convolution": lambda: nn.Conv1d(6, 6, 33, padding=16),
    "table": lambda: nn.Embedding(40, 64),
    "any": Pair,
    "recurrent": Recurrent,
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(KINDS[kind](), KINDS["linear"]())
    model[1].requires_grad_(False)
    x = torch.arange(30) if kind == "table" else torch.randn(6, 64)
    return model, x


def train(model, x):
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.requires_grad)]


class Interrupt:
    """Raises at the n-th instruction of the files, or after the n-th call of C that they make."""

    def __init__(
        self, number: int, files: Container[str] = FILES, names: Container[str] = BORROWS
    ) -> None:
        self.left, self.files, self.names = number, files, names

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            sys.setprofile(None)
            raise KeyboardInterrupt

    def at_opcodes(self, step: Callable[[], object]) -> object:
        def inside(frame, event, _):
            if event == "opcode":
                self.count()
            return inside

        def enter(frame, event, _):
            if frame.f_code.co_filename not in self.files or frame.f_code.co_name not in self.names:
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return inside

        sys.settrace(enter)
        try:
            return step()
        finally:
            sys.settrace(None)

    def after_calls_of_c(self, step: Callable[[], object]) -> object:
        def seen(frame, event, _):
            if event == "c_return" and frame.f_code.co_filename in FILES:
                self.count()

        sys.setprofile(seen)
        try:
            return step()
        finally:
            sys.setprofile(None)


def check_given_back(manager) -> None:
    engine = manager.state.engine
    assert [unit for unit, _, _, pins in engine.residents() if pins] == []
    assert not manager.state.lock.is_held()
    for layer in manager.layers:
        if isinstance(layer, lent.AnyLayer):
            assert not layer._turn.is_held() and not layer.is_lending()
        for name, master in layer.masters.named():
            assert layer.parameters[name] is master


@pytest.mark.parametrize("how", [Interrupt.at_opcodes, Interrupt.after_calls_of_c])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "recurrent")) for k in KINDS]
)
def test_an_interrupt_at_any_instruction_of_a_loan_gives_back_what_was_taken(kind, how):
    managed, x = build(kind)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=1.0) as manager:
        assert len(manager.layers) == 2
        expected = train(resident, x)
        assert_same(train(managed, x), expected)
        number = 0
        while True:
            number += 1
            interrupt = Interrupt(number)
            kept = None
            try:
                how(interrupt, lambda: train(managed, x))
            except KeyboardInterrupt as error:
                # A traceback keeps the tensors that are lent to code, and no other loan.
                kept = error if kind in ("linear", "convolution") else None
            if interrupt.left > 0:
                break
            check_given_back(manager)
            del kept
            assert lent._top_hooks is None or lent._top_hooks(True) is None
            assert_same(train(managed, x), expected, f"after interrupt {number}")
        assert number > (100 if how is Interrupt.at_opcodes else 30), number
        check_given_back(manager)
        manager.detach()
    assert_same(train(managed, x), expected, "detached")


@pytest.mark.parametrize("how", [Interrupt.at_opcodes, Interrupt.after_calls_of_c])
def test_an_interrupt_leaves_neither_an_exemption_nor_hooks_of_saved_tensors(how):
    leaf = torch.ones(3, 3, requires_grad=True)

    def as_an_optimizer():
        with exemption.exempt():
            autocast.kept_cast(leaf, torch.bfloat16)

    number = 0
    with torch.autocast("cpu", torch.bfloat16):
        while True:
            number += 1
            interrupt = Interrupt(number)
            with contextlib.suppress(KeyboardInterrupt):
                how(interrupt, as_an_optimizer)
            assert exemption.depth() == 0
            assert lent._top_hooks is None or lent._top_hooks(True) is None
            if interrupt.left > 0:
                break
    assert number > (30 if how is Interrupt.at_opcodes else 5)


def test_an_interrupt_at_any_instruction_of_detach_lets_it_go_on_from_there():
    """Another model can be attached meanwhile, and a second detach ends it; every eleventh."""
    managed, x = build("linear")
    expected = train(copy.deepcopy(managed), x)
    kinds = [type(module) for module in managed.modules()]
    number, tried = 1, 0
    while True:
        manager = attach(managed, "cpu", offload_percent=1.0)
        assert_same(train(managed, x), expected)
        interrupt = Interrupt(number, CLOSERS, CLOSES)
        with contextlib.suppress(KeyboardInterrupt):
            interrupt.at_opcodes(manager.detach)
        if interrupt.left > 0:
            break
        with attached(nn.Linear(64, 64), "cpu") as other:
            assert len(other.layers) == 1
        manager.detach()
        tried += 1
        assert [type(module) for module in managed.modules()] == kinds, f"instruction {number}"
        assert not any(map(is_managed, managed.modules())) and not engines.open_states()
        assert_same(train(managed, x), expected, f"after interrupt {number}")
        number += 11
    assert tried > 40


def test_an_interrupt_while_an_arena_is_replaced_leaves_one_that_computes():
    managed, x = build("linear")
    expected = train(copy.deepcopy(managed), x)
    names = {"_give_back_segments", "_give_back", "remove"}
    with attached(managed, "cpu", offload_percent=1.0) as manager:
        for number in range(1, 1000, 5):
            share = (0.5, 1.0)[number % 2]
            interrupt = Interrupt(number, CLOSERS, names)
            with contextlib.suppress(KeyboardInterrupt):
                interrupt.at_opcodes(lambda share=share: manager.set_budget(offload_percent=share))
            assert_same(train(managed, x), expected, f"after interrupt {number}")
            if interrupt.left > 0:
                break
        assert 50 < number < 900, number
