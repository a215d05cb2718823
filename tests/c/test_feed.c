/* Copy threads: they copy what is not page-locked, and the caller does not; each wait for them
 * holds. A call that asks for a unit whose copy failed gets the error, and the unit is copied
 * again.
 *
 * A gate in the engine's driver table lets them queue no copy while it is shut. */
#include "world.h"

#include <math.h>
#include <stdatomic.h>

static struct oo_driver real;
static _Thread_local int is_mine; /* a thread of the test */
static _Atomic int shut;
static _Atomic unsigned waiting, queued_here, synchronised, freed;

enum { LOG = 256 };
static _Atomic unsigned n_log;
static OOCUdeviceptr log_of[LOG]; /* where copies went, in turn; read when nothing is fed */
static _Atomic OOCUdeviceptr watched, slow; /* copies to there take their time */
static _Atomic unsigned beside;             /* how many other threads were at a copy then */

static const void *_Atomic from_locked; /* copies that begin there are counted */
static _Atomic unsigned n_from_locked;

static void nap(double seconds) {
    struct oo_mutex *mutex = oo__mutex_create();
    oo__mutex_lock(mutex);
    oo__mutex_wait(mutex, oo__clock_s() + seconds);
    oo__mutex_unlock(mutex);
    oo__mutex_destroy(mutex);
}

static OOCUresult OOCUDAAPI gated_copy(OOCUdeviceptr target, const void *source, size_t bytes,
                                       OOCUstream stream) {
    queued_here += is_mine != 0;
    waiting++;
    while (shut && !is_mine)
        nap(1e-3);
    n_from_locked += from_locked && source == from_locked;
    if (target == slow)
        nap(20e-3);
    if (target == watched) {
        nap(20e-3);
        beside = waiting - 1;
    }
    waiting--;
    const unsigned entry = n_log++;
    if (entry < LOG)
        log_of[entry] = target;
    return real.cuMemcpyHtoDAsync(target, source, bytes, stream);
}

static OOCUresult OOCUDAAPI counted_synchronise(OOCUstream stream) {
    synchronised += is_mine != 0;
    return real.cuStreamSynchronize(stream);
}

static OOCUresult OOCUDAAPI counted_free(void *memory) {
    freed++;
    return real.cuMemFreeHost(memory);
}

/* A world none of whose masters is locked, with a gate. */
static void begin(struct world *w, size_t arena_bytes) {
    is_mine = 1;
    shut = 0;
    queued_here = synchronised = freed = n_log = 0;
    sim.simRefuseRegistration(1);
    world_begin(w);
    real = w->engine->driver;
    w->engine->driver.cuMemcpyHtoDAsync = gated_copy;
    w->engine->driver.cuStreamSynchronize = counted_synchronise;
    w->engine->driver.cuMemFreeHost = counted_free;
    CHECK(world_attach(w, arena_bytes, 20), "attach: %s", oo_error_message());
}

static void end(struct world *w, const char *where) {
    shut = 0;
    sim.simRefuseRegistration(0);
    world_close(w, where);
    CHECK(queued_here == 0, "%s: a caller has copied masters itself", where);
}

/* Acquire the first unit and release it with the gate shut: all copy threads come to it and wait.
 */
static void shut_behind_the_first(struct world *w) {
    const struct oo_use held = use_begin(w->engine, w->member[0], w->stream, 1e-6, "acquire");
    shut = 1;
    const struct oo_fetched fetched = use_end(w->engine, &held, w->stream, "release");
    /* What is measured is copied alone, and is one piece here. */
    const unsigned threads = w->engine->spans.tracing ? 1 : w->engine->feeder.n_threads;
    CHECK(fetched.count > threads && fetched.units[0] == w->unit[1], "%u are copied ahead",
          fetched.count);
    for (int i = 0; i < 5000 && waiting < threads; i++)
        nap(1e-3);
    CHECK(waiting == threads, "%u copy threads have begun", waiting);
}

/* In an arena for all. */
static void begin_shut(struct world *w) {
    begin(w, 400000);
    shut_behind_the_first(w);
}

static void open_gate(struct world *w) {
    shut = 0;
    feeds_end(w);
}

/* ---- who copies ---- */

