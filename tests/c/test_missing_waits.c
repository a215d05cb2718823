/* The race detector is shown each hazard of csrc/core/engine.c (H1 to H8, H11 to H14): one wait is
 * taken out of the engine's driver table, and a report must name what is now unordered, on every
 * schedule. With the wait in place the same calls must be silent. Memory is lent to the engine as
 * torch lends it, so this is also what its tests of training rely on. */
#include "world.h"

enum { STREAM_WAITS = 1, EVENT_WAITS = 2, SYNCHRONISES = 4 };

static struct oo_driver real;
static _Atomic unsigned absent;      /* which waits do nothing */
static OOCUstream _Atomic absent_of; /* of this stream alone; NULL: of all */

static OOCUresult OOCUDAAPI wait_stream(OOCUstream stream, OOCUevent event, unsigned int flags) {
    if (absent & STREAM_WAITS && (!absent_of || absent_of == stream))
        return OOCU_SUCCESS;
    return real.cuStreamWaitEvent(stream, event, flags);
}
static OOCUresult OOCUDAAPI wait_event(OOCUevent event) {
    return absent & EVENT_WAITS ? OOCU_SUCCESS : real.cuEventSynchronize(event);
}
static OOCUresult OOCUDAAPI query_event(OOCUevent event) {
    return absent & EVENT_WAITS ? OOCU_SUCCESS : real.cuEventQuery(event);
}
static OOCUresult OOCUDAAPI synchronise(OOCUstream stream) {
    if (absent & SYNCHRONISES && (!absent_of || absent_of == stream))
        return OOCU_SUCCESS;
    return real.cuStreamSynchronize(stream);
}

static void begin(struct world *w) {
    world_begin(w);
    w->stream = new_stream(w); /* not one of the engine's own */
    real = w->engine->driver;
    w->engine->driver.cuStreamWaitEvent = wait_stream;
    w->engine->driver.cuEventSynchronize = wait_event;
    w->engine->driver.cuEventQuery = query_event;
    w->engine->driver.cuStreamSynchronize = synchronise;
    absent_of = NULL;
}

/* One use whose bytes no case looks at: they are wrong when a wait is missing. */
static void touch(struct world *w, unsigned i, uintptr_t stream) {
    const struct oo_use use = use_begin(w->engine, w->member[i], stream, 1e-3, "acquire");
    use_end(w->engine, &use, stream, "release");
}

static void attach_trainable(struct world *w, size_t arena_bytes, int trainable_from) {
    CHECK(world_attach(w, arena_bytes, trainable_from), "attach: %s", oo_error_message());
}

static void attach(struct world *w, size_t arena_bytes) { attach_trainable(w, arena_bytes, -1); }

static void detach(struct world *w) {
    absent = 0;
    (void)world_remove(w); /* unless the test has */
    end_memory(w->engine, w->host);
    world_free(w);
}

/* ---- the hazards: each takes the waits that it shall do without ---- */

static void a_kernel_before_its_copy_has_arrived(struct world *w, unsigned missing) {
    uintptr_t compute;
    attach(w, 400000);
    need(oo_engine_compute_stream(w->engine, &compute), "compute stream");
    absent = missing;
    touch(w, 0, compute);
    detach(w);
}

static void a_copy_over_bytes_still_read(struct world *w, unsigned missing) {
    attach(w, 30000);
    touch(w, 0, w->stream);
    absent = missing;
    absent_of = w->engine->h2d;
    for (unsigned i = 1; i < UNITS; i++)
        touch(w, i, w->stream);
    detach(w);
}

static void a_copy_before_the_lender_has_finished(struct world *w, unsigned missing) {
    absent = missing;
    attach(w, 60000);
    absent = 0;
    touch(w, 0, w->stream);
    detach(w);
}

static void bytes_given_back_under_a_kernel(struct world *w, unsigned missing) {
    attach(w, 60000);
    const uintptr_t other = new_stream(w);
    touch(w, 0, other);
    absent = missing;
    need(world_remove(w), "remove");
    detach(w);
    end_stream(w, other);
}

static void bytes_given_back_under_a_copy(struct world *w, unsigned missing) {
    attach(w, 60000);
    touch(w, 0, w->stream); /* and copies ahead units that no stream waits for */
    absent = missing;
    CHECK(world_remove(w) == (missing ? OO_E_DRIVER : OO_OK), "removed: %s", oo_error_message());
    detach(w);
}

