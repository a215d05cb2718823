"""benchmarks/simulated.py: its yardsticks against all plans of small cases, and 41 cells."""

import itertools
import json
import random
import shutil

import plans
import pytest
import several_cards
import simulated
from model_traces import BACKWARD, FORWARD, MODELS, RECOMPUTE, RECORDED, Trace, Visit, trace_of


def small_case(seed):
    """A few visits of a few units of one size, an arena and a link."""
    drawn = random.Random(seed)
    n = drawn.randint(3, 5)
    visits = [
        Visit(drawn.randrange(n), FORWARD, drawn.choice((0.5, 1.0, 2.0)))
        for _ in range(drawn.randint(5, 8))
    ]
    return [1] * n, visits, drawn.randint(2, 3), 1 / drawn.choice((0.5, 1.0, 2.0))


def test_the_planner_is_as_fast_as_any_plan():
    waits = 0
    for seed in range(300):
        case = small_case(seed)
        fastest = plans.search(*case, every_choice=True)
        assert plans.search(*case) == pytest.approx(fastest), f"seed {seed}"
        waits += fastest > sum(visit.seconds for visit in case[1]) + case[0][0] / case[3]
    assert waits > 100, "nearly no case waits for its link"


@pytest.mark.parametrize("latency_s", [0.0, 0.4])
def test_no_plan_is_faster_than_the_bound(latency_s):
    met = longer = 0
    for seed in range(300):
        unit_bytes, visits, _, _ = case = small_case(seed)
        unit_bytes[seed % len(unit_bytes)] += seed % 2  # in half of them, one is larger
        # From an empty arena: before the first visit nothing is there.
        bound = plans.interval_bound_s(*case, latency_s)
        fastest = plans.search(*case, latency_s, every_choice=True)
        assert bound <= fastest + 1e-9, f"seed {seed}"
        met += bound > sum(visit.seconds for visit in visits)
        longer += bound > plans.interval_bound_s(*case)
    assert met > 20, "the bound is never more than the kernels"
    assert longer > 20 or not latency_s, "the bound is never more than without the latency"


def test_a_disk_that_has_all_bounds_as_a_link_of_its_speed_does():
    longer = 0
    for seed in range(60):
        unit_bytes, visits, capacity, link_bps = small_case(seed)
        every = range(len(unit_bytes))
        for disk_bps in (link_bps / 3, link_bps):
            bound = plans.interval_bound_s(
                unit_bytes, visits, capacity, link_bps, disk=(every, disk_bps, 0)
            )
            assert bound == plans.interval_bound_s(unit_bytes, visits, capacity, disk_bps)
        slow = plans.interval_bound_s(
            unit_bytes, visits, capacity, link_bps, disk=(every, link_bps / 3, 0)
        )
        none = plans.interval_bound_s(
            unit_bytes, visits, capacity, link_bps, disk=((), link_bps / 3, 0)
        )
        assert none == plans.interval_bound_s(unit_bytes, visits, capacity, link_bps)
        longer += slow > none
    assert longer > 20, "the disk never sets the pace"


def small_model(seed):
    """A few checkpointed blocks of a few units, alike in half of the models, and an arena."""
    drawn = random.Random(seed)
    trace = Trace()
    alike = drawn.random() < 0.5
    sizes = [drawn.randint(1, 8) for _ in range(4)]
    for _ in range(drawn.randint(3, 8)):
        first = len(trace.unit_bytes)
        count = drawn.randint(1, 4)
        block = sizes if alike else [drawn.randint(1, 8) for _ in range(count)]
        trace.unit_bytes += [size << 20 for size in block]
        trace.blocks.append(list(range(first, len(trace.unit_bytes))))
    speed = drawn.choice((0.1, 0.3, 1.0)) * 1e-9
    seconds = [nbytes * speed * drawn.uniform(0.5, 2) for nbytes in trace.unit_bytes]
    trace.train = [Visit(unit, FORWARD, each) for unit, each in enumerate(seconds)]
    for block in reversed(trace.blocks):
        trace.train += [Visit(unit, RECOMPUTE, seconds[unit]) for unit in block]
        trace.train += [Visit(unit, BACKWARD, 2 * seconds[unit]) for unit in reversed(block)]
    floor = trace.floor_bytes()
    room = floor + drawn.random() * max(0, trace.total_bytes - floor)
    return trace, int(room) // 256 * 256


