/* What the plan learns: seconds of forwards, and the speed of the link; a step that it bounds. */
#include "timing.h"
#include "weights.h"
#include "world.h"

#include <math.h>

static double seconds_of(unsigned i) { return (double)(i + 1) * 10e-6; }

static double idle_s; /* at most, between a sweep's last kernel and the end of its copies */

static void sweep(struct world *w, enum oo_kind kind, int64_t task) {
    for (unsigned i = 0; i < UNITS; i++) {
        struct oo_use use;
        need(acquire_launched(w->engine, w->member[i], w->stream, 0, kind, task, seconds_of(i), 0,
                              &use),
             "acquire");
        use_end(w->engine, &use, w->stream, "release");
    }
    sim.cuCtxPushCurrent_v2(w->context);
    w->engine->driver.cuStreamSynchronize((OOCUstream)w->stream);
    sim.cuCtxPopCurrent_v2(NULL);
    const double computed_s = sim.simNow();
    double end_s;
    sim.simFinish(&end_s);
    idle_s = fmax(idle_s, end_s - computed_s);
}

/* Whatever has ended is read: by a thread whose context is current, or no time can be. */
static void harvest(struct world *w) {
    sim.cuCtxPushCurrent_v2(w->context);
    oo__spans_harvest(w->engine);
    sim.cuCtxPopCurrent_v2(NULL);
}

/* A sweep's last unit is measured until the next sweep begins: the device has nothing left to do by
 * then, copies for that sweep have ended, and the host may ask a few times, each a microsecond,
 * whether one has. */
static unsigned known(const struct world *w) {
    unsigned count = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        const double seconds = oo_plan_seconds(w->engine->plan, w->unit[i]);
        const double asked_s = i + 1 == UNITS ? idle_s + 5e-6 : 0;
        CHECK(seconds <= 0 ||
                  (seconds > seconds_of(i) - 1e-9 && seconds < seconds_of(i) + asked_s + 1e-9),
              "unit %u takes %.9f s", i, seconds);
        count += seconds > 0;
    }
    return count;
}

/* Waits for copies are left out: most units are streamed here. The first sweep is not measured, as
 * it pays for more than its kernels. */
CASE(test_seconds_of_forwards_are_learned) {
    struct world w;
    struct sim_device device;
    world_open(&w, 60000, -1);
    sim.simGetDevice(0, &device);
    sweep(&w, OO_FORWARD, -1);
    harvest(&w);
    CHECK(known(&w) == 0, "%u known after the first sweep", known(&w));
    for (int i = 0; i < 8; i++)
        sweep(&w, OO_FORWARD, -1);
    harvest(&w);
    CHECK(known(&w) == UNITS, "%u of %d known", known(&w), (int)UNITS);
    const double bps = oo_plan_link_bps(w.engine->plan);
    CHECK(bps > 0 && bps <= device.link_gbps * 1e9, "%.3g bytes a second", bps);
    world_close(&w, "forwards");
}

/* Of two units, one after the other; the second one's copy comes late. */
CASE(test_a_wait_for_a_copy_is_nobodys_time) {
    struct world w;
    double end_s;
    world_open(&w, 400000, -1);
    need(use(&w, 4, OO_FORWARD), "use");
    for (int i = 0; i < 2; i++)
        need(use(&w, 3, OO_FORWARD), "use");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 1e-3);
    need(use(&w, 4, OO_FORWARD), "use");
    need(use(&w, 5, OO_FORWARD), "use");
    sim.simFinish(&end_s);
    harvest(&w);
    CHECK(end_s > 1e-3, "nothing was late");
    for (unsigned i = 3; i < 5; i++) {
        const double seconds = oo_plan_seconds(w.engine->plan, w.unit[i]);
        CHECK(seconds > 15e-6 && seconds < 100e-6, "unit %u takes %.9f s", i, seconds);
    }
    world_close(&w, "waits");
}

