/* Coded masters: what a kernel reads of them is the weights, bit for bit, whatever their kind, mode
 * and memory; what crosses the link is their code; damage is an error. */
#define _GNU_SOURCE /* files.h */
#include "disk.h"
#include "timing.h"
#include "weights.h"
#include "world.h"

#include "files.h"

#include <math.h>
#include <stdatomic.h>
#if !defined(_WIN32)
#include <sys/mman.h>
#endif

static const enum oo_codec_kind kinds[] = {OO_CODEC_BF16, OO_CODEC_FP8, OO_CODEC_INT8};
static const enum what patterns[] = {GAUSSIAN, ZEROS, RANDOM, SPECIALS, RARE, BURSTS, HALF_ZEROS};
enum { N_KINDS = 3, N_PATTERNS = 7, LAYERS = N_KINDS * N_PATTERNS, TENSORS = 4 };
enum { COUNT = 5 * 1024 + 76, PLAIN_BYTES = 700, MOST_BYTES = 2 * COUNT };

/* A layer of two coded tensors with one as it is between them, and one behind. */
struct layer {
    struct oo_tensor tensors[TENSORS];
    char plain[TENSORS][MOST_BYTES];
    size_t offsets[TENSORS];
    uint32_t unit, member;
    size_t link_bytes; /* that travel */
    unsigned decodes, copies;
};

