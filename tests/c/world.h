/* world.h - a model of UNITS units on the simulated driver, and its use: shared by the engine's tests. */
#ifndef WORLD_H
#define WORLD_H

#include "check.h"
#include "oracle_offload.h"
#include "sim_control.h"

static struct sim_control sim;

enum { UNITS = 24 };

/* A model of UNITS units of different sizes in one host buffer, each filled with its own pattern. */
struct world {
    struct oo_engine *engine;
    struct oo_host *host;
    char *arena;
    uint32_t model, unit[UNITS], member[UNITS];
    char *master[UNITS];
    size_t bytes[UNITS], total, largest;
    uintptr_t stream;
};

static inline void need(enum oo_status status, const char *what) {
    CHECK(status == OO_OK, "%s: %s: %s", what, oo_status_name(status), oo_error_message());
}

static inline void fill(char *master, size_t bytes, unsigned pattern) {
    for (size_t i = 0; i < bytes; i++)
        master[i] = (char)(pattern * 37 + i * 11 + (i >> 8));
}

static inline void world_sizes(struct world *w) {
    w->total = w->largest = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        w->bytes[i] = (size_t)(1 + i % 5) * 4096 + 256 * (i % 3);
        w->total += w->bytes[i];
        if (w->bytes[i] > w->largest)
            w->largest = w->bytes[i];
    }
}

/* Everything but the engine; 0 when some call failed (possible only while faults are injected). */
static inline int world_attach(struct world *w, size_t arena_bytes, int trainable_from) {
    if (oo_host_create(w->total, &w->host) != OO_OK)
        return 0;
    const enum oo_status locked = oo_engine_lock(w->engine, w->host, 1);
    if (locked != OO_OK && locked != OO_E_LOCK_REFUSED)
        return 0;
    if (oo_model_add(w->engine, &w->model) != OO_OK || oo_engine_compute_stream(w->engine, &w->stream) != OO_OK)
        return 0;
    if (!w->arena)
        w->arena = malloc(arena_bytes + OO_ALIGNMENT);
    if (oo_segment_add(w->engine, w->model, (uintptr_t)w->arena, arena_bytes + OO_ALIGNMENT, w->stream) != OO_OK)
        return 0;
    char *master = oo_host_address(w->host);
    for (unsigned i = 0; i < UNITS; i++) {
        const struct oo_tensor tensor = {master, w->bytes[i]};
        const uint32_t one = 1;
        size_t offset;
        w->master[i] = master;
        fill(master, w->bytes[i], i);
        master += w->bytes[i];
        if (oo_unit_add(w->engine, w->model, &tensor, &one, 1, trainable_from >= 0 && (int)i >= trainable_from,
                        &w->unit[i], &w->member[i], &offset) != OO_OK)
            return 0;
    }
    return 1;
}

static inline void world_open(struct world *w, size_t arena_bytes, int trainable_from) {
    memset(w, 0, sizeof *w);
    world_sizes(w);
    need(oo_engine_create(sim.path, 0, &w->engine), "create");
    CHECK(world_attach(w, arena_bytes, trainable_from), "attach: %s", oo_error_message());
}

static inline void check_nothing_alive(const char *where) {
    struct sim_live live;
    sim.simGetLive(&live);
    CHECK(live.streams == 0 && live.events == 0 && live.contexts == 0 && live.registrations == 0 &&
              live.host_alloc_bytes == 0 && live.device_bytes == 0 && live.adopted_bytes == 0,
          "%s: alive: %llu streams, %llu events, %llu contexts, %llu registrations, %llu host, %llu adopted bytes", where,
          (unsigned long long)live.streams, (unsigned long long)live.events, (unsigned long long)live.contexts,
          (unsigned long long)live.registrations, (unsigned long long)live.host_alloc_bytes,
          (unsigned long long)live.adopted_bytes);
}

static inline void check_no_reports(const char *where) {
    const uint64_t n = sim.simReportCount();
    char text[2048] = "";
    if (n)
        sim.simReport(0, text, sizeof text);
    CHECK(n == 0, "%s: %llu reports, the first: %s", where, (unsigned long long)n, text);
}

static inline void world_close(struct world *w, const char *where) {
    need(oo_model_remove(w->engine, w->model), "remove");
    need(oo_engine_unlock(w->engine, w->host), "unlock");
    oo_host_destroy(w->host);
    need(oo_engine_destroy(w->engine), "destroy");
    free(w->arena);
    check_no_reports(where);
    check_nothing_alive(where);
    CHECK(sim_reset(&sim) == 0, "%s: the simulator could not be reset", where);
}

/* One use: acquire, "compute" by comparing what is on the device with the master, release. */
static inline enum oo_status use_on(struct world *w, unsigned i, enum oo_kind kind, int64_t task, uint64_t stamp,
                             uintptr_t stream) {
    struct oo_use use;
    struct oo_fetched fetched;
    enum oo_status status = oo_engine_acquire(w->engine, w->member[i], stream, stamp, kind, task, 0, &use);
    if (status != OO_OK)
        return status;
    const enum oo_status launched = oo_engine_launch(w->engine, w->member[i], stream, 20e-6);
    if (launched == OO_OK)
        CHECK(memcmp((const void *)use.address, w->master[i], w->bytes[i]) == 0, "unit %u has wrong bytes", i);
    status = oo_engine_release(w->engine, use.ticket, stream, 0, &fetched);
    return launched != OO_OK ? launched : status;
}

static inline enum oo_status use(struct world *w, unsigned i, enum oo_kind kind) {
    return use_on(w, i, kind, kind == OO_FORWARD ? -1 : 1, 0, w->stream);
}

/* Forward, then backward with the recompute of blocks of four. */
static inline enum oo_status step(struct world *w) {
    enum oo_status status = OO_OK;
    for (unsigned i = 0; i < UNITS && status == OO_OK; i++)
        status = use(w, i, OO_FORWARD);
    for (unsigned block = UNITS / 4; block-- > 0;) {
        for (unsigned i = 0; i < 4 && status == OO_OK; i++)
            status = use(w, 4 * block + i, OO_RECOMPUTE);
        for (unsigned i = 4; i-- > 0 && status == OO_OK;)
            status = use(w, 4 * block + i, OO_BACKWARD);
    }
    return status;
}

static inline struct oo_stats stats_of(struct world *w) {
    struct oo_stats stats = {0};
    need(oo_engine_stats(w->engine, OO_ALL_MODELS, &stats), "stats");
    return stats;
}

#endif
