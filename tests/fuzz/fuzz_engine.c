/* Bytes become calls on an engine over the simulated driver: two models, six streams, nested uses,
 * masters rewritten while their copies are queued, moved, coded, or unknown to the engine;
 * captures, threads, contexts come and gone; faults that pass, last, or end the context; every
 * schedule.
 *
 * What a kernel reads must equal the master; every refusal must have its reason; memory that the
 * caller vouches for at an acquire alone is unreadable at any other time; the race detector is
 * silent after every call; what the engine counts is what the driver saw; at the end everything is
 * given back, or went with the lost context. */
#include "fuzz.h"

#include "world.h"

enum {
    MODELS = 2,
    LAYERS = 18,
    TENSORS = 2,
    STREAMS = 6,
    HELD = 6,
    SEGMENTS = 3,
    MOST_BYTES = 12288, /* of a tensor */
    LARGEST_UNIT = 3 * TENSORS * 4096,
    GRADIENT = 20000 /* more than the ring, whose pieces are small here: see tools/fuzz.py */
};

/* Memory that no code may touch now; these functions exist only with AddressSanitizer. */
void __asan_poison_memory_region(const volatile void *address, size_t bytes) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void *address, size_t bytes)
    __attribute__((weak));

struct layer {
    uint32_t member, unit;
    unsigned n_tensors;
    struct oo_tensor tensors[TENSORS],
        home[TENSORS]; /* where the master is, where it was at first */
    size_t offsets[TENSORS];
    char *weights[TENSORS]; /* that the master at home is the code of; NULL where it is as it is */
    /* Memory that the engine does not know: where the master was at first, where it is. */
    char *own, *foreign;
    uint64_t stamp;
    int silent; /* rewritten without a new stamp: only the first use of a sweep sees that */
    int trainable;
};

struct attached {
    int live, leased;
    uint32_t id, lease;
    struct oo_host *host;
    char *arenas[SEGMENTS];
    uintptr_t arena_streams[SEGMENTS];
    size_t usable[SEGMENTS];
    unsigned n_arenas, n_layers;
    char *staging;
    uintptr_t staging_stream;
    struct layer layers[LAYERS];
};

struct held {
    int live;
    struct layer *layer;
    uint64_t ticket;
    uintptr_t address, stream;
    int known; /* `bytes` is what the first kernel saw */
    char bytes[TENSORS * MOST_BYTES];
};

struct fuzz {
    struct world w; /* the engine, its context, whether memory is the device's */
    struct attached models[MODELS];
    struct held held[HELD];
    uintptr_t streams[STREAMS];
    struct oo_host *landing;
    char *gradient;
    unsigned pattern;
    int64_t task;
    int faulty, ever_faulty, tracing, main_context;
    int ever_coded; /* then a copy has a row for each chunk */
    int capturing[STREAMS], unfinished[STREAMS];
    OOCUresult sticky; /* of a fault that ends the context; 0: none has been set */
    int was_dead;      /* before the call that is being judged */
    char killer[512];  /* what the first call on the dead engine said */
    struct input *input;
    /* what was asked and answered, to hold the engine's figures against */
    uint64_t acquired, refused /* for want of room */, fetched, copied_untraced, waits, peak;
};

static int narrate; /* FUZZ_NARRATE: say what each call answers, for an input that fails */

static int holds_any(const struct fuzz *f) {
    for (int i = 0; i < HELD; i++)
        if (f->held[i].live)
            return 1;
    return 0;
}

static unsigned pins_of(const struct fuzz *f, uint32_t unit) {
    unsigned pins = 0;
    for (int i = 0; i < HELD; i++)
        pins += f->held[i].live && f->held[i].layer->unit == unit;
    return pins;
}

static void see_reports(void) {
    char text[2048] = "";
    if (!sim.simReportCount())
        return;
    sim.simReport(0, text, sizeof text);
    REQUIRE(0, "%llu reports, the first: %s", (unsigned long long)sim.simReportCount(), text);
}

/* On a dead engine: OO_E_DEAD, always with the words of the first time. */
static void judge_dead(struct fuzz *f, enum oo_status status, const char *what) {
    const char *call, *name;
    int code;
    REQUIRE(status == OO_E_DEAD, "%s on a dead engine: %s", what, oo_status_name(status));
    oo_error_driver(&call, &code, &name);
    REQUIRE(code == f->sticky && call[0] && strstr(oo_error_message(), call), "%s: %d, %s: %s",
            what, code, call, oo_error_message());
    if (!f->killer[0])
        snprintf(f->killer, sizeof f->killer, "%s", oo_error_message());
    REQUIRE(strcmp(f->killer, oo_error_message()) == 0, "first \"%s\", then \"%s\"", f->killer,
            oo_error_message());
}

/* Where a use could not be marked, only a synchronise tells when it has ended, and a stream that is
 * being captured since cannot be waited for. */
static int waits_for_capture(const struct fuzz *f, enum oo_status status) {
    const char *call, *name;
    int code, capturing = 0;
    oo_error_driver(&call, &code, &name);
    for (int i = 0; i < STREAMS; i++)
        capturing |= f->capturing[i];
    return capturing && f->ever_faulty && status == OO_E_DRIVER &&
           (code == OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
            code == OOCU_ERROR_STREAM_CAPTURE_INVALIDATED);
}

/* What every call must answer. `even_dead`: it is one that returns on a dead engine, too. */
static void judge(struct fuzz *f, enum oo_status status, int excused, int even_dead,
                  const char *what) {
    if (narrate)
        fprintf(stderr, "%s: %s%s%s\n", what, oo_status_name(status), status == OO_OK ? "" : ": ",
                status == OO_OK ? "" : oo_error_message());
    const int was_dead = f->was_dead;
    f->was_dead = f->w.engine->dead != OO_OK;
    REQUIRE(!f->was_dead || f->sticky, "%s: dead without a sticky error", what);
    see_reports();
    if ((was_dead && !even_dead) || (f->was_dead && status == OO_E_DEAD))
        judge_dead(f, status, what);
    else if (was_dead)
        REQUIRE(status == OO_OK || excused, "%s on a dead engine: %s: %s", what,
                oo_status_name(status), oo_error_message());
    else
        REQUIRE(status == OO_OK || (f->faulty && status != OO_E_DEAD) || excused ||
                    waits_for_capture(f, status),
                "%s: %s: %s", what, oo_status_name(status), oo_error_message());
}

/* A call may fail while a fault is set, else for the reasons named. */
static void excuse(struct fuzz *f, enum oo_status status, int excused, const char *what) {
    judge(f, status, excused, 0, what);
}

static void enter_context(const struct fuzz *f) { sim.cuCtxPushCurrent_v2(f->w.context); }
static void leave_context(void) { sim.cuCtxPopCurrent_v2(NULL); }

/* Whether the context has been lost, though the engine may not know yet. One call asks, and no
 * call follows it that the fault could make fail: a lost context answers so even where none is
 * current. */
