/* What each call of the engine answers, counts and measures, exactly; which calls of the driver it
 * makes and on which stream; and what is left when one of them fails at the worst moment. */
#include "world.h"

#include "fatbin.h"

#include <math.h>

/* ---- what the engine is asked ---- */

static void test_an_engine_tells_its_device(void) {
    struct world w;
    struct sim_device device;
    size_t free_bytes = 0, total_bytes = 0;
    world_open(&w, 60000, -1);
    sim.simGetDevice(0, &device);
    CHECK(strcmp(oo_engine_device_name(w.engine), device.name) == 0, "%s",
          oo_engine_device_name(w.engine));
    CHECK(strcmp(oo_engine_pci_id(w.engine), "0000:F0:00.0") == 0, "%s",
          oo_engine_pci_id(w.engine));
    CHECK(oo_engine_simulated(w.engine) && oo_engine_driver_version(w.engine) >= 12000, "%d",
          oo_engine_driver_version(w.engine));
    need(oo_engine_mem_info(w.engine, &free_bytes, &total_bytes), "mem_info");
    CHECK(total_bytes == (size_t)device.memory_bytes &&
              free_bytes == total_bytes - 60000 - OO_ALIGNMENT,
          "%zu of %zu free", free_bytes, total_bytes);
    CHECK(w.engine->h2d && w.engine->d2h && w.engine->compute && w.engine->h2d != w.engine->d2h &&
              w.engine->compute != w.engine->h2d && w.engine->compute != w.engine->d2h,
          "streams are missing or shared");
    const uintptr_t before = w.stream;
    need(oo_engine_compute_stream(w.engine, &w.stream), "compute stream");
    CHECK(w.stream == before, "a second compute stream");
    int version = 0, devices = 0;
    need(oo_driver_probe(sim.path, &version, &devices), "probe");
    CHECK(version == oo_engine_driver_version(w.engine) && devices == 1, "%d, %d devices", version,
          devices);
    world_close(&w, "tells");
}

static void test_each_status_has_its_name(void) {
    static const char *const names[] = {
        "OO_OK",         "OO_WOULD_BLOCK",      "OO_LEAKED",        "OO_E_ARGUMENT",
        "OO_E_STATE",    "OO_E_MEMORY",         "OO_E_NO_ROOM",     "OO_E_LOCK_REFUSED",
        "OO_E_TICKET",   "OO_E_FORKED",         "OO_E_CAPTURE",     "OO_E_DEAD",
        "OO_E_DRIVER",   "OO_E_DRIVER_MISSING", "OO_E_DRIVER_STUB", "OO_E_DRIVER_OLD",
        "OO_E_NO_DEVICE"};
    for (int i = 0; i <= OO_E_NO_DEVICE; i++)
        CHECK(strcmp(oo_status_name((enum oo_status)i), names[i]) == 0, "%d is %s", i,
              oo_status_name((enum oo_status)i));
    CHECK(strstr(oo_status_name((enum oo_status)99), "unknown"), "%s",
          oo_status_name((enum oo_status)99));
}

static void test_the_second_device(void) {
    struct oo_engine *engine, *none;
    uintptr_t stream;
    struct sim_device device, original;
    CHECK(sim.simSetDeviceCount(2) == 0 && sim.simGetDevice(1, &original) == 0, "no second device");
    device = original;
    snprintf(device.name, sizeof device.name, "Another Device");
    CHECK(sim.simSetDevice(1, &device) == 0, "not renamed");
    need(oo_engine_create(sim.path, 1, &engine), "create");
    CHECK(strcmp(oo_engine_device_name(engine), "Another Device") == 0, "%s",
          oo_engine_device_name(engine));
    CHECK(strcmp(oo_engine_pci_id(engine), "0000:F1:00.0") == 0, "%s", oo_engine_pci_id(engine));
    need(oo_engine_compute_stream(engine, &stream), "stream");
    CHECK(oo_engine_create(sim.path, 2, &none) == OO_E_NO_DEVICE, "device 2 of 2");
    CHECK(oo_engine_create(sim.path, -1, &none) == OO_E_NO_DEVICE, "device -1");
    need(oo_engine_destroy(engine), "destroy");
    CHECK(sim.simSetDevice(1, &original) == 0 && sim.simSetDeviceCount(1) == 0 &&
              sim_reset(&sim) == 0,
          "not reset");
}

static void test_residents_by_address(void) {
    struct world w;
    struct oo_resident rows[UNITS + 1];
    size_t count = 0, few = 0;
    world_open(&w, 400000, -1);
    need(step(&w), "step");
    struct oo_use use;
    struct oo_fetched fetched;
    need(oo_engine_acquire(w.engine, w.member[5], w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
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
    need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    world_close(&w, "residents");
}

static void test_figures_of_two_models(void) {
    struct world w, b;
    struct oo_stats all, first, second;
    world_open(&w, 60000, -1);
    memset(&b, 0, sizeof b);
    world_sizes(&b);
    b.engine = w.engine;
    CHECK(world_attach(&b, 60000, -1), "second model: %s", oo_error_message());
    need(step(&w), "first");
    need(use(&b, 0, OO_FORWARD), "second");
    double end_s;
    sim.simFinish(&end_s);
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
    need(oo_model_remove(b.engine, b.model), "remove");
    CHECK(oo_engine_stats(w.engine, b.model, &second) == OO_E_ARGUMENT, "a model that is gone");
    oo_host_destroy(b.host); /* unlocks */
    free(b.arena);
    world_close(&w, "two models");
}

/* ---- contexts, threads, capture ---- */

static void test_the_callers_context_is_left_as_it_was(void) {
    struct world w;
    OOCUcontext current = NULL;
    world_open(&w, 60000, -1);
    need(step(&w), "without a context");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == NULL, "the engine left its context behind");
    sim.cuCtxPushCurrent_v2(w.context);
    const uint64_t pushes = sim.simCallCount("cuCtxPushCurrent"),
                   pops = sim.simCallCount("cuCtxPopCurrent");
    need(step(&w), "with the context current already");
    CHECK(sim.simCallCount("cuCtxPushCurrent") == pushes &&
              sim.simCallCount("cuCtxPopCurrent") == pops,
          "the context is pushed although it is current");
    sim.cuCtxPopCurrent_v2(&current);
    CHECK(current == w.context, "the caller's context was popped");
    world_close(&w, "context");
}

/* A thread that computes on another device: its context comes back after every call. */
static void test_a_context_of_another_device(void) {
    struct world w;
    OOCUcontext other = NULL, current = NULL;
    CHECK(sim.simSetDeviceCount(2) == 0, "no second device");
    world_open(&w, 60000, -1);
    CHECK(sim.cuDevicePrimaryCtxRetain(&other, 1) == 0 && sim.cuCtxPushCurrent_v2(other) == 0,
          "no second context");
    need(step(&w), "under another context");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == other, "another context is current than before");
    sim.cuCtxPopCurrent_v2(NULL);
    sim.cuDevicePrimaryCtxRelease_v2(1);
    world_close(&w, "other context");
    CHECK(sim.simSetDeviceCount(1) == 0, "two devices");
}

/* A release succeeds even where the context cannot be made current, and pops none that it did not
 * push. */
static void test_a_release_without_a_context(void) {
    struct world w;
    OOCUcontext other = NULL, current = NULL;
    struct oo_use held;
    struct oo_fetched fetched;
    CHECK(sim.simSetDeviceCount(2) == 0, "no second device");
    world_open(&w, 60000, -1);
    CHECK(sim.cuDevicePrimaryCtxRetain(&other, 1) == 0 && sim.cuCtxPushCurrent_v2(other) == 0,
          "no second context");
    static const char *const calls[] = {"cuCtxPushCurrent", "cuCtxGetCurrent"};
    for (int i = 0; i < 2; i++) {
        need(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &held),
             "acquire");
        sim.simFault(calls[i], 1, OOCU_ERROR_UNKNOWN, 0);
        need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
        sim.cuCtxGetCurrent(&current);
        CHECK(current == other, "%s: the caller's context was popped", calls[i]);
        CHECK(oo_plan_pins(w.engine->plan, w.unit[0]) == 0, "still in use");
    }
    need(oo_model_remove(w.engine, w.model),
         "remove"); /* waits for the uses that could not be marked */
    CHECK(stats_of(&w).recoveries >= 1, "a lost use was not waited for");
    need(oo_model_add(w.engine, &w.model), "add");
    sim.cuCtxPopCurrent_v2(NULL);
    sim.cuDevicePrimaryCtxRelease_v2(1);
    world_close(&w, "release without a context");
    CHECK(sim.simSetDeviceCount(1) == 0, "two devices");
}

static void test_a_capturing_stream_is_refused(void) {
    struct world w;
    struct oo_use use;
    void *graph = NULL;
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    const uintptr_t stream = new_stream(&w);
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(sim.cuStreamBeginCapture_v2((OOCUstream)stream, 0) == 0, "no capture");
    const struct oo_stats before = stats_of(&w);
    CHECK(oo_engine_acquire(w.engine, w.member[0], stream, 0, OO_FORWARD, -1, 0, &use) ==
                  OO_E_CAPTURE &&
              strstr(oo_error_message(), "CUDA graph"),
          "%s", oo_error_message());
    CHECK(stats_of(&w).acquires == before.acquires, "a refused acquire is counted");
    CHECK(sim.cuStreamEndCapture((OOCUstream)stream, &graph) == 0, "the capture was broken");
    sim.cuGraphDestroy(graph);
    sim.cuCtxPopCurrent_v2(NULL);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, stream), "after the capture");
    end_stream(&w, stream);
    world_close(&w, "capture");
}

/* ---- which calls, and on which stream ---- */

static unsigned kernels_on(uintptr_t stream) {
    struct sim_trace_row row;
    unsigned count = 0;
    for (uint64_t i = 0; i < sim.simTraceCount(); i++)
        count += sim.simTraceRow(i, &row) == 0 && row.kind == SIM_KERNEL && row.stream == stream;
    return count;
}

static void test_declared_kernels_run_on_the_callers_stream(void) {
    struct world w;
    double end_s;
    char gradient[512], target[512];
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    sim.simSwitch(SIM_TRACE_ON, 1);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, stream), "use");
    sim.simFinish(&end_s);
    CHECK(kernels_on(stream) == 1 && sim.simTraceCount() >= 2, "%u kernels", kernels_on(stream));
    need(oo_engine_spin(w.engine, stream, 1000000), "spin");
    const double before = sim.simNow();
    sim.simFinish(&end_s);
    CHECK(kernels_on(stream) == 2 && fabs(end_s - before - 1e-3) < 1e-9, "%u kernels, %.9f s",
          kernels_on(stream), end_s - before);
    fill(gradient, sizeof gradient, 1);
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, stream),
         "download");
    sim.simFinish(&end_s);
    CHECK(kernels_on(stream) == 2, "a download queues %u kernels", kernels_on(stream) - 2);
    need(oo_engine_download(w.engine, target, 0, 0, stream), "an empty gradient");
    end_stream(&w, stream);
    world_close(&w, "declared kernels");
}

