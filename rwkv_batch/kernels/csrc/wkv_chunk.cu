// WKV of whole rows on tensor cores, 16 tokens at a time: one block per (head, row).
//
// Within a chunk let P_t be the product of the decays up to and with token t, and with kk, a, b as in naive.py:
//     A_t = P_{t-1} * a_t   R_t = P_t * r_t   B_t = b_t / P_t   K_t = k_t / P_t        (per key)
//     u_t = S A_t + sum_{s<t}  u_s (B_s.A_t) + v_s (K_s.A_t)                           S: the state at the chunk's start
//     y_t = S R_t + sum_{s<=t} u_s (B_s.R_t) + v_s (K_s.R_t)
//     S  <- (S + sum_s u_s B_s^T + v_s K_s^T) * P_last
// With T = (I - [B_s.A_t])^-1, a forward substitution in fp32, the sums over u go into operands that know nothing of S:
//     A' = T A   KA' = T [K_s.A_t]   R' = R + [B_s.R_t] A'   KR' = [K_s.R_t] + [B_s.R_t] KA'
//     u = S A'^T + V KA'^T   y = S R'^T + V KR'^T
//
// Four warps carry the state, and per chunk have only these two lines and the state's own left to do. Teams of four warps
// take turns in making the chunks' operands ahead of them, and in finishing y (group norm, bonus, gate) behind them. The
// products among operands take P relative to the chunk's middle, so that it stays within 0.545^8 .. 0.545^-8; what meets the
// state takes it relative to the chunk's start (A', R') or end (B, K), where it is at most 1.
//
// A warp of the state owns 16 values: their rows of S (fp32) are the accumulators of m16n8k16 (rows: values, columns: keys),
// and S and u turn from accumulators into left operands without leaving the registers. A team's operands A', R' are
// accumulators [key or s][token].
// Bytes: 9 x 128 per head and token, the state once in and out.
#include "coded_state.cuh"
#include "fragments.cuh"
#include "pair.cuh"
#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int TEAM = 128;                  // threads that carry the state, or make one chunk's operands
constexpr int LD = HEAD + 8;               // halves between rows of an operand: ldmatrix without conflicts
constexpr int LD_SMALL = CHUNK + 8;
constexpr int ROWS_TURNED = HEAD + CHUNK;  // of [A' KA']^T and [R' KR']^T
constexpr int PAIR_TOKENS = 64;            // of a row: fewer are not worth two blocks
constexpr int SHORT_TOKENS = 160;          // fewer: what a block begins and ends with weighs
constexpr float LOG2_E = 1.4426950409f;
constexpr uint32_t MINUS_INFINITY = 0xfc00fc00u;  // two fp16

// A chunk between a team and the state's warps.
struct __align__(16) Stage {
    __half a[ROWS_TURNED][LD_SMALL], r[ROWS_TURNED][LD_SMALL];  // [A' KA']^T, [R' KR']^T: [key, then s][t]
    __half b[CHUNK][LD], k[CHUNK][LD], v[CHUNK][LD];
    float decay[HEAD];  // of the whole chunk
};

// A team's own: the chunk that it is at.
struct __align__(16) Scratch {
    __half a[CHUNK][LD], r[CHUNK][LD];
    union {
        struct {
            __half b[CHUNK][LD], k[CHUNK][LD];
        };
        float y[CHUNK][HEAD + 4];  // what the state's warps leave
    };
    __half ka[CHUNK][LD_SMALL], br[CHUNK][LD_SMALL], kr[CHUNK][LD_SMALL];  // [t][s]
    __half inverse[CHUNK][LD_SMALL];                                       // T^T: [s][t]
    float ba[CHUNK][CHUNK + 4];
    float log_decay[4][HEAD];  // of a warp's 4 tokens
    float middle[HEAD];        // decay up to the chunk's middle
};

// What the elementwise part needs of each channel; the sigmoids' biases times -log2(e), 1 - k_a beside k_a.
struct __align__(16) Constants {
    float w0[HEAD], a0[HEAD], v0[HEAD], k_k[HEAD], k_a[HEAD], one_less_k_a[HEAD], r_k[HEAD], ln_weight[HEAD], ln_bias[HEAD];
};

