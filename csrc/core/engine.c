/* engine.c - one use of a unit, from top to bottom: copy in, acquire, release, prefetch, evict.
 * What to do is decided in plan.c; here it is carried out, in the right order.
 *
 * The hazards, the wait that closes each, and the file that it is in:
 *   H1  a kernel reads a slot before its copy has arrived
 *           the compute stream waits for `ready`, or for a trip back    engine.c, trip.c
 *   H2  a copy overwrites bytes that a kernel still reads
 *           the stream that writes, h2d or decode, waits for every last use  uses.c
 *   H3  a copy overwrites bytes that an earlier owner still uses
 *           the h2d stream waits for the stream that allocated them     lease.c, trip.c
 *   H4  device memory goes back while copies or kernels use it
 *           its stream waits for the kernels, the host for the copies   lease.c
 *           its stream waits for the copies of trips                    trip.c
 *   H5  the host rewrites bytes of the ring that a copy still reads
 *           the copy thread waits for the copy that used the piece last feed.c
 *   H6  a gradient, or what leaves, is copied before it is computed
 *           the d2h stream waits for the stream that computes it        gradient.c, trip.c
 *   H7  masters are unlocked, freed or rewritten under a copy, or a kernel that reads them in place
 *           the host waits for the engine's copies    copies.c, masters.c, model.c, ring.c, feed.c
 *           the host waits for those kernels          uses.c; engine.c, masters.c, model.c
 *   H8  the host reads bytes that have not arrived
 *           the host waits for their copy                       gradient.c, ring.c, trip.c
 *   H9  a stream waits for the arrival of a copy that is not queued yet
 *           the host waits for the copy threads                         feed.c
 *   H10 copy threads read masters, or write to bytes, that are another's by now
 *           the host waits for the copy threads                         feed.c
 *   H11 a kernel decodes a chunk before it has come
 *           the decode stream waits for the chunk's copy                staging.c
 *   H12 a copy overwrites a piece of staging memory that a kernel still decodes
 *           the h2d stream waits for the piece's last decode            staging.c
 *   H13 a copy overwrites bytes that a kernel still decodes into, of a unit that has not been used,
 *       or whose uses the decode stream alone has waited for
 *           the h2d stream waits for the decode stream                  staging.c
 *   H14 `ready`, which follows the last decode, passes copies of what is not coded
 *           the decode stream waits for the h2d stream                  staging.c
 *   H15 bytes are copied back that have not arrived at the host
 *           the h2d stream waits for the trip that brings them there    trip.c
 *   H16 bytes that leave overwrite host memory that a copy back still reads
 *           the d2h stream waits for that copy                          trip.c
 *
 * Copies among themselves are ordered by being on one stream each way, decodes by being on one
 * stream. Free bytes of the arena keep one promise: every use of them is ordered before the tail of
 * the h2d stream (oo__drop, oo__copy_in), or while `loose` before that of the decode stream. */
#include "../base/os.h"
#include "call.h"
#include "copies.h"
#include "feed.h"
#include "fingerprint.h"
#include "journal.h"
#include "masters.h"
#include "model.h"
#include "simulated.h"
#include "staging.h"
#include "timing.h"
#include "uses.h"

/* Uses of any engine that this thread has begun and not ended. A thread that holds one never waits
 * for others. Its address distinguishes threads. */
static _Thread_local uint32_t oo__uses_here;

/* ---- copy in ---- */

/* Of a coded master, what it is that others may rewrite: its code. */
static size_t oo__master_bytes(const struct oo_member_tensor *tensor) {
    return tensor->coded_bytes ? tensor->coded_bytes : tensor->bytes;
}

/* What is in a file, and was not written, is what it was: it is not read for that. Where that is
 * not known it is something else, so that the copy says why. */
static uint64_t oo__read_master(const struct oo_engine *engine, const struct oo_unit *unit,
                                const struct oo_member_tensor *tensor, enum oo_reading reading) {
    const size_t bytes = oo__master_bytes(tensor);
    const int in_memory = unit->on_disk ? oo__in_memory(engine, tensor->host, bytes) : 1;
    if (in_memory < 0)
        return UINT64_MAX;
    return in_memory ? oo__fingerprint(tensor->host, bytes, reading) : 0;
}

static uint64_t oo__read_masters(const struct oo_engine *engine, const struct oo_member *member,
                                 enum oo_reading reading) {
    uint64_t fingerprint = 0;
    for (uint32_t i = 0; i < member->n_tensors; i++)
        fingerprint = fingerprint * 31 + oo__read_master(engine, &engine->units[member->unit],
                                                         &member->tensors[i], reading);
    return fingerprint;
}

static enum oo_reading oo__full_reading(const struct oo_engine *engine) {
    return engine->verify ? OO_WHOLE : OO_SAMPLE;
}

/* Remember what the masters hold: it is what the device will have. The first use in a sweep has
 * read them (oo__masters_changed), so that a copy only glances whether they are the same still.
 * Where a glance is mistaken the next reading differs, and the unit is copied once more. */
static void oo__note_masters(struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_members; i++) {
        struct oo_member *member = &engine->members[unit->members[i]];
        member->stamp_known = 0;
        const uint64_t glance = oo__read_masters(engine, member, OO_GLANCE);
        if (glance != member->glance || unit->trainable || engine->verify)
            member->fingerprint = oo__read_masters(engine, member, oo__full_reading(engine));
        member->glance = glance;
    }
}

/* Another stamp: what was read is of weights that no longer exist. */
static void oo__note_stamp(struct oo_engine *engine, struct oo_member *member, uint64_t stamp) {
    if (member->stamp != stamp)
        member->fingerprint = oo__read_masters(engine, member, oo__full_reading(engine));
    member->stamp = stamp;
    member->stamp_known = 1;
}

static int oo__masters_changed(const struct oo_engine *engine, struct oo_member *member) {
    const uint64_t before = member->fingerprint;
    member->fingerprint = oo__read_masters(engine, member, oo__full_reading(engine));
    return member->fingerprint != before;
}

