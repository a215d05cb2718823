/* The caller's context is left as it was; a call that cannot have the device's says so; a capturing
 * stream is refused. */
#include "world.h"

CASE(test_the_callers_context_is_left_as_it_was) {
    struct world w;
    OOCUcontext current = NULL;
    world_open(&w, 60000, -1);
    need(step(&w), "without a context");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == NULL, "the engine left its context behind");
    sim.cuCtxPushCurrent_v2(w.context);
    const uint64_t pushes = sim.simCallCount("cuCtxPushCurrent"),
                   pops = sim.simCallCount("cuCtxPopCurrent");
    need(step(&w), "with the context current already");
    CHECK(sim.simCallCount("cuCtxPushCurrent") == pushes &&
              sim.simCallCount("cuCtxPopCurrent") == pops,
          "the context is pushed although it is current");
    sim.cuCtxPopCurrent_v2(&current);
    CHECK(current == w.context, "the caller's context was popped");
    world_close(&w, "context");
}

/* A thread that asks for it keeps the context, and pays for it no more. */
CASE(test_a_context_that_was_asked_for_stays) {
    struct world w;
    OOCUcontext other = NULL, current = NULL;
    CHECK(sim.simSetDeviceCount(2) == 0, "no second device");
    world_open(&w, 60000, -1);
    for (int i = 0; i < 2; i++) { /* the second time there is nothing left to do */
        need(oo_engine_make_current(w.engine), "make current");
        sim.cuCtxGetCurrent(&current);
        CHECK(current == w.context, "not current");
    }
    const uint64_t pushes = sim.simCallCount("cuCtxPushCurrent");
    need(step(&w), "with it");
    CHECK(sim.simCallCount("cuCtxPushCurrent") == pushes, "pushed again");
    CHECK(sim.cuDevicePrimaryCtxRetain(&other, 1) == 0 && sim.cuCtxPushCurrent_v2(other) == 0,
          "no second context");
    need(step(&w), "under another context");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == other, "another context is current than before");
    sim.cuCtxPopCurrent_v2(NULL);
    sim.cuCtxPopCurrent_v2(&current);
    CHECK(current == w.context, "another context is below");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == NULL, "it was made current twice");
    fail_call("cuCtxPushCurrent", 1);
    CHECK(oo_engine_make_current(w.engine) == OO_E_DRIVER, "no error");
    sim.cuCtxGetCurrent(&current);
    CHECK(current == NULL, "current all the same");
    sim.cuDevicePrimaryCtxRelease_v2(1);
    world_close(&w, "asked for");
    CHECK(sim.simSetDeviceCount(1) == 0, "two devices");
}

/* A release succeeds even where the context cannot be made current, and pops none that it did not
 * push. */
CASE(test_a_release_without_a_context) {
    struct world w;
    OOCUcontext other = NULL, current = NULL;
    struct oo_use held;
    CHECK(sim.simSetDeviceCount(2) == 0, "no second device");
    world_open(&w, 60000, -1);
    CHECK(sim.cuDevicePrimaryCtxRetain(&other, 1) == 0 && sim.cuCtxPushCurrent_v2(other) == 0,
          "no second context");
    static const char *const calls[] = {"cuCtxPushCurrent", "cuCtxGetCurrent"};
    for (int i = 0; i < 2; i++) {
        held = use_acquire(w.engine, w.member[0], w.stream, "acquire");
        fail_call(calls[i], 1);
        use_end(w.engine, &held, w.stream, "release");
        sim.cuCtxGetCurrent(&current);
        CHECK(current == other, "%s: the caller's context was popped", calls[i]);
        CHECK(oo_plan_pins(w.engine->plan, w.unit[0]) == 0, "still in use");
    }
    need(world_remove(&w), "remove"); /* waits for the uses that could not be marked */
    CHECK(stats_of(&w).recoveries >= 1, "a lost use was not waited for");
    sim.cuCtxPopCurrent_v2(NULL);
    sim.cuDevicePrimaryCtxRelease_v2(1);
    world_close(&w, "release without a context");
    CHECK(sim.simSetDeviceCount(1) == 0, "two devices");
}

