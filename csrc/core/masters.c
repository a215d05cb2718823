/* masters.c - which host memory an engine knows, and whether its pages are locked.
 *
 * A driver registers a range of memory once for the whole process, and a portable registration
 * counts for every context of that driver. So engines that read the same memory share one, by
 * reference: the first makes it, the last one ends it, and each waits for its own copies before it
 * lets go. */
#include "masters.h"
#include "../base/os.h"
#include "call.h"
#include "ring.h"

#include <stdlib.h>

const struct oo_known *oo__known_memory(const struct oo_engine *engine, const void *address,
                                        size_t bytes) {
    const uintptr_t begin = (uintptr_t)address;
    for (const struct oo_known *known = engine->known; known; known = known->next) {
        const uintptr_t base = (uintptr_t)known->host->pages;
        if (begin >= base && begin + bytes <= base + known->host->bytes)
            return known;
    }
    return NULL;
}

/* The link that points to what the engine knows of the memory; to NULL when it does not know it. */
static struct oo_known **oo__find_known(struct oo_engine *engine, const struct oo_host *host) {
    struct oo_known **link = &engine->known;
    while (*link && (*link)->host != host)
        link = &(*link)->next;
    return link;
}

/* ---- registrations: under the memory's mutex ---- */

/* A new registration; or NULL, with `result` saying why. */
static enum oo_status oo__registration_make(struct oo_engine *engine, struct oo_host *host,
                                            OOCUresult *result, struct oo_registration **made) {
    struct oo_registration *registration = *made = malloc(sizeof *registration);
    if (!registration)
        return oo__fail(OO_E_MEMORY, "no memory for a registration's record");
    /* Before locking: a fork between the two would copy every locked page. */
    if (!host->locked)
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 0);
    *result = engine->driver.cuMemHostRegister(host->pages, host->mapped_bytes,
                                               OOCU_MEMHOSTREGISTER_PORTABLE);
    if (*result == OOCU_SUCCESS) {
        *registration = (struct oo_registration){.library = engine->driver.library,
                                                 .device = engine->device,
                                                 .maker = engine,
                                                 .next = host->registrations};
        host->registrations = registration;
        host->locked++;
        return OO_OK;
    }
    free(registration);
    *made = NULL;
    if (!host->locked)
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 1);
    return OO_OK;
}

static enum oo_status oo__registration_take(struct oo_engine *engine, struct oo_known *known,
                                            OOCUresult *result) {
    struct oo_host *host = known->host;
    enum oo_status status = OO_OK;
    oo__mutex_lock(host->mutex);
    struct oo_registration *registration = host->registrations;
    while (registration && registration->library != engine->driver.library)
        registration = registration->next;
    *result = OOCU_SUCCESS;
    if (!registration)
        status = oo__registration_make(engine, host, result, &registration);
    if (registration) {
        registration->engines++;
        known->registration = registration;
    }
    oo__mutex_unlock(host->mutex);
    return status;
}

static void oo__registration_end(struct oo_engine *engine, struct oo_host *host,
                                 struct oo_registration *registration) {
    if (registration->context_held && engine->usable)
        OO_GIVE_BACK(engine, cuDevicePrimaryCtxRelease, registration->device);
    struct oo_registration **link = &host->registrations;
    while (*link != registration)
        link = &(*link)->next;
    *link = registration->next;
    free(registration);
    if (--host->locked == 0)
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 1);
}

/* What the driver must do before the engine lets go. May be repeated after a failure. */
static enum oo_status oo__registration_give(struct oo_engine *engine, struct oo_host *host,
                                            struct oo_registration *registration) {
    OOCUcontext context;
    if (registration->engines == 1)
        return OO_DRIVE(engine, cuMemHostUnregister, host->pages);
    if (registration->maker != engine)
        return OO_OK;
    /* Other engines still read: the registration must not end with this engine's context. */
    enum oo_status status =
        OO_DRIVE(engine, cuDevicePrimaryCtxRetain, &context, registration->device);
    registration->context_held = status == OO_OK;
    return status;
}

