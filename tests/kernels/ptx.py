"""Run a kernel's PTX without a GPU: integers, warps in step, every access to memory checked.

All warps of a launch run side by side, lane by lane of NumPy arrays: they share nothing but memory
that they do not write twice. Of the lanes that are alive those at the earliest instruction run
next, as if they had diverged. Stops at what a GPU would not forgive or would not tell: an access
outside or off its alignment, a store to what is read only, a register that was never written, a
shuffle that not all named lanes reach. An instruction that is not known here is an error.

Semantics: NVIDIA, Parallel Thread Execution ISA, version 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.uint64]
LANES = 32
_ALL = np.uint64(2**64 - 1)


class PtxError(RuntimeError):
    """The kernel does what it must not, or what is not known here."""


# ---- memory ----


@dataclass
class Segment:
    """Bytes at an address: `data` (uint8), and which of them were stored to."""

    address: int
    data: NDArray[np.uint8]
    may_store: bool
    stored: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing was stored yet."""
        self.stored = np.zeros(self.data.size, bool)


class Memory:
    """Segments far from each other: what passes the end of one is in none."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def add(self, data: NDArray[np.uint8], *, may_store: bool) -> int:
        """Return the address, a multiple of 2**28, of a new segment over `data`."""
        address = (len(self.segments) + 1) << 28
        self.segments.append(Segment(address, data, may_store))
        return address

    def place(self, addresses: Lanes, nbytes: int, *, store: bool) -> tuple[Segment, Lanes]:
        """Return the segment that all accesses of one instruction go to, and their places in it."""
        if (addresses % np.uint64(nbytes)).any():
            raise PtxError(f"an access of {nbytes} bytes off its alignment")
        for segment in self.segments:
            places = addresses - np.uint64(segment.address)  # below it: far behind it
            if (places <= np.uint64(max(segment.data.size - nbytes, 0))).all():
                if segment.data.size < nbytes or (store and not segment.may_store):
                    break
                return segment, places
        raise PtxError(f"{'store' if store else 'load'} of {nbytes} bytes at {addresses.min():#x}")


# ---- the program ----


@dataclass(frozen=True)
class Instruction:
    """One line of PTX: a guard ("" or "%p1" or "!%p1"), its name in parts, its operands."""

    guard: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        """Return it as PTX writes it, nearly."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.parts)} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Program:
    """A kernel: names of its parameters, instructions, where labels point."""

    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def _operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def parse(source: str, kernel: str) -> Program:
    """Read one kernel of a PTX file."""
    source = re.sub(r"//[^\n]*", "", source)
    found = re.search(rf"\.entry {kernel}\((.*?)\)\s*\{{(.*?)\n\}}", source, re.DOTALL)
    if found is None:
        raise PtxError(f"no kernel {kernel}")
    parameters = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", found[1].strip())
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.split(r"[;\n]", found[2]):
        text = line.strip().lstrip("{} \t")
        while label := re.match(r"(\$\w+):\s*", text):
            labels[label[1]] = len(instructions)
            text = text[label.end() :]
        if not text or text.startswith("."):
            continue
        match = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([\w.]+)\s*(.*)", text)
        if match is None:
            raise PtxError(f"not an instruction: {text}")
        instructions.append(
            Instruction(match[1] or "", tuple(match[2].split(".")), _operands(match[3]))
        )
    return Program(tuple(parameters), tuple(instructions), labels)


# ---- arithmetic: type suffix -> values ----


def _bits(suffix: str) -> int:
    return 1 if suffix == "pred" else int(suffix[1:])


def _cut(values: Lanes, bits: int) -> Lanes:
    return values if bits == 64 else values & np.uint64((1 << bits) - 1)


def _signed(values: Lanes, bits: int) -> NDArray[np.int64]:
    return (values << np.uint64(64 - bits)).astype(np.int64) >> (64 - bits)


def _shift(left: bool) -> Callable[..., Lanes]:
    def shift(bits: int, a: Lanes, by: Lanes) -> Lanes:
        by = _cut(by, 32)
        kept = np.minimum(by, np.uint64(bits - 1))
        moved = a << kept if left else a >> kept
        return np.where(by >= np.uint64(bits), np.uint64(0), moved)

    return shift


