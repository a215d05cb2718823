/* trip.c - bytes of torch's own that leave the device for a while, and come back.
 *
 * A trip is one copy, out to page-locked host memory or back from there. No thread of the host
 * waits for it: streams do, by the event that marks its arrival. Its device memory belongs to
 * torch's allocator, which hands freed bytes on in the order of the stream that they were allocated
 * on. So they are the caller's again once that stream waits for the copy (oo_trip_join), whether or
 * not the copy has run by then. */
#include "trip.h"
#include "call.h"
#include "copies.h"
#include "journal.h"
#include "masters.h"
#include "simulated.h"
#include "timing.h"

#include <stdlib.h>
#include <string.h>

enum { OO_FIRST_TRIPS = 64 };

/* ---- records ---- */

static struct oo_trip *oo__trip_of(struct oo_engine *engine, uint64_t ticket) {
    struct oo_trips *trips = &engine->trips;
    const uint32_t id = (uint32_t)ticket;
    if (id >= trips->count || !trips->all[id].arrived ||
        trips->all[id].generation != (uint32_t)(ticket >> 32)) {
        (void)oo__fail(OO_E_TICKET, "ticket %016llx is of no trip: it has ended",
                       (unsigned long long)ticket);
        return NULL;
    }
    return &trips->all[id];
}

/* A record that is free, at no address that lasts; its number is `id`. */
static enum oo_status oo__trip_take(struct oo_engine *engine, uint32_t *id) {
    struct oo_trips *trips = &engine->trips;
    if (trips->first_free == trips->count) {
        if (trips->count == trips->capacity) {
            const uint32_t capacity = trips->capacity ? 2 * trips->capacity : OO_FIRST_TRIPS;
            struct oo_trip *all = realloc(trips->all, capacity * sizeof *all);
            if (!all)
                return oo__fail(OO_E_MEMORY, "no memory for the record of a trip");
            engine->stats.allocations++;
            trips->all = all;
            trips->capacity = capacity;
        }
        trips->all[trips->count] = (struct oo_trip){.next_free = trips->count + 1};
        trips->count++;
    }
    *id = trips->first_free;
    return OO_OK;
}

int oo__device_has(const struct oo_engine *engine, uintptr_t address, size_t bytes) {
    for (uint32_t i = 0; i < engine->trips.count; i++) {
        const struct oo_trip *trip = &engine->trips.all[i];
        if (trip->lent && trip->lent <= address && address + bytes <= trip->lent + trip->lent_bytes)
            return 1;
    }
    const struct oo_segment *s = oo_plan_arena(engine->plan)->segments;
    while (s && !(s->base <= address && address + bytes <= s->base + s->bytes))
        s = s->next;
    return s != NULL;
}

/* The simulated device no longer has the bytes, unless another trip of some of them goes on. */
static enum oo_status oo__trip_disown(struct oo_engine *engine, struct oo_trip *trip) {
    if (!trip->lent)
        return OO_OK;
    for (uint32_t i = 0; i < engine->trips.count; i++) {
        struct oo_trip *other = &engine->trips.all[i];
        if (other != trip && !other->joined && trip->lent <= other->device &&
            other->device + other->bytes <= trip->lent + trip->lent_bytes) {
            other->lent = trip->lent;
            other->lent_bytes = trip->lent_bytes;
            trip->lent = 0;
            return OO_OK;
        }
    }
    const enum oo_status status = oo__check(engine, "simDrop", oo__disown(engine, trip->lent));
    if (status == OO_OK)
        trip->lent = 0;
    return status;
}

void oo__trips_close(struct oo_engine *engine) {
    struct oo_trips *trips = &engine->trips;
    for (uint32_t i = 0; i < trips->count; i++) {
        if (trips->all[i].lent)
            (void)oo__disown(engine, trips->all[i].lent);
        oo__event_give(engine, trips->all[i].arrived);
    }
    free(trips->all);
    *trips = (struct oo_trips){0};
}

/* While a fault lasts even waiting may fail. The next one, or the end of the engine, waits for
 * what a failed one left queued. */
