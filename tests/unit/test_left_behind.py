"""A test that leaves torch or the process changed is named, with what it changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHANGES = {
    "depth of autocast": "torch.autocast_increment_nesting()",
    "autocast of cuda": 'torch.set_autocast_enabled("cuda", True)',
    "autocast's type of cuda": 'torch.set_autocast_dtype("cuda", torch.bfloat16)',
    "is_autocast_cache_enabled": "torch.set_autocast_cache_enabled(False)",
    "is_grad_enabled": "torch._C._set_grad_enabled(False)",
    "is_inference_mode_enabled": "kept.append(torch._C._InferenceMode(True))",
    "_len_torch_dispatch_stack": "FlopCounterMode(display=False).__enter__()",
    "_len_torch_function_stack": "BaseTorchFunctionMode().__enter__()",
    "hooks of saved tensors": "torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()",
    "is_anomaly_enabled": "torch.autograd.set_detect_anomaly(True)",
    "get_default_dtype": "torch.set_default_dtype(torch.float64)",
    "default device": 'torch.set_default_device("meta")',
    "are_deterministic_algorithms_enabled": "torch.use_deterministic_algorithms(True)",
    "get_float32_matmul_precision": 'torch.set_float32_matmul_precision("high")',
    "precision of mkldnn conv": 'torch.backends.mkldnn.conv.fp32_precision = "ieee"',
    "_get_cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "_get_mkldnn_enabled": "torch._C._set_mkldnn_enabled(False)",
    "default generator": "torch.default_generator = torch.Generator()",
    "SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "SIGINT": "signal.signal(signal.SIGINT, lambda *_: None)",
    "threads": "threading.Thread(target=time.sleep, args=(4,)).start()",
}
HEAD = """
import signal, threading, time
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

kept = []

def test_that_changes_nothing():
    with torch.autocast("cpu"), torch.no_grad():
        torch.nn.Linear(2, 2)(torch.zeros(2))
"""
CONFTEST = """
import sys
import pytest
sys.path.insert(0, {tools!r})
import left_behind

@pytest.fixture(autouse=True)
{fixture}
"""


def the_fixture() -> str:
    """Return the source of the fixture that all tests of this repository have."""
    text = (ROOT / "conftest.py").read_text(encoding="utf-8")
    begin = text.index("def leaves_the_process_as_it_was() -> ")
    source = text[begin : text.index("\n\n\n", begin)]
    return source.replace(" -> Generator[None, None, None]", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_each_change_is_named_by_the_test_that_made_it(tmp_path: Path) -> None:
    tests = [f"def test_{nth}():\n    {change}\n" for nth, change in enumerate(CHANGES.values())]
    (tmp_path / "test_changes.py").write_text(HEAD + "\n".join(tests))
    conftest = CONFTEST.format(tools=str(ROOT / "tools"), fixture=the_fixture())
    (tmp_path / "conftest.py").write_text(conftest)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rE"),
            *("-p", "no:cacheprovider", "--tb=no"),
        ],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    rows = dict(re.findall(r"^ERROR \S+::test_(\d+) - .*left behind: (.*)$", done.stdout, re.M))
    for nth, name in enumerate(CHANGES):
        assert f"{name}: " in rows[str(nth)], done.stdout[-3000:]
    assert f"{len(CHANGES) + 1} passed, {len(CHANGES)} errors" in done.stdout
