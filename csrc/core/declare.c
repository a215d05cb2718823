/* declare.c - what the engine tells the simulated driver, for its race detector and its reports; a
 * real driver is told nothing. */
#include "engine.h"

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

enum oo_status oo__host_access(struct oo_engine *engine, const void *memory, size_t bytes,
                               int is_write) {
    return engine->driver.simHostAccess ? OO_DRIVE(engine, simHostAccess, memory, bytes, is_write)
                                        : OO_OK;
}
