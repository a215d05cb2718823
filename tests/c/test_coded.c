/* Whole tensors in coded chunks: any number of threads writes the same bytes and reads the same
 * bits. Any change in them is an error that names the place. oo__thread_start starts the threads.
 */
#include "check.h"
#include "coded.h"
#include "weights.h"

#include <stdint.h>

enum { CHUNK = 4 * OO_CODEC_BLOCK, CHUNKS = 9, COUNT = (CHUNKS - 1) * CHUNK + 1234 };

static const enum oo_codec_kind kinds[] = {OO_CODEC_BF16, OO_CODEC_FP8, OO_CODEC_INT8};

struct coded {
    enum oo_codec_kind kind;
    char *weights, *coded, *decoded;
    size_t count, bytes, coded_bytes; /* bytes: of the weights */
};

/* Chunks of different sizes: as they are trained, without a pattern, all alike. */
static struct coded make(enum oo_codec_kind kind, size_t count, unsigned threads) {
    const size_t width = oo_codec_weight_bytes(kind), room = (COUNT + 256 * CHUNKS) * width;
    struct coded made = {
        kind, malloc(count * width), malloc(room), malloc(count * width), count, count * width, 0};
    seed = 5;
    for (size_t at = 0, chunk = 0; at < count; at += CHUNK, chunk++) {
        static const enum what whats[] = {GAUSSIAN, RANDOM, ZEROS, STUDENT};
        const size_t left = count - at;
        draw_weights(kind, whats[chunk % 4], left < CHUNK ? left : CHUNK,
                     made.weights + at * width);
    }
    memset(made.coded, 0xA5, room);
    const enum oo_status status =
        oo__coded_encode(kind, made.weights, count, CHUNK, threads, made.coded, &made.coded_bytes);
    CHECK(status == OO_OK, "%s", oo_error_message());
    return made;
}

static void drop(const struct coded *made) {
    free(made->weights);
    free(made->coded);
    free(made->decoded);
}

static enum oo_status decode(const struct coded *made, unsigned threads) {
    memset(made->decoded, 0x5A, made->bytes);
    return oo_coded_decode(made->kind, made->coded, made->coded_bytes, threads, made->decoded,
                           made->count);
}

/* ---- cases ---- */

CASE(any_number_of_threads_writes_the_same_bytes) {
    for (size_t k = 0; k < 3; k++) {
        const struct coded one = make(kinds[k], COUNT, 1);
        for (unsigned threads = 0; threads < 20; threads += 3) {
            const struct coded other = make(kinds[k], COUNT, threads);
            CHECK(other.coded_bytes == one.coded_bytes &&
                      !memcmp(other.coded, one.coded, one.coded_bytes),
                  "kind %d, %u threads", (int)kinds[k], threads);
            drop(&other);
        }
        drop(&one);
    }
}

CASE(any_number_of_threads_reads_the_same_bits) {
    for (size_t k = 0; k < 3; k++) {
        const struct coded made = make(kinds[k], COUNT, 3);
        for (unsigned threads = 1; threads < 20; threads += 3) {
            CHECK(decode(&made, threads) == OO_OK, "%s", oo_error_message());
            CHECK(!memcmp(made.decoded, made.weights, made.bytes), "kind %d, %u threads",
                  (int)kinds[k], threads);
            CHECK(oo_coded_compare(made.kind, made.coded, made.coded_bytes, threads, made.weights,
                                   made.count) == OO_OK,
                  "%s", oo_error_message());
            CHECK(oo_coded_check(made.kind, made.coded, made.coded_bytes, threads, made.count) ==
                      OO_OK,
                  "%s", oo_error_message());
        }
        drop(&made);
    }
}

CASE(chunks_begin_where_the_device_may_read_and_zeros_are_between) {
    const struct coded made = make(OO_CODEC_BF16, COUNT, 2);
    struct oo_codec_header header;
    size_t at = 0, bytes = 0, chunks = 0, weights = 0;
    while (at < made.coded_bytes) {
        const enum oo_status status =
            oo_codec_find(made.coded + at, made.coded_bytes - at, &header, &bytes);
        CHECK(status == OO_OK, "%s", oo_error_message());
        if (status != OO_OK)
            break;
        chunks++;
        weights += header.count;
        const size_t end = at + bytes;
        for (at = end; at % OO_ALIGNMENT && at < made.coded_bytes; at++)
            CHECK(made.coded[at] == 0, "byte %zu between chunks", at);
        if (end == made.coded_bytes)
            break;
    }
    CHECK(chunks == CHUNKS && weights == COUNT, "%zu chunks of %zu weights", chunks, weights);
    drop(&made);
}

