// ffn.value of one row in the launch of ffn.key (hopper_row.cu): sums += h @ Wt over a CTA's active rows (h != 0).
//
// After its last unit, a CTA multiplies the rows of Wt whose h it computed (at most one group of 128). It adds the
// result to fixed-point sums. Active rows are loaded by bulk copies as soon as their unit is done, as far as
// VALUE_BYTES suffice.
#pragma once

#include "hopper_row_smem.cuh"

constexpr int MAX_VALUE_ROWS = GROUP_INPUTS;  // rows of Wt per CTA
constexpr int VALUE_BYTES = 60 << 10;  // buffer for active rows; the others are read from global memory

struct ActiveRow {
    float x;
    int row;
};

struct alignas(16) ValueSmem {
    uint64_t full;
    int count;
    ActiveRow active[MAX_VALUE_ROWS];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Eight columns of h @ Wt in fp32, int4. A code is used as the bits of a subnormal fp32 without conversion: 2^-149 per
// unit, times 16 per position.
struct ValueSums {
    using Raw = uint32_t;  // eight weights of a row
    static constexpr float LIFT = 0x1p100f;  // scales inputs, so that products are normal
    float sums[8] = {}, inputs = 0.0f;

    __device__ __forceinline__ void add(float x, const Raw& raw) {
        const float lifted = x * LIFT;
        inputs += x;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t code = (i < 5 ? raw : raw >> 12) & 0xfu << bits_below(i);
            sums[i] = fmaf(lifted, __uint_as_float(code), sums[i]);
        }
    }
    __device__ static constexpr uint32_t bits_below(int i) { return 4 * (i < 5 ? i : i - 3); }
    __device__ static constexpr int column(int i) { return 2 * (i % 4) + i / 4; }

    // Scales the sums and orders them by column. group: input group of the rows; c: first column.
    __device__ __forceinline__ void finish(const void* scales, int group, int width, int c, float (&out)[8]) const {
        const auto* const from = reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(scales) + static_cast<int64_t>(group) * width + c);
        const uint4 low = __ldg(from), high = __ldg(from + 1);
        const uint32_t items[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float unit = __uint_as_float((127u + 149u - 100u - bits_below(i)) << 23);  // value of one unit, without LIFT
            const float2 item = __half22float2(*reinterpret_cast<const __half2*>(&items[column(i)]));
            out[column(i)] = fmaf(1024.0f - item.y, inputs, sums[i] * unit) * item.x * code_scale<INT4>();
        }
    }
};
#endif
