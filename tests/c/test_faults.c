/* Any driver call may fail, with any CUresult, once or for as long as a fault lasts: a clear error
 * or the documented fallback, never a wrong byte, a leak or a hang; and what comes after is as if
 * it had never failed. After a sticky error the engine is dead, says so each time, and can be taken
 * down.
 *
 * A life is: create, attach, two training steps with gradients and masters that change, detach,
 * destroy. Each is lived with one fault, of a sample; ORACLE_OFFLOAD_TEST_FAULT_STRIDE=all takes
 * every call with one of the codes, and a number thins the sample out (for the mutation gate). */
#include "world.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

enum lasts { ONCE, UNTIL_LIFTED, TO_THE_END };
static const char *const lasts_names[] = {"once", "until lifted", "to the end"};

struct fault {
    const char *call; /* NULL: any */
    uint64_t nth;     /* 0: none */
    OOCUresult code;
    enum lasts lasts;
};

static const OOCUresult transient_codes[] = {
    OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, OOCU_ERROR_INVALID_VALUE, OOCU_ERROR_OUT_OF_MEMORY,
    OOCU_ERROR_INVALID_HANDLE,          OOCU_ERROR_NOT_READY,     OOCU_ERROR_NOT_SUPPORTED};
static const OOCUresult sticky_codes[] = {OOCU_ERROR_ILLEGAL_ADDRESS, OOCU_ERROR_LAUNCH_FAILED};
enum { TRANSIENT_CODES = 6, STICKY_CODES = 2 };

#define NAME(base, symbol, introduced, traits, parameters) traits &SIM_ANY_TIME ? NULL : #base,
static const char *const kinds[] = {SIM_CALLS(NAME) "simLaunch",
                                    "simHostAccess",
                                    "simAdopt",
                                    "simDrop",
                                    "async h2d",
                                    "async kernel"};
#undef NAME
/* The last ones: no call of the device, so no loss of its context; and errors that always are. */
enum { KINDS = sizeof kinds / sizeof kinds[0], MEMORY_KIND = KINDS - 4, ASYNC_KIND = KINDS - 2 };
static uint64_t calls_of[KINDS], calls_of_all; /* in a life without a fault */

static const char *describe(const struct fault *fault) {
    static char text[128];
    snprintf(text, sizeof text, "%s #%llu fails with %d, %s", fault->call ? fault->call : "call",
             (unsigned long long)fault->nth, fault->code, lasts_names[fault->lasts]);
    return text;
}

static void strike(const struct fault *fault) {
    if (fault->nth)
        sim.simFault(fault->call, fault->nth, fault->code, fault->lasts != ONCE);
}

/* What the calls of one life answered. */
struct answers {
    const struct fault *fault;
    int failures;
    char first[1024]; /* message */
};

/* Every failure names the call that was made to fail, and says the same each time. Returns whether
 * it succeeded. */
static int clear_answer(struct answers *answers, enum oo_status status) {
    const struct fault *fault = answers->fault;
    if (status == OO_OK)
        return 1;
    const char *call, *name;
    int code;
    oo_error_driver(&call, &code, &name);
    CHECK(status == OO_E_DRIVER && code == fault->code &&
              (fault->call ? strcmp(call, fault->call) == 0 : call[0] != '\0') &&
              strncmp(oo_error_message(), call, strlen(call)) == 0 && name[0],
          "%s: %s: %s", describe(fault), oo_status_name(status), oo_error_message());
    if (answers->failures++ == 0)
        snprintf(answers->first, sizeof answers->first, "%s", oo_error_message());
    else if (fault->call)
        CHECK(strcmp(answers->first, oo_error_message()) == 0, "%s: first '%s', then '%s'",
              describe(fault), answers->first, oo_error_message());
    return 0;
}

/* A gradient arrives as it was computed. */
static enum oo_status bring_gradient(struct world *w, int round) {
    /* Static: a download that could not even be waited for may read its source later. */
    static char gradient[8192], target[8192];
    fill(gradient, sizeof gradient, (unsigned)round);
    enum oo_status status =
        oo_engine_download(w->engine, target, (uintptr_t)gradient, sizeof gradient, w->stream);
    if (status == OO_OK)
        CHECK(memcmp(gradient, target, sizeof gradient) == 0, "a gradient arrived wrong");
    return status;
}

