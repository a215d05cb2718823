/* driver_calls.c - what a driver's calls cost and what its link carries; one JSON object per line.
 *
 *     driver_calls calls ROUNDS
 *     driver_calls link LARGEST_BYTES BYTES_PER_FIGURE
 *
 * Works through the project's own table of driver calls: on the library that ORACLE_OFFLOAD_DRIVER
 * names, else on the system's driver. On the simulated one the times of copies are virtual. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <sys/mman.h>
#endif

#include "../csrc/base/os.h"
#include "../csrc/driver/driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct oo_driver cu;
static OOCUstream to_device, to_host, busy;

static void need(const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return;
    (void)oo_driver_error(&cu, call, result);
    fprintf(stderr, "%s\n", oo_error_message());
    exit(1);
}

#define DO(call, ...) need(#call, cu.call(__VA_ARGS__))

static double now_s(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static OOCUstream new_stream(void) {
    OOCUstream stream;
    DO(cuStreamCreateWithPriority, &stream, OOCU_STREAM_NON_BLOCKING, 0);
    return stream;
}

static OOCUevent new_event(unsigned int flags) {
    OOCUevent event;
    DO(cuEventCreate, &event, flags);
    return event;
}

static OOCUdeviceptr device_memory(size_t bytes) {
    OOCUdeviceptr ptr;
    DO(cuMemAlloc, &ptr, bytes);
    return ptr;
}

static void settle(void) {
    DO(cuStreamSynchronize, to_device);
    DO(cuStreamSynchronize, to_host);
    DO(cuStreamSynchronize, busy);
}

static double elapsed_s(OOCUevent start, OOCUevent end) {
    float milliseconds;
    DO(cuEventSynchronize, end);
    DO(cuEventElapsedTime, &milliseconds, start, end);
    return 1e-3 * (double)milliseconds;
}

/* ---- host memory of each kind ---- */

enum kind { REGISTERED_HUGE, REGISTERED_SMALL, ALLOCATED, PAGEABLE, KINDS };
static const char *const kind_names[KINDS] = {"registered_huge_pages", "registered_small_pages",
                                              "allocated", "pageable"};

static char *host_memory(enum kind kind, size_t bytes) {
    void *pages;
    if (kind == ALLOCATED) {
        DO(cuMemHostAlloc, &pages, bytes, OOCU_MEMHOSTALLOC_PORTABLE);
    } else {
        pages = oo__pages_map(bytes);
        if (!pages) {
            fprintf(stderr, "no host memory: %zu bytes\n", bytes);
            exit(1);
        }
#if defined(MADV_NOHUGEPAGE)
        if (kind == REGISTERED_SMALL)
            (void)madvise(pages, bytes, MADV_NOHUGEPAGE);
#endif
    }
    memset(pages, 1, bytes);
    if (kind == REGISTERED_HUGE || kind == REGISTERED_SMALL)
        DO(cuMemHostRegister, pages, bytes, OOCU_MEMHOSTREGISTER_PORTABLE);
    return pages;
}

static void host_memory_free(enum kind kind, char *pages, size_t bytes) {
    if (kind == ALLOCATED) {
        DO(cuMemFreeHost, pages);
        return;
    }
    if (kind != PAGEABLE)
        DO(cuMemHostUnregister, pages);
    oo__pages_unmap(pages, bytes);
}

/* ---- the link ---- */

static size_t largest, per_figure;
static OOCUdeviceptr device_in, device_out;
static OOCUevent begin_event, end_event, other_event;

/* How many copies of `bytes` make a figure: few enough for the driver's queue of launches. */
static int count_of(size_t bytes) {
    const size_t count = per_figure / bytes;
    return count < 3 ? 3 : count > 200 ? 200 : (int)count;
}

static void copy(int down, char *host, size_t bytes) {
    if (down)
        DO(cuMemcpyDtoHAsync, host, device_out, bytes, to_host);
    else
        DO(cuMemcpyHtoDAsync, device_in, host, bytes, to_device);
}

/* Seconds of `count` copies with `between` after each but the last, in the order of the device:
 * a large copy ahead keeps the link busy until all of them are queued. */
static double queued_s(int down, char *host, size_t bytes, int count, void (*between)(void)) {
    const OOCUstream stream = down ? to_host : to_device;
    copy(down, host, largest);
    DO(cuEventRecord, begin_event, stream);
    for (int i = 0; i < count; i++) {
        copy(down, host, bytes);
        if (between && i + 1 < count)
            between();
    }
    DO(cuEventRecord, end_event, stream);
    return elapsed_s(begin_event, end_event);
}

