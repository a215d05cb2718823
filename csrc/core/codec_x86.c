/* codec_x86.c - blocks with AVX2 and BMI2, and with AVX-512 VBMI2; which of them runs is decided at
 * run time. The bytes are those of codec_portable.c. */
#include "codec_block.h"

#if defined(__GNUC__) && defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define OO_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
/* These versions of clang ask for registers of 512 bits by a name of their own; zig's cc says no to
 * whatever its target has not. */
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ < 22
#define OO_512_BITS ",evex512"
#else
#define OO_512_BITS
#endif
#define OO_AVX512                                                                                  \
    __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi,"             \
                          "avx512vbmi2" OO_512_BITS)))

/* ---- both ---- */

enum {
    OO_CPU_POPCNT = 1 << 23, /* leaf 1, ECX */
    OO_CPU_OSXSAVE = 1 << 27,
    OO_CPU_AVX = 1 << 28,
    OO_CPU_BMI = 1 << 3, /* leaf 7, EBX */
    OO_CPU_AVX2 = 1 << 5,
    OO_CPU_BMI2 = 1 << 8,
    OO_CPU_AVX512F = 1 << 16,
    OO_CPU_AVX512BW = 1 << 30,
    OO_CPU_AVX512VBMI = 1 << 1, /* leaf 7, ECX */
    OO_CPU_AVX512VBMI2 = 1 << 6,
    OO_SAVED_256 = 0x6, /* the registers that the system keeps for each thread */
    OO_SAVED_512 = 0xE6,
};
#define OO_CPU_AVX512VL (1U << 31) /* leaf 7, EBX */

/* Whether the processor has all of these features, and the system keeps these registers. Asked here
 * and not by __builtin_cpu_supports: zig has no library that answers it. */
static int oo__cpu_has(unsigned leaf7_ebx, unsigned leaf7_ecx, unsigned saved) {
    const unsigned leaf1_ecx = OO_CPU_POPCNT | OO_CPU_OSXSAVE | OO_CPU_AVX;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf1_ecx) != leaf1_ecx)
        return 0; /* without OSXSAVE, xgetbv is no instruction */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (b & leaf7_ebx) == leaf7_ebx && (c & leaf7_ecx) == leaf7_ecx;
}

OO_AVX2 static __m128i oo__load_128(const void *bytes) { return _mm_loadu_si128(bytes); }
OO_AVX2 static __m256i oo__load_256(const void *bytes) { return _mm256_loadu_si256(bytes); }
OO_AVX2 static void oo__store_256(void *bytes, __m256i value) { _mm256_storeu_si256(bytes, value); }

/* Bytes of a lane in the order of its bits, from their order by i (see oo__place), and back: the
 * shuffle of 4 x 4 bytes is its own inverse. */
static const uint8_t oo__turn[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

OO_AVX2 static __m256i oo__turn_256(__m256i bytes) {
    const __m128i turn = oo__load_128(oo__turn);
    return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(turn));
}

/* The 32 bytes of a lane: eight at each of four places. */
OO_AVX2 static __m256i oo__load_lane(const uint8_t *bytes, unsigned lane) {
    long long part[4];
    for (size_t s = 0; s < 4; s++)
        memcpy(&part[s], bytes + 256 * s + 8 * (size_t)lane, sizeof part[s]);
    return oo__turn_256(_mm256_setr_epi64x(part[0], part[1], part[2], part[3]));
}

OO_AVX2 static void oo__store_lane(__m256i in_order_of_bits, uint8_t *bytes, unsigned lane) {
    long long part[4];
    oo__store_256(part, oo__turn_256(in_order_of_bits));
    for (size_t s = 0; s < 4; s++)
        memcpy(bytes + 256 * s + 8 * (size_t)lane, &part[s], sizeof part[s]);
}

/* Bit k of each byte. */
OO_AVX2 static uint32_t oo__plane(__m256i bytes, int k) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(bytes, _mm_cvtsi32_si128(7 - k)));
}

