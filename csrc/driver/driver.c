/* driver.c - find a CUDA driver, fill the table, name its errors. */
#include "driver.h"

#include "../base/os.h"
#include "../base/status.h"

#include <stdio.h>
#include <string.h>

enum { OO_OLDEST_DRIVER = 12000 }; /* the first with cuGetProcAddress_v2 */

/* Object and function pointers have one size on every supported platform, but ISO C has no cast
 * between them: copy the bits. */
static void oo__set_pointer(void *slot, void *symbol) { memcpy(slot, &symbol, sizeof symbol); }

typedef OOCUresult(OOCUDAAPI *oo_get_proc_address)(const char *name, void **function, int version,
                                                   uint64_t flags, int *query_result);

struct oo_row {
    const char *name;
    int introduced;
    int required;
    size_t offset;
};

enum { OPTIONAL = 0, REQUIRED = 1 };
static const struct oo_row oo__rows[] = {
#define OO_DRIVER_ROW(name, introduced, need, parameters)                                          \
    {#name, introduced, need, offsetof(struct oo_driver, name)},
    OO_DRIVER_CALLS(OO_DRIVER_ROW)
#undef OO_DRIVER_ROW
};

enum oo_status oo_driver_error(const struct oo_driver *driver, const char *call,
                               OOCUresult result) {
    const char *name = NULL;
    const char *text = NULL;
    if (!driver->cuGetErrorName || driver->cuGetErrorName(result, &name) != OOCU_SUCCESS || !name)
        name = "unknown CUresult";
    if (!driver->cuGetErrorString || driver->cuGetErrorString(result, &text) != OOCU_SUCCESS ||
        !text)
        text = "the driver has no text for it";
    return oo__fail_driver(OO_E_DRIVER, call, result, name, "%s: %s (%d): %s", call, name, result,
                           text);
}

int oo_driver_is_sticky(OOCUresult result) {
    switch (result) {
    case OOCU_ERROR_ECC_UNCORRECTABLE:
    case OOCU_ERROR_NVLINK_UNCORRECTABLE:
    case OOCU_ERROR_CONTAINED:
    case OOCU_ERROR_ILLEGAL_ADDRESS:
    case OOCU_ERROR_LAUNCH_TIMEOUT:
    case OOCU_ERROR_ASSERT:
    case OOCU_ERROR_HARDWARE_STACK_ERROR:
    case OOCU_ERROR_ILLEGAL_INSTRUCTION:
    case OOCU_ERROR_MISALIGNED_ADDRESS:
    case OOCU_ERROR_INVALID_ADDRESS_SPACE:
    case OOCU_ERROR_INVALID_PC:
    case OOCU_ERROR_LAUNCH_FAILED:
    case OOCU_ERROR_TENSOR_MEMORY_LEAK:
    case OOCU_ERROR_MPS_CLIENT_TERMINATED:
    case OOCU_ERROR_EXTERNAL_DEVICE:
    case OOCU_ERROR_CONTEXT_IS_DESTROYED:
    case OOCU_ERROR_DEINITIALIZED:
    case OOCU_ERROR_UNKNOWN:
        return 1;
    default:
        return 0;
    }
}

static enum oo_status oo__fail_stub(const char *path, const char *call, OOCUresult result) {
    return oo__fail_driver(
        OO_E_DRIVER_STUB, call, result, "CUDA_ERROR_STUB_LIBRARY",
        "%s is the CUDA toolkit's stub, not a driver; remove its folder from LD_LIBRARY_PATH so "
        "that the installed driver is found",
        path);
}

static enum oo_status oo__fill_table(struct oo_driver *driver, const char *path) {
    void *symbol = oo__library_symbol(driver->library, "cuGetProcAddress_v2");
    if (!symbol)
        return oo__fail(OO_E_DRIVER_OLD,
                        "%s has no cuGetProcAddress_v2: it is older than CUDA 12.0; update the "
                        "NVIDIA driver to "
                        "525 or later",
                        path);
    oo_get_proc_address get_proc_address;
    oo__set_pointer(&get_proc_address, symbol);
    for (size_t i = 0; i < sizeof oo__rows / sizeof oo__rows[0]; i++) {
        const struct oo_row *row = &oo__rows[i];
        void *function = NULL;
        int query_result = 0; /* a NULL output pointer crashes the real library */
        OOCUresult result = OOCU_SUCCESS;
        if (row->introduced == 0)
            function = oo__library_symbol(driver->library, row->name);
        else
            result = get_proc_address(row->name, &function, row->introduced,
                                      OOCU_GET_PROC_ADDRESS_LEGACY_STREAM, &query_result);
        if (result == OOCU_ERROR_STUB_LIBRARY)
            return oo__fail_stub(path, "cuGetProcAddress", result);
        if (result != OOCU_SUCCESS)
            function = NULL;
        /* An unknown symbol is SUCCESS with a NULL pointer: only the pointer shows it. */
        if (!function && row->required)
            return oo__fail(OO_E_DRIVER_OLD, "%s lacks %s (CUDA %d.%d): update the NVIDIA driver",
                            path, row->name, row->introduced / 1000, row->introduced % 1000 / 10);
        oo__set_pointer((char *)driver + row->offset, function);
    }
    driver->simulated = driver->simLaunch != NULL;
    return OO_OK;
}

enum oo_status oo_driver_load(struct oo_driver *driver, const char *path) {
    memset(driver, 0, sizeof *driver);
    const char *name = path ? path : oo__cuda_library_name;
    driver->library = path ? oo__library_open(path) : oo__library_open_cuda();
    if (!driver->library) {
        char reason[512];
        return oo__fail(OO_E_DRIVER_MISSING,
                        "no CUDA driver: %s cannot be loaded (%s); install the NVIDIA driver, or "
                        "use device \"cpu\", "
                        "which runs on the simulated driver",
                        name, oo__library_error(reason, sizeof reason));
    }
    enum oo_status status = oo__fill_table(driver, name);
    if (status != OO_OK)
        return status;
    /* The analyzer does not see that the table's required rows are filled, or loading has failed.
     */
    // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage)
    OOCUresult result = driver->cuInit(0);
    if (result == OOCU_ERROR_STUB_LIBRARY)
        return oo__fail_stub(name, "cuInit", result);
    if (result == OOCU_ERROR_NO_DEVICE)
        return oo__fail_driver(
            OO_E_NO_DEVICE, "cuInit", result, "CUDA_ERROR_NO_DEVICE",
            "the NVIDIA driver sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES");
    if (result != OOCU_SUCCESS)
        return oo_driver_error(driver, "cuInit", result);
    result = driver->cuDriverGetVersion(&driver->version);
    if (result != OOCU_SUCCESS)
        return oo_driver_error(driver, "cuDriverGetVersion", result);
    if (driver->version < OO_OLDEST_DRIVER)
        return oo__fail(OO_E_DRIVER_OLD,
                        "%s supports CUDA %d.%d; 12.0 or later is needed: update the NVIDIA driver",
                        name, driver->version / 1000, driver->version % 1000 / 10);
    return OO_OK;
}

enum oo_status oo_driver_probe(const char *library, int *version, int *devices) {
    struct oo_driver driver;
    enum oo_status status = oo_driver_load(&driver, library);
    if (status != OO_OK)
        return status;
    *version = driver.version;
    // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): as in oo_driver_load
    OOCUresult result = driver.cuDeviceGetCount(devices);
    return result == OOCU_SUCCESS ? OO_OK : oo_driver_error(&driver, "cuDeviceGetCount", result);
}
