// One step of a head's state of 8 bits by a warp.
//
//   In units of a row's old scale, with c the codes:  t_j = c_j*w_j + sa*kka_j + (v / scale)*k_j,  sa = -sum_j c_j*kk_j
//   y = scale * sum_j c_j*w_j*r_j + sa*scale * sum_j kka_j*r_j + v * sum_j k_j*r_j  (nothing of it is rounded to codes)
//
// All products are the tensor cores'. The sums over keys are of codes as they lie in memory, kk and w*r as two digits of 8
// bits each (m16n8k32 of int8: exact). t is of halves (m16n8k8): w on the diagonal, codes as 1152 + c (1024 is what a byte
// becomes a half by; 1152 * w is taken off again), and the two products of rank 1. That w is rounded at random, as codes
// are: rounded to nearest, what decays slowly would be off by the same part in every step.
#pragma once

#include "coded_state.cuh"
#include "fragments.cuh"
#include "wkv_rows.cuh"

constexpr float DIGITS = 127 * 256;          // largest number of two digits
constexpr float FORGOTTEN = 16384.0f;        // v*k in old codes beyond which nothing is left of a row
constexpr uint32_t CODE_BIAS = 0x80808080u;  // of four codes

// What the lanes of a warp share of a token. Keys in the order of the right operands: key 16*T + 2*u + e at 16*T + 8*e + u.
struct CodedVectors {
    uint32_t added[HEAD];  // kka and k, of their largest, as halves
    uint32_t unused[4];    // so that what the lanes of a quad read lies in different banks
    uint32_t decay[HEAD];  // w as a half, then 0
    uint32_t unused_too[4];
    int8_t digits[4][HEAD];  // of kk, the high ones first, and of w*r
    float rows[2][HEAD];     // v*k's factor in old codes, then what kk removes of y; what is read of the state. As coded_row
};

// Lane 4g + t holds keys 16t .. of rows 8g .., the i-th of them here: an odd g has pairs of rows exchanged, so that a quarter
// warp's 16-byte pieces lie in different banks.
__device__ __forceinline__ int coded_row(int g, int i) { return 8 * g + (i ^ (g & 1)); }

__device__ __forceinline__ float2 exchanged(float2 pair, bool exchange) {
    return exchange ? make_float2(pair.y, pair.x) : pair;
}

struct CodedScalars {
    float bonus;
    float2 v;
    float largest_k;
    float removed;                      // factor of the sums with kk's digits: what kka is added by, in old codes
    float y_removed, y_read, y_value;  // factors of the sums of digits, and of v: y, the first two in old codes
};

__device__ __forceinline__ float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(x)));
}

// x and z, two keys, as two digits of `scale` times them.
__device__ __forceinline__ void put_digits(int8_t (*to)[HEAD], int pair, float scale, float x, float z) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: low bits become the integer
    const uint32_t lo = __float_as_uint(fmaf(x, scale, ROUND)), hi = __float_as_uint(fmaf(z, scale, ROUND));
    *reinterpret_cast<uint16_t*>(&to[0][pair]) = static_cast<uint16_t>(__byte_perm(lo + 128, hi + 128, 0x0051));
    *reinterpret_cast<uint16_t*>(&to[1][pair]) = static_cast<uint16_t>(__byte_perm(lo, hi, 0x0040));
}

// The sums over a warp of four numbers.
__device__ __forceinline__ float4 warp_sums(float4 x, int lane) {
    const bool upper = lane & 16, later = lane & 8;
    const float one = (upper ? x.z : x.x) + __shfl_xor_sync(FULL, upper ? x.x : x.z, 16);
    const float two = (upper ? x.w : x.y) + __shfl_xor_sync(FULL, upper ? x.y : x.w, 16);
    float sum = (later ? two : one) + __shfl_xor_sync(FULL, later ? one : two, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL, sum, offset);
    return make_float4(__shfl_sync(FULL, sum, 0), __shfl_sync(FULL, sum, 8), __shfl_sync(FULL, sum, 16),
                       __shfl_sync(FULL, sum, 24));
}

// A positive number, up or down to one that a half holds by `chance`, of which 13 bits count.
__device__ __forceinline__ float cut_to_half(float x, uint32_t chance) {
    return __uint_as_float((__float_as_uint(x) + (chance & 0x1FFF)) & 0xFFFFE000u);
}

