/* oracle_offload.h - the engine's public C interface; this file can be read alone as its manual.
 *
 * An engine serves one device. Host memory (`oo_host`) holds master copies of weights; `units` are
 * the contiguous pieces of it that travel; `segments` are device memory the caller lends as a cache
 * (the arena). A layer (`member` of a unit) is used like this, on any thread:
 *
 *     oo_engine_acquire(engine, member, stream, stamp, kind, task, flags, &use);
 *     ... queue work on `stream` that reads device memory at use.address + the tensor's offset ...
 *     oo_engine_release(engine, use.ticket, stream, flags, &fetched);
 *
 * Between the two calls the unit cannot be evicted. `acquire` makes `stream` wait for the copy,
 * never the host; `release` marks the last use on `stream` and starts copies of what will be needed
 * next. The address is valid for work queued before `release` only: acquire again for the next use.
 *
 * Every function that can fail returns an oo_status and, unless OO_OK or OO_WOULD_BLOCK, leaves a
 * message for this thread in oo_error_message(). A failed call changes nothing the caller can see,
 * and can be repeated. All functions are thread-safe: one mutex per engine.
 */
#ifndef ORACLE_OFFLOAD_H
#define ORACLE_OFFLOAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ---- */

enum oo_status {
    OO_OK = 0,
    OO_WOULD_BLOCK,      /* only with OO_NONBLOCKING: repeat without it */
    OO_LEAKED,           /* it is done, but something could not be given back: see the message */
    OO_E_ARGUMENT,       /* a value the caller passed */
    OO_E_STATE,          /* right value, wrong time: in use, closed, unknown by now */
    OO_E_MEMORY,         /* host memory for bookkeeping or masters */
    OO_E_NO_ROOM,        /* nothing in the arena can make place for the unit */
    OO_E_LOCK_REFUSED,   /* the system does not page-lock more memory */
    OO_E_TICKET,         /* a ticket of an earlier generation, or released twice */
    OO_E_FORKED,         /* a forked child called an engine of its parent */
    OO_E_CAPTURE,        /* the stream is capturing a CUDA graph */
    OO_E_DEAD,           /* an earlier, unrecoverable driver error; the message names it */
    OO_E_DRIVER,         /* a driver call failed */
    OO_E_DRIVER_MISSING, /* no driver library */
    OO_E_DRIVER_STUB,    /* the toolkit's link-time stub instead of a driver */
    OO_E_DRIVER_OLD,     /* below CUDA 12.0 */
    OO_E_NO_DEVICE       /* a driver without the asked device */
};

/* "OO_E_NO_ROOM" */
const char *oo_status_name(enum oo_status status);
/* What the last failed call of this thread said; valid until the thread's next call. */
const char *oo_error_message(void);
/* The driver call behind the thread's last OO_E_DRIVER*, OO_E_LOCK_REFUSED or OO_E_DEAD: its name,
 * CUresult and the CUresult's name; empty strings and 0 where no call was involved. */
void oo_error_driver(const char **call, int *code, const char **name);

/* ---- host memory ---- */

struct oo_host;

/* `bytes` of zeroed, page-aligned memory, not yet touched. */
enum oo_status oo_host_create(size_t bytes, struct oo_host **out);
/* Unlocks if need be (waiting for copies) and frees. Where unlocking fails the memory is leaked,
 * and this is unlocking's error. NULL is allowed. */
enum oo_status oo_host_destroy(struct oo_host *host);
void *oo_host_address(const struct oo_host *host);
size_t oo_host_bytes(const struct oo_host *host);
int oo_host_locked(const struct oo_host *host);
/* Copy `bytes` from `source` to `offset`, touching fresh pages from several threads. */
enum oo_status oo_host_fill(struct oo_host *host, size_t offset, const void *source, size_t bytes);

/* ---- engines ---- */

#define OO_ALIGNMENT   ((size_t)256) /* of every tensor, in host and in device memory */
#define OO_ALL_MODELS  UINT32_MAX
#define OO_MAX_FETCHED 8 /* copies that one acquire or release enqueues at most */

enum oo_kind {
    OO_FORWARD = 0,   /* a forward outside any graph task */
    OO_RECOMPUTE = 1, /* a forward inside a graph task: a checkpoint recomputes */
    OO_BACKWARD = 2
};
enum oo_flags { OO_NONBLOCKING = 1 };

struct oo_engine;

/* A tensor of a member: where its master is, and its size. */
struct oo_tensor {
    const void *host;
    size_t bytes;
};

/* Units whose copies a call has enqueued. The stamps of all their members should be given, in one
 * oo_engine_stamp, before anything else runs that could rewrite the masters. */
