/* fuzz.h - what the fuzz targets share: reading an input, failing, and a main for compilers without
 * libFuzzer.
 *
 *     fuzz_x [--seed N] [--count N] [--seconds S] [--save FOLDER]   inputs made from a seed
 *     fuzz_x FILE...                                               these inputs again
 *
 * With libFuzzer (FUZZ_LIBFUZZER defined) main is its own. An input that fails is saved either way.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- an input ---- */

struct input {
    const uint8_t *at;
    size_t left;
};

/* 0 once the input is used up, so that every prefix of an input is one. */
static inline unsigned byte_of(struct input *in) {
    if (!in->left)
        return 0;
    in->left--;
    return *in->at++;
}

/* A number below `bound`, at most 65,536. */
static inline unsigned below(struct input *in, unsigned bound) {
    unsigned value = byte_of(in);
    if (bound > 256)
        value = value << 8 | byte_of(in);
    return value % bound;
}

#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: REQUIRE(%s) failed: ", __FILE__, __LINE__, #condition);        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* ---- a main for compilers without libFuzzer ---- */

#if !defined(FUZZ_LIBFUZZER)

#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { FUZZ_MAX_BYTES = 2048, FUZZ_HANG_S = 60 };

static uint8_t fuzz_bytes[FUZZ_MAX_BYTES];
static size_t fuzz_size;
static unsigned long long fuzz_seed, fuzz_index;
static const char *fuzz_folder = ".";
static int fuzz_saving;

/* Called in a signal handler or while a sanitizer ends the process: as simple as can be. A second
 * crash in here would lose nothing but the file. */
// NOLINTBEGIN(bugprone-signal-handler,cert-msc54-cpp,cert-sig30-c)
static void fuzz_save(void) {
    char path[512];
    if (!fuzz_saving)
        return;
    fuzz_saving = 0;
    snprintf(path, sizeof path, "%s/crash-%llu-%llu", fuzz_folder, fuzz_seed, fuzz_index);
    FILE *file = fopen(path, "wb");
    if (file) {
        fwrite(fuzz_bytes, 1, fuzz_size, file);
        fclose(file);
    }
    fprintf(stderr, "failed with --seed %llu at input %llu; saved as %s\n", fuzz_seed, fuzz_index,
            path);
}

static void fuzz_on_signal(int number) {
    if (number == SIGALRM)
        fprintf(stderr, "hangs: no end within %d s\n", FUZZ_HANG_S);
    fuzz_save();
    signal(number, SIG_DFL);
    raise(number);
}
// NOLINTEND(bugprone-signal-handler,cert-msc54-cpp,cert-sig30-c)

/* Weak: there only where a sanitizer is. */
extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static int fuzz_replay(const char *path) {
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s cannot be read\n", path);
        return 0;
    }
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, size);
    printf("%s: ok (%zu bytes)\n", path, size);
    return 1;
}

static uint64_t fuzz_draw(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int main(int argc, char **argv) {
    static const int fatal[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM};
    unsigned long long count = 100000, only_replayed = 0;
    double seconds = 5;
    fuzz_seed = 1;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--seed"))
            fuzz_seed = strtoull(value, NULL, 0), i++;
        else if (!strcmp(argv[i], "--count"))
            count = strtoull(value, NULL, 0), i++;
        else if (!strcmp(argv[i], "--seconds"))
            seconds = strtod(value, NULL), i++;
        else if (!strcmp(argv[i], "--save"))
            fuzz_folder = value, i++;
        else if (argv[i][0] != '-' && fuzz_replay(argv[i]))
            only_replayed++;
        else
            return fprintf(stderr, "%s: not understood or not readable\n", argv[i]), 2;
    }
    if (only_replayed)
        return 0;
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++)
        signal(fatal[i], fuzz_on_signal);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(fuzz_save);
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    double spent = 0;
    for (fuzz_index = 0; fuzz_index < count && spent < seconds; fuzz_index++) {
        uint64_t state = fuzz_seed + (fuzz_index << 32);
        fuzz_size = (size_t)(fuzz_draw(&state) % FUZZ_MAX_BYTES) + 1;
        for (size_t i = 0; i < fuzz_size; i++)
            fuzz_bytes[i] = (uint8_t)fuzz_draw(&state);
        fuzz_saving = 1;
        alarm(FUZZ_HANG_S);
        LLVMFuzzerTestOneInput(fuzz_bytes, fuzz_size);
        alarm(0);
        fuzz_saving = 0;
        clock_gettime(CLOCK_MONOTONIC, &now);
        spent = (double)(now.tv_sec - begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - begin.tv_nsec);
    }
    printf("%llu inputs in %.1f s, seed %llu: ok\n", fuzz_index, spent, fuzz_seed);
    return 0;
}

#endif

#endif
