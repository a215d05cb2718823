/* Masters that two engines read: one registration for all engines of a driver, made by the first
 * and ended by the last, in whatever order they go and whatever call fails. */
#include "world.h"

enum { BYTES = 5 * 4096, READERS = 2 };

/* An engine with an arena and one unit, whose masters another engine may read as well. */
struct reader {
    struct oo_engine *engine;
    struct oo_host *host;
    uint32_t lease, model, unit, member;
    uintptr_t stream;
    char *arena;
};

static int failures, leaks; /* of the life that is being lived */

/* Once more, if a call of the driver failed. */
#define REPEAT(call)                                                                               \
    do {                                                                                           \
        enum oo_status repeated = (call);                                                          \
        if (repeated != OO_OK) {                                                                   \
            CHECK(repeated == OO_E_DRIVER && failures == 0, "%s: %s", #call, oo_error_message());  \
            failures++;                                                                            \
            repeated = (call);                                                                     \
        }                                                                                          \
        CHECK(repeated == OO_OK, "%s: %s", #call, oo_error_message());                             \
    } while (0)

static enum oo_status know(struct reader *r, int lock) {
    const enum oo_status status = oo_engine_lock(r->engine, r->host, lock ? OO_ALL_BYTES : 0);
    return status == OO_E_LOCK_REFUSED ? OO_OK : status; /* by the ring, then */
}

static void open_reader(struct reader *r, const char *library, int device, struct oo_host *host,
                        int lock) {
    const struct oo_tensor tensor = {.host = oo_host_address(host), .bytes = BYTES};
    const uint32_t one = 1;
    size_t offset;
    memset(r, 0, sizeof *r);
    r->host = host;
    REPEAT(oo_engine_create(library, device, &r->engine));
    REPEAT(know(r, lock));
    REPEAT(oo_engine_compute_stream(r->engine, &r->stream));
    r->arena = malloc(BYTES + OO_ALIGNMENT);
    REPEAT(oo_lease_add(r->engine, &r->lease));
    REPEAT(
        oo_segment_add(r->engine, r->lease, (uintptr_t)r->arena, BYTES + OO_ALIGNMENT, r->stream));
    REPEAT(oo_model_add(r->engine, &r->model));
    REPEAT(oo_unit_add(r->engine, r->model, &tensor, &one, 1, 0, &r->unit, &r->member, &offset));
}

/* A use of the masters as they are now. */
static void read_masters(struct reader *r, unsigned pattern) {
    struct oo_use use;
    struct oo_fetched fetched;
    fill(oo_host_address(r->host), BYTES, pattern);
    REPEAT(oo_engine_refresh(r->engine, OO_ALL_MODELS));
    REPEAT(
        acquire_launched(r->engine, r->member, r->stream, pattern, OO_FORWARD, -1, 20e-6, 0, &use));
    CHECK(memcmp((const void *)use.address, oo_host_address(r->host), BYTES) == 0, "wrong bytes");
    REPEAT(oo_engine_release(r->engine, use.ticket, r->stream, 0, &fetched));
    finish();
    /* The test writes the masters next: it waits as an optimizer's user does. */
    REPEAT(oo_engine_refresh(r->engine, OO_ALL_MODELS));
}

static void let_go(struct reader *r) {
    REPEAT(oo_lease_remove(r->engine, r->lease));
    REPEAT(oo_model_remove(r->engine, r->model));
    REPEAT(oo_engine_unlock(r->engine, r->host));
}

static void close_reader(struct reader *r) {
    let_go(r);
    enum oo_status status = oo_engine_destroy(r->engine);
    if (status == OO_E_DRIVER && failures++ == 0) /* a failed end is reported, not repeated */
        status = oo_engine_destroy(r->engine);
    CHECK(status == OO_OK || (status == OO_LEAKED && failures == 0), "destroy: %s",
          oo_error_message());
    leaks += status == OO_LEAKED;
    free(r->arena);
}

static struct oo_host *new_host(void) {
    struct oo_host *host;
    need(oo_host_create(BYTES, &host), "host memory");
    fill(oo_host_address(host), BYTES, 1);
    return host;
}

static uint64_t registrations(void) {
    struct sim_live live;
    sim.simGetLive(&live);
    return live.registrations;
}

static uint64_t contexts(void) {
    struct sim_live live;
    sim.simGetLive(&live);
    return live.contexts;
}

static void end_of_life(const char *where) {
    sim.simFaultClear();
    leave_contexts();
    if (leaks) {
        while (contexts() > 0)
            for (int device = 0; device < READERS; device++)
                sim.cuDevicePrimaryCtxRelease_v2(device);
        sim.simReportsClear();
    }
    CHECK(contexts() == 0, "%s: %llu contexts", where, (unsigned long long)contexts());
    check_no_reports(where);
    check_nothing_alive(where);
    CHECK(sim_reset(&sim) == 0, "%s: not reset", where);
}

/* A life of two engines, each of a device of its own, which read one memory. */
static struct oo_host *open_readers(struct reader *r) {
    struct oo_host *host = new_host();
    failures = leaks = 0;
    for (int i = 0; i < READERS; i++)
        open_reader(&r[i], sim.path, i, host, 1);
    return host;
}

/* The engine that is left goes, and the memory. */
static void close_last(struct reader *r, const char *where) {
    close_reader(r);
    need(oo_host_destroy(r->host), "host memory");
    end_of_life(where);
}

/* ---- one registration ---- */

static void two_devices(int first, const char *where) {
    struct reader r[READERS];
    struct oo_host *host = new_host();
    failures = leaks = 0;
    const uint64_t made = sim.simCallCount("cuMemHostRegister");
    const uint64_t held = sim.simCallCount("cuDevicePrimaryCtxRetain");
    for (int i = 0; i < READERS; i++)
        open_reader(&r[i], sim.path, i, host, 1);
    CHECK(sim.simCallCount("cuMemHostRegister") == made + 1 && registrations() == 1,
          "%s: %llu registrations", where, (unsigned long long)registrations());
    for (int i = 0; i < READERS; i++)
        read_masters(&r[i], 2 + (unsigned)i);
    close_reader(&r[first]);
    /* The registration ends with the context it was made under, unless somebody holds that. */
    CHECK(oo_host_locked(host) && registrations() == 1 && contexts() == (first == 0 ? 2 : 1),
          "%s: %llu registrations, %llu contexts", where, (unsigned long long)registrations(),
          (unsigned long long)contexts());
    CHECK(sim.simCallCount("cuDevicePrimaryCtxRetain") == held + READERS + (first == 0),
          "%s: a context is held that has its engine", where);
    read_masters(&r[1 - first], 4);
    struct oo_stats stats;
    need(oo_engine_stats(r[1 - first].engine, OO_ALL_MODELS, &stats), "stats");
    CHECK(stats.pageable_bytes == 0 && stats.locked_bytes == host->mapped_bytes,
          "%s: %llu pageable bytes", where, (unsigned long long)stats.pageable_bytes);
    close_reader(&r[1 - first]);
    CHECK(!oo_host_locked(host) && registrations() == 0, "%s: still registered", where);
    need(oo_host_destroy(host), "host memory");
    end_of_life(where);
}

CASE(test_two_devices_read_one_buffer) {
    two_devices(0, "the maker goes first");
    two_devices(1, "the maker goes last");
}

CASE(test_two_engines_of_one_device_read_one_buffer) {
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_host *host = new_host();
        failures = leaks = 0;
        for (int i = 0; i < READERS; i++)
            open_reader(&r[i], sim.path, 0, host, 1);
        CHECK(registrations() == 1, "%llu", (unsigned long long)registrations());
        close_reader(&r[first]);
        read_masters(&r[1 - first], 7);
        close_last(&r[1 - first], "one device");
    }
}

/* Who asks for the ring gets it, though the memory is locked for another; and the other way. */
CASE(test_who_does_not_lock_copies_through_the_ring) {
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_stats stats;
        struct oo_host *host = new_host();
        failures = leaks = 0;
        for (int i = 0; i < READERS; i++)
            open_reader(&r[i], sim.path, i, host, i == first);
        CHECK(registrations() == 1 && oo_host_locked(host), "not locked");
        for (int i = 0; i < READERS; i++) {
            read_masters(&r[i], 9 + (unsigned)i);
            need(oo_engine_stats(r[i].engine, OO_ALL_MODELS, &stats), "stats");
            CHECK(stats.pageable_bytes == (i == first ? 0 : BYTES), "%llu pageable bytes",
                  (unsigned long long)stats.pageable_bytes);
        }
        close_reader(&r[first]);
        CHECK(registrations() == 0 && !oo_host_locked(host), "still locked");
        read_masters(&r[1 - first], 11);
        close_last(&r[1 - first], "one through the ring");
    }
}

