/* Reads of files in virtual time: threads block until the clock is where their reads end, and it
 * goes from one such moment to the next. Checked against arithmetic done by hand. */
#include "sim_test.h"

#include <math.h>

enum { BYTES = 2000000, THREADS = 4 };

static void near(double value, double expected, const char *what) {
    CHECK(fabs(value - expected) < 1e-9, "%s: %.12g s, expected %.12g s", what, value, expected);
}

/* Copies of n bytes take 10 us + n / 1e9 s, reads 1 ms, several at a time, and n / 2e9 s. */
static void begin(double disk_gbps) {
    struct sim_device device;
    OK(cu.simReset());
    OK(cu.simPreset("rtx4090", &device));
    device.link_gbps = 1;
    device.copy_latency_s = 10e-6;
    device.disk_gbps = disk_gbps;
    device.disk_latency_s = 1e-3;
    OK(cu.simSetDevice(0, &device));
    sim_test_begin(SIM_TIMED, 0);
}

static void end(void) {
    struct sim_device device;
    sim_test_end();
    OK(cu.simPreset("rtx4090", &device));
    OK(cu.simSetDevice(0, &device));
}

/* Until so many are blocked; a thread takes its time to get there. */
static void await_readers(unsigned expected) {
    unsigned blocked = 0;
    while (blocked < expected)
        OK(cu.simReaders(expected, &blocked));
    CHECK(blocked == expected, "%u threads are blocked, not %u", blocked, expected);
}

struct job {
    int reads;           /* so often */
    OOCUevent for_event; /* or waits for it */
    int wanted, failed;
    double ended_s[THREADS]; /* on the host's clock */
};

/* CHECK counts, and only for one thread. */
static void work(void *argument) {
    struct job *job = argument;
    job->failed = cu.cuCtxPushCurrent(sim_context);
    if (job->for_event) {
        job->failed |= cu.simAwait(job->for_event);
        job->ended_s[0] = cu.simNow();
    }
    for (int i = 0; i < job->reads; i++) {
        job->failed |= cu.simRead(BYTES, &job->wanted);
        job->ended_s[i] = cu.simNow();
    }
    job->failed |= cu.cuCtxPopCurrent(NULL);
}

static void join(struct oo_thread *thread, const struct job *job) {
    oo__thread_join(thread);
    CHECK(!job->failed, "a call of the thread failed");
}

/* Latencies of reads pass side by side, their bytes come one after the other: from 1 ms on each
 * takes 1 ms. */
CASE(reads_share_a_disk) {
    begin(2);
    struct job jobs[THREADS] = {{0}};
    struct oo_thread *threads[THREADS];
    double sum = 0;
    const double start_s = cu.simNow();
    for (int i = 0; i < THREADS; i++) {
        jobs[i].reads = 1;
        threads[i] = oo__thread_start(work, &jobs[i]);
    }
    for (unsigned left = THREADS; left; left--) {
        await_readers(left);
        OK(cu.simPass());
        near(cu.simNow() - start_s, 1e-3 + (THREADS + 1 - left) * 1e-3, "a read ends");
    }
    for (int i = 0; i < THREADS; i++) {
        join(threads[i], &jobs[i]);
        sum += jobs[i].ended_s[0] - start_s;
        CHECK(jobs[i].wanted, "the bytes are not wanted");
    }
    CHECK(sum >= 14e-3 - 1e-9, "one went on before its read had ended: %.12g", sum);
    end();
}

/* A thread that reads and reads again pays the latency each time: 2 ms, 4 ms, 6 ms. */
CASE(one_thread_pays_each_latency) {
    begin(2);
    struct job job = {.reads = 3};
    const double start_s = cu.simNow();
    struct oo_thread *thread = oo__thread_start(work, &job);
    for (int i = 0; i < 3; i++) {
        await_readers(1);
        OK(cu.simPass());
    }
    join(thread, &job);
    for (int i = 0; i < 3; i++)
        near(job.ended_s[i] - start_s, 2e-3 * (i + 1), "its read");
    end();
}

