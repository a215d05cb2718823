"""The arena of a replay has addresses alone: no memory is taken for it, on any system."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from oracle_offload import _core
from oracle_offload.engine import replay
from oracle_offload.errors import OffloadError

REPLAY = """
import ctypes
from oracle_offload.engine import replay
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
size = [1 << 14, 3 << 12] if coded else 1 << 14
units = [[(unit, [size])] for unit in range(20)]
staging = 4 << 14 if coded else 0
print(replay.predict(events, units, [1 << 17], staging=staging)["predicted_h2d_bytes"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize("coded", [False, True])
def test_a_replay_touches_no_byte_of_its_arena(coded: bool) -> None:
    """Nor of the memory that coded units pass through; these travel in fewer bytes."""
    done = subprocess.run(
        [sys.executable, "-c", f"coded = {coded}\n{REPLAY}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    least = 12 << 14
    assert int(done.stdout) >= 0.7 * least
    assert int(done.stdout) < 0.8 * (40 << 14) if coded else int(done.stdout) >= least


@pytest.mark.parametrize(
    ("nbytes", "share"),
    [(1 << 17, 0.68), (3 << 18, 0.8), ((18 << 20) + 2048, 0.7), (8 << 20, 0.7), (6000, 0.75)],
)
def test_a_coded_tensor_takes_about_what_is_said(nbytes: int, share: float) -> None:
    """It is encoded weights, which the engine reads the headers of."""
    masters = replay._Masters(1)
    address, whole, coded, kind = masters.extent(0, [nbytes, int(share * nbytes)])
    assert whole == nbytes
    assert coded == pytest.approx(share * nbytes, rel=0.03 if nbytes > 1 << 16 else 0.1)
    _core.check_coded(kind, address, coded, 1, 0, nbytes // 2)


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


def imitate_windows(monkeypatch: pytest.MonkeyPatch, address: int | None) -> Kernel32:
    kernel32 = Kernel32(address)

    def library(name: str, use_last_error: bool) -> Kernel32:
        assert (name, use_last_error) == ("kernel32", True)
        return kernel32

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", library, raising=False)
    return kernel32


def test_windows_reserves_without_committing_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel32 = imitate_windows(monkeypatch, 0x7_0000_0000)
    arena = replay._Reserved(1 << 40)
    assert (arena.address, arena.nbytes) == (0x7_0000_0000, 1 << 40)
    assert kernel32.calls == [("reserve", None, 1 << 40, 0x2000, 0x01)]
    del arena
    assert kernel32.calls[1:] == [("free", 0x7_0000_0000, 0, 0x8000)]
    # Without declared types, ctypes cuts an address to 32 bits.
    address = ctypes.c_void_p
    for call in (kernel32.VirtualAlloc, kernel32.VirtualFree):
        assert call.argtypes[:2] == (address, ctypes.c_size_t)
    assert kernel32.VirtualAlloc.restype is address


def test_addresses_that_windows_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_windows(monkeypatch, None)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 8, raising=False)
    with pytest.raises(OffloadError, match=r"refused 1099511627776 bytes .* \(error 8\)"):
        replay._Reserved(1 << 40)