static int lost(const struct fuzz *f) {
    unsigned flags;
    if (!f->sticky || f->w.engine->dead != OO_OK)
        return f->sticky && f->w.engine->dead != OO_OK;
    return sim.cuStreamGetFlags((OOCUstream)f->streams[1], &flags) == f->sticky;
}

/* Nothing brings a lost context back. */
static void clear_faults(struct fuzz *f) {
    if (lost(f))
        return;
    sim.simFaultClear();
    f->faulty = 0;
    f->sticky = OOCU_SUCCESS;
}

/* ---- masters ---- */

/* Only what is called vouches for memory that the engine does not know. */
static void cover(const struct layer *layer, int covered) {
    const size_t bytes = (size_t)layer->n_tensors * MOST_BYTES;
    char *const blocks[] = {layer->own, layer->foreign};
    for (int i = 0; i < 2 && __asan_poison_memory_region; i++)
        if (blocks[i] && covered)
            __asan_poison_memory_region(blocks[i], bytes);
        else if (blocks[i])
            __asan_unpoison_memory_region(blocks[i], bytes);
}

/* A write to a master races with its copy if that is still queued: the detector must report it, and
 * no kernel may ever compute with what arrives. */
static void declare_write(const void *memory, size_t bytes) {
    char text[2048];
    see_reports();
    sim.simHostAccess(memory, bytes, 1);
    for (uint64_t i = 0; i < sim.simReportCount(); i++) {
        sim.simReport(i, text, sizeof text);
        REQUIRE(strstr(text, "race: write-after-read") == text &&
                    strstr(text, "read by a host-to-device copy, stream \"h2d\""),
                "a rewritten master: %s", text);
    }
    sim.simReportsClear();
}

static void rewrite_tensor(struct fuzz *f, const struct oo_tensor *tensor) {
    /* A pattern that no tensor ever had; the masters are ours, whatever the engine calls const. */
    char *bytes = (char *)(uintptr_t)tensor->host;
    const unsigned pattern = ++f->pattern;
    declare_write(bytes, tensor->bytes);
    for (size_t i = 0; i + 4 <= tensor->bytes; i += 4) {
        const uint32_t word = pattern * 2654435761u + (uint32_t)i;
        memcpy(bytes + i, &word, 4);
    }
}

/* Codes are never rewritten. */
static void rewrite(struct fuzz *f, struct layer *layer) {
    cover(layer, 0);
    for (unsigned i = 0; i < layer->n_tensors; i++)
        if (!layer->tensors[i].coded_bytes)
            rewrite_tensor(f, &layer->tensors[i]);
    cover(layer, 1);
}

static int is_coded(const struct layer *layer) {
    int coded = 0;
    for (unsigned t = 0; t < layer->n_tensors; t++)
        coded |= layer->tensors[t].coded_bytes != 0;
    return coded;
}

static int unit_is_coded(const struct fuzz *f, uint32_t unit) {
    int coded = 0;
    for (int m = 0; m < MODELS; m++)
        for (unsigned l = 0; f->models[m].live && l < f->models[m].n_layers; l++)
            coded |= f->models[m].layers[l].unit == unit && is_coded(&f->models[m].layers[l]);
    return coded;
}

/* Make a tensor a coded one: of few values, of one, or of noise, which is left as it is. */
static void code_tensor(struct fuzz *f, struct layer *layer, unsigned t, struct input *in) {
    struct oo_tensor *tensor = &layer->tensors[t];
    const unsigned shift = 24 + below(in, 3) * 4, chunk = 1024 * (1 + below(in, 3));
    char *weights = layer->weights[t] = malloc(tensor->bytes);
    REQUIRE(weights, "no memory");
    for (size_t i = 0; i < tensor->bytes; i++)
        weights[i] = (char)(((uint32_t)i * 2654435761u + f->pattern) >> (shift < 32 ? shift : 31));
    f->pattern++;
    f->ever_coded = 1;
    tensor->coded_kind = OO_CODEC_INT8;
    tensor->coded_bytes =
        encode(OO_CODEC_INT8, weights, tensor->bytes, chunk, (char *)(uintptr_t)tensor->host);
    declare_write(tensor->host, tensor->coded_bytes);
}

/* The binding gives the stamps of all members of a unit that was copied. */
static void give_stamps(struct fuzz *f, const struct oo_fetched *fetched) {
    REQUIRE(fetched->count <= OO_MAX_FETCHED, "%u fetched", fetched->count);
    f->fetched += fetched->count;
    struct oo_stamp stamps[MODELS * LAYERS];
    struct layer *stamped[MODELS * LAYERS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < fetched->count; i++)
        for (int m = 0; m < MODELS; m++)
            for (unsigned l = 0; f->models[m].live && l < f->models[m].n_layers; l++) {
                struct layer *layer = &f->models[m].layers[l];
                if (layer->unit == fetched->units[i]) {
                    stamped[count] = layer;
                    stamps[count++] = (struct oo_stamp){layer->member, layer->stamp};
                }
            }
    if (count == 0)
        return;
    const enum oo_status status = oo_engine_stamp(f->w.engine, stamps, count, 0);
    excuse(f, status, 0, "stamp");
    for (uint32_t i = 0; i < count; i++)
        stamped[i]->silent |= status != OO_OK;
}

/* ---- captures ---- */

static void capture(struct fuzz *f, unsigned which) {
    void *graph = NULL;
    enter_context(f);
    if (!f->capturing[which]) {
        f->capturing[which] =
            sim.cuStreamBeginCapture_v2((OOCUstream)f->streams[which], 2) == OOCU_SUCCESS;
    } else {
        const OOCUresult ended = sim.cuStreamEndCapture((OOCUstream)f->streams[which], &graph);
        if (ended == OOCU_SUCCESS)
            sim.cuGraphDestroy(graph);
        if (ended == OOCU_SUCCESS || ended == OOCU_ERROR_STREAM_CAPTURE_INVALIDATED)
            f->capturing[which] = 0;
    }
    leave_context();
}

static void end_captures(struct fuzz *f) {
    clear_faults(f);
    for (unsigned i = 1; i < STREAMS; i++)
        if (f->capturing[i] && !lost(f))
            capture(f, i);
}

/* Not of a stream where something is still to be marked: that would be marked in the graph. */
static int may_capture(const struct fuzz *f, unsigned which) {
    int free_of_us = which != 0;
    for (int i = 0; i < HELD; i++)
        free_of_us &= !f->held[i].live || f->held[i].stream != f->streams[which];
    for (int m = 0; m < MODELS; m++)
        for (unsigned i = 0; i < f->models[m].n_arenas; i++)
            free_of_us &= f->models[m].arena_streams[i] != f->streams[which];
    for (int m = 0; m < MODELS; m++)
        free_of_us &= !f->models[m].staging || f->models[m].staging_stream != f->streams[which];
    return free_of_us;
}

