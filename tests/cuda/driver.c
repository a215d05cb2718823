/* driver.c - libcuda.so.1 without a GPU: the simulated driver, and the calls that PyTorch makes
 * in addition to those of the engine.
 *
 * The library is linked from csrc/sim and this file, so it holds a simulator of its own: what runs
 * on "cpu" in the same process uses another. It exports cu* calls alone, and an engine takes it for
 * a real driver: what its rows for the simulator would declare is not seen. Tests reach the
 * simulator's control calls through `cuda_sim_control`.
 *
 * A call that is not here and not in csrc/sim fails by its name: see missing.py.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "sim_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API __attribute__((visibility("default")))

/* ---- for tests ---- */

#define CONTROLS(X)                                                                                \
    X(simAdopt)                                                                                    \
    X(simDrop)                                                                                     \
    X(simLaunch)                                                                                   \
    X(simHostAccess)                                                                               \
    X(simExpectPageable)                                                                           \
    X(simPreset)                                                                                   \
    X(simGetDevice)                                                                                \
    X(simSetDevice)                                                                                \
    X(simSetDeviceCount)                                                                           \
    X(simSetSchedule)                                                                              \
    X(simGetSchedule)                                                                              \
    X(simScheduleText)                                                                             \
    X(simSwitch)                                                                                   \
    X(simSubmitsLate)                                                                              \
    X(simRefuseRegistration)                                                                       \
    X(simLockQuota)                                                                                \
    X(simFault)                                                                                    \
    X(simFaultClear)                                                                               \
    X(simHold)                                                                                     \
    X(simIdle)                                                                                     \
    X(simCapturing)                                                                                \
    X(simPatience)                                                                                 \
    X(simCallCount)                                                                                \
    X(simGetStats)                                                                                 \
    X(simGetLive)                                                                                  \
    X(simNow)                                                                                      \
    X(simClock)                                                                                    \
    X(simAdvance)                                                                                  \
    X(simFinish)                                                                                   \
    X(simReportCount)                                                                              \
    X(simReport)                                                                                   \
    X(simReportsClear)                                                                             \
    X(simLabelRange)                                                                               \
    X(simLabelStream)                                                                              \
    X(simTraceCount)                                                                               \
    X(simTraceRow)                                                                                 \
    X(simTraceClear)                                                                               \
    X(simReset)                                                                                    \
    X(cuGetErrorName)

typedef void (*any_function)(void);

