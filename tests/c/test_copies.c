/* What the engine knows of copies that read masters directly, and when a step waits for them:
 * each case ends with the host's write to all masters, which the race detector watches. */
#include "world.h"

/* One use with a kernel; its bytes are compared where the test is not about what has not arrived.
 */
static void touch(struct world *w, unsigned i, enum oo_kind kind, uintptr_t stream) {
    need(use_on(w, i, kind, kind == OO_BACKWARD ? 1 : -1, 0, stream), "use");
}

static void gradient_from(struct world *w, uintptr_t stream) {
    static char gradient[512], target[512];
    need(oo_engine_download(w->engine, target, (uintptr_t)gradient, sizeof gradient, stream),
         "download");
}

/* Forward, then backward with a gradient after each unit. */
static void train(struct world *w) {
    for (unsigned i = 0; i < UNITS; i++)
        touch(w, i, OO_FORWARD, w->stream);
    for (unsigned i = UNITS; i-- > 0;) {
        touch(w, i, OO_BACKWARD, w->stream);
        gradient_from(w, w->stream);
    }
}

/* Hold, then rewrite the masters from `first` on. Returns how often the host waited. */
static uint64_t hold_and_write(struct world *w, unsigned first) {
    const uint64_t calls = sim.simCallCount("cuStreamSynchronize") +
                           sim.simCallCount("cuEventSynchronize") +
                           sim.simCallCount("cuEventQuery") + sim.simCallCount("cuStreamQuery");
    const uint64_t waits = stats_of(w).host_waits;
    need(oo_engine_hold(w->engine), "hold");
    const uint64_t asked = sim.simCallCount("cuStreamSynchronize") +
                           sim.simCallCount("cuEventSynchronize") +
                           sim.simCallCount("cuEventQuery") + sim.simCallCount("cuStreamQuery");
    CHECK(asked - calls == stats_of(w).host_waits - waits, "%llu calls, %llu waits",
          (unsigned long long)(asked - calls),
          (unsigned long long)(stats_of(w).host_waits - waits));
    for (unsigned i = first; i < UNITS; i++)
        CHECK(sim.simHostAccess(w->master[i], w->bytes[i], 1) == 0, "refused");
    check_no_reports("hold");
    return stats_of(w).host_waits - waits;
}

CASE(a_step_after_its_gradients_waits_for_nothing) {
    for (size_t arena = 60000; arena <= 400000; arena += 340000) {
        struct world w;
        world_open(&w, arena, 0);
        for (int i = 0; i < 4; i++) {
            train(&w);
            CHECK(hold_and_write(&w, 0) == 0, "arena of %zu bytes, step %d: waited", arena, i);
        }
        world_close(&w, "train");
    }
}

CASE(a_step_after_a_forward_alone_waits_once) {
    struct world w;
    world_open(&w, 60000, 0);
    train(&w);
    CHECK(hold_and_write(&w, 0) == 0, "waited");
    touch(&w, 3, OO_FORWARD, w.stream);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    CHECK(hold_and_write(&w, 0) == 0, "waited twice");
    world_close(&w, "forward");
}

CASE(copies_of_frozen_weights_are_not_waited_for) {
    struct world w;
    world_open(&w, 400000, 20);
    for (unsigned i = 20; i < UNITS; i++)
        oo_plan_allow(w.engine->plan, w.unit[i], 0);
    for (unsigned i = 0; i < 5; i++)
        touch(&w, i, OO_FORWARD, w.stream);
    CHECK(hold_and_write(&w, 20) == 0, "waited");
    /* What becomes trainable while its copy is under way counts as well. */
    need(oo_unit_set_trainable(w.engine, w.unit[4], 1), "trainable");
    CHECK(hold_and_write(&w, 20) == 1, "not waited for");
    CHECK(sim.simHostAccess(w.master[4], w.bytes[4], 1) == 0, "refused");
    world_close(&w, "frozen");
}

/* The gradient came after some copies, and not after one that no stream has waited for. */
CASE(a_copy_ahead_is_waited_for) {
    struct world w;
    world_open(&w, 400000, 0);
    const struct oo_use held = use_begin(w.engine, w.member[0], w.stream, 1e-6, "acquire");
    const struct oo_fetched fetched = use_end(w.engine, &held, w.stream, "release");
    CHECK(fetched.count > 0, "nothing is copied ahead");
    gradient_from(&w, w.stream);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    world_close(&w, "ahead");
}