/* Two events, if this is one of those that are measured. */
static enum oo_status oo__times_take(struct oo_engine *engine, enum oo_trace_kind kind,
                                     struct oo_event **begin, struct oo_event **end) {
    enum oo_status status = OO_OK;
    if (oo__is_measured(engine, kind)) {
        OO_TRY(oo__event_take(engine, OO_TIMED, begin));
        OO_TRY(oo__event_take(engine, OO_TIMED, end));
    }
done:
    return status;
}

/* Queue a part, and count it. */
static enum oo_status oo__copy_part(struct oo_engine *engine, uint32_t id,
                                    const struct oo_part *part, uintptr_t target) {
    struct oo_stats *stats = &engine->models[engine->units[id].model].stats;
    struct oo_part_times times = {NULL, NULL, NULL, NULL};
    struct oo_failure failure = {0};
    enum oo_status status;
    const int decodes = part->header.mode == OO_CODEC_TIERS;
    engine->copies.sent++;
    /* Between two parts of such a unit the link may rest, for want of staging memory. */
    if (engine->units[id].decodes && part->bytes)
        OO_TRY(oo__times_take(engine, OO_TRACE_H2D, &times.copy_begin, &times.copy_end));
    if (decodes)
        OO_TRY(oo__times_take(engine, OO_TRACE_DECODE, &times.decode_begin, &times.decode_end));
    if (!oo__part_send(engine, part, target, &times, &failure)) {
        status = oo__check(engine, failure.call, failure.result);
        goto done;
    }
    stats->h2d_bytes += part->bytes;
    stats->h2d_copies += part->bytes != 0;
    stats->decodes += (uint64_t)decodes;
    stats->decoded_bytes += oo__decoded_bytes(part);
    if (times.copy_begin)
        oo__span_add(engine, OO_TRACE_H2D, id, part->bytes, times.copy_begin, times.copy_end);
    if (times.decode_begin)
        oo__span_add(engine, OO_TRACE_DECODE, id, oo__decoded_bytes(part), times.decode_begin,
                     times.decode_end);
    return OO_OK;
done:
    oo__event_give(engine, times.copy_begin);
    oo__event_give(engine, times.copy_end);
    oo__event_give(engine, times.decode_begin);
    oo__event_give(engine, times.decode_end);
    return status;
}

/* Queue all of a unit, and the record of its arrival. */
static enum oo_status oo__copy_parts(struct oo_engine *engine, uint32_t id, uintptr_t address,
                                     const struct oo_event *ready) {
    struct oo_unit *unit = &engine->units[id];
    struct oo_failure failure = {0};
    enum oo_status status = OO_OK;
    oo__note_copy(engine, unit);
    for (uint32_t i = 0; i < unit->n_parts; i++)
        OO_TRY(oo__copy_part(engine, id, &unit->parts[i], address + unit->parts[i].offset));
    if (!oo__arrival_record(engine, ready, unit->decodes, &failure))
        status = oo__check(engine, failure.call, failure.result);
done:
    return status;
}

/* Queue the copy of a unit whose masters the device reads directly. */
static enum oo_status oo__copy_locked(struct oo_engine *engine, uint32_t id, uintptr_t address,
                                      const struct oo_event *ready) {
    const struct oo_unit *unit = &engine->units[id];
    struct oo_event *begin = NULL;
    enum oo_status status = OO_OK;
    if (!unit->decodes) /* else each part is measured */
        status = oo__span_begin(engine, OO_TRACE_H2D, engine->h2d, &begin);
    if (status == OO_OK)
        status = oo__copy_parts(engine, id, address, ready);
    if (status == OO_OK)
        status = oo__span_end(engine, OO_TRACE_H2D, id, unit->host_bytes, engine->h2d, &begin);
    oo__event_give(engine, begin);
    return status;
}

static void oo__journal_decodes(struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    uint64_t bytes = 0, chunks = 0;
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        bytes += oo__decoded_bytes(&unit->parts[i]);
        chunks += unit->parts[i].header.mode == OO_CODEC_TIERS;
    }
    if (chunks)
        oo__journal(engine, OO_DEED_DECODE, id, bytes, chunks);
}

/* Order what will be written for the unit after all uses of the window's bytes. Chunks need no slot
 * before they are decoded, so that the link is not idle while kernels still read what is in the
 * window. */
static enum oo_status oo__clear(struct oo_engine *engine, const struct oo_unit *unit,
                                const struct oo_window *window) {
    struct oo_decoder *decoder = &engine->decoder;
    enum oo_status status = OO_OK;
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT)
            OO_TRY(oo__order_after_uses(engine, block->unit,
                                        unit->only_decoded ? decoder->stream : engine->h2d));
        if (block == window->last)
            break;
    }
    if (unit->only_decoded)
        decoder->loose = 1;
    else
        status = oo__decodes_settle(engine);
done:
    return status;
}

/* Bring a unit in over the window's occupants. When it fails the unit is absent, and what was
 * evicted by then stays evicted: that costs a copy and nothing else. */
static enum oo_status oo__copy_in(struct oo_engine *engine, uint32_t id,
                                  const struct oo_window *window, int urgent) {
    enum oo_status status = OO_OK;
    struct oo_event *ready = NULL;
    struct oo_unit *unit = &engine->units[id];
    OO_TRY(oo__coded_check(engine, id));
    OO_TRY(oo__event_take(engine, OO_ORDERS, &ready));
    OO_TRY(oo__clear(engine, unit, window));
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT) {
            const struct oo_unit *gone = &engine->units[block->unit];
            engine->models[gone->model].stats.evictions++;
            oo__journal(engine, OO_DEED_EVICT, block->unit, gone->device_bytes, id);
            oo__forget_copy(engine, block->unit);
        }
        if (block == window->last)
            break;
    }
    const uintptr_t address = oo_block_address(oo_plan_take(engine->plan, id, window));
    const size_t used = oo_plan_arena(engine->plan)->used_bytes;
    if (used > engine->stats.peak_resident_bytes)
        engine->stats.peak_resident_bytes = used;
    oo__label(engine, (const void *)address, unit->device_bytes, "unit", id);
    /* A copy that failed half-way leaves bytes in flight on the h2d stream, so dropping the unit
     * keeps the promise of free bytes; and decodes, which are waited for before the next copy. */
    status = unit->is_fed ? oo__feed_begin(engine, id, address, ready, urgent)
                          : oo__copy_locked(engine, id, address, ready);
    if (status != OO_OK) {
        engine->decoder.loose |= unit->decodes;
        oo_plan_drop(engine->plan, id);
        goto done;
    }
    unit->ready = ready;
    ready = NULL;
    unit->generation++;
    unit->copied_in = engine->sweep;
    oo__journal(engine, OO_DEED_COPY_IN, id, unit->host_bytes, address);
    oo__journal_decodes(engine, id);
    oo__note_masters(engine, id);
