/* model.h - what is managed: models, units, members. */
#ifndef OO_MODEL_H
#define OO_MODEL_H

#include "state.h"

void oo__free_models(struct oo_engine *engine);
/* Whether the unit may be fetched before it is asked for. It may not where the caller vouches for
 * the masters' addresses only at an acquire, nor while trainable masters may be rewritten. */
int oo__may_fetch_ahead(const struct oo_engine *engine, const struct oo_unit *unit);

#endif
