"""Checks of the card: driver, link, clocks, and what else uses it."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ...host.files import parse_count
from ...host.gpus import CLOCK_REASONS, Gpu
from ...host.sizes import GIB
from .finding import Finding, size, worst
from .system import System

# Page-locked host-to-device rate in GB/s that 16 lanes are reported to reach (PCIe 3.0: 11-12,
# RTX 4090: 23.9-26.4, RTX 5090 and H100: 55-57).
_X16_GBPS = {3: 11.5, 4: 25.0, 5: 56.0}
_GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
# From P5 on a card rests and lowers its link.
_RESTING_STATE = 5
_HARDWARE_SLOWDOWN = 0x008 | 0x040 | 0x080
_THERMAL_SLOWDOWN = 0x020
_IDLE = 0x001


def check_driver(system: System) -> Finding:
    """The NVIDIA driver and the newest CUDA it supports."""
    view = system.gpus
    version = driver_version(system)
    facts = {
        "driver_version": version,
        "cuda_version": list(view.cuda_version) if view.cuda_version else None,
        "gpus": [gpu.name for gpu in view.gpus],
    }
    if version is not None:
        text = version
        if view.cuda_version:
            text += f", CUDA {view.cuda_version[0]}.{view.cuda_version[1]}"
        if view.gpus:
            text += ", " + ", ".join(gpu.name for gpu in view.gpus)
            return Finding("driver", "ok", text, facts=facts)
        return Finding("driver", "ok", text, f"cards not listed: {view.why}", facts=facts)
    if cards := _pci_cards(system):
        loaded = "nouveau" if system.exists("/sys/module/nouveau") else None
        why = f"the card at {cards[0]} is driven by nouveau" if loaded else view.why
        fix = "install the NVIDIA driver"
        if system.container:
            fix = "give the container the card: docker run --gpus all"
        return Finding("driver", "bad", "none, but a card is installed", why, fix, facts)
    if system.names("/sys/bus/pci/devices") and not system.wsl:
        fix = "a machine with a card of NVIDIA; the demo and the tests run on the simulated device"
        why = "no card of NVIDIA is on this machine's bus"
        return Finding("driver", "bad", "no GPU: training cannot run here", why, fix, facts)
    return Finding("driver", "unknown", "no NVIDIA driver visible", view.why, facts=facts)


def driver_version(system: System) -> str | None:
    """Return the driver's version from NVML or, without it, from the kernel module."""
    if system.gpus.driver_version:
        return system.gpus.driver_version
    text = system.read("/proc/driver/nvidia/version").text or ""
    if match := re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE):
        return match[1]
    module = (system.read("/sys/module/nvidia/version").text or "").strip()
    return module or None


def _pci_cards(system: System) -> list[str]:
    """Return the PCI addresses of NVIDIA display and compute devices."""
    return [
        name
        for name in system.names("/sys/bus/pci/devices")
        if (system.read(f"/sys/bus/pci/devices/{name}/vendor").text or "").strip() == "0x10de"
        # 0x0300 VGA, 0x0302 3D; 0x0403 is the audio function of the same board.
        and (system.read(f"/sys/bus/pci/devices/{name}/class").text or "").startswith("0x03")
    ]


def cards_installed(system: System) -> bool:
    """Whether any NVIDIA card is visible, with or without a driver."""
    return bool(system.gpus.gpus or _pci_cards(system))


def check_link(system: System) -> Finding:
    """The PCI Express link, on which streaming speed depends."""
    cards = list(system.gpus.gpus)
    if not any(card.link_width for card in cards):
        cards = [
            _card_from_sysfs(system, address, index)
            for index, address in enumerate(_pci_cards(system))
        ]
    known = [
        (card, _link_of(card, card.link_generation, card.link_width))
        for card in cards
        if card.link_generation and card.link_width
    ]
    if not known:
        why = "; ".join(card.missing["link"] for card in cards if "link" in card.missing)
        return Finding("link", "unknown", "not visible", why or _no_card(system))
    return _with_shared(_per_card("link", known), system, [card for card, _ in known])