/* ---- attach and detach ---- */

static char *arena_new(struct fuzz *f, size_t bytes) {
    if (f->w.device_arena)
        clear_faults(f); /* they are for the engine's calls, not for ours */
    if (f->w.device_arena && lost(f))
        return NULL;
    char *arena = f->w.device_arena ? device_memory(&f->w, bytes) : malloc(bytes);
    REQUIRE(arena, "no arena");
    return arena;
}

static void arena_end(struct fuzz *f, char *arena) {
    clear_faults(f);
    if (!f->w.device_arena)
        free(arena);
    else if (!lost(f)) /* else the context has taken it */
        end_device_memory(&f->w, arena);
}

/* Of any size and alignment; the first of a model holds the largest unit, and some. */
static enum oo_status add_segment(struct fuzz *f, struct attached *m, unsigned stream,
                                  struct input *in) {
    const size_t least = m->n_arenas ? 1 : LARGEST_UNIT + 2 * OO_ALIGNMENT;
    const size_t off = below(in, 2) ? below(in, 300) : 0;
    const size_t bytes = least + (size_t)below(in, 65536) % (m->n_arenas ? 30000 : 60000);
    char *arena = arena_new(f, off + bytes);
    if (!arena)
        return OO_E_DRIVER;
    const uintptr_t begin = (uintptr_t)arena + off;
    const size_t skipped = (OO_ALIGNMENT - begin % OO_ALIGNMENT) % OO_ALIGNMENT;
    const enum oo_status status =
        oo_segment_add(f->w.engine, m->lease, begin, bytes, f->streams[stream]);
    const int too_small = bytes < skipped + OO_ALIGNMENT;
    excuse(f, status, too_small && status == OO_E_ARGUMENT, "segment");
    REQUIRE(status != OO_OK || !too_small, "a segment of %zu bytes was taken", bytes);
    if (status == OO_OK) {
        m->arena_streams[m->n_arenas] = f->streams[stream];
        m->usable[m->n_arenas] = (bytes - skipped) / OO_ALIGNMENT * OO_ALIGNMENT;
        m->arenas[m->n_arenas++] = arena;
    } else {
        arena_end(f, arena);
    }
    return status;
}

static void free_layer(struct layer *layer) {
    cover(layer, 0);
    free(layer->own);
    free(layer->foreign);
    for (unsigned t = 0; t < layer->n_tensors; t++)
        free(layer->weights[t]);
}

