/* device.h - what is asked of the device when an engine opens it. */
#ifndef OO_DEVICE_H
#define OO_DEVICE_H

#include "state.h"

/* The NUMA node of the host that the device is nearest to: as the system says, or else as the
 * driver does (CUDA >= 12.2). -1: neither does. */
int oo__nearest_node(const struct oo_engine *engine);

#endif
