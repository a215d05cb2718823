"""Activations of a step without memory, compared with the peak of torch's CPU allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from peak import peak_of
from torch import nn

import oracle_offload
from oracle_offload import Budget
from oracle_offload.planning import measure
from oracle_offload.planning.sample import UnknownSample, inputs, parse_sample
from oracle_offload.train import offload_activations

SAMPLES: dict[str, Any] = {"flux": (128, 128), "llama": 48, "sd3": (128, 128), "unet": (128, 128)}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "plain"])
@pytest.mark.parametrize("name", SAMPLES)
def test_activations_are_within_seven_percent_of_a_measured_peak(
    name: str, checkpointing: bool
) -> None:
    kind, config = architectures.class_and_config(name)
    found = oracle_offload.plan(
        kind,
        config=config,
        dtype="fp32",
        train="full",
        optimizer="sgd",
        sample=SAMPLES[name],
        batch=2,
        checkpointing=checkpointing,
        card=24,
        ram="64GB",
    )
    model = architectures.real(name).train()
    if name == "llama":
        model.config.use_cache = False
    if checkpointing:
        getattr(model, found.to_dict()["python"].splitlines()[0].split(".")[1][:-2])()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        output = model(**inputs(model, SAMPLES[name], 2)[0])
        loss = output.loss if name == "llama" else output.sample.float().square().mean()
        loss.backward()

    step()  # what is made once is there
    error = found.step.activations / peak_of(step) - 1
    print(f"{name}, checkpointing={checkpointing}: {100 * error:+.2f}%")
    assert abs(error) <= 0.07


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("flux", True), ("flux", False), ("unet", False)],
    ids=["flux-checkpointed", "flux-plain", "unet-plain"],
)
def test_what_leaves_is_what_a_real_step_lets_leave(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 1 << 14  # the models are small
    monkeypatch.setattr(measure, "_LEAST", least)
    kind, config = architectures.class_and_config(name)
    given = dict(config=config, dtype="fp32", train="full", optimizer="sgd", card=24, ram="64GB")
    given |= dict(sample=SAMPLES[name], batch=2, checkpointing=checkpointing)
    plan = oracle_offload.plan(kind, **given)
    left = plan.step.leaving()
    assert left is not None
    model = architectures.real(name).train()
    if checkpointing:
        getattr(model, plan.to_dict()["python"].splitlines()[0].split(".")[1][:-2])()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        output = model(**inputs(model, SAMPLES[name], 2)[0]).sample
        output.float().square().mean().backward()

    with offload_activations(model, least, device="cpu") as offload:
        step()  # what is made once is there; all leave
        assert left.host_bytes == offload.host_bytes > 0
        step()
        error = left.device_bytes / peak_of(step) - 1
        print(f"{name}, checkpointing={checkpointing}: {100 * error:+.2f}%, {left.longer:.2f}")
        assert abs(error) <= 0.10
        assert left.longer > 2 or checkpointing


class Convolved(nn.Module):
    """Frozen convolutions around what is trained; `unbatched` takes the batch away."""

    def __init__(self, unbatched: bool, mode: str = "zeros") -> None:
        super().__init__()
        self.unbatched = unbatched
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Conv1d(8, 8, 3, padding=1, padding_mode=mode) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x[0])[None] if self.unbatched else layer(x)
        return x


@pytest.mark.parametrize("unbatched", [False, True])
def test_a_frozen_convolution_keeps_nothing(unbatched: bool) -> None:
    def planned(mode: str) -> int | None:
        return oracle_offload.plan(
            Convolved(unbatched, mode),
            sample={"x": (8, 64)},
            rank=1,
            targets="first",
            card=24,
            ram="64GB",
            budget=Budget(offload_percent=1.0),
        ).step.activations

    found, padded = planned("zeros"), planned("circular")
    rows = 8 * 64 * 4
    assert found is not None and padded is not None
    assert found <= 6 * rows + 64 * 64 * 4, "result, gradients, the adapter's"
    assert padded >= found + 3 * rows, "what is padded before the operator is kept by torch"


class Asks(nn.Module):
    """A model whose code reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if y.sum().item() > 0 else -y


def test_what_cannot_be_run_without_values_is_unknown_and_never_zero() -> None:
    found = oracle_offload.plan(Asks(), sample={"x": (4, 8)}, rank=1, card=24, ram="64GB")
    said = found.to_dict()
    assert said["activations_bytes"] is None and "activations" not in said["device_bytes"]
    assert said["step"]["step_s"] is None and "without values" in said["step"]["why"]
    assert "How long a step takes is unknown" in str(found)
    assert "which are unknown" in found.sentence()
    unknown = oracle_offload.plan(Asks(), rank=1, card=24, ram="64GB")
    assert "give sample= as a mapping" in unknown.step.why
    left_out = oracle_offload.plan(Asks(), rank=1, card=24, ram="64GB", measure=False)
    assert left_out.step.why == "it was not measured"


