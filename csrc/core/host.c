/* host.c - memory for masters: create, fill, free. */
#include "host.h"
#include "../base/os.h"
#include "../base/status.h"
#include "disk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { OO_COPY_THREADS = 8 };
static const size_t oo__share_bytes = (size_t)4
                                      << 20; /* below this a thread costs more than it saves */

/* A record without pages. */
static enum oo_status oo__host_record(size_t bytes, struct oo_host **out) {
    *out = NULL;
    const size_t page = oo__page_bytes();
    if (bytes == 0 || bytes > SIZE_MAX - page)
        return oo__fail(OO_E_ARGUMENT, "host memory of %zu bytes was asked for", bytes);
    struct oo_host *host = calloc(1, sizeof *host);
    if (!host)
        return oo__fail(OO_E_MEMORY, "no memory for a host buffer's record");
    host->bytes = bytes;
    host->mapped_bytes = (bytes + page - 1) / page * page;
    host->node = -1;
    host->sys = OO_SYS;
    host->mutex = oo__mutex_create();
    if (!host->mutex) {
        free(host);
        return oo__fail(OO_E_MEMORY, "no memory for a host buffer's record");
    }
    *out = host;
    return OO_OK;
}

static void oo__host_forget(struct oo_host *host) {
    oo__mutex_destroy(host->mutex);
    free(host);
}

/* Keep the pages, or drop the record where there are none. */
static int oo__host_take(struct oo_host **host, void *pages) {
    (*host)->pages = pages;
    if (!pages) {
        oo__host_forget(*host);
        *host = NULL;
    }
    return pages != NULL;
}

enum oo_status oo_host_create(size_t bytes, struct oo_host **out) {
    const enum oo_status status = oo__host_record(bytes, out);
    if (!*out)
        return status;
    if (!oo__host_take(out, oo__pages_map((*out)->mapped_bytes)))
        return oo__fail(OO_E_MEMORY, "the system has no %.3f GiB of memory left for weights",
                        (double)bytes / (double)((size_t)1 << 30));
    return OO_OK;
}

enum oo_status oo_host_create_shared(size_t bytes, int file, uint64_t begin, struct oo_host **out) {
    const enum oo_status status = oo__host_record(bytes, out);
    if (!*out)
        return status;
    if (!oo__host_take(out, oo__pages_map_shared((*out)->mapped_bytes, file, begin)))
        return oo__fail(OO_E_STATE, "the system does not map %zu bytes of shared memory: %s", bytes,
                        strerror(errno));
    return OO_OK;
}

enum oo_status oo_host_create_file(const char *path, int file, struct oo_host **out) {
    struct oo_disk *disk = NULL;
    enum oo_status status;
    *out = NULL;
    OO_TRY(oo__disk_open(path, file, &disk));
    status = oo__host_record((size_t)disk->state.size, out);
    if (!*out)
        goto done;
    if (!oo__host_take(out, oo__file_map(disk->buffered, (*out)->bytes))) {
        status = oo__fail(OO_E_FILE, "'%s' cannot be mapped: %s", path, strerror(errno));
        goto done;
    }
    if (oo__pages_written((*out)->pages, 1) < 0) {
        status = oo__fail(OO_E_FILE,
                          "the system does not say which pages of '%s' were written "
                          "(/proc/self/pagemap: %s)",
                          path, strerror(errno));
        oo__pages_unmap((*out)->pages, (*out)->mapped_bytes);
        oo__host_forget(*out);
        *out = NULL;
        goto done;
    }
    (*out)->disk = disk;
    return OO_OK;
done:
    oo__disk_free(disk);
    return status;
}

enum oo_status oo_host_protect(struct oo_host *host, int writable) {
    if (oo__pages_protect(host->pages, host->mapped_bytes, writable) != 0)
        return oo__fail(OO_E_STATE, "the system does not let memory be %s: %s",
                        writable ? "written" : "read alone", strerror(errno));
    return OO_OK;
}

void oo__host_free(struct oo_host *host) {
    oo__pages_unmap(host->pages, host->mapped_bytes);
    oo__disk_free(host->disk);
    oo__host_forget(host);
}

void *oo_host_address(const struct oo_host *host) { return host->pages; }
size_t oo_host_bytes(const struct oo_host *host) { return host->bytes; }
int oo_host_locked(const struct oo_host *host) { return host->locked > 0; }
int oo_host_known(const struct oo_host *host) { return host->known != NULL; }
void oo_host_prefer_node(struct oo_host *host, int node) { host->node = node; }

