// runtime.cpp - libcudart.so.13 without a GPU: what PyTorch asks of the CUDA runtime, over
// driver.c.
//
// It adds what the runtime adds to the driver: a current device per thread with its primary
// context, a last error, unified addressing of copies. It has no kernels: what PyTorch's operators
// compute comes from operators.cpp. A kernel that is launched all the same is an error that names
// it, but for torch.cuda._sleep's, which writes nothing.
//
// What PyTorch's libraries import and this file lacks is made by build_driver.py: it fails by name.
//
// PyTorch calls until the process has ended, after the destructors of threads and of most objects.
// So nothing here has a destructor: words are in arrays, tables are never freed. build_driver.py
// looks.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" {
// driver.c's own, and calls that cuda.h declares under another name.
void (*cuda_sim_control(const char *name))();
CUresult cuda_sim_memory(int device, uint64_t *used, uint64_t *total);
CUresult cuda_sim_pool_trim(int device);
CUresult cuda_sim_pool_bytes(int device, uint64_t *reserved, uint64_t *used);
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
}

namespace {

constexpr int VERSION = 13000, CARDS = 8;

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local char what_failed[512]; // more words for the error that was returned last

cudaError_t told(int code) {
    const auto error = static_cast<cudaError_t>(code);
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

cudaError_t refused(cudaError_t error, const std::string &words) {
    std::snprintf(what_failed, sizeof what_failed, "%s", words.c_str());
    return told(error);
}

// The primary context of the current device is the thread's, as after any call of the runtime.
CUresult enter() {
    static std::mutex lock;
    static std::array<CUcontext, CARDS> contexts{};
    static bool begun = false;
    {
        const std::lock_guard<std::mutex> hold(lock);
        if (!begun) {
            if (const CUresult result = cuInit(0))
                return result;
            begun = true;
        }
        if (!contexts[current])
            if (const CUresult result = cuDevicePrimaryCtxRetain(&contexts[current], current))
                return result;
    }
    return cuCtxSetCurrent(contexts[current]);
}

int attribute(int which, int device) {
    int value = 0;
    return cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(which), device) ? 0 : value;
}

CUdeviceptr address(const void *pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

} // namespace

// A call that is the driver's own, in the current context.
#define FORWARD(name, parameters, ...)                                                             \
    API cudaError_t name parameters {                                                              \
        if (const CUresult result = enter())                                                       \
            return told(result);                                                                   \
        return told(__VA_ARGS__);                                                                  \
    }

// ---- what is not here ----

API int cuda_sim_missing(const char *name) {
    return refused(cudaErrorNotSupported, std::string(name) + " is not there without a GPU");
}

// ---- devices ----

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (const CUresult result = cuInit(0))
        return told(result);
    return told(cuDeviceGetCount(count));
}
API cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count))
        return error;
    if (device < 0 || device >= count)
        return told(cudaErrorInvalidDevice);
    current = device;
    return told(enter());
}
API cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
    if (const CUresult result = cuInit(0))
        return told(result);
    *value = attribute(which, device);
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    if (const CUresult result = enter())
        return told(result);
    uint64_t used = 0, total = 0;
    *found = cudaDeviceProp{};
    if (const CUresult result = cuDeviceGetName(found->name, sizeof found->name, device))
        return told(result);
    cuda_sim_memory(device, &used, &total);
    std::snprintf(found->uuid.bytes, sizeof found->uuid.bytes, "without a GPU %d", device);
    found->totalGlobalMem = total;
    found->sharedMemPerBlock = static_cast<size_t>(attribute(8, device));
    found->regsPerBlock = attribute(12, device);
    found->warpSize = attribute(10, device);
    found->maxThreadsPerBlock = attribute(1, device);
    for (int i = 0; i < 3; i++) {
        found->maxThreadsDim[i] = attribute(2 + i, device);
        found->maxGridSize[i] = attribute(5 + i, device);
    }
    found->major = attribute(75, device);
    found->minor = attribute(76, device);
    found->multiProcessorCount = attribute(16, device);
    found->maxThreadsPerMultiProcessor = attribute(39, device);
    found->regsPerMultiprocessor = attribute(82, device);
    found->sharedMemPerMultiprocessor = static_cast<size_t>(attribute(81, device));
    found->sharedMemPerBlockOptin = static_cast<size_t>(attribute(97, device));
    found->maxBlocksPerMultiProcessor = attribute(106, device);
    found->asyncEngineCount = attribute(40, device);
    found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = 1;
    found->hostRegisterSupported = found->canUseHostPointerForRegisteredMem = 1;
    found->streamPrioritiesSupported = 1;
    found->memoryBusWidth = attribute(37, device);
    found->l2CacheSize = 72 << 20;
    found->textureAlignment = 512;
    found->pciBusID = attribute(33, device);
    found->ECCEnabled = attribute(32, device);
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0; // as between two consumer cards
    return device == peer ? told(cudaErrorInvalidDevice) : cudaSuccess;
}
FORWARD(cudaDeviceGetPCIBusId, (char *id, int bytes, int device),
        cuDeviceGetPCIBusId(id, bytes, device))
