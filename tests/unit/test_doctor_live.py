"""The doctor on the machine that runs the tests, and on that machine with things taken away."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from importing import import_cost

from oracle_offload.diagnose.doctor import CHECKS, Finding, System, examine
from oracle_offload.diagnose.doctor import checks as checks_module
from oracle_offload.diagnose.doctor.report import DoctorReport
from oracle_offload.diagnose.doctor.torch_build import (
    TorchView,
    ask_torch,
    find_torch,
    imported_torch,
    parse_release,
)
from oracle_offload.host.cgroup import read_memory_limit
from oracle_offload.host.files import Reading, list_names, read_text
from oracle_offload.host.gpus import GpuView
from oracle_offload.host.terminal import show

ROOT = Path(__file__).parent.parent.parent
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DOCTOR = [sys.executable, "-m", "oracle_offload", "doctor"]
# -S: no site-packages, so neither torch nor nvidia-ml-py nor psutil can be imported.
ALONE = [sys.executable, "-S", "-m", "oracle_offload", "doctor"]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    merged = {"env": ENVIRON, "cwd": ROOT, "timeout": 120, **options}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, check=False, **merged
    )


# --- The command -------------------------------------------------------------------------------


def test_json_names_every_check_and_the_exit_code_follows_the_verdict() -> None:
    done = run([*DOCTOR, "--json"])
    report = json.loads(done.stdout)
    assert report["schema"] == "oracle_offload/doctor/1"
    assert [finding["name"] for finding in report["findings"]] == list(CHECKS)
    assert done.returncode == (3 if report["verdict"] == "bad" else 0), done.stderr


def test_the_disk_of_a_file_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.touch()
    os.truncate(file, 64 << 20)
    done = run([*ALONE, "--json", "--disk", str(file)])
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}["disk"]
    assert found["facts"]["path"] == str(file)
    if found["facts"]["kind"] not in ("tmpfs", "ramfs"):
        assert found["verdict"] in ("ok", "warn") and found["facts"]["read_gbps"] > 0, found
        threads = [rate["threads"] for rate in found["facts"]["rates"]]
        assert threads == [1, 4, 8] and found["facts"]["read_bytes"] <= 64 << 20
        assert "GB/s cold" in found["value"] and "from disk" in found["why"]


def test_a_bad_check_exits_with_3() -> None:
    environ = {**ENVIRON, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = run(DOCTOR, env=environ)
    assert done.returncode == 3
    assert "bad     switches" in done.stdout


def on_a_terminal(environ: dict[str, str]) -> str:
    """Run the doctor on a pseudo terminal and return what it drew."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        ALONE, stdout=follower, stderr=subprocess.DEVNULL, env=environ, cwd=ROOT
    )
    os.close(follower)
    drawn = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux reports the end of a pseudo terminal as EIO
            break
        if not piece:
            break
        drawn += piece
    child.wait(timeout=60)
    os.close(leader)
    return drawn.decode()


