/* Calls that fail on purpose: the n-th, once or for ever, sticky, asynchronous; refused
 * registrations. */
#include "sim_test.h"

#include <stdatomic.h>
#include <time.h>

/* A small program whose every call is checked by the caller: returns the first error. */
static OOCUresult program(OOCUstream stream, OOCUevent event, OOCUdeviceptr device,
                          const void *host) {
    OOCUresult result = cu.cuMemcpyHtoDAsync(device, host, 64, stream);
    if (result == OOCU_SUCCESS)
        result = cu.cuEventRecord(event, stream);
    if (result == OOCU_SUCCESS)
        result = cu.cuEventSynchronize(event);
    return result;
}

static OOCUstream stream;
static OOCUevent event;
static OOCUdeviceptr device;
static char *host;

static void begin(void) {
    sim_test_begin(SIM_TIMED, 0);
    stream = new_stream();
    event = new_event();
    device = device_bytes(64);
    host = host_bytes(64);
    memset(host, 1, 64);
}

CASE(the_nth_call_of_any_kind) {
    for (uint64_t nth = 1; nth <= 3; nth++)
        for (int lasting = 0; lasting < 2; lasting++) {
            begin();
            memset((void *)device, 0, 64);
            const uint64_t before = cu.simCallCount(NULL);
            OK(cu.simFault(NULL, nth, OOCU_ERROR_OUT_OF_MEMORY, lasting));
            IS(OOCU_ERROR_OUT_OF_MEMORY, program(stream, event, device, host));
            CHECK(cu.simCallCount(NULL) - before == nth, "call %llu failed",
                  (unsigned long long)nth);
            IS(lasting ? OOCU_ERROR_OUT_OF_MEMORY : OOCU_SUCCESS,
               program(stream, event, device, host));
            OK(cu.simFaultClear());
            OK(program(stream, event, device, host));
            CHECK(*(char *)device == 1, "after the fault");
            sim_test_end();
        }
}

CASE(the_nth_call_of_one_kind) {
    begin();
    OK(cu.simFault("cuEventRecord", 2, OOCU_ERROR_INVALID_VALUE, 0));
    OK(program(stream, event, device, host));
    IS(OOCU_ERROR_INVALID_VALUE, program(stream, event, device, host));
    OK(program(stream, event, device, host));
    OK(cu.simFault("cuMemcpyHtoDAsync", 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 0));
    OK(cu.simFault("cuMemcpyHtoDAsync", 0, OOCU_SUCCESS, 0)); /* cleared */
    OK(program(stream, event, device, host));
    OK(cu.simFault("simAdopt", 1, OOCU_ERROR_OUT_OF_MEMORY, 0));
    char arena[64];
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.simAdopt((OOCUdeviceptr)arena, 64, 0, stream));
    OK(cu.simAdopt((OOCUdeviceptr)arena, 64, 0, stream));
    OK(cu.simDrop((OOCUdeviceptr)arena));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simFault("cuNoSuchCall", 1, 2, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simFault("cuGetErrorName", 1, 2, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simFault("cuEventRecord", 0, 2, 0));
    sim_test_end();
}

CASE(a_failed_call_does_nothing) {
    begin();
    struct sim_stats before, after;
    OK(cu.simGetStats(&before));
    OK(cu.simFault("cuMemcpyHtoDAsync", 1, OOCU_ERROR_OUT_OF_MEMORY, 0));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemcpyHtoDAsync(device, host, 64, stream));
    OK(cu.cuStreamQuery(stream));
    OK(cu.simGetStats(&after));
    CHECK(before.h2d_copies == after.h2d_copies, "a refused copy was counted");
    OK(cu.simFault("cuStreamDestroy", 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 0));
    IS(OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, cu.cuStreamDestroy(stream));
    OK(cu.cuStreamQuery(stream));
    sim_test_end();
}

