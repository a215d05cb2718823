/* control.c - the simulator's state: devices, handles, switches, reports, statistics, trace. */
#include "sim_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_OBJECTS = 1 << 24, MAX_TRACE = 1 << 22 };

struct sim_state sim = {.lock = SIM_LOCK_INIT, .changed = SIM_COND_INIT, .n_devices = 1};

static struct sim_object *objects;
static uint32_t n_objects, free_object;
static size_t objects_capacity;
static char **reports;
static size_t n_reports, reports_capacity;
static uint64_t *report_keys;
static size_t n_keys, keys_capacity;
static struct sim_trace_row *trace_rows;
static size_t n_trace, trace_capacity;

/* Link and compute rates are the vendors' or measured elsewhere (docs/simulator.md). The copy
 * latency is assumed: it makes a copy of 1 MiB reach 94% of the peak at 25 GB/s, as reported of a
 * 4090. */
static const struct {
    const char *key;
    struct sim_device device;
} presets[] = {
    {"rtx3090",
     {"Simulated RTX 3090", 24, 2.5e-6, 24 * 1073741824.0, 60, 936, 5e-6, 8, 6, 0, 0, 1, 0, 0}},
    {"rtx4090",
     {"Simulated RTX 4090", 25, 2.5e-6, 24 * 1073741824.0, 110, 1008, 5e-6, 8, 9, 0, 0, 1, 0, 0}},
    {"rtx5090",
     {"Simulated RTX 5090", 50, 2.5e-6, 32 * 1073741824.0, 150, 1792, 5e-6, 12, 0, 0, 0, 1, 0, 0}},
    /* The H200's matrix units and link; memory and its rate are NVIDIA's of the H100 SXM. */
    {"h100",
     {"Simulated H100", 55, 2.5e-6, 80 * 1073741824.0, 700, 3350, 5e-6, 9, 0, 0, 0, 1, 0, 0}},
    {"h200",
     {"Simulated H200", 55, 2.5e-6, 141 * 1073741824.0, 700, 4800, 5e-6, 9, 0, 0, 0, 1, 0, 0}},
};

void *sim__grow(void *array, size_t *capacity, size_t needed, size_t size) {
    if (needed <= *capacity)
        return array;
    size_t wider = *capacity ? 2 * *capacity : 16;
    while (wider < needed)
        wider *= 2;
    void *moved = realloc(array, wider * size);
    if (!moved)
        abort(); /* a few kilobytes of bookkeeping: nothing sensible can follow */
    *capacity = wider;
    return moved;
}

/* ---- handles: index and generation, so that an old handle never names a new object ---- */

enum { KIND_BITS = 4, INDEX_BITS = 24 };

uint64_t sim__handle_new(enum sim_object_kind kind, void *object) {
    uint32_t index = free_object;
    if (index) {
        free_object = objects[index].next_free;
    } else {
        if (n_objects == 0)
            n_objects = 1; /* index 0 is no object */
        index = n_objects++;
        if (index >= MAX_OBJECTS)
            abort();
        objects = sim__grow(objects, &objects_capacity, n_objects, sizeof *objects);
        objects[index].generation = 0;
    }
    struct sim_object *slot = &objects[index];
    slot->object = object;
    slot->kind = (int)kind;
    if (kind != OBJECT_STREAM || !sim.switches[SIM_RECYCLED_STREAMS] || !slot->generation)
        slot->generation = slot->generation % 0x0FFFFFFFu + 1;
    return (uint64_t)slot->generation << (KIND_BITS + INDEX_BITS) | (uint64_t)index << KIND_BITS |
           kind;
}

void *sim__handle_get(enum sim_object_kind kind, uint64_t handle) {
    uint64_t index = handle >> KIND_BITS & (MAX_OBJECTS - 1);
    if ((handle & ((1u << KIND_BITS) - 1)) != (uint64_t)kind || index == 0 || index >= n_objects)
        return NULL;
    const struct sim_object *slot = &objects[index];
    if (slot->kind != (int)kind || slot->generation != handle >> (KIND_BITS + INDEX_BITS))
        return NULL;
    return slot->object;
}

void sim__handle_end(uint64_t handle) {
    uint32_t index = (uint32_t)(handle >> KIND_BITS & (MAX_OBJECTS - 1));
    objects[index].object = NULL;
    objects[index].kind = 0;
    objects[index].next_free = free_object;
    free_object = index;
}

void sim__handles_end(int device) {
    for (uint32_t i = 1; i < n_objects; i++) {
        const struct sim_object slot = objects[i];
        uint64_t handle = (uint64_t)slot.generation << (KIND_BITS + INDEX_BITS) |
                          (uint64_t)i << KIND_BITS | (uint64_t)slot.kind;
        sim__object_end(slot.kind, handle, slot.object, device);
    }
}

