/* device.c - an engine from its creation to its end, and what it says of its device. */
#include "device.h"

#include "../base/os.h"
#include "call.h"
#include "feed.h"
#include "journal.h"
#include "kernels.h"
#include "model.h"
#include "ring.h"
#include "simulated.h"
#include "staging.h"
#include "timing.h"
#include "trip.h"
#include "uses.h"

#include <stdlib.h>

static const double oo__patience_s = 60, oo__kept_patience_s = 5;

static enum oo_status oo__open_device(struct oo_engine *engine, int ordinal) {
    enum oo_status status;
    int count = 0;
    OO_TRY(OO_DRIVE(engine, cuDeviceGetCount, &count));
    if (ordinal < 0 || ordinal >= count)
        return oo__fail(OO_E_NO_DEVICE, "device %d was asked for; the driver has %d (0 to %d)",
                        ordinal, count, count - 1);
    OO_TRY(OO_DRIVE(engine, cuDeviceGet, &engine->device, ordinal));
    OO_TRY(OO_DRIVE(engine, cuDeviceGetName, engine->device_name, (int)sizeof engine->device_name,
                    engine->device));
    OO_TRY(OO_DRIVE(engine, cuDeviceGetPCIBusId, engine->pci_id, (int)sizeof engine->pci_id,
                    engine->device));
    OO_TRY(OO_DRIVE(engine, cuDevicePrimaryCtxRetain, &engine->context, engine->device));
done:
    return status;
}

/* A card in TCC mode has no display, and is driven past Windows' display driver model. */
static void oo__ask_submission(struct oo_engine *engine) {
    int late = 0, tcc = 0;
    if (oo__simulates_submission(engine, &late)) {
        engine->submits_late = late;
        return;
    }
    engine->submits_late = oo__driver_submits_late();
    if (engine->submits_late &&
        engine->driver.cuDeviceGetAttribute(&tcc, OOCU_DEVICE_ATTRIBUTE_TCC_DRIVER,
                                            engine->device) == OOCU_SUCCESS)
        engine->submits_late = !tcc;
}

enum oo_status oo__ask_node(struct oo_engine *engine) {
    if (!engine->driver.simulated)
        engine->numa_node = oo__numa_node(engine->sys, engine->pci_id);
    if (engine->numa_node >= 0)
        return OO_OK;
    const OOCUresult result = engine->driver.cuDeviceGetAttribute(
        &engine->numa_node, OOCU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, engine->device);
    /* An older driver does not know what it is asked here. */
    if (result == OOCU_ERROR_INVALID_VALUE || result == OOCU_ERROR_NOT_SUPPORTED)
        return OO_OK;
    return oo__check(engine, "cuDeviceGetAttribute", result);
}

/* On a dead engine only host records are freed: a lost context has taken the rest with it. */
static void oo__close_device(struct oo_engine *engine) {
    oo__feeder_close(engine);          /* before the ring, and the context */
    (void)oo__finish_download(engine); /* before the ring it may still be reading goes */
    oo__trips_close(engine);
    oo__ring_free(engine, &engine->down);
    oo__ring_free(engine, &engine->up);
    oo__forget_reads(engine);
    oo__staging_close(engine);
    oo__spans_free(engine);
    oo__journal_free(engine);
    if (!engine->usable)
        return;
    oo__kernels_free(engine);
    /* Destroying a stream returns at once and drops none of its work. */
    if (engine->h2d)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->h2d);
    if (engine->d2h)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->d2h);
    if (engine->compute)
        OO_GIVE_BACK(engine, cuStreamDestroy, engine->compute);
}

static void oo__free_engine(struct oo_engine *engine) {
    oo__free_models(engine);
    oo_plan_destroy(engine->plan);
    oo__fork_guard_destroy(engine->guard);
    oo__mutex_destroy(engine->feeder.mutex);
    oo__mutex_destroy(engine->mutex);
    free(engine);
}

