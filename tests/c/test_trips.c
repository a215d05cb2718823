/* Bytes that leave the device for a while: every wait of a trip, what is refused, what a failure
 * leaves. The race detector sees what is not ordered. */
#include "world.h"

enum { BYTES = 50000 };

/* A world with device memory that the caller owns, and locked host memory for it. */
struct trips {
    struct world w;
    struct oo_host *host;
    char *here, *there; /* the first device memory, and the one that bytes come back to */
    char *pattern;
};

static void trips_open(struct trips *t) {
    world_open_on_device(&t->w, 60000);
    t->here = device_memory(&t->w, BYTES);
    t->there = device_memory(&t->w, BYTES);
    need(oo_host_create(2 * BYTES, &t->host), "host");
    need(oo_engine_lock(t->w.engine, t->host, OO_ALL_BYTES), "lock");
    t->pattern = malloc(BYTES);
    fill(t->pattern, BYTES, 5);
}

static void trips_close(struct trips *t, const char *where) {
    end_memory(t->w.engine, t->host);
    end_device_memory(&t->w, t->here);
    end_device_memory(&t->w, t->there);
    free(t->pattern);
    world_close(&t->w, where);
}

/* A long kernel computes the bytes on `stream`; they are there when it has been launched. */
static void compute(const struct trips *t, uintptr_t stream) {
    kernel(stream, t->here, BYTES, 1, 1e-3);
    memcpy(t->here, t->pattern, BYTES);
}

static uint64_t leave(const struct trips *t, uintptr_t stream) {
    uint64_t ticket = 0;
    need(oo_trip_out(t->w.engine, oo_host_address(t->host), (uintptr_t)t->here, BYTES, stream,
                     &ticket),
         "out");
    return ticket;
}

static uint64_t come_back(const struct trips *t, uint64_t out, uintptr_t stream) {
    uint64_t ticket = 0;
    need(oo_trip_back(t->w.engine, out, (uintptr_t)t->there, stream, &ticket), "back");
    return ticket;
}

static void join(const struct trips *t, uint64_t ticket, uintptr_t stream) {
    need(oo_trip_join(t->w.engine, ticket, stream), "join");
}

static void end(const struct trips *t, uint64_t ticket) {
    need(oo_trip_end(t->w.engine, ticket), "end");
}

static uint64_t races(void) {
    uint64_t found = 0;
    char text[2048];
    for (uint64_t i = 0; i < sim.simReportCount(); i++)
        if (sim.simReport(i, text, sizeof text) == 0 && strstr(text, "race:"))
            found++;
    sim.simReportsClear();
    return found;
}

CASE(nobody_waits_and_nothing_races) {
    static const int schedules[] = {SIM_TIMED, SIM_RANDOM, SIM_STARVE_COPY, SIM_STARVE_COMPUTE};
    for (unsigned i = 0; i < CHECK_COUNT(schedules); i++) {
        struct trips t;
        trips_open(&t);
        CHECK(sim.simSetSchedule(schedules[i], 3) == 0, "schedule");
        const struct oo_stats before = stats_of(&t.w);
        for (int round = 0; round < 3; round++) {
            compute(&t, t.w.stream);
            const uint64_t out = leave(&t, t.w.stream);
            join(&t, out, t.w.stream);
            kernel(t.w.stream, t.here, BYTES, 1, 1e-3); /* the next owner */
            memset(t.here, 9, BYTES);
            kernel(t.w.stream, t.there, BYTES, 1, 1e-3); /* an earlier owner */
            memset(t.there, 8, BYTES);
            const uint64_t back = come_back(&t, out, t.w.stream);
            join(&t, back, t.w.stream);
            kernel(t.w.stream, t.there, BYTES, 0, 1e-6);
            CHECK(memcmp(t.there, t.pattern, BYTES) == 0, "wrong bytes came back");
            end(&t, back);
            const uint64_t queued = sim.simCallCount("cuStreamWaitEvent");
            end(&t, out);
            CHECK(sim.simCallCount("cuStreamWaitEvent") == queued, "joined once more");
        }
        const struct oo_stats after = stats_of(&t.w);
        CHECK(after.host_waits == before.host_waits, "waited");
        CHECK(after.left_copies - before.left_copies == 3 &&
                  after.left_bytes - before.left_bytes == 3 * BYTES &&
                  after.returned_copies - before.returned_copies == 3 &&
                  after.returned_bytes - before.returned_bytes == 3 * BYTES,
              "counted wrong");
        CHECK(after.d2h_bytes == before.d2h_bytes && after.h2d_bytes == before.h2d_bytes,
              "counted twice");
        check_no_reports("trips");
        trips_close(&t, "trips");
    }
}