/* Count what travels of a coded master, how often, and the chunks that a kernel decodes. */
static void count_coded(const struct oo_tensor *tensor, struct layer *layer) {
    size_t at = 0, decoded = 0;
    while (decoded < tensor->bytes) {
        struct oo_codec_header header;
        size_t bytes = 0;
        need(oo_codec_find((const char *)tensor->host + at, tensor->coded_bytes - at, &header,
                           &bytes),
             "find");
        const size_t travels = bytes - (header.mode == OO_CODEC_TIERS ? 0 : OO_CODEC_HEADER);
        layer->link_bytes += travels;
        layer->copies += travels > 0;
        layer->decodes += header.mode == OO_CODEC_TIERS;
        decoded += header.count * oo_codec_weight_bytes(tensor->coded_kind);
        at += (bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
    }
}

/* Put the layer's masters at `host`; returns where they end. */
static char *make_layer(struct layer *layer, unsigned number, size_t chunk, char *host) {
    const enum oo_codec_kind kind = kinds[number % N_KINDS];
    layer->link_bytes = layer->decodes = layer->copies = 0;
    for (int t = 0; t < TENSORS; t++) {
        struct oo_tensor *tensor = &layer->tensors[t];
        *tensor = (struct oo_tensor){.host = host, .bytes = PLAIN_BYTES};
        if (t % 2) {
            fill(host, PLAIN_BYTES, number + (unsigned)t);
            memcpy(layer->plain[t], host, PLAIN_BYTES);
            layer->link_bytes += PLAIN_BYTES;
            layer->copies++;
            host += (PLAIN_BYTES + 255) / 256 * 256;
            continue;
        }
        draw_weights(kind, patterns[(number / N_KINDS + (t ? 3 : 0)) % N_PATTERNS], COUNT,
                     layer->plain[t]);
        tensor->bytes = COUNT * oo_codec_weight_bytes(kind);
        tensor->coded_kind = kind;
        tensor->coded_bytes = encode(kind, layer->plain[t], COUNT, chunk, host);
        count_coded(tensor, layer);
        host += (tensor->coded_bytes + 255) / 256 * 256;
    }
    return host;
}

struct model {
    struct oo_engine *engine;
    struct oo_host *host, *room; /* of the masters; that keeps them, or has those of another unit */
    char *arena, *staging, path[64];
    uint32_t lease, staging_lease, model;
    uintptr_t stream;
    struct layer layers[LAYERS];
    unsigned n_layers;
    size_t link_bytes, kept_bytes;
    unsigned decodes, copies;
};

enum { STAGING = OO_STAGING_PIECES * 12288 + 256 };

/* Where the masters are. Of a file: read each time, with a ring or without, or kept once read, as
 * is said before units are added or when they are there. */
enum memory {
    LOCKED,
    BY_THE_RING,
    AS_IT_IS,
    IN_A_FILE,
    WITHOUT_A_RING,
    KEPT,
    KEPT_LATER,
    N_MEMORY
};
static enum memory memory_of_masters;

static void set_memory(enum memory memory) {
    memory_of_masters = memory;
    sim.simRefuseRegistration(memory == BY_THE_RING);
    sim.simLockQuota(memory == AS_IT_IS || memory == WITHOUT_A_RING ? 0 : UINT64_MAX);
}

enum { BEFORE = 700 }; /* bytes of the file in front of the masters */

static size_t bytes_of(const struct oo_tensor *tensor) {
    return tensor->coded_bytes ? tensor->coded_bytes : tensor->bytes;
}

static void keep_all(struct model *m) {
    struct oo_keeping kept[LAYERS * TENSORS];
    size_t count = 0;
    need(oo_host_create(oo_host_bytes(m->host), &m->room), "room");
    for (unsigned i = 0; i < m->n_layers; i++)
        for (int t = 0; t < TENSORS; t++) {
            const struct oo_tensor *tensor = &m->layers[i].tensors[t];
            const char *begin = (const char *)oo_host_address(m->host) + BEFORE;
            kept[count++] = (struct oo_keeping){tensor->host, bytes_of(tensor),
                                                (size_t)((const char *)tensor->host - begin)};
        }
    need(oo_engine_keep_in(m->engine, m->room, kept, count), "keep");
    need(oo_engine_lock(m->engine, m->room, 0), "know the room");
}

/* Have the masters in a file. */
static void move_to_file(struct model *m) {
    const size_t bytes = oo_host_bytes(m->host);
    const char *begin = oo_host_address(m->host);
    char *content = calloc(1, BEFORE + bytes);
    memcpy(content + BEFORE, begin, bytes);
    file_make(m->path, content, BEFORE + bytes);
    free(content);
    struct oo_host *in_memory = m->host;
    const int file = oo__file_open(m->path, 0);
    need(oo_host_create_file(m->path, file, &m->host), "open");
    oo__file_close(file);
    for (unsigned i = 0; i < m->n_layers; i++)
        for (int t = 0; t < TENSORS; t++) {
            struct oo_tensor *tensor = &m->layers[i].tensors[t];
            const size_t at = (size_t)((const char *)tensor->host - begin);
            tensor->host = (char *)oo_host_address(m->host) + BEFORE + at;
            m->kept_bytes += bytes_of(tensor);
        }
    need(oo_host_destroy(in_memory), "memory");
}

static struct model *open_model(unsigned n_layers, size_t chunk, size_t arena_bytes) {
    struct model *m = calloc(1, sizeof *m);
    char *end;
    seed = 5;
    m->n_layers = n_layers;
    need(oo_engine_create(sim.path, 0, &m->engine), "create");
    need(oo_host_create((size_t)LAYERS * 4 * MOST_BYTES, &m->host), "host");
    end = oo_host_address(m->host);
    for (unsigned i = 0; i < n_layers; i++)
        end = make_layer(&m->layers[i], i, chunk, end);
    const int of_file = memory_of_masters >= IN_A_FILE;
    if (of_file)
        move_to_file(m);
    const enum oo_status locked = oo_engine_lock(m->engine, m->host, of_file ? 0 : OO_ALL_BYTES);
    CHECK(locked == OO_OK || locked == OO_E_LOCK_REFUSED, "lock: %s", oo_error_message());
    if (memory_of_masters == KEPT)
        keep_all(m);
    need(oo_engine_compute_stream(m->engine, &m->stream), "stream");
    need(oo_lease_add(m->engine, &m->lease), "lease");
    need(oo_lease_add(m->engine, &m->staging_lease), "lease");
    m->arena = malloc(arena_bytes + 256);
    m->staging = malloc(STAGING);
    need(oo_segment_add(m->engine, m->lease, (uintptr_t)m->arena, arena_bytes + 256, m->stream),
         "segment");
    need(oo_staging_add(m->engine, m->staging_lease, (uintptr_t)m->staging, STAGING, m->stream),
         "staging");
    need(oo_model_add(m->engine, &m->model), "model");
    for (unsigned i = 0; i < n_layers; i++) {
        struct layer *layer = &m->layers[i];
        layer->unit =
            add_unit(m->engine, m->model, layer->tensors, TENSORS, &layer->member, layer->offsets);
        m->link_bytes += layer->link_bytes;
        m->decodes += layer->decodes;
        m->copies += layer->copies;
    }
    if (memory_of_masters == KEPT_LATER)
        keep_all(m);
    return m;
}

static void close_model(struct model *m, const char *where) {
    need(oo_model_remove(m->engine, m->model), where);
    need(oo_lease_remove(m->engine, m->lease), where);
    need(oo_lease_remove(m->engine, m->staging_lease), where);
    need(oo_host_destroy(m->host), where);
    if (m->room)
        need(oo_host_destroy(m->room), where);
    if (*m->path)
        CHECK(file_delete(m->path) == 0, "%s: not deleted", where);
    need(oo_engine_destroy(m->engine), where);
    check_no_reports(where);
    check_nothing_alive(where);
    free(m->arena);
    free(m->staging);
    free(m);
    CHECK(sim_reset(&sim) == 0, "%s: not reset", where);
    set_memory(LOCKED);
}

static enum oo_status use_layer(struct model *m, unsigned i, const char *where) {
    const struct layer *layer = &m->layers[i];
    struct oo_use use;
    struct oo_fetched fetched;
    enum oo_status status =
        acquire_launched(m->engine, layer->member, m->stream, 0, OO_FORWARD, -1, 20e-6, 0, &use);
    if (status != OO_OK)
        return status;
    for (int t = 0; t < TENSORS; t++)
        CHECK(!memcmp((const char *)use.address + layer->offsets[t], layer->plain[t],
                      layer->tensors[t].bytes),
              "%s: tensor %d of layer %u", where, t, i);
    return oo_engine_release(m->engine, use.ticket, m->stream, 0, &fetched);
}

static struct oo_stats stats_of_model(struct model *m) {
    struct oo_stats stats = {0};
    need(oo_engine_stats(m->engine, OO_ALL_MODELS, &stats), "stats");
    return stats;
}

/* ---- bits, and bytes on the link ---- */

CASE(each_kind_mode_and_memory_gives_its_bits) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++)
        for (enum memory memory = LOCKED; memory < N_MEMORY; memory++) {
            char where[64];
            if (memory >= IN_A_FILE && schedule != SIM_DELAYED)
                continue; /* reads take long */
            snprintf(where, sizeof where, "schedule %d, memory %d", schedule, (int)memory);
            sim.simSetSchedule(schedule, 3);
            set_memory(memory);
            struct model *m = open_model(LAYERS, 1024, 3 * 4 * MOST_BYTES);
            for (int round = 0; round < 2; round++) {
                for (unsigned i = 0; i < LAYERS; i++)
                    need(use_layer(m, i, where), where);
                if (m->room && round == 0) { /* then it is copied from there */
                    need(oo_engine_unlock(m->engine, m->room), "unlock");
                    need(oo_engine_lock(m->engine, m->room, OO_ALL_BYTES), "lock");
                }
            }
            const struct oo_stats stats = stats_of_model(m);
            CHECK(stats.evictions > LAYERS && stats.prefetches > 0, "%s: all have room", where);
            CHECK(stats.decodes > m->decodes && stats.staging_bytes == STAGING - 256,
                  "%s: %llu of %u decodes", where, (unsigned long long)stats.decodes, m->decodes);
            CHECK(stats.managed_bytes > stats.largest_unit_bytes && stats.late < 2 * LAYERS,
                  "%s: nothing is managed", where);
            CHECK(!m->room || (oo_host_arrived(m->room) == m->kept_bytes &&
                               stats.disk_arrived_bytes == m->kept_bytes &&
                               stats.disk_kept_bytes == m->kept_bytes),
                  "%s: %zu of %zu bytes, which the figures call %llu of %llu", where,
                  oo_host_arrived(m->room), m->kept_bytes,
                  (unsigned long long)stats.disk_arrived_bytes,
                  (unsigned long long)stats.disk_kept_bytes);
            CHECK(memory != LOCKED || stats.host_waits == 0, "%s: %llu host waits", where,
                  (unsigned long long)stats.host_waits);
            close_model(m, where);
        }
}

