"""Each recipe on a managed model, against plain torch on the resident one."""

from __future__ import annotations

import contextlib
import copy
from typing import ClassVar

import pytest
import torch
from equality import assert_same, attached, gradients, resident_pair
from torch import nn

from oracle_offload.train.recipes.accumulation import backward_weighted, evaluate
from oracle_offload.train.recipes.attention import AttentionBackends
from oracle_offload.train.recipes.checkpointing import set_checkpointing
from oracle_offload.train.recipes.long_sequences import (
    Chunk,
    carried,
    chunks_of,
    declared,
    next_token_loss,
)
from oracle_offload.train.recipes.mixed_precision import MixedPrecision, best_dtype


@pytest.fixture
def pair():
    torch.manual_seed(0)
    parts = (part for _ in range(6) for part in (nn.Linear(128, 128), nn.Tanh()))
    return resident_pair(nn.Sequential(*parts))


def uses_the_engine(manager):
    assert len(manager.layers) >= 6
    assert manager.state.engine.stats()["h2d_bytes"] > 0


# ---- mixed precision ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_mixed_precision_is_what_plain_torch_does(pair, device, dtype):
    """With float16 through a scaler, and with clipping; None is float32."""
    managed, resident = pair
    resident.to(device)
    x = torch.randn(4, 128).to(device)
    plain = torch.optim.SGD(resident.parameters(), lr=0.1)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind) if dtype is torch.float16 else None
    for _ in range(3):
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            loss = resident(x).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(resident.parameters(), 0.01)
        if scaler is None:
            plain.step()
        else:
            scaler.step(plain)
            scaler.update()
        plain.zero_grad()
    with attached(managed, device) as manager:
        amp = MixedPrecision(device, dtype is not None, dtype)
        assert amp.dtype is dtype and (amp.scaler is not None) is (dtype is torch.float16)
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
        for _ in range(3):
            with amp.autocast():
                loss = managed(x).float().square().mean()
            amp.backward(loss)
            assert amp.step(optimizer, managed.parameters(), 0.01)
            optimizer.zero_grad()
        uses_the_engine(manager)
    assert_same(dict(managed.named_parameters()), dict(resident.named_parameters()))
    assert amp.skipped == 0 and amp.hint == ""


def test_without_a_norm_nothing_is_clipped(pair):
    managed, resident = pair
    for model, step in ((managed, MixedPrecision("cpu", False).step), (resident, None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 128)).square().sum().backward()
        optimizer.step() if step is None else step(optimizer)
    assert_same(dict(managed.named_parameters()), dict(resident.named_parameters()))


def test_gradients_of_others_are_not_clipped():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (3 * model(torch.ones(2, 4))).sum().backward()
    bias = model.bias.grad.clone()
    MixedPrecision("cpu", False).step(optimizer, iter([model.weight]), 0.01)
    assert model.weight.grad.norm() <= 0.011 and torch.equal(model.bias.grad, bias)


def test_a_norm_without_parameters_is_that_of_the_optimizers(pair):
    one, other = pair
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 128)).square().sum().backward()
        named = {"parameters": model.parameters()} if model is one else {}
        MixedPrecision("cpu", False).step(optimizer, max_norm=0.01, **named)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-3, atol=0.0)
    assert_same(dict(one.named_parameters()), dict(other.named_parameters()))


