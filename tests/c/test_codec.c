/* Coded weights: every implementation gives back the bits, and writes the bytes of the plain one;
 * what is corrupt is an error or the same bits. */
#include "check.h"
#include "codec_block.h"
#include "weights.h"

#include <stdint.h>

enum { MOST = 9 * OO_CODEC_BLOCK + 77 };

static const char *const names[] = {"portable", "avx2", "avx512"};
static const enum oo_codec_kind kinds[] = {OO_CODEC_BF16, OO_CODEC_FP8, OO_CODEC_INT8};

struct chunk {
    char *weights, *coded, *decoded;
    size_t bytes, coded_bytes; /* of the weights, of the chunk */
};

static struct chunk make(enum oo_codec_kind kind, size_t count) {
    const size_t bytes = count * oo_codec_weight_bytes(kind);
    struct chunk chunk = {malloc(bytes), malloc(oo_codec_room(kind, count)), malloc(bytes), bytes,
                          0};
    memset(chunk.coded, 0xA5, oo_codec_room(kind, count));
    return chunk;
}

static void drop(const struct chunk *chunk) {
    free(chunk->weights);
    free(chunk->coded);
    free(chunk->decoded);
}

static void need(enum oo_status status, const char *what) {
    CHECK(status == OO_OK, "%s: %s", what, oo_error_message());
}

/* Encode and decode with every implementation; leaves the plain one's chunk. */
static void round_trip(enum oo_codec_kind kind, size_t count, struct chunk *chunk) {
    size_t bytes;
    char *other = malloc(oo_codec_room(kind, count));
    need(oo_codec_encode(oo_codec_named("portable"), kind, chunk->weights, count, chunk->coded,
                         &chunk->coded_bytes),
         "encode");
    CHECK(chunk->coded_bytes <= chunk->bytes + 64, "%zu bytes of %zu", chunk->coded_bytes,
          chunk->bytes);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct oo_codec *codec = oo_codec_named(names[i]);
        if (!codec)
            continue;
        need(oo_codec_encode(codec, kind, chunk->weights, count, other, &bytes), names[i]);
        CHECK(bytes == chunk->coded_bytes && !memcmp(other, chunk->coded, bytes),
              "%s writes other bytes than the plain one: %zu, %zu", names[i], bytes,
              chunk->coded_bytes);
        for (int verify = 0; verify < 2; verify++) {
            memset(chunk->decoded, 0x5A, chunk->bytes);
            need(oo_codec_decode(codec, chunk->coded, chunk->coded_bytes, verify, kind,
                                 chunk->decoded, count),
                 names[i]);
            CHECK(!memcmp(chunk->decoded, chunk->weights, chunk->bytes), "%s: other bits",
                  names[i]);
        }
    }
    free(other);
}

static struct oo_codec_header header_of(const struct chunk *chunk) {
    struct oo_codec_header header;
    need(oo_codec_read(chunk->coded, chunk->coded_bytes, &header), "read");
    return header;
}

/* ---- cases ---- */

/* The compiler's library answers the same question, where there is one: for zig there is none. */
CASE(an_implementation_is_there_where_the_processor_has_its_instructions) {
#if defined(__x86_64__) && !defined(_WIN32)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                     __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512vbmi") &&
                       __builtin_cpu_supports("avx512vbmi2");
    CHECK((oo_codec_named("avx2") != NULL) == avx2, "avx2: %d", avx2);
    CHECK((oo_codec_named("avx512") != NULL) == avx512, "avx512: %d", avx512);
#endif
    CHECK(oo_codec_named("portable") != NULL, "the plain one");
}

CASE(every_implementation_gives_back_the_bits) {
    static const size_t counts[] = {1, 2, 31, 1023, 1024, 1025, 3000, 8192, MOST};
    seed = 1;
    for (size_t k = 0; k < 3; k++)
        for (int what = 0; what < N_WHAT; what++)
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                struct chunk chunk = make(kinds[k], counts[i]);
                draw_weights(kinds[k], (enum what)what, counts[i], chunk.weights);
                round_trip(kinds[k], counts[i], &chunk);
                drop(&chunk);
            }
}