CASE(a_sticky_error_kills_the_context) {
    static const OOCUresult sticky[] = {
        OOCU_ERROR_ILLEGAL_ADDRESS,       OOCU_ERROR_LAUNCH_FAILED,   OOCU_ERROR_ECC_UNCORRECTABLE,
        OOCU_ERROR_NVLINK_UNCORRECTABLE,  OOCU_ERROR_CONTAINED,       OOCU_ERROR_TENSOR_MEMORY_LEAK,
        OOCU_ERROR_MPS_CLIENT_TERMINATED, OOCU_ERROR_EXTERNAL_DEVICE, OOCU_ERROR_UNKNOWN};
    for (size_t i = 0; i < sizeof sticky / sizeof sticky[0]; i++) {
        begin();
        memset((void *)device, 0, 64);
        OK(cu.cuMemcpyHtoDAsync(device, host, 64, stream));
        OK(cu.simFault("cuEventRecord", 1, sticky[i], 0));
        IS(sticky[i], cu.cuEventRecord(event, stream));
        IS(sticky[i], cu.cuStreamSynchronize(stream));
        IS(sticky[i], cu.cuEventCreate(&event, 0));
        IS(sticky[i], cu.cuMemFreeHost(host));
        OOCUcontext context;
        OK(cu.cuCtxGetCurrent(&context));
        OK(cu.cuCtxPushCurrent(context));
        OK(cu.cuCtxPopCurrent(NULL));
        struct sim_live live;
        OK(cu.simGetLive(&live));
        CHECK(live.queued == 0, "nothing runs in a dead context");
        CHECK(*(char *)device == 0 || *(unsigned char *)device == 0xFF,
              "the copy ran after its death");
        OK(cu.simFaultClear());
        OK(program(stream, event, device, host));
        CHECK(*(char *)device == 1, "alive again");
        sim_test_end();
    }
}

/* What a lost context had queued never runs: its memory may be freed without a wait. */
CASE(nothing_is_in_flight_on_a_lost_context) {
    static char memory[2][4096];
    const OOSimRange range = {(OOCUdeviceptr)memory[0], sizeof memory[0]};
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++)
        for (int sticky = 0; sticky < 2; sticky++) {
            begin();
            OK(cu.simSetSchedule(schedule, 30));
            OK(cu.simAdopt((OOCUdeviceptr)memory[0], sizeof memory[0], 0, stream));
            OK(cu.simAdopt((OOCUdeviceptr)memory[1], sizeof memory[1], 0, stream));
            OK(cu.cuMemcpyHtoDAsync((OOCUdeviceptr)memory[0], host, 64, stream));
            OOCUstream other = new_stream();
            OK(cu.cuMemcpyHtoDAsync((OOCUdeviceptr)memory[1], host, 64, other));
            if (sticky) {
                OK(cu.cuStreamDestroy(other)); /* where its copy has run nothing is left of it */
                OK(cu.simFault("cuEventRecord", 1, OOCU_ERROR_LAUNCH_FAILED, 0));
                IS(OOCU_ERROR_LAUNCH_FAILED, cu.cuEventRecord(event, stream));
                IS(OOCU_ERROR_LAUNCH_FAILED, cu.simLaunch(stream, &range, 1, NULL, 0, 0.0));
            }
            for (int i = 0; i < 2; i++)
                IS(sticky ? OOCU_SUCCESS : OOCU_ERROR_ILLEGAL_STATE,
                   cu.simDrop((OOCUdeviceptr)memory[i]));
            CHECK(reports_of("in flight") == (sticky ? 0 : 2), "%s: %llu reports",
                  schedule_names[schedule], (unsigned long long)reports_of("in flight"));
            OK(cu.simFaultClear());
            for (int i = 0; i < 2 && !sticky; i++) {
                OK(cu.cuStreamSynchronize(i ? other : stream));
                OK(cu.simDrop((OOCUdeviceptr)memory[i]));
            }
            sim_test_end();
        }
}

CASE(an_asynchronous_error_shows_later) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        begin();
        OK(cu.simSetSchedule(schedule, 1));
        OK(cu.simFault("async h2d", 2, OOCU_ERROR_ILLEGAL_ADDRESS, 0));
        OK(program(stream, event, device, host));
        OK(cu.cuMemcpyHtoDAsync(device, host, 64, stream));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(stream));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamQuery(stream));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamDestroy(stream));
        OK(cu.simFaultClear());
        OK(cu.cuStreamDestroy(stream));
        sim_test_end();
    }
}

static atomic_int runs, may_go;

/* Comes to its end a while after it may. */
static void OOCUDAAPI run_on(void *unused) {
    (void)unused;
    atomic_store(&runs, 1);
    while (!atomic_load(&may_go))
        ;
    for (const clock_t begin = clock(); clock() - begin < CLOCKS_PER_SEC / 50;)
        ;
    atomic_store(&runs, 0);
}

