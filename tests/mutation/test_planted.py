"""Bugs that others shipped, planted one at a time: the C programs must find each of them.

The five one-line mistakes of a double-buffered streamer (no staging wait, no slot wait, no wait for
the copy, a record on the wrong stream, a wait before its record) and the five traps that offloaders
fell into: a slot freed before backward, a use on another stream, a gradient read in flight, an
assumed order of layers, wrong bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
import c_build  # noqa: E402
import mutants  # noqa: E402
import mutate  # noqa: E402

pytestmark = [
    pytest.mark.proof,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="links shared libraries the POSIX way"),
]


@dataclass(frozen=True)
class Bug:
    """What is in the source, and what a bug makes of it."""

    name: str
    file: str
    before: str
    after: str


BUGS = [
    Bug(
        "no staging wait",
        "feed.c",
        "    if (!oo__slot_wait(engine, slot, failure, waits) ||\n        !oo__works(",
        "    if (!oo__works(",
    ),
    Bug(
        "no slot wait",
        "uses.c",
        "OO_DRIVE(engine, cuStreamWaitEvent, writer, use->event->handle, 0)",
        "(writer ? OO_OK : OO_OK)",
    ),
    Bug(
        "no wait for the copy",
        "engine.c",
        "    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, stream, unit->ready->handle, 0));\n",
        "",
    ),
    Bug(
        "record on the wrong stream",
        "staging.c",
        "engine->driver.cuEventRecord(ready->handle, engine->h2d)",
        "engine->driver.cuEventRecord(ready->handle, engine->d2h)",
    ),
    Bug(
        "wait before its record",
        "gradient.c",
        "    OO_TRY(OO_DRIVE(engine, cuEventRecord, computed->handle, stream));\n"
        "    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, computed->handle, 0));\n",
        "    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, computed->handle, 0));\n"
        "    OO_TRY(OO_DRIVE(engine, cuEventRecord, computed->handle, stream));\n",
    ),
    Bug(
        "trap 1: the slot of a unit in use is given away",
        "fetch.c",
        "plan->units[unit].pins ? 0 : oo_plan_next_use(plan, unit)",
        "oo_plan_next_use(plan, unit)",
    ),
    Bug(
        "trap 1: the slot is freed before the backward kernel has run",
        "engine.c",
        "enum oo_status status = oo__mark_use(engine, unit, stream);",
        "enum oo_status status = OO_OK;",
    ),
    Bug(
        "trap 2: memory goes back while another stream still uses it",
        "lease.c",
        "else if ((uintptr_t)unit->uses[i].stream != segment->stream)",
        "else if (0)",
    ),
    Bug(
        "trap 3: the host reads a gradient in flight",
        "gradient.c",
        "    OO_TRY(OO_DRIVE(engine, cuEventSynchronize, arrived->handle));\n",
        "",
    ),
    Bug(
        "trap 4: layers are assumed to run in the order they were created",
        "forecast.c",
        "        best[n_best++] = candidate;\n",
        "        (void)candidate;\n",
    ),
    Bug(
        "trap 5: tensors with a gap between them travel as one",
        "model.c",
        "tensor->host - last->host == (ptrdiff_t)(tensor->offset - last->offset)",
        "1",
    ),
    Bug(
        "trap 5: a rewritten master is served from the old copy",
        "engine.c",
        "return member->fingerprint != before;",
        "return 0;",
    ),
    # Each of these lived once.
    Bug(
        "a step does not wait for copies of what is in use",
        "engine.c",
        "            unit->leaving = 1; /*",
        "            { unit->leaving = 1; continue; } /*",
    ),
    Bug(
        "decodes of a copy that failed are not waited for",
        "engine.c",
        "        engine->decoder.loose |= unit->decodes;\n",
        "",
    ),
    Bug(
        "a kept use is waited for",
        "engine.c",
        "if (until_s == 0 || engine->units[id].n_kept)",
        "if (until_s == 0)",
    ),
    Bug(
        "settling does not wait for copy threads",
        "engine.c",
        "    oo__feeds_await(engine);\n    /* H7: the caller may rewrite any master",
        "    /* H7: the caller may rewrite any master",
    ),
    Bug(
        "device memory that was refused stays adopted",
        "lease.c",
        "    if (status != OO_OK && adopted)\n        (void)oo__disown(engine, address);\n",
        "    (void)adopted;\n",
    ),
    Bug(
        "what is left of a unit is never fetched ahead",
        "model.c",
        "        oo__unit_take_parts(engine, unit, &made);\n"
        "        oo_plan_allow(engine->plan, id, oo__may_fetch_ahead(engine, unit));\n",
        "        oo__unit_take_parts(engine, unit, &made);\n",
    ),
]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield mutate.Gate(tmp_path_factory.mktemp("gate"), races=True, slow=False)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(gate: Any, bug: Bug) -> None:
    source = (c_build.ROOT / c_build.source(bug.file)).read_text()
    assert source.count(bug.before) == 1, "the source has changed: plant the bug where it belongs"
    begin = source.index(bug.before)
    mutant = mutants.Mutant(
        bug.file, 0, bug.name, begin, begin + len(bug.before), bug.after, bug.before
    )
    outcome = gate.try_mutant(mutant)
    assert outcome.startswith("killed"), f"{bug.name}: {outcome}"


@pytest.mark.parametrize(
    ("killer", "first"),
    [
        ("test_plan::test_the_trace_wraps", ["test_plan", "test_the_trace_wraps"]),
        ("test_plan::test_that_is_gone", []),
        ("test_that_is_gone", []),
        (mutate.MEMORY, []),  # not of the codec
        ("", []),
    ],
)
def test_what_is_remembered_is_tried_first_and_decides_nothing(
    gate: Any, monkeypatch: pytest.MonkeyPatch, killer: str, first: list[str]
) -> None:
    """A case that lets the mutant live, or is gone, leaves it to all the others."""
    (mutant,) = [
        m
        for m in mutants.mutants_of(ROOT / c_build.source("lease.c"))
        if m.kind.startswith("delete") and "oo__feed_stop" in m.kind
    ][:1]
    met: list[list[str]] = []
    whole = gate.test

    def test(name: str, command: list[str], *rest: Any, **environment: str) -> str:
        if environment.get("LD_LIBRARY_PATH") != str(gate.folder):  # the engine with the mutant
            met.append([Path(word).name for word in command])
        return str(whole(name, command, *rest, **environment))

    monkeypatch.setattr(gate, "killers", {mutant.key: killer})
    monkeypatch.setattr(gate, "test", test)
    outcome = gate.try_mutant(mutant)
    assert mutate.killer_of(outcome).startswith("test_")
    assert met[: len(met) - len(first)] and met[0] == (first or [gate.programs[0]])
    assert gate.programs[0] in met[bool(first)]


def test_a_case_that_fails_by_itself_kills_nothing(
    gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "alone", {})
    monkeypatch.setattr(gate, "test", lambda *_, **__: "killed: test_plan: exit 1")
    assert not gate.passes_alone("test_plan", "test_the_trace_wraps")
    assert gate.killer_test("test_plan::test_the_trace_wraps", ROOT, {}, ROOT) == "survived"


@pytest.mark.parametrize(
    ("outcome", "killer"),
    [
        (
            "killed: test_plan::test_the_trace_wraps: CHECK(a) failed: b",
            "test_plan::test_the_trace_wraps",
        ),
        ("killed: test_engine::a_case: hangs", "test_engine::a_case"),
        (f"killed: {mutate.THREADS}: exit 66", mutate.THREADS),
        ("survived", ""),
        ("none: same object code as engine.c:7 delete", ""),
    ],
)
def test_an_outcome_names_its_killer(outcome: str, killer: str) -> None:
    assert mutate.killer_of(outcome) == killer


SOURCE = """
static int f(struct engine *engine) {
    engine->stats.calls++;
    OO_TRY(OO_DRIVE(engine, cuEventRecord, first->handle, engine->h2d));
    if (engine->sweep == 1)
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, stream, second->handle, 0));
    else
        return 1;
