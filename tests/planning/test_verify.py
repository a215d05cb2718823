"""Plans compared with recordings of the trainings that they plan, on the simulated device."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload import Budget, cli
from oracle_offload.engine import simulator
from oracle_offload.model.witness import Witness
from oracle_offload.planning.measure import Stage, Step
from oracle_offload.planning.speed import Speed
from oracle_offload.planning.verify import Row, Verification

GOLDEN = Path(__file__).parents[1] / "data" / "plan"
# Set to write the golden files again; then read the difference before committing it.
UPDATE = os.environ.get("ORACLE_OFFLOAD_UPDATE_GOLDEN") == "1"
RATES = dict(link_gbps=0.02, memory_gbps=25.0, tflops=0.008, launch_s=12e-6)
ENGINE = (
    *("units", "managed weights", "masters on the host", "arena"),
    *("to the device, a step", "to the host, a step", "time of a step"),
)
ALLOCATED = ("kept on the device", "most on the device", "activations")
STREAMED = ENGINE[:-1]


def recorded(
    model: nn.Module, step: Any, budget: int, steps: int = 6
) -> oracle_offload.observe.Recording:
    """Train in virtual time, at `RATES`, with everything that is managed streamed; record it."""
    with simulator.device("rtx4090", **RATES):
        manager = oracle_offload.attach(model, "cpu", vram_budget=budget)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01)
        try:
            assert len(manager.layers) > 7
            with oracle_offload.record() as recorder:
                for _ in range(steps):
                    with Witness(strict=False, clock=True):
                        step().backward()
                    simulator.finish()
                    optimizer.step()
                    optimizer.zero_grad()
            return recorder.recording()
        finally:
            manager.detach()


def llama() -> tuple[Any, Any]:
    """A Llama whose weights are not negligible next to the floor of an arena."""
    kind, config = architectures.class_and_config("llama")
    config.update(dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4))
    return kind, config


def planned_lora() -> oracle_offload.planning.Plan:
    kind, config = llama()
    return oracle_offload.plan(
        kind,
        config=config,
        rank=4,
        targets=["q_proj", "v_proj"],
        optimizer="sgd",
        sample=16,
        ram="64GB",
        budget=Budget(offload_percent=1.0),
        **RATES,
    )


@pytest.fixture(scope="module")
def lora() -> tuple[oracle_offload.planning.Plan, oracle_offload.observe.Recording]:
    """A plan of a LoRA, and a recording of that training."""
    from peft import LoraConfig, get_peft_model

    found = planned_lora()
    kind, config = llama()
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).requires_grad_(False).train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    trained = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    ids = torch.zeros(1, 16, dtype=torch.int64)

    def step() -> Any:
        return trained(input_ids=ids, labels=ids).loss

    return found, recorded(trained, step, found.fit.arena_bytes)


def by_name(found: Any) -> dict[str, Row]:
    return {row.name: row for row in found.rows}


def test_a_lora_is_as_it_was_planned(lora: Any) -> None:
    found, recording = lora
    rows = by_name(found.verify(recording))
    for name in STREAMED:
        assert rows[name].difference == 0 and rows[name].said == "equal", name
    assert rows["to the device, a step"].planned >= found.fit.x_min_bytes > 0
    time = rows["time of a step"]
    assert time.planned == (found.speed.low_s, found.speed.high_s)
    assert time.difference == 0 and time.said == "in the interval"
    assert time.measured == pytest.approx(found.speed.step_s, rel=0.03)


def test_what_cannot_be_compared_says_why_by_name(lora: Any) -> None:
    found, recording = lora
    verified = found.verify(recording)
    text = str(verified)
    rows = by_name(verified)
    for name in ("kept on the device", "most on the device", "activations"):
        assert rows[name].difference is None and rows[name].measured is None
        assert rows[name].why_not == "torch counts no memory on cpu"
    assert rows["activations"].planned == found.step.activations
    apart = [row.name for row in found.storage.rows if row.name != "weights"]
    assert apart == ["buffers", "adapters", "gradients"]
    for name in apart:
        assert "no recording tells it apart" in rows[name].said
    listed = text.partition("Not compared\n")[2]
    assert [line.split(" (")[0].strip() for line in listed.splitlines() if " (planned" in line] == [
        "kept on the device",
        "most on the device",
        "activations",
        *apart,
    ]


def changed(
    recording: oracle_offload.observe.Recording, **fields: Any
) -> oracle_offload.observe.Recording:
    """The recording, with other fields in each of its steps."""
    events = [
        {**event, **fields} if event["event"] == "step" else event for event in recording.events
    ]
    return type(recording)(recording.header, events)


def test_another_arena_is_no_measure_of_this_plan(lora: Any) -> None:
    found, recording = lora
    counters = {**recording.steps()[-1]["counters"], "arena_bytes": found.fit.arena_bytes - 512}
    rows = by_name(found.verify(changed(recording, counters=counters)))
    assert rows["arena"].difference == -512 and rows["arena"].said.startswith("-")
    for name in ("to the device, a step", "to the host, a step", "time of a step"):
        assert rows[name].measured is not None and rows[name].difference is None
        assert "the plan is for another" in rows[name].why_not


def test_masters_that_were_not_locked_count_and_rings_do_not(lora: Any) -> None:
    found, recording = lora
    counters = dict(recording.steps()[-1]["counters"])
    half = counters["locked_bytes"] // 2
    counters |= {"locked_bytes": half + 4096, "pageable_bytes": half, "ring_bytes": 4096}
    rows = by_name(found.verify(changed(recording, counters=counters)))
    assert rows["masters on the host"].said == "equal"


def test_a_time_beyond_the_interval(lora: Any) -> None:
    found, recording = lora
    low, high = found.speed.low_s, found.speed.high_s
    longer = by_name(found.verify(changed(recording, seconds=1.5 * high)))["time of a step"]
    assert longer.difference == pytest.approx(0.5 * high)
    assert longer.said == "+50.0% beyond the interval"
    shorter = by_name(found.verify(changed(recording, seconds=0.5 * low)))["time of a step"]
    assert shorter.difference == pytest.approx(-0.5 * low)
    assert shorter.said == "-50.0% beyond the interval"


@pytest.mark.parametrize("how", ["after", "in", "host"])
def test_a_full_training_is_as_it_was_planned(
    how: str, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oracle_offload.train import stepping, stream_optimizer

    # As in a real arena, there is room for what waits to be stepped.
    monkeypatch.setattr(stepping, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 2)
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    found = oracle_offload.plan(
        net,
        train="full",
        during_backward=how == "in",
        card=24,
        ram="64GB",
        budget=Budget(vram_budget="2MiB"),
        sample={"input": (2, 256)},
    )
    x = torch.ones(2, 256)
    with (
        oracle_offload.attach(net, "cpu", vram_budget=found.fit.arena_bytes),
        oracle_offload.record() as record,
    ):
        optimizer = torch.optim.AdamW(net.parameters())
        if how != "host":
            stream_optimizer(optimizer, during_backward=how == "in")
        for _ in range(8):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = by_name(found.verify(record.recording()))
    there, home = rows["to the device, a step"], rows["to the host, a step"]
    if how == "host":
        assert home.measured == home.planned == sum(p.nbytes for p in net.parameters())
        for row in (there, rows["time of a step"]):
            assert row.why_not == "the optimizer was not streamed, and the plan's is"
        return
    assert home.measured == pytest.approx(home.planned, rel=1e-3)
    assert there.measured == pytest.approx(there.planned, abs=6 * 4 * 256**2)
    assert not rows["time of a step"].why_not


@pytest.mark.parametrize("number", [1, 3])
def test_a_full_training_sends_its_gradients_to_the_host(number: int, sim: Any) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    found = oracle_offload.plan(
        net,
        train="full",
        optimizer="sgd",
        card=24,
        ram="64GB",
        budget=Budget(offload_percent=1.0),
        measure=False,
        micro_batches=number,
    )

    def step() -> Any:
        """Leave the backward of the last micro-batch to the code that records."""
        for _ in range(number - 1):
            net(torch.ones(2, 64)).sum().backward()
        return net(torch.ones(2, 64)).sum()

    recording = recorded(net, step, found.fit.arena_bytes)
    rows = by_name(found.verify(recording))
    sent = rows["to the host, a step"]
    assert (
        sent.measured == number * sum(p.nbytes for p in net.parameters()) and sent.difference == 0
    )
    assert rows["to the device, a step"].measured > 0
    assert rows["to the device, a step"].why_not == "it was not measured"
    assert rows["time of a step"].why_not == "it was not measured"


def test_what_is_missing_in_a_recording_is_named(lora: Any, sim: Any) -> None:
    found, recording = lora
    short = type(recording)(
        recording.header, [event for event in recording.events if event["step"] < 4]
    )
    rows = by_name(found.verify(short))
    assert rows["units"].said == "equal"
    assert "five steps or more" in rows["time of a step"].said
    assert "five steps or more" in rows["to the device, a step"].said
    with oracle_offload.record() as nothing:
        pass
    verified = found.verify(nothing.recording())
    assert "recorded on no device" in verified.sentence()
    assert all(row.difference is None and row.why_not for row in verified.rows)
    resident = oracle_offload.plan("1M", card=24, ram="64GB").verify(recording)
    assert "nothing streams" in by_name(resident)["units"].said
    total = oracle_offload.plan("32B", card=24, ram="128GB").verify(recording)
    assert by_name(total)["arena"].why_not == "only a number of parameters is known"


def test_sums_of_several_models_are_compared_with_none(lora: Any) -> None:
    found, recording = lora
    events = [dict(event) for event in recording.events]
    next(e for e in events if e["event"] == "compute" and e["model"])["model"] = "another"
    rows = by_name(found.verify(type(recording)(recording.header, events)))
    assert "sums of 2 models: PeftModel, another" in rows["units"].why_not


UNIT = 2 * (512 * 512 + 512)  # bytes of a layer of `full`


def full() -> oracle_offload.planning.Plan:
    """A full training of two micro-batches together, whose step and time are known."""
    found = oracle_offload.plan(
        nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))),
        train="full",
        optimizer="sgd",
        master_dtype="fp32",
        dtype="bf16",
        card=24,
        ram="1GiB",
        budget=Budget(offload_percent=1.0),
        measure=False,
    )
    speed = Speed(1.5, 1.75, 2.0, 1.0, 0.5, 1.0, 5000.0, "link")
    return replace(found, step=Step([Stage(700, 300)], micro_batches=2), speed=speed)


def step_of(device: str, number: int, **fields: Any) -> dict[str, Any]:
    """A row of a recording, of a step whose engine counted what `full` plans."""
    counters = {
        "units": 8,
        "managed_bytes": 8 * UNIT,
        "locked_bytes": 60000,
        "pageable_bytes": 9000,
        "ring_bytes": 400,
        "arena_bytes": 2 * UNIT,
        "h2d_bytes": 5000,
        "d2h_bytes": 2 * 8 * UNIT,
    }
    return {
        "event": "step",
        "device": device,
        "step": number,
        "label": "",
        "timed": False,
        "seconds": 1.75,
        "allocated_bytes": 1000 + number,
        "peak_bytes": 3000 - number,
        "counters": counters | fields.pop("counters", {}),
        **fields,
    }


def recorded_by_hand(*events: dict[str, Any]) -> oracle_offload.observe.Recording:
    names = {"cuda:0": "First", "cuda:1": "Second"}
    header: Any = {"devices": [{"device": d, "name": name} for d, name in names.items()]}
    return oracle_offload.observe.Recording(header, list(events))


def told(found: Verification) -> dict[str, tuple[Any, Any, str]]:
    return {row.name: (row.planned, row.measured, row.why_not) for row in found.rows}


def test_each_row_has_its_figure_of_the_plan_and_of_the_recording() -> None:
    found = full()
    one = step_of("cuda:0", 3, label="warm-up", seconds=9.0)
    others = [step_of("cuda:1", n, seconds=1.0 + n / 2) for n in (1, 2)]
    use = {"event": "compute", "device": "cuda:0", "model": "A"}
    compared = found.verify(recorded_by_hand(one, use, *others, {**use, "device": "cuda:1"}))
    assert compared.device == "Second (cuda:1)", "of the first whose steps make an average"
    fit = found.fit
    inside = "it is in the sums above, and no recording tells it apart"
    rows = {
        "units": (8, 8, ""),
        "managed weights": (8 * UNIT, 8 * UNIT, ""),
        "masters on the host": (8 * UNIT, 68600, ""),
        "arena": (2 * UNIT, 2 * UNIT, ""),
        "to the device, a step": (5000.0, 5000, ""),
        "to the host, a step": (2 * 8 * UNIT,) * 2 + ("",),
        "time of a step": ((1.5, 2.0), 1.75, ""),
        "kept on the device": (fit.device_bytes, 1002, ""),
        "most on the device": (fit.device_bytes, 2999, ""),
        "activations": (700, 1997, ""),
        **{
            row.name: (row.bytes, None, inside)
            for row in found.storage.rows
            if row.name != "weights"
        },
    }
    assert told(compared) == rows
    assert compared.rows[4].measured == pytest.approx(5000)

    filled = replace(fit, device=fit.device | {"activations": 700}, host=fit.host | {"padding": 99})
    compared = replace(found, fit=filled).verify(recorded_by_hand(*others))
    assert told(compared)["kept on the device"] == (fit.device_bytes, 1002, "")
    assert told(compared)["masters on the host"] == (8 * UNIT + 99, 68600, "")
    assert told(compared)["most on the device"] == (fit.device_bytes + 700, 2999, "")

    alone = told(found.verify(recorded_by_hand(one, {**use, "model": ""})))
    short = "no whole step after the warm-up was recorded: record five steps or more"
    for name in ("to the device, a step", "to the host, a step", "time of a step"):
        assert alone[name] == (rows[name][0], None, short), name
    assert alone["units"] == (8, 8, "")


def test_why_rows_are_not_compared() -> None:
    found, steps = full(), [step_of("cuda:0", n) for n in (1, 2)]
    engine = [name for name in told(found.verify(recorded_by_hand())) if name in ENGINE]
    assert engine == list(ENGINE)

    def why(plan: oracle_offload.planning.Plan, *events: dict[str, Any]) -> dict[str, str]:
        return {name: row[2] for name, row in told(plan.verify(recorded_by_hand(*events))).items()}

    nothing = "the recording holds no step of an attached model"
    said = why(found)
    assert {said[name] for name in (*ENGINE, *ALLOCATED)} == {nothing}
    assert found.verify(recorded_by_hand()).device == "First (cuda:0)"
    said = why(replace(found, fit=replace(found.fit, verdict="fits resident")), *steps)
    assert {said[name] for name in ENGINE} == {"by the plan it fits resident, and nothing streams"}
    assert {said[name] for name in ALLOCATED} == {""}
    uses = [{"event": "compute", "device": "cuda:0", "model": name} for name in ("B", "A", "B", "")]
    elsewhere = {"event": "compute", "device": "cuda:1", "model": "C"}
    assert {why(found, *steps, *uses, elsewhere)[name] for name in ENGINE} == {
        "the recording has sums of 2 models: A, B"
    }
    assert {why(found, *steps, uses[0], elsewhere)[name] for name in ENGINE} == {""}

    total = oracle_offload.plan("32B", card=24, ram="128GB")
    assert {why(total, *steps)[name] for name in ENGINE} == {total.storage.why_not}
    without = total.verify(oracle_offload.observe.Recording({"devices": []}, []))
    assert without.device == "" and "recorded on no device" in without.sentence()

    unknown = replace(found, speed=Speed(why="not known"), step=Step(why="it was not measured"))
    said = why(unknown, *steps)
    assert said["to the device, a step"] == said["time of a step"] == "not known"
    assert said["to the host, a step"] == said["kept on the device"] == ""
    for name in ("most on the device", "activations"):
        assert said[name] == "activations are unknown: it was not measured"
    rows = told(unknown.verify(recorded_by_hand(*steps)))
    assert rows["to the device, a step"][:2] == (None, 5000)
    assert rows["time of a step"][:2] == (None, 1.75)
    assert rows["most on the device"][:2] == (None, 2999)

    other = [step_of("cuda:0", 1, counters={"arena_bytes": 1 << 20})]
    said = why(unknown, *other)
    for name in ("to the device, a step", "to the host, a step", "time of a step"):
        assert said[name] == "the arena has 1.00 MiB, and the plan is for another"
    uncounted = [step_of("cuda:0", 1, allocated_bytes=None, peak_bytes=None)]
    rows = told(found.verify(recorded_by_hand(*uncounted)))
    for name in ALLOCATED:
        assert rows[name][1:] == (None, "torch counts no memory on cuda:0")


def test_the_memory_of_a_gpu_is_compared(lora: Any) -> None:
    """The rows as a GPU has them: torch's allocated bytes and its peak."""
    found, recording = lora
    stays, live = found.fit.device_bytes - found.step.activations, 1.1 * found.step.activations
    on_gpu = changed(recording, allocated_bytes=stays, peak_bytes=stays)
    dict.update(on_gpu.steps()[3], peak_bytes=stays + live)
    rows = by_name(found.verify(on_gpu))
    assert rows["kept on the device"].said == "equal"
    assert rows["activations"].said == "+10.0%"
    assert rows["most on the device"].measured == stays + live
    kind, config = architectures.class_and_config("llama")
    blind = oracle_offload.plan(kind, config=config, card=24, ram="64GB", measure=False)
    rows = by_name(blind.verify(on_gpu))
    for name in ("activations", "most on the device"):
        assert rows[name].why_not == "activations are unknown: it was not measured"


