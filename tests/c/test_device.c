/* An engine and its device: what it tells of it, its streams, how it begins and ends. */
#include "world.h"

CASE(test_an_engine_tells_its_device) {
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

CASE(test_each_status_has_its_name) {
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

/* Those of which cuda.h says that the process must be relaunched, or that the context is gone; and
 * 999, which drivers keep on giving when they have lost the device. */
CASE(test_after_which_errors_a_context_is_lost) {
    static const int lost[] = {4,   214, 220, 226, 700, 702, 709, 710, 714,
                               715, 716, 717, 718, 719, 721, 810, 911, 999};
    for (int code = 0, i = 0; code < 1024; code++) {
        const int expected = (size_t)i < CHECK_COUNT(lost) && lost[i] == code;
        i += expected;
        CHECK(oo_driver_is_sticky((OOCUresult)code) == expected, "%d", code);
    }
}

CASE(test_the_second_device) {
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

/* The device serves copies before kernels that are waiting, and torch's default stream, which waits
 * for blocking streams, does not wait for them. */
CASE(test_copies_have_the_greatest_priority_and_block_nobody) {
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

CASE(test_a_creation_that_fails_leaves_nothing) {
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
            fail_call(calls[i], nth);
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

CASE(test_an_engine_with_a_model_or_a_lease_and_no_memory_is_not_destroyed) {
    struct oo_engine *engine;
    uint32_t model, lease;
    need(oo_engine_create(sim.path, 0, &engine), "create");
    need(oo_model_add(engine, &model), "model");
    CHECK(oo_engine_destroy(engine) == OO_E_STATE, "destroyed with a model");
    need(oo_model_remove(engine, model), "remove");
    need(oo_lease_add(engine, &lease), "lease");
    ANSWERS(OO_E_STATE, "1 leases, 0 models and 0 host", oo_engine_destroy(engine));
    need(oo_lease_remove(engine, lease), "remove");
    need(oo_engine_destroy(engine), "destroy");
    check_nothing_alive("a model alone");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* What the driver refuses to take back is reported in an error message at the end. The engine is
 * destroyed anyway, and an error that comes first keeps its message. */
CASE(test_what_cannot_be_given_back_is_told) {
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

CHECK_MAIN(world_prepare)