CASE(each_byte_of_either_half_is_a_symbol) {
    struct chunk chunk = make(OO_CODEC_BF16, 65536);
    for (size_t i = 0; i < 65536; i++)
        ((uint16_t *)(void *)chunk.weights)[i] = (uint16_t)(i * 40503); /* each once, mixed */
    round_trip(OO_CODEC_BF16, 65536, &chunk);
    drop(&chunk);
}

/* Shares of the weights' bytes; the goal for locked memory is 0.69, and 0.70 for Student's. */
CASE(trained_weights_become_smaller) {
    enum { COUNT = 1 << 18 };
    static const struct {
        enum oo_codec_kind kind;
        enum what what;
        double most;
    } rows[] = {
        {OO_CODEC_BF16, GAUSSIAN, 0.675}, {OO_CODEC_BF16, ROWS, 0.682},
        {OO_CODEC_BF16, STUDENT, 0.690},  {OO_CODEC_BF16, HALF_ZEROS, 0.67},
        {OO_CODEC_FP8, GAUSSIAN, 0.87},   {OO_CODEC_INT8, GAUSSIAN, 0.75},
    };
    seed = 2;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct chunk chunk = make(rows[i].kind, COUNT);
        draw_weights(rows[i].kind, rows[i].what, COUNT, chunk.weights);
        round_trip(rows[i].kind, COUNT, &chunk);
        CHECK((double)chunk.coded_bytes <= rows[i].most * (double)chunk.bytes, "row %zu: %.4f", i,
              (double)chunk.coded_bytes / (double)chunk.bytes);
        CHECK(header_of(&chunk).mode == OO_CODEC_TIERS, "row %zu", i);
        drop(&chunk);
    }
}

CASE(what_has_no_pattern_stays_as_it_is) {
    seed = 3;
    for (size_t k = 0; k < 3; k++) {
        struct chunk chunk = make(kinds[k], MOST);
        draw_weights(kinds[k], RANDOM, MOST, chunk.weights);
        round_trip(kinds[k], MOST, &chunk);
        CHECK(header_of(&chunk).mode == OO_CODEC_RAW && chunk.coded_bytes == chunk.bytes + 64,
              "%zu bytes of %zu", chunk.coded_bytes, chunk.bytes);
        drop(&chunk);
    }
}

/* One block in a chunk that has no pattern costs its own bytes, not the chunk's. */
CASE(a_block_without_a_pattern_is_raw_alone) {
    seed = 4;
    for (size_t k = 0; k < 3; k++) {
        struct chunk chunk = make(kinds[k], 8 * OO_CODEC_BLOCK), plain = make(kinds[k], 8192);
        const size_t block = OO_CODEC_BLOCK * oo_codec_weight_bytes(kinds[k]);
        draw_weights(kinds[k], GAUSSIAN, 8192, plain.weights);
        memcpy(chunk.weights, plain.weights, chunk.bytes);
        draw_weights(kinds[k], RANDOM, OO_CODEC_BLOCK, chunk.weights + 3 * block);
        round_trip(kinds[k], 8192, &chunk);
        round_trip(kinds[k], 8192, &plain);
        CHECK(header_of(&chunk).mode == OO_CODEC_TIERS, "mode %u", header_of(&chunk).mode);
        CHECK(chunk.coded_bytes > plain.coded_bytes &&
                  chunk.coded_bytes < plain.coded_bytes + block,
              "%zu and %zu bytes", chunk.coded_bytes, plain.coded_bytes);
        drop(&chunk);
        drop(&plain);
    }
}

CASE(a_chunk_of_one_value_is_its_header) {
    for (size_t k = 0; k < 3; k++) {
        struct chunk chunk = make(kinds[k], MOST);
        memset(chunk.weights, 0x3E, chunk.bytes);
        round_trip(kinds[k], MOST, &chunk);
        CHECK(chunk.coded_bytes == 64 && header_of(&chunk).mode == OO_CODEC_CONST, "%zu bytes",
              chunk.coded_bytes);
        chunk.weights[chunk.bytes - 1] ^= 1;
        round_trip(kinds[k], MOST, &chunk);
        CHECK(header_of(&chunk).mode == OO_CODEC_TIERS, "mode %u", header_of(&chunk).mode);
        drop(&chunk);
    }
}

