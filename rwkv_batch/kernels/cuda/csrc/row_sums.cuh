// Sums of a row of C channels that blocks add to in any order and that have the same bits whichever it is: whole numbers of 2^-32.
// Of 8 neighbouring channels each is in another of 8 lines, [8][C / 8], so that neighbouring threads have neighbours.
#pragma once

#include "common.cuh"

constexpr float SUM_UNITS = 4294967296.0f, MOST_SUM = 8388608.0f;  // of a block; NaN becomes the lowest, -inf as a half

__device__ __forceinline__ void add_to_sums(unsigned long long* sums, int width, int c, const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const long long units = __float2ll_rn(fminf(fmaxf(v[j], -MOST_SUM), MOST_SUM) * SUM_UNITS);
        atomicAdd(sums + j * (width / 8) + c / 8, static_cast<unsigned long long>(units));
    }
}

// Past L1, which may hold what an earlier layer's sums were.
__device__ __forceinline__ uint4 halves_of_sums(const unsigned long long* sums, int width, int c) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = static_cast<float>(static_cast<long long>(__ldcg(sums + j * (width / 8) + c / 8))) * (1.0f / SUM_UNITS);
    return pack8(v);
}

__device__ __forceinline__ void clear_sums(unsigned long long* sums, int width, int c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) __stcg(sums + j * (width / 8) + c / 8, 0ull);
}
