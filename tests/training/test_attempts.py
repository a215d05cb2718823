"""Attempts that run out of memory: shrinking, stepping up, doing the least; and what is counted."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from oracle_offload import NoRoomError, OffloadError
from oracle_offload.host import cgroup
from oracle_offload.train import (
    emergency_minimal_operations,
    get_detailed_memory_info,
    set_memory_fraction,
)
from oracle_offload.train.survive import memory
from oracle_offload.train.survive.attempts import (
    HALVE,
    MINUS_16,
    TIMES_07,
    Counts,
    Shrink,
    allocate_progressively,
    attempt,
    release_memory,
    shrink_until_it_fits,
)


def sizes(law, size):
    found = []
    while size is not None:
        found.append(size)
        size = law.next_size(size)
    return found


def test_the_laws_give_these_sizes():
    assert sizes(HALVE, 12) == [12, 6, 3, 1]
    assert sizes(MINUS_16, 90) == [90, 74, 58, 42, 32]
    assert sizes(TIMES_07, 1000) == [1000, 700, 489, 342, 256]
    assert sizes(HALVE, 1) == [1] and sizes(MINUS_16, 8) == [8]
    assert sizes(Shrink(factor=0.5, minus=1, floor=2), 20) == [20, 9, 3, 2]


@pytest.mark.parametrize(
    "wrong", [{}, {"factor": 0.0}, {"factor": 1.5}, {"minus": -1}, {"factor": 0.5, "floor": 0}]
)
def test_a_law_that_makes_nothing_smaller_is_refused(wrong):
    with pytest.raises(ValueError, match="Shrink"):
        Shrink(**wrong)


def test_what_does_not_fit_shrinks_is_logged_and_counted(caplog):
    counts = Counts()
    assert counts.success_rate is None

    def work(size):
        if size > 300:
            raise torch.OutOfMemoryError(f"{size} is too much\nsecond line")
        return f"done with {size}"

    with caplog.at_level(logging.WARNING):
        found = shrink_until_it_fits(work, 1000, TIMES_07, counts=counts)
    assert found == ("done with 256", 256)
    assert (counts.successes, counts.failures, counts.success_rate) == (1, 4, 0.2)
    assert counts.last_failure == "342 is too much"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "size 1000 does not fit, 700 is tried: 1000 is too much" and len(lines) == 4
    with pytest.raises(NoRoomError, match="size 32 does not fit, and it is the smallest allowed"):
        shrink_until_it_fits(lambda size: work(1000), 40, MINUS_16)


def test_another_error_is_no_lack_of_memory():
    counts = Counts()
    with pytest.raises(KeyError):
        attempt(lambda: {}["x"], counts)
    assert counts == Counts()


def test_an_error_without_words_and_a_result_of_none_are_told_apart():
    def fail():
        raise MemoryError

    assert attempt(fail) == (None, "MemoryError")
    assert attempt(lambda: None) == (None, None)


def test_recovery_begins_once_the_frames_of_the_attempt_are_gone(monkeypatch):
    alive = []

    class Held:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    def fail():
        held = Held()
        raise torch.OutOfMemoryError(f"{held}")

    seen = []
    monkeypatch.setattr(
        "oracle_offload.train.survive.attempts.release_memory", lambda: seen.append(alive[:])
    )
    attempt(fail)
    assert seen == [[]]


@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("in_use", [False, True])
def test_garbage_is_collected_and_the_cache_of_a_card_in_use_given_back(
    available, in_use, monkeypatch
):
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    circle = Counts()
    circle.itself = circle
    seen = weakref.ref(circle)
    del circle
    release_memory()
    assert seen() is None
    assert emptied == [1] * (available and in_use)


def test_in_an_emergency_the_least_is_done(caplog):
    counts = Counts()
    torch_oom = torch.OutOfMemoryError("full")

    def fail():
        raise torch_oom

    assert emergency_minimal_operations(lambda: 1, lambda: 2, counts=counts) == 1
    with caplog.at_level(logging.WARNING):
        assert emergency_minimal_operations(fail, lambda: 2, counts=counts) == 2
    assert "out of memory, the least is done instead: full" in caplog.text
    assert counts.success_rate == 0.5
    with pytest.raises(torch.OutOfMemoryError):
        emergency_minimal_operations(fail, fail)


MB = 1_000_000


class Card:
    """Room for so many bytes; what was let go of is room again."""

    def __init__(self, room):
        self.room, self.asked, self.live = room, [], 0

    def allocate(self, nbytes):
        self.asked.append(nbytes // MB)
        if self.live + nbytes > self.room:
            raise torch.OutOfMemoryError("no room")
        return Block(self, nbytes)


class Block:
    def __init__(self, card, nbytes):
        self.card, self.nbytes = card, nbytes
        card.live += nbytes

    def __del__(self):
        self.card.live -= self.nbytes


@pytest.mark.parametrize(
    ("room", "asked", "got"),
    [
        (1000, [200, 400, 600, 800, 1000], 1000),
        (999, [200, 400, 600, 800, 1000, 900], 900),
        (750, [200, 400, 600, 800, 700], 700),
        (650, [200, 400, 600, 800, 700, 600], 600),
        (450, [200, 400, 600, 500, 400], 400),
        (250, [200, 400, 300, 200], 200),
        (199, [200, 100], 100),
        (99, [200, 100], None),
    ],
)
def test_an_allocation_grows_by_a_fifth_and_steps_back_by_a_tenth(room, asked, got):
    card = Card(room * MB)
    if got is None:
        with pytest.raises(NoRoomError, match=r"not even 95.37 MiB could be allocated: no room"):
            allocate_progressively(card.allocate, 1000 * MB)
    else:
        block, nbytes = allocate_progressively(card.allocate, 1000 * MB)
        assert nbytes == block.nbytes == card.live == got * MB
    assert card.asked == asked


def test_an_allocation_below_the_floor_is_made_as_it_is():
    card = Card(50 * MB)
    block, nbytes = allocate_progressively(card.allocate, 30 * MB)
    assert nbytes == block.nbytes == 30 * MB and set(card.asked) == {30}
    assert allocate_progressively(card.allocate, 10 * MB, floor_bytes=MB)[1] == 10 * MB
    with pytest.raises(ValueError, match="nbytes=0 is not above zero"):
        allocate_progressively(card.allocate, 0)


def test_a_cap_is_refused_where_there_is_no_allocator_with_one():
    for device in ("cpu", *([] if torch.cuda.is_available() else ["cuda", None])):
        with pytest.raises(OffloadError, match="has no cap on its memory: only torch's allocator"):
            set_memory_fraction(0.75, device)
    for fraction in (0, -0.5, 1.5, True, "half"):
        with pytest.raises(ValueError, match=r"is not in \(0, 1\]"):
            set_memory_fraction(fraction)


@pytest.mark.gpu
@pytest.mark.parametrize("fraction", [0.75, 0.65, 0.6])
def test_a_cap_holds_and_is_taken_off_again(fraction):
    _, total = torch.cuda.mem_get_info()
    before = set_memory_fraction(1.0)
    try:
        with memory.memory_fraction(fraction):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(int(total * (fraction + 0.02)), dtype=torch.uint8, device="cuda")
            assert set_memory_fraction(fraction) == fraction
        assert set_memory_fraction(1.0) == 1.0
    finally:
        set_memory_fraction(before)


def test_what_is_known_of_memory_and_what_is_not():
    info = get_detailed_memory_info()
    assert 0 < info["host_available_bytes"] <= info["host_total_bytes"]
    on_card = {name for name in info if not name.startswith("host")}
    assert on_card == {
        *(f"{name}_bytes" for name in "allocated reserved cached peak free total other".split()),
        "num_alloc_retries",
        "num_ooms",
    }
    if not torch.cuda.is_available():
        assert {info[name] for name in on_card} == {None}
    assert set(get_detailed_memory_info("cpu")) == set(info)
    with pytest.raises(ValueError, match="device='x' is not a device"):
        get_detailed_memory_info("x")


def test_a_cleanup_says_what_it_returned_and_warns_where_that_is_nothing(monkeypatch, caplog):
    free = iter([1000, 1000 + 3 * 1024, 5000, 4000])
    monkeypatch.setattr(memory, "available_bytes", lambda: next(free))
    with caplog.at_level(logging.INFO):
        found = memory.cleanup("cpu")
        assert (found.device_bytes, found.host_bytes, found.useless) == (None, 3072, False)
        assert str(found) == "returned unknown to the card, 3.00 KiB to the host"
        assert caplog.records[-1].levelname == "INFO"
        assert memory.cleanup("cpu").useless
    assert caplog.records[-1].levelname == "WARNING"
    assert "brought nothing" in caplog.records[-1].getMessage()
    assert memory.Cleanup(0, 5).useless and not memory.Cleanup(1, None).useless
    assert memory.Cleanup(None, None).useless


@pytest.mark.parametrize("free", [(None, 5), (5, None)])
def test_a_cleanup_collects_and_says_nothing_of_a_host_that_tells_nothing(free, monkeypatch):
    done, answers = [], iter(free)
    monkeypatch.setattr(memory, "available_bytes", lambda: next(answers))
    monkeypatch.setattr(memory, "release_memory", lambda: done.append(1))
    assert memory.cleanup("cpu") == memory.Cleanup(None, None) and done == [1]


@pytest.fixture
def card_of_older_torch(monkeypatch):
    """A second card that is current, under a torch that does not tell a cap; the caps it got."""
    caps = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *cap: caps.append(cap)
    )
    monkeypatch.setattr(memory, "_caps", {})
    return caps


def test_the_card_that_is_meant_has_a_number(card_of_older_torch):
    assert memory.card() == memory.card("cuda") == torch.device("cuda", 1)
    assert memory.card("cuda:0") == torch.device("cuda", 0)
    assert memory.card("cpu") is None


def test_nothing_is_known_of_a_card_that_is_not_there(card_of_older_torch):
    assert memory.card("cuda:2") is None
    assert memory.device_free_and_total("cuda:2") == (None, None)
    assert get_detailed_memory_info("cuda:2")["free_bytes"] is None
    with pytest.raises(OffloadError, match=r"'cuda:2' has no cap .* card does, and there are 2"):
        set_memory_fraction(0.5, "cuda:2")


def test_a_cap_that_torch_does_not_tell_is_known_and_taken_off_after_an_error(card_of_older_torch):
    card = torch.device("cuda", 1)
    assert set_memory_fraction(0.5) == 1.0
    with pytest.raises(KeyError), memory.memory_fraction(0.25):
        raise KeyError
    assert card_of_older_torch == [(0.5, card), (0.25, card), (0.5, card)]
    assert memory.fraction_of(card) == 0.5


@pytest.mark.parametrize("share", [0.65, 0.9, 1 / 3, 1.0, 0.123456789, 1e-3])
def test_a_cap_is_told_as_it_was_set_though_torch_keeps_whole_bytes(share, monkeypatch):
    total = 24 * 2**30
    monkeypatch.setattr(
        torch.cuda,
        "get_per_process_memory_fraction",
        lambda card: int(share * total) / total,
        raising=False,
    )
    told = memory.fraction_of(torch.device("cuda", 0))
    assert told == pytest.approx(share, abs=2**-32)
    assert told == share or share == 1 / 3


def test_the_host_s_memory_is_what_its_control_group_allows(tmp_path):
    for name, text in {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/memory.max": "512000\n",
        "sys/fs/cgroup/job/memory.current": "112000\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.host_available_and_total(str(tmp_path)) == (400000, 512000)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert memory.host_available_and_total(str(tmp_path)) == (614400, 1024000)


def test_the_limit_of_a_control_group_is_read_once_for_both(monkeypatch):
    """A monitor asks after each step; reading it is the dear part."""
    asked, read_text = [], cgroup.read_text
    monkeypatch.setattr(cgroup, "read_text", lambda *name: asked.append(name) or read_text(*name))
    memory.host_available_and_total()
    assert asked and len(asked) == len(set(asked))


def test_what_a_card_has_is_told_in_full(monkeypatch):
    answers = {
        "memory_stats": {"num_alloc_retries": 3, "num_ooms": 2},
        "mem_get_info": (50, 1000),
        "memory_allocated": 600,
        "memory_reserved": 800,
        "max_memory_allocated": 700,
    }
    monkeypatch.setattr(memory, "card", lambda device: torch.device("cuda", 0))
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    told = {
        name: number
        for name, number in get_detailed_memory_info().items()
        if not name.startswith("host")
    }
    assert told == {
        "allocated_bytes": 600,
        "reserved_bytes": 800,
        "cached_bytes": 200,
        "peak_bytes": 700,
        "free_bytes": 50,
        "total_bytes": 1000,
        "other_bytes": 150,
        "num_alloc_retries": 3,
        "num_ooms": 2,
    }
    assert memory.device_free_and_total() == (250, 1000)  # what torch caches is free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500, 1000))
    assert get_detailed_memory_info()["other_bytes"] == 0
    held = iter([800, 300])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(held))
    monkeypatch.setattr(memory, "release_memory", lambda: None)
    assert memory.cleanup().device_bytes == 500


def test_a_host_that_tells_nothing_of_its_memory_has_what_the_system_says(monkeypatch):
    monkeypatch.setattr(memory, "read_meminfo", lambda root: {})
    monkeypatch.setattr(memory, "read_memory_limit", lambda root: cgroup.MemoryLimit())
    monkeypatch.setattr(memory, "total_bytes", lambda: 777)
    assert memory.host_available_and_total() == (None, 777)
    assert memory.host_available_and_total("/recorded") == (None, None)