_BRIDGE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _with_shared(finding: Finding, system: System, cards: list[Gpu]) -> Finding:
    """Say which cards share a link upstream: sysfs has each below the bridges before it."""
    chains = {card.index: _bridges(system, card) for card in cards}
    behind: dict[str, list[int]] = {}  # by the bridge nearest to them that another card is behind
    for index, chain in chains.items():
        for bridge in reversed(chain):
            if any(bridge in other for number, other in chains.items() if number != index):
                behind.setdefault(bridge, []).append(index)
                break
    if not behind:
        return finding
    shared = []
    text, why = finding.value, finding.why
    for bridge, indices in behind.items():
        link = _card_from_sysfs(system, bridge, -1)
        generation, width = link.max_link_generation, link.max_link_width
        rate = _X16_GBPS.get(generation or 0)
        gbps = rate * width / 16 if rate and width else None
        named = " and ".join(f"GPU {index}" for index in indices)
        text += f"; {named} share one link upstream"
        if gbps:
            text += f", about {gbps:.3g} GB/s together"
        why = why or f"cards that stream at once divide it: plan --upstream {len(indices)}"
        shared.append({"upstream": bridge, "gpus": indices, "expected_gbps": gbps})
    return replace(finding, value=text, why=why, facts={**finding.facts, "shared": shared})


def _bridges(system: System, card: Gpu) -> list[str]:
    """Return the bridges between the processor and a card, the nearest to the card last."""
    domain, _, rest = (card.bus_id or "").lower().partition(":")
    place = system.resolved(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}")
    return [part for part in place.split("/") if _BRIDGE.fullmatch(part)][:-1]


def _card_from_sysfs(system: System, address: str, index: int) -> Gpu:
    def number(name: str) -> int | None:
        text = system.read(f"/sys/bus/pci/devices/{address}/{name}").text or ""
        word = text.split()[0] if text.split() else ""
        return _GENERATION.get(word) if name.endswith("speed") else _positive(word)

    return Gpu(
        index,
        bus_id=address,
        link_generation=number("current_link_speed"),
        link_width=number("current_link_width"),
        max_link_generation=number("max_link_speed"),
        max_link_width=number("max_link_width"),
    )


def _positive(word: str) -> int | None:
    # The kernel prints 255 lanes where it does not know.
    number = parse_count(word)
    return number if number is not None and 0 < number < 64 else None


def _link_of(card: Gpu, now: int, width: int) -> tuple[str, str, str, str, dict[str, object]]:
    """Return what is said of a link that runs at generation `now` on `width` lanes."""
    best, lanes = card.max_link_generation, card.max_link_width
    text = f"PCIe {now}.0 x{width}"
    if best and lanes and (best, lanes) != (now, width):
        text += f" of {best}.0 x{lanes}"
    rate = _X16_GBPS.get(best or now)
    gbps = rate * width / 16 if rate else None
    if gbps:
        text += f", about {gbps:.3g} GB/s"
    verdict, why, fix = "ok", "", ""
    if lanes and width < lanes:
        verdict = "bad" if width * 4 <= lanes else "warn"
        why = f"{width} of {lanes} lanes: weights arrive at {width / lanes:.0%} of the speed"
        fix = "use the slot next to the processor, and check riser and BIOS lane settings"
    elif best and card.card_link_generation and best < card.card_link_generation:
        verdict = "warn"
        why = f"the slot stops at PCIe {best}.0, the card could do {card.card_link_generation}.0"
        fix = "use the slot next to the processor, and check the link speed in the BIOS"
    if best and now < best:
        state, reasons = card.performance_state, card.clock_reasons
        if state is None and reasons is None:
            verdict = "unknown" if verdict == "ok" else verdict
            why = why or "a resting card lowers its link; whether this one rests is not visible"
        elif (state or 0) >= _RESTING_STATE or (reasons or 0) & _IDLE:
            why = why or f"resting; it rises to PCIe {best}.0 under load"
        else:
            verdict = worst(verdict, "warn")
            why = why or f"the card works, yet its link runs at PCIe {now}.0 and not {best}.0"
            fix = fix or "check the link speed in the BIOS and PCIe power saving (ASPM)"
    facts: dict[str, object] = {
        "generation": now,
        "max_generation": best,
        "width": width,
        "max_width": lanes,
        "expected_gbps": gbps,
    }
    return verdict, text, why, fix, facts