def test_colour_on_a_terminal_only_and_never_with_no_color() -> None:
    plain = {**ENVIRON, "TERM": "xterm"}
    plain.pop("NO_COLOR", None)
    assert "\033[" in on_a_terminal(plain)
    assert "\033[" not in on_a_terminal({**plain, "NO_COLOR": "1"})
    assert "\033[" not in on_a_terminal({**plain, "TERM": "dumb"})
    done = run(ALONE, env=plain)
    assert "\033[" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_an_encoding_without_the_characters_of_a_path_is_no_obstacle(tmp_path: Path) -> None:
    odd = tmp_path / "ünï"
    odd.mkdir()
    done = run([*ALONE, "--aitoolkit", str(odd)], env={**ENVIRON, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 3, done.stderr
    assert "AI-Toolkit" in done.stdout


# --- With things taken away --------------------------------------------------------------------


@pytest.mark.parametrize("part", ["diagnose.doctor", "diagnose.doctor.allocator", "host.cgroup"])
def test_importing_stays_light(part: str) -> None:
    cost = import_cost(f"oracle_offload.{part}")
    assert cost.foreign == set()  # neither torch nor numpy nor pynvml
    assert cost.events < 20_000 and len(cost.modules) < 80, cost


def test_without_torch_and_without_any_package(tmp_path: Path) -> None:
    done = run([*ALONE, "--json"])
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["value"] == "not found"
    assert found["torch"]["why"] == "torch is not installed for this Python"
    assert "nvidia-ml-py is not installed" in found["clocks"]["why"]
    assert found["ram"]["verdict"] != "unknown"


@contextmanager
def readable_copy() -> Iterator[Path]:
    """Copy the package to where any user may read it."""
    target = Path("/tmp") / f"oo-doctor-{os.getpid()}"
    shutil.copytree(ROOT / "oracle_offload", target / "oracle_offload")
    target.chmod(0o755)
    try:
        yield target
    finally:
        shutil.rmtree(target)


def test_as_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None or run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
                             user=65534).returncode:  # fmt: skip
        pytest.skip("no Python 3.11 that every user may run")
    with readable_copy() as place:
        done = run(
            [python, "-m", "oracle_offload", "doctor", "--json"],
            cwd=place,
            env={"PATH": "/usr/bin:/bin"},
            user=65534,
            group=65534,
            extra_groups=[],
        )
    findings = json.loads(done.stdout)["findings"]
    assert [finding["name"] for finding in findings] == list(CHECKS)
    assert not [f for f in findings if "check itself failed" in f["why"]]


def test_with_proc_hidden() -> None:
    """In a mount namespace of its own, with an empty directory over /proc."""
    unshare = shutil.which("unshare")
    hide = "mount -t tmpfs none /proc"
    if unshare is None or run([unshare, "-rm", "sh", "-c", hide]).returncode:
        pytest.skip("no mount namespaces here")
    command = f"{hide} && exec {sys.executable} -m oracle_offload doctor --json"
    done = run([unshare, "-rm", "sh", "-c", command])
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert list(found) == list(CHECKS), done.stderr
    assert found["swap"]["verdict"] == "unknown"
    assert found["swap"]["why"] == "/proc/meminfo: no such file"
    assert found["ram"]["facts"]["total_bytes"] > 0, "the system call knows it without /proc"
    resource = pytest.importorskip("resource")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    expected = None if soft == resource.RLIM_INFINITY else soft
    assert found["locked memory"]["facts"]["limit_bytes"] == expected, "so does this one"
    assert not [f for f in found.values() if "check itself failed" in f["why"]]


def test_a_check_that_fails_is_one_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(system: System) -> Finding:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(checks_module.CHECKS, "swap", broken)
    report = examine(System(torch=TorchView(why="not asked"), gpus=GpuView()))
    assert report["swap"].verdict == "unknown"
    assert report["swap"].why == "the check itself failed: ZeroDivisionError: on purpose"
    assert report["ram"].facts["total_bytes"]


def test_unreadable_files_are_told_from_absent_ones(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").mkdir()
    report = examine(System(str(tmp_path), environ={}, platform="linux"))
    assert report["ram"].why == "/proc/meminfo: Is a directory"
    assert report["huge pages"].why.endswith("no such file")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/none", "/none: no such file"),
        ("/folder", "/folder: Is a directory"),
        ("/a\0b", "/a\0b: embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    assert read_text(str(tmp_path), path) == Reading(None, why)
    assert list_names(str(tmp_path), path) == []


def test_a_file_nobody_may_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert read_text(str(tmp_path), "/x") == Reading(None, "/x: permission denied")


def test_of_a_huge_file_the_first_mebibyte_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" + b"a" * (2 << 20))
    text = read_text(str(tmp_path), "/x").text
    assert text == "\ufffd" + "a" * ((1 << 20) - 1)


# --- The torch that is installed ---------------------------------------------------------------


def test_torch_is_found_without_importing_it() -> None:
    torch = pytest.importorskip("torch")
    found = find_torch()
    assert (found.version, found.cuda, found.hip) == (
        str(torch.__version__),
        torch.version.cuda,
        torch.version.hip,
    )


def test_torch_confirms_or_refuses_the_settings() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} cannot say its settings without a card")
    name = "PYTORCH_CUDA_ALLOC_CONF"
    for value, verdict in (("expandable_segments:True", "ok"), ("max_split_size_mb:5", "bad")):
        environ = {**ENVIRON, name: value}
        report = examine(System(environ=environ, gpus=GpuView()))
        found = report["allocator"]
        assert found.verdict == verdict, found
        if verdict == "ok":
            assert found.facts["in_effect"] == value
            assert found.value.endswith("(in effect)")
        else:
            assert "torch refuses it" in found.why and "must be >= 20" in found.why


def test_an_imported_torch_answers_itself_so_a_variable_set_too_late_shows() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} cannot say its settings without a card")
    code = (
        "import os, torch, subprocess\n"
        "torch._C._accelerator_getAllocatorSettings()\n"
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:512'\n"
        "subprocess.run = None  # no process may be needed\n"
        "from oracle_offload.diagnose.doctor import examine\n"
        "found = examine()['allocator']; print(found.verdict, found.value, found.why, sep='|')"
    )
    verdict, value, why = run([sys.executable, "-c", code]).stdout.strip().split("|")
    assert verdict == "bad" and value.endswith("in effect: defaults")
    assert "torch does not use what was asked" in why


def test_a_torch_that_cannot_be_imported_is_bad_and_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    (broken / "version.py").write_text("__version__ = '2.9.0+cu128'\ncuda: str = '12.8'\n")
    code = (
        "from oracle_offload.diagnose.doctor import examine\n"
        "found = examine()['torch']; print(found.verdict, found.value, found.why, sep='|')"
    )
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run([sys.executable, "-c", code], env=environ)
    assert done.stdout.strip() == (
        "bad|2.9.0+cu128 (CUDA 12.8)|`import torch` fails: OSError: libcudart.so.12: cannot open"
    )
    (broken / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = run([sys.executable, "-c", code], env=environ)
    assert "the process ended with status -11" in done.stdout
    left = tmp_path / "pid"
    (broken / "__init__.py").write_text(
        f"import os, time; open({str(left)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    found = replace(find_torch(), version="2.9.0")
    said = ask_torch(found, environ, timeout_s=1.0)
    assert said == replace(found, why="torch was still importing after 1 s")
    # Ended and waited for: not even a zombie is left, where it came as far as to tell its number.
    assert not left.exists() or not Path("/proc", left.read_text() or "none").exists()


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0+cu128", (2, 13)),
        ("12", (12, 0)),
        ("580.65.06", (580, 65)),
        ("v2", None),
        (None, None),
    ],
)
def test_a_release_is_the_two_numbers_that_a_version_begins_with(
    version: str | None, release: tuple[int, int] | None
) -> None:
    assert parse_release(version) == release


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (ValueError("torch.__spec__ is None"), "torch could not be looked up: torch.__spec__ is"),
        (None, "torch is not installed for this Python"),
        (SimpleNamespace(origin=None), "torch is not installed for this Python"),
    ],
)
def test_a_torch_that_cannot_be_found_says_why(
    monkeypatch: pytest.MonkeyPatch, problem: object, why: str
) -> None:
    def find(name: str) -> object:
        assert name == "torch"
        if isinstance(problem, Exception):
            raise problem
        return problem

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert find_torch().version is None and find_torch().why.startswith(why)


