// decode.cu - give coded weights back, see csrc/core/codec.h. A warp decodes a block of 1,024, a
// lane 32 of them. Integers only, no shared memory, no table. Nothing that a chunk holds makes it
// read or write outside: what comes from memory is compared with what the launch says.
#include "kernel.h"

enum { LANES = 32, BLOCK_WEIGHTS = 1024, WARPS = 8, HEADER_WORDS = 16 };
enum { PLANE_WORDS = 2 * LANES, MOST_TAIL_WORDS = 192, LEAST_LOW_BITS = 2, MOST_LOW_BITS = 5 };

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

// A block that is stored as it is: `words` words, first its fixed place, then its tail.
OO_DEVICE void copy_raw(const struct block *block, word fixed_words, word words, word weight_bytes,
                        unsigned char *out) {
    const word bytes = block->left * weight_bytes;
#pragma unroll 1
    for (word at = block->lane; at < words; at += LANES) {
        const word in_tail = at - fixed_words;
        word four = 0;
        if (at < fixed_words)
            four = block->fixed[at];
        else if (in_tail < block->tail.words)
            four = block->tail.begin[in_tail];
#pragma unroll 1
        for (word k = 4 * at; k < 4 * at + 4 && k < bytes; k++, four >>= 8)
            out[k] = (unsigned char)four;
    }
}

// The places of the lane's weights that are in no tier.
OO_DEVICE word of_no_tier(const struct codes *codes) {
    return codes->plane[0] & codes->plane[1] & codes->plane[2] & codes->plane[3];
}

// Eight weights of a lane, from its place 8 s on, side by side: two in a word.
OO_DEVICE uint4 eight_bf16(const struct block *block, const struct palette *palette, int s) {
    word two[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const word upper = symbols_of(palette, &block->codes, 2 * s + k / 2);
        const word low = block->fixed[64 * s + 2 * block->lane + k / 2];
        const word turned = __byte_perm(low, upper, k & 1 ? 0x7362 : 0x5140);
        two[k] = (turned >> 1 & 0x7FFF7FFFu) | (turned & 0x00010001u) << 15;
    }
    return make_uint4(two[0], two[1], two[2], two[3]);
}

// bf16. `chunk` and `weights` are aligned to 16 bytes; `count` and `tail_words` as the header says.
OO_KERNEL decode_bf16(const word *chunk, unsigned short *weights, word count, word tail_words,
                      struct palette palette) {
    enum { LOW_WORDS = BLOCK_WEIGHTS / 4 };
    struct block block;
    if (!open_block(chunk, count, tail_words, LOW_WORDS, &block))
        return;
    weights += block.first;
    if (block.tail.raw) {
        copy_raw(&block, LOW_WORDS + PLANE_WORDS, BLOCK_WEIGHTS / 2, 2, (unsigned char *)weights);
        return;
    }
    if (block.left >= BLOCK_WEIGHTS) {
#pragma unroll
        for (int s = 0; s < 4; s++)
            *(uint4 *)(weights + 256 * s + 8 * block.lane) = eight_bf16(&block, &palette, s);
    } else { // the chunk's last
#pragma unroll 1
        for (int s = 0; s < 4; s++) {
            uint4 eight = eight_bf16(&block, &palette, s);
            word at = 256 * s + 8 * block.lane;
#pragma unroll 1
            for (const word end = at + 8; at < end && at < block.left; at++) {
                weights[at] = (unsigned short)eight.x;
                eight.x = __funnelshift_r(eight.x, eight.y, 16);
                eight.y = __funnelshift_r(eight.y, eight.z, 16);
                eight.z = __funnelshift_r(eight.z, eight.w, 16);
                eight.w >>= 16;
            }
        }
    }
    word from = block.codes.raw_symbol;
    for (word rest = of_no_tier(&block.codes); rest; rest &= rest - 1, from += 8) {
        const word at = place_of(block.lane, __ffs(rest) - 1);
        const word low = block.fixed[at / 4] >> 8 * (at & 3) & 255;
        const word turned = bits(&block.tail, from, 8) << 8 | low;
        if (at < block.left)
            weights[at] = (unsigned short)(turned >> 1 | turned << 15);
    }
}

