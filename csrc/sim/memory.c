/* memory.c - which bytes are what: page-locked, device, adopted; capacity, labels, poison.
 *
 * Ranges are disjoint and sorted by address. A range remembers the last copy of each stream that
 * touched it, and page-locked memory the last kernel, so that whether it may go away follows from
 * the calls, not from what has run. */
#include "sim_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xFF, ALIGNMENT = 512 };

struct label {
    uintptr_t lo, hi;
    char text[48];
};

static struct sim_range **ranges;
static size_t n_ranges, ranges_capacity;
static struct label *labels;
static size_t n_labels, labels_capacity;

void sim__poison(void *ptr, size_t bytes) {
    if (sim.switches[SIM_POISON])
        memset(ptr, POISON, bytes);
}

/* Index of the first range that ends above `address`. */
static size_t first_over(uintptr_t address) {
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges[middle]->hi <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct sim_range *sim__range_at(uintptr_t address) {
    size_t i = first_over(address);
    return i < n_ranges && ranges[i]->lo <= address ? ranges[i] : NULL;
}

static int is_device(const struct sim_range *range) {
    return range->kind == MEM_DEVICE || range->kind == MEM_ADOPTED;
}

/* Two pieces that were mapped side by side (cuMemMap, tests/cuda): one memory to its users. */
static int touch(const struct sim_range *range, const struct sim_range *next) {
    return range->kind == MEM_DEVICE && next->kind == MEM_DEVICE && !range->block && !next->block &&
           range->device == next->device && range->hi == next->lo;
}

enum sim_place sim__place(uintptr_t lo, size_t bytes, struct sim_range **range) {
    *range = NULL;
    if (!lo || lo > UINTPTR_MAX - bytes)
        return PLACE_INVALID;
    size_t i = first_over(lo);
    if (i == n_ranges || ranges[i]->lo >= lo + bytes)
        return PLACE_PAGEABLE;
    if (ranges[i]->lo > lo)
        return PLACE_INVALID; /* partly known */
    for (size_t last = i; ranges[last]->hi < lo + bytes; last++)
        if (last + 1 == n_ranges || !touch(ranges[last], ranges[last + 1]))
            return PLACE_INVALID; /* over two ranges */
    *range = ranges[i];
    return is_device(ranges[i]) ? PLACE_DEVICE : PLACE_PINNED;
}

void sim__copy_uses(struct sim_range *range, uintptr_t hi, uint32_t actor, uint64_t epoch) {
    for (size_t i = range ? first_over(range->lo) : n_ranges; i < n_ranges && ranges[i]->lo < hi;
         i++)
        sim__clock_set(&ranges[i]->copies, actor, epoch);
}

static void account(const struct sim_range *range, int add) {
    uint64_t bytes = range->hi - range->lo;
    uint64_t *total = range->kind == MEM_REGISTERED   ? &sim.live.registered_bytes
                      : range->kind == MEM_HOST_ALLOC ? &sim.live.host_alloc_bytes
                      : range->kind == MEM_DEVICE     ? &sim.live.device_bytes
                                                      : &sim.live.adopted_bytes;
    *total = add ? *total + bytes : *total - bytes;
    if (range->kind == MEM_REGISTERED)
        sim.live.registrations += add ? 1 : (uint64_t)-1;
    if (is_device(range)) {
        uint64_t *used = &sim.device_used[range->device];
        *used = add ? *used + bytes : *used - bytes;
        uint64_t now = sim.live.device_bytes + sim.live.adopted_bytes;
        if (now > sim.live.device_peak_bytes)
            sim.live.device_peak_bytes = now;
    }
}

OOCUresult sim__range_add(uintptr_t lo, size_t bytes, enum sim_memory kind, int device,
                          unsigned int flags, void *block) {
    if (!lo || !bytes || lo > UINTPTR_MAX - bytes)
        return OOCU_ERROR_INVALID_VALUE;
    size_t i = first_over(lo);
    if (i < n_ranges && ranges[i]->lo < lo + bytes)
        return kind == MEM_REGISTERED && !is_device(ranges[i])
                   ? OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                   : OOCU_ERROR_INVALID_VALUE;
    if ((kind == MEM_DEVICE || kind == MEM_ADOPTED) &&
        (double)sim.device_used[device] + (double)bytes > sim.devices[device].memory_bytes)
        return OOCU_ERROR_OUT_OF_MEMORY;
    if ((kind == MEM_REGISTERED || kind == MEM_HOST_ALLOC) && !sim__may_lock(bytes))
        return OOCU_ERROR_OUT_OF_MEMORY;
    struct sim_range *range = calloc(1, sizeof *range);
    if (!range)
        return OOCU_ERROR_OUT_OF_MEMORY;
    range->lo = lo;
    range->hi = lo + bytes;
    range->kind = kind;
    range->device = device;
    range->flags = flags;
    range->block = block;
    ranges = sim__grow(ranges, &ranges_capacity, n_ranges + 1, sizeof *ranges);
    memmove(ranges + i + 1, ranges + i, (n_ranges - i) * sizeof *ranges);
    ranges[i] = range;
    n_ranges++;
    account(range, 1);
    return OOCU_SUCCESS;
}

static size_t first_label_over(uintptr_t address) {
    size_t low = 0, high = n_labels;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (labels[middle].hi <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Remove the labels that overlap [lo, hi); returns the index where one for it belongs. */
static size_t erase_labels(uintptr_t lo, uintptr_t hi) {
    size_t i = first_label_over(lo), end = i;
    while (end < n_labels && labels[end].lo < hi)
        end++;
    if (end > i) { /* at first there is no array to move in */
        memmove(labels + i, labels + end, (n_labels - end) * sizeof *labels);
        n_labels -= end - i;
    }
    return i;
}

static void forget(struct sim_range *range) {
    size_t i = first_over(range->lo);
    memmove(ranges + i, ranges + i + 1, (n_ranges - i - 1) * sizeof *ranges);
    n_ranges--;
    account(range, 0);
    sim__access_forget(range->lo, range->hi);
    erase_labels(range->lo, range->hi);
    const int kept = range->kind == MEM_ADOPTED && range->flags & OOSIM_ADOPT_KEEP;
    if ((is_device(range) && !kept) || range->kind == MEM_HOST_ALLOC)
        sim__poison((void *)range->lo, range->hi - range->lo);
    free(range->block);
    sim__clock_free(&range->copies);
    free(range);
}

OOCUresult sim__range_remove(struct sim_range *range, const char *call) {
    const struct sim_clock *host = sim__host_clock();
    const int in_stream = range->kind == MEM_ADOPTED && range->flags & OOSIM_ADOPT_IN_STREAM;
    for (uint32_t actor = 0; !in_stream && actor < range->copies.width; actor++) {
        if (range->copies.at[actor] <= sim__clock_at(host, actor))
            continue;
        /* The caller may well free the bytes after this error: nothing may touch them any more. */
        sim__run_touching(range->lo, range->hi);
        char text[160], seed[96];
        sim__describe(range->lo, range->hi, text, sizeof text);
        sim__seed_text(seed, sizeof seed);
        sim__report(range->lo * 31 + actor,
                    "in flight: %s (call #%" PRIu64
                    ") on %s while a copy or kernel on stream \"%s\" may still "
                    "use it\n  missing edge: the host has not waited for an event recorded on that "
                    "stream after it\n  schedule: %s",
                    call, sim.call, text, sim.actors[actor].name, seed);
        return OOCU_ERROR_ILLEGAL_STATE;
    }
    struct sim_stream *lender = sim__handle_get(OBJECT_STREAM, range->lender);
    if (lender)
        sim__stream_writes(lender, SIM_BY_LENDER, range->lo, range->hi);
    sim__run_touching(range->lo, range->hi); /* of kernels, memsets and ordered copies the data */
    forget(range);
    return OOCU_SUCCESS;
}

OOCUresult sim__allocate(enum sim_memory kind, size_t bytes, int device, unsigned int flags,
                         void **out) {
    if (!bytes || bytes > SIZE_MAX / 2)
        return bytes ? OOCU_ERROR_OUT_OF_MEMORY : OOCU_ERROR_INVALID_VALUE;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (kind == MEM_DEVICE &&
        (double)sim.device_used[device] + (double)rounded > sim.devices[device].memory_bytes)
        return OOCU_ERROR_OUT_OF_MEMORY;
    /* Page-locked memory begins at a page, as the real one does. */
    size_t align = kind == MEM_HOST_ALLOC ? 4096 : ALIGNMENT;
    void *block = malloc(rounded + align);
    if (!block)
        return OOCU_ERROR_OUT_OF_MEMORY;
    // cppcheck-suppress uninitdata ; the address is read, not the bytes
    uintptr_t lo = ((uintptr_t)block + align - 1) / align * align;
    OOCUresult result =
        sim__range_add(lo, kind == MEM_DEVICE ? rounded : bytes, kind, device, flags, block);
    if (result != OOCU_SUCCESS) {
        free(block);
        return result;
    }
    sim__poison((void *)lo, bytes);
    *out = (void *)lo;
    return OOCU_SUCCESS;
}

/* The end of a context frees its memory and ends its registrations; adopted memory is torch's. */
void sim__memory_end_context(int device) {
    for (size_t i = n_ranges; i-- > 0;)
        if (ranges[i]->device == device && ranges[i]->kind != MEM_ADOPTED)
            forget(ranges[i]);
}

/* ---- labels ---- */

void sim__describe(uintptr_t lo, uintptr_t hi, char *text, size_t capacity) {
    size_t i = first_label_over(lo);
    if (i < n_labels && labels[i].lo <= lo && hi <= labels[i].hi)
        snprintf(text, capacity,
                 "bytes %" PRIuPTR "..%" PRIuPTR " of \"%s\" [0x%" PRIxPTR ", +%" PRIuPTR ")",
                 lo - labels[i].lo, hi - labels[i].lo, labels[i].text, lo, hi - lo);
    else if (i < n_labels && labels[i].lo < hi)
        snprintf(text, capacity, "[0x%" PRIxPTR ", +%" PRIuPTR "), which meets \"%s\"", lo, hi - lo,
                 labels[i].text);
    else
        snprintf(text, capacity, "[0x%" PRIxPTR ", +%" PRIuPTR ")", lo, hi - lo);
}

OOCUresult simLabelRange(const void *ptr, size_t bytes, const char *label) {
    uintptr_t lo = (uintptr_t)ptr, hi = lo + bytes;
    if (!ptr || !bytes || !label || hi < lo)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    size_t i = erase_labels(lo, hi); /* a new label takes the place of all that it overlaps */
    labels = sim__grow(labels, &labels_capacity, n_labels + 1, sizeof *labels);
    memmove(labels + i + 1, labels + i, (n_labels - i) * sizeof *labels);
    n_labels++;
    labels[i].lo = lo;
    labels[i].hi = hi;
    snprintf(labels[i].text, sizeof labels[i].text, "%s", label);
    sim_os_unlock(&sim.lock);
    return OOCU_SUCCESS;
}

void sim__memory_reset(void) { n_labels = 0; }

/* ---- how torch meets the simulator ---- */

OOCUresult simAdopt(OOCUdeviceptr ptr, size_t bytes, unsigned int flags, OOCUstream handle) {
    SIM_ENTER(CALL_simAdopt);
    struct sim_stream *lender = sim__stream(handle);
    if (flags & ~(unsigned)(OOSIM_ADOPT_KEEP | OOSIM_ADOPT_IN_STREAM))
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    if (!lender)
        SIM_RETURN(OOCU_ERROR_INVALID_HANDLE);
    result = sim__range_add(ptr, bytes, MEM_ADOPTED, lender->device, flags, NULL);
    if (result != OOCU_SUCCESS)
        goto out;
    sim__range_at(ptr)->lender = lender->handle;
    sim__stream_writes(lender, SIM_BY_LENDER, ptr, ptr + bytes);
    if (!(flags & OOSIM_ADOPT_KEEP))
        sim__poison((void *)ptr, bytes);
    SIM_LEAVE;
}

OOCUresult simDrop(OOCUdeviceptr ptr) {
    SIM_ENTER(CALL_simDrop);
    struct sim_range *range = sim__range_at(ptr);
    if (!range || range->kind != MEM_ADOPTED || range->lo != ptr)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    result = sim__range_remove(range, "simDrop");
    SIM_LEAVE;
}

OOCUresult simHostAccess(const void *ptr, size_t bytes, int is_write) {
    SIM_ENTER(CALL_simHostAccess);
    uintptr_t lo = (uintptr_t)ptr;
    if ((!ptr && bytes) || lo > UINTPTR_MAX - bytes)
        SIM_RETURN(OOCU_ERROR_INVALID_VALUE);
    /* A host function is ordered as its stream is, not as the host: its accesses are not judged. */
    if (!sim__in_host_function())
        sim__host_access(SIM_BY_HOST, is_write, lo, lo + bytes);
    SIM_LEAVE;
}
