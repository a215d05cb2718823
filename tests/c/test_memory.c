/* Memory runs out: the n-th allocation of the engine fails, n from the first to the last of a life.
 * A clear error, nothing leaked, and the life goes on. And host memory: filling it, by one thread
 * and by several; which of its pages were written. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "timing.h"
#include "world.h"

#if defined(__linux__)
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CAN_FAIL 1
#include <dlfcn.h>

/* This program's allocator comes before the C library's. Only allocations made by the engine's
 * code can fail: not the simulated driver's, not the C library's own. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);

static uint64_t fail_in; /* allocations until the one that fails; 0: none will */
static uint64_t allocations;
static int counting;

static int fails(const void *caller) {
    Dl_info info;
    if (!counting || !dladdr(caller, &info) || !info.dli_fname ||
        strstr(info.dli_fname, "simcuda") || strstr(info.dli_fname, "libc.so") ||
        strstr(info.dli_fname, "ld-linux"))
        return 0;
    allocations++;
    if (fail_in == 0)
        return 0;
    fail_in--;
    return fail_in == 0;
}

void *malloc(size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}
void *realloc(void *memory, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, bytes);
}

static int failures;

static void try(enum oo_status status, const char *what) {
    if (status == OO_OK)
        return;
    failures++;
    CHECK(status == OO_E_MEMORY && strstr(oo_error_message(), "no memory"), "%s: %s: %s", what,
          oo_status_name(status), oo_error_message());
}

/* Everything that allocates. Returns how often that was. */
static uint64_t life_without_memory(uint64_t nth) {
    struct world w;
    struct oo_trace_row *rows = NULL;
    size_t count = 0;
    memset(&w, 0, sizeof w);
    world_sizes(&w);
    char *arena = malloc(60000 + OO_ALIGNMENT);
    failures = 0;
    allocations = 0;
    fail_in = nth;
    counting = 1;
    enum oo_status status = oo_engine_create(sim.path, 0, &w.engine);
    try(status, "create");
    if (status != OO_OK)
        try(oo_engine_create(sim.path, 0, &w.engine), "create again");
    CHECK(sim.cuDevicePrimaryCtxRetain(&w.context, 0) == 0, "context");
    w.arena = arena;
    if (!world_attach(&w, 60000, 20)) {
        try(OO_E_MEMORY, "attach");
        counting = 0;
        if (w.leased)
            need(oo_lease_remove(w.engine, w.lease), "remove half a lease");
        w.leased = 0;
        for (uint32_t m = 0; m < w.engine->n_models; m++)
            if (!w.engine->models[m].removed)
                need(oo_model_remove(w.engine, m), "remove half a model");
        oo_host_destroy(w.host);
        w.host = NULL;
        counting = 1;
        CHECK(world_attach(&w, 60000, 20), "attach again: %s", oo_error_message());
    }
    for (int i = 0; i < 2; i++) {
        if (i == 1)
            try(oo_trace_start(w.engine), "trace");
        enum oo_status stepped = step(&w);
        try(stepped, "step");
    }
    if (w.engine->spans.tracing)
        try(oo_trace_stop(w.engine, &rows, &count), "trace");
    oo_trace_free(rows);
    char gradient[600], target[600];
    fill(gradient, sizeof gradient, 1);
    try(oo_engine_download(w.engine, target, (uintptr_t)gradient, sizeof gradient, w.stream),
        "download");
    const struct oo_tensor two[2] = {{.host = w.master[0], .bytes = w.bytes[0]},
                                     {.host = w.master[1], .bytes = w.bytes[1]}};
    uint32_t unit = 0;
    size_t offsets[2];
    for (int i = 0; i < 2;
         i++) { /* to two tensors and to others: units and members are made again */
        const enum oo_status moved = oo_member_move(w.engine, w.member[i], two, 2, &unit, offsets);
        try(moved, "move");
        if (moved != OO_OK)
            try(oo_member_move(w.engine, w.member[i], two, 2, &unit, offsets), "move again");
    }
    counting = 0;
    CHECK(failures <= 1 && (nth || failures == 0), "allocation %llu: %d failures",
          (unsigned long long)nth, failures);
    for (unsigned i = 2; i < UNITS; i++)
        need(use(&w, i, OO_FORWARD), "after all");
    world_close(&w, "without memory");
    return allocations;
}

CASE(test_any_allocation_may_fail) {
    const uint64_t count = life_without_memory(0);
    CHECK(count > 300, "only %llu allocations", (unsigned long long)count);
    uint64_t failed = 0;
    /* Between the 20th and the 150th is the reserve of events: some of them will do. */
    for (uint64_t n = 1; n <= count; n += n < 20 || n > 150 ? 1 : 17, failed++)
        life_without_memory(n);
    printf("%llu allocations in a life; %llu of them failed\n", (unsigned long long)count,
           (unsigned long long)failed);
}

