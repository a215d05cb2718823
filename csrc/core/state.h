/* state.h - what an engine holds. Every file of the core reads and writes it, so it declares no
 * function: those are in the header of the file that defines them. One mutex protects all of it
 * (oo__enter). */
#ifndef OO_STATE_H
#define OO_STATE_H

#include "../base/status.h"
#include "../driver/driver.h"
#include "codec.h"
#include "host.h"
#include "oracle_offload.h"
#include "plan.h"

/* ---- events and spans: timing.c ---- */

/* What an event is for. Those that only order carry no time: the driver is quicker with them. */
enum oo_event_kind { OO_ORDERS, OO_TIMED };

/* A driver event; it has one owner, or is in the free list of its kind. */
struct oo_event {
    OOCUevent handle;
    enum oo_event_kind kind;
    struct oo_event *next; /* in the free list */
};

/* Work between two recorded events, not yet measured. */
struct oo_span {
    enum oo_trace_kind kind;
    uint32_t unit;
    uint32_t model;
    uint64_t bytes;
    uint64_t sent; /* of a copy, the parts up to its end: see oo_copies; 0: not known */
    struct oo_event *begin, *end;
    int traced; /* a row of the timeline is wanted */
};

/* One span in so many is measured, unless a timeline is being recorded: each takes three calls. */
enum { OO_SAMPLED_ONE_IN = 16 };
/* Spans pending at once; the events for so many are always there. When the host runs further ahead
 * of the device, fewer are measured. */
enum { OO_SPANS = 256, OO_SPANS_TRACED = 1 << 18 };
enum { OO_VISITS_READ = 64 }; /* after so many, spans that have ended are read */

struct oo_spans {
    struct oo_span *pending; /* ring of `capacity`, a power of two */
    uint64_t capacity;
    uint64_t head, tail;             /* pending[head..tail) modulo capacity */
    uint32_t seen[OO_TRACE_KINDS];   /* that could have been measured */
    struct oo_event *free_events[2]; /* by kind */
    int tracing;
    struct oo_event *origin;
    struct oo_trace_row *rows;
    size_t n_rows, row_capacity;
};

/* ---- a locked ring that pageable bytes pass through: ring.c ---- */

enum { OO_RING_PIECES = 8 };
#if !defined(OO_RING_PIECE_BYTES)
#define OO_RING_PIECE_BYTES ((size_t)2 << 20) /* the fuzz target builds with less */
#endif
static const size_t oo__ring_piece_bytes = OO_RING_PIECE_BYTES;

struct oo_ring {
    char *base;         /* OO_RING_PIECES pieces of page-locked memory; NULL until needed */
    size_t piece_bytes; /* of a ring that is there */
    int refused;        /* the system had nothing left to lock: it is not asked again by a copy */
    struct oo_event *busy[OO_RING_PIECES]; /* the copy that last used the piece */
    /* Upwards, where copy threads use it: */
    uint8_t lost[OO_RING_PIECES];  /* that copy's event could not be recorded */
    uint8_t taken[OO_RING_PIECES]; /* by a copy thread */
    unsigned next;
};

/* ---- threads that copy what is not locked: feed.c ---- */

/* Of those that copy memory, no more than processors; of those that read files, which wait for a
 * disk and not for a processor, as many as pieces of the ring. */
enum { OO_FEED_THREADS = 4, OO_READ_THREADS = OO_RING_PIECES };
/* Of the latter, so many at a time copy what memory has: its pieces would take all of the ring, for
 * as long as the link takes for them, and the disk would rest. */
enum { OO_NEAR_THREADS = 2 };

/* A driver call of a copy thread that failed, or its read of a file; `call` is NULL where none has.
 */
struct oo_failure {
    const char *call;
    OOCUresult result;
    const struct oo_disk *disk; /* of a read */
    int error;                  /* the system's reason, or one of disk.c */
};

