/* conformance.c - what a CUDA driver does, as small cases; one line per case.
 *
 *     conformance [DRIVER]          run all cases on the library at DRIVER, or on the one that
 *                                   ORACLE_OFFLOAD_DRIVER names, or on the system's driver
 *     conformance DRIVER CASE       one case, in this process
 *
 * The same program runs on the real and on the simulated driver; a line that differs is a bug of
 * the simulator. A line is `name: ok`, `name: FAILED what`, `name: skipped why`, or `name: observed
 * value` where the documentation leaves the value open. Cases that need a process of their own
 * (before cuInit, after the end of a context, after a sticky error, captures) get one. Use of
 * destroyed handles and the like is undefined on a real driver and therefore tested on the
 * simulator alone (test_sim_calls.c).
 */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif

#include "../../csrc/base/os.h"
#include "../../csrc/driver/driver.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32)
#define popen  _popen
#define pclose _pclose
#endif

/* ---- the driver ---- */

/* What the engine does not call. */
#define OTHER_CALLS(X)                                                                             \
    X(cuStreamGetPriority, 5050, OPTIONAL, (OOCUstream stream, int *priority))                     \
    X(cuStreamGetFlags, 5050, OPTIONAL, (OOCUstream stream, unsigned int *flags))                  \
    X(cuStreamBeginCapture, 10010, OPTIONAL, (OOCUstream stream, int mode))                        \
    X(cuStreamEndCapture, 10000, OPTIONAL, (OOCUstream stream, void **graph))                      \
    X(cuGraphDestroy, 10000, OPTIONAL, (void *graph))

typedef OOCUresult(OOCUDAAPI *proc_address)(const char *name, void **function, int version,
                                            uint64_t flags, int *status);

static struct {
#define FIELD(name, introduced, need, parameters) OOCUresult(OOCUDAAPI *name) parameters;
    OO_DRIVER_CALLS(FIELD)
    OTHER_CALLS(FIELD)
#undef FIELD
    proc_address get;
} cu;

static void find(const char *name, int introduced, void *slot) {
    void *function = NULL;
    int status = 0;
    if (introduced &&
        cu.get(name, &function, introduced, OOCU_GET_PROC_ADDRESS_LEGACY_STREAM, &status))
        function = NULL;
    memcpy(slot, &function, sizeof function);
}

static int load(const char *path) {
    void *library = path && *path ? oo__library_open(path) : oo__library_open_cuda();
    void *symbol = library ? oo__library_symbol(library, "cuGetProcAddress_v2") : NULL;
    if (!symbol)
        return 0;
    memcpy(&cu.get, &symbol, sizeof symbol);
#define FIND(name, introduced, need, parameters) find(#name, introduced, &cu.name);
    OO_DRIVER_CALLS(FIND)
    OTHER_CALLS(FIND)
#undef FIND
    return 1;
}

/* ---- a case's outcome ---- */

static char outcome[256];

static void say(const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 1, 2)))
#endif
    ;
static void say(const char *format, ...) {
    if (outcome[0])
        return; /* the first word counts */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(outcome, sizeof outcome, format, arguments);
    va_end(arguments);
}

static void expect(OOCUresult expected, OOCUresult result, const char *call, int line) {
    if (result != expected)
        say("FAILED line %d: %.120s is %d, not %d", line, call, result, expected);
}
#define IS(expected, call) expect((expected), (call), #call, __LINE__)
#define OK(call)           IS(OOCU_SUCCESS, call)
#define TRUE(condition)                                                                            \
    do {                                                                                           \
        if (!(condition))                                                                          \
            say("FAILED line %d: not %.120s", __LINE__, #condition);                               \
    } while (0)
/* An error of one of several kinds. */
#define REFUSED(call)                                                                              \
    do {                                                                                           \
        if ((call) == OOCU_SUCCESS)                                                                \
            say("FAILED line %d: %.120s succeeds", __LINE__, #call);                               \
    } while (0)
#define NEEDS(call)                                                                                \
    do {                                                                                           \
        if (!cu.call) {                                                                            \
            say("skipped: the driver lacks " #call);                                               \
            return;                                                                                \
        }                                                                                          \
    } while (0)

/* ---- a case ---- */

enum how {
    PLAIN = 0,
    SET_UP = 1, /* between set_up and tear_down */
    ALONE = 2,  /* in a process of its own */
    DEADLY = 4, /* no tear_down: the context is gone */
    /* What it needs of a driver that may be older. */
    GATE = 8,
    TIMES = 16,
    KERNELS = 32,
    CAPTURES = 64
};

struct conformance_case {
    const char *name;
    void (*run)(void);
    int how, line;
    struct conformance_case *next;
};
static struct conformance_case *cases; /* in the order of this file */

static void add_case(struct conformance_case *added) {
    struct conformance_case **at = &cases;
    while (*at && (*at)->line < added->line)
        at = &(*at)->next;
    added->next = *at;
    *at = added;
}

/* Begins the function of a case, which is added to the others before main. */
#define CASE(name, how)                                                                            \
    static void name(void);                                                                        \
    static struct conformance_case case_of_##name = {#name, name, how, __LINE__, NULL};            \
    __attribute__((constructor)) static void add_##name(void) { add_case(&case_of_##name); }       \
    static void name(void)

/* ---- what most cases need ---- */

enum { PAGE = 1 << 16, WORDS = PAGE / 4 };

static OOCUcontext context;
static OOCUstream a, b; /* non-blocking */
static OOCUevent e, f;
static OOCUdeviceptr device;
static uint32_t *pinned; /* page-locked, PAGE bytes */

static void use_context(void) {
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxPushCurrent(context));
}

static void drop_context(void) {
    OOCUcontext popped;
    OK(cu.cuCtxPopCurrent(&popped));
    OK(cu.cuDevicePrimaryCtxRelease(0));
}

static void set_up(void) {
    use_context();
    OK(cu.cuStreamCreateWithPriority(&a, OOCU_STREAM_NON_BLOCKING, 0));
    OK(cu.cuStreamCreateWithPriority(&b, OOCU_STREAM_NON_BLOCKING, 0));
    OK(cu.cuEventCreate(&e, OOCU_EVENT_DEFAULT));
    OK(cu.cuEventCreate(&f, OOCU_EVENT_DEFAULT));
    OK(cu.cuMemAlloc(&device, PAGE));
    OK(cu.cuMemHostAlloc((void **)&pinned, PAGE, 0));
    if (pinned)
        memset(pinned, 0, PAGE);
}

static void tear_down(void) {
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuStreamSynchronize(b));
    OK(cu.cuStreamDestroy(a));
    OK(cu.cuStreamDestroy(b));
    OK(cu.cuEventDestroy(e));
    OK(cu.cuEventDestroy(f));
    OK(cu.cuMemFree(device));
    OK(cu.cuMemFreeHost(pinned));
    drop_context();
}

/* A gate: a host function that keeps its stream waiting until it is opened. */
static atomic_int gate_open, gates_passed;

static void OOCUDAAPI wait_at_gate(void *unused) {
    (void)unused;
    const time_t begin = time(NULL);
    while (!atomic_load(&gate_open) && time(NULL) - begin < 8)
        ;
    atomic_fetch_add(&gates_passed, 1);
}

static void shut(OOCUstream stream) {
    atomic_store(&gate_open, 0);
    atomic_store(&gates_passed, 0);
    OK(cu.cuLaunchHostFunc(stream, wait_at_gate, NULL));
}

static void open_gate(void) { atomic_store(&gate_open, 1); }

/* Polls; work that nothing holds up ends within seconds. */
static int becomes_ready(OOCUstream stream) {
    const time_t begin = time(NULL);
    OOCUresult result;
    do
        result = cu.cuStreamQuery(stream);
    while (result == OOCU_ERROR_NOT_READY && time(NULL) - begin < 8);
    return result == OOCU_SUCCESS;
}

/* Word 0 of device memory, over its own stream, so that it disturbs no other. */
static uint32_t word(size_t index) {
    static uint32_t *landing;
    OOCUstream stream;
    uint32_t value;
    OK(cu.cuMemHostAlloc((void **)&landing, 4, 0));
    OK(cu.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, 0));
    OK(cu.cuMemcpyDtoHAsync(landing, device + 4 * index, 4, stream));
    OK(cu.cuStreamSynchronize(stream));
    OK(cu.cuStreamDestroy(stream));
    value = *landing;
    OK(cu.cuMemFreeHost(landing));
    return value;
}

