/* Random calls with random, also stale, arguments on every schedule, with faults, hangs and host
 * functions: nothing crashes (meant for the sanitizers), nothing hangs, everything can be given
 * back. */
#include "sim_test.h"

#include <stdatomic.h>

enum { KEPT = 6, BYTES = 4096, CALLS = 300, PROGRAMS = 400 };

static uint64_t random_state;
static unsigned draw(unsigned below) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % below;
}

static atomic_int ran;
static void OOCUDAAPI host_function(void *unused) {
    (void)unused;
    atomic_fetch_add(&ran, 1);
}

struct pool {
    OOCUstream streams[KEPT];
    OOCUevent events[KEPT];
    OOCUdeviceptr device[KEPT];
    char *pinned[KEPT];
    char *blocks[KEPT]; /* ours: registered or adopted now and then */
};

/* Mostly a live stream, sometimes a default one, sometimes one that may be gone. */
static OOCUstream any_stream(const struct pool *p) {
    const unsigned pick = draw(20);
    if (pick < 2)
        return (OOCUstream)(uintptr_t)draw(3);
    return p->streams[draw(KEPT)];
}

static void one_call(struct pool *p) {
    const unsigned i = draw(KEPT), k = draw(KEPT), offset = draw(BYTES), bytes = draw(BYTES + 64);
    OOCUstream stream = any_stream(p);
    const OOSimRange ranges[2] = {{p->device[i] + offset, bytes / 2}, {p->device[k], 64}};
    switch (draw(26)) {
    case 0:
        cu.simHold(p->streams[i], 0); /* once destroyed it could not be let go by name */
        cu.cuStreamDestroy(p->streams[i]);
        cu.cuStreamCreateWithPriority(&p->streams[i], draw(2), 0);
        break;
    case 1:
        cu.cuEventDestroy(p->events[i]);
        if (draw(2))
            cu.cuEventCreate(&p->events[i], draw(2) ? OOCU_EVENT_DISABLE_TIMING : 0);
        break;
    case 2:
        if (cu.cuMemFree(p->device[i]) == OOCU_SUCCESS)
            p->device[i] = 0;
        if (!p->device[i])
            cu.cuMemAlloc(&p->device[i], BYTES);
        break;
    case 3:
        if (cu.cuMemFreeHost(p->pinned[i]) == OOCU_SUCCESS)
            p->pinned[i] = NULL;
        if (!p->pinned[i])
            cu.cuMemHostAlloc((void **)&p->pinned[i], BYTES, 0);
        break;
    case 4:
        cu.cuMemHostRegister(p->blocks[i] + offset / 2, 1 + bytes / 2, 0);
        break;
    case 5:
        cu.cuMemHostUnregister(p->blocks[i] + offset / 2);
        cu.cuMemHostUnregister(p->blocks[i]);
        break;
    case 6:
        cu.simAdopt((OOCUdeviceptr)p->blocks[i], BYTES, draw(2), stream);
        break;
    case 7:
        cu.simDrop((OOCUdeviceptr)p->blocks[i]);
        break;
    case 8:
    case 9:
        cu.cuMemcpyHtoDAsync(p->device[i] + offset, p->pinned[k], bytes % (BYTES - offset + 1),
                             stream);
        break;
    case 10:
        if (p->pinned[k])
            cu.cuMemcpyDtoHAsync(p->pinned[k] + offset, p->device[i], bytes, stream);
        break;
    case 11:
        if (bytes / 2 + offset <= BYTES) /* pageable or not, as it happens */
            cu.cuMemcpyHtoDAsync(p->device[i], p->blocks[k] + offset, bytes / 2, stream);
        break;
    case 12:
        cu.cuMemsetD32Async(p->device[i] + offset / 4 * 4, bytes, bytes / 8, stream);
        break;
    case 13:
    case 14:
        cu.cuEventRecord(p->events[i], stream);
        break;
    case 15:
    case 16:
        cu.cuStreamWaitEvent(stream, p->events[i], 0);
        break;
    case 17:
    case 18:
        cu.simLaunch(stream, ranges, draw(3), ranges, draw(2), bytes * 1e-8);
        break;
    case 19:
        cu.cuEventQuery(p->events[i]);
        cu.cuStreamQuery(stream);
        break;
    case 20:
        cu.cuEventSynchronize(p->events[i]);
        break;
    case 21:
        if (draw(3) == 0)
            cu.cuStreamSynchronize(stream);
        break;
    case 22:
        if (draw(4) == 0)
            cu.cuLaunchHostFunc(stream, host_function, NULL);
        break;
    case 23:
        cu.simHostAccess(p->blocks[i] + offset, bytes, (int)draw(2));
        break;
    case 24:
        if (draw(20) == 0)
            cu.simHold(stream, (int)draw(2));
        else if (draw(30) == 0)
            cu.simFinish(NULL);
        break;
    default: {
        float ms;
        void *graph = NULL;
        if (draw(10) == 0)
            cu.simFault(draw(2) ? "cuEventRecord" : NULL, 1 + draw(20), draw(8) ? 2 : 700,
                        (int)draw(2));
        else if (draw(3) == 0)
            cu.simFaultClear();
        else if (draw(10) == 0)
            cu.cuStreamBeginCapture(stream, 2);
        else if (cu.cuStreamEndCapture(stream, &graph) == OOCU_SUCCESS)
            cu.cuGraphDestroy(graph);
        cu.cuEventElapsedTime(&ms, p->events[i], p->events[k]);
    }
    }
}

