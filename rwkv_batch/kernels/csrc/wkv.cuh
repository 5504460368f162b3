// What the two WKV kernels (one token per row; whole rows) share: inputs, one head's state in registers, one step.
//
//   S[i value, j key]:  sa_i = sum_j S_ij * (-kk_j);  S_ij = S_ij*w_j + sa_i*(kk_j*a_j) + v_i*k_j;  y_i = sum_j S_ij*r_j
//
// A thread holds ROWS value rows x 16 keys of one head; the 4 threads of a quad hold the 64 keys of a row.
// kk enters unnormalised: with kk = raw / n, sa_i * kk_j * a_j = -(sum_j S_ij*raw_j) * n^-2 * (raw_j*a_j), so that
// n (one number per head) need not be known before the vectors are shared.
#pragma once

#include "common.cuh"

struct WkvArgs {
    // [T, C] fp16 each, as the linear maps left them; v_gate and v_first null in layer 0
    const __half* r;
    const __half* w;
    const __half* k;
    const __half* v;
    const __half* a;
    const __half* g;
    const __half* v_gate;
    const __half* v_first;
    // [C] fp32 each
    const float* w0;
    const float* a0;
    const float* v0;
    const float* k_k;
    const float* k_a;
    const float* r_k;
    const float* ln_weight;
    const float* ln_bias;
    __half* y;    // [T, C] fp16
    void* state;  // [slots, H, 64, 64] fp32 or fp16, strided over slots
    const int64_t* cu_seqlens;  // [B+1], null: every row is one token
    const int64_t* read_slots;
    const int64_t* write_slots;
    int64_t slot_stride;  // elements between slots
    int rows;
    int heads;
};

// Two neighbouring channels of the per-channel constants: what one lane of a warp over a head needs.
struct HeadParams {
    float2 w0, a0, v0, k_k, k_a, r_k;

    __device__ __forceinline__ HeadParams(const WkvArgs& p, int channel) {
        const auto at = [&](const float* x) { return *reinterpret_cast<const float2*>(x + channel); };
        w0 = at(p.w0), a0 = at(p.a0), k_k = at(p.k_k), k_a = at(p.k_a), r_k = at(p.r_k);
        v0 = p.v_first == nullptr ? make_float2(0.0f, 0.0f) : at(p.v0);
    }
};

// One channel's inputs turned into what the recurrence wants.
struct StepVectors {
    float r, decay, kk, kka, k, v, bonus;
};

__device__ __forceinline__ StepVectors step_vectors(
    float r, float w, float k, float v, float a, float gate, float v_first, bool residual, float w0, float a0,
    float v0, float k_k, float k_a, float r_k) {
    StepVectors out;
    const float rate = sigmoidf(a0 + a);
    out.r = r;
    out.decay = __expf(DECAY_SCALE * sigmoidf(w0 + w));
    out.kk = k * k_k;
    out.kka = out.kk * rate;
    out.k = k * (1.0f + (rate - 1.0f) * k_a);
    out.v = residual ? v + (v_first - v) * sigmoidf(v0 + gate) : v;
    out.bonus = r * out.k * r_k;
    return out;
}

// n^-2 of max(|kk|, 1e-12), from the sum of squares.
__device__ __forceinline__ float inverse_square(float squares) { return reciprocal(fmaxf(squares, 1e-24f)); }

// Which 16 of the 64 keys thread q of a quad holds: pieces of 16 bytes, so that a quad reads 64 contiguous bytes.
template <typename State>
struct Keys {
    static constexpr int PIECE = 16 / sizeof(State);  // elements per access: 4 (fp32) or 8 (fp16)
    static constexpr int PIECES = 16 / PIECE;
    __device__ static __forceinline__ int at(int q, int piece) { return piece * 4 * PIECE + q * PIECE; }
};

// A thread's 16 keys of one value row as they lie in memory.
template <typename State>
struct RawKeys {
    uint4 pieces[Keys<State>::PIECES];

    __device__ __forceinline__ void load(const State* row, int q) {
#pragma unroll
        for (int p = 0; p < Keys<State>::PIECES; ++p) pieces[p] = load16(row + Keys<State>::at(q, p));
    }