/* What the race detector says of a caller who forgets a wait: were it silent here, no test above
 * would show anything. */
CASE(whoever_forgets_to_join_is_told) {
    for (int back = 0; back < 2; back++) {
        struct trips t;
        trips_open(&t);
        compute(&t, t.w.stream);
        const uint64_t out = leave(&t, t.w.stream);
        if (!back) {
            kernel(t.w.stream, t.here, BYTES, 1, 1e-6);
            CHECK(races() > 0, "bytes that leave may be overwritten");
        } else {
            const uint64_t ticket = come_back(&t, out, t.w.stream);
            kernel(t.w.stream, t.there, BYTES, 0, 1e-6);
            CHECK(races() > 0, "bytes may be read before they are back");
            end(&t, ticket);
        }
        end(&t, out);
        trips_close(&t, "forgot");
    }
}

/* The same where torch's memory is lent to the simulated device: it goes back in stream order. */
CASE(lent_memory_goes_back_in_the_order_of_its_stream) {
    struct world w;
    struct sim_live before, during, after;
    static char first[4096], second[4096];
    uint64_t out = 0, again = 0, back = 0;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, sizeof first);
    fill(first, sizeof first, 7);
    sim.simGetLive(&before);
    need(oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)first, sizeof first, w.stream,
                     &out),
         "out");
    sim.simGetLive(&during);
    CHECK(during.adopted_bytes == before.adopted_bytes + sizeof first, "not lent");
    /* A gradient, and another trip, of the same bytes meanwhile. */
    need(oo_engine_download(w.engine, second, (uintptr_t)first, sizeof first, w.stream),
         "download");
    CHECK(memcmp(first, second, sizeof first) == 0, "wrong gradient");
    need(oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)first, sizeof first, w.stream,
                     &again),
         "out again");
    need(oo_trip_join(w.engine, out, w.stream), "join");
    sim.simGetLive(&during);
    CHECK(during.adopted_bytes == before.adopted_bytes + sizeof first, "taken from the other trip");
    need(oo_trip_join(w.engine, again, w.stream), "join");
    sim.simGetLive(&after);
    CHECK(after.adopted_bytes == before.adopted_bytes, "not given back");
    memset(first, 1, sizeof first);
    memset(second, 1, sizeof second);
    need(oo_trip_back(w.engine, out, (uintptr_t)second, w.stream, &back), "back");
    need(oo_trip_join(w.engine, back, w.stream), "join");
    fill(first, sizeof first, 7);
    CHECK(memcmp(first, second, sizeof first) == 0, "wrong bytes came back");
    need(oo_trip_end(w.engine, back), "end");
    need(oo_trip_end(w.engine, again), "end");
    need(oo_trip_end(w.engine, out), "end");
    check_no_reports("lent");
    end_memory(w.engine, host);
    world_close(&w, "lent");
}

