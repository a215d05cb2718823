/* The timeline: which rows it has, where it begins, and what a fault leaves of it. */
#include "world.h"

#include <math.h>

/* The compute rows of the unit, in order of their ends, against `expected` pairs of start and end.
 */
static void check_compute_rows(struct world *w, uint32_t unit, const double (*expected)[2],
                               unsigned n_expected) {
    struct oo_trace_row *rows;
    size_t count;
    unsigned seen = 0;
    need(oo_trace_stop(w->engine, &rows, &count), "stop");
    for (size_t i = 0; i < count; i++) {
        if (rows[i].kind != OO_TRACE_COMPUTE || rows[i].unit != unit)
            continue;
        CHECK(seen < n_expected && fabs(rows[i].start_s - expected[seen][0]) < 1e-9 &&
                  fabs(rows[i].end_s - expected[seen][1]) < 1e-9,
              "compute row %u of %u: %.9f to %.9f", seen, n_expected, rows[i].start_s,
              rows[i].end_s);
        seen++;
    }
    CHECK(seen == n_expected, "%u rows, not %u", seen, n_expected);
    oo_trace_free(rows);
}

/* Streams that share a unit have a row each, from where they begin with it to where they end. */
CASE(test_each_stream_has_its_own_row_of_a_unit_in_the_timeline) {
    struct world w;
    world_open(&w, 200000, -1); /* all is resident: no copy is in the way */
    const uintptr_t a = new_stream(&w), b = new_stream(&w);
    need(step(&w), "step");
    for (int i = 0; i < 2; i++) { /* no stream waits for the copy any more */
        const struct oo_use use = use_begin(w.engine, w.member[0], i ? a : b, 0.0, "use");
        use_end(w.engine, &use, i ? a : b, "release");
    }
    finish();
    need(oo_trace_start(w.engine), "trace");
    kernel(b, NULL, 0, 0, 50e-6);
    const struct oo_use on_a =
        use_begin(w.engine, w.member[0], a, 300e-6, "use"); /* kernels take turns: 50 to 350 us */
    const struct oo_use on_b =
        use_begin(w.engine, w.member[0], b, 100e-6, "use"); /* 350 to 450 us */
    const struct oo_use nested =
        use_begin(w.engine, w.member[0], a, 20e-6, "use"); /* 450 to 470 us, queued at 350 us */
    use_end(w.engine, &on_b, b, "release");
    use_end(w.engine, &on_a, a, "release");
    use_end(w.engine, &nested, a, "release");
    const double first[][2] = {{50e-6, 450e-6}, {0, 470e-6}, {350e-6, 470e-6}};
    check_compute_rows(&w, w.unit[0], first, 3);

    /* A use that ends on another stream has no row; nor has one that began in an earlier timeline.
     * More than four at a time: the fifth has none. */
    finish();
    need(oo_trace_start(w.engine), "trace again");
    const struct oo_use crossing = use_begin(w.engine, w.member[0], a, 10e-6, "use");
    use_end(w.engine, &crossing, b, "release");
    const struct oo_use lasting = use_begin(w.engine, w.member[0], a, 10e-6, "use");
    check_compute_rows(&w, w.unit[0], NULL, 0);
    finish();
    need(oo_trace_start(w.engine), "a third time");
    use_end(w.engine, &lasting, a, "release");
    struct oo_use uses[5];
    for (int i = 0; i < 5; i++)
        uses[i] = use_begin(w.engine, w.member[0], b, 10e-6, "use");
    for (int i = 0; i < 5; i++)
        use_end(w.engine, &uses[i], b, "release");
    const double third[][2] = {{0, 50e-6}, {10e-6, 50e-6}, {20e-6, 50e-6}, {30e-6, 50e-6}};
    finish();
    check_compute_rows(&w, w.unit[0], third, 4);

    /* An acquire whose row cannot begin fails, and leaves none behind. */
    struct oo_use none;
    sim.simAdvance(1e-3); /* what any event recorded before now would be seen by */
    need(oo_trace_start(w.engine), "a fourth time");
    fail_call("cuEventRecord", 1);
    CHECK(acquire(w.engine, w.member[0], a, 0, OO_FORWARD, -1, 0, &none) == OO_E_DRIVER,
          "acquired without its row's begin");
    const struct oo_use alone = use_begin(w.engine, w.member[0], a, 10e-6, "use");
    use_end(w.engine, &alone, a, "release");
    const double fourth[][2] = {{0, 10e-6}};
    check_compute_rows(&w, w.unit[0], fourth, 1);
    end_stream(&w, a);
    end_stream(&w, b);
    world_close(&w, "rows of a shared unit");
}

