/* kernels.h - the engine's own kernels. */
#ifndef OO_KERNELS_H
#define OO_KERNELS_H

#include "state.h"

/* Look a kernel up, unless it has been: *kernel is NULL then. */
enum oo_status oo__kernel_load(struct oo_engine *engine, const char *name, OOCUfunction *kernel);
void oo__kernels_free(struct oo_engine *engine);

#endif
