/* Masters that kernels read in place, over the link; meanwhile no call may free them. */
#include "world.h"

static enum oo_status map_for(struct world *w, unsigned i, uintptr_t stream, double seconds,
                              uintptr_t *address) {
    const struct oo_request request = {
        .member = w->member[i], .stream = stream, .seconds = seconds};
    return oo_engine_map(w->engine, &request, 0, address);
}

static uintptr_t map(struct world *w, unsigned i, uintptr_t stream) {
    uintptr_t address = 0;
    need(map_for(w, i, stream, 5e-3, &address), "map");
    CHECK(address == (uintptr_t)w->master[i], "mapped to %#zx", (size_t)address);
    return address;
}

static struct sim_stats moved(void) {
    struct sim_stats stats;
    sim.simGetStats(&stats);
    return stats;
}

CASE(test_nothing_is_copied_and_the_kernel_takes_its_time) {
    struct world w;
    double end_s;
    world_open(&w, 60000, -1);
    const uint64_t kernels = moved().kernels;
    map(&w, 3, w.stream);
    CHECK(moved().kernels == kernels + 1 && moved().h2d_bytes == 0, "a copy, or no kernel");
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    sim.simFinish(&end_s);
    CHECK(end_s >= 5e-3 && end_s < 6e-3, "%f s", end_s);
    CHECK(stats_of(&w).acquires == 0 && !oo_plan_resident(w.engine->plan, w.unit[3]), "acquired");
    world_close(&w, "mapped");
}

CASE(test_a_mapped_member_is_in_use) {
    struct world w;
    const struct oo_tensor elsewhere = {.host = &w, .bytes = 64};
    uint32_t unit;
    size_t offset;
    world_open(&w, 60000, -1);
    map(&w, 3, w.stream);
    map(&w, 3, w.stream);
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 2, "not in use");
    for (int left = 2; left > 0; left--) {
        CHECK(oo_model_remove(w.engine, w.model) == OO_E_STATE, "the model went");
        CHECK(oo_member_remove(w.engine, w.member[3]) == OO_E_STATE, "the member went");
        CHECK(oo_member_move(w.engine, w.member[3], &elsewhere, 1, &unit, &offset) == OO_E_STATE,
              "the member moved");
        need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    }
    CHECK(oo_engine_unmap(w.engine, w.member[3], w.stream) == OO_E_STATE, "ended once more");
    CHECK(strstr(oo_error_message(), "is not mapped") != NULL, "%s", oo_error_message());
    CHECK(oo_engine_unmap(w.engine, 10000, w.stream) == OO_E_STATE, "ended what is not there");
    need(step(&w), "a step");
    world_close(&w, "in use");
}

CASE(test_what_cannot_be_mapped) {
    struct world w;
    uintptr_t address = 1;
    world_open(&w, 60000, -1);
    struct oo_request request = {.member = 10000, .stream = w.stream};
    CHECK(oo_engine_map(w.engine, &request, 0, &address) == OO_E_STATE && !address, "a stranger");
    request.member = w.member[0];
    CHECK(oo_engine_map(w.engine, &request, OO_LAUNCH, &address) == OO_E_ARGUMENT, "any flag");
    oo__mutex_lock(w.engine->mutex);
    CHECK(oo_engine_map(w.engine, &request, OO_NONBLOCKING, &address) == OO_WOULD_BLOCK, "waited");
    oo__mutex_unlock(w.engine->mutex);
    fail_call("cuPointerGetAttribute", 1);
    CHECK(oo_engine_map(w.engine, &request, 0, &address) == OO_E_DRIVER && !address, "no address");
    fail_call("simLaunch", 1);
    CHECK(oo_engine_map(w.engine, &request, 0, &address) == OO_E_DRIVER && !address, "no kernel");
    request.stream = new_stream(&w); /* not one of the engine's own */
    begin_capture(&w, request.stream);
    CHECK(oo_engine_map(w.engine, &request, 0, &address) == OO_E_CAPTURE, "captured");
    end_capture(request.stream);
    end_stream(&w, request.stream);
    request.stream = w.stream;
    CHECK(oo_plan_pins(w.engine->plan, w.unit[0]) == 0, "in use after all");
    need(oo_member_remove(w.engine, w.member[0]), "remove");
    CHECK(oo_engine_map(w.engine, &request, 0, &address) == OO_E_STATE, "removed");
    CHECK(oo_engine_unmap(w.engine, w.member[0], w.stream) == OO_E_STATE, "removed");
    CHECK(w.engine->reads.count == 0, "something was marked");
    world_close(&w, "refused");
}

