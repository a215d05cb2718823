/* Virtual time: checked against arithmetic done by hand, and the same whatever runs when. */
#include "sim_test.h"

#include <math.h>

static void near(double value, double expected, const char *what) {
    CHECK(fabs(value - expected) < 1e-9, "%s: %.12g s, expected %.12g s", what, value, expected);
}

/* A device with round numbers: a copy of n bytes takes 10 us + n / 1e9 s. */
static void round_device(void) {
    struct sim_device device;
    OK(cu.simPreset("rtx4090", &device));
    device.link_gbps = 1;
    device.copy_latency_s = 10e-6;
    OK(cu.simSetDevice(0, &device));
}

static double elapsed_s(OOCUevent from, OOCUevent to) {
    float ms = -1;
    OK(cu.cuEventElapsedTime(&ms, from, to));
    return (double)ms * 1e-3;
}

/* Two layers: copy 0, then copy 1 under kernel 0, then kernel 1 once copy 1 has arrived.
 *   copy 0    0.000010 + 1e6 B / 1e9    ends 1.010 ms
 *   kernel 0  after copy 0, 0.5 ms      ends 1.510 ms
 *   copy 1    after copy 0, 1.010 ms    ends 2.020 ms
 *   kernel 1  after both, 0.5 ms        ends 2.520 ms */
static void two_layer_step(int schedule) {
    enum { BYTES = 1000000 };
    OK(cu.simReset());
    round_device();
    sim_test_begin(schedule, 7);
    const double start_s = cu.simNow();
    OOCUstream h2d = new_stream(), compute = new_stream();
    OOCUevent ready[2], done[2], begin = new_event();
    OOCUdeviceptr slot = device_bytes(2 * BYTES);
    char *master = host_bytes(2 * BYTES);
    OK(cu.cuEventRecord(begin, compute));
    for (unsigned i = 0; i < 2; i++) {
        ready[i] = new_event();
        done[i] = new_event();
        OK(cu.cuMemcpyHtoDAsync(slot + i * BYTES, master + i * BYTES, BYTES, h2d));
        OK(cu.cuEventRecord(ready[i], h2d));
    }
    for (unsigned i = 0; i < 2; i++) {
        OOSimRange range = {slot + i * BYTES, BYTES};
        OK(cu.cuStreamWaitEvent(compute, ready[i], 0));
        OK(cu.simLaunch(compute, &range, 1, NULL, 0, 0.5e-3));
        OK(cu.cuEventRecord(done[i], compute));
    }
    near(cu.simNow(), start_s, "queueing and launching is no host wait");
    OK(cu.cuEventSynchronize(ready[0]));
    near(cu.simNow() - start_s, 1.010e-3, "copy 0");
    OK(cu.cuEventSynchronize(done[0]));
    near(cu.simNow() - start_s, 1.510e-3, "kernel 0");
    OK(cu.cuEventSynchronize(done[1]));
    near(cu.simNow() - start_s, 2.520e-3, "kernel 1");
    OK(cu.cuEventSynchronize(ready[1]));
    near(cu.simNow() - start_s, 2.520e-3, "waiting for what is past takes no time");
    CHECK(fabs(elapsed_s(begin, ready[1]) - 2.020e-3) < 1e-8, "copy 1 by events: %g",
          elapsed_s(begin, ready[1]));
    struct sim_stats stats;
    OK(cu.simGetStats(&stats));
    near(stats.h2d_busy_s, 2.020e-3, "busy copies");
    near(stats.compute_busy_s, 1.0e-3, "busy kernels");
    CHECK(stats.h2d_bytes == 2 * BYTES && stats.h2d_copies == 2 && stats.kernels == 2 &&
              stats.host_waits == 4,
          "%llu bytes, %llu copies, %llu kernels, %llu waits", (unsigned long long)stats.h2d_bytes,
          (unsigned long long)stats.h2d_copies, (unsigned long long)stats.kernels,
          (unsigned long long)stats.host_waits);
    CHECK(cu.simReportCount() == 0, "%s: a correct step was accused", schedule_names[schedule]);
    print_reports();
    sim_test_end();
}

