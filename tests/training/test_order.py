"""The learned order: kept in a file, given to the engine before the first step of the next run."""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from dataclasses import asdict, replace
from pathlib import Path

import models
import pytest
import torch
from equality import Through, assert_models_agree, attached, resident_pair
from models import Tower
from torch import nn

import oracle_offload
from oracle_offload import _core
from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.aitoolkit.run_folder import find_run_folder, find_trainer
from oracle_offload.engine import simulator
from oracle_offload.model import order
from oracle_offload.model.witness import Witness

F, R, B = _core.FORWARD, _core.RECOMPUTE, _core.BACKWARD


def tower(depth=16, reentrant=False):
    """Checkpointed blocks of three layers of 64 KiB, and a norm, which alone is trained."""
    torch.manual_seed(0)
    blocks = models.tower(depth, leaves=3).requires_grad_(False)
    parts = {"blocks": Tower(*blocks, reentrant=reentrant), "norm": nn.LayerNorm(128)}
    return nn.Sequential(OrderedDict(parts))


def train(model, optimizer):
    """One step; return its seconds on the simulated clock, and its bytes to the device."""
    x = torch.randn(16, 128).requires_grad_()
    begin, moved = simulator.finish(), simulator.stats().h2d_bytes
    with Witness(strict=False, clock=True):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return simulator.finish() - begin, simulator.stats().h2d_bytes - moved


def run(path, steps, model=None, **options):
    """One run of the program: attach, some steps, detach."""
    model = tower() if model is None else model
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
    with attached(model, "cpu", order_file=path, **options) as manager:
        results = [train(model, optimizer) for _ in range(steps)]
        weights = manager.attachment.weight_bytes
        capacity = manager.attachment.arena.capacity_bytes
    return results, weights, capacity


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "order.json")


# ---- the first step ----


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("ram_budget", [None, "offloaded"], ids=["cache", "kept"])
@pytest.mark.parametrize("gbps", [0.2, 24], ids=["copies bound it", "computing bounds it"])
def test_the_first_step_of_the_next_run_is_at_its_bound(sim, path, share, ram_budget, gbps):
    """(2M - C) / link, or what computing takes: the arena is empty when it begins."""
    options = {"offload_percent": share, "ram_budget": ram_budget}
    sim.slow_link(1e6)
    computing = run(None, 4, **options)[0][-1][0]
    sim.slow_link(gbps)
    unknown, weights, capacity = run(path, 4, **options)
    steady = unknown[-1][0]
    known, *_ = run(path, 4, **options)
    least = 2 * weights - min(capacity, weights)
    bound = max(least / (gbps * 1e9), computing)
    assert known[0][1] <= 1.02 * least, (known[0][1], least)
    assert known[0][0] <= 1.1 * bound, (known[0][0], bound)
    assert known[1][0] <= 1.05 * steady and unknown[1][0] <= 1.05 * steady
    if share >= 0.75:
        assert known[0][0] <= 1.5 * steady


@pytest.mark.parametrize("gbps", [0.5, 2, 6, 24])
@pytest.mark.parametrize("share", [0.75, 1.0])
def test_the_first_step_is_nearly_a_steady_one(sim, path, gbps, share):
    """Where most is offloaded; and without the file it is not, where copies bound it."""
    sim.slow_link(gbps)
    unknown, *_ = run(path, 4, offload_percent=share)
    known, *_ = run(path, 4, offload_percent=share)
    steady = known[-1][0]
    assert known[0][0] <= 1.5 * steady, (known[0][0], steady)
    if share == 1.0:
        assert known[0][0] <= 1.05 * steady
        assert gbps > 2 or unknown[0][0] > 1.25 * steady


def test_the_arena_has_grown_before_the_first_step(path):
    run(path, 2)
    model = tower()
    with attached(model, "cpu", order_file=path) as manager:
        block = 3 * (128 * 129 * 4)
        assert manager.attachment.arena.capacity_bytes >= block
        assert manager.state.engine.stats()["learned_block_bytes"] >= block


def any_pace(chance, units):
    """Seconds of any size for the simulated device."""
    forward_ns = tuple(chance.choice([0, 1, 10**6, 2**63 - 1]) for _ in range(units))
    name = simulated_name()
    return order.Pace(name, chance.choice([1, 10**9, 2**63 - 1]), forward_ns)


def simulated_name():
    with attached(tower(depth=1), "cpu") as manager:
        return manager.state.engine.device_name


