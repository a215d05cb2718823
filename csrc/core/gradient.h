/* gradient.h - device bytes that come to the host. */
#ifndef OO_GRADIENT_H
#define OO_GRADIENT_H

#include "state.h"

/* Wait for what a failed download left queued. */
enum oo_status oo__finish_download(struct oo_engine *engine);

#endif
