/* Gradients to the host: where they may go, and what a download that failed leaves. */
#include "world.h"

/* Into memory that the engine knows, and could not lock: through the ring, as all that is pageable.
 */
CASE(test_a_gradient_into_pageable_masters) {
    struct world w;
    char gradient[5000];
    sim.simRefuseRegistration(1);
    world_open(&w, 60000, -1);
    fill(gradient, sizeof gradient, 9);
    need(oo_engine_download(w.engine, w.master[0], (uintptr_t)gradient, 4096, w.stream),
         "download");
    CHECK(memcmp(w.master[0], gradient, 4096) == 0, "wrong bytes");
    check_no_reports("pageable");
    CHECK(oo_engine_download(w.engine, (void *)(UINTPTR_MAX - 1), (uintptr_t)gradient, 4,
                             w.stream) == OO_E_ARGUMENT,
          "to the end of memory");
    CHECK(stats_of(&w).recoveries == 0, "recovered from nothing");
    sim.simRefuseRegistration(0);
    world_close(&w, "pageable");
}

/* The simulated device refuses the gradient, or the host its bytes: nothing stays adopted. */
CASE(test_a_refused_gradient_is_not_kept) {
    static const char *const calls[] = {"simAdopt", "cuEventRecord", "simHostAccess", "simDrop"};
    for (unsigned i = 0; i < 4; i++) {
        struct world w;
        struct sim_live before, after;
        char gradient[2048], target[2048];
        world_open(&w, 60000, -1);
        fill(gradient, sizeof gradient, 1);
        sim.simGetLive(&before);
        fail_call(calls[i], 1);
        const enum oo_status status =
            oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream);
        CHECK(status == (i == 3 ? OO_OK : OO_E_DRIVER), "%s: %s", calls[i], oo_status_name(status));
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes + (i == 3 ? sizeof gradient : 0),
              "%s: kept", calls[i]);
        CHECK(w.engine->unfinished == (i == 3 ? (OOCUdeviceptr)gradient : 0),
              "%s: wrongly unfinished", calls[i]);
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
             "again");
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes, "%s: kept", calls[i]);
        world_close(&w, calls[i]);
    }
}

/* A download fails behind: the copy has ended when the call returns, as its buffers go back. */
CASE(test_a_failed_download_leaves_no_copy_behind) {
    static const char *const calls[] = {"cuEventRecord",     "cuEventRecord",
                                        "cuEventRecord",     "cuEventSynchronize",
                                        "cuStreamWaitEvent", "cuMemcpyDtoHAsync"};
    static const uint64_t nth[] = {1, 2, 3, 1, 1, 1};
    for (unsigned i = 0; i < sizeof nth / sizeof nth[0]; i++) {
        struct world w;
        world_open_on_device(&w, 60000);
        char *gradient = device_memory(&w, 50000);
        struct oo_host *host = locked_memory(w.engine, 50000);
        kernel(w.stream, gradient, 50000, 1, 1e-3);
        const struct oo_stats before = stats_of(&w);
        fail_call(calls[i], nth[i]);
        CHECK(oo_engine_download(w.engine, oo_host_address(host), (uintptr_t)gradient, 50000,
                                 w.stream) == OO_E_DRIVER &&
                  strstr(oo_error_message(), calls[i]),
              "%s: %s", calls[i], oo_error_message());
        const struct oo_stats after = stats_of(&w);
        const int counted = i == 3; /* the copy was queued and its end marked */
        CHECK(after.d2h_copies - before.d2h_copies == (counted ? 1u : 0u) &&
                  after.d2h_bytes - before.d2h_bytes == (counted ? 50000u : 0u),
              "%s %u: counted wrong", calls[i], i);
        CHECK(after.recoveries == before.recoveries + 1 &&
                  after.host_waits == before.host_waits + (counted ? 2 : 1),
              "%s %u: waits", calls[i], i);
        CHECK(after.d2h_seconds <= before.d2h_seconds, "measured what failed");
        CHECK(sim.simHostAccess(oo_host_address(host), 50000, 1) == 0, "access");
        check_no_reports(calls[i]);
        kernel(w.stream, gradient, 50000, 1, 1e-6);
        end_memory(w.engine, host);
        end_device_memory(&w, gradient);
        world_close(&w, calls[i]);
    }
}

