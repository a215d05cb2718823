/* masters.c - which host memory an engine knows, and whether its pages are locked.
 *
 * A driver registers a range of memory once for the whole process, and a portable registration
 * counts for every context of that driver. So engines that read the same memory share one, by
 * reference: the first makes it, the last one ends it, and each waits for its own copies before it
 * lets go. */
#include "masters.h"
#include "../base/os.h"
#include "call.h"
#include "disk.h"
#include "feed.h"
#include "ring.h"
#include "uses.h"

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

int oo__in_memory(const struct oo_engine *engine, const void *address, size_t bytes) {
    const struct oo_known *known = oo__known_memory(engine, address, bytes);
    const struct oo_disk *disk = known ? known->host->disk : NULL;
    return disk ? oo__disk_written(disk, address, bytes) : 1;
}

int oo__is_locked(const struct oo_known *memory, const void *address, size_t bytes) {
    return memory && memory->registration &&
           (uintptr_t)address + bytes <=
               (uintptr_t)memory->host->pages + memory->registration->bytes;
}

/* The link that points to what the engine knows of the memory; to NULL when it does not know it. */
static struct oo_known **oo__find_known(struct oo_engine *engine, const struct oo_host *host) {
    struct oo_known **link = &engine->known;
    while (*link && (*link)->host != host)
        link = &(*link)->next;
    return link;
}

/* ---- registrations: under the memory's mutex ---- */

/* For every context, and with an address that kernels read the memory at (oo_engine_map). */
static const unsigned oo__register_flags =
    OOCU_MEMHOSTREGISTER_PORTABLE | OOCU_MEMHOSTREGISTER_DEVICEMAP;

