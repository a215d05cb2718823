/* The kernel that decodes weights, compiled as C: the bits of the codec, nothing outside. */
#ifdef _WIN32 /* has no ucontext.h */
int main(void) { return 0; }
#else
#include "codec_block.h"
#include "warp.h"
#include "weights.h"

/* What device code may do: read four weights as one word. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wunknown-pragmas" /* unroll */
#include "../../csrc/kernels/decode.cu"
#pragma GCC diagnostic pop

/* Device code includes no header of the engine. */
_Static_assert((int)BLOCK_WEIGHTS == OO_CODEC_BLOCK && (int)LANES == OO_LANES &&
                   (int)PLANE_WORDS == OO_PLANES && (int)MOST_TAIL_WORDS == OO_TAIL_WORDS &&
                   4 * HEADER_WORDS == (int)OO_CODEC_HEADER,
               "the kernel and the codec read one format");

enum { MOST = 9 * OO_CODEC_BLOCK + 77 };

static const enum oo_codec_kind kinds[] = {OO_CODEC_BF16, OO_CODEC_FP8, OO_CODEC_INT8};

struct decoding {
    const word *chunk;
    void *weights;
    struct oo_codec_header header;
};

static void decode_one(void *arguments) {
    const struct decoding *decoding = arguments;
    const struct oo_codec_header *header = &decoding->header;
    struct palette palette;
    memcpy(&palette, header->palette, sizeof palette);
    if (header->kind == OO_CODEC_BF16)
        decode_bf16(decoding->chunk, decoding->weights, header->count, header->tail_words, palette);
    else
        decode_bytes(decoding->chunk, decoding->weights, header->count, header->tail_words, palette,
                     header->low_bits, header->kind == OO_CODEC_FP8);
}

/* Decode `chunk` as its header on the host says: that one was verified. */
static void decode(const char *chunk, const struct oo_codec_header *header, void *weights) {
    struct decoding decoding = {(const word *)(const void *)chunk, weights, *header};
    const unsigned blocks = (header->count + OO_CODEC_BLOCK - 1) / OO_CODEC_BLOCK;
    warp_launch((blocks + WARPS - 1) / WARPS, WARPS * LANES, decode_one, &decoding);
}

static void *copy_of(const void *bytes, size_t count) {
    void *copy = malloc(count); /* no byte more: sanitizers see what is outside */
    memcpy(copy, bytes, count);
    return copy;
}

struct coded {
    char *chunk, *weights; /* exactly as long as they are */
    size_t bytes, weight_bytes;
    struct oo_codec_header header;
};

static struct coded code(enum oo_codec_kind kind, enum what what, size_t count) {
    struct coded coded = {.weight_bytes = count * oo_codec_weight_bytes(kind)};
    char *room = malloc(oo_codec_room(kind, count));
    coded.weights = malloc(coded.weight_bytes);
    draw_weights(kind, what, count, coded.weights);
    CHECK(oo_codec_encode(oo_codec_best(), kind, coded.weights, count, room, &coded.bytes) == OO_OK,
          "%s", oo_error_message());
    CHECK(oo_codec_read(room, coded.bytes, &coded.header) == OO_OK, "%s", oo_error_message());
    coded.chunk = copy_of(room, coded.bytes);
    free(room);
    return coded;
}

static void drop(const struct coded *coded) {
    free(coded->chunk);
    free(coded->weights);
}

/* The kernel gives back what was coded. Returns the weights that it decoded: none of a chunk that
 * has no tiers. */
static size_t round_trip(enum oo_codec_kind kind, enum what what, size_t count) {
    struct coded coded = code(kind, what, count);
    const int coded_in_tiers = coded.header.mode == OO_CODEC_TIERS;
    if (coded_in_tiers) {
        char *weights = malloc(coded.weight_bytes);
        memset(weights, 0x5A, coded.weight_bytes);
        decode(coded.chunk, &coded.header, weights);
        CHECK(!memcmp(weights, coded.weights, coded.weight_bytes),
              "%zu weights of kind %d, %d: other bits", count, (int)kind, (int)what);
        free(weights);
    }
    drop(&coded);
    return coded_in_tiers ? count : 0;
}

/* ---- cases ---- */

CASE(the_kernel_gives_back_the_bits) {
    static const size_t counts[] = {1, 2, 7, 31, 1023, 1024, 1025, 3000, 8192, MOST};
    int done = 0;
    seed = 1;
    for (size_t k = 0; k < 3; k++)
        for (int what = 0; what < N_WHAT; what++)
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
                done += round_trip(kinds[k], what, counts[i]) != 0;
    CHECK(done > 100, "%d chunks in tiers", done);
}

/* Whatever index, planes and tails hold, bytes of the chunk alone are read, and the weights' alone
 * are written. Sanitizers see the others. */
CASE(noise_leads_nowhere) {
    seed = 2;
    for (size_t k = 0; k < 3; k++)
        for (int turn = 0; turn < 60; turn++) {
            const size_t count = 1 + draw() % (4 * OO_CODEC_BLOCK);
            struct coded coded = code(kinds[k], RARE, count);
            char *weights = malloc(coded.weight_bytes);
            const size_t changes = turn % 2 ? 1 + draw() % 16 : coded.bytes / 4;
            uint8_t *payload = (uint8_t *)coded.chunk + OO_CODEC_HEADER;
            for (size_t i = 0; i < changes; i++)
                payload[draw() % (coded.bytes - OO_CODEC_HEADER)] ^= (uint8_t)draw();
            if (coded.header.mode == OO_CODEC_TIERS)
                decode(coded.chunk, &coded.header, weights);
            free(weights);
            drop(&coded);
        }
}

/* 2^20 weights; with ORACLE_OFFLOAD_TEST_FAULT_STRIDE=all, 10^8. Those of chunks that need no
 * kernel do not count. */
CASE(many_weights_come_back) {
    enum { CHUNK = 1 << 18 };
    const char *stride = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    const uint64_t wanted = stride && strcmp(stride, "all") == 0 ? 100000000 : 1 << 20;
    uint64_t decoded = 0;
    seed = 3;
    for (uint64_t turn = 0; decoded < wanted && turn < 4 + 2 * wanted / CHUNK; turn++)
        decoded += round_trip(turn % 4 ? OO_CODEC_BF16 : kinds[1 + turn / 4 % 2],
                              (enum what)(turn % N_WHAT), CHUNK);
    CHECK(decoded >= wanted, "%llu of %llu weights", (unsigned long long)decoded,
          (unsigned long long)wanted);
    printf("%llu weights decoded by the kernel\n", (unsigned long long)decoded);
}

int main(int argc, char **argv) {
    const int result = check_main(argc, argv, NULL);
    warp_end();
    return result;
}
#endif