/* The simulated device has what a trip lends to it, no other bytes, and not for longer. */
CASE(what_is_lent_is_that_memory_alone) {
    struct world w;
    struct sim_live before, during;
    static char memory[3][4096], target[4096];
    uint64_t out[2] = {0, 0}, refused = 0;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    struct oo_host *host = locked_memory(w.engine, 3 * sizeof target);
    char *const there = oo_host_address(host);
    sim.simGetLive(&before);
    need(oo_trip_out(w.engine, there, (uintptr_t)memory[1], sizeof target, stream, &out[0]), "out");
    for (int i = 0; i < 3; i += 2) /* below it and above it */
        need(oo_engine_download(w.engine, target, (uintptr_t)memory[i], sizeof target, stream),
             "a gradient next to it");
    need(oo_trip_out(w.engine, there + sizeof target, (uintptr_t)memory[2], sizeof target, stream,
                     &out[1]),
         "out");
    need(oo_trip_join(w.engine, out[0], stream), "join");
    sim.simGetLive(&during);
    CHECK(during.adopted_bytes == before.adopted_bytes + sizeof target, "the first is lent still");
    need(oo_engine_download(w.engine, target, (uintptr_t)memory[1], sizeof target, stream),
         "a gradient where it was");
    need(oo_trip_join(w.engine, out[1], stream), "join");
    sim.simGetLive(&during);
    CHECK(during.adopted_bytes == before.adopted_bytes, "the second is lent still");
    static const char *const calls[] = {"simAdopt", "cuMemcpyDtoHAsync", "simDrop"};
    for (int i = 0; i < 3; i++) { /* the last: while it gives back what failed */
        fail_call(i == 2 ? calls[1] : calls[i], 1);
        if (i == 2)
            fail_call(calls[2], 1);
        CHECK(oo_trip_out(w.engine, there, (uintptr_t)memory[0], sizeof target, stream, &refused) ==
                  OO_E_DRIVER,
              "%s: no error", calls[i]);
        sim.simFaultClear();
        sim.simGetLive(&during);
        CHECK((during.adopted_bytes != before.adopted_bytes) == (i == 2) &&
                  w.engine->unfinished == (i == 2 ? (OOCUdeviceptr)memory[0] : 0),
              "%s: lent", calls[i]);
    }
    need(oo_engine_download(w.engine, target, (uintptr_t)memory[0], sizeof target, stream), "next");
    for (int i = 0; i < 2; i++)
        need(oo_trip_end(w.engine, out[i]), "end");
    check_no_reports("lent alone");
    end_memory(w.engine, host);
    end_stream(&w, stream);
    world_close(&w, "lent alone");
}

/* Nothing is queued on a stream that is being captured, and nothing that was left is waited for. */
CASE(a_capturing_stream_is_refused) {
    struct trips t;
    uint64_t none = 0;
    trips_open(&t);
    t.w.engine->unfinished = (OOCUdeviceptr)t.here;
    begin_capture(&t.w, t.w.stream);
    CHECK(oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)t.here, BYTES, t.w.stream,
                      &none) == OO_E_CAPTURE,
          "captured");
    CHECK(t.w.engine->unfinished == (OOCUdeviceptr)t.here, "waited");
    t.w.engine->unfinished = 0;
    end_capture(t.w.stream);
    compute(&t, t.w.stream);
    end(&t, leave(&t, t.w.stream));
    check_no_reports("capture");
    trips_close(&t, "capture");
}

static OOCUresult OOCUDAAPI waits_for_nothing(OOCUevent event) {
    (void)event;
    return OOCU_SUCCESS;
}

/* What a trip waits for on the host is what the host reads then. */
CASE(a_wait_of_the_host_that_is_missing_is_told) {
    struct trips t;
    trips_open(&t);
    const struct oo_driver real = t.w.engine->driver;
    compute(&t, t.w.stream);
    const uint64_t out = leave(&t, t.w.stream);
    t.w.engine->driver.cuEventQuery = t.w.engine->driver.cuEventSynchronize = waits_for_nothing;
    need(oo_trip_await(t.w.engine, out), "await");
    CHECK(races() > 0, "bytes may be read before they have arrived");
    t.w.engine->driver = real;
    end(&t, out);
    trips_close(&t, "missing");
}

/* What was on its way when its memory is forgotten has ended; its records go with the engine. */
CASE(trips_that_nobody_ended_go_with_the_engine) {
    struct world w;
    static char bytes[4096];
    uint64_t out = 0;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, sizeof bytes);
    need(oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)bytes, sizeof bytes, w.stream,
                     &out),
         "out");
    need(oo_engine_unlock(w.engine, host), "unlock");
    CHECK(oo_trip_back(w.engine, out, (uintptr_t)bytes, w.stream, &out) == OO_E_STATE,
          "back from memory that is not locked any more");
    need(oo_host_destroy(host), "destroy");
    world_close(&w, "not ended");
}