def test_the_engine_is_near_the_bound_whatever_the_model():
    """Units count that much in small models: a step takes at most the bound and the copies of
    three of the largest blocks, a third of one on average; it moves at most the least bytes and
    four of the largest units, one on average. No plan is faster than the bound, or moves less.
    """
    link, late, moved = 1e9, [], []
    for seed in range(150):
        trace, capacity = small_model(seed)
        if capacity >= trace.total_bytes:
            continue
        card = simulated.Card(0, link, 0, 0)
        steps = simulated.run_engine(trace, [trace.train] * 6, capacity, card)[-4:]
        args = trace.unit_bytes, trace.train, capacity, link, plans.COPY_LATENCY_S
        over_s = sum(step.seconds for step in steps) / 4 - plans.interval_bound_s(*args)
        least = 2 * (trace.total_bytes - capacity)
        over_bytes = sum(step.nbytes for step in steps) / 4 - least
        late.append(over_s * link / trace.block_bytes)
        moved.append(over_bytes / max(trace.unit_bytes))
        assert -1e-6 < late[-1] <= 3, f"seed {seed}"
        assert 0 <= moved[-1] <= 4, f"seed {seed}"
    assert len(late) > 100
    assert sum(late) / len(late) <= 0.36, sum(late) / len(late)
    assert sum(moved) / len(moved) <= 1, sum(moved) / len(moved)


def small_training(seed):
    """Two to five units, of one size in half of the cases, each a block; checkpointed in half."""
    drawn = random.Random(seed)
    alike, checkpointed = drawn.random() < 0.5, drawn.random() < 0.5
    trace = Trace()
    trace.unit_bytes = [
        (1 if alike else drawn.randint(1, 4)) << 20
        for _ in range(drawn.randint(2, 3) if checkpointed else drawn.randint(3, 5))
    ]
    units = range(len(trace.unit_bytes))
    trace.blocks = [[unit] for unit in units]
    speed = drawn.choice((0.2, 0.5, 1.0, 2.0)) * 1e-9
    seconds = [nbytes * speed * drawn.uniform(0.5, 2) for nbytes in trace.unit_bytes]
    trace.train = [Visit(unit, FORWARD, seconds[unit]) for unit in units]
    for unit in reversed(units):
        if checkpointed:
            trace.train.append(Visit(unit, RECOMPUTE, seconds[unit]))
        trace.train.append(Visit(unit, BACKWARD, seconds[unit]))
    floor = trace.floor_bytes()
    capacity = floor + drawn.random() * max(0, trace.total_bytes - floor)
    return alike, trace, int(capacity) >> 20 << 20


def test_the_engine_is_near_the_best_of_all_plans():
    """Of units of one size none moves fewer bytes, and none is faster by more than the copies'
    latencies. Of several sizes the engine loses to holes, which no plan is charged for: half of
    the largest unit on average, in bytes and in the time that its copy takes a third.
    """
    link = 1e9
    over = {True: [], False: []}
    for seed in range(300):
        alike, trace, capacity = small_training(seed)
        if capacity >= trace.total_bytes:
            continue
        fastest, fewest = plans.search_repeated(trace.unit_bytes, trace.train, capacity, link)
        card = simulated.Card(0, link, 0, 0)
        steps = simulated.run_engine(trace, [trace.train] * 8, capacity, card)[-4:]
        largest = max(trace.unit_bytes)
        late = (sum(step.seconds for step in steps) / 4 - fastest) * link / largest
        moved = (sum(step.nbytes for step in steps) / 4 - fewest) / largest
        over[alike].append((late, moved))
        assert -1e-6 < late <= (0.02 if alike else 2.01), f"seed {seed}"
        assert 0 <= moved <= (0 if alike else 1.5), f"seed {seed}"
    assert len(over[True]) > 100 and len(over[False]) > 60
    assert sum(late for late, _ in over[False]) <= 0.33 * len(over[False])
    assert sum(moved for _, moved in over[False]) <= 0.48 * len(over[False])


