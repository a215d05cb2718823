"""The machine under examination: the one we run on, or a recorded one.

Checks see the machine through a `System` alone, so that a directory tree with `proc` and `sys`
inside and a few recorded answers can replace any machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cached_property

from ...host.cgroup import MemoryLimit, read_memory_limit
from ...host.disk import DiskView, read_disk
from ...host.files import Reading, below, list_names, read_text
from ...host.gpus import GpuView, read_gpus
from ...host.memory import read_meminfo
from .torch_build import TorchView, ask_torch, find_torch, imported_torch


class System:
    """One machine.

    Parameters
    ----------
    root : str
        The directory that holds `proc`, `sys` and `dev`; "/" is the live machine.
    environ : mapping, optional
        Environment variables; those of this process by default.
    platform : str, optional
        As `sys.platform`.
    gpus, torch, disk : optional
        Recorded answers; the live ones when not given and `root` is "/".
    aitoolkit : str, optional
        Path of an AI-Toolkit checkout.
    models : str, optional
        The file or folder whose disk is measured; by default the hub's cache.
    """

    def __init__(
        self,
        root: str = "/",
        *,
        environ: Mapping[str, str] | None = None,
        platform: str | None = None,
        gpus: GpuView | None = None,
        torch: TorchView | None = None,
        disk: DiskView | None = None,
        aitoolkit: str | None = None,
        models: str | None = None,
    ) -> None:
        self.root = root
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.platform = sys.platform if platform is None else platform
        self.aitoolkit = aitoolkit
        self._gpus = gpus
        self._torch = torch
        self._disk = disk
        self._models = models

    @property
    def live(self) -> bool:
        """Whether this is the machine we run on, so that system calls may be used too."""
        return self.root == "/"

    @property
    def linux(self) -> bool:
        """Whether it runs Linux, WSL included."""
        return self.platform.startswith("linux")

    def read(self, path: str) -> Reading:
        """Read a system file."""
        return read_text(self.root, path)

    def names(self, path: str) -> list[str]:
        """Return the names in a system directory."""
        return list_names(self.root, path)

    def exists(self, path: str) -> bool:
        """Whether a system file or directory is visible."""
        return os.path.exists(below(self.root, path))

    def resolved(self, path: str) -> str:
        """Return where a link of the system leads."""
        return os.path.realpath(below(self.root, path))

    @cached_property
    def gpus(self) -> GpuView:
        """The cards, asked once."""
        if self._gpus is not None:
            return self._gpus
        return read_gpus() if self.live else GpuView(why="not recorded")

    @cached_property
    def torch(self) -> TorchView:
        """The installed torch, asked once; starts a process unless this one has imported it."""
        if self._torch is not None:
            return self._torch
        if not self.live:
            return TorchView(why="not recorded")
        # What counts in a notebook is the torch that runs there, not what a new one would do.
        if self.environ is os.environ and (imported := imported_torch()) is not None:
            return imported
        return ask_torch(find_torch(), self.environ)

    @cached_property
    def disk(self) -> DiskView:
        """The disk that models are read from, measured once."""
        if self._disk is not None:
            return self._disk
        return read_disk(self._models) if self.live else DiskView(why="not recorded")

    @cached_property
    def memory_limit(self) -> MemoryLimit:
        """The control group's memory limit."""
        return read_memory_limit(self.root)

    @cached_property
    def meminfo(self) -> dict[str, int]:
        """/proc/meminfo in bytes, page counts as they are; empty when it is hidden."""
        return read_meminfo(self.root)

    @cached_property
    def wsl(self) -> bool:
        """Whether this Linux runs inside Windows."""
        release = self.read("/proc/sys/kernel/osrelease").text
        text = release or self.read("/proc/version").text or ""
        return "microsoft" in text.lower() or self.exists("/usr/lib/wsl/lib/libcuda.so.1")

    @cached_property
    def container(self) -> str | None:
        """The kind of container, as far as its usual marks show; None outside of one."""
        if self.environ.get("KUBERNETES_SERVICE_HOST"):
            return "kubernetes"
        if self.exists("/.dockerenv"):
            return "docker"
        if self.exists("/run/.containerenv"):
            return "podman"
        groups = self.read("/proc/1/cgroup").text or ""
        for mark, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc")):
            if f"/{mark}" in groups:
                return kind
        return None
