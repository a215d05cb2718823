/* feed.c - threads of the engine's own bring what is not locked to the device, so that the thread
 * that trains need not.
 *
 * The copy of a unit whose masters the device cannot read directly is queued as a feed. The copy
 * threads take pieces of the first feed in turn: each waits for a piece of the ring, copies masters
 * into it, and queues the copy to the device on the h2d stream. The thread that ends the last piece
 * records the unit's event. Where no byte can be locked for a ring, a part is copied as it is, by
 * one of them.
 *
 * The feeder's mutex protects the queue, the feeds from their begin to their end, and which pieces
 * of the ring are taken. It is taken after the engine's; a copy thread never takes that one, nor
 * touches what it protects. So a thread that holds the engine's mutex may wait for the copy
 * threads. */
#include "feed.h"
#include "../base/os.h"
#include "copies.h"
#include "disk.h"
#include "ring.h"
#include "simulated.h"
#include "staging.h"
#include "timing.h"

#include <stdlib.h>
#include <string.h>

static const struct oo_part_times oo__untimed = {NULL, NULL, NULL, NULL};
static const double oo__idle_s = 3600; /* a thread that waits is woken; a clock needs an end */

/* ---- the queue: under the feeder's mutex ---- */

static void oo__queue_take_out(struct oo_feeder *feeder, struct oo_feed *feed) {
    struct oo_feed **link = &feeder->first;
    while (*link && *link != feed)
        link = &(*link)->next;
    if (*link)
        *link = feed->next;
    feed->queued = 0;
}

/* What is near goes in front of what is read, which may be much and needed later. */
static void oo__queue_put(struct oo_feeder *feeder, struct oo_feed *feed, int urgent) {
    struct oo_feed **link = &feeder->first;
    while (!urgent && *link && !(feed->is_near && !(*link)->is_near))
        link = &(*link)->next;
    feed->next = *link;
    *link = feed;
    feed->queued = 1;
    feeder->n_running++;
}

/* Then one thread does all of the part: what decodes it comes after all of its bytes. */
static int oo__is_decoded(const struct oo_part *part) {
    return part->header.mode == OO_CODEC_TIERS;
}

/* The feed to go on with; NULL: none. One that is measured runs alone among its kind, near or not,
 * so that its time is its own, and no later one begins before it: those of the other kind wait for
 * another thing, the link or a disk. Few threads at a time copy what is near, so that the others go
 * on reading. None begins a chunk that staging memory has no piece for: it would only wait. One
 * that is passed over for either may be overtaken. */
static struct oo_feed *oo__queue_next(const struct oo_engine *engine) {
    const struct oo_feeder *feeder = &engine->feeder;
    int passed[2] = {0, 0};
    for (struct oo_feed *feed = feeder->first; feed; feed = feed->next) {
        const int kind = feed->is_near;
        const int may_begin =
            !passed[kind] && !feeder->measures[kind] && (!feed->begin || !feeder->n_begun[kind]);
        const struct oo_part *part = &feed->parts[feed->part];
        if (feed->is_near && feeder->n_near >= OO_NEAR_THREADS)
            continue;
        if (oo__is_decoded(part) && !oo__piece_is_free(&engine->decoder, part->bytes))
            continue;
        if (feed->begun || may_begin)
            return feed;
        passed[kind] = 1;
    }
    return NULL;
}

/* ---- copy threads ---- */

/* What is copied in one go. */
struct oo_piece {
    const struct oo_part *part;
    const char *host;
    uintptr_t target;
    size_t bytes;
    int locked;
    int staged; /* by way of the ring's piece `slot` */
    int begins; /* a part of the unit */
    unsigned slot;
    struct oo_staging_piece *room; /* of a chunk: all of it is copied there, and decoded */
};

/* What a piece took. */
struct oo_costs {
    uint64_t waits, recoveries; /* for the device; of those, how many a failure made necessary */
    uint64_t disk_bytes, disk_nanoseconds;
    uint64_t locked_bytes; /* that the device reads where they are kept */
};

