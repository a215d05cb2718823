/* Masters that stay in their file: what travels is read from it, whole pages past the cache or, if
 * the system refuses that, with it; a read that fails or ends early is reported to who asks for
 * the unit, and the next step is right; a file that was written is never used; what was
 * written in memory is what counts; and what has a place in memory is read once. */
#define _GNU_SOURCE /* files.h */
#include "world.h"

#include "call.h"
#include "disk.h"
#include "feed.h"
#include "timing.h"

#include "files.h" /* the last: on Windows it makes macros of words that others have */

#include <math.h>
#include <stdatomic.h>
#if !defined(_WIN32)
#include <sys/resource.h>
#endif

enum {
    BEFORE = 4219
}; /* bytes of a file in front of its masters: a page, and no multiple of 256 */

static char path[64];
static _Atomic unsigned n_reads, n_direct;
static _Atomic unsigned fails; /* the read of this number; 0: none */
static _Atomic int lasts;      /* and all after it */
enum { INPUT_ERROR, ENDS_EARLY, REFUSED_DIRECT };
static _Atomic int how;
static _Atomic int direct, refusal;

static ptrdiff_t counted_read(int file, void *target, size_t bytes, uint64_t begin) {
    const unsigned number = ++n_reads;
    n_direct += file == direct;
    if (how == REFUSED_DIRECT && file == direct) {
        errno = refusal;
        return -1;
    }
    if (how != REFUSED_DIRECT && fails && (number == fails || (lasts && number > fails))) {
        if (how == INPUT_ERROR) {
            memset(target, 0x55, bytes);
            errno = EIO;
            return -1;
        }
        const ptrdiff_t got = oo__file_read(file, target, bytes, begin);
        return got < 300 ? got - 1 : 300;
    }
    const ptrdiff_t got = oo__file_read(file, target, bytes, begin);
    errno = EINVAL; /* which says nothing after a success */
    return got;
}

static void write_file(const struct world *w, size_t bytes) {
    char *content = malloc(bytes);
    memset(content, 0x11, bytes);
    for (size_t i = 0, at = BEFORE; i < UNITS && at < bytes; at += w->bytes[i++])
        fill(content + at, w->bytes[i], (unsigned)i);
    file_make(path, content, bytes);
    free(content);
}

static enum oo_status open_file(struct oo_host **host) {
    const int file = oo__file_open(path, 0);
    const enum oo_status status = oo_host_create_file(path, file, host);
    if (file >= 0)
        oo__file_close(file);
    return status;
}

/* Every other unit has a place in memory, in the reverse order and with a gap between them. */
static struct oo_host *kept_in;
static size_t kept_bytes;

static enum oo_status keep(const struct world *w, struct oo_host *file, size_t at, size_t bytes,
                           struct oo_host *room, size_t place) {
    const struct oo_keeping kept = {(char *)oo_host_address(file) + at, bytes, place};
    return oo_engine_keep_in(w->engine, room, &kept, 1);
}

static void keep_some(const struct world *w, unsigned odd) {
    struct oo_keeping kept[UNITS];
    size_t count = 0;
    size_t before[UNITS], place = 0;
    kept_bytes = 0;
    for (size_t i = 0, at = BEFORE; i < UNITS; at += w->bytes[i++])
        before[i] = at;
    need(oo_host_create(2 * w->total, &kept_in), "a room");
    for (unsigned i = UNITS; i-- > 0;) {
        if (i % 2 != odd)
            continue;
        kept[count++] =
            (struct oo_keeping){(char *)oo_host_address(w->host) + before[i], w->bytes[i], place};
        place += w->bytes[i] + 256;
        kept_bytes += w->bytes[i];
    }
    need(oo_engine_keep_in(w->engine, kept_in, kept, count), "keep");
    need(oo_engine_lock(w->engine, kept_in, 0), "know the room");
}

static void begin_model(struct world *w, size_t arena_bytes) {
    need(oo_lease_add(w->engine, &w->lease), "lease");
    w->leased = 1;
    need(oo_model_add(w->engine, &w->model), "model");
    w->attached = 1;
    need(oo_engine_compute_stream(w->engine, &w->stream), "stream");
    w->arena = malloc(arena_bytes);
    need(oo_segment_add(w->engine, w->lease, (uintptr_t)w->arena, arena_bytes, w->stream),
         "segment");
}

/* The first `count`, each where it is in the file. */
static void add_units(struct world *w, unsigned count) {
    char *master = (char *)oo_host_address(w->host) + BEFORE;
    for (unsigned i = 0; i < count; master += w->bytes[i++]) {
        const struct oo_tensor tensor = {.host = master, .bytes = w->bytes[i]};
        size_t offset;
        w->master[i] = master;
        w->unit[i] = add_unit(w->engine, w->model, &tensor, 1, &w->member[i], &offset);
    }
}

/* A world whose masters are in a file. */
static int keeps;
static void begin(struct world *w, size_t arena_bytes) {
    n_reads = n_direct = fails = 0;
    lasts = 0;
    how = INPUT_ERROR;
    world_begin(w);
    write_file(w, BEFORE + w->total);
    need(open_file(&w->host), "open");
    direct = w->host->disk->direct;
    w->host->disk->read = counted_read;
    need(oo_engine_lock(w->engine, w->host, 0), "know");
    if (keeps)
        keep_some(w, 0);
    begin_model(w, arena_bytes + OO_ALIGNMENT);
    add_units(w, UNITS);
}

static void end(struct world *w, const char *where) {
    struct oo_host *of_model = keeps ? kept_in : NULL;
    if (of_model) { /* its memory may go before or after the file's, when no unit is left */
        need(world_remove(w), "remove");
        need(oo_host_destroy(of_model), "the room");
    }
    world_close(w, where);
    file_delete(path);
}

CASE(what_is_in_a_file_is_read_from_it) {
    struct world w;
    begin(&w, 100000);
    CHECK(n_reads == 0 && stats_of(&w).disk_bytes == w.total && stats_of(&w).pageable_bytes == 0,
          "%u reads at attach", n_reads);
    CHECK(w.engine->feeder.n_threads == OO_READ_THREADS, "%u threads", w.engine->feeder.n_threads);
    steps(&w, 3, "step");
    feeds_end(&w);
    const struct oo_stats stats = stats_of(&w);
    CHECK(stats.disk_read_bytes == stats.h2d_bytes && stats.h2d_bytes > 3 * w.total &&
              stats.disk_read_seconds > 0,
          "%llu bytes read, %llu copied", (unsigned long long)stats.disk_read_bytes,
          (unsigned long long)stats.h2d_bytes);
    CHECK(stats.stale == 0, "%llu stale", (unsigned long long)stats.stale);
    CHECK(n_reads >= stats.h2d_copies, "%u reads", n_reads);
    end(&w, "from a file");
}

/* Return the device as it was before it had a slow disk of its own. */
static struct sim_device give_disk(void) {
    struct sim_device before, device;
    CHECK(sim.simGetDevice(0, &before) == 0, "no device");
    device = before;
    device.disk_gbps = 0.01;
    device.disk_latency_s = 1e-4;
    CHECK(sim.simSetDevice(0, &device) == 0, "no disk");
    return before;
}

/* A device with a disk of its own in virtual time: what is read takes that, copies and kernels go
 * on meanwhile, and the bits are the same. No wait for the disk is in a forward's seconds. */
CASE(reads_take_the_time_of_the_disk) {
    const struct sim_device before = give_disk();
    struct world w;
    begin(&w, 100000);
    steps(&w, 3, "step");
    feeds_end(&w);
    const double seconds = sim.simNow();
    const struct oo_stats stats = stats_of(&w);
    const double read_s = (double)stats.disk_read_bytes / 1e7;
    CHECK(stats.disk_read_bytes > 3 * w.total && seconds >= read_s && seconds < 1.2 * read_s,
          "%.6f s, of reads %.6f", seconds, read_s);
    CHECK(n_reads >= stats.h2d_copies, "%u reads", n_reads);
    sim.cuCtxPushCurrent_v2(w.context);
    oo__spans_harvest(w.engine);
    sim.cuCtxPopCurrent_v2(NULL);
    unsigned known = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        const double unit_s = oo_plan_seconds(w.engine->plan, w.unit[i]);
        CHECK(unit_s < 100e-6, "unit %u takes %.6f s, and its read alone %.6f", i, unit_s,
              (double)w.bytes[i] / 1e7);
        known += unit_s > 0;
    }
    CHECK(known > UNITS / 2, "%u known", known);
    end(&w, "in virtual time");
    CHECK(sim.simSetDevice(0, &before) == 0, "no device");
}

/* Two models, used in turns, have one row of reads: the disk does all of them one after the other,
 * whichever model's they are, and never rests. */
