// States of 8 bits as they lie in memory (what they are: model/state_form.py), and how numbers become codes.
//
// A row keeps its scale while its largest number lies between KEPT and 127 of it: what does not change stays as it is, and
// what changes slowly is not rounded anew for a scale that moves a little in every step. Else the scale becomes the largest
// number / 127, rounded up to bf16. Codes are numbers / scale, rounded up with the probability of what is behind the point:
// thresholds in steps of 1/256 are hashed of the row's own numbers, so that its bits depend on nothing else.
#pragma once

#include "common.cuh"

struct CodedState {
    int8_t codes[HEAD][HEAD];  // [value][key]
    uint16_t scales[HEAD];     // bf16
};
static_assert(sizeof(CodedState) == 4224, "as in model/state_form.py");

constexpr float LARGEST_CODE = 127.0f, KEPT = 112.0f;
constexpr float SMALLEST = 1e-30f;        // a row of less is 0
constexpr uint32_t BIASED = 0x47400000u;  // 49152.0, in steps of 1/256: the second byte of 49152 + x is floor(x) mod 256

// Four thresholds a word: bytes.
__device__ __forceinline__ uint32_t hashed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// The scale that a row gets, and what numbers in `unit` are multiplied by; old: what it had, in units.
struct Rescaled {
    float scale, ratio;

    __device__ __forceinline__ Rescaled(float most, float unit, float old) {
        constexpr float PART = (1.0f - 0x1p-22f) / LARGEST_CODE;  // below 1/127, so that rounding adds no step
        scale = __uint_as_float((__float_as_uint(most * unit * PART) + 0xFFFFu) & 0xFFFF0000u);
        if (most >= KEPT * old && most <= LARGEST_CODE * old) scale = unit * old;
        ratio = unit * reciprocal(fmaxf(scale, SMALLEST));
    }
};

__device__ __forceinline__ float scale_of(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ uint16_t bits_of(float scale) { return static_cast<uint16_t>(__float_as_uint(scale) >> 16); }

// Byte j of `bytes` as the threshold of coded().
__device__ __forceinline__ float threshold(uint32_t bytes, int j) {
    return __uint_as_float(__byte_perm(bytes, BIASED, 0x7650 | j));
}

// x / scale rounded; the code is the second byte.
__device__ __forceinline__ uint32_t coded(float x, float ratio, float threshold) {
    return __float_as_uint(fmaf(x, ratio, threshold));
}
