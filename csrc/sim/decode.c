/* decode.c - what the kernels that decode weights do (csrc/kernels/decode.cu), bit after bit: the
 * format of csrc/core/codec.h read once more, by other code than the engine's.
 *
 * Whatever a chunk holds, nothing outside of it is read: what a tail has not counts as 0, as for
 * the kernel. */
#include "sim_internal.h"

#include <string.h>

enum { LANES = 32, BLOCK = 1024, HEADER = 64, TAIL_WORDS = 192, MOST_LOW_BITS = 8 };

static uint32_t word_at(const unsigned char *bytes, size_t index) {
    uint32_t word;
    memcpy(&word, bytes + sizeof word * index, sizeof word);
    return word;
}

static size_t blocks_of(const struct sim_decode *work) {
    return ((size_t)work->count + BLOCK - 1) / BLOCK;
}

static size_t fixed_bytes(const struct sim_decode *work) {
    return BLOCK / 8 * (size_t)work->low_bits + 2 * sizeof(uint32_t) * LANES;
}

static size_t fixed_begin(const struct sim_decode *work) {
    return HEADER + (sizeof(uint32_t) * (blocks_of(work) + 1) + 15) / 16 * 16;
}

size_t sim__decode_reads(const struct sim_decode *work) {
    return fixed_begin(work) + blocks_of(work) * fixed_bytes(work) +
           sizeof(uint32_t) * (size_t)work->tail_words;
}

size_t sim__decode_writes(const struct sim_decode *work) {
    return (size_t)work->count * work->weight_bytes;
}

/* A block while it is decoded. */
struct block {
    const unsigned char *low;                  /* of weights of two bytes: one byte of each */
    uint32_t first[2][LANES];                  /* the codes' planes */
    uint32_t low_planes[MOST_LOW_BITS][LANES]; /* of weights of one byte */
    uint32_t tail[TAIL_WORDS];                 /* zeros where it has ended */
    size_t n_second, n_third;                  /* weights that are sent on, and again */
    size_t at_second, at_third, at_raw;        /* those before the one at hand */
};

static unsigned tail_bit(const struct block *block, size_t at) {
    return at < (size_t)32 * TAIL_WORDS ? block->tail[at / 32] >> at % 32 & 1 : 0;
}

/* `count` bits of the tail from `from` on, the first one lowest. */
static unsigned tail_bits(const struct block *block, size_t from, unsigned count) {
    unsigned bits = 0;
    for (unsigned i = 0; i < count; i++)
        bits |= tail_bit(block, from + i) << i;
    return bits;
}

static unsigned second_code(const struct block *block, size_t at) {
    return tail_bit(block, at) | tail_bit(block, block->n_second + at) << 1;
}

static unsigned symbol_of(const struct sim_decode *work, struct block *block, unsigned lane,
                          unsigned bit) {
    const unsigned first = (block->first[0][lane] >> bit & 1) | (block->first[1][lane] >> bit & 1)
                                                                    << 1;
    if (first != 3)
        return work->palette[first];
    const unsigned second = second_code(block, block->at_second++);
    if (second != 3)
        return work->palette[4 + second];
    const size_t third_begin = 2 * block->n_second;
    unsigned third = 0;
    for (unsigned k = 0; k < 3; k++)
        third |= tail_bit(block, third_begin + k * block->n_third + block->at_third) << k;
    block->at_third++;
    if (third != 7)
        return work->palette[8 + third];
    return tail_bits(block, third_begin + 3 * block->n_third + 8 * block->at_raw++, 8);
}

static unsigned weight_of(const struct sim_decode *work, const struct block *block, unsigned symbol,
                          unsigned lane, unsigned bit, size_t place) {
    if (work->weight_bytes == 2) {
        const unsigned low = block->low[place];
        return (low & 1) << 15 | symbol << 7 | low >> 1;
    }
    unsigned turned = symbol << work->low_bits & 255;
    for (unsigned k = 0; k < work->low_bits; k++)
        turned |= (block->low_planes[k][lane] >> bit & 1) << k;
    return work->rotate ? (turned >> 1 | turned << 7) & 255 : turned;
}

static void count_codes(struct block *block) {
    for (unsigned lane = 0; lane < LANES; lane++)
        for (uint32_t sent = block->first[0][lane] & block->first[1][lane]; sent; sent &= sent - 1)
            block->n_second++;
    for (size_t i = 0; i < block->n_second; i++)
        block->n_third += second_code(block, i) == 3;
}

static void decode_block(const struct sim_decode *work, size_t number) {
    const size_t left = work->count - number * BLOCK, width = work->weight_bytes;
    const size_t count = left < BLOCK ? left : BLOCK, fixed = fixed_bytes(work);
    const uint32_t here = word_at(work->chunk + HEADER, number);
    const uint32_t begin = here & 0x7FFFFFFF;
    const uint32_t end = word_at(work->chunk + HEADER, number + 1) & 0x7FFFFFFF;
    const int whole = end <= work->tail_words && begin <= end && end - begin <= TAIL_WORDS;
    const size_t tail_bytes = whole ? sizeof(uint32_t) * (size_t)(end - begin) : 0;
    const unsigned char *low = work->chunk + fixed_begin(work) + number * fixed;
    const unsigned char *tail = work->chunk + fixed_begin(work) + blocks_of(work) * fixed +
                                (whole ? sizeof(uint32_t) * (size_t)begin : 0);
    unsigned char *out = work->weights + number * BLOCK * width;
    if (here >> 31) { /* as it is: first its fixed place, then its tail */
        for (size_t i = 0; i < count * width; i++)
            out[i] = i < fixed ? low[i] : i - fixed < tail_bytes ? tail[i - fixed] : 0;
        return;
    }
    struct block block = {.low = low};
    memcpy(block.first, low + fixed - sizeof block.first, sizeof block.first);
    if (width == 1)
        memcpy(block.low_planes, low, sizeof block.low_planes[0] * (size_t)work->low_bits);
    memcpy(block.tail, tail, tail_bytes);
    count_codes(&block);
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            const unsigned i = 16 * (bit >> 4) + 4 * (bit & 3) + (bit >> 2 & 3);
            const size_t place = 256 * (i >> 3) + 8 * lane + (i & 7);
            const unsigned symbol = symbol_of(work, &block, lane, bit);
            const unsigned weight = weight_of(work, &block, symbol, lane, bit, place);
            if (place >= count)
                continue;
            out[place * width] = (unsigned char)weight; /* little endian, as all of it */
            if (width == 2)
                out[place * 2 + 1] = (unsigned char)(weight >> 8);
        }
}

void sim__decode(const struct sim_decode *work) {
    for (size_t i = 0; i < blocks_of(work); i++)
        decode_block(work, i);
}
