/* The engine on the simulated driver: right bytes, right order, right counts, clear refusals. Every
 * test ends with nothing alive and no race reported. What happens when calls fail: test_faults.c.
 */
#include "world.h"

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

/* ---- bytes and counts ---- */

CASE(test_bytes_are_right_under_every_schedule) {
    static const int schedules[] = {SIM_TIMED, SIM_RANDOM, SIM_STARVE_COPY, SIM_STARVE_COMPUTE,
                                    SIM_EAGER};
    for (unsigned s = 0; s < sizeof schedules / sizeof schedules[0]; s++) {
        for (uint64_t seed = 0; seed < (schedules[s] == SIM_RANDOM ? 10 : 1); seed++) {
            struct world w;
            char name[64];
            snprintf(name, sizeof name, "schedule %d seed %llu", schedules[s],
                     (unsigned long long)seed);
            sim.simSetSchedule(schedules[s], seed);
            world_open(&w, 60000, -1);
            steps(&w, 3, name);
            world_close(&w, name);
        }
    }
}

CASE(test_counters_agree_with_the_driver) {
    struct world w;
    struct sim_stats seen;
    world_open(&w, 100000, -1);
    steps(&w, 3, "step");
    const struct oo_stats stats = stats_of(&w);
    sim.simGetStats(&seen);
    CHECK(stats.h2d_bytes == seen.h2d_bytes && stats.h2d_copies == seen.h2d_copies,
          "we count %llu bytes, the driver %llu", (unsigned long long)stats.h2d_bytes,
          (unsigned long long)seen.h2d_bytes);
    CHECK(stats.acquires == 3 * 3 * UNITS && stats.hits + stats.late == stats.acquires,
          "%llu acquires, %llu hits, %llu late", (unsigned long long)stats.acquires,
          (unsigned long long)stats.hits, (unsigned long long)stats.late);
    CHECK(stats.late + stats.prefetches == stats.h2d_copies, "%llu copies",
          (unsigned long long)stats.h2d_copies);
    CHECK(stats.managed_bytes == w.total && stats.units == UNITS, "%llu managed",
          (unsigned long long)stats.managed_bytes);
    CHECK(stats.learned_block_bytes > 0 && stats.learned_block_bytes < w.total / 3,
          "block of %llu bytes", (unsigned long long)stats.learned_block_bytes);
    world_close(&w, "counters");
}

CASE(test_the_steady_state_allocates_nothing_and_never_waits) {
    struct world w;
    world_open(&w, 60000, -1);
    for (int i = 0; i < 4; i++) {
        need(step(&w), "warm-up");
        finish(); /* as a trainer that reads its loss waits for the device */
    }
    const struct oo_stats before = stats_of(&w);
    for (int i = 0; i < 5; i++) {
        need(step(&w), "step");
        finish();
    }
    const struct oo_stats after = stats_of(&w);
    CHECK(after.allocations == before.allocations, "%llu allocations in 5 steps",
          (unsigned long long)(after.allocations - before.allocations));
    CHECK(after.host_waits == before.host_waits, "%llu host waits in 5 steps",
          (unsigned long long)(after.host_waits - before.host_waits));
    CHECK(after.late - before.late == 0, "%llu late copies in 5 steps",
          (unsigned long long)(after.late - before.late));
    world_close(&w, "steady state");
}

CASE(test_a_model_that_fits_moves_no_byte_after_the_first_step) {
    struct world w;
    world_open(&w, 400000, -1);
    need(step(&w), "step");
    const struct oo_stats before = stats_of(&w);
    CHECK(before.h2d_bytes == w.total, "the first step moves %llu of %zu bytes",
          (unsigned long long)before.h2d_bytes, w.total);
    need(step(&w), "step");
    CHECK(stats_of(&w).h2d_bytes == before.h2d_bytes, "the second step moves bytes");
    world_close(&w, "fits");
}

/* ---- masters that change ---- */

