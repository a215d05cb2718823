/* When a master is hashed again, and what becomes of a copy whose master has changed. */
#include "world.h"

/* Two threads train one model: one ends its backward while the other is in the middle of its own.
 */
static void continue_while_held(struct world *w, const struct oo_use *first) {
    struct oo_use again;
    need(acquire(w->engine, w->member[3], w->stream, 0, OO_RECOMPUTE, 1, 0, &again), "joins in");
    CHECK(again.address == first->address, "the weights moved under who computes with them");
    use_end(w->engine, first, w->stream, "release");
    CHECK(oo_plan_resident(w->engine->plan, w->unit[3]) != NULL, "dropped under a use");
    use_end(w->engine, &again, w->stream, "release");
    CHECK(oo_plan_resident(w->engine->plan, w->unit[3]) == NULL, "not dropped after the last use");
}

CASE(test_a_master_is_hashed_once_in_a_sweep) {
    struct world w;
    world_open(&w, 400000, -1);
    steps(&w, 2, "step");
    finish(); /* no copy reads the masters any more */
    uint64_t stale = stats_of(&w).stale;
    /* Inside one task the second use trusts the first; the hash is not paid again. */
    need(use_on(&w, 3, OO_RECOMPUTE, 7, 0, w.stream), "recompute");
    need(use_on(&w, 4, OO_RECOMPUTE, 7, 0, w.stream), "recompute");
    w.master[3][0] ^= 1;
    struct oo_use use;
    need(acquire(w.engine, w.member[3], w.stream, 0, OO_BACKWARD, 7, 0, &use), "backward");
    use_end(w.engine, &use, w.stream, "release");
    CHECK(stats_of(&w).stale == stale, "hashed twice in a sweep");
    /* Another task is another sweep. */
    need(use_on(&w, 3, OO_RECOMPUTE, 8, 0, w.stream), "next task");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite before the next task was missed");
    /* From task to forward, and back. */
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite before the forward was missed");
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_RECOMPUTE, 8, 0, w.stream), "the same task after a forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite between forward and backward was missed");
    /* Without tasks a unit that comes again begins a new sweep. */
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "next forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite between two forwards was missed");
    /* What comes first in a sweep does not end it for the others. */
    need(use_on(&w, 5, OO_FORWARD, -1, 0, w.stream), "forward");
    const uint64_t sweep = w.engine->sweep;
    need(use_on(&w, 6, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(w.engine->sweep == sweep, "a sweep for every unit");
    world_close(&w, "sweeps");
}

/* Fingerprints are compared at a member's first use after each turn, of one graph task too. */
CASE(test_each_turn_between_forward_and_task_begins_a_sweep) {
    struct world w;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_RECOMPUTE), "recompute");
    need(use(&w, 5, OO_FORWARD), "a forward in between, of another unit");
    finish();
    fill(w.master[3], w.bytes[3], 77);
    need(use(&w, 3, OO_BACKWARD), "the same task");
    CHECK(stats_of(&w).stale == 1, "%llu stale hits", (unsigned long long)stats_of(&w).stale);
    world_close(&w, "turns");
}

enum { UNSEEN = 8840 }; /* a byte of unit 4 that a glance does not see, and a sample does */

/* Its bytes are the master's, and so many copies were refused since `before`. */
static void right_after(struct world *w, unsigned i, uint64_t stamp, uint64_t *before,
                        unsigned refused, const char *what) {
    need(use_on(w, i, OO_FORWARD, -1, stamp, w->stream), what);
    finish();
    const uint64_t stale = stats_of(w).stale;
    CHECK(stale == *before + refused, "%s: %llu refused, not %u", what,
          (unsigned long long)(stale - *before), refused);
    *before = stale;
}

/* A copy reads few samples: where they miss a write, the next reading makes up for it, once. What
 * is known to have been written is read in full at once. */
