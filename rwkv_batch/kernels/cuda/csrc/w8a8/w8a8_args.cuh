// Arguments of W8A8 launches: by w8a8.cuh on Hopper, by w8a8_mma.cu on other GPUs; w8a8_sparse.cu and w8a8_sparse_row.cu.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

constexpr int MAX_W8A8_GEMMS = 3;
constexpr int SEGMENT = 128;  // columns of segment 1, the large channels

struct W8A8GemmArgs {
    const void *weights, *x;
    const void *weight_scales, *weight_ratios, *input_scales, *input_ratios;
    void* y;
    int n, out_fp32;  // y is fp32, with values of fp16
};

struct W8A8Args {
    W8A8GemmArgs gemms[MAX_W8A8_GEMMS];
    int count, rows, k, pitch;
    int is_unsigned;
    int is_two_byte;  // an input is two adjacent rows, high bytes first: y has rows / 2 rows
    int tile_rows, splits, in_memory, pair, warpgroups, blocks, lead, ctas_per_sm;  // the plan; w8a8_mma.cu has none
    void *exchange, *counters;                                                      // read with in_memory
    // Of one GEMM of few rows that feeds ffn.value; null: none.
    const float* fed_factors;  // [n], by output
    unsigned* fed_largest;     // [rows, 2]: bits of the largest inputs of the rest, of segment 1; to be raised
};

// ffn.value by the inputs that are not zero.
struct W8A8SparseArgs {
    const __half* h;
    const int8_t* weights;
    const float* factors;
    const float* weight_scales;
    const int* weight_ratios;
    __half* y;             // of one row
    int* sums;             // of more: S, which the launch adds to
    float* scales;         // of more: the rows'
    const uint2* largest;  // of more: bits of the rows' largest inputs of the rest, of segment 1
    int rows, width, ffn, unused;
};

// Segment 1's sum in units of segment 0. ratios: 16ths of the row times 16ths of the output, below 2^17.
__device__ __forceinline__ int in_units_of_rest(int sum, int ratios) {
    return static_cast<int>(static_cast<int64_t>(sum) * ratios >> 8);
}
// fp32 y of a sum. Each operation rounds on its own.
__device__ __forceinline__ float scaled_sum(float sum, float input_scale, float weight_scale) {
    return __fmul_rn(sum, __fmul_rn(input_scale, weight_scale));
}
__device__ __forceinline__ float scaled_sum(int sum, float input_scale, float weight_scale) {
    return scaled_sum(__int2float_rn(sum), input_scale, weight_scale);
}
constexpr float OF_LOW_BYTES = 1.0f / 256;
// The sum of an input in two bytes. of_low: OF_LOW_BYTES; 0: `high` is an input of one byte. The product is exact.
__device__ __forceinline__ float joined_sum(int high, int low, float of_low) {
    return __fmaf_rn(__int2float_rn(low), of_low, __int2float_rn(high));
}
