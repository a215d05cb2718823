"""The mutation gate: break the engine in one place at a time and see that the proof suite notices.

    python tools/mutate.py                # all mutants; exit 3 when too many survive
    python tools/mutate.py --list         # what would be tried
    python tools/mutate.py --only engine.c:210
    python tools/mutate.py --self-test    # without the race detector, survivors must appear

Mutants are found mechanically in csrc/core: every call of the driver's table is deleted, sent to
each other stream of the engine, given the previous event of its function, and swapped with the
statement above and below; every comparison that involves a generation, version, reference count or
capacity is negated. Each mutant compiles one file, links it with the C tests and runs them on the
simulated driver; one that hangs is killed and counts as noticed. Survivors that cannot change
behaviour are listed with the proof in tests/mutation/equivalent.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import c_flags
import kernels
from c_flags import ROOT

CORE = ROOT / "csrc/core"
FILES = ("engine.c", "model.c", "ring.c", "stats.c", "plan.c", "arena.c")
PROGRAMS = ("test_engine", "test_plan")
EQUIVALENT = ROOT / "tests/mutation/equivalent.toml"
TIMEOUT_S = 10.0
SURVIVORS_ALLOWED = 0.03
STREAMS = ("engine->h2d", "engine->d2h", "engine->compute")
GUARDED = re.compile(
    r"generation|stamp|sweep|references|pins|capacity|fingerprint|n_uses|n_waited|stale|placed|"
    r"counted|lost|held|n_hosts|OO_MAX_FETCHED|OO_SPANS|OO_STREAMS|OO_RING_PIECES"
)


@dataclass(frozen=True)
class Mutant:
    """One change: bytes [begin, end) of `file` become `text`."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    text: str
    original: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind}"


