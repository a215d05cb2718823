/* sim_internal.h - what the files of the simulator share.
 *
 *   simcuda.c   the cu* calls: arguments, contexts, handles
 *   schedule.c  streams, events, queued operations, what runs when, virtual time
 *   race.c      vector clocks, accesses, races
 *   memory.c    ranges: registered, host-allocated, device, adopted; capacity; labels; poison
 *   fault.c     counting and failing of calls, sticky errors
 *   disk.c      reads of files, by threads that block
 *   control.c   devices, switches, reports, statistics, trace, reset
 *
 * Two things are kept apart. *Execution* moves bytes, lazily, in an order that the schedule
 * chooses. *Virtual time* says when each operation would have started and ended; it follows from
 * the calls alone. An operation is forgotten when it has been executed and its end is in the past.
 * Happens-before, in turn, depends on neither: it is decided when a call is made.
 *
 * Locking: `sim.lock` protects everything here; functions with two underscores expect it held.
 */
#ifndef OO_SIM_INTERNAL_H
#define OO_SIM_INTERNAL_H

#include "sim_calls.h"
#include "sim_os.h"

#include <stddef.h>
#include <stdint.h>

enum { SIM_MAX_DEVICES = 8, SIM_QUEUE_DEPTH = 1024, SIM_MAX_REPORTS = 1000 };

/* ---- vector clocks (race.c) ---- */

/* Entry i is the number of the last operation of actor i that is ordered before; absent ones are 0.
 */
struct sim_clock {
    uint64_t *at;
    uint32_t width;
};

enum sim_actor_state { SIM_ACTOR_FREE = 0, SIM_ACTOR_LIVE, SIM_ACTOR_GONE };

/* A stream or a host thread. A number is used again only when no access of its last owner is left.
 */
struct sim_actor {
    enum sim_actor_state state;
    int is_host;
    uint64_t epoch; /* operations so far; never goes back, also across owners */
    struct sim_clock *clock;
    char name[48];
};

enum sim_access_kind {
    SIM_BY_H2D,
    SIM_BY_D2H,
    SIM_BY_KERNEL,
    SIM_BY_MEMSET,
    SIM_BY_HOST,
    SIM_BY_LENDER /* the owner of the memory before simAdopt and after simDrop */
};

void sim__clock_join(struct sim_clock *clock, const struct sim_clock *other);
void sim__clock_assign(struct sim_clock *clock, const struct sim_clock *other);
void sim__clock_set(struct sim_clock *clock, uint32_t actor, uint64_t epoch);
uint64_t sim__clock_at(const struct sim_clock *clock, uint32_t actor);
void sim__clock_free(struct sim_clock *clock);

uint32_t sim__actor_new(struct sim_clock *clock, const char *name);
void sim__actor_gone(uint32_t actor);
/* The clock of the calling host thread. */
struct sim_clock *sim__host_clock(void);
/* A lost context: what ran has ended and what was queued never will run, so that nothing can be in
 * flight from now on, whatever the host has waited for. */
void sim__host_knows_all(void);
/* Declare one access of `actor`, checked against all earlier ones. The actor's clock says what is
 * ordered before it. */
void sim__access(uint32_t actor, enum sim_access_kind kind, int is_write, uintptr_t lo,
                 uintptr_t hi);
/* The calling host thread reads or writes. */
void sim__host_access(enum sim_access_kind kind, int is_write, uintptr_t lo, uintptr_t hi);
/* Forget all accesses to bytes that cease to exist. */
void sim__access_forget(uintptr_t lo, uintptr_t hi);
void sim__race_reset(void);
uint64_t sim__race_nodes(void);

/* ---- operations, streams, events (schedule.c) ---- */

enum sim_op_kind { OP_H2D, OP_D2H, OP_KERNEL, OP_MEMSET, OP_HOSTFN, OP_RECORD, OP_WAIT };

struct sim_op;
struct sim_stream;