/* A step; where the masters are locked, it waits only to recover, and each such wait is counted. */
static enum oo_status counted_step(struct world *w) {
    struct sim_stats before, after;
    const uint64_t recoveries = w->engine->stats.recoveries;
    sim.simGetStats(&before);
    enum oo_status status = step(w);
    sim.simGetStats(&after);
    if (w->host->locked)
        CHECK(after.host_waits - before.host_waits <= w->engine->stats.recoveries - recoveries,
              "%llu waits, %llu recoveries",
              (unsigned long long)(after.host_waits - before.host_waits),
              (unsigned long long)(w->engine->stats.recoveries - recoveries));
    return status;
}

static enum oo_status remove_all(struct world *w) {
    enum oo_status status = OO_OK;
    while (w->engine->leases && status == OO_OK)
        status = oo_lease_remove(w->engine, w->engine->leases->id);
    for (uint32_t m = 0; m < w->engine->n_models && status == OO_OK; m++)
        if (!w->engine->models[m].removed)
            status = oo_model_remove(w->engine, m);
    return status;
}

/* Whether the call that fails gives something back: it is reported and not repeated. */
static int gives_back(const struct fault *fault) {
    return !fault->call || strstr(fault->call, "Destroy") || strstr(fault->call, "Release") ||
           strstr(fault->call, "Pop") || strstr(fault->call, "Free") ||
           strstr(fault->call, "Unload");
}

static enum oo_status take_down_part(struct world *w, int part) {
    return part == 0   ? remove_all(w)
           : part == 1 ? oo_host_destroy(w->host)
                       : oo_engine_destroy(w->engine);
}

/* Detach and destroy: what fails returns, and can be repeated. Returns whether the driver refused
 * to take something back, which is reported and not repeated. */
static int take_down(struct world *w, struct answers *answers) {
    enum oo_status status = OO_OK;
    for (int part = 0; part < 3; part++) {
        for (int attempt = 1;; attempt++) {
            status = take_down_part(w, part);
            if (status == OO_LEAKED || clear_answer(answers, status))
                break;
            if (answers->fault->lasts == ONCE || attempt == 3)
                sim.simFaultClear();
            CHECK(attempt <= 3, "%s: part %d cannot be taken down", describe(answers->fault), part);
        }
    }
    CHECK(status == OO_OK ||
              (gives_back(answers->fault) && strstr(oo_error_message(), "could not be given back")),
          "%s: %s", describe(answers->fault), oo_error_message());
    return status == OO_LEAKED;
}

static void end_of_life(struct world *w, const struct fault *fault, int leaked) {
    sim.simFaultClear();
    leave_contexts();
    if (leaked)
        release_leaked_contexts();
    check_no_reports(describe(fault));
    check_nothing_alive(describe(fault));
    CHECK(sim_reset(&sim) == 0, "%s: not reset", describe(fault));
    world_free(w);
    if (check_failed > 20) /* what follows would say the same, or suffer from it */
        exit(1);
}

/* A life with a fault from which the engine recovers. */
static void live(const struct fault *fault) {
    struct world w;
    struct answers answers = {fault, 0, ""};
    memset(&w, 0, sizeof w);
    w.coded = 1;
    world_sizes(&w);
    strike(fault);
    const uint64_t before = sim.simCallCount(fault->call);
    while (!clear_answer(&answers, oo_engine_create(sim.path, 0, &w.engine))) {
        if (answers.failures < 3 && fault->lasts != ONCE)
            continue;
        sim.simFaultClear();
        release_leaked_contexts();
        need(oo_engine_create(sim.path, 0, &w.engine), "create after the fault");
        break;
    }
    if (!world_attach(&w, 60000, 20)) {
        (void)clear_answer(&answers, w.refused);
        sim.simFaultClear();
        need(remove_all(&w), "remove");
        need(oo_host_destroy(w.host), "destroy host memory");
        w.host = NULL;
        CHECK(world_attach(&w, 60000, 20), "attach after the fault: %s", oo_error_message());
    }
    for (int i = 0; i < 3; i++) {
        (void)clear_answer(&answers, counted_step(&w));
        (void)clear_answer(&answers, oo_engine_hold(w.engine));
        (void)clear_answer(&answers, oo_engine_resume(w.engine));
        (void)clear_answer(&answers, bring_gradient(&w, i));
    }
    CHECK(fault->nth || answers.failures == 0, "failures without a fault: %s", oo_error_message());
    CHECK(fault->lasts != ONCE || answers.failures <= 1, "%s: %d failures", describe(fault),
          answers.failures);
    if (fault->lasts == UNTIL_LIFTED)
        sim.simFaultClear();
    (void)clear_answer(&answers, step(&w));
    const int leaked = take_down(&w, &answers);
    CHECK(fault->nth <= sim.simCallCount(fault->call) - before, "%s: it never struck",
          describe(fault));
    if (!fault->nth) {
        calls_of_all = sim.simCallCount(NULL);
        for (unsigned k = 0; k < KINDS; k++)
            calls_of[k] = kinds[k] ? sim.simCallCount(kinds[k]) : 0;
    }
    end_of_life(&w, fault, leaked);
}

