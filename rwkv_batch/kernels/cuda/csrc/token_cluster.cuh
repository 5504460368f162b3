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