done:
    oo__event_give(engine, ready);
    return status;
}

/* Trainable units are fetched ahead only while no optimizer is expected to rewrite them. */
static void oo__set_held(struct oo_engine *engine, int held) {
    if (engine->held == held)
        return;
    engine->held = held;
    engine->rests = 0;
    for (uint32_t i = 0; i < engine->n_units; i++)
        oo_plan_allow(engine->plan, i, oo__may_fetch_ahead(engine, &engine->units[i]));
}

/* ---- acquire ---- */

/* A sweep is one pass over the units: forward and backward are two. The first hit of a member in a
 * sweep checks its fingerprint, since no version counter sees every write. Which sweep a use that
 * is asked for now belongs to; it is counted by oo__note_sweep, once no call begins again. */
static uint64_t oo__sweep_of(const struct oo_engine *engine, const struct oo_member *member,
                             int64_t task) {
    const int in_task = task >= 0;
    const int is_next = in_task != engine->in_task ||
                        (member->sweep == engine->sweep && (!in_task || member->task != task));
    return engine->sweep + (uint64_t)is_next;
}

static void oo__note_sweep(struct oo_engine *engine, struct oo_member *member, int64_t task,
                           uint64_t sweep) {
    engine->sweep = member->sweep = sweep;
    engine->in_task = task >= 0;
    member->task = task;
}

/* While trainable masters may be rewritten a copy is good for one sweep: a write to a row between
 * two forwards changes no stamp, and samples may miss it. A copy in use is left alone: code that
 * computes with masters does not rewrite them. */
static int oo__is_outdated(const struct oo_engine *engine, uint32_t id, uint64_t sweep) {
    const struct oo_unit *unit = &engine->units[id];
    return engine->held && unit->trainable && unit->copied_in < sweep &&
           !oo_plan_pins(engine->plan, id);
}

/* Masters are stable from here on; copies from before `sweep` were made while they were not. */
static void oo__lift(struct oo_engine *engine, uint64_t sweep) {
    if (!engine->held)
        return;
    for (uint32_t i = 0; i < engine->n_units; i++)
        if (oo__is_outdated(engine, i, sweep) && oo__drop(engine, i) != OO_OK)
            engine->units[i].stale = 1;
    oo__set_held(engine, 0);
}

/* H1: work queued on `stream` from now on comes after the copy's arrival. */
static enum oo_status oo__order_after_copy(struct oo_engine *engine, uint32_t id,
                                           OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_waited; i++)
        if (unit->waited[i] == stream)
            return OO_OK;
    enum oo_status status = OO_OK;
    struct oo_event *before = NULL;
    if (!unit->awaited) /* measure what the first wait for this copy costs its stream */
        OO_TRY(oo__span_begin(engine, OO_TRACE_STALL, stream, &before));
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, stream, unit->ready->handle, 0));
    if (!unit->awaited) {
        engine->models[unit->model].stats.waits++;
        oo__journal(engine, OO_DEED_WAIT, id, 0, 0);
    }
    unit->awaited = 1;
    if (oo__stream_lasts(engine, stream)) { /* else the next one with this handle has not waited */
        oo__note_awaited(engine, unit, stream);
        unit->waited[unit->n_waited++] = stream;
    }
    OO_TRY(oo__span_end(engine, OO_TRACE_STALL, id, 0, stream, &before));
done:
    oo__event_give(engine, before);
    return status;
}

static enum oo_status oo__fail_no_member(uint32_t id) {
    return oo__fail(OO_E_STATE, "member %u is not attached (any more)", id);
}

static void oo__note_fetched(struct oo_fetched *fetched, uint32_t id) {
    fetched->units[fetched->count++] = id;
}

/* Only a call that succeeds returns these copies to the caller, so after a failure they are not
 * stamped. */
static void oo__distrust(struct oo_engine *engine, const struct oo_fetched *fetched) {
    for (uint32_t i = 0; i < fetched->count; i++)
        engine->units[fetched->units[i]].stale = 1;
}

/* Until when a call may wait for the uses of other threads to end, `patience_s` after it first had
 * to; 0: it may not. A thread that holds a use itself must not: it would wait for itself, or for a
 * thread that waits for it. */
static double oo__await_until(double *since_s, double patience_s) {
    const double now_s = oo__clock_s();
    if (*since_s == 0)
        *since_s = now_s;
    return !oo__uses_here && now_s < *since_s + patience_s ? *since_s + patience_s : 0;
}

/* The unit's copy is out of date and in use; it is replaced when its uses have ended. OO_OK: one
 * may have ended, so begin the call again. A kept use is never waited for: it may end in a later
 * step, and by this thread. */
static enum oo_status oo__await_uses(struct oo_engine *engine, uint32_t id, int flags,
                                     double *since_s) {
    const double until_s = oo__await_until(since_s, engine->patience_s);
    if (until_s == 0 || engine->units[id].n_kept)
        return oo__fail(
            OO_E_STATE,
            "the weights of unit %u were rewritten while another call computes with them", id);
    if (flags & OO_NONBLOCKING)
        return OO_WOULD_BLOCK;
    oo__wait_for_a_release(engine, until_s);
    return OO_OK;
}

