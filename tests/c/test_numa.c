/* The device's NUMA node: it is read as the system tells it, and the threads that copy and fill run
 * there. The system is a folder of the test's own. */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sched.h>
#include <sys/stat.h>
#endif

#include "device.h"
#include "world.h"

#if defined(__linux__)

static char sys[] = "/tmp/oo-numa-XXXXXX";

static void write_file(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", sys, name);
    for (char *slash = strchr(path + sizeof sys, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s: not written", path);
}

static void remove_all_files(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", sys);
    // NOLINTNEXTLINE(bugprone-command-processor,cert-env33-c): a folder of mkdtemp's
    CHECK(system(command) == 0, "%s stays", sys);
}

/* The processors that this thread may run on, as a list; and the first of them, or -1. */
static int processors(char *list, size_t capacity) {
    cpu_set_t mine;
    int first = -1;
    size_t length = 0;
    list[0] = '\0';
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) /* checks are the main thread's */
        return -1;
    for (size_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &mine)) {
            first = first < 0 ? (int)i : first;
            length += (size_t)snprintf(list + length, capacity - length, "%zu ", i);
        }
    return first;
}

static char everywhere[4096], here[32]; /* all processors; the one of node 1 */

static void make_system(void) {
    char one[32];
    strcpy(sys + sizeof sys - 7, "XXXXXX");
    CHECK(mkdtemp(sys) != NULL, "no folder");
    const int first = processors(everywhere, sizeof everywhere);
    CHECK(first >= 0, "no processors");
    snprintf(one, sizeof one, "%d-%d\n", first, first);
    snprintf(here, sizeof here, "%d ", first);
    write_file("devices/system/node/node1/cpulist", one);
    write_file("devices/system/node/node2/cpulist", "5000,6000-6001\n");
    write_file("devices/system/node/node3/cpulist", "nothing\n");
    write_file("devices/system/node/node4/cpulist", "0-9999999\n");
}

CASE(the_node_is_read_as_the_system_tells_it) {
    make_system();
    write_file("bus/pci/devices/0000:ab:00.0/numa_node", "1\n");
    write_file("bus/pci/devices/0000:ac:00.0/numa_node", "-1\n");
    write_file("bus/pci/devices/0000:ad:00.0/numa_node", "\n");
    write_file("bus/pci/devices/0000:ae:00.0/numa_node", "none");
    write_file("bus/pci/devices/0000:af:00.0/numa_node", "99999999999");
    write_file("bus/pci/devices/0000:b1:00.0/numa_node", "-7\n");
    CHECK(oo__numa_node(sys, "0000:AB:00.0") == 1, "the driver writes capitals");
    const char *const untold[] = {"0000:AC:00.0", "0000:AD:00.0", "0000:AE:00.0",
                                  "0000:AF:00.0", "0000:B0:00.0", "0000:B1:00.0"};
    for (size_t i = 0; i < sizeof untold / sizeof *untold; i++)
        CHECK(oo__numa_node(sys, untold[i]) == -1, "%s: %d", untold[i],
              oo__numa_node(sys, untold[i]));
    CHECK(oo__numa_node(OO_SYS, "0000:zz:00.0") == -1, "no such device");
    remove_all_files();
}

CASE(a_thread_is_bound_as_far_as_it_may_run_there) {
    char now[4096];
    make_system();
    struct oo_binding *binding = oo__thread_bind(sys, 1);
    (void)processors(now, sizeof now);
    CHECK(binding && strcmp(now, here) == 0, "runs on %s", now);
    oo__thread_unbind(binding);
    (void)processors(now, sizeof now);
    CHECK(strcmp(now, everywhere) == 0, "runs on %s afterwards", now);
    /* No such node, none of its processors, a list that says nothing, no node at all. */
    const int nowhere[] = {0, 2, 3, -1};
    for (size_t i = 0; i < 4; i++) {
        CHECK(oo__thread_bind(sys, nowhere[i]) == NULL, "node %d", nowhere[i]);
        (void)processors(now, sizeof now);
        CHECK(strcmp(now, everywhere) == 0, "node %d: runs on %s", nowhere[i], now);
    }
    oo__thread_unbind(NULL);
    binding = oo__thread_bind(sys, 4);
    (void)processors(now, sizeof now);
    CHECK(binding && strcmp(now, everywhere) == 0, "runs on %s", now);
    oo__thread_unbind(binding);
    remove_all_files();
}

static OOCUresult(OOCUDAAPI *real_copy)(OOCUdeviceptr, const void *, size_t, OOCUstream);
static OOCUresult(OOCUDAAPI *real_allocate)(void **, size_t, unsigned int);
static struct oo_mutex *copying;
static char where_copied[4096], where_allocated[4096];

static OOCUresult OOCUDAAPI seen_copy(OOCUdeviceptr target, const void *source, size_t bytes,
                                      OOCUstream stream) {
    oo__mutex_lock(copying);
    (void)processors(where_copied, sizeof where_copied);
    oo__mutex_unlock(copying);
    return real_copy(target, source, bytes, stream);
}

