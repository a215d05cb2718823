/* disk.c - masters that stay in their file.
 *
 * The memory that such masters have is a private mapping of the file, which no copy touches: its
 * pages are what Python reads, now and then, and the system drops them when it needs room. Copy
 * threads read the file itself, past the system's cache where it allows that. A page that code of
 * this process has written is no file's any more, and is copied from memory.
 *
 * Some of it may have a place in memory (oo_engine_keep_in). What is read of that is kept there,
 * and is copied from there henceforth: so it is read once, by the first use, and not before that.
 * It is a copy of the file's bytes, which are the masters as long as no one writes their pages.
 *
 * The file is open for as long as its memory is there: what is done with its name, by a rename or a
 * delete, changes none of its bytes. That no one has written it is asked after each read, so that
 * bytes which were written while they were read are never used: a write changes the time of the
 * file before its first byte. */
#include "disk.h"
#include "simulated.h"
#include "staging.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Why a read failed where the system gave no reason. */
enum { OO_DISK_CHANGED = -1, OO_DISK_SHORT = -2 };

static int oo__same_state(const struct oo_file_state *a, const struct oo_file_state *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

void oo__disk_free(struct oo_disk *disk) {
    if (!disk)
        return;
    oo__kept_forget(disk, NULL);
    free(disk->kept);
    if (disk->buffered >= 0)
        oo__file_close(disk->buffered);
    if (disk->direct >= 0)
        oo__file_close(disk->direct);
    free(disk->path);
    free(disk);
}

/* Open it once more, past the cache; -1 in `direct` where the file system has no such reads. */
static enum oo_status oo__disk_open_direct(struct oo_disk *disk) {
    struct oo_file_state found = {0};
    disk->direct = oo__file_open(disk->path, 1);
    if (disk->direct < 0 && errno != EINVAL)
        return oo__fail(OO_E_FILE, "'%s' cannot be read: %s", disk->path, strerror(errno));
    if (disk->direct >= 0)
        (void)oo__file_state(disk->direct, &found);
    return disk->direct < 0 || oo__same_state(&found, &disk->state)
               ? OO_OK
               : oo__fail(OO_E_FILE, "'%s' was replaced or written while it was opened",
                          disk->path);
}

enum oo_status oo__disk_open(const char *path, int file, struct oo_disk **out) {
    struct oo_file_state caller = {0};
    struct oo_disk *disk = *out = malloc(sizeof *disk);
    if (!disk)
        return oo__fail(OO_E_MEMORY, "no memory for a file's record");
    *disk = (struct oo_disk){.buffered = -1, .direct = -1, .read = oo__file_read};
    const size_t length = strlen(path) + 1;
    disk->path = malloc(length);
    if (!disk->path)
        return oo__fail(OO_E_MEMORY, "no memory for a file's record");
    memcpy(disk->path, path, length);
    disk->buffered = oo__file_open(path, 0);
    if (disk->buffered < 0)
        return oo__fail(OO_E_FILE, "'%s' cannot be read: %s", path, strerror(errno));
    (void)oo__file_state(disk->buffered, &disk->state);
    (void)oo__file_state(file, &caller); /* of no file: it has no size */
    if (!oo__same_state(&disk->state, &caller))
        return oo__fail(OO_E_FILE, "'%s' was replaced or written while it was opened", path);
    return oo__disk_open_direct(disk);
}

struct oo_disk *oo__disk_of(const struct oo_part *part) {
    return part && part->memory ? part->memory->host->disk : NULL;
}

static int oo__disk_is_same(const struct oo_disk *disk) {
    struct oo_file_state now = {0};
    (void)oo__file_state(disk->buffered, &now);
    return oo__same_state(&now, &disk->state);
}

/* Whether memory can be read for them: a page that is not written is the file's, as it is now. */
static int oo__disk_shows(const struct oo_disk *disk, const char *masters, size_t bytes) {
    const size_t page = oo__page_bytes(), skew = oo__disk_skew(masters);
    int all = 1;
    if (oo__disk_is_same(disk))
        return 1;
    for (size_t at = 0; all && at < skew + bytes; at += page)
        all = oo__pages_written(masters - skew + at, 1) > 0;
    return all;
}

int oo__disk_written(const struct oo_disk *disk, const char *masters, size_t bytes) {
    const int written = oo__pages_written(masters, bytes);
    return written > 0 && !oo__disk_shows(disk, masters, bytes) ? -1 : written;
}

size_t oo__disk_skew(const char *masters) { return (uintptr_t)masters % oo__page_bytes(); }

/* ---- what is kept in memory ---- */

/* Of a page: it is in the file alone; a thread copies it; it is in memory, and is not written
 * there any more. */
enum { OO_IN_FILE, OO_COMES, OO_IN_MEMORY };

/* How many of them begin before the address, or there. */
static size_t oo__kept_until(const struct oo_disk *disk, const char *masters) {
    size_t first = 0, last = disk->n_kept;
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        if (disk->kept[middle]->masters <= masters)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

struct oo_kept *oo__kept_at(const struct oo_disk *disk, const char *masters, size_t bytes) {
    const size_t until = oo__kept_until(disk, masters);
    struct oo_kept *kept = until ? disk->kept[until - 1] : NULL;
    return kept && masters + bytes <= kept->masters + kept->bytes ? kept : NULL;
}

static size_t oo__kept_page(const struct oo_kept *kept, const char *masters) {
    return (uintptr_t)masters / oo__page_bytes() - (uintptr_t)kept->masters / oo__page_bytes();
}

void oo__kept_forget(struct oo_disk *disk, const struct oo_host *room) {
    size_t left = 0;
    for (size_t i = 0; i < disk->n_kept; i++)
        if (room && disk->kept[i]->room != room)
            disk->kept[left++] = disk->kept[i];
        else
            free(disk->kept[i]);
    disk->n_kept = left;
}

/* Whether there is none of these bytes yet. */
static int oo__kept_is_new(const struct oo_disk *disk, const char *masters, size_t bytes) {
    const size_t until = oo__kept_until(disk, masters);
    const struct oo_kept *before = until ? disk->kept[until - 1] : NULL;
    const struct oo_kept *behind = until < disk->n_kept ? disk->kept[until] : NULL;
    return (!before || before->masters + before->bytes <= masters) &&
           (!behind || masters + bytes <= behind->masters);
}

enum oo_status oo__kept_add(struct oo_host *file, const struct oo_keeping *keeping,
                            struct oo_host *room) {
    struct oo_disk *disk = file->disk;
    const char *masters = keeping->masters;
    const size_t bytes = keeping->bytes, place = keeping->place;
    if (!disk || room->disk || !bytes || place > room->bytes || bytes > room->bytes - place)
        return oo__fail(OO_E_ARGUMENT,
                        "%zu bytes at %p, of a file or not, cannot be kept at %zu of other memory",
                        bytes, (const void *)masters, place);
    if (!oo__kept_is_new(disk, masters, bytes))
        return oo__fail(OO_E_ARGUMENT, "some of the %zu bytes at %p of a file are kept already",
                        bytes, (const void *)masters);
    if (disk->n_kept == disk->kept_capacity) {
        const size_t capacity = disk->kept_capacity ? 2 * disk->kept_capacity : 64;
        struct oo_kept **larger = realloc(disk->kept, capacity * sizeof *larger);
        if (!larger)
            return oo__fail(OO_E_MEMORY, "no memory for the record of what is kept of a file");
        disk->kept = larger;
        disk->kept_capacity = capacity;
    }
    const size_t pages = (oo__disk_skew(masters) + bytes - 1) / oo__page_bytes() + 1;
    struct oo_kept *kept = calloc(1, sizeof *kept + pages * sizeof *kept->pages);
    if (!kept)
        return oo__fail(OO_E_MEMORY, "no memory for the record of what is kept of a file");
    kept->masters = masters;
    kept->bytes = bytes;
    kept->room = room;
    kept->place = (char *)room->pages + place;
    room->keeps = 1;
    const size_t at = oo__kept_until(disk, masters);
    memmove(disk->kept + at + 1, disk->kept + at, (disk->n_kept - at) * sizeof *disk->kept);
    disk->kept[at] = kept;
    disk->n_kept++;
    return OO_OK;
}

size_t oo_host_arrived(const struct oo_host *room) { return room->arrived; }

/* Where these masters are in memory; NULL: not all of them are. */
static const char *oo__kept_bytes(const struct oo_kept *kept, const char *masters, size_t bytes) {
    const size_t end = oo__kept_page(kept, masters + bytes - 1) + 1;
    for (size_t page = oo__kept_page(kept, masters); page < end; page++)
        /* What the thread that stored this has copied before is seen here. */
        if (atomic_load_explicit(&kept->pages[page], memory_order_acquire) != OO_IN_MEMORY)
            return NULL;
    return kept->place + (masters - kept->masters);
}

/* Keep what was read, each page once: two units may have the same masters, and two chunks a page.
 * All of their pages is here. `read` NULL: no one wants the bytes. */
static void oo__keep(struct oo_kept *kept, const char *masters, size_t bytes, const char *read) {
    const size_t page_bytes = oo__page_bytes();
    const char *const first = kept->masters, *const last = first + kept->bytes;
    const char *begin = masters - oo__disk_skew(masters);
    if (begin < first)
        begin = first;
    for (const char *end; begin < masters + bytes; begin = end) {
        end = begin + (page_bytes - oo__disk_skew(begin));
        if (end > last)
            end = last;
        unsigned char state = OO_IN_FILE;
        _Atomic unsigned char *page = &kept->pages[oo__kept_page(kept, begin)];
        if (!atomic_compare_exchange_strong(page, &state, OO_COMES))
            continue;
        if (read)
            memcpy(kept->place + (begin - first), read + (begin - masters), (size_t)(end - begin));
        atomic_store_explicit(page, OO_IN_MEMORY, memory_order_release);
        kept->arrived += (size_t)(end - begin);
        kept->room->arrived += (size_t)(end - begin);
    }
}

void oo__disk_keep_shown(const struct oo_disk *disk, struct oo_kept *kept, const char *masters,
                         size_t bytes) {
    const size_t page = oo__page_bytes(), skew = oo__disk_skew(masters);
    const size_t whole = (skew + bytes + page - 1) / page * page;
    if (oo__kept_bytes(kept, masters, bytes) || !oo__disk_is_same(disk))
        return; /* what is cut off cannot be touched */
    char *copy = malloc(whole);
    if (!copy) /* then a part of the room never arrives */
        return;
    memcpy(copy, masters - skew, whole);
    if (oo__disk_is_same(disk)) /* after the copy, as after a read */
        oo__keep(kept, masters, bytes, copy + skew);
    free(copy);
}

/* ---- a read: by copy threads ---- */

static const char *oo__disk_failed(const struct oo_disk *disk, int error,
                                   struct oo_failure *failure) {
    *failure = (struct oo_failure){.call = "read", .disk = disk, .error = error};
    return NULL;
}

/* Whole pages past the cache, if the system reads so; else the same, and it caches them no more. */
static ptrdiff_t oo__read_pages(struct oo_disk *disk, char *room, size_t bytes, uint64_t begin) {
    if (disk->direct >= 0 && !disk->refused) {
        const ptrdiff_t got = disk->read(disk->direct, room, bytes, begin);
        if (got >= 0 || (errno != EINVAL && errno != EOPNOTSUPP && errno != EFAULT))
            return got;
        disk->refused = 1;
    }
    const ptrdiff_t got = disk->read(disk->buffered, room, bytes, begin);
    oo__file_uncache(disk->buffered, begin, bytes);
    return got;
}

/* In the time of a simulated disk, of which copies may move no byte. */
static const char *oo__disk_read_and_keep(const struct oo_engine *engine,
                                          const struct oo_part *part, const char *masters,
                                          size_t bytes, char *room, struct oo_failure *failure) {
    int wanted;
    if (!oo__works(failure, "simRead", oo__simulated_read(engine, bytes, &wanted)))
        return NULL;
    const char *read =
        wanted ? oo__disk_read(part, masters, bytes, room, failure) : room + oo__disk_skew(masters);
    if (read && part->kept)
        oo__keep(part->kept, masters, bytes, wanted ? read : NULL);
    return read;
}

static const char *oo__bring_unwritten(const struct oo_engine *engine, const struct oo_part *part,
                                       const char *masters, size_t bytes, char *room,
                                       struct oo_failure *failure, int *is_read) {
    const struct oo_kept *kept = part->kept;
    const char *here = kept ? oo__kept_bytes(kept, masters, bytes) : NULL;
    *is_read = !here;
    if (!here)
        return oo__disk_read_and_keep(engine, part, masters, bytes, room, failure);
    return kept->locked ? here : memcpy(room, here, bytes);
}

const char *oo__disk_bring(const struct oo_engine *engine, const struct oo_part *part,
                           const char *masters, size_t bytes, char *room,
                           struct oo_failure *failure, int *is_read) {
    const struct oo_disk *disk = part->memory->host->disk;
    const int written = oo__pages_written(masters, bytes);
    const int error = errno;
    *is_read = 0;
    if (written < 0) /* perhaps it is, and perhaps no descriptor was left to ask with */
        return oo__disk_failed(disk, error, failure);
    if (written == 0)
        return oo__bring_unwritten(engine, part, masters, bytes, room, failure, is_read);
    if (!oo__disk_shows(disk, masters, bytes)) /* before: what is cut off cannot be touched */
        return oo__disk_failed(disk, OO_DISK_CHANGED, failure);
    memcpy(room, masters, bytes);
    return oo__disk_shows(disk, masters, bytes) ? room
                                                : oo__disk_failed(disk, OO_DISK_CHANGED, failure);
}

const char *oo__disk_read(const struct oo_part *part, const char *masters, size_t bytes, char *room,
                          struct oo_failure *failure) {
    const struct oo_host *host = part->memory->host;
    struct oo_disk *disk = host->disk;
    const size_t page = oo__page_bytes(), skew = oo__disk_skew(masters);
    const uint64_t begin = (uint64_t)(masters - (const char *)host->pages) - skew;
    const size_t whole = (skew + bytes + page - 1) / page * page;
    const ptrdiff_t got = oo__read_pages(disk, room, whole, begin);
    const int error = errno;
    if (!oo__disk_is_same(disk))
        return oo__disk_failed(disk, OO_DISK_CHANGED, failure);
    if (got < 0)
        return oo__disk_failed(disk, error, failure);
    /* All of its pages count, which may be kept. */
    if ((uint64_t)got < (whole < disk->state.size - begin ? whole : disk->state.size - begin))
        return oo__disk_failed(disk, OO_DISK_SHORT, failure);
    return room + skew;
}

enum oo_status oo_host_check(const struct oo_host *host, size_t offset, size_t bytes) {
    if (offset > host->bytes || bytes > host->bytes - offset)
        return oo__fail(OO_E_ARGUMENT, "there are no %zu bytes at %zu of the memory", bytes,
                        offset);
    if (!host->disk || oo__disk_shows(host->disk, (const char *)host->pages + offset, bytes))
        return OO_OK;
    return oo__disk_fail(&(struct oo_failure){.disk = host->disk, .error = OO_DISK_CHANGED});
}

enum oo_status oo__disk_fail(const struct oo_failure *failure) {
    const char *path = failure->disk->path;
    if (failure->error == OO_DISK_CHANGED)
        return oo__fail(OO_E_FILE,
                        "'%s' was written since its weights were attached, and they are still "
                        "read from it: detach, and attach again from a file that stays as it is "
                        "(one that is to replace it may be renamed to its name)",
                        path);
    if (failure->error == OO_DISK_SHORT)
        return oo__fail(OO_E_FILE,
                        "a read of '%s' ended before its bytes had come: the disk, or what is in "
                        "front of it, fails; the next step reads again",
                        path);
    return oo__fail(OO_E_FILE, "'%s' cannot be read: %s; the next step reads again", path,
                    strerror(failure->error));
}
