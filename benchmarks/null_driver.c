/* null_driver.c - a driver whose calls cost nothing: every call succeeds at once, copies are memcpy.
 *
 * Only for measuring the engine's own host cost. The simulated driver does a lot of bookkeeping per
 * call, a real one about a microsecond; what is left over this one is ours. */
#include "../csrc/driver/driver.h"

#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static uintptr_t next_handle = 16;

static void *handle(void) { return (void *)(next_handle += 16); }

static OOCUresult OOCUDAAPI succeed(void) { return OOCU_SUCCESS; }

static OOCUresult OOCUDAAPI text(OOCUresult error, const char **out) {
    (void)error;
    *out = "null driver";
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI version(int *out) {
    *out = 12000;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI count(int *out) {
    *out = 1;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI device(OOCUdevice *out, int ordinal) {
    *out = ordinal;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI name(char *out, int length, OOCUdevice unused) {
    (void)unused;
    strncpy(out, "null", (size_t)length);
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI context_retain(OOCUcontext *out, OOCUdevice unused) {
    (void)unused;
    *out = (OOCUcontext)(uintptr_t)16;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI context_current(OOCUcontext *out) {
    *out = (OOCUcontext)(uintptr_t)16;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI memory(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = (size_t)24 << 30;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI host_alloc(void **out, size_t bytes, unsigned int flags) {
    (void)flags;
    *out = malloc(bytes);
    return *out ? OOCU_SUCCESS : OOCU_ERROR_OUT_OF_MEMORY;
}

static OOCUresult OOCUDAAPI host_free(void *ptr) {
    free(ptr);
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI upload(OOCUdeviceptr to, const void *from, size_t bytes, OOCUstream stream) {
    (void)stream;
    memcpy((void *)to, from, bytes);
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI download(void *to, OOCUdeviceptr from, size_t bytes, OOCUstream stream) {
    (void)stream;
    memcpy(to, (const void *)from, bytes);
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI priorities(int *least, int *greatest) {
    *least = *greatest = 0;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI stream_create(OOCUstream *out, unsigned int flags, int priority) {
    (void)flags, (void)priority;
    *out = handle();
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI event_create(OOCUevent *out, unsigned int flags) {
    (void)flags;
    *out = handle();
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI capturing(OOCUstream stream, int *status) {
    (void)stream;
    *status = OOCU_STREAM_CAPTURE_STATUS_NONE;
    return OOCU_SUCCESS;
}

static OOCUresult OOCUDAAPI elapsed(float *milliseconds, OOCUevent start, OOCUevent end) {
    (void)start, (void)end;
    *milliseconds = 0.0f;
    return OOCU_SUCCESS;
}

/* Of host memory, the only kind that is asked about: the device has it where the host has it. */
static OOCUresult OOCUDAAPI pointer(void *out, int attribute, OOCUdeviceptr of) {
    (void)attribute;
    *(OOCUdeviceptr *)out = of;
    return OOCU_SUCCESS;
}

struct call {
    const char *name;
    void (*function)(void);
};

#define CALL(name, function) {name, (void (*)(void))(function)}
static const struct call special[] = {
    CALL("cuGetErrorName", text),
    CALL("cuGetErrorString", text),
    CALL("cuDriverGetVersion", version),
    CALL("cuDeviceGetCount", count),
    CALL("cuDeviceGet", device),
    CALL("cuDeviceGetName", name),
    CALL("cuDeviceGetPCIBusId", name),
    CALL("cuDevicePrimaryCtxRetain", context_retain),
    CALL("cuCtxGetCurrent", context_current),
    CALL("cuMemGetInfo", memory),
    CALL("cuMemHostAlloc", host_alloc),
    CALL("cuMemFreeHost", host_free),
    CALL("cuMemcpyHtoDAsync", upload),
    CALL("cuMemcpyDtoHAsync", download),
    CALL("cuCtxGetStreamPriorityRange", priorities),
    CALL("cuStreamCreateWithPriority", stream_create),
    CALL("cuEventCreate", event_create),
    CALL("cuStreamIsCapturing", capturing),
    CALL("cuEventElapsedTime", elapsed),
    CALL("cuPointerGetAttribute", pointer),
};

EXPORT OOCUresult OOCUDAAPI cuGetProcAddress_v2(const char *symbol, void **function, int introduced, uint64_t flags,
                                                int *query_result);
EXPORT OOCUresult OOCUDAAPI cuGetProcAddress_v2(const char *symbol, void **function, int introduced, uint64_t flags,
                                                int *query_result) {
    void (*found)(void) = (void (*)(void))succeed;
    (void)introduced, (void)flags, (void)query_result;
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++)
        if (strcmp(special[i].name, symbol) == 0)
            found = special[i].function;
    memcpy(function, &found, sizeof found);
    return OOCU_SUCCESS;
}
