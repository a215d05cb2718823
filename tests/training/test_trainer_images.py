"""What `train-lora` computes of images, over parts of a pipeline whose results are known."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oracle_offload.trainer import images, lora
from oracle_offload.trainer.data import Sample
from oracle_offload.trainer.images import Images
from oracle_offload.trainer.settings import Settings, SettingsError

numpy = pytest.importorskip("numpy")
pictures = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


class Line:
    """A scheduler of two steps, each of which takes away what the model finds."""

    init_noise_sigma = 0.75
    timesteps = ()

    def __init__(self, kind="epsilon"):
        self.config = SimpleNamespace(num_train_timesteps=10, prediction_type=kind)

    @classmethod
    def from_config(cls, config):
        return cls(config.prediction_type)

    def set_timesteps(self, count):
        self.timesteps = [torch.tensor(time) for time in range(count, 0, -1)]

    def scale_model_input(self, latents, time):
        return latents / (1 + time)

    def step(self, found, time, latents):
        return SimpleNamespace(prev_sample=latents - found)

    def add_noise(self, latents, noise, times):
        return latents + noise * times.view(-1, 1, 1, 1)

    def get_velocity(self, latents, noise, times):
        return noise - latents * times.view(-1, 1, 1, 1)


class Denoiser(nn.Module):
    """Finds a share of what it sees, and adds what the caption says."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.seen = []

    def forward(self, noisy, times, encoder_hidden_states=None):
        self.seen.append((noisy.dtype, tuple(noisy.shape), encoder_hidden_states))
        found = noisy * self.share
        if encoder_hidden_states is not None:
            found = found + encoder_hidden_states.mean((1, 2)).view(-1, 1, 1, 1)
        return SimpleNamespace(sample=found)


class Vae:
    """Halves what it encodes, and doubles what it decodes."""

    dtype = torch.float32
    config = SimpleNamespace(scaling_factor=4.0)

    def encode(self, pixels):
        drawn = SimpleNamespace(sample=lambda: pixels / 2)
        return SimpleNamespace(latent_dist=drawn)

    def decode(self, latents):
        return SimpleNamespace(sample=latents * 2)


def task(kind="epsilon", captions=False, vae=None, dtype=torch.float32, **settings):
    made = Images.__new__(Images)
    made._settings = Settings("m", "d", preview_length=2, preview_prompt="a cat", **settings)
    made._pipeline = SimpleNamespace(scheduler=Line(kind), tokenizer=None)
    made.model, made._vae, made._encoder, made._side = Denoiser(dtype), vae, None, 4
    generator = torch.Generator().manual_seed(5)
    made._data = [
        (torch.randn(3, 4, 4, generator=generator), torch.full((2, 2), number + 1.0))
        for number in range(3)
    ]
    if not captions:
        made._data = [(latents, None) for latents, _ in made._data]
    made._eval_data = made._data[::-1]
    made._empty = None
    if captions:
        made._empty = torch.full((2, 2), 0.125)
        made._encode_text = lambda text: torch.full((2, 2), 0.25 if text == "a cat" else 9.0)
    return made


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("captions", [False, True])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_the_loss_is_of_the_noise_or_the_velocity_that_the_host_has_drawn(
    kind, captions, evaluating
):
    made = task(kind, captions)
    torch.manual_seed(3)
    (piece,) = made.pieces([2, 0], CPU, evaluating)
    rows = [made._data[0], made._data[2]] if evaluating else [made._data[2], made._data[0]]
    torch.manual_seed(3)
    noise, times = torch.randn(2, 3, 4, 4), torch.randint(0, 10, (2,))
    clean, by = torch.stack([latents for latents, _ in rows]), times.view(2, 1, 1, 1)
    expected = (clean + noise * by) * 0.5
    if captions:
        expected = expected + torch.stack([text.mean() for _, text in rows]).view(2, 1, 1, 1)
    target = noise if kind == "epsilon" else noise - clean * by
    assert piece.terms == 2 * 3 * 4 * 4
    torch.testing.assert_close(piece.loss_sum(), (expected - target).square().sum())
    (seen,) = made.model.seen
    assert seen[1] == (2, 3, 4, 4) and (seen[2] is not None) is captions


