/* decode.c - what the kernels that decode weights do (csrc/kernels/decode.cu), bit after bit: the
 * format of csrc/core/codec.h read once more, by other code than the engine's.
 *
 * Whatever a chunk holds, nothing outside of it is read: what a tail has not counts as 0, as for
 * the kernel. */
#include "sim_internal.h"

#include <string.h>

enum { LANES = 32, BLOCK = 1024, HEADER = 64, TAIL_WORDS = 192 };

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
    const unsigned char *fixed, *planes, *tail;
    size_t tail_bits;
    size_t n_second, n_third;           /* weights that are sent on, and again */
    size_t at_second, at_third, at_raw; /* those before the one at hand */
};

/* `count` bits of the tail from `from` on, the first one lowest. */
static unsigned tail_bits(const struct block *block, size_t from, unsigned count) {
    unsigned bits = 0;
    for (unsigned i = 0; i < count; i++)
        if (from + i < block->tail_bits)
            bits |= ((unsigned)block->tail[(from + i) / 8] >> (from + i) % 8 & 1u) << i;
    return bits;
}

static unsigned plane_bit(const unsigned char *planes, unsigned lane, unsigned bit) {
    return word_at(planes, lane) >> bit & 1;
}

static unsigned second_code(const struct block *block, size_t at) {
    return tail_bits(block, at, 1) | tail_bits(block, block->n_second + at, 1) << 1;
}

static unsigned symbol_of(const struct sim_decode *work, struct block *block, unsigned lane,
                          unsigned bit) {
    const unsigned first = plane_bit(block->planes, lane, bit) |
                           plane_bit(block->planes + sizeof(uint32_t) * LANES, lane, bit) << 1;
    if (first != 3)
        return work->palette[first];
    const unsigned second = second_code(block, block->at_second++);
    if (second != 3)
        return work->palette[4 + second];
    const size_t third_begin = 2 * block->n_second;
    unsigned third = 0;
    for (unsigned k = 0; k < 3; k++)
        third |= tail_bits(block, third_begin + k * block->n_third + block->at_third, 1) << k;
    block->at_third++;
    if (third != 7)
        return work->palette[8 + third];
    return tail_bits(block, third_begin + 3 * block->n_third + 8 * block->at_raw++, 8);
}

static unsigned weight_of(const struct sim_decode *work, const struct block *block, unsigned symbol,
                          unsigned lane, unsigned bit, size_t place) {
    if (work->weight_bytes == 2) {
        const unsigned low = block->fixed[place];
        return (low & 1) << 15 | symbol << 7 | low >> 1;
    }
    unsigned turned = symbol << work->low_bits & 255;
    for (unsigned k = 0; k < work->low_bits; k++)
        turned |= plane_bit(block->fixed + sizeof(uint32_t) * LANES * k, lane, bit) << k;
    return work->rotate ? (turned >> 1 | turned << 7) & 255 : turned;
}

static void count_codes(struct block *block) {
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++)
            block->n_second += plane_bit(block->planes, lane, bit) &
                               plane_bit(block->planes + sizeof(uint32_t) * LANES, lane, bit);
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
    unsigned char *out = work->weights + number * BLOCK * width;
    struct block block = {.fixed = work->chunk + fixed_begin(work) + number * fixed};
    block.planes = block.fixed + fixed - 2 * sizeof(uint32_t) * LANES;
    block.tail = work->chunk + fixed_begin(work) + blocks_of(work) * fixed;
    if (whole) {
        block.tail += sizeof(uint32_t) * (size_t)begin;
        block.tail_bits = (size_t)32 * (end - begin);
    }
    if (here >> 31) { /* as it is: first its fixed place, then its tail */
        for (size_t i = 0; i < count * width; i++)
            out[i] = i < fixed                           ? block.fixed[i]
                     : 8 * (i - fixed) < block.tail_bits ? block.tail[i - fixed]
                                                         : 0;
        return;
    }
    count_codes(&block);
    for (unsigned lane = 0; lane < LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            const unsigned i = 16 * (bit >> 4) + 4 * (bit & 3) + (bit >> 2 & 3);
            const size_t place = 256 * (i >> 3) + 8 * lane + (i & 7);
            const unsigned symbol = symbol_of(work, &block, lane, bit);
            const unsigned weight = weight_of(work, &block, symbol, lane, bit, place);
            if (place < count)
                memcpy(out + place * width, &weight, width); /* little endian, as all of it */
        }
}

void sim__decode(const struct sim_decode *work) {
    for (size_t i = 0; i < blocks_of(work); i++)
        decode_block(work, i);
}
