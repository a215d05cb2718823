"""The first-step proof: one block, managed against resident, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from typing import ClassVar

import pytest
import torch
from equality import assert_same, attached, gradients
from models import Parts
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.train import first_step_proof
from oracle_offload.train.survive import proof

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale=None):
        x = x + self.norm(self.drop(self.outer(self.inner(x).relu())))
        return (x, x * scale) if scale is not None else (x, x)


class Net(nn.Module):
    def __init__(self, kind=None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.kind = kind

    def forward(self, x):
        for block in self.blocks:
            if self.kind is None:
                x, _ = block(x, scale=2.0)
            else:
                x, _ = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


def step(model, device, autocast=False):
    torch.manual_seed(3)
    x = torch.randn(5, WIDTH).to(device).requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", [None, "reentrant", "plain"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_block_is_proved_and_training_is_not_disturbed(kind, frozen, device):
    model = Net(kind)
    if frozen:
        model.blocks.requires_grad_(False)
    resident = copy.deepcopy(model).to(device)
    with attached(model, device):
        autocast = kind == "plain"
        with first_step_proof(model) as proof:
            loss = step(model, device, autocast)
        after = torch.get_rng_state()
        assert proof.equal and proof.block == "blocks.0" and proof.layers >= 2
        # Two results, the input; and of two layers and a norm the weights and biases.
        assert proof.compared == 3 + (0 if frozen else 6) and proof.differing == []
        assert_same(loss, step(resident, device, autocast))
        assert torch.equal(after, torch.get_rng_state())
        assert_same(gradients(model), gradients(resident))
        assert_same(dict(model.named_buffers()), dict(resident.named_buffers()))
        assert_same(step(model, device), step(resident, device))


def test_a_block_that_computes_other_bits_is_refused(device, monkeypatch):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with attached(model, device) as manager:
        layer = manager.layers[0]
        honest = type(layer).__call__

        def off_by_a_bit(self, x):
            y = honest(self, x)
            above = torch.nextafter(y.detach(), torch.full_like(y, torch.inf))
            return y + (above - y.detach())

        monkeypatch.setattr(type(layer), "__call__", off_by_a_bit)
        with (
            pytest.raises(OffloadError, match=r"'0' does not compute .* bits: result 0 differ \(1"),
            first_step_proof(model) as proof,
        ):
            model(torch.ones(2, WIDTH, device=device)).sum().backward()
        assert not proof.equal and proof.compared == 4
        monkeypatch.undo()


class Unsteady(torch.autograd.Function):
    """The identity; each backward adds the next of `noise` to the gradient."""

    noise: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + Unsteady.noise.pop(0)


def unsteady_block():
    """As flash attention: its result repeats, and gradients of what comes before do not."""
    return Parts(
        lambda parts, x: parts.after(Unsteady.apply(parts.before(x))),
        before=nn.Linear(WIDTH, WIDTH),
        after=nn.Linear(WIDTH, WIDTH),
    )


UNSTEADY = ["gradient of input 0", "gradient of before.weight", "gradient of before.bias"]


@pytest.mark.parametrize("compute_is_right", [True, False])
def test_what_the_resident_copy_does_not_repeat_is_named_and_the_rest_compared(
    compute_is_right, device, monkeypatch, caplog
):
    model = nn.Sequential(unsteady_block(), nn.Linear(WIDTH, WIDTH))
    Unsteady.noise[:] = range(100)
    with attached(model, device) as manager:
        assert len(manager.layers) == 3
        if not compute_is_right:
            layer = manager.layers[1]
            honest = type(layer).__call__
            wrong = lambda self, x: honest(self, x) + (self is layer)  # noqa: E731
            monkeypatch.setattr(type(layer), "__call__", wrong)
        error = pytest.raises(OffloadError, match=r"bits: result 0 differ \(1 of 3\), in which")
        with (
            contextlib.nullcontext() if compute_is_right else error,
            first_step_proof(model) as found,
        ):
            model(torch.ones(2, WIDTH, device=device)).sum().backward()
        monkeypatch.undo()
    assert found.not_deterministic == UNSTEADY and found.compared == 3
    assert found.equal is compute_is_right
    said = "is not deterministic when resident: " + ", ".join(UNSTEADY) + " (3 of 6 tensors)"
    assert [said in caplog.text, "use_deterministic_algorithms" in caplog.text] == (
        [compute_is_right] * 2
    )


def test_a_copy_that_repeats_itself_by_luck_is_asked_again_before_a_block_is_called_wrong(device):
    model = nn.Sequential(unsteady_block())
    with attached(model, device):
        x = torch.ones(2, WIDTH, device=device)
        # Of training, of the managed repetition, and of the copy, which differs in its third run.
        Unsteady.noise[:] = [0, 1, 2, 2, 3]
        with first_step_proof(model) as found:
            model(x).sum().backward()
        assert found.not_deterministic == UNSTEADY and found.equal and not Unsteady.noise
        Unsteady.noise[:] = [0, 1] + [2] * proof._MOST_RUNS
        with (
            pytest.raises(OffloadError, match=r"gradient of before.bias differ \(3 of 6\)"),
            first_step_proof(model) as found,
        ):
            model(x).sum().backward()
        assert not found.equal and not found.not_deterministic and not Unsteady.noise


def test_a_block_of_which_nothing_repeats_is_neither_right_nor_wrong(device, caplog):
    noise = iter(range(100))

    restless = Parts(
        lambda parts, x: parts.layer(x.float()) + next(noise), layer=nn.Linear(WIDTH, WIDTH)
    )
    model = nn.Sequential(restless.requires_grad_(False))
    with attached(model, device), first_step_proof(model) as found:
        model(torch.ones(2, WIDTH, dtype=torch.int64, device=device))
    assert found.not_deterministic == ["result 0"] and not found.equal and not found.compared
    assert "resident block's bits" not in caplog.text


def test_a_block_can_be_named_and_what_cannot_be_proved_is_refused(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU()), nn.Linear(WIDTH, 1))
    with (
        pytest.raises(OffloadError, match="Sequential is not attached"),
        first_step_proof(model),
    ):
        pass
    with attached(model, device):
        with (
            pytest.raises(ValueError, match=r"block='x': the model has no"),
            first_step_proof(model, "x"),
        ):
            pass
        with (
            pytest.raises(OffloadError, match="no layer in '1' is managed"),
            first_step_proof(model, "1"),
        ):
            pass
        with pytest.raises(OffloadError, match="'0' was not called"), first_step_proof(model):
            pass
        with first_step_proof(model, "2") as proof:
            model(torch.ones(1, WIDTH, device=device)).sum().backward()
        assert proof.equal and proof.block == "2"
        assert not any(module._forward_pre_hooks for module in model[2].modules())


def test_a_model_without_a_list_is_one_block_and_needs_tensors_to_compare(device):
    def compute(parts, x):
        y = parts.layer(x)
        return {} if parts.mute else {"y": y}

    model = Parts(compute, layer=nn.Linear(WIDTH, WIDTH), mute=False)
    with attached(model, device):
        with first_step_proof(model) as proof:
            model(torch.ones(1, WIDTH, device=device))["y"].sum().backward()
        assert proof.equal and proof.block == ""
        model.mute = True
        with (
            pytest.raises(OffloadError, match="'' returned no tensor to compare"),
            first_step_proof(model),
        ):
            model(torch.ones(1, WIDTH, device=device))


def test_an_error_of_the_step_passes_and_takes_the_hook_along(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with attached(model, device):
        with pytest.raises(KeyError), first_step_proof(model):
            raise KeyError
        assert not model[0]._forward_pre_hooks
    assert oracle_offload.train.FirstStepProof("x").equal is False


def test_an_error_of_the_repeated_call_leaves_generators_and_buffers_as_they_were(device):
    class Fails(Block):
        calls = 0

        def forward(self, x):
            result = super().forward(x)
            self.calls += 1
            if self.calls == 2:
                raise KeyError
            return result[0]

    model = nn.Sequential(Fails())
    with attached(model, device):
        with pytest.raises(KeyError), first_step_proof(model):
            model(torch.ones(2, WIDTH, device=device))
            state = torch.get_rng_state()
            buffers = {name: b.cpu().clone() for name, b in model.named_buffers()}
        assert torch.equal(torch.get_rng_state(), state)
        assert_same({name: b.cpu() for name, b in model.named_buffers()}, buffers)


def test_a_block_may_depend_on_what_is_outside_and_trains_alone(device, caplog):
    outside = torch.ones(1, device=device, requires_grad=True)

    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(Parts(lambda parts, x: parts.layer(x.float()) * outside, layer=frozen))
    with attached(model, device), caplog.at_level("INFO"):
        with first_step_proof(model) as found:
            model(torch.ones(2, WIDTH, dtype=torch.int64, device=device))
        assert found.equal and found.compared == 1
    said = "first-step proof: '0' computes the resident block's bits, 1 tensors compared"
    assert said in caplog.messages


def test_the_resident_copy_needs_no_second_copy_on_the_host(device, monkeypatch):
    model = nn.Sequential(Block())
    with attached(model, device):
        for kind in (nn.Parameter, torch.Tensor):
            monkeypatch.setattr(kind, "__deepcopy__", lambda *given: pytest.fail("copied"))
        resident = proof._resident_copy(model[0], torch.device(device))
        assert_same(dict(resident.named_buffers()), dict(model[0].named_buffers()))
        for name, parameter in resident.named_parameters():
            assert parameter.requires_grad, name
            assert parameter.device.type == torch.device(device).type, name
        monkeypatch.undo()


def test_what_a_block_was_given_is_kept_as_it_was():
    tensor = torch.ones(2, requires_grad=True)
    for keep in (proof._kept, proof._as_input):
        assert keep("a") == "a" and keep(3.5) == 3.5 and keep(None) is None
        kept = keep(tensor)
        assert kept.is_leaf and kept.requires_grad and kept.data_ptr() != tensor.data_ptr()
        assert_same(kept.detach(), tensor.detach())
    assert not proof._kept(torch.ones(2)).requires_grad
    assert proof._as_input(torch.ones(2)).requires_grad
    assert not proof._as_input(torch.arange(2)).requires_grad


def test_the_same_bits_are_of_one_dtype_and_shape_whatever_they_mean():
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2, 3)
    for pair in ((None, None), (nan, nan.clone()), (one, one.t().contiguous().t())):
        assert proof._same_bits(*pair)
    others = [(None, one), (one, None), (one, one.double()), (one, one.view(3, 2))]
    others += [(torch.tensor(0.0), torch.tensor(-0.0)), (one, one + 1)]
    others += [(torch.zeros(2), torch.zeros(2, dtype=torch.int32))]
    assert not any(proof._same_bits(*pair) for pair in others)


def test_the_block_is_the_first_of_the_longest_list():
    short, long = nn.ModuleList([nn.ReLU()]), nn.ModuleList([nn.ReLU(), nn.ReLU()])
    model = nn.Module()
    model.short, model.inner = short, nn.Module()
    model.inner.long, model.empty = long, nn.ModuleList()
    assert proof._first_block(model) == "inner.long.0"
    assert proof._first_block(nn.Sequential(nn.ReLU(), nn.ReLU())) == "0"
    assert proof._first_block(nn.Linear(2, 2)) == ""
    assert proof._first_block(nn.ModuleDict({"none": nn.ModuleList()})) == ""