CASE(a_release_returns_before_anything_is_copied) {
    struct world w;
    begin_shut(&w);
    CHECK(n_log == 1 && stats_of(&w).h2d_bytes == w.bytes[0] &&
              stats_of(&w).unlocked_h2d_bytes == w.bytes[0],
          "%u copies, %llu bytes", n_log, (unsigned long long)stats_of(&w).h2d_bytes);
    open_gate(&w);
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "use");
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.h2d_bytes == w.total && stats.unlocked_h2d_bytes == w.total &&
              stats.h2d_copies == UNITS,
          "%llu bytes", (unsigned long long)stats.h2d_bytes);
    CHECK(stats.host_waits == 0 && stats.feed_waits < UNITS, "what has arrived was waited for");
    CHECK(n_log == UNITS, "%u copies", n_log);
    end(&w, "release");
}

/* Seconds of copying are those in which some thread copied, whichever it was. */
CASE(the_time_of_copying_is_counted_once) {
    struct world w;
    const uint64_t began = oo__nanoseconds();
    begin_shut(&w);
    nap(20e-3);
    shut = 0;
    steps(&w, 3, "step");
    const double elapsed_s = (double)(oo__nanoseconds() - began) * 1e-9;
    const double counted_s = stats_of(&w).unlocked_h2d_seconds;
    CHECK(counted_s >= 15e-3 && counted_s <= elapsed_s, "%.6f s of %.6f s", counted_s, elapsed_s);
    end(&w, "time");
}

/* A world whose masters are locked, but for those of units 4 and 5. */
static struct oo_host *begin_with_two_unlocked(struct world *w, size_t arena_bytes) {
    struct oo_host *host;
    size_t offset;
    is_mine = 1;
    shut = 0;
    world_begin(w);
    real = w->engine->driver;
    w->engine->driver.cuMemcpyHtoDAsync = gated_copy;
    CHECK(world_attach(w, arena_bytes, -1), "attach: %s", oo_error_message());
    need(oo_host_create(w->bytes[4] + w->bytes[5], &host), "memory");
    need(oo_engine_lock(w->engine, host, 0), "know");
    for (unsigned i = 4; i < 6; i++) {
        w->master[i] = (char *)oo_host_address(host) + (i == 5 ? w->bytes[4] : 0);
        fill(w->master[i], w->bytes[i], i);
        const struct oo_tensor tensor = {.host = w->master[i], .bytes = w->bytes[i]};
        need(oo_member_move(w->engine, w->member[i], &tensor, 1, &w->unit[i], &offset), "move");
    }
    return host;
}

static void end_with_two_unlocked(struct world *w, struct oo_host *host, const char *where) {
    need(world_remove(w), "remove");
    end_memory(w->engine, host);
    world_close(w, where);
}

/* What is not locked may have to wait for its own copy; what is, for those that it drives out. */
CASE(an_acquire_that_must_not_wait_is_refused_while_anything_is_fed) {
    struct world w;
    struct oo_fetched fetched;
    struct oo_host *host = begin_with_two_unlocked(&w, 60000);
    for (unsigned i = 0; i < 3; i++)
        need(use(&w, i, OO_FORWARD), "use");
    struct oo_use held = use_acquire(w.engine, w.member[3], w.stream, "acquire");
    feeds_end(&w);
    shut = 1;
    use_end(w.engine, &held, w.stream, "release");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[4]) != NULL, "unit 4 is not copied ahead");
    unsigned absent = 6; /* and locked */
    while (absent < UNITS && oo_plan_resident(w.engine->plan, w.unit[absent]))
        absent++;
    if (absent == UNITS) {
        CHECK(0, "all units are there");
        return;
    }
    const uint64_t acquires = stats_of(&w).acquires;
    CHECK(try_acquire(&w, absent, OO_NONBLOCKING, &held) == OO_WOULD_BLOCK &&
              stats_of(&w).acquires == acquires,
          "it may have to wait");
    need(try_acquire(&w, 3, OO_NONBLOCKING, &held), "what is there");
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    open_gate(&w);
    CHECK(oo_plan_resident(w.engine->plan, w.unit[absent]) == NULL, "unit %u is there", absent);
    need(try_acquire(&w, absent, OO_NONBLOCKING, &held), "nothing is fed");
    use_end(w.engine, &held, w.stream, "release");
    end_with_two_unlocked(&w, host, "acquire");
}

/* How many units are in the arena; each is taken for one whose copy may be under way. */
static unsigned open_residents(struct world *w) {
    unsigned count = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        if (!oo_plan_resident(w->engine->plan, w->unit[i]))
            continue;
        w->engine->units[w->unit[i]].feed->open = 1;
        count++;
    }
    return count;
}

