/* world.h - a model of UNITS units on the simulated driver, and its use: shared by the engine's
 * tests.
 *
 * Tests may look into the engine (state.h): its streams, to keep them busy; its driver table, to
 * take away what only a simulated driver has. */
#ifndef WORLD_H
#define WORLD_H

#include "check.h"
#include "codec.h"
#include "feed.h"
#include "oracle_offload.h"
#include "os.h"
#include "sim_control.h"
#include "state.h"

static struct sim_control sim;

enum { UNITS = 24 };

/* A model of UNITS units of different sizes in one host buffer, each filled with its own pattern.
 */
struct world {
    struct oo_engine *engine;
    struct oo_host *host;
    OOCUcontext
        context; /* retained by the test as well, as torch does: what leaks outlives the engine */
    char *arena;
    int device_arena; /* the arena is device memory of the driver, and the engine adopts nothing */
    uint32_t model, lease, unit[UNITS], member[UNITS];
    int leased, attached;
    char *master[UNITS];
    size_t bytes[UNITS], total, largest;
    uintptr_t stream;
    enum oo_status refused; /* by the call that made world_attach fail */
    /* Some masters are coded (set before world_attach): those of every unit that no optimizer
     * rewrites, but every third. */
    int coded;
    char *staging, *plain;       /* lent to the engine; what the masters are coded from */
    size_t coded_bytes[UNITS];   /* of the master; 0 where it is as it is */
    const char *expected[UNITS]; /* what a kernel shall read; NULL: the master */
};

/* Weights of a coded master in the world, in each chunk; the one coded unit whose weights are all
 * the same, so that a driver's call writes them and no kernel; and what the others pass through. */
enum { WORLD_CHUNK = 4096, WORLD_CONSTANT = 7, WORLD_STAGING = OO_STAGING_PIECES * 8192 + 256 };

static inline void need(enum oo_status status, const char *what) {
    CHECK(status == OO_OK, "%s: %s: %s", what, oo_status_name(status), oo_error_message());
}

/* The call answers so, in these words among others. */
#define ANSWERS(expected, words, call)                                                             \
    do {                                                                                           \
        const enum oo_status answer = (call);                                                      \
        CHECK(answer == (expected) && strstr(oo_error_message(), words), "%s: %s: %s", #call,      \
              oo_status_name(answer), oo_error_message());                                         \
    } while (0)

static inline void fill(char *master, size_t bytes, unsigned pattern) {
    for (size_t i = 0; i < bytes; i++)
        master[i] = (char)(pattern * 37 + i * 11 + (i >> 8));
}

/* Weights of one byte that are worth coding. */
static inline void fill_weights(char *weights, size_t count, unsigned pattern) {
    uint64_t state = pattern;
    for (size_t i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        weights[i] = (char)((state >> 33 & 15) + (state >> 40 & 15) - (state >> 50 & 31));
    }
}

/* How many calls further the next one of a sweep of faults is. Under the thread sanitizer a part is
 * enough, as races hardly depend on which call fails: ORACLE_OFFLOAD_TEST_FAULT_STRIDE. */
static inline unsigned sweep_stride(void) {
#if defined(__SANITIZE_THREAD__)
    const char *stride = getenv("ORACLE_OFFLOAD_TEST_FAULT_STRIDE");
    if (stride && strtoul(stride, NULL, 10))
        return (unsigned)strtoul(stride, NULL, 10);
#endif
    return 1;
}