/* A driver without the simulator's extras computes with the embedded kernels. */
static void test_spin_by_the_embedded_kernels(void) {
    struct world w;
    double end_s;
    struct sim_device device;
    struct sim_live live;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    sim.simGetDevice(0, &device);
    w.engine->driver.simLaunch = NULL;
    const struct oo_driver whole = w.engine->driver;
    for (int lacks = 0; lacks < 4; lacks++) {
        struct oo_driver *driver = &w.engine->driver;
        driver->cuModuleLoadData = lacks == 0 ? NULL : whole.cuModuleLoadData;
        driver->cuModuleGetFunction = lacks == 1 ? NULL : whole.cuModuleGetFunction;
        driver->cuModuleUnload = lacks == 2 ? NULL : whole.cuModuleUnload;
        driver->cuLaunchKernel = lacks == 3 ? NULL : whole.cuLaunchKernel;
        CHECK(oo_engine_spin(w.engine, stream, 1000) == OO_E_STATE, "a driver without modules, %d",
              lacks);
    }
    w.engine->driver = whole;
    if (oo_kernels_fatbin_size == 0) {
        CHECK(oo_engine_spin(w.engine, stream, 1000) == OO_E_STATE &&
                  strstr(oo_error_message(), "nvcc"),
              "%s", oo_error_message());
    } else {
        sim.simFault("cuModuleGetFunction", 1, OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_engine_spin(w.engine, stream, 1000) == OO_E_DRIVER, "a kernel that is not found");
        sim.simSwitch(SIM_TRACE_ON, 1);
        for (int i = 0; i < 2; i++) {
            const double before = sim.simNow();
            need(oo_engine_spin(w.engine, stream, 2000000), "spin");
            sim.simFinish(&end_s);
            CHECK(fabs(end_s - before - 2e-3 - device.launch_s) < 1e-9, "%.9f s", end_s - before);
            CHECK(kernels_on(stream) == (unsigned)i + 1, "%u kernels", kernels_on(stream));
        }
        CHECK(sim.simCallCount("cuModuleLoadData") == 1, "loaded more than once");
        sim.simGetLive(&live);
        CHECK(live.modules == 1, "%llu modules", (unsigned long long)live.modules);
    }
    CHECK(oo_engine_launch(w.engine, w.member[0], stream, 1.0) == OO_OK,
          "a real driver needs no declaration");
    end_stream(&w, stream);
    world_close(&w, "spin");
}

/* ---- sweeps: when a master is hashed again ---- */

static void test_a_master_is_hashed_once_in_a_sweep(void) {
    struct world w;
    world_open(&w, 400000, -1);
    for (int i = 0; i < 2; i++)
        need(step(&w), "step");
    double end_s;
    sim.simFinish(&end_s); /* no copy reads the masters any more */
    uint64_t stale = stats_of(&w).stale;
    /* Inside one task the second use trusts the first; the hash is not paid again. */
    need(use_on(&w, 3, OO_RECOMPUTE, 7, 0, w.stream), "recompute");
    need(use_on(&w, 4, OO_RECOMPUTE, 7, 0, w.stream), "recompute");
    w.master[3][0] ^= 1;
    struct oo_use use;
    struct oo_fetched fetched;
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_BACKWARD, 7, 0, &use),
         "backward");
    need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    CHECK(stats_of(&w).stale == stale, "hashed twice in a sweep");
    /* Another task is another sweep. */
    need(use_on(&w, 3, OO_RECOMPUTE, 8, 0, w.stream), "next task");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite before the next task was missed");
    /* From task to forward, and back. */
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite before the forward was missed");
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_RECOMPUTE, 8, 0, w.stream), "the same task after a forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite between forward and backward was missed");
    /* Without tasks a unit that comes again begins a new sweep. */
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "next forward");
    CHECK(stats_of(&w).stale == ++stale, "a rewrite between two forwards was missed");
    /* What comes first in a sweep does not end it for the others. */
    need(use_on(&w, 5, OO_FORWARD, -1, 0, w.stream), "forward");
    const uint64_t sweep = w.engine->sweep;
    need(use_on(&w, 6, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(w.engine->sweep == sweep, "a sweep for every unit");
    world_close(&w, "sweeps");
}

static void test_only_a_forward_ends_the_hold(void) {
    struct world w;
    world_open(&w, 400000, 20);
    need(step(&w), "step");
    need(oo_engine_hold(w.engine), "hold");
    need(use(&w, 0, OO_RECOMPUTE), "recompute");
    need(use(&w, 0, OO_BACKWARD), "backward");
    CHECK(w.engine->held == 1, "a backward ended the hold");
    need(use(&w, 0, OO_FORWARD), "forward");
    CHECK(w.engine->held == 0, "a forward did not end the hold");
    need(oo_unit_set_trainable(w.engine, w.unit[2], 1), "set_trainable");
    need(oo_engine_hold(w.engine), "hold");
    CHECK(!oo_plan_resident(w.engine->plan, w.unit[2]) &&
              oo_plan_resident(w.engine->plan, w.unit[3]),
          "hold dropped the wrong units");
    CHECK(oo_unit_set_trainable(w.engine, 1000, 1) == OO_E_ARGUMENT, "no such unit");
    need(oo_engine_resume(w.engine), "resume");
    world_close(&w, "hold");
}

/* ---- measured time, to the nanosecond ---- */

static void test_a_stall_is_what_the_stream_waits_for_its_copy(void) {
    struct world w;
    struct sim_device device;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    const size_t bytes =
        8u << 20; /* a copy far longer than the floor under which a stall is none */
    const uint32_t one = 1;
    uint32_t unit, member, model;
    size_t offset;
    struct oo_host *host;
    char *arena = malloc(bytes + OO_ALIGNMENT);
    need(oo_host_create(bytes, &host), "host");
    need(oo_engine_lock(w.engine, host, 1), "lock");
    need(oo_model_add(w.engine, &model), "model");
    need(oo_segment_add(w.engine, model, (uintptr_t)arena, bytes + OO_ALIGNMENT, stream),
         "segment");
    const struct oo_tensor tensor = {oo_host_address(host), bytes};
    need(oo_unit_add(w.engine, model, &tensor, &one, 1, 0, &unit, &member, &offset), "unit");
    sim.simGetDevice(0, &device);
    const double copy = device.copy_latency_s + (double)bytes / (device.link_gbps * 1e9);
    kernel(stream, NULL, 0, 0, 100e-6); /* the stream is busy for a part of the copy */
    kernel((uintptr_t)w.engine->d2h, NULL, 0, 0,
           5e-3); /* and so, later, is the other copy stream */
    const double origin = sim.simNow();
    need(oo_trace_start(w.engine), "trace");
    struct oo_use use;
    struct oo_fetched fetched;
    need(oo_engine_acquire(w.engine, member, stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_launch(w.engine, member, stream, 300e-6), "launch");
    need(oo_engine_release(w.engine, use.ticket, stream, 0, &fetched), "release");
    /* The same again, at once: its compute begins where the first one ends, and waits for no copy.
     */
    need(oo_engine_acquire(w.engine, member, stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_launch(w.engine, member, stream, 200e-6), "launch");
    need(oo_engine_release(w.engine, use.ticket, stream, 0, &fetched), "release");
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
    need(oo_engine_acquire(w.engine, member, stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_release(w.engine, use.ticket, stream, 0, &fetched), "release");
    double end_s;
    sim.simFinish(&end_s);
    need(oo_engine_stats(w.engine, model, &stats), "stats");
    CHECK(stats.stalls == 1 && end_s > origin, "%llu stalls", (unsigned long long)stats.stalls);
    need(oo_model_remove(w.engine, model), "remove");
    oo_host_destroy(host);
    free(arena);
    CHECK(oo_trace_stop(w.engine, &rows, &count) == OO_E_STATE, "no timeline");
    end_stream(&w, stream);
    world_close(&w, "stall");
}

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

static struct oo_use begin_use(struct world *w, uintptr_t stream, double seconds) {
    struct oo_use use = {0};
    need(oo_engine_acquire(w->engine, w->member[0], stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_launch(w->engine, w->member[0], stream, seconds), "launch");
    return use;
}

static void end_use(struct world *w, const struct oo_use *use, uintptr_t stream) {
    struct oo_fetched fetched;
    need(oo_engine_release(w->engine, use->ticket, stream, 0, &fetched), "release");
}

/* Streams that share a unit have a row each, from where they begin with it to where they end. */
static void test_each_stream_has_its_own_row_of_a_unit_in_the_timeline(void) {
    struct world w;
    double end_s;
    world_open(&w, 200000, -1); /* all is resident: no copy is in the way */
    const uintptr_t a = new_stream(&w), b = new_stream(&w);
    need(step(&w), "step");
    for (int i = 0; i < 2; i++) { /* no stream waits for the copy any more */
        const struct oo_use use = begin_use(&w, i ? a : b, 0.0);
        end_use(&w, &use, i ? a : b);
    }
    sim.simFinish(&end_s);
    need(oo_trace_start(w.engine), "trace");
    kernel(b, NULL, 0, 0, 50e-6);
    const struct oo_use on_a = begin_use(&w, a, 300e-6);  /* kernels take turns: 50 to 350 us */
    const struct oo_use on_b = begin_use(&w, b, 100e-6);  /* 350 to 450 us */
    const struct oo_use nested = begin_use(&w, a, 20e-6); /* 450 to 470 us, queued at 350 us */
    end_use(&w, &on_b, b);
    end_use(&w, &on_a, a);
    end_use(&w, &nested, a);
    const double first[][2] = {{50e-6, 450e-6}, {0, 470e-6}, {350e-6, 470e-6}};
    check_compute_rows(&w, w.unit[0], first, 3);

    /* A use that ends on another stream has no row; nor has one that began in an earlier timeline.
     * More than four at a time: the fifth has none. */
    sim.simFinish(&end_s);
    need(oo_trace_start(w.engine), "trace again");
    const struct oo_use crossing = begin_use(&w, a, 10e-6);
    end_use(&w, &crossing, b);
    const struct oo_use lasting = begin_use(&w, a, 10e-6);
    check_compute_rows(&w, w.unit[0], NULL, 0);
    sim.simFinish(&end_s);
    need(oo_trace_start(w.engine), "a third time");
    end_use(&w, &lasting, a);
    struct oo_use uses[5];
    for (int i = 0; i < 5; i++)
        uses[i] = begin_use(&w, b, 10e-6);
    for (int i = 0; i < 5; i++)
        end_use(&w, &uses[i], b);
    const double third[][2] = {{0, 50e-6}, {10e-6, 50e-6}, {20e-6, 50e-6}, {30e-6, 50e-6}};
    sim.simFinish(&end_s);
    check_compute_rows(&w, w.unit[0], third, 4);

    /* An acquire whose row cannot begin fails, and leaves none behind. */
    struct oo_use none;
    sim.simAdvance(1e-3); /* what any event recorded before now would be seen by */
    need(oo_trace_start(w.engine), "a fourth time");
    sim.simFault("cuEventRecord", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_acquire(w.engine, w.member[0], a, 0, OO_FORWARD, -1, 0, &none) == OO_E_DRIVER,
          "acquired without its row's begin");
    const struct oo_use alone = begin_use(&w, a, 10e-6);
    end_use(&w, &alone, a);
    const double fourth[][2] = {{0, 10e-6}};
    check_compute_rows(&w, w.unit[0], fourth, 1);
    end_stream(&w, a);
    end_stream(&w, b);
    world_close(&w, "rows of a shared unit");
}

/* Starting and stopping may fail, and can be repeated. */
static void test_a_timeline_that_fails_can_be_repeated(void) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 60000, -1);
    sim.simFault("cuEventRecord", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_trace_start(w.engine) == OO_E_DRIVER && !w.engine->spans.tracing,
          "started all the same");
    need(oo_trace_start(w.engine), "start again");
    need(step(&w), "step");
    const uint64_t waits = stats_of(&w).host_waits;
    sim.simFault("cuEventSynchronize", 1, OOCU_ERROR_UNKNOWN, 0);
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
static void test_a_timeline_begins_on_the_upload_stream(void) {
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

/* ---- tensors of a unit ---- */

/* Members of several tensors; gaps, shared masters and foreign memory: each tensor's bytes at its
 * offset. */
static void test_units_of_several_members_and_tensors(void) {
    struct world w;
    uint32_t unit, members[3];
    size_t offsets[6];
    const uint32_t n_tensors[3] = {2, 3, 1};
    world_open(&w, 60000, -1);
    char *base = oo_host_address(w.host), *foreign = malloc(700);
    fill(foreign, 700, 3);
    const struct oo_tensor tensors[6] = {
        {base, 1000},             /* travels with the next one: */
        {base + 1024, 300},       /* congruent to the device layout */
        {base + 1024 + 768, 100}, /* a hole: not congruent */
        {base, 1000},             /* tied to the first */
        {foreign, 700},           /* unknown to the engine */
        {base + 8192, 4096},
    };
    need(oo_unit_add(w.engine, w.model, tensors, n_tensors, 3, 0, &unit, members, offsets), "unit");
    CHECK(w.engine->units[unit].n_parts == 5, "%u parts", w.engine->units[unit].n_parts);
    for (int m = 0; m < 3; m++) {
        struct oo_use use;
        struct oo_fetched fetched;
        need(oo_engine_acquire(w.engine, members[m], w.stream, 0, OO_FORWARD, -1, 0, &use),
             "acquire");
        need(oo_engine_launch(w.engine, members[m], w.stream, 1e-6), "launch");
        for (int t = 0; t < 6; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], tensors[t].host,
                         tensors[t].bytes) == 0 &&
                      offsets[t] % OO_ALIGNMENT == 0,
                  "tensor %d is not at offset %zu", t, offsets[t]);
        need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    }
    CHECK(stats_of(&w).pageable_bytes == 700, "%llu pageable",
          (unsigned long long)stats_of(&w).pageable_bytes);
    const struct oo_stamp stamps[] = {{1000, 9}, {members[0], 8}, {members[1], 9}};
    need(oo_engine_stamp(w.engine, stamps + 1, 2), "stamp");
    CHECK(w.engine->members[members[0]].stamp == 8 && w.engine->members[members[1]].stamp == 9,
          "not stamped");
    need(oo_engine_stamp(w.engine, stamps, 0), "no stamps");
    w.engine->members[members[1]].stamp = 0;
    CHECK(oo_engine_stamp(w.engine, stamps, 3) == OO_E_STATE, "no such member");
    CHECK(w.engine->members[members[1]].stamp == 9,
          "one unknown member keeps the others unstamped");
    CHECK(oo_unit_add(w.engine, w.model, tensors, n_tensors, 0, 0, &unit, members, offsets) ==
              OO_E_ARGUMENT,
          "no members");
    free(foreign);
    world_close(&w, "members");
}

static void test_a_nonblocking_call_never_waits(void) {
    struct world w;
    struct oo_use use;
    struct oo_fetched fetched;
    sim.simRefuseRegistration(1);
    world_open(&w, 60000, -1);
    CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, OO_NONBLOCKING,
                            &use) == OO_WOULD_BLOCK,
          "a unit behind the ring without waiting");
    need(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    CHECK(use.fetched.count == 1 && use.fetched.units[0] == w.unit[0], "%u fetched",
          use.fetched.count);
    need(oo_engine_release(w.engine, use.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    CHECK(fetched.count == 0 && fetched.more == 1, "%u fetched, more %d", fetched.count,
          fetched.more);
    need(oo_engine_prefetch(w.engine, &fetched), "prefetch");
    CHECK(fetched.count > 0 && fetched.count <= OO_MAX_FETCHED, "%u fetched", fetched.count);
    sim.simRefuseRegistration(0);
    uint32_t unit;
    size_t offset;
    char *foreign = malloc(w.bytes[7]);
    const struct oo_tensor tensor = {foreign, w.bytes[7]};
    fill(foreign, w.bytes[7], 5);
    need(oo_member_move(w.engine, w.member[7], &tensor, 1, &unit, &offset), "move");
    CHECK(oo_engine_acquire(w.engine, w.member[7], w.stream, 0, OO_FORWARD, -1, OO_NONBLOCKING,
                            &use) == OO_WOULD_BLOCK,
          "a unit in memory that nobody knows without waiting");
    free(foreign);
    world_close(&w, "nonblocking");
}

static void test_no_more_than_eight_copies_in_a_call(void) {
    struct world w;
    struct oo_use use;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    need(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
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

static void continue_while_held(struct world *w, uint64_t first) {
    struct oo_use again;
    struct oo_fetched fetched;
    need(oo_engine_acquire(w->engine, w->member[3], w->stream, 0, OO_RECOMPUTE, 1, 0, &again),
         "joins in");
    need(oo_engine_release(w->engine, first, w->stream, 0, &fetched), "release");
    CHECK(oo_plan_resident(w->engine->plan, w->unit[3]) != NULL, "dropped under a use");
    need(oo_engine_release(w->engine, again.ticket, w->stream, 0, &fetched), "release");
    CHECK(oo_plan_resident(w->engine->plan, w->unit[3]) == NULL, "not dropped after the last use");
}

/* What is being computed with stays, and is stale from then on; everything else is dropped at once.
 */
static void test_what_is_in_use_becomes_stale(void) {
    struct world w;
    struct oo_use held, again;
    struct oo_fetched fetched;
    world_open(&w, 400000, 0);
    for (int how = 0; how < 3; how++) { /* hold is milder: see test_engine.c */
        double end_s;
        need(oo_engine_resume(w.engine), "resume");
        need(step(&w), "step");
        sim.simFinish(&end_s);
        need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held),
             "acquire");
        if (how == 0)
            need(oo_engine_refresh(w.engine, w.model), "refresh");
        else if (how == 1)
            need(oo_engine_refresh(w.engine, OO_ALL_MODELS), "refresh");
        CHECK(stats_of(&w).resident_units == (how == 2 ? UNITS : 1), "%d: %llu resident", how,
              (unsigned long long)stats_of(&w).resident_units);
        CHECK(oo_engine_acquire(w.engine, w.member[3], w.stream, how == 2 ? 1 : 0, OO_RECOMPUTE, 1,
                                0, &again) == OO_E_STATE &&
                  strstr(oo_error_message(), "rewritten"),
              "%d: %s", how, oo_error_message());
        need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
        const uint64_t stale = stats_of(&w).stale;
        for (int i = 0; i < 2; i++) {
            need(use(&w, 3, OO_BACKWARD), "use");
            CHECK(stats_of(&w).stale == stale + 1, "%d: %llu stale", how,
                  (unsigned long long)(stats_of(&w).stale - stale));
        }
    }
    /* An optimizer will rewrite it: whoever computes now, and joins in, has the old weights. */
    double end_s;
    sim.simFinish(&end_s);
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held),
         "acquire");
    need(oo_engine_hold(w.engine), "hold");
    const uint64_t never = stats_of(&w).stale;
    continue_while_held(&w, held.ticket);
    for (int i = 0; i < 2; i++)
        need(use(&w, 3, OO_BACKWARD), "use");
    CHECK(stats_of(&w).stale == never, "stale although it was dropped");
    /* Where it cannot be dropped it stays, and is not trusted. */
    sim.simFinish(&end_s);
    need(oo_engine_resume(w.engine), "resume");
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_RECOMPUTE, 1, 0, &held),
         "acquire");
    need(oo_engine_hold(w.engine), "hold");
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_UNKNOWN, 0);
    need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
    const uint64_t before = stats_of(&w).stale;
    need(use(&w, 3, OO_BACKWARD), "use");
    CHECK(stats_of(&w).stale == before + 1, "trusted");
    need(oo_engine_refresh(w.engine, w.model + 1), "a model that is none");
    CHECK(stats_of(&w).resident_units > 0, "dropped another model's units");
    CHECK(oo_engine_release(w.engine, UINT64_C(1) << 32 | 5000, w.stream, 0, &fetched) ==
              OO_E_TICKET,
          "no such unit");
    CHECK(oo_engine_release(w.engine, w.unit[3], w.stream, 0, &fetched) == OO_E_TICKET,
          "an old generation");
    CHECK(oo_engine_launch(w.engine, 5000, w.stream, 0) == OO_E_STATE, "no such member");
    CHECK(oo_engine_set_verify(w.engine, 1) == OO_OK && oo_engine_set_verify(w.engine, 0) == OO_OK,
          "verify");
    world_close(&w, "in use");
}

