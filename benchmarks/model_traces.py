"""What models use, layer by layer: the sizes of their weights and the seconds of their kernels.

Shapes are those of the published configurations (hidden size, feed-forward size, blocks, heads);
a layer is a linear or convolution of a block that repeats. Kernels take the longer of computing
(2 operations per weight and token) and of reading the weights; attention is computed after its
last input. Weights are frozen and blocks checkpointed: a backward computes the input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

ALIGNMENT = 256
MIB = 2**20
TOGETHER_BYTES = 4 * MIB  # consecutive layers of a block that are smaller share a unit
FORWARD, RECOMPUTE, BACKWARD, RECORDED = range(4)
ATTENTION_BACKWARD = 2.5  # times its forward


@dataclass(frozen=True)
class Card:
    """A device: bytes for weights without a training's own, and what it does in a second."""

    arena_bytes: float
    link_bps: float
    flops: float
    memory_bps: float


# What cards have and do: as the presets of the simulator, the H200 as it computes in practice.
CARDS = {
    "3090": Card(16e9, 24e9, 60e12, 936e9),
    "4090": Card(16e9, 25e9, 110e12, 1008e9),
    "5090": Card(24e9, 50e9, 150e12, 1792e9),
    "h200": Card(120e9, 55e9, 600e12, 4800e9),
}
DTYPES = {"bf16": 2, "fp8": 1}  # bytes per weight


@dataclass(frozen=True)
class Layer:
    """A layer's weights, how many tokens it sees, and operations of its own after it."""

    weights: float
    tokens: float
    attention: float = 0.0
    used: float = 1.0  # the share of the weights that a token is multiplied with


@dataclass(frozen=True)
class Visit:
    """A use of a unit and the seconds of its kernels."""

    unit: int
    kind: int
    seconds: float


