/* The calls themselves: symbols, contexts, memory, handles, capture, host functions. What a real
 * driver leaves undefined is tested here and not in conformance.c. */
#include "../../csrc/driver/driver.h"
#include "sim_test.h"

#include <stdatomic.h>

CASE(symbols_are_found_by_base_name_and_version) {
    static const struct {
        const char *name;
        int introduced;
    } rows[] = {
#define ROW(name, introduced, need, parameters) {#name, introduced},
        OO_DRIVER_CALLS(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        void *function = NULL;
        int status = -1;
        if (!rows[i].introduced)
            continue;
        OK(cu.cuGetProcAddress(rows[i].name, &function, rows[i].introduced, 1, &status));
        CHECK(function && status == 0, "%s at %d", rows[i].name, rows[i].introduced);
        OK(cu.cuGetProcAddress(rows[i].name, &function, 12990, 1, &status));
        CHECK(function && status == 0, "%s above the driver's version", rows[i].name);
        IS(OOCU_ERROR_INVALID_VALUE,
           cu.cuGetProcAddress(rows[i].name, &function, 99000, 1, &status));
        OK(cu.cuGetProcAddress(rows[i].name, &function, rows[i].introduced - 10, 1, &status));
        CHECK(!function && status == 2, "%s below %d", rows[i].name, rows[i].introduced);
    }
    void *function = &function;
    int status = -1;
    OK(cu.cuGetProcAddress("cuFlyToTheMoon", &function, 12000, 1, &status));
    CHECK(!function && status == 1, "an unknown symbol is SUCCESS and NULL");
    OK(cu.cuGetProcAddress("cuMemGetInfo_v2", &function, 12000, 1, NULL));
    CHECK(!function, "base names only");
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuGetProcAddress(NULL, &function, 12000, 1, NULL));
}

static void *address_of(const char *name, int version, uint64_t flags) {
    void *function = NULL;
    OK(cu.cuGetProcAddress(name, &function, version, flags, NULL));
    return function;
}

/* Flag 2: calls on streams have a variant to which stream 0 is the thread's own; others are the
 * same for all. */
CASE(per_thread_default_streams_can_be_asked_for) {
    static const char *const on_streams[] = {
        "cuMemcpyHtoDAsync",   "cuMemcpyDtoHAsync",    "cuMemsetD32Async",   "cuStreamGetPriority",
        "cuStreamGetFlags",    "cuStreamSynchronize",  "cuStreamQuery",      "cuStreamWaitEvent",
        "cuStreamIsCapturing", "cuStreamBeginCapture", "cuStreamEndCapture", "cuEventRecord",
        "cuLaunchHostFunc",    "cuLaunchKernel",
    };
    enum { ON_STREAMS = sizeof on_streams / sizeof on_streams[0] };
    static const char *const all[] = {
#define ROW(name, introduced, need, parameters) #name,
        OO_DRIVER_CALLS(ROW)
#undef ROW
    };
    void *legacy[ON_STREAMS], *own[ON_STREAMS];
    for (int i = 0; i < ON_STREAMS; i++) {
        legacy[i] = address_of(on_streams[i], 12000, 1);
        own[i] = address_of(on_streams[i], 12000, 2);
        CHECK(own[i] && own[i] != legacy[i], "%s", on_streams[i]);
        CHECK(address_of(on_streams[i], 12000, 0) == legacy[i], "%s by default", on_streams[i]);
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        int has_own = 0;
        for (int j = 0; j < ON_STREAMS; j++)
            has_own |= strcmp(all[i], on_streams[j]) == 0;
        CHECK(has_own || address_of(all[i], 12000, 2) == address_of(all[i], 12000, 1),
              "%s has no variant", all[i]);
    }
    CHECK(address_of("cuStreamQuery", 6000, 2) == legacy[6], "before there were such streams");
    CHECK(!address_of("cuStreamQuery", 1000, 2), "below the version it was introduced at");
    CHECK(!address_of("cuFlyToTheMoon", 12000, 2), "no such call");
    void *function;
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuGetProcAddress("cuStreamQuery", &function, 12000, 3, NULL));

    /* A held non-blocking stream's work delays no other; work on the thread's own stream is what
     * its variants see, and the legacy ones do when asked about handle 2. */
    sim_test_begin(SIM_TIMED, 0);
    struct sim_library mine = cu;
    memcpy(&mine.cuMemsetD32Async, &own[2], sizeof own[2]);
    memcpy(&mine.cuStreamSynchronize, &own[5], sizeof own[5]);
    memcpy(&mine.cuStreamQuery, &own[6], sizeof own[6]);
    memcpy(&mine.cuStreamIsCapturing, &own[8], sizeof own[8]);
    memcpy(&mine.cuEventRecord, &own[11], sizeof own[11]);
    const OOCUdeviceptr device = device_bytes(1 << 20);
    OOCUevent event = new_event();
    OK(mine.cuMemsetD32Async(device, 7, 1 << 18, NULL));
    IS(OOCU_ERROR_NOT_READY, mine.cuStreamQuery(NULL));
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(OOCU_STREAM_PER_THREAD));
    OK(mine.cuEventRecord(event, NULL));
    IS(OOCU_ERROR_NOT_READY, cu.cuEventQuery(event));
    OK(mine.cuStreamSynchronize(NULL));
    OK(cu.cuEventQuery(event));
    CHECK(((const uint32_t *)device)[0] == 7, "not set");
    /* One that is named stays the one that is named. */
    OOCUstream stream = new_stream();
    OK(mine.cuMemsetD32Async(device, 8, 1 << 18, stream));
    OK(mine.cuStreamQuery(NULL));
    IS(OOCU_ERROR_NOT_READY, mine.cuStreamQuery(stream));
    OK(mine.cuStreamSynchronize(stream));
    sim_test_end();
}