CASE(test_a_rewritten_master_is_never_served_stale) {
    struct world w;
    world_open(&w, 400000, -1);
    need(step(&w), "step");
    fill(w.master[3], w.bytes[3], 99); /* no version counter sees this */
    need(step(&w), "after a silent rewrite");
    CHECK(stats_of(&w).stale == 1, "%llu stale hits", (unsigned long long)stats_of(&w).stale);
    w.master[5][w.bytes[5] / 2 + 1] ^= 1; /* one byte: the stamp tells */
    need(use_on(&w, 5, OO_FORWARD, -1, 7, w.stream), "after a stamped rewrite");
    CHECK(stats_of(&w).stale == 2, "%llu stale hits", (unsigned long long)stats_of(&w).stale);
    w.master[6][w.bytes[6] / 2 + 1] ^= 1; /* one byte and no stamp: only refresh tells */
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "after refresh");
    need(oo_engine_set_verify(w.engine, 1), "verify");
    need(step(&w), "step");
    for (unsigned i = 0; i < UNITS; i++)
        w.master[i][w.bytes[i] / 3] ^= 1; /* one byte, no stamp: verify tells */
    need(step(&w), "under verify");
    /* Every use, and not the first of a sweep alone: a block is recomputed, and then goes back. */
    need(use(&w, 4, OO_RECOMPUTE), "recompute");
    const uint64_t stale = stats_of(&w).stale;
    w.master[4][w.bytes[4] / 3] ^= 1;
    need(use(&w, 4, OO_BACKWARD), "in the same sweep");
    CHECK(stats_of(&w).stale == stale + 1, "%llu stale hits",
          (unsigned long long)(stats_of(&w).stale - stale));
    world_close(&w, "stale");
}

CASE(test_held_trainable_units_are_dropped_and_not_fetched) {
    struct world w;
    world_open(&w, 400000, 20);
    need(step(&w), "step");
    need(oo_engine_hold(w.engine), "hold");
    CHECK(stats_of(&w).resident_units == 20, "%llu resident",
          (unsigned long long)stats_of(&w).resident_units);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(use(&w, 19, OO_BACKWARD), "use while held");
    CHECK(stats_of(&w).resident_units > 1, "frozen ones are held, too");
    need(oo_engine_resume(w.engine), "resume");
    need(step(&w), "all of them");
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 19, OO_RECOMPUTE), "use while held");
    CHECK(stats_of(&w).resident_units == 20, "a held unit was fetched ahead");
    for (unsigned i = 20; i < UNITS; i++)
        fill(w.master[i], w.bytes[i], 50 + i); /* the optimizer */
    need(oo_engine_resume(w.engine), "resume");
    need(step(&w), "next step");
    CHECK(stats_of(&w).stale == 0, "copies were made before the masters were stable");
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 0, OO_RECORDED), "a forward ends the hold");
    CHECK(!w.engine->held, "not one that is recorded");
    const uint64_t late = stats_of(&w).late;
    need(step(&w), "step");
    CHECK(stats_of(&w).resident_units == UNITS && stats_of(&w).late == late,
          "not fetched ahead again: %llu late", (unsigned long long)(stats_of(&w).late - late));
    world_close(&w, "hold");
}

/* A release that cannot even enter the context leaves no mark: the bytes must not be given away. */
CASE(test_a_unit_that_leaves_without_a_context_keeps_its_bytes) {
    struct world w;
    struct oo_use held;
    world_open(&w, 60000, 20);
    need(step(&w), "step");
    need(acquire(w.engine, w.member[22], w.stream, 0, OO_BACKWARD, 7, 0, &held), "acquire");
    need(oo_engine_launch(w.engine, w.member[22], w.stream, 5e-3), "a long kernel");
    need(oo_engine_hold(w.engine), "hold");
    sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
    use_end(w.engine, &held, w.stream, "release");
    sim.simFaultClear();
    const uint64_t recoveries = stats_of(&w).recoveries;
    need(step(&w), "a step that needs the bytes");
    CHECK(stats_of(&w).recoveries > recoveries, "the kernel was not waited for");
    world_close(&w, "leaving without a context");
}

