/* Masters: locking and unlocking them, and the ring for those that could not be locked. */
#include "../../csrc/core/masters.h"
#include "world.h"

CASE(test_refused_locks_are_told) {
    struct world w;
    struct oo_host *host, *again;
    world_open(&w, 60000, -1);
    need(oo_host_create(10000, &host), "host");
    sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_OUT_OF_MEMORY, 0);
    ANSWERS(OO_E_LOCK_REFUSED, "cuMemHostRegister", oo_engine_lock(w.engine, host, OO_ALL_BYTES));
    CHECK(!oo_host_locked(host) && stats_of(&w).locked_bytes ==
                                       w.host->mapped_bytes + OO_RING_PIECES * oo__ring_piece_bytes,
          "%llu locked", (unsigned long long)stats_of(&w).locked_bytes);
    oo_host_destroy(host);
    need(oo_host_create(10000, &again), "host");
    need(oo_engine_lock(w.engine, again, 0), "known, not locked");
    CHECK(!oo_host_locked(again), "locked");
    need(oo_engine_unlock(w.engine, again), "unlock");
    CHECK(oo_engine_unlock(w.engine, again) == OO_E_STATE, "unlocked twice");
    /* Someone else has registered it: an error, not a fallback. */
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(sim.cuMemHostRegister_v2(oo_host_address(again), 4096, 0) == 0, "register");
    CHECK(oo_engine_lock(w.engine, again, OO_ALL_BYTES) == OO_E_DRIVER && again->known == NULL,
          "%s", oo_error_message());
    CHECK(sim.cuMemHostUnregister(oo_host_address(again)) == 0, "unregister");
    sim.cuCtxPopCurrent_v2(NULL);
    oo_host_destroy(again);
    world_close(&w, "refused");
}

/* Host memory that cannot be unlocked stays with the engine: freeing the pages under a registration
 * would let copies read another owner's bytes. */
CASE(test_memory_that_cannot_be_unlocked_is_kept) {
    struct world w;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, 10000);
    CHECK(oo_engine_lock(w.engine, host, OO_ALL_BYTES) == OO_E_STATE, "locked twice");
    for (int i = 0; i < 3; i++) {
        static const char *const calls[] = {"cuMemHostUnregister", "cuStreamSynchronize",
                                            "cuStreamSynchronize"};
        fail_call(calls[i], i == 2 ? 2 : 1);
        oo_host_destroy(host);
        CHECK(w.engine->n_known == 2 && host->known->engine == w.engine && host->locked,
              "%d: forgotten", i);
        ((char *)oo_host_address(host))[9999] = 1; /* still there */
    }
    oo_host_destroy(host);
    CHECK(w.engine->n_known == 1, "still known");
    world_close(&w, "kept memory");
}

/* Masters move elsewhere while their copy is still queued: unlocking waits for it. */
CASE(test_unlocking_waits_for_copies_of_masters_that_moved_away) {
    struct world w;
    uint32_t unit, member;
    size_t offset;
    world_open(&w, 60000, -1);
    struct oo_host *host = locked_memory(w.engine, 20000);
    const struct oo_tensor there = {.host = oo_host_address(host), .bytes = 20000},
                           here = {.host = w.master[0], .bytes = w.bytes[0]};
    unit = add_unit(w.engine, w.model, &there, 1, &member, &offset);
    const uintptr_t stream = new_stream(&w);
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 2e-3);
    const struct oo_use held = use_acquire(w.engine, member, stream, "acquire");
    use_end(w.engine, &held, stream, "release");
    need(oo_member_move(w.engine, member, &here, 1, &unit, &offset), "move");
    const double began = sim.simNow();
    need(oo_engine_unlock(w.engine, host), "unlock");
    CHECK(sim.simNow() - began > 1.9e-3, "unlocked after %.6f s", sim.simNow() - began);
    oo_host_destroy(host);
    end_stream(&w, stream);
    world_close(&w, "moved away");
}

