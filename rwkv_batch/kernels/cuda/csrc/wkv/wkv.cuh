// Shared by the WKV kernels: arguments, prologue, epilogue, and one step of a head's state by a warp.
//
//   sa_i  = sum_j S_ij * (-kk_j)
//   S_ij  = S_ij * w_j + sa_i * (kk_j * a_j) + v_i * k_j      i: value, j: key
//   y_i   = sum_j S_ij * r_j
//
// Value rows are independent. A lane has ROWS value rows, 4 apart, and 8 keys of each; the 8 lanes of an octet have a
// row's 64 keys, so that a warp reads contiguous rows.
// kk stays unnormalised: with kk = raw / n, sa_i * kk_j * a_j = -(sum_j S_ij * raw_j) * n^-2 * (raw_j * a_j). So the
// head's norm n is not needed before the vectors are in shared memory.
#pragma once

#include "../common.cuh"
#include "../continues.cuh"
#include "../rows_two_part.cuh"

struct WkvArgs {
    // [T, C] fp16 each; v_gate and v_first null in layer 0
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
    uint8_t* y_two_part;  // two-part output [T, 2, C] e5m2, decode only; or null
    void* state;  // [slots, H, 64, 64] fp32 or fp16, or Int8State per head; strided over slots
    const int64_t* cu_seqlens;  // [rows + 1]; null: one token per row
    const int64_t* read_slots;  // CONTINUES: the state after the row before, in the kernels of prompts
    const int64_t* write_slots;
    int64_t slot_stride;  // in elements; int8: bytes
    int rows;
    int heads;
    int continuing;  // rows that continue others, as far as the host knows; it changes no bit
};

// Whether a row continues the row before it. The CTA of the first row runs them all.
__device__ __forceinline__ bool continues(const WkvArgs& p, int row) { return row < p.rows && p.read_slots[row] == CONTINUES; }

// A lane's two adjacent channels of the constants.
struct HeadParams {
    float2 w0, a0, v0, k_k, k_a, r_k;

    __device__ __forceinline__ HeadParams() {}
    __device__ __forceinline__ HeadParams(const WkvArgs& p, int channel) {
        const auto at = [&](const float* x) { return *reinterpret_cast<const float2*>(x + channel); };
        w0 = at(p.w0), a0 = at(p.a0), k_k = at(p.k_k), k_a = at(p.k_a), r_k = at(p.r_k);
        v0 = p.v_first == nullptr ? make_float2(0.0f, 0.0f) : at(p.v0);
    }
};

// e^x in two instructions; 0 below 2^-126.
__device__ __forceinline__ float fast_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950409f));
    return y;
}
__device__ __forceinline__ float fast_sigmoid(float x) { return reciprocal(1.0f + fast_exp(-x)); }

// The recurrence's inputs of one channel.
struct StepVectors {
    float r, decay, kk, kka, k, v, bonus;
};

__device__ __forceinline__ StepVectors step_vectors(
    float r, float w, float k, float v, float a, float gate, float v_first, bool residual, float w0, float a0,
    float v0, float k_k, float k_a, float r_k) {
    StepVectors out;
    const float rate = fast_sigmoid(a0 + a);
    out.r = r;
    out.decay = fast_exp(DECAY_SCALE * fast_sigmoid(w0 + w));
    out.kk = k * k_k;
    out.kka = out.kk * rate;
    out.k = k * (1.0f + (rate - 1.0f) * k_a);
    out.v = residual ? v + (v_first - v) * fast_sigmoid(v0 + gate) : v;
    out.bonus = r * out.k * r_k;
    return out;
}

// Returns 1 / max(|kk|, 1e-12)^2 from the sum of squares.
__device__ __forceinline__ float inverse_square(float squares) { return reciprocal(fmaxf(squares, 1e-24f)); }

constexpr int ROW_STEP = 4;  // stride of a lane's value rows
constexpr int KEYS = 8;  // per lane

