/* host.h - memory for masters, before any engine knows it. */
#ifndef OO_HOST_H
#define OO_HOST_H

#include "oracle_offload.h"

#include <stddef.h>
#include <stdint.h>

/* Memory for masters, which any number of engines may know (masters.c). */
struct oo_host {
    void *pages;
    size_t bytes;           /* as asked */
    size_t mapped_bytes;    /* in whole pages */
    struct oo_mutex *mutex; /* of the next three; taken after an engine's */
    struct oo_known *known; /* by which engines */
    struct oo_registration *registrations;
    int locked;             /* how many they are */
    int node;               /* that its pages shall be on; -1: on any */
    const char *sys;        /* OO_SYS, but for tests */
    struct oo_disk *disk;   /* the file that its pages show; NULL: they are memory alone */
    int kept;               /* the driver may never release pages of it: they are never freed */
    _Atomic size_t arrived; /* bytes of files that were read and are kept in it */
    int keeps;              /* some is to be: oo_engine_keep_in */
    /* Of filling: see oo__stretch_begin. Index 0 are small pages, 1 huge ones. */
    struct {
        size_t bytes;
        uint64_t nanoseconds;
    } last[2];      /* what the last stretch of either kind took */
    int huge;       /* the kind of the stretch being filled */
    size_t stretch; /* its number, from 1; 0 before the first */
};

/* Free what no engine knows any more. */
void oo__host_free(struct oo_host *host);

#endif
