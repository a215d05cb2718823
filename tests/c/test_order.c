/* The order of things: for each hazard of csrc/core/engine.c (H1 to H8) the calls that would race
 * if its wait were missing, on the wrong stream, or of the wrong event. The simulated driver's race
 * detector must stay silent. Arenas are device memory here, so that what a kernel did before the
 * engine got the bytes, and does after it gave them back, counts as well. */
#include "world.h"

#include <math.h>

static void for_each_schedule(void (*test)(const char *where)) {
    static const char *const names[] = {"timed", "random", "starve-copy", "starve-compute",
                                        "eager"};
    for (int schedule = SIM_TIMED; schedule <= SIM_EAGER; schedule++) {
        sim.simSetSchedule(schedule, 11);
        test(names[schedule]);
    }
}

/* ---- H1, H2: copies and kernels ---- */

/* Four steps, `samples`, and the first step after them. */
static void open_after_samples(struct world *w, int samples, const char *where) {
    world_open_on_device(w, 200000);
    steps(w, 4, where);
    for (int sample = 0; sample < samples; sample++)
        for (unsigned i = 0; i < UNITS; i++)
            need(use(w, i, OO_FORWARD), where);
    need(step(w), where);
}

/* Bytes of the third step. (Before a fifth, samples would be expected again.) */
static uint64_t bytes_after(int samples, const char *where) {
    struct world w;
    open_after_samples(&w, samples, where);
    need(step(&w), where);
    const uint64_t before = stats_of(&w).h2d_bytes;
    need(step(&w), where);
    const uint64_t bytes = stats_of(&w).h2d_bytes - before;
    world_close(&w, where);
    return bytes;
}

/* Units that leave when the second step begins, by a release with these flags. Copy threads may
 * still be writing to each, where `fed` is 1, and have been where it is 2. */
static uint64_t leave_after(int samples, int flags, int fed, struct oo_fetched *fetched,
                            const char *where) {
    struct world w;
    struct oo_feed feeds[UNITS] = {{0}};
    open_after_samples(&w, samples, where);
    const struct oo_use held = use_acquire(w.engine, w.member[0], w.stream, where);
    for (unsigned i = 0; fed && i < UNITS; i++) {
        w.engine->units[w.unit[i]].feed = &feeds[i];
        feeds[i].open = fed == 1;
    }
    const uint64_t before = stats_of(&w).evictions;
    empty_queue(w.engine);
    need(oo_engine_release(w.engine, held.ticket, w.stream, flags, fetched), where);
    const uint64_t left = stats_of(&w).evictions - before;
    for (unsigned i = 0; i < UNITS; i++)
        w.engine->units[w.unit[i]].feed = NULL;
    world_close(&w, where);
    return left;
}

/* A release that cannot reach the driver releases nothing: no call would wait for its last uses. */
static void without_a_context(const char *where) {
    struct world w;
    open_after_samples(&w, 20, where);
    const struct oo_use held = use_acquire(w.engine, w.member[0], w.stream, where);
    const uint64_t before = stats_of(&w).evictions;
    fail_call("cuCtxGetCurrent", 1);
    use_end(w.engine, &held, w.stream, where);
    CHECK(stats_of(&w).evictions == before, "%s: units leave without the driver", where);
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), where);
    world_close(&w, where);
}

/* After many samples, a unit in a place that belongs to another leaves, while kernels may still use
 * it; then a step moves what it would move without them. What may still be fed is left to a call
 * that may wait. */
static void training_after_many_samples(const char *where) {
    struct oo_fetched fetched;
    struct sim_device device;
    sim.simGetDevice(0, &device);
    const double link_gbps = device.link_gbps;
    device.link_gbps = 0.3; /* copies take as long as kernels: to be spread saves much */
    sim.simSetDevice(0, &device);
    CHECK(leave_after(0, 0, 0, &fetched, where) <= 2, "%s: units leave without samples", where);
    without_a_context(where);
    for (int flags = 0; flags <= OO_NONBLOCKING; flags += OO_NONBLOCKING)
        for (int fed = 0; fed < 3; fed++) {
            const uint64_t left = leave_after(20, flags, fed, &fetched, where);
            CHECK(flags && fed == 1 ? left == 0 && fetched.more : left >= 3,
                  "%s: %llu units leave, flags %d, fed %d", where, (unsigned long long)left, flags,
                  fed);
        }
    const uint64_t without = bytes_after(0, where), after = bytes_after(12, where);
    CHECK(after * 10 <= without * 11, "%s: %llu bytes in a step, %llu without samples", where,
          (unsigned long long)after, (unsigned long long)without);
    device.link_gbps = link_gbps;
    sim.simSetDevice(0, &device);
}