/* There are no more threads than pieces of the ring, and each takes one at a time. */
static unsigned oo__take_slot(struct oo_ring *ring) {
    while (ring->taken[ring->next % OO_RING_PIECES])
        ring->next++;
    const unsigned slot = ring->next++ % OO_RING_PIECES;
    ring->taken[slot] = 1;
    return slot;
}

/* The most bytes of a piece: a ring's, or what is read from a file in one go, of whole pages. */
static size_t oo__most_of(const struct oo_ring *ring, const struct oo_piece *piece) {
    const int is_read = oo__disk_of(piece->part) != NULL;
    const size_t room = piece->staged ? ring->piece_bytes : oo__ring_piece_bytes;
    if (!piece->staged && !is_read)
        return SIZE_MAX;
    return is_read ? room - oo__disk_skew(piece->host) : room;
}

/* The feed's next piece; with the last one it leaves the queue. Under the mutex. */
static struct oo_piece oo__take_piece(struct oo_engine *engine, struct oo_feed *feed) {
    struct oo_ring *ring = &engine->up;
    const struct oo_part *part = &feed->parts[feed->part];
    struct oo_piece piece = {.part = part,
                             .host = part->host + feed->offset,
                             .target = feed->address + part->offset + feed->offset,
                             .bytes = part->bytes - feed->offset,
                             .locked = part->locked,
                             .staged = !part->locked && ring->base && !oo__is_decoded(part),
                             .begins = feed->offset == 0};
    if (piece.staged)
        piece.slot = oo__take_slot(ring);
    if (oo__is_decoded(part))
        piece.room = oo__piece_next(&engine->decoder, part->bytes);
    const size_t most = piece.room ? SIZE_MAX : oo__most_of(ring, &piece);
    if (piece.bytes > most)
        piece.bytes = most;
    feed->offset += piece.bytes;
    if (feed->offset == part->bytes) {
        feed->offset = 0;
        if (++feed->part == feed->n_parts)
            oo__queue_take_out(&engine->feeder, feed);
    }
    return piece;
}

/* Wait until the ring's piece may be written. */
static int oo__slot_wait(struct oo_engine *engine, unsigned slot, struct oo_failure *failure,
                         struct oo_costs *costs) {
    const struct oo_ring *ring = &engine->up;
    const OOCUevent busy = ring->busy[slot]->handle;
    /* H5: a queued copy may still read what this piece held. */
    if (!ring->lost[slot]) {
        const OOCUresult passed = oo__simulated_await(engine, ring->busy[slot]);
        if (passed != OOCU_ERROR_NOT_SUPPORTED)
            return oo__works(failure, "simAwait", passed);
        const OOCUresult ended = engine->driver.cuEventQuery(busy);
        if (ended != OOCU_ERROR_NOT_READY)
            return oo__works(failure, "cuEventQuery", ended);
        costs->waits++;
        return oo__works(failure, "cuEventSynchronize", engine->driver.cuEventSynchronize(busy));
    }
    costs->waits++;
    costs->recoveries++;
    return oo__works(failure, "cuStreamSynchronize",
                     engine->driver.cuStreamSynchronize(engine->h2d));
}

/* Bring the piece's bytes into `room`: from the file where they are in one, else from memory.
 * Returns where they are there; NULL: `failure`. */
static const char *oo__piece_bring(const struct oo_engine *engine, const struct oo_piece *piece,
                                   char *room, struct oo_failure *failure, struct oo_costs *costs) {
    int is_read = 0;
    if (!oo__disk_of(piece->part)) {
        memcpy(room, piece->host, piece->bytes);
        return room;
    }
    const uint64_t begin = oo__nanoseconds();
    const char *bytes =
        oo__disk_bring(engine, piece->part, piece->host, piece->bytes, room, failure, &is_read);
    if (is_read) {
        costs->disk_nanoseconds += oo__nanoseconds() - begin;
        costs->disk_bytes += bytes ? piece->bytes : 0;
    }
    if (bytes != room && !is_read) /* of what failed nothing is counted */
        costs->locked_bytes += piece->bytes;
    return bytes;
}