// Which 8 of the 64 keys lane q of an octet has: 16-byte pieces, so that an octet reads 128 contiguous bytes.
template <typename State>
struct Keys {
    static constexpr int PIECE = 16 / sizeof(State);  // 4 (fp32) or 8 (fp16)
    static constexpr int PIECES = KEYS / PIECE;
    __device__ static __forceinline__ int at(int q, int piece) { return piece * 8 * PIECE + q * PIECE; }
};

// A lane's keys of one value row, as stored.
template <typename State>
struct RawKeys {
    uint4 pieces[Keys<State>::PIECES];

    __device__ __forceinline__ void unpack(float (&s)[KEYS]) const {
        if constexpr (sizeof(State) == 2) {
            unpack8(pieces[0], s);
        } else {
#pragma unroll
            for (int i = 0; i < KEYS; ++i) s[i] = reinterpret_cast<const float*>(pieces)[i];
        }
    }
};

template <typename State>
__device__ __forceinline__ void store_keys(State* row, int q, const float (&s)[KEYS]) {
    if constexpr (sizeof(State) == 2) {
        store16(row + Keys<State>::at(q, 0), pack8(s));
    } else {
        *reinterpret_cast<float4*>(row + Keys<State>::at(q, 0)) = make_float4(s[0], s[1], s[2], s[3]);
        *reinterpret_cast<float4*>(row + Keys<State>::at(q, 1)) = make_float4(s[4], s[5], s[6], s[7]);
    }
}

// Reads this lane's 8 keys of a vector [64] in shared memory.
template <typename State>
__device__ __forceinline__ void read_keys(const float* vector, int q, float (&out)[KEYS]) {
    constexpr int second = sizeof(State) == 2 ? 4 : 32;
    const float* at = vector + Keys<State>::at(q, 0);
    const float4 lo = *reinterpret_cast<const float4*>(at), hi = *reinterpret_cast<const float4*>(at + second);
    out[0] = lo.x, out[1] = lo.y, out[2] = lo.z, out[3] = lo.w;
    out[4] = hi.x, out[5] = hi.y, out[6] = hi.z, out[7] = hi.w;
}

__device__ __forceinline__ float octet_sum(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, 1);
    x += __shfl_xor_sync(FULL_MASK, x, 2);
    return x + __shfl_xor_sync(FULL_MASK, x, 4);
}

__device__ __forceinline__ float dot(const float (&a)[KEYS], const float (&b)[KEYS]) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < KEYS; ++i) sum[i & 1] = fmaf(a[i], b[i], sum[i & 1]);
    return sum[0] + sum[1];
}

// A lane's keys of one token's vectors; kk includes the factor -n^-2.
struct KeyVectors {
    float r[KEYS], decay[KEYS], kk[KEYS], kka[KEYS], k[KEYS];
};

// A lane's keys of ROWS value rows, 4 apart.
template <typename State, int ROWS>
struct RawRows {
    RawKeys<State> rows[ROWS];

    __device__ __forceinline__ void load(const State* state, int q) {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
#pragma unroll
            for (int i = 0; i < Keys<State>::PIECES; ++i)
                rows[m].pieces[i] = load16(state + m * ROW_STEP * HEAD_SIZE + Keys<State>::at(q, i));
        }
    }
};

// The new state of a lane's ROWS value rows. `v` points to its first row.
template <int ROWS>
__device__ __forceinline__ void update_rows(float (&s)[ROWS][KEYS], const KeyVectors& t, const float (&sa)[ROWS], const float* v) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const float value = v[m * ROW_STEP];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) s[m][j] = fmaf(s[m][j], t.decay[j], fmaf(sa[m], t.kka[j], value * t.k[j]));
    }
}

// Four octet sums at once by exchanging halves, in three stages: lane q ends with that of row 2 * (q / 4) + q / 2 % 2.
struct OctetSums {
    float lo, hi;

