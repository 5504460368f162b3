// Quantises fp16 rows to e4m3 with one fp32 scale per row: x = q * scale, max |q| = 448.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

struct Fp8RowScale {
    float scale, inverse;
};

// abs_max: the row's largest absolute value
__device__ __forceinline__ Fp8RowScale fp8_row_scale(float largest) {
    constexpr float LARGEST_CODE = 448.0f;
    const float scale = largest > 0.0f ? largest / LARGEST_CODE : 1.0f;
    return Fp8RowScale{scale, 1.0f / scale};
}

__device__ __forceinline__ uint2 quantise_fp8(const float (&v)[8], float inverse) {
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

__device__ __forceinline__ float abs_max(const float (&v)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i]));
    return largest;
}

// Maximum over a warp of non-negative numbers.
__device__ __forceinline__ float warp_max(float x) { return __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(x))); }
