/* disk.h - masters that stay in their file, and are read from there each time they travel. */
#ifndef OO_DISK_H
#define OO_DISK_H

#include "../base/os.h"
#include "host.h"
#include "state.h"

/* Bytes of the file that are kept in memory too, page by page, once they have been read. */
struct oo_kept {
    const char *masters; /* where the file's pages show them */
    size_t bytes;
    struct oo_host *room; /* which memory */
    char *place;          /* of the first of them in it */
    int locked;           /* there, for the engine; written while nothing is fed */
    _Atomic size_t arrived;
    _Atomic unsigned char pages[]; /* of those that show them: what is known of each */
};

/* The file that a host memory's pages show, privately: from the first page on, all of it. */
struct oo_disk {
    char *path;                 /* that it was opened by, for messages */
    struct oo_file_state state; /* when it was opened: later it must be the same */
    int buffered, direct;       /* descriptors; `direct` -1: the system refuses to read so */
    _Atomic int refused;        /* it did when something was read */
    struct oo_kept **kept;      /* by their masters' addresses, which rise */
    size_t n_kept, kept_capacity;
    /* oo__file_read, but for tests. */
    ptrdiff_t (*read)(int file, void *target, size_t bytes, uint64_t begin);
};

/* Open the file that has this path, which shall be that of the descriptor: OO_E_FILE. What there is
 * of a record is to be freed in any case. */
enum oo_status oo__disk_open(const char *path, int file, struct oo_disk **disk);
/* The disk that the bytes of a part are on; NULL: they are in memory. */
struct oo_disk *oo__disk_of(const struct oo_part *part);
/* NULL is allowed. */
void oo__disk_free(struct oo_disk *disk);

/* Keep bytes of the file, which is this memory's, in `room`. */
enum oo_status oo__kept_add(struct oo_host *file, const struct oo_keeping *kept,
                            struct oo_host *room);
/* That of which all these masters are part; NULL: they are read each time. */
struct oo_kept *oo__kept_at(const struct oo_disk *disk, const char *masters, size_t bytes);
/* Keep these as memory shows them, whether a part reads them or not. */
void oo__disk_keep_shown(const struct oo_disk *disk, struct oo_kept *kept, const char *masters,
                         size_t bytes);
/* What is kept of the file in `room` is so no more, or anywhere (NULL); no engine copies it. */
void oo__kept_forget(struct oo_disk *disk, const struct oo_host *room);

/* Whether code of this process has written any page of these masters: then memory alone has what
 * they are, and no file. -1: that is not known, or memory has not all of them any more. */
int oo__disk_written(const struct oo_disk *disk, const char *masters, size_t bytes);
/* Bytes in front of masters in their first page, which come with them. */
size_t oo__disk_skew(const char *masters);
/* Read masters, and what is around them in their pages, into whole pages at `room`. Returns where
 * they are there; NULL: `failure`. */
const char *oo__disk_read(const struct oo_part *part, const char *masters, size_t bytes, char *room,
                          struct oo_failure *failure);
/* The same, or from memory: where some page of them was written, by way of `room`; where they are
 * kept, from there if that is locked. */
const char *oo__disk_bring(const struct oo_engine *engine, const struct oo_part *part,
                           const char *masters, size_t bytes, char *room,
                           struct oo_failure *failure, int *is_read);
/* What such a failure was, in words: OO_E_FILE. */
enum oo_status oo__disk_fail(const struct oo_failure *failure);

#endif
