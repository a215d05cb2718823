/* Many operations, many threads: neither time per operation, nor memory, nor history grows with the
 * length of a program; and the one lock holds. */
#include "../../csrc/sim/sim_os.h"
#include "sim_test.h"

#include <stdatomic.h>
#include <time.h>

static double cpu_s(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* A streamer of many layers without a single host wait: 9 calls per layer. */
static double stream_layers(long layers, double *first_half_s) {
    enum { SLOTS = 64, BYTES = 4096, UNIT = 64 };
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream copies = new_stream(), compute = new_stream(), idle = new_stream();
    OOCUevent ready[SLOTS], used[SLOTS];
    OOCUdeviceptr arena = device_bytes(SLOTS * BYTES);
    char *masters = host_bytes(UNIT * BYTES);
    OK(cu.cuMemsetD32Async(arena, 0, 1, idle)); /* a stream that knows of nothing that follows */
    for (int i = 0; i < SLOTS; i++) {
        ready[i] = new_event();
        used[i] = new_event();
    }
    uint64_t failed = 0;
    const double start_s = cpu_s();
    for (long layer = 0; layer < layers; layer++) {
        const int i = (int)(layer % SLOTS);
        const OOCUdeviceptr slot = arena + (size_t)i * BYTES;
        const OOSimRange reads[2] = {{slot, 3000}, {slot + 3072, 1024}};
        failed += cu.cuStreamWaitEvent(copies, used[i], 0) != OOCU_SUCCESS;
        failed += cu.cuMemcpyHtoDAsync(slot, masters + layer % UNIT * BYTES, BYTES, copies) !=
                  OOCU_SUCCESS;
        failed += cu.cuEventRecord(ready[i], copies) != OOCU_SUCCESS;
        failed += cu.cuStreamWaitEvent(compute, ready[i], 0) != OOCU_SUCCESS;
        failed += cu.simLaunch(compute, reads, 2, NULL, 0, 1e-6) != OOCU_SUCCESS;
        failed += cu.cuEventRecord(used[i], compute) != OOCU_SUCCESS;
        if (layer == layers / 2)
            *first_half_s = cpu_s() - start_s;
    }
    const double took_s = cpu_s() - start_s;
    CHECK(failed == 0, "%llu calls failed", (unsigned long long)failed);
    struct sim_live live;
    OK(cu.simGetLive(&live));
    CHECK(live.history < 1000, "%llu intervals remembered", (unsigned long long)live.history);
    CHECK(live.queued <= 3 * 1024, "%llu queued", (unsigned long long)live.queued);
    CHECK(reports_of("race:") <= 1, "races"); /* with the idle stream's memset, at most */
    sim_test_end();
    return took_s;
}

CASE(a_long_program_is_as_fast_as_a_short_one) {
    enum { LAYERS = 170000 }; /* 1,020,000 operations */
    double half_s = 0;
    const double took_s = stream_layers(LAYERS, &half_s);
    printf("%d layers, %d operations: %.2f us of CPU per layer\n", LAYERS, 6 * LAYERS,
           took_s * 1e6 / (double)LAYERS);
    /* Generous, for sanitizers and busy machines; growth with the length would show all the same.
     */
    CHECK(took_s - half_s < 2 * half_s + 0.5, "the second half took %.2f s, the first %.2f s",
          took_s - half_s, half_s);
}

/* Random sub-ranges on random streams, synchronised now and then: the history stays small. */
CASE(history_is_forgotten) {
    enum { BYTES = 1 << 20 };
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream streams[3] = {new_stream(), new_stream(), new_stream()};
    OOCUdeviceptr device = device_bytes(BYTES);
    uint64_t random = 4242, most = 0;
    struct sim_live live;
    for (int i = 0; i < 100000; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t first = (size_t)(random >> 20) % BYTES;
        const OOSimRange range = {device + first,
                                  1 + (size_t)(random >> 44) % (BYTES - first) / 64};
        OK(cu.simLaunch(streams[i % 3], &range, 1, NULL, 0, 0));
        if (i % 1000 == 999) {
            for (int k = 0; k < 3; k++)
                OK(cu.cuStreamSynchronize(streams[k]));
            OK(cu.simGetLive(&live));
            if (live.history > most)
                most = live.history;
        }
    }
    CHECK(most < 20000, "up to %llu intervals remembered", (unsigned long long)most);
    CHECK(cu.simReportCount() == 0, "reads race with nothing");
    sim_test_end();
}

/* ---- threads ---- */

enum { THREADS = 4, ROUNDS = 400 };
static atomic_int ready_threads, finished, failures;

static void thread_work(void) {
    enum { BYTES = 512 };
    if (cu.cuCtxPushCurrent(sim_context) != OOCU_SUCCESS)
        atomic_fetch_add(&failures, 1);
    OOCUstream stream;
    OOCUevent event;
    OOCUdeviceptr device;
    void *host;
    int bad = cu.cuStreamCreateWithPriority(&stream, 1, 0) || cu.cuEventCreate(&event, 0) ||
              cu.cuMemAlloc(&device, BYTES) || cu.cuMemHostAlloc(&host, BYTES, 0);
    for (int i = 0; i < ROUNDS && !bad; i++) {
        memset(host, i, BYTES);
        const OOSimRange range = {device, BYTES};
        bad +=
            cu.simHostAccess(host, BYTES, 1) || cu.cuMemcpyHtoDAsync(device, host, BYTES, stream);
        bad += cu.simLaunch(stream, &range, 1, &range, 1, 1e-6) != OOCU_SUCCESS;
        bad += *(unsigned char *)device != (unsigned char)i;
        bad += cu.cuMemcpyDtoHAsync(host, device, BYTES, stream) || cu.cuEventRecord(event, stream);
        if (i % 3 == 0)
            while (cu.cuEventQuery(event) == OOCU_ERROR_NOT_READY)
                ;
        else
            bad += cu.cuEventSynchronize(event) != OOCU_SUCCESS;
        bad += ((unsigned char *)host)[BYTES - 1] != (unsigned char)i;
    }
    bad += cu.cuStreamDestroy(stream) || cu.cuEventDestroy(event) || cu.cuMemFree(device) ||
           cu.cuMemFreeHost(host);
    bad += cu.cuCtxPopCurrent(NULL) != OOCU_SUCCESS;
    atomic_fetch_add(&failures, bad);
    atomic_fetch_add(&finished, 1);
}

static sim_os_thread_result SIM_OS_THREAD thread_body(void *unused) {
    (void)unused;
    atomic_fetch_add(&ready_threads, 1);
    while (atomic_load(&ready_threads) < THREADS)
        ;
    thread_work();
    return 0;
}

static atomic_int host_calls;
static void OOCUDAAPI count_call(void *unused) {
    (void)unused;
    atomic_fetch_add(&host_calls, 1);
}

static void threads_work(int schedule, int strict) {
    sim_test_begin(schedule, 77);
    OK(cu.simSwitch(SIM_STRICT_THREADS, strict));
    atomic_store(&ready_threads, 0);
    atomic_store(&finished, 0);
    atomic_store(&host_calls, 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(sim_os_start(thread_body) == 0, "no thread");
    OOCUstream stream = new_stream();
    for (int i = 0; i < 50; i++) {
        OK(cu.cuLaunchHostFunc(stream, count_call, NULL));
        if (i % 10 == 9)
            OK(cu.cuStreamSynchronize(stream));
    }
    OK(cu.cuStreamSynchronize(stream));
    while (atomic_load(&finished) < THREADS)
        (void)cu.cuStreamQuery(stream);
    CHECK(atomic_load(&failures) == 0, "%d failures on %s", atomic_load(&failures),
          schedule_names[schedule]);
    CHECK(atomic_load(&host_calls) == 50, "%d host functions", atomic_load(&host_calls));
    CHECK(reports_of("race:") == 0, "threads with their own memory were accused");
    print_reports();
    sim_test_end();
}

static atomic_int wrote;
static OOCUdeviceptr shared_device;
static OOCUstream shared_stream;

static sim_os_thread_result SIM_OS_THREAD waits_for_a_kernel(void *unused) {
    (void)unused;
    cu.cuCtxPushCurrent(sim_context);
    cu.cuStreamSynchronize(shared_stream);
    cu.cuCtxPopCurrent(NULL);
    atomic_store(&wrote, 1);
    return 0;
}

/* One thread waits for a kernel, another reads its result: ordered by a lock we cannot see, unless
 * asked to count CUDA's order alone. */
CASE(strict_threads_know_only_what_they_waited_for) {
    for (int strict = 0; strict < 2; strict++) {
        sim_test_begin(SIM_TIMED, 0);
        OK(cu.simSwitch(SIM_STRICT_THREADS, strict));
        shared_device = device_bytes(64);
        shared_stream = new_stream();
        atomic_store(&wrote, 0);
        const OOSimRange range = {shared_device, 64};
        OK(cu.simLaunch(shared_stream, NULL, 0, &range, 1, 1e-6));
        CHECK(sim_os_start(waits_for_a_kernel) == 0, "no thread");
        while (!atomic_load(&wrote))
            ;
        OK(cu.simHostAccess((void *)shared_device, 64, 0));
        CHECK(reports_of("race:") == (uint64_t)strict, "strict %d: %llu races", strict,
              (unsigned long long)reports_of("race:"));
        sim_test_end();
    }
}

CASE(threads_do_not_disturb_each_other) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++)
        threads_work(schedule, schedule % 2);
}

CHECK_MAIN(sim_test_open)