CASE(what_travels_is_counted_as_it_is_coded) {
    for (enum memory memory = LOCKED; memory < N_MEMORY; memory++) {
        set_memory(memory);
        struct model *m = open_model(LAYERS, 2048, (size_t)LAYERS * 4 * MOST_BYTES);
        struct sim_stats before, after;
        size_t tensors = 0;
        sim.simGetStats(&before);
        for (unsigned i = 0; i < LAYERS; i++)
            need(use_layer(m, i, "use"), "use");
        sim.simGetStats(&after);
        const struct oo_stats stats = stats_of_model(m);
        for (unsigned i = 0; i < LAYERS; i++)
            for (int t = 0; t < TENSORS; t++)
                tensors += m->layers[i].tensors[t].bytes;
        CHECK(stats.h2d_bytes == m->link_bytes &&
                  after.h2d_bytes - before.h2d_bytes == stats.h2d_bytes,
              "memory %d: %llu bytes counted, %llu copied, %zu coded", (int)memory,
              (unsigned long long)stats.h2d_bytes,
              (unsigned long long)(after.h2d_bytes - before.h2d_bytes), m->link_bytes);
        CHECK(stats.h2d_copies == m->copies, "memory %d: %llu of %u copies", (int)memory,
              (unsigned long long)stats.h2d_copies, m->copies);
        CHECK(stats.decodes == m->decodes && stats.decoded_bytes > stats.decodes * 1024 &&
                  stats.decoded_bytes < tensors,
              "memory %d: %llu decodes, %llu bytes", (int)memory, (unsigned long long)stats.decodes,
              (unsigned long long)stats.decoded_bytes);
        CHECK(stats.h2d_bytes < tensors * 9 / 10, "coding saves nothing");
        /* Of decodes a sample is measured, and of nothing else. */
        const uint64_t seen = m->engine->spans.seen[OO_TRACE_DECODE];
        CHECK(memory == LOCKED ? seen == m->decodes : seen == 0, "%llu of %u may be measured",
              (unsigned long long)seen, m->decodes);
        const size_t by_ring = memory == LOCKED ? 0 : m->link_bytes;
        const size_t pageable = memory == BY_THE_RING || memory == AS_IT_IS ? m->link_bytes : 0;
        CHECK(stats.unlocked_h2d_bytes == by_ring && stats.pageable_bytes == pageable,
              "memory %d: %llu bytes are not locked", (int)memory,
              (unsigned long long)stats.unlocked_h2d_bytes);
        CHECK(stats.disk_read_bytes <= m->link_bytes &&
                  (stats.disk_read_bytes > 0) == (memory >= IN_A_FILE) &&
                  (memory >= KEPT || memory < IN_A_FILE || stats.disk_read_bytes == m->link_bytes),
              "memory %d: %llu bytes read", (int)memory, (unsigned long long)stats.disk_read_bytes);
        close_model(m, "counted");
    }
}

/* A chunk that is larger than a piece of the ring comes in steps; where one fails nothing is
 * decoded, and the next use is right. */
CASE(a_chunk_passes_through_the_ring_in_steps) {
    set_memory(BY_THE_RING);
    struct model *m = open_model(1, 8192, (size_t)LAYERS * 4 * MOST_BYTES);
    struct layer *layer = &m->layers[0];
    need(oo_engine_reserve_rings(m->engine, OO_RING_PIECES * oo__page_bytes()), "small rings");
    need(use_layer(m, 0, "in steps"), "use");
    CHECK(stats_of_model(m).h2d_bytes == m->link_bytes, "not all has come");
    for (int t = 1; t < TENSORS; t++) /* nothing but one chunk */
        layer->tensors[t].bytes = 0;
    layer->unit = add_unit(m->engine, m->model, layer->tensors, 1, &layer->member, layer->offsets);
    const struct oo_unit *unit = &m->engine->units[layer->unit];
    const size_t most = m->engine->up.piece_bytes;
    CHECK(unit->n_parts == 1 && unit->parts[0].header.mode == OO_CODEC_TIERS &&
              unit->parts[0].bytes > most,
          "%u parts, the first of %zu bytes", unit->n_parts, unit->parts[0].bytes);
    unsigned nth = 0;
    for (int struck = 1; struck && nth < 10;) {
        need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh");
        const struct oo_stats before = stats_of_model(m);
        fail_call("cuMemcpyHtoDAsync", ++nth);
        const enum oo_status status = use_layer(m, 0, "a step fails");
        const struct oo_stats after = stats_of_model(m);
        struck = status == OO_E_DRIVER;
        CHECK(struck || status == OO_OK, "%s", oo_error_message());
        CHECK(after.decodes - before.decodes == !struck, "call %u: decoded without all of it", nth);
        sim.simFaultClear();
        need(use_layer(m, 0, "after it"), "use");
    }
    CHECK(nth - 1 == (unit->parts[0].bytes + most - 1) / most, "%u steps", nth - 1);
    close_model(m, "in steps");
}

#if !defined(_WIN32)
/* The thread that asks for a unit would wait for the disk, and fill the system's cache. */
CASE(no_use_looks_at_what_is_in_a_file) {
    set_memory(IN_A_FILE);
    struct model *m = open_model(LAYERS, 1024, 3 * 4 * MOST_BYTES);
    void *pages = oo_host_address(m->host);
    CHECK(mprotect(pages, oo_host_bytes(m->host), PROT_NONE) == 0, "not protected");
    for (unsigned i = 0; i < LAYERS; i++)
        need(use_layer(m, i, "not looked at"), "use");
    CHECK(mprotect(pages, oo_host_bytes(m->host), PROT_READ | PROT_WRITE) == 0, "protected");
    close_model(m, "not looked at");
}

CASE(headers_that_memory_has_are_not_looked_at) {
    set_memory(KEPT);
    struct model *m = open_model(LAYERS, 1024, 3 * 4 * MOST_BYTES);
    void *pages = oo_host_address(m->host);
    struct oo_host *other;
    need(oo_host_create(4096, &other), "memory");
    CHECK(mprotect(pages, oo_host_bytes(m->host), PROT_NONE) == 0, "not protected");
    need(oo_engine_keep_in(m->engine, other, NULL, 0), "nothing more");
    CHECK(mprotect(pages, oo_host_bytes(m->host), PROT_READ | PROT_WRITE) == 0, "protected");
    need(oo_host_destroy(other), "destroy");
    close_model(m, "not looked at");
}

CASE(headers_of_a_file_that_was_cut_off_are_not_kept) {
    set_memory(IN_A_FILE);
    struct model *m = open_model(LAYERS, 1024, 3 * 4 * MOST_BYTES);
    file_set_bytes(m->path, 0); /* touching it ends the process now */
    keep_all(m);
    CHECK(oo_host_arrived(m->room) == 0, "%zu bytes", oo_host_arrived(m->room));
    close_model(m, "cut off");
}
#endif

enum { MOST_READS = 32 };
static uint64_t reads[MOST_READS][2]; /* where, and how much */
static _Atomic unsigned n_reads;
static _Atomic int failing_read = -1; /* which of them */

static ptrdiff_t note_read(int file, void *target, size_t bytes, uint64_t begin) {
    const unsigned number = n_reads++ % MOST_READS;
    reads[number][0] = begin;
    reads[number][1] = bytes;
    return oo__file_read(file, target, bytes, begin);
}

static ptrdiff_t read_or_fail(int file, void *target, size_t bytes, uint64_t begin) {
    const int failing = failing_read;
    if (failing < 0 || reads[failing][0] != begin || reads[failing][1] != bytes)
        return oo__file_read(file, target, bytes, begin);
    memset(target, 0x55, bytes);
    errno = EIO;
    return -1;
}