/* ---- sticky errors ---- */

/* Whether the engine says what killed it, and to restart. */
static void check_dead(const struct world *w, const struct fault *fault, enum oo_status status,
                       const char *what) {
    const char *call, *name;
    int code;
    oo_error_driver(&call, &code, &name);
    CHECK(status == OO_E_DEAD && code == fault->code &&
              strcmp(call, strncmp(fault->call, "async", 5) ? fault->call : w->engine->dead_call) ==
                  0 &&
              strstr(oo_error_message(), call) && strstr(oo_error_message(), "restart"),
          "%s: %s after it: %s: %s", describe(fault), what, oo_status_name(status),
          oo_error_message());
}

/* Whatever is asked of it; that all calls answer so is in test_engine.c. */
static void check_all_dead(struct world *w, const struct fault *fault) {
    struct oo_use use;
    uint32_t model;
    check_dead(w, fault, try_acquire(w, 0, 0, &use), "acquire");
    check_dead(w, fault, bring_gradient(w, 0), "download");
    check_dead(w, fault, oo_engine_hold(w->engine), "hold");
    check_dead(w, fault, oo_model_add(w->engine, &model), "attach");
}

/* A life in which the context is lost. */
static void die(const struct fault *fault) {
    struct world w;
    int said = 0; /* the error itself has been returned by a call */
    memset(&w, 0, sizeof w);
    w.coded = 1;
    world_sizes(&w);
    strike(fault);
    enum oo_status status = oo_engine_create(sim.path, 0, &w.engine);
    if (status != OO_OK) {
        CHECK(status == OO_E_DRIVER && strstr(oo_error_message(), fault->call), "%s: %s",
              describe(fault), oo_error_message());
        end_of_life(&w, fault, 1);
        return;
    }
    int lives = world_attach(&w, 60000, 20);
    if (!lives)
        status = w.refused;
    for (int i = 0; i < 3 && lives; i++) {
        lives = (status = counted_step(&w)) == OO_OK &&
                (status = oo_engine_hold(w.engine)) == OO_OK &&
                (status = oo_engine_resume(w.engine)) == OO_OK &&
                (status = bring_gradient(&w, i)) == OO_OK;
    }
    if (!lives) {
        said = status == OO_E_DRIVER;
        CHECK((said || status == OO_E_DEAD) && strstr(oo_error_message(), w.engine->dead_call) &&
                  strstr(oo_error_message(), "restart"),
              "%s: %s: %s", describe(fault), oo_status_name(status), oo_error_message());
        check_all_dead(&w, fault);
    } else if (world_remove(&w) != OO_OK) {
        check_all_dead(&w, fault);
    }
    need(remove_all(&w), "remove");
    if (oo_host_destroy(w.host) != OO_OK)
        need(oo_host_destroy(w.host), "destroy host memory at the second attempt");
    status = oo_engine_destroy(w.engine);
    CHECK(status == OO_OK || (status == OO_LEAKED && strstr(oo_error_message(), "restart")),
          "%s: destroy: %s", describe(fault), oo_error_message());
    end_of_life(&w, fault, 1);
}

/* ---- sweeps ---- */

static uint64_t stride = 1; /* of each sample */
static int all;             /* or every fault */