/* Each preset is a card that exists: its attributes are true, and one that is not known is an
 * error. */
CASE(attributes_are_those_of_the_card) {
    static const struct {
        const char *preset;
        int attribute, value;
    } rows[] = {
        {"rtx3090", 16, 82},     {"rtx4090", 16, 128},  {"rtx5090", 16, 170},
        {"h200", 16, 132},       {"rtx3090", 39, 1536}, {"rtx4090", 39, 1536},
        {"rtx5090", 39, 1536},   {"h200", 39, 2048},    {"rtx3090", 40, 2},
        {"rtx4090", 40, 2},      {"rtx5090", 40, 2},    {"h200", 40, 3},
        {"rtx3090", 75, 8},      {"rtx4090", 75, 8},    {"rtx5090", 75, 12},
        {"h200", 75, 9},         {"rtx3090", 76, 6},    {"rtx4090", 76, 9},
        {"rtx5090", 76, 0},      {"h200", 76, 0},       {"rtx3090", 32, 0},
        {"h200", 32, 1},         {"rtx3090", 37, 384},  {"h200", 37, 6144},
        {"rtx3090", 81, 102400}, {"h200", 81, 233472},  {"rtx3090", 97, 101376},
        {"h200", 97, 232448},    {"rtx3090", 106, 16},  {"rtx4090", 106, 24},
        {"rtx5090", 106, 24},    {"h200", 106, 32},
    };
    struct sim_device original, device;
    int value;
    OK(cu.simReset());
    OK(cu.cuInit(0));
    OK(cu.simGetDevice(0, &original));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        OK(cu.simPreset(rows[i].preset, &device));
        OK(cu.simSetDevice(0, &device));
        OK(cu.cuDeviceGetAttribute(&value, rows[i].attribute, 0));
        CHECK(value == rows[i].value, "%s: attribute %d is %d", rows[i].preset, rows[i].attribute,
              value);
        OK(cu.cuDeviceGetAttribute(&value, 10, 0));
        CHECK(value == 32, "a warp of %d", value);
        OK(cu.cuDeviceGetAttribute(&value, 1, 0));
        CHECK(value == 1024, "blocks of %d", value);
    }
    value = 77;
    IS(OOCU_ERROR_NOT_SUPPORTED, cu.cuDeviceGetAttribute(&value, 13, 0)); /* clock rate */
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuDeviceGetAttribute(&value, 0, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuDeviceGetAttribute(&value, 151, 0));
    IS(OOCU_ERROR_INVALID_DEVICE, cu.cuDeviceGetAttribute(&value, 10, 9));
    device.compute_major = 7; /* a card that does not exist */
    OK(cu.simSetDevice(0, &device));
    IS(OOCU_ERROR_NOT_SUPPORTED, cu.cuDeviceGetAttribute(&value, 16, 0));
    CHECK(value == 77, "written all the same");
    OK(cu.cuDeviceGetAttribute(&value, 10, 0));
    OK(cu.simSetDevice(0, &original));
    OK(cu.simReset());
}