/* A unit's copy that the copy threads make. */
struct oo_feed {
    const struct oo_part *parts; /* the unit's, which do not change meanwhile */
    uint32_t n_parts;
    uintptr_t address;
    const struct oo_event *ready; /* the unit's */
    struct oo_event *begin, *end; /* NULL where it is not measured */
    int open;                     /* not known to have arrived */
    int is_decoded;               /* some of its parts are, by a kernel */
    int is_near;                  /* memory keeps all of it that is in files */
    /* Under the feeder's mutex while it runs: */
    struct oo_feed *next; /* in the queue */
    int running, queued;  /* until its last piece has been copied; until that has been taken */
    int stopped, arrives; /* `ready` will never be recorded; it is */
    uint32_t part, active;
    size_t offset; /* in the part: of the piece that comes next */
    struct oo_failure failure;
    uint64_t bytes, unlocked_bytes, copies, waits, recoveries, decodes, decoded_bytes;
    uint64_t disk_bytes, disk_nanoseconds;
    uint64_t nanoseconds; /* by the host's clock */
    int begun;
};

struct oo_feeder {
    struct oo_mutex *mutex; /* taken after the engine's; protects what follows */
    struct oo_feed *first;  /* of the queue */
    uint32_t n_running, n_active;
    uint32_t n_near;             /* pieces under way of feeds that are near */
    uint32_t n_begun[2];         /* feeds, of those that are near: [1] */
    int measures[2];             /* the one that has begun is measured */
    int told;                    /* of each piece: who waits for a feed */
    uint32_t n_wanted;           /* threads: those whose number is higher end */
    struct oo_failure loss;      /* of the context, as a copy thread met it */
    uint64_t since, nanoseconds; /* some thread has been copying since; and did, not yet counted */
    /* Under the engine's mutex: */
    struct oo_feeding {
        struct oo_engine *engine;
        uint32_t number;
        struct oo_thread *thread;
    } threads[OO_READ_THREADS];
    uint32_t n_threads;
    int reads; /* some of what it brings is in files */
};

/* ---- coded weights on their way: staging.c ---- */

/* Room for one chunk. The feeder's mutex says whose it is: in the row of free ones, or taken. */
struct oo_staging_piece {
    uintptr_t address;
    size_t bytes;
    struct oo_event *arrived, *decoded; /* the chunk that it holds; the one that it held */
    uint8_t lost;                       /* the end of that decode could not be recorded */
    struct oo_staging_piece *next;      /* in the row of free ones */
};

/* Device memory that chunks pass through, of a lease. */
struct oo_staging {
    uint32_t lease;
    uintptr_t address; /* as it was lent: the pieces begin at the next aligned place */
    size_t piece_bytes;
    struct oo_staging_piece pieces[OO_STAGING_PIECES];
    struct oo_staging *next;
};

struct oo_decoder {
    OOCUstream stream; /* NULL until there is staging memory; so are the kernels and `tail` */
    OOCUfunction decode_bf16, decode_bytes;
    struct oo_event *tail;
    int loose; /* uses of free bytes may be ordered before this stream alone: oo__decodes_settle */
    struct oo_staging *lent;             /* under both mutexes */
    struct oo_staging_piece *free_first; /* under the feeder's: used longest ago */
};

/* ---- what is managed, and where: masters.c, lease.c, model.c ---- */

/* Host memory that is page-locked for all contexts of one driver, once for all engines that read
 * it. It ends with the context it was made under, which is held until then. */
struct oo_registration {
    const void *library; /* the driver's */
    size_t bytes;        /* of the memory, from its first on; whole pages */
    OOCUdevice device;
    const struct oo_engine *maker; /* holds that context, as long as it is here */
    int context_held;              /* by the registration itself, once its maker has let go */
    uint32_t engines;              /* that read the memory by it */
    struct oo_registration *next;  /* another driver's */
};

/* Host memory that this engine knows. */
struct oo_known {
    struct oo_host *host;
    struct oo_engine *engine;
    struct oo_registration *registration; /* NULL: no byte of it is locked for this engine */
    struct oo_known *next;                /* of the engine */
    struct oo_known *next_of_host;
};

struct oo_member_tensor {
    const char *host;
    size_t bytes;
    size_t offset;      /* in the unit, on the device */
    size_t coded_bytes; /* of the master, if it is coded; else 0 */
    enum oo_codec_kind coded_kind;
};

