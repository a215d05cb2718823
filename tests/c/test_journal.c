/* The journal: one entry for each thing done, at its time; a ring; and what it costs the driver. */
#include "world.h"

#include <math.h>

enum { ROOM = 1 << 14 };
static struct oo_entry entries[ROOM];

static size_t read_from(struct world *w, uint64_t from, uint64_t *first) {
    size_t count;
    double now_s;
    need(oo_journal_read(w->engine, from, entries, ROOM, first, &count, &now_s), "read");
    CHECK(fabs(now_s - sim.simNow()) < 1e-12, "%.9f s by a clock that shows %.9f", now_s,
          sim.simNow());
    return count;
}

static int same(const struct oo_entry *a, const struct oo_entry *b, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (a[i].deed != b[i].deed || a[i].unit != b[i].unit || a[i].bytes != b[i].bytes ||
            a[i].detail != b[i].detail || fabs(a[i].host_s - b[i].host_s) > 0)
            return 0;
    return 1;
}

CASE(test_each_deed_is_written_once_and_in_order) {
    struct world w;
    char target[600];
    uint64_t first, of[OO_DEED_DECODE + 1] = {0}, bytes[OO_DEED_DECODE + 1] = {0}, uses[3] = {0};
    double before_s = sim.simNow();
    world_open(&w, 60000, -1);
    need(oo_journal_start(w.engine, ROOM), "start");
    char *gradient = malloc(sizeof target);
    for (int i = 0; i < 3; i++) {
        need(step(&w), "step");
        need(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof target, w.stream),
             "download");
    }
    free(gradient);
    const size_t count = read_from(&w, 0, &first);
    const struct oo_stats stats = stats_of(&w);
    CHECK(first == 0, "the first is %llu", (unsigned long long)first);
    uint32_t by[UNITS] = {0};
    for (size_t i = 0; i < count; i++) {
        const struct oo_entry *entry = &entries[i];
        of[entry->deed]++;
        bytes[entry->deed] += entry->bytes;
        CHECK(entry->host_s >= before_s, "entry %zu at %.9f, after %.9f", i, entry->host_s,
              before_s);
        before_s = entry->host_s;
        CHECK((entry->unit == UINT32_MAX) == (entry->deed == OO_DEED_COPY_OUT),
              "entry %zu: unit %u", i, entry->unit);
        if (entry->deed == OO_DEED_USE)
            uses[entry->detail]++;
        if (entry->deed == OO_DEED_EVICT)
            by[entry->detail]++;
        if (entry->deed == OO_DEED_COPY_IN) {
            CHECK(entry->bytes == w.bytes[entry->unit], "%llu bytes",
                  (unsigned long long)entry->bytes);
            CHECK(entry->detail >= (uintptr_t)w.arena && entry->detail < (uintptr_t)w.arena + 60000,
                  "copied outside the arena");
            by[entry->unit] = 0; /* what it displaced came before it */
        }
    }
    for (unsigned i = 0; i < UNITS; i++)
        CHECK(by[i] == 0, "%u were evicted by unit %u, which did not come", by[i], i);
    CHECK(of[OO_DEED_USE] == stats.acquires && uses[OO_FORWARD] == uses[OO_BACKWARD] &&
              uses[OO_FORWARD] == uses[OO_RECOMPUTE] && uses[OO_FORWARD] == (uint64_t)3 * UNITS,
          "%llu uses", (unsigned long long)of[OO_DEED_USE]);
    CHECK(of[OO_DEED_WAIT] == stats.waits, "%llu waits", (unsigned long long)of[OO_DEED_WAIT]);
    CHECK(of[OO_DEED_COPY_IN] == stats.late + stats.prefetches &&
              bytes[OO_DEED_COPY_IN] == stats.h2d_bytes,
          "%llu copies", (unsigned long long)of[OO_DEED_COPY_IN]);
    CHECK(of[OO_DEED_COPY_OUT] == 3 && bytes[OO_DEED_COPY_OUT] == stats.d2h_bytes, "%llu downloads",
          (unsigned long long)of[OO_DEED_COPY_OUT]);
    CHECK(of[OO_DEED_EVICT] == stats.evictions && stats.evictions > 0, "%llu evictions",
          (unsigned long long)of[OO_DEED_EVICT]);
    CHECK(of[OO_DEED_DECODE] == 0, "%llu decodes", (unsigned long long)of[OO_DEED_DECODE]);
    need(oo_journal_stop(w.engine), "stop");
    world_close(&w, "deeds");
}

/* Right behind the copy of the unit, and of those that a kernel decodes alone. */
CASE(test_decodes_are_written_behind_their_copies) {
    struct world w;
    uint64_t first, bytes = 0, chunks = 0, copied = 0, without = 0;
    world_open_coded(&w, 400000, -1);
    need(oo_journal_start(w.engine, ROOM), "start");
    need(step(&w), "step");
    const size_t count = read_from(&w, 0, &first);
    for (size_t i = 0; i < count; i++) {
        const struct oo_entry *entry = &entries[i], *next = entry + 1;
        copied += entry->deed == OO_DEED_COPY_IN ? entry->bytes : 0;
        if (entry->deed == OO_DEED_COPY_IN && !w.engine->units[entry->unit].decodes)
            without += i + 1 == count || next->deed != OO_DEED_DECODE;
        if (entry->deed != OO_DEED_DECODE)
            continue;
        CHECK(i && entry[-1].deed == OO_DEED_COPY_IN && entry[-1].unit == entry->unit,
              "entry %zu comes after none of its unit", i);
        bytes += entry->bytes;
        chunks += entry->detail;
    }
    const struct oo_stats stats = stats_of(&w);
    CHECK(bytes == stats.decoded_bytes && chunks == stats.decodes && chunks && without &&
              copied == stats.h2d_bytes,
          "%llu bytes of %llu chunks", (unsigned long long)bytes, (unsigned long long)chunks);
    need(oo_journal_stop(w.engine), "stop");
    world_close(&w, "decodes");
}

