/* furthest.h - the units that are in the arena, those needed last first. Pure bookkeeping: what is
 * evicted is looked for among a few, however many units there are. */
#ifndef OO_FURTHEST_H
#define OO_FURTHEST_H

#include <stdint.h>

/* A binary heap whose first entry has the latest use. Unit ids are dense. */
struct oo_furthest {
    struct oo_far {
        uint64_t use; /* number of the visit */
        uint32_t unit;
    } *heap;
    uint32_t *places; /* of each unit in the heap, from 1; 0: it is not there */
    uint32_t count, capacity;
};

/* Memory for units 0 to capacity - 1. 0: there is none, and nothing has changed. */
int oo_furthest_reserve(struct oo_furthest *furthest, uint32_t capacity);
void oo_furthest_clear(struct oo_furthest *furthest);
void oo_furthest_free(struct oo_furthest *furthest);
/* The unit is used then: it is put in, or moved. */
void oo_furthest_put(struct oo_furthest *furthest, uint32_t unit, uint64_t use);
void oo_furthest_remove(struct oo_furthest *furthest, uint32_t unit);

/* The entries in order, the latest use first; the heap must stay as it is meanwhile. */
enum { OO_FURTHEST_STEPS = 32 };
struct oo_furthest_walk {
    uint32_t open[OO_FURTHEST_STEPS + 1]; /* places whose parents have been met, in order of use */
    uint32_t n_open, steps;
};
void oo_furthest_begin(const struct oo_furthest *furthest, struct oo_furthest_walk *walk);
/* The next entry; NULL at the end, and after OO_FURTHEST_STEPS of them. */
const struct oo_far *oo_furthest_next(const struct oo_furthest *furthest,
                                      struct oo_furthest_walk *walk);

#endif
