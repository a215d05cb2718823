/* files.h - files that a test makes and changes, on either system. What is open is what
 * oo__file_open returns. */
#ifndef OO_FILES_H
#define OO_FILES_H

#include "check.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>

static inline void file_sleep(unsigned microseconds) { Sleep((microseconds + 999) / 1000); }

static inline HANDLE file_to_write(const char *path) {
    const HANDLE file = CreateFileA(path, GENERIC_READ | GENERIC_WRITE,
                                    FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                                    OPEN_EXISTING, 0, NULL);
    CHECK(file != INVALID_HANDLE_VALUE, "no file: %lu", GetLastError());
    return file;
}

/* Make a file with a name of its own, of at most 64 bytes. */
static inline void file_make(char *path, const void *content, size_t bytes) {
    static unsigned number;
    DWORD written = 0;
    snprintf(path, 64, "C:\\windows\\temp\\oo-%lu-%u", GetCurrentProcessId(), number++);
    const HANDLE file =
        CreateFileA(path, GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
    CHECK(file != INVALID_HANDLE_VALUE && WriteFile(file, content, (DWORD)bytes, &written, NULL) &&
              written == bytes && CloseHandle(file),
          "no file '%s': %lu", path, GetLastError());
}

static inline void file_set_time(const char *path, uint64_t seconds, uint64_t nanoseconds) {
    const uint64_t ticks = seconds * 10000000 + nanoseconds / 100;
    const FILETIME time = {(DWORD)ticks, (DWORD)(ticks >> 32)};
    const HANDLE file = file_to_write(path);
    CHECK(SetFileTime(file, NULL, NULL, &time) && CloseHandle(file), "no time");
}

static inline void file_set_bytes(const char *path, uint64_t bytes) {
    const HANDLE file = file_to_write(path);
    const LARGE_INTEGER end = {.QuadPart = (LONGLONG)bytes};
    CHECK(SetFilePointerEx(file, end, NULL, FILE_BEGIN) && SetEndOfFile(file) && CloseHandle(file),
          "%llu bytes: %lu", (unsigned long long)bytes, GetLastError());
}

static inline int file_delete(const char *path) { return DeleteFileA(path) ? 0 : -1; }

#else
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static inline void file_sleep(unsigned microseconds) { usleep(microseconds); }

static inline void file_make(char *path, const void *content, size_t bytes) {
    snprintf(path, 64, "/tmp/oo-test-XXXXXX");
    const int file = mkstemp(path);
    CHECK(file >= 0 && write(file, content, bytes) == (ssize_t)bytes && close(file) == 0,
          "no file: %s", strerror(errno));
}

static inline void file_set_time(const char *path, uint64_t seconds, uint64_t nanoseconds) {
    const struct timespec times[2] = {{0, UTIME_OMIT}, {(time_t)seconds, (long)nanoseconds}};
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0, "no time");
}

static inline void file_set_bytes(const char *path, uint64_t bytes) {
    CHECK(truncate(path, (off_t)bytes) == 0, "%llu bytes: %s", (unsigned long long)bytes,
          strerror(errno));
}

static inline int file_delete(const char *path) { return unlink(path); }

#endif

static inline struct oo_file_state file_state(const char *path) {
    struct oo_file_state state = {0};
    const int file = oo__file_open(path, 0);
    CHECK(file >= 0 && oo__file_state(file, &state) == 0, "no file '%s': %s", path,
          strerror(errno));
    oo__file_close(file);
    return state;
}

#endif
