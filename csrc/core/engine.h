/* engine.h - the engine's private state, shared by engine.c (use), model.c (what is managed),
 * ring.c (staging) and stats.c (events, measurement). One mutex protects all of it. */
#ifndef OO_ENGINE_H
#define OO_ENGINE_H

#include "../base/os.h"
#include "../base/status.h"
#include "../driver/driver.h"
#include "host.h"
#include "oracle_offload.h"
#include "plan.h"

/* ---- stats.c: events and spans ---- */

/* A driver event, shared by a unit and the spans measured with it. */
struct oo_event {
    OOCUevent handle;
    uint32_t references;
    struct oo_event *next; /* in the free list */
};

/* Work between two recorded events, not yet measured. */
struct oo_span {
    enum oo_trace_kind kind;
    uint32_t unit;
    uint32_t model;
    uint64_t bytes;
    struct oo_event *begin, *end;
    int traced; /* a row of the timeline is wanted */
};

/* Spans pending at once. Of a host that runs further ahead of its device only some spans are
 * measured, unless a timeline is being recorded. */
enum { OO_SPANS = 128, OO_SPANS_TRACED = 1 << 18 };

struct oo_spans {
    struct oo_span *pending; /* ring of `capacity`, a power of two */
    uint64_t capacity;
    uint64_t head, tail; /* pending[head..tail) modulo capacity */
    struct oo_event *free_events;
    int tracing;
    struct oo_event *origin;
    struct oo_trace_row *rows;
    size_t n_rows, row_capacity;
};

/* ---- ring.c: a locked ring that pageable bytes pass through ---- */

enum { OO_RING_PIECES = 4 };
#if !defined(OO_RING_PIECE_BYTES)
#define OO_RING_PIECE_BYTES ((size_t)4 << 20) /* the fuzz target builds with less */
#endif
static const size_t oo__ring_piece_bytes = OO_RING_PIECE_BYTES;

struct oo_ring {
    char *base; /* OO_RING_PIECES pieces of page-locked memory; NULL until needed */
    struct oo_event *busy[OO_RING_PIECES]; /* the copy that last used the piece */
    uint8_t lost[OO_RING_PIECES];          /* upwards: that copy's event could not be recorded */
    unsigned next;
};

/* ---- what is managed ---- */

struct oo_member_tensor {
    const char *host;
    size_t bytes;
    size_t offset; /* in the unit, on the device */
};

struct oo_member {
    uint32_t unit;
    uint32_t n_tensors;
    struct oo_member_tensor *tensors;
    uint64_t stamp;       /* of the master that was copied */
    uint64_t fingerprint; /* likewise */
    uint64_t sweep;       /* the sweep that last checked the fingerprint */
    int64_t task;
    uint8_t stamp_known, removed;
};

/* A contiguous host range that travels as one copy. */
struct oo_part {
    const char *host;
    size_t bytes;
    size_t offset;
    struct oo_host *memory; /* NULL: the engine does not know it */
};

/* The last use of a unit's bytes on one stream. */
struct oo_last_use {
    OOCUstream stream;
    struct oo_event *event;
    uint8_t lost; /* the event could not be recorded: only a synchronise tells when the use ends */
};

/* A use that lasts, while a timeline is recorded: a row ends on the stream that it began on. */
struct oo_begun {
    OOCUstream stream;
    struct oo_event *event;
};

enum {
    OO_STREAMS = 4, /* streams that use one unit at a time without further bookkeeping */
    OO_USES = 16    /* uses a unit can have while the driver refuses to order them */
};

struct oo_unit {
    uint32_t model;
    uint32_t generation; /* of its device copy: counts evictions and refusals */
    uint32_t n_members, n_parts;
    struct oo_part *parts;
    uint32_t *members;
    size_t host_bytes, device_bytes;
    uint8_t trainable, removed, stale;
    uint8_t leaving;               /* to be dropped as soon as nobody computes with it */
    struct oo_event *ready;        /* its copy has arrived */
    OOCUstream waited[OO_STREAMS]; /* streams already ordered after `ready` */
    uint32_t n_waited;
    struct oo_last_use uses[OO_USES];
    uint32_t n_uses;
    struct oo_begun begun[OO_STREAMS];
    uint32_t n_begun;
};

struct oo_model {
    uint8_t removed;
    struct oo_stats stats;
};

struct oo_engine {
    struct oo_driver driver;
    struct oo_mutex *mutex;
    struct oo_fork_guard *guard;
    OOCUdevice device;
    OOCUcontext context;
    int context_pushed; /* by the call that holds the mutex */
    int usable;         /* in this call: alive, and its context is current */
    OOCUstream h2d, d2h, compute;
    char device_name[128], pci_id[32];

    enum oo_status dead; /* OO_OK, or OO_E_DEAD */
    int death_told;      /* to a caller that it was refused for that */
    char dead_message[512], dead_call[48], dead_name[64];
    int dead_code;
    uint32_t n_leaked; /* driver objects that could not be given back, and what befell the first */
    struct oo_error first_leak;

