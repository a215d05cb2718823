/* codec.c - chunks of coded weights; see codec.h. Blocks: codec_portable.c, codec_x86.c. */
#include "codec_block.h"
#include "fingerprint.h"
#include "status.h"

#include <stdlib.h>

static const uint32_t oo__magic = UINT32_C(0x31434F4F); /* "OOC1" */
enum {
    OO_VERSION = 1,
    OO_SAMPLED = 8,   /* of a long chunk's blocks, every so many give the palette */
    OO_RAW_MOST = 64, /* a block with more symbols of no tier is raw: it bounds what a lane does */
    OO_LOW_LEAST = 2, /* low bits of one-byte weights that are tried */
    OO_LOW_MOST = 5,
};
static const uint32_t oo__raw_block = UINT32_C(1) << 31;

_Static_assert(sizeof(struct oo_codec_header) == OO_CODEC_HEADER,
               "the header is part of the format");

const struct oo_codec *oo_codec_named(const char *name) {
    if (!strcmp(name, "avx512"))
        return oo__codec_avx512();
    if (!strcmp(name, "avx2"))
        return oo__codec_avx2();
    return strcmp(name, oo__codec_portable.name) ? NULL : &oo__codec_portable;
}

const struct oo_codec *oo_codec_best(void) {
    const struct oo_codec *codec = oo__codec_avx512();
    if (!codec)
        codec = oo__codec_avx2();
    return codec ? codec : &oo__codec_portable;
}

const char *oo_codec_name(const struct oo_codec *codec) { return codec->name; }

/* ---- sizes ---- */

static int oo__known(unsigned kind) { return kind >= OO_CODEC_BF16 && kind <= OO_CODEC_INT8; }

static size_t oo__width(unsigned kind) { return kind == OO_CODEC_BF16 ? 2 : 1; }

size_t oo_codec_weight_bytes(enum oo_codec_kind kind) { return oo__width(kind); }

static size_t oo__blocks(size_t count) { return (count + OO_CODEC_BLOCK - 1) / OO_CODEC_BLOCK; }

/* The index, filled up so that the fixed places begin on 16 bytes: the device reads them in words
 * side by side. */
static size_t oo__index_bytes(size_t count) {
    return (sizeof(uint32_t) * (oo__blocks(count) + 1) + 15) / 16 * 16;
}

size_t oo_codec_room(enum oo_codec_kind kind, size_t count) {
    return OO_CODEC_HEADER + oo__index_bytes(count) +
           oo__blocks(count) * OO_CODEC_BLOCK * oo_codec_weight_bytes(kind);
}

/* The fixed place of a block, in bytes. */
static size_t oo__fixed(const struct oo_codec_header *header) {
    return (size_t)OO_CODEC_BLOCK / 8 * header->low_bits + sizeof(uint32_t) * OO_PLANES;
}

/* Words of a raw block's tail: what its fixed place has no room for. */
static unsigned oo__raw_words(const struct oo_codec_header *header) {
    const size_t block = OO_CODEC_BLOCK * oo__width(header->kind);
    return (unsigned)((block - oo__fixed(header)) / sizeof(uint32_t));
}

static size_t oo__payload(const struct oo_codec_header *header) {
    if (header->mode == OO_CODEC_RAW)
        return header->count * oo__width(header->kind);
    if (header->mode == OO_CODEC_TIERS)
        return oo__index_bytes(header->count) + oo__blocks(header->count) * oo__fixed(header) +
               sizeof(uint32_t) * header->tail_words;
    return 0;
}

/* ---- the palette ---- */

static unsigned oo__rotate(unsigned kind) { return kind == OO_CODEC_FP8; }

/* The bits that are above the low ones; of one-byte weights, all of them. */
static unsigned oo__upper(unsigned kind, const void *weights, size_t at) {
    if (kind == OO_CODEC_BF16)
        return ((const uint16_t *)weights)[at] >> 7 & 255u;
    const unsigned weight = ((const uint8_t *)weights)[at], rotate = oo__rotate(kind);
    return (weight << rotate | weight >> (8 - rotate)) & 255u;
}

