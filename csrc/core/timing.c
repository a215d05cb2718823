/* timing.c - events, measured spans, the timeline.
 *
 * Seconds come from pairs of events, of which a sample is recorded, and are read when both have
 * passed, never by waiting: pairs queue in order of recording, and once in so many visits those at
 * its head that have ended are read. */
#include "timing.h"

#include <stdlib.h>
#include <string.h>

static const double oo__stall_floor_s =
    10e-6; /* two events in a row on an idle stream are microseconds apart */

/* 2^32 over the golden ratio: multiples of it, modulo 2^32, are spread as evenly as can be. */
static const uint32_t oo__golden = 2654435769u;

/* ---- events ---- */

static enum oo_status oo__event_create(struct oo_engine *engine, enum oo_event_kind kind) {
    struct oo_event *event = calloc(1, sizeof *event);
    if (!event)
        return oo__fail(OO_E_MEMORY, "no memory for an event's record");
    enum oo_status status =
        OO_DRIVE(engine, cuEventCreate, &event->handle,
                 kind == OO_ORDERS ? OOCU_EVENT_DISABLE_TIMING : OOCU_EVENT_DEFAULT);
    if (status != OO_OK) {
        free(event);
        return status;
    }
    engine->stats.allocations++;
    event->kind = kind;
    oo__event_give(engine, event);
    return OO_OK;
}

enum oo_status oo__events_reserve(struct oo_engine *engine, enum oo_event_kind kind,
                                  uint32_t count) {
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < count && status == OO_OK; i++)
        status = oo__event_create(engine, kind);
    return status;
}

enum oo_status oo__event_take(struct oo_engine *engine, enum oo_event_kind kind,
                              struct oo_event **out) {
    struct oo_event **first = &engine->spans.free_events[kind];
    *out = NULL;
    if (!*first)
        oo__spans_harvest(engine);
    if (!*first) {
        enum oo_status status = oo__event_create(engine, kind);
        if (status != OO_OK)
            return status;
    }
    *out = *first;
    /* The analyzer does not see that oo__event_create puts one there. */
    // NOLINTNEXTLINE(clang-analyzer-core.NullDereference)
    *first = (*out)->next;
    (*out)->next = NULL;
    return OO_OK;
}

enum oo_status oo__event_await(struct oo_engine *engine, const struct oo_event *event) {
    const OOCUresult ended = engine->driver.cuEventQuery(event->handle);
    if (ended != OOCU_ERROR_NOT_READY)
        return oo__check(engine, "cuEventQuery", ended);
    engine->stats.host_waits++;
    return OO_DRIVE(engine, cuEventSynchronize, event->handle);
}

void oo__event_give(struct oo_engine *engine, struct oo_event *event) {
    if (!event)
        return;
    event->next = engine->spans.free_events[event->kind];
    engine->spans.free_events[event->kind] = event;
}

/* ---- spans ---- */

/* A time that cannot be read costs a measurement and nothing else. */
static OOCUresult oo__elapsed(struct oo_engine *engine, float *milliseconds,
                              const struct oo_event *begin, const struct oo_event *end) {
    const OOCUresult result =
        engine->driver.cuEventElapsedTime(milliseconds, begin->handle, end->handle);
    if (result != OOCU_ERROR_NOT_READY)
        (void)oo__note(engine, "cuEventElapsedTime", result);
    return result;
}

static void oo__trace_row(struct oo_engine *engine, const struct oo_span *span) {
    struct oo_spans *spans = &engine->spans;
    float begin_ms, end_ms;
    if (oo__elapsed(engine, &begin_ms, spans->origin, span->begin) != OOCU_SUCCESS ||
        oo__elapsed(engine, &end_ms, spans->origin, span->end) != OOCU_SUCCESS)
        return;
    if (spans->n_rows == spans->row_capacity) {
        const size_t capacity = spans->row_capacity ? 2 * spans->row_capacity : 4096;
        struct oo_trace_row *rows = realloc(spans->rows, capacity * sizeof *rows);
        if (!rows)
            return;
        spans->rows = rows;
        spans->row_capacity = capacity;
    }
    spans->rows[spans->n_rows++] = (struct oo_trace_row){
        span->kind, span->unit, (double)begin_ms * 1e-3, (double)end_ms * 1e-3, span->bytes};
}

struct oo_span *oo__span_at(const struct oo_spans *spans, uint64_t index) {
    return &spans->pending[index & (spans->capacity - 1)];
}

/* What so many of the bytes that travel of a unit are on the device. */
static size_t oo__becomes(const struct oo_unit *unit, uint64_t bytes) {
    if (!unit->host_bytes) /* of one weight: nothing travels */
        return 0;
    return (size_t)((double)unit->device_bytes * ((double)bytes / (double)unit->host_bytes));
}

