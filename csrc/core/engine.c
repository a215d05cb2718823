/* engine.c - one use of a unit, from top to bottom: enter, acquire, copy in, release, prefetch,
 * evict, recover. What to do is decided in plan.c; here it is carried out, in the right order.
 *
 * The hazards, and the one wait that closes each:
 *   H1  a kernel reads a slot before the copy has arrived      compute stream waits for `ready`
 *   H2  a copy overwrites bytes that a kernel still reads      h2d stream waits for every last use
 *   H3  a copy overwrites bytes an earlier owner still uses    h2d waits for the allocating stream
 *   H4  bytes given back while copies or kernels are queued    allocating stream and host wait
 *   H5  the host rewrites ring bytes a DMA still reads         host waits for the piece
 *   H6  a gradient is copied before it is computed             d2h stream waits for its stream
 *
 * H3 and H4 are closed in model.c, H5 in ring.c. Copies among themselves are ordered by being on
 * one stream each way. Free bytes of the arena keep one promise: every use of them is ordered
 * before the tail of the h2d stream (oo__drop, oo__copy_in). */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double oo__patience_s = 60;

/* Uses that this thread has begun and not ended, of any engine: who holds one waits for nobody. */
static _Thread_local uint32_t oo__uses_here;

/* ---- enter and leave ---- */

static enum oo_status oo__fail_dead(const struct oo_engine *engine) {
    return oo__fail_driver(
        OO_E_DEAD, engine->dead_call, engine->dead_code, engine->dead_name,
        "the GPU context was lost by an earlier error (%s); save what you need from host memory "
        "and restart the process",
        engine->dead_message);
}

enum oo_status oo__check(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return OO_OK;
    if (engine->dead != OO_OK) /* what fails now fails because of what failed first */
        return oo__fail_dead(engine);
    enum oo_status status = oo_driver_error(&engine->driver, call, result);
    if (oo_driver_is_sticky(result)) {
        const char *failed_call, *name;
        engine->dead = OO_E_DEAD;
        engine->usable = 0; /* for the rest of this call, too */
        oo_error_driver(&failed_call, &engine->dead_code, &name);
        snprintf(engine->dead_message, sizeof engine->dead_message, "%s", oo_error_message());
        snprintf(engine->dead_call, sizeof engine->dead_call, "%s", failed_call);
        snprintf(engine->dead_name, sizeof engine->dead_name, "%s", name);
        oo__append("; the GPU context is lost: save what you need from host memory and restart the "
                   "process");
    }
    return status;
}

enum oo_status oo__note(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return OO_OK;
    const struct oo_error first = oo__error_save();
    enum oo_status status = oo__check(engine, call, result);
    oo__error_restore(&first);
    return status;
}

void oo__note_leak(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return;
    const struct oo_error first = oo__error_save();
    (void)oo__check(engine, call, result);
    if (engine->n_leaked++ == 0)
        engine->first_leak = oo__error_save();
    oo__error_restore(&first);
}

/* The driver works on the thread's current context; autograd's threads and users' may have none. */
static enum oo_status oo__context_enter(struct oo_engine *engine) {
    OOCUcontext current = NULL;
    enum oo_status status = OO_DRIVE(engine, cuCtxGetCurrent, &current);
    if (status != OO_OK || current == engine->context)
        return status;
    status = OO_DRIVE(engine, cuCtxPushCurrent, engine->context);
    engine->context_pushed = status == OO_OK;
    return status;
}

enum oo_status oo__enter(struct oo_engine *engine, int flags) {
    if (oo__fork_guard_in_child(engine->guard))
        return oo__fail(
            OO_E_FORKED,
            "this process is a fork of the one that trains: the GPU belongs to the parent; "
            "do not use a managed model in a DataLoader worker");
    if (!(flags & OO_NONBLOCKING))
        oo__mutex_lock(engine->mutex);
    else if (!oo__mutex_try(engine->mutex))
        return OO_WOULD_BLOCK;
    const int drives = engine->dead == OO_OK && !(flags & OO__WITHOUT_DRIVER);
    enum oo_status status = drives ? oo__context_enter(engine) : OO_OK;
    engine->usable = drives && status == OO_OK;
    if (engine->dead != OO_OK && status == OO_OK && !(flags & OO__EVEN_DEAD)) {
        status = oo__fail_dead(engine);
        engine->death_told = 1;
    }
    if ((flags & OO__EVEN_WITHOUT_CONTEXT) || (engine->dead != OO_OK && (flags & OO__EVEN_DEAD)))
        status = OO_OK;
    if (status != OO_OK)
        oo__mutex_unlock(engine->mutex);
    return status;
}