def test_it_computes_as_the_resident_model_with_any_order(path):
    """A file may say anything: what is wrong costs late copies alone."""
    managed, resident = resident_pair(tower(depth=4).requires_grad_(True))

    def step(model):
        y = model(torch.randn(3, 128))
        y.sum().backward()
        return [y]

    with attached(managed, "cpu", order_file=path) as manager:
        fingerprint = order.fingerprint_of(manager.attachment)
        units = manager.state.engine.stats()["units"]
    chance = random.Random(0)
    for length in (1, 7, 100, order.MOST_USES):
        uses = [(chance.randrange(units), chance.randrange(3)) for _ in range(length)]
        known = order.Known(uses, chance.choice([None, any_pace(chance, units)]))
        order.write(path, fingerprint, known)
        assert order.read(path, fingerprint, units) == known
        with attached(managed, "cpu", order_file=path):
            assert_models_agree(managed, resident, step, steps=3)


# ---- the seconds ----


def told(path):
    """What the engine of the next run goes by before its first step."""
    with attached(tower(), "cpu", order_file=path) as manager:
        return manager.state.engine.pace(manager.attachment.model)


def test_seconds_and_the_links_speed_are_told_to_the_next_run(path, sim):
    sim.slow_link(2)
    run(path, 4)
    found = json.loads(Path(path).read_text())["pace"]
    rows, link_bps = told(path)
    assert [nanoseconds for _, nanoseconds in rows] == found["forward_ns"]
    assert link_bps == pytest.approx(found["link_bps"]) and 1e9 < link_bps < 2e9
    assert found["device"] == simulated_name()


def test_another_devices_seconds_are_not_told(path):
    run(path, 2)
    document = json.loads(Path(path).read_text())
    known = order.read(path, document["fingerprint"], 48)
    other = replace(known.pace, device="another")
    order.write(path, document["fingerprint"], replace(known, pace=other))
    assert told(path) == ([], 0)
    run(path, 2)
    assert json.loads(Path(path).read_text())["pace"]["device"] == simulated_name()


def test_seconds_are_kept_with_the_speed_of_a_link_alone(path, monkeypatch):
    model = tower()
    with attached(model, "cpu") as manager:
        optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
        for _ in range(3):
            train(model, optimizer)
        engine = manager.state.engine
        for link_bps in (0, 7):  # as if the engine had found it

            def pace(model, link_bps=link_bps):
                return engine.pace(model)[0], link_bps

            file = order.OrderFile(path)
            file.tell(manager.attachment)
            with monkeypatch.context() as patched:
                patched.setattr(manager.state, "engine", Through(engine, pace=pace))
                file.keep(manager.attachment)
            known = order.read(path, order.fingerprint_of(manager.attachment), 48)
            assert (known.pace and known.pace.link_bps) == (link_bps or None)


def test_a_file_without_seconds_serves_and_gets_them(path, warnings):
    run(path, 2)
    right = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({k: v for k, v in right.items() if k != "pace"}))
    assert told(path) == ([], 0)
    run(path, 2)
    again = json.loads(Path(path).read_text())
    assert again["uses"] == right["uses"] and min(again["pace"]["forward_ns"]) > 0
    assert not warnings()


def test_seconds_that_are_much_the_same_are_not_written_again(path, sim):
    run(path, 4)
    written = Path(path).stat().st_mtime_ns
    run(path, 4)
    assert Path(path).stat().st_mtime_ns == written
    sim.slow_link(2)
    run(path, 4)
    assert Path(path).stat().st_mtime_ns > written


def test_what_a_pace_covers():
    """Whether it would be written again."""
    pace = order.Pace("a", 1000, (10, 20, 0))
    for link_bps, forward_ns, covered in (
        (1000, (10, 20, 0), True),
        (1500, (15, 30, 0), True),
        (667, (7, 14, 0), True),
        (1000, (8, 12, 0), True),
        (1000, (30, 0, 0), False),
        (1000, (0, 20, 0), True),
        (1000, (10, 20, 1), False),
        (1502, (10, 20, 0), False),
        (665, (10, 20, 0), False),
        (1000, (16, 30, 0), False),
        (1000, (6, 13, 0), False),
        (1000, (10, 20), False),
    ):
        assert pace.covers(order.Pace("a", link_bps, forward_ns)) == covered, (link_bps, forward_ns)
    assert not pace.covers(order.Pace("b", 1000, (10, 20, 0)))
    known = order.Known([(0, F)], pace)
    assert known.covers(order.Known([(0, F)])) and known.covers(known)
    assert not known.covers(order.Known([(1, F)], pace)) and not known.covers(order.Known([(1, F)]))
    assert not order.Known([(0, F)]).covers(known)


