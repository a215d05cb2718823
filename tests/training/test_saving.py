"""`save_weights`: what `attach` and the libraries read; the old weights or the new, never half."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
import torch
from equality import assert_same, attached
from safetensors.torch import load_file
from torch import nn

import oracle_offload
from oracle_offload.disk import saving
from oracle_offload.errors import OffloadError


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(96, 96)
        self.conv = nn.Conv2d(16, 32, 3)
        self.last = nn.Linear(96, 96, bias=False)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(96)
        self.small = nn.Parameter(torch.randn(5, 7, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("own", torch.randn(3), persistent=False)

    def forward(self, x):
        return self.last(self.first(x))


def state_of(model):
    return {name: t for name, t in model.state_dict().items() if name != "last.weight"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(saving, "BLOCK_BYTES", 1000)


def test_a_file_has_what_the_state_dict_has(device, tmp_path):
    expected = {name: t.clone() for name, t in state_of(Model()).items()}
    model = Model()
    model.conv.to(memory_format=torch.channels_last)
    path = tmp_path / "own.safetensors"
    with attached(model, device):
        oracle_offload.save_weights(model, path)
        assert_same(load_file(path), expected)
    oracle_offload.save_weights(model, str(path))  # detached: the rest is on the device
    assert_same(load_file(path), expected)
    assert os.listdir(tmp_path) == [path.name]


def test_what_was_saved_is_attached_again(tmp_path):
    model = Model()
    for shard_bytes in ("1GB", 20_000):
        oracle_offload.save_weights(model, tmp_path / "folder", shard_bytes=shard_bytes)
        with oracle_offload.empty_weights():
            other = Model(1)
        with attached(other, "cpu", weights=tmp_path / "folder"):
            assert_same(other.state_dict(), model.state_dict())


def read(folder):
    """Return what a reader of the folder gets: by the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for key, name in json.loads(index.read_text())["weight_map"].items():
        found[key] = load_file(folder / name)[key]
    return found


def test_shards_are_no_larger_than_asked_and_named_by_the_index(tmp_path):
    oracle_offload.save_weights(Model(), tmp_path, shard_bytes=20_000, name="model")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 5)]
    sizes = [sum(t.nbytes for t in load_file(tmp_path / name).values()) for name in files]
    assert sorted(sizes)[-1] == 96 * 96 * 4  # one tensor, which is not cut
    assert sorted(sizes)[-2] <= 20_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_same(read(tmp_path), state_of(Model()))


def test_a_shard_is_as_large_as_allowed_and_none_is_empty(tmp_path):
    model = nn.ParameterList(torch.randn(size) for size in (100, 25, 25, 25))
    oracle_offload.save_weights(model, tmp_path, shard_bytes=200)
    weights = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(weights.values()) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 2, 3)]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_each_memory_is_written_once_and_tensors_of_nothing_each(tmp_path):
    model = nn.Module()
    values = torch.randn(6)
    for name, tensor in {
        "a": values, "same": values.view(6), "other shape": values.view(2, 3),
        "none": torch.empty(0), "none too": torch.empty(0), "scalar": torch.tensor(3.0),
    }.items():  # fmt: skip
        model.register_buffer(name, tensor)
    oracle_offload.save_weights(model, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"a", "other shape", "none", "none too", "scalar"}
    assert_same(found, {name: getattr(model, name) for name in found})


def test_a_tensor_is_copied_in_blocks_whatever_its_rows():
    for tensor in (torch.randn(1, 1000), torch.randn(1000), torch.randn(40, 25).t()):
        blocks = list(saving._blocks(tensor))
        assert max(block.nbytes for block in blocks) <= 1000 and len(blocks) > 3
        assert_same(torch.cat([block.reshape(-1) for block in blocks]), tensor.reshape(-1))


class Wrapped(torch.Tensor):
    """As a library wraps what it has quantised."""