def zigzag(n, seconds, nbytes=1 << 20):
    trace = Trace([nbytes] * n, blocks=[[unit] for unit in range(n)])
    trace.sample = [Visit(unit, FORWARD, seconds) for unit in range(n)]
    trace.train = trace.sample + [Visit(unit, BACKWARD, seconds) for unit in reversed(range(n))]
    return trace


@pytest.mark.parametrize("lead", [0, 1 << 20, plans.NEVER])
def test_the_best_plan_of_a_zigzag_moves_what_does_not_fit(lead):
    trace, link = zigzag(20, 1e-3), 1e9
    outcome = plans.belady(trace.unit_bytes, trace.train, 8 << 20, link, lead)
    assert outcome.nbytes == 2 * 12 << 20
    kernels = sum(visit.seconds for visit in trace.train)
    assert outcome.seconds == pytest.approx(kernels, rel=0.2)


def test_a_plan_takes_what_its_sweeps_take_on_average():
    """One of three copies what its two neighbours leave out: 15, 10 and 15 of 20 units."""
    trace = zigzag(20, 1e-3)
    args = trace.unit_bytes, trace.sample, 10 << 20, 1e9, 4 << 20
    moved = [plans.belady(*args, rounds).nbytes for rounds in (plans.ROUNDS, plans.SWEEPS)]
    assert moved == [15 << 20, pytest.approx((15 + 10 + 15) / 3 * (1 << 20), rel=0.01)]


def test_an_arena_without_room_for_a_unit_is_an_error():
    trace = zigzag(3, 1e-3)
    with pytest.raises(ValueError, match="the arena of 1024 bytes"):
        plans.belady(trace.unit_bytes, trace.train, 1024, 1e9, 0)


def test_rivals_move_what_their_policy_says():
    """20 blocks of one leaf, 8 MiB: what a ring of slots holds at a turn is there already."""
    trace = zigzag(20, 1e-3)
    outcomes = plans.rivals(trace, trace.train, 8 << 20, 1e9)
    moved = {name: outcome.nbytes / (1 << 20) for name, outcome in outcomes.items()}
    assert moved["2-slot ring"] == 2 * (20 - 2)
    assert moved["4-slot ring, three fetches"] == 2 * (20 - 4)
    assert moved["spread residents + ring"] == 2 * (20 - 4 - 4)
    assert moved["first N + ring"] == 2 * (20 - 6 - 2)
    assert moved["h2d-only swap"] == 2 * (20 - 6 - 2)


def test_a_policy_whose_slots_do_not_fit_has_no_figure():
    trace = zigzag(20, 1e-3)
    assert not plans.rivals(trace, trace.train, (2 << 20) - 1, 1e9)
    assert set(plans.rivals(trace, trace.train, 4 << 20, 1e9)) == set(plans.RIVALS)


def test_a_ring_that_fetches_thrice_does():
    trace = zigzag(20, 1e-3)
    recomputes = [Visit(unit, RECOMPUTE, 1e-3) for unit in reversed(range(20))]
    visits = trace.sample + [
        visit for pair in zip(recomputes, trace.train[20:], strict=True) for visit in pair
    ]
    outcomes = plans.rivals(trace, visits, 4 << 20, 1e9)
    assert outcomes["4-slot ring, three fetches"].nbytes == 3 * 20 << 20
    assert outcomes["2-slot ring"].nbytes == 2 * 18 << 20


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("flux1", 23.7),
        ("flux2", 62.8),
        ("qwen-image", 40.8),
        ("wan-14b", 28.1),
        ("ltx2", 37),
        ("sdxl", 5),
        ("llama-70b", 136.9),
        ("qwen3-30b", 59.8),
    ],
)
def test_models_weigh_what_they_weigh(model, gigabytes):
    size = MODELS[model][1][0]
    trace = trace_of(model, size, simulated.CARDS["4090"], "bf16")
    assert trace.total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.05)
    kinds = [visit.kind for visit in trace.train]
    n = len(trace.unit_bytes)
    assert kinds.count(RECORDED) == kinds.count(RECOMPUTE) == kinds.count(BACKWARD) == n
    assert {visit.kind for visit in trace.sample} == {FORWARD}
    assert [visit.unit for visit in trace.sample] == list(range(n))