/* A plane's bits as bit k of 32 bytes. */
OO_AVX2 static __m256i oo__spread(uint32_t plane, int k) {
    const __m256i place =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)plane), place);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
    return _mm256_and_si256(set, _mm256_set1_epi8((char)(1 << k)));
}

OO_AVX2 static void oo__split_words_avx2(const uint16_t *weights, uint8_t *symbols, uint8_t *low) {
    const __m256i bytes = _mm256_set1_epi16(255);
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i += 32) {
        __m256i a = oo__load_256(weights + i);
        __m256i b = oo__load_256(weights + i + 16);
        a = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
        b = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
        const __m256i below =
            _mm256_packus_epi16(_mm256_and_si256(a, bytes), _mm256_and_si256(b, bytes));
        const __m256i above = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        /* What is packed alternates between a and b. */
        oo__store_256(low + i, _mm256_permute4x64_epi64(below, 0xD8));
        oo__store_256(symbols + i, _mm256_permute4x64_epi64(above, 0xD8));
    }
}

OO_AVX2 static void oo__join_words_avx2(const uint8_t *symbols, const uint8_t *low,
                                        uint16_t *weights) {
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i += 16) {
        const __m256i above = _mm256_cvtepu8_epi16(oo__load_128(symbols + i));
        const __m256i below = _mm256_cvtepu8_epi16(oo__load_128(low + i));
        const __m256i turned = _mm256_or_si256(_mm256_slli_epi16(above, 8), below);
        const __m256i all =
            _mm256_or_si256(_mm256_srli_epi16(turned, 1), _mm256_slli_epi16(turned, 15));
        oo__store_256(weights + i, all);
    }
}

OO_AVX2 static void oo__split_bytes_avx2(const uint8_t *weights, unsigned rotate, unsigned low_bits,
                                         uint8_t *symbols, uint32_t *low) {
    const __m128i count = _mm_cvtsi32_si128((int)low_bits);
    const __m256i above = _mm256_set1_epi8((char)(255 >> low_bits));
    uint8_t turned[OO_CODEC_BLOCK];
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i += 32) {
        __m256i bytes = oo__load_256(weights + i);
        if (rotate) {
            const __m256i sign =
                _mm256_srli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(-128)), 7);
            bytes = _mm256_or_si256(_mm256_add_epi8(bytes, bytes), sign);
        }
        oo__store_256(turned + i, bytes);
        bytes = _mm256_and_si256(_mm256_srl_epi16(bytes, count), above);
        oo__store_256(symbols + i, bytes);
    }
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        const __m256i bytes = oo__load_lane(turned, lane);
        for (unsigned k = 0; k < low_bits; k++)
            low[OO_LANES * k + lane] = oo__plane(bytes, (int)k);
    }
}

OO_AVX2 static void oo__join_bytes_avx2(const uint8_t *symbols, unsigned rotate, unsigned low_bits,
                                        const uint32_t *low, uint8_t *weights) {
    const __m128i count = _mm_cvtsi32_si128((int)low_bits);
    const __m256i above = _mm256_set1_epi8((char)(255 << low_bits));
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        __m256i bytes = _mm256_setzero_si256();
        for (unsigned k = 0; k < low_bits; k++)
            bytes = _mm256_or_si256(bytes, oo__spread(low[OO_LANES * k + lane], (int)k));
        oo__store_lane(bytes, weights, lane);
    }
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i += 32) {
        __m256i bytes = oo__load_256(symbols + i);
        bytes = _mm256_and_si256(_mm256_sll_epi16(bytes, count), above);
        bytes = _mm256_or_si256(bytes, oo__load_256(weights + i));
        if (rotate) {
            const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(1)), 7);
            bytes = _mm256_and_si256(_mm256_srli_epi16(bytes, 1), _mm256_set1_epi8(127));
            bytes = _mm256_or_si256(bytes, sign);
        }
        oo__store_256(weights + i, bytes);
    }
}

/* ---- AVX2 ---- */

