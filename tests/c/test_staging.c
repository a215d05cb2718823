/* Pieces of staging memory: who finds none waits for one; memory that goes takes its own alone;
 * what could not be copied is not decoded, and what could not be waited for is waited for later. */
#include "staging.h"
#include "uses.h"
#include "world.h"

static void begin(struct world *w) {
    world_open_coded(w, 400000, -1);
    sim.cuCtxPushCurrent_v2(w->context);
}

static void end(struct world *w, const char *where) {
    sim.cuCtxPopCurrent_v2(NULL);
    world_close(w, where);
}

static void nap(double seconds) {
    for (const double until = oo__clock_s() + seconds; oo__clock_s() < until;)
        continue;
}

static struct oo_staging_piece *take(struct world *w, size_t bytes) {
    const struct oo_part part = {.bytes = bytes};
    struct oo_failure failure = {0};
    struct oo_staging_piece *piece = oo__piece_take(w->engine, &part, &failure);
    CHECK(piece && !failure.call, "%s", failure.call ? failure.call : "no piece");
    return piece;
}

struct taker {
    struct world *w;
    size_t bytes;
    struct oo_staging_piece *piece;
    _Atomic int returned;
};

static void take_there(void *argument) {
    struct taker *taker = argument;
    sim.cuCtxPushCurrent_v2(taker->w->context);
    taker->piece = take(taker->w, taker->bytes);
    sim.cuCtxPopCurrent_v2(NULL);
    taker->returned = 1;
}

CASE(who_finds_no_piece_waits_for_one) {
    struct world w;
    begin(&w);
    const size_t bytes = w.engine->decoder.lent->piece_bytes;
    char *little = malloc(4096);
    uint32_t lease;
    need(oo_lease_add(w.engine, &lease), "lease");
    need(oo_staging_add(w.engine, lease, (uintptr_t)little, 4096, w.stream), "too small to help");
    struct oo_staging_piece *pieces[OO_STAGING_PIECES];
    for (int i = 0; i < OO_STAGING_PIECES; i++) {
        pieces[i] = take(&w, bytes);
        CHECK(pieces[i]->bytes == bytes, "%zu bytes", pieces[i]->bytes);
    }
    for (int i = 0; i < OO_STAGING_PIECES; i++) {
        struct taker taker = {&w, bytes, NULL, 0};
        struct oo_thread *thread = oo__thread_start(take_there, &taker);
        nap(20e-3);
        CHECK(!taker.returned, "it has a piece that another has");
        oo__piece_give(w.engine, pieces[i]);
        oo__thread_join(thread);
        CHECK(taker.piece == pieces[i], "another piece");
    }
    for (int i = 0; i < OO_STAGING_PIECES; i++)
        oo__piece_give(w.engine, pieces[i]);
    need(oo_lease_remove(w.engine, lease), "remove");
    end(&w, "waits");
    free(little);
}

/* The pieces that are free, used longest ago first. */
static unsigned free_pieces(const struct world *w, const struct oo_staging_piece *pieces[]) {
    unsigned count = 0;
    for (struct oo_staging_piece *piece = w->engine->decoder.free_first; piece; piece = piece->next)
        pieces[count++] = piece;
    return count;
}

