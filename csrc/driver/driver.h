/* driver.h - the table of CUDA driver calls that an engine works through.
 *
 * The table is filled at run time from libcuda.so.1 / nvcuda.dll or from any other library with the
 * same entry points (the simulated driver). Nothing above this layer knows which one it talks to.
 * A call's row is `X(name, introduced, need, parameters)`: `introduced` is the CUDA version
 * (12000 = 12.0) whose signature is declared here and asked of cuGetProcAddress_v2; OPTIONAL rows
 * may be NULL. Base names, without `_v2`: cuGetProcAddress takes those only.
 */
#ifndef OO_DRIVER_H
#define OO_DRIVER_H

#include "cu_abi.h"
#include "oracle_offload.h"

/* clang-format off */
#define OO_DRIVER_CALLS(X) \
  /* start-up, versions, errors */ \
  X(cuInit,                    2000,  REQUIRED, (unsigned int flags)) \
  X(cuDriverGetVersion,        2020,  REQUIRED, (int *version)) \
  X(cuGetErrorName,            6000,  REQUIRED, (OOCUresult error, const char **name)) \
  X(cuGetErrorString,          6000,  REQUIRED, (OOCUresult error, const char **text)) \
  /* devices and their primary contexts */ \
  X(cuDeviceGet,               2000,  REQUIRED, (OOCUdevice *device, int ordinal)) \
  X(cuDeviceGetCount,          2000,  REQUIRED, (int *count)) \
  X(cuDeviceGetName,           2000,  REQUIRED, (char *name, int length, OOCUdevice device)) \
  X(cuDeviceGetAttribute,      2000,  REQUIRED, (int *value, int attribute, OOCUdevice device)) \
  X(cuDeviceGetPCIBusId,       4010,  REQUIRED, (char *id, int length, OOCUdevice device)) \
  X(cuDevicePrimaryCtxRetain,  7000,  REQUIRED, (OOCUcontext *context, OOCUdevice device)) \
  X(cuDevicePrimaryCtxRelease, 11000, REQUIRED, (OOCUdevice device)) \
  X(cuCtxGetCurrent,           4000,  REQUIRED, (OOCUcontext *context)) \
  X(cuCtxPushCurrent,          4000,  REQUIRED, (OOCUcontext context)) \
  X(cuCtxPopCurrent,           4000,  REQUIRED, (OOCUcontext *context)) \
  X(cuCtxGetStreamPriorityRange, 5050, REQUIRED, (int *least, int *greatest)) \
  /* memory */ \
  X(cuMemGetInfo,              3020,  REQUIRED, (size_t *free_bytes, size_t *total_bytes)) \
  X(cuMemHostAlloc,            2020,  REQUIRED, (void **ptr, size_t bytes, unsigned int flags)) \
  X(cuMemFreeHost,             2000,  REQUIRED, (void *ptr)) \
  X(cuMemHostRegister,         6050,  REQUIRED, (void *ptr, size_t bytes, unsigned int flags)) \
  X(cuMemHostUnregister,       4000,  REQUIRED, (void *ptr)) \
  X(cuPointerGetAttribute,     4000,  REQUIRED, (void *value, int attribute, OOCUdeviceptr ptr)) \
  X(cuMemcpyHtoDAsync,         3020,  REQUIRED, (OOCUdeviceptr dst, const void *src, size_t bytes, OOCUstream stream)) \
  X(cuMemcpyDtoHAsync,         3020,  REQUIRED, (void *dst, OOCUdeviceptr src, size_t bytes, OOCUstream stream)) \
  /* streams and events */ \
  X(cuStreamCreateWithPriority, 5050, REQUIRED, (OOCUstream *stream, unsigned int flags, int priority)) \
  X(cuStreamDestroy,           4000,  REQUIRED, (OOCUstream stream)) \
  X(cuStreamSynchronize,       2000,  REQUIRED, (OOCUstream stream)) \
  X(cuStreamQuery,             2000,  REQUIRED, (OOCUstream stream)) \
  X(cuStreamWaitEvent,         3020,  REQUIRED, (OOCUstream stream, OOCUevent event, unsigned int flags)) \
  X(cuStreamIsCapturing,       10000, REQUIRED, (OOCUstream stream, int *status)) \
  X(cuEventCreate,             2000,  REQUIRED, (OOCUevent *event, unsigned int flags)) \
  X(cuEventDestroy,            4000,  REQUIRED, (OOCUevent event)) \
  X(cuEventRecord,             2000,  REQUIRED, (OOCUevent event, OOCUstream stream)) \
  X(cuEventQuery,              2000,  REQUIRED, (OOCUevent event)) \
  X(cuEventSynchronize,        2000,  REQUIRED, (OOCUevent event)) \
  /* optional: measurements, test kernels */ \
  X(cuEventElapsedTime,        2000,  OPTIONAL, (float *milliseconds, OOCUevent start, OOCUevent end)) \
  X(cuMemAlloc,                3020,  OPTIONAL, (OOCUdeviceptr *ptr, size_t bytes)) \
  X(cuMemFree,                 3020,  OPTIONAL, (OOCUdeviceptr ptr)) \
  X(cuLaunchHostFunc,          10000, OPTIONAL, (OOCUstream stream, OOCUhostFn function, void *user_data)) \
  X(cuMemsetD32Async,          3020,  OPTIONAL, (OOCUdeviceptr ptr, unsigned int value, size_t count, OOCUstream stream)) \
  X(cuModuleLoadData,          2000,  OPTIONAL, (OOCUmodule *module, const void *image)) \
  X(cuModuleUnload,            2000,  OPTIONAL, (OOCUmodule module)) \
  X(cuModuleGetFunction,       2000,  OPTIONAL, (OOCUfunction *function, OOCUmodule module, const char *name)) \
  X(cuLaunchKernel,            4000,  OPTIONAL, (OOCUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, \
                                                 unsigned int block_x, unsigned int block_y, unsigned int block_z, \
                                                 unsigned int shared_bytes, OOCUstream stream, void **parameters, void **extra)) \
  /* simulated driver only (resolved by dlsym): see csrc/sim/sim.h */ \
  X(simAdopt,                  0,     OPTIONAL, (OOCUdeviceptr ptr, size_t bytes, unsigned int flags, OOCUstream stream)) \
  X(simDrop,                   0,     OPTIONAL, (OOCUdeviceptr ptr)) \
  X(simLaunch,                 0,     OPTIONAL, (OOCUstream stream, const OOSimRange *reads, size_t n_reads, \
                                                 const OOSimRange *writes, size_t n_writes, double seconds)) \
  X(simHostAccess,             0,     OPTIONAL, (const void *ptr, size_t bytes, int is_write)) \
  X(simExpectPageable,         0,     OPTIONAL, (const void *ptr)) \
  X(simRead,                   0,     OPTIONAL, (size_t bytes, int *wanted)) \
  X(simAwait,                  0,     OPTIONAL, (OOCUevent event)) \
  X(simReaders,                0,     OPTIONAL, (unsigned expected, unsigned *blocked)) \
  X(simPass,                   0,     OPTIONAL, (void)) \
  X(simSubmitsLate,            0,     OPTIONAL, (int *late)) \
  X(simClock,                  0,     OPTIONAL, (double *seconds)) \
  X(simLabelRange,             0,     OPTIONAL, (const void *ptr, size_t bytes, const char *label)) \
  X(simLabelStream,            0,     OPTIONAL, (OOCUstream stream, const char *label))
