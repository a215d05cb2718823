"""Which machine this is, and whether a process of it is alive."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from oracle_offload.host import processes
from oracle_offload.host.files import Reading
from oracle_offload.host.processes import is_alive, machine


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    machine.cache_clear()
    yield
    machine.cache_clear()


def test_a_process_is_alive_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_alive(child.pid) is True
    finally:
        child.communicate(b"\n", timeout=60)
    assert is_alive(child.pid) is False
    assert is_alive(os.getpid()) is True


def test_another_user_s_process_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (7, 0)
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert is_alive(7) is True


def test_the_machine_is_named_after_its_host() -> None:
    name = machine()
    assert re.fullmatch("[A-Za-z0-9._]{1,64}-[0-9a-f]{8}", name)
    assert name.startswith(socket.gethostname()[:3])
    code = "from oracle_offload.host.processes import machine; print(machine())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == name, "another process finds the same"


def test_hosts_boots_and_namespaces_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()
    for host, boot, namespace in (
        ("a/b", "1", "pid:[1]"),
        ("a/c", "1", "pid:[1]"),
        ("a/b", "2", "pid:[1]"),
        ("a/b", "1", "pid:[2]"),
        ("a/b", None, None),
    ):

        def readlink(path: str, found: str | None = namespace) -> str:
            assert path == "/proc/self/ns/pid"
            if found is None:
                raise FileNotFoundError(path)
            return found

        def text(root: str, path: str, found: str | None = boot) -> Reading:
            assert path == "/proc/sys/kernel/random/boot_id"
            return Reading(found)

        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(processes, "read_text", text)
        monkeypatch.setattr(os, "readlink", readlink)
        machine.cache_clear()
        name = machine()
        assert name == machine() and re.fullmatch("a_[bc]-[0-9a-f]{8}", name)
        names.add(name)
    assert len(names) == 5


class Call:
    """A function of the Windows API that returns a given answer."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, list[Any]()
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> int:
        self.calls.append([getattr(argument, "value", argument) for argument in arguments])
        return self.answer


class Kernel32:
    def __init__(self, handle: int, waited: int) -> None:
        self.OpenProcess, self.CloseHandle = Call(handle), Call(1)
        self.WaitForSingleObject = Call(waited)


def imitate_windows(monkeypatch: pytest.MonkeyPatch, kernel32: Kernel32) -> None:
    def library(name: str, use_last_error: bool) -> Kernel32:
        assert (name, use_last_error) == ("kernel32", True)
        return kernel32

    def kill(pid: int, signal: int) -> None:
        raise AssertionError("os.kill ends a process there")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", library, raising=False)
    monkeypatch.setattr(os, "kill", kill)


@pytest.mark.parametrize(("waited", "alive"), [(0x102, True), (0, False), (0xFFFF_FFFF, None)])
def test_windows_is_asked_for_a_handle(
    monkeypatch: pytest.MonkeyPatch, waited: int, alive: bool | None
) -> None:
    kernel32 = Kernel32(1 << 40, waited)
    imitate_windows(monkeypatch, kernel32)
    assert is_alive(7) is alive
    assert kernel32.OpenProcess.calls == [[0x10_1000, False, 7]]
    assert kernel32.WaitForSingleObject.calls == [[1 << 40, 0]]
    assert kernel32.CloseHandle.calls == [[1 << 40]]
    assert kernel32.OpenProcess.restype is ctypes.c_void_p, "a handle has 64 bits"


@pytest.mark.parametrize(("error", "alive"), [(5, True), (87, False), (8, None)])
def test_windows_gives_no_handle(
    monkeypatch: pytest.MonkeyPatch, error: int, alive: bool | None
) -> None:
    monkeypatch.setattr(ctypes, "get_last_error", lambda: error, raising=False)
    kernel32 = Kernel32(0, 0)
    imitate_windows(monkeypatch, kernel32)
    assert is_alive(7) is alive
    assert kernel32.WaitForSingleObject.calls == kernel32.CloseHandle.calls == []