FORWARD(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest),
        cuCtxGetStreamPriorityRange(least, greatest))
FORWARD(cudaDeviceSynchronize, (), cuCtxSynchronize())
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors ----

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char *cudaGetErrorString(cudaError_t error) {
    static thread_local char text[1024];
    const char *known = nullptr;
    if (cuGetErrorString(static_cast<CUresult>(error), &known) || !known)
        known = "unrecognized error code";
    const bool more = error == cudaErrorNotSupported && *what_failed;
    std::snprintf(text, sizeof text, more ? "%s (%s)" : "%s", known, what_failed);
    return text;
}
API const char *cudaGetErrorName(cudaError_t error) {
    static const auto &names = *new std::map<int, const char *>{
        {cudaSuccess, "cudaSuccess"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
        {cudaErrorNoDevice, "cudaErrorNoDevice"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
        {cudaErrorNotReady, "cudaErrorNotReady"},
        {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
        {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered"},
        {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
        {cudaErrorNotSupported, "cudaErrorNotSupported"},
        {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
        {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
        {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit"},
        {cudaErrorCapturedEvent, "cudaErrorCapturedEvent"},
    };
    const auto found = names.find(error);
    return found == names.end() ? "cudaErrorUnknown" : found->second;
}

// ---- memory ----

FORWARD(cudaMemGetInfo, (size_t *available, size_t *total), cuMemGetInfo(available, total))
FORWARD(cudaMalloc, (void **pointer, size_t bytes),
        cuMemAlloc(reinterpret_cast<CUdeviceptr *>(pointer), bytes))
API cudaError_t cudaFree(void *pointer) {
    if (const CUresult result = enter())
        return told(result);
    if (!pointer)
        return cudaSuccess;
    if (const CUresult result = cuCtxSynchronize()) // as the runtime's does
        return told(result);
    return told(cuMemFree(address(pointer)));
}
FORWARD(cudaHostAlloc, (void **pointer, size_t bytes, unsigned flags),
        cuMemHostAlloc(pointer, bytes, flags))
FORWARD(cudaFreeHost, (void *pointer), pointer ? cuMemFreeHost(pointer) : CUDA_SUCCESS)
FORWARD(cudaHostRegister, (void *pointer, size_t bytes, unsigned flags),
        cuMemHostRegister(pointer, bytes, flags))
FORWARD(cudaHostUnregister, (void *pointer), cuMemHostUnregister(pointer))

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
    if (const CUresult result = enter())
        return told(result);
    *found = cudaPointerAttributes{};
    found->type = cudaMemoryTypeUnregistered;
    found->device = -2;
    unsigned type = 0;
    const CUdeviceptr where = address(pointer);
    if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, where))
        return cudaSuccess;
    cuPointerGetAttribute(&found->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, where);
    found->type = type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void *>(pointer);
    if (found->type == cudaMemoryTypeHost)
        found->hostPointer = const_cast<void *>(pointer);
    return cudaSuccess;
}

FORWARD(cudaMemcpyAsync,
        (void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream),
        cuMemcpyAsync(address(to), address(from), bytes, stream))
FORWARD(cudaMemcpyPeerAsync,
        (void *to, int, const void *from, int, size_t bytes, cudaStream_t stream),
        cuMemcpyAsync(address(to), address(from), bytes, stream))
API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return error ? error : told(cuStreamSynchronize(nullptr));
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind,
                                  cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = cudaMemcpyAsync(static_cast<char *>(to) + row * to_pitch,
                                static_cast<const char *>(from) + row * from_pitch, width, kind,
                                stream);
    return error;
}
FORWARD(cudaMemsetAsync, (void *to, int value, size_t bytes, cudaStream_t stream),
        cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, stream))
FORWARD(cudaMemset, (void *to, int value, size_t bytes),
        cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, nullptr))

// ---- pools: one for each device ----

FORWARD(cudaMallocAsync, (void **pointer, size_t bytes, cudaStream_t stream),
        cuMemAllocAsync(reinterpret_cast<CUdeviceptr *>(pointer), bytes, stream))
FORWARD(cudaFreeAsync, (void *pointer, cudaStream_t stream),
        cuMemFreeAsync(address(pointer), stream))
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(device) + 1);
    return cudaSuccess;
}
static int device_of(cudaMemPool_t pool) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(pool)) - 1;
}
FORWARD(cudaMemPoolTrimTo, (cudaMemPool_t pool, size_t), cuda_sim_pool_trim(device_of(pool)))
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void *) {
    // How long it keeps what is free, and the reset of peaks.
    static_cast<void>(which);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value) {
    static std::array<std::array<uint64_t, 2>, CARDS> highest{};
    const int device = device_of(pool);
    uint64_t now[2];
    cuda_sim_pool_bytes(device, &now[0], &now[1]);
    for (int i = 0; i < 2; i++)
        highest[device][i] = std::max(highest[device][i], now[i]);
    switch (which) {
    case cudaMemPoolAttrReservedMemCurrent:
        *static_cast<uint64_t *>(value) = now[0];
        return cudaSuccess;
    case cudaMemPoolAttrUsedMemCurrent:
        *static_cast<uint64_t *>(value) = now[1];
        return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
        *static_cast<uint64_t *>(value) = highest[device][0];
        return cudaSuccess;
    case cudaMemPoolAttrUsedMemHigh:
        *static_cast<uint64_t *>(value) = highest[device][1];
        return cudaSuccess;
    default:
        return told(cuda_sim_missing("that attribute of cudaMemPoolGetAttribute"));
    }
}