/* Of one-byte weights so many low bits are stored unchanged as cost least: the wider the weights
 * are spread, the more low bits. */
CASE(wider_weights_have_more_low_bits) {
    seed = 14;
    for (unsigned low = 2; low <= 5; low++) {
        struct chunk chunk = make(OO_CODEC_INT8, 8192);
        for (size_t i = 0; i < 8192; i++)
            chunk.weights[i] = (char)(draw() % (4u << low));
        round_trip(OO_CODEC_INT8, 8192, &chunk);
        CHECK(header_of(&chunk).mode == OO_CODEC_TIERS && header_of(&chunk).low_bits == low,
              "%u low bits, not %u", header_of(&chunk).low_bits, low);
        drop(&chunk);
    }
}

/* Weights of integers alone, the same on every machine; in some blocks they are larger. */
static void fill_exactly(enum oo_codec_kind kind, size_t count, char *weights) {
    for (size_t i = 0; i < count; i++) {
        const uint64_t drawn = draw();
        const unsigned block = (unsigned)(i / OO_CODEC_BLOCK);
        unsigned zeros = 0; /* each one more is half as frequent */
        while (zeros < 15 && !(drawn >> zeros & 1))
            zeros++;
        if (kind == OO_CODEC_BF16)
            ((uint16_t *)(void *)weights)[i] =
                (uint16_t)((drawn >> 56) << 15 | (120 - zeros + block % 3) << 7 | drawn >> 57);
        else if (kind == OO_CODEC_FP8)
            weights[i] = (char)((drawn >> 63) << 7 | (15 - zeros) << 3 | (drawn >> 60 & 7));
        else
            weights[i] =
                (char)((drawn >> 20 & 15) + (drawn >> 30 & 15) - (drawn >> 40 & 15) - block % 3);
    }
}

/* What one version of the engine coded another one reads, and an encoder that decides in another
 * way has been changed on purpose: then these numbers change, too. */
CASE(the_same_weights_are_always_coded_as_the_same_bytes) {
    enum { COUNT = 70 * OO_CODEC_BLOCK + 5 };
    static const struct {
        size_t bytes;
        uint64_t hash;
    } rows[] = {
        {97652, 0xFB0DE44DA041A30C}, {56908, 0x6B27F5EBDC9B5539}, {48980, 0x8E057796C10FF923}};
    seed = 13;
    for (size_t k = 0; k < 3; k++) {
        struct chunk chunk = make(kinds[k], COUNT);
        uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
        fill_exactly(kinds[k], COUNT, chunk.weights);
        round_trip(kinds[k], COUNT, &chunk);
        for (size_t i = 0; i < chunk.coded_bytes; i++)
            hash = (hash ^ (uint8_t)chunk.coded[i]) * 0x100000001B3u;
        CHECK(chunk.coded_bytes == rows[k].bytes && hash == rows[k].hash,
              "kind %d: %zu bytes of %zu, 0x%016llX", (int)kinds[k], chunk.coded_bytes, chunk.bytes,
              (unsigned long long)hash);
        drop(&chunk);
    }
}

