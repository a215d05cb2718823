"""`attach` with ``disk=True``: weights stay in their files and are read each time they travel."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from dataclasses import replace

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, step_alike
from models import checkpointed
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import _core
from oracle_offload.errors import OffloadError
from oracle_offload.host.disk import remote_kind
from oracle_offload.model import masters
from oracle_offload.model.on_disk import between, largest, middle

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/pagemap", os.R_OK) or bool(remote_kind(tempfile.gettempdir())),
    reason="nothing says which pages of a file were written, or the files are another machine's",
)
WIDTH, DEPTH = 192, 10
WEIGHT = WIDTH * WIDTH * 4
FLOOR = 2 * WEIGHT + 4096
WHERE = "cpu"


class Block(nn.Module):
    """A frozen Linear, and a small adapter which trains."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


class Tower(nn.Module):
    def __init__(self, reentrant=None, dtype=torch.float32):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.to(dtype)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".base." not in name)

    def forward(self, x):
        for block in self.blocks:
            x = checkpointed(block, x, reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def inputs_on_the_device(request, monkeypatch):
    callspec = getattr(request.node, "callspec", None)
    where = callspec.params.get("device", "cpu") if callspec else "cpu"
    monkeypatch.setitem(globals(), "WHERE", where)


def step(model):
    x = torch.randn(3, WIDTH, dtype=model.blocks[0].up.weight.dtype)
    x = x.to(WHERE).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


def without_values(**options):
    with oracle_offload.empty_weights():
        return Tower(**options)


def saved(tmp_path, **options):
    """Return a model with values, one without them, and the file that has them."""
    torch.manual_seed(0)
    model = Tower(**options)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    return model, without_values(**options), path


def on_disk(managed, device, path, **options):
    given = {"weights": path, "disk": True, "ram_budget": "300KiB", **options}
    return attached(managed, device, **given)


def read_bytes(manager):
    return manager.state.engine.stats(manager.attachment.model)["disk_read_bytes"]


def disk_bytes(manager):
    return manager.state.engine.stats(manager.attachment.model)["disk_bytes"]


# ---- the same bits ----


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not"])
def test_training_adapters_is_that_of_the_resident_model(device, tmp_path, reentrant):
    resident, managed, path = saved(tmp_path, reentrant=reentrant)
    with on_disk(managed, device, path) as manager:
        assert {f"blocks.{n}.base" for n in range(DEPTH)} <= {one.name for one in manager.layers}
        assert 0 < disk_bytes(manager) < DEPTH * WEIGHT and read_bytes(manager) == 0
        assert_models_agree(managed, resident, step, device=device)
        optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            for m in (managed, resident)
        ]
        step_alike(managed, resident, optimizers, device)
        assert_models_agree(managed, resident, step, device=device)
        assert read_bytes(manager) > disk_bytes(manager)
        assert_same(managed.state_dict(), resident.state_dict())
    assert_same(managed.state_dict(), resident.state_dict())


def test_sampling_is_that_of_the_resident_model(device, tmp_path):
    resident, managed, path = saved(tmp_path, dtype=torch.bfloat16)
    resident.to(device)
    with on_disk(managed, device, path, ram_budget="150KiB") as manager:
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(3, WIDTH, dtype=torch.bfloat16).to(device)
            with torch.no_grad():
                assert_same(managed(x), resident(x))
        assert len(manager.layers) >= DEPTH and read_bytes(manager) > 2 * disk_bytes(manager) > 0