    __device__ __forceinline__ void unpack(float (&s)[16]) const {
#pragma unroll
        for (int p = 0; p < Keys<State>::PIECES; ++p) {
            if constexpr (sizeof(State) == 2) {
                float f[8];
                unpack8(pieces[p], f);
#pragma unroll
                for (int i = 0; i < 8; ++i) s[p * 8 + i] = f[i];
            } else {
                const float* f = reinterpret_cast<const float*>(&pieces[p]);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[p * 4 + i] = f[i];
            }
        }
    }
};

template <typename State>
__device__ __forceinline__ void load_keys(const State* row, int q, float (&s)[16]) {
    RawKeys<State> raw;
    raw.load(row, q);
    raw.unpack(s);
}

template <typename State>
__device__ __forceinline__ void store_keys(State* row, int q, const float (&s)[16]) {
    using K = Keys<State>;
#pragma unroll
    for (int p = 0; p < K::PIECES; ++p) {
        uint4 raw;
        if constexpr (sizeof(State) == 2) {
            float f[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) f[i] = s[p * 8 + i];
            raw = pack8(f);
        } else {
            float* f = reinterpret_cast<float*>(&raw);
#pragma unroll
            for (int i = 0; i < 4; ++i) f[i] = s[p * 4 + i];
        }
        store16(row + K::at(q, p), raw);
    }
}

// This thread's 16 of the 64 floats of a vector in shared memory.
template <typename State>
__device__ __forceinline__ void read_keys(const float* vector, int q, float (&out)[16]) {
    using K = Keys<State>;
#pragma unroll
    for (int p = 0; p < K::PIECES; ++p) {
#pragma unroll
        for (int i = 0; i < K::PIECE; i += 4) {
            const float4 f = *reinterpret_cast<const float4*>(vector + K::at(q, p) + i);
            const int o = p * K::PIECE + i;
            out[o] = f.x, out[o + 1] = f.y, out[o + 2] = f.z, out[o + 3] = f.w;
        }
    }
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

__device__ __forceinline__ float dot16(const float (&a)[16], const float (&b)[16]) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i & 3] = fmaf(a[i], b[i], sum[i & 3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Vectors of one token in shared memory, [64] fp32 each.
struct TokenVectors {
    const float *r, *decay, *kk, *kka, *k, *v;
};

// One step of ROWS value rows (first_row, first_row + row_step, ...); y of all of them goes to `y`.
template <typename State, int ROWS>
__device__ __forceinline__ void wkv_step(
    float (&s)[ROWS][16], const TokenVectors& t, float inv_square, int q, int first_row, int row_step, float* y) {
    float sa[ROWS];
    {
        float kk[16];
        read_keys<State>(t.kk, q, kk);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) sa[m] = -quad_sum(dot16(s[m], kk)) * inv_square;
    }
    {
        float decay[16], kka[16], k[16];
        read_keys<State>(t.decay, q, decay);
        read_keys<State>(t.kka, q, kka);
        read_keys<State>(t.k, q, k);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float v = t.v[first_row + m * row_step];
#pragma unroll
            for (int j = 0; j < 16; ++j) s[m][j] = fmaf(s[m][j], decay[j], fmaf(sa[m], kka[j], v * k[j]));
        }
    }
    float r[16];
    read_keys<State>(t.r, q, r);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const float sum = quad_sum(dot16(s[m], r));
        if (q == 0) y[first_row + m * row_step] = sum;
    }
}

// Group norm, bonus and gate of one token for two channels of a lane; the whole warp takes part.
__device__ __forceinline__ float2 wkv_epilogue(float2 y, float bonus, float2 v, float2 g, float2 weight, float2 bias) {
    const float mean = warp_sum(y.x + y.y) * (1.0f / HEAD);
    const float dx = y.x - mean, dy = y.y - mean;
    const float scale = rsqrtf(warp_sum(dx * dx + dy * dy) * (1.0f / HEAD) + GROUP_NORM_EPS);
    return make_float2((dx * scale * weight.x + bias.x + bonus * v.x) * g.x,
                       (dy * scale * weight.y + bias.y + bonus * v.y) * g.y);
}