/* The memory is destroyed while both engines know it: each unlocks it, and is waited for. */
CASE(test_destroying_the_memory_unlocks_it_for_all) {
    struct reader r[READERS];
    struct oo_host *host = new_host();
    failures = leaks = 0;
    for (int i = 0; i < READERS; i++) {
        open_reader(&r[i], sim.path, i, host, 1);
        CHECK(oo_engine_lock(r[i].engine, host, OO_ALL_BYTES) == OO_E_STATE, "known twice");
        need(oo_lease_remove(r[i].engine, r[i].lease), "lease");
    }
    need(oo_model_remove(r[0].engine, r[0].model), "model");
    CHECK(oo_host_destroy(host) == OO_E_STATE, "destroyed under a unit");
    need(oo_model_remove(r[1].engine, r[1].model), "model");
    need(oo_host_destroy(host), "host memory");
    CHECK(registrations() == 0, "still registered");
    for (int i = 0; i < READERS; i++) {
        CHECK(r[i].engine->n_known == 0, "still known");
        need(oo_engine_destroy(r[i].engine), "destroy");
        free(r[i].arena);
    }
    end_of_life("destroyed");
}

/* An engine that lets go and comes back is one of the others then, whether it made the registration
 * or not: one hold on the context is enough. */
CASE(test_an_engine_that_comes_back_is_one_of_the_others) {
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_host *host = open_readers(r);
        const uint64_t held = sim.simCallCount("cuDevicePrimaryCtxRetain");
        need(oo_lease_remove(r[first].engine, r[first].lease), "lease");
        need(oo_model_remove(r[first].engine, r[first].model), "model");
        for (int i = 0; i < 3; i++) {
            need(oo_engine_unlock(r[first].engine, host), "unlock");
            need(oo_engine_lock(r[first].engine, host, OO_ALL_BYTES), "lock");
        }
        CHECK(registrations() == 1 &&
                  sim.simCallCount("cuDevicePrimaryCtxRetain") == held + (first == 0),
              "held %llu times",
              (unsigned long long)(sim.simCallCount("cuDevicePrimaryCtxRetain") - held));
        need(oo_engine_unlock(r[first].engine, host), "unlock");
        need(oo_engine_destroy(r[first].engine), "destroy");
        free(r[first].arena);
        read_masters(&r[1 - first], 30);
        close_last(&r[1 - first], "comes back");
    }
}

