// ffn.value of one row in the launch of ffn.key (wide_row.cu): the active rows of a block, and their sums.
#pragma once

#include "wide_row_room.cuh"

constexpr int MOST_VALUED = GROUP_INPUTS;  // rows of a value that a block has
constexpr int VALUE_ROOM = 60 << 10;       // for active ones; what does not fit is read from where it is

struct ActiveRow {
    float x;
    int row;
};

struct alignas(16) ValueRoom {
    uint64_t full;
    int count;
    ActiveRow active[MOST_VALUED];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Eight columns of rows of a value times their inputs, in fp32. A code alone is a number that is not normal, so that none is
// converted: 2^-149 for each unit, times a power of 16 or 256 where it is not lowest.
template <Format FORMAT>
struct ValueSums {
    static_assert(FORMAT != FP8);
    using Raw = std::conditional_t<FORMAT == INT4, uint32_t, uint2>;  // of a row's eight
    static constexpr float LIFT = 0x1p100f;  // of inputs: products are normal numbers
    float sums[8] = {}, inputs = 0.0f;

    __device__ __forceinline__ void add(float x, const Raw& raw) {
        const float lifted = x * LIFT;
        inputs += x;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t code;
            if constexpr (FORMAT == INT4) code = (i < 5 ? raw : raw >> 12) & 0xfu << bits_below(i);
            else code = (i < 4 ? raw.x : raw.y) >> i % 4 / 2 * 16 & 0xffu << bits_below(i);
            sums[i] = fmaf(lifted, __uint_as_float(code), sums[i]);
        }
    }
    __device__ static constexpr uint32_t bits_below(int i) { return FORMAT == INT4 ? 4 * (i < 5 ? i : i - 3) : 8 * (i % 2); }
    __device__ static constexpr int column(int i) { return FORMAT == INT4 ? 2 * (i % 4) + i / 4 : i; }

    // In the order of columns, scaled: of the group of inputs that the rows are of, c the first column.
    __device__ __forceinline__ void finish(const void* scales, int group, int width, int c, float (&out)[8]) const {
        const int64_t at = static_cast<int64_t>(group) * width + c;
        float scale[8], zero[8];
        if constexpr (FORMAT == INT4) {
            const auto* const from = reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(scales) + at);
            const uint4 low = __ldg(from), high = __ldg(from + 1);
            const uint32_t items[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float2 item = __half22float2(*reinterpret_cast<const __half2*>(&items[i]));
                scale[i] = item.x, zero[i] = item.y - 1024.0f;
            }
        } else {
            unpack8(__ldg(reinterpret_cast<const uint4*>(static_cast<const __half*>(scales) + at)), scale);
#pragma unroll
            for (int i = 0; i < 8; ++i) zero[i] = 128.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float unit = __uint_as_float((127u + 149u - 100u - bits_below(i)) << 23);  // what a code's was, without LIFT
            out[column(i)] = fmaf(-zero[column(i)], inputs, sums[i] * unit) * scale[column(i)] * code_scale<FORMAT>();
        }
    }
};
#endif