/* A piece of the ring whose copy could not be marked is waited for before it is used again. */
CASE(test_a_lost_piece_of_the_ring_is_waited_for) {
    struct world w;
    struct oo_use held;
    char target[5000];
    sim.simSetSchedule(SIM_STARVE_COPY, 0);
    sim.simRefuseRegistration(1);
    world_open_on_device(&w, 60000);
    char *gradient = device_memory(&w, 5000);
    kernel((uintptr_t)w.engine->h2d, NULL, 0, 0, 5e-3); /* uploads are slow */
    fail_call("cuEventRecord", 2);                      /* the copy's begin, then the piece */
    CHECK(try_acquire(&w, 0, 0, &held) == OO_E_DRIVER, "no error");
    CHECK(w.engine->up.lost[0] == 1, "not lost");
    const double began = sim.simNow();
    const uint64_t recoveries = stats_of(&w).recoveries;
    for (unsigned i = 0; i < OO_RING_PIECES; i++) /* as many as the ring has */
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(stats_of(&w).recoveries == recoveries + 1 && sim.simNow() - began > 4.9e-3 &&
              w.engine->up.lost[0] == 0,
          "%llu recoveries, %.6f s", (unsigned long long)(stats_of(&w).recoveries - recoveries),
          sim.simNow() - began);
    /* A copy that failed to queue may have been queued, so it is waited for as well. */
    feeds_end(&w);
    fail_call("cuMemcpyHtoDAsync", 1);
    CHECK(try_acquire(&w, 12, 0, &held) == OO_E_DRIVER, "no error");
    for (unsigned i = 13; i < 13 + OO_RING_PIECES; i++)
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(stats_of(&w).recoveries == recoveries + 2, "%llu recoveries",
          (unsigned long long)(stats_of(&w).recoveries - recoveries));
    /* Downwards a failed download waits itself; the next one starts afresh. */
    fill(gradient, 5000, 1);
    feeds_end(&w);
    fail_call("cuEventRecord", 3); /* computed, begin, piece */
    CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, 5000, w.stream) == OO_E_DRIVER,
          "no error");
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, 5000, w.stream), "again");
    CHECK(memcmp(target, gradient, 5000) == 0, "wrong bytes");
    end_device_memory(&w, gradient);
    sim.simRefuseRegistration(0);
    world_close(&w, "lost piece");
}

/* The beginning of a buffer is locked, and the rest of it passes through the ring. */
CASE(test_a_buffer_is_locked_up_to_where_it_was_asked) {
    struct world w;
    struct oo_host *host;
    const size_t page = oo__page_bytes();
    uint32_t member[2];
    size_t offset[2];
    world_open(&w, 400000, -1);
    need(oo_host_create(6 * page, &host), "host");
    fill(oo_host_address(host), 6 * page, 3);
    const uint64_t before = stats_of(&w).locked_bytes;
    need(oo_engine_lock(w.engine, host, page + 1), "lock");
    CHECK(stats_of(&w).locked_bytes == before + 2 * page + stats_of(&w).ring_bytes,
          "whole pages, and a ring for the rest");
    CHECK(stats_of(&w).ring_bytes == OO_RING_PIECES * oo__ring_piece_bytes, "one way, for now");
    char *base = oo_host_address(host);
    CHECK(oo__known_memory(w.engine, base, 6 * page) &&
              !oo__known_memory(w.engine, base, 6 * page + 1),
          "what ends beyond it is not in it");
    /* Two tensors in a row, one on either side of the boundary, travel as two copies. */
    const struct oo_tensor rows[3] = {{.host = base, .bytes = page},
                                      {.host = base + page, .bytes = page},
                                      {.host = base + 2 * page, .bytes = page}};
    add_unit(w.engine, w.model, rows, 1, &member[0], offset);
    add_unit(w.engine, w.model, rows + 1, 2, &member[1], offset);
    CHECK(stats_of(&w).pageable_bytes == page, "%llu",
          (unsigned long long)stats_of(&w).pageable_bytes);
    for (int i = 0; i < 2; i++) {
        struct oo_use held;
        CHECK(acquire(w.engine, member[i], w.stream, 0, OO_FORWARD, -1, OO_NONBLOCKING, &held) ==
                  (i ? OO_WOULD_BLOCK : OO_OK),
              "%d: only what passes through the ring may block", i);
        if (i)
            held = use_acquire(w.engine, member[i], w.stream, "acquire");
        need(oo_engine_launch(w.engine, member[i], w.stream, 1e-6), "launch");
        CHECK(memcmp((void *)held.address, base + (size_t)i * page, (size_t)(i + 1) * page) == 0,
              "%d: wrong bytes", i);
        use_end(w.engine, &held, w.stream, "release");
    }
    CHECK(stats_of(&w).h2d_copies >= 3, "two parts");
    need(world_remove(&w), "remove");
    need(oo_engine_unlock(w.engine, host), "unlock");
    CHECK(stats_of(&w).locked_bytes == before + stats_of(&w).ring_bytes, "still locked");
    oo_host_destroy(host);
    world_close(&w, "locked in part");
}

