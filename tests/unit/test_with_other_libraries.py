"""The code of docs/with-other-libraries.md, run unchanged, next to the same without attach."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "with-other-libraries.md").read_text("utf-8")
NEEDS = {
    "transformers Trainer": "accelerate",
    "TRL": "torch",
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "DDP": "peft",
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.M)[1:]
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
        assert len(blocks) <= 1
        if blocks:
            found[title] = blocks[0]
    return found


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()


def run(code: str, folder: Path, *, managed: bool) -> tuple[dict[str, Any], int]:
    """Run a block on the simulated device; the weights afterwards, and how many were managed."""
    import oracle_offload

    model = language_model()
    ids = torch.randint(0, 100, (6, 9), generator=torch.Generator().manual_seed(3))
    layers = 0

    class Resident:
        layers: tuple[()] = ()

        def detach(self) -> None:
            pass

    def attach(module: Any, device: str, **options: Any) -> Any:
        nonlocal layers
        if not managed:
            return Resident()
        manager = oracle_offload.attach(module, device, **options)
        layers = len(manager.layers)
        return manager

    code = code.replace('"cuda"', '"cpu"').replace("oracle_offload.attach(", "attach(")
    if "TrainingArguments" in code:
        code = code.replace("report_to=[]", "report_to=[], use_cpu=True, disable_tqdm=True")
    code = code.replace("devices=1", "devices=1, enable_progress_bar=False")
    torch.manual_seed(1)
    names = {
        "attach": attach,
        "model": model,
        "rows": [{"input_ids": row, "labels": row} for row in ids],
        "folder": str(folder),
        "simulated": True,
        "accelerator": "cpu",
        "oracle_offload": oracle_offload,
    }
    exec(compile(code, "docs/with-other-libraries.md", "exec"), names)
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if "detach" not in code and managed:
        names["manager"].detach()
    return values, layers


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if accelerate := __import__("sys").modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("title", sections())
def test_the_code_of_the_page_trains_as_without_attach(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NEEDS[title])
    monkeypatch.chdir(tmp_path)
    if title == "DDP":
        import torch.distributed as dist

        dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    code = sections()[title]
    before = {name: value.clone() for name, value in language_model().state_dict().items()}
    expected, none = run(code, tmp_path, managed=False)
    found, layers = run(code, tmp_path, managed=True)
    assert none == 0 and layers >= 14
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if title != "TRL":  # of which the page shows the call of attach alone
        start = {name: value for name, value in before.items() if name in found}
        assert all(found[name].any() for name in found if "lora_B" in name)  # zero at the start
        changed = [name for name in start if not torch.equal(found[name], start[name])]
        assert bool(changed) != (title == "DDP"), "there the adapters alone are trained"


def test_every_library_promised_has_its_section() -> None:
    titles = re.findall(r"^## (.+)$", PAGE, flags=re.M)
    promised = ["transformers Trainer", "accelerate", "Lightning", "TRL", "DDP", "FSDP"]
    assert set(promised) <= set(titles) and "The order of calls" in titles


def test_ddp_takes_mixed_devices_only_where_the_frozen_ones_are_ignored(tmp_path: Path) -> None:
    """What the page does for DDP; "meta" is used as the other device."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    parallel = torch.nn.parallel.DistributedDataParallel
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta"))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="must be on the same type of devices"):
        parallel(model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    parallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    assert parallel(model).module is model


def test_a_sharded_model_is_refused_by_name(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import oracle_offload

    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    with pytest.raises(oracle_offload.OffloadError, match="DTensor"):
        oracle_offload.attach(fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8))), "cpu")
