/* bench_engine.c - the engine's own cost on the host, driver calls excluded (null_driver.c).
 * Prints one JSON object per line. Usage: bench_engine NULL_DRIVER */
#include "oracle_offload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 4096, USES = 160000 };

static void need(enum oo_status status) {
    if (status != OO_OK) {
        fprintf(stderr, "%s: %s\n", oo_status_name(status), oo_error_message());
        exit(1);
    }
}

static double now_s(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct oo_engine *engine;
static uint32_t *members;
static int units;

static double round_ns(enum oo_kind kind, int64_t task, int descending) {
    const double begin = now_s();
    for (int i = 0; i < units; i++) {
        struct oo_use use;
        struct oo_fetched fetched;
        const uint32_t member = members[descending ? units - 1 - i : i];
        const struct oo_request request = {.member = member, .kind = kind, .task = task};
        need(oo_engine_acquire(engine, &request, OO_NONBLOCKING, &use));
        need(oo_engine_release(engine, use.ticket, 0, OO_NONBLOCKING, &fetched));
    }
    return (now_s() - begin) * 1e9 / units;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

/* Rounds of a model whose arena is so large: training goes forward and back, sampling forward. */
static void measure(const char *name, size_t arena_bytes, int samples) {
    const int rounds = USES / units;
    double *forward = malloc(2 * (size_t)rounds * sizeof *forward), *backward = forward + rounds;
    struct oo_host *host;
    uint32_t lease, model, unit;
    const size_t bytes = (size_t)units * BYTES;
    need(oo_lease_add(engine, &lease));
    need(oo_model_add(engine, &model));
    need(oo_host_create(bytes, &host));
    memset(oo_host_address(host), 1, bytes);
    need(oo_engine_lock(engine, host, OO_ALL_BYTES));
    char *arena = malloc(arena_bytes + OO_ALIGNMENT);
    need(oo_segment_add(engine, lease, (uintptr_t)arena, arena_bytes + OO_ALIGNMENT, 0));
    members = malloc((size_t)units * sizeof *members);
    for (int i = 0; i < units; i++) {
        const struct oo_tensor tensor = {.host = (char *)oo_host_address(host) + (size_t)i * BYTES,
                                         .bytes = BYTES};
        const uint32_t one = 1;
        size_t offset;
        need(oo_unit_add(engine, model, &tensor, &one, 1, 0, &unit, &members[i], &offset));
    }
    for (int i = -3; i < rounds; i++) { /* three warm up */
        const double there = round_ns(OO_FORWARD, -1, 0);
        const double back = samples ? 0 : round_ns(OO_BACKWARD, 100 + i, 1);
        if (i >= 0)
            forward[i] = there, backward[i] = back;
    }
    printf("{\"name\": \"%s_of_%d\", \"forward_s\": %.3e, ", name, units,
           median(forward, rounds) * 1e-9);
    if (!samples)
        printf("\"backward_s\": %.3e, ", median(backward, rounds) * 1e-9);
    printf("\"round_count\": %d}\n", rounds);
    need(oo_lease_remove(engine, lease));
    need(oo_model_remove(engine, model));
    free(arena);
    free(members);
    free(forward);
    oo_host_destroy(host);
}

int main(int argc, char **argv) {
    static const int sizes[] = {400, 2000, 10000, 20000};
    need(oo_engine_create(argc > 1 ? argv[1] : NULL, 0, &engine));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        units = sizes[i];
        const size_t bytes = (size_t)units * BYTES;
        measure("acquire_release_hit", 2 * bytes, 0);
        measure("acquire_release_half_resident", bytes / 2, 0);
        measure("acquire_release_half_resident_sampling", bytes / 2, 1);
    }
    need(oo_engine_destroy(engine));
    return 0;
}
