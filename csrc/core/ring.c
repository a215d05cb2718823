/* ring.c - bytes that cannot be locked where they are pass through a small locked ring. */
#include "ring.h"
#include "../base/os.h"
#include "simulated.h"
#include "timing.h"

#include <string.h>

size_t oo__ring_bytes(const struct oo_ring *ring) {
    return ring->base ? OO_RING_PIECES * ring->piece_bytes : 0;
}

enum oo_status oo__ring_open(struct oo_engine *engine, struct oo_ring *ring) {
    enum oo_status status = OO_OK;
    for (int i = 0; i < OO_RING_PIECES; i++)
        OO_TRY(oo__event_take(engine, OO_ORDERS, &ring->busy[i]));
done:
    return status;
}

static enum oo_status oo__ring_allocate(struct oo_engine *engine, size_t piece_bytes, void **base) {
    /* The driver touches the pages on the calling thread. */
    struct oo_binding *binding = oo__thread_bind(engine->sys, engine->numa_node);
    const enum oo_status status = OO_DRIVE(
        engine, cuMemHostAlloc, base, OO_RING_PIECES * piece_bytes, OOCU_MEMHOSTALLOC_PORTABLE);
    oo__thread_unbind(binding);
    if (status != OO_E_DRIVER)
        return status;
    engine->stats.lock_refusals++;
    return OO_E_LOCK_REFUSED;
}

static void oo__ring_set(struct oo_engine *engine, struct oo_ring *ring, char *base,
                         size_t piece_bytes) {
    ring->base = base;
    ring->piece_bytes = piece_bytes;
    ring->refused = 0;
    oo__label(engine, base, OO_RING_PIECES * piece_bytes,
              ring == &engine->up ? "upload ring" : "download ring", OO_NO_UNIT);
    engine->stats.allocations++;
}

enum oo_status oo__ring_prepare(struct oo_engine *engine, struct oo_ring *ring) {
    void *base = NULL;
    if (ring->base || ring->refused)
        return OO_OK;
    const enum oo_status status = oo__ring_allocate(engine, oo__ring_piece_bytes, &base);
    if (status == OO_OK)
        oo__ring_set(engine, ring, base, oo__ring_piece_bytes);
    ring->refused = status == OO_E_LOCK_REFUSED;
    return ring->refused ? OO_OK : status;
}

static enum oo_status oo__ring_give_back(struct oo_engine *engine, struct oo_ring *ring) {
    enum oo_status status = OO_OK;
    if (ring->base) {
        /* H7: no copy may still use pages that are given back. */
        OO_TRY(oo__synchronize(engine, ring == &engine->up ? engine->h2d : engine->d2h, 0));
        OO_GIVE_BACK(engine, cuMemFreeHost, ring->base);
        ring->base = NULL;
    }
done:
    return status;
}

enum oo_status oo__ring_resize(struct oo_engine *engine, struct oo_ring *ring, size_t bytes) {
    enum oo_status status = OO_OK;
    void *base = NULL;
    const size_t page = oo__page_bytes(), piece_bytes = bytes / OO_RING_PIECES / page * page;
    const size_t has = oo__ring_bytes(ring), shall_have = OO_RING_PIECES * piece_bytes;
    ring->refused = bytes != 0; /* so that a copy asks for none where this ends without one */
    if (has == shall_have)
        return OO_OK;
    if (shall_have < has) /* a smaller one may find no room next to it */
        OO_TRY(oo__ring_give_back(engine, ring));
    if (piece_bytes) {
        status = oo__ring_allocate(engine, piece_bytes, &base);
        if (status != OO_OK)
            return status;
        status = oo__ring_give_back(engine, ring);
        if (status == OO_OK)
            oo__ring_set(engine, ring, base, piece_bytes);
        else
            OO_GIVE_BACK(engine, cuMemFreeHost, base);
    }
done:
    return status;
}

enum oo_status oo__ring_download(struct oo_engine *engine, char *target, OOCUdeviceptr source,
                                 size_t bytes) {
    struct oo_ring *ring = &engine->down;
    enum oo_status status;
    OO_TRY(oo__ring_prepare(engine, ring));
    if (!ring->base) { /* the caller waits for its arrival */
        oo__expect_pageable(engine, target);
        return OO_DRIVE(engine, cuMemcpyDtoHAsync, target, source, bytes, engine->d2h);
    }
    const size_t piece_bytes = ring->piece_bytes;
    const size_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
    /* Copies run OO_RING_PIECES ahead of the host that empties the ring behind them. */
    for (size_t i = 0; i < pieces + OO_RING_PIECES; i++) {
        const unsigned piece = (unsigned)(i % OO_RING_PIECES);
        char *staging = ring->base + piece * piece_bytes;
        if (i >= OO_RING_PIECES) {
            const size_t begin = (i - OO_RING_PIECES) * piece_bytes;
            const size_t step = bytes - begin < piece_bytes ? bytes - begin : piece_bytes;
            /* H8: the piece's bytes may not have arrived. */
            OO_TRY(oo__event_await(engine, ring->busy[piece]));
            OO_TRY(oo__host_access(engine, staging, step, 0));
            memcpy(target + begin, staging, step);
        }
        if (i < pieces) {
            const size_t begin = i * piece_bytes;
            const size_t step = bytes - begin < piece_bytes ? bytes - begin : piece_bytes;
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
