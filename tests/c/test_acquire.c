/* Acquire: whether it waits, how far it copies ahead, what it launches, and how it fails. */
#include "world.h"

#include "copies.h"
#include "timing.h"

CASE(test_a_nonblocking_call_never_waits) {
    struct world w;
    struct oo_use use;
    struct oo_fetched fetched;
    sim.simRefuseRegistration(1);
    world_open(&w, 60000, -1);
    CHECK(try_acquire(&w, 0, OO_NONBLOCKING, &use) == OO_WOULD_BLOCK,
          "a unit behind the ring without waiting");
    use = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    CHECK(use.fetched.count == 1 && use.fetched.units[0] == w.unit[0], "%u fetched",
          use.fetched.count);
    need(oo_engine_release(w.engine, use.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    /* The copy threads wait for the ring, not the caller. */
    CHECK(fetched.count > 0 && fetched.count <= OO_MAX_FETCHED, "%u fetched", fetched.count);
    sim.simRefuseRegistration(0);
    uint32_t unit;
    size_t offset;
    char *foreign = malloc(w.bytes[7]);
    const struct oo_tensor tensor = {.host = foreign, .bytes = w.bytes[7]};
    fill(foreign, w.bytes[7], 5);
    need(oo_member_move(w.engine, w.member[7], &tensor, 1, &unit, &offset), "move");
    CHECK(try_acquire(&w, 7, OO_NONBLOCKING, &use) == OO_WOULD_BLOCK,
          "a unit in memory that the engine does not know, without waiting");
    free(foreign);
    world_close(&w, "nonblocking");
}

/* A nonblocking call returns OO_WOULD_BLOCK while another thread is inside the engine. */
CASE(test_a_nonblocking_call_leaves_when_the_engine_is_busy) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    oo__mutex_lock(w.engine->mutex);
    CHECK(try_acquire(&w, 0, OO_NONBLOCKING, &held) == OO_WOULD_BLOCK, "acquired in a busy engine");
    CHECK(oo_engine_release(w.engine, 0, w.stream, OO_NONBLOCKING, &fetched) == OO_WOULD_BLOCK,
          "released in a busy engine");
    const struct oo_stamp stamp = {w.member[0], 7};
    CHECK(oo_engine_stamp(w.engine, &stamp, 1, OO_NONBLOCKING) == OO_WOULD_BLOCK,
          "stamped in a busy engine");
    const struct oo_fetched unstamped = {.count = 1, .units = {w.unit[0]}};
    CHECK(oo_engine_distrust(w.engine, &unstamped, OO_NONBLOCKING) == OO_WOULD_BLOCK,
          "distrusted in a busy engine");
    oo__mutex_unlock(w.engine->mutex);
    CHECK(w.engine->members[w.member[0]].stamp != 7, "stamped all the same");
    CHECK(!w.engine->units[w.unit[0]].stale, "distrusted all the same");
    need(oo_engine_distrust(w.engine, &unstamped, OO_NONBLOCKING), "distrust");
    CHECK(w.engine->units[w.unit[0]].stale, "trusted");
    need(oo_engine_stamp(w.engine, &stamp, 1, OO_NONBLOCKING), "stamp");
    CHECK(w.engine->members[w.member[0]].stamp == 7, "not stamped");
    need(try_acquire(&w, 0, OO_NONBLOCKING, &held), "acquire");
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    need(world_remove(&w), "remove");
    ANSWERS(OO_E_STATE, "0 models and 1 host", oo_engine_destroy(w.engine));
    need(oo_engine_destroy(NULL), "destroy nothing");
    world_close(&w, "busy");
}

/* A unit of so many parts, in memory of its own: each but the first is before the last one. */
static struct oo_host *move_apart(struct world *w, unsigned i, uint32_t parts) {
    struct oo_tensor *tensors = calloc(parts, sizeof *tensors);
    size_t *offsets = calloc(parts, sizeof *offsets);
    uint32_t unit;
    struct oo_host *host = locked_memory(w->engine, parts * OO_ALIGNMENT);
    for (uint32_t t = 0; t < parts; t++)
        tensors[t] = (struct oo_tensor){.host = (char *)oo_host_address(host) +
                                                (parts - 1 - t) * OO_ALIGNMENT,
                                        .bytes = OO_ALIGNMENT};
    need(oo_member_move(w->engine, w->member[i], tensors, parts, &unit, offsets), "move");
    static const char zeros[1 << 17];
    w->unit[i] = unit;
    w->expected[i] = zeros;
    w->bytes[i] = parts * OO_ALIGNMENT;
    CHECK(w->engine->units[unit].n_parts == parts, "%u parts", w->engine->units[unit].n_parts);
    free(tensors);
    free(offsets);
    return host;
}

/* Learn the order of uses, with unit 0 of so many parts; nothing is on the device then. */
static struct oo_host *open_apart(struct world *w, uint32_t parts, int measures) {
    world_open(w, 800000, -1);
    if (!measures)
        w->engine->driver.cuEventElapsedTime = NULL;
    struct oo_host *host = move_apart(w, 0, parts);
    steps(w, 3, "learn");
    need(oo_engine_refresh(w->engine, OO_ALL_MODELS), "refresh");
    finish();
    empty_queue(w->engine);
    return host;
}

static void close_apart(struct world *w, struct oo_host *host, const char *what) {
    need(world_remove(w), "remove");
    end_memory(w->engine, host);
    world_close(w, what);
}

/* A copy that the driver's queue has no room for waits until the device has taken another from it:
 * a non-blocking call leaves it to one that may wait, and has asked the driver nothing by then. */
CASE(test_a_nonblocking_call_queues_nothing_where_the_queue_may_be_full) {
    struct world w;
    struct oo_use first, other;
    struct oo_fetched fetched;
    struct oo_host *host = open_apart(&w, OO_QUEUED_PARTS, 1);
    CHECK(sim.simHold(w.engine->h2d, 1) == 0, "not held");
    need(try_acquire(&w, 0, OO_NONBLOCKING, &first), "the first");
    const uint64_t calls = sim.simCallCount(NULL);
    CHECK(try_acquire(&w, 1, OO_NONBLOCKING, &other) == OO_WOULD_BLOCK &&
              oo_engine_release(w.engine, first.ticket, w.stream, OO_NONBLOCKING, &fetched) ==
                  OO_WOULD_BLOCK,
          "queued behind %llu parts", (unsigned long long)w.engine->copies.sent);
    CHECK(sim.simCallCount(NULL) == calls, "%llu calls",
          (unsigned long long)(sim.simCallCount(NULL) - calls));
    const struct oo_stamp stamp = {w.member[0], 0};
    need(oo_engine_stamp(w.engine, &stamp, 1, OO_NONBLOCKING), "a call that queues nothing");
    need(try_acquire(&w, 1, 0, &other), "blocking");
    fetched = use_end(w.engine, &other, w.stream, "release");
    CHECK(fetched.count > 0, "nothing is copied ahead");
    CHECK(sim.simHold(w.engine->h2d, 0) == 0, "still held");
    finish();
    use_end(w.engine, &first, w.stream, "release");
    close_apart(&w, host, "full");
}

/* One unit alone may fill the queue. */
CASE(test_a_nonblocking_call_queues_no_unit_of_many_parts) {
    struct world w;
    struct oo_use use;
    struct oo_fetched fetched;
    struct oo_host *host = open_apart(&w, OO_QUEUED_PARTS + 1, 1);
    CHECK(try_acquire(&w, 0, OO_NONBLOCKING, &use) == OO_WOULD_BLOCK, "acquired");
    CHECK(!oo_plan_resident(w.engine->plan, w.unit[0]), "copied");
    /* Its next use is the nearest but one of those that are left. */
    for (unsigned i = 1; i < UNITS; i++) {
        need(try_acquire(&w, i, 0, &use), "acquire");
        fetched.more = 0;
        const enum oo_status status =
            oo_engine_release(w.engine, use.ticket, w.stream, OO_NONBLOCKING, &fetched);
        if (status == OO_WOULD_BLOCK)
            fetched = use_end(w.engine, &use, w.stream, "release");
        if (fetched.more && fetched.count == 0)
            break;
    }
    CHECK(!oo_plan_resident(w.engine->plan, w.unit[0]) && fetched.more && fetched.count == 0,
          "%u copied ahead, more %d", fetched.count, fetched.more);
    need(oo_engine_prefetch(w.engine, &fetched), "prefetch");
    CHECK(fetched.count > 0 && fetched.units[0] == w.unit[0], "%u copied", fetched.count);
    CHECK(oo_plan_resident(w.engine->plan, w.unit[0]) != NULL, "not copied by a call that may");
    empty_queue(w.engine);
    need(try_acquire(&w, 0, OO_NONBLOCKING, &use), "a hit");
    use_end(w.engine, &use, w.stream, "release");
    empty_queue(w.engine);
    CHECK(acquire(w.engine, w.member[0], w.stream, 1, OO_FORWARD, -1, OO_NONBLOCKING, &use) ==
              OO_WOULD_BLOCK,
          "copied again");
    close_apart(&w, host, "many parts");
}

/* What is repeated because it may wait is one use, and begins one pass over the units. */
CASE(test_a_use_that_is_asked_for_again_begins_one_sweep) {
    struct world w;
    struct oo_use use;
    struct oo_host *host = open_apart(&w, OO_QUEUED_PARTS + 1, 1);
    for (uint64_t pass = 0; pass < 3; pass++) {
        const uint64_t before = w.engine->sweep;
        CHECK(acquire(w.engine, w.member[0], w.stream, pass + 1, OO_FORWARD, -1, OO_NONBLOCKING,
                      &use) == OO_WOULD_BLOCK,
              "acquired");
        CHECK(acquire(w.engine, w.member[0], w.stream, pass + 1, OO_FORWARD, -1, 0, &use) == OO_OK,
              "%s", oo_error_message());
        CHECK(w.engine->sweep - before == 1, "pass %llu: %llu sweeps", (unsigned long long)pass,
              (unsigned long long)(w.engine->sweep - before));
        use_end(w.engine, &use, w.stream, "release");
    }
    close_apart(&w, host, "one sweep");
}

/* Of copies of four parts each, one in 16 is measured, or none: a device that has done all that it
 * was given sends no call away. */
CASE(test_an_idle_device_turns_no_nonblocking_call_away) {
    for (int measures = 0; measures < 2; measures++) {
        struct world w;
        struct oo_use use;
        struct oo_fetched fetched;
        unsigned refused = 0;
        struct oo_host *host = open_apart(&w, 4, measures);
        const uint64_t before = w.engine->copies.sent;
        for (uint64_t stamp = 1; stamp <= 200; stamp++) { /* each copies the unit again */
            const int flags[] = {OO_NONBLOCKING, 0};
            int i = 0;
            while (acquire(w.engine, w.member[0], w.stream, stamp, OO_FORWARD, -1, flags[i],
                           &use) == OO_WOULD_BLOCK)
                refused++, i = 1;
            i = 0;
            while (oo_engine_release(w.engine, use.ticket, w.stream, flags[i], &fetched) ==
                   OO_WOULD_BLOCK)
                refused++, i = 1;
            finish();
        }
        CHECK(w.engine->copies.sent - before >= 4 * 200, "%llu parts",
              (unsigned long long)(w.engine->copies.sent - before));
        CHECK(refused == 0, "measures %d: %u of 400 calls", measures, refused);
        close_apart(&w, host, "idle");
    }
}

/* A hit by a call that may wait. */
static void hit(struct world *w) {
    struct oo_use use;
    need(try_acquire(w, 0, 0, &use), "a hit");
    use_end(w->engine, &use, w->stream, "release");
}

/* So many that none looks. */
static void hit_unlooked(struct world *w) {
    const uint64_t left = w->engine->copies.left, calls = sim.simCallCount("cuStreamQuery");
    for (unsigned i = 0; i < OO_USES_UNLOOKED; i++)
        hit(w);
    CHECK(w->engine->copies.left == left && sim.simCallCount("cuStreamQuery") == calls, "looked");
}

/* What has left the queue is known by copies that are measured; else the stream is asked: not again
 * by the next uses, where the device is behind. */
static void queue_is_known_to_be_empty(int measured) {
    struct world w;
    struct oo_host *host = open_apart(&w, OO_QUEUED_PARTS, measured);
    if (measured)
        need(oo_trace_start(w.engine), "trace");
    const uintptr_t own = w.stream;
    w.stream = new_stream(&w); /* none of the engine's is busy but the one that counts */
    CHECK(sim.simHold(w.engine->h2d, 1) == 0, "not held");
    const uint64_t queries = sim.simCallCount("cuStreamQuery");
    hit(&w); /* not yet one */
    hit(&w);
    CHECK(!oo__queue_has_room(w.engine, 1), "nothing has left yet");
    CHECK(sim.simHold(w.engine->h2d, 0) == 0, "still held");
    finish();
    hit_unlooked(&w);
    fail_call("cuStreamQuery", 1);
    hit(&w);
    CHECK(oo__queue_has_room(w.engine, OO_QUEUED_PARTS) == measured, "measured %d", measured);
    sim.simFaultClear();
    hit_unlooked(&w);
    hit(&w);
    CHECK(oo__queue_has_room(w.engine, OO_QUEUED_PARTS), "no room in an empty queue");
    for (unsigned i = 0; i < OO_VISITS_READ; i++) /* an empty queue fills up without copies? */
        hit(&w);
    const uint64_t asked = sim.simCallCount("cuStreamQuery") - queries;
    CHECK(asked == (measured ? 0 : 3), "asked %llu times", (unsigned long long)asked);
    w.engine->copies.sent += OO_QUEUED_PARTS / 2;
    hit(&w);
    CHECK(!oo__queue_has_room(w.engine, OO_QUEUED_PARTS / 2 + 1), "looked while half is left");
    w.engine->copies.sent++;
    hit(&w);
    CHECK(oo__queue_has_room(w.engine, OO_QUEUED_PARTS), "did not look");
    if (measured) {
        end_timeline(w.engine);
    }
    end_stream(&w, w.stream);
    w.stream = own;
    close_apart(&w, host, "empty");
}

/* Behind what a copy thread has queued there may be others, by when its end is measured. */
CASE(test_the_end_of_a_fed_copy_tells_nothing_of_others) {
    for (uint8_t fed = 0; fed < 2; fed++) {
        struct world w;
        struct oo_event *begin, *end;
        struct oo_host *host = open_apart(&w, OO_QUEUED_PARTS, 1);
        struct oo_engine *engine = w.engine;
        need(oo__enter(engine, 0), "enter");
        oo__spans_harvest(engine);
        const uint64_t left = engine->copies.left;
        need(oo__event_take(engine, OO_TIMED, &begin), "event");
        need(oo__event_take(engine, OO_TIMED, &end), "event");
        CHECK(engine->driver.cuEventRecord(begin->handle, engine->h2d) == 0, "no record");
        CHECK(engine->driver.cuEventRecord(end->handle, engine->h2d) == 0, "no record");
        need(oo__synchronize(engine, engine->h2d, 0), "synchronize");
        engine->copies.sent += 5;
        engine->units[w.unit[1]].is_fed = fed;
        oo__span_add(engine, OO_TRACE_H2D, w.unit[1], 256, begin, end);
        engine->units[w.unit[1]].is_fed = 0;
        oo__spans_harvest(engine);
        CHECK(engine->copies.left == left + (fed ? 0 : 5), "%d fed: %llu have left", fed,
              (unsigned long long)(engine->copies.left - left));
        oo__leave(engine);
        close_apart(&w, host, "fed");
    }
}

CASE(test_the_queue_is_known_to_be_empty) {
    queue_is_known_to_be_empty(1);
    queue_is_known_to_be_empty(0);
}

/* A bit without a meaning today may get one later: a caller that sets it must get an error.
 */
CASE(test_unknown_flags_are_refused) {
    struct world w;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    const struct oo_use held = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    for (unsigned bit = 0; bit < 32; bit++) {
        const int flag = (int)(1u << bit);
        const struct oo_stats before = stats_of(&w);
        struct oo_use use;
        if (!(flag & (OO_NONBLOCKING | OO_LAUNCH)))
            CHECK(try_acquire(&w, 0, flag | OO_NONBLOCKING, &use) == OO_E_ARGUMENT &&
                      strstr(oo_error_message(), "oo_engine_acquire: unknown flags 0x"),
                  "acquire with bit %u: %s", bit, oo_error_message());
        if (flag != OO_NONBLOCKING)
            CHECK(oo_engine_release(w.engine, held.ticket, w.stream, flag, &fetched) ==
                          OO_E_ARGUMENT &&
                      strstr(oo_error_message(), "oo_engine_release: unknown flags 0x"),
                  "release with bit %u: %s", bit, oo_error_message());
        if (flag != OO_NONBLOCKING)
            CHECK(oo_engine_stamp(w.engine, &(struct oo_stamp){w.member[0], 7}, 1, flag) ==
                          OO_E_ARGUMENT &&
                      w.engine->members[w.member[0]].stamp != 7 &&
                      strstr(oo_error_message(), "oo_engine_stamp: unknown flags 0x"),
                  "stamp with bit %u: %s", bit, oo_error_message());
        if (flag != OO_NONBLOCKING)
            CHECK(oo_engine_distrust(w.engine,
                                     &(struct oo_fetched){.count = 1, .units = {w.unit[0]}},
                                     flag) == OO_E_ARGUMENT &&
                      !w.engine->units[w.unit[0]].stale &&
                      strstr(oo_error_message(), "oo_engine_distrust: unknown flags 0x"),
                  "distrust with bit %u: %s", bit, oo_error_message());
        CHECK(stats_of(&w).acquires == before.acquires &&
                  oo_plan_pins(w.engine->plan, w.unit[0]) == 1,
              "bit %u: done all the same", bit);
    }
    use_end(w.engine, &held, w.stream, "release");
    world_close(&w, "flags");
}

CASE(test_no_more_than_eight_copies_in_a_call) {
    struct world w;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    const struct oo_use use = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    need(oo_engine_release(w.engine, use.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    CHECK(fetched.count == OO_MAX_FETCHED && fetched.more, "%u fetched, more %d", fetched.count,
          fetched.more);
    for (uint32_t i = 0; i < fetched.count; i++)
        CHECK(fetched.units[i] == w.unit[i + 1], "unit %u fetched as number %u", fetched.units[i],
              i);
    unsigned rest = 0;
    while (fetched.more) {
        need(oo_engine_prefetch(w.engine, &fetched), "prefetch");
        rest += fetched.count;
    }
    CHECK(rest == UNITS - 1 - OO_MAX_FETCHED, "%u more", rest);
    world_close(&w, "fetched");
}

/* An acquire that also launches: the copy has arrived when it returns. A launch that fails ends the
 * use, because the caller could not stamp its copies. */
CASE(test_an_acquire_that_launches) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    need(acquire_launched(w.engine, w.member[2], w.stream, 0, OO_FORWARD, -1, 1e-6, 0, &held),
         "acquire");
    CHECK(memcmp((const void *)held.address, w.master[2], w.bytes[2]) == 0, "not there yet");
    use_end(w.engine, &held, w.stream, "release");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    fail_call("simLaunch", 1);
    CHECK(acquire_launched(w.engine, w.member[2], w.stream, 0, OO_FORWARD, -1, 1e-6, 0, &held) ==
              OO_E_DRIVER,
          "launched in spite of a fault");
    CHECK(strstr(oo_error_message(), "simLaunch"), "%s", oo_error_message());
    CHECK(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched) == OO_E_TICKET,
          "the use goes on");
    need(oo_member_remove(w.engine, w.member[3]), "remove");
    CHECK(oo_engine_launch(w.engine, w.member[3], w.stream, 0) == OO_E_STATE, "it is gone");
    const uint64_t before = stats_of(&w).stale;
    need(use(&w, 2, OO_FORWARD), "use");
    CHECK(stats_of(&w).stale == before + 1, "a copy that was never stamped is trusted");
    CHECK(acquire_launched(w.engine, 5000, w.stream, 0, OO_FORWARD, -1, 0, 0, &held) == OO_E_STATE,
          "no such member");
    world_close(&w, "launched");
}

/* The kernel that an acquire declares is queued on the stream that it was acquired for. */
CASE(test_what_an_acquire_launches_is_on_its_stream) {
    struct world w;
    struct oo_use held;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 400000, -1);
    need(use(&w, 2, OO_FORWARD), "copy");
    const uintptr_t stream = new_stream(&w);
    need(oo_trace_start(w.engine), "trace");
    need(acquire_launched(w.engine, w.member[2], stream, 0, OO_FORWARD, -1, 1e-3, 0, &held),
         "acquire");
    use_end(w.engine, &held, stream, "release");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    unsigned found = 0;
    for (size_t i = 0; i < count; i++)
        found += rows[i].kind == OO_TRACE_COMPUTE && rows[i].end_s - rows[i].start_s >= 1e-3;
    CHECK(found == 1, "%u kernels on the stream", found);
    oo_trace_free(rows);
    end_stream(&w, stream);
    world_close(&w, "launched on");
}