/* `to` runs after `from`. Owned by `to`; `from` is NULL once it has been executed and has ended. */
struct sim_edge {
    struct sim_op *from, *to;
    struct sim_edge *next_in, *next_out;
    int executed; /* `from` has been */
    int counted_exec, counted_time;
};

/* A launch of a kernel of csrc/kernels/decode.cu. */
struct sim_decode {
    const unsigned char *chunk;
    unsigned char *weights;
    size_t weight_bytes; /* 2 or 1 */
    uint32_t count, tail_words, low_bits, rotate;
    unsigned char palette[16];
};

struct sim_op {
    enum sim_op_kind kind;
    int executed, ended, running; /* running: a host function, on the driver's thread */
    int due;                      /* execute as soon as it is runnable */
    int submitted;                /* handed to the device: see SIM_LATE_SUBMISSION */
    int poisoned;
    uint32_t refs; /* events and waiters that still look at it */
    uint64_t seq, call;
    struct sim_stream *stream;
    struct sim_op *next;           /* in the stream, then in a free list */
    struct sim_op *next_waiting;   /* in the queue of a copy or compute engine */
    uint32_t wait_exec, wait_time; /* predecessors not yet executed, not yet ended */
    struct sim_edge *in, *out;
    size_t runnable_at; /* index in sim.runnable plus one; 0: not runnable */
    double ready_s, start_s, end_s, cost_s;
    /* Of a copy that has begun: what is left of its cost, at the moment when its rate, a share of
     * the link's, last changed; and when the upstream has passed it on. */
    double left_s, share, since_s, passed_s;
    uint32_t former_ends; /* moments of ends that have moved; each holds a reference */
    void *dst;
    const void *src;
    size_t bytes;
    unsigned int value;
    struct sim_decode *decode; /* a kernel that decodes weights; its own */
    OOCUresult fails;          /* what it does instead, when it runs */
    OOCUhostFn function;
    void *user_data;
};

enum sim_capture { SIM_CAPTURE_NONE = 0, SIM_CAPTURE_ACTIVE = 1, SIM_CAPTURE_INVALID = 2 };

struct sim_stream {
    uint64_t handle;
    int device;
    int blocking; /* ordered against the legacy stream */
    int priority; /* returned when asked; copies and kernels are served by arrival anyway */
    int is_legacy;
    int destroyed; /* the handle is gone; the object lives until it has drained */
    int held;      /* makes no progress: simHold */
    int counted;   /* created by the caller, not a default stream */
    enum sim_capture capture;
    uint32_t actor;
    struct sim_clock clock;
    uint32_t depth;
    struct sim_op *head, *tail; /* not yet executed and ended */
    struct sim_op *exec_head;   /* first one not yet executed */
    struct sim_stream *next;
};

struct sim_event {
    uint64_t handle;
    int device;
    unsigned int flags;
    int recorded, captured;
    struct sim_op *op; /* of the latest record */
    struct sim_clock clock;
};

/* One resource of a device. It serves in the order in which operations became ready: one at a time,
 * or kernels of several streams, see SIM_CONCURRENT_KERNELS. */
enum { SIM_AT_ONCE = 4 };
struct sim_engine {
    struct sim_op *busy[SIM_AT_ONCE];
    struct sim_op *first, *last;
};
enum sim_engine_kind { ENGINE_H2D, ENGINE_D2H, ENGINE_COMPUTE, ENGINE_COUNT };

struct sim_stream *sim__stream_new(int device, unsigned int flags, const char *name, int counted);
void sim__stream_destroy(struct sim_stream *stream);
/* Default streams included; NULL for a handle that is unknown or destroyed. */
struct sim_stream *sim__stream(OOCUstream handle);
struct sim_event *sim__event(OOCUevent handle);

/* Make room in the stream's queue (may wait for its oldest operation), then queue an operation that
 * is ordered as the call order demands. `*out` may be filled in until sim__submit. */