def test_a_torch_without_a_version_file_says_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    why = "torch/version.py: No such file or directory"
    assert find_torch() == TorchView(location=str(tmp_path), why=why)
    (tmp_path / "version.py").write_text("__version__ = '2.9.0'\nhip: str = '6.2'\ncuda = None\n")
    assert find_torch() == TorchView(version="2.9.0", hip="6.2", location=str(tmp_path))


def refuse() -> str:
    raise RuntimeError("max_split_size_mb must be >= 20\nC++ frames")


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (None, {"why": "this torch cannot say which settings it uses"}),
        (lambda: "", {"settings": ""}),
        (lambda: "pinned_use_background_threads:True",
         {"settings": "pinned_use_background_threads:True"}),
        (refuse, {"settings_error": "RuntimeError: max_split_size_mb must be >= 20"}),
    ],
)  # fmt: skip
def test_the_torch_of_this_process_answers_for_itself(
    monkeypatch: pytest.MonkeyPatch, reader: object, expected: dict[str, str]
) -> None:
    version = SimpleNamespace(__version__="2.9.0+cu128", cuda="12.8", hip=None)
    known = {} if reader is None else {"_accelerator_getAllocatorSettings": reader}
    torch = SimpleNamespace(version=version, _C=SimpleNamespace(**known), __file__="/a/torch/i.py")
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    whole = {"version": "2.9.0+cu128", "cuda": "12.8", "location": "/a/torch", **expected}
    assert imported_torch() == TorchView(**whole)
    del version.__version__  # half imported: it answers for nothing
    assert imported_torch() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert imported_torch() is None