# ---- the file ----


def test_it_is_written_once_a_step_has_repeated_and_read_by_the_next_run(path, tmp_path):
    model = tower()
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
    with attached(model, "cpu", order_file=path):
        train(model, optimizer)
        assert not Path(path).exists()
        train(model, optimizer)
        assert Path(path).exists(), "the process may end without a detach"
        uses = json.loads(Path(path).read_text())["uses"]
        for _ in range(2):
            train(model, optimizer)
        first = Path(path).read_bytes()
        assert json.loads(first)["uses"] == uses, "with the seconds, which were measured meanwhile"
        Path(path).unlink()
        for _ in range(4):
            train(model, optimizer)
    assert not Path(path).exists(), "it is not written again as long as it stays the same"
    Path(path).write_bytes(first)
    run(path, 5)
    assert Path(path).read_bytes() == first
    assert [found.name for found in tmp_path.iterdir()] == ["order.json"]
    document = json.loads(first)
    assert document["schema"] == "oracle_offload/order/1"
    assert len(document["uses"]) == 3 * 16 * 3, "forward, recompute and backward of each layer"
    assert len(document["pace"]["forward_ns"]) == 48 and min(document["pace"]["forward_ns"]) > 0


def test_sampling_in_between_does_not_get_into_it(path):
    model = tower()
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
    with attached(model, "cpu", order_file=path):
        for step in range(4):
            train(model, optimizer)
            if step >= 2:
                with torch.no_grad():
                    model(torch.randn(2, 128))
    assert len(json.loads(Path(path).read_text())["uses"]) == 3 * 16 * 3


def test_a_folder_holds_one_file_for_each_model(tmp_path):
    for _ in range(2):
        for depth in (4, 5):
            run(tmp_path, 2, tower(depth=depth))
    names = sorted(found.name for found in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name.startswith("oracle_offload-order-") for name in names)


def test_values_and_training_are_no_part_of_the_fingerprint():
    seen = []
    for trained in (False, True):
        model = tower(depth=4).requires_grad_(trained)
        for parameter in model.parameters():
            parameter.data.add_(trained)
        with attached(model, "cpu") as manager:
            seen.append(order.fingerprint_of(manager.attachment))
    for change in (lambda m: m.to(torch.bfloat16), lambda m: m.blocks.append(nn.Linear(128, 128))):
        change(model)
        with attached(model, "cpu") as manager:
            seen.append(order.fingerprint_of(manager.attachment))
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_a_path_that_is_none_is_refused():
    with pytest.raises(ValueError, match="order_file=3 is not a path"):
        oracle_offload.attach(tower(), "cpu", order_file=3)


def written(path, depth=16):
    run(path, 2, tower(depth=depth))
    return Path(path).read_bytes()


def damaged(text, change):
    document = json.loads(text)
    change(document)
    return json.dumps(document).encode()


