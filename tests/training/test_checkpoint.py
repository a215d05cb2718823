"""Checkpoints: whole or not at all; what resumes has the bits of what was never killed."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_kills import Data, make, train
from equality import assert_same, attached
from torch import nn

from oracle_offload import OffloadError
from oracle_offload.host.replace import replace_file, sync_folder
from oracle_offload.train import Checkpoint
from oracle_offload.train.survive.checkpoint import _on_host
from oracle_offload.train.survive.random_state import RandomState

HERE = Path(__file__).parent


def run(what, folder, *more):
    command = [sys.executable, str(HERE / "checkpoint_kills.py"), what, str(folder)]
    command += map(str, more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_whenever_a_save_is_killed_the_old_or_the_new_one_is_there(tmp_path):
    found = run("kills", tmp_path)
    assert found["old"] + found["new"] >= 100
    assert found["old"] > 50 and found["new"] >= 4  # before the rename, and after it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_and_resumes_end_as_if_there_had_been_none(tmp_path, kills):
    assert run("cycles", tmp_path, kills) == {"killed": kills, "same": True}


class Disk:
    """What a disk could hold after each call, if the power failed then.

    Bytes that were not brought to it may be lost, all of them or the last ones; a name that was
    not may be the old or the new one.
    """

    def __init__(self, monkeypatch, path):
        self.path, self.files, self.names = str(path), {}, {str(path): b"old"}
        self.open_files, self.after, self.fail_at, self.count = {}, [], None, 0
        honest = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace")}

        def note(name):
            def call(*args):
                self.count += 1
                if self.count == self.fail_at:
                    raise OSError(errno.ENOSPC, "No space left on device")
                result = honest[name](*args)
                getattr(self, name)(result, *args)
                self.after.append((name, self.possible()))
                return result

            return call

        for name in honest:
            monkeypatch.setattr(os, name, note(name))
        path.write_bytes(b"old")
        self.pending = None

    def open(self, file, path, *_):
        self.open_files[file] = str(path)
        if not os.path.isdir(path):
            self.files[str(path)] = [b"", b""]  # written, and brought to the disk

    def write(self, size, file, data):
        self.files[self.open_files[file]][0] += bytes(data[:size])

    def fsync(self, _, file):
        path = self.open_files[file]
        if path in self.files:
            self.files[path][1] = self.files[path][0]
        elif self.pending is not None:
            self.names[self.path] = self.pending
            self.pending = None

    def replace(self, _, source, target):
        assert target == self.path
        self.pending = self.files[source]

    def possible(self):
        found = []
        for each in [self.names[self.path], *([self.pending] if self.pending else [])]:
            found += [each] if isinstance(each, bytes) else [each[1], each[0]]
        return found


def test_whenever_the_power_fails_the_old_or_the_new_file_is_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with monkeypatch.context() as patched:
        disk = Disk(patched, path)
        replace_file(path, lambda sink: [sink.write(b"ne"), sink.write(b"w")])
    assert [name for name, _ in disk.after] == [
        *("open", "write", "write", "fsync", "replace", "open", "fsync")
    ]
    for name, possible in disk.after:
        assert set(possible) <= {b"old", b"new"}, name
    assert disk.after[-1][1] == [b"new", b"new"]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("leave_out", ["file", "folder"])
def test_a_rename_without_one_of_its_syncs_would_be_noticed(leave_out, tmp_path, monkeypatch):
    path = tmp_path / "file"
    with monkeypatch.context() as patched:
        disk = Disk(patched, path)
        honest = os.fsync

        def lossy(file):
            if os.path.isdir(disk.open_files[file]) != (leave_out == "folder"):
                honest(file)

        patched.setattr(os, "fsync", lossy)
        replace_file(path, lambda sink: sink.write(b"new"))
    states = [set(possible) for _, possible in disk.after]
    if leave_out == "file":
        assert any(not each <= {b"old", b"new"} for each in states)
    else:
        assert states[-1] == {b"old", b"new"}  # the new one is not certain at the end


def test_a_full_disk_at_any_write_leaves_the_old_checkpoint_and_nothing_beside_it(
    tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    _, _, _, data, checkpoint = make(path)
    checkpoint.save(1)
    old, number, failures = path.read_bytes(), 0, 0
    data.position = 7
    honest = os.write
    while True:
        number += 1
        count = 0

        def write(file, rest, number=number):
            nonlocal count
            count += 1
            if count == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            if count == number:  # the last bytes that find room
                return honest(file, rest[: len(rest) // 2])
            return honest(file, rest)

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", write)
            try:
                checkpoint.save(2)
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC
        failures += 1
        assert path.read_bytes() == old and os.listdir(tmp_path) == ["run.pt"]
        assert checkpoint.saved == 1
    assert failures > 40 and make(path)[-1].load() == 2


def test_a_system_that_writes_nothing_or_renames_nothing_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: 0)
        with pytest.raises(OSError, match="3 of 3 bytes were not written"):
            replace_file(path, lambda sink: sink.write(b"new"))
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *args: (_ for _ in ()).throw(OSError(5, "planted")))
            with pytest.raises(OSError, match="planted"):
                replace_file(path, lambda sink: sink.write(b"new"))
        assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(KeyError):
        replace_file(path, lambda sink: {}["x"])
    assert os.listdir(tmp_path) == ["file"]


def test_after_a_write_that_failed_none_is_tried(tmp_path, monkeypatch):
    tried, answered = [], []

    def write(file, data):
        tried.append(bytes(data))
        raise OSError(errno.ENOSPC, "planted")

    def save(sink):  # as a library in C, which no exception may pass through
        answered.extend([sink.write(b"one"), sink.write(b"more")])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="planted"):
        replace_file(tmp_path / "file", save)
    assert tried == [b"one"] and answered == [3, 4] and os.listdir(tmp_path) == []


def test_a_file_in_the_current_folder_is_replaced_whole_and_all_is_closed(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"x.pt.{os.getpid()}.new").write_bytes(b"longer than what is written now")
    left = tmp_path / f"x.pt.{ended.pid}.new"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    held = set()
    honest_open, honest_close = os.open, os.close

    def opened(*arguments):
        held.add(file := honest_open(*arguments))
        return file

    def closed(file):
        held.discard(file)
        honest_close(file)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "close", closed)
    replace_file("x.pt", lambda sink: sink.write(b"new"))
    assert held == set() and os.listdir() == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError):
        replace_file("x.pt", lambda sink: 1 / 0)
    assert held == set() and os.listdir() == ["x.pt"]


def test_folders_are_synced_where_the_system_wants_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        sync_folder(str(tmp_path / "file"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "name", "nt")
        sync_folder(str(tmp_path / "there is no such folder"))
    with pytest.raises(FileNotFoundError):
        sync_folder(str(tmp_path / "there is no such folder"))


def test_a_file_system_that_syncs_no_folders_will_do_and_another_error_is_one(
    tmp_path, monkeypatch
):
    path, honest = tmp_path / "file", {name: getattr(os, name) for name in ("fsync", "open")}
    refused = [errno.EINVAL]

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(refused[0], "planted")
        honest["fsync"](file)

    def closed(name, *more):
        if name == str(tmp_path):
            raise PermissionError(errno.EACCES, "planted")
        return honest["open"](name, *more)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(path, lambda sink: sink.write(b"one"))
    assert path.read_bytes() == b"one"
    refused[0] = errno.EIO
    with pytest.raises(OSError, match="planted"):
        replace_file(path, lambda sink: sink.write(b"two"))
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["file"]
    monkeypatch.setattr(os, "open", closed)
    replace_file(path, lambda sink: sink.write(b"three"))
    assert path.read_bytes() == b"three"


def test_an_interrupt_in_a_save_is_one_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint = make(tmp_path / "run.pt")[-1]
    checkpoint.save(1)
    old, honest, count = (tmp_path / "run.pt").read_bytes(), os.write, 0

    def write(file, data):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return honest(file, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(2)
    assert (tmp_path / "run.pt").read_bytes() == old and os.listdir(tmp_path) == ["run.pt"]
    assert checkpoint.saved == 1


def test_a_managed_training_resumes_with_its_own_bits_and_memory(device, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model[3].requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with attached(model, device) as manager:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        checkpoint = Checkpoint(
            tmp_path / "run.pt", model, optimizer=optimizer, generators=[generator], every=2
        )
        assert checkpoint.load() is None and checkpoint.saved is None

        def steps():
            for _ in range(2):
                x = torch.randn(4, 8, generator=generator).to(device)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {k: v.cpu().clone() for k, v in model.state_dict().items()}

        steps()
        assert not checkpoint.after_step(1) and checkpoint.after_step(2)
        held = [(id(t), t.data_ptr()) for t in (*model.parameters(), *model.buffers())]
        expected = steps()
        assert checkpoint.load() == 2
        assert [(id(t), t.data_ptr()) for t in (*model.parameters(), *model.buffers())] == held
        assert_same(steps(), expected)
        assert manager.state.engine.stats()["acquires"] > 0
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
        assert "3.weight" not in saved["model"] and "1.running_mean" in saved["model"]
        assert saved["reason"] == "periodic"
        assert all(tensor.device.type == "cpu" for tensor in saved["model"].values())
        whole = Checkpoint(tmp_path / "whole.pt", model, frozen=True)
        whole.save(1, "by hand")
        assert "3.weight" in torch.load(tmp_path / "whole.pt", weights_only=True)["model"]


class Float32States(torch.optim.Optimizer):
    """Keeps float32 states of bfloat16 parameters, as transformers' Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros(parameter.shape))
                parameter.sub_(mean.lerp_(parameter.grad.float(), 0.1), alpha=0.1)


