/* oracle_offload.h - the engine's public C interface; this file can be read alone as its manual.
 *
 * A life, in the order of the sections below:
 *
 *     oo_engine_create          one engine for each device
 *     oo_host_create, _fill     host memory, and the weights in it: the masters
 *     oo_engine_lock            page-lock that memory, so that the device reads it directly
 *     oo_lease_add              device memory for a cache of the weights, the arena,
 *     oo_segment_add            piece by piece;
 *     oo_staging_add            and some that coded weights pass through
 *     oo_model_add              a model,
 *     oo_unit_add               and what of it travels together
 *     a step, any number of times, for each layer in turn, on any thread:
 *         oo_engine_acquire(engine, &request, flags, &use);
 *         ... queue work on request.stream that reads device memory at use.address + the tensor's
 *             offset ...
 *         oo_engine_release(engine, use.ticket, request.stream, flags, &fetched);
 *     oo_lease_remove, oo_model_remove, oo_engine_unlock, oo_host_destroy, oo_engine_destroy
 *
 * Between acquire and release the unit cannot be evicted. `acquire` makes the stream wait for the
 * copy, and the host only where masters are not page-locked; `release` marks the last use on the
 * stream and starts copies of what will be needed next. The address is valid for work queued before
 * `release` only: acquire again for the next use.
 *
 * Words:
 *
 *     master      a weight in host memory, from which the device's copies are made
 *     member      what one layer asks for: its tensors
 *     unit        what travels together: the tensors of one member or several
 *     arena       the device memory that all units share; what is in it is evicted for what comes
 *     segment     a contiguous piece of the arena; a unit is in one
 *     lease       the segments that go back together
 *     coded       of a master: in fewer bytes, without loss; kernels decode it on the device
 *     staging     device memory that coded weights pass through on their way into the arena
 *     use         the time between an acquire and its release; its ticket names it
 *     kept        of a use: not ended, so that its copy stays until later work has been queued
 *     lent        of device memory: in the place of a master while a use lasts
 *     mapping     a use of masters in host memory, by kernels that read some of their bytes over
 *                 the link
 *     stamp       a number that changes when a master is rewritten
 *     graph task  a run of autograd's backward; its id distinguishes two of them
 *
 * Every function that can fail returns an oo_status and, unless OO_OK or OO_WOULD_BLOCK, leaves a
 * message for this thread in oo_error_message(). A failed call changes nothing the caller can see,
 * and can be repeated. Streams are CUDA stream handles, sizes are bytes. All functions are
 * thread-safe: one mutex per engine. Bits of `flags` that this version does not know are refused
 * with OO_E_ARGUMENT.
 */
#ifndef ORACLE_OFFLOAD_H
#define ORACLE_OFFLOAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ---- */

/* Of this header. The interface may change with every minor version below 1.0. */
#define OO_VERSION_MAJOR 0
#define OO_VERSION_MINOR 1
#define OO_VERSION_PATCH 0
/* "0.1.0": of the engine that was linked. */
const char *oo_version(void);

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
    OO_E_NO_DEVICE,      /* a driver without the asked device */
    OO_E_FILE            /* a file of masters cannot be read, or is not what it was */
};

/* "OO_E_NO_ROOM" */
const char *oo_status_name(enum oo_status status);
/* What the last failed call of this thread said; valid until the thread's next call. */
const char *oo_error_message(void);
/* The driver call behind the thread's last OO_E_DRIVER*, OO_E_LOCK_REFUSED or OO_E_DEAD: its name,
 * CUresult and the CUresult's name; empty strings and 0 where no call was involved. */
void oo_error_driver(const char **call, int *code, const char **name);

/* ---- engines ---- */

struct oo_engine;

/* Version (12040 = 12.4) and number of devices of a driver, without an engine. */
enum oo_status oo_driver_probe(const char *library, int *version, int *devices);

/* `library` NULL: the system's CUDA driver. Retains the device's primary context. */
enum oo_status oo_engine_create(const char *library, int device, struct oo_engine **out);
/* OO_E_STATE while there are models, leases or host memory. OO_LEAKED: the engine is gone, but the
 * driver refused to destroy some of what it held, or had lost it, which no call has reported yet.
 * NULL is allowed. */
enum oo_status oo_engine_destroy(struct oo_engine *engine);
int oo_engine_driver_version(const struct oo_engine *engine);
const char *oo_engine_device_name(const struct oo_engine *engine);
const char *oo_engine_pci_id(const struct oo_engine *engine);
/* The NUMA node that the device is nearest to; -1 where the system does not say. */
int oo_engine_numa_node(const struct oo_engine *engine);
/* Leave the device's context current on this thread, so that its calls need not make it so: for a
 * thread that computes without a runtime which has done that. */
enum oo_status oo_engine_make_current(struct oo_engine *engine);
enum oo_status oo_engine_mem_info(struct oo_engine *engine, size_t *free_bytes,
                                  size_t *total_bytes);

