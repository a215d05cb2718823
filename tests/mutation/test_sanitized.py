"""`make asan-python` finds a leak, an overflow and lost references that are planted in the binding.

Each is planted in a copy of the tree, which is built with the sanitizers: about ten seconds each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sanitized_python as sanitized

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="preloads gcc's sanitizer runtime"),
]


PLANTED = {
    "leak": (
        "csrc/python/engine_type.c",
        "    PyMem_Free(ids);\n",
        "",
        "oo__engine_add_unit",
    ),
    "leak of what was to be kept": (
        "csrc/python/engine_type.c",
        "        free(kept);\n        return oo__raise_for(object, status);\n",
        "        return oo__raise_for(object, status);\n",
        "oo__engine_keep",
    ),
    "overflow": (
        "csrc/python/engine_type.c",
        "PyMem_Malloc((n_tensors + 1) * sizeof *offsets)",
        "PyMem_Malloc(n_tensors * sizeof *offsets - 1)",
        "heap-buffer-overflow",
    ),
    "reference": (
        "csrc/python/host_buffer.c",
        "    Py_XDECREF(self->engines);\n",
        "",
        "alive",
    ),
    "use after free": (
        "csrc/python/host_buffer.c",
        "    Py_XDECREF(self->engines);\n    freefunc release",
        "    oo_host_bytes(self->host) ? (void)0 : (void)self;\n    freefunc release",
        "heap-use-after-free",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    sanitized.copy_tree(folder)
    sanitized.build(folder)
    return folder


def run(tree: Path) -> tuple[int, str]:
    done = sanitized.run(["tests/unit/binding_life.py"], leaks=True, folder=tree)
    return done.returncode, done.stdout


def test_nothing_is_found_in_the_binding_as_it_is(tree: Path) -> None:
    status, said = run(tree)
    assert status == 0, said[-4000:]


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(tree: Path, name: str) -> None:
    file, old, new, clue = PLANTED[name]
    path = tree / file
    whole = path.read_text()
    assert whole.count(old) == 1, f"the place to plant at is gone from {file}"
    try:
        path.write_text(whole.replace(old, new))
        sanitized.build(tree)
        status, said = run(tree)
    finally:
        path.write_text(whole)
    assert status != 0 and clue in said, said[-4000:]