def test_a_step_without_finite_gradients_is_left_out_and_told_after_the_fourth():
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    amp = MixedPrecision("cpu", dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number in range(1, 6):
        amp.backward(model(torch.ones(1, 4)).sum())
        model.weight.grad.fill_(float("inf"))
        assert not amp.step(optimizer)
        assert amp.skipped == number
        assert ("float16 cannot hold" in amp.hint) is (number >= 4)
        optimizer.zero_grad()
    assert_same(dict(model.state_dict()), dict(before))
    assert amp.scaler.get_scale() == 65536 / 2**5
    amp.backward(model(torch.ones(1, 4)).sum())
    assert amp.step(optimizer)
    amp.hint = ""  # as code does that has shown the hint
    for _ in range(3):
        optimizer.zero_grad()
        amp.backward(model(torch.ones(1, 4)).sum())
        model.weight.grad.fill_(float("inf"))
        assert not amp.step(optimizer) and amp.hint == "", "no four in a row"


def test_the_dtype_is_bfloat16_where_the_device_has_it(monkeypatch):
    assert best_dtype("cpu") is MixedPrecision("cpu").dtype is torch.bfloat16
    asked = []

    @contextlib.contextmanager
    def current(device):
        asked.append(device)
        yield
        asked.pop()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda emulated: asked == [torch.device("cuda:1")]
    )
    assert best_dtype("cuda:1") is torch.bfloat16
    assert best_dtype("cuda:0") is torch.float16


# ---- accumulation and evaluation ----


@pytest.mark.parametrize("sizes", [(4,), (4, 2, 1)])
def test_batches_count_by_their_weight(pair, device, sizes):
    managed, resident = pair
    resident.to(device)
    batches = [torch.randn(size, 128).to(device) for size in sizes]
    mean = 0.0
    for batch in batches:
        loss = resident(batch).square().sum() / sum(sizes)
        loss.backward()
        mean += loss.item()
    with attached(managed, device) as manager:
        found = backward_weighted(batches, lambda x: managed(x).square().sum(), len)
        assert found == mean
        assert_same(gradients(managed), gradients(resident))
        uses_the_engine(manager)
    whole = copy.deepcopy(resident)
    whole.zero_grad()
    (whole(torch.cat(batches)).square().sum() / sum(sizes)).backward()
    for name, parameter in whole.named_parameters():
        expected = resident.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


def test_a_backward_of_ones_own_is_called_and_weightless_batches_are_refused():
    told = []
    backward_weighted([1, 3], lambda x: torch.tensor(float(x)), lambda x: x, told.append)
    assert [float(loss) for loss in told] == [0.25, 0.75]
    with pytest.raises(ValueError, match="of 1 batches add up to 0"):
        backward_weighted([0], lambda x: torch.tensor(1.0), lambda x: x)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_evaluation_is_what_plain_torch_does_and_changes_nothing(pair, device, every):
    managed, resident = pair
    resident.to(device)
    batches = [torch.randn(n, 128).to(device) for n in (3, 2, 3)]
    with torch.no_grad():
        plain = [resident(batch) for batch in batches]
    losses = [output.square().sum().item() for output in plain]
    managed[0].eval()
    held = []

    def compute(batch):
        assert not torch.is_grad_enabled() and not managed.training
        output = managed(batch)
        held.append(output.device.type)
        return output.square().sum(), len(batch), output

    with attached(managed, device) as manager:
        found = evaluate(managed, batches, compute, to_host_every=every)
        uses_the_engine(manager)
    assert found.terms == 8 and found.loss == pytest.approx(sum(losses) / 8)
    assert_same(found.outputs, [output.cpu() for output in plain])
    assert {output.device.type for output in found.outputs} == {"cpu"}
    assert managed.training and not managed[0].training and managed[1].training
    with pytest.raises(ValueError, match="no batch has a term"):
        evaluate(managed, [], compute)
    with pytest.raises(ValueError, match="to_host_every=0 must be at least 1"):
        evaluate(managed, [], compute, to_host_every=0)


@pytest.mark.parametrize(("every", "moved"), [(1, [1, 2, 3, 4, 5]), (2, [2, 2, 4, 4, 5])])
def test_outputs_and_losses_leave_the_device_after_so_many_batches(every, moved):
    computed, told = [], []

    class Computed:
        def cpu(self):
            told.append(("output", len(computed)))
            return self

        def __float__(self):
            told.append(("loss", len(computed)))
            return 1.0

    def compute(batch):
        computed.append(batch)
        return Computed(), 1, Computed()

    found = evaluate(nn.Linear(2, 2), range(5), compute, to_host_every=every)
    assert (found.loss, found.terms, len(found.outputs)) == (1.0, 5, 5)
    for kind in ("loss", "output"):
        assert [after for what, after in told if what == kind] == moved