/* With small pieces of a ring, so that a chunk is read in several, or without one. */
CASE(a_chunk_of_which_a_read_fails_is_not_decoded) {
    for (enum memory memory = IN_A_FILE; memory <= WITHOUT_A_RING; memory++) {
        set_memory(memory);
        struct model *m = open_model(1, 8192, (size_t)LAYERS * 4 * MOST_BYTES);
        unsigned fewer = 0;
        if (memory == IN_A_FILE)
            need(oo_engine_reserve_rings(m->engine, OO_RING_PIECES * oo__page_bytes()), "rings");
        n_reads = 0;
        m->host->disk->read = note_read;
        need(use_layer(m, 0, "noted"), "use");
        m->host->disk->read = read_or_fail;
        CHECK(n_reads >= TENSORS && n_reads <= MOST_READS, "%u reads", n_reads);
        for (unsigned nth = 0; nth < n_reads; nth++) {
            need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh");
            const struct oo_stats before = stats_of_model(m);
            failing_read = (int)nth;
            CHECK(use_layer(m, 0, "a read fails") == OO_E_FILE, "%s", oo_error_message());
            failing_read = -1;
            fewer += stats_of_model(m).decodes - before.decodes < m->decodes;
            need(use_layer(m, 0, "after it"), "use");
        }
        CHECK(fewer >= n_reads - TENSORS / 2, "%u of %u", fewer, n_reads);
        close_model(m, "a read fails");
    }
}

static OOCUresult(OOCUDAAPI *copy_h2d)(OOCUdeviceptr, const void *, size_t, OOCUstream);
static const void *watched;
static _Atomic int n_watched;

static OOCUresult OOCUDAAPI watching_copy(OOCUdeviceptr target, const void *source, size_t bytes,
                                          OOCUstream stream) {
    n_watched += source == watched;
    return copy_h2d(target, source, bytes, stream);
}

/* A locked chunk next to memory that is not locked is copied directly. */
CASE(a_locked_chunk_passes_through_no_ring) {
    struct model *m = open_model(1, 8192, (size_t)LAYERS * 4 * MOST_BYTES);
    struct layer *layer = &m->layers[0];
    layer->tensors[1].host = layer->plain[1]; /* no page of it is locked */
    layer->tensors[2].bytes = layer->tensors[3].bytes = 0;
    layer->unit = add_unit(m->engine, m->model, layer->tensors, 2, &layer->member, layer->offsets);
    watched = m->engine->units[layer->unit].parts[0].host;
    n_watched = 0;
    copy_h2d = m->engine->driver.cuMemcpyHtoDAsync;
    m->engine->driver.cuMemcpyHtoDAsync = watching_copy;
    need(use_layer(m, 0, "locked in part"), "use");
    const struct oo_stats stats = stats_of_model(m);
    CHECK(stats.unlocked_h2d_bytes == PLAIN_BYTES && stats.decodes == 1, "%llu bytes, %llu decodes",
          (unsigned long long)stats.unlocked_h2d_bytes, (unsigned long long)stats.decodes);
    CHECK(n_watched == 1, "the chunk went through the ring");
    unsigned free_pieces = 0;
    for (const struct oo_staging_piece *p = m->engine->decoder.free_first; p; p = p->next)
        free_pieces++;
    CHECK(free_pieces == OO_STAGING_PIECES, "%u pieces were given back", free_pieces);
    close_model(m, "locked in part");
}

CASE(a_chunk_of_memory_that_is_not_known_travels) {
    struct model *m = open_model(1, 8192, (size_t)LAYERS * 4 * MOST_BYTES);
    struct layer *layer = &m->layers[0];
    char *own = malloc(layer->tensors[0].coded_bytes);
    memcpy(own, layer->tensors[0].host, layer->tensors[0].coded_bytes);
    layer->tensors[0].host = own;
    for (int t = 1; t < TENSORS; t++)
        layer->tensors[t].bytes = 0;
    layer->unit = add_unit(m->engine, m->model, layer->tensors, 1, &layer->member, layer->offsets);
    CHECK(!m->engine->units[layer->unit].parts[0].memory, "it is known");
    need(use_layer(m, 0, "not known"), "use");
    close_model(m, "not known");
    free(own);
}

/* Many chunks and few pieces; copies do not wait for the host. */
CASE(chunks_take_turns_in_the_staging_memory) {
    struct world w;
    world_open_coded(&w, 400000, -1);
    enum { WEIGHTS = 40 * 1024 + 5 }; /* the last five are as they are */
    char *plain = malloc(WEIGHTS);
    fill_weights(plain, WEIGHTS, 3);
    struct oo_host *host = locked_memory(w.engine, 2 * WEIGHTS);
    const struct oo_tensor tensor = {
        .host = oo_host_address(host),
        .bytes = WEIGHTS,
        .coded_bytes = encode(OO_CODEC_INT8, plain, WEIGHTS, 1024, oo_host_address(host)),
        .coded_kind = OO_CODEC_INT8};
    size_t offset;
    need(oo_member_move(w.engine, w.member[1], &tensor, 1, &w.unit[1], &offset), "move");
    w.expected[1] = plain;
    w.bytes[1] = WEIGHTS;
    const uint64_t launches = sim.simCallCount("cuLaunchKernel");
    const uint64_t records = sim.simCallCount("cuEventRecord");
    const struct oo_stats before = stats_of(&w);
    need(use(&w, 1, OO_FORWARD), "use");
    const struct oo_stats after = stats_of(&w);
    const uint64_t recorded = sim.simCallCount("cuEventRecord") - records;
    CHECK(recorded >= 2 * 40 && recorded < 3 * 40,
          "%llu marks: of a chunk's arrival, of its decode's end, and of none again",
          (unsigned long long)recorded);
    CHECK(sim.simCallCount("cuLaunchKernel") - launches == 40 &&
              after.decodes - before.decodes == 40,
          "%llu launches", (unsigned long long)(sim.simCallCount("cuLaunchKernel") - launches));
    CHECK(after.host_waits == before.host_waits, "the host waits");
    need(world_remove(&w), "remove");
    need(oo_host_destroy(host), "destroy");
    world_close(&w, "turns");
    free(plain);
}

