/* Kept uses: they outlast the call that began them, and end on any thread. */
#include "world.h"

static uint32_t pins(const struct world *w, unsigned i) {
    return oo_plan_pins(w->engine->plan, w->unit[i]);
}

static struct oo_use keep(struct world *w, unsigned i, uintptr_t stream) {
    struct oo_use use, kept;
    need(acquire(w->engine, w->member[i], stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_keep(w->engine, w->member[i], 0, &kept), "keep");
    CHECK(kept.address == use.address && kept.ticket == use.ticket && !kept.fetched.count,
          "another copy was kept than the one in use");
    use_end(w->engine, &use, stream, "release");
    return kept;
}

CASE(test_a_kept_unit_stays_where_it_is) {
    struct world w;
    world_open(&w, 60000, -1);
    const struct oo_use kept = keep(&w, 3, w.stream);
    CHECK(pins(&w, 3) == 1, "%u uses", pins(&w, 3));
    need(step(&w), "a step that evicts everything else");
    CHECK(pins(&w, 3) == 1 &&
              oo_block_address(oo_plan_resident(w.engine->plan, w.unit[3])) == kept.address,
          "a kept unit has moved");
    CHECK(oo_model_remove(w.engine, w.model) == OO_E_STATE, "the model went under a kept use");
    need(oo_engine_end(w.engine, kept.ticket, w.stream), "end");
    CHECK(pins(&w, 3) == 0, "still in use");
    CHECK(oo_engine_end(w.engine, kept.ticket, w.stream) == OO_E_TICKET, "ended twice");
    world_close(&w, "kept");
}

CASE(test_only_a_member_in_use_can_be_kept) {
    struct world w;
    struct oo_use kept;
    world_open(&w, 400000, -1);
    CHECK(oo_engine_keep(w.engine, w.member[3], 0, &kept) == OO_E_STATE, "kept what is not in use");
    CHECK(oo_engine_keep(w.engine, 10000, 0, &kept) == OO_E_STATE, "kept what does not exist");
    CHECK(oo_engine_keep(w.engine, w.member[3], OO_LAUNCH, &kept) == OO_E_ARGUMENT, "any flag");
    oo__mutex_lock(w.engine->mutex);
    CHECK(oo_engine_keep(w.engine, w.member[3], OO_NONBLOCKING, &kept) == OO_WOULD_BLOCK,
          "waited for the mutex");
    oo__mutex_unlock(w.engine->mutex);
    world_close(&w, "keeping");
}

/* The end marks the stream's last use of the bytes (H2): without the mark, what is copied over them
 * races with the kernel that still reads them, and the detector says so. */
CASE(test_what_overwrites_a_kept_unit_waits_for_its_end) {
    struct world w;
    world_open(&w, 60000, -1);
    const uintptr_t other = new_stream(&w);
    const struct oo_use kept = keep(&w, 3, other);
    need(oo_engine_launch(w.engine, w.member[3], other, 5e-3), "a kernel after the release");
    need(oo_engine_end(w.engine, kept.ticket, other), "end");
    need(step(&w), "over it");
    end_stream(&w, other);
    world_close(&w, "order");
}

/* A thread that waited for its own kept use would wait for ever. */
CASE(test_a_rewritten_master_is_refused_while_its_unit_is_kept) {
    struct world w;
    struct oo_use use;
    world_open(&w, 400000, -1);
    const struct oo_use kept = keep(&w, 3, w.stream);
    CHECK(acquire(w.engine, w.member[3], w.stream, 1, OO_FORWARD, -1, 0, &use) == OO_E_STATE,
          "a stale copy was handed out, or waited for");
    CHECK(acquire(w.engine, w.member[3], w.stream, 1, OO_FORWARD, -1, OO_NONBLOCKING, &use) ==
              OO_E_STATE,
          "it would be waited for");
    need(oo_engine_end(w.engine, kept.ticket, w.stream), "end");
    need(acquire(w.engine, w.member[3], w.stream, 1, OO_FORWARD, -1, 0, &use), "afterwards");
    use_end(w.engine, &use, w.stream, "release");
    CHECK(stats_of(&w).stale == 1, "%llu stale", (unsigned long long)stats_of(&w).stale);
    world_close(&w, "rewritten");
}

/* A thread that keeps something may wait for the uses of others: it holds none itself. */
CASE(test_keeping_is_not_holding) {
    struct world w;
    struct oo_use held, use;
    world_open(&w, 400000, -1);
    w.engine->patience_s = 0.05;
    const struct oo_use kept = keep(&w, 3, w.stream);
    held = use_acquire(w.engine, w.member[5], w.stream, "acquire");
    use_end(w.engine, &held, w.stream, "release");
    need(oo_engine_end(w.engine, kept.ticket, w.stream), "end");
    /* Had the end been counted as a release, this thread would seem to hold nothing here. */
    held = use_acquire(w.engine, w.member[5], w.stream, "acquire");
    const double begun_s = oo__clock_s();
    CHECK(acquire(w.engine, w.member[5], w.stream, 1, OO_FORWARD, -1, 0, &use) == OO_E_STATE,
          "handed out a stale copy");
    CHECK(oo__clock_s() - begun_s < 0.05, "waited for itself");
    use_end(w.engine, &held, w.stream, "release");
    world_close(&w, "holding");
}

/* Trainable units go at the turn; one that is kept goes when its use ends. */
CASE(test_a_kept_unit_that_is_to_leave_leaves_at_its_end) {
    struct world w;
    world_open(&w, 400000, -1);
    need(oo_unit_set_trainable(w.engine, w.unit[3], 1), "trainable");
    const struct oo_use kept = keep(&w, 3, w.stream);
    need(oo_engine_hold(w.engine), "hold");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[3]) != NULL, "dropped under a use");
    need(oo_engine_end(w.engine, kept.ticket, w.stream), "end");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[3]) == NULL, "not dropped at its end");
    world_close(&w, "leaving");
}

struct other {
    struct world *w;
    uint64_t ticket;
    enum oo_status status;
};

static void end_there(void *argument) {
    struct other *other = argument;
    other->status = oo_engine_end(other->w->engine, other->ticket, other->w->stream);
}

CASE(test_another_thread_may_end_it) {
    struct world w;
    world_open(&w, 400000, -1);
    struct other other = {.w = &w, .ticket = keep(&w, 3, w.stream).ticket};
    struct oo_thread *thread = oo__thread_start(end_there, &other);
    CHECK(thread != NULL, "no thread");
    if (thread)
        oo__thread_join(thread);
    CHECK(other.status == OO_OK && pins(&w, 3) == 0, "not ended");
    world_close(&w, "threads");
}

CHECK_MAIN(world_prepare)