enum oo_status oo__finish_download(struct oo_engine *engine) {
    enum oo_status status = OO_OK;
    if (!engine->unfinished && !engine->unwaited)
        return OO_OK;
    if (engine->usable) { /* a lost context has nothing in flight */
        OO_TRY(oo__synchronize(engine, engine->d2h, 1));
        if (engine->trips.count)
            OO_TRY(oo__synchronize(engine, engine->h2d, 1));
    }
    engine->unwaited = 0;
    if (engine->unfinished)
        OO_TRY(oo__check(engine, "simDrop", oo__disown(engine, engine->unfinished)));
    engine->unfinished = 0;
done:
    return status;
}

/* ---- a copy ---- */

/* What both ways share: `out` says which one it is. */
static enum oo_status oo__trip_begin(struct oo_engine *engine, struct oo_trip *trip,
                                     const struct oo_event *departed) {
    const int out = !trip->is_back;
    const enum oo_trace_kind kind = out ? OO_TRACE_D2H : OO_TRACE_H2D;
    const OOCUstream copies = out ? engine->d2h : engine->h2d;
    struct oo_event *before = NULL, *begin = NULL;
    enum oo_status status;
    OO_TRY(oo__refuse_capture(engine, trip->stream));
    OO_TRY(oo__finish_download(engine));
    OO_TRY(oo__event_take(engine, OO_ORDERS, &before));
    OO_TRY(oo__event_take(engine, OO_ORDERS, &trip->arrived));
    if (!oo__device_has(engine, trip->device, trip->bytes)) {
        OO_TRY(oo__adopt(engine, trip->device, trip->bytes,
                         OOSIM_ADOPT_KEEP | OOSIM_ADOPT_IN_STREAM, trip->stream));
        trip->lent = trip->device;
        trip->lent_bytes = trip->bytes;
        oo__label(engine, (const void *)trip->device, trip->bytes,
                  out ? "bytes that leave" : "bytes that come back", OO_NO_UNIT);
    }
    OO_TRY(OO_DRIVE(engine, cuEventRecord, before->handle, trip->stream));
    if (out)
        /* H6: the copy starts after the work that computes the bytes. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, before->handle, 0));
    else
        /* H3: the copy must not overtake work that an earlier owner of these bytes still has queued
         * on the stream that allocated them. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, before->handle, 0));
    if (departed)
        /* H15: the bytes may still be on their way to the host. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, departed->handle, 0));
    if (out || engine->spans.tracing) /* of what comes in, the plan measures units */
        OO_TRY(oo__span_begin(engine, kind, copies, &begin));
    trip->queued = 1;
    if (out)
        OO_TRY(OO_DRIVE(engine, cuMemcpyDtoHAsync, trip->host, trip->device, trip->bytes,
                        engine->d2h));
    else
        OO_TRY(OO_DRIVE(engine, cuMemcpyHtoDAsync, trip->device, trip->host, trip->bytes,
                        engine->h2d));
    OO_TRY(OO_DRIVE(engine, cuEventRecord, trip->arrived->handle, copies));
    status = oo__span_end(engine, kind, OO_NO_UNIT, trip->bytes, copies, &begin);
done:
    oo__event_give(engine, begin);
    oo__event_give(engine, before);
    return status;
}

/* Nothing of a trip that could not begin stays queued: its memory is the caller's. */
static void oo__trip_undo(struct oo_engine *engine, struct oo_trip *trip, int out) {
    int in_flight = 0;
    if (trip->queued && engine->usable) {
        engine->stats.host_waits++;
        engine->stats.recoveries++;
        /* H4: the device memory goes back to torch, so that no copy of it may stay queued. Keeps
         * the message of what failed first. */
        in_flight =
            oo__note(engine, "cuStreamSynchronize",
                     engine->driver.cuStreamSynchronize(out ? engine->d2h : engine->h2d)) != OO_OK;
        engine->unwaited |= in_flight != 0; /* also of bytes that another trip has lent */
    }
    if (trip->lent && (in_flight || oo__disown(engine, trip->lent) != OOCU_SUCCESS))
        engine->unfinished = trip->lent;
    oo__event_give(engine, trip->arrived);
}