CASE(memory_that_is_not_mapped_cannot_be_registered) {
    enum { PAGE = 4096 };
    sim_test_begin(SIM_TIMED, 0);
    char *pages = oo__pages_map(4 * PAGE);
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister((void *)(uintptr_t)PAGE, PAGE, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister((void *)(UINTPTR_MAX - PAGE), 2 * PAGE, 0));
    OK(cu.cuMemHostRegister(pages + 100, 3 * PAGE, 0)); /* no page need begin there */
    OK(cu.cuMemHostUnregister(pages + 100));
    oo__pages_unmap(pages, 4 * PAGE);
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister(pages, 4 * PAGE, 0));
    sim_test_end();
}

CASE(what_is_no_image_is_refused) {
    static const unsigned char fatbin[16] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16};
    static const unsigned char other_version[16] = {0x50, 0xED, 0x55, 0xBA, 2, 0, 16};
    unsigned char elf[64] = {0x7F, 'E', 'L', 'F', 2, 1, 1};
    unsigned char host_elf[64] = {0x7F, 'E', 'L', 'F', 2, 1, 1};
    elf[18] = 190;     /* for CUDA */
    host_elf[18] = 62; /* for x86-64 */
    const void *const images[] = {fatbin, elf, ".version 8.0\n.target sm_80",
                                  "// made by\n/* hand **/ \t\r\n.version 7.0"};
    const void *const others[] = {
        other_version, host_elf,  "",          "any image",       "\x7f",
        "\x50\xED",    "// only", "/* no end", "// .version 7.0", "/x\n.version 7.0"};
    OOCUmodule module = NULL;
    sim_test_begin(SIM_TIMED, 0);
    for (size_t i = 0; i < sizeof images / sizeof images[0]; i++) {
        OK(cu.cuModuleLoadData(&module, images[i]));
        OK(cu.cuModuleUnload(module));
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        IS(OOCU_ERROR_INVALID_IMAGE, cu.cuModuleLoadData(&module, others[i]));
    struct sim_live live;
    cu.simGetLive(&live);
    CHECK(live.modules == 0, "%llu modules", (unsigned long long)live.modules);
    sim_test_end();
}

