/* sim_control.h - the simulator's control calls, found at run time as the engine finds the driver.
 */
#ifndef SIM_CONTROL_H
#define SIM_CONTROL_H

#include "../../csrc/base/os.h"
#include "../../csrc/sim/sim_calls.h"
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define SIM_CONTROLS(X) \
    X(simScheduleText) X(simGetDevice) X(simSetDevice) X(simSetDeviceCount) X(simSetSchedule) X(simSwitch) \
    X(simRefuseRegistration) X(simLockQuota) X(simFault) X(simFaultClear) X(simHold) X(simCallCount) \
    X(simGetStats) X(simGetLive) X(simNow) X(simAdvance) X(simFinish) X(simReportCount) \
    X(simReport) X(simReportsClear) X(simReset) X(simAdopt) X(simDrop) X(simLaunch) \
    X(simHostAccess) X(simTraceCount) X(simTraceRow) X(simTraceClear) X(cuInit) \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuCtxGetCurrent) \
    X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuMemAlloc_v2) X(cuMemFree_v2) \
    X(cuStreamCreateWithPriority) X(cuStreamDestroy_v2) X(cuStreamBeginCapture_v2) X(cuStreamGetPriority) X(cuStreamGetFlags) X(cuCtxGetStreamPriorityRange) \
    X(cuStreamEndCapture) X(cuGraphDestroy) X(cuMemHostRegister_v2) X(cuMemHostUnregister)
/* clang-format on */

struct sim_control {
#define SIM_FIELD(name) __typeof__(&name) name;
    SIM_CONTROLS(SIM_FIELD)
#undef SIM_FIELD
    const char *path;
};

/* The simulator named by ORACLE_OFFLOAD_DRIVER; ends the program when there is none. */
static inline struct sim_control sim_open(void) {
    struct sim_control sim;
    sim.path = getenv("ORACLE_OFFLOAD_DRIVER");
    void *library = sim.path ? oo__library_open(sim.path) : NULL;
    if (!library) {
        char reason[512];
        fprintf(stderr, "no simulated driver at %s: %s\n",
                sim.path ? sim.path : "(ORACLE_OFFLOAD_DRIVER)",
                oo__library_error(reason, sizeof reason));
        exit(2);
    }
#define SIM_FIND(name)                                                                             \
    do {                                                                                           \
        void *symbol = oo__library_symbol(library, #name);                                         \
        if (!symbol) {                                                                             \
            fprintf(stderr, "%s does not export %s\n", sim.path, #name);                           \
            exit(2);                                                                               \
        }                                                                                          \
        memcpy(&sim.name, &symbol, sizeof symbol);                                                 \
    } while (0);
    SIM_CONTROLS(SIM_FIND)
#undef SIM_FIND
    check_schedule = sim.simScheduleText;
    return sim;
}

/* simReset, and what the environment switches off for all tests: the mutation gate proves by that
 * that the race detector is what catches races. Returns what simReset does. */
static inline OOCUresult sim_reset(const struct sim_control *sim) {
    const OOCUresult result = sim->simReset();
    if (getenv("ORACLE_OFFLOAD_TEST_RACES_OFF"))
        sim->simSwitch(SIM_RACES, 0);
    return result;
}

#endif
