/* Several threads and one engine: the same units on streams of their own, models that come and go,
 * and somebody who looks. Run under ThreadSanitizer (make tsan-check): the simulated driver moves
 * bytes on whichever thread calls it, so a use that is not ordered after its copy is a race of
 * threads, too. */
#include "world.h"

#include <stdatomic.h>

enum { WORKERS = 3, ROUNDS = 6 };

struct worker {
    struct world *w; /* shared */
    uintptr_t stream;
    int64_t task;
    unsigned failures;
    char said[256];
};

/* CHECK counts in globals: threads note what failed and the main thread tells. */
static void note(struct worker *worker, const char *what) {
    if (worker->failures++ == 0)
        snprintf(worker->said, sizeof worker->said, "%s: %.200s", what, oo_error_message());
}

static void use_in_thread(struct worker *worker, unsigned i, enum oo_kind kind, unsigned round) {
    const struct world *w = worker->w;
    struct oo_use use;
    struct oo_fetched fetched;
    /* Every second time as from a caller that must not block, as the GIL's holder does. */
    enum oo_status status = OO_WOULD_BLOCK;
    if (round % 2)
        status = acquire(w->engine, w->member[i], worker->stream, 0, kind, worker->task,
                         OO_NONBLOCKING, &use);
    if (status == OO_WOULD_BLOCK)
        status = acquire(w->engine, w->member[i], worker->stream, 0, kind, worker->task, 0, &use);
    if (status != OO_OK) {
        note(worker, "acquire");
        return;
    }
    if (oo_engine_launch(w->engine, w->member[i], worker->stream, 5e-6) != OO_OK)
        note(worker, "launch");
    if (memcmp((const void *)use.address, w->master[i], w->bytes[i]) != 0)
        note(worker, "wrong bytes");
    if (oo_engine_release(w->engine, use.ticket, worker->stream, 0, &fetched) != OO_OK)
        note(worker, "release");
    while (fetched.more)
        if (oo_engine_prefetch(w->engine, &fetched) != OO_OK) {
            note(worker, "prefetch");
            break;
        }
}

static void compute(void *argument) {
    struct worker *worker = argument;
    const struct world *w = worker->w;
    char gradient[3000], target[3000];
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < UNITS; i++)
            use_in_thread(worker, i, OO_FORWARD, round);
        for (unsigned i = UNITS; i-- > 0;)
            use_in_thread(worker, i, OO_BACKWARD, round);
        fill(gradient, sizeof gradient, round + (unsigned)worker->task);
        if (oo_engine_download(w->engine, target, (uintptr_t)gradient, sizeof gradient,
                               worker->stream) != OO_OK)
            note(worker, "download");
        if (memcmp(gradient, target, sizeof gradient) != 0)
            note(worker, "wrong gradient");
        /* A failure's message belongs to the thread that asked. */
        struct oo_use use;
        if (acquire(w->engine, 100000 + (uint32_t)worker->task, worker->stream, 0, OO_FORWARD, -1,
                    0, &use) != OO_E_STATE)
            note(worker, "no such member");
        char mine[32];
        snprintf(mine, sizeof mine, "member %d ", 100000 + (int)worker->task);
        if (!strstr(oo_error_message(), mine))
            note(worker, "another thread's message");
    }
}

/* A second model attaches, steps and detaches while the first one trains. */
static void come_and_go(void *argument) {
    struct worker *worker = argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct world b;
        memset(&b, 0, sizeof b);
        world_sizes(&b);
        b.engine = worker->w->engine;
        b.stream = worker->stream;
        if (!world_attach(&b, 40000, 12)) {
            note(worker, "attach");
            return;
        }
        struct worker inner = {&b, worker->stream, worker->task, 0, ""};
        for (unsigned i = 0; i < UNITS; i++)
            use_in_thread(&inner, i, OO_FORWARD, round);
        if (inner.failures) {
            worker->failures += inner.failures;
            snprintf(worker->said, sizeof worker->said, "%s", inner.said);
        }
        /* Refused while another thread computes with a unit in this model's lease. */
        enum oo_status removed;
        do
            removed = world_remove(&b);
        while (removed == OO_E_STATE);
        if (removed != OO_OK)
            note(worker, "remove");
        oo_host_destroy(b.host);
        free(b.arena);
    }
}

/* Copies become stale while others compute with them: the only sign of it is a late copy. */
static void refresh(void *argument) {
    struct worker *worker = argument;
    const struct world *w = worker->w;
    for (unsigned round = 0; round < 40 * ROUNDS; round++) {
        if (oo_engine_refresh(w->engine, round % 2 ? w->model : OO_ALL_MODELS) != OO_OK)
            note(worker, "refresh");
        if (round % 32 == 7 && oo_engine_set_verify(w->engine, round % 64 == 7) != OO_OK)
            note(worker, "verify");
    }
}

