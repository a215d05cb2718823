"""The drop-in's files in a checkout of AI-Toolkit: in, out again byte for byte, and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import oracle_offload
from oracle_offload import cli
from oracle_offload.aitoolkit import checkout

ROOT = Path(__file__).parent.parent.parent
ORIGINALS = {
    "manager.py": b"class MemoryManager:\n    pass\n",
    "manager_modules.py": b"# \xc3\xa9\r\ndef sync_grad_transfers():\r\n    pass",
}


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose two files are known."""
    folder = tmp_path / "ai-toolkit" / checkout.FOLDER
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from .manager import MemoryManager\nfrom .manager_modules import sync_grad_transfers\n"
    )
    known = {}
    for name, content in ORIGINALS.items():
        (folder / name).write_bytes(content)
        known[name] = {checkout.digest(content): "2026-08-12"}
    monkeypatch.setattr(checkout, "KNOWN", known)
    return tmp_path / "ai-toolkit"


def files(toolkit: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (toolkit / checkout.FOLDER).iterdir()}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["aitoolkit", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_install_replaces_two_files_and_keeps_the_originals(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(toolkit)
    code, out, _ = run(capsys, "install", toolkit)
    assert code == 0
    after = files(toolkit)
    for name in checkout.NAMES:
        assert after[name] == (ROOT / "oracle_offload" / "aitoolkit" / name).read_bytes()
        assert after[f"{name}.before-oracle-offload"] == before[name]
        assert f"{name}: AI-Toolkit's, of 2026-08-12 -> oracle_offload 0.1.0" in out
    assert len(after) == 5 and after["__init__.py"] == before["__init__.py"]
    assert "2 of 2 files changed; oracle_offload is installed." in out
    assert "Restart AI-Toolkit. Before 'git pull'" in out


def test_install_is_idempotent(toolkit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "install", toolkit)
    once = files(toolkit)
    code, out, _ = run(capsys, "install", toolkit)
    assert code == 0 and files(toolkit) == once
    assert out.count("already") == 2 and "0 of 2 files changed" in out and "Restart" not in out


def test_uninstall_restores_every_byte_and_the_mode(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = toolkit / checkout.FOLDER / "manager.py"
    manager.chmod(0o750)
    before = files(toolkit)
    run(capsys, "install", toolkit)
    assert stat.S_IMODE(manager.stat().st_mode) == 0o750
    manager.chmod(0o640)
    code, out, _ = run(capsys, "uninstall", toolkit)
    assert code == 0 and files(toolkit) == before
    assert "oracle_offload 0.1.0 -> AI-Toolkit's, of 2026-08-12" in out
    assert "2 of 2 files changed; oracle_offload is not installed." in out and "Restart" not in out
    code, out, _ = run(capsys, "uninstall", toolkit)
    assert code == 0 and "0 of 2" in out and files(toolkit) == before
    assert out.count(": AI-Toolkit's, of 2026-08-12, left as it is\n") == 2


def test_status_tells_the_four_states(toolkit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = toolkit / checkout.FOLDER
    code, out, _ = run(capsys, "status", toolkit)
    assert code == 0 and "oracle_offload is not installed." in out
    run(capsys, "install", toolkit)
    code, out, _ = run(capsys, "status", toolkit)
    assert code == 0 and "oracle_offload is installed." in out and out.count("original kept") == 2
    (folder / "manager.py").write_bytes(ORIGINALS["manager.py"])
    code, out, _ = run(capsys, "status", toolkit)
    assert code == 3 and "partly installed" in out
    (folder / "manager.py").write_bytes(b"print()\n")
    code, out, _ = run(capsys, "status", toolkit)
    assert code == 3 and "not known" in out and "SHA-256" in out


def test_status_is_told_as_json_too(toolkit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [(0, "not installed", None), (0, "installed", ".before-oracle-offload")]
    for exit_code, found, original in expected:
        code, out, _ = run(capsys, "status", toolkit, "--json")
        document = json.loads(out)
        assert (code, document["status"]) == (exit_code, found)
        assert document["schema"] == "oracle_offload/aitoolkit-status/1"
        names = [Path(file["path"]).name for file in document["files"]]
        assert sorted(names) == sorted(checkout.NAMES)
        for name, file in zip(names, document["files"], strict=True):
            assert file["original"] == (original and name + original) and file["is"]
        run(capsys, "install", toolkit)
    (toolkit / checkout.FOLDER / "manager.py").write_bytes(b"print()\n")
    code, out, _ = run(capsys, "status", toolkit, "--json")
    assert (code, json.loads(out)["status"]) == (3, "unknown")


def test_an_unknown_version_is_refused_and_nothing_changes(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toolkit / checkout.FOLDER / "manager.py").write_bytes(b"class MemoryManager: ...\n")
    before = files(toolkit)
    for action in ("install", "patch"):
        code, out, error = run(capsys, action, toolkit)
        assert code == 1 and out == "" and files(toolkit) == before
        assert checkout.digest(b"class MemoryManager: ...\n")[:12] in error  # what was found
        assert "2026-08-12" in error  # what is known
        assert "manager.py" in error and "Nothing was changed" in error


def test_line_ends_that_git_changed_are_no_other_version(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = toolkit / checkout.FOLDER / "manager.py"
    path.write_bytes(ORIGINALS["manager.py"].replace(b"\n", b"\r\n"))
    before = files(toolkit)
    assert run(capsys, "install", toolkit)[0] == 0
    assert run(capsys, "uninstall", toolkit)[0] == 0
    assert files(toolkit) == before


def test_a_half_installed_checkout_can_go_either_way(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(toolkit)
    for action, expected in (("install", "installed"), ("uninstall", "not installed")):
        run(capsys, "install", toolkit)
        manager = toolkit / checkout.FOLDER / "manager.py"
        manager.write_bytes(ORIGINALS["manager.py"])  # as after an install that was cut short
        assert run(capsys, action, toolkit)[0] == 0
        assert checkout.status(toolkit) == expected
    assert files(toolkit) == before


def test_the_order_never_leaves_our_manager_over_foreign_modules(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    replace = os.replace

    def watched(source: str, target: str) -> None:
        replace(source, target)
        modules, manager = (file.release is not None for file in checkout.read(toolkit))
        seen.append((modules, manager))

    monkeypatch.setattr(os, "replace", watched)
    checkout.install(toolkit, lambda line: None)
    checkout.uninstall(toolkit, lambda line: None)
    assert (True, False) in seen and (True, True) in seen and (False, True) not in seen


def test_an_older_release_is_replaced_and_its_backup_kept(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(toolkit)
    run(capsys, "install", toolkit)
    for name in checkout.NAMES:
        path = toolkit / checkout.FOLDER / name
        path.write_bytes(path.read_bytes().replace(b'"0.1.0"', b'"0.0.9"'))
    code, out, _ = run(capsys, "status", toolkit)
    assert code == 3 and "oracle_offload 0.0.9, not of this installation" in out
    assert run(capsys, "install", toolkit)[0] == 0
    assert run(capsys, "uninstall", toolkit)[0] == 0
    assert files(toolkit) == before


def test_uninstall_without_the_original_is_refused(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "install", toolkit)
    (toolkit / checkout.FOLDER / "manager.py.before-oracle-offload").unlink()
    before = files(toolkit)
    code, _, error = run(capsys, "uninstall", toolkit)
    assert code == 1 and "git checkout" in error and files(toolkit) == before


def test_a_folder_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("install", "status", "uninstall", "patch"):
        code, _, error = run(capsys, action, tmp_path)
        assert code == 1 and str(tmp_path) in error and "run.py" in error


def test_a_checkout_that_cannot_be_written_is_left_as_it_was(
    toolkit: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(toolkit)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    code, _, error = run(capsys, "install", toolkit)
    assert code == 1 and "EACCES" in error and files(toolkit) == before


@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_a_file_that_cannot_be_written_is_named_and_half_an_install_said_aloud(
    toolkit: Path, action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toolkit)
    if action == "uninstall":
        run(capsys, "install", Path("."))
    replace, written = os.replace, []

    def refuse(new: Path, path: Path) -> None:
        if written:
            raise PermissionError(13, "Permission denied")
        if not path.name.endswith("oracle-offload"):
            written.append(path)
        replace(new, path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        code, _, error = run(capsys, action, Path("."))
    assert code == 1 and f"cannot change {toolkit.resolve() / checkout.FOLDER}" in error
    assert "Permission denied (EACCES" in error
    again = "partly installed. The two files do not belong together: run 'oracle-offload aitoolkit"
    assert again in error
    assert run(capsys, "status", Path("."))[0] == 3
    code, out, _ = run(capsys, action, Path("."))
    assert code == 0 and f"is {'' if action == 'install' else 'not '}installed." in out


@pytest.mark.parametrize("installed", [False, True])
def test_git_applies_the_patch_to_what_install_makes(
    toolkit: Path, installed: bool, tmp_path: Path
) -> None:
    for name, content in ORIGINALS.items():  # also one that ends without a newline
        (toolkit / checkout.FOLDER / name).write_bytes(content)
    if installed:
        checkout.install(toolkit, lambda line: None)
    diff = checkout.patch(toolkit)
    if installed:
        checkout.uninstall(toolkit, lambda line: None)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=toolkit, input=diff, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert checkout.status(toolkit) == "installed"


def test_patch_prints_what_git_takes(toolkit: Path, capfdbinary: pytest.CaptureFixture) -> None:
    assert cli.main(["aitoolkit", "patch", str(toolkit)]) == 0
    assert capfdbinary.readouterr().out == checkout.patch(toolkit)


def test_the_real_originals_are_known_by_day() -> None:
    assert {name: len(days) for name, days in checkout.KNOWN.items()} == {
        "manager.py": 5,
        "manager_modules.py": 7,
    }
    for days in checkout.KNOWN.values():
        assert all(len(key) == 32 and day.startswith("2026-") for key, day in days.items())


def test_both_files_are_of_this_release() -> None:
    for name in checkout.NAMES:
        file = checkout.read_one(ROOT / "oracle_offload" / "aitoolkit" / name)
        assert file.release == oracle_offload.__version__
        assert b"git checkout" in file.content and b"uninstall" in file.content


@pytest.mark.parametrize("beside", ["original", "another release"])
def test_our_manager_over_strange_modules_is_refused(toolkit: Path, beside: str) -> None:
    pytest.importorskip("torch")
    checkout.install(toolkit, lambda line: None)
    modules = toolkit / checkout.FOLDER / "manager_modules.py"
    if beside == "original":
        modules.write_bytes(ORIGINALS["manager_modules.py"])
        found = "not oracle_offload's"
    else:
        modules.write_bytes(modules.read_bytes().replace(b'"0.1.0"', b'"0.2.0"'))
        found = "of oracle_offload 0.2.0"
    done = subprocess.run(
        [sys.executable, "-c", "import toolkit.memory_management"],
        cwd=toolkit,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{toolkit}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "ImportError" in done.stderr
    assert found in done.stderr and "oracle-offload aitoolkit install" in done.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, oracle_offload.cli as c; c.main(['aitoolkit', 'status', '.']); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("heading", "rows"), [("## What a drop-in must do", 15), ("## The original's defects", 20)]
)
def test_the_page_names_tests_that_are_there(heading: str, rows: int) -> None:
    """Each behaviour and each of the original's defects has tests that show ours right."""
    page = (ROOT / "docs" / "ai-toolkit.md").read_text("utf-8")
    section = page.partition(heading)[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", section, re.MULTILINE)
    assert [int(number) for number, _ in found] == [*range(1, rows + 1)]
    for number, tests in found:
        named = re.findall(r"`(?:tests/(toolkit)/)?(test_\w+\.py)::(\w+)`", tests)
        assert named or tests == "the same", number
        for folder, file, name in named:
            source = (ROOT / "tests" / (folder or "training") / file).read_text("utf-8")
            assert f"def {name}(" in source, (file, name)


def test_a_file_of_ours_without_the_original_is_left_out_of_the_patch(
    toolkit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "install", toolkit)
    (toolkit / checkout.FOLDER / "manager.py.before-oracle-offload").unlink()
    changed = re.findall(rb"^\+\+\+ b/\S+/(\S+)", checkout.patch(toolkit), re.MULTILINE)
    assert changed == [b"manager_modules.py"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_patch_that_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "patch", lambda path: b"a patch")
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert cli.main(["aitoolkit", "patch", "."]) == 1
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().err.startswith("cannot write standard output: ")


@pytest.mark.parametrize(
    ("content", "release"),
    [
        (b'# of oracle_offload\nRELEASE = "3.1"\n', "3.1"),
        (b"# written for oracle_offload\nclass MemoryManager: ...\n", None),
        (b'RELEASE = "3.1"\n', None),
        (b'# oracle_offload\n    RELEASE = "3.1"\n', None),
    ],
)
def test_a_file_is_ours_that_names_us_and_a_release(content: bytes, release: str | None) -> None:
    file = checkout.File(Path("manager.py"), content)
    assert file.release == release
    expected = "unknown (SHA-256 " if release is None else "oracle_offload 3.1, not of this"
    assert file.describe().startswith(expected)


def test_a_backup_beside_an_original_is_no_part_of_the_patch(toolkit: Path) -> None:
    """`git checkout` brings an original back and leaves what was saved next to it."""
    expected = checkout.patch(toolkit)
    for file in checkout.read(toolkit):
        file.backup.write_bytes(b"of another day\n")
    assert checkout.patch(toolkit) == expected
    assert checkout.uninstall(toolkit, lambda line: None) == 0
    assert not any(file.backup.exists() for file in checkout.read(toolkit))


def test_what_is_beside_our_manager_is_named() -> None:
    checkout.refuse_strange_neighbour("0.1.0", "0.1.0", "manager.py")
    for beside, whose in ((None, "not oracle_offload's"), ("0.2.0", "of oracle_offload 0.2.0")):
        with pytest.raises(ImportError) as raised:
            checkout.refuse_strange_neighbour("0.1.0", beside, "folder/manager.py")
        assert str(raised.value).startswith(
            "folder/manager.py is of oracle_offload 0.1.0, but manager_modules.py next to it is "
            f"{whose}; run 'oracle-offload aitoolkit install PATH'"
        )


def test_a_mode_that_cannot_be_copied_leaves_no_file_behind(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(toolkit)

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkout.shutil, "copymode", refuse)
    with pytest.raises(KeyboardInterrupt):
        checkout.install(toolkit, lambda line: None)
    assert files(toolkit) == before


def test_originals_and_backups_have_the_mode_of_what_they_replace(toolkit: Path) -> None:
    for file in checkout.read(toolkit):
        file.path.chmod(0o710)
    checkout.install(toolkit, lambda line: None)
    for file in checkout.read(toolkit):
        assert stat.S_IMODE(file.backup.stat().st_mode) == 0o710
        file.path.chmod(0o600)
    checkout.uninstall(toolkit, lambda line: None)
    modes = {stat.S_IMODE(file.path.stat().st_mode) for file in checkout.read(toolkit)}
    assert modes == {0o710}
