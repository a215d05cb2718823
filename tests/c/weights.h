/* weights.h - weights to be coded: as training makes them, as it never does, and rare bits. */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "codec.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static uint64_t seed;

static inline uint64_t draw(void) { /* splitmix64 */
    uint64_t z = seed += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline double uniform(void) { return ((double)(draw() >> 11) + 0.5) * 0x1p-53; }
static inline double gaussian(void) {
    return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform());
}

static inline uint16_t bf16(double value) {
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Cut a bf16 to e4m3 of the same exponent range as far as it goes: a sign, 4 bits, 3 bits. */
static inline uint8_t fp8(uint16_t weight) {
    const int exponent = (weight >> 7 & 255) - 127 + 13;
    const int kept = exponent < 0 ? 0 : exponent > 15 ? 15 : exponent;
    return (uint8_t)(weight >> 8 & 0x80) | (uint8_t)(kept << 3) | (uint8_t)(weight >> 4 & 7);
}

static inline uint8_t int8(double value) {
    const long rounded = lround(600 * value);
    return (uint8_t)(rounded < -128 ? -128 : rounded > 127 ? 127 : rounded);
}

enum what { GAUSSIAN, ROWS, STUDENT, RANDOM, ZEROS, HALF_ZEROS, SPECIALS, RARE, BURSTS, N_WHAT };

/* A trained weight. */
static inline uint16_t coded_as(enum oo_codec_kind kind, double value) {
    return kind == OO_CODEC_BF16  ? bf16(value)
           : kind == OO_CODEC_FP8 ? fp8(bf16(value))
                                  : int8(value);
}

/* Infinities, NaNs with payloads, denormals, both zeros; the ends of int8, and next to 0. */
static inline uint16_t special_of(enum oo_codec_kind kind, unsigned n) {
    static const uint16_t special[][8] = {
        [OO_CODEC_BF16] = {0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F, 0x8000, 0},
        [OO_CODEC_FP8] = {0x7E, 0xFE, 0x7F, 0xFF, 0x01, 0x87, 0x80, 0},
        [OO_CODEC_INT8] = {0x80, 0x81, 0x7F, 0x7E, 0x01, 0xFF, 0x40, 0},
    };
    return special[kind][n];
}

/* Of one byte: its lower 8 bits. */
static inline uint16_t weight_of(enum oo_codec_kind kind, enum what what, size_t i) {
    static double scale;
    if (i % 512 == 0)
        scale = 0.02 * (what == ROWS ? exp(0.3 * gaussian()) : 1);
    double chi = 0;
    for (int k = 0; k < 3 && what == STUDENT; k++) {
        const double g = gaussian();
        chi += g * g;
    }
    const double value = scale * gaussian() / (what == STUDENT ? sqrt(chi / 3) : 1);
    const uint16_t weight = coded_as(kind, value);
    const uint64_t drawn = draw();
    switch (what) {
    case RANDOM:
        return (uint16_t)drawn;
    case ZEROS:
        return 0;
    case HALF_ZEROS:
        return drawn & 1 ? 0 : weight;
    case SPECIALS:
        return drawn % 8 ? weight : special_of(kind, drawn / 8 % 8);
    case RARE: /* about as many of no tier as a block may have before it is raw */
        return drawn % 17 ? weight : (uint16_t)(drawn >> 8);
    case BURSTS: /* all of one lane in no tier */
        return i % 4096 / 8 % 32 == 7 ? (uint16_t)drawn : weight;
    case GAUSSIAN:
    case ROWS:
    case STUDENT:
    case N_WHAT:
        break;
    }
    return weight;
}

static inline void draw_weights(enum oo_codec_kind kind, enum what what, size_t count,
                                void *weights) {
    for (size_t i = 0; i < count; i++) {
        const uint16_t weight = weight_of(kind, what, i);
        if (kind == OO_CODEC_BF16)
            ((uint16_t *)weights)[i] = weight;
        else
            ((uint8_t *)weights)[i] = (uint8_t)weight;
    }
}

#endif