/* One engine per direction, served in the order copies become ready, not in the order of calls. */
CASE(engines_are_shared_in_ready_order) {
    round_device();
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream a = new_stream(), b = new_stream(), c = new_stream(), d2h = new_stream();
    OOCUevent end_a = new_event(), end_b = new_event(), end_c = new_event(), end_d = new_event();
    OOCUdeviceptr device = device_bytes(4000);
    char *host = host_bytes(4000);
    const double t0 = cu.simNow();
    /* a: a kernel of 5 ms, then a copy: ready at 5 ms. b and c: ready at once, served before it. */
    OK(cu.simLaunch(a, NULL, 0, NULL, 0, 5e-3));
    OK(cu.cuMemcpyHtoDAsync(device, host, 1000, a));
    OK(cu.cuEventRecord(end_a, a));
    OK(cu.simLaunch(a, NULL, 0, NULL, 0, 0)); /* runs the copy's data now; its time must not move */
    OK(cu.cuMemcpyHtoDAsync(device + 1000, host + 1000, 1000, b));
    OK(cu.cuEventRecord(end_b, b));
    OK(cu.cuMemcpyHtoDAsync(device + 2000, host + 2000, 1000, c));
    OK(cu.cuEventRecord(end_c, c));
    OK(cu.cuMemcpyDtoHAsync(host + 3000, device + 3000, 1000, d2h));
    OK(cu.cuEventRecord(end_d, d2h));
    OK(cu.cuEventSynchronize(end_d));
    near(cu.simNow() - t0, 11e-6, "the other direction has its own engine");
    OK(cu.cuEventSynchronize(end_b));
    near(cu.simNow() - t0, 11e-6, "first on the engine");
    OK(cu.cuEventSynchronize(end_c));
    near(cu.simNow() - t0, 22e-6, "second on the engine");
    OK(cu.cuEventSynchronize(end_a));
    near(cu.simNow() - t0, 5e-3 + 11e-6, "ready last, served last");
    sim_test_end();
}

CASE(queries_follow_the_clock) {
    round_device();
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream();
    OOCUevent event = new_event(), start = new_event();
    float ms;
    OK(cu.cuEventQuery(event)); /* never recorded: complete */
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventElapsedTime(&ms, start, event));
    OK(cu.cuEventRecord(start, stream));
    OK(cu.simLaunch(stream, NULL, 0, NULL, 0, 10e-6));
    OK(cu.cuEventRecord(event, stream));
    IS(OOCU_ERROR_NOT_READY, cu.cuEventElapsedTime(&ms, start, event));
    int polls = 1;
    while (cu.cuEventQuery(event) == OOCU_ERROR_NOT_READY && polls < 100)
        polls++;
    CHECK(polls == 10, "a kernel of 10 us took %d polls of 1 us", polls);
    near(cu.simNow(), 10e-6, "after polling");
    OK(cu.cuStreamQuery(stream));
    CHECK(fabs(elapsed_s(start, event) - 10e-6) < 1e-10, "%g s", elapsed_s(start, event));
    OK(cu.simLaunch(stream, NULL, 0, NULL, 0, 1e-3));
    OK(cu.cuEventRecord(event, stream));
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(stream));
    OK(cu.simAdvance(1e-3));
    OK(cu.cuEventQuery(event));
    sim_test_end();
}

CASE(polling_ends_on_every_schedule) {
    for (int schedule = SIM_TIMED; schedule <= SIM_EAGER; schedule++) {
        sim_test_begin(schedule, 3);
        OOCUstream stream = new_stream();
        OOCUdeviceptr device = device_bytes(1 << 20);
        char *host = host_bytes(1 << 20);
        memset(host, 5, 1 << 20);
        OK(cu.cuMemcpyHtoDAsync(device, host, 1 << 20, stream));
        int polls = 0;
        while (cu.cuStreamQuery(stream) == OOCU_ERROR_NOT_READY && polls < 5000)
            polls++;
        CHECK(polls < 5000, "%s never became ready", schedule_names[schedule]);
        CHECK(*(char *)device == 5, "%s: ready, but not there", schedule_names[schedule]);
        sim_test_end();
    }
}