OOCUresult sim__op_new(struct sim_stream *stream, enum sim_op_kind kind, struct sim_op **out);
void sim__op_after(struct sim_op *op, struct sim_op *predecessor);
/* Declare a write at the stream's tail by work that is not queued here. */
void sim__stream_writes(struct sim_stream *stream, enum sim_access_kind kind, uintptr_t lo,
                        uintptr_t hi);
void sim__submit(struct sim_op *op);
/* Hand over what a batch still holds of the operation's stream up to it, and what that waits for.
 */
void sim__flush(struct sim_op *op);
/* Wait until `op` has been executed and has ended; the host's virtual clock moves to its end. */
OOCUresult sim__wait(struct sim_op *op);
/* Whether the host may see `op` as done, now. */
int sim__done(struct sim_op *op);
/* Execute what is ordered before the tail of `stream`, and nothing else. */
OOCUresult sim__run_before(struct sim_stream *stream);
/* Execute all queued operations that touch these bytes. */
/* Bytes of the chunk, and of the weights. */
size_t sim__decode_reads(const struct sim_decode *work);
size_t sim__decode_writes(const struct sim_decode *work);
void sim__decode(const struct sim_decode *work);
void sim__run_touching(uintptr_t lo, uintptr_t hi);
OOCUresult sim__wait_all(int device);
void sim__discard_all(void);
void sim__time_to(double seconds);
/* Back to virtual time 0; nothing may be queued. */
void sim__clock_reset(void);
void sim__op_ref(struct sim_op *op);
void sim__op_unref(struct sim_op *op);
void sim__event_clear(struct sim_event *event);
void sim__hold(struct sim_stream *stream, int on);
double sim__copy_cost(int device, size_t bytes);

/* Let time pass until it is `limit_s`, or the next operation begins or ends before that. 0: there
 * is neither. */
int sim__time_towards(double limit_s);

/* ---- reads of files (disk.c) ---- */

/* The clock has moved, or all that was queued is gone: let threads go on whose wait has ended. */
void sim__readers_wake(void);
void sim__disk_reset(void);

/* ---- memory (memory.c) ---- */

enum sim_memory { MEM_REGISTERED, MEM_HOST_ALLOC, MEM_DEVICE, MEM_ADOPTED };

struct sim_range {
    uintptr_t lo, hi;
    enum sim_memory kind;
    int device;
    unsigned int flags;
    void *block;             /* to free */
    uint64_t lender;         /* of adopted memory: the stream whose it is before and after */
    struct sim_clock copies; /* the last copy of each stream that touched it */
};

/* What [lo, hi) is for a copy: */
enum sim_place { PLACE_PAGEABLE, PLACE_PINNED, PLACE_DEVICE, PLACE_INVALID };
enum sim_place sim__place(uintptr_t lo, size_t bytes, struct sim_range **range);
struct sim_range *sim__range_at(uintptr_t address);
/* What sim__place found, and the pieces after it that begin below `hi`; NULL: nothing. */
void sim__copy_uses(struct sim_range *range, uintptr_t hi, uint32_t actor, uint64_t epoch);
OOCUresult sim__range_add(uintptr_t lo, size_t bytes, enum sim_memory kind, int device,
                          unsigned int flags, void *block);
/* Refused, with a report, while copies that the host has not waited for touch it. */
OOCUresult sim__range_remove(struct sim_range *range, const char *call);
OOCUresult sim__allocate(enum sim_memory kind, size_t bytes, int device, unsigned int flags,
                         void **out);
void sim__memory_end_context(int device);
void sim__poison(void *ptr, size_t bytes);
/* "bytes 0..4096 of \"unit 12\"", or the range itself. */
void sim__describe(uintptr_t lo, uintptr_t hi, char *text, size_t capacity);
void sim__memory_reset(void);

/* ---- faults (fault.c) ---- */

/* Every call begins here: counts it, and returns what it shall fail with. */
OOCUresult sim__enter(enum sim_call call);
/* An operation runs, and perhaps fails while doing so: the error shows at a later call, and sticks.
 */