/* Sampling has gone round for a while, and member 12 is in use; all that was fed has ended. */
static void begin_in_use(struct world *w, struct oo_use *held) {
    begin(w, 100000);
    for (unsigned i = 0; i < 4 * UNITS + 4; i++)
        need(use(w, i % UNITS, OO_FORWARD), "use");
    need(acquire(w->engine, w->member[12], w->stream, 0, OO_FORWARD, -1, 0, held), "acquire");
    feeds_end(w);
}

/* Copies ahead over what may be under way are left to a call that may wait. */
CASE(a_release_that_must_not_wait_drives_out_nothing_that_is_fed) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    begin_in_use(&w, &held);
    const unsigned before = open_residents(&w);
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    const unsigned after = open_residents(&w);
    CHECK(fetched.more && fetched.count < OO_MAX_FETCHED && after == before + fetched.count,
          "%u copied, %u units before and %u after", fetched.count, before, after);
    need(oo_engine_prefetch(w.engine, &fetched), "prefetch");
    CHECK(fetched.count > 0 && open_residents(&w) < after + fetched.count, "nothing driven out");
    end(&w, "release");
}

/* What is known to have arrived is not under way: no call that may wait is needed. */
CASE(a_release_drives_out_what_has_arrived) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    begin_in_use(&w, &held);
    oo__mutex_lock(w.engine->mutex);
    oo__feeds_count(w.engine);
    oo__mutex_unlock(w.engine->mutex);
    const uint64_t evictions = stats_of(&w).evictions;
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    CHECK(fetched.count > 0 && stats_of(&w).evictions > evictions, "%u copied, %llu driven out",
          fetched.count, (unsigned long long)(stats_of(&w).evictions - evictions));
    end(&w, "arrived");
}

/* ---- who waits for them ---- */

struct call {
    struct world *w;
    enum oo_status (*make)(struct world *w);
    enum oo_status status;
    _Atomic int begun, returned;
};

static void make_call(void *argument) {
    struct call *call = argument;
    is_mine = 1;
    call->begun = 1;
    call->status = call->make(call->w);
    call->returned = 1;
}

/* While the gate is shut the call does not return, nor come to what `count` counts; then it does.
 */
static enum oo_status waits_for_the_copy_threads(struct world *w, const _Atomic unsigned *count,
                                                 enum oo_status (*make)(struct world *w)) {
    struct call call = {w, make, OO_OK, 0, 0};
    const unsigned before = count ? *count : 0;
    struct oo_thread *thread = oo__thread_start(make_call, &call);
    while (!call.begun) /* a loaded machine starts it late */
        nap(1e-3);
    nap(60e-3);
    CHECK(!call.returned, "it did not wait for the copy threads");
    CHECK(!count || *count == before, "it went on before they had ended");
    shut = 0;
    oo__thread_join(thread);
    return call.status;
}

static enum oo_status use_the_second(struct world *w) { return use(w, 1, OO_FORWARD); }

CASE(a_unit_is_used_once_its_copy_is_queued) {
    struct world w;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, NULL, use_the_second), "use");
    CHECK(stats_of(&w).feed_wait_seconds > 20e-3 && stats_of(&w).feed_waits > 0, "%.6f s waited",
          stats_of(&w).feed_wait_seconds);
    CHECK(stats_of(&w).hits == 1 && stats_of(&w).late == 1, "copied twice");
    end(&w, "acquire");
}

static struct oo_feed *first_in_queue(struct world *w) {
    oo__mutex_lock(w->engine->feeder.mutex);
    struct oo_feed *first = w->engine->feeder.first;
    oo__mutex_unlock(w->engine->feeder.mutex);
    return first;
}

static enum oo_status use_the_last(struct world *w) { return use(w, UNITS - 1, OO_FORWARD); }

/* What a caller waits for goes before what is copied ahead: it becomes the first in the queue. How
 * soon it is copied then is up to the system, which may keep a copy thread from running with the
 * piece that it has taken; while a timeline is made, one copies at a time, and it is the next. */
