/* os.h - what is asked of the operating system: os_posix.c, os_win32.c. */
#ifndef OO_OS_H
#define OO_OS_H

#include <stddef.h>
#include <stdint.h>

/* Page-aligned zeroed memory; NULL when there is none. */
void *oo__pages_map(size_t bytes);
/* Memory that processes share: zeros, without a name, gone with the last process that has it open
 * or mapped, killed or not. On Linux a file in memory, on Windows a section of the page file.
 * Returns what it goes by in this process, a descriptor or a handle (of which Windows uses 31
 * bits), or -1 with errno. A child has it not. */
int oo__section_create(size_t bytes);
/* The section that goes by `theirs` in another process of this user; as above. */
int oo__section_take(unsigned process, int theirs);
void oo__section_close(int section);
/* Pages of a file or a section from `begin` on, a multiple of a page (on Windows, of 64 KiB), which
 * every process that maps them sees alike; NULL with errno. `file` is a descriptor, on Windows a
 * section. */
void *oo__pages_map_shared(size_t bytes, int file, uint64_t begin);
/* Let whole pages be written from now on, or read alone. Returns 0, or -1 with errno. */
int oo__pages_protect(void *pages, size_t bytes, int writable);
/* A hint for whole pages that have not been touched yet. */
void oo__pages_ask_huge(void *pages, size_t bytes);
uint64_t oo__nanoseconds(void); /* of a clock that never goes back */
void oo__pages_unmap(void *pages, size_t bytes);
/* Locked pages must not cross a fork: the kernel would copy them eagerly (3.3 s and 1 GiB per GiB,
 * measured). `keep` 0 hides the pages from children, 1 ends that. Returns 0 or -1. */
int oo__pages_inherit(void *pages, size_t bytes, int keep);
/* Whether any page of a private, copy-on-write mapping of a file has been written, and so left the
 * file: 1, 0, or -1 where the system does not say. */
int oo__pages_written(const void *memory, size_t bytes);
/* Let all pages of a mapping show a file from `begin` on, a multiple of a page: privately, and
 * copied on write. Returns 0, or -1 with errno. On Windows only what is a section's already, and in
 * two steps: it must not be read meanwhile, and on -1 it may be gone. */
int oo__pages_show(void *pages, size_t bytes, int file, uint64_t begin);
/* Copy the pages of a private mapping, where they are, to memory that is no file's. A thread that
 * writes them meanwhile may write to pages that are then dropped. Returns 0, or -1 where there is
 * no memory or the system has no such call; then they are as they were. */
int oo__pages_own(void *memory, size_t bytes);
size_t oo__page_bytes(void);

/* Which file it is, and of when: another where it was written or cut off. Of numbers of one size,
 * so that its bytes can be compared. */
struct oo_file_state {
    uint64_t device, inode, size, written_s, written_ns;
};
/* Open a file for reading: a descriptor that a child started by exec has not, or -1 with errno.
 * `direct`: past the system's cache, into whole pages and from multiples of a page alone; some file
 * systems refuse that here, or with EINVAL as it is read. On Windows neither, nor what follows. */
int oo__file_open(const char *path, int direct);
void oo__file_close(int file);
/* Of an open file. Returns 0, or -1 with errno. */
int oo__file_state(int file, struct oo_file_state *state);
/* Read from `begin` on. Returns the bytes that were read, fewer only where the file ends, or -1
 * with errno. */
ptrdiff_t oo__file_read(int file, void *target, size_t bytes, uint64_t begin);
/* A hint: what the system has cached of it is of no further use. */
void oo__file_uncache(int file, uint64_t begin, size_t bytes);
/* All of a file, privately, and copied on write; no memory is claimed for that. NULL with errno. */
void *oo__file_map(int file, size_t bytes);

/* A flag page that reads 0 in a forked child, so that telling parent from child costs one load. */
struct oo_fork_guard;
struct oo_fork_guard *oo__fork_guard_create(void);
void oo__fork_guard_destroy(struct oo_fork_guard *guard);
int oo__fork_guard_in_child(const struct oo_fork_guard *guard);

struct oo_mutex;
struct oo_mutex *oo__mutex_create(void);
void oo__mutex_destroy(struct oo_mutex *mutex);
void oo__mutex_lock(struct oo_mutex *mutex);
int oo__mutex_try(struct oo_mutex *mutex); /* 1 when taken */
void oo__mutex_unlock(struct oo_mutex *mutex);
/* Give the taken mutex up until a thread wakes the waiters or the clock shows `until_s`, then take
 * it again; may return for no reason. */
void oo__mutex_wait(struct oo_mutex *mutex, double until_s);
void oo__mutex_wake(struct oo_mutex *mutex); /* all threads that wait */
double oo__clock_s(void);

struct oo_thread;
struct oo_thread *oo__thread_start(void (*run)(void *), void *argument); /* NULL: none to be had */
void oo__thread_join(struct oo_thread *thread);
size_t oo__processors(void);

/* The NUMA node that a PCI device is nearest to; -1 where the system does not say: on Windows
 * never. `sys` is OO_SYS, but for tests. */
#define OO_SYS "/sys"
int oo__numa_node(const char *sys, const char *pci_id);
/* Run the calling thread on the node's processors alone, as far as it may run there at all, until
 * oo__thread_unbind. Pages that it touches first are in the node's memory. NULL where nothing
 * changes.
 */
struct oo_binding;
struct oo_binding *oo__thread_bind(const char *sys, int node);
void oo__thread_unbind(struct oo_binding *binding);

/* Whether CUDA's driver uses Windows' display driver model, which collects work before it hands it
 * to the device: on Windows, and on Linux inside it (WSL2). */
int oo__driver_submits_late(void);

void *oo__library_open(const char *path); /* NULL when it cannot be loaded */
const char *oo__library_error(char *text, size_t capacity);
void *oo__library_symbol(void *library, const char *name);
/* The system's CUDA driver: "libcuda.so.1" or "nvcuda.dll". */
void *oo__library_open_cuda(void);
extern const char *const oo__cuda_library_name;

#endif
