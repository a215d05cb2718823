"""Operators on "cuda" have the CPU's values, and refuse what a card refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

CARD = torch.device("cuda", 0)


def same(*made):
    torch.testing.assert_close(*(value.detach().cpu() for value in made), rtol=0, atol=0)


def test_forward_and_gradients_of_common_layers_are_the_cpus():
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    on_host = nn.Sequential(*layers)
    on_card = copy.deepcopy(on_host).cuda()
    x = torch.randn(8, 16)
    made = on_host(x), on_card(x.cuda())
    assert made[1].device == CARD
    same(*made)
    for y in made:
        y.square().sum().backward()
    for one, other in zip(on_host.parameters(), on_card.parameters(), strict=True):
        same(one.grad, other.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells_have_the_gradients_that_autograd_has_of_plain_operators(kind):
    torch.manual_seed(0)
    on_host = kind(6, 5, 2).double()
    on_card = copy.deepcopy(on_host).cuda()
    x = torch.randn(4, 3, 6, dtype=torch.double)
    made = []
    for model, device in ((on_host, "cpu"), (on_card, "cuda")):
        y, _ = model(x.to(device))
        y.square().sum().backward()
        made.append([y, *(p.grad for p in model.parameters())])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu())


def test_the_gradient_of_rms_norm_is_that_of_its_formula():
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.double, device="cuda", requires_grad=True)
    weight = torch.randn(8, dtype=torch.double, device="cuda", requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a, b: nn.functional.rms_norm(a, (8,), b, 1e-5), (x, weight)
    )


def test_random_state_moves_on_and_can_be_put_back():
    torch.cuda.manual_seed(3)
    first = torch.randn(5, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    same(torch.rand(5, device="cuda"), second)
    torch.cuda.manual_seed(3)
    same(torch.randn(5, device="cuda"), first)


def test_the_hosts_random_state_stays_as_it_was():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    nn.functional.dropout(torch.ones(100, device="cuda"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda card, host: card @ host,
        lambda card, host: torch.add(card, host),
        lambda card, host: torch.cat([card, host]),
        lambda card, host: nn.functional.linear(card, host),
        lambda card, host: card.add_(host),
    ],
)
def test_tensors_of_host_and_card_do_not_mix(mixed):
    with pytest.raises(RuntimeError, match="on the same device"):
        mixed(torch.ones(4, 4, device="cuda"), torch.ones(4, 4))


def test_the_tensors_of_a_list_may_lie_here_and_there_and_those_of_a_pair_may_not():
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    found = torch._foreach_sub([here, there], [here, there / 2], alpha=2)
    assert [each.device.type for each in found] == ["cpu", "cuda"]
    same(found[0], torch.full((3,), -1.0))
    same(found[1], torch.zeros(3))
    with pytest.raises(RuntimeError, match="on the same device"):
        torch._foreach_sub([here, there], [there, here])


def test_a_number_on_the_host_mixes_and_so_do_indices():
    card = torch.arange(4.0, device="cuda")
    same(card * torch.tensor(2.0), torch.arange(4.0) * 2)
    same(card[torch.tensor([1, 3])], torch.tensor([1.0, 3.0]))


def test_an_out_tensor_grows():
    out = torch.empty(0, device="cuda")
    address = torch.add(torch.ones(3, device="cuda"), 1, out=out).data_ptr()
    same(out, torch.full((3,), 2.0))
    assert out.data_ptr() == address


def test_what_a_view_writes_is_in_its_base():
    base = torch.zeros(4, 4, device="cuda")
    base[1:3, ::2].add_(1)
    expected = torch.zeros(4, 4)
    expected[1:3, ::2] = 1
    same(base, expected)


def test_how_many_there_are_is_known_to_the_host():
    card = torch.tensor([1, 0, 2, 0], device="cuda")
    assert card.nonzero().shape == (2, 1)
    assert card[card > 0].tolist() == [1, 2]


def test_autocast_chooses_as_on_a_card():
    x = torch.ones(2, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.functional.linear(x, x).dtype == torch.bfloat16
        assert nn.functional.softmax(x.bfloat16(), -1).dtype == torch.float32


def test_a_scaler_sees_what_is_not_finite():
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    same(parameter, torch.ones(3))
