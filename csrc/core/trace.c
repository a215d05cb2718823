/* trace.c - a timeline of what the device did, from its start to its rows. */
#include "feed.h"
#include "timing.h"

#include <stdlib.h>

static void oo__feeds_settle(struct oo_engine *engine) {
    oo__feeds_await(engine);
    oo__feeds_count(engine);
}

enum oo_status oo_trace_start(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (!engine->driver.cuEventElapsedTime) {
        status = oo__fail(OO_E_DRIVER_OLD,
                          "this driver has no cuEventElapsedTime: a timeline cannot be recorded");
        goto done;
    }
    if (engine->spans.tracing) {
        status = oo__fail(OO_E_STATE, "a timeline is being recorded already");
        goto done;
    }
    oo__feeds_settle(engine); /* what began before is not part of it */
    oo__spans_harvest(engine);
    OO_TRY(oo__event_take(engine, OO_TIMED, &engine->spans.origin));
    status = OO_DRIVE(engine, cuEventRecord, engine->spans.origin->handle, engine->h2d);
    /* The rows' times are since this call returned, so wait until the device is there. */
    if (status == OO_OK)
        status = oo__event_await(engine, engine->spans.origin);
    if (status != OO_OK) {
        oo__event_give(engine, engine->spans.origin);
        engine->spans.origin = NULL;
        goto done;
    }
    engine->spans.tracing = 1;
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_trace_stop(struct oo_engine *engine, struct oo_trace_row **rows, size_t *count) {
    *rows = NULL;
    *count = 0;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_spans *spans = &engine->spans;
    if (!spans->tracing) {
        status = oo__fail(OO_E_STATE, "no timeline is being recorded");
        goto done;
    }
    /* The rows are wanted now: wait for each span's end. Not part of a training step. */
    oo__feeds_settle(engine);
    for (uint64_t i = spans->head; i != spans->tail; i++) {
        engine->stats.host_waits++;
        OO_TRY(OO_DRIVE(engine, cuEventSynchronize, oo__span_at(spans, i)->end->handle));
    }
    oo__spans_harvest(engine);
    if (spans->head != spans->tail) { /* each span has ended, so the driver contradicts itself */
        status = oo__check(engine, "cuEventElapsedTime", OOCU_ERROR_NOT_READY);
        goto done;
    }
    *rows = spans->rows;
    *count = spans->n_rows;
    spans->rows = NULL;
    spans->n_rows = spans->row_capacity = 0;
    spans->tracing = 0;
    for (uint32_t i = 0; i < engine->n_units;
         i++) /* uses that outlast this timeline are in no later one */
        oo__rows_forget(engine, &engine->units[i]);
    oo__event_give(engine, spans->origin);
    spans->origin = NULL;
done:
    oo__leave(engine);
    return status;
}

void oo_trace_free(struct oo_trace_row *rows) { free(rows); }