/* Frozen masters, too, may be rewritten once it has settled. */
CASE(what_has_settled_may_be_rewritten) {
    for (int locked = 0; locked < 2; locked++) {
        struct world w;
        if (!locked)
            sim.simLockQuota(0);
        world_open(&w, 60000, -1);
        for (unsigned i = 0; i < 5; i++) /* and copies ahead units that no stream waits for */
            touch(&w, i, OO_FORWARD, w.stream);
        const struct oo_request request = {
            .member = w.member[9], .stream = w.stream, .seconds = 1e-3};
        uintptr_t address;
        need(oo_engine_map(w.engine, &request, 0, &address), "map");
        CHECK((address != 0) == locked, "mapped to %#zx", (size_t)address);
        if (locked)
            need(oo_engine_unmap(w.engine, w.member[9], w.stream), "unmap");
        need(oo_engine_settle(w.engine), "settle");
        const uint64_t waits = stats_of(&w).host_waits;
        CHECK(sim.simHostAccess(oo_host_address(w.host), w.total, 1) == 0, "refused");
        check_no_reports("settled");
        need(oo_engine_settle(w.engine), "settle");
        CHECK(stats_of(&w).host_waits == waits, "waited twice");
        world_close(&w, "settled");
        sim.simLockQuota(UINT64_MAX);
    }
}

/* While a copy thread still has masters to read, settling does not return: who goes on writes. */
CASE(copy_threads_are_waited_for) {
    enum { BYTES = 32 << 20 };
    struct world w;
    struct oo_host *host;
    uint32_t unit;
    size_t offset;
    world_open(&w, BYTES + 400000, -1);
    need(oo_host_create(BYTES, &host), "host memory");
    need(oo_engine_lock(w.engine, host, 0), "which is known and not locked");
    const struct oo_tensor tensor = {.host = oo_host_address(host), .bytes = BYTES};
    need(oo_member_move(w.engine, w.member[4], &tensor, 1, &unit, &offset), "move");
    for (int round = 0; round < 3; round++) /* learned */
        for (unsigned i = 3; i < 6; i++) {
            const struct oo_use held = use_begin(w.engine, w.member[i], w.stream, 1e-6, "acquire");
            if (round == 2 && i == 3)
                need(oo_engine_refresh(w.engine, w.model), "refresh");
            use_end(w.engine, &held, w.stream, "release");
            if (round < 2 || i > 3)
                continue;
            CHECK(oo_plan_resident(w.engine->plan, unit) != NULL, "not copied ahead");
            need(oo_engine_settle(w.engine), "settle");
            CHECK(!oo__feeds_run(w.engine), "a copy thread reads masters");
        }
    need(oo_member_remove(w.engine, w.member[4]), "remove");
    end_memory(w.engine, host);
    world_close(&w, "copy threads");
}

/* Units are copied one by one, on request: nothing is fetched ahead. */
static void open_one_by_one(struct world *w) {
    world_open(w, 400000, 0);
    for (unsigned i = 0; i < UNITS; i++)
        oo_plan_allow(w->engine->plan, w->unit[i], 0);
}

CASE(a_gradient_tells_of_its_own_stream_alone) {
    for (int ours = 0; ours < 2; ours++) {
        struct world w;
        open_one_by_one(&w);
        const uintptr_t other = new_stream(&w);
        touch(&w, 3, OO_FORWARD, w.stream);
        gradient_from(&w, ours ? w.stream : other);
        CHECK(hold_and_write(&w, 0) == !ours, "stream %d", ours);
        end_stream(&w, other);
        world_close(&w, "stream");
    }
}

/* What the stream before had waited for is not what this one comes after. */
CASE(a_gradient_tells_nothing_of_a_stream_with_the_same_handle) {
    struct world w;
    open_one_by_one(&w);
    uintptr_t stream = new_stream(&w);
    touch(&w, 3, OO_FORWARD, stream);
    stream = recycle_stream(&w, stream);
    gradient_from(&w, stream);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    end_stream(&w, stream);
    world_close(&w, "same handle");
}

