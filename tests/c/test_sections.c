/* Memory that processes share, with a second process: this program, started with its part to play.
 * On Linux it is a file in memory, on Windows (under Wine here) a section of the page file. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#endif
#include "../../csrc/base/os.h"
#include "../../csrc/include/oracle_offload.h"
#include "check.h"

#include <errno.h>
#include <stdint.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <winternl.h>
#else
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { UNIT = 64 << 10, BYTES = 3 * UNIT }; /* the grain of Windows' mappings */

/* ---- the other process ---- */

struct child {
    unsigned id;
#if defined(_WIN32)
    HANDLE process;
#endif
};

static unsigned own_id(void) {
#if defined(_WIN32)
    return GetCurrentProcessId();
#else
    return (unsigned)getpid();
#endif
}

/* Start this program to play `part` with the section that the two of them talk in. */
static struct child start(const char *part, int section) {
    char parent[16], talk[16];
    struct child child = {0};
    snprintf(parent, sizeof parent, "%u", own_id());
    snprintf(talk, sizeof talk, "%d", section);
#if defined(_WIN32)
    char path[1024], command[1200];
    PROCESS_INFORMATION made;
    STARTUPINFOA how = {.cb = sizeof how};
    GetModuleFileNameA(NULL, path, sizeof path);
    snprintf(command, sizeof command, "\"%s\" --play %s %s %s", path, part, parent, talk);
    CHECK(CreateProcessA(path, command, NULL, NULL, FALSE, 0, NULL, NULL, &how, &made), "%lu",
          GetLastError());
    CloseHandle(made.hThread);
    child.id = made.dwProcessId;
    child.process = made.hProcess;
#else
    const pid_t made = fork();
    if (made == 0) {
        execl("/proc/self/exe", "test_sections", "--play", part, parent, talk, (char *)NULL);
        _Exit(9);
    }
    child.id = (unsigned)made;
#endif
    return child;
}