static void oo__count_symbols(unsigned kind, const void *weights, size_t count, uint32_t *counts) {
    const size_t every = oo__blocks(count) > (size_t)8 * OO_SAMPLED ? OO_SAMPLED : 1;
    const size_t step = every * OO_CODEC_BLOCK;
    memset(counts, 0, sizeof *counts * 256);
    for (size_t block = 0; block < count; block += step) {
        const size_t left = count - block;
        for (size_t i = 0; i < (left < OO_CODEC_BLOCK ? left : OO_CODEC_BLOCK); i++)
            counts[oo__upper(kind, weights, block + i)]++;
    }
}

/* Put the most frequent symbols into the tiers. Returns the bits that the counted weights' symbols
 * take. */
static uint64_t oo__choose(const uint32_t *counts, struct oo_palette *palette) {
    static const uint8_t places[] = {0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14};
    uint8_t taken[256] = {0};
    uint64_t bits = 0;
    memset(palette->code, 3 | 3 << 2 | 7 << 4, sizeof palette->code);
    memset(palette->symbols, 0, sizeof palette->symbols);
    for (size_t i = 0; i < sizeof places; i++) {
        unsigned most = 0;
        while (taken[most])
            most++;
        for (unsigned symbol = most; symbol < 256; symbol++)
            if (!taken[symbol] && counts[symbol] > counts[most])
                most = symbol;
        const unsigned tier = places[i] >> 2, code = places[i] & (tier < 2 ? 3 : 7);
        taken[most] = 1;
        palette->symbols[places[i]] = (uint8_t)most;
        palette->code[most] = (uint8_t)(tier == 0   ? code
                                        : tier == 1 ? 3 | code << 2
                                                    : 3 | 3 << 2 | code << 4);
        bits += (uint64_t)counts[most] * (tier == 0 ? 2 : tier == 1 ? 4 : 7);
    }
    for (unsigned symbol = 0; symbol < 256; symbol++)
        bits += taken[symbol] ? 0 : (uint64_t)counts[symbol] * 15;
    return bits;
}

/* Of one-byte weights, take as many low bits as cost least. */
static void oo__choose_low(const uint32_t *counts, struct oo_codec_header *header,
                           struct oo_palette *palette) {
    uint64_t least = UINT64_MAX, weights = 0;
    for (unsigned symbol = 0; symbol < 256; symbol++)
        weights += counts[symbol];
    for (unsigned low = OO_LOW_LEAST; low <= OO_LOW_MOST; low++) {
        struct oo_palette tried;
        uint32_t folded[256] = {0};
        for (unsigned symbol = 0; symbol < 256; symbol++)
            folded[symbol >> low] += counts[symbol];
        const uint64_t bits = oo__choose(folded, &tried) + low * weights;
        if (bits < least) {
            least = bits;
            header->low_bits = (uint8_t)low;
            *palette = tried;
        }
    }
}

/* ---- a block ---- */

static void oo__split(const struct oo_codec *codec, const struct oo_codec_header *header,
                      const void *weights, uint8_t *symbols, uint32_t *low) {
    if (header->kind == OO_CODEC_BF16)
        codec->split_words(weights, symbols, (uint8_t *)low);
    else
        codec->split_bytes(weights, oo__rotate(header->kind), header->low_bits, symbols, low);
}

static void oo__join(const struct oo_codec *codec, const struct oo_codec_header *header,
                     const uint8_t *symbols, const uint32_t *low, void *weights) {
    if (header->kind == OO_CODEC_BF16)
        codec->join_words(symbols, (const uint8_t *)low, weights);
    else
        codec->join_bytes(symbols, oo__rotate(header->kind), header->low_bits, low, weights);
}

/* A block's bytes outside the chunk, where they are aligned and have slack. */
struct oo_block_bytes {
    uint32_t fixed[(OO_CODEC_BLOCK + sizeof(uint32_t) * OO_PLANES) / sizeof(uint32_t)];
    uint32_t tail[OO_TAIL_ROOM];
    uint8_t symbols[OO_CODEC_BLOCK];
};

static uint32_t *oo__planes(const struct oo_codec_header *header, struct oo_block_bytes *bytes) {
    return bytes->fixed + (size_t)OO_CODEC_BLOCK / 32 * header->low_bits;
}

