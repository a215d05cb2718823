"""AI-Toolkit's checkout on disk: what is installed there, and how our files get in and out again.

Two files are replaced; each original is kept next to its replacement. Originals are known by their
content: the rest of a checkout may be of any age. `manager_modules.py` is put in first and taken
out last, because it works alone under the original `manager.py`, and not the reverse.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import OffloadError

FOLDER = "toolkit/memory_management"
NAMES = ("manager_modules.py", "manager.py")  # in the order in which they go in
_BACKUP = ".before-oracle-offload"
_HERE = Path(__file__).parent
_OURS = re.compile(rb'^RELEASE = "([^"]+)"', re.MULTILINE)

# Originals by the first half of their SHA-256, line ends as \n, with the day each came.
KNOWN = {
    "manager.py": {
        "d7e3ed5cc2a4e0630bb66f0ab3d75d80": "2026-08-12",
        "451c1bc4d00eb036430daa67384fc860": "2026-08-09",
        "0f1fe47599a2f7b56990d6c0a860c3a1": "2026-07-11",
        "8e9e18a84916afc3cc6ac131055a8d1f": "2026-07-11",
        "f5e229d3bf757e78dfd5dc769fc06834": "2026-06-07",
    },
    "manager_modules.py": {
        "01733a32f305a597b19bdf0716562c76": "2026-08-08",
        "3d6839a9a80e7655eb66326d8a7225f7": "2026-08-07",
        "ce1e7baaf70ca5c4ff77e4c9aa2ed622": "2026-07-11",
        "8f343664f8ff9d4a26c16afd8baa861d": "2026-06-07",
        "964b3aa88c82d8738572fa3d68d4eb7b": "2026-06-07",
        "948ccfde36ee4b619a2faf618acefd00": "2026-06-07",
        "cc892c130b9d5aad692e75dc7599fcc5": "2026-06-07",
    },
}


class CheckoutError(OffloadError):
    """The checkout is not one to change; says what was found, and what to do."""


def refuse_strange_neighbour(release: str, beside: str | None, file: str) -> None:
    """Raise where `manager.py` of `release` is next to a `manager_modules.py` that is not of it.

    Raises
    ------
    ImportError
        It is AI-Toolkit's own, or that of another release.
    """
    if beside != release:
        whose = "not oracle_offload's" if beside is None else f"of oracle_offload {beside}"
        raise ImportError(
            f"{file} is of oracle_offload {release}, but manager_modules.py next to it is "
            f"{whose}; run 'oracle-offload aitoolkit install PATH' with the path of this checkout, "
            "or take both back with 'git checkout toolkit/memory_management'."
        )


@dataclass(frozen=True)
class File:
    """One of the two files of a checkout.

    Attributes
    ----------
    path : Path
        Where it is.
    content : bytes
        What is in it.
    """

    path: Path
    content: bytes

    @property
    def backup(self) -> Path:
        """Where its original is kept while ours is in its place."""
        return self.path.with_name(self.path.name + _BACKUP)

    @property
    def release(self) -> str | None:
        """The release that it is of, if it is ours."""
        found = _OURS.search(self.content)
        return found[1].decode() if found and b"oracle_offload" in self.content else None

    @property
    def day(self) -> str | None:
        """The day that this original came, if it is a known one."""
        return KNOWN[self.path.name].get(digest(self.content))

    @property
    def ours(self) -> bytes:
        """What `install` puts there."""
        return (_HERE / self.path.name).read_bytes()

    def describe(self) -> str:
        """Say what it is."""
        if self.content == self.ours:
            return f"oracle_offload {self.release}"
        if self.release is not None:
            return f"oracle_offload {self.release}, not of this installation"
        if self.day is not None:
            return f"AI-Toolkit's, of {self.day}"
        return f"unknown (SHA-256 {digest(self.content)})"


def digest(content: bytes) -> str:
    """Return what tells originals apart, whatever git made of their line ends."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:32]


def folder(root: str | os.PathLike[str]) -> Path:
    """Return the folder that changes, as it is found from everywhere."""
    return (Path(root) / FOLDER).resolve()