void sim__async(enum sim_op_kind kind, OOCUresult fails);
int sim__is_sticky(OOCUresult result);
const char *sim__call_name(enum sim_call call);
void sim__fault_reset(void);
int sim__refuse_registration(void);
/* Whether the quota of page-locked memory has room for so many bytes. */
int sim__may_lock(size_t bytes);
/* Whether the calling thread runs a host function. */
int sim__in_host_function(void);
void sim__set_in_host_function(int on);

/* ---- everything else (control.c) ---- */

struct sim_object {
    void *object;
    uint32_t generation;
    uint32_t next_free;
    int kind;
};
enum sim_object_kind {
    OBJECT_CONTEXT = 1,
    OBJECT_STREAM,
    OBJECT_EVENT,
    OBJECT_MODULE,
    OBJECT_FUNCTION,
    OBJECT_GRAPH
};

uint64_t sim__handle_new(enum sim_object_kind kind, void *object);
void *sim__handle_get(enum sim_object_kind kind, uint64_t handle);
void sim__handle_end(uint64_t handle);
/* End the events and modules of a device: sim__object_end for each of them. */
void sim__handles_end(int device);
void sim__object_end(int kind, uint64_t handle, void *object, int device);
void sim__event_end(struct sim_event *event);

/* A report. The same text up to `key` is reported once. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void sim__report(uint64_t key, const char *format, ...);
int sim__reported(uint64_t key);
void sim__seed_text(char *text, size_t capacity);
void sim__trace(const struct sim_op *op);
void sim__trace_row(const struct sim_trace_row *row);
void sim__boot(void);
OOCUresult sim__current_device(int *device);
void *sim__grow(void *array, size_t *capacity, size_t needed, size_t size);

struct sim_primary {
    uint64_t handle;
    uint64_t refs;
};

struct sim_state {
    sim_lock lock;
    sim_cond changed; /* a host function has begun or ended */
    int booted, initialised;
    OOCUresult boot_error;
    int n_devices;
    struct sim_device devices[SIM_MAX_DEVICES];
    struct sim_primary primary[SIM_MAX_DEVICES];
    uint64_t legacy[SIM_MAX_DEVICES]; /* handles of the legacy streams */
    /* What blocking streams had done that are destroyed: the legacy stream waits for it, whether or
     * not it has run by now. */
    struct sim_clock gone[SIM_MAX_DEVICES];
    int schedule;
    uint64_t seed, random;
    int switches[8];
    unsigned patience_ms; /* how long a wait bears with a host function that does not return */

    uint64_t call; /* number of the current call */
    enum sim_call current;
    double now_s;      /* the host's virtual clock */
    OOCUresult sticky; /* the error that killed the context */

    struct sim_stream *streams;
    uint64_t streams_made;
    size_t n_queued; /* not yet executed */
    struct sim_op **runnable;
    size_t n_runnable, runnable_capacity;
    struct sim_engine engines[SIM_MAX_DEVICES][ENGINE_COUNT];
    /* When each upstream has passed on what was given to it, by the engine's kind. */
    double upstream_free_s[SIM_MAX_DEVICES + 1][ENGINE_COUNT];
    struct sim_stats stats;
    struct sim_live live;
    uint64_t device_used[SIM_MAX_DEVICES]; /* bytes, device and adopted memory */
    struct sim_actor *actors;
    uint32_t n_actors;
    size_t actors_capacity;
    int host_actor_ready;
    struct sim_clock host_clock;
};

extern struct sim_state sim;

/* Begin and end of every exported call. */
#define SIM_ENTER(call)                                                                            \
    sim_os_lock(&sim.lock);                                                                        \
    OOCUresult result = sim__enter(call);                                                          \
    if (result != OOCU_SUCCESS)                                                                    \
    goto out
#define SIM_RETURN(value)                                                                          \
    do {                                                                                           \
        result = (value);                                                                          \
        goto out;                                                                                  \
    } while (0)
#define SIM_LEAVE                                                                                  \
    out:                                                                                           \
    sim_os_unlock(&sim.lock);                                                                      \
    return result

#endif