struct oo_member {
    uint32_t unit;
    uint32_t n_tensors;
    struct oo_member_tensor *tensors;
    uint64_t stamp;       /* of the master that was copied */
    uint64_t fingerprint; /* likewise */
    uint64_t glance;      /* likewise, of few samples; 0: none was taken */
    uint64_t sweep;       /* the sweep that last checked the fingerprint */
    int64_t task;
    uint8_t stamp_known, removed;
};

/* A contiguous host range that travels as one copy: masters as they are, or of a coded one what
 * travels of a chunk. */
struct oo_part {
    const char *host;
    size_t bytes;
    size_t offset;                 /* in the unit, on the device */
    const struct oo_known *memory; /* NULL: the engine does not know it */
    struct oo_kept *kept;          /* of a file: where in memory it is kept once read; or NULL */
    int locked;
    struct oo_codec_header header; /* of the chunk; mode 0: there is none */
};

/* The last use of a unit's bytes on one stream. */
struct oo_last_use {
    OOCUstream stream;
    struct oo_event *event;
    uint8_t lost; /* the event could not be recorded: only a synchronise shows when the use ends */
};

/* A use that lasts, while a timeline is recorded: a row ends on the stream that it began on. */
struct oo_begun {
    OOCUstream stream;
    struct oo_event *event;
};

enum {
    OO_STREAMS = 4, /* streams that use one unit at a time without further bookkeeping */
    OO_LASTING = 3, /* handles of streams that outlive the engine: oo__stream_lasts */
    OO_USES = 16    /* uses a unit can have while the driver refuses to order them */
};

struct oo_unit {
    uint32_t model;
    uint32_t generation; /* of its device copy: counts evictions and refusals */
    uint32_t n_members, n_parts;
    struct oo_part *parts;
    uint32_t *members;
    size_t host_bytes, device_bytes; /* what travels, and what that becomes */
    uint8_t trainable, removed, stale;
    uint8_t leaving;          /* to be dropped as soon as no use of it is left */
    uint8_t rewritten;        /* its masters are, by the device: oo_unit_rewrite */
    uint8_t is_rewritten_too; /* so is its copy, which was used by this ticket: */
    uint8_t rewrite_lasts;    /* that use goes on */
    uint64_t rewrite;
    uint8_t is_fed;            /* by the copy threads: not all of its parts are locked */
    uint8_t on_disk;           /* some of its parts are in a file, as far as no one writes them */
    uint8_t is_coded, decodes; /* some of its parts are chunks; some of those need a kernel */
    uint8_t only_decoded;      /* nothing else writes to its slot */
    struct oo_feed *feed;      /* NULL until the first one */
    struct oo_event *ready;    /* its copy has arrived */
    uint8_t awaited;           /* `ready` is, by some stream */
    OOCUstream waited[OO_LASTING]; /* streams that last, and are ordered after `ready` already */
    uint32_t n_waited;
    struct oo_last_use uses[OO_USES];
    uint32_t n_uses;
    struct oo_begun begun[OO_STREAMS];
    uint32_t n_begun;
    uint64_t copied_in; /* the sweep that its device copy was begun in */
    uint64_t copy;      /* the last one that reads its masters directly: see oo_copies */
    uint32_t n_kept;    /* of its uses: those that oo_engine_end ends */
    uint32_t n_mapped;  /* likewise, oo_engine_unmap */
    const void *keeper; /* the thread that began the latest of these */
    /* Of waits for its copies, as in struct oo_stats: */
    uint64_t timed_waits, stalls;
    double stall_seconds;
};

/* From the begin of a forward to the next visit, where that is measured. */
struct oo_pace {
    uint32_t unit;
    OOCUstream stream;
    struct oo_event *begin; /* NULL: it is not */
};

/* The last direct reads of masters, one entry for each stream. */
struct oo_reads {
    struct oo_last_use last[OO_USES]; /* beyond OO_STREAMS while the driver refuses to wait */
    uint32_t count;
};

/* What is known of the copies that read masters directly. Their numbers rise in the order of the
 * h2d stream, which is the order in which they end. */
struct oo_copies {
    uint64_t queued; /* the last one's */
    uint64_t ended;  /* all up to this one have */
    /* Of the stream that waited for one last, of those that last: what is queued on it next comes
     * after all up to this one. */
    OOCUstream stream;
    uint64_t awaited;
    /* Parts that callers have put on the h2d stream, and of those how many are known to have left
     * it, by copies that were measured. Those of copy threads are not counted: what is not locked
     * passes the ring, and they wait on the host before a piece of it is used again, so that few
     * are queued at once. A unit of which some is locked adds the parts of that. */
    uint64_t sent, left;
    uint32_t unlooked; /* uses that do not look how many have left: see oo__queue_look */
};

