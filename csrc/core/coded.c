/* coded.c - a whole tensor as coded chunks, by several threads; see coded.h.
 *
 * Threads take the chunks in turn. How many bytes a chunk takes is known once it is encoded, so
 * each is encoded aside and waits for the one before it to have its place. Chunks are decoded where
 * they are stored: their headers say how long they are. The mutex protects what is below it in the
 * job.
 */
#include "coded.h"
#include "../base/os.h"
#include "../base/status.h"

#include <string.h>

enum { OO_CODED_THREADS = 16 };

static const double oo__patience_s = 3600; /* a thread that waits is woken; a clock needs an end */

enum oo_work { OO_ENCODE, OO_DECODE, OO_COMPARE, OO_CHECK };

struct oo_job {
    const struct oo_codec *codec;
    enum oo_codec_kind kind;
    enum oo_work deed;
    size_t count, chunk; /* weights: all, and of a chunk but the last */
    size_t bytes;        /* of the coded tensor; when encoding, what there is room for */
    char *coded;
    char *weights;
    struct oo_mutex *mutex;
    size_t taken, placed; /* weights of the chunks that were begun, and that have their place */
    size_t end;           /* of the last chunk that was placed, or begun */
    enum oo_status status;
    struct oo_error error;
};

static size_t oo__aligned(size_t bytes) {
    return (bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
}

static size_t oo__least(size_t a, size_t b) { return a < b ? a : b; }

/* The thread's error is the job's, unless another thread was first. */
static void oo__give_up(struct oo_job *job, enum oo_status status) {
    oo__mutex_lock(job->mutex);
    if (job->status == OO_OK) {
        job->status = status;
        job->error = oo__error_save();
    }
    oo__mutex_wake(job->mutex);
    oo__mutex_unlock(job->mutex);
}

/* ---- encoding ---- */

/* The next chunk: where its weights begin, and how many they are; 0: none. */
static size_t oo__take_weights(struct oo_job *job, size_t *begin) {
    oo__mutex_lock(job->mutex);
    *begin = job->taken;
    const size_t count = job->status == OO_OK ? oo__least(job->chunk, job->count - job->taken) : 0;
    job->taken += count;
    oo__mutex_unlock(job->mutex);
    return count;
}

/* Once all before it have their places, a chunk has its own: at `*at`, behind a gap from `*gap`. */
static void oo__place(struct oo_job *job, size_t begin, size_t count, size_t bytes, size_t *gap,
                      size_t *at) {
    oo__mutex_lock(job->mutex);
    while (job->placed != begin)
        oo__mutex_wait(job->mutex, oo__clock_s() + oo__patience_s);
    *gap = job->end;
    *at = oo__aligned(job->end);
    job->end = *at + bytes;
    job->placed += count;
    oo__mutex_wake(job->mutex);
    oo__mutex_unlock(job->mutex);
}

static void oo__encode_some(void *argument) {
    struct oo_job *job = argument;
    const size_t width = oo_codec_weight_bytes(job->kind);
    enum oo_status status = OO_OK;
    size_t begin, count, bytes, gap, at;
    const size_t room = oo_codec_room(job->kind, oo__least(job->chunk, job->count));
    char *aside = oo__pages_map(room); /* of a heap, each thread's would keep as much */
    if (!aside) {
        oo__give_up(job, oo__fail(OO_E_MEMORY, "no memory to encode a chunk of weights in"));
        return;
    }
    while (status == OO_OK && (count = oo__take_weights(job, &begin)) != 0) {
        bytes = 0;
        status = oo_codec_encode(job->codec, job->kind, job->weights + begin * width, count, aside,
                                 &bytes);
        /* What failed has its place as well: others wait for theirs behind it. */
        oo__place(job, begin, count, bytes, &gap, &at);
        memset(job->coded + gap, 0, at - gap);
        memcpy(job->coded + at, aside, bytes);
    }
    oo__pages_unmap(aside, room);
    if (status != OO_OK)
        oo__give_up(job, status);
}

/* ---- decoding ---- */

/* A chunk of a coded tensor. */
struct oo_found {
    size_t at, bytes, begin, count; /* `count` 0: there is none */
};

static enum oo_status oo__take_chunk(struct oo_job *job, struct oo_found *found) {
    struct oo_codec_header header;
    *found = (struct oo_found){.at = oo__aligned(job->end), .begin = job->taken};
    if (job->status != OO_OK)
        return OO_OK;
    if (job->taken == job->count)
        return job->end == job->bytes
                   ? OO_OK
                   : oo__fail(OO_E_ARGUMENT, "corrupt: %zu bytes follow the last chunk",
                              job->bytes - job->end);
    const size_t left = job->bytes - oo__least(found->at, job->bytes);
    const enum oo_status status =
        oo_codec_find(job->coded + found->at, left, &header, &found->bytes);
    if (status != OO_OK)
        return status;
    if (header.count > job->count - job->taken)
        return oo__fail(OO_E_ARGUMENT, "corrupt: a chunk of %u weights where %zu are left",
                        (unsigned)header.count, job->count - job->taken);
    found->count = header.count;
    job->taken += header.count;
    job->end = found->at + found->bytes;
    return OO_OK;
}

/* `aside`: where weights are decoded to that are only compared; else NULL. */
static enum oo_status oo__decode_chunk(const struct oo_job *job, const struct oo_found *found,
                                       char *aside) {
    const size_t width = oo_codec_weight_bytes(job->kind);
    const char *chunk = job->coded + found->at;
    if (job->deed == OO_CHECK)
        return oo_codec_check(chunk, found->bytes);
    char *weights = job->weights + found->begin * width;
    const enum oo_status status = oo_codec_decode(job->codec, chunk, found->bytes, 1, job->kind,
                                                  aside ? aside : weights, found->count);
    if (status == OO_OK && aside && memcmp(aside, weights, found->count * width) != 0)
        return oo__fail(OO_E_ARGUMENT, "it holds other weights");
    return status;
}

static void oo__decode_some(void *argument) {
    struct oo_job *job = argument;
    const size_t most = oo__least(OO_CODEC_CHUNK, job->count) * oo_codec_weight_bytes(job->kind);
    struct oo_found found = {.count = 1};
    enum oo_status status = OO_OK;
    char *aside = job->deed == OO_COMPARE ? oo__pages_map(most) : NULL;
    if (job->deed == OO_COMPARE && !aside)
        status = oo__fail(OO_E_MEMORY, "no memory to decode a chunk of weights in");
    while (status == OO_OK && found.count) {
        oo__mutex_lock(job->mutex);
        status = oo__take_chunk(job, &found);
        oo__mutex_unlock(job->mutex);
        if (found.count)
            status = oo__decode_chunk(job, &found, aside);
        if (status == OO_E_ARGUMENT)
            oo__append(" (chunk at byte %zu of %zu)", found.at, job->bytes);
    }
    if (aside)
        oo__pages_unmap(aside, most);
    if (status != OO_OK)
        oo__give_up(job, status);
}

/* ---- threads ---- */

static enum oo_status oo__run(struct oo_job *job, unsigned threads) {
    struct oo_thread *others[OO_CODED_THREADS];
    void (*const run)(void *) = job->deed == OO_ENCODE ? oo__encode_some : oo__decode_some;
    const size_t chunks = (job->count + job->chunk - 1) / job->chunk;
    const size_t most = oo__least(oo__least(threads, chunks), OO_CODED_THREADS);
    size_t n = 0;
    job->codec = oo_codec_best();
    job->mutex = oo__mutex_create();
    if (!job->mutex)
        return oo__fail(OO_E_MEMORY, "no memory for a lock");
    while (n + 1 < most && (others[n] = oo__thread_start(run, job)) != NULL)
        n++;
    run(job);
    while (n)
        oo__thread_join(others[--n]);
    oo__mutex_destroy(job->mutex);
    if (job->status != OO_OK)
        oo__error_restore(&job->error);
    return job->status;
}

size_t oo_coded_room(enum oo_codec_kind kind, size_t count) {
    const size_t whole = count / OO_CODEC_CHUNK, rest = count % OO_CODEC_CHUNK;
    const size_t width = oo_codec_weight_bytes(kind);
    return whole * oo__aligned(OO_CODEC_HEADER + OO_CODEC_CHUNK * width) +
           (rest ? OO_CODEC_HEADER + rest * width : 0);
}

enum oo_status oo__coded_encode(enum oo_codec_kind kind, const void *weights, size_t count,
                                size_t chunk, unsigned threads, void *out, size_t *bytes) {
    struct oo_job job = {.kind = kind, .deed = OO_ENCODE, .count = count, .chunk = chunk};
    job.weights = (char *)(uintptr_t)weights; /* only read */
    job.coded = out;
    const enum oo_status status = oo__run(&job, threads);
    *bytes = job.end;
    return status;
}

enum oo_status oo_coded_encode(enum oo_codec_kind kind, const void *weights, size_t count,
                               unsigned threads, void *out, size_t *bytes) {
    return oo__coded_encode(kind, weights, count, OO_CODEC_CHUNK, threads, out, bytes);
}

static enum oo_status oo__decode(enum oo_work deed, enum oo_codec_kind kind, const void *coded,
                                 size_t bytes, unsigned threads, void *weights, size_t count) {
    struct oo_job job = {.kind = kind, .deed = deed, .count = count, .bytes = bytes};
    struct oo_codec_header header;
    size_t first;
    /* So many threads as there may be chunks like the first; what is wrong with it, they find. */
    job.chunk = OO_CODEC_CHUNK;
    if (oo_codec_find(coded, bytes, &header, &first) == OO_OK)
        job.chunk = header.count;
    job.coded = (char *)(uintptr_t)coded; /* only read */
    job.weights = weights;
    return oo__run(&job, threads);
}

enum oo_status oo_coded_decode(enum oo_codec_kind kind, const void *coded, size_t bytes,
                               unsigned threads, void *weights, size_t count) {
    return oo__decode(OO_DECODE, kind, coded, bytes, threads, weights, count);
}

enum oo_status oo_coded_compare(enum oo_codec_kind kind, const void *coded, size_t bytes,
                                unsigned threads, const void *weights, size_t count) {
    return oo__decode(OO_COMPARE, kind, coded, bytes, threads, (void *)(uintptr_t)weights, count);
}

enum oo_status oo_coded_check(enum oo_codec_kind kind, const void *coded, size_t bytes,
                              unsigned threads, size_t count) {
    return oo__decode(OO_CHECK, kind, coded, bytes, threads, NULL, count);
}