/* Every engine waits for its own copies, whoever unregisters. */
static enum oo_status oo__copies_have_ended(struct oo_engine *engine) {
    /* H7: no DMA may still use pages that are given back, or written as ordinary memory. */
    enum oo_status status = oo__synchronize(engine, engine->h2d, 0);
    return status == OO_OK ? oo__synchronize(engine, engine->d2h, 0) : status;
}

static enum oo_status oo__registration_let_go(struct oo_engine *engine, struct oo_known *known) {
    struct oo_host *host = known->host;
    struct oo_registration *registration = known->registration;
    enum oo_status status = engine->usable ? oo__copies_have_ended(engine) : OO_OK;
    if (status != OO_OK && engine->usable)
        return status;
    oo__mutex_lock(host->mutex);
    if (engine->usable)
        status = oo__registration_give(engine, host, registration);
    if (!engine->usable) /* a lost context has taken its registrations with it */
        status = OO_OK;
    if (status == OO_OK) {
        if (registration->maker == engine)
            registration->maker = NULL;
        if (--registration->engines == 0)
            oo__registration_end(engine, host, registration);
        known->registration = NULL;
    }
    oo__mutex_unlock(host->mutex);
    return status;
}

/* ---- what an engine knows ---- */

enum oo_status oo_engine_lock(struct oo_engine *engine, struct oo_host *host, int lock) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_known *known = NULL;
    OOCUresult result = OOCU_ERROR_NOT_PERMITTED;
    if (*oo__find_known(engine, host)) {
        status = oo__fail(OO_E_STATE, "this engine knows that host memory already");
        goto done;
    }
    known = malloc(sizeof *known);
    if (!known) {
        status = oo__fail(OO_E_MEMORY, "no memory for a host buffer's record");
        goto done;
    }
    engine->stats.allocations++;
    *known = (struct oo_known){.host = host, .engine = engine};
    if (lock)
        OO_TRY(oo__registration_take(engine, known, &result));
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
    known->next = engine->known;
    engine->known = known;
    engine->n_known++;
    oo__mutex_lock(host->mutex);
    known->next_of_host = host->known;
    host->known = known;
    oo__mutex_unlock(host->mutex);
    known = NULL;
done:
    free(known);
    oo__leave(engine);
    return status;
}

static int oo__memory_in_use(const struct oo_engine *engine, const struct oo_known *memory) {
    for (uint32_t i = 0; i < engine->n_units; i++)
        for (uint32_t j = 0; j < engine->units[i].n_parts; j++) /* a removed one has none */
            if (engine->units[i].parts[j].memory == memory)
                return 1;
    return 0;
}

enum oo_status oo_engine_unlock(struct oo_engine *engine, struct oo_host *host) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    struct oo_known **link = oo__find_known(engine, host), *known = *link;
    if (!known) {
        status = oo__fail(OO_E_STATE, "this engine does not know that host memory");
        goto done;
    }
    if (oo__memory_in_use(engine, known)) {
        status =
            oo__fail(OO_E_STATE,
                     "units of an attached model live in this host memory; detach the model first");
        goto done;
    }
    if (known->registration)
        OO_TRY(oo__registration_let_go(engine, known));
    *link = known->next;
    engine->n_known--;
    oo__mutex_lock(host->mutex);
    link = &host->known;
    while (*link != known)
        link = &(*link)->next_of_host;
    *link = known->next_of_host;
    oo__mutex_unlock(host->mutex);
    free(known);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_host_destroy(struct oo_host *host) {
    /* A DMA from pages given back to the system would read another owner's bytes. Where unlocking
     * fails the memory is leaked, with the record that its engine still holds: memory lost is
     * better than weights wrong. Nobody else may use the memory now, so its mutex is not taken: in
     * a forked child it may be held for ever. */
    while (host && host->known) {
        enum oo_status status = oo_engine_unlock(host->known->engine, host);
        if (status != OO_OK)
            return status;
    }
    if (host)
        oo__host_free(host);
    return OO_OK;
}
