/* staging.c - coded weights pass through a little device memory, and are decoded into the arena.
 *
 * A chunk is copied into a piece of staging memory on the h2d stream; the decode stream waits for
 * it and launches the kernel that writes the weights where they belong. Pieces are used in turn, so
 * that copies go on while kernels decode what has come.
 *
 * Which pieces are free is the feeder's mutex's to protect: the thread that trains and the copy
 * threads both take them. A thread that has one needs no other to give it back. */
#include "staging.h"
#include "../base/os.h"
#include "call.h"
#include "feed.h"
#include "host.h"
#include "kernels.h"
#include "simulated.h"
#include "timing.h"

#include <stdlib.h>
#include <string.h>

static const double oo__idle_s = 3600; /* a thread that waits is woken; a clock needs an end */

int oo__works(struct oo_failure *failure, const char *call, OOCUresult result) {
    if (result != OOCU_SUCCESS)
        *failure = (struct oo_failure){.call = call, .result = result};
    return result == OOCU_SUCCESS;
}

/* ---- before a copy ---- */

static size_t oo__largest_piece(const struct oo_engine *engine) {
    size_t largest = 0;
    for (const struct oo_staging *lent = engine->decoder.lent; lent; lent = lent->next)
        if (lent->piece_bytes > largest)
            largest = lent->piece_bytes;
    return largest;
}

static int oo__is_in_file(const struct oo_part *part) {
    return part->memory && part->memory->host->disk;
}

static enum oo_status oo__part_check(const struct oo_engine *engine, uint32_t id,
                                     const struct oo_part *part) {
    const size_t skipped = oo_codec_skipped(&part->header);
    const char *chunk = part->host - skipped;
    if (part->header.mode == 0)
        return OO_OK;
    /* Of a file the state is compared after each read: looking at its bytes here reads them. */
    if (!oo__is_in_file(part) && memcmp(chunk, &part->header, sizeof part->header) != 0)
        return oo__fail(OO_E_STATE,
                        "a coded master of unit %u is damaged: the header of its chunk at %p is "
                        "not what it was when the unit was added; coded weights cannot be "
                        "rewritten in place",
                        id, (const void *)chunk);
    if (engine->verify && oo_codec_check(chunk, part->bytes + skipped) != OO_OK)
        return oo__fail(OO_E_STATE,
                        "a coded master of unit %u is damaged: the checksum of its chunk at %p is "
                        "not that of its bytes; load the weights again",
                        id, (const void *)chunk);
    if (part->header.mode == OO_CODEC_TIERS && part->bytes > oo__largest_piece(engine))
        return oo__fail(OO_E_STATE,
                        "a coded chunk of unit %u takes %zu bytes, and the largest piece of "
                        "staging memory has %zu: lend more by oo_staging_add",
                        id, part->bytes, oo__largest_piece(engine));
    return OO_OK;
}

enum oo_status oo__coded_check(struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    enum oo_status status = OO_OK;
    for (uint32_t i = 0; i < unit->n_parts && status == OO_OK; i++)
        status = oo__part_check(engine, id, &unit->parts[i]);
    return status;
}

enum oo_status oo__decodes_settle(struct oo_engine *engine) {
    struct oo_decoder *decoder = &engine->decoder;
    enum oo_status status = OO_OK;
    if (!decoder->loose)
        return OO_OK;
    /* H13: a kernel may still decode into bytes that are free by now, or read what was there. */
    OO_TRY(OO_DRIVE(engine, cuEventRecord, decoder->tail->handle, decoder->stream));
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->h2d, decoder->tail->handle, 0));
    decoder->loose = 0;
done:
    return status;
}

/* ---- one part ---- */

/* Where the first free piece that is large enough is linked: the one that was used longest ago. */
static struct oo_staging_piece **oo__piece_link(struct oo_staging_piece **link, size_t bytes) {
    while (*link && (*link)->bytes < bytes)
        link = &(*link)->next;
    return link;
}

struct oo_staging_piece *oo__piece_next(struct oo_decoder *decoder, size_t bytes) {
    struct oo_staging_piece **link = oo__piece_link(&decoder->free_first, bytes);
    struct oo_staging_piece *piece = *link;
    if (piece)
        *link = piece->next;
    return piece;
}

