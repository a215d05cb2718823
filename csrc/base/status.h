/* status.h - how the core says what went wrong: a status and one message per thread. */
#ifndef OO_STATUS_H
#define OO_STATUS_H

#include "oracle_offload.h"

#if defined(__GNUC__)
#define OO_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define OO_PRINTF(text, first)
#endif

/* Set the thread's message and return `status`, so that a caller can `return oo__fail(...)`. */
enum oo_status oo__fail(enum oo_status status, const char *format, ...) OO_PRINTF(2, 3);
/* The same for a driver call: also keeps the call's name, the CUresult and its name. */
enum oo_status oo__fail_driver(enum oo_status status, const char *call, int code, const char *name,
                               const char *format, ...) OO_PRINTF(5, 6);

/* Add to the thread's message; the rest of its error stays. */
void oo__append(const char *format, ...) OO_PRINTF(1, 2);

/* The thread's error, put aside while something of less weight may fail. */
struct oo_error {
    char message[1024];
    char call[48];
    char name[64];
    int code;
};
struct oo_error oo__error_save(void);
void oo__error_restore(const struct oo_error *saved);

/* Leave through the function's one exit label when `expression` is not OO_OK. */
#define OO_TRY(expression)                                                                         \
    do {                                                                                           \
        status = (expression);                                                                     \
        if (status != OO_OK)                                                                       \
            goto done;                                                                             \
    } while (0)

#endif
