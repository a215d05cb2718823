"""The files that hold a model's weights: one safetensors file, or several with an index."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from .._core import HostBuffer
from ..errors import OffloadError
from .header import MOST_HEADER_BYTES, Stored, read_header
from .origin import Origin, map_private

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_NAMES = ("model", "diffusion_pytorch_model")  # as transformers and diffusers call them
_MOST_NAME_BYTES = 1000  # of a snapshot


class WeightFile:
    """One open safetensors file.

    Parameters
    ----------
    path : Path
    opener : callable, optional
        As that of `open`.

    Attributes
    ----------
    path : str
        For messages.
    tensors : dict of str to Stored
        What is in it, by name.
    """

    def __init__(self, path: Path, opener: Callable[[str, int], int] | None = None) -> None:
        self.path = str(path)
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0, opener=opener)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            if opener is not None:
                raise
            raise OffloadError(f"'{path}' cannot be read: {error.strerror}.") from error
        try:
            self._state = self._current_state()
            self.tensors = read_header(self._file, self.path)
        except BaseException:
            self.close()
            raise

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on; may be called by several threads at once."""
        while view:
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [view], offset)
            else:  # Windows, where a file that is open cannot be replaced by another
                with open(self.path, "rb", buffering=0) as own:
                    own.seek(offset)
                    count = own.readinto(view)
            if not count:
                raise OffloadError(
                    f"'{self.path}' ended at byte {offset} while it was read: it was changed or "
                    "cut off meanwhile."
                )
            view, offset = view[count:], offset + count

    def origin(self, begin: int, nbytes: int) -> Origin:
        """Return where bytes of the file are, privately mapped.

        Raises
        ------
        OSError
            The file cannot be mapped.
        """
        return Origin(*map_private(self._file.fileno(), begin, nbytes))

    def memory(self) -> HostBuffer:
        """Return all of the file as memory for masters that stay there: see `HostBuffer`."""
        path = os.fsencode(os.path.abspath(self.path))
        file = self._file.fileno()
        if sys.platform == "win32":
            import msvcrt

            file = msvcrt.get_osfhandle(file)
        return HostBuffer(self._state[0], file=file, path=path)

    def _current_state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def identity(self) -> list[int | str]:
        """Return which file it is, and of when."""
        found = os.fstat(self._file.fileno())
        return [
            os.path.basename(self.path),
            found.st_size,
            found.st_dev,
            found.st_ino,
            *self.times_ns(),
        ]

    def times_ns(self) -> tuple[int, int]:
        """Return when it was last written, and when anything of it was last changed."""
        found = os.fstat(self._file.fileno())
        return found.st_mtime_ns, found.st_ctime_ns

    def note_use(self) -> None:
        """Note that it is used now: the time of its last access, not that of its last write."""
        file = self._file.fileno() if os.utime in os.supports_fd else self.path
        with contextlib.suppress(OSError):  # of another user, say
            os.utime(file, ns=(time.time_ns(), self.times_ns()[0]))

    def check_unwritten(self) -> None:
        """Refuse what was read where the file was written meanwhile; one in its place is no matter.

        Raises
        ------
        OffloadError
            It is not known which of the weights are from before, and which from after.
        """
        if self._current_state() != self._state:
            raise OffloadError(
                f"'{self.path}' was written while its weights were read: no one file's weights "
                "were loaded. Attach again once no program writes it."
            )

    def uncache(self) -> None:
        """Let the system drop what it has cached of the file."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        self._file.close()


class Checkpoint:
    """The weights that a path names, their files open.

    Parameters
    ----------
    path : str or path
        A safetensors file, the index of a sharded one, or a folder with either: of
        `save_pretrained`, a snapshot in the hub's cache, or a model's folder there.

    Attributes
    ----------
    tensors : dict
        By name: the file and what it holds there.

    Raises
    ------
    OffloadError
        There is no such file, it is damaged, or the folder does not say which one is meant.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self.tensors: dict[str, tuple[WeightFile, Stored]] = {}
        self._files: list[WeightFile] = []
        try:
            self._open(find_weights(Path(path)))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        wanted = read_index(path) if path.name.endswith(".json") else {}
        for name in sorted(set(wanted.values())) or [path.name]:
            file = WeightFile(path.parent / name)
            self._files.append(file)
            for key, stored in file.tensors.items():
                if key in self.tensors:
                    raise OffloadError(
                        f"'{path}': '{key}' is in two of its files, '{self.tensors[key][0].path}' "
                        f"and '{file.path}'."
                    )
                self.tensors[key] = file, stored
        for key, name in wanted.items():
            if key not in self.tensors or self.tensors[key][0].path != str(path.parent / name):
                raise OffloadError(f"'{path}': it says that '{key}' is in '{name}', but it is not.")

    def identity(self) -> list[list[int | str]]:
        """Return which files they are; see `WeightFile`."""
        return [file.identity() for file in self._files]

    def check_unwritten(self) -> None:
        """Refuse what was read where a file was written meanwhile; see `WeightFile`."""
        for file in self._files:
            file.check_unwritten()

    def uncache(self) -> None:
        """Let the system drop what it has cached of them."""
        for file in self._files:
            file.uncache()

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def find_weights(path: Path) -> Path:
    """Return the safetensors file or index that `path` means."""
    if not path.is_dir():
        if not path.exists():
            raise OffloadError(f"weights='{path}': there is no such file or folder.")
        if not path.name.endswith((SUFFIX, INDEX_SUFFIX)):
            raise OffloadError(
                f"weights='{path}' is no safetensors file (*{SUFFIX}) and no index of some "
                f"(*{INDEX_SUFFIX}); other formats can run code when they are read."
            )
        return path
    folder = snapshot(path)
    names = sorted(entry.name for entry in folder.iterdir())
    preferred = [f"{name}{suffix}" for name in _NAMES for suffix in (INDEX_SUFFIX, SUFFIX)]
    for candidates in (
        [name for name in preferred if name in names],
        [name for name in names if name.endswith(INDEX_SUFFIX)],
        [name for name in names if name.endswith(SUFFIX)],
    ):
        if len(candidates) == 1:
            return folder / candidates[0]
        if candidates:
            raise OffloadError(
                f"weights='{folder}' has several: {', '.join(candidates)}; name the one that is "
                "meant."
            )
    raise OffloadError(
        f"weights='{folder}' has no safetensors file (*{SUFFIX}); a pipeline's weights are in its "
        "subfolders, 'transformer' for example."
    )


