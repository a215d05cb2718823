/* sim.h - what the simulated CUDA driver exports in addition to the cu* calls.
 *
 * The simulator is a discrete-event machine, not a set of threads: work is queued per stream and
 * makes progress only when someone synchronises, queries or launches. It exports the calls below,
 * and every call of csrc/driver/driver.h under its real symbol name (cuMemAlloc_v2, ...). State is
 * per process, behind one lock. Control calls return 0 or a CUresult.
 */
#ifndef OO_SIM_H
#define OO_SIM_H

#include "../driver/cu_abi.h"

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define SIM_API __declspec(dllexport)
#else
#define SIM_API __attribute__((visibility("default")))
#endif

/* ---- how torch meets the simulator: optional rows of the driver table ---- */

/* Host memory [ptr, ptr + bytes) becomes device memory: it counts against the device's capacity
 * and can be the device side of copies. CUDA_ERROR_OUT_OF_MEMORY when it does not fit. It is lent
 * as a caching allocator lends: others may have written it on `stream` until now, and will again
 * after simDrop. What is not ordered between the two races with them. */
SIM_API OOCUresult simAdopt(OOCUdeviceptr ptr, size_t bytes, unsigned int flags, OOCUstream stream);
/* End of simAdopt. An error while copies from or to the range are queued. */
SIM_API OOCUresult simDrop(OOCUdeviceptr ptr);
/* A kernel on `stream` that reads and writes these ranges (device memory, or registered host
 * memory) for `seconds` of virtual time. Checks the ranges for races, then executes what is
 * ordered before the tail of `stream` and nothing else, then queues the kernel's virtual time.
 * The caller runs the real operator right after the call. Not a host wait. */
SIM_API OOCUresult simLaunch(OOCUstream stream, const OOSimRange *reads, size_t n_reads,
                             const OOSimRange *writes, size_t n_writes, double seconds);
/* The host itself reads or writes this memory now: checked against queued copies. */
SIM_API OOCUresult simHostAccess(const void *ptr, size_t bytes, int is_write);
/* The calling thread's next copy from or to this host memory knows that it is pageable: it is no
 * oversight, and not reported as one. */
SIM_API OOCUresult simExpectPageable(const void *ptr);
/* A disk in virtual time, where a device has one (`disk_gbps`); else the first says that its bytes
 * are wanted, and the others CUDA_ERROR_NOT_SUPPORTED. Threads that read files are real and block
 * for real until the host's clock, which others move, is where their wait ends: the thread that
 * waits for them lets time pass once as many as it knows of are blocked.
 *
 * The calling thread reads so many bytes of a file: returns at the virtual end of that. `*wanted`:
 * 0 where copies move no byte, so that they need not be there. */
SIM_API OOCUresult simRead(size_t bytes, int *wanted);
/* As cuEventSynchronize, for such a thread: the host's clock is not moved. */
SIM_API OOCUresult simAwait(OOCUevent event);
/* How many are blocked in the two calls above; waits for `expected` of them, or a millisecond. */
SIM_API OOCUresult simReaders(unsigned expected, unsigned *blocked);
/* The host's clock goes to the next moment at which one of them goes on, and no further. */
SIM_API OOCUresult simPass(void);

/* ---- configuration ---- */

struct sim_device {
    char name[64];
    double link_gbps;      /* each direction, 1e9 bytes/s */
    double copy_latency_s; /* added to every copy */
    double memory_bytes;
    double tflops; /* dense bf16, 1e12 FLOP/s; fp32 runs at half, see docs */
    double memory_gbps;
    double launch_s;                  /* launch latency of a kernel */
    int compute_major, compute_minor; /* compute capability */
    /* The switch or root port that its link goes through, 1 to 8, and the rate of that, each
     * direction; 0: the link is its own. Devices of one upstream name the same rate: together they
     * get no more. */
    int upstream;
    double upstream_gbps;
    /* What each direction has of `link_gbps` while both of this device copy, in (0, 1]. */
    double duplex_share;
    /* The disk that files are read from, 1e9 bytes/s, all reads together, and what each takes
     * before its bytes come, as for others at that time; 0: reads take no time. */
    double disk_gbps, disk_latency_s;
};

