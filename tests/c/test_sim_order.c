/* Order: a missing wait is reported on every schedule, a correct program never, whatever runs when;
 * and where a wait is missing, what has not arrived reads as NaN. */
#include "sim_test.h"

#include <math.h>

/* ---- a double-buffered streamer and its bugs ---- */

enum bug {
    NO_BUG,
    NO_STAGING_WAIT,    /* the host rewrites a staging buffer while its copy may still read it */
    NO_SLOT_WAIT,       /* a copy overwrites a slot that the kernel may still read */
    NO_READY_WAIT,      /* the kernel does not wait for its copy */
    RECORD_ON_WRONG,    /* the ready event is recorded on the compute stream */
    WAIT_BEFORE_RECORD, /* the kernel waits for the event's previous record */
    BUGS
};
static const char *const bug_names[] = {"none",          "no staging wait", "no slot wait",
                                        "no ready wait", "wrong stream",    "wait before record"};

/* 8 layers through 2 slots and 2 staging buffers. Returns 1 when every layer computed on its own
 * data. */
static int streamer(enum bug bug) {
    enum { LAYERS = 8, FLOATS = 1024, BYTES = FLOATS * 4 };
    OOCUstream copies = new_stream(), compute = new_stream();
    OK(cu.simLabelStream(copies, "copies"));
    OK(cu.simLabelStream(compute, "compute"));
    OOCUevent staged[2], ready[2], used[2];
    float *staging[2];
    OOCUdeviceptr slot[2];
    for (unsigned i = 0; i < 2; i++) {
        staged[i] = new_event();
        ready[i] = new_event();
        used[i] = new_event();
        staging[i] = host_bytes(BYTES);
        slot[i] = device_bytes(BYTES);
        char name[16];
        snprintf(name, sizeof name, "slot %u", i);
        OK(cu.simLabelRange((void *)slot[i], BYTES, name));
    }
    int correct = 1;
    for (int layer = 0; layer < LAYERS; layer++) {
        const int i = layer % 2;
        if (bug != NO_STAGING_WAIT)
            OK(cu.cuEventSynchronize(staged[i]));
        OK(cu.simHostAccess(staging[i], BYTES, 1));
        for (int k = 0; k < FLOATS; k++)
            staging[i][k] = (float)layer;
        if (bug != NO_SLOT_WAIT)
            OK(cu.cuStreamWaitEvent(copies, used[i], 0));
        if (bug == WAIT_BEFORE_RECORD)
            OK(cu.cuStreamWaitEvent(compute, ready[i], 0));
        OK(cu.cuMemcpyHtoDAsync(slot[i], staging[i], BYTES, copies));
        OK(cu.cuEventRecord(staged[i], copies));
        OK(cu.cuEventRecord(ready[i], bug == RECORD_ON_WRONG ? compute : copies));
        if (bug != NO_READY_WAIT && bug != WAIT_BEFORE_RECORD)
            OK(cu.cuStreamWaitEvent(compute, ready[i], 0));
        OOSimRange range = {slot[i], BYTES};
        OK(cu.simLaunch(compute, &range, 1, NULL, 0, 20e-6));
        const float *data = (const float *)slot[i];
        for (int k = 0; k < FLOATS; k++)
            correct &= data[k] == (float)layer; /* false for NaN */
        OK(cu.cuEventRecord(used[i], compute));
    }
    OK(cu.cuStreamSynchronize(compute));
    OK(cu.cuStreamSynchronize(copies));
    for (int i = 0; i < 2; i++) {
        OK(cu.cuEventDestroy(staged[i]));
        OK(cu.cuEventDestroy(ready[i]));
        OK(cu.cuEventDestroy(used[i]));
        OK(cu.cuMemFreeHost(staging[i]));
        OK(cu.cuMemFree(slot[i]));
    }
    OK(cu.cuStreamDestroy(copies));
    OK(cu.cuStreamDestroy(compute));
    return correct;
}