// ---- streams and events ----

FORWARD(cudaStreamCreate, (cudaStream_t * stream), cuStreamCreateWithPriority(stream, 0, 0))
FORWARD(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags),
        cuStreamCreateWithPriority(stream, flags, 0))
FORWARD(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority),
        cuStreamCreateWithPriority(stream, flags, priority))
FORWARD(cudaStreamDestroy, (cudaStream_t stream), cuStreamDestroy(stream))
FORWARD(cudaStreamSynchronize, (cudaStream_t stream), cuStreamSynchronize(stream))
FORWARD(cudaStreamQuery, (cudaStream_t stream), cuStreamQuery(stream))
FORWARD(cudaStreamGetPriority, (cudaStream_t stream, int *priority),
        cuStreamGetPriority(stream, priority))
FORWARD(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
        cuStreamWaitEvent(stream, event, flags))
FORWARD(cudaEventCreate, (cudaEvent_t * event), cuEventCreate(event, 0))
FORWARD(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags),
        cuEventCreate(event, flags))
FORWARD(cudaEventDestroy, (cudaEvent_t event), cuEventDestroy(event))
FORWARD(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), cuEventRecord(event, stream))
FORWARD(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned),
        cuEventRecord(event, stream))
FORWARD(cudaEventQuery, (cudaEvent_t event), cuEventQuery(event))
FORWARD(cudaEventSynchronize, (cudaEvent_t event), cuEventSynchronize(event))
FORWARD(cudaEventElapsedTime, (float *milliseconds, cudaEvent_t start, cudaEvent_t end),
        cuEventElapsedTime(milliseconds, start, end))