/* Not even waiting works: the adopted gradient stays known until the next download, or the end. */
CASE(test_what_a_failed_download_left_is_ended_by_the_next) {
    for (int again = 0; again < 3; again++) {
        struct world w;
        struct sim_live before, after;
        char first[2048], second[2048], target[2048];
        sim.simRefuseRegistration(again ==
                                  2); /* then nothing else waits for downloads until the end */
        world_open(&w, 60000, -1);
        fill(first, sizeof first, 1);
        fill(second, sizeof second, 2);
        sim.simGetLive(&before);
        fail_call("cuEventSynchronize", 1);
        fail_call("cuStreamSynchronize", 1);
        fail_call("simDrop", 1);
        CHECK(oo_engine_download(w.engine, target, (uintptr_t)first, sizeof first, w.stream) ==
                  OO_E_DRIVER,
              "no error");
        sim.simFaultClear();
        sim.simGetLive(&after);
        CHECK(after.adopted_bytes == before.adopted_bytes + sizeof first,
              "given back while a copy is queued");
        if (again == 1) {
            /* To end it may fail as well: it is kept, and tried again. */
            static const char *const ends[] = {"cuStreamSynchronize", "simDrop"};
            for (int i = 0; i < 2; i++) {
                fail_call(ends[i], 1);
                CHECK(oo_engine_download(w.engine, target, (uintptr_t)second, sizeof second,
                                         w.stream) == OO_E_DRIVER &&
                          w.engine->unfinished == (uintptr_t)first,
                      "%s: %s", ends[i], oo_error_message());
                sim.simFaultClear();
            }
            need(oo_engine_download(w.engine, target, (uintptr_t)second, sizeof second, w.stream),
                 "next download");
            CHECK(memcmp(target, second, sizeof second) == 0, "wrong bytes");
            sim.simGetLive(&after);
            CHECK(after.adopted_bytes == before.adopted_bytes, "%llu bytes stay adopted",
                  (unsigned long long)(after.adopted_bytes - before.adopted_bytes));
            need(oo_engine_download(w.engine, target, (uintptr_t)first, sizeof first, w.stream),
                 "the same address again");
        }
        sim.simRefuseRegistration(0);
        world_close(&w, "unfinished download");
    }
}

/* The next gradient may be at the address of the unfinished one. */
CASE(test_an_unfinished_download_of_the_same_address) {
    struct world w;
    char gradient[2048], target[2048];
    world_open(&w, 60000, -1);
    fill(gradient, sizeof gradient, 1);
    fail_call("cuEventSynchronize", 1);
    fail_call("cuStreamSynchronize", 1);
    CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream) ==
              OO_E_DRIVER,
          "no error");
    sim.simFaultClear();
    need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
         "the same address");
    CHECK(memcmp(target, gradient, sizeof gradient) == 0, "wrong bytes");
    world_close(&w, "same address");
}

/* A download that gets too few events is refused before anything is queued, and can be repeated. */
CASE(test_a_download_without_events) {
    static char gradient[4096], target[4096];
    static const struct {
        enum oo_event_kind kind;
        unsigned left;
    } cases[] = {{OO_ORDERS, 0}, {OO_TIMED, 0}, {OO_TIMED, 1}};
    for (int c = 0; c < 3; c++) { /* the first download is measured */
        const unsigned left = cases[c].left;
        struct world w;
        world_open(&w, 60000, -1);
        (void)stats_of(&w); /* reads what is measured, so that nothing comes back to the list */
        struct oo_event **link = &w.engine->spans.free_events[cases[c].kind];
        for (unsigned i = 0; i < left; i++)
            link = &(*link)->next;
        struct oo_event *hidden = *link;
        *link = NULL;
        fill(gradient, sizeof gradient, left);
        sim.simFault("cuEventCreate", 1, OOCU_ERROR_OUT_OF_MEMORY, 0);
        CHECK(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient,
                                 w.stream) == OO_E_DRIVER &&
                  strstr(oo_error_message(), "cuEventCreate"),
              "%u left: %s", left, oo_error_message());
        CHECK(stats_of(&w).d2h_copies == 0, "copied");
        for (link = &w.engine->spans.free_events[cases[c].kind]; *link;)
            link = &(*link)->next;
        *link = hidden;
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
             "download");
        CHECK(memcmp(gradient, target, sizeof target) == 0, "wrong bytes");
        world_close(&w, "without events");
    }
}

CHECK_MAIN(world_prepare)