static void wait_for_the_last(int alone) {
    struct world w;
    begin(&w, 400000);
    if (alone)
        need(oo_trace_start(w.engine), "timeline");
    shut_behind_the_first(&w);
    const struct oo_feed *ahead = first_in_queue(&w);
    struct call call = {&w, use_the_last, OO_OK, 0, 0};
    struct oo_thread *thread = oo__thread_start(make_call, &call);
    for (int i = 0; i < 5000 && first_in_queue(&w) == ahead; i++)
        nap(1e-3);
    const struct oo_feed *first = first_in_queue(&w);
    CHECK(first != ahead && first == w.engine->units[w.unit[UNITS - 1]].feed, "not the first");
    const unsigned held = waiting;
    shut = 0;
    oo__thread_join(thread);
    need(call.status, "use");
    feeds_end(&w);
    struct oo_resident rows[UNITS];
    size_t count;
    unsigned place = 0;
    need(oo_engine_residents(w.engine, rows, UNITS, &count), "residents");
    for (size_t i = 0; i < count; i++)
        for (unsigned k = 0; k < n_log && rows[i].unit == w.unit[UNITS - 1]; k++)
            if (log_of[k] == rows[i].address)
                place = k;
    CHECK(place > 0 && (!alone || place <= 1 + held), "copied as number %u of %u", place, n_log);
    CHECK(held < n_log - 2, "all were under way");
    end(&w, "urgent");
}

CASE(what_is_waited_for_is_copied_first) { wait_for_the_last(0); }
CASE(what_is_waited_for_is_copied_next_if_one_copies_at_a_time) { wait_for_the_last(1); }

/* A copy that is measured begins when those before it have ended; none begins during it. */
CASE(what_is_measured_is_copied_alone_and_in_its_turn) {
    struct world w;
    unsigned measured = 0, earlier = 0, place = 0;
    begin(&w, 400000);
    beside = 99;
    w.engine->spans.seen[OO_TRACE_H2D] = (uint32_t)-6; /* the sample takes what has number 0 */
    shut_behind_the_first(&w);
    for (unsigned i = 1; i < UNITS && !measured; i++, earlier++)
        if (w.engine->units[w.unit[i]].feed && w.engine->units[w.unit[i]].feed->begin)
            measured = i;
    CHECK(measured > w.engine->feeder.n_threads, "unit %u is measured", measured);
    const size_t most = oo__processors() < OO_FEED_THREADS ? oo__processors() : OO_FEED_THREADS;
    CHECK(w.engine->feeder.n_threads == most, "%u threads", w.engine->feeder.n_threads);
    watched = (OOCUdeviceptr)w.engine->units[w.unit[measured]].feed->address;
    slow = (OOCUdeviceptr)w.engine->units[w.unit[measured - 1]].feed->address;
    open_gate(&w);
    CHECK(beside == 0, "%u copies at the same time", beside);
    for (unsigned k = 0; k < n_log; k++)
        if (log_of[k] == watched)
            place = k;
    CHECK(place == earlier, "copied as number %u, after %u", place, earlier);
    CHECK(stats_of(&w).unlocked_h2d_seconds > 35e-3, "%.6f s: of one thread alone, none",
          stats_of(&w).unlocked_h2d_seconds);
    watched = slow = 0;
    end(&w, "measured");
}

static double h2d_busy_s(void) {
    struct sim_stats stats;
    sim.simGetStats(&stats);
    return stats.h2d_busy_s;
}

/* A driver that collects work gets the last copy of the threads before anybody waits for it. */
CASE(copies_ahead_are_handed_over) {
    struct world w;
    CHECK(sim.simSwitch(SIM_LATE_SUBMISSION, 1) == 0, "no such switch");
    begin_shut(&w);
    open_gate(&w);
    sim.simAdvance(1);
    const double begun_s = h2d_busy_s();
    finish();
    CHECK(h2d_busy_s() == begun_s && begun_s > 0, "%.9f s of %.9f s", begun_s, h2d_busy_s());
    end(&w, "handed over");
}

/* And the last decode. */
CASE(decodes_ahead_are_handed_over) {
    struct world w;
    struct sim_stats begun, ended;
    CHECK(sim.simSwitch(SIM_LATE_SUBMISSION, 1) == 0, "no such switch");
    world_coded = 1;
    begin(&w, 400000);
    world_coded = 0;
    shut_behind_the_first(&w);
    sim.cuCtxPushCurrent_v2(w.context);
    (void)real.cuStreamQuery((OOCUstream)w.stream); /* its own kernel is not looked at */
    sim.cuCtxPopCurrent_v2(NULL);
    open_gate(&w);
    sim.simAdvance(1);
    sim.simGetStats(&begun);
    finish();
    sim.simGetStats(&ended);
    CHECK(begun.compute_busy_s > 5e-6 && ended.compute_busy_s == begun.compute_busy_s,
          "%.9f s of %.9f s", begun.compute_busy_s, ended.compute_busy_s);
    end(&w, "decodes handed over");
}

