/* sim_test.h - every call of the simulated driver, found by its exported name, for its own tests.
 * The engine's tests use sim_control.h and the driver table instead. */
#ifndef SIM_TEST_H
#define SIM_TEST_H

#include "../../csrc/base/os.h"
#include "../../csrc/sim/sim_calls.h"
#include "check.h"

#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define SIM_TEST_CONTROLS(X) \
    X(simAdopt) X(simDrop) X(simLaunch) X(simHostAccess) X(simExpectPageable) X(simRead) X(simAwait) \
    X(simReaders) X(simPass) X(simSubmitsLate) X(simPreset) X(simGetDevice) \
    X(simSetDevice) X(simSetDeviceCount) X(simSetSchedule) X(simSwitch) \
    X(simRefuseRegistration) X(simLockQuota) X(simFault) X(simFaultClear) X(simHold) X(simPatience) \
    X(simCallCount) X(simGetStats) X(simGetLive) X(simNow) X(simClock) X(simAdvance) X(simFinish) \
    X(simReportCount) X(simReport) X(simReportsClear) X(simLabelRange) X(simLabelStream) \
    X(simTraceCount) X(simTraceRow) X(simTraceClear) X(simScheduleText) X(simReset)
/* clang-format on */

struct sim_library {
#define SIM_TEST_FIELD(base, symbol, introduced, traits, parameters) __typeof__(&symbol) base;
    SIM_CALLS(SIM_TEST_FIELD)
#undef SIM_TEST_FIELD
#define SIM_TEST_FIELD(name) __typeof__(&name) name;
    SIM_TEST_CONTROLS(SIM_TEST_FIELD)
#undef SIM_TEST_FIELD
};

static struct sim_library cu;
static OOCUcontext sim_context;

static inline void sim_test_find(void *library, const char *name, void *slot) {
    void *symbol = oo__library_symbol(library, name);
    if (!symbol) {
        fprintf(stderr, "the simulated driver does not export %s\n", name);
        exit(2);
    }
    memcpy(slot, &symbol, sizeof symbol);
}

/* Loads the library that ORACLE_OFFLOAD_DRIVER names. */
static inline void sim_test_open(void) {
    const char *path = getenv("ORACLE_OFFLOAD_DRIVER");
    void *library = path ? oo__library_open(path) : NULL;
    if (!library) {
        fprintf(stderr, "ORACLE_OFFLOAD_DRIVER names no simulated driver\n");
        exit(2);
    }
#define SIM_TEST_FIND(base, symbol, introduced, traits, parameters)                                \
    sim_test_find(library, #symbol, &cu.base);
    SIM_CALLS(SIM_TEST_FIND)
#undef SIM_TEST_FIND
#define SIM_TEST_FIND(name) sim_test_find(library, #name, &cu.name);
    SIM_TEST_CONTROLS(SIM_TEST_FIND)
#undef SIM_TEST_FIND
    check_schedule = cu.simScheduleText;
}

static inline void sim_ok(OOCUresult result, const char *what, int line) {
    CHECK(result == OOCU_SUCCESS, "line %d: %s returned %d", line, what, result);
}
#define OK(call) sim_ok((call), #call, __LINE__)
#define IS(expected, call)                                                                         \
    do {                                                                                           \
        const OOCUresult is_result = (call);                                                       \
        CHECK(is_result == (expected), "%s returned %d, not %d", #call, is_result,                 \
              (int)(expected));                                                                    \
    } while (0)

/* A current context on device 0, and nothing else; every test ends with sim_test_end. */
static inline void sim_test_begin(int schedule, uint64_t seed) {
    OK(cu.simReset());
    OK(cu.simSetSchedule(schedule, seed));
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&sim_context, 0));
    OK(cu.cuCtxPushCurrent(sim_context));
}

static inline void sim_test_end(void) {
    OK(cu.cuCtxPopCurrent(NULL));
    OK(cu.cuDevicePrimaryCtxRelease(0));
    OK(cu.simReset());
}

static inline OOCUstream new_stream(void) {
    OOCUstream stream = NULL;
    OK(cu.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, 0));
    return stream;
}

static inline OOCUevent new_event(void) {
    OOCUevent event = NULL;
    OK(cu.cuEventCreate(&event, OOCU_EVENT_DEFAULT));
    return event;
}

static inline OOCUdeviceptr device_bytes(size_t bytes) {
    OOCUdeviceptr ptr = 0;
    OK(cu.cuMemAlloc(&ptr, bytes));
    return ptr;
}

static inline void *host_bytes(size_t bytes) {
    void *ptr = NULL;
    OK(cu.cuMemHostAlloc(&ptr, bytes, 0));
    return ptr;
}

static inline uint64_t reports_of(const char *kind) {
    uint64_t count = 0;
    static char text[4096];
    for (uint64_t i = 0; i < cu.simReportCount(); i++) {
        OK(cu.simReport(i, text, sizeof text));
        count += strncmp(text, kind, strlen(kind)) == 0;
    }
    return count;
}

static inline void print_reports(void) {
    static char text[4096];
    for (uint64_t i = 0; i < cu.simReportCount(); i++) {
        cu.simReport(i, text, sizeof text);
        fprintf(stderr, "%s\n", text);
    }
}

static const char *const schedule_names[] = {"timed",          "random", "starve-copy",
                                             "starve-compute", "eager",  "delayed"};

#endif
