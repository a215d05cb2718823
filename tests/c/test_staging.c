/* Pieces of staging memory: who finds none waits for one; memory that goes takes its own alone;
 * what could not be copied is not decoded, and what could not be waited for is waited for later. */
#include "staging.h"
#include "world.h"

static void begin(struct world *w) {
    world_coded = 1;
    world_open(w, 400000, -1);
    world_coded = 0;
    sim.cuCtxPushCurrent_v2(w->context);
}

static void end(struct world *w, const char *where) {
    sim.cuCtxPopCurrent_v2(NULL);
    world_close(w, where);
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

static void who_finds_no_piece_waits_for_one(void) {
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
        for (const double until = oo__clock_s() + 20e-3; oo__clock_s() < until;)
            continue;
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

/* Of two that are lent the first and the second goes, wherever their records lie. */
static void memory_that_goes_takes_its_own_pieces(void) {
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

static void what_could_not_be_copied_is_not_decoded(void) {
    struct world w;
    begin(&w);
    const uint64_t launches = sim.simCallCount("cuLaunchKernel");
    sim.simFault("cuMemcpyHtoDAsync", 1, OOCU_ERROR_UNKNOWN, 0);
    CHECK(use(&w, 1, OO_FORWARD) == OO_E_DRIVER, "no failure");
    CHECK(sim.simCallCount("cuLaunchKernel") == launches, "decoded");
    sim.simFaultClear();
    need(use(&w, 1, OO_FORWARD), "again");
    CHECK(sim.simCallCount("cuLaunchKernel") > launches, "not decoded");
    end(&w, "not copied");
}

/* A wait that the driver has refused is owed still. */
static void decodes_are_loose_until_they_are_waited_for(void) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent"};
    struct world w;
    begin(&w);
    oo__mutex_lock(w.engine->mutex);
    for (int i = 0; i < 2; i++) {
        w.engine->decoder.loose = 1;
        sim.simFault(calls[i], 1, OOCU_ERROR_UNKNOWN, 0);
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

static const struct check_case cases[] = {
    CASE(who_finds_no_piece_waits_for_one),
    CASE(memory_that_goes_takes_its_own_pieces),
    CASE(what_could_not_be_copied_is_not_decoded),
    CASE(decodes_are_loose_until_they_are_waited_for),
};

int main(int argc, char **argv) {
    return check_main(argc, argv, cases, CHECK_COUNT(cases), world_prepare);
}