static OOCUresult(OOCUDAAPI *real_create)(OOCUevent *, unsigned int);
static int created;

static OOCUresult OOCUDAAPI spy_create(OOCUevent *event, unsigned int flags) {
    created++;
    return real_create(event, flags);
}

/* A real driver writes the handle where its argument points. */
CASE(test_no_event_is_created_without_a_record) {
    struct world w;
    world_open(&w, 60000, -1);
    real_create = w.engine->driver.cuEventCreate;
    w.engine->driver.cuEventCreate = spy_create;
    sim.cuCtxPushCurrent_v2(w.context);
    fail_in = 1;
    counting = 1;
    CHECK(oo__events_reserve(w.engine, OO_ORDERS, 1) == OO_E_MEMORY && created == 0, "%d events",
          created);
    counting = 0;
    need(oo__events_reserve(w.engine, OO_ORDERS, 1), "reserve");
    CHECK(created == 1, "%d events", created);
    sim.cuCtxPopCurrent_v2(NULL);
    world_close(&w, "record");
}
#endif

/* ---- host memory ---- */

CASE(test_host_memory_is_filled_where_asked) {
    /* Enough for several threads, and for each kind of page to be tried. */
    const size_t large = (100u << 20) + 4711;
    struct oo_host *host = NULL;
    char *source = malloc(large);
    need(oo_host_create(large + 100, &host), "host");
    char *memory = oo_host_address(host);
    CHECK(oo_host_bytes(host) == large + 100 && !oo_host_locked(host), "%zu bytes",
          oo_host_bytes(host));
    CHECK(((uintptr_t)memory & 4095) == 0 && memory[0] == 0 && memory[large + 99] == 0,
          "not fresh pages");
    fill(source, large, 3);
    need(oo_host_fill(host, 77, source, large), "fill");
    CHECK(memcmp(memory + 77, source, large) == 0, "wrong bytes");
    for (size_t i = 0; i < 77; i++)
        CHECK(memory[i] == 0, "byte %zu before the range", i);
    for (size_t i = large + 77; i < large + 100; i++)
        CHECK(memory[i] == 0, "byte %zu behind the range", i);
    need(oo_host_fill(host, 0, source + 5, 11), "fill a little");
    CHECK(memcmp(memory, source + 5, 11) == 0 && memory[11] == 0, "wrong bytes");
    need(oo_host_fill(host, large + 100, source, 0), "fill nothing at the end");
    need(oo_host_fill(host, 100, source, large), "fill to the last byte");
    ANSWERS(OO_E_ARGUMENT, "exceeds", oo_host_fill(host, 101, source, large));
    CHECK(oo_host_fill(host, large + 101, source, 0) == OO_E_ARGUMENT, "an offset behind the end");
    CHECK(oo_host_fill(host, SIZE_MAX, source, 2) == OO_E_ARGUMENT, "an offset that overflows");
    free(source);
    oo_host_destroy(host);
    oo_host_destroy(NULL);
}

#if defined(__linux__)
/* Of a file that is mapped for this process alone; more pages than are looked at in one go. */
CASE(test_pages_that_were_written_are_found) {
    enum { PAGES = 2048 + 30 };
    const size_t page = oo__page_bytes();
    FILE *file = tmpfile();
    CHECK(file && ftruncate(fileno(file), (off_t)(PAGES * page)) == 0, "no file");
    static const size_t written[] = {0, 1, 2047, 2048, PAGES - 1};
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        char *memory =
            mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0);
        CHECK(memory != MAP_FAILED, "no memory");
        CHECK(oo_pages_written(memory, PAGES * page) == 0, "nothing was read yet");
        for (size_t at = 0; at < PAGES; at += 7)
            CHECK(((volatile char *)memory)[at * page] == 0, "page %zu", at);
        CHECK(oo_pages_written(memory, PAGES * page) == 0, "reading is not writing");
        memory[written[i] * page] = 1;
        CHECK(oo_pages_written(memory, PAGES * page) == 1, "page %zu", written[i]);
        CHECK(oo_pages_written(memory + written[i] * page, 1) == 1, "page %zu alone", written[i]);
        CHECK(oo_pages_written(memory, written[i] * page) == 0, "pages before page %zu",
              written[i]);
        CHECK(munmap(memory, PAGES * page) == 0, "unmap");
    }
    fclose(file);
}

/* What was cut off a file is in the memory that was copied from it, at its old address; what was
 * written stays. */