static int oo__copy_staged(struct oo_engine *engine, const struct oo_piece *piece,
                           struct oo_failure *failure, struct oo_costs *costs) {
    struct oo_ring *ring = &engine->up;
    const unsigned slot = piece->slot;
    char *staging = ring->base + slot * ring->piece_bytes;
    if (!oo__slot_wait(engine, slot, failure, costs) ||
        !oo__works(failure, "simHostAccess",
                   oo__declare_access(engine, staging, ring->piece_bytes, 1)))
        return 0;
    const char *bytes = oo__piece_bring(engine, piece, staging, failure, costs);
    if (!bytes)
        return 0;
    ring->lost[slot] = 1; /* until the copy's end is marked */
    if (!oo__works(
            failure, "cuMemcpyHtoDAsync",
            engine->driver.cuMemcpyHtoDAsync(piece->target, bytes, piece->bytes, engine->h2d)) ||
        !oo__works(failure, "cuEventRecord",
                   engine->driver.cuEventRecord(ring->busy[slot]->handle, engine->h2d)))
        return 0;
    ring->lost[slot] = 0;
    return 1;
}

static int oo__copy_as_it_is(struct oo_engine *engine, const struct oo_piece *piece,
                             struct oo_failure *failure, struct oo_costs *costs) {
    costs->waits++;
    oo__expect_pageable(engine, piece->host);
    if (!oo__works(failure, "cuMemcpyHtoDAsync",
                   engine->driver.cuMemcpyHtoDAsync(piece->target, piece->host, piece->bytes,
                                                    engine->h2d)))
        return 0;
    /* H7: the driver may or may not have staged pageable bytes, so they must not be rewritten
     * before the copy has ended. */
    return oo__works(failure, "cuStreamSynchronize",
                     engine->driver.cuStreamSynchronize(engine->h2d));
}

/* A piece of a file where there is no ring. */
static int oo__copy_read(struct oo_engine *engine, const struct oo_piece *piece,
                         struct oo_failure *failure, struct oo_costs *costs) {
    char *room = oo__pages_map(oo__ring_piece_bytes);
    if (!room)
        return oo__works(failure, "mmap", OOCU_ERROR_OUT_OF_MEMORY);
    struct oo_piece read = *piece;
    read.host = oo__piece_bring(engine, piece, room, failure, costs);
    const int works = read.host && oo__copy_as_it_is(engine, &read, failure, costs);
    oo__pages_unmap(room, oo__ring_piece_bytes);
    return works;
}

/* A step of a chunk's way by the ring. */
static int oo__copy_step(struct oo_engine *engine, struct oo_piece *step,
                         struct oo_failure *failure, struct oo_costs *costs) {
    struct oo_mutex *mutex = engine->feeder.mutex;
    oo__mutex_lock(mutex);
    step->slot = oo__take_slot(&engine->up);
    oo__mutex_unlock(mutex);
    const int works = oo__copy_staged(engine, step, failure, costs);
    oo__mutex_lock(mutex);
    engine->up.taken[step->slot] = 0;
    oo__mutex_unlock(mutex);
    return works;
}

static int oo__copy_directly(struct oo_engine *engine, const struct oo_piece *piece,
                             struct oo_failure *failure, struct oo_costs *costs) {
    return oo__disk_of(piece->part) ? oo__copy_read(engine, piece, failure, costs)
                                    : oo__copy_as_it_is(engine, piece, failure, costs);
}

/* A chunk: into staging memory, by the ring unless it is locked, and from there by a kernel. */
static int oo__copy_chunk(struct oo_engine *engine, const struct oo_piece *piece,
                          struct oo_failure *failure, struct oo_costs *costs) {
    const struct oo_ring *ring = &engine->up;
    if (!oo__piece_await(engine, piece->room, failure))
        return 0;
    if (piece->locked)
        return oo__piece_pass(engine, piece->part, piece->target, piece->room, &oo__untimed,
                              failure);
    int works = 1;
    for (size_t done = 0; works && done < piece->bytes;) {
        struct oo_piece step = {.part = piece->part,
                                .host = piece->host + done,
                                .target = piece->room->address + done,
                                .bytes = piece->bytes - done,
                                .staged = ring->base != NULL};
        const size_t most = oo__most_of(ring, &step);
        if (step.bytes > most)
            step.bytes = most;
        done += step.bytes;
        works = step.staged ? oo__copy_step(engine, &step, failure, costs)
                            : oo__copy_directly(engine, &step, failure, costs);
    }
    return works &&
           oo__piece_decode(engine, piece->part, piece->target, piece->room, &oo__untimed, failure);
}

