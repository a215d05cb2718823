"""`attach` with ``disk=True`` and ``compress``: files are read in fewer bytes, from the cache."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import test_disk
import torch
from equality import assert_models_agree, assert_same, step_alike
from test_disk import DEPTH, WIDTH, disk_bytes, on_disk, read_bytes, stats_of, without_values
from torch import nn

import oracle_offload
from oracle_offload.compress import coded_files
from oracle_offload.compress.store import user_store
from oracle_offload.engine import simulator
from oracle_offload.errors import OffloadError
from oracle_offload.model.arena import Arena

pytestmark = test_disk.pytestmark
inputs_on_the_device, step = test_disk.inputs_on_the_device, test_disk.step
WEIGHT = WIDTH * WIDTH * 2
SMALLER = 0.72  # of Gaussian weights, with room for the beginnings of files' pages


@pytest.fixture(autouse=True)
def cache(cache_folder):
    """The folder of compressed weights."""
    return cache_folder / "coded"


def saved(tmp_path, **options):
    """Return a model with weights as training makes them, one without any, and their file."""
    torch.manual_seed(0)
    model = test_disk.Tower(dtype=torch.bfloat16, **options)
    for block in model.blocks:
        nn.init.normal_(block.base.weight, std=0.02)
    path = tmp_path / "model.safetensors"
    oracle_offload.save_weights(model, path)
    return model, coded_tower(**options), path


def coded_tower(**options):
    return without_values(dtype=torch.bfloat16, **options)


def compressed(managed, device, path, **options):
    given = {"ram_budget": "150KiB", "vram_budget": "480KiB", "compress": "lossless", **options}
    return on_disk(managed, device, path, **given)


def coded_layers(manager):
    return [one.name for one in manager.layers if one.coded]


def content(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not"])
def test_training_is_that_of_the_resident_model(device, tmp_path, reentrant):
    resident, managed, path = saved(tmp_path, reentrant=reentrant)
    with compressed(managed, device, path) as manager:
        on_files = len(coded_layers(manager))
        stats = stats_of(manager)
        assert on_files >= DEPTH / 2 and stats["disk_read_bytes"] == 0
        assert 0 < disk_bytes(manager) + stats["disk_kept_bytes"] < SMALLER * on_files * WEIGHT
        assert stats["disk_kept_bytes"] > WEIGHT, "memory has room for more than one, coded"
        assert_models_agree(managed, resident, step, device=device)
        optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            for m in (managed, resident)
        ]
        step_alike(managed, resident, optimizers, device)
        assert_models_agree(managed, resident, step, device=device)
        stats = stats_of(manager)
        assert stats["disk_arrived_bytes"] == stats["disk_kept_bytes"]
        assert stats["decodes"] > on_files
        assert read_bytes(manager) > disk_bytes(manager) > 0
        assert_same(managed.state_dict(), resident.state_dict())
    assert_same(managed.state_dict(), resident.state_dict())


def test_the_next_attach_reads_headers_alone(device, tmp_path, cache, monkeypatch):
    resident, _, path = saved(tmp_path)
    for number in range(2):
        managed = coded_tower()
        with compressed(managed, device, path) as manager:
            assert read_bytes(manager) == 0 and len(coded_layers(manager)) >= DEPTH / 2
            assert_models_agree(managed, resident, step, steps=1, device=device)
        if number == 0:
            made = content(cache)
            monkeypatch.setattr(coded_files, "_make", lambda *_: pytest.fail("coded again"))
    assert content(cache) == made and len(made) == 1


def test_what_was_written_this_moment_is_coded_a_moment_later(tmp_path, monkeypatch):
    """Else another write in the same tick of the clock would leave the file's time as it is."""
    _, _, path = saved(tmp_path)
    written, slept = max(path.stat().st_mtime_ns, path.stat().st_ctime_ns), []
    clock = SimpleNamespace(
        time_ns=lambda: written + len(slept) * coded_files._TICK_NS, sleep=slept.append
    )
    monkeypatch.setattr(coded_files, "time", clock)
    with compressed(coded_tower(), "cpu", path):
        assert len(slept) == 1