/* How it ended; where it was killed, 9. */
static int wait_for(struct child *child) {
#if defined(_WIN32)
    DWORD code = 0;
    WaitForSingleObject(child->process, INFINITE);
    GetExitCodeProcess(child->process, &code);
    CloseHandle(child->process);
    return (int)code;
#else
    int status = 0;
    waitpid((pid_t)child->id, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
#endif
}

static void end_by_force(const struct child *child) {
#if defined(_WIN32)
    TerminateProcess(child->process, 9);
#else
    kill((pid_t)child->id, SIGKILL);
#endif
}

/* How many processes' handles a section has; on Linux a descriptor is no handle: see
 * tests/clients/test_several.py, which looks at all processes. */
static unsigned handles(int section) {
#if defined(_WIN32)
    PUBLIC_OBJECT_BASIC_INFORMATION found;
    const NTSTATUS status = NtQueryObject((HANDLE)(intptr_t)section, ObjectBasicInformation, &found,
                                          sizeof found, NULL);
    CHECK(status == 0, "%lx", (unsigned long)status);
    return status == 0 ? found.HandleCount : 0;
#else
    (void)section;
    return 0;
#endif
}

/* What the two say to one another: at the beginning of the section that they both have. */
struct talk {
    volatile int step;    /* of the child */
    volatile int go_on;   /* of the test */
    volatile int section; /* that the child has made */
    volatile unsigned handles;
};

static void sleep_a_little(void) {
#if defined(_WIN32)
    Sleep(1);
#else
    usleep(1000);
#endif
}

static void wait_until(const volatile int *what, int value) {
    for (int ms = 0; *what != value; ms++) {
        if (ms > 60000) { /* the other has ended: so does this one, and says so by its code */
            fprintf(stderr, "the other process does not answer\n");
            _Exit(8);
        }
        sleep_a_little();
    }
}

static int all_are(const unsigned char *bytes, unsigned value) {
    for (size_t i = 0; i < BYTES; i++)
        if (bytes[i] != value)
            return 0;
    return 1;
}

static void *map(int section, size_t bytes) {
    void *pages = oo__pages_map_shared(bytes, section, 0);
    CHECK(pages, "not mapped: %d", errno);
    return pages;
}

/* Two mappings that see what the other writes; the child ends by itself, or waits to be killed. */
static int play(const char *part, unsigned parent, int theirs) {
    const int section = oo_section_take(parent, theirs);
    if (section < 0)
        return 3;
    struct talk *talk = map(section, UNIT);
    oo_section_close(section); /* the mapping is enough */
    talk->section = oo_section_create(BYTES);
    unsigned char *made = map(talk->section, BYTES);
    if (!all_are(made, 0))
        return 4;
    memset(made, 17, BYTES);
    talk->handles = handles(talk->section);
    talk->step = 1;
    wait_until(&talk->go_on, 1);
    if (!all_are(made, 18))
        return 5;
    /* Its own from now on: what it writes, and where, the other does not see. */
    if (oo_pages_show(made, BYTES, talk->section, 0) != 0 || !all_are(made, 18))
        return 6;
    made[UNIT] = 99;
    made[BYTES - 1] = 99;
    if (strcmp(part, "killed") == 0)
        oo_section_close(talk->section); /* it is the other's alone, but for the mapping */
    talk->step = 2;
    wait_until(&talk->go_on, 2);
    if (made[0] != 18 || made[UNIT] != 99 || made[BYTES - 1] != 99)
        return 7;
    oo__pages_unmap(made, BYTES);
    oo__pages_unmap(talk, UNIT);
    return 0;
}

/* ---- */

static struct talk *begin_talk(int *section) {
    *section = oo_section_create(UNIT);
    CHECK(*section >= 0, "no section: %d", errno);
    return map(*section, UNIT);
}

static void with_a_child(const char *part) {
    int control;
    struct talk *talk = begin_talk(&control);
    struct child child = start(part, control);
    wait_until(&talk->step, 1);
    const int section = oo_section_take(child.id, talk->section);
    CHECK(section >= 0, "not taken: %d", errno);
    struct oo_host *host;
    CHECK(oo_host_create_shared(BYTES, section, 0, &host) == OO_OK, "%s", oo_error_message());
    unsigned char *bytes = oo_host_address(host);
    CHECK(all_are(bytes, 17), "what the other process wrote is not here");
#if defined(_WIN32)
    CHECK(talk->handles == 1 && handles(section) == 2, "%u, %u handles", talk->handles,
          handles(section));
#endif
    memset(bytes, 18, BYTES);
    talk->go_on = 1;
    wait_until(&talk->step, 2);
    CHECK(all_are(bytes, 18), "what the other process wrote for itself is here");
    const int kills = strcmp(part, "killed") == 0;
    if (kills)
        end_by_force(&child);
    talk->go_on = kills ? 0 : 2;
    const int code = wait_for(&child);
    CHECK(code == (kills ? 9 : 0), "the other process ended with %d", code);
#if defined(_WIN32)
    CHECK(handles(section) == 1, "%u handles are left", handles(section));
#endif
    /* Who made it is gone, and it is here: it goes with the last. */
    CHECK(all_are(bytes, 18), "it went with the process that made it");
    CHECK(oo_section_take(child.id, talk->section) < 0, "a process that is gone has handles");
    oo_section_close(section);
    CHECK(all_are(bytes, 18), "it went with the handle");
    CHECK(oo_host_destroy(host) == OO_OK, "%s", oo_error_message());
    oo__pages_unmap(talk, UNIT);
    oo_section_close(control);
}

CASE(test_two_processes_see_one_memory_which_outlives_its_maker) { with_a_child("ends"); }

CASE(test_a_process_that_is_killed_leaves_nothing_open) {
    for (int i = 0; i < 5; i++)
        with_a_child("killed");
}

/* What is read alone ends the process that writes it. */
CASE(test_memory_that_is_read_alone_can_be_written_again) {
    const int section = oo_section_create(BYTES);
    struct oo_host *host;
    CHECK(oo_host_create_shared(BYTES, section, 0, &host) == OO_OK, "%s", oo_error_message());
    unsigned char *bytes = oo_host_address(host), *again = map(section, BYTES);
    memset(bytes, 3, BYTES);
    CHECK(oo_host_protect(host, 0) == OO_OK, "%s", oo_error_message());
    CHECK(all_are(bytes, 3), "it cannot be read");
#if defined(_WIN32)
    MEMORY_BASIC_INFORMATION found;
    CHECK(VirtualQuery(bytes + UNIT, &found, sizeof found) && found.Protect == PAGE_READONLY &&
              found.Type == MEM_MAPPED,
          "%lx", found.Protect);
    CHECK(!ReadProcessMemory(GetCurrentProcess(), again, bytes, 1, NULL), "it was written");
#else
    int ends[2];
    CHECK(pipe(ends) == 0 && write(ends[1], "x", 1) == 1, "no pipe");
    CHECK(read(ends[0], bytes, 1) < 0 && errno == EFAULT, "it was written");
    close(ends[0]), close(ends[1]);
#endif
    again[0] = 4; /* by another mapping it can: that one is not protected */
    CHECK(bytes[0] == 4, "two mappings of one section differ");
    CHECK(oo_host_protect(host, 1) == OO_OK, "%s", oo_error_message());
    bytes[BYTES - 1] = 5;
    CHECK(again[BYTES - 1] == 5, "not written");
    oo__pages_unmap(again, BYTES);
    oo_section_close(section);
    CHECK(oo_host_destroy(host) == OO_OK, "%s", oo_error_message());
}

CASE(test_what_is_no_section_is_refused) {
    CHECK(oo_section_take(own_id(), 1 << 20) < 0, "there is no such handle");
    CHECK(oo_section_create((size_t)1 << 63) < 0, "there is no such memory");
    struct oo_host *host;
    CHECK(oo_host_create_shared(BYTES, 1 << 20, 0, &host) == OO_E_STATE && !host, "mapped");
    const int section = oo_section_create(BYTES);
#if !defined(_WIN32)
    CHECK(ftruncate(section, UNIT) < 0 && errno == EPERM, "it was cut off");
    CHECK(fcntl(section, F_GETFD) == FD_CLOEXEC, "a child has it");
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "no limit");
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "not limited");
    CHECK(oo_section_create(BYTES) < 0 && errno == EMFILE, "why there is none: %d", errno);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "limited for good");
#endif
    oo_section_close(section);
    CHECK(!oo__pages_map_shared(BYTES, section, 0), "it is open");
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "--play") == 0)
        return play(argv[2], (unsigned)strtoul(argv[3], NULL, 10), (int)strtol(argv[4], NULL, 10));
    return check_main(argc, argv, NULL);
}