/* The simulator's control call of that name; NULL for another. */
API any_function cuda_sim_control(const char *name);
any_function cuda_sim_control(const char *name) {
#define CONTROL(call)                                                                              \
    if (!strcmp(name, #call))                                                                      \
        return (any_function)call;
    CONTROLS(CONTROL)
#undef CONTROL
    return NULL;
}

/* Bytes in use on a device and all it has; needs no context, as NVML needs none. */
API OOCUresult cuda_sim_memory(int device, uint64_t *used, uint64_t *total);
OOCUresult cuda_sim_memory(int device, uint64_t *used, uint64_t *total) {
    if (device < 0 || device >= SIM_MAX_DEVICES)
        return OOCU_ERROR_INVALID_DEVICE;
    sim_os_lock(&sim.lock);
    sim__boot();
    *used = sim.device_used[device];
    *total = (uint64_t)sim.devices[device].memory_bytes;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

/* ---- contexts ---- */

API OOCUresult cuCtxSetCurrent(OOCUcontext context);
API OOCUresult cuDevicePrimaryCtxGetState(OOCUdevice device, unsigned int *flags, int *active);
API OOCUresult cuCtxSynchronize(void);

OOCUresult cuCtxSetCurrent(OOCUcontext context) {
    OOCUcontext current = NULL;
    OOCUresult result = cuCtxGetCurrent(&current);
    if (result != OOCU_SUCCESS || current == context)
        return result;
    if (current && (result = cuCtxPopCurrent_v2(&current)) != OOCU_SUCCESS)
        return result;
    return context ? cuCtxPushCurrent_v2(context) : OOCU_SUCCESS;
}

OOCUresult cuDevicePrimaryCtxGetState(OOCUdevice device, unsigned int *flags, int *active) {
    SIM_ENTER(CALL_cuDeviceGet);
    if (!flags || !active)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (device < 0 || device >= sim.n_devices)
        SIM_RETURN(OOCU_ERROR_INVALID_DEVICE);
    *flags = 0;
    *active = sim.primary[device].refs != 0;
    SIM_LEAVE;
}

/* Counts as a wait for a stream, and fails where such a wait is made to fail. */
OOCUresult cuCtxSynchronize(void) {
    struct sim_clock known = {0};
    int device = 0;
    SIM_ENTER(CALL_cuStreamSynchronize);
    sim__current_device(&device);
    /* A capture would have to end first: it becomes invalid. */
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        if (s->device == device && s->capture != SIM_CAPTURE_NONE) {
            s->capture = SIM_CAPTURE_INVALID;
            result = OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    if (result != OOCU_SUCCESS)
        goto out;
    sim.stats.host_waits++;
    /* Of this moment: others may queue more while a host function is waited for. */
    sim__clock_join(&known, &sim.gone[device]);
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        if (s->device == device)
            sim__clock_join(&known, &s->clock);
    result = sim__wait_all(device);
    if (result == OOCU_SUCCESS)
        sim__clock_join(sim__host_clock(), &known);
out:
    sim__clock_free(&known);
    sim_os_unlock(&sim.lock);
    return result;
}

/* A callback for the driver's log is never called: this driver writes no log. */
API OOCUresult cuLogsRegisterCallback(void *function, void *data, void **handle);
OOCUresult cuLogsRegisterCallback(void *function, void *data, void **handle) {
    (void)function, (void)data;
    if (handle)
        *handle = NULL;
    return OOCU_SUCCESS;
}
API OOCUresult cuLogsUnregisterCallback(void *handle);
OOCUresult cuLogsUnregisterCallback(void *handle) {
    (void)handle;
    return OOCU_SUCCESS;
}

/* ---- copies and fills, of any direction ---- */

API OOCUresult cuMemcpyAsync(OOCUdeviceptr dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream);
API OOCUresult cuMemsetD8Async(OOCUdeviceptr dst, unsigned char value, size_t bytes,
                               OOCUstream stream);

static enum sim_place place_of(uintptr_t address, size_t bytes) {
    struct sim_range *range;
    sim_os_lock(&sim.lock);
    const enum sim_place place = sim__place(address, bytes, &range);
    sim_os_unlock(&sim.lock);
    return place;
}

/* What this file does at once, as a kernel on `stream` does it: all that is ordered before has
 * happened when this returns. */
static OOCUresult as_kernel(OOCUstream stream, const OOSimRange *reads, const OOSimRange *writes,
                            double bytes_per_s) {
    int device = 0, status = 0;
    OOCUresult result = cuStreamIsCapturing(stream, &status);
    if (result != OOCU_SUCCESS || status)
        return status ? OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED : result; /* no graph is kept here */
    sim__current_device(&device);
    const double seconds =
        sim.devices[device].launch_s + (double)(writes ? writes : reads)->bytes / bytes_per_s;
    return simLaunch(stream, reads, !!reads, writes, !!writes, seconds);
}

static double memory_rate(void) {
    int device = 0;
    sim__current_device(&device);
    return sim.devices[device].memory_gbps * 1e9;
}

static double link_rate(void) {
    int device = 0;
    sim__current_device(&device);
    return sim.devices[device].link_gbps * 1e9;
}

OOCUresult cuMemcpyAsync(OOCUdeviceptr dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream) {
    if (!bytes)
        return OOCU_SUCCESS;
    const enum sim_place to = place_of(dst, bytes), from = place_of(src, bytes);
    if (to == PLACE_INVALID || from == PLACE_INVALID)
        return OOCU_ERROR_INVALID_VALUE;
    const OOSimRange reads = {src, bytes}, writes = {dst, bytes};
    OOCUresult result;
    if (to == PLACE_DEVICE && from == PLACE_DEVICE) {
        result = as_kernel(stream, &reads, &writes, memory_rate() / 2);
    } else if (to == PLACE_DEVICE && from == PLACE_PINNED) {
        return cuMemcpyHtoDAsync_v2(dst, (const void *)src, bytes, stream);
    } else if (to == PLACE_DEVICE) {
        /* Pageable: the driver stages it, and the source is free again when the call returns. */
        result = as_kernel(stream, NULL, &writes, link_rate() / 2);
    } else if (from == PLACE_DEVICE) {
        if (to == PLACE_PINNED)
            return cuMemcpyDtoHAsync_v2((void *)dst, src, bytes, stream);
        simExpectPageable((const void *)dst);
        result = cuMemcpyDtoHAsync_v2((void *)dst, src, bytes, stream);
        return result == OOCU_SUCCESS ? cuStreamSynchronize(stream) : result;
    } else {
        result = cuStreamSynchronize(stream);
    }
    if (result == OOCU_SUCCESS)
        memmove((void *)dst, (const void *)src, bytes);
    return result;
}

OOCUresult cuMemsetD8Async(OOCUdeviceptr dst, unsigned char value, size_t bytes,
                           OOCUstream stream) {
    if (!bytes)
        return OOCU_SUCCESS;
    const OOSimRange writes = {dst, bytes};
    OOCUresult result = as_kernel(stream, NULL, &writes, memory_rate());
    if (result == OOCU_SUCCESS)
        memset((void *)dst, value, bytes);
    return result;
}

/* ---- address space with memory mapped into it: what expandable segments are made of ---- */

typedef unsigned long long handle_t;
struct allocation_properties { /* CUmemAllocationProp: its first fields */
    int type, handle_types;
    struct {
        int type, id;
    } location;
};

API OOCUresult cuMemAddressReserve(OOCUdeviceptr *ptr, size_t bytes, size_t alignment,
                                   OOCUdeviceptr where, unsigned long long flags);
API OOCUresult cuMemAddressFree(OOCUdeviceptr ptr, size_t bytes);
API OOCUresult cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option);
API OOCUresult cuMemCreate(handle_t *handle, size_t bytes, const void *properties,
                           unsigned long long flags);
API OOCUresult cuMemRelease(handle_t handle);
API OOCUresult cuMemMap(OOCUdeviceptr ptr, size_t bytes, size_t offset, handle_t handle,
                        unsigned long long flags);
API OOCUresult cuMemSetAccess(OOCUdeviceptr ptr, size_t bytes, const void *access, size_t count);
API OOCUresult cuMemUnmap(OOCUdeviceptr ptr, size_t bytes);

enum { GRANULE = 2 << 20 };

/* Memory that was made; it counts against the card from the moment it is mapped, and must fit when
 * it is made. Released ones are mapped on. */
struct piece {
    handle_t handle;
    size_t bytes;
    int device, mapped;
    struct piece *next;
};
static struct piece *pieces;
static handle_t last_handle;

OOCUresult cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    *bytes = GRANULE;
    return OOCU_SUCCESS;
}

OOCUresult cuMemAddressReserve(OOCUdeviceptr *ptr, size_t bytes, size_t alignment,
                               OOCUdeviceptr where, unsigned long long flags) {
    (void)alignment, (void)where, (void)flags;
    enum { PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };
    unsigned char *whole = mmap(NULL, bytes + GRANULE, PROT_NONE, PRIVATE, -1, 0);
    if (whole == MAP_FAILED)
        return OOCU_ERROR_OUT_OF_MEMORY;
    const size_t before = (GRANULE - (uintptr_t)whole % GRANULE) % GRANULE;
    if (before)
        munmap(whole, before);
    munmap(whole + before + bytes, GRANULE - before);
    *ptr = (OOCUdeviceptr)(whole + before);
    return OOCU_SUCCESS;
}

OOCUresult cuMemAddressFree(OOCUdeviceptr ptr, size_t bytes) {
    return munmap((void *)ptr, bytes) ? OOCU_ERROR_INVALID_VALUE : OOCU_SUCCESS;
}

OOCUresult cuMemCreate(handle_t *handle, size_t bytes, const void *properties,
                       unsigned long long flags) {
    (void)flags;
    SIM_ENTER(CALL_cuMemAlloc);
    struct allocation_properties wanted;
    memcpy(&wanted, properties, sizeof wanted);
    const int device = wanted.location.id;
    if (device < 0 || device >= sim.n_devices || !bytes || bytes % GRANULE)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    size_t waiting = 0; /* made, and not mapped yet */
    for (const struct piece *p = pieces; p; p = p->next)
        if (p->device == device && !p->mapped)
            waiting += p->bytes;
    if ((double)sim.device_used[device] + (double)waiting + (double)bytes >
        sim.devices[device].memory_bytes)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    struct piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    *piece = (struct piece){++last_handle, bytes, device, 0, pieces};
    pieces = piece;
    *handle = piece->handle;
    SIM_LEAVE;
}

OOCUresult cuMemRelease(handle_t handle) {
    SIM_ENTER(CALL_cuMemFree);
    struct piece **at = &pieces;
    while (*at && (*at)->handle != handle)
        at = &(*at)->next;
    struct piece *piece = *at;
    if (!piece)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    *at = piece->next;
    free(piece);
    SIM_LEAVE;
}

OOCUresult cuMemMap(OOCUdeviceptr ptr, size_t bytes, size_t offset, handle_t handle,
                    unsigned long long flags) {
    (void)flags;
    SIM_ENTER(CALL_cuMemAlloc);
    struct piece *piece = pieces;
    while (piece && piece->handle != handle)
        piece = piece->next;
    if (!piece || piece->mapped || offset || bytes != piece->bytes)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (mprotect((void *)ptr, bytes, PROT_READ | PROT_WRITE))
        SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
    result = sim__range_add(ptr, bytes, MEM_DEVICE, piece->device, 0, NULL);
    if (result != OOCU_SUCCESS)
        goto out;
    piece->mapped = 1;
    sim__poison((void *)ptr, bytes);
    SIM_LEAVE;
}

OOCUresult cuMemSetAccess(OOCUdeviceptr ptr, size_t bytes, const void *access, size_t count) {
    (void)ptr, (void)bytes, (void)access, (void)count;
    return OOCU_SUCCESS;
}

/* Nothing may be under way there, as for cuMemFree: a report says what is. */
OOCUresult cuMemUnmap(OOCUdeviceptr ptr, size_t bytes) {
    SIM_ENTER(CALL_cuMemFree);
    for (uintptr_t at = ptr; at < ptr + bytes;) {
        struct sim_range *range = sim__range_at(at);
        if (!range || range->lo != at || range->hi > ptr + bytes || range->block)
            SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
        const uintptr_t hi = range->hi;
        result = sim__range_remove(range, "cuMemUnmap");
        if (result != OOCU_SUCCESS)
            goto out;
        enum { AGAIN = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED };
        mmap((void *)at, hi - at, PROT_NONE, AGAIN, -1, 0); /* gives the pages back */
        at = hi;
    }
    SIM_LEAVE;
}

/* ---- memory in the order of a stream ----
 *
 * A block that was freed on a stream is given again to who asks for as much on that stream. Others
 * get it once the host has waited for all. To the race detector the pool writes the block where it
 * is freed and where it is given: who still uses it on another stream races with it. */

API OOCUresult cuMemAllocAsync(OOCUdeviceptr *ptr, size_t bytes, OOCUstream stream);
API OOCUresult cuMemFreeAsync(OOCUdeviceptr ptr, OOCUstream stream);
API OOCUresult cuda_sim_pool_trim(int device);
API OOCUresult cuda_sim_pool_bytes(int device, uint64_t *reserved, uint64_t *used);

struct block {
    uintptr_t lo, hi;
    int device;
    uint64_t stream; /* that it was freed on; 0: in use */
    struct block *next;
};
static struct block *blocks;

static OOCUresult pool_write(OOCUstream handle, const struct block *block) {
    struct sim_stream *stream = sim__stream(handle);
    if (!stream)
        return OOCU_ERROR_INVALID_HANDLE;
    if (stream->capture != SIM_CAPTURE_NONE)
        return OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    sim__stream_writes(stream, SIM_BY_LENDER, block->lo, block->hi);
    return OOCU_SUCCESS;
}

/* Give the device the pool's free memory back; everything on it has ended. */
OOCUresult cuda_sim_pool_trim(int device) {
    OOCUresult waited = cuCtxSynchronize();
    if (waited != OOCU_SUCCESS)
        return waited;
    SIM_ENTER(CALL_cuMemFree);
    for (struct block **at = &blocks; *at && result == OOCU_SUCCESS;) {
        struct block *block = *at;
        if (!block->stream || block->device != device) {
            at = &block->next;
            continue;
        }
        result = sim__range_remove(sim__range_at(block->lo), "cuMemPoolTrimTo");
        *at = block->next;
        free(block);
    }
    SIM_LEAVE;
}

OOCUresult cuda_sim_pool_bytes(int device, uint64_t *reserved, uint64_t *used) {
    sim_os_lock(&sim.lock);
    *reserved = *used = 0;
    for (const struct block *block = blocks; block; block = block->next)
        if (block->device == device) {
            *reserved += block->hi - block->lo;
            *used += block->stream ? 0 : block->hi - block->lo;
        }
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

static OOCUresult take(OOCUdeviceptr *ptr, size_t bytes, OOCUstream handle) {
    int device = 0;
    SIM_ENTER(CALL_cuMemAlloc);
    const struct sim_stream *stream = sim__stream(handle);
    if (!ptr || !bytes)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!stream)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    sim__current_device(&device);
    struct block *block = blocks;
    while (block && (block->stream != stream->handle || block->hi - block->lo != bytes))
        block = block->next;
    if (!block) {
        void *memory = NULL;
        result = sim__allocate(MEM_DEVICE, bytes, device, 0, &memory);
        if (result != OOCU_SUCCESS)
            goto out;
        block = calloc(1, sizeof *block);
        if (!block)
            SIM_RETURN(OOCU_ERROR_OUT_OF_MEMORY);
        *block = (struct block){(uintptr_t)memory, (uintptr_t)memory + bytes, device, 0, blocks};
        blocks = block;
    }
    result = pool_write(handle, block);
    if (result != OOCU_SUCCESS)
        goto out;
    block->stream = 0;
    *ptr = block->lo;
    SIM_LEAVE;
}

OOCUresult cuMemAllocAsync(OOCUdeviceptr *ptr, size_t bytes, OOCUstream stream) {
    const size_t whole = (bytes + 511) / 512 * 512;
    OOCUresult result = take(ptr, whole, stream);
    if (result != OOCU_ERROR_OUT_OF_MEMORY)
        return result;
    int device = 0;
    sim__current_device(&device);
    result = cuda_sim_pool_trim(device);
    return result == OOCU_SUCCESS ? take(ptr, whole, stream) : result;
}

OOCUresult cuMemFreeAsync(OOCUdeviceptr ptr, OOCUstream handle) {
    SIM_ENTER(CALL_cuMemFree);
    struct block *block = blocks;
    while (block && (block->lo != ptr || block->stream))
        block = block->next;
    if (!block)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = pool_write(handle, block);
    if (result == OOCU_SUCCESS)
        block->stream = sim__stream(handle)->handle;
    SIM_LEAVE;
}

/* ---- start ---- */

/* Kernels of two streams overlap, as small ones do on a card; others' calls find as many cards as
 * they ask for before CUDA starts. CUDA_VISIBLE_DEVICES hides all of them or none: "" and "-1" are
 * what programs write that want no card. */
__attribute__((constructor)) static void begin(void) {
    const char *cards = getenv("CUDA_SIM_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    simSwitch(SIM_CONCURRENT_KERNELS, 1);
    if (visible && (!*visible || !strcmp(visible, "-1")))
        simSetDeviceCount(0);
    else if (cards)
        simSetDeviceCount(atoi(cards));
}
