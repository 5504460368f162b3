// One recurrence step of an int8 head state by a warp.
//
//   In units of a row's old scale, with codes c:
//   t_j = c_j * w_j + sa * kka_j + (v / scale) * k_j          sa = -sum_j c_j * kk_j
//   y   = scale * sum_j c_j * w_j * r_j + sa * scale * sum_j kka_j * r_j + v * sum_j k_j * r_j
// y uses t before it is rounded to codes.
//
// Tensor cores compute all products. Sums over keys: codes as stored, kk and w * r as two 8-bit digits (m16n8k32 s8,
// exact). t: fp16 (m16n8k8), w on a diagonal, codes as 1152 + c (1152 * w is subtracted again), and two rank-1
// products. w is rounded to fp16 stochastically, like the codes. Nearest rounding would repeat the same error at every
// step.
#pragma once

#include "int8_state.cuh"
#include "../mma.cuh"
#include "wkv_decode_vectors.cuh"

constexpr float DIGITS = 127 * 256;  // maximum of two digits
constexpr float FORGOTTEN = 16384.0f;  // v * k in old units beyond which the old row no longer counts
constexpr uint32_t CODE_BIAS = 0x80808080u;  // offset of four codes

// A token's vectors in shared memory. Key order of the right operands: key 16*T + 2*u + e lies at 16*T + 8*e + u.
struct Int8Vectors {
    uint32_t update[HEAD_SIZE];  // kka and k relative to their maxima, fp16
    uint32_t padding[4];  // so that a quad's lanes read different banks
    uint32_t decay[HEAD_SIZE];  // w as fp16, then 0
    uint32_t padding_2[4];
    int8_t digits[4][HEAD_SIZE];  // of kk (high, low), then of w * r
    float rows[2][HEAD_SIZE];  // per row (int8_row): v * k's factor in old units, then kk's part of y; the state's part of y
};

// Lane 4g + t holds keys 16t .. of rows 8g ..; returns its i-th row. Odd g exchange pairs of rows, so that the 16-byte
// pieces of a quarter warp lie in different banks.
__device__ __forceinline__ int int8_row(int g, int i) { return 8 * g + (i ^ (g & 1)); }

__device__ __forceinline__ float2 exchanged(float2 pair, bool exchange) {
    return exchange ? make_float2(pair.y, pair.x) : pair;
}

struct Int8Factors {
    float bonus;
    float removal;  // of the kk sums: how much kka is added, in old units
    float y_removal, y_read;  // of digit sums in y, in old units
};
struct Int8Scalars : Int8Factors {
    float2 v;
    float largest_k;
    float y_value;  // factor of v in y
};

__device__ __forceinline__ float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(x)));
}

// Stores two keys as two digits of `scale` times them.
__device__ __forceinline__ void store_digits(int8_t (*to)[HEAD_SIZE], int pair, float scale, float x, float z) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: the low mantissa bits become the integer
    const uint32_t lo = __float_as_uint(fmaf(x, scale, ROUND)), hi = __float_as_uint(fmaf(z, scale, ROUND));
    *reinterpret_cast<uint16_t*>(&to[0][pair]) = static_cast<uint16_t>(__byte_perm(lo + 128, hi + 128, 0x0051));
    *reinterpret_cast<uint16_t*>(&to[1][pair]) = static_cast<uint16_t>(__byte_perm(lo, hi, 0x0040));
}

// Four warp sums at once.
__device__ __forceinline__ float4 warp_sums(float4 x, int lane) {
    const bool upper = lane & 16, later = lane & 8;
    const float one = (upper ? x.z : x.x) + __shfl_xor_sync(FULL_MASK, upper ? x.x : x.z, 16);
    const float two = (upper ? x.w : x.y) + __shfl_xor_sync(FULL_MASK, upper ? x.y : x.w, 16);
    float sum = (later ? two : one) + __shfl_xor_sync(FULL_MASK, later ? one : two, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, offset);
    return make_float4(__shfl_sync(FULL_MASK, sum, 0), __shfl_sync(FULL_MASK, sum, 8), __shfl_sync(FULL_MASK, sum, 16),
                       __shfl_sync(FULL_MASK, sum, 24));
}

