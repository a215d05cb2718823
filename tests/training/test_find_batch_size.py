"""`find_batch_size`: the largest size is found, and no attempt leaves a trace."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from types import SimpleNamespace

import pytest
import torch
from equality import FailsAt, assert_same, attached
from torch import nn

from oracle_offload import NoRoomError, OffloadError
from oracle_offload.host import remembered
from oracle_offload.train import find_batch_size
from oracle_offload.train.survive import batch_size, known_sizes
from oracle_offload.train.survive.keeping import TrainingState, keep

WIDTH = 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    return tmp_path / "sizes.json"


class Data:
    """Batches that know their position."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(5)

    def next(self, size):
        self.position += size
        return torch.randn(size, WIDTH, generator=self.generator)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Run:
    """A training in progress: everything that a step can change."""

    def __init__(self, device="cpu", seed=0, scaled=False):
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1)
        )
        self.limit = None
        self.scaled = scaled

    def begin(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if self.scaled else None
        self.data = Data()
        return self

    def step(self, size):
        self.forward(size)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def forward(self, size):
        random.random()
        x = self.data.next(size).to(self.device)
        if size > (self.limit or size):
            raise torch.OutOfMemoryError(f"{size} samples are too many")
        loss = self.model(x).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def find(self, **options):
        return find_batch_size(
            self.step,
            self.model,
            scaler=self.scaler,
            parts=[self.scheduler, self.data],
            generators=[self.data.generator],
            **{
                "optimizer": self.optimizer,
                "start": 2,
                "maximum": 32,
                "remember": False,
                **options,
            },
        )

    def state(self):
        return copy.deepcopy(
            {
                "model": {k: v.cpu() for k, v in self.model.state_dict().items()},
                "gradients": [
                    None if p.grad is None else p.grad.cpu() for p in self.model.parameters()
                ],
                "optimizer": {
                    i: {k: v.cpu() for k, v in s.items()}
                    for i, s in self.optimizer.state_dict()["state"].items()
                },
                "random": torch.get_rng_state(),
                "generator": self.data.generator.get_state(),
            }
        ), copy.deepcopy(
            [
                self.optimizer.state_dict()["param_groups"],
                self.scheduler.state_dict(),
                self.data.state_dict(),
                random.getstate(),
                None if self.scaler is None else self.scaler.state_dict(),
                None if self.scaler is None else dict(self.scaler._per_optimizer_states),
            ]
        )


def assert_untouched(run, before):
    tensors, plain = run.state()
    assert_same(tensors, before[0])
    assert plain == before[1]


def identities(run):
    held = [*run.model.parameters(), *run.model.buffers()]
    held += [t for s in run.optimizer.state.values() for t in s.values()]
    return [(id(t), t.data_ptr()) for t in held]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_no_attempt_leaves_a_trace_and_training_goes_on_with_the_same_bits(fresh, scaled, device):
    run, other = Run(device, scaled=scaled), Run(device, scaled=scaled)
    if device != "cpu" and scaled:
        pytest.skip("the scaler of this test is the host's")
    with attached(run.model, device), attached(other.model, device):
        for each in (run, other):
            each.begin()
            torch.manual_seed(1)
            random.seed(1)
            for _ in range(0 if fresh else 3):
                each.step(4)
            each.limit = 11
            if not fresh:
                each.forward(3)  # gradients that are being accumulated
        gradients = [p.grad for p in run.model.parameters()]
        before, held = run.state(), identities(run)
        card = torch.cuda.get_rng_state() if device == "cuda" else None
        result = run.find()
        assert int(result) == 11 and result.too_large == 12 and result.stepped
        assert result.notes == () and list(range(20))[result] == 11
        assert [size for size, _ in result.attempts] == [2, 4, 8, 16, 12, 10, 11]
        assert_untouched(run, before)
        assert identities(run) == held
        assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
        for each in (run, other):
            torch.set_rng_state(before[0]["random"])
            if card is not None:
                torch.cuda.set_rng_state(card)
            each.step(4)
            each.step(5)
        assert_same(run.state()[0], other.state()[0])


def test_running_out_of_memory_at_any_operator_leaves_no_trace():
    run = Run()
    run.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    with attached(run.model, "cpu") as manager:
        run.begin()
        run.step(4)
        run.forward(3)
        run.optimizer.zero_grad()
        before, honest = run.state(), run.step

        def find(number):
            armed = []

            def step(size):
                armed.append(size)
                try:
                    honest(size)
                finally:
                    armed.clear()

            run.step = step
            acquires = manager.state.engine.stats()["acquires"]
            with FailsAt(number, lambda: bool(armed)) as mode:
                result = run.find(maximum=2, steps=1)
            assert manager.state.engine.stats()["acquires"] > acquires
            assert_untouched(run, before)
            return mode.count, result

        operators, result = find(None)
        assert result.attempts == ((2, True),) and operators > 30
        for number in range(1, operators + 1):
            _, result = find(number)
            assert result.attempts == ((2, False), (1, True)), number


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 31, 32])
@pytest.mark.parametrize("start", [1, 5, 32])
def test_the_largest_size_is_found_from_wherever_the_search_begins(limit, start):
    tried = []

    def step(size):
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("too many")

    result = find_batch_size(
        step, nn.Linear(1, 1), start=start, maximum=32, steps=1, remember=False
    )
    assert int(result) == limit
    assert result.too_large == (limit + 1 if limit < 32 else None)
    assert len(tried) <= 12 and len(set(tried)) == len(tried)
    assert result.attempts == tuple((size, size <= limit) for size in tried)


