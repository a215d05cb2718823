/* masters.h - host memory that masters are stored in: locked for the device, and forgotten
 * again. */
#ifndef OO_MASTERS_H
#define OO_MASTERS_H

#include "state.h"

/* The memory of which these bytes are part, NULL when the engine does not know it. */
const struct oo_known *oo__known_memory(const struct oo_engine *engine, const void *address,
                                        size_t bytes);
/* Whether memory alone has these bytes: they are in no file, or code of this process has written
 * them. -1: that is not known, or they are not all there any more. */
int oo__in_memory(const struct oo_engine *engine, const void *address, size_t bytes);
/* Whether all these bytes, which are in the memory (NULL: in none), are page-locked. */
int oo__is_locked(const struct oo_known *memory, const void *address, size_t bytes);
/* Note what of files that is kept in `host` the device may read there, as far as `memory` says;
 * nothing of it (NULL). */
void oo__kept_note(struct oo_engine *engine, const struct oo_host *host,
                   const struct oo_known *memory);

#endif