/* What is measured is the time of the copies, not that of what the h2d stream waited for before. */
CASE(the_time_of_a_fed_copy_is_its_own) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    begin(&w, 30000); /* so that a unit waits for the kernel of one before it */
    const uintptr_t stream = new_stream(&w);
    need(oo_trace_start(w.engine), "start");
    const double before_s = h2d_busy_s();
    for (unsigned i = 0; i < UNITS; i++) {
        need(use_on(&w, i, OO_FORWARD, -1, 0, stream), "use");
        feeds_end(&w);
    }
    need(oo_trace_stop(w.engine, &rows, &count), "stop");
    finish();
    const double busy_s = h2d_busy_s() - before_s;
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.h2d_timed_bytes == stats.h2d_bytes, "not all are measured");
    CHECK(fabs(stats.h2d_seconds - busy_s) < 1e-9, "%.9f s, and the link was busy for %.9f s",
          stats.h2d_seconds, busy_s);
    oo_trace_free(rows);
    end_stream(&w, stream);
    end(&w, "its own");
}

/* Where a feed overtakes one that has begun, the time of that one is counted all the same. */
CASE(the_time_of_what_was_overtaken_is_counted) {
    struct world w;
    begin(&w, 400000);
    need(oo_engine_reserve_rings(w.engine, OO_RING_PIECES * oo__page_bytes()), "many pieces");
    const uint64_t began = oo__nanoseconds();
    shut_behind_the_first(&w);
    struct call call = {&w, use_the_last, OO_OK, 0, 0};
    struct oo_thread *thread = oo__thread_start(make_call, &call);
    nap(30e-3);
    shut = 0;
    oo__thread_join(thread);
    need(call.status, "use");
    feeds_end(&w);
    const double elapsed_s = (double)(oo__nanoseconds() - began) * 1e-9;
    for (unsigned i = 0; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "use");
    const double counted_s = stats_of(&w).unlocked_h2d_seconds;
    CHECK(counted_s >= 25e-3 && counted_s <= elapsed_s + 1, "%.6f s of %.6f s", counted_s,
          elapsed_s);
    CHECK(stats_of(&w).h2d_copies == UNITS, "%llu copies: pieces were counted",
          (unsigned long long)stats_of(&w).h2d_copies);
    end(&w, "overtaken");
}

static enum oo_status stop_the_timeline(struct world *w) {
    struct oo_trace_row *rows;
    size_t count, copies = 0;
    const enum oo_status status = oo_trace_stop(w->engine, &rows, &count);
    for (size_t i = 0; i < count; i++)
        copies += rows[i].kind == OO_TRACE_H2D && rows[i].end_s > rows[i].start_s;
    CHECK(copies == n_log, "%zu rows of %u copies", copies, n_log);
    oo_trace_free(rows);
    return status;
}

CASE(a_timeline_has_the_copies_that_were_under_way_at_its_end) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    begin(&w, 400000);
    need(oo_trace_start(w.engine), "start");
    shut_behind_the_first(&w);
    need(waits_for_the_copy_threads(&w, NULL, stop_the_timeline), "stop");
    need(oo_trace_start(w.engine), "start");
    need(use(&w, 1, OO_FORWARD), "use");
    need(oo_trace_stop(w.engine, &rows, &count), "stop");
    for (size_t i = 0; i < count; i++)
        CHECK(rows[i].kind != OO_TRACE_H2D || rows[i].start_s >= 0, "begun at %g s",
              rows[i].start_s);
    oo_trace_free(rows);
    end(&w, "timeline");
}

static enum oo_status start_a_timeline(struct world *w) { return oo_trace_start(w->engine); }

CASE(a_timeline_begins_when_nothing_is_under_way) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, NULL, start_a_timeline), "start");
    need(oo_trace_stop(w.engine, &rows, &count), "stop");
    CHECK(count == 0, "%zu rows of what was before", count);
    oo_trace_free(rows);
    end(&w, "start");
}

static enum oo_status remove_the_lease(struct world *w) {
    w->leased = 0;
    return oo_lease_remove(w->engine, w->lease);
}
static enum oo_status remove_the_model(struct world *w) {
    return oo_model_remove(w->engine, w->model);
}
static enum oo_status refresh_the_model(struct world *w) {
    return oo_engine_refresh(w->engine, w->model);
}
static enum oo_status shrink_the_rings(struct world *w) {
    return oo_engine_reserve_rings(w->engine, OO_RING_PIECES * oo__page_bytes());
}