/* Its decodes run still, into bytes that are free again: the next copy comes after them. */
CASE(a_copy_that_failed_after_decodes_leaves_them_loose) {
    struct world w;
    uint32_t unit, members[2];
    size_t offsets[2];
    struct oo_use use_of_it;
    world_open_coded(&w, 400000, -1);
    const struct oo_tensor row[] = {world_coded_master(&w, 4),
                                    {.host = w.master[3], .bytes = w.bytes[3]}};
    unit = add_row(w.engine, w.model, row, 2, members, offsets);
    CHECK(w.engine->units[unit].decodes && !w.engine->units[unit].only_decoded, "not mixed");
    const unsigned last = w.engine->units[unit].n_parts;
    fail_call("cuMemcpyHtoDAsync", last);
    CHECK(acquire(w.engine, members[0], w.stream, 0, OO_FORWARD, -1, 0, &use_of_it) == OO_E_DRIVER,
          "no error of copy %u", last);
    CHECK(w.engine->decoder.loose, "the next copy would not wait for %u decodes", last - 1);
    sim.simFaultClear();
    need(step(&w), "over it");
    world_close(&w, "loose");
}

/* The driver has refused to mark the ends of decodes: what comes after them knows all the same. */
CASE(a_piece_whose_decode_has_no_mark_is_used_after_it) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        struct world w;
        struct oo_event *stale[OO_STAGING_PIECES];
        sim.simSetSchedule(schedule, 9);
        world_open_coded(&w, 400000, -1);
        need(use(&w, 4, OO_FORWARD), "all pieces are used");
        need(use(&w, 8, OO_FORWARD), "all pieces are used");
        for (int i = 0; i < OO_STAGING_PIECES; i++) {
            struct oo_staging_piece *piece = &w.engine->decoder.lent->pieces[i];
            stale[i] = piece->decoded;
            oo__mutex_lock(w.engine->mutex);
            need(oo__event_take(w.engine, OO_ORDERS, &piece->decoded), "event");
            oo__mutex_unlock(w.engine->mutex);
            piece->lost = 1;
        }
        for (unsigned i = 1; i <= UNITS; i++) /* the first is of chunks alone: nothing settles */
            need(use(&w, i % UNITS, OO_FORWARD), "use");
        oo__mutex_lock(w.engine->mutex);
        for (int i = 0; i < OO_STAGING_PIECES; i++) {
            CHECK(!w.engine->decoder.lent->pieces[i].lost, "piece %d is lost still", i);
            oo__event_give(w.engine, stale[i]);
        }
        oo__mutex_unlock(w.engine->mutex);
        world_close(&w, "no mark");
    }
}

/* ---- what is refused ---- */

static void refused(struct model *m, const struct oo_tensor *tensor, int trainable,
                    const char *says) {
    const uint32_t one = 1;
    uint32_t unit, member;
    size_t offset;
    const enum oo_status status =
        oo_unit_add(m->engine, m->model, tensor, &one, 1, trainable, &unit, &member, &offset);
    CHECK(status == OO_E_ARGUMENT && strstr(oo_error_message(), says), "%s, not %s: %s",
          oo_status_name(status), says, oo_error_message());
}

CASE(what_is_no_coded_master_is_refused) {
    struct model *m = open_model(2, 2048, 4 * MOST_BYTES);
    const struct oo_tensor good = m->layers[0].tensors[0];
    struct oo_tensor bad = good;
    struct oo_codec_header first;
    size_t bytes;
    refused(m, &good, 1, "trainable");
    bad.coded_kind = (enum oo_codec_kind)0;
    refused(m, &bad, 0, "of kind 0");
    bad.coded_kind = (enum oo_codec_kind)4;
    refused(m, &bad, 0, "of kind 4");
    bad.coded_kind = OO_CODEC_INT8;
    refused(m, &bad, 0, "is of another kind");
    bad = good;
    bad.bytes = good.bytes - 1; /* half a weight */
    refused(m, &bad, 0, "coded bytes of kind 1");
    bad.bytes = good.bytes - 2;
    refused(m, &bad, 0, "a number of weights that does not fit");
    bad.bytes = good.bytes + 2;
    refused(m, &bad, 0, "a number of weights that does not fit");
    bad.bytes = 4096; /* those of the first chunk */
    refused(m, &bad, 0, "there are too many");
    bad = good;
    need(oo_codec_find(good.host, good.coded_bytes, &first, &bytes), "find");
    bad.coded_bytes = (bytes + 255) / 256 * 256;
    refused(m, &bad, 0, "there are too few");
    bad.coded_bytes = good.coded_bytes - 1;
    refused(m, &bad, 0, "whose header says");
    bad.coded_bytes = SIZE_MAX;
    refused(m, &bad, 0, "coded bytes of kind 1");
    bad = good;
    bad.host = (const char *)good.host + 256;
    refused(m, &bad, 0, "a chunk begins with");
    const struct oo_tensor first_is_bad[] = {bad, good};
    const uint32_t two = 2;
    uint32_t unit, member;
    size_t offsets[2];
    CHECK(oo_unit_add(m->engine, m->model, first_is_bad, &two, 1, 0, &unit, &member, offsets) ==
              OO_E_ARGUMENT,
          "the second is good");
    ANSWERS(OO_E_ARGUMENT, "coded weights", oo_unit_set_trainable(m->engine, m->layers[0].unit, 1));
    need(oo_unit_set_trainable(m->engine, m->layers[0].unit, 0), "as it is");
    need(use_layer(m, 0, "after all of it"), "use");
    close_model(m, "refused");
}

CASE(a_unit_is_trained_once_its_codes_have_left) {
    struct model *m = open_model(1, 1024, (size_t)4 * MOST_BYTES);
    const struct layer *layer = &m->layers[0];
    const struct oo_tensor plain = {.host = layer->plain[1], .bytes = layer->tensors[1].bytes};
    const struct oo_tensor tensors[] = {layer->tensors[0], plain};
    uint32_t unit, members[2], left;
    size_t offsets[2];
    unit = add_row(m->engine, m->model, tensors, 2, members, offsets);
    CHECK(tensors[0].coded_bytes && oo_unit_set_trainable(m->engine, unit, 1) == OO_E_ARGUMENT,
          "one member is coded");
    const struct oo_tensor raw = {.host = layer->plain[0], .bytes = layer->tensors[0].bytes};
    need(oo_member_move(m->engine, members[0], &raw, 1, &left, offsets), "move");
    CHECK(left != unit, "it has left");
    need(oo_unit_set_trainable(m->engine, unit, 1), "what stays is plain");
    need(oo_member_move(m->engine, members[0], tensors, 1, &left, offsets), "and back");
    CHECK(oo_unit_set_trainable(m->engine, left, 1) == OO_E_ARGUMENT, "it is coded again");
    need(oo_unit_set_trainable(m->engine, unit, 1), "what stays is plain still");
    close_model(m, "trained");
}