def test_the_difference_of_a_figure_and_what_is_said_of_it() -> None:
    ends = (2.0, 4.0)
    rows: list[tuple[Any, Any, str, float | None, str]] = [
        (100, 100, "", 0, "equal"),
        (100, 125, "", 25, "+25.0%"),
        (100, 75.0, "", -25, "-25.0%"),
        (0, 5.0, "", 5, "nothing was planned"),
        (0, 0, "", 0, "equal"),
        (ends, 2.0, "", 0, "in the interval"),
        (ends, 4.0, "", 0, "in the interval"),
        (ends, 1.0, "", -1, "-50.0% beyond the interval"),
        (ends, 5.0, "", 1, "+25.0% beyond the interval"),
        (100, 125, "other", None, "not compared: other"),
        (None, 125, "", None, "not compared: "),
        (100, None, "none", None, "not compared: none"),
        (100, None, "", None, "not compared: "),
    ]
    for planned, measured, why, difference, said in rows:
        row = Row("bytes", "size", planned, measured, why)
        assert (row.difference, row.said) == (difference, said), row


def by_hand() -> Verification:
    """Rows of each kind, of a plan for a card."""
    found = oracle_offload.plan("1B", card=24, ram="64GB")
    return Verification(
        found,
        "A <card> (cuda:0)",
        [
            Row("units", "count", 12, 12),
            Row("to the device, a step", "size", 3 << 30, 2 << 30),
            Row("time of a step", "time", (1.5, 2.0), 2.5),
            Row("activations", "size", None, 5 << 20, "they are unknown: " + "a word " * 12),
            Row("arena", "size", 1 << 20, None, "nothing <streams>"),
        ],
    )