/* Read the span at the head; 0 when it has not ended yet. */
static int oo__harvest_one(struct oo_engine *engine) {
    struct oo_spans *spans = &engine->spans;
    const struct oo_span *span = oo__span_at(spans, spans->head);
    float milliseconds = 0.0f;
    const OOCUresult result = oo__elapsed(engine, &milliseconds, span->begin, span->end);
    if (result == OOCU_ERROR_NOT_READY)
        return 0;
    if (result == OOCU_SUCCESS) {
        struct oo_stats *stats =
            span->unit == OO_NO_UNIT ? &engine->stats : &engine->models[span->model].stats;
        const double seconds = (double)milliseconds * 1e-3;
        switch (span->kind) {
        case OO_TRACE_H2D:
            if (span->unit == OO_NO_UNIT) /* of a trip back: the plan goes by units */
                break;
            stats->h2d_seconds += seconds;
            stats->h2d_timed_bytes += span->bytes;
            if (span->sent > engine->copies.left)
                engine->copies.left = span->sent;
            oo_plan_copied(engine->plan, span->unit,
                           oo__becomes(&engine->units[span->unit], span->bytes), seconds);
            break;
        case OO_TRACE_D2H:
            stats->d2h_seconds += seconds;
            stats->d2h_timed_bytes += span->bytes;
            break;
        case OO_TRACE_DECODE:
            stats->decode_seconds += seconds;
            stats->decode_timed_bytes += span->bytes;
            break;
        case OO_TRACE_STALL:
            stats->timed_waits++;
            engine->units[span->unit].timed_waits++;
            if (seconds > oo__stall_floor_s) {
                stats->stalls++;
                stats->stall_seconds += seconds;
                engine->units[span->unit].stalls++;
                engine->units[span->unit].stall_seconds += seconds;
            }
            break;
        case OO_TRACE_COMPUTE: /* without a row it was measured for the plan */
            if (!span->traced)
                oo_plan_took(engine->plan, span->unit, seconds);
            break;
        }
        if (span->traced)
            oo__trace_row(engine, span);
    }
    oo__event_give(engine, span->begin);
    oo__event_give(engine, span->end);
    spans->head++;
    return 1;
}

void oo__spans_harvest(struct oo_engine *engine) {
    while (engine->spans.head != engine->spans.tail && oo__harvest_one(engine))
        continue;
}

/* Room for one more span: 0 when there is none to be had. Those that are pending are read when the
 * queue is full: by then most have ended, and each that is asked too early costs a call. */
static int oo__spans_make_room(struct oo_engine *engine) {
    struct oo_spans *spans = &engine->spans;
    if (spans->tail - spans->head == spans->capacity)
        oo__spans_harvest(engine);
    if (spans->tail - spans->head < spans->capacity)
        return 1;
    if (spans->capacity >= (spans->tracing ? OO_SPANS_TRACED : OO_SPANS))
        return 0;
    const uint64_t capacity = spans->capacity ? 2 * spans->capacity : OO_SPANS;
    struct oo_span *pending = calloc(capacity, sizeof *pending);
    if (!pending)
        return 0;
    for (uint64_t i = spans->head; i != spans->tail; i++)
        pending[i & (capacity - 1)] = *oo__span_at(spans, i);
    free(spans->pending);
    spans->pending = pending;
    spans->capacity = capacity;
    return 1;
}

/* Samples are one in so many, and of a step that repeats none is always the one: whatever its
 * length, the multiples of the golden ratio fall on each of its spans as often. */
static int oo__is_sampled(struct oo_spans *spans, enum oo_trace_kind kind) {
    return spans->seen[kind]++ * oo__golden < UINT32_MAX / OO_SAMPLED_ONE_IN;
}

int oo__is_measured(struct oo_engine *engine, enum oo_trace_kind kind) {
    struct oo_spans *spans = &engine->spans;
    if (!engine->driver.cuEventElapsedTime)
        return 0;
    if (spans->tracing)
        return 1;
    return kind != OO_TRACE_COMPUTE && oo__is_sampled(spans, kind);
}

void oo__span_add(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit, uint64_t bytes,
                  struct oo_event *begin, struct oo_event *end) {
    struct oo_spans *spans = &engine->spans;
    if (!oo__spans_make_room(engine)) {
        oo__event_give(engine, begin);
        oo__event_give(engine, end);
        return;
    }
    const uint32_t model = unit == OO_NO_UNIT ? 0 : engine->units[unit].model;
    /* Behind a copy of the copy threads there may be others by now. */
    const int is_last = kind == OO_TRACE_H2D && unit != OO_NO_UNIT && !engine->units[unit].is_fed;
    const uint64_t sent = is_last ? engine->copies.sent : 0;
    *oo__span_at(spans, spans->tail++) =
        (struct oo_span){kind, unit, model, bytes, sent, begin, end, spans->tracing};
}

static enum oo_status oo__timed_record(struct oo_engine *engine, OOCUstream stream,
                                       struct oo_event **event) {
    enum oo_status status = oo__event_take(engine, OO_TIMED, event);
    if (status != OO_OK)
        return status;
    status = OO_DRIVE(engine, cuEventRecord, (*event)->handle, stream);
    if (status != OO_OK) {
        oo__event_give(engine, *event);
        *event = NULL;
    }
    return status;
}