int oo__piece_is_free(const struct oo_decoder *decoder, size_t bytes) {
    struct oo_staging_piece *first = decoder->free_first;
    return *oo__piece_link(&first, bytes) != NULL;
}

/* Back into the row, as its last. */
static void oo__piece_put(struct oo_decoder *decoder, struct oo_staging_piece *piece) {
    struct oo_staging_piece **link = &decoder->free_first;
    while (*link)
        link = &(*link)->next;
    piece->next = NULL;
    *link = piece;
}

void oo__piece_give(struct oo_engine *engine, struct oo_staging_piece *piece) {
    oo__mutex_lock(engine->feeder.mutex);
    oo__piece_put(&engine->decoder, piece);
    oo__mutex_wake(engine->feeder.mutex);
    oo__mutex_unlock(engine->feeder.mutex);
}

int oo__piece_await(struct oo_engine *engine, struct oo_staging_piece *piece,
                    struct oo_failure *failure) {
    /* H12: a kernel may still decode what the piece held. Where its end could not be marked it is
     * marked now, behind whatever has been queued since. */
    return (!piece->lost || oo__works(failure, "cuEventRecord",
                                      engine->driver.cuEventRecord(piece->decoded->handle,
                                                                   engine->decoder.stream))) &&
           oo__works(failure, "cuStreamWaitEvent",
                     engine->driver.cuStreamWaitEvent(engine->h2d, piece->decoded->handle, 0));
}

struct oo_staging_piece *oo__piece_take(struct oo_engine *engine, const struct oo_part *part,
                                        struct oo_failure *failure) {
    struct oo_staging_piece *piece;
    oo__mutex_lock(engine->feeder.mutex);
    /* There is one that is large enough: oo__coded_check has seen it, and it goes only when
     * nothing is fed. */
    while (!(piece = oo__piece_next(&engine->decoder, part->bytes)))
        oo__mutex_wait(engine->feeder.mutex, oo__clock_s() + oo__idle_s);
    oo__mutex_unlock(engine->feeder.mutex);
    if (oo__piece_await(engine, piece, failure))
        return piece;
    oo__piece_give(engine, piece);
    return NULL;
}

static OOCUresult oo__launch_decode(struct oo_engine *engine, const struct oo_part *part,
                                    uintptr_t target, const struct oo_staging_piece *piece) {
    enum { WEIGHTS = 8 * OO_CODEC_BLOCK, THREADS = 256 }; /* of a group: a warp for each block */
    const struct oo_decoder *decoder = &engine->decoder;
    struct oo_codec_header header = part->header;
    OOCUdeviceptr chunk = piece->address, weights = target;
    uint32_t low_bits = header.low_bits, rotate = header.kind == OO_CODEC_FP8;
    void *parameters[] = {&chunk,         &weights,  &header.count, &header.tail_words,
                          header.palette, &low_bits, &rotate};
    return engine->driver.cuLaunchKernel(header.kind == OO_CODEC_BF16 ? decoder->decode_bf16
                                                                      : decoder->decode_bytes,
                                         (header.count + WEIGHTS - 1) / WEIGHTS, 1, 1, THREADS, 1,
                                         1, 0, decoder->stream, parameters, NULL);
}

static int oo__time_record(struct oo_engine *engine, const struct oo_event *event,
                           OOCUstream stream, struct oo_failure *failure) {
    return !event ||
           oo__works(failure, "cuEventRecord", engine->driver.cuEventRecord(event->handle, stream));
}

int oo__piece_decode(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                     struct oo_staging_piece *piece, const struct oo_part_times *times,
                     struct oo_failure *failure) {
    const struct oo_decoder *decoder = &engine->decoder;
    /* H11: the kernel reads what the copy brings. */
    if (!oo__works(failure, "cuEventRecord",
                   engine->driver.cuEventRecord(piece->arrived->handle, engine->h2d)) ||
        !oo__works(failure, "cuStreamWaitEvent",
                   engine->driver.cuStreamWaitEvent(decoder->stream, piece->arrived->handle, 0)))
        return 0;
    if (!oo__time_record(engine, times->decode_begin, decoder->stream, failure))
        return 0;
    piece->lost = 1; /* until the kernel's end is marked */
    if (!oo__works(failure, "cuLaunchKernel", oo__launch_decode(engine, part, target, piece)) ||
        !oo__works(failure, "cuEventRecord",
                   engine->driver.cuEventRecord(piece->decoded->handle, decoder->stream)))
        return 0;
    piece->lost = 0;
    return oo__time_record(engine, times->decode_end, decoder->stream, failure);
}