/* Of two leases the first or the second is removed, wherever their records are. */
CASE(memory_that_goes_takes_its_own_pieces) {
    struct world w;
    begin(&w);
    const struct oo_staging_piece *pieces[3 * OO_STAGING_PIECES];
    char *more[2];
    uint32_t leases[2];
    for (int turn = 0; turn < 2; turn++) {
        const struct oo_staging *lent[2];
        for (int i = 0; i < 2; i++) {
            more[i] = malloc(WORLD_STAGING);
            need(oo_lease_add(w.engine, &leases[i]), "lease");
            need(oo_staging_add(w.engine, leases[i], (uintptr_t)more[i], WORLD_STAGING, w.stream),
                 "staging");
            lent[i] = w.engine->decoder.lent;
        }
        CHECK(free_pieces(&w, pieces) == 3 * OO_STAGING_PIECES, "some are taken");
        need(oo_lease_remove(w.engine, leases[turn]), "remove");
        CHECK(free_pieces(&w, pieces) == 2 * OO_STAGING_PIECES, "%u are left",
              free_pieces(&w, pieces));
        for (unsigned i = 0; i < OO_STAGING_PIECES; i++)
            CHECK(pieces[OO_STAGING_PIECES + i] == &lent[!turn]->pieces[i], "turn %d, piece %u",
                  turn, i);
        need(oo_lease_remove(w.engine, leases[!turn]), "remove");
        CHECK(free_pieces(&w, pieces) == OO_STAGING_PIECES, "%u are left", free_pieces(&w, pieces));
        free(more[0]);
        free(more[1]);
    }
    for (unsigned i = 0; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(stats_of(&w).decodes > 0 && stats_of(&w).h2d_bytes > 0, "nothing is decoded");
    end(&w, "goes");
}

CASE(what_could_not_be_copied_is_not_decoded) {
    struct world w;
    begin(&w);
    const uint64_t launches = sim.simCallCount("cuLaunchKernel");
    fail_call("cuMemcpyHtoDAsync", 1);
    CHECK(use(&w, 1, OO_FORWARD) == OO_E_DRIVER, "no failure");
    CHECK(sim.simCallCount("cuLaunchKernel") == launches, "decoded");
    CHECK(stats_of(&w).h2d_bytes == 0 && stats_of(&w).decodes == 0, "counted");
    const struct oo_staging_piece *pieces[OO_STAGING_PIECES];
    CHECK(free_pieces(&w, pieces) == OO_STAGING_PIECES, "a piece is taken still");
    sim.simFaultClear();
    need(use(&w, 1, OO_FORWARD), "again");
    CHECK(sim.simCallCount("cuLaunchKernel") > launches, "not decoded");
    end(&w, "not copied");
}

CASE(a_piece_that_cannot_be_had_is_free_again) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent"};
    const struct oo_staging_piece *pieces[OO_STAGING_PIECES];
    const struct oo_part part = {.bytes = 1};
    struct world w;
    begin(&w);
    for (int i = 0; i < 2; i++) {
        struct oo_failure failure = {0};
        w.engine->decoder.free_first->lost = 1;
        fail_call(calls[i], 1);
        CHECK(!oo__piece_take(w.engine, &part, &failure) && !strcmp(failure.call, calls[i]),
              "%s cannot fail", calls[i]);
        sim.simFaultClear();
        CHECK(free_pieces(&w, pieces) == OO_STAGING_PIECES && pieces[OO_STAGING_PIECES - 1]->lost,
              "%s: it is taken, or not lost", calls[i]);
    }
    end(&w, "cannot be had");
}

/* From the launch on a kernel may read the piece: until the end of that is marked it is lost. */
CASE(a_piece_is_lost_where_its_decode_has_no_mark) {
    static const struct oo_part_times untimed;
    static const struct {
        const char *call;
        int nth, lost;
    } rows[] = {{"cuEventRecord", 1, 0},
                {"cuStreamWaitEvent", 1, 0},
                {"cuLaunchKernel", 1, 1},
                {"cuEventRecord", 2, 1},
                {"cuEventRecord", 3, 0}};
    struct world w;
    begin(&w);
    need(use(&w, 1, OO_FORWARD), "use");
    const struct oo_part *part = &w.engine->units[w.unit[1]].parts[0];
    const uintptr_t target = oo_block_address(oo_plan_resident(w.engine->plan, w.unit[1]));
    w.engine->driver.cuStreamSynchronize((OOCUstream)w.stream);
    w.engine->driver.cuStreamSynchronize(w.engine->decoder.stream);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct oo_failure failure = {0};
        struct oo_staging_piece *piece = take(&w, part->bytes);
        w.engine->driver.cuMemcpyHtoDAsync(piece->address, part->host, part->bytes, w.engine->h2d);
        piece->lost = 0;
        fail_call(rows[i].call, (uint64_t)rows[i].nth);
        const int works =
            oo__piece_decode(w.engine, part, target + part->offset, piece, &untimed, &failure);
        sim.simFaultClear();
        CHECK(works == (i == 4) && (works || !strcmp(failure.call, rows[i].call)), "row %zu", i);
        CHECK(piece->lost == rows[i].lost, "row %zu: lost %d", i, piece->lost);
        oo__piece_give(w.engine, piece);
    }
    end(&w, "lost");
}