# All reasons for which a file of ours is refused are below: here is one of each kind.
WRONG = {
    "another model": (lambda text: damaged(text, lambda d: d.update(fingerprint="0" * 64)), True),
    "a later version": (lambda text: text.replace(b"order/1", b"order/2"), True),
    "truncated": (lambda text: text[: len(text) // 2], True),
    "uses of no unit": (
        lambda text: damaged(text, lambda d: d["uses"].__setitem__(0, 10**9)),
        True,
    ),
    "too large": (lambda text: text[:-1] + b" " * (1 << 20) + b"}", True),
    "another device's seconds": (
        lambda text: damaged(text, lambda d: d["pace"].update(device="another")),
        True,
    ),
    "empty": (lambda text: b"", True),
    "cut off at once": (lambda text: text[:5], True),
    "begun like one": (lambda text: text[:5] + b"me", False),
    "somebody's JSON": (lambda text: b'{"loss": 0.5}', False),
    "nested": (lambda text: b"[" * 100_000, False),
    "binary": (lambda text: bytes(range(256)) * 99, False),
}


def test_a_wrong_file_is_passed_over_with_one_line(path, warnings, caplog, sim):
    right = written(path, depth=2)
    for what, (change, ours) in WRONG.items():
        wrong = change(right)
        assert wrong != right, what
        Path(path).write_bytes(wrong)
        caplog.clear()
        sim.reset()  # the same clock, and so the same seconds
        run(path, 4, tower(depth=2))
        (said,) = warnings()
        assert f"order_file={path!r} is not used, the order is learned again: it " in said, what
        left = Path(path).read_bytes()
        assert left == (right if ours else wrong), f"{what}: only a file of ours is replaced"


PRINT = "0123456789abcdef" * 4
PACE = order.Pace("a card", 10**9, (5, 2**63 - 1))
KNOWN = order.Known([(0, F), (1, F), (1, B), (0, B)], PACE)
NO_SECONDS = "it has not the seconds of 2 units"


def test_what_is_written_is_this_document_and_is_read_again(path):
    order.write(path, PRINT, KNOWN)
    document = json.loads(Path(path).read_text())
    codes, seconds = (
        [3 * unit + kind for unit, kind in KNOWN.uses],
        ["a card", 10**9, [5, 2**63 - 1]],
    )
    digests = [
        hashlib.sha256(json.dumps([PRINT, values]).encode()).hexdigest()
        for values in (codes, seconds)
    ]
    assert document == {
        "schema": "oracle_offload/order/1",
        "fingerprint": PRINT,
        "digest": digests[0],
        "uses": codes,
        "pace": {
            "device": "a card",
            "link_bps": 10**9,
            "forward_ns": [5, 2**63 - 1],
            "digest": digests[1],
        },
    }
    assert order.read(path, PRINT, 2) == KNOWN
    order.write(path, PRINT, order.Known(KNOWN.uses))
    document.pop("pace")
    assert json.loads(Path(path).read_text()) == document
    assert order.read(path, PRINT, 2) == order.Known(KNOWN.uses)
    text = Path(path).read_bytes()
    Path(path).write_bytes(text.ljust(1 << 20))
    assert order.read(path, PRINT, 2).uses == KNOWN.uses, "the largest file that is read"


@pytest.mark.parametrize(
    ("known", "change", "reason"),
    [
        (KNOWN, {"fingerprint": "f"}, "it is of another model, or of other settings"),
        (KNOWN, {"schema": "oracle_offload/order/2"}, "it is not of oracle_offload/order/1"),
        (KNOWN, {"schema": None}, "it is not of oracle_offload/order/1"),
        (KNOWN, {"uses": []}, "it has not 1 to 32768 uses"),
        (KNOWN, {"uses": [0] * 32769}, "it has not 1 to 32768 uses"),
        (KNOWN, {"uses": {}}, "it has not 1 to 32768 uses"),
        (KNOWN, {"uses": [6]}, "it has uses that no model of 2 units can have"),
        (KNOWN, {"uses": [-1]}, "it has uses that no model of 2 units can have"),
        (KNOWN, {"uses": [True]}, "it has uses that no model of 2 units can have"),
        (KNOWN, {"uses": [1]}, "it is damaged"),
        (KNOWN, {"digest": None}, "it is damaged"),
        (KNOWN, {"pace": [5]}, "it has a pace that is none"),
        (KNOWN, {"pace": {}}, NO_SECONDS),
        (KNOWN, {"pace": {**asdict(PACE), "forward_ns": None}}, NO_SECONDS),
        (KNOWN, {"uses": "abc"}, "it has not 1 to 32768 uses"),
        *(
            (order.Known([(0, F)], pace), {}, NO_SECONDS)
            for pace in (order.Pace("", 1, (1,)), order.Pace("", 1, (1, 2, 3)))
        ),
        *(
            (order.Known([(0, F)], pace), {}, "it has seconds, or a speed, that nothing can have")
            for pace in (
                order.Pace("", -1, (1, 1)), order.Pace("", 2**63, (1, 1)),
                order.Pace("", 1, (-1, 1)), order.Pace("", 1, (1, 2**63)),
                order.Pace("", 0.5, (1, 1)), order.Pace("", 1, (1, True)),
                order.Pace("", "fast", (1, 1)), order.Pace("", 1, (0.5, 1)),
            )
        ),
        (KNOWN, {"pace": {**asdict(PACE), "digest": "f"}}, "it is damaged"),
        (order.Known([(1, B)] * 32768), {}, None),
        (order.Known([(0, F)], order.Pace("", 0, (0, 0))), {}, None),
        (order.Known([(0, F)], order.Pace("", 2**63 - 1, (0, 0))), {}, None),
    ],
)  # fmt: skip
def test_why_a_file_is_no_order_of_a_model(path, known, change, reason):
    order.write(path, PRINT, known)
    document = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**document, **change}))
    if reason is None:
        assert order.read(path, PRINT, 2) == known
        return
    with pytest.raises(order.UnusableOrder) as refused:
        order.read(path, PRINT, 2)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b" " * ((1 << 20) + 1), "it has more than 1048576 bytes"),
        (b" " * (1 << 20), "it is no JSON document, or only the beginning of one"),
        (b"[" * 100_000, "it is no JSON document, or only the beginning of one"),
        (b"[]", "it is not of oracle_offload/order/1"),
    ],
)
def test_what_is_no_document_of_ours_says_so(path, text, reason):
    Path(path).write_bytes(text)
    with pytest.raises(order.UnusableOrder) as refused:
        order.read(path, PRINT, 2)
    assert str(refused.value) == reason
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        order.read(path, PRINT, 2)


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (b"", True),
        (b'{"sche', True),
        (b'{"schema": "oracle_offload/order/', True),
        (b'{"schema": "oracle_offload/order/1", "f', True),
        (b'{"schema": "oracle_offload/order/27"}', True),
        (b'{"schema": "oracle_offload/sizes/1"}', False),
        (b"{}", False),
        (None, False),
    ],
)
def test_a_file_is_ours_by_how_it_begins(path, text, ours):
    if text is not None:
        Path(path).write_bytes(text)
    assert order.is_ours(path) == ours
    assert not order.is_ours("\0")