/* Starting and stopping may fail, and can be repeated. */
CASE(test_a_timeline_that_fails_can_be_repeated) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    fail_call("cuEventRecord", 1);
    CHECK(oo_trace_start(w.engine) == OO_E_DRIVER && !w.engine->spans.tracing,
          "started all the same");
    need(oo_trace_start(w.engine), "start again");
    need(step(&w), "step");
    const uint64_t waits = stats_of(&w).host_waits;
    fail_call("cuEventSynchronize", 1);
    CHECK(oo_trace_stop(w.engine, &rows, &count) == OO_E_DRIVER && !rows && count == 0, "no error");
    CHECK(stats_of(&w).host_waits == waits + 1, "%llu waits",
          (unsigned long long)(stats_of(&w).host_waits - waits));
    need(oo_trace_stop(w.engine, &rows, &count), "stop again");
    CHECK(count >= 3 * UNITS, "%zu rows", count);
    oo_trace_free(rows);
    w.engine->driver.cuEventElapsedTime = NULL;
    CHECK(oo_trace_start(w.engine) == OO_E_DRIVER_OLD, "a driver that measures no time");
    need(step(&w), "unmeasured");
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.h2d_timed_bytes <= stats.h2d_bytes, "timed");
    world_close(&w, "repeated timeline");
}

/* The timeline begins where the upload stream is, not where a busy stream of another kind is. */
CASE(test_a_timeline_begins_on_the_upload_stream) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    kernel((uintptr_t)w.engine->compute, NULL, 0, 0, 2e-3);
    kernel((uintptr_t)w.engine->d2h, NULL, 0, 0, 2e-3);
    need(oo_trace_start(w.engine), "trace");
    CHECK(oo_trace_start(w.engine) == OO_E_STATE, "two timelines at once");
    const uintptr_t idle = new_stream(&w);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, idle), "use");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(rows[i].start_s >= 0, "a row before the origin: %.9f", rows[i].start_s);
        found += rows[i].kind == OO_TRACE_H2D && rows[i].unit == w.unit[0] &&
                 fabs(rows[i].start_s) < 1e-9;
    }
    CHECK(found == 1, "the first copy does not start at the origin");
    oo_trace_free(rows);
    end_stream(&w, idle);
    world_close(&w, "origin");
}

/* Where copies are queued, the timeline begins once they have ended, and not before its call has
 * returned: the rows' times are since then. */
CASE(test_a_timeline_begins_when_its_call_returns) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    const uintptr_t idle = new_stream(&w);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, idle), "its copy is under way");
    const uint64_t waits = stats_of(&w).host_waits;
    need(oo_trace_start(w.engine), "trace");
    CHECK(stats_of(&w).host_waits == waits + 1, "not counted");
    const double zero_s = sim.simNow();
    kernel(idle, NULL, 0, 0, 1e-3);
    const struct oo_use timed = use_begin(w.engine, w.member[0], idle, 2e-3, "use");
    use_end(w.engine, &timed, idle, "release");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(rows[i].start_s >= 0, "a row before the origin: %.9f", rows[i].start_s);
        if (rows[i].kind == OO_TRACE_COMPUTE && rows[i].unit == w.unit[0]) {
            found++;
            CHECK(fabs(zero_s + rows[i].end_s - sim.simNow()) < 1e-9, "ends at %.9f, not %.9f",
                  zero_s + rows[i].end_s, sim.simNow());
        }
    }
    CHECK(found == 1, "%d rows", found);
    oo_trace_free(rows);
    need(use_on(&w, 5, OO_FORWARD, -1, 0, idle), "a copy is under way again");
    fail_call("cuEventSynchronize", 1);
    CHECK(oo_trace_start(w.engine) == OO_E_DRIVER && !w.engine->spans.tracing &&
              !w.engine->spans.origin,
          "started, although its beginning is unknown");
    sim.simFaultClear();
    need(oo_trace_start(w.engine), "start again");
    end_timeline(w.engine);
    end_stream(&w, idle);
    world_close(&w, "begin of a timeline");
}

/* A driver that says "not ready" of an event it has waited for: the timeline is not cut short. */
CASE(test_a_timeline_that_cannot_be_read_is_an_error) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 30000, -1);
    need(oo_trace_start(w.engine), "trace");
    need(step(&w), "step");
    sim.simFault("cuEventElapsedTime", 1, OOCU_ERROR_NOT_READY, 1);
    ANSWERS(OO_E_DRIVER, "cuEventElapsedTime", oo_trace_stop(w.engine, &rows, &count));
    sim.simFaultClear();
    need(step(&w), "step");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    CHECK(count > 3 * UNITS, "%zu rows", count);
    oo_trace_free(rows);
    world_close(&w, "timeline");
}

/* A hit in a backward, whose copy the stream has waited for already: the timeline alone would
 * record more. */
CASE(test_a_hit_records_no_event_without_a_timeline) {
    struct world w;
    struct oo_use held;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_FORWARD), "copy");
    const uint64_t records = sim.simCallCount("cuEventRecord");
    need(acquire(w.engine, w.member[3], w.stream, 0, OO_BACKWARD, 1, 0, &held), "hit");
    CHECK(sim.simCallCount("cuEventRecord") == records, "%llu records",
          (unsigned long long)(sim.simCallCount("cuEventRecord") - records));
    use_end(w.engine, &held, w.stream, "release");
    world_close(&w, "hit");
}

CHECK_MAIN(world_prepare)