/* So many parts on the h2d stream, and the driver's queue may be full. It takes about 1,000 entries
 * of a stream, and a part, with what is waited for and recorded for it, is five, or some more; the
 * rest is for what copy threads queue. */
enum { OO_QUEUED_PARTS = 128 };
enum { OO_USES_UNLOOKED = 15 }; /* after one that has looked for room, and found less than half */

/* Segments that go back together: struct oo_segment names it. */
struct oo_lease {
    uint32_t id;
    struct oo_lease *next;
};

struct oo_model {
    uint8_t removed;
    struct oo_stats stats;
};

/* ---- bytes that leave the device for a while: trip.c ---- */

/* One copy, out or back; its record is free where there is no event. */
struct oo_trip {
    uint32_t generation; /* counts the trips that had this record */
    uint32_t next_free;  /* in the row of free ones */
    uint8_t is_back;
    uint8_t queued; /* its copy may be */
    uint8_t joined; /* its device memory is the caller's again */
    char *host;
    OOCUdeviceptr device;
    size_t bytes;
    OOCUdeviceptr lent; /* what the simulated device has until this trip ends: the trip's bytes */
    size_t lent_bytes;  /* or, handed on, those of another over them; 0: it has them otherwise */
    uint64_t left;      /* of one back: the ticket of the trip out */
    uint32_t backs;     /* of one out: those that have not ended */
    OOCUstream stream;  /* that torch allocated the device memory on */
    uint64_t awaited;   /* of one out: the copy that came before what it brings: see oo_copies */
    struct oo_event *arrived;
};

struct oo_trips {
    struct oo_trip *all;
    uint32_t count, capacity;
    uint32_t first_free; /* `count`: none */
};

/* ---- the journal: journal.c ---- */

struct oo_journal {
    struct oo_entry *entries; /* ring of `capacity`; NULL while no journal is kept */
    size_t capacity;
    uint64_t written; /* entry n is at n modulo capacity */
};

/* ---- all of it ---- */

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
    const char *sys; /* OO_SYS, but for tests */
    int numa_node;   /* that the device is nearest to; -1: not known */

    enum oo_status dead; /* OO_OK, or OO_E_DEAD */
    int death_reported;  /* to some caller */
    char dead_message[512], dead_call[48], dead_name[64];
    int dead_code;
    uint32_t n_leaked; /* driver objects that could not be given back, and the error of the first */
    struct oo_error first_leak;

    struct oo_plan *plan;
    struct oo_unit *units; /* by the plan's unit ids */
    uint32_t n_units, unit_capacity;
    struct oo_member *members;
    uint32_t n_members, member_capacity;
    struct oo_model *models;
    uint32_t n_models, model_capacity;
    struct oo_reads reads;
    struct oo_copies copies;
    struct oo_lease *leases;
    uint32_t leases_made;
    struct oo_known *known; /* host memory that masters may be in */
    uint32_t n_known;

    uint64_t sweep;
    int in_task, verify;
    int held;               /* trainable masters may be rewritten, by whatever: oo_engine_hold */
    int rests;              /* but their copies are here still: oo_engine_rest */
    int submits_late;       /* the driver collects work; a query hands it to the device */
    double patience_s;      /* how long a call waits for the uses of other threads to end */
    double kept_patience_s; /* likewise, for those that outlast a call */

    OOCUmodule module; /* the embedded kernels, loaded on first use */
    OOCUfunction spin;
    struct oo_decoder decoder;
    struct oo_ring up, down;
    struct oo_feeder feeder;
    OOCUdeviceptr unfinished; /* lent still, for a copy that failed and could not be waited for */
    uint8_t unwaited;         /* such a copy may be under way, of memory that is lent or not */
    struct oo_trips trips;
    struct oo_spans spans;
    struct oo_pace pace;
    struct oo_journal journal;
    struct oo_stats stats; /* the engine's own: what belongs to no model */
};

#endif