CASE(two_models_share_the_time_of_the_disk) {
    const struct sim_device before = give_disk();
    struct world w;
    begin(&w, 100000);
    struct world other = w;
    need(oo_model_add(w.engine, &other.model), "another model");
    for (unsigned i = 0; i < UNITS; i++) {
        const struct oo_tensor tensor = {.host = w.master[i], .bytes = w.bytes[i]};
        size_t offset;
        other.unit[i] = add_unit(w.engine, other.model, &tensor, 1, &other.member[i], &offset);
    }
    CHECK(sim.simSwitch(SIM_TRACE_ON, 1) == 0 && sim.simTraceClear() == 0, "no trace");
    for (int i = 0; i < 3; i++) {
        need(step(&w), "step");
        need(step(&other), "the other's step");
    }
    feeds_end(&w);
    const uint64_t read = stats_of(&w).disk_read_bytes; /* of all models */
    const double read_s = (double)read / 1e7;
    const double seconds = sim.simNow();
    CHECK(read > 6 * w.total, "one is not read");
    CHECK(seconds >= read_s && seconds < 1.2 * read_s, "%.6f s, of reads %.6f", seconds, read_s);
    double rows_s = 0, free_s = 0;
    for (uint64_t i = 0; i < sim.simTraceCount(); i++) {
        struct sim_trace_row row;
        CHECK(sim.simTraceRow(i, &row) == 0, "no row");
        if (row.kind != SIM_READ)
            continue;
        CHECK(row.start_s >= free_s - 1e-12,
              "a read begins at %.9f s, and the disk is free at %.9f", row.start_s, free_s);
        free_s = row.end_s;
        rows_s += row.end_s - row.start_s;
    }
    CHECK(fabs(rows_s - read_s) < 0.1 * read_s, "%.6f s in the timeline, not %.6f", rows_s, read_s);
    CHECK(sim.simSwitch(SIM_TRACE_ON, 0) == 0, "trace");
    need(oo_model_remove(w.engine, other.model), "remove");
    end(&w, "two models");
    CHECK(sim.simSetDevice(0, &before) == 0, "no device");
}

/* The step in which the read fails says so; those after it are right. */
static void fail_at(unsigned nth, int is_lasting, const char *said) {
    struct world w;
    begin(&w, 100000);
    how = strstr(said, "ended") ? ENDS_EARLY : INPUT_ERROR;
    lasts = is_lasting;
    fails = nth;
    unsigned failures = 0;
    for (int i = 0; i < 4; i++) {
        const enum oo_status status = step(&w);
        if (status != OO_OK) {
            CHECK(status == OO_E_FILE && strstr(oo_error_message(), path) &&
                      strstr(oo_error_message(), said),
                  "read %u: %s: %s", nth, oo_status_name(status), oo_error_message());
            failures++;
        }
        if (i == 1)
            fails = 0;
        CHECK(i < 2 || status == OO_OK, "read %u: step %d: %s", nth, i, oo_error_message());
    }
    CHECK(!w.host->disk->refused, "read %u: an error was taken for a refusal", nth);
    CHECK(is_lasting ? failures == 2 : failures <= 1, "read %u: %u failures", nth, failures);
    end(&w, "a read failed");
}

CASE(whichever_read_fails_the_next_step_is_right) {
    struct world w;
    begin(&w, 100000);
    need(step(&w), "step");
    feeds_end(&w);
    const unsigned reads = n_reads;
    end(&w, "counted");
    CHECK(reads > UNITS, "%u reads", reads);
    for (unsigned nth = 1; nth <= reads; nth += sweep_stride()) {
        fail_at(nth, 0, "Input/output error");
        fail_at(nth, 0, "ended before its bytes had come");
    }
    fail_at(1, 1, "Input/output error");
    fail_at(1, 1, "ended before its bytes had come");
}

static void read_though_direct_reads_are_refused(struct world *w) {
    how = REFUSED_DIRECT;
    steps(w, 2, "step");
    feeds_end(w);
    /* Those that were under way when the first was refused. */
    CHECK(n_direct >= 1 && n_direct <= OO_READ_THREADS, "%u direct reads", n_direct);
    CHECK(stats_of(w).disk_read_bytes == stats_of(w).h2d_bytes, "what was not read");
}

CASE(where_direct_reads_are_refused_the_cache_is_used) {
    static const int refusals[] = {EINVAL, EOPNOTSUPP, EFAULT};
    struct world w;
    for (int i = 0; i < 3; i++) {
        refusal = refusals[i];
        begin(&w, 100000);
        if (direct >= 0)
            read_though_direct_reads_are_refused(&w);
        end(&w, "refused");
    }
    begin(&w, 100000);
    if (direct >= 0) { /* as of a file system that refuses when the file is opened */
        oo__file_close(direct);
        direct = w.host->disk->direct = -1;
    }
    need(step(&w), "step");
    CHECK(!w.host->disk->refused, "what was never asked has refused");
    end(&w, "not opened");
}

CASE(a_read_says_how_much_came) {
    struct world w;
    begin(&w, 100000);
    char *room = oo_host_address(w.host);
    char some[300] = {0};
    errno = EINTR; /* of an earlier call */
    CHECK(oo__file_read(w.host->disk->buffered, some, 100, BEFORE) == 100 &&
              memcmp(some, room + BEFORE, 100) == 0,
          "wrong bytes");
    CHECK(oo__file_read(w.host->disk->buffered, some, 300, BEFORE + w.total - 200) == 200,
          "bytes behind the end");
    CHECK(oo__file_read(-1, some, 100, 0) == -1 && errno == EBADF, "read from no file");
    end(&w, "read");
}

CASE(where_nothing_can_be_locked_it_is_read_all_the_same) {
    sim.simRefuseRegistration(1);
    sim.simLockQuota(0);
    struct world w;
    begin(&w, 100000);
    CHECK(w.engine->up.base == NULL, "there is a ring");
    steps(&w, 2, "step");
    CHECK(n_reads > 2 * UNITS, "%u reads", n_reads);
    lasts = 1;
    fails = 1;
    ANSWERS(OO_E_FILE, "Input/output", step(&w));
    fails = 0;
    need(step(&w), "the next step");
    end(&w, "without a ring");
}

CASE(what_is_written_in_memory_counts) {
    struct world w;
    begin(&w, 100000);
    need(step(&w), "step");
    memset(w.master[3], 0x77, w.bytes[3]);
    memset(w.master[UNITS - 1] + 100, 0x78, 1000); /* of a unit that is in the arena */
    for (unsigned i = 0; i < UNITS; i++)
        need(oo_engine_refresh(w.engine, w.model), "refresh");
    const uint64_t before = stats_of(&w).disk_read_bytes, copied = stats_of(&w).h2d_bytes;
    steps(&w, 2, "step");
    const uint64_t read = stats_of(&w).disk_read_bytes - before;
    CHECK(read > 0 && read + w.bytes[3] <= stats_of(&w).h2d_bytes - copied, "%llu bytes read",
          (unsigned long long)read);
    /* Samples of what was written see that it is written again. */
    memset(w.master[3], 0x79, w.bytes[3]);
    need(step(&w), "step");
    CHECK(stats_of(&w).stale <= 2, "%llu stale", (unsigned long long)stats_of(&w).stale);
    end(&w, "written");
}

CASE(a_hit_sees_that_memory_was_written) {
    struct world w;
    begin(&w, 400000); /* all of it */
    need(step(&w), "step");
    feeds_end(&w);
    const unsigned reads = n_reads;
    need(step(&w), "step");
    CHECK(n_reads == reads, "what is there was read again");
    memset(w.master[5], 0x66, w.bytes[5]);
    need(step(&w), "step");                    /* which compares */
    const uint64_t stale = stats_of(&w).stale; /* its neighbours have bytes in its pages */
    CHECK(stale >= 1 && stale <= 3, "%llu stale", (unsigned long long)stale);
    end(&w, "a hit");
}

/* ---- what is kept in memory, once it was read ---- */

/* With it the world has both kinds of units, in turns. */
static void begin_keeping(struct world *w) {
    keeps = 1;
    begin(w, 100000);
}

static void end_keeping(struct world *w, const char *where) {
    end(w, where);
    keeps = 0;
}