static void oo__context_leave(struct oo_engine *engine) {
    OOCUcontext popped;
    if (engine->context_pushed)
        OO_GIVE_BACK(engine, cuCtxPopCurrent, &popped);
    engine->context_pushed = 0;
}

void oo__leave(struct oo_engine *engine) {
    oo__context_leave(engine);
    oo__mutex_unlock(engine->mutex);
}

enum oo_status oo__synchronize(struct oo_engine *engine, OOCUstream stream, int recovering) {
    engine->stats.host_waits++;
    engine->stats.recoveries += recovering != 0;
    return OO_DRIVE(engine, cuStreamSynchronize, stream);
}

/* ---- a unit's device copy ---- */

/* H2: nothing may be written over the unit's bytes before each stream that used them has passed its
 * last use. */
enum oo_status oo__order_after_uses(struct oo_engine *engine, struct oo_unit *unit) {
    for (uint32_t i = 0; i < unit->n_uses; i++) {
        const struct oo_last_use *use = &unit->uses[i];
        enum oo_status status =
            use->lost ? oo__synchronize(engine, use->stream, 1)
                      : OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, use->event->handle, 0);
        if (status != OO_OK)
            return status;
    }
    return OO_OK;
}

/* The waits queued on the events keep the records they saw, so the events are free again at once.
 */
void oo__forget_copy(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_uses; i++)
        oo__event_give(engine, unit->uses[i].event);
    oo__event_give(engine, unit->ready);
    unit->ready = NULL;
    unit->n_uses = unit->n_waited = 0;
    unit->stale = unit->leaving = 0;
    unit->generation++;
}

void oo__rows_forget(struct oo_engine *engine, struct oo_unit *unit) {
    while (unit->n_begun)
        oo__event_give(engine, unit->begun[--unit->n_begun].event);
}

enum oo_status oo__drop(struct oo_engine *engine, uint32_t id) {
    if (!oo_plan_resident(engine->plan, id))
        return OO_OK;
    if (engine->usable) {
        enum oo_status status = oo__order_after_uses(engine, &engine->units[id]);
        if (status != OO_OK)
            return status;
    }
    oo__forget_copy(engine, id);
    oo_plan_drop(engine->plan, id);
    return OO_OK;
}

/* What is on the device from now on is what these masters hold now. */
static void oo__note_masters(struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_members; i++) {
        struct oo_member *member = &engine->members[unit->members[i]];
        if (member->unit != id)
            continue; /* it moved out; its bytes here are of no use */
        member->stamp_known = 0;
        member->fingerprint = 0;
        for (uint32_t j = 0; j < member->n_tensors; j++)
            member->fingerprint =
                member->fingerprint * 31 +
                oo__fingerprint(member->tensors[j].host, member->tensors[j].bytes, engine->verify);
    }
}

static int oo__masters_changed(const struct oo_engine *engine, const struct oo_member *member) {
    uint64_t fingerprint = 0;
    for (uint32_t j = 0; j < member->n_tensors; j++)
        fingerprint = fingerprint * 31 + oo__fingerprint(member->tensors[j].host,
                                                         member->tensors[j].bytes, engine->verify);
    return fingerprint != member->fingerprint;
}

static enum oo_status oo__copy_parts(struct oo_engine *engine, const struct oo_unit *unit,
                                     uintptr_t address) {
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        const struct oo_part *part = &unit->parts[i];
        const int locked = part->memory && part->memory->locked;
        enum oo_status status =
            locked ? OO_DRIVE(engine, cuMemcpyHtoDAsync, address + part->offset, part->host,
                              part->bytes, engine->h2d)
                   : oo__ring_upload(engine, address + part->offset, part->host, part->bytes);
        if (status != OO_OK)
            return status;
        struct oo_stats *stats = &engine->models[unit->model].stats;
        stats->h2d_bytes += part->bytes;
        stats->h2d_copies++;
    }
    return OO_OK;
}

/* Bring a unit in over the window's occupants. Fails with the unit absent; what was evicted by then
 * stays evicted, which costs a copy and nothing else. */
