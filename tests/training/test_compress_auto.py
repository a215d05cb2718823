"""What ``compress="auto"`` compresses: the least that removes stalls, and what the host lacks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, resident_pair
from models import Parts
from test_matrix import make_step
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from oracle_offload import _core
from oracle_offload.compress import choice, coder, steps
from oracle_offload.engine import simulator
from oracle_offload.engine.geometry import aligned
from oracle_offload.engine.simulated_time import SimulatedTime
from oracle_offload.errors import OffloadError
from oracle_offload.host.sizes import format_size
from oracle_offload.planning import unmeasured

pytestmark = pytest.mark.usefixtures("cache_folder")
SIZE, DEPTH, ROWS = 512, 24, 64
LAYER_BYTES = 2 * SIZE * SIZE
FORWARD_S = 2 * ROWS * SIZE * SIZE / 1e11  # of a layer, at 0.1 TFLOP/s


class Net(nn.Module):
    """Frozen layers whose weights are drawn as trained ones are, and a little that is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, False) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, 0, SIZE**-0.5)
        self.to(torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def link(times_computing):
    """A device on which all weights take so many times as long to copy as to compute with."""
    gbps = LAYER_BYTES / (times_computing * FORWARD_S) / 1e9
    changes = dict(tflops=0.1, link_gbps=gbps, launch_s=1e-7, copy_latency_s=1e-7)
    return simulator.device("rtx4090", **changes)


def test_what_has_values_already_is_not_looked_for_in_files():
    tensor = Net().layers[0].weight
    files = SimpleNamespace(have=lambda tensor: False)
    found = choice.Expected(files).bytes_of(tensor)
    assert found == choice.Expected(None).bytes_of(tensor) < tensor.nbytes


def train(model, steps=8, offload_percent=0.6, **options):
    """Return the seconds of the last step, the coded layers, and the device's summary."""
    optimizer = torch.optim.SGD([model.scale], lr=0.01)
    with attached(model, "cpu", offload_percent=offload_percent, **options) as manager:
        assert len(manager.layers) == DEPTH
        before = manager.state.engine.stats()["h2d_bytes"]
        for _ in range(steps):
            begin = simulator.finish()
            model(torch.randn(ROWS, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
            seconds = simulator.finish() - begin
            optimizer.step()
            optimizer.zero_grad()
        assert manager.state.engine.stats()["h2d_bytes"] > before
        coded = [bool(layer.coded) for layer in manager.layers]
        return seconds, coded, manager.memory_summary()


@pytest.mark.parametrize(
    ("times", "offload_percent", "least", "most"), [(1.2, 0.9, 8, 14), (2.5, 0.6, 19, 23)]
)
def test_a_step_that_waits_for_copies_has_a_part_compressed(times, offload_percent, least, most):
    options = dict(offload_percent=offload_percent)
    with link(times):
        plain_s, none, _ = train(Net(), **options)
        every_s, every, first = train(Net(), compress="auto", **options)
        part_s, some, told = train(Net(), compress="auto", **options)
        again_s, still, _ = train(Net(), compress="auto", **options)
    assert not any(none) and all(every)
    assert first.devices[0].models[0].compressed_because.endswith("none was measured here yet")
    assert least <= sum(some) <= most
    assert every_s < 0.95 * plain_s
    assert part_s <= 1.02 * every_s
    assert still == some and again_s == pytest.approx(part_s, rel=0.01), "it does not settle"
    why = told.devices[0].models[0].compressed_because
    found = re.match(r"(\d+) of 24 units that can be: a step of (.*) ms becomes (.*) ms, as", why)
    assert found is not None and int(found[1]) == sum(some)
    assert [float(found[2]), float(found[3])] == pytest.approx(
        [1e3 * plain_s, 1e3 * part_s], rel=0.02
    )


def test_a_step_bound_by_the_link_takes_three_quarters_of_what_its_raw_bytes_take():
    """Of the bound of the uncompressed step: what travels twice, at the link's rate."""
    with link(10) as device:
        _, none, told = train(Net())
        coded_s, every, _ = train(Net(), compress="lossless")
    assert not any(none) and all(every)
    bound_s = told.devices[0].models[0].x_min_bytes / (device.link_gbps * 1e9)
    assert coded_s <= 0.75 * bound_s


def test_a_step_that_computes_has_nothing_compressed():
    with link(0.3):
        every_s, every, _ = train(Net(), compress="auto")
        plain_s, none, told = train(Net(), compress="auto")
    assert all(every) and not any(none)
    assert plain_s <= 1.02 * every_s
    usage = told.devices[0].models[0]
    why = "steps do not wait for copies, as planned from those before"
    assert usage.compressed_because == why
    assert "because" in str(told) and "staging_bytes" in json.dumps(told.to_dict())


def language_model():
    sizes = dict(hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=3, vocab_size=100)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=ROWS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    model.bfloat16().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def train_language_model(**options):
    """Return the seconds of the last step, how many layers are coded, and why."""
    model = language_model()
    tokens = torch.randint(0, 100, (1, ROWS))
    with attached(model, "cpu", offload_percent=0.9, **options) as manager:
        for _ in range(5):
            begin = simulator.finish()
            model(input_ids=tokens, labels=tokens).loss.backward()
            seconds = simulator.finish() - begin
        coded = sum(bool(layer.coded) for layer in manager.layers)
        return seconds, coded, manager.attachment.compressed_because


@pytest.mark.parametrize(("times", "least", "most"), [(0.3, 0, 0), (4, 20, 22)])
def test_a_first_run_goes_by_an_estimate(times, least, most):
    """Of a kind of model whose samples are known: nothing was measured yet."""
    with link(times):
        every_s, every, _ = train_language_model(compress="lossless")
        first_s, first, why = train_language_model(compress="auto")
        _, again, _ = train_language_model(compress="auto")
    assert every == 22 and least <= first <= most
    assert first_s <= 1.02 * every_s
    assert why.endswith("as estimated of a sample of 64 tokens")
    assert abs(first - again) <= 1, "the estimate is far from what is measured"


def test_an_estimate_touches_neither_the_model_nor_random_numbers():
    model = language_model()
    values, random = model.state_dict(), torch.get_rng_state()
    before = {name: (p.data_ptr(), p._version, p.requires_grad) for name, p in values.items()}
    pace, said = unmeasured.estimated_pace(model, ["model.embed_tokens"], simulator.get_device(0))
    assert pace.busy_s > 0 and pace.forward_share == 1 / 2 and "64 tokens" in said
    assert torch.equal(random, torch.get_rng_state())
    assert before == {k: (p.data_ptr(), p._version, p.requires_grad) for k, p in values.items()}
    model.gradient_checkpointing_enable()
    again, _ = unmeasured.estimated_pace(model, ["model.embed_tokens"], simulator.get_device(0))
    assert again.busy_s == pytest.approx(1.5 * pace.busy_s) and again.forward_share == 1 / 3
    whole, _ = unmeasured.estimated_pace(model, [], simulator.get_device(0))
    assert whole.busy_s > again.busy_s, "a table is read whole"


def test_an_estimate_is_the_sum_of_what_operators_take():
    class Model(Parts):
        def forward(self, input_ids):
            return self.up(self.table(input_ids)).view(-1, 32).detach()  # views take nothing

    table, up = nn.Embedding(100, 64), nn.Linear(64, 32, bias=False)
    model = Model(None, table=table, up=up).bfloat16()
    device, tokens = dataclasses.replace(simulator.preset("rtx3090"), tflops=0.1), 2048
    seconds = SimulatedTime(device).operator_seconds
    product = seconds(
        2.0 * tokens * 64 * 32, 2 * (tokens * 64 + 64 * 32 + tokens * 32), torch.bfloat16
    )
    rows = 8 * tokens + 2 * tokens * 64
    for tables, read in ((["table"], rows), ([], rows + 2 * 100 * 64)):
        pace, said = unmeasured.estimated_pace(model, tables, device)
        expected = product + seconds(0.0, read, torch.bfloat16)
        assert pace.busy_s == pytest.approx(2 * expected), "backward takes as long as forward"
        assert (pace.forward_share, pace.device) == (1 / 2, device)
        assert said == "a sample of 2048 tokens"


def test_a_model_that_cannot_run_without_values_has_no_estimate(caplog):
    caplog.set_level(logging.DEBUG, "oracle_offload")
    model = language_model()
    model.forward = lambda input_ids: input_ids.sum().item()
    assert unmeasured.estimated_pace(model, [], simulator.get_device(0)) is None
    assert unmeasured.estimated_pace(Net(), [], simulator.get_device(0)) is None
    ran, asked = [record for record in caplog.records if "cannot be estimated" in record.message]
    assert ran.levelno == logging.INFO
    assert ran.message.startswith("a step cannot be estimated: its forward does not run: ")
    assert asked.levelno == logging.DEBUG
    assert asked.message.startswith("a step cannot be estimated: what Net takes is not known")


def test_an_estimate_takes_the_rates_of_the_card():
    device = dataclasses.replace(simulator.preset("rtx4090"), link_gbps=7.0)
    seconds = {}
    for name in ("NVIDIA GeForce RTX 4060", "NVIDIA GeForce RTX 4060 Ti", "NVIDIA H900"):
        pace, _ = unmeasured.estimated_pace(language_model(), [], device, name)
        seconds[name] = pace.busy_s
        assert pace.device.link_gbps == 7.0
    slow, less_slow, unknown = seconds.values()
    assert slow > less_slow > unknown


def test_a_step_that_waits_in_any_case_has_all_compressed():
    with link(4):
        train(Net(), compress="auto", offload_percent=0.9)
        _, every, told = train(Net(), compress="auto", offload_percent=0.9)
    assert all(every)
    assert "24 of 24 units" in told.devices[0].models[0].compressed_because


def test_another_device_is_another_measurement():
    with link(0.3):
        train(Net(), compress="auto")
    with link(0.31):
        _, every, _ = train(Net(), compress="auto")
    assert all(every)


def test_what_a_ram_budget_needs_is_compressed_and_no_more():
    weights = DEPTH * LAYER_BYTES
    budget = int(0.9 * weights)
    model = Net()
    options = dict(compress="auto", ram_budget=budget, offload_percent=0.0)
    with attached(model, "cpu", **options) as manager:
        coded = sum(bool(layer.coded) for layer in manager.layers)
        assert len(manager.layers) == DEPTH
        stats = manager.state.engine.stats()
        assert stats["locked_bytes"] + stats["pageable_bytes"] <= budget
        assert 0.3 * DEPTH < coded <= 0.4 * DEPTH
        why = manager.attachment.compressed_because
        assert "units that can be: ram_budget is 1.20 MiB short of the weights as they are" in why
    assert_same(model.state_dict(), Net().state_dict())


def test_a_part_has_the_residents_bits():
    managed, resident = resident_pair(Net())
    with link(1.2):
        train(managed, compress="auto", offload_percent=0.9)
        managed.load_state_dict(resident.state_dict())
        with attached(managed, "cpu", compress="auto", offload_percent=0.9) as manager:
            coded = [bool(layer.coded) for layer in manager.layers]
            assert any(coded) and not all(coded)
            step = make_step(torch.randn(6, SIZE).bfloat16(), "cpu", False)
            assert_models_agree(managed, resident, step)


def test_a_damaged_record_is_no_record(cache_folder):
    cache_folder.mkdir()
    path = cache_folder / "steps.json"
    with link(0.3):
        for damaged in (b"", b"{", b"[]", b'{"schema": "x", "models": {}}', b"\xff" * 100):
            path.write_bytes(damaged)
            _, every, _ = train(Net(), steps=4, compress="auto")
            assert all(every), damaged
            assert json.loads(path.read_bytes())["models"], "it is written again"
        _, none, _ = train(Net(), steps=4, compress="auto")
        assert not any(none), "what was written is a record"


@pytest.mark.parametrize(
    "row",
    [
        None,
        {},
        {"busy_s": 1.0},
        {"busy_s": "1", "forward_share": 0.5},
        {"busy_s": float("nan"), "forward_share": 0.5},
        {"busy_s": float("inf"), "forward_share": 0.5},
        {"busy_s": 0.0, "forward_share": 0.5},
        {"busy_s": -1.0, "forward_share": 0.5},
        {"busy_s": 1.0, "forward_share": 1.0},
        {"busy_s": 1.0, "forward_share": 0.0},
        {"busy_s": 1.0, "forward_share": "0.5"},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_is_no_record(cache_folder, row):
    cache_folder.mkdir()
    document = {"schema": steps.SCHEMA, "models": {"key": row}}
    (cache_folder / "steps.json").write_text(json.dumps(document))
    assert steps.StepRecord("key").recall(simulator.get_device(0)) is None


def test_a_row_is_a_pace_of_the_device_that_is_asked_for(cache_folder):
    cache_folder.mkdir()
    row = {"busy_s": 1.5, "forward_share": 0.25}
    document = {"schema": steps.SCHEMA, "models": {"key": row}}
    (cache_folder / "steps.json").write_text(json.dumps(document))
    device = simulator.get_device(0)
    assert steps.StepRecord("key").recall(device) == steps.Pace(1.5, 0.25, device)
    assert steps.StepRecord("key").recall(None) is None
    assert steps.StepRecord("another").recall(device) is None


def test_a_record_that_cannot_be_written_fails_no_step(monkeypatch, caplog):
    def refuse(key, row):
        raise OSError("the disk is full")

    found = iter([None, (1.5, 0.25)])
    monkeypatch.setattr(steps, "measure", lambda attachment: next(found))
    monkeypatch.setattr(steps._rows, "put", refuse)
    record = steps.StepRecord("key")
    with caplog.at_level("INFO", "oracle_offload"):
        record.keep(None)  # nothing is known yet
        assert not caplog.messages
        record.keep(None)
    assert caplog.messages == ["what the steps took could not be remembered: the disk is full"]


def test_steps_are_looked_at_less_and_less_often(monkeypatch):
    looked = []
    monkeypatch.setattr(
        steps.StepRecord, "keep", lambda self, attachment: looked.append(attachment)
    )
    record = steps.StepRecord("key")
    for number in range(1, 40):
        record.after_step(number)
    assert looked == [4, 8, 16, 32]


def test_a_step_that_cannot_be_planned_has_all_compressed(monkeypatch):
    def fail(questions):
        raise OffloadError("the replay failed")

    with link(0.3):
        train(Net(), compress="auto")
        monkeypatch.setattr(choice, "predict_elsewhere", fail)
        _, every, told = train(Net(), compress="auto")
    assert all(every)
    because = told.devices[0].models[0].compressed_because
    assert because == "a step could not be planned: the replay failed"


# ---- in which order: by numbers alone ----


def planned(*saved, nbytes=1024):
    return [choice.Planned(nbytes, [], one, one) for one in saved]


def test_what_travels_twice_goes_first():
    """The ends of a model are still in the arena when forward or backward comes back to them."""
    order = choice._in_order(planned(*[300] * 20), 4 * 1024)
    assert set(order[:12]) == set(range(4, 16)) and len(order) == 20
    for count in range(3, 12):
        taken = [3, *sorted(order[:count]), 16]
        gaps = [after - before for before, after in itertools.pairwise(taken)]
        assert max(gaps) <= 2 * 13 / count + 1, "those are spread over the model"


def test_what_gets_smallest_goes_first():
    order = choice._in_order(planned(*[100, 400] * 5, 0), 0)
    assert set(order[:5]) == {1, 3, 5, 7, 9} and set(order[5:]) == {0, 2, 4, 6, 8}


def test_what_gets_smallest_is_told_by_its_share():
    large, small = choice.Planned(10000, [], 1000, 1000), choice.Planned(1000, [], 400, 400)
    assert choice._in_order([large, small], 0) == [1, 0]


def test_what_is_not_smaller_by_coding_is_left():
    assert choice._in_order(planned(0, 5, -3), 0) == [1]


@pytest.mark.parametrize(
    ("capacity", "forward", "backward"),
    [
        (0, [1, 1, 1], [1, 1, 1]),
        (1024, [0, 1, 1], [1, 1, 0]),
        (1536, [0, 0.5, 1], [1, 0.5, 0]),
        (4096, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_the_share_that_travels(capacity, forward, backward):
    assert choice._shares([1024] * 3, capacity) == list(zip(forward, backward, strict=True))


def test_a_unit_without_bytes_does_not_travel():
    assert choice._shares([0, 1024], 256) == [(0, 0), (0.75, 0.75)]


def leaf(*tensors, needs_place=True):
    return SimpleNamespace(tensors=lambda: tensors, kind=SimpleNamespace(needs_place=needs_place))


def weight(nbytes=1 << 16, dtype=torch.bfloat16, trained=False):
    return torch.zeros(nbytes // dtype.itemsize, dtype=dtype, requires_grad=trained)


def test_what_may_be_coded_is_frozen_large_and_streamed_as_a_whole():
    good, also, shared = weight(), weight(), weight()
    units = [
        [leaf(good, weight((1 << 16) - 2)), leaf(weight(dtype=torch.float32))],
        [leaf(weight(), shared), leaf(weight(trained=True))],
        [leaf(weight(), needs_place=False), leaf(shared, also)],
        [leaf(good)],
    ]
    assert [id(tensor) for tensor in choice.codable(units)] == [id(good), id(also)]


@pytest.mark.parametrize(("coded", "is_worth_it"), [(9700, True), (9701, False), (0, True)])
def test_a_tensor_that_saves_three_hundredths_pays(coded, is_worth_it):
    assert coder.pays(coded, 10000) is is_worth_it


def test_staging_memory_has_four_pieces_each_with_room_for_a_chunk():
    def meta(count, dtype=torch.bfloat16):
        return torch.empty(count, dtype=dtype, device="meta")

    assert choice.staging_bytes([]) == choice.staging_bytes([meta(0)]) == 0
    small = 4 * aligned((2 << 15) + 64)
    assert choice.staging_bytes([meta(1 << 15), meta(1 << 15, torch.int8)]) == small
    assert choice.staging_bytes([meta(2), meta(1 << 16, torch.int8)]) == small
    chunk = choice.staging_bytes([meta(4 << 20, torch.int8)])
    assert chunk == min(4 * aligned((4 << 20) + 64), _core.STAGING_BYTES)
    assert choice.staging_bytes([meta(1 << 30, torch.int8)]) == chunk
    assert choice.staging_bytes([meta(1 << 30)]) <= _core.STAGING_BYTES


def test_a_step_is_asked_for_as_it_runs():
    """Forward through all units and back; each computes for as long as it has bytes."""
    device = simulator.get_device(0)
    units = [
        choice.Planned(1024, [], 256, 256),
        choice.Planned(0, [], 0, 0),
        choice.Planned(3072, [weight()], 1000, 1000),
    ]
    pace = steps.Pace(busy_s=8.0, forward_share=0.25, device=device)
    asked = choice.ask_by_pace(units, {2}, capacity=2048, pace=pace)
    assert asked == {
        "device": vars(device),
        "events": [
            *(("acquire", 0, _core.FORWARD, -1, 0), ("launch", 0.5), ("release", 0)),
            *(("acquire", 2, _core.FORWARD, -1, 3), ("launch", 1.5), ("release", 3)),
            *(("acquire", 2, _core.BACKWARD, 0, 6), ("launch", 4.5), ("release", 6)),
            *(("acquire", 0, _core.BACKWARD, 0, 9), ("launch", 1.5), ("release", 9)),
        ],
        "units": [[(0, [1024])], [(2, [[3072, 2072]])]],
        "segments": [2048],
        "staging": choice.staging_bytes([weight()]),
    }


def replayed(monkeypatch, seconds, order):
    """Answer questions by how many units are coded; return an `ask`, and what was asked."""
    asked = []

    def ask(planned, coded):
        assert coded == {*order[: len(coded)]}
        return len(coded)

    def answer(questions):
        asked.append(questions)
        return [{"predicted_step_s": seconds(count)} for count in questions]

    monkeypatch.setattr(choice, "predict_elsewhere", answer)
    return ask, asked


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        (lambda n: 5.0, (0, 5.0, 5.0)),
        (lambda n: max(63.0, 100.0 - n), (37, 100.0, 63.0)),
        (lambda n: max(63.5, 100.0 - n), (36, 100.0, 64.0)),
        (lambda n: 100.0 - n, (100, 100.0, 0.0)),
        (lambda n: 100.0 if n < 3 else 1.0, (3, 100.0, 1.0)),
        (lambda n: 100.0 - n / 200, (0, 100.0, 100.0)),
    ],
    ids=["never waits", "waits", "nearly enough", "always waits", "a few", "hardly"],
)
def test_the_least_units_are_found_that_make_a_step_as_short_as_any(monkeypatch, seconds, found):
    order = list(range(99, -1, -1))
    ask, asked = replayed(monkeypatch, seconds, order)
    assert choice._least_for_link([], order, ask) == found
    assert len(asked) <= 2 and sum(map(len, asked)) <= 2 * 17


UNITS, SAVED = 8, 1 << 14


def choose(short=0.0, capacity=0, ask=None, **more):
    """Choose of units of 64 KiB that take three quarters; return how many, and why."""
    units = [[leaf(weight())] for _ in range(UNITS)]
    expected = SimpleNamespace(bytes_of=lambda tensor: tensor.nbytes - SAVED)
    found = choice.choose(units, [1 << 16] * UNITS, capacity, short, ask, expected, **more)
    return len(found.tensors), found.why


ROOM = UNITS << 16


def test_why_all_or_nothing_is_compressed():
    assert choose(short=float("inf")) == (
        UNITS, "ram_budget has no room for all weights, compressed or not",
    )  # fmt: skip
    assert choose(capacity=ROOM - 1) == (
        UNITS, "what travels may hold steps up: none was measured here yet",
    )  # fmt: skip
    assert choose(capacity=ROOM) == (0, "all weights have room on the device")


@pytest.mark.parametrize(
    ("short", "count"), [(1, 1), (SAVED, 1), (SAVED + 1, 2), (5 * SAVED, 5), (8 * SAVED, 8)]
)
def test_as_many_units_are_compressed_as_the_host_needs(short, count):
    why = f"ram_budget is {format_size(short)} short of the weights as they are"

    def ask(*_):
        pytest.fail("no step waits for copies")

    assert choose(short, ROOM, ask) == (count, f"{count} of 8 units that can be: {why}")


@pytest.mark.parametrize(("short", "count"), [(0, 3), (2 * SAVED, 3), (4 * SAVED, 4)])
def test_the_more_is_compressed_of_what_the_link_and_the_host_need(monkeypatch, short, count):
    def seconds(number):
        return 0.1 if number < 3 else 0.05

    monkeypatch.setattr(
        choice, "predict_elsewhere", lambda asked: [{"predicted_step_s": seconds(n)} for n in asked]
    )
    found, why = choose(short, 0, lambda planned, coded: len(coded))
    said = "a step of 100 ms becomes 50 ms, as planned"
    if short:
        said = f"ram_budget is {format_size(short)} short of the weights as they are and {said}"
    assert (found, why) == (count, f"{count} of 8 units that can be: {said}")
    monkeypatch.setattr(
        choice, "predict_elsewhere", lambda asked: [{"predicted_step_s": 1.0} for _ in asked]
    )
    found, why = choose(0, 0, lambda planned, coded: len(coded), known_by="as known")
    assert (found, why) == (0, "steps do not wait for copies, as known")


def test_what_units_share_is_saved_once_on_the_host():
    shared = weight()
    units = [[leaf(shared, weight())], [leaf(shared)]]
    expected = SimpleNamespace(bytes_of=lambda tensor: tensor.nbytes - SAVED)
    found = choice._planned(units, [2 << 16, 1 << 16], choice.codable(units), expected)
    assert [(one.nbytes, one.saved, one.saved_host) for one in found] == [
        (2 << 16, 2 * SAVED, 2 * SAVED), (1 << 16, SAVED, 0),
    ]  # fmt: skip
    assert [len(one.coded) for one in found] == [2, 1]


def test_about_as_many_bytes_are_expected_whatever_the_layout():
    plain = Net().layers[0].weight.detach()
    expected = choice.Expected(None).bytes_of(plain)
    assert 0.6 * plain.nbytes < expected < 0.8 * plain.nbytes
    gaps = torch.empty(SIZE, 2 * SIZE, dtype=torch.bfloat16)[:, ::2].copy_(plain)
    for same in (plain.t(), gaps, plain.view(-1)):
        assert choice.Expected(None).bytes_of(same) == expected
    noise = torch.randint(-128, 128, (1 << 18,), dtype=torch.int8)
    assert choice.Expected(None).bytes_of(noise) == noise.nbytes


def test_what_is_still_in_a_file_is_looked_at_there():
    values = Net().layers[0].weight.detach()
    raw = bytearray(b"....") + values.view(torch.uint8).numpy().tobytes()
    origin = SimpleNamespace(memory=raw, skipped=4)
    files = SimpleNamespace(have=lambda tensor: True, origin=lambda tensor: origin)
    expected = choice.Expected(None).bytes_of(values)
    to_come = torch.zeros_like(values)
    assert choice.Expected(files).bytes_of(to_come) == expected
    origin = None  # it is converted while it is read
    assert choice.Expected(files).bytes_of(to_come) == values.nbytes


def test_a_budget_is_held_where_the_weights_need_to_be_small_for_it():
    tensors = [weight()]
    assert choice.coder_for([], "3GiB", choice.HostRoom()) is None
    held = choice.coder_for(tensors, "3GiB", choice.HostRoom(limit=5.0, short=1.0))
    assert held.wants(tensors[0]) and not held.wants(weight())
    held.check_budget(5)
    with pytest.raises(OffloadError, match=r"^ram_budget='3GiB' is 5 B, but the weights take 6 B "):
        held.check_budget(6)
    room = choice.HostRoom()
    choice.coder_for(tensors, "3GiB", room).check_budget(1 << 60)