CASE(what_no_chunk_can_hold_is_refused) {
    struct chunk chunk = make(OO_CODEC_BF16, 8);
    size_t bytes;
    const struct oo_codec *codec = oo_codec_best();
    memset(chunk.weights, 0, chunk.bytes);
    CHECK(oo_codec_encode(codec, OO_CODEC_BF16, chunk.weights, 0, chunk.coded, &bytes) ==
              OO_E_ARGUMENT,
          "no weights");
    CHECK(oo_codec_encode(codec, OO_CODEC_BF16, chunk.weights, OO_CODEC_CHUNK + 1, chunk.coded,
                          &bytes) == OO_E_ARGUMENT,
          "too many");
    CHECK(oo_codec_encode(codec, 0, chunk.weights, 8, chunk.coded, &bytes) == OO_E_ARGUMENT,
          "kind");
    CHECK(oo_codec_encode(codec, 4, chunk.weights, 8, chunk.coded, &bytes) == OO_E_ARGUMENT,
          "kind");
    need(oo_codec_encode(codec, OO_CODEC_BF16, chunk.weights, 8, chunk.coded, &bytes), "encode");
    CHECK(oo_codec_decode(codec, chunk.coded, bytes, 0, OO_CODEC_BF16, chunk.decoded, 7) ==
              OO_E_ARGUMENT,
          "another count");
    CHECK(oo_codec_decode(codec, chunk.coded, bytes, 0, OO_CODEC_INT8, chunk.decoded, 8) ==
              OO_E_ARGUMENT,
          "another kind");
    CHECK(!oo_codec_named("none") && !strcmp(oo_codec_name(oo_codec_named("portable")), "portable"),
          "names");
    CHECK(oo_codec_named(oo_codec_name(codec)) == codec, "the best has a name");
    drop(&chunk);
}

/* ---- what is corrupt ---- */

/* Decode what was changed. Nothing may say that it is right, and be wrong, when it is verified. */
static void verify_changed(const struct chunk *chunk, enum oo_codec_kind kind, size_t count,
                           const char *changed, const char *what, size_t at) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct oo_codec *codec = oo_codec_named(names[i]);
        if (codec && oo_codec_decode(codec, changed, chunk->coded_bytes, 1, kind, chunk->decoded,
                                     count) != OO_E_ARGUMENT)
            CHECK(memcmp(chunk->decoded, chunk->weights, chunk->bytes) == 0,
                  "%s %zu: wrong weights without an error (%s)", what, at, names[i]);
    }
}

/* The same without a checksum, in exactly as many bytes as there are, so that sanitizers see reads
 * and writes outside. */
static void trust_changed(const struct chunk *chunk, enum oo_codec_kind kind, size_t count,
                          const char *changed) {
    char *exact = malloc(chunk->coded_bytes), *out = malloc(chunk->bytes);
    memcpy(exact, changed, chunk->coded_bytes);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (oo_codec_named(names[i]))
            (void)oo_codec_decode(oo_codec_named(names[i]), exact, chunk->coded_bytes, 0, kind, out,
                                  count);
    free(exact);
    free(out);
}

