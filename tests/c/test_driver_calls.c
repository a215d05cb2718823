/* How many driver calls a use makes, in the steady state, and which of them only measure. */
#include "timing.h"
#include "world.h"

#include <math.h>

enum { USES = 4096, SAME_BYTES = 8192 };

/* Units of one size in `arena_bytes`, on a thread whose current context is the device's. */
static void open_with_context(struct world *w, size_t arena_units) {
    memset(w, 0, sizeof *w);
    for (unsigned i = 0; i < UNITS; i++)
        w->bytes[i] = SAME_BYTES;
    w->total = UNITS * SAME_BYTES;
    w->largest = SAME_BYTES;
    need(oo_engine_create(sim.path, 0, &w->engine), "create");
    CHECK(sim.cuDevicePrimaryCtxRetain(&w->context, 0) == 0, "no context");
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(world_attach(w, arena_units * SAME_BYTES, -1), "attach: %s", oo_error_message());
}

static void close_with_context(struct world *w, const char *where) {
    sim.cuCtxPopCurrent_v2(NULL);
    world_close(w, where);
}

/* Round after round over all units. */
static void use_in_turn(struct world *w, unsigned uses, double seconds) {
    for (unsigned i = 0; i < uses; i++) {
        struct oo_use use;
        need(acquire_launched(w->engine, w->member[i % UNITS], w->stream, 0, OO_FORWARD, -1,
                              seconds, 0, &use),
             "acquire");
        use_end(w->engine, &use, w->stream, "release");
    }
}

struct counted {
    double calls, copies; /* of one use */
};

static struct counted count_calls(struct world *w) {
    use_in_turn(w, 2 * USES, 20e-6); /* until what is measured for the plan has been */
    const uint64_t copies = stats_of(w).h2d_copies, calls = sim.simCallCount(NULL);
    use_in_turn(w, USES, 20e-6);
    const double made = (double)(sim.simCallCount(NULL) - calls);
    return (struct counted){made / USES, (double)(stats_of(w).h2d_copies - copies) / USES};
}

/* What two calls of the engine ask of the driver: whose context is current (twice), whether the
 * stream is capturing, and to mark the use; and for a copy itself, its arrival, the use that it
 * waits for and the one that waits for it. A sixteenth of copies and waits is measured. The device
 * does nothing before it is waited for, so some uses look in vain what has left its queue. */
CASE(test_calls_of_a_use) {
    const double looks = 1.0 / (1 + OO_USES_UNLOOKED);
    struct world w;
    open_with_context(&w, UNITS);
    const struct counted hit = count_calls(&w);
    CHECK(hit.copies == 0 && hit.calls <= 4.01, "%.3f calls and %.3f copies of a hit", hit.calls,
          hit.copies);
    close_with_context(&w, "hits");
    open_with_context(&w, 1); /* nothing can be fetched ahead: each use copies its own unit */
    const struct counted late = count_calls(&w);
    CHECK(late.copies >= 1 && late.calls <= 4.01 + looks + 4.39 * late.copies,
          "%.3f calls and %.3f copies of a late use", late.calls, late.copies);
    close_with_context(&w, "late");
    open_with_context(&w, 4);
    const struct counted ahead = count_calls(&w);
    CHECK(ahead.copies > 0.8 && ahead.calls <= 4.01 + looks + 4.39 * ahead.copies,
          "%.3f calls and %.3f copies of a use", ahead.calls, ahead.copies);
    close_with_context(&w, "ahead");
}

static OOCUevent untimed[4096];
static unsigned n_untimed, n_timed, waits_for_timed;
static struct oo_driver real;

static OOCUresult OOCUDAAPI create_event(OOCUevent *event, unsigned int flags) {
    const OOCUresult result = real.cuEventCreate(event, flags);
    if (flags & OOCU_EVENT_DISABLE_TIMING)
        untimed[n_untimed++ % 4096] = *event;
    else
        n_timed++;
    return result;
}

static OOCUresult OOCUDAAPI wait_event(OOCUstream stream, OOCUevent event, unsigned int flags) {
    unsigned i = 0;
    while (i < n_untimed && untimed[i] != event)
        i++;
    waits_for_timed += i == n_untimed;
    return real.cuStreamWaitEvent(stream, event, flags);
}

