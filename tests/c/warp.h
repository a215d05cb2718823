/* warp.h - run a kernel of csrc/kernels on the host, as C.
 *
 * A warp is 32 lanes, each on a stack of its own. A lane runs until it gives the others a value
 * (__shfl_sync and its kin), then the next one does; so all have given theirs when the first goes
 * on. Lanes that meet at different calls, or of which some have ended, end the test. Warps run one
 * after the other: a kernel here may share nothing between them.
 */
#ifndef WARP_H
#define WARP_H

#include "check.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define OO_KERNEL static void
#define OO_DEVICE static inline

enum { WARP_LANES = 32, WARP_STACK = 64 << 10 };

struct warp_given {
    const char *call;
    uint32_t value, mask;
};

static struct {
    ucontext_t outside, lanes[WARP_LANES];
    char *stacks[WARP_LANES];
    int ended[WARP_LANES];
    /* Of this meeting and of the one before, which slower lanes still read. */
    struct warp_given given[2][WARP_LANES];
    unsigned meetings[WARP_LANES];
    unsigned lane, thread, group;
    void (*kernel)(void *arguments);
    void *arguments;
} warp;

struct warp_index {
    uint32_t x;
};
static inline struct warp_index warp_thread(void) {
    return (struct warp_index){warp.thread + warp.lane};
}
static inline struct warp_index warp_group(void) { return (struct warp_index){warp.group}; }
#define threadIdx warp_thread()
#define blockIdx  warp_group()

/* Let the next lane run that has not ended. */
static inline void warp_next(void) {
    const unsigned from = warp.lane;
    for (unsigned i = 1; i <= WARP_LANES; i++) {
        const unsigned to = (from + i) % WARP_LANES;
        if (warp.ended[to] || to == from)
            continue;
        warp.lane = to;
        swapcontext(&warp.lanes[from], &warp.lanes[to]);
        warp.lane = from;
        return;
    }
    if (warp.ended[from])
        swapcontext(&warp.lanes[from], &warp.outside);
}

/* Give the others a value; what they have given is there afterwards. */
static inline const struct warp_given *warp_meet(const char *call, uint32_t mask, uint32_t value) {
    const unsigned lane = warp.lane, turn = warp.meetings[lane]++ & 1;
    warp.given[turn][lane] = (struct warp_given){call, value, mask};
    warp_next();
    for (unsigned i = 0; i < WARP_LANES; i++)
        if (warp.meetings[i] < warp.meetings[lane] || warp.given[turn][i].mask != mask ||
            strcmp(warp.given[turn][i].call, call) != 0) {
            fprintf(stderr, "lane %u is at %s, lane %u is not\n", lane, call, i);
            abort();
        }
    return warp.given[turn];
}

static inline uint32_t __shfl_sync(uint32_t mask, uint32_t value, uint32_t lane) {
    return warp_meet("__shfl_sync", mask, value)[lane % WARP_LANES].value;
}
static inline uint32_t __shfl_up_sync(uint32_t mask, uint32_t value, uint32_t distance) {
    const struct warp_given *given = warp_meet("__shfl_up_sync", mask, value);
    return given[warp.lane >= distance ? warp.lane - distance : warp.lane].value;
}

/* ---- what one lane computes alone ---- */

static inline uint32_t __popc(uint32_t bits) { return (uint32_t)__builtin_popcount(bits); }
static inline uint32_t __ffs(uint32_t bits) { return (uint32_t)__builtin_ffs((int)bits); }
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31));
}
static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (unsigned i = 0; i < 4; i++)
        result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

typedef struct {
    uint32_t x, y, z, w;
} __attribute__((aligned(16))) uint4;
typedef struct {
    uint32_t x, y;
} __attribute__((aligned(8))) uint2;
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return (uint4){x, y, z, w};
}
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return (uint2){x, y}; }

/* ---- launching ---- */

static void warp_lane_runs(void) {
    warp.kernel(warp.arguments);
    warp.ended[warp.lane] = 1;
    warp_next();
}

static void warp_prepare(unsigned lane) {
    ucontext_t *context = &warp.lanes[lane];
    if (!warp.stacks[lane])
        warp.stacks[lane] = malloc(WARP_STACK);
    getcontext(context);
    context->uc_stack.ss_sp = warp.stacks[lane];
    context->uc_stack.ss_size = WARP_STACK;
    context->uc_link = NULL;
    makecontext(context, warp_lane_runs, 0);
    warp.ended[lane] = 0;
    warp.meetings[lane] = 0;
}

/* Run `groups` groups of `threads` threads each; `kernel` calls one with its arguments. */
static void warp_launch(unsigned groups, unsigned threads, void (*kernel)(void *),
                        void *arguments) {
    warp.kernel = kernel;
    warp.arguments = arguments;
    for (warp.group = 0; warp.group < groups; warp.group++)
        for (warp.thread = 0; warp.thread < threads; warp.thread += WARP_LANES) {
            for (unsigned lane = 0; lane < WARP_LANES; lane++)
                warp_prepare(lane);
            warp.lane = 0;
            swapcontext(&warp.outside, &warp.lanes[0]);
        }
}

static void warp_end(void) {
    for (unsigned i = 0; i < WARP_LANES; i++)
        free(warp.stacks[i]);
    memset(warp.stacks, 0, sizeof warp.stacks);
}

#endif