def snapshot(folder: Path) -> Path:
    """Return the snapshot of a model's folder in the hub's cache; any other folder itself."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    if main.is_file():
        with open(main, "rb") as file:
            name = file.read(_MOST_NAME_BYTES).decode(errors="replace").strip()
        named = snapshots / _plain_name(name, str(main))
        if not os.path.isdir(named):  # Path.is_dir raises for a name too long
            raise OffloadError(
                f"'{folder}' has no snapshot '{name}', which '{main}' names; download it again."
            )
        return named
    found = list(snapshots.iterdir())
    if len(found) != 1:
        raise OffloadError(
            f"'{folder}' has {len(found)} snapshots and none is 'main'; name one of them."
        )
    return found[0]


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index of a sharded checkpoint has it."""
    try:
        found = read_json(path)
        if "weight_map" not in found:
            raise ValueError("it has no 'weight_map'")
        wanted = found["weight_map"]
        rows = {str(key): _plain_name(name, str(path)) for key, name in wanted.items()}
    except OSError as error:
        raise OffloadError(f"'{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise OffloadError(f"'{path}' is a damaged index: {error}.") from error
    if not rows:
        raise OffloadError(f"'{path}' is an index that names no tensors.")
    return rows


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, which anyone may have written.

    Raises
    ------
    ValueError
        It is no JSON, or larger than any header.
    """
    size = path.stat().st_size
    if size > MOST_HEADER_BYTES:
        raise ValueError(f"it has {size} bytes")
    try:
        return json.loads(path.read_bytes().decode())
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _plain_name(name: Any, path: str) -> str:
    """Return `name` if it names something in the same folder, whatever the system."""
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & set("/\\:\0"):
        raise OffloadError(f"'{path}' names {name!r}, which is no file next to it.")
    return name