@dataclass
class Trace:
    """Units in order of creation, and the visits of a training step and of a sampling sweep."""

    unit_bytes: list[int] = field(default_factory=list)
    train: list[Visit] = field(default_factory=list)
    sample: list[Visit] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)  # the units of each

    @property
    def block_bytes(self) -> int:
        """Return the bytes of the largest block."""
        return max(sum(self.unit_bytes[unit] for unit in block) for block in self.blocks)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all units."""
        return sum(self.unit_bytes)

    def floor_bytes(self) -> int:
        """Return what an arena needs at least: two of the largest units, or one block."""
        return max(2 * max(self.unit_bytes), self.block_bytes)


Blocks = list[list[Layer]]


def _attention(tokens: float, keys: float, width: float) -> float:
    return 4.0 * tokens * keys * width


def _linear(tokens: float, *weights: float) -> list[Layer]:
    return [Layer(each, tokens) for each in weights]


def _two_streams(h: float, image: float, text: float) -> list[Layer]:
    """Return a block of two streams that attend together, as in FLUX.1 and Qwen-Image."""
    hh = h * h
    both = image + text
    return [
        *_linear(1, 6 * hh, 6 * hh),  # the modulation of both streams
        *_linear(image, hh, hh, hh),
        *_linear(text, hh, hh),
        Layer(hh, text, _attention(both, both, h)),
        *_linear(image, hh),
        *_linear(text, hh),
        *_linear(image, 4 * hh, 4 * hh),
        *_linear(text, 4 * hh, 4 * hh),
    ]


def _flux1(h: float, image: float, text: float) -> Blocks:
    """FLUX.1 at its depth: 19 blocks of two streams, 38 of one."""
    hh, both = h * h, image + text
    single = [
        *_linear(1, 3 * hh),
        *_linear(both, 4 * hh, hh, hh),
        Layer(hh, both, _attention(both, both, h)),
        *_linear(both, 5 * hh),
    ]
    return [_two_streams(h, image, text) for _ in range(19)] + [list(single) for _ in range(38)]


def flux2(size: int) -> Blocks:
    """FLUX.2-dev: 8 blocks of two streams, 48 of one, both with gated feed-forwards."""
    h, image, text = 6144.0, (size / 16) ** 2, 512.0
    hh, both = h * h, image + text
    attended = _attention(both, both, h)
    double = [
        *_linear(image, hh, hh, hh),
        *_linear(text, hh, hh),
        Layer(hh, text, attended),
        *_linear(image, hh),
        *_linear(text, hh),
        *_linear(image, 6 * hh, 3 * hh),
        *_linear(text, 6 * hh, 3 * hh),
    ]
    single = [Layer(9 * hh, both, attended), *_linear(both, 4 * hh)]
    return [list(double) for _ in range(8)] + [list(single) for _ in range(48)]


def qwen_image(size: int) -> Blocks:
    """Qwen-Image: 60 blocks of two streams."""
    return [_two_streams(3072.0, (size / 16) ** 2, 256.0) for _ in range(60)]


def wan_14b(size: int) -> Blocks:
    """Wan 14B: 40 blocks; a clip of 17 frames, which are 5 in its latent space."""
    h, inner, video, text = 5120.0, 13824.0, (size / 16) ** 2 * 5, 512.0
    hh = h * h
    block = [
        *_linear(video, hh, hh),
        Layer(hh, video, _attention(video, video, h)),
        *_linear(video, hh, hh),
        *_linear(text, hh),
        Layer(hh, text, _attention(video, text, h)),
        *_linear(video, hh, inner * h, inner * h),
    ]
    return [list(block) for _ in range(40)]


def ltx2(size: int) -> Blocks:
    """LTX-2: 48 blocks of video (4096 wide) and audio (2048); 121 frames, 16 in latent space."""
    v, a = 4096.0, 2048.0
    video, audio, text = (size / 32) ** 2 * 16, 126.0, 1024.0

    def attends(h: float, tokens: float, keys: float) -> list[Layer]:
        hh = h * h
        return [
            *_linear(tokens, hh),
            *_linear(keys, hh),
            Layer(hh, keys, _attention(tokens, keys, h)),
            *_linear(tokens, hh),
        ]

    def across(of: float, tokens: float, other: float, keys: float) -> list[Layer]:
        return [
            *_linear(tokens, of * a),
            *_linear(keys, other * a),
            Layer(other * a, keys, _attention(tokens, keys, a)),
            *_linear(tokens, of * a),
        ]

    block = [
        *attends(v, video, video),
        *attends(a, audio, audio),
        *attends(v, video, text),
        *attends(a, audio, text),
        *across(v, video, a, audio),
        *across(a, audio, v, video),
        *_linear(video, 4 * v * v, 4 * v * v),
        *_linear(audio, 4 * a * a, 4 * a * a),
    ]
    return [list(block) for _ in range(48)]


def sdxl(size: int) -> Blocks:
    """SDXL's UNet: residual blocks, and transformer blocks at two of three resolutions."""
    full = (size / 8) ** 2
    text, text_width = 77.0, 2048.0
    blocks: Blocks = []

    def residual(width_in: float, width: float, tokens: float) -> None:
        layers = [Layer(9 * width_in * width, tokens), Layer(1280 * width, 1)]
        layers += [Layer(9 * width * width, tokens)]
        if width_in != width:
            layers += [Layer(width_in * width, tokens)]
        blocks.append(layers)

    def transformer(width: float, tokens: float, depth: int) -> None:
        ww = width * width
        blocks.append(_linear(tokens, ww))
        for _ in range(depth):
            blocks.append(
                [
                    *_linear(tokens, ww, ww),
                    Layer(ww, tokens, _attention(tokens, tokens, width)),
                    *_linear(tokens, ww, ww),
                    *_linear(text, text_width * width),
                    Layer(text_width * width, text, _attention(tokens, text, width)),
                    *_linear(tokens, ww, 8 * ww, 4 * ww),
                ]
            )
        blocks.append(_linear(tokens, ww))

    for _ in range(2):
        residual(320, 320, full)
    blocks.append([Layer(9 * 320 * 320, full / 4)])
    for width_in in (320, 640):
        residual(width_in, 640, full / 4)
        transformer(640, full / 4, 2)
    blocks.append([Layer(9 * 640 * 640, full / 16)])
    for width_in in (640, 1280):
        residual(width_in, 1280, full / 16)
        transformer(1280, full / 16, 10)
    residual(1280, 1280, full / 16)  # the middle
    transformer(1280, full / 16, 10)
    residual(1280, 1280, full / 16)
    for width_in in (2560, 2560, 1920):
        residual(width_in, 1280, full / 16)
        transformer(1280, full / 16, 10)
    blocks.append([Layer(9 * 1280 * 1280, full / 4)])
    for width_in in (1920, 1280, 960):
        residual(width_in, 640, full / 4)
        transformer(640, full / 4, 2)
    blocks.append([Layer(9 * 640 * 640, full)])
    for width_in in (960, 640, 640):
        residual(width_in, 320, full)
    return blocks


def _llama(h: float, inner: float, blocks: int, tokens: int) -> Blocks:
    """Blocks with grouped keys."""
    keys, n = 1024.0, float(tokens)
    block = [
        *_linear(n, h * h, h * keys),
        Layer(h * keys, n, _attention(n, n, h) / 2),  # causal
        *_linear(n, h * h, h * inner, h * inner, h * inner),
    ]
    return [list(block) for _ in range(blocks)]


def llama_70b(tokens: int) -> Blocks:
    """Llama 70B: 80 blocks."""
    return _llama(8192.0, 28672.0, 80, tokens)


def llama_8b(tokens: int) -> Blocks:
    """Llama 3 8B: 32 blocks."""
    return _llama(4096.0, 14336.0, 32, tokens)


