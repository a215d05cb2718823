/* simulated.c - every row of the driver table that only the simulated driver fills. */
#include "simulated.h"
#include "../base/os.h"

#include <stdio.h>

void oo__label(struct oo_engine *engine, const void *memory, size_t bytes, const char *what,
               uint32_t unit) {
    char text[48];
    if (!engine->driver.simLabelRange)
        return;
    if (unit == OO_NO_UNIT)
        snprintf(text, sizeof text, "%s", what);
    else
        snprintf(text, sizeof text, "%s %u", what, unit);
    (void)engine->driver.simLabelRange(memory, bytes, text);
}

void oo__label_stream(struct oo_engine *engine, OOCUstream stream, const char *name) {
    if (engine->driver.simLabelStream)
        (void)engine->driver.simLabelStream(stream, name);
}

OOCUresult oo__declare_access(const struct oo_engine *engine, const void *memory, size_t bytes,
                              int is_write) {
    return engine->driver.simHostAccess ? engine->driver.simHostAccess(memory, bytes, is_write)
                                        : OOCU_SUCCESS;
}

enum oo_status oo__host_access(struct oo_engine *engine, const void *memory, size_t bytes,
                               int is_write) {
    return oo__check(engine, "simHostAccess", oo__declare_access(engine, memory, bytes, is_write));
}

OOCUresult oo__simulated_read(const struct oo_engine *engine, size_t bytes, int *wanted) {
    *wanted = 1;
    return engine->driver.simRead ? engine->driver.simRead(bytes, wanted) : OOCU_SUCCESS;
}

OOCUresult oo__simulated_await(const struct oo_engine *engine, const struct oo_event *event) {
    return engine->driver.simAwait ? engine->driver.simAwait(event->handle)
                                   : OOCU_ERROR_NOT_SUPPORTED;
}

int oo__simulated_readers(const struct oo_engine *engine, unsigned expected) {
    unsigned blocked = 0;
    if (!engine->driver.simReaders || engine->driver.simReaders(expected, &blocked) != OOCU_SUCCESS)
        return -1;
    return expected && blocked >= expected;
}

void oo__simulated_pass(const struct oo_engine *engine) { (void)engine->driver.simPass(); }

double oo__host_clock_s(const struct oo_engine *engine) {
    double seconds = 0;
    if (engine->driver.simClock)
        (void)engine->driver.simClock(&seconds);
    else
        seconds = (double)oo__nanoseconds() * 1e-9;
    return seconds;
}

int oo__simulates_submission(struct oo_engine *engine, int *late) {
    return engine->driver.simSubmitsLate && engine->driver.simSubmitsLate(late) == OOCU_SUCCESS;
}

void oo__expect_pageable(struct oo_engine *engine, const void *memory) {
    if (engine->driver.simExpectPageable)
        (void)engine->driver.simExpectPageable(memory);
}

enum oo_status oo__adopt(struct oo_engine *engine, uintptr_t address, size_t bytes,
                         unsigned int flags, OOCUstream stream) {
    return engine->driver.simAdopt ? OO_DRIVE(engine, simAdopt, address, bytes, flags, stream)
                                   : OO_OK;
}

OOCUresult oo__disown(struct oo_engine *engine, uintptr_t address) {
    return engine->driver.simDrop ? engine->driver.simDrop(address) : OOCU_SUCCESS;
}

int oo__declares_kernels(const struct oo_engine *engine) {
    return engine->driver.simLaunch != NULL;
}

enum oo_status oo__declare_kernel(struct oo_engine *engine, OOCUstream stream,
                                  const OOSimRange *read, const OOSimRange *written,
                                  double seconds) {
    return OO_DRIVE(engine, simLaunch, stream, read, read ? 1 : 0, written, written ? 1 : 0,
                    seconds);
}

enum oo_status oo__launch(struct oo_engine *engine, const struct oo_member *member,
                          OOCUstream stream, double seconds) {
    if (!oo__declares_kernels(engine))
        return OO_OK;
    const uintptr_t address = oo_block_address(oo_plan_resident(engine->plan, member->unit));
    const struct oo_member_tensor *last = &member->tensors[member->n_tensors - 1];
    const OOSimRange read = {address + member->tensors[0].offset,
                             last->offset + last->bytes - member->tensors[0].offset};
    return oo__declare_kernel(engine, stream, &read, NULL, seconds);
}

enum oo_status oo_engine_launch(struct oo_engine *engine, uint32_t id, uintptr_t stream,
                                double seconds) {
    if (!oo__declares_kernels(engine))
        return OO_OK;
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const struct oo_member *member = id < engine->n_members ? &engine->members[id] : NULL;
    if (!member || member->removed || !oo_plan_pins(engine->plan, member->unit))
        status = oo__fail(OO_E_STATE, "member %u is launched without being acquired", id);
    else
        status = oo__launch(engine, member, (OOCUstream)stream, seconds);
    oo__leave(engine);
    return status;
}
