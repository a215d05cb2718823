"""The processes of this machine: where a process id means the same, and whether one is alive."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import socket
import sys
from typing import Any

from .files import read_text

_SYNCHRONIZE, _QUERY_LIMITED_INFORMATION = 0x0010_0000, 0x1000
_ACCESS_DENIED, _INVALID_PARAMETER = 5, 87
_ENDED, _RUNS = 0, 0x102  # WAIT_OBJECT_0, WAIT_TIMEOUT


@functools.cache
def machine() -> str:
    """Return the name of this machine, as part of a file's name.

    Two processes get the same one where a process id means the same to both: on one host, since
    one boot, in one namespace of process ids. Containers may share the host's name.
    """
    host = socket.gethostname()
    boot = read_text("/", "/proc/sys/kernel/random/boot_id").text
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no such thing on this system
        namespace = ""
    told = hashlib.blake2b(f"{host}\n{boot}\n{namespace}".encode(), digest_size=4).hexdigest()
    return f"{re.sub('[^A-Za-z0-9.]', '_', host)[:64]}-{told}"


def is_alive(pid: int) -> bool | None:
    """Whether a process of this machine has that number; None where the system does not say."""
    if sys.platform == "win32":  # os.kill would end it there
        return _is_alive_on_windows(pid, ctypes.WinDLL("kernel32", use_last_error=True))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_alive_on_windows(pid: int, kernel32: Any) -> bool | None:
    kernel32.OpenProcess.restype = ctypes.c_void_p
    process = kernel32.OpenProcess(_SYNCHRONIZE | _QUERY_LIMITED_INFORMATION, False, pid)
    if not process:
        error = ctypes.get_last_error()  # type: ignore[attr-defined,unused-ignore]
        return {_ACCESS_DENIED: True, _INVALID_PARAMETER: False}.get(error)
    handle = ctypes.c_void_p(process)
    try:
        # One that has ended keeps its number as long as a process holds a handle of it.
        return {_ENDED: False, _RUNS: True}.get(kernel32.WaitForSingleObject(handle, 0))
    finally:
        kernel32.CloseHandle(handle)
