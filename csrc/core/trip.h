/* trip.h - bytes that leave the device for a while, without a wait of the host. */
#ifndef OO_TRIP_H
#define OO_TRIP_H

#include "state.h"

/* Whether the simulated device has these bytes already: by a trip, or in the arena, where an
 * optimizer steps what goes home. */
int oo__device_has(const struct oo_engine *engine, uintptr_t address, size_t bytes);
/* Wait for what a copy that failed has left queued. */
enum oo_status oo__finish_download(struct oo_engine *engine);
/* The records go; every copy has ended, or is lost. */
void oo__trips_close(struct oo_engine *engine);

#endif
