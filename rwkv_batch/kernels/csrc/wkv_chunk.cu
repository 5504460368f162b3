// WKV of whole rows on tensor cores, 16 tokens at a time: one block of 4 warps per (head, row).
//
// Within a chunk let P_t be the product of the decays up to and with token t, divided by that up to the chunk's
// middle (so that P stays within 0.545^8 .. 0.545^-8), and with kk, a, b as in naive.py:
//     A_t = P_{t-1} * a_t   R_t = P_t * r_t   B_t = b_t / P_t   K_t = k_t / P_t        (per key)
//     u_t = S A_t + sum_{s<t}  u_s (B_s.A_t) + v_s (K_s.A_t)                           S: the state at the chunk's
//     y_t = S R_t + sum_{s<=t} u_s (B_s.R_t) + v_s (K_s.R_t)                           start, times P at the middle
//     S  <- (S + sum_s u_s B_s^T + v_s K_s^T) * P_last
// The triangular system for u is solved through T = (I - [B_s.A_t])^-1 - I, a forward substitution in fp32.
//
// A warp owns 16 values: their rows of S (fp32) are the accumulators of m16n8k16 (rows: values, columns: keys), and
// S, u and the right-hand side turn from accumulators into left operands without leaving the registers.
//   1 prologue    a warp per 4 tokens, a lane per 2 channels; inputs of the next chunk are already on their way
//   2 products    warp 0: B.A (fp32), 1: K.A, 2: B.R, 3: K.R, masked; [16 x 16], K = 64
//   3 substitution, u, y, S: every warp for its values
//   4 epilogue    as 1: group norm, bonus, gate
// Shared memory: 5 operands [16][72] fp16, the products, y [16][68] fp32: 24 KiB. Bytes: 9 x 128 per head and token,
// the state once in and out.
#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int PER_WARP = 4;
constexpr int THREADS = 128;
constexpr int LD = HEAD + 8;       // halves between rows of an operand: ldmatrix without conflicts
constexpr int LD_SMALL = CHUNK + 8;
constexpr float HALF_MAX = 65504.0f;

struct Shared {
    __half a[CHUNK][LD], r[CHUNK][LD], b[CHUNK][LD], k[CHUNK][LD], v[CHUNK][LD];
    __half ka[CHUNK][LD_SMALL], br[CHUNK][LD_SMALL], kr[CHUNK][LD_SMALL];  // [t][s]
    __half inverse[4][CHUNK][LD_SMALL];                                    // T, one copy per warp
    float ba[CHUNK][CHUNK + 4];
    float y[CHUNK][HEAD + 4];
    float log_decay[4][HEAD];  // of a warp's 4 tokens
    float middle[HEAD], last[HEAD];
};

struct Fragment {
    uint32_t x[4];
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 tiles of halves; lane i gives the address of a row of tile i / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ Fragment load_matrix(const __half* row) {
    Fragment f;
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(shared_address(row)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(shared_address(row)) : "memory");
    }
    return f;
}

__device__ __forceinline__ void mma(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&h);
}

// Two neighbouring accumulator tiles [16 x 8] as one left operand [16 x 16].
__device__ __forceinline__ Fragment as_operand(const float (&lo)[4], const float (&hi)[4]) {
    return {{pack2(lo[0], lo[1]), pack2(lo[2], lo[3]), pack2(hi[0], hi[1]), pack2(hi[2], hi[3])}};
}

// Left operand [16 x 16] from row-major m[16 rows][ld] at column `at`.
__device__ __forceinline__ Fragment left_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + (lane & 15) * ld + at + (lane >> 4) * 8);
}

// Right operand k16 x n16 from row-major m[n][k]: registers 0, 1 are the first 8 columns, 2, 3 the others.
__device__ __forceinline__ Fragment right_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

// Right operand k16 x n16 from row-major m[k][n] at column `at`: as above, transposed on the way.
__device__ __forceinline__ Fragment right_operand_kn(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + ((lane >> 3) & 1) * 8) * ld + at + (lane >> 4) * 8);
}

