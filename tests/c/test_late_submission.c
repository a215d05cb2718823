/* A driver that collects work before it hands it to the device, as Windows' display driver model
 * makes CUDA's do: the engine's copies begin all the same, and no wait of it lasts for ever. */
#include "world.h"

static double h2d_busy_s(void) {
    struct sim_stats stats;
    sim.simGetStats(&stats);
    return stats.h2d_busy_s;
}

static void late(int on) { CHECK(sim.simSwitch(SIM_LATE_SUBMISSION, on) == 0, "no such switch"); }

/* What a release copies ahead is under way before anybody waits for it. */
CASE(copies_ahead_begin_at_once) {
    for (int on = 0; on < 2; on++) {
        struct world w;
        struct oo_use held;
        late(on);
        world_open(&w, 60000, -1);
        CHECK(w.engine->submits_late == on, "%d: not asked", on);
        for (int round = 0; round < 2; round++) /* to learn what comes next */
            need(step(&w), "step");
        uint64_t ahead = stats_of(&w).prefetches;
        double finished_s, before_s = 0;
        for (unsigned i = 0; i < UNITS && stats_of(&w).prefetches == ahead; i++) {
            CHECK(sim.simFinish(&finished_s) == 0, "no end");
            before_s = h2d_busy_s();
            ahead = stats_of(&w).prefetches;
            held = use_begin(w.engine, w.member[i], w.stream, 1e-6, "acquire");
            use_end(w.engine, &held, w.stream, "release");
        }
        CHECK(stats_of(&w).prefetches > ahead, "%d: nothing was copied ahead", on);
        sim.simAdvance(1);
        CHECK(h2d_busy_s() > before_s, "%d: copies ahead have not begun", on);
        world_close(&w, "copies ahead");
    }
}

/* So is the decode that follows a copy. */
CASE(decodes_ahead_begin_at_once) {
    for (int locked = 0; locked < 2; locked++) {
        struct world w;
        struct sim_stats stats;
        late(1);
        sim.simRefuseRegistration(!locked);
        world_open_coded(&w, 400000, -1);
        const struct oo_use held = use_acquire(w.engine, w.member[1], w.stream, "acquire");
        sim.simAdvance(1);
        sim.simGetStats(&stats);
        CHECK(stats.compute_busy_s > 0, "%d: the decode has not begun", locked);
        use_end(w.engine, &held, w.stream, "release");
        world_close(&w, "decodes ahead");
        sim.simRefuseRegistration(0);
    }
}

/* A copy that is asked for late is handed over by acquire, before a kernel is launched. */
CASE(late_copies_begin_at_once) {
    struct world w;
    late(1);
    world_open(&w, 60000, -1);
    const struct oo_use held = use_acquire(w.engine, w.member[0], w.stream, "acquire");
    sim.simAdvance(1);
    CHECK(h2d_busy_s() > 0, "the copy has not begun");
    use_end(w.engine, &held, w.stream, "release");
    world_close(&w, "late copy");
}

static void copies_of_copy_threads_begin(void) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count, copies = 0;
    late(1);
    sim.simRefuseRegistration(1);
    world_open(&w, 400000, -1);
    need(oo_trace_start(w.engine), "start");
    const struct oo_use held = use_begin(w.engine, w.member[0], w.stream, 1e-6, "acquire");
    use_end(w.engine, &held, w.stream, "release");
    feeds_end(&w);
    sim.simAdvance(1);
    need(oo_trace_stop(w.engine, &rows, &count), "stop");
    for (size_t i = 0; i < count; i++) {
        if (rows[i].kind != OO_TRACE_H2D)
            continue;
        copies++;
        CHECK(rows[i].end_s < 0.5, "unit %u is copied until %.6f s", rows[i].unit, rows[i].end_s);
    }
    CHECK(copies > 1, "%zu copies", copies);
    oo_trace_free(rows);
    world_close(&w, "copy threads");
    sim.simRefuseRegistration(0);
}

/* What copy threads have copied is under way before anybody waits for it, whichever ends last. */
CASE(copies_of_copy_threads_begin_at_once) {
    for (int life = 0; life < 60; life++)
        copies_of_copy_threads_begin();
}

/* Locked or through the rings, on every schedule: right bytes, no deadlock. */
CASE(every_step_ends) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        for (int refused = 0; refused < 3; refused++) {
            struct world w;
            char target[5000];
            world_coded = schedule % 2;
            sim.simSetSchedule(schedule, 3);
            late(1);
            sim.simRefuseRegistration(refused == 1);
            sim.simLockQuota(refused == 2 ? 0 : UINT64_MAX);
            world_open_on_device(&w, 60000);
            char *gradient = device_memory(&w, sizeof target);
            fill(gradient, sizeof target, 7);
            steps(&w, 2, "step");
            need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof target, w.stream),
                 "download");
            CHECK(memcmp(target, gradient, sizeof target) == 0, "wrong bytes");
            end_device_memory(&w, gradient);
            world_close(&w, "late submission");
            world_coded = 0;
        }
    }
}

CHECK_MAIN(world_prepare)
