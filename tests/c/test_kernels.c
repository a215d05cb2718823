/* Kernels: those that the caller declares to the simulator, and the embedded one that spins. */
#include "world.h"

#include "fatbin.h"

#include <math.h>

static unsigned kernels_on(uintptr_t stream) {
    struct sim_trace_row row;
    unsigned count = 0;
    for (uint64_t i = 0; i < sim.simTraceCount(); i++)
        count += sim.simTraceRow(i, &row) == 0 && row.kind == SIM_KERNEL && row.stream == stream;
    return count;
}

CASE(test_declared_kernels_run_on_the_callers_stream) {
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
CASE(test_spin_by_the_embedded_kernels) {
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
        ANSWERS(OO_E_STATE, "nvcc", oo_engine_spin(w.engine, stream, 1000));
    } else {
        fail_call("cuModuleGetFunction", 1);
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

/* A driver below the kernels' toolkit says only that it does not understand. */
CASE(test_a_driver_older_than_the_kernels_is_named) {
    static const int refusals[] = {OOCU_ERROR_INVALID_IMAGE, OOCU_ERROR_NO_BINARY_FOR_GPU,
                                   OOCU_ERROR_UNSUPPORTED_PTX_VERSION,
                                   OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES};
    for (size_t i = 0; i < CHECK_COUNT(refusals) && oo_kernels_fatbin_size; i++)
        for (int newer = 0; newer < 2; newer++) {
            struct world w;
            const char *call, *name;
            int code;
            world_open(&w, 60000, -1);
            w.engine->driver.simLaunch = NULL;
            w.engine->driver.version = newer ? oo_kernels_toolkit : 12040;
            sim.simFault("cuModuleLoadData", 1, refusals[i], 0);
            CHECK(oo_engine_spin(w.engine, w.stream, 1000) == OO_E_DRIVER, "loaded all the same");
            oo_error_driver(&call, &code, &name);
            CHECK(strcmp(call, "cuModuleLoadData") == 0 && code == refusals[i] &&
                      strstr(oo_error_message(), name),
                  "%s, %d, %s: %s", call, code, name, oo_error_message());
            const int told = strstr(oo_error_message(), "of CUDA 12.4, and they") &&
                             strstr(oo_error_message(), "nvcc of CUDA 12.4 or older");
            const int older = !newer && refusals[i] != OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES;
            CHECK(told == older, "%d, newer %d: %s", code, newer, oo_error_message());
            need(oo_engine_spin(w.engine, w.stream, 1000), "again");
            world_close(&w, "an older driver");
        }
}

/* The simulator's, and whether it was called where the engine works: in its context. */
static OOCUresult (*launch_of_simulator)(OOCUstream, const OOSimRange *, size_t, const OOSimRange *,
                                         size_t, double);
static unsigned launches_inside, launches_outside;

static OOCUresult launch_watched(OOCUstream stream, const OOSimRange *reads, size_t n_reads,
                                 const OOSimRange *writes, size_t n_writes, double seconds) {
    OOCUcontext current = NULL;
    sim.cuCtxGetCurrent(&current);
    *(current ? &launches_inside : &launches_outside) += 1;
    return launch_of_simulator(stream, reads, n_reads, writes, n_writes, seconds);
}

/* Not after the engine was left: there another thread may evict what the launch says it reads. */
CASE(test_a_launch_is_declared_inside_the_engine) {
    struct world w;
    world_open(&w, 60000, -1);
    launch_of_simulator = w.engine->driver.simLaunch;
    w.engine->driver.simLaunch = launch_watched;
    need(use(&w, 0, OO_FORWARD), "use");
    CHECK(launches_inside > 0 && launches_outside == 0, "%u inside, %u outside", launches_inside,
          launches_outside);
    world_close(&w, "a launch inside");
}

CHECK_MAIN(world_prepare)