CASE(every_schedule_finds_every_missing_wait) {
    for (int bug = NO_BUG; bug < BUGS; bug++)
        for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++)
            for (uint64_t seed = 0;
                 seed < (schedule == SIM_RANDOM || schedule == SIM_DELAYED ? 20 : 1); seed++) {
                sim_test_begin(schedule, seed);
                const int correct = streamer((enum bug)bug);
                const uint64_t races = reports_of("race:");
                CHECK((races > 0) == (bug != NO_BUG), "%s on %s, seed %llu: %llu races",
                      bug_names[bug], schedule_names[schedule], (unsigned long long)seed,
                      (unsigned long long)races);
                CHECK(cu.simReportCount() == races, "only races are reported");
                CHECK(bug != NO_BUG || correct, "the correct streamer computed wrongly on %s",
                      schedule_names[schedule]);
                if (schedule == SIM_STARVE_COPY &&
                    (bug == NO_READY_WAIT || bug == RECORD_ON_WRONG || bug == WAIT_BEFORE_RECORD))
                    CHECK(!correct, "%s: the kernel's data must be missing on starve-copy",
                          bug_names[bug]);
                sim_test_end();
            }
}

CASE(without_the_detector_the_reports_stop) {
    sim_test_begin(SIM_TIMED, 0);
    OK(cu.simSwitch(SIM_RACES, 0));
    streamer(NO_READY_WAIT);
    CHECK(cu.simReportCount() == 0, "races reported though switched off");
    sim_test_end();
}

