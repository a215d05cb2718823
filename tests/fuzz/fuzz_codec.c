/* Bytes become weights, and changes of the chunk that they are coded as. Every implementation must
 * write the same chunk and give back the bits; of a changed chunk none may read or write outside,
 * all must decide alike, and none may take it for whole when it is verified. */
#include "fuzz.h"

#include "codec.h"

enum { MOST = 5 * OO_CODEC_BLOCK };

static const char *const names[] = {"portable", "avx2", "avx512"};

/* Weights that the tiers are made for, or are not: the fewer values are drawn, the more. */
static size_t draw_weights(struct input *in, enum oo_codec_kind kind, uint8_t *weights) {
    const size_t count = 1 + below(in, MOST), width = oo_codec_weight_bytes(kind);
    const unsigned spread = 1 + below(in, 256), raw = below(in, 64);
    uint32_t state = 1 + below(in, 65536);
    for (size_t i = 0; i < count * width; i++) {
        state = state * 1664525u + 1013904223u;
        const unsigned drawn = state >> 16 & 255;
        const int high = i % width + 1 == width;
        weights[i] = (uint8_t)(high && (state >> 24) % 64 >= raw ? 60 + drawn % spread : drawn);
    }
    for (unsigned n = below(in, 16); n-- > 0;)
        weights[below(in, (unsigned)(count * width))] = (uint8_t)byte_of(in);
    return count;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};
    const enum oo_codec_kind kind = OO_CODEC_BF16 + below(&in, 3);
    uint8_t *weights = malloc(2 * (size_t)MOST);
    const size_t count = draw_weights(&in, kind, weights),
                 bytes = count * oo_codec_weight_bytes(kind);
    uint8_t *coded = malloc(oo_codec_room(kind, count)),
            *other = malloc(oo_codec_room(kind, count));
    uint8_t *decoded = malloc(bytes), *first = malloc(bytes);
    size_t coded_bytes = 0, other_bytes;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct oo_codec *codec = oo_codec_named(names[i]);
        if (!codec)
            continue;
        REQUIRE(oo_codec_encode(codec, kind, weights, count, other, &other_bytes) == OO_OK, "%s",
                oo_error_message());
        REQUIRE(other_bytes <= bytes + OO_CODEC_HEADER, "%zu bytes of %zu", other_bytes, bytes);
        REQUIRE(!coded_bytes || (other_bytes == coded_bytes && !memcmp(coded, other, coded_bytes)),
                "%s writes another chunk", names[i]);
        memcpy(coded, other, other_bytes);
        coded_bytes = other_bytes;
        REQUIRE(oo_codec_decode(codec, coded, coded_bytes, 1, kind, decoded, count) == OO_OK, "%s",
                oo_error_message());
        REQUIRE(!memcmp(decoded, weights, bytes), "%s gives back other bits", names[i]);
    }
    /* Exactly as long as it says, so that sanitizers see what is read behind it. */
    uint8_t *changed = malloc(coded_bytes);
    while (in.left) {
        memcpy(changed, coded, coded_bytes);
        for (unsigned n = 1 + below(&in, 4); n-- > 0;) {
            const size_t front = below(&in, 2) ? OO_CODEC_HEADER + 32 : coded_bytes;
            const size_t at = below(&in, 65536) % (front < coded_bytes ? front : coded_bytes);
            changed[at] = (uint8_t)byte_of(&in);
        }
        int said = -1;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            const struct oo_codec *codec = oo_codec_named(names[i]);
            if (!codec)
                continue;
            memset(decoded, 0, bytes);
            const int right =
                oo_codec_decode(codec, changed, coded_bytes, 0, kind, decoded, count) == OO_OK;
            REQUIRE(said < 0 || said == right, "%s decides otherwise", names[i]);
            REQUIRE(said != 1 || !memcmp(first, decoded, bytes), "%s decodes otherwise", names[i]);
            said = right;
            memcpy(first, decoded, bytes);
            REQUIRE(oo_codec_decode(codec, changed, coded_bytes, 1, kind, decoded, count) !=
                            OO_OK ||
                        !memcmp(decoded, weights, bytes),
                    "%s takes a changed chunk for whole", names[i]);
        }
    }
    free(weights);
    free(coded);
    free(other);
    free(decoded);
    free(first);
    free(changed);
    return 0;
}
