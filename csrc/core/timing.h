/* timing.h - events, the spans measured between them, and the timeline's rows. */
#ifndef OO_TIMING_H
#define OO_TIMING_H

#include "call.h"

/* ---- events ---- */

/* Create events for a steady state that creates none. */
enum oo_status oo__events_reserve(struct oo_engine *engine, uint32_t count);
/* An event with one reference, not recorded. */
enum oo_status oo__event_take(struct oo_engine *engine, struct oo_event **event);
void oo__event_give(struct oo_engine *engine, struct oo_event *event); /* NULL is allowed */
struct oo_event *oo__event_share(struct oo_event *event);

/* ---- spans ---- */

/* Queue a span for measurement; takes its own references. */
void oo__span_add(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit, uint32_t model,
                  uint64_t bytes, struct oo_event *begin, struct oo_event *end);
void oo__spans_harvest(struct oo_engine *engine);
void oo__spans_free(struct oo_engine *engine);

/* ---- rows of the timeline, while one is recorded ---- */

/* A use begins on `stream`. When there are more uses at a time than there is room for, some get no
 * row. */
enum oo_status oo__row_begin(struct oo_engine *engine, struct oo_unit *unit, OOCUstream stream);
void oo__row_end(struct oo_engine *engine, uint32_t unit, OOCUstream stream);
/* Uses that began under a timeline get no row. */
void oo__rows_forget(struct oo_engine *engine, struct oo_unit *unit);

#endif