done:
    engine->driver.cuEventQuery(first->handle);
    return 0;
}
"""


def test_mutants_are_found_by_the_rules(tmp_path: Path) -> None:
    """A swap moves whole statements; labels and jumps stay; every kind is there."""
    path = tmp_path / "engine.c"
    path.write_text(SOURCE)
    found = {mutant.kind: mutant for mutant in mutants.mutants_of(path)}
    assert {"delete cuEventRecord", "delete cuStreamWaitEvent", "delete cuEventQuery"} <= set(found)
    assert {"cuEventRecord on engine->d2h", "cuStreamWaitEvent on engine->h2d"} <= set(found)
    assert "cuStreamWaitEvent with first->handle" in found
    assert "== becomes !=" in found
    # The counter is above a call that can leave the function: the swap can be seen.
    assert "swap cuEventRecord with the statement above" in found
    below = found["swap cuEventRecord with the statement below"]
    assert below.text.lstrip().startswith("if (engine->sweep == 1)")
    assert below.text.count("return 1;") == 1
    # Nothing is swapped with what carries the label, nor with a jump.
    assert not [kind for kind in found if kind.startswith("swap cuEventQuery")]
    assert "swap cuStreamWaitEvent with the statement below" not in found


CALCULATION = """
static unsigned sum(const unsigned *words, unsigned count) {
    unsigned held[4] = {0}, all = 0; /* one - two */
    for (unsigned i = 0; i <= count; i++)
        all += words[i] >> 3 & 0x0Fu;
    if (all == 7 && count)
        return 1;
    return -all * held[0];
}
"""


def test_what_only_calculates_is_changed_in_each_operator_and_number(tmp_path: Path) -> None:
    path = tmp_path / "codec.c"
    path.write_text(CALCULATION)
    found = {mutant.kind: mutant for mutant in mutants.mutants_of(path)}
    assert set(found) == {
        "0 becomes (0 + 1), number 1", "<= becomes <, operator 1", "+= becomes -=, operator 1",
        ">> becomes <<, operator 2", "& becomes |, operator 3", "3 becomes (3 + 1), number 1",
        "0x0Fu becomes (0x0Fu + 1), number 2", "== becomes !=, operator 1",
        "7 becomes (7 + 1), number 1", "* becomes /, operator 1",
        "drop 'all == 7' of &&", "drop 'count' of &&",
    }  # fmt: skip
    assert found["+= becomes -=, operator 1"].text == "all -= words[i] >> 3 & 0x0Fu;"
    # A sample: by the text of each, whatever is next to it.
    first = {mutant.key for mutant in mutants.mutants_of(ROOT / "csrc/core/codec.c")}
    (tmp_path / "codec.c").write_text("\n\n" + (ROOT / "csrc/core/codec.c").read_text())
    assert {mutant.key for mutant in mutants.mutants_of(tmp_path / "codec.c")} == first
    assert sum("operator" in key or "number" in key for key in first) <= mutants.SAMPLE
    assert not [m for m in mutants.mutants_of(ROOT / "csrc/core/arena.c") if "operator" in m.kind]
