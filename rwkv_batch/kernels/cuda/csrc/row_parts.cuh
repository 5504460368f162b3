// A half as two e5m2 numbers: x = first + second / 8, 6 bits of it over all that a half holds, so that rows want no scale.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

constexpr float SECOND_PART = 0.125f;  // what the second one counts

// Two halves: their first parts in the low bytes, the second ones in the high bytes.
__device__ __forceinline__ uint32_t parts_of_two(__half2 x) {
    const uint32_t first = __nv_cvt_halfraw2_to_fp8x2(x, __NV_SATFINITE, __NV_E5M2);
    const uint32_t widened = __byte_perm(first, 0, 0x1404);  // e5m2 is the high byte of a half
    const __half2 rest = __hmul2(__hsub2(x, *reinterpret_cast<const __half2*>(&widened)), __float2half2_rn(1.0f / SECOND_PART));
    const uint32_t second = __nv_cvt_halfraw2_to_fp8x2(rest, __NV_SATFINITE, __NV_E5M2);
    return first | second << 16;
}

// Eight halves of a row [2][k], at the place of their first parts.
__device__ __forceinline__ void store_parts(uint8_t* at, int64_t k, const uint4& halves) {
    const __half2* pairs = reinterpret_cast<const __half2*>(&halves);
    uint32_t parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[i] = parts_of_two(pairs[i]);
    const auto packed = [&](uint32_t pick) {
        return make_uint2(__byte_perm(parts[0], parts[1], pick), __byte_perm(parts[2], parts[3], pick));
    };
    *reinterpret_cast<uint2*>(at) = packed(0x5410);
    *reinterpret_cast<uint2*>(at + k) = packed(0x7632);
}