static void masters_unlocked_under_a_copy(struct world *w, unsigned missing) {
    attach(w, 60000);
    need(world_remove(w), "remove");
    char *slot = device_memory(w, 4096);
    sim.cuCtxPushCurrent_v2(w->context);
    /* As of a unit whose masters have moved elsewhere since. */
    CHECK(real.cuMemcpyHtoDAsync((OOCUdeviceptr)slot, w->master[0], 4096, w->engine->h2d) == 0,
          "no copy");
    sim.cuCtxPopCurrent_v2(NULL);
    absent = missing;
    CHECK(oo_engine_unlock(w->engine, w->host) == (missing ? OO_E_DRIVER : OO_OK), "unlocked: %s",
          oo_error_message());
    absent = 0;
    if (missing)
        need(oo_engine_unlock(w->engine, w->host), "unlock");
    oo_host_destroy(w->host);
    end_device_memory(w, slot);
    free(w->arena);
}

static void masters_rewritten_under_a_copy(struct world *w, unsigned missing) {
    attach(w, 60000);
    touch(w, 0, w->stream);
    absent = missing;
    need(oo_model_remove(w->engine, w->model), "remove");
    w->attached = 0;
    CHECK(sim.simHostAccess(oo_host_address(w->host), w->total, 1) == 0, "refused");
    detach(w);
}

/* A forward without a backward: no gradient arrives that would tell of the copies. */
static void masters_stepped_under_a_copy(struct world *w, unsigned missing) {
    attach_trainable(w, 60000, 3);
    touch(w, 4, w->stream);
    absent = missing;
    need(oo_engine_hold(w->engine), "hold");
    for (unsigned i = 3; i < UNITS; i++)
        CHECK(sim.simHostAccess(w->master[i], w->bytes[i], 1) == 0, "refused");
    detach(w);
}

/* Queue a kernel that reads the masters of a unit in place. */
static void read_in_place(struct world *w, unsigned i) {
    const struct oo_request request = {
        .member = w->member[i], .stream = w->stream, .seconds = 1e-3};
    uintptr_t address;
    need(oo_engine_map(w->engine, &request, 0, &address), "map");
    need(oo_engine_unmap(w->engine, w->member[i], w->stream), "unmap");
}

static void masters_stepped_under_a_kernel(struct world *w, unsigned missing) {
    attach(w, 60000);
    read_in_place(w, 3);
    absent = missing;
    need(oo_engine_hold(w->engine), "hold");
    CHECK(sim.simHostAccess(w->master[3], w->bytes[3], 1) == 0, "refused");
    absent = 0;
    read_in_place(w, 3); /* which unlocking waits for */
    detach(w);
}

static void masters_given_back_under_a_kernel(struct world *w, unsigned missing) {
    attach(w, 60000);
    read_in_place(w, 3);
    absent = missing;
    need(oo_model_remove(w->engine, w->model), "remove");
    CHECK(sim.simHostAccess(w->master[3], w->bytes[3], 1) == 0, "refused");
    absent = 0;
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(real.cuStreamSynchronize((OOCUstream)w->stream) == 0, "not ended");
    sim.cuCtxPopCurrent_v2(NULL);
    w->leased = 0;
    need(oo_lease_remove(w->engine, w->lease), "remove");
    end_memory(w->engine, w->host);
    free(w->arena);
}

static void masters_unlocked_under_a_kernel(struct world *w, unsigned missing) {
    uint32_t unit;
    size_t offset;
    attach(w, 60000);
    struct oo_host *other = locked_memory(w->engine, w->bytes[3]);
    const struct oo_tensor there = {.host = oo_host_address(other), .bytes = w->bytes[3]};
    const struct oo_tensor home = {.host = w->master[3], .bytes = w->bytes[3]};
    need(oo_member_move(w->engine, w->member[3], &there, 1, &unit, &offset), "move");
    read_in_place(w, 3);
    need(oo_member_move(w->engine, w->member[3], &home, 1, &unit, &offset), "move");
    absent = missing;
    CHECK(oo_engine_unlock(w->engine, other) == (missing ? OO_E_DRIVER : OO_OK), "unlocked: %s",
          oo_error_message());
    absent = 0;
    if (missing) {
        sim.cuCtxPushCurrent_v2(w->context);
        CHECK(real.cuStreamSynchronize((OOCUstream)w->stream) == 0, "not ended");
        sim.cuCtxPopCurrent_v2(NULL);
        need(oo_engine_unlock(w->engine, other), "unlock");
    }
    oo_host_destroy(other);
    detach(w);
}

