"""The codec of weights: size by distribution, GB/s of one thread by instructions, and zstd's."""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure with the C program, compiled as the package is."""
    import common

    sys.path.insert(0, str(common.ROOT / "tools"))
    import c_build
    import kernels

    zstd = ctypes.util.find_library("zstd")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = c_build.Build(c_build.optimised(), folder)
        engine = build.engine(str(kernels.build("off", folder).source))
        program = build.program("benchmarks/bench_codec.c", engine)
        command = [str(program), *([zstd] if zstd else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        yield json.loads(line)
    if not zstd:
        yield {"name": "zstd -1", "skipped": "libzstd is not on this machine"}