// A chunk that a team of the other block of a pair made.
struct Guest {
    Stage stage;
    float y[CHUNK][HEAD + 4];
    uint64_t made;  // mbarrier: the stage is here
};

template <int TEAMS, bool PAIRED>
struct Shared {
    Stage stages[TEAMS];
    Scratch scratch[TEAMS];
    Constants constants;
    Guest guests[PAIRED ? TEAMS : 0];
    uint64_t used[PAIRED ? TEAMS : 0];  // mbarriers of the block without state: y is there
};

// Barriers by number: the block's; then each team's own; then, of each team's stage: it is made, it is used and y there.
constexpr int BLOCK_BARRIER = 0;
__device__ __forceinline__ int team_barrier(int team) { return 1 + team; }
template <int TEAMS>
__device__ __forceinline__ int made_barrier(int team) { return 1 + TEAMS + team; }
template <int TEAMS>
__device__ __forceinline__ int used_barrier(int team) { return 1 + 2 * TEAMS + team; }

__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void pass(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

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

// sigmoid(x + bias), the bias times -log2(e).
__device__ __forceinline__ float biased_sigmoid(float x, float bias) {
    return reciprocal(1.0f + exp2_fast(fmaf(x, -LOG2_E, bias)));
}

// Four neighbouring channels.
struct Four {
    float x[4];
};

__device__ __forceinline__ Four load_four(const float* p) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    return {{f.x, f.y, f.z, f.w}};
}
__device__ __forceinline__ void store_four(float* p, const Four& f) {
    *reinterpret_cast<float4*>(p) = make_float4(f.x[0], f.x[1], f.x[2], f.x[3]);
}
__device__ __forceinline__ Four unpack_four(uint2 packed) {
    Four f;
    unpack2(packed.x, f.x[0], f.x[1]);
    unpack2(packed.y, f.x[2], f.x[3]);
    return f;
}
__device__ __forceinline__ void put_four(__half* p, const Four& f) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2(f.x[0], f.x[1]), pack2(f.x[2], f.x[3]));
}
__device__ __forceinline__ uint32_t pack2_saturated(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
__device__ __forceinline__ void put_four_saturated(__half* p, const Four& f) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2_saturated(f.x[0], f.x[1]), pack2_saturated(f.x[2], f.x[3]));
}

// Sums of two tokens' values over the 16 lanes that share them; `upper`: whether this is one of the lanes 8 to 15 of those.
__device__ __forceinline__ float2 token_sums(float first, float second, bool upper) {
    float sum = (upper ? second : first) + __shfl_xor_sync(FULL, upper ? first : second, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL, sum, offset);
    const float other = __shfl_xor_sync(FULL, sum, 8);
    return upper ? make_float2(other, sum) : make_float2(sum, other);
}

// Where a thread of a team stands: 2 tokens of the chunk, 4 channels of the head.
struct Place {
    int warp, lane, token, channel;

    __device__ __forceinline__ explicit Place(int thread)
        : warp(thread >> 5),
          lane(thread & 31),
          token((thread >> 5) * 4 + ((thread >> 4) & 1) * 2),
          channel((thread & 15) * 4) {}
};

// A thread's 2 tokens as they lie in memory. Beyond a row's end: nothing, and a decay of 1.
struct Inputs {
    uint2 r[2], w[2], k[2], v[2], a[2], gate[2], first[2];

    // `left`: tokens of the row from this thread's first one on.
    __device__ __forceinline__ void load(const WkvArgs& p, int64_t from, int left) {
        int64_t bytes = 2 * from;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool there = i < left;
            const auto get = [&](const __half* x, uint32_t otherwise) {
                return there ? *reinterpret_cast<const uint2*>(reinterpret_cast<const char*>(x) + bytes)
                             : make_uint2(otherwise, otherwise);
            };
            r[i] = get(p.r, 0u), w[i] = get(p.w, MINUS_INFINITY), k[i] = get(p.k, 0u), v[i] = get(p.v, 0u), a[i] = get(p.a, 0u);
            gate[i] = get(p.v_gate, 0u), first[i] = get(p.v_first, 0u);
            bytes += 2 * p.heads * HEAD;
        }
    }
};