CASE(test_a_backward_tells_nothing) {
    struct world w;
    world_open(&w, 60000, -1);
    for (int i = 0; i < 4; i++)
        sweep(&w, OO_BACKWARD, i);
    harvest(&w);
    CHECK(known(&w) == 0, "%u known", known(&w));
    world_close(&w, "backwards");
}

/* What begins on one stream does not end on another, nor under a timeline: it would be a row. */
CASE(test_a_measurement_is_given_up_where_it_cannot_end) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 400000, -1);
    for (int i = 0; i < 2; i++)
        need(use(&w, 3, OO_FORWARD), "use");
    CHECK(w.engine->pace.begin != NULL, "nothing is measured");
    need(oo_trace_start(w.engine), "trace");
    need(use(&w, 4, OO_FORWARD), "use");
    CHECK(w.engine->pace.begin == NULL, "it goes on under a timeline");
    need(use(&w, 4, OO_FORWARD), "use");
    CHECK(w.engine->pace.begin == NULL, "it begins under a timeline");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    for (size_t i = 0; i < count; i++)
        CHECK(rows[i].kind != OO_TRACE_COMPUTE || rows[i].unit == w.unit[4], "a row of unit %u",
              rows[i].unit);
    oo_trace_free(rows);
    need(use(&w, 3, OO_FORWARD), "use");
    CHECK(w.engine->pace.begin != NULL, "nothing is measured");
    const uintptr_t stream = w.stream;
    w.stream = (uintptr_t)w.engine->d2h;
    kernel(w.stream, NULL, 0, 0, 1e-3); /* so that it would end there later than it began */
    need(use(&w, 4, OO_BACKWARD), "use");
    w.stream = stream;
    CHECK(w.engine->pace.begin == NULL, "it goes on, on another stream");
    finish();
    harvest(&w);
    CHECK(oo_plan_seconds(w.engine->plan, w.unit[3]) <= 0, "%.9f s",
          oo_plan_seconds(w.engine->plan, w.unit[3]));
    world_close(&w, "given up");
}

/* However late a measurement ends, one of each unit is enough until all have one, and a few are
 * after that; one that was given up is none. */
CASE(test_each_unit_is_measured_a_few_times) {
    struct world w;
    unsigned measured[UNITS] = {0};
    world_open(&w, 400000, -1);
    for (int late = 1; late >= 0; late--) {
        sim.simHold((OOCUstream)w.stream, late);
        for (int round = 0; round < (late ? 4 : 6); round++) {
            for (unsigned i = 0; i < 6; i++) {
                const struct oo_use use = use_acquire(w.engine, w.member[i], w.stream, "use");
                use_end(w.engine, &use, w.stream, "release");
                if (late && round == 2 && i == 3)
                    oo__pace_forget(w.engine);
            }
        }
        for (uint64_t i = w.engine->spans.head; i != w.engine->spans.tail; i++)
            if (oo__span_at(&w.engine->spans, i)->kind == OO_TRACE_COMPUTE)
                measured[oo__span_at(&w.engine->spans, i)->unit]++;
        for (unsigned i = 0; i < 6; i++)
            CHECK(measured[i] == (late ? 1 : 4), "unit %u is measured %u times", i, measured[i]);
        sim.simHold((OOCUstream)w.stream, 0);
        finish();
        harvest(&w);
    }
    world_close(&w, "a few times");
}

/* A span whose end waits for all that is queued on the stream. */
static void add_span(struct world *w) {
    struct oo_event *ends[2];
    for (int i = 0; i < 2; i++) {
        need(oo__event_take(w->engine, OO_TIMED, &ends[i]), "event");
        w->engine->driver.cuEventRecord(ends[i]->handle, (OOCUstream)w->stream);
    }
    oo__span_add(w->engine, OO_TRACE_COMPUTE, w->unit[0], 0, ends[0], ends[1]);
}