/* Until when to wait where what is in use leaves the unit no place, and a use may end that makes
 * one; 0: no longer. What another thread keeps ends with a backward, as a rule soon; what this one
 * keeps may end in a step to come. */
static double oo__await_room_until(const struct oo_engine *engine, uint32_t id, double *since_s) {
    struct oo_window window;
    int keeps = 0;
    if (oo_plan_place(engine->plan, id, &window))
        return 0;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        const struct oo_unit *unit = &engine->units[i];
        const uint32_t lasting = unit->n_kept + unit->n_mapped;
        if (oo_plan_pins(engine->plan, i) > lasting)
            return oo__await_until(since_s, engine->patience_s);
        keeps = keeps || (lasting && unit->keeper != &oo__uses_here);
    }
    return keeps ? oo__await_until(since_s, engine->kept_patience_s) : 0;
}

/* For the unit's own feed, or for those of units that it drives out. */
static int oo__may_wait_for_feeds(const struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    return unit->is_fed || (!oo_plan_resident(engine->plan, id) && oo__feeds_run(engine));
}

static enum oo_status oo__acquire_late(struct oo_engine *engine, uint32_t id,
                                       struct oo_fetched *fetched) {
    struct oo_window window;
    if (!oo_plan_place(engine->plan, id, &window)) {
        const struct oo_arena *arena = oo_plan_arena(engine->plan);
        return oo__fail(
            OO_E_NO_ROOM,
            "the arena of %zu bytes (%zu in use) has no place for a unit of %zu bytes: what is "
            "there is being "
            "computed with or too fragmented; raise vram_budget or lower offload_percent",
            arena->total_bytes, arena->used_bytes, engine->units[id].device_bytes);
    }
    enum oo_status status = oo__copy_in(engine, id, &window, 1);
    if (status == OO_OK) {
        status = oo__feed_await(engine, id);
        if (status != OO_OK)
            (void)oo__drop(engine, id); /* it has not been used: nothing can fail */
    }
    if (status == OO_OK) {
        engine->models[engine->units[id].model].stats.late++;
        oo__note_fetched(fetched, id);
        oo__flush(engine);
    }
    return status;
}

/* End one use of a unit: OO_E_TICKET where the ticket names none. */
static enum oo_status oo__end_use(struct oo_engine *engine, uint64_t ticket, OOCUstream stream) {
    const uint32_t id = (uint32_t)ticket;
    if (id >= engine->n_units || engine->units[id].generation != (uint32_t)(ticket >> 32) ||
        !oo_plan_pins(engine->plan, id))
        return oo__fail(
            OO_E_TICKET,
            "ticket %016llx of unit %u is not in use: released twice, or of an earlier copy",
            (unsigned long long)ticket, id);
    struct oo_unit *unit = &engine->units[id];
    enum oo_status status = oo__mark_use(engine, unit, stream);
    if (status == OO_OK)
        oo_plan_unpin(engine->plan, id);
    return status;
}

/* After a use has ended, and its row with it. */
static void oo__use_ended(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    oo__mutex_wake(engine->mutex); /* threads that wait for uses */
    if (oo_plan_pins(engine->plan, id))
        return;
    oo__rows_forget(engine, unit); /* of uses that ended on another stream */
    /* Without a context its uses cannot be ordered before the copy that will replace it. */
    if (unit->leaving && (!engine->usable || oo__drop(engine, id) != OO_OK))
        unit->stale = 1; /* it stays, but must be copied again */
}

/* End a use that this thread's acquire began, or another's. */
static enum oo_status oo__release(struct oo_engine *engine, uint64_t ticket, OOCUstream stream) {
    enum oo_status status = oo__end_use(engine, ticket, stream);
    if (status != OO_OK)
        return status;
    oo__uses_here -= oo__uses_here > 0;
    oo__row_end(engine, (uint32_t)ticket, stream);
    oo__use_ended(engine, (uint32_t)ticket);
    return OO_OK;
}

/* Whether copy threads may be writing to the window: they have to be stopped first. (While they
 * run, a thread that decodes may wait for a piece of staging memory that one of them has.) */
static int oo__is_being_fed(const struct oo_engine *engine, const struct oo_window *window) {
    for (const struct oo_block *block = window->first;; block = block->next) {
        const struct oo_feed *feed =
            block->unit == OO_NO_UNIT ? NULL : engine->units[block->unit].feed;
        if (feed && feed->open)
            return 1;
        if (block == window->last)
            return 0;
    }
}

/* Whether all uses of the window's bytes are over by now. */
static int oo__is_free_now(const struct oo_engine *engine, const struct oo_window *window) {
    for (const struct oo_block *block = window->first;; block = block->next) {
        const struct oo_unit *unit = block->unit == OO_NO_UNIT ? NULL : &engine->units[block->unit];
        for (uint32_t i = 0; unit && i < unit->n_uses; i++)
            if (unit->uses[i].lost ||
                engine->driver.cuEventQuery(unit->uses[i].event->handle) != OOCU_SUCCESS)
                return 0;
        if (block == window->last)
            return 1;
    }
}

/* Whether the copy would hold up others, which come from a disk: it waits on the h2d stream for the
 * uses of what is in its place, and what threads read is queued behind that as it comes, though its
 * own place may have been free for long. Then it is begun after them. */
static int oo__would_hold_up(const struct oo_engine *engine, const struct oo_window *window) {
    return engine->feeder.reads && oo__feeds_run(engine) && !oo__is_free_now(engine, window);
}

/* Visits by which the host is ahead of the device where it waits for it, with the one that it asks
 * for: the one before that is still to run then, so the device does not rest. */
enum { OO_BEHIND = 3 };

/* Whether the host has since asked for so many others than those in the window. */
static int oo__is_behind(const struct oo_engine *engine, const struct oo_window *window) {
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT && oo_plan_since(engine->plan, block->unit) < OO_BEHIND)
            return 0;
        if (block == window->last)
            return 1;
    }
}

