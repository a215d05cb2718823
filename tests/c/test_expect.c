/* The order that one engine has learned, passed to the next before its first step. */
#include "world.h"

enum { USES = 3 * UNITS, ARENA = 80000 };

static size_t visits_of(struct world *w, struct oo_visit *visits, size_t capacity) {
    size_t count = 0;
    need(oo_engine_visits(w->engine, w->model, visits, capacity, &count), "visits");
    return count;
}

CASE(test_uses_are_told_oldest_first) {
    struct world w;
    struct oo_visit visits[USES + 1];
    world_open(&w, 300000, -1);
    CHECK(visits_of(&w, visits, USES) == 0, "before the first use");
    need(step(&w), "step");
    memset(visits, 0x55, sizeof visits);
    CHECK(visits_of(&w, visits, USES) == USES, "one step");
    for (unsigned i = 0; i < UNITS; i++)
        CHECK(visits[i].unit == w.unit[i] && visits[i].kind == OO_FORWARD, "use %u", i);
    CHECK(visits[UNITS].unit == w.unit[UNITS - 4] && visits[UNITS].kind == OO_RECOMPUTE,
          "recompute");
    CHECK(visits[USES - 1].unit == w.unit[0] && visits[USES - 1].kind == OO_BACKWARD, "the last");
    CHECK(visits[USES].unit == 0x55555555u, "more rows than there are");
    memset(visits, 0x55, sizeof visits);
    CHECK(visits_of(&w, visits, 2) == USES && visits[1].unit == w.unit[1] &&
              visits[2].unit == 0x55555555u,
          "more rows than there is room for");
    uint32_t other;
    size_t count = 9;
    need(oo_model_add(w.engine, &other), "model");
    need(oo_engine_visits(w.engine, other, visits, USES, &count), "visits");
    CHECK(count == 0, "another model has %zu", count);
    need(oo_model_remove(w.engine, other), "remove");
    world_close(&w, "told");
}

/* Against the order of creation, which is what is guessed without any other. */
static void reversed_step(struct world *w) {
    for (unsigned i = UNITS; i-- > 0;)
        need(use(w, i, OO_FORWARD), "forward");
    for (unsigned i = 0; i < UNITS; i++)
        need(use(w, i, OO_BACKWARD), "backward");
}

CASE(test_an_expected_step_has_one_late_copy) {
    struct world w;
    struct oo_visit visits[USES];
    uint64_t late[2], bytes[2];
    world_open(&w, ARENA, -1);
    reversed_step(&w);
    CHECK(visits_of(&w, visits, USES) == 2 * UNITS, "one step");
    late[0] = stats_of(&w).late;
    bytes[0] = stats_of(&w).h2d_bytes;
    world_close(&w, "learned");
    world_open(&w, ARENA, -1);
    need(oo_engine_expect(w.engine, visits, 2 * UNITS), "expect");
    CHECK(stats_of(&w).h2d_bytes == 0 && stats_of(&w).acquires == 0, "nothing happens yet");
    reversed_step(&w);
    late[1] = stats_of(&w).late;
    bytes[1] = stats_of(&w).h2d_bytes;
    CHECK(late[1] == 1 && late[0] > 4, "%llu late, %llu where it was not expected",
          (unsigned long long)late[1], (unsigned long long)late[0]);
    CHECK(bytes[1] <= bytes[0] && bytes[1] >= 2 * w.total - ARENA - w.largest,
          "%llu bytes, %llu where it was not expected", (unsigned long long)bytes[1],
          (unsigned long long)bytes[0]);
    CHECK(visits_of(&w, visits, USES) == 6 * UNITS, "it counts as seen, twice");
    world_close(&w, "expected");
}

CASE(test_what_cannot_be_expected_is_refused) {
    struct world w;
    world_open(&w, 200000, -1);
    struct oo_visit *many = calloc(OO_MAX_EXPECTED + 1, sizeof *many);
    CHECK(many != NULL, "no memory");
    if (!many)
        return;
    for (size_t i = 0; i <= OO_MAX_EXPECTED; i++)
        many[i] = (struct oo_visit){w.unit[0], OO_FORWARD};
    CHECK(oo_engine_expect(w.engine, many, OO_MAX_EXPECTED + 1) == OO_E_ARGUMENT, "too many");
    CHECK(oo_engine_expect(w.engine, many, 0) == OO_E_ARGUMENT, "none");
    many[1].kind = (enum oo_kind)4;
    CHECK(oo_engine_expect(w.engine, many, 2) == OO_E_ARGUMENT, "another kind");
    static const uint32_t strangers[] = {UNITS, UINT32_MAX};
    for (int i = 0; i < 2; i++) {
        many[1] = (struct oo_visit){strangers[i], OO_FORWARD};
        CHECK(oo_engine_expect(w.engine, many, 2) == OO_E_ARGUMENT, "no such unit");
    }
    CHECK(visits_of(&w, NULL, 0) == 0, "a part of what was refused is expected");
    need(oo_member_remove(w.engine, w.member[3]), "remove");
    many[1] = (struct oo_visit){w.unit[3], OO_FORWARD};
    CHECK(oo_engine_expect(w.engine, many, 2) == OO_E_ARGUMENT, "a unit that is gone");
    many[1] = (struct oo_visit){w.unit[0], OO_FORWARD};
    need(oo_engine_expect(w.engine, many, OO_MAX_EXPECTED), "the most");
    need(use(&w, 5, OO_FORWARD), "another use than was expected");
    free(many);
    world_close(&w, "refused");
}

CHECK_MAIN(world_prepare)