static void put(uint32_t value, OOCUstream stream) {
    OK(cu.cuMemsetD32Async(device, value, WORDS, stream));
}

/* ---- before and around cuInit (each in a process of its own) ---- */

CASE(before_init_the_version_is_known, ALONE) {
    int version = 0;
    OK(cu.cuDriverGetVersion(&version));
    TRUE(version >= 12000);
}

CASE(before_init_errors_have_names, ALONE) {
    const char *name = NULL, *text = NULL;
    OK(cu.cuGetErrorName(OOCU_ERROR_OUT_OF_MEMORY, &name));
    OK(cu.cuGetErrorString(OOCU_ERROR_OUT_OF_MEMORY, &text));
    TRUE(name && !strcmp(name, "CUDA_ERROR_OUT_OF_MEMORY"));
    TRUE(text && !strcmp(text, "out of memory"));
}

CASE(before_init_symbols_are_found, ALONE) {
    void *function = NULL;
    int status;
    OK(cu.get("cuInit", &function, 2000, 0, &status));
    TRUE(function != NULL);
}

CASE(before_init_devices_are_refused, ALONE) {
    int count;
    OOCUdevice first;
    IS(OOCU_ERROR_NOT_INITIALIZED, cu.cuDeviceGetCount(&count));
    IS(OOCU_ERROR_NOT_INITIALIZED, cu.cuDeviceGet(&first, 0));
}

CASE(before_init_contexts_are_refused, ALONE) {
    OOCUcontext current;
    IS(OOCU_ERROR_NOT_INITIALIZED, cu.cuCtxGetCurrent(&current));
    IS(OOCU_ERROR_NOT_INITIALIZED, cu.cuDevicePrimaryCtxRetain(&current, 0));
}

CASE(before_init_memory_is_refused, ALONE) {
    OOCUdeviceptr ptr;
    IS(OOCU_ERROR_NOT_INITIALIZED, cu.cuMemAlloc(&ptr, 4));
}

CASE(init_takes_no_flags, ALONE) { IS(OOCU_ERROR_INVALID_VALUE, cu.cuInit(1)); }

CASE(init_twice_is_fine, ALONE) {
    OK(cu.cuInit(0));
    OK(cu.cuInit(0));
}

/* ---- symbols and errors ---- */

CASE(an_unknown_symbol_is_success_and_null, PLAIN) {
    void *function = &function;
    int status = 0;
    OK(cu.get("cuThisCallDoesNotExist", &function, 12000, 0, &status));
    TRUE(function == NULL);
    TRUE(status == 1);
}

CASE(a_symbol_newer_than_asked_for_is_null, PLAIN) {
    void *function = &function;
    int status = 0;
    OK(cu.get("cuLaunchHostFunc", &function, 9000, 0, &status));
    TRUE(function == NULL);
    TRUE(status == 2);
}

/* 0 from drivers 535 and 550, 1 (an invalid value) from 580. */
CASE(a_version_far_above_the_drivers, PLAIN) {
    void *function = NULL;
    int status;
    say("observed %d", cu.get("cuMemGetInfo", &function, 99000, 0, &status));
}