// Left operand [16 i x 16 s] = v[s][i]^T at column `at`.
__device__ __forceinline__ Fragment left_operand_transposed(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

// A warp's 4 tokens of one head, 2 channels a lane, as they lie in memory.
struct Inputs {
    __half2 r[PER_WARP], w[PER_WARP], k[PER_WARP], v[PER_WARP], a[PER_WARP], g[PER_WARP], gate[PER_WARP], first[PER_WARP];

    __device__ __forceinline__ void load(const WkvArgs& p, int64_t token, int count, int warp, int channel) {
        const __half2 zero = __floats2half2_rn(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int t = warp * PER_WARP + i;
            const bool there = t < count;
            const int64_t at = (token + t) * p.heads * HEAD + channel;
            const auto get = [&](const __half* x) { return there ? *reinterpret_cast<const __half2*>(x + at) : zero; };
            r[i] = get(p.r), w[i] = get(p.w), k[i] = get(p.k), v[i] = get(p.v), a[i] = get(p.a), g[i] = get(p.g);
            gate[i] = first[i] = zero;
            if (p.v_first != nullptr) gate[i] = get(p.v_gate), first[i] = get(p.v_first);
        }
    }
};

// What a lane keeps from prologue to epilogue.
struct Kept {
    float2 v[PER_WARP], g[PER_WARP];
    float bonus[PER_WARP];
};

__device__ __forceinline__ float saturated(float x) { return fminf(fmaxf(x, -HALF_MAX), HALF_MAX); }

__device__ __forceinline__ void put_pair(__half* row, int pair, float lo, float hi) {
    *reinterpret_cast<__half2*>(row + pair) = __floats2half2_rn(lo, hi);
}

// Step 1: operands of the chunk into shared memory. Holds the barriers it needs before, not after.
__device__ __forceinline__ void prologue(
    const HeadParams& h, const Inputs& in, Shared& sh, Kept& kept, int warp, int pair, int count, bool residual) {
    StepVectors x[PER_WARP], z[PER_WARP];
    float2 log_w[PER_WARP], sum = make_float2(0.0f, 0.0f);
    float inverse_norm[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
        const bool there = warp * PER_WARP + i < count;
        const float2 r = __half22float2(in.r[i]), w = __half22float2(in.w[i]), k = __half22float2(in.k[i]);
        const float2 v = __half22float2(in.v[i]), a = __half22float2(in.a[i]);
        const float2 gate = __half22float2(in.gate[i]), first = __half22float2(in.first[i]);
        x[i] = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x, h.k_k.x, h.k_a.x, h.r_k.x);
        z[i] = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y, h.k_k.y, h.k_a.y, h.r_k.y);
        log_w[i] = there ? make_float2(DECAY_SCALE * sigmoidf(h.w0.x + w.x), DECAY_SCALE * sigmoidf(h.w0.y + w.y))
                         : make_float2(0.0f, 0.0f);
        sum.x += log_w[i].x, sum.y += log_w[i].y;
        inverse_norm[i] = rsqrtf(fmaxf(warp_sum(x[i].kk * x[i].kk + z[i].kk * z[i].kk), 1e-24f));
        kept.bonus[i] = warp_sum(x[i].bonus + z[i].bonus);
        kept.v[i] = make_float2(x[i].v, z[i].v);
        kept.g[i] = __half22float2(in.g[i]);
    }
    *reinterpret_cast<float2*>(&sh.log_decay[warp][pair]) = sum;
    __syncthreads();
    float2 totals[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[i] = *reinterpret_cast<const float2*>(&sh.log_decay[i][pair]);
    const float2 middle = make_float2(totals[0].x + totals[1].x, totals[0].y + totals[1].y);
    float2 now = make_float2(-middle.x, -middle.y);  // log P before this warp's first token
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (i < warp) now.x += totals[i].x, now.y += totals[i].y;
    }
    if (warp == 0) {
        *reinterpret_cast<float2*>(&sh.middle[pair]) = make_float2(__expf(middle.x), __expf(middle.y));
        *reinterpret_cast<float2*>(&sh.last[pair]) =
            make_float2(__expf(totals[2].x + totals[3].x), __expf(totals[2].y + totals[3].y));
    }
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
        const int t = warp * PER_WARP + i;
        const float n = inverse_norm[i];
        put_pair(sh.a[t], pair, -x[i].kk * n * __expf(now.x), -z[i].kk * n * __expf(now.y));
        now.x += log_w[i].x, now.y += log_w[i].y;
        const float up_x = __expf(-now.x), up_y = __expf(-now.y);
        put_pair(sh.r[t], pair, x[i].r * __expf(now.x), z[i].r * __expf(now.y));
        put_pair(sh.b[t], pair, x[i].kka * n * up_x, z[i].kka * n * up_y);
        put_pair(sh.k[t], pair, saturated(x[i].k * up_x), saturated(z[i].k * up_y));
        put_pair(sh.v[t], pair, x[i].v, z[i].v);
    }
}