CASE(a_report_names_everything) {
    sim_test_begin(SIM_RANDOM, 41);
    OOCUstream a = new_stream(), b = new_stream();
    OK(cu.simLabelStream(a, "h2d"));
    OK(cu.simLabelStream(b, "compute"));
    OOCUdeviceptr device = device_bytes(4096);
    char *host = host_bytes(4096), text[4096] = "";
    OK(cu.simLabelRange((void *)device, 4096, "unit 12"));
    OK(cu.cuMemcpyHtoDAsync(device, host, 4096, a));
    OOSimRange range = {device + 1024, 512};
    OK(cu.simLaunch(b, &range, 1, NULL, 0, 0));
    CHECK(cu.simReportCount() == 1, "%llu reports", (unsigned long long)cu.simReportCount());
    OK(cu.simReport(0, text, sizeof text));
    static const char *const parts[] = {
        "race: read-after-write",
        "bytes 1024..1536 of \"unit 12\"",
        "bytes 0..4096 of \"unit 12\"",
        "write by a host-to-device copy, stream \"h2d\"",
        "(cuMemcpyHtoDAsync)",
        "read by a kernel, stream \"compute\"",
        "(simLaunch)",
        "missing edge:",
        "stream \"compute\" waits for no event recorded on stream \"h2d\"",
        "ORACLE_OFFLOAD_SIM_SEED=random:41"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        CHECK(strstr(text, parts[i]), "a report without %s:\n%s", parts[i], text);
    OK(cu.simLaunch(b, &range, 1, NULL, 0, 0));
    CHECK(cu.simReportCount() == 1, "the same race twice");
    OK(cu.simReportsClear());
    CHECK(cu.simReportCount() == 0, "not cleared");
    sim_test_end();
}

/* ---- rules, one by one ---- */

static OOCUstream s1, s2;
static OOCUevent e1, e2;
static OOCUdeviceptr memory;
static char *pinned;
enum { SIZE = 4096 };

static void rule_begin(void) {
    sim_test_begin(SIM_TIMED, 0);
    s1 = new_stream();
    s2 = new_stream();
    e1 = new_event();
    e2 = new_event();
    memory = device_bytes(SIZE);
    pinned = host_bytes(SIZE);
}

static void rule_end(uint64_t races, const char *rule) {
    const uint64_t found = reports_of("race:");
    CHECK(found == races, "%s: %llu races, expected %llu", rule, (unsigned long long)found,
          (unsigned long long)races);
    if (found != races)
        print_reports();
    sim_test_end();
}

static void kernel(OOCUstream stream, size_t offset, size_t bytes, int is_write) {
    const OOSimRange range = {memory + offset, bytes};
    OK(cu.simLaunch(stream, &range, is_write ? 0 : 1, &range, is_write ? 1 : 0, 1e-6));
}

CASE(rules) {
    rule_begin();
    kernel(s1, 0, 100, 1);
    kernel(s2, 100, 100, 1);
    kernel(s1, 200, 100, 0);
    kernel(s2, 200, 100, 0);
    rule_end(0, "neighbours and two reads do not conflict");

    rule_begin();
    kernel(s1, 0, 100, 1);
    kernel(s2, 99, 100, 1);
    rule_end(1, "one byte in common is a race");

    rule_begin();
    kernel(s1, 0, 100, 0);
    kernel(s2, 50, 10, 1);
    rule_end(1, "write after read");

    rule_begin();
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    kernel(s1, 100, 100, 1);
    OK(cu.cuStreamWaitEvent(s2, e1, 0));
    kernel(s2, 0, 100, 1);
    kernel(s2, 100, 100, 1);
    rule_end(1, "an event covers what came before its record, not after");

    rule_begin();
    OK(cu.cuEventRecord(e1, s1));
    OK(cu.cuStreamWaitEvent(s2, e1, 0)); /* holds the first record for good */
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    kernel(s2, 0, 100, 1);
    rule_end(1, "a re-record does not change an earlier wait");

    rule_begin();
    OK(cu.cuStreamWaitEvent(s2, e1, 0));
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    kernel(s2, 0, 100, 1);
    rule_end(1, "a wait for an event never recorded waits for nothing");

    rule_begin();
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    OK(cu.cuEventSynchronize(e1));
    kernel(s2, 0, 100, 1);
    OK(cu.simHostAccess((void *)memory, 100, 0));
    rule_end(1,
             "what the host has waited for is before what it queues (the read of the host races)");

    rule_begin();
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    while (cu.cuEventQuery(e1) == OOCU_ERROR_NOT_READY)
        ;
    kernel(s2, 0, 100, 1);
    rule_end(0, "a query that says ready orders like a wait");

    rule_begin();
    kernel(s1, 0, 100, 1);
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(s1));
    kernel(s2, 0, 100, 1);
    rule_end(1, "a query that says not ready orders nothing");

    rule_begin();
    kernel(s1, 0, 100, 1);
    OK(cu.cuEventRecord(e1, s1));
    OK(cu.cuStreamWaitEvent(s2, e1, 0));
    OK(cu.cuEventRecord(e2, s2));
    OK(cu.cuEventSynchronize(e2));
    OK(cu.simHostAccess((void *)memory, 100, 1));
    rule_end(0, "order is transitive over streams");

    rule_begin();
    OK(cu.cuMemcpyHtoDAsync(memory, pinned, 100, s1));
    OK(cu.simHostAccess(pinned, 100, 0)); /* reading along is fine */
    OK(cu.simHostAccess(pinned + 50, 1, 1));
    rule_end(1, "a pinned source is read at copy time");

    rule_begin();
    OK(cu.cuMemcpyDtoHAsync(pinned, memory, 100, s1));
    OK(cu.simHostAccess(pinned, 1, 0));
    rule_end(1, "a gradient is read before it has arrived");

    rule_begin();
    kernel(s1, 0, 100, 1);
    OK(cu.cuStreamDestroy(s1));
    s1 = new_stream();
    kernel(s1, 0, 100, 1);
    rule_end(1, "a new stream is not the destroyed one");

    rule_begin();
    OOCUdeviceptr other = device_bytes(SIZE);
    OK(cu.cuMemcpyHtoDAsync(memory, pinned, 100, s1));
    OK(cu.cuStreamSynchronize(s1));
    OK(cu.cuMemFree(other)); /* may wait in fact, and must not count as order */
    kernel(s1, 0, 100, 1);
    OK(cu.cuMemFree(memory)); /* no copy is in flight; the kernel is the caller's business */
    rule_end(0, "freeing");

    /* The legacy stream, blocking streams, the per-thread stream. */
    for (int blocking = 0; blocking < 2; blocking++) {
        rule_begin();
        OK(cu.cuStreamDestroy(s1));
        OK(cu.cuStreamCreateWithPriority(
            &s1, blocking ? OOCU_STREAM_DEFAULT : OOCU_STREAM_NON_BLOCKING, 0));
        kernel(s1, 0, 100, 1);
        kernel(NULL, 0, 100, 1);
        kernel(s1, 0, 100, 1);
        rule_end(blocking ? 0 : 2,
                 blocking ? "the legacy stream and a blocking stream wait for each other"
                          : "a non-blocking stream is exempt");
    }
    rule_begin();
    kernel(OOCU_STREAM_PER_THREAD, 0, 100, 1);
    kernel(OOCU_STREAM_LEGACY, 0, 100, 1);
    kernel(OOCU_STREAM_PER_THREAD, 0, 100, 1);
    rule_end(0, "the per-thread stream is a blocking one");

    rule_begin();
    OK(cu.cuStreamDestroy(s1));
    OK(cu.cuStreamCreateWithPriority(&s1, OOCU_STREAM_DEFAULT, 0));
    kernel(s1, 0, 100, 1);
    kernel(OOCU_STREAM_PER_THREAD, 0, 100, 1);
    rule_end(1, "two blocking streams do not wait for each other");
}