def _permute(_bits: int, a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    both = _cut(b, 32) << np.uint64(32) | _cut(a, 32)
    result = np.zeros_like(both)
    for i in range(4):
        chosen = selector >> np.uint64(4 * i)
        byte = both >> (np.uint64(8) * (chosen & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(chosen & np.uint64(8), sign, byte)
        result |= byte << np.uint64(8 * i)
    return result


def _popcount(_bits: int, a: Lanes) -> Lanes:
    return np.bitwise_count(a).astype(np.uint64)


def _reverse(bits: int, a: Lanes) -> Lanes:
    result = np.zeros_like(a)
    for i in range(bits):
        result |= (a >> np.uint64(i) & np.uint64(1)) << np.uint64(bits - 1 - i)
    return result


def _find_highest(bits: int, a: Lanes) -> Lanes:
    """Return how far the highest bit must move to the top; all ones for 0 (bfind.shiftamt)."""
    found = np.full_like(a, 2**32 - 1)
    for i in range(bits):
        found = np.where(a >> np.uint64(i) & np.uint64(1), np.uint64(bits - 1 - i), found)
    return found


def _insert(bits: int, a: Lanes, b: Lanes, at: Lanes, count: Lanes) -> Lanes:
    at, count = at & np.uint64(255), np.minimum(count & np.uint64(255), np.uint64(bits))
    mask = _shift(left=True)(64, np.ones_like(a), count) - np.uint64(1)
    mask = _cut(_shift(left=True)(bits, mask, at), bits)
    return (_shift(left=True)(bits, a, at) & mask) | (b & ~mask)


def _funnel(_bits: int, low: Lanes, high: Lanes, by: Lanes) -> Lanes:
    return (_cut(high, 32) << np.uint64(32) | _cut(low, 32)) >> (by & np.uint64(31))


ARITHMETIC: dict[str, Callable[..., Lanes]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "neg": lambda _, a: np.uint64(0) - a,
    "mul": lambda _, a, b: a * b,
    "mad": lambda _, a, b, c: a * b + c,
    "min": lambda _, a, b: np.minimum(a, b),
    "max": lambda _, a, b: np.maximum(a, b),
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "mov": lambda _, a: a,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "shf": _funnel,
    "prmt": _permute,
    "popc": _popcount,
    "brev": _reverse,
    "bfind": _find_highest,
    "bfi": _insert,
}
COMPARISONS: dict[str, Callable[..., NDArray[np.bool_]]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


# ---- running ----


class _Run:
    def __init__(
        self,
        program: Program,
        memory: Memory,
        arguments: Sequence[bytes],
        groups: int,
        threads: int,
    ) -> None:
        if threads % LANES or len(arguments) != len(program.parameters):
            raise PtxError(f"{threads} threads, {len(arguments)} arguments")
        self.program, self.memory = program, memory
        self.arguments = dict(zip(program.parameters, arguments, strict=True))
        count = groups * threads
        number = np.arange(count, dtype=np.uint64)
        self.lane = np.arange(count) % LANES
        self.special = {
            "%tid.x": number % np.uint64(threads),
            "%ctaid.x": number // np.uint64(threads),
            "%ntid.x": np.full(count, threads, np.uint64),
        }
        self.registers: dict[str, Lanes] = {}
        self.written: dict[str, NDArray[np.bool_]] = {}
        self.at = np.zeros(count, np.int64)
        self.alive = np.ones(count, bool)

    def read(self, operand: str, bits: int, mask: NDArray[np.bool_]) -> Lanes:
        if operand in self.special:
            return self.special[operand]
        if operand.startswith("%"):
            if operand not in self.written or not self.written[operand][mask].all():
                raise PtxError(f"{operand} is read before it is written")
            return _cut(self.registers[operand], bits)
        return _cut(np.full(self.at.size, int(operand, 0) & (2**64 - 1), np.uint64), bits)

    def write(self, operand: str, values: Lanes, bits: int, mask: NDArray[np.bool_]) -> None:
        if operand == "_":
            return
        if operand not in self.registers:
            self.registers[operand] = np.full(self.at.size, 0xDEADBEEF, np.uint64)
            self.written[operand] = np.zeros(self.at.size, bool)
        np.copyto(self.registers[operand], _cut(values.astype(np.uint64), bits), where=mask)
        self.written[operand] |= mask

    def addresses(self, operand: str, mask: NDArray[np.bool_]) -> Lanes:
        match = re.fullmatch(r"\[(%\w+)(?:\+(-?\d+))?\]", operand)
        if match is None:
            raise PtxError(f"no address: {operand}")
        offset = np.uint64(int(match[2] or 0) & (2**64 - 1))
        return (self.read(match[1], 64, mask) + offset)[mask]

    def run(self, most: int) -> list[int]:
        """Run to the end; return how often each instruction ran."""
        seen = [0] * len(self.program.instructions)
        with np.errstate(over="ignore"):
            for _ in range(most):
                if not self.alive.any():
                    return seen
                now = int(self.at[self.alive].min())
                if now >= len(seen):
                    raise PtxError("ran past the end")
                mask = self.alive & (self.at == now)
                self.at[mask] += 1
                instruction = self.program.instructions[now]
                if instruction.guard:
                    name = instruction.guard.lstrip("!")
                    holds = self.read(name, 1, mask) != (1 if instruction.guard[0] == "!" else 0)
                    mask = mask & holds
                    if not mask.any():
                        continue
                seen[now] += 1
                try:
                    self.step(instruction, mask)
                except PtxError as error:
                    raise PtxError(f"instruction {now}, {instruction}: {error}") from None
        raise PtxError(f"does not end within {most} instructions")

    def step(self, instruction: Instruction, mask: NDArray[np.bool_]) -> None:
        name, operands = instruction.parts[0], instruction.operands
        special = getattr(self, f"do_{name}", None)
        if special is not None:
            special(instruction.parts, operands, mask)
        elif name in ARITHMETIC:
            bits = _bits(instruction.parts[-1])
            wide = "wide" in instruction.parts
            values = [self.read(operand, bits, mask) for operand in operands[1:]]
            if name in ("min", "max") and instruction.parts[-1][0] == "s":
                raise PtxError("signed")
            self.write(operands[0], ARITHMETIC[name](bits, *values), bits * (1 + wide), mask)
        else:
            raise PtxError("is not known here")

    def do_ret(self, _parts: Sequence[str], _o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        self.alive[mask] = False

    def do_bra(self, _parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        self.at[mask] = self.program.labels[o[0]]

    def do_cvta(self, _parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        self.write(o[0], self.read(o[1], 64, mask), 64, mask)

    def do_cvt(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        if parts[-1][0] == "s":
            raise PtxError("signed")
        self.write(o[0], self.read(o[1], _bits(parts[-1]), mask), _bits(parts[-2]), mask)

    def do_selp(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        bits = _bits(parts[-1])
        first, second = self.read(o[1], bits, mask), self.read(o[2], bits, mask)
        self.write(o[0], np.where(self.read(o[3], 1, mask) != 0, first, second), bits, mask)

    def do_setp(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        bits = _bits(parts[-1])
        first, second = self.read(o[1], bits, mask), self.read(o[2], bits, mask)
        compare = COMPARISONS[parts[1]]
        signed = parts[-1][0] == "s"
        result = (
            compare(*(_signed(v, bits) for v in (first, second)))
            if signed
            else compare(first, second)
        )
        self.write(o[0], result, 1, mask)

    def do_ld(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        bits = _bits(parts[-1])
        nbytes = bits // 8
        if parts[1] == "param":
            match = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", o[1])
            if match is None:
                raise PtxError(f"no parameter: {o[1]}")
            offset = int(match[2] or 0)
            value = self.arguments[match[1]][offset : offset + nbytes]
            if len(value) != nbytes:
                raise PtxError(f"a parameter of {len(self.arguments[match[1]])} bytes")
            constant = np.full(self.at.size, int.from_bytes(value, "little"), np.uint64)
            self.write(o[0], constant, bits, mask)
            return
        targets = _operands(o[0].strip("{}"))
        segment, places = self.memory.place(
            self.addresses(o[1], mask), nbytes * len(targets), store=False
        )
        for i, target in enumerate(targets):
            values = np.zeros(self.at.size, np.uint64)
            for k in range(nbytes):
                byte = segment.data[places + np.uint64(i * nbytes + k)].astype(np.uint64)
                values[mask] |= byte << np.uint64(8 * k)
            self.write(target, values, bits, mask)

    def do_st(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        bits = _bits(parts[-1])
        nbytes = bits // 8
        sources = _operands(o[1].strip("{}"))
        segment, places = self.memory.place(
            self.addresses(o[0], mask), nbytes * len(sources), store=True
        )
        for i, source in enumerate(sources):
            values = self.read(source, bits, mask)[mask]
            for k in range(nbytes):
                at = places + np.uint64(i * nbytes + k)
                segment.data[at] = (values >> np.uint64(8 * k) & np.uint64(255)).astype(np.uint8)
                segment.stored[at] = True

    def do_shfl(self, parts: Sequence[str], o: Sequence[str], mask: NDArray[np.bool_]) -> None:
        values, by, clamp, named = (self.read(operand, 32, mask) for operand in o[1:])
        warps = mask.reshape(-1, LANES)
        for warp, lanes in enumerate(warps):
            if lanes.any():
                members = int(named[warp * LANES + int(lanes.argmax())])
                if members != sum(1 << int(lane) for lane in np.flatnonzero(lanes)):
                    raise PtxError(f"lanes {members:#x} are named, others are here")
        last = (clamp & np.uint64(31)).astype(np.int64)
        by_lanes = by.astype(np.int64)
        if parts[2] == "up":
            source = self.lane - by_lanes
            inside = source >= last
        elif parts[2] == "idx":
            source = by_lanes & 31
            inside = source <= last
        else:
            raise PtxError("is not known here")
        source = np.where(inside, source, self.lane)
        target, _, predicate = o[0].partition("|")
        base = np.arange(self.at.size) - self.lane
        self.write(target, values[base + source], 32, mask)
        if predicate:
            self.write(predicate, inside.astype(np.uint64), 1, mask)


def launch(
    program: Program,
    memory: Memory,
    arguments: Sequence[bytes],
    groups: int,
    threads: int,
    *,
    most: int = 100_000,
) -> list[int]:
    """Run a kernel.

    Parameters
    ----------
    program : Program
        From `parse`.
    memory : Memory
        All that it may touch.
    arguments : sequence of bytes
        Its parameters, little endian.
    groups, threads : int
        The launch, in one dimension; whole warps.
    most : int
        Instructions after which it counts as endless.

    Returns
    -------
    list of int
        How often each instruction ran.

    Raises
    ------
    PtxError
        Where it does what it must not.
    """
    return _Run(program, memory, arguments, groups, threads).run(most)