struct oo_fetched {
    uint32_t count;
    int more; /* further copies are worth starting, and may block: see oo_engine_prefetch */
    uint32_t units[OO_MAX_FETCHED];
};

struct oo_stamp {
    uint32_t member;
    uint64_t stamp; /* any number that changes when the member's master is rewritten */
};

struct oo_use {
    uint64_t ticket;
    uintptr_t address;
    struct oo_fetched fetched;
};

/* `library` NULL: the system's CUDA driver. Retains the device's primary context. */
enum oo_status oo_engine_create(const char *library, int device, struct oo_engine **out);
/* OO_E_STATE while models are attached or memory is locked. OO_LEAKED: the engine is gone, but the
 * driver refused to destroy some of what it held, or had lost it, which no call was told yet. NULL
 * is allowed. */
enum oo_status oo_engine_destroy(struct oo_engine *engine);
int oo_engine_simulated(const struct oo_engine *engine);
int oo_engine_driver_version(const struct oo_engine *engine);
const char *oo_engine_device_name(const struct oo_engine *engine);
const char *oo_engine_pci_id(const struct oo_engine *engine);
/* A non-blocking stream for callers that have none; created on first use. */
enum oo_status oo_engine_compute_stream(struct oo_engine *engine, uintptr_t *stream);
enum oo_status oo_engine_mem_info(struct oo_engine *engine, size_t *free_bytes,
                                  size_t *total_bytes);

/* Page-lock host memory and make it known to the engine. OO_E_LOCK_REFUSED where the system
 * refuses: the memory is known all the same, and its units go through a small locked ring. `lock` 0
 * asks for that from the start. */
enum oo_status oo_engine_lock(struct oo_engine *engine, struct oo_host *host, int lock);
/* Wait for all copies from the memory, then forget it; no unit may still live in it. */
enum oo_status oo_engine_unlock(struct oo_engine *engine, struct oo_host *host);

enum oo_status oo_model_add(struct oo_engine *engine, uint32_t *model);
/* Forget the model's units and segments once all copies have ended (a host wait). The streams the
 * segments were allocated on wait for every use of them. OO_E_STATE while a unit is acquired. */
enum oo_status oo_model_remove(struct oo_engine *engine, uint32_t model);
/* Lend device memory, allocated on `stream`, to the arena until the model is removed. */
enum oo_status oo_segment_add(struct oo_engine *engine, uint32_t model, uintptr_t address,
                              size_t bytes, uintptr_t stream);

/* One unit whose members are `n_members` lists of tensors: member i has n_tensors[i] of them, all
 * lists one after the other in `tensors`. `members` receives n_members ids, `offsets` one device
 * offset per tensor. Tensors that lie in one host memory at offsets congruent to the device layout
 * (each at the next multiple of OO_ALIGNMENT) travel as one copy. */
enum oo_status oo_unit_add(struct oo_engine *engine, uint32_t model,
                           const struct oo_tensor *tensors, const uint32_t *n_tensors,
                           uint32_t n_members, int trainable, uint32_t *unit, uint32_t *members,
                           size_t *offsets);
/* The member's tensors live elsewhere now. It gets a unit of its own. Memory that the engine does
 * not know is copied through the ring, and only by an acquire of this member: the caller vouches
 * for the addresses at that moment alone. */
enum oo_status oo_member_move(struct oo_engine *engine, uint32_t member,
                              const struct oo_tensor *tensors, uint32_t n_tensors, uint32_t *unit,
                              size_t *offsets);
/* The member is managed no more. Its bytes travel on with its unit as long as that has others, so
 * that its memory is in use until they have left too. OO_E_STATE while the unit is acquired. */
enum oo_status oo_member_remove(struct oo_engine *engine, uint32_t member);

/* Whether an optimizer may rewrite the unit's masters (see oo_engine_hold). */
enum oo_status oo_unit_set_trainable(struct oo_engine *engine, uint32_t unit, int trainable);

/* See the top of this file. `stamp`: as in struct oo_stamp. `task`:
 * id of the running graph task, -1 for none. A hit is refused (and copied anew) when the stamp or a
 * sampled fingerprint of the master differs from what was copied. While other threads compute with
 * what was copied, the call waits for their releases (OO_WOULD_BLOCK if it must not); OO_E_STATE if
 * this thread holds a use itself, or one has lasted for a minute. Release on the same thread. */
enum oo_status oo_engine_acquire(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                 uint64_t stamp, enum oo_kind kind, int64_t task, int flags,
                                 struct oo_use *use);