CASE(contexts) {
    OOCUcontext context, current;
    OOCUstream stream;
    size_t a, b;
    OK(cu.simReset());
    OK(cu.cuInit(0));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuMemGetInfo(&a, &b));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuCtxPopCurrent(&context));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuCtxPushCurrent(NULL));
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuDevicePrimaryCtxRelease(0));
    OK(cu.cuCtxGetCurrent(&current));
    CHECK(!current, "no context yet");
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuDevicePrimaryCtxRetain(&current, 0));
    CHECK(current == context, "one primary context per device");
    IS(OOCU_ERROR_INVALID_CONTEXT, cu.cuMemGetInfo(&a, &b)); /* retained, not current */
    OK(cu.cuCtxPushCurrent(context));
    OK(cu.cuCtxPushCurrent(context));
    OK(cu.cuMemGetInfo(&a, &b));
    CHECK(a == b && b == (size_t)24 << 30, "%zu of %zu", a, b);
    OK(cu.cuStreamCreateWithPriority(&stream, 1, 0));
    OK(cu.cuDevicePrimaryCtxRelease(0));
    OK(cu.cuStreamQuery(stream));
    OK(cu.cuDevicePrimaryCtxRelease(0));
    CHECK(reports_of("lint: the last release") == 1, "a stream left alive is pointed out");
    IS(OOCU_ERROR_CONTEXT_IS_DESTROYED, cu.cuMemGetInfo(&a, &b));
    IS(OOCU_ERROR_CONTEXT_IS_DESTROYED, cu.cuStreamQuery(stream));
    OK(cu.cuCtxPopCurrent(&current));
    CHECK(current == context, "popped");
    OK(cu.cuCtxPopCurrent(NULL));
    IS(OOCU_ERROR_CONTEXT_IS_DESTROYED, cu.cuCtxPushCurrent(context));
    struct sim_live live;
    OK(cu.simGetLive(&live));
    CHECK(!live.streams && !live.contexts, "nothing is left");
    OK(cu.simReset());
}

CASE(two_devices_are_two) {
    OK(cu.simReset());
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSetDeviceCount(9));
    OK(cu.simSetDeviceCount(2));
    struct sim_device small;
    OK(cu.simPreset("rtx3090", &small));
    small.memory_bytes = 1 << 20;
    OK(cu.simSetDevice(1, &small));
    sim_test_begin(SIM_TIMED, 0);
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.simSetDevice(0, &small));
    OOCUcontext second;
    int major, minor, count;
    char name[64], id[16], other_id[16];
    OK(cu.cuDeviceGetCount(&count));
    CHECK(count == 2, "%d devices", count);
    OK(cu.cuDeviceGetName(name, sizeof name, 1));
    CHECK(!strcmp(name, "Simulated RTX 3090"), "%s", name);
    OK(cu.cuDeviceGetAttribute(&major, OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 1));
    OK(cu.cuDeviceGetAttribute(&minor, OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 1));
    CHECK(major == 8 && minor == 6, "%d.%d", major, minor);
    OK(cu.cuDeviceGetPCIBusId(id, sizeof id, 0));
    OK(cu.cuDeviceGetPCIBusId(other_id, sizeof other_id, 1));
    CHECK(strcmp(id, other_id) != 0 && strlen(id) == 12, "%s %s", id, other_id);
    OOCUevent event0 = new_event();
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxPushCurrent(second));
    OOCUdeviceptr ptr;
    OK(cu.cuMemAlloc(&ptr, 1 << 20));
    IS(OOCU_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc(&ptr, 1));
    OOCUstream stream = new_stream();
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventRecord(event0, stream));
    OK(cu.cuStreamDestroy(stream));
    OK(cu.cuMemFree(ptr));
    OK(cu.cuCtxPopCurrent(NULL));
    OK(cu.cuDevicePrimaryCtxRelease(1));
    sim_test_end();
    OK(cu.simSetDeviceCount(1));
}