/* ---- host memory ---- */

struct oo_host;

/* `bytes` of zeroed, page-aligned memory, not yet touched. */
enum oo_status oo_host_create(size_t bytes, struct oo_host **out);
/* Memory for the processes of one user to share: zeros, without a name, gone with the last that has
 * it open or mapped, killed or not. Returns what it goes by in this process, a descriptor of a file
 * (on Windows a handle), or -1 with errno. */
int oo_section_create(size_t bytes);
/* What the memory that goes by `theirs` in another process goes by in this one; -1 with errno. */
int oo_section_take(unsigned process, int theirs);
void oo_section_close(int section);
/* `bytes` of a file, or of a section, from `begin` on, a multiple of a page (on Windows of 64 KiB):
 * the same memory in every process that has them so. OO_E_STATE with the system's reason where it
 * does not map them. */
enum oo_status oo_host_create_shared(size_t bytes, int file, uint64_t begin, struct oo_host **out);
/* All of a file, whose masters stay there: its pages are a private mapping, and what travels is
 * read from the file each time, past the system's cache where that can be. A page that is written
 * is memory from then on, of this process alone. `file` is a descriptor of it that is open already.
 * The memory cannot be locked: let an engine know it by oo_engine_lock of 0 bytes. OO_E_FILE where
 * the file cannot be read, or is another than `file`'s. Where it is written later, or cannot be
 * read, the same comes of each acquire of what is in it; what has its name does not matter. On
 * Windows always. */
enum oo_status oo_host_create_file(const char *path, int file, struct oo_host **out);
/* Whether bytes of the memory are what they were when it was created, but for what this process has
 * written: OO_E_FILE where they are of a file that was written since. Ask after they were read. */
enum oo_status oo_host_check(const struct oo_host *host, size_t offset, size_t bytes);
/* How many bytes of files have been read into the memory so. */
size_t oo_host_arrived(const struct oo_host *room);
/* Let the memory be written by this process, or read alone; the device reads it either way. Memory
 * that can only be read can no longer be locked, so lock it before. */
enum oo_status oo_host_protect(struct oo_host *host, int writable);
/* Unlocks for every engine that knows the memory (waiting for copies) and frees. Where unlocking
 * fails the memory is leaked, and this is unlocking's error. NULL is allowed. */
enum oo_status oo_host_destroy(struct oo_host *host);
void *oo_host_address(const struct oo_host *host);
size_t oo_host_bytes(const struct oo_host *host);
int oo_host_locked(const struct oo_host *host); /* some of it, by any engine */
int oo_host_known(const struct oo_host *host);  /* to any engine */
/* Have its memory on a NUMA node, as far as the threads that fill it may run there; -1: on any. */
void oo_host_prefer_node(struct oo_host *host, int node);
/* Copy `bytes` from `source` to `offset`, touching fresh pages from several threads. */
enum oo_status oo_host_fill(struct oo_host *host, size_t offset, const void *source, size_t bytes);

#define OO_ALL_BYTES SIZE_MAX /* all of its bytes */

/* Make host memory known to the engine, and page-lock its first `bytes`, rounded up to whole pages;
 * no tensor should cross that boundary. Any number of engines may know the memory: it is locked
 * once for all of a driver, as far as the first of them asked, and ordinary memory again when the
 * last of them unlocks it. OO_E_LOCK_REFUSED where the system refuses: the memory is known all the
 * same. What is not locked is copied by threads of the engine's own, through a small locked
 * ring. */
enum oo_status oo_engine_lock(struct oo_engine *engine, struct oo_host *host, size_t bytes);
/* Whether the engine reads and writes all of these bytes directly, as they are page-locked. */
enum oo_status oo_engine_is_locked(struct oo_engine *engine, const void *memory, size_t bytes,
                                   int *locked);
/* How many more bytes the system would page-lock now, but no more than `host` has: found by locking
 * parts of it, each half as large as the one before, which are let go again at once. Less than the
 * truth by up to OO_LOCKABLE_STEP. OO_E_STATE where some of the memory is locked. */
#define OO_LOCKABLE_STEP ((size_t)256 << 10)
enum oo_status oo_engine_lockable(struct oo_engine *engine, struct oo_host *host, size_t *bytes);
/* Have two rings of about `bytes` of page-locked memory, one each way, which what is not locked
 * passes through. It is to be asked before masters are locked: later there may be nothing left to
 * lock. OO_E_LOCK_REFUSED where the system refuses: a ring that should have grown is as it was, and
 * one that should have shrunk is gone. Without a ring, pageable memory is copied as it is, which
 * the copy threads wait for. 0 gives the rings back, unless memory that is not locked needs them.
 */