// What one-byte weights are made of in addition to their codes.
struct low_bits {
    word plane[MOST_LOW_BITS]; // those that are not there are 0
    word count, rotate;
};

// Eight weights of a lane, from its place 8 s on, side by side: four in a word.
OO_DEVICE uint2 eight_bytes(const struct block *block, const struct palette *palette,
                            const struct low_bits *low, int s) {
    const word above = (0xFFu << low->count & 0xFFu) * 0x01010101u;
    word four[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int w = 2 * (s & 1) + k, half = 16 * (s >> 1);
        const word lowest = nibbles(low->plane[0], w, 0) | nibbles(low->plane[1], w, 1) |
                            nibbles(low->plane[2], w, 2) | nibbles(low->plane[3], w, 3);
        const word fifth = nibbles(low->plane[4], w, 0);
        const word upper = symbols_of(palette, &block->codes, 2 * s + k) << low->count & above;
        const word turned = upper | to_bytes(lowest >> half) | to_bytes(fifth >> half) << 4;
        const word back = (turned >> 1 & 0x7F7F7F7Fu) | (turned & 0x01010101u) << 7;
        four[k] = low->rotate ? back : turned;
    }
    return make_uint2(four[0], four[1]);
}

// One byte a weight, of which the lowest `low_bits`, two to five, are stored as they are after a
// rotation by `rotate`, 0 or 1, to the left. `chunk` and `weights` are aligned to 16 bytes.
OO_KERNEL decode_bytes(const word *chunk, unsigned char *weights, word count, word tail_words,
                       struct palette palette, word low_bits, word rotate) {
    struct block block;
    struct low_bits low = {{0, 0, 0, 0, 0}, low_bits, rotate};
    if (!open_block(chunk, count, tail_words, LANES * low_bits, &block))
        return;
    weights += block.first;
    if (block.tail.raw) {
        copy_raw(&block, LANES * low_bits + PLANE_WORDS, BLOCK_WEIGHTS / 4, 1, weights);
        return;
    }
#pragma unroll
    for (word k = 0; k < MOST_LOW_BITS; k++)
        if (k < LEAST_LOW_BITS || k < low_bits)
            low.plane[k] = block.fixed[LANES * k + block.lane];
    if (block.left >= BLOCK_WEIGHTS) {
#pragma unroll
        for (int s = 0; s < 4; s++)
            *(uint2 *)(weights + 256 * s + 8 * block.lane) = eight_bytes(&block, &palette, &low, s);
    } else { // the chunk's last
#pragma unroll 1
        for (int s = 0; s < 4; s++) {
            uint2 eight = eight_bytes(&block, &palette, &low, s);
            word at = 256 * s + 8 * block.lane;
#pragma unroll 1
            for (const word end = at + 8; at < end && at < block.left; at++) {
                weights[at] = (unsigned char)eight.x;
                eight.x = __funnelshift_r(eight.x, eight.y, 8);
                eight.y >>= 8;
            }
        }
    }
    word from = block.codes.raw_symbol;
    for (word rest = of_no_tier(&block.codes); rest; rest &= rest - 1, from += 8) {
        const word bit = __ffs(rest) - 1, at = place_of(block.lane, bit);
        word turned = bits(&block.tail, from, 8) << low_bits & 255;
#pragma unroll
        for (int k = 0; k < MOST_LOW_BITS; k++)
            turned |= (low.plane[k] >> bit & 1) << k;
        if (at < block.left)
            weights[at] = (unsigned char)(rotate ? turned >> 1 | turned << 7 : turned);
    }
}