CASE(host_memory) {
    enum { BYTES = 1 << 16 };
    sim_test_begin(SIM_TIMED, 0);
    struct sim_live live;
    char *block = malloc(BYTES), *pinned;
    OK(cu.cuMemHostRegister(block, BYTES / 2, OOCU_MEMHOSTREGISTER_PORTABLE));
    IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister(block, BYTES / 2, 0));
    IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
       cu.cuMemHostRegister(block + BYTES / 2 - 1, 100, 0));
    OK(cu.cuMemHostRegister(block + BYTES / 2, BYTES / 2, 0));
    OK(cu.simGetLive(&live));
    CHECK(live.registrations == 2 && live.registered_bytes == BYTES, "%llu registrations",
          (unsigned long long)live.registrations);
    OOCUdeviceptr device = device_bytes(BYTES);
    OOCUstream stream = new_stream();
    /* A copy over two adjacent registrations, and one that leaves a registration. */
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync(device, block + BYTES / 2 - 8, 16, stream));
    OK(cu.cuMemHostUnregister(block + BYTES / 2));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync(device, block + BYTES / 2 - 8, 16, stream));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemcpyHtoDAsync(device + BYTES - 8, block, 16, stream));
    IS(OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(block + BYTES / 2));
    IS(OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(block + 8));
    OK(cu.cuMemcpyHtoDAsync(device, block, 0, stream));
    CHECK(cu.simReportCount() == 0, "no report so far");
    /* In flight. */
    memset(block, 1, BYTES);
    OK(cu.cuMemcpyHtoDAsync(device, block, 100, stream));
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.cuMemHostUnregister(block));
    CHECK(reports_of("in flight: cuMemHostUnregister") == 1, "reported");
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.cuMemFree(device));
    OK(cu.cuStreamSynchronize(stream));
    OK(cu.cuMemHostUnregister(block));
    /* Pageable: works, is read late, and is pointed out once per stream and direction. */
    OK(cu.simReportsClear());
    OK(cu.cuMemcpyHtoDAsync(device, block, 100, stream));
    OK(cu.cuMemcpyHtoDAsync(device + 100, block, 100, stream));
    memset(block, 2, 100);
    OK(cu.cuStreamSynchronize(stream));
    CHECK(reports_of("lint: pageable") == 1, "%llu lints",
          (unsigned long long)reports_of("lint: pageable"));
    CHECK(*(char *)device == 2, "a pageable source stays in use until the copy's event");
    OK(cu.cuMemHostAlloc((void **)&pinned, BYTES, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemFreeHost(pinned + 1));
    IS(OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(pinned));
    IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister(pinned, 100, 0));
    OK(cu.cuMemFreeHost(pinned));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemFreeHost(pinned));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemHostRegister((void *)device, 100, 0));
    OK(cu.cuMemFree(0));
    OK(cu.cuMemFree(device));
    IS(OOCU_ERROR_INVALID_VALUE, cu.cuMemFree(device));
    free(block);
    sim_test_end();
}

/* Registered once for the process; page-locked for the context it was made in, or for all; and gone
 * with that context. */
CASE(a_registration_and_the_contexts) {
    enum { BYTES = 1 << 16 };
    OK(cu.simReset());
    OK(cu.simSetDeviceCount(2));
    sim_test_begin(SIM_TIMED, 0);
    OOCUcontext second;
    OOCUdeviceptr device;
    struct sim_live live;
    char *block = malloc(BYTES);
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    for (unsigned portable = 0; portable < 2; portable++) {
        OK(cu.cuMemHostRegister(block, BYTES, portable ? OOCU_MEMHOSTREGISTER_PORTABLE : 0));
        OK(cu.cuCtxPushCurrent(second));
        IS(OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
           cu.cuMemHostRegister(block, BYTES, OOCU_MEMHOSTREGISTER_PORTABLE));
        OOCUstream stream = new_stream();
        OK(cu.cuMemAlloc(&device, BYTES));
        OK(cu.cuMemcpyHtoDAsync(device, block, BYTES, stream));
        CHECK(reports_of("lint: pageable") == !portable, "portable %u: %llu lints", portable,
              (unsigned long long)reports_of("lint: pageable"));
        OK(cu.simReportsClear());
        OK(cu.cuCtxPopCurrent(NULL));
        IS(OOCU_ERROR_ILLEGAL_STATE, cu.cuMemHostUnregister(block)); /* another's copy uses it */
        OK(cu.simReportsClear());
        OK(cu.cuCtxPushCurrent(second));
        OK(cu.cuStreamSynchronize(stream));
        OK(cu.cuMemHostUnregister(block)); /* in whatever context */
        OK(cu.cuStreamDestroy(stream));
        OK(cu.cuMemFree(device));
        OK(cu.cuMemHostRegister(block, BYTES, OOCU_MEMHOSTREGISTER_PORTABLE));
        OK(cu.cuCtxPopCurrent(NULL));
        OK(cu.cuDevicePrimaryCtxRelease(1));
        OK(cu.simGetLive(&live));
        CHECK(live.registrations == 0, "it outlives the context it was made in");
        OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    }
    OK(cu.cuDevicePrimaryCtxRelease(1));
    free(block);
    sim_test_end();
    OK(cu.simSetDeviceCount(1));
}

