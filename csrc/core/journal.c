/* journal.c - what the engine has made the device do, in order. */
#include "journal.h"
#include "call.h"
#include "simulated.h"

#include <stdlib.h>

void oo__journal_write(struct oo_engine *engine, enum oo_deed deed, uint32_t unit, uint64_t bytes,
                       uint64_t detail) {
    struct oo_journal *journal = &engine->journal;
    journal->entries[journal->written++ % journal->capacity] =
        (struct oo_entry){oo__host_clock_s(engine), bytes, detail, unit, deed};
}

void oo__journal_free(struct oo_engine *engine) {
    free(engine->journal.entries);
    engine->journal = (struct oo_journal){0};
}

enum oo_status oo_journal_start(struct oo_engine *engine, size_t entries) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    struct oo_journal *journal = &engine->journal;
    if (journal->entries) {
        status = oo__fail(OO_E_STATE, "a journal is being kept already");
    } else if (entries == 0) {
        status = oo__fail(OO_E_ARGUMENT, "a journal of 0 entries holds nothing");
    } else {
        journal->entries = calloc(entries, sizeof *journal->entries);
        journal->capacity = entries;
        if (!journal->entries)
            status = oo__fail(OO_E_MEMORY, "no memory for a journal of %zu entries", entries);
    }
    oo__leave(engine);
    return status;
}

enum oo_status oo_journal_read(struct oo_engine *engine, uint64_t from, struct oo_entry *entries,
                               size_t room, uint64_t *first, size_t *count, double *now_s) {
    *count = 0;
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    const struct oo_journal *journal = &engine->journal;
    const uint64_t kept =
        journal->written < journal->capacity ? journal->written : journal->capacity;
    const uint64_t oldest = journal->written - kept;
    *first = from < oldest ? oldest : from < journal->written ? from : journal->written;
    *now_s = oo__host_clock_s(engine);
    if (!journal->entries) {
        status = oo__fail(OO_E_STATE, "no journal is being kept");
        goto done;
    }
    while (*count < room && *first + *count < journal->written) {
        entries[*count] = journal->entries[(*first + *count) % journal->capacity];
        ++*count;
    }
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_journal_stop(struct oo_engine *engine) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    if (!engine->journal.entries)
        status = oo__fail(OO_E_STATE, "no journal is being kept");
    oo__journal_free(engine);
    oo__leave(engine);
    return status;
}
