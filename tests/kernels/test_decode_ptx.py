"""The kernel that decodes weights, as the compiler made it: its PTX runs, and its mutants do."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections.abc import Iterator

import coded
import numpy as np
import nvrtc
import ptx
import pytest

pytestmark = pytest.mark.skipif(
    not nvrtc.installed(), reason=f"{nvrtc.WHEEL} is not installed: nothing compiles CUDA here"
)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KERNELS = {coded.BF16: "decode_bf16", coded.FP8: "decode_bytes", coded.INT8: "decode_bytes"}
KINDS = pytest.mark.parametrize(
    "kind", [coded.BF16, coded.FP8, coded.INT8], ids=["bf16", "fp8", "int8"]
)
WARPS = 8


def program(kernel):
    return ptx.parse(nvrtc.compiled("decode.cu", "compute_80").decode(), kernel)


def weights_of(kind, count, seed=0, spread=12, rare=1 / 40):
    """Weights with zeros, infinities, NaNs and, one in 1 / `rare`, any bits.

    The wider int8's spread, the more of its bits are stored as they are.
    """
    draw = np.random.default_rng(seed)
    if kind == coded.INT8:
        usual = np.clip(np.round(draw.normal(0, spread, count)), -127, 127).astype(np.int64)
    elif kind == coded.FP8:  # a sign, an exponent that is seldom small, three bits
        usual = 0x80 * draw.integers(0, 2, count) | draw.integers(0, 8, count)
        usual |= np.maximum(9 - draw.geometric(0.6, count), 0) << 3
    else:
        usual = draw.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16
    special = np.array([0, 0x8000, 0x7F80, 0xFFC1, 1])
    any_bits = draw.integers(0, 2**16, count)
    seldom = np.where(draw.random(count) < 0.5, draw.choice(special, count), any_bits)
    chosen = np.where(draw.random(count) < rare, seldom, usual)
    return chosen.astype(np.uint16 if kind == coded.BF16 else np.uint8)


def chunk_of(kind, count, seed=0, spread=12):
    """A chunk in tiers; of nine blocks and more the second and the last are stored as they are."""
    weights = weights_of(kind, count, seed, spread)
    if count > 8 * coded.BLOCK:
        noise = np.random.default_rng(seed + 1).integers(0, 2**16, count).astype(weights.dtype)
        for block in (1, count // coded.BLOCK):
            at = slice(block * coded.BLOCK, (block + 1) * coded.BLOCK)
            weights[at] = noise[at]
    chunk = coded.encode(kind, weights)
    assert chunk.mode == coded.TIERS
    return chunk, weights


def corrupt(chunk, words):
    """The chunk's bytes with tails of ones, and an index that gives blocks what they have not.

    Most codes of the first block and of the last lead into their tail of `words` words, which is
    too short for them; the second has none, the third is stored as it is and has none, others end
    behind the chunk.
    """
    data, blocks = chunk.data.copy(), -(-chunk.count // coded.BLOCK)
    data[data.size - 4 * chunk.tail_words :] = 255
    index = data[coded.HEADER :][: 4 * (blocks + 1)].view(np.uint32)
    index[1:3] = min(chunk.tail_words, words)
    index[2:4] |= 1 << 31
    index[4:-2] = chunk.tail_words + 1
    index[-2:] = 0, index[1]
    places = data[data.size - 4 * chunk.tail_words - blocks * (128 * chunk.low_bits + 256) :]
    for block in (0, blocks - 1):
        end = (block + 1) * (128 * chunk.low_bits + 256)
        places[end - 256 : end] = 0x77  # the planes of the first code
    return data


def run(code, chunk, data=None, extra_groups=0, most=100_000):
    """Decode with the kernel's `code`; return the weights' bytes, which were stored, coverage."""
    memory = ptx.Memory()
    width = 2 if chunk.kind == coded.BF16 else 1
    out = np.full(width * chunk.count, 0x5A, np.uint8)
    addresses = (
        memory.add(chunk.data if data is None else data, may_store=False),
        memory.add(out, may_store=True),
    )
    arguments = [struct.pack("<Q", address) for address in addresses]
    arguments += [struct.pack("<I", n) for n in (chunk.count, chunk.tail_words)] + [chunk.palette]
    if chunk.kind != coded.BF16:
        arguments += [struct.pack("<I", n) for n in (chunk.low_bits, chunk.kind == coded.FP8)]
    groups = -(-chunk.count // (coded.BLOCK * WARPS)) + extra_groups
    seen = ptx.launch(code, memory, arguments, groups, 32 * WARPS, most=most)
    return out, memory.segments[1].stored, seen


def decoded(kernel):
    """Chunks, what is decoded in their place, and the bytes that this gives: each path is taken."""
    code = program(kernel)
    for kind in (kind for kind, name in KERNELS.items() if name == kernel):
        for count in (7 * coded.BLOCK, 9 * coded.BLOCK + 77, 5 * coded.BLOCK + 519):
            chunk, weights = chunk_of(kind, count, seed=count)
            yield chunk, None, weights.view(np.uint8)
        for words in (20, 40, 64, 100, 160):
            data = corrupt(chunk, words)
            yield chunk, data, run(code, chunk, data, extra_groups=1)[0]
    if kernel == "decode_bytes":
        for spread in (2, 24, 32):
            chunk, weights = chunk_of(coded.INT8, 8 * coded.BLOCK - 300, 1, spread)
            yield chunk, None, weights


@KINDS
@pytest.mark.parametrize("count", [1001, 1024, 3000, 5 * 1024 + 3, 9 * 1024 + 77])
def test_the_ptx_gives_back_the_bits_and_stores_every_byte(kind, count):
    chunk, weights = chunk_of(kind, count, seed=count)
    out, stored, _ = run(program(KERNELS[kind]), chunk, extra_groups=count == 1024)
    assert np.array_equal(out, weights.view(np.uint8))
    assert stored.all()


@pytest.mark.parametrize("kernel", sorted(set(KERNELS.values())))
def test_every_instruction_runs(kernel):
    code = program(kernel)
    seen, low_bits = np.zeros(len(code.instructions), int), set()
    for chunk, data, _ in decoded(kernel):
        low_bits.add(chunk.low_bits)
        seen += run(code, chunk, data, extra_groups=1)[2]
    assert low_bits == ({8} if kernel == "decode_bf16" else {2, 3, 4, 5})
    never = [str(i) for i, times in zip(code.instructions, seen, strict=True) if not times]
    assert not never


@KINDS
def test_what_a_chunk_holds_leads_nowhere(kind):
    code = program(KERNELS[kind])
    draw = np.random.default_rng(kind)
    chunk, _ = chunk_of(kind, 3000)
    for changes in (1, 4, 16, chunk.data.size // 4):
        for _ in range(4):
            data = chunk.data.copy()
            data[draw.integers(coded.HEADER, data.size, changes)] ^= draw.integers(
                1, 256, changes
            ).astype(np.uint8)
            assert run(code, chunk, data)[1].all()


def test_it_assembles_for_every_architecture_that_is_shipped():
    import kernels

    assert [f"sm_{number}" for number in kernels.ARCHITECTURES] == list(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert nvrtc.compiled("decode.cu", architecture)[:4] == b"\x7fELF"
        assert nvrtc.compiled("spin.cu", architecture)[:4] == b"\x7fELF"


# ---- the machine that runs it notices what a GPU would not forgive ----

HEAD = ".visible .entry k(\n.param .u64 k_param_0\n)\n{\n.reg .b32 %r<9>;\n"


def tiny(body, data, may_store=True, threads=32):
    memory = ptx.Memory()
    address = memory.add(data, may_store=may_store)
    code = ptx.parse(HEAD + body + "\nret;\n}\n", "k")
    return ptx.launch(code, memory, [struct.pack("<Q", address)], 1, threads, most=1000)


LOAD = "ld.param.u64 %rd1, [k_param_0];\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (LOAD + "ld.global.u32 %r1, [%rd1+64];", "load of 4 bytes"),
        (LOAD + "ld.global.u32 %r1, [%rd1+-4];", "load of 4 bytes"),
        (LOAD + "ld.global.u32 %r1, [%rd1+2];", "off its alignment"),
        (LOAD + "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+8];", "off its alignment"),
        (LOAD + "mov.u32 %r1, 1;\nst.global.u32 [%rd1], %r1;", "store of 4 bytes"),
        ("add.s32 %r1, %r2, 1;", "before it is written"),
        ("fma.f32 %r1, %r2, %r3;", "not known here"),
        ("$L:\nbra.uni $L;", "does not end"),
        (
            "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 4;\n"
            "@%p1 shfl.sync.up.b32 %r2|%p2, %r1, 1, 0, -1;",
            "others are here",
        ),
    ],
)  # fmt: skip
def test_the_machine_stops_at(body, message):
    with pytest.raises(ptx.PtxError, match=message):
        tiny(body, np.zeros(64, np.uint8), may_store=False)


def test_lanes_that_part_meet_again():
    out = np.zeros(128, np.uint8)
    tiny(
        LOAD + "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n"
        "setp.lt.u32 %p1, %r1, 4;\n@%p1 bra $A;\nmov.u32 %r2, 7;\nbra.uni $B;\n"
        "$A:\nmov.u32 %r2, 9;\n$B:\nshfl.sync.up.b32 %r3|%p2, %r2, 1, 0, -1;\n"
        "st.global.u32 [%rd3], %r3;",
        out,
    )  # fmt: skip
    assert out.view(np.uint32).tolist() == [9] * 5 + [7] * 27


# ---- mutants ----

SWAPS = {
    "and": "or", "or": "and", "xor": "and", "add": "sub", "sub": "add", "shl": "shr", "shr": "shl",
    "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "up": "idx",
    "idx": "up", "min": "max", "max": "min", "popc": "brev", "brev": "popc",
}  # fmt: skip


def mutants(code: ptx.Program) -> Iterator[tuple[str, ptx.Program]]:
    """Change one instruction: operator, constant, order of operands, guard; leave a store out."""
    for at, one in enumerate(code.instructions):
        changed: list[ptx.Instruction] = []
        for i, part in enumerate(one.parts):
            if part in SWAPS:
                parts = (*one.parts[:i], SWAPS[part], *one.parts[i + 1 :])
                changed.append(dataclasses.replace(one, parts=parts))
        for i, operand in enumerate(one.operands):
            if i and operand.lstrip("-").isdigit() and one.parts[0] != "shfl":
                value = int(operand)
                value = value & (value - 1) if one.parts[0] == "and" else value + 1
                operands = (*one.operands[:i], str(value), *one.operands[i + 1 :])
                changed.append(dataclasses.replace(one, operands=operands))
        if one.parts[0] in ("sub", "selp", "prmt", "shf") and len(one.operands) > 2:
            first, a, b, *rest = one.operands
            changed.append(dataclasses.replace(one, operands=(first, b, a, *rest)))
        if one.guard:
            guard = one.guard[1:] if one.guard[0] == "!" else "!" + one.guard
            changed.append(dataclasses.replace(one, guard=guard))
        if one.parts[0] == "st":
            changed.append(dataclasses.replace(one, parts=("mov", "b32"), operands=("_", "0")))
        for new in changed:
            instructions = (*code.instructions[:at], new, *code.instructions[at + 1 :])
            yield f"{at}: {one} -> {new}", dataclasses.replace(code, instructions=instructions)


def killed_by(code, chunks):
    """Whether a changed kernel gives other bytes than it should, or does what it must not."""
    for chunk, data, expected in chunks:
        try:
            out, _, _ = run(code, chunk, data, extra_groups=1, most=10_000)
        except ptx.PtxError:
            return True
        if not np.array_equal(out, expected):
            return True
    return False


def survivors(kernel, found):
    """Those of the mutants that give the same bytes."""
    code, chunks = program(kernel), list(decoded(kernel))
    assert not killed_by(code, chunks)
    return [name for name, mutant in found if not killed_by(mutant, chunks)]


@pytest.mark.slow  # all of them run in the same tier; .ci/run decodes each kind by what is here
@pytest.mark.parametrize("kernel", sorted(set(KERNELS.values())))
def test_a_sample_of_mutants_is_killed(kernel):
    found = random.Random(1).sample(list(mutants(program(kernel))), 30)
    assert len(survivors(kernel, found)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(set(KERNELS.values())))
def test_mutants_are_killed(kernel, record_property):
    found = list(mutants(program(kernel)))
    alive = survivors(kernel, found)
    print(f"{kernel}: {len(found)} mutants, {len(alive)} survive", *alive, sep="\n")
    row = {"kernel": kernel, "tried": len(found), "killed": len(found) - len(alive)}
    record_property("mutants", json.dumps(row))
    assert len(alive) <= 0.05 * len(found)