/* The presets: rtx3090, rtx4090, rtx5090, h100, h200. INVALID_VALUE for another name. */
SIM_API OOCUresult simPreset(const char *name, struct sim_device *out);
/* Read or replace device `ordinal`; replacing is refused (ILLEGAL_STATE) while its context is
 * retained. The default comes from ORACLE_OFFLOAD_SIM_DEVICE (rtx4090). */
SIM_API OOCUresult simGetDevice(int ordinal, struct sim_device *out);
SIM_API OOCUresult simSetDevice(int ordinal, const struct sim_device *device);
/* How many devices exist (1 by default, at most 8). */
SIM_API OOCUresult simSetDeviceCount(int count);

enum sim_schedule {
    SIM_TIMED = 0,       /* in the order of virtual time: what the hardware would most likely do */
    SIM_RANDOM = 1,      /* any legal order, chosen by the seed */
    SIM_STARVE_COPY = 2, /* copies run only when something waits for them */
    SIM_STARVE_COMPUTE =
        3,          /* copies run as soon as they are legal, kernels' ends as late as legal */
    SIM_EAGER = 4,  /* every operation runs when it is queued, where legal */
    SIM_DELAYED = 5 /* SIM_TIMED, but the seed makes some operations take far too long */
};
/* The default comes from ORACLE_OFFLOAD_SIM_SEED: unset SIM_TIMED, a number SIM_RANDOM with it,
 * "delayed:41" SIM_DELAYED with seed 41. */
SIM_API OOCUresult simSetSchedule(int schedule, uint64_t seed);
SIM_API OOCUresult simGetSchedule(int *schedule, uint64_t *seed);
/* The same for people: "random, seed 41; replay with ORACLE_OFFLOAD_SIM_SEED=random:41". */
SIM_API OOCUresult simScheduleText(char *text, size_t capacity);

enum sim_switch {
    SIM_RACES = 0,        /* detect races (default 1) */
    SIM_POISON = 1,       /* poison fresh, freed and not yet arrived bytes (default 1) */
    SIM_COPY_NOTHING = 2, /* copies take their time and move no byte (default 0): a broken driver */
    SIM_TRACE_ON = 3, /* record ended operations for simTrace (default: ORACLE_OFFLOAD_SIM_TRACE) */
    /* Each host thread has its own clock, and only CUDA calls order threads (default 0: all host
     * threads share one clock, as their locks cannot be seen from here). */
    SIM_STRICT_THREADS = 4,
    /* What is queued is handed to the device only when a call queries or waits for its stream, or
     * for an event of it, or launches a kernel that comes after it (default 0): as on Windows,
     * where the driver (WDDM) collects a batch first. cuEventElapsedTime hands nothing over. */
    SIM_LATE_SUBMISSION = 5,
    /* A new stream may have the handle of one that was destroyed (default 0, so that a handle that
     * is used after its end is found): as of a real driver, whose handles are addresses. */
    SIM_RECYCLED_STREAMS = 6,
    /* Kernels of different streams run at the same time, up to four of them (default 0: one after
     * the other, as kernels that each fill the card do). */
    SIM_CONCURRENT_KERNELS = 7
};
SIM_API OOCUresult simSwitch(int which, int on);
/* Whether SIM_LATE_SUBMISSION is on: what an engine asks, as it asks the system of a real driver.
 */
SIM_API OOCUresult simSubmitsLate(int *late);

/* Refuse host registrations: the n-th cuMemHostRegister from now on and all later ones fail with
 * OUT_OF_MEMORY (1 = the next); 0 ends it. */
SIM_API OOCUresult simRefuseRegistration(uint64_t from_nth);
/* At most so many bytes of host memory can be page-locked at a time, by cuMemHostRegister and
 * cuMemHostAlloc together: what exceeds them fails with OUT_OF_MEMORY. UINT64_MAX (the default): no
 * limit. */
SIM_API OOCUresult simLockQuota(uint64_t bytes);
/* The n-th call from now on (1 = the next) of `call` ("cuEventRecord"; NULL: any cu* call that can
 * fail) returns `result` and does nothing: once, or for ever when `lasting`. One fault per call
 * name and one for any; result 0 clears. A sticky result (700, 719...) makes all later calls that
 * need a context fail with it, and drops what is queued. "async h2d", "async d2h" and "async
 * kernel" are the n-th operation of that kind to run: the error shows at a later call, and sticks.
 */