static int oo__copy_piece(struct oo_engine *engine, const struct oo_piece *piece,
                          struct oo_failure *failure, struct oo_costs *costs) {
    if (piece->room) {
        const int works = oo__copy_chunk(engine, piece, failure, costs);
        oo__piece_give(engine, piece->room);
        return works;
    }
    if (piece->locked || !piece->bytes) /* nothing of it passes through the host's hands */
        return oo__part_send(engine, piece->part, piece->target, &oo__untimed, failure);
    return piece->staged ? oo__copy_staged(engine, piece, failure, costs)
                         : oo__copy_directly(engine, piece, failure, costs);
}

/* Feeds overlap, and one may overtake another: what is counted is the time in which any thread
 * copied, with the feed that ends next. */
static void oo__clock_stop(struct oo_feeder *feeder) {
    feeder->nanoseconds += oo__nanoseconds() - feeder->since;
}

/* All pieces are copied, or will never be. Under the mutex. */
static void oo__feed_end(struct oo_engine *engine, struct oo_feed *feed) {
    struct oo_feeder *feeder = &engine->feeder;
    struct oo_failure *failure = &feed->failure;
    feed->arrives =
        !failure->call && !feed->stopped &&
        oo__arrival_record(engine, feed->ready, feed->is_decoded, failure) &&
        (!feed->end || oo__works(failure, "cuEventRecord",
                                 engine->driver.cuEventRecord(feed->end->handle, engine->h2d)));
    if (engine->submits_late) { /* see oo__flush */
        (void)engine->driver.cuStreamQuery(engine->h2d);
        if (feed->is_decoded)
            (void)engine->driver.cuStreamQuery(engine->decoder.stream);
    }
    if (oo_driver_is_sticky(failure->result)) {
        if (!feeder->loss.call) /* the first is the cause of the others */
            feeder->loss = *failure;
    }
    if (feeder->n_active)
        oo__clock_stop(feeder);
    feeder->since = oo__nanoseconds();
    feed->nanoseconds = feeder->nanoseconds;
    feeder->nanoseconds = 0;
    if (feed->begun) {
        feeder->n_begun[feed->is_near]--;
        feeder->measures[feed->is_near] = 0;
    }
    feed->running = 0;
    feeder->n_running--;
    oo__mutex_wake(feeder->mutex);
}

/* Copy the feed's next piece. Under the mutex, which is given up meanwhile. */
static void oo__feed_on(struct oo_engine *engine, struct oo_feed *feed, int *entered) {
    struct oo_feeder *feeder = &engine->feeder;
    struct oo_failure failure = {0};
    if (!*entered) /* the thread's contexts end with it */
        *entered = oo__works(&failure, "cuCtxPushCurrent",
                             engine->driver.cuCtxPushCurrent(engine->context));
    int works = *entered;
    if (works && !feed->begun) {
        feed->begun = 1;
        feeder->n_begun[feed->is_near]++;
        feeder->measures[feed->is_near] = feed->begin != NULL;
        works = !feed->begin ||
                oo__works(&failure, "cuEventRecord",
                          engine->driver.cuEventRecord(feed->begin->handle, engine->h2d));
    }
    if (works) {
        const struct oo_piece piece = oo__take_piece(engine, feed);
        struct oo_costs costs = {0};
        feed->active++;
        feeder->n_near += (uint32_t)feed->is_near;
        if (feeder->n_active++ == 0)
            feeder->since = oo__nanoseconds();
        oo__mutex_unlock(feeder->mutex);
        works = oo__copy_piece(engine, &piece, &failure, &costs);
        oo__mutex_lock(feeder->mutex);
        feed->active--;
        feeder->n_near -= (uint32_t)feed->is_near;
        if (--feeder->n_active == 0)
            oo__clock_stop(feeder);
        if (piece.staged)
            engine->up.taken[piece.slot] = 0;
        feed->waits += costs.waits;
        feed->recoveries += costs.recoveries;
        feed->disk_bytes += costs.disk_bytes;
        feed->disk_nanoseconds += costs.disk_nanoseconds;
        feed->copies += works && piece.begins && piece.bytes;
        feed->bytes += works ? piece.bytes : 0;
        feed->unlocked_bytes += works && !piece.locked ? piece.bytes - costs.locked_bytes : 0;
        feed->decodes += works && oo__is_decoded(piece.part);
        feed->decoded_bytes += works ? oo__decoded_bytes(piece.part) : 0;
    }
    if (!works) {
        if (!feed->failure.call)
            feed->failure = failure;
        oo__queue_take_out(feeder, feed);
    }
    if (!feed->queued && !feed->active)
        oo__feed_end(engine, feed);
    else if (feeder->told)
        oo__mutex_wake(feeder->mutex);
}

