"""Persistent bytes against the storages of a real training; units and X_min against an attach."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import Tensor, nn

import oracle_offload
from oracle_offload import Budget
from oracle_offload.planning.storage import QUANTISED, _output_layer

plan = functools.partial(oracle_offload.plan, measure=False)


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors are in, each once; of what wraps others, of these."""
    found: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            for name in flatten()[0]:
                add(getattr(tensor, name))
        else:
            memory = tensor.untyped_storage()
            found[memory._cdata] = memory.nbytes()

    for tensor in tensors:
        add(tensor)
    return sum(found.values())


def tensors_of(state: Any) -> Iterable[Tensor]:
    """All tensors in an optimizer's state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def loaded(name: str, folder: Path) -> Any:
    """The model as its own loader makes it in bfloat16."""
    model = architectures.real(name)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, torch_dtype=torch.bfloat16)


def test_at_least_fifteen_architectures_are_compared() -> None:
    assert len(architectures.NAMES) >= 15


@pytest.mark.parametrize("name", architectures.NAMES)
def test_persistent_bytes_are_those_of_the_storages(name: str, tmp_path: Path) -> None:
    """Of a full training with AdamW: weights, buffers, gradients and the optimizer's state."""
    model = loaded(name, tmp_path).train()
    kind, config = architectures.class_and_config(name)
    found = plan(kind, config=config, train="full", card=24, ram="64GB").to_dict()
    own = found["persistent_bytes"]
    assert own["weights"] == storages(model.parameters())
    assert own.get("buffers", 0) == storages(model.buffers())
    for parameter in model.parameters():
        parameter.requires_grad_(True).grad = torch.zeros_like(parameter)
    assert own["gradients"] == storages(p.grad for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert own["optimizer state"] == storages(tensors_of(optimizer.state))
    assert found["parameters"] == found["trained"] == sum(p.numel() for p in model.parameters())
    # From the files alone, of which only headers are read, the same.
    again = plan(tmp_path, dtype="bf16", train="full", card=24, ram="64GB")
    assert again.to_dict()["persistent_bytes"] == own


def optimizers() -> dict[str, Any]:
    import bitsandbytes
    import transformers

    return {
        "adam": torch.optim.Adam,
        "adamw8bit": lambda p: bitsandbytes.optim.AdamW8bit(p),
        "paged_adamw8bit": lambda p: bitsandbytes.optim.PagedAdamW8bit(p),
        "paged-adamw": lambda p: bitsandbytes.optim.PagedAdamW(p),
        "lion8bit": lambda p: bitsandbytes.optim.Lion8bit(p),
        "adafactor": torch.optim.Adafactor,
        "adafactor_transformers": lambda p: transformers.Adafactor(p),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", optimizers())
def test_the_state_of_an_optimizer_is_that_of_its_library(name: str, dtype: torch.dtype) -> None:
    shapes = [(70, 130), (64, 64), (63, 65), (8, 4, 3, 3), (300,), (5000,), (1,)]
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer = optimizers()[name](parameters)
    if name == "adafactor_transformers":
        optimizer.step()
        kept = [t for state in optimizer.state.values() for t in state.values()]
        expected = storages(t for t in kept if isinstance(t, Tensor) and t.dim())
    else:
        optimizer.step()
        expected = storages(tensors_of(optimizer.state))
    model = nn.ParameterList(parameters)
    found = plan(model, train="full", optimizer=name, card=24, ram="64GB")
    assert found.to_dict()["persistent_bytes"].get("optimizer state", 0) == expected


def test_an_optimizer_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="optimizer='lbfgs': its state is not known; there are adamw"
    ):
        plan("4B", optimizer="lbfgs")
    by_class = plan("4B", optimizer=torch.optim.SGD, train="full", ram="64GB")
    assert "optimizer state" not in by_class.to_dict()["persistent_bytes"]


@pytest.mark.parametrize("name", ["flux", "unet", "llama", "gpt2"])
def test_a_lora_is_as_large_as_the_one_of_peft(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    targets = {
        "flux": ["to_q", "to_k", "net.0.proj"],
        "unet": ["to_q", "conv1"],
        "llama": "all-linear",
        "gpt2": "all-linear",
    }[name]
    kind, config = architectures.class_and_config(name)
    model = architectures.real(name).to(torch.bfloat16).requires_grad_(False)
    made = LoraConfig(r=5, target_modules=targets)
    if isinstance(targets, list):
        model.add_adapter(made)
        for parameter in model.parameters():  # as get_peft_model does
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    else:
        get_peft_model(model, made)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    found = plan(kind, config=config, rank=5, targets=targets, card=24, ram="64GB")
    own = found.to_dict()["persistent_bytes"]
    assert own["adapters"] == own["gradients"] == storages(trained)
    assert own["optimizer state"] == storages(tensors_of(optimizer.state))
    assert found.to_dict()["trained"] == sum(p.numel() for p in trained)


def test_a_lora_for_layers_that_are_not_there_is_refused_with_those_that_are() -> None:
    kind, config = architectures.class_and_config("flux")
    with pytest.raises(ValueError, match=r"targets=q_proj: no layer of that name; .*'to_q'"):
        plan(kind, config=config, targets="q_proj", ram="64GB")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 136), nn.ReLU(), nn.Linear(136, 72, bias=False)).bfloat16()


