"""Quantised layers on "cuda" without a GPU: by operators of torch, or refused by name.

Their libraries' own kernels run on a card, in part "formats" of `make gpu-check`.
"""

from __future__ import annotations

import bench_formats
import pytest
import torch
from torch import nn

# A card's kernels in torch, and libraries that .venv-cuda has not.
MISSING = {
    "torchao int4, tile_packed_to_4d": "_convert_weight_to_int4pack. has no kernel without a GPU",
    "torchao int4, plain": "mslk",
    **dict.fromkeys(("FP8Linear", "FP8Experts", "MXFP4", "NVFP4"), "kernels"),
}


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """bitsandbytes asks for it, and computes without where it fails: as here, without Triton."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", bench_formats.FORMATS)
def test_managed_layers_have_the_residents_bits_or_it_is_said_what_is_missing(name):
    make, trains = bench_formats.FORMATS[name]
    row = bench_formats.compare(make, trains, "cuda")
    if name in MISSING:
        assert MISSING[name] in row["skipped"]
        return
    assert row.get("equal_count") == row.get("results_count") == 1 + trains, row
    assert row["layers_count"] == bench_formats.LAYERS
    assert row["managed_bytes"] < 4 * bench_formats.LAYERS * bench_formats.WIDTH**2


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
def test_bitsandbytes_computes_what_the_plain_layer_does_as_near_as_its_bits_allow(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, bias=False)
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"quant_type": "nf4"}
    layer = getattr(bitsandbytes.nn, kind)(256, 128, bias=False, **options)
    layer.load_state_dict(plain.state_dict())
    layer.cuda()
    assert layer.weight.dtype in (torch.int8, torch.uint8) and layer.weight.is_cuda
    x = torch.randn(8, 256)
    difference = layer(x.cuda().half()).float().cpu() - plain(x)
    assert difference.norm() < (0.02 if kind == "Linear8bitLt" else 0.15) * plain(x).norm()


@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        ("AdamW8bit", NotImplementedError, "optimizer_update_8bit_blockwise"),
        ("PagedAdamW", RuntimeError, "cudaMemPrefetchAsync"),
    ],
)
def test_what_bitsandbytes_has_not_in_plain_torch_is_named(kind, error, named):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameter = nn.Parameter(torch.ones(1 << 17, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(error, match=named):
        getattr(bitsandbytes.optim, kind)([parameter]).step()
