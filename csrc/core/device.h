/* device.h - what is asked of the device when an engine opens it. */
#ifndef OO_DEVICE_H
#define OO_DEVICE_H

#include "state.h"

/* Find out engine->numa_node, the host's node that the device is nearest to: as the system says, or
 * else as the driver does (CUDA >= 12.2). -1: neither does. Fails where the context is lost. */
enum oo_status oo__ask_node(struct oo_engine *engine);

#endif
