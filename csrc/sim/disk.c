/* disk.c - reads of files in virtual time. The threads that read are real. Each blocks until the
 * host's clock is where its read ends, or the operation that it waits for; a thread that waits for
 * them moves the clock, from one such moment to the next, once all of them are blocked. So what
 * they queue in between is queued at its time, whenever their turns come on the machine's clock. */
#include "sim_internal.h"

#include <math.h>

/* A thread that is blocked: on its stack. */
struct reader {
    double end_s;      /* of its read; infinite: it waits for */
    struct sim_op *op; /* this one */
    int goes_on;
    struct reader *next;
};

static struct reader *readers;
static unsigned n_readers;
static double free_s[SIM_MAX_DEVICES]; /* when each disk has read all that it was asked for */

static int is_declared(void) {
    for (int i = 0; i < sim.n_devices; i++)
        if (sim.devices[i].disk_gbps > 0)
            return 1;
    return 0;
}

static int is_over(const struct reader *reader) {
    return reader->op ? reader->op->ended && reader->op->end_s <= sim.now_s
                      : reader->end_s <= sim.now_s;
}

void sim__readers_wake(void) {
    int any = 0;
    for (struct reader **at = &readers; *at;) {
        struct reader *reader = *at;
        if (!is_over(reader)) {
            at = &reader->next;
            continue;
        }
        *at = reader->next;
        reader->goes_on = any = 1;
        n_readers--;
    }
    if (any)
        sim_os_broadcast(&sim.changed);
}

void sim__disk_reset(void) {
    for (int i = 0; i < SIM_MAX_DEVICES; i++)
        free_s[i] = 0;
}

static void block(struct reader *reader) {
    if (is_over(reader))
        return;
    reader->next = readers;
    readers = reader;
    n_readers++;
    sim_os_broadcast(&sim.changed);
    while (!reader->goes_on)
        (void)sim_os_wait(&sim.changed, &sim.lock, 1000);
}

OOCUresult simRead(size_t bytes, int *wanted) {
    int device = 0;
    if (!wanted)
        return OOCU_ERROR_INVALID_VALUE;
    *wanted = 1;
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = sim__current_device(&device);
    const struct sim_device *d = &sim.devices[device];
    if (result == OOCU_SUCCESS && d->disk_gbps > 0) {
        const double first_s = sim.now_s + d->disk_latency_s;
        const double begin_s = free_s[device] > first_s ? free_s[device] : first_s;
        struct reader reader = {.end_s = begin_s + (double)bytes / (d->disk_gbps * 1e9)};
        free_s[device] = reader.end_s;
        sim__trace_row(&(struct sim_trace_row){
            .kind = SIM_READ, .start_s = begin_s, .end_s = reader.end_s, .bytes = bytes});
        *wanted = !sim.switches[SIM_COPY_NOTHING];
        block(&reader);
    }
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simAwait(OOCUevent handle) {
    struct sim_clock known = {0};
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = OOCU_SUCCESS;
    struct sim_event *event = sim__event(handle);
    if (!is_declared()) {
        result = OOCU_ERROR_NOT_SUPPORTED;
    } else if (!event) {
        result = OOCU_ERROR_INVALID_HANDLE;
    } else if (event->recorded) {
        struct reader reader = {.end_s = INFINITY, .op = event->op};
        sim__clock_assign(&known, &event->clock);
        sim__op_ref(reader.op);
        sim__flush(reader.op);
        block(&reader);
        result = sim__wait(reader.op); /* which has ended: at most it is executed now */
        if (result == OOCU_SUCCESS)
            sim__clock_join(sim__host_clock(), &known);
        sim__op_unref(reader.op);
    }
    sim__clock_free(&known);
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simReaders(unsigned expected, unsigned *blocked) {
    if (!blocked)
        return OOCU_ERROR_INVALID_VALUE;
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = is_declared() ? OOCU_SUCCESS : OOCU_ERROR_NOT_SUPPORTED;
    int late = 0;
    while (result == OOCU_SUCCESS && n_readers < expected && !late)
        late = sim_os_wait(&sim.changed, &sim.lock, 1);
    *blocked = n_readers;
    sim_os_unlock(&sim.lock);
    return result;
}

OOCUresult simPass(void) {
    sim_os_lock(&sim.lock);
    sim__boot();
    OOCUresult result = is_declared() ? OOCU_SUCCESS : OOCU_ERROR_NOT_SUPPORTED;
    const unsigned before = n_readers;
    if (result == OOCU_SUCCESS)
        sim__time_to(sim.now_s); /* what begins now, and so ends at a moment to come */
    while (result == OOCU_SUCCESS && n_readers && n_readers == before) {
        double first_s = INFINITY;
        for (const struct reader *reader = readers; reader; reader = reader->next)
            if (!reader->op && reader->end_s < first_s)
                first_s = reader->end_s;
        if (!sim__time_towards(first_s))
            result = OOCU_ERROR_UNKNOWN; /* nothing is left that could end */
    }
    sim_os_unlock(&sim.lock);
    return result;
}
