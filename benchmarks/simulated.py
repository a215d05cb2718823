"""The engine in virtual time over models, cards and arenas, with other plans and the bound.

    python benchmarks/simulated.py --cells ci             # 41 cells, the ten worst named
    python benchmarks/simulated.py --cells ci --page      # ... and docs/performance.md
    python benchmarks/simulated.py --cells all --page     # the whole grid, docs/performance-grid.md

What cards have measured of it comes into the page by `tools/measured_page.py`, which writes that
section alone, too.

A cell is the engine as it is, over the simulated driver: true sizes, copies that move no byte,
kernels that take what `model_traces` says. It is compared with the bound by intervals, the best
plan known and policies of other programs (`plans`), all over the same visits and arena.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import mmap
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER.parent / "tools")]

import measured_page  # noqa: E402 - the folder must be findable first
import plans  # noqa: E402
from model_traces import CARDS, DTYPES, MODELS, Card, Trace, Visit, trace_of  # noqa: E402

RESULTS = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "performance.md"
GRID_PAGE = FOLDER.parent / "docs" / "performance-grid.md"
PLOT = FOLDER.parent / "docs" / "images" / "performance.svg"
ARENAS = ("100", "91", "50", "25", "own")  # percent that is offloaded, or what the card has
PHASES = ("train", "sample")
ROUNDS = {"train": 8, "sample": 24}
LAST = 4  # of the rounds, which are measured
CI_CELLS, WORST = 40, 10
DEMO = ("demo", 128, "4090", "bf16", "91", "train")  # as `oracle-offload demo` does it
STEPS, PREVIEWS = 5, (4, 30)  # training steps before a preview, and its samples
TIME_GOAL, BYTES_GOAL = 1.03, 1.02
SAMPLE_TIME_GOAL = 1.02  # of the fastest plan known
# Of training in less than two blocks, by the best plan; of fewer largest units bytes do not count.
SMALL_TIME_GOAL, FEW_UNITS = 1.04, 40

Cell = tuple[str, int, str, str, str, str]  # model, size, card, dtype, arena, phase


def grid() -> Iterator[Cell]:
    """Return all cells."""
    for model, (_, sizes) in MODELS.items():
        for size in sizes:
            for card in CARDS:
                for dtype in DTYPES:
                    for arena in ARENAS:
                        for phase in PHASES:
                            yield model, size, card, dtype, arena, phase


def ci_cells() -> list[Cell]:
    """Return cells that stay the same: 40 of the grid, and the demo's.

    Each model, card and arena comes in turn, by both phases.
    """
    sizes = {model: sizes[0] for model, (_, sizes) in MODELS.items()}
    cards, dtypes = list(CARDS), list(DTYPES)
    cells: list[Cell] = []
    for number in range(CI_CELLS):
        model = list(MODELS)[number % len(MODELS)]
        lap = number // len(MODELS)
        arena = ARENAS[(number + lap) % len(ARENAS)]
        card = cards[(number + lap) % len(cards)]
        phase = PHASES[(number + lap) % 2]
        cells.append((model, sizes[model], card, dtypes[lap % 2], arena, phase))
    return [*cells, DEMO]


def capacity_of(trace: Trace, card: Card, arena: str) -> int:
    """Return the bytes of a cell's arena: never more than the model can use."""
    if arena == "own":
        room = card.arena_bytes
    else:
        room = (1 - int(arena) / 100) * trace.total_bytes + trace.floor_bytes()
    return int(min(room, trace.total_bytes)) // 256 * 256


