// A team's work on a chunk in wkv_chunk.cu: operands in steps 1 to 3, then the epilogue of y.
#pragma once

#include "../mma.cuh"
#include "wkv_chunk_smem.cuh"

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rsqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sigmoid(x + bias); bias is given times -log2(e).
__device__ __forceinline__ float biased_sigmoid(float x, float bias) {
    return reciprocal(1.0f + exp2_fast(fmaf(x, -LOG2_E, bias)));
}

// Four adjacent channels.
struct Float4 {
    float x[4];
};

__device__ __forceinline__ Float4 load_float4(const float* p) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    return {{f.x, f.y, f.z, f.w}};
}
__device__ __forceinline__ void store_float4(float* p, const Float4& f) {
    *reinterpret_cast<float4*>(p) = make_float4(f.x[0], f.x[1], f.x[2], f.x[3]);
}
__device__ __forceinline__ Float4 unpack_half4(uint2 packed) {
    Float4 f;
    unpack2(packed.x, f.x[0], f.x[1]);
    unpack2(packed.y, f.x[2], f.x[3]);
    return f;
}
__device__ __forceinline__ void store_half4(__half* p, const Float4& f) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2(f.x[0], f.x[1]), pack2(f.x[2], f.x[3]));
}
__device__ __forceinline__ uint32_t pack2_saturated(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
__device__ __forceinline__ void store_half4_saturated(__half* p, const Float4& f) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2_saturated(f.x[0], f.x[1]), pack2_saturated(f.x[2], f.x[3]));
}

// Sums two tokens' values over the 16 lanes that share them. upper: whether this is one of lanes 8 to 15 of those.
__device__ __forceinline__ float2 token_sums(float first, float second, bool upper) {
    float sum = (upper ? second : first) + __shfl_xor_sync(FULL_MASK, upper ? first : second, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, offset);
    const float other = __shfl_xor_sync(FULL_MASK, sum, 8);
    return upper ? make_float2(other, sum) : make_float2(sum, other);
}

// A team thread's position: 2 tokens of the chunk, 4 channels of the head.
struct ThreadPosition {
    int warp, lane, token, channel;

    __device__ __forceinline__ explicit ThreadPosition(int thread)
        : warp(thread >> 5),
          lane(thread & 31),
          token((thread >> 5) * 4 + ((thread >> 4) & 1) * 2),
          channel((thread & 15) * 4) {}
};

// A thread's 2 tokens as stored. Past the row's end: zeros, and a decay of 1.
struct Inputs {
    uint2 r[2], w[2], k[2], v[2], a[2], gate[2], first[2];

    // left: tokens of the row from this thread's first one on.
    __device__ __forceinline__ void load(const WkvArgs& p, int64_t from, int left) {
        int64_t bytes = 2 * from;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool in_row = i < left;
            const auto get = [&](const __half* x, uint32_t padding) {
                return in_row ? *reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(x) + bytes)
                             : make_uint2(padding, padding);
            };
            r[i] = get(p.r, 0u), w[i] = get(p.w, MINUS_INFINITY), k[i] = get(p.k, 0u), v[i] = get(p.v, 0u), a[i] = get(p.a, 0u);
            gate[i] = get(p.v_gate, 0u), first[i] = get(p.v_first, 0u);
            bytes += 2 * p.heads * HEAD_SIZE;
        }
    }
};

// Bonus times v of a thread's 2 tokens, kept until y is there.
struct PendingBonus {
    Float4 bonus[2];
};

__device__ __forceinline__ void load_constants(const WkvArgs& p, int head, Constants& c) {
    if (threadIdx.x < HEAD_SIZE) {
        const int i = threadIdx.x, channel = head * HEAD_SIZE + i;
        c.w0[i] = -LOG2_E * p.w0[channel], c.a0[i] = -LOG2_E * p.a0[channel];
        c.v0[i] = -LOG2_E * p.v0[channel];
        c.k_k[i] = p.k_k[channel], c.k_a[i] = p.k_a[channel], c.one_less_k_a[i] = 1.0f - p.k_a[channel];
        c.r_k[i] = p.r_k[channel], c.ln_weight[i] = p.ln_weight[channel], c.ln_bias[i] = p.ln_bias[channel];
    }
}

