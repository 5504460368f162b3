// Split-K partials as input of shift_mix.cu.
#pragma once

#include "../common.cuh"
#include "../w8a8/w8a8_args.cuh"

constexpr int MAX_SPLITS = 4;

// Eight adjacent outputs of a W8A8 GEMM, of their exact sums (w8a8/w8a8.cuh).
__device__ __forceinline__ uint4 scale_exact_sums(const int* sums, float row_scale, const float (&output_scales)[8]) {
    const int4 low = __ldcg(reinterpret_cast<const int4*>(sums)), high = __ldcg(reinterpret_cast<const int4*>(sums) + 1);
    const int all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = scaled_sum(all[i], row_scale, output_scales[i]);
    return pack8(y);
}

// Reduces eight adjacent elements of partials [count, T, C] fp32 in order, rounds to fp16. stride: T * C; at: first
// element.
__device__ __forceinline__ uint4 sum_partials(const float* partials, int count, int64_t stride, int64_t at) {
    float loaded[MAX_SPLITS][8];
#pragma unroll
    for (int i = 0; i < MAX_SPLITS; ++i) {
        if (i < count) load_fp32x8(partials + i * stride + at, loaded[i]);
    }
#pragma unroll
    for (int i = 1; i < MAX_SPLITS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) loaded[0][j] = i < count ? loaded[0][j] + loaded[i][j] : loaded[0][j];
    }
    return pack8(loaded[0]);
}
