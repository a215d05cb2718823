"""Where the bytes of a training would be, and whether device and host have room for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..engine.geometry import tensor_bytes
from ..errors import OffloadError
from ..host.sizes import parse_size
from ..model.budget import AUTO, OFFLOADED, Budget, Weights, place
from .cards import DISK_GBPS, Interval
from .measure import Step
from .storage import Storage

RESIDENT, STREAMED, NOWHERE = "fits resident", "fits streamed", "does not fit"
_HOST_SHARE = 0.9  # of its memory: the system and the loader need the rest, as ram_budget="auto"


@dataclass(frozen=True)
class Fit:
    """Where the bytes are.

    Attributes
    ----------
    verdict : str
        `RESIDENT`, `STREAMED` or `NOWHERE`.
    storage : Storage
        As it is laid out: what is always on the device is in none of its units.
    device, host : dict of str to int
        Bytes by what they are; what is unknown is missing.
    device_room, host_room : int
        What a training may take.
    arena_bytes : int
        0 where nothing streams.
    ram_budget : int or None
        The argument of `attach` that keeps the host within its room; None where it is not needed.
    missing_device, missing_host : int
        Bytes without which it does not fit.
    disk_bytes : int
        Of weights that stay in their files, because the host has no room for them.
    why : str
        What prevents it; empty where nothing does.
    sweep_bytes : tuple of int
        What travels of the leaves that forward computes with, and of those that backward does; of
        none where the step is unknown.
    """

    verdict: str
    storage: Storage
    device: dict[str, int]
    host: dict[str, int]
    device_room: int
    host_room: int
    arena_bytes: int = 0
    ram_budget: int | None = None
    missing_device: int = 0
    missing_host: int = 0
    why: str = ""
    sweep_bytes: tuple[int, ...] = ()
    disk_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """What is known to be on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """What is on the host, page-locked where it travels."""
        return sum(self.host.values())

    @property
    def least_device_bytes(self) -> int:
        """What has to be on the device: an arena may shrink to its floor."""
        return self.device_bytes - max(0, self.arena_bytes - self.storage.floor_bytes)

    @property
    def x_min_bytes(self) -> int:
        """Least bytes that a step moves to the device: each sweep what the arena cannot hold."""
        if self.verdict != STREAMED:
            return 0
        if not self.sweep_bytes:
            return self.storage.x_min_bytes(self.arena_bytes)
        missing = sum(max(0, used - self.arena_bytes) for used in self.sweep_bytes)
        return int(self.storage.link_share * missing)

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Least bytes that forward and backward read from disk: what arena and host do not hold."""
        if self.verdict != STREAMED or not self.disk_bytes:
            return 0, 0
        every = self.storage.weight_bytes
        forward, backward = self.sweep_bytes or (every, every)

        def read(used: int) -> int:
            held = self.storage.link_share * (every - used + self.arena_bytes)
            return max(0, int(self.disk_bytes - held))

        return read(forward), read(backward)

    @property
    def offload_percent(self) -> float:
        """The share of the weights that has no room on the device, as `attach` takes it."""
        managed = self.storage.travelling_bytes + self.storage.kept_bytes
        if self.verdict == RESIDENT or not managed:
            return 0.0
        cached = self.arena_bytes - self.storage.floor_bytes + self.storage.kept_bytes
        return min(1.0, max(0.0, 1.0 - cached / managed))


@dataclass(frozen=True)
class Room:
    """What there is.

    Attributes
    ----------
    device_bytes, host_bytes : int
        Memory of the card, and of the machine.
    margin : float
        Share of the card that is left to CUDA, to rounding and to what is not foreseen.
    budget : Budget
        The arguments for `attach`. Without `offload_percent` and `vram_budget`, or with ``"auto"``,
        the arena takes what activations leave free.
    disk_gbps : tuple of float
        1e9 bytes/s of cold reads: the slowest and the fastest that is likely.
    """

    device_bytes: int
    host_bytes: int
    margin: float
    budget: Budget = field(default_factory=Budget)
    disk_gbps: Interval = DISK_GBPS

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin!r} is outside [0, 1)")

    @property
    def is_free(self) -> bool:
        """Whether the arena takes what activations leave."""
        budget = self.budget
        return budget.vram_budget == AUTO or (
            budget.vram_budget is None and budget.offload_percent is None
        )

    def arena(self, weights: Weights, left: int) -> int:
        """Return the bytes of an arena, of which `left` are free; see `place`."""
        budget = replace(self.budget, vram_budget=AUTO) if self.is_free else self.budget
        return place(budget, weights, self.device_bytes, left)

    def masters(self, others: int) -> int:
        """Return the most bytes of weights on the host, `others` of which is taken."""
        most, asked = self.host - others, self.budget.ram_budget
        if asked in (None, AUTO, OFFLOADED):
            return most
        return min(most, parse_size(asked, total=self.host_bytes, name="ram_budget"))

    @property
    def device(self) -> int:
        """Bytes of the card that a training may take."""
        return int(self.device_bytes * (1 - self.margin))

    @property
    def host(self) -> int:
        """Bytes of the host that a training may take."""
        return int(self.host_bytes * _HOST_SHARE)


def fit_step(storage: Storage, step: Step, micro_batches: int, room: Room) -> tuple[Step, Fit]:
    """Return where the bytes would be in a step of several micro-batches, and that step.

    `oracle_offload.accumulate` keeps the activations of all of them; where all weights have room on
    the device it is a loop, and keeps those of one.

    Parameters
    ----------
    storage : Storage
    step : Step
        As it was measured.
    micro_batches : int
    room : Room
    """
    step = replace(step, micro_batches=micro_batches, together=False)
    found = fit(storage, step.activations, room)
    holds_all = found.verdict == RESIDENT or found.arena_bytes >= found.storage.managed_bytes
    if micro_batches > 1 and not holds_all:
        step = replace(step, together=True)
        found = fit(storage, step.activations, room)
    if step.why:
        return step, found
    sweeps = tuple(_bytes_of(leaves, step, found) for leaves in step.used())
    return step, replace(found, sweep_bytes=sweeps)


def _bytes_of(leaves: set[int], step: Step, found: Fit) -> int:
    """Return what of these leaves travels."""
    return sum(
        tensor_bytes(tensor)
        for unit in found.storage.units
        for leaf in unit
        if leaf.kind.needs_place and step.numbers[leaf.name] in leaves
        for tensor in leaf.tensors()
    )


def fit(storage: Storage, activations: int | None, room: Room) -> Fit:
    """Return where the bytes would be: on the device if they fit, else streamed if that fits.

    Parameters
    ----------
    storage : Storage
    activations : int or None
        Most bytes of what forward leaves for backward, with all that is temporary; None unknown.
    room : Room
    """
    more = {} if activations is None else {"activations": activations}
    device = {row.name: row.bytes for row in storage.rows} | more
    resident = sum(device.values()) <= room.device
    if resident and room.is_free:
        return Fit(RESIDENT, storage, device, {}, room.device, room.host)
    if not storage.units:
        return _counted(storage, device, room)
    return _streamed(storage, more, room)


def _counted(storage: Storage, device: dict[str, int], room: Room) -> Fit:
    """Return the fit of totals: where there are no units, nothing is known of an arena's floor."""
    host, weights = storage.on_host(), storage.host_rows.get("weights", 0)
    there = storage.host_rows.items()
    device = {name: size for name, size in device.items() if (name, size) not in there}
    left = room.device - sum(device.values())
    arena = room.arena(Weights(weights, 0), left)
    missing = max(0, arena - left)
    most = room.masters(sum(host.values()) - weights)
    short, budget, on_disk = max(0, weights - most), None, 0
    if short and room.budget.disk and most > 0:
        host = host | {"weights": most}
        on_disk, short, budget = short, 0, most
    elif 0 < short <= min(arena, weights):  # weights that stay on the device need no master
        host = host | {"weights": weights - short}
        device, arena, budget = device | {"weights": short}, arena - short, weights - short
        storage = replace(
            storage, weight_bytes=budget, sizes=[budget], host_rows=host, kept_bytes=short
        )
        short = 0
    return Fit(
        NOWHERE if missing or short or not host else STREAMED,
        storage,
        device | {"arena": arena},
        host,
        room.device,
        room.host,
        arena,
        budget,
        missing,
        short,
        storage.why_not,
        disk_bytes=on_disk,
    )