def test_the_activations_of_a_chain_are_those_that_backward_needs() -> None:
    """Two trained layers: input, the result between them, and what backward makes of these."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    options = dict(train="full", optimizer="sgd", card=24, ram="64GB", sample={"input": (32, 64)})
    one = oracle_offload.plan(model, batch=1, **options).step.activations
    two = oracle_offload.plan(model, batch=2, **options).step.activations
    assert one is not None and two is not None
    rows = 32 * 64 * 4
    assert two - one >= 3 * rows  # input, hidden, result
    assert 3 * rows <= one <= 8 * rows + 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2048", 2048),
        ("1024x768", (1024, 768)),
        ("x=4x8", {"x": (4, 8)}),
        ("x=4x8:fp32,t=:int64", {"x": ((4, 8), "fp32"), "t": ((), "int64")}),
    ],
)
def test_a_sample_as_the_command_takes_it(text: str, means: Any) -> None:
    assert parse_sample(text) == means


@pytest.mark.parametrize("text", ["", "x", "x=4y8", "x=4:int3", "1x2x3"])
def test_a_sample_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sample="):
        parse_sample(text)


@pytest.mark.parametrize("shape", [5, (4, -8), ((4, 8), "foo"), ((4, 8),), ("a", 8)])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="a shape is like"):
        oracle_offload.plan(nn.Linear(8, 8), sample={"input": shape}, rank=1, ram="64GB")


def test_shapes_are_without_the_batch_and_have_the_models_dtype() -> None:
    model = nn.Linear(8, 8).bfloat16()
    made, _ = inputs(model, {"input": (4, 8), "ids": ((7,), "int64"), "t": torch.zeros(3)}, 5)
    assert made["input"].shape == (5, 4, 8) and made["input"].dtype is torch.bfloat16
    assert made["ids"].shape == (5, 7) and made["ids"].dtype is torch.int64
    assert made["t"].shape == (3,) and made["t"].dtype is torch.float32


PIXELS = {
    "FluxTransformer2DModel": {
        "hidden_states": (3, 24, 4),  # patches of 2 x 2 of the latent
        "encoder_hidden_states": (3, 512, 6),
        "pooled_projections": (3, 7),
        "timestep": (3,),
        "guidance": (3,),
        "img_ids": (24, 3),
        "txt_ids": (512, 3),
    },
    "SD3Transformer2DModel": {
        "hidden_states": (3, 4, 8, 12),
        "encoder_hidden_states": (3, 77 + 256, 6),  # of CLIP and of T5
        "pooled_projections": (3, 7),
        "timestep": (3,),
    },
    "UNet2DConditionModel": {
        "sample": (3, 4, 8, 12),
        "timestep": (3,),
        "encoder_hidden_states": (3, 77, 5),
    },
}


@pytest.mark.parametrize("kind", PIXELS)
def test_a_model_of_pictures_is_given_a_latent_of_an_eighth_and_the_tokens_of_its_encoders(
    kind: str,
) -> None:
    module = type(kind, (nn.Linear,), {})(1, 1, dtype=torch.bfloat16)
    module.config = SimpleNamespace(
        in_channels=4,
        joint_attention_dim=6,
        cross_attention_dim=5,
        pooled_projection_dim=7,
        guidance_embeds=True,
    )
    given, assumed = inputs(module, (64, 96), 3)
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == PIXELS[kind]
    assert assumed == "" and all(not tensor.any() for tensor in given.values())
    larger, assumed = inputs(module, None, 1)
    assert assumed == "a sample of 1024 x 1024 pixels"
    first = next(iter(PIXELS[kind]))
    assert larger[first].numel() == given[first].numel() / 3 * (128 * 128) / (8 * 12)
    module.config.guidance_embeds = False
    assert "guidance" not in inputs(module, (64, 96), 3)[0]
    with pytest.raises(UnknownSample, match=f"what {kind} takes is not known: give sample= as a"):
        inputs(module, 64, 3)


def test_a_language_model_is_given_tokens_up_to_what_it_can_place() -> None:
    class Model(nn.Linear):
        def forward(self, input_ids: Any, labels: Any = None) -> Any: ...

    class Encoder(nn.Linear):
        def forward(self, input_ids: Any) -> Any: ...

    model = Model(1, 1)
    for most, tokens in ((None, 2048), (4096, 2048), (512, 512)):
        model.config = SimpleNamespace(max_position_embeddings=most)
        given, assumed = inputs(model, None, 2)
        assert {name: tuple(tensor.shape) for name, tensor in given.items()} == {
            "input_ids": (2, tokens),
            "labels": (2, tokens),
        }
        assert assumed == f"a sample of {tokens} tokens"
    given, assumed = inputs(model, 600, 2)
    assert given["input_ids"].shape == (2, 600) and assumed == ""
    assert given["labels"] is not given["input_ids"]
    assert [*inputs(Encoder(1, 1), 5, 1)[0]] == ["input_ids"]
    with pytest.raises(UnknownSample, match="what Model takes is not known: give sample= as a"):
        inputs(model, (64, 96), 1)
