"""What codes the weights of a model piece by piece: what it is given, and what it gives back."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from equality import Through
from torch import nn

from oracle_offload import OffloadError, _core
from oracle_offload.compress import coder
from oracle_offload.compress.coder import SMALLEST_BYTES, Coder, kind_of, on_host, tensor_over
from oracle_offload.compress.store import CODED, RAW, Store


def weights(count=SMALLEST_BYTES // 2, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.02).to(dtype)


def coder_of(tmp_path, *tensors, **options):
    return Coder(Store(tmp_path / "coded"), {id(tensor) for tensor in tensors}, **options)


def prepare(made, *tensors):
    told = []
    found = made.prepare([(tensor, tensor) for tensor in tensors], told.append)
    return found, told


def test_what_was_coded_is_told_and_what_got_no_smaller_is_not(tmp_path):
    small, noise = weights(), weights(SMALLEST_BYTES, torch.int8)
    noise.random_(-128, 128, generator=torch.Generator().manual_seed(0))
    found, told = prepare(coder_of(tmp_path, small, noise), small, noise)
    assert told == [small.nbytes] and list(found) == [id(small)]
    made = found[id(small)]
    assert made.kind == _core.BF16 and made.nbytes < 0.97 * small.nbytes
    assert torch.equal(made.readable, small)
    assert made.readable.data_ptr() != small.data_ptr()


def test_bytes_from_which_a_tensor_is_coded():
    assert kind_of(weights(SMALLEST_BYTES // 2)) == _core.BF16 and SMALLEST_BYTES == 65536
    assert kind_of(weights(SMALLEST_BYTES // 2 - 1)) is None
    assert kind_of(weights(dtype=torch.float32)) is None


def test_only_tensors_that_were_asked_for_are_wanted(tmp_path):
    asked, other, small = weights(), weights(), weights(8)
    made = coder_of(tmp_path, asked, small)
    assert [made.wants(tensor) for tensor in (asked, other, small)] == [True, False, False]


@pytest.mark.parametrize(("processors", "threads"), [(7, 7), (None, 1)])
def test_as_many_threads_code_as_the_host_has_processors(
    tmp_path, monkeypatch, processors, threads
):
    tensor = weights()
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    made, asked = coder_of(tmp_path, tensor), []

    class Core(Through):
        def encode(self, kind, coded, nbytes, threads, *rest):
            asked.append(threads)
            return _core.encode(kind, coded, nbytes, threads, *rest)

    monkeypatch.setattr(coder, "_core", Core(_core))
    prepare(made, tensor)
    assert asked == [threads]


def test_after_one_file_that_cannot_be_written_nothing_more_is_tried(tmp_path, caplog):
    first, second = weights(), weights(seed=1)
    (tmp_path / "coded").write_text("no folder")
    made = coder_of(tmp_path, first, second)
    with caplog.at_level(logging.WARNING, "oracle_offload"):
        assert prepare(made, first) == ({}, [])
        (tmp_path / "coded").unlink()
        assert not made.wants(second) and prepare(made, second) == ({}, [])
    assert caplog.text.count("weights are not compressed from here on") == 1
    assert not (tmp_path / "coded").exists()


def test_a_budget_that_needs_small_weights_needs_a_place_for_them(tmp_path):
    tensor = weights()
    (tmp_path / "coded").write_text("no folder")
    with pytest.raises(OffloadError, match=r"ram_budget='1GB' has room .* only if they are comp"):
        prepare(coder_of(tmp_path, tensor, ram_budget="1GB"), tensor)


def test_masters_may_have_as_many_bytes_as_the_budget(tmp_path):
    made = coder_of(tmp_path, ram_budget="1KiB", limit=1024.0)
    made.check_budget(1024)
    with pytest.raises(OffloadError, match=r"ram_budget='1KiB' is 1\.00 KiB, but .* take 1\.0"):
        made.check_budget(1025)
    coder_of(tmp_path).check_budget(1 << 60)  # none was given


def test_codes_of_other_weights_under_the_name_are_made_anew(tmp_path, caplog):
    tensor, other = weights(), weights(seed=1)
    prepare(coder_of(tmp_path, tensor, other), tensor)
    (codes,) = (tmp_path / "coded").glob(f"*{CODED}")
    good = codes.read_bytes()
    prepare(coder_of(tmp_path, other), other)
    (wrong,) = (path for path in (tmp_path / "coded").glob(f"*{CODED}") if path != codes)
    codes.write_bytes(wrong.read_bytes())
    found, _ = prepare(coder_of(tmp_path, tensor), tensor)
    assert caplog.text.count("is damaged") == 1 and codes.read_bytes() == good
    made = found[id(tensor)]
    assert bytes(memoryview(made.coded).cast("B")[: made.nbytes]) == good


def test_a_file_with_other_weights_under_the_name_is_written_anew(tmp_path, caplog):
    tensor, other = weights(), weights(seed=1)
    prepare(coder_of(tmp_path, tensor), tensor)
    raw, codes = sorted((tmp_path / "coded").iterdir(), key=lambda path: path.suffix != RAW)
    assert codes.suffix == CODED and raw.stem == codes.stem
    assert raw.read_bytes() == tensor.view(torch.uint8).numpy().tobytes()
    raw.write_bytes(other.view(torch.uint8).numpy().tobytes())
    found, _ = prepare(coder_of(tmp_path, tensor), tensor)
    assert torch.equal(found[id(tensor)].readable, tensor)
    assert caplog.text.count("it holds other weights") == 1
    caplog.clear()
    raw.unlink()
    found, _ = prepare(coder_of(tmp_path, tensor), tensor)
    assert torch.equal(found[id(tensor)].readable, tensor) and raw.exists()
    written = [path.stat().st_ino for path in (raw, codes)]
    prepare(coder_of(tmp_path, tensor), tensor)
    assert [path.stat().st_ino for path in (raw, codes)] == written, "what fits is used again"
    assert not caplog.text, "what is not there is not damaged"


@pytest.mark.parametrize(
    "make",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t],
    ids=["transposed", "strided", "plain"],
)
def test_a_tensor_is_dense_on_the_host_and_keeps_the_order_of_its_elements(make):
    tensor = make(weights(64 * 64).view(64, 64))
    host = on_host(nn.Parameter(tensor))
    assert torch.equal(host, tensor) and host.untyped_storage().nbytes() >= tensor.nbytes
    is_dense = tensor.stride() != (64, 2)
    assert host.stride() == (tensor.stride() if is_dense else (32, 1))


def test_a_tensor_over_a_mapping_has_a_storage_of_its_own_bytes():
    like = weights(24).view(4, 6).t()
    mapped = bytearray(8) + bytearray(like.t().contiguous().view(torch.uint8).numpy().tobytes())
    found = tensor_over(mapped, 8, like)
    assert torch.equal(found, like) and found.stride() == like.stride()
    assert found.untyped_storage().nbytes() == like.nbytes and found.storage_offset() == 0
    strided = weights(48).view(4, 12)[:, ::2]
    assert tensor_over(mapped, 8, strided).stride() == (6, 1)
