/* os_posix.c - Linux and other POSIX systems. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include "os.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

const char *const oo__cuda_library_name = "libcuda.so.1";

size_t oo__page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

void *oo__pages_map(size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

#if defined(__linux__)

int oo__section_create(size_t bytes) {
    const int made =
        (int)syscall(SYS_memfd_create, "oracle_offload", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    /* Else a process could cut off what another reads. */
    if (made < 0 ||
        (ftruncate(made, (off_t)bytes) == 0 && fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK) == 0))
        return made;
    const int why = errno;
    close(made);
    errno = why;
    return -1;
}

/* The system asks whether this user may look at the other process. */
int oo__section_take(unsigned process, int theirs) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", process, theirs);
    return open(path, O_RDWR | O_CLOEXEC);
}

#else

int oo__section_create(size_t bytes) {
    (void)bytes;
    errno = ENOSYS;
    return -1;
}

int oo__section_take(unsigned process, int theirs) {
    (void)process, (void)theirs;
    errno = ENOSYS;
    return -1;
}

#endif

void oo__section_close(int section) { close(section); }

void *oo__pages_map_shared(size_t bytes, int file, uint64_t begin) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)begin);
    return pages == MAP_FAILED ? NULL : pages;
}

int oo__pages_protect(void *pages, size_t bytes, int writable) {
    return mprotect(pages, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

void oo__pages_ask_huge(void *pages, size_t bytes) {
#ifdef MADV_HUGEPAGE
    (void)madvise(pages, bytes, MADV_HUGEPAGE);
#else
    (void)pages, (void)bytes;
#endif
}

uint64_t oo__nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void oo__pages_unmap(void *pages, size_t bytes) { (void)munmap(pages, bytes); }

int oo__pages_inherit(void *pages, size_t bytes, int keep) {
#ifdef MADV_DONTFORK
    return madvise(pages, bytes, keep ? MADV_DOFORK : MADV_DONTFORK);
#else
    (void)pages, (void)bytes, (void)keep;
    return 0;
#endif
}

#if defined(__linux__)

/* Of a page's 64 bits in /proc/self/pagemap: from 62 on, in memory or swapped; of a file. */
enum { OO_PAGE_HELD = 62, OO_PAGE_OF_FILE = 61, OO_PAGES_READ = 2048 };

/* A written page of a private mapping is no file's any more, and never comes back to it. */
int oo__pages_written(const void *memory, size_t bytes) {
    const size_t page = oo__page_bytes();
    size_t at = (uintptr_t)memory / page;
    const size_t end = ((uintptr_t)memory + bytes + page - 1) / page;
    const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    uint64_t pages[OO_PAGES_READ];
    int written = file < 0 ? -1 : 0;
    while (written == 0 && at < end) {
        const size_t wanted = end - at < OO_PAGES_READ ? end - at : OO_PAGES_READ;
        const ssize_t got = pread(file, pages, wanted * sizeof *pages, (off_t)(at * sizeof *pages));
        if (got < (ssize_t)sizeof *pages)
            written = -1;
        for (size_t i = 0; written == 0 && i < (size_t)got / sizeof *pages; i++, at++)
            written = (pages[i] >> OO_PAGE_HELD) && !(pages[i] >> OO_PAGE_OF_FILE & 1);
    }
    if (file >= 0)
        close(file);
    return written;
}

int oo__pages_show(void *pages, size_t bytes, int file, uint64_t begin) {
    const int flags = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
    return mmap(pages, bytes, PROT_READ | PROT_WRITE, flags, file, (off_t)begin) == MAP_FAILED ? -1
                                                                                               : 0;
}

int oo__pages_own(void *memory, size_t bytes) {
    const size_t page = oo__page_bytes(), skipped = (uintptr_t)memory % page;
    char *pages = (char *)memory - skipped;
    const size_t whole = (skipped + bytes + page - 1) / page * page;
    char *own = oo__pages_map(whole);
    if (!own)
        return -1;
    memcpy(own, pages, whole);
    /* In one step: a thread that reads meanwhile finds the one or the other. */
    if (mremap(own, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, pages) == MAP_FAILED) {
        oo__pages_unmap(own, whole);
        return -1;
    }
    return 0;
}

#else

int oo__pages_written(const void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    return -1;
}

int oo__pages_show(void *pages, size_t bytes, int file, uint64_t begin) {
    (void)pages, (void)bytes, (void)file, (void)begin;
    errno = ENOSYS;
    return -1;
}

int oo__pages_own(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    return -1;
}

#endif

int oo__file_open(const char *path, int direct) {
#ifdef O_DIRECT
    return open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
#else
    errno = EINVAL;
    return direct ? -1 : open(path, O_RDONLY | O_CLOEXEC);
#endif
}

void oo__file_close(int file) { close(file); }

int oo__file_state(int file, struct oo_file_state *state) {
    struct stat found = {0};
    const int failed = fstat(file, &found);
#if defined(__APPLE__)
    const struct timespec written = found.st_mtimespec;
#else
    const struct timespec written = found.st_mtim;
#endif
    if (!failed)
        *state = (struct oo_file_state){(uint64_t)found.st_dev, (uint64_t)found.st_ino,
                                        (uint64_t)found.st_size, (uint64_t)written.tv_sec,
                                        (uint64_t)written.tv_nsec};
    return failed;
}

ptrdiff_t oo__file_read(int file, void *target, size_t bytes, uint64_t begin) {
    ptrdiff_t got;
    do
        got = pread(file, target, bytes, (off_t)begin);
    while (got < 0 && errno == EINTR);
    return got;
}

void oo__file_uncache(int file, uint64_t begin, size_t bytes) {
#ifdef POSIX_FADV_DONTNEED
    (void)posix_fadvise(file, (off_t)begin, (off_t)bytes, POSIX_FADV_DONTNEED);
#else
    (void)file, (void)begin, (void)bytes;
#endif
}

void *oo__file_map(int file, size_t bytes) {
#ifdef MAP_NORESERVE
    const int flags = MAP_PRIVATE | MAP_NORESERVE;
#else
    const int flags = MAP_PRIVATE;
#endif
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

struct oo_fork_guard {
    volatile int *alive; /* on a page that the kernel wipes in children */
    pid_t pid;           /* where it cannot: compared instead */
    int wiped;
};

struct oo_fork_guard *oo__fork_guard_create(void) {
    struct oo_fork_guard *guard = calloc(1, sizeof *guard);
    if (!guard)
        return NULL;
    void *page = oo__pages_map(oo__page_bytes());
    if (!page) {
        free(guard);
        return NULL;
    }
    guard->alive = page;
    *guard->alive = 1;
    guard->pid = getpid();
#ifdef MADV_WIPEONFORK
    guard->wiped = madvise(page, oo__page_bytes(), MADV_WIPEONFORK) == 0;
#endif
    return guard;
}

void oo__fork_guard_destroy(struct oo_fork_guard *guard) {
    if (!guard)
        return;
    oo__pages_unmap((void *)(uintptr_t)guard->alive, oo__page_bytes());
    free(guard);
}

int oo__fork_guard_in_child(const struct oo_fork_guard *guard) {
    return guard->wiped ? *guard->alive == 0 : getpid() != guard->pid;
}

struct oo_mutex {
    pthread_mutex_t mutex;
    pthread_cond_t woken;
};

struct oo_mutex *oo__mutex_create(void) {
    struct oo_mutex *mutex = malloc(sizeof *mutex);
    if (!mutex)
        return NULL;
    if (pthread_mutex_init(&mutex->mutex, NULL) != 0) {
        free(mutex);
        return NULL;
    }
    if (pthread_cond_init(&mutex->woken, NULL) != 0) {
        pthread_mutex_destroy(&mutex->mutex);
        free(mutex);
        return NULL;
    }
    return mutex;
}

void oo__mutex_destroy(struct oo_mutex *mutex) {
    if (!mutex)
        return;
    pthread_cond_destroy(&mutex->woken);
    pthread_mutex_destroy(&mutex->mutex);
    free(mutex);
}

void oo__mutex_lock(struct oo_mutex *mutex) { pthread_mutex_lock(&mutex->mutex); }
int oo__mutex_try(struct oo_mutex *mutex) { return pthread_mutex_trylock(&mutex->mutex) == 0; }
void oo__mutex_unlock(struct oo_mutex *mutex) { pthread_mutex_unlock(&mutex->mutex); }

void oo__mutex_wait(struct oo_mutex *mutex, double until_s) {
    const time_t seconds = (time_t)until_s;
    const struct timespec until = {seconds, (long)((until_s - (double)seconds) * 1e9)};
    (void)pthread_cond_timedwait(&mutex->woken, &mutex->mutex, &until);
}

void oo__mutex_wake(struct oo_mutex *mutex) { pthread_cond_broadcast(&mutex->woken); }

double oo__clock_s(void) { /* the one that pthread_cond_timedwait goes by */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct oo_thread {
    pthread_t id;
    void (*run)(void *);
    void *argument;
};

static void *oo__thread_main(void *argument) {
    struct oo_thread *thread = argument;
    thread->run(thread->argument);
    return NULL;
}

struct oo_thread *oo__thread_start(void (*run)(void *), void *argument) {
    struct oo_thread *thread = malloc(sizeof *thread);
    if (!thread)
        return NULL;
    thread->run = run;
    thread->argument = argument;
    if (pthread_create(&thread->id, NULL, oo__thread_main, thread) != 0) {
        free(thread);
        return NULL;
    }
    return thread;
}

void oo__thread_join(struct oo_thread *thread) {
    pthread_join(thread->id, NULL);
    free(thread);
}

size_t oo__processors(void) {
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? (size_t)count : 1;
}

#if defined(__linux__)

/* The first line of a small file, without its end; 0 where there is none. */
static int oo__read_line(const char *path, char *line, int capacity) {
    FILE *file = fopen(path, "r");
    const int found = file && fgets(line, capacity, file) != NULL;
    if (file)
        (void)fclose(file);
    return found;
}

int oo__numa_node(const char *sys, const char *pci_id) {
    char path[512], line[32], *end;
    const int length = snprintf(path, sizeof path, "%s/bus/pci/devices/", sys);
    snprintf(path + length, sizeof path - (size_t)length, "%s/numa_node", pci_id);
    for (char *at = path + length; *at; at++)
        *at = (char)tolower((unsigned char)*at);
    if (!oo__read_line(path, line, sizeof line))
        return -1;
    const long node = strtol(line, &end, 10);
    return end == line || node < 0 || node > INT_MAX ? -1 : (int)node;
}

struct oo_binding {
    cpu_set_t before;
};

/* A list like "0-7,16-23", as far as it can be read. */
static void oo__read_processors(const char *list, cpu_set_t *processors) {
    CPU_ZERO(processors);
    for (char *end; *list >= '0' && *list <= '9'; list = *end == ',' ? end + 1 : end) {
        const unsigned long first = strtoul(list, &end, 10);
        const unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
        for (unsigned long i = 0; i < CPU_SETSIZE; i++)
            if (first <= i && i <= last)
                CPU_SET(i, processors);
    }
}

struct oo_binding *oo__thread_bind(const char *sys, int node) {
    char path[512], list[4096];
    cpu_set_t there;
    snprintf(path, sizeof path, "%s/devices/system/node/node%d/cpulist", sys, node);
    if (!oo__read_line(path, list, sizeof list)) /* no such node, and none is -1 */
        return NULL;
    struct oo_binding *binding = malloc(sizeof *binding);
    if (!binding)
        return NULL;
    oo__read_processors(list, &there);
    if (sched_getaffinity(0, sizeof binding->before, &binding->before) == 0) {
        CPU_AND(&there, &there, &binding->before);
        if (sched_setaffinity(0, sizeof there, &there) == 0) /* not to no processor */
            return binding;
    }
    free(binding);
    return NULL;
}

void oo__thread_unbind(struct oo_binding *binding) {
    if (binding)
        (void)sched_setaffinity(0, sizeof binding->before, &binding->before);
    free(binding);
}

#else

int oo__numa_node(const char *sys, const char *pci_id) {
    (void)sys, (void)pci_id;
    return -1;
}

struct oo_binding *oo__thread_bind(const char *sys, int node) {
    (void)sys, (void)node;
    return NULL;
}

void oo__thread_unbind(struct oo_binding *binding) { (void)binding; }

#endif

int oo__driver_submits_late(void) { return access("/dev/dxg", F_OK) == 0; }

void *oo__library_open(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
void *oo__library_open_cuda(void) { return oo__library_open(oo__cuda_library_name); }

const char *oo__library_error(char *text, size_t capacity) {
    const char *error = dlerror();
    snprintf(text, capacity, "%s", error ? error : "no reason given");
    return text;
}

void *oo__library_symbol(void *library, const char *name) { return dlsym(library, name); }

#else
typedef int oo__posix_unused; /* an empty translation unit is not ISO C */
#endif
