/* A model's device memory and its end: segments, and detaching while others work. */
#include "world.h"

/* A model may be removed while units are in use, if none is its own; a lease, if none is in it. */
CASE(test_who_is_in_the_way_of_a_detach) {
    struct world w;
    uint32_t guest, lease, member;
    size_t offset;
    char *memory = malloc(4096 + OO_ALIGNMENT);
    world_open(&w, 250000, -1);
    need(oo_model_add(w.engine, &guest), "a model whose unit is in the other's memory");
    const struct oo_tensor tensor = {.host = w.master[0], .bytes = w.bytes[0]};
    add_unit(w.engine, guest, &tensor, 1, &member, &offset);
    const struct oo_use use = use_acquire(w.engine, member, w.stream, "acquire");
    need(oo_lease_add(w.engine, &lease), "memory without a unit");
    need(oo_segment_add(w.engine, lease, (uintptr_t)memory, 4096 + OO_ALIGNMENT, w.stream),
         "segment");
    CHECK(oo_model_remove(w.engine, guest) == OO_E_STATE, "its unit is in use");
    CHECK(oo_lease_remove(w.engine, w.lease) == OO_E_STATE, "what is in use is in it");
    need(oo_model_remove(w.engine, w.model), "nothing of it is in use");
    need(oo_lease_remove(w.engine, lease), "nothing in it is in use");
    use_end(w.engine, &use, w.stream, "release");
    need(oo_model_remove(w.engine, guest), "remove");
    free(memory);
    need(oo_model_add(w.engine, &w.model), "for the end");
    world_close(&w, "in the way");
}

/* Detaching fails where the segment's stream cannot be ordered after a use, and can be repeated. */
CASE(test_a_detach_that_failed_can_be_repeated) {
    static const char *const calls[] = {"cuStreamWaitEvent", "cuStreamSynchronize", "simDrop"};
    for (unsigned i = 0; i < 3; i++) {
        struct world w;
        world_open(&w, 400000, -1);
        const uintptr_t other = new_stream(&w);
        for (unsigned u = 0; u < UNITS; u++)
            need(use_on(&w, u, OO_FORWARD, -1, 0, other), "use");
        /* The same memory twice is refused, and stays what it was. */
        CHECK(oo_segment_add(w.engine, w.lease, (uintptr_t)w.arena, 400000 + OO_ALIGNMENT,
                             w.stream) == OO_E_DRIVER,
              "twice");
        need(step(&w), "step");
        fail_call(calls[i], 1);
        CHECK(world_remove(&w) == OO_E_DRIVER && strstr(oo_error_message(), calls[i]), "%s: %s",
              calls[i], oo_error_message());
        end_stream(&w, other);
        world_close(&w, calls[i]);
    }
}

/* A segment that could not be ordered after its stream's work is not used, and not kept. */
CASE(test_a_segment_that_failed_is_given_back) {
    static const char *const calls[] = {"simAdopt", "cuEventRecord", "cuStreamWaitEvent"};
    for (unsigned i = 0; i < 3; i++) {
        struct world w;
        struct sim_live live;
        world_open(&w, 60000, -1);
        sim.simGetLive(&live);
        const uint64_t adopted = live.adopted_bytes, arena = stats_of(&w).arena_bytes;
        char *more = malloc(8192);
        fail_call(calls[i], 1);
        CHECK(oo_segment_add(w.engine, w.lease, (uintptr_t)more, 8192, w.stream) == OO_E_DRIVER,
              "%s", calls[i]);
        sim.simGetLive(&live);
        CHECK(live.adopted_bytes == adopted && stats_of(&w).arena_bytes == arena, "%s: kept",
              calls[i]);
        need(oo_segment_add(w.engine, w.lease, (uintptr_t)more, 8192, w.stream), "again");
        CHECK(stats_of(&w).arena_bytes > arena, "not added");
        need(step(&w), "step");
        need(world_remove(&w), "remove");
        free(more);
        world_close(&w, calls[i]);
    }
}

CHECK_MAIN(world_prepare)
