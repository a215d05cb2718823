/* feed.h - threads of the engine's own that bring what is not locked to the device. */
#ifndef OO_FEED_H
#define OO_FEED_H

#include "state.h"

/* Have the upload ring, as far as the system locks memory for one, and the copy threads. */
enum oo_status oo__feeder_prepare(struct oo_engine *engine);
/* Whether some of what is fed is in files, for which there are more threads: those end that no
 * weight needs any more. */
void oo__feeder_read(struct oo_engine *engine, int reads);
/* End the copy threads; nothing is fed any more. */
void oo__feeder_close(struct oo_engine *engine);

/* Queue the copy of a unit's parts to `address`, after which `ready` will be recorded; before those
 * that are queued already if it is urgent. The masters may be read until it has ended. */
enum oo_status oo__feed_begin(struct oo_engine *engine, uint32_t unit, uintptr_t address,
                              const struct oo_event *ready, int urgent);
/* Wait until `ready` is recorded. A failure is that of the copy threads, the same each time until
 * the unit's copy is forgotten. OO_OK where the unit was not fed. */
enum oo_status oo__feed_await(struct oo_engine *engine, uint32_t unit);
/* The same; `meanwhile` is called each time that a copy thread has done something. It must not stop
 * the unit's copy. */
enum oo_status oo__feed_await_with(struct oo_engine *engine, uint32_t unit,
                                   void (*meanwhile)(struct oo_engine *, void *), void *argument);
/* Stop copying the unit: when this returns no copy thread reads its masters. What has not been
 * copied never arrives. */
void oo__feed_stop(struct oo_engine *engine, uint32_t unit);
/* Stop it, and forget how it ended. */
void oo__feed_forget(struct oo_engine *engine, uint32_t unit);
/* Whether anything is fed now. */
int oo__feeds_run(const struct oo_engine *engine);
/* Wait for the event; copy threads go on meanwhile, in virtual time too. */
enum oo_status oo__feeds_go_on(struct oo_engine *engine, const struct oo_event *until);
/* Wait until nothing is fed. */
void oo__feeds_await(struct oo_engine *engine);
/* Count those that have ended. */
void oo__feeds_count(struct oo_engine *engine);

#endif
