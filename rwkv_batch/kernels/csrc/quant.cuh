// Weights of 8 and 4 bits as halves in registers, for kernels that stream them.
//
//   fp8   e4m3, a scale (fp32) per output. Four codes of a word become halves 2^-8 times as large, whose bits are those of
//         the code moved: right for subnormals too. NaN codes do not occur.
//   int8  -127 .. 127, a scale (fp16, in units of 2^-6) per output and group of 128 inputs.
//   int4  0 .. 15, scale and zero (fp16) likewise: (code - zero) * scale. Two codes of a pair lie four nibbles apart:
//         nibble i of a word is input 2i, nibble i + 4 is input 2i + 1.
#pragma once

#include "common.cuh"

enum Format { FP8 = 0, INT8 = 1, INT4 = 2 };

constexpr int GROUP_INPUTS = 128;

// What sums of codes, scaled where there are groups, are to be multiplied by.
template <Format FORMAT>
constexpr float CODE_SCALE = FORMAT == FP8 ? 256.0f : 1.0f / 64.0f;

__device__ __forceinline__ uint32_t subtract2(uint32_t a, uint32_t b) {
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&d);
}

__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t high_bytes) {
    return (high_bytes & 0x80008000u) | ((high_bytes >> 1) & 0x3f803f80u);
}

// Four codes -> two pairs of halves. fp8: of inputs (1, 3) and (0, 2), see pairs_like; int8: (0, 1) and (2, 3).
template <Format FORMAT>
__device__ __forceinline__ void unpack_bytes(uint32_t codes, uint32_t& first, uint32_t& second) {
    if constexpr (FORMAT == FP8) {
        first = halves_of_e4m3(codes);
        second = halves_of_e4m3(codes << 8);
    } else {
        // A byte b with 0x64 above it is 1024 + b; the sign bit turned makes b the code + 128.
        const uint32_t biased = codes ^ 0x80808080u;
        first = subtract2(__byte_perm(biased, 0x64646464u, 0x4140), 0x64806480u);
        second = subtract2(__byte_perm(biased, 0x64646464u, 0x4342), 0x64806480u);
    }
}

// Inputs (0, 1), (2, 3) of x in the order in which unpack_bytes leaves the weights.
template <Format FORMAT>
__device__ __forceinline__ void pairs_like(uint32_t low, uint32_t high, uint32_t& first, uint32_t& second) {
    if constexpr (FORMAT == FP8) {
        first = __byte_perm(low, high, 0x7632);
        second = __byte_perm(low, high, 0x5410);
    } else {
        first = low, second = high;
    }
}

// Inputs (2i, 2i + 1) of a word of eight 4-bit codes; `zeros`: twice the half 1024 + zero.
__device__ __forceinline__ uint32_t unpack_nibbles(uint32_t codes, int i, uint32_t zeros) {
    return subtract2(((codes >> (4 * i)) & 0x000f000fu) | 0x64006400u, zeros);
}
