/* arena.c - blocks in address order; see arena.h. */
#include "arena.h"

#include "../base/status.h"

#include <stdlib.h>

static struct oo_block *oo__block_new(struct oo_arena *arena) {
    struct oo_block *block = arena->spare;
    arena->spare = block->next;
    return block;
}

static void oo__block_recycle(struct oo_arena *arena, struct oo_block *block) {
    block->next = arena->spare;
    arena->spare = block;
}

/* The block takes the bytes of the one after it. */
static void oo__block_absorb_next(struct oo_arena *arena, struct oo_block *block) {
    struct oo_block *next = block->next;
    block->bytes += next->bytes;
    block->next = next->next;
    if (block->next)
        block->next->previous = block;
    if (block->segment->near == next)
        block->segment->near = block;
    oo__block_recycle(arena, next);
}

/* Free neighbours are one block. */
static void oo__block_merge(struct oo_arena *arena, struct oo_block *block) {
    if (block->next && block->next->unit == OO_NO_UNIT)
        oo__block_absorb_next(arena, block);
    if (block->previous && block->previous->unit == OO_NO_UNIT) {
        block = block->previous;
        oo__block_absorb_next(arena, block);
    }
    if (block->bytes > arena->free_most)
        arena->free_most = block->bytes;
}

uintptr_t oo_block_address(const struct oo_block *block) {
    return block->segment->base + block->offset;
}

enum oo_status oo_arena_add(struct oo_arena *arena, uintptr_t base, size_t bytes, uint32_t lease,
                            uintptr_t stream, struct oo_segment **out) {
    struct oo_segment *segment = malloc(sizeof *segment);
    if (!segment || !oo_arena_reserve(arena)) {
        free(segment);
        return oo__fail(OO_E_MEMORY, "no memory for a segment's record");
    }
    struct oo_block *block = oo__block_new(arena);
    *block = (struct oo_block){NULL, NULL, segment, 0, bytes, 0, OO_NO_UNIT};
    *segment = (struct oo_segment){NULL, block, block, base, bytes, lease, stream, 0};
    struct oo_segment **last = &arena->segments; /* positions in those before it stay */
    while (*last)
        last = &(*last)->next;
    *last = segment;
    arena->total_bytes += bytes;
    if (bytes > arena->free_most)
        arena->free_most = bytes;
    arena->layout++;
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
    arena->layout++;
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

/* ---- search ---- */

/* The smallest window that ends at `last`, or first == NULL. */
static struct oo_window oo__window_ending_at(const struct oo_search *search, struct oo_block *last,
                                             size_t *evicted) {
    struct oo_window window = {NULL, last, 0, OO_ANYWHERE, OO_NEVER};
    *evicted = 0;
    for (struct oo_block *block = last; block; block = block->previous) {
        if (block->unit != OO_NO_UNIT) {
            const uint64_t use = search->next_use(search->context, block->unit);
            if (use <= search->later_than)
                return window;
            if (use < window.soonest)
                window.soonest = use;
            *evicted += block->bytes;
        }
        window.bytes += block->bytes;
        if (window.bytes >= search->bytes) {
            window.first = block;
            return window;
        }
    }
    return window;
}

int oo_arena_find_free(struct oo_arena *arena, size_t bytes, struct oo_window *window) {
    size_t most = 0;
    if (bytes > arena->free_most)
        return 0;
    for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next) {
        for (struct oo_block *block = segment->first; block; block = block->next) {
            if (block->unit != OO_NO_UNIT)
                continue;
            if (block->bytes >= bytes) {
                *window = (struct oo_window){block, block, block->bytes, OO_ANYWHERE, OO_NEVER};
                return 1;
            }
            most = block->bytes > most ? block->bytes : most;
        }
    }
    arena->free_most = most;
    return 0;
}

void oo_search_begin(struct oo_search *search) {
    search->evicted = SIZE_MAX;
    search->window->first = NULL;
}

void oo_search_at(struct oo_search *search, struct oo_block *last) {
    size_t evicted;
    const struct oo_window found = oo__window_ending_at(search, last, &evicted);
    if (!found.first)
        return;
    const int later = !search->window->first || found.soonest > search->window->soonest;
    const int fewer = evicted < search->evicted || (evicted == search->evicted && later);
    if (search->later_than ? fewer : later) {
        *search->window = found;
        search->evicted = evicted;
    }
}