/* Where what stays cannot be read again, all of the unit travels as before, once it is whole. */
CASE(codes_that_left_a_unit_travel_no_more) {
    struct model *m = open_model(1, 1024, (size_t)4 * MOST_BYTES);
    struct layer *layer = &m->layers[0];
    struct oo_tensor plain = {.host = layer->tensors[1].host, .bytes = layer->tensors[1].bytes};
    const struct oo_tensor tensors[] = {layer->tensors[0], plain, layer->tensors[2]};
    uint32_t unit, members[3], left;
    size_t offsets[3];
    unit = add_row(m->engine, m->model, tensors, 3, members, offsets);
    const uint32_t all = m->engine->units[unit].n_parts;
    struct oo_codec_header *header = (struct oo_codec_header *)(uintptr_t)tensors[2].host;
    header->magic ^= 1;
    need(oo_member_move(m->engine, members[1], &plain, 1, &left, offsets), "move");
    header->magic ^= 1;
    CHECK(left != unit && m->engine->units[unit].n_parts == all, "what stays could be read");
    need(oo_member_remove(m->engine, members[0]), "remove");
    const struct oo_unit *rest = &m->engine->units[unit];
    CHECK(rest->n_parts < all - 1 && rest->parts[0].offset == offsets[2] && rest->is_coded,
          "%u of %u parts travel", rest->n_parts, all);
    size_t bytes = 0;
    for (uint32_t i = 0; i < rest->n_parts; i++)
        bytes += rest->parts[i].bytes;
    CHECK(bytes == rest->host_bytes && bytes <= tensors[2].coded_bytes, "%zu bytes", bytes);
    need(oo_member_remove(m->engine, members[2]), "remove");
    CHECK(m->engine->units[unit].removed, "the unit goes with the last one");
    close_model(m, "left");
}

CASE(a_trainable_unit_takes_no_coded_master) {
    struct world w;
    uint32_t unit;
    size_t offset;
    world_open_coded(&w, 400000, 20);
    const struct oo_tensor coded = world_coded_master(&w, 1);
    ANSWERS(OO_E_ARGUMENT, "trainable",
            oo_member_move(w.engine, w.member[20], &coded, 1, &unit, &offset));
    need(use(&w, 20, OO_FORWARD), "as before");
    world_close(&w, "trainable");
}

CASE(coded_masters_are_not_read_where_they_lie) {
    struct model *m = open_model(1, 2048, 4 * MOST_BYTES);
    const struct oo_request request = {.member = m->layers[0].member, .stream = m->stream};
    uintptr_t address = 1;
    need(oo_engine_map(m->engine, &request, 0, &address), "map");
    CHECK(address == 0, "mapped");
    close_model(m, "mapped");
}

CASE(a_build_or_driver_that_cannot_decode_says_so) {
    struct oo_engine *engine;
    uint32_t lease;
    uintptr_t stream;
    char *memory = malloc(STAGING);
    need(oo_engine_create(sim.path, 0, &engine), "create");
    need(oo_engine_compute_stream(engine, &stream), "stream");
    need(oo_lease_add(engine, &lease), "lease");
    const struct oo_driver whole = engine->driver;
    engine->driver.cuMemsetD32Async = NULL;
    ANSWERS(OO_E_DRIVER_OLD, "cuMemsetD32Async",
            oo_staging_add(engine, lease, (uintptr_t)memory, STAGING, stream));
    engine->driver = whole;
    engine->driver.cuLaunchKernel = NULL;
    ANSWERS(OO_E_STATE, "no kernels",
            oo_staging_add(engine, lease, (uintptr_t)memory, STAGING, stream));
    engine->driver = whole;
    ANSWERS(OO_E_ARGUMENT, "lease",
            oo_staging_add(engine, lease + 1, (uintptr_t)memory, STAGING, stream));
    ANSWERS(OO_E_ARGUMENT, "holds less than 1024",
            oo_staging_add(engine, lease, (uintptr_t)memory, 1023, stream));
    need(oo_staging_add(engine, lease, (uintptr_t)memory, STAGING, stream), "staging");
    int priority = 1, least, greatest, flags = 0;
    sim.cuCtxPushCurrent_v2(engine->context);
    sim.cuCtxGetStreamPriorityRange(&least, &greatest);
    sim.cuStreamGetPriority(engine->decoder.stream, &priority);
    sim.cuStreamGetFlags(engine->decoder.stream, (unsigned *)&flags);
    sim.cuCtxPopCurrent_v2(NULL);
    CHECK(priority == greatest && flags == OOCU_STREAM_NON_BLOCKING, "priority %d", priority);
    need(oo_lease_remove(engine, lease), "remove");
    need(oo_engine_destroy(engine), "destroy");
    check_nothing_alive("cannot decode");
    free(memory);
    CHECK(sim_reset(&sim) == 0, "not reset");
}

/* ---- damage ---- */

static void flip(char *bytes, size_t at, unsigned bit) {
    unsigned char byte;
    memcpy(&byte, bytes + at, 1);
    byte = (unsigned char)(byte ^ 1u << bit);
    memcpy(bytes + at, &byte, 1);
}

/* Any bit of any header, at any use; any bit of a chunk where all is verified. */
CASE(damage_is_told_and_never_decoded) {
    struct model *m = open_model(4 * N_KINDS, 2048, (size_t)LAYERS * 4 * MOST_BYTES);
    uint64_t told = 0;
    for (unsigned i = 0; i < m->n_layers; i++)
        for (int verify = 0; verify < 2; verify++) {
            char *chunk = (char *)(uintptr_t)m->layers[i].tensors[2].host;
            struct oo_codec_header header;
            size_t bytes, end = OO_CODEC_HEADER;
            need(oo_codec_find(chunk, m->layers[i].tensors[2].coded_bytes, &header, &bytes),
                 "find");
            if (verify)
                end = bytes;
            need(oo_engine_set_verify(m->engine, verify), "verify");
            for (size_t at = 0; at < end; at += verify ? 97 : 3) {
                flip(chunk, at, at % 8);
                need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh");
                const enum oo_status status = use_layer(m, i, "damaged");
                CHECK(status == OO_E_STATE && strstr(oo_error_message(), "damaged"),
                      "byte %zu of layer %u: %s %s", at, i, oo_status_name(status),
                      oo_error_message());
                flip(chunk, at, at % 8);
                told++;
            }
            need(use_layer(m, i, "mended"), "mended");
        }
    CHECK(told > 500, "%llu bits", (unsigned long long)told);
    close_model(m, "damage");
}