CASE(test_a_member_moves_out_and_back) {
    struct world w;
    struct oo_tensor tensor;
    uint32_t unit, again;
    size_t offset;
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    char *home = w.master[7], *foreign = malloc(w.bytes[7]);
    fill(foreign, w.bytes[7], 77);
    w.master[7] = foreign;
    tensor = (struct oo_tensor){.host = foreign, .bytes = w.bytes[7]};
    need(oo_member_move(w.engine, w.member[7], &tensor, 1, &unit, &offset), "move");
    need(step(&w), "with foreign memory");
    need(step(&w), "with foreign memory");
    CHECK(stats_of(&w).pageable_bytes == w.bytes[7], "%llu pageable",
          (unsigned long long)stats_of(&w).pageable_bytes);
    w.master[7] = home;
    tensor.host = home;
    need(oo_member_move(w.engine, w.member[7], &tensor, 1, &again, &offset), "move back");
    CHECK(again == unit && stats_of(&w).pageable_bytes == 0, "moving to and fro makes new units");
    free(foreign); /* nothing may read it any more */
    need(step(&w), "back home");
    world_close(&w, "move");
}

CASE(test_a_removed_member_takes_its_unit_and_its_memory_with_it) {
    struct world w;
    struct oo_tensor tensors[2];
    uint32_t model, members[2];
    size_t offsets[2];
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, 4096);
    for (size_t i = 0; i < 2; i++)
        tensors[i] =
            (struct oo_tensor){.host = (char *)oo_host_address(host) + i * 1024, .bytes = 1024};
    need(oo_model_add(w.engine, &model), "model");
    const uint64_t units = stats_of(&w).units;
    add_row(w.engine, model, tensors, 2, members, offsets);
    struct oo_use use = use_acquire(w.engine, members[0], w.stream, "acquire");
    CHECK(oo_member_remove(w.engine, members[0]) == OO_E_STATE, "removed while in use");
    CHECK(oo_member_remove(w.engine, members[1]) == OO_E_STATE, "removed with its unit in use");
    use_end(w.engine, &use, w.stream, "release");
    need(oo_member_remove(w.engine, members[0]), "remove");
    CHECK(oo_member_remove(w.engine, members[0]) == OO_E_ARGUMENT, "removed twice");
    CHECK(oo_member_remove(w.engine, 1000) == OO_E_ARGUMENT, "no such member");
    CHECK(acquire(w.engine, members[0], w.stream, 0, OO_FORWARD, -1, 0, &use) == OO_E_STATE,
          "acquired after it was removed");
    CHECK(stats_of(&w).units == units + 1 && oo_engine_unlock(w.engine, host) == OO_E_STATE,
          "the other member is still there");
    use = use_acquire(w.engine, members[1], w.stream, "acquire");
    use_end(w.engine, &use, w.stream, "release");
    need(oo_member_remove(w.engine, members[1]), "remove the last");
    CHECK(stats_of(&w).units == units, "the unit outlives its members");
    need(oo_engine_unlock(w.engine, host), "unlock what is not in use");
    need(oo_host_destroy(host), "free");
    need(oo_model_remove(w.engine, model), "remove the model");
    need(step(&w), "the other model goes on");
    world_close(&w, "remove");
}

/* ---- what the system refuses ---- */

