// Epilogue of the Hopper GEMMs: scale, activate, transpose and store a warp's accumulators.
#pragma once

#include "activation.h"
#include "../common.cuh"
#include "../relu.cuh"
#include "../rows_two_part.cuh"
#include "transposed_operand.cuh"

template <Activation ACTIVATION>
__device__ __forceinline__ float activate_fp32(float v) {
    if constexpr (ACTIVATION == RELU_SQUARED) return relu_square(v);
    if constexpr (ACTIVATION == SIGNED_SQUARE) return v * fabsf(v);
    if constexpr (ACTIVATION == TANH) return tanh_exp(v);
    if constexpr (ACTIVATION == SIGMOID) return sigmoidf(v);
    return v;
}

// Activates the first COUNT sums. One branch for all of them.
template <int COUNT, int SUMS>
__device__ __forceinline__ void activate_sums(float (&sums)[SUMS], int activation) {
    const auto all = [&](auto of_one) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] = of_one(sums[i]);
    };
    switch (activation) {
        case TANH: all([](float v) { return activate_fp32<TANH>(v); }); break;
        case SIGMOID: all([](float v) { return activate_fp32<SIGMOID>(v); }); break;
        case RELU_SQUARED: all([](float v) { return activate_fp32<RELU_SQUARED>(v); }); break;
        case SIGNED_SQUARE: all([](float v) { return activate_fp32<SIGNED_SQUARE>(v); }); break;
        default: break;
    }
}

// Stores two 8x8 matrices (outputs x rows, as wgmma leaves them) as rows of 16 outputs.
__device__ __forceinline__ void stmatrix_transposed(uint32_t to, uint32_t low, uint32_t high) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 ld_shared_u128(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void st_shared(uint32_t at, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
// In assembly, because nvcc may split the store.
__device__ __forceinline__ void st_global(void* at, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float ld_global_ca(const float* p) {
    float v;
    asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

// Destination and scales of a warp's 16 outputs.
struct WarpOutput {
    __half* y;
    uint8_t* two_part;  // same, [2][pitch] per row
    int pitch, first_row, rows;
    const float* weight_scales;
    const float* input_scales;
};

// Output (0 .. 15) of a lane's sums in operand row lane / 4 + 8 * up.
template <bool TRANSPOSED>
__device__ __forceinline__ int output_of_lane(int lane, int up) { return TRANSPOSED ? transposed_output(lane, up) : lane / 4 + 8 * up; }

// fp8: multiplies the sums of 8 * CHUNKS rows by their scales. The previous kernel writes the input scales.
template <int CHUNKS, bool TRANSPOSED = false, int SUMS>
__device__ __forceinline__ void scale_sums(float (&sums)[SUMS], const WarpOutput& out, int lane) {
    constexpr bool AT_ONCE = CHUNKS <= 32;  // all loads in flight at once; with more chunks there are too few registers
    constexpr int BATCH = AT_ONCE ? CHUNKS : 2;
    const auto scale_of = [&](int row) { return row < out.rows ? ld_global_ca(out.input_scales + row) : 0.0f; };
    wait_for_previous_kernel();
    if constexpr (!AT_ONCE) {
#pragma unroll
        for (int i = 0; i < CHUNKS * 8; i += 32) scale_of(out.first_row + i + lane);  // prefetch into L1
    }
    const float output_scale[2] = {__ldg(out.weight_scales + output_of_lane<TRANSPOSED>(lane, 0)), __ldg(out.weight_scales + output_of_lane<TRANSPOSED>(lane, 1))};
#pragma unroll
    for (int first = 0; first < CHUNKS; first += BATCH) {
        float row_scale[BATCH][2];
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i) row_scale[c][i] = scale_of(out.first_row + 8 * (first + c) + lane % 4 * 2 + i);
        }
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * (first + c) + i] *= output_scale[i / 2] * row_scale[c][i % 2];
        }
    }
}

// Same, for rows without a scale.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void scale_outputs(float (&sums)[SUMS], const float (&output_scale)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) sums[i] *= output_scale[i % 4 / 2];
}

// Stores 8 * CHUNKS rows of a warp's 16 outputs through its staging buffers, 16 rows at a time; fp16 or two-part.
template <int CHUNKS, bool TWO_PART, bool TRANSPOSED = false, int SUMS>
__device__ __forceinline__ void write_out(const float (&sums)[SUMS], const WarpOutput& out, uint32_t buffers, int lane) {
    constexpr int PITCH = STAGING_PITCH;
    const uint32_t to = buffers + (lane & 7) * PITCH + (lane >> 3 & 1) * 16, from = buffers + (lane / 2) * PITCH + (lane & 1) * 16;
    int row = out.first_row + lane / 2;
    __half* y = out.y + static_cast<int64_t>(row) * out.pitch + (lane & 1) * 8;
    uint8_t* two_part = TWO_PART ? out.two_part + static_cast<int64_t>(row) * 2 * out.pitch + (lane & 1) * 8 : nullptr;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t buffer = (c / 2 & 1) * 16 * PITCH;
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (c + d < CHUNKS) {
                const float* v = sums + 4 * (c + d);
                if constexpr (TRANSPOSED) {  // a lane holds two adjacent outputs of two rows
                    const uint32_t rows = buffers + buffer + (d * 8 + lane % 4 * 2) * PITCH + lane / 4 * 4;
                    st_shared(rows, pack_half2(v[0], v[2]));
                    st_shared(rows + PITCH, pack_half2(v[1], v[3]));
                } else {
                    stmatrix_transposed(to + buffer + d * 8 * PITCH, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
                }
            }
        }
        __syncwarp();
        if (row < out.rows && (c + 2 <= CHUNKS || lane < 16)) {
            if constexpr (TWO_PART) {
                store_two_part(two_part, out.pitch, ld_shared_u128(from + buffer));
            } else {
                st_global(y, ld_shared_u128(from + buffer));
            }
        }
        __syncwarp();
        row += 16, y += static_cast<int64_t>(out.pitch) * 16, two_part += static_cast<int64_t>(out.pitch) * 32;
    }
}

// Stores y [rows, n] fp32, from `y` = its first output of row 0. A warp writes 32 contiguous bytes of 4 rows at a time.
template <int CHUNKS, bool TRANSPOSED = false, int SUMS>
__device__ __forceinline__ void write_floats(const float (&sums)[SUMS], float* y, const WarpOutput& out, int lane) {
    int row = out.first_row + lane % 4 * 2;
    y += static_cast<int64_t>(row) * out.pitch + output_of_lane<TRANSPOSED>(lane, 0);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + i >= out.rows) continue;
            float* const at = y + i * out.pitch;
            if constexpr (TRANSPOSED) {
                *reinterpret_cast<float2*>(at) = make_float2(sums[4 * c + i], sums[4 * c + 2 + i]);
            } else {
                at[0] = sums[4 * c + i], at[8] = sums[4 * c + 2 + i];
            }
        }
        row += 8, y += static_cast<int64_t>(out.pitch) * 8;
    }
}