CASE(the_memory_goes_back_when_nobody_copies_there) {
    struct world w;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, &synchronised, remove_the_lease), "remove");
    const unsigned copied = n_log;
    nap(5e-3);
    CHECK(n_log == copied, "copied on after the memory was given back");
    CHECK(stats_of(&w).stopped_feeds > 0, "nothing was stopped");
    end(&w, "lease");
}

CASE(masters_are_the_callers_when_nobody_reads_them) {
    struct world w;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, &synchronised, remove_the_model), "remove");
    memset(oo_host_address(w.host), 0, w.total); /* the thread sanitizer sees who reads */
    nap(5e-3);
    need(oo_model_add(w.engine, &w.model), "model"); /* for the end */
    end(&w, "model");
}

CASE(what_is_dropped_is_not_copied_any_more) {
    struct world w;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, NULL, refresh_the_model), "refresh");
    const unsigned copied = n_log;
    memset(oo_host_address(w.host), 0, w.total);
    nap(5e-3);
    CHECK(n_log == copied && copied < UNITS / 2, "%u copies of what was dropped", n_log - 1);
    for (unsigned i = 0; i < UNITS; i++)
        fill(w.master[i], w.bytes[i], 77 + i);
    (void)stats_of(&w); /* to count them takes nothing up again */
    need(step(&w), "anew");
    CHECK(stats_of(&w).prefetch_failures == 0, "%llu copies have failed",
          (unsigned long long)stats_of(&w).prefetch_failures);
    end(&w, "refresh");
}

CASE(a_ring_goes_when_nobody_uses_it) {
    struct world w;
    begin_shut(&w);
    need(waits_for_the_copy_threads(&w, &freed, shrink_the_rings), "shrink");
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "through the small ring");
    end(&w, "ring");
}

/* What was stopped for a removal that then failed is not taken for copied. */
CASE(what_was_stopped_is_copied_anew) {
    struct world w;
    begin_shut(&w);
    fail_call("cuStreamSynchronize", 1);
    CHECK(waits_for_the_copy_threads(&w, NULL, remove_the_lease) == OO_E_DRIVER, "no error");
    w.leased = 1;
    need(step(&w), "step");
    end(&w, "stopped");
    begin(&w, 400000); /* a unit of a single piece would be whole when it stops */
    need(oo_engine_reserve_rings(w.engine, OO_RING_PIECES * oo__page_bytes()), "many pieces");
    shut_behind_the_first(&w);
    fail_call("cuStreamSynchronize", 1);
    CHECK(waits_for_the_copy_threads(&w, NULL, remove_the_model) == OO_E_DRIVER, "no error");
    need(step(&w), "step");
    end(&w, "a model that stays");
}

/* What a call refuses, or of another lease, goes on being copied. */
CASE(what_stays_is_not_stopped) {
    struct world w;
    uint32_t other;
    static char memory[8192];
    begin_shut(&w);
    need(oo_lease_add(w.engine, &other), "lease");
    need(oo_segment_add(w.engine, other, (uintptr_t)memory, sizeof memory, w.stream), "segment");
    const struct oo_use held = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    CHECK(oo_lease_remove(w.engine, w.lease) == OO_E_STATE, "removed in use");
    CHECK(oo_model_remove(w.engine, w.model) == OO_E_STATE, "removed in use");
    need(oo_lease_remove(w.engine, other), "remove");
    CHECK(shut, "the gate was opened");
    shut = 0;
    use_end(w.engine, &held, w.stream, "release");
    need(step(&w), "step");
    CHECK(stats_of(&w).prefetch_failures == 0, "%llu copies were stopped",
          (unsigned long long)stats_of(&w).prefetch_failures);
    end(&w, "stays");
}

/* ---- what fails in a copy thread ---- */

static _Atomic int countdown; /* calls of copy threads until one fails; 0: none does */
static const char *_Atomic failed;

static int fails(const char *call) {
    if (is_mine || countdown == 0)
        return 0;
    const int left = --countdown;
    if (left != 0)
        return 0;
    failed = call;
    return 1;
}