def test_sampling_locks_what_memory_keeps(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    resident.to(device).requires_grad_(False)
    managed.requires_grad_(False)
    with compressed(managed, device, path, compress="auto") as manager, torch.no_grad():
        assert len(coded_layers(manager)) >= DEPTH / 2
        for _ in range(4):
            x = torch.randn(3, WIDTH, dtype=torch.bfloat16).to(device)
            assert_same(managed(x), resident(x))
        stats, kept = stats_of(manager), stats_of(manager)["disk_kept_bytes"]
        assert stats["locked_bytes"] - stats["ring_bytes"] >= kept > WEIGHT
        assert "read from files" in str(manager.memory_summary())


def test_memory_changes_when_what_has_sampled_is_trained(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    managed.eval()
    with compressed(managed, device, path) as manager:
        in_memory = manager.attachment._in_memory
        for samples in (True, False):
            for _ in range(4):
                x = torch.randn(3, WIDTH, dtype=torch.bfloat16).to(device)
                with torch.no_grad():
                    assert_same(managed(x), resident.to(device)(x))
                if not samples:
                    assert_models_agree(managed, resident, step, device=device)
            stats = stats_of(manager)
            assert in_memory.samples is samples
            assert stats["disk_arrived_bytes"] == stats["disk_kept_bytes"] > WEIGHT
            assert stats["locked_bytes"] - stats["ring_bytes"] >= stats["disk_kept_bytes"]


def test_a_disk_that_sets_the_pace_is_read_in_less_time(tmp_path):
    resident, _, path = saved(tmp_path)
    resident.requires_grad_(False)
    arena, seconds = 180 * 1024, {}
    with simulator.device(disk_gbps=0.05, disk_latency_s=0.0):
        for compress, vram in ((None, arena), ("lossless", arena + 4 * (WEIGHT + 256))):
            managed = coded_tower().requires_grad_(False)
            sizes = {"vram_budget": vram, "ram_budget": "80KiB"}
            with (
                compressed(managed, "cpu", path, compress=compress, **sizes) as manager,
                torch.no_grad(),
            ):
                assert len(coded_layers(manager)) == (DEPTH if compress else 0)
                for _ in range(4):
                    begun, read = simulator.now(), read_bytes(manager)
                    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
                    assert_same(managed(x), resident(x))
                    simulator.finish()
                seconds[compress] = simulator.now() - begun
                assert seconds[compress] > 0.9 * (read_bytes(manager) - read) / 0.05e9
    assert seconds["lossless"] < 0.8 * seconds[None]


@pytest.mark.parametrize("how", ["in place", "data", "load_state_dict"])
def test_a_weight_that_is_written_is_used_as_it_is_then(device, tmp_path, how):
    resident, managed, path = saved(tmp_path)
    with compressed(managed, device, path) as manager:
        names = coded_layers(manager)
        assert_models_agree(managed, resident, step, steps=1, device=device)
        for model in (managed, resident):
            weight = model.get_submodule(names[1]).weight
            with torch.no_grad():
                if how == "in place":
                    weight[3:5] = 0.25
                elif how == "data":
                    weight.data[0, 0] = 2.0
                else:
                    state = {key: value.clone() for key, value in model.state_dict().items()}
                    state[f"{names[1]}.weight"] += 1
                    model.load_state_dict(state)
        assert_models_agree(managed, resident, step, device=device)
        assert names[1] not in coded_layers(manager) and names[1] in {
            one.name for one in manager.layers
        }
        assert_same(managed.state_dict(), resident.state_dict())


def test_a_weight_that_is_trained_later_leaves_its_code(device, tmp_path):
    resident, managed, path = saved(tmp_path)
    with compressed(managed, device, path) as manager:
        name = coded_layers(manager)[0]
        for model in (managed, resident):
            model.get_submodule(name).requires_grad_(True)
        optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            for m in (managed, resident)
        ]
        for _ in range(2):
            step_alike(managed, resident, optimizers, device)
        assert name not in coded_layers(manager)
        assert_same(managed.state_dict(), resident.state_dict())


def test_a_file_that_was_written_is_coded_again(tmp_path, cache):
    _, _, path = saved(tmp_path)
    with compressed(coded_tower(), "cpu", path):
        before = set(content(cache))
    other, *_ = saved(tmp_path)
    with torch.no_grad():
        other.blocks[3].base.weight[0] = 1.0
    oracle_offload.save_weights(other, tmp_path / "other.safetensors")
    times = path.stat()
    path.write_bytes((tmp_path / "other.safetensors").read_bytes())  # in place
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    managed = coded_tower()
    with compressed(managed, "cpu", path):
        assert_models_agree(managed, other, step)
        assert len(set(content(cache)) - before) == 1


def test_codes_that_are_written_while_they_are_read_are_refused_by_name(device, tmp_path, cache):
    resident, managed, path = saved(tmp_path)
    with compressed(managed, device, path, ram_budget="80KiB"):
        assert_models_agree(managed, resident, step, steps=1, device=device)
        (coded,) = cache.iterdir()
        times = coded.stat()
        os.utime(coded, ns=(0, 0))
        with pytest.raises(OffloadError, match=f"'{coded}' was written since"):
            step(managed)
        os.utime(coded, ns=(times.st_atime_ns, times.st_mtime_ns))
        managed.zero_grad()
        assert_models_agree(managed, resident, step, device=device)
        coded.unlink()  # by `oracle-offload cache --clear`, say
        assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize("damage", ["empty", "cut off", "no header"])
def test_a_damaged_file_of_the_cache_is_made_again(tmp_path, cache, caplog, damage):
    resident, managed, path = saved(tmp_path)
    with compressed(coded_tower(), "cpu", path):
        (coded,) = cache.iterdir()
    whole = coded.read_bytes()
    coded.write_bytes({"empty": b"", "cut off": whole[:-1], "no header": b"\1" * 99}[damage])
    with compressed(managed, "cpu", path) as manager:
        assert f"'{coded}' is damaged" in caplog.text
        assert len(coded_layers(manager)) >= DEPTH / 2
        assert_models_agree(managed, resident, step)
    assert coded.read_bytes() == whole


def test_without_a_cache_weights_are_read_as_they_are(tmp_path, monkeypatch, caplog):
    resident, managed, path = saved(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "file"))
    with compressed(managed, "cpu", path) as manager:
        assert "are read from" in caplog.text and "ORACLE_OFFLOAD_CACHE_DIR" in caplog.text
        assert not coded_layers(manager) and disk_bytes(manager) >= WEIGHT
        assert_models_agree(managed, resident, step)