static void print_rate(const char *name, size_t bytes, int count, double seconds) {
    printf("{\"name\": \"%s_%zu_KiB\", \"copy_bytes\": %zu, \"copies_count\": %d, "
           "\"copy_s\": %.9g, \"rate_gbps\": %.6g}\n",
           name, bytes >> 10, bytes, count, seconds / count,
           seconds > 0 ? 1e-9 * (double)bytes * count / seconds : 0.0);
    (void)fflush(stdout);
}

static void one_way(enum kind kind, char *host) {
    char name[96];
    for (size_t bytes = (size_t)64 << 10; bytes <= largest; bytes *= 4)
        for (int down = 0; down < 2; down++) {
            const int count = count_of(bytes);
            (void)snprintf(name, sizeof name, "%s_%s", kind_names[kind], down ? "d2h" : "h2d");
            copy(down, host, bytes); /* the first one pays for what is done once */
            settle();
            /* Copies of pageable memory return late: their host time counts. */
            const double begin = now_s();
            double seconds = queued_s(down, host, bytes, count, NULL);
            if (kind == PAGEABLE && !cu.simulated) {
                settle();
                seconds = (now_s() - begin) * (double)bytes * count /
                          ((double)bytes * count + (double)largest);
            }
            print_rate(name, bytes, count, seconds);
        }
}

/* Bytes of both directions together over the time from the first start to the last end. */
static void both_ways(char *up, char *down) {
    const int count = count_of(largest);
    settle();
    DO(cuEventRecord, begin_event, to_device);
    DO(cuStreamWaitEvent, to_host, begin_event, 0);
    for (int i = 0; i < count; i++) {
        copy(0, up, largest);
        copy(1, down, largest);
    }
    DO(cuEventRecord, other_event, to_host);
    DO(cuStreamWaitEvent, to_device, other_event, 0);
    DO(cuEventRecord, end_event, to_device);
    print_rate("both_ways_at_once", largest, 2 * count, elapsed_s(begin_event, end_event));
}

static void one_against_many(char *host) {
    const size_t bytes = largest / 4;
    const double one = queued_s(0, host, bytes, 1, NULL);
    const double many = queued_s(0, host, bytes / 16, 16, NULL);
    print_rate("one_copy", bytes, 1, one);
    print_rate("sixteen_copies", bytes / 16, 16, many);
}

static OOCUevent untimed[2], timed[2], passed;
static void one_event(void) { DO(cuEventRecord, untimed[0], to_device); }
static void two_events(void) {
    one_event();
    DO(cuEventRecord, untimed[1], to_device);
}
static void two_timed_events(void) {
    DO(cuEventRecord, timed[0], to_device);
    DO(cuEventRecord, timed[1], to_device);
}
static void event_and_wait(void) {
    one_event();
    DO(cuStreamWaitEvent, to_device, passed, 0);
}

static void gaps(char *host) {
    static const struct {
        const char *name;
        void (*between)(void);
    } kinds[] = {{"no event", NULL},
                 {"1 event", one_event},
                 {"2 events", two_events},
                 {"2 events with timing", two_timed_events},
                 {"1 event and 1 wait", event_and_wait}};
    const size_t bytes = largest < ((size_t)1 << 20) ? largest : (size_t)1 << 20;
    const int count = count_of(bytes);
    double least[5];
    DO(cuEventRecord, passed, to_host);
    settle();
    for (int round = 0; round < 5; round++) /* rounds in turn: all see the same load */
        for (size_t i = 0; i < 5; i++) {
            const double seconds = queued_s(0, host, bytes, count, kinds[i].between) / count;
            if (!round || seconds < least[i])
                least[i] = seconds;
        }
    for (size_t i = 0; i < 5; i++) {
        printf("{\"name\": \"between copies: %s\", \"copy_bytes\": %zu, \"copies_count\": %d, "
               "\"copy_s\": %.9g, \"over_no_event_s\": %.9g}\n",
               kinds[i].name, bytes, count, least[i], least[i] - least[0]);
        (void)fflush(stdout);
    }
}

