"""What the witness knows of operators, what it lets pass, and what time it charges."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from equality import attached
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oracle_offload import OffloadError
from oracle_offload.engine import simulator
from oracle_offload.engine.exemption import exempt, is_exempt
from oracle_offload.engine.operators import Operator, operator_of, tensors_in
from oracle_offload.model import witness as witness_module
from oracle_offload.model.witness import Witness, refusal


class Seen(TorchDispatchMode):
    """Keeps what is known of each operator that runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = operator_of(func)
        found = list(operator.tensors(args, kwargs or {}))
        self.calls[func.name()] = operator, found
        return func(*args, **(kwargs or {}))


def known(call):
    with Seen() as seen:
        call()
    return seen.calls


def test_written_arguments_are_told_from_those_that_are_read():
    x, y, out = torch.ones(3), torch.ones(3), torch.empty(3)
    calls = known(lambda: (x.add_(y), torch.add(x, y, out=out), torch.cat([x, y])))
    assert [(t is x, w) for t, w in calls["aten::add_.Tensor"][1]] == [(True, True), (False, False)]
    found = calls["aten::add.out"][1]
    assert [(t is out, w) for t, w in found] == [(False, False), (False, False), (True, True)]
    assert [w for _, w in calls["aten::cat"][1]] == [False, False]
    assert operator_of(torch.ops.aten.add.Tensor) is operator_of(torch.ops.aten.add.Tensor)


@pytest.mark.parametrize(
    ("call", "touches"),
    [
        (lambda x: x.view(4), False),
        (lambda x: x.t(), False),
        (lambda x: torch.empty_like(x), False),
        (lambda x: torch.zeros_like(x), False),
        (lambda x: x.new_zeros(2), False),
        (lambda x: torch.empty(3), False),
        (lambda x: x + 1, True),
        (lambda x: x.zero_(), True),
        (lambda x: x.clone(), True),
        (lambda x: x.sum(), True),
    ],
)
def test_operators_that_read_no_bytes_are_known(call, touches):
    calls = known(lambda: call(torch.ones(2, 2)))
    (operator, _) = calls[[*calls][-1]]
    assert operator.touches_bytes == touches


def test_tensors_are_found_in_nested_lists_and_in_what_wrappers_are_made_of():
    x, y = torch.ones(1), torch.ones(2)

    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, first, second):
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        def __init__(self, first, second):
            self.first, self.second = first, second

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("nothing is computed")

        def __tensor_flatten__(self):
            return ["first", "second"], None

    found = list(tensors_in([x, (y, [x]), "text", None, Pair(x, Pair(y, x))]))
    assert [t is x for t in found] == [True, False, True, True, False, True]


# ---- exemption ----


def test_only_the_thread_and_the_time_of_an_exemption_are_exempt():
    assert not is_exempt()
    with exempt():
        with exempt():
            assert is_exempt()
        assert is_exempt()
    assert not is_exempt()
    with pytest.raises(KeyError), exempt():
        raise KeyError
    assert not is_exempt()


def test_an_optimizer_step_is_exempt_and_what_it_calls():
    asked = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            asked.append(is_exempt())

    Optimizer([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert asked == [True] and not is_exempt()


# ---- what passes ----


def test_a_master_is_refused_by_a_strict_witness_alone():
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model):
        with Witness(), pytest.raises(OffloadError, match=r"aten\.mul\S* reads the host master of"):
            model[0].weight.detach() * 2
        with Witness(), pytest.raises(OffloadError, match=r"aten\.mul_\S* writes the host master"):
            model[0].weight.data.mul_(2)
        with Witness(strict=False), torch.no_grad():
            model[0].weight.detach() * 2
        with Witness(), exempt():
            model[0].weight.data.mul_(2)


@pytest.mark.parametrize(("name", "ignored"), [("a.b.weight", "a.b"), ("weight", "weight")])
def test_a_refusal_names_what_to_ignore(name, ignored):
    said = str(refusal("operator x reads", name))
    assert said.startswith(f"operator x reads the host master of '{name}': ")
    assert said.endswith(f"ignore_modules=[{ignored!r}]).")


def test_operators_and_reads_of_the_arena_are_counted():
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model), torch.no_grad():
        with Witness() as witness:
            torch.ones(2) + 1
        assert (witness.operators, witness.arena_reads) == (2, 0)
        with Witness() as witness:
            model(torch.ones(2, 8))
        assert witness.arena_reads == 1 and witness.operators >= 2


