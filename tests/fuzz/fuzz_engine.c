/* Bytes become calls on an engine over the simulated driver: two models, six streams, nested uses,
 * masters rewritten and moved, faults that pass or last, every schedule. What a kernel reads must
 * equal the master; every refusal must have its reason; at the end everything is given back, and
 * the race detector is silent. */
#include "fuzz.h"

#include "world.h"

enum {
    MODELS = 2,
    LAYERS = 18,
    TENSORS = 2,
    STREAMS = 6,
    HELD = 6,
    MOST_BYTES = 12288,
    GRADIENT = 6000
};
enum {
    ARENA = 4 * MOST_BYTES * TENSORS
}; /* holds the largest unit: three members, a quarter to spare */

struct layer {
    uint32_t member, unit;
    unsigned n_tensors;
    struct oo_tensor tensors[TENSORS],
        home[TENSORS]; /* where the master is, where it was at first */
    size_t offsets[TENSORS];
    char *foreign; /* memory of a master that has moved */
    uint64_t stamp;
    int silent; /* rewritten without a new stamp: only the first use of a sweep sees that */
    int trainable;
};

struct attached {
    int live;
    uint32_t id;
    struct oo_host *host;
    char *arenas[2];
    uintptr_t arena_streams[2];
    unsigned n_arenas, n_layers;
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
    int faulty, tracing;
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

/* A call may fail while a fault is set, else for the reasons named. */
static void excuse(const struct fuzz *f, enum oo_status status, int excused, const char *what) {
    if (narrate)
        fprintf(stderr, "%s: %s%s%s; %llu reports\n", what, oo_status_name(status),
                status == OO_OK ? "" : ": ", status == OO_OK ? "" : oo_error_message(),
                (unsigned long long)sim.simReportCount());
    REQUIRE(status == OO_OK || f->faulty || excused, "%s: %s: %s", what, oo_status_name(status),
            oo_error_message());
    REQUIRE(status != OO_E_DEAD, "%s: dead without a sticky error", what);
}

static void clear_faults(struct fuzz *f) {
    sim.simFaultClear();
    f->faulty = 0;
}

/* ---- masters ---- */

static void rewrite_tensor(struct fuzz *f, const struct oo_tensor *tensor) {
    /* A pattern that no tensor ever had; the masters are ours, whatever the engine calls const. */
    char *bytes = (char *)(uintptr_t)tensor->host;
    const unsigned pattern = ++f->pattern;
    for (size_t i = 0; i + 4 <= tensor->bytes; i += 4) {
        const uint32_t word = pattern * 2654435761u + (uint32_t)i;
        memcpy(bytes + i, &word, 4);
    }
}

static void rewrite(struct fuzz *f, struct layer *layer) {
    for (unsigned i = 0; i < layer->n_tensors; i++)
        rewrite_tensor(f, &layer->tensors[i]);
}

/* The binding gives the stamps of all members of a unit that was copied. */
static void give_stamps(struct fuzz *f, const struct oo_fetched *fetched) {
    REQUIRE(fetched->count <= OO_MAX_FETCHED, "%u fetched", fetched->count);
    for (uint32_t i = 0; i < fetched->count; i++)
        for (int m = 0; m < MODELS; m++)
            for (unsigned l = 0; f->models[m].live && l < f->models[m].n_layers; l++) {
                struct layer *layer = &f->models[m].layers[l];
                if (layer->unit == fetched->units[i]) {
                    const enum oo_status status =
                        oo_engine_stamp(f->w.engine, layer->member, layer->stamp);
                    excuse(f, status, 0, "stamp");
                    layer->silent |= status != OO_OK;
                }
            }
}

/* ---- attach and detach ---- */

static char *arena_new(struct fuzz *f, size_t bytes) {
    if (f->w.device_arena)
        clear_faults(f); /* they are for the engine's calls, not for ours */
    char *arena = f->w.device_arena ? device_memory(&f->w, bytes) : malloc(bytes);
    REQUIRE(arena, "no arena");
    return arena;
}

static void arena_end(struct fuzz *f, char *arena) {
    clear_faults(f);
    if (f->w.device_arena)
        end_device_memory(&f->w, arena);
    else
        free(arena);
}

static enum oo_status add_segment(struct fuzz *f, struct attached *m, uintptr_t stream) {
    char *arena = arena_new(f, ARENA);
    const enum oo_status status =
        oo_segment_add(f->w.engine, m->id, (uintptr_t)arena, ARENA, stream);
    if (status == OO_OK) {
        m->arena_streams[m->n_arenas] = stream;
        m->arenas[m->n_arenas++] = arena;
    } else {
        const int faulty = f->faulty;
        arena_end(f, arena);
        f->faulty = faulty; /* the caller asks what excuses `status` */
    }
    return status;
}

/* A unit of one to three members, of one or two tensors each. */
static enum oo_status add_unit(struct fuzz *f, struct attached *m, struct input *in, char **at) {
    struct oo_tensor tensors[3 * TENSORS];
    size_t offsets[3 * TENSORS];
    uint32_t counts[3] = {0}, members[3], unit;
    struct layer *first = &m->layers[m->n_layers];
    unsigned n = 1 + below(in, 3), all = 0;
    if (n > LAYERS - m->n_layers)
        n = LAYERS - m->n_layers;
    const int trainable = below(in, 3) == 0;
    for (unsigned i = 0; i < n; i++) {
        struct layer *layer = &first[i];
        *layer =
            (struct layer){.n_tensors = 1 + below(in, TENSORS), .stamp = 1, .trainable = trainable};
        counts[i] = layer->n_tensors;
        for (unsigned t = 0; t < layer->n_tensors; t++) {
            const size_t bytes = 16 + 4 * (size_t)below(in, 1000);
            layer->home[t] = layer->tensors[t] = (struct oo_tensor){*at, bytes};
            tensors[all++] = layer->tensors[t];
            rewrite_tensor(f, &layer->tensors[t]);
            *at += (bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
        }
    }
    const enum oo_status status =
        oo_unit_add(f->w.engine, m->id, tensors, counts, n, trainable, &unit, members, offsets);
    for (unsigned i = 0, o = 0; i < n && status == OO_OK; i++) {
        first[i].member = members[i];
        first[i].unit = unit;
        for (unsigned t = 0; t < first[i].n_tensors; t++)
            first[i].offsets[t] = offsets[o++];
    }
    m->n_layers += status == OO_OK ? n : 0;
    return status;
}

static void give_back_model(struct fuzz *f, struct attached *m) {
    REQUIRE(oo_engine_unlock(f->w.engine, m->host) == OO_OK || !m->host->owner, "unlock: %s",
            oo_error_message());
    oo_host_destroy(m->host);
    for (unsigned i = 0; i < m->n_arenas; i++) {
        /* The engine has ordered the allocating stream after every use: once that has ended,
         * whoever comes next may have the bytes, on whatever stream. */
        sim.cuCtxPushCurrent_v2(f->w.context);
        const OOCUresult ended =
            f->w.engine->driver.cuStreamSynchronize((OOCUstream)m->arena_streams[i]);
        sim.cuCtxPopCurrent_v2(NULL);
        REQUIRE(ended == 0, "a stream that does not end: %d", ended);
        arena_end(f, m->arenas[i]);
    }
    for (unsigned i = 0; i < m->n_layers; i++)
        free(m->layers[i].foreign);
    memset(m, 0, sizeof *m);
}

static void attach(struct fuzz *f, struct attached *m, struct input *in) {
    memset(m, 0, sizeof *m);
    if (oo_host_create((size_t)LAYERS * TENSORS * 4352, &m->host) != OO_OK)
        return;
    int added = 0;
    enum oo_status status = oo_engine_lock(f->w.engine, m->host, below(in, 4) != 0);
    if (status == OO_OK || status == OO_E_LOCK_REFUSED) {
        status = oo_model_add(f->w.engine, &m->id);
        added = status == OO_OK;
    }
    if (status == OO_OK)
        status = add_segment(f, m, f->streams[below(in, STREAMS)]);
    char *at = oo_host_address(m->host);
    for (unsigned n = 1 + below(in, 12); n-- > 0 && status == OO_OK && m->n_layers < LAYERS;)
        status = add_unit(f, m, in, &at);
    m->live = status == OO_OK;
    if (m->live)
        return;
    excuse(f, status, 0, "attach");
    clear_faults(f);
    if (added)
        REQUIRE(oo_model_remove(f->w.engine, m->id) == OO_OK, "undo attach: %s",
                oo_error_message());
    give_back_model(f, m);
}

static void detach(struct fuzz *f, struct attached *m) {
    int in_use = 0;
    for (int i = 0; i < HELD; i++)
        for (unsigned l = 0; l < m->n_layers; l++)
            in_use |= f->held[i].live && f->held[i].layer == &m->layers[l];
    for (unsigned other = 0; other < MODELS;
         other++) /* another's unit in use may lie in its segment */
        in_use |= &f->models[other] != m && holds_any(f);
    enum oo_status status = oo_model_remove(f->w.engine, m->id);
    excuse(f, status, in_use, "detach");
    if (status == OO_E_STATE)
        return;
    if (status != OO_OK) {
        clear_faults(f);
        status = oo_model_remove(f->w.engine, m->id);
        if (status == OO_E_STATE && in_use)
            return;
        REQUIRE(status == OO_OK, "detach after the fault: %s", oo_error_message());
    }
    clear_faults(f);
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
    for (unsigned t = 0; t < layer->n_tensors; seen += layer->tensors[t++].bytes) {
        const void *there = (const void *)(h->address + layer->offsets[t]);
        const void *expected = h->known ? seen : layer->tensors[t].host;
        REQUIRE(memcmp(there, expected, layer->tensors[t].bytes) == 0, "member %u, tensor %u: %s",
                layer->member, t,
                h->known ? "its bytes changed while it was in use" : "wrong bytes");
        memcpy(seen, there, layer->tensors[t].bytes);
    }
    h->known = 1;
    return 1;
}

static void release(struct fuzz *f, struct held *h) {
    struct oo_fetched fetched;
    if (h->known) /* else the master may have been rewritten since a first kernel could not start */
        (void)compute(f, h);
    const enum oo_status status = oo_engine_release(f->w.engine, h->ticket, h->stream, 0, &fetched);
    excuse(f, status, 0, "release");
    if (status != OO_OK)
        return;
    h->live = 0;
    give_stamps(f, &fetched);
    if (!f->faulty && pins_of(f, h->layer->unit) == 0) /* uses of one copy share its ticket */
        REQUIRE(oo_engine_release(f->w.engine, h->ticket, h->stream, 0, &fetched) == OO_E_TICKET,
                "released twice");
}

static void acquire(struct fuzz *f, struct held *h, struct layer *layer, struct input *in) {
    const unsigned how = below(in, 8);
    const uintptr_t stream = f->streams[below(in, STREAMS)];
    enum oo_kind kind = how < 3 ? OO_FORWARD : how < 5 ? OO_RECOMPUTE : OO_BACKWARD;
    const int flags = below(in, 8) == 0 ? OO_NONBLOCKING : 0;
    if (kind != OO_FORWARD && (layer->silent || below(in, 8) == 0))
        f->task++;
    struct oo_use use;
    enum oo_status status = oo_engine_acquire(f->w.engine, layer->member, stream, layer->stamp,
                                              kind, kind == OO_FORWARD ? -1 : f->task, flags, &use);
    /* No room, or rewritten while in use: only where something is in use. */
    const int excused = holds_any(f) && (status == OO_E_NO_ROOM || status == OO_E_STATE);
    excuse(f, status, excused || (status == OO_WOULD_BLOCK && flags), "acquire");
    if (status != OO_OK)
        return;
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
    for (unsigned t = 0; t < layer->n_tensors; t++)
        to[t] = home ? layer->home[t]
                     : (struct oo_tensor){memory + t * MOST_BYTES,
                                          words ? 4 * (size_t)words : layer->home[t].bytes};
    for (unsigned t = 0; t < layer->n_tensors; t++)
        rewrite_tensor(f, &to[t]);
    const enum oo_status status =
        oo_member_move(f->w.engine, layer->member, to, layer->n_tensors, &unit, offsets);
    excuse(f, status, pins_of(f, layer->unit) > 0, "move");
    if (status != OO_OK) {
        free(memory);
        layer->silent |= home && to[0].host == layer->tensors[0].host; /* rewritten in place */
        return;
    }
    free(layer->foreign); /* the caller vouched for it at an acquire only */
    layer->foreign = memory;
    memcpy(layer->tensors, to, sizeof to);
    memcpy(layer->offsets, offsets, sizeof offsets);
    layer->unit = unit;
}

/* Each stream has a gradient of its own: after a failure nobody has waited for the kernel that
 * wrote it. */
static void download(struct fuzz *f, unsigned which, size_t bytes, int landing) {
    const uintptr_t stream = f->streams[which];
    char *gradient = f->gradient + (size_t)which * GRADIENT;
    static char pageable[GRADIENT];
    char *target = landing && f->landing ? oo_host_address(f->landing) : pageable;
    if (f->w.device_arena) {
        sim.cuCtxPushCurrent_v2(f->w.context);
        const OOSimRange range = {(OOCUdeviceptr)gradient, bytes};
        const OOCUresult launched = sim.simLaunch((OOCUstream)stream, NULL, 0, &range, 1, 1e-5);
        sim.cuCtxPopCurrent_v2(NULL);
        if (launched)
            return;
    }
    fill(gradient, bytes, ++f->pattern);
    const enum oo_status status =
        oo_engine_download(f->w.engine, target, (uintptr_t)gradient, bytes, stream);
    excuse(f, status, 0, "download");
    if (status == OO_OK)
        REQUIRE(memcmp(target, gradient, bytes) == 0, "a gradient of %zu bytes arrived wrong",
                bytes);
}

static void inspect(struct fuzz *f) {
    struct oo_resident rows[MODELS * LAYERS * 2];
    struct oo_stats stats;
    size_t count, bytes = 0;
    enum oo_status status =
        oo_engine_residents(f->w.engine, rows, sizeof rows / sizeof rows[0], &count);
    excuse(f, status, 0, "residents");
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
    status = oo_engine_stats(f->w.engine, OO_ALL_MODELS, &stats);
    excuse(f, status, 0, "stats");
    if (status == OO_OK)
        REQUIRE(stats.resident_bytes == bytes && stats.resident_units == count &&
                    stats.resident_bytes <= stats.arena_bytes,
                "%zu bytes resident, counted %llu", bytes,
                (unsigned long long)stats.resident_bytes);
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
                                        "simAdopt"};
    const char *call = calls[below(in, sizeof calls / sizeof calls[0])];
    const unsigned nth = 1 + below(in, 40), lasting = below(in, 3) == 0;
    sim.simFault(call, nth, below(in, 2) ? OOCU_ERROR_UNKNOWN : OOCU_ERROR_OUT_OF_MEMORY,
                 (int)lasting);
    f->faulty = 1;
}

static void trace(struct fuzz *f) {
    struct oo_trace_row *rows = NULL;
    size_t count = 0;
    enum oo_status status =
        f->tracing ? oo_trace_stop(f->w.engine, &rows, &count) : oo_trace_start(f->w.engine);
    excuse(f, status, 0, "trace");
    if (status == OO_OK) {
        for (size_t i = 0; i < count; i++)
            REQUIRE(rows[i].end_s >= rows[i].start_s, "row %zu (kind %d): %.9f to %.9f", i,
                    (int)rows[i].kind, rows[i].start_s, rows[i].end_s);
        f->tracing = !f->tracing;
        oo_trace_free(rows);
    }
}

static void one_call(struct fuzz *f, struct input *in) {
    const unsigned call = below(in, 32);
    struct attached *m = &f->models[below(in, MODELS)];
    struct held *h = &f->held[below(in, HELD)];
    const uintptr_t stream = f->streams[below(in, STREAMS)];
    struct oo_fetched fetched;
    enum oo_status status;
    if (call == 0) {
        if (!m->live)
            attach(f, m, in);
        else if (below(in, 3) == 0)
            detach(f, m);
        return;
    }
    if (call == 1) {
        if (below(in, 2))
            sim.simSetSchedule((int)below(in, 6), byte_of(in));
        else
            sim.simAdvance(1e-6 * (1u << below(in, 12)));
        return;
    }
    if (call == 2) {
        set_fault(f, in);
        return;
    }
    if (call == 3 || call == 4) {
        clear_faults(f);
        return;
    }
    if (!m->live)
        return;
    struct layer *layer = &m->layers[below(in, m->n_layers)];
    switch (call) {
    case 5: {
        const unsigned which = below(in, STREAMS);
        const size_t bytes = 1 + below(in, GRADIENT);
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
        excuse(f, oo_engine_resume(f->w.engine), 0, "resume");
        break;
    case 8:
        excuse(f, oo_engine_refresh(f->w.engine, below(in, 2) ? m->id : OO_ALL_MODELS), 0,
               "refresh");
        break;
    case 9:
        move(f, layer, (int)below(in, 2), below(in, 2) ? 1 + below(in, 1100) : 0);
        break;
    case 10:
        rewrite(f, layer);
        layer->stamp++;
        break;
    case 11: /* a few bytes: no sample shows them, the stamp does */
        if (!layer->silent) {
            const struct oo_tensor *tensor = &layer->tensors[below(in, layer->n_tensors)];
            char *bytes = (char *)(uintptr_t)tensor->host;
            bytes[below(in, (unsigned)tensor->bytes)] ^= 0x55;
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
        layer->trainable = (int)below(in, 2);
        excuse(f, oo_unit_set_trainable(f->w.engine, layer->unit, layer->trainable), 0,
               "trainable");
        break;
    case 15:
        status = oo_engine_prefetch(f->w.engine, &fetched);
        excuse(f, status, 0, "prefetch");
        if (status == OO_OK)
            give_stamps(f, &fetched);
        break;
    case 16:
        if (below(in, 4) == 0)
            trace(f);
        break;
    case 17:
        if (m->n_arenas < 2 && below(in, 4) == 0)
            excuse(f, add_segment(f, m, stream), 0, "segment");
        break;
    case 18:
        inspect(f);
        break;
    case 19: /* a pass over the model: what prediction lives on */
        for (unsigned i = 0; i < m->n_layers; i++) {
            if (h->live)
                release(f, h);
            if (!h->live)
                acquire(f, h, &m->layers[i], in);
        }
        break;
    default:
        if (h->live)
            release(f, h);
        else
            acquire(f, h, layer, in);
        break;
    }
}

/* ---- an input from beginning to end ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    narrate = getenv("FUZZ_NARRATE") != NULL;
    sim = sim_open(0, NULL);
    sim_reset(&sim);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct fuzz state;
    struct fuzz *f = &state;
    struct input in = {data, size};
    memset(f, 0, sizeof *f);
    world_begin(&f->w);
    sim.simSetSchedule((int)below(&in, 6), byte_of(&in));
    f->w.device_arena = (int)below(&in, 2);
    if (f->w.device_arena) {
        f->w.engine->driver.simAdopt = NULL;
        f->w.engine->driver.simDrop = NULL;
    }
    if (below(&in, 4) == 0)
        sim.simRefuseRegistration(1 + below(&in, 3));
    for (int i = 1; i < STREAMS; i++) /* the first is the default stream */
        f->streams[i] = new_stream(&f->w);
    f->gradient = arena_new(f, STREAMS * GRADIENT);
    need(oo_host_create(GRADIENT, &f->landing), "host");
    const enum oo_status locked = oo_engine_lock(f->w.engine, f->landing, 1);
    REQUIRE(locked == OO_OK || locked == OO_E_LOCK_REFUSED, "lock: %s", oo_error_message());
    attach(f, &f->models[0], &in);
    while (in.left)
        one_call(f, &in);

    clear_faults(f);
    for (int i = 0; i < HELD; i++)
        if (f->held[i].live) {
            release(f, &f->held[i]);
            REQUIRE(!f->held[i].live, "a release that never succeeds: %s", oo_error_message());
        }
    inspect(f);
    for (int m = 0; m < MODELS; m++)
        if (f->models[m].live) {
            detach(f, &f->models[m]);
            REQUIRE(!f->models[m].live, "a detach that never succeeds: %s", oo_error_message());
        }
    REQUIRE(oo_engine_unlock(f->w.engine, f->landing) == OO_OK, "unlock: %s", oo_error_message());
    oo_host_destroy(f->landing);
    REQUIRE(oo_engine_destroy(f->w.engine) == OO_OK, "destroy: %s", oo_error_message());
    for (int i = 1; i < STREAMS; i++)
        end_stream(&f->w, f->streams[i]);
    arena_end(f, f->gradient);
    check_nothing_alive("at the end");
    release_context("at the end");
    check_no_reports("at the end");
    REQUIRE(sim_reset(&sim) == 0, "the simulator could not be reset");
    if (check_failed)
        abort(); /* said above */
    return 0;
}