/* A unit of one to three members, of one or two tensors each. */
static enum oo_status add_members(struct fuzz *f, struct attached *m, struct input *in, char **at) {
    struct oo_tensor tensors[3 * TENSORS];
    size_t offsets[3 * TENSORS];
    uint32_t counts[3] = {0}, members[3], unit;
    struct layer *first = &m->layers[m->n_layers];
    unsigned n = 1 + below(in, 3), all = 0;
    const int unknown = below(in, 8) == 0; /* memory that the engine does not know */
    if (n > LAYERS - m->n_layers || unknown)
        n = 1;
    const int trainable = below(in, 3) == 0;
    for (unsigned i = 0; i < n; i++) {
        struct layer *layer = &first[i];
        *layer =
            (struct layer){.n_tensors = 1 + below(in, TENSORS), .stamp = 1, .trainable = trainable};
        counts[i] = layer->n_tensors;
        if (unknown) {
            layer->own = malloc((size_t)layer->n_tensors * MOST_BYTES);
            REQUIRE(layer->own, "no memory");
        }
        for (unsigned t = 0; t < layer->n_tensors; t++) {
            const unsigned words =
                n == 1 && below(in, 4) == 0 ? 3000 : 1000; /* sampled, or whole */
            const size_t bytes = 16 + 4 * (size_t)below(in, words);
            layer->tensors[t] = (struct oo_tensor){
                .host = unknown ? layer->own + t * MOST_BYTES : *at, .bytes = bytes};
            if (!trainable && !unknown && below(in, 3) == 0)
                code_tensor(f, layer, t, in);
            else
                rewrite_tensor(f, &layer->tensors[t]);
            tensors[all++] = layer->home[t] = layer->tensors[t];
            const size_t taken =
                layer->tensors[t].coded_bytes ? layer->tensors[t].coded_bytes : bytes;
            /* Next to each other as on the device, or not: then they travel as several copies. */
            *at += (taken + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
            *at += below(in, 4) == 0 ? 4 : 0;
        }
        cover(layer, 1);
    }
    const enum oo_status status =
        oo_unit_add(f->w.engine, m->id, tensors, counts, n, trainable, &unit, members, offsets);
    excuse(f, status, 0, "unit");
    for (unsigned i = 0; i < n && status != OO_OK; i++)
        free_layer(&first[i]);
    for (unsigned i = 0, o = 0; i < n && status == OO_OK; i++) {
        first[i].member = members[i];
        first[i].unit = unit;
        for (unsigned t = 0; t < first[i].n_tensors; t++)
            first[i].offsets[t] = offsets[o++];
    }
    m->n_layers += status == OO_OK ? n : 0;
    return status;
}

static void unlock(struct fuzz *f, struct oo_host *host) {
    enum oo_status status = oo_engine_unlock(f->w.engine, host);
    judge(f, status, !host->known || f->faulty, 1, "unlock");
    if (status != OO_OK && host->known) {
        clear_faults(f);
        status = oo_engine_unlock(f->w.engine, host);
        REQUIRE(status == OO_OK, "unlock once more: %s", oo_error_message());
    }
    f->was_dead = f->w.engine->dead != OO_OK;
    oo_host_destroy(host);
}

/* The engine has ordered the allocating stream after every use: once that has ended, the next
 * owner may use the bytes, on any stream. */
static void arena_back(struct fuzz *f, char *arena, uintptr_t stream) {
    clear_faults(f);
    enter_context(f);
    const OOCUresult ended = f->w.engine->driver.cuStreamSynchronize((OOCUstream)stream);
    leave_context();
    f->waits++;
    REQUIRE(ended == 0 || lost(f), "a stream that does not end: %d", ended);
    arena_end(f, arena);
}

static void give_back_model(struct fuzz *f, struct attached *m) {
    unlock(f, m->host);
    for (unsigned i = 0; i < m->n_arenas; i++)
        arena_back(f, m->arenas[i], m->arena_streams[i]);
    if (m->staging)
        arena_back(f, m->staging, m->staging_stream);
    for (unsigned i = 0; i < m->n_layers; i++)
        free_layer(&m->layers[i]);
    memset(m, 0, sizeof *m);
}

/* Each model lends memory that coded chunks of all models pass through. */
static enum oo_status add_staging(struct fuzz *f, struct attached *m, unsigned stream) {
    char *staging = arena_new(f, WORLD_STAGING);
    if (!staging)
        return OO_E_DRIVER;
    m->staging_stream = f->streams[stream];
    const enum oo_status status =
        oo_staging_add(f->w.engine, m->lease, (uintptr_t)staging, WORLD_STAGING, m->staging_stream);
    excuse(f, status, 0, "staging");
    if (status == OO_OK)
        m->staging = staging;
    else
        arena_end(f, staging);
    return status;
}

/* A stream that is not being captured. */
static unsigned any_stream(const struct fuzz *f, struct input *in) {
    const unsigned stream = below(in, STREAMS);
    return f->capturing[stream] ? 0 : stream;
}

/* What it was lent first: between the two no call needs room. */
static enum oo_status leave(struct fuzz *f, struct attached *m) {
    const enum oo_status status = m->leased ? oo_lease_remove(f->w.engine, m->lease) : OO_OK;
    if (status != OO_OK)
        return status;
    m->leased = 0;
    return oo_model_remove(f->w.engine, m->id);
}

static void attach(struct fuzz *f, struct attached *m, struct input *in) {
    memset(m, 0, sizeof *m);
    if (oo_host_create((size_t)LAYERS * TENSORS * 2 * MOST_BYTES, &m->host) != OO_OK)
        return;
    int added = 0;
    enum oo_status status = oo_engine_lock(f->w.engine, m->host, below(in, 4) ? OO_ALL_BYTES : 0);
    excuse(f, status, status == OO_E_LOCK_REFUSED, "lock");
    if (status == OO_OK || status == OO_E_LOCK_REFUSED) {
        status = oo_model_add(f->w.engine, &m->id);
        excuse(f, status, 0, "model");
        added = status == OO_OK;
    }
    if (status == OO_OK) {
        status = oo_lease_add(f->w.engine, &m->lease);
        excuse(f, status, 0, "lease");
        m->leased = status == OO_OK;
    }
    if (status == OO_OK)
        status = add_segment(f, m, any_stream(f, in), in);
    if (status == OO_OK)
        status = add_staging(f, m, any_stream(f, in));
    char *at = oo_host_address(m->host);
    for (unsigned n = 1 + below(in, 12); n-- > 0 && status == OO_OK && m->n_layers < LAYERS;)
        status = add_members(f, m, in, &at);
    m->live = status == OO_OK;
    if (m->live)
        return;
    clear_faults(f);
    if (added) {
        status = leave(f, m);
        if (status != OO_OK && lost(f))
            status = leave(f, m);
        REQUIRE(status == OO_OK, "undo attach: %s", oo_error_message());
    }
    give_back_model(f, m);
}

static void detach(struct fuzz *f, struct attached *m) {
    enum oo_status status;
    for (int i = 0; i < HELD; i++)
        for (unsigned l = 0; l < m->n_layers; l++)
            if (f->held[i].live && f->held[i].layer == &m->layers[l]) {
                status = oo_model_remove(f->w.engine, m->id);
                REQUIRE(status != OO_OK, "removed while in use");
                judge(f, status, status == OO_E_STATE, 1, "detach while in use");
                return;
            }
    const int in_use = holds_any(f); /* another's unit in use may be in its segment */
    status = leave(f, m);
    judge(f, status, in_use && status == OO_E_STATE, 1, "detach");
    if (status == OO_E_STATE)
        return;
    if (status != OO_OK) {
        end_captures(f);
        status = leave(f, m);
        judge(f, status, in_use && status == OO_E_STATE, 1, "detach after the fault");
        if (status == OO_E_STATE && in_use)
            return;
        if (status != OO_OK && lost(f)) /* lost by the second attempt */
            status = leave(f, m);
        REQUIRE(status == OO_OK, "detach after the fault: %s", oo_error_message());
    }
    give_back_model(f, m);
}

/* ---- use ---- */

/* A kernel reads the member; then its bytes must be what `expected`, or else the master, holds. */
static int compute(struct fuzz *f, struct held *h) {
    struct layer *layer = h->layer;
    const enum oo_status status = oo_engine_launch(f->w.engine, layer->member, h->stream, 20e-6);
    if (narrate)
        fprintf(stderr, "unit %u at %#zx on stream %#zx: ", layer->unit, (size_t)h->address,
                (size_t)h->stream);
    excuse(f, status, 0, "launch");
    if (status != OO_OK)
        return 0;
    char *seen = h->bytes;
    cover(layer, 0);
    for (unsigned t = 0; t < layer->n_tensors; seen += layer->tensors[t++].bytes) {
        const void *there = (const void *)(h->address + layer->offsets[t]);
        const void *master = layer->tensors[t].coded_bytes ? (const void *)layer->weights[t]
                                                           : layer->tensors[t].host;
        const void *expected = h->known ? seen : master;
        REQUIRE(memcmp(there, expected, layer->tensors[t].bytes) == 0, "member %u, tensor %u: %s",
                layer->member, t,
                h->known ? "its bytes changed while it was in use" : "wrong bytes");
        memcpy(seen, there, layer->tensors[t].bytes);
    }
    cover(layer, 1);
    h->known = 1;
    return 1;
}

static void release(struct fuzz *f, struct held *h) {
    const int flags = f->input && below(f->input, 4) == 0 ? OO_NONBLOCKING : 0;
    struct oo_fetched fetched;
    if (h->known) /* else the master may have been rewritten since a first kernel could not start */
        (void)compute(f, h);
    enum oo_status status = oo_engine_release(f->w.engine, h->ticket, h->stream, flags, &fetched);
    if (status == OO_WOULD_BLOCK && flags) /* the driver's queue may be full */
        status = oo_engine_release(f->w.engine, h->ticket, h->stream, 0, &fetched);
    judge(f, status, 0, 1, "release");
    if (status != OO_OK)
        return;
    h->live = 0;
    give_stamps(f, &fetched);
    if (!f->faulty && pins_of(f, h->layer->unit) == 0) /* uses of one copy share its ticket */
        REQUIRE(oo_engine_release(f->w.engine, h->ticket, h->stream, 0, &fetched) == OO_E_TICKET,
                "released twice");
}

static void begin_use(struct fuzz *f, struct held *h, struct layer *layer, struct input *in) {
    const unsigned how = below(in, 8), which = below(in, STREAMS);
    const uintptr_t stream = f->streams[which];
    static const enum oo_kind kinds[] = {OO_FORWARD,   OO_FORWARD,  OO_RECORDED, OO_RECOMPUTE,
                                         OO_RECOMPUTE, OO_BACKWARD, OO_BACKWARD, OO_BACKWARD};
    const enum oo_kind kind = kinds[how];
    const int forward = kind == OO_FORWARD || kind == OO_RECORDED;
    const int flags = below(in, 8) == 0 ? OO_NONBLOCKING : 0;
    if (!forward && (layer->silent || below(in, 8) == 0))
        f->task++;
    struct oo_use use;
    cover(layer, 0);
    enum oo_status status = acquire(f->w.engine, layer->member, stream, layer->stamp, kind,
                                    forward ? -1 : f->task, flags, &use);
    cover(layer, 1);
    /* No room, or rewritten while in use: only where something is in use. */
    const int no_use = holds_any(f) && (status == OO_E_NO_ROOM || status == OO_E_STATE);
    const int captures = f->capturing[which] && status == OO_E_CAPTURE;
    const int no_staging = !f->w.engine->decoder.lent && status == OO_E_STATE;
    excuse(f, status, no_use || captures || no_staging || (status == OO_WOULD_BLOCK && flags),
           "acquire");
    f->refused += status == OO_E_NO_ROOM;
    if (status != OO_OK)
        return;
    REQUIRE(!f->capturing[which], "acquired on a stream that is being captured");
    f->acquired++;
    give_stamps(f, &use.fetched);
    layer->silent = 0;
    *h = (struct held){
        .live = 1, .layer = layer, .ticket = use.ticket, .address = use.address, .stream = stream};
    (void)compute(f, h);
}

/* ---- what else may happen ---- */

static void move(struct fuzz *f, struct layer *layer, int home, unsigned words) {
    struct oo_tensor to[TENSORS];
    size_t offsets[TENSORS];
    uint32_t unit;
    char *memory = home ? NULL : malloc((size_t)layer->n_tensors * MOST_BYTES);
    cover(layer, 0);
    for (unsigned t = 0; t < layer->n_tensors; t++)
        to[t] = home
                    ? layer->home[t]
                    : (struct oo_tensor){.host = memory + t * MOST_BYTES,
                                         .bytes = words ? 4 * (size_t)words : layer->home[t].bytes};
    int coded = 0;
    for (unsigned t = 0; t < layer->n_tensors; t++)
        if (to[t].coded_bytes)
            coded = 1;
        else
            rewrite_tensor(f, &to[t]);
    cover(layer, 1);
    const int trained = f->w.engine->units[layer->unit].trainable;
    const enum oo_status status =
        oo_member_move(f->w.engine, layer->member, to, layer->n_tensors, &unit, offsets);
    excuse(f, status, pins_of(f, layer->unit) > 0 || (coded && trained), "move");
    REQUIRE(status != OO_OK || !(coded && trained), "codes are trained");
    if (status != OO_OK) {
        free(memory);
        layer->silent |= home && to[0].host == layer->tensors[0].host; /* rewritten in place */
        return;
    }
    cover(layer, 0);
    free(layer->foreign); /* the caller vouched for it at an acquire only */
    layer->foreign = memory;
    cover(layer, 1);
    memcpy(layer->tensors, to, sizeof to);
    memcpy(layer->offsets, offsets, sizeof offsets);
    layer->unit = unit;
}

/* Each stream has a gradient of its own: after a failure no call has waited for the kernel
 * that wrote it. */
static void download(struct fuzz *f, unsigned which, size_t bytes, int landing) {
    const uintptr_t stream = f->streams[which];
    char *gradient = f->gradient + (size_t)which * GRADIENT;
    static char pageable[GRADIENT];
    char *target = landing && f->landing ? oo_host_address(f->landing) : pageable;
    if (f->unfinished[which] && !lost(f)) { /* even waiting failed: its source is still read */
        clear_faults(f);
        enter_context(f);
        const OOCUresult ended = f->w.engine->driver.cuStreamSynchronize(f->w.engine->d2h);
        leave_context();
        f->unfinished[which] = 0;
        REQUIRE(ended == 0 || lost(f), "downloads that do not end: %d", ended);
    }
    if (f->w.device_arena && bytes) {
        const OOSimRange range = {(OOCUdeviceptr)gradient, bytes};
        enter_context(f);
        const OOCUresult launched = sim.simLaunch((OOCUstream)stream, NULL, 0, &range, 1, 1e-5);
        leave_context();
        if (launched)
            return;
    }
    if (!f->w.device_arena || !lost(f))
        fill(gradient, bytes, ++f->pattern);
    const enum oo_status status =
        oo_engine_download(f->w.engine, target, (uintptr_t)gradient, bytes, stream);
    excuse(f, status, 0, "download");
    f->unfinished[which] = status != OO_OK;
    if (status == OO_OK)
        REQUIRE(memcmp(target, gradient, bytes) == 0, "a gradient of %zu bytes arrived wrong",
                bytes);
}

/* What the engine counts against what the driver saw, and what it answered. */
static void audit(struct fuzz *f, const struct oo_stats *stats) {
    struct sim_stats seen;
    struct sim_live live;
    uint64_t arena = 0, copies = 0;
    sim.simGetStats(&seen);
    sim.simGetLive(&live);
    for (int m = 0; m < MODELS; m++)
        for (unsigned i = 0; f->models[m].live && i < f->models[m].n_arenas; i++)
            arena += f->models[m].usable[i];
    copies = stats->late + stats->prefetches;
    REQUIRE(stats->peak_resident_bytes >= stats->resident_bytes &&
                stats->peak_resident_bytes >= f->peak,
            "a peak of %llu bytes", (unsigned long long)stats->peak_resident_bytes);
    f->peak = stats->peak_resident_bytes;
    REQUIRE(stats->arena_bytes == arena, "%llu arena bytes, not %llu",
            (unsigned long long)stats->arena_bytes, (unsigned long long)arena);
    if (f->w.engine->dead == OO_OK && !lost(f))
        REQUIRE(stats->locked_bytes == live.registered_bytes + live.host_alloc_bytes,
                "%llu bytes locked, the driver has %llu and %llu",
                (unsigned long long)stats->locked_bytes, (unsigned long long)live.registered_bytes,
                (unsigned long long)live.host_alloc_bytes);
    REQUIRE(stats->h2d_bytes <= seen.h2d_bytes && stats->d2h_bytes <= seen.d2h_bytes &&
                stats->h2d_copies <= seen.h2d_copies && stats->d2h_copies <= seen.d2h_copies,
            "more copies than the driver saw");
    REQUIRE(stats->h2d_timed_bytes <= stats->h2d_bytes &&
                stats->d2h_timed_bytes <= stats->d2h_bytes,
            "more bytes timed than copied");
    if (f->ever_faulty)
        return;
    REQUIRE(stats->h2d_bytes == seen.h2d_bytes && stats->d2h_bytes == seen.d2h_bytes,
            "%llu and %llu bytes counted, %llu and %llu copied",
            (unsigned long long)stats->h2d_bytes, (unsigned long long)stats->d2h_bytes,
            (unsigned long long)seen.h2d_bytes, (unsigned long long)seen.d2h_bytes);
    REQUIRE(stats->hits + stats->late == f->acquired && stats->acquires == f->acquired + f->refused,
            "%llu acquires, %llu hits, %llu late; answered %llu, refused %llu",
            (unsigned long long)stats->acquires, (unsigned long long)stats->hits,
            (unsigned long long)stats->late, (unsigned long long)f->acquired,
            (unsigned long long)f->refused);
    REQUIRE(copies == f->fetched, "%llu copies, %llu reported", (unsigned long long)copies,
            (unsigned long long)f->fetched);
    REQUIRE(stats->host_waits + stats->copy_waits + f->waits == seen.host_waits,
            "%llu host waits counted, %llu seen",
            (unsigned long long)(stats->host_waits + stats->copy_waits),
            (unsigned long long)(seen.host_waits - f->waits));
    REQUIRE(stats->recoveries == 0 && stats->prefetch_failures == 0, "recovered from nothing");
}

static void inspect(struct fuzz *f) {
    struct oo_resident rows[MODELS * LAYERS * 2];
    struct oo_stats stats;
    size_t count, bytes = 0;
    enum oo_status status =
        oo_engine_residents(f->w.engine, rows, sizeof rows / sizeof rows[0], &count);
    judge(f, status, 0, 1, "residents");
    if (status != OO_OK)
        return;
    REQUIRE(count <= sizeof rows / sizeof rows[0], "%zu residents", count);
    unsigned pins = 0, held = 0;
    for (size_t i = 0; i < count; i++) {
        REQUIRE(rows[i].pins == pins_of(f, rows[i].unit), "unit %u: %u pins", rows[i].unit,
                rows[i].pins);
        pins += rows[i].pins;
        bytes += rows[i].bytes;
        for (size_t j = 0; j < i; j++)
            REQUIRE(rows[i].address >= rows[j].address + rows[j].bytes ||
                        rows[j].address >= rows[i].address + rows[i].bytes,
                    "units %u and %u share bytes", rows[i].unit, rows[j].unit);
    }
    for (int i = 0; i < HELD; i++)
        held += f->held[i].live != 0;
    REQUIRE(pins == held, "%u pins, %u uses", pins, held);
    feeds_end(&f->w);
    status = oo_engine_stats(f->w.engine, OO_ALL_MODELS, &stats);
    judge(f, status, 0, 1, "stats");
    if (status == OO_OK) {
        audit(f, &stats);
        REQUIRE(stats.resident_bytes == bytes && stats.resident_units == count &&
                    stats.resident_bytes <= stats.arena_bytes,
                "%zu bytes resident, counted %llu", bytes,
                (unsigned long long)stats.resident_bytes);
    }
}

static void set_schedule(struct input *in) {
    const int schedule = (int)below(in, 6); /* one after the other, whatever the compiler prefers */
    sim.simSetSchedule(schedule, byte_of(in));
}

static void set_fault(struct fuzz *f, struct input *in) {
    static const char *const calls[] = {NULL,
                                        NULL,
                                        "cuMemcpyHtoDAsync",
                                        "cuMemcpyDtoHAsync",
                                        "cuEventRecord",
                                        "cuStreamWaitEvent",
                                        "cuEventQuery",
                                        "cuEventSynchronize",
                                        "cuStreamSynchronize",
                                        "cuEventCreate",
                                        "cuMemHostAlloc",
                                        "cuMemHostRegister",
                                        "cuMemHostUnregister",
                                        "cuCtxGetCurrent",
                                        "cuCtxPushCurrent",
                                        "cuCtxPopCurrent",
                                        "cuEventElapsedTime",
                                        "cuStreamIsCapturing",
                                        "simAdopt",
                                        "simDrop",
                                        "simLaunch",
                                        "simHostAccess",
                                        "cuLaunchKernel",
                                        "cuMemsetD32Async",
                                        "cuModuleLoadData",
                                        "cuStreamCreateWithPriority"};
    const char *call = calls[below(in, sizeof calls / sizeof calls[0])];
    const unsigned nth = 1 + below(in, 40), lasting = below(in, 3) == 0;
    OOCUresult result =
        below(in, 2) ? OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES : OOCU_ERROR_OUT_OF_MEMORY;
    if (below(in, 12) == 0) {
        static const char *const ways[] = {"async h2d", "async d2h", "async kernel"};
        static const OOCUresult ends[] = {OOCU_ERROR_ILLEGAL_ADDRESS, OOCU_ERROR_LAUNCH_FAILED};
        const unsigned way = below(in, 6);
        if (f->sticky) /* one is enough: all that follows must name the same */
            return;
        f->sticky = result = ends[below(in, 2)];
        call = way < 3 ? ways[way] : call;
    }
    sim.simFault(call, nth, result, (int)lasting);
    f->faulty = f->ever_faulty = 1;
}

static void trace(struct fuzz *f) {
    struct oo_trace_row *rows = NULL;
    size_t count, copies = 0;
    double free_s[2] = {0, 0}; /* when the copy streams have ended their last row */
    const int no_times = !f->w.engine->driver.cuEventElapsedTime;
    /* The pieces of copy threads are between other copies on the stream. */
    const int in_turn = f->w.engine->feeder.n_threads == 0;
    enum oo_status status =
        f->tracing ? oo_trace_stop(f->w.engine, &rows, &count) : oo_trace_start(f->w.engine);
    excuse(f, status, no_times && status == OO_E_DRIVER_OLD, "trace");
    if (status != OO_OK)
        return;
    for (size_t i = 0; f->tracing && i < count; i++) {
        const struct oo_trace_row *row = &rows[i];
        REQUIRE(row->end_s >= row->start_s, "row %zu (kind %d): %.9f to %.9f", i, (int)row->kind,
                row->start_s, row->end_s);
        if (row->kind != OO_TRACE_H2D && row->kind != OO_TRACE_D2H)
            continue;
        const int which = row->kind == OO_TRACE_D2H;
        copies += !which;
        REQUIRE(row->start_s > free_s[which] - 1e-6 * (1 + row->start_s) || which || !in_turn,
                "row %zu: a copy begins at %.9f, the one before it ends at %.9f", i, row->start_s,
                free_s[which]);
        free_s[which] = row->end_s;
    }
    if (!f->ever_faulty) {
        struct oo_stats stats;
        need(oo_engine_stats(f->w.engine, OO_ALL_MODELS, &stats), "stats");
        const uint64_t copied = f->fetched - stats.stopped_feeds;
        if (f->tracing && !f->ever_coded)
            REQUIRE(copies == copied - f->copied_untraced, "%zu rows of copies, %llu copies",
                    copies, (unsigned long long)(copied - f->copied_untraced));
        f->copied_untraced = copied;
    }
    f->tracing = !f->tracing;
    oo_trace_free(rows);
}

/* Calls that must be refused for a reason of their own. */
static void wrong_call(struct fuzz *f, struct input *in) {
    struct oo_engine *e = f->w.engine;
    struct oo_use use;
    struct oo_fetched fetched;
    struct oo_stats stats;
    char bytes[16] = {0};
    const struct oo_tensor nothing = {.host = bytes, .bytes = 0};
    const uint32_t one = 1, none = 0;
    uint32_t id;
    size_t offset;
    enum oo_status status = OO_OK, expected = OO_E_ARGUMENT;
    int even_dead = 0;
    struct attached *m = &f->models[f->models[0].live ? 0 : 1];
    struct oo_trace_row *rows;
    switch (below(in, 20)) {
    case 0:
        status = acquire(e, 99999, f->streams[1], 0, OO_FORWARD, -1, 0, &use);
        expected = OO_E_STATE;
        break;
    case 1:
        status = oo_engine_release(e, (uint64_t)99999 << 32, f->streams[1], 0, &fetched);
        expected = OO_E_TICKET;
        even_dead = 1;
        break;
    case 2:
        status = oo_unit_set_trainable(e, 99999, 1);
        break;
    case 3:
        status = oo_member_move(e, 99999, &nothing, 1, &id, &offset);
        break;
    case 4:
        status = oo_segment_add(e, 99999, (uintptr_t)bytes, sizeof bytes, f->streams[1]);
        break;
    case 5:
        status = oo_model_remove(e, 99999);
        even_dead = 1;
        break;
    case 6:
        status = oo_engine_stats(e, 99999, &stats);
        even_dead = 1;
        break;
    case 7:
        status = oo_engine_lock(e, f->landing, OO_ALL_BYTES);
        expected = OO_E_STATE;
        break;
    case 8: /* masters of an attached model */
        if (!m->live || !m->n_layers || m->layers[0].own)
            return;
        for (unsigned l = 0; l < m->n_layers; l++)
            if (m->layers[l].foreign || m->layers[l].own)
                return;
        status = oo_engine_unlock(e, m->host);
        expected = OO_E_STATE;
        even_dead = 1;
        break;
    case 9:
        status = oo_unit_add(e, m->id, &nothing, &one, 1, 0, &id, &id, &offset);
        break;
    case 10:
        status = oo_unit_add(e, m->id, &nothing, &none, 0, 0, &id, &id, &offset);
        break;
    case 11:
        status = oo_engine_destroy(e); /* the landing buffer is locked */
        expected = OO_E_STATE;
        even_dead = 1;
        break;
    case 12:
        status = oo_engine_launch(e, 99999, f->streams[1], 0.0);
        expected = OO_E_STATE;
        break;
    case 13:
        status = f->tracing ? oo_trace_start(e) : oo_trace_stop(e, &rows, &offset);
        expected = OO_E_STATE;
        break;
    case 14:
        if (!m->live || !m->n_layers)
            return;
        status = oo_member_move(e, m->layers[0].member, &nothing, 0, &id, &offset);
        break;
    case 15:
        status = oo_engine_create(sim.path, 7, &e);
        REQUIRE(status == OO_E_NO_DEVICE || f->faulty, "%s", oo_status_name(status));
        return;
    case 16: /* whatever befell the engine */
        status = acquire(e, 0, f->streams[1], 0, OO_FORWARD, -1, 4 << below(in, 20), &use);
        REQUIRE(status == OO_E_ARGUMENT, "%s", oo_status_name(status));
        return;
    case 17:
        status = oo_engine_release(e, 0, f->streams[1], 2 << below(in, 20), &fetched);
        REQUIRE(status == OO_E_ARGUMENT, "%s", oo_status_name(status));
        return;
    case 18:
        status = oo_lease_remove(e, 99999);
        even_dead = 1;
        break;
    default:
        status = oo_engine_stamp(e, &(struct oo_stamp){99999, 1}, 1, 0);
        expected = OO_E_STATE;
    }
    REQUIRE(status != OO_OK, "a wrong call succeeds");
    judge(f, status, status == expected, even_dead, "wrong call");
}

static void ask(struct fuzz *f, struct input *in) {
    size_t free_bytes, total_bytes;
    enum oo_status status;
    uintptr_t stream;
    if (below(in, 4) == 0) {
        status = oo_engine_compute_stream(f->w.engine, &stream);
        excuse(f, status, 0, "compute stream");
    } else if (below(in, 2)) {
        status = oo_engine_mem_info(f->w.engine, &free_bytes, &total_bytes);
        excuse(f, status, 0, "memory");
        struct sim_live live;
        sim.simGetLive(&live);
        if (status == OO_OK)
            REQUIRE(total_bytes - free_bytes == live.device_bytes + live.adopted_bytes,
                    "%zu bytes in use", total_bytes - free_bytes);
    } else {
        status = oo_engine_spin(f->w.engine, f->streams[any_stream(f, in)],
                                (uint64_t)1 << below(in, 24));
        excuse(f, status, 0, "spin");
    }
}

static void use_model(struct fuzz *f, struct attached *m, unsigned call, struct input *in) {
    struct held *h = &f->held[below(in, HELD)];
    struct oo_fetched fetched;
    enum oo_status status;
    struct layer *layer = &m->layers[below(in, m->n_layers)];
    int home;
    if (narrate)
        fprintf(stderr, "-- %u: member %u of unit %u, stamp %llu\n", call, layer->member,
                layer->unit, (unsigned long long)layer->stamp);
    switch (call) {
    case 5: {
        const unsigned which = any_stream(f, in);
        const size_t bytes = below(in, GRADIENT + 1);
        download(f, which, bytes, (int)below(in, 2));
        break;
    }
    case 6: /* an optimizer's step */
        status = oo_engine_hold(f->w.engine);
        excuse(f, status, 0, "hold");
        for (unsigned i = 0; i < m->n_layers; i++)
            if (m->layers[i].trainable && below(in, 2)) {
                rewrite(f, &m->layers[i]);
                m->layers[i].stamp++;
            }
        break;
    case 7:
        if (below(in, 2)) {
            excuse(f, oo_engine_resume(f->w.engine), 0, "resume");
            break;
        }
        status = oo_engine_settle(f->w.engine); /* then the host may write any master */
        excuse(f, status, 0, "settle");
        if (status == OO_OK && !is_coded(layer)) {
            for (unsigned t = 0; t < layer->n_tensors; t++)
                (void)sim.simHostAccess((void *)(uintptr_t)layer->tensors[t].host,
                                        layer->tensors[t].bytes, 1);
            rewrite(f, layer);
            layer->stamp++;
        }
        break;
    case 8:
        excuse(f, oo_engine_refresh(f->w.engine, below(in, 2) ? m->id : OO_ALL_MODELS), 0,
               "refresh");
        break;
    case 9:
        home = (int)below(in, 2);
        move(f, layer, home, below(in, 2) ? 1 + below(in, 3000) : 0);
        break;
    case 10:
        rewrite(f, layer);
        layer->stamp++;
        break;
    case 11: /* a few bytes: no sample shows them, the stamp does */
        if (!layer->silent && !is_coded(layer)) {
            const struct oo_tensor *tensor = &layer->tensors[below(in, layer->n_tensors)];
            char *bytes = (char *)(uintptr_t)tensor->host;
            const unsigned at = below(in, (unsigned)tensor->bytes);
            cover(layer, 0);
            declare_write(bytes + at, 1);
            bytes[at] ^= 0x55;
            cover(layer, 1);
            layer->stamp++;
        }
        break;
    case 12:
        rewrite(f, layer);
        layer->silent = 1;
        break;
    case 13:
        excuse(f, oo_engine_set_verify(f->w.engine, (int)below(in, 2)), 0, "verify");
        break;
    case 14:
        home = (int)below(in, 2);
        status = oo_unit_set_trainable(f->w.engine, layer->unit, home);
        excuse(f, status, home && unit_is_coded(f, layer->unit), "trainable");
        layer->trainable |= status == OO_OK;
        break;
    case 15:
        status = oo_engine_prefetch(f->w.engine, &fetched);
        excuse(f, status, 0, "prefetch");
        if (status == OO_OK)
            give_stamps(f, &fetched);
        break;
    case 16: /* a pass over the model: what prediction lives on */
        for (unsigned i = 0; i < m->n_layers; i++) {
            if (h->live)
                release(f, h);
            if (!h->live)
                begin_use(f, h, &m->layers[i], in);
        }
        break;
    case 17:
        if (m->n_arenas < SEGMENTS && below(in, 4) == 0)
            (void)add_segment(f, m, any_stream(f, in), in);
        break;
    default:
        if (h->live)
            release(f, h);
        else
            begin_use(f, h, layer, in);
        break;
    }
}

static void one_call(struct fuzz *f, struct input *in) {
    const unsigned call = below(in, 40);
    unsigned which;
    struct attached *m = &f->models[below(in, MODELS)];
    switch (call) {
    case 0:
        if (!m->live)
            attach(f, m, in);
        else if (below(in, 3) == 0)
            detach(f, m);
        break;
    case 1:
        if (below(in, 2))
            set_schedule(in);
        else
            sim.simAdvance(1e-6 * (1u << below(in, 12)));
        break;
    case 2:
        set_fault(f, in);
        break;
    case 3:
    case 4:
        clear_faults(f);
        break;
    case 18:
        inspect(f);
        break;
    case 19:
        if (below(in, 4) == 0)
            trace(f);
        break;
    case 20:
        wrong_call(f, in);
        break;
    case 21:
        which = below(in, STREAMS);
        if (f->capturing[which] || may_capture(f, which))
            capture(f, which);
        break;
    case 22:
        ask(f, in);
        break;
    case 23:
        sim.simRefuseRegistration(below(in, 3));
        break;
    default:
        if (m->live)
            use_model(f, m, call, in);
    }
}

/* Contexts are the thread's: a new one has none, the first has one or not. */
static void one_call_in_a_thread(void *argument) {
    struct fuzz *f = argument;
    one_call(f, f->input);
}

static void one_call_somewhere(struct fuzz *f) {
    const unsigned where = below(f->input, 32);
    struct oo_thread *thread = where == 0 ? oo__thread_start(one_call_in_a_thread, f) : NULL;
    if (where == 1 && f->main_context)
        leave_context();
    else if (where == 1)
        enter_context(f);
    f->main_context ^= where == 1;
    if (thread)
        oo__thread_join(thread);
    else
        one_call(f, f->input);
    see_reports();
}

/* ---- an input from beginning to end ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    narrate = getenv("FUZZ_NARRATE") != NULL;
    sim = sim_open();
    sim_reset(&sim);
    return 0;
}

/* What a life leaves behind when its context was lost: only what that took with it. */
static void end_lost_context(void) {
    struct sim_live live;
    sim.simGetLive(&live);
    REQUIRE(live.adopted_bytes == 0 && live.queued == 0, "%llu adopted bytes, %llu queued",
            (unsigned long long)live.adopted_bytes, (unsigned long long)live.queued);
    see_reports();
    sim.simFaultClear();
    for (; live.contexts > 0; sim.simGetLive(&live))
        sim.cuDevicePrimaryCtxRelease_v2(0);
    sim.simReportsClear(); /* the streams and events that went with it */
    check_nothing_alive("after a lost context");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct fuzz state;
    struct fuzz *f = &state;
    struct input in = {data, size};
    memset(f, 0, sizeof *f);
    f->input = &in;
    world_begin(&f->w);
    f->w.engine->patience_s = 0; /* the thread that holds a use may be the one that waits */
    set_schedule(&in);
    f->w.device_arena = (int)below(&in, 2);
    if (f->w.device_arena) {
        f->w.engine->driver.simAdopt = NULL;
        f->w.engine->driver.simDrop = NULL;
    }
    if (below(&in, 16) == 0)
        f->w.engine->driver.cuEventElapsedTime = NULL;
    if (below(&in, 4) == 0)
        sim.simRefuseRegistration(1 + below(&in, 3));
    for (int i = 1; i < STREAMS; i++) /* the first is the default stream */
        f->streams[i] = new_stream(&f->w);
    f->gradient = arena_new(f, STREAMS * GRADIENT);
    need(oo_host_create(GRADIENT, &f->landing), "host");
    const enum oo_status locked = oo_engine_lock(f->w.engine, f->landing, OO_ALL_BYTES);
    REQUIRE(locked == OO_OK || locked == OO_E_LOCK_REFUSED, "lock: %s", oo_error_message());
    attach(f, &f->models[0], &in);
    while (in.left)
        one_call_somewhere(f);

    end_captures(f);
    for (int i = 0; i < HELD; i++)
        for (int tries = 0; f->held[i].live; tries++) {
            release(f, &f->held[i]);
            REQUIRE(tries < 2, "a release that never succeeds: %s", oo_error_message());
        }
    inspect(f);
    for (int m = 0; m < MODELS; m++)
        if (f->models[m].live) {
            detach(f, &f->models[m]);
            REQUIRE(!f->models[m].live, "a detach that never succeeds: %s", oo_error_message());
        }
    unlock(f, f->landing);
    const int gone = lost(f);
    const enum oo_status destroyed = oo_engine_destroy(f->w.engine);
    REQUIRE(destroyed == OO_OK || (destroyed == OO_LEAKED && f->ever_faulty), "destroy: %s",
            oo_error_message());
    OOCUcontext current = NULL; /* some may be left where their popping was made to fail */
    while (sim.cuCtxGetCurrent(&current) == 0 && current)
        leave_context();
    if (gone) {
        if (!f->w.device_arena)
            free(f->gradient);
        end_lost_context();
    } else {
        for (int i = 1; i < STREAMS; i++)
            end_stream(&f->w, f->streams[i]);
        if (f->w.device_arena)
            end_device_memory(&f->w, f->gradient);
        else
            free(f->gradient);
        check_nothing_alive("at the end");
        release_context("at the end");
    }
    check_no_reports("at the end");
    REQUIRE(sim_reset(&sim) == 0, "the simulator could not be reset");
    if (check_failed)
        abort(); /* said above */
    return 0;
}