/* Returns the words of the tail, with oo__raw_block where the block is stored as it is. */
static uint32_t oo__encode_block(const struct oo_codec *codec, const struct oo_codec_header *header,
                                 const struct oo_palette *palette, const void *weights,
                                 struct oo_block_bytes *bytes) {
    const unsigned most = oo__raw_words(header);
    unsigned n_raw;
    oo__split(codec, header, weights, bytes->symbols, bytes->fixed);
    const unsigned bits =
        codec->encode(bytes->symbols, palette, oo__planes(header, bytes), bytes->tail, &n_raw);
    if ((bits + 31) / 32 < most && n_raw <= OO_RAW_MOST)
        return (bits + 31) / 32;
    const size_t fixed = oo__fixed(header);
    memcpy(bytes->fixed, weights, fixed);
    memcpy(bytes->tail, (const char *)weights + fixed, sizeof(uint32_t) * most);
    return most | oo__raw_block;
}

/* 0: not what an encoder writes. */
static int oo__decode_block(const struct oo_codec *codec, const struct oo_codec_header *header,
                            uint32_t words, struct oo_block_bytes *bytes, void *weights) {
    if (words & oo__raw_block) {
        const unsigned most = oo__raw_words(header);
        const size_t fixed = oo__fixed(header);
        if ((words & ~oo__raw_block) != most)
            return 0;
        memcpy(weights, bytes->fixed, fixed);
        memcpy((char *)weights + fixed, bytes->tail, sizeof(uint32_t) * most);
        return 1;
    }
    if (!codec->decode(oo__planes(header, bytes), bytes->tail, words, header->palette,
                       bytes->symbols))
        return 0;
    oo__join(codec, header, bytes->symbols, bytes->fixed, weights);
    return 1;
}

/* ---- a chunk ---- */

/* Where the parts of a chunk begin. */
struct oo_parts {
    size_t index, fixed, tails;
};

static struct oo_parts oo__parts(const struct oo_codec_header *header) {
    const size_t blocks = oo__blocks(header->count);
    struct oo_parts parts = {.index = OO_CODEC_HEADER};
    parts.fixed = parts.index + oo__index_bytes(header->count);
    parts.tails = parts.fixed + blocks * oo__fixed(header);
    return parts;
}

static uint64_t oo__checksum(const struct oo_codec_header *header, const char *payload,
                             size_t bytes) {
    struct {
        struct oo_codec_header header;
        uint64_t payload;
    } all = {*header, oo__fingerprint(payload, bytes, OO_WHOLE)};
    all.header.checksum = 0;
    return oo__fingerprint(&all, sizeof all, OO_WHOLE);
}

static int oo__constant(const void *weights, size_t bytes, size_t weight_bytes) {
    const char *begin = weights;
    return !memcmp(begin, begin + weight_bytes, bytes - weight_bytes);
}

/* Code all blocks into `out`; whether that pays: less than 97% of the weights as they are. */
static enum oo_status oo__encode_tiers(const struct oo_codec *codec, struct oo_codec_header *header,
                                       const struct oo_palette *palette, const char *weights,
                                       char *out, int *pays) {
    const size_t width = oo__width(header->kind), fixed = oo__fixed(header);
    const size_t blocks = oo__blocks(header->count), bytes = header->count * width;
    const struct oo_parts parts = oo__parts(header);
    struct oo_block_bytes block;
    char last[2 * OO_CODEC_BLOCK], again[2 * OO_CODEC_BLOCK];
    uint32_t at = 0;
    *pays = 0;
    for (size_t i = 0; i < blocks; i++) {
        const char *begin = weights + i * OO_CODEC_BLOCK * width;
        const size_t left = bytes - i * OO_CODEC_BLOCK * width;
        if (left < OO_CODEC_BLOCK * width) { /* filled up with its first weight */
            for (size_t k = 0; k < OO_CODEC_BLOCK * width; k++)
                last[k] = begin[k < left ? k : k % width];
            begin = last;
        }
        const uint32_t words = oo__encode_block(codec, header, palette, begin, &block);
        const uint32_t entry = at | (words & oo__raw_block);
        const size_t tail = sizeof(uint32_t) * (words & ~oo__raw_block);
        memcpy(out + parts.index + sizeof entry * i, &entry, sizeof entry);
        memcpy(out + parts.fixed + fixed * i, block.fixed, fixed);
        memcpy(out + parts.tails + sizeof(uint32_t) * at, block.tail, tail);
        at += words & ~oo__raw_block;
        memset(block.symbols, 0, sizeof block.symbols); /* so that it is the code that is read */
        if (!oo__decode_block(codec, header, words, &block, again) ||
            memcmp(again, begin, OO_CODEC_BLOCK * width) != 0)
            return oo__fail(OO_E_STATE,
                            "block %zu of %zu weights is not what was encoded: "
                            "this machine's memory or processor is faulty",
                            i, (size_t)header->count);
    }
    memset(out + parts.index + sizeof at * blocks, 0,
           parts.fixed - parts.index - sizeof at * blocks);
    memcpy(out + parts.index + sizeof at * blocks, &at, sizeof at);
    header->tail_words = at;
    *pays = oo__payload(header) < bytes - bytes / 32;
    return OO_OK;
}