/* A copy of 2e6 bytes takes 2.01 ms, and a read that began with it 2 ms: a thread that waits for
 * the copy goes on after it, and the host's clock is nowhere else meanwhile. */
CASE(a_thread_waits_for_a_copy) {
    begin(2);
    OOCUstream h2d = new_stream();
    OOCUevent arrived = new_event(), never = new_event();
    OOCUdeviceptr slot = device_bytes(BYTES);
    char *master = host_bytes(BYTES);
    const double start_s = cu.simNow();
    OK(cu.simAwait(never)); /* nothing was recorded */
    OK(cu.cuMemcpyHtoDAsync(slot, master, BYTES, h2d));
    OK(cu.cuEventRecord(arrived, h2d));
    struct job jobs[2] = {{.for_event = arrived}, {.reads = 1}};
    struct oo_thread *threads[2];
    for (int i = 0; i < 2; i++)
        threads[i] = oo__thread_start(work, &jobs[i]);
    await_readers(2);
    near(cu.simNow() - start_s, 0, "blocked threads move no clock");
    OK(cu.simPass());
    near(cu.simNow() - start_s, 2e-3, "the read ends first");
    await_readers(1);
    OK(cu.simPass());
    near(cu.simNow() - start_s, 2.01e-3, "then the copy");
    for (int i = 0; i < 2; i++)
        join(threads[i], &jobs[i]);
    /* The thread that waited has seen the end of the copy, so that its memory may go. */
    OK(cu.cuMemFreeHost(master));
    OK(cu.cuMemFree(slot));
    OK(cu.cuEventDestroy(arrived));
    OK(cu.cuEventDestroy(never));
    OK(cu.cuStreamDestroy(h2d));
    CHECK(cu.simReportCount() == 0, "%llu reports", (unsigned long long)cu.simReportCount());
    end();
}

/* What moves the clock past a read lets its thread go on. */
CASE(other_waits_pass_reads) {
    begin(2);
    struct job job = {.reads = 1};
    struct oo_thread *thread = oo__thread_start(work, &job);
    await_readers(1);
    OK(cu.simAdvance(1.0));
    join(thread, &job);
    unsigned blocked = 1;
    OK(cu.simReaders(0, &blocked));
    CHECK(!blocked, "%u threads are blocked", blocked);
    end();
}

/* Where no device has a disk, reads take no time, and no one waits in virtual time. */
CASE(without_a_disk_nothing_waits) {
    begin(0);
    int wanted = 0;
    unsigned blocked;
    OOCUevent event = new_event();
    const double start_s = cu.simNow();
    OK(cu.simRead(BYTES, &wanted));
    CHECK(wanted && cu.simNow() - start_s <= 0, "it waited until %g", cu.simNow());
    IS(OOCU_ERROR_NOT_SUPPORTED, cu.simAwait(event));
    IS(OOCU_ERROR_NOT_SUPPORTED, cu.simReaders(1, &blocked));
    IS(OOCU_ERROR_NOT_SUPPORTED, cu.simPass());
    OK(cu.cuEventDestroy(event));
    struct sim_device device;
    OK(cu.simPreset("rtx4090", &device));
    device.disk_gbps = -1;
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSetDevice(1, &device));
    end();
}

/* Copies that move no byte need none. */
CASE(bytes_are_not_wanted_where_copies_move_none) {
    begin(2);
    OK(cu.simSwitch(SIM_COPY_NOTHING, 1));
    struct job job = {.reads = 1, .wanted = 1};
    struct oo_thread *thread = oo__thread_start(work, &job);
    await_readers(1);
    OK(cu.simPass());
    join(thread, &job);
    CHECK(!job.wanted, "they are wanted");
    OK(cu.simSwitch(SIM_COPY_NOTHING, 0));
    end();
}

CHECK_MAIN(sim_test_open)
