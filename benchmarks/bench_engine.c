/* bench_engine.c - the engine's own cost on the host, driver calls excluded (null_driver.c).
 * Prints one JSON object per line. Usage: bench_engine NULL_DRIVER */
#include "oracle_offload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { UNITS = 418, BYTES = 4096, ROUNDS = 400 };

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
static uint32_t members[UNITS];

static double round_ns(enum oo_kind kind, int64_t task, int descending) {
    const double begin = now_s();
    for (int i = 0; i < UNITS; i++) {
        struct oo_use use;
        struct oo_fetched fetched;
        const uint32_t member = members[descending ? UNITS - 1 - i : i];
        const struct oo_request request = {.member = member, .kind = kind, .task = task};
        need(oo_engine_acquire(engine, &request, OO_NONBLOCKING, &use));
        need(oo_engine_release(engine, use.ticket, 0, OO_NONBLOCKING, &fetched));
    }
    return (now_s() - begin) * 1e9 / UNITS;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Forward and backward in turn, as training does. */
static void measure(const char *name, size_t arena_bytes) {
    static double forward[ROUNDS], backward[ROUNDS];
    struct oo_host *host;
    uint32_t lease, model, unit;
    need(oo_lease_add(engine, &lease));
    need(oo_model_add(engine, &model));
    need(oo_host_create((size_t)UNITS * BYTES, &host));
    memset(oo_host_address(host), 1, (size_t)UNITS * BYTES);
    need(oo_engine_lock(engine, host, OO_ALL_BYTES));
    char *arena = malloc(arena_bytes + OO_ALIGNMENT);
    need(oo_segment_add(engine, lease, (uintptr_t)arena, arena_bytes + OO_ALIGNMENT, 0));
    for (int i = 0; i < UNITS; i++) {
        const struct oo_tensor tensor = {(char *)oo_host_address(host) + (size_t)i * BYTES, BYTES};
        const uint32_t one = 1;
        size_t offset;
        need(oo_unit_add(engine, model, &tensor, &one, 1, 0, &unit, &members[i], &offset));
    }
    for (int i = 0; i < 3; i++) {
        round_ns(OO_FORWARD, -1, 0);
        round_ns(OO_BACKWARD, i, 1);
    }
    for (int i = 0; i < ROUNDS; i++) {
        forward[i] = round_ns(OO_FORWARD, -1, 0);
        backward[i] = round_ns(OO_BACKWARD, 100 + i, 1);
    }
    qsort(forward, ROUNDS, sizeof *forward, by_value);
    qsort(backward, ROUNDS, sizeof *backward, by_value);
    printf("{\"name\": \"%s\", \"forward_s\": %.3e, \"backward_s\": %.3e, \"rounds\": %d, \"units\": %d}\n", name,
           forward[ROUNDS / 2] * 1e-9, backward[ROUNDS / 2] * 1e-9, ROUNDS, UNITS);
    need(oo_lease_remove(engine, lease));
    need(oo_model_remove(engine, model));
    free(arena);
    oo_host_destroy(host);
}

int main(int argc, char **argv) {
    need(oo_engine_create(argc > 1 ? argv[1] : NULL, 0, &engine));
    measure("acquire_release_hit", (size_t)2 * UNITS * BYTES);
    measure("acquire_release_half_resident", (size_t)UNITS * BYTES / 2);
    need(oo_engine_destroy(engine));
    return 0;
}