/* The wall is found to within a step, below it, and nothing stays locked of trying. */
CASE(test_how_much_may_be_locked_is_found_by_trying) {
    enum { STEP = OO_LOCKABLE_STEP, SIZE = 37 * STEP + 4096 };
    struct world w;
    struct oo_host *host;
    struct sim_live live;
    world_open(&w, 60000, -1);
    sim.simGetLive(&live);
    const uint64_t taken = live.registered_bytes + live.host_alloc_bytes;
    need(oo_host_create(SIZE, &host), "host");
    const size_t rooms[] = {0, STEP - 1, STEP, 3 * STEP, 20 * STEP + 5, SIZE - 1, SIZE, 2 * SIZE};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        size_t found = 1;
        sim.simLockQuota(taken + rooms[i]);
        need(oo_engine_lockable(w.engine, host, &found), "lockable");
        const size_t most = rooms[i] < SIZE ? rooms[i] : SIZE;
        CHECK(found <= most && found + STEP > most, "%zu of %zu", found, rooms[i]);
        struct sim_live after;
        sim.simGetLive(&after);
        CHECK(after.registrations == live.registrations && !oo_host_locked(host), "still locked");
    }
    size_t found;
    sim.simLockQuota(UINT64_MAX);
    /* What cannot be let go at once is tried again; what cannot at all is never freed. */
    fail_call("cuMemHostUnregister", 1);
    need(oo_engine_lockable(w.engine, host, &found), "lockable");
    CHECK(!host->kept && w.engine->n_leaked == 0, "kept");
    need(oo_engine_lock(w.engine, host, OO_ALL_BYTES), "lock");
    CHECK(oo_engine_lockable(w.engine, host, &found) == OO_E_STATE && found == 0, "%s",
          oo_error_message());
    oo_host_destroy(host);
    need(oo_host_create(SIZE, &host), "host");
    char *pages = oo_host_address(host);
    sim.simFault("cuMemHostUnregister", 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
    need(oo_engine_lockable(w.engine, host, &found), "lockable");
    CHECK(host->kept && w.engine->n_leaked == 1, "not kept");
    sim.simFaultClear();
    need(oo_host_destroy(host), "destroy");
    pages[SIZE - 1] = 1; /* still there */
    sim.cuCtxPushCurrent_v2(w.context);
    CHECK(sim.cuMemHostUnregister(pages) == 0, "unregister");
    sim.cuCtxPopCurrent_v2(NULL);
    world_detach(&w);
    CHECK(oo_engine_destroy(w.engine) == OO_LEAKED, "%s", oo_error_message());
    check_no_reports("lockable");
    release_context("lockable");
    CHECK(sim_reset(&sim) == 0, "not reset");
    oo__mutex_destroy(host->mutex); /* what was kept for good; its pages stay */
    free(host);
}

/* Rings that grow are allocated before the old ones are freed; those that shrink are replaced.
 * Without room there are none. */
CASE(test_rings_are_as_large_as_the_system_allows) {
    const size_t page = oo__page_bytes(), piece = OO_RING_PIECES * page;
    struct world w;
    struct oo_host *host;
    world_open(&w, 60000, -1);
    need(oo_engine_reserve_rings(w.engine, 2 * piece + page), "reserve");
    CHECK(stats_of(&w).ring_bytes == 4 * piece, "%llu",
          (unsigned long long)stats_of(&w).ring_bytes);
    const uint64_t taken = stats_of(&w).locked_bytes;
    /* What cannot wait for the old one keeps it, and not the new one too. */
    fail_call("cuStreamSynchronize", 1);
    struct sim_live live;
    CHECK(oo_engine_reserve_rings(w.engine, 3 * piece) == OO_E_DRIVER, "no error");
    sim.simGetLive(&live);
    CHECK(stats_of(&w).locked_bytes == taken &&
              live.registered_bytes + live.host_alloc_bytes == taken,
          "%llu locked", (unsigned long long)(live.registered_bytes + live.host_alloc_bytes));
    sim.simLockQuota(taken);
    CHECK(oo_engine_reserve_rings(w.engine, 3 * piece) == OO_E_LOCK_REFUSED &&
              strstr(oo_error_message(), "cuMemHostAlloc") && stats_of(&w).locked_bytes == taken,
          "%s", oo_error_message());
    need(oo_engine_reserve_rings(w.engine, piece), "shrink");
    CHECK(stats_of(&w).ring_bytes == 2 * piece && stats_of(&w).locked_bytes == taken - 2 * piece,
          "not shrunk");
    need(oo_host_create(page, &host), "host");
    need(oo_engine_lock(w.engine, host, 0), "known");
    need(oo_engine_reserve_rings(w.engine, 0), "needed");
    CHECK(stats_of(&w).ring_bytes == 2 * piece, "given back though memory needs it");
    oo_host_destroy(host);
    need(oo_engine_reserve_rings(w.engine, 0), "not needed");
    CHECK(stats_of(&w).ring_bytes == 0, "kept though nothing needs it");
    sim.simLockQuota(UINT64_MAX);
    need(oo_host_create(page, &host), "host");
    need(oo_engine_lock(w.engine, host, 0), "known");
    CHECK(stats_of(&w).ring_bytes == OO_RING_PIECES * oo__ring_piece_bytes,
          "none when it is needed");
    oo_host_destroy(host);
    need(oo_engine_reserve_rings(w.engine, 1), "too small");
    need(oo_host_create(page, &host), "host");
    need(oo_engine_lock(w.engine, host, 0), "known");
    CHECK(stats_of(&w).ring_bytes == 0, "too small to be one, and asked for no larger");
    oo_host_destroy(host);
    world_close(&w, "rings");
}