static void ring_bytes_rewritten_under_a_copy(struct world *w, unsigned missing) {
    sim.simRefuseRegistration(1);
    attach(w, 400000);
    absent = missing;
    for (unsigned i = 0; i < UNITS; i++)
        touch(w, i, w->stream);
    detach(w);
    sim.simRefuseRegistration(0);
}

static void pageable_masters_rewritten_under_a_copy(struct world *w, unsigned missing) {
    sim.simLockQuota(0);
    attach(w, 60000);
    absent = missing;
    touch(w, 0, w->stream);
    feeds_end(w); /* what is copied ahead is still being read */
    CHECK(sim.simHostAccess(oo_host_address(w->host), w->total, 1) == 0, "refused");
    detach(w);
    sim.simLockQuota(UINT64_MAX);
}

static void a_ring_given_back_under_a_copy(struct world *w, unsigned missing) {
    sim.simRefuseRegistration(1);
    attach(w, 400000);
    touch(w, 0, w->stream); /* and copies ahead units that no stream waits for */
    const size_t smaller = OO_RING_PIECES * oo__page_bytes();
    void *before = w->engine->up.base;
    absent = missing;
    need(oo_engine_reserve_rings(w->engine, smaller), "shrink");
    detach(w);
    if (missing) { /* the driver has refused to free the old one */
        CHECK(w->engine->n_leaked == 1, "not counted as lost");
        w->engine->n_leaked = 0;
        sim.cuCtxPushCurrent_v2(w->context);
        CHECK(real.cuMemFreeHost(before) == OOCU_SUCCESS, "not freed");
        sim.cuCtxPopCurrent_v2(NULL);
    }
    sim.simRefuseRegistration(0);
}

static void download(struct world *w, int locked, unsigned missing) {
    static char gradient[20000]; /* static: what is not waited for may read it later */
    struct oo_host *target;
    attach(w, 60000);
    need(oo_host_create(sizeof gradient, &target), "target");
    if (locked)
        need(oo_engine_lock(w->engine, target, OO_ALL_BYTES), "lock");
    absent = missing;
    need(oo_engine_download(w->engine, oo_host_address(target), (uintptr_t)gradient,
                            sizeof gradient, w->stream),
         "download");
    absent = 0;
    if (locked)
        need(oo_engine_unlock(w->engine, target), "unlock");
    oo_host_destroy(target);
    detach(w);
}

static void a_locked_download(struct world *w, unsigned missing) { download(w, 1, missing); }
static void a_download_by_the_ring(struct world *w, unsigned missing) { download(w, 0, missing); }

/* ---- coded masters ---- */

static void attach_coded(struct world *w, size_t arena_bytes) {
    w->coded = 1;
    world_sizes(w);
    attach(w, arena_bytes);
}

static void a_chunk_decoded_before_it_has_come(struct world *w, unsigned missing) {
    attach_coded(w, 400000);
    absent = missing;
    absent_of = w->engine->decoder.stream;
    touch(w, 1, w->stream);
    detach(w);
}

static void a_piece_overwritten_under_a_decode(struct world *w, unsigned missing) {
    attach_coded(w, 400000);
    absent = missing;
    absent_of = w->engine->h2d;
    for (unsigned i = 0; i < UNITS; i++)
        touch(w, i, w->stream);
    detach(w);
}

static void a_decode_over_bytes_still_read(struct world *w, unsigned missing) {
    attach_coded(w, 30000);
    absent = missing;
    for (unsigned i = 0; i < UNITS; i++) {
        absent_of = w->engine->decoder.stream;
        touch(w, i, w->stream);
    }
    detach(w);
}

/* Acquire units that are not coded as far as there is room for them, then release them. */
static void hold_plain(struct world *w, unsigned from, unsigned end) {
    struct oo_use uses[UNITS];
    unsigned held = 0;
    for (unsigned i = from; i < end; i += 3)
        held += try_acquire(w, i, 0, &uses[held]) == OO_OK;
    CHECK(held > 0, "nothing has room");
    while (held)
        use_end(w->engine, &uses[--held], w->stream, "release");
}

/* Compute until a unit has been decoded ahead that has not been used. */
static void decode_ahead(struct world *w) {
    attach_coded(w, 60000);
    for (unsigned i = 0; i < 4 * UNITS; i++) {
        touch(w, i % UNITS, w->stream);
        for (unsigned k = 0; k < UNITS; k++) {
            const struct oo_unit *unit = &w->engine->units[w->unit[k]];
            if (unit->ready && unit->decodes && !unit->n_uses)
                return;
        }
    }
    CHECK(0, "nothing was decoded ahead");
}

