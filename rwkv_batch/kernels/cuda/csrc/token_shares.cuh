// A token's sums that a product has left as shares of k (shift_mix.cu): added up, and by blocks of a cluster that share the token.
#pragma once

#include "common.cuh"

constexpr int MAX_SHARES = 4;

// Eight neighbours of a sum of `count` shares [count, T, C] fp32, added up in their order, as halves. all: T * C; at: of the first.
__device__ __forceinline__ uint4 add_shares(const float* shares, int count, int64_t all, int64_t at) {
    float share[MAX_SHARES][8];
#pragma unroll
    for (int i = 0; i < MAX_SHARES; ++i) {
        if (i < count) load_floats8(shares + i * all + at, share[i]);
    }
#pragma unroll
    for (int i = 1; i < MAX_SHARES; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) share[0][j] = i < count ? share[0][j] + share[i][j] : share[0][j];
    }
    return pack8(share[0]);
}

// Blocks of a cluster that share a token. All threads: arrive, then wait until all blocks' threads have.
constexpr int TOKEN_BLOCKS = 4;

__device__ __forceinline__ void arrive_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// To the same place in the shared memory of a block of the cluster.
__device__ __forceinline__ void put_in_block(float2* place, int block, const float2& v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.v2.f32 [at], {%2, %3};\n}" ::"r"(own), "r"(block),
                 "f"(v.x), "f"(v.y) : "memory");
#endif
}