def blank_comments(source: str) -> str:
    """Return `source` with comments and string contents turned to spaces; positions stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', blank, source, flags=re.DOTALL)


def statements(code: str) -> list[tuple[int, int, int]]:
    """Return the simple statements of all functions as (begin, end, id of the enclosing block)."""
    found: list[tuple[int, int, int]] = []
    blocks: list[int] = []
    parens = 0
    begin: int | None = None
    serial = 0
    for at, char in enumerate(code):
        if char == "(":
            parens += 1
        elif char == ")":
            parens -= 1
        if parens == 0 and char == "{":
            serial += 1
            blocks.append(serial)
            begin = None
            continue
        if parens == 0 and char == "}":
            if blocks:
                blocks.pop()
            begin = None
            continue
        if begin is None:
            if not char.isspace() and char not in ";,":
                begin = at
        if char == ";" and parens == 0:
            if begin is not None and blocks:
                found.append((begin, at + 1, blocks[-1]))
            begin = None
    return found


def matching(code: str, at: int) -> int:
    """Return the index after the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(code)):
        depth += {"(": 1, ")": -1}.get(code[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError(f"no closing parenthesis after {at}")


CALL = re.compile(r"OO_DRIVE\(engine, (\w+)|engine->driver\.(\w+)\(")
EVENT = re.compile(r"[\w>\-.\[\]]+->handle")
COMPARISON = re.compile(r"(?<![<>=!\-])(==|!=|<=|>=|<|>)(?![<>=])")
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    source = path.read_text()
    code = blank_comments(source)
    parts = statements(code)

    def make(kind: str, begin: int, end: int, text: str) -> Mutant:
        line = source.count("\n", 0, begin) + 1
        return Mutant(path.name, line, kind, begin, end, text, source[begin:end])

    for match in CALL.finditer(code):
        name = match.group(1) or match.group(2)
        opening = code.index("(", match.start())
        end = matching(code, opening)
        call = source[match.start() : end]
        if not name.startswith(("cu", "sim")):
            continue
        yield make(f"delete {name}", match.start(), end, "OO_OK")
        for stream in STREAMS:
            if stream not in call:
                continue
            for other in STREAMS:
                if other != stream:
                    changed = call.replace(stream, other)
                    yield make(f"{name} on {other}", match.start(), end, changed)
        if re.search(r"\bstream\b", call) and "capturing" not in call:
            for other in STREAMS[:2]:
                changed = re.sub(r"(?<!>)\bstream\b", other, call)
                yield make(f"{name} on {other}", match.start(), end, changed)
        used = EVENT.search(call)
        if used:
            function = code.rfind("\n}\n", 0, match.start()) + 1
            before = [e for e in EVENT.findall(code[function : match.start()]) if e != used.group(0)]
            if before:
                changed = call.replace(used.group(0), before[-1])
                yield make(f"{name} with {before[-1]}", match.start(), end, changed)
        holder = next((i for i, s in enumerate(parts) if s[0] <= match.start() < s[1]), None)
        if holder is None:
            continue
        for step, word in ((-1, "above"), (1, "below")):
            other_index = holder + step
            if not 0 <= other_index < len(parts) or parts[other_index][2] != parts[holder][2]:
                continue
            first, second = sorted((parts[holder], parts[other_index]))
            between = source[first[1] : second[0]]
            if between.strip() and not code[first[1] : second[0]].isspace():
                continue
            text = source[second[0] : second[1]] + between + source[first[0] : first[1]]
            yield make(f"swap {name} with the statement {word}", first[0], second[1], text)

    for match in COMPARISON.finditer(code):
        line_begin = code.rfind("\n", 0, match.start()) + 1
        line = code[line_begin : code.index("\n", match.start())]
        if GUARDED.search(line) and not line.lstrip().startswith(("#", "for (")):
            yield make(
                f"{match.group(0)} becomes {OPPOSITE[match.group(0)]}",
                match.start(),
                match.end(),
                OPPOSITE[match.group(0)],
            )


def all_mutants() -> list[Mutant]:
    """Return every mutant, without those whose text is unchanged or seen already."""
    seen: set[tuple[str, int, int, str]] = set()
    result = []
    for file in FILES:
        for mutant in mutants_of(CORE / file):
            key = (mutant.file, mutant.begin, mutant.end, mutant.text)
            if mutant.text != mutant.original and key not in seen:
                seen.add(key)
                result.append(mutant)
    return result


class Gate:
    """Objects of the unchanged sources, and what it takes to try a mutant against them."""

    def __init__(self, folder: Path, *, races: bool) -> None:
        self.folder = folder
        self.compiler = [
            *c_flags.c_compiler(), "-std=c11", "-O1", "-g", "-w", "-fPIC", "-pthread",
            *(f"-I{ROOT / include}" for include in c_flags.INCLUDES),
        ]  # fmt: skip
        self.environment = {**os.environ, "ORACLE_OFFLOAD_DRIVER": str(folder / "libsimcuda.so")}
        if not races:
            self.environment["ORACLE_OFFLOAD_TEST_RACES_OFF"] = "1"
        self.objects: dict[str, Path] = {}
        for name in c_flags.sources(*c_flags.CORE_FOLDERS):
            self.objects[Path(name).name] = self.compile(ROOT / name, folder / f"{Path(name).stem}.o")
        embedded = kernels.build("off", folder).source
        self.objects[embedded.name] = self.compile(embedded, folder / f"{embedded.stem}.o")
        for program in PROGRAMS:
            self.compile(ROOT / f"tests/c/{program}.c", folder / f"{program}.o")
        simulator = [str(ROOT / s) for s in c_flags.sources(*c_flags.SIMULATOR_FOLDERS)]
        self.run(
            [*self.compiler, "-O2", "-fvisibility=hidden", "-shared", *simulator,
             "-o", str(folder / "libsimcuda.so"), "-lm"],
        )  # fmt: skip
        for program in PROGRAMS:
            outcome = self.test(program, self.link(program, folder / program, {}))
            if outcome != "survived":
                raise SystemExit(f"{program} fails without any mutation: {outcome}")

    @staticmethod
    def run(command: list[str]) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def compile(self, source: Path, target: Path, extra: tuple[str, ...] = ()) -> Path:
        self.run([*self.compiler, *extra, "-c", str(source), "-o", str(target)])
        return target

    def link(self, program: str, target: Path, changed: dict[str, Path]) -> Path:
        objects = [str(path) for path in {**self.objects, **changed}.values()]
        main = str(self.folder / f"{program}.o")
        self.run([*self.compiler, main, *objects, "-o", str(target), "-ldl", "-lm"])
        return target

    def test(self, name: str, program: Path) -> str:
        try:
            done = subprocess.run(
                [program],
                env=self.environment,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
                cwd=self.folder,
            )
        except subprocess.TimeoutExpired:
            return f"killed: {name} hangs"
        if done.returncode == 0:
            return "survived"
        first = done.stderr.decode(errors="replace").strip().splitlines()
        return f"killed: {name}: {first[0][:200] if first else done.returncode}"

    def try_mutant(self, mutant: Mutant) -> str:
        """Return "survived", or "killed: " and by what."""
        source = (CORE / mutant.file).read_text()
        text = source[: mutant.begin] + mutant.text + source[mutant.end :]
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / mutant.file
            path.write_text(text)
            try:
                changed = self.compile(path, path.with_suffix(".o"), (f"-I{CORE}",))
            except subprocess.CalledProcessError:
                return "stillborn"  # no program comes of it: not a mutant
            for program in PROGRAMS:
                target = self.link(program, Path(folder) / program, {mutant.file: changed})
                outcome = self.test(program, target)
                if outcome != "survived":
                    return outcome
        return "survived"


def equivalents() -> dict[str, str]:
    """Return the mutants proved to change nothing: key of the mutant -> proof."""
    if not EQUIVALENT.exists():
        return {}
    rows = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {key_of_row(row): row["proof"] for row in rows}


def key_of_row(row: dict[str, str]) -> str:
    return f"{row['file']} | {row['kind']} | {row['code']}"


def key_of(mutant: Mutant) -> str:
    """Identify a mutant by what it changes, not by a line number that moves."""
    return f"{mutant.file} | {mutant.kind} | {' '.join(mutant.original.split())}"


def main() -> int:
    """Run the gate; exit code 0, or 3 when it fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", default="", help="mutants whose name begins so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the outcome as JSON")
    parser.add_argument(
        "--self-test", action="store_true", help="switch race detection off: survivors must appear"
    )
    args = parser.parse_args()
    mutants = [m for m in all_mutants() if m.name.startswith(args.only)]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {' '.join(mutant.original.split())[:110]}")
        print(f"{len(mutants)} mutants")
        return 0
    start = time.monotonic()
    proofs = equivalents()
    survivors: list[Mutant] = []
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Path(folder), races=not args.self_test)
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, outcome in zip(mutants, pool.map(gate.try_mutant, mutants), strict=True):
                if outcome == "stillborn":
                    continue
                tried += 1
                if outcome == "survived":
                    survivors.append(mutant)
                    note = "proved equivalent" if key_of(mutant) in proofs else "SURVIVED"
                    print(f"{note}: {mutant.name}\n    {key_of(mutant)}", flush=True)
    unproved = [m for m in survivors if key_of(m) not in proofs]
    share = len(survivors) / max(1, tried)
    seconds = time.monotonic() - start
    print(
        f"{tried - len(survivors)} of {tried} mutants killed in {seconds:.0f} s; "
        f"{len(survivors)} survive ({share:.1%}), {len(unproved)} of them without a proof"
    )
    if args.output:
        report = {
            "schema": "oracle_offload/mutation-1",
            "tried": tried,
            "killed": tried - len(survivors),
            "survivors": [{"name": m.name, "proof": proofs.get(key_of(m), "")} for m in survivors],
            "duration_s": seconds,
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    if args.self_test:
        if not unproved:
            print("the gate proves nothing: no mutant survives without the race detector")
        return 0 if unproved else 3
    return 3 if unproved or share > SURVIVORS_ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