enum oo_status oo_engine_reserve_rings(struct oo_engine *engine, size_t bytes);
/* Bytes of a file, by the address where its memory shows them, and their place in other memory. */
struct oo_keeping {
    const void *masters;
    size_t bytes, place;
};
/* Keep these bytes of files in `room`, in place of all that was kept there, once they have been
 * read: what travels of them later comes from there, directly where the engine has locked it. It
 * ends when the engine knows their file no more; until then, or until nothing is kept there
 * (`count` 0), `room` must stay. What is kept in locked memory may be copied from there still:
 * before other bytes take its place, unlock it. No other engine may know these files. Bytes of no
 * file that the engine knows, or that are kept elsewhere: OO_E_ARGUMENT, and nothing is kept in
 * `room`. */
enum oo_status oo_engine_keep_in(struct oo_engine *engine, struct oo_host *room,
                                 const struct oo_keeping *kept, size_t count);
/* Wait for all copies of this engine from or to the memory, then forget it; no unit may still live
 * in it. */
enum oo_status oo_engine_unlock(struct oo_engine *engine, struct oo_host *host);

/* ---- the arena ---- */

#define OO_ALIGNMENT ((size_t)256) /* of every tensor, in host and in device memory */

enum oo_status oo_lease_add(struct oo_engine *engine, uint32_t *lease);
/* Take the lease's segments out of the arena, once all copies have ended (a host wait). The streams
 * the segments were allocated on wait for every use of them. OO_E_STATE while a unit in them is
 * acquired. */
enum oo_status oo_lease_remove(struct oo_engine *engine, uint32_t lease);
/* Lend device memory, allocated on `stream`, to the arena until the lease is removed. */
enum oo_status oo_segment_add(struct oo_engine *engine, uint32_t lease, uintptr_t address,
                              size_t bytes, uintptr_t stream);

/* Lend device memory, allocated on `stream`, that coded weights pass through on their way into the
 * arena, until the lease is removed. It is cut into OO_STAGING_PIECES; each must have room for the
 * largest chunk that comes, which OO_STAGING_BYTES have for any. The kernels that decode are
 * loaded: OO_E_STATE where this build has none. Units with coded tensors need some such memory, of
 * any lease. */
#define OO_STAGING_PIECES 4
#define OO_STAGING_BYTES  (OO_STAGING_PIECES * ((size_t)8 << 20))
enum oo_status oo_staging_add(struct oo_engine *engine, uint32_t lease, uintptr_t address,
                              size_t bytes, uintptr_t stream);

/* ---- models, units, members ---- */

#define OO_ALL_MODELS UINT32_MAX

/* What coded weights are, once they are decoded. */
enum oo_codec_kind {
    OO_CODEC_NONE = 0, /* the tensor is not coded */
    OO_CODEC_BF16 = 1, /* two bytes, eight bits of exponent */
    OO_CODEC_FP8 = 2,  /* one byte, the sign first: e4m3, e5m2 */
    OO_CODEC_INT8 = 3, /* one byte, two's complement */
};

/* A tensor of a member: where its master is, and its size on the device.
 *
 * The master is the tensor's bytes as they are, or, where `coded_bytes` is not 0, so many bytes of
 * coded chunks (csrc/core/codec.h), one after the other, each beginning at a multiple of
 * OO_ALIGNMENT from `host` on, all but the last of a multiple of 1,024 weights. Those travel as
 * they are and are decoded on the device. No optimizer may rewrite them. */
struct oo_tensor {
    const void *host;
    size_t bytes;
    size_t coded_bytes;
    enum oo_codec_kind coded_kind;
};

enum oo_status oo_model_add(struct oo_engine *engine, uint32_t *model);
/* Forget the model's units once all copies have ended (a host wait). OO_E_STATE while one of them
 * is acquired. */
enum oo_status oo_model_remove(struct oo_engine *engine, uint32_t model);

/* One unit whose members are `n_members` lists of tensors: member i has n_tensors[i] of them, all
 * lists one after the other in `tensors`. `members` receives n_members ids, `offsets` one device
 * offset per tensor. Tensors that are in one host memory at offsets congruent to the device layout
 * (each at the next multiple of OO_ALIGNMENT) travel as one copy. */
enum oo_status oo_unit_add(struct oo_engine *engine, uint32_t model,
                           const struct oo_tensor *tensors, const uint32_t *n_tensors,
                           uint32_t n_members, int trainable, uint32_t *unit, uint32_t *members,
                           size_t *offsets);
/* Whether an optimizer may rewrite the unit's masters (see oo_engine_hold). */
enum oo_status oo_unit_set_trainable(struct oo_engine *engine, uint32_t unit, int trainable);
/* The member's tensors live elsewhere now. It gets a unit of its own. Memory that the engine does
 * not know is copied through the ring, and only by an acquire of this member: the caller vouches
 * for the addresses at that moment alone. */
enum oo_status oo_member_move(struct oo_engine *engine, uint32_t member,
                              const struct oo_tensor *tensors, uint32_t n_tensors, uint32_t *unit,
                              size_t *offsets);
