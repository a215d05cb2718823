/* ring.c - bytes that cannot be locked where they are pass through a small locked ring. */
#include "ring.h"
#include "simulated.h"
#include "timing.h"

#include <string.h>

enum oo_status oo__ring_prepare(struct oo_engine *engine, struct oo_ring *ring) {
    enum oo_status status = OO_OK;
    if (!ring->base) {
        void *base = NULL;
        OO_TRY(OO_DRIVE(engine, cuMemHostAlloc, &base, OO_RING_PIECES * oo__ring_piece_bytes,
                        OOCU_MEMHOSTALLOC_PORTABLE));
        ring->base = base;
        oo__label(engine, base, OO_RING_PIECES * oo__ring_piece_bytes,
                  ring == &engine->up ? "upload ring" : "download ring", OO_NO_UNIT);
        engine->stats.allocations++;
    }
    for (int i = 0; i < OO_RING_PIECES; i++)
        if (!ring->busy[i])
            OO_TRY(oo__event_take(engine, OO_ORDERS, &ring->busy[i]));
done:
    return status;
}

/* Wait on the host for the copy that used a piece last. */
static enum oo_status oo__ring_wait(struct oo_engine *engine, const struct oo_event *copied) {
    const OOCUresult ended = engine->driver.cuEventQuery(copied->handle);
    if (ended != OOCU_ERROR_NOT_READY)
        return oo__check(engine, "cuEventQuery", ended);
    engine->stats.host_waits++;
    return OO_DRIVE(engine, cuEventSynchronize, copied->handle);
}

enum oo_status oo__ring_upload(struct oo_engine *engine, OOCUdeviceptr target, const char *source,
                               size_t bytes) {
    struct oo_ring *ring = &engine->up;
    enum oo_status status;
    OO_TRY(oo__ring_prepare(engine, ring));
    for (size_t begin = 0; begin < bytes; begin += oo__ring_piece_bytes) {
        const size_t step =
            bytes - begin < oo__ring_piece_bytes ? bytes - begin : oo__ring_piece_bytes;
        const unsigned piece = ring->next++ % OO_RING_PIECES;
        char *staging = ring->base + piece * oo__ring_piece_bytes;
        /* H5: a queued copy may still read what this piece held. */
        if (ring->lost[piece])
            OO_TRY(oo__synchronize(engine, engine->h2d, 1));
        else
            OO_TRY(oo__ring_wait(engine, ring->busy[piece]));
        OO_TRY(oo__host_access(engine, staging, step, 1));
        memcpy(staging, source + begin, step);
        ring->lost[piece] = 1; /* until the copy's end is marked */
        OO_TRY(OO_DRIVE(engine, cuMemcpyHtoDAsync, target + begin, staging, step, engine->h2d));
        OO_TRY(OO_DRIVE(engine, cuEventRecord, ring->busy[piece]->handle, engine->h2d));
        ring->lost[piece] = 0;
    }
done:
    return status;
}

enum oo_status oo__ring_download(struct oo_engine *engine, char *target, OOCUdeviceptr source,
                                 size_t bytes) {
    struct oo_ring *ring = &engine->down;
    enum oo_status status;
    OO_TRY(oo__ring_prepare(engine, ring));
    const size_t pieces = (bytes + oo__ring_piece_bytes - 1) / oo__ring_piece_bytes;
    /* Copies run OO_RING_PIECES ahead of the host that empties the ring behind them. */
    for (size_t i = 0; i < pieces + OO_RING_PIECES; i++) {
        const unsigned piece = (unsigned)(i % OO_RING_PIECES);
        char *staging = ring->base + piece * oo__ring_piece_bytes;
        if (i >= OO_RING_PIECES) {
            const size_t begin = (i - OO_RING_PIECES) * oo__ring_piece_bytes;
            const size_t step =
                bytes - begin < oo__ring_piece_bytes ? bytes - begin : oo__ring_piece_bytes;
            /* H8: the piece's bytes may not have arrived. */
            OO_TRY(oo__ring_wait(engine, ring->busy[piece]));
            OO_TRY(oo__host_access(engine, staging, step, 0));
            memcpy(target + begin, staging, step);
        }
        if (i < pieces) {
            const size_t begin = i * oo__ring_piece_bytes;
            const size_t step =
                bytes - begin < oo__ring_piece_bytes ? bytes - begin : oo__ring_piece_bytes;
            OO_TRY(OO_DRIVE(engine, cuMemcpyDtoHAsync, staging, source + begin, step, engine->d2h));
            OO_TRY(OO_DRIVE(engine, cuEventRecord, ring->busy[piece]->handle, engine->d2h));
        }
    }
done:
    return status;
}

void oo__ring_free(struct oo_engine *engine, struct oo_ring *ring) {
    if (ring->base && engine->usable)
        OO_GIVE_BACK(engine, cuMemFreeHost, ring->base);
    ring->base = NULL;
    for (int i = 0; i < OO_RING_PIECES; i++) {
        oo__event_give(engine, ring->busy[i]);
        ring->busy[i] = NULL;
    }
}