static void oo__feeder_run(void *argument) {
    const struct oo_feeding *own = argument;
    struct oo_engine *engine = own->engine;
    struct oo_feeder *feeder = &engine->feeder;
    int entered = 0; /* the device's context is current on this thread */
    struct oo_binding *binding = oo__thread_bind(engine->sys, engine->numa_node);
    oo__mutex_lock(feeder->mutex);
    while (own->number < feeder->n_wanted) {
        struct oo_feed *feed = oo__queue_next(engine);
        if (feed)
            oo__feed_on(engine, feed, &entered);
        else
            oo__mutex_wait(feeder->mutex, oo__clock_s() + oo__idle_s);
    }
    oo__mutex_unlock(feeder->mutex);
    oo__thread_unbind(binding);
}

/* As many threads go on, and those end that are more. */
static void oo__feeder_end(struct oo_feeder *feeder, uint32_t n_left) {
    oo__mutex_lock(feeder->mutex);
    feeder->n_wanted = n_left;
    oo__mutex_wake(feeder->mutex);
    oo__mutex_unlock(feeder->mutex);
    while (feeder->n_threads > n_left)
        oo__thread_join(feeder->threads[--feeder->n_threads].thread);
}

static uint32_t oo__feeder_wants(const struct oo_feeder *feeder) {
    const size_t copying = oo__processors() < OO_FEED_THREADS ? oo__processors() : OO_FEED_THREADS;
    return feeder->reads ? (uint32_t)OO_READ_THREADS : (uint32_t)copying;
}

enum oo_status oo__feeder_prepare(struct oo_engine *engine) {
    struct oo_feeder *feeder = &engine->feeder;
    enum oo_status status = oo__ring_prepare(engine, &engine->up);
    if (status != OO_OK)
        return status;
    const uint32_t wanted = oo__feeder_wants(feeder);
    if (feeder->n_threads < wanted) {
        oo__mutex_lock(feeder->mutex);
        feeder->n_wanted = wanted;
        oo__mutex_unlock(feeder->mutex);
    }
    while (feeder->n_threads < wanted) {
        struct oo_feeding *own = &feeder->threads[feeder->n_threads];
        *own = (struct oo_feeding){.engine = engine, .number = feeder->n_threads};
        own->thread = oo__thread_start(oo__feeder_run, own);
        if (!own->thread)
            break;
        feeder->n_threads++;
    }
    return feeder->n_threads ? OO_OK
                             : oo__fail(OO_E_MEMORY, "the system starts no thread that copies "
                                                     "weights which are not page-locked");
}

void oo__feeder_read(struct oo_engine *engine, int reads) {
    struct oo_feeder *feeder = &engine->feeder;
    feeder->reads = reads;
    if (feeder->n_threads > oo__feeder_wants(feeder))
        oo__feeder_end(feeder, oo__feeder_wants(feeder));
}

void oo__feeder_close(struct oo_engine *engine) { oo__feeder_end(&engine->feeder, 0); }

/* ---- the engine's side: under its mutex ---- */

/* Whether memory keeps all of it that is in files. */
static int oo__is_near(const struct oo_unit *unit) {
    int near = 0;
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        const struct oo_kept *kept = unit->parts[i].kept;
        if (!oo__disk_of(&unit->parts[i]))
            continue;
        if (!kept || kept->arrived < kept->bytes)
            return 0;
        near = 1;
    }
    return near;
}

