// Shared by all kernels of the forward: 16-byte accesses of fp16, reductions, error reporting.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "early_launch.cuh"

#define RWKV_API extern "C" __attribute__((visibility("default")))

constexpr int HEAD = 64;                       // head size N: keys and values of one head
constexpr float DECAY_SCALE = -0.6065306597f;  // -exp(-0.5): log of the smallest decay
constexpr float NORM_EPS = 1e-5f;
constexpr float GROUP_NORM_EPS = 64e-5f;
constexpr unsigned FULL = 0xffffffffu;

// Every launcher ends with this: the launch's own error, as an int for the C ABI.
inline int launch_result() { return static_cast<int>(cudaGetLastError()); }

struct Machine {
    int processors;
    int shared_bytes;   // most that a block may have
    int shared_in_all;  // of a processor
    int shared_kept;    // by the system, of every block
    bool early_launch;  // a kernel may start before the one before it has ended (sm_90 and later)
};

constexpr int MAX_DEVICES = 64;

// The current device's number, for what is kept per device.
inline int this_device() {
    int device = 0;
    cudaGetDevice(&device);
    return device % MAX_DEVICES;
}

inline const Machine& this_machine() {
    static Machine known[MAX_DEVICES] = {};
    Machine& machine = known[this_device()];
    if (machine.processors == 0) {
        int device = 0, major = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        machine.early_launch = major >= 9;
        cudaDeviceGetAttribute(&machine.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        cudaDeviceGetAttribute(&machine.shared_in_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        cudaDeviceGetAttribute(&machine.shared_kept, cudaDevAttrReservedSharedMemoryPerBlock, device);
        cudaDeviceGetAttribute(&machine.processors, cudaDevAttrMultiProcessorCount, device);
    }
    return machine;
}

enum class Start { EARLY, SPREAD };

// Launch on a stream. EARLY: where the GPU can, the kernel's blocks come up while the kernel before still runs. Such a
// kernel calls wait_for_inputs() before it reads what earlier kernels of the step wrote, or writes anything. SPREAD: they
// come up when it has ended, over all processors; blocks that come early pile up on the first processors that are free.
// shared_percent: how much of a processor's shared memory and L1, which are one store, is to be shared memory; -1 leaves
// that to the driver.
template <Start START = Start::EARLY, typename... Params, typename... Args>
inline void launch_with_split(
    void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, int shared_percent, void* stream,
    const Args&... args) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (START == Start::EARLY && this_machine().early_launch) {
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
#if CUDART_VERSION >= 12080
    if (shared_percent >= 0) {
        cudaLaunchAttribute& split = attributes[config.numAttrs++];
        split.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        split.val.sharedMemCarveout = shared_percent;
    }
#endif
    cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

template <Start START = Start::EARLY, typename... Params, typename... Args>
inline void launch_with_shared(
    void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, void* stream, const Args&... args) {
    launch_with_split<START>(kernel, grid, threads, shared_bytes, -1, stream, args...);
}

template <Start START = Start::EARLY, typename... Params, typename... Args>
inline void launch(void (*kernel)(Params...), dim3 grid, int threads, void* stream, const Args&... args) {
    launch_with_shared<START>(kernel, grid, threads, 0, stream, args...);
}

// Launch a kernel of at most two blocks per processor that streams through L1. What it loads is on its way through L1, and
// the driver leaves the split as the kernel before has had it: after one with all the shared memory there are 28 KB. So
// most of the store becomes L1 (what is left holds the blocks). And every block takes so much shared memory that as few
// fit on a processor as it takes to hold them all: early ones do not pile up.
template <typename... Params, typename... Args>
inline void launch_streaming(void (*kernel)(Params...), dim3 grid, int threads, void* stream, const Args&... args) {
    constexpr int SPLITS[] = {32 << 10, 64 << 10, 100 << 10};
    const Machine& machine = this_machine();
    cudaFuncAttributes attributes = {};
    cudaFuncGetAttributes(&attributes, kernel);
    const int own = static_cast<int>(attributes.sharedSizeBytes) + machine.shared_kept;
    const int places = static_cast<int>(grid.x * grid.y) <= machine.processors ? 1 : 2;
    int split = SPLITS[0];
    for (const int larger : SPLITS)
        if (split < places * own) split = larger;
    const int padding = max(0, split / (places + 1) + 128 - own);
    launch_with_split(kernel, grid, threads, padding, split * 100LL / machine.shared_in_all, stream, args...);
}

// Fast reciprocals (2 ulp of fp32) where an exact division would cost a dozen instructions; +inf gives 0.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoidf(float x) { return reciprocal(1.0f + __expf(-x)); }

// tanh through exp: saturates without NaN.
__device__ __forceinline__ float tanh_exp(float x) { return 1.0f - 2.0f * reciprocal(1.0f + __expf(2.0f * x)); }

// Eight fp16 in one 16-byte register quad <-> eight fp32.
__device__ __forceinline__ void unpack8(const uint4& packed, float (&out)[8]) {
    const __half2* pairs = reinterpret_cast<const __half2*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(pairs[i]);
        out[2 * i] = f.x;
        out[2 * i + 1] = f.y;
    }
}

__device__ __forceinline__ uint4 pack8(const float (&in)[8]) {
    uint4 packed;
    __half2* pairs = reinterpret_cast<__half2*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
    return packed;
}

__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }

__device__ __forceinline__ void load_floats8(const float* p, float (&out)[8]) {
    const float4 lo = reinterpret_cast<const float4*>(p)[0], hi = reinterpret_cast<const float4*>(p)[1];
    out[0] = lo.x, out[1] = lo.y, out[2] = lo.z, out[3] = lo.w;
    out[4] = hi.x, out[5] = hi.y, out[6] = hi.z, out[7] = hi.w;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}

// Sum over the block; `scratch` holds one float per warp and must not be reused before the next barrier.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    const int warps = (blockDim.x + 31) >> 5, lane = threadIdx.x & 31;
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