def test_the_grid_has_all_that_is_promised():
    cells = list(simulated.grid())
    assert len(cells) == len(set(cells)) == 8 * 3 * 4 * 2 * 5 * 2
    *chosen, demo = simulated.ci_cells()
    assert demo == simulated.DEMO and demo not in cells
    assert len(set(chosen)) == 40 and set(chosen) <= set(cells)
    for part, names in enumerate((MODELS, None, simulated.CARDS, simulated.DTYPES,
                                  simulated.ARENAS, simulated.PHASES)):  # fmt: skip
        assert names is None or {cell[part] for cell in chosen} == set(names)


@pytest.fixture(scope="module")
def rows():
    return simulated.run(simulated.ci_cells(), None, 2)


@pytest.fixture(scope="module")
def previews():
    return simulated.run_previews(2)


def test_no_cell_beats_the_bound_or_the_least_bytes(rows):
    shown = simulated.measured(rows)
    assert len(shown) >= 30
    for row in shown:
        assert row["time_over_bound_ratio"] >= 0.999, row
        assert row["best_s"] >= row["bound_s"] * 0.999, row
        assert row["bytes_over_least_ratio"] >= 0.999, row


def test_training_moves_hardly_more_than_the_best_plan(rows):
    """Where a single unit does not count, and recompute and backward can share a stay."""
    of = [
        row
        for row in simulated.measured(rows)
        if row["cell"][5] == "train"
        and row["missing_units_ratio"] >= 40
        and row["arena_blocks_ratio"] >= 2
    ]
    assert len(of) >= 8
    for row in of:
        assert row["bytes_over_best_ratio"] <= simulated.BYTES_GOAL, simulated.name_of(row)


def test_training_in_less_than_two_blocks_keeps_up_with_the_best_plan(rows):
    of = [
        row
        for row in simulated.measured(rows)
        if row["cell"][5] == "train" and row["arena_blocks_ratio"] < 2
    ]
    assert len(of) >= 5
    for row in of:
        assert row["bytes_over_best_ratio"] <= 1.005, simulated.name_of(row)
        assert row["time_over_best_ratio"] <= 1.015, simulated.name_of(row)