/* The copy is waited for, but the end of that wait could not be recorded: it is not waited for
 * again. */
CASE(test_a_wait_whose_end_could_not_be_measured_is_not_repeated) {
    struct world w;
    const uintptr_t stream = 0; /* the default one: it lasts */
    struct oo_use held;
    world_open_on_device(&w, 400000);
    need(use(&w, 0, OO_FORWARD), "use"); /* and copies ahead */
    need(oo_trace_start(w.engine), "trace");
    fail_call("cuEventRecord", 2); /* before, and after */
    CHECK(acquire(w.engine, w.member[1], stream, 0, OO_FORWARD, -1, 0, &held) == OO_E_DRIVER,
          "no error");
    const uint64_t waits = sim.simCallCount("cuStreamWaitEvent");
    held = use_acquire(w.engine, w.member[1], stream, "again");
    CHECK(sim.simCallCount("cuStreamWaitEvent") == waits && stats_of(&w).stale == 0,
          "waited for twice");
    use_end(w.engine, &held, stream, "release");
    end_timeline(w.engine);
    need(step(&w), "step");
    world_close(&w, "an end that failed");
}

/* A copy into the arena fails half-way: the unit is absent, and the next use copies it whole. */
CASE(test_a_failed_upload_leaves_the_unit_absent) {
    static const char *const calls[] = {"cuEventRecord", "cuMemcpyHtoDAsync", "cuStreamWaitEvent",
                                        "cuEventRecord", "cuEventRecord"};
    static const uint64_t nth[] = {1, 1, 1, 2, 3}; /* of the records: begin, ready, end */
    for (unsigned i = 0; i < sizeof nth / sizeof nth[0]; i++) {
        struct world w;
        struct oo_use use;
        world_open_on_device(&w, 60000);
        fail_call(calls[i], nth[i]);
        CHECK(try_acquire(&w, 0, 0, &use) == OO_E_DRIVER, "%s", calls[i]);
        CHECK(stats_of(&w).resident_units == (i == 2 ? 1u : 0u), "%s %u: resident", calls[i], i);
        need(step(&w), "the next step");
        world_close(&w, calls[i]);
    }
}