/* The plan learns even when no caller asks for figures. */
CASE(test_spans_that_have_ended_are_read_soon) {
    struct world w;
    world_open(&w, 400000, -1);
    const struct oo_spans *spans = &w.engine->spans;
    for (unsigned i = 0; i < 5 * OO_VISITS_READ; i++) {
        need(use(&w, i % UNITS, OO_FORWARD), "use");
        finish();
        CHECK(spans->tail - spans->head <= OO_VISITS_READ, "%llu spans are left",
              (unsigned long long)(spans->tail - spans->head));
    }
    for (unsigned i = 0; i < UNITS; i++)
        CHECK(oo_plan_seconds(w.engine->plan, w.unit[i]) > 0, "of unit %u nothing is known", i);
    world_close(&w, "read");
}

/* What has not ended when it is asked costs a call: with room enough no call asks, and without it
 * one in so many does. */
CASE(test_spans_are_seldom_asked_whether_they_have_ended) {
    enum { TURNS = 4 * OO_SAMPLED_ONE_IN };
    struct world w;
    world_open(&w, 400000, -1);
    const struct oo_spans *spans = &w.engine->spans;
    for (int i = 0; i < 2; i++)
        need(use(&w, 0, OO_FORWARD), "use");
    CHECK(w.engine->pace.begin != NULL, "nothing is measured");
    oo__pace_forget(w.engine);
    finish();
    harvest(&w);
    CHECK(spans->head == spans->tail, "spans are left");
    sim.cuCtxPushCurrent_v2(w.context);
    kernel(w.stream, NULL, 0, 0, 1);
    for (int full = 0; full < 2; full++) {
        do
            add_span(&w);
        while (full && spans->tail - spans->head < OO_SPANS / 2);
        const uint64_t before = sim.simCallCount("cuEventElapsedTime");
        for (int i = 0; i < TURNS; i++) {
            need(oo__pace_begin(w.engine, w.unit[0], (OOCUstream)w.stream), "begin");
            CHECK((w.engine->pace.begin == NULL) == full, "full %d: turn %d", full, i);
            oo__pace_forget(w.engine);
        }
        const uint64_t asked = sim.simCallCount("cuEventElapsedTime") - before;
        CHECK(full ? asked > 0 && asked <= TURNS / 8 : asked == 0, "full %d: %llu calls", full,
              (unsigned long long)asked);
    }
    sim.cuCtxPopCurrent_v2(NULL);
    finish();
    world_close(&w, "asked");
}

/* What a run has learned, passed to the next: it counts until it is measured, which is not in a
 * first forward of this run. */
CASE(test_an_earlier_runs_seconds_count_until_they_are_measured) {
    struct world w;
    struct oo_visit visits[UNITS];
    struct oo_unit_pace told[UNITS], rows[UNITS + 1];
    size_t count;
    uint64_t link_bps;
    world_open(&w, 60000, -1);
    for (unsigned i = 0; i < UNITS; i++) {
        visits[i] = (struct oo_visit){w.unit[i], OO_FORWARD};
        told[i] = (struct oo_unit_pace){w.unit[i], 1000000 + i};
    }
    need(oo_engine_expect(w.engine, visits, UNITS), "expect");
    need(oo_engine_expect_pace(w.engine, told, UNITS - 1, 3000000000u), "expect pace");
    sweep(&w, OO_FORWARD, -1);
    memset(rows, 0x55, sizeof rows);
    need(oo_engine_pace(w.engine, w.model, rows, 2, &count, &link_bps), "pace");
    CHECK(count == UNITS - 1, "%zu known", count);
    for (unsigned i = 0; i < 2; i++)
        CHECK(rows[i].unit == told[i].unit && rows[i].nanoseconds == told[i].nanoseconds,
              "unit %u: %llu ns", rows[i].unit, (unsigned long long)rows[i].nanoseconds);
    CHECK(rows[2].unit == 0x55555555u, "more rows than there is room for");
    for (int i = 0; i < 4; i++)
        sweep(&w, OO_FORWARD, -1);
    need(oo_engine_pace(w.engine, w.model, rows, UNITS + 1, &count, &link_bps), "pace");
    CHECK(count == UNITS && known(&w) == UNITS, "%zu known", count);
    for (unsigned i = 0; i < UNITS; i++)
        CHECK(rows[i].unit == w.unit[i] && fabs((double)rows[i].nanoseconds * 1e-9 -
                                                oo_plan_seconds(w.engine->plan, w.unit[i])) < 1e-9,
              "unit %u: %llu ns", rows[i].unit, (unsigned long long)rows[i].nanoseconds);
    need(oo_engine_expect_pace(w.engine, told, UNITS, 1), "expect pace");
    CHECK(known(&w) == UNITS && oo_plan_link_bps(w.engine->plan) > 1e6,
          "what was measured is forgotten");
    uint32_t other;
    need(oo_model_add(w.engine, &other), "model");
    need(oo_engine_pace(w.engine, other, rows, UNITS, &count, &link_bps), "pace");
    CHECK(count == 0, "another model has %zu", count);
    need(oo_model_remove(w.engine, other), "remove");
    world_close(&w, "an earlier run's");
}