/* Without a context no mark can be set, and nothing of it is tried. */
CASE(test_a_release_without_a_context_asks_the_driver_for_nothing) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent", "cuEventCreate",
                                        "cuEventQuery", "cuEventElapsedTime"};
    struct world w;
    struct oo_use use[OO_STREAMS + 1];
    uintptr_t streams[OO_STREAMS + 1];
    world_open(&w, 400000, -1);
    need(oo_trace_start(w.engine), "timeline");
    for (int i = 0; i <= OO_STREAMS; i++) {
        streams[i] = new_stream(&w);
        use[i] = use_begin(w.engine, w.member[3], streams[i], 1e-3, "acquire");
    }
    for (int i = 0; i <= OO_STREAMS; i++) {
        uint64_t before[5];
        for (int c = 0; c < 5; c++)
            before[c] = sim.simCallCount(calls[c]);
        struct oo_event *pool = NULL, **end = &w.engine->spans.free_events[OO_ORDERS];
        if (i == 1 || i == OO_STREAMS) {
            fail_call("cuCtxGetCurrent", 1);
            pool = *end; /* with none in reserve, an event would have to be created */
            *end = NULL;
        }
        use_end(w.engine, &use[i], streams[i], "release");
        while (*end)
            end = &(*end)->next;
        *end = pool;
        for (int c = 0; c < 5 && (i == 1 || i == OO_STREAMS); c++)
            CHECK(sim.simCallCount(calls[c]) == before[c], "release %d calls %s", i, calls[c]);
    }
    use[0] = use_acquire(w.engine, w.member[3], streams[2], "on a stream that has its mark");
    const uint64_t records = sim.simCallCount("cuEventRecord");
    fail_call("cuCtxGetCurrent", 1);
    use_end(w.engine, &use[0], streams[2], "release");
    CHECK(sim.simCallCount("cuEventRecord") == records, "a mark was tried");
    steps(&w, 2, "what comes next is known");
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    use[0] = use_acquire(w.engine, w.member[0], streams[2], "with much to fetch ahead");
    fail_call("cuCtxGetCurrent", 1);
    const struct oo_fetched fetched = use_end(w.engine, &use[0], streams[2], "release");
    CHECK(fetched.count == 0 && stats_of(&w).prefetch_failures == 0, "a copy was tried");
    end_timeline(w.engine);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(step(&w), "over all of their kernels");
    for (int i = 0; i <= OO_STREAMS; i++)
        end_stream(&w, streams[i]);
    world_close(&w, "no context");
}

