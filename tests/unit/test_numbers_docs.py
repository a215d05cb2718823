"""The code of docs/numbers.md, run unchanged on the simulated device."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

import oracle_offload  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numbers.md").read_text("utf-8")


def blocks(section: str) -> list[str]:
    text = re.split(rf"^## {re.escape(section)}\n", PAGE, flags=re.M)[1]
    text = re.split(r"^## ", text, flags=re.M)[0]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


def run(code: list[str], **names: Any) -> dict[str, Any]:
    for block in code:
        block = block.replace('"cuda"', '"cpu"').replace('"auto"', '"cpu"')
        block = block.replace("report_to=[]", "report_to=[], use_cpu=True, disable_tqdm=True")
        exec(compile(block, "docs/numbers.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def fresh_state(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let go of what an Accelerator leaves behind, and of frames that logged errors lead to."""
    yield
    caplog.get_records("call").clear()
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(True)


@contextlib.contextmanager
def language_model() -> Iterator[Any]:
    import transformers

    sizes = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.LlamaForCausalLM(config).train()
    manager = oracle_offload.attach(model, "cpu")
    try:
        yield model
    finally:
        manager.detach()


def rows() -> list[dict[str, Any]]:
    ids = torch.randint(0, 100, (6, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def steps_written(names: dict[str, Any]) -> list[int]:
    names["metrics"].close()
    (metrics_run,) = oracle_offload.observe.read_metrics("metrics.jsonl")
    losses = dict(metrics_run.series("loss"))
    moved = [step for step, nbytes in metrics_run.series("h2d_bytes") if nbytes > 0]
    assert set(moved) <= set(losses)
    return moved


def test_the_trainer_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with language_model() as model:
        names = {"model": model, "folder": str(tmp_path), "rows": rows()}
        assert steps_written(run(blocks("transformers Trainer"), **names)) == [1, 2, 3]


def test_lightning_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning

    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    with language_model() as model:
        names = run(blocks("Lightning"), module=Module(model), rows=loader, logger=False)
        assert steps_written(names) == [1, 2, 3]


def test_accelerate_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    with language_model() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "loader": loader, "simulated": True}
        assert steps_written(run(blocks("accelerate"), **names)) == [1, 2]


def test_the_sinks_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    seen: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda tag, value, step: seen.append((tag, step)))
    logged = SimpleNamespace(
        log=lambda data, step: seen.append((step, data["oracle_offload/loss"]))
    )
    with tqdm(range(2), disable=False) as bar:
        code = blocks("TensorBoard, Weights & Biases, tqdm")
        run(code, writer=writer, run=logged, bar=bar, train=lambda batch: batch + 0.5)
    assert [row for row in seen if not isinstance(row[0], str)] == [(0, 0.5), (1, 1.5)]
    assert ("oracle_offload/loss", 1) in seen and "loss=1.5" in bar.postfix


def test_the_metrics_file_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    loader = torch.randn(3, 2, 64)
    names = run(blocks("A file: loss and memory per step"), model=model, loader=loader)
    (metrics_run,) = names["runs"]
    assert [record["step"] for record in metrics_run.records] == [0, 1, 2]
    moved = metrics_run.series("h2d_bytes")
    assert [step for step, _ in moved] == [1, 2] and all(nbytes > 0 for _, nbytes in moved)
    losses, series = capsys.readouterr().out.splitlines()
    assert len(eval(losses)) == 3 and eval(series) == moved


def test_every_number_is_in_the_table() -> None:
    from oracle_offload.observe import Meter

    (table,) = re.findall(r"^\| keys \| \|\n(.*?)\n\n", PAGE, flags=re.M | re.S)
    listed = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|(.+?)\|", table, re.M))))
    assert listed == {"step", "loss", *Meter(sensors=True).read()}