CASE(test_pages_of_a_file_become_memory_where_they_are) {
    enum { PAGES = 9, FIRST = 2 };
    const size_t page = oo__page_bytes();
    FILE *file = tmpfile();
    char *memory = oo__pages_map(PAGES * page);
    CHECK(file && memory && ftruncate(fileno(file), (off_t)((FIRST + PAGES) * page)) == 0,
          "no file");
    for (size_t at = 0; at < FIRST + PAGES; at++)
        CHECK(pwrite(fileno(file), &(char){(char)at}, 1, (off_t)(at * page + 5)) == 1, "write");
    CHECK(oo_pages_show(memory, PAGES * page, fileno(file), FIRST * page) == 0, "not shown");
    CHECK(oo_pages_written(memory, PAGES * page) == 0, "nothing was written");
    memory[3 * page] = 77;
    /* Not from the start of a page to the end of one: the pages that contain it become memory. */
    CHECK(oo_pages_own(memory + page + 9, 6 * page) == 0, "no memory");
    CHECK(oo_pages_written(memory + page, 7 * page) == 1, "pages of the file");
    CHECK(oo_pages_written(memory, page) == 0, "the page before became memory");
    CHECK(oo_pages_written(memory + 8 * page, page) == 0, "the page behind became memory");
    CHECK(ftruncate(fileno(file), 0) == 0, "cut off");
    for (size_t at = 1; at < 8; at++)
        CHECK(memory[at * page + 5] == (char)(FIRST + at), "page %zu", at);
    CHECK(memory[3 * page] == 77, "what was written is gone");
    fclose(file);
    CHECK(munmap(memory, PAGES * page) == 0, "unmap");
}

/* Two buffers over one part of a file are one memory; one that can only be read says what the other
 * writes, and a system call that would write to it fails. */
CASE(test_a_part_of_a_file_is_one_memory_for_all) {
    const size_t page = oo__page_bytes();
    struct oo_host *one, *other, *none;
    FILE *file = tmpfile();
    CHECK(file && ftruncate(fileno(file), (off_t)(4 * page)) == 0, "no file");
    CHECK(oo_host_create_shared(2 * page - 7, fileno(file), page, &one) == OO_OK &&
              oo_host_create_shared(2 * page - 7, fileno(file), page, &other) == OO_OK,
          "%s", oo_error_message());
    const char text[] = "weights";
    CHECK(oo_host_fill(one, page - 3, text, sizeof text) == OO_OK, "%s", oo_error_message());
    CHECK(!memcmp((char *)oo_host_address(other) + page - 3, text, sizeof text), "another memory");
    char found[sizeof text];
    CHECK(pread(fileno(file), found, sizeof found, (off_t)(2 * page - 3)) == sizeof found &&
              !memcmp(found, text, sizeof text),
          "another part of the file");
    CHECK(oo_host_protect(other, 0) == OO_OK, "%s", oo_error_message());
    errno = 0;
    CHECK(pread(fileno(file), oo_host_address(other), 1, 0) == -1 && errno == EFAULT, "written");
    ((char *)oo_host_address(one))[0] = 'w';
    CHECK(*(char *)oo_host_address(other) == 'w', "not seen");
    CHECK(oo_host_protect(other, 1) == OO_OK &&
              pread(fileno(file), oo_host_address(other), 1, 0) == 1,
          "cannot be written again");
    CHECK(oo_host_create_shared(page, -1, 0, &none) == OO_E_STATE && none == NULL &&
              strstr(oo_error_message(), "does not map"),
          "%s", oo_error_message());
    CHECK(oo_host_create_shared(0, fileno(file), 0, &none) == OO_E_ARGUMENT, "no bytes");
    CHECK(oo_host_create_shared(page, fileno(file), 1, &none) == OO_E_STATE, "half a page");
    fclose(file);
    CHECK(oo_host_destroy(one) == OO_OK && oo_host_destroy(other) == OO_OK, "destroy");
}

CASE(test_pages_that_cannot_be_shown_or_had) {
    const size_t page = oo__page_bytes();
    char *memory = oo__pages_map(page);
    errno = 0;
    CHECK(oo_pages_show(memory, page, -1, 0) == -1 && errno == EBADF, "no file");
    CHECK(oo_pages_own(memory, SIZE_MAX / 4) == -1, "all memory");
    CHECK(memory[0] == 0, "it is there");
    oo__pages_unmap(memory, page);
}
#endif

CASE(test_host_memory_that_cannot_be_had) {
    struct oo_host *host;
    CHECK(oo_host_create(0, &host) == OO_E_ARGUMENT && host == NULL, "no bytes");
    CHECK(oo_host_create(SIZE_MAX, &host) == OO_E_ARGUMENT && host == NULL, "all bytes");
    CHECK(oo_host_create(SIZE_MAX / 4, &host) == OO_E_MEMORY && host == NULL &&
              strstr(oo_error_message(), "GiB"),
          "%s", oo_error_message());
}

CHECK_MAIN(world_prepare)
