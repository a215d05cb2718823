"""What other plans would take, in virtual time: policies of other programs, and the best known.

Each gets the visits of a step or sweep, over and over, and says what one takes once it has settled.
A copy begins once the link is idle and the bytes it overwrites have been used; a visit begins once
its unit has arrived. The arena is divisible here: no plan loses bytes to holes in it, but for rings
of slots, each as large as the largest item.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from model_traces import BACKWARD, RECOMPUTE, Trace, Visit

COPY_LATENCY_S = 2.5e-6
ROUNDS, SWEEPS = 6, 24  # over and over; a plan may copy in one sweep what it leaves out in others
SETTLED = 5  # so many have been made: what follows counts
NEVER = 1 << 60


@dataclass(frozen=True)
class Outcome:
    """Seconds and bytes of a step or sweep."""

    seconds: float
    nbytes: float


def interval_bound_s(
    unit_bytes: Sequence[int],
    visits: Sequence[Visit],
    capacity: float,
    link_bps: float,
    latency_s: float = 0.0,
    disk: tuple[Collection[int], float, float] = ((), 1.0, 0.0),
) -> float:
    """Return seconds that no plan can beat, where each copy takes `latency_s` and its bytes' time.

    Between the begin of one visit and that of a later one, all their units but what the arena
    held at first have to be copied, and all their kernels have to run. A step takes the longest
    chain of such intervals. The arena holds no more units than of the smallest. Of a `disk`, by
    the units that are on it, its bytes a second and those of the ring that reads pass through,
    these have to be read likewise.
    """
    import numpy as np

    n = len(visits)
    held = sum(end <= capacity for end in itertools.accumulate(sorted(unit_bytes)))
    distinct = np.zeros(n)  # bytes of the units used in visits i to j, by i
    units = np.zeros(n)  # and how many they are
    begun = np.zeros(n)  # seconds of kernels before visit i
    earliest = np.zeros(n + 1)  # when visit i can begin
    last: dict[int, int] = {}
    seconds = 0.0
    on_disk, disk_bps, ring_bytes = set(disk[0]), *disk[1:]
    far = np.zeros(n)  # of `distinct`, what is on the disk
    for j, visit in enumerate(visits):
        before = last.get(visit.unit, -1)
        distinct[before + 1 : j + 1] += unit_bytes[visit.unit]
        if visit.unit in on_disk:
            far[before + 1 : j + 1] += unit_bytes[visit.unit]
        units[before + 1 : j + 1] += 1
        last[visit.unit] = j
        begun[j] = seconds
        copied = np.maximum(distinct[: j + 1] - capacity, 0) / link_bps
        copied += np.maximum(units[: j + 1] - held, 0) * latency_s
        copied = np.maximum(copied, (far[: j + 1] - capacity - ring_bytes) / disk_bps)
        computed = seconds - begun[: j + 1]
        begins = float((earliest[: j + 1] + np.maximum(copied, computed)).max())
        seconds += visit.seconds
        earliest[j + 1] = begins + visit.seconds
    return float(earliest[n])


# ---- rings of slots, with or without residents ----


def _ring(
    items: Sequence[tuple[int, float]],
    nbytes: Sequence[float],
    residents: set[int],
    slots: int,
    link_bps: float,
    *,
    reuse: bool = True,
) -> Outcome:
    """Stream what is not resident through `slots` slots, in order of use.

    `items` are stays: (item, seconds), one after the other. A slot is filled again once the stay
    that used it last has ended; what is still in a slot needs no copy, with `reuse`.
    """
    streamed = [item for item, _ in items if item not in residents]
    ends: deque[float] = deque()  # of the stays that hold slots, oldest first
    held: deque[int] = deque()
    gpu = link = begin = moved = 0.0
    arrivals: dict[int, float] = {}
    following = 0  # stay of a streamed item that is fetched next

    def fetch(number: int) -> float:
        nonlocal link, moved
        item = streamed[number % len(streamed)]
        if reuse and item in held:
            held.remove(item)
            held.append(item)
            return link
        free = 0.0
        if len(held) == slots:
            held.popleft()
            free = ends.popleft() if ends else 0.0
        held.append(item)
        link = max(link, free) + nbytes[item] / link_bps + COPY_LATENCY_S
        moved += nbytes[item]
        return link

    done = 0  # stays of streamed items that have ended
    for _ in range(ROUNDS):
        begin, moved = gpu, 0.0
        for item, seconds in items:
            if item in residents:
                gpu += seconds
                continue
            while following <= done or following - done < slots:
                arrivals[following] = fetch(following)
                following += 1
            gpu = max(gpu, arrivals.pop(done)) + seconds
            ends.append(gpu)
            done += 1
            if len(ends) > slots:
                ends.popleft()
    return Outcome(gpu - begin, moved)


def _stays(visits: Iterable[Visit], item_of: Callable[[int], int]) -> list[tuple[int, float]]:
    """Return visits as stays; those of one item that follow each other share one."""
    stays: list[tuple[int, float]] = []
    for visit in visits:
        item = item_of(visit.unit)
        if stays and stays[-1][0] == item:
            stays[-1] = item, stays[-1][1] + visit.seconds
        else:
            stays.append((item, visit.seconds))
    return stays


def _spread(nbytes: Sequence[float], room: float) -> set[int]:
    """Return items that fit into `room`, spread evenly over the order."""
    share = min(1.0, max(0.0, room) / sum(nbytes))
    chosen, owed, held = set(), 0.0, 0.0
    for item, size in enumerate(nbytes):
        owed += size * share
        if owed >= size / 2 and held + size <= room:
            chosen.add(item)
            owed -= size
            held += size
    return chosen


def _first(nbytes: Sequence[float], room: float) -> set[int]:
    ends = itertools.accumulate(nbytes)
    return {item for item, end in enumerate(ends) if end <= room}


RIVALS = (
    "2-slot ring",
    "4-slot ring, three fetches",
    "spread residents + ring",
    "first N + ring",
    "h2d-only swap",
)


def rivals(
    trace: Trace, visits: Sequence[Visit], capacity: float, link_bps: float
) -> dict[str, Outcome]:
    """Return what the policies of other programs take, those whose slots the arena holds."""
    blocks = [float(sum(trace.unit_bytes[unit] for unit in block)) for block in trace.blocks]
    block_of = {unit: number for number, block in enumerate(trace.blocks) for unit in block}
    leaves = [float(size) for size in trace.unit_bytes]
    by_block = _stays(visits, block_of.__getitem__)
    by_leaf = [(visit.unit, visit.seconds) for visit in visits]
    slot, leaf_slot = max(blocks), max(leaves)

    outcomes: dict[str, Outcome] = {}
    if 2 * slot <= capacity:
        for name, residents in (
            ("2-slot ring", set()),
            ("first N + ring", _first(blocks, capacity - 2 * slot)),
            ("h2d-only swap", _spread(blocks, capacity - 2 * slot)),
        ):
            outcomes[name] = _ring(by_block, blocks, residents, 2, link_bps)
    if 4 * leaf_slot <= capacity:
        residents = _spread(leaves, capacity - 4 * leaf_slot)
        outcomes["4-slot ring, three fetches"] = _ring(
            by_leaf, leaves, residents, 4, link_bps, reuse=False
        )
        outcomes["spread residents + ring"] = _ring(by_leaf, leaves, residents, 4, link_bps)
    return outcomes


# ---- the best plan known ----


def _next_uses(units: Sequence[int]) -> list[int]:
    following, latest = [NEVER] * len(units), dict[int, int]()
    for number in range(len(units) - 1, -1, -1):
        following[number] = latest.get(units[number], NEVER)
        latest[units[number]] = number
    return following


def belady(
    unit_bytes: Sequence[int],
    visits: Sequence[Visit],
    capacity: float,
    link_bps: float,
    lead_bytes: float,
    rounds: int = ROUNDS,
) -> Outcome:
    """Fetch in order of use, evict what is needed last, knowing all that comes.

    Further ahead than `lead_bytes` only what is needed later than all that is used until then is
    evicted, which no fetch has to bring back.
    """
    n = len(visits)
    units = [visit.unit for visit in visits] * (rounds + 2)
    following = _next_uses(units)
    arrival: dict[int, float] = {}
    used = dict.fromkeys(range(len(unit_bytes)), 0.0)
    furthest: list[tuple[int, int]] = []  # (minus the next use, unit)
    next_use: dict[int, int] = {}
    free = capacity
    gpu = link = begin = moved = before = 0.0
    ahead: deque[tuple[int, int]] = deque()  # visits that need no fetch: falling maxima
    ahead_bytes, end = 0.0, 0

    def place(unit: int, later_than: int) -> float | None:
        """Make room by what is needed later; return when it is free."""
        nonlocal free
        victims: list[tuple[int, int]] = []
        needed, found = unit_bytes[unit], free
        while found < needed:
            while furthest and next_use.get(furthest[0][1]) != -furthest[0][0]:
                heapq.heappop(furthest)  # an entry of an earlier use
            if not furthest or -furthest[0][0] <= later_than:
                for entry in victims:
                    heapq.heappush(furthest, entry)
                return None
            victims.append(heapq.heappop(furthest))
            found += unit_bytes[victims[-1][1]]
        for _, victim in victims:
            del next_use[victim]
        free = found - needed
        return max((used[victim] for _, victim in victims), default=0.0)

    def copy(unit: int, begins: float, use: int) -> None:
        nonlocal link, moved
        link = begins + unit_bytes[unit] / link_bps + COPY_LATENCY_S
        arrival[unit] = link
        moved += unit_bytes[unit]
        next_use[unit] = use
        heapq.heappush(furthest, (-use, unit))

    for i in range(rounds * n):
        if i == SETTLED * n:
            begin, before = gpu, moved
        unit = units[i]
        if unit not in next_use:
            freed = place(unit, i)
            if freed is None:
                raise ValueError(f"the arena of {capacity:.0f} bytes holds too few units")
            copy(unit, max(link, freed), i)
            end, ahead_bytes = i, 0.0
            ahead.clear()
        gpu = max(gpu, arrival[unit]) + visits[i % n].seconds
        used[unit] = gpu
        next_use[unit] = following[i]
        heapq.heappush(furthest, (-following[i], unit))
        if end <= i:
            end, ahead_bytes = i + 1, 0.0
            ahead.clear()
        else:
            ahead_bytes -= unit_bytes[unit]
            if ahead and ahead[0][0] == i:
                ahead.popleft()
        while True:
            while end < i + n and units[end] in next_use:
                while ahead and ahead[-1][1] <= following[end]:
                    ahead.pop()
                ahead.append((end, following[end]))
                ahead_bytes += unit_bytes[units[end]]
                end += 1
            if end >= i + n:
                break
            later_than = end
            if ahead_bytes > lead_bytes and ahead:
                later_than = max(end, ahead[0][1] - 1)
            freed = place(units[end], later_than)
            if freed is None:
                break
            copy(units[end], max(link, freed), end)
    counted = rounds - SETTLED
    return Outcome((gpu - begin) / counted, (moved - before) / counted)


def best_known(
    trace: Trace, visits: Sequence[Visit], capacity: float, link_bps: float
) -> list[Outcome]:
    """Return what plans with full knowledge take: Belady with leads, residents with rings."""
    leaves = [float(size) for size in trace.unit_bytes]
    largest = max(leaves)
    sampling = all(visit.kind not in (RECOMPUTE, BACKWARD) for visit in visits)
    rounds = SWEEPS if sampling else ROUNDS
    plans = [
        belady(trace.unit_bytes, visits, capacity, link_bps, lead, rounds)
        for lead in (0.0, largest, 2 * largest, 4 * largest, capacity / 16, capacity / 4, NEVER)
    ]
    if sampling:
        stays = [(visit.unit, visit.seconds) for visit in visits]
        for slots in range(1, 13):
            room = capacity - slots * largest
            if room > 0:
                plans.append(_ring(stays, leaves, _spread(leaves, room), slots, link_bps))
    return plans


# ---- small cases: all plans there are ----


def search(
    unit_bytes: Sequence[int],
    visits: Sequence[Visit],
    capacity: int,
    link_bps: float,
    latency_s: float = 0.0,
    *,
    every_choice: bool = False,
    held: Iterable[int] = (),
) -> float:
    """Return the fewest seconds in which any plan makes these visits once, when `held` are there.

    Before each visit any number of units may be fetched. The planner's choice is only when: what
    is absent and used next comes in, for what is used last. With `every_choice` it is also which
    comes in and which go, in all ways: much more work.
    """
    units = [visit.unit for visit in visits]
    n = len(units)
    uses = [[i for i in range(n) if units[i] == unit] for unit in range(len(unit_bytes))]

    def next_use(unit: int, now: int) -> int:
        return next((use for use in uses[unit] if use >= now), NEVER)

    best = NEVER * 1.0
    seen: dict[tuple[int, frozenset[int]], list[tuple[float, ...]]] = {}

    def choices(now: int, cached: frozenset[int]) -> Iterable[tuple[int, tuple[int, ...]]]:
        absent = [u for u in range(len(unit_bytes)) if u not in cached]
        absent = sorted(
            (u for u in absent if next_use(u, now) < NEVER), key=lambda u: next_use(u, now)
        )
        room = capacity - sum(unit_bytes[u] for u in cached)
        far = sorted(cached, key=lambda u: -next_use(u, now))
        for unit in absent if every_choice else absent[:1]:
            needed = unit_bytes[unit] - room
            for count in range(len(far) + 1):
                ways = itertools.combinations(far, count) if every_choice else [tuple(far[:count])]
                for gone in ways:
                    if sum(unit_bytes[u] for u in gone) >= needed:
                        yield unit, gone
                if not every_choice and sum(unit_bytes[u] for u in far[:count]) >= needed:
                    break

    def go(
        now: int, cached: frozenset[int], arrival: dict[int, float], used: dict[int, float],
        gpu: float, link: float,
    ) -> None:  # fmt: skip
        nonlocal best
        if gpu >= best:
            return
        if now == n:
            best = gpu
            return
        state = (gpu, link, *(max(arrival[u], used.get(u, 0.0)) for u in sorted(cached)))
        known = seen.setdefault((now, cached), [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in known):
            return
        known.append(state)
        unit = units[now]
        if unit in cached:
            end = max(gpu, arrival[unit]) + visits[now].seconds
            go(now + 1, cached, arrival, {**used, unit: end}, end, link)
        for fetched, gone in choices(now, cached):
            if any(next_use(victim, now) <= next_use(fetched, now) for victim in gone):
                continue  # it would have to come back first
            begins = max([link, *(max(used.get(u, 0.0), arrival[u]) for u in gone)])
            arrives = begins + unit_bytes[fetched] / link_bps + latency_s
            go(
                now,
                (cached - set(gone)) | {fetched},
                {**arrival, fetched: arrives},
                used,
                gpu,
                arrives,
            )

    go(0, frozenset(held), dict.fromkeys(held, 0.0), {}, 0.0, 0.0)
    return best


def _fullest(
    unit_bytes: Sequence[int], units: frozenset[int], capacity: int
) -> list[frozenset[int]]:
    """Return the largest sets of these units that fit: no further one does with them."""
    sets: list[frozenset[int]] = []
    for count in range(len(units), -1, -1):
        for chosen in map(frozenset, itertools.combinations(sorted(units), count)):
            fits = sum(unit_bytes[u] for u in chosen) <= capacity
            if fits and not any(chosen < larger for larger in sets):
                sets.append(chosen)
    return sets


def search_repeated(
    unit_bytes: Sequence[int], visits: Sequence[Visit], capacity: int, link_bps: float
) -> tuple[float, int]:
    """Return the seconds and bytes of a round that no plan beats which makes it over and over.

    The fewest seconds of a round that begins with the best arena there can be, and the fewest
    bytes of one that ends with the arena as it began; each over all plans there are.
    """
    starts = _fullest(unit_bytes, frozenset(visit.unit for visit in visits), capacity)
    seconds = min(
        search(unit_bytes, visits, capacity, link_bps, every_choice=True, held=start)
        for start in starts
    )
    fewest = NEVER
    for start in starts:
        states = {start: 0}
        for visit in visits:
            after: dict[frozenset[int], int] = {}
            for state, moved in states.items():
                if visit.unit in state:
                    ways, cost = [state], moved
                else:
                    room = capacity - unit_bytes[visit.unit]
                    ways = [way | {visit.unit} for way in _fullest(unit_bytes, state, room)]
                    cost = moved + unit_bytes[visit.unit]
                for way in ways:
                    after[way] = min(cost, after.get(way, NEVER))
            states = after
        for state, moved in states.items():
            missing = sum(unit_bytes[unit] for unit in start - state)
            fewest = min(fewest, moved + missing)
    return seconds, fewest