static void flip(char *bytes, size_t bit) {
    ((uint8_t *)bytes)[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

/* What the chunks of a kind have had. */
struct seen {
    unsigned modes[OO_CODEC_CONST + 1], tiers[4]; /* the last: symbols of no tier */
    unsigned raw_blocks;
};

/* The tier of a weight's symbol, from 0; 3 where it has none. */
static unsigned tier_of(const struct oo_codec_header *header, const char *weights, size_t at) {
    unsigned symbol = (uint8_t)weights[at];
    if (header->kind == OO_CODEC_BF16)
        symbol = ((const uint16_t *)(const void *)weights)[at] >> 7 & 255;
    else if (header->kind == OO_CODEC_FP8)
        symbol = (symbol << 1 | symbol >> 7) & 255;
    if (header->kind != OO_CODEC_BF16)
        symbol >>= header->low_bits;
    for (unsigned place = 0; place < 15; place++)
        if (place != 3 && place != 7 && header->palette[place] == symbol)
            return place / 4 > 1 ? 2 : place / 4;
    return 3;
}

static void look_at(const struct chunk *chunk, size_t count, struct seen *seen) {
    const struct oo_codec_header header = header_of(chunk);
    seen->modes[header.mode]++;
    for (size_t block = 0; header.mode == OO_CODEC_TIERS && block < count / OO_CODEC_BLOCK;
         block++) {
        uint32_t entry;
        memcpy(&entry, chunk->coded + OO_CODEC_HEADER + sizeof entry * block, sizeof entry);
        seen->raw_blocks += entry >> 31;
        for (size_t i = 0; !(entry >> 31) && i < OO_CODEC_BLOCK; i++)
            seen->tiers[tier_of(&header, chunk->weights, OO_CODEC_BLOCK * block + i)]++;
    }
}

/* Chunks of each mode; their blocks have symbols of each tier, and of none, and one is raw. */
CASE(each_bit_of_a_chunk_is_watched) {
    static const enum what modes[] = {RARE, RANDOM, ZEROS};
    const size_t count = 8 * OO_CODEC_BLOCK;
    seed = 5;
    for (size_t k = 0; k < 3; k++) {
        struct seen seen = {0};
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
            struct chunk chunk = make(kinds[k], count);
            draw_weights(kinds[k], modes[i], count, chunk.weights);
            if (modes[i] == RARE)
                draw_weights(kinds[k], RANDOM, OO_CODEC_BLOCK, chunk.weights + 3 * chunk.bytes / 8);
            round_trip(kinds[k], count, &chunk);
            look_at(&chunk, count, &seen);
            for (size_t bit = 0; bit < 8 * chunk.coded_bytes; bit++) {
                flip(chunk.coded, bit);
                verify_changed(&chunk, kinds[k], count, chunk.coded, "bit", bit);
                if (bit < 8 * 96 || bit % 397 == 0) /* header and index, and some of each part */
                    trust_changed(&chunk, kinds[k], count, chunk.coded);
                flip(chunk.coded, bit);
            }
            drop(&chunk);
        }
        for (unsigned mode = OO_CODEC_RAW; mode <= OO_CODEC_CONST; mode++)
            CHECK(seen.modes[mode], "kind %d: no chunk of mode %u", (int)kinds[k], mode);
        for (unsigned tier = 0; tier < 4; tier++)
            CHECK(seen.tiers[tier], "kind %d: no symbol of tier %u", (int)kinds[k], tier);
        CHECK(seen.raw_blocks && seen.raw_blocks < 8, "kind %d: %u raw blocks", (int)kinds[k],
              seen.raw_blocks);
    }
}

/* 300 places of a full chunk; with ORACLE_OFFLOAD_TEST_FAULT_STRIDE=all, 10,000. */
CASE(flips_in_a_full_chunk_are_noticed) {
    const char *stride = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    const int turns = stride && strcmp(stride, "all") == 0 ? 10000 : 300;
    const struct oo_codec *codec = oo_codec_best();
    struct chunk chunk = make(OO_CODEC_BF16, OO_CODEC_CHUNK);
    seed = 12;
    draw_weights(OO_CODEC_BF16, GAUSSIAN, OO_CODEC_CHUNK, chunk.weights);
    need(oo_codec_encode(codec, OO_CODEC_BF16, chunk.weights, OO_CODEC_CHUNK, chunk.coded,
                         &chunk.coded_bytes),
         "encode");
    int noticed = 0;
    for (int turn = 0; turn < turns; turn++) {
        const size_t bit = draw() % (8 * chunk.coded_bytes);
        flip(chunk.coded, bit);
        if (oo_codec_decode(codec, chunk.coded, chunk.coded_bytes, 1, OO_CODEC_BF16, chunk.decoded,
                            OO_CODEC_CHUNK) == OO_E_ARGUMENT)
            noticed++;
        else
            CHECK(memcmp(chunk.decoded, chunk.weights, chunk.bytes) == 0, "bit %zu", bit);
        flip(chunk.coded, bit);
    }
    need(oo_codec_decode(codec, chunk.coded, chunk.coded_bytes, 1, OO_CODEC_BF16, chunk.decoded,
                         OO_CODEC_CHUNK),
         "unchanged");
    printf("%d flips noticed in a full chunk\n", noticed);
    drop(&chunk);
}

/* Whatever an index, a header and planes say. */
CASE(noise_in_a_chunk_stays_inside) {
    seed = 6;
    for (size_t k = 0; k < 3; k++) {
        const size_t count = 3 * OO_CODEC_BLOCK;
        struct chunk chunk = make(kinds[k], count);
        draw_weights(kinds[k], RARE, count, chunk.weights);
        round_trip(kinds[k], count, &chunk);
        char *changed = malloc(chunk.coded_bytes);
        for (size_t turn = 0; turn < 600; turn++) {
            memcpy(changed, chunk.coded, chunk.coded_bytes);
            const size_t begin = draw() % 3 ? draw() % 96 : draw() % chunk.coded_bytes;
            const size_t length = 1 + draw() % (turn % 2 ? 8 : 400);
            for (size_t i = begin; i < begin + length && i < chunk.coded_bytes; i++)
                changed[i] = (char)draw();
            verify_changed(&chunk, kinds[k], count, changed, "noise", turn);
            trust_changed(&chunk, kinds[k], count, changed);
        }
        free(changed);
        drop(&chunk);
    }
}

CASE(a_chunk_that_is_cut_off_is_refused) {
    struct chunk chunk = make(OO_CODEC_BF16, 3000);
    seed = 7;
    draw_weights(OO_CODEC_BF16, GAUSSIAN, 3000, chunk.weights);
    round_trip(OO_CODEC_BF16, 3000, &chunk);
    for (size_t bytes = 0; bytes < chunk.coded_bytes; bytes += 1 + bytes / 9) {
        char *part = malloc(bytes ? bytes : 1);
        memcpy(part, chunk.coded, bytes);
        CHECK(oo_codec_decode(oo_codec_best(), part, bytes, 0, OO_CODEC_BF16, chunk.decoded,
                              3000) == OO_E_ARGUMENT,
              "%zu bytes of it", bytes);
        free(part);
    }
    CHECK(oo_codec_decode(oo_codec_best(), chunk.coded, chunk.coded_bytes + 1, 0, OO_CODEC_BF16,
                          chunk.decoded, 3000) == OO_E_ARGUMENT,
          "a byte more");
    drop(&chunk);
}

/* ---- what is checked without a checksum ---- */

static void the_message_is(const char *begin, enum oo_status status, const char *what, size_t at) {
    CHECK(status == OO_E_ARGUMENT && !strncmp(oo_error_message(), begin, strlen(begin)),
          "%s %zu: %d, %s", what, at, (int)status, oo_error_message());
}

static enum oo_status decode(const struct chunk *chunk, enum oo_codec_kind kind, size_t count) {
    return oo_codec_decode(oo_codec_best(), chunk->coded, chunk->coded_bytes, 0, kind,
                           chunk->decoded, count);
}

static struct chunk eight_blocks(enum oo_codec_kind kind) {
    struct chunk chunk = make(kind, 8192);
    draw_weights(kind, GAUSSIAN, 8192, chunk.weights);
    round_trip(kind, 8192, &chunk);
    return chunk;
}

CASE(headers_that_no_encoder_writes_are_refused) {
    static const struct {
        size_t at;
        uint32_t value;
        size_t bytes;
        const char *message;
    } rows[] = {
        {0, 0x31434F4E, 4, "a chunk begins with"},
        {7, 2, 1, "a chunk begins with"},
        {4, 0, 1, "no encoder writes kind 0"},
        {4, 4, 1, "no encoder writes kind 4"},
        {5, 0, 1, "no encoder writes kind 3, mode 0"},
        {5, 4, 1, "no encoder writes kind 3, mode 4"},
        {6, 1, 1, "no encoder writes kind 3, mode 2, 1"},
        {6, 6, 1, "no encoder writes kind 3, mode 2, 6"},
        {8, 0, 4, "no encoder writes"},
        {8, OO_CODEC_CHUNK + 1, 4, "no encoder writes"},
        {12, 1, 4, "a chunk of "},
    };
    seed = 8;
    struct chunk chunk = eight_blocks(OO_CODEC_INT8), words = eight_blocks(OO_CODEC_BF16);
    char *whole = malloc(chunk.coded_bytes);
    memcpy(whole, chunk.coded, chunk.coded_bytes);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        memcpy(chunk.coded + rows[i].at, &rows[i].value, rows[i].bytes);
        the_message_is(rows[i].message, decode(&chunk, OO_CODEC_INT8, 8192), "header", i);
        memcpy(chunk.coded, whole, OO_CODEC_HEADER);
    }
    words.coded[6] = 7;
    the_message_is("no encoder writes kind 1, mode 2, 7", decode(&words, OO_CODEC_BF16, 8192),
                   "low bits", 7);
    free(whole);
    drop(&chunk);
    drop(&words);
}