/* An acquire that also launches: the copy has arrived when it returns, and a launch that fails ends
 * the use, whose copies nobody could stamp. */
static void test_an_acquire_that_launches(void) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    need(oo_engine_acquire_launched(w.engine, w.member[2], w.stream, 0, OO_FORWARD, -1, 1e-6, 0,
                                    &held),
         "acquire");
    CHECK(memcmp((const void *)held.address, w.master[2], w.bytes[2]) == 0, "not there yet");
    need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    sim.simFault("simLaunch", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_acquire_launched(w.engine, w.member[2], w.stream, 0, OO_FORWARD, -1, 1e-6, 0,
                                     &held) == OO_E_DRIVER,
          "launched in spite of a fault");
    CHECK(strstr(oo_error_message(), "simLaunch"), "%s", oo_error_message());
    CHECK(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched) == OO_E_TICKET,
          "the use goes on");
    const uint64_t before = stats_of(&w).stale;
    need(use(&w, 2, OO_FORWARD), "use");
    CHECK(stats_of(&w).stale == before + 1, "a copy that was never stamped is trusted");
    CHECK(oo_engine_acquire_launched(w.engine, 5000, w.stream, 0, OO_FORWARD, -1, 0, 0, &held) ==
              OO_E_STATE,
          "no such member");
    world_close(&w, "launched");
}

/* The unit may be in use by others by now: their use is not his to end. */
static void test_a_ticket_of_an_earlier_copy_ends_no_use(void) {
    struct world w;
    struct oo_use first, second;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_FORWARD, -1, 0, &first), "first");
    need(oo_engine_release(w.engine, first.ticket, w.stream, 0, &fetched), "release");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_FORWARD, -1, 0, &second),
         "second");
    CHECK(first.ticket != second.ticket, "two copies with one ticket");
    CHECK(oo_engine_release(w.engine, first.ticket, w.stream, 0, &fetched) == OO_E_TICKET,
          "the ticket of an earlier copy ended a use");
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 1, "%u uses",
          oo_plan_pins(w.engine->plan, w.unit[3]));
    need(oo_engine_release(w.engine, second.ticket, w.stream, 0, &fetched), "release");
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 0, "still in use");
    world_close(&w, "tickets");
}

static void test_what_was_removed_is_known_no_more(void) {
    struct world w;
    struct oo_use use;
    struct oo_stats stats;
    uint32_t unit, model;
    size_t offset;
    world_open(&w, 60000, -1);
    need(oo_model_add(w.engine, &model), "a model that stays");
    need(oo_model_remove(w.engine, w.model), "remove");
    const struct oo_tensor tensor = {w.master[0], w.bytes[0]};
    const uint32_t gone[] = {w.member[0], UINT32_MAX - 1}, one = 1;
    for (int i = 0; i < 2; i++) {
        CHECK(oo_engine_acquire(w.engine, gone[i], w.stream, 0, OO_FORWARD, -1, 0, &use) ==
                  OO_E_STATE,
              "acquired");
        CHECK(oo_engine_stamp(w.engine, &(struct oo_stamp){gone[i], 1}, 1) == OO_E_STATE,
              "stamped");
        CHECK(oo_engine_launch(w.engine, gone[i], w.stream, 0) == OO_E_STATE, "launched");
        CHECK(oo_member_move(w.engine, gone[i], &tensor, 1, &unit, &offset) == OO_E_ARGUMENT,
              "moved");
    }
    struct oo_fetched fetched;
    CHECK(oo_engine_release(w.engine, UINT64_C(1) << 32 | (UINT32_MAX - 1), w.stream, 0,
                            &fetched) == OO_E_TICKET,
          "a ticket of no unit");
    const uint32_t no_unit[] = {w.unit[0], UINT32_MAX - 1};
    const uint32_t no_model[] = {w.model, UINT32_MAX - 1};
    for (int i = 0; i < 2; i++) {
        CHECK(oo_unit_set_trainable(w.engine, no_unit[i], 1) == OO_E_ARGUMENT, "set trainable");
        CHECK(oo_engine_stats(w.engine, no_model[i], &stats) == OO_E_ARGUMENT, "figures");
        CHECK(oo_model_remove(w.engine, no_model[i]) == OO_E_ARGUMENT, "removed twice");
        CHECK(oo_unit_add(w.engine, no_model[i], &tensor, &one, 1, 0, &unit, &unit, &offset) ==
                  OO_E_ARGUMENT,
              "a unit of no model");
    }
    need(oo_model_remove(w.engine, model), "remove");
    need(oo_model_add(w.engine, &w.model), "for the end");
    world_close(&w, "removed");
}