CASE(errors_have_the_documented_names, PLAIN) {
    static const struct {
        OOCUresult value;
        const char *name;
    } table[] = {{0, "CUDA_SUCCESS"},
                 {1, "CUDA_ERROR_INVALID_VALUE"},
                 {3, "CUDA_ERROR_NOT_INITIALIZED"},
                 {4, "CUDA_ERROR_DEINITIALIZED"},
                 {34, "CUDA_ERROR_STUB_LIBRARY"},
                 {100, "CUDA_ERROR_NO_DEVICE"},
                 {101, "CUDA_ERROR_INVALID_DEVICE"},
                 {201, "CUDA_ERROR_INVALID_CONTEXT"},
                 {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
                 {400, "CUDA_ERROR_INVALID_HANDLE"},
                 {401, "CUDA_ERROR_ILLEGAL_STATE"},
                 {500, "CUDA_ERROR_NOT_FOUND"},
                 {600, "CUDA_ERROR_NOT_READY"},
                 {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                 {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
                 {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
                 {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                 {719, "CUDA_ERROR_LAUNCH_FAILED"},
                 {800, "CUDA_ERROR_NOT_PERMITTED"},
                 {801, "CUDA_ERROR_NOT_SUPPORTED"},
                 {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                 {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                 {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
                 {907, "CUDA_ERROR_CAPTURED_EVENT"},
                 {999, "CUDA_ERROR_UNKNOWN"}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const char *name = NULL;
        if (cu.cuGetErrorName(table[i].value, &name) != OOCU_SUCCESS || !name ||
            strcmp(name, table[i].name) != 0)
            say("FAILED: error %d is %s, not %s", table[i].value, name ? name : "nameless",
                table[i].name);
    }
}

CASE(an_unknown_error_has_no_name, PLAIN) {
    const char *name = "";
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuGetErrorName(123456, &name));
    TRUE(name == NULL);
}

/* ---- devices ---- */

CASE(there_is_a_device, PLAIN) {
    int count = 0;
    OOCUdevice first = -1;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&count));
    TRUE(count >= 1);
    OK(cu.cuDeviceGet(&first, 0));
    TRUE(first == 0);
}

CASE(ordinals_out_of_range_are_refused, PLAIN) {
    OOCUdevice none;
    int count = 0;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&count));
    IS(OOCU_ERROR_INVALID_DEVICE, cu.cuDeviceGet(&none, count));
    IS(OOCU_ERROR_INVALID_DEVICE, cu.cuDeviceGet(&none, -1));
}

CASE(a_device_has_name_and_bus_id, PLAIN) {
    char name[128] = "", id[32] = "";
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetName(name, sizeof name, 0));
    TRUE(name[0] && strlen(name) < sizeof name);
    OK(cu.cuDeviceGetPCIBusId(id, sizeof id, 0));
    TRUE(strlen(id) == 12 && id[4] == ':' && id[7] == ':' && id[10] == '.');
}

CASE(a_device_has_attributes, PLAIN) {
    int engines = 0, major = 0;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetAttribute(&engines, OOCU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 0));
    TRUE(engines >= 1);
    OK(cu.cuDeviceGetAttribute(&major, OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    TRUE(major >= 5);
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuDeviceGetAttribute(&major, -1, 0));
    int warp = 0, threads = 0;
    OK(cu.cuDeviceGetAttribute(&warp, 10, 0));
    OK(cu.cuDeviceGetAttribute(&threads, 1, 0));
    TRUE(warp == 32 && threads == 1024);
}

/* ---- contexts ---- */

CASE(without_a_context_calls_are_refused, ALONE) {
    OOCUdeviceptr ptr;
    OOCUevent event;
    OOCUstream stream;
    void *host;
    size_t free_bytes, total;
    OK(cu.cuInit(0));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuMemAlloc(&ptr, 4));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuMemHostAlloc(&host, 4, 0));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuEventCreate(&event, 0));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuStreamCreateWithPriority(&stream, 0, 0));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuMemGetInfo(&free_bytes, &total));
}

CASE(at_first_no_context_is_current, ALONE) {
    OOCUcontext current = (OOCUcontext)&current;
    OK(cu.cuInit(0));
    OK(cu.cuCtxGetCurrent(&current));
    TRUE(current == NULL);
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuCtxPopCurrent(&current));
}

CASE(a_retained_context_is_not_current, ALONE) {
    OOCUcontext current = NULL;
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxGetCurrent(&current));
    TRUE(current == NULL);
    OK(cu.cuDevicePrimaryCtxRelease(0));
}

CASE(the_primary_context_is_one, PLAIN) {
    OOCUcontext again = NULL;
    use_context();
    OK(cu.cuDevicePrimaryCtxRetain(&again, 0));
    TRUE(again == context);
    OK(cu.cuDevicePrimaryCtxRelease(0));
    OOCUstream stream;
    OK(cu.cuStreamCreateWithPriority(&stream, 0, 0)); /* one reference is left */
    OK(cu.cuStreamDestroy(stream));
    drop_context();
}

CASE(contexts_are_a_stack, PLAIN) {
    OOCUcontext current = NULL;
    use_context();
    OK(cu.cuCtxPushCurrent(context));
    OK(cu.cuCtxPopCurrent(&current));
    TRUE(current == context);
    OK(cu.cuCtxGetCurrent(&current));
    TRUE(current == context);
    drop_context();
    OK(cu.cuCtxGetCurrent(&current));
    TRUE(current == NULL);
}

CASE(after_the_last_release_work_is_refused, ALONE) {
    OOCUdeviceptr ptr;
    use_context();
    OK(cu.cuMemAlloc(&ptr, 4));
    OK(cu.cuDevicePrimaryCtxRelease(0));
    IS(OOCU_ERROR_CONTEXT_IS_DESTROYED, cu.cuMemAlloc(&ptr, 4));
}

CASE(releasing_what_is_not_retained, ALONE) {
    OK(cu.cuInit(0));
    say("observed %d", cu.cuDevicePrimaryCtxRelease(0));
}

/* ---- memory ---- */

CASE(allocations_of_nothing_and_too_much, SET_UP) {
    OOCUdeviceptr ptr;
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemAlloc(&ptr, 0));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc(&ptr, (size_t)1 << 50));
}