def run_engine(
    trace: Trace, rounds: Sequence[Sequence[Visit]], capacity: int, card: Card
) -> list[plans.Outcome]:
    """Return what the engine takes for each round but the first, in virtual time.

    A round is a step or a sweep: its visits.
    """
    import numpy as np

    from oracle_offload import _core
    from oracle_offload.engine import simulator

    device = simulator.get_device(0)
    device.link_gbps, device.copy_latency_s = card.link_bps / 1e9, plans.COPY_LATENCY_S
    device.launch_s, device.memory_bytes = 0.0, float(2**48)
    before = simulator.get_device(0)
    simulator.set_device(0, device)
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    engine = _core.Engine(str(simulator.library_path()), 0)
    # Memory that cannot be written takes none: only its addresses are needed. All units have the
    # same masters: no code looks at what is copied.
    space = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    masters = _core.HostBuffer(max(trace.unit_bytes))
    lease, model = engine.add_lease(), engine.add_model()
    try:
        stream = engine.compute_stream
        address = np.frombuffer(space, "b").ctypes.data
        engine.add_segment(lease, -(-address // 256) * 256, capacity, stream)
        engine.lock(masters)
        members = []
        for nbytes in trace.unit_bytes:
            _, added = engine.add_unit(model, [[(masters.address, nbytes)]], False)
            members.append(added[0][0])
        moved = [0]
        # No wait between the steps: the link goes on, as it does where a loss is read.
        with simulator.trace() as timeline:
            for number, visits in enumerate(rounds):
                _play(engine, visits, members, number)
                moved.append(engine.stats(model)["h2d_bytes"])
            simulator.finish()
    finally:
        simulator.finish()
        engine.remove_lease(lease)
        engine.remove_model(model)
        engine.unlock(masters)
        engine.close()
        simulator.poison(True)
        simulator.copy_nothing(False)
        simulator.detect_races(True)
        simulator.set_device(0, before)
    # An acquire declares a kernel, too, of no duration here.
    kernels = sorted(row.end_s for row in timeline if row.kind == "kernel")
    counts = list(itertools.accumulate(2 * len(visits) for visits in rounds))
    if len(kernels) != counts[-1]:
        raise RuntimeError(f"{len(kernels)} kernels where {counts[-1]} are expected")
    ends = [kernels[count - 1] for count in counts]
    return [
        plans.Outcome(ends[i] - ends[i - 1], moved[i + 1] - moved[i]) for i in range(1, len(rounds))
    ]


def _play(engine: Any, visits: Sequence[Visit], members: Sequence[int], number: int) -> None:
    from oracle_offload.engine import simulator

    stream = engine.compute_stream
    for visit in visits:
        task = number if visit.kind in (1, 2) else -1
        ticket, *_, fetched = engine.acquire(members[visit.unit], stream, 0, visit.kind, task, 0.0)
        if fetched:
            engine.stamp([(members[unit], 0) for unit in fetched])
        simulator.launch(stream, (), (), visit.seconds)
        fetched = engine.release(ticket, stream)
        if fetched:
            engine.stamp([(members[unit], 0) for unit in fetched])


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell; return its row, without figures where the arena holds the whole model."""
    model, size, card_name, dtype, arena, phase = cell
    row: dict[str, Any] = {"cell": list(cell)}
    card = CARDS[card_name]
    trace = trace_of(model, size, card, dtype)
    visits = trace.train if phase == "train" else trace.sample
    capacity = capacity_of(trace, card, arena)
    missing = trace.total_bytes - capacity
    row |= {"weights_bytes": trace.total_bytes, "arena_bytes": capacity}
    if missing <= 0:
        return row
    if capacity < trace.floor_bytes():
        return {**row, "too_small": True}
    outcomes = run_engine(trace, [visits] * ROUNDS[phase], capacity, card)
    ours = outcomes[-LAST:]
    seconds = sum(one.seconds for one in ours) / LAST
    nbytes = sum(one.nbytes for one in ours) / LAST
    args = visits, capacity, card.link_bps
    bound = plans.interval_bound_s(trace.unit_bytes, *args, plans.COPY_LATENCY_S)
    known = plans.best_known(trace, *args)
    fastest = min(one.seconds for one in known)
    fewest = min(one.nbytes for one in known if one.seconds <= 1.02 * fastest)
    least = (2 if phase == "train" else 1) * missing
    return {
        **row,
        "kernels_s": sum(visit.seconds for visit in visits),
        "step_s": seconds,
        "h2d_bytes": nbytes,
        "bound_s": bound,
        "best_s": fastest,
        "best_bytes": fewest,
        "least_bytes": least,
        "time_over_bound_ratio": seconds / bound,
        "from_start_over_bound_ratio": sum(one.seconds for one in outcomes) / len(outcomes) / bound,
        "time_over_best_ratio": seconds / fastest,
        "bytes_over_best_ratio": nbytes / fewest,
        "bytes_over_least_ratio": nbytes / least,
        "missing_units_ratio": missing / max(trace.unit_bytes),
        "arena_blocks_ratio": capacity / trace.block_bytes,
        "rivals": {
            name: {"step_s": one.seconds, "h2d_bytes": one.nbytes}
            for name, one in plans.rivals(trace, *args).items()
        },
    }


def preview_cells() -> list[tuple[Cell, int]]:
    """Return cells of training that samples interrupt, and how many do each time."""
    cells: list[tuple[Cell, int]] = []
    for number, (model, (_, sizes)) in enumerate(MODELS.items()):
        card = list(CARDS)[number % len(CARDS)]
        for arena in ("50", "25"):
            cell = (model, sizes[0], card, "bf16", arena, "train")
            cells += [(cell, samples) for samples in PREVIEWS]
    return cells


def measure_preview(cell: Cell, samples: int) -> dict[str, Any]:
    """Train, sample, train, sample, train: return what the last samples and steps take.

    Both by their yardsticks: seconds by the bound, bytes by the least. `steps` are the first
    after the samples, one after the other.
    """
    model, size, card_name, dtype, arena, _ = cell
    card = CARDS[card_name]
    trace = trace_of(model, size, card, dtype)
    capacity = capacity_of(trace, card, arena)
    missing = trace.total_bytes - capacity
    last = 3
    rounds = ([trace.train] * STEPS + [trace.sample] * samples) * 2 + [trace.train] * last
    outcomes = run_engine(trace, rounds, capacity, card)
    step_s, sample_s = (
        plans.interval_bound_s(
            trace.unit_bytes, visits, capacity, card.link_bps, plans.COPY_LATENCY_S
        )
        for visits in (trace.train, trace.sample)
    )
    sampling, steps = outcomes[-last - samples : -last], outcomes[-last:]
    return {
        "cell": list(cell),
        "samples": samples,
        "sample_time_ratio": sum(one.seconds for one in sampling) / samples / sample_s,
        "sample_bytes_ratio": sum(one.nbytes for one in sampling) / samples / missing,
        "steps": [
            {"time_ratio": one.seconds / step_s, "bytes_ratio": one.nbytes / (2 * missing)}
            for one in steps
        ],
    }


def run_previews(jobs: int) -> list[dict[str, Any]]:
    """Measure all of `preview_cells`."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.starmap(measure_preview, preview_cells())


def why(row: dict[str, Any]) -> str:
    """Return what a cell's time goes to beyond the bound: bytes, or a link that waits."""
    link = row["h2d_bytes"] / CARDS[row["cell"][2]].link_bps
    over = row["step_s"] - row["bound_s"]
    extra = link - row["least_bytes"] / CARDS[row["cell"][2]].link_bps
    if over <= 0.01 * row["bound_s"]:
        return "at the bound"
    if link >= 0.98 * row["step_s"]:
        return f"the link never rests: {extra / over:.0%} of what is over are bytes that came twice"
    if row["kernels_s"] >= 0.98 * row["step_s"]:
        return "bound by kernels"
    return f"the link rests for {row['step_s'] - link:.3f} of {row['step_s']:.3f} s"


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with figures, the one furthest over its bound first."""
    return sorted(
        (row for row in rows if "step_s" in row), key=lambda row: -row["time_over_bound_ratio"]
    )


def name_of(row: dict[str, Any]) -> str:
    """Return a cell as a reader says it."""
    model, size, card, dtype, arena, phase = row["cell"]
    unit = {"llama-70b": "tokens", "qwen3-30b": "tokens", "demo": "wide"}.get(model, "pixels")
    room = "its own arena" if arena == "own" else f"{arena}% offloaded"
    return f"{model} {size} {unit}, {card}, {dtype}, {room}, {phase}"


def results_path() -> Path:
    """Return where rows of the grid are kept: another engine's or plan's are not gone on from."""
    digest = hashlib.sha256()
    measuring = [FOLDER / f"{name}.py" for name in ("model_traces", "plans", "simulated")]
    for source in sorted((FOLDER.parent / "csrc" / "core").glob("*.[ch]")) + measuring:
        digest.update(source.read_bytes())
    return RESULTS / f"simulated-{digest.hexdigest()[:12]}.jsonl"


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return what an earlier run left, by cell; a line that was torn is left out."""
    rows: dict[Cell, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[tuple(row["cell"])] = row
    return rows


def run(cells: Sequence[Cell], path: Path | None, jobs: int) -> list[dict[str, Any]]:
    """Measure the cells that `path` lacks, and append each to it as it comes."""
    rows = read(path) if path else {}
    left = [cell for cell in cells if cell not in rows]
    begin = time.monotonic()
    # Each process has a simulator of its own.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for done, row in enumerate(pool.imap_unordered(measure, left), 1):
            rows[tuple(row["cell"])] = row
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
            if done % 20 == 0 or done == len(left):
                seconds = time.monotonic() - begin
                print(f"{done} of {len(left)} cells, {seconds:.0f} s", file=sys.stderr, flush=True)
    return [rows[cell] for cell in cells]


# ---- the page ----


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of cells: seconds, and each figure by its yardstick."""
    names = plans.RIVALS
    head = ["cell", "s", "/ bound", "/ best plan", "bytes / best", *[f"{n} / ours" for n in names]]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for row in rows:
        others = row["rivals"]
        rivals = [
            f"{others[n]['step_s'] / row['step_s']:.2f}" if n in others else "no room"
            for n in names
        ]
        figures = [
            f"{row['step_s']:.3f}",
            f"{row['time_over_bound_ratio']:.3f}",
            f"{row['time_over_best_ratio']:.3f}",
            f"{row['bytes_over_best_ratio']:.3f}",
        ]
        lines.append(f"| {' | '.join([name_of(row), *figures, *rivals])} |")
    return lines


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG: for each share of cells, how far over the bound the others stay below."""
    width, height, left, top = 640, 320, 50, 20
    most = 2.0
    curves = {"oracle_offload": [row["step_s"] / row["bound_s"] for row in rows]}
    for name in plans.RIVALS:
        curves[name] = [
            row["rivals"][name]["step_s"] / row["bound_s"] for row in rows if name in row["rivals"]
        ]
    colours = ("#0b6e4f", "#c1121f", "#e09f3e", "#335c67", "#7b2cbf", "#8d99ae")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 60}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height + 60}" fill="white"/>',
    ]

    def y(ratio: float) -> float:
        return top + (height - top) * (1 - (min(ratio, most) - 1) / (most - 1))

    for tick in (1.0, 1.25, 1.5, 1.75, 2.0):
        parts.append(
            f'<path d="M{left} {y(tick):.1f}H{width - 10}" stroke="#ddd"/>'
            f'<text x="6" y="{y(tick) + 4:.1f}">{tick:.2f}</text>'
        )
    for number, (name, ratios) in enumerate(curves.items()):
        step = (width - 10 - left) / max(1, len(ratios) - 1)
        points = " ".join(
            f"{left + i * step:.1f},{y(ratio):.1f}" for i, ratio in enumerate(sorted(ratios))
        )
        colour = colours[number % len(colours)]
        place = left + number % 3 * 200, height + 20 + number // 3 * 18
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{place[0]}" y="{place[1]}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many cells are within the goals."""
    said = []
    for phase in PHASES:
        of = [row for row in rows if row["cell"][5] == phase]
        if not of:
            continue
        over = "time_over_bound_ratio" if phase == "train" else "time_over_best_ratio"
        against = "bound" if phase == "train" else "fastest plan known"
        goal = TIME_GOAL if phase == "train" else SAMPLE_TIME_GOAL
        in_time = sum(row[over] <= goal for row in of)
        in_bytes = sum(row["bytes_over_best_ratio"] <= BYTES_GOAL for row in of)
        said.append(
            f"{phase}: {in_time} of {len(of)} cells take at most {goal} of the {against}, "
            f"{in_bytes} move at most {BYTES_GOAL} of the best plan's bytes; "
            f"on average {sum(row[over] for row in of) / len(of):.3f} and "
            f"{sum(row['bytes_over_best_ratio'] for row in of) / len(of):.3f}."
        )
    if starts := [row["from_start_over_bound_ratio"] for row in of]:
        said.append(
            f"Of a model that nothing is known of, sweeps 2 to {ROUNDS['sample']} take "
            f"{sum(starts) / len(starts):.3f} of the bound on average."
        )
    return said


def beyond(row: dict[str, Any]) -> list[str]:
    """Return which goals a cell misses: "time", "bytes"."""
    train, small = row["cell"][5] == "train", row["arena_blocks_ratio"] < 2
    if train and not small:
        in_time = row["time_over_bound_ratio"] <= TIME_GOAL
    else:
        in_time = row["time_over_best_ratio"] <= (SMALL_TIME_GOAL if train else SAMPLE_TIME_GOAL)
    counts = not train or small or row["missing_units_ratio"] >= FEW_UNITS
    in_bytes = not counts or row["bytes_over_best_ratio"] <= BYTES_GOAL
    return [name for name, holds in (("time", in_time), ("bytes", in_bytes)) if not holds]


def preview_table(previews: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of training that samples interrupt."""
    lines = [
        "| cell | samples | each / bound | bytes / least | first step / bound | bytes / least "
        "| second step / bound | bytes / least |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in previews:
        ratios = [row["sample_time_ratio"], row["sample_bytes_ratio"]]
        for step in row["steps"][:2]:
            ratios += [step["time_ratio"], step["bytes_ratio"]]
        figures = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        lines.append(f"| {name_of(row).removesuffix(', train')} | {row['samples']} | {figures} |")
    return lines


def page(rows: Sequence[dict[str, Any]], cells: int, previews: Sequence[dict[str, Any]]) -> str:
    """Return docs/performance.md."""
    shown = measured(rows)
    counted = f"{len(shown)} of {cells} cells stream; in the others the arena holds the whole model"
    return "\n".join(
        [
            "# Performance, simulated",
            "",
            "The engine as it is, over the simulated driver, in virtual time: the sizes and",
            "kernels of real models (`benchmarks/model_traces.py`), and copies that take their",
            "time. [What cards have measured](#measured-and-simulated) of the same cells is below;",
            "all of that is in [measured.md](measured.md).",
            "",
            "*Bound*: the longest chain of intervals, each the longer of its kernels and of the",
            "copies it needs. *Best plan*: the fastest plan known for the cell, found with full",
            "knowledge and without holes in the arena; bytes by the fewest among plans within 1.02",
            "of its time (`benchmarks/plans.py`). *Others*: their policies in the same memory,",
            "as seconds over ours: below 1 they are faster.",
            "",
            f"{counted} (or is smaller than one block).",
            "",
            *verdicts(shown),
            "",
            "![how far over the bound, cell by cell in order](images/performance.svg)",
            "",
            measured_page.beside_simulated(measured_page.read(measured_page.RESULTS)),
            f"## The {WORST} worst cells, and why",
            "",
            "| cell | / bound | bytes / least | |",
            "| --- | --- | --- | --- |",
            *(
                f"| {name_of(row)} | {row['time_over_bound_ratio']:.3f} "
                f"| {row['bytes_over_least_ratio']:.3f} | {why(row)} |"
                for row in shown[:WORST]
            ),
            "",
            "## Samples between training steps",
            "",
            f"{STEPS} training steps, then samples, twice, and training again: what the second",
            "samples take on average, and the first steps after them. A few samples leave the",
            "arena as training wants it; many spread what stays, so that the link rests less.",
            "",
            *preview_table(previews),
            "",
            "## All cells",
            "",
            *table(sorted(shown, key=lambda row: [str(part) for part in row["cell"]])),
            "",
            "`python benchmarks/simulated.py --cells ci --page` measures these cells and writes",
            "this page. With `--cells all` it measures the whole grid and writes",
            "[performance-grid.md](performance-grid.md).",
            "",
        ]
    )


def beyond_line(row: dict[str, Any]) -> str:
    """Return a line of the table of cells that miss a goal."""
    figures = (row["time_over_bound_ratio"], row["time_over_best_ratio"],
               row["bytes_over_best_ratio"])  # fmt: skip
    columns = [name_of(row), " and ".join(beyond(row)), *(f"{each:.3f}" for each in figures)]
    return f"| {' | '.join(columns)} | {row['missing_units_ratio']:.0f} | {why(row)} |"


def grid_page(rows: Sequence[dict[str, Any]]) -> str:
    """Return docs/performance-grid.md."""
    shown = measured(rows)
    lines = []
    for model, phase in itertools.product(MODELS, PHASES):
        of = [row for row in shown if row["cell"][0] == model and row["cell"][5] == phase]
        if not of:
            continue
        columns = [model, phase, str(len(of)), str(sum(not beyond(row) for row in of))]
        for name in ("time_over_bound_ratio", "time_over_best_ratio", "bytes_over_best_ratio"):
            ratios = [row[name] for row in of]
            columns += [f"{sum(ratios) / len(of):.3f}", f"{max(ratios):.3f}"]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(
        [
            "# Performance, simulated: the whole grid",
            "",
            "Every cell of which [performance.md](performance.md) shows some, by its yardsticks:",
            f"{len(MODELS)} models in three sizes, {len(CARDS)} cards, {len(DTYPES)} dtypes,"
            f" {len(ARENAS)} arenas, training and sampling.",
            f"{len(shown)} of {len(rows)} cells stream; {sum(not beyond(row) for row in shown)} of"
            " them are within the goals.",
            "",
            f"The goals: training takes at most {TIME_GOAL} of the bound, in an arena of less than"
            f" two blocks {SMALL_TIME_GOAL}",
            f"of the best plan's time; samples take at most {SAMPLE_TIME_GOAL} of the fastest"
            " plan's. Bytes are",
            f"at most {BYTES_GOAL} of the best plan's, in training where at least {FEW_UNITS} of"
            " the largest unit are missing.",
            "",
            "| model | phase | cells | within the goals | / bound, on average | at most "
            "| / best plan | at most | bytes / best | at most |",
            f"|{' --- |' * 10}",
            *lines,
            "",
            "## Cells beyond a goal",
            "",
            "A ring takes the place of one unit more than what is missing, of the smallest size",
            "whose units can be all that streams. The best plan has no places: what is left over",
            "between units costs it nothing, and what stays changes with each sweep. Of cells that",
            "kernels bound, the bytes beyond cost no time.",
            "",
            "| cell | goal | / bound | / best plan | bytes / best | largest units missing | |",
            f"|{' --- |' * 7}",
            *(beyond_line(row) for row in shown if beyond(row)),
            "",
            "`python benchmarks/simulated.py --cells all --page` measures all cells and writes",
            "this page.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure cells, name the worst, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", choices=("ci", "all"), default="ci")
    parser.add_argument("--results", type=Path, help="keep rows here, and go on from them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--page", action="store_true", help="write docs/ from what is measured")
    args = parser.parse_args(argv)
    cells = ci_cells() if args.cells == "ci" else list(grid())
    results = args.results or (results_path() if args.cells == "all" else None)
    rows = run(cells, results, args.jobs)
    shown = measured(rows)
    for row in shown[:WORST]:
        print(
            f"{name_of(row)}: {row['time_over_bound_ratio']:.3f} of the bound, "
            f"{row['time_over_best_ratio']:.3f} of the best plan, "
            f"bytes {row['bytes_over_best_ratio']:.3f}; {why(row)}"
        )
    print("\n".join(verdicts(shown)))
    if args.page and args.cells == "all":
        GRID_PAGE.write_text(grid_page(rows), encoding="utf-8")
    elif args.page:
        PAGE.write_text(page(rows, len(cells), run_previews(args.jobs)), encoding="utf-8")
        PLOT.write_text(plot(shown), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