/* A model may go while units are computed with, if none is its own and none lies in its memory. */
static void test_who_is_in_the_way_of_a_detach(void) {
    struct world w;
    struct oo_use use;
    struct oo_fetched fetched;
    uint32_t guest, lender, unit, member, one = 1;
    size_t offset;
    char *memory = malloc(4096 + OO_ALIGNMENT);
    world_open(&w, 250000, -1);
    need(oo_model_add(w.engine, &guest), "a model whose unit lies in the other's memory");
    const struct oo_tensor tensor = {w.master[0], w.bytes[0]};
    need(oo_unit_add(w.engine, guest, &tensor, &one, 1, 0, &unit, &member, &offset), "unit");
    need(oo_engine_acquire(w.engine, member, w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_model_add(w.engine, &lender), "a model with memory and no unit");
    need(oo_segment_add(w.engine, lender, (uintptr_t)memory, 4096 + OO_ALIGNMENT, w.stream),
         "segment");
    CHECK(oo_model_remove(w.engine, guest) == OO_E_STATE, "its unit is in use");
    CHECK(oo_model_remove(w.engine, w.model) == OO_E_STATE, "what is in use lies in its memory");
    need(oo_model_remove(w.engine, lender), "nothing of it is in use");
    need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    need(oo_model_remove(w.engine, guest), "remove");
    free(memory);
    world_close(&w, "in the way");
}

static void test_a_lock_that_loses_the_context_names_itself(void) {
    struct oo_engine *engine;
    struct oo_host *host;
    need(oo_engine_create(sim.path, 0, &engine), "create");
    need(oo_host_create(4096, &host), "host memory");
    sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(oo_engine_lock(engine, host, 1) == OO_E_DRIVER &&
              strstr(oo_error_message(), "cuMemHostRegister") == oo_error_message() &&
              strstr(oo_error_message(), "restart"),
          "%s", oo_error_message());
    need(oo_host_destroy(host), "it is nobody's");
    CHECK(oo_engine_destroy(engine) == OO_LEAKED, "nobody was told");
    sim.simFaultClear();
    release_leaked_contexts();
    CHECK(sim_reset(&sim) == 0, "not reset");
}

static void test_an_engine_with_a_model_and_no_memory_is_not_destroyed(void) {
    struct oo_engine *engine;
    uint32_t model;
    need(oo_engine_create(sim.path, 0, &engine), "create");
    need(oo_model_add(engine, &model), "model");
    CHECK(oo_engine_destroy(engine) == OO_E_STATE, "destroyed with a model");
    need(oo_model_remove(engine, model), "remove");
    need(oo_engine_destroy(engine), "destroy");
    check_nothing_alive("a model alone");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* One copy reads one registration, and of memory that nobody knows only what it was told of. */
static void test_what_travels_as_one_copy(void) {
    struct world w;
    struct oo_host *pages[16];
    uint32_t unit, member;
    size_t offsets[2];
    const uint32_t two = 2;
    unsigned n = 0, below = 0, above = 0;
    world_open(&w, 250000, -1);
    for (; n < 16 && !above; n++) { /* two that follow each other in memory */
        need(oo_host_create(4096, &pages[n]), "a page");
        need(oo_engine_lock(w.engine, pages[n], 1), "lock");
        fill(oo_host_address(pages[n]), 4096, n);
        for (unsigned i = 0; i < n; i++) {
            const char *a = oo_host_address(pages[i]), *b = oo_host_address(pages[n]);
            if (a + 4096 == b || b + 4096 == a) {
                below = a < b ? i : n;
                above = a < b ? n : i;
            }
        }
    }
    char *foreign = malloc(1024);
    fill(foreign, 1024, 3);
    for (int how = 0; how < 2; how++) {
        if (how == 0 && below == above)
            continue; /* no two pages lie side by side here */
        const struct oo_tensor tensors[] = {
            {how ? foreign : oo_host_address(pages[below]), how ? 100 : 4096},
            {how ? foreign + OO_ALIGNMENT : oo_host_address(pages[above]), how ? 100 : 4096}};
        need(oo_unit_add(w.engine, w.model, tensors, &two, 1, 0, &unit, &member, offsets), "unit");
        const uint64_t before = stats_of(&w).h2d_copies;
        struct oo_use use;
        struct oo_fetched fetched;
        need(oo_engine_acquire(w.engine, member, w.stream, 0, OO_BACKWARD, 1, 0, &use), "acquire");
        need(oo_engine_launch(w.engine, member, w.stream, 1e-6), "launch");
        CHECK(stats_of(&w).h2d_copies == before + 2, "%d: %llu copies", how,
              (unsigned long long)(stats_of(&w).h2d_copies - before));
        for (int t = 0; t < 2; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], tensors[t].host,
                         tensors[t].bytes) == 0,
                  "%d: tensor %d has wrong bytes", how, t);
        need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    }
    need(oo_model_remove(w.engine, w.model), "remove");
    for (unsigned i = 0; i < n; i++)
        need(oo_host_destroy(pages[i]), "destroy");
    free(foreign);
    need(oo_model_add(w.engine, &w.model), "for the end");
    world_close(&w, "one copy");
}

/* Less than one line of the hash: all of it is. */
static void test_a_change_of_a_few_bytes_is_seen(void) {
    enum { BYTES = 40 };
    struct world w;
    uint32_t unit, member;
    size_t offset;
    const uint32_t one = 1;
    world_open(&w, 250000, -1);
    const struct oo_tensor tensor = {w.master[4], BYTES};
    need(oo_unit_add(w.engine, w.model, &tensor, &one, 1, 0, &unit, &member, &offset), "unit");
    for (unsigned i = 0; i < BYTES; i++) {
        struct oo_use use;
        struct oo_fetched fetched;
        double end_s;
        need(oo_engine_acquire(w.engine, member, w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
        need(oo_engine_launch(w.engine, member, w.stream, 1e-6), "launch");
        CHECK(memcmp((const void *)use.address, w.master[4], BYTES) == 0, "byte %u is old", i - 1);
        need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
        sim.simFinish(&end_s);
        w.master[4][i] ^= 1;
    }
    world_close(&w, "a few bytes");
}

/* A unit is kept for a member that moves if it was alone there, and all else is as it was. */
static void test_a_member_that_moves_keeps_its_unit_only_alone_and_alike(void) {
    struct world w;
    uint32_t unit, moved, members[2];
    size_t offsets[4];
    world_open(&w, 250000, -1);
    char *bytes = w.master[4]; /* of 20480 bytes at least */
    const struct oo_tensor pair[] = {{bytes, 512}, {bytes + 512, 512}}, whole = {bytes, 1024};
    const struct oo_tensor larger = {bytes, 2048}, halves[] = {{bytes + 256, 1024}, {bytes, 1024}};
    const uint32_t ones[] = {1, 1};
    const struct {
        const struct oo_tensor *to;
        uint32_t count;
        int stays;
        const char *what;
    } moves[] = {{&whole, 1, 0, "it was not alone"},  {&whole, 1, 1, "alone and alike"},
                 {&larger, 1, 0, "larger"},           {halves, 2, 0, "as large, in two"},
                 {&larger, 1, 0, "as large, in one"}, {&larger, 1, 1, "alike again"}};
    need(oo_unit_add(w.engine, w.model, pair, ones, 2, 0, &unit, members, offsets), "unit");
    for (unsigned i = 0; i < sizeof moves / sizeof moves[0]; i++) {
        struct oo_use use;
        struct oo_fetched fetched;
        need(oo_member_move(w.engine, members[0], moves[i].to, moves[i].count, &moved, offsets),
             moves[i].what);
        CHECK((moved == unit) == moves[i].stays, "%s: unit %u becomes %u", moves[i].what, unit,
              moved);
        unit = moved;
        CHECK(stats_of(&w).units == UNITS + 2, "%s: %llu units", moves[i].what,
              (unsigned long long)stats_of(&w).units);
        need(oo_engine_acquire(w.engine, members[0], w.stream, 0, OO_BACKWARD, 1, 0, &use),
             "acquire");
        need(oo_engine_launch(w.engine, members[0], w.stream, 1e-6), "launch");
        for (uint32_t t = 0; t < moves[i].count; t++)
            CHECK(memcmp((const char *)use.address + offsets[t], moves[i].to[t].host,
                         moves[i].to[t].bytes) == 0,
                  "%s: wrong bytes", moves[i].what);
        need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    }
    world_close(&w, "moves");
}

/* Fingerprints are compared at a member's first use after each turn, of one graph task too. */
static void test_each_turn_between_forward_and_task_begins_a_sweep(void) {
    struct world w;
    double end_s;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_RECOMPUTE), "recompute");
    need(use(&w, 5, OO_FORWARD), "a forward in between, of another unit");
    sim.simFinish(&end_s);
    fill(w.master[3], w.bytes[3], 77);
    need(use(&w, 3, OO_BACKWARD), "the same task");
    CHECK(stats_of(&w).stale == 1, "%llu stale hits", (unsigned long long)stats_of(&w).stale);
    world_close(&w, "turns");
}

/* A stream that is known has its entry, however many there are: no other's is given up for it. */
static void test_one_use_more_on_a_known_stream_displaces_nobody(void) {
    struct world w;
    struct oo_use use[OO_STREAMS], again;
    struct oo_fetched fetched;
    uintptr_t streams[OO_STREAMS];
    world_open(&w, 400000, -1);
    for (int i = 0; i < OO_STREAMS; i++) {
        streams[i] = new_stream(&w);
        need(oo_engine_acquire(w.engine, w.member[3], streams[i], 0, OO_FORWARD, -1, 0, &use[i]),
             "acquire");
        need(oo_engine_launch(w.engine, w.member[3], streams[i], 5e-3), "launch");
    }
    for (int i = 0; i < OO_STREAMS; i++)
        need(oo_engine_release(w.engine, use[i].ticket, streams[i], 0, &fetched), "release");
    need(oo_engine_acquire(w.engine, w.member[3], streams[0], 0, OO_FORWARD, -1, 0, &again),
         "acquire");
    need(oo_engine_release(w.engine, again.ticket, streams[0], 0, &fetched), "release");
    CHECK(w.engine->units[w.unit[3]].n_uses == OO_STREAMS, "%u entries",
          w.engine->units[w.unit[3]].n_uses);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "over all of their kernels");
    for (int i = 0; i < OO_STREAMS; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "known streams");
}

/* Without a context no mark can be set, and nothing of it is tried. */
/* A hit whose copy the stream has waited for already: the timeline alone would record more. */
static void test_a_hit_records_no_event_without_a_timeline(void) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    need(use(&w, 3, OO_FORWARD), "copy");
    const uint64_t records = sim.simCallCount("cuEventRecord");
    need(oo_engine_acquire(w.engine, w.member[3], w.stream, 0, OO_FORWARD, -1, 0, &held), "hit");
    CHECK(sim.simCallCount("cuEventRecord") == records, "%llu records",
          (unsigned long long)(sim.simCallCount("cuEventRecord") - records));
    need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
    world_close(&w, "hit");
}

static void test_a_release_without_a_context_asks_the_driver_for_nothing(void) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent", "cuEventCreate",
                                        "cuEventQuery", "cuEventElapsedTime"};
    struct world w;
    struct oo_use use[OO_STREAMS + 1];
    struct oo_fetched fetched;
    uintptr_t streams[OO_STREAMS + 1];
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 400000, -1);
    need(oo_trace_start(w.engine), "timeline");
    for (int i = 0; i <= OO_STREAMS; i++) {
        streams[i] = new_stream(&w);
        need(oo_engine_acquire(w.engine, w.member[3], streams[i], 0, OO_FORWARD, -1, 0, &use[i]),
             "acquire");
        need(oo_engine_launch(w.engine, w.member[3], streams[i], 1e-3), "launch");
    }
    for (int i = 0; i <= OO_STREAMS; i++) {
        uint64_t before[5];
        for (int c = 0; c < 5; c++)
            before[c] = sim.simCallCount(calls[c]);
        struct oo_event *pool = NULL, **end = &w.engine->spans.free_events;
        if (i == 1 || i == OO_STREAMS) {
            sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_UNKNOWN, 0);
            pool = *end; /* with none in reserve, an event would have to be created */
            *end = NULL;
        }
        need(oo_engine_release(w.engine, use[i].ticket, streams[i], 0, &fetched), "release");
        while (*end)
            end = &(*end)->next;
        *end = pool;
        for (int c = 0; c < 5 && (i == 1 || i == OO_STREAMS); c++)
            CHECK(sim.simCallCount(calls[c]) == before[c], "release %d calls %s", i, calls[c]);
    }
    need(oo_engine_acquire(w.engine, w.member[3], streams[2], 0, OO_FORWARD, -1, 0, &use[0]),
         "on a stream that has its mark");
    const uint64_t records = sim.simCallCount("cuEventRecord");
    sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_UNKNOWN, 0);
    need(oo_engine_release(w.engine, use[0].ticket, streams[2], 0, &fetched), "release");
    CHECK(sim.simCallCount("cuEventRecord") == records, "a mark was tried");
    for (int i = 0; i < 2; i++)
        need(step(&w), "what comes next is known");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(oo_engine_acquire(w.engine, w.member[0], streams[2], 0, OO_FORWARD, -1, 0, &use[0]),
         "with much to fetch ahead");
    sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_UNKNOWN, 0);
    need(oo_engine_release(w.engine, use[0].ticket, streams[2], 0, &fetched), "release");
    CHECK(fetched.count == 0 && stats_of(&w).prefetch_failures == 0, "a copy was tried");
    need(oo_trace_stop(w.engine, &rows, &count), "rows");
    oo_trace_free(rows);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "over all of their kernels");
    for (int i = 0; i <= OO_STREAMS; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "no context");
}