static void look(void *argument) {
    struct worker *worker = argument;
    const struct world *w = worker->w;
    for (unsigned round = 0; round < 20 * ROUNDS; round++) {
        struct oo_stats stats;
        struct oo_resident rows[8];
        size_t count, free_bytes, total_bytes;
        if (oo_engine_stats(w->engine, round % 2 ? w->model : OO_ALL_MODELS, &stats) != OO_OK)
            note(worker, "stats");
        if (stats.hits + stats.late > stats.acquires || stats.resident_bytes > stats.arena_bytes)
            note(worker, "torn figures");
        if (oo_engine_residents(w->engine, rows, 8, &count) != OO_OK)
            note(worker, "residents");
        if (oo_engine_mem_info(w->engine, &free_bytes, &total_bytes) != OO_OK ||
            free_bytes > total_bytes)
            note(worker, "mem_info");
        if (round % 16 == 5 && oo_engine_hold(w->engine) != OO_OK)
            note(worker, "hold");
        if (round % 16 == 6 && oo_engine_resume(w->engine) != OO_OK)
            note(worker, "resume");
    }
}

static void threads_share_an_engine(int schedule) {
    void (*const what[])(void *) = {compute, compute, compute, come_and_go, look, refresh};
    enum { THREADS = WORKERS + 3 };
    struct world w;
    struct worker workers[THREADS];
    struct oo_thread *threads[THREADS];
    sim.simSetSchedule(schedule, 5);
    world_open(&w, 250000, -1);
    for (int t = 0; t < THREADS; t++)
        workers[t] = (struct worker){&w, new_stream(&w), t + 1, 0, ""};
    for (int t = 0; t < THREADS; t++)
        threads[t] = oo__thread_start(what[t], &workers[t]);
    for (int t = 0; t < THREADS; t++) {
        CHECK(threads[t] != NULL, "no thread");
        if (threads[t])
            oo__thread_join(threads[t]);
        CHECK(workers[t].failures == 0, "thread %d: %u failures, the first: %s", t,
              workers[t].failures, workers[t].said);
    }
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.acquires >= (uint64_t)WORKERS * ROUNDS * 2 * UNITS, "%llu acquires",
          (unsigned long long)stats.acquires);
    for (int t = 0; t < THREADS; t++)
        end_stream(&w, workers[t].stream);
    world_close(&w, "threads");
}

/* ---- what another thread computes with is in the way ---- */

struct late {
    struct world *w;
    uintptr_t stream;
    unsigned i;
    int holds; /* a use of its own */
    atomic_int asked, got;
    enum oo_status nonblocking, status;
    int is_new; /* what it saw are the master's new bytes */
    char said[128];
};

static void acquire_late(void *argument) {
    struct late *late = argument;
    struct world *w = late->w;
    struct oo_use own, use;
    struct oo_fetched fetched;
    if (late->holds)
        (void)acquire(w->engine, w->member[0], late->stream, 0, OO_FORWARD, -1, 0, &own);
    late->nonblocking = acquire(w->engine, w->member[late->i], late->stream, 0, OO_FORWARD, -1,
                                OO_NONBLOCKING, &use);
    atomic_store(&late->asked, 1);
    late->status = acquire(w->engine, w->member[late->i], late->stream, 0, OO_FORWARD, -1, 0, &use);
    snprintf(late->said, sizeof late->said, "%s", oo_error_message());
    atomic_store(&late->got, 1);
    if (late->status == OO_OK) {
        (void)oo_engine_launch(w->engine, w->member[late->i], late->stream, 1e-6);
        late->is_new =
            memcmp((const void *)use.address, w->master[late->i], w->bytes[late->i]) == 0;
        (void)oo_engine_release(w->engine, use.ticket, late->stream, 0, &fetched);
    }
    if (late->holds)
        (void)oo_engine_release(w->engine, own.ticket, late->stream, 0, &fetched);
}

/* How the other thread fares: it waits; it may not wait for ever; it holds a use itself. */
enum { WAITS, IMPATIENT, HOLDS };

