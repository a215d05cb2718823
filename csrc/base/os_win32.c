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

/* ---- files ---- */

/* What a call of the system's has refused, as the C library says it. */
static int oo__refused(void) {
    static const struct {
        DWORD windows;
        int why;
    } known[] = {
        {ERROR_FILE_NOT_FOUND, ENOENT},    {ERROR_PATH_NOT_FOUND, ENOENT},
        {ERROR_ACCESS_DENIED, EACCES},     {ERROR_SHARING_VIOLATION, EACCES},
        {ERROR_LOCK_VIOLATION, EACCES},    {ERROR_TOO_MANY_OPEN_FILES, EMFILE},
        {ERROR_INVALID_HANDLE, EBADF},     {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},
        {ERROR_COMMITMENT_LIMIT, ENOMEM},  {ERROR_NO_SYSTEM_RESOURCES, ENOMEM},
        {ERROR_INVALID_PARAMETER, EINVAL}, {ERROR_NOT_SUPPORTED, EINVAL},
        {ERROR_INVALID_FUNCTION, EINVAL},  {ERROR_NOACCESS, EFAULT},
    };
    const DWORD error = GetLastError();
    errno = EIO;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].windows == error)
            errno = known[i].why;
    return -1;
}

/* Overlapped, since the reads of a handle that is not are done one after the other. */
int oo__file_open(const char *path, int direct) {
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const DWORD flags = FILE_FLAG_OVERLAPPED | (direct ? FILE_FLAG_NO_BUFFERING : 0);
    const int length = MultiByteToWideChar(CP_UTF8, 0, path, -1, NULL, 0);
    wchar_t *wide = malloc((size_t)length * sizeof *wide);
    HANDLE file = INVALID_HANDLE_VALUE;
    SetLastError(ERROR_NOT_ENOUGH_MEMORY);
    if (wide && MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, length))
        file = CreateFileW(wide, GENERIC_READ, share, NULL, OPEN_EXISTING, flags, NULL);
    const int opened = file == INVALID_HANDLE_VALUE ? oo__refused() : (int)(intptr_t)file;
    free(wide);
    return opened;
}

void oo__file_close(int file) { CloseHandle(oo__handle(file)); }

int oo__file_state(int file, struct oo_file_state *state) {
    enum { TICKS = 10000000 }; /* of the system's clock in a second */
    BY_HANDLE_FILE_INFORMATION found;
    if (!GetFileInformationByHandle(oo__handle(file), &found))
        return oo__refused();
    const uint64_t written =
        (uint64_t)found.ftLastWriteTime.dwHighDateTime << 32 | found.ftLastWriteTime.dwLowDateTime;
    *state = (struct oo_file_state){
        found.dwVolumeSerialNumber,
        (uint64_t)found.nFileIndexHigh << 32 | found.nFileIndexLow,
        (uint64_t)found.nFileSizeHigh << 32 | found.nFileSizeLow,
        written / TICKS,
        written % TICKS * (1000000000 / TICKS),
    };
    return 0;
}

/* Returns the bytes of one read, or -1 with errno. */
static ptrdiff_t oo__file_read_once(int file, void *target, DWORD bytes, uint64_t begin) {
    OVERLAPPED read = {.Offset = (DWORD)begin, .OffsetHigh = (DWORD)(begin >> 32)};
    DWORD got = 0;
    read.hEvent = CreateEventW(NULL, TRUE, FALSE, NULL);
    if (!read.hEvent)
        return oo__refused();
    const int done = (ReadFile(oo__handle(file), target, bytes, NULL, &read) ||
                      GetLastError() == ERROR_IO_PENDING) &&
                     GetOverlappedResult(oo__handle(file), &read, &got, TRUE);
    const int failed = !done && GetLastError() != ERROR_HANDLE_EOF ? oo__refused() : 0;
    CloseHandle(read.hEvent);
    return failed ? failed : (ptrdiff_t)got;
}

ptrdiff_t oo__file_read(int file, void *target, size_t bytes, uint64_t begin) {
    const size_t most = (size_t)1 << 30; /* a read has 32 bits for its bytes */
    size_t done = 0, wanted = 0;
    ptrdiff_t got;
    do {
        wanted = bytes - done < most ? bytes - done : most;
        got = oo__file_read_once(file, (char *)target + done, (DWORD)wanted, begin + done);
        done += got > 0 ? (size_t)got : 0;
    } while (done < bytes && got == (ptrdiff_t)wanted);
    return got < 0 ? got : (ptrdiff_t)done;
}

/* There is no such hint. */
void oo__file_uncache(int file, uint64_t begin, size_t bytes) {
    (void)file, (void)begin, (void)bytes;
}

/* A view that may be written claims memory for all of it at once, and files are larger than that.
 * So files are mapped to be read alone. The first write to a page is a fault, and lets that page
 * alone be copied on write: what is not read-only any more was written. */
struct oo_view {
    struct oo_view *next;
    char *begin;
    size_t bytes;
};
static SRWLOCK oo__views_lock = SRWLOCK_INIT;
static struct oo_view *oo__views;
static void *oo__views_handler;

