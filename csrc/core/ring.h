/* ring.h - bytes that cannot be locked where they are pass through a small locked ring. */
#ifndef OO_RING_H
#define OO_RING_H

#include "state.h"

/* The events of a ring, which outlive its memory; oo__ring_free gives both back. */
enum oo_status oo__ring_open(struct oo_engine *engine, struct oo_ring *ring);
/* Have a ring, if the system locks memory for one: `base` shows it. */
enum oo_status oo__ring_prepare(struct oo_engine *engine, struct oo_ring *ring);
/* Another size, 0 for none. OO_E_LOCK_REFUSED: the ring is as it was. */
enum oo_status oo__ring_resize(struct oo_engine *engine, struct oo_ring *ring, size_t bytes);
size_t oo__ring_bytes(const struct oo_ring *ring);
enum oo_status oo__ring_download(struct oo_engine *engine, char *target, OOCUdeviceptr source,
                                 size_t bytes);
void oo__ring_free(struct oo_engine *engine, struct oo_ring *ring);

#endif
