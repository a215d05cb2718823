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
            if (getenv("ORACLE_OFFLOAD_TEST_FAIL_FAST"))                                           \
                _Exit(1);                                                                          \
        }                                                                                          \
    } while (0)

/* The last line of a C test; the value for main to return. */
static inline int check_report(void) {
    printf("%lu passed, %lu failed\n", check_passed, check_failed);
    return check_failed ? 1 : 0;
}

#endif
