// A row of C sums in 64-bit fixed point, units of 2^-32. Integer adds make the result independent of the CTAs' order.
// Layout [8][C / 8]: channel 8i + j lies at [j][i], so that adjacent threads access adjacent words.
#pragma once

#include "common.cuh"

constexpr float FIXED_POINT_ONE = 4294967296.0f, MAX_FIXED_POINT = 8388608.0f;  // limit per CTA; NaN becomes -MAX_FIXED_POINT, which is -inf in fp16

__device__ __forceinline__ void add_fixed_point(unsigned long long* sums, int width, int c, const float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const long long units = __float2ll_rn(fminf(fmaxf(v[j], -MAX_FIXED_POINT), MAX_FIXED_POINT) * FIXED_POINT_ONE);
        atomicAdd(sums + j * (width / 8) + c / 8, static_cast<unsigned long long>(units));
    }
}

// Bypasses L1, which may hold an earlier layer's sums.
__device__ __forceinline__ uint4 load_fixed_point(const unsigned long long* sums, int width, int c) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = static_cast<float>(static_cast<long long>(__ldcg(sums + j * (width / 8) + c / 8))) * (1.0f / FIXED_POINT_ONE);
    return pack8(v);
}

__device__ __forceinline__ void clear_fixed_point(unsigned long long* sums, int width, int c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) __stcg(sums + j * (width / 8) + c / 8, 0ull);
}