def test_each_attempt_begins_in_the_same_state_and_is_logged(caplog):
    model, begun = nn.Linear(1, 1), []

    def step(size):
        begun.append(model.weight.item())
        with torch.no_grad():
            model.weight.add_(1)
        if size > 2:
            raise torch.OutOfMemoryError("too many")

    with caplog.at_level("INFO"):
        find_batch_size(step, model, maximum=4, steps=1, remember=False)
    assert len(begun) == 4 and len(set(begun)) == 1
    assert [line for line in caplog.messages if line.startswith("a batch of")] == [
        *("a batch of 1 fits", "a batch of 2 fits"),
        *(f"a batch of {size} does not fit: too many" for size in (4, 3)),
    ]


def test_what_is_kept_is_put_back_in_place_and_once():
    tensor, rows = torch.ones(2), [1, 2]
    value = {"twice": (tensor, tensor), "rows": rows}
    known = {}
    restore = keep(value, known)
    assert list(known) == [id(tensor)]
    value["more"] = 3
    rows.append(3)
    tensor.zero_()
    assert restore() is value and value["rows"] is rows and value["twice"] == (tensor, tensor)
    assert value.keys() == {"twice", "rows"} and rows == [1, 2] and tensor.tolist() == [1, 1]


@pytest.mark.parametrize("values", [True, False])
def test_what_an_attempt_changes_is_put_back_until_the_end(values):
    model = nn.BatchNorm1d(2)
    model.bias.requires_grad_(False)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": rate}])
    changed = [model.weight, model.bias, model.running_mean, rate]
    gradient = model.weight.grad = torch.ones(2)
    state = TrainingState(model, [optimizer])
    assert state.value_bytes == 4 * 2 + 4  # the trained one and the rate

    def change():
        model.weight.grad = torch.full((2,), 7.0)
        with torch.no_grad():
            for tensor in changed:
                tensor.fill_(5)

    state.keep(values=values)
    assert model.weight.grad is None
    for finish in (state.restore, state.restore, state.end):
        change()
        finish()
        expected = [[1, 1] if values else [5, 5], [5, 5], [0, 0], pytest.approx(0.1)]
        assert [tensor.tolist() for tensor in changed] == expected
        assert model.weight.grad is (gradient if finish == state.end else None)
    change()
    state.restore()  # what was kept is gone
    assert model.running_mean.tolist() == [5, 5]


def test_trained_values_are_kept_without_an_optimizer():
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    state = TrainingState(model)
    assert state.value_bytes == 4
    state.keep(values=True)
    before = model.weight.item()
    torch.nn.init.constant_(model.weight, 9)
    state.restore()
    assert model.weight.item() == before


def test_the_second_step_counts_too():
    steps = []

    def step(size):
        steps.append(size)
        if len(steps) % 2 == 0 and size > 2:
            raise MemoryError

    assert int(find_batch_size(step, nn.Linear(1, 1), maximum=4, remember=False)) == 2
    assert steps == [1, 1, 2, 2, 4, 4, 3, 3]