/* Noise in what a unit is made of: it is refused, or travels, and nothing is read outside. */
CASE(noise_is_refused_or_travels) {
    unsigned refusals = 0, units = 0;
    struct world w = {0};
    for (unsigned turn = 0; turn < 600; turn++) {
        struct oo_host *host;
        uint32_t unit;
        size_t offset;
        enum { WEIGHTS = 5 * 1024 + 9 };
        const enum oo_codec_kind kind = kinds[turn % N_KINDS];
        if (turn % 100 == 0) {
            world_open_coded(&w, 400000, -1);
        }
        seed = 900 + turn;
        char *plain = malloc(2 * WEIGHTS), *room = malloc(4 * WEIGHTS);
        draw_weights(kind, patterns[turn % N_PATTERNS], WEIGHTS, plain);
        const size_t bytes = encode(kind, plain, WEIGHTS, 1024u << turn % 2, room);
        need(oo_host_create(bytes, &host), "host"); /* its end is the memory's, or a page's */
        need(oo_engine_lock(w.engine, host, OO_ALL_BYTES), "lock");
        char *master = oo_host_address(host);
        memcpy(master, room, bytes);
        for (unsigned i = 0; i < 1 + turn % 3; i++) {
            const size_t at = draw() % (turn % 4 ? 64 : bytes);
            flip(master, at, draw() % 8);
        }
        const struct oo_tensor tensor = {.host = master,
                                         .bytes = WEIGHTS * oo_codec_weight_bytes(kind),
                                         .coded_bytes = bytes,
                                         .coded_kind = kind};
        const struct oo_tensor home = {.host = w.expected[1], .bytes = w.bytes[1]};
        const enum oo_status status =
            oo_member_move(w.engine, w.member[1], &tensor, 1, &unit, &offset);
        if (status == OO_OK) {
            struct oo_use held;
            const enum oo_status acquired = acquire_launched(w.engine, w.member[1], w.stream, turn,
                                                             OO_FORWARD, -1, 1e-6, 0, &held);
            CHECK(acquired == OO_OK, "turn %u: %s", turn, oo_error_message());
            if (acquired == OO_OK)
                use_end(w.engine, &held, w.stream, "release");
            units++;
        } else {
            CHECK(status == OO_E_ARGUMENT && strstr(oo_error_message(), "coded tensor"),
                  "turn %u: %s", turn, oo_error_message());
            refusals++;
        }
        need(oo_member_move(w.engine, w.member[1], &home, 1, &unit, &offset), "home");
        need(oo_host_destroy(host), "destroy");
        free(plain);
        free(room);
        if (turn % 100 == 99)
            world_close(&w, "noise");
    }
    CHECK(refusals > 100 && units > 100, "%u refused, %u travel", refusals, units);
}

/* ---- memory that comes and goes ---- */

CASE(without_room_in_staging_memory_a_unit_does_not_travel) {
    struct model *m = open_model(3, 1 << 20, (size_t)LAYERS * 4 * MOST_BYTES);
    need(use_layer(m, 0, "with"), "with");
    need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh");
    need(oo_lease_remove(m->engine, m->staging_lease), "remove");
    ANSWERS(OO_E_STATE, "the largest piece of staging memory has 0", use_layer(m, 0, "without"));
    need(oo_lease_add(m->engine, &m->staging_lease), "lease");
    need(oo_staging_add(m->engine, m->staging_lease, (uintptr_t)m->staging, 4096, m->stream),
         "little");
    CHECK(use_layer(m, 0, "little") == OO_E_STATE &&
              (strstr(oo_error_message(), "has 768") || strstr(oo_error_message(), "has 1024")),
          "little: %s", oo_error_message());
    char *more = malloc(STAGING);
    uint32_t lease;
    need(oo_lease_add(m->engine, &lease), "lease");
    need(oo_staging_add(m->engine, lease, (uintptr_t)more, STAGING, m->stream), "more");
    for (unsigned i = 0; i < 3; i++)
        need(use_layer(m, i, "more"), "more");
    need(oo_lease_remove(m->engine, lease), "remove"); /* while what it brought may be decoded */
    free(more);
    close_model(m, "staging memory");
}

/* A chunk of one weight, or of noise, and a tensor that is as far behind it in host memory as on
 * the device. */
static void copy_behind_a_chunk(int noise) {
    enum { WEIGHTS = 1024 };
    struct model *m = open_model(1, 2048, 4 * MOST_BYTES);
    m->room = locked_memory(m->engine, OO_CODEC_HEADER + 2 * WEIGHTS);
    char *master = oo_host_address(m->room);
    char weights[WEIGHTS] = {0};
    if (noise)
        draw_weights(OO_CODEC_INT8, RANDOM, WEIGHTS, weights);
    struct oo_tensor tensors[2] = {{.host = master, .bytes = WEIGHTS, .coded_kind = OO_CODEC_INT8},
                                   {.host = master + OO_CODEC_HEADER + WEIGHTS, .bytes = WEIGHTS}};
    tensors[0].coded_bytes = encode(OO_CODEC_INT8, weights, WEIGHTS, WEIGHTS, master);
    fill((char *)(uintptr_t)tensors[1].host, WEIGHTS, 7);
    uint32_t unit, member;
    size_t offsets[2];
    unit = add_unit(m->engine, m->model, tensors, 2, &member, offsets);
    CHECK(offsets[1] - offsets[0] == WEIGHTS, "they are %zu bytes apart", offsets[1] - offsets[0]);
    struct oo_use use;
    const uint64_t before = stats_of_model(m).h2d_bytes;
    need(acquire_launched(m->engine, member, m->stream, 0, OO_FORWARD, -1, 20e-6, 0, &use), "use");
    CHECK(!memcmp((const void *)(use.address + offsets[0]), weights, WEIGHTS) &&
              !memcmp((const void *)(use.address + offsets[1]), tensors[1].host, WEIGHTS),
          "other weights");
    CHECK(m->engine->units[unit].n_parts == 2, "one copy");
    CHECK(stats_of_model(m).h2d_bytes - before == (noise ? 2 : 1) * WEIGHTS, "%llu bytes travel",
          (unsigned long long)(stats_of_model(m).h2d_bytes - before));
    use_end(m->engine, &use, m->stream, "release");
    close_model(m, "behind a chunk");
}

CASE(a_plain_tensor_behind_a_chunk_is_copied_by_itself) {
    for (int noise = 0; noise < 2; noise++)
        copy_behind_a_chunk(noise);
}