CASE(the_host_may_ask_and_wait) {
    struct trips t;
    int arrived = 1;
    trips_open(&t);
    compute(&t, t.w.stream);
    const uint64_t out = leave(&t, t.w.stream);
    need(oo_trip_arrived(t.w.engine, out, &arrived), "ask");
    CHECK(!arrived, "before its kernel has ended");
    const uint64_t waits = stats_of(&t.w).host_waits;
    need(oo_trip_await(t.w.engine, out), "await");
    CHECK(stats_of(&t.w).host_waits == waits + 1, "not counted");
    CHECK(memcmp(oo_host_address(t.host), t.pattern, BYTES) == 0, "wrong bytes");
    need(oo_trip_arrived(t.w.engine, out, &arrived), "ask");
    CHECK(arrived, "it has");
    need(oo_trip_await(t.w.engine, out), "await");
    CHECK(stats_of(&t.w).host_waits == waits + 1, "waited twice");
    const uint64_t back = come_back(&t, out, t.w.stream);
    need(oo_trip_await(t.w.engine, back), "await"); /* the host may write its memory now */
    end(&t, back);
    end(&t, out);
    check_no_reports("await");
    trips_close(&t, "await");
}

/* What comes back is waited for by the stream that uses it, and by the one that allocated it. */
CASE(another_stream_may_use_what_comes_back) {
    struct trips t;
    trips_open(&t);
    const uintptr_t other = new_stream(&t.w);
    compute(&t, t.w.stream);
    const uint64_t out = leave(&t, t.w.stream);
    join(&t, out, other);
    kernel(t.w.stream, t.here, BYTES, 1, 1e-6); /* freed on the stream that allocated it */
    const uint64_t back = come_back(&t, out, t.w.stream);
    join(&t, back, other);
    kernel(other, t.there, BYTES, 0, 1e-6);
    kernel(t.w.stream, t.there, BYTES, 0, 1e-6);
    end(&t, back);
    end(&t, out);
    check_no_reports("another stream");
    end_stream(&t.w, other);
    trips_close(&t, "another stream");
}

/* Each end makes the memory free for the next trip, joined or not. */
CASE(host_memory_is_used_again_at_once) {
    struct trips t;
    trips_open(&t);
    for (int i = 0; i < 4; i++) {
        compute(&t, t.w.stream);
        const uint64_t out = leave(&t, t.w.stream);
        const uint64_t back = come_back(&t, out, t.w.stream);
        if (i % 2)
            join(&t, back, t.w.stream);
        end(&t, back);
        end(&t, out);
    }
    /* From another stream, which nothing else orders after the copy back. */
    const uintptr_t other = new_stream(&t.w);
    compute(&t, t.w.stream);
    const uint64_t first = leave(&t, t.w.stream), back = come_back(&t, first, t.w.stream);
    end(&t, back);
    end(&t, first);
    uint64_t second = 0;
    char *more = device_memory(&t.w, BYTES);
    kernel(other, more, BYTES, 1, 1e-6);
    need(oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)more, BYTES, other, &second),
         "out");
    need(oo_trip_await(t.w.engine, second), "await");
    end(&t, second);
    /* And where the trip out is ended before the one back. */
    compute(&t, t.w.stream);
    const uint64_t third = leave(&t, t.w.stream), late = come_back(&t, third, t.w.stream);
    end(&t, third);
    need(oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)more, BYTES, other, &second),
         "out");
    need(oo_trip_await(t.w.engine, second), "await");
    end(&t, second);
    end(&t, late);
    /* Its record may be that of another trip out by then, which has a copy back of its own. */
    compute(&t, t.w.stream);
    const uint64_t gone = leave(&t, t.w.stream), of_gone = come_back(&t, gone, t.w.stream);
    end(&t, gone);
    const uint64_t next = leave(&t, t.w.stream), of_next = come_back(&t, next, t.w.stream);
    CHECK((uint32_t)next == (uint32_t)gone, "another record");
    end(&t, of_gone);
    end(&t, next);
    need(oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)more, BYTES, other, &second),
         "out");
    need(oo_trip_await(t.w.engine, second), "await");
    end(&t, second);
    end(&t, of_next);
    check_no_reports("again");
    end_device_memory(&t.w, more);
    end_stream(&t.w, other);
    trips_close(&t, "again");
}

