"""Train models quantised by the torchao in a given folder, whose tensors are nested: a process.

``python older_torchao.py FOLDER DEVICE``
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER, DEVICE = sys.argv[1:]
sys.path.insert(0, FOLDER)
sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))

import torch  # noqa: E402

if DEVICE == "simgpu":
    import simgpu

    simgpu.install()

import torchao  # noqa: E402
from equality import assert_models_agree, attached  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torchao import quantization as ao  # noqa: E402

from oracle_offload.layers.quantised import QuantisedLayer  # noqa: E402

# How a weight is quantised, and the tensors that hold its bytes.
CONFIGS = {
    ao.Int8WeightOnlyConfig: ["int_data", "scale", "zero_point"],
    ao.Float8WeightOnlyConfig: ["float8_data", "scale"],
    ao.Int8DynamicActivationInt8WeightConfig: ["int_data", "scale"],
}


def model_of(config):
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        for _ in range(3)
    ).to(torch.bfloat16)
    ao.quantize_(model, config())
    return model.requires_grad_(False)


def step_of(mode):
    x = torch.linspace(-2, 2, 2 * 5 * 64).sin().view(2, 5, 64).to(DEVICE, torch.bfloat16)

    def step(model):
        y = given = x.clone().requires_grad_(mode != "inference")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mode == "autocast"):
            for block in model:
                if mode.endswith("reentrant"):
                    y = y + checkpoint(block, y, use_reentrant=mode == "reentrant")
                else:
                    y = y + block(y)
        if mode != "inference":
            y.float().square().mean().backward()
        return [y.detach(), given.grad]

    return step


def main():
    assert torchao.__version__.startswith("0.10."), torchao.__version__
    assert Path(torchao.__file__).is_relative_to(FOLDER), torchao.__file__
    torch.set_num_threads(1)
    for config, tensors in CONFIGS.items():
        dynamic = config is ao.Int8DynamicActivationInt8WeightConfig  # which has no derivative
        for mode in (
            ["inference"] if dynamic else ["plain", "reentrant", "not-reentrant", "autocast"]
        ):
            managed, resident = model_of(config), model_of(config)
            with attached(managed, DEVICE) as manager:
                layers = [one for one in manager.layers if isinstance(one, QuantisedLayer)]
                assert len(layers) == 6, manager.resident
                for layer in layers:
                    nested = [path for path in layer.names if ".tensor_impl." in path]
                    assert [path.rpartition(".")[2] for path in nested] == tensors, layer.names
                assert_models_agree(managed, resident, step_of(mode), device=DEVICE)
            print(config.__name__, mode)


main()
