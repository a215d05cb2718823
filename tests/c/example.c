/* Two buffers that share an arena with room for one: ten steps of "use both" on the simulated
 * driver, from the public header alone. Usage: example [DRIVER], or ORACLE_OFFLOAD_DRIVER. */
#include "oracle_offload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 20, STEPS = 10 };

static void need(enum oo_status status) {
    if (status == OO_OK)
        return;
    fprintf(stderr, "%s: %s\n", oo_status_name(status), oo_error_message());
    exit(1);
}

int main(int argc, char **argv) {
    const char *driver = argc > 1 ? argv[1] : getenv("ORACLE_OFFLOAD_DRIVER");
    struct oo_engine *engine;
    struct oo_host *host;
    uintptr_t stream;
    uint32_t lease, model, unit, member[2];
    size_t offset;
    need(oo_engine_create(driver, 0, &engine));
    need(oo_engine_compute_stream(engine, &stream));

    /* The masters: one megabyte of 1s, one of 2s, in page-locked memory. */
    need(oo_host_create(2 * BYTES, &host));
    char *masters = oo_host_address(host);
    memset(masters, 1, BYTES);
    memset(masters + BYTES, 2, BYTES);
    need(oo_engine_lock(engine, host, OO_ALL_BYTES));

    /* The arena: host memory in place of device memory, with room for one of them. */
    char *arena = malloc(BYTES + OO_ALIGNMENT);
    need(oo_lease_add(engine, &lease));
    need(oo_segment_add(engine, lease, (uintptr_t)arena, BYTES + OO_ALIGNMENT, stream));
    need(oo_model_add(engine, &model));
    for (int i = 0; i < 2; i++) {
        const struct oo_tensor tensor = {.host = masters + i * BYTES, .bytes = BYTES};
        const uint32_t one = 1;
        need(oo_unit_add(engine, model, &tensor, &one, 1, 0, &unit, &member[i], &offset));
    }

    long sum = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < 2; i++) {
            struct oo_use use;
            struct oo_fetched fetched;
            /* Declares the kernel that sums the buffer, too. */
            const struct oo_request request = {.member = member[i],
                                               .kind = OO_FORWARD,
                                               .stream = stream,
                                               .task = -1,
                                               .seconds = 50e-6};
            need(oo_engine_acquire(engine, &request, OO_LAUNCH, &use));
            for (size_t k = 0; k < BYTES; k++)
                sum += ((const signed char *)use.address)[k];
            need(oo_engine_release(engine, use.ticket, stream, 0, &fetched));
        }
    }

    struct oo_stats stats;
    need(oo_engine_stats(engine, OO_ALL_MODELS, &stats));
    printf("sum %ld (expected %ld), %llu copies, %llu bytes to the device, %llu host waits\n", sum,
           (long)STEPS * 3 * BYTES, (unsigned long long)stats.h2d_copies,
           (unsigned long long)stats.h2d_bytes, (unsigned long long)stats.host_waits);
    need(oo_lease_remove(engine, lease));
    free(arena);
    need(oo_model_remove(engine, model));
    oo_host_destroy(host);
    need(oo_engine_destroy(engine));
    return sum == (long)STEPS * 3 * BYTES ? 0 : 1;
}