@pytest.mark.parametrize(
    ("before", "margin", "within"), [(1.0, 0.1, 0.45), (0.25, 0.1, 0.25), (1.0, 0.0, 1.0)]
)
def test_the_margin_lifts_no_cap(before, margin, within, monkeypatch):
    """Of a card of which others hold half: torch may take nine tenths of the rest, or its cap."""
    share, seen = [before], []
    stand_in_card(monkeypatch, share, [])
    find_batch_size(
        lambda size: seen.append(share[0]), nn.Linear(1, 1), maximum=1, steps=1, margin=margin,
        device="cuda:0", remember=False,
    )  # fmt: skip
    assert seen == [pytest.approx(within)] and share == [before]


def stand_in_card(monkeypatch, share, waits):
    """Let torch see a card of 1000 bytes, of which others hold half."""
    for name, answer in {
        "is_available": lambda: True,
        "mem_get_info": lambda card: (500, 1000),
        "memory_reserved": lambda card: 0,
        "memory_allocated": lambda card: 0,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": waits.append,
        "get_per_process_memory_fraction": lambda card: share[0],
        "set_per_process_memory_fraction": lambda value, card: share.__setitem__(0, value),
        "get_device_properties": lambda card: type("Card", (), {"name": "", "total_memory": 1000}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer, raising=False)


def test_a_card_needs_no_maximum_and_is_waited_for_in_each_attempt(monkeypatch):
    waits = []
    stand_in_card(monkeypatch, [1.0], waits)

    def step(size):
        if size > 5:
            raise torch.OutOfMemoryError("too many")

    result = find_batch_size(step, nn.Linear(1, 1), device="cuda", remember=False)
    assert int(result) == 5 and result.too_large == 6
    assert waits == [torch.device("cuda", 0)] * sum(fits for _, fits in result.attempts)


def test_a_card_that_is_not_there_is_refused_before_an_attempt(monkeypatch):
    with pytest.raises(OffloadError, match="'cuda:7', but torch sees "):
        find_batch_size(pytest.fail, nn.Linear(1, 1), device="cuda:7", maximum=1, remember=False)
    stand_in_card(monkeypatch, [1.0], [])
    with pytest.raises(OffloadError, match=r"'cuda:7', but torch sees 1 CUDA device\(s\)"):
        find_batch_size(pytest.fail, nn.Linear(1, 1), device="cuda:7", remember=False)


def test_what_does_not_even_fit_at_the_floor_is_refused_and_untouched():
    run = Run().begin()
    run.limit = 3
    before = run.state()
    with pytest.raises(NoRoomError, match="not even a batch of 4 fits: 4 samples") as caught:
        run.find(minimum=4, start=8)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert_untouched(run, before)


def test_another_error_passes_and_leaves_everything_as_it_was():
    run = Run().begin()
    run.forward(3)  # gradients that are being accumulated
    before, honest = run.state(), run.step

    def step(size):
        honest(size)
        raise KeyError("a bug")

    run.step = step
    with pytest.raises(KeyError):
        run.find()
    assert_untouched(run, before)


def test_nothing_of_a_failed_attempt_is_alive_in_the_next():
    alive = []

    class Activation:
        def __init__(self) -> None:
            alive.append(self)

        def __del__(self) -> None:
            alive_now[0] -= 1

    alive_now = [0]
    alive.clear()

    def step(size):
        assert alive_now[0] == 0, "the frames of the failed attempt hold their tensors"
        held = [Activation() for _ in range(size)]
        alive_now[0] += size
        alive.clear()
        if size > 2:
            raise torch.OutOfMemoryError(f"{len(held)}")

    assert int(find_batch_size(step, nn.Linear(1, 1), maximum=9, remember=False)) == 2


def test_several_optimizers_are_left_as_they_were():
    run = Run().begin()
    run.step(4)
    run.limit = 3
    before = run.state()
    assert int(run.find(optimizer=[run.optimizer])) == 3
    assert_untouched(run, before)


def test_where_the_host_cannot_keep_the_state_optimizers_do_not_step(monkeypatch, caplog):
    run = Run().begin()
    run.step(4)
    before = run.state()
    steps, honest = [], run.optimizer.step
    run.optimizer.step = lambda: steps.append(honest())
    monkeypatch.setattr(batch_size, "available_bytes", lambda: 1000)
    run.limit = 5
    result = run.find(steps=1)
    assert int(result) == 5 and not result.stepped and steps == []
    assert "the host can spare 1000 B: optimizers did not step" in result.notes[0]
    assert f"find_batch_size: {result.notes[0]}" in caplog.messages
    assert_untouched(run, before)
    run.step(2)
    assert len(steps) == 1  # the step of one's own is there again
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(batch_size, "available_bytes", lambda: 0)
    for error in (None, KeyError):
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            find_batch_size(
                lambda size, error=error: {}["x"] if error else None,
                model, optimizer=optimizer, maximum=1, remember=False,
            )  # fmt: skip
        assert "step" not in vars(optimizer)
    monkeypatch.setattr(batch_size, "available_bytes", lambda: None)
    assert run.find(steps=1).stepped


def test_the_state_fits_up_to_the_byte(monkeypatch):
    run = Run().begin()
    nbytes = 4 * sum(p.numel() for p in run.model.parameters())
    for room, stepped in ((nbytes * 10 // 8, True), (nbytes * 10 // 8 - 2, False)):
        monkeypatch.setattr(batch_size, "available_bytes", lambda room=room: room)
        assert run.find(maximum=2).stepped is stepped


def test_sizes_are_remembered_and_used_and_kept_apart(cache):
    run = Run().begin()
    run.limit = 11
    assert len(run.find(remember=True).attempts) == 7
    again = run.find(remember=True)
    assert int(again) == 11 and again.too_large == 12 and again.attempts == ((11, True),)
    run.limit = 6  # another program has come
    worse = run.find(remember=True)
    assert int(worse) == 6 and worse.too_large == 7
    assert [size for size, _ in worse.attempts] == [11, 5, 8, 6, 7]
    assert run.find(remember=True).attempts == ((6, True),)
    assert len(run.find(remember=True, key="other").attempts) > 3
    run.model[0].requires_grad_(False)
    assert len(run.find(remember=True).attempts) > 3
    document = json.loads(cache.read_text())
    assert document["schema"] == "oracle_offload/sizes/1" and len(document["sizes"]) == 3
    assert {row["model"] for row in document["sizes"].values()} == {"Sequential"}
    assert run.find(remember=True, maximum=4).attempts == ((4, True),)


def test_a_smaller_maximum_forgets_no_larger_size(cache):
    limit = 20

    def find(maximum):
        def step(size):
            if size > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. planned")

        model = nn.Linear(1, 1)
        return find_batch_size(step, model, start=2, maximum=maximum, steps=1, remember=True)

    assert int(find(32)) == 20
    assert find(8).attempts == ((8, True),)
    assert find(32).attempts == ((20, True),), "as if the smaller had not been asked for"
    limit = 5
    assert int(find(8)) == 5
    assert find(32).attempts == ((5, True),), "what does not fit any more is forgotten"
    cache.unlink()
    assert int(find(4)) == 4
    limit = 8
    assert int(find(8)) == 8
    assert find(8).attempts == ((8, True),), "a larger size that fitted is kept"


def test_what_was_too_large_is_tried_again_where_it_may_fit_now(cache, monkeypatch):
    run = Run().begin()
    run.limit = 11
    free = [1000]
    monkeypatch.setattr(batch_size, "device_free_and_total", lambda device: (free[0], 2000))
    assert int(run.find(remember=True)) == 11
    run.limit = 20  # another program has gone
    for free[0] in (1010, 900, 905):
        assert int(run.find(remember=True)) == 11, "no more is free than before"
    free[0] = 1500
    assert int(run.find(remember=True)) == 20
    run.model[0].gradient_checkpointing = True
    run.limit = 30
    assert int(run.find(remember=True)) == 30
    run.limit = 32
    assert int(run.find(remember=True, margin=0.0)) == 32
    run.optimizer = torch.optim.SGD(run.model.parameters())
    assert len(run.find(remember=True).attempts) > 1


def test_what_never_fitted_is_remembered_too(cache):
    run = Run().begin()
    run.limit = 3
    with pytest.raises(NoRoomError):
        run.find(minimum=8, start=16, remember=True)
    result = run.find(start=16, remember=True)
    assert result.attempts[0] == (7, False) and int(result) == 3


@pytest.mark.parametrize("minimum", [8, 9])
def test_a_size_that_fits_now_is_more_than_what_was_too_large_before(minimum, cache):
    run = Run().begin()
    run.limit = 3
    with pytest.raises(NoRoomError):
        run.find(minimum=8, start=16, remember=True)
    run.limit = 11
    result = run.find(minimum=minimum, start=16, remember=True)
    assert (int(result), result.too_large) == (11, 12)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "other/1"}', '{"schema": "oracle_offload/sizes/1", "sizes": []}'],
)
def test_a_damaged_file_is_as_good_as_none_and_written_anew(text, cache):
    cache.write_text(text)
    assert known_sizes.recall("x") == (None, None, None)
    known_sizes.remember("x", known_sizes.Known(3, 4), "Model")
    assert known_sizes.recall("x") == (3, 4, None)


@pytest.mark.parametrize("known", [(3, None, None), (None, 3, 5), (3, 4, 5)])
def test_sizes_that_can_be_are_used(known, cache):
    known_sizes.remember("x", known_sizes.Known(*known), "Model")
    assert known_sizes.recall("x") == known
    known_sizes.remember("x", known_sizes.Known(3, 4, -5), "Model")
    assert known_sizes.recall("x") == (None, None, None)


@pytest.mark.parametrize(
    ("good", "bad"), [(4, 4), (5, 2), ("3", None), (True, None), (0, 3), (-1, 2)]
)
def test_sizes_that_cannot_be_are_passed_over(good, bad, cache):
    row = {"good": good, "bad": bad}
    cache.write_text(json.dumps({"schema": known_sizes.SCHEMA, "sizes": {"x": row, "y": 3}}))
    assert known_sizes.recall("x") == known_sizes.recall("y") == (None, None, None)


def test_the_oldest_sizes_go_and_a_folder_that_cannot_be_is_no_error(monkeypatch, cache):
    monkeypatch.setattr(remembered, "_MOST_ROWS", 2)
    for key in "abac":
        known_sizes.remember(key, known_sizes.Known(1, 2), "Model")
    assert list(json.loads(cache.read_text())["sizes"]) == ["a", "c"]
    cache.unlink()
    cache.parent.joinpath("file").write_text("")
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(cache.parent / "file"))
    known_sizes.remember("x", known_sizes.Known(1, 2), "Model")
    assert known_sizes.recall("x") == (None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, "start=0 is not a whole number"),
        ({"start": 1, "minimum": 2}, r"start=1 is outside \[minimum=2"),
        ({"start": 9, "maximum": 8}, r"start=9 is outside .*maximum=8\]"),
        ({"minimum": 1.5}, "minimum=1.5 is not a whole"),
        ({"steps": True}, "steps=True is not a whole"),
        ({"margin": 1.0}, r"margin=1.0 is not in \[0, 1\)"),
        ({"margin": -0.1}, "margin=-0.1 is not"),
        ({"margin": "x"}, "margin='x' is not"),
        ({"margin": False}, "margin=False is not"),
        ({"maximum": None}, "find_batch_size on 'cpu' needs maximum="),
        ({"maximum": None, "device": "cpu"}, "needs maximum="),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
    run = Run().begin()
    with pytest.raises(ValueError, match=message):
        run.find(**options)


