"""Its files: known by content, replaced and restored byte for byte; every way in, from fresh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oracle_offload.aitoolkit import checkout

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
USE = """
import sys
import torch
from toolkit.memory_management import MemoryManager, sync_grad_transfers
from toolkit.memory_management.manager import MemoryManager as Same
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
assert Same is MemoryManager
sys.path.insert(0, sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
x = torch.randn(2, 64)
expected = model(x)
model.requires_grad_(False)
MemoryManager.attach(model, torch.device("cpu"))
model.to(torch.device("cpu"))
assert torch.equal(model(x), expected)
(state,) = open_states()
(held,) = state.listeners
assert len(held.layers) == 4 and simulator.stats().h2d_bytes >= 4 * 4 * 64 * 65
sync_grad_transfers()
MemoryManager.detach(model)
assert not open_states() and torch.equal(model(x), expected)
MemoryManager.attach(model, torch.device("cpu"))
model(x)
MemoryManager.free(model)
MemoryManager.release_cached_memory()
assert not open_states() and all(p.is_meta for p in model.parameters())
print(MemoryManager.__module__)
"""


@pytest.fixture
def fresh(toolkit, tmp_path):
    """A fresh checkout, as far as its memory management goes, though ours may be installed."""
    copied = tmp_path / "ai-toolkit"
    (copied / "toolkit").mkdir(parents=True)
    shutil.copy(toolkit / "toolkit" / "__init__.py", copied / "toolkit")
    shutil.copytree(toolkit / checkout.FOLDER, copied / checkout.FOLDER)
    checkout.uninstall(copied, print)
    return copied


def use(fresh, code=USE):
    done = subprocess.run(
        [sys.executable, "-c", code, str(fresh)],
        cwd=fresh,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{fresh}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def contents(fresh):
    folder = fresh / checkout.FOLDER
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "oracle_offload", "aitoolkit", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
    )


OURS = "oracle_offload.aitoolkit.memory_manager"


def test_this_checkout_is_known(toolkit):
    assert checkout.status(toolkit) in ("installed", "not installed")


def test_install_status_uninstall(fresh):
    before = contents(fresh)
    for _ in range(2):
        assert command("install", fresh).returncode == 0
        assert command("status", fresh).returncode == 0
        assert checkout.status(fresh) == "installed"
    assert use(fresh) == OURS
    assert command("uninstall", fresh).returncode == 0
    assert contents(fresh) == before


def test_patch(fresh):
    diff = command("patch", fresh).stdout
    subprocess.run(["git", "apply", "-"], cwd=fresh, input=diff, check=True)
    assert checkout.status(fresh) == "installed" and use(fresh) == OURS
    subprocess.run(["git", "apply", "-R", "-"], cwd=fresh, input=diff, check=True)
    assert checkout.status(fresh) == "not installed"


def test_install_in_the_process(fresh):
    first = "import oracle_offload.aitoolkit; oracle_offload.aitoolkit.install()\n"
    assert use(fresh, first + USE) == OURS


def test_our_manager_modules_alone_under_its_manager(fresh):
    shutil.copy(ROOT / "oracle_offload/aitoolkit/manager_modules.py", fresh / checkout.FOLDER)
    assert use(fresh) == "toolkit.memory_management.manager"


def test_our_manager_modules_alone_manage_every_kind_that_it_hands_over(fresh):
    shutil.copy(ROOT / "oracle_offload/aitoolkit/manager_modules.py", fresh / checkout.FOLDER)
    code = f"""
import sys
sys.path[1:1] = [{str(HERE.parent / "training")!r}]
import torch
from ostris import to_ostris
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from toolkit.memory_management import MemoryManager
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
).requires_grad_(False)
to_ostris(model[2])
x = torch.randn(2, 4, 64, 64, requires_grad=True)
expected = model(x)
(gradient,) = torch.autograd.grad(expected.sum(), x)
MemoryManager.attach(model, torch.device("cpu"))
found = model(x)
assert torch.equal(found, expected)
assert torch.equal(torch.autograd.grad(found.sum(), x)[0], gradient)
(held,) = [held for state in open_states() for held in state.listeners]
kinds = [type(layer).__name__ for layer in held.layers]
assert kinds == ["Conv2dLayer", "LinearLayer", "QuantisedLayer"], kinds
assert simulator.stats().h2d_bytes >= held.weight_bytes
MemoryManager.detach(model)
assert not open_states() and torch.equal(model(x), expected)
print(MemoryManager.__module__)
"""
    assert use(fresh, code) == "toolkit.memory_management.manager"


def test_our_manager_alone_is_refused(fresh):
    shutil.copy(ROOT / "oracle_offload/aitoolkit/manager.py", fresh / checkout.FOLDER)
    with pytest.raises(AssertionError, match="not oracle_offload's"):
        use(fresh)


def test_its_modules_import_unmodified(toolkit):
    code = """
import importlib
import oracle_offload.aitoolkit
oracle_offload.aitoolkit.install()
found = 0
for name in (
    "toolkit.unloader",
    "toolkit.lora_special",
    "jobs.process.BaseSDTrainProcess",
    "extensions_built_in.sd_trainer.SDTrainer",
    "extensions_built_in.captioner.Qwen3OmniCaptioner",
):
    module = importlib.import_module(name)
    for key in ("MemoryManager", "sync_grad_transfers"):
        if hasattr(module, key):
            assert getattr(module, key).__module__.startswith("oracle_offload"), (name, key)
            found += 1
assert found == 3
"""
    use(toolkit, code)
