"""Take each wait out of the engine, and see PyTorch's CUDA build over the simulated driver tell.

    python tools/cuda_mutants.py           # every wait; exit 3 for an unseen one not listed
    python tools/cuda_mutants.py --list
    python tools/cuda_mutants.py --only uses.c:20 --only oo__drop
    python tools/cuda_mutants.py --resume  # without those tried since a source last changed

A wait is a call that tools/mutants.py would delete and whose name says that something is waited
for. Each goes into an extension module of the package, by which tests/cuda/mutant_training.py
trains: on torch's own streams, with torch's own allocator, the engine taking the driver for a real
one. So what is seen here is seen without the engine's declarations to the simulator. The waits
which that training does not need are listed in tests/cuda/unseen_waits.txt, each by its place: its
file, its function and its words: tools/mutate.py tries those on the C programs. A list that names
one that is seen is an error as well, but for one with "? " before it: that one is seen by luck.

A training that does not end counts as seen: after ten times what the unchanged engine takes, and
two minutes at least, so that a busy machine is no mutant's doing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import c_build
import cuda_check
from c_build import ROOT, Build, BuildError
from mutants import Mutant, all_mutants, blank
from mutate import FATBIN

TRAINING = ROOT / "tests" / "cuda" / "mutant_training.py"
UNSEEN = ROOT / "tests" / "cuda" / "unseen_waits.txt"
WAIT = re.compile(
    r"delete (cuStreamWaitEvent|cuStreamSynchronize|cuEventSynchronize|oo__synchronize|"
    r"oo__\w*await\w*|oo__order_after_\w+|oo__slot_wait|oo__feed_stop)"
)
LUCK = "? "  # before a wait that the training tells of in some runs
FUNCTION = re.compile(r"^\w[\w *]*?(\w+)\(", re.MULTILINE)  # as clang-format begins it
LIMIT_S, TIMES = 120.0, 10
TRIED = ROOT / "out" / "cuda-mutants.json"  # what was seen of each, and of which sources


def waits() -> dict[str, Mutant]:
    """Return the mutants that take a wait out, by a name that other lines do not change.

    The second wait of the same words in a function has " | 2" at its end.
    """
    code = {path.name: blank(path.read_text()) for path in map(ROOT.joinpath, engine_sources())}
    found: dict[str, Mutant] = {}
    for mutant in all_mutants():
        if WAIT.fullmatch(mutant.kind):
            function = FUNCTION.findall(code[mutant.file], 0, mutant.begin)[-1]
            place = f"{mutant.file} | {function} | {mutant.key.split(' | ', 2)[2]}"
            nth = 1 + sum(known.startswith(place) for known in found)
            found[place if nth == 1 else f"{place} | {nth}"] = mutant
    return found


def engine_sources() -> list[str]:
    """Return the paths of the engine's C."""
    return c_build.sources(c_build.ENGINE)


def listed(mark: str = "") -> set[str]:
    """Return the names of the waits that the training does not need, or of those with a mark."""
    lines = UNSEEN.read_text(encoding="utf-8").splitlines()
    marked = [line for line in lines if line.startswith(mark) and not line.startswith("#")]
    return {line.removeprefix(LUCK) for line in marked if line}