static enum oo_status oo__trip(struct oo_engine *engine, struct oo_trip *trip,
                               const struct oo_event *departed, uint64_t *ticket) {
    uint32_t id = 0; /* the compiler does not see that oo__trip_take sets it */
    enum oo_status status = oo__trip_take(engine, &id);
    if (status != OO_OK)
        return status;
    status = oo__trip_begin(engine, trip, departed);
    if (status != OO_OK) {
        oo__trip_undo(engine, trip, !trip->is_back);
        return status;
    }
    struct oo_trips *trips = &engine->trips;
    trip->generation = trips->all[id].generation + 1;
    trips->first_free = trips->all[id].next_free;
    trips->all[id] = *trip;
    *ticket = (uint64_t)trip->generation << 32 | id;
    return OO_OK;
}

static enum oo_status oo__trip_check(const struct oo_engine *engine, const void *host,
                                     uintptr_t device, size_t bytes) {
    if (!bytes || bytes > UINTPTR_MAX - (uintptr_t)host || bytes > UINTPTR_MAX - device)
        return oo__fail(OO_E_ARGUMENT, "there are no %zu bytes at %p, or at %#zx", bytes, host,
                        (size_t)device);
    if (!oo__is_locked(oo__known_memory(engine, host, bytes), host, bytes))
        return oo__fail(OO_E_STATE,
                        "the %zu bytes at %p are not page-locked: a copy would wait for the host",
                        bytes, host);
    return OO_OK;
}

/* Count bytes that leave: those that go home to stay, and those that are to come back. */
static void oo__count_out(struct oo_stats *stats, size_t bytes, int home) {
    *(home ? &stats->d2h_bytes : &stats->left_bytes) += bytes;
    ++*(home ? &stats->d2h_copies : &stats->left_copies);
}

static enum oo_status oo__trip_to_host(struct oo_engine *engine, void *target, uintptr_t source,
                                       size_t bytes, uintptr_t stream, int home, uint64_t *ticket) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_trip trip = {.host = target,
                           .device = source,
                           .bytes = bytes,
                           .stream = (OOCUstream)stream,
                           .awaited = oo__awaited_by(engine, (OOCUstream)stream)};
    OO_TRY(oo__trip_check(engine, target, source, bytes));
    OO_TRY(oo__trip(engine, &trip, NULL, ticket));
    oo__count_out(&engine->stats, bytes, home);
    oo__journal(engine, OO_DEED_COPY_OUT, OO_NO_UNIT, bytes, 0);
    oo__flush_home(engine);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_trip_out(struct oo_engine *engine, void *target, uintptr_t source, size_t bytes,
                           uintptr_t stream, uint64_t *ticket) {
    return oo__trip_to_host(engine, target, source, bytes, stream, 0, ticket);
}

enum oo_status oo_trip_home(struct oo_engine *engine, void *target, uintptr_t source, size_t bytes,
                            uintptr_t stream, uint64_t *ticket) {
    return oo__trip_to_host(engine, target, source, bytes, stream, 1, ticket);
}

static enum oo_status oo__trip_to_device(struct oo_engine *engine, const struct oo_trip *left,
                                         void *host, size_t bytes, uintptr_t target,
                                         uintptr_t stream, uint64_t *ticket) {
    enum oo_status status;
    struct oo_trip trip = {
        .host = host, .device = target, .bytes = bytes, .stream = (OOCUstream)stream, .is_back = 1};
    OO_TRY(oo__trip_check(engine, host, target, bytes));
    OO_TRY(oo__trip(engine, &trip, left ? left->arrived : NULL, ticket));
    engine->copies.sent++;
    *(left ? &engine->stats.returned_bytes : &engine->stats.brought_bytes) += bytes;
    ++*(left ? &engine->stats.returned_copies : &engine->stats.brought_copies);
    oo__journal(engine, OO_DEED_COPY_IN, OO_NO_UNIT, bytes, target);
    oo__flush(engine);
done:
    return status;
}

enum oo_status oo_trip_in(struct oo_engine *engine, uintptr_t target, const void *source,
                          size_t bytes, uintptr_t stream, uint64_t *ticket) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    status =
        oo__trip_to_device(engine, NULL, (void *)(uintptr_t)source, bytes, target, stream, ticket);
    oo__leave(engine);
    return status;
}

