// Two-part rows: x = first + second / 8, both e5m2. This keeps 6 mantissa bits over the range of fp16, without a scale.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

constexpr float SECOND_PART_SCALE = 0.125f;  // weight of the second part

// Splits two fp16. Returns the first parts in the low two bytes, the second parts in the high two.
__device__ __forceinline__ uint32_t split_half2(__half2 x) {
    const uint32_t first = __nv_cvt_halfraw2_to_fp8x2(x, __NV_SATFINITE, __NV_E5M2);
    const uint32_t widened = __byte_perm(first, 0, 0x1404);  // e5m2 is the high byte of fp16
    const __half2 rest = __hmul2(__hsub2(x, *reinterpret_cast<const __half2*>(&widened)), __float2half2_rn(1.0f / SECOND_PART_SCALE));
    const uint32_t second = __nv_cvt_halfraw2_to_fp8x2(rest, __NV_SATFINITE, __NV_E5M2);
    return first | second << 16;
}

// Stores eight values of a row [2][k]; `at` points to their first parts.
__device__ __forceinline__ void store_two_part(uint8_t* at, int64_t k, const uint4& halves) {
    const __half2* pairs = reinterpret_cast<const __half2*>(&halves);
    uint32_t split[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split[i] = split_half2(pairs[i]);
    const auto packed = [&](uint32_t pick) {
        return make_uint2(__byte_perm(split[0], split[1], pick), __byte_perm(split[2], split[3], pick));
    };
    *reinterpret_cast<uint2*>(at) = packed(0x5410);
    *reinterpret_cast<uint2*>(at + k) = packed(0x7632);
}
