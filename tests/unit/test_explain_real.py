"""Messages provoked here and now, by the versions that are installed, and read back.

Every process that is made to run out is a child with a small limit of its own.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oracle_offload.diagnose.explain import explain_oom, is_oom
from oracle_offload.diagnose.explain.host import explain_exit, kill_counter

MiB = 1 << 20
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
needs_numpy = pytest.mark.skipif(
    importlib.util.find_spec("numpy") is None, reason="numpy is not installed"
)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals of Linux")


def child(
    code: str, *, address_space: int | None = None, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python, under a limit on its address space where one is given."""

    def prepare() -> None:
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        if before is not None:
            before()

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        preexec_fn=prepare,
    )


@needs_torch
def test_the_cpu_allocator_of_the_installed_torch() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, dtype=torch.uint8)
    report = explain_oom(caught.value)
    assert (report.template, report.cause.name) == ("cpu-allocator-enomem", "one_tensor")
    assert report.value("requested") == 1 << 46
    said = str(report)
    assert report.cause.title == "This one tensor exceeds your RAM" and report.cause.title in said
    assert "64.0 TiB were asked for at once" in said or "65536.00 GiB were asked for" in said
    assert "workers" not in said and report.fixes[0].key == "check_size"
    assert is_oom(caught.value)


@needs_torch
def test_a_size_nobody_can_mean() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)
    assert explain_oom(caught.value).cause.name == "bad_size"


@needs_torch
@linux
def test_shared_memory_larger_than_dev_shm() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.UntypedStorage._new_shared(1 << 42)
    report = explain_oom(caught.value)
    assert (report.backend, report.cause.name) == ("host", "shared_memory")


@needs_torch
@linux
def test_a_killed_dataloader_worker() -> None:
    run = child(
        """
        import os, signal, torch
        class Suicidal(torch.utils.data.Dataset):
            def __len__(self): return 2
            def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)
        list(torch.utils.data.DataLoader(Suicidal(), num_workers=1))
        """
    )
    report = explain_oom(run.stderr)
    assert (report.template, report.suspected) == ("dataloader-killed", True)
    assert report.cause.name == "host_memory"


@needs_numpy
def test_numpy_asks_for_too_much() -> None:
    import numpy

    with pytest.raises(MemoryError) as caught:
        numpy.empty(1 << 43)
    report = explain_oom(caught.value)
    assert report.template == "numpy-memory-error"
    assert report.value("requested") == 8 << 43
    assert is_oom(caught.value)


@linux
def test_a_child_at_its_address_space_limit() -> None:
    run = child("bytearray(512 << 20)", address_space=256 * MiB)
    report = explain_oom(run.stderr)
    assert (report.template, report.cause.name) == ("memory-error", "host_memory")


@needs_torch
@linux
@pytest.mark.parametrize(
    "module", ["torch", pytest.param("bitsandbytes", marks=needs_bitsandbytes)]
)
def test_an_import_that_does_not_fit_the_limit(module: str) -> None:
    run = child(f"import {module}", address_space=300 * MiB)
    assert run.returncode != 0
    report = explain_oom(run.stderr)
    assert (report.template, report.cause.name) == ("map-segment", "memory_limit")


@needs_bitsandbytes
def test_importing_bitsandbytes_without_a_gpu_is_no_alarm() -> None:
    run = child("import bitsandbytes")
    assert not explain_oom(run.stderr + run.stdout).found


@linux
def test_what_a_shell_says_of_a_killed_child() -> None:
    run = subprocess.run(
        ["bash", "-c", "sh -c 'kill -9 $$'; true"], capture_output=True, text=True, timeout=30
    )
    report = explain_oom(run.stderr)
    assert (report.template, report.suspected) == ("shell-killed", True)


@linux
def test_an_exit_by_sigkill_alone_is_a_suspicion() -> None:
    run = child("import os; os.kill(os.getpid(), 9)")
    assert run.returncode == -signal.SIGKILL
    report = explain_exit(run.returncode, run.stderr)
    assert (report.suspected, report.cause.name) == (True, "host_memory")
    assert not explain_exit(0, "").found
    assert not explain_exit(-signal.SIGTERM, "").found


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 64 MiB, where this machine lets us make one."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / f"oracle_offload_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 * MiB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error.strerror}")
    swap = group / "memory.swap.max"
    if swap.exists():
        swap.write_text("0")
    yield group
    group.rmdir()


@linux
def test_a_child_really_killed_by_its_control_group(memory_group: Path) -> None:
    before = kill_counter(memory_group)
    assert before == 0
    run = child(
        "held = [bytearray(b'x') * (1 << 20) for _ in range(256)]",
        before=lambda: (memory_group / "cgroup.procs").write_text(str(os.getpid())) and None,
    )
    assert run.returncode == -signal.SIGKILL
    report = explain_exit(run.returncode, run.stderr, group=memory_group, kills_before=before)
    assert (report.suspected, report.cause.name, report.cause.confidence) == (
        False,
        "memory_limit",
        "high",
    )
    assert report.value("limit") == 64 * MiB