    struct oo_plan *plan;
    struct oo_unit *units; /* by the plan's unit ids */
    uint32_t n_units, unit_capacity;
    struct oo_member *members;
    uint32_t n_members, member_capacity;
    struct oo_model *models;
    uint32_t n_models, model_capacity;
    struct oo_host **hosts;
    uint32_t n_hosts, host_capacity;

    uint64_t sweep;
    int in_task, held, verify;
    double patience_s; /* how long a call waits for the uses of other threads to end */

    OOCUmodule module; /* the embedded kernels, loaded on first use */
    OOCUfunction spin;
    struct oo_ring up, down;
    OOCUdeviceptr unfinished; /* gradient whose download failed and could not be waited for;
                                 simulated driver */
    struct oo_spans spans;
    struct oo_stats stats; /* the engine's own: what belongs to no model */
};

/* ---- engine.c ---- */

/* Begin and end a call: mutex, pid, context. `enter` fails with nothing to undo. The first two
 * flags are for calls that have something to do all the same, and ask engine->usable before they
 * drive; the third is for those that never drive. */
enum { OO__EVEN_DEAD = 256, OO__EVEN_WITHOUT_CONTEXT = 512, OO__WITHOUT_DRIVER = 1024 };
enum oo_status oo__enter(struct oo_engine *engine, int flags);
void oo__leave(struct oo_engine *engine);
/* Status of a driver call; a sticky result kills the engine. */
enum oo_status oo__check(struct oo_engine *engine, const char *call, OOCUresult result);
/* The same for a call whose failure is no failure of the caller's; the thread's error stays. */
enum oo_status oo__note(struct oo_engine *engine, const char *call, OOCUresult result);
/* The same for one that gives something back, which is not to be tried again. */
void oo__note_leak(struct oo_engine *engine, const char *call, OOCUresult result);
#define OO_GIVE_BACK(engine, call, ...)                                                            \
    oo__note_leak(engine, #call, (engine)->driver.call(__VA_ARGS__))
#define OO_DRIVE(engine, call, ...) oo__check(engine, #call, (engine)->driver.call(__VA_ARGS__))

/* Make the h2d stream wait for every use of the unit's bytes. */
enum oo_status oo__order_after_uses(struct oo_engine *engine, struct oo_unit *unit);
/* The unit's device copy is gone; its uses are ordered before the h2d stream already. */
void oo__forget_copy(struct oo_engine *engine, uint32_t unit);
/* Uses that began under a timeline get no row. */
void oo__rows_forget(struct oo_engine *engine, struct oo_unit *unit);
/* Order after uses, forget the copy, and leave the arena. */
enum oo_status oo__drop(struct oo_engine *engine, uint32_t unit);
enum oo_status oo__finish_download(struct oo_engine *engine);
/* Wait on the host until the stream has ended; counted. */
enum oo_status oo__synchronize(struct oo_engine *engine, OOCUstream stream, int recovering);

/* ---- model.c ---- */

struct oo_host *oo__known_memory(const struct oo_engine *engine, const void *address, size_t bytes);
void oo__free_models(struct oo_engine *engine);
size_t oo__align(size_t bytes);
/* Not where the caller vouches for the masters' addresses only at an acquire, nor while trainable
 * masters may be rewritten. */
int oo__may_fetch_ahead(const struct oo_engine *engine, const struct oo_unit *unit);

/* ---- ring.c ---- */

enum oo_status oo__ring_prepare(struct oo_engine *engine, struct oo_ring *ring);
enum oo_status oo__ring_upload(struct oo_engine *engine, OOCUdeviceptr target, const char *source,
                               size_t bytes);
enum oo_status oo__ring_download(struct oo_engine *engine, char *target, OOCUdeviceptr source,
                                 size_t bytes);
void oo__ring_free(struct oo_engine *engine, struct oo_ring *ring);

/* ---- declare.c ---- */

/* Name bytes or a stream in the simulator's reports: "unit 12", "h2d". `unit` may be OO_NO_UNIT. */
void oo__label(struct oo_engine *engine, const void *memory, size_t bytes, const char *what,
               uint32_t unit);
void oo__label_stream(struct oo_engine *engine, OOCUstream stream, const char *name);
/* The host reads or writes these bytes now. */
enum oo_status oo__host_access(struct oo_engine *engine, const void *memory, size_t bytes,
                               int is_write);

/* ---- kernels.c ---- */

void oo__kernels_free(struct oo_engine *engine);

/* ---- stats.c ---- */

/* Create events for a steady state that creates none. */
enum oo_status oo__events_reserve(struct oo_engine *engine, uint32_t count);
/* An event with one reference, not recorded. */
enum oo_status oo__event_take(struct oo_engine *engine, struct oo_event **event);
void oo__event_give(struct oo_engine *engine, struct oo_event *event); /* NULL is allowed */
struct oo_event *oo__event_share(struct oo_event *event);
/* Queue a span for measurement; takes its own references. */
void oo__span_add(struct oo_engine *engine, enum oo_trace_kind kind, uint32_t unit, uint32_t model,
                  uint64_t bytes, struct oo_event *begin, struct oo_event *end);
void oo__spans_harvest(struct oo_engine *engine);
void oo__spans_free(struct oo_engine *engine);
uint64_t oo__fingerprint(const void *memory, size_t bytes, int whole);

#endif