struct oo_share {
    const struct oo_host *host;
    char *target;
    const char *source;
    size_t bytes;
    struct oo_thread *thread;
};

static void oo__share_copy(void *argument) {
    const struct oo_share *share = argument;
    struct oo_binding *binding = oo__thread_bind(share->host->sys, share->host->node);
    memcpy(share->target, share->source, share->bytes);
    oo__thread_unbind(binding);
}

static void oo__copy_in_shares(const struct oo_host *host, void *target, const void *source,
                               size_t bytes) {
    struct oo_share shares[OO_COPY_THREADS];
    const size_t page = oo__page_bytes();
    size_t count = bytes / oo__share_bytes;
    if (count > oo__processors())
        count = oo__processors();
    if (count > OO_COPY_THREADS)
        count = OO_COPY_THREADS;
    if (count == 0)
        count = 1;
    const size_t step = (bytes / count + page - 1) / page * page;
    for (size_t i = 0; i < count; i++) {
        const size_t begin = i * step;
        const size_t end = i + 1 == count ? bytes : (i + 1) * step;
        shares[i].host = host;
        shares[i].target = (char *)target + begin;
        shares[i].source = (const char *)source + begin;
        shares[i].bytes = end - begin;
        /* This thread copies the last share, and any share for which no thread could be started. */
        shares[i].thread = i + 1 < count ? oo__thread_start(oo__share_copy, &shares[i]) : NULL;
        if (!shares[i].thread)
            oo__share_copy(&shares[i]);
    }
    for (size_t i = 0; i < count; i++)
        if (shares[i].thread)
            oo__thread_join(shares[i].thread);
}

/* Huge pages mean fewer faults while filling. But where the system must first compact or touch the
 * memory they are made of, as virtual machines do, they were measured to be several times slower
 * than the small pages it has at hand, and it may run out of fast ones of either kind at any time.
 * So a buffer is filled in stretches; each has the kind of page that was faster when it was last
 * tried, small ones first, then huge ones. */
static const size_t oo__stretch_bytes = (size_t)32 << 20;

static void oo__stretch_begin(struct oo_host *host, size_t number) {
    const size_t start = number * oo__stretch_bytes, left = host->mapped_bytes - start;
    const double small = (double)host->last[0].nanoseconds * (double)host->last[1].bytes;
    const double huge = (double)host->last[1].nanoseconds * (double)host->last[0].bytes;
    host->huge = host->last[0].bytes && (!host->last[1].bytes || huge < small);
    host->last[host->huge].bytes = 0;
    host->last[host->huge].nanoseconds = 0;
    host->stretch = number + 1;
    if (host->huge)
        oo__pages_ask_huge((char *)host->pages + start,
                           left < oo__stretch_bytes ? left : oo__stretch_bytes);
}

enum oo_status oo_host_fill(struct oo_host *host, size_t offset, const void *source, size_t bytes) {
    if (offset > host->bytes || bytes > host->bytes - offset)
        return oo__fail(OO_E_ARGUMENT,
                        "fill of %zu bytes at offset %zu exceeds the buffer of %zu bytes", bytes,
                        offset, host->bytes);
    if (bytes && (!source || bytes > UINTPTR_MAX - (uintptr_t)source))
        return oo__fail(OO_E_ARGUMENT, "there are no %zu bytes at %p to fill from", bytes, source);
    for (size_t part; bytes; bytes -= part) {
        const size_t number = offset / oo__stretch_bytes;
        part = (number + 1) * oo__stretch_bytes - offset;
        part = part < bytes ? part : bytes;
        if (host->stretch != number + 1)
            oo__stretch_begin(host, number);
        const uint64_t begin = oo__nanoseconds();
        oo__copy_in_shares(host, (char *)host->pages + offset, source, part);
        host->last[host->huge].nanoseconds += oo__nanoseconds() - begin;
        host->last[host->huge].bytes += part;
        offset += part;
        source = (const char *)source + part;
    }
    return OO_OK;
}

int oo_section_create(size_t bytes) { return oo__section_create(bytes); }
int oo_section_take(unsigned process, int theirs) { return oo__section_take(process, theirs); }
void oo_section_close(int section) { oo__section_close(section); }

int oo_pages_written(const void *memory, size_t bytes) { return oo__pages_written(memory, bytes); }

int oo_pages_show(void *pages, size_t bytes, int file, uint64_t begin) {
    return oo__pages_show(pages, bytes, file, begin);
}

int oo_pages_own(void *memory, size_t bytes) { return oo__pages_own(memory, bytes); }