CASE(device_memory_is_accounted_for, SET_UP) {
    enum { BYTES = 256 << 20 };
    size_t before = 0, during = 0, after = 0, total = 0;
    OOCUdeviceptr ptr = 0;
    OK(cu.cuMemGetInfo(&before, &total));
    TRUE(before <= total);
    OK(cu.cuMemAlloc(&ptr, BYTES));
    OK(cu.cuMemGetInfo(&during, &total));
    TRUE(before - during >= BYTES && before - during < BYTES + (BYTES >> 2));
    OK(cu.cuMemFree(ptr));
    OK(cu.cuMemGetInfo(&after, &total));
    TRUE(after >= during + BYTES);
}

CASE(only_the_start_of_an_allocation_is_freed, SET_UP) {
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemFree(device + 256));
    put(5, a);
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 5);
}

CASE(pointers_know_their_memory, SET_UP) {
    unsigned type = 0;
    int local;
    OK(cu.cuPointerGetAttribute(&type, OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 100));
    TRUE(type == OOCU_MEMORYTYPE_DEVICE);
    OK(cu.cuPointerGetAttribute(&type, OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                (OOCUdeviceptr)pinned + 100));
    TRUE(type == OOCU_MEMORYTYPE_HOST);
    IS(OOCU_ERROR_INVALID_VALUE,
       cu.cuPointerGetAttribute(&type, OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE, (OOCUdeviceptr)&local));
}

/* Page-aligned memory of our own, PAGE bytes, not yet registered. */
static char *pages(void) {
    static char *block;
    if (!block)
        block = malloc(3 * PAGE);
    return (char *)(((uintptr_t)block + PAGE - 1) / PAGE * PAGE);
}

/* Kernels read page-locked memory at that address. */
CASE(page_locked_memory_has_an_address_on_the_device, SET_UP) {
    OOCUdeviceptr mapped = 0;
    OK(cu.cuPointerGetAttribute(&mapped, OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                (OOCUdeviceptr)pinned + 100));
    TRUE(mapped != 0);
    char *memory = pages();
    OK(cu.cuMemHostRegister(memory, PAGE,
                            OOCU_MEMHOSTREGISTER_PORTABLE | OOCU_MEMHOSTREGISTER_DEVICEMAP));
    OOCUdeviceptr next = 0;
    OK(cu.cuPointerGetAttribute(&mapped, OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                (OOCUdeviceptr)memory));
    OK(cu.cuPointerGetAttribute(&next, OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                (OOCUdeviceptr)memory + 256));
    TRUE(mapped != 0 && next == mapped + 256);
    OK(cu.cuMemHostUnregister(memory));
}

CASE(host_memory_is_registered_once, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE, OOCU_MEMHOSTREGISTER_PORTABLE));
    IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister(block, PAGE, 0));
    OK(cu.cuMemHostUnregister(block));
    IS(OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(block));
    OK(cu.cuMemHostRegister(block, PAGE, 0));
    OK(cu.cuMemHostUnregister(block));
}

CASE(registrations_may_not_overlap, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE, 0));
    IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister(block + PAGE / 2, PAGE, 0));
    OK(cu.cuMemHostUnregister(block));
}

CASE(registrations_may_touch, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE / 2, 0));
    OK(cu.cuMemHostRegister(block + PAGE / 2, PAGE / 2, 0));
    OK(cu.cuMemHostUnregister(block));
    OK(cu.cuMemHostUnregister(block + PAGE / 2));
}

CASE(registering_nothing_is_refused, SET_UP) {
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister(NULL, PAGE, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister(pages(), 0, 0));
    REFUSED(cu.cuMemHostRegister((void *)(uintptr_t)4096, 4096, 0)); /* nothing is mapped so low */
}

CASE(only_the_start_of_a_registration_is_unregistered, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE, 0));
    REFUSED(cu.cuMemHostUnregister(block + PAGE / 2));
    OK(cu.cuMemHostUnregister(block));
}

CASE(allocated_host_memory_is_no_registration, SET_UP) {
    REFUSED(cu.cuMemHostUnregister(pinned));
    REFUSED(cu.cuMemHostRegister(pinned, PAGE, 0));
    REFUSED(cu.cuMemFreeHost(pages()));
}

/* ---- copies ---- */

CASE(copies_go_there_and_back, SET_UP) {
    for (uint32_t i = 0; i < WORDS; i++)
        pinned[i] = i;
    OK(cu.cuMemcpyHtoDAsync(device, pinned, PAGE, a));
    OK(cu.cuStreamSynchronize(a));
    memset(pinned, 0, PAGE);
    OK(cu.cuMemcpyDtoHAsync(pinned, device, PAGE, a));
    OK(cu.cuStreamSynchronize(a));
    TRUE(pinned[0] == 0 && pinned[1] == 1 && pinned[WORDS - 1] == WORDS - 1);
}

CASE(copies_of_registered_memory, SET_UP) {
    char *block = pages();
    memset(block, 7, PAGE);
    OK(cu.cuMemHostRegister(block, PAGE, 0));
    OK(cu.cuMemcpyHtoDAsync(device, block, PAGE, a));
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(WORDS - 1) == 0x07070707);
    OK(cu.cuMemHostUnregister(block));
}

CASE(copies_of_pageable_memory, SET_UP) {
    char *block = pages();
    memset(block, 8, PAGE);
    OK(cu.cuMemcpyHtoDAsync(device, block, PAGE, a));
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 0x08080808);
    memset(block, 0, PAGE);
    OK(cu.cuMemcpyDtoHAsync(block, device, PAGE, a));
    OK(cu.cuStreamSynchronize(a));
    TRUE(block[0] == 8 && block[PAGE - 1] == 8);
}

CASE(copies_of_nothing, SET_UP) {
    OK(cu.cuMemcpyHtoDAsync(device, pinned, 0, a));
    OK(cu.cuMemcpyDtoHAsync(pinned, device, 0, a));
    OK(cu.cuMemsetD32Async(device, 1, 0, a));
}

CASE(copies_to_no_device_memory_are_refused, SET_UP) {
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync((OOCUdeviceptr)64, pinned, 64, a));
}

CASE(copies_of_partly_registered_memory_are_refused, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE / 2, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync(device, block, PAGE, a));
    OK(cu.cuMemHostUnregister(block));
}

