"""The arena of a replay has addresses alone: no memory is taken for it, on any system."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from oracle_offload import replay
from oracle_offload.errors import OffloadError

REPLAY = """
import ctypes
from oracle_offload import replay
from oracle_offload._core import BACKWARD, FORWARD

reserved, protect = replay._Reserved.__init__, ctypes.CDLL(None).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def untouchable(self, nbytes):
    reserved(self, nbytes)
    assert protect(self.address, nbytes, 0) == 0

replay._Reserved.__init__ = untouchable
events = []
for number in range(40):
    unit, kind, task = (number, FORWARD, -1) if number < 20 else (39 - number, BACKWARD, 0)
    events += [("acquire", unit, kind, task, number), ("launch", 1e-5), ("release", number)]
units = [[(unit, [1 << 14])] for unit in range(20)]
print(replay.predict(events, units, [1 << 17])["predicted_h2d_bytes"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
def test_a_replay_touches_no_byte_of_its_arena() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPLAY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12 << 14


class Kernel32:
    """Windows' calls, as far as a range of addresses needs them."""

    def __init__(self, address: int | None) -> None:
        self.calls: list[tuple[Any, ...]] = []

        def allocate(*arguments: Any) -> int | None:
            self.calls.append(("reserve", *arguments))
            return address

        def free(*arguments: Any) -> int:
            self.calls.append(("free", *arguments))
            return 1

        self.VirtualAlloc, self.VirtualFree = allocate, free


class Owner:
    nbytes = 1 << 40


def test_windows_reserves_without_committing_and_gives_it_back() -> None:
    kernel32, owner = Kernel32(0x7_0000_0000), Owner()
    assert replay._reserve_on_windows(owner, kernel32) == 0x7_0000_0000  # type: ignore[arg-type]
    assert kernel32.calls == [("reserve", None, 1 << 40, 0x2000, 0x01)]
    del owner
    assert kernel32.calls[1:] == [("free", 0x7_0000_0000, 0, 0x8000)]


def test_addresses_that_windows_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 8, raising=False)
    with pytest.raises(OffloadError, match=r"refused 1099511627776 bytes .* \(error 8\)"):
        replay._reserve_on_windows(Owner(), Kernel32(None))  # type: ignore[arg-type]