CASE(test_wrong_calls_are_refused_clearly) {
    struct world w;
    struct oo_fetched fetched;
    struct oo_stats stats;
    uint32_t unit, member;
    size_t offset;
    const uint32_t one = 1;
    world_open(&w, 60000, -1);
    struct oo_use first = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    CHECK(oo_model_remove(w.engine, w.model) == OO_E_STATE, "removed while in use");
    CHECK(oo_lease_remove(w.engine, w.lease) == OO_E_STATE, "what is in use is in it");
    const struct oo_tensor moved = {.host = w.master[1], .bytes = w.bytes[0]};
    CHECK(oo_member_move(w.engine, w.member[0], &moved, 1, &unit, &offset) == OO_E_STATE,
          "moved while in use");
    use_end(w.engine, &first, w.stream, "release");
    CHECK(oo_engine_release(w.engine, first.ticket, w.stream, 0, &fetched) == OO_E_TICKET,
          "released twice");
    CHECK(oo_engine_launch(w.engine, w.member[0], w.stream, 1e-6) == OO_E_STATE,
          "launched without acquire");
    CHECK(acquire(w.engine, 1000, w.stream, 0, OO_FORWARD, -1, 0, &first) == OO_E_STATE,
          "no such member");
    CHECK(oo_engine_stats(w.engine, 9, &stats) == OO_E_ARGUMENT, "no such model");
    CHECK(oo_segment_add(w.engine, w.lease, 4096, 100, w.stream) == OO_E_ARGUMENT,
          "a segment of 100 bytes");
    ANSWERS(OO_E_ARGUMENT, "beyond memory",
            oo_segment_add(w.engine, w.lease, UINTPTR_MAX - 1000, 4096, w.stream));
    ANSWERS(OO_E_ARGUMENT, "beyond memory",
            oo_segment_add(w.engine, w.lease, 4096, SIZE_MAX, w.stream));
    const struct oo_tensor wrong[] = {{.host = w.master[0], .bytes = SIZE_MAX - 8},
                                      {.host = w.master[0], .bytes = SIZE_MAX / 2},
                                      {.host = (const void *)(UINTPTR_MAX - 100), .bytes = 101}};
    for (int i = 0; i < 3; i++)
        CHECK(oo_unit_add(w.engine, w.model, &wrong[i], &one, 1, 0, &unit, &member, &offset) ==
                      OO_E_ARGUMENT &&
                  oo_member_move(w.engine, w.member[0], &wrong[i], 1, &unit, &offset) ==
                      OO_E_ARGUMENT,
              "tensor %d, which no memory holds", i);
    const struct oo_tensor many[] = {{.host = w.master[0], .bytes = SIZE_MAX / 4},
                                     {.host = w.master[0], .bytes = SIZE_MAX / 4},
                                     {.host = w.master[0], .bytes = SIZE_MAX / 4}};
    const uint32_t ones[] = {1, 1, 1};
    uint32_t members[3];
    size_t offsets[3];
    ANSWERS(OO_E_ARGUMENT, "no memory is so large",
            oo_unit_add(w.engine, w.model, many, ones, 3, 0, &unit, members, offsets));
    char byte = 0;
    CHECK(oo_engine_download(w.engine, NULL, (uintptr_t)&byte, 1, w.stream) == OO_E_ARGUMENT,
          "a download to nowhere");
    CHECK(oo_engine_download(w.engine, &byte, (uintptr_t)&byte, SIZE_MAX, w.stream) ==
              OO_E_ARGUMENT,
          "a download of all memory");
    CHECK(oo_engine_download(w.engine, &byte, UINTPTR_MAX, 4, w.stream) == OO_E_ARGUMENT,
          "a download from the end of memory");
    CHECK(oo_host_fill(w.host, 0, NULL, 4) == OO_E_ARGUMENT, "filled from nowhere");
    CHECK(oo_host_fill(w.host, 0, (const void *)(UINTPTR_MAX - 2), 4) == OO_E_ARGUMENT,
          "filled from beyond memory");
    need(oo_host_fill(w.host, 0, NULL, 0), "a fill of nothing");
    const struct oo_tensor empty[] = {
        {.host = NULL, .bytes = 0}, {.host = NULL, .bytes = 8}, {.host = w.master[0], .bytes = 0}};
    for (int i = 0; i < 3; i++)
        CHECK(oo_unit_add(w.engine, w.model, &empty[i], &one, 1, 0, &unit, &member, &offset) ==
                  OO_E_ARGUMENT,
              "a tensor that is none, %d", i);
    CHECK(oo_engine_unlock(w.engine, w.host) == OO_E_STATE, "unlocked under attached units");
    CHECK(oo_engine_destroy(w.engine) == OO_E_STATE, "destroyed with a model attached");
    struct oo_engine *none;
    ANSWERS(OO_E_NO_DEVICE, "device 5", oo_engine_create(sim.path, 5, &none));
    CHECK(oo_engine_create("/nonexistent/libcuda.so", 0, &none) == OO_E_DRIVER_MISSING, "%s",
          oo_error_message());
    world_close(&w, "wrong calls");
}

