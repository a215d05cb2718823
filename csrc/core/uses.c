/* uses.c - the ends of a unit's uses: marked where a stream has queued one, waited for before
 * anything is written over the bytes (H2). */
#include "uses.h"
#include "call.h"
#include "feed.h"
#include "timing.h"

#include <string.h>

int oo__stream_lasts(const struct oo_engine *engine, OOCUstream stream) {
    return !stream || stream == OOCU_STREAM_LEGACY || stream == engine->compute;
}

/* The stream that the mark is of may have ended, and this one have got its handle: what it marks
 * next must come after that use as well. Of the same stream it does anyway, and nothing waits. */
static int oo__comes_after(struct oo_engine *engine, OOCUstream stream,
                           const struct oo_last_use *mark) {
    /* H2, H7: what waits for the mark waits for the earlier use, too. */
    return oo__stream_lasts(engine, stream) || mark->lost || !engine->usable ||
           OO_DRIVE(engine, cuStreamWaitEvent, stream, mark->event->handle, 0) == OO_OK;
}

/* The entry of `stream` among the unit's last uses; NULL when there is no room for one. When more
 * streams than entries use the unit, the oldest use is ordered before the h2d stream at once, which
 * is all that an eviction would do (H2). */
static struct oo_last_use *oo__use_entry(struct oo_engine *engine, struct oo_unit *unit,
                                         OOCUstream stream) {
    struct oo_last_use *entry = NULL;
    for (uint32_t i = 0; i < unit->n_uses; i++)
        if (unit->uses[i].stream == stream && oo__comes_after(engine, stream, &unit->uses[i]))
            entry = &unit->uses[i];
    if (!entry && unit->n_uses >= OO_STREAMS) {
        struct oo_last_use *oldest = &unit->uses[0];
        if (oldest->lost || !engine->usable ||
            OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, oldest->event->handle, 0) != OO_OK)
            return NULL;
        oo__event_give(engine, oldest->event);
        unit->n_uses--;
        memmove(&unit->uses[0], &unit->uses[1], unit->n_uses * sizeof unit->uses[0]);
    }
    if (!entry) {
        entry = &unit->uses[unit->n_uses++];
        *entry = (struct oo_last_use){stream, NULL, 1};
    }
    if (!entry->event && engine->usable)
        (void)oo__event_take(engine, OO_ORDERS, &entry->event);
    return entry;
}

/* The mark that H2 waits for. */
enum oo_status oo__mark_use(struct oo_engine *engine, struct oo_unit *unit, OOCUstream stream) {
    struct oo_last_use *entry = oo__use_entry(engine, unit, stream);
    if (engine->dead != OO_OK)
        return OO_OK; /* there is nothing left to overwrite */
    if (!entry) {
        enum oo_status status = oo__synchronize(engine, stream, 1);
        if (status == OO_OK || unit->n_uses == OO_USES)
            return status;
        unit->uses[unit->n_uses++] = (struct oo_last_use){stream, NULL, 1};
        engine->stats.lost_uses++;
        return OO_OK;
    }
    entry->lost = !entry->event || !engine->usable ||
                  OO_DRIVE(engine, cuEventRecord, entry->event->handle, stream) != OO_OK;
    engine->stats.lost_uses += entry->lost;
    return OO_OK;
}

/* H2: nothing may be written over the unit's bytes before each stream that used them has passed its
 * last use. */
enum oo_status oo__order_after_uses(struct oo_engine *engine, uint32_t id, OOCUstream writer) {
    const struct oo_unit *unit = &engine->units[id];
    if (unit->decodes && !unit->n_uses) { /* no use comes after its decodes, which may still run */
        oo__feed_stop(engine, id);
        engine->decoder.loose = 1;
    }
    for (uint32_t i = 0; i < unit->n_uses; i++) {
        const struct oo_last_use *use = &unit->uses[i];
        enum oo_status status =
            use->lost ? oo__synchronize(engine, use->stream, 1)
                      : OO_DRIVE(engine, cuStreamWaitEvent, writer, use->event->handle, 0);
        if (status != OO_OK)
            return status;
    }
    return OO_OK;
}

