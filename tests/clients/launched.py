"""A rank of a training under a launcher, for `test_several.py`: a LoRA over shared weights.

python launched.py KIND SHARE FOLDER

KIND is accelerate, lightning or trainer, as a user of each would write it; SHARE is node, or plain
for resident models. Writes into FOLDER, for each rank, how many have its weights and a hash of what
it has trained.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from sides import Rows  # noqa: E402, I001 - puts the helpers of tests/training on the path
import models  # noqa: E402
import torch  # noqa: E402

import oracle_offload  # noqa: E402

STEPS = 3


def adapted(share):
    """Return a frozen model with adapters; where `share` is "node", its weights are the ranks'."""
    torch.manual_seed(0)  # all ranks have the same weights
    model = models.llama().train().requires_grad_(False)
    manager = None
    if share == "node":
        manager = oracle_offload.attach(model, "cpu", share="node", offload_percent=0.9)
    models.lora(model, ["q_proj", "v_proj"])
    if manager is not None:
        manager.settle()
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def accelerate(share, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = adapted(share)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(16), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(STEPS), loader, strict=False):
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def lightning(share, folder):
    import lightning

    class Module(lightning.LightningModule):
        def configure_model(self):  # once the ranks know one another
            if not hasattr(self, "model"):
                self.model = adapted(share)

        def training_step(self, batch):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(trained(self), lr=1e-2)

    module = Module()
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        enable_checkpointing=False,
        default_root_dir=folder,
        **quiet,
    ).fit(module, torch.utils.data.DataLoader(Rows(16), batch_size=2))
    return module.model


def trainer(share, folder):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(  # which begins the process group
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = adapted(share)
    Trainer(model, arguments, train_dataset=Rows(16)).train()
    return model


def main(kind, share, folder):
    Path(folder).mkdir(exist_ok=True)
    model = globals()[kind](share, folder)
    content = b"".join(p.detach().numpy().tobytes() for p in trained(model))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = {"world": world, "adapters": hashlib.sha256(content).hexdigest()}
    if share == "node":
        usage = oracle_offload.memory_summary().devices[0].models[0]
        said |= {"shared_by": usage.shared_by, "shared_bytes": usage.shared_bytes}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    torch.distributed.barrier()  # no rank ends while others still read
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