/* It weighs as one copy: what is measured counts for more soon. */
CASE(test_the_link_of_an_earlier_run_is_forgotten) {
    struct world w;
    uint64_t link_bps;
    size_t count;
    world_open(&w, 60000, -1);
    const size_t bytes = w.total / UNITS;
    need(oo_engine_expect_pace(w.engine, NULL, 0, 0), "expect nothing");
    need(oo_engine_pace(w.engine, w.model, NULL, 0, &count, &link_bps), "pace");
    CHECK(link_bps == 0 && count == 0, "%llu B/s", (unsigned long long)link_bps);
    need(oo_engine_expect_pace(w.engine, NULL, 0, 1000000000000u), "expect");
    need(oo_engine_pace(w.engine, w.model, NULL, 0, &count, &link_bps), "pace");
    CHECK(llabs((long long)link_bps - 1000000000000) < 1000, "%llu B/s",
          (unsigned long long)link_bps);
    for (int i = 0; i < 8; i++)
        oo_plan_copied(w.engine->plan, 0, bytes, (double)bytes / 1e9);
    need(oo_engine_pace(w.engine, w.model, NULL, 0, &count, &link_bps), "pace");
    CHECK(link_bps > 1000000000 && link_bps < 1200000000, "%llu B/s", (unsigned long long)link_bps);
    world_close(&w, "the link");
}

CASE(test_seconds_of_no_unit_are_refused) {
    struct world w;
    size_t count;
    uint64_t link_bps;
    world_open(&w, 60000, -1);
    static const uint32_t strangers[] = {UNITS, UINT32_MAX};
    for (int i = 0; i < 3; i++) {
        if (i == 2)
            need(oo_member_remove(w.engine, w.member[3]), "remove");
        const struct oo_unit_pace rows[] = {{w.unit[0], 1000},
                                            {i < 2 ? strangers[i] : w.unit[3], 1000}};
        CHECK(oo_engine_expect_pace(w.engine, rows, 2, 1000) == OO_E_ARGUMENT, "case %d", i);
        need(oo_engine_pace(w.engine, w.model, NULL, 0, &count, &link_bps), "pace");
        CHECK(count == 0 && link_bps == 0, "a part of what was refused is expected");
    }
    const struct oo_unit_pace last = {w.unit[4], 1000};
    need(oo_engine_expect_pace(w.engine, &last, 1, 1000), "expect");
    need(oo_member_remove(w.engine, w.member[4]), "remove");
    need(oo_engine_pace(w.engine, w.model, NULL, 0, &count, &link_bps), "pace");
    CHECK(count == 0, "%zu of what is gone", count);
    world_close(&w, "refused");
}

enum { MANY = OO_CODEC_CHUNK, UNITS_TIMED = 8 };

/* The virtual time of a forward over weights of bf16, of which the arena holds three eighths, once
 * their order is known; `plain` and `master` have room for all of them. Kernels take `kernel_s`. */