CASE(what_has_a_place_is_read_once) {
    struct world w;
    begin_keeping(&w);
    CHECK(n_reads == 0 && oo_host_arrived(kept_in) == 0 && stats_of(&w).disk_arrived_bytes == 0 &&
              stats_of(&w).disk_kept_bytes == kept_bytes &&
              stats_of(&w).disk_bytes == w.total - kept_bytes && kept_bytes > w.total / 3,
          "%u reads at attach", n_reads);
    need(step(&w), "step");
    feeds_end(&w);
    CHECK(oo_host_arrived(kept_in) == kept_bytes && stats_of(&w).disk_arrived_bytes == kept_bytes,
          "%zu of %zu bytes have arrived", oo_host_arrived(kept_in), kept_bytes);
    for (int is_locked = 0; is_locked < 2; is_locked++) {
        const struct oo_stats before = stats_of(&w);
        steps(&w, 2, "step");
        feeds_end(&w);
        const struct oo_stats after = stats_of(&w);
        const uint64_t copied = after.h2d_bytes - before.h2d_bytes;
        const uint64_t read = after.disk_read_bytes - before.disk_read_bytes;
        const uint64_t by_ring = after.unlocked_h2d_bytes - before.unlocked_h2d_bytes;
        CHECK(read > 0 && copied >= read + kept_bytes, "%llu bytes read of %llu",
              (unsigned long long)read, (unsigned long long)copied);
        CHECK(by_ring == (is_locked ? read : copied), "%llu bytes by the ring, %llu read",
              (unsigned long long)by_ring, (unsigned long long)read);
        if (!is_locked) { /* in the middle of a forward: that takes time, which is no unit's */
            for (unsigned i = 0; i < UNITS && !w.engine->pace.begin; i++)
                need(use(&w, i, OO_FORWARD), "use");
            CHECK(w.engine->pace.begin != NULL, "nothing is measured");
            need(oo_engine_unlock(w.engine, kept_in), "unlock");
            CHECK(w.engine->pace.begin == NULL, "it takes what the lock does");
            need(oo_engine_lock(w.engine, kept_in, OO_ALL_BYTES), "lock");
        }
    }
    need(oo_engine_unlock(w.engine, kept_in), "unlock again");
    need(step(&w), "step from memory that is not locked any more");
    end_keeping(&w, "kept");
}

/* Two tensors side by side in a file, of which memory keeps one: they travel apart. */
CASE(what_is_kept_of_a_unit_travels_apart) {
    enum { UNIT = 4, HALF = 8192 };
    for (int nth = 0; nth < 2; nth++) {
        struct world w;
        begin(&w, 100000);
        char *master = w.master[UNIT];
        const size_t at = (size_t)(master - (char *)oo_host_address(w.host));
        const struct oo_tensor both[] = {{.host = master, .bytes = HALF},
                                         {.host = master + HALF, .bytes = HALF}};
        struct oo_host *room;
        struct oo_use use;
        uint32_t unit, member;
        size_t offsets[2];
        need(oo_host_create(HALF, &room), "a room");
        need(keep(&w, w.host, at + (size_t)nth * HALF, HALF, room, 0), "keep");
        need(oo_engine_lock(w.engine, room, 0), "know the room");
        unit = add_unit(w.engine, w.model, both, 2, &member, offsets);
        CHECK(w.bytes[UNIT] > 2 * HALF && w.engine->units[unit].n_parts == 2, "one part");
        for (int again = 0; again < 2; again++) {
            use = use_acquire(w.engine, member, w.stream, "acquire");
            need(oo__enter(w.engine, 0), "enter");
            need(oo__synchronize(w.engine, w.engine->h2d, 0), "synchronize");
            oo__leave(w.engine);
            for (int i = 0; i < 2; i++)
                CHECK(memcmp((char *)use.address + offsets[i], both[i].host, HALF) == 0,
                      "other bytes of tensor %d", i);
            use_end(w.engine, &use, w.stream, "release");
            CHECK(oo_host_arrived(room) == HALF, "%zu bytes", oo_host_arrived(room));
            need(oo_engine_refresh(w.engine, OO_ALL_MODELS), "refresh");
        }
        need(world_remove(&w), "remove");
        need(oo_host_destroy(room), "the room");
        end(&w, "apart");
    }
}

CASE(whatever_fails_while_it_arrives_the_next_step_is_right) {
    struct world w;
    for (unsigned nth = 1; nth <= UNITS; nth++) {
        begin_keeping(&w);
        how = nth % 2 ? ENDS_EARLY : INPUT_ERROR;
        fails = nth;
        (void)step(&w);
        fails = 0;
        need(step(&w), "the next step");
        feeds_end(&w);
        CHECK(oo_host_arrived(kept_in) == kept_bytes, "%zu bytes", oo_host_arrived(kept_in));
        end_keeping(&w, "failed");
    }
}

CASE(nothing_of_another_file_is_kept) {
    struct world w;
    begin_keeping(&w);
    const struct oo_file_state was = file_state(path);
    file_set_time(path, was.written_s + 1, 0);
    CHECK(step(&w) == OO_E_FILE, "%s", oo_error_message());
    feeds_end(&w);
    CHECK(oo_host_arrived(kept_in) == 0, "%zu bytes of another file", oo_host_arrived(kept_in));
    file_set_time(path, was.written_s, was.written_ns);
    need(step(&w), "the next step");
    end_keeping(&w, "another file");
}

CASE(a_write_counts_more_than_what_is_kept) {
    struct world w;
    begin_keeping(&w);
    memset(w.master[2], 0x71, w.bytes[2]); /* before it has arrived */
    need(step(&w), "step");
    feeds_end(&w);
    CHECK(oo_host_arrived(kept_in) < kept_bytes, "what was written is kept");
    memset(w.master[4], 0x72, w.bytes[4]); /* after that */
    w.master[8][w.bytes[8] - 1] ^= 1;
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    steps(&w, 2, "step"); /* which compares with the masters */
    end_keeping(&w, "written");
}

CASE(a_room_goes_before_its_file_or_after_it) {
    for (int is_first = 0; is_first < 2; is_first++) {
        struct world w;
        begin_keeping(&w);
        need(use(&w, 0, OO_FORWARD), "use"); /* others are on their way */
        need(world_remove(&w), "remove");
        struct oo_host *first = is_first ? kept_in : w.host, *then = is_first ? w.host : kept_in;
        need(oo_host_destroy(first), "the one");
        need(oo_host_destroy(then), "the other");
        world_free(&w);
        world_end(&w, "a room");
        file_delete(path);
        keeps = 0;
    }
}

static _Atomic int is_inside, may_go_on, has_ended;
static struct world *waited_for;

static ptrdiff_t patient_read(int file, void *target, size_t bytes, uint64_t begins) {
    is_inside = 1;
    while (!may_go_on)
        file_sleep(100);
    return oo__file_read(file, target, bytes, begins);
}

static void unlock_it(void *unused) {
    (void)unused;
    need(oo_engine_unlock(waited_for->engine, kept_in), "unlock");
    has_ended = 1;
}

static void keep_nothing(void *unused) {
    (void)unused;
    need(oo_engine_keep_in(waited_for->engine, kept_in, NULL, 0), "keep nothing");
    has_ended = 1;
}

/* A copy thread that has looked where something is kept, or whether it is locked there, goes on
 * from there. */
static void a_room_waits_until_no_copy_is_under_way(void (*change)(void *)) {
    struct world w;
    begin_keeping(&w);
    need(step(&w), "step"); /* so that the order is known */
    feeds_end(&w);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(oo_engine_unlock(w.engine, kept_in), "unlock");
    need(oo_engine_lock(w.engine, kept_in, OO_ALL_BYTES), "lock");
    const struct oo_disk *disk = w.host->disk;
    waited_for = &w;
    is_inside = may_go_on = has_ended = 0;
    w.host->disk->read = patient_read;
    need(use(&w, 0, OO_FORWARD), "use"); /* which is kept; the next one is read ahead */
    for (int i = 0; i < 100000 && !is_inside; i++)
        file_sleep(100);
    CHECK(is_inside, "nothing is read ahead");
    struct oo_thread *changes = oo__thread_start(change, NULL);
    file_sleep(50000); /* without the wait it ends meanwhile */
    CHECK(!has_ended && disk->n_kept && disk->kept[0]->locked,
          "changed while copies are under way");
    may_go_on = 1;
    oo__thread_join(changes);
    CHECK(has_ended && !(disk->n_kept && disk->kept[0]->locked), "not changed");
    w.host->disk->read = counted_read;
    need(step(&w), "step");
    end_keeping(&w, "changed");
}

CASE(a_room_is_locked_when_no_copy_is_under_way) {
    a_room_waits_until_no_copy_is_under_way(unlock_it);
}
CASE(another_room_is_taken_when_no_copy_is_under_way) {
    a_room_waits_until_no_copy_is_under_way(keep_nothing);
}