def test_states_that_are_finer_than_their_parameters_are_not_rounded(tmp_path):
    model = nn.ParameterList([torch.randn(64), torch.randn(8), torch.randn(64)]).bfloat16()
    optimizer = Float32States(model.parameters())
    checkpoint = Checkpoint(tmp_path / "x.pt", model, optimizer=optimizer)

    def step():
        sum((p.float() ** 3).sum() for p in (model[0], model[2])).backward()  # one has no state
        optimizer.step()
        optimizer.zero_grad()
        return [
            tensor.clone()
            for parameter in (model[0], model[2])
            for tensor in (parameter.detach(), optimizer.state[parameter]["mean"])
        ]

    step()
    checkpoint.save(1)
    expected = step()
    assert checkpoint.load() == 1 and model[1] not in optimizer.state
    assert_same(step(), expected)


def test_states_inside_states_are_not_rounded_either(tmp_path):
    """torch rounds what it finds in dicts and lists of a state, too."""
    parameter = nn.Parameter(torch.randn(8).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    fine = [torch.randn(8) for _ in range(4)]
    nested = {"list": [fine[0], {"deep": fine[1]}], "tuple": (fine[2], 3), "alone": fine[3]}
    optimizer.state[parameter] = {"nested": nested, "count": 7}
    checkpoint = Checkpoint(tmp_path / "x.pt", nn.ParameterList([parameter]), optimizer=optimizer)
    checkpoint.save(1)
    optimizer.state.clear()
    checkpoint.load()
    state = optimizer.state[parameter]
    found = state["nested"]
    assert state["count"] == 7 and found["tuple"][1] == 3
    inner = [found["list"][0], found["list"][1]["deep"], found["tuple"][0], found["alone"]]
    assert all(tensor.dtype is torch.float32 for tensor in inner)
    assert_same(inner, fine)


KINDS = {
    "a tensor of a number": (3.0, torch.ones(2)),
    "a number of a tensor": (torch.ones(2), 3.0),
    "a dict of a number": (3, {"a": 1}),
    "a number of a dict": ({"a": 1}, 3),
    "a list of a number": (3, [1, 2]),
    "a number of a list": ([1, 2], 3),
    "an object of a dict": ({"scale": 2}, SimpleNamespace(scale=2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_kind_than_was_saved_stays_that(tmp_path, kind, dtype):
    """As an optimizer may that makes an object of what it has written as a dict."""
    saved, loaded = KINDS[kind]

    class Changes(torch.optim.SGD):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            for each in self.state.values():
                each["kept"] = loaded

    parameter = nn.Parameter(torch.randn(8).to(dtype))
    optimizer = Changes([parameter], lr=0.1)
    optimizer.state[parameter] = {"kept": saved}
    checkpoint = Checkpoint(tmp_path / "x.pt", nn.ParameterList([parameter]), optimizer=optimizer)
    checkpoint.save(1)
    checkpoint.load()
    assert optimizer.state[parameter]["kept"] is loaded


def test_several_optimizers_and_a_scaler_are_saved_and_a_save_is_logged(tmp_path, caplog):
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    checkpoint = Checkpoint(tmp_path / "x.pt", model, optimizer=optimizers, scaler=scaler)
    scaler.scale(torch.ones(1))  # it has a scale from its first use on
    with caplog.at_level("INFO"):
        checkpoint.save(7, "by hand")
    assert caplog.messages == [f"checkpoint of step 7 (by hand): {tmp_path / 'x.pt'}"]
    scaler.update(2.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 5.0
    assert checkpoint.load() == 7
    assert scaler.get_scale() == 8.0
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1, 0.1]


def test_what_lies_on_the_host_as_it_is_saved_is_not_copied():
    tensor = torch.ones(100)
    assert _on_host([tensor])[0].data_ptr() == tensor.data_ptr()


def test_a_later_save_deletes_what_killed_ones_have_left(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path, day = tmp_path / "x.pt", time.time() - 86400
    old = {f"x.pt.{ended.pid}.new": False, f"x.pt.{os.getppid()}.new": True, "x.pt.a.new": True}
    old |= {f"y.pt.{ended.pid}.new": True, f"x.pt.{ended.pid}.newer": True}
    for name in old:
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (day, day))
    replace_file(path, lambda sink: sink.write(b"whole"))
    assert {name: (tmp_path / name).exists() for name in old} == old
    (tmp_path / f"x.pt.{ended.pid}.new").write_bytes(b"of another machine, perhaps")
    replace_file(path, lambda sink: sink.write(b"again"))
    assert (tmp_path / f"x.pt.{ended.pid}.new").exists() and path.read_bytes() == b"again"


def test_rates_that_numpy_has_computed_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 10))
    checkpoint = Checkpoint(tmp_path / "x.pt", model, optimizer=optimizer, scheduler=scheduler)
    optimizer.step()
    scheduler.step()
    rates = scheduler.get_last_lr()
    assert type(rates[0]) is not float
    checkpoint.save(1)
    optimizer.param_groups[0]["lr"] = 7.0
    assert checkpoint.load() == 1
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == rates[0]


class Told:
    """Data of which a checkpoint is to keep whatever a test says."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_only_what_a_tensor_shows_is_written(tmp_path):
    part = Told({"row": torch.zeros(1000, 1000)[3], "pair": (1, 2)})
    checkpoint = Checkpoint(tmp_path / "x.pt", nn.Linear(1, 1), part=part)
    checkpoint.save(1)
    assert os.path.getsize(checkpoint.path) < 100_000
    checkpoint.load()
    assert part.state["row"].shape == (1000,) and part.state["pair"] == [1, 2]


def test_what_is_no_checkpoint_of_this_training_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "x.pt"
    model = nn.Linear(2, 2)
    checkpoint = Checkpoint(path, model, data=Data())
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def refuse(other, match):
        other.save(3)
        with pytest.raises(OffloadError, match=match):
            checkpoint.load()
        assert_same(dict(model.state_dict()), before)

    refuse(Checkpoint(path, nn.Linear(2, 3), data=Data()), r"'weight' is \(3, 2\) .* \(2, 2\)")
    refuse(Checkpoint(path, nn.Linear(2, 2).double(), data=Data()), "float64 there")
    refuse(Checkpoint(path, nn.Bilinear(2, 2, 2, bias=False), data=Data()), r"there \['bias'\]")
    refuse(Checkpoint(path, nn.Linear(2, 2)), r"parts missing there \['data'\]")
    refuse(Checkpoint(path, nn.Linear(2, 2), data=Data(), more=Data()), r"here \['more'\]")
    other = torch.nn.Linear(2, 2)
    Checkpoint(path, other, data=Data(), generators=[torch.Generator()]).save(3)
    with pytest.raises(ValueError, match="the state has 1 generators, and 0 were given"):
        checkpoint.load()
    assert_same(dict(model.state_dict()), before)
    assert checkpoint.saved is None
    for wrong in ({"schema": "other"}, [1, 2]):
        torch.save(wrong, path)
        with pytest.raises(OffloadError, match="is no checkpoint of oracle_offload/checkpoint/1"):
            checkpoint.load()
    path.write_bytes(b"text")
    with pytest.raises(OffloadError, match="holds no checkpoint: "):
        checkpoint.load()


class OtherTensor(torch.Tensor):
    """A subclass that torch does not yet know as safe to load."""


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    odd = Told({"list": [1, {"deep": object()}]})
    checkpoint = Checkpoint(tmp_path / "x.pt", nn.Linear(1, 1), odd=odd)
    with pytest.raises(TypeError, match=r"\['odd'\]\['list'\]\[1\]\['deep'\] is a object, which"):
        checkpoint.save(1)
    assert os.listdir(tmp_path) == []
    odd.state = {"rows": torch.ones(2).as_subclass(OtherTensor)}
    with pytest.raises(TypeError, match=r"\['odd'\]\['rows'\] is a OtherTensor, which"):
        checkpoint.save(1)
    assert os.listdir(tmp_path) == []
    with torch.serialization.safe_globals([OtherTensor]):
        checkpoint.save(1)
        assert checkpoint.load() == 1
    for part in (3, SimpleNamespace(state_dict=dict), SimpleNamespace(load_state_dict=dict)):
        kind = type(part).__name__
        with pytest.raises(TypeError, match=f"odd={kind} has no state_dict and load_state_dict"):
            Checkpoint(tmp_path / "x.pt", nn.Linear(1, 1), odd=part)
    with pytest.raises(ValueError, match="every=0 is not a whole number"):
        Checkpoint(tmp_path / "x.pt", nn.Linear(1, 1), every=0)


def test_the_training_of_the_kills_is_deterministic(tmp_path):
    one, _ = train(tmp_path / "a.pt", False)
    other, _ = train(tmp_path / "b.pt", False)
    assert_same(dict(one.state_dict()), dict(other.state_dict()))


def test_every_generator_goes_on_where_it_was(tmp_path):
    numpy = pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(3)
    checkpoint = Checkpoint(tmp_path / "run.pt", nn.Linear(2, 2), generators=[generator])

    def draws():
        return [
            *(random.random(), random.gauss(0, 1), torch.rand(()).item()),
            *(numpy.random.random(), numpy.random.standard_normal()),
            torch.rand((), generator=generator).item(),
        ]

    draws()  # an odd number of normal draws: each generator keeps one for later
    checkpoint.save(1)
    expected = draws()
    assert draws() != expected
    assert checkpoint.load() == 1
    assert draws() == expected


def test_states_of_more_cards_than_there_are_are_refused_and_others_restored(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    plain = RandomState().state_dict()
    draws = torch.rand(2)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="the state is of 2 cards, and there are 1; resume"):
        RandomState().load_state_dict({**plain, "cuda": ["one", "two"]})
    assert torch.equal(torch.get_rng_state(), state) and restored == []
    RandomState().load_state_dict({**plain, "cuda": ["one"]})
    assert torch.equal(torch.rand(2), draws) and restored == [["one"]]
    RandomState().load_state_dict({**plain, "cuda": []})
    assert restored == [["one"]]


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("in_use", [False, True])
def test_a_card_s_generator_is_kept_where_torch_uses_the_card(available, in_use, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state"])
    kept = RandomState().state_dict()["cuda"]
    assert kept == (["state"] if available and in_use else [])


def test_numpy_s_generator_is_kept_where_numpy_is_there(monkeypatch):
    pytest.importorskip("numpy")
    known = RandomState().state_dict()
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "numpy")
        unknown = RandomState().state_dict()
        assert unknown["numpy"] is None
        RandomState().load_state_dict(known)
    RandomState().load_state_dict(unknown)
    assert known["numpy"] == RandomState().state_dict()["numpy"]


@pytest.mark.parametrize(
    "state", [{Path(): 1}, {"a": [{(1, 2): {Path(): 1}}]}, {"a": Path()}, [[print]], Path()]
)
def test_what_cannot_be_loaded_without_running_code_is_not_saved(tmp_path, state):
    checkpoint = Checkpoint(tmp_path / "run.pt", nn.Linear(2, 2), data=Told(state))
    with pytest.raises(TypeError, match="cannot be loaded without running code"):
        checkpoint.save(1)
    assert not list(tmp_path.iterdir())