/* The same calls under every schedule and with launches in between: the same virtual times. */
static double random_program(int schedule, uint64_t seed, double *sum) {
    enum { STREAMS = 4, EVENTS = 6, OPS = 400, BYTES = 4096 };
    sim_test_begin(schedule, seed * 31 + 1);
    OK(cu.simSwitch(SIM_RACES, 0));
    OOCUstream streams[STREAMS];
    OOCUevent events[EVENTS];
    for (int i = 0; i < STREAMS; i++)
        streams[i] = new_stream();
    for (int i = 0; i < EVENTS; i++)
        events[i] = new_event();
    OOCUdeviceptr device = device_bytes(BYTES);
    char *host = host_bytes(BYTES);
    uint64_t random = seed * 2654435761u + 12345;
    *sum = 0;
    for (int i = 0; i < OPS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const unsigned pick = (unsigned)(random >> 33);
        OOCUstream stream = streams[pick % STREAMS];
        OOCUevent event = events[(pick >> 4) % EVENTS];
        switch ((pick >> 8) % 8) {
        case 0:
        case 1:
            OK(cu.cuMemcpyHtoDAsync(device, host, (pick >> 12) % BYTES, stream));
            break;
        case 2:
            OK(cu.cuMemcpyDtoHAsync(host, device, (pick >> 12) % BYTES, stream));
            break;
        case 3:
            OK(cu.simLaunch(stream, NULL, 0, NULL, 0, (pick >> 12) % 100 * 1e-6));
            break;
        case 4:
        case 5:
            OK(cu.cuEventRecord(event, stream));
            break;
        case 6:
            OK(cu.cuStreamWaitEvent(stream, event, 0));
            break;
        default:
            if ((pick >> 12) % 4 == 0) {
                OK(cu.cuEventSynchronize(event));
                *sum += cu.simNow() * i;
            }
        }
    }
    double end_s = 0;
    OK(cu.simFinish(&end_s));
    sim_test_end();
    return end_s;
}

CASE(times_do_not_depend_on_the_schedule) {
    for (uint64_t seed = 1; seed <= 30; seed++) {
        double sum = 0, timed_sum = 0;
        const double timed_s = random_program(SIM_TIMED, seed, &timed_sum);
        for (int schedule = SIM_RANDOM; schedule <= SIM_EAGER; schedule++) {
            const double end_s = random_program(schedule, seed, &sum);
            CHECK(fabs(end_s - timed_s) < 1e-12 && fabs(sum - timed_sum) < 1e-9,
                  "program %llu ends at %.9g s on %s, %.9g s on timed", (unsigned long long)seed,
                  end_s, schedule_names[schedule], timed_s);
        }
    }
}

CASE(delays_are_adversarial_and_repeatable) {
    double sum = 0;
    const double timed_s = random_program(SIM_TIMED, 3, &sum);
    const double delayed_s = random_program(SIM_DELAYED, 3, &sum);
    CHECK(delayed_s > 2 * timed_s, "delayed %g s, timed %g s", delayed_s, timed_s);
    near(random_program(SIM_DELAYED, 3, &sum), delayed_s, "the same seed");
}

CASE(a_full_queue_holds_the_host_back) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream();
    for (int i = 0; i < 1024; i++)
        OK(cu.simLaunch(stream, NULL, 0, NULL, 0, 1e-6));
    near(cu.simNow(), 0, "1,024 fit");
    OK(cu.simLaunch(stream, NULL, 0, NULL, 0, 1e-6));
    near(cu.simNow(), 1e-6, "the next one waits for the oldest");
    struct sim_stats stats;
    OK(cu.simGetStats(&stats));
    CHECK(stats.host_waits == 0, "a full queue is no synchronisation");
    OK(cu.cuStreamSynchronize(stream));
    near(cu.simNow(), 1025e-6, "all");
    sim_test_end();
}

CASE(presets_are_the_table) {
    static const struct {
        const char *name;
        double link_gbps, gib, tflops, memory_gbps;
    } table[] = {{"rtx3090", 24, 24, 60, 936},
                 {"rtx4090", 25, 24, 110, 1008},
                 {"rtx5090", 50, 32, 150, 1792},
                 {"h100", 55, 80, 700, 3350},
                 {"h200", 55, 141, 700, 4800}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct sim_device device;
        OK(cu.simPreset(table[i].name, &device));
        CHECK(fabs(device.link_gbps - table[i].link_gbps) < 1e-9 &&
                  fabs(device.tflops - table[i].tflops) < 1e-9 &&
                  fabs(device.memory_bytes - table[i].gib * 1073741824.0) < 1 &&
                  fabs(device.memory_gbps - table[i].memory_gbps) < 1e-9 &&
                  fabs(device.launch_s - 5e-6) < 1e-12,
              "preset %s", table[i].name);
    }
    struct sim_device device;
    IS(OOCU_ERROR_INVALID_VALUE, cu.simPreset("voodoo2", &device));
    OK(cu.simPreset("rtx4090", &device));
    const double mib = 1048576, share = mib / (device.link_gbps * 1e9) /
                                        (device.copy_latency_s + mib / (device.link_gbps * 1e9));
    CHECK(share > 0.93 && share < 0.95, "1 MiB reaches %.3f of the peak", share);
}