/* Which bytes are a symbol. */
OO_AVX2 static uint32_t oo__equal(__m256i bytes, __m256i symbol) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, symbol));
}

OO_AVX2 static unsigned oo__encode_avx2(const uint8_t *symbols, const struct oo_palette *palette,
                                        uint32_t *planes, uint32_t *tail, unsigned *n_raw) {
    uint8_t n_second[OO_LANES], n_third[OO_LANES];
    uint32_t second[2][OO_LANES], third[3][OO_LANES], raw[OO_LANES];
    __m256i named[15];
    unsigned bits = 0;
    *n_raw = 0;
    for (unsigned i = 0; i < 15; i++)
        named[i] = _mm256_set1_epi8((char)palette->symbols[i]);
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        const __m256i bytes = oo__load_lane(symbols, lane);
        const uint32_t e1 = oo__equal(bytes, named[1]), e2 = oo__equal(bytes, named[2]);
        const uint32_t sent = ~(oo__equal(bytes, named[0]) | e1 | e2);
        planes[lane] = e1 | sent;
        planes[OO_LANES + lane] = e2 | sent;
        const uint32_t e5 = oo__equal(bytes, named[5]), e6 = oo__equal(bytes, named[6]);
        const uint32_t again = sent & ~(oo__equal(bytes, named[4]) | e5 | e6);
        n_second[lane] = (uint8_t)_mm_popcnt_u32(sent);
        second[0][lane] = _pext_u32(e5 | again, sent);
        second[1][lane] = _pext_u32(e6 | again, sent);
        uint32_t b0 = oo__equal(bytes, named[9]), b1 = oo__equal(bytes, named[10]);
        const uint32_t e11 = oo__equal(bytes, named[11]), e12 = oo__equal(bytes, named[12]);
        const uint32_t e13 = oo__equal(bytes, named[13]), e14 = oo__equal(bytes, named[14]);
        const uint32_t any = oo__equal(bytes, named[8]) | b0 | b1 | e11 | e12 | e13 | e14;
        raw[lane] = again & ~any;
        b0 |= e11 | e13 | raw[lane];
        b1 |= e11 | e14 | raw[lane];
        n_third[lane] = (uint8_t)_mm_popcnt_u32(again);
        third[0][lane] = _pext_u32(b0, again);
        third[1][lane] = _pext_u32(b1, again);
        third[2][lane] = _pext_u32(e12 | e13 | e14 | raw[lane], again);
        *n_raw += (unsigned)_mm_popcnt_u32(raw[lane]);
        bits += 2u * n_second[lane] + 3u * n_third[lane];
    }
    struct oo__bit_writer writer = {tail, 0, 0};
    for (unsigned k = 0; k < 2; k++)
        for (unsigned lane = 0; lane < OO_LANES; lane++)
            oo__put(&writer, second[k][lane], n_second[lane]);
    for (unsigned k = 0; k < 3; k++)
        for (unsigned lane = 0; lane < OO_LANES; lane++)
            oo__put(&writer, third[k][lane], n_third[lane]);
    for (unsigned lane = 0; lane < OO_LANES && *n_raw; lane++)
        for (uint32_t left = raw[lane]; left; left &= left - 1)
            oo__put(&writer, symbols[oo__place(lane, (unsigned)__builtin_ctz(left))], 8);
    *writer.at = (uint32_t)writer.held;
    return bits + 8 * *n_raw;
}

