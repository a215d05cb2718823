/* Units whose masters the device rewrites, as an optimizer's step does: where its copy is right it
 * is written, too, and stays; nothing else is trusted, or fetched ahead, meanwhile. */
#include "world.h"

enum { ARENA = 400000, SMALL = 60000 }; /* of 24 units: all of them, or a few */

static struct oo_stamp stamp_of(const struct world *w, unsigned i, uint64_t stamp) {
    return (struct oo_stamp){.member = w->member[i], .stamp = stamp};
}

static uintptr_t rewrite(struct world *w, unsigned i, uint64_t before, uintptr_t stream) {
    const struct oo_stamp stamp = stamp_of(w, i, before);
    uintptr_t address = 1;
    need(oo_unit_rewrite(w->engine, w->unit[i], &stamp, 1, stream, &address), "rewrite");
    return address;
}

static void rewritten(struct world *w, unsigned i, uint64_t now, int is_right, uintptr_t stream) {
    const struct oo_stamp stamp = stamp_of(w, i, now);
    need(oo_unit_rewritten(w->engine, w->unit[i], &stamp, is_right ? 1 : 0, stream), "rewritten");
}

/* A kernel of `seconds` steps the copy at `address`, which goes home; the trip is awaited. */
static void step_copy(struct world *w, unsigned i, uintptr_t address, unsigned pattern,
                      double seconds, uintptr_t stream) {
    uint64_t ticket = 0;
    kernel(stream, (const void *)address, w->bytes[i], 1, seconds);
    fill((char *)address, w->bytes[i], pattern);
    need(oo_trip_home(w->engine, w->master[i], address, w->bytes[i], stream, &ticket), "home");
    need(oo_trip_await(w->engine, ticket), "await");
    need(oo_trip_end(w->engine, ticket), "end");
}

static int resident(struct world *w, unsigned i) {
    return oo_plan_resident(w->engine->plan, w->unit[i]) != NULL;
}

static uint64_t copied(struct world *w) { return stats_of(w).h2d_copies; }

/* The copy is the one that the next forward computes with. */
CASE(what_is_stepped_in_the_arena_stays) {
    struct world w;
    world_open_on_device(&w, ARENA);
    steps(&w, 2, "step");
    uint64_t before = copied(&w);
    for (unsigned i = 0; i < UNITS; i++) {
        const uintptr_t address = rewrite(&w, i, 0, w.stream);
        CHECK(address == oo_block_address(oo_plan_resident(w.engine->plan, w.unit[i])),
              "unit %u is stepped elsewhere", i);
        CHECK(oo_plan_pins(w.engine->plan, w.unit[i]) == 1, "two uses");
        step_copy(&w, i, address, 100 + i, 1e-5, w.stream);
    }
    for (unsigned i = 0; i < UNITS; i++)
        rewritten(&w, i, 1, 1, w.stream);
    const uint64_t stale = stats_of(&w).stale;
    for (unsigned i = 0; i < UNITS; i++)
        need(use_on(&w, i, OO_FORWARD, -1, 1, w.stream), "forward");
    CHECK(copied(&w) == before && stats_of(&w).stale == stale, "copied again");
    /* What is stepped is watched as before: a stamp, and samples. */
    w.master[3][0] ^= 1;
    need(use_on(&w, 3, OO_FORWARD, -1, 1, w.stream), "a byte was written");
    need(use_on(&w, 4, OO_FORWARD, -1, 2, w.stream), "a stamp tells of it");
    CHECK(stats_of(&w).stale == stale + 2, "not seen");
    world_close(&w, "stays");
}

/* Only a copy that is right is stepped; all others are dropped, and one without a stamp is not
 * trusted. */
