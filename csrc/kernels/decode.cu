// decode.cu - give coded weights back, see csrc/core/codec.h. A warp decodes a block of 1,024, a
// lane 32 of them. Integers only, no shared memory, no table. Nothing that a chunk holds makes it
// read or write outside: what comes from memory is compared with what the launch says.
#include "kernel.h"

enum { LANES = 32, BLOCK_WEIGHTS = 1024, WARPS = 8, HEADER_WORDS = 16 };
enum { PLANE_WORDS = 2 * LANES, MOST_TAIL_WORDS = 192, MOST_LOW_BITS = 5 };

typedef unsigned int word;

// The symbols of the three tiers, four in a word; those of codec.h's header.
struct palette {
    word symbols[4];
};

// What one block's tail is: `words` words from `begin`, none of them further than the tails go.
struct tail {
    const word *begin;
    word words;
    int raw;
};

// A lane's 32 codes as planes: bit b of each belongs to the weight at that place of the lane.
struct codes {
    word plane[4];   // tier and symbol: 0-2, 4-6, 8-14; 15 is in no tier
    word raw_symbol; // where in the tail the lane's first symbol of no tier is, in bits
};

// `count` bits, at most 32, from bit `from` on. What the tail has not reads as 0.
OO_DEVICE word bits(const struct tail *tail, word from, word count) {
    const word at = from >> 5;
    const word low = at < tail->words ? tail->begin[at] : 0;
    const word high = at + 1 < tail->words ? tail->begin[at + 1] : 0;
    const word both = __funnelshift_r(low, high, from & 31);
    return count < 32 ? both & ((1u << count) - 1) : both;
}

// The sum over the lanes before this one, and over all.
OO_DEVICE word sum_before(word value, word *all) {
    const word lane = threadIdx.x & (LANES - 1);
    word sum = value;
#pragma unroll
    for (word distance = 1; distance < LANES; distance <<= 1) {
        const word other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance)
            sum += other;
    }
    *all = __shfl_sync(~0u, sum, LANES - 1);
    return sum - value;
}