static enum oo_status oo__copy_in(struct oo_engine *engine, uint32_t id,
                                  const struct oo_window *window) {
    enum oo_status status = OO_OK;
    struct oo_event *begin = NULL, *ready = NULL;
    struct oo_unit *unit = &engine->units[id];
    OO_TRY(oo__event_take(engine, &begin));
    OO_TRY(oo__event_take(engine, &ready));
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT)
            OO_TRY(oo__order_after_uses(engine, &engine->units[block->unit]));
        if (block == window->last)
            break;
    }
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT) {
            engine->models[engine->units[block->unit].model].stats.evictions++;
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
    /* A copy that failed half-way leaves bytes in flight on the h2d stream only: dropping the unit
     * keeps the promise of free bytes. */
    status = OO_DRIVE(engine, cuEventRecord, begin->handle, engine->h2d);
    if (status == OO_OK)
        status = oo__copy_parts(engine, unit, address);
    if (status == OO_OK)
        status = OO_DRIVE(engine, cuEventRecord, ready->handle, engine->h2d);
    if (status != OO_OK) {
        oo_plan_drop(engine->plan, id);
        goto done;
    }
    unit->ready = oo__event_share(ready);
    unit->generation++;
    oo__note_masters(engine, id);
    oo__span_add(engine, OO_TRACE_H2D, id, unit->model, unit->host_bytes, begin, ready);
done:
    oo__event_give(engine, begin);
    oo__event_give(engine, ready);
    return status;
}

/* Trainable units are fetched ahead only while nobody is expected to rewrite them. */
static void oo__set_held(struct oo_engine *engine, int held) {
    if (engine->held == held)
        return;
    engine->held = held;
    for (uint32_t i = 0; i < engine->n_units; i++)
        oo_plan_allow(engine->plan, i, oo__may_fetch_ahead(engine, &engine->units[i]));
}

/* ---- acquire ---- */

/* A sweep is one pass over the units: forward and backward are two. The first hit of a member in a
 * sweep checks its fingerprint, since no version counter sees every write. */
static int oo__first_of_sweep(struct oo_engine *engine, struct oo_member *member, int64_t task) {
    const int in_task = task >= 0;
    if (in_task != engine->in_task ||
        (member->sweep == engine->sweep && (!in_task || member->task != task)))
        engine->sweep++;
    engine->in_task = in_task;
    const int first = member->sweep != engine->sweep;
    member->sweep = engine->sweep;
    member->task = task;
    return first;
}

/* H1: work queued on `stream` from now on comes after the copy's arrival. */
static enum oo_status oo__order_after_copy(struct oo_engine *engine, uint32_t id,
                                           OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_waited; i++)
        if (unit->waited[i] == stream)
            return OO_OK;
    enum oo_status status = OO_OK;
    struct oo_event *before = NULL, *after = NULL;
    if (unit->n_waited == 0) { /* measure what the first wait for this copy costs its stream */
        OO_TRY(oo__event_take(engine, &before));
        OO_TRY(oo__event_take(engine, &after));
        OO_TRY(OO_DRIVE(engine, cuEventRecord, before->handle, stream));
    }
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, stream, unit->ready->handle, 0));
    if (unit->n_waited < OO_STREAMS)
        unit->waited[unit->n_waited++] = stream;
    if (after) {
        OO_TRY(OO_DRIVE(engine, cuEventRecord, after->handle, stream));
        oo__span_add(engine, OO_TRACE_STALL, id, unit->model, 0, before, after);
    }
done:
    oo__event_give(engine, before);
    oo__event_give(engine, after);
    return status;
}

/* A row of the timeline; of more uses at a time than there is room for, some have none. */
static enum oo_status oo__row_begin(struct oo_engine *engine, struct oo_unit *unit,
                                    OOCUstream stream) {
    struct oo_event *begin;
    if (!engine->spans.tracing || unit->n_begun == OO_STREAMS)
        return OO_OK;
    enum oo_status status = oo__event_take(engine, &begin);
    if (status != OO_OK)
        return status;
    status = OO_DRIVE(engine, cuEventRecord, begin->handle, stream);
    if (status == OO_OK)
        unit->begun[unit->n_begun++] = (struct oo_begun){stream, begin};
    else
        oo__event_give(engine, begin);
    return status;
}

/* The span has an end of its own: the mark that H2 waits for is recorded anew by the next use. */
static void oo__row_end(struct oo_engine *engine, uint32_t id, OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    struct oo_event *end;
    uint32_t i = 0;
    while (i < unit->n_begun && unit->begun[i].stream != stream)
        i++;
    if (i == unit->n_begun)
        return;
    struct oo_event *begin = unit->begun[i].event;
    unit->n_begun--;
    memmove(&unit->begun[i], &unit->begun[i + 1], (unit->n_begun - i) * sizeof unit->begun[0]);
    if (engine->usable && oo__event_take(engine, &end) == OO_OK) {
        if (OO_DRIVE(engine, cuEventRecord, end->handle, stream) == OO_OK)
            oo__span_add(engine, OO_TRACE_COMPUTE, id, unit->model, 0, begin, end);
        oo__event_give(engine, end);
    }
    oo__event_give(engine, begin);
}

