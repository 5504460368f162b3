// Split-K partials as input of shift_mix.cu.
#pragma once

#include "../common.cuh"

constexpr int MAX_SPLITS = 4;

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
