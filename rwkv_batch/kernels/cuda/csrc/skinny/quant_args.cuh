// Arguments of skinny_quant.cu and hopper_row.cu. Mirrored in cuda/library.py.
#pragma once

#include "../mix/norm_mix.cuh"

constexpr int MAX_GEMMS = 8;
constexpr int MAX_CACHED_K = 4096;  // largest k of a row in shared memory

struct QuantGemmArgs {
    const uint8_t* qweight;
    const void* scales;  // null: fp16 GEMM (MIXED)
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int out_fp32;
    int warps_k;  // warps of a CTA that share k: 1, 2, 4 or 8
    int first_block, blocks;  // CTAs of this GEMM
    const int* weight_ratios;  // W8A8: [n]
    const float* factors;      // W8A8: [k] by channel
    const uint16_t* order;     // W8A8: [k], the channel at a position, and the reverse
};

// ffn.value, multiplied in the launch of ffn.key: sums += h @ Wt over the active rows of Wt, the rows with h != 0. Wt
// [n, width] in the same format; h [n] is the output of the launch's only GEMM, for one row.
struct RowValueArgs {
    const uint8_t* qweight;  // null: not used
    const void* scales;
    unsigned long long* sums;  // [8][width / 8] (fixed_point_sums.cuh)
    int width;
};

struct QuantLaunchArgs {
    QuantGemmArgs gemms[MAX_GEMMS];
    int count;
    int rows;
    int format;
    NormMixArgs norm;  // norm.x null: not used. Otherwise x of every GEMM is its mix weight [k], and the kernel computes the mixed row
    RowValueArgs value;
};