// Step 2: one of the four [t][s] products per warp, zero above the diagonal (and on it, for A).
__device__ __forceinline__ void products(Shared& sh, int warp, int lane) {
    const __half* left = warp < 2 ? &sh.a[0][0] : &sh.r[0][0];
    const __half* right = warp & 1 ? &sh.k[0][0] : &sh.b[0][0];
    float c[2][4] = {};
#pragma unroll
    for (int at = 0; at < HEAD; at += 16) {
        const Fragment l = left_operand(left, LD, at, lane), m = right_operand(right, LD, at, lane);
        mma(c[0], l, m.x[0], m.x[1]);
        mma(c[1], l, m.x[2], m.x[3]);
    }
    const int g = lane >> 2, q = lane & 3, reach = warp < 2 ? 0 : 1;
    __half* out = warp == 1 ? &sh.ka[0][0] : warp == 2 ? &sh.br[0][0] : &sh.kr[0][0];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int t = g + up * 8, s = n * 8 + 2 * q;
            const float lo = s < t + reach ? c[n][2 * up] : 0.0f, hi = s + 1 < t + reach ? c[n][2 * up + 1] : 0.0f;
            if (warp == 0) {
                *reinterpret_cast<float2*>(&sh.ba[t][s]) = make_float2(lo, hi);
            } else {
                *reinterpret_cast<__half2*>(out + t * LD_SMALL + s) = __floats2half2_rn(lo, hi);
            }
        }
    }
}

// T = (I - ba)^-1 - I, strictly lower: lane s solves column s from the top down. Rows of ba are read ahead, and nothing
// is stored before all is solved, so that the chain is one of multiply-adds alone.
__device__ __forceinline__ void substitute(Shared& sh, int warp, int lane) {
    const int s = lane & 15;
    float column[CHUNK], own[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) own[t] = sh.ba[t][s];
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        float sums[4] = {own[t], 0.0f, 0.0f, 0.0f};
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
        for (int t = 0; t < CHUNK; ++t) sh.inverse[warp][t][s] = __float2half_rn(column[t]);
    }
    __syncwarp();
}

// This warp's 16 values against 16 tokens: u and y of a chunk, [value][token].
struct Outcome {
    float u[2][4], y[2][4];
};

__device__ __forceinline__ void scale_state(float (&s)[8][4], const float* scales, int q) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + n * 8 + 2 * q);
        s[n][0] *= scale.x, s[n][1] *= scale.y, s[n][2] *= scale.x, s[n][3] *= scale.y;
    }
}

// Step 3, what needs the operands only: the state's part of u and y.
__device__ __forceinline__ Outcome from_state(const Shared& sh, float (&s)[8][4], int lane) {
    Outcome o = {};
    scale_state(s, sh.middle, lane & 3);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment state = as_operand(s[2 * j], s[2 * j + 1]);
        const Fragment a = right_operand(&sh.a[0][0], LD, j * 16, lane), r = right_operand(&sh.r[0][0], LD, j * 16, lane);
        mma(o.u[0], state, a.x[0], a.x[1]);
        mma(o.u[1], state, a.x[2], a.x[3]);
        mma(o.y[0], state, r.x[0], r.x[1]);
        mma(o.y[1], state, r.x[2], r.x[3]);
    }
    return o;
}

