/* What the engine counts and measures, exactly: residents, counters, bytes, seconds. */
#include "timing.h"
#include "world.h"

#include <math.h>

CASE(test_residents_by_address) {
    struct world w;
    struct oo_resident rows[UNITS + 1];
    size_t count = 0, few = 0;
    world_open(&w, 400000, -1);
    need(step(&w), "step");
    const struct oo_use use = use_acquire(w.engine, w.member[5], w.stream, "acquire");
    need(oo_engine_residents(w.engine, rows, UNITS + 1, &count), "residents");
    CHECK(count == UNITS, "%zu residents", count);
    for (size_t i = 0; i < count; i++) {
        CHECK(rows[i].bytes == w.bytes[rows[i].unit] &&
                  (i == 0 || rows[i].address >= rows[i - 1].address + rows[i - 1].bytes),
              "row %zu", i);
        CHECK(rows[i].pins == (rows[i].unit == w.unit[5] ? 1u : 0u), "unit %u has %u pins",
              rows[i].unit, rows[i].pins);
        CHECK(rows[i].unit != w.unit[5] || rows[i].address == use.address, "another address");
    }
    memset(rows, 0x55, sizeof rows);
    need(oo_engine_residents(w.engine, rows, 3, &few), "residents");
    CHECK(few == UNITS && rows[2].bytes == w.bytes[rows[2].unit] &&
              rows[3].bytes == (size_t)0x5555555555555555u,
          "more rows than there is room for");
    use_end(w.engine, &use, w.stream, "release");
    world_close(&w, "residents");
}

CASE(test_figures_of_two_models) {
    struct world w, b;
    struct oo_stats all, first, second;
    world_open(&w, 60000, -1);
    memset(&b, 0, sizeof b);
    world_sizes(&b);
    b.engine = w.engine;
    CHECK(world_attach(&b, 60000, -1), "second model: %s", oo_error_message());
    need(step(&w), "first");
    need(use(&b, 0, OO_FORWARD), "second");
    finish();
    need(oo_engine_stats(w.engine, OO_ALL_MODELS, &all), "stats");
    need(oo_engine_stats(w.engine, w.model, &first), "stats");
    need(oo_engine_stats(w.engine, b.model, &second), "stats");
    CHECK(first.acquires == 3 * UNITS && second.acquires == 1 &&
              all.acquires == first.acquires + second.acquires,
          "acquires");
    CHECK(all.managed_bytes == 2 * w.total && first.managed_bytes == w.total &&
              first.units == UNITS,
          "managed");
    CHECK(all.h2d_bytes == first.h2d_bytes + second.h2d_bytes &&
              all.evictions == first.evictions + second.evictions &&
              all.prefetches == first.prefetches + second.prefetches &&
              all.late == first.late + second.late &&
              fabs(all.h2d_seconds - first.h2d_seconds - second.h2d_seconds) < 1e-12,
          "the sum of the models is not the whole");
    CHECK(all.h2d_timed_bytes == first.h2d_timed_bytes + second.h2d_timed_bytes &&
              all.h2d_timed_bytes <= all.h2d_bytes,
          "timed");
    CHECK(all.arena_bytes / OO_ALIGNMENT >= 2 * (60000 / OO_ALIGNMENT) &&
              all.arena_bytes <= 2 * (60000 + OO_ALIGNMENT),
          "%llu arena", (unsigned long long)all.arena_bytes);
    CHECK(all.locked_bytes == w.host->mapped_bytes + b.host->mapped_bytes &&
              all.pageable_bytes == 0,
          "locked");
    CHECK(all.largest_unit_bytes == w.largest && all.peak_resident_bytes >= all.resident_bytes &&
              all.peak_resident_bytes <= all.arena_bytes && all.resident_bytes > 0,
          "resident");
    need(world_remove(&b), "remove");
    CHECK(oo_engine_stats(w.engine, b.model, &second) == OO_E_ARGUMENT, "a model that is gone");
    oo_host_destroy(b.host); /* unlocks */
    free(b.arena);
    world_close(&w, "two models");
}

