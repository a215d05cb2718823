"""Cards, links and hosts that `plan` knows by name: what makers state, or what was measured.

docs/plan.md cites where each figure is from, docs/measured.md what cards have measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..host.sizes import GIB, parse_size

Interval = tuple[float, float]  # the slowest and the fastest that is likely

# Page-locked copies to the device, GB/s, as people report them.
_PCIE4_X8: Interval = (11.0, 13.2)
_PCIE4_X16: Interval = (23.9, 26.4)
_PCIE5_X16: Interval = (50.0, 57.0)
_REACHED: Interval = (0.4, 0.75)  # of a maker's matrix rate, in training: assumed
# Cold reads of an NVMe disk, GB/s, from a small one behind PCIe 3.0 to a large one behind 4.0:
# assumed.
DISK_GBPS: Interval = (2.0, 7.0)
_LAUNCH_S: Interval = (3e-6, 8e-6)  # of one kernel: assumed
# How far a rate that was measured is off the mean of a training: assumed.
_MEASURED = 0.05


RATES = ("link_gbps", "memory_gbps", "tflops", "launch_s")


@dataclass(frozen=True)
class Card:
    """A card and its link; each rate as an interval.

    Attributes
    ----------
    name : str
    memory_bytes : int
    link_gbps, memory_gbps, tflops : tuple of float
        1e9 bytes/s to the device and within it, 1e12 floating-point operations a second in bf16.
    launch_s : tuple of float
        What a kernel takes in addition, the slowest first.
    measured : frozenset of str
        Rates that were given or measured, and are not from a maker.
    upstream : int
        How many cards share one link upstream, of which `link_gbps` is a share.
    """

    name: str
    memory_bytes: int
    link_gbps: Interval
    memory_gbps: Interval
    tflops: Interval
    launch_s: Interval = (_LAUNCH_S[1], _LAUNCH_S[0])
    measured: frozenset[str] = frozenset()
    upstream: int = 1

    def behind(self, upstream: int) -> Card:
        """Return it where `upstream` cards share the link that theirs go through."""
        if upstream == 1:
            return self
        slow, fast = self.link_gbps
        return replace(self, link_gbps=(slow / upstream, fast / upstream), upstream=upstream)

    def rates(self, share: float) -> dict[str, float]:
        """Return each rate at `share` of its interval: 0 is the slowest, 1 the fastest."""
        return {
            name: ends[0] + share * (ends[1] - ends[0])
            for name, ends in (
                ("link_gbps", self.link_gbps),
                ("memory_gbps", self.memory_gbps),
                ("tflops", self.tflops),
                ("launch_s", self.launch_s),
            )
        }


def _card(name: str, gib: int, link: Interval, memory_gbps: float, tflops: float) -> Card:
    low, high = _REACHED
    return Card(
        name,
        gib * GIB,
        link,
        (0.75 * memory_gbps, 0.95 * memory_gbps),
        (low * tflops, high * tflops),
    )


def _within(value: float) -> Interval:
    return value * (1 - _MEASURED), value * (1 + _MEASURED)


# benchmarks/results/nvidia-h200: its matrix rate from what a training step reached, attention and
# small kernels included, to what products of matrices reach alone.
_H200 = Card(
    "H200",
    150_109_880_320,
    link_gbps=(55.1, 55.5),  # of copies within a step, and of copies alone
    memory_gbps=_within(4367.0),
    tflops=(503.0, 779.0),
    launch_s=(1.8e-6 * (1 + _MEASURED), 1.8e-6 * (1 - _MEASURED)),
    measured=frozenset({"link_gbps", "memory_gbps", "tflops", "launch_s"}),
)
# The smallest common card of each size, and those that were measured.
CARDS = {
    card.name: card
    for card in (
        _card("RTX 4060", 8, _PCIE4_X8, 272, 30.2),
        _card("RTX 3060", 12, _PCIE4_X16, 360, 25.5),
        _card("RTX 4060 Ti", 16, _PCIE4_X8, 288, 44.1),
        _card("RTX 3090", 24, _PCIE4_X16, 936, 71.0),
        _card("RTX 4090", 24, _PCIE4_X16, 1008, 165.2),
        _card("RTX 5090", 32, _PCIE5_X16, 1792, 209.5),
        _card("A40", 48, _PCIE4_X16, 696, 149.7),
        _card("A100 80GB", 80, _PCIE4_X16, 2039, 312.0),
        _H200,
    )
}
BY_SIZE = {
    8: "RTX 4060",
    12: "RTX 3060",
    16: "RTX 4060 Ti",
    24: "RTX 4090",
    32: "RTX 5090",
    48: "A40",
    80: "A100 80GB",
}
HOSTS_GB = (32, 64, 128)  # sold as such, and GiB, as cards are


def card_of(
    card: str | int | None = None,
    *,
    vram: int | float | str | None = None,
    **measured: float | None,
) -> Card:
    """Return the card that a plan is for.

    Parameters
    ----------
    card : str or int, optional
        A name of `CARDS`, or a size of `BY_SIZE` in GB; 24 by default.
    vram : int, float or str, optional
        Its memory, where that is another.
    **measured : float or None
        Rates that are known: ``link_gbps``, ``memory_gbps``, ``tflops``, ``launch_s``.

    Raises
    ------
    TypeError
        A rate of another name.
    ValueError
        No such card; a rate that is not above zero.
    """
    for name in measured:
        if name not in RATES:
            raise TypeError(f"{name!r} is no argument, and none of the rates {', '.join(RATES)}")
    found = _named(24 if card is None else card)
    if vram is not None:
        nbytes = parse_size(vram, total=found.memory_bytes, name="vram")
        found = replace(found, memory_bytes=nbytes)
    for name, value in measured.items():
        if value is None:
            continue
        slower, faster = _measured(name, value)
        ends = (faster, slower) if name == "launch_s" else (slower, faster)
        changed: dict[str, Any] = {name: ends, "measured": found.measured | {name}}
        found = replace(found, **changed)
    return found


def disk_of(disk_gbps: float | None) -> Interval:
    """Return the rates of the disk that a plan is for: as given, or those of an NVMe disk.

    Raises
    ------
    ValueError
        The rate is not above zero.
    """
    return DISK_GBPS if disk_gbps is None else _measured("disk_gbps", disk_gbps)


def _measured(name: str, value: float) -> Interval:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"{name}={value!r}: a rate is a number above zero")
    return _within(value)


def card_named(name: str) -> Card | None:
    """Return the card that a driver calls so (``"NVIDIA GeForce RTX 4090"``); None for others."""
    found = [card for card in CARDS.values() if _squeezed(name).endswith(_squeezed(card.name))]
    return max(found, key=lambda card: len(card.name), default=None)


def _squeezed(name: str) -> str:
    """Return a card's name without what its users leave out: ``"4090"``."""
    shorter = name.lower().replace(" ", "").removesuffix("gb")
    for word in ("nvidia", "geforce", "rtx"):
        shorter = shorter.removeprefix(word)
    return shorter


def _named(card: str | int) -> Card:
    said = _squeezed(str(card))
    if said.isdigit() and int(said) in BY_SIZE:
        return CARDS[BY_SIZE[int(said)]]
    for name, found in CARDS.items():
        if said == _squeezed(name):
            return found
    raise ValueError(
        f"card={card!r} is not known; there are {', '.join(CARDS)}, and the sizes "
        f"{', '.join(f'{size}GB' for size in BY_SIZE)}; for another give vram= and its rates"
    )