CASE(an_index_that_leads_astray_is_refused) {
    seed = 9;
    struct chunk chunk = eight_blocks(OO_CODEC_BF16);
    uint32_t index[9], changed[9];
    memcpy(index, chunk.coded + OO_CODEC_HEADER, sizeof index);
    static const struct {
        size_t entry;
        int64_t value; /* negative: behind the one before it */
        const char *message;
    } rows[] = {
        {0, 1, "corrupt: the first block's tail begins at word 1"},
        {3, 0, "corrupt: the tail of block 2 goes from"},
        {8, -193, "corrupt: the tail of block 7 goes from"},
        {8, -192, "corrupt: the tail of block 7 goes from"}, /* not too long, but behind the end */
        {8, -1, "corrupt: block 7 has a tail of 1 words"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        memcpy(changed, index, sizeof changed);
        changed[rows[i].entry] = rows[i].value < 0
                                     ? index[rows[i].entry - 1] + (uint32_t)-rows[i].value
                                     : (uint32_t)rows[i].value;
        memcpy(chunk.coded + OO_CODEC_HEADER, changed, sizeof changed);
        the_message_is(rows[i].message, decode(&chunk, OO_CODEC_BF16, 8192), "index", i);
    }
    index[2] |= UINT32_C(1) << 31;
    memcpy(chunk.coded + OO_CODEC_HEADER, index, sizeof index);
    the_message_is("corrupt: block 2 has a tail of", decode(&chunk, OO_CODEC_BF16, 8192), "raw", 2);
    index[2] &= ~(UINT32_C(1) << 31);
    index[8] -= 1; /* as long as the last block may be, and shorter than the chunk */
    memcpy(chunk.coded + OO_CODEC_HEADER, index, sizeof index);
    CHECK(decode(&chunk, OO_CODEC_BF16, 8192) == OO_E_ARGUMENT, "a tail that ends early");
    drop(&chunk);
}

/* Only the checksum tells; it is asked for. */
CASE(a_flipped_low_bit_shows_when_it_is_verified) {
    seed = 10;
    struct chunk chunk = eight_blocks(OO_CODEC_BF16);
    chunk.coded[OO_CODEC_HEADER + 12 * 4] ^=
        1; /* the first weight's, behind nine entries filled up */
    need(decode(&chunk, OO_CODEC_BF16, 8192), "not verified");
    CHECK(chunk.decoded[1] == (chunk.weights[1] ^ (char)0x80), "the sign of the first weight");
    the_message_is("corrupt: a chunk's checksum is not",
                   oo_codec_decode(oo_codec_best(), chunk.coded, chunk.coded_bytes, 1,
                                   OO_CODEC_BF16, chunk.decoded, 8192),
                   "verified", 0);
    drop(&chunk);
}

/* What one lane may have to put right one by one is bounded: beyond that the block is raw. */
CASE(a_block_with_many_symbols_of_no_tier_is_raw) {
    for (int n = 64; n <= 65; n++) {
        struct chunk chunk = make(OO_CODEC_BF16, 8192);
        uint16_t *weights = (uint16_t *)(void *)chunk.weights;
        for (size_t i = 0; i < 8192; i++) /* thirteen exponents, as often as each other */
            weights[i] = (uint16_t)((100 + i % 13) << 7);
        for (int i = 0; i < n; i++)
            weights[2048 + 15 * i] = 0x4480;
        round_trip(OO_CODEC_BF16, 8192, &chunk);
        uint32_t index[9];
        memcpy(index, chunk.coded + OO_CODEC_HEADER, sizeof index);
        CHECK(index[2] >> 31 == (n > 64), "%d of them: index %08x", n, index[2]);
        CHECK(index[1] >> 31 == 0 && index[3] >> 31 == 0, "and no other");
        drop(&chunk);
    }
}

/* A tail of as many words as a raw block's has saves nothing. */
CASE(a_block_whose_tail_saves_nothing_is_raw) {
    static const struct {
        int third, second; /* of the weights of one block: five bits of its tail, and two */
        uint32_t raw;
    } rows[] = {{402, 3, 0}, {403, 1, 1}}; /* 63 words, and one bit more */
    seed = 15;
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        struct chunk chunk = make(OO_CODEC_INT8, 8192);
        for (size_t i = 0; i < 8192; i++) { /* three symbols often, three less so, and one seldom */
            const size_t turn = i % 25, symbol = turn < 15 ? turn / 5 : 3 + (turn - 15) / 3;
            chunk.weights[i] = (char)(32 * symbol + draw() % 16);
        }
        for (int i = 0; i < OO_CODEC_BLOCK; i++) {
            const int third = i < rows[row].third, second = i - rows[row].third < rows[row].second;
            chunk.weights[2 * OO_CODEC_BLOCK + i] = (char)(third ? 6 * 32 : second ? 3 * 32 : 0);
        }
        round_trip(OO_CODEC_INT8, 8192, &chunk);
        uint32_t index[9];
        memcpy(index, chunk.coded + OO_CODEC_HEADER, sizeof index);
        CHECK(header_of(&chunk).low_bits == 4, "%u low bits", header_of(&chunk).low_bits);
        CHECK(index[2] >> 31 == rows[row].raw && index[1] >> 31 == 0 && index[3] >> 31 == 0,
              "row %zu: index %08x", row, index[2]);
        CHECK((index[3] & ~(UINT32_C(1) << 31)) - (index[2] & ~(UINT32_C(1) << 31)) ==
                  63 + rows[row].raw,
              "row %zu: a tail from word %u to %u", row, index[2], index[3]);
        drop(&chunk);
    }
}