/* A driver without the simulator's extras gets no declaration of kernels. */
CASE(test_a_real_driver_needs_no_declaration) {
    struct world w;
    world_open(&w, 60000, -1);
    w.engine->driver.simLaunch = NULL;
    const uint64_t kernels = moved().kernels;
    map(&w, 3, w.stream);
    CHECK(moved().kernels == kernels, "a kernel");
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    world_close(&w, "real");
}

/* A device may have no address for locked memory: then it is copied, which is no failure. */
CASE(test_what_the_device_cannot_address_is_not_mapped) {
    struct world w;
    uintptr_t address = 1;
    world_open(&w, 60000, -1);
    sim.simFault("cuPointerGetAttribute", 1, OOCU_ERROR_INVALID_VALUE, 0);
    need(map_for(&w, 3, w.stream, 1e-3, &address), "map");
    CHECK(!address && !oo_plan_pins(w.engine->plan, w.unit[3]), "mapped to %#zx", (size_t)address);
    need(use(&w, 3, OO_FORWARD), "copied");
    map(&w, 3, w.stream);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    world_close(&w, "no address");
}

static OOCUresult(OOCUDAAPI *real_register)(void *, size_t, unsigned int);
static unsigned registered; /* flags that all registrations have had */
static OOCUresult OOCUDAAPI register_with_flags(void *ptr, size_t bytes, unsigned int flags) {
    registered &= flags;
    return real_register(ptr, bytes, flags);
}

/* Without the flag a driver need not give memory an address of the device's. */
CASE(test_what_is_locked_is_mapped_for_every_context) {
    struct world w;
    struct oo_host *host;
    size_t bytes;
    world_begin(&w);
    real_register = w.engine->driver.cuMemHostRegister;
    w.engine->driver.cuMemHostRegister = register_with_flags;
    registered = ~0u;
    CHECK(world_attach(&w, 60000, -1), "attach: %s", oo_error_message());
    CHECK(registered == (OOCU_MEMHOSTREGISTER_PORTABLE | OOCU_MEMHOSTREGISTER_DEVICEMAP),
          "locked with flags %#x", registered);
    need(oo_host_create(1 << 20, &host), "memory");
    registered = ~0u;
    need(oo_engine_lockable(w.engine, host, &bytes), "lockable");
    CHECK(registered == (OOCU_MEMHOSTREGISTER_PORTABLE | OOCU_MEMHOSTREGISTER_DEVICEMAP),
          "probed with flags %#x", registered);
    oo_host_destroy(host);
    world_close(&w, "flags");
}

CASE(test_what_is_not_locked_is_not_mapped) {
    struct world w;
    uintptr_t address = 1;
    sim.simLockQuota(0);
    world_open(&w, 60000, -1);
    need(map_for(&w, 3, w.stream, 0, &address), "map");
    CHECK(address == 0 && oo_plan_pins(w.engine->plan, w.unit[3]) == 0, "mapped");
    world_close(&w, "pageable");
    sim.simLockQuota(UINT64_MAX);
}

/* All tensors of a member, of which the last is not locked, or not known. */
CASE(test_all_tensors_must_be_locked) {
    struct world w;
    static char other[256];
    uint32_t unit;
    size_t offsets[2];
    uintptr_t address = 1;
    world_open(&w, 60000, -1);
    const struct oo_tensor tensors[] = {{.host = w.master[3], .bytes = 256},
                                        {.host = other, .bytes = sizeof other}};
    need(oo_member_move(w.engine, w.member[3], tensors, 2, &unit, offsets), "move");
    need(map_for(&w, 3, w.stream, 0, &address), "map");
    CHECK(address == 0, "mapped");
    world_close(&w, "one of two");
}