/* Both in one: acquire, and declare the kernel that reads the member for `seconds`
 * (oo_engine_launch). On the simulated driver copies arrive only when a kernel that needs them is
 * launched, so the address of this call can never be read too early. A launch that fails ends the
 * use. */
enum oo_status oo_engine_acquire_launched(struct oo_engine *engine, uint32_t member,
                                          uintptr_t stream, uint64_t stamp, enum oo_kind kind,
                                          int64_t task, double seconds, int flags,
                                          struct oo_use *use);
enum oo_status oo_engine_release(struct oo_engine *engine, uint64_t ticket, uintptr_t stream,
                                 int flags, struct oo_fetched *fetched);
/* Start the copies that `more` spoke of. */
enum oo_status oo_engine_prefetch(struct oo_engine *engine, struct oo_fetched *fetched);
/* The members that are attached are stamped even where OO_E_STATE says that another is not. */
enum oo_status oo_engine_stamp(struct oo_engine *engine, const struct oo_stamp *stamps,
                               uint32_t count);
/* Declare a kernel that reads the acquired member for `seconds`; does nothing on a real driver. */
enum oo_status oo_engine_launch(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                double seconds);
/* Copy device bytes that `stream` writes to host memory; returns when they have arrived. */
enum oo_status oo_engine_download(struct oo_engine *engine, void *target, uintptr_t source,
                                  size_t bytes, uintptr_t stream);

/* Keep `stream` busy for a time (at most ten seconds), so that tests can make copies race a kernel.
 */
enum oo_status oo_engine_spin(struct oo_engine *engine, uintptr_t stream, uint64_t nanoseconds);

/* Trainable masters may be rewritten from now on: their copies are dropped, none is prefetched. */
enum oo_status oo_engine_hold(struct oo_engine *engine);
/* They are stable again. A forward acquire outside a graph task says so too. */
enum oo_status oo_engine_resume(struct oo_engine *engine);
/* All device copies of the model (or OO_ALL_MODELS) are stale: every later acquire copies anew. */
enum oo_status oo_engine_refresh(struct oo_engine *engine, uint32_t model);
/* Hash whole masters instead of samples, at every hit. */
enum oo_status oo_engine_set_verify(struct oo_engine *engine, int on);

/* ---- what happened ---- */

/* Counted where it happens: bytes at the copy call, seconds from events. */
struct oo_stats {
    uint64_t managed_bytes, locked_bytes, pageable_bytes;
    uint64_t arena_bytes, resident_bytes, peak_resident_bytes;
    uint64_t largest_unit_bytes, learned_block_bytes;
    uint64_t h2d_bytes, h2d_copies, h2d_timed_bytes;
    uint64_t d2h_bytes, d2h_copies, d2h_timed_bytes;
    double h2d_seconds, d2h_seconds;
    uint64_t acquires, hits, late, stale, prefetches, evictions;
    uint64_t prefetch_failures; /* given up without harm: the unit is copied when it is asked for */
    uint64_t lost_uses; /* whose end could not be marked: who overwrites the unit waits for them */
    uint64_t stalls;    /* waits of a compute stream for a copy longer than 10 microseconds */
    double stall_seconds;
    uint64_t host_waits, recoveries, allocations;
    uint64_t units, resident_units;
};

/* One consistent snapshot. Host, arena and recovery figures are the engine's even for one model. */
enum oo_status oo_engine_stats(struct oo_engine *engine, uint32_t model, struct oo_stats *out);

enum oo_trace_kind { OO_TRACE_COMPUTE = 0, OO_TRACE_H2D = 1, OO_TRACE_D2H = 2, OO_TRACE_STALL = 3 };
struct oo_trace_row {
    enum oo_trace_kind kind;
    uint32_t unit;
    double start_s, end_s; /* since oo_trace_start, by events on the device */
    uint64_t bytes;
};
/* Record a timeline; creates events while it runs. */
enum oo_status oo_trace_start(struct oo_engine *engine);
/* End it, wait for the device, and hand over the rows (free them with oo_trace_free). */
enum oo_status oo_trace_stop(struct oo_engine *engine, struct oo_trace_row **rows, size_t *count);
void oo_trace_free(struct oo_trace_row *rows);

struct oo_resident {
    uint32_t unit;
    uint32_t pins;
    uintptr_t address;
    size_t bytes;
};
/* The arena's contents by address: up to `capacity` rows; `count` receives how many there are. */
enum oo_status oo_engine_residents(struct oo_engine *engine, struct oo_resident *rows,
                                   size_t capacity, size_t *count);

/* Version (12040 = 12.4) and number of devices of a driver, without an engine. */
enum oo_status oo_driver_probe(const char *library, int *version, int *devices);

#ifdef __cplusplus
}
#endif

#endif
