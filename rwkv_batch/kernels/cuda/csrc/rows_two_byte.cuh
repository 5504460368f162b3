// Two-byte rows: x = scale * (256 * hi + lo), hi and lo s8. One scale per group; its maximum becomes 32,639 (127, 127).
// A group is 128 inputs, or one head (64) for the output of the WKV.
//
//   bytes   [rows, 2, k] s8
//   scales  [k / group, pitch] float2 (scale, -128 * scale * sum of the group's integers); pitch: rows, rounded up to even
//
// Int8 weights are stored with an offset of 128 (quant.cuh). A GEMM with them adds the second number to undo the
// offset. A group with NaN or infinity gets such a scale, so that its results are not finite either.
#pragma once

#include "common.cuh"

constexpr int TWO_BYTE_GROUP = 128;
constexpr float MAX_TWO_BYTE = 32639.0f;

struct TwoByteScale {
    float scale, inverse;

    // largest: fp16 bits of the group's largest absolute value
    __device__ __forceinline__ explicit TwoByteScale(uint32_t largest) {
        const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(largest)));
        scale = value * (1.0f / MAX_TWO_BYTE);
        inverse = value > 0.0f ? MAX_TWO_BYTE * reciprocal(value) : 0.0f;
    }
};

// Returns the integer + 128 in the low 16 bits: lo with its sign bit flipped, then hi.
__device__ __forceinline__ uint32_t two_byte_bits(float x, float inverse) {
    return __float_as_uint(fmaf(x, inverse, 12582912.0f + 128.0f));  // 1.5 * 2^23: the integer is in the last mantissa bits
}

__device__ __forceinline__ int sum_of_bytes(uint32_t four, int sum) { return __dp4a(static_cast<int>(four), 0x01010101, sum); }

// Eight integers of a row.
struct TwoByteRow {
    uint2 first, second;  // hi bytes, lo bytes

    __device__ __forceinline__ TwoByteRow() {}
    // pairs: two_byte_bits of two values per word
    __device__ __forceinline__ explicit TwoByteRow(const uint4& pairs) {
        first = make_uint2(__byte_perm(pairs.x, pairs.y, 0x7531), __byte_perm(pairs.z, pairs.w, 0x7531));
        second = make_uint2(__byte_perm(pairs.x, pairs.y, 0x6420) ^ 0x80808080u, __byte_perm(pairs.z, pairs.w, 0x6420) ^ 0x80808080u);
    }

    __device__ __forceinline__ int sum() const {
        return 256 * sum_of_bytes(first.x, sum_of_bytes(first.y, 0)) + sum_of_bytes(second.x, sum_of_bytes(second.y, 0));
    }

    // at: address of the hi bytes in a row [2][k]
    __device__ __forceinline__ void store(uint8_t* at, int64_t k) const {
        *reinterpret_cast<uint2*>(at) = first;
        *reinterpret_cast<uint2*>(at + k) = second;
    }
};

// Returns a group's entry in `scales`.
__device__ __forceinline__ float2 two_byte_scale_item(float scale, int sum) {
    return make_float2(scale, -128.0f * scale * static_cast<float>(sum));
}

// fp16 bits of the larger absolute value of two fp16. NaN bits are the largest.
__device__ __forceinline__ uint32_t abs_max_bits(uint32_t pair) { return max(pair >> 16 & 0x7fffu, pair & 0x7fffu); }

// Stores eight values of each of COUNT rows; GROUP / 8 adjacent lanes hold a group. Bytes go to at[i], scales to
// scale_items[i]. All lanes of a warp must call it. Inactive lanes store nothing; `active` is uniform within a group.
template <int GROUP, int COUNT>
__device__ __forceinline__ void store_two_byte_rows(
    uint8_t* const (&at)[COUNT], int64_t k, float2* const (&scale_items)[COUNT], const uint4* halves, bool active) {
    uint32_t largest[COUNT];
    int sums[COUNT];
    TwoByteRow bytes[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const uint4& v = halves[i];
        largest[i] = max(max(abs_max_bits(v.x), abs_max_bits(v.y)), max(abs_max_bits(v.z), abs_max_bits(v.w)));
    }
#pragma unroll
    for (int offset = GROUP / 16; offset > 0; offset >>= 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) largest[i] = max(largest[i], __shfl_xor_sync(FULL_MASK, largest[i], offset));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const TwoByteScale scale(largest[i]);
        float v[8];
        unpack8(halves[i], v);
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            pairs[j] = __byte_perm(two_byte_bits(v[2 * j], scale.inverse), two_byte_bits(v[2 * j + 1], scale.inverse), 0x5410);
        }
        bytes[i] = TwoByteRow(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        sums[i] = bytes[i].sum();
    }
#pragma unroll
    for (int offset = GROUP / 16; offset > 0; offset >>= 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += __shfl_xor_sync(FULL_MASK, sums[i], offset);
    }
    if (!active) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        bytes[i].store(at[i], k);
        if (threadIdx.x % (GROUP / 8) == 0) *scale_items[i] = two_byte_scale_item(TwoByteScale(largest[i]).scale, sums[i]);
    }
}
