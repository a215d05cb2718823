"""The codec's C programs where they take long: as many weights and flips as there shall be."""

from __future__ import annotations

import c_build
import c_programs
import pytest

CASES = {
    "weights_decoded": ("test_decode_kernel", "many_weights_come_back", 100_000_000),
    "flips_noticed": ("test_codec", "flips_in_a_full_chunk_are_noticed", 10_000),
}


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("figure", CASES)
def test_a_case_runs_in_full(figure, record_property, monkeypatch):
    program, case, least = CASES[figure]
    monkeypatch.setenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE", "all")
    variant = c_build.checked()
    built = c_programs.build(variant, [program])
    done = c_programs.run(variant, built, program, [case], timeout_s=1200)
    assert done.returncode == 0, done.stdout
    found = c_programs.figures(done.stdout)
    assert found[figure] >= least  # every flip is an error: the checksum is over all bytes
    record_property(figure, found[figure])
