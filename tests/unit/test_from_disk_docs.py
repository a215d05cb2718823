"""The code of docs/from-disk.md, run unchanged on the simulated device."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

import models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload.engine.engines import open_states  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "from-disk.md").read_text("utf-8")


def block(containing: str) -> str:
    found = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    only = next(code for code in found if containing in code)
    return str(only).replace('"cuda"', '"cpu"')


class Model(torch.nn.Sequential):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def test_a_model_without_values(tmp_path: Path) -> None:
    model = Model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    names = {"Model": Model, "folder": tmp_path}
    exec(compile(block("Model()"), "docs/from-disk.md", "exec"), names)
    manager = names["manager"]
    assert isinstance(manager, oracle_offload.MemoryManager)
    assert len(manager.layers) == 2
    x = torch.randn(3, 64)
    assert torch.equal(manager.module(x), model(x))
    names["folder"], names["model"] = tmp_path / "saved", manager.module
    exec(compile(block("save_weights"), "docs/from-disk.md", "exec"), names)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], t) for name, t in model.state_dict().items())
    manager.detach()
    assert not open_states()


@pytest.mark.parametrize(
    ("line", "make", "subfolder"),
    [
        ("LlamaForCausalLM", models.llama, ""),
        ("FluxTransformer2DModel", models.flux, "transformer"),
    ],
)
def test_one_line_each(tmp_path: Path, line: str, make: object, subfolder: str) -> None:
    resident = make().bfloat16()  # type: ignore[operator]
    resident.save_pretrained(tmp_path / subfolder)
    assert type(resident).__name__ == line
    pipeline = SimpleNamespace()
    names = {
        "oracle_offload": oracle_offload,
        "torch": torch,
        "folder": tmp_path,
        "pipeline": pipeline,
        line: type(resident),
    }
    exec(compile(block(line), "docs/from-disk.md", "exec"), names)
    model = names.get("model") or pipeline.transformer
    assert model._memory_manager.layers
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], p) for name, p in resident.named_parameters())
    model._memory_manager.detach()
    vars(pipeline).clear()
    names.clear()
    del found, model


def test_quantised_on_the_way(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao")
    pytest.importorskip("torchao.quantization")

    save_file(Model().bfloat16().state_dict(), tmp_path / "model.safetensors")
    names = {"torchao": torchao, "oracle_offload": oracle_offload, "folder": tmp_path}
    names["Model"] = Model
    exec(compile(block("int8"), "docs/from-disk.md", "exec"), names)
    layers = names["manager"].layers
    assert [layer.format.name for layer in layers] == ["torchao", "torchao"]
    names["manager"].detach()
