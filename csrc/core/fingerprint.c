/* fingerprint.c - a hash over samples of a master; see fingerprint.h. */
#include "fingerprint.h"
#include "oracle_offload.h"

#include <string.h>

enum { OO_LINE = 64, OO_LANES = OO_LINE / 8 };
static const uint64_t oo__odd = UINT64_C(0x9E3779B97F4A7C15);

static uint64_t oo__mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * oo__odd;
    return hash ^ hash >> 29;
}

/* One hash per word of a cache line: eight chains that the processor runs side by side. */
struct oo_lanes {
    uint64_t lane[OO_LANES];
};

static void oo__mix_line(struct oo_lanes *lanes, const char *line) {
    uint64_t words[OO_LANES];
    memcpy(words, line, sizeof words);
    /* Otherwise gcc 12 makes it a loop over vectors, whose product of 64 bits is three of 32: it
     * takes 1.7 times as long. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 8
#endif
    for (int i = 0; i < OO_LANES; i++)
        lanes->lane[i] = oo__mix(lanes->lane[i], words[i]);
}

/* A whole cache line at each place: it costs the same misses as one word there, and eight
 * times the words make a rewrite that leaves most rounded weights as they were (a small LoRA merged
 * into bfloat16) visible anyway. */
uint64_t oo__fingerprint(const void *memory, size_t bytes, enum oo_reading reading) {
    const size_t places = (size_t)reading;
    const char *begin = memory;
    struct oo_lanes lanes = {{bytes}};
    size_t tail = 0;
    if (bytes <= places * OO_LINE) { /* OO_WHOLE: more places than any memory has lines */
        for (; tail + OO_LINE <= bytes; tail += OO_LINE)
            oo__mix_line(&lanes, begin + tail);
    } else {
        const size_t stride = (bytes - OO_LINE) / (places - 1);
        for (size_t i = 0; i + 1 < places; i++)
            oo__mix_line(&lanes, begin + i * stride / OO_LINE * OO_LINE);
        oo__mix_line(&lanes, begin + bytes - OO_LINE);
        tail = bytes;
    }
    if (tail < bytes) {
        char line[OO_LINE] = {0};
        memcpy(line, begin + tail, bytes - tail);
        oo__mix_line(&lanes, line);
    }
    uint64_t hash = 0;
    for (int i = 0; i < OO_LANES; i++)
        hash = oo__mix(hash, lanes.lane[i]);
    return hash;
}

uint64_t oo_fingerprint(const void *memory, size_t bytes) {
    return oo__fingerprint(memory, bytes, OO_WHOLE);
}
