// Rows in 8 bits for W8A8 GEMMs (rwkv_batch/model/quant/w8a8.py), in two segments: 128 large channels and the rest.
//
//   v       = x * factor                             x: fp16, or max(x, 0)^2
//   unit    = max(max |v| of the rest, max |v| of segment 1 * (16 / MAX_RATIO))
//   ratio   = min(max(ceil(16 * (max |v| of segment 1 / unit)), 16), MAX_RATIO)   MAX_RATIO 511 (s8) or 255 (u8)
//   scale   = unit / MAX                                                           MAX 127 (s8) or 255 (u8)
//   code    = sat(rint(v * (MAX / unit)))                      rest
//             sat(rint(v * (MAX / (unit * (ratio / 16)))))     segment 1
//
// A factor's sign names the segment: negative in segment 1. Codes are stored with segment 1 at the first 128 positions.
// Only pairs of channels change their place: a large one from 128 on, and one below 128 that is not large. So threads
// round the channels that they hold.
// A row with NaN or infinity has a NaN scale, so that its products are NaN.
// Codes in two bytes are rounded to 256ths: code = high + low / 256. s8: both bytes are signed.
#pragma once

#include "../common.cuh"
#include "../relu.cuh"
#include "w8a8_args.cuh"

// Four codes in a word. Ties to even, saturating; NaN gives 0.
__device__ __forceinline__ uint32_t pack_s8(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .s32 w, x, y, z;\n.reg .b32 high;\n"
        "cvt.rni.s32.f32 w, %1;\ncvt.rni.s32.f32 x, %2;\ncvt.rni.s32.f32 y, %3;\ncvt.rni.s32.f32 z, %4;\n"
        "cvt.pack.sat.s8.s32.b32 high, z, y, 0;\ncvt.pack.sat.s8.s32.b32 %0, x, w, high;\n}"
        : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
__device__ __forceinline__ uint32_t pack_u8(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .s32 w, x, y, z;\n.reg .b32 high;\n"
        "cvt.rni.s32.f32 w, %1;\ncvt.rni.s32.f32 x, %2;\ncvt.rni.s32.f32 y, %3;\ncvt.rni.s32.f32 z, %4;\n"
        "cvt.pack.sat.u8.s32.b32 high, z, y, 0;\ncvt.pack.sat.u8.s32.b32 %0, x, w, high;\n}"
        : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}

// Ties to even, saturating; NaN gives 0.
__device__ __forceinline__ int rounded_int(float x) { return __float2int_rn(x); }

// Bits of |x|: ordered like |x|, NaN above all.
__device__ __forceinline__ uint32_t abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The larger of two numbers; NaN if one is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Bits of the largest |v|.
template <int COUNT>
__device__ __forceinline__ uint32_t largest_bits(const float (&v)[COUNT]) {
    float largest[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) largest[i] = fabsf(v[i]);
#pragma unroll
    for (int step = COUNT / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < step; ++i) largest[i] = max_or_nan(largest[i], largest[i + step]);
    }
    return __float_as_uint(largest[0]);
}

// What codes of both segments are multiplied by.
struct W8A8Inverses {
    float rest, large;
};

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

    // For lanes that get a row from another lane.
    __device__ __forceinline__ W8A8Inverses inverses() const { return {inverse_rest, inverse_large}; }
};

// Eight adjacent channels of a matrix's inputs.
struct W8A8Octet {
    float factors[8];  // negative: segment 1

    __device__ __forceinline__ void load(const float* of_matrix, int channel) { load_fp32x8(of_matrix + channel, factors); }