// What a thread keeps of a chunk until its y is there: 2 tokens' bonus times v.
struct Kept {
    Four bonus[2];
};

__device__ __forceinline__ void load_constants(const WkvArgs& p, int head, Constants& c) {
    if (threadIdx.x < HEAD) {
        const int i = threadIdx.x, channel = head * HEAD + i;
        c.w0[i] = -LOG2_E * p.w0[channel], c.a0[i] = -LOG2_E * p.a0[channel];
        c.v0[i] = -LOG2_E * p.v0[channel];
        c.k_k[i] = p.k_k[channel], c.k_a[i] = p.k_a[channel], c.one_less_k_a[i] = 1.0f - p.k_a[channel];
        c.r_k[i] = p.r_k[channel], c.ln_weight[i] = p.ln_weight[channel], c.ln_bias[i] = p.ln_bias[channel];
    }
}

// Step 1 of a team: the chunk's vectors as operands, in shared memory.
__device__ __forceinline__ void make_vectors(
    const Constants& c, const Inputs& in, Scratch& sh, Stage& out, Kept& kept, const Place& at, int barrier) {
    Four log_w[2], kk[2], rate[2], k[2];
    float square_parts[2] = {}, bonus_parts[2] = {};
    {
        const Four w0 = load_four(c.w0 + at.channel), a0 = load_four(c.a0 + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Four w = unpack_four(in.w[i]), a = unpack_four(in.a[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                log_w[i].x[j] = DECAY_SCALE * LOG2_E * biased_sigmoid(w.x[j], w0.x[j]);
                rate[i].x[j] = biased_sigmoid(a.x[j], a0.x[j]);
            }
        }
    }
    {
        const Four k_k = load_four(c.k_k + at.channel), k_a = load_four(c.k_a + at.channel);
        const Four one_less = load_four(c.one_less_k_a + at.channel), r_k = load_four(c.r_k + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Four r = unpack_four(in.r[i]), raw = unpack_four(in.k[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                kk[i].x[j] = raw.x[j] * k_k.x[j];
                k[i].x[j] = raw.x[j] * fmaf(rate[i].x[j], k_a.x[j], one_less.x[j]);
                square_parts[i] = fmaf(kk[i].x[j], kk[i].x[j], square_parts[i]);
                bonus_parts[i] = fmaf(r.x[j] * k[i].x[j], r_k.x[j], bonus_parts[i]);
            }
        }
    }
    {
        const Four v0 = load_four(c.v0 + at.channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Four v = unpack_four(in.v[i]), gate = unpack_four(in.gate[i]), first = unpack_four(in.first[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                kept.bonus[i].x[j] = fmaf(first.x[j] - v.x[j], biased_sigmoid(gate.x[j], v0.x[j]), v.x[j]);
            }
            put_four(&out.v[at.token + i][at.channel], kept.bonus[i]);
        }
    }
    const float2 squares = token_sums(square_parts[0], square_parts[1], at.lane & 8);
    const float2 bonus = token_sums(bonus_parts[0], bonus_parts[1], at.lane & 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) kept.bonus[0].x[j] *= bonus.x, kept.bonus[1].x[j] *= bonus.y;
    Four before;  // log of the decays of this warp's tokens before this thread's
    {
        Four total;
        const bool second = at.lane & 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float own = log_w[0].x[j] + log_w[1].x[j], other = __shfl_xor_sync(FULL, own, 16);
            total.x[j] = own + other;
            before.x[j] = second ? other : 0.0f;
        }
        if (!second) store_four(&sh.log_decay[at.warp][at.channel], total);
    }
    meet(barrier, TEAM);
    Four last;  // decay from the middle to the end
    {
        const Four t0 = load_four(&sh.log_decay[0][at.channel]), t1 = load_four(&sh.log_decay[1][at.channel]);
        const Four t2 = load_four(&sh.log_decay[2][at.channel]), t3 = load_four(&sh.log_decay[3][at.channel]);
        // the tokens between the middle and this warp's first one
        const float f0 = at.warp == 0 ? -1.0f : 0.0f, f1 = at.warp <= 1 ? -1.0f : 0.0f, f2 = at.warp == 3 ? 1.0f : 0.0f;
        Four middle, whole;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            before.x[j] = fmaf(f0, t0.x[j], fmaf(f1, t1.x[j], fmaf(f2, t2.x[j], before.x[j])));
            middle.x[j] = t0.x[j] + t1.x[j], last.x[j] = t2.x[j] + t3.x[j];
            whole.x[j] = middle.x[j] + last.x[j];
        }
        if (at.warp == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) middle.x[j] = exp2_fast(middle.x[j]), whole.x[j] = exp2_fast(whole.x[j]);
            store_four(&sh.middle[at.channel], middle);
            store_four(&out.decay[at.channel], whole);
        }
    }
    Four now;  // decay before the token, relative to the middle
#pragma unroll
    for (int j = 0; j < 4; ++j) now.x[j] = exp2_fast(before.x[j]), last.x[j] = exp2_fast(last.x[j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float n = rsqrt_fast(fmaxf(i == 0 ? squares.x : squares.y, 1e-24f));
        const Four r = unpack_four(in.r[i]);
        Four left_a, left_r, right_b, right_k, end_b, end_k;
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
        put_four(&sh.a[t][at.channel], left_a);
        put_four(&sh.r[t][at.channel], left_r);
        put_four(&sh.b[t][at.channel], right_b);
        put_four_saturated(&sh.k[t][at.channel], right_k);
        put_four(&out.b[t][at.channel], end_b);
        put_four_saturated(&out.k[t][at.channel], end_k);
    }
}

// T = (I - ba)^-1: lane s solves column s from the top down. Rows of ba are read ahead, and nothing is stored before all
// is solved, so that the chain is one of multiply-adds alone.
__device__ __forceinline__ void invert(Scratch& sh, int lane) {
    const int s = lane & 15;
    float column[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        float sums[4] = {t == s ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int m = 0; m < t; m += 4) {
            const float4 row = *reinterpret_cast<const float4*>(&sh.ba[t][m]);
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
            store16(&sh.inverse[s][t], part);
        }
    }
}

// Step 2: one of the four [t][s] products per warp, zero above the diagonal (and on it, for A); and T.
__device__ __forceinline__ void multiply_vectors(Scratch& sh, int part, int lane) {
    const __half* left = part < 2 ? &sh.a[0][0] : &sh.r[0][0];
    const __half* right = part & 1 ? &sh.k[0][0] : &sh.b[0][0];
    float c[2][4] = {};
#pragma unroll
    for (int at = 0; at < HEAD; at += 16) {
        const Fragment l = left_operand(left, LD, at, lane), m = right_operand(right, LD, at, lane);
        mma(c[0], l, m.x[0], m.x[1]);
        mma(c[1], l, m.x[2], m.x[3]);
    }
    const int g = lane >> 2, q = lane & 3, reach = part < 2 ? 0 : 1;
    __half* out = part == 1 ? &sh.ka[0][0] : part == 2 ? &sh.br[0][0] : &sh.kr[0][0];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int t = g + up * 8, s = n * 8 + 2 * q;
            const float lo = s < t + reach ? c[n][2 * up] : 0.0f, hi = s + 1 < t + reach ? c[n][2 * up + 1] : 0.0f;
            if (part == 0) {
                *reinterpret_cast<float2*>(&sh.ba[t][s]) = make_float2(lo, hi);
            } else {
                *reinterpret_cast<__half2*>(out + t * LD_SMALL + s) = __floats2half2_rn(lo, hi);
            }
        }
    }
    if (part == 0) {
        __syncwarp();
        invert(sh, lane);
    }
}