CASE(test_a_unit_larger_than_the_arena_is_an_error_that_names_the_sizes) {
    struct world w;
    world_open(&w, 12000, -1);
    enum oo_status status = OO_OK;
    for (unsigned i = 0; i < UNITS && status == OO_OK; i++)
        status = use(&w, i, OO_FORWARD);
    CHECK(status == OO_E_NO_ROOM && strstr(oo_error_message(), "12"), "%s: %s",
          oo_status_name(status), oo_error_message());
    world_close(&w, "no room");
}

/* ---- gradients ---- */

CASE(test_downloads_arrive_whole) {
    static const size_t sizes[] = {1, 4096, (4u << 20) - 3, 4u << 20, (37u << 20) + 5};
    struct world w;
    world_open(&w, 60000, -1);
    for (unsigned i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *gradient = malloc(sizes[i]), *target = calloc(1, sizes[i]);
        fill(gradient, sizes[i], i);
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizes[i], w.stream),
             "download");
        CHECK(memcmp(gradient, target, sizes[i]) == 0, "%zu bytes did not arrive", sizes[i]);
        free(gradient);
        free(target);
    }
    CHECK(stats_of(&w).d2h_copies == 5, "%llu downloads",
          (unsigned long long)stats_of(&w).d2h_copies);
    world_close(&w, "download");
}

/* ---- time ---- */

CASE(test_a_timeline_tells_copies_compute_and_stalls) {
    struct world w;
    struct sim_device device;
    struct oo_trace_row *rows;
    size_t count;
    unsigned seen[4] = {0};
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    sim.simGetDevice(0, &device);
    need(oo_trace_start(w.engine), "trace");
    CHECK(oo_trace_start(w.engine) == OO_E_STATE, "two timelines at once");
    const uint64_t before = stats_of(&w).h2d_copies;
    need(step(&w), "step");
    const uint64_t copies = stats_of(&w).h2d_copies - before;
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    for (size_t i = 0; i < count; i++) {
        seen[rows[i].kind]++;
        CHECK(rows[i].end_s >= rows[i].start_s, "row %zu ends before it starts", i);
        const double expected =
            device.copy_latency_s + (double)rows[i].bytes / (device.link_gbps * 1e9);
        const double taken = rows[i].end_s - rows[i].start_s;
        if (rows[i].kind == OO_TRACE_H2D) /* events are single-precision milliseconds */
            CHECK(taken > expected - 2e-9 && taken < expected + 2e-9,
                  "a copy of %llu bytes took %.9f, not %.9f s", (unsigned long long)rows[i].bytes,
                  taken, expected);
    }
    CHECK(seen[OO_TRACE_COMPUTE] == 3 * UNITS, "%u compute rows", seen[OO_TRACE_COMPUTE]);
    CHECK(seen[OO_TRACE_H2D] == copies, "%u copy rows for %llu copies", seen[OO_TRACE_H2D],
          (unsigned long long)copies);
    oo_trace_free(rows);
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.h2d_seconds > 0 && stats.h2d_timed_bytes > 0, "no copy was measured");
    world_close(&w, "timeline");
}

/* ---- failure ---- */

/* A lost context has taken what it owned; all else must have been given back. */
static void end_lost_context(const char *where) {
    struct sim_live live;
    sim.simGetLive(&live);
    CHECK(live.adopted_bytes == 0 && live.queued == 0, "%s: %llu adopted bytes, %llu queued", where,
          (unsigned long long)live.adopted_bytes, (unsigned long long)live.queued);
    check_no_reports(where);
    sim.simFaultClear();
    for (; live.contexts > 0; sim.simGetLive(&live))
        sim.cuDevicePrimaryCtxRelease_v2(0);
    sim.simReportsClear(); /* the streams and events that went with it */
    check_nothing_alive(where);
    CHECK(sim_reset(&sim) == 0, "%s: the simulator could not be reset", where);
}

/* Detach of a dead engine, and its end, whose answer is returned. */
static enum oo_status end_dead(struct world *w, const char *where) {
    need(world_remove(w), where);
    end_memory(w->engine, w->host);
    const enum oo_status status = oo_engine_destroy(w->engine);
    free(w->arena);
    end_lost_context(where);
    return status;
}