/* Code `count` weights in chunks of `chunk`; returns the bytes that they take. */
static inline size_t encode(enum oo_codec_kind kind, const char *weights, size_t count,
                            size_t chunk, char *out) {
    const size_t width = oo_codec_weight_bytes(kind);
    size_t at = 0;
    for (size_t i = 0; i < count; i += chunk) {
        size_t bytes = 0;
        at = (at + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
        need(oo_codec_encode(oo_codec_best(), kind, weights + i * width,
                             count - i < chunk ? count - i : chunk, out + at, &bytes),
             "encode");
        at += bytes;
    }
    return at;
}

static inline void world_sizes(struct world *w) {
    w->total = w->largest = 0;
    for (unsigned i = 0; i < UNITS; i++) {
        w->bytes[i] = (size_t)(1 + i % 5) * 4096 + 256 * (i % 3);
        if (w->coded && i % 3 == 1) /* a chunk of 256 weights would be as they are */
            w->bytes[i] -= 256;
        w->total += w->bytes[i];
        if (w->bytes[i] > w->largest)
            w->largest = w->bytes[i];
    }
}

/* A non-blocking stream that the engine did not create. */
static inline uintptr_t new_stream(struct world *w) {
    OOCUstream stream = NULL;
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(sim.cuStreamCreateWithPriority(&stream, OOCU_STREAM_NON_BLOCKING, 0) == 0, "no stream");
    sim.cuCtxPopCurrent_v2(NULL);
    return (uintptr_t)stream;
}

static inline void end_stream(struct world *w, uintptr_t stream) {
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(sim.cuStreamDestroy_v2((OOCUstream)stream) == 0, "a stream that cannot be destroyed");
    sim.cuCtxPopCurrent_v2(NULL);
}

/* The stream ends, whatever is queued on it, and the next one has its handle. */
static inline uintptr_t recycle_stream(struct world *w, uintptr_t stream) {
    CHECK(sim.simSwitch(SIM_RECYCLED_STREAMS, 1) == 0, "no such switch");
    end_stream(w, stream);
    const uintptr_t next = new_stream(w);
    CHECK(next == stream, "the next stream has another handle");
    return next;
}

/* Device memory of the driver, as a real device's: the simulated one can be read by the host, too.
 */
static inline char *device_memory(struct world *w, size_t bytes) {
    OOCUdeviceptr address = 0;
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(sim.cuMemAlloc_v2(&address, bytes) == 0, "no device memory");
    sim.cuCtxPopCurrent_v2(NULL);
    return (char *)address; /* aligned to 512 bytes */
}

static inline void end_device_memory(struct world *w, char *address) {
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(sim.cuMemFree_v2((OOCUdeviceptr)address) == 0,
          "device memory freed while a copy uses it");
    sim.cuCtxPopCurrent_v2(NULL);
}

/* The n-th of these calls of the driver (NULL: of any) fails, once. */
static inline void fail_call(const char *call, uint64_t nth) {
    CHECK(sim.simFault(call, nth, OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES, 0) == 0, "no such call");
}

/* A kernel of `seconds` that reads or writes these bytes. */
static inline void kernel(uintptr_t stream, const void *address, size_t bytes, int writes,
                          double seconds) {
    const OOSimRange range = {(OOCUdeviceptr)address, bytes};
    const OOCUresult result =
        writes ? sim.simLaunch((OOCUstream)stream, NULL, 0, &range, 1, seconds)
               : sim.simLaunch((OOCUstream)stream, &range, bytes != 0, NULL, 0, seconds);
    CHECK(result == 0, "a kernel that cannot be launched: %d", result);
}

/* Host memory that the engine knows, all of it locked; and its end. */
static inline struct oo_host *locked_memory(struct oo_engine *engine, size_t bytes) {
    struct oo_host *host = NULL;
    need(oo_host_create(bytes, &host), "memory");
    need(oo_engine_lock(engine, host, OO_ALL_BYTES), "lock");
    return host;
}

static inline void end_memory(struct oo_engine *engine, struct oo_host *host) {
    need(oo_engine_unlock(engine, host), "unlock");
    need(oo_host_destroy(host), "destroy");
}

/* A timeline whose rows do not matter ends. */
static inline void end_timeline(struct oo_engine *engine) {
    struct oo_trace_row *rows;
    size_t count;
    need(oo_trace_stop(engine, &rows, &count), "timeline");
    oo_trace_free(rows);
}

/* The stream begins to capture, and its context becomes current; then neither any more. */
static inline void begin_capture(struct world *w, uintptr_t stream) {
    sim.cuCtxPushCurrent_v2(w->context);
    CHECK(sim.cuStreamBeginCapture_v2((OOCUstream)stream, 0) == 0, "no capture");
}

static inline void end_capture(uintptr_t stream) {
    void *graph = NULL;
    CHECK(sim.cuStreamEndCapture((OOCUstream)stream, &graph) == 0, "the capture was broken");
    sim.cuGraphDestroy(graph);
    sim.cuCtxPopCurrent_v2(NULL);
}

static inline size_t world_host_bytes(const struct world *w) {
    return w->coded ? 3 * w->total : w->total;
}

/* A unit that is not trained: of one member with these tensors, or of a member for each of them.
 * Returns its number. */
static inline uint32_t add_unit(struct oo_engine *engine, uint32_t model,
                                const struct oo_tensor *tensors, uint32_t count, uint32_t *member,
                                size_t *offsets) {
    uint32_t unit = 0;
    need(oo_unit_add(engine, model, tensors, &count, 1, 0, &unit, member, offsets), "unit");
    return unit;
}

static inline uint32_t add_row(struct oo_engine *engine, uint32_t model,
                               const struct oo_tensor *tensors, uint32_t count, uint32_t *members,
                               size_t *offsets) {
    static const uint32_t ones[] = {1, 1, 1, 1};
    uint32_t unit = 0;
    CHECK(count <= CHECK_COUNT(ones), "%u members", count);
    need(oo_unit_add(engine, model, tensors, ones, count, 0, &unit, members, offsets), "unit");
    return unit;
}

/* The tensor of unit i, whose master begins at `master`; coded ones, and there is room for twice
 * their bytes. Returns where the next one begins. */
static inline char *world_master(struct world *w, unsigned i, int coded, char *master,
                                 struct oo_tensor *tensor) {
    char *plain = w->plain;
    for (unsigned before = 0; before < i; before++)
        plain += w->bytes[before];
    *tensor = (struct oo_tensor){.host = master, .bytes = w->bytes[i]};
    w->master[i] = master;
    w->expected[i] = NULL;
    w->coded_bytes[i] = 0;
    if (!coded) {
        fill(master, w->bytes[i], i);
        return master + w->bytes[i];
    }
    w->expected[i] = plain;
    if (i == WORLD_CONSTANT)
        memset(plain, 0x3E, w->bytes[i]);
    else
        fill_weights(plain, w->bytes[i], i);
    tensor->coded_kind = OO_CODEC_INT8;
    tensor->coded_bytes = w->coded_bytes[i] =
        encode(OO_CODEC_INT8, plain, w->bytes[i], WORLD_CHUNK, master);
    return master + (tensor->coded_bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
}

/* As unit i's coded master is. */
static inline struct oo_tensor world_coded_master(const struct world *w, unsigned i) {
    return (struct oo_tensor){.host = w->master[i],
                              .bytes = w->bytes[i],
                              .coded_bytes = w->coded_bytes[i],
                              .coded_kind = OO_CODEC_INT8};
}

/* Everything but the engine; 0 when some call failed (possible only while faults are injected),
 * with its status in w->refused. */
static inline int world_attach(struct world *w, size_t arena_bytes, int trainable_from) {
#define WORLD_TRY(call)                                                                            \
    do {                                                                                           \
        w->refused = (call);                                                                       \
        if (w->refused != OO_OK)                                                                   \
            return 0;                                                                              \
    } while (0)
    WORLD_TRY(oo_host_create(world_host_bytes(w), &w->host));
    const enum oo_status locked = oo_engine_lock(w->engine, w->host, OO_ALL_BYTES);
    WORLD_TRY(locked == OO_E_LOCK_REFUSED ? OO_OK : locked);
    WORLD_TRY(oo_lease_add(w->engine, &w->lease));
    w->leased = 1;
    WORLD_TRY(oo_model_add(w->engine, &w->model));
    w->attached = 1;
    if (!w->stream)
        WORLD_TRY(oo_engine_compute_stream(w->engine, &w->stream));
    if (!w->arena)
        w->arena = w->device_arena ? device_memory(w, arena_bytes + OO_ALIGNMENT)
                                   : malloc(arena_bytes + OO_ALIGNMENT);
    WORLD_TRY(oo_segment_add(w->engine, w->lease, (uintptr_t)w->arena, arena_bytes + OO_ALIGNMENT,
                             w->stream));
    if (w->coded && !w->staging)
        w->staging = w->device_arena ? device_memory(w, WORLD_STAGING) : malloc(WORLD_STAGING);
    if (w->coded)
        WORLD_TRY(
            oo_staging_add(w->engine, w->lease, (uintptr_t)w->staging, WORLD_STAGING, w->stream));
    char *master = oo_host_address(w->host);
    if (w->coded && !w->plain)
        w->plain = malloc(w->total);
    for (unsigned i = 0; i < UNITS; i++) {
        struct oo_tensor tensor = {.host = master, .bytes = w->bytes[i]};
        const uint32_t one = 1;
        const int trainable = trainable_from >= 0 && (int)i >= trainable_from;
        size_t offset;
        if (w->coded) {
            master = world_master(w, i, i % 3 && !trainable, master, &tensor);
        } else {
            w->master[i] = master;
            fill(master, w->bytes[i], i);
            master += w->bytes[i];
        }
        WORLD_TRY(oo_unit_add(w->engine, w->model, &tensor, &one, 1, trainable, &w->unit[i],
                              &w->member[i], &offset));
    }
#undef WORLD_TRY
    return 1;
}

static int world_coded; /* what world_begin makes has coded masters */

static inline void world_begin(struct world *w) {
    memset(w, 0, sizeof *w);
    w->coded = world_coded;
    world_sizes(w);
    need(oo_engine_create(sim.path, 0, &w->engine), "create");
    CHECK(sim.cuDevicePrimaryCtxRetain(&w->context, 0) == 0, "no context");
}

static inline void world_open(struct world *w, size_t arena_bytes, int trainable_from) {
    world_begin(w);
    CHECK(world_attach(w, arena_bytes, trainable_from), "attach: %s", oo_error_message());
}

static inline void world_open_coded(struct world *w, size_t arena_bytes, int trainable_from) {
    world_coded = 1;
    world_open(w, arena_bytes, trainable_from);
    world_coded = 0;
}

/* A world as on a real device: the arena is device memory, whose history the race detector keeps;
 * kernels run on `stream`, or on one that the engine did not create. */
static inline void world_open_on_device(struct world *w, size_t arena_bytes) {
    world_begin(w);
    w->device_arena = 1;
    w->engine->driver.simAdopt = NULL;
    w->engine->driver.simDrop = NULL;
    w->stream = new_stream(w);
    CHECK(world_attach(w, arena_bytes, -1), "attach: %s", oo_error_message());
}

static inline void check_nothing_alive(const char *where) {
    struct sim_live live;
    sim.simGetLive(&live);
    CHECK(live.streams == 0 && live.events == 0 && live.modules == 0 && live.registrations == 0 &&
              live.host_alloc_bytes == 0 && live.device_bytes == 0 && live.adopted_bytes == 0,
          "%s: alive: %llu streams, %llu events, %llu modules, %llu registrations, %llu host, %llu "
          "device, %llu adopted bytes",
          where, (unsigned long long)live.streams, (unsigned long long)live.events,
          (unsigned long long)live.modules, (unsigned long long)live.registrations,
          (unsigned long long)live.host_alloc_bytes, (unsigned long long)live.device_bytes,
          (unsigned long long)live.adopted_bytes);
}

/* What a life whose release was made to fail leaves: the holds on the context, and with the last of
 * them all that belongs to it. */
static inline void release_leaked_contexts(void) {
    struct sim_live live;
    for (sim.simGetLive(&live); live.contexts > 0; sim.simGetLive(&live))
        sim.cuDevicePrimaryCtxRelease_v2(0);
    sim.simReportsClear();
}

/* A context whose pop was made to fail is still current: the next life shall begin without one. */
static inline void leave_contexts(void) {
    OOCUcontext current = NULL;
    while (sim.cuCtxGetCurrent(&current) == 0 && current)
        sim.cuCtxPopCurrent_v2(NULL);
}

/* The test's own hold on the context is the last one. */
static inline void release_context(const char *where) {
    struct sim_live live;
    CHECK(sim.cuDevicePrimaryCtxRelease_v2(0) == 0, "%s: the engine released the context twice",
          where);
    sim.simGetLive(&live);
    CHECK(live.contexts == 0, "%s: the engine still holds the context", where);
}

static inline void check_no_reports(const char *where) {
    const uint64_t n = sim.simReportCount();
    char text[2048] = "";
    if (n)
        sim.simReport(0, text, sizeof text);
    CHECK(n == 0, "%s: %llu reports, the first: %s", where, (unsigned long long)n, text);
}

/* The model goes, and what it was lent, each unless it has gone already. */
static inline enum oo_status world_remove(struct world *w) {
    enum oo_status status = w->leased ? oo_lease_remove(w->engine, w->lease) : OO_OK;
    if (status != OO_OK)
        return status;
    w->leased = 0;
    status = w->attached ? oo_model_remove(w->engine, w->model) : OO_OK;
    w->attached &= status != OO_OK;
    return status;
}

/* What was lent. */
static inline void world_free(struct world *w) {
    if (w->device_arena) {
        end_device_memory(w, w->arena);
        if (w->staging)
            end_device_memory(w, w->staging);
        end_stream(w, w->stream);
    } else {
        free(w->arena);
        free(w->staging);
    }
    free(w->plain);
    w->arena = w->staging = w->plain = NULL;
}

static inline void world_detach(struct world *w) {
    struct sim_live before, after;
    need(world_remove(w), "remove");
    sim.simGetLive(&before);
    const int locked = w->host->locked;
    need(oo_engine_unlock(w->engine, w->host), "unlock");
    sim.simGetLive(&after);
    CHECK(after.registrations + (locked ? 1 : 0) == before.registrations,
          "%llu registrations, %llu before", (unsigned long long)after.registrations,
          (unsigned long long)before.registrations);
    oo_host_destroy(w->host);
    world_free(w);
}

/* The engine goes, of which nothing is left. */
static inline void world_end(struct world *w, const char *where) {
    need(oo_engine_destroy(w->engine), "destroy");
    check_no_reports(where);
    check_nothing_alive(where);
    release_context(where);
    check_no_reports(where);
    CHECK(sim_reset(&sim) == 0, "%s: the simulator could not be reset", where);
}

static inline void world_close(struct world *w, const char *where) {
    world_detach(w);
    world_end(w, where);
}

/* The requests of the tests, by their parts. */
static inline enum oo_status acquire(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                     uint64_t stamp, enum oo_kind kind, int64_t task, int flags,
                                     struct oo_use *use) {
    const struct oo_request request = {
        .member = member, .kind = kind, .stream = stream, .stamp = stamp, .task = task};
    return oo_engine_acquire(engine, &request, flags, use);
}

static inline enum oo_status acquire_launched(struct oo_engine *engine, uint32_t member,
                                              uintptr_t stream, uint64_t stamp, enum oo_kind kind,
                                              int64_t task, double seconds, int flags,
                                              struct oo_use *use) {
    const struct oo_request request = {.member = member,
                                       .kind = kind,
                                       .stream = stream,
                                       .stamp = stamp,
                                       .task = task,
                                       .seconds = seconds};
    return oo_engine_acquire(engine, &request, flags | OO_LAUNCH, use);
}

static inline enum oo_status try_acquire(const struct world *w, unsigned i, int flags,
                                         struct oo_use *use) {
    return acquire(w->engine, w->member[i], w->stream, 0, OO_FORWARD, -1, flags, use);
}

/* A use in a forward; with a kernel of so many seconds; and its end, which returns what is copied
 * ahead. */
static inline struct oo_use use_acquire(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                        const char *what) {
    struct oo_use use = {0};
    need(acquire(engine, member, stream, 0, OO_FORWARD, -1, 0, &use), what);
    return use;
}

static inline struct oo_use use_begin(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                      double seconds, const char *what) {
    const struct oo_use use = use_acquire(engine, member, stream, what);
    need(oo_engine_launch(engine, member, stream, seconds), what);
    return use;
}

static inline struct oo_fetched use_end(struct oo_engine *engine, const struct oo_use *use,
                                        uintptr_t stream, const char *what) {
    struct oo_fetched fetched = {0};
    need(oo_engine_release(engine, use->ticket, stream, 0, &fetched), what);
    return fetched;
}

/* The device does all that it was given. */
static inline void finish(void) {
    double end_s;
    CHECK(sim.simFinish(&end_s) == 0, "not finished");
}

/* As if all copies had left the driver's queue: a call need not wait for room in it. */
static inline void empty_queue(struct oo_engine *engine) {
    engine->copies.left = engine->copies.sent;
    engine->copies.unlooked = 0;
}

/* One use: acquire, "compute" by comparing what is on the device with the master, release. */
static inline enum oo_status use_on(struct world *w, unsigned i, enum oo_kind kind, int64_t task,
                                    uint64_t stamp, uintptr_t stream) {
    struct oo_use use;
    struct oo_fetched fetched;
    enum oo_status status = acquire(w->engine, w->member[i], stream, stamp, kind, task, 0, &use);
    if (status != OO_OK)
        return status;
    const enum oo_status launched = oo_engine_launch(w->engine, w->member[i], stream, 20e-6);
    if (launched == OO_OK)
        CHECK(memcmp((const void *)use.address, w->expected[i] ? w->expected[i] : w->master[i],
                     w->bytes[i]) == 0,
              "unit %u has wrong bytes", i);
    status = oo_engine_release(w->engine, use.ticket, stream, 0, &fetched);
    return launched != OO_OK ? launched : status;
}

static inline enum oo_status use(struct world *w, unsigned i, enum oo_kind kind) {
    return use_on(w, i, kind, kind == OO_FORWARD ? -1 : 1, 0, w->stream);
}

/* Forward, then backward with the recompute of blocks of four. */
static inline enum oo_status step(struct world *w) {
    enum oo_status status = OO_OK;
    for (unsigned i = 0; i < UNITS && status == OO_OK; i++)
        status = use(w, i, OO_FORWARD);
    for (unsigned block = UNITS / 4; block-- > 0;) {
        for (unsigned i = 0; i < 4 && status == OO_OK; i++)
            status = use(w, 4 * block + i, OO_RECOMPUTE);
        for (unsigned i = 4; i-- > 0 && status == OO_OK;)
            status = use(w, 4 * block + i, OO_BACKWARD);
    }
    return status;
}

static inline void steps(struct world *w, unsigned count, const char *what) {
    while (count-- > 0)
        need(step(w), what);
}

/* Wait until the copy threads have nothing to do: their calls are not among the next ones. */
static inline void feeds_end(struct world *w) {
    oo__mutex_lock(w->engine->mutex);
    oo__feeds_await(w->engine);
    oo__mutex_unlock(w->engine->mutex);
}

static inline struct oo_stats stats_of(struct world *w) {
    struct oo_stats stats = {0};
    need(oo_engine_stats(w->engine, OO_ALL_MODELS, &stats), "stats");
    return stats;
}

/* Before the first case of a program. */
static inline void world_prepare(void) {
    sim = sim_open();
    sim_reset(&sim);
}

#endif