enum oo_status oo__feed_begin(struct oo_engine *engine, uint32_t id, uintptr_t address,
                              const struct oo_event *ready, int urgent) {
    enum oo_status status;
    struct oo_feeder *feeder = &engine->feeder;
    struct oo_unit *unit = &engine->units[id];
    struct oo_event *begin = NULL, *end = NULL;
    OO_TRY(oo__feeder_prepare(engine));
    if (!unit->feed) {
        unit->feed = malloc(sizeof *unit->feed);
        if (!unit->feed)
            return oo__fail(OO_E_MEMORY, "no memory for a feed's record");
        engine->stats.allocations++;
    }
    if (oo__is_measured(engine, OO_TRACE_H2D)) {
        OO_TRY(oo__event_take(engine, OO_TIMED, &begin));
        OO_TRY(oo__event_take(engine, OO_TIMED, &end));
    }
    *unit->feed = (struct oo_feed){.parts = unit->parts,
                                   .n_parts = unit->n_parts,
                                   .address = address,
                                   .ready = ready,
                                   .is_decoded = unit->decodes,
                                   .is_near = oo__is_near(unit),
                                   .begin = begin,
                                   .end = end,
                                   .running = 1,
                                   .open = 1};
    begin = NULL;
    oo__mutex_lock(feeder->mutex);
    oo__queue_put(feeder, unit->feed, urgent);
    oo__mutex_wake(feeder->mutex);
    oo__mutex_unlock(feeder->mutex);
done:
    oo__event_give(engine, begin);
    return status;
}

/* Count what has been copied, once. The feed has ended. */
static void oo__feed_count(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    struct oo_feed *feed = unit->feed;
    struct oo_stats *stats = &engine->models[unit->model].stats;
    stats->h2d_bytes += feed->bytes;
    stats->h2d_copies += feed->copies;
    stats->decodes += feed->decodes;
    stats->decoded_bytes += feed->decoded_bytes;
    stats->disk_read_bytes += feed->disk_bytes;
    stats->disk_read_seconds += (double)feed->disk_nanoseconds * 1e-9;
    engine->stats.unlocked_h2d_bytes += feed->unlocked_bytes;
    engine->stats.unlocked_h2d_seconds += (double)feed->nanoseconds * 1e-9;
    engine->stats.copy_waits += feed->waits;
    engine->stats.recoveries += feed->recoveries;
    if (feed->bytes > feed->unlocked_bytes) /* the device has read, or reads, some directly */
        oo__note_copy(engine, unit);
    feed->bytes = feed->unlocked_bytes = feed->nanoseconds = 0;
    feed->disk_bytes = feed->disk_nanoseconds = 0;
    feed->copies = feed->waits = feed->recoveries = feed->decodes = feed->decoded_bytes = 0;
    if (!feed->arrives) {
        oo__event_give(engine, feed->begin);
        oo__event_give(engine, feed->end);
    } else if (feed->begin) {
        oo__span_add(engine, OO_TRACE_H2D, id, unit->host_bytes, feed->begin, feed->end);
    }
    feed->begin = feed->end = NULL;
    feed->open = !feed->arrives;
}

/* Wait until a copy thread has done something, perhaps. Under the feeder's mutex. In virtual time
 * all of them are waited for that have or find something to do, so that nothing is queued late;
 * then it passes, unless one has ended `feed` meanwhile (NULL: any). */
static void oo__feeder_wait(struct oo_engine *engine, const struct oo_feed *feed) {
    struct oo_feeder *feeder = &engine->feeder;
    const unsigned busy = oo__queue_next(engine) ? feeder->n_threads : feeder->n_active;
    oo__mutex_unlock(feeder->mutex);
    const int all = oo__simulated_readers(engine, busy);
    oo__mutex_lock(feeder->mutex);
    if (feed ? !feed->running : !feeder->n_running)
        return;
    if (all < 0)
        oo__mutex_wait(feeder->mutex, oo__clock_s() + oo__idle_s);
    else if (all)
        oo__simulated_pass(engine);
}