// Rounds a positive number up or down to fp16; 13 bits of `random` decide.
__device__ __forceinline__ float round_to_half_randomly(float x, uint32_t random) {
    return __uint_as_float((__float_as_uint(x) + (random & 0x1FFF)) & 0xFFFFE000u);
}

// Stores the vectors in shared memory.
__device__ __forceinline__ Int8Scalars prologue(
    const HeadParams& h, const Inputs& in, bool residual, Int8Vectors& vectors, int pair) {
    const float2 r = __half22float2(in.r), w = __half22float2(in.w), k = __half22float2(in.k), v = __half22float2(in.v);
    const float2 a = __half22float2(in.a), gate = __half22float2(in.gate), first = __half22float2(in.first);
    const StepVectors x = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x,
                                       h.k_k.x, h.k_a.x, h.r_k.x);
    const StepVectors z = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y,
                                       h.k_k.y, h.k_a.y, h.r_k.y);
    const float read_x = __fmul_rn(x.decay, x.r), read_z = __fmul_rn(z.decay, z.r);
    const float most_kk = fmaxf(warp_max(fmaxf(fabsf(x.kk), fabsf(z.kk))), MIN_SCALE);
    const float most_read = fmaxf(warp_max(fmaxf(fabsf(read_x), fabsf(read_z))), MIN_SCALE);
    const float most_k = fmaxf(warp_max(fmaxf(fabsf(x.k), fabsf(z.k))), MIN_SCALE);
    const float inv_kk = reciprocal(most_kk), inv_k = reciprocal(most_k);
    store_digits(vectors.digits, pair, DIGITS * inv_kk, x.kk, z.kk);
    store_digits(vectors.digits + 2, pair, DIGITS * reciprocal(most_read), read_x, read_z);
    const int lane = pair >> 1, at = (lane >> 3) * 16 + (lane & 7);
    vectors.update[at] = pack2(x.kka * inv_kk, x.k * inv_k);
    vectors.update[at + 8] = pack2(z.kka * inv_kk, z.k * inv_k);
    const uint32_t random = hash_bits(__float_as_uint(read_x) + __float_as_uint(x.kk) * 0x9E3779B1u + lane * 0x3C6EF372u);
    const uint32_t decay = pack2(round_to_half_randomly(x.decay, random), round_to_half_randomly(z.decay, random >> 16));
    vectors.decay[at] = decay & 0xFFFF;
    vectors.decay[at + 8] = decay >> 16;
    const float4 sums = warp_sums(make_float4(sum_of_products(x.kk, x.kk, z.kk, z.kk), __fadd_rn(x.bonus, z.bonus),
                                              sum_of_products(x.kka, x.r, z.kka, z.r), sum_of_products(x.k, x.r, z.k, z.r)), lane);
    const float removal = -most_kk * inverse_square(sums.x) * (1.0f / DIGITS);
    Int8Scalars out;
    out.bonus = sums.y;
    out.v = make_float2(x.v, z.v);
    out.largest_k = most_k;
    out.removal = removal * most_kk;
    out.y_removal = removal * sums.z;
    out.y_read = most_read * (1.0f / DIGITS);
    out.y_value = sums.w;
    return out;
}