// 16 rows of [A' KA']^T and [R' KR']^T from those of [A KA]^T and [R KR]^T: rows `at` of a and r, times `scale`.
__device__ __forceinline__ void turn(
    const __half* a, const __half* r, int ld, int at, const Fragment& inverse, const Fragment& br, const float (&scale)[2],
    __half* a_out, __half* r_out, int lane) {
    float a_sums[2][4] = {}, r_sums[2][4];
    const Fragment left = left_operand_transposed(a, ld, at, lane);
    as_sums(left_operand_transposed(r, ld, at, lane), r_sums);
    mma(a_sums[0], left, inverse.x[0], inverse.x[1]);
    mma(a_sums[1], left, inverse.x[2], inverse.x[3]);
    const Fragment through = as_operand(a_sums[0], a_sums[1]);
    mma(r_sums[0], through, br.x[0], br.x[1]);
    mma(r_sums[1], through, br.x[2], br.x[3]);
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

// Step 3: the operands that meet the state; every warp for 16 keys, one for the chunk's own tokens too.
__device__ __forceinline__ void finish_operands(const Scratch& sh, Stage& out, const Place& at, bool tokens_too) {
    const Fragment inverse = right_operand_kn(&sh.inverse[0][0], LD_SMALL, 0, at.lane);
    const Fragment br = right_operand(&sh.br[0][0], LD_SMALL, 0, at.lane);
    const int keys = at.warp * 16;
    const float middle[2] = {sh.middle[keys + (at.lane >> 2)], sh.middle[keys + (at.lane >> 2) + 8]};
    turn(&sh.a[0][0], &sh.r[0][0], LD, keys, inverse, br, middle, out.a[keys], out.r[keys], at.lane);
    if (tokens_too) {
        const float as_is[2] = {1.0f, 1.0f};
        turn(&sh.ka[0][0], &sh.kr[0][0], LD_SMALL, 0, inverse, br, as_is, out.a[HEAD], out.r[HEAD], at.lane);
    }
}

// Group norm, bonus and gate of a thread's 2 tokens, from what the state's warps left.
__device__ __forceinline__ void finish_tokens(
    const WkvArgs& p, const Constants& c, const float (*from_state)[HEAD + 4], const Kept& kept, const uint2 (&gates)[2],
    int64_t from, int left, const Place& at) {
    Four y[2];
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        y[i] = load_four(&from_state[at.token + i][at.channel]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i] += y[i].x[j];
    }
    const float2 totals = token_sums(sums[0], sums[1], at.lane & 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float mean = (i == 0 ? totals.x : totals.y) * (1.0f / HEAD);
        sums[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) y[i].x[j] -= mean, sums[i] = fmaf(y[i].x[j], y[i].x[j], sums[i]);
    }
    const float2 squares = token_sums(sums[0], sums[1], at.lane & 8);
    const Four weight = load_four(c.ln_weight + at.channel), bias = load_four(c.ln_bias + at.channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float scale = rsqrt_fast((i == 0 ? squares.x : squares.y) * (1.0f / HEAD) + GROUP_NORM_EPS);
        const Four gate = unpack_four(gates[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            y[i].x[j] = (fmaf(y[i].x[j] * scale, weight.x[j], bias.x[j]) + kept.bonus[i].x[j]) * gate.x[j];
        }
        if (i < left) put_four(p.y + from, y[i]);
        from += p.heads * HEAD;
    }
}

// One chunk for this warp's 16 values: y into `out`, s to the chunk's end.
__device__ __forceinline__ void advance(
    const Stage& stage, float (&out)[CHUNK][HEAD + 4], float (&s)[8][4], int values, int lane) {
    const int g = lane >> 2, q = lane & 3;
    const Fragment v = left_operand_transposed(&stage.v[0][0], LD, values, lane);
    const Fragment own = right_operand_kn(stage.a[HEAD], LD_SMALL, 0, lane);
    Fragment state[4];
    float u[2][4] = {}, y[2][4] = {};
    mma(u[0], v, own.x[0], own.x[1]);
    mma(u[1], v, own.x[2], own.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        state[j] = as_operand(s[2 * j], s[2 * j + 1]);
        const Fragment a = right_operand_kn(stage.a[j * 16], LD_SMALL, 0, lane);
        mma(u[0], state[j], a.x[0], a.x[1]);
        mma(u[1], state[j], a.x[2], a.x[3]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 decay = *reinterpret_cast<const float2*>(&stage.decay[n * 8 + 2 * q]);
        s[n][0] *= decay.x, s[n][1] *= decay.y, s[n][2] *= decay.x, s[n][3] *= decay.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment k = right_operand_kn(&stage.k[0][0], LD, j * 16, lane);
        mma(s[2 * j], v, k.x[0], k.x[1]);
        mma(s[2 * j + 1], v, k.x[2], k.x[3]);
    }
    const Fragment solved = as_operand(u[0], u[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment b = right_operand_kn(&stage.b[0][0], LD, j * 16, lane);
        mma(s[2 * j], solved, b.x[0], b.x[1]);
        mma(s[2 * j + 1], solved, b.x[2], b.x[3]);
    }
    const Fragment own_r = right_operand_kn(stage.r[HEAD], LD_SMALL, 0, lane);
    mma(y[0], v, own_r.x[0], own_r.x[1]);
    mma(y[1], v, own_r.x[2], own_r.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment r = right_operand_kn(stage.r[j * 16], LD_SMALL, 0, lane);
        mma(y[0], state[j], r.x[0], r.x[1]);
        mma(y[1], state[j], r.x[2], r.x[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n * 8 + 2 * q + (i & 1)][values + g + (i >> 1) * 8] = y[n][i];
    }
}

// A warp's 16 values of a head in a slot, of 8 bits (1 byte), fp16 (2) or fp32, as its sums and back.
__device__ __forceinline__ void load_state(const void* head, int state_bytes, float (&s)[8][4], int warp, int lane) {
    const int first = warp * 16 + (lane >> 2);
    if (state_bytes == 1) {
        const auto& state = *static_cast<const CodedState*>(head);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const float scale = scale_of(state.scales[first + up * 8]);
            const auto* codes = reinterpret_cast<const char2*>(state.codes[first + up * 8]);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const char2 two = codes[n * 4 + (lane & 3)];
                s[n][2 * up] = two.x * scale, s[n][2 * up + 1] = two.y * scale;
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int at = (first + up * 8) * HEAD + n * 8 + 2 * (lane & 3);
            const auto* halves = reinterpret_cast<const __half2*>(static_cast<const __half*>(head) + at);
            const auto* floats = reinterpret_cast<const float2*>(static_cast<const float*>(head) + at);
            const float2 f = state_bytes == 2 ? __half22float2(*halves) : *floats;
            s[n][2 * up] = f.x, s[n][2 * up + 1] = f.y;
        }
    }
}

// `before`: what it was loaded from.
__device__ __forceinline__ void store_codes(
    CodedState& state, const CodedState& before, const float (&s)[8][4], int first, int lane) {
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        const int row = first + up * 8;
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) most = fmaxf(fmaxf(most, fabsf(s[n][2 * up])), fabsf(s[n][2 * up + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
        const Rescaled rescaled(most, 1.0f, scale_of(before.scales[row]));
        __syncwarp();
        if ((lane & 3) == 0) state.scales[row] = bits_of(rescaled.scale);
        const uint32_t seed = __float_as_uint(most) + __float_as_uint(s[0][2 * up]) * 0x9E3779B1u;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const uint32_t bytes = hashed(seed + (4 * lane + n / 2) * 0x3C6EF372u);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t lo = coded(s[n + i][2 * up], rescaled.ratio, threshold(bytes, 2 * i));
                const uint32_t hi = coded(s[n + i][2 * up + 1], rescaled.ratio, threshold(bytes, 2 * i + 1));
                auto* codes = reinterpret_cast<uint16_t*>(state.codes[row]);
                codes[(n + i) * 4 + (lane & 3)] = static_cast<uint16_t>(__byte_perm(lo, hi, 0x0051));
            }
        }
    }
}

__device__ __forceinline__ void store_state(
    void* head, const void* before, int state_bytes, const float (&s)[8][4], int warp, int lane) {
    const int first = warp * 16 + (lane >> 2);
    if (state_bytes == 1) {
        store_codes(*static_cast<CodedState*>(head), *static_cast<const CodedState*>(before), s, first, lane);
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int at = (first + up * 8) * HEAD + n * 8 + 2 * (lane & 3);
            const float lo = s[n][2 * up], hi = s[n][2 * up + 1];
            if (state_bytes == 2) {
                *reinterpret_cast<__half2*>(static_cast<__half*>(head) + at) = __floats2half2_rn(lo, hi);
            } else {
                *reinterpret_cast<float2*>(static_cast<float*>(head) + at) = make_float2(lo, hi);
            }
        }
    }
}

// A row's tokens.
struct Tokens {
    int64_t start;
    int count;

    __device__ __forceinline__ Tokens(const WkvArgs& p, int row)
        : start(p.cu_seqlens == nullptr ? row : p.cu_seqlens[row]),
          count(p.cu_seqlens == nullptr ? 1 : static_cast<int>(p.cu_seqlens[row + 1] - start)) {}
};

// The warps of the state.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void carry_state(
    const WkvArgs& p, int state_bytes, Shared<TEAMS, PAIRED>& sh, int head, int row) {
    constexpr int OWN = PAIRED ? TEAMS - 1 : TEAMS, ALL = PAIRED ? OWN + TEAMS : OWN;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const auto head_at = [&](int64_t slot) {
        const int64_t elements = state_bytes == 1 ? sizeof(CodedState) : HEAD * HEAD;
        return static_cast<char*>(p.state) + state_bytes * (slot * p.slot_stride + head * elements);
    };
    float s[8][4];
    load_state(head_at(p.read_slots[row]), state_bytes, s, warp, lane);
    const int count = Tokens(p, row).count;
    meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    int team = 0;
    uint32_t parity = 0;
    for (int done = 0; done < count; done += CHUNK) {
        if (!PAIRED || team < OWN) {
            meet(made_barrier<TEAMS>(team), 2 * TEAM);
            advance(sh.stages[team], sh.scratch[team].y, s, warp * 16, lane);
            pass(used_barrier<TEAMS>(team), 2 * TEAM);
        } else {
            Guest& guest = sh.guests[team - OWN];
            pair::wait(&guest.made, parity);
            advance(guest.stage, guest.y, s, warp * 16, lane);
            __syncwarp();
            if (lane == 0) pair::arrive_there(&sh.used[team - OWN], 1);
        }
        if (++team == ALL) team = 0, parity ^= 1;
    }
    store_state(head_at(p.write_slots[row]), head_at(p.read_slots[row]), state_bytes, s, warp, lane);
}