static enum oo_status oo__refuse_capture(struct oo_engine *engine, OOCUstream stream) {
    int capturing = OOCU_STREAM_CAPTURE_STATUS_NONE;
    enum oo_status status = OO_DRIVE(engine, cuStreamIsCapturing, stream, &capturing);
    if (status != OO_OK)
        return status;
    return capturing == OOCU_STREAM_CAPTURE_STATUS_NONE
               ? OO_OK
               : oo__fail(OO_E_CAPTURE, "offloaded layers cannot be captured into a CUDA graph: "
                                        "their addresses change; exclude them with ignore_modules "
                                        "or do not capture");
}

/* Bytes behind the ring may have to wait for it on the host. */
static int oo__may_block(const struct oo_unit *unit) {
    for (uint32_t i = 0; i < unit->n_parts; i++)
        if (!unit->parts[i].memory || !unit->parts[i].memory->locked)
            return 1;
    return 0;
}

static void oo__note_fetched(struct oo_fetched *fetched, uint32_t id) {
    fetched->units[fetched->count++] = id;
}

/* The caller learns of copies only from a call that succeeds, and so can stamp only then. */
static void oo__distrust(struct oo_engine *engine, const struct oo_fetched *fetched) {
    for (uint32_t i = 0; i < fetched->count; i++)
        engine->units[fetched->units[i]].stale = 1;
}

/* The unit's copy is out of date, and in use: it is replaced when its uses have ended. OO_OK: one
 * may have, and the call begins anew. Who holds a use itself would wait for itself, or for a thread
 * that waits for it. */
static enum oo_status oo__await_uses(struct oo_engine *engine, uint32_t id, int flags,
                                     double *until_s) {
    const double now_s = oo__clock_s();
    if (*until_s == 0)
        *until_s = now_s + engine->patience_s;
    if (oo__uses_here || now_s >= *until_s)
        return oo__fail(
            OO_E_STATE,
            "the weights of unit %u were rewritten while another call computes with them", id);
    if (flags & OO_NONBLOCKING)
        return OO_WOULD_BLOCK;
    oo__context_leave(engine);
    oo__mutex_wait(engine->mutex, *until_s);
    return OO_OK;
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
    enum oo_status status = oo__copy_in(engine, id, &window);
    if (status == OO_OK) {
        engine->models[engine->units[id].model].stats.late++;
        oo__note_fetched(fetched, id);
    }
    return status;
}