@pytest.mark.parametrize(
    ("cell", "goal"),
    [
        # The largest units stay, so a ring is for smaller ones: else 1.024 and 1.030 of the bytes.
        (("wan-14b", 1024, "5090", "fp8", "25", "sample"), {"time": 1.005, "bytes": 1.015}),
        (("flux1", 1024, "5090", "fp8", "50", "sample"), {"time": 1.005, "bytes": 1.021}),
        # Of many units the seconds are known before the ring is laid: else 1.038 of the time.
        (("qwen3-30b", 8192, "5090", "bf16", "25", "sample"), {"time": 1.005, "bytes": 1.005}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_samples_take_and_move_hardly_more_than_the_best_plan(cell, goal):
    row = simulated.measure(cell)
    for what, most in goal.items():
        assert row[f"{what}_over_best_ratio"] <= most, row


def test_sampling_is_near_the_bound_before_anything_is_known(rows):
    """What stays is spread from the second sweep on: 1.085 where seconds were waited for."""
    of = [row for row in simulated.measured(rows) if row["cell"][5] == "sample"]
    starts = [row["from_start_over_bound_ratio"] for row in of]
    assert len(of) >= 15 and sum(starts) / len(starts) <= 1.06, starts


def test_the_demo_is_at_the_bound(rows):
    (row,) = [row for row in rows if tuple(row["cell"]) == simulated.DEMO]
    assert 1 <= row["time_over_bound_ratio"] <= simulated.TIME_GOAL
    assert 1 <= row["bytes_over_least_ratio"] <= simulated.BYTES_GOAL


@pytest.mark.parametrize("width", [128, 256])
def test_the_demo_has_the_demo_s_shapes(width):
    """The matrices of its blocks, byte for byte."""
    import torch

    from oracle_offload.commands import demo

    with torch.device("meta"):
        model = demo.build_model(width, 0)
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    weights = [sum(p.numel() for p in block.parameters() if p.dim() > 1) * 2 for block in blocks]
    trace = trace_of("demo", width, simulated.CARDS["4090"], "bf16")
    assert [sum(trace.unit_bytes[u] for u in block) for block in trace.blocks] == weights


def test_training_finds_back_after_samples(previews):
    """Where the units are so many that a ring of two is little next to what is missing."""
    of = [row for row in previews if row["cell"][0] not in ("flux2", "sdxl")]
    assert len(of) == 24
    for row in of:
        assert row["steps"][0]["bytes_ratio"] <= 1.07, row
        assert row["steps"][1]["bytes_ratio"] <= 1.03, row
        assert row["steps"][1]["time_ratio"] <= 1.03, row
        assert row["steps"][-1]["bytes_ratio"] <= 1.015, row
        assert row["steps"][-1]["time_ratio"] <= 1.01, row
        assert row["samples"] < 30 or row["sample_time_ratio"] <= 1.13, row


def test_the_page_says_what_a_run_says(rows, previews):
    """Virtual time is the same everywhere: the page is of this plan, worst cells first."""
    written = simulated.PAGE.read_text(encoding="utf-8")
    assert written == simulated.page(rows, len(rows), previews), (
        "run: python benchmarks/simulated.py --cells ci --page"
    )
    worst = written.split("worst cells, and why")[1].split("## Samples between")[0]
    assert worst.count("\n| ") == 2 + simulated.WORST
    assert simulated.PLOT.read_text(encoding="utf-8") == simulated.plot(simulated.measured(rows))


def test_the_page_of_the_grid_counts_and_names_what_is_beyond(rows):
    shown = [row for row in simulated.measured(rows) if row["cell"][0] != "demo"]
    missed = next(row for row in shown if row["cell"][5] == "sample")
    within = [row for row in shown if row is not missed and not simulated.beyond(row)]
    missed = missed | {"bytes_over_best_ratio": 1.5}
    page = simulated.grid_page([*within, missed])
    assert f"{len(within) + 1} of {len(within) + 1} cells stream; {len(within)} of them" in page
    beyond = page.split("largest units missing")[1].splitlines()[2:]
    assert beyond[0] == simulated.beyond_line(missed) and not beyond[1]
    assert beyond[0].startswith(f"| {simulated.name_of(missed)} | bytes | ")
    counted = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 9][2:]
    assert sum(int(columns[2]) for columns in counted) == len(within) + 1
    assert sum(int(columns[3]) for columns in counted) == len(within)


def test_a_cell_is_beyond_the_goals_of_its_kind():
    row = {"arena_blocks_ratio": 9, "missing_units_ratio": 90, "cell": [*"abcde", "train"]}
    row |= {f"{what}_ratio": 1.0 for what in ("time_over_bound", "time_over_best",
                                              "bytes_over_best")}  # fmt: skip
    beyond = simulated.beyond
    assert not beyond(row)
    assert not beyond(row | {"time_over_bound_ratio": 1.03, "bytes_over_best_ratio": 1.02})
    assert beyond(row | {"time_over_bound_ratio": 1.031}) == ["time"]
    assert beyond(row | {"bytes_over_best_ratio": 1.021}) == ["bytes"]
    few = row | {"bytes_over_best_ratio": 1.021, "missing_units_ratio": 39}
    assert not beyond(few)
    assert beyond(few | {"arena_blocks_ratio": 1.9}) == ["bytes"]
    small = row | {"arena_blocks_ratio": 1.9, "time_over_bound_ratio": 2.0}
    assert not beyond(small | {"time_over_best_ratio": 1.04})
    assert beyond(small | {"time_over_best_ratio": 1.041}) == ["time"]
    sample = few | {"cell": [*"abcde", "sample"], "time_over_bound_ratio": 2.0}
    assert beyond(sample | {"time_over_best_ratio": 1.021}) == ["time", "bytes"]


def test_the_page_of_the_grid_is_of_this_plan():
    """Two of its lines, of cells beyond a goal, measured again."""
    written = simulated.GRID_PAGE.read_text(encoding="utf-8").splitlines()
    named = {simulated.name_of({"cell": cell}): cell for cell in simulated.grid()}
    lines = [line for line in written if line.removeprefix("| ").split(" | ")[0] in named]
    assert lines
    for line in {lines[0], lines[-1]}:
        row = simulated.measure(named[line.removeprefix("| ").split(" | ")[0]])
        assert line == simulated.beyond_line(row), (
            "run: python benchmarks/simulated.py --cells all --page"
        )


def test_rows_of_another_plan_are_not_gone_on_from(tmp_path, monkeypatch):
    before = simulated.results_path()
    assert before == simulated.results_path()
    folder = tmp_path / "benchmarks"
    shutil.copytree(simulated.FOLDER, folder, ignore=shutil.ignore_patterns("results", "out"))
    core = tmp_path / "csrc" / "core"
    shutil.copytree(simulated.FOLDER.parent / "csrc" / "core", core)
    monkeypatch.setattr(simulated, "FOLDER", folder)
    assert simulated.results_path() == before
    (core / "plan.c").write_text("")
    assert simulated.results_path() != before


def test_a_run_goes_on_where_it_stopped(tmp_path, rows, monkeypatch):
    path = tmp_path / "rows.jsonl"
    kept = [row for row in rows if "step_s" not in row][:1] + rows[:2]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"cell": ["torn')
    cells = [tuple(row["cell"]) for row in kept]
    monkeypatch.setattr(simulated, "measure", lambda cell: pytest.fail(f"{cell} again"))
    again = simulated.run(cells, path, 1)
    assert [tuple(row["cell"]) for row in again] == cells


def test_why_tells_what_is_over_the_bound():
    row = {"cell": ["flux1", 512, "4090", "bf16", "50", "train"], "bound_s": 1.0, "kernels_s": 0.5}
    link = simulated.CARDS["4090"].link_bps
    said = [
        simulated.why({**row, "step_s": step, "h2d_bytes": moved * link, "least_bytes": link})
        for step, moved in ((1.005, 1.0), (1.1, 1.1), (1.2, 1.0))
    ]
    assert said[0] == "at the bound"
    assert said[1] == "the link never rests: 100% of what is over are bytes that came twice"
    assert said[2] == "the link rests for 0.200 of 1.200 s"
    bound_by_kernels = {**row, "kernels_s": 1.2, "step_s": 1.2, "h2d_bytes": 1.0, "least_bytes": 1}
    assert simulated.why(bound_by_kernels) == "bound by kernels"


def test_a_wait_of_the_engine_is_seen(rows):
    """The rows are the engine's: another engine's bytes and seconds are not those of the best."""
    shown = simulated.measured(rows)
    differences = [row["step_s"] != row["best_s"] for row in shown]
    assert all(differences)
    pairs = itertools.pairwise(shown)
    assert all(a["time_over_bound_ratio"] >= b["time_over_bound_ratio"] for a, b in pairs)


def test_cards_behind_one_switch_reach_their_joint_bound_as_the_page_says():
    """Two that share a link upstream, and one of as many on two switches, which share nothing."""
    cells = several_cards.cells()
    assert {(cell.cards, cell.switches) for cell in cells} == {
        *((cards, 1) for cards in (1, 2, 4, 8)),
        *((cards, 2) for cards in (2, 4, 8)),
    }
    training = several_cards.TRAININGS[0]
    one, shared, apart = (
        several_cards.run(several_cards.Cell(training, cards, switches))
        for cards, switches in ((1, 1), (2, 1), (2, 2))
    )
    for row in (one, shared, apart):
        assert several_cards.GOAL <= row["of_bound"] <= 1.001, row
    assert shared["step_s"] > 1.5 * one["step_s"] and apart["step_s"] < 1.01 * one["step_s"]
    assert one["h2d_bytes"] > 10e9, "nothing is streamed"
    page = several_cards.PAGE.read_text("utf-8")
    lines = several_cards.table([one, shared, apart])
    assert all(line in page for line in lines), "benchmarks/several_cards.py --page"


@pytest.mark.slow
def test_one_to_eight_cards_reach_their_joint_bound_and_the_page_has_what_they_take():
    listed, page = several_cards.cells(), several_cards.PAGE.read_text("utf-8")
    for training in several_cards.TRAININGS:
        rows = [
            several_cards.run(several_cards.Cell(training, cards, switches))
            for switches in (1, 2)
            for cards in range(switches, 9)
        ]
        for row in rows:
            assert several_cards.GOAL <= row["of_bound"] <= 1.001, row
        lines = several_cards.table([row for row in rows if row["cell"] in listed])
        assert all(line in page for line in lines), "benchmarks/several_cards.py --page"