enum oo_status oo_codec_encode(const struct oo_codec *codec, enum oo_codec_kind kind,
                               const void *weights, size_t count, void *out, size_t *bytes) {
    enum oo_status status = OO_OK;
    const size_t width = oo__width(kind);
    struct oo_codec_header header = {.magic = oo__magic, .kind = (uint8_t)kind, .low_bits = 8};
    struct oo_palette palette;
    uint32_t counts[256];
    int pays;
    if (!oo__known(kind) || count == 0 || count > OO_CODEC_CHUNK)
        return oo__fail(OO_E_ARGUMENT, "a chunk of %zu weights of kind %d; 1 to %d of kinds 1 to 3",
                        count, (int)kind, OO_CODEC_CHUNK);
    header.version = OO_VERSION;
    header.count = (uint32_t)count;
    if (oo__constant(weights, count * width, width)) {
        header.mode = OO_CODEC_CONST;
        memcpy(&header.constant, weights, width);
    } else {
        header.mode = OO_CODEC_TIERS;
        oo__count_symbols(kind, weights, count, counts);
        if (kind == OO_CODEC_BF16)
            (void)oo__choose(counts, &palette);
        else
            oo__choose_low(counts, &header, &palette);
        memcpy(header.palette, palette.symbols, sizeof header.palette);
        OO_TRY(oo__encode_tiers(codec, &header, &palette, weights, out, &pays));
        if (!pays) {
            header = (struct oo_codec_header){.magic = oo__magic, .kind = (uint8_t)kind};
            header.version = OO_VERSION;
            header.mode = OO_CODEC_RAW;
            header.count = (uint32_t)count;
            memcpy((char *)out + OO_CODEC_HEADER, weights, count * width);
        }
    }
    *bytes = OO_CODEC_HEADER + oo__payload(&header);
    header.checksum =
        oo__checksum(&header, (char *)out + OO_CODEC_HEADER, *bytes - OO_CODEC_HEADER);
    memcpy(out, &header, sizeof header);
done:
    return status;
}

static int oo__low_bits_are_known(const struct oo_codec_header *header) {
    if (header->mode != OO_CODEC_TIERS)
        return 1;
    if (header->kind == OO_CODEC_BF16)
        return header->low_bits == 8;
    return header->low_bits >= OO_LOW_LEAST && header->low_bits <= OO_LOW_MOST;
}

enum oo_status oo_codec_find(const void *chunk, size_t room, struct oo_codec_header *header,
                             size_t *bytes) {
    if (room < OO_CODEC_HEADER)
        return oo__fail(OO_E_ARGUMENT, "%zu bytes are no chunk: its header alone has %d", room,
                        OO_CODEC_HEADER);
    memcpy(header, chunk, sizeof *header);
    if (header->magic != oo__magic || header->version != OO_VERSION)
        return oo__fail(OO_E_ARGUMENT, "a chunk begins with %08x, version %u; not %08x, %u",
                        (unsigned)header->magic, header->version, (unsigned)oo__magic, OO_VERSION);
    if (!oo__known(header->kind) || header->mode < OO_CODEC_RAW || header->mode > OO_CODEC_CONST ||
        header->count == 0 || header->count > OO_CODEC_CHUNK || !oo__low_bits_are_known(header))
        return oo__fail(OO_E_ARGUMENT,
                        "no encoder writes kind %u, mode %u, %u low bits, %u weights", header->kind,
                        header->mode, header->low_bits, (unsigned)header->count);
    *bytes = OO_CODEC_HEADER + oo__payload(header);
    if (*bytes > room)
        return oo__fail(OO_E_ARGUMENT, "a chunk of %zu bytes whose header says %zu", room, *bytes);
    return OO_OK;
}

enum oo_status oo_codec_read(const void *chunk, size_t bytes, struct oo_codec_header *header) {
    size_t whole = 0;
    enum oo_status status = oo_codec_find(chunk, bytes, header, &whole);
    if (status == OO_OK && whole != bytes)
        status =
            oo__fail(OO_E_ARGUMENT, "a chunk of %zu bytes whose header says %zu", bytes, whole);
    return status;
}

