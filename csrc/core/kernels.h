/* kernels.h - the engine's own kernels. */
#ifndef OO_KERNELS_H
#define OO_KERNELS_H

#include "state.h"

void oo__kernels_free(struct oo_engine *engine);

#endif