CASE(copies_over_two_registrations_are_refused, SET_UP) {
    char *block = pages();
    OK(cu.cuMemHostRegister(block, PAGE / 2, 0));
    OK(cu.cuMemHostRegister(block + PAGE / 2, PAGE / 2, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync(device, block, PAGE, a));
    OK(cu.cuMemHostUnregister(block));
    OK(cu.cuMemHostUnregister(block + PAGE / 2));
}

CASE(a_pinned_source_is_read_when_the_copy_runs, SET_UP | GATE) {
    pinned[0] = 1;
    shut(a);
    OK(cu.cuMemcpyHtoDAsync(device, pinned, 4, a));
    pinned[0] = 2;
    open_gate();
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 2);
}

CASE(a_stream_keeps_its_order, SET_UP) {
    for (uint32_t i = 1; i <= 50; i++)
        put(i, a);
    OK(cu.cuMemcpyDtoHAsync(pinned, device, PAGE, a));
    put(99, a);
    OK(cu.cuStreamSynchronize(a));
    TRUE(pinned[0] == 50 && pinned[WORDS - 1] == 50);
    TRUE(word(0) == 99);
}

CASE(memset_needs_alignment, SET_UP) {
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemsetD32Async(device + 2, 1, 1, a));
}

/* ---- streams ---- */

CASE(stream_flags_are_checked, SET_UP) {
    OOCUstream stream;
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuStreamCreateWithPriority(&stream, 0x80, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuStreamCreateWithPriority(NULL, 0, 0));
}

CASE(priorities_are_clamped, SET_UP) {
    int least = -100, greatest = 100;
    OOCUstream stream;
    NEEDS(cuStreamGetPriority);
    OK(cu.cuCtxGetStreamPriorityRange(&least, &greatest));
    TRUE(least >= greatest);
    for (int i = 0; i < 2; i++) {
        int priority = 100;
        OK(cu.cuStreamCreateWithPriority(&stream, 0, i ? greatest - 1000 : least + 1000));
        OK(cu.cuStreamGetPriority(stream, &priority));
        TRUE(priority == (i ? greatest : least));
        OK(cu.cuStreamDestroy(stream));
    }
}

CASE(a_stream_keeps_its_priority, SET_UP) {
    int least = -100, greatest = 100;
    NEEDS(cuStreamGetPriority);
    OK(cu.cuCtxGetStreamPriorityRange(&least, &greatest));
    for (int asked = greatest; asked <= least; asked++) {
        OOCUstream stream;
        int priority = 100;
        OK(cu.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, asked));
        OK(cu.cuStreamGetPriority(stream, &priority));
        TRUE(priority == asked);
        OK(cu.cuStreamDestroy(stream));
    }
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuStreamGetPriority(a, NULL));
}

CASE(a_stream_keeps_its_flags, SET_UP) {
    NEEDS(cuStreamGetFlags);
    for (unsigned asked = OOCU_STREAM_DEFAULT; asked <= OOCU_STREAM_NON_BLOCKING; asked++) {
        OOCUstream stream;
        unsigned flags = 100;
        OK(cu.cuStreamCreateWithPriority(&stream, asked, 0));
        OK(cu.cuStreamGetFlags(stream, &flags));
        TRUE(flags == asked);
        OK(cu.cuStreamDestroy(stream));
    }
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuStreamGetFlags(a, NULL));
}

CASE(an_idle_stream_is_ready, SET_UP) {
    OK(cu.cuStreamQuery(a));
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuStreamQuery(OOCU_STREAM_LEGACY));
}

CASE(a_busy_stream_is_not_ready, SET_UP | GATE) {
    shut(a);
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(a));
    OK(cu.cuStreamQuery(b));
    open_gate();
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuStreamQuery(a));
}

CASE(destroying_a_stream_drops_no_work, SET_UP | GATE) {
    OOCUstream stream;
    OK(cu.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, 0));
    put(1, stream);
    OK(cu.cuStreamSynchronize(stream));
    shut(stream);
    put(2, stream);
    OK(cu.cuEventRecord(e, stream));
    OK(cu.cuStreamDestroy(stream)); /* returns with the gate still shut */
    IS(OOCU_ERROR_NOT_READY, cu.cuEventQuery(e));
    open_gate();
    OK(cu.cuEventSynchronize(e));
    TRUE(word(0) == 2);
}

CASE(a_non_blocking_stream_ignores_the_legacy_one, SET_UP | GATE) {
    shut(OOCU_STREAM_LEGACY);
    put(3, a);
    TRUE(becomes_ready(a));
    open_gate();
    OK(cu.cuStreamSynchronize(OOCU_STREAM_LEGACY));
}

CASE(a_blocking_stream_waits_for_the_legacy_one, SET_UP | GATE) {
    OOCUstream blocking;
    OK(cu.cuStreamCreateWithPriority(&blocking, OOCU_STREAM_DEFAULT, 0));
    shut(NULL);
    put(4, blocking);
    for (int i = 0; i < 1000; i++)
        IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(blocking));
    open_gate();
    OK(cu.cuStreamSynchronize(blocking));
    TRUE(atomic_load(&gates_passed) == 1);
    OK(cu.cuStreamDestroy(blocking));
}

CASE(the_legacy_stream_waits_for_blocking_ones, SET_UP | GATE) {
    OOCUstream blocking;
    OK(cu.cuStreamCreateWithPriority(&blocking, OOCU_STREAM_DEFAULT, 0));
    shut(blocking);
    OK(cu.cuEventRecord(e, NULL));
    for (int i = 0; i < 1000; i++)
        IS(OOCU_ERROR_NOT_READY, cu.cuEventQuery(e));
    open_gate();
    OK(cu.cuEventSynchronize(e));
    TRUE(atomic_load(&gates_passed) == 1);
    OK(cu.cuStreamDestroy(blocking));
}

CASE(the_legacy_stream_ignores_non_blocking_ones, SET_UP | GATE) {
    shut(a);
    put(5, NULL);
    TRUE(becomes_ready(NULL));
    open_gate();
}