/* An engine that is not the last to let go waits for its own copies all the same: the last one does
 * not know of them. */
CASE(test_each_engine_waits_for_its_own_copies) {
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_host *host = open_readers(r);
        struct oo_host *elsewhere = new_host();
        struct reader *slow = &r[first];
        const struct oo_tensor moved = {.host = oo_host_address(elsewhere), .bytes = BYTES};
        struct oo_use use;
        size_t offset;
        need(oo_engine_lock(slow->engine, elsewhere, OO_ALL_BYTES), "lock");
        kernel((uintptr_t)slow->engine->h2d, NULL, 0, 0, 2e-3); /* in front of the copy */
        need(acquire(slow->engine, slow->member, slow->stream, 0, OO_FORWARD, -1, 0, &use),
             "acquire");
        use_end(slow->engine, &use, slow->stream, "release");
        need(oo_member_move(slow->engine, slow->member, &moved, 1, &slow->unit, &offset), "move");
        const double began = sim.simNow();
        need(oo_engine_unlock(slow->engine, host), "unlock");
        CHECK(sim.simNow() - began > 1.9e-3, "unlocked after %.6f s", sim.simNow() - began);
        slow->host = elsewhere;
        close_reader(&r[1 - first]);
        CHECK(registrations() == 1, "%llu registrations", (unsigned long long)registrations());
        close_reader(slow);
        need(oo_host_destroy(host), "host memory");
        need(oo_host_destroy(elsewhere), "host memory");
        end_of_life("a slow copy");
    }
}