def test_a_step_that_raises_leaves_the_next_one_right(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path) as manager:
        handle = managed.blocks[DEPTH // 2].register_forward_hook(lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                step(managed)
        handle.remove()
        assert_models_agree(managed, resident, step, device=device)
        assert read_bytes(manager) > 0


def test_sharded_files_stay_where_they_are(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    folder = tmp_path / "shards"
    oracle_offload.save_weights(resident, folder, shard_bytes=4 * WEIGHT)
    path.unlink()
    assert len(list(folder.glob("*.safetensors"))) > 2
    with on_disk(managed, device, folder) as manager:
        assert_models_agree(managed, resident, step, device=device)
        assert read_bytes(manager) > 0
        oracle_offload.save_weights(managed, tmp_path / "again")
        again = without_values()
        with on_disk(again, device, tmp_path / "again"):
            assert_same(again.state_dict(), resident.state_dict())


# ---- what memory has room for ----


def stats_of(manager):
    return manager.state.engine.stats(manager.attachment.model)


def test_what_has_room_is_read_by_the_first_step_and_locked_then(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path) as manager:
        before = stats_of(manager)
        kept = before["disk_kept_bytes"]
        assert WEIGHT <= kept <= 300 * 1024
        assert before["disk_arrived_bytes"] == before["disk_read_bytes"] == 0
        locked = before["locked_bytes"] - before["ring_bytes"]
        assert_same(managed.state_dict(), resident.state_dict())
        assert_models_agree(managed, resident, step, steps=1, device=device)
        assert stats_of(manager)["disk_arrived_bytes"] == kept
        assert_models_agree(managed, resident, step, device=device)
        after = stats_of(manager)
        assert after["locked_bytes"] - after["ring_bytes"] >= locked + kept
        assert_same(managed.state_dict(), resident.state_dict())


def test_a_process_that_only_samples_locks_what_has_arrived(tmp_path):
    resident, managed, path = saved(tmp_path)
    managed.requires_grad_(False)
    resident.requires_grad_(False)
    with on_disk(managed, "cpu", path) as manager, torch.no_grad():
        stats = stats_of(manager)
        kept, locked = stats["disk_kept_bytes"], stats["locked_bytes"] - stats["ring_bytes"]
        for _ in range(5):
            x = torch.randn(3, WIDTH)
            assert_same(managed(x), resident(x))
        stats = stats_of(manager)
        assert stats["disk_arrived_bytes"] == kept > 0
        assert stats["locked_bytes"] - stats["ring_bytes"] >= locked + kept
        unlocked = manager.state.engine.stats()["unlocked_h2d_bytes"]
        read = read_bytes(manager)
        assert_same(managed(x), resident(x))
        assert manager.state.engine.stats()["unlocked_h2d_bytes"] - unlocked == (
            read_bytes(manager) - read
        ), "what memory has goes through the ring"


def test_a_forward_waits_for_no_lock_while_what_is_kept_arrives(tmp_path):
    _, managed, path = saved(tmp_path)
    managed.requires_grad_(False)
    with on_disk(managed, "cpu", path) as manager, torch.no_grad():
        managed.blocks[0](torch.randn(3, WIDTH))
        forward = threading.Thread(target=manager.attachment.during_forward, daemon=True)
        with manager.state.lock:
            forward.start()
            forward.join(60)
            assert not forward.is_alive()
        assert stats_of(manager)["disk_arrived_bytes"] < stats_of(manager)["disk_kept_bytes"]


def test_what_no_sample_needs_keeps_nothing_waiting(tmp_path):
    resident, managed, path = saved(tmp_path)
    managed.requires_grad_(False)
    with on_disk(managed, "cpu", path, ram_budget="1GiB") as manager, torch.no_grad():
        locked = stats_of(manager)["locked_bytes"]
        for _ in range(3 * DEPTH):
            x = torch.randn(3, WIDTH)
            for used in (0, 1, DEPTH - 1):
                assert_same(managed.blocks[used](x), resident.blocks[used](x))
        stats = stats_of(manager)
        assert 0 < stats["disk_arrived_bytes"] < stats["disk_kept_bytes"]
        assert stats["locked_bytes"] - locked >= stats["disk_kept_bytes"]


class TakenBefore:
    """A lock; another thread has it first, and calls something."""

    def __init__(self, lock, call):
        self._lock, self._call = lock, call

    def __enter__(self):
        call, self._call = self._call, None
        if call is not None:
            other = threading.Thread(target=call)
            other.start()
            other.join()
        return self._lock.__enter__()

    def __exit__(self, *raised):
        return self._lock.__exit__(*raised)


def test_what_two_forwards_find_at_once_is_locked_by_one(tmp_path, monkeypatch, caplog):
    resident, managed, path = saved(tmp_path)
    managed.requires_grad_(False)
    with on_disk(managed, "cpu", path) as manager, torch.no_grad():
        state, attachment = manager.state, manager.attachment
        state.pace.next_look = 1 << 60
        x = torch.randn(3, WIDTH)
        for _ in range(2):
            assert_same(managed(x), resident(x))
        assert stats_of(manager)["disk_arrived_bytes"] == stats_of(manager)["disk_kept_bytes"]
        before = stats_of(manager)["locked_bytes"]
        with monkeypatch.context() as patch, caplog.at_level("INFO", logger="oracle_offload"):
            patch.setattr(state, "lock", TakenBefore(state.lock, attachment.during_forward))
            attachment.during_forward()
        assert [record.getMessage() for record in caplog.records].count(
            f"{attachment.name}: the weights that memory has room for have arrived"
        ) == 1
        assert stats_of(manager)["locked_bytes"] > before
        assert_same(managed(x), resident(x))


def test_where_nothing_may_be_locked_it_arrives_too(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path, ram_budget="1GiB", lock="never") as manager:
        assert_models_agree(managed, resident, step, device=device)
        stats = stats_of(manager)
        assert 0 < stats["disk_arrived_bytes"] == stats["disk_kept_bytes"]
        assert stats["disk_read_bytes"] == stats["disk_kept_bytes"]
        assert stats["locked_bytes"] == stats["ring_bytes"] and stats["disk_bytes"] == 0


def test_what_a_whole_forward_did_not_need_keeps_nothing_waiting(tmp_path):
    _, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path, ram_budget="1GiB") as manager:
        every = list(managed.blocks)
        managed.blocks = nn.ModuleList(every[:2] + every[-1:])
        locked = stats_of(manager)["locked_bytes"]
        for _ in range(3):
            step(managed)
        stats = stats_of(manager)
        assert stats["disk_arrived_bytes"] < stats["disk_kept_bytes"]
        assert stats["locked_bytes"] > locked
        managed.blocks = nn.ModuleList(every)
        step(managed)
        assert stats_of(manager)["disk_arrived_bytes"] == stats["disk_kept_bytes"]


class InterruptedOnce:
    """An engine; Ctrl-C comes as soon as it has been asked `what` for the first time."""

    def __init__(self, engine, what):
        self._engine, self._what = engine, what

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        if name != self._what:
            return found

        def interrupted(*arguments):
            found(*arguments)
            self._what = None
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("records", [True, False], ids=["training", "sampling"])
@pytest.mark.parametrize("what", ["unlock", "lock"])
def test_ctrl_c_while_what_has_arrived_is_locked(tmp_path, monkeypatch, what, records):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path, ram_budget="1GiB") as manager:
        with monkeypatch.context() as patch:
            engine = InterruptedOnce(manager.state.engine, what)
            patch.setattr(manager.state, "engine", engine)
            with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(records):
                for _ in range(3):
                    step(managed) if records else managed(torch.randn(3, WIDTH))
        for _ in range(2):  # a forward that was interrupted has begun
            step(managed)
        stats = stats_of(manager)
        assert stats["locked_bytes"] - stats["ring_bytes"] >= stats["disk_arrived_bytes"] > 0
        managed.zero_grad()
        assert_models_agree(managed, resident, step)
    assert_same(managed.state_dict(), resident.state_dict())