/* One weight, many times; up to three bytes more, which no tensor has. */
static int oo__part_fill(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                         struct oo_failure *failure) {
    const struct oo_codec_header *header = &part->header;
    const int wide = header->kind == OO_CODEC_BF16;
    const uint32_t value = header->constant * (wide ? 0x00010001u : 0x01010101u);
    return oo__works(
        failure, "cuMemsetD32Async",
        engine->driver.cuMemsetD32Async(
            target, value, (header->count + (wide ? 1 : 3)) / (wide ? 2 : 4), engine->h2d));
}

static int oo__part_copy(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                         const struct oo_part_times *times, struct oo_failure *failure) {
    return oo__time_record(engine, times->copy_begin, engine->h2d, failure) &&
           oo__works(
               failure, "cuMemcpyHtoDAsync",
               engine->driver.cuMemcpyHtoDAsync(target, part->host, part->bytes, engine->h2d)) &&
           oo__time_record(engine, times->copy_end, engine->h2d, failure);
}

int oo__piece_pass(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                   struct oo_staging_piece *piece, const struct oo_part_times *times,
                   struct oo_failure *failure) {
    return oo__part_copy(engine, part, piece->address, times, failure) &&
           oo__piece_decode(engine, part, target, piece, times, failure);
}

int oo__part_send(struct oo_engine *engine, const struct oo_part *part, uintptr_t target,
                  const struct oo_part_times *times, struct oo_failure *failure) {
    if (part->header.mode == OO_CODEC_CONST)
        return oo__part_fill(engine, part, target, failure);
    if (part->header.mode != OO_CODEC_TIERS)
        return oo__part_copy(engine, part, target, times, failure);
    struct oo_staging_piece *piece = oo__piece_take(engine, part, failure);
    if (!piece)
        return 0;
    const int works = oo__piece_pass(engine, part, target, piece, times, failure);
    oo__piece_give(engine, piece);
    return works;
}

size_t oo__decoded_bytes(const struct oo_part *part) {
    const struct oo_codec_header *header = &part->header;
    return header->mode == OO_CODEC_TIERS
               ? header->count * oo_codec_weight_bytes((enum oo_codec_kind)header->kind)
               : 0;
}

int oo__arrival_record(struct oo_engine *engine, const struct oo_event *ready, int decodes,
                       struct oo_failure *failure) {
    const struct oo_decoder *decoder = &engine->decoder;
    if (!oo__works(failure, "cuEventRecord",
                   engine->driver.cuEventRecord(ready->handle, engine->h2d)))
        return 0;
    if (!decodes)
        return 1;
    /* H14: what is not decoded may come after all that is. */
    return oo__works(failure, "cuStreamWaitEvent",
                     engine->driver.cuStreamWaitEvent(decoder->stream, ready->handle, 0)) &&
           oo__works(failure, "cuEventRecord",
                     engine->driver.cuEventRecord(ready->handle, decoder->stream));
}

/* ---- the memory ---- */

size_t oo__staging_bytes(const struct oo_engine *engine) {
    size_t bytes = 0;
    for (const struct oo_staging *lent = engine->decoder.lent; lent; lent = lent->next)
        bytes += OO_STAGING_PIECES * lent->piece_bytes;
    return bytes;
}