CASE(a_thousand_steps_allocate_nothing) {
    enum { AT_ONCE = 80 };
    struct trips t;
    uint64_t out[AT_ONCE], flat = 0;
    trips_open(&t);
    for (int i = 0; i < 1000; i++) {
        const int many = i < 2 ? AT_ONCE : 5; /* the records grow once */
        for (int k = 0; k < many; k++) {
            uint64_t *ticket = &out[k];
            need(oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)t.here, 256,
                             t.w.stream, ticket),
                 "out");
            for (int j = 0; j < k; j++)
                CHECK(out[j] != *ticket, "two trips of one ticket");
        }
        for (int k = 0; k < many; k++) /* in the order of their begin, and in reverse */
            end(&t, out[i % 2 ? k : many - 1 - k]);
        CHECK(oo_trip_end(t.w.engine, out[0]) == OO_E_TICKET, "ended twice");
        if (i == 2)
            flat = stats_of(&t.w).allocations;
    }
    CHECK(stats_of(&t.w).allocations == flat, "grows");
    trips_close(&t, "a thousand steps");
}

CASE(what_is_refused) {
    struct trips t;
    int arrived;
    static char pageable[256];
    uint64_t none = 0;
    trips_open(&t);
    struct oo_engine *engine = t.w.engine;
    const uintptr_t here = (uintptr_t)t.here;
    void *host = oo_host_address(t.host);
    compute(&t, t.w.stream);
    const uint64_t out = leave(&t, t.w.stream), back = come_back(&t, out, t.w.stream);
    CHECK(oo_trip_out(engine, host, here, 0, t.w.stream, &none) == OO_E_ARGUMENT, "no bytes");
    CHECK(oo_trip_out(engine, host, here, SIZE_MAX, t.w.stream, &none) == OO_E_ARGUMENT,
          "all bytes");
    CHECK(oo_trip_out(engine, host, UINTPTR_MAX, 4, t.w.stream, &none) == OO_E_ARGUMENT,
          "from the end of memory");
    CHECK(oo_trip_out(engine, (void *)UINTPTR_MAX, here, 4, t.w.stream, &none) == OO_E_ARGUMENT,
          "to the end of memory");
    ANSWERS(OO_E_STATE, "not page-locked",
            oo_trip_out(engine, pageable, here, 256, t.w.stream, &none));
    CHECK(oo_trip_back(engine, back, here, t.w.stream, &none) == OO_E_ARGUMENT, "back of back");
    CHECK(oo_trip_back(engine, 77, here, t.w.stream, &none) == OO_E_TICKET, "back of none");
    CHECK(oo_trip_end(engine, UINT32_MAX) == OO_E_TICKET, "end of none");
    end(&t, back);
    end(&t, out);
    CHECK(oo_trip_join(engine, out, t.w.stream) == OO_E_TICKET, "join");
    CHECK(oo_trip_await(engine, out) == OO_E_TICKET, "await");
    CHECK(oo_trip_arrived(engine, out, &arrived) == OO_E_TICKET && !arrived, "ask");
    CHECK(oo_trip_end(engine, out) == OO_E_TICKET, "end");
    const uint64_t next = leave(&t, t.w.stream); /* it has the record that was given back last */
    CHECK((uint32_t)next == (uint32_t)out && oo_trip_join(engine, out, t.w.stream) == OO_E_TICKET,
          "an older ticket of the record");
    end(&t, next);
    CHECK(none == 0 && stats_of(&t.w).left_copies == 2 && stats_of(&t.w).returned_copies == 1,
          "counted");
    trips_close(&t, "refused");
}