/* Wait until all uses of the window's bytes are over. */
static enum oo_status oo__await_window(struct oo_engine *engine, const struct oo_window *window) {
    enum oo_status status;
    for (const struct oo_block *block = window->first;; block = block->next) {
        const struct oo_unit *unit = block->unit == OO_NO_UNIT ? NULL : &engine->units[block->unit];
        for (uint32_t i = 0; unit && i < unit->n_uses; i++)
            if (!unit->uses[i].lost)
                OO_TRY(oo__feeds_go_on(engine, unit->uses[i].event));
        if (block == window->last)
            return OO_OK;
    }
done:
    return status;
}

/* Let go what has to leave, and start copies by next use until nothing more is worth its place. A
 * prefetch that fails is given up: the unit is copied when it is asked for, and the failure
 * surfaces there if it lasts. */
static void oo__start_copies(struct oo_engine *engine, int flags, struct oo_fetched *fetched) {
    uint32_t id;
    struct oo_window window;
    while (engine->usable && oo_plan_next_drop(engine->plan, &id)) {
        const struct oo_feed *feed = engine->units[id].feed;
        if ((flags & OO_NONBLOCKING) && feed && feed->open) {
            fetched->more = 1;
            return;
        }
        if (oo__drop(engine, id) != OO_OK)
            return;
        engine->models[engine->units[id].model].stats.evictions++;
        oo__journal(engine, OO_DEED_EVICT, id, engine->units[id].device_bytes, id);
    }
    int tapes = OO_TAPES;
    while (engine->usable && oo_plan_next_fetch(engine->plan, tapes, &id, &window)) {
        if (fetched->count == OO_MAX_FETCHED ||
            ((flags & OO_NONBLOCKING) &&
             (oo__is_being_fed(engine, &window) ||
              (engine->units[id].decodes && oo__feeds_run(engine)) ||
              !oo__queue_has_room(engine, engine->units[id].n_parts)))) {
            fetched->more = 1;
            return;
        }
        if (oo__would_hold_up(engine, &window)) {
            /* No hazard: were the host any farther ahead of the device, it would ask for what is
             * next before anything can be read to where the device computes now. */
            if (!(flags & OO__PACED) || !oo__is_behind(engine, &window) ||
                oo__await_window(engine, &window) != OO_OK || !oo__is_free_now(engine, &window)) {
                tapes &= ~oo_plan_tape(engine->plan, id);
                continue;
            }
        }
        struct oo_stats *stats = &engine->models[engine->units[id].model].stats;
        if (oo__copy_in(engine, id, &window, 0) != OO_OK) {
            stats->prefetch_failures++;
            return;
        }
        stats->prefetches++;
        oo__note_fetched(fetched, id);
    }
}

/* A copy that the driver has only collected would overlap nothing. */
static void oo__prefetch(struct oo_engine *engine, int flags, struct oo_fetched *fetched) {
    oo__start_copies(engine, flags, fetched);
    if (fetched->count)
        oo__flush(engine);
}

static void oo__start_more(struct oo_engine *engine, void *fetched) {
    oo__prefetch(engine, 0, fetched);
}

/* Wait for what copy threads bring. Kernels leave places meanwhile, and no other call comes before
 * it is there: copies that would have held up others when they were due begin here. Those that are
 * overdue are waited for. */
static enum oo_status oo__await_fed(struct oo_engine *engine, uint32_t id, int flags,
                                    struct oo_fetched *fetched) {
    oo_plan_pin(engine->plan, id); /* its own place is none of these */
    if (oo_plan_resident(engine->plan, id) && engine->feeder.reads && !(flags & OO_NONBLOCKING))
        oo__prefetch(engine, OO__PACED, fetched);
    const enum oo_status status =
        oo__feed_await_with(engine, id, engine->feeder.reads ? oo__start_more : NULL, fetched);
    oo_plan_unpin(engine->plan, id);
    fetched->more = 0;
    if (status != OO_OK) { /* it is copied again, and needs a row of its own */
        oo__distrust(engine, fetched);
        fetched->count = 0;
    }
    return status;
}