/* The member is no longer managed. Its bytes travel on with its unit as long as that has others, so
 * that its memory is in use until they have left too. OO_E_STATE while the unit is acquired. */
enum oo_status oo_member_remove(struct oo_engine *engine, uint32_t member);

/* ---- coded masters: see struct oo_tensor ---- */

/* Bytes that `out` must have room for while `count` weights are encoded. */
size_t oo_coded_room(enum oo_codec_kind kind, size_t count);
/* Encode weights in chunks of 4 Mi, by up to `threads` threads; `bytes` becomes what they take.
 * Each block is decoded again and compared before it counts: OO_E_STATE if it differs (bad
 * memory). */
enum oo_status oo_coded_encode(enum oo_codec_kind kind, const void *weights, size_t count,
                               unsigned threads, void *out, size_t *bytes);
/* Decode exactly `count` weights, compare them with `weights`, or compare the checksums alone.
 * Checksums are compared in any case: OO_E_ARGUMENT, with the place, where anything differs. */
enum oo_status oo_coded_decode(enum oo_codec_kind kind, const void *coded, size_t bytes,
                               unsigned threads, void *weights, size_t count);
enum oo_status oo_coded_compare(enum oo_codec_kind kind, const void *coded, size_t bytes,
                                unsigned threads, const void *weights, size_t count);
enum oo_status oo_coded_check(enum oo_codec_kind kind, const void *coded, size_t bytes,
                              unsigned threads, size_t count);
/* A hash of all bytes. */
uint64_t oo_fingerprint(const void *memory, size_t bytes);
/* Whether anything was written to a private, copy-on-write mapping of a file: 1, 0, or -1 where the
 * system does not say. */
int oo_pages_written(const void *memory, size_t bytes);
/* Let mapped pages show a file from `begin` on, a multiple of a page, as such a mapping does. It
 * needs no open file afterwards. 0, or -1 with errno. On Windows only all of what shows a section
 * already, which must not be read meanwhile, and which may be gone on -1. */
int oo_pages_show(void *pages, size_t bytes, int file, uint64_t begin);
/* Copy the pages of such a mapping, where they are, to memory that is no file's; they must not be
 * written meanwhile. 0, or -1 where there is no memory or the system cannot: all is as it was. */
int oo_pages_own(void *memory, size_t bytes);

/* ---- use ---- */

enum oo_kind {
    OO_FORWARD = 0,   /* a forward outside any graph task */
    OO_RECOMPUTE = 1, /* a forward inside a graph task: a checkpoint recomputes */
    OO_BACKWARD = 2,
    OO_RECORDED = 3 /* as OO_FORWARD, under grad mode: of training, and not a sample */
};

enum oo_flags {
    OO_NONBLOCKING = 1, /* acquire, release, distrust, keep, map, stamp: OO_WOULD_BLOCK rather than
                           wait on the host, as a copy does that the driver's queue has no room
                           for */
    OO_LAUNCH = 2       /* acquire: declare the kernel that reads the member, too */
};

/* What a layer asks for. */
struct oo_request {
    uint32_t member;
    enum oo_kind kind;
    uintptr_t stream; /* that the work will be queued on; it lives until the use has ended */
    uint64_t stamp;   /* of the member's masters now */
    int64_t task;     /* the running graph task, -1 for none */
    double seconds;   /* with OO_LAUNCH: as in oo_engine_launch */
};

#define OO_MAX_FETCHED 8 /* copies that one acquire or release enqueues at most */

/* Units whose copies a call has enqueued. The stamps of all their members should be given, in one
 * oo_engine_stamp, before anything else runs that could rewrite the masters. */
struct oo_fetched {
    uint32_t count;
    int more; /* further copies are worth starting: see oo_engine_prefetch. After a release with
               * OO_NONBLOCKING of fewer than OO_MAX_FETCHED, the next would wait on the host. */
    uint32_t units[OO_MAX_FETCHED];
};

struct oo_use {
    uint64_t ticket;
    uintptr_t address;
    struct oo_fetched fetched;
};

struct oo_stamp {
    uint32_t member;
    uint64_t stamp; /* any number that changes when the member's master is rewritten */
};

/* See the top of this file. A hit is refused (and copied again) when the stamp or a sampled
 * fingerprint of the master differs from what was copied. While other threads compute with what was
 * copied, the call waits for their releases (OO_WOULD_BLOCK if it must not); OO_E_STATE if this
 * thread holds a use itself, or one has lasted for a minute. Release on the same thread.
 *
 * With OO_LAUNCH the kernel that reads the member is declared by the same call (oo_engine_launch).
 * On the simulated driver copies arrive only when a kernel that needs them is launched, so the
 * address can then never be read too early. A launch that fails ends the use. */
enum oo_status oo_engine_acquire(struct oo_engine *engine, const struct oo_request *request,
                                 int flags, struct oo_use *use);
