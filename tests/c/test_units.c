/* Units and their members: several tensors, what travels as one copy, moving and removing. */
#include "world.h"

/* Members of several tensors; gaps, shared masters and foreign memory: each tensor's bytes at its
 * offset. */
CASE(test_units_of_several_members_and_tensors) {
    struct world w;
    uint32_t unit, members[3];
    size_t offsets[6];
    const uint32_t n_tensors[3] = {2, 3, 1};
    world_open(&w, 60000, -1);
    char *base = oo_host_address(w.host), *foreign = malloc(700);
    fill(foreign, 700, 3);
    const struct oo_tensor tensors[6] = {
        {.host = base, .bytes = 1000},             /* travels with the next one: */
        {.host = base + 1024, .bytes = 300},       /* congruent to the device layout */
        {.host = base + 1024 + 768, .bytes = 100}, /* a hole: not congruent */
        {.host = base, .bytes = 1000},             /* tied to the first */
        {.host = foreign, .bytes = 700},           /* unknown to the engine */
        {.host = base + 8192, .bytes = 4096},
    };
    need(oo_unit_add(w.engine, w.model, tensors, n_tensors, 3, 0, &unit, members, offsets), "unit");
    CHECK(w.engine->units[unit].n_parts == 5, "%u parts", w.engine->units[unit].n_parts);
    for (int m = 0; m < 3; m++) {
        const struct oo_use use = use_begin(w.engine, members[m], w.stream, 1e-6, "acquire");
        for (int t = 0; t < 6; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], tensors[t].host,
                         tensors[t].bytes) == 0 &&
                      offsets[t] % OO_ALIGNMENT == 0,
                  "tensor %d is not at offset %zu", t, offsets[t]);
        use_end(w.engine, &use, w.stream, "release");
    }
    CHECK(stats_of(&w).pageable_bytes == 700, "%llu pageable",
          (unsigned long long)stats_of(&w).pageable_bytes);
    const struct oo_stamp stamps[] = {{1000, 9}, {members[0], 8}, {members[1], 9}};
    need(oo_engine_stamp(w.engine, stamps + 1, 2, 0), "stamp");
    CHECK(w.engine->members[members[0]].stamp == 8 && w.engine->members[members[1]].stamp == 9,
          "not stamped");
    need(oo_engine_stamp(w.engine, stamps, 0, 0), "no stamps");
    w.engine->members[members[1]].stamp = 0;
    CHECK(oo_engine_stamp(w.engine, stamps, 3, 0) == OO_E_STATE, "no such member");
    CHECK(w.engine->members[members[1]].stamp == 9,
          "one unknown member keeps the others unstamped");
    CHECK(oo_unit_add(w.engine, w.model, tensors, n_tensors, 0, 0, &unit, members, offsets) ==
              OO_E_ARGUMENT,
          "no members");
    free(foreign);
    world_close(&w, "members");
}

/* One copy reads one registration, and of memory that the engine does not know only the tensors
 * that were passed. */
CASE(test_what_travels_as_one_copy) {
    struct world w;
    struct oo_host *pages[16];
    uint32_t member;
    size_t offsets[2];
    unsigned n = 0, below = 0, above = 0;
    world_open(&w, 250000, -1);
    for (; n < 16 && !above; n++) { /* two that follow each other in memory */
        need(oo_host_create(4096, &pages[n]), "a page");
        need(oo_engine_lock(w.engine, pages[n], OO_ALL_BYTES), "lock");
        fill(oo_host_address(pages[n]), 4096, n);
        for (unsigned i = 0; i < n; i++) {
            const char *a = oo_host_address(pages[i]), *b = oo_host_address(pages[n]);
            if (a + 4096 == b || b + 4096 == a) {
                below = a < b ? i : n;
                above = a < b ? n : i;
            }
        }
    }
    char *foreign = malloc(1024);
    fill(foreign, 1024, 3);
    for (int how = 0; how < 2; how++) {
        if (how == 0 && below == above)
            continue; /* no two pages are side by side here */
        const struct oo_tensor tensors[] = {
            {.host = how ? foreign : oo_host_address(pages[below]), .bytes = how ? 100 : 4096},
            {.host = how ? foreign + OO_ALIGNMENT : oo_host_address(pages[above]),
             .bytes = how ? 100 : 4096}};
        add_unit(w.engine, w.model, tensors, 2, &member, offsets);
        const uint64_t before = stats_of(&w).h2d_copies;
        struct oo_use use;
        need(acquire(w.engine, member, w.stream, 0, OO_BACKWARD, 1, 0, &use), "acquire");
        need(oo_engine_launch(w.engine, member, w.stream, 1e-6), "launch");
        CHECK(stats_of(&w).h2d_copies == before + 2, "%d: %llu copies", how,
              (unsigned long long)(stats_of(&w).h2d_copies - before));
        for (int t = 0; t < 2; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], tensors[t].host,
                         tensors[t].bytes) == 0,
                  "%d: tensor %d has wrong bytes", how, t);
        use_end(w.engine, &use, w.stream, "release");
    }
    need(world_remove(&w), "remove");
    for (unsigned i = 0; i < n; i++)
        need(oo_host_destroy(pages[i]), "destroy");
    free(foreign);
    world_close(&w, "one copy");
}