FORWARD(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void *data),
        cuLaunchHostFunc(stream, function, data))

namespace {
struct Callback {
    cudaStreamCallback_t function;
    cudaStream_t stream;
    void *data;
};
void call_back(void *given) {
    const auto *callback = static_cast<Callback *>(given);
    callback->function(callback->stream, cudaSuccess, callback->data);
    delete callback;
}
} // namespace
FORWARD(cudaStreamAddCallback,
        (cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned),
        cuLaunchHostFunc(stream, call_back, new Callback{function, stream, data}))

// ---- capture: work on a capturing stream is refused, so a graph is empty, and never runs ----

FORWARD(cudaStreamIsCapturing, (cudaStream_t stream, cudaStreamCaptureStatus *status),
        cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus *>(status)))
FORWARD(cudaStreamBeginCapture, (cudaStream_t stream, cudaStreamCaptureMode mode),
        cuStreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode)))
FORWARD(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph),
        cuStreamEndCapture(stream, graph))
FORWARD(cudaGraphDestroy, (cudaGraph_t graph), cuGraphDestroy(graph))
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *count) {
    if (id)
        *id = reinterpret_cast<uintptr_t>(stream) + 1;
    if (graph)
        *graph = nullptr;
    if (nodes)
        *nodes = nullptr;
    if (edges)
        *edges = nullptr;
    if (count)
        *count = 0;
    return cudaStreamIsCapturing(stream, status);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    std::swap(*mode, now);
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                              unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) {
    *count = 0;
    return cudaSuccess;
}
// What lives as long as a graph: torch hands one over when it begins a capture, and takes it back.
API cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *, cudaHostFn_t, unsigned,
                                     unsigned) {
    *object = nullptr;
    return cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
    return cudaSuccess;
}

// ---- kernels: known by name, and not run ----

namespace {

std::mutex kernels_lock;
std::unordered_map<const void *, const char *> &kernels() {
    static auto *all = new std::unordered_map<const void *, const char *>;
    return *all;
}
struct Variable {
    size_t bytes = 8;
    std::vector<char> value;
};
std::unordered_map<const void *, Variable> &variables() {
    static auto *all = new std::unordered_map<const void *, Variable>;
    return *all;
}

std::string name_of(const void *function) {
    const std::lock_guard<std::mutex> hold(kernels_lock);
    const auto found = kernels().find(function);
    if (found == kernels().end())
        return "a kernel that was not registered";
    int status = 0;
    char *plain = abi::__cxa_demangle(found->second, nullptr, nullptr, &status);
    std::string name = plain ? plain : found->second;
    std::free(plain);
    return name;
}

cudaError_t launch(const void *function, void **arguments, cudaStream_t stream) {
    if (const CUresult result = enter())
        return told(result);
    const std::string name = name_of(function);
    if (name.find("spin_kernel") == std::string::npos)
        return refused(cudaErrorNotSupported, "the kernel " + name.substr(0, 400) +
                                                  " was launched, and there is no GPU to run it");
    // torch.cuda._sleep: so many cycles of a clock of 2.5 GHz.
    const auto cycles = *static_cast<const int64_t *>(arguments[0]);
    using Launch = CUresult (*)(CUstream, const void *, size_t, const void *, size_t, double);
    const auto run = reinterpret_cast<Launch>(cuda_sim_control("simLaunch"));
    return told(run(stream, nullptr, 0, nullptr, 0, static_cast<double>(cycles) / 2.5e9));
}

} // namespace

API void **__cudaRegisterFatBinary(void *) {
    static void *handle = nullptr;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *,
                                uint3 *, dim3 *, dim3 *, int *) {
    const std::lock_guard<std::mutex> hold(kernels_lock);
    kernels()[host] = name;
}
API void __cudaRegisterVar(void **, char *host, char *, const char *, int, size_t bytes, int, int) {
    const std::lock_guard<std::mutex> hold(kernels_lock);
    variables()[host].bytes = bytes;
}
API cudaError_t cudaGetSymbolAddress(void **where, const void *symbol) {
    const std::lock_guard<std::mutex> hold(kernels_lock);
    Variable &variable = variables()[symbol];
    variable.value.resize(variable.bytes);
    *where = variable.value.data();
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes,
                                   size_t offset, cudaMemcpyKind) {
    void *where = nullptr;
    cudaGetSymbolAddress(&where, symbol);
    std::memcpy(static_cast<char *>(where) + offset, from, bytes);
    return cudaSuccess;
}