/* What a kernel need not decode passes no staging memory, however large it is. */
CASE(noise_needs_no_room_in_staging_memory) {
    enum { WEIGHTS = 16 * 1024 };
    struct model *m = open_model(1, 2048, 2 * (size_t)WEIGHTS);
    char *weights = malloc(WEIGHTS);
    draw_weights(OO_CODEC_INT8, RANDOM, WEIGHTS, weights);
    m->room = locked_memory(m->engine, OO_CODEC_HEADER + 2 * WEIGHTS);
    struct oo_tensor tensor = {
        .host = oo_host_address(m->room), .bytes = WEIGHTS, .coded_kind = OO_CODEC_INT8};
    tensor.coded_bytes = encode(OO_CODEC_INT8, weights, WEIGHTS, WEIGHTS, oo_host_address(m->room));
    CHECK(tensor.coded_bytes == OO_CODEC_HEADER + WEIGHTS, "%zu bytes", tensor.coded_bytes);
    CHECK(WEIGHTS > m->engine->decoder.lent->piece_bytes, "a piece would hold it");
    uint32_t member;
    size_t offset;
    add_unit(m->engine, m->model, &tensor, 1, &member, &offset);
    struct oo_use use;
    need(acquire_launched(m->engine, member, m->stream, 0, OO_FORWARD, -1, 20e-6, 0, &use), "use");
    CHECK(!memcmp((const void *)use.address, weights, WEIGHTS), "other weights");
    CHECK(stats_of_model(m).h2d_bytes >= WEIGHTS, "nothing travels");
    use_end(m->engine, &use, m->stream, "release");
    close_model(m, "noise");
    free(weights);
}

CASE(masters_become_coded_and_plain_again) {
    struct world w;
    uint32_t unit;
    size_t offset;
    world_open_coded(&w, 60000, -1);
    for (int round = 0; round < 6; round++) {
        for (unsigned i = 1; i < UNITS; i += 3) {
            const struct oo_tensor coded = world_coded_master(&w, i);
            const struct oo_tensor plain = {.host = w.expected[i], .bytes = w.bytes[i]};
            need(oo_member_move(w.engine, w.member[i], round % 2 ? &coded : &plain, 1, &unit,
                                &offset),
                 "move");
            CHECK(unit == w.unit[i], "another unit");
        }
        const uint64_t decodes = stats_of(&w).decodes;
        for (unsigned i = 0; i < UNITS; i++)
            need(use(&w, i, OO_FORWARD), "use");
        CHECK(stats_of(&w).decodes > decodes, "nothing is decoded");
    }
    world_close(&w, "moves");
}

/* A thread that must not wait does not wait for a piece that a copy thread has. */
CASE(a_nonblocking_release_leaves_decodes_beside_feeds_for_later) {
    for (unsigned fed = 0; fed < 2; fed++) {
        struct model *m = open_model(LAYERS, 1024, (size_t)LAYERS * 4 * MOST_BYTES);
        const uint32_t first = m->layers[0].member;
        for (int round = 0; round < 2; round++)
            for (unsigned i = 0; i < LAYERS; i++)
                need(use_layer(m, i, "learn"), "learn");
        struct oo_fetched fetched;
        const struct oo_use use = use_begin(m->engine, first, m->stream, 1e-6, "acquire");
        need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh"); /* all but it are gone */
        empty_queue(m->engine);
        m->engine->feeder.n_running += fed; /* as if something were fed */
        need(oo_engine_release(m->engine, use.ticket, m->stream, OO_NONBLOCKING, &fetched),
             "release");
        CHECK(fed ? fetched.count == 0 && fetched.more : fetched.count > 0, "%u fed: %u fetched",
              fed, fetched.count);
        m->engine->feeder.n_running -= fed;
        if (fed)
            need(oo_engine_prefetch(m->engine, &fetched), "prefetch");
        CHECK(fetched.count > 0, "none fetched");
        close_model(m, "nonblocking");
    }
}

CASE(a_nonblocking_release_copies_beside_feeds_what_is_not_decoded) {
    struct world w;
    struct oo_fetched fetched;
    world_open(&w, 400000, -1);
    const struct oo_use held = use_begin(w.engine, w.member[0], w.stream, 1e-6, "acquire");
    w.engine->feeder.n_running++; /* as if something were fed */
    need(oo_engine_release(w.engine, held.ticket, w.stream, OO_NONBLOCKING, &fetched), "release");
    CHECK(fetched.count > 0, "none fetched");
    w.engine->feeder.n_running--;
    world_close(&w, "while others are fed");
}

/* ---- time ---- */

/* Under a timeline each decode of a locked chunk has a row, after its copy has begun. */
/* Rows of copies: one for each chunk that travels, where the unit is decoded; else for the unit. */
static uint64_t rows_of(const struct oo_unit *unit) {
    uint64_t travel = 0;
    for (uint32_t i = 0; i < unit->n_parts; i++)
        travel += unit->parts[i].bytes != 0;
    return unit->decodes ? travel : 1;
}

static void check_rows(struct model *m) {
    struct oo_trace_row *rows;
    size_t count;
    uint64_t decodes = 0, bytes = 0, copies = 0, copied = 0, expected = 0;
    double copied_s[LAYERS];
    const struct oo_stats before = stats_of_model(m);
    need(oo_engine_refresh(m->engine, OO_ALL_MODELS), "refresh");
    need(oo_trace_start(m->engine), "start");
    for (unsigned i = 0; i < LAYERS; i++) {
        need(use_layer(m, i, "use"), "use");
        copied_s[i] = HUGE_VAL;
        expected += rows_of(&m->engine->units[m->layers[i].unit]);
    }
    need(oo_trace_stop(m->engine, &rows, &count), "stop");
    for (size_t i = 0; i < count; i++) {
        if (rows[i].kind != OO_TRACE_H2D)
            continue;
        copies++;
        copied += rows[i].bytes;
        if (rows[i].start_s < copied_s[rows[i].unit])
            copied_s[rows[i].unit] = rows[i].start_s;
    }
    for (size_t i = 0; i < count; i++) {
        if (rows[i].kind != OO_TRACE_DECODE)
            continue;
        decodes++;
        bytes += rows[i].bytes;
        CHECK(rows[i].start_s > copied_s[rows[i].unit] && rows[i].end_s > rows[i].start_s + 5e-6,
              "a decode from %.7f to %.7f s", rows[i].start_s, rows[i].end_s);
    }
    const struct oo_stats stats = stats_of_model(m);
    CHECK(decodes == m->decodes && bytes == stats.decoded_bytes - before.decoded_bytes &&
              stats.decode_timed_bytes - before.decode_timed_bytes == bytes &&
              stats.decode_seconds - before.decode_seconds > 5e-6 * (double)decodes,
          "%llu rows of %u decodes", (unsigned long long)decodes, m->decodes);
    CHECK(copies == expected && copied == m->link_bytes &&
              stats.h2d_timed_bytes - before.h2d_timed_bytes == copied,
          "%llu rows of %llu bytes, not %llu", (unsigned long long)copies,
          (unsigned long long)copied, (unsigned long long)expected);
    oo_trace_free(rows);
}

/* Twice: the events of the second timeline have been recorded before. */
CASE(each_decode_has_its_row) {
    struct model *m = open_model(LAYERS, 1024, (size_t)LAYERS * 4 * MOST_BYTES);
    for (int round = 0; round < 2; round++)
        check_rows(m);
    close_model(m, "rows");
}

CHECK_MAIN(world_prepare)
