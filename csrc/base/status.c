/* status.c - the thread's last error. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Thread-local, as errno is: a message must survive until its own thread reads it. */
static _Thread_local struct oo_error oo__last;

static void oo__set_text(char *target, size_t capacity, const char *text) {
    snprintf(target, capacity, "%s", text ? text : "");
}

enum oo_status oo__fail(enum oo_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(oo__last.message, sizeof oo__last.message, format, arguments);
    va_end(arguments);
    oo__last.call[0] = oo__last.name[0] = '\0';
    oo__last.code = 0;
    return status;
}

enum oo_status oo__fail_driver(enum oo_status status, const char *call, int code, const char *name,
                               const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(oo__last.message, sizeof oo__last.message, format, arguments);
    va_end(arguments);
    oo__set_text(oo__last.call, sizeof oo__last.call, call);
    oo__set_text(oo__last.name, sizeof oo__last.name, name);
    oo__last.code = code;
    return status;
}

void oo__append(const char *format, ...) {
    const size_t length = strlen(oo__last.message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(oo__last.message + length, sizeof oo__last.message - length, format, arguments);
    va_end(arguments);
}

struct oo_error oo__error_save(void) { return oo__last; }
void oo__error_restore(const struct oo_error *saved) { oo__last = *saved; }

const char *oo_error_message(void) { return oo__last.message; }

void oo_error_driver(const char **call, int *code, const char **name) {
    *call = oo__last.call;
    *code = oo__last.code;
    *name = oo__last.name;
}

const char *oo_status_name(enum oo_status status) {
    switch (status) {
#define OO_NAME(value)                                                                             \
    case value:                                                                                    \
        return #value;
        OO_NAME(OO_OK)
        OO_NAME(OO_WOULD_BLOCK)
        OO_NAME(OO_LEAKED)
        OO_NAME(OO_E_ARGUMENT)
        OO_NAME(OO_E_STATE)
        OO_NAME(OO_E_MEMORY)
        OO_NAME(OO_E_NO_ROOM)
        OO_NAME(OO_E_LOCK_REFUSED)
        OO_NAME(OO_E_TICKET)
        OO_NAME(OO_E_FORKED)
        OO_NAME(OO_E_CAPTURE)
        OO_NAME(OO_E_DEAD)
        OO_NAME(OO_E_DRIVER)
        OO_NAME(OO_E_DRIVER_MISSING)
        OO_NAME(OO_E_DRIVER_STUB)
        OO_NAME(OO_E_DRIVER_OLD)
        OO_NAME(OO_E_NO_DEVICE)
        OO_NAME(OO_E_FILE)
#undef OO_NAME
    }
    return "unknown oo_status";
}