/* A member that could not be moved is copied from where it was. */
static void test_a_move_that_fails_changes_nothing(void) {
    struct world w;
    uint32_t unit, members[2];
    size_t offsets[2];
    unsigned failed = 0;
    world_open(&w, 400000, -1);
    char *elsewhere = malloc(w.bytes[0] + w.bytes[1]);
    const struct oo_tensor home[] = {{w.master[0], w.bytes[0]}, {w.master[1], w.bytes[1]}};
    const struct oo_tensor other[] = {{elsewhere, w.bytes[0]},
                                      {elsewhere + w.bytes[0], w.bytes[1]}};
    const uint32_t ones[] = {1, 1};
    fill(elsewhere, w.bytes[0] + w.bytes[1], 123);
    need(oo_unit_add(w.engine, w.model, home, ones, 2, 0, &unit, members, offsets), "two members");
    for (enum oo_status status = OO_E_DRIVER; status != OO_OK; failed++) {
        sim.simFault("cuEventCreate", 1 + failed, OOCU_ERROR_OUT_OF_MEMORY, 0);
        status = oo_member_move(w.engine, members[0], other, 2, &unit, offsets);
        sim.simFaultClear();
        if (status == OO_OK)
            break;
        CHECK(status == OO_E_DRIVER && strstr(oo_error_message(), "cuEventCreate"), "%s",
              oo_error_message());
        for (int i = 0; i < 2; i++) {
            struct oo_use use;
            struct oo_fetched fetched;
            need(oo_engine_acquire(w.engine, members[i], w.stream, 0, OO_FORWARD, -1, 0, &use),
                 "acquire");
            need(oo_engine_launch(w.engine, members[i], w.stream, 1e-6), "launch");
            const size_t offset = i ? w.bytes[0] : 0;
            CHECK(memcmp((const char *)use.address + offset, w.master[i], w.bytes[i]) == 0,
                  "member %d has other bytes after a failed move", i);
            need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
        }
    }
    CHECK(failed == 2, "%u moves failed", failed);
    struct oo_use use;
    struct oo_fetched fetched;
    need(oo_engine_acquire(w.engine, members[0], w.stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    need(oo_engine_launch(w.engine, members[0], w.stream, 1e-6), "launch");
    CHECK(memcmp((const char *)use.address + offsets[1], elsewhere + w.bytes[0], w.bytes[1]) == 0,
          "not moved in the end");
    need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    world_close(&w, "move");
    free(elsewhere);
}

/* Whoever must not block is told that another thread is inside. */
static void test_a_nonblocking_call_leaves_when_the_engine_is_busy(void) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    oo__mutex_lock(w.engine->mutex);
    CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, OO_NONBLOCKING,
                            &held) == OO_WOULD_BLOCK,
          "acquired in a busy engine");
    CHECK(oo_engine_release(w.engine, 0, w.stream, OO_NONBLOCKING, &fetched) == OO_WOULD_BLOCK,
          "released in a busy engine");
    oo__mutex_unlock(w.engine->mutex);
    need(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, OO_NONBLOCKING,
                           &held),
         "acquire");
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    need(oo_model_remove(w.engine, w.model), "remove");
    CHECK(oo_engine_destroy(w.engine) == OO_E_STATE &&
              strstr(oo_error_message(), "0 models and 1 host"),
          "%s", oo_error_message());
    need(oo_model_add(w.engine, &w.model), "add");
    need(oo_engine_destroy(NULL), "destroy nothing");
    world_close(&w, "busy");
}

/* ---- failures at the worst moment ---- */

static void test_a_use_that_could_not_be_marked_is_waited_for(void) {
    struct world w;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open_on_device(&w, 30000);
    const uintptr_t slow = new_stream(&w);
    for (int how = 0; how < 3; how++) {
        need(oo_engine_acquire(w.engine, w.member[0], slow, 0, OO_FORWARD, -1, 0, &held),
             "acquire");
        need(oo_engine_launch(w.engine, w.member[0], slow, 5e-3), "launch");
        sim.simFault("cuEventRecord", 1, OOCU_ERROR_UNKNOWN, 0);
        need(oo_engine_release(w.engine, held.ticket, slow, 0, &fetched), "release");
        const struct oo_stats before = stats_of(&w);
        const double began = sim.simNow();
        if (how == 0)
            need(oo_engine_refresh(w.engine, w.model), "refresh");
        else if (how == 1)
            for (unsigned i = 1; i < UNITS; i++) /* its place is taken */
                need(use(&w, i, OO_FORWARD), "use");
        else
            need(oo_model_remove(w.engine, w.model), "remove");
        const struct oo_stats after = stats_of(&w);
        CHECK(after.recoveries == before.recoveries + 1 && after.host_waits > before.host_waits,
              "%llu recoveries", (unsigned long long)(after.recoveries - before.recoveries));
        CHECK(sim.simNow() - began > 4.9e-3, "the host waited %.6f s for a kernel of 5 ms",
              sim.simNow() - began);
    }
    kernel(w.stream, w.arena, 30000, 1, 1e-6);
    end_stream(&w, slow);
    need(oo_engine_unlock(w.engine, w.host), "unlock");
    oo_host_destroy(w.host);
    end_device_memory(&w, w.arena);
    end_stream(&w, w.stream);
    need(oo_engine_destroy(w.engine), "destroy");
    check_no_reports("lost use");
    check_nothing_alive("lost use");
    release_context("lost use");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* More streams than entries, and the oldest use cannot be ordered: the new one is waited for
 * instead. */
static void test_a_use_without_an_entry_is_waited_for(void) {
    struct world w;
    uintptr_t streams[OO_STREAMS + 1];
    struct oo_use held;
    struct oo_fetched fetched;
    world_open_on_device(&w, 30000);
    for (int s = 0; s <= OO_STREAMS; s++)
        streams[s] = new_stream(&w);
    for (int s = 0; s < OO_STREAMS; s++)
        need(use_on(&w, 0, OO_FORWARD, -1, 0, streams[s]), "use");
    need(oo_engine_acquire(w.engine, w.member[0], streams[OO_STREAMS], 0, OO_FORWARD, -1, 0, &held),
         "acquire");
    need(oo_engine_launch(w.engine, w.member[0], streams[OO_STREAMS], 5e-3), "launch");
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_UNKNOWN, 0);
    const double began = sim.simNow();
    const struct oo_stats before = stats_of(&w);
    need(oo_engine_release(w.engine, held.ticket, streams[OO_STREAMS], 0, &fetched), "release");
    CHECK(sim.simNow() - began > 4.9e-3 && stats_of(&w).recoveries == before.recoveries + 1,
          "the host waited %.6f s", sim.simNow() - began);
    CHECK(stats_of(&w).lost_uses == before.lost_uses, "waited for, and lost all the same");
    for (int round = 0; round < 3; round++)
        for (unsigned i = 0; i < UNITS; i++)
            need(use_on(&w, i, OO_FORWARD, -1, 0, streams[i % (OO_STREAMS + 1)]), "use");
    for (int s = 0; s <= OO_STREAMS; s++)
        end_stream(&w, streams[s]);
    world_close(&w, "no entry");
}

/* An acquire that fails behind its copy measures nothing, and its copy is not trusted. */
static void test_an_acquire_that_fails_behind_its_copy(void) {
    struct world w;
    struct oo_use held;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 30000, -1);
    for (int i = 0; i < 3; i++)
        need(step(&w), "step"); /* every event has been recorded before */
    double end_s;
    sim.simFinish(&end_s);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(oo_trace_start(w.engine), "trace");
    sim.simFault("cuEventRecord", 4, OOCU_ERROR_UNKNOWN,
                 0); /* begin, ready, before, and after the wait */
    CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 1, OO_FORWARD, -1, 0, &held) ==
              OO_E_DRIVER,
          "no error");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    for (size_t i = 0; i < count; i++)
        CHECK(rows[i].kind == OO_TRACE_H2D, "a row of kind %d for what failed", (int)rows[i].kind);
    oo_trace_free(rows);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(use_on(&w, 1, OO_RECOMPUTE, 3, 1, w.stream), "use");
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 1, OO_RECOMPUTE, 3, 0, &held) ==
              OO_E_DRIVER,
          "no error");
    const uint64_t stale = stats_of(&w).stale;
    need(use_on(&w, 0, OO_BACKWARD, 3, 1, w.stream), "with the same stamp");
    CHECK(stats_of(&w).stale == stale + 1, "the copy was trusted");
    world_close(&w, "failed acquire");
}

/* The caller learns of copies by what acquire answers, and stamps their members. Where it fails
 * behind the copy, a rewrite that no sample sees must not be missed in the unit's other members. */
static void test_a_copy_that_nobody_was_told_of_is_not_trusted(void) {
    enum { BYTES = 1 << 16, UNSAMPLED = 100 };
    struct world w;
    world_open(&w, 4 * BYTES, -1);
    struct oo_host *host;
    need(oo_host_create(2 * BYTES, &host), "host");
    need(oo_engine_lock(w.engine, host, 1), "lock");
    char *master = oo_host_address(host);
    fill(master, 2 * BYTES, 5);
    const struct oo_tensor tensors[2] = {{master, BYTES}, {master + BYTES, BYTES}};
    const uint32_t ones[2] = {1, 1};
    uint32_t unit, members[2];
    size_t offsets[2];
    need(oo_unit_add(w.engine, w.model, tensors, ones, 2, 0, &unit, members, offsets), "unit");
    struct oo_use held;
    struct oo_fetched fetched;
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_acquire(w.engine, members[0], w.stream, 1, OO_FORWARD, -1, 0, &held) ==
              OO_E_DRIVER,
          "no error");
    double end_s;
    sim.simFinish(&end_s);
    master[BYTES + UNSAMPLED] ^= 1;
    need(oo_engine_acquire(w.engine, members[1], w.stream, 2, OO_FORWARD, -1, 0, &held), "acquire");
    need(oo_engine_launch(w.engine, members[1], w.stream, 1e-6), "launch");
    CHECK(memcmp((const char *)held.address + offsets[1], master + BYTES, BYTES) == 0,
          "the bytes from before the rewrite");
    need(oo_engine_release(w.engine, held.ticket, w.stream, 0, &fetched), "release");
    need(oo_model_remove(w.engine, w.model), "remove");
    need(oo_host_destroy(host), "destroy");
    oo_host_destroy(w.host);
    need(oo_engine_destroy(w.engine), "destroy");
    free(w.arena);
    check_no_reports("untold copy");
    check_nothing_alive("untold copy");
    release_context("untold copy");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* What the driver refuses to take back is told at the end, in words; the engine is gone all the
 * same, and an error that comes first keeps its message. */
