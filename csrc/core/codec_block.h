/* codec_block.h - what the implementations of the codec share: one block at a time. See codec.h. */
#ifndef OO_CODEC_BLOCK_H
#define OO_CODEC_BLOCK_H

#include "codec.h"

#include <string.h>

enum {
    OO_LANES = 32,
    OO_PLANES = 2 * OO_LANES, /* words of P0 and P1 */
    OO_TAIL_WORDS = 192,      /* no tail has more: a raw block is not larger */
    OO_TAIL_BITS = 13,        /* of one weight, at most */
    OO_TAIL_ROOM = OO_TAIL_BITS * OO_CODEC_BLOCK / 32 +
        4, /* for what is raw in the end, and slack */
};

struct oo_palette {
    uint8_t code[256];   /* of each symbol: bits 0-1 first tier, 2-3 second, 4-6 third */
    uint8_t symbols[16]; /* see struct oo_codec_header */
};

struct oo_codec {
    const char *name;
    /* Symbols in natural order and the low bits, of a block of each width; and back. Planes of low
     * bits are `low_bits` times 32 words. */
    void (*split_words)(const uint16_t *weights, uint8_t *symbols, uint8_t *low);
    void (*join_words)(const uint8_t *symbols, const uint8_t *low, uint16_t *weights);
    void (*split_bytes)(const uint8_t *weights, unsigned rotate, unsigned low_bits,
                        uint8_t *symbols, uint32_t *low);
    void (*join_bytes)(const uint8_t *symbols, unsigned rotate, unsigned low_bits,
                       const uint32_t *low, uint8_t *weights);
    /* Returns the bits of the tail, which is OO_TAIL_ROOM words; `n_raw` symbols are in no tier. */
    unsigned (*encode)(const uint8_t *symbols, const struct oo_palette *palette, uint32_t *planes,
                       uint32_t *tail, unsigned *n_raw);
    /* `tail` has `words` words and at least four of slack. 0: it has not the length that the planes
     * say. */
    int (*decode)(const uint32_t *planes, const uint32_t *tail, unsigned words,
                  const uint8_t *palette, uint8_t *symbols);
};

extern const struct oo_codec oo__codec_portable;
/* NULL where the machine lacks the instructions, or the compiler does not know them. */
const struct oo_codec *oo__codec_avx2(void);
const struct oo_codec *oo__codec_avx512(void);

/* The natural place of a lane's weight, by its bit in a plane. */
static inline unsigned oo__place(unsigned lane, unsigned bit) {
    const unsigned i = 16 * (bit >> 4) + 4 * (bit & 3) + (bit >> 2 & 3);
    return 256 * (i >> 3) + 8 * lane + (i & 7);
}

/* ---- streams of bits ---- */

struct oo__bit_writer {
    uint32_t *at;
    uint64_t held;
    unsigned n_held; /* below 32 */
};

/* Append the lowest `count` bits, at most 32; the others are 0. */
static inline void oo__put(struct oo__bit_writer *writer, uint32_t value, unsigned count) {
    writer->held |= (uint64_t)value << writer->n_held;
    writer->n_held += count;
    if (writer->n_held >= 32) {
        *writer->at++ = (uint32_t)writer->held;
        writer->held >>= 32;
        writer->n_held -= 32;
    }
}

static inline uint32_t oo__lowest(unsigned count) {
    return count >= 32 ? UINT32_MAX : (UINT32_C(1) << count) - 1;
}

/* `count` bits, at most 32, from bit `from` on; one word behind them is read, too. */
static inline uint32_t oo__bits(const uint32_t *words, unsigned from, unsigned count) {
    const uint32_t *at = words + (from >> 5);
    const uint64_t both = at[0] | (uint64_t)at[1] << 32;
    return (uint32_t)(both >> (from & 31)) & oo__lowest(count);
}

#endif