namespace {
struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local Configuration configurations[8]; // one inside another: a launch may need a copy
thread_local size_t configured = 0;
} // namespace
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                         cudaStream_t stream) {
    if (configured == std::size(configurations))
        return 1;
    configurations[configured++] = {grid, block, shared, stream};
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!configured)
        return told(cudaErrorMissingConfiguration);
    const Configuration last = configurations[--configured];
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<cudaStream_t *>(stream) = last.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **arguments, size_t,
                                   cudaStream_t stream) {
    return launch(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **arguments, size_t,
                                 cudaStream_t stream) {
    return launch(function, arguments, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **arguments,
                                            size_t, cudaStream_t stream) {
    return launch(function, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function,
                                    void **arguments) {
    return launch(function, arguments, configuration->stream);
}

// Asked before a launch, which then says by name that it cannot be.
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
    *found = cudaFuncAttributes{};
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = 10 * attribute(75, current) + attribute(76, current);
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int,
                                                              size_t) {
    *blocks = 1;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *,
                                                                       int, size_t, unsigned) {
    *blocks = 1;
    return cudaSuccess;
}

// ---- the driver, as torch asks for it ----

namespace {

// torch asks for its whole table at once: what is not there says so when it is called, each by a
// function of its own, as a pointer carries no name.
constexpr size_t MOST_MISSING = 64;
auto &missing_calls() {
    static auto *all = new std::array<std::string, MOST_MISSING>;
    return *all;
}
template <size_t N> int nth_missing() { return cuda_sim_missing(missing_calls()[N].c_str()); }
template <size_t... N> auto all_missing(std::index_sequence<N...>) {
    return std::array<int (*)(), sizeof...(N)>{&nth_missing<N>...};
}

int (*missing_call(const std::string &name))() {
    static std::mutex lock;
    static const auto functions = all_missing(std::make_index_sequence<MOST_MISSING>());
    const std::lock_guard<std::mutex> hold(lock);
    for (size_t i = 0; i < MOST_MISSING; i++) {
        std::string &known = missing_calls()[i];
        if (known.empty())
            known = name;
        if (known == name)
            return functions[i];
    }
    std::fprintf(stderr, "more than %zu calls of the driver are not there\n", MOST_MISSING);
    std::abort();
}

// What expandable segments ask of a card: they are there, and go to no other process and no
// network.
CUresult device_attribute(int *value, CUdevice_attribute which, CUdevice device) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        *value = 0;
        return CUDA_SUCCESS;
    default:
        return cuDeviceGetAttribute(value, which, device);
    }
}

} // namespace

#define OWN(name) {#name, reinterpret_cast<void *>(&name)}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                 unsigned version, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *status) {
    static const auto &own = *new std::map<std::string, void *>{
        {"cuDeviceGetAttribute", reinterpret_cast<void *>(&device_attribute)},
        OWN(cuMemAddressReserve),
        OWN(cuMemAddressFree),
        OWN(cuMemGetAllocationGranularity),
        OWN(cuMemCreate),
        OWN(cuMemRelease),
        OWN(cuMemMap),
        OWN(cuMemSetAccess),
        OWN(cuMemUnmap),
        OWN(cuCtxSynchronize),
        OWN(cuCtxSetCurrent),
        OWN(cuDevicePrimaryCtxGetState),
        OWN(cuLogsRegisterCallback),
        OWN(cuLogsUnregisterCallback),
    };
    const auto found = own.find(name);
    if (found != own.end()) {
        *function = found->second;
    } else {
        CUdriverProcAddressQueryResult unused;
        *function = nullptr;
        cuGetProcAddress(name, function, static_cast<int>(version), 1, &unused);
    }
    if (!*function)
        *function = reinterpret_cast<void *>(missing_call(name));
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