def llama_8b_whole(tokens: int) -> Blocks:
    """Llama 3 8B with its table and its head of 128,256 rows, each in four parts."""
    rows, parts = 128256.0 * 4096.0, 4
    table = [Layer(rows / parts, float(tokens), used=0.0)] * parts
    head = [Layer(rows / parts, float(tokens))] * parts
    return [table, *llama_8b(tokens), head]


def qwen3_30b(tokens: int) -> Blocks:
    """Qwen3-30B-A3B: 48 blocks of 128 experts, 8 for each token; experts in two tensors, as in
    transformers 5, here in parts of 16 experts each, which are units of their own.
    """
    h, inner, heads, keys, n = 2048.0, 768.0, 4096.0, 512.0, float(tokens)
    parts, experts, active = 8, 128, 8
    each = experts / parts * inner * h
    share = active / experts
    block = [
        *_linear(n, h * heads, h * keys),
        Layer(h * keys, n, _attention(n, n, heads) / 2),
        *_linear(n, heads * h, h * experts),
        *[Layer(2 * each, n, used=share) for _ in range(parts)],
        *[Layer(each, n, used=share) for _ in range(parts)],
    ]
    return [list(block) for _ in range(48)]


def flux1(size: int) -> Blocks:
    """FLUX.1-dev."""
    return _flux1(3072.0, (size / 16) ** 2, 512.0)


def demo(width: int) -> Blocks:
    """What ``oracle-offload demo`` trains: FLUX.1's blocks, narrow, on a few tokens."""
    return _flux1(float(width), 64.0, 16.0)


MODELS: dict[str, tuple[Callable[[int], Blocks], Sequence[int]]] = {
    "flux1": (flux1, (512, 1024, 1536)),
    "flux2": (flux2, (512, 1024, 1536)),
    "qwen-image": (qwen_image, (512, 1024, 1536)),
    "wan-14b": (wan_14b, (512, 1024, 1536)),
    "ltx2": (ltx2, (512, 1024, 1536)),
    "sdxl": (sdxl, (512, 1024, 1536)),
    "llama-70b": (llama_70b, (512, 2048, 8192)),
    "qwen3-30b": (qwen3_30b, (512, 2048, 8192)),
}


EXTRAS: dict[str, tuple[Callable[[int], Blocks], Sequence[int]]] = {
    "demo": (demo, (128,)),
    "llama-8b": (llama_8b, (8192, 32768, 131072)),
    "llama-8b-whole": (llama_8b_whole, (8192,)),
}


@dataclass(frozen=True)
class _Unit:
    nbytes: int
    forward_s: float
    backward_s: float


def _units(
    block: list[Layer], card: Card, bytes_per_weight: int, batch: int, trained: bool
) -> Iterator[_Unit]:
    """Group a block's layers as an attachment does."""
    nbytes, forward, backward = 0, 0.0, 0.0
    for layer in block:
        size = -(-int(layer.weights * bytes_per_weight) // ALIGNMENT) * ALIGNMENT
        linear = max(
            2 * layer.weights * layer.used * layer.tokens * batch / card.flops,
            size / card.memory_bps,
        )
        attended = layer.attention * batch / card.flops
        if nbytes and nbytes + size > TOGETHER_BYTES:
            yield _Unit(nbytes, forward, backward)
            nbytes, forward, backward = 0, 0.0, 0.0
        nbytes += size
        forward += linear + attended
        backward += (1 + trained) * linear + ATTENTION_BACKWARD * attended
    yield _Unit(nbytes, forward, backward)


def trace_of(
    model: str, size: int, card: Card, dtype: str, batch: int = 1, trained: bool = False
) -> Trace:
    """Return what a model uses on a card for `batch` samples, with checkpointed blocks.

    Weights are frozen, or trained: then a backward computes their gradients, too.
    """
    trace = Trace()
    blocks: list[list[tuple[int, _Unit]]] = []
    for layers in {**MODELS, **EXTRAS}[model][0](size):
        units = list(_units(layers, card, DTYPES[dtype], batch, trained))
        first = len(trace.unit_bytes)
        trace.unit_bytes += [unit.nbytes for unit in units]
        trace.blocks.append(list(range(first, len(trace.unit_bytes))))
        blocks.append(list(enumerate(units, first)))
    for block in blocks:
        trace.sample += [Visit(number, FORWARD, unit.forward_s) for number, unit in block]
    trace.train = [replace(visit, kind=RECORDED) for visit in trace.sample]
    for block in reversed(blocks):
        trace.train += [Visit(number, RECOMPUTE, unit.forward_s) for number, unit in block]
        trace.train += [
            Visit(number, BACKWARD, unit.backward_s) for number, unit in reversed(block)
        ]
    return trace
