"""The fuzz targets build without libFuzzer and find nothing in seconds; what fails is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs AddressSanitizer and POSIX")


def fuzzed(target: str, *arguments: str) -> Any:
    fuzzer = fuzz.build(target, libfuzzer=False)
    return fuzz.run(fuzzer, arguments, timeout_s=120, output=subprocess.PIPE)


@pytest.mark.slow  # .ci/run has more seconds of it: `make fuzz`
@pytest.mark.proof
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_inputs_from_a_seed_find_nothing(target: str, tmp_path: Path) -> None:
    done = fuzzed(target, "--seconds", "3", "--seed", "1", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "inputs in" in done.stdout
    assert int(done.stdout.split()[0]) > 10
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_fails_is_saved_and_fails_again(tmp_path: Path) -> None:
    planted = tmp_path / "fuzz_planted.c"
    planted.write_text(
        '#include "fuzz.h"\n'
        "int LLVMFuzzerInitialize(int *argc, char ***argv) { (void)argc; (void)argv; return 0; }\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
        '    REQUIRE(size < 8 || data[5] % 16 != 3, "planted");\n'
        "    return 0;\n}\n"
    )
    build = fuzz.Build(fuzz.c_build.fuzzed(libfuzzer=False), tmp_path / "build")
    made = build.object(str(planted), "fuzz")
    program = build.link(tmp_path / "fuzz_planted", [made])
    found = fuzz.Fuzzer(program, program, libfuzzer=False)
    done = fuzz.run(found, ["--save", str(tmp_path)], timeout_s=60, output=subprocess.PIPE)
    assert done.returncode != 0
    assert "--seed 1" in done.stdout and "planted" in done.stdout
    (saved,) = tmp_path.glob("crash-1-*")
    again = fuzz.run(found, [str(saved)], timeout_s=60, output=subprocess.PIPE)
    assert again.returncode != 0 and "planted" in again.stdout