/* clang-format on */

struct oo_driver {
#define OO_DRIVER_FIELD(name, introduced, need, parameters) OOCUresult(OOCUDAAPI *name) parameters;
    OO_DRIVER_CALLS(OO_DRIVER_FIELD)
#undef OO_DRIVER_FIELD
    void *library;
    int version;   /* of cuDriverGetVersion: 12040 = 12.4 */
    int simulated; /* has simLaunch */
};

/* Fill `driver` from the library at `path`, or from the system's driver when `path` is NULL, and
 * initialise it. The library is never unloaded: its threads and exit handlers outlive any table.
 * Errors (each with its own message): OO_E_DRIVER_MISSING no such library; OO_E_DRIVER_STUB the
 * toolkit's stub; OO_E_DRIVER_OLD below 12.0 or a required call absent; OO_E_NO_DEVICE;
 * OO_E_DRIVER any other failure of a call. */
enum oo_status oo_driver_load(struct oo_driver *driver, const char *path);

/* Turn the result of the driver call `call` into a status and the thread's message:
 * "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory". */
enum oo_status oo_driver_error(const struct oo_driver *driver, const char *call, OOCUresult result);

/* Whether a result means that the context is lost and every later call will fail too. */
int oo_driver_is_sticky(OOCUresult result);

#endif