static void test_what_cannot_be_given_back_is_told(void) {
    static const char *const calls[] = {"cuStreamDestroy", "cuEventDestroy",
                                        "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"};
    for (unsigned i = 0; i < 4; i++) {
        struct world w;
        memset(&w, 0, sizeof w);
        need(oo_engine_create(sim.path, 0, &w.engine), "create");
        sim.simFault(calls[i], 1, OOCU_ERROR_INVALID_HANDLE, 0);
        const char *call, *name;
        int code;
        CHECK(oo_engine_destroy(w.engine) == OO_LEAKED &&
                  strncmp(oo_error_message(), "1 driver objects", 16) == 0 &&
                  strstr(oo_error_message(), calls[i]),
              "%s: %s", calls[i], oo_error_message());
        oo_error_driver(&call, &code, &name);
        CHECK(strcmp(call, calls[i]) == 0 && code == OOCU_ERROR_INVALID_HANDLE, "%s %d", call,
              code);
        leave_contexts();
        release_leaked_contexts();
        CHECK(sim_reset(&sim) == 0, "%s: not reset", calls[i]);
    }
    static const char *const second[] = {"cuStreamDestroy", "cuDevicePrimaryCtxRelease"};
    for (unsigned i = 0; i < 2; i++) {
        struct oo_engine *engine;
        char told[128];
        snprintf(told, sizeof told, "1 driver objects could not be given back, the first: %s",
                 second[i]);
        sim.simFault("cuStreamCreateWithPriority", 2, OOCU_ERROR_OUT_OF_MEMORY, 0);
        sim.simFault(second[i], 1, OOCU_ERROR_INVALID_HANDLE, 0);
        CHECK(oo_engine_create(sim.path, 0, &engine) == OO_E_DRIVER &&
                  strncmp(oo_error_message(), "cuStreamCreateWithPriority", 26) == 0 &&
                  strstr(oo_error_message(), told),
              "%s", oo_error_message());
        release_leaked_contexts();
        CHECK(sim_reset(&sim) == 0, "not reset");
    }
}

/* A driver that says "not ready" of an event it has waited for: the timeline is not cut short. */
static void test_a_timeline_that_cannot_be_read_is_an_error(void) {
    struct world w;
    struct oo_trace_row *rows;
    size_t count;
    world_open(&w, 30000, -1);
    need(oo_trace_start(w.engine), "trace");
    need(step(&w), "step");
    sim.simFault("cuEventElapsedTime", 1, OOCU_ERROR_NOT_READY, 1);
    CHECK(oo_trace_stop(w.engine, &rows, &count) == OO_E_DRIVER &&
              strstr(oo_error_message(), "cuEventElapsedTime"),
          "%s", oo_error_message());
    sim.simFaultClear();
    need(step(&w), "step");
    need(oo_trace_stop(w.engine, &rows, &count), "trace");
    CHECK(count > 3 * UNITS, "%zu rows", count);
    oo_trace_free(rows);
    world_close(&w, "timeline");
}

/* A download fails behind: the copy has ended when the call returns, as its buffers go back. */
static void test_a_failed_download_leaves_no_copy_behind(void) {
    static const char *const calls[] = {"cuEventRecord",     "cuEventRecord",
                                        "cuEventRecord",     "cuEventSynchronize",
                                        "cuStreamWaitEvent", "cuMemcpyDtoHAsync"};
    static const uint64_t nth[] = {1, 2, 3, 1, 1, 1};
    for (unsigned i = 0; i < sizeof nth / sizeof nth[0]; i++) {
        struct world w;
        struct oo_host *host;
        world_open_on_device(&w, 60000);
        char *gradient = device_memory(&w, 50000);
        need(oo_host_create(50000, &host), "host");
        need(oo_engine_lock(w.engine, host, 1), "lock");
        kernel(w.stream, gradient, 50000, 1, 1e-3);
        const struct oo_stats before = stats_of(&w);
        sim.simFault(calls[i], nth[i], OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_engine_download(w.engine, oo_host_address(host), (uintptr_t)gradient, 50000,
                                 w.stream) == OO_E_DRIVER &&
                  strstr(oo_error_message(), calls[i]),
              "%s: %s", calls[i], oo_error_message());
        const struct oo_stats after = stats_of(&w);
        const int counted = i == 3; /* the copy was queued and its end marked */
        CHECK(after.d2h_copies - before.d2h_copies == (counted ? 1u : 0u) &&
                  after.d2h_bytes - before.d2h_bytes == (counted ? 50000u : 0u),
              "%s %u: counted wrong", calls[i], i);
        CHECK(after.recoveries == before.recoveries + 1 &&
                  after.host_waits == before.host_waits + (counted ? 2 : 1),
              "%s %u: waits", calls[i], i);
        CHECK(after.d2h_seconds <= before.d2h_seconds, "measured what failed");
        CHECK(sim.simHostAccess(oo_host_address(host), 50000, 1) == 0, "access");
        check_no_reports(calls[i]);
        kernel(w.stream, gradient, 50000, 1, 1e-6);
        need(oo_engine_unlock(w.engine, host), "unlock");
        oo_host_destroy(host);
        end_device_memory(&w, gradient);
        world_close(&w, calls[i]);
    }
}

/* Not even waiting works: the adopted gradient stays known until the next download, or the end. */
static void test_what_a_failed_download_left_is_ended_by_the_next(void) {
    for (int again = 0; again < 3; again++) {
        struct world w;
        struct sim_live before, after;
        char first[2048], second[2048], target[2048];
        sim.simRefuseRegistration(again ==
                                  2); /* then nothing else waits for downloads until the end */
        world_open(&w, 60000, -1);
        fill(first, sizeof first, 1);
        fill(second, sizeof second, 2);
        sim.simGetLive(&before);
        sim.simFault("cuEventSynchronize", 1, OOCU_ERROR_UNKNOWN, 0);
        sim.simFault("cuStreamSynchronize", 1, OOCU_ERROR_UNKNOWN, 0);
        sim.simFault("simDrop", 1, OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_engine_download(w.engine, target, (uintptr_t)first, sizeof first, w.stream) ==
                  OO_E_DRIVER,
              "no error");
        sim.simFaultClear();
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes + sizeof first,
              "given back while a copy is queued");
        if (again == 1) {
            need(oo_engine_download(w.engine, target, (uintptr_t)second, sizeof second, w.stream),
                 "next download");
            CHECK(memcmp(target, second, sizeof second) == 0, "wrong bytes");
            sim.simGetLive(&after);
            CHECK(after.adopted_bytes == before.adopted_bytes, "%llu bytes stay adopted",
                  (unsigned long long)(after.adopted_bytes - before.adopted_bytes));
            need(oo_engine_download(w.engine, target, (uintptr_t)first, sizeof first, w.stream),
                 "the same address again");
        }
        sim.simRefuseRegistration(0);
        world_close(&w, "unfinished download");
    }
}

/* The next gradient may lie where the unfinished one lay. */
static void test_an_unfinished_download_of_the_same_address(void) {
    struct world w;
    char gradient[2048], target[2048];
    world_open(&w, 60000, -1);
    fill(gradient, sizeof gradient, 1);
    sim.simFault("cuEventSynchronize", 1, OOCU_ERROR_UNKNOWN, 0);
    sim.simFault("cuStreamSynchronize", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream) ==
              OO_E_DRIVER,
          "no error");
    sim.simFaultClear();
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
         "the same address");
    CHECK(memcmp(target, gradient, sizeof gradient) == 0, "wrong bytes");
    world_close(&w, "same address");
}

/* The simulated device refuses the gradient, or the host its bytes: nothing stays adopted. */
/* Into memory that the engine knows, and could not lock: through the ring, as all that is pageable.
 */
static void test_a_gradient_into_pageable_masters(void) {
    struct world w;
    char gradient[5000];
    sim.simRefuseRegistration(1);
    world_open(&w, 60000, -1);
    fill(gradient, sizeof gradient, 9);
    need(oo_engine_download(w.engine, w.master[0], (uintptr_t)gradient, 4096, w.stream),
         "download");
    CHECK(memcmp(w.master[0], gradient, 4096) == 0, "wrong bytes");
    check_no_reports("pageable");
    CHECK(oo_engine_download(w.engine, (void *)(UINTPTR_MAX - 1), (uintptr_t)gradient, 4,
                             w.stream) == OO_E_ARGUMENT,
          "to the end of memory");
    CHECK(stats_of(&w).recoveries == 0, "recovered from nothing");
    sim.simRefuseRegistration(0);
    world_close(&w, "pageable");
}

static void test_a_refused_gradient_is_not_kept(void) {
    static const char *const calls[] = {"simAdopt", "cuEventRecord", "simHostAccess", "simDrop"};
    for (unsigned i = 0; i < 4; i++) {
        struct world w;
        struct sim_live before, after;
        char gradient[2048], target[2048];
        world_open(&w, 60000, -1);
        fill(gradient, sizeof gradient, 1);
        sim.simGetLive(&before);
        sim.simFault(calls[i], 1, OOCU_ERROR_UNKNOWN, 0);
        const enum oo_status status =
            oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream);
        CHECK(status == (i == 3 ? OO_OK : OO_E_DRIVER), "%s: %s", calls[i], oo_status_name(status));
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes + (i == 3 ? sizeof gradient : 0),
              "%s: kept", calls[i]);
        CHECK(w.engine->unfinished == (i == 3 ? (OOCUdeviceptr)gradient : 0),
              "%s: wrongly unfinished", calls[i]);
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
             "again");
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes, "%s: kept", calls[i]);
        world_close(&w, calls[i]);
    }
}

/* A piece of the ring whose copy could not be marked is waited for before it is used again. */
static void test_a_lost_piece_of_the_ring_is_waited_for(void) {
    struct world w;
    struct oo_use held;
    char target[5000];
    sim.simSetSchedule(SIM_STARVE_COPY, 0);
    sim.simRefuseRegistration(1);
    world_open_on_device(&w, 60000);
    char *gradient = device_memory(&w, 5000);
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 5e-3);      /* uploads are slow */
    sim.simFault("cuEventRecord", 2, OOCU_ERROR_UNKNOWN, 0); /* the copy's begin, then the piece */
    CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &held) ==
              OO_E_DRIVER,
          "no error");
    CHECK(w.engine->up.lost[0] == 1, "not lost");
    const double began = sim.simNow();
    const uint64_t recoveries = stats_of(&w).recoveries;
    struct oo_use uses[OO_RING_PIECES];
    struct oo_fetched fetched;
    for (unsigned i = 0; i < OO_RING_PIECES;
         i++) /* as many as the ring has: the last one is the lost one */
        need(oo_engine_acquire(w.engine, w.member[i], w.stream, 0, OO_FORWARD, -1, 0, &uses[i]),
             "acquire");
    CHECK(stats_of(&w).recoveries == recoveries + 1 && sim.simNow() - began > 4.9e-3 &&
              w.engine->up.lost[0] == 0,
          "%llu recoveries, %.6f s", (unsigned long long)(stats_of(&w).recoveries - recoveries),
          sim.simNow() - began);
    for (unsigned i = 0; i < OO_RING_PIECES; i++)
        need(oo_engine_release(w.engine, uses[i].ticket, w.stream, 0, &fetched), "release");
    /* A copy that could not be queued: nobody knows, so it is waited for as well. */
    sim.simFault("cuMemcpyHtoDAsync", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(oo_engine_acquire(w.engine, w.member[9], w.stream, 0, OO_FORWARD, -1, 0, &held) ==
              OO_E_DRIVER,
          "no error");
    for (unsigned i = 10; i < 10 + OO_RING_PIECES; i++)
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(stats_of(&w).recoveries == recoveries + 2, "%llu recoveries",
          (unsigned long long)(stats_of(&w).recoveries - recoveries));
    /* Downwards a failed download waits itself; the next one starts afresh. */
    fill(gradient, 5000, 1);
    sim.simFault("cuEventRecord", 3, OOCU_ERROR_UNKNOWN, 0); /* computed, begin, piece */
    CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, 5000, w.stream) == OO_E_DRIVER,
          "no error");
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, 5000, w.stream), "again");
    CHECK(memcmp(target, gradient, 5000) == 0, "wrong bytes");
    end_device_memory(&w, gradient);
    sim.simRefuseRegistration(0);
    world_close(&w, "lost piece");
}

/* While a fault lasts a release can neither mark its use nor wait for it. The unit is in use no
 * more all the same, or nothing could ever detach; whoever overwrites it waits for each such use.
 * Only with more of them than there are entries a release fails, and can be repeated. */
