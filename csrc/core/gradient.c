/* gradient.c - gradients of trainable weights, from the device to the host. */
#include "call.h"
#include "copies.h"
#include "journal.h"
#include "masters.h"
#include "ring.h"
#include "simulated.h"
#include "timing.h"
#include "trip.h"

enum oo_status oo_engine_download(struct oo_engine *engine, void *target, uintptr_t source,
                                  size_t bytes, uintptr_t stream_handle) {
    const OOCUstream stream = (OOCUstream)stream_handle;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_known *memory = oo__known_memory(engine, target, bytes);
    const uint64_t awaited = oo__awaited_by(engine, stream);
    struct oo_event *computed = NULL, *begin = NULL, *arrived = NULL;
    int adopted = 0, in_flight = 0;
    if (bytes == 0)
        goto done;
    if (!target || bytes > UINTPTR_MAX - (uintptr_t)target || bytes > UINTPTR_MAX - source) {
        status = oo__fail(OO_E_ARGUMENT, "there are no %zu bytes at %p to download to, or at %#zx",
                          bytes, target, (size_t)source);
        goto done;
    }
    OO_TRY(oo__event_take(engine, OO_ORDERS, &computed));
    if (oo__is_measured(engine, OO_TRACE_D2H))
        OO_TRY(oo__event_take(engine, OO_TIMED, &begin));
    OO_TRY(oo__event_take(engine, begin ? OO_TIMED : OO_ORDERS, &arrived));
    OO_TRY(oo__finish_download(engine));
    if (!oo__device_has(engine, source, bytes)) {
        OO_TRY(oo__adopt(engine, source, bytes, OOSIM_ADOPT_KEEP, stream));
        adopted = 1;
    }
    oo__label(engine, (const void *)source, bytes, "gradient", OO_NO_UNIT);
    /* H6: the copy starts after the work that computes the gradient. */
    OO_TRY(OO_DRIVE(engine, cuEventRecord, computed->handle, stream));
    OO_TRY(OO_DRIVE(engine, cuStreamWaitEvent, engine->d2h, computed->handle, 0));
    if (begin)
        OO_TRY(OO_DRIVE(engine, cuEventRecord, begin->handle, engine->d2h));
    if (oo__is_locked(memory, target, bytes))
        OO_TRY(OO_DRIVE(engine, cuMemcpyDtoHAsync, target, source, bytes, engine->d2h));
    else
        OO_TRY(oo__ring_download(engine, target, source, bytes));
    OO_TRY(OO_DRIVE(engine, cuEventRecord, arrived->handle, engine->d2h));
    engine->stats.d2h_bytes += bytes;
    engine->stats.d2h_copies++;
    oo__journal(engine, OO_DEED_COPY_OUT, OO_NO_UNIT, bytes, 0);
    engine->stats.host_waits++;
    /* H8: the caller shows the bytes to autograd, which reads them at once. */
    OO_TRY(OO_DRIVE(engine, cuEventSynchronize, arrived->handle));
    oo__note_ended(engine, awaited);
    OO_TRY(oo__host_access(engine, target, bytes, 0));
    if (begin) {
        oo__span_add(engine, OO_TRACE_D2H, OO_NO_UNIT, bytes, begin, arrived);
        begin = arrived = NULL;
    }
done:
    if (status != OO_OK && engine->usable && computed) {
        /* H4: the source goes back to torch, so that no copy from it may stay queued. Keeps the
         * message of what failed first. */
        engine->stats.host_waits++;
        engine->stats.recoveries++;
        in_flight = oo__note(engine, "cuStreamSynchronize",
                             engine->driver.cuStreamSynchronize(engine->d2h)) != OO_OK;
        engine->unwaited |= in_flight != 0;
    }
    if (adopted && (in_flight || oo__disown(engine, source) != OOCU_SUCCESS))
        engine->unfinished = source;
    oo__event_give(engine, computed);
    oo__event_give(engine, begin);
    oo__event_give(engine, arrived);
    oo__leave(engine);
    return status;
}
