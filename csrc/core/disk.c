/* disk.c - masters that stay in their file.
 *
 * The memory that such masters have is a private mapping of the file, which no copy touches: its
 * pages are what Python reads, now and then, and the system drops them when it needs room. Copy
 * threads read the file itself, past the system's cache where it allows that. A page that code of
 * this process has written is no file's any more, and is copied from memory.
 *
 * The file is open for as long as its memory is there. That it is the same still is asked after
 * each read, so that bytes which were written while they were read are never used: a write changes
 * the time of the file before its first byte. */
#include "disk.h"

#include <errno.h>
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
    if (disk->buffered >= 0)
        oo__file_close(disk->buffered);
    if (disk->direct >= 0)
        oo__file_close(disk->direct);
    free(disk->path);
    free(disk);
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
    disk->direct = oo__file_open(path, 1);
    return OO_OK;
}

struct oo_disk *oo__disk_of(const struct oo_part *part) {
    return part && part->memory ? part->memory->host->disk : NULL;
}

static int oo__disk_is_same(const struct oo_disk *disk);

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
    return oo__pages_written(masters, bytes) > 0 && oo__disk_shows(disk, masters, bytes);
}

size_t oo__disk_skew(const char *masters) { return (uintptr_t)masters % oo__page_bytes(); }

/* ---- a read: by copy threads ---- */

static const char *oo__disk_failed(const struct oo_disk *disk, int error,
                                   struct oo_failure *failure) {
    *failure = (struct oo_failure){.call = "read", .disk = disk, .error = error};
    return NULL;
}

/* What has its name now is the file that is open if it has its number, which no other has for as
 * long as it is. */
static int oo__disk_is_same(const struct oo_disk *disk) {
    struct oo_file_state named = {0};
    (void)oo__path_state(disk->path, &named);
    return oo__same_state(&named, &disk->state);
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

const char *oo__disk_bring(const struct oo_part *part, const char *masters, size_t bytes,
                           char *room, struct oo_failure *failure, int *is_read) {
    const struct oo_disk *disk = part->memory->host->disk;
    const int written = oo__pages_written(masters, bytes);
    const int error = errno;
    *is_read = written == 0;
    if (written < 0) /* perhaps it is, and perhaps no descriptor was left to ask with */
        return oo__disk_failed(disk, error, failure);
    if (written == 0)
        return oo__disk_read(part, masters, bytes, room, failure);
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
    if ((size_t)got < skew + bytes)
        return oo__disk_failed(disk, OO_DISK_SHORT, failure);
    return room + skew;
}

enum oo_status oo__disk_fail(const struct oo_failure *failure) {
    const char *path = failure->disk->path;
    if (failure->error == OO_DISK_CHANGED)
        return oo__fail(OO_E_FILE,
                        "'%s' was written, replaced or deleted since its weights were attached, "
                        "and they are still read from it: put the file back as it was, with its "
                        "time, or detach, and attach again from one that stays",
                        path);
    if (failure->error == OO_DISK_SHORT)
        return oo__fail(OO_E_FILE,
                        "a read of '%s' ended before its bytes had come: the disk, or what is in "
                        "front of it, fails; the next step reads again",
                        path);
    return oo__fail(OO_E_FILE, "'%s' cannot be read: %s; the next step reads again", path,
                    strerror(failure->error));
}