// Step 1: the chunk's vectors as operands in shared memory.
__device__ __forceinline__ void make_vectors(
    const Constants& c, const Inputs& in, TeamScratch& smem, ChunkOperands& out, PendingBonus& kept, const ThreadPosition& at, int barrier) {
    Float4 log_w[2], kk[2], rate[2], k[2];
    float square_partials[2] = {}, bonus_partials[2] = {};
    {
        const Float4 w0 = load_float4(c.w0 + at.channel), a0 = load_float4(c.a0 + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Float4 w = unpack_half4(in.w[i]), a = unpack_half4(in.a[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                log_w[i].x[j] = DECAY_SCALE * LOG2_E * biased_sigmoid(w.x[j], w0.x[j]);
                rate[i].x[j] = biased_sigmoid(a.x[j], a0.x[j]);
            }
        }
    }
    {
        const Float4 k_k = load_float4(c.k_k + at.channel), k_a = load_float4(c.k_a + at.channel);
        const Float4 one_less = load_float4(c.one_less_k_a + at.channel), r_k = load_float4(c.r_k + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Float4 r = unpack_half4(in.r[i]), raw = unpack_half4(in.k[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                kk[i].x[j] = raw.x[j] * k_k.x[j];
                k[i].x[j] = raw.x[j] * fmaf(rate[i].x[j], k_a.x[j], one_less.x[j]);
                square_partials[i] = fmaf(kk[i].x[j], kk[i].x[j], square_partials[i]);
                bonus_partials[i] = fmaf(r.x[j] * k[i].x[j], r_k.x[j], bonus_partials[i]);
            }
        }
    }
    {
        const Float4 v0 = load_float4(c.v0 + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Float4 v = unpack_half4(in.v[i]), gate = unpack_half4(in.gate[i]), first = unpack_half4(in.first[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                kept.bonus[i].x[j] = fmaf(first.x[j] - v.x[j], biased_sigmoid(gate.x[j], v0.x[j]), v.x[j]);
            }
            store_half4(&out.v[at.token + i][at.channel], kept.bonus[i]);
        }
    }
    const float2 squares = token_sums(square_partials[0], square_partials[1], at.lane & 8);
    const float2 bonus = token_sums(bonus_partials[0], bonus_partials[1], at.lane & 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) kept.bonus[0].x[j] *= bonus.x, kept.bonus[1].x[j] *= bonus.y;
    Float4 before;  // log decay of this warp's tokens before this thread's
    {
        Float4 total;
        const bool second = at.lane & 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float own = log_w[0].x[j] + log_w[1].x[j], other = __shfl_xor_sync(FULL_MASK, own, 16);
            total.x[j] = own + other;
            before.x[j] = second ? other : 0.0f;
        }
        if (!second) store_float4(&smem.log_decay[at.warp][at.channel], total);
    }
    barrier_sync(barrier, TEAM);
    Float4 last;  // decay from the middle to the chunk's end
    {
        const Float4 t0 = load_float4(&smem.log_decay[0][at.channel]), t1 = load_float4(&smem.log_decay[1][at.channel]);
        const Float4 t2 = load_float4(&smem.log_decay[2][at.channel]), t3 = load_float4(&smem.log_decay[3][at.channel]);
        // the tokens between the middle and this warp's first one
        const float f0 = at.warp == 0 ? -1.0f : 0.0f, f1 = at.warp <= 1 ? -1.0f : 0.0f, f2 = at.warp == 3 ? 1.0f : 0.0f;
        Float4 middle, whole;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            before.x[j] = fmaf(f0, t0.x[j], fmaf(f1, t1.x[j], fmaf(f2, t2.x[j], before.x[j])));
            middle.x[j] = t0.x[j] + t1.x[j], last.x[j] = t2.x[j] + t3.x[j];
            whole.x[j] = middle.x[j] + last.x[j];
        }
        if (at.warp == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) middle.x[j] = exp2_fast(middle.x[j]), whole.x[j] = exp2_fast(whole.x[j]);
            store_float4(&smem.middle[at.channel], middle);
            store_float4(&out.decay[at.channel], whole);
        }
    }
    Float4 now;  // decay before the token, relative to the middle
#pragma unroll
    for (int j = 0; j < 4; ++j) now.x[j] = exp2_fast(before.x[j]), last.x[j] = exp2_fast(last.x[j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float n = rsqrt_fast(fmaxf(i == 0 ? squares.x : squares.y, 1e-24f));
        const Float4 r = unpack_half4(in.r[i]);
        Float4 left_a, left_r, right_b, right_k, end_b, end_k;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float unit = kk[i].x[j] * n;
            left_a.x[j] = -unit * now.x[j];
            before.x[j] += log_w[i].x[j];
            now.x[j] = exp2_fast(before.x[j]);
            const float up = exp2_fast(-before.x[j]);
            left_r.x[j] = r.x[j] * now.x[j];
            right_b.x[j] = unit * rate[i].x[j] * up;
            right_k.x[j] = k[i].x[j] * up;
            end_b.x[j] = right_b.x[j] * last.x[j];
            end_k.x[j] = right_k.x[j] * last.x[j];
        }
        const int t = at.token + i;
        store_half4(&smem.a[t][at.channel], left_a);
        store_half4(&smem.r[t][at.channel], left_r);
        store_half4(&smem.b[t][at.channel], right_b);
        store_half4_saturated(&smem.k[t][at.channel], right_k);
        store_half4(&out.b[t][at.channel], end_b);
        store_half4_saturated(&out.k[t][at.channel], end_k);
    }
}