/* No byte can be locked: masters and gradients are copied as they are, with the same bytes. */
static void without_a_locked_byte(const char *where) {
    struct world w;
    char *target = malloc(5000);
    sim.simLockQuota(0);
    world_open_on_device(&w, 60000);
    char *gradient = device_memory(&w, 5000);
    fill(gradient, 5000, 9);
    steps(&w, 2, where);
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, 5000, w.stream), where);
    CHECK(memcmp(target, gradient, 5000) == 0, "%s: wrong bytes", where);
    CHECK(stats_of(&w).locked_bytes == 0 && stats_of(&w).pageable_bytes == w.total, "%s: locked",
          where);
    CHECK(sim.simCallCount("cuMemHostAlloc") == 2, "asked for a ring again and again");
    end_device_memory(&w, gradient);
    world_close(&w, where);
    free(target);
}

CASE(test_without_a_locked_byte_the_bytes_are_the_same) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        sim.simSetSchedule(schedule, 5);
        without_a_locked_byte("nothing locked");
    }
}

#if defined(__linux__)

/* Whether the pages are hidden from children, as the kernel tells: "dc", do not copy. */
static int hidden_from_children(const void *address) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    int inside = 0, hidden = -1;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long lo, hi;
        // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion,cert-err34-c): the kernel's
        if (sscanf(line, "%lx-%lx ", &lo, &hi) == 2)
            inside = (uintptr_t)address >= lo && (uintptr_t)address < hi;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            hidden = strstr(line, " dc") != NULL;
    }
    if (maps)
        fclose(maps);
    return hidden;
}

static OOCUresult(OOCUDAAPI *real_register)(void *, size_t, unsigned int);

static int hidden_when_registered;

static OOCUresult OOCUDAAPI spy_register(void *pages, size_t bytes, unsigned int flags) {
    hidden_when_registered = hidden_from_children(pages);
    return real_register(pages, bytes, flags);
}

/* Locked pages must not cross a fork at any time: the kernel would copy them all. */
CASE(test_locked_pages_are_hidden_from_children) {
    struct world w;
    struct oo_host *host;
    world_open(&w, 60000, -1);
    real_register = w.engine->driver.cuMemHostRegister;
    w.engine->driver.cuMemHostRegister = spy_register;
    need(oo_host_create(50000, &host), "host");
    ((char *)oo_host_address(host))[0] = 1;
    if (hidden_from_children(oo_host_address(host)) == 0) { /* not in a container without smaps */
        need(oo_engine_lock(w.engine, host, OO_ALL_BYTES), "lock");
        CHECK(hidden_when_registered == 1,
              "a fork while the pages are being locked would copy them");
        CHECK(hidden_from_children(oo_host_address(host)) == 1,
              "locked pages are copied by a fork");
        need(oo_engine_unlock(w.engine, host), "unlock");
        CHECK(hidden_from_children(oo_host_address(host)) == 0,
              "a child does not see unlocked pages");
        sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_OUT_OF_MEMORY, 0);
        CHECK(oo_engine_lock(w.engine, host, OO_ALL_BYTES) == OO_E_LOCK_REFUSED, "not refused");
        CHECK(hidden_from_children(oo_host_address(host)) == 0,
              "a child does not see refused pages");
    }
    oo_host_destroy(host);
    world_close(&w, "hidden");
}

#endif

CHECK_MAIN(world_prepare)