/* The legacy default stream, on which torch computes, orders nothing against non-blocking streams.
 */
static void steps_on_the_default_stream(const char *where) {
    struct world w;
    world_open_on_device(&w, 60000);
    const uintptr_t own = w.stream;
    w.stream = 0;
    steps(&w, 2, where);
    need(world_remove(&w), "remove");
    kernel(own, w.arena, 60000, 1, 1e-6); /* the segment's allocating stream */
    w.stream = own;
    world_close(&w, where);
}

/* Six streams use one unit at a time, two more than the engine keeps last uses of; then its place
 * is taken. */
static void more_streams_than_entries(const char *where) {
    enum { STREAMS = OO_STREAMS + 2 };
    struct world w;
    uintptr_t streams[STREAMS];
    world_open_on_device(&w, 30000);
    for (int s = 0; s < STREAMS; s++)
        streams[s] = new_stream(&w);
    for (int round = 0; round < 3; round++) {
        for (unsigned i = 0; i < UNITS; i++)
            for (int s = 0; s < STREAMS; s++)
                need(use_on(&w, i, OO_FORWARD, -1, 0, streams[s]), where);
    }
    CHECK(stats_of(&w).host_waits == 0, "%s: streams are ordered by waiting on the host", where);
    for (int s = 0; s < STREAMS; s++)
        end_stream(&w, streams[s]); /* drops none of their work */
    world_close(&w, where);
}

/* A stream that is ordered after a copy already waits for no event again; another one does. */
CASE(test_a_stream_that_lasts_waits_for_a_copy_once) {
    struct world w;
    uintptr_t compute;
    world_open_on_device(&w, 400000);
    need(oo_engine_compute_stream(w.engine, &compute), "compute stream");
    const uintptr_t lasting[] = {compute, 0, (uintptr_t)OOCU_STREAM_LEGACY};
    for (unsigned s = 0; s < CHECK_COUNT(lasting); s++) {
        for (int again = 0; again < 3; again++) {
            const uint64_t waits = sim.simCallCount("cuStreamWaitEvent");
            need(use_on(&w, 0, OO_FORWARD, -1, 0, lasting[s]), "use");
            CHECK(sim.simCallCount("cuStreamWaitEvent") - waits == !again,
                  "stream %u, use %d: %llu waits", s, again,
                  (unsigned long long)(sim.simCallCount("cuStreamWaitEvent") - waits));
        }
    }
    CHECK(stats_of(&w).waits == 1, "%llu streams were the first to wait for the copy",
          (unsigned long long)stats_of(&w).waits);
    world_close(&w, "waits");
}

/* More streams than the unit has marks for, each of which may be another by now: each waits every
 * time, nothing is overrun. */
CASE(test_more_streams_than_have_marks_wait_each_time) {
    enum { STREAMS = OO_STREAMS + 3 };
    struct world w;
    uintptr_t streams[STREAMS];
    world_open_on_device(&w, 400000);
    for (int s = 0; s < STREAMS; s++)
        streams[s] = new_stream(&w);
    for (int round = 0; round < 2; round++) {
        const uint64_t waits = sim.simCallCount("cuStreamWaitEvent");
        for (int s = 0; s < STREAMS; s++)
            need(use_on(&w, 0, OO_FORWARD, -1, 0, streams[s]), "use");
        const uint64_t made = sim.simCallCount("cuStreamWaitEvent") - waits;
        CHECK(w.engine->units[w.unit[0]].n_waited == 0, "%u streams remembered",
              w.engine->units[w.unit[0]].n_waited);
        /* Second round: all wait for the copy, and each use displaces an older one. */
        CHECK(round == 0 || made == 2 * STREAMS, "%llu waits", (unsigned long long)made);
    }
    for (int s = 0; s < STREAMS; s++)
        end_stream(&w, streams[s]);
    world_close(&w, "many streams");
}

/* ---- streams that have ended, and those that have their handles ---- */

