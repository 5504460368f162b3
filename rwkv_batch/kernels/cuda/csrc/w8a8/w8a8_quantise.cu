// Rows in 8 bits for up to 3 W8A8 GEMMs, each with its own inputs (w8a8_rows.cuh has the formula).
//
// in     x        [M, T, K]   fp16
//        factors  [K] fp32    of each GEMM, by position
//        order    [K] u16     of each GEMM, by position
//
// out    codes    [M, T, K]   s8; u8 with relu_squared
//        scales   [M, pitch]  fp32
//        ratios   [M, pitch]  s32
//
// A thread gathers the channels of four adjacent positions, so that codes are stored in whole lines.
//
// Grid: one CTA per row and GEMM; for K > 4,096 a cluster of 4 CTAs shares a row where the GPU has clusters.
// Block: K / 4 threads (K / 16 in a cluster), up to 1,024.
// Shared memory: below 1 KB.
// Bound: memory, 3 K bytes per row; with few rows the latency of one load and two barriers, 2 to 3 us. Share of
// 4.8 TB/s (H200, 4,096 rows): K = 4,096 29 %, K = 16,384 17 %: the gather by position binds.
// Made for: K % 128 == 0, K <= 16,384.
#include "../token_cluster.cuh"
#include "w8a8_rows.cuh"

struct W8A8QuantiseArgs {
    const float* factors[MAX_W8A8_GEMMS];
    const uint16_t* order[MAX_W8A8_GEMMS];
    const __half* x;
    uint8_t* codes;
    float* scales;
    int* ratios;
    int count, rows, k, pitch, relu_squared, unused;
};

constexpr int QUANTISE_THREADS = 1024;

template <int QUADS, int PARTS, bool RELU_SQUARED>
__global__ void __launch_bounds__(QUANTISE_THREADS, QUADS == 1 ? 2 : 1) w8a8_quantise_kernel(const __grid_constant__ W8A8QuantiseArgs a) {
    __shared__ W8A8Maxima maxima;
    __shared__ float2 part_maxima[PARTS];  // bits of (rest, segment 1), from all CTAs of the row
    const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS, gemm = blockIdx.y, span = a.k / PARTS;
    const W8A8Inputs in = {a.factors[gemm], a.order[gemm]};
    W8A8Quad quads[QUADS];
    float v[QUADS][4];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at < span) quads[i] = W8A8Quad(in, part * span + at);
    }
    if (PARTS > 1) cluster_arrive();
    allow_next_kernel();
    wait_for_previous_kernel();
    const __half* const x = a.x + (static_cast<int64_t>(gemm) * a.rows + row) * a.k;
    uint32_t of_rest = 0, of_large = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at >= span) continue;
        const uint32_t largest = quads[i].template read<RELU_SQUARED>(x, v[i]);
        if (part * span + at < SEGMENT) {
            of_large = largest;
        } else {
            of_rest = max(of_rest, largest);
        }
    }
    maxima.add(of_rest, of_large);
    __syncthreads();
    uint32_t rest = maxima.rest(), large = maxima.large;
    if constexpr (PARTS > 1) {
        cluster_wait();  // all CTAs of the cluster run
        if (threadIdx.x < PARTS) store_remote(part_maxima + part, threadIdx.x, make_float2(__uint_as_float(rest), __uint_as_float(large)));
        cluster_arrive();
        cluster_wait();
        rest = large = 0;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            rest = max(rest, __float_as_uint(part_maxima[i].x)), large = max(large, __float_as_uint(part_maxima[i].y));
        }
    }
    const W8A8Row<RELU_SQUARED> of_row(rest, large);
    if (part == 0 && threadIdx.x == 0) {
        a.scales[gemm * a.pitch + row] = of_row.scale;
        a.ratios[gemm * a.pitch + row] = of_row.ratio;
    }
    uint8_t* const codes = a.codes + (static_cast<int64_t>(gemm) * a.rows + row) * a.k + part * span;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at < span) *reinterpret_cast<uint32_t*>(codes + at) = of_row.codes(v[i], part * span + at < SEGMENT);
    }
}

template <int QUADS, int PARTS>
void launch_w8a8_quantise(const W8A8QuantiseArgs& a, void* stream) {
    const int quads = (a.k / PARTS / 4 + QUADS - 1) / QUADS, threads = (quads + 31) / 32 * 32;
    const dim3 grid(a.rows * PARTS, a.count);
    const auto kernel = a.relu_squared ? w8a8_quantise_kernel<QUADS, PARTS, true> : w8a8_quantise_kernel<QUADS, PARTS, false>;
    if constexpr (PARTS > 1) {
        launch_clusters(kernel, PARTS, grid, threads, 0, stream, a);
    } else {
        launch(kernel, grid, threads, stream, a);
    }
}

RWKV_API int rwkv_w8a8_quantise(const W8A8QuantiseArgs* a, void* stream) {
    if (a->rows == 0) return 0;
    if (a->k % SEGMENT != 0 || a->k > 4 * 4 * QUANTISE_THREADS || a->count > MAX_W8A8_GEMMS) return static_cast<int>(cudaErrorInvalidValue);
    if (a->k <= 4 * QUANTISE_THREADS) {
        launch_w8a8_quantise<1, 1>(*a, stream);
    } else if (device_info().has_pdl) {
        launch_w8a8_quantise<1, TOKEN_CTAS>(*a, stream);
    } else {
        launch_w8a8_quantise<4, 1>(*a, stream);
    }
    return launch_result();
}