static OOCUresult OOCUDAAPI seen_allocate(void **memory, size_t bytes, unsigned int flags) {
    (void)processors(where_allocated, sizeof where_allocated);
    return real_allocate(memory, bytes, flags);
}

CASE(copy_threads_run_where_the_device_is) {
    struct world w;
    char now[4096];
    make_system();
    copying = oo__mutex_create();
    sim.simRefuseRegistration(1);
    world_begin(&w);
    CHECK(oo_engine_numa_node(w.engine) == -1, "a simulated device is nowhere");
    w.engine->sys = sys;
    w.engine->numa_node = 1;
    real_copy = w.engine->driver.cuMemcpyHtoDAsync;
    real_allocate = w.engine->driver.cuMemHostAlloc;
    w.engine->driver.cuMemcpyHtoDAsync = seen_copy;
    w.engine->driver.cuMemHostAlloc = seen_allocate;
    CHECK(world_attach(&w, 400000, -1), "attach: %s", oo_error_message());
    need(use(&w, 0, OO_FORWARD), "use");
    feeds_end(&w);
    CHECK(strcmp(where_copied, here) == 0, "copied on %s", where_copied);
    CHECK(strcmp(where_allocated, here) == 0, "the ring was allocated on %s", where_allocated);
    (void)processors(now, sizeof now);
    CHECK(strcmp(now, everywhere) == 0, "the caller stays on %s", now);
    sim.simRefuseRegistration(0);
    world_close(&w, "numa");
    oo__mutex_destroy(copying);
    remove_all_files();
}

/* Filling touches the pages: the kernel gives them on the node of the processor that does. */
CASE(masters_are_filled_where_the_device_is) {
    enum { BYTES = 9 << 20 };
    struct oo_host *host;
    char *source = malloc(BYTES), now[4096];
    make_system();
    memset(source, 5, BYTES);
    need(oo_host_create(BYTES, &host), "host");
    CHECK(host->node == -1 && strcmp(host->sys, OO_SYS) == 0, "no node is asked for");
    host->sys = sys;
    oo_host_prefer_node(host, 1);
    CHECK(host->node == 1, "not kept");
    need(oo_host_fill(host, 0, source, BYTES), "fill");
    CHECK(memcmp(oo_host_address(host), source, BYTES) == 0, "wrong bytes");
    (void)processors(now, sizeof now);
    CHECK(strcmp(now, everywhere) == 0, "the caller stays on %s", now);
    oo_host_destroy(host);
    free(source);
    remove_all_files();
}

static int told;
static OOCUresult refusal = OOCU_ERROR_INVALID_VALUE;
static OOCUresult OOCUDAAPI telling(int *value, int attribute, OOCUdevice device) {
    (void)device;
    if (attribute != OOCU_DEVICE_ATTRIBUTE_HOST_NUMA_ID || told < -1)
        return refusal;
    *value = told;
    return OOCU_SUCCESS;
}

static int node_of(struct world *w) {
    w->engine->numa_node = -1;
    need(oo__ask_node(w->engine), "ask");
    return w->engine->numa_node;
}

/* An older driver does not know the question; any other failure is an error. */
CASE(a_driver_that_does_not_know_the_node_is_no_failure) {
    struct world w;
    world_open(&w, 60000, -1);
    w.engine->driver.cuDeviceGetAttribute = telling;
    told = -2;
    refusal = OOCU_ERROR_NOT_SUPPORTED;
    CHECK(node_of(&w) == -1, "not supported");
    refusal = OOCU_ERROR_INVALID_VALUE;
    CHECK(node_of(&w) == -1, "not known");
    refusal = OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES;
    CHECK(oo__ask_node(w.engine) == OO_E_DRIVER, "a failure");
    refusal = OOCU_ERROR_INVALID_VALUE;
    world_close(&w, "node");
}

/* The driver is asked where the system does not say. */
CASE(the_driver_may_know_the_node) {
    struct world w;
    make_system();
    write_file("bus/pci/devices/0000:ab:00.0/numa_node", "1\n");
    world_open(&w, 60000, -1);
    w.engine->sys = sys;
    w.engine->driver.cuDeviceGetAttribute = telling;
    strcpy(w.engine->pci_id, "0000:AB:00.0");
    for (told = -2; told < 3; told++)
        CHECK(node_of(&w) == (told < 0 ? -1 : told), "the driver says %d", told);
    w.engine->driver.simulated = 0;
    CHECK(node_of(&w) == 1, "the system says 1");
    strcpy(w.engine->pci_id, "0000:AC:00.0");
    CHECK(node_of(&w) == told, "the system says nothing");
    w.engine->driver.simulated = 1;
    world_close(&w, "node");
    remove_all_files();
}

#else

CASE(nowhere_is_a_node_told) {
    CHECK(oo__numa_node(OO_SYS, "0000:01:00.0") == -1, "told");
    CHECK(oo__thread_bind(OO_SYS, -1) == NULL, "bound");
    oo__thread_unbind(NULL);
}

#endif

CHECK_MAIN(world_prepare)
