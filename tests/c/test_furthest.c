/* The units in the arena by their next use, against a plain list of them. */
#include "check.h"
#include "furthest.h"

#include <stdlib.h>

enum { MOST = 300 };

struct list {
    struct oo_furthest heap;
    uint64_t uses[MOST]; /* of each unit; 0: it is not there */
};

static void begin(struct list *list) {
    *list = (struct list){0};
    CHECK(oo_furthest_reserve(&list->heap, MOST / 2) && oo_furthest_reserve(&list->heap, MOST),
          "no memory");
}

static void put(struct list *list, uint32_t unit, uint64_t use) {
    oo_furthest_put(&list->heap, unit, use);
    list->uses[unit] = use;
}

static void take_out(struct list *list, uint32_t unit) {
    oo_furthest_remove(&list->heap, unit);
    list->uses[unit] = 0;
}

/* A walk meets the units in order of use, each once, as many as there are or as it may. */
static void check_the_walk(const struct list *list, int seed) {
    struct oo_furthest_walk walk;
    uint8_t met[MOST] = {0};
    uint64_t least = UINT64_MAX;
    unsigned count = 0, n = 0, before = 0;
    oo_furthest_begin(&list->heap, &walk);
    for (const struct oo_far *far; (far = oo_furthest_next(&list->heap, &walk)) != NULL; count++) {
        CHECK(far->use <= least, "seed %d: %d after %d", seed, (int)far->use, (int)least);
        CHECK(far->use == list->uses[far->unit] && !met[far->unit]++, "seed %d: unit %u", seed,
              far->unit);
        least = far->use;
    }
    for (unsigned i = 0; i < MOST; i++) {
        n += list->uses[i] != 0;
        before += list->uses[i] > least;
    }
    CHECK(list->heap.count == n, "seed %d: %u of %u units", seed, list->heap.count, n);
    CHECK(count == (n < OO_FURTHEST_STEPS ? n : OO_FURTHEST_STEPS), "seed %d: %u of %u met", seed,
          count, n);
    CHECK(before <= count, "seed %d: %u are used later than those that were met", seed, before);
    CHECK((walk.n_open == 0) == (n <= OO_FURTHEST_STEPS), "seed %d: %u of %u left", seed,
          walk.n_open, n);
}

CASE(what_is_used_last_comes_first) {
    for (int seed = 1; seed <= 60; seed++) {
        struct list list;
        srand((unsigned)seed);
        begin(&list);
        const int most = 2 + rand() % (MOST - 1); /* also fewer than a walk may meet */
        for (int i = 0; i < 400; i++) {
            const uint32_t unit = (uint32_t)(rand() % most);
            if (rand() % 3)
                put(&list, unit, 1 + (uint64_t)(rand() % 200));
            else
                take_out(&list, unit);
            if (i % 10 == 0)
                check_the_walk(&list, seed);
        }
        oo_furthest_clear(&list.heap);
        for (unsigned i = 0; i < MOST; i++)
            list.uses[i] = 0;
        check_the_walk(&list, seed);
        put(&list, 0, 7);
        check_the_walk(&list, seed);
        oo_furthest_free(&list.heap);
        CHECK(!list.heap.heap && !list.heap.capacity, "not empty");
    }
}

CHECK_MAIN(NULL)