/* What is in the arena stays there; a room that is left may go at once. */
CASE(what_is_kept_may_change_in_the_middle) {
    struct world w;
    struct oo_host *left = NULL;
    begin_keeping(&w);
    for (unsigned odd = 1; odd < 4; odd++) {
        left = kept_in;
        need(step(&w), "step");
        for (unsigned i = 0; i < UNITS / 2; i++) /* some more are under way */
            need(use(&w, i, OO_FORWARD), "use");
        if (odd < 3) {
            need(oo_engine_keep_in(w.engine, left, NULL, 0), "keep nothing");
            CHECK(stats_of(&w).disk_kept_bytes == 0 && stats_of(&w).disk_bytes == w.total,
                  "something is kept");
        }
        keep_some(&w, odd % 2); /* the last time: of all, each in its room */
        const size_t kept = odd < 3 ? kept_bytes : w.total;
        CHECK(stats_of(&w).disk_kept_bytes == kept && stats_of(&w).disk_bytes == w.total - kept,
              "%llu bytes are kept", (unsigned long long)stats_of(&w).disk_kept_bytes);
        if (odd < 3)
            need(oo_host_destroy(left), "the room");
        steps(&w, 2, "step");
        feeds_end(&w);
        CHECK(oo_host_arrived(kept_in) == kept_bytes, "%zu bytes", oo_host_arrived(kept_in));
        const uint64_t before = stats_of(&w).disk_read_bytes;
        need(step(&w), "step");
        feeds_end(&w);
        CHECK((stats_of(&w).disk_read_bytes > before) == (odd < 3), "read, or not");
    }
    need(world_remove(&w), "remove");
    need(oo_host_destroy(left), "the other room");
    end_keeping(&w, "in the middle");
}

/* As a copy thread has it, with the device's context. */
static const char *bring(const struct world *w, const struct oo_part *part, const char *masters,
                         size_t bytes, char *room, struct oo_failure *failure, int *is_read) {
    OOCUcontext was = NULL;
    CHECK(sim.cuCtxPushCurrent_v2(w->engine->context) == OOCU_SUCCESS, "no context");
    const char *came = oo__disk_bring(w->engine, part, masters, bytes, room, failure, is_read);
    CHECK(sim.cuCtxPopCurrent_v2(&was) == OOCU_SUCCESS, "no context");
    return came;
}

/* Of what is read the pages are here, so that a page of two chunks arrives with either. */
CASE(whole_pages_are_kept) {
    enum { UNIT = 4 };
    struct world w;
    begin_keeping(&w);
    const struct oo_part *part = &w.engine->units[w.unit[UNIT]].parts[0];
    const size_t page = oo__page_bytes(), bytes = w.bytes[UNIT];
    const size_t first = page - (uintptr_t)w.master[UNIT] % page;
    const size_t last = (uintptr_t)(w.master[UNIT] + bytes) % page;
    char *room = oo__pages_map((bytes / page + 3) * page);
    CHECK(bytes > 3 * page && first > 1 && first < page && last > 1, "it begins with a page");
    const size_t begins[] = {1, first + page - 1, 0}, ends[] = {2, bytes - last, bytes};
    const size_t arrived[] = {first, bytes - last, bytes};
    for (int i = 0; i < 3; i++)
        for (int again = 0; again < 2; again++) {
            struct oo_failure failure = {0};
            int is_read = 0;
            const char *came = bring(&w, part, w.master[UNIT] + begins[i], ends[i] - begins[i],
                                     room, &failure, &is_read);
            CHECK(came && is_read == !again &&
                      memcmp(came, w.master[UNIT] + begins[i], ends[i] - begins[i]) == 0,
                  "round %d: other bytes, or not read once", i);
            CHECK(oo_host_arrived(kept_in) == arrived[i], "round %d: %zu of %zu bytes", i,
                  oo_host_arrived(kept_in), bytes);
        }
    oo__pages_unmap(room, (bytes / page + 3) * page);
    need(step(&w), "step");
    end_keeping(&w, "whole pages");
}

static ptrdiff_t one_less(int file, void *target, size_t bytes, uint64_t begins) {
    return oo__file_read(file, target, bytes, begins) - 1;
}

/* What is behind the masters in their last page is kept as well. */
CASE(a_read_that_ends_in_its_last_page_is_short) {
    enum { UNIT = 4 };
    struct world w;
    begin_keeping(&w);
    const struct oo_part *part = &w.engine->units[w.unit[UNIT]].parts[0];
    const size_t bytes = w.bytes[UNIT] - 300;
    struct oo_failure failure = {0};
    int is_read = 0;
    char *room = oo__pages_map(oo__ring_piece_bytes);
    CHECK(oo__disk_skew(w.master[UNIT] + bytes) > 1, "it ends with a page");
    w.host->disk->read = one_less;
    CHECK(!bring(&w, part, w.master[UNIT], bytes, room, &failure, &is_read), "it was read");
    ANSWERS(OO_E_FILE, "ended before", oo__disk_fail(&failure));
    CHECK(oo_host_arrived(kept_in) == 0, "%zu bytes are kept", oo_host_arrived(kept_in));
    w.host->disk->read = counted_read;
    oo__pages_unmap(room, oo__ring_piece_bytes);
    need(step(&w), "step");
    end_keeping(&w, "short");
}

/* As of a file system that has no direct reads, which says so when the file is opened. */
CASE(a_file_without_direct_reads_is_opened) {
    const char *const name = "/proc/version";
    const int file = oo__file_open(name, 0), refusing = oo__file_open(name, 1);
    if (file >= 0 && refusing < 0 && errno == EINVAL) {
        struct oo_disk *disk = NULL;
        need(oo__disk_open(name, file, &disk), "open");
        CHECK(disk->direct < 0, "opened past the cache");
        oo__disk_free(disk);
    }
    if (file >= 0)
        oo__file_close(file);
    if (refusing >= 0)
        oo__file_close(refusing);
}

CASE(what_cannot_be_kept) {
    struct world w;
    begin_keeping(&w);
    const size_t all = oo_host_bytes(w.host);
    struct oo_host *other;
    need(oo_host_create(8192, &other), "memory");
    ANSWERS(OO_E_ARGUMENT, "kept already", keep(&w, w.host, BEFORE + 1, 1, other, 0));
    CHECK(keep(&w, w.host, BEFORE - 1, 2, other, 0) == OO_E_ARGUMENT, "from before it");
    need(keep(&w, w.host, 0, BEFORE - 1, other, 1), "what is free");
    CHECK(keep(&w, w.host, all, 1, other, 0) == OO_E_ARGUMENT, "behind the file");
    CHECK(keep(&w, w.host, all + 5, 1, other, 0) == OO_E_ARGUMENT, "far behind it");
    CHECK(keep(&w, w.host, all - 1, 1, other, 8193) == OO_E_ARGUMENT, "far behind memory");
    CHECK(oo_host_check(w.host, all + 5, 1) == OO_E_ARGUMENT, "checked behind the file");
    need(oo_host_check(other, 0, 8192), "memory alone");
    CHECK(keep(&w, w.host, all - 1, 2, other, 0) == OO_E_ARGUMENT, "across its end");
    CHECK(keep(&w, w.host, all - 1, 1, other, 8192) == OO_E_ARGUMENT, "behind the memory");
    CHECK(keep(&w, w.host, all - 1, 0, other, 0) == OO_E_ARGUMENT, "nothing");
    CHECK(keep(&w, other, 0, 1, kept_in, 0) == OO_E_ARGUMENT, "not known");
    CHECK(keep(&w, kept_in, 0, 1, other, 0) == OO_E_ARGUMENT, "of no file");
    CHECK(keep(&w, w.host, all - 1, 1, w.host, 0) == OO_E_ARGUMENT, "in a file");
    const struct oo_keeping rows[] = {{(char *)oo_host_address(w.host) + all, 1, 0},
                                      {oo_host_address(w.host), 1, 0}};
    CHECK(oo_engine_keep_in(w.engine, other, rows, 2) == OO_E_ARGUMENT, "one of two");
    CHECK(w.host->disk->n_kept == 0, "%zu are kept", w.host->disk->n_kept);
    need(keep(&w, w.host, 0, BEFORE - 1, other, 0), "what is free");
    need(step(&w), "step");
    need(world_remove(&w), "remove");
    need(oo_engine_unlock(w.engine, w.host), "unlock"); /* then nothing is kept any more */
    need(oo_host_destroy(other), "destroy");
    need(oo_engine_lock(w.engine, w.host, 0), "lock");
    need(keep(&w, w.host, 0, BEFORE - 1, kept_in, 0), "what was kept in the other");
    need(oo_host_destroy(kept_in), "the room");
    keeps = 0;
    end(&w, "kept again");
}

#if !defined(_WIN32) /* which keeps a file that is mapped from being cut off */
CASE(nothing_is_touched_before_it_is_read) {
    struct world w;
    begin(&w, 100000);
    file_set_bytes(path, 0); /* touching it ends the process now */
    keep_some(&w, 0);
    CHECK(stats_of(&w).disk_kept_bytes == kept_bytes, "nothing is kept");
    keeps = 1;
    end_keeping(&w, "touched");
}
#endif