enum oo_status oo_engine_release(struct oo_engine *engine, uint64_t ticket, uintptr_t stream,
                                 int flags, struct oo_fetched *fetched);
/* Copies of these units will not be stamped, as they should have been: they are made again when
 * they are asked for. */
enum oo_status oo_engine_distrust(struct oo_engine *engine, const struct oo_fetched *fetched,
                                  int flags);
/* Start the copies that `more` spoke of. */
enum oo_status oo_engine_prefetch(struct oo_engine *engine, struct oo_fetched *fetched);
/* Begin one more use of a member that this thread has acquired, on the same copy: one that outlasts
 * the call of the layer, and keeps the unit where it is until oo_engine_end. Of `use` nothing is
 * fetched. */
enum oo_status oo_engine_keep(struct oo_engine *engine, uint32_t member, int flags,
                              struct oo_use *use);
/* The work that uses what was kept has been queued on `stream`. Any thread may say so, whatever it
 * holds; nothing is prefetched. The engine lives as long as there is such a use: its model cannot
 * be removed. */
enum oo_status oo_engine_end(struct oo_engine *engine, uint64_t ticket, uintptr_t stream);
/* Begin a use of a member's masters in host memory: work queued on request->stream reads what it
 * needs of them over the link, and nothing is copied. `address` is that of the first tensor as the
 * device sees it, 0 where some of the tensors are not page-locked or the device cannot address
 * them; then nothing has begun. Of the request, `kind`, `stamp` and `task` are not asked for; a
 * simulated device computes for `seconds`. Until oo_engine_unmap the member is in use. */
enum oo_status oo_engine_map(struct oo_engine *engine, const struct oo_request *request, int flags,
                             uintptr_t *address);
/* The work that reads the masters has been queued on `stream`. Any thread may say so. To
 * unlock memory, to forget a model and to hold trainable masters waits for such work. */
enum oo_status oo_engine_unmap(struct oo_engine *engine, uint32_t member, uintptr_t stream);
/* The members that are attached are stamped even where OO_E_STATE says that another is not. With
 * OO_NONBLOCKING it says OO_WOULD_BLOCK, and stamps nothing, while another thread is inside. */
enum oo_status oo_engine_stamp(struct oo_engine *engine, const struct oo_stamp *stamps,
                               uint32_t count, int flags);
/* A use of a unit, as the engine remembers it to predict the next ones. */
struct oo_visit {
    uint32_t unit;
    enum oo_kind kind;
};
#define OO_MAX_EXPECTED 32768

/* The latest uses of the model's units, oldest first: up to `capacity` rows; `count` receives how
 * many there are. */
enum oo_status oo_engine_visits(struct oo_engine *engine, uint32_t model, struct oo_visit *visits,
                                size_t capacity, size_t *count);
/* Predict this sweep from now on, as if it had just been made twice: an earlier run has learned it.
 * Where it is wrong, copies come late and the order is learned again. At most OO_MAX_EXPECTED. */
enum oo_status oo_engine_expect(struct oo_engine *engine, const struct oo_visit *visits,
                                size_t count);
/* What a forward of a unit takes, until the next use and without waits for copies. */
struct oo_unit_pace {
    uint32_t unit;
    uint64_t nanoseconds;
};
/* What is measured so far: up to `capacity` rows of the model's units, those that are known;
 * `count` receives how many there are. The link's bytes are those that units have on the device; 0:
 * not known. */
enum oo_status oo_engine_pace(struct oo_engine *engine, uint32_t model, struct oo_unit_pace *rows,
                              size_t capacity, size_t *count, uint64_t *link_bps);
/* An earlier run on such a device has measured this: what is planned goes by it until something is
 * measured here. */
enum oo_status oo_engine_expect_pace(struct oo_engine *engine, const struct oo_unit_pace *rows,
                                     size_t count, uint64_t link_bps);
/* Copy device bytes that `stream` writes to host memory; returns when they have arrived. */
enum oo_status oo_engine_download(struct oo_engine *engine, void *target, uintptr_t source,
                                  size_t bytes, uintptr_t stream);

/* ---- bytes that leave the device for a while ---- */

/* A trip is a copy of device bytes of the caller's own, out to page-locked host memory that the
 * engine knows or back from there, which the host does not wait for:
 *
 *     oo_trip_out(engine, target, source, bytes, stream, &out);
 *     ... work that is queued on `stream` reads the source ...
 *     oo_trip_join(engine, out, stream);        the source may be freed, or rewritten
 *     ... later, in memory allocated on `stream` ...
 *     oo_trip_back(engine, out, target, stream, &back);
 *     oo_trip_join(engine, back, stream);       work that is queued next may read the target
 *     oo_trip_end(engine, back);                the host memory may be the next one's
 *     oo_trip_end(engine, out);
 *
 * `stream` is the one that the device memory was allocated on, as torch's allocator hands memory
 * on in the order of a stream. A ticket names a trip until its end. */