enum oo_status oo_engine_acquire(struct oo_engine *engine, uint32_t member_id,
                                 uintptr_t stream_handle, uint64_t stamp, enum oo_kind kind,
                                 int64_t task, int flags, struct oo_use *use) {
    const OOCUstream stream = (OOCUstream)stream_handle;
    enum oo_status status;
    double until_s = 0;
again:
    status = oo__enter(engine, flags);
    if (status != OO_OK)
        return status;
    use->fetched.count = 0;
    use->fetched.more = 0;
    if (member_id >= engine->n_members || engine->members[member_id].removed) {
        status = oo__fail(OO_E_STATE, "member %u is not attached (any more)", member_id);
        goto done;
    }
    OO_TRY(oo__refuse_capture(engine, stream));
    struct oo_member *member = &engine->members[member_id];
    const uint32_t id = member->unit;
    struct oo_unit *unit = &engine->units[id];
    if ((flags & OO_NONBLOCKING) && oo__may_block(unit)) {
        status = OO_WOULD_BLOCK;
        goto done;
    }
    if (kind == OO_FORWARD) /* the next forward may begin without an optimizer step */
        oo__set_held(engine, 0);
    const int first = oo__first_of_sweep(engine, member, task);
    struct oo_stats *stats = &engine->models[unit->model].stats;
    int resident = oo_plan_resident(engine->plan, id) != NULL;
    if (resident && ((member->stamp_known && member->stamp != stamp) ||
                     ((first || engine->verify) && oo__masters_changed(engine, member))))
        unit->stale = 1;
    if (unit->stale && oo_plan_pins(engine->plan, id)) {
        OO_TRY(oo__await_uses(engine, id, flags, &until_s));
        oo__leave(engine);
        goto again;
    }
    oo_plan_visit(engine->plan, id, kind);
    stats->acquires++;
    if (unit->stale) {
        stats->stale++;
        OO_TRY(oo__drop(engine, id));
        resident = 0;
    }
    if (resident)
        stats->hits++;
    else
        OO_TRY(oo__acquire_late(engine, id, &use->fetched));
    member->stamp = stamp;
    member->stamp_known = 1;
    OO_TRY(oo__order_after_copy(engine, id, stream));
    OO_TRY(oo__row_begin(engine, unit, stream));
    oo_plan_pin(engine->plan, id);
    oo__uses_here++;
    use->ticket = (uint64_t)unit->generation << 32 | id;
    use->address = oo_block_address(oo_plan_resident(engine->plan, id));
done:
    if (status != OO_OK)
        oo__distrust(engine, &use->fetched);
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_launch(struct oo_engine *engine, uint32_t member_id, uintptr_t stream,
                                double seconds) {
    if (!engine->driver.simLaunch)
        return OO_OK;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_member *member =
        member_id < engine->n_members ? &engine->members[member_id] : NULL;
    if (!member || !oo_plan_pins(engine->plan, member->unit)) { /* a removed one's has none */
        status = oo__fail(OO_E_STATE, "member %u is launched without being acquired", member_id);
        goto done;
    }
    const uintptr_t address = oo_block_address(oo_plan_resident(engine->plan, member->unit));
    const struct oo_member_tensor *last = &member->tensors[member->n_tensors - 1];
    const OOSimRange read = {address + member->tensors[0].offset,
                             last->offset + last->bytes - member->tensors[0].offset};
    status = OO_DRIVE(engine, simLaunch, (OOCUstream)stream, &read, 1, NULL, 0, seconds);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_acquire_launched(struct oo_engine *engine, uint32_t member,
                                          uintptr_t stream, uint64_t stamp, enum oo_kind kind,
                                          int64_t task, double seconds, int flags,
                                          struct oo_use *use) {
    enum oo_status status =
        oo_engine_acquire(engine, member, stream, stamp, kind, task, flags, use);
    if (status == OO_OK)
        status = oo_engine_launch(engine, member, stream, seconds);
    else
        return status;
    if (status == OO_OK)
        return OO_OK;
    const struct oo_error first = oo__error_save();
    struct oo_fetched ahead = {0};
    (void)oo_engine_release(engine, use->ticket, stream, 0, &ahead);
    oo__mutex_lock(engine->mutex);
    oo__distrust(engine, &use->fetched);
    oo__distrust(engine, &ahead);
    oo__mutex_unlock(engine->mutex);
    oo__error_restore(&first);
    return status;
}

/* A copy that is never stamped is checked by samples alone: no fault of the driver shall prevent
 * it.
 */
enum oo_status oo_engine_stamp(struct oo_engine *engine, const struct oo_stamp *stamps,
                               uint32_t count) {
    enum oo_status status = oo__enter(engine, OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t id = stamps[i].member;
        if (id < engine->n_members && !engine->members[id].removed) {
            engine->members[id].stamp = stamps[i].stamp;
            engine->members[id].stamp_known = 1;
        } else {
            status = oo__fail(OO_E_STATE, "member %u is not attached (any more)", id);
        }
    }
    oo__leave(engine);
    return status;
}

/* ---- release and prefetch ---- */

/* The entry of `stream` among the unit's last uses; NULL when there is no room for one. When more
 * streams than entries use the unit, the oldest use is ordered before the h2d stream at once, which
 * is all that an eviction would do (H2). */
static struct oo_last_use *oo__use_entry(struct oo_engine *engine, struct oo_unit *unit,
                                         OOCUstream stream) {
    struct oo_last_use *entry = NULL;
    for (uint32_t i = 0; i < unit->n_uses; i++)
        if (unit->uses[i].stream == stream)
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
        (void)oo__event_take(engine, &entry->event);
    return entry;
}

/* The mark that H2 waits for. Where it cannot be set, the use counts as lost: only a synchronise
 * can tell when it ends, and whoever overwrites the bytes will do that. */
static enum oo_status oo__mark_use(struct oo_engine *engine, struct oo_unit *unit,
                                   OOCUstream stream) {
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

/* Start copies by next use until nothing more is worth its place. A prefetch that fails is given
 * up: the unit is copied when it is asked for, and the failure surfaces there if it lasts. */
static void oo__prefetch(struct oo_engine *engine, int flags, struct oo_fetched *fetched) {
    uint32_t id;
    struct oo_window window;
    while (engine->usable && oo_plan_next_fetch(engine->plan, &id, &window)) {
        if (fetched->count == OO_MAX_FETCHED ||
            ((flags & OO_NONBLOCKING) && oo__may_block(&engine->units[id]))) {
            fetched->more = 1;
            return;
        }
        struct oo_stats *stats = &engine->models[engine->units[id].model].stats;
        if (oo__copy_in(engine, id, &window) != OO_OK) {
            stats->prefetch_failures++;
            return;
        }
        stats->prefetches++;
        oo__note_fetched(fetched, id);
    }
}

enum oo_status oo_engine_release(struct oo_engine *engine, uint64_t ticket, uintptr_t stream_handle,
                                 int flags, struct oo_fetched *fetched) {
    const OOCUstream stream = (OOCUstream)stream_handle;
    const uint32_t id = (uint32_t)ticket;
    /* Whatever befell the driver, the unit is in use no more: else nothing could ever detach. */
    enum oo_status status = oo__enter(engine, flags | OO__EVEN_DEAD | OO__EVEN_WITHOUT_CONTEXT);
    if (status != OO_OK)
        return status;
    fetched->count = 0;
    fetched->more = 0;
    if (id >= engine->n_units || engine->units[id].generation != (uint32_t)(ticket >> 32) ||
        !oo_plan_pins(engine->plan, id)) {
        status = oo__fail(
            OO_E_TICKET,
            "ticket %016llx of unit %u is not in use: released twice, or of an earlier copy",
            (unsigned long long)ticket, id);
        goto done;
    }
    struct oo_unit *unit = &engine->units[id];
    OO_TRY(oo__mark_use(engine, unit, stream));
    oo_plan_unpin(engine->plan, id);
    oo__uses_here -= oo__uses_here > 0; /* another thread may have begun it */
    oo__row_end(engine, id, stream);
    if (!oo_plan_pins(engine->plan, id)) {
        oo__rows_forget(engine, unit); /* of uses that ended on another stream */
        oo__mutex_wake(engine->mutex);
    }
    /* Without a context its uses cannot be ordered before the copy that takes its place. */
    if (unit->leaving && !oo_plan_pins(engine->plan, id) &&
        (!engine->usable || oo__drop(engine, id) != OO_OK))
        unit->stale = 1; /* it stays, and is not to be trusted */
    oo__prefetch(engine, flags, fetched);
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

/* ---- gradients ---- */

/* While a fault lasts not even waiting works: what a failed download left queued is waited for by
 * the next one, or at the end. */
enum oo_status oo__finish_download(struct oo_engine *engine) {
    enum oo_status status = OO_OK;
    if (!engine->unfinished)
        return OO_OK;
    if (engine->usable) /* a lost context has nothing in flight */
        OO_TRY(oo__synchronize(engine, engine->d2h, 1));
    OO_TRY(OO_DRIVE(engine, simDrop, engine->unfinished));
    engine->unfinished = 0;
done:
    return status;
}

enum oo_status oo_engine_download(struct oo_engine *engine, void *target, uintptr_t source,
                                  size_t bytes, uintptr_t stream_handle) {
    const OOCUstream stream = (OOCUstream)stream_handle;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_host *memory = oo__known_memory(engine, target, bytes);
    struct oo_event *computed = NULL, *begin = NULL, *arrived = NULL;
    int adopted = 0, in_flight = 0;
    if (bytes == 0)
        goto done;
    if (!target || bytes > UINTPTR_MAX - (uintptr_t)target || bytes > UINTPTR_MAX - source) {
        status = oo__fail(OO_E_ARGUMENT, "there are no %zu bytes at %p to download to, or at %#zx",
                          bytes, target, (size_t)source);
        goto done;
    }
    OO_TRY(oo__event_take(engine, &computed));
    OO_TRY(oo__event_take(engine, &begin));
    OO_TRY(oo__event_take(engine, &arrived));
    OO_TRY(oo__finish_download(engine));
    if (engine->driver.simAdopt) {
        /* To the simulated device a tensor of torch's CPU is device memory while it is copied. */
        OO_TRY(OO_DRIVE(engine, simAdopt, source, bytes, OOSIM_ADOPT_KEEP, stream));
        adopted = 1;
        oo__label(engine, (const void *)source, bytes, "gradient", OO_NO_UNIT);
    }
    /* H6: the copy starts after the work that computes the gradient. */
    OO_TRY(OO_DRIVE(engine, cuEventRecord, computed->handle, stream));
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, computed->handle, 0));
    OO_TRY(OO_DRIVE(engine, cuEventRecord, begin->handle, engine->d2h));
    if (memory && memory->locked)
        OO_TRY(OO_DRIVE(engine, cuMemcpyDtoHAsync, target, source, bytes, engine->d2h));
    else
        OO_TRY(oo__ring_download(engine, target, source, bytes));
    OO_TRY(OO_DRIVE(engine, cuEventRecord, arrived->handle, engine->d2h));
    engine->stats.d2h_bytes += bytes;
    engine->stats.d2h_copies++;
    engine->stats.host_waits++;
    /* The caller shows the bytes to autograd, which reads them at once. */
    OO_TRY(OO_DRIVE(engine, cuEventSynchronize, arrived->handle));
    OO_TRY(oo__host_access(engine, target, bytes, 0));
    oo__span_add(engine, OO_TRACE_D2H, OO_NO_UNIT, 0, bytes, begin, arrived);
done:
    if (status != OO_OK && engine->usable && computed) {
        /* The source goes back to torch: no copy from it may stay queued. Keeps the message of what
         * failed first. */
        engine->stats.host_waits++;
        engine->stats.recoveries++;
        in_flight = oo__note(engine, "cuStreamSynchronize",
                             engine->driver.cuStreamSynchronize(engine->d2h)) != OO_OK;
    }
    if (adopted && (in_flight || engine->driver.simDrop(source) != OOCU_SUCCESS))
        engine->unfinished = source;
    oo__event_give(engine, computed);
    oo__event_give(engine, begin);
    oo__event_give(engine, arrived);
    oo__leave(engine);
    return status;
}

/* ---- masters that change ---- */

enum oo_status oo_engine_hold(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    oo__set_held(engine, 1);
    for (uint32_t i = 0; i < engine->n_units; i++) {
        struct oo_unit *unit = &engine->units[i];
        if (!unit->trainable)
            continue;
        if (oo_plan_pins(engine->plan, i))
            unit->leaving = 1; /* another thread is still in its backward, with the same weights */
        else
            OO_TRY(oo__drop(engine, i));
    }
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_resume(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    oo__set_held(engine, 0);
    oo__leave(engine);
    return OO_OK;
}

/* What is in use is replaced at the next acquire, when its uses have ended. */
static enum oo_status oo__refresh(struct oo_engine *engine, uint32_t model) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        struct oo_unit *unit = &engine->units[i];
        if (model != OO_ALL_MODELS && unit->model != model)
            continue;
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

enum oo_status oo_engine_set_verify(struct oo_engine *engine, int on) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    /* Fingerprints of the other kind would not compare: start from fresh copies. */
    status = oo__refresh(engine, OO_ALL_MODELS);
    if (status == OO_OK)
        engine->verify = on != 0;
    oo__leave(engine);
    return status;
}

/* ---- create, destroy, ask ---- */

static enum oo_status oo__open_device(struct oo_engine *engine, int ordinal) {
    enum oo_status status;
    int count = 0;
    OO_TRY(OO_DRIVE(engine, cuDeviceGetCount, &count));
    if (ordinal < 0 || ordinal >= count)
        return oo__fail(OO_E_NO_DEVICE, "device %d was asked for; the driver has %d (0 to %d)",
                        ordinal, count, count - 1);
    OO_TRY(OO_DRIVE(engine, cuDeviceGet, &engine->device, ordinal));
    OO_TRY(OO_DRIVE(engine, cuDeviceGetName, engine->device_name, (int)sizeof engine->device_name,
                    engine->device));
    OO_TRY(OO_DRIVE(engine, cuDeviceGetPCIBusId, engine->pci_id, (int)sizeof engine->pci_id,
                    engine->device));
    OO_TRY(OO_DRIVE(engine, cuDevicePrimaryCtxRetain, &engine->context, engine->device));
done:
    return status;
}

/* On a dead engine only host records are freed: a lost context has taken the rest with it. */
static void oo__close_device(struct oo_engine *engine) {
    (void)oo__finish_download(engine); /* before the ring it may still be reading goes */
    oo__ring_free(engine, &engine->down);
    oo__ring_free(engine, &engine->up);
    oo__spans_free(engine);
    if (!engine->usable)
        return;
    oo__kernels_free(engine);
    /* Destroying a stream returns at once and drops none of its work. */
    if (engine->h2d)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->h2d);
    if (engine->d2h)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->d2h);
    if (engine->compute)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->compute);
}

