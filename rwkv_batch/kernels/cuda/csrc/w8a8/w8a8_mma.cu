// W8A8 GEMMs by mma.sync, for GPUs without Hopper's kernel and for launches that it has no room for. Same bits.
//
//   y = x @ W^T with the sums S of w8a8.cuh
//
// in     x, input_scales, input_ratios            as in w8a8.cuh
//        weights, weight_scales, weight_ratios    as in w8a8.cuh
//
// out    y  [T, n] fp16; inputs in two bytes: [T / 2, n]
//
// Both operands go from memory to registers: a thread's 16 bytes of K stand for four steps of mma.m16n8k32. This
// permutes K alike in both. WARPS_K warps share a tile's K and add their sums in shared memory, which is exact in any
// order.
//
// Grid: (n / OUTPUTS, rows / ROWS, GEMMs), OUTPUTS = 16 * BLOCKS * WARPS_N, ROWS = 8 * CHUNKS.
// Block: 256 threads.
// Shared memory: 4 bytes per output and row of a tile, up to 16 KB.
// Bound: memory up to about 32 rows, then L1. Share of 4.8 TB/s (H200, ffn.key [16,384, 4,096]): 8 rows 52 %, 64 rows
// 31 %; of 1,979 TOPS at 320 rows 11 %.
// Made for: n % 64 == 0, K % 128 == 0, any number of rows.
#include "../mma.cuh"
#include "w8a8_args.cuh"

constexpr int MMA_WARPS = 8;

template <int CHUNKS, int BLOCKS, int WARPS_K, bool UNSIGNED>
__global__ void __launch_bounds__(MMA_WARPS * 32) w8a8_mma_kernel(const __grid_constant__ W8A8Args a) {
    constexpr int ROWS = 8 * CHUNKS, OUTPUTS = 16 * BLOCKS * (MMA_WARPS / WARPS_K);
    __shared__ int sums[ROWS][OUTPUTS];
    const W8A8GemmArgs& gemm = a.gemms[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_k = warp % WARPS_K;
    const int first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * ROWS, stages = a.k / SEGMENT;
    if (first_output >= gemm.n) return;
    allow_next_kernel();
    for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += MMA_WARPS * 32) sums[i / OUTPUTS][i % OUTPUTS] = 0;
    __syncthreads();
    wait_for_previous_kernel();

    const int group = lane >> 2, tile_output = warp / WARPS_K * 16 * BLOCKS + group, at = (lane & 3) * 16;
    const uint8_t* const weights = static_cast<const uint8_t*>(gemm.weights) + static_cast<int64_t>(first_output + tile_output) * a.k + at;
    const uint8_t* rows[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        const int row = min(first_row + 8 * j + group, a.rows - 1);  // rows past the end repeat the last one
        rows[j] = static_cast<const uint8_t*>(gemm.x) + static_cast<int64_t>(row) * a.k + at;
    }
    int products[BLOCKS][CHUNKS][4] = {};
    const auto multiply = [&](int k) {  // 64 of K
        uint4 w[BLOCKS][2], x[CHUNKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int up = 0; up < 2; ++up) w[b][up] = __ldg(reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(16 * b + 8 * up) * a.k + k));
        }
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) x[j] = load16(rows[j] + k);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const uint4 first = make_uint4(w[b][0].x, w[b][1].x, w[b][0].y, w[b][1].y), second = make_uint4(w[b][0].z, w[b][1].z, w[b][0].w, w[b][1].w);
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                if constexpr (UNSIGNED) {
                    mma_s8_u8(products[b][j], first, x[j].x, x[j].y);
                    mma_s8_u8(products[b][j], second, x[j].z, x[j].w);
                } else {
                    mma_s8(products[b][j], first, x[j].x, x[j].y);
                    mma_s8(products[b][j], second, x[j].z, x[j].w);
                }
            }
        }
    };
    int stage = stages * warp_k / WARPS_K;
    const int end = stages * (warp_k + 1) / WARPS_K;
    if (stage == 0 && end > 0) {
        multiply(0);
        multiply(64);
        stage = 1;
        const int* const input_ratios = static_cast<const int*>(gemm.input_ratios);
        const int* const weight_ratios = static_cast<const int*>(gemm.weight_ratios) + first_output + tile_output;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = min(first_row + 8 * j + (lane & 3) * 2 + i % 2, a.rows - 1);
                    products[b][j][i] = in_units_of_rest(products[b][j][i], input_ratios[row] * __ldg(weight_ratios + 16 * b + i / 2 * 8));
                }
            }
        }
    }
#pragma unroll 2
    for (; stage < end; ++stage) {
        multiply(stage * SEGMENT);
        multiply(stage * SEGMENT + 64);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) atomicAdd(&sums[8 * j + (lane & 3) * 2 + i % 2][tile_output + 16 * b + i / 2 * 8], products[b][j][i]);
        }
    }
    __syncthreads();
    const float of_low = a.is_two_byte ? OF_LOW_BYTES : 0.0f;
    for (int i = threadIdx.x; i < (ROWS >> a.is_two_byte) * OUTPUTS / 2; i += MMA_WARPS * 32) {
        const int row = i / (OUTPUTS / 2) << a.is_two_byte, output = i % (OUTPUTS / 2) * 2, at_row = first_row + row, at_output = first_output + output;
        if (at_row >= a.rows) break;
        const int *const high = &sums[row][output], *const low = &sums[row | a.is_two_byte][output];
        const float input_scale = static_cast<const float*>(gemm.input_scales)[at_row];
        const float2 weight_scales = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(gemm.weight_scales) + at_output));
        const __half2 pair =
            __floats2half2_rn(scaled_sum(joined_sum(high[0], low[0], of_low), input_scale, weight_scales.x), scaled_sum(joined_sum(high[1], low[1], of_low), input_scale, weight_scales.y));
        const int64_t at = static_cast<int64_t>(at_row >> a.is_two_byte) * gemm.n + at_output;
        if (gemm.out_fp32) {
            *reinterpret_cast<float2*>(static_cast<float*>(gemm.y) + at) = __half22float2(pair);
        } else {
            *reinterpret_cast<__half2*>(static_cast<__half*>(gemm.y) + at) = pair;
        }
    }
}

template <int CHUNKS, int BLOCKS, int WARPS_K>
void launch_w8a8_mma(const W8A8Args& a, void* stream) {
    constexpr int ROWS = 8 * CHUNKS, OUTPUTS = 16 * BLOCKS * (MMA_WARPS / WARPS_K);
    int most = 0;
    for (int i = 0; i < a.count; ++i) most = max(most, a.gemms[i].n);
    const auto kernel = a.is_unsigned ? w8a8_mma_kernel<CHUNKS, BLOCKS, WARPS_K, true> : w8a8_mma_kernel<CHUNKS, BLOCKS, WARPS_K, false>;
    launch(kernel, dim3(most / OUTPUTS, (a.rows + ROWS - 1) / ROWS, a.count), MMA_WARPS * 32, stream, a);
}

RWKV_API int rwkv_w8a8_mma(const W8A8Args* a, void* stream) {
    if (a->rows == 0) return 0;
    if (a->rows <= 8) {
        launch_w8a8_mma<1, 1, 8>(*a, stream);
    } else if (a->rows <= 32) {
        launch_w8a8_mma<4, 1, 8>(*a, stream);
    } else {
        launch_w8a8_mma<8, 2, 4>(*a, stream);
    }
    return launch_result();
}