static enum oo_status oo__acquire(struct oo_engine *engine, const struct oo_request *request,
                                  int flags, struct oo_use *use) {
    const OOCUstream stream = (OOCUstream)request->stream;
    enum oo_status status;
    double since_s = 0;
again:
    status = oo__enter(engine, flags | OO__QUEUES);
    if (status != OO_OK)
        return status;
    oo__queue_look(engine);
    use->fetched.count = 0;
    use->fetched.more = 0;
    if (request->member >= engine->n_members || engine->members[request->member].removed) {
        status = oo__fail_no_member(request->member);
        goto done;
    }
    OO_TRY(oo__refuse_capture(engine, stream));
    struct oo_member *member = &engine->members[request->member];
    const uint32_t id = member->unit;
    struct oo_unit *unit = &engine->units[id];
    if ((flags & OO_NONBLOCKING) && oo__may_wait_for_feeds(engine, id)) {
        status = OO_WOULD_BLOCK;
        goto done;
    }
    const uint64_t sweep = oo__sweep_of(engine, member, request->task);
    const int first = member->sweep != sweep;
    /* The next step may begin without an optimizer's; what is not recorded may be a validation. */
    if (request->kind == OO_RECORDED)
        oo__lift(engine, sweep);
    if (request->kind == OO_FORWARD && oo__is_outdated(engine, id, sweep))
        OO_TRY(oo__drop(engine, id));
    struct oo_stats *stats = &engine->models[unit->model].stats;
    int resident = oo_plan_resident(engine->plan, id) != NULL;
    if (resident && ((member->stamp_known && member->stamp != request->stamp) ||
                     ((first || engine->verify) && oo__masters_changed(engine, member))))
        unit->stale = 1;
    if (unit->stale && oo_plan_pins(engine->plan, id)) {
        OO_TRY(oo__await_uses(engine, id, flags, &since_s));
        oo__leave(engine);
        goto again;
    }
    /* What other threads compute with at this moment shall not decide whether this one fails. */
    const double until_s = resident ? 0 : oo__await_room_until(engine, id, &since_s);
    if (until_s > 0) {
        if (flags & OO_NONBLOCKING) {
            status = OO_WOULD_BLOCK;
            goto done;
        }
        oo__wait_for_a_release(engine, until_s);
        oo__leave(engine);
        goto again;
    }
    if ((flags & OO_NONBLOCKING) && (!resident || unit->stale) &&
        !oo__queue_has_room(engine, unit->n_parts)) {
        status = OO_WOULD_BLOCK;
        goto done;
    }
    oo__note_sweep(engine, member, request->task, sweep);
    oo_plan_visit(engine->plan, id, request->kind);
    OO_TRY(oo__pace_end(engine, stream)); /* before any wait for what copy threads bring */
    stats->acquires++;
    if (unit->stale) {
        stats->stale++;
        OO_TRY(oo__drop(engine, id));
        resident = 0;
    } else {
        status = oo__await_fed(engine, id, flags, &use->fetched);
        if (status != OO_OK) { /* as a prefetch that fails at once: given up, and made again */
            stats->prefetch_failures++;
            OO_TRY(engine->dead == OO_OK ? oo__drop(engine, id) : status);
            resident = 0;
        }
    }
    if (resident)
        stats->hits++;
    else
        OO_TRY(oo__acquire_late(engine, id, &use->fetched));
    oo__note_stamp(engine, member, request->stamp);
    OO_TRY(oo__order_after_copy(engine, id, stream));
    OO_TRY(oo__pace_begin(engine, id, stream));
    OO_TRY(oo__row_begin(engine, unit, stream));
    oo_plan_pin(engine->plan, id);
    oo__uses_here++;
    oo__journal(engine, OO_DEED_USE, id, unit->device_bytes, (uint64_t)request->kind);
    use->ticket = (uint64_t)unit->generation << 32 | id;
    use->address = oo_block_address(oo_plan_resident(engine->plan, id));
    if (flags & OO_LAUNCH)
        status = oo__launch(engine, member, stream, request->seconds);
    if (status != OO_OK) {
        const struct oo_error cause = oo__error_save();
        (void)oo__release(engine, use->ticket, stream);
        oo__error_restore(&cause);
    }
done:
    if (status != OO_OK)
        oo__distrust(engine, &use->fetched);
    oo__leave(engine);
    return status;
}

/* A later version may give a bit a meaning: a caller that sets it must not believe it was obeyed.
 */
static enum oo_status oo__check_flags(const char *function, int flags, int known) {
    return flags & ~known ? oo__fail(OO_E_ARGUMENT, "%s: unknown flags %#x", function,
                                     (unsigned)(flags & ~known))
                          : OO_OK;
}

enum oo_status oo_engine_acquire(struct oo_engine *engine, const struct oo_request *request,
                                 int flags, struct oo_use *use) {
    enum oo_status status = oo__check_flags("oo_engine_acquire", flags, OO_NONBLOCKING | OO_LAUNCH);
    return status == OO_OK ? oo__acquire(engine, request, flags, use) : status;
}

enum oo_status oo_engine_distrust(struct oo_engine *engine, const struct oo_fetched *fetched,
                                  int flags) {
    enum oo_status status = oo__check_flags("oo_engine_distrust", flags, OO_NONBLOCKING);
    if (status == OO_OK)
        status = oo__enter(engine, flags | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    oo__distrust(engine, fetched);
    oo__leave(engine);
    return OO_OK;
}

/* Does without the driver: a copy that is never stamped would be checked by samples alone. */
enum oo_status oo_engine_stamp(struct oo_engine *engine, const struct oo_stamp *stamps,
                               uint32_t count, int flags) {
    enum oo_status status = oo__check_flags("oo_engine_stamp", flags, OO_NONBLOCKING);
    if (status == OO_OK)
        status = oo__enter(engine, flags | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t id = stamps[i].member;
        if (id < engine->n_members && !engine->members[id].removed) {
            oo__note_stamp(engine, &engine->members[id], stamps[i].stamp);
        } else {
            status = oo__fail_no_member(id);
        }
    }
    oo__leave(engine);
    return status;
}

/* ---- release and prefetch ---- */

enum oo_status oo_engine_release(struct oo_engine *engine, uint64_t ticket, uintptr_t stream,
                                 int flags, struct oo_fetched *fetched) {
    enum oo_status status = oo__check_flags("oo_engine_release", flags, OO_NONBLOCKING);
    if (status != OO_OK)
        return status;
    /* Release ends the use even if the driver failed; otherwise detach could never succeed. */
    status = oo__enter(engine, flags | OO__QUEUES | OO__EVEN_DEAD | OO__EVEN_WITHOUT_CONTEXT);
    if (status != OO_OK)
        return status;
    fetched->count = 0;
    fetched->more = 0;
    OO_TRY(oo__release(engine, ticket, (OOCUstream)stream));
    oo__prefetch(engine, flags, fetched);
done:
    oo__leave(engine);
    return status;
}

/* ---- kept uses ---- */

enum oo_status oo_engine_keep(struct oo_engine *engine, uint32_t member, int flags,
                              struct oo_use *use) {
    enum oo_status status = oo__check_flags("oo_engine_keep", flags, OO_NONBLOCKING);
    if (status == OO_OK)
        status = oo__enter(engine, flags | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    const uint32_t id = member < engine->n_members ? engine->members[member].unit : OO_NO_UNIT;
    if (id == OO_NO_UNIT || !oo_plan_pins(engine->plan, id)) {
        status = oo__fail(OO_E_STATE, "member %u is not in use: a use is kept from one", member);
        goto done;
    }
    struct oo_unit *unit = &engine->units[id];
    oo_plan_pin(engine->plan, id);
    unit->n_kept++;
    unit->keeper = &oo__uses_here;
    *use = (struct oo_use){.ticket = (uint64_t)unit->generation << 32 | id,
                           .address = oo_block_address(oo_plan_resident(engine->plan, id))};
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_end(struct oo_engine *engine, uint64_t ticket, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__EVEN_WITHOUT_CONTEXT);
    if (status != OO_OK)
        return status;
    OO_TRY(oo__end_use(engine, ticket, (OOCUstream)stream));
    engine->units[(uint32_t)ticket].n_kept--;
    oo__use_ended(engine, (uint32_t)ticket);
done:
    oo__leave(engine);
    return status;
}

/* ---- masters read in place ---- */

static int oo__all_locked(const struct oo_engine *engine, const struct oo_member *member) {
    for (uint32_t i = 0; i < member->n_tensors; i++) {
        const struct oo_member_tensor *tensor = &member->tensors[i];
        const struct oo_known *memory = oo__known_memory(engine, tensor->host, tensor->bytes);
        if (tensor->coded_bytes || !oo__is_locked(memory, tensor->host, tensor->bytes))
            return 0;
    }
    return 1;
}

/* Any kernel that the work has may read any byte of the masters. */
static enum oo_status oo__declare_reads(struct oo_engine *engine, const struct oo_member *member,
                                        OOCUstream stream, double seconds) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < member->n_tensors; i++) {
        const OOSimRange read = {(OOCUdeviceptr)member->tensors[i].host, member->tensors[i].bytes};
        OO_TRY(oo__declare_kernel(engine, stream, &read, NULL, i ? 0 : seconds));
    }
done:
    return status;
}