def check_clocks(system: System) -> Finding:
    """Performance state, and why the clocks are not higher."""
    known = [
        card
        for card in system.gpus.gpus
        if card.performance_state is not None or card.clock_reasons is not None
    ]
    if not known:
        return Finding("clocks", "unknown", "not visible", _no_card(system, "clock reasons"))
    return _per_card("clocks", [(card, _clocks_of(card)) for card in known])


def _clocks_of(card: Gpu) -> tuple[str, str, str, str, dict[str, object]]:
    bits = card.clock_reasons
    words = [text for bit, text in CLOCK_REASONS.items() if (bits or 0) & bit]
    text = f"P{card.performance_state}" if card.performance_state is not None else "state unknown"
    if words:
        text += f" ({', '.join(words)})"
    verdict, why, fix = "ok", "", ""
    if bits is None:
        why = f"clock reasons: {card.missing.get('clock reasons', 'not visible')}"
    elif bits & _HARDWARE_SLOWDOWN:
        verdict = "bad"
        why = "the board itself slows the card down: too hot, or too little power"
        fix = "check cooling and the power cables; nvidia-smi -q -d PERFORMANCE"
    elif bits & _THERMAL_SLOWDOWN:
        verdict, why = "warn", "the driver slows the card down because it is hot"
        fix = "improve the air flow, or lower the power limit"
    facts: dict[str, object] = {"performance_state": card.performance_state, "reasons": words}
    return verdict, text, why, fix, facts


def check_other_processes(system: System) -> Finding:
    """Device memory that other processes hold."""
    known = [
        (card, _others_of(system, card, card.used_bytes, card.total_bytes))
        for card in system.gpus.gpus
        if card.used_bytes is not None and card.total_bytes
    ]
    if not known:
        return Finding("other processes", "unknown", "not visible", _no_card(system, "memory"))
    return _per_card("other processes", known)


def _others_of(
    system: System, card: Gpu, used: int, total: int
) -> tuple[str, str, str, str, dict[str, object]]:
    """Return what is said of the `used` bytes of a card with `total`."""
    own = os.getpid() if system.live else None
    others = [process for process in card.processes or () if process.pid != own]
    mine = sum(p.used_bytes or 0 for p in card.processes or () if p.pid == own)
    held = max(0, used - mine)
    text = f"{size(held)} of {size(total)} in use"
    if others:
        named = sorted(others, key=lambda process: -(process.used_bytes or 0))[:3]
        text += " by " + ", ".join(
            f"process {process.pid}"
            + (f" ({size(process.used_bytes)})" if process.used_bytes is not None else "")
            for process in named
        )
        text += f" and {len(others) - 3} more" if len(others) > 3 else ""
    # A desktop holds about 1 GiB; more than this is a program's work.
    verdict = "ok"
    if held >= total // 2:
        verdict = "bad"
    elif held >= max(2 * GIB, total // 10):
        verdict = "warn"
    why, fix = "", ""
    if verdict != "ok":
        why = "this much is missing for training"
        fix = "end those processes, or choose another card with CUDA_VISIBLE_DEVICES"
        if not others:
            why += "; the driver does not name who holds it"
            fix = "look with nvidia-smi outside of the container, or in Windows' Task Manager"
        elif system.container:
            why += "; in a container the process numbers are those of the host"
    if card.processes is None:
        why = why or f"processes are not listed: {card.missing.get('processes', 'not visible')}"
    facts: dict[str, object] = {
        "total_bytes": total,
        "used_bytes": used,
        "processes": [{"pid": p.pid, "used_bytes": p.used_bytes} for p in others],
    }
    return verdict, text, why, fix, facts


def _per_card(
    name: str, answers: list[tuple[Gpu, tuple[str, str, str, str, dict[str, object]]]]
) -> Finding:
    """Join the answers of several cards: all values, the words of the worst."""
    verdict = worst(*(answer[0] for _, answer in answers))
    several = len(answers) > 1
    text = "; ".join(
        (f"GPU {card.index}: " if several else "") + answer[1] for card, answer in answers
    )
    _, _, why, fix, _ = next(answer for _, answer in answers if answer[0] == verdict)
    facts = {"gpus": [{"index": card.index, **answer[4]} for card, answer in answers]}
    return Finding(name, verdict, text, why, fix, facts)


def _no_card(system: System, what: str = "") -> str:
    for card in system.gpus.gpus:
        if what in card.missing:
            return card.missing[what]
    return system.gpus.why or "no NVIDIA card answers"