def test_an_operators_accesses_are_declared_on_the_device_that_each_is_of(monkeypatch):
    declared = []
    monkeypatch.setattr(simulator, "launch", lambda *given: declared.append(given))
    one, other = (SimpleNamespace(simulated=True, stream=lambda n=n: n) for n in (1, 2))
    card = SimpleNamespace(simulated=False)
    reads = [(10, 14, one), (20, 21, other), (5, 6, card)]
    witness_module._declare(reads, [(30, 38, one), (7, 8, card)])
    assert declared == [(1, [(10, 4)], [(30, 8)], 0.0), (2, [(20, 1)], [], 0.0)]


# ---- time ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_operator_is_charged_its_flops_or_its_bytes_and_a_launch(dtype):
    a, b = torch.ones(64, 32, dtype=dtype), torch.ones(32, 16, dtype=dtype)
    with attached(nn.Sequential(nn.Linear(8, 8))) as manager:
        time = manager.state.time

        def charged(call):
            begin = simulator.finish()
            with Witness(clock=True):
                assert time.witnesses == 1 and time.kernel_seconds(1e12, 1e12, dtype) == 0.0
                result = call()
            assert time.witnesses == 0 and time.pending_kernel_s == 0.0
            return simulator.finish() - begin, result

        seconds, product = charged(lambda: a @ b)
        nbytes = a.nbytes + b.nbytes + product.nbytes
        expected = time.operator_seconds(2 * 64 * 32 * 16, nbytes, dtype)
        assert seconds == pytest.approx(expected, rel=1e-6)
        seconds, _ = charged(lambda: a.add_(1))
        assert seconds == pytest.approx(time.operator_seconds(0, 2 * a.nbytes, dtype), rel=1e-6)
        assert charged(lambda: a.view(-1))[0] == 0.0
        seconds, _ = charged(lambda: (a.add_(1), a.add_(1)))
        both = 2 * time.operator_seconds(0, 2 * a.nbytes, dtype)
        assert seconds == pytest.approx(both, rel=1e-6)
        device = simulator.get_device(0)
        rate = device.tflops * 1e12 / (2 if dtype is torch.float32 else 1)
        assert time.operator_seconds(1e15, 1, dtype) == 1e15 / rate + device.launch_s
        slow = time.operator_seconds(1, 1e12, dtype)
        assert slow == 1e12 / (device.memory_gbps * 1e9) + device.launch_s


def test_an_operator_without_a_schema_may_touch_anything():
    assert Operator(object()).touches_bytes


def test_what_an_operator_only_writes_of_the_arena_is_declared_and_charged_at_once(monkeypatch):
    declared = []
    with attached(nn.Sequential(nn.Linear(64, 64))) as manager:
        (segment,) = manager.state.segments
        begin = segment.address - segment.base
        written = segment.tensor[begin : begin + 512]
        monkeypatch.setattr(simulator, "launch", lambda *given: declared.append(given))
        with Witness(clock=True) as witness:
            written.zero_()
            assert manager.state.time.pending_kernel_s == 0.0
        stream = manager.state.stream()
        monkeypatch.undo()
    (access, charge) = declared
    assert access == (stream, [], [(segment.address, 512)], 0.0)
    assert charge[:3] == (stream, (), ()) and charge[3] > 0
    assert witness.arena_reads == 0


@pytest.mark.parametrize("declare", [False, True])
def test_what_an_optimizer_does_to_a_master_is_declared_where_that_is_asked_for(
    monkeypatch, declare
):
    declared = []
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with attached(model), exempt():
        weight = model[0].weight.data
        with monkeypatch.context() as patch:
            patch.setattr(simulator, "host_access", lambda *given: declared.append(given))
            with Witness(declare=declare):
                weight.mul_(2)
        assert declared == [(weight.data_ptr(), weight.nbytes, True)] * declare


def test_a_witness_follows_what_is_attached_and_detached_meanwhile():
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    with attached(first) as manager, Witness():
        with attached(second):
            for model in (first, second):
                with pytest.raises(OffloadError, match="reads the host master"):
                    model[0].weight.detach() * 2
        second[0].weight.detach() * 2
        manager.detach()
        first[0].weight.detach() * 2


def test_a_witness_charges_by_the_clock_for_as_long_as_it_is_told_to():
    with attached(nn.Sequential(nn.Linear(8, 8))) as manager:
        witness = Witness(clock=True)
        with witness:
            assert manager.state.time.witnesses == 1
        with pytest.raises(KeyError), witness:
            raise KeyError
        assert manager.state.time.witnesses == 0
        witness.clock = False
        with witness:
            torch.ones(2) + 1
        assert manager.state.time.witnesses == 0 == manager.state.time.pending_kernel_s
