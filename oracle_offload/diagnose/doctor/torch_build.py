"""The installed torch: its version and CUDA build, found without importing it.

Importing torch takes seconds and may fail on the very machine that is being examined, so the
version is read from its files. What only torch itself can say, the allocator settings in effect, is
asked in a process of its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PROBE_TIMEOUT_S = 60.0

# Runs in a fresh interpreter. The allocator reads its variable at its first use; the setter runs
# the value through the parser of the CUDA allocator as well, which the getter alone does not.
_PROBE = """
import json
out = {}
try:
    import torch
    out["version"] = str(torch.__version__)
    out["cuda_available"] = bool(torch.cuda.is_available())
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if read is not None:
        out["settings"] = read()
        if write is not None and out["settings"]:
            write(out["settings"])
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("oracle_offload:" + json.dumps(out))
"""


@dataclass(frozen=True)
class TorchView:
    """The installed torch.

    Attributes
    ----------
    version : str or None
        As `torch.__version__`: "2.13.0+cu128".
    cuda, hip : str or None
        The CUDA or ROCm version it was built with; both None is a CPU build.
    location : str or None
        The directory of the package.
    settings : str or None
        The allocator settings that torch says are in effect; None when it was not asked or
        cannot say.
    settings_error : str or None
        The error with which torch refuses the settings.
    import_error : str or None
        Why `import torch` does not work.
    why : str
        Why something above is unknown.
    """

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    location: str | None = None
    settings: str | None = None
    settings_error: str | None = None
    import_error: str | None = None
    why: str = ""

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version, None when unknown."""
        return parse_release(self.version)


def parse_release(version: str | None) -> tuple[int, int] | None:
    """Return (major, minor) of a version such as "12.8", "580.65.06" or "2.13.0+cu128"."""
    match = re.match(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?", version or "")
    return (int(match[1]), int(match[2] or 0)) if match else None


def find_torch() -> TorchView:
    """Find the torch that `import torch` would give, without importing it; never raises."""
    import importlib.util

    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError) as error:
        return TorchView(why=f"torch could not be looked up: {error}")
    if spec is None or not spec.origin:
        return TorchView(why="torch is not installed for this Python")
    location = os.path.dirname(spec.origin)
    try:
        with open(os.path.join(location, "version.py"), encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        return TorchView(location=location, why=f"torch/version.py: {error.strerror}")
    return TorchView(
        version=_assigned(text, "__version__"),
        cuda=_assigned(text, "cuda"),
        hip=_assigned(text, "hip"),
        location=location,
    )


def _assigned(text: str, name: str) -> str | None:
    """Return the string literal assigned to `name` in version.py, None for `None` or nothing."""
    match = re.search(rf"^{name}\s*(?::[^=\n]*)?=\s*(['\"])(.*?)\1", text, re.MULTILINE)
    return match[2] if match else None


def imported_torch() -> TorchView | None:
    """Describe the torch this process has imported, None when it has not; never raises."""
    torch: Any = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "__version__", None)
    if version is None:
        return None
    settings, refused, why = None, None, ""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:
        why = "this torch cannot say which settings it uses"
    else:
        try:
            settings = str(read())
        except Exception as error:
            refused = f"{type(error).__name__}: {error}".splitlines()[0]
    return TorchView(
        version=str(version),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        location=os.path.dirname(str(torch.__file__)),
        settings=settings,
        settings_error=refused,
        why=why,
    )


def ask_torch(
    found: TorchView, environ: Mapping[str, str], timeout_s: float = _PROBE_TIMEOUT_S
) -> TorchView:
    """Ask torch, in a process of its own, which allocator settings are in effect; never raises.

    Parameters
    ----------
    found : TorchView
        What `find_torch` returned; given back unchanged when there is no torch to ask.
    environ : mapping
        The environment of the process.
    timeout_s : float
        After this many seconds the process is ended and the reason noted.
    """
    if found.version is None:
        return found
    import json
    import subprocess
    from dataclasses import replace

    try:
        # No shell; stdin closed so that nothing can wait for it.
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return replace(found, why=f"torch was still importing after {timeout_s:g} s")
    except OSError as error:
        return replace(found, why=f"no process could be started to ask torch: {error}")
    line = next(
        (line for line in done.stdout.splitlines() if line.startswith("oracle_offload:")), None
    )
    if line is None:
        return replace(found, import_error=f"the process ended with status {done.returncode}")
    said = json.loads(line.partition(":")[2])
    refused = said.get("error")
    if "version" not in said:
        return replace(found, import_error=refused)
    settings = said.get("settings")
    why = "" if settings is not None or refused else "this torch cannot say which settings it uses"
    return replace(found, settings=settings, settings_error=refused, why=why)
