/* lease.c - device memory that is lent to the arena, and how it goes back. */
#include "call.h"
#include "feed.h"
#include "simulated.h"
#include "staging.h"
#include "timing.h"
#include "uses.h"

#include <stdlib.h>

/* The link that points to the lease; to NULL when there is none of that id (any more). */
static struct oo_lease **oo__find_lease(struct oo_engine *engine, uint32_t id) {
    struct oo_lease **link = &engine->leases;
    while (*link && (*link)->id != id)
        link = &(*link)->next;
    return link;
}

static enum oo_status oo__fail_no_lease(uint32_t id) {
    return oo__fail(OO_E_ARGUMENT, "lease %u does not exist (any more)", id);
}

enum oo_status oo_lease_add(struct oo_engine *engine, uint32_t *id) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_lease *lease = malloc(sizeof *lease);
    if (!lease) {
        status = oo__fail(OO_E_MEMORY, "no memory for a lease's record");
        goto done;
    }
    engine->stats.allocations++;
    *lease = (struct oo_lease){engine->leases_made++, engine->leases};
    engine->leases = lease;
    *id = lease->id;
done:
    oo__leave(engine);
    return status;
}

/* What of the memory can be used for a lease that is there: whole multiples of OO_ALIGNMENT,
 * `least` or more. */
static enum oo_status oo__loan_check(struct oo_engine *engine, uint32_t lease, uintptr_t address,
                                     size_t bytes, size_t least, uintptr_t *base, size_t *usable) {
    *base = (address + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
    if (!*oo__find_lease(engine, lease))
        return oo__fail_no_lease(lease);
    if (bytes > SIZE_MAX / 2 || address > UINTPTR_MAX - OO_ALIGNMENT - bytes)
        return oo__fail(OO_E_ARGUMENT, "device memory of %zu bytes at %#zx ends beyond memory",
                        bytes, (size_t)address);
    if (bytes < *base - address + least)
        return oo__fail(OO_E_ARGUMENT,
                        "device memory of %zu bytes at %#zx holds less than %zu at an alignment of "
                        "%zu",
                        bytes, (size_t)address, least, OO_ALIGNMENT);
    *usable = (bytes - (*base - address)) / OO_ALIGNMENT * OO_ALIGNMENT;
    return OO_OK;
}

/* From now on the h2d stream may have work that writes to it. */
static enum oo_status oo__loan_begin(struct oo_engine *engine, uintptr_t address, size_t bytes,
                                     OOCUstream stream) {
    enum oo_status status;
    int adopted = 0;
    struct oo_event *allocated = NULL;
    OO_TRY(oo__refuse_capture(engine, stream));
    OO_TRY(oo__adopt(engine, address, bytes, OOSIM_ADOPT_POISON, stream));
    adopted = 1;
    /* H3: our first copy must not overtake work that an earlier owner of these bytes still has
     * queued on the allocating stream (the caching allocator hands freed blocks on in stream
     * order). */
    OO_TRY(oo__event_take(engine, OO_ORDERS, &allocated));
    OO_TRY(OO_DRIVE(engine, cuEventRecord, allocated->handle, stream));
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, allocated->handle, 0));
done:
    oo__event_give(engine, allocated);
    if (status != OO_OK && adopted)
        (void)oo__disown(engine, address);
    return status;
}

