/* bench_codec.c - the codec of weights: sizes per distribution, speeds per set of instructions, one
 * JSON object per line. Usage: bench_codec [LIBZSTD]
 *
 * Speeds are the weights' bytes by seconds of processor time, the best of three runs over all
 * chunks; encoding decodes each block again and compares it. Weights are drawn: Gaussian; Gaussian
 * whose rows' deviations are lognormal (sigma 0.3); Student's with 5 and with 3 degrees of freedom;
 * evenly drawn bits. int8 is rounded at `amax` deviations, e4m3 is cast as it is. */
#include "codec.h"
#include "os.h" /* the library of zstd */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CHUNK = OO_CODEC_CHUNK, ROW = 4096, ROUNDS = 3, BYTES = 64 << 20 };

static double now_s(void) { return (double)clock() / CLOCKS_PER_SEC; }

static uint64_t state = 1;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static double gaussian(void) {
    const double a = ((double)(draw() >> 11) + 0.5) * 0x1p-53, b = (double)(draw() >> 11) * 0x1p-53;
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

static double student(int degrees) {
    double sum = 0;
    for (int i = 0; i < degrees; i++) {
        const double g = gaussian();
        sum += g * g;
    }
    return gaussian() / sqrt(sum / degrees);
}

static uint16_t bf16(double value) {
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* To the nearest number of 8 bits, of them 2 (e5m2) or 3 (e4m3) of the fraction, without regard to
 * ties; what is below its normal numbers becomes 0. */
static uint8_t fp8(double value, int fraction_bits) {
    int exponent;
    const int one = 1 << fraction_bits, bias = (1 << (6 - fraction_bits)) - 1;
    const int most = fraction_bits == 3 ? 15 : 30;
    const double fraction = frexp(fabs(value), &exponent);
    const int steps = (int)lround((fraction * 2 - 1) * one);
    const int biased = exponent - 1 + bias + (steps == one);
    const uint8_t sign = value < 0 ? 0x80 : 0;
    if (biased < 1)
        return sign;
    return (uint8_t)(sign | (biased > most ? most : biased) << fraction_bits | (steps & (one - 1)));
}

struct row {
    const char *name;
    enum oo_codec_kind kind;
    int degrees;                    /* of Student's; 0: Gaussian */
    double sigma, rows_sigma, amax; /* amax: of int8, in deviations */
    int random;
    int fraction_bits; /* of fp8 */
};

static const struct row rows[] = {
    {"bf16, Gaussian 0.02", OO_CODEC_BF16, 0, 0.02, 0, 0, 0, 0},
    {"bf16, rows lognormal 0.3", OO_CODEC_BF16, 0, 0.02, 0.3, 0, 0, 0},
    {"bf16, Student 5", OO_CODEC_BF16, 5, 0.02, 0, 0, 0, 0},
    {"bf16, Student 3", OO_CODEC_BF16, 3, 0.02, 0, 0, 0, 0},
    {"bf16, random bits", OO_CODEC_BF16, 0, 0, 0, 0, 1, 0},
    {"e4m3, Gaussian 0.02 as it is", OO_CODEC_FP8, 0, 0.02, 0, 0, 0, 3},
    {"e4m3, Gaussian scaled to 448", OO_CODEC_FP8, 0, 448 / 4.5, 0, 0, 0, 3},
    {"e5m2, Gaussian 0.02", OO_CODEC_FP8, 0, 0.02, 0, 0, 0, 2},
    {"int8, amax 4.5 sigma", OO_CODEC_INT8, 0, 0, 0, 4.5, 0, 0},
    {"int8, amax 20 sigma", OO_CODEC_INT8, 0, 0, 0, 20, 0, 0},
};

static void fill(const struct row *row, size_t count, void *weights) {
    double scale = 1;
    for (size_t i = 0; i < count; i++) {
        if (i % ROW == 0)
            scale = exp(row->rows_sigma * gaussian());
        const double value =
            row->random ? 0 : scale * (row->degrees ? student(row->degrees) : gaussian());
        if (row->kind == OO_CODEC_BF16)
            ((uint16_t *)weights)[i] = row->random ? (uint16_t)draw() : bf16(row->sigma * value);
        else if (row->kind == OO_CODEC_FP8)
            ((uint8_t *)weights)[i] = fp8(row->sigma * value, row->fraction_bits);
        else
            ((uint8_t *)weights)[i] =
                (uint8_t)(int8_t)fmax(-127, fmin(127, rint(127 / row->amax * value)));
    }
}

static void need(enum oo_status status) {
    if (status != OO_OK) {
        fprintf(stderr, "%s: %s\n", oo_status_name(status), oo_error_message());
        exit(1);
    }
}

struct memory {
    size_t bytes, n_chunks, room;
    char *weights, *coded, *decoded;
    size_t *sizes;
};

static void with_codec(const struct oo_codec *codec, const struct row *row, struct memory *m) {
    double encode_s = 1e9, decode_s = 1e9;
    size_t total = 0;
    const size_t width = oo_codec_weight_bytes(row->kind);
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now_s();
        total = 0;
        for (size_t i = 0; i < m->n_chunks; i++) {
            need(oo_codec_encode(codec, row->kind, m->weights + i * CHUNK * width, CHUNK,
                                 m->coded + i * m->room, &m->sizes[i]));
            total += m->sizes[i];
        }
        encode_s = fmin(encode_s, now_s() - begin);
        begin = now_s();
        for (size_t i = 0; i < m->n_chunks; i++)
            need(oo_codec_decode(codec, m->coded + i * m->room, m->sizes[i], 0, row->kind,
                                 m->decoded + i * CHUNK * width, CHUNK));
        decode_s = fmin(decode_s, now_s() - begin);
    }
    if (memcmp(m->decoded, m->weights, m->bytes) != 0) {
        fprintf(stderr, "%s: other bits\n", row->name);
        exit(1);
    }
    printf("{\"name\": \"%s, %s\", \"size_ratio\": %.4f, \"encode_gbps\": %.2f, "
           "\"decode_gbps\": %.2f}\n",
           row->name, oo_codec_name(codec), (double)total / (double)m->bytes,
           1e-9 * (double)m->bytes / encode_s, 1e-9 * (double)m->bytes / decode_s);
    fflush(stdout);
}

typedef size_t zstd_compress(void *to, size_t room, const void *from, size_t bytes, int level);
typedef size_t zstd_decompress(void *to, size_t room, const void *from, size_t bytes);

static void with_zstd(void *library, const struct row *row, struct memory *m) {
    zstd_compress *compress = NULL;
    zstd_decompress *decompress = NULL;
    void *symbol = oo__library_symbol(library, "ZSTD_compress");
    memcpy(&compress, &symbol, sizeof symbol);
    symbol = oo__library_symbol(library, "ZSTD_decompress");
    memcpy(&decompress, &symbol, sizeof symbol);
    const size_t chunk = CHUNK * oo_codec_weight_bytes(row->kind);
    size_t total = 0;
    const double begin = now_s();
    for (size_t i = 0; i < m->n_chunks; i++) {
        m->sizes[i] = compress(m->coded + i * m->room, m->room, m->weights + i * chunk, chunk, 1);
        total += m->sizes[i];
    }
    const double middle = now_s();
    for (size_t i = 0; i < m->n_chunks; i++)
        (void)decompress(m->decoded + i * chunk, chunk, m->coded + i * m->room, m->sizes[i]);
    const double end = now_s();
    printf("{\"name\": \"%s, zstd -1\", \"size_ratio\": %.4f, \"encode_gbps\": %.2f, "
           "\"decode_gbps\": %.2f}\n",
           row->name, (double)total / (double)m->bytes, 1e-9 * (double)m->bytes / (middle - begin),
           1e-9 * (double)m->bytes / (end - middle));
    fflush(stdout);
}

static void *memory(size_t bytes) {
    void *found = malloc(bytes);
    if (!found) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return found;
}

int main(int argc, char **argv) {
    static const char *const names[] = {"portable", "avx2", "avx512"};
    void *zstd = argc > 1 ? oo__library_open(argv[1]) : NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const size_t width = oo_codec_weight_bytes(rows[i].kind);
        struct memory m = {.n_chunks = BYTES / (CHUNK * width), .bytes = BYTES};
        m.room = oo_codec_room(rows[i].kind, CHUNK) + (64 << 10); /* zstd's bound is larger */
        m.weights = memory(BYTES);
        m.decoded = memory(BYTES);
        m.coded = memory(m.n_chunks * m.room);
        m.sizes = memory(m.n_chunks * sizeof *m.sizes);
        fill(&rows[i], BYTES / width, m.weights);
        for (size_t k = 0; k < sizeof names / sizeof *names; k++)
            if (oo_codec_named(names[k]))
                with_codec(oo_codec_named(names[k]), &rows[i], &m);
        if (zstd)
            with_zstd(zstd, &rows[i], &m);
        free(m.weights);
        free(m.decoded);
        free(m.coded);
        free(m.sizes);
    }
    return 0;
}