/* Where the view of an address hangs; where there is none, it hangs NULL. */
static struct oo_view **oo__view_at(const char *address) {
    struct oo_view **at = &oo__views;
    while (*at && (address < (*at)->begin || address >= (*at)->begin + (*at)->bytes))
        at = &(*at)->next;
    return at;
}

/* Whether any page of it is not read-only any more; -1 with errno. */
static int oo__view_is_written(const char *memory, size_t bytes) {
    MEMORY_BASIC_INFORMATION found;
    const char *at = memory;
    int written = 0;
    while (!written && at < memory + bytes) {
        if (!VirtualQuery(at, &found, sizeof found))
            return oo__refused();
        written = found.Protect != PAGE_READONLY;
        at = (char *)found.BaseAddress + found.RegionSize;
    }
    return written;
}

/* The code that it interrupts may ask next why an earlier call failed. */
static LONG CALLBACK oo__view_fault(EXCEPTION_POINTERS *what) {
    enum { IS_WRITE, ADDRESS, KNOWN };
    const EXCEPTION_RECORD *record = what->ExceptionRecord;
    LONG answer = EXCEPTION_CONTINUE_SEARCH;
    DWORD before;
    if (record->ExceptionCode != (DWORD)EXCEPTION_ACCESS_VIOLATION ||
        record->NumberParameters < KNOWN || record->ExceptionInformation[IS_WRITE] != 1)
        return answer;
    const DWORD error = GetLastError();
    char *at = (char *)record->ExceptionInformation[ADDRESS];
    AcquireSRWLockExclusive(&oo__views_lock); /* two threads may have written the same page */
    if (*oo__view_at(at) &&
        (oo__view_is_written(at, 1) > 0 || VirtualProtect(at, 1, PAGE_WRITECOPY, &before)))
        answer = EXCEPTION_CONTINUE_EXECUTION;
    ReleaseSRWLockExclusive(&oo__views_lock);
    SetLastError(error);
    return answer;
}

/* The first handler asked: others report each fault as the program's end. */
static int oo__view_note(struct oo_view *view, void *pages, size_t bytes) {
    AcquireSRWLockExclusive(&oo__views_lock);
    if (!oo__views)
        oo__views_handler = AddVectoredExceptionHandler(1, oo__view_fault);
    const int noted = oo__views_handler != NULL;
    if (noted) {
        *view = (struct oo_view){oo__views, pages, bytes};
        oo__views = view;
    }
    ReleaseSRWLockExclusive(&oo__views_lock);
    return noted;
}

static void oo__view_forget(const void *pages) {
    AcquireSRWLockExclusive(&oo__views_lock);
    struct oo_view **at = oo__view_at(pages), *view = *at;
    if (view) {
        *at = view->next;
        if (!oo__views)
            RemoveVectoredExceptionHandler(oo__views_handler);
    }
    ReleaseSRWLockExclusive(&oo__views_lock);
    free(view);
}

/* A view of a section, and whether a page of it may become this process's own. Where the system
 * lets only pages become so that could be written from the start, memory is claimed for all. */
static char *oo__view_of(HANDLE section, size_t bytes) {
    static const DWORD accesses[] = {FILE_MAP_READ, FILE_MAP_COPY};
    for (size_t i = 0; i < sizeof accesses / sizeof *accesses; i++) {
        DWORD before;
        char *pages = MapViewOfFile(section, accesses[i], 0, 0, bytes);
        if (pages && VirtualProtect(pages, 1, PAGE_WRITECOPY, &before) &&
            VirtualProtect(pages, bytes, PAGE_READONLY, &before))
            return pages;
        (void)oo__refused();
        if (pages)
            UnmapViewOfFile(pages);
    }
    return NULL;
}

void *oo__file_map(int file, size_t bytes) {
    struct oo_view *view = malloc(sizeof *view);
    const HANDLE section = CreateFileMappingW(oo__handle(file), NULL, PAGE_READONLY, 0, 0, NULL);
    char *pages = NULL;
    errno = ENOMEM;
    if (!section)
        (void)oo__refused();
    else if (view)
        pages = oo__view_of(section, bytes);
    if (section)
        CloseHandle(section); /* the view keeps it */
    if (pages && oo__view_note(view, pages, bytes))
        return pages;
    if (pages)
        UnmapViewOfFile(pages);
    free(view);
    return NULL;
}

/* Of other memory Windows says so only while its pages are in memory. */
int oo__pages_written(const void *memory, size_t bytes) {
    AcquireSRWLockShared(&oo__views_lock);
    const int is_view = *oo__view_at(memory) != NULL;
    ReleaseSRWLockShared(&oo__views_lock);
    errno = ENOSYS;
    return is_view ? oo__view_is_written(memory, bytes) : -1;
}

void oo__pages_unmap(void *pages, size_t bytes) {
    (void)bytes;
    oo__view_forget(pages);
    if (!VirtualFree(pages, 0, MEM_RELEASE)) /* then it is a section's or a file's */
        UnmapViewOfFile(pages);
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
