/* arena.c - blocks in address order; see arena.h. */
#include "arena.h"

#include "status.h"

#include <stdlib.h>

static struct oo_block *oo__block_new(struct oo_arena *arena) {
    struct oo_block *block = arena->spare;
    if (block) {
        arena->spare = block->next;
        return block;
    }
    arena->allocations++;
    block = malloc(sizeof *block);
    if (block)
        block->next = NULL;
    return block;
}

static void oo__block_recycle(struct oo_arena *arena, struct oo_block *block) {
    block->next = arena->spare;
    arena->spare = block;
}

uintptr_t oo_block_address(const struct oo_block *block) { return block->segment->base + block->offset; }

enum oo_status oo_arena_add(struct oo_arena *arena, uintptr_t base, size_t bytes, uint32_t model, uintptr_t stream,
                            struct oo_segment **out) {
    struct oo_segment *segment = malloc(sizeof *segment);
    struct oo_block *block = segment ? oo__block_new(arena) : NULL;
    if (!block) {
        free(segment);
        return oo__fail(OO_E_MEMORY, "no memory for a segment's record");
    }
    *block = (struct oo_block){NULL, NULL, segment, 0, bytes, OO_NO_UNIT};
    *segment = (struct oo_segment){arena->segments, block, base, bytes, model, stream, 0};
    arena->segments = segment;
    arena->total_bytes += bytes;
    *out = segment;
    return OO_OK;
}

void oo_arena_remove(struct oo_arena *arena, struct oo_segment *segment) {
    struct oo_segment **link = &arena->segments;
    while (*link != segment)
        link = &(*link)->next;
    *link = segment->next;
    while (segment->first) {
        struct oo_block *block = segment->first;
        segment->first = block->next;
        oo__block_recycle(arena, block);
    }
    arena->total_bytes -= segment->bytes;
    free(segment);
}

void oo_arena_clear(struct oo_arena *arena) {
    while (arena->segments)
        oo_arena_remove(arena, arena->segments);
    while (arena->spare) {
        struct oo_block *block = arena->spare;
        arena->spare = block->next;
        free(block);
    }
}

/* The smallest window that ends at `last`, or first == NULL. */
static struct oo_window oo__window_ending_at(struct oo_block *last, size_t bytes, uint64_t later_than,
                                             oo_next_use next_use, const void *context, size_t *evicted) {
    struct oo_window window = {NULL, last, 0, OO_NEVER};
    *evicted = 0;
    for (struct oo_block *block = last; block; block = block->previous) {
        if (block->unit != OO_NO_UNIT) {
            const uint64_t use = next_use(context, block->unit);
            if (use <= later_than)
                return window;
            if (use < window.soonest)
                window.soonest = use;
            *evicted += block->bytes;
        }
        window.bytes += block->bytes;
        if (window.bytes >= bytes) {
            window.first = block;
            return window;
        }
    }
    return window;
}

int oo_arena_find(const struct oo_arena *arena, size_t bytes, uint64_t later_than, oo_next_use next_use,
                  const void *context, struct oo_window *window) {
    size_t least_evicted = SIZE_MAX;
    window->first = NULL;
    window->soonest = 0;
    for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next) {
        if (segment->bytes < bytes)
            continue;
        for (struct oo_block *last = segment->first; last; last = last->next) {
            size_t evicted;
            /* Below the best so far a window is of no interest: let the search stop early. */
            const uint64_t floor = window->first && window->soonest > later_than + 1 ? window->soonest - 1 : later_than;
            struct oo_window found = oo__window_ending_at(last, bytes, floor, next_use, context, &evicted);
            if (!found.first)
                continue;
            const int better = !window->first || found.soonest > window->soonest || evicted < least_evicted ||
                               (evicted == least_evicted && found.bytes < window->bytes);
            if (better) {
                *window = found;
                least_evicted = evicted;
            }
        }
    }
    return window->first != NULL;
}

int oo_arena_reserve(struct oo_arena *arena) {
    if (!arena->spare) {
        struct oo_block *block = oo__block_new(arena);
        if (!block)
            return 0;
        oo__block_recycle(arena, block);
    }
    return 1;
}

struct oo_block *oo_arena_take(struct oo_arena *arena, const struct oo_window *window, size_t bytes, uint32_t unit) {
    struct oo_segment *segment = window->first->segment;
    struct oo_block *rest = window->bytes > bytes ? oo__block_new(arena) : NULL;
    struct oo_block *block = window->first;
    struct oo_block *after = window->last->next;
    for (struct oo_block *old = block; old != after;) {
        struct oo_block *next = old->next;
        if (old->unit != OO_NO_UNIT)
            arena->used_bytes -= old->bytes;
        if (old != block)
            oo__block_recycle(arena, old);
        old = next;
    }
    block->next = after;
    if (after)
        after->previous = block;
    block->bytes = bytes;
    block->unit = unit;
    arena->used_bytes += bytes;
    if (rest) {
        *rest = (struct oo_block){block, after, segment, block->offset + bytes, window->bytes - bytes, OO_NO_UNIT};
        if (after)
            after->previous = rest;
        block->next = rest;
        if (after && after->unit == OO_NO_UNIT) { /* two free neighbours are one */
            rest->bytes += after->bytes;
            rest->next = after->next;
            if (rest->next)
                rest->next->previous = rest;
            oo__block_recycle(arena, after);
        }
    }
    return block;
}

void oo_arena_free(struct oo_arena *arena, struct oo_block *block) {
    arena->used_bytes -= block->bytes;
    block->unit = OO_NO_UNIT;
    struct oo_block *next = block->next;
    if (next && next->unit == OO_NO_UNIT) {
        block->bytes += next->bytes;
        block->next = next->next;
        if (block->next)
            block->next->previous = block;
        oo__block_recycle(arena, next);
    }
    struct oo_block *previous = block->previous;
    if (previous && previous->unit == OO_NO_UNIT) {
        previous->bytes += block->bytes;
        previous->next = block->next;
        if (previous->next)
            previous->next->previous = previous;
        oo__block_recycle(arena, block);
    }
}