/* What is queued when a context dies never runs; a host function that runs then comes to its end,
 * and who gives the context back waits for it. */
CASE(a_context_dies_while_a_host_function_runs) {
    for (int more = 0; more < 2; more++) {
        begin();
        OOCUstream other = new_stream();
        atomic_store(&may_go, 0);
        OK(cu.cuLaunchHostFunc(other, run_on, NULL));
        if (more)
            OK(cu.cuMemsetD32Async(device, 0, 1, other));
        while (!atomic_load(&runs))
            ;
        OK(cu.simFault("async h2d", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0));
        OK(cu.cuMemcpyHtoDAsync(device, host, 64, stream));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(stream));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamQuery(stream)); /* all is gone by now */
        OK(cu.simFaultClear());
        atomic_store(&may_go, 1);
        sim_test_end();
        CHECK(!atomic_load(&runs), "the context ended before the host function");
    }
}

CASE(registrations_are_refused_from_the_kth_on) {
    begin();
    static char block[4][4096];
    for (uint64_t from = 1; from <= 3; from++) {
        OK(cu.simRefuseRegistration(from));
        for (uint64_t i = 1; i <= 4; i++)
            IS(i < from ? OOCU_SUCCESS : OOCU_ERROR_OUT_OF_MEMORY,
               cu.cuMemHostRegister(block[i - 1], 4096, 0));
        OK(cu.simRefuseRegistration(0));
        for (uint64_t i = 1; i < from; i++)
            OK(cu.cuMemHostUnregister(block[i - 1]));
        OK(cu.cuMemHostRegister(block[3], 4096, 0));
        OK(cu.cuMemHostUnregister(block[3]));
    }
    sim_test_end();
}

/* Registration and allocation draw on one quota, and give back to it. */
CASE(page_locked_bytes_have_one_quota) {
    enum { PAGE = 4096 };
    static char block[4][PAGE];
    begin(); /* with 64 bytes of host memory */
    OK(cu.simLockQuota(64 + 3 * PAGE));
    OK(cu.cuMemHostRegister(block[0], PAGE, 0));
    char *allocated = host_bytes(PAGE);
    void *none = NULL;
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemHostAlloc(&none, PAGE + 1, 0));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemHostRegister(block[1], (size_t)2 * PAGE, 0));
    OK(cu.cuMemHostRegister(block[1], PAGE, 0));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemHostAlloc(&none, 1, 0));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemHostRegister(block[2], 1, 0));
    OK(cu.cuMemFreeHost(allocated));
    OK(cu.cuMemHostRegister(block[2], PAGE, 0));
    OK(cu.simLockQuota(PAGE)); /* below what is locked: nothing more, and no overflow */
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemHostRegister(block[3], 1, 0));
    OK(cu.simLockQuota(UINT64_MAX));
    OK(cu.cuMemHostRegister(block[3], PAGE, 0));
    for (int i = 0; i < 4; i++)
        OK(cu.cuMemHostUnregister(block[i]));
    OK(cu.simLockQuota(0));
    OK(cu.cuMemFreeHost(host));
    sim_test_end();
    sim_test_begin(SIM_TIMED, 0); /* a reset ends it */
    (void)host_bytes(PAGE);
    sim_test_end();
}

/* An asynchronous copy of pageable memory is an oversight, unless its caller said that it knows.
 * The source is in use until an event after it either way. */
CASE(pageable_copies_are_reported_unless_expected) {
    static char pageable[64];
    for (int expected = 0; expected < 2; expected++) {
        begin();
        if (expected)
            OK(cu.simExpectPageable(pageable));
        OK(cu.cuMemcpyHtoDAsync(device, pageable, 64, stream));
        CHECK(reports_of("lint:") == (uint64_t)!expected, "%d", expected);
        IS(OOCU_SUCCESS, cu.simHostAccess(pageable, 64, 1));
        CHECK(reports_of("race:") == 1, "the source is in use");
        OK(cu.simReportsClear());
        OK(cu.cuStreamSynchronize(stream));
        OK(cu.cuMemcpyHtoDAsync(device, pageable, 64, stream)); /* it was said of one copy */
        CHECK(reports_of("lint:") == 1, "%d, again", expected);
        OK(cu.cuStreamSynchronize(stream));
        sim_test_end();
    }
}

CHECK_MAIN(sim_test_open)