static void a_kernel_on_a_stream_with_an_old_handle(const char *where) {
    struct world w;
    world_open_on_device(&w, 400000);
    uintptr_t stream = new_stream(&w);
    const struct oo_use first = use_acquire(w.engine, w.member[0], stream, where);
    use_end(w.engine, &first, stream, where);
    stream = recycle_stream(&w, stream);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, stream), where);
    end_stream(&w, stream);
    world_close(&w, where);
}

/* One use of unit 0 by a kernel of `seconds`. */
static void use_for(struct world *w, uintptr_t stream, double seconds) {
    struct oo_use use;
    need(acquire_launched(w->engine, w->member[0], stream, 0, OO_FORWARD, -1, seconds, 0, &use),
         "acquire");
    use_end(w->engine, &use, stream, "release");
}

static void a_copy_over_what_a_stream_that_has_ended_reads(const char *where) {
    struct world w;
    world_open_on_device(&w, 30000);
    uintptr_t stream = new_stream(&w);
    use_for(&w, stream, 1);
    stream = recycle_stream(&w, stream);
    use_for(&w, stream, 1e-6);
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), where);
    end_stream(&w, stream);
    world_close(&w, where);
}

/* The same while a wait of the new stream for the old one's use is refused: both are marked. */
static void a_refused_wait_for_a_stream_that_has_ended(const char *where) {
    struct world w;
    struct oo_use again;
    world_open_on_device(&w, 30000);
    uintptr_t stream = new_stream(&w);
    use_for(&w, stream, 1);
    stream = recycle_stream(&w, stream);
    need(acquire_launched(w.engine, w.member[0], stream, 0, OO_FORWARD, -1, 1e-6, 0, &again),
         where);
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_INVALID_HANDLE, 0);
    use_end(w.engine, &again, stream, where);
    CHECK(w.engine->units[w.unit[0]].n_uses == 2, "%u uses are marked",
          w.engine->units[w.unit[0]].n_uses);
    for (unsigned i = 1; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), where);
    end_stream(&w, stream);
    world_close(&w, where);
}

static void map_for(struct world *w, uintptr_t stream, double seconds) {
    const struct oo_request request = {
        .member = w->member[0], .stream = stream, .seconds = seconds};
    uintptr_t address;
    need(oo_engine_map(w->engine, &request, 0, &address), "map");
    need(oo_engine_unmap(w->engine, w->member[0], stream), "unmap");
}

static void masters_written_under_a_stream_that_has_ended(const char *where) {
    for (int refused = 0; refused < 2; refused++) {
        struct world w;
        world_open_on_device(&w, 60000);
        uintptr_t stream = new_stream(&w);
        map_for(&w, stream, 1);
        stream = recycle_stream(&w, stream);
        if (refused)
            sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_INVALID_HANDLE, 0);
        map_for(&w, stream, 1e-6);
        need(oo_engine_hold(w.engine), where);
        CHECK(sim.simHostAccess(w.master[0], w.bytes[0], 1) == 0, "refused");
        end_stream(&w, stream);
        world_close(&w, where);
    }
}

/* A long kernel on another stream still reads a unit when it is dropped (its master changed) and
 * when its bytes are given to another unit. */
static void dropped_while_a_kernel_reads(const char *where) {
    struct world w;
    world_open_on_device(&w, 30000);
    const uintptr_t slow = new_stream(&w);
    for (unsigned i = 0; i < UNITS; i++) {
        const struct oo_use use = use_begin(w.engine, w.member[i], slow, 5e-3, where);
        use_end(w.engine, &use, slow, where);
        if (i % 3 == 0)
            need(oo_engine_refresh(w.engine, w.model), where);
        need(use_on(&w, (i + 5) % UNITS, OO_FORWARD, -1, 0, w.stream), where);
    }
    end_stream(&w, slow);
    world_close(&w, where);
}

/* ---- H3: bytes that an earlier owner still uses ---- */

static void a_segment_from_a_busy_stream(const char *where) {
    struct world w;
    world_begin(&w);
    w.device_arena = 1;
    w.engine->driver.simAdopt = NULL;
    w.engine->driver.simDrop = NULL;
    w.stream = new_stream(&w);
    w.arena = device_memory(&w, 60000 + OO_ALIGNMENT);
    /* The caching allocator hands on what the last owner freed, in the order of the stream. */
    kernel(w.stream, w.arena, 60000 + OO_ALIGNMENT, 1, 3e-3);
    CHECK(world_attach(&w, 60000, -1), "%s: %s", where, oo_error_message());
    steps(&w, 3, where);
    world_close(&w, where);
}

