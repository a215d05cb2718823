/* Release: how a use ends on its stream, and what replaces a mark that the driver refuses. */
#include "world.h"

/* A stream that is known has its entry, however many there are: no other's is given up for it. */
CASE(test_one_use_more_on_a_known_stream_displaces_nobody) {
    struct world w;
    struct oo_use use[OO_STREAMS], again;
    uintptr_t streams[OO_STREAMS];
    world_open(&w, 400000, -1);
    for (int i = 0; i < OO_STREAMS; i++) {
        streams[i] = new_stream(&w);
        use[i] = use_begin(w.engine, w.member[3], streams[i], 5e-3, "acquire");
    }
    for (int i = 0; i < OO_STREAMS; i++)
        use_end(w.engine, &use[i], streams[i], "release");
    again = use_acquire(w.engine, w.member[3], streams[0], "acquire");
    use_end(w.engine, &again, streams[0], "release");
    CHECK(w.engine->units[w.unit[3]].n_uses == OO_STREAMS, "%u entries",
          w.engine->units[w.unit[3]].n_uses);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "over all of their kernels");
    for (int i = 0; i < OO_STREAMS; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "known streams");
}

/* The unit may be in use by others by now: their use is not his to end. */
CASE(test_a_ticket_of_an_earlier_copy_ends_no_use) {
    struct world w;
    struct oo_use first, second;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    first = use_acquire(w.engine, w.member[3], w.stream, "first");
    use_end(w.engine, &first, w.stream, "release");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    second = use_acquire(w.engine, w.member[3], w.stream, "second");
    CHECK(first.ticket != second.ticket, "two copies with one ticket");
    CHECK(oo_engine_release(w.engine, first.ticket, w.stream, 0, &fetched) == OO_E_TICKET,
          "the ticket of an earlier copy ended a use");
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 1, "%u uses",
          oo_plan_pins(w.engine->plan, w.unit[3]));
    use_end(w.engine, &second, w.stream, "release");
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 0, "still in use");
    world_close(&w, "tickets");
}

/* Units that several streams use need more events than were made for them. */
CASE(test_a_use_without_an_event_is_waited_for) {
    struct world w;
    struct oo_use held;
    uintptr_t streams[OO_STREAMS];
    world_open(&w, 400000, -1);
    need(step(&w), "step");
    sim.simFault("cuEventCreate", 1, OOCU_ERROR_OUT_OF_MEMORY, 1);
    const struct oo_stats before = stats_of(&w);
    for (int i = 0; i < OO_STREAMS; i++) {
        streams[i] = new_stream(&w);
        for (unsigned unit = 0; unit < UNITS; unit++) {
            held = use_begin(w.engine, w.member[unit], streams[i], 1e-4, "acquire");
            use_end(w.engine, &held, streams[i], "release");
        }
    }
    CHECK(stats_of(&w).lost_uses > before.lost_uses, "there were events enough");
    sim.simFaultClear();
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "over all of their kernels");
    for (int i = 0; i < OO_STREAMS; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "uses without an event");
}

CASE(test_a_use_that_could_not_be_marked_is_waited_for) {
    struct world w;
    struct oo_use held;
    for (int how = 0; how < 3; how++) {
        world_open_on_device(&w, 30000);
        const uintptr_t slow = new_stream(&w);
        held = use_begin(w.engine, w.member[0], slow, 5e-3, "acquire");
        fail_call("cuEventRecord", 1);
        use_end(w.engine, &held, slow, "release");
        const struct oo_stats before = stats_of(&w);
        const double began = sim.simNow();
        if (how == 0)
            need(oo_engine_refresh(w.engine, w.model), "refresh");
        else if (how == 1)
            for (unsigned i = 1; i < UNITS; i++) /* its place is taken */
                need(use(&w, i, OO_FORWARD), "use");
        else
            need(world_remove(&w), "remove");
        const struct oo_stats after = stats_of(&w);
        CHECK(after.recoveries == before.recoveries + 1 && after.host_waits > before.host_waits,
              "%llu recoveries", (unsigned long long)(after.recoveries - before.recoveries));
        CHECK(sim.simNow() - began > 4.9e-3, "the host waited %.6f s for a kernel of 5 ms",
              sim.simNow() - began);
        need(world_remove(&w), "remove");
        kernel(w.stream, w.arena, 30000, 1, 1e-6);
        end_stream(&w, slow);
        world_close(&w, "lost use");
    }
}