CASE(test_a_stall_is_what_the_stream_waits_for_its_copy) {
    struct world w;
    struct sim_device device;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    const size_t bytes =
        8u << 20; /* a copy far longer than the floor under which a stall is none */
    uint32_t unit, member, model, lease;
    size_t offset;
    char *arena = malloc(bytes + OO_ALIGNMENT);
    struct oo_host *host = locked_memory(w.engine, bytes);
    need(oo_model_add(w.engine, &model), "model");
    need(oo_lease_add(w.engine, &lease), "lease");
    need(oo_segment_add(w.engine, lease, (uintptr_t)arena, bytes + OO_ALIGNMENT, stream),
         "segment");
    const struct oo_tensor tensor = {.host = oo_host_address(host), .bytes = bytes};
    unit = add_unit(w.engine, model, &tensor, 1, &member, &offset);
    sim.simGetDevice(0, &device);
    const double copy = device.copy_latency_s + (double)bytes / (device.link_gbps * 1e9);
    kernel(stream, NULL, 0, 0, 100e-6); /* the stream is busy for a part of the copy */
    kernel((uintptr_t)w.engine->d2h, NULL, 0, 0,
           5e-3); /* and so, later, is the other copy stream */
    const double origin = sim.simNow();
    need(oo_trace_start(w.engine), "trace");
    struct oo_use use = use_begin(w.engine, member, stream, 300e-6, "acquire");
    use_end(w.engine, &use, stream, "release");
    /* The same again, at once: its compute begins where the first one ends, and waits for no copy.
     */
    use = use_begin(w.engine, member, stream, 200e-6, "acquire");
    use_end(w.engine, &use, stream, "release");
    const uint64_t waits = stats_of(&w).host_waits;
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    CHECK(stats_of(&w).host_waits == waits + 4, "%llu waits for 4 spans",
          (unsigned long long)(stats_of(&w).host_waits - waits));
    unsigned seen[4] = {0};
    for (size_t i = 0; i < count; i++) {
        const struct oo_trace_row *row = &rows[i];
        if (row->unit != unit)
            continue;
        seen[row->kind]++;
        /* The second kernel in the queue of the device is the 5 ms one. */
        const double first_end = 100e-6 + 5e-3 + 300e-6;
        const int again = seen[OO_TRACE_COMPUTE] == 2;
        const double begins = row->kind == OO_TRACE_H2D     ? 0
                              : row->kind == OO_TRACE_STALL ? 100e-6
                              : again                       ? first_end
                                                            : copy;
        CHECK(fabs(row->start_s - begins) < 1e-9, "kind %d starts at %.9f, not %.9f",
              (int)row->kind, row->start_s, begins);
        if (row->kind == OO_TRACE_H2D || row->kind == OO_TRACE_STALL)
            CHECK(fabs(row->end_s - copy) < 1e-9 &&
                      row->bytes == (row->kind == OO_TRACE_H2D ? bytes : 0),
                  "kind %d ends at %.9f, not %.9f", (int)row->kind, row->end_s, copy);
        else
            CHECK(fabs(row->end_s - first_end - (again ? 200e-6 : 0)) < 1e-9,
                  "compute ends at %.9f", row->end_s);
    }
    CHECK(seen[OO_TRACE_H2D] == 1 && seen[OO_TRACE_STALL] == 1 && seen[OO_TRACE_COMPUTE] == 2,
          "%u %u %u", seen[1], seen[3], seen[0]);
    oo_trace_free(rows);
    struct oo_stats stats;
    need(oo_engine_stats(w.engine, model, &stats), "stats");
    CHECK(stats.stalls == 1 && fabs(stats.stall_seconds - (copy - 100e-6)) < 1e-9,
          "%llu stalls, %.9f s", (unsigned long long)stats.stalls, stats.stall_seconds);
    CHECK(fabs(stats.h2d_seconds - copy) < 1e-9 && stats.h2d_timed_bytes == bytes, "%.9f s",
          stats.h2d_seconds);
    /* A hit on a stream that has waited already costs it nothing: no second stall. */
    use = use_acquire(w.engine, member, stream, "acquire");
    use_end(w.engine, &use, stream, "release");
    double end_s;
    sim.simFinish(&end_s);
    need(oo_engine_stats(w.engine, model, &stats), "stats");
    CHECK(stats.stalls == 1 && end_s > origin, "%llu stalls", (unsigned long long)stats.stalls);
    struct oo_unit_waits waited[2];
    need(oo_engine_unit_waits(w.engine, waited, 2, &count), "waits");
    CHECK(count == 1 && waited[0].unit == unit && waited[0].timed_waits == 1 &&
              waited[0].stalls == 1 && fabs(waited[0].stall_seconds - (copy - 100e-6)) < 1e-9,
          "%zu units, %.9f s", count, waited[0].stall_seconds);
    need(oo_lease_remove(w.engine, lease), "remove");
    need(oo_model_remove(w.engine, model), "remove");
    need(oo_engine_unit_waits(w.engine, waited, 2, &count), "waits");
    CHECK(count == 0, "waits for a unit that is gone");
    oo_host_destroy(host);
    free(arena);
    CHECK(oo_trace_stop(w.engine, &rows, &count) == OO_E_STATE, "no timeline");
    end_stream(&w, stream);
    world_close(&w, "stall");
}

