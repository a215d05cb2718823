/* cu_abi.h - our own declarations of the part of the CUDA driver API that we use.
 *
 * Why not cuda.h: the source distribution must build on a machine without a CUDA toolkit. Names
 * carry the prefix `OO`, so that this header and cuda.h can be included side by side; the test
 * tests/c/test_cu_abi.c does so where a toolkit is present and compares every value and size.
 */
#ifndef OO_CU_ABI_H
#define OO_CU_ABI_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define OOCUDAAPI __stdcall
#else
#define OOCUDAAPI
#endif

typedef int OOCUresult;
typedef int OOCUdevice;
typedef struct OOCUctx_st *OOCUcontext;
typedef struct OOCUstream_st *OOCUstream;
typedef struct OOCUevent_st *OOCUevent;
typedef struct OOCUmod_st *OOCUmodule;
typedef struct OOCUfunc_st *OOCUfunction;
typedef uintptr_t OOCUdeviceptr; /* unsigned long long in cuda.h on 64-bit systems: same size */
typedef void(OOCUDAAPI *OOCUhostFn)(void *user_data);

/* CUresult values that the code tells apart; the rest are named by cuGetErrorName. */
enum {
    OOCU_SUCCESS = 0,
    OOCU_ERROR_INVALID_VALUE = 1,
    OOCU_ERROR_OUT_OF_MEMORY = 2,
    OOCU_ERROR_NOT_INITIALIZED = 3,
    OOCU_ERROR_DEINITIALIZED = 4,
    OOCU_ERROR_STUB_LIBRARY = 34,
    OOCU_ERROR_NO_DEVICE = 100,
    OOCU_ERROR_INVALID_DEVICE = 101,
    OOCU_ERROR_INVALID_IMAGE = 200,
    OOCU_ERROR_INVALID_CONTEXT = 201,
    OOCU_ERROR_NO_BINARY_FOR_GPU = 209,
    OOCU_ERROR_ECC_UNCORRECTABLE = 214,
    OOCU_ERROR_NVLINK_UNCORRECTABLE = 220,
    OOCU_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    OOCU_ERROR_CONTAINED = 226,
    OOCU_ERROR_INVALID_HANDLE = 400,
    OOCU_ERROR_ILLEGAL_STATE = 401,
    OOCU_ERROR_NOT_FOUND = 500,
    OOCU_ERROR_NOT_READY = 600,
    OOCU_ERROR_ILLEGAL_ADDRESS = 700,
    OOCU_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    OOCU_ERROR_LAUNCH_TIMEOUT = 702,
    OOCU_ERROR_CONTEXT_IS_DESTROYED = 709,
    OOCU_ERROR_ASSERT = 710,
    OOCU_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    OOCU_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    OOCU_ERROR_HARDWARE_STACK_ERROR = 714,
    OOCU_ERROR_ILLEGAL_INSTRUCTION = 715,
    OOCU_ERROR_MISALIGNED_ADDRESS = 716,
    OOCU_ERROR_INVALID_ADDRESS_SPACE = 717,
    OOCU_ERROR_INVALID_PC = 718,
    OOCU_ERROR_LAUNCH_FAILED = 719,
    OOCU_ERROR_TENSOR_MEMORY_LEAK = 721,
    OOCU_ERROR_NOT_PERMITTED = 800,
    OOCU_ERROR_NOT_SUPPORTED = 801,
    OOCU_ERROR_MPS_CLIENT_TERMINATED = 810,
    OOCU_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    OOCU_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    OOCU_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    OOCU_ERROR_CAPTURED_EVENT = 907,
    OOCU_ERROR_EXTERNAL_DEVICE = 911,
    OOCU_ERROR_UNKNOWN = 999
};

/* Stream handles with a fixed meaning. */
#define OOCU_STREAM_LEGACY     ((OOCUstream)(uintptr_t)1)
#define OOCU_STREAM_PER_THREAD ((OOCUstream)(uintptr_t)2)

enum { OOCU_STREAM_DEFAULT = 0, OOCU_STREAM_NON_BLOCKING = 1 };
enum { OOCU_EVENT_DEFAULT = 0, OOCU_EVENT_BLOCKING_SYNC = 1, OOCU_EVENT_DISABLE_TIMING = 2 };
enum { OOCU_MEMHOSTALLOC_PORTABLE = 1 };
enum { OOCU_MEMHOSTREGISTER_PORTABLE = 1, OOCU_MEMHOSTREGISTER_DEVICEMAP = 2 };
enum { OOCU_GET_PROC_ADDRESS_LEGACY_STREAM = 1 };
enum { OOCU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum {
    OOCU_DEVICE_ATTRIBUTE_TCC_DRIVER = 35,
    OOCU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
    OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    OOCU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    OOCU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134 /* CUDA >= 12.2 */
};
enum { OOCU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, OOCU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3 };
enum { OOCU_MEMORYTYPE_HOST = 1, OOCU_MEMORYTYPE_DEVICE = 2 };

/* Simulator only: a byte range that a simulated kernel reads or writes. */
typedef struct OOSimRange {
    OOCUdeviceptr ptr;
    size_t bytes;
} OOSimRange;

/* simAdopt flags. Without KEEP the adopted bytes are poisoned (0xFF), as fresh device memory is.
 * With IN_STREAM they go back in the order of the stream they are lent on, as memory goes back to
 * torch's allocator: simDrop asks no more than that the stream waits for what uses them. */
enum { OOSIM_ADOPT_POISON = 0, OOSIM_ADOPT_KEEP = 1, OOSIM_ADOPT_IN_STREAM = 2 };

#endif
