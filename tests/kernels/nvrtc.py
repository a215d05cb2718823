"""Compile a kernel of csrc/kernels with NVRTC: PyPI's nvidia-cuda-nvrtc, no toolkit, no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
WHEEL = "nvidia-cuda-nvrtc"


def installed() -> bool:
    """Whether the wheel is there."""
    try:
        importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    files = importlib.metadata.files(WHEEL) or []
    names = (path for path in files if path.name.startswith(("libnvrtc.so", "nvrtc64")))
    return ctypes.CDLL(str(next(names).locate()))


@functools.cache
def compiled(name: str, architecture: str) -> bytes:
    """Compile one file of csrc/kernels.

    Parameters
    ----------
    name : str
        The file.
    architecture : str
        ``compute_80`` for PTX, ``sm_80`` for machine code.

    Raises
    ------
    RuntimeError
        With the compiler's words.
    """
    library = _library()
    headers = {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*.h"))}
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        (FOLDER / name).read_bytes(),
        name.encode(),
        len(headers),
        (ctypes.c_char_p * len(headers))(*headers.values()),
        (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers)),
    )
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    try:
        if status == 0:
            array = (ctypes.c_char_p * len(options))(*options)
            status = library.nvrtcCompileProgram(program, len(options), array)
        if status != 0:
            raise RuntimeError(f"{name}: {_text(program, 'ProgramLog').decode()}")
        made = _text(program, "PTX" if architecture.startswith("compute") else "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return made


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(_library(), f"nvrtcGet{what}")(program, text)
    return text.raw[: size.value]