static void a_slot_overwritten_under_a_decode(struct world *w, unsigned missing) {
    decode_ahead(w);
    absent = missing;
    absent_of = w->engine->h2d;
    w->engine->decoder.loose = 0;
    need(oo_engine_refresh(w->engine, OO_ALL_MODELS), "refresh");
    CHECK(w->engine->decoder.loose, "a decode that has not been used is not");
    hold_plain(w, 0, UNITS); /* all over the arena, with nothing copied ahead between them */
    CHECK(!w->engine->decoder.loose, "they are still");
    detach(w);
}

/* What the decode stream alone has waited for: a chunk takes a part of what is being read. */
static void a_rest_overwritten_under_a_kernel(struct world *w, unsigned missing) {
    struct oo_use use;
    attach_coded(w, w->bytes[9]);
    touch(w, 9, w->stream);
    absent = missing;
    absent_of = w->engine->h2d;
    need(try_acquire(w, 10, 0, &use), "acquire");
    hold_plain(w, 15, 16);
    use_end(w->engine, &use, w->stream, "release");
    detach(w);
}

static void a_kernel_before_what_is_not_coded_has_come(struct world *w, unsigned missing) {
    uint32_t unit;
    size_t offsets[2];
    attach_coded(w, 400000);
    const struct oo_tensor both[] = {world_coded_master(w, 1),
                                     {.host = w->master[0], .bytes = w->bytes[0]}};
    need(oo_member_move(w->engine, w->member[1], both, 2, &unit, offsets), "move");
    absent = missing;
    absent_of = w->engine->decoder.stream;
    touch(w, 1, w->stream);
    detach(w);
}

static void bytes_given_back_under_a_decode(struct world *w, unsigned missing) {
    decode_ahead(w);
    absent = missing;
    absent_of = w->engine->decoder.stream;
    need(world_remove(w), "remove");
    detach(w);
}

/* ---- all of them, on every schedule ---- */

/* What the report must name: its kind or memory, and both who are not ordered. */
static int reported(const char *what, const char *earlier, const char *later) {
    char text[2048];
    for (uint64_t i = 0; i < sim.simReportCount(); i++)
        if (sim.simReport(i, text, sizeof text) == 0 && strstr(text, what) &&
            strstr(text, earlier) && strstr(text, later))
            return 1;
    return 0;
}

/* With the wait in place nothing is reported; without it the report names what is unordered. */
static void missed(void (*hazard)(struct world *w, unsigned missing), unsigned wait,
                   const char *what, const char *earlier, const char *later) {
    if (getenv("ORACLE_OFFLOAD_TEST_RACES_OFF")) /* what it asks for is not there */
        return;
    for (int run = 0; run < 2 * (SIM_DELAYED + 1); run++) {
        const int missing = run % 2;
        struct world w;
        char where[64];
        snprintf(where, sizeof where, "schedule %d", run / 2);
        sim.simSetSchedule(run / 2, 7);
        begin(&w);
        hazard(&w, missing ? wait : 0);
        if (missing) {
            CHECK(reported(what, earlier, later), "%s: the missing wait passed unnoticed", where);
            sim.simReportsClear();
        }
        end_stream(&w, w.stream);
        world_end(&w, where);
    }
}

CASE(h1_a_kernel_before_its_copy_has_arrived) {
    missed(a_kernel_before_its_copy_has_arrived, STREAM_WAITS, "of \"unit 0\"",
           "write by a host-to-device copy, stream \"h2d\"",
           "read by a kernel, stream \"compute\"");
}

CASE(h2_a_copy_over_bytes_still_read) {
    missed(a_copy_over_bytes_still_read, STREAM_WAITS, "unit ", "read by a kernel",
           "write by a host-to-device copy, stream \"h2d\"");
}

CASE(h3_a_copy_before_the_lender_has_finished) {
    missed(a_copy_before_the_lender_has_finished, STREAM_WAITS, "of \"unit 0\"",
           "write by a lender of the memory", "write by a host-to-device copy, stream \"h2d\"");
}

CASE(h4_bytes_given_back_under_a_kernel) {
    missed(bytes_given_back_under_a_kernel, STREAM_WAITS, "of \"unit 0\"", "read by a kernel",
           "write by a lender of the memory");
}

CASE(h4_bytes_given_back_under_a_copy) {
    missed(bytes_given_back_under_a_copy, SYNCHRONISES, "in flight: simDrop", "unit ",
           "while a copy or kernel on stream \"h2d\"");
}

CASE(h5_ring_bytes_rewritten_under_a_copy) {
    missed(ring_bytes_rewritten_under_a_copy, EVENT_WAITS, "of \"upload ring\"",
           "read by a host-to-device copy, stream \"h2d\"", "write by a host access");
}