CASE(test_a_lock_that_loses_the_context_names_itself) {
    struct oo_engine *engine;
    struct oo_host *host;
    need(oo_engine_create(sim.path, 0, &engine), "create");
    need(oo_host_create(4096, &host), "host memory");
    sim.simFault("cuMemHostRegister", 1, OOCU_ERROR_ILLEGAL_ADDRESS, 0);
    CHECK(oo_engine_lock(engine, host, OO_ALL_BYTES) == OO_E_DRIVER &&
              strstr(oo_error_message(), "cuMemHostRegister") == oo_error_message() &&
              strstr(oo_error_message(), "restart"),
          "%s", oo_error_message());
    need(oo_host_destroy(host), "no engine uses it");
    CHECK(oo_engine_destroy(engine) == OO_LEAKED, "no error");
    sim.simFaultClear();
    release_leaked_contexts();
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* Every call says so when it cannot make the context current, and changes nothing. */
CASE(test_each_call_needs_the_context) {
    struct world w;
    uintptr_t stream;
    size_t free_bytes = 77, total_bytes, offset, count;
    uint32_t id;
    struct oo_use held;
    struct oo_fetched fetched;
    struct oo_resident row;
    struct oo_unit_waits waits;
    struct oo_trace_row *rows;
    struct oo_stats stats;
    const uint32_t one = 1;
    world_begin(&w);
    w.stream = new_stream(&w);
    CHECK(world_attach(&w, 60000, -1), "attach");
    const struct oo_tensor tensor = {.host = w.master[0], .bytes = w.bytes[0]};
    char memory[512];
#define FAILS(call)                                                                                \
    do {                                                                                           \
        fail_call("cuCtxGetCurrent", 1);                                                           \
        const enum oo_status status = call;                                                        \
        CHECK(status == OO_E_DRIVER && strstr(oo_error_message(), "cuCtxGetCurrent"), "%s: %s",    \
              #call, oo_status_name(status));                                                      \
        sim.simFaultClear();                                                                       \
    } while (0)
    FAILS(oo_engine_compute_stream(w.engine, &stream));
    CHECK(w.engine->compute == NULL, "a stream was created");
    FAILS(oo_engine_mem_info(w.engine, &free_bytes, &total_bytes));
    CHECK(free_bytes == 77, "asked all the same");
    FAILS(try_acquire(&w, 0, 0, &held));
    FAILS(oo_engine_prefetch(w.engine, &fetched));
    FAILS(oo_engine_launch(w.engine, w.member[0], w.stream, 0));
    FAILS(oo_engine_spin(w.engine, w.stream, 0));
    FAILS(oo_engine_download(w.engine, memory, (uintptr_t)memory + 256, 256, w.stream));
    FAILS(oo_engine_hold(w.engine));
    FAILS(oo_engine_resume(w.engine));
    FAILS(oo_engine_refresh(w.engine, OO_ALL_MODELS));
    FAILS(oo_engine_set_verify(w.engine, 1));
    FAILS(oo_engine_lock(w.engine, w.host, OO_ALL_BYTES));
    FAILS(oo_engine_unlock(w.engine, w.host));
    FAILS(oo_model_add(w.engine, &id));
    FAILS(oo_lease_add(w.engine, &id));
    FAILS(oo_lease_remove(w.engine, w.lease));
    FAILS(oo_model_remove(w.engine, w.model));
    FAILS(oo_segment_add(w.engine, w.lease, (uintptr_t)memory, 512, w.stream));
    FAILS(oo_unit_add(w.engine, w.model, &tensor, &one, 1, 0, &id, &id, &offset));
    FAILS(oo_member_move(w.engine, w.member[0], &tensor, 1, &id, &offset));
    FAILS(oo_member_remove(w.engine, w.member[0]));
    FAILS(oo_unit_set_trainable(w.engine, w.unit[0], 1));
    FAILS(oo_trace_start(w.engine));
    FAILS(oo_trace_stop(w.engine, &rows, &count));
    FAILS(oo_engine_stats(w.engine, OO_ALL_MODELS, &stats));
    FAILS(oo_engine_residents(w.engine, &row, 1, &count));
    FAILS(oo_engine_unit_waits(w.engine, &waits, 1, &count));
    FAILS(oo_engine_destroy(w.engine));
#undef FAILS
    sim.simFault(NULL, 1, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 1);
    need(oo_engine_stamp(w.engine, &(struct oo_stamp){w.member[0], 0}, 1, 0),
         "a stamp needs no driver");
    sim.simFaultClear();
    need(step(&w), "step");
    CHECK(oo_engine_destroy(w.engine) == OO_E_STATE, "destroyed with a model");
    end_stream(&w, w.stream);
    w.stream = 0;
    world_close(&w, "context");
}

CASE(test_a_capturing_stream_is_refused) {
    struct world w;
    struct oo_use use;
    world_open(&w, 60000, -1);
    need(step(&w), "step");
    const uintptr_t stream = new_stream(&w);
    begin_capture(&w, stream);
    const struct oo_stats before = stats_of(&w);
    ANSWERS(OO_E_CAPTURE, "CUDA graph",
            acquire(w.engine, w.member[0], stream, 0, OO_FORWARD, -1, 0, &use));
    CHECK(stats_of(&w).acquires == before.acquires, "a refused acquire is counted");
    CHECK(acquire(w.engine, 5000, stream, 0, OO_FORWARD, -1, 0, &use) == OO_E_STATE,
          "no such member, whatever the stream does");
    static char lent[4096];
    ANSWERS(OO_E_CAPTURE, "CUDA graph",
            oo_segment_add(w.engine, w.lease, (uintptr_t)lent, 4096, stream));
    CHECK(oo_segment_add(w.engine, w.lease, (uintptr_t)lent, 8, stream) == OO_E_ARGUMENT,
          "too small, whatever the stream does");
    CHECK(stats_of(&w).arena_bytes == before.arena_bytes, "lent all the same");
    end_capture(stream);
    need(use_on(&w, 0, OO_FORWARD, -1, 0, stream), "after the capture");
    need(oo_segment_add(w.engine, w.lease, (uintptr_t)lent, 4096, w.stream), "lend after it");
    end_stream(&w, stream);
    world_close(&w, "capture");
}

CHECK_MAIN(world_prepare)