static void oo__free_engine(struct oo_engine *engine) {
    oo__free_models(engine);
    oo_plan_destroy(engine->plan);
    oo__fork_guard_destroy(engine->guard);
    oo__mutex_destroy(engine->mutex);
    free(engine);
}

enum oo_status oo_engine_create(const char *library, int device, struct oo_engine **out) {
    *out = NULL;
    enum oo_status status;
    struct oo_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return oo__fail(OO_E_MEMORY, "no memory for an engine");
    engine->sweep = 1;
    engine->patience_s = oo__patience_s;
    engine->mutex = oo__mutex_create();
    engine->guard = oo__fork_guard_create();
    if (!engine->mutex || !engine->guard) {
        oo__free_engine(engine);
        return oo__fail(OO_E_MEMORY, "no memory for an engine");
    }
    OO_TRY(oo_plan_create(&engine->plan));
    OO_TRY(oo_driver_load(&engine->driver, library));
    OO_TRY(oo__open_device(engine, device));
    OO_TRY(oo__enter(engine, 0));
    int least = 0, greatest = 0;
    status = OO_DRIVE(engine, cuCtxGetStreamPriorityRange, &least, &greatest);
    /* Non-blocking: the default stream, on which torch computes, must not wait for our copies. */
    if (status == OO_OK)
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->h2d,
                          OOCU_STREAM_NON_BLOCKING, greatest);
    if (status == OO_OK)
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->d2h,
                          OOCU_STREAM_NON_BLOCKING, greatest);
    if (status == OO_OK) /* two of each span, and those that one call holds */
        status = oo__events_reserve(engine, 2 * OO_SPANS + 8);
    oo__label_stream(engine, engine->h2d, "h2d");
    oo__label_stream(engine, engine->d2h, "d2h");
    if (status != OO_OK)
        oo__close_device(engine);
    oo__leave(engine);
