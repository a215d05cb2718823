/* simcuda.c - the cu* calls: what they check, what they return, what they queue.
 *
 * Rules that a reader may look for here: a destroyed handle is refused (on a real driver its use is
 * undefined); a wait takes the event's latest record at the time of the call; nothing but a wait, a
 * synchronise or a successful query orders the host after a stream. */
#include "sim_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef SIM_DRIVER_VERSION
#define SIM_DRIVER_VERSION 12080 /* tests/cuda, whose torch wants a newer one, says another */
#endif

enum {
    DRIVER_VERSION = SIM_DRIVER_VERSION,
    MAX_CONTEXTS = 64,
    SYMBOL_NOT_FOUND = 1,
    VERSION_NOT_SUFFICIENT = 2
};

static SIM_THREAD_LOCAL uint64_t context_stack[MAX_CONTEXTS];
static SIM_THREAD_LOCAL int context_depth;

/* ---- errors by name ---- */

static const struct {
    OOCUresult value;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {226, "CUDA_ERROR_CONTAINED", "an exception of the device was contained"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE",
     "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory was not deallocated"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "the MPS server ended this client"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", "a device outside of CUDA reported an error"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

OOCUresult cuGetErrorName(OOCUresult error, const char **name) {
    if (!name)
        return OOCU_ERROR_INVALID_VALUE;
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0] && !*name; i++)
        if (errors[i].value == error)
            *name = errors[i].name;
    return *name ? OOCU_SUCCESS : OOCU_ERROR_INVALID_VALUE;
}

OOCUresult cuGetErrorString(OOCUresult error, const char **text) {
    if (!text)
        return OOCU_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0] && !*text; i++)
        if (errors[i].value == error)
            *text = errors[i].text;
    return *text ? OOCU_SUCCESS : OOCU_ERROR_INVALID_VALUE;
}

/* ---- start-up ---- */

OOCUresult cuInit(unsigned int flags) {
    SIM_ENTER(CALL_cuInit);
    if (flags)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (sim.boot_error != OOCU_SUCCESS)
        SIM_RETURN(sim.boot_error);
    if (!sim.n_devices)
        SIM_RETURN(OOCU_ERROR_NO_DEVICE);
    sim.initialised = 1;
    SIM_LEAVE;
}

OOCUresult cuDriverGetVersion(int *version) {
    SIM_ENTER(CALL_cuDriverGetVersion);
    if (!version)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    *version = DRIVER_VERSION;
    SIM_LEAVE;
}

typedef void (*any_function)(void);

static const struct {
    const char *name;
    int introduced;
    any_function function;
} symbols[] = {
#define SIM_SYMBOL(base, symbol, introduced, traits, parameters)                                   \
    {#base, introduced, (any_function)symbol},
    SIM_CALLS(SIM_SYMBOL)
#undef SIM_SYMBOL
};

/* What a program gets that asks for per-thread default streams: to these calls, stream 0 is the
 * thread's own. */
static OOCUstream per_thread(OOCUstream stream) { return stream ? stream : OOCU_STREAM_PER_THREAD; }

#define SIM_PER_THREAD(X)                                                                          \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                     \
      (OOCUdeviceptr dst, const void *src, size_t bytes, OOCUstream stream),                       \
      (dst, src, bytes, per_thread(stream)))                                                       \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                     \
      (void *dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream),                             \
      (dst, src, bytes, per_thread(stream)))                                                       \
    X(cuMemsetD32Async, cuMemsetD32Async,                                                          \
      (OOCUdeviceptr ptr, unsigned int value, size_t count, OOCUstream stream),                    \
      (ptr, value, count, per_thread(stream)))                                                     \
    X(cuStreamGetPriority, cuStreamGetPriority, (OOCUstream stream, int *priority),                \
      (per_thread(stream), priority))                                                              \
    X(cuStreamGetFlags, cuStreamGetFlags, (OOCUstream stream, unsigned int *flags),                \
      (per_thread(stream), flags))                                                                 \
    X(cuStreamSynchronize, cuStreamSynchronize, (OOCUstream stream), (per_thread(stream)))         \
    X(cuStreamQuery, cuStreamQuery, (OOCUstream stream), (per_thread(stream)))                     \
    X(cuStreamWaitEvent, cuStreamWaitEvent,                                                        \
      (OOCUstream stream, OOCUevent event, unsigned int flags),                                    \
      (per_thread(stream), event, flags))                                                          \
    X(cuStreamIsCapturing, cuStreamIsCapturing, (OOCUstream stream, int *status),                  \
      (per_thread(stream), status))                                                                \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (OOCUstream stream, int mode),                \
      (per_thread(stream), mode))                                                                  \
    X(cuStreamEndCapture, cuStreamEndCapture, (OOCUstream stream, void **graph),                   \
      (per_thread(stream), graph))                                                                 \
    X(cuEventRecord, cuEventRecord, (OOCUevent event, OOCUstream stream),                          \
      (event, per_thread(stream)))                                                                 \
    X(cuLaunchHostFunc, cuLaunchHostFunc,                                                          \
      (OOCUstream stream, OOCUhostFn function, void *user_data),                                   \
      (per_thread(stream), function, user_data))                                                   \
    X(cuLaunchKernel, cuLaunchKernel,                                                              \
      (OOCUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,       \
       unsigned int block_x, unsigned int block_y, unsigned int block_z,                           \
       unsigned int shared_bytes, OOCUstream stream, void **parameters, void **extra),             \
      (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,                  \
       per_thread(stream), parameters, extra))

#define SIM_PER_THREAD_CALL(base, symbol, parameters, arguments)                                   \
    static OOCUresult OOCUDAAPI base##_ptsz parameters { return symbol arguments; }
SIM_PER_THREAD(SIM_PER_THREAD_CALL)
#undef SIM_PER_THREAD_CALL

static const struct {
    const char *name;
    any_function function;
} per_thread_symbols[] = {
#define SIM_SYMBOL(base, symbol, parameters, arguments) {#base, (any_function)base##_ptsz},
    SIM_PER_THREAD(SIM_SYMBOL)
#undef SIM_SYMBOL
};

/* Base names only; an unknown one is SUCCESS with a NULL pointer. A version far above the driver's
 * is refused, as driver 580 does; 535 and 550 gave the function anyway. */
OOCUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                               int *status) {
    enum { PER_THREAD_DEFAULT_STREAM = 2, FIRST_PER_THREAD = 7000 };
    if (!name || !function || flags > PER_THREAD_DEFAULT_STREAM ||
        version / 1000 > DRIVER_VERSION / 1000)
        return OOCU_ERROR_INVALID_VALUE;
    int found = SYMBOL_NOT_FOUND;
    any_function symbol = NULL;
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        if (strcmp(name, symbols[i].name) != 0)
            continue;
        found = version >= symbols[i].introduced ? 0 : VERSION_NOT_SUFFICIENT;
        if (!found)
            symbol = symbols[i].function;
        break;
    }
    /* Where there is no variant of its own, it is the one for all. */
    const int variant = flags == PER_THREAD_DEFAULT_STREAM && version >= FIRST_PER_THREAD;
    for (size_t i = 0; variant && i < sizeof per_thread_symbols / sizeof *per_thread_symbols; i++)
        if (symbol && strcmp(name, per_thread_symbols[i].name) == 0)
            symbol = per_thread_symbols[i].function;
    /* ISO C has no cast between function and object pointers: copy the bits. */
    memcpy(function, &symbol, sizeof *function);
    if (status)
        *status = found;
    return OOCU_SUCCESS;
}

/* ---- devices ---- */

static int is_device(OOCUdevice device) { return device >= 0 && device < sim.n_devices; }

OOCUresult cuDeviceGet(OOCUdevice *device, int ordinal) {
    SIM_ENTER(CALL_cuDeviceGet);
    if (!device)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_device(ordinal))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    *device = ordinal;
    SIM_LEAVE;
}

OOCUresult cuDeviceGetCount(int *count) {
    SIM_ENTER(CALL_cuDeviceGetCount);
    if (!count)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    *count = sim.n_devices;
    SIM_LEAVE;
}

OOCUresult cuDeviceGetName(char *name, int length, OOCUdevice device) {
    SIM_ENTER(CALL_cuDeviceGetName);
    if (!name || length <= 0)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_device(device))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", sim.devices[device].name);
    SIM_LEAVE;
}

/* What differs between the cards of the presets; found by the compute capability. */
static const struct card {
    int major, minor;
    int multiprocessors, threads, blocks, shared_bytes; /* of one multiprocessor */
    int shared_optin_bytes, copy_engines, bus_bits, ecc;
} cards[] = {
    {8, 6, 82, 1536, 16, 102400, 101376, 2, 384, 0},   /* RTX 3090 */
    {8, 9, 128, 1536, 24, 102400, 101376, 2, 384, 0},  /* RTX 4090 */
    {12, 0, 170, 1536, 24, 102400, 101376, 2, 512, 0}, /* RTX 5090 */
    {9, 0, 132, 2048, 32, 233472, 232448, 3, 6144, 1}, /* H200 */
};

enum { MAX_BLOCK = 1024, MAX_SHARED = 48 << 10 }; /* no call here asks for more shared memory */

/* -1: not known, of this card. */
static int card_attribute(const struct card *card, int attribute) {
    switch (attribute) {
    case 16: /* MULTIPROCESSOR_COUNT */
        return card->multiprocessors;
    case 32: /* ECC_ENABLED */
        return card->ecc;
    case 37: /* GLOBAL_MEMORY_BUS_WIDTH */
        return card->bus_bits;
    case 39: /* MAX_THREADS_PER_MULTIPROCESSOR */
        return card->threads;
    case OOCU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return card->copy_engines;
    case 81: /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
        return card->shared_bytes;
    case 97: /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
        return card->shared_optin_bytes;
    case 106: /* MAX_BLOCKS_PER_MULTIPROCESSOR */
        return card->blocks;
    default:
        return -1;
    }
}

/* The same of every card since 2020. */
static const struct {
    int attribute, value;
} attributes[] = {
    {1, MAX_BLOCK},                                /* MAX_THREADS_PER_BLOCK */
    {2, 1024},                                     /* MAX_BLOCK_DIM_X, _Y, _Z */
    {3, 1024},        {4, 64},    {5, 2147483647}, /* MAX_GRID_DIM_X, _Y, _Z */
    {6, 65535},       {7, 65535}, {8, MAX_SHARED}, /* MAX_SHARED_MEMORY_PER_BLOCK */
    {9, 65536},                                    /* TOTAL_CONSTANT_MEMORY */
    {10, 32},                                      /* WARP_SIZE */
    {11, 2147483647},                              /* MAX_PITCH */
    {12, 65536},                                   /* MAX_REGISTERS_PER_BLOCK */
    {15, 1},                                       /* GPU_OVERLAP */
    {18, 0},                                       /* INTEGRATED */
    {19, 1},                                       /* CAN_MAP_HOST_MEMORY */
    {20, 0},                                       /* COMPUTE_MODE: default */
    {31, 1},                                       /* CONCURRENT_KERNELS */
    {34, 0},                                       /* PCI_DEVICE_ID */
    {35, 0},                                       /* TCC_DRIVER */
    {41, 1},                                       /* UNIFIED_ADDRESSING */
    {50, 0},                                       /* PCI_DOMAIN_ID */
    {78, 1},                                       /* STREAM_PRIORITIES_SUPPORTED */
    {82, 65536},                                   /* MAX_REGISTERS_PER_MULTIPROCESSOR */
    {91, 1},                                       /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    {99, 1},                                       /* HOST_REGISTER_SUPPORTED */
    {111, 1024},                                   /* RESERVED_SHARED_MEMORY_PER_BLOCK */
};

/* What is not known here is refused; a wrong answer would be worse. */
OOCUresult cuDeviceGetAttribute(int *value, int attribute, OOCUdevice device) {
    enum { PCI_BUS = 33, LAST = 150 };
    SIM_ENTER(CALL_cuDeviceGetAttribute);
    if (!value || attribute < 1 || attribute > LAST)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_device(device))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    const int major = sim.devices[device].compute_major, minor = sim.devices[device].compute_minor;
    int known = -1;
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (attributes[i].attribute == attribute)
            known = attributes[i].value;
    for (size_t i = 0; known < 0 && i < sizeof cards / sizeof cards[0]; i++)
        if (cards[i].major == major && cards[i].minor == minor)
            known = card_attribute(&cards[i], attribute);
    if (attribute == OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        known = major;
    else if (attribute == OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        known = minor;
    else if (attribute == PCI_BUS)
        known = 0xF0 + device;
    if (known < 0)
        SIM_RETURN(OOCU_ERROR_NOT_SUPPORTED);
    *value = known;
    SIM_LEAVE;
}

OOCUresult cuDeviceGetPCIBusId(char *id, int length, OOCUdevice device) {
    SIM_ENTER(CALL_cuDeviceGetPCIBusId);
    if (!id || length < 13)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_device(device))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    snprintf(id, (size_t)length, "0000:%02X:00.0", 0xF0u + (unsigned)device);
    SIM_LEAVE;
}

/* ---- contexts: one primary context per device; each thread has a stack ---- */

static struct sim_primary *context(uint64_t handle) {
    return sim__handle_get(OBJECT_CONTEXT, handle);
}

