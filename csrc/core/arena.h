/* arena.h - device memory as blocks in address order. Pure bookkeeping: it knows no driver, and of
 * time only what the caller's next_use returns. */
#ifndef OO_ARENA_H
#define OO_ARENA_H

#include "oracle_offload.h"

#define OO_NO_UNIT  UINT32_MAX
#define OO_NEVER    UINT64_MAX /* as a next use: not in the known future */
#define OO_ANYWHERE SIZE_MAX

struct oo_segment;

/* A run of bytes: free, or occupied by one unit. */
struct oo_block {
    struct oo_block *previous, *next; /* by address, within the segment */
    struct oo_segment *segment;
    size_t offset, bytes;
    uint64_t placed; /* serial number of the placement; 0 while free */
    uint32_t unit;
};

struct oo_segment {
    struct oo_segment *next;
    struct oo_block *first;
    struct oo_block *near; /* where the latest search by position ended: the next one is close */
    uintptr_t base;
    size_t bytes;
    uint32_t lease;
    uintptr_t stream; /* the one it was allocated on */
    uintptr_t lent;   /* its address as it was lent, before alignment */
};

struct oo_arena {
    struct oo_segment *segments;
    struct oo_block *spare; /* recycled block records, linked by `next` */
    size_t total_bytes, used_bytes;
    size_t free_most; /* no free block is larger */
    uint64_t placements;
    uint64_t layout;      /* how often segments came or went: positions hold as long as it stays */
    uint64_t allocations; /* host records created */
};

/* Consecutive blocks [first, last] of one segment that hold at least the asked bytes. */
struct oo_window {
    struct oo_block *first, *last;
    size_t bytes;
    size_t skip;      /* where in it the unit belongs, or OO_ANYWHERE */
    uint64_t soonest; /* smallest next use of the occupants; OO_NEVER when all is free */
};

/* When the occupant will be used next, in visits from now; 0 when it must stay. */
typedef uint64_t (*oo_next_use)(const void *context, uint32_t unit);

enum oo_status oo_arena_add(struct oo_arena *arena, uintptr_t base, size_t bytes, uint32_t lease,
                            uintptr_t stream, struct oo_segment **out);
/* The segment must be free of units. */
void oo_arena_remove(struct oo_arena *arena, struct oo_segment *segment);
void oo_arena_clear(struct oo_arena *arena);

/* The search for a window, all of whose occupants are next used later than `later_than`. Such
 * occupants are all fair to evict: the window with the fewest bytes of them is taken, which keeps
 * units of different sizes from wasting the arena. With `later_than` 0 (a unit is needed at once,
 * so nothing is known to be fair) it is the window needed last. */
struct oo_search {
    size_t bytes;
    uint64_t later_than;
    oo_next_use next_use;
    const void *context;
    size_t evicted;           /* by the best so far */
    struct oo_window *window; /* the best so far; first == NULL: none */
};

void oo_search_begin(struct oo_search *search);
/* Look at the smallest window that ends with this block. */
void oo_search_at(struct oo_search *search, struct oo_block *last);
/* Look everywhere. Returns 0 when there is none. */
int oo_arena_find(const struct oo_arena *arena, struct oo_search *search);
/* Find a free window. */
int oo_arena_find_free(struct oo_arena *arena, size_t bytes, struct oo_window *window);
/* Positions count through all segments. The first one from `position` on, around the end, where
 * `bytes` fit in one segment; 0 when there is none. */
size_t oo_arena_fit(const struct oo_arena *arena, size_t position, size_t bytes);
/* The last position where they end at `end` or before; OO_ANYWHERE when there is none. */
size_t oo_arena_fit_below(const struct oo_arena *arena, size_t end, size_t bytes);
/* The window over `bytes` at such a position, occupied or not. 0: they leave their segment. */
int oo_arena_window_at(struct oo_arena *arena, size_t position, size_t bytes,
                       struct oo_window *window);
/* Records for one more unit in the arena: its block and the gap next to it. 0: no memory. */
int oo_arena_reserve(struct oo_arena *arena);
/* Put `unit` into the window: where the window says, or against the neighbour that was placed last,
 * so that what is left over is where the next placement will be. Occupants are evicted by this.
 * Needs no memory: each unit that could be in the arena has its records reserved. */
struct oo_block *oo_arena_take(struct oo_arena *arena, const struct oo_window *window, size_t bytes,
                               uint32_t unit);
void oo_arena_free(struct oo_arena *arena, struct oo_block *block);
uintptr_t oo_block_address(const struct oo_block *block);

#endif