def _streamed(storage: Storage, more: dict[str, int], room: Room) -> Fit:
    budget, short, on_disk, why = None, 0, 0, ""
    if room.budget.ram_budget == OFFLOADED:
        storage = storage.keeping(room.budget)
    host = storage.on_host()
    weights = host["weights"] + host["padding"]
    most = room.masters(sum(host.values()) - weights)
    if weights > most and room.budget.disk:
        on_disk = min(weights - most, storage.file_bytes)
        short, budget = weights - most - on_disk, most
        if short:
            why = "the host: it has no room for what is not read from files"
    elif weights > most:
        try:
            if most <= 0:
                raise OffloadError("gradients and optimizer state alone fill the host")
            storage, budget = storage.keeping(replace(room.budget, ram_budget=most)), most
        except OffloadError as error:
            short, why = weights - most, f"the host: {error}"
    host = storage.on_host()
    host["weights"] -= on_disk
    device = {row.name: row.bytes - storage.host_rows.get(row.name, 0) for row in storage.rows} | {
        "staging": storage.staging_bytes,
        **more,
    }
    fixed, floor = sum(device.values()), storage.floor_bytes
    there = Weights(storage.travelling_bytes, floor, storage.kept_bytes, storage.staging_bytes)
    if room.is_free and not more:
        asked = floor  # the rest is left to activations, which are unknown
    else:
        asked = room.arena(there, room.device - fixed)
    arena = max(asked, floor)
    missing = max(0, fixed + arena - room.device)
    if asked < floor and not room.is_free:
        missing = max(missing, floor - asked)
        why = why or f"vram_budget={room.budget.vram_budget!r} is too small for the arena"
    if missing and not why:
        why = f"the device: {'what is not streamed' if fixed > room.device else 'the arena'}"
    return Fit(
        NOWHERE if missing or short else STREAMED,
        storage,
        {name: size for name, size in (device | {"arena": arena}).items() if size},
        {name: size for name, size in host.items() if size},
        room.device,
        room.host,
        arena,
        budget,
        missing,
        short,
        why,
        disk_bytes=on_disk,
    )