static enum oo_status oo__check_sum(const struct oo_codec_header *header, const char *chunk,
                                    size_t bytes) {
    if (oo__checksum(header, chunk + OO_CODEC_HEADER, bytes - OO_CODEC_HEADER) == header->checksum)
        return OO_OK;
    return oo__fail(OO_E_ARGUMENT, "corrupt: a chunk's checksum is not %016llx",
                    (unsigned long long)header->checksum);
}

enum oo_status oo_codec_check(const void *chunk, size_t bytes) {
    struct oo_codec_header header = {0};
    enum oo_status status = oo_codec_read(chunk, bytes, &header);
    return status == OO_OK ? oo__check_sum(&header, chunk, bytes) : status;
}

static enum oo_status oo__decode_tiers(const struct oo_codec *codec,
                                       const struct oo_codec_header *header, const char *chunk,
                                       char *weights) {
    const size_t width = oo__width(header->kind), fixed = oo__fixed(header);
    const size_t blocks = oo__blocks(header->count), bytes = header->count * width;
    const struct oo_parts parts = oo__parts(header);
    struct oo_block_bytes block;
    char last[2 * OO_CODEC_BLOCK] = {0};
    uint32_t here, next;
    memcpy(&here, chunk + parts.index, sizeof here);
    if ((here & ~oo__raw_block) != 0)
        return oo__fail(OO_E_ARGUMENT, "corrupt: the first block's tail begins at word %u",
                        (unsigned)here);
    for (size_t i = 0; i < blocks; i++, here = next) {
        const size_t left = bytes - i * OO_CODEC_BLOCK * width;
        char *to = left < OO_CODEC_BLOCK * width ? last : weights + i * OO_CODEC_BLOCK * width;
        memcpy(&next, chunk + parts.index + sizeof next * (i + 1), sizeof next);
        const uint32_t begin = here & ~oo__raw_block, end = next & ~oo__raw_block;
        /* An end before its beginning is far behind it, too. */
        if (end - begin > OO_TAIL_WORDS || end > header->tail_words)
            return oo__fail(OO_E_ARGUMENT, "corrupt: the tail of block %zu goes from word %u to %u",
                            i, (unsigned)begin, (unsigned)end);
        memcpy(block.fixed, chunk + parts.fixed + fixed * i, fixed);
        memcpy(block.tail, chunk + parts.tails + sizeof(uint32_t) * begin,
               sizeof(uint32_t) * (end - begin));
        memset(block.tail + (end - begin), 0, sizeof(uint32_t) * 4);
        if (!oo__decode_block(codec, header, (end - begin) | (here & oo__raw_block), &block, to))
            return oo__fail(OO_E_ARGUMENT, "corrupt: block %zu has a tail of %u words", i,
                            (unsigned)(end - begin));
        if (to == last)
            memcpy(weights + i * OO_CODEC_BLOCK * width, last, left);
    }
    if (here != header->tail_words)
        return oo__fail(OO_E_ARGUMENT, "corrupt: the tails end at word %u of %u", (unsigned)here,
                        (unsigned)header->tail_words);
    return OO_OK;
}

enum oo_status oo_codec_decode(const struct oo_codec *codec, const void *chunk, size_t bytes,
                               int verify, enum oo_codec_kind kind, void *weights, size_t count) {
    enum oo_status status;
    struct oo_codec_header header = {0};
    const char *payload = (const char *)chunk + OO_CODEC_HEADER;
    OO_TRY(oo_codec_read(chunk, bytes, &header));
    if (header.count != count || header.kind != kind)
        return oo__fail(OO_E_ARGUMENT, "a chunk of %u weights of kind %u, not %zu of kind %d",
                        (unsigned)header.count, header.kind, count, (int)kind);
    if (verify)
        OO_TRY(oo__check_sum(&header, chunk, bytes));
    const size_t width = oo__width(header.kind);
    if (header.mode == OO_CODEC_RAW) {
        memcpy(weights, payload, count * width);
    } else if (header.mode == OO_CODEC_CONST) {
        for (size_t i = 0; i < count; i++)
            memcpy((char *)weights + i * width, &header.constant, width);
    } else {
        status = oo__decode_tiers(codec, &header, chunk, weights);
    }
done:
    return status;
}