static void link_figures(void) {
    begin_event = new_event(OOCU_EVENT_DEFAULT);
    end_event = new_event(OOCU_EVENT_DEFAULT);
    other_event = new_event(OOCU_EVENT_DISABLE_TIMING);
    passed = new_event(OOCU_EVENT_DISABLE_TIMING);
    for (int i = 0; i < 2; i++) {
        untimed[i] = new_event(OOCU_EVENT_DISABLE_TIMING);
        timed[i] = new_event(OOCU_EVENT_DEFAULT);
    }
    device_in = device_memory(largest);
    device_out = device_memory(largest);
    DO(cuMemsetD32Async, device_out, 0, largest / 4, to_host);
    for (enum kind kind = 0; kind < KINDS; kind++) {
        char *const host = host_memory(kind, largest);
        one_way(kind, host);
        if (kind == REGISTERED_HUGE) {
            char *const other = host_memory(kind, largest);
            both_ways(host, other);
            one_against_many(host);
            gaps(host);
            settle();
            host_memory_free(kind, other, largest);
        }
        settle();
        host_memory_free(kind, host, largest);
    }
    DO(cuMemFree, device_in);
    DO(cuMemFree, device_out);
    const OOCUevent events[] = {begin_event, end_event,  other_event, passed,
                                untimed[0],  untimed[1], timed[0],    timed[1]};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        DO(cuEventDestroy, events[i]);
}

/* ---- the calls ---- */

enum { CALLS = 100, MAX_ROUNDS = 100, BUSY_BYTES = 64 << 20 };
static int rounds;
static OOCUcontext context;
static OOCUdevice device;
static OOCUevent plain, with_timing, begun, pending, not_begun;
static char *locked, *pageable;
static OOCUdeviceptr on_device;
static size_t busy_bytes;
static OOCUresult last;

static void keep(OOCUresult result) {
    if (result != OOCU_ERROR_NOT_READY)
        need("a timed call", result);
    last = result;
}