    __device__ __forceinline__ void add_4(const float* part, int q) {
        const bool upper = q & 4;
        lo = (upper ? part[2] : part[0]) + __shfl_xor_sync(FULL_MASK, upper ? part[0] : part[2], 4);
        hi = (upper ? part[3] : part[1]) + __shfl_xor_sync(FULL_MASK, upper ? part[1] : part[3], 4);
    }
    __device__ __forceinline__ void add_2(int q) {
        const bool odd = q & 2;
        lo = (odd ? hi : lo) + __shfl_xor_sync(FULL_MASK, odd ? lo : hi, 2);
    }
    __device__ __forceinline__ float add_1() const { return lo + __shfl_xor_sync(FULL_MASK, lo, 1); }
    __device__ static __forceinline__ int row(int q) { return (q & 4 ? 2 : 0) + (q & 2 ? 1 : 0); }
};

// y of ROWS value rows, a multiple of 4. `y` points to the first one.
template <int ROWS>
__device__ __forceinline__ void read_rows(const float (&s)[ROWS][KEYS], const float (&r)[KEYS], int q, float* y) {
#pragma unroll
    for (int m = 0; m < ROWS; m += 4) {
        float part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = dot(s[m + i], r);
        OctetSums sums;
        sums.add_4(part, q), sums.add_2(q);
        const float sum = sums.add_1();
        if ((q & 1) == 0) y[(m + OctetSums::row(q)) * ROW_STEP] = sum;
    }
}

// One step of a lane's ROWS value rows (a multiple of 4). `state`, `v` and `y` point to its first row.
template <typename State, int ROWS>
__device__ __forceinline__ void wkv_step(
    const RawRows<State, ROWS>& raw, State* state, const KeyVectors& t, const float* v, int q, float* y) {
    float s[ROWS][KEYS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) raw.rows[m].unpack(s[m]);
    float sa[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) sa[m] = octet_sum(dot(s[m], t.kk));
    update_rows(s, t, sa, v);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) store_keys(state + m * ROW_STEP * HEAD_SIZE, q, s[m]);
    read_rows(s, t.r, q, y);
}

// Group norm, bonus and gate of one token, two channels per lane. Warp-wide. As in the prologues, sums of two products
// say which one is fused, so that all kernels compute the same bits.
__device__ __forceinline__ float2 wkv_epilogue(float2 y, float bonus, float2 v, float2 g, float2 weight, float2 bias) {
    const float mean = warp_sum(y.x + y.y) * (1.0f / HEAD_SIZE);
    const float dx = y.x - mean, dy = y.y - mean;
    const float scale = rsqrtf(warp_sum(fmaf(dx, dx, __fmul_rn(dy, dy))) * (1.0f / HEAD_SIZE) + GROUP_NORM_EPS);
    const auto finish = [&](float off, float v, float g, float weight, float bias) {
        return __fmul_rn(fmaf(bonus, v, fmaf(__fmul_rn(off, scale), weight, bias)), g);
    };
    return make_float2(finish(dx, v.x, g.x, weight.x, bias.x), finish(dy, v.y, g.y, weight.y, bias.y));
}

// Stores two channels of y per lane. Warp-wide; a warp has one head.
__device__ __forceinline__ void store_y(const WkvArgs& p, int row, int channel, float2 y) {
    const int64_t width = static_cast<int64_t>(p.heads) * HEAD_SIZE, at = row * width + channel;
    const __half2 halves = __floats2half2_rn(y.x, y.y);
    if (p.y_two_part == nullptr) {
        *reinterpret_cast<__half2*>(p.y + at) = halves;
        return;
    }
    const uint32_t two_part = split_half2(halves);
    uint8_t* const first = p.y_two_part + at + row * width;
    *reinterpret_cast<uint16_t*>(first) = static_cast<uint16_t>(two_part);
    *reinterpret_cast<uint16_t*>(first + width) = static_cast<uint16_t>(two_part >> 16);
}