def test_the_model_sees_its_own_dtype_and_the_loss_is_float32():
    made = task(captions=True, dtype=torch.bfloat16)
    (piece,) = made.pieces([0], CPU, False)
    assert piece.loss_sum().dtype is torch.float32
    ((dtype, _, caption),) = made.model.seen
    assert dtype is caption.dtype is torch.bfloat16


@pytest.mark.parametrize("vae", [None, Vae()], ids=["pixels", "vae"])
@pytest.mark.parametrize("captions", [False, True])
def test_a_preview_is_denoised_from_the_noise_of_the_seed_with_guidance(tmp_path, captions, vae):
    made = task(captions=captions, vae=vae, seed=11)
    with torch.no_grad():
        path = made.preview(tmp_path, 42, CPU)
    latents = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(11)) * 0.75
    for time in (2, 1):
        found = latents / (1 + time) * 0.5
        if captions:  # 0.125 without the prompt, 0.25 with it, which counts five times
            found = found + 0.125 + 5.0 * (0.25 - 0.125)
        latents = latents - found
    pixels = latents if vae is None else latents / 4.0 * 2
    expected = ((pixels[0].clamp(-1, 1) + 1) / 2 * 255).round().permute(1, 2, 0)
    assert path == tmp_path / "step-000042.png"
    with pictures.open(path) as opened:
        shown = numpy.array(opened).astype(int)
    assert numpy.abs(shown - expected.numpy()).max() <= 1 and len(set(shown.flatten())) > 3
    assert [shape for _, shape, _ in made.model.seen] == [(1 + captions, 3, 4, 4)] * 2


@pytest.mark.parametrize("vae", [None, Vae()], ids=["pixels", "vae"])
def test_a_picture_is_black_at_minus_one_and_scaled_as_its_vae_says(tmp_path, vae):
    pictures.new("RGB", (9, 7), (255, 0, 51)).save(tmp_path / "x.png")
    made = task(vae=vae)
    found = made._encode_image(Sample("", tmp_path / "x.png"))
    by = 1.0 if vae is None else 0.5 * 4.0
    expected = torch.tensor([1, -1, -0.6]).view(3, 1, 1).expand(3, 4, 4) * by
    torch.testing.assert_close(found, expected)
    (tmp_path / "none.png").write_text("no picture")
    with pytest.raises(SettingsError, match=r"none\.png cannot be read: "):
        made._encode_image(Sample("", tmp_path / "none.png"))


def test_texts_are_encoded_as_long_as_the_encoder_takes_them():
    asked = []

    def tokenizer(text, **options):
        asked.append((text, options["max_length"], options["padding"], options["truncation"]))
        return SimpleNamespace(input_ids=torch.ones(1, options["max_length"]))

    def encoder(ids):
        assert not torch.is_grad_enabled()
        return (ids[..., None] * torch.arange(2.0),)

    made = task()
    assert made._encode_text("a") is None, "there is no encoder"
    made._pipeline.tokenizer, made._encoder = tokenizer, encoder
    for most, takes in ((8, 16), (77, 16)):
        tokenizer.model_max_length = most
        encoder.config = SimpleNamespace(max_position_embeddings=takes)
        found = made._encode_text("a cat")
        assert torch.equal(found, torch.arange(2.0).expand(min(most, takes), 2))
    assert asked == [("a cat", length, "max_length", True) for length in (8, 16)]


def test_all_pictures_of_a_folder_are_encoded_with_the_draws_of_the_seed(tmp_path):
    for name, grey in (("a", 0), ("b", 255)):
        pictures.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / f"{name}.png")
    (tmp_path / "b.txt").write_text("white")
    made = task(seed=6)
    made._encode_text = lambda text: (text, torch.rand(()).item())
    found = made._encode_all(str(tmp_path))
    torch.manual_seed(6)
    assert [caption for _, caption in found] == [
        ("", torch.rand(()).item()),
        ("white", torch.rand(()).item()),
    ]
    assert [float(pixels.mean()) for pixels, _ in found] == [-1.0, 1.0]


def test_adapters_are_saved_under_the_names_that_pipelines_read(tmp_path):
    from safetensors.torch import load_file

    made = task()
    made.model = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})})
    path = made.save(tmp_path)
    assert path == tmp_path / "pytorch_lora_weights.safetensors"
    found = load_file(path)
    assert list(found) == ["unet.lora_A.weight"]
    assert torch.equal(found["unet.lora_A.weight"], made.model["lora_A"]["default"].weight)