// T = (I - ba)^-1: lane s solves column s top down. Rows of ba are prefetched and nothing is stored until the end, so
// that the dependency chain is multiply-adds only.
__device__ __forceinline__ void invert(TeamScratch& smem, int lane) {
    const int s = lane & 15;
    float column[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        float sums[4] = {t == s ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int m = 0; m < t; m += 4) {
            const float4 row = *reinterpret_cast<const float4*>(&smem.ba[t][m]);
            sums[0] = fmaf(row.x, column[m], sums[0]);
            if (m + 1 < t) sums[1] = fmaf(row.y, column[m + 1], sums[1]);
            if (m + 2 < t) sums[2] = fmaf(row.z, column[m + 2], sums[2]);
            if (m + 3 < t) sums[3] = fmaf(row.w, column[m + 3], sums[3]);
        }
        column[t] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    if (lane < 16) {
#pragma unroll
        for (int t = 0; t < CHUNK; t += 8) {
            const uint4 part = make_uint4(pack2(column[t], column[t + 1]), pack2(column[t + 2], column[t + 3]),
                                          pack2(column[t + 4], column[t + 5]), pack2(column[t + 6], column[t + 7]));
            store16(&smem.inverse[s][t], part);
        }
    }
}

// Step 2: each warp computes one of the four [t][s] products, zero above the diagonal (for A also on it); then T.
__device__ __forceinline__ void multiply_vectors(TeamScratch& smem, int product, int lane) {
    const __half* left = product < 2 ? &smem.a[0][0] : &smem.r[0][0];
    const __half* right = product & 1 ? &smem.k[0][0] : &smem.b[0][0];
    float c[2][4] = {};
#pragma unroll
    for (int at = 0; at < HEAD_SIZE; at += 16) {
        const Fragment l = left_operand(left, LD, at, lane), m = right_operand(right, LD, at, lane);
        mma(c[0], l, m.x[0], m.x[1]);
        mma(c[1], l, m.x[2], m.x[3]);
    }
    const int g = lane >> 2, q = lane & 3, reach = product < 2 ? 0 : 1;
    __half* out = product == 1 ? &smem.ka[0][0] : product == 2 ? &smem.br[0][0] : &smem.kr[0][0];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int t = g + up * 8, s = n * 8 + 2 * q;
            const float lo = s < t + reach ? c[n][2 * up] : 0.0f, hi = s + 1 < t + reach ? c[n][2 * up + 1] : 0.0f;
            if (product == 0) {
                *reinterpret_cast<float2*>(&smem.ba[t][s]) = make_float2(lo, hi);
            } else {
                *reinterpret_cast<__half2*>(out + t * LD_SMALL + s) = __floats2half2_rn(lo, hi);
            }
        }
    }
    if (product == 0) {
        __syncwarp();
        invert(smem, lane);
    }
}

