/*
 * A libnvidia-ml.so.1 with two cards, so that nvidia-ml-py can be driven without a driver.
 * Card 0 answers everything; card 1 has a name and answers NVML_ERROR_NOT_SUPPORTED otherwise, as
 * integrated and partitioned cards do for much. OO_NVML_INIT sets what initialisation returns.
 * A driver that errs: OO_NAME, OO_TOTAL, OO_USED, OO_WIDTH, OO_GENERATION, OO_STATE, OO_CUDA,
 * OO_COUNT, OO_HELD (by a process); OO_NO_CARD and OO_NO_GRAPHICS refuse a handle and a list.
 * Layouts and codes: nvml.h.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef OO_NAME
#define OO_NAME "Stand-in 4090"
#endif
#ifndef OO_TOTAL
#define OO_TOTAL 25769803776
#endif
#ifndef OO_USED
#define OO_USED 5368709120
#endif
#ifndef OO_WIDTH
#define OO_WIDTH 8
#endif
#ifndef OO_STATE
#define OO_STATE 2
#endif
#ifndef OO_GENERATION
#define OO_GENERATION 3
#endif
#ifndef OO_CUDA
#define OO_CUDA 12080
#endif
#ifndef OO_COUNT
#define OO_COUNT 2
#endif
#ifndef OO_HELD
#define OO_HELD ~0ULL
#endif

enum {
    SUCCESS = 0,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9
};

static unsigned long long energy; /* used so far: more at each question */

struct pci {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct memory {
    unsigned long long total, free, used;
};
struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

static int full(void *card) { return (uintptr_t)card == 1; }

/* A question that only card 0 answers. */
#define ASK(name, type, value)                                                                     \
    int name(void *card, type *out) {                                                              \
        if (!full(card))                                                                           \
            return NOT_SUPPORTED;                                                                  \
        *out = (value);                                                                            \
        return SUCCESS;                                                                            \
    }

int nvmlInitWithFlags(unsigned flags) {
    const char *wanted = getenv("OO_NVML_INIT");
    (void)flags;
    return wanted ? atoi(wanted) : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    return code == NOT_SUPPORTED       ? "Not Supported"
           : code == DRIVER_NOT_LOADED ? "Driver Not Loaded"
                                       : "Another Error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    strncpy(out, "580.65.06", size);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    *out = OO_CUDA;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = OO_COUNT;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    *out = (void *)(uintptr_t)(index + 1);
#ifdef OO_NO_CARD
    return NOT_SUPPORTED;
#endif
    return SUCCESS;
}

int nvmlDeviceGetName(void *card, char *out, unsigned size) {
    strncpy(out, full(card) ? OO_NAME : "Stand-in slice", size);
    return SUCCESS;
}

ASK(nvmlDeviceGetMemoryInfo, struct memory,
    ((struct memory){.total = OO_TOTAL, .free = 20401094656, .used = OO_USED}))
ASK(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, OO_GENERATION)
ASK(nvmlDeviceGetCurrPcieLinkWidth, unsigned, OO_WIDTH)
ASK(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 4)
ASK(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, 5)
ASK(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
ASK(nvmlDeviceGetPerformanceState, unsigned, OO_STATE)
#ifdef OO_OLD_NAMES
ASK(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 0x44)
#else
ASK(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0x44)
#endif

ASK(nvmlDeviceGetPowerUsage, unsigned, 312500)                               /* milliwatts */
ASK(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy += 2500) /* millijoules */

int nvmlDeviceGetTemperature(void *card, int sensor, unsigned *out) {
    if (!full(card) || sensor != 0)
        return NOT_SUPPORTED;
    *out = 71;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *card, int clock, unsigned *out) {
    if (!full(card))
        return NOT_SUPPORTED;
    *out = clock == 1 ? 2520 : clock == 2 ? 10501 : 0; /* SM, memory */
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    *out = (void *)(uintptr_t)(strcmp(uuid, "GPU-first") ? 2 : 1);
    return strncmp(uuid, "GPU-", 4) ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *card, struct pci *out) {
    if (!full(card))
        return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    strcpy(out->bus_id, "00000000:01:00.0");
    return SUCCESS;
}

static int list(void *card, unsigned *count, struct process *out, const struct process *have,
                unsigned number) {
    if (!full(card))
        return NOT_SUPPORTED;
    if (*count < number) {
        *count = number;
        return INSUFFICIENT_SIZE;
    }
    memcpy(out, have, number * sizeof *out);
    *count = number;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, struct process *out) {
    /* All ones is "not available", which WDDM gives. */
    static const struct process have[] = {{4242, 4294967296, 0, 0}, {77, OO_HELD, 0, 0}};
    return list(card, count, out, have, 2);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *card, unsigned *count, struct process *out) {
#ifdef OO_NO_GRAPHICS
    return NOT_SUPPORTED;
#endif
    static const struct process have[] = {{900, 268435456, 0, 0}, {4242, 4294967296, 0, 0}};
    return list(card, count, out, have, 2);
}