@pytest.mark.parametrize("memory", ["80KiB", "1GiB"])
def test_what_the_arena_holds_all_of_is_managed_too(device, tmp_path, memory):
    resident, managed, path = saved(tmp_path)
    sizes = {"ram_budget": memory, "vram_budget": "64MiB"}
    with on_disk(managed, device, path, **sizes) as manager:
        assert len(manager.layers) >= DEPTH
        assert_models_agree(managed, resident, step, device=device)
        assert read_bytes(manager) == DEPTH * WEIGHT


@pytest.mark.parametrize("blocks", [0, 1, DEPTH // 2 + 1])
def test_detach_while_weights_arrive(device, tmp_path, blocks):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path) as manager:
        if blocks:
            handle = managed.blocks[blocks - 1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(managed)
            handle.remove()
        assert (read_bytes(manager) > 0) == (blocks > 0)
        assert_same(managed.state_dict(), resident.state_dict())
    assert_same(managed.state_dict(), resident.state_dict())


def test_a_file_that_is_written_before_the_first_step(device, tmp_path):
    _, managed, path = saved(tmp_path)
    with on_disk(managed, device, path, ram_budget="1GiB") as manager:
        rewritten(path)
        with pytest.raises(OffloadError, match=WRITTEN):
            step(managed)
        assert stats_of(manager)["disk_arrived_bytes"] == 0


def test_what_has_arrived_needs_no_file_any_more(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path, ram_budget="1GiB"):
        assert_models_agree(managed, resident, step, steps=1, device=device)
        rewritten(path)
        assert_models_agree(managed, resident, step, device=device)
        with pytest.raises(OffloadError, match=WRITTEN):
            managed.state_dict()


def test_nothing_of_what_stays_is_read_at_attach(tmp_path):
    _, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path, ram_budget="1GiB") as manager:
        assert disk_bytes(manager) == 0  # all of it has room
        in_memory = sum(buffer.nbytes for buffer in manager.attachment.buffers)
    managed = without_values()
    with on_disk(managed, "cpu", path) as manager:
        buffers = sum(buffer.nbytes for buffer in manager.attachment.buffers)
        assert buffers <= 300 * 1024
        assert buffers + disk_bytes(manager) >= in_memory - 4096
        assert read_bytes(manager) == 0
        stats = manager.state.engine.stats()
        assert stats["locked_bytes"] - stats["ring_bytes"] <= 300 * 1024 + 4096
        assert stats["pageable_bytes"] == 0


def test_another_arena_reads_the_same(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path) as manager:
        assert_models_agree(managed, resident, step, steps=1, device=device)
        with manager.set_budget(vram_budget=6 * WEIGHT):
            assert_models_agree(managed, resident, step, steps=1, device=device)
        assert_models_agree(managed, resident, step, steps=1, device=device)
        with pytest.raises(ValueError, match="disk=False"):
            manager.set_budget(replace(manager.budget, disk=False))


# ---- weights that are written after all ----


# Of the one that memory has room for, and of one that it has not.
both_kinds = pytest.mark.parametrize("number", [DEPTH // 2, 0], ids=["kept", "read"])


@both_kinds
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("how", ["in place", "unseen", "loaded"])
def test_a_write_is_used(device, tmp_path, how, steps, number):
    resident, managed, path = saved(tmp_path)
    before = path.read_bytes()
    with on_disk(managed, device, path) as manager:
        assert_models_agree(managed, resident, step, steps=steps, device=device)
        name = f"blocks.{number}.base"
        for model in (managed, resident):
            weight = model.get_submodule(name).weight
            with torch.no_grad():
                if how == "in place":
                    weight.mul_(1.5)
                elif how == "unseen":  # torch counts no write; all of it, so that samples see it
                    weight.cpu().numpy()[:] *= 1.5 if weight.device.type == "cpu" else 1
                    if weight.device.type != "cpu":
                        weight.mul_(1.5)
                else:
                    model.load_state_dict({f"{name}.weight": weight * 1.5}, strict=False)
        assert_models_agree(managed, resident, step, device=device)
        assert_same(managed.state_dict(), resident.state_dict())
        assert name in {layer.name for layer in manager.layers}
    assert path.read_bytes() == before, "the file was written"


@both_kinds
def test_a_weight_that_is_trained_later_moves_into_memory(device, tmp_path, number):
    resident, managed, path = saved(tmp_path)
    before = path.read_bytes()
    with on_disk(managed, device, path) as manager:
        (layer,) = [one for one in manager.layers if one.name == f"blocks.{number}.base"]
        kind = "disk_bytes" if number == 0 else "disk_kept_bytes"
        was = stats_of(manager)[kind]
        for model in (managed, resident):
            model.get_submodule(layer.name).weight.requires_grad_()
        optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            for m in (managed, resident)
        ]
        for _ in range(2):
            assert_models_agree(managed, resident, step, device=device)
            step_alike(managed, resident, optimizers, device)
        assert stats_of(manager)[kind] == was - WEIGHT
        assert not manager.attachment.pieces.is_on_disk(layer.masters.addresses["weight"])
        assert_models_agree(managed, resident, step, device=device)
    assert path.read_bytes() == before, "the file was written"


# ---- files that change ----


def truncated(path):
    os.truncate(path, path.stat().st_size - 1)


def rewritten(path):
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1))


