// Rows in 8 bits for W8A8 GEMMs (rwkv_batch/model/quant/w8a8.py), in two segments: the first 128 positions and the rest.
//
//   v       = x[order[p]] * factors[p]               x: fp16, or max(x, 0)^2
//   unit    = max(max |v| of the rest, max |v| of segment 1 * (16 / MAX_RATIO))
//   ratio   = min(max(ceil(16 * (max |v| of segment 1 / unit)), 16), MAX_RATIO)   MAX_RATIO 511 (s8) or 255 (u8)
//   scale   = unit / MAX                                                           MAX 127 (s8) or 255 (u8)
//   code[p] = sat(rint(v * (MAX / unit)))                      rest
//             sat(rint(v * (MAX / (unit * (ratio / 16)))))     segment 1
//
// A row with NaN or infinity has a NaN scale, so that its products are NaN.
#pragma once

#include "../common.cuh"
#include "w8a8_args.cuh"

// Inputs of one matrix, by position.
struct W8A8Inputs {
    const float* factors;
    const uint16_t* order;  // the channel that is stored at a position
};

// Saturating conversions, ties to even. NaN gives 0.
__device__ __forceinline__ int saturated_s8(float x) {
    int code;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(x));
    return code;
}
__device__ __forceinline__ int saturated_u8(float x) {
    int code;
    asm("cvt.rni.sat.u8.f32 %0, %1;" : "=r"(code) : "f"(x));
    return code;
}

// Bits of |x|: ordered like |x|, NaN above all.
__device__ __forceinline__ uint32_t abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <bool UNSIGNED>
struct W8A8Row {
    static constexpr float MAX = UNSIGNED ? 255.0f : 127.0f, MAX_RATIO = UNSIGNED ? 255.0f : 511.0f;
    float scale, inverse_rest, inverse_large;
    int ratio;

    // Bits of the segments' largest |v|.
    __device__ __forceinline__ W8A8Row(uint32_t rest, uint32_t large) {
        const float of_rest = __uint_as_float(rest), of_large = __uint_as_float(large);
        const float unit = __uint_as_float(max(rest, abs_bits(__fmul_rn(of_large, 16.0f / MAX_RATIO))));  // NaN stays
        const bool is_positive = unit > 0.0f;
        const float sixteenths = is_positive ? fminf(fmaxf(ceilf(__fmul_rn(16.0f, __fdiv_rn(of_large, unit))), 16.0f), MAX_RATIO) : 16.0f;
        const float step = __fmul_rn(unit, sixteenths * 0.0625f);
        inverse_rest = is_positive ? fminf(__fdiv_rn(MAX, unit), 3e38f) : 0.0f;
        inverse_large = is_positive ? fminf(__fdiv_rn(MAX, step), 3e38f) : 0.0f;
        const bool is_finite = abs_bits(__fadd_rn(of_rest, of_large)) < 0x7f800000u;
        scale = is_finite ? __fmul_rn(unit, 1.0f / MAX) : __uint_as_float(0x7fc00000u);
        ratio = static_cast<int>(sixteenths);
    }

    // Codes of four positions of one segment.
    __device__ __forceinline__ uint32_t codes(const float (&v)[4], bool is_large) const {
        const float inverse = is_large ? inverse_large : inverse_rest;
        uint32_t packed = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scaled = __fmul_rn(v[i], inverse);
            packed |= (static_cast<uint32_t>(UNSIGNED ? saturated_u8(scaled) : saturated_s8(scaled)) & 0xffu) << (8 * i);
        }
        return packed;
    }
};

// Loads the channels of four positions from position `at` on.
__device__ __forceinline__ void load_order(const W8A8Inputs& in, int at, int (&channels)[4]) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(in.order + at));
    channels[0] = packed.x & 0xffffu, channels[1] = packed.x >> 16, channels[2] = packed.y & 0xffffu, channels[3] = packed.y >> 16;
}