/* The kernels, a stream for them, and the event that marks its tail. */
static enum oo_status oo__decoder_prepare(struct oo_engine *engine) {
    struct oo_decoder *decoder = &engine->decoder;
    enum oo_status status = OO_OK;
    int least, greatest;
    if (!engine->driver.cuMemsetD32Async)
        return oo__fail(OO_E_DRIVER_OLD, "this driver has no cuMemsetD32Async: coded weights "
                                         "cannot be decoded");
    OO_TRY(oo__kernel_load(engine, "decode_bf16", &decoder->decode_bf16));
    OO_TRY(oo__kernel_load(engine, "decode_bytes", &decoder->decode_bytes));
    if (!decoder->tail)
        OO_TRY(oo__event_take(engine, OO_ORDERS, &decoder->tail));
    if (!decoder->stream) {
        OO_TRY(OO_DRIVE(engine, cuCtxGetStreamPriorityRange, &least, &greatest));
        OO_TRY(OO_DRIVE(engine, cuStreamCreateWithPriority, &decoder->stream,
                        OOCU_STREAM_NON_BLOCKING, greatest));
        oo__label_stream(engine, decoder->stream, "decode");
    }
done:
    return status;
}

void oo__staging_free(struct oo_engine *engine, struct oo_staging *lent) {
    for (int i = 0; lent && i < OO_STAGING_PIECES; i++) {
        oo__event_give(engine, lent->pieces[i].arrived);
        oo__event_give(engine, lent->pieces[i].decoded);
    }
    free(lent);
}

enum oo_status oo__staging_create(struct oo_engine *engine, uintptr_t base, size_t bytes,
                                  struct oo_staging **out) {
    enum oo_status status;
    OO_TRY(oo__decoder_prepare(engine));
    struct oo_staging *lent = *out = calloc(1, sizeof *lent);
    if (!lent)
        return oo__fail(OO_E_MEMORY, "no memory for a record of staging memory");
    engine->stats.allocations++;
    lent->piece_bytes = bytes / OO_STAGING_PIECES / OO_ALIGNMENT * OO_ALIGNMENT;
    for (unsigned i = 0; i < OO_STAGING_PIECES; i++) {
        struct oo_staging_piece *piece = &lent->pieces[i];
        piece->address = base + i * lent->piece_bytes;
        piece->bytes = lent->piece_bytes;
        OO_TRY(oo__event_take(engine, OO_ORDERS, &piece->arrived));
        OO_TRY(oo__event_take(engine, OO_ORDERS, &piece->decoded));
    }
done:
    return status;
}

void oo__staging_put(struct oo_engine *engine, struct oo_staging *lent) {
    oo__label(engine, (const void *)lent->pieces[0].address, OO_STAGING_PIECES * lent->piece_bytes,
              "staging memory", OO_NO_UNIT);
    oo__mutex_lock(engine->feeder.mutex);
    for (int i = 0; i < OO_STAGING_PIECES; i++)
        oo__piece_put(&engine->decoder, &lent->pieces[i]);
    lent->next = engine->decoder.lent;
    engine->decoder.lent = lent;
    oo__mutex_unlock(engine->feeder.mutex);
}

static int oo__is_of(const struct oo_staging *lent, const struct oo_staging_piece *piece) {
    return piece >= lent->pieces && piece < lent->pieces + OO_STAGING_PIECES;
}

enum oo_status oo__staging_remove(struct oo_engine *engine, uint32_t lease) {
    struct oo_staging **link = &engine->decoder.lent;
    while (*link) {
        struct oo_staging *lent = *link;
        if (lent->lease != lease) {
            link = &lent->next;
            continue;
        }
        enum oo_status status = oo__check(engine, "simDrop", oo__disown(engine, lent->address));
        if (status != OO_OK)
            return status;
        oo__mutex_lock(engine->feeder.mutex);
        struct oo_staging_piece **free_link = &engine->decoder.free_first;
        while (*free_link)
            if (oo__is_of(lent, *free_link))
                *free_link = (*free_link)->next;
            else
                free_link = &(*free_link)->next;
        *link = lent->next;
        oo__mutex_unlock(engine->feeder.mutex);
        oo__staging_free(engine, lent);
    }
    return OO_OK;
}

void oo__staging_close(struct oo_engine *engine) {
    if (engine->decoder.stream && engine->usable)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->decoder.stream);
    engine->decoder.stream = NULL;
    oo__event_give(engine, engine->decoder.tail);
    engine->decoder.tail = NULL;
}