// Leaves the vectors in shared memory.
__device__ __forceinline__ CodedScalars prologue(
    const HeadParams& h, const Inputs& in, bool residual, CodedVectors& vectors, int pair) {
    const float2 r = __half22float2(in.r), w = __half22float2(in.w), k = __half22float2(in.k), v = __half22float2(in.v);
    const float2 a = __half22float2(in.a), gate = __half22float2(in.gate), first = __half22float2(in.first);
    const StepVectors x = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x,
                                       h.k_k.x, h.k_a.x, h.r_k.x);
    const StepVectors z = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y,
                                       h.k_k.y, h.k_a.y, h.r_k.y);
    const float read_x = x.decay * x.r, read_z = z.decay * z.r;
    const float most_kk = fmaxf(warp_max(fmaxf(fabsf(x.kk), fabsf(z.kk))), SMALLEST);
    const float most_read = fmaxf(warp_max(fmaxf(fabsf(read_x), fabsf(read_z))), SMALLEST);
    const float most_k = fmaxf(warp_max(fmaxf(fabsf(x.k), fabsf(z.k))), SMALLEST);
    const float inv_kk = reciprocal(most_kk), inv_k = reciprocal(most_k);
    put_digits(vectors.digits, pair, DIGITS * inv_kk, x.kk, z.kk);
    put_digits(vectors.digits + 2, pair, DIGITS * reciprocal(most_read), read_x, read_z);
    const int lane = pair >> 1, at = (lane >> 3) * 16 + (lane & 7);
    vectors.added[at] = pack2(x.kka * inv_kk, x.k * inv_k);
    vectors.added[at + 8] = pack2(z.kka * inv_kk, z.k * inv_k);
    const uint32_t chance = hashed(__float_as_uint(read_x) + __float_as_uint(x.kk) * 0x9E3779B1u + lane * 0x3C6EF372u);
    const uint32_t decay = pack2(cut_to_half(x.decay, chance), cut_to_half(z.decay, chance >> 16));
    vectors.decay[at] = decay & 0xFFFF;
    vectors.decay[at + 8] = decay >> 16;
    const float4 sums = warp_sums(make_float4(x.kk * x.kk + z.kk * z.kk, x.bonus + z.bonus, x.kka * x.r + z.kka * z.r,
                                              x.k * x.r + z.k * z.r), lane);
    const float removed = -most_kk * inverse_square(sums.x) * (1.0f / DIGITS);
    CodedScalars out;
    out.bonus = sums.y;
    out.v = make_float2(x.v, z.v);
    out.largest_k = most_k;
    out.removed = removed * most_kk;
    out.y_removed = removed * sums.z;
    out.y_read = most_read * (1.0f / DIGITS);
    out.y_value = sums.w;
    return out;
}