static void test_a_release_returns_while_a_fault_lasts(void) {
    enum { STREAMS = OO_USES + 1 };
    struct world w;
    uintptr_t streams[STREAMS];
    struct oo_use held[STREAMS];
    struct oo_fetched fetched;
    world_open_on_device(&w, 30000);
    for (int s = 0; s < STREAMS; s++) {
        streams[s] = new_stream(&w);
        need(oo_engine_acquire(w.engine, w.member[0], streams[s], 0, OO_FORWARD, -1, 0, &held[s]),
             "acquire");
        need(oo_engine_launch(w.engine, w.member[0], streams[s], 1e-3), "launch");
    }
    sim.simFault(NULL, 1, OOCU_ERROR_UNKNOWN, 1);
    for (int s = 0; s < OO_USES; s++)
        need(oo_engine_release(w.engine, held[s].ticket, streams[s], 0, &fetched), "release");
    for (int i = 0; i < 2; i++)
        CHECK(oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched) ==
                      OO_E_DRIVER &&
                  strstr(oo_error_message(), "cuStreamSynchronize"),
              "a use is forgotten: %s", oo_error_message());
    sim.simFaultClear();
    const struct oo_stats before = stats_of(&w);
    need(oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched),
         "repeated");
    CHECK(oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched) ==
              OO_E_TICKET,
          "released twice");
    for (unsigned i = 1; i < UNITS;
         i++) /* the race detector sees each use that is not waited for */
        need(use_on(&w, i, OO_FORWARD, -1, 0, streams[0]), "overwrite");
    CHECK(stats_of(&w).recoveries >= before.recoveries + STREAMS - 1, "%llu recoveries",
          (unsigned long long)(stats_of(&w).recoveries - before.recoveries));
    for (int s = 0; s < STREAMS; s++)
        end_stream(&w, streams[s]);
    world_close(&w, "lasting");
}

/* Detaching fails where the segment's stream cannot be ordered after a use, and can be repeated. */
static void test_a_detach_that_failed_can_be_repeated(void) {
    static const char *const calls[] = {"cuStreamWaitEvent", "cuStreamSynchronize", "simDrop"};
    for (unsigned i = 0; i < 3; i++) {
        struct world w;
        world_open(&w, 400000, -1);
        const uintptr_t other = new_stream(&w);
        for (unsigned u = 0; u < UNITS; u++)
            need(use_on(&w, u, OO_FORWARD, -1, 0, other), "use");
        /* The same memory twice is refused, and stays what it was. */
        CHECK(oo_segment_add(w.engine, w.model, (uintptr_t)w.arena, 400000 + OO_ALIGNMENT,
                             w.stream) == OO_E_DRIVER,
              "twice");
        need(step(&w), "step");
        sim.simFault(calls[i], 1, OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_model_remove(w.engine, w.model) == OO_E_DRIVER &&
                  strstr(oo_error_message(), calls[i]),
              "%s: %s", calls[i], oo_error_message());
        end_stream(&w, other);
        world_close(&w, calls[i]);
    }
}

/* Masters move elsewhere while their copy is still queued: unlocking waits for it. */
static void test_unlocking_waits_for_copies_of_masters_that_moved_away(void) {
    struct world w;
    struct oo_host *host;
    uint32_t unit, member;
    size_t offset;
    const uint32_t one = 1;
    struct oo_use held;
    struct oo_fetched fetched;
    world_open(&w, 60000, -1);
    need(oo_host_create(20000, &host), "host");
    need(oo_engine_lock(w.engine, host, 1), "lock");
    const struct oo_tensor there = {oo_host_address(host), 20000}, here = {w.master[0], w.bytes[0]};
    need(oo_unit_add(w.engine, w.model, &there, &one, 1, 0, &unit, &member, &offset), "unit");
    const uintptr_t stream = new_stream(&w);
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 2e-3);
    need(oo_engine_acquire(w.engine, member, stream, 0, OO_FORWARD, -1, 0, &held), "acquire");
    need(oo_engine_release(w.engine, held.ticket, stream, 0, &fetched), "release");
    need(oo_member_move(w.engine, member, &here, 1, &unit, &offset), "move");
    const double began = sim.simNow();
    need(oo_engine_unlock(w.engine, host), "unlock");
    CHECK(sim.simNow() - began > 1.9e-3, "unlocked after %.6f s", sim.simNow() - began);
    oo_host_destroy(host);
    end_stream(&w, stream);
    world_close(&w, "moved away");
}

/* Every call says so when it cannot make the context current, and changes nothing. */
static void test_each_call_needs_the_context(void) {
    struct world w;
    uintptr_t stream;
    size_t free_bytes = 77, total_bytes, offset, count;
    uint32_t id;
    struct oo_use held;
    struct oo_fetched fetched;
    struct oo_resident row;
    struct oo_trace_row *rows;
    struct oo_stats stats;
    const uint32_t one = 1;
    world_begin(&w);
    w.stream = new_stream(&w);
    CHECK(world_attach(&w, 60000, -1), "attach");
    const struct oo_tensor tensor = {w.master[0], w.bytes[0]};
    char memory[512];
#define FAILS(call)                                                                                \
    do {                                                                                           \
        sim.simFault("cuCtxGetCurrent", 1, OOCU_ERROR_UNKNOWN, 0);                                 \
        const enum oo_status status = call;                                                        \
        CHECK(status == OO_E_DRIVER && strstr(oo_error_message(), "cuCtxGetCurrent"), "%s: %s",    \
              #call, oo_status_name(status));                                                      \
        sim.simFaultClear();                                                                       \
    } while (0)
    FAILS(oo_engine_compute_stream(w.engine, &stream));
    CHECK(w.engine->compute == NULL, "a stream was created");
    FAILS(oo_engine_mem_info(w.engine, &free_bytes, &total_bytes));
    CHECK(free_bytes == 77, "asked all the same");
    FAILS(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &held));
    FAILS(oo_engine_prefetch(w.engine, &fetched));
    FAILS(oo_engine_launch(w.engine, w.member[0], w.stream, 0));
    FAILS(oo_engine_spin(w.engine, w.stream, 0));
    FAILS(oo_engine_download(w.engine, memory, (uintptr_t)memory + 256, 256, w.stream));
    FAILS(oo_engine_hold(w.engine));
    FAILS(oo_engine_resume(w.engine));
    FAILS(oo_engine_refresh(w.engine, OO_ALL_MODELS));
    FAILS(oo_engine_set_verify(w.engine, 1));
    FAILS(oo_engine_lock(w.engine, w.host, 1));
    FAILS(oo_engine_unlock(w.engine, w.host));
    FAILS(oo_model_add(w.engine, &id));
    FAILS(oo_model_remove(w.engine, w.model));
    FAILS(oo_segment_add(w.engine, w.model, (uintptr_t)memory, 512, w.stream));
    FAILS(oo_unit_add(w.engine, w.model, &tensor, &one, 1, 0, &id, &id, &offset));
    FAILS(oo_member_move(w.engine, w.member[0], &tensor, 1, &id, &offset));
    FAILS(oo_member_remove(w.engine, w.member[0]));
    FAILS(oo_unit_set_trainable(w.engine, w.unit[0], 1));
    FAILS(oo_trace_start(w.engine));
    FAILS(oo_trace_stop(w.engine, &rows, &count));
    FAILS(oo_engine_stats(w.engine, OO_ALL_MODELS, &stats));
    FAILS(oo_engine_residents(w.engine, &row, 1, &count));
    FAILS(oo_engine_destroy(w.engine));
#undef FAILS
    sim.simFault(NULL, 1, OOCU_ERROR_UNKNOWN, 1);
    need(oo_engine_stamp(w.engine, &(struct oo_stamp){w.member[0], 0}, 1),
         "a stamp needs no driver");
    sim.simFaultClear();
    need(step(&w), "step");
    CHECK(oo_engine_destroy(w.engine) == OO_E_STATE, "destroyed with a model");
    end_stream(&w, w.stream);
    w.stream = 0;
    world_close(&w, "context");
}

#if defined(__linux__)
/* Whether the pages are hidden from children, as the kernel tells: "dc", do not copy. */
static int hidden_from_children(const void *address) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    int inside = 0, hidden = -1;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long lo, hi;
        // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion,cert-err34-c): the kernel's
        if (sscanf(line, "%lx-%lx ", &lo, &hi) == 2)
            inside = (uintptr_t)address >= lo && (uintptr_t)address < hi;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            hidden = strstr(line, " dc") != NULL;
    }
    if (maps)
        fclose(maps);
    return hidden;
}

static OOCUresult(OOCUDAAPI *real_register)(void *, size_t, unsigned int);
static int hidden_when_registered;

static OOCUresult OOCUDAAPI spy_register(void *pages, size_t bytes, unsigned int flags) {
    hidden_when_registered = hidden_from_children(pages);
    return real_register(pages, bytes, flags);
}

/* Locked pages must not cross a fork at any time: the kernel would copy them all. */
static void test_locked_pages_are_hidden_from_children(void) {
    struct world w;
    struct oo_host *host;
    world_open(&w, 60000, -1);
    real_register = w.engine->driver.cuMemHostRegister;
    w.engine->driver.cuMemHostRegister = spy_register;
    need(oo_host_create(50000, &host), "host");
    ((char *)oo_host_address(host))[0] = 1;
    if (hidden_from_children(oo_host_address(host)) == 0) { /* not in a container without smaps */
        need(oo_engine_lock(w.engine, host, 1), "lock");
        CHECK(hidden_when_registered == 1,
              "a fork while the pages are being locked would copy them");
        CHECK(hidden_from_children(oo_host_address(host)) == 1,
              "locked pages are copied by a fork");
        need(oo_engine_unlock(w.engine, host), "unlock");
        CHECK(hidden_from_children(oo_host_address(host)) == 0,
              "a child does not see unlocked pages");
        sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_OUT_OF_MEMORY, 0);
        CHECK(oo_engine_lock(w.engine, host, 1) == OO_E_LOCK_REFUSED, "not refused");
        CHECK(hidden_from_children(oo_host_address(host)) == 0,
              "a child does not see refused pages");
    }
    oo_host_destroy(host);
    world_close(&w, "hidden");
}
#endif

/* A copy into the arena fails half-way: the unit is absent, and the next use copies it whole. */
/* An acquire of a copy that is there fails at the wait for it: the next one waits all the same, and
 * knows what was copied. */