enum { ROUNDS = 200 };

struct comer {
    struct oo_engine *engine;
    struct oo_host *host;
    int failures;
};

static void come_and_go(void *argument) {
    struct comer *comer = argument;
    for (int i = 0; i < ROUNDS; i++) {
        comer->failures += oo_engine_lock(comer->engine, comer->host, OO_ALL_BYTES) != OO_OK;
        comer->failures += oo_engine_unlock(comer->engine, comer->host) != OO_OK;
    }
}

/* Each engine has a mutex of its own: what they share is protected by the memory's. */
CASE(test_engines_of_two_threads_come_and_go) {
    struct oo_host *host = new_host();
    struct comer comers[READERS];
    struct oo_thread *threads[READERS];
    failures = leaks = 0;
    for (int i = 0; i < READERS; i++) {
        comers[i] = (struct comer){NULL, host, 0};
        need(oo_engine_create(sim.path, i, &comers[i].engine), "create");
    }
    for (int i = 0; i < READERS; i++) {
        threads[i] = oo__thread_start(come_and_go, &comers[i]);
        CHECK(threads[i], "no thread");
    }
    for (int i = 0; i < READERS; i++) {
        if (threads[i])
            oo__thread_join(threads[i]);
        CHECK(comers[i].failures == 0, "%d failures", comers[i].failures);
    }
    CHECK(registrations() == 0 && !oo_host_locked(host) && !host->known, "somebody is left");
    need(oo_host_destroy(host), "host memory");
    for (int i = 0; i < READERS; i++)
        need(oo_engine_destroy(comers[i].engine), "destroy");
    end_of_life("two threads");
}

/* ---- two drivers ---- */

static int copy_file(const char *from, const char *to) {
    char block[65536];
    size_t bytes;
    FILE *in = fopen(from, "rb");
    if (!in)
        return 0;
    FILE *out = fopen(to, "wb");
    while (out && (bytes = fread(block, 1, sizeof block, in)) > 0)
        if (fwrite(block, 1, bytes, out) != bytes)
            break;
    const int whole = feof(in);
    (void)fclose(in);
    return out && fclose(out) == 0 && whole;
}

/* A registration is its driver's: a second one (here a copy of the simulator, with a state of its
 * own) makes another. */
CASE(test_each_driver_has_a_registration_of_its_own) {
    char path[1024];
    snprintf(path, sizeof path, "%s.%llu", sim.path, (unsigned long long)oo__nanoseconds());
    CHECK(copy_file(sim.path, path), "no copy of %s", sim.path);
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_host *host = new_host();
        failures = leaks = 0;
        for (int i = 0; i < READERS; i++)
            open_reader(&r[i], i ? path : sim.path, 0, host, 1);
        CHECK(host->locked == 2 && registrations() == 1, "%d registrations", host->locked);
        for (int i = 0; i < READERS; i++)
            read_masters(&r[i], 20 + (unsigned)i);
        close_reader(&r[first]);
        CHECK(host->locked == 1 && registrations() == (uint64_t)first, "%d left", host->locked);
        read_masters(&r[1 - first], 22);
        close_reader(&r[1 - first]);
        CHECK(host->locked == 0, "still locked");
        need(oo_host_destroy(host), "host memory");
        end_of_life("two drivers");
    }
    (void)remove(path);
}

/* ---- failures ---- */

