/* os_win32.c - Windows. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include "os.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

const char *const oo__cuda_library_name = "nvcuda.dll";

size_t oo__page_bytes(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

void *oo__pages_map(size_t bytes) {
    return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

/* Handles have 32 bits that count, on 64-bit Windows too. */
static HANDLE oo__handle(int section) { return (HANDLE)(intptr_t)section; }

static int oo__section_of(HANDLE handle, int why) {
    if (!handle)
        errno = why;
    return handle ? (int)(intptr_t)handle : -1;
}

int oo__section_create(size_t bytes) {
    const HANDLE made = CreateFileMappingW(INVALID_HANDLE_VALUE, NULL, PAGE_READWRITE,
                                           (DWORD)((uint64_t)bytes >> 32), (DWORD)bytes, NULL);
    return oo__section_of(made, ENOMEM);
}

/* The system asks whether this user may have the other process's handles. */
int oo__section_take(unsigned process, int theirs) {
    const HANDLE owner = OpenProcess(PROCESS_DUP_HANDLE, FALSE, process);
    HANDLE taken = NULL;
    if (owner) {
        if (!DuplicateHandle(owner, oo__handle(theirs), GetCurrentProcess(), &taken, 0, FALSE,
                             DUPLICATE_SAME_ACCESS))
            taken = NULL;
        CloseHandle(owner);
    }
    return oo__section_of(taken, EACCES);
}

void oo__section_close(int section) { CloseHandle(oo__handle(section)); }

static void *oo__map_view(DWORD access, size_t bytes, int section, uint64_t begin, void *at) {
    void *pages =
        MapViewOfFileEx(oo__handle(section), access, (DWORD)(begin >> 32), (DWORD)begin, bytes, at);
    if (!pages)
        errno = ENOMEM;
    return pages;
}

void *oo__pages_map_shared(size_t bytes, int file, uint64_t begin) {
    return oo__map_view(FILE_MAP_WRITE, bytes, file, begin, NULL);
}

int oo__pages_protect(void *pages, size_t bytes, int writable) {
    DWORD before;
    if (VirtualProtect(pages, bytes, writable ? PAGE_READWRITE : PAGE_READONLY, &before))
        return 0;
    errno = EACCES;
    return -1;
}

void oo__pages_unmap(void *pages, size_t bytes) {
    (void)bytes;
    if (!VirtualFree(pages, 0, MEM_RELEASE)) /* then it is a section's */
        UnmapViewOfFile(pages);
}

/* Large pages need a privilege, and pages that are locked from the start. */
void oo__pages_ask_huge(void *pages, size_t bytes) { (void)pages, (void)bytes; }

uint64_t oo__nanoseconds(void) {
    LARGE_INTEGER ticks, per_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&per_second);
    return (uint64_t)((double)ticks.QuadPart / (double)per_second.QuadPart * 1e9);
}

/* There is no fork to protect from. */
int oo__pages_inherit(void *pages, size_t bytes, int keep) {
    (void)pages, (void)bytes, (void)keep;
    return 0;
}

/* Windows says so only of pages that are in memory at the moment. */
int oo__pages_written(const void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    return -1;
}

int oo__pages_show(void *pages, size_t bytes, int file, uint64_t begin) {
    if (!UnmapViewOfFile(pages)) {
        errno = EINVAL;
        return -1;
    }
    return oo__map_view(FILE_MAP_COPY, bytes, file, begin, pages) ? 0 : -1;
}

int oo__pages_own(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    return -1;
}

/* No weights stay in files where nothing tells which of their pages were written. */
static int oo__no_files(void) {
    errno = ENOSYS;
    return -1;
}

int oo__file_open(const char *path, int direct) {
    (void)path, (void)direct;
    return oo__no_files();
}

void oo__file_close(int file) { (void)file; }

int oo__file_state(int file, struct oo_file_state *state) {
    (void)file, (void)state;
    return oo__no_files();
}

ptrdiff_t oo__file_read(int file, void *target, size_t bytes, uint64_t begin) {
    (void)file, (void)target, (void)bytes, (void)begin;
    return oo__no_files();
}

void oo__file_uncache(int file, uint64_t begin, size_t bytes) {
    (void)file, (void)begin, (void)bytes;
}

void *oo__file_map(int file, size_t bytes) {
    (void)file, (void)bytes;
    errno = ENOSYS;
    return NULL;
}

