/* codec.h - weights in fewer bytes, without loss: a tiered code of fixed places. Pure.
 *
 * Trained weights spend few bits of information on their exponents: three values hold about three
 * quarters of a tensor, three more most of the rest. A weight is rotated left by one where its sign
 * comes first, so that the exponent is above mantissa and sign, and is cut in two: `low_bits` are
 * stored as they are, what is above them is its symbol. A symbol is coded in tiers: two bits name
 * one of three, or send on to two bits for three more, or on to three bits for seven more, or on to
 * the symbol itself. Every place is known from population counts alone, so a warp decodes a block
 * without a table and without a search.
 *
 * A chunk can be decoded by itself; it is little endian:
 *
 *     header          64 bytes: struct oo_codec_header
 *     index           u32 for each block and one more: where its tail begins, in words; bit 31 says
 *                     that the block is raw; then zeros up to a multiple of 16 bytes
 *     fixed places    for each block, `fixed` bytes: the low bits, then planes P0[32], P1[32]
 *     tails           u32 words, the blocks' one after the other
 *
 * A block is 1,024 weights; 32 lanes own 32 of each. Lane l owns elements 256 s + 8 l + j; its
 * i-th, i = 8 s + j = 16 h + 4 w + q, is bit 16 h + 4 q + w of the lane's word in a plane. Low
 * bits: one byte a weight in their natural order where there are 8, else one plane for each bit. P0
 * and P1 are the bits of the first code, 3 sends on. A tail is one stream of bits, the lanes' one
 * after the other: both bits of the second code of the N1 that are sent on, first the one, then the
 * other; the three of the third code of the N2 that are sent on again; then the N3 symbols that no
 * tier has, 8 bits each. A raw block is its weights as they are: what fits into its fixed place,
 * then the rest.
 *
 * The idea of coding exponents of bf16 weights: DFloat11 (arXiv 2504.11651), which uses Huffman
 * codes. Sizes and speeds: `benchmarks/run.py codec`.
 */
#ifndef OO_CODEC_H
#define OO_CODEC_H

#include "oracle_offload.h"

#include <stddef.h>
#include <stdint.h>

enum oo_codec_mode {
    OO_CODEC_RAW = 1,   /* the weights as they are, behind the header */
    OO_CODEC_TIERS = 2, /* index, fixed places, tails */
    OO_CODEC_CONST = 3, /* one weight, many times: the header alone */
};

enum { OO_CODEC_BLOCK = 1024, OO_CODEC_CHUNK = 4 << 20, OO_CODEC_HEADER = 64 };

struct oo_codec_header {
    uint32_t magic;
    uint8_t kind, mode, low_bits, version;
    uint32_t count;      /* weights, at most OO_CODEC_CHUNK */
    uint32_t tail_words; /* of all blocks together */
    uint8_t palette[16]; /* symbols: 0-2 of the first tier, 4-6 of the second, 8-14 of the third */
    uint64_t checksum;   /* of header and payload, itself taken as 0 */
    uint16_t constant;   /* OO_CODEC_CONST: the weight */
    uint8_t reserved[22];
};

/* Bytes in front of what travels of a chunk: only tiers are decoded there, by their header. */
static inline size_t oo_codec_skipped(const struct oo_codec_header *header) {
    return header->mode == OO_CODEC_TIERS ? 0 : OO_CODEC_HEADER;
}

/* One implementation; all of them write and read the same bytes. */
struct oo_codec;
/* "portable", "avx2", "avx512"; NULL where this machine has no such instructions. */
const struct oo_codec *oo_codec_named(const char *name);
/* The fastest of them here. */
const struct oo_codec *oo_codec_best(void);
const char *oo_codec_name(const struct oo_codec *codec);

/* Bytes of one weight. */
size_t oo_codec_weight_bytes(enum oo_codec_kind kind);
/* Bytes that `out` must have room for while a chunk of `count` weights is encoded. */
size_t oo_codec_room(enum oo_codec_kind kind, size_t count);
/* Encode 1 to OO_CODEC_CHUNK weights; `bytes` becomes what the chunk takes, never more than 64
 * beyond the weights. Each block is decoded again and compared before it counts: OO_E_STATE if
 * it differs (bad memory). */
enum oo_status oo_codec_encode(const struct oo_codec *codec, enum oo_codec_kind kind,
                               const void *weights, size_t count, void *out, size_t *bytes);

/* Read a header. OO_E_ARGUMENT, with what is wrong, for anything but a whole chunk of `bytes`. */
enum oo_status oo_codec_read(const void *chunk, size_t bytes, struct oo_codec_header *header);
/* Read the header of the chunk that `room` bytes begin with; `bytes` becomes what it takes. */
enum oo_status oo_codec_find(const void *chunk, size_t room, struct oo_codec_header *header,
                             size_t *bytes);
/* Read all of a chunk: OO_E_ARGUMENT unless its checksum is that of its bytes. */
enum oo_status oo_codec_check(const void *chunk, size_t bytes);
/* Decode a chunk of exactly `count` weights of that kind. What is corrupt never makes it read or
 * write outside; it is OO_E_ARGUMENT as far as it shows, and with `verify`, which reads all bytes
 * once more, in any case. What `weights` hold after an error is not defined. */
enum oo_status oo_codec_decode(const struct oo_codec *codec, const void *chunk, size_t bytes,
                               int verify, enum oo_codec_kind kind, void *weights, size_t count);

#endif