/* Launches of kernels, which may be held up; and those that decode from a piece that is free. */
static struct world *watched;
static __typeof__(((struct oo_driver *)0)->cuLaunchKernel) launch;
static _Atomic unsigned launched, from_free;
static _Atomic int shut;

static OOCUresult OOCUDAAPI launch_watched(OOCUfunction kernel, unsigned x, unsigned y, unsigned z,
                                           unsigned threads_x, unsigned threads_y,
                                           unsigned threads_z, unsigned shared_bytes,
                                           OOCUstream stream, void **parameters, void **extra) {
    const struct oo_staging_piece *pieces[2 * OO_STAGING_PIECES];
    oo__mutex_lock(watched->engine->feeder.mutex);
    for (unsigned i = free_pieces(watched, pieces); i-- > 0;)
        from_free += pieces[i]->address == *(OOCUdeviceptr *)parameters[0];
    oo__mutex_unlock(watched->engine->feeder.mutex);
    launched++;
    while (shut)
        nap(1e-3);
    return launch(kernel, x, y, z, threads_x, threads_y, threads_z, shared_bytes, stream,
                  parameters, extra);
}

static void watch(struct world *w) {
    watched = w;
    launched = from_free = 0;
    launch = w->engine->driver.cuLaunchKernel;
    w->engine->driver.cuLaunchKernel = launch_watched;
}

CASE(a_piece_is_taken_until_its_decode_is_queued) {
    for (int fed = 0; fed < 2; fed++) {
        struct world w;
        sim.simRefuseRegistration((uint64_t)fed);
        begin(&w);
        watch(&w);
        for (unsigned i = 0; i < UNITS; i++)
            need(use(&w, i, OO_FORWARD), "use");
        CHECK(launched > 0 && from_free == 0, "fed %d: %u launches, %u from free pieces", fed,
              (unsigned)launched, (unsigned)from_free);
        sim.simRefuseRegistration(0);
        end(&w, "taken");
    }
}

struct remover {
    struct world *w;
    uint32_t lease;
    _Atomic int returned;
};

static void remove_there(void *argument) {
    struct remover *remover = argument;
    need(oo_lease_remove(remover->w->engine, remover->lease), "remove");
    remover->returned = 1;
}

/* Use the first unit: copy threads come to a decode of what is next, and stay there while `shut`.
 */
static void decode_ahead(struct world *w) {
    const struct oo_use first = use_begin(w->engine, w->member[0], w->stream, 1e-6, "acquire");
    shut = 1;
    use_end(w->engine, &first, w->stream, "release");
    for (int i = 0; i < 5000 && !launched; i++)
        nap(1e-3);
    CHECK(launched > 0, "nothing is decoded ahead");
}