CASE(the_trace_tells_when) {
    round_device();
    sim_test_begin(SIM_TIMED, 0);
    OK(cu.simSwitch(SIM_TRACE_ON, 1));
    OOCUstream stream = new_stream();
    OOCUdeviceptr device = device_bytes(1000);
    char *host = host_bytes(1000);
    OK(cu.cuMemcpyHtoDAsync(device, host, 1000, stream));
    OK(cu.simLaunch(stream, NULL, 0, NULL, 0, 1e-3));
    OK(cu.cuStreamSynchronize(stream));
    CHECK(cu.simTraceCount() == 2, "%llu rows", (unsigned long long)cu.simTraceCount());
    struct sim_trace_row row;
    OK(cu.simTraceRow(0, &row));
    CHECK(row.kind == SIM_H2D && row.bytes == 1000 && row.device_ptr == device,
          "row 0 is the copy");
    near(row.end_s, 11e-6, "copy in the trace");
    OK(cu.simTraceRow(1, &row));
    CHECK(row.kind == SIM_KERNEL && row.stream == (uintptr_t)stream, "row 1 is the kernel");
    near(row.start_s, 11e-6, "kernel in the trace");
    near(row.end_s, 1.011e-3, "kernel's end in the trace");
    IS(OOCU_ERROR_INVALID_VALUE, cu.simTraceRow(2, &row));
    sim_test_end();
}

CASE(a_step_of_two_layers_takes_what_the_model_says) {
    for (int schedule = SIM_TIMED; schedule <= SIM_EAGER; schedule++)
        two_layer_step(schedule);
}

/* Nothing begins before it is handed over: by a query, by a wait, or by a kernel that comes after
 * it.
 */
CASE(late_submission) {
    sim_test_begin(SIM_TIMED, 0);
    OK(cu.simSwitch(SIM_LATE_SUBMISSION, 1));
    int late = 0;
    OK(cu.simSubmitsLate(&late));
    CHECK(late == 1, "it does not say so");
    OOCUstream copies = new_stream(), compute = new_stream();
    OOCUevent first = new_event(), second = new_event();
    OOCUdeviceptr device = device_bytes(2 << 20);
    char *host = host_bytes(2 << 20);
    struct sim_stats stats;
    struct sim_device card;
    OK(cu.simGetDevice(0, &card));
    const double cost_s = card.copy_latency_s + (1 << 20) / (card.link_gbps * 1e9);
    OK(cu.cuMemcpyHtoDAsync(device, host, 1 << 20, copies));
    OK(cu.cuEventRecord(first, copies));
    OK(cu.cuMemcpyHtoDAsync(device + (1 << 20), host, 1 << 20, copies));
    OK(cu.cuEventRecord(second, copies));
    OK(cu.simAdvance(1));
    OK(cu.simGetStats(&stats));
    CHECK(stats.h2d_busy_s == 0, "begun without a query");
    float ms;
    IS(OOCU_ERROR_NOT_READY, cu.cuEventElapsedTime(&ms, first, second));
    OK(cu.simAdvance(1));
    OK(cu.simGetStats(&stats));
    CHECK(stats.h2d_busy_s == 0, "reading a time hands over");
    /* A kernel hands over what it waits for, and not what comes after that. */
    OK(cu.cuStreamWaitEvent(compute, first, 0));
    OK(cu.simLaunch(compute, NULL, 0, NULL, 0, 1e-3));
    OK(cu.simAdvance(1));
    OK(cu.simGetStats(&stats));
    CHECK(fabs(stats.h2d_busy_s - cost_s) < 1e-9, "%g of %g s", stats.h2d_busy_s, cost_s);
    const double asked_s = cu.simNow();
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(copies));
    OK(cu.cuEventSynchronize(second));
    CHECK(cu.simNow() - asked_s > 0.9 * cost_s, "the copy began before it was handed over");
    OK(cu.cuStreamSynchronize(compute));
    OK(cu.simGetStats(&stats));
    CHECK(stats.compute_busy_s > 0.9e-3 && stats.h2d_busy_s > 1.9 * cost_s, "not all has run");
    sim_test_end();
    OK(cu.simSubmitsLate(&late));
    CHECK(late == 0, "a reset ends it");
}

/* Six kernels of 1 ms on six streams, begun together: one after the other, or four at a time. Two
 * of one stream never overlap. */