OO_AVX2 static int oo__decode_avx2(const uint32_t *planes, const uint32_t *tail, unsigned words,
                                   const uint8_t *palette, uint8_t *symbols) {
    uint32_t second[2][OO_LANES], third[3][OO_LANES];
    unsigned n_second = 0, n_third = 0, n_raw = 0, at = 0;
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        n_second += (unsigned)_mm_popcnt_u32(planes[lane] & planes[OO_LANES + lane]);
    if (2 * n_second > 32 * words)
        return 0;
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        const unsigned count = (unsigned)_mm_popcnt_u32(planes[lane] & planes[OO_LANES + lane]);
        second[0][lane] = oo__bits(tail, at, count);
        second[1][lane] = oo__bits(tail, n_second + at, count);
        n_third += (unsigned)_mm_popcnt_u32(second[0][lane] & second[1][lane]);
        at += count;
    }
    if (2 * n_second + 3 * n_third > 32 * words)
        return 0;
    at = 2 * n_second;
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        const unsigned count = (unsigned)_mm_popcnt_u32(second[0][lane] & second[1][lane]);
        for (unsigned k = 0; k < 3; k++)
            third[k][lane] = oo__bits(tail, at + k * n_third, count);
        n_raw += (unsigned)_mm_popcnt_u32(third[0][lane] & third[1][lane] & third[2][lane]);
        at += count;
    }
    at = 2 * n_second + 3 * n_third;
    if ((at + 8 * n_raw + 31) / 32 != words)
        return 0;
    const __m128i table = oo__load_128(palette);
    for (unsigned lane = 0; lane < OO_LANES; lane++) {
        const uint32_t sent = planes[lane] & planes[OO_LANES + lane];
        const uint32_t again = _pdep_u32(second[0][lane] & second[1][lane], sent);
        /* The entry of the palette: 0-2, then 4-6, then 8-15. */
        const uint32_t p2 = _pdep_u32(third[2][lane], again) | (sent & ~again);
        uint32_t p0 = planes[lane] & ~sent, p1 = planes[OO_LANES + lane] & ~sent;
        p0 |= _pdep_u32(second[0][lane], sent) & ~again;
        p1 |= _pdep_u32(second[1][lane], sent) & ~again;
        p0 |= _pdep_u32(third[0][lane], again);
        p1 |= _pdep_u32(third[1][lane], again);
        const __m256i low = _mm256_or_si256(oo__spread(p0, 0), oo__spread(p1, 1));
        const __m256i high = _mm256_or_si256(oo__spread(p2, 2), oo__spread(again, 3));
        oo__store_lane(
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), _mm256_or_si256(low, high)),
            symbols, lane);
        for (uint32_t left = p0 & p1 & p2 & again; left; left &= left - 1, at += 8)
            symbols[oo__place(lane, (unsigned)__builtin_ctz(left))] =
                (uint8_t)oo__bits(tail, at, 8);
    }
    return 1;
}

const struct oo_codec *oo__codec_avx2(void) {
    static const struct oo_codec codec = {
        .name = "avx2",
        .split_words = oo__split_words_avx2,
        .join_words = oo__join_words_avx2,
        .split_bytes = oo__split_bytes_avx2,
        .join_bytes = oo__join_bytes_avx2,
        .encode = oo__encode_avx2,
        .decode = oo__decode_avx2,
    };
    return oo__cpu_has(OO_CPU_AVX2 | OO_CPU_BMI | OO_CPU_BMI2, 0, OO_SAVED_256) ? &codec : NULL;
}

/* ---- AVX-512 with VBMI2: sixteen pairs of lanes, 64 weights each ---- */

enum { OO_PAIRS = OO_LANES / 2 };

