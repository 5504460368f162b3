// Rows in 8 bits for up to 3 W8A8 GEMMs, each with its own inputs (w8a8_rows.cuh has the formula).
//
// in     x        [M, T, K]   fp16
//        factors  [K] fp32, order [K] u16: of each GEMM, by position
//
// out    codes    [M, T, K]   s8; u8 with relu_squared
//        scales   [M, pitch]  fp32
//        ratios   [M, pitch]  s32
//
// Grid: one CTA per row and GEMM; for K > 4,096 a cluster of 4 CTAs shares a row where the GPU has clusters.
// A thread gathers the channels of four adjacent positions, so that codes are stored in whole lines.
// Shared memory: below 1 KB. Bound: memory, 3 K bytes per row; with few rows the latency of one load and two barriers.
// K % 128 == 0, up to 16,384.
#include "../relu.cuh"
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
    __shared__ uint32_t warp_maxima[32], large_maximum;
    __shared__ float2 part_maxima[PARTS];  // bits of (rest, segment 1), from all CTAs of the row
    const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS, gemm = blockIdx.y, span = a.k / PARTS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const W8A8Inputs in = {a.factors[gemm], a.order[gemm]};
    int channels[QUADS][4];
    float factors[QUADS][4], v[QUADS][4];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at >= span) continue;
        load_order(in, part * span + at, channels[i]);
        const float4 four = __ldg(reinterpret_cast<const float4*>(in.factors + part * span + at));
        factors[i][0] = four.x, factors[i][1] = four.y, factors[i][2] = four.z, factors[i][3] = four.w;
    }
    if (PARTS > 1) cluster_arrive();
    allow_next_kernel();
    wait_for_previous_kernel();
    const __half* const x = a.x + (static_cast<int64_t>(gemm) * a.rows + row) * a.k;
    uint32_t largest = 0, of_segment = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at >= span) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = __half2float(x[channels[i][j]]);
    }
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 4;
        if (at >= span) continue;
        uint32_t of_quad = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (RELU_SQUARED) v[i][j] = relu_square(v[i][j]);
            v[i][j] = __fmul_rn(v[i][j], factors[i][j]);
            of_quad = max(of_quad, abs_bits(v[i][j]));
        }
        if (part * span + at < SEGMENT) {
            of_segment = of_quad;
        } else {
            largest = max(largest, of_quad);
        }
    }
    largest = __reduce_max_sync(FULL_MASK, largest);
    if (lane == 0) warp_maxima[warp] = largest;
    if (warp == 0) {  // segment 1 is the first quad of its lanes
        of_segment = __reduce_max_sync(FULL_MASK, of_segment);
        if (lane == 0) large_maximum = of_segment;
    }
    __syncthreads();
    uint32_t rest = __reduce_max_sync(FULL_MASK, lane < static_cast<int>(blockDim.x >> 5) ? warp_maxima[lane] : 0);
    uint32_t large = large_maximum;
    if constexpr (PARTS > 1) {
        cluster_wait();  // all CTAs of the cluster run
        if (warp == 0 && lane < PARTS) store_remote(part_maxima + part, lane, make_float2(__uint_as_float(rest), __uint_as_float(large)));
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