/* ---- reports ---- */

int sim__reported(uint64_t key) {
    if (n_reports >= SIM_MAX_REPORTS)
        return 1;
    for (size_t i = 0; i < n_keys; i++)
        if (report_keys[i] == key)
            return 1;
    return 0;
}

void sim__report(uint64_t key, const char *format, ...) {
    if (sim__reported(key))
        return;
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (!copy)
        return;
    memcpy(copy, text, bytes);
    reports = sim__grow(reports, &reports_capacity, n_reports + 1, sizeof *reports);
    reports[n_reports++] = copy;
    if (key) {
        report_keys = sim__grow(report_keys, &keys_capacity, n_keys + 1, sizeof *report_keys);
        report_keys[n_keys++] = key;
    }
}

static const char *const schedule_names[] = {"timed",          "random", "starve-copy",
                                             "starve-compute", "eager",  "delayed"};

void sim__seed_text(char *text, size_t capacity) {
    const char *name = schedule_names[sim.schedule];
    snprintf(text, capacity, "%s, seed %llu; replay with ORACLE_OFFLOAD_SIM_SEED=%s:%llu", name,
             (unsigned long long)sim.seed, name, (unsigned long long)sim.seed);
}

OOCUresult simScheduleText(char *text, size_t capacity) {
    if (!text || !capacity)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    sim__seed_text(text, capacity);
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

uint64_t simReportCount(void) {
    sim_os_lock(&sim.lock);
    uint64_t count = n_reports;
    sim_os_unlock(&sim.lock);
    return count;
}

OOCUresult simReport(uint64_t index, char *text, size_t capacity) {
    if (!text || !capacity)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    OOCUresult result = index < n_reports ? OOCU_SUCCESS : OOCU_ERROR_INVALID_VALUE;
    if (result == OOCU_SUCCESS)
        snprintf(text, capacity, "%s", reports[index]);
    sim_os_unlock(&sim.lock);
    return result;
}

static void clear_reports(void) {
    for (size_t i = 0; i < n_reports; i++)
        free(reports[i]);
    n_reports = n_keys = 0;
}

OOCUresult simReportsClear(void) {
    sim_os_lock(&sim.lock);
    clear_reports();
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simLabelStream(OOCUstream handle, const char *label) {
    if (!label)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    struct sim_stream *stream = sim__stream(handle);
    if (stream)
        snprintf(sim.actors[stream->actor].name, sizeof sim.actors[stream->actor].name, "%s",
                 label);
    sim_os_unlock(&sim.lock);
    return stream ? OOCU_SUCCESS : OOCU_ERROR_INVALID_HANDLE;
}

/* ---- configuration ---- */

static const struct sim_device *preset(const char *name) {
    for (size_t i = 0; name && i < sizeof presets / sizeof presets[0]; i++)
        if (!strcmp(name, presets[i].key))
            return &presets[i].device;
    return NULL;
}

/* "41" is the random schedule with seed 41, "delayed:41" another one. Returns 0 for what is no
 * schedule. */
static int schedule_from(const char *text) {
    char *end = NULL;
    const char *number = strchr(text, ':');
    const size_t length = number ? (size_t)(number - text) : strlen(text);
    sim.schedule = SIM_RANDOM;
    for (int i = SIM_TIMED; i <= SIM_DELAYED; i++) {
        if (strlen(schedule_names[i]) == length && !strncmp(text, schedule_names[i], length)) {
            sim.schedule = i;
            text = number ? number + 1 : "0";
        }
    }
    sim.seed = sim.random = strtoull(text, &end, 10);
    return end != text && !*end && *text != '-';
}

static void defaults(void) {
    const char *seed = getenv("ORACLE_OFFLOAD_SIM_SEED");
    const char *trace = getenv("ORACLE_OFFLOAD_SIM_TRACE");
    if (!schedule_from(seed && *seed ? seed : "timed")) {
        /* cuInit refuses: what was not replayed must not look as if it had been. */
        sim.boot_error = OOCU_ERROR_INVALID_VALUE;
        sim__report(2,
                    "error: ORACLE_OFFLOAD_SIM_SEED is \"%s\"; it must be a number (of the random "
                    "schedule), or timed, random, starve-copy, starve-compute, eager or delayed "
                    "with a number: delayed:41",
                    seed);
    }
    memset(sim.switches, 0, sizeof sim.switches);
    sim.switches[SIM_RACES] = sim.switches[SIM_POISON] = 1;
    sim.switches[SIM_TRACE_ON] = trace && *trace && strcmp(trace, "0") != 0;
    sim.patience_ms = 10000;
}

void sim__boot(void) {
    if (sim.booted)
        return;
    sim.booted = 1;
    const char *name = getenv("ORACLE_OFFLOAD_SIM_DEVICE");
    const struct sim_device *device = preset(name && *name ? name : "rtx4090");
    if (!device) {
        /* cuInit refuses; a wrong name must not become a device that was not asked for. */
        sim.boot_error = OOCU_ERROR_INVALID_DEVICE;
        sim__report(1,
                    "error: ORACLE_OFFLOAD_SIM_DEVICE is \"%s\"; it must be rtx3090, rtx4090, "
                    "rtx5090, h100 or h200",
                    name);
        device = preset("rtx4090");
    }
    for (int i = 0; i < SIM_MAX_DEVICES; i++)
        sim.devices[i] = *device;
    defaults();
}

OOCUresult simPreset(const char *name, struct sim_device *out) {
    const struct sim_device *device = preset(name);
    if (!device || !out)
        return OOCU_ERROR_INVALID_VALUE;
    *out = *device;
    return OOCU_SUCCESS;
}

OOCUresult simGetDevice(int ordinal, struct sim_device *out) {
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = OOCU_ERROR_INVALID_VALUE;
    if (out && ordinal >= 0 && ordinal < SIM_MAX_DEVICES) {
        *out = sim.devices[ordinal];
        result = OOCU_SUCCESS;
    }
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simSetDevice(int ordinal, const struct sim_device *device) {
    if (!device || ordinal < 0 || ordinal >= SIM_MAX_DEVICES || !(device->link_gbps > 0) ||
        !(device->copy_latency_s >= 0) || !(device->memory_bytes >= 0) || !(device->tflops > 0) ||
        !(device->memory_gbps > 0) || !(device->launch_s >= 0) || device->upstream < 0 ||
        device->upstream > SIM_MAX_DEVICES || (device->upstream && !(device->upstream_gbps > 0)) ||
        !(device->duplex_share > 0 && device->duplex_share <= 1) || !(device->disk_gbps >= 0) ||
        !(device->disk_latency_s >= 0) || !memchr(device->name, 0, sizeof device->name))
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = OOCU_ERROR_ILLEGAL_STATE;
    if (!sim.primary[ordinal].refs) {
        sim.devices[ordinal] = *device;
        result = OOCU_SUCCESS;
    }
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simSetDeviceCount(int count) {
    if (count < 0 || count > SIM_MAX_DEVICES)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = OOCU_SUCCESS;
    for (int i = count; i < SIM_MAX_DEVICES; i++)
        if (sim.primary[i].refs)
            result = OOCU_ERROR_ILLEGAL_STATE;
    if (result == OOCU_SUCCESS)
        sim.n_devices = count;
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simSetSchedule(int schedule, uint64_t seed) {
    if (schedule < SIM_TIMED || schedule > SIM_DELAYED)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    sim.schedule = schedule;
    sim.seed = sim.random = seed;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simGetSchedule(int *schedule, uint64_t *seed) {
    if (!schedule || !seed)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    *schedule = sim.schedule;
    *seed = sim.seed;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simSwitch(int which, int on) {
    if (which < SIM_RACES || which > SIM_CONCURRENT_KERNELS)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    sim.switches[which] = !!on;
    if (which == SIM_RACES && !on)
        sim__access_forget(0, UINTPTR_MAX); /* a history with holes would accuse the innocent */
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simSubmitsLate(int *late) {
    sim_os_lock(&sim.lock);
    sim__boot();
    *late = sim.switches[SIM_LATE_SUBMISSION];
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simPatience(unsigned int milliseconds) {
    sim_os_lock(&sim.lock);
    sim__boot();
    sim.patience_ms = milliseconds;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simHold(OOCUstream handle, int on) {
    sim_os_lock(&sim.lock);
    sim__boot();
    struct sim_stream *stream = sim__stream(handle);
    if (stream)
        sim__hold(stream, on);
    sim_os_broadcast(&sim.changed);
    sim_os_unlock(&sim.lock);
    return stream ? OOCU_SUCCESS : OOCU_ERROR_INVALID_HANDLE;
}

/* ---- observation ---- */

OOCUresult simIdle(OOCUstream handle, int *idle) {
    sim_os_lock(&sim.lock);
    sim__boot();
    const struct sim_stream *stream = sim__stream(handle);
    if (stream && idle)
        *idle = !stream->tail;
    sim_os_unlock(&sim.lock);
    return stream ? OOCU_SUCCESS : OOCU_ERROR_INVALID_HANDLE;
}

OOCUresult simCapturing(OOCUstream handle, int *capturing) {
    sim_os_lock(&sim.lock);
    sim__boot();
    const struct sim_stream *stream = sim__stream(handle);
    if (stream && capturing)
        *capturing = stream->capture != SIM_CAPTURE_NONE;
    sim_os_unlock(&sim.lock);
    return stream ? OOCU_SUCCESS : OOCU_ERROR_INVALID_HANDLE;
}

OOCUresult simGetStats(struct sim_stats *out) {
    if (!out)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    *out = sim.stats;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simGetLive(struct sim_live *out) {
    if (!out)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    *out = sim.live;
    out->queued = sim.n_queued;
    out->history = sim__race_nodes();
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

double simNow(void) {
    sim_os_lock(&sim.lock);
    double now_s = sim.now_s;
    sim_os_unlock(&sim.lock);
    return now_s;
}

OOCUresult simClock(double *seconds) {
    if (!seconds)
        return OOCU_ERROR_INVALID_VALUE;
    *seconds = simNow();
    return OOCU_SUCCESS;
}

OOCUresult simAdvance(double seconds) {
    if (!(seconds >= 0) || isinf(seconds))
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    sim__time_to(sim.now_s + seconds);
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simFinish(double *seconds) {
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = OOCU_SUCCESS;
    for (int device = 0; device < SIM_MAX_DEVICES && result == OOCU_SUCCESS; device++)
        result = sim__wait_all(device);
    if (seconds)
        *seconds = sim.now_s;
    sim_os_unlock(&sim.lock);
    return result;
}

void sim__trace_row(const struct sim_trace_row *row) {
    if (!sim.switches[SIM_TRACE_ON] || n_trace >= MAX_TRACE)
        return;
    trace_rows = sim__grow(trace_rows, &trace_capacity, n_trace + 1, sizeof *trace_rows);
    trace_rows[n_trace++] = *row;
}

void sim__trace(const struct sim_op *op) {
    static const int kinds[] = {SIM_H2D, SIM_D2H, SIM_KERNEL, SIM_MEMSET, SIM_HOSTFN};
    if (op->kind > OP_HOSTFN)
        return;
    const void *device = op->kind == OP_D2H ? op->src : op->dst;
    sim__trace_row(&(struct sim_trace_row){.kind = kinds[op->kind],
                                           .stream = op->stream->handle,
                                           .start_s = op->start_s,
                                           .end_s = op->end_s,
                                           .bytes = op->bytes,
                                           .device_ptr = (OOCUdeviceptr)device});
}

uint64_t simTraceCount(void) {
    sim_os_lock(&sim.lock);
    uint64_t count = n_trace;
    sim_os_unlock(&sim.lock);
    return count;
}

OOCUresult simTraceRow(uint64_t index, struct sim_trace_row *out) {
    sim_os_lock(&sim.lock);
    OOCUresult result = out && index < n_trace ? OOCU_SUCCESS : OOCU_ERROR_INVALID_VALUE;
    if (result == OOCU_SUCCESS)
        *out = trace_rows[index];
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simTraceClear(void) {
    sim_os_lock(&sim.lock);
    n_trace = 0;
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

OOCUresult simReset(void) {
    sim_os_lock(&sim.lock);
    sim__boot();
    const struct sim_live *live = &sim.live;
    OOCUresult result = OOCU_SUCCESS;
    if (live->streams || live->events || live->contexts || live->modules || live->registrations ||
        live->host_alloc_bytes || live->device_bytes || live->adopted_bytes)
        result = OOCU_ERROR_ILLEGAL_STATE;
    if (result == OOCU_SUCCESS)
        sim__fault_reset();
    /* Default streams and destroyed ones may still have work. */
    for (int device = 0; device < SIM_MAX_DEVICES && result == OOCU_SUCCESS; device++)
        result = sim__wait_all(device);
    if (result == OOCU_SUCCESS) {
        for (struct sim_stream *s = sim.streams, *next; s; s = next) {
            next = s->next;
            sim__stream_destroy(s);
        }
        sim__race_reset();
        sim__memory_reset();
        for (int device = 0; device < SIM_MAX_DEVICES; device++)
            sim__clock_free(&sim.gone[device]);
        clear_reports();
        n_trace = 0;
        memset(&sim.stats, 0, sizeof sim.stats);
        sim.live.device_peak_bytes = 0;
        sim.call = 0;
        sim.streams_made = 0;
        sim__clock_reset();
        defaults();
    }
    sim_os_unlock(&sim.lock);
    return result;
}