/* Queue a copy of device bytes that `stream` computes. OO_E_STATE where the target is not
 * page-locked. */
enum oo_status oo_trip_out(struct oo_engine *engine, void *target, uintptr_t source, size_t bytes,
                           uintptr_t stream, uint64_t *ticket);
/* The same, of bytes that go home to stay: gradients, and what an optimizer has stepped. */
enum oo_status oo_trip_home(struct oo_engine *engine, void *target, uintptr_t source, size_t bytes,
                            uintptr_t stream, uint64_t *ticket);
/* Queue a copy of page-locked host bytes, which must not be rewritten until it has ended, to device
 * memory that was allocated on `stream`. It is a trip back of what never left. */
enum oo_status oo_trip_in(struct oo_engine *engine, uintptr_t target, const void *source,
                          size_t bytes, uintptr_t stream, uint64_t *ticket);
/* Queue the copy of what left by the trip `out`, once it has arrived, to device memory that was
 * allocated on `stream`. Any number may be made until that trip ends. */
enum oo_status oo_trip_back(struct oo_engine *engine, uint64_t out, uintptr_t target,
                            uintptr_t stream, uint64_t *ticket);
/* Work queued from now on, on the stream of the trip's device memory, and after a trip back on
 * `stream` as well, comes after the copy: the device memory is the caller's again. */
enum oo_status oo_trip_join(struct oo_engine *engine, uint64_t ticket, uintptr_t stream);
/* Whether the copy has ended; waits for nothing. */
enum oo_status oo_trip_arrived(struct oo_engine *engine, uint64_t ticket, int *arrived);
/* Wait on the host until it has: what left may be read there. */
enum oo_status oo_trip_await(struct oo_engine *engine, uint64_t ticket);
/* Join the trip, if it has not been joined, and forget it: its host memory may be the target of the
 * next trip out, also while trips back of it have not ended. The host itself may rewrite it once
 * oo_trip_await has returned, of those too. */
enum oo_status oo_trip_end(struct oo_engine *engine, uint64_t ticket);

/* ---- masters that change ---- */

/* Trainable masters may be rewritten from now on: their copies are dropped, none is prefetched, and
 * mappings have ended (a host wait where the device still reads). Forwards that are not recorded
 * may be made meanwhile: each copies again what is no longer in use. */
enum oo_status oo_engine_hold(struct oo_engine *engine);
/* Likewise, but their copies stay where they are: whether they were rewritten will be known later.
 * Then oo_engine_hold drops the copies after all, or oo_engine_resume accepts them as current. An
 * acquire accepts none. */
enum oo_status oo_engine_rest(struct oo_engine *engine);
/* They are stable again. An acquire of kind OO_RECORDED says so too. */
enum oo_status oo_engine_resume(struct oo_engine *engine);
/* The device writes to the unit's masters, by copies that the caller queues on their way home,
 * until oo_unit_rewritten. Where a copy of it is there that is what the masters are, by `count`
 * stamps, one for each member, it is in use until then, at `address`: what the caller queues on
 * `stream` may write to it what will go to the masters. Else `address` is 0, and the copy goes.
 * A second call before that is of another who writes to masters: `address` is 0, and what the
 * first has written to the copy is not trusted afterwards. Meanwhile none is fetched ahead. */
enum oo_status oo_unit_rewrite(struct oo_engine *engine, uint32_t unit,
                               const struct oo_stamp *stamps, uint32_t count, uintptr_t stream,
                               uintptr_t *address);
/* What writes to the unit's copy is queued on `stream`, which waits for what goes home of it:
 * others may take its place. */
enum oo_status oo_unit_written(struct oo_engine *engine, uint32_t unit, uintptr_t stream);
/* The masters are written, and what was sent has arrived. The copy that was written, on `stream`,
 * is what they are, if it is there still and there is a stamp for each member; else it goes. */
enum oo_status oo_unit_rewritten(struct oo_engine *engine, uint32_t unit,
                                 const struct oo_stamp *stamps, uint32_t count, uintptr_t stream);
/* Wait on the host until nothing that is queued reads masters: any of them may be rewritten until
 * the next acquire, map or prefetch. */
enum oo_status oo_engine_settle(struct oo_engine *engine);
/* All device copies of the model (or OO_ALL_MODELS) are stale: every later acquire copies again. */
enum oo_status oo_engine_refresh(struct oo_engine *engine, uint32_t model);
/* Hash whole masters instead of samples, at every hit. */
enum oo_status oo_engine_set_verify(struct oo_engine *engine, int on);

/* ---- what happened ---- */

/* The counters, each counted where it happens: bytes at the copy call, seconds from events. Of
 * copies and waits one in 16 is measured, all while a timeline is recorded. A row
 * is COUNT(name, of) or SECONDS(name, of), where `of` is
 *     MODEL    counted for each model; of all models it is their sum
 *     ENGINE   the engine's own, and the same for each model
 *     NOW      not counted but looked up when it is asked for
 * struct oo_stats, the sum over models and the binding's dictionary are made from this list. */