/* The threads that read go with the last file. */
CASE(threads_that_read_end_with_the_files) {
    struct world w;
    begin(&w, 100000);
    const size_t least =
        oo__processors() < OO_FEED_THREADS ? oo__processors() : (size_t)OO_FEED_THREADS;
    struct oo_host *pageable, *file;
    need(oo_host_create(4096, &pageable), "memory");
    need(oo_engine_lock(w.engine, pageable, 0), "which is not locked");
    need(open_file(&file), "another file");
    need(oo_engine_lock(w.engine, file, 0), "which is known too");
    need(step(&w), "step");
    need(world_remove(&w), "remove");
    need(oo_engine_unlock(w.engine, w.host), "unlock");
    CHECK(w.engine->feeder.n_threads == OO_READ_THREADS, "%u threads", w.engine->feeder.n_threads);
    need(oo_host_destroy(file), "destroy");
    CHECK(w.engine->feeder.n_threads == least, "%u threads", w.engine->feeder.n_threads);
    need(oo_engine_lock(w.engine, w.host, 0), "know");
    CHECK(w.engine->feeder.n_threads == OO_READ_THREADS, "%u threads", w.engine->feeder.n_threads);
    need(oo_host_destroy(pageable), "destroy");
    end(&w, "threads");
}

#if defined(_WIN32) /* which keeps a file that is mapped from being cut off again */
enum { NEXT_SECOND, NEXT_TICK, CHANGES, LONGER };
#else
enum { NEXT_SECOND, NEXT_TICK, LONGER, CHANGES };
#endif
enum { TICK_NS = 100 }; /* of Windows' clock of files */

/* Each of what a write changes, alone. */
static void change_file(int change, const struct oo_file_state *was) {
    if (change == NEXT_SECOND)
        file_set_time(path, was->written_s + 1, was->written_ns);
    if (change == NEXT_TICK)
        file_set_time(path, was->written_s, (was->written_ns + TICK_NS) % 1000000000);
    if (change == LONGER) {
        file_set_bytes(path, was->size + 1);
        file_set_time(path, was->written_s, was->written_ns);
    }
}

static void change_back(int change, const struct oo_file_state *was) {
    if (change == LONGER)
        file_set_bytes(path, was->size);
    file_set_time(path, was->written_s, was->written_ns);
}

CASE(a_file_that_was_written_is_refused_until_it_is_as_it_was) {
    struct world w;
    begin(&w, 100000);
    need(step(&w), "step");
    const struct oo_file_state was = file_state(path);
    for (int change = 0; change < CHANGES; change++) {
        change_file(change, &was);
        for (int i = 0; i < 2; i++) {
            const enum oo_status status = step(&w);
            CHECK(status == OO_E_FILE && strstr(oo_error_message(), "was written since"),
                  "change %d: %s: %s", change, oo_status_name(status), oo_error_message());
        }
        ANSWERS(OO_E_FILE, path, oo_host_check(w.host, BEFORE, w.total));
        change_back(change, &was);
        need(step(&w), "the next step");
        need(oo_host_check(w.host, BEFORE, w.total), "check");
    }
    CHECK(oo_host_check(w.host, BEFORE, w.total + 1) == OO_E_ARGUMENT, "bytes behind the file");
    end(&w, "another file");
}

#if !defined(_WIN32) /* Wine forgets the volume of a file that was renamed */
/* The file that is open is what is read, whatever has its name. */
CASE(its_name_does_not_matter) {
    struct world w;
    char away[80];
    begin(&w, 100000);
    snprintf(away, sizeof away, "%s-away", path);
    need(step(&w), "step");
    CHECK(rename(path, away) == 0, "no rename");
    need(step(&w), "step of a renamed file");
    FILE *other = fopen(path, "wb");
    CHECK(other && fwrite(path, sizeof path, 1, other) == 1 && fclose(other) == 0, "no other file");
    need(step(&w), "step of a replaced file");
    CHECK(file_delete(away) == 0, "not deleted");
    const uint64_t before = stats_of(&w).disk_read_bytes;
    need(step(&w), "step of a deleted file");
    need(oo_host_check(w.host, BEFORE, w.total), "check");
    CHECK(stats_of(&w).disk_read_bytes > before, "nothing was read");
    end(&w, "renamed");
}

/* No descriptor is left for direct reads: that is no refusal of the file system's. */
CASE(where_no_descriptor_is_left_it_is_said) {
    struct world w;
    struct rlimit was, none;
    struct oo_host *host = NULL;
    begin(&w, 100000);
    const int file = oo__file_open(path, 0), first = dup(file), second = dup(file);
    CHECK(getrlimit(RLIMIT_NOFILE, &was) == 0 && second > first, "no limit");
    for (int left = 0; left < 2; left++) {
        none = was;
        none.rlim_cur = (rlim_t)(left ? second : first);
        close(left ? first : second);
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "no limit");
        const enum oo_status status = oo_host_create_file(path, file, &host);
        CHECK(setrlimit(RLIMIT_NOFILE, &was) == 0, "no limit");
        CHECK(status == OO_E_FILE && !host && strstr(oo_error_message(), "Too many open files"),
              "%d left: %s: %s", left, oo_status_name(status), oo_error_message());
    }
    close(second);
    oo__file_close(file);
    end(&w, "no descriptor");
}
#endif

/* How masters are brought: 1: read, 0: from memory, -1: not at all. What comes is right. */
static int brought(const struct world *w, unsigned unit, char *room) {
    const struct oo_part *part = &w->engine->units[w->unit[unit]].parts[0];
    struct oo_failure failure = {0};
    int is_read = 0;
    const char *bytes = bring(w, part, w->master[unit], w->bytes[unit], room, &failure, &is_read);
    CHECK(!bytes == (failure.call != NULL) && (!bytes || failure.disk == NULL), "no reason");
    CHECK(!bytes || memcmp(bytes, w->master[unit], w->bytes[unit]) == 0, "other bytes");
    return !bytes ? -1 : is_read;
}

/* Pages that are not written are the file's: memory is used as long as that is the same, or where
 * all of them were written. */
CASE(memory_counts_where_all_of_it_is_known) {
    enum { UNIT = 4 }; /* of several pages */
    struct world w;
    begin(&w, 100000);
    const struct oo_file_state was = file_state(path);
    char *masters = w.master[UNIT];
    const size_t bytes = w.bytes[UNIT], page = oo__page_bytes();
    char *room = oo__pages_map((bytes / page + 3) * page);
    CHECK(bytes > 3 * page, "too small");
    CHECK(!oo__disk_written(w.host->disk, masters, bytes) && brought(&w, UNIT, room) == 1,
          "what no one has written is not read");
    masters[bytes - 1] ^= 1; /* the last page of several */
    CHECK(oo__disk_written(w.host->disk, masters, bytes) == 1 && brought(&w, UNIT, room) == 0,
          "what was written is read from the file");
    file_set_time(path, was.written_s + 1, 0);
    CHECK(oo__disk_written(w.host->disk, masters, bytes) == -1 && brought(&w, UNIT, room) == -1,
          "pages of another file were used");
    CHECK(oo__disk_written(w.host->disk, masters, 1) == 0, "the first page was not written");
    memset(masters, 0x77, bytes);
    CHECK(oo__disk_written(w.host->disk, masters, bytes) == 1 && brought(&w, UNIT, room) == 0,
          "what is all in memory is not used");
    oo__pages_unmap(room, (bytes / page + 3) * page);
    end(&w, "written in part");
}

CASE(another_file_than_the_callers_is_not_opened) {
    struct world w;
    struct oo_host *host = NULL;
    world_begin(&w);
    write_file(&w, BEFORE + w.total);
    char name[64];
    file_make(name, path, sizeof path);
    const int file = oo__file_open(name, 0);
    CHECK(oo_host_create_file(path, file, &host) == OO_E_FILE && !host &&
              strstr(oo_error_message(), "was replaced or written while it was opened"),
          "%s", oo_error_message());
    oo__file_close(file);
    file_delete(name);
    CHECK(oo_host_create_file(path, -1, &host) == OO_E_FILE && !host, "%s", oo_error_message());
    need(open_file(&host), "open");
    oo_host_destroy(host);
    file_delete(path);
    CHECK(open_file(&host) == OO_E_FILE && !host && strstr(oo_error_message(), "No such file"),
          "a file that is gone was opened: %s", oo_error_message());
    world_end(&w, "opened");
}