// Spread the low bits of four planes to the places that are set in `mask`: bit i of each goes to
// the i-th of them. Each round moves the bits whose distance has that power of two (Warren,
// Hacker's Delight, 7-5).
OO_DEVICE void expand(word mask, word *planes) {
    const word all = mask;
    word moves[5], left = ~mask << 1; // places to the right of a bit that are not set
#pragma unroll
    for (int i = 0; i < 5; i++) {
        word parity = left ^ left << 1;
        parity ^= parity << 2;
        parity ^= parity << 4;
        parity ^= parity << 8;
        parity ^= parity << 16;
        moves[i] = parity & mask;
        mask = (mask ^ moves[i]) | moves[i] >> (1 << i);
        left &= ~parity;
    }
#pragma unroll
    for (int i = 4; i >= 0; i--) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            planes[k] = (planes[k] & ~moves[i]) | (planes[k] << (1 << i) & moves[i]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        planes[k] &= all;
}

OO_DEVICE struct tail tail_of(const word *index, const word *tails, word tail_words, word block) {
    const word here = index[block], begin = here & 0x7FFFFFFFu;
    const word end = index[block + 1] & 0x7FFFFFFFu;
    // An end before its beginning is far behind it, too.
    const int whole = end <= tail_words && end - begin <= MOST_TAIL_WORDS;
    struct tail tail;
    tail.begin = tails + (whole ? begin : 0);
    tail.words = whole ? end - begin : 0;
    tail.raw = (int)(here >> 31);
    return tail;
}

// All lanes call it together.
OO_DEVICE struct codes read_codes(word first, word second, const struct tail *tail) {
    const word sent_on = first & second;
    const word n_second = __popc(sent_on);
    word all_second, all_third, all_raw;
    const word at_second = sum_before(n_second, &all_second);
    const word two[2] = {bits(tail, at_second, n_second),
                         bits(tail, all_second + at_second, n_second)};
    const word sent_again = two[0] & two[1];
    const word n_third = __popc(sent_again);
    const word third = 2 * all_second + sum_before(n_third, &all_third);
    word three[3], spread[3] = {0, 0, 0};
#pragma unroll
    for (int k = 0; k < 3; k++)
        three[k] = bits(tail, third + k * all_third, n_third);
    const word n_raw = __popc(three[0] & three[1] & three[2]);
    const word at_raw = sum_before(n_raw, &all_raw);

    for (word left = sent_again; left; left &= left - 1) { // a twentieth of the weights
        const word place = left & (0u - left);
#pragma unroll
        for (int k = 0; k < 3; k++) {
            spread[k] |= three[k] & 1 ? place : 0;
            three[k] >>= 1;
        }
    }
    struct codes codes;
    codes.plane[0] = (two[0] & ~sent_again) | spread[0];
    codes.plane[1] = (two[1] & ~sent_again) | spread[1];
    codes.plane[2] = ~sent_again | spread[2];
    codes.plane[3] = sent_again;
    expand(sent_on, codes.plane);
    codes.plane[0] |= first & ~sent_on;
    codes.plane[1] |= second & ~sent_on;
    codes.raw_symbol = 2 * all_second + 3 * all_third + 8 * at_raw;
    return codes;
}

// The bits of eight weights, places w + 4 q and w + 4 q + 16, as the k-th bit of eight nibbles.
OO_DEVICE word nibbles(word plane, int w, int k) { return (plane >> w & 0x11111111u) << k; }

// The symbols of four weights, a byte each, by four codes and by whether they are of the third
// tier.
OO_DEVICE word symbols(const struct palette *palette, word codes, word third) {
    const word low = __byte_perm(palette->symbols[0], palette->symbols[1], codes);
    const word high = __byte_perm(palette->symbols[2], palette->symbols[3], codes);
    const word mask = __byte_perm(0xFF00u, 0, third);
    return (low & ~mask) | (high & mask);
}

// Symbols of the lane's weights 4 g to 4 g + 3.
OO_DEVICE word symbols_of(const struct palette *palette, const struct codes *codes, int g) {
    const int w = g & 3, half = 16 * (g >> 2);
    const word code = nibbles(codes->plane[0], w, 0) | nibbles(codes->plane[1], w, 1) |
                      nibbles(codes->plane[2], w, 2);
    return symbols(palette, code >> half, nibbles(codes->plane[3], w, 0) >> half);
}

// Four nibbles, a byte each.
OO_DEVICE word to_bytes(word nibbles) {
    nibbles &= 0xFFFFu;
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FFu;
    return (nibbles | nibbles << 4) & 0x0F0F0F0Fu;
}

// The natural place in its block of a lane's weight, by its bit in a plane.
OO_DEVICE word place_of(word lane, word bit) {
    const word i = 16 * (bit >> 4) + 4 * (bit & 3) + (bit >> 2 & 3);
    return 256 * (i >> 3) + 8 * lane + (i & 7);
}

// A block as one lane sees it.
struct block {
    const word *fixed; // its fixed place: low bits, then the planes of the first code
    struct tail tail;
    struct codes codes;
    word lane, first, left; // its first weight's place in the chunk; weights from there on
};

// The block of this warp, of `low_words` words of low bits; 0: there is none.
OO_DEVICE int open_block(const word *chunk, word count, word tail_words, word low_words,
                         struct block *block) {
    const word blocks = (count + BLOCK_WEIGHTS - 1) / BLOCK_WEIGHTS;
    const word at = blockIdx.x * WARPS + threadIdx.x / LANES, fixed = low_words + PLANE_WORDS;
    // The fixed places begin on 16 bytes behind the index, which has one entry more than blocks.
    const word *places = chunk + (HEADER_WORDS + blocks + 1 + 3) / 4 * 4;
    if (at >= blocks)
        return 0;
    block->fixed = places + at * fixed;
    block->tail = tail_of(chunk + HEADER_WORDS, places + blocks * fixed, tail_words, at);
    block->lane = threadIdx.x & (LANES - 1);
    block->first = at * BLOCK_WEIGHTS;
    block->left = count - block->first;
    if (!block->tail.raw) {
        const word *planes = block->fixed + low_words + block->lane;
        block->codes = read_codes(planes[0], planes[LANES], &block->tail);
    }
    return 1;
}

// A word of a block that is stored as it is: first its fixed place, then its tail.
OO_DEVICE word raw_word(const struct block *block, word fixed_words, word at) {
    if (at < fixed_words)
        return block->fixed[at];
    at -= fixed_words;
    return at < block->tail.words ? block->tail.begin[at] : 0;
}

// The places of the lane's weights that are in no tier.
OO_DEVICE word of_no_tier(const struct codes *codes) {
    return codes->plane[0] & codes->plane[1] & codes->plane[2] & codes->plane[3];
}

// bf16. `chunk` and `weights` lie on 16 bytes; `count` and `tail_words` as the header says.
OO_KERNEL decode_bf16(const word *chunk, unsigned short *weights, word count, word tail_words,
                      struct palette palette) {
    enum { LOW_WORDS = BLOCK_WEIGHTS / 4, FIXED_WORDS = LOW_WORDS + PLANE_WORDS };
    struct block block;
    if (!open_block(chunk, count, tail_words, LOW_WORDS, &block))
        return;
    weights += block.first;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const word at = 256 * s + 8 * block.lane;
        word two[4]; // weights, in each
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (block.tail.raw) {
                two[k] = raw_word(&block, FIXED_WORDS, at / 2 + k);
            } else {
                const word upper = symbols_of(&palette, &block.codes, 2 * s + k / 2);
                const word low = block.fixed[at / 4 + k / 2];
                const word turned = __byte_perm(low, upper, k & 1 ? 0x7362 : 0x5140);
                two[k] = (turned >> 1 & 0x7FFF7FFFu) | (turned & 0x00010001u) << 15;
            }
        }
        if (at + 8 <= block.left)
            *(uint4 *)(weights + at) = make_uint4(two[0], two[1], two[2], two[3]);
#pragma unroll
        for (int j = 0; j < 7; j++)
            if (at + 8 > block.left && at + j < block.left)
                weights[at + j] = (unsigned short)(two[j / 2] >> 16 * (j & 1));
    }
    if (block.tail.raw)
        return;
    word from = block.codes.raw_symbol;
    for (word rest = of_no_tier(&block.codes); rest; rest &= rest - 1, from += 8) {
        const word at = place_of(block.lane, __ffs(rest) - 1);
        const word low = block.fixed[at / 4] >> 8 * (at & 3) & 255;
        const word turned = bits(&block.tail, from, 8) << 8 | low;
        if (at < block.left)
            weights[at] = (unsigned short)(turned >> 1 | turned << 15);
    }
}

