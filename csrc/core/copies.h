/* copies.h - which copies still read masters directly. */
#ifndef OO_COPIES_H
#define OO_COPIES_H

#include "state.h"

/* A copy that reads the unit's masters directly is queued on the h2d stream, or about to be.
 */
void oo__note_copy(struct oo_engine *engine, struct oo_unit *unit);
/* `stream`, which lasts as long as the engine, waits for the arrival of the unit's copy. */
void oo__note_awaited(struct oo_engine *engine, const struct oo_unit *unit, OOCUstream stream);
/* The number up to which copies end before what is queued on `stream` next. */
uint64_t oo__awaited_by(const struct oo_engine *engine, OOCUstream stream);
/* The host has waited for what comes after all copies up to this number. */
void oo__note_ended(struct oo_engine *engine, uint64_t copy);
/* Whether so many parts more find room in the driver's queue: where it is full, a call that queues
 * one waits until the device has taken another. Asks the driver nothing. */
static inline int oo__queue_has_room(const struct oo_engine *engine, uint32_t parts) {
    return engine->copies.sent - engine->copies.left + parts <= OO_QUEUED_PARTS;
}
/* Where less than half of that room is known to be left, find out how many parts have gone: by
 * copies that were measured, or if all of those were read, by asking whether the stream is empty.
 * Each use begins so, before an empty queue could turn a non-blocking call away; where the device
 * is that far behind, one in a few. */
void oo__queue_look(struct oo_engine *engine);
/* Wait on the host for all copies up to this number. */
enum oo_status oo__await_copies(struct oo_engine *engine, uint64_t copy);

#endif