CASE(kernels_overlap_where_they_are_told_to) {
    enum { STREAMS = 6 };
    for (int wide = 0; wide < 2; wide++) {
        sim_test_begin(SIM_TIMED, 7);
        OK(cu.simSwitch(SIM_CONCURRENT_KERNELS, wide));
        OOCUstream streams[STREAMS];
        double end_s;
        for (int i = 0; i < STREAMS; i++)
            streams[i] = new_stream();
        double start_s = cu.simNow();
        for (int i = 0; i < STREAMS; i++)
            OK(cu.simLaunch(streams[i], NULL, 0, NULL, 0, 1e-3));
        OK(cu.simFinish(&end_s));
        near(end_s - start_s, wide ? 2e-3 : 6e-3, "six streams");
        start_s = end_s;
        for (int i = 0; i < 2; i++)
            OK(cu.simLaunch(streams[0], NULL, 0, NULL, 0, 1e-3));
        OK(cu.simFinish(&end_s));
        near(end_s - start_s, 2e-3, "one stream");
        sim_test_end();
    }
}

/* Two devices of 1 GB/s links copy 1 MB twice each: behind one upstream of 1 GB/s all four pass one
 * after the other, behind one of 1.5 GB/s at its rate, and where each has its own as if alone. One
 * that copies alone gets its link's rate, not the upstream's; copies to the host pass at the same
 * time. */
CASE(links_share_an_upstream) {
    enum { BYTES = 1000000 };
    static const struct {
        int upstreams[2];
        double gbps, both_s, alone_s;
    } table[] = {{{1, 1}, 1, 4e-3, 2.02e-3},
                 {{1, 1}, 1.6, 2.5e-3, 2.02e-3},
                 {{1, 2}, 1, 2.02e-3, 2.02e-3},
                 {{0, 0}, 0, 2.02e-3, 2.02e-3},
                 {{1, 1}, 8, 2.02e-3, 2.02e-3}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        OK(cu.simReset());
        OK(cu.simSetDeviceCount(2));
        round_device();
        for (int card = 0; card < 2; card++) {
            struct sim_device device;
            OK(cu.simGetDevice(0, &device));
            device.upstream = table[i].upstreams[card];
            device.upstream_gbps = table[i].gbps;
            OK(cu.simSetDevice(card, &device));
        }
        sim_test_begin(SIM_TIMED, 7);
        OOCUcontext contexts[2] = {sim_context, NULL};
        OK(cu.cuDevicePrimaryCtxRetain(&contexts[1], 1));
        OOCUstream streams[2];
        OOCUdeviceptr slots[2];
        char *master = host_bytes(BYTES);
        for (int card = 0; card < 2; card++) {
            OK(cu.cuCtxPushCurrent(contexts[card]));
            streams[card] = new_stream();
            slots[card] = device_bytes(BYTES);
            OK(cu.cuCtxPopCurrent(NULL));
        }
        for (int both = 1; both >= 0; both--) {
            const double start_s = cu.simNow();
            double end_s;
            for (int copy = 0; copy < 2; copy++)
                for (int card = 0; card <= both; card++) {
                    OK(cu.cuCtxPushCurrent(contexts[card]));
                    OK(cu.cuMemcpyHtoDAsync(slots[card], master, BYTES, streams[card]));
                    OK(cu.cuCtxPopCurrent(NULL));
                }
            OK(cu.simFinish(&end_s));
            near(end_s - start_s, both ? table[i].both_s : table[i].alone_s,
                 both ? "two cards" : "one card");
        }
        for (int card = 0; card < 2; card++) {
            OK(cu.cuCtxPushCurrent(contexts[card]));
            OK(cu.cuStreamSynchronize(streams[card]));
            OK(cu.cuStreamDestroy(streams[card]));
            OK(cu.cuMemFree(slots[card]));
            OK(cu.cuCtxPopCurrent(NULL));
        }
        OK(cu.cuMemFreeHost(master));
        OK(cu.cuDevicePrimaryCtxRelease(1));
        sim_test_end();
    }
    struct sim_device device;
    OK(cu.simPreset("rtx4090", &device));
    device.upstream = 1;
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSetDevice(0, &device));
    device.upstream_gbps = 1;
    device.upstream = 9;
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSetDevice(0, &device));
    OK(cu.simPreset("rtx4090", &device));
    OK(cu.simSetDevice(0, &device));
    OK(cu.simSetDeviceCount(1));
}

