/* codec_portable.c - blocks in plain C: what the other implementations are compared with. */
#include "codec_block.h"

static unsigned oo__count_ones(uint32_t word) {
    word = word - (word >> 1 & 0x55555555u);
    word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
    return ((word + (word >> 4)) & 0x0F0F0F0Fu) * 0x01010101u >> 24;
}

static void oo__split_words(const uint16_t *weights, uint8_t *symbols, uint8_t *low) {
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i++) {
        symbols[i] = (uint8_t)(weights[i] >> 7);
        low[i] = (uint8_t)(weights[i] << 1 | weights[i] >> 15);
    }
}

static void oo__join_words(const uint8_t *symbols, const uint8_t *low, uint16_t *weights) {
    for (unsigned i = 0; i < OO_CODEC_BLOCK; i++)
        weights[i] = (uint16_t)((low[i] & 1) << 15 | symbols[i] << 7 | low[i] >> 1);
}

static void oo__split_bytes(const uint8_t *weights, unsigned rotate, unsigned low_bits,
                            uint8_t *symbols, uint32_t *low) {
    memset(low, 0, sizeof *low * OO_LANES * low_bits);
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            const unsigned place = oo__place(lane, bit);
            const unsigned turned =
                (weights[place] << rotate | weights[place] >> (8 - rotate)) & 255;
            symbols[place] = (uint8_t)(turned >> low_bits);
            for (unsigned k = 0; k < low_bits; k++)
                low[OO_LANES * k + lane] |= (turned >> k & 1) << bit;
        }
}

static void oo__join_bytes(const uint8_t *symbols, unsigned rotate, unsigned low_bits,
                           const uint32_t *low, uint8_t *weights) {
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            const unsigned place = oo__place(lane, bit);
            unsigned turned = (unsigned)symbols[place] << low_bits & 255;
            for (unsigned k = 0; k < low_bits; k++)
                turned |= (low[OO_LANES * k + lane] >> bit & 1) << k;
            weights[place] = (uint8_t)(turned >> rotate | turned << (8 - rotate));
        }
}

static unsigned oo__encode(const uint8_t *symbols, const struct oo_palette *palette,
                           uint32_t *planes, uint32_t *tail, unsigned *n_raw) {
    uint8_t second[OO_CODEC_BLOCK], third[OO_CODEC_BLOCK], raw[OO_CODEC_BLOCK];
    unsigned n_second = 0, n_third = 0;
    memset(planes, 0, sizeof *planes * OO_PLANES);
    *n_raw = 0;
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            const uint8_t symbol = symbols[oo__place(lane, bit)];
            const unsigned code = palette->code[symbol];
            planes[lane] |= (code & 1u) << bit;
            planes[OO_LANES + lane] |= (code >> 1 & 1u) << bit;
            if ((code & 3) != 3)
                continue;
            second[n_second++] = code >> 2 & 3;
            if ((code >> 2 & 3) != 3)
                continue;
            third[n_third++] = code >> 4 & 7;
            if ((code >> 4 & 7) == 7)
                raw[(*n_raw)++] = symbol;
        }
    struct oo__bit_writer writer = {tail, 0, 0};
    for (unsigned k = 0; k < 2; k++)
        for (unsigned i = 0; i < n_second; i++)
            oo__put(&writer, (uint32_t)second[i] >> k & 1, 1);
    for (unsigned k = 0; k < 3; k++)
        for (unsigned i = 0; i < n_third; i++)
            oo__put(&writer, (uint32_t)third[i] >> k & 1, 1);
    for (unsigned i = 0; i < *n_raw; i++)
        oo__put(&writer, raw[i], 8);
    *writer.at = (uint32_t)writer.held;
    return 2 * n_second + 3 * n_third + 8 * *n_raw;
}

/* How many of `count` codes are all ones; the planes of their bits follow one another. */
static unsigned oo__sent_on(const uint32_t *tail, unsigned from, unsigned count, unsigned planes) {
    unsigned sum = 0;
    for (unsigned i = 0; i < count; i += 32) {
        uint32_t all = oo__lowest(count - i);
        for (unsigned k = 0; k < planes; k++)
            all &= oo__bits(tail, from + k * count + i, 32);
        sum += oo__count_ones(all);
    }
    return sum;
}

static int oo__decode(const uint32_t *planes, const uint32_t *tail, unsigned words,
                      const uint8_t *palette, uint8_t *symbols) {
    unsigned n_second = 0;
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        n_second += oo__count_ones(planes[lane] & planes[OO_LANES + lane]);
    if (2 * n_second > 32 * words)
        return 0;
    const unsigned third = 2 * n_second, n_third = oo__sent_on(tail, 0, n_second, 2);
    if (third + 3 * n_third > 32 * words)
        return 0;
    const unsigned raw = third + 3 * n_third, n_raw = oo__sent_on(tail, third, n_third, 3);
    if ((raw + 8 * n_raw + 31) / 32 != words)
        return 0;
    unsigned at_second = 0, at_third = 0, at_raw = 0;
    for (unsigned lane = 0; lane < OO_LANES; lane++)
        for (unsigned bit = 0; bit < 32; bit++) {
            unsigned code = (planes[lane] >> bit & 1) | (planes[OO_LANES + lane] >> bit & 1) << 1;
            uint8_t symbol = palette[code];
            if (code == 3) {
                code = oo__bits(tail, at_second, 1) | oo__bits(tail, n_second + at_second, 1) << 1;
                at_second++;
                symbol = palette[4 + code];
                if (code == 3) {
                    code = 0;
                    for (unsigned k = 0; k < 3; k++)
                        code |= oo__bits(tail, third + k * n_third + at_third, 1) << k;
                    at_third++;
                    symbol = code == 7 ? (uint8_t)oo__bits(tail, raw + 8 * at_raw++, 8)
                                       : palette[8 + code];
                }
            }
            symbols[oo__place(lane, bit)] = symbol;
        }
    return 1;
}

const struct oo_codec oo__codec_portable = {
    .name = "portable",
    .split_words = oo__split_words,
    .join_words = oo__join_words,
    .split_bytes = oo__split_bytes,
    .join_bytes = oo__join_bytes,
    .encode = oo__encode,
    .decode = oo__decode,
};
