"""The verdict of a plan, its arithmetic, its report and its command."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload import cli
from oracle_offload.planning.cards import _REACHED, BY_SIZE, CARDS, card_of
from oracle_offload.planning.fit import fit
from oracle_offload.planning.report import _saved
from oracle_offload.planning.storage import storage_of
from oracle_offload.sizes import GIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text("utf-8")


def net(blocks: int = 8, width: int = 256) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))


# ---- what guides promise ----


def test_four_billion_parameters_in_mixed_precision_keep_72_gb() -> None:
    found = oracle_offload.plan("4B", train="full", master_dtype="fp32", card=80, ram="64GB")
    assert round(found.storage.bytes / 1e9, 3) == 72.0
    shares = {name: share for name, _, share in found.anatomy()}
    assert {name: round(share, 6) for name, share in shares.items()} == {
        "weights": 2,
        "master copies": 4,
        "gradients": 4,
        "optimizer state": 8,
    }
    assert found.verdict == "fits resident" and "not needed" in str(found)
    beyond = oracle_offload.plan("4B", train="full", master_dtype="fp32", card=48, ram="64GB")
    assert beyond.verdict == "does not fit" and not beyond.fits


def llama_65b() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=8192, intermediate_size=22016, num_hidden_layers=80)
    return LlamaForCausalLM, LlamaConfig(**sizes, num_attention_heads=64)


def test_qlora_of_65_billion_parameters_fits_48_gb() -> None:
    kind, config = llama_65b()
    found = oracle_offload.plan(
        kind, config=config, quantise="nf4", rank=64, card=48, ram=GIB, measure=False
    )
    assert 65e9 < found.storage.parameters < 65.5e9
    assert found.verdict == "fits resident"
    recipe = replace(found.question.recipe, quantise=None)
    room = replace(found.question.room, host_bytes=64 * 10**9)
    plain = fit(storage_of(found.question.source, recipe), None, room)
    assert plain.verdict == "does not fit"


def test_32_billion_parameters_at_91_percent_fit_24_and_128_gb() -> None:
    found = oracle_offload.plan("32B", offload_percent=0.91, card=24, ram="128GB")
    assert found.verdict == "fits streamed" and found.fit.offload_percent == pytest.approx(0.91)
    assert found.fit.arena_bytes == pytest.approx(0.09 * 64e9)
    assert found.fit.x_min_bytes == pytest.approx(2 * 0.91 * 64e9)
    less = oracle_offload.plan("32B", offload_percent=0.91, card=24, ram="32GB")
    assert less.verdict == "does not fit"


def test_what_a_number_of_parameters_leaves_unknown_is_said() -> None:
    found = oracle_offload.plan("32B", card=24, ram="128GB")
    assert found.verdict == "fits streamed" and "comes off the arena" in found.sentence()
    assert 'vram_budget="auto"' in found.to_dict()["python"]
    assert any(said.startswith("the LoRA, its gradients") for said in found.assumptions)
    told = found.on(24, ram="128GB", offload_percent=0.91)
    assert "comes off" not in told.sentence() and "vram_budget=57" in str(told)
    full = oracle_offload.plan("1B", train="full", card=8, ram="128GB")
    assert not any("the LoRA" in said for said in full.assumptions)


def test_what_is_absent_here_is_named_with_who_has_it() -> None:
    text = str(oracle_offload.plan("32B", card=24, ram="128GB"))
    for word in ("NVMe", "ZeRO-Infinity", "ZeRO-Offload", "CPUOffloadOptimizer", "FSDP2", "ZeRO-3"):
        assert word in text


# ---- verdicts at their edges ----


def device_need(model: nn.Module, **options: Any) -> int:
    return oracle_offload.plan(model, vram="1GiB", ram="1GiB", margin=0, **options).storage.bytes


def test_resident_to_the_byte() -> None:
    need = device_need(net(), rank=1)
    options = dict(rank=1, ram="1GiB", margin=0)
    assert oracle_offload.plan(net(), vram=need, **options).verdict == "fits resident"
    assert oracle_offload.plan(net(), vram=need - 1, **options).verdict == "fits streamed"


def test_streamed_to_the_byte() -> None:
    found = oracle_offload.plan(
        net(), vram="1GiB", ram="1GiB", margin=0, rank=1, offload_percent=1.0
    )
    floor = found.storage.device_bytes + found.storage.floor_bytes
    options = dict(rank=1, ram="1GiB", margin=0)
    assert oracle_offload.plan(net(), vram=floor, **options).verdict == "fits streamed"
    short = oracle_offload.plan(net(), vram=floor - 1, **options)
    assert short.verdict == "does not fit" and short.fit.missing_device == 1
    host = found.fit.host_bytes
    enough = oracle_offload.plan(net(), vram=floor, **options | {"ram": -(-host * 10 // 9)})
    assert enough.verdict == "fits streamed" and enough.fit.ram_budget is None
    little = oracle_offload.plan(net(), vram=floor, **options | {"ram": "1MiB"})
    assert little.verdict == "does not fit" and "device" in little.fit.why
    none = oracle_offload.plan(net(), vram=floor, **options | {"ram": "100KiB"})
    assert none.fit.missing_host > 0 and "ram_budget" in none.fit.why


def test_a_share_elsewhere_is_a_share() -> None:
    found = oracle_offload.plan("32B", card=24, ram="64GB")
    for wrong in (91, -0.1, float("nan")):
        with pytest.raises(ValueError, match="offload_percent="):
            found.on(24, ram="64GB", offload_percent=wrong)


def test_the_margin_is_left_alone() -> None:
    need = device_need(net(), rank=1)
    options = dict(rank=1, ram="1GiB", margin=0.5)
    assert oracle_offload.plan(net(), vram=2 * need, **options).verdict == "fits resident"
    assert oracle_offload.plan(net(), vram=2 * need - 2, **options).verdict == "fits streamed"


def test_full_training_streams_with_gradients_and_state_on_the_host() -> None:
    found = oracle_offload.plan(net(), train="full", vram="2MiB", ram="1GiB")
    assert found.verdict == "fits streamed"
    host = found.fit.host
    assert host["gradients"] == host["weights"] and host["optimizer state"] >= 2 * host["weights"]
    assert set(found.fit.device) == {"arena"}


# ---- cards ----


def test_a_card_reaches_the_same_share_of_what_its_maker_says_whichever_it_is() -> None:
    makers = {"RTX 3090": (936, 71.0), "A100 80GB": (2039, 312.0)}
    for name, (memory_gbps, tflops) in makers.items():
        card = CARDS[name]
        assert card.memory_gbps == (0.75 * memory_gbps, 0.95 * memory_gbps)
        assert card.tflops == tuple(share * tflops for share in _REACHED)
        assert card.launch_s[0] > card.launch_s[1] > 0  # the slowest first, as everywhere
        slowest, middle, fastest = (card.rates(share) for share in (0, 0.5, 1))
        for rate, ends in {"tflops": card.tflops, "launch_s": card.launch_s}.items():
            assert (slowest[rate], fastest[rate]) == ends
            assert middle[rate] == pytest.approx(sum(ends) / 2)
    assert 0 < _REACHED[0] < _REACHED[1] < 1


def test_every_size_of_card_and_host_has_its_preset() -> None:
    assert list(BY_SIZE) == [8, 12, 16, 24, 32, 48, 80]
    for size, name in BY_SIZE.items():
        for said in (size, f"{size}GB", f"{size} gb", name, name.lower()):
            assert card_of(said) is CARDS[name]
        assert CARDS[name].memory_bytes == size * GIB
        for ram in (32, "64", 128):
            found = oracle_offload.plan("1B", card=size, ram=ram)
            assert found.fits and found.question.room.host_bytes == int(ram) * GIB
    assert oracle_offload.plan("1B", ram="64GB").question.room.host_bytes == 64_000_000_000
    with pytest.raises(ValueError, match="card='7' is not known; there are RTX 4060"):
        card_of("7")


def test_a_measured_rate_replaces_the_makers_within_five_percent() -> None:
    card = card_of(24, link_gbps=20.0, launch_s=1e-5)
    assert card.link_gbps == pytest.approx((19.0, 21.0))
    assert card.launch_s == pytest.approx((1.05e-5, 0.95e-5))
    assert card.measured == {"link_gbps", "launch_s"} and card.tflops == CARDS["RTX 4090"].tflops
    slow, fast = card.rates(0.0), card.rates(1.0)
    assert slow["link_gbps"] < fast["link_gbps"] and slow["launch_s"] > fast["launch_s"]
    for wrong in (0, -1.0, True, float("nan"), "20"):
        with pytest.raises(ValueError, match="link_gbps="):
            card_of(24, link_gbps=wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(train="qlora"), "train='qlora' is neither"),
        (dict(quantise="int2"), "quantise='int2' is not known"),
        (dict(quantise="nf4", train="full"), "quantised weights are not trained"),
        (dict(rank=0), "rank=0 is not a whole number above zero"),
        (dict(batch=1.5), "batch=1.5 is not"),
        (dict(margin=1.0), "margin=1.0 is outside"),
        (dict(offload_percent=91), "offload_percent=91 is outside"),
        (dict(dtype="bf8"), "dtype='bf8' is not known"),
        (dict(adapter_dtype=torch.int8), "adapter_dtype=torch.int8 is not known"),
        (dict(ram="much"), "ram='much' is not a size"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        oracle_offload.plan("1B", **options)


# ---- what else could be done ----


def test_the_ladder_is_ordered_and_marks_what_changes_the_result() -> None:
    found = oracle_offload.plan(net(), train="full", vram="1MiB", ram="2MiB")
    rungs = found.alternatives
    assert found.verdict == "does not fit"
    assert [rung.option for rung in rungs] == [
        "optimizer='adamw8bit'",
        "optimizer='adafactor'",
        "train='lora'",
    ]
    assert all(rung.changes_result for rung in rungs)
    for rung in rungs:  # each is what `plan` says when it is asked for that
        options = dict(train="full") | eval(f"dict({rung.option})")
        other = oracle_offload.plan(net(), vram="1MiB", ram="2MiB", **options)
        assert other.verdict == rung.verdict
        assert found.fit.host_bytes - other.fit.host_bytes == rung.saves_host
    assert oracle_offload.plan("1B", card=24, ram="64GB").alternatives == []


def test_alternatives_leave_the_plan_itself_alone() -> None:
    found = oracle_offload.plan(net(), train="full", vram="1MiB", ram="1GiB")
    assert all(
        t.requires_grad for unit in found.storage.units for leaf in unit for t in leaf.tensors()
    )


# ---- what is shown ----


def test_text_json_and_page_hold_the_same(tmp_path: Path) -> None:
    kind, config = architectures.class_and_config("flux")
    found = oracle_offload.plan(
        kind, config=config, vram="300KiB", ram="64GB", rank=1, measure=False
    )
    said = json.loads(found.to_json())
    assert said == json.loads(json.dumps(found.to_dict()))
    assert said["schema"] == "oracle_offload/plan/1" and said["verdict"] == found.verdict
    assert sum(said["persistent_bytes"].values()) == found.storage.bytes
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    page = found.to_html()
    assert "<script" not in page and found._repr_html_() in page
    for row in ("weights", "adapters", "gradients", "optimizer state", "together"):
        assert row in text and row in page
    assert max(map(len, found.to_text(width=60).splitlines())) <= 78


def test_each_alternative_is_shown_with_what_it_saves_costs_and_changes() -> None:
    found = oracle_offload.plan("4B", train="full", card=24, ram="64GB")
    rungs = [replace(r, changes_result=nth != 1) for nth, r in enumerate(found.alternatives)]
    found = replace(found, alternatives=rungs)
    mark, changing = "changes the result of training", len(rungs) - 1
    assert changing > 0
    text = " ".join(str(found).split())
    page = found.to_html()
    assert text.count(f"[{mark}]") == page.count(f'class="mark">{mark}') == changing
    listed = page[page.index("<h3>Alternatives, cheapest first</h3>") :]
    listed = listed[: listed.index("</ol>")]
    for rung in found.alternatives:
        row = f"{rung.name}: {_saved(rung)}, then {rung.verdict}; {rung.cost}"
        marked = f"{row} [{mark}]" if rung.changes_result else row
        assert " ".join(f"{marked} ({rung.option})".split()) in text
        assert f"<li>{html.escape(row)}" in listed
    head = text.index("Alternatives, cheapest first; and what each would change")
    assert text.index(found.alternatives[0].name) > head
    enough = oracle_offload.plan(net(), card=24, ram="64GB", rank=1, measure=False)
    assert not enough.alternatives
    assert "Alternatives" not in str(enough) and "Alternatives" not in enough.to_html()


def test_what_is_planned_can_be_pasted(sim: Any) -> None:
    found = oracle_offload.plan(net(), vram="1MiB", ram="1GiB", rank=1, margin=0)
    assert found.verdict == "fits streamed"
    code = found.to_dict()["python"].replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {"model": net().requires_grad_(False)}
    exec(code, names)
    manager = names["manager"]
    try:
        assert manager.attachment.arena.capacity_bytes == found.fit.arena_bytes
        assert len(manager.layers) == 8
    finally:
        manager.detach()
    packed = oracle_offload.plan(net(), vram="1MiB", ram="1GiB", rank=1, quantise="int8")
    assert "first quantise the frozen Linear weights: int8" in str(packed)
    resident = oracle_offload.plan(net(), card=24, ram="1GiB", rank=1).to_dict()["python"]
    assert resident.strip() == 'model.to("cuda")'


def test_the_configuration_has_the_keys_of_the_page_on_aitoolkit() -> None:
    import yaml

    found = oracle_offload.plan("32B", card=24, ram="128GB", offload_percent=0.91, batch=3)
    job = yaml.safe_load(found.to_dict()["aitoolkit"])
    page = (ROOT / "docs" / "ai-toolkit.md").read_text("utf-8")
    assert job["train"] == {
        "batch_size": 3,
        "gradient_checkpointing": True,
        "optimizer": "adamw",
        "dtype": "bf16",
    }
    assert job["model"] == {
        "quantize": False,
        "layer_offloading": True,
        "layer_offloading_transformer_percent": 0.91,
    }
    for key in ("layer_offloading", "layer_offloading_transformer_percent", "quantize"):
        assert f"`{key}" in page
    assert job["network"] == {"type": "lora", "linear": 16, "linear_alpha": 16}
    packed = oracle_offload.plan("32B", card=24, ram="128GB", quantise="fp8")
    job = yaml.safe_load(packed.to_dict()["aitoolkit"])
    assert job["model"]["qtype"] == "float8"
    assert oracle_offload.plan("32B", card=8, ram="8GB").to_dict()["aitoolkit"] == ""


# ---- the command ----


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_exits_with_3_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "32B", "--card", "24", "--ram", "128GB")
    assert code == 0 and "fits streamed" in out
    code, out, _ = run(capsys, "32B", "--card", "8", "--ram", "32GB", "--json")
    assert code == 3 and json.loads(out)["fits"] is False
    code, out, err = run(capsys, "32B", "--optimizer", "magic")
    assert code == 2 and out == "" and "optimizer='magic'" in err
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and "holds neither" in err
    page = tmp_path / "page.html"
    assert run(capsys, "1B", "--html", str(page))[0] == 0
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


def train() -> None:
    """Train five steps on the simulated device."""
    model = net(4, 16)
    manager = oracle_offload.attach(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    manager.detach()


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("oracle-")]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_page(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sim: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    torch.manual_seed(0)
    architectures.real("flux").save_pretrained(tmp_path / "FLUX.1-dev" / "transformer")
    (tmp_path / "FLUX.1-dev" / "model_index.json").write_text("{}")
    if "--verify" in command:
        with oracle_offload.record("run.jsonl"):
            train()
    words = command.split("#")[0].split()
    assert words[0] == "oracle-offload"
    assert cli.main(words[1:]) in (0, 3)
    assert capsys.readouterr().out


def test_the_code_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sim: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"train": train}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S):
        exec(compile(block, "docs/plan.md", "exec"), names)
    assert names["found"].fits
    assert "recorded on Simulated" in capsys.readouterr().out


def test_the_page_is_linked_from_the_readme() -> None:
    assert "(docs/plan.md)" in (ROOT / "README.md").read_text("utf-8")


def test_what_a_host_lacks_is_what_lies_there_beyond_its_room() -> None:
    for found in (
        oracle_offload.plan("4B", train="full", card=24, ram="8GB"),
        oracle_offload.plan(net(), train="full", vram="1MiB", ram="2MiB", margin=0, measure=False),
    ):
        fit = found.fit
        assert found.verdict == "does not fit" and not found.fits
        assert fit.missing_host == sum(fit.host.values()) - fit.host_room > 0
        assert fit.host_bytes == sum(fit.host.values())
    assert fit.why == "the host: gradients and optimizer state alone fill the host"