OOCUresult sim__current_device(int *device) {
    if (!context_depth || !context_stack[context_depth - 1])
        return OOCU_ERROR_INVALID_CONTEXT;
    struct sim_primary *primary = context(context_stack[context_depth - 1]);
    if (!primary->refs)
        return OOCU_ERROR_CONTEXT_IS_DESTROYED;
    *device = (int)(primary - sim.primary);
    return OOCU_SUCCESS;
}

/* The device of the calling thread, inside calls that sim__enter has checked for a context. */
static int current_device(void) {
    int device = 0;
    sim__current_device(&device);
    return device;
}

OOCUresult cuDevicePrimaryCtxRetain(OOCUcontext *out_context, OOCUdevice device) {
    SIM_ENTER(CALL_cuDevicePrimaryCtxRetain);
    if (!out_context)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_device(device))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    struct sim_primary *primary = &sim.primary[device];
    if (!primary->handle)
        primary->handle = sim__handle_new(OBJECT_CONTEXT, primary);
    if (!primary->refs++)
        sim.live.contexts++;
    *out_context = (OOCUcontext)(uintptr_t)primary->handle;
    SIM_LEAVE;
}

/* Ends everything that belongs to the context, as the last release does. */
static void end_context(int device) {
    uint64_t streams = sim.live.streams, events = sim.live.events;
    for (struct sim_stream *s = sim.streams; s;) {
        const int held = s->device == device && s->held;
        if (held)
            sim__hold(s, 0); /* may run work and so forget streams: begin again */
        s = held ? sim.streams : s->next;
    }
    (void)sim__wait_all(device); /* an error of the work itself: no call is left to report it */
    for (struct sim_stream *s = sim.streams, *next; s; s = next) {
        next = s->next;
        if (s->device == device && !s->destroyed)
            sim__stream_destroy(s);
    }
    sim__handles_end(device);
    sim__memory_end_context(device);
    if (sim.live.streams < streams || sim.live.events < events)
        sim__report(0,
                    "lint: the last release of the primary context of device %d (call #%" PRIu64
                    ") found %" PRIu64 " streams and %" PRIu64 " events not destroyed",
                    device, sim.call, streams - sim.live.streams, events - sim.live.events);
}

OOCUresult cuDevicePrimaryCtxRelease_v2(OOCUdevice device) {
    SIM_ENTER(CALL_cuDevicePrimaryCtxRelease);
    if (!is_device(device))
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    struct sim_primary *primary = &sim.primary[device];
    if (!primary->refs)
        SIM_RETURN(OOCU_ERROR_INVALID_CONTEXT);
    if (primary->refs == 1) {
        end_context(device);
        sim.live.contexts--;
    }
    primary->refs--;
    SIM_LEAVE;
}

OOCUresult cuCtxGetCurrent(OOCUcontext *out_context) {
    SIM_ENTER(CALL_cuCtxGetCurrent);
    if (!out_context)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    *out_context = context_depth ? (OOCUcontext)(uintptr_t)context_stack[context_depth - 1] : NULL;
    SIM_LEAVE;
}

OOCUresult cuCtxPushCurrent_v2(OOCUcontext handle) {
    SIM_ENTER(CALL_cuCtxPushCurrent);
    struct sim_primary *primary = context((uintptr_t)handle);
    if (!primary)
        SIM_RETURN(OOCU_ERROR_INVALID_CONTEXT);
    if (!primary->refs)
        SIM_RETURN(OOCU_ERROR_CONTEXT_IS_DESTROYED);
    if (context_depth == MAX_CONTEXTS)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    context_stack[context_depth++] = (uintptr_t)handle;
    SIM_LEAVE;
}

OOCUresult cuCtxPopCurrent_v2(OOCUcontext *out_context) {
    SIM_ENTER(CALL_cuCtxPopCurrent);
    if (!context_depth)
        SIM_RETURN(OOCU_ERROR_INVALID_CONTEXT);
    context_depth--;
    if (out_context)
        *out_context = (OOCUcontext)(uintptr_t)context_stack[context_depth];
    SIM_LEAVE;
}

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 };

OOCUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    SIM_ENTER(CALL_cuCtxGetStreamPriorityRange);
    if (least)
        *least = LEAST_PRIORITY;
    if (greatest)
        *greatest = GREATEST_PRIORITY;
    SIM_LEAVE;
}

/* ---- memory ---- */

OOCUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    SIM_ENTER(CALL_cuMemGetInfo);
    if (!free_bytes || !total_bytes)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    int device = current_device();
    *total_bytes = (size_t)sim.devices[device].memory_bytes;
    *free_bytes = *total_bytes - (size_t)sim.device_used[device];
    SIM_LEAVE;
}

OOCUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned int flags) {
    enum { ALL_FLAGS = 7 }; /* PORTABLE, DEVICEMAP, WRITECOMBINED */
    SIM_ENTER(CALL_cuMemHostAlloc);
    if (!ptr || flags & ~(unsigned)ALL_FLAGS)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = sim__allocate(MEM_HOST_ALLOC, bytes, current_device(), flags, ptr);
    SIM_LEAVE;
}

OOCUresult cuMemFreeHost(void *ptr) {
    SIM_ENTER(CALL_cuMemFreeHost);
    struct sim_range *range = sim__range_at((uintptr_t)ptr);
    if (!range || range->kind != MEM_HOST_ALLOC || range->lo != (uintptr_t)ptr)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = sim__range_remove(range, "cuMemFreeHost");
    SIM_LEAVE;
}

OOCUresult cuMemHostRegister_v2(void *ptr, size_t bytes, unsigned int flags) {
    enum { ALL_FLAGS = 15 }; /* PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY */
    SIM_ENTER(CALL_cuMemHostRegister);
    if (!ptr || !bytes || flags & ~(unsigned)ALL_FLAGS)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if ((uintptr_t)ptr > UINTPTR_MAX - bytes || !sim_os_mapped(ptr, bytes))
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (sim__refuse_registration())
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    result = sim__range_add((uintptr_t)ptr, bytes, MEM_REGISTERED, current_device(), flags, NULL);
    SIM_LEAVE;
}

OOCUresult cuMemHostUnregister(void *ptr) {
    SIM_ENTER(CALL_cuMemHostUnregister);
    struct sim_range *range = sim__range_at((uintptr_t)ptr);
    if (!ptr)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!range || range->kind != MEM_REGISTERED || range->lo != (uintptr_t)ptr)
        SIM_RETURN(OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED);
    result = sim__range_remove(range, "cuMemHostUnregister");
    SIM_LEAVE;
}

OOCUresult cuMemAlloc_v2(OOCUdeviceptr *ptr, size_t bytes) {
    SIM_ENTER(CALL_cuMemAlloc);
    if (!ptr)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    void *memory = NULL;
    result = sim__allocate(MEM_DEVICE, bytes, current_device(), 0, &memory);
    if (result == OOCU_SUCCESS)
        *ptr = (OOCUdeviceptr)memory;
    SIM_LEAVE;
}