/* ---- poison ---- */

static int is_poison(const void *bytes, size_t count) {
    const unsigned char *at = bytes;
    for (size_t i = 0; i < count; i++)
        if (at[i] != 0xFF)
            return 0;
    return 1;
}

CASE(bytes_that_have_not_arrived_are_nan) {
    for (int schedule = SIM_TIMED; schedule <= SIM_STARVE_COPY; schedule += SIM_STARVE_COPY) {
        sim_test_begin(schedule, 0);
        OOCUstream copies = new_stream(), compute = new_stream();
        OOCUevent used = new_event(), ready = new_event();
        OOCUdeviceptr slot = device_bytes(SIZE);
        char *host = host_bytes(2 * SIZE);
        CHECK(is_poison((void *)slot, SIZE) && is_poison(host, 2 * SIZE), "fresh memory");
        memset(host, 1, SIZE);
        memset(host + SIZE, 2, SIZE);
        OK(cu.cuMemcpyHtoDAsync(slot, host, SIZE, copies));
        OK(cu.cuEventRecord(ready, copies));
        OK(cu.cuStreamWaitEvent(compute, ready, 0));
        OOSimRange range = {slot, SIZE};
        OK(cu.simLaunch(compute, &range, 1, NULL, 0, 1e-3));
        CHECK(*(char *)slot == 1, "the first copy has arrived");
        OK(cu.cuEventRecord(used, compute));
        /* Queued behind the kernel: the slot must stay what the kernel reads until it has ended. */
        OK(cu.cuStreamWaitEvent(copies, used, 0));
        OK(cu.cuMemcpyHtoDAsync(slot, host + SIZE, SIZE, copies));
        if (schedule == SIM_TIMED)
            CHECK(*(char *)slot == 1, "poisoned at the call, not in stream order");
        OK(cu.simAdvance(1.2e-3)); /* the kernel has ended, the copy not */
        OK(cu.cuEventSynchronize(used));
        if (schedule == SIM_STARVE_COPY) {
            CHECK(is_poison((void *)slot, SIZE), "a runnable copy that has not run");
            OK(cu.simLaunch(compute, NULL, 0, NULL, 0, 0));
            CHECK(is_poison((void *)slot, SIZE), "a launch without the wait ran the copy");
        }
        OK(cu.cuStreamSynchronize(copies));
        CHECK(*(char *)slot == 2, "the second copy");
        OK(cu.simSwitch(SIM_COPY_NOTHING, 1));
        OK(cu.cuMemcpyHtoDAsync(slot, host, SIZE, copies));
        OK(cu.cuStreamSynchronize(copies));
        CHECK(*(char *)slot == 2, "a broken driver moves no byte");
        OK(cu.simSwitch(SIM_COPY_NOTHING, 0));
        OK(cu.simSwitch(SIM_POISON, 0));
        OK(cu.cuMemcpyHtoDAsync(slot, host, SIZE, copies));
        CHECK(*(char *)slot == 2, "poisoned though switched off");
        OK(cu.cuStreamSynchronize(copies));
        sim_test_end();
    }
}