/* A new registration; or NULL, with `result` saying why. */
static enum oo_status oo__registration_make(struct oo_engine *engine, struct oo_host *host,
                                            size_t bytes, OOCUresult *result,
                                            struct oo_registration **made) {
    struct oo_registration *registration = *made = malloc(sizeof *registration);
    if (!registration)
        return oo__fail(OO_E_MEMORY, "no memory for a registration's record");
    /* Before locking: a fork between the two would copy every locked page. */
    if (!host->locked)
        (void)oo__pages_inherit(host->pages, host->mapped_bytes, 0);
    *result = engine->driver.cuMemHostRegister(host->pages, bytes, oo__register_flags);
    if (*result == OOCU_SUCCESS) {
        *registration = (struct oo_registration){.library = engine->driver.library,
                                                 .bytes = bytes,
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
                                            size_t bytes, OOCUresult *result) {
    struct oo_host *host = known->host;
    enum oo_status status = OO_OK;
    oo__mutex_lock(host->mutex);
    struct oo_registration *registration = host->registrations;
    while (registration && registration->library != engine->driver.library)
        registration = registration->next;
    *result = OOCU_SUCCESS;
    if (!registration)
        status = oo__registration_make(engine, host, bytes, result, &registration);
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

/* Every engine waits for its own copies, whichever engine unregisters. */
static enum oo_status oo__copies_have_ended(struct oo_engine *engine) {
    /* H7: no DMA may still use pages that are given back, or written as ordinary memory. */
    enum oo_status status;
    OO_TRY(oo__synchronize(engine, engine->h2d, 0));
    OO_TRY(oo__synchronize(engine, engine->d2h, 0));
    OO_TRY(oo__await_reads(engine));
done:
    return status;
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

/* ---- what is kept of files ---- */

void oo__kept_note(struct oo_engine *engine, const struct oo_host *host,
                   const struct oo_known *memory) {
    if (host->keeps)
        /* H10: a copy thread may be reading this, or queue a copy from memory that is unlocked
         * next. */
        oo__feeds_await(engine);
    for (const struct oo_known *known = engine->known; known; known = known->next) {
        const struct oo_disk *disk = known->host->disk;
        for (size_t i = 0; disk && i < disk->n_kept; i++) {
            struct oo_kept *kept = disk->kept[i];
            if (kept->room == host)
                kept->locked = oo__is_locked(memory, kept->place, kept->bytes);
        }
    }
}

static int oo__reads_files(const struct oo_engine *engine) {
    const struct oo_known *known = engine->known;
    while (known && !known->host->disk)
        known = known->next;
    return known != NULL;
}

/* ---- what an engine knows ---- */

static size_t oo__whole_pages(const struct oo_host *host, size_t bytes) {
    const size_t page = oo__page_bytes();
    return bytes >= host->mapped_bytes ? host->mapped_bytes : (bytes + page - 1) / page * page;
}

enum oo_status oo_engine_lock(struct oo_engine *engine, struct oo_host *host, size_t bytes) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const size_t lock = oo__whole_pages(host, bytes);
    struct oo_known *known = NULL;
    OOCUresult result = OOCU_ERROR_NOT_PERMITTED;
    if (lock && host->disk) {
        status = oo__fail(OO_E_ARGUMENT, "memory that shows a file cannot be locked");
        goto done;
    }
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
    if (host->disk)
        oo__feeder_read(engine, 1);
    *known = (struct oo_known){.host = host, .engine = engine};
    if (lock)
        OO_TRY(oo__registration_take(engine, known, lock, &result));
    if (oo_driver_is_sticky(result) || result == OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        status = oo__check(engine, "cuMemHostRegister", result);
        goto done;
    }
    if (lock < host->mapped_bytes || result != OOCU_SUCCESS)
        /* Now rather than in the middle of a step. */
        OO_TRY(oo__feeder_prepare(engine));
    if (lock && result != OOCU_SUCCESS) {
        (void)oo_driver_error(&engine->driver, "cuMemHostRegister", result);
        engine->stats.lock_refusals++;
        status = OO_E_LOCK_REFUSED;
    }
    known->next = engine->known;
    engine->known = known;
    engine->n_known++;
    oo__mutex_lock(host->mutex);
    known->next_of_host = host->known;
    host->known = known;
    oo__mutex_unlock(host->mutex);
    oo__kept_note(engine, host, known);
    known = NULL;
done:
    free(known);
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_is_locked(struct oo_engine *engine, const void *memory, size_t bytes,
                                   int *locked) {
    *locked = 0;
    enum oo_status status = oo__enter(engine, OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    if (bytes <= UINTPTR_MAX - (uintptr_t)memory)
        *locked = oo__is_locked(oo__known_memory(engine, memory, bytes), memory, bytes);
    oo__leave(engine);
    return OO_OK;
}

/* ---- how much may be locked ---- */

enum { OO_PROBES = 48 }; /* of halving sizes: from the whole address space to the smallest */

/* A range that stays locked must not be freed: try once more, then never free its memory. */
static void oo__probe_end(struct oo_engine *engine, struct oo_host *host, void *pages) {
    OOCUresult result = engine->driver.cuMemHostUnregister(pages);
    if (result != OOCU_SUCCESS)
        result = engine->driver.cuMemHostUnregister(pages);
    if (result != OOCU_SUCCESS) {
        oo__note_leak(engine, "cuMemHostUnregister", result);
        host->kept = 1;
    }
}

enum oo_status oo_engine_lockable(struct oo_engine *engine, struct oo_host *host, size_t *bytes) {
    *bytes = 0;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const size_t page = oo__page_bytes();
    void *probes[OO_PROBES];
    unsigned n_probes = 0;
    oo__mutex_lock(host->mutex);
    if (host->locked) {
        status = oo__fail(OO_E_STATE, "some of that host memory is locked already");
        goto done;
    }
    (void)oo__pages_inherit(host->pages, host->mapped_bytes, 0);
    size_t found = 0;
    /* What was refused at one size may be had at half of it, and then once more at most. */
    for (size_t step = host->mapped_bytes; n_probes < OO_PROBES;
         step = (step / 2 + page - 1) / page * page) {
        char *pages = (char *)host->pages + found;
        OOCUresult result = OOCU_ERROR_OUT_OF_MEMORY;
        if (step <= host->mapped_bytes - found)
            result = engine->driver.cuMemHostRegister(pages, step, oo__register_flags);
        if (result == OOCU_SUCCESS) {
            probes[n_probes++] = pages;
            found += step;
        } else if (oo_driver_is_sticky(result)) {
            status = oo__check(engine, "cuMemHostRegister", result);
            break;
        }
        if (step <= OO_LOCKABLE_STEP)
            break;
    }
    while (n_probes && engine->usable)
        oo__probe_end(engine, host, probes[--n_probes]);
    (void)oo__pages_inherit(host->pages, host->mapped_bytes, 1);
    *bytes = found;
done:
    oo__mutex_unlock(host->mutex);
    oo__leave(engine);
    return status;
}

/* Whether a copy of masters may need the upload ring. Gradients may always need the other. */
static int oo__is_pageable(const struct oo_engine *engine) {
    for (const struct oo_known *known = engine->known; known; known = known->next)
        if (!oo__is_locked(known, known->host->pages, known->host->bytes))
            return 1;
    return 0;
}

enum oo_status oo_engine_reserve_rings(struct oo_engine *engine, size_t bytes) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (bytes || !oo__is_pageable(engine)) {
        oo__feeds_await(engine);
        OO_TRY(oo__ring_resize(engine, &engine->up, bytes));
        OO_TRY(oo__ring_resize(engine, &engine->down, bytes));
    }
done:
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
    oo__kept_note(engine, host, NULL);
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
    if (host->disk) {
        oo__kept_forget(host->disk, NULL);
        oo__feeder_read(engine, oo__reads_files(engine));
    }
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_host_destroy(struct oo_host *host) {
    /* A DMA from pages given back to the system would read another owner's bytes. Where unlocking
     * fails the memory is leaked, with the record that its engine still holds: memory lost is
     * better than weights wrong. No other thread may use the memory now, so its mutex is not taken:
     * in a forked child it may be held for ever. */
    while (host && host->known) {
        enum oo_status status = oo_engine_unlock(host->known->engine, host);
        if (status != OO_OK)
            return status;
    }
    if (host && !host->kept)
        oo__host_free(host);
    return OO_OK;
}