/* A unit is kept for a member that moves if it was alone there, and all else is as it was. */
CASE(test_a_member_that_moves_keeps_its_unit_only_alone_and_alike) {
    struct world w;
    uint32_t unit, moved, members[2];
    size_t offsets[4];
    world_open(&w, 250000, -1);
    char *bytes = w.master[4]; /* of 20480 bytes at least */
    const struct oo_tensor pair[] = {{.host = bytes, .bytes = 512},
                                     {.host = bytes + 512, .bytes = 512}},
                           whole = {.host = bytes, .bytes = 1024};
    const struct oo_tensor larger = {.host = bytes, .bytes = 2048},
                           halves[] = {{.host = bytes + 256, .bytes = 1024},
                                       {.host = bytes, .bytes = 1024}};
    const struct {
        const struct oo_tensor *to;
        uint32_t count;
        int stays;
        const char *what;
    } moves[] = {{&whole, 1, 0, "it was not alone"},  {&whole, 1, 1, "alone and alike"},
                 {&larger, 1, 0, "larger"},           {halves, 2, 0, "as large, in two"},
                 {&larger, 1, 0, "as large, in one"}, {&larger, 1, 1, "alike again"}};
    unit = add_row(w.engine, w.model, pair, 2, members, offsets);
    for (unsigned i = 0; i < sizeof moves / sizeof moves[0]; i++) {
        struct oo_use use;
        need(oo_member_move(w.engine, members[0], moves[i].to, moves[i].count, &moved, offsets),
             moves[i].what);
        CHECK((moved == unit) == moves[i].stays, "%s: unit %u becomes %u", moves[i].what, unit,
              moved);
        unit = moved;
        CHECK(stats_of(&w).units == UNITS + 2, "%s: %llu units", moves[i].what,
              (unsigned long long)stats_of(&w).units);
        need(acquire(w.engine, members[0], w.stream, 0, OO_BACKWARD, 1, 0, &use), "acquire");
        need(oo_engine_launch(w.engine, members[0], w.stream, 1e-6), "launch");
        for (uint32_t t = 0; t < moves[i].count; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], moves[i].to[t].host,
                         moves[i].to[t].bytes) == 0,
                  "%s: wrong bytes", moves[i].what);
        use_end(w.engine, &use, w.stream, "release");
    }
    world_close(&w, "moves");
}

/* Bytes that a backward of the member brings to the device. */
static uint64_t brought_by(struct world *w, uint32_t member, const char *what) {
    struct oo_use use;
    need(oo_engine_refresh(w->engine, w->model), "refresh");
    const uint64_t before = stats_of(w).h2d_bytes;
    need(acquire(w->engine, member, w->stream, 0, OO_BACKWARD, 1, 0, &use), what);
    need(oo_engine_launch(w->engine, member, w->stream, 1e-6), "launch");
    const uint64_t brought = stats_of(w).h2d_bytes - before;
    const struct oo_member_tensor *tensor = w->engine->members[member].tensors;
    CHECK(memcmp((const char *)use.address + tensor->offset, tensor->host, tensor->bytes) == 0,
          "%s: wrong bytes", what);
    use_end(w->engine, &use, w->stream, "release");
    return brought;
}

