/* kernels.c - the engine's own kernels, from the module embedded at build time. */
#include "kernels.h"
#include "../kernels/fatbin.h"
#include "call.h"
#include "simulated.h"

/* The simulated driver knows the kernels by their names, whatever the image holds. */
static const void *oo__image(const struct oo_engine *engine) {
    if (oo_kernels_fatbin_size)
        return oo_kernels_fatbin;
    return oo__declares_kernels(engine) ? ".version 8.0" : NULL;
}

/* What a driver says of a file that it cannot read: of another CUDA version, as a rule. */
static const char *oo__refusal(OOCUresult result) {
    switch (result) {
    case OOCU_ERROR_INVALID_IMAGE:
        return "CUDA_ERROR_INVALID_IMAGE";
    case OOCU_ERROR_NO_BINARY_FOR_GPU:
        return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case OOCU_ERROR_UNSUPPORTED_PTX_VERSION:
        return "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    default:
        return NULL;
    }
}

static enum oo_status oo__module_load(struct oo_engine *engine, const void *image) {
    const OOCUresult result = engine->driver.cuModuleLoadData(&engine->module, image);
    const enum oo_status status = oo__check(engine, "cuModuleLoadData", result);
    const char *name = oo__refusal(result);
    const int driver = engine->driver.version, toolkit = oo_kernels_toolkit;
    if (!name || driver >= toolkit)
        return status;
    return oo__fail_driver(
        OO_E_DRIVER, "cuModuleLoadData", result, name,
        "the driver cannot read the kernels of this build (%s, %d): it is of CUDA %d.%d, and they "
        "were compiled by CUDA %d.%d; update the NVIDIA driver, or build oracle_offload with "
        "ORACLE_OFFLOAD_BUILD_KERNELS=on and an nvcc of CUDA %d.%d or older, or leave compress= "
        "out",
        name, (int)result, driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10,
        driver / 1000, driver % 1000 / 10);
}

enum oo_status oo__kernel_load(struct oo_engine *engine, const char *name, OOCUfunction *kernel) {
    enum oo_status status;
    const void *image = oo__image(engine);
    if (*kernel)
        return OO_OK;
    if (!image || !engine->driver.cuModuleLoadData || !engine->driver.cuModuleGetFunction ||
        !engine->driver.cuModuleUnload || !engine->driver.cuLaunchKernel)
        return oo__fail(
            OO_E_STATE,
            "this build has no kernels: build with nvcc and ORACLE_OFFLOAD_BUILD_KERNELS=on");
    if (!engine->module) /* not loaded by a call that failed afterwards */
        OO_TRY(oo__module_load(engine, image));
    OO_TRY(OO_DRIVE(engine, cuModuleGetFunction, kernel, engine->module, name));
done:
    return status;
}

enum oo_status oo_engine_spin(struct oo_engine *engine, uintptr_t stream, uint64_t nanoseconds) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (oo__declares_kernels(engine)) {
        status =
            oo__declare_kernel(engine, (OOCUstream)stream, NULL, NULL, (double)nanoseconds * 1e-9);
        goto done;
    }
    OO_TRY(oo__kernel_load(engine, "spin", &engine->spin));
    void *parameters[] = {&nanoseconds};
    OO_TRY(OO_DRIVE(engine, cuLaunchKernel, engine->spin, 1, 1, 1, 1, 1, 1, 0, (OOCUstream)stream,
                    parameters, NULL));
done:
    oo__leave(engine);
    return status;
}

void oo__kernels_free(struct oo_engine *engine) {
    if (engine->module)
        OO_GIVE_BACK(engine, cuModuleUnload, engine->module);
    engine->module = NULL;
    engine->spin = engine->decoder.decode_bf16 = engine->decoder.decode_bytes = NULL;
}