def test_evaluation_restores_the_modes_after_an_error(pair):
    with pytest.raises(KeyError):
        evaluate(pair[0], [1], lambda batch: {}["nothing"])
    assert all(module.training for module in pair[0].modules())


def test_outputs_that_are_not_wanted_are_not_kept(pair):
    found = evaluate(pair[0], [1, 2], lambda batch: (torch.tensor(float(batch)), batch, None))
    assert found == (1.0, 3, [])


# ---- attention ----


def test_the_backend_that_ran_is_told_not_the_one_that_is_allowed():
    q = torch.randn(2, 4, 16, 8)
    with AttentionBackends() as watched:
        nn.functional.scaled_dot_product_attention(q, q, q)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            nn.functional.scaled_dot_product_attention(q, q, q)
            nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert watched.counts == {"flash (CPU)": 1, "math": 2}
    assert str(watched) == "3 calls of scaled_dot_product_attention: math 2, flash (CPU) 1"
    nn.functional.scaled_dot_product_attention(q, q, q)
    assert sum(watched.counts.values()) == 3, "it watches after its end"
    with AttentionBackends() as watched:
        torch.ones(2) @ torch.ones(2)
    assert str(watched) == "no call of scaled_dot_product_attention"


def test_watching_attention_leaves_what_operators_are_told():
    with AttentionBackends():
        made = torch.zeros(2, dtype=torch.int16)
        added = torch.add(made, torch.ones(2, dtype=torch.int16), alpha=3)
    assert made.dtype is torch.int16 and added.tolist() == [3, 3]


def test_watching_attention_changes_no_bit_of_a_managed_model(device):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    managed, resident = resident_pair(model)
    resident.to(device)
    x = torch.randn(2, 16, 64).to(device)
    expected = resident(x)
    expected.sum().backward()
    with attached(managed, device) as manager:
        with AttentionBackends() as watched:
            found = managed(x)
        found.sum().backward()
        assert sum(watched.counts.values()) == 1
        assert manager.state.engine.stats()["h2d_bytes"] > 0
        assert_same(found, expected)
        assert_same(gradients(managed), gradients(resident))


# ---- long sequences ----


def test_a_sequence_is_cut_into_chunks_with_their_context():
    assert chunks_of(10, 4) == [Chunk(0, 4, 0), Chunk(4, 8, 0), Chunk(8, 10, 0)]
    assert chunks_of(10, 4, 3) == [Chunk(0, 4, 0), Chunk(4, 8, 1), Chunk(8, 10, 5)]
    assert chunks_of(4, 4, 0) == [Chunk(0, 4, 0)]
    assert chunks_of(2, 1, 0) == [Chunk(0, 1, 0), Chunk(1, 2, 1)]
    assert declared(chunks_of(10, 4)).startswith("context carried: every chunk sees all")
    assert declared(chunks_of(10, 4, 4)).startswith("context truncated: 1 of 3 chunks do not")
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        chunks_of(10, 0)
    with pytest.raises(ValueError, match="window_size=-1 must be 0 or more"):
        chunks_of(10, 4, -1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_model_in_chunks_is_exact_while_its_state_is_carried(kind):
    torch.manual_seed(0)
    model = kind(96, 96, num_layers=2, batch_first=True).double()
    managed, resident = resident_pair(model)
    x = torch.randn(2, 37, 96, dtype=torch.double)
    whole, _ = resident(x)
    whole.square().sum().backward()
    with attached(managed, "cpu") as manager:
        chunks = list(carried(managed, x, 8))
        assert [chunk.shape[1] for chunk in chunks] == [8, 8, 8, 8, 5]
        torch.cat(chunks, 1).square().sum().backward()
        assert manager.state.engine.stats()["h2d_bytes"] > 0
    torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=1e-12, atol=1e-12)
    for name, parameter in resident.named_parameters():
        found = managed.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-9)
    managed.zero_grad()
    chunks = list(carried(managed, x, 8, detach=True))
    torch.cat(chunks, 1).square().sum().backward()
    torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=1e-12, atol=1e-12)
    found, expected = managed.weight_hh_l0.grad, resident.weight_hh_l0.grad
    assert not torch.allclose(found, expected, rtol=1e-6), "gradients do not end at the chunk"