enum oo_status oo_engine_map(struct oo_engine *engine, const struct oo_request *request, int flags,
                             uintptr_t *address) {
    *address = 0;
    enum oo_status status = oo__check_flags("oo_engine_map", flags, OO_NONBLOCKING);
    if (status == OO_OK)
        status = oo__enter(engine, flags);
    if (status != OO_OK)
        return status;
    const OOCUstream stream = (OOCUstream)request->stream;
    const uint32_t id = request->member;
    if (id >= engine->n_members || engine->members[id].removed) {
        status = oo__fail_no_member(id);
        goto done;
    }
    OO_TRY(oo__refuse_capture(engine, stream));
    const struct oo_member *member = &engine->members[id];
    if (!oo__all_locked(engine, member))
        goto done;
    OOCUdeviceptr mapped = 0;
    const OOCUresult result = engine->driver.cuPointerGetAttribute(
        &mapped, OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER, (OOCUdeviceptr)member->tensors[0].host);
    if (result == OOCU_ERROR_INVALID_VALUE) /* the device has no address for it: it is copied */
        goto done;
    OO_TRY(oo__check(engine, "cuPointerGetAttribute", result));
    if (oo__declares_kernels(engine))
        OO_TRY(oo__declare_reads(engine, member, stream, request->seconds));
    oo_plan_pin(engine->plan, member->unit);
    engine->units[member->unit].n_mapped++;
    engine->units[member->unit].keeper = &oo__uses_here;
    *address = mapped;
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_unmap(struct oo_engine *engine, uint32_t id, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__EVEN_WITHOUT_CONTEXT);
    if (status != OO_OK)
        return status;
    const uint32_t unit = id < engine->n_members ? engine->members[id].unit : OO_NO_UNIT;
    if (unit == OO_NO_UNIT || !engine->units[unit].n_mapped) {
        status = oo__fail(OO_E_STATE, "member %u is not mapped", id);
        goto done;
    }
    if (engine->dead == OO_OK) /* else nothing of it runs any more */
        OO_TRY(oo__mark_read(engine, (OOCUstream)stream));
    engine->units[unit].n_mapped--;
    oo_plan_unpin(engine->plan, unit);
    oo__use_ended(engine, unit);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_prefetch(struct oo_engine *engine, struct oo_fetched *fetched) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    fetched->count = 0;
    fetched->more = 0;
    oo__prefetch(engine, 0, fetched);
    oo__leave(engine);
    return OO_OK;
}

/* ---- masters that change ---- */

static enum oo_status oo__hold(struct oo_engine *engine, int rests) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    uint64_t last_copy = 0;
    rests = rests && (engine->rests || !engine->held);
    oo__set_held(engine, 1);
    engine->rests = rests;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        struct oo_unit *unit = &engine->units[i];
        if (!unit->trainable)
            continue;
        if (!rests && oo_plan_pins(engine->plan, i))
            unit->leaving = 1; /* another thread is still in its backward, with the same weights */
        else if (!rests)
            OO_TRY(oo__drop(engine, i));
        if (unit->copy > last_copy)
            last_copy = unit->copy;
    }
    /* H7: the caller may rewrite masters that a copy, or a kernel, still reads directly. A gradient
     * that arrived after the copies shows that they have ended. */
    OO_TRY(oo__await_copies(engine, last_copy));
    OO_TRY(oo__await_reads(engine));
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_hold(struct oo_engine *engine) { return oo__hold(engine, 0); }

enum oo_status oo_engine_rest(struct oo_engine *engine) { return oo__hold(engine, 1); }

enum oo_status oo_engine_settle(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    oo__feeds_await(engine);
    /* H7: the caller may rewrite any master that a copy, or a kernel, still reads directly. */
    OO_TRY(oo__await_copies(engine, engine->copies.queued));
    OO_TRY(oo__await_reads(engine));
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_resume(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (engine->rests)
        oo__set_held(engine, 0);
    else
        oo__lift(engine, UINT64_MAX);
    oo__leave(engine);
    return OO_OK;
}

/* A unit in use is replaced at its next acquire, once its uses have ended. */
static enum oo_status oo__refresh(struct oo_engine *engine, uint32_t model) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        struct oo_unit *unit = &engine->units[i];
        if (model != OO_ALL_MODELS && unit->model != model)
            continue;
        unit->is_rewritten_too = 0; /* not to be trusted afterwards, either */
        if (oo_plan_pins(engine->plan, i))
            unit->stale = 1;
        else
            OO_TRY(oo__drop(engine, i));
    }