/* What left a unit is no part of its copies, wherever it was in it. */
CASE(test_what_left_a_unit_travels_no_more) {
    struct world w;
    uint32_t unit, left, members[4];
    size_t offsets[4];
    world_open(&w, 60000, -1);
    struct oo_tensor row[4];
    for (int i = 0; i < 4; i++)
        row[i] = (struct oo_tensor){.host = w.master[4] + 512 * i, .bytes = 500};
    unit = add_row(w.engine, w.model, row, 4, members, offsets);
    CHECK(brought_by(&w, members[0], "whole") == 3 * 512 + 500, "a row is one copy");
    need(oo_member_move(w.engine, members[1], &row[1], 1, &left, offsets), "move");
    CHECK(left != unit && w.engine->units[unit].n_parts == 2, "two copies without the second");
    CHECK(brought_by(&w, members[3], "without one") == 500 + 512 + 500, "it travels still");
    CHECK(brought_by(&w, members[1], "which left") == 500, "it travels alone");
    need(oo_member_remove(w.engine, members[0]), "remove");
    CHECK(brought_by(&w, members[2], "without the first") == 512 + 500, "it travels still");
    need(oo_member_remove(w.engine, members[3]), "remove");
    CHECK(brought_by(&w, members[2], "alone") == 500, "it travels still");
    const uint64_t units = stats_of(&w).units;
    need(oo_member_remove(w.engine, members[2]), "remove");
    CHECK(stats_of(&w).units == units - 1, "the unit goes with the last one");
    world_close(&w, "left");
}

static enum oo_status use_member(struct world *w, uint32_t member) {
    struct oo_use held;
    struct oo_fetched fetched;
    const enum oo_status status =
        acquire(w->engine, member, w->stream, 0, OO_FORWARD, -1, 0, &held);
    return status == OO_OK ? oo_engine_release(w->engine, held.ticket, w->stream, 0, &fetched)
                           : status;
}

/* Memory that the engine does not know is copied on request alone; without it the unit is not. */
CASE(test_what_is_left_of_a_unit_is_fetched_ahead) {
    struct world w;
    uint32_t unit, members[2];
    size_t offsets[2];
    world_open(&w, 400000, -1);
    char *elsewhere = malloc(4096);
    fill(elsewhere, 4096, 9);
    const struct oo_tensor row[] = {{.host = w.master[4], .bytes = 4096},
                                    {.host = elsewhere, .bytes = 4096}};
    unit = add_row(w.engine, w.model, row, 2, members, offsets);
    for (int knows = 0; knows < 2; knows++) {
        for (int round = 0; round < 4; round++) {
            need(oo_engine_refresh(w.engine, w.model), "refresh");
            need(use(&w, 3, OO_FORWARD), "the one before");
            if (round == 3)
                CHECK((oo_plan_resident(w.engine->plan, unit) != NULL) == knows,
                      "fetched ahead, and it has %d member", 2 - knows);
            need(use_member(&w, members[0]), "the unit");
            need(use(&w, 5, OO_FORWARD), "the one after");
        }
        if (!knows)
            need(oo_member_remove(w.engine, members[1]), "remove");
    }
    world_close(&w, "ahead");
    free(elsewhere);
}

/* A member that could not be moved is copied from where it was. */
CASE(test_a_move_that_fails_changes_nothing) {
    struct world w;
    uint32_t unit, members[2];
    size_t offsets[2];
    unsigned failed = 0;
    world_open(&w, 400000, -1);
    char *elsewhere = malloc(w.bytes[0] + w.bytes[1]);
    const struct oo_tensor home[] = {{.host = w.master[0], .bytes = w.bytes[0]},
                                     {.host = w.master[1], .bytes = w.bytes[1]}};
    const struct oo_tensor other[] = {{.host = elsewhere, .bytes = w.bytes[0]},
                                      {.host = elsewhere + w.bytes[0], .bytes = w.bytes[1]}};
    fill(elsewhere, w.bytes[0] + w.bytes[1], 123);
    unit = add_row(w.engine, w.model, home, 2, members, offsets);
    for (enum oo_status status = OO_E_DRIVER; status != OO_OK; failed++) {
        sim.simFault("cuEventCreate", 1 + failed, OOCU_ERROR_OUT_OF_MEMORY, 0);
        status = oo_member_move(w.engine, members[0], other, 2, &unit, offsets);
        sim.simFaultClear();
        if (status == OO_OK)
            break;
        ANSWERS(OO_E_DRIVER, "cuEventCreate", status);
        for (int i = 0; i < 2; i++) {
            struct oo_use use = use_begin(w.engine, members[i], w.stream, 1e-6, "acquire");
            const size_t offset = i ? w.bytes[0] : 0;
            CHECK(memcmp((const char *)use.address + offset, w.master[i], w.bytes[i]) == 0,
                  "member %d has other bytes after a failed move", i);
            use_end(w.engine, &use, w.stream, "release");
        }
    }
    CHECK(failed == 2, "%u moves failed", failed);
    const struct oo_use use = use_begin(w.engine, members[0], w.stream, 1e-6, "acquire");
    CHECK(memcmp((const char *)use.address + offsets[1], elsewhere + w.bytes[0], w.bytes[1]) == 0,
          "not moved in the end");
    use_end(w.engine, &use, w.stream, "release");
    world_close(&w, "move");
    free(elsewhere);
}