CASE(a_file_is_not_locked) {
    struct world w;
    begin(&w, 100000);
    struct oo_host *host;
    need(open_file(&host), "open");
    CHECK(oo_engine_lock(w.engine, host, OO_ALL_BYTES) == OO_E_ARGUMENT, "a file was locked");
    oo_host_destroy(host);
    need(step(&w), "step");
    end(&w, "not locked");
}

/* Of several pieces, each from a page on, whose first and last are of no whole pages. */
static void a_unit_of_several_pieces(int has_ring) {
    struct world w;
    sim.simRefuseRegistration(!has_ring);
    sim.simLockQuota(has_ring ? UINT64_MAX : 0);
    world_begin(&w);
    const size_t bytes = 2 * oo__ring_piece_bytes + 12345;
    for (unsigned i = 0; i < UNITS; i++)
        w.bytes[i] = i ? 1 : bytes;
    write_file(&w, BEFORE + bytes + 100);
    need(open_file(&w.host), "open");
    w.host->disk->read = counted_read;
    n_reads = fails = 0;
    need(oo_host_create(bytes + 77, &kept_in), "a room");
    need(oo_engine_lock(w.engine, w.host, 0), "know");
    need(keep(&w, w.host, BEFORE, bytes, kept_in, 77), "keep");
    begin_model(&w, 2 * bytes);
    add_units(&w, 1);
    need(use(&w, 0, OO_FORWARD), "use");
    CHECK(has_ring == (w.engine->up.base != NULL), "a ring is there, or not");
    CHECK(n_reads == 3 && stats_of(&w).disk_read_bytes == bytes, "%u reads", n_reads);
    CHECK(oo_host_arrived(kept_in) == bytes, "%zu bytes kept", oo_host_arrived(kept_in));
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    need(use(&w, 0, OO_FORWARD), "use");
    CHECK(n_reads == 3 && stats_of(&w).h2d_bytes == 2 * bytes, "%u reads", n_reads);
    end(&w, "several pieces");
    need(oo_host_destroy(kept_in), "the room");
}

CASE(a_unit_travels_in_pieces) { a_unit_of_several_pieces(1); }
CASE(a_unit_travels_in_pieces_without_a_ring) { a_unit_of_several_pieces(0); }

/* Bring units at the same time, in this order. */
static void feed_all(struct world *w, const unsigned *order, unsigned count, const uintptr_t *to) {
    struct oo_event *ready[2];
    need(oo__enter(w->engine, 0), "enter");
    for (unsigned i = 0; i < count; i++)
        need(oo__event_take(w->engine, OO_ORDERS, &ready[i]), "event");
    for (unsigned i = 0; i < count; i++)
        need(oo__feed_begin(w->engine, w->unit[order[i]], to[order[i]], ready[i], 0), "begin");
    for (unsigned i = 0; i < count; i++) {
        need(oo__feed_await(w->engine, w->unit[order[i]]), "await");
        oo__feed_forget(w->engine, w->unit[order[i]]);
        oo__event_give(w->engine, ready[i]);
    }
    need(oo__synchronize(w->engine, w->engine->h2d, 0), "synchronize");
    oo__leave(w->engine);
}

static unsigned most_active; /* copy threads, of the world that is waited for */

static ptrdiff_t crowded_read(int file, void *target, size_t bytes, uint64_t begins) {
    struct oo_feeder *feeder = &waited_for->engine->feeder;
    oo__mutex_lock(feeder->mutex);
    if (feeder->n_active > most_active)
        most_active = feeder->n_active;
    oo__mutex_unlock(feeder->mutex);
    return oo__file_read(file, target, bytes, begins);
}

/* They are read within the first of the seconds that a kernel takes, for which the host waits. */
static void read_while_the_host_waits(struct world *w, const uintptr_t *to) {
    const double begin_s = sim.simNow();
    struct oo_event *ready, *until;
    need(oo__enter(w->engine, 0), "enter");
    need(oo__event_take(w->engine, OO_ORDERS, &ready), "event");
    need(oo__event_take(w->engine, OO_ORDERS, &until), "event");
    need(oo__feed_begin(w->engine, w->unit[0], to[0], ready, 0), "begin");
    kernel(w->stream, (const void *)to[1], OO_ALIGNMENT, 0, 2);
    CHECK(w->engine->driver.cuEventRecord(until->handle, (OOCUstream)w->stream) == OOCU_SUCCESS,
          "not recorded");
    CHECK(sim.simTraceClear() == 0, "trace");
    need(oo__feeds_go_on(w->engine, until), "wait");
    CHECK(sim.simNow() - begin_s >= 2, "at %.6f s", sim.simNow() - begin_s);
    need(oo__feed_await(w->engine, w->unit[0]), "await");
    oo__feed_forget(w->engine, w->unit[0]);
    need(oo__synchronize(w->engine, w->engine->h2d, 0), "synchronize");
    oo__event_give(w->engine, ready);
    oo__event_give(w->engine, until);
    oo__leave(w->engine);
    for (uint64_t i = 0; i < sim.simTraceCount(); i++) {
        struct sim_trace_row row;
        CHECK(sim.simTraceRow(i, &row) == 0, "no row");
        CHECK(row.kind != SIM_READ || row.start_s < begin_s + 1, "a read begins at %.6f s",
              row.start_s - begin_s);
    }
}

/* Twelve pieces of either kind, first those that memory has. A piece takes the link 0.5 ms, and the
 * disk 2.1 ms: the link brings some that are kept between two that are read, and not all of them
 * one after the other. */
