"""The mount table of Linux: which file system a path is on, of what kind, and on which disk."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .files import below, list_names, parse_count, read_text

# Kinds of file systems whose files another machine has; some are FUSE's.
_NETWORK = frozenset(
    "9p afs beegfs beegfs_nodev ceph cephfs cifs coda davfs gcsfuse glusterfs goofys gpfs juicefs "
    "lustre mountpoint-s3 ncpfs nfs nfs4 orangefs panfs rclone s3fs smb2 smb3 smbfs sshfs "
    "wekafs".split()
)
_MEMORY = frozenset(("ramfs", "tmpfs"))


@dataclass(frozen=True)
class Mount:
    """One file system and where it is mounted.

    Attributes
    ----------
    root : str
        The folder of the file system that is shown.
    point : str
        Where it is shown.
    kind : str
        ``"ext4"``, ``"nfs4"`` and so on.
    source : str
        The device or the server: ``"/dev/nvme0n1p2"``, ``"server:/export"``.
    options : str
        Those of the file system, with commas.
    """

    root: str
    point: str
    kind: str
    source: str = ""
    options: str = ""

    @property
    def is_network(self) -> bool:
        """Whether another machine has the files."""
        return self.kind.removeprefix("fuse.") in _NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether the files are in memory."""
        return self.kind in _MEMORY


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts in the text of a ``mountinfo``; lines that are cut off are passed over."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 3:
            root, point, source = map(_unescape, (fields[3], fields[4], tail[1]))
            found.append(Mount(root, point, tail[0], source, tail[2]))
    return found


def _unescape(field: str) -> str:
    """Undo the mount table's octal escapes of space, tab, newline and backslash."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def mount_of(path: str, root: str = "/") -> Mount | None:
    """Return the file system that `path` is on; None where the mount table is hidden.

    Parameters
    ----------
    path : str
        Absolute, without links.
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.
    """
    table = parse_mounts(read_text(root, "/proc/self/mountinfo").text or "")
    above = [one for one in table if f"{path}/".startswith(f"{one.point.rstrip('/')}/")]
    # Of two at one place the later hides the earlier.
    return max(reversed(above), key=lambda one: len(one.point), default=None)


def is_rotational(mount: Mount, root: str = "/") -> bool | None:
    """Whether a disk with turning platters is below `mount`; None where that is not to be seen.

    A virtual disk (``vda``, ``xvda``) says so whatever is below it, and is not believed.
    """
    device = os.path.realpath(mount.source) if root == "/" else mount.source  # /dev/mapper/...
    name = os.path.basename(device)
    for disk in list_names(root, "/sys/block") if device.startswith("/dev/") else ():
        of_disk = f"/sys/block/{disk}"
        if name == disk or os.path.isdir(below(root, f"{of_disk}/{name}")):
            said = parse_count(read_text(root, f"{of_disk}/queue/rotational").text)
            is_virtual = disk.startswith(("vd", "xvd"))
            return None if said is None or (said and is_virtual) else said != 0
    return None