def test_forms_replace_each_other(tmp_path):
    for seed, shard_bytes in enumerate((20_000, 20_000, "1GB", 10_000, "1GB")):
        oracle_offload.save_weights(Model(seed), tmp_path, shard_bytes=shard_bytes)
        assert_same(read(tmp_path), state_of(Model(seed)))
        is_one = shard_bytes == "1GB"
        assert len(list(tmp_path.glob("*.json"))) == (not is_one)
        left = {path.name for path in tmp_path.iterdir()}
        index = tmp_path / "model.safetensors.index.json"
        named = {} if is_one else json.loads(index.read_text())["weight_map"]
        assert left == {"model.safetensors"} if is_one else left == {*named.values(), index.name}
        with oracle_offload.empty_weights():
            other = Model()
        with attached(other, "cpu", weights=tmp_path):
            pass


@pytest.mark.parametrize("shard_bytes", ["1GB", 20_000])
def test_what_an_index_names_goes_only_if_it_is_old_weights(tmp_path, shard_bytes):
    """It may name the very file that was just written, or one that holds no weights."""
    names = {"a": "model.safetensors", "b": "old.safetensors", "c": "config.json"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in names.values():
        (tmp_path / name).write_text("{}")
    oracle_offload.save_weights(Model(), tmp_path, shard_bytes=shard_bytes)
    assert_same(read(tmp_path), state_of(Model()))
    assert (tmp_path / "config.json").read_text() == "{}"
    assert not (tmp_path / "old.safetensors").exists()


@pytest.mark.parametrize("shard_bytes", ["1GB", 20_000])
def test_a_damaged_index_is_replaced(tmp_path, shard_bytes):
    (tmp_path / "model.safetensors.index.json").write_text("{")
    oracle_offload.save_weights(Model(), tmp_path, shard_bytes=shard_bytes)
    assert_same(read(tmp_path), state_of(Model()))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("shard_bytes", ["1GB", 20_000], ids=["one", "several"])
def test_whatever_ends_it_the_old_or_the_new_is_whole(tmp_path, monkeypatch, shard_bytes):
    """An end at every call that changes the disk, with nothing cleaned up after it."""
    folder = tmp_path / "folder"
    oracle_offload.save_weights(Model(0), folder, shard_bytes=shard_bytes)
    states = [state_of(Model(seed)) for seed in (0, 1)]
    calls, limit, outcomes = [0], [0], []

    def counted(function):
        def call(*arguments, **options):
            calls[0] += 1
            if calls[0] > limit[0]:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "replace", "unlink"):
            patch.setattr(os, name, counted(getattr(os, name)))
        while not outcomes or outcomes[-1] != "ended":
            calls[0] = 0
            with contextlib.suppress(Killed):
                oracle_offload.save_weights(Model(1), folder, shard_bytes=shard_bytes)
                outcomes.append("ended")
            found = read(folder)
            (same,) = [
                number
                for number, state in enumerate(states)
                if all(torch.equal(found[name], state[name]) for name in state)
            ]
            outcomes.insert(len(outcomes) - (outcomes[-1:] == ["ended"]), same)
            limit[0] += 7
    assert outcomes[0] == 0 and outcomes[-2] == 1 and len(outcomes) > 8


def test_a_full_disk_is_an_error_and_leaves_the_old(tmp_path, monkeypatch):
    path = tmp_path / "own.safetensors"
    oracle_offload.save_weights(Model(0), path)
    original, count = os.write, [0]

    def write(file, data):
        count[0] += 1
        if count[0] > 5:
            raise OSError(28, "No space left on device")
        return original(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            oracle_offload.save_weights(Model(1), path)
    assert_same(load_file(path), state_of(Model(0)))
    assert os.listdir(tmp_path) == [path.name]


def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path):
    for tensor, kind in (
        (torch.zeros(2, dtype=torch.complex128), r"Tensor \(torch\.complex128\)"),
        (torch.ones(2).as_subclass(Wrapped), r"Wrapped \(torch\.float32\)"),
    ):
        model = Model()
        model.register_buffer("rows", tensor)
        with pytest.raises(OffloadError, match=rf"'rows' is {kind}, which a safet"):
            oracle_offload.save_weights(model, tmp_path)
    with oracle_offload.empty_weights():
        empty = Model()
    with pytest.raises(OffloadError, match=r"'small' is on the meta device, without values"):
        oracle_offload.save_weights(empty, tmp_path)
    with pytest.raises(ValueError, match="shard_bytes='much'"):
        oracle_offload.save_weights(Model(), tmp_path, shard_bytes="much")
    assert not list(tmp_path.iterdir())