def quantised(how: str) -> nn.Module:
    model = net()
    if how in ("int8", "fp8"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig() if how == "int8" else Float8WeightOnlyConfig())
    elif how == "qfloat8":
        from optimum.quanto import freeze, qfloat8, quantize

        quantize(model, weights=qfloat8)
        freeze(model)
    else:
        import bitsandbytes

        for number in (0, 2):
            plain = model[number]
            made = bitsandbytes.nn.Linear4bit(
                plain.in_features,
                plain.out_features,
                plain.bias is not None,
                quant_type="nf4",
                compute_dtype=torch.bfloat16,
            ).bfloat16()
            made.weight = bitsandbytes.nn.Params4bit(
                plain.weight.detach(), requires_grad=False, quant_type="nf4"
            )
            made.bias = plain.bias
            model[number] = made.to("cpu")
    return model.requires_grad_(False)


def test_a_part_that_torchscript_compiled_stays_resident_in_a_plan_too(sim: Any) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
    model[1] = torch.jit.script(nn.Sequential(model[1], nn.ReLU()))
    model.requires_grad_(False)
    found = plan(model, budget=Budget(offload_percent=1.0), card=24, ram="64GB")
    manager = oracle_offload.attach(model, "cpu", offload_percent=1.0)
    try:
        stats = manager.state.engine.stats(manager.attachment.model)
        assert len(found.storage.units) == stats["units"] == 2
        assert found.storage.managed_bytes == stats["managed_bytes"] == 2 * 4 * (512 * 512 + 512)
        assert {name: "TorchScript" in why for name, why in manager.resident.items()} == {
            "1.0.weight": True,
            "1.0.bias": True,
        }
        assert not any(parameter.requires_grad for parameter in model.parameters())
    finally:
        manager.detach()


@pytest.mark.parametrize("how", ["int8", "fp8", "qfloat8", "nf4"])
def test_quantised_weights_are_as_their_library_keeps_them(how: str, sim: Any) -> None:
    model = quantised(how)
    found = plan(
        net(),
        quantize=how,
        targets=("0", "2"),
        card=24,
        ram="64GB",
        budget=Budget(offload_percent=1.0),
    )
    manager = oracle_offload.attach(model, "cpu")
    try:
        stats = manager.state.engine.stats(manager.attachment.model)
        kept = sum(nbytes for layer in manager.layers for _, nbytes in layer.extents())
        assert found.to_dict()["persistent_bytes"]["weights"] == kept
        assert [stats["units"], stats["managed_bytes"]] == [
            len(found.storage.units),
            found.storage.managed_bytes,
        ]
        assert manager.attachment.arena.capacity_bytes == found.fit.arena_bytes
        least = found.storage.x_min_bytes(found.fit.arena_bytes)
        assert manager.attachment.x_min_bytes() == least >= found.fit.x_min_bytes
    finally:
        manager.detach()