CASE(test_a_copy_glances_at_what_a_use_has_read) {
    struct world w;
    uint32_t unit;
    size_t offset;
    world_open(&w, 400000, -1);
    uint64_t stale = 0;
    right_after(&w, 4, 0, &stale, 0, "first");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    w.master[4][UNSEEN] ^= 1;
    right_after(&w, 4, 0, &stale, 0, "copied again");
    right_after(&w, 4, 0, &stale, 1, "read");
    right_after(&w, 4, 0, &stale, 0, "read again");
    w.master[4][UNSEEN] ^= 1;
    right_after(&w, 4, 0, &stale, 1, "written in the arena");
    right_after(&w, 4, 0, &stale, 0, "and known");
    w.master[4][UNSEEN] ^= 1;
    right_after(&w, 4, 1, &stale, 1, "another stamp");
    right_after(&w, 4, 1, &stale, 0, "and known");
    /* Gone from the arena, and written under another stamp. */
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    w.master[4][UNSEEN] ^= 1;
    right_after(&w, 4, 2, &stale, 0, "copied under another stamp");
    right_after(&w, 4, 2, &stale, 0, "and known");
    /* The same, stamped when its copy was fetched ahead. */
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    w.master[4][UNSEEN] ^= 1;
    need(use(&w, 3, OO_FORWARD), "the one before");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[4]) != NULL, "not fetched ahead");
    need(oo_engine_stamp(w.engine, &(struct oo_stamp){w.member[4], 3}, 1, 0), "stamp");
    right_after(&w, 4, 3, &stale, 0, "stamped ahead");
    /* Read whole for a while. */
    need(oo_engine_set_verify(w.engine, 1), "verify");
    right_after(&w, 4, 3, &stale, 0, "whole");
    w.master[4][UNSEEN + 64] ^= 1;
    right_after(&w, 4, 3, &stale, 1, "whole, written");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    w.master[4][UNSEEN + 64] ^= 1;
    right_after(&w, 4, 3, &stale, 0, "whole, copied");
    right_after(&w, 4, 3, &stale, 0, "whole, known");
    need(oo_engine_set_verify(w.engine, 0), "no more");
    right_after(&w, 4, 3, &stale, 0, "in samples");
    right_after(&w, 4, 3, &stale, 0, "in samples again");
    /* An optimizer writes it. */
    need(oo_unit_set_trainable(w.engine, w.unit[4], 1), "trainable");
    need(oo_engine_hold(w.engine), "hold");
    w.master[4][UNSEEN] ^= 1;
    right_after(&w, 4, 3, &stale, 0, "trained");
    right_after(&w, 4, 3, &stale, 0, "and known");
    need(oo_unit_set_trainable(w.engine, w.unit[4], 0), "frozen");
    /* Other memory, which a glance takes for the same. */
    memcpy(w.master[9], w.master[4], w.bytes[4]); /* as large */
    w.master[9][UNSEEN] ^= 1;
    const struct oo_tensor tensor = {.host = w.master[9], .bytes = w.bytes[4]};
    need(oo_member_move(w.engine, w.member[4], &tensor, 1, &unit, &offset), "move");
    w.master[4] = w.master[9];
    right_after(&w, 4, 3, &stale, 0, "moved");
    right_after(&w, 4, 3, &stale, 0, "and known");
    world_close(&w, "glances");
}

/* Weights that are swapped for a while (an EMA) are copied ahead, not used, and swapped back. */
CASE(test_a_copy_of_weights_that_were_there_for_a_while) {
    struct world w;
    world_open(&w, 400000, -1);
    need(use(&w, 4, OO_FORWARD), "first");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    finish();
    char *own = malloc(w.bytes[4]);
    memcpy(own, w.master[4], w.bytes[4]);
    fill(w.master[4], w.bytes[4], 99);
    need(use(&w, 3, OO_FORWARD), "the one before");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[4]) != NULL, "not fetched ahead");
    finish();
    memcpy(w.master[4], own, w.bytes[4]);
    uint64_t stale = 0;
    right_after(&w, 4, 0, &stale, 1, "swapped back");
    free(own);
    world_close(&w, "for a while");
}

