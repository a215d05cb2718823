/* journal.h - what the engine has made the device do, in order. */
#ifndef OO_JOURNAL_H
#define OO_JOURNAL_H

#include "state.h"

void oo__journal_write(struct oo_engine *engine, enum oo_deed deed, uint32_t unit, uint64_t bytes,
                       uint64_t detail);
void oo__journal_free(struct oo_engine *engine);

/* Write an entry, while a journal is kept. */
static inline void oo__journal(struct oo_engine *engine, enum oo_deed deed, uint32_t unit,
                               uint64_t bytes, uint64_t detail) {
    if (engine->journal.entries)
        oo__journal_write(engine, deed, unit, bytes, detail);
}

#endif
