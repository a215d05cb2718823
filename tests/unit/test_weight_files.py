"""Files of weights are hostile input: what is damaged is refused by name, nothing else happens."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from oracle_offload.disk import reading  # noqa: E402
from oracle_offload.disk.checkpoint import (  # noqa: E402
    Checkpoint,
    WeightFile,
    find_weights,
    read_index,
)
from oracle_offload.disk.header import (  # noqa: E402
    ITEM_BYTES,
    MOST_HEADER_BYTES,
    Stored,
    read_header,
    write_header,
)
from oracle_offload.disk.source import DTYPES, Fragment, Source, whole  # noqa: E402
from oracle_offload.errors import OffloadError  # noqa: E402


def write(path, table, data=b"", length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def read(path):
    with open(path, "rb") as file:
        return read_header(file, str(path))


def row(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED = {
    "empty": (None, b"", 0, "0 bytes, which is too short"),
    "header beyond the end": ({"a": row()}, b"", 10_000, "promise a header of 10000 bytes"),
    "header of 2^63": ({"a": row()}, b"", 1 << 63, "promise a header"),
    "no JSON": (b"{]", b"", None, "which is no JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "which is no JSON"),
    "too deep": (b"[" * 100_000, b"", None, "which is no JSON"),
    "a number too long": (b'{"a":' + b"9" * 10_000 + b"}", b"", None, "which is no JSON"),
    "a list": (b"[]", b"", None, "it names no tensors"),
    "a name twice": (b'{"a": 1, "a": 2}', b"", None, "it has a name twice"),
    "no row": ({"a": 3}, b"", None, "'a' has no proper shape or place"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"", None, "no proper shape"),
    "a negative size": ({"a": row(shape=(-2,))}, bytes(8), None, "no proper shape"),
    "a true size": ({"a": row(shape=(True, 2))}, bytes(8), None, "no proper shape"),
    "a size in words": ({"a": row(shape=("2",))}, bytes(8), None, "no proper shape"),
    "one offset": ({"a": {**row(), "data_offsets": [0]}}, bytes(8), None, "no proper shape"),
    "a negative offset": ({"a": row(begin=-8, end=0)}, bytes(8), None, "no proper shape"),
    "an unknown dtype": ({"a": row(dtype="F4")}, bytes(8), None, "dtype 'F4', which is not known"),
    "a dtype that is a list": ({"a": row(dtype=[])}, bytes(8), None, "which is not known"),
    "too few bytes": ({"a": row(end=4)}, bytes(4), None, "takes 8 bytes, but its place has 4"),
    "a shape of 2^80": ({"a": row(shape=(2**40, 2**40))}, bytes(8), None, "but its place has 8"),
    "an overlap": ({"a": row(), "b": row(begin=4, end=12)}, bytes(12), None, "overlap others"),
    "a gap": ({"a": row(), "b": row(begin=12, end=20)}, bytes(20), None, "leave a gap"),
    "cut off": ({"a": row()}, bytes(7), None, "is cut off: its tensors end at byte"),
    "bytes behind": ({"a": row()}, bytes(9), None, "bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_by_name(tmp_path, case):
    table, data, length, message = DAMAGED[case]
    path = tmp_path / "damaged.safetensors"
    if table is None:
        path.write_bytes(data)
    else:
        write(path, table, data, length)
    with pytest.raises(OffloadError, match=r"damaged\.safetensors") as raised:
        read(path)
    assert message in str(raised.value)
    with pytest.raises((SafetensorError, OSError, ValueError)):  # so does the library itself
        safe_open(path, framework="pt").keys()


def test_a_header_is_not_read_beyond_what_the_format_allows(tmp_path):
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", MOST_HEADER_BYTES + 1))
        file.truncate(MOST_HEADER_BYTES + 100)  # no bytes on the disk
    with pytest.raises(OffloadError, match="promise a header of 100000001 bytes"):
        read(path)
    with open(path, "r+b") as file:  # the most that is allowed is read, and is no JSON
        file.write(struct.pack("<Q", 1000))
    with pytest.raises(OffloadError, match="no JSON"):
        read(path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1,) * 65, "no proper shape"),
        ((2**61,) * 65, "no proper shape"),
        ((0, 2**70), "has shape \\(0, "),
        ((0, 2**32, 2**31), "has shape \\(0, "),
    ],
)
def test_a_shape_that_no_tensor_has_is_refused(tmp_path, shape, message):
    path = tmp_path / "shape.safetensors"
    nbytes = 0 if 0 in shape else 4
    write(path, {"a": row(shape=shape, end=nbytes)}, bytes(nbytes))
    with pytest.raises(OffloadError, match=message):
        read(path)
    write(path, {"a": row(shape=(0, 2**31, 2**31), end=0)}, b"")
    assert read(path)["a"].nbytes == 0


def test_a_header_is_read_from_the_beginning_and_up_to_the_most(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": row()}, bytes(8))
    length = path.stat().st_size - 16
    with open(path, "rb") as file:
        file.seek(5)
        assert read_header(file, "x").keys() == {"a"}
    monkeypatch.setattr("oracle_offload.disk.header.MOST_HEADER_BYTES", length)
    assert read(path).keys() == {"a"}
    monkeypatch.setattr("oracle_offload.disk.header.MOST_HEADER_BYTES", length - 1)
    with pytest.raises(OffloadError, match=f"promise a header of {length} bytes in a file of"):
        read(path)


def test_tensors_of_no_bytes_and_of_the_most_dimensions_are_read(tmp_path):
    table = {"b": row(), "none": row(shape=(0,), end=0), "last": row(shape=(0, 2), begin=8)}
    table["deep"] = row(shape=(1,) * 64, begin=8, end=12)
    found = read(write(tmp_path / "x.safetensors", table, bytes(12)))
    assert {name: (stored.shape, stored.nbytes) for name, stored in found.items()} == {
        "b": ((2,), 8),
        "none": ((0,), 0),
        "last": ((0, 2), 0),
        "deep": ((1,) * 64, 4),
    }
    start = found["b"].begin
    assert [stored.begin - start for stored in found.values()] == [0, 0, 8, 8]


def test_a_source_says_what_of_it_does_not_fit():
    def check(tensor, shape=(2, 3), stored=((2, 3),), dtype="F32", part_of=whole):
        fragments = [
            Fragment(f"name {n}", None, Stored(dtype, each, 0, 4 * n + 1), part_of)
            for n, each in enumerate(stored)
        ]
        source = Source(shape, tuple(fragments))
        assert source.nbytes == sum(4 * n + 1 for n in range(len(stored)))
        source.check(tensor, "path")

    def first_row(tensor):
        return tensor[0]

    for dtype, kind in (("F32", torch.bfloat16), ("F8_E5M2", torch.float64), ("I8", torch.int8)):
        check(torch.ones(2, 3, dtype=kind), dtype=dtype)
    check(torch.ones(2, 3), stored=((3,), (3,)), part_of=first_row)
    for arguments, said in (
        ({"shape": (3, 2)}, "'path': 'name 0' has shape (2, 3), but the model's has (2, 3)."),
        ({"stored": ((6,),)}, "'path': 'name 0' has shape (6,), but the model's has (2, 3)."),
        (
            {"stored": ((3,), (2,)), "part_of": first_row},
            "'path': 'name 1' has shape (2,), of 2 in all, but the model's has (2, 3).",
        ),
        (
            {"dtype": "I32"},
            "'path': 'name 0' is I32, which does not become torch.float32; only floating-point "
            "weights are converted.",
        ),
        ({"dtype": "F4"}, "'path': 'name 0' is F4, which does not become torch.float32; only "
         "floating-point weights are converted."),
    ):  # fmt: skip
        with pytest.raises(OffloadError) as raised:
            check(torch.ones(2, 3), **arguments)
        assert str(raised.value) == said
    with pytest.raises(OffloadError, match=r"is F32, which does not become torch.int32"):
        check(torch.ones(2, 3, dtype=torch.int32))


class Parts:
    """Parts of a read that are counted, of which one may fail while another is under way."""

    def __init__(self):
        self.begun, self.ended, self.started = [], [], threading.Event()

    def slow(self):
        self.begun.append("slow")
        self.started.set()
        time.sleep(0.2)
        self.ended.append("slow")

    def fail(self):
        self.started.wait(10)
        raise KeyError("planted")

    def quick(self):
        self.ended.append("quick")


def test_a_read_that_fails_ends_once_nothing_is_under_way(monkeypatch):
    monkeypatch.setattr(reading, "THREADS", 2)
    parts, told, reader = Parts(), [], reading.Reader()
    reader.run([(3, parts.quick), (4, parts.quick)], told.append)
    assert sorted(told) == [3, 4] and parts.ended == ["quick"] * 2
    with pytest.raises(KeyError, match="planted"):
        reader.run([(1, parts.slow), (1, parts.fail), *[(1, parts.slow)] * 20], told.append)
    assert parts.ended.count("slow") == len(parts.begun) < 21  # the others were never begun
    reader.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        reader.run([(1, parts.quick)], told.append)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_read_in_blocks_whatever_its_rows(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 400)
    values = torch.arange(1000, dtype=torch.float32)
    save_file({"a": values, "scalar": values[7].clone()}, tmp_path / "x.safetensors")
    file, reader = WeightFile(tmp_path / "x.safetensors"), reading.Reader()
    for name, shape, sizes in (("a", (1, 1000), [400] * 10), ("scalar", (), [4])):
        target, stored = torch.zeros(shape, dtype=dtype), file.tensors[name]
        parts = list(reader.parts(file, stored.begin, torch.float32, target))
        assert [nbytes for nbytes, _ in parts] == sizes
        reader.run(parts, lambda nbytes: None)
        expected = (values if name == "a" else values[7]).view(shape).to(dtype)
        assert torch.equal(target, expected)
    assert list(reader.parts(file, 0, dtype, torch.empty(0, 3))) == []
    reader.close()
    file.close()


def test_a_larger_tensor_may_be_converted_after_a_smaller_one(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "THREADS", 1)  # which keeps what it converts in one place
    values = {name: torch.arange(count).float() for name, count in (("a", 3), ("b", 90), ("c", 8))}
    save_file(values, tmp_path / "x.safetensors")
    file, reader = WeightFile(tmp_path / "x.safetensors"), reading.Reader()
    for name in ("a", "b", "c", "b"):
        target = torch.zeros(values[name].shape, dtype=torch.float64)
        parts = reader.parts(file, file.tensors[name].begin, torch.float32, target)
        reader.run(parts, lambda nbytes: None)
        assert torch.equal(target, values[name].double())
    reader.close()
    file.close()


def test_what_the_library_writes_is_read(tmp_path):
    path = tmp_path / "good.safetensors"
    tensors = {
        name: torch.zeros(3, 2, dtype=dtype)
        for name, dtype in DTYPES.items()
        if name != "F8_E8M0"  # which its writer does not know in every version
    }
    save_file({**tensors, "scalar": torch.ones(()), "none": torch.zeros(0, 4)}, path, {"a": "b"})
    found = read(path)
    assert found.keys() == {*tensors, "scalar", "none"}
    for name in tensors:
        assert (found[name].dtype, found[name].shape) == (name, (3, 2))
        assert found[name].nbytes == 6 * ITEM_BYTES[name] == 6 * DTYPES[name].itemsize
    assert found["scalar"].shape == () and found["scalar"].nbytes == 4
    data = path.read_bytes()
    begin = found["scalar"].begin
    assert struct.unpack("<f", data[begin : begin + 4]) == (1.0,)


def test_what_is_written_the_library_reads(tmp_path):
    path = tmp_path / "own.safetensors"
    first = write_header({"a": ("BF16", (3,)), "b": ("F32", (2, 2)), "c": ("U8", ())})
    assert len(first) % 8 == 0
    path.write_bytes(first + bytes(6 + 16 + 1))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == {  # noqa: SIM118
            "a": [3],
            "b": [2, 2],
            "c": [],
        }
    assert {name: stored.begin - len(first) for name, stored in read(path).items()} == {
        "a": 0,
        "b": 6,
        "c": 22,
    }


def test_no_damage_does_anything_but_raise_or_leave_what_is_in_bounds(tmp_path):
    path = tmp_path / "fuzz.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, path)
    good = path.read_bytes()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    accepted = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            kind = chance.randrange(3)
            at = chance.randrange(len(data))
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at:]
            else:
                data[at:at] = bytes([chance.choice(b'0123456789[]{},:"-')])
            data = data or bytearray(1)
        path.write_bytes(data)
        try:
            found = read(path)
        except OffloadError as error:
            assert str(path) in str(error)
            continue
        accepted += 1
        for stored in found.values():
            assert 0 <= stored.begin <= stored.begin + stored.nbytes <= len(data)
    assert accepted < 1500


# ---- which files are meant ----


def sharded(folder, index="model.safetensors.index.json", **changes):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.zeros(4)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4)}, folder / "two.safetensors")
    weights = {"a": "one.safetensors", "b": "two.safetensors", **changes}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder / index


def names(path):
    checkpoint = Checkpoint(path)
    try:
        return sorted(checkpoint.tensors)
    finally:
        checkpoint.close()


def test_a_folder_says_which_file_is_meant(tmp_path):
    index = sharded(tmp_path / "sharded")
    assert names(index) == names(tmp_path / "sharded") == ["a", "b"]
    named = sharded(tmp_path / "other", "some.safetensors.index.json")
    assert find_weights(tmp_path / "other") == named
    save_file({"c": torch.zeros(4)}, tmp_path / "other" / "diffusion_pytorch_model.safetensors")
    assert names(str(tmp_path / "other")) == ["c"]
    (tmp_path / "single").mkdir()
    save_file({"d": torch.zeros(4)}, tmp_path / "single" / "own.safetensors")
    assert names(tmp_path / "single") == ["d"]


def test_a_folder_of_the_hub_cache_means_its_snapshot(tmp_path):
    folder = tmp_path / "models--someone--something"
    sharded(folder / "snapshots" / "abc")
    assert names(folder) == ["a", "b"]
    (folder / "snapshots" / "def").mkdir()
    with pytest.raises(OffloadError, match="2 snapshots and none is 'main'"):
        names(folder)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc\n")
    assert names(folder) == ["a", "b"]
    (folder / "refs" / "main").write_text("../../elsewhere")
    with pytest.raises(OffloadError, match="which is no file next to it"):
        names(folder)
    (folder / "refs" / "main").write_text("ghi")
    with pytest.raises(OffloadError, match="has no snapshot 'ghi', which '"):
        names(folder)
    (folder / "refs" / "main").write_bytes(b"\xff" * 100_000)
    with pytest.raises(OffloadError, match="has no snapshot") as raised:
        names(folder)
    assert len(str(raised.value)) < 5000


def test_what_does_not_say_which_file_is_meant_is_refused(tmp_path):
    with pytest.raises(OffloadError, match="there is no such file"):
        names(tmp_path / "nothing.safetensors")
    with pytest.raises(OffloadError, match=r"no safetensors file .* are in its subfolders"):
        names(tmp_path)
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"")
    with pytest.raises(OffloadError, match="other formats can run code"):
        names(pickled)
    for name in ("model", "diffusion_pytorch_model"):
        save_file({"a": torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(OffloadError, match=r"has several: model\.safetensors, diff"):
        names(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "y.safetensors")
    with pytest.raises(OffloadError, match=r"has several: x\.safetensors, y\.safe"):
        names(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c": "one.safetensors"}, "says that 'c' is in 'one.safetensors', but it is not"),
        ({"a": "two.safetensors"}, "says that 'a' is in 'two.safetensors', but it is not"),
        ({"c": "three.safetensors"}, "three.safetensors' cannot be read: No such file"),
        ({"c": "../one.safetensors"}, "names '../one.safetensors', which is no file next to it"),
        ({"c": "/etc/passwd"}, "no file next to it"),
        ({"c": "C:\\a.safetensors"}, "no file next to it"),
        ({"c": ".."}, "no file next to it"),
        ({"c": ""}, "no file next to it"),
        ({"c": "a\0b"}, "no file next to it"),
        ({"c": 7}, "names 7, which is no file next to it"),
    ],
)
def test_an_index_names_files_beside_it_that_hold_what_it_says(tmp_path, changes, message):
    path = sharded(tmp_path, **changes)
    with pytest.raises(OffloadError, match=message.replace("\\", "\\\\")):
        names(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "it has no 'weight_map'"),
        (b"{}", "it has no 'weight_map'"),
        (b'{"weight_map": 3}', "'int' object has no"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, why):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text)
    with pytest.raises(OffloadError, match=f"is a damaged index: {why}"):
        names(path)


def test_an_index_may_be_as_large_as_a_header_and_no_larger(tmp_path, monkeypatch):
    path = sharded(tmp_path)
    monkeypatch.setattr("oracle_offload.disk.checkpoint.MOST_HEADER_BYTES", path.stat().st_size)
    assert names(path) == ["a", "b"]
    path.write_text(path.read_text() + " ")
    with pytest.raises(OffloadError, match="damaged index: it has"):
        names(path)


def test_an_index_of_nothing_and_one_too_large_are_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}}')
    with pytest.raises(OffloadError, match="an index that names no tensors"):
        names(path)
    with open(path, "r+b") as file:
        file.truncate(MOST_HEADER_BYTES + 1)
    with pytest.raises(OffloadError, match="damaged index: it has 100000001 bytes"):
        names(path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    path = sharded(tmp_path)
    save_file({"b": torch.ones(4), "a": torch.ones(4)}, tmp_path / "two.safetensors")
    with pytest.raises(OffloadError, match="'a' is in two of its files"):
        names(path)


def test_every_file_is_closed_when_one_is_damaged(tmp_path):
    path = sharded(tmp_path)
    before = open_files()
    checkpoint = Checkpoint(path)
    assert not before or len(open_files()) == len(before) + 2
    checkpoint.close()
    assert open_files() == before and sorted(checkpoint.tensors) == ["a", "b"]
    (tmp_path / "two.safetensors").write_bytes(b"")
    with pytest.raises(OffloadError, match=r"two\.safetensors' has 0 bytes") as raised:
        names(path)
    assert open_files() == before and raised  # which holds the frames, and with them the objects


def open_files():
    """Return the numbers of the open files; none where the system does not tell."""
    return os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []


@pytest.mark.parametrize("way", ["at once", "in pieces", "without preadv"])
def test_bytes_are_read_from_where_they_lie(tmp_path, monkeypatch, way):
    path = tmp_path / "own.safetensors"
    save_file({"a": torch.arange(64, dtype=torch.uint8)}, path)
    file = WeightFile(path)
    if way == "without preadv":
        monkeypatch.delattr(os, "preadv")
    elif way == "in pieces":
        honest = os.preadv
        monkeypatch.setattr(os, "preadv", lambda number, views, at: honest(
            number, [views[0][:7]], at))  # fmt: skip
    found = bytearray(60)
    begin = file.tensors["a"].begin
    file.read_into(memoryview(found), begin + 3)
    assert list(found) == list(range(3, 63))
    with pytest.raises(OffloadError, match=f"own.safetensors' ended at byte {begin + 64} while"):
        file.read_into(memoryview(found), begin + 10)
    file.close()


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="an open file cannot be replaced there")
def test_bytes_are_of_the_file_that_was_opened_whoever_replaces_it(tmp_path):
    path = tmp_path / "own.safetensors"
    save_file({"a": torch.zeros(8, dtype=torch.uint8)}, path)
    file = WeightFile(path)
    save_file({"a": torch.ones(8, dtype=torch.uint8)}, tmp_path / "other.safetensors")
    (tmp_path / "other.safetensors").replace(path)
    found = bytearray(b"\7" * 8)
    file.read_into(memoryview(found), file.tensors["a"].begin)
    file.close()
    assert list(found) == [0] * 8


def test_a_file_may_have_no_tensors(tmp_path):
    assert read(write(tmp_path / "none.safetensors", {})) == {}
    assert read(write(tmp_path / "words.safetensors", {"__metadata__": {"a": "b"}})) == {}


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_the_origin_of_bytes_is_where_they_lie_and_shows_them(tmp_path, monkeypatch, platform):
    path = tmp_path / "own.safetensors"
    save_file({"a": torch.arange(64, dtype=torch.uint8)}, path)
    file = WeightFile(path)
    begin = file.tensors["a"].begin
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", platform)
        one, other = file.origin(begin, 64), file.origin(begin + 8, 8)
    file.close()  # what is mapped stays
    assert list(one.memory[one.skipped : one.skipped + 64]) == list(range(64))
    assert list(other.memory[other.skipped : other.skipped + 8]) == list(range(8, 16))
    one.memory[one.skipped] = 7
    assert path.read_bytes()[begin] == 0


def test_an_index_that_says_another_of_its_files_is_refused(tmp_path):
    path = sharded(tmp_path, c="two.safetensors")
    save_file({"a": torch.zeros(4), "c": torch.zeros(4)}, tmp_path / "one.safetensors")
    with pytest.raises(OffloadError, match=r"says that 'c' is in 'two.safetensors', but it is not"):
        names(path)


def test_an_index_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(OffloadError, match=r"index.json' cannot be read: No such file"):
        read_index(tmp_path / "index.json")
