// Helpers of all kernels: 16-byte fp16 accesses, warp and CTA sums, launches, device limits.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "programmatic_launch.cuh"

#define RWKV_API extern "C" __attribute__((visibility("default")))

constexpr int HEAD_SIZE = 64;  // keys, and values, of one head
constexpr float DECAY_SCALE = -0.6065306597f;  // -exp(-0.5): log of the smallest decay
constexpr float NORM_EPS = 1e-5f;
constexpr float GROUP_NORM_EPS = 64e-5f;
constexpr unsigned FULL_MASK = 0xffffffffu;

// Returns the launch's CUDA error. Every launcher ends with it.
inline int launch_result() { return static_cast<int>(cudaGetLastError()); }

struct DeviceInfo {
    int num_sms;
    int smem_bytes;  // maximum per CTA
    int smem_per_sm;
    int reserved_smem;  // by CUDA, per CTA
    bool has_pdl;  // programmatic dependent launch (sm_90 and later)
};

constexpr int MAX_DEVICES = 64;

// Returns the current device's index into per-device statics.
inline int current_device() {
    int device = 0;
    cudaGetDevice(&device);
    return device % MAX_DEVICES;
}

inline const DeviceInfo& device_info() {
    static DeviceInfo known[MAX_DEVICES] = {};
    DeviceInfo& info = known[current_device()];
    if (info.num_sms == 0) {
        int device = 0, major = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        info.has_pdl = major >= 9;
        cudaDeviceGetAttribute(&info.smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        cudaDeviceGetAttribute(&info.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        cudaDeviceGetAttribute(&info.reserved_smem, cudaDevAttrReservedSharedMemoryPerBlock, device);
        cudaDeviceGetAttribute(&info.num_sms, cudaDevAttrMultiProcessorCount, device);
    }
    return info;
}

enum class LaunchOrder { OVERLAPPED, SERIAL };

// Launches a kernel on a stream.
// OVERLAPPED: programmatic dependent launch where the GPU has it. CTAs start while the previous kernel runs. So the
// kernel must call wait_for_previous_kernel() before it reads inputs or writes anything.
// SERIAL: CTAs start after the previous kernel and spread over all SMs. Overlapped CTAs pile up on the first free SMs.
// shared_percent: shared memory carveout of the SM's combined L1 and shared memory; -1 leaves it to the driver.
template <LaunchOrder ORDER = LaunchOrder::OVERLAPPED, typename... Params, typename... Args>
inline void launch_with_carveout(
    void (*kernel)(Params...), dim3 grid, int threads, size_t smem_bytes, int shared_percent, void* stream,
    const Args&... args) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (ORDER == LaunchOrder::OVERLAPPED && device_info().has_pdl) {
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

template <LaunchOrder ORDER = LaunchOrder::OVERLAPPED, typename... Params, typename... Args>
inline void launch_with_smem(
    void (*kernel)(Params...), dim3 grid, int threads, size_t smem_bytes, void* stream, const Args&... args) {
    launch_with_carveout<ORDER>(kernel, grid, threads, smem_bytes, -1, stream, args...);
}

template <LaunchOrder ORDER = LaunchOrder::OVERLAPPED, typename... Params, typename... Args>
inline void launch(void (*kernel)(Params...), dim3 grid, int threads, void* stream, const Args&... args) {
    launch_with_smem<ORDER>(kernel, grid, threads, 0, stream, args...);
}

// Launches clusters of `size` CTAs, which may start early.
template <typename... Params, typename... Args>
inline void launch_clusters(
    void (*kernel)(Params...), int size, dim3 grid, int threads, size_t smem_bytes, void* stream, const Args&... args) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes, config.numAttrs = 2;
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = size, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// Launches a kernel of at most two CTAs per SM that streams through L1.
// The driver keeps the previous kernel's carveout, which can leave an L1 of 28 KB. This launch sets the smallest
// carveout that holds the CTAs. It pads their shared memory, so that early CTAs do not pile up on one SM.
template <typename... Params, typename... Args>
inline void launch_streaming(void (*kernel)(Params...), dim3 grid, int threads, void* stream, const Args&... args) {
    constexpr int SPLITS[] = {32 << 10, 64 << 10, 100 << 10};
    const DeviceInfo& info = device_info();
    cudaFuncAttributes attributes = {};
    cudaFuncGetAttributes(&attributes, kernel);
    const int own = static_cast<int>(attributes.sharedSizeBytes) + info.reserved_smem;
    const int places = static_cast<int>(grid.x * grid.y) <= info.num_sms ? 1 : 2;
    int split = SPLITS[0];
    for (const int max_nan : SPLITS)
        if (split < places * own) split = max_nan;
    const int padding = max(0, split / (places + 1) + 128 - own);
    launch_with_carveout(kernel, grid, threads, padding, split * 100LL / info.smem_per_sm, stream, args...);
}

// 1 / x within 2 ulp. Returns 0 for +inf.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoidf(float x) { return reciprocal(1.0f + __expf(-x)); }

// tanh by exp. It saturates without NaN.
__device__ __forceinline__ float tanh_exp(float x) { return 1.0f - 2.0f * reciprocal(1.0f + __expf(2.0f * x)); }

// Eight fp16 in 16 bytes <-> eight fp32.
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
// Prefetches a line into L2.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void load_fp32x8(const float* p, float (&out)[8]) {
    const float4 lo = reinterpret_cast<const float4*>(p)[0], hi = reinterpret_cast<const float4*>(p)[1];
    out[0] = lo.x, out[1] = lo.y, out[2] = lo.z, out[3] = lo.w;
    out[4] = hi.x, out[5] = hi.y, out[6] = hi.z, out[7] = hi.w;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL_MASK, x, offset);
    return x;
}

// Sum over the CTA. `scratch` holds one float per warp; reuse it only after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    const int warps = (blockDim.x + 31) >> 5, lane = threadIdx.x & 31;
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