CASE(h6_a_locked_download) {
    missed(a_locked_download, STREAM_WAITS, "of \"gradient\"", "write by a lender of the memory",
           "read by a device-to-host copy, stream \"d2h\"");
}

CASE(h7_masters_unlocked_under_a_copy) {
    missed(masters_unlocked_under_a_copy, SYNCHRONISES, "in flight: cuMemHostUnregister",
           "masters of unit ", "while a copy or kernel on stream \"h2d\"");
}

CASE(h7_masters_rewritten_under_a_copy) {
    missed(masters_rewritten_under_a_copy, SYNCHRONISES, "masters of unit ",
           "read by a host-to-device copy, stream \"h2d\"", "write by a host access");
}

CASE(h7_pageable_masters_rewritten_under_a_copy) {
    missed(pageable_masters_rewritten_under_a_copy, SYNCHRONISES, "masters of unit ",
           "read by a host-to-device copy, stream \"h2d\"", "write by a host access");
}

CASE(h7_masters_stepped_under_a_copy) {
    missed(masters_stepped_under_a_copy, SYNCHRONISES, "masters of unit ",
           "read by a host-to-device copy, stream \"h2d\"", "write by a host access");
}

CASE(h7_masters_stepped_under_a_kernel) {
    missed(masters_stepped_under_a_kernel, EVENT_WAITS, "masters of unit ", "read by a kernel",
           "write by a host access");
}

CASE(h7_masters_given_back_under_a_kernel) {
    missed(masters_given_back_under_a_kernel, EVENT_WAITS, "masters of unit ", "read by a kernel",
           "write by a host access");
}

CASE(h7_masters_unlocked_under_a_kernel) {
    missed(masters_unlocked_under_a_kernel, EVENT_WAITS, "in flight: cuMemHostUnregister",
           "masters of unit ", "while a copy or kernel on stream");
}

CASE(h7_a_ring_given_back_under_a_copy) {
    missed(a_ring_given_back_under_a_copy, SYNCHRONISES, "in flight: cuMemFreeHost", "upload ring",
           "while a copy or kernel on stream \"h2d\"");
}

CASE(h8_the_arrival_of_a_locked_download) {
    missed(a_locked_download, EVENT_WAITS, "race: read-after-write",
           "write by a device-to-host copy, stream \"d2h\"", "read by a host access");
}

CASE(h8_the_arrival_of_a_download_by_the_ring) {
    missed(a_download_by_the_ring, EVENT_WAITS, "of \"download ring\"",
           "write by a device-to-host copy, stream \"d2h\"", "read by a host access");
}

CASE(h4_bytes_given_back_under_a_decode) {
    missed(bytes_given_back_under_a_decode, SYNCHRONISES, "of \"unit ",
           "write by a kernel, stream \"decode\"", "write by a lender of the memory");
}

CASE(h2_a_decode_over_bytes_still_read) {
    missed(a_decode_over_bytes_still_read, STREAM_WAITS, "of \"unit ", "read by a kernel",
           "write by a kernel, stream \"decode\"");
}

CASE(h11_a_chunk_decoded_before_it_has_come) {
    missed(a_chunk_decoded_before_it_has_come, STREAM_WAITS, "of \"staging memory\"",
           "write by a host-to-device copy, stream \"h2d\"", "read by a kernel, stream \"decode\"");
}

CASE(h12_a_piece_overwritten_under_a_decode) {
    missed(a_piece_overwritten_under_a_decode, STREAM_WAITS, "of \"staging memory\"",
           "read by a kernel, stream \"decode\"", "write by a host-to-device copy, stream \"h2d\"");
}

CASE(h13_a_slot_overwritten_under_a_decode) {
    missed(a_slot_overwritten_under_a_decode, STREAM_WAITS, "of \"unit ",
           "write by a kernel, stream \"decode\"",
           "write by a host-to-device copy, stream \"h2d\"");
}

CASE(h13_a_rest_overwritten_under_a_kernel) {
    missed(a_rest_overwritten_under_a_kernel, STREAM_WAITS, "of \"unit 15\"", "read by a kernel",
           "write by a host-to-device copy, stream \"h2d\"");
}

CASE(h14_a_kernel_before_what_is_not_coded_has_come) {
    missed(a_kernel_before_what_is_not_coded_has_come, STREAM_WAITS, "of \"unit 24\"",
           "write by a host-to-device copy, stream \"h2d\"", "read by a kernel");
}

CHECK_MAIN(world_prepare)