@pytest.mark.parametrize(
    ("prints", "expected"),
    [
        ('{"version": "2.9.0", "settings": "a:1"}', {"settings": "a:1"}),
        ('{"version": "2.9.0", "settings": ""}', {"settings": ""}),
        ('{"version": "2.9.0"}', {"why": "this torch cannot say which settings it uses"}),
        ('{"version": "2.9.0", "error": "no"}', {"settings_error": "no"}),
        ('{"version": "2.9.0", "settings": "a:1", "error": "no"}',
         {"settings": "a:1", "settings_error": "no"}),
        ('{"error": "OSError: x"}', {"import_error": "OSError: x"}),
        (None, {"import_error": "the process ended with status 7"}),
    ],
)  # fmt: skip
def test_what_the_process_that_asks_torch_says_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str | None, expected: dict[str, str]
) -> None:
    python = tmp_path / "python"
    said = "" if prints is None else f"echo 'oracle_offload:{prints}'\n"
    python.write_text(f"#!/bin/sh\necho a warning\n{said}exit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = TorchView(version="2.9.0", location="/a/torch")
    assert ask_torch(found, ENVIRON) == replace(found, **expected)  # type: ignore[arg-type]


def test_no_process_is_started_where_there_is_no_torch_or_no_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    absent = TorchView(why="torch is not installed for this Python")
    assert ask_torch(absent, ENVIRON) is absent
    found = ask_torch(TorchView(version="2.9.0"), ENVIRON)
    assert found.why.startswith("no process could be started to ask torch: [Errno 2]")


# --- A process really killed -------------------------------------------------------------------


@contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """Make a control group with a memory limit, where this machine lets us."""
    name = f"oo-doctor-test-{os.getpid()}"
    for parent, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / name
        try:
            if file == "memory.max" and not (parent / "cgroup.controllers").exists():
                continue
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (group / swap).exists():
                    (group / swap).write_text(str(limit if "memsw" in swap else 0))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:  # the last process is still being taken down
                    time.sleep(0.1)
        return
    pytest.skip("no control group with a memory limit can be made here")


def test_a_child_killed_by_its_control_group_is_recognised() -> None:
    limit = 96 << 20
    with limited_group(limit) as group:
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        witness = subprocess.Popen(
            [sys.executable, "-c", join
             + "import json\n"
             + "from oracle_offload.diagnose.doctor import System\n"
             + "from oracle_offload.diagnose.doctor.checks_host import check_memory_limit\n"
             + "for line in iter(input, ''):\n"
             + "    found = check_memory_limit(System())\n"
             + "    answer = [found.verdict, found.value, dict(found.facts)]\n"
             + "    print(json.dumps(answer), flush=True)"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=ENVIRON, cwd=ROOT,
        )  # fmt: skip
        assert witness.stdin is not None and witness.stdout is not None

        def ask() -> tuple[str, str, dict[str, object]]:
            witness.stdin.write("now\n")
            witness.stdin.flush()
            return tuple(json.loads(witness.stdout.readline()))

        try:
            _, _, before = ask()
            assert before["limit_bytes"] == limit
            assert read_memory_limit(pid=witness.pid).limit_bytes == limit
            # Bounded: it stops at 512 MiB if nothing else stops it.
            greedy = run([sys.executable, "-c", join + f"held = bytearray(b'x') * {512 << 20}"])
            assert greedy.returncode == -signal.SIGKILL
            verdict, value, after = ask()
            assert after["oom_kills"] == int(str(before["oom_kills"])) + 1
            assert verdict in ("warn", "bad") and "1 killed" in value
        finally:
            witness.kill()
            witness.wait()


def test_the_locked_memory_limit_of_a_process_is_the_one_in_force() -> None:
    resource = pytest.importorskip("resource")
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from oracle_offload.diagnose.doctor import System\n"
        "from oracle_offload.diagnose.doctor.checks_host import check_locked_memory\n"
        "print(check_locked_memory(System()).facts['limit_bytes'])"
    )
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < 65536:
        pytest.skip("the limit is below 64 KiB already")
    assert run([sys.executable, "-c", code]).stdout.strip() == "65536"


# --- AI-Toolkit --------------------------------------------------------------------------------

COMMIT = "27a03a91" + "0" * 32


def checkout(root: Path) -> Path:
    """Write a checkout with the files that are looked at."""
    package = root / "toolkit" / "memory_management"
    package.mkdir(parents=True)
    (root / "version.py").write_text('VERSION = "0.13.19"\n')
    (package / "manager.py").write_text("class MemoryManager:\n    pass\n")
    (package / "__init__.py").write_text("from .manager_modules import sync_grad_transfers\n")
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git" / "refs" / "heads" / "main").write_text(COMMIT + "\n")
    return root


def aitoolkit(path: Path) -> Finding:
    quiet = System(aitoolkit=str(path), torch=TorchView(why="not asked"), gpus=GpuView())
    return examine(quiet)["AI-Toolkit"]


def test_checkout_is_told_by_version_and_commit(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    found = aitoolkit(root)
    assert (found.verdict, found.value) == ("ok", "0.13.19, commit 27a03a91")
    (root / ".git" / "refs" / "heads" / "main").unlink()
    (root / ".git" / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert aitoolkit(root).facts["commit"] == COMMIT
    (root / ".git" / "HEAD").write_text(COMMIT[::-1] + "\n")
    assert aitoolkit(root).facts["commit"] == COMMIT[::-1]
    (root / ".git").rename(root / "moved")
    assert aitoolkit(root).value == "0.13.19"
    for text, commit in (("gitdir: moved\n", COMMIT[::-1]), ("other: moved\n", None)):
        (root / ".git").write_text(text)
        assert aitoolkit(root).facts["commit"] == commit


def test_worktree_of_a_checkout_is_followed(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = checkout(tmp_path / "main")
    shutil.rmtree(root / ".git")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (
        ["init", "-q"],
        ["add", "."],
        [*who, "commit", "-qm", "first"],
        ["worktree", "add", "-q", str(tmp_path / "other")],
    ):
        assert run(["git", *command], cwd=root).returncode == 0
    commit = run(["git", "rev-parse", "HEAD"], cwd=root).stdout.strip()
    assert aitoolkit(root).facts["commit"] == commit
    assert aitoolkit(tmp_path / "other").facts["commit"] == commit


def test_what_is_missing_from_a_checkout_is_named(tmp_path: Path) -> None:
    root = checkout(tmp_path / "a")
    package = root / "toolkit" / "memory_management"
    (root / "version.py").unlink()
    assert aitoolkit(root).verdict == "warn"
    (package / "__init__.py").write_text("")
    assert "older than sync_grad_transfers" in aitoolkit(root).why
    (package / "__init__.py").unlink()
    assert "older than sync_grad_transfers" in aitoolkit(root).why
    (package / "manager.py").write_text("MemoryManager = None\n")
    assert "no toolkit/memory_management/manager.py with a MemoryManager" in aitoolkit(root).why
    (package / "manager.py").unlink()
    assert aitoolkit(root).fix == "update it: git pull"
    shutil.rmtree(root / "toolkit")
    assert "no toolkit/" in aitoolkit(root).why
    assert aitoolkit(tmp_path / "none").value == str(tmp_path / "none")
    assert aitoolkit(tmp_path / "none").verdict == "bad"


# --- The report --------------------------------------------------------------------------------


def test_values_from_the_machine_are_escaped_in_html() -> None:
    nasty = "<script>alert('x')</script>&\""
    report = DoctorReport((Finding("ram", "bad", nasty, nasty, nasty),))
    assert "<script" not in report.to_html()
    assert report.to_html().count("&lt;script&gt;") == 3


def test_a_long_value_goes_on_below_itself_and_neighbours_share_their_reason() -> None:
    report = DoctorReport(
        (
            Finding("fine", "ok", ""),
            Finding("one", "bad", "first-word " * 7, "the same reason", "the same remedy"),
            Finding("other", "bad", "value", "the same reason", "the same remedy"),
            Finding("third", "bad", "value", "the same reason", "another " * 8),
        )
    )
    assert str(report) == report.to_text()
    assert report.to_text(width=1) == (
        "doctor: 3 bad, 1 ok\n"
        "\n"
        "bad     one    first-word first-word first-word first-word\n"
        "               first-word first-word first-word\n"
        "bad     other  value\n"
        "               why: the same reason\n"
        "               fix: the same remedy\n"
        "bad     third  value\n"
        "               why: the same reason\n"
        "               fix: another another another another another\n"
        "                    another another another\n"
        "ok      fine\n"
    )
    assert report["other"].value == "value"
    with pytest.raises(KeyError, match="none"):
        report["none"]


@pytest.mark.parametrize(("columns", "widest"), [(72, 72), (40, 60), (300, 100)])
def test_a_terminal_is_filled_and_a_file_is_as_wide_as_the_widest(
    monkeypatch: pytest.MonkeyPatch, columns: int, widest: int
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    report = DoctorReport((Finding("x", "bad", "a " * 300),))
    for stream, width in ((Screen(), widest), (io.StringIO(), 100)):
        show(stream, lambda width, color: report.to_text(width=width, colour=color))
        assert width - 1 <= max(map(len, stream.getvalue().splitlines())) <= width


def test_verdict_of_a_report_is_its_worst_and_unknown_only_when_alone() -> None:
    def verdict(*given: str) -> str:
        return DoctorReport(tuple(Finding("x", each, "v") for each in given)).verdict

    assert verdict("ok", "unknown") == "ok"
    assert verdict("unknown") == "unknown"
    assert verdict("ok", "warn", "unknown") == "warn"
    assert verdict("warn", "bad", "ok") == "bad"
    assert verdict() == "unknown"