/* Before simAdopt and after simDrop the memory is written on the stream of its lender. */
CASE(lent_memory_is_its_lenders_before_and_after) {
    for (int ordered = 0; ordered < 2; ordered++) {
        for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
            sim_test_begin(schedule, 5);
            OOCUstream lender = new_stream(), copies = new_stream();
            OOCUevent event = new_event();
            char *arena = malloc(SIZE), *host = host_bytes(SIZE);
            const OOSimRange range = {(OOCUdeviceptr)arena, SIZE};
            OK(cu.simAdopt((OOCUdeviceptr)arena, SIZE, OOSIM_ADOPT_KEEP, lender));
            if (ordered) {
                OK(cu.cuEventRecord(event, lender));
                OK(cu.cuStreamWaitEvent(copies, event, 0));
            }
            OK(cu.cuMemcpyHtoDAsync((OOCUdeviceptr)arena, host, SIZE, copies));
            CHECK(reports_of("race:") == (ordered ? 0u : 1u), "adopt, ordered %d", ordered);
            OK(cu.cuStreamSynchronize(copies));
            OK(cu.simLaunch(copies, &range, 1, NULL, 0, 1e-3));
            if (ordered) {
                OK(cu.cuEventRecord(event, copies));
                OK(cu.cuStreamWaitEvent(lender, event, 0));
            }
            OK(cu.simDrop((OOCUdeviceptr)arena));
            CHECK(reports_of("race:") == (ordered ? 0u : 2u), "drop, ordered %d", ordered);
            OK(cu.simReportsClear());
            free(arena);
            sim_test_end();
        }
    }
    sim_test_begin(SIM_TIMED, 0);
    char *arena = malloc(SIZE);
    OOCUstream lender = new_stream();
    OK(cu.simAdopt((OOCUdeviceptr)arena, SIZE, 0, lender));
    OK(cu.cuStreamDestroy(lender));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.simAdopt((OOCUdeviceptr)arena + SIZE, 1, 0, lender));
    OK(cu.simDrop((OOCUdeviceptr)arena)); /* a stream that is gone writes nothing any more */
    free(arena);
    sim_test_end();
}

CASE(adopted_memory_is_device_memory) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream();
    char *arena = malloc(2 * SIZE), *host = host_bytes(SIZE);
    struct sim_live live;
    memset(arena, 3, 2 * SIZE);
    memset(host, 4, SIZE);
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync((OOCUdeviceptr)arena, host, SIZE, stream));
    OK(cu.simAdopt((OOCUdeviceptr)arena, SIZE, OOSIM_ADOPT_POISON, stream));
    OK(cu.simAdopt((OOCUdeviceptr)arena + SIZE, SIZE, OOSIM_ADOPT_KEEP, stream));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simAdopt((OOCUdeviceptr)arena + 10, SIZE, 0, stream));
    CHECK(is_poison(arena, SIZE) && arena[SIZE] == 3, "poison or keep");
    OK(cu.simGetLive(&live));
    CHECK(live.adopted_bytes == 2 * SIZE && live.device_peak_bytes == 2 * SIZE, "accounted");
    OK(cu.cuMemcpyHtoDAsync((OOCUdeviceptr)arena, host, SIZE, stream));
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.simDrop((OOCUdeviceptr)arena));
    CHECK(reports_of("in flight:") == 1, "dropping under a copy is reported");
    OK(cu.cuStreamSynchronize(stream));
    CHECK(arena[0] == 4, "arrived");
    OK(cu.simDrop((OOCUdeviceptr)arena));
    OK(cu.simDrop((OOCUdeviceptr)arena + SIZE));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simDrop((OOCUdeviceptr)arena));
    CHECK(is_poison(arena, SIZE) && arena[SIZE] == 3, "freed bytes are poison, kept ones are kept");
    OK(cu.simReportsClear());
    free(arena);
    sim_test_end();
}

/* ---- deadlock ---- */

CASE(a_hang_is_reported_and_returns) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        sim_test_begin(schedule, 5);
        OOCUstream copies = new_stream(), compute = new_stream();
        OOCUevent event = new_event();
        OK(cu.simLabelStream(copies, "copies"));
        OK(cu.simLabelStream(compute, "compute"));
        OOCUdeviceptr device = device_bytes(64);
        char *host = host_bytes(64), text[4096] = "";
        OK(cu.simHold(copies, 1));
        OK(cu.cuMemcpyHtoDAsync(device, host, 64, copies));
        OK(cu.cuEventRecord(event, copies));
        OK(cu.cuStreamWaitEvent(compute, event, 0));
        IS(OOCU_ERROR_UNKNOWN, cu.cuStreamSynchronize(compute));
        CHECK(reports_of("deadlock:") == 1, "%s", schedule_names[schedule]);
        OK(cu.simReport(0, text, sizeof text));
        CHECK(strstr(text, "stream \"compute\": 1 queued, first a event wait") &&
                  strstr(text, "waits for stream \"copies\"") && strstr(text, "held by simHold"),
              "wait graph:\n%s", text);
        OK(cu.simHold(copies, 0));
        OK(cu.cuStreamSynchronize(compute));
        sim_test_end();
    }
}

/* ---- random programs, against order worked out by search ---- */

enum { STREAMS = 4, EVENTS = 4, CELLS = 8, OPS = 40 };