CASE(what_is_not_right_goes) {
    struct world w;
    world_open_on_device(&w, ARENA);
    steps(&w, 2, "step");
    CHECK(!rewrite(&w, 1, 7, w.stream) && !resident(&w, 1), "of another stamp");
    w.master[2][0] ^= 1;
    CHECK(!rewrite(&w, 2, 0, w.stream) && !resident(&w, 2), "a byte was written");
    uintptr_t address;
    need(oo_unit_rewrite(w.engine, w.unit[3], NULL, 0, w.stream, &address), "rewrite");
    CHECK(!address && !resident(&w, 3), "it is not known what its masters are");
    w.engine->units[w.unit[4]].stale = 1;
    CHECK(!rewrite(&w, 4, 0, w.stream) && !resident(&w, 4), "it is stale");
    w.engine->units[w.unit[5]].is_fed = 1; /* as if its masters were not locked */
    CHECK(!rewrite(&w, 5, 0, w.stream) && !resident(&w, 5), "threads may write to it");
    w.engine->units[w.unit[5]].is_fed = 0;
    w.engine->members[w.member[6]].stamp_known = 0;
    CHECK(!rewrite(&w, 6, 0, w.stream) && !resident(&w, 6), "it has no stamp");
    for (unsigned i = 1; i <= 6; i++) {
        rewritten(&w, i, 1, 1, w.stream);
        need(use_on(&w, i, OO_FORWARD, -1, 1, w.stream), "what has come again");
    }
    /* Stepped by half, or not at all: no stamp says that it is right. */
    CHECK(rewrite(&w, 7, 0, w.stream) != 0, "it is there");
    rewritten(&w, 7, 0, 0, w.stream);
    CHECK(!resident(&w, 7) && !oo_plan_pins(w.engine->plan, w.unit[7]), "trusted");
    /* Its masters are written by others meanwhile. */
    CHECK(rewrite(&w, 8, 0, w.stream) != 0, "it is there");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    rewritten(&w, 8, 0, 1, w.stream);
    CHECK(!resident(&w, 8), "trusted");
    /* A rewrite that did not begin is ended. */
    need(use_on(&w, 9, OO_FORWARD, -1, 0, w.stream), "use");
    rewritten(&w, 9, 0, 1, w.stream);
    CHECK(!resident(&w, 9), "trusted");
    world_close(&w, "not right");
}

/* A use that goes on while the masters are written has the bytes of before; the next one has not.
 */
CASE(what_somebody_computes_with_is_replaced_afterwards) {
    struct world w;
    world_open_on_device(&w, ARENA);
    steps(&w, 2, "step");
    struct oo_use use = use_acquire(w.engine, w.member[3], w.stream, "acquire");
    CHECK(!rewrite(&w, 3, 0, w.stream), "written to under a use");
    CHECK(resident(&w, 3), "dropped under a use");
    rewritten(&w, 3, 1, 1, w.stream);
    CHECK(w.engine->units[w.unit[3]].stale, "trusted");
    use_end(w.engine, &use, w.stream, "release");
    const uint64_t stale = stats_of(&w).stale;
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(stats_of(&w).stale == stale + 1, "not copied again");
    /* Likewise with the use that writes: others do not compute with what is written. */
    CHECK(rewrite(&w, 3, 0, w.stream) != 0, "it is there");
    CHECK(try_acquire(&w, 3, 0, &use) == OO_E_STATE, "computed with");
    rewritten(&w, 3, 0, 1, w.stream);
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "forward");
    world_close(&w, "in use");
}

/* H1 and H2: the step waits for the copy, and for other streams that still read it. */
CASE(a_step_waits_for_the_copy_and_for_its_readers) {
    static const int schedules[] = {SIM_TIMED, SIM_RANDOM, SIM_STARVE_COPY, SIM_STARVE_COMPUTE};
    for (unsigned n = 0; n < CHECK_COUNT(schedules); n++) {
        struct world w;
        world_open_on_device(&w, ARENA);
        CHECK(sim.simSetSchedule(schedules[n], 5) == 0, "schedule");
        const uintptr_t other = new_stream(&w);
        /* It comes on another stream's behalf, for which this one has not waited. */
        const struct oo_use use = use_acquire(w.engine, w.member[3], other, "acquire");
        kernel(other, (const void *)use.address, w.bytes[3], 0, 1e-2);
        use_end(w.engine, &use, other, "release");
        const uintptr_t address = rewrite(&w, 3, 0, w.stream);
        CHECK(address == use.address, "it is not there");
        step_copy(&w, 3, address, 50, 1e-5, w.stream);
        rewritten(&w, 3, 1, 1, w.stream);
        need(use_on(&w, 3, OO_FORWARD, -1, 1, other), "the other stream reads what was stepped");
        /* It has not been used: only its copy is waited for. */
        uint32_t ahead = UNITS;
        for (uint32_t i = 0; i < UNITS; i++)
            if (i != 3 && resident(&w, i) && !w.engine->units[w.unit[i]].n_uses)
                ahead = i;
        CHECK(ahead < UNITS, "nothing was fetched ahead");
        if (ahead < UNITS) {
            const struct oo_stamp fetched_stamp = stamp_of(&w, ahead, 0);
            need(oo_engine_stamp(w.engine, &fetched_stamp, 1, 0), "stamp");
            const uintptr_t there = rewrite(&w, ahead, 0, w.stream);
            CHECK(there != 0, "unit %u is not stepped in place", ahead);
            CHECK(!memcmp((const void *)there, w.master[ahead], w.bytes[ahead]),
                  "what computes at once finds the copy on its way");
            step_copy(&w, ahead, there, 51, 1e-5, w.stream);
            rewritten(&w, ahead, 1, 1, w.stream);
            need(use_on(&w, ahead, OO_FORWARD, -1, 1, w.stream), "forward");
        }
        end_stream(&w, other);
        check_no_reports("waits");
        world_close(&w, "waits");
    }
}