/* Less than one line of the hash: all of it is. */
CASE(test_a_change_of_a_few_bytes_is_seen) {
    enum { BYTES = 40 };
    struct world w;
    uint32_t member;
    size_t offset;
    world_open(&w, 250000, -1);
    const struct oo_tensor tensor = {.host = w.master[4], .bytes = BYTES};
    add_unit(w.engine, w.model, &tensor, 1, &member, &offset);
    for (unsigned i = 0; i < BYTES; i++) {
        const struct oo_use use = use_begin(w.engine, member, w.stream, 1e-6, "acquire");
        CHECK(memcmp((const void *)use.address, w.master[4], BYTES) == 0, "byte %u is old", i - 1);
        use_end(w.engine, &use, w.stream, "release");
        finish();
        w.master[4][i] ^= 1;
    }
    world_close(&w, "a few bytes");
}

CASE(test_only_a_recorded_forward_ends_the_hold) {
    struct world w;
    world_open(&w, 400000, 20);
    need(step(&w), "step");
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 0, OO_RECOMPUTE), "recompute");
    need(use(&w, 0, OO_BACKWARD), "backward");
    CHECK(w.engine->held == 1, "a backward ended the hold");
    need(use(&w, 0, OO_FORWARD), "a validation");
    CHECK(w.engine->held == 1, "a validation ended the hold");
    need(use(&w, 0, OO_RECORDED), "forward");
    CHECK(w.engine->held == 0, "a forward did not end the hold");
    need(oo_unit_set_trainable(w.engine, w.unit[2], 1), "set_trainable");
    need(oo_engine_hold(w.engine), "hold");
    CHECK(!oo_plan_resident(w.engine->plan, w.unit[2]) &&
              oo_plan_resident(w.engine->plan, w.unit[3]),
          "hold dropped the wrong units");
    CHECK(oo_unit_set_trainable(w.engine, 1000, 1) == OO_E_ARGUMENT, "no such unit");
    need(oo_engine_resume(w.engine), "resume");
    world_close(&w, "hold");
}

/* The unit's bytes on the device are its master's; `what` has just used it. */
static void has_the_masters_bytes(struct world *w, unsigned i, const char *what) {
    const struct oo_block *block = oo_plan_resident(w->engine->plan, w->unit[i]);
    finish();
    CHECK(block && memcmp((const void *)oo_block_address(block), w->master[i], w->bytes[i]) == 0,
          "%s: old bytes", what);
}

static enum oo_status train(struct world *w, unsigned i) {
    return use_on(w, i, OO_RECORDED, -1, 0, w->stream);
}