WRITTEN = r"model\.safetensors' was written since its weights were attached"


@pytest.mark.parametrize("change", [truncated, rewritten])
def test_a_file_that_is_written_is_refused_by_name(device, tmp_path, change, caplog):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path):
        step(managed)
        change(path)
        for _ in range(2):
            with pytest.raises(OffloadError, match=WRITTEN):
                step(managed)
        with pytest.raises(OffloadError, match=WRITTEN):
            managed.state_dict()
        with pytest.raises(OffloadError, match=WRITTEN):
            oracle_offload.save_weights(managed, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        adapters = [block.up for block in managed.blocks]
        for mine, expected in zip(adapters, [block.up for block in resident.blocks], strict=True):
            assert_same(mine.state_dict(), expected.state_dict())
    assert "what of its weights is in files is as these are now" in caplog.text


def written_in_part(managed, resident):
    """Write some of a weight, where torch counts no write."""
    for model in (managed, resident):
        model.blocks[1].base.weight.detach().numpy()[: WIDTH // 2] *= 1.5


def test_what_was_written_of_a_written_file_is_no_old_copy(tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path, vram_budget="64MiB"):
        assert_models_agree(managed, resident, step)  # the arena has all of it
        rewritten(path)
        written_in_part(managed, resident)
        with pytest.raises(OffloadError, match=WRITTEN):
            step(managed)


def test_what_was_written_is_no_old_copy_where_no_descriptor_is_left(tmp_path):
    resource = pytest.importorskip("resource")
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path, vram_budget="64MiB"):
        assert_models_agree(managed, resident, step)
        written_in_part(managed, resident)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(OffloadError, match="Too many open files"):
                step(managed)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        managed.zero_grad()
        assert_models_agree(managed, resident, step)


def test_a_weight_of_a_written_file_is_not_trained(tmp_path):
    _, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path):
        weight = managed.blocks[0].base.weight
        before = weight.data_ptr()
        optimizer = torch.optim.SGD(managed.parameters(), lr=1e-2)
        step(managed)
        weight.requires_grad_()
        rewritten(path)
        for _ in range(2):
            with pytest.raises(OffloadError, match=WRITTEN):
                optimizer.step()
        assert weight.data_ptr() == before


def test_a_file_that_is_written_while_it_is_saved(tmp_path, monkeypatch):
    from oracle_offload.disk import saving

    _, managed, path = saved(tmp_path)
    memory = saving.memory

    def written_meanwhile(tensor):
        rewritten(path)
        return memory(tensor)

    with on_disk(managed, "cpu", path):
        monkeypatch.setattr(saving, "memory", written_meanwhile)
        with pytest.raises(OffloadError, match=WRITTEN):
            oracle_offload.save_weights(managed, tmp_path / "again.safetensors")
    assert not list(tmp_path.glob("again*"))