/* Start the other thread, which waits until this one gives `n` uses back, or does not wait. */
static void give_back_to(struct late *late, int how, const struct oo_use *uses, unsigned n,
                         enum oo_status refused) {
    const struct world *w = late->w;
    w->engine->patience_s = how == IMPATIENT ? 0.02 : 1e6; /* who is not woken never comes back */
    struct oo_thread *thread = oo__thread_start(acquire_late, late);
    if (how == WAITS) {
        const double until_s = oo__clock_s() + 0.05;
        while (!atomic_load(&late->asked) || oo__clock_s() < until_s)
            continue;
        CHECK(!atomic_load(&late->got), "it did not wait: %s", oo_status_name(late->status));
    } else {
        oo__thread_join(thread);
    }
    for (unsigned k = 0; k < n; k++)
        use_end(w->engine, &uses[k], w->stream, "release");
    if (how == WAITS)
        oo__thread_join(thread);
    CHECK(late->nonblocking == (how == HOLDS ? refused : OO_WOULD_BLOCK), "%d: %s", how,
          oo_status_name(late->nonblocking));
    CHECK(late->status == (how == WAITS ? OO_OK : refused), "%d: %s: %s", how,
          oo_status_name(late->status), late->said);
    CHECK(how != WAITS || late->is_new, "wrong bytes");
}

static void a_stale_copy_in_use(int how) {
    struct world w;
    world_open(&w, 250000, -1);
    struct late late = {.w = &w, .stream = new_stream(&w), .i = 3, .holds = how == HOLDS};
    const struct oo_use use = use_acquire(w.engine, w.member[3], w.stream, "acquire");
    finish();
    fill(w.master[3], w.bytes[3], 99);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    give_back_to(&late, how, &use, 1, OO_E_STATE);
    CHECK(how == WAITS || strstr(late.said, "rewritten"), "%d: %s", how, late.said);
    need(use_on(&w, 3, OO_FORWARD, -1, 0, w.stream), "afterwards");
    end_stream(&w, late.stream);
    world_close(&w, "stale");
}

/* Compute with unit after unit until there is no place for the next, whose number it returns. */
static unsigned fill_arena(const struct world *w, struct oo_use *uses) {
    for (unsigned i = 0; i < UNITS; i++)
        if (try_acquire(w, i, 0, &uses[i]) != OO_OK)
            return i;
    CHECK(0, "the arena has room for all");
    return 0;
}

static void an_arena_full_of_uses(int how) {
    struct world w;
    struct oo_use uses[UNITS];
    world_open(&w, 60000, -1);
    const unsigned n = fill_arena(&w, uses);
    struct late late = {.w = &w, .stream = new_stream(&w), .i = n, .holds = how == HOLDS};
    const uint64_t acquired = stats_of(&w).acquires;
    give_back_to(&late, how, uses, n, OO_E_NO_ROOM);
    /* The one that had to wait is one use to the plan, however often it was asked for. */
    CHECK(how != WAITS || stats_of(&w).acquires == acquired + 1, "%llu acquires",
          (unsigned long long)(stats_of(&w).acquires - acquired));
    need(use_on(&w, n, OO_FORWARD, -1, 0, w.stream), "afterwards");
    end_stream(&w, late.stream);
    world_close(&w, "room");
}

static void acquire_and_release(void *argument) {
    struct late *late = argument;
    const struct world *w = late->w;
    struct oo_use use;
    struct oo_fetched fetched;
    late->nonblocking = acquire(w->engine, w->member[late->i], late->stream, 0, OO_FORWARD, -1,
                                OO_NONBLOCKING, &use);
    if (late->nonblocking == OO_OK)
        late->status = oo_engine_release(w->engine, use.ticket, late->stream, 0, &fetched);
}

/* What is there needs no room, however full the arena is. */
CASE(test_a_unit_in_use_is_shared_at_once) {
    struct world w;
    struct oo_use uses[UNITS];
    world_open(&w, 60000, -1);
    unsigned n = 0, largest = 0;
    size_t in_use = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        if (try_acquire(&w, i, 0, &uses[n]) != OO_OK)
            continue;
        n++;
        in_use += w.bytes[i];
        largest = w.bytes[i] > w.bytes[largest] ? i : largest;
    }
    CHECK(in_use + w.bytes[largest] > 60000, "there is room for it once more");
    struct late late = {.w = &w, .stream = new_stream(&w), .i = largest};
    oo__thread_join(oo__thread_start(acquire_and_release, &late));
    CHECK(late.nonblocking == OO_OK && late.status == OO_OK, "%s, %s",
          oo_status_name(late.nonblocking), oo_status_name(late.status));
    for (unsigned k = 0; k < n; k++)
        use_end(w.engine, &uses[k], w.stream, "release");
    end_stream(&w, late.stream);
    world_close(&w, "shared");
}

/* Engines on one device know nothing of each other. */
static void own_engine(void *argument) {
    struct worker *worker = argument;
    struct oo_engine *engine;
    uintptr_t stream;
    for (int i = 0; i < 4; i++) {
        if (oo_engine_create(sim.path, 0, &engine) != OO_OK ||
            oo_engine_compute_stream(engine, &stream) != OO_OK ||
            oo_engine_spin(engine, stream, 1000) != OO_OK || oo_engine_destroy(engine) != OO_OK)
            note(worker, "own engine");
    }
}