static OOCUresult OOCUDAAPI failing_push(OOCUcontext context) {
    return fails("cuCtxPushCurrent") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                     : real.cuCtxPushCurrent(context);
}
static OOCUresult OOCUDAAPI failing_copy(OOCUdeviceptr target, const void *source, size_t bytes,
                                         OOCUstream stream) {
    return fails("cuMemcpyHtoDAsync") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                      : real.cuMemcpyHtoDAsync(target, source, bytes, stream);
}
static OOCUresult OOCUDAAPI failing_record(OOCUevent event, OOCUstream stream) {
    return fails("cuEventRecord") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                  : real.cuEventRecord(event, stream);
}
static OOCUresult OOCUDAAPI failing_query(OOCUevent event) {
    return fails("cuEventQuery") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES : real.cuEventQuery(event);
}
static OOCUresult OOCUDAAPI failing_wait(OOCUevent event) {
    return fails("cuEventSynchronize") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                       : real.cuEventSynchronize(event);
}
static OOCUresult OOCUDAAPI failing_synchronise(OOCUstream stream) {
    return fails("cuStreamSynchronize") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                        : real.cuStreamSynchronize(stream);
}
static OOCUresult OOCUDAAPI failing_access(const void *memory, size_t bytes, int is_write) {
    return fails("simHostAccess") ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES
                                  : real.simHostAccess(memory, bytes, is_write);
}

/* Two steps, in which the n-th call of the copy threads fails; returns whether there was one. */
static int life_with_a_failure(int nth, uint64_t quota, const char *where) {
    struct world w;
    is_mine = 1;
    countdown = nth;
    failed = NULL;
    sim.simRefuseRegistration(1);
    sim.simLockQuota(quota);
    world_begin(&w);
    real = w.engine->driver;
    w.engine->driver.cuCtxPushCurrent = failing_push;
    w.engine->driver.cuMemcpyHtoDAsync = failing_copy;
    w.engine->driver.cuEventRecord = failing_record;
    w.engine->driver.cuEventQuery = failing_query;
    w.engine->driver.cuEventSynchronize = failing_wait;
    w.engine->driver.cuStreamSynchronize = failing_synchronise;
    w.engine->driver.simHostAccess = failing_access;
    CHECK(world_attach(&w, 60000, -1), "%s: %s", where, oo_error_message());
    int told = 0;
    for (int round = 0; round < 2; round++) {
        for (unsigned i = 0; i < UNITS; i++) {
            const enum oo_status status = use(&w, i, round ? OO_BACKWARD : OO_FORWARD);
            told += status != OO_OK;
            CHECK(status == OO_OK || (status == OO_E_DRIVER && failed &&
                                      strncmp(oo_error_message(), failed, strlen(failed)) == 0),
                  "%s, call %d: %s: %s", where, nth, oo_status_name(status), oo_error_message());
        }
    }
    feeds_end(&w);
    countdown = 0;
    const int struck = failed != NULL;
    const struct oo_stats stats = stats_of(&w);
    CHECK(told + (int)stats.prefetch_failures <= struck, "%s, call %d: %d errors, %d given up",
          where, nth, told, (int)stats.prefetch_failures);
    need(step(&w), "after it");
    sim.simRefuseRegistration(0);
    sim.simLockQuota(UINT64_MAX);
    world_close(&w, where);
    return struck;
}

CASE(whichever_call_of_theirs_fails_the_next_use_is_right) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        for (int ring = 0; ring < 2; ring++) {
            int nth = 1;
            for (int struck = 1; struck && nth < 400;
                 nth += (nth < 12 ? 1 : 17) * (int)sweep_stride()) {
                sim.simSetSchedule(schedule, 11);
                struck = life_with_a_failure(nth, ring ? UINT64_MAX : 0,
                                             ring ? "by the ring" : "as they are");
            }
            CHECK(nth > 60, "%d calls", nth);
        }
    }
}

/* A copy ahead that failed is given up without harm, and counted; one that is waited for is an
 * error. */
CASE(a_failure_is_told_to_who_waits_for_it) {
    struct world w;
    begin(&w, 400000);
    fail_call("cuMemcpyHtoDAsync", 1);
    CHECK(use(&w, 0, OO_FORWARD) == OO_E_DRIVER &&
              strncmp(oo_error_message(), "cuMemcpyHtoDAsync", 17) == 0,
          "%s", oo_error_message());
    CHECK(stats_of(&w).resident_units == 0 && stats_of(&w).h2d_bytes == 0 &&
              stats_of(&w).h2d_copies == 0 && stats_of(&w).unlocked_h2d_bytes == 0,
          "taken for copied");
    end(&w, "told");
    begin_shut(&w);
    fail_call("cuMemcpyHtoDAsync", 1);
    open_gate(&w);
    CHECK(stats_of(&w).prefetch_failures == 0, "counted before anybody asked");
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(stats_of(&w).prefetch_failures == 1, "%llu",
          (unsigned long long)stats_of(&w).prefetch_failures);
    end(&w, "given up");
}