/* A slot that was stepped is given to another unit after the step, on whatever stream that was. */
CASE(what_comes_in_its_place_waits_for_the_step) {
    struct world w;
    world_open_on_device(&w, SMALL);
    steps(&w, 2, "step");
    const uintptr_t other = new_stream(&w);
    for (unsigned i = 0; i < UNITS; i++) {
        const uintptr_t address = rewrite(&w, i, 0, other);
        if (address) {
            step_copy(&w, i, address, 70 + i, 1e-5, other);
            kernel(other, (const void *)address, w.bytes[i], 0, 1e-2); /* it is read late */
        }
        rewritten(&w, i, 0, address != 0, other);
    }
    need(step(&w), "step");
    end_stream(&w, other);
    world_close(&w, "in its place");
}

/* The second brings what it steps, and sends home what the copy does not have. */
CASE(of_two_who_rewrite_a_unit_the_first_has_its_copy) {
    struct world w;
    world_open_on_device(&w, ARENA);
    steps(&w, 2, "step");
    for (int first_ends_first = 0; first_ends_first < 2; first_ends_first++) {
        const uint64_t stamp = (uint64_t)first_ends_first;
        const uintptr_t address = rewrite(&w, 3, stamp, w.stream);
        CHECK(address != 0, "it is there");
        CHECK(rewrite(&w, 3, stamp, w.stream) == 0, "both write to one copy");
        CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 1, "two uses");
        step_copy(&w, 3, address, 90, 1e-5, w.stream);
        need(oo_unit_written(w.engine, w.unit[3], w.stream), "written");
        rewritten(&w, 3, stamp + 1, first_ends_first, w.stream);
        CHECK(!resident(&w, 3), "it lacks what the second has sent home");
        rewritten(&w, 3, stamp + 1, !first_ends_first, w.stream);
        need(use_on(&w, 3, OO_FORWARD, -1, stamp + 1, w.stream), "forward");
        CHECK(resident(&w, 3), "it comes again");
    }
    world_close(&w, "two");
}

/* Once a copy is written and on its way home another may take its place; if none has, it is right.
 */
CASE(a_copy_that_is_written_may_be_replaced) {
    struct world w;
    world_open_on_device(&w, SMALL);
    steps(&w, 3, "step");
    const uintptr_t address = rewrite(&w, 0, 0, w.stream);
    CHECK(address != 0, "it is not there");
    step_copy(&w, 0, address, 90, 1e-5, w.stream);
    need(oo_unit_written(w.engine, w.unit[0], w.stream), "written");
    need(oo_unit_written(w.engine, w.unit[0], w.stream), "written, once more");
    CHECK(!oo_plan_pins(w.engine->plan, w.unit[0]) && w.engine->units[w.unit[0]].stale, "in use");
    rewritten(&w, 0, 1, 1, w.stream);
    const uint64_t late = stats_of(&w).late;
    need(use_on(&w, 0, OO_FORWARD, -1, 1, w.stream), "forward");
    CHECK(stats_of(&w).late == late, "copied again");
    /* Another unit comes in its place, and then it itself, while it is not home. */
    const uintptr_t again = rewrite(&w, 0, 1, w.stream);
    kernel(w.stream, (const void *)again, w.bytes[0], 1, 1e-2);
    need(oo_unit_written(w.engine, w.unit[0], w.stream), "written");
    for (unsigned i = 1; i < UNITS; i++)
        need(use_on(&w, i, OO_FORWARD, -1, 0, w.stream), "forward");
    CHECK(!resident(&w, 0), "nothing took its place");
    need(use_on(&w, 0, OO_FORWARD, -1, 1, w.stream), "it comes again");
    rewritten(&w, 0, 2, 1, w.stream);
    CHECK(!resident(&w, 0), "what was copied while it was written is trusted");
    CHECK(oo_unit_written(w.engine, 5000, w.stream) == OO_E_ARGUMENT, "no such unit");
    world_close(&w, "written");
}

/* A kernel on `stream` reads a master in place; `is_lost`: no event marks its end. */
static void read_in_place(struct world *w, unsigned i, uintptr_t stream, int is_lost) {
    const struct oo_request request = {
        .member = w->member[i], .kind = OO_FORWARD, .stream = stream, .task = -1};
    uintptr_t address;
    need(oo_engine_map(w->engine, &request, 0, &address), "map");
    CHECK(address != 0, "not mapped");
    kernel(stream, w->master[i], w->bytes[i], 0, 1e-2);
    if (is_lost)
        fail_call("cuEventRecord", 1);
    need(oo_engine_unmap(w->engine, w->member[i], stream), "unmap");
    sim.simFaultClear();
}

