"""Fuzz the plan, the codec, and the engine over the simulated driver; exit 3 when an input fails.

    python tools/fuzz.py --seconds 30                            # all targets
    python tools/fuzz.py --target engine --seconds 600
    python tools/fuzz.py --target engine build/fuzz/crash-1234   # that input again
    python tools/fuzz.py --compiler gcc --seed 7         # the targets' own main: inputs from a seed

With clang (and its runtime: Debian's libclang-rt-14-dev) libFuzzer follows what an input covers;
else the targets' own main draws inputs from a seed. Either way AddressSanitizer and UBSan watch,
and an input that fails is saved under build/fuzz. What libFuzzer keeps grows there too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import c_build
from c_build import ROOT, Build, BuildError

FOLDER = ROOT / "build" / "fuzz"
TARGETS = ("plan", "engine", "codec")
HANG_S = 60
EXIT_OK, EXIT_CANNOT_RUN, EXIT_FOUND = 0, 1, 3


@dataclass
class Fuzzer:
    """A built target, ready to run."""

    program: Path
    simulator: Path
    libfuzzer: bool


def has_libfuzzer() -> bool:
    """Whether clang is here and links libFuzzer with the sanitizers."""
    if not shutil.which("clang"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(
            "#include <stddef.h>\n#include <stdint.h>\n"
            "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);\n"
            "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
            "    return data && size ? 0 : 0;\n}\n"
        )
        command = ["clang", "-fsanitize=fuzzer,address,undefined", str(source)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder) / "probe")], capture_output=True, check=False
        )
        return done.returncode == 0


def build(target: str, *, libfuzzer: bool) -> Fuzzer:
    """Compile one target with what it needs, and the simulated driver next to it.

    Raises
    ------
    c_build.BuildError
        With the compiler's words.
    """
    build = Build(c_build.fuzzed(libfuzzer=libfuzzer))
    with build.locked():
        program = build.program(f"tests/fuzz/fuzz_{target}.c", build.engine())
        return Fuzzer(program, build.simulator(), libfuzzer)


def run(
    fuzzer: Fuzzer,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    output: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a built target; its output to ours, or kept with ``output=subprocess.PIPE``."""
    environment = {
        **os.environ,
        "ORACLE_OFFLOAD_DRIVER": str(fuzzer.simulator),
        **c_build.SANITIZER_ENVIRONMENT,
    }
    return subprocess.run(
        [str(fuzzer.program), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
    )


def arguments_for(fuzzer: Fuzzer, target: str, seconds: float, seed: int) -> list[str]:
    """Return what starts a search of `seconds` on a target."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not fuzzer.libfuzzer:
        limits = ["--seconds", str(seconds), "--count", "100000000", "--seed", str(seed or 1)]
        return [*limits, "--save", str(FOLDER)]
    corpus = FOLDER / f"corpus-{target}"
    corpus.mkdir(parents=True, exist_ok=True)
    return [
        str(corpus),
        f"-max_total_time={max(1, round(seconds))}",
        f"-timeout={HANG_S}",
        f"-seed={seed}",
        "-max_len=2048",
        "-len_control=0",  # a byte or two are a call: short inputs are short lives
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={FOLDER}/{target}-",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Build and run; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="per target")
    parser.add_argument("--target", choices=TARGETS, help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="0: libFuzzer draws one, plain takes 1")
    parser.add_argument(
        "--compiler", choices=["auto", "clang", "gcc"], default="auto", help="gcc: no libFuzzer"
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("inputs", nargs="*", help="run these inputs and no others")
    args = parser.parse_args(argv)
    if args.inputs and not args.target:
        parser.error("--target says which program the inputs are for")
    libfuzzer = args.compiler != "gcc" and has_libfuzzer()
    if args.compiler == "clang" and not libfuzzer:
        print("clang with libFuzzer is not installed (Debian: clang libclang-rt-14-dev)")
        return EXIT_CANNOT_RUN
    found = []
    tried = {}
    for target in [args.target] if args.target else TARGETS:
        try:
            fuzzer = build(target, libfuzzer=libfuzzer)
        except BuildError as error:
            print(error, file=sys.stderr)
            return EXIT_CANNOT_RUN
        how = "libFuzzer" if libfuzzer else "inputs from a seed"
        print(f"{target}: {how}, {args.seconds:g} s", flush=True)
        if args.inputs:
            done = run(fuzzer, args.inputs, timeout_s=HANG_S * len(args.inputs))
        else:
            search = arguments_for(fuzzer, target, args.seconds, args.seed)
            done = run(fuzzer, search, timeout_s=args.seconds + 2 * HANG_S, output=subprocess.PIPE)
            inputs = re.search(r"(\d+) inputs in|executed_units: *(\d+)", done.stdout)
            tried[target] = {
                "inputs": int(inputs[1] or inputs[2]) if inputs else 0,
                "seconds": args.seconds,
                "how": how,
                "failed": done.returncode != 0,
            }
            lines = done.stdout.splitlines()
            if done.returncode == 0:
                lines = [line for line in lines if re.search(r"stat::|inputs in", line)]
            print("\n".join(lines[-80:]), flush=True)
        if done.returncode != 0:
            found.append(target)
            print(f"{target}: ended with {done.returncode}; inputs that fail are in {FOLDER}")
    if args.output:
        report = {"schema": "oracle_offload/fuzz/1", "targets": tried}
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return EXIT_FOUND if found else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