/* clang-format off */
#define OO_COUNTERS(COUNT, SECONDS) \
    /* what is managed, and where it is */ \
    COUNT(managed_bytes, NOW)           /* of all units, on the device */ \
    COUNT(locked_bytes, NOW)            /* of host memory and rings that are page-locked */ \
    COUNT(pageable_bytes, NOW)          /* of masters that are not, and pass through a ring */ \
    COUNT(disk_bytes, NOW)              /* of masters that are in files */ \
    COUNT(disk_kept_bytes, NOW)         /* of masters in files that are kept in memory, once read */ \
    COUNT(disk_arrived_bytes, NOW)      /* of those, what has been */ \
    COUNT(ring_bytes, NOW)              /* of both rings; locked_bytes has them too */ \
    COUNT(arena_bytes, NOW) \
    COUNT(staging_bytes, NOW)           /* of device memory that coded weights pass through */ \
    COUNT(resident_bytes, NOW)          /* of the units that are in the arena */ \
    COUNT(peak_resident_bytes, ENGINE) \
    COUNT(largest_unit_bytes, NOW) \
    COUNT(learned_block_bytes, NOW)     /* of the largest checkpointed block seen */ \
    COUNT(units, NOW) \
    COUNT(resident_units, NOW) \
    /* copies to the device, and back */ \
    COUNT(h2d_bytes, MODEL) \
    COUNT(h2d_copies, MODEL) \
    SECONDS(h2d_seconds, MODEL)         /* of h2d_timed_bytes */ \
    COUNT(h2d_timed_bytes, MODEL) \
    COUNT(unlocked_h2d_bytes, ENGINE)   /* of h2d_bytes, those of masters that are not locked */ \
    SECONDS(unlocked_h2d_seconds, ENGINE) /* in which copy threads were at them, by the host's clock */ \
    COUNT(disk_read_bytes, MODEL)       /* of h2d_bytes, those that were read from files */ \
    SECONDS(disk_read_seconds, MODEL)   /* that those reads took, added up over copy threads */ \
    COUNT(decodes, MODEL)               /* chunks of coded masters that a kernel has decoded */ \
    COUNT(decoded_bytes, MODEL)         /* what that made of them; h2d_bytes has them coded */ \
    SECONDS(decode_seconds, MODEL)      /* of decode_timed_bytes */ \
    COUNT(decode_timed_bytes, MODEL) \
    COUNT(d2h_bytes, ENGINE) \
    COUNT(d2h_copies, ENGINE) \
    SECONDS(d2h_seconds, ENGINE)        /* of d2h_timed_bytes */ \
    COUNT(d2h_timed_bytes, ENGINE) \
    /* trips: bytes of the caller's own, not counted above */ \
    COUNT(left_bytes, ENGINE)           /* out, to the host */ \
    COUNT(left_copies, ENGINE) \
    COUNT(returned_bytes, ENGINE)       /* and back */ \
    COUNT(returned_copies, ENGINE) \
    COUNT(brought_bytes, ENGINE)        /* in, of what never left: oo_trip_in */ \
    COUNT(brought_copies, ENGINE) \
    /* uses */ \
    COUNT(acquires, MODEL) \
    COUNT(hits, MODEL)                  /* the unit was in the arena, or on its way */ \
    COUNT(late, MODEL)                  /* it was not */ \
    COUNT(stale, MODEL)                 /* it was, but its master had changed since */ \
    COUNT(prefetches, MODEL) \
    COUNT(prefetch_failures, MODEL)     /* given up without harm: copied when it is asked for */ \
    COUNT(evictions, MODEL) \
    COUNT(waits, MODEL)                 /* of a compute stream, the first to use a copy, for it */ \
    COUNT(timed_waits, MODEL)           /* those of them that were measured: one in 16 */ \
    COUNT(stalls, MODEL)                /* of timed_waits, over 10 us */ \
    SECONDS(stall_seconds, MODEL)       /* of those stalls */ \
    /* what should stay rare */ \
    COUNT(lock_refusals, ENGINE)        /* the driver gave no page-locked memory */ \
    COUNT(host_waits, ENGINE)           /* of callers, for the device */ \
    COUNT(feed_waits, ENGINE)           /* of callers, for copy threads */ \
    SECONDS(feed_wait_seconds, ENGINE)  /* that those took, by the host's clock */ \
    COUNT(stopped_feeds, ENGINE)        /* copies of theirs given up: their unit had to go */ \
    COUNT(copy_waits, ENGINE)           /* of copy threads, for the device */ \
    COUNT(recoveries, ENGINE)           /* host waits that a failure made necessary */ \
    COUNT(lost_uses, ENGINE)            /* whose end could not be marked: an evictor waits */ \
    COUNT(allocations, ENGINE)          /* of host records and driver objects: flat in a step */
