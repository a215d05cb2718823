"""The code of docs/from-disk.md, run as it stands on the simulated device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload.engines import open_states  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "from-disk.md").read_text("utf-8")


def block(containing: str) -> str:
    found = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (only,) = (code for code in found if containing in code)
    return only.replace('"cuda"', '"cpu"')


class Model(torch.nn.Sequential):
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
    manager.detach()
    assert not open_states()