@pytest.mark.parametrize("how", ["txt", "json", "html"])
def test_what_is_shown_of_rows_is_what_it_was(how: str) -> None:
    found = by_hand()
    text = {
        "txt": lambda: found.to_text(width=72, color=True),
        "json": found.to_json,
        "html": found._repr_html_,
    }[how]()
    path = GOLDEN / f"verified.{how}"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text("utf-8")
    assert found._repr_html_() in found.to_html() and str(found) == found.to_text()
    assert "<title>planned and measured</title>" in found.to_html()


def test_the_command_shows_a_recording_beside_the_plan(
    lora: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, recording = lora
    recording.export(tmp_path / "run.jsonl")
    kind, config = llama()
    (tmp_path / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [kind.__name__]})
    )
    command = ["plan", str(tmp_path / "config.json"), "--rank", "4", "--targets", "q_proj"]
    command += ["v_proj", "--optimizer", "sgd", "--sample", "16", "--offload-percent", "1.0"]
    command += ["--ram", "64GB", "--dtype", "bf16"]
    for name, rate in RATES.items():
        command += [f"--{name.replace('_', '-')}", str(rate)]
    page = tmp_path / "page.html"
    run = ["--verify", str(tmp_path / "run.jsonl")]
    assert cli.main([*command, *run, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    verified = found.verify(tmp_path / "run.jsonl")
    assert text.splitlines()[1:] == verified.to_text().splitlines()[1:]
    assert cli.main([*command, *run, "--no-measure", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "oracle_offload/plan-verified/1"
    assert said["rows"][:4] == json.loads(verified.to_json())["rows"][:4]
    shown = page.read_text("utf-8")
    assert shown.startswith("<!DOCTYPE html>") and "in the interval" in shown
    assert max(map(len, verified.to_text().splitlines())) <= 100
    (tmp_path / "other.jsonl").write_text("{}")
    for name, says in (("gone.jsonl", "ENOENT"), ("other.jsonl", "no part of a recording")):
        assert cli.main(["plan", "1M", "--verify", str(tmp_path / name)]) == 1
        said = capsys.readouterr()
        assert says in said.err and name in said.err and not said.out