class Trial:
    """The objects of the unchanged sources, and what it takes to try one changed file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = {Path(name).name: (ROOT / name).read_text() for name in engine_sources()}
        (folder / "fatbin.c").write_text(FATBIN)
        self.build = Build(c_build.optimised(), folder)
        made = self.build.engine(str(folder / "fatbin.c"))
        self.objects = dict(zip((*self.sources, "fatbin.c"), made, strict=True))
        self.bindings = self.build.objects(c_build.sources("binding"))
        self.limit_s = 3600.0

    def begin(self) -> None:
        """Train with the engine as it is, and learn how long a training may take.

        Raises
        ------
        SystemExit
            It fails.
        """
        begun = time.monotonic()
        said = self.of(None)
        if said:
            raise SystemExit(f"the training fails without any mutation: {said}")
        self.limit_s = max(LIMIT_S, TIMES * (time.monotonic() - begun))

    def of(self, mutant: Mutant | None) -> str:
        """Return what the training said of a mutant (None: of the engine as it is); "" if nothing.

        Raises
        ------
        BuildError
            It does not compile.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder, changed = Path(name), {}
            if mutant is not None:
                source = self.sources[mutant.file]
                path = folder / mutant.file
                path.write_text(source[: mutant.begin] + mutant.text + source[mutant.end :])
                made = self.build.object(str(path), target=path.with_suffix(".o"))
                changed = {mutant.file: made}
            package = folder / "oracle_offload"
            package.mkdir()
            for path in (ROOT / "oracle_offload").iterdir():
                if not path.name.startswith("_core.") or path.suffix == ".pyi":
                    (package / path.name).symlink_to(path)
            objects = [*{**self.objects, **changed}.values(), *self.bindings]
            self.build.link(package / "_core.abi3.so", objects, ["-shared"])
            return train(folder, self.limit_s)


def train(folder: Path, limit_s: float) -> str:
    """Train with the package in a folder; what reported that something is wrong."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(TRAINING)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"ended with {done.returncode}"


def digest() -> str:
    """Return what all depends on that is tried: other sources, other answers."""
    found = hashlib.sha256()
    for room in ("csrc", "oracle_offload", "tests/cuda"):
        for path in sorted((ROOT / room).rglob("*.*")):
            if path.suffix in (".c", ".h", ".cpp", ".py") and not path.match("test_*"):
                found.update(path.read_bytes())
    return found.hexdigest()


def tried(sources: str) -> dict[str, str]:
    """Return what was seen of each wait, by its place, when the sources were these."""
    if not TRIED.is_file():
        return {}
    known = json.loads(TRIED.read_text(encoding="utf-8"))
    return dict(known["seen"]) if known["sources"] == sources else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the waits; 3 where what is seen is not what the list says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the waits")
    parser.add_argument("--only", action="append", default=[], help="a part of a name")
    parser.add_argument("--resume", action="store_true", help="leave out what has been tried")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    all_waits = waits()
    chosen = {
        place: mutant
        for place, mutant in all_waits.items()
        if not args.only or any(part in mutant.name or part in place for part in args.only)
    }
    if args.list:
        print("\n".join(f"{mutant.name}: {place}" for place, mutant in chosen.items()))
        return 0
    unseen, by_luck = listed(), listed(LUCK)
    gone = sorted(unseen - set(all_waits))
    if gone:
        raise SystemExit("\n".join([f"{UNSEEN.name} lists what is no wait:", *gone]))
    cuda_check.continue_in_environment()
    seen: dict[str, bool] = {}
    sources = digest()
    known = tried(sources) if args.resume else {}
    TRIED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(Path(name))
        trial.begin()
        for place, mutant in chosen.items():
            try:
                said = known[place] if place in known else trial.of(mutant)
            except BuildError:
                print(f"{mutant.name}: does not compile", flush=True)
                continue
            known[place] = said
            TRIED.write_text(json.dumps({"sources": sources, "seen": known}), encoding="utf-8")
            seen[place] = bool(said)
            print(f"{mutant.name}: {said or 'not seen'}", flush=True)
    print(f"{sum(seen.values())} of {len(seen)} waits are missed when they are not there")
    sure = {place: found for place, found in seen.items() if place not in by_luck}
    wrong = [place for place, found in sure.items() if found == (place in unseen)]
    for place in wrong:
        print(f"{'seen, though listed' if place in unseen else 'not seen'}: {place}")
    if args.output:
        figures = {
            "schema": "oracle_offload/mutation/1",
            "tried": len(seen),
            "killed": sum(seen.values()),
        }
        args.output.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