def saved_over(path, managed):
    with torch.no_grad():
        managed.blocks[0].base.weight.mul_(2)
    oracle_offload.save_weights(managed, path)
    with torch.no_grad():
        managed.blocks[0].base.weight.mul_(0.5)  # exact


def replaced(path, managed):
    other = path.with_suffix(".other")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)


@pytest.mark.parametrize(
    "change",
    [
        saved_over,
        replaced,
        lambda path, managed: path.unlink(),
        lambda path, managed: path.rename(path.with_suffix(".away")),
    ],
    ids=["saved over", "replaced", "deleted", "renamed"],
)
def test_what_becomes_of_the_name_does_not_matter(device, tmp_path, change):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, device, path) as manager:
        assert_models_agree(managed, resident, step, steps=1, device=device)
        change(path, managed)
        before = read_bytes(manager)
        assert_models_agree(managed, resident, step, device=device)
        assert read_bytes(manager) > before
        assert_same(managed.state_dict(), resident.state_dict())


def test_a_name_that_is_no_text(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("this file system has text alone for names")
    odd = os.fsdecode(folder + b"/model.safetensors")
    path.rename(odd)
    with on_disk(managed, device, odd) as manager:
        assert_models_agree(managed, resident, step, steps=1, device=device)
        assert read_bytes(manager) > 0
        os.truncate(odd, os.path.getsize(odd) - 1)
        with pytest.raises(OffloadError, match=WRITTEN) as raised:
            step(managed)
        assert odd in str(raised.value)


# ---- what is refused ----


def test_no_files():
    model = Tower()
    with pytest.raises(OffloadError, match=r"save_weights writes the files"):
        oracle_offload.attach(model, "cpu", disk=True)


def test_weights_that_train(tmp_path):
    _, managed, path = saved(tmp_path)
    managed.requires_grad_()
    with pytest.raises(OffloadError, match=r"0\.0667 TB a day.*requires_grad_\(False\)"):
        oracle_offload.attach(managed, "cpu", weights=path, disk=True)
    assert all(p.is_meta for p in managed.parameters())
    managed.blocks[0].base.requires_grad_(False)
    with pytest.raises(OffloadError, match=r"ram_budget has 300\.00 KiB for them"):
        oracle_offload.attach(managed, "cpu", weights=path, disk=True, ram_budget="300KiB")


def test_weights_that_are_converted(tmp_path):
    _, _, path = saved(tmp_path)
    managed = without_values(dtype=torch.bfloat16)
    with pytest.raises(OffloadError, match=r"blocks\.0\.base\.weight.*are converted.*save_weights"):
        oracle_offload.attach(managed, "cpu", weights=path, disk=True)


def test_budgets_that_make_no_sense():
    with pytest.raises(ValueError, match="ram_budget='offloaded' is for weights that stay"):
        oracle_offload.Budget(disk=True, ram_budget="offloaded")
    with pytest.raises(ValueError, match="disk='yes'"):
        oracle_offload.Budget(disk="yes")


# ---- which weights are in memory, and what is read ----


LAYER = 4 * 128 * 128  # bytes of a layer of `Chain`


class Chain(nn.Module):
    """Layers of one size or several, in turn, and a parameter that may train."""

    def __init__(self, depth, sizes=((128, 128),)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*s, bias=False) for _ in range(depth) for s in sizes)
        self.shift = nn.Parameter(torch.zeros(128))
        for layer in self.layers:
            layer.requires_grad_(False)

    def forward(self, x):
        x = x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def chain(tmp_path, depth, memory, arena):
    """Attach a chain with room for so many layers in memory and in the arena."""
    resident = Chain(depth)
    save_file(resident.state_dict(), tmp_path / "model.safetensors")
    with oracle_offload.empty_weights():
        managed = Chain(depth)
    sizes = {"ram_budget": memory * LAYER + 4096, "vram_budget": arena * LAYER + 4096}
    with on_disk(managed, "cpu", tmp_path, **sizes) as manager:
        yield manager, managed, resident


@pytest.mark.parametrize(
    ("memory", "arena", "kept"),
    [(0, 4, 0), (10, 4, 0), (10, 12, 0), (20, 8, 0), (10, 16, 2), (20, 16, 12), (34, 4, 2)],
)
def test_training_reads_no_more_than_the_least(tmp_path, memory, arena, kept):
    depth = 40
    with chain(tmp_path, depth, memory, arena) as (manager, managed, resident):
        assert len(manager.layers) == depth - kept
        x = torch.randn(2, 128)
        read = [0]
        for _ in range(8):
            for model in (managed, resident):
                model.zero_grad()
                model(x).sum().backward()
            assert_same(managed.shift.grad, resident.shift.grad)
            read.append(read_bytes(manager))
        least = 2 * (depth - memory - arena) * LAYER
        assert least > 0 and (read[-1] - read[-4]) / 3 <= 1.02 * least


