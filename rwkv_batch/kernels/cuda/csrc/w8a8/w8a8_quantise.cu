// Rows in 8 bits for up to 3 W8A8 GEMMs, each with its own inputs (w8a8_rows.cuh has the formula).
//
// in     x        [M, T, K]   fp16
//        factors  [K] fp32    of each GEMM, by position
//        order    [K] u16     of each GEMM, by position; null: x is in the order of the codes
//
// out    codes    [M, T, K]   s8; u8 with relu_squared
//        scales   [M, pitch]  fp32
//        ratios   [M, pitch]  s32
//
// A CTA takes row after row of one GEMM, with the factors in registers, and loads the next row early. A thread has quads
// of adjacent positions, so that codes are stored in whole lines.
//
// Grid: persistent; 1,024 threads per SM for K > 4,096, else 2,048.
// Block: K / 4 threads up to K = 4,096, then K / 16.
// Shared memory: below 1 KB.
// Bound: memory, 3 K bytes per row; with few rows the latency of one load and a barrier, 2 to 3 us. Share of 4.8 TB/s
// (H200, 4,096 rows): K = 4,096 by order 30 %, K = 16,384 in order 60 %.
// Made for: K % 128 == 0, K <= 16,384.
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

template <int QUADS, bool RELU_SQUARED, bool IN_ORDER>
__global__ void __launch_bounds__(QUANTISE_THREADS, QUADS == 1 ? 2 : 1) w8a8_quantise_kernel(const __grid_constant__ W8A8QuantiseArgs a) {
    __shared__ W8A8Maxima maxima[2];  // rows use them in turn
    const int gemm = blockIdx.y;
    const auto position = [&](int i) { return (i * blockDim.x + threadIdx.x) * 4; };
    W8A8Quad quads[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        if (position(i) < a.k) quads[i] = W8A8Quad({a.factors[gemm], IN_ORDER ? nullptr : a.order[gemm]}, position(i));
    }
    uint2 next[QUADS] = {};
    const auto load = [&](int row) {
        const __half* const x = a.x + (static_cast<int64_t>(gemm) * a.rows + row) * a.k;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            if (position(i) < a.k) next[i] = IN_ORDER ? *reinterpret_cast<const uint2*>(x + position(i)) : quads[i].gather(x);
        }
    };
    allow_next_kernel();
    wait_for_previous_kernel();
    load(blockIdx.x);
    for (int row = blockIdx.x, turn = 0; row < a.rows; row += gridDim.x, turn ^= 1) {
        float v[QUADS][4];
        uint32_t of_rest = 0, of_large = 0;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            if (position(i) >= a.k) continue;
            const uint32_t largest = quads[i].template scale<RELU_SQUARED>(next[i], v[i]);
            if (position(i) < SEGMENT) {
                of_large = largest;
            } else {
                of_rest = max(of_rest, largest);
            }
        }
        if (row + static_cast<int>(gridDim.x) < a.rows) load(row + gridDim.x);
        maxima[turn].add(of_rest, of_large);
        __syncthreads();
        const W8A8Row<RELU_SQUARED> of_row(maxima[turn].rest(), maxima[turn].large);
        if (threadIdx.x == 0) {
            a.scales[gemm * a.pitch + row] = of_row.scale;
            a.ratios[gemm * a.pitch + row] = of_row.ratio;
        }
        uint8_t* const codes = a.codes + (static_cast<int64_t>(gemm) * a.rows + row) * a.k;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            if (position(i) < a.k) *reinterpret_cast<uint32_t*>(codes + position(i)) = of_row.codes(v[i], position(i) < SEGMENT);
        }
    }
}

template <int QUADS>
void launch_w8a8_quantise(const W8A8QuantiseArgs& a, void* stream) {
    const int quads = (a.k / 4 + QUADS - 1) / QUADS, threads = (quads + 31) / 32 * 32;
    const bool in_order = a.order[0] == nullptr;
    const auto run = [&](auto kernel) {
        const int resident = (QUADS == 1 ? 2 : 1) * QUANTISE_THREADS / threads * device_info().num_sms;
        launch(kernel, dim3(min(a.rows, resident / a.count), a.count), threads, stream, a);
    };
    if (a.relu_squared) {
        in_order ? run(w8a8_quantise_kernel<QUADS, true, true>) : run(w8a8_quantise_kernel<QUADS, true, false>);
    } else {
        in_order ? run(w8a8_quantise_kernel<QUADS, false, true>) : run(w8a8_quantise_kernel<QUADS, false, false>);
    }
}

RWKV_API int rwkv_w8a8_quantise(const W8A8QuantiseArgs* a, void* stream) {
    if (a->rows == 0) return 0;
    if (a->k % SEGMENT != 0 || a->k > 4 * 4 * QUANTISE_THREADS || a->count > MAX_W8A8_GEMMS) return static_cast<int>(cudaErrorInvalidValue);
    if (a->k <= 4 * QUANTISE_THREADS) {
        launch_w8a8_quantise<1>(*a, stream);
    } else {
        launch_w8a8_quantise<4>(*a, stream);
    }
    return launch_result();
}