/* An acquire that fails behind its copy measures nothing, and its copy is not trusted. */
CASE(test_an_acquire_that_fails_behind_its_copy) {
    struct world w;
    struct oo_use held;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 30000, -1);
    steps(&w, 3, "step"); /* every event has been recorded before */
    finish();
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(oo_trace_start(w.engine), "trace");
    fail_call("cuEventRecord", 5); /* begin, ready, end, before, and after the wait */
    CHECK(acquire(w.engine, w.member[0], w.stream, 1, OO_FORWARD, -1, 0, &held) == OO_E_DRIVER,
          "no error");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    for (size_t i = 0; i < count; i++)
        CHECK(rows[i].kind == OO_TRACE_H2D, "a row of kind %d for what failed", (int)rows[i].kind);
    oo_trace_free(rows);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(use_on(&w, 1, OO_RECOMPUTE, 3, 1, w.stream), "use");
    fail_call("cuStreamWaitEvent", 1);
    CHECK(acquire(w.engine, w.member[0], w.stream, 1, OO_RECOMPUTE, 3, 0, &held) == OO_E_DRIVER,
          "no error");
    const uint64_t stale = stats_of(&w).stale;
    need(use_on(&w, 0, OO_BACKWARD, 3, 1, w.stream), "with the same stamp");
    CHECK(stats_of(&w).stale == stale + 1, "the copy was trusted");
    world_close(&w, "failed acquire");
}

