// CTAs of a cluster that share a token's channels (sm_90). Before sm_90 nothing launches them.
#pragma once

#include "common.cuh"

// CTAs of a cluster that share a token. All threads arrive, then wait for all threads of the cluster.
constexpr int TOKEN_CTAS = 4;

__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the same address in another CTA's shared memory.
__device__ __forceinline__ void store_remote(float2* place, int block, const float2& v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.v2.f32 [at], {%2, %3};\n}" ::"r"(own), "r"(block),
                 "f"(v.x), "f"(v.y) : "memory");
#endif
}

// Launches clusters of TOKEN_CTAS CTAs that may start early.
template <typename... Params, typename... Args>
inline void launch_clusters(void (*kernel)(Params...), dim3 grid, int threads, void* stream, const Args&... args) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes, config.numAttrs = 2;
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = TOKEN_CTAS, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchKernelEx(&config, kernel, Params(args)...);
}
