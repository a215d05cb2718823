/* call.c - enter, leave, and the results of driver calls; see call.h. */
#include "call.h"

#include "../base/os.h"
#include "copies.h"

#include <stdio.h>

enum oo_status oo__fail_dead(const struct oo_engine *engine) {
    return oo__fail_driver(
        OO_E_DEAD, engine->dead_call, engine->dead_code, engine->dead_name,
        "the GPU context was lost by an earlier error (%s); save what you need from host memory "
        "and restart the process",
        engine->dead_message);
}

static const double oo__loss_s = 1; /* without a context no call of a copy thread lasts so long */

/* A copy thread may have met the loss first, and be about to say so: its call is the one to name.
 */
static void oo__find_loss(struct oo_engine *engine, const char **call, OOCUresult *result) {
    struct oo_feeder *feeder = &engine->feeder;
    const double until_s = oo__clock_s() + oo__loss_s;
    oo__mutex_lock(feeder->mutex);
    while (feeder->n_active && oo__clock_s() < until_s)
        oo__mutex_wait(feeder->mutex, until_s);
    if (feeder->loss.call) {
        *call = feeder->loss.call;
        *result = feeder->loss.result;
    }
    oo__mutex_unlock(feeder->mutex);
}

enum oo_status oo__check(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return OO_OK;
    if (engine->dead != OO_OK) /* the first failure is the cause of this one */
        return oo__fail_dead(engine);
    if (oo_driver_is_sticky(result))
        oo__find_loss(engine, &call, &result);
    enum oo_status status = oo_driver_error(&engine->driver, call, result);
    if (oo_driver_is_sticky(result)) {
        const char *failed_call, *name;
        engine->dead = OO_E_DEAD;
        engine->usable = 0; /* for the rest of this call, too */
        oo_error_driver(&failed_call, &engine->dead_code, &name);
        snprintf(engine->dead_message, sizeof engine->dead_message, "%s", oo_error_message());
        snprintf(engine->dead_call, sizeof engine->dead_call, "%s", failed_call);
        snprintf(engine->dead_name, sizeof engine->dead_name, "%s", name);
        oo__append("; the GPU context is lost: save what you need from host memory and restart the "
                   "process");
    }
    return status;
}

enum oo_status oo__note(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return OO_OK;
    const struct oo_error first = oo__error_save();
    enum oo_status status = oo__check(engine, call, result);
    oo__error_restore(&first);
    return status;
}

void oo__note_leak(struct oo_engine *engine, const char *call, OOCUresult result) {
    if (result == OOCU_SUCCESS)
        return;
    const struct oo_error first = oo__error_save();
    (void)oo__check(engine, call, result);
    if (engine->n_leaked++ == 0)
        engine->first_leak = oo__error_save();
    oo__error_restore(&first);
}

/* The driver works on the calling thread's current context. Threads of autograd and of users may
 * have none. */
static enum oo_status oo__context_enter(struct oo_engine *engine) {
    OOCUcontext current = NULL;
    enum oo_status status = OO_DRIVE(engine, cuCtxGetCurrent, &current);
    if (status != OO_OK || current == engine->context)
        return status;
    status = OO_DRIVE(engine, cuCtxPushCurrent, engine->context);
    engine->context_pushed = status == OO_OK;
    return status;
}

enum oo_status oo__enter(struct oo_engine *engine, int flags) {
    if (oo__fork_guard_in_child(engine->guard))
        return oo__fail(
            OO_E_FORKED,
            "this process is a fork of the one that trains: the GPU belongs to the parent; "
            "do not use a managed model in a DataLoader worker");
    if (!(flags & OO_NONBLOCKING))
        oo__mutex_lock(engine->mutex);
    else if (!oo__mutex_try(engine->mutex))
        return OO_WOULD_BLOCK;
    /* Before the driver is asked for the context: the call that may wait asks for it. */
    if ((flags & OO_NONBLOCKING) && (flags & OO__QUEUES) && !oo__queue_has_room(engine, 1)) {
        oo__mutex_unlock(engine->mutex);
        return OO_WOULD_BLOCK;
    }
    const int drives = engine->dead == OO_OK && !(flags & OO__WITHOUT_DRIVER);
    enum oo_status status = drives ? oo__context_enter(engine) : OO_OK;
    engine->usable = drives && status == OO_OK;
    if (engine->dead != OO_OK && status == OO_OK && !(flags & OO__EVEN_DEAD)) {
        status = oo__fail_dead(engine);
        engine->death_reported = 1;
    }
    if ((flags & OO__EVEN_WITHOUT_CONTEXT) || (engine->dead != OO_OK && (flags & OO__EVEN_DEAD)))
        status = OO_OK;
    if (status != OO_OK)
        oo__mutex_unlock(engine->mutex);
    return status;
}

static void oo__context_leave(struct oo_engine *engine) {
    OOCUcontext popped;
    if (engine->context_pushed)
        OO_GIVE_BACK(engine, cuCtxPopCurrent, &popped);
    engine->context_pushed = 0;
}

void oo__leave(struct oo_engine *engine) {
    oo__context_leave(engine);
    oo__mutex_unlock(engine->mutex);
}

enum oo_status oo_engine_make_current(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    engine->context_pushed = 0; /* it stays */
    oo__leave(engine);
    return OO_OK;
}

void oo__wait_for_a_release(struct oo_engine *engine, double until_s) {
    oo__context_leave(engine);
    oo__mutex_wait(engine->mutex, until_s);
}

enum oo_status oo__refuse_capture(struct oo_engine *engine, OOCUstream stream) {
    int capturing = OOCU_STREAM_CAPTURE_STATUS_NONE;
    enum oo_status status = OO_DRIVE(engine, cuStreamIsCapturing, stream, &capturing);
    if (status != OO_OK)
        return status;
    return capturing == OOCU_STREAM_CAPTURE_STATUS_NONE
               ? OO_OK
               : oo__fail(OO_E_CAPTURE, "offloaded layers cannot be captured into a CUDA graph: "
                                        "their addresses change; exclude them with ignore_modules "
                                        "or do not capture");
}

enum oo_status oo__synchronize(struct oo_engine *engine, OOCUstream stream, int recovering) {
    engine->stats.host_waits++;
    engine->stats.recoveries += recovering != 0;
    return OO_DRIVE(engine, cuStreamSynchronize, stream);
}

static void oo__flush_stream(struct oo_engine *engine, OOCUstream stream) {
    const OOCUresult result = engine->driver.cuStreamQuery(stream);
    if (result != OOCU_ERROR_NOT_READY)
        (void)oo__note(engine, "cuStreamQuery", result);
}

void oo__flush_home(struct oo_engine *engine) {
    if (engine->submits_late)
        oo__flush_stream(engine, engine->d2h);
}

void oo__flush(struct oo_engine *engine) {
    if (!engine->submits_late)
        return;
    oo__flush_stream(engine, engine->h2d);
    if (engine->decoder.stream)
        oo__flush_stream(engine, engine->decoder.stream);
}
