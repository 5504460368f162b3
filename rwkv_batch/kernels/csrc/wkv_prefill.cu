// WKV with its prologue and epilogue over ragged rows: one block per (head, row), serial over the row's tokens.
//
// The block works in tiles of TILE tokens: (1) the raw fp16 inputs of a tile arrive in shared memory by cp.async
// while the tile before is being computed; (2) the prologue of all its tokens runs in parallel, a warp per token;
// (3) the recurrence runs token by token out of shared memory, the state in registers; (4) the epilogue, a warp
// per token again. Per head and token: 4096 x 5 fused multiply-adds and 9 x 128 bytes.
//
// Shared memory: raw [7][TILE][64] fp16 (14 KiB), vectors [6][TILE][64] fp32 (24 KiB), y [TILE][64] fp32 (4 KiB).
// ROWS value rows per thread: 1 (256 threads, least time per token) .. 4 (64 threads, most tokens per second).
#include <cuda_pipeline.h>

#include "wkv.cuh"

constexpr int TILE = 16;
enum Raw { R, W, K, V, A, GATE, FIRST, RAWS };
enum Vec { VR, VDECAY, VKK, VKKA, VK, VV, VECS };

struct Shared {
    __half raw[RAWS][TILE][HEAD];
    float vectors[VECS][TILE][HEAD];
    float y[TILE][HEAD];
    float inv_square[TILE];
};

// Start copying `count` tokens' inputs of one head, 16 bytes a piece.
__device__ __forceinline__ void fetch(const WkvArgs& p, Shared& sh, int64_t token, int count, int head) {
    const __half* const sources[RAWS] = {p.r, p.w, p.k, p.v, p.a, p.v_gate, p.v_first};
    const int arrays = p.v_first == nullptr ? GATE : RAWS;
    for (int i = threadIdx.x; i < count * 8; i += blockDim.x) {
        const int t = i >> 3, piece = (i & 7) * 8;
        const int64_t at = ((token + t) * p.heads + head) * HEAD + piece;
#pragma unroll
        for (int array = 0; array < RAWS; ++array) {
            if (array < arrays) __pipeline_memcpy_async(&sh.raw[array][t][piece], sources[array] + at, 16);
        }
    }
    __pipeline_commit();
}

__device__ __forceinline__ float2 pair_at(const __half* p) { return __half22float2(*reinterpret_cast<const __half2*>(p)); }

// Vectors of one token by one warp; returns the bonus sum_j r_j k_j r_k_j.
__device__ __forceinline__ float prologue(const HeadParams& h, Shared& sh, int t, int pair, bool residual) {
    const float2 r = pair_at(&sh.raw[R][t][pair]), w = pair_at(&sh.raw[W][t][pair]);
    const float2 k = pair_at(&sh.raw[K][t][pair]), v = pair_at(&sh.raw[V][t][pair]);
    const float2 a = pair_at(&sh.raw[A][t][pair]);
    float2 gate = make_float2(0.0f, 0.0f), first = gate;
    if (residual) gate = pair_at(&sh.raw[GATE][t][pair]), first = pair_at(&sh.raw[FIRST][t][pair]);
    const StepVectors x = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x,
                                       h.k_k.x, h.k_a.x, h.r_k.x);
    const StepVectors z = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y,
                                       h.k_k.y, h.k_a.y, h.r_k.y);
    const auto put = [&](int vec, float lo, float hi) {
        *reinterpret_cast<float2*>(&sh.vectors[vec][t][pair]) = make_float2(lo, hi);
    };
    put(VR, x.r, z.r), put(VDECAY, x.decay, z.decay), put(VKK, x.kk, z.kk);
    put(VKKA, x.kka, z.kka), put(VK, x.k, z.k), put(VV, x.v, z.v);
    const float squares = warp_sum(x.kk * x.kk + z.kk * z.kk);
    if (pair == 0) sh.inv_square[t] = inverse_square(squares);
    return warp_sum(x.bonus + z.bonus);
}