SIM_API OOCUresult simFault(const char *call, uint64_t nth, OOCUresult result, int lasting);
SIM_API OOCUresult simFaultClear(void);
/* A stream that makes no progress until `on` is 0 again, as if its current operation hung. */
SIM_API OOCUresult simHold(OOCUstream stream, int on);
/* Whether all that was queued on a stream has ended by simNow(). Unlike cuStreamQuery it runs
 * nothing, and the host knows no more than before. */
SIM_API OOCUresult simIdle(OOCUstream stream, int *idle);
/* Whether a graph is captured from a stream. Unlike cuStreamIsCapturing it counts as no call, and
 * needs no context. */
SIM_API OOCUresult simCapturing(OOCUstream stream, int *capturing);
/* How long a wait bears with a host function that does not return before it is called a deadlock
 * (real time; 10,000 ms by default). */
SIM_API OOCUresult simPatience(unsigned int milliseconds);
/* How often `call` was called since start or simReset; NULL: all calls. */
SIM_API uint64_t simCallCount(const char *call);

/* ---- observation ---- */

/* Bytes and operations are counted when they are queued. */
struct sim_stats {
    uint64_t h2d_bytes, h2d_copies, d2h_bytes, d2h_copies;
    uint64_t kernels, host_waits; /* host_waits: cuStreamSynchronize + cuEventSynchronize */
    double h2d_busy_s, d2h_busy_s, compute_busy_s; /* of what has ended by simNow() */
};
SIM_API OOCUresult simGetStats(struct sim_stats *out);

struct sim_live {
    uint64_t streams, events, contexts, modules;
    uint64_t registrations, registered_bytes, host_alloc_bytes, device_bytes, adopted_bytes;
    uint64_t queued; /* operations not yet executed */
    uint64_t device_peak_bytes;
    uint64_t history; /* intervals that the race detector remembers */
};
SIM_API OOCUresult simGetLive(struct sim_live *out);

/* The host's virtual clock, in seconds since start; advanced by waits, queries and simAdvance. */
SIM_API double simNow(void);
/* The same, for the driver table. */
SIM_API OOCUresult simClock(double *seconds);
SIM_API OOCUresult simAdvance(double seconds);
/* Virtual time at which everything queued on all streams so far will have ended; executes it, and
 * moves the host's clock there. Not a synchronisation: the host knows no more than before. */
SIM_API OOCUresult simFinish(double *seconds);

/* Races, deadlocks and lints since start or simReset. A report is several lines of text that name
 * both accesses, their streams, byte ranges and labels, the missing edge, and the seed. */
SIM_API uint64_t simReportCount(void);
SIM_API OOCUresult simReport(uint64_t index, char *text, size_t capacity);
SIM_API OOCUresult simReportsClear(void);
/* Name a memory range or a stream in reports and traces ("unit 12", "h2d"). */
SIM_API OOCUresult simLabelRange(const void *ptr, size_t bytes, const char *label);
SIM_API OOCUresult simLabelStream(OOCUstream stream, const char *label);

enum sim_kind {
    SIM_H2D = 0,
    SIM_D2H = 1,
    SIM_KERNEL = 2,
    SIM_MEMSET = 3,
    SIM_HOSTFN = 4,
    SIM_READ = 5
};
struct sim_trace_row {
    int kind;
    uint64_t stream; /* handle; 0 of a read from a disk, which is in none */
    double start_s, end_s;
    uint64_t bytes;
    OOCUdeviceptr device_ptr;
};
SIM_API uint64_t simTraceCount(void);
SIM_API OOCUresult simTraceRow(uint64_t index, struct sim_trace_row *out);
SIM_API OOCUresult simTraceClear(void);

/* Forget everything but the configuration of the devices: clocks, counters, reports, faults,
 * schedule and switches go back to their defaults. ILLEGAL_STATE while anything is live. */
SIM_API OOCUresult simReset(void);

#endif