CASE(old_handles_are_refused) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream(), next;
    OOCUevent event = new_event();
    OOCUdeviceptr device = device_bytes(64);
    char *host = host_bytes(64);
    memset(host, 9, 64);
    OK(cu.cuMemcpyHtoDAsync(device, host, 64, stream));
    OK(cu.cuEventRecord(event, stream));
    OK(cu.cuStreamDestroy(stream)); /* with work pending: none of it is dropped */
    OK(cu.cuEventSynchronize(event));
    CHECK(*(char *)device == 9, "a destroyed stream's work was dropped");
    OK(cu.cuEventDestroy(event));
    next = new_stream(); /* may take the old one's place, not its name */
    CHECK(next != stream, "a handle came back");
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamDestroy(stream));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamQuery(stream));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamSynchronize(stream));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuMemcpyHtoDAsync(device, host, 64, stream));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.simLaunch(stream, NULL, 0, NULL, 0, 0));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventRecord(event, next));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventQuery(event));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventSynchronize(event));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamWaitEvent(next, event, 0));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventDestroy(event));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuEventDestroy(NULL));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuStreamDestroy(NULL));
    OK(cu.cuStreamDestroy(next));
    for (int i = 0; i < 10000; i++) /* handles and clocks are used again */
        OK(cu.cuStreamDestroy(new_stream()));
    sim_test_end();
}

/* Beyond what conformance.c asks. */
CASE(capture_is_refused_where_the_driver_refuses) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream captured = new_stream(), blocking;
    OOCUevent event = new_event();
    int status;
    void *graph;
    OK(cu.cuStreamCreateWithPriority(&blocking, OOCU_STREAM_DEFAULT, 0));
    OK(cu.cuStreamBeginCapture(captured, 0));
    OK(cu.cuEventRecord(event, captured));
    IS(OOCU_ERROR_CAPTURED_EVENT, cu.cuEventSynchronize(event));
    OK(cu.cuStreamIsCapturing(NULL, &status)); /* a non-blocking stream captures: no matter */
    OK(cu.cuStreamEndCapture(captured, &graph));
    OK(cu.cuGraphDestroy(graph));
    OK(cu.cuStreamBeginCapture(captured, 0));
    IS(OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(captured));
    IS(OOCU_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuEventRecord(event, captured));
    IS(OOCU_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(captured, &graph));
    OK(cu.cuStreamBeginCapture(blocking, 0));
    IS(OOCU_ERROR_STREAM_CAPTURE_IMPLICIT, cu.cuEventRecord(event, NULL));
    IS(OOCU_ERROR_STREAM_CAPTURE_INVALIDATED, cu.cuStreamEndCapture(blocking, &graph));
    sim_test_end();
}

/* ---- host functions ---- */

static atomic_int calls, may_go, refused;

static void OOCUDAAPI count_call(void *ptr) {
    *(int *)ptr = atomic_fetch_add(&calls, 1) + 1;
    OOCUevent event;
    if (cu.cuEventCreate(&event, 0) == OOCU_ERROR_NOT_PERMITTED)
        atomic_fetch_add(&refused, 1);
}

static void OOCUDAAPI wait_for_go(void *unused) {
    (void)unused;
    while (!atomic_load(&may_go))
        ;
}