/* Let each kind of call fail: each k-th one of them with each code, the first and the last with one
 * code, at which the kinds take turns. */
static void sweep(const char *what, void (*life)(const struct fault *), const OOCUresult *codes,
                  unsigned n_codes, enum lasts lasts, uint64_t sample) {
    uint64_t faults = 0, seen = 0;
    for (unsigned c = 0; c < n_codes; c++) {
        for (unsigned k = 0; k < KINDS; k++) {
            const int sticks = k < MEMORY_KIND || k >= ASYNC_KIND, passes = k < ASYNC_KIND;
            if (!kinds[k] || !(life == die ? sticks : passes))
                continue;
            for (uint64_t n = 1; n <= calls_of[k]; n++) {
                const int in_turn = (n + k) % n_codes == c;
                const int end = stride == 1 && in_turn && (n == 1 || n == calls_of[k]);
                if (all && !in_turn)
                    continue;
                if (seen++ % (sample * stride) != 0 && !end)
                    continue;
                const struct fault fault = {kinds[k], n, codes[c], lasts};
                life(&fault);
                faults++;
            }
        }
    }
    printf("faults: %llu of %llu %s, %u codes\n", (unsigned long long)faults,
           (unsigned long long)seen, what, n_codes);
}

/* As `sweep`, but every call fails from the n-th on. */
static void sweep_all_calls(const char *what, enum lasts lasts, uint64_t sample) {
    uint64_t faults = 0;
    for (uint64_t n = 1; n <= calls_of_all; n += sample * stride, faults++) {
        const struct fault fault = {NULL, n, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, lasts};
        live(&fault);
    }
    printf("faults: %llu of %llu %s\n", (unsigned long long)faults,
           (unsigned long long)calls_of_all, what);
}

CASE(a_call_fails_once) {
    sweep("calls fail once", live, transient_codes, TRANSIENT_CODES, ONCE, all ? 1 : 37);
}
CASE(a_call_loses_the_context) {
    sweep("calls lose the context", die, sticky_codes, STICKY_CODES, ONCE, all ? 1 : 37);
}
CASE(a_kind_of_call_fails_until_lifted) {
    sweep("calls, with all of their kind, fail until lifted", live, transient_codes,
          TRANSIENT_CODES, UNTIL_LIFTED, all ? 1 : 151);
}
CASE(a_kind_of_call_fails_to_the_end) {
    sweep("calls, with all of their kind, fail to the end", live, transient_codes, TRANSIENT_CODES,
          TO_THE_END, all ? 1 : 151);
}
CASE(all_calls_fail_until_lifted) {
    sweep_all_calls("calls, and every one after it, fail until lifted", UNTIL_LIFTED, all ? 1 : 43);
}
CASE(all_calls_fail_to_the_end) {
    sweep_all_calls("calls, and every one after it, fail to the end", TO_THE_END, all ? 1 : 43);
}

static uint64_t called(const char *kind) {
    for (unsigned k = 0; k < KINDS; k++)
        if (kinds[k] && strcmp(kinds[k], kind) == 0)
            return calls_of[k];
    return 0;
}

/* Counts the calls of a life: what is swept over. */
static void prepare(void) {
    const struct fault none = {NULL, 0, OOCU_SUCCESS, ONCE};
    const char *text = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    if (text) {
        all = strcmp(text, "all") == 0;
        stride = all ? 1 : strtoul(text, NULL, 10);
    }
#if defined(__GLIBC__)
    /* Each life has rings of 16 MiB: without the kernel's work for fresh pages it is much shorter.
     */
    mallopt(M_MMAP_THRESHOLD, 64 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
    world_prepare();
    live(&none);
    CHECK(calls_of_all > 300, "only %llu calls in a life", (unsigned long long)calls_of_all);
    CHECK(called("cuLaunchKernel") && called("cuMemsetD32Async"),
          "coded weights are decoded by %llu kernels and %llu fills: what is not called is not "
          "struck",
          (unsigned long long)called("cuLaunchKernel"),
          (unsigned long long)called("cuMemsetD32Async"));
    printf("%llu calls in a life\n", (unsigned long long)calls_of_all);
    fflush(stdout);
}

CHECK_MAIN(prepare)