    template <bool RELU_SQUARED>
    __device__ __forceinline__ void scale(const uint4& x, float (&v)[8]) const {
        unpack8(x, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(RELU_SQUARED ? relu_square(v[i]) : v[i], fabsf(factors[i]));
    }

    // Eight codes in order of channels.
    template <bool UNSIGNED>
    __device__ __forceinline__ uint2 codes(const float (&v)[8], const W8A8Inverses& of_row) const {
        float s[8];
        steps(v, of_row, s);
        if constexpr (UNSIGNED) {
            return make_uint2(pack_u8(s[0], s[1], s[2], s[3]), pack_u8(s[4], s[5], s[6], s[7]));
        } else {
            return make_uint2(pack_s8(s[0], s[1], s[2], s[3]), pack_s8(s[4], s[5], s[6], s[7]));
        }
    }
    template <bool UNSIGNED>
    __device__ __forceinline__ void codes(const float (&v)[8], const W8A8Inverses& of_row, uint2 (&out)[1]) const {
        out[0] = codes<UNSIGNED>(v, of_row);
    }
    // The same in two bytes: high ones, low ones.
    template <bool UNSIGNED>
    __device__ __forceinline__ void codes(const float (&v)[8], const W8A8Inverses& of_row, uint2 (&out)[2]) const {
        constexpr int LEAST = UNSIGNED ? 0 : -128 * 256, MOST = UNSIGNED ? 255 * 256 : 127 * 256, HALF = UNSIGNED ? 0 : 128;
        float s[8];
        steps(v, of_row, s);
        uint32_t high[2] = {}, low[2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t code = min(max(rounded_int(__fmul_rn(s[i], 256.0f)), LEAST), MOST) + HALF;
            high[i / 4] |= ((code >> 8) & 0xffu) << (i % 4 * 8), low[i / 4] |= ((code & 0xffu) ^ HALF) << (i % 4 * 8);
        }
        out[0] = make_uint2(high[0], high[1]), out[1] = make_uint2(low[0], low[1]);
    }

private:
    __device__ __forceinline__ void steps(const float (&v)[8], const W8A8Inverses& of_row, float (&s)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = __fmul_rn(v[i], __float_as_int(factors[i]) < 0 ? of_row.large : of_row.rest);
    }
};

// Largest |v|'s bits of a row's segments, of a thread. Segment 1 has the top bit: above all as u32, below all as s32.
struct W8A8Largest {
    int rest = 0;
    uint32_t large = 0;

    __device__ __forceinline__ void add(const W8A8Octet& octet, const float (&v)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t bits = abs_bits(v[i]) | (__float_as_uint(octet.factors[i]) & 0x80000000u);
            rest = max(rest, static_cast<int>(bits)), large = max(large, bits);
        }
    }
    // bits: of several channels' largest, all of segment 1 or none.
    __device__ __forceinline__ void add(uint32_t bits, bool is_large) {
        if (is_large) {
            large = max(large, bits | 0x80000000u);
        } else {
            rest = max(rest, static_cast<int>(bits));
        }
    }
    __device__ __forceinline__ void reduce_warp() { rest = __reduce_max_sync(FULL_MASK, rest), large = __reduce_max_sync(FULL_MASK, large); }
    __device__ __forceinline__ uint32_t of_large() const { return large & 0x80000000u ? large & 0x7fffffffu : 0; }
};

// The same of a CTA.
struct W8A8Maxima {
    int rest[32];
    uint32_t large[32];

    __device__ __forceinline__ void add(W8A8Largest of_thread) {
        of_thread.reduce_warp();
        if ((threadIdx.x & 31) == 0) rest[threadIdx.x >> 5] = of_thread.rest, large[threadIdx.x >> 5] = of_thread.large;
    }
    // After a barrier. warps: those that added.
    __device__ __forceinline__ W8A8Largest of_row(int warps = blockDim.x >> 5) const {
        const int lane = threadIdx.x & 31;
        W8A8Largest largest;
        if (lane < warps) largest.rest = rest[lane], largest.large = large[lane];
        largest.reduce_warp();
        return largest;
    }
};

// Brings a row's codes from the order of channels to that of positions. p: a position below 128, once in a CTA.
__device__ __forceinline__ void swap_codes(uint8_t* row, int p, int partner) {
    const uint8_t a = row[p], b = row[partner];
    row[p] = b, row[partner] = a;
}