done:
    return status;
}

enum oo_status oo_engine_refresh(struct oo_engine *engine, uint32_t model) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    status = oo__refresh(engine, model);
    oo__leave(engine);
    return status;
}

/* ---- masters that the device rewrites ---- */

/* Whether the device has what the masters are, by all that shows writes. */
static int oo__is_current(const struct oo_engine *engine, uint32_t id,
                          const struct oo_stamp *stamps, uint32_t count) {
    const struct oo_unit *unit = &engine->units[id];
    if (unit->stale || unit->is_fed || count != unit->n_members)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        struct oo_member *member = &engine->members[stamps[i].member];
        if (!member->stamp_known || member->stamp != stamps[i].stamp ||
            oo__masters_changed(engine, member))
            return 0;
    }
    return 1;
}

static enum oo_status oo__check_stamps(const struct oo_engine *engine, uint32_t id,
                                       const struct oo_stamp *stamps, uint32_t count) {
    if (id >= engine->n_units || engine->units[id].removed)
        return oo__fail(OO_E_ARGUMENT, "unit %u does not exist", id);
    for (uint32_t i = 0; i < count; i++)
        if (stamps[i].member >= engine->n_members || engine->members[stamps[i].member].unit != id)
            return oo__fail(OO_E_ARGUMENT, "member %u is not of unit %u", stamps[i].member, id);
    return OO_OK;
}

/* Begin the use in which `stream` writes to the unit's copy. */
static enum oo_status oo__rewrite_copy(struct oo_engine *engine, uint32_t id, OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    enum oo_status status;
    OO_TRY(oo__order_after_copy(engine, id, stream));
    /* H2: other streams may still read what this one is about to write. */
    OO_TRY(oo__order_after_uses(engine, id, stream));
    if (oo__declares_kernels(engine)) { /* what may be on its way there has come by then */
        const struct oo_block *block = oo_plan_resident(engine->plan, id);
        const OOSimRange written = {oo_block_address(block), block->bytes};
        OO_TRY(oo__declare_kernel(engine, stream, NULL, &written, 0));
    }
    oo_plan_pin(engine->plan, id);
    unit->n_kept++;
    unit->keeper = &oo__uses_here;
    unit->rewrite = (uint64_t)unit->generation << 32 | id;
    unit->is_rewritten_too = unit->rewrite_lasts = 1;
done:
    return status;
}

enum oo_status oo_unit_rewrite(struct oo_engine *engine, uint32_t id, const struct oo_stamp *stamps,
                               uint32_t count, uintptr_t stream, uintptr_t *address) {
    *address = 0;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    OO_TRY(oo__check_stamps(engine, id, stamps, count));
    struct oo_unit *unit = &engine->units[id];
    if (!unit->rewritten) {
        const int resident = oo_plan_resident(engine->plan, id) != NULL;
        const int is_used = oo_plan_pins(engine->plan, id) != 0;
        const int is_current = resident && !is_used && oo__is_current(engine, id, stamps, count);
        unit->rewritten = 1;
        unit->stale = (uint8_t)resident; /* until it is known to be right */
        oo_plan_allow(engine->plan, id, 0);
        OO_TRY(oo__order_after_reads(engine, (OOCUstream)stream));
        if (is_current) {
            OO_TRY(oo__rewrite_copy(engine, id, (OOCUstream)stream));
            *address = oo_block_address(oo_plan_resident(engine->plan, id));
        } else if (!is_used) {
            OO_TRY(oo__drop(engine, id));
        }
    } else {
        OO_TRY(oo__order_after_reads(engine, (OOCUstream)stream));
        unit->is_rewritten_too = 0; /* what this one sends home is not in the copy */
    }
done:
    oo__leave(engine);
    return status;
}

/* The use in which the copy is written ends, if it has not. */
static enum oo_status oo__written(struct oo_engine *engine, uint32_t id, OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    if (!unit->rewrite_lasts)
        return OO_OK;
    enum oo_status status = oo__end_use(engine, unit->rewrite, stream);
    if (status != OO_OK)
        return status;
    unit->rewrite_lasts = 0;
    unit->n_kept--;
    oo__use_ended(engine, id);
    return OO_OK;
}

enum oo_status oo_unit_written(struct oo_engine *engine, uint32_t id, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    OO_TRY(oo__check_stamps(engine, id, NULL, 0));
    status = oo__written(engine, id, (OOCUstream)stream);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_unit_rewritten(struct oo_engine *engine, uint32_t id,
                                 const struct oo_stamp *stamps, uint32_t count, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    OO_TRY(oo__check_stamps(engine, id, stamps, count));
    struct oo_unit *unit = &engine->units[id];
    OO_TRY(oo__written(engine, id, (OOCUstream)stream));
    const int is_right = unit->is_rewritten_too && count == unit->n_members &&
                         unit->generation == (uint32_t)(unit->rewrite >> 32);
    unit->rewritten = unit->is_rewritten_too = 0;
    oo_plan_allow(engine->plan, id, oo__may_fetch_ahead(engine, unit));
    if (!oo_plan_resident(engine->plan, id))
        goto done;
    for (uint32_t i = 0; i < count; i++) {
        struct oo_member *member = &engine->members[stamps[i].member];
        member->stamp = stamps[i].stamp;
        member->stamp_known = 1;
        member->fingerprint = oo__read_masters(engine, member, oo__full_reading(engine));
        member->glance = oo__read_masters(engine, member, OO_GLANCE);
    }
    unit->stale = !is_right;
    if (!is_right && !oo_plan_pins(engine->plan, id))
        status = oo__drop(engine, id);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_set_verify(struct oo_engine *engine, int on) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    /* Fingerprints of the other kind would not compare: start from fresh copies. */
    status = oo__refresh(engine, OO_ALL_MODELS);
    if (status == OO_OK)
        engine->verify = on != 0;
    for (uint32_t i = 0; i < engine->n_members; i++)
        engine->members[i].glance = 0;
    oo__leave(engine);
    return status;
}