CASE(what_two_streams_wait_for_is_told_apart) {
    struct world w;
    open_one_by_one(&w);
    const uintptr_t other = 0; /* the default stream */
    touch(&w, 3, OO_FORWARD, other);
    touch(&w, 4, OO_FORWARD, w.stream);
    touch(&w, 3, OO_FORWARD, w.stream); /* its copy came before: nothing is known less */
    gradient_from(&w, w.stream);
    touch(&w, 5, OO_FORWARD, w.stream);
    touch(&w, 3, OO_FORWARD, other); /* which waited for it already, and for nothing since */
    gradient_from(&w, other);
    CHECK(w.engine->copies.ended == 2, "%llu", (unsigned long long)w.engine->copies.ended);
    touch(&w, 4, OO_FORWARD, other); /* what the first stream waited for does not count here */
    gradient_from(&w, other);
    CHECK(w.engine->copies.awaited == 2 && w.engine->copies.ended == 2, "%llu, %llu",
          (unsigned long long)w.engine->copies.awaited, (unsigned long long)w.engine->copies.ended);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    CHECK(w.engine->copies.ended == 3, "%llu", (unsigned long long)w.engine->copies.ended);
    world_close(&w, "two streams");
}

/* A gradient may come late, after a wait from which more is known. */
CASE(what_is_known_is_never_less) {
    struct world w;
    open_one_by_one(&w);
    touch(&w, 3, OO_FORWARD, w.stream);
    const uintptr_t other = 0; /* the default stream */
    touch(&w, 4, OO_FORWARD, other);
    gradient_from(&w, other);
    touch(&w, 3, OO_FORWARD, other);
    gradient_from(&w, other);
    gradient_from(&w, w.stream); /* of which nothing is known */
    CHECK(hold_and_write(&w, 0) == 0, "waited");
    world_close(&w, "never less");
}

/* It stays until its use ends, and so it may be written while its copy reads it. */
CASE(a_copy_of_what_is_in_use_is_waited_for) {
    struct world w;
    struct oo_use held;
    open_one_by_one(&w);
    need(acquire(w.engine, w.member[3], w.stream, 0, OO_BACKWARD, 1, 0, &held), "acquire");
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    use_end(w.engine, &held, w.stream, "release");
    world_close(&w, "in use");
}

CASE(a_wait_that_fails_is_made_again) {
    struct world w;
    open_one_by_one(&w);
    touch(&w, 3, OO_FORWARD, w.stream);
    fail_call("cuStreamSynchronize", 1);
    CHECK(oo_engine_hold(w.engine) == OO_E_DRIVER, "no error");
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    world_close(&w, "fault");
}

CASE(a_wait_that_was_not_queued_tells_nothing) {
    struct world w;
    struct oo_use use;
    open_one_by_one(&w);
    fail_call("cuStreamWaitEvent", 1);
    CHECK(try_acquire(&w, 3, 0, &use) == OO_E_DRIVER, "no error");
    gradient_from(&w, w.stream);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    world_close(&w, "not queued");
}

CASE(a_gradient_that_has_not_arrived_tells_nothing) {
    static char gradient[512], target[512];
    for (unsigned nth = 1; nth <= 2; nth++) { /* of the ring's piece, and of the gradient */
        struct world w;
        open_one_by_one(&w);
        touch(&w, 3, OO_FORWARD, w.stream);
        fail_call("cuEventSynchronize", nth);
        fail_call("cuStreamSynchronize", 1);
        CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient,
                                 w.stream) == OO_E_DRIVER,
              "%u: no error", nth);
        CHECK(hold_and_write(&w, 0) == 1, "%u: not waited for", nth);
        world_close(&w, "not arrived");
    }
}

