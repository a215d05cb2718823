"""Building the operators in C++: where they go, what the command says, and what on failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import oracle_offload
from oracle_offload import build_info, cli

torch = pytest.importorskip("torch")

from oracle_offload import attachment  # noqa: E402
from oracle_offload.ops import compiling, files, load  # noqa: E402

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="they are built on Linux alone")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of a user who has built nothing."""
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "auto")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "ops"


WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'
Compiler = Callable[[str], None]


@pytest.fixture
def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """A shell script in the place of the compiler, which builds something, and may be another."""

    def put(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    put(WRITES)
    return put


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command says as it fails."""
    assert cli.main(["build-ops"]) == cli.EXIT_ERROR
    return capsys.readouterr().err


@linux_only
def test_what_was_built_lies_in_the_cache_under_what_decides_its_use(
    folder: Path, compiler: Compiler
) -> None:
    path, seconds = compiling.build()
    assert 0 < seconds < 60 and path.parent == folder and path.read_text() == "built\n"
    assert [p.name for p in folder.iterdir()] == [path.name]  # nothing half-made beside it
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    for part in (torch.__version__, f"abi{abi}", f"cpython-{sys.version_info[0]}"):
        assert part in path.name
    assert path == load.path_here()
    assert build_info()["ops"] == {"built": True, "file": str(path)}


@linux_only
def test_it_is_built_once_unless_forced_and_replaces_builds_of_other_sources(
    folder: Path, compiler: Compiler
) -> None:
    folder.mkdir()
    here = load.path_here().name
    older = folder / f"{here.rpartition('-')[0]}-0123456789abcdef.so"
    other = folder / here.replace(torch.__version__, "1.0")
    for path in (older, other):
        path.write_text("of before")
    path, _ = compiling.build()
    assert other.exists() and not older.exists()
    path.write_text("kept")
    assert compiling.build() == (path, 0.0) and path.read_text() == "kept"
    compiling.build(force=True)
    assert path.read_text() == "built\n"


@linux_only
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    folder: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(f"{WRITES}; echo unknown option >&2; exit 4")
    said = refusal(capsys)
    assert "exit status 4" in said and "unknown option" in said and "C++20" in said
    assert list(folder.iterdir()) == []


@linux_only
def test_the_seconds_are_shown_in_one_line(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(f"sleep 1.3; {WRITES}")
    lines = r"(\rcompiling: \d+ s){2,}\n"
    for after_s, terminal, shown in ((0, True, lines), (600, True, ""), (0, False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(compiling, "_SHOWN_AFTER_S", after_s)
        compiling.build(force=True)
        assert re.fullmatch(shown, capsys.readouterr().err)


@linux_only
def test_an_interrupt_ends_the_compiler_and_leaves_nothing(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("exec sleep 60")

    def interrupt(process: subprocess.Popen[bytes], start: float) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "_wait", interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compiling.build()
    assert time.monotonic() - begun < 30 and list(folder.iterdir()) == []


@linux_only
def test_of_a_compiler_that_talks_much_the_last_words_are_told(compiler: Compiler) -> None:
    compiler("seq 100; exit 1")
    with pytest.raises(compiling.OffloadError) as raised:
        compiling.build()
    assert str(raised.value).splitlines()[1:] == [str(number) for number in range(76, 101)]


@linux_only
def test_the_first_compiler_of_the_path_is_taken_and_cxx_with_its_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiling.compiler() == ["g++"]
    monkeypatch.setenv("CXX", "clang++ -v")
    assert compiling.compiler() == ["clang++", "-v"]


@linux_only
def test_without_a_compiler_it_says_which_were_looked_for_and_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    said = refusal(capsys)
    assert "c++, g++, clang++" in said and "apt install g++" in said
    monkeypatch.setenv("CXX", "zig c++")
    assert "CXX names 'zig'" in refusal(capsys)
    assert not folder.exists() or list(folder.iterdir()) == []


@linux_only
def test_without_pythons_headers_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(compiling.OffloadError, match="install Python's headers"):
        compiling.build()


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(compiling.OffloadError, match="are built on Linux alone"):
        compiling.command(Path("ops.so"))


def test_build_info_says_that_nothing_was_built_and_how_to_do_it(folder: Path) -> None:
    info = build_info()["ops"]
    assert info["built"] is False
    assert torch.__version__ in info["why_not"] and "oracle-offload build-ops" in info["why_not"]
    assert load.operators() is None


@linux_only
def test_the_switch_leaves_them_unused_and_another_value_is_an_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.build()
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "off")
    assert load.operators() is None
    info = build_info()["ops"]
    assert info["built"] is True and info["why_not"] == "ORACLE_OFFLOAD_OPS=off: not used"
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "on")
    with pytest.raises(ValueError, match="ORACLE_OFFLOAD_OPS='on': use auto or off"):
        load.operators()


@linux_only
def test_a_file_that_does_not_load_costs_a_warning(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiling.build()
    assert load.operators() is None
    assert "build-ops --force" in caplog.text


def test_the_source_that_is_shipped_is_all_that_is_compiled() -> None:
    """`setup.py` ships the folder, `files` names its files."""
    named = {path.name for path in files.sources() if path.parent.name == "torch"}
    assert named == {path.name for path in files.sources()[0].parent.iterdir()}


def test_an_attach_asks_once_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    real = attachment.operators
    monkeypatch.setattr(attachment, "operators", lambda: asked.append(None) or real())
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    manager = oracle_offload.attach(model, "cpu")
    assert len(manager.layers) == 3 and len(asked) == 1
    manager.detach()


def test_in_a_wheel_the_source_lies_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [path.name for path in files.sources()]
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "site" / "package")
    assert files.sources() == [tmp_path / "site" / "package" / "source" / name for name in names]


def test_another_source_is_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = []
    monkeypatch.setattr(files, "sources", lambda: [tmp_path / "a", tmp_path / "b"])
    for text in ("one", "two", "one"):
        (tmp_path / "a").write_text(text)
        (tmp_path / "b").write_text("of both")
        files._source_hash.cache_clear()
        named.append(files.file_name("2.6", "1"))
    files._source_hash.cache_clear()
    assert named[0] == named[2] != named[1]
    assert all(re.fullmatch(r"ops-2\.6-.+-abi1-[0-9a-f]{16}\.so", name) for name in named)


@pytest.mark.parametrize(
    ("value", "is_off"), [("", False), (" auto ", False), ("AUTO", False), (" Off\n", True)]
)
def test_the_switch_is_read_whatever_its_case(
    value: str, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", value)
    assert files.is_switched_off() is is_off


@pytest.mark.parametrize("found", ["nothing", "a folder of that name", "no version"])
def test_without_torch_nothing_is_built(
    found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version.py").write_text("")
    specs = {
        "nothing": None,
        "a folder of that name": SimpleNamespace(origin=None),
        "no version": SimpleNamespace(origin=str(tmp_path / "__init__.py")),
    }
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: specs[found])
    assert files.installed_torch() is None
    assert files.record() == {"built": False, "why_not": "torch is not installed"}


def test_the_version_on_disk_is_that_of_the_torch_that_is_imported() -> None:
    assert files.installed_torch() == torch.__version__


@linux_only
def test_the_command_says_where_they_are_and_whether_they_are_used(
    folder: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forced: list[bool] = []
    path = folder / "ops.so"

    def build(force: bool) -> tuple[Path, float]:
        forced.append(force)
        return path, 0.0 if len(forced) == 2 else 12.4

    monkeypatch.setattr(compiling, "build", build)
    monkeypatch.setattr(load, "operators", lambda: object())
    assert cli.main(["build-ops", "--force"]) == cli.EXIT_OK
    assert capsys.readouterr().out == f"{path}\ncompiled in 12 s\n"
    assert cli.main(["build-ops"]) == cli.EXIT_OK
    assert capsys.readouterr().out == f"{path}\nthey were there already\n"
    assert forced == [True, False]
    monkeypatch.setattr(load, "operators", lambda: None)
    assert cli.main(["build-ops"]) == cli.EXIT_OK
    unused = "compiled in 12 s; not used: ORACLE_OFFLOAD_OPS=off, or they do not load\n"
    assert capsys.readouterr().out == f"{path}\n{unused}"
    monkeypatch.setattr(load, "operators", lambda: int("x"))
    assert cli.main(["build-ops"]) == cli.EXIT_ERROR
    assert "build-ops: invalid literal" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "oracle_offload.ops.compiling", None)
    assert cli.main(["build-ops"]) == cli.EXIT_ERROR
    assert "install torch first" in capsys.readouterr().err
