// Halves of a row as whole numbers of two signed bytes: x = scale * (256 * first + second), with a scale for each 128 neighbours (64,
// a head, of what the WKV makes), whose largest becomes 32639, 127 in both bytes. Weights of int8 are stored with 128 added (quant.cuh): beside a group's scale
// stands what these add to a sum, as a number to be added to it.
//
//   bytes   [rows, 2, k] s8
//   scales  [k / 128 or 64][pitch] (scale, -128 * scale * sum of the numbers) fp32; pitch: the rows, made even
//
// A group with a NaN or an infinity has such a scale, so that what is made of it is not finite either.
#pragma once

#include "common.cuh"

constexpr int BYTES_GROUP = 128;
constexpr float LARGEST_NUMBER = 32639.0f;

struct NumberScale {
    float scale, inverse;

    // largest: the bits of the largest absolute value of a group, a half
    __device__ __forceinline__ explicit NumberScale(uint32_t largest) {
        const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(largest)));
        scale = value * (1.0f / LARGEST_NUMBER);
        inverse = value > 0.0f ? LARGEST_NUMBER * reciprocal(value) : 0.0f;
    }
};

// A number and 128 in the low 16 bits: the second byte with its highest bit flipped, then the first.
__device__ __forceinline__ uint32_t number_bits(float x, float inverse) {
    return __float_as_uint(fmaf(x, inverse, 12582912.0f + 128.0f));  // 1.5 * 2^23: whole numbers are a float's last bits
}

__device__ __forceinline__ int sum_of_bytes(uint32_t four, int sum) { return __dp4a(static_cast<int>(four), 0x01010101, sum); }

// Eight numbers.
struct RowBytes {
    uint2 first, second;

    __device__ __forceinline__ RowBytes() {}
    // pairs: their bits (number_bits), two in a word
    __device__ __forceinline__ explicit RowBytes(const uint4& pairs) {
        first = make_uint2(__byte_perm(pairs.x, pairs.y, 0x7531), __byte_perm(pairs.z, pairs.w, 0x7531));
        second = make_uint2(__byte_perm(pairs.x, pairs.y, 0x6420) ^ 0x80808080u, __byte_perm(pairs.z, pairs.w, 0x6420) ^ 0x80808080u);
    }

    __device__ __forceinline__ int sum() const {
        return 256 * sum_of_bytes(first.x, sum_of_bytes(first.y, 0)) + sum_of_bytes(second.x, sum_of_bytes(second.y, 0));
    }

    // at: of the first bytes of a row [2][k]
    __device__ __forceinline__ void store(uint8_t* at, int64_t k) const {
        *reinterpret_cast<uint2*>(at) = first;
        *reinterpret_cast<uint2*>(at + k) = second;
    }
};

// What stands beside a group whose numbers have this sum.
__device__ __forceinline__ float2 group_item(float scale, int sum) {
    return make_float2(scale, -128.0f * scale * static_cast<float>(sum));
}

// The bits of the largest absolute value of two halves; those of a NaN are the largest of all.
__device__ __forceinline__ uint32_t largest_bits(uint32_t pair) { return max(pair >> 16 & 0x7fffu, pair & 0x7fffu); }

// Eight halves of each of COUNT rows, by GROUP / 8 neighbouring lanes a group of each: their bytes at at[i], what stands beside a group at
// items[i]. All lanes of a warp; nothing is written by those that are not `active`, which are such by groups.
template <int GROUP, int COUNT>
__device__ __forceinline__ void store_bytes(
    uint8_t* const (&at)[COUNT], int64_t k, float2* const (&items)[COUNT], const uint4* halves, bool active) {
    uint32_t largest[COUNT];
    int sums[COUNT];
    RowBytes bytes[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const uint4& v = halves[i];
        largest[i] = max(max(largest_bits(v.x), largest_bits(v.y)), max(largest_bits(v.z), largest_bits(v.w)));
    }
#pragma unroll
    for (int offset = GROUP / 16; offset > 0; offset >>= 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) largest[i] = max(largest[i], __shfl_xor_sync(FULL, largest[i], offset));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const NumberScale of(largest[i]);
        float v[8];
        unpack8(halves[i], v);
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            pairs[j] = __byte_perm(number_bits(v[2 * j], of.inverse), number_bits(v[2 * j + 1], of.inverse), 0x5410);
        }
        bytes[i] = RowBytes(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        sums[i] = bytes[i].sum();
    }
#pragma unroll
    for (int offset = GROUP / 16; offset > 0; offset >>= 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += __shfl_xor_sync(FULL, sums[i], offset);
    }
    if (!active) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        bytes[i].store(at[i], k);
        if (threadIdx.x % (GROUP / 8) == 0) *items[i] = group_item(NumberScale(largest[i]).scale, sums[i]);
    }
}