/* More streams than entries, and the oldest use cannot be ordered: the new one is waited for
 * instead. */
CASE(test_a_use_without_an_entry_is_waited_for) {
    struct world w;
    uintptr_t streams[OO_STREAMS + 1];
    world_open_on_device(&w, 30000);
    for (int s = 0; s <= OO_STREAMS; s++)
        streams[s] = new_stream(&w);
    for (int s = 0; s < OO_STREAMS; s++)
        need(use_on(&w, 0, OO_FORWARD, -1, 0, streams[s]), "use");
    const struct oo_use held =
        use_begin(w.engine, w.member[0], streams[OO_STREAMS], 5e-3, "acquire");
    fail_call("cuStreamWaitEvent", 1);
    const double began = sim.simNow();
    const struct oo_stats before = stats_of(&w);
    use_end(w.engine, &held, streams[OO_STREAMS], "release");
    CHECK(sim.simNow() - began > 4.9e-3 && stats_of(&w).recoveries == before.recoveries + 1,
          "the host waited %.6f s", sim.simNow() - began);
    CHECK(stats_of(&w).lost_uses == before.lost_uses, "waited for, and lost all the same");
    for (int round = 0; round < 3; round++)
        for (unsigned i = 0; i < UNITS; i++)
            need(use_on(&w, i, OO_FORWARD, -1, 0, streams[i % (OO_STREAMS + 1)]), "use");
    for (int s = 0; s <= OO_STREAMS; s++)
        end_stream(&w, streams[s]);
    world_close(&w, "no entry");
}

/* While a fault lasts a release can neither mark its use nor wait for it. The unit is in use no
 * more all the same, or nothing could ever detach; what overwrites it waits for each such use.
 * Only with more of them than there are entries a release fails, and can be repeated. */
CASE(test_a_release_returns_while_a_fault_lasts) {
    enum { STREAMS = OO_USES + 1, HELD = 1 }; /* what comes first and stays is not overwritten */
    struct world w;
    uintptr_t streams[STREAMS];
    struct oo_use held[STREAMS];
    struct oo_fetched fetched;
    world_open_on_device(&w, 30000);
    for (int s = 0; s < STREAMS; s++)
        streams[s] = new_stream(&w);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, streams[0]), "first");
    for (int s = 0; s < STREAMS; s++) {
        held[s] = use_begin(w.engine, w.member[HELD], streams[s], 1e-3, "acquire");
    }
    sim.simFault(NULL, 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
    for (int s = 0; s < OO_USES; s++)
        use_end(w.engine, &held[s], streams[s], "release");
    for (int i = 0; i < 2; i++)
        ANSWERS(OO_E_DRIVER, "cuStreamSynchronize",
                oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched));
    sim.simFaultClear();
    const struct oo_stats before = stats_of(&w);
    need(oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched),
         "repeated");
    CHECK(oo_engine_release(w.engine, held[OO_USES].ticket, streams[OO_USES], 0, &fetched) ==
              OO_E_TICKET,
          "released twice");
    for (unsigned i = HELD + 1; i < UNITS;
         i++) /* the race detector sees each use that is not waited for */
        need(use_on(&w, i, OO_FORWARD, -1, 0, streams[0]), "overwrite");
    CHECK(stats_of(&w).recoveries >= before.recoveries + STREAMS - 1, "%llu recoveries",
          (unsigned long long)(stats_of(&w).recoveries - before.recoveries));
    for (int s = 0; s < STREAMS; s++)
        end_stream(&w, streams[s]);
    world_close(&w, "lasting");
}

CHECK_MAIN(world_prepare)