static void get_current(void) {
    OOCUcontext found;
    keep(cu.cuCtxGetCurrent(&found));
}
static void push_pop(void) {
    OOCUcontext found;
    keep(cu.cuCtxPushCurrent(context));
    keep(cu.cuCtxPopCurrent(&found));
}
static void is_capturing(void) {
    int status;
    keep(cu.cuStreamIsCapturing(to_device, &status));
}
static void query_idle(void) { keep(cu.cuStreamQuery(to_device)); }
static void query_busy(void) { keep(cu.cuStreamQuery(busy)); }
static void synchronize_idle(void) { keep(cu.cuStreamSynchronize(to_device)); }
static void record_plain(void) { keep(cu.cuEventRecord(plain, to_device)); }
static void record_timed(void) { keep(cu.cuEventRecord(with_timing, to_device)); }
static void wait_passed(void) { keep(cu.cuStreamWaitEvent(to_device, begun, 0)); }
static void wait_pending(void) { keep(cu.cuStreamWaitEvent(to_device, not_begun, 0)); }
static void event_query_ready(void) { keep(cu.cuEventQuery(begun)); }
static void event_query_not_ready(void) { keep(cu.cuEventQuery(not_begun)); }
static void event_synchronize(void) { keep(cu.cuEventSynchronize(begun)); }
static void elapsed_ready(void) {
    float milliseconds;
    keep(cu.cuEventElapsedTime(&milliseconds, begun, pending));
}
static void elapsed_not_ready(void) {
    float milliseconds;
    keep(cu.cuEventElapsedTime(&milliseconds, begun, not_begun));
}
static void create_destroy_plain(void) {
    OOCUevent event;
    keep(cu.cuEventCreate(&event, OOCU_EVENT_DISABLE_TIMING));
    keep(cu.cuEventDestroy(event));
}
static void create_destroy_timed(void) {
    OOCUevent event;
    keep(cu.cuEventCreate(&event, OOCU_EVENT_DEFAULT));
    keep(cu.cuEventDestroy(event));
}
static void copy_locked(void) { keep(cu.cuMemcpyHtoDAsync(on_device, locked, 4096, to_device)); }
static void copy_pageable(void) {
    keep(cu.cuMemcpyHtoDAsync(on_device, pageable, 4096, to_device));
}
static void copy_back(void) { keep(cu.cuMemcpyDtoHAsync(locked, on_device, 4096, to_device)); }
static void memory_set(void) { keep(cu.cuMemsetD32Async(on_device, 0, 1024, to_device)); }
static void memory_info(void) {
    size_t free_bytes, total_bytes;
    keep(cu.cuMemGetInfo(&free_bytes, &total_bytes));
}
static void pointer_attribute(void) {
    unsigned int type;
    keep(cu.cuPointerGetAttribute(&type, OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  (OOCUdeviceptr)(uintptr_t)locked));
}
static void device_attribute(void) {
    int value;
    keep(cu.cuDeviceGetAttribute(&value, OOCU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device));
}
static void allocate_free(void) {
    OOCUdeviceptr ptr;
    keep(cu.cuMemAlloc(&ptr, 1 << 20));
    keep(cu.cuMemFree(ptr));
}
static void register_unregister(void) {
    keep(cu.cuMemHostRegister(pageable, 2 << 20, OOCU_MEMHOSTREGISTER_PORTABLE));
    keep(cu.cuMemHostUnregister(pageable));
}
static void host_allocate_free(void) {
    void *ptr;
    keep(cu.cuMemHostAlloc(&ptr, 2 << 20, OOCU_MEMHOSTALLOC_PORTABLE));
    keep(cu.cuMemFreeHost(ptr));
}
static void stream_create_destroy(void) {
    OOCUstream stream;
    keep(cu.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, 0));
    keep(cu.cuStreamDestroy(stream));
}
static void OOCUDAAPI nothing(void *data) { (void)data; }
static void host_function(void) { keep(cu.cuLaunchHostFunc(to_device, nothing, NULL)); }
static void streamed_use(void) {
    int status;
    keep(cu.cuStreamIsCapturing(to_host, &status));
    keep(cu.cuStreamWaitEvent(to_device, begun, 0));
    keep(cu.cuMemcpyHtoDAsync(on_device, locked, 4096, to_device));
    keep(cu.cuEventRecord(plain, to_device));
    keep(cu.cuStreamWaitEvent(to_host, plain, 0));
    keep(cu.cuEventRecord(pending, to_host));
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* `behind`: while a long copy keeps the stream `busy` busy, and `not_begun` is queued behind it. */
static void time_call(const char *name, void (*call)(void), int calls, int behind) {
    double times[MAX_ROUNDS];
    int not_ready = 0;
    for (int round = -1; round < rounds; round++) { /* the first warms up */
        settle();
        if (behind) {
            for (int i = 0; i < 8; i++)
                DO(cuMemcpyHtoDAsync, on_device, locked, busy_bytes, busy);
            DO(cuEventRecord, not_begun, busy);
        }
        const double begin = now_s();
        for (int i = 0; i < calls; i++)
            call();
        const double end = now_s();
        if (round >= 0) {
            times[round] = (end - begin) / calls;
            not_ready += last == OOCU_ERROR_NOT_READY;
        }
    }
    settle();
    qsort(times, (size_t)rounds, sizeof *times, by_value);
    printf("{\"name\": \"%s\", \"least_s\": %.9g, \"median_s\": %.9g, \"calls_count\": %d, "
           "\"rounds_count\": %d, \"not_ready_count\": %d}\n",
           name, times[0], times[rounds / 2], calls, rounds, not_ready);
    (void)fflush(stdout);
}

static void call_figures(void) {
    busy_bytes = cu.simulated ? 4096 : BUSY_BYTES;
    locked = host_memory(REGISTERED_HUGE, busy_bytes > (2 << 20) ? busy_bytes : 2 << 20);
    pageable = host_memory(PAGEABLE, 2 << 20);
    on_device = device_memory(busy_bytes);
    plain = new_event(OOCU_EVENT_DISABLE_TIMING);
    with_timing = new_event(OOCU_EVENT_DEFAULT);
    begun = new_event(OOCU_EVENT_DEFAULT);
    pending = new_event(OOCU_EVENT_DEFAULT);
    not_begun = new_event(OOCU_EVENT_DEFAULT);
    DO(cuEventRecord, begun, to_device);
    DO(cuEventRecord, pending, to_device);
    settle();
    time_call("cuCtxGetCurrent", get_current, CALLS, 0);
    time_call("cuCtxPushCurrent + cuCtxPopCurrent", push_pop, CALLS, 0);
    time_call("cuStreamIsCapturing", is_capturing, CALLS, 0);
    time_call("cuStreamQuery, idle", query_idle, CALLS, 0);
    time_call("cuStreamQuery, busy", query_busy, CALLS, 1);
    time_call("cuStreamSynchronize, idle", synchronize_idle, CALLS, 0);
    time_call("cuEventRecord, no timing", record_plain, CALLS, 0);
    time_call("cuEventRecord, timing", record_timed, CALLS, 0);
    time_call("cuStreamWaitEvent, passed", wait_passed, CALLS, 0);
    time_call("cuStreamWaitEvent, not yet", wait_pending, CALLS, 1);
    time_call("cuEventQuery, ready", event_query_ready, CALLS, 0);
    time_call("cuEventQuery, not ready", event_query_not_ready, CALLS, 1);
    time_call("cuEventSynchronize, ready", event_synchronize, CALLS, 0);
    time_call("cuEventElapsedTime, ready", elapsed_ready, CALLS, 0);
    time_call("cuEventElapsedTime, not ready", elapsed_not_ready, CALLS, 1);
    time_call("cuEventCreate + cuEventDestroy, no timing", create_destroy_plain, CALLS, 0);
    time_call("cuEventCreate + cuEventDestroy, timing", create_destroy_timed, CALLS, 0);
    time_call("cuMemcpyHtoDAsync, 4 KiB locked", copy_locked, CALLS, 0);
    time_call("cuMemcpyHtoDAsync, 4 KiB pageable", copy_pageable, CALLS, 0);
    time_call("cuMemcpyDtoHAsync, 4 KiB locked", copy_back, CALLS, 0);
    time_call("cuMemsetD32Async, 4 KiB", memory_set, CALLS, 0);
    time_call("cuMemGetInfo", memory_info, CALLS, 0);
    time_call("cuPointerGetAttribute", pointer_attribute, CALLS, 0);
    time_call("cuDeviceGetAttribute", device_attribute, CALLS, 0);
    time_call("cuMemAlloc + cuMemFree, 1 MiB", allocate_free, 10, 0);
    time_call("cuMemHostRegister + cuMemHostUnregister, 2 MiB", register_unregister, 10, 0);
    time_call("cuMemHostAlloc + cuMemFreeHost, 2 MiB", host_allocate_free, 10, 0);
    time_call("cuStreamCreateWithPriority + cuStreamDestroy", stream_create_destroy, 10, 0);
    time_call("cuLaunchHostFunc", host_function, CALLS, 0);
    time_call("six calls that order a streamed use", streamed_use, CALLS, 0);
    const OOCUevent events[] = {plain, with_timing, begun, pending, not_begun};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        DO(cuEventDestroy, events[i]);
    DO(cuMemFree, on_device);
    host_memory_free(REGISTERED_HUGE, locked, busy_bytes > (2 << 20) ? busy_bytes : 2 << 20);
    host_memory_free(PAGEABLE, pageable, 2 << 20);
}

int main(int argc, char **argv) {
    const int calls = argc == 3 && !strcmp(argv[1], "calls");
    if (!calls && !(argc == 4 && !strcmp(argv[1], "link"))) {
        fprintf(stderr, "usage: driver_calls calls ROUNDS | link LARGEST_BYTES BYTES_PER_FIGURE\n");
        return 2;
    }
    const char *const path = getenv("ORACLE_OFFLOAD_DRIVER");
    if (oo_driver_load(&cu, path && *path ? path : NULL) != OO_OK) {
        fprintf(stderr, "%s\n", oo_error_message());
        return 1;
    }
    DO(cuDeviceGet, &device, 0);
    DO(cuDevicePrimaryCtxRetain, &context, device);
    DO(cuCtxPushCurrent, context);
    to_device = new_stream();
    to_host = new_stream();
    busy = new_stream();
    if (calls) {
        rounds = atoi(argv[2]);
        rounds = rounds < 1 ? 1 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
        call_figures();
    } else {
        largest = (size_t)strtoull(argv[2], NULL, 10);
        per_figure = (size_t)strtoull(argv[3], NULL, 10);
        if (largest < ((size_t)64 << 10)) {
            fprintf(stderr, "LARGEST_BYTES is %zu; at least 65536\n", largest);
            return 2;
        }
        link_figures();
    }
    DO(cuStreamDestroy, to_device);
    DO(cuStreamDestroy, to_host);
    DO(cuStreamDestroy, busy);
    DO(cuCtxPopCurrent, &context);
    DO(cuDevicePrimaryCtxRelease, device);
    return 0;
}