/* A trip that cannot begin leaves no copy of its memory queued, and can be asked for again. */
CASE(a_trip_that_fails_leaves_nothing) {
    static const struct {
        const char *call;
        uint64_t nth;
        int back, recovers;
    } cases[] = {
        {"cuStreamIsCapturing", 1, 0, 0}, {"cuEventRecord", 1, 0, 0},
        {"cuStreamWaitEvent", 1, 0, 0},   {"cuEventRecord", 2, 0, 0},
        {"cuMemcpyDtoHAsync", 1, 0, 1},   {"cuEventRecord", 3, 0, 1},
        {"cuEventRecord", 1, 1, 0},       {"cuStreamWaitEvent", 1, 1, 0},
        {"cuStreamWaitEvent", 2, 1, 0},   {"cuMemcpyHtoDAsync", 1, 1, 1},
        {"cuEventRecord", 2, 1, 1},
    };
    for (unsigned i = 0; i < CHECK_COUNT(cases); i++) {
        struct trips t;
        uint64_t ticket = 0, out = 0;
        trips_open(&t);
        t.w.engine->spans.seen[OO_TRACE_D2H] = 0; /* the first is measured */
        compute(&t, t.w.stream);
        if (cases[i].back)
            out = leave(&t, t.w.stream);
        const struct oo_stats before = stats_of(&t.w);
        fail_call(cases[i].call, cases[i].nth);
        const enum oo_status status =
            cases[i].back ? oo_trip_back(t.w.engine, out, (uintptr_t)t.there, t.w.stream, &ticket)
                          : oo_trip_out(t.w.engine, oo_host_address(t.host), (uintptr_t)t.here,
                                        BYTES, t.w.stream, &ticket);
        CHECK(status == OO_E_DRIVER && strstr(oo_error_message(), cases[i].call), "%u: %s: %s", i,
              cases[i].call, oo_error_message());
        sim.simFaultClear();
        const struct oo_stats after = stats_of(&t.w);
        CHECK(after.recoveries - before.recoveries == (uint64_t)cases[i].recovers, "%u: recoveries",
              i);
        CHECK(after.left_copies == before.left_copies &&
                  after.returned_copies == before.returned_copies,
              "%u: counted", i);
        kernel(t.w.stream, cases[i].back ? t.there : t.here, BYTES, 1, 1e-6);
        if (!cases[i].back) {
            compute(&t, t.w.stream);
            out = leave(&t, t.w.stream);
        }
        ticket = come_back(&t, out, t.w.stream);
        join(&t, ticket, t.w.stream);
        kernel(t.w.stream, t.there, BYTES, 0, 1e-6);
        CHECK(memcmp(t.there, t.pattern, BYTES) == 0, "%u: wrong bytes", i);
        end(&t, ticket);
        end(&t, out);
        check_no_reports(cases[i].call);
        trips_close(&t, cases[i].call);
    }
}

/* Memory is lent until the last trip of any of its bytes is joined; a failed one is waited for too.
 */
