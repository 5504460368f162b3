// Split-K partials as input of shift_mix.cu, and CTAs of a cluster that share a token.
#pragma once

#include "../common.cuh"

constexpr int MAX_SPLITS = 4;

// Reduces eight adjacent elements of partials [count, T, C] fp32 in order, rounds to fp16. stride: T * C; at: first
// element.
__device__ __forceinline__ uint4 sum_partials(const float* partials, int count, int64_t stride, int64_t at) {
    float loaded[MAX_SPLITS][8];
#pragma unroll
    for (int i = 0; i < MAX_SPLITS; ++i) {
        if (i < count) load_fp32x8(partials + i * stride + at, loaded[i]);
    }
#pragma unroll
    for (int i = 1; i < MAX_SPLITS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) loaded[0][j] = i < count ? loaded[0][j] + loaded[i][j] : loaded[0][j];
    }
    return pack8(loaded[0]);
}

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