# ---- a pipeline's parts ----


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(sample_size=6)
        parts = {name: nn.Linear(2, 2) for name in ("to_q", "to_k", "to_v", "other")}
        parts["to_out"] = nn.ModuleList([nn.Linear(2, 2), nn.Dropout(0.1)])
        self.block = nn.ModuleDict(parts)


class Encoder(nn.Linear):
    def __init__(self, *channels):
        super().__init__(2, 2)
        self.config = SimpleNamespace(block_out_channels=channels)
        self.train()


@pytest.fixture
def begun(monkeypatch):
    """Return a function that makes the task of a pipeline with such parts."""

    def begin(kind="epsilon", settings=(), **parts):
        given = []

        class Pipeline:
            components = parts
            scheduler = SimpleNamespace(config={} if kind is None else {"prediction_type": kind})

            @staticmethod
            def from_pretrained(model, local_files_only):
                assert (model, local_files_only) == ("m", True)
                return Pipeline()

        def inject(model, settings, names):
            given.append((model, names))
            return "the adapter"

        monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(DiffusionPipeline=Pipeline))
        monkeypatch.setattr(lora, "inject", inject)
        monkeypatch.setattr(images, "read_samples", lambda path, images: [Sample(path)] * len(path))
        monkeypatch.setattr(Images, "_encode_image", lambda self, sample: sample.text)
        monkeypatch.setattr(Images, "_encode_text", lambda self, text: f"encoded {text!r}")
        made = Images(Settings("m", "d", **dict(settings)))
        made.given = given
        return made

    return begin


def test_a_unet_is_trained_and_what_encodes_for_it_is_not(begun):
    unet, vae, encoder = Unet().eval(), Encoder(4, 8, 8), Encoder()
    made = begun(unet=unet, vae=vae, text_encoder=encoder, safety_checker=None)
    assert made.model is unet and unet.training and made.notes == []
    for part in (vae, encoder):
        assert not part.training and not any(p.requires_grad for p in part.parameters())
    attention = [f"block.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
    assert made.given == [(unet, attention)]
    assert (made._vae, made._encoder, made._side) == (vae, encoder, 6 * 4)
    assert made.lengths == [1] and made.eval_lengths == []
    assert made._empty == "encoded ''"


@pytest.mark.parametrize(
    ("channels", "resolution", "side"),
    [(None, 0, 6), (None, 7, 7), ((4,), 0, 6), ((4, 8), 0, 12), ((4, 8, 8, 8), 16, 16)],
    ids=str,
)
def test_the_side_is_what_the_model_was_made_for_or_what_is_asked(
    begun, channels, resolution, side
):
    vae = None if channels is None else Encoder(*channels)
    settings = {"resolution": resolution, "eval_file": "ev"}
    made = begun("v_prediction", settings, unet=Unet(), vae=vae)
    assert made._side == side and made._encoder is None
    assert made.eval_lengths == [1] * 2 and made._eval_data == [("ev", "encoded 'ev'")] * 2


@pytest.mark.parametrize(
    ("parts", "kind", "settings", "told"),
    [
        ({"vae": None}, "epsilon", {}, "model='m' is a Pipeline: this trainer knows pipelines of"),
        ({"unet": Unet(), "text_encoder_2": None}, "epsilon", {}, "with at most one text encoder"),
        ({"unet": Unet()}, "sample", {}, "predicts 'sample': this trainer knows epsilon and v_pr"),
        ({"unet": Unet()}, "epsilon", {"chunk_size": 3}, "chunk_size=3 is for texts, not for im"),
        (
            {"unet": Unet(), "vae": Encoder(4, 8, 8)},
            "epsilon",
            {"resolution": 6},
            "resolution=6 is no multiple of 4",
        ),
    ],
)
def test_pipelines_that_cannot_be_trained_are_refused(begun, parts, kind, settings, told):
    with pytest.raises(SettingsError) as raised:
        begun(kind, settings, **parts)
    assert told in str(raised.value)


def test_a_scheduler_that_says_nothing_predicts_the_noise(begun):
    assert begun(None, unet=Unet()).model.training