enum oo_status oo_engine_create(const char *library, int device, struct oo_engine **out) {
    *out = NULL;
    enum oo_status status;
    struct oo_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return oo__fail(OO_E_MEMORY, "no memory for an engine");
    engine->sweep = 1;
    engine->patience_s = oo__patience_s;
    engine->kept_patience_s = oo__kept_patience_s;
    engine->numa_node = -1;
    engine->sys = OO_SYS;
    engine->mutex = oo__mutex_create();
    engine->feeder.mutex = oo__mutex_create();
    engine->guard = oo__fork_guard_create();
    if (!engine->mutex || !engine->feeder.mutex || !engine->guard) {
        oo__free_engine(engine);
        return oo__fail(OO_E_MEMORY, "no memory for an engine");
    }
    OO_TRY(oo_plan_create(&engine->plan));
    OO_TRY(oo_driver_load(&engine->driver, library));
    OO_TRY(oo__open_device(engine, device));
    oo__ask_submission(engine);
    OO_TRY(oo__ask_node(engine));
    OO_TRY(oo__enter(engine, 0));
    int least = 0, greatest = 0;
    status = OO_DRIVE(engine, cuCtxGetStreamPriorityRange, &least, &greatest);
    /* Non-blocking: the default stream, on which torch computes, must not wait for our copies. */
    if (status == OO_OK)
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->h2d,
                          OOCU_STREAM_NON_BLOCKING, greatest);
    if (status == OO_OK)
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->d2h,
                          OOCU_STREAM_NON_BLOCKING, greatest);
    if (status == OO_OK) /* two of each span, and those that one call holds */
        status = oo__events_reserve(engine, OO_TIMED, 2 * OO_SPANS + 6);
    if (status == OO_OK) /* of both rings, and those that one call holds */
        status = oo__events_reserve(engine, OO_ORDERS, 2 * OO_RING_PIECES + 4);
    if (status == OO_OK)
        status = oo__ring_open(engine, &engine->up);
    if (status == OO_OK)
        status = oo__ring_open(engine, &engine->down);
    oo__label_stream(engine, engine->h2d, "h2d");
    oo__label_stream(engine, engine->d2h, "d2h");
    if (status != OO_OK)
        oo__close_device(engine);
    oo__leave(engine);
done:
    if (status != OO_OK) {
        if (engine->context)
            OO_GIVE_BACK(engine, cuDevicePrimaryCtxRelease, engine->device);
        if (engine->n_leaked)
            oo__append("; and %u driver objects could not be given back, the first: %s",
                       engine->n_leaked, engine->first_leak.message);
        oo__free_engine(engine);
        return status;
    }
    *out = engine;
    return OO_OK;
}

enum oo_status oo_engine_destroy(struct oo_engine *engine) {
    if (!engine)
        return OO_OK;
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    const int lost = engine->dead != OO_OK; /* and everything in it */
    uint32_t leased = 0, attached = 0;
    for (const struct oo_lease *lease = engine->leases; lease; lease = lease->next)
        leased++;
    for (uint32_t i = 0; i < engine->n_models; i++)
        attached += !engine->models[i].removed;
    if (attached || leased || engine->n_known)
        status = oo__fail(
            OO_E_STATE,
            "the engine still has %u leases, %u models and %u host buffers; detach them first",
            leased, attached, engine->n_known);
    else
        oo__close_device(engine);
    oo__leave(engine);
    if (status != OO_OK)
        return status;
    if (engine->usable)
        OO_GIVE_BACK(engine, cuDevicePrimaryCtxRelease, engine->device);
    if (engine->n_leaked && !lost) {
        const struct oo_error *leak = &engine->first_leak;
        status = oo__fail_driver(OO_LEAKED, leak->call, leak->code, leak->name,
                                 "%u driver objects could not be given back, the first: %s",
                                 engine->n_leaked, leak->message);
    } else if (engine->dead != OO_OK && !engine->death_reported) {
        (void)oo__fail_dead(engine);
        status = OO_LEAKED;
    }
    oo__free_engine(engine);
    return status;
}

#define OO_TEXT(number)   #number
#define OO_NUMBER(number) OO_TEXT(number)

const char *oo_version(void) {
    return OO_NUMBER(OO_VERSION_MAJOR) "." OO_NUMBER(OO_VERSION_MINOR) "." OO_NUMBER(
        OO_VERSION_PATCH);
}

int oo_engine_simulated(const struct oo_engine *engine) { return engine->driver.simulated; }
int oo_engine_driver_version(const struct oo_engine *engine) { return engine->driver.version; }
const char *oo_engine_device_name(const struct oo_engine *engine) { return engine->device_name; }
const char *oo_engine_pci_id(const struct oo_engine *engine) { return engine->pci_id; }
int oo_engine_numa_node(const struct oo_engine *engine) { return engine->numa_node; }

enum oo_status oo_engine_compute_stream(struct oo_engine *engine, uintptr_t *stream) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (!engine->compute) {
        status = OO_DRIVE(engine, cuStreamCreateWithPriority, &engine->compute,
                          OOCU_STREAM_NON_BLOCKING, 0);
        oo__label_stream(engine, engine->compute, "compute");
    }
    *stream = (uintptr_t)engine->compute;
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_mem_info(struct oo_engine *engine, size_t *free_bytes,
                                  size_t *total_bytes) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    status = OO_DRIVE(engine, cuMemGetInfo, free_bytes, total_bytes);
    oo__leave(engine);
    return status;
}