def test_it_is_looked_for_after_two_four_and_eight_steps(path, monkeypatch):
    looked = []
    monkeypatch.setattr(order.OrderFile, "keep", lambda self, attachment: looked.append(step))
    file = order.OrderFile(path)
    for step in range(1, 20):  # noqa: B007
        file.after_step(None)
    assert looked == [2, 4, 8, 16]


@pytest.mark.parametrize(("most", "kept"), [(9, True), (8, False)])
def test_an_order_of_more_uses_than_the_engine_takes_is_not_kept(path, monkeypatch, most, kept):
    monkeypatch.setattr(order, "MOST_USES", most)
    run(path, 2, tower(depth=1))
    assert Path(path).exists() == kept


def test_detach_keeps_it_where_no_optimizer_of_torch_stepped_without_what_was_not_measured(path):
    model = tower(depth=2, reentrant=None)
    with attached(model, "cpu", order_file=path):
        for _ in range(2):
            model(torch.randn(2, 128).requires_grad_()).sum().backward()
    document = json.loads(Path(path).read_text())
    assert document["uses"] == [3 * n + F for n in range(6)] + [
        3 * n + B for n in (5, 4, 3, 2, 1, 0)
    ]
    assert "pace" not in document


def test_no_bytes_are_an_order_but_those_that_were_written(path):
    right = written(path)
    document = json.loads(right)
    known = order.read(path, document["fingerprint"], 48)
    chance = random.Random(0)
    for _ in range(400):
        wrong = bytearray(right)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(wrong))
            action = chance.randrange(3)
            if action == 0:
                wrong[place] = chance.randrange(256)
            elif action == 1:
                del wrong[place : place + chance.randint(1, 50)]
            else:
                wrong[place:place] = bytes(chance.randrange(256) for _ in range(3))
        Path(path).write_bytes(wrong)
        try:
            found = order.read(path, document["fingerprint"], 48)
        except order.UnusableOrder:
            continue
        assert found == known  # white space, or what was there before


@pytest.mark.parametrize(
    ("path", "says"), [("missing/order.json", "cannot be written"), ("no\0where", "is not used")]
)
def test_a_path_that_cannot_be_written_or_that_no_system_has_costs_a_warning(
    tmp_path, path, says, warnings
):
    run(tmp_path / path, 4)
    (said,) = warnings()
    assert says in said


@pytest.mark.parametrize("error", [MemoryError, ValueError, OSError, RuntimeError])
@pytest.mark.parametrize("function", ["read", "write"])
def test_no_step_and_no_detach_fails_for_a_file(path, monkeypatch, function, error, warnings):
    def fail(*_):
        raise error("planted")

    monkeypatch.setattr(order, function, fail)
    run(path, 3, tower(depth=2))
    (said,) = warnings()
    assert "planted" in said and repr(path) in said


