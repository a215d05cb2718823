/* staging.h - coded weights on their way: a piece of staging memory, then a kernel that decodes. */
#ifndef OO_STAGING_H
#define OO_STAGING_H

#include "state.h"

/* Whether a driver call succeeded; a failure is kept for the code that reports it. */
int oo__works(struct oo_failure *failure, const char *call, OOCUresult result);

/* ---- before a copy: under the engine's mutex ---- */

/* Whether the unit's coded masters are what they were, and can pass: OO_E_STATE. */
enum oo_status oo__coded_check(struct oo_engine *engine, uint32_t unit);
/* Order what is copied next after the decode stream, if there are uses of free bytes that nothing
 * else orders: decodes of copies that failed or that were never used, and what that stream waits
 * for.
 */
enum oo_status oo__decodes_settle(struct oo_engine *engine);

/* ---- one part: by any thread ---- */

/* Timed events around a part's copy, and around what decodes it; NULL where it is not measured. */
struct oo_part_times {
    struct oo_event *copy_begin, *copy_end, *decode_begin, *decode_end;
};

/* Queue the copy of a locked part, or of a part of one weight, which is not measured, and what
 * decodes it. It may wait for a piece of staging memory. */
int oo__part_send(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                  const struct oo_part_times *times, struct oo_failure *failure);
/* A piece of staging memory for a coded part, out of the row of free ones; NULL: there is none so
 * large. Under the feeder's mutex. */
struct oo_staging_piece *oo__piece_next(struct oo_decoder *decoder, size_t bytes);
/* Whether there is one. Under the feeder's mutex. */
int oo__piece_is_free(const struct oo_decoder *decoder, size_t bytes);
/* Order the h2d stream so that what is queued on it next may write over the piece's bytes. */
int oo__piece_await(struct oo_engine *engine, struct oo_staging_piece *piece,
                    struct oo_failure *failure);
/* All of this; it may wait for other threads to give theirs back. NULL: `failure`. */
struct oo_staging_piece *oo__piece_take(struct oo_engine *engine, const struct oo_part *part,
                                        struct oo_failure *failure);
/* Queue the copy of a locked part to the piece, and what decodes it. */
int oo__piece_pass(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                   struct oo_staging_piece *piece, const struct oo_part_times *times,
                   struct oo_failure *failure);
/* The part's bytes are queued: decode them to `target` when they have come. */
int oo__piece_decode(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                     struct oo_staging_piece *piece, const struct oo_part_times *times,
                     struct oo_failure *failure);
void oo__piece_give(struct oo_engine *engine, struct oo_staging_piece *piece);
/* What a kernel makes of the part. */
size_t oo__decoded_bytes(const struct oo_part *part);
/* Record `ready` behind everything that is queued for a unit. */
int oo__arrival_record(struct oo_engine *engine, const struct oo_event *ready, int decodes,
                       struct oo_failure *failure);

/* ---- the memory ---- */

size_t oo__staging_bytes(const struct oo_engine *engine);
/* A record of memory that begins at `base`, and all that decodes; pieces may be used once it has
 * been put. */
enum oo_status oo__staging_create(struct oo_engine *engine, uintptr_t base, size_t bytes,
                                  struct oo_staging **lent);
void oo__staging_put(struct oo_engine *engine, struct oo_staging *lent);
/* NULL is allowed. */
void oo__staging_free(struct oo_engine *engine, struct oo_staging *lent);
/* Take back what came with the lease. No copy or decode is under way. */
enum oo_status oo__staging_remove(struct oo_engine *engine, uint32_t lease);
/* The decode stream and its event, on the way out. */
void oo__staging_close(struct oo_engine *engine);

#endif