CASE(test_the_latest_are_kept_and_have_their_numbers) {
    struct world w;
    uint64_t first;
    size_t count;
    double now_s;
    struct oo_entry all[ROOM];
    world_open(&w, 60000, -1);
    need(oo_journal_start(w.engine, ROOM), "start");
    need(step(&w), "step");
    const size_t written = read_from(&w, 0, &first);
    memcpy(all, entries, written * sizeof *entries);
    CHECK(read_from(&w, 7, &first) == written - 7 && first == 7 &&
              same(entries, all + 7, written - 7),
          "from the eighth on");
    need(oo_journal_read(w.engine, 3, entries, 2, &first, &count, &now_s), "two of them");
    CHECK(count == 2 && first == 3 && same(entries, all + 3, 2), "%zu from %llu on", count,
          (unsigned long long)first);
    CHECK(read_from(&w, written, &first) == 0 && first == written, "the next one to come");
    CHECK(read_from(&w, UINT64_MAX, &first) == 0 && first == written, "none has this number");
    need(oo_journal_stop(w.engine), "stop");
    need(oo_journal_start(w.engine, 10), "a small one");
    for (unsigned i = 0; i < 12; i++)
        need(use(&w, i, OO_FORWARD), "use");
    CHECK(read_from(&w, 0, &first) == 10 && first > 1, "the latest ten, from %llu on",
          (unsigned long long)first);
    CHECK(entries[9].deed != OO_DEED_EVICT, "an eviction is the last");
    int found = 0;
    for (int i = 0; i < 10; i++)
        found |= entries[i].deed == OO_DEED_USE && entries[i].unit == w.unit[11];
    CHECK(found, "the last use is not there");
    const uint64_t from = first + 4;
    CHECK(read_from(&w, from, &first) == 6 && first == from, "those of them from the fifth on");
    need(oo_journal_stop(w.engine), "stop");
    world_close(&w, "ring");
}

CASE(test_a_journal_asks_nothing_of_the_driver) {
    uint64_t calls[2], first;
    for (int on = 0; on < 2; on++) { /* two worlds: what is measured differs from step to step */
        struct world w;
        world_open(&w, 60000, -1);
        steps(&w, 3, "learn");
        if (on)
            need(oo_journal_start(w.engine, ROOM), "start");
        const uint64_t before = sim.simCallCount(NULL);
        need(step(&w), "step");
        calls[on] = sim.simCallCount(NULL) - before;
        if (on) {
            CHECK(read_from(&w, 0, &first) > 3 * UNITS, "nothing was written");
            need(oo_journal_stop(w.engine), "stop");
        }
        world_close(&w, "calls");
    }
    CHECK(calls[0] == calls[1], "%llu calls, and %llu with a journal", (unsigned long long)calls[0],
          (unsigned long long)calls[1]);
}

CASE(test_what_failed_is_not_written) {
    struct world w;
    struct oo_use none;
    uint64_t first;
    world_open(&w, 60000, -1);
    const uintptr_t stream = new_stream(&w);
    need(oo_journal_start(w.engine, ROOM), "start");
    fail_call("cuStreamWaitEvent", 1);
    CHECK(acquire(w.engine, w.member[0], stream, 0, OO_FORWARD, -1, 0, &none) == OO_E_DRIVER,
          "acquired");
    CHECK(stats_of(&w).waits == 0, "a wait was counted");
    size_t count = read_from(&w, 0, &first);
    for (size_t i = 0; i < count; i++)
        CHECK(entries[i].deed == OO_DEED_COPY_IN, "entry %zu is of another kind", i);
    CHECK(count == 1, "%zu entries", count);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    fail_call("cuMemcpyHtoDAsync", 1);
    CHECK(acquire(w.engine, w.member[0], stream, 0, OO_FORWARD, -1, 0, &none) == OO_E_DRIVER,
          "acquired");
    CHECK(read_from(&w, 1, &first) == 0, "a copy that failed was written");
    end_stream(&w, stream);
    world_close(&w, "failures"); /* and with it the journal */
}

CASE(test_a_journal_is_kept_once) {
    struct world w;
    uint64_t first;
    size_t count = 7;
    double now_s;
    world_open(&w, 60000, -1);
    CHECK(oo_journal_read(w.engine, 0, entries, ROOM, &first, &count, &now_s) == OO_E_STATE &&
              count == 0,
          "read of none");
    CHECK(oo_journal_stop(w.engine) == OO_E_STATE, "stopped none");
    CHECK(oo_journal_start(w.engine, 0) == OO_E_ARGUMENT, "of nothing");
    need(oo_journal_start(w.engine, 1), "start");
    CHECK(oo_journal_start(w.engine, 1) == OO_E_STATE, "two at once");
    need(step(&w), "step");
    CHECK(read_from(&w, 0, &first) == 1, "not one");
    need(oo_journal_stop(w.engine), "stop");
    need(oo_journal_start(w.engine, 1), "start again");
    CHECK(read_from(&w, 0, &first) == 0 && first == 0, "entries of the one before");
    need(oo_journal_stop(w.engine), "stop");
    world_close(&w, "once");
}

CHECK_MAIN(world_prepare)