static void random_program(uint64_t seed) {
    static char memory[KEPT][2 * BYTES];
    struct pool p = {0};
    void *graph;
    random_state = seed * 0x9E3779B97F4A7C15u + 1;
    sim_test_begin((int)(seed % 6), seed);
    OK(cu.simPatience(20));
    for (int i = 0; i < KEPT; i++) {
        OK(cu.cuStreamCreateWithPriority(&p.streams[i], (unsigned)i % 2, 0));
        p.events[i] = new_event();
        p.device[i] = device_bytes(BYTES);
        p.pinned[i] = host_bytes(BYTES);
        p.blocks[i] = memory[i];
    }
    for (int i = 0; i < CALLS; i++)
        one_call(&p);
    OK(cu.simFaultClear());
    OK(cu.simPatience(10000));
    for (int i = 0; i < KEPT; i++) {
        cu.simHold(p.streams[i], 0);
        cu.cuStreamEndCapture(p.streams[i], &graph);
    }
    for (uintptr_t i = 0; i < 3; i++) {
        cu.simHold((OOCUstream)i, 0);
        cu.cuStreamEndCapture((OOCUstream)i, &graph);
    }
    for (int i = 0; i < KEPT; i++) {
        const OOCUresult result = cu.cuStreamSynchronize(p.streams[i]);
        CHECK(result == OOCU_SUCCESS || result == OOCU_ERROR_INVALID_HANDLE, "program %llu: %d",
              (unsigned long long)seed, result);
    }
    OK(cu.cuCtxPopCurrent(NULL));
    OK(cu.cuDevicePrimaryCtxRelease(0));
    for (int i = 0; i < KEPT; i++)
        cu.simDrop((OOCUdeviceptr)p.blocks[i]);
    struct sim_live live;
    OK(cu.simGetLive(&live));
    CHECK(!live.streams && !live.events && !live.contexts && !live.registrations &&
              !live.host_alloc_bytes && !live.device_bytes && !live.adopted_bytes && !live.queued,
          "program %llu: %llu streams, %llu events, %llu registrations, %llu adopted, %llu queued",
          (unsigned long long)seed, (unsigned long long)live.streams,
          (unsigned long long)live.events, (unsigned long long)live.registrations,
          (unsigned long long)live.adopted_bytes, (unsigned long long)live.queued);
    OK(cu.simReset());
}

CASE(random_programs_of_calls) {
    for (uint64_t seed = 1; seed <= PROGRAMS && !check_failed; seed++)
        random_program(seed);
}

CHECK_MAIN(sim_test_open)
