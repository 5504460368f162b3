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
#include "../relu.cuh"
#include "w8a8_args.cuh"

// Inputs of one matrix, by position.
struct W8A8Inputs {
    const float* factors;
    const uint16_t* order;  // the channel that is stored at a position; null: x is in order of positions
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

// Transform of four adjacent positions.
struct W8A8Quad {
    uint2 order;
    float4 factors;

    __device__ __forceinline__ W8A8Quad() {}
    __device__ __forceinline__ W8A8Quad(const W8A8Inputs& in, int position)
        : factors(__ldg(reinterpret_cast<const float4*>(in.factors + position))) {
        if (in.order != nullptr) order = __ldg(reinterpret_cast<const uint2*>(in.order + position));
    }

    // A row's four values.
    __device__ __forceinline__ uint2 gather(const __half* x) const {
        return make_uint2(pair(x[order.x & 0xffffu], x[order.x >> 16]), pair(x[order.y & 0xffffu], x[order.y >> 16]));
    }
    __device__ __forceinline__ static uint32_t pair(__half low, __half high) {
        const __half2 both = __halves2half2(low, high);
        return *reinterpret_cast<const uint32_t*>(&both);
    }

    // Scales four values into v, and returns the largest |v|'s bits.
    template <bool RELU_SQUARED>
    __device__ __forceinline__ uint32_t scale(const uint2& x, float (&v)[4]) const {
        const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&x.x)), high = __half22float2(*reinterpret_cast<const __half2*>(&x.y));
        v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
        if (RELU_SQUARED) v[0] = relu_square(v[0]), v[1] = relu_square(v[1]), v[2] = relu_square(v[2]), v[3] = relu_square(v[3]);
        v[0] = __fmul_rn(v[0], factors.x), v[1] = __fmul_rn(v[1], factors.y);
        v[2] = __fmul_rn(v[2], factors.z), v[3] = __fmul_rn(v[3], factors.w);
        return max(max(abs_bits(v[0]), abs_bits(v[1])), max(abs_bits(v[2]), abs_bits(v[3])));
    }
};

// Largest |v|'s bits of a row's segments: from each thread, then of the CTA. A thread's quads are blockDim.x apart, so
// segment 1 is the first quad of warp 0.
struct W8A8Maxima {
    uint32_t of_warps[32], large;

    __device__ __forceinline__ void add(uint32_t of_rest, uint32_t of_large) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        of_rest = __reduce_max_sync(FULL_MASK, of_rest);
        if (lane == 0) of_warps[warp] = of_rest;
        if (warp != 0) return;
        of_large = __reduce_max_sync(FULL_MASK, of_large);
        if (lane == 0) large = of_large;
    }
    // After a barrier.
    __device__ __forceinline__ uint32_t rest() const {
        const int lane = threadIdx.x & 31;
        return __reduce_max_sync(FULL_MASK, lane < static_cast<int>(blockDim.x >> 5) ? of_warps[lane] : 0);
    }
};