/* When a trip out has been awaited, all that its stream waited for before has ended. */
CASE(a_trip_that_has_not_arrived_tells_nothing) {
    static char bytes[512];
    for (unsigned failed = 0; failed < 2; failed++) {
        struct world w;
        uint64_t out = 0;
        open_one_by_one(&w);
        struct oo_host *host = locked_memory(w.engine, sizeof bytes);
        touch(&w, 3, OO_FORWARD, w.stream);
        need(oo_trip_out(w.engine, oo_host_address(host), (uintptr_t)bytes, sizeof bytes, w.stream,
                         &out),
             "out");
        if (failed)
            fail_call("cuEventQuery", 1);
        CHECK(oo_trip_await(w.engine, out) == (failed ? OO_E_DRIVER : OO_OK), "%u: await", failed);
        CHECK(hold_and_write(&w, 0) == failed, "%u: waited, or not", failed);
        need(oo_trip_end(w.engine, out), "end");
        end_memory(w.engine, host);
        world_close(&w, "trip");
    }
}

/* A copy that failed half-way reads masters as well. */
CASE(a_copy_that_failed_half_way_is_waited_for) {
    struct world w;
    struct oo_use use;
    open_one_by_one(&w);
    fail_call("cuEventRecord", 2); /* the first begins a measurement */
    CHECK(try_acquire(&w, 3, 0, &use) == OO_E_DRIVER, "no error");
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    world_close(&w, "half-way");
}

/* ---- masters of which a part is not locked ---- */

/* Member 4 moves into a unit of two tensors: the first where it was, the other in memory that is
 * known and not locked, or both there. */
static struct oo_host *move_half(struct world *w, int both) {
    struct oo_host *host;
    uint32_t unit;
    size_t offsets[2];
    need(oo_host_create(2 * 4096, &host), "memory");
    need(oo_engine_lock(w->engine, host, 0), "know");
    char *there = oo_host_address(host);
    fill(there, 2 * 4096, 9);
    const struct oo_tensor tensors[2] = {
        {.host = both ? there + 4096 : w->master[4], .bytes = 4096},
        {.host = there, .bytes = 4096}};
    need(oo_member_move(w->engine, w->member[4], tensors, 2, &unit, offsets), "move");
    w->unit[4] = unit;
    return host;
}

static void use_moved(struct world *w) {
    const struct oo_use use = use_begin(w->engine, w->member[4], w->stream, 1e-6, "acquire");
    use_end(w->engine, &use, w->stream, "release");
}

static void end_moved(struct world *w, struct oo_host *host, const char *where) {
    need(world_remove(w), "remove");
    end_memory(w->engine, host);
    world_close(w, where);
}

CASE(only_what_the_device_reads_in_place_counts) {
    for (int both = 0; both < 2; both++) {
        struct world w;
        open_one_by_one(&w);
        struct oo_host *host = move_half(&w, both);
        oo_plan_allow(w.engine->plan, w.unit[4], 0);
        use_moved(&w);
        CHECK(hold_and_write(&w, 0) == !both, "%d", both);
        CHECK(sim.simHostAccess(oo_host_address(host), 2 * 4096, 1) == 0, "refused");
        check_no_reports("unlocked");
        end_moved(&w, host, "half locked");
    }
}

/* The copy threads queue a copy when they come to it. Its number is given when that is noticed, and
 * may be above that of a copy that was queued behind it. */
CASE(the_copy_threads_copies_do_not_tell_of_others) {
    struct world w;
    world_open(&w, 400000, 0);
    struct oo_host *host = move_half(&w, 0);
    for (int round = 0; round < 3; round++) { /* learned */
        touch(&w, 3, OO_FORWARD, w.stream);
        use_moved(&w);
        touch(&w, 5, OO_FORWARD, w.stream);
    }
    (void)hold_and_write(&w, 0);
    need(oo_engine_resume(w.engine), "resume");
    for (unsigned i = 0; i < UNITS; i++)
        oo_plan_allow(w.engine->plan, w.unit[i], i == 4 || i == 5);
    const struct oo_use held = use_begin(w.engine, w.member[3], w.stream, 1e-6, "acquire");
    const struct oo_fetched fetched = use_end(w.engine, &held, w.stream, "release");
    CHECK(fetched.count == 2 && fetched.units[0] == w.unit[4] && fetched.units[1] == w.unit[5],
          "%u copied ahead", fetched.count);
    use_moved(&w);
    gradient_from(&w, w.stream);
    CHECK(hold_and_write(&w, 0) == 1, "not waited for");
    end_moved(&w, host, "behind");
}

CHECK_MAIN(world_prepare)