# ---- which sweep ----


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], None),
        ([(0, F), (1, F)], None),
        ([(0, F), (0, B)], None),
        ([(0, F), (0, B)] * 2, [(0, F), (0, B)]),
        ([(0, F), (0, B)] * 2 + [(0, F)], [(0, F), (0, B)]),
        ([(0, F), (0, B)] * 2 + [(1, F), (1, B)] * 2, [(1, F), (1, B)]),
        ([(0, F), (0, B)] * 2 + [(1, F), (1, B)], [(0, F), (0, B)]),
        ([(0, F), (0, R), (0, B)] * 3, [(0, F), (0, R), (0, B)]),
        ([(0, F), (1, F), (1, B), (0, R), (0, B)] * 2, [(0, F), (1, F), (1, B), (0, R), (0, B)]),
        ([(1, B), *[(0, F), (0, B)] * 2], [(0, F), (0, B)]),
    ],
)
def test_the_latest_sweep_that_repeats(uses, expected):
    assert order.repeated_sweep(uses) == expected


# ---- sampling in the middle of training ----


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_sampling_is_at_its_own_optimum_from_the_second_sweep(share):
    """Forwards one after the other need M - C each: what the arena holds needs no copy."""
    model = tower()
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
    with attached(model, "cpu", offload_percent=share) as manager:
        steady = [train(model, optimizer)[1] for _ in range(4)][-1]
        weights = manager.attachment.weight_bytes
        least = weights - manager.attachment.arena.capacity_bytes
        unit = manager.state.engine.stats()["largest_unit_bytes"]
        moved = []
        for _ in range(6):
            before = simulator.stats().h2d_bytes
            with torch.no_grad():
                model(torch.randn(2, 128))
            simulator.finish()
            moved.append(simulator.stats().h2d_bytes - before)
        for found in moved[1:]:
            assert least <= found <= least + 4 * unit, (moved, least)
        after = [train(model, optimizer)[1] for _ in range(5)]
        assert max(after) <= 2 * weights and after[-1] == steady, (after, steady)


# ---- next to AI-Toolkit's checkpoints ----


class Process:
    """AI-Toolkit's process that trains, as far as it is looked at."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def loads(self, ask):
        return Loader().ask(ask)


class Loader:
    """It does not know where the run is saved."""

    def ask(self, ask):
        return ask()


def test_the_folder_and_the_trainer_are_those_of_the_innermost_caller(tmp_path):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
    one = Process(save_root=str(inner), config={"model": {}})
    other = Process(save_root=str(outer), config={"model": {}})
    assert other.loads(lambda: one.loads(find_run_folder)) == str(inner)
    assert other.loads(lambda: one.loads(find_trainer)) is one
    assert other.loads(find_run_folder) == str(outer)
    assert (find_run_folder(), find_trainer()) == (None, None)


def test_a_caller_that_is_none_is_passed_over(tmp_path):
    outer = Process(save_root=str(tmp_path), config={})
    for attributes, found in (
        ({}, None),
        ({"save_root": str(tmp_path / "gone")}, None),
        ({"save_root": tmp_path, "config": {}}, None),  # no text
        ({"save_root": str(tmp_path)}, str(tmp_path)),  # no configuration
    ):
        inner = Process(**attributes)
        assert outer.loads(lambda inner=inner: inner.loads(find_run_folder)) == str(tmp_path)
        assert outer.loads(lambda inner=inner: inner.loads(find_trainer)) is outer
        assert inner.loads(find_run_folder) == found and inner.loads(find_trainer) is None

    def ask(self):  # which has no attributes
        return find_run_folder(), find_trainer()

    assert ask(1) == (None, None)
    assert outer.loads(lambda: ask(1)) == (str(tmp_path), outer)


def test_aitoolkits_attach_keeps_the_order_there(tmp_path):
    late = []
    for _ in range(2):
        model = tower()
        process = Process(save_root=str(tmp_path))
        process.loads(lambda model=model: MemoryManager.attach(model, "cpu"))
        optimizer = torch.optim.SGD(model.norm.parameters(), lr=1e-3)
        train(model, optimizer)
        late.append(model._memory_manager.state.engine.stats()["late"])
        train(model, optimizer)
        MemoryManager.free(model)
    assert len(list(tmp_path.glob("oracle_offload-order-*.json"))) == 1
    assert late[1] <= 1 < late[0], late