def sweep(manager, managed, resident, x):
    """Sample once; return the bytes that were read."""
    before = read_bytes(manager)
    with torch.no_grad():
        assert_same(managed(x), resident(x))
    return read_bytes(manager) - before


def train_step(manager, managed, resident, x):
    """Go forward and back once; return the bytes that were read."""
    before = read_bytes(manager)
    for model in (managed, resident):
        model.zero_grad()
        model(x).sum().backward()
    assert_same(managed.shift.grad, resident.shift.grad)
    return read_bytes(manager) - before


# The arena needs room for some layers to stream through, beyond what stays: of 240 that are read,
# four are within the 2%.
@pytest.mark.parametrize(("memory", "arena"), [(0, 40), (0, 160), (60, 60), (120, 40), (40, 100)])
def test_sampling_reads_no_more_than_the_least(tmp_path, memory, arena):
    depth = 400
    with chain(tmp_path, depth, memory, arena) as (manager, managed, resident):
        assert len(manager.layers) == depth
        x = torch.randn(2, 128)
        least = (depth - memory - arena) * LAYER
        read = [sweep(manager, managed, resident, x) for _ in range(16)]
        assert least >= 240 * LAYER and sum(read[-4:]) / 4 <= 1.02 * least
        # Training finds the arena full of others, and its own way back after a step.
        read = [train_step(manager, managed, resident, x) for _ in range(3)]
        assert sum(read[1:]) / 2 <= 1.02 * 2 * least
        # Few samples leave the arena as training wants it; what it has serves the first of them.
        read = [sweep(manager, managed, resident, x) for _ in range(4)]
        assert read[0] <= 1.02 * least
        assert sum(train_step(manager, managed, resident, x) for _ in range(2)) <= 4.08 * least


MIXED = ((128, 512), (512, 128), (128, 128))


def kept_layers(manager):
    """Return the layers that memory keeps, and the bytes that are locked without the rings."""
    rooms = [room for room in manager.attachment.pieces.in_order() if hasattr(room, "kept")]
    starts = {address for room in rooms for address, _, _ in room.kept}
    stats = stats_of(manager)
    return (
        [
            n
            for n, layer in enumerate(manager.layers)
            if layer.masters.addresses["weight"] in starts
        ],
        stats["locked_bytes"] - stats["ring_bytes"],
    )


def mixed(tmp_path, depth=6, shards=False):
    """Return a model, and another in evaluation mode without the values, which are in files."""
    torch.manual_seed(0)
    resident = Chain(depth, MIXED)
    least = {"shard_bytes": 8 * 128 * 512} if shards else {}
    oracle_offload.save_weights(resident, tmp_path, **least)
    with oracle_offload.empty_weights():
        return resident, Chain(depth, MIXED).eval()


TIGHT = {"ram_budget": "2MiB", "vram_budget": "1MiB"}


def test_memory_has_the_largest_while_a_model_samples_alone(device, tmp_path):
    depth = 12
    resident, managed = mixed(tmp_path, depth)
    resident.to(device)
    room = 14 * 128 * 512 * 4 + 4096
    with on_disk(managed, device, tmp_path, ram_budget=room, vram_budget="1MiB") as manager:
        x = torch.randn(2, 128, device=device)
        before, _ = kept_layers(manager)
        large = [n for n in range(3 * depth) if n % 3 < 2]
        assert before and not set(before) <= set(large)
        for nth in range(8):
            sweep(manager, managed, resident, x)
            sampled, locked = kept_layers(manager)
            assert set(sampled) <= set(large) and len(sampled) >= 14
            assert stats_of(manager)["disk_kept_bytes"] <= room, f"sweep {nth}"
        assert stats_of(manager)["disk_arrived_bytes"] == stats_of(manager)["disk_kept_bytes"]
        assert locked >= stats_of(manager)["disk_kept_bytes"] > 0
        managed.train()
        for _ in range(4):
            train_step(manager, managed, resident, x)
        trained, locked = kept_layers(manager)
        assert trained == before, "one backward was seen"
        assert stats_of(manager)["disk_arrived_bytes"] == stats_of(manager)["disk_kept_bytes"]
        assert stats_of(manager)["disk_kept_bytes"] <= locked <= room + (1 << 20)
        managed.eval()  # a sample in between is no reason
        for _ in range(3):
            sweep(manager, managed, resident, x)
        assert kept_layers(manager) == (trained, locked)