CASE(a_part_of_what_is_lent_may_go_by_itself) {
    enum { WHOLE = 4096, PART = 1024 };
    struct world w;
    struct sim_live before, during, after;
    static char bytes[WHOLE];
    uint64_t out = 0, part = 0, failed = 0;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, WHOLE + 2 * PART);
    char *target = oo_host_address(host);
    fill(bytes, WHOLE, 3);
    sim.simGetLive(&before);
    need(oo_trip_out(w.engine, target, (uintptr_t)bytes, WHOLE, w.stream, &out), "out");
    need(oo_trip_out(w.engine, target + WHOLE, (uintptr_t)bytes + PART, PART, w.stream, &part),
         "part");
    need(oo_trip_join(w.engine, out, w.stream), "join");
    sim.simGetLive(&during);
    CHECK(during.adopted_bytes == before.adopted_bytes + WHOLE, "taken from the part");
    w.engine->spans.seen[OO_TRACE_D2H] = 1; /* none is measured */
    fail_call("cuEventRecord", 2);
    fail_call("cuStreamSynchronize", 1);
    CHECK(oo_trip_out(w.engine, target + WHOLE + PART, (uintptr_t)bytes, PART, w.stream, &failed) ==
              OO_E_DRIVER,
          "no error");
    sim.simFaultClear();
    CHECK(w.engine->unwaited && !w.engine->unfinished, "forgotten");
    const uint64_t waits = stats_of(&w).host_waits;
    need(oo_trip_out(w.engine, target + WHOLE + PART, (uintptr_t)bytes, PART, w.stream, &failed),
         "again");
    CHECK(!w.engine->unwaited && stats_of(&w).host_waits > waits, "not waited for");
    need(oo_trip_end(w.engine, failed), "end");
    need(oo_trip_end(w.engine, out), "end");
    need(oo_trip_await(w.engine, part), "await");
    CHECK(memcmp(target + WHOLE, bytes + PART, PART) == 0, "wrong bytes");
    need(oo_trip_end(w.engine, part), "end");
    sim.simGetLive(&after);
    CHECK(after.adopted_bytes == before.adopted_bytes, "stays lent");
    check_no_reports("part");
    end_memory(w.engine, host);
    world_close(&w, "part");
}

/* Where even waiting fails, or giving back, the lent memory is known until the next copy, whichever
 * way it goes. */
CASE(what_a_failed_trip_left_is_ended_by_the_next) {
    static const struct {
        const char *where, *fails_too;
        int in;
    } ways[] = {{"out twice", "cuStreamSynchronize", 0},
                {"in, then out", "cuStreamSynchronize", 1},
                {"not given back", "simDrop", 0}};
    for (unsigned i = 0; i < CHECK_COUNT(ways); i++) {
        struct world w;
        struct sim_live before, after;
        static char bytes[4096];
        uint64_t ticket = 0;
        world_open(&w, 60000, -1);
        struct oo_host *host = locked_memory(w.engine, sizeof bytes);
        char *there = oo_host_address(host);
        const uintptr_t here = (uintptr_t)bytes;
        sim.simGetLive(&before);
        w.engine->spans.seen[OO_TRACE_D2H] = 1; /* none is measured */
        fail_call("cuEventRecord", 2);
        fail_call(ways[i].fails_too, 1);
        const enum oo_status status =
            ways[i].in ? oo_trip_in(w.engine, here, there, sizeof bytes, w.stream, &ticket)
                       : oo_trip_out(w.engine, there, here, sizeof bytes, w.stream, &ticket);
        CHECK(status == OO_E_DRIVER, "no error");
        sim.simFaultClear();
        CHECK(w.engine->unfinished == here, "%s: forgotten", ways[i].where);
        fail_call("cuStreamSynchronize", 1);
        CHECK(oo_trip_out(w.engine, there, here, sizeof bytes, w.stream, &ticket) == OO_E_DRIVER,
              "%s: no second error", ways[i].where);
        sim.simFaultClear();
        CHECK(w.engine->unfinished == here, "%s: forgotten by the next", ways[i].where);
        need(oo_trip_out(w.engine, there, here, sizeof bytes, w.stream, &ticket), "again");
        CHECK(w.engine->unfinished == 0, "%s: not ended", ways[i].where);
        need(oo_trip_end(w.engine, ticket), "end");
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes, "stays lent");
        check_no_reports(ways[i].where);
        end_memory(w.engine, host);
        world_close(&w, ways[i].where);
    }
}

/* A join, or an end, that fails can be repeated. */
CASE(an_end_that_fails_is_made_again) {
    for (uint64_t nth = 1; nth <= 2; nth++) {
        struct trips t;
        trips_open(&t);
        compute(&t, t.w.stream);
        const uint64_t out = leave(&t, t.w.stream), back = come_back(&t, out, t.w.stream);
        fail_call("cuStreamWaitEvent", nth);
        CHECK(oo_trip_end(t.w.engine, back) == OO_E_DRIVER, "no error");
        end(&t, back);
        fail_call("cuStreamWaitEvent", 1);
        CHECK(oo_trip_join(t.w.engine, out, t.w.stream) == OO_E_DRIVER, "no error");
        end(&t, out);
        kernel(t.w.stream, t.here, BYTES, 1, 1e-6);
        kernel(t.w.stream, t.there, BYTES, 1, 1e-6);
        check_no_reports("repeated");
        trips_close(&t, "repeated");
    }
}