def test_a_size_is_of_the_model_the_card_the_room_and_what_the_caller_names(monkeypatch):
    """Whatever a size depends on makes another key, and nothing else does."""
    card = SimpleNamespace(name="one", total_memory=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def key(device=cpu, room=5, more=("adamw",), bias=True, dtype=None, frozen=False):
        model = nn.Sequential(nn.Linear(2, 3, bias=bias, dtype=dtype)).requires_grad_(not frozen)
        return known_sizes.key_of(model, device, room, more)

    checkpointed = nn.Sequential(nn.Linear(2, 3))
    checkpointed[0].gradient_checkpointing = True
    keys = [
        *(key(), key(cuda), key(room=None), key(more=()), key(bias=False), key(frozen=True)),
        *(key(dtype=torch.float64), known_sizes.key_of(checkpointed, cpu, 5, ("adamw",))),
        known_sizes.key_of(nn.ModuleList([nn.Linear(2, 3)]), cpu, 5, ("adamw",)),
    ]
    card.name = "another"
    keys.append(key(cuda))
    card.name, card.total_memory = "one", 16
    keys.append(key(cuda))
    assert len(set(keys)) == len(keys)
    parts = [nn.Sequential(nn.Linear(2, 3), *more) for more in ([], [nn.Identity()])]
    of_parts = {known_sizes.key_of(model, cpu, 5, ("adamw",)) for model in parts}
    assert of_parts == {keys[0]}, "a part without parameters is no other model"
    card.total_memory = 8
    assert (key(), key(cuda)) == tuple(keys[:2]), "the values of the weights are no part of it"