static void test_a_wait_that_failed_is_waited_for_by_the_next_call(void) {
    struct world w;
    struct oo_use held;
    double end_s;
    world_open_on_device(&w, 400000);
    need(use(&w, 0, OO_FORWARD), "use"); /* and copies ahead */
    const uintptr_t other = new_stream(&w);
    for (unsigned i = 1; i < 3; i++) {
        const uint64_t late = stats_of(&w).late;
        sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_engine_acquire(w.engine, w.member[i], other, 5, OO_RECOMPUTE, 7, 0, &held) ==
                  OO_E_DRIVER,
              "no error");
        CHECK(stats_of(&w).late == late, "unit %u was not copied ahead", i);
        uint64_t stamp = 5;
        if (i == 2) { /* rewritten in between; in one task its samples are not looked at again */
            sim.simFinish(&end_s);
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

static void test_a_failed_upload_leaves_the_unit_absent(void) {
    static const char *const calls[] = {"cuEventRecord", "cuMemcpyHtoDAsync", "cuStreamWaitEvent",
                                        "cuEventRecord"};
    static const uint64_t nth[] = {1, 1, 1, 2};
    for (unsigned i = 0; i < sizeof nth / sizeof nth[0]; i++) {
        struct world w;
        struct oo_use use;
        world_open_on_device(&w, 60000);
        sim.simFault(calls[i], nth[i], OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_engine_acquire(w.engine, w.member[0], w.stream, 0, OO_FORWARD, -1, 0, &use) ==
                  OO_E_DRIVER,
              "%s", calls[i]);
        CHECK(stats_of(&w).resident_units == (i == 2 ? 1u : 0u), "%s %u: resident", calls[i], i);
        need(step(&w), "the next step");
        world_close(&w, calls[i]);
    }
}

/* A segment that could not be ordered after its stream's work is not used, and not kept. */
static void test_a_segment_that_failed_is_given_back(void) {
    static const char *const calls[] = {"simAdopt", "cuEventRecord", "cuStreamWaitEvent"};
    for (unsigned i = 0; i < 3; i++) {
        struct world w;
        struct sim_live live;
        world_open(&w, 60000, -1);
        sim.simGetLive(&live);
        const uint64_t adopted = live.adopted_bytes, arena = stats_of(&w).arena_bytes;
        char *more = malloc(8192);
        sim.simFault(calls[i], 1, OOCU_ERROR_UNKNOWN, 0);
        CHECK(oo_segment_add(w.engine, w.model, (uintptr_t)more, 8192, w.stream) == OO_E_DRIVER,
              "%s", calls[i]);
        sim.simGetLive(&live);
        CHECK(live.adopted_bytes == adopted && stats_of(&w).arena_bytes == arena, "%s: kept",
              calls[i]);
        need(oo_segment_add(w.engine, w.model, (uintptr_t)more, 8192, w.stream), "again");
        CHECK(stats_of(&w).arena_bytes > arena, "not added");
        need(step(&w), "step");
        need(oo_model_remove(w.engine, w.model), "remove");
        need(oo_model_add(w.engine, &w.model), "add");
        free(more);
        world_close(&w, calls[i]);
    }
}

/* The device serves copies before kernels that are waiting, and torch's default stream, which waits
 * for blocking streams, does not wait for them. */
static void test_copies_have_the_greatest_priority_and_block_nobody(void) {
    struct world w;
    int least = 0, greatest = 0, priority = 100;
    unsigned flags = 100;
    uintptr_t compute;
    world_open(&w, 60000, -1);
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(sim.cuCtxGetStreamPriorityRange(&least, &greatest) == 0 && greatest < least, "%d to %d",
          least, greatest);
    const OOCUstream copies[] = {w.engine->h2d, w.engine->d2h};
    for (int i = 0; i < 2; i++) {
        CHECK(sim.cuStreamGetPriority(copies[i], &priority) == 0 && priority == greatest,
              "%s has priority %d, the greatest is %d", i ? "d2h" : "h2d", priority, greatest);
        CHECK(sim.cuStreamGetFlags(copies[i], &flags) == 0 && flags == OOCU_STREAM_NON_BLOCKING,
              "%s has flags %u", i ? "d2h" : "h2d", flags);
    }
    need(oo_engine_compute_stream(w.engine, &compute), "compute stream");
    CHECK(sim.cuStreamGetPriority((OOCUstream)compute, &priority) == 0 && priority == 0,
          "compute has priority %d", priority);
    CHECK(sim.cuStreamGetFlags((OOCUstream)compute, &flags) == 0 &&
              flags == OOCU_STREAM_NON_BLOCKING,
          "compute has flags %u", flags);
    sim.cuCtxPopCurrent_v2(NULL);
    world_close(&w, "priority");
}

static void test_a_creation_that_fails_leaves_nothing(void) {
    static const char *const calls[] = {"cuDeviceGetCount",
                                        "cuDeviceGet",
                                        "cuDeviceGetName",
                                        "cuDeviceGetPCIBusId",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuCtxGetCurrent",
                                        "cuCtxPushCurrent",
                                        "cuCtxGetStreamPriorityRange",
                                        "cuStreamCreateWithPriority",
                                        "cuEventCreate"};
    CHECK(sim.cuInit(0) == 0, "cuInit");
    for (unsigned i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (uint64_t nth = 1; nth <= 2; nth++) {
            struct oo_engine *engine = NULL;
            OOCUcontext context;
            CHECK(sim.cuDevicePrimaryCtxRetain(&context, 0) == 0, "context");
            const uint64_t before = sim.simCallCount(calls[i]);
            sim.simFault(calls[i], nth, OOCU_ERROR_UNKNOWN, 0);
            const enum oo_status status = oo_engine_create(sim.path, 0, &engine);
            CHECK(sim.simCallCount(calls[i]) > before, "%s is not called", calls[i]);
            const int struck = sim.simCallCount(calls[i]) - before >= nth;
            CHECK(struck ? status == OO_E_DRIVER && engine == NULL : status == OO_OK, "%s %llu: %s",
                  calls[i], (unsigned long long)nth, oo_status_name(status));
            sim.simFaultClear();
            need(oo_engine_destroy(engine), "destroy");
            check_nothing_alive(calls[i]);
            release_context(calls[i]);
            check_no_reports(calls[i]);
        }
    }
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* Host memory that cannot be unlocked stays with the engine: freeing the pages under a registration
 * would let copies read another owner's bytes. */
static void test_memory_that_cannot_be_unlocked_is_kept(void) {
    struct world w;
    struct oo_host *host;
    world_open(&w, 60000, -1);
    need(oo_host_create(10000, &host), "host");
    need(oo_engine_lock(w.engine, host, 1), "lock");
    CHECK(oo_engine_lock(w.engine, host, 1) == OO_E_STATE, "locked twice");
    for (int i = 0; i < 3; i++) {
        static const char *const calls[] = {"cuMemHostUnregister", "cuStreamSynchronize",
                                            "cuStreamSynchronize"};
        sim.simFault(calls[i], i == 2 ? 2 : 1, OOCU_ERROR_UNKNOWN, 0);
        oo_host_destroy(host);
        CHECK(w.engine->n_known == 2 && host->owner == w.engine && host->locked, "%d: forgotten",
              i);
        ((char *)oo_host_address(host))[9999] = 1; /* still there */
    }
    oo_host_destroy(host);
    CHECK(w.engine->n_known == 1, "still known");
    world_close(&w, "kept memory");
}

static void test_refused_locks_are_told(void) {
    struct world w;
    struct oo_host *host, *again;
    world_open(&w, 60000, -1);
    need(oo_host_create(10000, &host), "host");
    sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_OUT_OF_MEMORY, 0);
    CHECK(oo_engine_lock(w.engine, host, 1) == OO_E_LOCK_REFUSED &&
              strstr(oo_error_message(), "cuMemHostRegister"),
          "%s", oo_error_message());
    CHECK(!oo_host_locked(host) && stats_of(&w).locked_bytes ==
                                       w.host->mapped_bytes + OO_RING_PIECES * oo__ring_piece_bytes,
          "%llu locked", (unsigned long long)stats_of(&w).locked_bytes);
    oo_host_destroy(host);
    need(oo_host_create(10000, &again), "host");
    need(oo_engine_lock(w.engine, again, 0), "known, not locked");
    CHECK(!oo_host_locked(again), "locked");
    need(oo_engine_unlock(w.engine, again), "unlock");
    CHECK(oo_engine_unlock(w.engine, again) == OO_E_STATE, "unlocked twice");
    /* Someone else has registered it: an error, not a fallback. */
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(sim.cuMemHostRegister_v2(oo_host_address(again), 4096, 0) == 0, "register");
    CHECK(oo_engine_lock(w.engine, again, 1) == OO_E_DRIVER && again->owner == NULL, "%s",
          oo_error_message());
    CHECK(sim.cuMemHostUnregister(oo_host_address(again)) == 0, "unregister");
    sim.cuCtxPopCurrent_v2(NULL);
    oo_host_destroy(again);
    world_close(&w, "refused");
}

/* Many spans pending at once: what does not fit is not measured, and nothing is overwritten. */
static void test_a_host_far_ahead_measures_a_part(void) {
    struct world w;
    world_open(&w, 30000, -1);
    sim.simHold((OOCUstream)w.stream, 1);
    struct oo_use use;
    struct oo_fetched fetched;
    for (unsigned i = 0; i < 3 * UNITS; i++) { /* copies wait for uses that do not end */
        need(oo_engine_acquire(w.engine, w.member[i % UNITS], w.stream, 0, OO_FORWARD, -1, 0, &use),
             "acquire");
        need(oo_engine_release(w.engine, use.ticket, w.stream, 0, &fetched), "release");
    }
    const struct oo_stats before = stats_of(&w);
    CHECK(w.engine->spans.capacity == OO_SPANS &&
              w.engine->spans.tail - w.engine->spans.head <= OO_SPANS,
          "%llu spans of %llu", (unsigned long long)(w.engine->spans.tail - w.engine->spans.head),
          (unsigned long long)w.engine->spans.capacity);
    CHECK(before.h2d_timed_bytes < before.h2d_bytes, "all measured already");
    sim.simHold((OOCUstream)w.stream, 0);
    double end_s;
    sim.simFinish(&end_s);
    const struct oo_stats after = stats_of(&w);
    CHECK(after.h2d_timed_bytes > before.h2d_timed_bytes &&
              after.h2d_timed_bytes <= after.h2d_bytes,
          "%llu timed", (unsigned long long)after.h2d_timed_bytes);
    need(step(&w), "step");
    world_close(&w, "far ahead");
}

int main(int argc, char **argv) {
    sim = sim_open(argc, argv);
    sim_reset(&sim);
    test_an_engine_tells_its_device();
    test_each_status_has_its_name();
    test_the_second_device();
    test_residents_by_address();
    test_figures_of_two_models();
    test_the_callers_context_is_left_as_it_was();
    test_a_context_of_another_device();
    test_a_release_without_a_context();
    test_a_capturing_stream_is_refused();
    test_declared_kernels_run_on_the_callers_stream();
    test_spin_by_the_embedded_kernels();
    test_a_master_is_hashed_once_in_a_sweep();
    test_only_a_forward_ends_the_hold();
    test_a_stall_is_what_the_stream_waits_for_its_copy();
    test_each_stream_has_its_own_row_of_a_unit_in_the_timeline();
    test_a_timeline_that_fails_can_be_repeated();
    test_a_timeline_begins_on_the_upload_stream();
    test_units_of_several_members_and_tensors();
    test_a_nonblocking_call_never_waits();
    test_no_more_than_eight_copies_in_a_call();
    test_what_is_in_use_becomes_stale();
    test_an_acquire_that_launches();
    test_a_ticket_of_an_earlier_copy_ends_no_use();
    test_what_was_removed_is_known_no_more();
    test_who_is_in_the_way_of_a_detach();
    test_an_engine_with_a_model_and_no_memory_is_not_destroyed();
    test_what_travels_as_one_copy();
    test_a_change_of_a_few_bytes_is_seen();
    test_a_member_that_moves_keeps_its_unit_only_alone_and_alike();
    test_a_lock_that_loses_the_context_names_itself();
    test_each_turn_between_forward_and_task_begins_a_sweep();
    test_one_use_more_on_a_known_stream_displaces_nobody();
    test_a_hit_records_no_event_without_a_timeline();
    test_a_release_without_a_context_asks_the_driver_for_nothing();
    test_a_move_that_fails_changes_nothing();
    test_a_nonblocking_call_leaves_when_the_engine_is_busy();
    test_a_use_that_could_not_be_marked_is_waited_for();
    test_a_use_without_an_entry_is_waited_for();
    test_an_acquire_that_fails_behind_its_copy();
    test_a_copy_that_nobody_was_told_of_is_not_trusted();
    test_what_cannot_be_given_back_is_told();
    test_a_timeline_that_cannot_be_read_is_an_error();
    test_a_failed_download_leaves_no_copy_behind();
    test_what_a_failed_download_left_is_ended_by_the_next();
    test_an_unfinished_download_of_the_same_address();
    test_a_gradient_into_pageable_masters();
    test_a_refused_gradient_is_not_kept();
    test_a_lost_piece_of_the_ring_is_waited_for();
    test_a_release_returns_while_a_fault_lasts();
    test_a_detach_that_failed_can_be_repeated();
    test_unlocking_waits_for_copies_of_masters_that_moved_away();
    test_each_call_needs_the_context();
#if defined(__linux__)
    test_locked_pages_are_hidden_from_children();
#endif
    test_a_wait_that_failed_is_waited_for_by_the_next_call();
    test_a_failed_upload_leaves_the_unit_absent();
    test_a_segment_that_failed_is_given_back();
    test_copies_have_the_greatest_priority_and_block_nobody();
    test_a_creation_that_fails_leaves_nothing();
    test_memory_that_cannot_be_unlocked_is_kept();
    test_refused_locks_are_told();
    test_a_host_far_ahead_measures_a_part();
    return check_report();
}
