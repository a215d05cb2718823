"""One description of how C is compiled: what it finds, and that it compiles what changed alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import c_build
import pytest

ROOT = Path(__file__).resolve().parents[2]


COMPONENTS = (c_build.ENGINE, *c_build.FOLDERS.values())


def test_every_c_source_belongs_to_one_component() -> None:
    found = [path for component in COMPONENTS for path in c_build.sources(component)]
    assert len(found) == len(set(found))
    folders = ("csrc", "tests/c", "tests/fuzz", "benchmarks")
    there = [path for folder in folders for path in (ROOT / folder).rglob("*.c")]
    assert sorted(found) == sorted(path.relative_to(ROOT).as_posix() for path in there)


def test_the_package_holds_the_engine_and_the_binding_and_no_test() -> None:
    folders = {path.split("/")[1] for path in c_build.sources(c_build.ENGINE, "binding")}
    assert {"core", "driver", "python"} <= folders and "sim" not in folders


def test_the_engine_sees_no_header_of_simulator_binding_or_tests() -> None:
    for component in (c_build.ENGINE, "binding", "simulator"):
        folders = c_build.include_folders(component)
        assert "csrc/include" in folders
        assert not {"csrc/sim", "csrc/python", "tests/c"} & set(folders)


def test_compile_commands_name_every_source_with_a_command_that_compiles_it() -> None:
    entries = c_build.compile_commands()
    assert {entry["file"] for entry in entries} == set(c_build.sources(*COMPONENTS))
    entry = next(e for e in entries if e["file"].startswith("csrc/python/"))
    arguments = [*entry["arguments"], "-o", os.devnull]
    c_build.run_compiler(arguments)
    json.dumps(entries)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, list[str]]:
    """Two sources in a folder with a space in its name, one of which includes a header."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "shared.h").write_text("#define ANSWER 41\n")
    (folder / "uses.c").write_text('#include "shared.h"\nint main(void) { return ANSWER - 41; }\n')
    (folder / "alone.c").write_text("int alone;\n")
    return folder, [str(folder / name) for name in ("uses.c", "alone.c")]


def compiled(
    monkeypatch: pytest.MonkeyPatch, folder: Path, sources: list[str], variant: object
) -> list[str]:
    """Build; return the files that were made."""
    made = []
    real = c_build.run_compiler

    def watched(command: list[str]) -> None:
        made.append(Path(command[-1]).name)
        real(command)

    with monkeypatch.context() as patch:
        patch.setattr(c_build, "run_compiler", watched)
        build = c_build.Build(variant, folder / "made")
        objects = [build.object(source) for source in sources]
        build.link(folder / "program", objects)
    return made


def test_only_what_changed_is_compiled_again(
    small: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sources = small

    def again(variant: object) -> list[str]:
        return compiled(monkeypatch, folder, sources, variant)

    plain = c_build.optimised()
    assert again(plain) == ["uses.o", "alone.o", "program"]
    assert again(plain) == []
    for path in folder.glob("*.[ch]"):
        os.utime(path)
    assert again(plain) == [], "the content is what counts"
    (folder / "shared.h").write_text("#define ANSWER 40 + 1 /* longer */\n")
    assert again(plain) == ["uses.o"], "the object is the same: nothing to link"
    (folder / "shared.h").write_text("#define ANSWER 43\n")
    assert again(plain) == ["uses.o", "program"]
    assert again(c_build.package()) == ["uses.o", "alone.o", "program"]
    (folder / "made" / "alone.o").unlink()
    assert again(c_build.package()) == ["alone.o"]


def test_what_does_not_compile_is_tried_again(
    small: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sources = small
    (folder / "shared.h").write_text("#error not today\n")
    for _ in range(2):
        with pytest.raises(c_build.BuildError, match="not today"):
            compiled(monkeypatch, folder, sources, c_build.optimised())
