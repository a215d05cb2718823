/* check.h - the whole test framework of the C tests: a program is its cases, and CHECK_MAIN behind
 * them.
 *
 *     PROGRAM           runs all cases, in the order of the source
 *     PROGRAM CASE...   runs these
 *     PROGRAM --list    prints their names
 *
 * CHECK counts and reports; a case fails when one of its checks does. With
 * ORACLE_OFFLOAD_TEST_FAIL_FAST set the first failure ends the program: the mutation gate needs no
 * more. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned long check_passed, check_failed;

/* Count `condition`; on failure print where, and a printf-style explanation. Goes on either way. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (condition) {                                                                           \
            check_passed++;                                                                        \
        } else {                                                                                   \
            check_failed++;                                                                        \
            fprintf(stderr, "%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition);          \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            check_say_schedule();                                                                  \
            if (getenv("ORACLE_OFFLOAD_TEST_FAIL_FAST"))                                           \
                _Exit(1);                                                                          \
        }                                                                                          \
    } while (0)

/* What a failed check says of the simulator; `text` is its simScheduleText. */
typedef int check_schedule_text(char *text, size_t capacity);
static check_schedule_text *check_schedule;

static inline void check_say_schedule(void) {
    char text[160];
    if (check_schedule && check_schedule(text, sizeof text) == 0)
        fprintf(stderr, "    on the schedule %s\n", text);
}

struct check_case {
    const char *name;
    void (*run)(void);
    int line;
    struct check_case *next;
};
static struct check_case *check_cases;

static inline void check_add(struct check_case *added) {
    struct check_case **at = &check_cases;
    while (*at && (*at)->line < added->line)
        at = &(*at)->next;
    added->next = *at;
    *at = added;
}

/* Begins the function of a case, which is added to the program's before main. tools/c_programs.py
 * reads the names from the source. */
#define CASE(name)                                                                                 \
    static void name(void);                                                                        \
    static struct check_case case_of_##name = {#name, name, __LINE__, NULL};                       \
    __attribute__((constructor)) static void add_##name(void) { check_add(&case_of_##name); }      \
    static void name(void)

#define CHECK_COUNT(rows) (sizeof(rows) / sizeof(rows)[0])

static inline int check_wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(name, argv[i]) == 0)
            return 1;
    }
    return argc <= 1;
}

/* The whole of a C test's main, and its value; `prepare` (may be NULL) runs before the first
 * case. */
static inline int check_main(int argc, char **argv, void (*prepare)(void)) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const struct check_case *c = check_cases; c; c = c->next)
            puts(c->name);
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        const struct check_case *c = check_cases;
        while (c && strcmp(c->name, argv[i]) != 0)
            c = c->next;
        if (!c) {
            fprintf(stderr, "%s has no case %s\n", argv[0], argv[i]);
            return 2;
        }
    }
    if (prepare)
        prepare();
    for (const struct check_case *c = check_cases; c; c = c->next) {
        if (!check_wanted(c->name, argc, argv))
            continue;
        const unsigned long before = check_failed;
        c->run();
        printf("%s: %s\n", c->name, check_failed == before ? "ok" : "FAILED");
        fflush(stdout);
    }
    printf("%lu passed, %lu failed\n", check_passed, check_failed);
    return check_failed ? 1 : 0;
}

#define CHECK_MAIN(prepare)                                                                        \
    int main(int argc, char **argv) { return check_main(argc, argv, prepare); }

#endif
