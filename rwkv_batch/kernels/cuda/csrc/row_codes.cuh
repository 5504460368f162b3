// Rows of halves as e4m3 codes with a scale (fp32) each: x = codes * scale, the largest of a row becomes 448.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

struct RowScale {
    float scale, inverse;
};

// Of a row by the largest of its absolute values.
__device__ __forceinline__ RowScale scale_of_row(float largest) {
    constexpr float LARGEST_CODE = 448.0f;
    const float scale = largest > 0.0f ? largest / LARGEST_CODE : 1.0f;
    return RowScale{scale, 1.0f / scale};
}

__device__ __forceinline__ uint2 codes_of(const float (&v)[8], float inverse) {
    uint32_t packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* f = v + 4 * i;
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(f[0] * inverse, f[1] * inverse), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(f[2] * inverse, f[3] * inverse), __NV_SATFINITE, __NV_E4M3);
        packed[i] = low | high << 16;
    }
    return make_uint2(packed[0], packed[1]);
}

__device__ __forceinline__ float largest_of(const float (&v)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i]));
    return largest;
}

// The largest of numbers that are not negative.
__device__ __forceinline__ float warp_max(float x) { return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(x))); }
