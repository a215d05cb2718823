/* furthest.c - a heap over next uses; see furthest.h. */
#include "furthest.h"

#include <stdlib.h>
#include <string.h>

int oo_furthest_reserve(struct oo_furthest *furthest, uint32_t capacity) {
    struct oo_far *heap = realloc(furthest->heap, capacity * sizeof *heap);
    furthest->heap = heap ? heap : furthest->heap;
    uint32_t *places = realloc(furthest->places, capacity * sizeof *places);
    furthest->places = places ? places : furthest->places;
    if (!heap || !places)
        return 0;
    memset(places + furthest->capacity, 0, (capacity - furthest->capacity) * sizeof *places);
    furthest->capacity = capacity;
    return 1;
}

void oo_furthest_clear(struct oo_furthest *furthest) {
    for (uint32_t i = 0; i < furthest->count; i++)
        furthest->places[furthest->heap[i].unit] = 0;
    furthest->count = 0;
}

void oo_furthest_free(struct oo_furthest *furthest) {
    free(furthest->heap);
    free(furthest->places);
    *furthest = (struct oo_furthest){0};
}

static void oo__far_set(struct oo_furthest *furthest, uint32_t place, struct oo_far far) {
    furthest->heap[place - 1] = far;
    furthest->places[far.unit] = place;
}

/* Move an entry, which is to be at `place`, to where its parent is used later and its children are
 * not. */
static void oo__far_sift(struct oo_furthest *furthest, uint32_t place, struct oo_far far) {
    const struct oo_far *heap = furthest->heap;
    for (; place > 1 && heap[place / 2 - 1].use < far.use; place /= 2)
        oo__far_set(furthest, place, heap[place / 2 - 1]);
    for (uint32_t child; (child = 2 * place) <= furthest->count; place = child) {
        if (child < furthest->count && heap[child].use > heap[child - 1].use)
            child++;
        if (heap[child - 1].use <= far.use)
            break;
        oo__far_set(furthest, place, heap[child - 1]);
    }
    oo__far_set(furthest, place, far);
}

void oo_furthest_put(struct oo_furthest *furthest, uint32_t unit, uint64_t use) {
    uint32_t place = furthest->places[unit];
    if (!place)
        place = ++furthest->count;
    oo__far_sift(furthest, place, (struct oo_far){use, unit});
}

void oo_furthest_remove(struct oo_furthest *furthest, uint32_t unit) {
    const uint32_t place = furthest->places[unit];
    if (!place)
        return;
    furthest->places[unit] = 0;
    const struct oo_far last = furthest->heap[--furthest->count];
    if (place <= furthest->count)
        oo__far_sift(furthest, place, last);
}

static void oo__walk_open(const struct oo_furthest *furthest, struct oo_furthest_walk *walk,
                          uint32_t place) {
    if (place > furthest->count)
        return;
    uint32_t i = walk->n_open++;
    for (; i > 0 && furthest->heap[walk->open[i - 1] - 1].use > furthest->heap[place - 1].use; i--)
        walk->open[i] = walk->open[i - 1];
    walk->open[i] = place;
}

void oo_furthest_begin(const struct oo_furthest *furthest, struct oo_furthest_walk *walk) {
    walk->n_open = walk->steps = 0;
    oo__walk_open(furthest, walk, 1);
}

const struct oo_far *oo_furthest_next(const struct oo_furthest *furthest,
                                      struct oo_furthest_walk *walk) {
    if (walk->n_open == 0 || walk->steps == OO_FURTHEST_STEPS)
        return NULL;
    walk->steps++;
    const uint32_t place = walk->open[--walk->n_open];
    oo__walk_open(furthest, walk, 2 * place);
    oo__walk_open(furthest, walk, 2 * place + 1);
    return &furthest->heap[place - 1];
}
