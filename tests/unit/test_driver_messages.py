"""Each way of having no usable driver has its own message: what is wrong, and what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import c_build
import pytest

from oracle_offload import DriverError, OffloadError, _core

# A driver library small enough to be broken in one place at a time. It answers every symbol with a
# call that succeeds, unless a macro says otherwise.
SOURCE = r"""
#include <stdint.h>
#include <string.h>
static int succeed(void) { return 0; }
static int init(unsigned flags) { (void)flags; return INIT; }
static int version(int *out) { *out = VERSION; return 0; }
static int count(int *out) { *out = 2; return 0; }
static int text(int code, const char **out) { (void)code; *out = "SOME_NAME"; return 0; }
int GET(const char *name, void **function, int introduced, uint64_t flags, int *result) {
    (void)introduced; (void)flags; (void)result;
    *function = strcmp(name, "cuInit") == 0 ? (void *)init
              : strcmp(name, "cuDriverGetVersion") == 0 ? (void *)version
              : strcmp(name, "cuDeviceGetCount") == 0 ? (void *)count
              : strncmp(name, "cuGetError", 10) == 0 ? (void *)text
              : strcmp(name, ABSENT) == 0 ? 0 : (void *)succeed;
    return PROC;
}
"""
DEFAULTS = {
    "INIT": "0",
    "VERSION": "12040",
    "GET": "cuGetProcAddress_v2",
    "ABSENT": '"-"',
    "PROC": "0",
}


@pytest.fixture
def broken_driver(tmp_path: Path):  # type: ignore[no-untyped-def]
    def build(**changes: str) -> str:
        source = tmp_path / "driver.c"
        source.write_text(SOURCE)
        library = tmp_path / "driver.so"
        macros = [f"-D{name}={value}" for name, value in {**DEFAULTS, **changes}.items()]
        command = [*c_build.c_compiler(), "-shared", "-fPIC", "-w", *macros, str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        return str(library)

    return build


def test_a_whole_driver_is_probed(broken_driver) -> None:  # type: ignore[no-untyped-def]
    assert _core.driver_probe(broken_driver()) == (12040, 2)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"GET": "cuGetProcAddress"}, OffloadError, ["older than CUDA 12.0", "update"]),
        ({"ABSENT": '"cuEventQuery"'}, OffloadError, ["lacks cuEventQuery", "update"]),
        ({"VERSION": "11080"}, OffloadError, ["supports CUDA 11.8", "12.0 or later"]),
        ({"INIT": "34"}, DriverError, ["stub, not a driver", "LD_LIBRARY_PATH"]),
        ({"PROC": "34"}, DriverError, ["stub, not a driver", "LD_LIBRARY_PATH"]),
        ({"INIT": "100"}, OffloadError, ["sees no CUDA device", "CUDA_VISIBLE_DEVICES"]),
        ({"INIT": "999"}, DriverError, ["cuInit", "SOME_NAME", "999"]),
    ],
)
def test_each_defect_has_its_own_message(  # type: ignore[no-untyped-def]
    broken_driver, changes: dict[str, str], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        _core.driver_probe(broken_driver(**changes))
    for word in words:
        assert word in str(caught.value)


def test_a_failed_call_keeps_its_name_and_code(broken_driver) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DriverError) as caught:
        _core.driver_probe(broken_driver(INIT="999"))
    assert (caught.value.call, caught.value.code, caught.value.name) == ("cuInit", 999, "SOME_NAME")


def test_a_missing_library_says_where_it_looked_and_what_else_works() -> None:
    with pytest.raises(OffloadError, match=r"/nowhere/libcuda\.so cannot be loaded") as caught:
        _core.driver_probe("/nowhere/libcuda.so")
    assert 'device "cpu"' in str(caught.value)