static void a_sticky_error(OOCUresult result, const char *named, int through_the_ring) {
    struct world w;
    char gradient[100] = {1}, target[100];
    sim.simRefuseRegistration((uint64_t)through_the_ring);
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
         "download");
    need(oo_trace_start(w.engine), "trace");
    sim.simFault("cuMemcpyHtoDAsync", 3, result, 0);
    enum oo_status status = step(&w);
    for (int i = 0; i < 3 && status == OO_OK; i++)
        status = step(&w);
    CHECK(status == OO_E_DRIVER || status == OO_E_DEAD, "%s", oo_status_name(status));
    CHECK(use(&w, 0, OO_FORWARD) == OO_E_DEAD && strstr(oo_error_message(), "cuMemcpyHtoDAsync") &&
              strstr(oo_error_message(), "restart"),
          "%s", oo_error_message());
    const char *call, *name;
    int code;
    oo_error_driver(&call, &code, &name);
    CHECK(code == (int)result && strcmp(name, named) == 0, "%s %d", name, code);
    need(world_remove(&w), "detach of a dead engine");
    const uint64_t unregistered = sim.simCallCount("cuMemHostUnregister");
    const uint64_t waited = sim.simCallCount("cuStreamSynchronize");
    need(oo_engine_unlock(w.engine, w.host), "unlock of a dead engine");
    CHECK(sim.simCallCount("cuMemHostUnregister") == unregistered &&
              sim.simCallCount("cuStreamSynchronize") == waited,
          "a dead engine drives");
    CHECK(((const char *)oo_host_address(w.host))[1] == w.master[0][1], "masters are not readable");
    oo_host_destroy(w.host);
    const uint64_t freed = sim.simCallCount("cuMemFreeHost");
    need(oo_engine_destroy(w.engine),
         "destroy of a dead engine"); /* its records must go: the leak check sees */
    CHECK(sim.simCallCount("cuMemFreeHost") == freed, "a dead engine drives");
    free(w.arena);
    end_lost_context("a sticky error");
}

/* The call that meets the loss tells of it; where nothing is asked of the driver, it succeeds. */
CASE(test_a_context_lost_on_the_way_in) {
    for (int life = 0; life < 3; life++) {
        struct world w;
        struct oo_stats stats;
        char gradient[100] = {1}, target[100];
        world_open(&w, 60000, -1);
        sim.simFault(life < 2 ? "cuCtxGetCurrent" : "cuMemcpyDtoHAsync", 1,
                     OOCU_ERROR_ILLEGAL_ADDRESS, 0);
        if (life == 2) {
            CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient,
                                     w.stream) == OO_E_DRIVER,
                  "downloaded");
            CHECK(stats_of(&w).recoveries == 0, "a dead engine drives");
        } else if (life == 0)
            CHECK(oo_engine_resume(w.engine) == OO_E_DRIVER &&
                      strstr(oo_error_message(), "cuCtxGetCurrent") == oo_error_message(),
                  "%s", oo_error_message());
        else
            need(oo_engine_stats(w.engine, OO_ALL_MODELS, &stats), "stats");
        CHECK(oo_engine_resume(w.engine) == OO_E_DEAD, "not dead");
        CHECK(end_dead(&w, "lost on the way in") == OO_OK, "destroy: %s", oo_error_message());
    }
}

CASE(test_a_use_on_a_stream_of_the_callers_ends_on_a_dead_engine_without_a_call) {
    struct world w;
    struct oo_use first, again;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    first = use_acquire(w.engine, w.member[0], stream, "acquire");
    use_end(w.engine, &first, stream, "release");
    again = use_acquire(w.engine, w.member[0], stream, "acquire again");
    sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(oo_engine_resume(w.engine) == OO_E_DRIVER, "not dead");
    const uint64_t waits = sim.simCallCount("cuStreamWaitEvent");
    need(oo_engine_release(w.engine, again.ticket, stream, 0, &fetched), "release when dead");
    CHECK(sim.simCallCount("cuStreamWaitEvent") == waits, "a dead engine drives");
    /* The context was lost with copies and uses in it, which the engine cannot give back. */
    ANSWERS(OO_LEAKED, "restart", end_dead(&w, "a use on a dead engine"));
}