// Step 3, the rest: y of the chunk into shared memory, s to the chunk's end.
__device__ __forceinline__ void advance(Shared& sh, Outcome& o, float (&s)[8][4], int warp, int lane) {
    const int g = lane >> 2, q = lane & 3, values = warp * 16;
    const Fragment v = left_operand_transposed(&sh.v[0][0], LD, values, lane);
    const Fragment ka = right_operand(&sh.ka[0][0], LD_SMALL, 0, lane), kr = right_operand(&sh.kr[0][0], LD_SMALL, 0, lane);
    mma(o.u[0], v, ka.x[0], ka.x[1]);
    mma(o.u[1], v, ka.x[2], ka.x[3]);
    mma(o.y[0], v, kr.x[0], kr.x[1]);
    mma(o.y[1], v, kr.x[2], kr.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment k = right_operand_kn(&sh.k[0][0], LD, j * 16, lane);
        mma(s[2 * j], v, k.x[0], k.x[1]);
        mma(s[2 * j + 1], v, k.x[2], k.x[3]);
    }
    substitute(sh, warp, lane);
    const Fragment t = right_operand(&sh.inverse[warp][0][0], LD_SMALL, 0, lane);
    const Fragment right_hand = as_operand(o.u[0], o.u[1]);
    mma(o.u[0], right_hand, t.x[0], t.x[1]);
    mma(o.u[1], right_hand, t.x[2], t.x[3]);
    const Fragment solved = as_operand(o.u[0], o.u[1]);
    const Fragment br = right_operand(&sh.br[0][0], LD_SMALL, 0, lane);
    mma(o.y[0], solved, br.x[0], br.x[1]);
    mma(o.y[1], solved, br.x[2], br.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment b = right_operand_kn(&sh.b[0][0], LD, j * 16, lane);
        mma(s[2 * j], solved, b.x[0], b.x[1]);
        mma(s[2 * j + 1], solved, b.x[2], b.x[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sh.y[n * 8 + 2 * q + (i & 1)][values + g + (i >> 1) * 8] = o.y[n][i];
    }
    scale_state(s, sh.last, q);
}

template <typename State>
__device__ __forceinline__ void load_state(const State* head, float (&s)[8][4], int warp, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const State* at = head + (warp * 16 + (lane >> 2) + up * 8) * HEAD + n * 8 + 2 * (lane & 3);
            float2 f;
            if constexpr (sizeof(State) == 2) {
                f = __half22float2(*reinterpret_cast<const __half2*>(at));
            } else {
                f = *reinterpret_cast<const float2*>(at);
            }
            s[n][2 * up] = f.x, s[n][2 * up + 1] = f.y;
        }
    }
}

template <typename State>
__device__ __forceinline__ void store_state(State* head, const float (&s)[8][4], int warp, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            State* at = head + (warp * 16 + (lane >> 2) + up * 8) * HEAD + n * 8 + 2 * (lane & 3);
            if constexpr (sizeof(State) == 2) {
                *reinterpret_cast<__half2*>(at) = __floats2half2_rn(s[n][2 * up], s[n][2 * up + 1]);
            } else {
                *reinterpret_cast<float2*>(at) = make_float2(s[n][2 * up], s[n][2 * up + 1]);
            }
        }
    }
}

template <typename State>
__global__ void __launch_bounds__(THREADS, 3) wkv_chunk_kernel(const WkvArgs p) {
    __shared__ __align__(16) Shared sh;
    const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = lane * 2;
    const int channel = head * HEAD + pair;
    const int64_t start = p.cu_seqlens == nullptr ? row : p.cu_seqlens[row];
    const int64_t end = p.cu_seqlens == nullptr ? row + 1 : p.cu_seqlens[row + 1];
    const auto count_at = [&](int64_t token) { return static_cast<int>(min(end - token, static_cast<int64_t>(CHUNK))); };
    let_next_start();
    wait_for_inputs();
    Inputs in;
    in.load(p, start, count_at(start), warp, channel);
    const int64_t head_at = static_cast<int64_t>(head) * HEAD * HEAD;
    float s[8][4];
    load_state(static_cast<const State*>(p.state) + p.read_slots[row] * p.slot_stride + head_at, s, warp, lane);
    const HeadParams params(p, channel);
    const float2 weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
    const float2 bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
    for (int64_t token = start; token < end; token += CHUNK) {
        const int count = count_at(token);
        Kept kept;
        prologue(params, in, sh, kept, warp, pair, count, p.v_first != nullptr);
        __syncthreads();
        if (token + CHUNK < end) in.load(p, token + CHUNK, count_at(token + CHUNK), warp, channel);
        products(sh, warp, lane);
        Outcome outcome = from_state(sh, s, lane);
        __syncthreads();
        advance(sh, outcome, s, warp, lane);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int t = warp * PER_WARP + i;
            const float2 y = *reinterpret_cast<const float2*>(&sh.y[t][pair]);
            const float2 out = wkv_epilogue(y, kept.bonus[i], kept.v[i], kept.g[i], weight, bias);
            if (t < count) {
                *reinterpret_cast<__half2*>(p.y + (token + t) * p.heads * HEAD + channel) = __floats2half2_rn(out.x, out.y);
            }
        }
    }
    store_state(static_cast<State*>(p.state) + p.write_slots[row] * p.slot_stride + head_at, s, warp, lane);
}

RWKV_API int rwkv_wkv_chunk(const WkvArgs* p, int state_bytes, void* stream) {
    const dim3 grid(p->heads, p->rows);
    if (state_bytes == 2) {
        launch<Start::SPREAD>(wkv_chunk_kernel<__half>, grid, THREADS, stream, *p);
    } else {
        launch<Start::SPREAD>(wkv_chunk_kernel<float>, grid, THREADS, stream, *p);
    }
    return launch_result();
}
