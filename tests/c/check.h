/* check.h - the whole test framework of the C tests: CHECK counts and reports, check_report ends.
 * With ORACLE_OFFLOAD_TEST_FAIL_FAST set the first failure ends the program: the mutation gate
 * needs no more. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

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

/* The last line of a C test; the value for main to return. */
static inline int check_report(void) {
    printf("%lu passed, %lu failed\n", check_passed, check_failed);
    return check_failed ? 1 : 0;
}

#endif