static double forward_s(int coded, double kernel_s, const char *plain, char *staging) {
    const size_t bytes = 2 * (size_t)MANY, room = bytes + 4096, arena_bytes = 3 * bytes;
    struct oo_engine *engine;
    uint32_t lease, model, members[UNITS_TIMED];
    uintptr_t stream;
    double begin_s = 0, end_s = 0;
    char *arena = malloc(arena_bytes + 256);
    need(oo_engine_create(sim.path, 0, &engine), "create");
    struct oo_host *host = locked_memory(engine, UNITS_TIMED * room);
    need(oo_engine_compute_stream(engine, &stream), "stream");
    need(oo_lease_add(engine, &lease), "lease");
    need(oo_segment_add(engine, lease, (uintptr_t)arena, arena_bytes + 256, stream), "segment");
    need(oo_staging_add(engine, lease, (uintptr_t)staging, 4 * room, stream), "staging");
    need(oo_model_add(engine, &model), "model");
    for (int i = 0; i < UNITS_TIMED; i++) {
        char *master = (char *)oo_host_address(host) + (size_t)i * room;
        struct oo_tensor tensor = {.host = master, .bytes = bytes};
        size_t offset;
        if (coded) {
            tensor.coded_kind = OO_CODEC_BF16;
            tensor.coded_bytes = encode(OO_CODEC_BF16, plain, MANY, MANY, master);
        } else {
            memcpy(master, plain, bytes);
        }
        add_unit(engine, model, &tensor, 1, &members[i], &offset);
    }
    for (int round = 0; round < 3; round++) {
        sim.simFinish(&begin_s);
        for (int i = 0; i < UNITS_TIMED; i++) {
            struct oo_use use;
            need(acquire_launched(engine, members[i], stream, 0, OO_FORWARD, -1, kernel_s, 0, &use),
                 "acquire");
            CHECK(!memcmp((const void *)use.address, plain, bytes), "wrong weights");
            use_end(engine, &use, stream, "release");
        }
        sim.simFinish(&end_s);
    }
    struct sim_device device;
    struct oo_stats stats;
    CHECK(sim.simGetDevice(0, &device) == OOCU_SUCCESS, "device");
    need(oo_engine_stats(engine, model, &stats), "stats");
    const double gbps = (double)stats.h2d_timed_bytes / stats.h2d_seconds * 1e-9;
    CHECK(gbps > 0.97 * device.link_gbps && gbps <= device.link_gbps,
          "%d, %g s: the link of %g GB/s is reported to carry %g", coded, kernel_s,
          device.link_gbps, gbps);
    need(oo_model_remove(engine, model), "remove");
    need(oo_lease_remove(engine, lease), "remove");
    need(oo_host_destroy(host), "destroy");
    need(oo_engine_destroy(engine), "destroy");
    check_no_reports("time");
    free(arena);
    CHECK(sim_reset(&sim) == 0, "not reset");
    return end_s - begin_s;
}

/* Simulated: a decode takes what nine tenths of the memory's speed allow. */
CASE(a_step_bound_by_the_link_takes_three_quarters_of_its_time) {
    char *plain = malloc(2 * (size_t)MANY), *staging = malloc(4 * (2 * (size_t)MANY + 4096));
    seed = 8;
    draw_weights(OO_CODEC_BF16, GAUSSIAN, MANY, plain);
    const double plain_s = forward_s(0, 5e-6, plain, staging),
                 coded_s = forward_s(1, 5e-6, plain, staging);
    printf("simulated: %.1f us as it is, %.1f us coded: %.3f\n", plain_s * 1e6, coded_s * 1e6,
           coded_s / plain_s);
    CHECK(coded_s <= 0.75 * plain_s, "%g s, not three quarters of %g s", coded_s, plain_s);
    CHECK(coded_s >= 0.6 * plain_s, "%g s of %g s: less than the bytes that travel", coded_s,
          plain_s);
    (void)forward_s(1, 2e-3, plain, staging); /* copies wait for slots, and so for staging memory */
    free(plain);
    free(staging);
}

CHECK_MAIN(world_prepare)
