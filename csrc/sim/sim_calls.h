/* sim_calls.h - every cu* call that the simulator exports.
 *
 * X(base name, exported symbol, introduced, traits, parameters). `introduced` is the CUDA version
 * of the exported signature, as cuGetProcAddress_v2 is asked for it.
 */
#ifndef OO_SIM_CALLS_H
#define OO_SIM_CALLS_H

#include "sim.h"

enum sim_traits {
    SIM_ANY_TIME =
        1, /* works before cuInit, and can neither be made to fail nor counted as "any" */
    SIM_NO_CONTEXT = 2 /* needs no current context, and survives a sticky error */
};

/* clang-format off */
#define SIM_CALLS(X) \
  X(cuInit, cuInit, 2000, SIM_NO_CONTEXT, (unsigned int flags)) \
  X(cuDriverGetVersion, cuDriverGetVersion, 2020, SIM_NO_CONTEXT, (int *version)) \
  X(cuGetErrorName, cuGetErrorName, 6000, SIM_ANY_TIME, (OOCUresult error, const char **name)) \
  X(cuGetErrorString, cuGetErrorString, 6000, SIM_ANY_TIME, (OOCUresult error, const char **text)) \
  X(cuGetProcAddress, cuGetProcAddress_v2, 12000, SIM_ANY_TIME, \
    (const char *name, void **function, int version, uint64_t flags, int *status)) \
  X(cuDeviceGet, cuDeviceGet, 2000, SIM_NO_CONTEXT, (OOCUdevice *device, int ordinal)) \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000, SIM_NO_CONTEXT, (int *count)) \
  X(cuDeviceGetName, cuDeviceGetName, 2000, SIM_NO_CONTEXT, (char *name, int length, OOCUdevice device)) \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, SIM_NO_CONTEXT, \
    (int *value, int attribute, OOCUdevice device)) \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, SIM_NO_CONTEXT, (char *id, int length, OOCUdevice device)) \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, SIM_NO_CONTEXT, \
    (OOCUcontext *context, OOCUdevice device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, SIM_NO_CONTEXT, (OOCUdevice device)) \
  X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, SIM_NO_CONTEXT, (OOCUcontext *context)) \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, SIM_NO_CONTEXT, (OOCUcontext context)) \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, SIM_NO_CONTEXT, (OOCUcontext *context)) \
  X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050, 0, (int *least, int *greatest)) \
  X(cuMemGetInfo, cuMemGetInfo_v2, 3020, 0, (size_t *free_bytes, size_t *total_bytes)) \
  X(cuMemHostAlloc, cuMemHostAlloc, 2020, 0, (void **ptr, size_t bytes, unsigned int flags)) \
  X(cuMemFreeHost, cuMemFreeHost, 2000, 0, (void *ptr)) \
  X(cuMemHostRegister, cuMemHostRegister_v2, 6050, 0, (void *ptr, size_t bytes, unsigned int flags)) \
  X(cuMemHostUnregister, cuMemHostUnregister, 4000, 0, (void *ptr)) \
  X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, 0, (void *value, int attribute, OOCUdeviceptr ptr)) \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, 0, \
    (OOCUdeviceptr dst, const void *src, size_t bytes, OOCUstream stream)) \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, 0, \
    (void *dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream)) \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050, 0, \
    (OOCUstream *stream, unsigned int flags, int priority)) \
  X(cuStreamGetPriority, cuStreamGetPriority, 5050, 0, (OOCUstream stream, int *priority)) \
  X(cuStreamGetFlags, cuStreamGetFlags, 5050, 0, (OOCUstream stream, unsigned int *flags)) \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000, 0, (OOCUstream stream)) \
  X(cuStreamSynchronize, cuStreamSynchronize, 2000, 0, (OOCUstream stream)) \
  X(cuStreamQuery, cuStreamQuery, 2000, 0, (OOCUstream stream)) \
  X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, 0, (OOCUstream stream, OOCUevent event, unsigned int flags)) \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, 0, (OOCUstream stream, int *status)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, 0, (OOCUstream stream, int mode)) \
  X(cuStreamEndCapture, cuStreamEndCapture, 10000, 0, (OOCUstream stream, void **graph)) \
  X(cuGraphDestroy, cuGraphDestroy, 10000, 0, (void *graph)) \
  X(cuEventCreate, cuEventCreate, 2000, 0, (OOCUevent *event, unsigned int flags)) \
  X(cuEventDestroy, cuEventDestroy_v2, 4000, 0, (OOCUevent event)) \
  X(cuEventRecord, cuEventRecord, 2000, 0, (OOCUevent event, OOCUstream stream)) \
  X(cuEventQuery, cuEventQuery, 2000, 0, (OOCUevent event)) \
  X(cuEventSynchronize, cuEventSynchronize, 2000, 0, (OOCUevent event)) \
  X(cuEventElapsedTime, cuEventElapsedTime, 2000, 0, (float *milliseconds, OOCUevent start, OOCUevent end)) \
  X(cuMemAlloc, cuMemAlloc_v2, 3020, 0, (OOCUdeviceptr *ptr, size_t bytes)) \
  X(cuMemFree, cuMemFree_v2, 3020, 0, (OOCUdeviceptr ptr)) \
  X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, 0, (OOCUstream stream, OOCUhostFn function, void *user_data)) \
  X(cuMemsetD32Async, cuMemsetD32Async, 3020, 0, \
    (OOCUdeviceptr ptr, unsigned int value, size_t count, OOCUstream stream)) \
  X(cuModuleLoadData, cuModuleLoadData, 2000, 0, (OOCUmodule *module, const void *image)) \
  X(cuModuleUnload, cuModuleUnload, 2000, 0, (OOCUmodule module)) \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000, 0, \
    (OOCUfunction *function, OOCUmodule module, const char *name)) \
  X(cuLaunchKernel, cuLaunchKernel, 4000, 0, \
    (OOCUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, \
     unsigned int block_x, unsigned int block_y, unsigned int block_z, \
     unsigned int shared_bytes, OOCUstream stream, void **parameters, void **extra))
/* clang-format on */

#define SIM_PROTOTYPE(base, symbol, introduced, traits, parameters)                                \
    SIM_API OOCUresult OOCUDAAPI symbol parameters;
SIM_CALLS(SIM_PROTOTYPE)
#undef SIM_PROTOTYPE

/* One number per call, for counting and for faults; the torch-side calls come after the cu* calls.
 */
enum sim_call {
#define SIM_NUMBER(base, symbol, introduced, traits, parameters) CALL_##base,
    SIM_CALLS(SIM_NUMBER)
#undef SIM_NUMBER
        CALL_simAdopt,
    CALL_simDrop,
    CALL_simLaunch,
    CALL_simHostAccess,
    /* not calls: an operation that fails while it runs, noticed by a later call */
    CALL_async_h2d,
    CALL_async_d2h,
    CALL_async_kernel,
    SIM_CALL_COUNT
};

#endif
