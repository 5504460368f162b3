// Int8 WKV state: layout and quantisation. Definition: model/state.py.
//
// A row keeps its scale while its maximum is between MIN_KEPT_CODE and 127 units. So an unchanged state stays as it is,
// and a slowly changing one is not rounded to a new scale at every step. Otherwise the scale becomes max / 127, rounded
// up to bf16.
// Rounding is stochastic. The thresholds, in steps of 1/256, are hashed from the row's own numbers, so its bits depend
// on nothing else.
#pragma once

#include "../common.cuh"

struct Int8State {
    int8_t codes[HEAD_SIZE][HEAD_SIZE];  // [value][key]
    uint16_t scales[HEAD_SIZE];     // bf16
};
static_assert(sizeof(Int8State) == 4224, "as in model/state_form.py");

constexpr float LARGEST_CODE = 127.0f, MIN_KEPT_CODE = 112.0f;
constexpr float MIN_SCALE = 1e-30f;  // a row below is 0
constexpr uint32_t BIASED = 0x47400000u;  // 49152.0, ulp 1/256: the second byte of 49152 + x is floor(x) mod 256

// Four thresholds per word, one byte each.
__device__ __forceinline__ uint32_t hash_bits(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// A row's new scale, and the factor of numbers in `unit`. old: the previous scale, in units.
struct Rescaled {
    float scale, ratio;

    __device__ __forceinline__ Rescaled(float most, float unit, float old) {
        constexpr float PART = (1.0f - 0x1p-22f) / LARGEST_CODE;  // slightly below 1/127, so that rounding adds no unit
        scale = __uint_as_float((__float_as_uint(most * unit * PART) + 0xFFFFu) & 0xFFFF0000u);
        if (most >= MIN_KEPT_CODE * old && most <= LARGEST_CODE * old) scale = unit * old;
        ratio = unit * reciprocal(fmaxf(scale, MIN_SCALE));
    }
};

__device__ __forceinline__ float scale_of(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ uint16_t bits_of(float scale) { return static_cast<uint16_t>(__float_as_uint(scale) >> 16); }

// Byte j of `bytes` as the threshold of quantise_state().
__device__ __forceinline__ float threshold(uint32_t bytes, int j) {
    return __uint_as_float(__byte_perm(bytes, BIASED, 0x7650 | j));
}

// x * ratio, rounded by the threshold. The code is the second byte.
__device__ __forceinline__ uint32_t quantise_state(float x, float ratio, float threshold) {
    return __float_as_uint(fmaf(x, ratio, threshold));
}