CASE(test_engines_come_and_go_in_threads) {
    struct worker workers[3] = {{0}};
    struct oo_thread *threads[3];
    for (int t = 0; t < 3; t++)
        threads[t] = oo__thread_start(own_engine, &workers[t]);
    for (int t = 0; t < 3; t++) {
        oo__thread_join(threads[t]);
        CHECK(workers[t].failures == 0, "%s", workers[t].said);
    }
    check_no_reports("engines");
    check_nothing_alive("engines");
    CHECK(sim_reset(&sim) == 0, "not reset");
}

CASE(test_threads_share_an_engine) {
    static const int schedules[] = {SIM_TIMED, SIM_RANDOM, SIM_STARVE_COPY};
    for (unsigned s = 0; s < sizeof schedules / sizeof schedules[0]; s++)
        threads_share_an_engine(schedules[s]);
}

CASE(test_a_stale_copy_in_use_is_waited_for) {
    for (int how = 0; how < 3; how++)
        a_stale_copy_in_use(how);
}

CASE(test_room_that_others_compute_in_is_waited_for) {
    for (int how = 0; how < 3; how++)
        an_arena_full_of_uses(how);
}

/* This thread keeps all that leaves another no place, and ends it or does not. The other asks
 * before this one has given back what it goes on to keep, or afterwards. */
static void room_that_another_thread_keeps(int before, int ends) {
    struct world w;
    struct oo_use uses[UNITS], kept[UNITS];
    world_open(&w, 60000, -1);
    const unsigned n = fill_arena(&w, uses);
    struct late late = {.w = &w, .stream = new_stream(&w), .i = n};
    w.engine->patience_s = 1e6;
    w.engine->kept_patience_s = ends ? 1e6 : 0.02;
    struct oo_thread *thread = before ? oo__thread_start(acquire_late, &late) : NULL;
    while (before && !atomic_load(&late.asked))
        continue;
    for (unsigned k = 0; k < n; k++)
        need(oo_engine_keep(w.engine, w.member[k], 0, &kept[k]), "keep");
    for (unsigned k = 0; k < n; k++)
        use_end(w.engine, &uses[k], w.stream, "release");
    if (!before)
        thread = oo__thread_start(acquire_late, &late);
    const double until_s = oo__clock_s() + 0.05;
    while (ends && (!atomic_load(&late.asked) || oo__clock_s() < until_s))
        continue;
    CHECK(!ends || !atomic_load(&late.got), "it did not wait: %s", oo_status_name(late.status));
    if (!ends)
        oo__thread_join(thread);
    for (unsigned k = 0; k < n; k++)
        need(oo_engine_end(w.engine, kept[k].ticket, w.stream), "end");
    if (ends)
        oo__thread_join(thread);
    CHECK(late.nonblocking == OO_WOULD_BLOCK, "%s", oo_status_name(late.nonblocking));
    CHECK(late.status == (ends ? OO_OK : OO_E_NO_ROOM), "%s: %s", oo_status_name(late.status),
          late.said);
    need(use_on(&w, n, OO_FORWARD, -1, 0, w.stream), "afterwards");
    end_stream(&w, late.stream);
    world_close(&w, "kept");
}

CASE(test_room_that_another_thread_keeps_is_waited_for) {
    for (int before = 0; before < 2; before++)
        for (int ends = 0; ends < 2; ends++)
            room_that_another_thread_keeps(before, ends);
}

/* What a thread keeps itself may end in a step to come. */
CASE(test_room_that_a_thread_keeps_itself_is_not_waited_for) {
    struct world w;
    struct oo_use uses[UNITS], kept[UNITS], use;
    uintptr_t mapped;
    world_open(&w, 60000, -1);
    const unsigned n = fill_arena(&w, uses);
    w.engine->patience_s = w.engine->kept_patience_s = 1e6;
    const struct oo_request request = {.member = w.member[n + 1], .stream = w.stream};
    need(oo_engine_map(w.engine, &request, 0, &mapped), "map");
    for (unsigned k = 0; k < n; k++)
        need(oo_engine_keep(w.engine, w.member[k], 0, &kept[k]), "keep");
    for (unsigned k = 0; k < n; k++)
        use_end(w.engine, &uses[k], w.stream, "release");
    CHECK(try_acquire(&w, n, 0, &use) == OO_E_NO_ROOM, "there was room");
    need(oo_engine_unmap(w.engine, w.member[n + 1], w.stream), "unmap");
    for (unsigned k = 0; k < n; k++)
        need(oo_engine_end(w.engine, kept[k].ticket, w.stream), "end");
    need(use_on(&w, n, OO_FORWARD, -1, 0, w.stream), "afterwards");
    world_close(&w, "kept here");
}

CHECK_MAIN(world_prepare)