int oo_arena_find(const struct oo_arena *arena, struct oo_search *search) {
    oo_search_begin(search);
    for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next)
        if (segment->bytes >= search->bytes)
            for (struct oo_block *last = segment->first; last; last = last->next)
                oo_search_at(search, last);
    return search->window->first != NULL;
}

size_t oo_arena_fit(const struct oo_arena *arena, size_t position, size_t bytes) {
    for (int lap = 0; lap < 2; lap++) {
        size_t begin = 0;
        for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next) {
            const size_t offset = position > begin ? position - begin : 0;
            if (offset < segment->bytes && segment->bytes - offset >= bytes)
                return begin + offset;
            begin += segment->bytes;
        }
        position = 0;
    }
    return 0;
}

size_t oo_arena_fit_below(const struct oo_arena *arena, size_t end, size_t bytes) {
    size_t begin = 0, found = OO_ANYWHERE;
    for (const struct oo_segment *segment = arena->segments; segment && begin < end;
         begin += segment->bytes, segment = segment->next) {
        const size_t room = end - begin < segment->bytes ? end - begin : segment->bytes;
        if (room >= bytes)
            found = begin + room - bytes;
    }
    return found;
}

int oo_arena_window_at(struct oo_arena *arena, size_t position, size_t bytes,
                       struct oo_window *window) {
    struct oo_segment *segment = arena->segments;
    while (segment && position >= segment->bytes) {
        position -= segment->bytes;
        segment = segment->next;
    }
    if (!segment || segment->bytes - position < bytes)
        return 0;
    struct oo_block *block = segment->near;
    while (block->offset > position)
        block = block->previous;
    while (block->offset + block->bytes <= position)
        block = block->next;
    segment->near = block;
    *window = (struct oo_window){block, block, block->bytes, position - block->offset, OO_NEVER};
    while (window->bytes - window->skip < bytes) {
        window->last = window->last->next;
        window->bytes += window->last->bytes;
    }
    return 1;
}

int oo_arena_reserve(struct oo_arena *arena) {
    for (int i = 0; i < 2; i++) {
        struct oo_block *block = malloc(sizeof *block);
        if (!block)
            return 0;
        arena->allocations++;
        oo__block_recycle(arena, block);
    }
    return 1;
}

/* Cut a block in two, `bytes` from its begin; returns the upper part. */
static struct oo_block *oo__block_split(struct oo_arena *arena, struct oo_block *block,
                                        size_t bytes) {
    struct oo_block *upper = oo__block_new(arena);
    *upper = *block;
    upper->offset += bytes;
    upper->bytes -= bytes;
    upper->previous = block;
    block->bytes = bytes;
    block->next = upper;
    if (upper->next)
        upper->next->previous = upper;
    return upper;
}

struct oo_block *oo_arena_take(struct oo_arena *arena, const struct oo_window *window, size_t bytes,
                               uint32_t unit) {
    struct oo_block *before = window->first->previous;
    struct oo_block *after = window->last->next;
    struct oo_block *block = window->first, *low = NULL, *high = NULL;
    size_t skip = window->skip;
    /* Streaming upwards or downwards, placements then follow each other without holes between them.
     */
    if (skip == OO_ANYWHERE)
        skip = after && after->placed > (before ? before->placed : 0) ? window->bytes - bytes : 0;
    for (struct oo_block *old = block; old != after;) {
        struct oo_block *next = old->next;
        if (old->unit != OO_NO_UNIT)
            arena->used_bytes -= old->bytes;
        if (block->segment->near == old)
            block->segment->near = block;
        if (old != block)
            oo__block_recycle(arena, old);
        old = next;
    }
    /* One free block over the whole window, split where something is left over. */
    *block = (struct oo_block){before,        after, block->segment, block->offset,
                               window->bytes, 0,     OO_NO_UNIT};
    if (after)
        after->previous = block;
    if (skip) {
        low = block;
        block = oo__block_split(arena, block, skip);
    }
    if (block->bytes > bytes)
        high = oo__block_split(arena, block, bytes);
    block->unit = unit; /* before merging: a block without a unit is free */
    block->placed = ++arena->placements;
    arena->used_bytes += bytes;
    if (low)
        oo__block_merge(arena, low);
    if (high)
        oo__block_merge(arena, high);
    return block;
}

void oo_arena_free(struct oo_arena *arena, struct oo_block *block) {
    arena->used_bytes -= block->bytes;
    block->unit = OO_NO_UNIT;
    block->placed = 0;
    oo__block_merge(arena, block);
}