@pytest.mark.parametrize("percent", [1.0, 0.91, 0.3])
@pytest.mark.parametrize("name", ["flux", "unet", "llama-tied", "mixtral", "wan"])
def test_units_floor_and_x_min_are_those_of_an_attach(
    name: str, percent: float, sim: Any, tmp_path: Path
) -> None:
    model = loaded(name, tmp_path).requires_grad_(False)
    kind, config = architectures.class_and_config(name)
    found = plan(kind, config=config, budget=Budget(offload_percent=percent), card=24, ram="64GB")
    manager = oracle_offload.attach(model, "cpu", offload_percent=percent)
    try:
        stats = manager.state.engine.stats(manager.attachment.model)
        said = found.to_dict()
        assert said["units"] == stats["units"] > 3
        assert said["managed_bytes"] == stats["managed_bytes"]
        assert said["floor_bytes"] == manager.attachment.arena.floor_bytes
        assert said["arena_bytes"] == manager.attachment.arena.capacity_bytes
        least = found.storage.x_min_bytes(said["arena_bytes"])  # of a step that uses all twice
        assert said["x_min_bytes"] <= least == manager.attachment.x_min_bytes()
        masters = {a: n for layer in manager.layers for a, n in layer.extents()}
        assert said["host_bytes"]["weights"] == sum(masters.values())
    finally:
        manager.detach()


def test_a_host_with_little_memory_keeps_what_attach_keeps(sim: Any) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))).requires_grad_(False)
    found = plan(model, rank=1, vram="3MiB", ram="2MiB", margin=0, card=24)
    assert (
        found.verdict == "weights fit streamed; activations unknown"
        and found.fit.ram_budget is not None
    )
    manager = oracle_offload.attach(
        model,
        "cpu",
        vram_budget=found.fit.arena_bytes + found.fit.storage.kept_bytes,
        ram_budget=found.fit.ram_budget,
    )
    try:
        assert manager.attachment.kept_bytes == found.fit.storage.kept_bytes > 0
        assert manager.attachment.arena.capacity_bytes == found.fit.arena_bytes
        assert len(manager.layers) == len(found.fit.storage.units)
    finally:
        manager.detach()


def test_master_copies_are_of_narrower_weights_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16))
    one = 16 * 16 + 16
    found = plan(model, train="full", master_dtype="fp32", card=24, ram="64GB")
    own = found.to_dict()["persistent_bytes"]
    assert own["master copies"] == 4 * one and own["gradients"] == 2 * 4 * one
    assert own["optimizer state"] == 2 * 2 * 4 * one + 4 * 4


@pytest.mark.parametrize("cards", [2, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_shares_of_zero_are_those_of_the_paper(stage: int, cards: int) -> None:
    """arXiv 1910.02054: 2 + 2 + 12 bytes a parameter; here gradients are in float32."""
    found = plan("4B", train="full", master_dtype="fp32", card=80, ram="64GB")
    kept = {1: 2 + 4 + 12 / cards, 2: 2 + 16 / cards, 3: 18 / cards}[stage]
    (shard,) = [s for s in found.shards if (s.stage, s.cards) == (stage, cards)]
    assert abs(shard.bytes - 4e9 * kept) <= 8


@pytest.mark.parametrize("how", QUANTISED)
def test_a_number_of_parameters_alone_is_quantised_to_as_many_bytes_as_a_large_layer(
    how: str,
) -> None:
    rows = QUANTISED[how](torch.empty(31250, 32000, device="meta", dtype=torch.bfloat16))
    of_a_layer = sum(count * dtype.itemsize for count, dtype in rows)
    known = plan("1B", quantize=how, card=24, ram="64GB").storage
    assert known.parameters == 10**9
    weights = known.on_host()["weights"]
    assert weights <= of_a_layer <= 1.003 * weights


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError])
def test_a_model_that_does_not_tell_its_output_layer_has_none(error: type[Exception]) -> None:
    class Silent(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            raise error("no head")

    class Told(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            return head

    head = nn.Linear(2, 2)
    assert _output_layer(Silent()) is _output_layer(nn.Module()) is None
    assert _output_layer(Told()) is head