/* What orders carries no time: with the engine's reserves gone, each event is created before us. */
CASE(test_only_measurements_have_timed_events) {
    struct world w;
    char gradient[600], target[600];
    world_begin(&w);
    real = w.engine->driver;
    w.engine->driver.cuEventCreate = create_event;
    w.engine->driver.cuStreamWaitEvent = wait_event;
    n_untimed = n_timed = waits_for_timed = 0;
    struct oo_event *reserve[2];
    for (int kind = 0; kind < 2; kind++) {
        reserve[kind] = w.engine->spans.free_events[kind];
        w.engine->spans.free_events[kind] = NULL;
    }
    CHECK(world_attach(&w, 60000, -1), "attach: %s", oo_error_message());
    fill(gradient, sizeof gradient, 1);
    for (int i = 0; i < 2; i++) {
        need(step(&w), "step");
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
             "download");
        if (i == 0)
            need(oo_trace_start(w.engine), "trace");
    }
    end_timeline(w.engine);
    CHECK(n_untimed > 0 && n_timed > 0 && waits_for_timed == 0, "%u waits for events with timing",
          waits_for_timed);
    for (int kind = 0; kind < 2; kind++) {
        struct oo_event **end = &w.engine->spans.free_events[kind];
        while (*end)
            end = &(*end)->next;
        *end = reserve[kind];
    }
    w.engine->driver.cuEventCreate = real.cuEventCreate;
    w.engine->driver.cuStreamWaitEvent = real.cuStreamWaitEvent;
    world_close(&w, "kinds of events");
}

/* However long a step is, each of its copies is measured as often as the others. */
CASE(test_samples_are_spread_evenly) {
    struct world w;
    static unsigned measured[4096];
    static const unsigned periods[] = {1, 2, 13, 16, 21, 34, 304, 4096};
    enum { STEPS = 4096 };
    world_open(&w, 60000, -1);
    for (unsigned p = 0; p < sizeof periods / sizeof periods[0]; p++) {
        const unsigned period = periods[p];
        w.engine->spans.seen[OO_TRACE_H2D] = 12345 * p;
        memset(measured, 0, sizeof measured);
        for (unsigned i = 0; i < STEPS * period; i++)
            measured[i % period] += oo__is_measured(w.engine, OO_TRACE_H2D) != 0;
        for (unsigned i = 0; i < period; i++)
            CHECK(measured[i] > STEPS / OO_SAMPLED_ONE_IN / 2 &&
                      measured[i] < STEPS / OO_SAMPLED_ONE_IN * 2,
                  "copy %u of %u was measured %u times in %u steps", i, period, measured[i],
                  (unsigned)STEPS);
    }
    w.engine->spans.seen[OO_TRACE_H2D] = 0;
    CHECK(oo__is_measured(w.engine, OO_TRACE_H2D), "not the first one");
    CHECK(!oo__is_measured(w.engine, OO_TRACE_H2D), "and the second");
    CHECK(!oo__is_measured(w.engine, OO_TRACE_COMPUTE), "a row of no timeline");
    world_close(&w, "samples");
}

/* Uses whose copies take much longer than they: what the sample tells is what all of them tell. */
CASE(test_stalls_of_a_sample_are_those_of_all) {
    struct world w;
    struct sim_device device;
    sim.simGetDevice(0, &device);
    const double link_gbps = device.link_gbps;
    device.link_gbps = 0.2; /* copies of 20 to 100 us, under kernels of 30 */
    sim.simSetDevice(0, &device);
    world_open(&w, 60000, -1);
    struct oo_stats at[3];
    for (int i = 0; i < 3; i++) {
        use_in_turn(&w, 128 * UNITS, 30e-6);
        finish();
        at[i] = stats_of(&w);
        if (i == 1)
            need(oo_trace_start(w.engine), "trace");
    }
    end_timeline(w.engine);
    const uint64_t waits = at[1].waits - at[0].waits, timed = at[1].timed_waits - at[0].timed_waits;
    CHECK(at[2].timed_waits - at[1].timed_waits == at[2].waits - at[1].waits,
          "not all are measured under a timeline");
    CHECK(at[2].waits - at[1].waits == waits, "another number of waits");
    CHECK(timed > waits / OO_SAMPLED_ONE_IN / 2 && timed < waits / OO_SAMPLED_ONE_IN * 2,
          "%llu of %llu waits are measured", (unsigned long long)timed, (unsigned long long)waits);
    const double all = at[2].stall_seconds - at[1].stall_seconds,
                 told = (at[1].stall_seconds - at[0].stall_seconds) * (double)waits / (double)timed;
    CHECK(all > 1e-4 && fabs(told - all) < 0.1 * all, "%.6f s of stalls, %.6f s by the sample", all,
          told);
    world_close(&w, "stalls of a sample");
    device.link_gbps = link_gbps;
    sim.simSetDevice(0, &device);
}

CHECK_MAIN(world_prepare)