CASE(test_a_kernel_is_declared_of_each_tensor_but_takes_its_time_once) {
    struct world w;
    uint32_t unit;
    size_t offsets[2];
    double end_s;
    world_open(&w, 60000, -1);
    const struct oo_tensor tensors[] = {{.host = w.master[3], .bytes = 256},
                                        {.host = w.master[5], .bytes = 256}};
    need(oo_member_move(w.engine, w.member[3], tensors, 2, &unit, offsets), "move");
    const uint64_t kernels = moved().kernels;
    map(&w, 3, w.stream);
    CHECK(moved().kernels == kernels + 2, "%llu", (unsigned long long)moved().kernels);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    sim.simFinish(&end_s);
    CHECK(end_s < 6e-3, "%f s", end_s);
    world_close(&w, "two tensors");
}

/* More streams than there are entries: the first reader is waited for, and no reader is lost. */
CASE(test_more_streams_than_entries) {
    struct world w;
    uintptr_t streams[OO_STREAMS + 2];
    world_open(&w, 60000, -1);
    for (int i = 0; i < OO_STREAMS + 2; i++) {
        const uint64_t waits = stats_of(&w).host_waits;
        streams[i] = new_stream(&w);
        for (int again = 0; again < 2; again++) {
            map(&w, 3, streams[i]);
            need(oo_engine_unmap(w.engine, w.member[3], streams[i]), "unmap");
        }
        CHECK((stats_of(&w).host_waits > waits) == (i >= OO_STREAMS), "stream %d: %llu waits", i,
              (unsigned long long)(stats_of(&w).host_waits - waits));
    }
    CHECK(w.engine->reads.count == OO_STREAMS, "%u entries", w.engine->reads.count);
    for (int i = 0; i < OO_STREAMS; i++)
        CHECK(w.engine->reads.last[i].stream == (OOCUstream)streams[i + 2], "entry %d", i);
    sim.simHostAccess(w.master[3], 1, 0);
    need(oo_engine_hold(w.engine), "hold");
    CHECK(w.engine->reads.count == 0, "%u entries", w.engine->reads.count);
    CHECK(sim.simHostAccess(w.master[3], w.bytes[3], 1) == 0, "refused");
    world_remove(&w);
    for (int i = 0; i < OO_STREAMS + 2; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "streams");
}

/* While nothing can be waited for, more streams find room; what finds none is in use still. */
CASE(test_more_streams_while_waiting_fails) {
    struct world w;
    uintptr_t streams[OO_USES + 1];
    world_open(&w, 60000, -1);
    sim.simFault("cuEventQuery", 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
    for (int i = 0; i < OO_USES + 1; i++) {
        streams[i] = new_stream(&w);
        map(&w, 3, streams[i]);
        CHECK((oo_engine_unmap(w.engine, w.member[3], streams[i]) == OO_OK) == (i < OO_USES),
              "stream %d: %s", i, oo_error_message());
    }
    CHECK(w.engine->reads.count == OO_USES, "%u entries", w.engine->reads.count);
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 1, "ended without a mark");
    sim.simFaultClear();
    need(oo_engine_unmap(w.engine, w.member[3], streams[OO_USES]), "unmap");
    need(oo_engine_hold(w.engine), "hold");
    for (int i = 0; i < OO_USES + 1; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "waiting fails");
}

/* Where the end could not be marked, or waited for, the stream itself is waited for. */
CASE(test_an_end_that_cannot_be_marked) {
    struct world w;
    world_open(&w, 60000, -1);
    map(&w, 3, w.stream);
    fail_call("cuEventRecord", 1);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    CHECK(stats_of(&w).lost_uses == 1 && w.engine->reads.last[0].lost, "not lost");
    fail_call("cuStreamSynchronize", 1);
    CHECK(oo_engine_hold(w.engine) == OO_E_DRIVER && w.engine->reads.count == 1, "not waited for");
    need(oo_engine_hold(w.engine), "hold");
    CHECK(stats_of(&w).recoveries == 2 && w.engine->reads.count == 0, "%llu recoveries",
          (unsigned long long)stats_of(&w).recoveries);
    map(&w, 3, w.stream); /* a later mark mends what was lost */
    fail_call("cuEventRecord", 1);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    map(&w, 3, w.stream);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    CHECK(!w.engine->reads.last[0].lost, "lost for ever");
    world_close(&w, "not marked");
}