enum oo_status oo_segment_add(struct oo_engine *engine, uint32_t lease, uintptr_t address,
                              size_t bytes, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_segment *segment;
    uintptr_t base = 0; /* the analyzer does not see that oo__loan_check sets both */
    size_t usable = 0;
    OO_TRY(oo__loan_check(engine, lease, address, bytes, OO_ALIGNMENT, &base, &usable));
    OO_TRY(oo__loan_begin(engine, address, bytes, (OOCUstream)stream));
    status = oo_arena_add(oo_plan_arena(engine->plan), base, usable, lease, stream, &segment);
    if (status == OO_OK)
        segment->lent = address;
    else
        (void)oo__disown(engine, address);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_staging_add(struct oo_engine *engine, uint32_t lease, uintptr_t address,
                              size_t bytes, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_staging *lent = NULL;
    uintptr_t base = 0; /* the analyzer does not see that oo__loan_check sets both */
    size_t usable = 0;
    OO_TRY(oo__loan_check(engine, lease, address, bytes, OO_STAGING_PIECES * OO_ALIGNMENT, &base,
                          &usable));
    OO_TRY(oo__staging_create(engine, base, usable, &lent));
    OO_TRY(oo__loan_begin(engine, address, bytes, (OOCUstream)stream));
    lent->lease = lease;
    lent->address = address;
    oo__staging_put(engine, lent);
    lent = NULL;
done:
    oo__staging_free(engine, lent);
    oo__leave(engine);
    return status;
}

/* Empty the segment and order its allocating stream after everything that used it. */
static enum oo_status oo__segment_empty(struct oo_engine *engine, struct oo_segment *segment) {
    for (struct oo_block *block = segment->first; block;) {
        if (block->unit == OO_NO_UNIT) {
            block = block->next;
            continue;
        }
        struct oo_unit *unit = &engine->units[block->unit];
        for (uint32_t i = 0; i < unit->n_uses && engine->usable; i++) {
            enum oo_status status = OO_OK;
            /* H4: the allocator reuses the bytes on its own stream while another still reads. */
            if (unit->uses[i].lost)
                status = oo__synchronize(engine, unit->uses[i].stream, 1);
            else if ((uintptr_t)unit->uses[i].stream != segment->stream)
                status = OO_DRIVE(engine, cuStreamWaitEvent, (OOCUstream)segment->stream,
                                  unit->uses[i].event->handle, 0);
            if (status != OO_OK)
                return status;
        }
        const uint32_t id = block->unit;
        oo__forget_copy(engine, id);
        oo_plan_drop(engine->plan, id);
        block = segment->first; /* freeing merges neighbours */
    }
    return OO_OK;
}

static int oo__segment_in_use(const struct oo_engine *engine, const struct oo_segment *segment,
                              uint32_t *unit) {
    for (const struct oo_block *block = segment->first; block; block = block->next) {
        if (block->unit != OO_NO_UNIT && oo_plan_pins(engine->plan, block->unit)) {
            *unit = block->unit;
            return 1;
        }
    }
    return 0;
}

enum oo_status oo_lease_remove(struct oo_engine *engine, uint32_t id) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    struct oo_arena *arena = oo_plan_arena(engine->plan);
    struct oo_lease **link = oo__find_lease(engine, id);
    uint32_t unit;
    if (!*link) {
        status = oo__fail_no_lease(id);
        goto done;
    }
    for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next) {
        if (segment->lease == id && oo__segment_in_use(engine, segment, &unit)) {
            status = oo__fail_in_use(unit);
            goto done;
        }
    }
    for (const struct oo_segment *segment = arena->segments; segment; segment = segment->next)
        for (const struct oo_block *block = segment->first; block; block = block->next)
            if (segment->lease == id && block->unit != OO_NO_UNIT)
                oo__feed_stop(engine, block->unit);
    if (oo__staging_bytes(engine))
        oo__feeds_await(engine); /* pieces of staging memory that goes may be taken */
    if (engine->usable) {
        /* H4: the memory goes back while copies into it, or decodes, are still queued. */
        OO_TRY(oo__synchronize(engine, engine->h2d, 0));
        if (engine->decoder.stream)
            OO_TRY(oo__synchronize(engine, engine->decoder.stream, 0));
    }
    for (struct oo_segment *segment = arena->segments, *next; segment; segment = next) {
        next = segment->next;
        if (segment->lease != id)
            continue;
        OO_TRY(oo__segment_empty(engine, segment));
        /* Also on a dead engine: the memory is the caller's, and no lost context takes it. */
        OO_TRY(oo__check(engine, "simDrop", oo__disown(engine, segment->lent)));
        oo_arena_remove(arena, segment);
    }
    OO_TRY(oo__staging_remove(engine, id));
    struct oo_lease *lease = *link;
    *link = lease->next;
    free(lease);
done:
    oo__leave(engine);
    return status;
}