/* Four vectors of symbols by place become four of pairs of lanes, in the order of their bits. */
OO_AVX512 static void oo__load_pairs(const uint8_t *symbols, size_t group, __m512i *pairs) {
    const __m128i turn = oo__load_128(oo__turn);
    __m512i z[4];
    for (size_t s = 0; s < 4; s++)
        z[s] = _mm512_loadu_si512(symbols + 256 * s + 64 * group);
    /* The first half of each lane, then its second; of even lanes, then of odd ones. */
    const __m512i even_a = _mm512_unpacklo_epi64(z[0], z[1]);
    const __m512i odd_a = _mm512_unpackhi_epi64(z[0], z[1]);
    const __m512i even_b = _mm512_unpacklo_epi64(z[2], z[3]);
    const __m512i odd_b = _mm512_unpackhi_epi64(z[2], z[3]);
    const __m512i p = _mm512_shuffle_i64x2(even_a, even_b, 0x44);
    const __m512i q = _mm512_shuffle_i64x2(even_a, even_b, 0xEE);
    const __m512i r = _mm512_shuffle_i64x2(odd_a, odd_b, 0x44);
    const __m512i t = _mm512_shuffle_i64x2(odd_a, odd_b, 0xEE);
    pairs[0] = _mm512_shuffle_i64x2(p, r, 0x88);
    pairs[1] = _mm512_shuffle_i64x2(p, r, 0xDD);
    pairs[2] = _mm512_shuffle_i64x2(q, t, 0x88);
    pairs[3] = _mm512_shuffle_i64x2(q, t, 0xDD);
    for (size_t k = 0; k < 4; k++)
        pairs[k] = _mm512_shuffle_epi8(pairs[k], _mm512_broadcast_i32x4(turn));
}

OO_AVX512 static void oo__store_pairs(const __m512i *pairs, uint8_t *symbols, size_t group) {
    const __m128i turn = oo__load_128(oo__turn);
    const __m512i first = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i second = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    __m512i by[4];
    for (size_t k = 0; k < 4; k++)
        by[k] = _mm512_shuffle_epi8(pairs[k], _mm512_broadcast_i32x4(turn));
    const __m512i a0 = _mm512_shuffle_i64x2(by[0], by[1], 0x88);
    const __m512i b0 = _mm512_shuffle_i64x2(by[0], by[1], 0xDD);
    const __m512i a1 = _mm512_shuffle_i64x2(by[2], by[3], 0x88);
    const __m512i b1 = _mm512_shuffle_i64x2(by[2], by[3], 0xDD);
    uint8_t *to = symbols + 64 * group;
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a0, first, a1));
    _mm512_storeu_si512(to + 256, _mm512_permutex2var_epi64(a0, second, a1));
    _mm512_storeu_si512(to + 512, _mm512_permutex2var_epi64(b0, first, b1));
    _mm512_storeu_si512(to + 768, _mm512_permutex2var_epi64(b0, second, b1));
}

struct oo_table {
    __m512i part[4];
};

