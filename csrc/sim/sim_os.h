/* sim_os.h - the only place where the simulator knows its operating system: one lock, one
 * condition, one detached thread, whether pages exist. Everything else in csrc/sim is plain C11. */
#ifndef OO_SIM_OS_H
#define OO_SIM_OS_H

#define SIM_THREAD_LOCAL _Thread_local

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef SRWLOCK sim_lock;
typedef CONDITION_VARIABLE sim_cond;
#define SIM_LOCK_INIT SRWLOCK_INIT
#define SIM_COND_INIT CONDITION_VARIABLE_INIT

static inline void sim_os_lock(sim_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void sim_os_unlock(sim_lock *lock) { ReleaseSRWLockExclusive(lock); }
static inline void sim_os_broadcast(sim_cond *cond) { WakeAllConditionVariable(cond); }
/* Returns 0 when woken, 1 when `milliseconds` have passed; may wake for no reason. */
static inline int sim_os_wait(sim_cond *cond, sim_lock *lock, unsigned milliseconds) {
    return SleepConditionVariableSRW(cond, lock, milliseconds, 0) ? 0 : 1;
}
typedef DWORD sim_os_thread_result;
#define SIM_OS_THREAD WINAPI
static inline int sim_os_start(sim_os_thread_result(SIM_OS_THREAD *body)(void *)) {
    HANDLE thread = CreateThread(NULL, 0, body, NULL, 0, NULL);
    if (!thread)
        return 1;
    CloseHandle(thread);
    return 0;
}
static inline int sim_os_mapped(const void *ptr, size_t bytes) {
    MEMORY_BASIC_INFORMATION pages;
    for (const char *at = ptr, *end = at + bytes; at < end;
         at = (const char *)pages.BaseAddress + pages.RegionSize)
        if (!VirtualQuery(at, &pages, sizeof pages) || pages.State != MEM_COMMIT)
            return 0;
    return 1;
}

#else

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef pthread_mutex_t sim_lock;
typedef pthread_cond_t sim_cond;
#define SIM_LOCK_INIT PTHREAD_MUTEX_INITIALIZER
#define SIM_COND_INIT PTHREAD_COND_INITIALIZER

static inline void sim_os_lock(sim_lock *lock) { pthread_mutex_lock(lock); }
static inline void sim_os_unlock(sim_lock *lock) { pthread_mutex_unlock(lock); }
static inline void sim_os_broadcast(sim_cond *cond) { pthread_cond_broadcast(cond); }
/* Returns 0 when woken, 1 when `milliseconds` have passed; may wake for no reason. */
static inline int sim_os_wait(sim_cond *cond, sim_lock *lock, unsigned milliseconds) {
    struct timespec until;
    timespec_get(&until, TIME_UTC);
    until.tv_sec += (time_t)(milliseconds / 1000);
    until.tv_nsec += (long)(milliseconds % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    return pthread_cond_timedwait(cond, lock, &until) == ETIMEDOUT;
}
typedef void *sim_os_thread_result;
#define SIM_OS_THREAD
static inline int sim_os_start(sim_os_thread_result(SIM_OS_THREAD *body)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, NULL))
        return 1;
    pthread_detach(thread);
    return 0;
}
/* msync refuses pages that are not mapped; of others it writes nothing back here, or files' only.
 */
static inline int sim_os_mapped(const void *ptr, size_t bytes) {
    const uintptr_t into = (uintptr_t)ptr % (uintptr_t)sysconf(_SC_PAGESIZE);
    return msync((void *)((uintptr_t)ptr - into), bytes + into, MS_ASYNC) == 0;
}

#endif

#endif