// mma with k = 8.
__device__ __forceinline__ void mma_k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ uint32_t component(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Begins a step of a head's state in shared memory: forgets rows. Returns the old scales of the lane's two value rows.
// Warp-wide, as all parts of a step.
__device__ __forceinline__ float2 begin_int8_step(Int8State& state, Int8Vectors& vectors, const Int8Scalars& s, int lane) {
    const bool odd = lane & 4;
    // Two rows per lane: v * k in old units.
    const uint32_t both_scales = *reinterpret_cast<const uint32_t*>(&state.scales[2 * lane]);
    float2 scale = make_float2(__uint_as_float(both_scales << 16), __uint_as_float(both_scales & 0xFFFF0000u));
    float2 value = make_float2(s.v.x * s.largest_k, s.v.y * s.largest_k);
    const bool forgets[2] = {fabsf(value.x) > FORGOTTEN * scale.x, fabsf(value.y) > FORGOTTEN * scale.y};
    if (__any_sync(FULL_MASK, forgets[0] || forgets[1])) {
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
    value.x *= reciprocal(fmaxf(scale.x, MIN_SCALE)), value.y *= reciprocal(fmaxf(scale.y, MIN_SCALE));
    *reinterpret_cast<float2*>(&vectors.rows[0][2 * lane]) = exchanged(value, odd);
    return scale;
}

// Steps COUNT quarters of the value rows and stores them in `to`: all 4, or the one `only`, of one warp of four.
template <int COUNT>
__device__ __forceinline__ void int8_step_rows(Int8State& state, Int8State& to, Int8Vectors& vectors, const Int8Factors& s, int lane, int only) {
    // Opaque to nvcc, so that it stays in a register: the instruction's one immediate is the selector.
    const uint32_t halves = 0x64646464u | __float_as_uint(s.y_read) >> 31;
    const int g = lane >> 2, t = lane & 3;
    const bool odd = g & 1;
    const int8_t* const digits = &vectors.digits[g >> 1][16 * t + 4 * (g & 1)];
    const uint32_t digits_lo = *reinterpret_cast<const uint32_t*>(digits);
    const uint32_t digits_hi = *reinterpret_cast<const uint32_t*>(digits + 8);
    const float digit = t & 1 ? 1.0f : 256.0f, y_factor = t < 2 ? s.y_removal : s.y_read;
    uint32_t update[8], diagonal_decay[8];
    {
        const uint32_t* from = (t & 1 ? vectors.decay : vectors.update) + 8 * g;
        const uint4 first = load16(from), second = load16(from + 4);
        const uint4 w_first = load16(vectors.decay + 8 * g), w_second = load16(vectors.decay + 8 * g + 4);
        // On the diagonal: the lane that has this key among its inputs puts it into its half; 0 elsewhere.
        const bool diagonal = t == g >> 1;
        const uint32_t put = !diagonal ? 0x4444 : odd ? 0x1044 : 0x4410;
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            update[u] = component(u < 4 ? first : second, u & 3);
            diagonal_decay[u] = __byte_perm(component(u < 4 ? w_first : w_second, u & 3), 0, put);
        }
    }
    const uint32_t correction = t == 1 ? 0xE480u : 0u;  // -1152: subtracts 1152 * w
    float thresholds[16];
    float* const row_of = &vectors.rows[t >> 1][8 * g];
    const auto load_codes = [&](uint4 (&codes)[2], int m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes[i] = load16(&state.codes[int8_row(g, i) + 2 * m][16 * t]);
    };
    // Every other word of a row's keys is a row of the left operand. Columns 2t, 2t + 1: these words and the others.
    const auto sum_digits = [&](float (&sums)[2], const uint4 (&codes)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int products[4] = {};
            mma_s8(products, codes[i], digits_lo, digits_hi);
            sums[i] = static_cast<float>(products[0] + products[3]) * digit;
            sums[i] += __shfl_xor_sync(FULL_MASK, sums[i], 1);
        }
    };
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        const int m = COUNT == 4 ? n : only, turn = COUNT == 4 ? 0 : m;
        uint4 codes[2];
        float sums[2];
        load_codes(codes, m);
        sum_digits(sums, codes);
        const float2 values = *reinterpret_cast<const float2*>(row_of + 2 * m);  // used by t == 0
        const uint32_t first = t == 0 ? pack2(sums[0] * s.removal, values.x) : correction;
        const uint32_t second = t == 0 ? pack2(sums[1] * s.removal, values.y) : correction;
        if ((t & 1) == 0)
            *reinterpret_cast<float2*>(row_of + 2 * m) = make_float2(sums[0] * y_factor, sums[1] * y_factor);
        if (n == 0) {
            // Seed from the first rows' sums with kk and with w * r: either may be 0, for a zero state.
            float seeds[2] = {sums[0], sums[1]};
            if constexpr (COUNT == 1) {
                uint4 first_codes[2];
                load_codes(first_codes, 0);
                sum_digits(seeds, first_codes);
            }
            const uint32_t own = __float_as_uint(seeds[0]) + __float_as_uint(seeds[1]) * 0x9E3779B1u + __float_as_uint(s.bonus);
            const uint32_t seed = own + __shfl_xor_sync(FULL_MASK, own, 2) + static_cast<uint32_t>(lane) * 0x3C6EF372u;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t bytes = hash_bits(seed + (i + turn) % 4 * 0x1B873593u);
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
            mma_k8(next[u], first, second, update[u]);
            mma_k8(next[u], a0, a1, diagonal_decay[u]);
        }
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(fabsf(next[0][2 * i]), fabsf(next[0][2 * i + 1]));
#pragma unroll
            for (int u = 1; u < 8; ++u)
                most[i] = fmaxf(fmaxf(most[i], fabsf(next[u][2 * i])), fabsf(next[u][2 * i + 1]));
        }
        // Odd lanes continue with the second row, even ones with the first.
        float mine = t & 1 ? most[1] : most[0];
        mine = fmaxf(mine, __shfl_xor_sync(FULL_MASK, t & 1 ? most[0] : most[1], 1));
        mine = fmaxf(mine, __shfl_xor_sync(FULL_MASK, mine, 2));
        const int own_row = int8_row(g, t & 1) + 2 * m;
        const Rescaled rescaled(mine, scale_of(state.scales[own_row]), 1.0f);
        __syncwarp();
        if (t < 2) to.scales[own_row] = bits_of(rescaled.scale);
        const float other = __shfl_xor_sync(FULL_MASK, rescaled.ratio, 1);
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
                    const float at = thresholds[(key + 2 * (2 * (m - turn) + i)) % 16];
                    x[e] = quantise_state(next[key >> 1][2 * i + (key & 1)], ratios[i], at);
                }
                packed[j] = __byte_perm(__byte_perm(x[0], x[1], 0x0051), __byte_perm(x[2], x[3], 0x0051), 0x5410);
            }
            store16(&to.codes[int8_row(g, i) + 2 * m][16 * t], make_uint4(packed[0], packed[1], packed[2], packed[3]));
        }
    }
}

// Returns y of the lane's two value rows.
__device__ __forceinline__ float2 end_int8_step(const Int8Vectors& vectors, const Int8Scalars& s, const float2& scale, int lane) {
    const bool odd = lane & 4;
    const float2 removal = *reinterpret_cast<const float2*>(&vectors.rows[0][2 * lane]);
    const float2 read = *reinterpret_cast<const float2*>(&vectors.rows[1][2 * lane]);
    const float2 sum = exchanged(make_float2(removal.x + read.x, removal.y + read.y), odd);
    return make_float2(fmaf(sum.x, scale.x, s.v.x * s.y_value), fmaf(sum.y, scale.y, s.v.y * s.y_value));
}

// One step of a head's state in shared memory by one warp. Returns y of the lane's two value rows.
__device__ __forceinline__ float2 int8_step(Int8State& state, Int8Vectors& vectors, const Int8Scalars& s, int lane) {
    const float2 scale = begin_int8_step(state, vectors, s, lane);
    __syncwarp();
    int8_step_rows<4>(state, state, vectors, s, lane, 0);
    __syncwarp();
    return end_int8_step(vectors, s, scale, lane);
}