/* A second segment while copies run, allocated on yet another stream. */
static void a_second_segment_from_another_stream(const char *where) {
    struct world w;
    world_open_on_device(&w, 30000);
    const uintptr_t other = new_stream(&w);
    need(step(&w), where);
    char *more = device_memory(&w, 40000);
    kernel(other, more, 40000, 1, 3e-3);
    need(oo_segment_add(w.engine, w.lease, (uintptr_t)more, 40000, other), where);
    steps(&w, 2, where);
    need(world_remove(&w), where);
    kernel(other, more, 40000, 1, 1e-6); /* its next owner, at once */
    kernel(w.stream, w.arena, 30000, 1, 1e-6);
    end_device_memory(&w, more);
    end_stream(&w, other);
    world_close(&w, where);
}

/* ---- H4, H7: bytes given back ---- */

/* Uses on several streams, then the model goes; the allocating stream's next kernel writes the
 * bytes. */
static void removed_after_uses_on_other_streams(const char *where) {
    struct world w;
    world_open_on_device(&w, 60000);
    uintptr_t others[3];
    for (int s = 0; s < 3; s++)
        others[s] = new_stream(&w);
    for (unsigned i = 0; i < 2 * UNITS; i++) {
        need(use_on(&w, i % UNITS, OO_FORWARD, -1, 0, others[i % 3]), where);
        need(use_on(&w, i % UNITS, OO_FORWARD, -1, 0, others[(i + 1) % 3]), where);
    }
    for (int s = 0; s < 3; s++) { /* still computing when the model goes */
        struct oo_use use;
        need(acquire(w.engine, w.member[UNITS - 1], others[s], 0, OO_FORWARD, -1, 0, &use), where);
        need(oo_engine_launch(w.engine, w.member[UNITS - 1], others[s], 2e-3), where);
        use_end(w.engine, &use, others[s], where);
    }
    need(world_remove(&w), where);
    kernel(w.stream, w.arena, 60000, 1, 1e-6);
    check_no_reports(where);
    /* The masters, too, are the host's again. */
    CHECK(sim.simHostAccess(oo_host_address(w.host), w.total, 1) == 0, "%s", where);
    for (int s = 0; s < 3; s++)
        end_stream(&w, others[s]);
    world_close(&w, where);
}

/* Removal waits for copies that no stream has waited for yet: the next owner's kernel comes on a
 * stream that the engine never saw. */
static void removed_with_copies_in_flight(const char *where) {
    struct world w;
    struct oo_fetched fetched;
    world_open_on_device(&w, 60000);
    need(use(&w, 0, OO_FORWARD), where);
    need(oo_engine_prefetch(w.engine, &fetched), where);
    need(oo_model_remove(w.engine, w.model), where);
    CHECK(sim.simHostAccess(oo_host_address(w.host), w.total, 1) == 0, "%s", where);
    w.attached = 0;
    need(world_remove(&w), where);
    kernel(w.stream, w.arena, 60000, 1, 1e-6);
    check_no_reports(where);
    world_close(&w, where);
}

/* Two models share two segments: one is removed while the other's units are in its segment. */
static void a_segment_goes_with_another_models_units(const char *where) {
    struct world w, b;
    world_open_on_device(&w, 50000);
    memset(&b, 0, sizeof b);
    world_sizes(&b);
    b.engine = w.engine;
    b.context = w.context;
    b.device_arena = 1;
    b.stream = new_stream(&b);
    CHECK(world_attach(&b, 50000, -1), "%s: %s", where, oo_error_message());
    for (unsigned i = 0; i < UNITS; i++) {
        need(use(&w, i, OO_FORWARD), where);
        need(use(&b, i, OO_FORWARD), where);
    }
    need(world_remove(&b), where);
    kernel(b.stream, b.arena, 50000, 1, 1e-6);
    need(step(&w), where);
    world_detach(&b);
    world_close(&w, where);
}

/* ---- H5, H8: the ring ---- */

/* More pieces than the ring has, of units of one piece and of several, none of which can be locked.
 */
static void through_the_ring(const char *where) {
    struct world w;
    sim.simRefuseRegistration(1);
    world_open_on_device(&w, 60000);
    CHECK(!oo_host_locked(w.host) && stats_of(&w).pageable_bytes == w.total, "%llu pageable bytes",
          (unsigned long long)stats_of(&w).pageable_bytes);
    steps(&w, 3, where);
    sim.simRefuseRegistration(0);
    world_close(&w, where);
}