OO_AVX512 static __m512i oo__look_up(__m512i symbols, const struct oo_table *table) {
    const __m512i low = _mm512_permutex2var_epi8(table->part[0], symbols, table->part[1]);
    const __m512i high = _mm512_permutex2var_epi8(table->part[2], symbols, table->part[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(symbols), low, high);
}

OO_AVX512 static uint64_t oo__plane_512(uint64_t among, __m512i codes, int k) {
    return _mm512_mask_test_epi8_mask(among, codes, _mm512_set1_epi8((char)(1 << k)));
}

static uint64_t oo__lowest_64(unsigned count) {
    return count >= 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1;
}

static void oo__put_64(struct oo__bit_writer *writer, uint64_t value, unsigned count) {
    oo__put(writer, (uint32_t)value, count < 32 ? count : 32);
    if (count > 32)
        oo__put(writer, (uint32_t)(value >> 32), count - 32);
}

static uint64_t oo__bits_64(const uint32_t *words, unsigned from, unsigned count) {
    const uint64_t low = oo__bits(words, from, 32), high = oo__bits(words, from + 32, 32);
    return (low | high << 32) & oo__lowest_64(count);
}

OO_AVX512 static unsigned oo__ones(uint64_t word) { return (unsigned)_mm_popcnt_u64(word); }

OO_AVX512 static unsigned oo__encode_avx512(const uint8_t *symbols,
                                            const struct oo_palette *palette, uint32_t *planes,
                                            uint32_t *tail, unsigned *n_raw) {
    uint8_t second[OO_CODEC_BLOCK + 64], third[OO_CODEC_BLOCK + 64], raw[OO_CODEC_BLOCK + 64];
    uint64_t bits[3][OO_PAIRS];
    unsigned n_second = 0, n_third = 0, n = 0;
    struct oo__bit_writer writer = {tail, 0, 0};
    struct oo_table table;
    for (size_t i = 0; i < 4; i++)
        table.part[i] = _mm512_loadu_si512(palette->code + 64 * i);
    for (size_t group = 0; group < 4; group++) {
        __m512i pairs[4];
        oo__load_pairs(symbols, group, pairs);
        for (size_t k = 0; k < 4; k++) {
            const __m512i codes = oo__look_up(pairs[k], &table);
            const uint64_t p0 = oo__plane_512(UINT64_MAX, codes, 0);
            const uint64_t p1 = oo__plane_512(UINT64_MAX, codes, 1);
            memcpy(planes + 8 * group + 2 * k, &p0, sizeof p0);
            memcpy(planes + OO_LANES + 8 * group + 2 * k, &p1, sizeof p1);
            _mm512_storeu_si512(second + n_second, _mm512_maskz_compress_epi8(p0 & p1, pairs[k]));
            n_second += oo__ones(p0 & p1);
        }
    }
    for (unsigned i = 0; i < n_second; i += 64) {
        const uint64_t among = oo__lowest_64(n_second - i);
        const __m512i some = _mm512_loadu_si512(second + i), codes = oo__look_up(some, &table);
        uint64_t all = among;
        for (int k = 0; k < 2; k++)
            all &= bits[k][i / 64] = oo__plane_512(among, codes, 2 + k);
        _mm512_storeu_si512(third + n_third, _mm512_maskz_compress_epi8(all, some));
        n_third += oo__ones(all);
    }
    for (unsigned k = 0; k < 2; k++)
        for (unsigned i = 0; i < n_second; i += 64)
            oo__put_64(&writer, bits[k][i / 64], n_second - i < 64 ? n_second - i : 64);
    for (unsigned i = 0; i < n_third; i += 64) {
        const uint64_t among = oo__lowest_64(n_third - i);
        const __m512i some = _mm512_loadu_si512(third + i), codes = oo__look_up(some, &table);
        uint64_t all = among;
        for (int k = 0; k < 3; k++)
            all &= bits[k][i / 64] = oo__plane_512(among, codes, 4 + k);
        _mm512_storeu_si512(raw + n, _mm512_maskz_compress_epi8(all, some));
        n += oo__ones(all);
    }
    for (unsigned k = 0; k < 3; k++)
        for (unsigned i = 0; i < n_third; i += 64)
            oo__put_64(&writer, bits[k][i / 64], n_third - i < 64 ? n_third - i : 64);
    for (unsigned i = 0; i < n; i++)
        oo__put(&writer, raw[i], 8);
    *writer.at = (uint32_t)writer.held;
    *n_raw = n;
    return 2 * n_second + 3 * n_third + 8 * n;
}

/* Entries of the palette from the planes of their bits, and `last` on top. */
OO_AVX512 static __m512i oo__entries(__m512i table, uint64_t b0, uint64_t b1, uint64_t b2,
                                     int last) {
    __m512i entry = _mm512_or_si512(_mm512_maskz_set1_epi8(b0, 1), _mm512_maskz_set1_epi8(b1, 2));
    entry = _mm512_or_si512(entry, _mm512_maskz_set1_epi8(b2, 4));
    return _mm512_shuffle_epi8(table, _mm512_or_si512(entry, _mm512_set1_epi8((char)last)));
}

OO_AVX512 static int oo__decode_avx512(const uint32_t *planes, const uint32_t *tail, unsigned words,
                                       const uint8_t *palette, uint8_t *symbols) {
    uint8_t second[OO_CODEC_BLOCK + 64], third[OO_CODEC_BLOCK + 64], raw[OO_CODEC_BLOCK + 64];
    const __m512i table = _mm512_broadcast_i32x4(oo__load_128(palette));
    uint64_t p0[OO_PAIRS], p1[OO_PAIRS];
    unsigned n_second = 0, n_third = 0, n_raw = 0, at;
    memcpy(p0, planes, sizeof p0);
    memcpy(p1, planes + OO_LANES, sizeof p1);
    for (unsigned i = 0; i < OO_PAIRS; i++)
        n_second += oo__ones(p0[i] & p1[i]);
    if (2 * n_second > 32 * words)
        return 0;
    for (unsigned i = 0; i < n_second; i += 64)
        n_third += oo__ones(oo__bits_64(tail, i, n_second - i) &
                            oo__bits_64(tail, n_second + i, n_second - i));
    if (2 * n_second + 3 * n_third > 32 * words)
        return 0;
    at = 2 * n_second;
    for (unsigned i = 0; i < n_third; i += 64)
        n_raw += oo__ones(oo__bits_64(tail, at + i, n_third - i) &
                          oo__bits_64(tail, at + n_third + i, n_third - i) &
                          oo__bits_64(tail, at + 2 * n_third + i, n_third - i));
    if ((at + 3 * n_third + 8 * n_raw + 31) / 32 != words)
        return 0;
    /* From the last tier to the first: what a tier sends on is where the next one's fit in. */
    for (unsigned i = 0; i < n_raw; i++)
        raw[i] = (uint8_t)oo__bits(tail, at + 3 * n_third + 8 * i, 8);
    unsigned taken = 0;
    for (unsigned i = 0; i < n_third; i += 64) {
        uint64_t b[3];
        for (unsigned k = 0; k < 3; k++)
            b[k] = oo__bits_64(tail, at + k * n_third + i, n_third - i);
        const uint64_t all = b[0] & b[1] & b[2];
        const __m512i named = oo__entries(table, b[0], b[1], b[2], 8);
        _mm512_storeu_si512(third + i,
                            _mm512_mask_expand_epi8(named, all, _mm512_loadu_si512(raw + taken)));
        taken += oo__ones(all);
    }
    taken = 0;
    for (unsigned i = 0; i < n_second; i += 64) {
        const uint64_t b0 = oo__bits_64(tail, i, n_second - i);
        const uint64_t b1 = oo__bits_64(tail, n_second + i, n_second - i);
        const __m512i named = oo__entries(table, b0, b1, 0, 4);
        _mm512_storeu_si512(
            second + i, _mm512_mask_expand_epi8(named, b0 & b1, _mm512_loadu_si512(third + taken)));
        taken += oo__ones(b0 & b1);
    }
    taken = 0;
    for (size_t group = 0; group < 4; group++) {
        __m512i pairs[4];
        for (size_t k = 0; k < 4; k++) {
            const uint64_t b0 = p0[4 * group + k], b1 = p1[4 * group + k];
            const __m512i named = oo__entries(table, b0, b1, 0, 0);
            pairs[k] = _mm512_mask_expand_epi8(named, b0 & b1, _mm512_loadu_si512(second + taken));
            taken += oo__ones(b0 & b1);
        }
        oo__store_pairs(pairs, symbols, group);
    }
    return 1;
}

const struct oo_codec *oo__codec_avx512(void) {
    static const struct oo_codec codec = {
        .name = "avx512",
        .split_words = oo__split_words_avx2,
        .join_words = oo__join_words_avx2,
        .split_bytes = oo__split_bytes_avx2,
        .join_bytes = oo__join_bytes_avx2,
        .encode = oo__encode_avx512,
        .decode = oo__decode_avx512,
    };
    const unsigned wanted =
        OO_CPU_AVX2 | OO_CPU_BMI | OO_CPU_BMI2 | OO_CPU_AVX512F | OO_CPU_AVX512BW | OO_CPU_AVX512VL;
    return oo__cpu_has(wanted, OO_CPU_AVX512VBMI | OO_CPU_AVX512VBMI2, OO_SAVED_512) ? &codec
                                                                                     : NULL;
}

#else

const struct oo_codec *oo__codec_avx2(void) { return NULL; }
const struct oo_codec *oo__codec_avx512(void) { return NULL; }

#endif