/* A context that is lost under a copy thread: the engine names that thread's call. */
static void end_of_a_lost_world(struct world *w, const char *where) {
    need(world_remove(w), "detach");
    end_memory(w->engine, w->host);
    const enum oo_status ended = oo_engine_destroy(w->engine);
    CHECK(ended == OO_OK || ended == OO_LEAKED, "%s: %s", where, oo_error_message());
    free(w->arena);
    sim.simFaultClear();
    sim.simRefuseRegistration(0);
    release_leaked_contexts();
    check_nothing_alive(where);
    CHECK(sim_reset(&sim) == 0, "not reset");
}

CASE(a_context_lost_by_a_copy_thread_is_named) {
    struct world w;
    begin_shut(&w);
    sim.simFault("cuMemcpyHtoDAsync", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    open_gate(&w);
    CHECK(use(&w, 1, OO_FORWARD) == OO_E_DRIVER &&
              strncmp(oo_error_message(), "cuMemcpyHtoDAsync", 17) == 0,
          "%s", oo_error_message());
    CHECK(use(&w, 1, OO_FORWARD) == OO_E_DEAD, "not dead");
    end_of_a_lost_world(&w, "lost by a copy thread");
}

/* What passed under a copy thread before the loss is not the cause of it. */
CASE(a_loss_is_not_named_after_what_failed_before) {
    struct world w;
    begin_shut(&w);
    fail_call("cuMemcpyHtoDAsync", 1);
    open_gate(&w);
    sim.simFault("cuStreamIsCapturing", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(use(&w, 0, OO_FORWARD) == OO_E_DRIVER &&
              strncmp(oo_error_message(), "cuStreamIsCapturing", 19) == 0,
          "%s", oo_error_message());
    end_of_a_lost_world(&w, "another");
}

/* A call that meets the loss waits for what a copy thread has to say, but not for ever: the thread
 * may be stuck in a call of its own. */
CASE(a_loss_is_told_though_a_copy_thread_is_stuck) {
    struct world w;
    begin_shut(&w);
    sim.simFault("cuStreamIsCapturing", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    const uint64_t began = oo__nanoseconds();
    CHECK(use(&w, 0, OO_FORWARD) == OO_E_DRIVER &&
              strncmp(oo_error_message(), "cuStreamIsCapturing", 19) == 0,
          "%s", oo_error_message());
    const double waited_s = (double)(oo__nanoseconds() - began) * 1e-9;
    CHECK(waited_s > 0.9 && shut, "%.3f s", waited_s);
    shut = 0;
    end_of_a_lost_world(&w, "stuck");
}

/* A part that is locked travels with one that is not, and both are counted as what they are. */
CASE(a_unit_may_be_locked_in_part) {
    struct world w;
    struct oo_host *host;
    const size_t page = oo__page_bytes();
    uint32_t member;
    size_t offsets[2];
    is_mine = 1;
    world_open(&w, 400000, -1);
    need(oo_host_create(4 * page, &host), "host");
    fill(oo_host_address(host), 4 * page, 3);
    need(oo_engine_lock(w.engine, host, 2 * page), "lock");
    need(oo_engine_reserve_rings(w.engine, OO_RING_PIECES * page), "a ring of small pieces");
    const char *base = oo_host_address(host);
    const struct oo_tensor rows[2] = {{.host = base, .bytes = 2 * page},
                                      {.host = base + 2 * page, .bytes = 2 * page}};
    add_unit(w.engine, w.model, rows, 2, &member, offsets);
    real = w.engine->driver;
    w.engine->driver.cuMemcpyHtoDAsync = gated_copy;
    from_locked = base;
    const struct oo_use held = use_begin(w.engine, member, w.stream, 1e-6, "acquire");
    CHECK(memcmp((void *)held.address, base, 4 * page) == 0, "wrong bytes");
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.h2d_copies == 2 && stats.h2d_bytes == 4 * page &&
              stats.unlocked_h2d_bytes == 2 * page,
          "%llu copies of %llu bytes", (unsigned long long)stats.h2d_copies,
          (unsigned long long)stats.h2d_bytes);
    CHECK(n_from_locked == 1 && stats.copy_waits == 0,
          "what is locked went through the ring, or was waited for: %llu times",
          (unsigned long long)stats.copy_waits);
    use_end(w.engine, &held, w.stream, "release");
    need(world_remove(&w), "remove");
    end_memory(w.engine, host);
    world_close(&w, "locked in part");
}

CHECK_MAIN(world_prepare)