// One byte a weight, of which the lowest `low_bits`, at most five, are stored as they are after a
// rotation by `rotate`, 0 or 1, to the left. `chunk` and `weights` lie on 16 bytes.
OO_KERNEL decode_bytes(const word *chunk, unsigned char *weights, word count, word tail_words,
                       struct palette palette, word low_bits, word rotate) {
    const word low_words = LANES * low_bits;
    struct block block;
    word low[MOST_LOW_BITS];
    if (!open_block(chunk, count, tail_words, low_words, &block))
        return;
    weights += block.first;
#pragma unroll
    for (word k = 0; k < MOST_LOW_BITS; k++)
        low[k] = k < low_bits ? block.fixed[LANES * k + block.lane] : 0;
    const word above = (0xFFu << low_bits & 0xFFu) * 0x01010101u;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const word at = 256 * s + 8 * block.lane;
        word four[2]; // weights, in each
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int w = 2 * (s & 1) + k, half = 16 * (s >> 1);
            const word nibble = nibbles(low[0], w, 0) | nibbles(low[1], w, 1) |
                                nibbles(low[2], w, 2) | nibbles(low[3], w, 3);
            const word lowest = to_bytes(nibble >> half) | to_bytes(nibbles(low[4], w, 0) >> half)
                                                               << 4;
            if (block.tail.raw) {
                four[k] = raw_word(&block, low_words + PLANE_WORDS, at / 4 + k);
            } else {
                const word upper = symbols_of(&palette, &block.codes, 2 * s + k);
                const word turned = (upper << low_bits & above) | lowest;
                four[k] =
                    rotate ? (turned >> 1 & 0x7F7F7F7Fu) | (turned & 0x01010101u) << 7 : turned;
            }
        }
        if (at + 8 <= block.left)
            *(uint2 *)(weights + at) = make_uint2(four[0], four[1]);
#pragma unroll
        for (int j = 0; j < 7; j++)
            if (at + 8 > block.left && at + j < block.left)
                weights[at + j] = (unsigned char)(four[j / 4] >> 8 * (j & 3));
    }
    if (block.tail.raw)
        return;
    word from = block.codes.raw_symbol;
    for (word rest = of_no_tier(&block.codes); rest; rest &= rest - 1, from += 8) {
        const word bit = __ffs(rest) - 1, at = place_of(block.lane, bit);
        word turned = bits(&block.tail, from, 8) << low_bits & 255;
#pragma unroll
        for (int k = 0; k < MOST_LOW_BITS; k++)
            turned |= (low[k] >> bit & 1) << k;
        if (at < block.left)
            weights[at] = (unsigned char)(rotate ? turned >> 1 | turned << 7 : turned);
    }
}