/* H7: kernels on other streams may read masters in place while the device writes them. */
CASE(what_reads_masters_in_place_is_waited_for) {
    for (int is_lost = 0; is_lost < 2; is_lost++) {
        struct world w;
        world_open_on_device(&w, ARENA);
        steps(&w, 2, "step");
        const uintptr_t other = new_stream(&w);
        read_in_place(&w, 3, other, is_lost);
        const uintptr_t copy = rewrite(&w, 3, 0, w.stream);
        CHECK(copy != 0, "it is not there");
        step_copy(&w, 3, copy, 60, 1e-5, w.stream);
        /* Likewise another stream that rewrites it: it was read meanwhile. */
        read_in_place(&w, 3, other, is_lost);
        const uintptr_t second = new_stream(&w);
        char *elsewhere = device_memory(&w, w.bytes[3]);
        CHECK(!rewrite(&w, 3, 0, second), "both write to one copy");
        step_copy(&w, 3, (uintptr_t)elsewhere, 61, 1e-5, second);
        rewritten(&w, 3, 1, 1, w.stream);
        need(oo_engine_settle(w.engine), "settle"); /* a mark that is lost names its stream */
        end_device_memory(&w, elsewhere);
        end_stream(&w, second);
        end_stream(&w, other);
        world_close(&w, "reads");
    }
}

/* Units that are rewritten come when they are asked for, and are not trusted afterwards. */
CASE(nothing_is_fetched_ahead_that_is_rewritten) {
    struct world w;
    world_open_on_device(&w, SMALL);
    steps(&w, 3, "step");
    for (unsigned i = 0; i < UNITS; i++)
        (void)rewrite(&w, i, 1, w.stream); /* nothing is right, and all of it goes */
    const struct oo_stats before = stats_of(&w);
    CHECK(!before.resident_units, "%llu units are there",
          (unsigned long long)before.resident_units);
    need(oo_engine_hold(w.engine), "hold");
    need(oo_engine_resume(w.engine), "resume"); /* says again what may be fetched ahead */
    need(use_on(&w, 0, OO_FORWARD, -1, 0, w.stream), "use");
    need(use_on(&w, 1, OO_FORWARD, -1, 0, w.stream), "use");
    CHECK(stats_of(&w).prefetches == before.prefetches, "fetched ahead");
    for (unsigned i = 0; i < UNITS; i++) {
        fill(w.master[i], w.bytes[i], 200 + i);
        rewritten(&w, i, 0, 1, w.stream);
        CHECK(!resident(&w, i), "unit %u was copied while it was written", i);
    }
    need(step(&w), "step");
    CHECK(stats_of(&w).prefetches > before.prefetches, "never fetched ahead again");
    world_close(&w, "ahead");
}

CASE(what_is_refused) {
    struct world w;
    uintptr_t address;
    world_open_on_device(&w, ARENA);
    const struct oo_stamp of_another = stamp_of(&w, 4, 0), of_none = {.member = UINT32_MAX};
    CHECK(oo_unit_rewrite(w.engine, 5000, NULL, 0, w.stream, &address) == OO_E_ARGUMENT, "unit");
    CHECK(oo_unit_rewritten(w.engine, 5000, NULL, 0, w.stream) == OO_E_ARGUMENT, "unit");
    CHECK(oo_unit_rewrite(w.engine, w.unit[3], &of_another, 1, w.stream, &address) == OO_E_ARGUMENT,
          "another unit's");
    CHECK(oo_unit_rewritten(w.engine, w.unit[3], &of_none, 1, w.stream) == OO_E_ARGUMENT, "none");
    uint32_t model, unit, member;
    size_t offset;
    const struct oo_tensor tensor = {.host = w.master[0], .bytes = w.bytes[0]};
    need(oo_model_add(w.engine, &model), "model");
    unit = add_unit(w.engine, model, &tensor, 1, &member, &offset);
    need(oo_model_remove(w.engine, model), "remove");
    CHECK(oo_unit_rewrite(w.engine, unit, NULL, 0, w.stream, &address) == OO_E_ARGUMENT, "gone");
    /* Where the driver fails, nothing is trusted, and the end can be reported. */
    steps(&w, 2, "step");
    const struct oo_stamp stamp = stamp_of(&w, 3, 0);
    fail_call("cuStreamWaitEvent", 1);
    CHECK(oo_unit_rewrite(w.engine, w.unit[3], &stamp, 1, w.stream, &address) == OO_E_DRIVER &&
              !address,
          "no error");
    rewritten(&w, 3, 0, 1, w.stream);
    CHECK(!resident(&w, 3), "trusted");
    need(step(&w), "step");
    world_close(&w, "refused");
}

CHECK_MAIN(world_prepare)