/* One unit of nine pieces and a bit, in foreign memory that changes as soon as the call returns. */
static void a_large_unit(const char *where) {
    struct world w;
    const size_t bytes = 9 * oo__ring_piece_bytes + 12345;
    uint32_t member = 0;
    size_t offset;
    struct oo_use use;
    world_open_on_device(&w, 2 * bytes);
    char *foreign = malloc(bytes);
    for (int round = 0; round < 2; round++) {
        const struct oo_tensor tensor = {.host = foreign, .bytes = bytes};
        if (round == 0)
            add_unit(w.engine, w.model, &tensor, 1, &member, &offset);
        fill(foreign, bytes, 3 + (unsigned)round);
        need(acquire(w.engine, member, w.stream, (uint64_t)round + 1, OO_FORWARD, -1, 0, &use),
             where);
        memset(foreign, 0, bytes); /* all of it is behind the ring by now */
        need(oo_engine_launch(w.engine, member, w.stream, 1e-3), where);
        fill(foreign, bytes, 3 + (unsigned)round);
        CHECK(memcmp((const void *)use.address, foreign, bytes) == 0, "%s: wrong bytes", where);
        use_end(w.engine, &use, w.stream, where);
    }
    free(foreign);
    world_close(&w, where);
}

/* ---- H6, H8: gradients ---- */

/* A gradient is read right after the kernel that computes it, by the host right after the call
 * returns, and its buffer is written again at once. */
static void downloads_of(const char *where, size_t bytes, int locked) {
    struct world w;
    struct oo_host *host = NULL;
    world_open_on_device(&w, 60000);
    const uintptr_t other = new_stream(&w);
    char *gradients[2] = {device_memory(&w, bytes), device_memory(&w, bytes)}, *target;
    if (locked) {
        host = locked_memory(w.engine, bytes);
        target = oo_host_address(host);
    } else {
        target = malloc(bytes);
    }
    for (unsigned i = 0; i < 4; i++) {
        const uintptr_t stream = i % 2 ? other : w.stream;
        char *gradient = gradients[i % 2];
        const struct oo_stats before = stats_of(&w);
        kernel(stream, gradient, bytes, 1, 1e-3);
        fill(gradient, bytes, i);
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, bytes, stream), where);
        CHECK(sim.simHostAccess(target, bytes, 0) == 0, "%s", where);
        fill(gradient, bytes, i);
        CHECK(memcmp(gradient, target, bytes) == 0, "%s: %zu bytes arrived wrong", where, bytes);
        kernel(stream, gradient, bytes, 1, 1e-6);
        const struct oo_stats after = stats_of(&w);
        CHECK(after.d2h_bytes - before.d2h_bytes == bytes &&
                  after.d2h_copies - before.d2h_copies == 1,
              "%s: counted wrong", where);
        CHECK(after.host_waits > before.host_waits, "%s: a wait was not counted", where);
    }
    if (locked) {
        end_memory(w.engine, host);
    } else {
        free(target);
    }
    end_device_memory(&w, gradients[0]);
    end_device_memory(&w, gradients[1]);
    end_stream(&w, other);
    world_close(&w, where);
}

static void downloads_to_locked_memory(const char *where) { downloads_of(where, 20000, 1); }
enum { RING_DOWNLOAD_BYTES = (20 << 20) + 77 };

/* What a download costs, by events on the device: exactly its copy, however busy the streams are.
 */
CASE(test_a_download_is_measured_exactly) {
    sim.simSetSchedule(SIM_TIMED, 0);
    struct world w;
    struct sim_device device;
    const size_t bytes = 1000000;
    world_open_on_device(&w, 60000);
    sim.simGetDevice(0, &device);
    char *gradient = device_memory(&w, bytes);
    struct oo_host *host = locked_memory(w.engine, bytes);
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 4e-3); /* a busy upload stream has no part in it */
    const double begin = sim.simNow();
    kernel(w.stream, gradient, bytes, 1, 1e-3);
    need(oo_engine_download(w.engine, oo_host_address(host), (uintptr_t)gradient, bytes, w.stream),
         "download");
    const struct oo_stats stats = stats_of(&w);
    const double copy = device.copy_latency_s + (double)bytes / (device.link_gbps * 1e9);
    const double waited = sim.simNow() - begin;
    CHECK(fabs(stats.d2h_seconds - copy) < 1e-9, "a copy of %.9f s measured as %.9f", copy,
          stats.d2h_seconds);
    CHECK(stats.d2h_timed_bytes == bytes, "%llu bytes timed",
          (unsigned long long)stats.d2h_timed_bytes);
    /* Kernels share the compute engine: the first one ends before ours begins. */
    CHECK(fabs(waited - (5e-3 + copy)) < 1e-9, "the host waited %.9f s, not %.9f", waited,
          5e-3 + copy);
    end_memory(w.engine, host);
    end_device_memory(&w, gradient);
    world_close(&w, "measured download");
}