/* Each with its copy's time alone: that back does not begin while the bytes leave. */
CASE(trips_have_rows_in_the_timeline) {
    struct trips t;
    struct oo_trace_row *rows, trip[OO_TRACE_KINDS];
    size_t count;
    unsigned seen[OO_TRACE_KINDS] = {0};
    trips_open(&t);
    need(oo_trace_start(t.w.engine), "trace");
    compute(&t, t.w.stream);
    const uint64_t out = leave(&t, t.w.stream), back = come_back(&t, out, t.w.stream);
    end(&t, back);
    end(&t, out);
    need(oo_trace_stop(t.w.engine, &rows, &count), "trace");
    for (size_t i = 0; i < count; i++)
        if (rows[i].unit == OO_NO_UNIT && rows[i].bytes == BYTES) {
            trip[rows[i].kind] = rows[i];
            seen[rows[i].kind]++;
        }
    CHECK(seen[OO_TRACE_D2H] == 1 && seen[OO_TRACE_H2D] == 1, "rows: %u out, %u back",
          seen[OO_TRACE_D2H], seen[OO_TRACE_H2D]);
    CHECK(trip[OO_TRACE_H2D].start_s >= trip[OO_TRACE_D2H].end_s, "back at %.9f s, gone at %.9f s",
          trip[OO_TRACE_H2D].start_s, trip[OO_TRACE_D2H].end_s);
    oo_trace_free(rows);
    CHECK(stats_of(&t.w).h2d_timed_bytes == 0, "the plan takes it for a unit's copy");
    trips_close(&t, "timeline");
}

/* With the context all copies are lost: records go, and lent memory with them. */
static void lose_context(int in_a_trip) {
    struct world w;
    struct sim_live live;
    static char bytes[4096];
    uint64_t out = 0, failed = 0;
    int arrived = 1;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, sizeof bytes);
    need(oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)bytes, sizeof bytes, w.stream,
                     &out),
         "out");
    sim.simFault(in_a_trip ? "cuMemcpyDtoHAsync" : "cuEventQuery", 1, OOCU_ERROR_ILLEGAL_ADDRESS,
                 0);
    const enum oo_status status =
        in_a_trip ? oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)bytes, sizeof bytes,
                                w.stream, &failed)
                  : oo_trip_arrived(w.engine, out, &arrived);
    CHECK(status == OO_E_DRIVER && arrived == in_a_trip, "the context lives");
    CHECK(w.engine->stats.recoveries == 0 && !w.engine->unwaited, "a lost context is waited for");
    CHECK(oo_trip_join(w.engine, out, w.stream) == OO_E_DEAD, "joined");
    need(oo_trip_end(w.engine, out), "end");
    CHECK(oo_trip_end(w.engine, out) == OO_E_TICKET, "ended twice");
    end_memory(w.engine, host);
    need(world_remove(&w), "remove");
    need(oo_engine_unlock(w.engine, w.host), "unlock");
    need(oo_host_destroy(w.host), "destroy");
    world_free(&w);
    CHECK(oo_engine_destroy(w.engine) == OO_OK, "%s", oo_error_message());
    sim.simGetLive(&live);
    CHECK(live.adopted_bytes == 0, "stays lent");
    sim.simFaultClear();
    release_leaked_contexts();
    CHECK(sim_reset(&sim) == 0, "the simulator could not be reset");
}

CASE(a_lost_context_ends_trips) {
    for (int in_a_trip = 0; in_a_trip < 2; in_a_trip++)
        lose_context(in_a_trip);
}

CHECK_MAIN(world_prepare)