/* The caller learns of copies by what acquire answers, and stamps their members. Where it fails
 * behind the copy, a rewrite that no sample sees must not be missed in the unit's other members. */
CASE(test_a_copy_that_nobody_was_told_of_is_not_trusted) {
    enum { BYTES = 1 << 16, UNSAMPLED = 100 };
    struct world w;
    world_open(&w, 4 * BYTES, -1);
    struct oo_host *host = locked_memory(w.engine, 2 * BYTES);
    char *master = oo_host_address(host);
    fill(master, 2 * BYTES, 5);
    const struct oo_tensor tensors[2] = {{.host = master, .bytes = BYTES},
                                         {.host = master + BYTES, .bytes = BYTES}};
    uint32_t members[2];
    size_t offsets[2];
    add_row(w.engine, w.model, tensors, 2, members, offsets);
    struct oo_use held;
    fail_call("cuStreamWaitEvent", 1);
    CHECK(acquire(w.engine, members[0], w.stream, 1, OO_FORWARD, -1, 0, &held) == OO_E_DRIVER,
          "no error");
    finish();
    master[BYTES + UNSAMPLED] ^= 1;
    need(acquire(w.engine, members[1], w.stream, 2, OO_FORWARD, -1, 0, &held), "acquire");
    need(oo_engine_launch(w.engine, members[1], w.stream, 1e-6), "launch");
    CHECK(memcmp((const char *)held.address + offsets[1], master + BYTES, BYTES) == 0,
          "the bytes from before the rewrite");
    use_end(w.engine, &held, w.stream, "release");
    need(world_remove(&w), "remove");
    need(oo_host_destroy(host), "destroy");
    world_close(&w, "untold copy");
}