def test_what_is_in_use_stays_right_when_memory_changes(device, tmp_path):
    """A graph awaits its backward, and another model is on the device."""
    resident, managed = mixed(tmp_path)
    other = mixed(tmp_path)[1]
    resident.to(device)
    with (
        on_disk(managed, device, tmp_path, **TIGHT) as manager,
        on_disk(other, device, tmp_path, **TIGHT) as other_manager,
    ):
        x = torch.randn(2, 128, device=device)
        for _ in range(3):  # the second of them is looked at later
            sweep(manager, managed, resident, x)
            sweep(other_manager, other, resident, x)
        sampled, _ = kept_layers(other_manager)
        assert kept_layers(manager)[0] == sampled
        held = managed(x)
        for _ in range(2):
            train_step(manager, managed, resident, x)
        assert kept_layers(manager)[0] != sampled and kept_layers(other_manager)[0] == sampled
        managed.zero_grad()
        held.sum().backward()
        assert_same(managed.shift.grad, resident.shift.grad)
        sweep(other_manager, other, resident, x)


@pytest.mark.parametrize("at", ["__init__", "add_room", "empty_rooms"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_breaks_off_a_change_of_memory(tmp_path, monkeypatch, at, error, caplog):
    resident, managed = mixed(tmp_path)
    x = torch.randn(2, 128)
    with on_disk(managed, "cpu", tmp_path, **TIGHT) as manager:
        before, _ = kept_layers(manager)
        owner = masters.Room if at == "__init__" else masters.Pieces
        real = getattr(owner, at)

        def interrupted(*given, **options):
            monkeypatch.setattr(owner, at, real)
            real(*given, **options)
            raise error

        monkeypatch.setattr(owner, at, interrupted)
        if error is MemoryError and at != "empty_rooms":
            sweep(manager, managed, resident, x)
            assert "the host has no memory for all" in caplog.text
        else:
            with pytest.raises(error):
                sweep(manager, managed, resident, x)
        for _ in range(0 if at == "empty_rooms" else 4):
            sweep(manager, managed, resident, x)
        assert stats_of(manager)["disk_kept_bytes"] <= 2 << 20
        managed.train()
        for _ in range(3):
            train_step(manager, managed, resident, x)
        assert kept_layers(manager)[0] == before
        assert stats_of(manager)["disk_arrived_bytes"] > 0


@pytest.mark.parametrize("shards", [False, True], ids=["file", "shards"])
@pytest.mark.parametrize("samples", [False, True], ids=["before", "after"])
def test_files_that_are_needed_no_more_are_kept_nowhere(tmp_path, shards, samples):
    resident, managed = mixed(tmp_path, shards=shards)
    x = torch.randn(2, 128)
    with on_disk(managed, "cpu", tmp_path, **TIGHT) as manager:
        if samples:
            sweep(manager, managed, resident, x)
        replaced = managed.layers[: 9 if shards else None]
        values = [layer.weight.detach().clone() for layer in resident.layers]
        for layer, value in zip(replaced, values, strict=False):
            layer.load_state_dict({"weight": value}, assign=True)
        for _ in range(3):
            sweep(manager, managed, resident, x)
        for _ in range(3):
            train_step(manager, managed, resident, x)
        assert (stats_of(manager)["disk_kept_bytes"] > 0) is shards


@pytest.mark.parametrize("head", [False, True], ids=["all", "but_one"])
def test_reentrant_checkpoints_are_training(tmp_path, head):
    resident, managed = mixed(tmp_path)
    x = torch.randn(2, 128)

    def step(model):
        y = (x + model.shift).requires_grad_()
        for layer in model.layers[: -1 if head else None]:
            y = checkpoint(layer, y, use_reentrant=True)
        (model.layers[-1](y) if head else y).sum().backward()
        return model.shift.grad

    with on_disk(managed, "cpu", tmp_path, **TIGHT) as manager:
        before, _ = kept_layers(manager)
        sweep(manager, managed, resident, x)
        assert kept_layers(manager)[0] != before
        for _ in range(4):
            assert_same(step(managed), step(resident))
        assert kept_layers(manager)[0] == before


def test_a_model_that_is_not_used_is_asked_for_nothing(tmp_path, monkeypatch):
    resident, managed = mixed(tmp_path)
    idle = mixed(tmp_path)[1]
    x = torch.randn(2, 128)
    with (
        on_disk(managed, "cpu", tmp_path, **TIGHT) as manager,
        on_disk(idle, "cpu", tmp_path, **TIGHT),
    ):
        pace = manager.state.pace
        looks = []
        look = pace.look
        monkeypatch.setattr(pace, "look", lambda idle: (looks.append(1), look(idle)))
        for _ in range(20):
            sweep(manager, managed, resident, x)
        assert len(looks) <= pace.uses / 20


def test_what_memory_kept_goes_at_detach(tmp_path):
    resident, managed = mixed(tmp_path)
    gc.collect()
    before = _core.live()
    with on_disk(managed, "cpu", tmp_path, **TIGHT) as manager:
        sweep(manager, managed, resident, torch.randn(2, 128))
        assert _core.live()["buffers"] > before["buffers"]
    attachment = manager.attachment
    del managed
    gc.collect()
    assert _core.live()["buffers"] == before["buffers"], attachment


# ---- files on other machines ----


def test_a_network_mount_is_refused(tmp_path, monkeypatch):
    _, _, path = saved(tmp_path)
    monkeypatch.setattr("oracle_offload.model.on_disk.remote_kind", lambda path: "nfs4")
    with pytest.raises(OffloadError, match=r"network mount \(nfs4\).*copy it to a local disk"):
        oracle_offload.attach(without_values(), "cpu", weights=path, disk=True, ram_budget="300KiB")


# ---- which is the middle, and what is said ----


def test_a_recording_has_what_was_read(tmp_path):
    _, managed, path = saved(tmp_path)
    trained = [parameter for parameter in managed.parameters() if parameter.requires_grad]
    with on_disk(managed, "cpu", path) as manager:
        optimizer = torch.optim.SGD(trained, lr=1e-2)
        with oracle_offload.record(timed_every=0) as recorder:
            for _ in range(6):
                step(managed)
                optimizer.step()
            recording = recorder.recording()
        counted = sum(one["counters"]["disk_read_bytes"] for one in recording.steps())
        assert 0 < counted <= read_bytes(manager)
        assert "of that were read from files" in str(recording)


def test_the_summary_says_what_is_in_files(tmp_path):
    resident, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path) as manager:
        assert "0 B of 144.00 KiB there" in str(manager.memory_summary())
        step(managed)
        assert "144.00 KiB of 144.00 KiB there" in str(manager.memory_summary())
        (device,) = manager.memory_summary().devices
        assert device.disk_bytes == disk_bytes(manager) > 0
        assert device.disk_read_bytes == read_bytes(manager) > device.disk_bytes
        assert device.disk_gbps > 0 and "a thread" in str(manager.memory_summary())
    with attached(resident, "cpu") as manager:
        assert "weights in files" not in str(manager.memory_summary())


def test_numbers_and_the_live_view_have_the_disk(tmp_path):
    from oracle_offload.observe import Meter, heartbeat
    from oracle_offload.observe.live import Live

    resident, managed, path = saved(tmp_path)
    with on_disk(managed, "cpu", path) as manager:
        optimizer = torch.optim.SGD(managed.parameters(), lr=1e-2)
        meter = Meter("cpu")
        rows = dict(Live(heartbeat.pulse(meter)).rows())
        assert rows["from files"].startswith("unknown; 144.00 KiB of what memory keeps is to come")
        before = read_bytes(manager)
        step(managed)
        optimizer.step()
        document = heartbeat.pulse(meter)
        numbers = document["numbers"]
        assert numbers["disk_read_bytes"] == read_bytes(manager) - before > 0
        assert numbers["disk_arrived_bytes"] == numbers["disk_kept_bytes"] == WEIGHT
        assert numbers["disk_bytes"] == disk_bytes(manager)
        shown = dict(Live(document).rows())["from files"]
        assert "since the last look" in shown and "GB/s" in shown and "to come" not in shown
    with attached(resident, "cpu"):
        assert "from files" not in dict(Live(heartbeat.pulse(Meter("cpu"))).rows())


def test_what_is_between_the_ends_is_in_memory_evenly():
    assert between([1] * 20, 4, 4) == {6, 9, 12, 15}
    assert between([1] * 20, 12, 4) == set(range(4, 16))
    assert between([1] * 20, 14, 4) == middle([1] * 20, 14)
    assert between([1] * 20, 4, 0) == middle([1] * 20, 4), "nothing is known of the arena"
    assert between([1] * 20, 4, 11) == middle([1] * 20, 4), "the ends meet"
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    for limit in range(sum(sizes)):
        chosen = between(sizes, limit, 10)
        held = sum(sizes[n] for n in chosen)
        assert held <= limit and held + max(sizes) > min(limit, sum(sizes))


def test_the_largest_are_in_memory():
    assert largest([1] * 20, 4) == {4, 9, 14, 19}
    assert largest([3, 1, 3, 1, 3, 1], 7) == {2, 4, 5}
    assert largest([3, 1, 3, 1, 3, 1], 100) == set(range(6))
    assert largest([3, 1, 2], 0) == set()
    assert largest([3, 1, 2], 2, [2, 1, 1]) == {0}, "it is their bytes on the host that count"
    assert largest([3, 1, 3], 2) == {1}
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    for limit in range(sum(sizes)):
        assert sum(sizes[n] for n in largest(sizes, limit)) <= limit


def test_the_middle_is_in_memory():
    sizes = [4, 1, 1, 1, 1, 1, 4]
    assert middle(sizes, 100) == set(range(7))
    assert middle(sizes, 3) == {2, 3, 4}
    assert middle(sizes, 0) == set()
    assert middle([10, 3, 10], 2) == set()
    assert middle([2, 9, 1], 3) == {0, 2}
    for limit in range(15):
        chosen = middle(sizes, limit)
        assert sum(sizes[n] for n in chosen) <= limit