done:
    if (status != OO_OK) {
        if (engine->context)
            OO_GIVE_BACK(engine, cuDevicePrimaryCtxRelease, engine->device);
        if (engine->n_leaked)
            oo__append("; and %u driver objects could not be given back, the first: %s",
                       engine->n_leaked, engine->first_leak.message);
        oo__free_engine(engine);
        return status;
    }
    *out = engine;
    return OO_OK;
}

enum oo_status oo_engine_destroy(struct oo_engine *engine) {
    if (!engine)
        return OO_OK;
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    const int lost = engine->dead != OO_OK; /* and everything with it */
    uint32_t attached = 0;
    for (uint32_t i = 0; i < engine->n_models; i++)
        attached += !engine->models[i].removed;
    if (attached || engine->n_hosts)
        status = oo__fail(OO_E_STATE,
                          "the engine still has %u models and %u host buffers; detach them first",
                          attached, engine->n_hosts);
    else
        oo__close_device(engine);
    oo__leave(engine);
    if (status != OO_OK)
        return status;
    if (engine->usable)
        OO_GIVE_BACK(engine, cuDevicePrimaryCtxRelease, engine->device);
    if (engine->n_leaked && !lost) {
        const struct oo_error *leak = &engine->first_leak;
        status = oo__fail_driver(OO_LEAKED, leak->call, leak->code, leak->name,
                                 "%u driver objects could not be given back, the first: %s",
                                 engine->n_leaked, leak->message);
    } else if (engine->dead != OO_OK && !engine->death_told) {
        (void)oo__fail_dead(engine);
        status = OO_LEAKED;
    }
    oo__free_engine(engine);
    return status;
}

