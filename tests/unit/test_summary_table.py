"""The table of `memory_summary`, line by line, from figures that are all different."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from oracle_offload.layers.traffic import stalls_of, stalls_text  # noqa: E402
from oracle_offload.observe.summary import (  # noqa: E402
    DeviceUsage,
    MemoryReport,
    ModelUsage,
    PhaseUsage,
    StalledLayer,
    Usage,
    _optimizer_bytes,
    _phase_usage,
    _rate,
    _stalled,
)

KIB, MIB = 1 << 10, 1 << 20
MODEL = ModelUsage(
    name="Net",
    layers=12,
    resident_parameters=3,
    resident_bytes=5 * KIB,
    kept_bytes=0,
    computed_bytes=0,
    derived_bytes=0,
    runs_again=0,
    flops_again=0.0,
    rows_read=0,
    rows_bytes=0,
    managed_bytes=100 * MIB,
    in_arena_bytes=20 * MIB,
    capacity_bytes=25 * MIB,
    units=9,
    units_in_arena=2,
    acquires=400,
    hits=100,
    late=7,
    stale=8,
    prefetches=300,
    evictions=11,
    waits=640,
    timed_waits=40,
    stalls=13,
    stall_s=0.0015,
    h2d_bytes=300 * MIB,
    h2d_copies=31,
    h2d_gbps=12.34,
    d2h_bytes=30 * MIB,
    d2h_copies=17,
    d2h_gbps=None,
    overlap=0.941,
    steps=2,
    step_h2d_bytes=150 * MIB,
    step_d2h_bytes=15 * MIB,
    x_min_bytes=100 * MIB,
    look_ahead_units=4,
    budget_changes=None,
    budget_reason=None,
)
DEVICE = DeviceUsage(
    device="cpu",
    name="NVIDIA GeForce RTX 4090",
    simulated=True,
    free_bytes=23 << 30,
    total_bytes=24 << 30,
    torch_allocated_bytes=None,
    arena_bytes=26 * MIB,
    in_arena_bytes=20 * MIB,
    peak_in_arena_bytes=24 * MIB,
    locked_bytes=101 * MIB,
    pageable_bytes=6 * KIB,
    lock_refusals=2,
    ring_bytes=32 * MIB,
    unlocked_h2d_gbps=4.56,
    numa_node=3,
    host_waits=41,
    recoveries=42,
    allocations=43,
    models=[MODEL],
)


def rows(report: MemoryReport) -> list[tuple[str, str]]:
    """The lines of the table without its frame: (label, value)."""
    lines = str(report).splitlines()
    assert {len(line) for line in lines} == {82}, "one width"
    assert all(line[0] == line[-1] == "|" for line in lines)
    inner = [line[1:-1] for line in lines]
    return [
        (cell[:40].strip(), cell[41:].strip()) if cell[40] == "|" else (cell.strip(), "")
        for cell in inner
    ]


BASE = [
    ("arena", "26.00 MiB"),
    ("weights in it now / at most", "20.00 MiB / 24.00 MiB"),
    ("host memory, page-locked", "101.00 MiB"),
    ("refusals to page-lock some", "2"),
    ("host memory, pageable", "6.00 KiB"),
    ("which is copied through", "rings of 32.00 MiB, 4.6 GB/s"),
]
COUNTERS = [
    ("device memory free / total", "23.00 GiB / 24.00 GiB"),
    ("nearest NUMA node", "3"),
    ("host waits", "41"),
    ("recoveries after a failed driver call", "42"),
    ("driver objects and host blocks created", "43"),
]
OF_MODEL = [
    ("Net", "12 layers in 9 units"),
    ("weights managed", "100.00 MiB"),
    ("parameters that are not managed", "5.00 KiB in 3"),
    ("weights in the arena", "20.00 MiB of 25.00 MiB"),
    ("to the device, last step", "150.00 MiB = 1.500 X_min"),
    ("to the host, last step", "15.00 MiB"),
    ("X_min, least bytes a step can need", "100.00 MiB"),
]
COUNTED = [
    ("to the device, in all", "300.00 MiB in 31 copies, 12.3 GB/s"),
    ("to the host, in all", "30.00 MiB in 17 copies"),
    ("hits", "100 of 400 (25.0%)"),
    ("prefetched / late / stale", "300 / 7 / 8"),
    ("copies' time that held nothing up", "94%"),
    ("stalls", "13, 1.50 ms, by 40 of 640 waits"),
]
RULE, THIN = ("=" * 80, ""), ("-" * 80, "")
TITLE = "oracle_offload memory summary, cpu (NVIDIA GeForce RTX 4090, simulated)"


def test_the_whole_table() -> None:
    report = MemoryReport([DEVICE], {"cpu": 3 * KIB, "cuda:0": 2 * MIB})
    optimizer = [("optimizer state on cpu", "3.00 KiB"), ("optimizer state on cuda:0", "2.00 MiB")]
    head = [RULE, (TITLE, ""), RULE]
    parts = [*head, *BASE, *COUNTERS, THIN, *OF_MODEL, *COUNTED, THIN, *optimizer]
    found = rows(report)
    # Below are the words that are explained, whichever they are.
    assert found[: len(parts)] == parts and found[-1] == RULE
    assert repr(report) == str(report)
    two = str(MemoryReport([DEVICE, replace(DEVICE, device="cuda:0")]))
    assert two.count("memory summary, cpu") == two.count("memory summary, cuda:0") == 1


def test_the_layers_that_stalled_longest_stand_below_the_stalls() -> None:
    long = "text_encoder.transformer.h.31.attention.query"
    stalled = [
        StalledLayer("blocks.3.to_q, blocks.3.to_k, blocks.3.to_v", 8, 6, 0.012),
        StalledLayer(long, 4, 2, 0.0025),
        StalledLayer("blocks.4", 3, 1, 0.001),
        StalledLayer("blocks.5", 3, 1, 0.0005),
    ]
    report = MemoryReport([replace(DEVICE, models=[replace(MODEL, stalled=stalled)])])
    found = rows(report)
    at = found.index(COUNTED[-1])
    assert found[at + 1 : at + 5] == [
        ("blocks.3.to_q +2", "12.00 ms, 6 of 8 timed waits"),
        ("..." + long[-31:], "2.50 ms, 2 of 4 timed waits"),
        ("blocks.4", "1.00 ms, 1 of 3 timed waits"),
        THIN,
    ]
    told = report.to_dict()["devices"][0]["models"][0]["stalled"]
    assert [row["layers"] for row in told] == [row.layers for row in stalled]
    assert told[0] == {
        "layers": "blocks.3.to_q, blocks.3.to_k, blocks.3.to_v",
        "timed_waits": 8,
        "stalls": 6,
        "stall_s": 0.012,
    }


def test_every_row_that_a_model_can_have_stands_in_its_place() -> None:
    why = "the weights compress to 67% and the link is the bound, as the last steps have shown"
    told: dict[str, Any] = {
        "kept_bytes": 2 * KIB, "computed_bytes": 3 * KIB, "derived_bytes": 4 * KIB,
        "runs_again": 5, "flops_again": 6e12, "rows_read": 7, "rows_bytes": 8 * KIB,
        "compressed_bytes": 40 * MIB, "compressed_host_bytes": 30 * MIB,
        "staging_bytes": 9 * KIB, "compressed_because": why, "budget_changes": 2,
        "budget_reason": "a step left room", "stalls": 0, "stall_s": 0.0,
    }  # fmt: skip
    of_model = [
        ("Net", "12 layers in 9 units"),
        ("weights managed", "100.00 MiB"),
        ("weights computed on the host", "3.00 KiB"),
        ("of them compressed on the host", "40.00 MiB in 30.00 MiB, 75.0%"),
        ("which pass on the device through", "9.00 KiB"),
        ("because", "the weights compress to 67% and the"),
        ("", "link is the bound, as the last steps"),
        ("", "have shown"),
        ("parameters that are not managed", "5.00 KiB in 3"),
        ("of them kept, to spare host memory", "2.00 KiB"),
        ("weights in the arena", "20.00 MiB of 25.00 MiB"),
        ("auto budget, changed", "2 times; looks 4 units ahead"),
        ("the last time because", "a step left room"),
        ("made of weights, kept to backward", "4.00 KiB: checkpoint the blocks"),
        *OF_MODEL[4:],
    ]
    counted = [
        COUNTED[0],
        ("rows read from the host, in all", "8.00 KiB in 7"),
        *COUNTED[1:-1],
        ("stalls", "0, 0.00 ms, by 40 of 640 waits"),
        ("forward again in backward", "5, 6.000 TFLOP"),
    ]
    model = replace(MODEL, **told)
    found = rows(MemoryReport([replace(DEVICE, models=[model])]))
    at = found.index(of_model[0])
    expected = [*of_model, *counted, THIN]
    assert found[at : at + len(expected)] == expected
    short = rows(MemoryReport([replace(DEVICE, models=[model])], abbreviated=True))
    assert short[-len(of_model) - 1 :] == [*of_model, RULE]
    none = replace(MODEL, compressed_because="nothing would be gained")
    found = rows(MemoryReport([replace(DEVICE, models=[none])]))
    at = found.index(("weights managed", "100.00 MiB"))
    assert found[at + 1] == ("because", "nothing would be gained")
    for changes, said in ((1, "once; looks 4 units ahead"), (0, "0 times; looks 4 units ahead")):
        unread = replace(MODEL, budget_changes=changes)
        found = rows(MemoryReport([replace(DEVICE, models=[unread])]))
        assert ("auto budget, changed", said) in found
        assert not [label for label, _ in found if "because" in label]


def test_how_pageable_memory_travels_is_told_where_there_is_some() -> None:
    def way(**changes: Any) -> list[str]:
        found = rows(MemoryReport([replace(DEVICE, **changes)]))
        return [value for label, value in found if label == "which is copied through"]

    assert way(pageable_bytes=0) == []
    assert way(ring_bytes=0) == ["the driver, 4.6 GB/s"]
    assert way(ring_bytes=0, unlocked_h2d_gbps=None) == ["the driver"]
    assert "refusals" not in str(MemoryReport([replace(DEVICE, lock_refusals=0)]))


def test_phases_have_a_table_each_where_there_are_several() -> None:
    alike = {name: getattr(MODEL, name) for name in Usage.__dataclass_fields__ if name != "name"}
    long = PhaseUsage(
        name="an evaluation\x1b[2J of more than 32 letters", seconds=1.5, bound_s=1.2, **alike
    )
    short = PhaseUsage(name="training", seconds=0.25, bound_s=None, **alike)
    found = rows(MemoryReport([replace(DEVICE, phases=[long, short])]))
    counted = [
        ("to the device", "300.00 MiB in 31 copies, 12.3 GB/s"),
        ("to the host", "30.00 MiB in 17 copies"),
        ("hits", "100 of 400 (25.0%)"),
        ("late / stale / evicted", "7 / 8 / 11"),
        *COUNTED[-2:],
        THIN,
    ]
    expected = [
        ("phase an evaluation of more than 32 le", "all models"),
        ("has taken", "1.500 s, 1.25 times what its bytes"),
        ("", "need at best"),
        *counted,
        ("phase training", "all models"),
        ("has taken", "0.250 s; at best unknown"),
        *counted,
    ]
    at = found.index(expected[0])
    assert found[at : at + len(expected)] == expected
    assert "phase" not in str(MemoryReport([replace(DEVICE, phases=[long])]))
    assert "phase" not in str(
        MemoryReport([replace(DEVICE, phases=[long, short])], abbreviated=True)
    )


def grown(**changes: Any) -> dict[str, Any]:
    """Return what an engine counted in a phase of 2 s: 10 GB at 10 GB/s, 0.4 s of stalls."""
    counters = {
        "now_s": 2.0, "h2d_bytes": 10**10, "h2d_timed_bytes": 10**9, "h2d_seconds": 0.1,
        "d2h_bytes": 5, "d2h_timed_bytes": 4, "d2h_seconds": 0.0, "waits": 160, "timed_waits": 10,
        "stalls": 2, "stall_seconds": 0.025,
    }  # fmt: skip
    others = "acquires hits late stale evictions h2d_copies d2h_copies".split()
    return {**dict.fromkeys(others, 3), **counters, **changes}


def test_a_phase_takes_at_best_its_time_without_stalls_or_that_of_its_copies() -> None:
    found = _phase_usage("x", grown(), [])
    assert (found.stalls, found.stall_s, found.h2d_gbps, found.d2h_gbps) == (32, 0.4, 10.0, None)
    assert found.overlap == pytest.approx(0.6) and (found.late, found.d2h_bytes) == (3, 5)
    assert (found.seconds, found.bound_s) == (2.0, pytest.approx(1.6))
    assert _phase_usage("x", grown(stall_seconds=0.125), []).bound_s == 1.0
    assert _phase_usage("x", grown(stall_seconds=0.125), []).overlap == 0.0
    half = _phase_usage("x", grown(h2d_bytes=5 * 10**9), [])
    assert half.overlap == pytest.approx(0.2), "0.4 s of stalls, 0.5 s of copies"
    assert _phase_usage("x", grown(now_s=1.0), []).bound_s == 1.0
    fast = _phase_usage("x", grown(now_s=0.9), [])
    assert fast.bound_s is None, "its clock did not wait"
    untimed = grown(h2d_seconds=0.0, h2d_timed_bytes=0)
    assert _phase_usage("x", untimed, []).bound_s is None
    none = _phase_usage("x", {**untimed, "h2d_bytes": 0}, [])
    assert (none.bound_s, none.overlap, none.h2d_gbps) == (pytest.approx(1.6), None, None)
    assert _phase_usage("x", grown(now_s=-1.0), []).seconds == 0.0


def test_layers_that_stalled_are_told_longest_first_and_by_name() -> None:
    waits: Any = {1: (8, 2, 0.5), 2: (8, 0, 0.0), 3: (4, 1, 0.75), 4: (9, 9, 0.5), 5: (1, 1, 9.0)}
    found = _stalled(waits, {1: "b", 2: "none", 3: "c", 4: "a"})
    assert found == [
        StalledLayer("c", 4, 1, 0.75),
        StalledLayer("a", 9, 9, 0.5),
        StalledLayer("b", 8, 2, 0.5),
    ]


def test_a_long_name_of_a_layer_keeps_its_end() -> None:
    for name, shown in (
        (34 * "a", 34 * "a"),
        (35 * "a", "..." + 31 * "a"),
        (31 * "a" + ", b", 31 * "a" + " +1"),
        (32 * "a" + ", b", "..." + 28 * "a" + " +1"),
    ):
        model = replace(MODEL, stalled=[StalledLayer(name, 1, 1, 1.0)])
        assert shown in [
            label for label, _ in rows(MemoryReport([replace(DEVICE, models=[model])]))
        ]


def test_no_name_is_longer_than_its_place_in_the_box() -> None:
    model = replace(MODEL, name="StableCascadeUNetWithImageProjection" + "X" * 40)
    device = replace(DEVICE, name="NVIDIA RTX 6000 Ada Generation " + "Y" * 60, models=[model])
    report = MemoryReport([device])
    box = [line for line in str(report).splitlines() if line.startswith("|")]
    assert {len(line) for line in box} == {82} and all(line.endswith("|") for line in box)
    (named,) = (line for line in box if "StableCascade" in line)
    assert named.startswith("| StableCascadeUNetWithImageProjectio... | 12 layers")
    assert "RTX 6000" in box[1] and box[1].endswith("YYY...|")
    assert model.name in report.to_html(), "a page has room"
    fits = replace(MODEL, name="a" * 38)
    assert f"| {fits.name} |" in str(MemoryReport([replace(DEVICE, models=[fits])]))


def test_the_short_table_leaves_the_counters_out() -> None:
    report = MemoryReport([DEVICE], abbreviated=True)
    assert rows(report) == [RULE, (TITLE, ""), RULE, *BASE, THIN, *OF_MODEL, RULE]


def test_what_is_not_known_is_not_shown() -> None:
    idle = replace(MODEL, step_h2d_bytes=None, acquires=0, hits=0, overlap=None)
    found = rows(MemoryReport([replace(DEVICE, models=[idle])]))
    assert not [label for label, _ in found if "last step" in label]
    assert ("hits", "0 of 0") in found
    assert not [label for label, _ in found if "held nothing up" in label]
    assert "NUMA" not in str(MemoryReport([replace(DEVICE, numa_node=None)]))
    empty = replace(MODEL, x_min_bytes=0, step_d2h_bytes=None)
    found = rows(MemoryReport([replace(DEVICE, models=[empty])]))
    assert ("to the device, last step", "150.00 MiB") in found
    assert ("to the host, last step", "0 B") in found


def test_on_a_card_torchs_memory_is_a_row_after_the_devices() -> None:
    card = replace(DEVICE, device="cuda:0", simulated=False, torch_allocated_bytes=7 * MIB)
    found = rows(MemoryReport([card]))
    assert found[1][0] == "oracle_offload memory summary, cuda:0 (NVIDIA GeForce RTX 4090)"
    labels = [label for label, _ in found]
    at = labels.index("allocated by torch")
    assert found[at][1] == "7.00 MiB" and labels[at - 1] == "device memory free / total"
    assert "allocated by torch" not in str(MemoryReport([card], abbreviated=True))


def test_without_a_model_it_says_so_and_html_is_escaped() -> None:
    assert str(MemoryReport([])) == "oracle_offload: no model is attached"
    odd = MemoryReport([replace(DEVICE, name="<card>")])
    assert "&lt;card&gt;" in odd._repr_html_() and "<card>" not in odd._repr_html_()
    shown = odd.to_dict()
    assert shown["schema"] == "oracle_offload/memory-summary/1"
    assert shown["devices"][0]["models"][0]["x_min_bytes"] == 100 * MIB


def test_a_rate_is_in_billions_of_bytes_per_second() -> None:
    assert (_rate(3 * 10**9, 2.0), _rate(0, 1.0), _rate(5, 0.0)) == (1.5, 0.0, None)


def test_the_optimizers_tensors_are_added_up_for_each_device() -> None:
    one, two = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    state: dict[Any, Any] = {
        "a": {"exp_avg": one, "step": 4},
        "b": {"exp_avg": two, "elsewhere": torch.zeros(6, device="meta")},
        "c": "what is no dict",
    }
    optimizer: Any = SimpleNamespace(state=state)
    assert _optimizer_bytes(optimizer) == {"cpu": 64, "meta": 24}
    assert _optimizer_bytes(None) == {}


def test_stalls_are_told_by_a_sample() -> None:
    counters = {"waits": 640, "timed_waits": 40, "stalls": 5, "stall_seconds": 0.25}
    assert stalls_of(counters) == (80.0, 4.0)
    assert stalls_of({**counters, "timed_waits": 0}) == (0.0, 0.0)
    assert stalls_text(80, 4.0, 40, 640) == "80, 4000.00 ms, by 40 of 640 waits"
    assert stalls_text(5, 0.25, 40, 40) == "5, 250.00 ms"
