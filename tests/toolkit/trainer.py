"""AI-Toolkit's own trainer on a tiny model: a job from its configuration to the saved LoRA."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers.pipelines.ltx2 import export_utils
from PIL import Image
from runs import DEVICE, moved_bytes
from safetensors.torch import load_file
from toolkit.memory_management import MemoryManager

if not hasattr(export_utils, "encode_video"):  # where the checkout's diffusers had it
    from diffusers.utils import encode_video

    export_utils.encode_video = encode_video


def images(folder, count=2, size=64):
    """Write the pictures and captions to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for number in range(count):
        pixels = noise.integers(0, 255, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")


def configuration(folder, arch, checkpoint, *, offloading, steps, **changes):
    """Return a job as its users write it, in small."""
    process = {
        "type": "sd_trainer",
        "training_folder": str(folder),
        "training_seed": 42,
        "device": str(DEVICE),
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "save": {"dtype": "float32", "save_every": 2, "max_step_saves_to_keep": 9},
        "datasets": [
            {
                "folder_path": str(folder / "images"),
                "caption_ext": "txt",
                "caption_dropout_rate": 0.0,
                "cache_latents": True,
                "resolution": [64],
                "num_frames": 1,
            }
        ],
        "train": {
            "batch_size": 1,
            "steps": steps,
            "gradient_checkpointing": True,
            "noise_scheduler": "flowmatch",
            "timestep_type": "linear",
            "optimizer": "adamw",
            "lr": 1e-3,
            "dtype": "bf16",
            "skip_first_sample": False,
        },
        "model": {
            "name_or_path": str(checkpoint),
            "extras_name_or_path": str(checkpoint),
            "arch": arch,
            # Switched on, it also lets previews go without merging the LoRA, which rounds weights.
            "layer_offloading": True,
            "layer_offloading_transformer_percent": float(offloading),
            "layer_offloading_text_encoder_percent": float(offloading),
        },
        "sample": {
            "sampler": "flowmatch",
            "sample_every": 2,
            "width": 64,
            "height": 64,
            "prompts": ["a picture"],
            "neg": "",
            "seed": 1,
            "guidance_scale": 2,
            "sample_steps": 2,
            "num_frames": 1,
        },
    }
    for section, values in changes.items():
        process[section].update(values)
    config = {"name": "tiny", "process": [OrderedDict(process)]}
    return OrderedDict(job="extension", config=OrderedDict(config))


class Attached:
    """What was attached in a run: layers managed at each attach, and bytes over the link."""

    def __init__(self):
        self.models, self.link_bytes, self.managed = [], 0, {}

    @contextlib.contextmanager
    def watching(self):
        attach, free = MemoryManager.attach.__func__, MemoryManager.free.__func__

        def attached(cls, module, *args, **kwargs):
            attach(cls, module, *args, **kwargs)
            found = getattr(module, "_memory_manager", None)
            assert found is not None and found.layers, type(module)
            self.models.append(module)

        def freed(cls, module):
            self.look()
            free(cls, module)

        before = moved_bytes()
        with (
            mock.patch.object(MemoryManager, "attach", classmethod(attached)),
            mock.patch.object(MemoryManager, "free", classmethod(freed)),
        ):
            yield
        self.look()
        self.link_bytes = moved_bytes() - before
        for model in self.models:
            MemoryManager.detach(model)

    def look(self):
        """Note which layers are managed now."""
        for model in self.models:
            found = getattr(model, "_memory_manager", None)
            if found is not None:
                kinds = [type(layer).__name__ for layer in found.layers]
                self.managed[type(model).__name__] = kinds


def run(config, before_step=None):
    """Run a job as its command does; return the losses, the previews, the LoRAs, and `Attached`.

    Each step draws the same random numbers in every run, also in one that resumes. The trainer's
    process is given to `before_step`.
    """
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    from jobs import ExtensionJob as _  # noqa: F401
    from toolkit.job import get_job

    ExtensionJob = sys.modules["jobs.ExtensionJob"]
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(0)

    def kinds():
        return {"sd_trainer": SDTrainer}

    losses = []
    train = SDTrainer.hook_train_loop

    def noting(self, batch):
        torch.manual_seed(self.step_num)
        if before_step is not None:
            before_step(self)
        found = train(self, batch)
        losses.append(float(found["loss"]))
        return found

    attached = Attached()
    with (
        # The other extensions, which the job would load all, want libraries of their own.
        mock.patch.object(ExtensionJob, "get_all_extensions_process_dict", kinds),
        mock.patch.object(SDTrainer, "hook_train_loop", noting),
        # What it calls after an out-of-memory error; alone of its calls this one wants CUDA.
        mock.patch.object(torch.cuda, "ipc_collect", lambda: None),
        attached.watching(),
    ):
        job = get_job(config)
        job.run()
        job.cleanup()
    folder = Path(config["config"]["process"][0]["training_folder"]) / "tiny"
    previews = [
        torch.from_numpy(np.array(Image.open(path)))
        for path in sorted((folder / "samples").glob("*.jpg"), key=lambda path: path.name[-20:])
    ]
    saved = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return losses, previews, saved, attached