CASE(what_is_promised_as_room_is_enough) {
    static const size_t counts[] = {1, 1000, 1024, 70000};
    for (size_t k = 0; k < 3; k++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            const size_t count = counts[i], bytes = count * oo_codec_weight_bytes(kinds[k]);
            char *weights = malloc(bytes), *coded = malloc(oo_coded_room(kinds[k], count));
            size_t coded_bytes;
            seed = 6;
            draw_weights(kinds[k], RANDOM, count, weights);
            CHECK(oo_coded_encode(kinds[k], weights, count, 2, coded, &coded_bytes) == OO_OK, "%s",
                  oo_error_message());
            CHECK(coded_bytes <= oo_coded_room(kinds[k], count), "%zu weights", count);
            CHECK(coded_bytes <= bytes + 64, "%zu weights: %zu", count, coded_bytes);
            free(weights);
            free(coded);
        }
    CHECK(oo_coded_room(OO_CODEC_BF16, OO_CODEC_CHUNK + 1) ==
              (size_t)OO_CODEC_CHUNK * 2 + OO_ALIGNMENT + 64 + 2,
          "two chunks");
}

/* The first chunk is larger than allowed; then no thread waits for its place. */
CASE(a_chunk_that_fails_is_the_failure_of_all) {
    const size_t chunk = OO_CODEC_CHUNK + OO_CODEC_BLOCK, count = chunk + 10;
    char *weights = calloc(count, 2), *coded = malloc(oo_coded_room(OO_CODEC_BF16, count));
    size_t bytes;
    for (unsigned i = 0; i < 300; i++)
        CHECK(oo__coded_encode(OO_CODEC_BF16, weights, count, chunk, 1 + i % 2, coded, &bytes) ==
                  OO_E_ARGUMENT,
              "round %u", i);
    free(weights);
    free(coded);
}

/* Each bit of the first chunk, and of the header of each, one after the other. */
CASE(a_changed_bit_is_told_with_its_place) {
    const struct coded made = make(OO_CODEC_BF16, 2 * CHUNK + 99, 2);
    char place[64];
    size_t told = 0;
    for (size_t at = 0; at < made.coded_bytes; at += at < 512 ? 1 : 97)
        for (int bit = 0; bit < 8; bit++) {
            made.coded[at] = (char)(made.coded[at] ^ 1 << bit);
            const int wrong =
                oo_coded_check(made.kind, made.coded, made.coded_bytes, 2, made.count) != OO_OK;
            const int as_wrong = decode(&made, 2) != OO_OK;
            CHECK(wrong == as_wrong, "byte %zu, bit %d", at, bit);
            CHECK(wrong || !memcmp(made.decoded, made.weights, made.bytes), "byte %zu: unnoticed",
                  at);
            snprintf(place, sizeof place, "of %zu)", made.coded_bytes);
            CHECK(!wrong || strstr(oo_error_message(), place), "%s", oo_error_message());
            told += (size_t)wrong;
            made.coded[at] = (char)(made.coded[at] ^ 1 << bit);
        }
    CHECK(told > 512 * 8, "%zu", told);
    drop(&made);
}

CASE(other_weights_sizes_and_kinds_are_refused) {
    const struct coded made = make(OO_CODEC_FP8, COUNT, 2);
    made.weights[COUNT - 1] ^= 1;
    CHECK(oo_coded_compare(made.kind, made.coded, made.coded_bytes, 2, made.weights, COUNT) ==
              OO_E_ARGUMENT,
          "the last weight is another");
    CHECK(strstr(oo_error_message(), "other weights"), "%s", oo_error_message());
    made.weights[COUNT - 1] ^= 1;
    made.coded[OO_CODEC_HEADER] ^= 1;
    CHECK(oo_coded_compare(made.kind, made.coded, made.coded_bytes, 1, made.weights, COUNT) !=
                  OO_OK &&
              !strstr(oo_error_message(), "other weights"),
          "damaged: %s", oo_error_message());
    made.coded[OO_CODEC_HEADER] ^= 1;
    static const struct {
        ptrdiff_t bytes, count;
        const char *why;
    } rows[] = {{-1, 0, "chunk"}, {1, 0, "follow"}, {0, -1, "left"}, {0, 1, "chunk"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK(oo_coded_check(made.kind, made.coded, made.coded_bytes + (size_t)rows[i].bytes, 2,
                             COUNT + (size_t)rows[i].count) == OO_E_ARGUMENT,
              "row %zu", i);
        CHECK(strstr(oo_error_message(), rows[i].why), "row %zu: %s", i, oo_error_message());
    }
    CHECK(oo_coded_decode(OO_CODEC_INT8, made.coded, made.coded_bytes, 2, made.decoded, COUNT) ==
              OO_E_ARGUMENT,
          "another kind");
    drop(&made);
}

/* 10,000 seeded changes of one to eight bytes: an error or the same bits. */
CASE(damage_is_never_other_weights) {
    const struct coded made = make(OO_CODEC_BF16, 2 * CHUNK, 1);
    char *kept = malloc(made.coded_bytes);
    memcpy(kept, made.coded, made.coded_bytes);
    seed = 7;
    for (int i = 0; i < 10000; i++) {
        const size_t bytes = 1 + draw() % 8, at = draw() % (made.coded_bytes - bytes);
        for (size_t j = 0; j < bytes; j++)
            made.coded[at + j] = (char)draw();
        if (decode(&made, 1) == OO_OK)
            CHECK(!memcmp(made.decoded, made.weights, made.bytes), "round %d, byte %zu", i, at);
        memcpy(made.coded + at, kept + at, bytes);
    }
    free(kept);
    drop(&made);
}

CHECK_MAIN(NULL)
