"""AI-Toolkit's gradient accumulation by one setting: one fetch, and the bits of its own loop.

`Trainer` has the shape of its SDTrainer: the loop over batches, and what a batch leaves in the
trainer and in its network of adapters.
"""

from __future__ import annotations

import types
import weakref

import pytest
import torch
from equality import assert_same
from models import LoRA
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError
from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.aitoolkit.together import SETTING
from oracle_offload.engine import simulator

pytest.importorskip("greenlet")
WIDTH, BLOCKS, BATCHES = 64, 8, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class OfNetwork(LoRA):
    """What it adds is the network's to say."""

    def __init__(self, network, layer):
        super().__init__(layer)
        self.network_ref = weakref.ref(network)

    def forward(self, x):
        y, network = self.org_forward(x), self.network_ref()
        return y + self.up(self.down(x)) * network.torch_multiplier if network.is_active else y


class Network(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.is_active, self._multiplier, self.torch_multiplier = False, 1.0, torch.ones(1)
        layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
        self.loras = nn.ModuleList(OfNetwork(self, layer) for layer in layers)

    @property
    def multiplier(self):
        return self._multiplier

    @multiplier.setter
    def multiplier(self, value):
        if self._multiplier != value:
            self._multiplier, self.torch_multiplier = value, torch.tensor(value).view(-1, 1)

    def __enter__(self):
        self.is_active = True

    def __exit__(self, *error):
        self.is_active = False


class Timer:
    """As its own: a name that was not begun cannot end."""

    def __init__(self):
        self.active, self.current = {}, None

    def __call__(self, name):
        self.current = name
        self.active[name] = True
        return self

    def __enter__(self):
        pass

    def __exit__(self, *error):
        if self.current not in self.active:
            raise ValueError(f"Timer '{self.current}' was not started!")
        del self.active[self.current]


class Accelerator:
    num_processes = 1

    def backward(self, loss):
        loss.backward()


class Batch(int):
    """Knows the network's weight for each of its samples, of which the last batch has one less."""

    def get_network_weight_list(self):
        return [1.0, 0.5, 1.0, 1.0][self % BATCHES :][:1] * (2 if self % BATCHES == 3 else 3)


class Trainer:
    def __init__(self, folder, *, together, **changes):
        model = {"layer_offloading": True, SETTING: together}
        self.config = {"model": model, "train": {"gradient_accumulation": BATCHES}}
        self.save_root = str(folder)
        self.timer, self.accelerator, self.adapter = Timer(), Accelerator(), None
        self.sd = types.SimpleNamespace(is_multistage=False, noise_scheduler=None, unet=None)
        self.weights = [1.0] * BATCHES
        self.logs, self.seen = {}, []
        for name, value in changes.items():
            setattr(self, name, value)
        torch.manual_seed(0)
        self.sd.unet = Model().requires_grad_(False)

    def load(self, offload_percent):
        """As a loader does, which knows nothing of the trainer."""
        if offload_percent is not None:
            MemoryManager.attach(self.sd.unet, torch.device("cpu"), offload_percent)
        self.network = Network(self.sd.unet)
        torch.manual_seed(1)
        for parameter in self.network.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)

    def hook_train_loop(self, batch):
        batch_list = batch if isinstance(batch, list) else [batch]
        total_loss = None
        self.optimizer.zero_grad()
        for batch in batch_list:
            loss = self.train_single_accumulation(batch)
            if total_loss is None:
                total_loss = loss
            else:
                total_loss += loss
        self.gradients = [p.grad.clone() for p in self.network.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": (total_loss / len(batch_list)).item()}

    def train_single_accumulation(self, batch):
        torch.manual_seed(batch)
        self.prompt = f"batch {batch}"
        network, weights = self.network, [self.weights[batch % BATCHES]] * 3
        network.multiplier = getattr(batch, "get_network_weight_list", lambda: weights)()
        x = torch.randn(len(network.multiplier), WIDTH)
        with network:
            network.is_active = False
            with self.timer("prior"), torch.no_grad():
                prior = self.sd.unet(x)
            network.is_active = True
            with self.timer("predict"):
                y = self.sd.unet(x)
            assert self.prompt == f"batch {batch}" and network.is_active
            loss = (y - prior).square().mean() + y.square().mean()
            self.logs["loss"] = loss.item()
            with self.timer("backward"):
                self.accelerator.backward(loss)
        self.seen.append(batch)
        return loss.detach()


def train(folder, offload_percent=1.0, steps=3, kind=int, **options):
    """Return the trainer, its losses and gradients of each step, and a step's bytes."""
    trainer, found = Trainer(folder, **options), []
    trainer.load(offload_percent)
    try:
        for step in range(steps):
            before = simulator.stats().h2d_bytes
            numbers = range(step * BATCHES, (step + 1) * BATCHES)
            losses = trainer.hook_train_loop(list(map(kind, numbers)))
            found.append((losses["loss"], trainer.gradients))
            moved = simulator.stats().h2d_bytes - before
        if offload_percent is not None:
            assert len(trainer.sd.unet._memory_manager.layers) == 2 * BLOCKS
    finally:
        MemoryManager.detach(trainer.sd.unet)
    return trainer, found, moved


def test_its_loop_has_the_bits_of_its_own_and_the_bytes_of_one_batch(tmp_path, sim):
    resident, expected, _ = train(tmp_path, None, together=True)
    plain, separately, all_bytes = train(tmp_path, together=False)
    together, found, moved = train(tmp_path, together=True)
    for (loss, gradients), (other, others), (last, lasts) in zip(
        expected, separately, found, strict=True
    ):
        assert loss == other == last
        assert_same(gradients, others)
        assert_same(gradients, lasts)
    assert 0 < moved <= 0.3 * all_bytes
    for trainer in (resident, plain, together):
        assert trainer.prompt == f"batch {3 * BATCHES - 1}" and trainer.seen[-1] == 11
        assert not trainer.network.is_active and isinstance(trainer.timer, Timer)
        assert trainer.timer.active == {}
    assert together.logs == plain.logs


@pytest.mark.parametrize("kind", [int, Batch])
def test_batches_of_other_weights_or_sizes_are_computed_together_too(tmp_path, sim, kind):
    """Each checkpoint computes again with the network as its batch had it."""
    weights = [1.0, 1.0, 0.5, 1.0]
    options = {"kind": kind, "weights": weights}
    _, expected, _ = train(tmp_path, None, together=False, **options)
    _, _, all_bytes = train(tmp_path, together=False, **options)
    together, found, moved = train(tmp_path, together=True, **options)
    for (loss, gradients), (other, others) in zip(expected, found, strict=True):
        assert loss == other
        assert_same(gradients, others)
    assert 0 < moved <= 0.3 * all_bytes
    assert not together.network.is_active and together.seen == list(range(3 * BATCHES))


def test_a_step_of_one_batch_is_the_trainers_own(tmp_path, sim):
    trainer = Trainer(tmp_path, together=True)
    trainer.load(1.0)
    try:
        assert trainer.hook_train_loop(5)["loss"] == trainer.logs["loss"]
        assert trainer.seen == [5]
    finally:
        MemoryManager.detach(trainer.sd.unet)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sd": types.SimpleNamespace(is_multistage=True)}, "a model of several stages"),
        ({"adapter": nn.Identity()}, "adapter=Identity, which keeps a batch's inputs"),
        ({"accelerator": types.SimpleNamespace(num_processes=2)}, "2 processes, which share"),
    ],
)
def test_trainings_that_it_cannot_be_right_for_are_refused(tmp_path, sim, change, why):
    trainer = Trainer(tmp_path, together=True, **change)
    trainer.load(1.0)
    try:
        with pytest.raises(
            OffloadError, match=rf"model.{SETTING} is set for a training with {why}"
        ):
            trainer.hook_train_loop([1, 2])
    finally:
        MemoryManager.detach(trainer.sd.unet)


def test_a_trainer_with_a_loop_of_its_own_is_refused(tmp_path, sim):
    class Slider:
        def __init__(self):
            self.config, self.save_root = {"model": {SETTING: True}}, str(tmp_path)

        def load(self, model):
            MemoryManager.attach(model, torch.device("cpu"))

    model = Model()
    with pytest.raises(
        OffloadError, match="Slider computes the batches of a step in a loop of its"
    ):
        Slider().load(model)
    assert not hasattr(model, "_memory_manager")
