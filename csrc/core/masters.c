/* masters.c - which host memory an engine knows, and whether its pages are locked. */
#include "masters.h"
#include "../base/os.h"
#include "call.h"
#include "ring.h"

#include <stdlib.h>

struct oo_host *oo__known_memory(const struct oo_engine *engine, const void *address,
                                 size_t bytes) {
    const uintptr_t begin = (uintptr_t)address;
    for (const struct oo_known *known = engine->known; known; known = known->next) {
        const uintptr_t base = (uintptr_t)known->host->pages;
        if (begin >= base && begin + bytes <= base + known->host->bytes)
            return known->host;
    }
    return NULL;
}

enum oo_status oo_engine_lock(struct oo_engine *engine, struct oo_host *host, int lock) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_known *known = NULL;
    if (host->owner) {
        status = oo__fail(OO_E_STATE, "this host memory is in use by %s engine already",
                          host->owner == engine ? "this" : "another");
        goto done;
    }
    known = malloc(sizeof *known);
    if (!known) {
        status = oo__fail(OO_E_MEMORY, "no memory for a host buffer's record");
        goto done;
    }
    engine->stats.allocations++;
    OOCUresult result = OOCU_ERROR_NOT_PERMITTED;
    if (lock) {
        /* Before locking: a fork between the two would copy every locked page. */
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 0);
        result = engine->driver.cuMemHostRegister(host->pages, host->mapped_bytes,
                                                  OOCU_MEMHOSTREGISTER_PORTABLE);
        if (result != OOCU_SUCCESS)
            (void)oo__pages_inherit(host->pages, host->mapped_bytes, 1);
    }
    if (oo_driver_is_sticky(result) || result == OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        status = oo__check(engine, "cuMemHostRegister", result);
        goto done;
    }
    if (result != OOCU_SUCCESS) {
        /* The masters stay pageable behind the ring: make sure now that there is one, while the
         * caller can still be told. */
        OO_TRY(oo__ring_prepare(engine, &engine->up));
        if (lock) {
            (void)oo_driver_error(&engine->driver, "cuMemHostRegister", result);
            status = OO_E_LOCK_REFUSED;
        }
    }
    host->locked = result == OOCU_SUCCESS;
    host->owner = engine;
    *known = (struct oo_known){host, engine->known};
    engine->known = known;
    engine->n_known++;
    known = NULL;
done:
    free(known);
    oo__leave(engine);
    return status;
}

static int oo__memory_in_use(const struct oo_engine *engine, const struct oo_host *host) {
    for (uint32_t i = 0; i < engine->n_units; i++)
        for (uint32_t j = 0; j < engine->units[i].n_parts; j++) /* a removed one has none */
            if (engine->units[i].parts[j].memory == host)
                return 1;
    return 0;
}

/* Closes: pages given back, or written as ordinary memory, while a DMA still reads them. */
static enum oo_status oo__unregister(struct oo_engine *engine, struct oo_host *host) {
    enum oo_status status;
    OO_TRY(oo__synchronize(engine, engine->h2d, 0));
    OO_TRY(oo__synchronize(engine, engine->d2h, 0));
    OO_TRY(OO_DRIVE(engine, cuMemHostUnregister, host->pages));
done:
    return status;
}

enum oo_status oo_engine_unlock(struct oo_engine *engine, struct oo_host *host) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    if (host->owner != engine) {
        status = oo__fail(OO_E_STATE, "this engine does not know that host memory");
        goto done;
    }
    if (oo__memory_in_use(engine, host)) {
        status =
            oo__fail(OO_E_STATE,
                     "units of an attached model live in this host memory; detach the model first");
        goto done;
    }
    if (host->locked && engine->usable) {
        status = oo__unregister(engine, host);
        if (status != OO_OK && engine->usable)
            goto done;
        status = OO_OK; /* the context was lost just now, and the registration with it */
    }
    if (host->locked)
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 1);
    host->locked = 0;
    host->owner = NULL;
    struct oo_known **link = &engine->known;
    while ((*link)->host != host)
        link = &(*link)->next;
    struct oo_known *known = *link;
    *link = known->next;
    free(known);
    engine->n_known--;
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_host_destroy(struct oo_host *host) {
    if (!host)
        return OO_OK;
    /* A DMA from pages given back to the system would read another owner's bytes. Where unlocking
     * fails the memory is leaked, with the record that its engine still holds: memory lost is
     * better than weights wrong. */
    if (host->owner) {
        enum oo_status status = oo_engine_unlock(host->owner, host);
        if (status != OO_OK)
            return status;
    }
    oo__host_free(host);
    return OO_OK;
}