/* A chunk pays where it takes less than 31/32 of the weights; as many bytes are the weights as they
 * are. Its tails become longer bit by bit. */
CASE(a_chunk_that_saves_too_little_is_raw) {
    const size_t count = 8 * OO_CODEC_BLOCK;
    struct chunk chunk = make(OO_CODEC_INT8, count);
    size_t longest = 0, at = 0;
    seed = 16;
    for (size_t i = 0; i < count; i++) { /* of seven symbols */
        const size_t turn = i % 25, symbol = turn < 15 ? turn / 5 : 3 + (turn - 15) / 3;
        chunk.weights[i] = (char)(32 * symbol + draw() % 16);
    }
    for (; at < count; at++) {
        chunk.weights[at * 1031 % count] = (char)(16 * (draw() % 13) + draw() % 16);
        need(oo_codec_encode(oo_codec_best(), OO_CODEC_INT8, chunk.weights, count, chunk.coded,
                             &chunk.coded_bytes),
             "encode");
        if (header_of(&chunk).mode == OO_CODEC_RAW)
            break;
        longest = chunk.coded_bytes;
    }
    CHECK(longest == OO_CODEC_HEADER + count - count / 32 - 4, "%zu bytes, %zu weights changed",
          longest, at);
    drop(&chunk);
}

static int decodes_nothing(const uint32_t *planes, const uint32_t *tail, unsigned words,
                           const uint8_t *palette, uint8_t *symbols) {
    (void)planes;
    (void)tail;
    (void)words;
    (void)palette;
    (void)symbols;
    return 0;
}

static int decodes_wrongly(const uint32_t *planes, const uint32_t *tail, unsigned words,
                           const uint8_t *palette, uint8_t *symbols) {
    const int right = oo__codec_portable.decode(planes, tail, words, palette, symbols);
    symbols[1023] ^= 1;
    return right;
}

CASE(what_does_not_decode_again_is_never_kept) {
    seed = 11;
    struct chunk chunk = eight_blocks(OO_CODEC_BF16);
    struct oo_codec broken = oo__codec_portable;
    for (int turn = 0; turn < 2; turn++) {
        broken.decode = turn ? decodes_wrongly : decodes_nothing;
        CHECK(oo_codec_encode(&broken, OO_CODEC_BF16, chunk.weights, 8192, chunk.coded,
                              &chunk.coded_bytes) == OO_E_STATE,
              "turn %d", turn);
    }
    drop(&chunk);
}

CHECK_MAIN(NULL)