int oo_engine_simulated(const struct oo_engine *engine) { return engine->driver.simulated; }
int oo_engine_driver_version(const struct oo_engine *engine) { return engine->driver.version; }
const char *oo_engine_device_name(const struct oo_engine *engine) { return engine->device_name; }
const char *oo_engine_pci_id(const struct oo_engine *engine) { return engine->pci_id; }

enum oo_status oo_engine_compute_stream(struct oo_engine *engine, uintptr_t *stream) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (!engine->compute) {
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->compute,
                          OOCU_STREAM_NON_BLOCKING, 0);
        oo__label_stream(engine, engine->compute, "compute");
    }
    *stream = (uintptr_t)engine->compute;
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_mem_info(struct oo_engine *engine, size_t *free_bytes,
                                  size_t *total_bytes) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    status = OO_DRIVE(engine, cuMemGetInfo, free_bytes, total_bytes);
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_residents(struct oo_engine *engine, struct oo_resident *rows,
                                   size_t capacity, size_t *count) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    *count = 0;
    for (const struct oo_segment *segment = oo_plan_arena(engine->plan)->segments; segment;
         segment = segment->next) {
        for (const struct oo_block *block = segment->first; block; block = block->next) {
            if (block->unit == OO_NO_UNIT)
                continue;
            if (*count < capacity)
                rows[*count] =
                    (struct oo_resident){block->unit, oo_plan_pins(engine->plan, block->unit),
                                         oo_block_address(block), block->bytes};
            ++*count;
        }
    }
    oo__leave(engine);
    return OO_OK;
}
