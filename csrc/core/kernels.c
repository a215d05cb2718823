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
        OO_TRY(OO_DRIVE(engine, cuModuleLoadData, &engine->module, image));
    OO_TRY(OO_DRIVE(engine, cuModuleGetFunction, kernel, engine->module, name));
done:
    return status;
}

enum oo_status oo_engine_spin(struct oo_engine *engine, uintptr_t stream, uint64_t nanoseconds) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (oo__declares_kernels(engine)) {
        status = oo__declare_kernel(engine, (OOCUstream)stream, NULL, (double)nanoseconds * 1e-9);
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