// Computes 16 rows of [A' KA']^T and [R' KR']^T from rows `at` of a and r, times `scale`.
__device__ __forceinline__ void apply_inverse(
    const __half* a, const __half* r, int ld, int at, const Fragment& inverse, const Fragment& br, const float (&scale)[2],
    __half* a_out, __half* r_out, int lane) {
    float a_sums[2][4] = {}, r_sums[2][4];
    const Fragment left = left_operand_transposed(a, ld, at, lane);
    as_accumulators(left_operand_transposed(r, ld, at, lane), r_sums);
    mma(a_sums[0], left, inverse.x[0], inverse.x[1]);
    mma(a_sums[1], left, inverse.x[2], inverse.x[3]);
    const Fragment a_operand = as_operand(a_sums[0], a_sums[1]);
    mma(r_sums[0], a_operand, br.x[0], br.x[1]);
    mma(r_sums[1], a_operand, br.x[2], br.x[3]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int to = ((lane >> 2) + up * 8) * LD_SMALL + n * 8 + 2 * (lane & 3);
            *reinterpret_cast<uint32_t*>(a_out + to) = pack2(a_sums[n][2 * up] * scale[up], a_sums[n][2 * up + 1] * scale[up]);
            *reinterpret_cast<uint32_t*>(r_out + to) = pack2(r_sums[n][2 * up] * scale[up], r_sums[n][2 * up + 1] * scale[up]);
        }
    }
}

// Step 3: the operands that meet the state, 16 keys per warp. The warp with has_token_part also computes KA' and KR'.
__device__ __forceinline__ void finish_operands(const TeamScratch& smem, ChunkOperands& out, const ThreadPosition& at, bool has_token_part) {
    const Fragment inverse = right_operand_kn(&smem.inverse[0][0], LD_SMALL, 0, at.lane);
    const Fragment br = right_operand(&smem.br[0][0], LD_SMALL, 0, at.lane);
    const int keys = at.warp * 16;
    const float middle[2] = {smem.middle[keys + (at.lane >> 2)], smem.middle[keys + (at.lane >> 2) + 8]};
    apply_inverse(&smem.a[0][0], &smem.r[0][0], LD, keys, inverse, br, middle, out.a[keys], out.r[keys], at.lane);
    if (has_token_part) {
        const float as_is[2] = {1.0f, 1.0f};
        apply_inverse(&smem.ka[0][0], &smem.kr[0][0], LD_SMALL, 0, inverse, br, as_is, out.a[HEAD_SIZE], out.r[HEAD_SIZE], at.lane);
    }
}

// Epilogue of a thread's 2 tokens: group norm, bonus, gate.
__device__ __forceinline__ void finish_tokens(
    const WkvArgs& p, const Constants& c, const float (*from_state)[HEAD_SIZE + 4], const PendingBonus& kept, const uint2 (&gates)[2],
    int64_t from, int left, const ThreadPosition& at) {
    Float4 y[2];
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        y[i] = load_float4(&from_state[at.token + i][at.channel]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i] += y[i].x[j];
    }
    const float2 totals = token_sums(sums[0], sums[1], at.lane & 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float mean = (i == 0 ? totals.x : totals.y) * (1.0f / HEAD_SIZE);
        sums[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) y[i].x[j] -= mean, sums[i] = fmaf(y[i].x[j], y[i].x[j], sums[i]);
    }
    const float2 squares = token_sums(sums[0], sums[1], at.lane & 8);
    const Float4 weight = load_float4(c.ln_weight + at.channel), bias = load_float4(c.ln_bias + at.channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float scale = rsqrt_fast((i == 0 ? squares.x : squares.y) * (1.0f / HEAD_SIZE) + GROUP_NORM_EPS);
        const Float4 gate = unpack_half4(gates[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            y[i].x[j] = (fmaf(y[i].x[j] * scale, weight.x[j], bias.x[j]) + kept.bonus[i].x[j]) * gate.x[j];
        }
        if (i < left) store_half4(p.y + from, y[i]);
        from += p.heads * HEAD_SIZE;
    }
}