/* While masters may be rewritten every pass reads them again, though samples see no change. */
CASE(test_a_row_written_between_validations_is_seen) {
    struct world w;
    world_open(&w, 400000, 4);
    need(step(&w), "step");
    need(oo_engine_hold(w.engine), "hold");
    for (int i = 0; i < 3; i++) {
        need(use(&w, 4, OO_FORWARD), "validation");
        has_the_masters_bytes(&w, 4, "validation");
        w.master[4][UNSEEN] ^= 1;
    }
    need(train(&w, 5), "training begins with another");
    CHECK(!oo_plan_resident(w.engine->plan, w.unit[4]) ||
              w.engine->units[w.unit[4]].copied_in == w.engine->sweep,
          "the validation's copy was kept");
    need(train(&w, 4), "training");
    has_the_masters_bytes(&w, 4, "training");
    /* Begun in the same sweep as the first recorded use: a checkpoint's forward came before. */
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 4, OO_FORWARD), "a checkpoint's forward");
    const uint64_t late = stats_of(&w).late;
    need(train(&w, 6), "what follows it");
    need(use(&w, 4, OO_RECOMPUTE), "recompute");
    CHECK(stats_of(&w).late == late + 1, "%llu late copies, not that of unit 6 alone",
          (unsigned long long)(stats_of(&w).late - late));
    /* An optimizer has stepped: whatever was copied while it did is outdated. */
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 4, OO_FORWARD), "its closure");
    w.master[4][UNSEEN] ^= 1;
    need(oo_engine_resume(w.engine), "resume");
    need(train(&w, 4), "next step");
    has_the_masters_bytes(&w, 4, "next step");
    /* What somebody computes with stays, and frozen ones. */
    need(oo_engine_hold(w.engine), "hold");
    const struct oo_use held = use_acquire(w.engine, w.member[4], w.stream, "acquire");
    for (unsigned i = 3; i < 5; i++) {
        const uint64_t before = stats_of(&w).late;
        need(use(&w, i, OO_FORWARD), "again");
        need(use(&w, i, OO_FORWARD), "and again");
        CHECK(stats_of(&w).late == before, "unit %u was copied again", i);
    }
    need(oo_engine_resume(w.engine), "resume");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[4]) != NULL, "dropped in use");
    use_end(w.engine, &held, w.stream, "release");
    /* Where the copy cannot be dropped it is not trusted. */
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 4, OO_FORWARD), "validation");
    need(use(&w, 3, OO_FORWARD), "another");
    need(use(&w, 3, OO_FORWARD), "a sweep begins");
    fail_call("cuStreamWaitEvent", 1);
    need(oo_engine_resume(w.engine), "resume");
    CHECK(w.engine->units[w.unit[4]].stale, "trusted");
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 4, OO_FORWARD), "validation");
    fail_call("cuStreamWaitEvent", 1);
    CHECK(use(&w, 4, OO_FORWARD) == OO_E_DRIVER, "no error");
    need(use(&w, 4, OO_FORWARD), "again");
    world_close(&w, "validations");
}

/* What travels together is copied once in a pass, however many layers it has. */
CASE(test_a_validation_copies_a_unit_of_two_members_once) {
    struct world w;
    uint32_t unit, members[2];
    size_t offsets[2];
    world_open(&w, 400000, -1);
    const struct oo_tensor tensors[2] = {{.host = w.master[8], .bytes = 4096},
                                         {.host = w.master[8] + 4096, .bytes = 4096}};
    const uint32_t each[2] = {1, 1};
    need(oo_unit_add(w.engine, w.model, tensors, each, 2, 1, &unit, members, offsets), "unit");
    need(oo_engine_hold(w.engine), "hold");
    const uint64_t late = stats_of(&w).late;
    for (int i = 0; i < 6; i++) {
        const struct oo_use held = use_acquire(w.engine, members[i % 2], w.stream, "acquire");
        use_end(w.engine, &held, w.stream, "release");
    }
    CHECK(stats_of(&w).late == late + 3, "%llu copies in three passes",
          (unsigned long long)(stats_of(&w).late - late));
    world_close(&w, "two members");
}

/* A copy is made again, once, when the thread that had to stamp it was interrupted. */
CASE(test_a_copy_that_is_not_stamped_is_not_trusted) {
    struct world w;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_FORWARD), "use");
    need(use(&w, 4, OO_FORWARD), "use");
    const struct oo_fetched fetched = {.count = 1, .units = {w.unit[3]}};
    need(oo_engine_distrust(w.engine, &fetched, 0), "distrust");
    w.master[3][UNSEEN % w.bytes[3]] ^= 1;
    for (int i = 0; i < 2; i++) {
        need(use(&w, 3, OO_FORWARD), "use");
        has_the_masters_bytes(&w, 3, "after it");
        need(use(&w, 4, OO_FORWARD), "use");
    }
    CHECK(stats_of(&w).stale == 1, "%llu stale", (unsigned long long)stats_of(&w).stale);
    world_close(&w, "not stamped");
}