def read(root: str | os.PathLike[str]) -> list[File]:
    """Return the two files of the checkout at `root`, in the order in which they go in.

    Raises
    ------
    CheckoutError
        It has no such files.
    """
    files = []
    for name in NAMES:
        path = Path(root) / FOLDER / name
        try:
            files.append(File(path, path.read_bytes()))
        except OSError as error:
            raise CheckoutError(
                f"{path} cannot be read ({error.strerror}); give the path of an AI-Toolkit "
                "checkout, the folder that run.py is in."
            ) from error
    return files


def status(root: str | os.PathLike[str]) -> str:
    """Return "installed", "not installed", "partly installed" or "unknown"."""
    files = read(root)
    if all(file.content == file.ours for file in files):
        return "installed"
    if any(file.release is None and file.day is None for file in files):
        return "unknown"
    if any(file.release is not None for file in files):
        return "partly installed"
    return "not installed"


def install(root: str | os.PathLike[str], tell: Callable[[str], object]) -> int:
    """Put our files into a checkout; return how many were changed.

    Parameters
    ----------
    root : path
        The checkout.
    tell : callable
        Called with a line for each step.

    Raises
    ------
    CheckoutError
        A file is neither ours nor a known original; nothing was changed.
    """
    files = read(root)
    _refuse_unknown(files)
    changed = 0
    for file in files:
        if file.content == file.ours:
            tell(f"{file.path}: is {file.describe()} already")
            continue
        if file.release is None:
            _write(file.backup, file.content, file.path)
            kept = f"; the original is kept as {file.backup.name}"
        else:
            kept = ""
        _write(file.path, file.ours, file.path)
        tell(f"{file.path}: {file.describe()} -> {read_one(file.path).describe()}{kept}")
        changed += 1
    return changed


def uninstall(root: str | os.PathLike[str], tell: Callable[[str], object]) -> int:
    """Bring the originals back, byte for byte; return how many files were changed.

    Raises
    ------
    CheckoutError
        The original of a file of ours is not there; nothing was changed.
    """
    files = read(root)
    for file in files:
        if file.release is not None and not file.backup.exists():
            raise CheckoutError(
                f"{file.path} is {file.describe()}, and {file.backup.name} with the original is "
                f"gone; bring it back with 'git checkout {FOLDER}' in the checkout."
            )
    changed = 0
    for file in reversed(files):
        if file.release is not None:
            _write(file.path, file.backup.read_bytes(), file.backup)
            tell(f"{file.path}: {file.describe()} -> {read_one(file.path).describe()}")
            changed += 1
        else:
            tell(f"{file.path}: {file.describe()}, left as it is")
        file.backup.unlink(missing_ok=True)
    return changed


def patch(root: str | os.PathLike[str]) -> bytes:
    """Return what ``git apply`` makes of the originals in a checkout what `install` puts there.

    Raises
    ------
    CheckoutError
        A file is not a known original.
    """
    files = read(root)
    originals = [
        File(file.path, file.backup.read_bytes())
        if file.release is not None and file.backup.exists()
        else file
        for file in files
    ]
    _refuse_unknown(originals)
    out: list[bytes] = []
    for file in reversed(originals):
        name = f"{FOLDER}/{file.path.name}".encode()
        for line in difflib.diff_bytes(
            difflib.unified_diff,
            file.content.splitlines(keepends=True),
            file.ours.splitlines(keepends=True),
            b"a/" + name,
            b"b/" + name,
        ):
            out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


def read_one(path: Path) -> File:
    """Return a file as it is now."""
    return File(path, path.read_bytes())


def _refuse_unknown(files: list[File]) -> None:
    for file in files:
        if file.release is None and file.day is None:
            known = ", ".join(f"{day} ({key[:12]})" for key, day in KNOWN[file.path.name].items())
            raise CheckoutError(
                f"{file.path} is of a version that is not known: SHA-256 "
                f"{digest(file.content)[:12]}, {len(file.content)} bytes. Known are those of "
                f"{known}. Nothing was changed. Update AI-Toolkit or oracle_offload; for one "
                "process without any change of files, call oracle_offload.aitoolkit.install()."
            )


def _write(path: Path, content: bytes, like: Path) -> None:
    """Write a file as a whole, or not at all, with the mode of `like`."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        shutil.copymode(like, new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