/* Copies of 1, 2 and 3 MB over a link of 1 GB/s, each 10 us longer, that start at once: 2 MB in,
 * then 3 MB in, and at the same time 1 MB out. Where each way has half of it while both copy, the
 * one out takes twice its 1.01 ms, the first one in has 1.00 of its 2.01 ms left then: 3.02 ms, and
 * the second one has the link to itself. A copy out that begins late slows what is under way. */
CASE(directions_share_a_link) {
    enum { MB = 1000000 };
    static const struct {
        double share, out_s, first_s, second_s, late_s, in_s;
    } table[] = {{1, 1.01e-3, 2.01e-3, 5.02e-3, 2.01e-3, 2.01e-3},
                 {0.5, 2.02e-3, 3.02e-3, 6.03e-3, 3.02e-3, 3.02e-3},
                 {0.8, 1.2625e-3, 2.2625e-3, 5.2725e-3, 2.2625e-3, 2.2625e-3}};
    for (int schedule = SIM_TIMED; schedule <= SIM_EAGER; schedule++)
        for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
            OK(cu.simReset());
            round_device();
            struct sim_device device;
            OK(cu.simGetDevice(0, &device));
            device.duplex_share = table[i].share;
            OK(cu.simSetDevice(0, &device));
            sim_test_begin(schedule, 7);
            OOCUstream in = new_stream(), out = new_stream();
            OOCUevent ends[3] = {new_event(), new_event(), new_event()};
            OOCUdeviceptr slot = device_bytes(6 * MB);
            char *master = host_bytes(6 * MB);
            double start_s = cu.simNow();
            OK(cu.cuMemcpyHtoDAsync(slot, master, 2 * MB, in));
            OK(cu.cuEventRecord(ends[0], in));
            OK(cu.cuMemcpyHtoDAsync(slot + 2 * MB, master, 3 * MB, in));
            OK(cu.cuEventRecord(ends[1], in));
            OK(cu.cuMemcpyDtoHAsync(master + 5 * MB, slot + 5 * MB, MB, out));
            OK(cu.cuEventRecord(ends[2], out));
            OK(cu.cuEventSynchronize(ends[2]));
            near(cu.simNow() - start_s, table[i].out_s, "out");
            OK(cu.cuEventSynchronize(ends[0]));
            near(cu.simNow() - start_s, table[i].first_s, "in, with it");
            OK(cu.cuEventSynchronize(ends[1]));
            near(cu.simNow() - start_s, table[i].second_s, "in, alone");
            start_s = cu.simNow();
            OK(cu.cuMemcpyHtoDAsync(slot, master, 2 * MB, in));
            OK(cu.simAdvance(1e-3));
            OK(cu.cuMemcpyDtoHAsync(master + 5 * MB, slot + 5 * MB, MB, out));
            OK(cu.cuStreamSynchronize(out));
            near(cu.simNow() - start_s, table[i].late_s, "out, begun late");
            OK(cu.cuStreamSynchronize(in));
            near(cu.simNow() - start_s, table[i].in_s, "in, slowed under way");
            OK(cu.cuMemcpyHtoDAsync(slot, master, 2 * MB, in));
            OK(cu.simAdvance(1e-4));
            OK(cu.cuMemcpyDtoHAsync(master + 5 * MB, slot + 5 * MB, MB, out));
            OK(cu.simAdvance(1e-4)); /* the end of the one in has moved, and comes never */
            OK(cu.simFault("cuEventRecord", 1, OOCU_ERROR_LAUNCH_FAILED, 0));
            IS(OOCU_ERROR_LAUNCH_FAILED, cu.cuEventRecord(ends[0], in));
            OK(cu.simFaultClear());
            start_s = cu.simNow();
            OK(cu.cuMemcpyHtoDAsync(slot, master, 2 * MB, in));
            OK(cu.cuStreamSynchronize(in));
            if (schedule == SIM_TIMED) /* on others those before have run, and take their time */
                near(cu.simNow() - start_s, 2.01e-3, "in, after the context was lost");
            sim_test_end();
        }
    struct sim_device device;
    OK(cu.simPreset("rtx4090", &device));
    for (int i = 0; i < 3; i++) {
        device.duplex_share = (double[]){0, 1.5, NAN}[i];
        IS(OOCU_ERROR_INVALID_VALUE, cu.simSetDevice(0, &device));
    }
    OK(cu.simPreset("rtx4090", &device));
    OK(cu.simSetDevice(0, &device));
}

CHECK_MAIN(sim_test_open)