// A team of this block. `guest`: the other block has the state.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void make_chunks(
    const WkvArgs& p, Shared<TEAMS, PAIRED>& sh, int head, int row, int team, bool guest) {
    constexpr int STEP = CHUNK * (PAIRED ? 2 * TEAMS - 1 : TEAMS);
    const Place at(threadIdx.x & (TEAM - 1));
    const int part = (at.warp + team) & 3, barrier = team_barrier(team);  // T's warps of all teams on different schedulers
    Scratch& scratch = sh.scratch[team];
    Stage& stage = sh.stages[team];
    const Tokens tokens(p, row);
    const int width = p.heads * HEAD;
    const int64_t begin = tokens.start * width + head * HEAD;
    // Of the chunk that begins with this token of the row: tokens from this thread's first one on, and where that is.
    const auto left_at = [&](int chunk) { return tokens.count - chunk - at.token; };
    const auto from = [&](int chunk) { return begin + static_cast<int64_t>(chunk + at.token) * width + at.channel; };
    int chunk = (guest ? TEAMS - 1 + team : team) * CHUNK;
    Inputs in;
    if (chunk < tokens.count) in.load(p, from(chunk), left_at(chunk));
    meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    uint32_t parity = 0;
    for (; chunk < tokens.count; chunk += STEP) {
        Kept kept;
        make_vectors(sh.constants, in, scratch, stage, kept, at, barrier);
        meet(barrier, TEAM);
        if (chunk + STEP < tokens.count) in.load(p, from(chunk + STEP), left_at(chunk + STEP));
        multiply_vectors(scratch, part, at.lane);
        meet(barrier, TEAM);
        finish_operands(scratch, stage, at, part == 3);
        const float(*y)[HEAD + 4] = scratch.y;
        if (PAIRED && guest) {
            pair::let_copy();
            meet(barrier, TEAM);
            if ((threadIdx.x & (TEAM - 1)) == 0) pair::send(stage, &sh.guests[team].stage, &sh.guests[team].made, 0);
        } else {
            pass(made_barrier<TEAMS>(team), 2 * TEAM);
        }
        uint2 gates[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gates[i] = i < left_at(chunk) ? *reinterpret_cast<const uint2*>(p.g + from(chunk) + i * width) : make_uint2(0u, 0u);
        }
        if (PAIRED && guest) {
            pair::wait(&sh.used[team], parity);
            y = *pair::twin_pointer(&sh.guests[team].y, 0);
            parity ^= 1;
        } else {
            meet(used_barrier<TEAMS>(team), 2 * TEAM);
        }
        finish_tokens(p, sh.constants, y, kept, gates, from(chunk), left_at(chunk), at);
    }
}