CASE(host_functions_run_by_themselves_and_in_order) {
    for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED; schedule++) {
        sim_test_begin(schedule, 11);
        atomic_store(&calls, 0);
        atomic_store(&refused, 0);
        OOCUstream stream = new_stream(), other = new_stream();
        OOCUevent event = new_event();
        OOCUdeviceptr device = device_bytes(64);
        char *host = host_bytes(64);
        int first = 0, second = 0;
        memset(host, 1, 64);
        OK(cu.cuMemcpyHtoDAsync(device, host, 64, stream));
        OK(cu.cuLaunchHostFunc(stream, count_call, &first));
        OK(cu.cuEventRecord(event, stream));
        OK(cu.cuStreamWaitEvent(other, event, 0));
        OK(cu.cuLaunchHostFunc(other, count_call, &second));
        while (atomic_load(&refused) < 2) /* no call of ours makes it run */
            ;
        OK(cu.cuStreamSynchronize(other));
        CHECK(first == 1 && second == 2, "order %d %d on %s", first, second,
              schedule_names[schedule]);
        CHECK(*(char *)device == 1, "what is before a host function ran before it");
        CHECK(reports_of("lint: cuEventCreate") == 1,
              "a CUDA call from a host function is pointed out");
        /* A host function that does not return: work behind it waits, and so does a wait, for a
         * while. */
        atomic_store(&may_go, 0);
        OK(cu.simReportsClear());
        OK(cu.simPatience(30));
        OK(cu.cuLaunchHostFunc(stream, wait_for_go, NULL));
        OK(cu.cuMemsetD32Async(device, 0x02020202, 16, stream));
        IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(stream));
        OK(cu.simAdvance(1));
        IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(stream));
        IS(OOCU_ERROR_UNKNOWN, cu.cuStreamSynchronize(stream));
        CHECK(reports_of("deadlock:") == 1, "reported");
        CHECK(*(char *)device == 1, "work behind a host function ran before it");
        atomic_store(&may_go, 1);
        OK(cu.simPatience(10000));
        OK(cu.cuStreamSynchronize(stream));
        CHECK(*(char *)device == 2, "work behind a host function");
        IS(OOCU_ERROR_INVALID_VALUE, cu.cuLaunchHostFunc(stream, NULL, NULL));
        sim_test_end();
    }
}

CASE(the_spin_kernel_keeps_a_stream_busy) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream();
    OOCUmodule module;
    OOCUfunction function;
    uint64_t ns = 1000000;
    void *parameters[] = {&ns};
    OK(cu.cuModuleLoadData(&module, ".version 7.0"));
    OK(cu.cuModuleGetFunction(&function, module, "spin"));
    const double start_s = cu.simNow();
    OK(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
    IS(OOCU_ERROR_NOT_READY, cu.cuStreamQuery(stream));
    OK(cu.cuStreamSynchronize(stream));
    const double took_s = cu.simNow() - start_s;
    CHECK(took_s > 1e-3 && took_s < 1.1e-3, "%g s", took_s);
    OK(cu.cuModuleUnload(module));
    IS(OOCU_ERROR_INVALID_HANDLE,
       cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
    IS(OOCU_ERROR_INVALID_HANDLE, cu.cuModuleUnload(module));
    sim_test_end();
}

CASE(reset_forgets_only_what_is_dead) {
    sim_test_begin(SIM_TIMED, 0);
    OOCUstream stream = new_stream();
    IS(OOCU_ERROR_ILLEGAL_STATE, cu.simReset());
    OK(cu.simLaunch(NULL, NULL, 0, NULL, 0, 1));
    OK(cu.cuStreamSynchronize(NULL));
    CHECK(cu.simNow() > 0.9 && cu.simCallCount("cuStreamSynchronize") == 1 &&
              cu.simCallCount(NULL) > 3,
          "counted");
    OK(cu.cuStreamDestroy(stream));
    sim_test_end();
    CHECK(cu.simNow() < 1e-12 && cu.simCallCount(NULL) == 0 &&
              cu.simCallCount("cuStreamSynchronize") == 0,
          "forgotten");
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSetSchedule(17, 0));
    IS(OOCU_ERROR_INVALID_VALUE, cu.simSwitch(17, 0));
}

CHECK_MAIN(sim_test_open)