def test_a_state_of_ones_own_begins():
    seen = []

    def step(part, state):
        seen.append(state)
        return part, [part.sum().requires_grad_(), state]

    inputs = torch.ones(4, 6)
    assert len(list(carried(step, inputs, 4, "begin", dim=1, detach=True))) == 2
    assert seen[0] == "begin" and not seen[1][0].requires_grad and seen[1][1] == "begin"
    assert len(list(carried(step, inputs, 2, None, dim=0))) == 2


class Causal(nn.Module):
    """A causal language model with absolute positions, of few operators."""

    def __init__(self, vocabulary=32, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, input_ids, position_ids, use_cache):
        assert use_cache is False
        x = self.embedding(input_ids) + self.positions(position_ids)
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return type("Output", (), {"logits": self.out(x)})


def test_chunks_that_see_everything_add_up_to_the_whole_sequence():
    torch.manual_seed(0)
    managed, resident = resident_pair(Causal().double())
    tokens = torch.randint(0, 32, (2, 30))
    tokens[1, 25:] = -100
    logits = resident(tokens.clamp(min=0), torch.arange(30).expand(2, -1), False).logits
    wanted = tokens[:, 1:]
    expected = nn.functional.cross_entropy(
        logits[:, :-1].float().reshape(-1, 32), wanted.reshape(-1), reduction="sum"
    )
    expected.backward()
    with attached(managed, "cpu") as manager:
        total, count = 0.0, 0
        for chunk in chunks_of(29, 8):
            loss, terms = next_token_loss(managed, tokens, chunk)
            loss.backward()
            total, count = total + float(loss.detach()), count + terms
        assert manager.state.engine.stats()["h2d_bytes"] > 0
    assert count == 29 + 24
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in resident.named_parameters():
        torch.testing.assert_close(
            managed.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6
        )
    (whole,) = chunks_of(30, 64)
    assert next_token_loss(resident, tokens, whole)[1] == 53
    with torch.no_grad():
        short = [next_token_loss(resident, tokens, chunk)[0] for chunk in chunks_of(29, 8, 2)]
    assert float(sum(short)) != pytest.approx(total, rel=1e-6), "they see as much as before"


# ---- checkpointing ----


def test_checkpointing_is_found_by_either_name():
    class Transformers(nn.Module):
        config = type("Config", (), {"use_cache": True})()
        supports_gradient_checkpointing = True
        told: ClassVar = []

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
            self.told.append(gradient_checkpointing_kwargs)

        def gradient_checkpointing_disable(self):
            self.told.append("off")

    class Diffusers(nn.Module):
        _supports_gradient_checkpointing = True
        told: ClassVar = []

        def enable_gradient_checkpointing(self):
            self.told.append("on")

        def disable_gradient_checkpointing(self):
            self.told.append("off")

    assert not set_checkpointing(nn.Identity())
    model = Transformers()
    assert set_checkpointing(model, False) and model.config.use_cache
    assert set_checkpointing(model) and not model.config.use_cache
    assert model.told == ["off", {"use_reentrant": False}]
    model.supports_gradient_checkpointing = False
    assert not set_checkpointing(model)
    model = Diffusers()
    assert set_checkpointing(model) and set_checkpointing(model, False)
    assert model.told == ["on", "off"]
    model._supports_gradient_checkpointing = False
    assert not set_checkpointing(model)