CASE(the_per_thread_stream_waits_for_the_legacy_one, SET_UP | GATE) {
    shut(OOCU_STREAM_LEGACY);
    put(6, OOCU_STREAM_PER_THREAD);
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(OOCU_STREAM_PER_THREAD));
    open_gate();
    OK(cu.cuStreamSynchronize(OOCU_STREAM_PER_THREAD));
    TRUE(word(0) == 6);
}

CASE(blocking_streams_do_not_wait_for_each_other, SET_UP | GATE) {
    OOCUstream one, two;
    OK(cu.cuStreamCreateWithPriority(&one, OOCU_STREAM_DEFAULT, 0));
    OK(cu.cuStreamCreateWithPriority(&two, OOCU_STREAM_DEFAULT, 0));
    shut(one);
    put(7, two);
    TRUE(becomes_ready(two));
    open_gate();
    OK(cu.cuStreamDestroy(one));
    OK(cu.cuStreamDestroy(two));
}

/* ---- events ---- */

CASE(event_flags_are_checked, SET_UP) {
    OOCUevent event;
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuEventCreate(&event, 0x80));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuEventCreate(NULL, 0));
}

CASE(no_event_is_an_invalid_handle, SET_UP) {
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventRecord(NULL, a));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventQuery(NULL));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventSynchronize(NULL));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamWaitEvent(a, NULL, 0));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventDestroy(NULL));
}

CASE(an_event_never_recorded_is_complete, SET_UP) {
    OK(cu.cuEventQuery(e));
    OK(cu.cuEventSynchronize(e));
}

CASE(waiting_for_an_event_never_recorded_waits_for_nothing, SET_UP | GATE) {
    OK(cu.cuStreamWaitEvent(b, e, 0));
    shut(a);
    OK(cu.cuEventRecord(e, a)); /* after the wait: of no concern to it */
    TRUE(becomes_ready(b));
    open_gate();
}

CASE(an_event_is_pending_until_its_work_is_done, SET_UP | GATE) {
    shut(a);
    OK(cu.cuEventRecord(e, a));
    IS(OOCU_ERROR_NOT_READY, cu.cuEventQuery(e));
    open_gate();
    OK(cu.cuEventSynchronize(e));
    OK(cu.cuEventQuery(e));
}

CASE(a_wait_orders_two_streams, SET_UP | GATE) {
    shut(a);
    put(1, a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(b, e, 0));
    put(2, b);
    for (int i = 0; i < 1000; i++)
        IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(b));
    open_gate();
    OK(cu.cuStreamSynchronize(b));
    TRUE(word(0) == 2);
}

CASE(a_wait_keeps_the_record_it_saw, SET_UP | GATE) {
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(b, e, 0));
    shut(a);
    OK(cu.cuEventRecord(e, a));
    TRUE(becomes_ready(b));
    open_gate();
}

CASE(a_query_sees_the_latest_record, SET_UP | GATE) {
    OK(cu.cuEventRecord(e, b));
    OK(cu.cuEventSynchronize(e));
    shut(a);
    OK(cu.cuEventRecord(e, a));
    IS(OOCU_ERROR_NOT_READY, cu.cuEventQuery(e));
    open_gate();
    OK(cu.cuEventSynchronize(e));
}

CASE(a_record_that_is_ready_replaces_a_pending_one, SET_UP | GATE) {
    shut(a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuEventRecord(e, b));
    OK(cu.cuEventSynchronize(e));
    TRUE(atomic_load(&gates_passed) == 0);
    open_gate();
}

CASE(destroying_an_event_keeps_the_waits_for_it, SET_UP | GATE) {
    OOCUevent event;
    OK(cu.cuEventCreate(&event, OOCU_EVENT_DISABLE_TIMING));
    shut(a);
    OK(cu.cuEventRecord(event, a));
    OK(cu.cuStreamWaitEvent(b, event, 0));
    OK(cu.cuEventDestroy(event)); /* pending: returns at once */
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(b));
    open_gate();
    OK(cu.cuStreamSynchronize(b));
    TRUE(atomic_load(&gates_passed) == 1);
}

CASE(order_passes_through_a_third_stream, SET_UP | GATE) {
    OOCUstream c;
    OK(cu.cuStreamCreateWithPriority(&c, OOCU_STREAM_NON_BLOCKING, 0));
    shut(a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(b, e, 0));
    OK(cu.cuEventRecord(f, b));
    OK(cu.cuStreamWaitEvent(c, f, 0));
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(c));
    open_gate();
    OK(cu.cuStreamSynchronize(c));
    TRUE(atomic_load(&gates_passed) == 1);
    OK(cu.cuStreamDestroy(c));
}

CASE(an_event_does_not_cover_later_work, SET_UP | GATE) {
    OK(cu.cuEventRecord(e, a));
    shut(a);
    OK(cu.cuEventSynchronize(e));
    TRUE(atomic_load(&gates_passed) == 0);
    open_gate();
}

CASE(a_stream_may_wait_for_itself, SET_UP) {
    put(1, a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(a, e, 0));
    put(2, a);
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 2);
}

CASE(elapsed_time_needs_two_records_with_timing, SET_UP | TIMES) {
    OOCUevent untimed;
    float ms;
    OK(cu.cuEventCreate(&untimed, OOCU_EVENT_DISABLE_TIMING));
    OK(cu.cuEventRecord(e, a));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventElapsedTime(&ms, e, f)); /* f: never recorded */
    OK(cu.cuEventRecord(untimed, a));
    OK(cu.cuStreamSynchronize(a));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventElapsedTime(&ms, e, untimed));
    OK(cu.cuEventDestroy(untimed));
}

CASE(elapsed_time_is_not_negative, SET_UP | TIMES) {
    float ms = -1;
    OK(cu.cuEventRecord(e, a));
    put(1, a);
    OK(cu.cuEventRecord(f, a));
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuEventElapsedTime(&ms, e, f));
    TRUE(ms >= 0 && ms < 1000);
}