OOCUresult cuMemFree_v2(OOCUdeviceptr ptr) {
    SIM_ENTER(CALL_cuMemFree);
    if (!ptr)
        SIM_RETURN(OOCU_SUCCESS);
    struct sim_range *range = sim__range_at(ptr);
    if (!range || range->kind != MEM_DEVICE || range->lo != ptr)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = sim__range_remove(range, "cuMemFree");
    SIM_LEAVE;
}

OOCUresult cuPointerGetAttribute(void *value, int attribute, OOCUdeviceptr ptr) {
    enum { CONTEXT = 1, HOST_POINTER = 4, DEVICE_ORDINAL = 9 };
    SIM_ENTER(CALL_cuPointerGetAttribute);
    struct sim_range *range = sim__range_at(ptr);
    if (!value || !range)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    int on_device = range->kind == MEM_DEVICE || range->kind == MEM_ADOPTED;
    if (attribute == OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned int *)value = on_device ? OOCU_MEMORYTYPE_DEVICE : OOCU_MEMORYTYPE_HOST;
    else if (attribute == CONTEXT)
        *(OOCUcontext *)value = (OOCUcontext)(uintptr_t)sim.primary[range->device].handle;
    else if (attribute == OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
             (attribute == HOST_POINTER && !on_device))
        *(OOCUdeviceptr *)value = ptr;
    else if (attribute == DEVICE_ORDINAL)
        *(int *)value = range->device;
    else
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    SIM_LEAVE;
}

/* ---- queueing work ---- */

/* A stream that may take work now. A capturing one takes it into its graph, which here is nowhere.
 */