/* ---- H7: memory that is unlocked ---- */

/* Memory locked for downloads is given back right after one. */
static void unlocked_right_after_a_download(const char *where) {
    struct world w;
    world_open_on_device(&w, 60000);
    char *gradient = device_memory(&w, 9000);
    struct oo_host *host = locked_memory(w.engine, 9000);
    kernel(w.stream, gradient, 9000, 1, 1e-3);
    /* A download that was not waited for: as after a failure in between. */
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(w.engine->driver.cuMemcpyDtoHAsync(oo_host_address(host), (uintptr_t)gradient, 9000,
                                             w.engine->d2h) == 0,
          "%s: no copy", where);
    sim.cuCtxPopCurrent_v2(NULL);
    sim.simReportsClear(); /* that copy was ordered after no kernel */
    end_memory(w.engine, host);
    end_device_memory(&w, gradient);
    world_close(&w, where);
}

CASE(training_after_many_samples_on_every_schedule) {
    for_each_schedule(training_after_many_samples);
}
CASE(steps_on_the_default_stream_on_every_schedule) {
    for_each_schedule(steps_on_the_default_stream);
}
CASE(more_streams_than_entries_on_every_schedule) { for_each_schedule(more_streams_than_entries); }
CASE(a_kernel_on_a_stream_with_an_old_handle_on_every_schedule) {
    for_each_schedule(a_kernel_on_a_stream_with_an_old_handle);
}
CASE(a_copy_over_what_a_stream_that_has_ended_reads_on_every_schedule) {
    for_each_schedule(a_copy_over_what_a_stream_that_has_ended_reads);
}
CASE(a_refused_wait_for_a_stream_that_has_ended_on_every_schedule) {
    for_each_schedule(a_refused_wait_for_a_stream_that_has_ended);
}
CASE(masters_written_under_a_stream_that_has_ended_on_every_schedule) {
    for_each_schedule(masters_written_under_a_stream_that_has_ended);
}
CASE(dropped_while_a_kernel_reads_on_every_schedule) {
    for_each_schedule(dropped_while_a_kernel_reads);
}
CASE(a_segment_from_a_busy_stream_on_every_schedule) {
    for_each_schedule(a_segment_from_a_busy_stream);
}
CASE(a_second_segment_from_another_stream_on_every_schedule) {
    for_each_schedule(a_second_segment_from_another_stream);
}
CASE(removed_after_uses_on_other_streams_on_every_schedule) {
    for_each_schedule(removed_after_uses_on_other_streams);
}
CASE(removed_with_copies_in_flight_on_every_schedule) {
    for_each_schedule(removed_with_copies_in_flight);
}
CASE(a_segment_goes_with_another_models_units_on_every_schedule) {
    for_each_schedule(a_segment_goes_with_another_models_units);
}
CASE(through_the_ring_on_every_schedule) { for_each_schedule(through_the_ring); }
CASE(a_large_unit_through_the_ring) {
    a_large_unit("timed");
    sim.simSetSchedule(SIM_STARVE_COPY, 0);
    a_large_unit("starve-copy");
}
CASE(downloads_to_locked_memory_on_every_schedule) {
    for_each_schedule(downloads_to_locked_memory);
}
CASE(downloads_through_the_ring) {
    downloads_of("timed", RING_DOWNLOAD_BYTES, 0);
    sim.simSetSchedule(SIM_STARVE_COPY, 0);
    downloads_of("starve-copy", RING_DOWNLOAD_BYTES, 0);
}
CASE(unlocked_right_after_a_download_on_every_schedule) {
    for_each_schedule(unlocked_right_after_a_download);
}

CHECK_MAIN(world_prepare)
