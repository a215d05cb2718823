"""The parts of the demonstration: its model, its training step, the arguments that it takes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from equality import attached
from torch import nn

from oracle_offload.commands import demo
from oracle_offload.engine import simulator


class Recorded(nn.Module):
    """Keeps what it is called with, and predicts a trained multiple of the noisy latents."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.calls = []

    def forward(self, **given):
        self.calls.append(given)
        return SimpleNamespace(sample=given["hidden_states"] * self.scale)


def one_step(seed=0, number=0):
    runner = demo.Runner(Recorded(), torch.device("cpu"), seed)
    loss = runner.step(number)
    return runner, runner.model.calls[0], loss


def test_a_step_predicts_the_flow_from_the_latents_to_the_noise():
    runner, given, loss = one_step(seed=3, number=2)
    generator = torch.Generator().manual_seed(3 * 100_003 + 2)
    latents, target = (torch.randn(1, 64, 64, generator=generator).bfloat16() for _ in range(2))
    sigma = torch.rand(1, generator=generator).bfloat16()
    noisy = given["hidden_states"]
    assert torch.equal(noisy, (1 - sigma) * latents + sigma * target)
    assert torch.equal(given["timestep"], sigma) and 0 < float(sigma) < 1
    expected = nn.functional.mse_loss((noisy * 0.5).float(), (target - latents).float())
    assert torch.equal(loss, expected) and not loss.requires_grad
    assert runner.trained == [runner.model.scale]
    assert runner.model.scale.grad is None and float(runner.model.scale) != 0.5, (
        "one step was taken"
    )


def test_the_image_is_a_square_of_tokens():
    given = one_step()[1]
    places = given["img_ids"]
    assert places[:, 0].unique().tolist() == [0]
    side = round(len(places) ** 0.5)
    assert places[:, 1:].tolist() == [[row, col] for row in range(side) for col in range(side)]
    assert given["txt_ids"].shape == (given["encoder_hidden_states"].shape[1], 3)
    assert given["guidance"].tolist() == [3.5]


def test_noise_is_of_the_seed_and_of_the_step():
    def noise(seed, number):
        return one_step(seed, number)[1]["hidden_states"]

    assert torch.equal(noise(1, 2), noise(1, 2))
    assert not torch.equal(noise(1, 2), noise(1, 3))
    assert not torch.equal(noise(1, 2), noise(2, 2))


def test_the_model_has_the_real_depth_and_is_frozen_but_for_its_adapters():
    model = demo.build_model(64, seed=5)
    config = model.config
    assert (len(model.transformer_blocks), len(model.single_transformer_blocks)) == (19, 38)
    assert config.attention_head_dim * config.num_attention_heads == 64
    assert sum(config.axes_dims_rope) == config.attention_head_dim
    assert model.training and model.is_gradient_checkpointing
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    again, other = demo.build_model(64, seed=5), demo.build_model(64, seed=6)
    assert torch.equal(model.proj_out.weight, again.proj_out.weight)
    assert not torch.equal(model.proj_out.weight, other.proj_out.weight)
    demo.add_lora(model, seed=5)
    demo.add_lora(again, seed=5)
    trained = dict(model.named_parameters())
    adapters = {name for name, p in trained.items() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    kinds = {name.split(".lora_")[0].rpartition("attn.")[2] for name in adapters}
    assert kinds == {"to_q", "to_k", "to_v", "to_out.0"}
    assert {min(trained[name].shape) for name in adapters} == {4}
    for name in adapters:
        assert torch.equal(trained[name], dict(again.named_parameters())[name])
    assert next(iter(model.modules())).peft_config["default"].lora_alpha == 8


GOOD = {"device": None, "width": 128, "steps": 20, "offload": 0.91, "seed": 0, "svg": "x.svg"}


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"device": "cpu"}, {"device": "cuda"}, {"device": "cuda:12"}, {"width": 64},
        {"steps": 3}, {"offload": 0}, {"offload": 1}, {"seed": (1 << 32) - 1},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_make_sense(changed):
    demo.check_arguments(**{**GOOD, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": "cpu:0"}, r"device='cpu:0' must be cuda, cuda:N or cpu \(simulated\)$"),
        ({"width": 0}, "width=0 must be a multiple of 64"),
        ({"width": 32}, "width=32 must be"),
        ({"width": -64}, "width=-64 must be"),
        ({"width": 65}, "width=65 must be"),
        ({"steps": 0}, "steps=0 must be at least 3: the engine learns"),
        ({"steps": 2}, "steps=2 must be at least 3"),
        ({"offload": 91}, r"offload-percent=91 is a share, from 0 to 1; did you mean 0.91\?$"),
        ({"offload": 100}, r"did you mean 1.0\?$"),
        ({"offload": 101}, "from 0 to 1$"),
        ({"offload": -0.1}, "from 0 to 1$"),
        ({"offload": float("nan")}, "from 0 to 1$"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"seed": 1 << 32}, "seed=4294967296 must be from 0"),
        ({"svg": "."}, r"svg='\.' is a folder"),
    ],
    ids=str,
)
def test_arguments_that_make_none(changed, said):
    with pytest.raises(ValueError, match=said):
        demo.check_arguments(**{**GOOD, **changed})