CASE(test_an_acquire_that_fails_is_counted) {
    struct world w;
    struct oo_use held;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_FORWARD), "use");
    fail_call("cuStreamWaitEvent", 1); /* of the drop of what is stale */
    CHECK(acquire(w.engine, w.member[3], w.stream, 1, OO_FORWARD, -1, 0, &held) == OO_E_DRIVER,
          "dropped");
    CHECK(stats_of(&w).acquires == 2 && stats_of(&w).stale == 1, "%llu acquires",
          (unsigned long long)stats_of(&w).acquires);
    world_close(&w, "counted");
}

/* What is being computed with stays, and is stale from then on; everything else is dropped at once.
 */
CASE(test_what_is_in_use_becomes_stale) {
    struct world w;
    struct oo_use held, again;
    struct oo_fetched fetched;
    world_open(&w, 400000, 0);
    for (int how = 0; how < 3; how++) { /* hold is milder: see test_engine.c */
        need(oo_engine_resume(w.engine), "resume");
        need(step(&w), "step");
        finish();
        need(acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held), "acquire");
        if (how == 0)
            need(oo_engine_refresh(w.engine, w.model), "refresh");
        else if (how == 1)
            need(oo_engine_refresh(w.engine, OO_ALL_MODELS), "refresh");
        CHECK(stats_of(&w).resident_units == (how == 2 ? UNITS : 1), "%d: %llu resident", how,
              (unsigned long long)stats_of(&w).resident_units);
        CHECK(acquire(w.engine, w.member[3], w.stream, how == 2 ? 1 : 0, OO_RECOMPUTE, 1, 0,
                      &again) == OO_E_STATE &&
                  strstr(oo_error_message(), "rewritten"),
              "%d: %s", how, oo_error_message());
        use_end(w.engine, &held, w.stream, "release");
        const uint64_t stale = stats_of(&w).stale;
        for (int i = 0; i < 2; i++) {
            need(use(&w, 3, OO_BACKWARD), "use");
            CHECK(stats_of(&w).stale == stale + 1, "%d: %llu stale", how,
                  (unsigned long long)(stats_of(&w).stale - stale));
        }
    }
    /* An optimizer will rewrite it: a use that begins now, and joins in, has the old weights. */
    finish();
    need(acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held), "acquire");
    need(oo_engine_hold(w.engine), "hold");
    const uint64_t never = stats_of(&w).stale;
    continue_while_held(&w, &held);
    for (int i = 0; i < 2; i++)
        need(use(&w, 3, OO_BACKWARD), "use");
    CHECK(stats_of(&w).stale == never, "stale although it was dropped");
    /* Where it cannot be dropped it stays, and is not trusted. */
    finish();
    need(oo_engine_resume(w.engine), "resume");
    need(acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held), "acquire");
    need(oo_engine_hold(w.engine), "hold");
    fail_call("cuStreamWaitEvent", 1);
    use_end(w.engine, &held, w.stream, "release");
    const uint64_t before = stats_of(&w).stale;
    need(use(&w, 3, OO_BACKWARD), "use");
    CHECK(stats_of(&w).stale == before + 1, "trusted");
    need(oo_engine_refresh(w.engine, w.model + 1), "a model that is none");
    CHECK(stats_of(&w).resident_units > 0, "dropped another model's units");
    CHECK(oo_engine_release(w.engine, UINT64_C(1) << 32 | 5000, w.stream, 0, &fetched) ==
              OO_E_TICKET,
          "no such unit");
    CHECK(oo_engine_release(w.engine, w.unit[3], w.stream, 0, &fetched) == OO_E_TICKET,
          "an old generation");
    CHECK(oo_engine_launch(w.engine, 5000, w.stream, 0) == OO_E_STATE, "no such member");
    CHECK(oo_engine_set_verify(w.engine, 1) == OO_OK && oo_engine_set_verify(w.engine, 0) == OO_OK,
          "verify");
    world_close(&w, "in use");
}

CHECK_MAIN(world_prepare)