/* Each wait is counted for one unit; one that was short is a wait and no stall. */
CASE(test_the_waits_of_the_units_add_up) {
    struct world w;
    struct oo_trace_row *trace;
    struct oo_unit_waits rows[UNITS + 1];
    size_t count, few;
    world_open(&w, 60000, -1);
    need(oo_trace_start(w.engine), "trace"); /* all waits are timed */
    steps(&w, 3, "step");
    need(oo_trace_stop(w.engine, &trace, &count), "trace");
    need(oo_engine_unit_waits(w.engine, rows, UNITS + 1, &count), "waits");
    const struct oo_stats stats = stats_of(&w);
    uint64_t waits = 0, stalls = 0;
    double seconds = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(i == 0 || rows[i].unit > rows[i - 1].unit, "row %zu", i);
        CHECK(rows[i].timed_waits > 0 && rows[i].stalls <= rows[i].timed_waits, "row %zu", i);
        waits += rows[i].timed_waits;
        stalls += rows[i].stalls;
        seconds += rows[i].stall_seconds;
    }
    CHECK(count > 1 && waits == stats.timed_waits && waits == stats.waits && stalls == stats.stalls,
          "%zu units, %llu waits, %llu stalls", count, (unsigned long long)waits,
          (unsigned long long)stalls);
    CHECK(fabs(seconds - stats.stall_seconds) < 1e-12, "%.9f s", seconds);
    memset(rows, 0x55, sizeof rows);
    need(oo_engine_unit_waits(w.engine, rows, 1, &few), "waits");
    CHECK(few == count && rows[0].unit < UNITS && rows[1].unit == 0x55555555u,
          "more rows than there is room for");
    oo_trace_free(trace);
    world_close(&w, "waits of units");
}

/* Many spans pending at once: what does not fit is not measured, and nothing is overwritten. */
CASE(test_a_host_far_ahead_measures_a_part) {
    struct world w;
    world_open(&w, 30000, -1);
    sim.simHold((OOCUstream)w.stream, 1);
    struct oo_use use;
    for (unsigned i = 0; i < 3 * UNITS; i++) { /* copies wait for uses that do not end */
        use = use_acquire(w.engine, w.member[i % UNITS], w.stream, "acquire");
        use_end(w.engine, &use, w.stream, "release");
    }
    sim.cuCtxPushCurrent_v2(w.context);
    for (unsigned i = 0; i < OO_SPANS; i++) {
        struct oo_event *begin, *end;
        need(oo__event_take(w.engine, OO_TIMED, &begin), "event");
        need(oo__event_take(w.engine, OO_TIMED, &end), "event");
        w.engine->driver.cuEventRecord(begin->handle, w.engine->d2h);
        w.engine->driver.cuEventRecord(end->handle, (OOCUstream)w.stream);
        oo__span_add(w.engine, OO_TRACE_COMPUTE, w.unit[0], 0, begin, end);
    }
    sim.cuCtxPopCurrent_v2(NULL);
    const struct oo_stats before = stats_of(&w);
    CHECK(w.engine->spans.capacity == OO_SPANS &&
              w.engine->spans.tail - w.engine->spans.head == OO_SPANS,
          "%llu spans of %llu", (unsigned long long)(w.engine->spans.tail - w.engine->spans.head),
          (unsigned long long)w.engine->spans.capacity);
    CHECK(before.h2d_timed_bytes < before.h2d_bytes, "all measured already");
    sim.simHold((OOCUstream)w.stream, 0);
    finish();
    const struct oo_stats after = stats_of(&w);
    CHECK(after.h2d_timed_bytes > before.h2d_timed_bytes &&
              after.h2d_timed_bytes <= after.h2d_bytes,
          "%llu timed", (unsigned long long)after.h2d_timed_bytes);
    need(step(&w), "step");
    world_close(&w, "far ahead");
}

CHECK_MAIN(world_prepare)