enum oo_status oo_trip_back(struct oo_engine *engine, uint64_t out, uintptr_t target,
                            uintptr_t stream, uint64_t *ticket) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_trip *left = oo__trip_of(engine, out);
    if (!left)
        status = OO_E_TICKET;
    else if (left->is_back)
        status = oo__fail(OO_E_ARGUMENT, "that trip is one back itself");
    else
        status = oo__trip_to_device(engine, left, left->host, left->bytes, target, stream, ticket);
    if (status == OO_OK) { /* at another address by now, perhaps: there is one trip more */
        engine->trips.all[(uint32_t)out].backs++;
        engine->trips.all[(uint32_t)*ticket].left = out;
    }
    oo__leave(engine);
    return status;
}

/* ---- afterwards ---- */

static enum oo_status oo__trip_join(struct oo_engine *engine, struct oo_trip *trip,
                                    OOCUstream stream) {
    enum oo_status status;
    if (trip->is_back)
        /* H1: a kernel that is queued next reads what comes back. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, stream, trip->arrived->handle, 0));
    if (!trip->is_back || stream != trip->stream)
        /* H4: the allocator hands the bytes on, in the order of its stream, while a copy still
         * reads them, or writes to them. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, trip->stream, trip->arrived->handle, 0));
    OO_TRY(oo__trip_disown(engine, trip));
    trip->joined = 1;
done:
    return status;
}

enum oo_status oo_trip_join(struct oo_engine *engine, uint64_t ticket, uintptr_t stream) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_trip *trip = oo__trip_of(engine, ticket);
    status = trip ? oo__trip_join(engine, trip, (OOCUstream)stream) : OO_E_TICKET;
    oo__leave(engine);
    return status;
}

enum oo_status oo_trip_arrived(struct oo_engine *engine, uint64_t ticket, int *arrived) {
    *arrived = 0;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_trip *trip = oo__trip_of(engine, ticket);
    if (!trip) {
        status = OO_E_TICKET;
        goto done;
    }
    const OOCUresult result = engine->driver.cuEventQuery(trip->arrived->handle);
    *arrived = result == OOCU_SUCCESS;
    if (result != OOCU_ERROR_NOT_READY)
        status = oo__check(engine, "cuEventQuery", result);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_trip_await(struct oo_engine *engine, uint64_t ticket) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_trip *trip = oo__trip_of(engine, ticket);
    if (!trip) {
        status = OO_E_TICKET;
        goto done;
    }
    /* H8: the caller reads the bytes; or after a trip back, rewrites those that it has read. */
    OO_TRY(oo__event_await(engine, trip->arrived));
    oo__note_ended(engine, trip->awaited); /* copies that came before what has arrived */
    OO_TRY(oo__host_access(engine, trip->host, trip->bytes, trip->is_back));
done:
    oo__leave(engine);
    return status;
}

/* Trips out that are queued from now on may go to the host memory of `trip`. */
static enum oo_status oo__trip_free_host(struct oo_engine *engine, const struct oo_trip *trip,
                                         uint64_t ticket) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; trip->backs && i < engine->trips.count; i++) {
        const struct oo_trip *back = &engine->trips.all[i];
        if (back->left == ticket)
            /* H16: as below, of copies back that outlive the trip out. */
            OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, back->arrived->handle, 0));
    }
    if (trip->is_back)
        /* H16: the next bytes that leave may go to the same host memory. */
        OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, trip->arrived->handle, 0));
done:
    return status;
}

enum oo_status oo_trip_end(struct oo_engine *engine, uint64_t ticket) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    struct oo_trip *trip = oo__trip_of(engine, ticket);
    if (!trip) {
        status = OO_E_TICKET;
        goto done;
    }
    if (engine->usable && !trip->joined)
        OO_TRY(oo__trip_join(engine, trip, trip->stream));
    if (engine->usable)
        OO_TRY(oo__trip_free_host(engine, trip, ticket));
    if (trip->lent) /* a lost context has taken what was queued */
        (void)oo__disown(engine, trip->lent);
    if (trip->left) { /* its trip out may have ended before */
        struct oo_trip *left = &engine->trips.all[(uint32_t)trip->left];
        left->backs -= left->generation == (uint32_t)(trip->left >> 32) && left->backs;
    }
    oo__event_give(engine, trip->arrived);
    *trip = (struct oo_trip){.generation = trip->generation, .next_free = engine->trips.first_free};
    engine->trips.first_free = (uint32_t)ticket;
done:
    oo__leave(engine);
    return status;
}
