// Formats of quantised weights, and their conversion to fp16 in registers.
//
//   fp8   e4m3 with an fp32 scale per output. Before sm_89 the bits are shifted instead of converted: values come out
//         2^-8 times as large, subnormals too (code_scale). There are no NaNs.
//   w8a8  s8, for inputs in 8 bits (w8a8/w8a8_rows.cuh); only hopper_row.cu
//   int4  u4 0 .. 15, fp16 (scale, 1024 + zero) in units of 2^-6 per output and group of 128 inputs:
//         w = (q - zero) * scale.
//         Nibble i of a word is input 2i, nibble i + 4 is input 2i + 1.
#pragma once

#include "common.cuh"

enum Format { FP8 = 0, INT4 = 2, HALF = 3, W8A8 = 4 };

constexpr int GROUP_INPUTS = 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define CONVERTS_E4M3 1
#else
#define CONVERTS_E4M3 0
#endif

// Factor of sums of products with unpacked weights.
template <Format FORMAT>
__device__ __forceinline__ constexpr float code_scale() {
    return FORMAT == HALF || FORMAT == W8A8 ? 1.0f : FORMAT == FP8 ? (CONVERTS_E4M3 ? 1.0f : 256.0f) : 1.0f / 64.0f;
}

__device__ __forceinline__ uint32_t subtract2(uint32_t a, uint32_t b) {
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&d);
}

__device__ __forceinline__ uint32_t e4m3_bits_to_half(uint32_t high_bytes) {
    return (high_bytes & 0x80008000u) | ((high_bytes >> 1) & 0x3f803f80u);
}

// Two e4m3 in the low bytes -> two fp16.
__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t codes) {
#if CONVERTS_E4M3
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
    return pair;
#else
    return e4m3_bits_to_half(__byte_perm(codes, 0, 0x1404));
#endif
}

// Four e4m3 -> two fp16 pairs, in order.
__device__ __forceinline__ void unpack_e4m3(uint32_t codes, uint32_t& first, uint32_t& second) {
#if CONVERTS_E4M3
    first = e4m3x2_to_half2(codes), second = e4m3x2_to_half2(codes >> 16);
#else
    const uint32_t odd = e4m3_bits_to_half(codes), even = e4m3_bits_to_half(codes << 8);
    first = __byte_perm(even, odd, 0x5410), second = __byte_perm(even, odd, 0x7632);
#endif
}

// Eight 4-bit weights -> pairs (0, 1), (2, 3), (4, 5), (6, 7) minus their zero. `zeros`: 1024 + zero in both halves. In
// the second nibble of a byte, 1024 + q holds 16 q.
__device__ __forceinline__ void unpack_word(uint32_t codes, uint32_t zeros, uint32_t (&pairs)[4]) {
    const uint32_t zeros_16 = subtract2(zeros, 0x63806380u), sixteenth = 0x2c002c00u;  // 64 + zero; 1 / 16
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t word = codes >> (4 * i);
        pairs[i] = subtract2((word & 0x000f000fu) | 0x64006400u, zeros);
        const uint32_t high = (word & 0x00f000f0u) | 0x64006400u;
        const __half2 d = __hfma2(*reinterpret_cast<const __half2*>(&high), *reinterpret_cast<const __half2*>(&sixteenth),
                                  __hneg2(*reinterpret_cast<const __half2*>(&zeros_16)));
        pairs[i + 1] = *reinterpret_cast<const uint32_t*>(&d);
    }
}

// Inputs (2i, 2i + 1) of a word of eight 4-bit weights. `zeros`: 1024 + zero in both halves.
__device__ __forceinline__ uint32_t unpack_nibbles(uint32_t codes, int i, uint32_t zeros) {
    return subtract2(((codes >> (4 * i)) & 0x000f000fu) | 0x64006400u, zeros);
}
