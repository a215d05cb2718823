/* uses.h - what still uses a unit's bytes on the device, and what has to come after them. */
#ifndef OO_USES_H
#define OO_USES_H

#include "state.h"

/* Whether the handle is of one stream as long as the engine lives: the default stream, and the
 * engine's own. The caller may destroy any other, even with work in it, and the driver gives the
 * next one its handle. */
int oo__stream_lasts(const struct oo_engine *engine, OOCUstream stream);
/* `stream` has queued its last use of the unit so far. A use whose end cannot be marked counts as
 * lost: only a synchronise can show when it ends, and what overwrites the bytes does that first. */
enum oo_status oo__mark_use(struct oo_engine *engine, struct oo_unit *unit, OOCUstream stream);
/* Make the stream that will write wait for every use of the unit's bytes. What decodes into them,
 * if they have not been used, is waited for by oo__decodes_settle. */
enum oo_status oo__order_after_uses(struct oo_engine *engine, uint32_t unit, OOCUstream writer);
/* `stream` has queued its last direct read, so far, of masters. */
enum oo_status oo__mark_read(struct oo_engine *engine, OOCUstream stream);
/* Make the stream wait for all such reads. */
enum oo_status oo__order_after_reads(struct oo_engine *engine, OOCUstream stream);
/* Wait on the host for all such reads. */
enum oo_status oo__await_reads(struct oo_engine *engine);
/* The context is gone, or going, and with it what it had queued. */
void oo__forget_reads(struct oo_engine *engine);
/* The unit's device copy is gone; its uses are ordered before the h2d stream already. */
void oo__forget_copy(struct oo_engine *engine, uint32_t unit);
/* The error of a call that would take bytes away from one that computes with them. */
enum oo_status oo__fail_in_use(uint32_t unit);
/* Order after uses, forget the copy, and leave the arena. */
enum oo_status oo__drop(struct oo_engine *engine, uint32_t unit);

#endif