template <typename State, int ROWS>
__global__ void __launch_bounds__(256 / ROWS) wkv_prefill_kernel(const WkvArgs p) {
    constexpr int THREADS = 256 / ROWS, WARPS = THREADS / 32, PER_WARP = TILE / WARPS, ROW_STEP = HEAD / ROWS;
    __shared__ __align__(16) Shared sh;
    const int head = blockIdx.x, row = blockIdx.y, tid = threadIdx.x;
    const int q = tid & 3, first_row = tid >> 2, warp = tid >> 5, pair = (tid & 31) * 2;
    const int64_t start = p.cu_seqlens == nullptr ? row : p.cu_seqlens[row];
    const int64_t end = p.cu_seqlens == nullptr ? row + 1 : p.cu_seqlens[row + 1];
    const bool residual = p.v_first != nullptr;
    fetch(p, sh, start, static_cast<int>(min(end - start, static_cast<int64_t>(TILE))), head);

    const int64_t head_at = static_cast<int64_t>(head) * HEAD * HEAD;
    const State* in = static_cast<const State*>(p.state) + p.read_slots[row] * p.slot_stride + head_at;
    float s[ROWS][16];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) load_keys(in + (first_row + m * ROW_STEP) * HEAD, q, s[m]);
    const HeadParams params(p, head * HEAD + pair);
    const float2 weight = *reinterpret_cast<const float2*>(p.ln_weight + head * HEAD + pair);
    const float2 bias = *reinterpret_cast<const float2*>(p.ln_bias + head * HEAD + pair);

    for (int64_t token = start; token < end; token += TILE) {
        const int count = static_cast<int>(min(end - token, static_cast<int64_t>(TILE)));
        float bonus[PER_WARP];
        float2 gate[PER_WARP];
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int t = warp + i * WARPS;
            gate[i] = t < count ? pair_at(p.g + ((token + t) * p.heads + head) * HEAD + pair) : make_float2(0.0f, 0.0f);
        }
        __pipeline_wait_prior(0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int t = warp + i * WARPS;
            bonus[i] = t < count ? prologue(params, sh, t, pair, residual) : 0.0f;
        }
        __syncthreads();
        if (token + TILE < end) {
            fetch(p, sh, token + TILE, static_cast<int>(min(end - token - TILE, static_cast<int64_t>(TILE))), head);
        }
        for (int t = 0; t < count; ++t) {
            const TokenVectors v{sh.vectors[VR][t],   sh.vectors[VDECAY][t], sh.vectors[VKK][t],
                                 sh.vectors[VKKA][t], sh.vectors[VK][t],     sh.vectors[VV][t]};
            wkv_step<State, ROWS>(s, v, sh.inv_square[t], q, first_row, ROW_STEP, sh.y[t]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int t = warp + i * WARPS;
            if (t >= count) continue;
            const float2 y = *reinterpret_cast<const float2*>(&sh.y[t][pair]);
            const float2 v = *reinterpret_cast<const float2*>(&sh.vectors[VV][t][pair]);
            const float2 out = wkv_epilogue(y, bonus[i], v, gate[i], weight, bias);
            *reinterpret_cast<__half2*>(p.y + ((token + t) * p.heads + head) * HEAD + pair) =
                __floats2half2_rn(out.x, out.y);
        }
    }
    State* out = static_cast<State*>(p.state) + p.write_slots[row] * p.slot_stride + head_at;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) store_keys(out + (first_row + m * ROW_STEP) * HEAD, q, s[m]);
}

template <typename State>
void launch(const WkvArgs& p, int rows_per_thread, cudaStream_t stream) {
    const dim3 grid(p.heads, p.rows);
    if (rows_per_thread == 1) {
        wkv_prefill_kernel<State, 1><<<grid, 256, 0, stream>>>(p);
    } else if (rows_per_thread == 2) {
        wkv_prefill_kernel<State, 2><<<grid, 128, 0, stream>>>(p);
    } else {
        wkv_prefill_kernel<State, 4><<<grid, 64, 0, stream>>>(p);
    }
}

// rows_per_thread: 1, 2 or 4
RWKV_API int rwkv_wkv_prefill(const WkvArgs* p, int state_bytes, int rows_per_thread, void* stream) {
    if (state_bytes == 2) {
        launch<__half>(*p, rows_per_thread, static_cast<cudaStream_t>(stream));
    } else {
        launch<float>(*p, rows_per_thread, static_cast<cudaStream_t>(stream));
    }
    return launch_result();
}
