/* Any driver call may fail, once or for as long as a fault lasts: a clear error or the documented
 * fallback, never a wrong byte, a leak or a hang; and what comes after is as if it had never
 * failed. */
#include "world.h"

/* A life of the engine in which the n-th driver call fails; every error is allowed, a wrong byte, a
 * leak or a hang is not. Returns how many calls the life made. */
static uint64_t life_with_fault(uint64_t nth, int lasting) {
    struct world w;
    memset(&w, 0, sizeof w);
    world_sizes(&w);
    const uint64_t before = sim.simCallCount(NULL);
    if (nth)
        sim.simFault(NULL, nth, OOCU_ERROR_UNKNOWN, lasting);
    int failures = 0;
    if (oo_engine_create(sim.path, 0, &w.engine) != OO_OK) {
        CHECK(nth != 0, "create: %s", oo_error_message());
        sim.simFaultClear();
        release_leaked_contexts();
        need(oo_engine_create(sim.path, 0, &w.engine), "create after the fault");
    }
    if (!world_attach(&w, 60000, 20)) {
        failures++;
        sim.simFaultClear();
        if (w.host) {
            for (uint32_t m = 0; m < 4; m++)
                (void)oo_model_remove(w.engine, m);
            oo_host_destroy(w.host);
            w.host = NULL;
        }
        CHECK(world_attach(&w, 60000, 20), "attach after the fault: %s", oo_error_message());
    }
    for (int i = 0; i < 2; i++) {
        failures += step(&w) != OO_OK;
        failures += oo_engine_hold(w.engine) != OO_OK;
        failures += oo_engine_resume(w.engine) != OO_OK;
        /* Static: a download that could not even be waited for may read its source later. */
        static char gradient[8192], target[8192];
        fill(gradient, sizeof gradient, (unsigned)i);
        if (oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream) ==
            OO_OK)
            CHECK(memcmp(gradient, target, sizeof gradient) == 0,
                  "a gradient arrived wrong after fault %llu", (unsigned long long)nth);
        else
            failures++;
    }
    CHECK(nth || failures == 0, "failures without a fault: %s", oo_error_message());
    sim.simFaultClear();
    need(step(&w), "a step after the fault");
    if (oo_model_remove(w.engine, w.model) != OO_OK)
        CHECK(0, "remove after the fault: %s", oo_error_message());
    oo_host_destroy(w.host);
    need(oo_engine_destroy(w.engine), "destroy after the fault");
    free(w.arena);
    const uint64_t calls = sim.simCallCount(NULL) - before;
    CHECK(lasting || nth <= calls, "call %llu of %llu was never made", (unsigned long long)nth,
          (unsigned long long)calls);
    leave_contexts();
    char name[64];
    snprintf(name, sizeof name, "fault at call %llu, lasting %d", (unsigned long long)nth, lasting);
    check_no_reports(name);
    check_nothing_alive(name);
    CHECK(sim_reset(&sim) == 0, "%s: not reset", name);
    return calls;
}

/* The sweep is every call, unless the environment asks for every k-th (the mutation gate does). */
static uint64_t stride(void) {
    const char *text = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    const unsigned long value = text ? strtoul(text, NULL, 10) : 1;
    return value ? value : 1;
}

static void test_any_call_may_fail_once(void) {
    const uint64_t calls = life_with_fault(0, 0);
    CHECK(calls > 300, "only %llu calls in a life", (unsigned long long)calls);
    for (uint64_t n = 1; n <= calls; n += stride())
        life_with_fault(n, 0);
    printf("%llu calls in a life; %llu of them failed once\n", (unsigned long long)calls,
           (unsigned long long)((calls + stride() - 1) / stride()));
}

static void test_a_fault_may_last(void) {
    const uint64_t calls = life_with_fault(0, 0);
    for (uint64_t n = 1; n <= calls; n += 7 * stride())
        life_with_fault(n, 1);
    printf("%llu faults that lasted\n",
           (unsigned long long)((calls + 7 * stride() - 1) / (7 * stride())));
}

int main(int argc, char **argv) {
    sim = sim_open(argc, argv);
    sim_reset(&sim);
    test_any_call_may_fail_once();
    test_a_fault_may_last();
    return check_report();
}