CASE(elapsed_time_of_pending_events_is_not_ready, SET_UP | TIMES | GATE) {
    float ms;
    OK(cu.cuEventRecord(e, a));
    shut(a);
    OK(cu.cuEventRecord(f, a));
    IS(OOCU_ERROR_NOT_READY, cu.cuEventElapsedTime(&ms, e, f));
    open_gate();
    OK(cu.cuStreamSynchronize(a));
}

/* ---- host functions ---- */

static atomic_uint seen;

static void OOCUDAAPI look(void *ptr) { atomic_store(&seen, *(uint32_t *)ptr + 1); }

CASE(a_host_function_runs_without_being_waited_for, SET_UP | GATE) {
    const time_t begin = time(NULL);
    atomic_store(&seen, 0);
    pinned[0] = 41;
    OK(cu.cuLaunchHostFunc(a, look, pinned));
    while (atomic_load(&seen) != 42 && time(NULL) - begin < 8)
        ;
    TRUE(atomic_load(&seen) == 42);
}

CASE(a_host_function_sees_what_came_before, SET_UP | GATE) {
    atomic_store(&seen, 0);
    put(6, a);
    OK(cu.cuMemcpyDtoHAsync(pinned, device, PAGE, a));
    OK(cu.cuLaunchHostFunc(a, look, pinned));
    OK(cu.cuStreamSynchronize(a));
    TRUE(atomic_load(&seen) == 7);
}

CASE(a_host_function_holds_up_what_comes_after, SET_UP | GATE) {
    put(1, a);
    OK(cu.cuStreamSynchronize(a));
    shut(a);
    put(2, a);
    TRUE(word(0) == 1);
    open_gate();
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 2);
}

CASE(no_host_function_is_refused, SET_UP | GATE) {
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuLaunchHostFunc(a, NULL, NULL));
}

/* ---- capture (each in a process of its own) ---- */

enum { RELAXED = 2, ACTIVE = 1, INVALIDATED = 2 };

CASE(nothing_captures_at_first, SET_UP) {
    int status = -1;
    OK(cu.cuStreamIsCapturing(a, &status));
    TRUE(status == OOCU_STREAM_CAPTURE_STATUS_NONE);
    OK(cu.cuStreamIsCapturing(NULL, &status));
    TRUE(status == OOCU_STREAM_CAPTURE_STATUS_NONE);
}

CASE(captured_work_does_not_run, SET_UP | ALONE | CAPTURES) {
    int status = -1;
    void *graph = NULL;
    put(1, a);
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuStreamBeginCapture(a, RELAXED));
    OK(cu.cuStreamIsCapturing(a, &status));
    TRUE(status == ACTIVE);
    put(2, a);
    OK(cu.cuStreamEndCapture(a, &graph));
    OK(cu.cuGraphDestroy(graph));
    OK(cu.cuStreamSynchronize(a));
    TRUE(word(0) == 1);
}

CASE(the_legacy_stream_cannot_capture, SET_UP | ALONE | CAPTURES) {
    IS(OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamBeginCapture(NULL, RELAXED));
}

CASE(a_captured_event_cannot_be_asked, SET_UP | ALONE | CAPTURES) {
    void *graph = NULL;
    OK(cu.cuStreamBeginCapture(a, RELAXED));
    OK(cu.cuEventRecord(e, a));
    IS(OOCU_ERROR_CAPTURED_EVENT, cu.cuEventQuery(e));
    (void)cu.cuStreamEndCapture(a, &graph); /* whether the query spoiled it is not our question */
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuEventSynchronize(e));
}

CASE(waiting_for_a_capturing_stream_ends_the_capture, SET_UP | ALONE | CAPTURES) {
    void *graph = NULL;
    int status = -1;
    OK(cu.cuStreamBeginCapture(a, RELAXED));
    IS(OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(a));
    OK(cu.cuStreamIsCapturing(a, &status));
    TRUE(status == INVALIDATED);
    IS(OOCU_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(a, &graph));
    OK(cu.cuStreamSynchronize(a));
}

CASE(the_legacy_stream_is_not_used_beside_a_capture, SET_UP | ALONE | CAPTURES) {
    OOCUstream blocking;
    void *graph = NULL;
    int status;
    OK(cu.cuStreamCreateWithPriority(&blocking, OOCU_STREAM_DEFAULT, 0));
    OK(cu.cuStreamBeginCapture(blocking, RELAXED));
    IS(OOCU_ERROR_STREAM_CAPTURE_IMPLICIT, cu.cuStreamIsCapturing(NULL, &status));
    (void)cu.cuStreamEndCapture(blocking, &graph);
    OK(cu.cuStreamDestroy(blocking));
}

CASE(a_capture_begins_and_ends_once, SET_UP | ALONE | CAPTURES) {
    void *graph = NULL;
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.cuStreamEndCapture(a, &graph));
    OK(cu.cuStreamBeginCapture(a, RELAXED));
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.cuStreamBeginCapture(a, RELAXED));
    OK(cu.cuStreamEndCapture(a, &graph));
    OK(cu.cuGraphDestroy(graph));
}

/* ---- kernels ---- */

static const char ptx[] = ".version 6.4\n"
                          ".target sm_75\n"
                          ".address_size 64\n"
                          ".visible .entry spin(.param .u64 nanoseconds) {\n"
                          "  .reg .pred %p;\n"
                          "  .reg .u64 %rd<4>;\n"
                          "  ld.param.u64 %rd0, [nanoseconds];\n"
                          "  mov.u64 %rd1, %globaltimer;\n"
                          "again:\n"
                          "  mov.u64 %rd2, %globaltimer;\n"
                          "  sub.u64 %rd3, %rd2, %rd1;\n"
                          "  setp.lt.u64 %p, %rd3, %rd0;\n"
                          "  @%p bra again;\n"
                          "  ret;\n"
                          "}\n"
                          ".visible .entry store(.param .u64 address, .param .u32 value) {\n"
                          "  .reg .u64 %rd;\n"
                          "  .reg .u32 %r;\n"
                          "  ld.param.u64 %rd, [address];\n"
                          "  ld.param.u32 %r, [value];\n"
                          "  st.global.u32 [%rd], %r;\n"
                          "  ret;\n"
                          "}\n";