/* The stream that is waited for is the one that reads: the masters may be written afterwards. */
CASE(test_masters_of_an_end_that_was_not_marked_are_the_hosts_after_a_wait) {
    static const char *const calls[] = {"cuEventRecord", "cuEventCreate"};
    for (int i = 0; i < 2; i++) {
        struct world w;
        world_open(&w, 60000, -1);
        const uintptr_t stream = new_stream(&w);
        map(&w, 3, stream);
        struct oo_event **spare = &w.engine->spans.free_events[OO_ORDERS], *const events = *spare;
        *spare = NULL;
        sim.simFault(calls[i], 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
        need(oo_engine_unmap(w.engine, w.member[3], stream), calls[i]);
        sim.simFaultClear();
        *spare = events;
        CHECK(w.engine->reads.count == 1 && w.engine->reads.last[0].lost, "%s: marked", calls[i]);
        need(oo_engine_hold(w.engine), "hold");
        CHECK(sim.simHostAccess(w.master[3], w.bytes[3], 1) == 0, "refused");
        end_stream(&w, stream);
        world_close(&w, calls[i]);
    }
}

static int recorded;
static OOCUresult OOCUDAAPI counted_record(OOCUevent event, OOCUstream stream) {
    (void)event, (void)stream;
    recorded++;
    return OOCU_SUCCESS;
}

/* Without the context there is nothing to record with: the end is lost, and waited for later. */
CASE(test_an_end_without_the_context) {
    struct world w;
    world_open(&w, 60000, -1);
    map(&w, 3, w.stream);
    OOCUresult(OOCUDAAPI *const real)(OOCUevent, OOCUstream) = w.engine->driver.cuEventRecord;
    w.engine->driver.cuEventRecord = counted_record;
    fail_call("cuCtxPushCurrent", 1);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    w.engine->driver.cuEventRecord = real;
    CHECK(recorded == 0 && w.engine->reads.last[0].lost, "recorded without a context");
    need(oo_engine_hold(w.engine), "hold");
    world_close(&w, "no context");
}

/* The end is taken on a dead engine, and nothing is waited for there. */
CASE(test_a_lost_context_ends_it) {
    struct world w;
    uintptr_t address = 0;
    world_open(&w, 60000, -1);
    map(&w, 3, w.stream);
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    map(&w, 3, w.stream);
    sim.simFault("cuStreamIsCapturing", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(map_for(&w, 5, w.stream, 0, &address) != OO_OK, "alive");
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    CHECK(oo_plan_pins(w.engine->plan, w.unit[3]) == 0, "still in use");
    need(world_remove(&w), "remove");
    need(oo_engine_unlock(w.engine, w.host), "unlock");
    oo_host_destroy(w.host);
    free(w.arena);
    (void)oo_engine_destroy(w.engine);
    release_leaked_contexts();
    leave_contexts();
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* Trainable units go at the turn; one that is mapped goes when that ends. */
CASE(test_a_mapped_unit_that_is_to_leave_leaves_at_the_end) {
    struct world w;
    world_open(&w, 400000, 0);
    need(use(&w, 3, OO_FORWARD), "use");
    map(&w, 3, w.stream);
    need(oo_engine_hold(w.engine), "hold");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[3]) != NULL, "dropped under a use");
    need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
    CHECK(oo_plan_resident(w.engine->plan, w.unit[3]) == NULL, "not dropped at the end");
    world_close(&w, "leaving");
}

CASE(test_a_steady_state_creates_nothing) {
    struct world w;
    uint64_t allocations = 0;
    world_open(&w, 60000, -1);
    for (int i = 0; i < 6; i++) {
        if (i == 2)
            allocations = stats_of(&w).allocations;
        map(&w, 3, w.stream);
        need(oo_engine_unmap(w.engine, w.member[3], w.stream), "unmap");
        need(oo_engine_hold(w.engine), "hold");
    }
    CHECK(stats_of(&w).allocations == allocations, "something was created");
    world_close(&w, "steady");
}

CHECK_MAIN(world_prepare)
