"""Several ranks of one machine, on one copy of the frozen weights: real processes, on gloo."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
import small_models
import torch
from safetensors.torch import load_file

from oracle_offload.errors import OffloadError
from oracle_offload.host import ranks as host_ranks
from oracle_offload.model import sharing

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="share='node' is for Linux"),
]

PROGRAM = Path(__file__).with_name("ranks.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STAGES = (
    *("meet", "made", "descriptor", "sealed", "layout", "cuts", "filled", "compared weights"),
    *("attached", "writing", "merged", "written"),
)
KILLS = [f"killed:{victim}:{stage}" for stage in STAGES for victim in (0, 1)]
KILLS += [f"sections:killed:{victim}:offered" for victim in (0, 1)]
SCENARIOS = [
    *("bits", "memory", "files", "writes", "saves", "shown", "partly_trained", "nodes@4"),
    *("waits", "local_rank@4", "uncounted", "aitoolkit", "peak"),
    *("nothing_frozen", "one_fails_late", "abandoned", "ties", "early", "orphan", "alone"),
    *("half_written", "no_cache", "quantised", "merges", "in_place"),
    *("other_files", "other_layout", "other_values", "one_fails", "one_is_late"),
    *("descriptor", "no_group", "no_place", "other_number"),
    *(f"sections:{name}" for name in ("memory", "writes", "files", "abandoned")),
    *("sections:killed:0:offered", "sections:killed:1:offered", "sections:killed:1:filled"),
    *("killed:0:filled", "killed:1:filled", "killed:1:meet", "killed:1:attached"),
    *(
        "killed:0:writing",
        "killed:0:merged",
        "killed:1:written",
        "killed:0:accept",
        "starts",
        "starts",
        "starts",
        "starts",
        "starts",
    ),
]


def run(folder, size, scenarios, timeout_s):
    """Return what the ranks of each scenario said; see `ranks.py`."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(size), *scenarios],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        # They compute on "cpu". Where there is a card, backward starts a thread for it, and no
        # process that has threads can fork ranks.
        env={
            **os.environ,
            "ORACLE_OFFLOAD_CACHE_DIR": str(folder / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All scenarios at two ranks, from one process: importing torch is paid for once."""
    return run(tmp_path_factory.mktemp("ranks"), 2, SCENARIOS, 540)


def said(rows, name):
    """Return what the ranks of a scenario said; all of them ended well and left nothing."""
    (row,) = (row for row in rows if row["scenario"] == name)
    for rank in row["ranks"]:
        assert rank["code"] == 0, rank["said"]
    assert not row["left"]
    return [rank["said"] for rank in row["ranks"]]


def test_ddp_over_shared_weights_has_the_bits_of_ddp_over_resident_models(two):
    assert said(two, "bits") == ["equal", "equal"]


def test_all_ranks_together_have_one_copy_of_the_weights(two):
    check_one_copy(said(two, "memory"))


def check_one_copy(ranks):
    nbytes = ranks[0]["nbytes"]
    assert nbytes > 800_000
    assert all(rank["Rss"] == nbytes for rank in ranks), "each rank reads all of it"
    assert abs(sum(rank["Pss"] for rank in ranks) - nbytes) <= 4096 * len(ranks)


def test_ranks_that_fill_from_files_never_have_more_than_the_weights_and_two_pieces(two):
    check_peak(said(two, "peak"))


def check_peak(ranks):
    weights, piece = ranks[0]["weights"], ranks[0]["piece"]
    fixed = (
        12 << 20
    )  # of each rank, whatever the weights: threads, rings, memory of before the fork
    total = sum(rank["peak"] for rank in ranks)
    assert weights <= total <= weights + 2 * piece + fixed * len(ranks), ranks
    assert weights + 2 * piece + fixed * len(ranks) < weights * len(ranks), "or a copy for each"


def test_weights_from_files_are_read_once_and_shared_compressed_too(two):
    assert said(two, "files") == ["equal", "equal"]


def test_one_rank_writes_while_all_wait_and_nobody_else_does(two):
    assert said(two, "writes") == ["done", "done"]


def test_no_rank_goes_on_before_all_have_filled_and_let_write(two):
    assert said(two, "waits") == ["waited", "waited"]


def test_what_is_trained_is_each_ranks_own_and_the_rest_is_shared(two):
    assert said(two, "partly_trained") == ["trained", "trained"]


def test_a_configuration_of_ai_toolkit_asks_for_one_copy(two):
    first, second = said(two, "aitoolkit")
    assert first == second


def test_distributed_checkpoints_load_what_is_trained_and_fsdp_is_refused(two):
    assert said(two, "saves") == ["loaded", "loaded"]


def test_summary_recording_and_watcher_say_which_rank_they_are_of(two):
    for rank, (summary, recording, looked) in enumerate(said(two, "shown")):
        assert summary.splitlines()[0].startswith(f"rank {rank} of 2")
        assert "on the host, in one copy" in summary and ", for 2 ranks" in summary
        assert recording.splitlines()[0] == f"of rank {rank} of 2"
        assert looked.startswith(f"rank {rank} of 2, process ")
        assert f"rank {1 - rank}  " in looked and " steps, " in looked


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("other_files", "rank 1 of this machine has another files than rank 0"),
        ("other_layout", "rank 1 of this machine has another layout than rank 0 (24 there, 20 her"),
        ("other_values", "rank 1 of this machine has other values of 'blocks.2.base.weight'"),
        ("one_fails", "vram_budget='1KiB' is 1.00 KiB"),
        ("one_fails_late", "the device has no room for the arena"),
        ("abandoned", "no room for the heap"),
        ("ties", "tied to '0.weight'"),
        ("half_written", "no room for the rest"),
        ("merges", "some ranks have merged adapters"),
        ("descriptor", "rank 1 of this machine was refused the descriptor"),
        ("nothing_frozen", "share='node' shares frozen weights, and each layer of this model has"),
        ("no_group", "needs a process group, and there is none"),
        ("no_place", "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which say None"),
        ("other_number", "rank 1 of this machine says {'local_world': 3"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_with_its_name_on_all(two, scenario, why):
    ranks = said(two, scenario)
    assert len(ranks) == 2
    assert all(why in text for text in ranks), ranks


def test_what_is_wrong_before_anything_is_shared_is_heard_of_and_leaves_nothing_open(two):
    for lock, memory, exchanged, *layouts in said(two, "early"):
        assert "lock='much' is neither 'auto' nor 'never'" in lock
        assert "the system makes no shared memory (no more of it)" in memory
        assert "what rank 1 of this machine was passed is not memory" in exchanged
        assert len(layouts) == 2
        assert all("has another layout than rank 0" in text for text in layouts)


@pytest.mark.parametrize("seen_as", [torch.conj, torch._neg_view])
def test_weights_are_compared_by_their_values_whatever_they_are_seen_as(seen_as):
    stored = torch.tensor([1 + 2j, 3 - 1j])
    given = seen_as(stored)
    assert sharing._same(given, given.resolve_conj().resolve_neg())
    assert not sharing._same(given, stored)


@pytest.mark.parametrize("here", ["first", "other"])
def test_a_process_of_another_user_is_no_rank(monkeypatch, here):
    """Any process that knows the store may put another name there, or come to the first rank's."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    door = socket.socket(socket.AF_UNIX)
    name = f"oracle_offload-test-{os.getpid()}-{here}"
    at = host_ranks.Place(1, 2, 1, 2)
    with door:
        door.bind("\0" + name)
        door.listen()
        if here == "other":
            store = torch.distributed.HashStore()
            store.set("key", name)
            with pytest.raises(OffloadError, match=f"it is of user {own}, this one of user"):
                host_ranks._go_to_first(store, "key", at.as_row(), at, 60)
        else:
            peers = {}
            with socket.socket(socket.AF_UNIX) as comes:
                comes.connect("\0" + name)
                host_ranks._let_in(door.accept()[0], at.as_row(), peers, time.monotonic() + 60)
                assert not peers and comes.recv(1) == b"", "it was let in"


def test_who_does_not_know_the_word_of_the_store_is_no_rank(monkeypatch):
    """Anybody of this machine can come to a socket of the loopback network."""
    monkeypatch.setattr(host_ranks.LocalRanks, "passes_files", False)
    at, until = host_ranks.Place(1, 2, 1, 2), time.monotonic() + 60
    peers = {}
    with socket.create_server(("127.0.0.1", 0)) as door:
        name = f"{door.getsockname()[1]} word"
        for word in ("another", "word"):
            comes = socket.create_connection(door.getsockname())
            ranks = host_ranks.LocalRanks(at, {0: comes}, 60)
            hello = {**at.as_row(), "version": "1", "key": "key", "door": name}
            ranks._tell({**hello, "door": name.replace("word", word)})
            host_ranks._let_in(door.accept()[0], hello, peers, until)
            assert len(peers) == (word == "word")
            if word == "another":
                assert comes.recv(1) == b"", "it was let in"
            comes.close()
    peers[1].close()


def test_a_rank_that_is_interrupted_while_it_waits_is_heard_of(monkeypatch):
    """By its kind: a KeyboardInterrupt has no words."""
    ends = socket.socketpair()
    first, other = (
        host_ranks.LocalRanks(host_ranks.Place(rank, 2, rank, 2), {1 - rank: end}, 10)
        for rank, end in enumerate(ends)
    )

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_ranks, "_receive", interrupted)
        other.exchange("layout", 1)
    assert first.exchange("layout", 0) == [0, 1]
    with pytest.raises(OffloadError, match="rank 1 of this machine failed: KeyboardInterrupt"):
        first.exchange("files")


def test_ranks_share_as_they_do_on_windows_with_sections_taken_from_the_first(two):
    check_one_copy(said(two, "sections:memory"))
    assert said(two, "sections:writes") == ["done", "done"]
    assert said(two, "sections:files") == ["equal", "equal"]
    assert all("no room for the heap" in text for text in said(two, "sections:abandoned"))
    kills = [row for row in two if row["scenario"].startswith("sections:killed")]
    assert len(kills) == 3
    for row in kills:
        check_kill(row)


def test_a_rank_that_was_killed_is_gone_while_a_child_of_it_lives(two):
    (row,) = (row for row in two if row["scenario"] == "orphan")
    assert [rank["code"] for rank in row["ranks"]] == [0, -9], row
    assert "rank 1 of this machine is gone" in row["ranks"][0]["said"]
    assert not row["left"]


def test_who_writes_what_is_shared_past_all_calls_ends_at_that_line(two):
    (row,) = (row for row in two if row["scenario"] == "in_place")
    assert [rank["code"] for rank in row["ranks"]] == [0, -signal.SIGSEGV], row
    assert "rank 1 of this machine is gone" in row["ranks"][0]["said"]
    assert not row["left"]


def test_ddp_leaves_what_is_shared_alone_untold_and_copies_are_their_own(two):
    first, _ = said(two, "alone")
    assert "rank 1 of this machine is gone" in first


def test_a_rank_that_cannot_write_the_cache_leaves_its_part_as_it_is(two):
    coded = said(two, "no_cache")
    assert coded[0] == coded[1] > 0, coded


def test_quantised_weights_are_shared_and_no_call_writes_them(two):
    assert said(two, "quantised") == ["refused", "refused"]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_group_allows(two):
    waited, _ = said(two, "one_is_late")
    assert "1 did not come to attach within 1 s" in waited
    waited, _ = said(two, "uncounted")
    assert "rank 1 of the job did not come to attach within 1 s" in waited


def check_kill(row):
    """The other ranks see at once that one was killed, and no segment is left."""
    *_, victim, stage = row["scenario"].split(":")
    assert row["seconds"] < 10
    killed_s = row["ranks"][int(victim)]["said"]
    for number, rank in enumerate(row["ranks"]):
        assert rank["code"] == (-9 if number == int(victim) else 0), rank["said"]
        if number != int(victim):
            why, heard_s = rank["said"]
            assert f"rank {victim} of this machine is gone" in why, (stage, why)
            assert heard_s - killed_s < 10
    assert not row["left"]


def test_ranks_killed_are_heard_of_and_leave_no_segment(two):
    rows = [row for row in two if row["scenario"].startswith("killed")]
    assert len(rows) == 8
    for row in rows:
        check_kill(row)


def test_five_starts_share_each_a_segment_of_their_own_and_leave_none(two):
    check_starts([row for row in two if row["scenario"] == "starts"], 5)


def check_starts(rows, count):
    assert len(rows) == count
    for row in rows:
        assert row["seconds"] < 10
        assert all(rank["code"] == 0 for rank in row["ranks"]), row
        assert len({rank["said"] for rank in row["ranks"]}) == 1, "one file for all ranks"
        assert not row["left"]


def test_two_machines_have_a_copy_each_and_train_as_one_job(two):
    check_two_machines(said(two, "nodes@4"))


def test_ranks_are_placed_by_their_local_rank_alone_where_no_more_is_said(two):
    check_two_machines(said(two, "local_rank@4"))


def check_two_machines(inodes):
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


LAUNCHERS = {
    "lightning": (),  # its own: the first process starts the other
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no"),
        *("--dynamo_backend", "no"),
    ),
    "trainer": (
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_each_launcher_shares_and_has_the_bits_of_resident_models(tmp_path, kind):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    found = {}
    for share in ("node", "plain"):
        program = [str(PROGRAM.with_name("launched.py")), kind, share, str(tmp_path / share)]
        ended = subprocess.run(
            [sys.executable, *LAUNCHERS[kind], *program],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        found[share] = [json.loads(path.read_text()) for path in (tmp_path / share).iterdir()]
    assert len({rank["adapters"] for ranks in found.values() for rank in ranks}) == 1, found
    assert len(found["node"]) == len(found["plain"]) == 2
    for rank in found["node"]:
        assert rank["shared_by"] == 2 and rank["shared_bytes"] > 400_000, rank


@pytest.mark.slow
def test_two_agents_of_torchrun_train_as_the_page_says(tmp_path):
    """Two on this machine, each with two ranks, for two machines: the example, unchanged."""
    small_models.write(tmp_path / "small")
    told = ["--model", tmp_path / "small/llama", "--data", tmp_path / "small/texts.jsonl"]
    told += ["--device", "cpu", "--steps", "4", "--output", tmp_path / "run"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", "several"]
    meeting += ["--rdzv-endpoint", tmp_path / "meet", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "2", *meeting, EXAMPLES / "several_gpus.py", *told]
    root = str(EXAMPLES.parent)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = root  # the sources that are tested
    agents = [
        subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    try:
        texts = [agent.communicate(timeout=540)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
    assert [agent.returncode for agent in agents] == [0, 0], "".join(texts)[-4000:]
    lines = re.findall(
        r"rank (\d) of 4: (.*), in one copy for 2 ranks; adapters (\w+)", "".join(texts)
    )
    assert sorted(number for number, *_ in lines) == ["0", "1", "2", "3"], texts
    assert len({checksum for *_, checksum in lines}) == 1, "the ranks drifted apart"
    adapters = load_file(tmp_path / "run/adapter_model.safetensors")
    assert any(value.any() for name, value in adapters.items() if "lora_B" in name)


@pytest.mark.slow
def test_four_ranks_have_one_copy_and_the_bits_of_resident_models(tmp_path):
    rows = run(tmp_path, 4, ["bits", "memory", "peak", "files", "writes", "saves"], 540)
    assert said(rows, "bits") == ["equal"] * 4
    check_one_copy(said(rows, "memory"))
    check_peak(said(rows, "peak"))
    assert said(rows, "files") == ["equal"] * 4
    assert said(rows, "writes") == ["done"] * 4
    assert said(rows, "saves") == ["loaded"] * 4


@pytest.mark.slow
def test_fifty_kills_and_a_hundred_starts(tmp_path):
    kills = list(itertools.islice(itertools.cycle(KILLS), 50))
    rows = run(tmp_path, 2, [*kills, *["starts"] * 100], 1200)
    for row in rows[:50]:
        check_kill(row)
    check_starts(rows[50:], 100)