// BLOCKS: how many of these a processor is to hold.
template <int TEAMS, int BLOCKS, bool PAIRED>
__global__ void __launch_bounds__((1 + TEAMS) * TEAM, BLOCKS) wkv_chunk_kernel(const WkvArgs p, int state_bytes) {
    extern __shared__ __align__(16) unsigned char bytes[];
    auto& sh = *reinterpret_cast<Shared<TEAMS, PAIRED>*>(bytes);
    const int rank = PAIRED ? pair::rank() : 0;
    const int head = PAIRED ? blockIdx.x >> 1 : blockIdx.x, row = blockIdx.y;
    const int team = __shfl_sync(FULL, static_cast<int>(threadIdx.x / TEAM), 0) - 1;  // so that it is known to be a warp's
    if (PAIRED) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < TEAMS; ++i) pair::init(&sh.guests[i].made, 1), pair::init(&sh.used[i], TEAM / 32);
            pair::publish();
        }
        __syncwarp();
        pair::meet_all();
    }
    let_next_start();
    wait_for_inputs();
    if (team < 0) {
        load_constants(p, head, sh.constants);
        if (rank == 0) {
            carry_state(p, state_bytes, sh, head, row);
        } else {
            meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
        }
    } else if (PAIRED && rank == 0 && team == TEAMS - 1) {
        meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    } else {
        make_chunks(p, sh, head, row, team, rank != 0);
    }
    if (PAIRED) {  // neither leaves while the other may reach for it
        __syncwarp();
        pair::meet_all();
    }
}