struct step {
    int actor;              /* 0..STREAMS-1, STREAMS: the host */
    unsigned reads, writes; /* bit sets of cells */
};

/* after[i][j]: step i is ordered after step j. */
static unsigned char after[OPS][OPS];

static void order(int step, int before) {
    for (int k = 0; k < OPS; k++)
        after[step][k] |= (unsigned char)(k == before || after[before][k]);
}

/* Whether the detector speaks up at exactly the first step that races. */
static void random_program(uint64_t seed) {
    sim_test_begin(SIM_TIMED + (int)(seed % 6), seed);
    OOCUstream streams[STREAMS];
    OOCUevent events[EVENTS];
    for (int i = 0; i < STREAMS; i++)
        streams[i] = new_stream();
    for (int i = 0; i < EVENTS; i++)
        events[i] = new_event();
    OOCUdeviceptr cells = device_bytes(CELLS * 64);
    struct step steps[OPS] = {{0}};
    int last[STREAMS + 1], recorded[EVENTS], first_race = -1, first_report = -1;
    for (int i = 0; i <= STREAMS; i++)
        last[i] = -1;
    for (int i = 0; i < EVENTS; i++)
        recorded[i] = -1;
    memset(after, 0, sizeof after);
    uint64_t random = seed * 0x9E3779B97F4A7C15u + 99;
    for (int i = 0; i < OPS && first_report < 0 && first_race < 0; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const unsigned pick = (unsigned)(random >> 32);
        const unsigned s = pick % STREAMS, e = (pick >> 4) % EVENTS, kind = (pick >> 8) % 16;
        const unsigned first = (pick >> 12) % CELLS, count = 1 + (pick >> 16) % (CELLS - first);
        const unsigned set = ((1u << count) - 1) << first;
        struct step *step = &steps[i];
        const int on_host = kind >= 13;
        step->actor = on_host ? STREAMS : (int)s;
        if (last[step->actor] >= 0)
            order(i, last[step->actor]);
        if (!on_host && last[STREAMS] >= 0)
            order(i, last[STREAMS]);
        last[step->actor] = i;
        if (kind < 6) {
            const int is_write = (int)(pick >> 24) % 2;
            *(is_write ? &step->writes : &step->reads) = set;
            const OOSimRange range = {cells + first * 64, (size_t)count * 64};
            OK(cu.simLaunch(streams[s], &range, is_write ? 0 : 1, &range, is_write ? 1 : 0, 1e-6));
        } else if (kind < 9) {
            OK(cu.cuEventRecord(events[e], streams[s]));
            recorded[e] = i;
        } else if (kind < 13) {
            OK(cu.cuStreamWaitEvent(streams[s], events[e], 0));
            if (recorded[e] >= 0)
                order(i, recorded[e]);
        } else if (kind == 13) {
            OK(cu.cuEventSynchronize(events[e]));
            if (recorded[e] >= 0)
                order(i, recorded[e]);
        } else if (kind == 14 && (pick >> 20) % 4 == 0) {
            OK(cu.cuStreamSynchronize(streams[s]));
            if (last[s] >= 0)
                order(i, last[s]);
        } else {
            const int is_write = (int)(pick >> 24) % 2;
            *(is_write ? &step->writes : &step->reads) = set;
            OK(cu.simHostAccess((void *)(cells + first * 64), (size_t)count * 64, is_write));
        }
        for (int k = 0; k < i; k++)
            if (!after[i][k] && ((step->writes & (steps[k].reads | steps[k].writes)) ||
                                 (step->reads & steps[k].writes)))
                first_race = i;
        if (cu.simReportCount())
            first_report = i;
    }
    CHECK(first_race == first_report, "program %llu: races at step %d, reported at step %d",
          (unsigned long long)seed, first_race, first_report);
    OK(cu.simReportsClear());
    sim_test_end();
}

/* ---- random correct programs: every schedule computes the same bytes ---- */