// Products of digits: m16n8k32.
__device__ __forceinline__ void mma_codes(
    int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// As mma, of 8 inputs.
__device__ __forceinline__ void mma_short(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ uint32_t component(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One step of a head's state in shared memory: y [64] of a lane's two value rows. Whole warps.
__device__ __forceinline__ float2 coded_step(CodedState& state, CodedVectors& vectors, const CodedScalars& s, int lane) {
    // In a register, for all that the compiler knows: an instruction has room for one constant, and that is the selector.
    const uint32_t halves = 0x64646464u | __float_as_uint(s.y_read) >> 31;
    const int g = lane >> 2, t = lane & 3;
    const bool odd = g & 1;
    // Two rows a lane: in old codes, what v*k is added by.
    const uint32_t both_scales = *reinterpret_cast<const uint32_t*>(&state.scales[2 * lane]);
    float2 scale = make_float2(__uint_as_float(both_scales << 16), __uint_as_float(both_scales & 0xFFFF0000u));
    float2 value = make_float2(s.v.x * s.largest_k, s.v.y * s.largest_k);
    const bool forgets[2] = {fabsf(value.x) > FORGOTTEN * scale.x, fabsf(value.y) > FORGOTTEN * scale.y};
    if (__any_sync(FULL, forgets[0] || forgets[1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!forgets[i]) continue;
            float& mine = i == 0 ? scale.x : scale.y;
            const uint32_t rounded = __float_as_uint(fabsf(i == 0 ? value.x : value.y) * (1.0f / 64.0f)) + 0xFFFFu;
            mine = __uint_as_float(rounded & 0xFFFF0000u);
            state.scales[2 * lane + i] = static_cast<uint16_t>(rounded >> 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) store16(&state.codes[2 * lane + i][16 * j], make_uint4(0, 0, 0, 0));
        }
    }
    value.x *= reciprocal(fmaxf(scale.x, SMALLEST)), value.y *= reciprocal(fmaxf(scale.y, SMALLEST));
    *reinterpret_cast<float2*>(&vectors.rows[0][2 * lane]) = exchanged(value, odd);
    __syncwarp();

    const int8_t* const digits = &vectors.digits[g >> 1][16 * t + 4 * (g & 1)];
    const uint32_t digits_lo = *reinterpret_cast<const uint32_t*>(digits);
    const uint32_t digits_hi = *reinterpret_cast<const uint32_t*>(digits + 8);
    const float digit = t & 1 ? 1.0f : 256.0f, y_factor = t < 2 ? s.y_removed : s.y_read;
    uint32_t added[8], kept[8];
    {
        const uint32_t* from = (t & 1 ? vectors.decay : vectors.added) + 8 * g;
        const uint4 first = load16(from), second = load16(from + 4);
        const uint4 w_first = load16(vectors.decay + 8 * g), w_second = load16(vectors.decay + 8 * g + 4);
        // On the diagonal: in the lane that holds this key among the inputs, in its half; 0 elsewhere.
        const bool diagonal = t == g >> 1;
        const uint32_t put = !diagonal ? 0x4444 : odd ? 0x1044 : 0x4410;
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            added[u] = component(u < 4 ? first : second, u & 3);
            kept[u] = __byte_perm(component(u < 4 ? w_first : w_second, u & 3), 0, put);
        }
    }
    const uint32_t others = t == 1 ? 0xE480u : 0u;  // -1152: takes off 1152 * w
    float thresholds[16];
    int8_t* const codes_of[2] = {&state.codes[coded_row(g, 0)][16 * t], &state.codes[coded_row(g, 1)][16 * t]};
    uint16_t* const own_scales = &state.scales[coded_row(g, t & 1)];
    float* const row_of = &vectors.rows[t >> 1][8 * g];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint4 codes[2] = {load16(codes_of[0] + 2 * HEAD * m), load16(codes_of[1] + 2 * HEAD * m)};
        // Of a row's keys one word in two is a row of the left operand. Columns 2t, 2t + 1: these and the others.
        float sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int products[4] = {};
            mma_codes(products, codes[i], digits_lo, digits_hi);
            sums[i] = static_cast<float>(products[0] + products[3]) * digit;
            sums[i] += __shfl_xor_sync(FULL, sums[i], 1);
        }
        const float2 values = *reinterpret_cast<const float2*>(row_of + 2 * m);  // of t = 0
        const uint32_t first = t == 0 ? pack2(sums[0] * s.removed, values.x) : others;
        const uint32_t second = t == 0 ? pack2(sums[1] * s.removed, values.y) : others;
        if ((t & 1) == 0)
            *reinterpret_cast<float2*>(row_of + 2 * m) = make_float2(sums[0] * y_factor, sums[1] * y_factor);
        if (m == 0) {
            // What is read with kk, and with w*r: either may be 0, as of a state that is 0.
            const uint32_t own = __float_as_uint(sums[0]) + __float_as_uint(sums[1]) * 0x9E3779B1u + __float_as_uint(s.bonus);
            const uint32_t seed = own + __shfl_xor_sync(FULL, own, 2) + static_cast<uint32_t>(lane) * 0x3C6EF372u;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t bytes = hashed(seed + i * 0x1B873593u);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    thresholds[4 * i + j] = threshold(bytes, j);
            }
        }
        float next[8][4];
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            const uint32_t pick = u & 1 ? 0x4342 : 0x4140;
            const uint32_t a0 = __byte_perm(component(codes[0], u >> 1) ^ CODE_BIAS, halves, pick);
            const uint32_t a1 = __byte_perm(component(codes[1], u >> 1) ^ CODE_BIAS, halves, pick);
#pragma unroll
            for (int i = 0; i < 4; ++i) next[u][i] = 0.0f;
            mma_short(next[u], first, second, added[u]);
            mma_short(next[u], a0, a1, kept[u]);
        }
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(fabsf(next[0][2 * i]), fabsf(next[0][2 * i + 1]));
#pragma unroll
            for (int u = 1; u < 8; ++u)
                most[i] = fmaxf(fmaxf(most[i], fabsf(next[u][2 * i])), fabsf(next[u][2 * i + 1]));
        }
        // An odd lane goes on with the second row, an even one with the first.
        float mine = t & 1 ? most[1] : most[0];
        mine = fmaxf(mine, __shfl_xor_sync(FULL, t & 1 ? most[0] : most[1], 1));
        mine = fmaxf(mine, __shfl_xor_sync(FULL, mine, 2));
        uint16_t& own_scale = own_scales[2 * m];
        const Rescaled rescaled(mine, scale_of(own_scale), 1.0f);
        __syncwarp();
        if (t < 2) own_scale = bits_of(rescaled.scale);
        const float other = __shfl_xor_sync(FULL, rescaled.ratio, 1);
        const float ratios[2] = {t & 1 ? other : rescaled.ratio, t & 1 ? rescaled.ratio : other};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t x[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int key = 4 * j + e;
                    const float at = thresholds[(key + 2 * (2 * m + i)) % 16];
                    x[e] = coded(next[key >> 1][2 * i + (key & 1)], ratios[i], at);
                }
                packed[j] = __byte_perm(__byte_perm(x[0], x[1], 0x0051), __byte_perm(x[2], x[3], 0x0051), 0x5410);
            }
            store16(codes_of[i] + 2 * HEAD * m, make_uint4(packed[0], packed[1], packed[2], packed[3]));
        }
    }
    __syncwarp();
    const float2 removed = *reinterpret_cast<const float2*>(&vectors.rows[0][2 * lane]);
    const float2 read = *reinterpret_cast<const float2*>(&vectors.rows[1][2 * lane]);
    const float2 sum = exchanged(make_float2(removed.x + read.x, removed.y + read.y), odd);
    return make_float2(fmaf(sum.x, scale.x, s.v.x * s.y_value), fmaf(sum.y, scale.y, s.v.y * s.y_value));
}