template <int TEAMS, int BLOCKS, bool PAIRED>
int launch_kernel(const WkvArgs& p, int state_bytes, void* stream) {
    const auto kernel = wkv_chunk_kernel<TEAMS, BLOCKS, PAIRED>;
    constexpr size_t shared_bytes = sizeof(Shared<TEAMS, PAIRED>);
    constexpr int THREADS = (1 + TEAMS) * TEAM;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[this_device()]) {
        const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    // Neither comes up before the kernel before has ended: blocks that come early pile up on the first free processors.
    if (!PAIRED) {
        launch_with_shared<Start::SPREAD>(kernel, dim3(p.heads, p.rows), THREADS, shared_bytes, stream, p, state_bytes);
    } else {
        cudaLaunchAttribute pairs = {};
        pairs.id = cudaLaunchAttributeClusterDimension;
        pairs.val.clusterDim.x = 2, pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(2 * p.heads, p.rows);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &pairs;
        config.numAttrs = 1;
        cudaLaunchKernelEx(&config, kernel, p, state_bytes);
    }
    return launch_result();
}

// Which of them runs changes who makes a chunk, and no bit of what comes out.
RWKV_API int rwkv_wkv_chunk(const WkvArgs* args, int state_bytes, int64_t tokens, void* stream) {
    WkvArgs p = *args;
    if (p.v_first == nullptr) p.v_first = p.v_gate = p.v, p.v0 = p.w0;  // the first layer: v + (v - v) * anything
    const Machine& machine = this_machine();
    const auto fits = [&](size_t bytes) { return bytes <= static_cast<size_t>(machine.shared_bytes); };
    const int64_t blocks = static_cast<int64_t>(p.heads) * p.rows, mean = tokens / p.rows;
    const bool clusters = machine.early_launch && fits(sizeof(Shared<3, true>));  // both came with sm_90
    if (clusters && 2 * blocks <= machine.processors && mean >= PAIR_TOKENS) {
        return launch_kernel<3, 1, true>(p, state_bytes, stream);
    }
    const bool one_behind_another = blocks > machine.processors && mean < SHORT_TOKENS;
    if (one_behind_another || !fits(sizeof(Shared<4, false>))) return launch_kernel<2, 2, false>(p, state_bytes, stream);
    return launch_kernel<4, 1, false>(p, state_bytes, stream);
}
