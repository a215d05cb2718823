/* plan.h - what to fetch, what to evict, where to put it. Pure: numbers in, decisions out.
 *
 * The plan keeps a trace of visits (unit, kind) and predicts that what followed the longest
 * matching piece of the past will follow again. From that prediction comes each unit's next use,
 * measured in visits; fetches go in order of next use, evictions take what is needed furthest in
 * the future (Belady's rule), and a fetch never evicts what is needed before it. A wrong prediction
 * costs a late copy, never a wrong result.
 *
 * Each unit has a place in the arena: places follow the order of a forward pass, like a tape, one
 * after the other and around the arena as often as it takes. Training goes forward and back, so the
 * arena then is a window that slides over the weights: what comes in at one end finds its place
 * where the unit that went out of use longest ago was, and units of different sizes leave no holes
 * between them. Where it holds less than two checkpointed blocks, a backward has other places: it
 * piles up its blocks. Where some units are on a disk, there are two tapes: what is in memory can
 * come late, and has a small part of the arena.
 */
#ifndef OO_PLAN_H
#define OO_PLAN_H

#include "arena.h"
#include "oracle_offload.h"

struct oo_plan;

enum oo_status oo_plan_create(struct oo_plan **out);
void oo_plan_destroy(struct oo_plan *plan);
struct oo_arena *oo_plan_arena(struct oo_plan *plan);

/* Unit ids are dense, in order of creation: that order is the guess before any trace exists. */
enum oo_status oo_plan_unit_add(struct oo_plan *plan, size_t bytes, uint32_t *unit);
/* The unit is gone: never fetched again. It must not be resident. */
void oo_plan_unit_remove(struct oo_plan *plan, uint32_t unit);
/* Whether the unit may be fetched ahead of its use (1 at first). */
void oo_plan_allow(struct oo_plan *plan, uint32_t unit, int ahead);
/* Whether a copy of the unit is read from a disk (0 at first). */
void oo_plan_far(struct oo_plan *plan, uint32_t unit, int far);
/* A pinned unit is not evicted; pins nest. */
void oo_plan_pin(struct oo_plan *plan, uint32_t unit);
void oo_plan_unpin(struct oo_plan *plan, uint32_t unit);
uint32_t oo_plan_pins(const struct oo_plan *plan, uint32_t unit);

/* A unit is used now. Each of its members' uses is a visit of its own: between them the unit is
 * needed at once again, and must not look as if it were done with. */
void oo_plan_visit(struct oo_plan *plan, uint32_t unit, enum oo_kind kind);
/* As if this sweep had just been made twice: an earlier run has learned it. */
void oo_plan_expect(struct oo_plan *plan, const struct oo_visit *visits, size_t count);
/* Whether to measure from here to the next visit: a forward that this run has made before, since a
 * first one pays for more than itself, and few times, then now and then; once until all others that
 * are used with it have been. */
int oo_plan_wants_seconds(const struct oo_plan *plan);
/* Such a measurement of the unit begins; or it was given up. */
void oo_plan_measures(struct oo_plan *plan, uint32_t unit, int begins);
/* What was measured, as it comes: seconds from the begin of the unit's forward to the next visit,
 * without waits for copies; and copies of so many bytes of units, as they are in the arena. Rounds
 * alone go by them, once both are known. */
void oo_plan_took(struct oo_plan *plan, uint32_t unit, double seconds);
void oo_plan_copied(struct oo_plan *plan, uint32_t unit, size_t bytes, double seconds);
/* What an earlier run has measured, which counts until it is measured here. */
void oo_plan_expect_seconds(struct oo_plan *plan, uint32_t unit, double seconds);
void oo_plan_expect_link(struct oo_plan *plan, double bps);
/* What is known by now; 0: nothing. */
double oo_plan_seconds(const struct oo_plan *plan, uint32_t unit);
double oo_plan_link_bps(const struct oo_plan *plan);
/* The visits that are remembered: numbers from the first one to the one before the end. */
uint64_t oo_plan_first_visit(const struct oo_plan *plan);
uint64_t oo_plan_end_of_visits(const struct oo_plan *plan);
struct oo_visit oo_plan_visit_at(const struct oo_plan *plan, uint64_t number);
/* Visits since the unit's last one, which counts. */
uint64_t oo_plan_since(const struct oo_plan *plan, uint32_t unit);
/* Visits from now until the unit's next use; OO_NEVER when the prediction has none. */
uint64_t oo_plan_next_use(const struct oo_plan *plan, uint32_t unit);
/* Largest run of distinct bytes between a unit's recompute and its backward: one checkpointed
 * block. */
size_t oo_plan_block_bytes(const struct oo_plan *plan);

/* The block a unit occupies, NULL when it is not resident. */
struct oo_block *oo_plan_resident(const struct oo_plan *plan, uint32_t unit);
/* Where to put `unit` now that it is needed at once. 0: everything that could make place is pinned.
 */
int oo_plan_place(struct oo_plan *plan, uint32_t unit, struct oo_window *window);
/* The next unit of these tapes that is worth fetching ahead, and where to. 0: none now. */
enum { OO_TAPES = 3 };
int oo_plan_next_fetch(struct oo_plan *plan, int tapes, uint32_t *unit, struct oo_window *window);
/* Which of them it is on. */
int oo_plan_tape(const struct oo_plan *plan, uint32_t unit);
/* The next unit that has to leave: after samples, or where the tape was laid again, a unit that is
 * where others have their places. It has to be dropped. 0: none. */
int oo_plan_next_drop(struct oo_plan *plan, uint32_t *unit);
/* Carry out a placement: the window's occupants stop being resident, the unit is. */
struct oo_block *oo_plan_take(struct oo_plan *plan, uint32_t unit, const struct oo_window *window);
/* The unit leaves the arena. */
void oo_plan_drop(struct oo_plan *plan, uint32_t unit);
/* Host records created so far; flat in the steady state. */
uint64_t oo_plan_allocations(const struct oo_plan *plan);

#endif
