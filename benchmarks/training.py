"""Models to train on the device under test: real shapes on a card, small ones on the simulator."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore", category=UserWarning)

# cuDNN 9.19, which torch 2.11 takes on Hopper cards before the other kernels for attention, reads
# memory that is not there in the backward of these models, resident as well; flash attention runs.
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Shape:
    """A model and the input of its steps."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[torch.Generator, str], dict[str, Any]]
    sizes: dict[str, int]


def flux(
    width: int, head: int, layers: tuple[int, int], tokens: tuple[int, int], outside: int
) -> Shape:
    """Return FluxTransformer2DModel: `tokens` of image and text, `outside` wide text features."""

    def build() -> Any:
        import diffusers

        model: Any = diffusers.FluxTransformer2DModel
        return model(
            patch_size=1,
            in_channels=64,
            num_layers=layers[0],
            num_single_layers=layers[1],
            attention_head_dim=head,
            num_attention_heads=width // head,
            joint_attention_dim=outside,
            pooled_projection_dim=outside,
            guidance_embeds=True,
            axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
        )

    def inputs(generator: torch.Generator, device: str) -> dict[str, Any]:
        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

        places = torch.zeros(tokens[0], 3)
        places[:, 1] = torch.arange(tokens[0]) // int(tokens[0] ** 0.5)
        places[:, 2] = torch.arange(tokens[0]) % int(tokens[0] ** 0.5)
        return {
            "hidden_states": noise(1, tokens[0], 64),
            "encoder_hidden_states": noise(1, tokens[1], outside),
            "pooled_projections": noise(1, outside),
            "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
            "guidance": torch.full((1,), 3.5, device=device, dtype=torch.bfloat16),
            "img_ids": places.to(device),
            "txt_ids": torch.zeros(tokens[1], 3, device=device),
        }

    sizes = {"width": width, "double_blocks_count": layers[0], "single_blocks_count": layers[1]}
    sizes |= {"image_tokens_count": tokens[0], "text_tokens_count": tokens[1]}
    return Shape(f"flux width {width}", build, inputs, sizes)


def unet(channels: tuple[int, ...], layers: int, side: int, text: int) -> Shape:
    """Return UNet2DConditionModel: many small layers, so that the host's cost shows."""
    depth = len(channels)

    def build() -> Any:
        import diffusers

        model: Any = diffusers.UNet2DConditionModel
        return model(
            sample_size=side,
            block_out_channels=channels,
            layers_per_block=layers,
            down_block_types=("CrossAttnDownBlock2D",) * (depth - 1) + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (depth - 1),
            cross_attention_dim=text,
            attention_head_dim=8,
            norm_num_groups=8,
        )

    def inputs(generator: torch.Generator, device: str) -> dict[str, Any]:
        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

        return {
            "sample": noise(1, 4, side, side),
            "timestep": torch.full((1,), 500, device=device),
            "encoder_hidden_states": noise(1, 77, text),
        }

    sizes = {"width": channels[0], "blocks_count": 2 * depth, "side": side}
    return Shape(f"unet width {channels[0]}", build, inputs, sizes)


def flux_shape(device: str, width: int) -> Shape:
    """Return Flux at its real depth; shallow and narrow where sizes are small."""
    if common.is_small(device):
        return flux(width // 16, 32, (1, 1), (16, 8), 32)
    return flux(width, 128, (19, 38), (4096, 512), 768)


def unet_shape(device: str) -> Shape:
    """Return the UNet of Stable Diffusion 1.5; a small one where sizes are small."""
    if common.is_small(device):
        return unet((16, 32), 1, 8, 16)
    return unet((320, 640, 1280, 1280), 2, 64, 768)


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of the model in bfloat16, without building it."""
    with torch.device("meta"):
        return int(2 * sum(p.numel() for p in shape.build().parameters()))


def build(shape: Shape, device: str) -> Any:
    """Return the model on `device`: frozen, bfloat16, checkpointed, with a LoRA of peft."""
    from peft import LoraConfig

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    # Made in place: 12 billion random numbers take minutes on a processor.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = shape.build()
    finally:
        torch.set_default_dtype(default)
    model = model.to(torch.bfloat16).requires_grad_(False)
    model.enable_gradient_checkpointing()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device, torch.bfloat16)
    return model.train()


def adapters(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the LoRA, which stay resident."""
    return [
        module
        for name, module in model.named_modules()
        if "lora_" in name and isinstance(module, nn.Linear)
    ]


class Training:
    """The steps of one model, from the LoRA it began with."""

    def __init__(self, model: nn.Module, shape: Shape, device: str) -> None:
        self.model, self.shape, self.device = model, shape, device
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.first = [p.detach().clone() for p in self.trained]
        self.begin()

    def begin(self) -> None:
        """Start again."""
        with torch.no_grad():
            for parameter, value in zip(self.trained, self.first, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.losses: list[Tensor] = []
        self.inputs = self.shape.inputs(torch.Generator().manual_seed(0), self.device)

    def step(self) -> None:
        """Forward, backward, optimizer; the loss stays on the device."""
        output = self.model(**self.inputs).sample
        loss = output.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def timed(self) -> float:
        """Run a step; see `time_step`."""
        return time_step(self.step, self.device)


def time_step(step: Callable[[], object], device: str) -> float:
    """Run a step and return its seconds, on the simulated device those of its clock."""
    if not common.is_simulated(device):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    from oracle_offload.engine import simulator
    from oracle_offload.model.witness import Witness

    virtual = simulator.finish()
    with Witness(strict=False, clock=True):
        step()
    return simulator.finish() - virtual


def clean(device: str) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if not common.is_simulated(device):
        torch.cuda.empty_cache()