def test_ctrl_c_while_files_are_coded_leaves_nothing(tmp_path, cache, monkeypatch):
    resident, managed, path = saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(coded_files, "pays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), compressed(coded_tower(), "cpu", path):
            pass
    assert not content(cache)
    with compressed(managed, "cpu", path):
        assert_models_agree(managed, resident, step)


def test_a_file_that_is_written_while_it_is_coded_is_refused(tmp_path, cache, monkeypatch):
    _, _, path = saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(coded_files, "pays", lambda *_: bool(os.utime(path, ns=(0, 0))))
        with (
            pytest.raises(OffloadError, match="was written while"),
            compressed(coded_tower(), "cpu", path),
        ):
            pass
    assert not content(cache)


def test_use_is_noted_without_a_write(tmp_path, cache):
    _, _, path = saved(tmp_path)
    with compressed(coded_tower(), "cpu", path):
        (coded,) = cache.iterdir()
    os.utime(coded, ns=(0, 10**9))
    with compressed(coded_tower(), "cpu", path):
        used = coded.stat()
        assert used.st_mtime_ns == 10**9 and used.st_atime_ns > 10**18
    ((used_s, nbytes, named),) = user_store().files()
    assert used_s > 1e9 and named == coded and nbytes == used.st_size


@pytest.mark.parametrize("compress", ["lossless", "auto"])
def test_what_memory_has_room_for_is_coded_too(device, tmp_path, compress):
    resident, managed, path = saved(tmp_path)
    sizes = {"ram_budget": "1GiB", "compress": compress}
    with compressed(managed, device, path, **sizes) as manager:
        assert len(coded_layers(manager)) == DEPTH and disk_bytes(manager) == 0
        assert_models_agree(managed, resident, step, device=device)
        assert stats_of(manager)["disk_arrived_bytes"] < SMALLER * DEPTH * WEIGHT


def test_auto_says_that_the_device_cannot_decode(tmp_path, monkeypatch, caplog):
    def refuse(arena):
        raise OffloadError("no kernels")

    monkeypatch.setattr(Arena, "check_staging", refuse)
    resident, managed, path = saved(tmp_path)
    with compressed(managed, "cpu", path, compress="auto") as manager:
        assert "compress='auto': the device cannot decode: no kernels" in caplog.text
        assert "cannot decode" in manager.attachment.compressed_because
        assert not coded_layers(manager) and disk_bytes(manager) > 0
        assert_models_agree(managed, resident, step)
    with pytest.raises(OffloadError, match="no kernels"), compressed(coded_tower(), "cpu", path):
        pass


@pytest.mark.parametrize("what", ["replaced", "removed"])
@pytest.mark.parametrize("times", [1, 9])
def test_what_another_process_does_to_the_name_does_not_matter(
    tmp_path, cache, monkeypatch, caplog, what, times
):
    resident, _, path = saved(tmp_path)
    left, opened = [times], coded_files._open

    def open_and_lose(name):
        file = opened(name)
        if file is not None and left[0]:
            left[0] -= 1
            content = name.read_bytes()
            name.unlink()
            if what == "replaced":
                (tmp_path / "other").write_bytes(content)
                os.replace(tmp_path / "other", name)
        return file

    monkeypatch.setattr(coded_files, "_open", open_and_lose)
    managed = coded_tower()
    with compressed(managed, "cpu", path) as manager:
        assert bool(coded_layers(manager)) == (times == 1)
        assert ("again and again" in caplog.text) == (times > 1)
        assert_models_agree(managed, resident, step)