CASE(pieces_of_both_kinds_take_turns_on_the_link) {
    enum { SMALL = OO_ALIGNMENT };
    struct sim_device before, device;
    struct world w;
    CHECK(sim.simGetDevice(0, &before) == 0, "no device");
    device = before;
    device.link_gbps = 4;
    device.disk_gbps = 1;
    device.launch_s = 0; /* no call makes time pass */
    CHECK(sim.simSetDevice(0, &device) == 0, "no disk");
    world_begin(&w);
    const size_t bytes = 12 * oo__ring_piece_bytes;
    for (unsigned i = 0; i < UNITS; i++)
        w.bytes[i] = 1;
    write_file(&w, BEFORE + 2 * bytes + 100);
    need(open_file(&w.host), "open");
    need(oo_host_create(bytes + SMALL, &kept_in), "memory");
    need(oo_engine_lock(w.engine, w.host, 0), "know");
    need(keep(&w, w.host, BEFORE + bytes, bytes - SMALL, kept_in, 0), "keep");
    need(oo_engine_lock(w.engine, kept_in, OO_ALL_BYTES), "lock");
    begin_model(&w, 3 * bytes);
    const uintptr_t begin = ((uintptr_t)w.arena + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
    const uintptr_t to[] = {begin, begin + bytes};
    for (unsigned i = 0; i < 2; i++) {
        const struct oo_tensor tensors[] = {
            {.host = (char *)oo_host_address(kept_in) + bytes, .bytes = SMALL}, /* as a bias is */
            {.host = (char *)oo_host_address(w.host) + BEFORE + i * bytes, .bytes = bytes - SMALL},
        };
        size_t offsets[2];
        w.unit[i] = add_unit(w.engine, w.model, tensors, 2, &w.member[i], offsets);
    }
    w.engine->spans.seen[OO_TRACE_H2D] = 1; /* the first is measured, and so runs alone */
    const unsigned kept = 1, both[] = {1, 0};
    w.host->disk->read = crowded_read;
    waited_for = &w;
    most_active = 0;
    feed_all(&w, &kept, 1, to);
    CHECK(most_active >= 3, "what comes is read by %u threads", most_active);
    w.host->disk->read = counted_read;
    CHECK(oo_host_arrived(kept_in) == bytes - SMALL, "not kept");
    CHECK(sim.simSwitch(SIM_TRACE_ON, 1) == 0 && sim.simTraceClear() == 0, "no trace");
    feed_all(&w, both, 2, to);
    for (unsigned i = 0; i < 2; i++)
        CHECK(memcmp((char *)to[i] + SMALL, (char *)oo_host_address(w.host) + BEFORE + i * bytes,
                     bytes - SMALL) == 0,
              "other bytes");
    unsigned read = 0, rows_read = 0, streak = 0, longest = 0, between = 0;
    for (uint64_t i = 0; i < sim.simTraceCount(); i++) {
        struct sim_trace_row row;
        CHECK(sim.simTraceRow(i, &row) == 0, "no row");
        rows_read += row.kind == SIM_READ;
        if (row.kind == SIM_READ)
            continue;
        CHECK(row.kind == SIM_H2D, "no copy");
        const unsigned is_read = row.device_ptr < begin + bytes;
        read += is_read;
        streak = is_read ? 0 : streak + 1;
        if (is_read)
            between += longest;
        longest = streak > longest ? streak : longest;
    }
    CHECK(rows_read + 1 == read, "%u reads in the timeline, of %u pieces", rows_read, read);
    CHECK(read >= 12 && between > 0, "%u pieces were read, and no other between them", read);
    CHECK(longest < 12, "%u others one after the other", longest);
    const unsigned read_first[] = {0, 1};
    const uintptr_t to_read_first[] = {to[1], to[0]};
    CHECK(sim.simTraceClear() == 0, "trace");
    feed_all(&w, read_first, 2, to_read_first);
    struct sim_trace_row row;
    for (read = 0; sim.simTraceRow(read, &row) == 0; read++)
        if (row.kind == SIM_H2D && row.device_ptr < begin + bytes)
            break;
    for (rows_read = 0; read-- > 0;)
        rows_read += sim.simTraceRow(read, &row) == 0 && row.kind == SIM_H2D;
    CHECK(rows_read <= 3, "%u pieces that are read come before any that memory has", rows_read);
    read_while_the_host_waits(&w, to);
    CHECK(sim.simSwitch(SIM_TRACE_ON, 0) == 0, "trace");
    keeps = 1;
    end(&w, "in turns");
    keeps = 0;
    CHECK(sim.simSetDevice(0, &before) == 0, "no device");
}

/* Two small units take turns in one place, and two that come in three pieces in another. While one
 * of these comes, the kernel of a small one ends: the other then begins, and not when it is there.
 */
enum { FIRST, LARGE, LAST, OTHER, IN_TURN };
static uint64_t large_at, last_at;
static _Atomic int is_awaited, is_held, last_is_read, last_came_too_late;

static ptrdiff_t read_in_turn(int file, void *target, size_t bytes, uint64_t begins) {
    if (begins + 4096 > last_at)
        last_is_read = 1;
    else if (begins < large_at + oo__ring_piece_bytes / 2) { /* its first piece */
        for (int i = 0; i < 50000 && !is_awaited; i++)
            file_sleep(100);
        is_held |= sim.simHold((OOCUstream)waited_for->stream, 0) != 0 || sim.simAdvance(1e-3) != 0;
    } else {
        for (int i = 0; i < 50000 && !last_is_read; i++)
            file_sleep(100);
        last_came_too_late |= !last_is_read;
    }
    return oo__file_read(file, target, bytes, begins);
}

/* When nothing else is under way. What is read ahead then, is read so. */
static void use_alone(struct world *w, unsigned i,
                      ptrdiff_t (*read)(int, void *, size_t, uint64_t)) {
    struct oo_use use;
    double now_s;
    feeds_end(w);
    need(acquire(w->engine, w->member[i], w->stream, 0, OO_FORWARD, -1, 0, &use), "acquire");
    kernel(w->stream, (const void *)use.address, w->bytes[i], 0, 20e-6);
    feeds_end(w);
    CHECK(sim.simFinish(&now_s) == 0, "not finished");
    w->host->disk->read = read;
    use_end(w->engine, &use, w->stream, "release");
}

static void begin_in_turn(struct world *w) {
    world_begin(w);
    for (unsigned i = 0; i < UNITS; i++)
        w->bytes[i] = i >= IN_TURN ? 1 : i % 2 ? 2 * oo__ring_piece_bytes + 12345 : 3 * 4096;
    write_file(w, BEFORE + 2 * (w->bytes[FIRST] + w->bytes[LARGE]) + UNITS);
    need(open_file(&w->host), "open");
    need(oo_engine_lock(w->engine, w->host, 0), "know");
    begin_model(w, w->bytes[FIRST] + w->bytes[LARGE] + 4 * OO_ALIGNMENT);
    add_units(w, IN_TURN);
    large_at = (uint64_t)BEFORE + w->bytes[FIRST];
    last_at = large_at + w->bytes[LARGE];
    for (unsigned i = 0; i < 2 * IN_TURN - 1; i++)
        use_alone(w, i % IN_TURN, oo__file_read);
    waited_for = w;
    is_awaited = is_held = last_is_read = last_came_too_late = 0;
}

/* The first one's kernel is held when it is released, and its end is marked unless it `is_lost`.
 * Returns how many copies begin then. */
static unsigned release_held(struct world *w, int is_lost) {
    struct oo_use first;
    double now_s;
    need(acquire(w->engine, w->member[FIRST], w->stream, 0, OO_FORWARD, -1, 0, &first), "acquire");
    CHECK(sim.simFinish(&now_s) == 0 && sim.simHold((OOCUstream)w->stream, 1) == 0, "not held");
    kernel(w->stream, (const void *)first.address, w->bytes[FIRST], 0, 20e-6);
    if (is_lost)
        CHECK(sim.simFault("cuEventRecord", 1, OOCU_ERROR_NOT_SUPPORTED, 0) == 0, "no fault");
    const struct oo_fetched fetched = use_end(w->engine, &first, w->stream, "release");
    return fetched.count;
}

static void end_in_turn(struct world *w) {
    is_awaited = last_is_read = 1;
    CHECK(sim.simHold((OOCUstream)w->stream, 0) == 0 && !is_held, "still held");
    feeds_end(w);
    w->host->disk->read = oo__file_read;
    for (unsigned i = LARGE; i < IN_TURN; i++)
        need(use(w, i, OO_FORWARD), "use");
    end(w, "in turn");
}

CASE(a_place_that_is_left_while_a_read_is_awaited_is_used) {
    struct world w;
    struct oo_use large;
    begin_in_turn(&w);
    use_alone(&w, OTHER, read_in_turn);
    CHECK(oo__feeds_run(w.engine), "the large one is not read ahead");
    CHECK(release_held(&w, 0) == 0, "the last one would hold up what is read");
    is_awaited = 1; /* by the next call */
    large = use_acquire(w.engine, w.member[LARGE], w.stream, "acquire");
    CHECK(last_is_read && !last_came_too_late, "not read, or behind the one before it");
    CHECK(large.fetched.count == 1 && large.fetched.units[0] == w.unit[LAST] && !large.fetched.more,
          "%u begin", large.fetched.count);
    CHECK(sim.simHold((OOCUstream)w.stream, 0) == 0, "still held");
    use_end(w.engine, &large, w.stream, "release");
    end_in_turn(&w);
}

/* A use whose end nothing marks may not have ended. */
CASE(a_place_whose_use_is_lost_would_hold_up) {
    struct world w;
    begin_in_turn(&w);
    use_alone(&w, OTHER, read_in_turn);
    CHECK(release_held(&w, 1) == 0, "it counts as free");
    CHECK(stats_of(&w).lost_uses == 1, "%llu are lost", (unsigned long long)stats_of(&w).lost_uses);
    end_in_turn(&w);
}

/* Where nothing is fed, and where no file is read. */
CASE(a_copy_that_holds_up_no_read_begins) {
    for (int reads = 0; reads < 2; reads++) {
        struct world w;
        begin_in_turn(&w);
        use_alone(&w, OTHER, reads ? oo__file_read : read_in_turn);
        if (reads)
            feeds_end(&w);
        w.engine->feeder.reads = reads;
        CHECK(release_held(&w, 0) == 1, "it waits, %s", reads ? "and nothing is fed" : "of memory");
        w.engine->feeder.reads = 1;
        end_in_turn(&w);
    }
}

static _Atomic int told, gave_up;

/* Of the one that is read apart: the first bytes of all. */
static ptrdiff_t read_when_told(int file, void *target, size_t bytes, uint64_t begins) {
    for (int i = 0; begins < BEFORE && i < 50000 && !told; i++)
        file_sleep(100);
    gave_up |= begins < BEFORE && !told;
    return oo__file_read(file, target, bytes, begins);
}

enum { APART = IN_TURN, IN_MEMORY };

/* Units in turn, in this order, while one is read that none of them waits for. */
static void begin_reading_apart(struct world *w, const unsigned *turn, unsigned count) {
    struct oo_event *ready;
    begin_in_turn(w);
    const uintptr_t end_of_arena =
        (uintptr_t)w->arena + w->bytes[FIRST] + w->bytes[LARGE] + 4 * OO_ALIGNMENT - 1;
    kept_in = locked_memory(w->engine, 1);
    const struct oo_tensor tensors[] = {
        {.host = (char *)oo_host_address(w->host) + BEFORE, .bytes = 1},
        {.host = oo_host_address(kept_in), .bytes = 1}};
    for (unsigned i = 0; i < 2; i++) {
        const uint32_t one = 1;
        size_t offset;
        need(oo_unit_add(w->engine, w->model, &tensors[i], &one, 1, 0, &w->unit[APART + i],
                         &w->member[APART + i], &offset),
             "unit");
    }
    use_alone(w, OTHER, oo__file_read);
    for (unsigned i = 0; i < 3 * count; i++)
        use_alone(w, turn[i % count], oo__file_read);
    feeds_end(w);
    told = gave_up = 0;
    w->host->disk->read = read_when_told;
    need(oo__enter(w->engine, 0), "enter");
    need(oo__event_take(w->engine, OO_ORDERS, &ready), "event");
    need(oo__feed_begin(w->engine, w->unit[APART], end_of_arena / OO_ALIGNMENT * OO_ALIGNMENT,
                        ready, 0),
         "begin");
    w->engine->units[w->unit[APART]].ready = ready;
    oo__leave(w->engine);
}

static void end_reading_apart(struct world *w) {
    struct oo_unit *apart = &w->engine->units[w->unit[APART]];
    CHECK(!gave_up, "what is read apart was waited for");
    told = 1;
    need(oo__enter(w->engine, 0), "enter");
    need(oo__feed_await(w->engine, w->unit[APART]), "await");
    oo__feed_forget(w->engine, w->unit[APART]);
    oo__event_give(w->engine, apart->ready);
    apart->ready = NULL;
    oo__leave(w->engine);
    keeps = 1;
    end_in_turn(w);
    keeps = 0;
}

/* Use it with a kernel of so many seconds, whose end is marked unless it `is_lost`. Returns how
 * many copies begin, first in its acquire. */
static unsigned use_for(struct world *w, unsigned i, double seconds, int flags, int is_lost,
                        unsigned *begun) {
    struct oo_use use;
    need(acquire(w->engine, w->member[i], w->stream, 0, OO_FORWARD, -1, flags, &use), "acquire");
    *begun = use.fetched.count;
    kernel(w->stream, (const void *)use.address, w->bytes[i], 0, seconds);
    if (is_lost)
        CHECK(sim.simFault("cuEventRecord", 1, OOCU_ERROR_NOT_SUPPORTED, 0) == 0, "no fault");
    const struct oo_fetched fetched = use_end(w->engine, &use, w->stream, "release");
    return *begun + fetched.count;
}

/* The last small one wants the place of the first one, whose kernel takes a second. The host waits
 * for that before it is three visits ahead, and not before: then the kernel of the visit between is
 * still to run. What no event tells of is not waited for. */
CASE(a_host_that_is_far_ahead_waits_for_the_device) {
    static const unsigned turn[] = {FIRST, LARGE, LARGE, LARGE, LAST, OTHER};
    for (int is_lost = 0; is_lost < 2; is_lost++) {
        struct world w;
        begin_reading_apart(&w, turn, 6);
        const double begin_s = sim.simNow();
        for (unsigned i = 0; i < 3; i++) {
            unsigned in_acquire;
            const unsigned begun =
                use_for(&w, turn[i], i ? 20e-6 : 1, 0, is_lost && !i, &in_acquire);
            const unsigned expected = i == 2 && !is_lost;
            CHECK(in_acquire == expected && begun == expected, "visit %u: %u and %u begin", i,
                  in_acquire, begun);
            CHECK((sim.simNow() - begin_s > 0.5) == expected, "visit %u: at %.6f s", i,
                  sim.simNow() - begin_s);
        }
        end_reading_apart(&w);
    }
}

/* When a unit is released, the kernels that follow are still to be launched: its forward takes
 * until then, and no wait of the host shall count. The one before is in memory, and its acquire
 * does not wait. */
CASE(no_host_waits_for_the_device_when_it_releases) {
    static const unsigned turn[] = {FIRST, LARGE, IN_MEMORY, LAST, OTHER};
    struct world w;
    begin_reading_apart(&w, turn, 5);
    const double begin_s = sim.simNow();
    for (unsigned i = 0; i < 3; i++) {
        unsigned in_acquire;
        const int flags = i == 2 ? OO_NONBLOCKING : 0;
        const unsigned begun = use_for(&w, turn[i], i ? 20e-6 : 1, flags, 0, &in_acquire);
        CHECK(begun == 0 && sim.simNow() - begin_s < 0.5, "visit %u: %u begin, at %.6f s", i, begun,
              sim.simNow() - begin_s);
    }
    end_reading_apart(&w);
}

/* A read that is measured runs alone, but for copies of what memory has. */
static _Atomic int near_has_come, near_came_too_late;

static ptrdiff_t read_after_near(int file, void *target, size_t bytes, uint64_t begins) {
    for (int i = 0; i < 50000 && !near_has_come; i++)
        file_sleep(100);
    near_came_too_late |= !near_has_come;
    return oo__file_read(file, target, bytes, begins);
}

/* While all threads read, copies from memory are queued: one behind the other, and in front of what
 * is to be read next. */
CASE(copies_from_memory_are_queued_in_front) {
    enum { THERE = OO_READ_THREADS + 1, HERE = 4, BOTH = THERE + HERE };
    static const unsigned order[] = {THERE, THERE + 1, THERE + 2, THERE + 3, THERE - 1};
    struct world w;
    struct oo_event *ready[BOTH];
    unsigned number[BOTH];
    begin_keeping(&w);
    need(step(&w), "step");
    feeds_end(&w);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    const uintptr_t begin = ((uintptr_t)w.arena + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
    struct oo_feeder *feeder = &w.engine->feeder;
    near_has_come = near_came_too_late = 0;
    w.host->disk->read = read_after_near;
    need(oo__enter(w.engine, 0), "enter");
    for (unsigned i = 0; i < BOTH; i++) {
        number[i] = w.unit[i < THERE ? 2 * i + 1 : 2 * (i - THERE)];
        w.engine->spans.seen[OO_TRACE_H2D] = 1; /* none is measured */
        unsigned active = i == THERE ? 0 : OO_READ_THREADS;
        for (int k = 0; k < 50000 && active < OO_READ_THREADS; k++) {
            file_sleep(100);
            oo__mutex_lock(feeder->mutex);
            active = feeder->n_active;
            oo__mutex_unlock(feeder->mutex);
        }
        need(oo__event_take(w.engine, OO_ORDERS, &ready[i]), "event");
        need(oo__feed_begin(w.engine, number[i], begin, ready[i], 0), "begin");
    }
    oo__mutex_lock(feeder->mutex);
    const struct oo_feed *feed = feeder->first;
    for (unsigned i = 0; i <= HERE; i++, feed = feed ? feed->next : NULL)
        CHECK(feed == w.engine->units[number[order[i]]].feed, "another is the %uth", i);
    oo__mutex_unlock(feeder->mutex);
    near_has_come = 1;
    for (unsigned i = 0; i < BOTH; i++) {
        need(oo__feed_await(w.engine, number[i]), "await");
        oo__feed_forget(w.engine, number[i]);
        oo__event_give(w.engine, ready[i]);
    }
    need(oo__synchronize(w.engine, w.engine->h2d, 0), "synchronize");
    oo__leave(w.engine);
    feeds_end(&w);
    w.host->disk->read = counted_read;
    need(step(&w), "step");
    end_keeping(&w, "in order");
}

CASE(a_read_that_is_measured_keeps_no_copy_from_memory) {
    enum { KEPT, READ, BOTH };
    struct world w;
    struct oo_event *ready[BOTH];
    begin_keeping(&w);
    need(step(&w), "step");
    feeds_end(&w);
    need(oo_engine_refresh(w.engine, w.model), "refresh");
    const uintptr_t begin = ((uintptr_t)w.arena + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
    const uintptr_t to[BOTH] = {begin, begin + (w.bytes[KEPT] + OO_ALIGNMENT) / OO_ALIGNMENT *
                                                   OO_ALIGNMENT};
    near_has_come = near_came_too_late = 0;
    w.host->disk->read = read_after_near;
    need(oo__enter(w.engine, 0), "enter");
    for (int i = 0; i < BOTH; i++)
        need(oo__event_take(w.engine, OO_ORDERS, &ready[i]), "event");
    w.engine->spans.seen[OO_TRACE_H2D] = 0; /* the first is measured */
    for (int i = BOTH; i-- > 0;)
        need(oo__feed_begin(w.engine, w.unit[i], to[i], ready[i], 0), "begin");
    CHECK(w.engine->units[w.unit[READ]].feed->begin && !w.engine->units[w.unit[KEPT]].feed->begin,
          "not the one that is read is measured");
    for (int i = 0; i < BOTH; i++) {
        need(oo__feed_await(w.engine, w.unit[i]), "await");
        near_has_come = 1;
        oo__feed_forget(w.engine, w.unit[i]);
        oo__event_give(w.engine, ready[i]);
    }
    need(oo__synchronize(w.engine, w.engine->h2d, 0), "synchronize");
    oo__leave(w.engine);
    CHECK(!near_came_too_late, "what memory has came behind what is read");
    feeds_end(&w);
    w.host->disk->read = counted_read;
    need(step(&w), "step");
    end_keeping(&w, "measured");
}

CHECK_MAIN(world_prepare)