/* clang-format on */

struct oo_stats {
#define OO_COUNT_FIELD(name, of)   uint64_t name;
#define OO_SECONDS_FIELD(name, of) double name;
    OO_COUNTERS(OO_COUNT_FIELD, OO_SECONDS_FIELD)
#undef OO_COUNT_FIELD
#undef OO_SECONDS_FIELD
};

/* One consistent snapshot, of one model or of OO_ALL_MODELS. */
enum oo_status oo_engine_stats(struct oo_engine *engine, uint32_t model, struct oo_stats *out);

enum oo_trace_kind {
    OO_TRACE_COMPUTE = 0,
    OO_TRACE_H2D = 1,
    OO_TRACE_D2H = 2,
    OO_TRACE_STALL = 3,
    OO_TRACE_DECODE = 4 /* of a chunk whose master is locked; `bytes` are those decoded */
};
#define OO_TRACE_KINDS 5
struct oo_trace_row {
    enum oo_trace_kind kind;
    uint32_t unit;
    double start_s, end_s; /* since oo_trace_start, by events on the device */
    uint64_t bytes;
};
/* Record a timeline, once the copies that are queued have ended (a host wait); creates events while
 * it runs. */
enum oo_status oo_trace_start(struct oo_engine *engine);
/* End it, wait for the device, and hand over the rows (free them with oo_trace_free). */
enum oo_status oo_trace_stop(struct oo_engine *engine, struct oo_trace_row **rows, size_t *count);
void oo_trace_free(struct oo_trace_row *rows);

/* What the engine has made the device do, in that order: one entry for each. */
enum oo_deed {
    OO_DEED_USE = 0,  /* a use begins; `detail` is its oo_kind */
    OO_DEED_WAIT = 1, /* a stream has to wait for the unit's copy, the first one to use it */
    OO_DEED_COPY_IN =
        2, /* a copy to the device, of no unit for a trip back; `detail` is where to */
    OO_DEED_COPY_OUT = 3, /* a copy to the host, of no unit (UINT32_MAX) */
    OO_DEED_EVICT = 4,    /* of a unit; `detail` is the one that comes in its place, or it itself,
                             where it has to come back to another */
    OO_DEED_DECODE = 5    /* of what has just been copied; `bytes` come of `detail` chunks */
};
struct oo_entry {
    double host_s; /* by the host's clock: on the simulated driver its virtual one */
    uint64_t bytes;
    uint64_t detail;
    uint32_t unit;
    enum oo_deed deed;
};
/* Keep a journal of the latest `entries`, numbered from 0 on, until oo_journal_stop. It costs
 * memory and a look at the clock for each entry, and no call of the driver. */
enum oo_status oo_journal_start(struct oo_engine *engine, size_t entries);
/* Entries from number `from` on, or from the oldest that is kept, or the next one to come: `first`
 * receives which. Up to `capacity`; `count` receives how many. `now_s` is the clock that the
 * entries are of. */
enum oo_status oo_journal_read(struct oo_engine *engine, uint64_t from, struct oo_entry *entries,
                               size_t capacity, uint64_t *first, size_t *count, double *now_s);
enum oo_status oo_journal_stop(struct oo_engine *engine);

/* ---- for the simulated driver, and for tests ---- */

int oo_engine_simulated(const struct oo_engine *engine);
/* A non-blocking stream for callers that have none; created on first use. */
enum oo_status oo_engine_compute_stream(struct oo_engine *engine, uintptr_t *stream);
/* Declare a kernel that reads the acquired member for `seconds`; does nothing on a real driver. */
enum oo_status oo_engine_launch(struct oo_engine *engine, uint32_t member, uintptr_t stream,
                                double seconds);
/* Keep `stream` busy for a time (at most ten seconds), so that tests can make copies race a kernel.
 */
enum oo_status oo_engine_spin(struct oo_engine *engine, uintptr_t stream, uint64_t nanoseconds);

struct oo_resident {
    uint32_t unit;
    uint32_t pins;
    uintptr_t address;
    size_t bytes;
};
/* The arena's contents by address: up to `capacity` rows; `count` receives how many there are. */
enum oo_status oo_engine_residents(struct oo_engine *engine, struct oo_resident *rows,
                                   size_t capacity, size_t *count);

struct oo_unit_waits {
    uint32_t unit;
    uint64_t timed_waits, stalls; /* as in struct oo_stats, for this unit alone */
    double stall_seconds;
};
/* The units for whose copies waits were timed, by number: up to `capacity` rows; `count` receives
 * how many there are. */
enum oo_status oo_engine_unit_waits(struct oo_engine *engine, struct oo_unit_waits *rows,
                                    size_t capacity, size_t *count);

#ifdef __cplusplus
}
#endif

#endif