CASE(test_a_context_lost_while_masters_are_freed_leaves_no_engine_behind) {
    struct world w;
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    need(world_remove(&w), "remove");
    sim.simFault("cuStreamSynchronize", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    oo_host_destroy(w.host);
    ANSWERS(OO_LEAKED, "restart", oo_engine_destroy(w.engine));
    free(w.arena);
    end_lost_context("a context lost while masters are freed");
}

/* What a dead engine still does returns; all else names what killed it. */
static void check_dead(struct world *w, const struct oo_use *held, const char *where) {
    struct oo_fetched fetched;
    struct oo_stats stats;
    struct oo_use another;
    struct oo_trace_row *rows;
    char bytes[64] = {0};
    size_t count, offset;
    uint32_t id;
    uintptr_t stream;
    const struct oo_tensor tensor = {.host = bytes, .bytes = sizeof bytes};
    const uint32_t one = 1;
    char first[1024], first_call[64];
    const char *call, *name;
    int code;
    struct oo_engine *e = w->engine;
    struct oo_host *host = NULL;
    need(oo_host_create(4096, &host), "host");
    const enum oo_status answers[] = {
        acquire(e, 0, w->stream, 0, OO_FORWARD, -1, 0, &another),
        oo_engine_prefetch(e, &fetched),
        oo_engine_stamp(e, &(struct oo_stamp){0, 1}, 1, 0),
        oo_engine_launch(e, 0, w->stream, 0.0),
        oo_engine_download(e, bytes, (uintptr_t)bytes, sizeof bytes, w->stream),
        oo_engine_spin(e, w->stream, 1),
        oo_engine_hold(e),
        oo_engine_resume(e),
        oo_engine_refresh(e, OO_ALL_MODELS),
        oo_engine_set_verify(e, 1),
        oo_engine_lock(e, host, OO_ALL_BYTES),
        oo_engine_compute_stream(e, &stream),
        oo_engine_mem_info(e, &count, &offset),
        oo_model_add(e, &id),
        oo_lease_add(e, &id),
        oo_segment_add(e, 0, (uintptr_t)bytes, sizeof bytes, w->stream),
        oo_unit_add(e, 0, &tensor, &one, 1, 0, &id, &id, &offset),
        oo_member_move(e, 0, &tensor, 1, &id, &offset),
        oo_member_remove(e, 0),
        oo_unit_set_trainable(e, 0, 1),
        oo_trace_start(e),
        oo_trace_stop(e, &rows, &count)};
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++)
        CHECK(answers[i] == OO_E_DEAD, "%s: call %zu answers %s", where, i,
              oo_status_name(answers[i]));
    oo_host_destroy(host);
    snprintf(first, sizeof first, "%s", oo_error_message());
    oo_error_driver(&call, &code, &name);
    snprintf(first_call, sizeof first_call, "%s", call);
    CHECK(code == OOCU_ERROR_LAUNCH_FAILED && strstr(first, call) && call[0], "%s: %s", where,
          first);
    CHECK(oo_engine_stats(e, OO_ALL_MODELS, &stats) == OO_OK &&
              oo_engine_residents(e, NULL, 0, &count) == OO_OK &&
              oo_engine_unit_waits(e, NULL, 0, &count) == OO_OK,
          "%s: nothing can be asked", where);
    CHECK(!held || oo_engine_release(e, held->ticket, w->stream, 0, &fetched) == OO_OK,
          "%s: a use that cannot end", where);
    (void)oo_engine_resume(e);
    oo_error_driver(&call, &code, &name);
    CHECK(strcmp(oo_error_message(), first) == 0 && strcmp(call, first_call) == 0,
          "%s: first \"%s\", now \"%s\"", where, first, oo_error_message());
}

/* Returns how many calls the life makes; the n-th loses the context. Half of the masters go through
 * the ring, a timeline is recorded, a unit is in use when the end comes. */