/* An acquire of a copy that is there fails at the wait for it: the next one waits all the same, and
 * knows what was copied. */
CASE(test_a_wait_that_failed_is_waited_for_by_the_next_call) {
    struct world w;
    struct oo_use held;
    world_open_on_device(&w, 400000);
    need(use(&w, 0, OO_FORWARD), "use"); /* and copies ahead */
    const uintptr_t other = new_stream(&w);
    for (unsigned i = 1; i < 3; i++) {
        const uint64_t late = stats_of(&w).late, waits = stats_of(&w).waits;
        fail_call("cuStreamWaitEvent", 1);
        CHECK(acquire(w.engine, w.member[i], other, 5, OO_RECOMPUTE, 7, 0, &held) == OO_E_DRIVER,
              "no error");
        CHECK(stats_of(&w).late == late, "unit %u was not copied ahead", i);
        CHECK(stats_of(&w).waits == waits, "a wait that failed is counted");
        uint64_t stamp = 5;
        if (i == 2) { /* rewritten in between; in one task its samples are not looked at again */
            finish();
            sim.cuCtxPushCurrent_v2(w.context);
            CHECK(w.engine->driver.cuStreamSynchronize(w.engine->h2d) == 0, "not synchronised");
            sim.cuCtxPopCurrent_v2(NULL);
            fill(w.master[i], w.bytes[i], 99);
            stamp = 6;
        }
        need(use_on(&w, i, OO_RECOMPUTE, 7, stamp, other), "again");
        check_no_reports("a wait that failed");
    }
    end_stream(&w, other);
    world_close(&w, "a wait that failed");
}

CHECK_MAIN(world_prepare)