enum oo_status oo__span_begin(struct oo_engine *engine, enum oo_trace_kind kind, OOCUstream stream,
                              struct oo_event **begin) {
    *begin = NULL;
    return oo__is_measured(engine, kind) ? oo__timed_record(engine, stream, begin) : OO_OK;
}

enum oo_status oo__span_end(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit,
                            uint64_t bytes, OOCUstream stream, struct oo_event **begin) {
    struct oo_event *end;
    if (!*begin)
        return OO_OK;
    enum oo_status status = oo__timed_record(engine, stream, &end);
    if (status == OO_OK)
        oo__span_add(engine, kind, unit, bytes, *begin, end);
    else
        oo__event_give(engine, *begin);
    *begin = NULL;
    return status;
}

/* ---- what the plan is given ---- */

void oo__pace_forget(struct oo_engine *engine) {
    if (engine->pace.begin)
        oo_plan_measures(engine->plan, engine->pace.unit, 0);
    oo__event_give(engine, engine->pace.begin);
    engine->pace.begin = NULL;
}

enum oo_status oo__pace_end(struct oo_engine *engine, OOCUstream stream) {
    struct oo_pace *pace = &engine->pace;
    struct oo_event *end = NULL;
    enum oo_status status = OO_OK;
    /* Under a timeline it would be a row. */
    if (pace->begin && pace->stream == stream && !engine->spans.tracing)
        status = oo__timed_record(engine, stream, &end);
    if (!end)
        oo__pace_forget(engine);
    else
        oo__span_add(engine, OO_TRACE_COMPUTE, pace->unit, 0, pace->begin, end);
    pace->begin = NULL;
    return status;
}

/* Half of the room for spans is for others. What has not ended when it is asked costs a call. */
static int oo__pace_has_room(struct oo_engine *engine) {
    struct oo_spans *spans = &engine->spans;
    if (spans->tail - spans->head >= OO_SPANS / 2 && oo__is_sampled(spans, OO_TRACE_COMPUTE))
        oo__spans_harvest(engine);
    return spans->tail - spans->head < OO_SPANS / 2;
}

enum oo_status oo__pace_begin(struct oo_engine *engine, uint32_t unit, OOCUstream stream) {
    if (oo_plan_end_of_visits(engine->plan) % OO_VISITS_READ == 0)
        oo__spans_harvest(engine);
    if (engine->spans.tracing || !engine->driver.cuEventElapsedTime ||
        !oo_plan_wants_seconds(engine->plan) || !oo__pace_has_room(engine))
        return OO_OK;
    engine->pace = (struct oo_pace){unit, stream, NULL};
    const enum oo_status status = oo__timed_record(engine, stream, &engine->pace.begin);
    if (engine->pace.begin)
        oo_plan_measures(engine->plan, unit, 1);
    return status;
}

void oo__spans_free(struct oo_engine *engine) {
    struct oo_spans *spans = &engine->spans;
    oo__pace_forget(engine);
    while (spans->head != spans->tail) {
        oo__event_give(engine, oo__span_at(spans, spans->head)->begin);
        oo__event_give(engine, oo__span_at(spans, spans->head)->end);
        spans->head++;
    }
    oo__event_give(engine, spans->origin);
    spans->origin = NULL;
    for (int kind = OO_ORDERS; kind <= OO_TIMED; kind++) {
        while (spans->free_events[kind]) {
            struct oo_event *event = spans->free_events[kind];
            spans->free_events[kind] = event->next;
            if (engine->usable)
                OO_GIVE_BACK(engine, cuEventDestroy, event->handle);
            free(event);
        }
    }
    free(spans->rows);
    free(spans->pending);
    spans->rows = NULL;
    spans->pending = NULL;
    spans->capacity = 0;
}

/* ---- the timeline ---- */

enum oo_status oo__row_begin(struct oo_engine *engine, struct oo_unit *unit, OOCUstream stream) {
    struct oo_event *begin;
    if (unit->n_begun == OO_STREAMS)
        return OO_OK;
    enum oo_status status = oo__span_begin(engine, OO_TRACE_COMPUTE, stream, &begin);
    if (begin)
        unit->begun[unit->n_begun++] = (struct oo_begun){stream, begin};
    return status;
}

/* The span has an end of its own: the mark that H2 waits for is recorded again by the next use. */
void oo__row_end(struct oo_engine *engine, uint32_t id, OOCUstream stream) {
    struct oo_unit *unit = &engine->units[id];
    uint32_t i = 0;
    while (i < unit->n_begun && unit->begun[i].stream != stream)
        i++;
    if (i == unit->n_begun)
        return;
    struct oo_event *begin = unit->begun[i].event;
    unit->n_begun--;
    memmove(&unit->begun[i], &unit->begun[i + 1], (unit->n_begun - i) * sizeof unit->begun[0]);
    if (engine->usable)
        (void)oo__span_end(engine, OO_TRACE_COMPUTE, id, 0, stream, &begin);
    oo__event_give(engine, begin);
}

void oo__rows_forget(struct oo_engine *engine, struct oo_unit *unit) {
    while (unit->n_begun)
        oo__event_give(engine, unit->begun[--unit->n_begun].event);
}