struct oo_fork_guard {
    int unused;
};

struct oo_fork_guard *oo__fork_guard_create(void) {
    return calloc(1, sizeof(struct oo_fork_guard));
}
void oo__fork_guard_destroy(struct oo_fork_guard *guard) { free(guard); }

int oo__fork_guard_in_child(const struct oo_fork_guard *guard) {
    (void)guard;
    return 0;
}

struct oo_mutex {
    SRWLOCK lock;
    CONDITION_VARIABLE woken;
};

struct oo_mutex *oo__mutex_create(void) {
    struct oo_mutex *mutex = malloc(sizeof *mutex);
    if (mutex) {
        InitializeSRWLock(&mutex->lock);
        InitializeConditionVariable(&mutex->woken);
    }
    return mutex;
}

void oo__mutex_destroy(struct oo_mutex *mutex) { free(mutex); }
void oo__mutex_lock(struct oo_mutex *mutex) { AcquireSRWLockExclusive(&mutex->lock); }
int oo__mutex_try(struct oo_mutex *mutex) { return TryAcquireSRWLockExclusive(&mutex->lock) != 0; }
void oo__mutex_unlock(struct oo_mutex *mutex) { ReleaseSRWLockExclusive(&mutex->lock); }

void oo__mutex_wait(struct oo_mutex *mutex, double until_s) {
    const double left_ms = (until_s - oo__clock_s()) * 1e3;
    (void)SleepConditionVariableSRW(&mutex->woken, &mutex->lock,
                                    left_ms > 0 ? (DWORD)left_ms + 1 : 0, 0);
}

void oo__mutex_wake(struct oo_mutex *mutex) { WakeAllConditionVariable(&mutex->woken); }
double oo__clock_s(void) { return (double)GetTickCount64() * 1e-3; }

struct oo_thread {
    HANDLE handle;
    void (*run)(void *);
    void *argument;
};

static DWORD WINAPI oo__thread_main(void *argument) {
    struct oo_thread *thread = argument;
    thread->run(thread->argument);
    return 0;
}

struct oo_thread *oo__thread_start(void (*run)(void *), void *argument) {
    struct oo_thread *thread = malloc(sizeof *thread);
    if (!thread)
        return NULL;
    thread->run = run;
    thread->argument = argument;
    thread->handle = CreateThread(NULL, 0, oo__thread_main, thread, 0, NULL);
    if (!thread->handle) {
        free(thread);
        return NULL;
    }
    return thread;
}

void oo__thread_join(struct oo_thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
    free(thread);
}

size_t oo__processors(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwNumberOfProcessors;
}

/* Only the device manager knows which node a PCI device is nearest to: the driver is asked.
 */
int oo__numa_node(const char *sys, const char *pci_id) {
    (void)sys, (void)pci_id;
    return -1;
}

struct oo_binding {
    GROUP_AFFINITY before;
};

struct oo_binding *oo__thread_bind(const char *sys, int node) {
    GROUP_AFFINITY there = {0};
    (void)sys;
    if (node < 0 || node > USHRT_MAX || !GetNumaNodeProcessorMaskEx((USHORT)node, &there) ||
        !there.Mask)
        return NULL;
    struct oo_binding *binding = malloc(sizeof *binding);
    if (binding && SetThreadGroupAffinity(GetCurrentThread(), &there, &binding->before))
        return binding;
    free(binding);
    return NULL;
}

void oo__thread_unbind(struct oo_binding *binding) {
    if (binding)
        (void)SetThreadGroupAffinity(GetCurrentThread(), &binding->before, NULL);
    free(binding);
}

int oo__driver_submits_late(void) { return 1; } /* cards in TCC mode do not: device.c asks */

void *oo__library_open(const char *path) { return (void *)LoadLibraryExA(path, NULL, 0); }

void *oo__library_open_cuda(void) {
    /* The system folder only: an nvcuda.dll next to the program would be a planted one. */
    return (void *)LoadLibraryExA(oo__cuda_library_name, NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
}

const char *oo__library_error(char *text, size_t capacity) {
    snprintf(text, capacity, "Windows error %lu", (unsigned long)GetLastError());
    return text;
}

void *oo__library_symbol(void *library, const char *name) {
    return (void *)(uintptr_t)GetProcAddress((HMODULE)library, name);
}

#else
typedef int oo__win32_unused; /* an empty translation unit is not ISO C */
#endif