enum oo_status oo__feeds_go_on(struct oo_engine *engine, const struct oo_event *until) {
    struct oo_feeder *feeder = &engine->feeder;
    oo__mutex_lock(feeder->mutex);
    while (oo__simulated_readers(engine, 0) >= 0 &&
           engine->driver.cuEventQuery(until->handle) == OOCU_ERROR_NOT_READY)
        oo__feeder_wait(engine, NULL);
    oo__mutex_unlock(feeder->mutex);
    return OO_DRIVE(engine, cuEventSynchronize, until->handle);
}

enum oo_status oo__feed_await(struct oo_engine *engine, uint32_t id) {
    return oo__feed_await_with(engine, id, NULL, NULL);
}

enum oo_status oo__feed_await_with(struct oo_engine *engine, uint32_t id,
                                   void (*meanwhile)(struct oo_engine *, void *), void *argument) {
    struct oo_feeder *feeder = &engine->feeder;
    struct oo_feed *feed = engine->units[id].feed;
    const int is_open = feed && feed->open;
    if (!is_open)
        return OO_OK;
    oo__mutex_lock(feeder->mutex);
    const uint64_t begin = oo__nanoseconds();
    engine->stats.feed_waits += feed->running != 0;
    /* H9: until the copy threads have recorded `ready`, a stream that waits for it waits for
     * nothing. */
    feeder->told = meanwhile != NULL;
    while (feed->running) {
        oo__feeder_wait(engine, feed);
        if (!meanwhile)
            continue;
        oo__mutex_unlock(feeder->mutex);
        meanwhile(engine, argument);
        oo__mutex_lock(feeder->mutex);
    }
    feeder->told = 0;
    oo__mutex_unlock(feeder->mutex);
    engine->stats.feed_wait_seconds += (double)(oo__nanoseconds() - begin) * 1e-9;
    oo__feed_count(engine, id);
    if (feed->arrives)
        return OO_OK;
    if (feed->failure.disk)
        return oo__disk_fail(&feed->failure);
    if (feed->failure.call)
        return oo__check(engine, feed->failure.call, feed->failure.result);
    return oo__fail(OO_E_STATE, "the copy of unit %u was given up", id);
}

void oo__feed_stop(struct oo_engine *engine, uint32_t id) {
    struct oo_feeder *feeder = &engine->feeder;
    struct oo_feed *feed = engine->units[id].feed;
    if (!feed || !feed->open)
        return;
    oo__mutex_lock(feeder->mutex);
    if (feed->running) {
        feed->stopped = 1;
        engine->stats.stopped_feeds++;
        oo__queue_take_out(feeder, feed);
        if (!feed->active)
            oo__feed_end(engine, feed);
    }
    /* H10: a copy thread may still be reading the masters, and queue a copy over the unit's bytes,
     * which are another's from now on. */
    while (feed->running)
        oo__feeder_wait(engine, feed);
    oo__mutex_unlock(feeder->mutex);
    oo__feed_count(engine, id);
}

void oo__feed_forget(struct oo_engine *engine, uint32_t id) {
    oo__feed_stop(engine, id);
    if (engine->units[id].feed)
        engine->units[id].feed->open = 0;
}

int oo__feeds_run(const struct oo_engine *engine) {
    oo__mutex_lock(engine->feeder.mutex);
    const int run = engine->feeder.n_running != 0;
    oo__mutex_unlock(engine->feeder.mutex);
    return run;
}

void oo__feeds_await(struct oo_engine *engine) {
    struct oo_feeder *feeder = &engine->feeder;
    oo__pace_forget(engine); /* it would take as long as this wait */
    oo__mutex_lock(feeder->mutex);
    /* H10: pieces of a ring that goes may be taken. */
    while (feeder->n_running)
        oo__feeder_wait(engine, NULL);
    oo__mutex_unlock(feeder->mutex);
}

void oo__feeds_count(struct oo_engine *engine) {
    for (uint32_t i = 0; i < engine->n_units; i++) {
        const struct oo_feed *feed = engine->units[i].feed;
        if (!feed || !feed->open)
            continue;
        oo__mutex_lock(engine->feeder.mutex);
        const int running = feed->running;
        oo__mutex_unlock(engine->feeder.mutex);
        if (!running)
            oo__feed_count(engine, i);
    }
}
