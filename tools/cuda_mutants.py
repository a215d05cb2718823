"""Take each wait out of the engine, and see PyTorch's CUDA build over the simulated driver tell.

    python tools/cuda_mutants.py           # every wait; exit 3 for an unseen one not listed
    python tools/cuda_mutants.py --list
    python tools/cuda_mutants.py --only uses.c:20
    python tools/cuda_mutants.py --resume  # without those tried since a source last changed

A wait is a call that tools/mutants.py would delete and whose name says that something is waited
for. Each goes into an extension module of the package, by which tests/cuda/mutant_training.py
trains: on torch's own streams, with torch's own allocator, the engine taking the driver for a real
one. So what is seen here is seen without the engine's declarations to the simulator. The waits
which that training does not need are listed in tests/cuda/unseen_waits.txt: tools/mutate.py tries
those on the C programs. A list that names one that is seen is an error as well.

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
from mutants import Mutant, all_mutants
from mutate import FATBIN

TRAINING = ROOT / "tests" / "cuda" / "mutant_training.py"
UNSEEN = ROOT / "tests" / "cuda" / "unseen_waits.txt"
WAIT = re.compile(
    r"delete (cuStreamWaitEvent|cuStreamSynchronize|cuEventSynchronize|oo__synchronize|"
    r"oo__\w*await\w*|oo__order_after_\w+|oo__slot_wait|oo__feed_stop)"
)
LIMIT_S, TIMES = 120.0, 10
TRIED = ROOT / "out" / "cuda-mutants.json"  # what was seen of each, and of which sources


def waits() -> list[Mutant]:
    """Return the mutants that take a wait out."""
    return [mutant for mutant in all_mutants() if WAIT.fullmatch(mutant.kind)]


def listed() -> set[str]:
    """Return the keys of the waits that the training does not need."""
    lines = UNSEEN.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


class Trial:
    """The objects of the unchanged sources, and what it takes to try one changed file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = c_build.sources(c_build.ENGINE)
        self.sources = {Path(name).name: (ROOT / name).read_text() for name in names}
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
    parser.add_argument("--only", action="append", default=[], help="file.c:line, or a part of it")
    parser.add_argument("--resume", action="store_true", help="leave out what has been tried")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    chosen = [m for m in waits() if not args.only or any(o in m.name for o in args.only)]
    if args.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    gone = sorted(listed() - {mutant.key for mutant in waits()})
    if gone:
        raise SystemExit("\n".join([f"{UNSEEN.name} lists what is no wait:", *gone]))
    cuda_check.continue_in_environment()
    by_key: dict[str, list[bool]] = {}  # whether each wait of the same words was seen
    sources = digest()
    known = tried(sources) if args.resume else {}
    TRIED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(Path(name))
        trial.begin()
        for mutant in chosen:
            place = f"{mutant.file}:{mutant.begin}"
            try:
                said = known[place] if place in known else trial.of(mutant)
            except BuildError:
                print(f"{mutant.name}: does not compile", flush=True)
                continue
            known[place] = said
            TRIED.write_text(json.dumps({"sources": sources, "seen": known}), encoding="utf-8")
            by_key.setdefault(mutant.key, []).append(bool(said))
            print(f"{mutant.name}: {said or 'not seen'}", flush=True)
    compiled, seen = sum(map(len, by_key.values())), sum(map(sum, by_key.values()))
    print(f"{seen} of {compiled} waits are missed when they are not there")
    wrong = [key for key, found in by_key.items() if all(found) == (key in listed())]
    for key in wrong:
        print(f"{'seen, though listed' if key in listed() else 'not seen'}: {key}")
    if args.output:
        figures = {"schema": "oracle_offload/mutation/1", "tried": compiled, "killed": seen}
        args.output.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