/* Take the first entry out, once its reads have ended. */
static enum oo_status oo__await_first_read(struct oo_engine *engine) {
    struct oo_reads *reads = &engine->reads;
    const struct oo_last_use *first = &reads->last[0];
    /* H7: the host rewrites or frees these masters next. */
    enum oo_status status = first->lost ? oo__synchronize(engine, first->stream, 1)
                                        : oo__event_await(engine, first->event);
    if (status != OO_OK)
        return status;
    oo__event_give(engine, first->event);
    reads->count--;
    memmove(&reads->last[0], &reads->last[1], reads->count * sizeof reads->last[0]);
    return OO_OK;
}

enum oo_status oo__mark_read(struct oo_engine *engine, OOCUstream stream) {
    struct oo_reads *reads = &engine->reads;
    struct oo_last_use *entry = NULL;
    for (uint32_t i = 0; i < reads->count; i++)
        if (reads->last[i].stream == stream && oo__comes_after(engine, stream, &reads->last[i]))
            entry = &reads->last[i];
    if (!entry && reads->count >= OO_STREAMS) {
        enum oo_status status = oo__await_first_read(engine);
        if (reads->count == OO_USES) /* so that it failed */
            return status;
    }
    if (!entry) {
        entry = &reads->last[reads->count++];
        *entry = (struct oo_last_use){.stream = stream};
        (void)oo__event_take(engine, OO_ORDERS, &entry->event);
    }
    entry->lost = !entry->event || !engine->usable ||
                  OO_DRIVE(engine, cuEventRecord, entry->event->handle, stream) != OO_OK;
    engine->stats.lost_uses += entry->lost;
    return OO_OK;
}

/* H7: what is queued on `stream` next writes masters, by copies that wait for it. */
enum oo_status oo__order_after_reads(struct oo_engine *engine, OOCUstream stream) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < engine->reads.count && status == OO_OK; i++) {
        const struct oo_last_use *read = &engine->reads.last[i];
        status = read->lost ? oo__synchronize(engine, read->stream, 1)
                            : OO_DRIVE(engine, cuStreamWaitEvent, stream, read->event->handle, 0);
    }
    return status;
}

enum oo_status oo__await_reads(struct oo_engine *engine) {
    enum oo_status status = OO_OK;
    while (engine->reads.count && status == OO_OK)
        status = oo__await_first_read(engine);
    return status;
}

void oo__forget_reads(struct oo_engine *engine) {
    while (engine->reads.count)
        oo__event_give(engine, engine->reads.last[--engine->reads.count].event);
}

/* The waits queued on the events keep the records they saw, so the events are free again at once.
 */
void oo__forget_copy(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    oo__feed_forget(engine, id);
    for (uint32_t i = 0; i < unit->n_uses; i++)
        oo__event_give(engine, unit->uses[i].event);
    oo__event_give(engine, unit->ready);
    unit->ready = NULL;
    unit->n_uses = unit->n_waited = 0;
    unit->awaited = unit->stale = unit->leaving = 0;
    unit->generation++;
}

enum oo_status oo__fail_in_use(uint32_t unit) {
    return oo__fail(
        OO_E_STATE,
        "unit %u is being computed with; detach when forward and backward have returned", unit);
}

enum oo_status oo__drop(struct oo_engine *engine, uint32_t id) {
    if (!oo_plan_resident(engine->plan, id))
        return OO_OK;
    if (engine->usable) {
        enum oo_status status = oo__order_after_uses(engine, id, engine->h2d);
        if (status != OO_OK)
            return status;
    }
    oo__forget_copy(engine, id);
    oo_plan_drop(engine->plan, id);
    return OO_OK;
}