def test_a_library_that_is_missing_is_named(monkeypatch, capsys):
    import sys

    from oracle_offload import cli

    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.main(["demo", "--device", "cpu"]) == cli.Exit.ERROR
    assert capsys.readouterr().err == (
        "the demo needs peft: pip install torch diffusers peft (or make demo)\n"
    )


def test_what_the_demonstration_cannot_do_is_one_line(monkeypatch, capsys):
    from oracle_offload import OffloadError, cli

    def fail(*arguments):
        raise OffloadError("no CUDA device")

    monkeypatch.setattr(demo, "run_demo", fail)
    assert cli.main(["demo", "--device", "cuda"]) == cli.Exit.ERROR
    assert capsys.readouterr().err == "demo: no CUDA device\n"


def test_a_step_on_a_gpu_is_timed_between_two_waits_for_it(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(device))
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    state = SimpleNamespace(simulated=False)
    timed = demo._timer(SimpleNamespace(state=state, device="cuda:1"))
    runner = SimpleNamespace(step=lambda number: order.append(number) or "the loss")
    assert timed(runner, 7) == ("the loss", 2.5)
    assert order == ["cuda:1", 7, "cuda:1"]


def test_a_step_on_the_simulated_device_is_timed_by_its_own_clock():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    x = torch.randn(4, 64)
    runner = SimpleNamespace(step=lambda number: model(x))
    with attached(model, "cpu") as manager:
        timed = demo._timer(manager)
        first = timed(runner, 0)[1]
        begin = simulator.now()
        result, seconds = timed(runner, 1)
        assert 0 < seconds <= first
        assert seconds == pytest.approx(simulator.now() - begin)
        assert torch.equal(result, model(x))


def test_the_simulated_device_trains_one_resident_model_and_times_what_is_shown(
    monkeypatch, tmp_path
):
    """On a card there are two, by deterministic kernels, to tell what the card does of itself.

    A resident step takes the same simulated time whenever it is measured, and a while.
    """
    built, deterministic, timed = [], set(), {}
    build, step, honest = demo.build_model, demo.Runner.step, demo._timer

    def count(*arguments):
        built.append(build(*arguments))
        return built[-1]

    def look(self, number):
        deterministic.add(torch.are_deterministic_algorithms_enabled())
        return step(self, number)

    def timer(manager):
        time_step = honest(manager)

        def note(runner, number):
            is_managed = runner.model is manager.attachment.module()
            timed.setdefault(is_managed, []).append(number)
            return time_step(runner, number)

        return note

    monkeypatch.setattr(demo, "build_model", count)
    monkeypatch.setattr(demo.Runner, "step", look)
    monkeypatch.setattr(demo, "_timer", timer)
    demo.run_demo(steps=4, width=64, device="cpu", svg=str(tmp_path / "a.svg"), progress=False)
    assert len(built) == 2 and deterministic == {False}
    assert not any(hasattr(model, "_memory_manager") for model in built), "one is still attached"
    assert timed == {True: [0, 1, 2, 3], False: [1, 2, 3]}


@pytest.mark.parametrize(
    ("has_card", "device", "taken"),
    [(True, None, "cuda"), (False, None, "cpu"), (True, "cpu", "cpu"), (True, "cuda:1", "cuda:1")],
    ids=str,
)
def test_the_demonstration_takes_the_card_if_there_is_one_and_nothing_else_is_said(
    monkeypatch, has_card, device, taken
):
    class Asked(Exception):
        pass

    def ask(device):
        raise Asked(device)

    monkeypatch.setattr("oracle_offload.engine.devices.parse_device", ask)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(Asked) as raised:
        demo.run_demo(steps=4, width=64, device=device, svg="a.svg", progress=False)
    assert raised.value.args == (taken,)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "or cuBLAS may sum in any order"


def test_on_a_card_the_demonstration_computes_by_deterministic_kernels_and_all_threads():
    torch.set_num_threads(2)
    with demo._settings_of_torch(True, 64):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_small_matrices_are_computed_by_one_thread_and_larger_ones_by_all():
    torch.set_num_threads(2)
    during = []
    for width in (64, 256, 320):
        with demo._settings_of_torch(False, width):
            during.append(torch.get_num_threads())
            assert not torch.are_deterministic_algorithms_enabled()
    assert during == [1, 1, 2] and torch.get_num_threads() == 2
    for on_cuda in (False, True):
        with pytest.raises(KeyboardInterrupt), demo._settings_of_torch(on_cuda, 64):
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2, "however the demonstration ends"
        assert not torch.are_deterministic_algorithms_enabled()


def test_the_demonstration_called_from_python_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="steps=2 must be at least 3"):
        demo.run_demo(steps=2)
