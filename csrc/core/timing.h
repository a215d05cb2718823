/* timing.h - events, the spans measured between them, and the timeline's rows. */
#ifndef OO_TIMING_H
#define OO_TIMING_H

#include "call.h"

/* ---- events ---- */

/* Create events for a steady state that creates none. */
enum oo_status oo__events_reserve(struct oo_engine *engine, enum oo_event_kind kind,
                                  uint32_t count);
/* An event that is not recorded. */
enum oo_status oo__event_take(struct oo_engine *engine, enum oo_event_kind kind,
                              struct oo_event **event);
/* Wait on the host for what was recorded last; counted where it has not ended yet. */
enum oo_status oo__event_await(struct oo_engine *engine, const struct oo_event *event);
/* An event may be recorded again at once: waits queued on it keep the record they saw. NULL is
 * allowed. */
void oo__event_give(struct oo_engine *engine, struct oo_event *event);

/* ---- spans ---- */

/* Whether the next span of this kind is one of those that are measured. */
int oo__is_measured(struct oo_engine *engine, enum oo_trace_kind kind);
/* Queue what is between two timed events for measurement. They are given away. */
void oo__span_add(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit, uint64_t bytes,
                  struct oo_event *begin, struct oo_event *end);
/* Measure what `stream` does from here on, if this is one of those that are measured; otherwise
 * *begin stays NULL, and the end does nothing. */
enum oo_status oo__span_begin(struct oo_engine *engine, enum oo_trace_kind kind, OOCUstream stream,
                              struct oo_event **begin);
/* It ends here. `begin` is given away, whatever is returned. */
enum oo_status oo__span_end(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit,
                            uint64_t bytes, OOCUstream stream, struct oo_event **begin);
/* One that is pending: from `head` on. */
struct oo_span *oo__span_at(const struct oo_spans *spans, uint64_t index);
void oo__spans_harvest(struct oo_engine *engine);
void oo__spans_free(struct oo_engine *engine);

/* ---- what the plan is given ---- */

/* The visit before ends, if it was on this stream: from here on it is a copy that is waited for. */
enum oo_status oo__pace_end(struct oo_engine *engine, OOCUstream stream);
/* The current visit's kernels begin. */
enum oo_status oo__pace_begin(struct oo_engine *engine, uint32_t unit, OOCUstream stream);
/* The unit is gone, or the device; or the host waits in the middle of it. */
void oo__pace_forget(struct oo_engine *engine);

/* ---- rows of the timeline, while one is recorded ---- */

/* A use begins on `stream`. When there are more uses at a time than there is room for, some get no
 * row. */
enum oo_status oo__row_begin(struct oo_engine *engine, struct oo_unit *unit, OOCUstream stream);
void oo__row_end(struct oo_engine *engine, uint32_t unit, OOCUstream stream);
/* Uses that began under a timeline get no row. */
void oo__rows_forget(struct oo_engine *engine, struct oo_unit *unit);

#endif