static OOCUresult usable(OOCUstream handle, struct sim_stream **stream, int *captured) {
    *stream = sim__stream(handle);
    *captured = 0;
    if (!*stream)
        return OOCU_ERROR_INVALID_HANDLE;
    if ((*stream)->capture == SIM_CAPTURE_INVALID)
        return OOCU_ERROR_STREAM_CAPTURE_INVALIDATED;
    *captured = (*stream)->capture == SIM_CAPTURE_ACTIVE;
    if (!(*stream)->is_legacy)
        return OOCU_SUCCESS;
    /* The legacy stream would have to wait for a stream that is only being written down. */
    OOCUresult result = OOCU_SUCCESS;
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        if (s->blocking && s->device == (*stream)->device && s->capture != SIM_CAPTURE_NONE) {
            s->capture = SIM_CAPTURE_INVALID;
            result = OOCU_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

static SIM_THREAD_LOCAL uintptr_t expected_pageable; /* 0: none */

OOCUresult simExpectPageable(const void *ptr) {
    expected_pageable = (uintptr_t)ptr;
    return OOCU_SUCCESS;
}

static OOCUresult copy(enum sim_op_kind kind, uintptr_t device_side, uintptr_t host_side,
                       size_t bytes, OOCUstream handle) {
    struct sim_stream *stream;
    struct sim_range *device_range = NULL, *host_range = NULL;
    int captured;
    OOCUresult result = usable(handle, &stream, &captured);
    if (result != OOCU_SUCCESS || !bytes)
        return result;
    if (sim__place(device_side, bytes, &device_range) != PLACE_DEVICE)
        return OOCU_ERROR_INVALID_VALUE;
    enum sim_place place = sim__place(host_side, bytes, &host_range);
    if (place != PLACE_PINNED && place != PLACE_PAGEABLE)
        return OOCU_ERROR_INVALID_VALUE;
    /* A registration that is not portable counts in the context it was made in alone. */
    if (place == PLACE_PINNED && host_range->kind == MEM_REGISTERED &&
        !(host_range->flags & OOCU_MEMHOSTREGISTER_PORTABLE) &&
        host_range->device != stream->device)
        place = PLACE_PAGEABLE;
    if (captured)
        return OOCU_SUCCESS;
    const int expected = host_side == expected_pageable;
    expected_pageable = 0;
    if (place == PLACE_PAGEABLE && !expected) {
        char text[160];
        sim__describe(host_side, host_side + bytes, text, sizeof text);
        sim__report(
            (uint64_t)kind + 9000 + (uint64_t)16 * stream->actor,
            "lint: pageable host memory in %s (call #%" PRIu64 ") on stream \"%s\": %s\n"
            "  it may be staged or not, and may be synchronous or not: the range stays in use "
            "until an event recorded after the copy",
            kind == OP_H2D ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", sim.call,
            sim.actors[stream->actor].name, text);
    }
    struct sim_op *op;
    result = sim__op_new(stream, kind, &op);
    if (result != OOCU_SUCCESS)
        return result;
    uint32_t actor = stream->actor;
    uint64_t epoch = sim.actors[actor].epoch;
    int to_device = kind == OP_H2D;
    op->dst = (void *)(to_device ? device_side : host_side);
    op->src = (const void *)(to_device ? host_side : device_side);
    op->bytes = bytes;
    op->cost_s = sim__copy_cost(stream->device, bytes);
    enum sim_access_kind access = to_device ? SIM_BY_H2D : SIM_BY_D2H;
    sim__access(actor, access, 0, (uintptr_t)op->src, (uintptr_t)op->src + bytes);
    sim__access(actor, access, 1, (uintptr_t)op->dst, (uintptr_t)op->dst + bytes);
    sim__copy_uses(device_range, device_side + bytes, actor, epoch);
    sim__copy_uses(host_range, host_side + bytes, actor, epoch);
    uint64_t *counter = to_device ? &sim.stats.h2d_bytes : &sim.stats.d2h_bytes;
    *counter += bytes;
    counter = to_device ? &sim.stats.h2d_copies : &sim.stats.d2h_copies;
    *counter += 1;
    sim__submit(op);
    return OOCU_SUCCESS;
}

OOCUresult cuMemcpyHtoDAsync_v2(OOCUdeviceptr dst, const void *src, size_t bytes,
                                OOCUstream stream) {
    SIM_ENTER(CALL_cuMemcpyHtoDAsync);
    result = copy(OP_H2D, dst, (uintptr_t)src, bytes, stream);
    SIM_LEAVE;
}

OOCUresult cuMemcpyDtoHAsync_v2(void *dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream) {
    SIM_ENTER(CALL_cuMemcpyDtoHAsync);
    result = copy(OP_D2H, src, (uintptr_t)dst, bytes, stream);
    SIM_LEAVE;
}

OOCUresult cuMemsetD32Async(OOCUdeviceptr ptr, unsigned int value, size_t count,
                            OOCUstream handle) {
    SIM_ENTER(CALL_cuMemsetD32Async);
    struct sim_stream *stream;
    struct sim_range *range;
    int captured;
    result = usable(handle, &stream, &captured);
    if (result != OOCU_SUCCESS || !count)
        goto out;
    if (count > SIZE_MAX / 4 || ptr % 4 || sim__place(ptr, count * 4, &range) != PLACE_DEVICE)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (captured)
        goto out;
    struct sim_op *op;
    result = sim__op_new(stream, OP_MEMSET, &op);
    if (result != OOCU_SUCCESS)
        goto out;
    op->dst = (void *)ptr;
    op->bytes = count * 4;
    op->value = value;
    const struct sim_device *device = &sim.devices[stream->device];
    op->cost_s = device->launch_s + (double)op->bytes / (device->memory_gbps * 1e9);
    sim__access(stream->actor, SIM_BY_MEMSET, 1, ptr, ptr + op->bytes);
    sim__copy_uses(range, ptr + op->bytes, stream->actor, sim.actors[stream->actor].epoch);
    sim__submit(op);
    SIM_LEAVE;
}

OOCUresult cuLaunchHostFunc(OOCUstream handle, OOCUhostFn function, void *user_data) {
    SIM_ENTER(CALL_cuLaunchHostFunc);
    struct sim_stream *stream;
    int captured;
    if (!function)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = usable(handle, &stream, &captured);
    if (result != OOCU_SUCCESS || captured)
        goto out;
    struct sim_op *op;
    result = sim__op_new(stream, OP_HOSTFN, &op);
    if (result != OOCU_SUCCESS)
        goto out;
    op->function = function;
    op->user_data = user_data;
    sim__submit(op);
    SIM_LEAVE;
}

static OOCUresult check_ranges(const OOSimRange *ranges, size_t count) {
    struct sim_range *range;
    for (size_t i = 0; i < count; i++) {
        if (!ranges[i].bytes)
            continue;
        enum sim_place place = sim__place(ranges[i].ptr, ranges[i].bytes, &range);
        if (place != PLACE_DEVICE && place != PLACE_PINNED)
            return OOCU_ERROR_INVALID_VALUE;
    }
    return OOCU_SUCCESS;
}

/* Page-locked memory that a kernel touches stays in use until the kernel has ended. */
static void kernel_uses(const struct sim_stream *stream, const OOSimRange *touched) {
    struct sim_range *range;
    if (touched->bytes && sim__place(touched->ptr, touched->bytes, &range) == PLACE_PINNED)
        sim__copy_uses(range, touched->ptr + touched->bytes, stream->actor,
                       sim.actors[stream->actor].epoch);
}

static OOCUresult launch(struct sim_stream *stream, const OOSimRange *reads, size_t n_reads,
                         const OOSimRange *writes, size_t n_writes, double seconds) {
    struct sim_op *op;
    OOCUresult result = sim__op_new(stream, OP_KERNEL, &op);
    if (result != OOCU_SUCCESS)
        return result;
    op->cost_s = seconds;
    for (size_t i = 0; i < n_reads; i++) {
        sim__access(stream->actor, SIM_BY_KERNEL, 0, reads[i].ptr, reads[i].ptr + reads[i].bytes);
        kernel_uses(stream, &reads[i]);
    }
    for (size_t i = 0; i < n_writes; i++) {
        sim__access(stream->actor, SIM_BY_KERNEL, 1, writes[i].ptr,
                    writes[i].ptr + writes[i].bytes);
        kernel_uses(stream, &writes[i]);
    }
    sim.stats.kernels++;
    sim__submit(op);
    return OOCU_SUCCESS;
}

OOCUresult simLaunch(OOCUstream handle, const OOSimRange *reads, size_t n_reads,
                     const OOSimRange *writes, size_t n_writes, double seconds) {
    SIM_ENTER(CALL_simLaunch);
    struct sim_stream *stream;
    int captured;
    if (!(seconds >= 0) || isinf(seconds) || (n_reads && !reads) || (n_writes && !writes))
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = usable(handle, &stream, &captured);
    if (result == OOCU_SUCCESS)
        result = check_ranges(reads, n_reads);
    if (result == OOCU_SUCCESS)
        result = check_ranges(writes, n_writes);
    if (result != OOCU_SUCCESS || captured)
        goto out;
    /* The caller computes right after this call: what is ordered before must have happened, and
     * what is not must not, or a missing wait would go unseen. */
    result = sim__run_before(stream);
    if (result == OOCU_SUCCESS)
        result = launch(stream, reads, n_reads, writes, n_writes, seconds);
    SIM_LEAVE;
}

/* ---- streams ---- */

OOCUresult cuStreamCreateWithPriority(OOCUstream *out_stream, unsigned int flags, int priority) {
    SIM_ENTER(CALL_cuStreamCreateWithPriority);
    if (!out_stream || flags > OOCU_STREAM_NON_BLOCKING)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    char name[32];
    snprintf(name, sizeof name, "stream %" PRIu64, ++sim.streams_made);
    struct sim_stream *stream = sim__stream_new(current_device(), flags, name, 1);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    stream->priority = priority > LEAST_PRIORITY      ? LEAST_PRIORITY
                       : priority < GREATEST_PRIORITY ? GREATEST_PRIORITY
                                                      : priority;
    *out_stream = (OOCUstream)(uintptr_t)stream->handle;
    SIM_LEAVE;
}

OOCUresult cuStreamGetPriority(OOCUstream handle, int *priority) {
    SIM_ENTER(CALL_cuStreamGetPriority);
    const struct sim_stream *stream = sim__stream(handle);
    if (!priority)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    *priority = stream->priority;
    SIM_LEAVE;
}

OOCUresult cuStreamGetFlags(OOCUstream handle, unsigned int *flags) {
    SIM_ENTER(CALL_cuStreamGetFlags);
    const struct sim_stream *stream = sim__stream(handle);
    if (!flags)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    *flags = stream->blocking ? OOCU_STREAM_DEFAULT : OOCU_STREAM_NON_BLOCKING;
    SIM_LEAVE;
}

OOCUresult cuStreamDestroy_v2(OOCUstream handle) {
    SIM_ENTER(CALL_cuStreamDestroy);
    struct sim_stream *stream = (uintptr_t)handle > 2 ? sim__stream(handle) : NULL;
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    sim__stream_destroy(stream);
    SIM_LEAVE;
}

/* A query or a wait of a capturing stream is not possible, and ends the capture. */
static OOCUresult observable(OOCUstream handle, struct sim_stream **stream) {
    *stream = sim__stream(handle);
    if (!*stream)
        return OOCU_ERROR_INVALID_HANDLE;
    if ((*stream)->capture != SIM_CAPTURE_NONE) {
        OOCUresult result = (*stream)->capture == SIM_CAPTURE_ACTIVE
                                ? OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED
                                : OOCU_ERROR_STREAM_CAPTURE_INVALIDATED;
        (*stream)->capture = SIM_CAPTURE_INVALID;
        return result;
    }
    int captured;
    return (*stream)->is_legacy ? usable(handle, stream, &captured) : OOCU_SUCCESS;
}

/* Whether waiting for `stream` includes `other`: the legacy stream waits for all blocking ones. */
static int covers(const struct sim_stream *stream, const struct sim_stream *other) {
    return stream == other ||
           (stream->is_legacy && other->blocking && other->device == stream->device);
}

/* What the host knows once all that is queued in `stream` now has ended. */
static void learn(struct sim_clock *known, const struct sim_stream *stream) {
    if (stream->is_legacy)
        sim__clock_join(known, &sim.gone[stream->device]);
    for (const struct sim_stream *s = sim.streams; s; s = s->next)
        if (covers(stream, s))
            sim__clock_join(known, &s->clock);
}

OOCUresult cuStreamSynchronize(OOCUstream handle) {
    struct sim_clock known = {0};
    struct sim_op **tails = NULL;
    size_t n_tails = 0, capacity = 0;
    SIM_ENTER(CALL_cuStreamSynchronize);
    struct sim_stream *stream;
    result = observable(handle, &stream);
    if (result != OOCU_SUCCESS)
        goto out;
    sim.stats.host_waits++;
    /* Of this moment: the lock may be given up while a host function runs. */
    learn(&known, stream);
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        if (covers(stream, s) && s->tail) {
            tails = sim__grow(tails, &capacity, n_tails + 1, sizeof(struct sim_op *));
            sim__op_ref(s->tail);
            tails[n_tails++] = s->tail;
        }
    for (size_t i = 0; i < n_tails; i++) {
        if (result == OOCU_SUCCESS)
            result = sim__wait(tails[i]);
        sim__op_unref(tails[i]);
    }
    if (result == OOCU_SUCCESS)
        sim__clock_join(sim__host_clock(), &known);
out:
    sim__clock_free(&known);
    sim_os_unlock(&sim.lock);
    free(tails);
    return result;
}

/* A poll takes time, so that polling ends. */
static OOCUresult not_ready(void) {
    sim__time_to(sim.now_s + 1e-6);
    return OOCU_ERROR_NOT_READY;
}

OOCUresult cuStreamQuery(OOCUstream handle) {
    SIM_ENTER(CALL_cuStreamQuery);
    struct sim_stream *stream;
    result = observable(handle, &stream);
    if (result != OOCU_SUCCESS)
        goto out;
    /* Asking may run and forget operations and streams: look for one that is not done, from the
     * beginning each time. */
    for (struct sim_stream *s = sim.streams, *next; s && result == OOCU_SUCCESS; s = next) {
        next = s->next;
        if (covers(stream, s) && s->tail) {
            sim__flush(s->tail);
            if (!sim__done(s->tail))
                result = not_ready();
            next = sim.streams;
        }
    }
    if (sim.sticky != OOCU_SUCCESS)
        SIM_RETURN(sim.sticky);
    if (result == OOCU_SUCCESS)
        learn(sim__host_clock(), stream);
    SIM_LEAVE;
}

OOCUresult cuStreamWaitEvent(OOCUstream handle, OOCUevent event_handle, unsigned int flags) {
    SIM_ENTER(CALL_cuStreamWaitEvent);
    struct sim_stream *stream;
    int captured;
    struct sim_event *event = sim__event(event_handle);
    if (!event)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (flags > 1)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = usable(handle, &stream, &captured);
    if (result != OOCU_SUCCESS || captured || !event->recorded)
        goto out;
    struct sim_op *op;
    result = sim__op_new(stream, OP_WAIT, &op);
    if (result != OOCU_SUCCESS)
        goto out;
    /* The record that the event holds now; a later one does not change this wait. */
    sim__op_after(op, event->op);
    sim__clock_join(&stream->clock, &event->clock);
    sim__submit(op);
    SIM_LEAVE;
}

OOCUresult cuStreamIsCapturing(OOCUstream handle, int *status) {
    SIM_ENTER(CALL_cuStreamIsCapturing);
    if (!status)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    struct sim_stream *stream = sim__stream(handle);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    *status = (int)stream->capture;
    for (struct sim_stream *s = sim.streams; stream->is_legacy && s; s = s->next)
        if (s->blocking && s->device == stream->device && s->capture != SIM_CAPTURE_NONE)
            result = OOCU_ERROR_STREAM_CAPTURE_IMPLICIT;
    SIM_LEAVE;
}

/* Capture as far as the refusals of other calls need it: what is captured goes nowhere. */
OOCUresult cuStreamBeginCapture_v2(OOCUstream handle, int mode) {
    SIM_ENTER(CALL_cuStreamBeginCapture);
    struct sim_stream *stream = sim__stream(handle);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (stream->is_legacy)
        SIM_RETURN(OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (mode < 0 || mode > 2)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (stream->capture != SIM_CAPTURE_NONE)
        SIM_RETURN(OOCU_ERROR_ILLEGAL_STATE);
    stream->capture = SIM_CAPTURE_ACTIVE;
    SIM_LEAVE;
}

OOCUresult cuStreamEndCapture(OOCUstream handle, void **graph) {
    SIM_ENTER(CALL_cuStreamEndCapture);
    struct sim_stream *stream = sim__stream(handle);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (!graph)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    *graph = NULL;
    if (stream->capture == SIM_CAPTURE_NONE)
        SIM_RETURN(OOCU_ERROR_ILLEGAL_STATE);
    if (stream->capture == SIM_CAPTURE_INVALID)
        result = OOCU_ERROR_STREAM_CAPTURE_INVALIDATED;
    else
        *graph = (void *)(uintptr_t)sim__handle_new(OBJECT_GRAPH, &sim);
    stream->capture = SIM_CAPTURE_NONE;
    SIM_LEAVE;
}

OOCUresult cuGraphDestroy(void *graph) {
    SIM_ENTER(CALL_cuGraphDestroy);
    if (!sim__handle_get(OBJECT_GRAPH, (uintptr_t)graph))
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    sim__handle_end((uintptr_t)graph);
    SIM_LEAVE;
}

/* ---- events ---- */

OOCUresult cuEventCreate(OOCUevent *out_event, unsigned int flags) {
    enum { ALL_FLAGS = OOCU_EVENT_BLOCKING_SYNC | OOCU_EVENT_DISABLE_TIMING };
    SIM_ENTER(CALL_cuEventCreate);
    if (!out_event || flags & ~(unsigned)ALL_FLAGS)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    struct sim_event *event = calloc(1, sizeof *event);
    if (!event)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    event->device = current_device();
    event->flags = flags;
    event->handle = sim__handle_new(OBJECT_EVENT, event);
    sim.live.events++;
    *out_event = (OOCUevent)(uintptr_t)event->handle;
    SIM_LEAVE;
}

void sim__event_end(struct sim_event *event) {
    sim__handle_end(event->handle);
    sim__event_clear(event);
    sim__clock_free(&event->clock);
    free(event);
    sim.live.events--;
}

OOCUresult cuEventDestroy_v2(OOCUevent handle) {
    SIM_ENTER(CALL_cuEventDestroy);
    struct sim_event *event = sim__event(handle);
    if (!event)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    sim__event_end(event);
    SIM_LEAVE;
}

OOCUresult cuEventRecord(OOCUevent handle, OOCUstream stream_handle) {
    SIM_ENTER(CALL_cuEventRecord);
    struct sim_stream *stream;
    int captured;
    struct sim_event *event = sim__event(handle);
    if (!event)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    result = usable(stream_handle, &stream, &captured);
    if (result != OOCU_SUCCESS)
        goto out;
    if (stream->device != event->device)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (captured) {
        event->captured = 1;
        goto out;
    }
    struct sim_op *op;
    result = sim__op_new(stream, OP_RECORD, &op);
    if (result != OOCU_SUCCESS)
        goto out;
    sim__event_clear(event);
    event->captured = 0;
    event->recorded = 1;
    event->op = op;
    sim__op_ref(op);
    sim__clock_assign(&event->clock, &stream->clock);
    sim__submit(op);
    SIM_LEAVE;
}

OOCUresult cuEventQuery(OOCUevent handle) {
    SIM_ENTER(CALL_cuEventQuery);
    struct sim_event *event = sim__event(handle);
    if (!event)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (event->captured)
        SIM_RETURN(OOCU_ERROR_CAPTURED_EVENT);
    if (!event->recorded)
        goto out;
    sim__flush(event->op);
    if (!sim__done(event->op))
        result = not_ready();
    if (sim.sticky != OOCU_SUCCESS)
        SIM_RETURN(sim.sticky);
    if (result == OOCU_SUCCESS)
        sim__clock_join(sim__host_clock(), &event->clock);
    SIM_LEAVE;
}

OOCUresult cuEventSynchronize(OOCUevent handle) {
    struct sim_clock known = {0};
    SIM_ENTER(CALL_cuEventSynchronize);
    struct sim_event *event = sim__event(handle);
    if (!event)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (event->captured)
        SIM_RETURN(OOCU_ERROR_CAPTURED_EVENT);
    sim.stats.host_waits++;
    if (!event->recorded)
        goto out;
    sim__clock_assign(&known, &event->clock);
    result = sim__wait(event->op);
    if (result == OOCU_SUCCESS)
        sim__clock_join(sim__host_clock(), &known);
out:
    sim__clock_free(&known);
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult cuEventElapsedTime(float *milliseconds, OOCUevent start_handle, OOCUevent end_handle) {
    SIM_ENTER(CALL_cuEventElapsedTime);
    struct sim_event *start = sim__event(start_handle), *end = sim__event(end_handle);
    if (!milliseconds)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!start || !end || !start->recorded || !end->recorded || start->device != end->device ||
        (start->flags | end->flags) & OOCU_EVENT_DISABLE_TIMING)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (start->captured || end->captured)
        SIM_RETURN(OOCU_ERROR_CAPTURED_EVENT);
    if (!sim__done(start->op) || !sim__done(end->op))
        SIM_RETURN(not_ready());
    *milliseconds = (float)((end->op->end_s - start->op->end_s) * 1e3);
    SIM_LEAVE;
}

/* ---- modules and kernels ----
 *
 * Of an image only the first bytes are looked at. Some kernels are known by name, in every image:
 * spin(uint64_t nanoseconds) keeps a stream busy; store(uint64_t address, uint32_t value) writes
 * one word, and fails where there is no memory; decode_bf16 and decode_bytes are those of
 * csrc/kernels/decode.cu, and take what the device's memory needs for the bytes they read and
 * write, at nine tenths of its speed. */

enum kernel { KERNEL_SPIN, KERNEL_STORE, KERNEL_DECODE_BF16, KERNEL_DECODE_BYTES, KERNELS };
static const char *const kernel_names[KERNELS] = {"spin", "store", "decode_bf16", "decode_bytes"};
static const double decode_memory_share = 0.9; /* of memory_gbps: what plain kernels reach */

struct module {
    int device;
    uint64_t functions[KERNELS]; /* handles; 0 until asked for */
};

/* A fatbin, an ELF file for CUDA, or the text of PTX. No byte is read beyond the first that is
 * wrong: how many there are is not known. */
static int is_image(const unsigned char *bytes) {
    static const unsigned char fatbin[] = {0x50, 0xED, 0x55, 0xBA, 1, 0}; /* version 1 */
    static const unsigned char elf[] = {0x7F, 'E', 'L', 'F', 2, 1}; /* 64 bits, little-endian */
    enum { ELF_MACHINE = 18, CUDA = 190 };
    size_t same = 0;
    while (same < sizeof fatbin && bytes[same] == fatbin[same])
        same++;
    if (same == sizeof fatbin)
        return 1;
    for (same = 0; same < sizeof elf && bytes[same] == elf[same];)
        same++;
    if (same == sizeof elf)
        return bytes[ELF_MACHINE] == CUDA && bytes[ELF_MACHINE + 1] == 0;
    const char *text = (const char *)bytes;
    for (;;) { /* blanks and comments, then the directive that every PTX begins with */
        text += strspn(text, " \t\r\n");
        const char *end = NULL;
        if (text[0] == '/' && text[1] == '/')
            end = strchr(text, '\n');
        else if (text[0] == '/' && text[1] == '*')
            end = strstr(text + 2, "*/");
        if (!end)
            return strncmp(text, ".version", 8) == 0;
        text = end + (text[1] == '*' ? 2 : 1);
    }
}

OOCUresult cuModuleLoadData(OOCUmodule *out_module, const void *image) {
    SIM_ENTER(CALL_cuModuleLoadData);
    if (!out_module || !image)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!is_image(image))
        SIM_RETURN(OOCU_ERROR_INVALID_IMAGE);
    struct module *module = calloc(1, sizeof *module);
    if (!module)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    module->device = current_device();
    *out_module = (OOCUmodule)(uintptr_t)sim__handle_new(OBJECT_MODULE, module);
    sim.live.modules++;
    SIM_LEAVE;
}

static void end_module(uint64_t handle, struct module *module) {
    for (int i = 0; i < KERNELS; i++)
        if (module->functions[i])
            sim__handle_end(module->functions[i]);
    sim__handle_end(handle);
    free(module);
    sim.live.modules--;
}

OOCUresult cuModuleUnload(OOCUmodule handle) {
    SIM_ENTER(CALL_cuModuleUnload);
    struct module *module = sim__handle_get(OBJECT_MODULE, (uintptr_t)handle);
    if (!module)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    end_module((uintptr_t)handle, module);
    SIM_LEAVE;
}

OOCUresult cuModuleGetFunction(OOCUfunction *function, OOCUmodule handle, const char *name) {
    SIM_ENTER(CALL_cuModuleGetFunction);
    struct module *module = sim__handle_get(OBJECT_MODULE, (uintptr_t)handle);
    if (!function || !name)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!module)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    int kernel = 0;
    while (kernel < KERNELS && strcmp(name, kernel_names[kernel]) != 0)
        kernel++;
    if (kernel == KERNELS)
        SIM_RETURN(OOCU_ERROR_NOT_FOUND);
    if (!module->functions[kernel])
        module->functions[kernel] = sim__handle_new(OBJECT_FUNCTION, module);
    *function = (OOCUfunction)(uintptr_t)module->functions[kernel];
    SIM_LEAVE;
}

static OOCUresult launch_store(struct sim_stream *stream, uintptr_t address, unsigned int value) {
    struct sim_op *op;
    struct sim_range *range;
    OOCUresult result = sim__op_new(stream, OP_KERNEL, &op);
    if (result != OOCU_SUCCESS)
        return result;
    op->cost_s = sim.devices[stream->device].launch_s;
    op->bytes = sizeof value;
    op->value = value;
    sim.stats.kernels++;
    if (address % sizeof value == 0 && sim__place(address, sizeof value, &range) == PLACE_DEVICE) {
        op->dst = (void *)address;
        sim__access(stream->actor, SIM_BY_KERNEL, 1, address, address + sizeof value);
        sim__copy_uses(range, address + sizeof value, stream->actor,
                       sim.actors[stream->actor].epoch);
    } else {
        op->fails = OOCU_ERROR_ILLEGAL_ADDRESS; /* when it runs, not now */
    }
    sim__submit(op);
    return OOCU_SUCCESS;
}

static int is_on_device(uintptr_t address, size_t bytes) {
    struct sim_range *range;
    return sim__place(address, bytes, &range) == PLACE_DEVICE;
}

static OOCUresult launch_decode(struct sim_stream *stream, size_t weight_bytes, uint64_t threads,
                                void **parameters) {
    enum { LANES = 32, BLOCK = 1024, ALIGNMENT = 16 };
    struct sim_decode *work = calloc(1, sizeof *work);
    struct sim_op *op;
    if (!work)
        return OOCU_ERROR_OUT_OF_MEMORY;
    memcpy(&work->chunk, parameters[0], sizeof work->chunk);
    memcpy(&work->weights, parameters[1], sizeof work->weights);
    memcpy(&work->count, parameters[2], sizeof work->count);
    memcpy(&work->tail_words, parameters[3], sizeof work->tail_words);
    memcpy(work->palette, parameters[4], sizeof work->palette);
    work->weight_bytes = weight_bytes;
    work->low_bits = 8;
    if (weight_bytes == 1) {
        memcpy(&work->low_bits, parameters[5], sizeof work->low_bits);
        memcpy(&work->rotate, parameters[6], sizeof work->rotate);
    }
    OOCUresult result =
        work->low_bits > 8 ? OOCU_ERROR_INVALID_VALUE : sim__op_new(stream, OP_KERNEL, &op);
    if (result != OOCU_SUCCESS) {
        free(work);
        return result;
    }
    const OOSimRange reads = {(uintptr_t)work->chunk, sim__decode_reads(work)};
    const OOSimRange writes = {(uintptr_t)work->weights, sim__decode_writes(work)};
    const struct sim_device *device = &sim.devices[stream->device];
    op->cost_s = device->launch_s + (double)(reads.bytes + writes.bytes) /
                                        (decode_memory_share * device->memory_gbps * 1e9);
    sim.stats.kernels++;
    /* Too few warps would leave blocks as they were; the others end at once. */
    if (reads.ptr % ALIGNMENT || writes.ptr % ALIGNMENT || threads / LANES * BLOCK < work->count ||
        !is_on_device(reads.ptr, reads.bytes) || !is_on_device(writes.ptr, writes.bytes)) {
        op->fails = OOCU_ERROR_ILLEGAL_ADDRESS; /* when it runs, not now */
        free(work);
    } else {
        op->decode = work;
        op->src = work->chunk;
        op->dst = work->weights;
        op->bytes = reads.bytes > writes.bytes ? reads.bytes : writes.bytes;
        sim__access(stream->actor, SIM_BY_KERNEL, 0, reads.ptr, reads.ptr + reads.bytes);
        sim__access(stream->actor, SIM_BY_KERNEL, 1, writes.ptr, writes.ptr + writes.bytes);
        kernel_uses(stream, &reads);
        kernel_uses(stream, &writes);
    }
    sim__submit(op);
    return OOCU_SUCCESS;
}

OOCUresult cuLaunchKernel(OOCUfunction function, unsigned int grid_x, unsigned int grid_y,
                          unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                          unsigned int block_z, unsigned int shared_bytes, OOCUstream handle,
                          void **parameters, void **extra) {
    SIM_ENTER(CALL_cuLaunchKernel);
    struct sim_stream *stream;
    int captured;
    const struct module *module = sim__handle_get(OBJECT_FUNCTION, (uintptr_t)function);
    if (!module)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z || !parameters || extra ||
        shared_bytes > MAX_SHARED || (uint64_t)block_x * block_y * block_z > MAX_BLOCK)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = usable(handle, &stream, &captured);
    if (result != OOCU_SUCCESS || captured)
        goto out;
    uint64_t first;
    memcpy(&first, parameters[0], sizeof first);
    if ((uintptr_t)function == module->functions[KERNEL_SPIN]) {
        const double seconds = sim.devices[stream->device].launch_s + (double)first * 1e-9;
        result = launch(stream, NULL, 0, NULL, 0, seconds);
    } else if ((uintptr_t)function == module->functions[KERNEL_DECODE_BF16] ||
               (uintptr_t)function == module->functions[KERNEL_DECODE_BYTES]) {
        const int words = (uintptr_t)function == module->functions[KERNEL_DECODE_BF16];
        result = launch_decode(stream, words ? 2 : 1, (uint64_t)grid_x * block_x, parameters);
    } else {
        unsigned int value;
        memcpy(&value, parameters[1], sizeof value);
        result = launch_store(stream, (uintptr_t)first, value);
    }
    SIM_LEAVE;
}

void sim__object_end(int kind, uint64_t handle, void *object, int device) {
    if (kind == OBJECT_EVENT && ((struct sim_event *)object)->device == device)
        sim__event_end(object);
    else if (kind == OBJECT_MODULE && ((struct module *)object)->device == device)
        end_module(handle, object);
}