CASE(test_what_was_removed_is_known_no_more) {
    struct world w;
    struct oo_use use;
    struct oo_stats stats;
    uint32_t unit, model;
    size_t offset;
    world_open(&w, 60000, -1);
    need(oo_model_add(w.engine, &model), "a model that stays");
    need(world_remove(&w), "remove");
    const struct oo_tensor tensor = {.host = w.master[0], .bytes = w.bytes[0]};
    const uint32_t gone[] = {w.member[0], UINT32_MAX - 1}, one = 1;
    for (int i = 0; i < 2; i++) {
        CHECK(acquire(w.engine, gone[i], w.stream, 0, OO_FORWARD, -1, 0, &use) == OO_E_STATE,
              "acquired");
        CHECK(oo_engine_stamp(w.engine, &(struct oo_stamp){gone[i], 1}, 1, 0) == OO_E_STATE,
              "stamped");
        CHECK(oo_engine_launch(w.engine, gone[i], w.stream, 0) == OO_E_STATE, "launched");
        CHECK(oo_member_move(w.engine, gone[i], &tensor, 1, &unit, &offset) == OO_E_ARGUMENT,
              "moved");
    }
    struct oo_fetched fetched;
    CHECK(oo_engine_release(w.engine, UINT64_C(1) << 32 | (UINT32_MAX - 1), w.stream, 0,
                            &fetched) == OO_E_TICKET,
          "a ticket of no unit");
    const uint32_t no_unit[] = {w.unit[0], UINT32_MAX - 1};
    const uint32_t no_model[] = {w.model, UINT32_MAX - 1};
    const uint32_t no_lease[] = {w.lease, UINT32_MAX - 1};
    for (int i = 0; i < 2; i++) {
        CHECK(oo_unit_set_trainable(w.engine, no_unit[i], 1) == OO_E_ARGUMENT, "set trainable");
        CHECK(oo_engine_stats(w.engine, no_model[i], &stats) == OO_E_ARGUMENT, "figures");
        CHECK(oo_model_remove(w.engine, no_model[i]) == OO_E_ARGUMENT, "removed twice");
        CHECK(oo_unit_add(w.engine, no_model[i], &tensor, &one, 1, 0, &unit, &unit, &offset) ==
                  OO_E_ARGUMENT,
              "a unit of no model");
        CHECK(oo_lease_remove(w.engine, no_lease[i]) == OO_E_ARGUMENT, "a lease removed twice");
        CHECK(oo_segment_add(w.engine, no_lease[i], (uintptr_t)w.arena, 60000, w.stream) ==
                  OO_E_ARGUMENT,
              "a segment of no lease");
    }
    CHECK(stats_of(&w).arena_bytes == 0, "arena");
    need(oo_model_remove(w.engine, model), "remove");
    world_close(&w, "removed");
}

/* The members of a unit that was refused do not exist, though their records were begun. */
CASE(test_members_of_a_refused_unit_are_not_there) {
    struct world w;
    struct oo_use use;
    const uint32_t one_each[2] = {1, 1};
    uint32_t unit, members[2] = {0, 0};
    size_t offsets[2];
    world_open(&w, 60000, -1);
    const struct oo_tensor tensors[2] = {{.host = w.master[0], .bytes = w.bytes[0]},
                                         {.host = w.master[1], .bytes = 0}};
    CHECK(oo_unit_add(w.engine, w.model, tensors, one_each, 2, 0, &unit, members, offsets) ==
              OO_E_ARGUMENT,
          "added");
    const uint32_t next = w.member[UNITS - 1] + 1;
    CHECK(members[0] == next, "member %u", members[0]);
    CHECK(oo_member_remove(w.engine, next) == OO_E_ARGUMENT, "removed");
    CHECK(oo_member_move(w.engine, next, tensors, 1, &unit, offsets) == OO_E_ARGUMENT, "moved");
    CHECK(acquire(w.engine, next, w.stream, 0, OO_FORWARD, -1, 0, &use) == OO_E_STATE, "acquired");
    CHECK(oo_engine_stamp(w.engine, &(struct oo_stamp){next, 1}, 1, 0) == OO_E_STATE, "stamped");
    need(step(&w), "step");
    world_close(&w, "a refused unit");
}

CHECK_MAIN(world_prepare)