static OOCUfunction kernel(const char *name) {
    OOCUmodule module = NULL;
    OOCUfunction function = NULL;
    OK(cu.cuModuleLoadData(&module, ptx));
    OK(cu.cuModuleGetFunction(&function, module, name));
    return function;
}

static OOCUresult launch_spin(OOCUfunction spin, uint64_t nanoseconds, OOCUstream stream) {
    void *parameters[] = {&nanoseconds};
    return cu.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static OOCUresult launch_store(OOCUfunction store, uint64_t address, uint32_t value,
                               OOCUstream stream) {
    void *parameters[] = {&address, &value};
    return cu.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

CASE(a_kernel_keeps_its_stream_busy, SET_UP | ALONE | KERNELS | TIMES) {
    float ms = 0;
    OOCUfunction spin = kernel("spin");
    OK(cu.cuEventRecord(e, a));
    OK(launch_spin(spin, 50000000, a));
    OK(cu.cuEventRecord(f, a));
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(a));
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuEventElapsedTime(&ms, e, f));
    TRUE(ms > 45 && ms < 500);
}

CASE(a_kernel_writes_in_stream_order, SET_UP | ALONE | KERNELS) {
    OOCUfunction store = kernel("store");
    put(1, a);
    OK(launch_store(store, device, 2, a));
    OK(cu.cuMemcpyDtoHAsync(pinned, device, PAGE, a));
    put(3, a);
    OK(cu.cuStreamSynchronize(a));
    TRUE(pinned[0] == 2 && pinned[1] == 1);
}

CASE(a_missing_kernel_is_not_found, SET_UP | ALONE | KERNELS) {
    OOCUmodule module = NULL;
    OOCUfunction function;
    OK(cu.cuModuleLoadData(&module, ptx));
    IS(OOCU_ERROR_NOT_FOUND, cu.cuModuleGetFunction(&function, module, "absent"));
    OK(cu.cuModuleUnload(module));
    REFUSED(cu.cuModuleLoadData(&module, "no image"));
}

CASE(a_kernel_needs_a_grid, SET_UP | ALONE | KERNELS) {
    uint64_t ns = 0;
    void *parameters[] = {&ns};
    OOCUfunction spin = kernel("spin");
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuLaunchKernel(spin, 0, 1, 1, 1, 1, 1, 0, a, parameters, NULL));
    IS(OOCU_ERROR_INVALID_VALUE,
       cu.cuLaunchKernel(spin, 1, 1, 1, 2000, 1, 1, 0, a, parameters, NULL));
    OK(cu.cuStreamSynchronize(a));
}

/* The launch succeeds; a later call tells, and so do all that follow. */
CASE(a_bad_address_kills_the_context, SET_UP | ALONE | DEADLY | KERNELS) {
    OOCUevent event;
    OOCUdeviceptr ptr;
    OOCUfunction store = kernel("store");
    OK(launch_store(store, 16, 1, a));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(a));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(a));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamQuery(b));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuEventCreate(&event, 0));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuMemAlloc(&ptr, 4));
    IS(OOCU_ERROR_ILLEGAL_ADDRESS, launch_store(store, device, 1, b));
}

/* ---- running them ---- */

static const char *missing(int how) {
    return how & GATE && !cu.cuLaunchHostFunc           ? "cuLaunchHostFunc"
           : how & TIMES && !cu.cuEventElapsedTime      ? "cuEventElapsedTime"
           : how & KERNELS && !cu.cuLaunchKernel        ? "cuLaunchKernel"
           : how & CAPTURES && !cu.cuStreamBeginCapture ? "cuStreamBeginCapture"
                                                        : NULL;
}

static void run_here(const struct conformance_case *now) {
    outcome[0] = 0;
    if (missing(now->how))
        say("skipped: the driver lacks %s", missing(now->how));
    if (now->how & SET_UP)
        set_up();
    if (!outcome[0])
        now->run();
    open_gate(); /* whatever has failed: nothing may hang on it */
    if (now->how & SET_UP && !(now->how & DEADLY))
        tear_down();
    say("ok");
}

/* The line of a case that ran in a child. */
static void run_alone(const char *self, const char *driver, const char *name) {
    char command[2048];
    outcome[0] = 0;
#if defined(_WIN32)
    snprintf(command, sizeof command, "\"\"%s\" \"%s\" %s\"", self, driver, name);
#else
    snprintf(command, sizeof command, "'%s' '%s' %s", self, driver, name);
#endif
    // NOLINTNEXTLINE(bugprone-command-processor,cert-env33-c): this program's own name and case
    FILE *child = popen(command, "r");
    char line[512] = "";
    if (!child) {
        say("FAILED: no process");
        return;
    }
    const size_t prefix = strlen(name) + 2;
    while (fgets(line, sizeof line, child))
        if (!strncmp(line, name, prefix - 2))
            break;
    line[strcspn(line, "\r\n")] = 0;
    say("%s", strlen(line) > prefix ? line + prefix : "FAILED: the process died");
    pclose(child);
}

int main(int argc, char **argv) {
    const char *driver = argc > 1 ? argv[1] : getenv("ORACLE_OFFLOAD_DRIVER");
    if (!driver)
        driver = "";
    if (!load(driver)) {
        fprintf(stderr, "no CUDA driver of 12.0 or later at %s\n",
                *driver ? driver : "the system's place");
        return 2;
    }
    int passed = 0, failed = 0, found = 0;
    for (const struct conformance_case *now = cases; now; now = now->next) {
        if (argc > 2 && strcmp(argv[2], now->name) != 0)
            continue;
        found++;
        if (now->how & ALONE && argc <= 2)
            run_alone(argv[0], driver, now->name);
        else
            run_here(now);
        const int bad = !strncmp(outcome, "FAILED", 6);
        failed += bad;
        passed += !bad;
        printf("%s: %s\n", now->name, outcome);
        fflush(stdout);
    }
    if (!found) {
        fprintf(stderr, "no case %s\n", argv[2]);
        return 2;
    }
    if (argc <= 2)
        printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