static uint64_t life_that_ends_at(uint64_t nth, int schedule) {
    struct world w;
    char where[64];
    static char gradient[5000], target[5000];
    struct oo_use held = {0};
    snprintf(where, sizeof where, "context lost at call %llu, schedule %d", (unsigned long long)nth,
             schedule);
    sim.simSetSchedule(schedule, 30);
    world_begin(&w);
    const uint64_t before = sim.simCallCount(NULL);
    if (nth)
        sim.simFault(NULL, nth, OOCU_ERROR_LAUNCH_FAILED, 0);
    sim.simRefuseRegistration(nth % 2);
    enum oo_status status = world_attach(&w, 60000, 18) ? OO_OK : OO_E_DRIVER;
    if (status == OO_OK)
        status = oo_trace_start(w.engine);
    if (status == OO_OK)
        status = step(&w);
    int in_use = 0;
    if (status == OO_OK) {
        status = try_acquire(&w, 2, 0, &held);
        in_use = status == OO_OK;
    }
    if (status == OO_OK)
        status =
            oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream);
    if (status == OO_OK)
        status = oo_engine_hold(w.engine);
    const uint64_t calls = sim.simCallCount(NULL) - before;
    if (!nth) {
        need(status, where);
        use_end(w.engine, &held, w.stream, "release");
        world_close(&w, where);
        return calls;
    }
    /* What swallowed it was not obliged to tell; and a life through the ring has fewer calls. */
    for (int after = 0; after < 2 && status == OO_OK;
         after += sim.simCallCount(NULL) > before + nth)
        status = use(&w, 5, OO_FORWARD);
    CHECK(status == OO_E_DRIVER || status == OO_E_DEAD, "%s: %s", where, oo_status_name(status));
    check_dead(&w, in_use ? &held : NULL, where);
    if (w.leased)
        need(oo_lease_remove(w.engine, w.lease), where);
    for (uint32_t i = 0; i < w.engine->n_models; i++)
        need(oo_model_remove(w.engine, i), where);
    oo_host_destroy(w.host);
    need(oo_engine_destroy(w.engine), where);
    free(w.arena);
    end_lost_context(where);
    return calls;
}

CASE(test_wherever_the_context_is_lost_all_else_is_given_back) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        const uint64_t calls = life_that_ends_at(0, schedule);
        for (uint64_t n = 1 + (uint64_t)schedule; n <= calls; n += 31 * sweep_stride())
            life_that_ends_at(n, schedule);
    }
}

#if !defined(_WIN32)
CASE(test_a_forked_child_is_told) {
    struct world w;
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    const pid_t child = fork();
    if (child == 0) {
        const enum oo_status status = use(&w, 0, OO_FORWARD);
        _exit(status == OO_E_FORKED && strstr(oo_error_message(), "DataLoader") ? 0 : 1);
    }
    int result = -1;
    waitpid(child, &result, 0);
    CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0, "the child was not refused (status %d)",
          result);
    need(step(&w), "the parent goes on");
    world_close(&w, "fork");
}
#endif

CASE(test_a_sticky_error_kills_the_engine_and_says_so) {
    a_sticky_error(OOCU_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", 0);
    a_sticky_error(OOCU_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", 1);
    /* Of which cuda.h says nothing: drivers give it when they have lost the device. */
    a_sticky_error(OOCU_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", 0);
}

/* A lost context has taken what was locked to try, so that the memory is the caller's again. */
CASE(test_a_sticky_error_of_a_trial_kills_the_engine_and_keeps_no_memory) {
    struct world w;
    struct oo_host *host;
    size_t found;
    world_open(&w, 60000, -1);
    need(oo_host_create((size_t)8 << 20, &host), "host");
    sim.simLockQuota(w.host->mapped_bytes + ((size_t)6 << 20));
    /* All of it is refused, half of it granted, and then the context is lost. */
    sim.simFault("cuMemHostRegister", 3, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(oo_engine_lockable(w.engine, host, &found) == OO_E_DRIVER, "%s", oo_error_message());
    CHECK(!host->kept && w.engine->n_leaked == 0, "a dead engine drives");
    need(oo_host_destroy(host), "destroy of memory");
    (void)end_dead(&w, "a sticky error of a trial");
}

CHECK_MAIN(world_prepare)