/* Returns how many calls the life makes; the n-th fails. */
static uint64_t life(uint64_t nth, int first) {
    struct reader r[READERS];
    struct oo_host *host = new_host();
    char where[64];
    snprintf(where, sizeof where, "call %llu fails, %d goes first", (unsigned long long)nth, first);
    failures = leaks = 0;
    const uint64_t before = sim.simCallCount(NULL);
    if (nth)
        fail_call(NULL, nth);
    for (int i = 0; i < READERS; i++)
        open_reader(&r[i], sim.path, i, host, 1);
    for (int i = 0; i < READERS; i++)
        read_masters(&r[i], (unsigned)nth);
    close_reader(&r[first]);
    read_masters(&r[1 - first], (unsigned)nth + 1);
    close_reader(&r[1 - first]);
    const uint64_t calls = sim.simCallCount(NULL) - before;
    CHECK(registrations() == 0, "%s: still registered", where);
    CHECK(oo_host_destroy(host) == OO_OK, "%s: %s", where, oo_error_message());
    end_of_life(where);
    return calls;
}

/* ORACLE_OFFLOAD_TEST_FAULT_STRIDE thins them out, for the mutation gate. */
CASE(test_each_call_fails_once) {
    const char *stride = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    const uint64_t step = stride ? strtoull(stride, NULL, 10) : 1;
    for (int first = 0; first < READERS; first++) {
        const uint64_t calls = life(0, first);
        for (uint64_t nth = 1; nth <= calls; nth += step ? step : 1)
            life(nth, first);
    }
}

/* A context that is lost takes its registrations with it: nothing is driven, and all is freed. */
CASE(test_a_lost_context_lets_go_without_the_driver) {
    for (int first = 0; first < READERS; first++) {
        struct reader r[READERS];
        struct oo_host *host = open_readers(r);
        for (int i = 0; i < READERS; i++) {
            need(oo_lease_remove(r[i].engine, r[i].lease), "lease");
            need(oo_model_remove(r[i].engine, r[i].model), "model");
        }
        const uint64_t ended = sim.simCallCount("cuMemHostUnregister");
        sim.simFault("cuStreamSynchronize", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
        need(oo_engine_unlock(r[first].engine, host), "unlock as the context is lost");
        CHECK(oo_host_locked(host), "the other's registration is gone");
        (void)oo_engine_resume(r[1 - first].engine); /* learns of it */
        need(oo_engine_unlock(r[1 - first].engine, host), "unlock on a lost context");
        CHECK(!oo_host_locked(host) && sim.simCallCount("cuMemHostUnregister") == ended,
              "a dead engine drives");
        need(oo_host_destroy(host), "host memory");
        for (int i = 0; i < READERS; i++) {
            const enum oo_status status = oo_engine_destroy(r[i].engine);
            CHECK(status == OO_OK || status == OO_LEAKED, "%s", oo_error_message());
            free(r[i].arena);
        }
        leaks = 1;
        end_of_life("a lost context");
    }
}

/* Nor is the maker's context released, which was left to the others. */
CASE(test_a_lost_context_releases_no_other) {
    struct reader r[READERS];
    struct oo_host *host = open_readers(r);
    close_reader(&r[0]);
    need(oo_lease_remove(r[1].engine, r[1].lease), "lease");
    need(oo_model_remove(r[1].engine, r[1].model), "model");
    const uint64_t released = sim.simCallCount("cuDevicePrimaryCtxRelease");
    sim.simFault("cuStreamSynchronize", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    need(oo_engine_unlock(r[1].engine, host), "unlock as the context is lost");
    CHECK(!oo_host_locked(host) && sim.simCallCount("cuDevicePrimaryCtxRelease") == released,
          "a dead engine drives");
    need(oo_host_destroy(host), "host memory");
    CHECK(oo_engine_destroy(r[1].engine) == OO_LEAKED, "no error");
    free(r[1].arena);
    leaks = 1;
    end_of_life("a lost context");
}

static void prepare(void) {
    world_prepare();
    CHECK(sim.simSetDeviceCount(READERS) == 0, "no second device");
}

CHECK_MAIN(prepare)