static uint64_t random_copies(int schedule, uint64_t seed) {
    enum { BUFFERS = 6, STEPS = 200, BYTES = 256 };
    sim_test_begin(schedule, seed);
    OOCUstream streams[STREAMS];
    OOCUevent touched[BUFFERS]; /* recorded after the last use of a buffer, whatever it was */
    OOCUdeviceptr device[BUFFERS];
    unsigned char *host[BUFFERS];
    for (int i = 0; i < STREAMS; i++)
        streams[i] = new_stream();
    for (int i = 0; i < BUFFERS; i++) {
        touched[i] = new_event();
        device[i] = device_bytes(BYTES);
        host[i] = host_bytes(BYTES);
        memset(host[i], i, BYTES);
        OK(cu.cuMemcpyHtoDAsync(device[i], host[i], BYTES, streams[0]));
    }
    OK(cu.cuStreamSynchronize(streams[0]));
    uint64_t random = seed * 77 + 5, hash = 14695981039346656037u;
    for (int i = 0; i < STEPS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const unsigned pick = (unsigned)(random >> 32);
        OOCUstream stream = streams[pick % STREAMS];
        const unsigned h = (pick >> 4) % BUFFERS, d = (pick >> 8) % BUFFERS,
                       n = 1 + (pick >> 12) % BYTES;
        /* One event per pair (host buffer h, device buffer d): both must be free. */
        OK(cu.cuStreamWaitEvent(stream, touched[h], 0));
        OK(cu.cuStreamWaitEvent(stream, touched[d], 0));
        switch ((pick >> 20) % 4) {
        case 0:
            OK(cu.cuMemcpyHtoDAsync(device[d], host[h], n, stream));
            break;
        case 1:
            OK(cu.cuMemcpyDtoHAsync(host[h], device[d], n, stream));
            break;
        case 2:
            OK(cu.cuMemsetD32Async(device[d], pick, n / 4, stream));
            break;
        default: {
            const OOSimRange range = {device[d], n};
            OK(cu.simLaunch(stream, &range, 1, &range, 1, 1e-6));
            for (unsigned k = 0; k < n; k++)
                ((unsigned char *)device[d])[k] =
                    (unsigned char)(((unsigned char *)device[d])[k] * 31 + k);
        }
        }
        OK(cu.cuEventRecord(touched[h], stream));
        OK(cu.cuEventRecord(touched[d], stream));
        if (pick >> 28 == 0) {
            OK(cu.cuEventSynchronize(touched[h]));
        } else if (pick >> 28 == 1) {
            (void)cu.cuEventQuery(touched[d]);
        }
    }
    for (int i = 0; i < STREAMS; i++)
        OK(cu.cuStreamSynchronize(streams[i]));
    for (int i = 0; i < BUFFERS; i++)
        for (int k = 0; k < BYTES; k++) {
            hash = (hash ^ host[i][k]) * 1099511628211u;
            hash = (hash ^ ((unsigned char *)device[i])[k]) * 1099511628211u;
        }
    CHECK(cu.simReportCount() == 0, "program %llu: a correct program was accused",
          (unsigned long long)seed);
    print_reports();
    sim_test_end();
    return hash;
}

/* A caller that asks, and continues with either answer, is reported only where it was "not ready":
 * what the answer is depends on the schedule, and a query that succeeds is order. */
CASE(a_race_behind_a_query_is_reported_where_it_said_not_ready) {
    int answers = 0;
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        sim_test_begin(schedule, 1);
        const OOCUdeviceptr device = device_bytes(1 << 20);
        void *host = host_bytes(1 << 20);
        OOCUstream stream = new_stream();
        OK(cu.cuMemcpyHtoDAsync(device, host, 1 << 20, stream));
        const OOCUresult answer = cu.cuStreamQuery(stream);
        OK(cu.simHostAccess(host, 1 << 20, 1));
        CHECK((answer == OOCU_ERROR_NOT_READY) == (reports_of("race:") == 1), "%s: %d",
              schedule_names[schedule], answer);
        answers |= answer == OOCU_SUCCESS ? 1 : 2;
        OK(cu.cuStreamSynchronize(stream));
        sim_test_end();
    }
    CHECK(answers == 3, "one answer on all schedules: nothing was shown");
}

CASE(random_programs_have_the_races_of_a_model) {
    for (uint64_t seed = 1; seed <= 3000; seed++)
        random_program(seed);
}

CASE(random_copies_bring_the_same_bytes_on_every_schedule) {
    for (uint64_t seed = 1; seed <= 40; seed++) {
        const uint64_t expected = random_copies(SIM_EAGER, seed);
        for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++)
            CHECK(random_copies(schedule, seed) == expected, "program %llu: other bytes on %s",
                  (unsigned long long)seed, schedule_names[schedule]);
    }
}

CHECK_MAIN(sim_test_open)