/* The units that are copied are in the memory of another lease, which stays. */
CASE(memory_does_not_go_while_a_copy_thread_has_a_piece) {
    struct world w;
    struct oo_staging_piece *pieces[OO_STAGING_PIECES];
    char *more = malloc(WORLD_STAGING);
    struct remover remover = {&w, 0, 0};
    sim.simRefuseRegistration(1);
    begin(&w);
    watch(&w);
    need(oo_lease_add(w.engine, &remover.lease), "lease");
    need(oo_staging_add(w.engine, remover.lease, (uintptr_t)more, WORLD_STAGING, w.stream), "more");
    for (int i = 0; i < OO_STAGING_PIECES; i++)
        pieces[i] = take(&w, 1); /* so that copy threads take the others */
    decode_ahead(&w);
    struct oo_thread *thread = oo__thread_start(remove_there, &remover);
    nap(30e-3);
    CHECK(!remover.returned, "it did not wait for the copy threads");
    shut = 0;
    oo__thread_join(thread);
    for (int i = 0; i < OO_STAGING_PIECES; i++)
        oo__piece_give(w.engine, pieces[i]);
    for (unsigned i = 0; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "use");
    sim.simRefuseRegistration(0);
    end(&w, "a piece that goes");
    free(more);
}

static void use_the_largest(void *argument) { need(use(argument, 9, OO_FORWARD), "use"); }

/* A copy thread queues the decode of a unit that has not been used, while another unit takes its
 * place: what is copied there comes after the decode. */
CASE(a_unit_that_is_decoded_still_loses_its_place_afterwards) {
    struct world w;
    world_sizes(memset(&w, 0, sizeof w));
    sim.simRefuseRegistration(1);
    world_open_coded(&w, w.largest, -1);
    watch(&w);
    decode_ahead(&w);
    struct oo_thread *thread = oo__thread_start(use_the_largest, &w);
    nap(30e-3);
    shut = 0;
    oo__thread_join(thread);
    CHECK(stats_of(&w).evictions > 0, "it had a place of its own");
    sim.simRefuseRegistration(0);
    world_close(&w, "decoded still");
}

/* A wait that the driver has refused is still to be done. */
CASE(decodes_are_loose_until_they_are_waited_for) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent"};
    struct world w;
    begin(&w);
    oo__mutex_lock(w.engine->mutex);
    for (int i = 0; i < 2; i++) {
        w.engine->decoder.loose = 1;
        fail_call(calls[i], 1);
        CHECK(oo__decodes_settle(w.engine) == OO_E_DRIVER, "%s cannot fail", calls[i]);
        sim.simFaultClear();
        const uint64_t waits = sim.simCallCount("cuStreamWaitEvent");
        for (unsigned turn = 0; turn < 2; turn++) {
            need(oo__decodes_settle(w.engine), "settle");
            CHECK(sim.simCallCount("cuStreamWaitEvent") == waits + 1, "%s, turn %u", calls[i],
                  turn);
        }
    }
    oo__mutex_unlock(w.engine->mutex);
    end(&w, "loose");
}

/* What comes after a use comes after what was decoded for it. */
CASE(a_use_leaves_no_decode_loose) {
    struct world w;
    begin(&w);
    need(use(&w, 1, OO_FORWARD), "use");
    oo__mutex_lock(w.engine->mutex);
    need(oo__decodes_settle(w.engine), "settle");
    need(oo__order_after_uses(w.engine, w.unit[1], w.engine->h2d), "order");
    CHECK(!w.engine->decoder.loose, "loose");
    oo__mutex_unlock(w.engine->mutex);
    end(&w, "no decode loose");
}

/* What a lost context had is gone with it. */
CASE(a_dead_engine_destroys_no_decode_stream) {
    struct world w;
    begin(&w);
    sim.simFault("cuStreamWaitEvent", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(use(&w, 1, OO_FORWARD) == OO_E_DRIVER && !w.engine->usable, "it lives");
    const uint64_t destroyed = sim.simCallCount("cuStreamDestroy");
    sim.cuCtxPopCurrent_v2(NULL);
    need(world_remove(&w), "remove");
    oo_host_destroy(w.host);
    oo_engine_destroy(w.engine);
    CHECK(sim.simCallCount("cuStreamDestroy") == destroyed, "%llu streams",
          (unsigned long long)(sim.simCallCount("cuStreamDestroy") - destroyed));
    leave_contexts();
    release_leaked_contexts();
    world_free(&w);
    check_nothing_alive("dead");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

CHECK_MAIN(world_prepare)
