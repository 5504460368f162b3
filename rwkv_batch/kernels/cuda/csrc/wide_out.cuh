// What becomes of a tile's sums in wide.cuh and wide_codes.cuh: scaled, activated, turned and written.
#pragma once

#include "activation.h"
#include "common.cuh"
#include "relu.cuh"
#include "row_parts.cuh"
#include "turned_codes.cuh"

template <Activation ACTIVATION>
__device__ __forceinline__ float wide_activate(float v) {
    if constexpr (ACTIVATION == RELU_SQUARED) return relu_square(v);
    if constexpr (ACTIVATION == SIGNED_SQUARE) return v * fabsf(v);
    if constexpr (ACTIVATION == TANH) return tanh_exp(v);
    if constexpr (ACTIVATION == SIGMOID) return sigmoidf(v);
    return v;
}

// The first COUNT sums in place: one choice for all of them.
template <int COUNT, int SUMS>
__device__ __forceinline__ void activate_sums(float (&sums)[SUMS], int activation) {
    const auto all = [&](auto of_one) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] = of_one(sums[i]);
    };
    switch (activation) {
        case TANH: all([](float v) { return wide_activate<TANH>(v); }); break;
        case SIGMOID: all([](float v) { return wide_activate<SIGMOID>(v); }); break;
        case RELU_SQUARED: all([](float v) { return wide_activate<RELU_SQUARED>(v); }); break;
        case SIGNED_SQUARE: all([](float v) { return wide_activate<SIGNED_SQUARE>(v); }); break;
        default: break;
    }
}

// Two 8x8 matrices (outputs x rows, as wgmma leaves them) turned into rows of 16 outputs.
__device__ __forceinline__ void store_turned(uint32_t to, uint32_t low, uint32_t high) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint4 shared_u128(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void put_shared(uint32_t at, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
// Whole: nvcc splits what it may.
__device__ __forceinline__ void put_global(void* at, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float load_cached(const float* p) {
    float v;
    asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

// Where a warp's 16 outputs of a tile's rows go.
struct WideOut {
    __half* y;  // of row 0
    uint8_t* parts;  // likewise, [2][pitch] a row
    int pitch, first_row, rows;
    const float* weight_scales;  // of its 16 outputs
    const float* input_scales;   // of row 0
};

// Which of a warp's 16 outputs a lane's sums of the operand's row lane / 4, or of that 8 further, are.
template <bool TURNED>
__device__ __forceinline__ int output_of_lane(int lane, int up) { return TURNED ? turned_output(lane, up) : lane / 4 + 8 * up; }

// fp8: the sums of 8 * CHUNKS rows times the scales of their outputs and rows. The rows' come from the kernel before.
template <int CHUNKS, bool TURNED = false, int SUMS>
__device__ __forceinline__ void scale_sums(float (&sums)[SUMS], const WideOut& out, int lane) {
    constexpr bool AT_ONCE = CHUNKS <= 32;  // all are asked for at once; of more there are too few registers for that
    constexpr int TOGETHER = AT_ONCE ? CHUNKS : 2;
    const auto scale_of = [&](int row) { return row < out.rows ? load_cached(out.input_scales + row) : 0.0f; };
    wait_for_inputs();
    if constexpr (!AT_ONCE) {
#pragma unroll
        for (int i = 0; i < CHUNKS * 8; i += 32) scale_of(out.first_row + i + lane);  // into L1
    }
    const float of_output[2] = {__ldg(out.weight_scales + output_of_lane<TURNED>(lane, 0)), __ldg(out.weight_scales + output_of_lane<TURNED>(lane, 1))};
#pragma unroll
    for (int first = 0; first < CHUNKS; first += TOGETHER) {
        float of_row[TOGETHER][2];
#pragma unroll
        for (int c = 0; c < TOGETHER; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i) of_row[c][i] = scale_of(out.first_row + 8 * (first + c) + lane % 4 * 2 + i);
        }
#pragma unroll
        for (int c = 0; c < TOGETHER; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * (first + c) + i] *= of_output[i / 2] * of_row[c][i % 2];
        }
    }
}

// The same where rows have no scale.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void scale_outputs(float (&sums)[SUMS], const float (&of_output)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) sums[i] *= of_output[i % 4 / 2];
}

// 8 * CHUNKS rows of 16 outputs, from a warp's sums through its buffers, 16 rows at a time, to memory: as halves or in parts.
template <int CHUNKS, bool PARTS, bool TURNED = false, int SUMS>
__device__ __forceinline__ void write_out(const float (&sums)[SUMS], const WideOut& out, uint32_t buffers, int lane) {
    constexpr int PITCH = STAGING_PITCH;
    const uint32_t to = buffers + (lane & 7) * PITCH + (lane >> 3 & 1) * 16, from = buffers + (lane / 2) * PITCH + (lane & 1) * 16;
    int row = out.first_row + lane / 2;
    __half* y = out.y + static_cast<int64_t>(row) * out.pitch + (lane & 1) * 8;
    uint8_t* parts = PARTS ? out.parts + static_cast<int64_t>(row) * 2 * out.pitch + (lane & 1) * 8 : nullptr;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t buffer = (c / 2 & 1) * 16 * PITCH;
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (c + d < CHUNKS) {
                const float* v = sums + 4 * (c + d);
                if constexpr (TURNED) {  // a lane has two neighbouring outputs of two rows
                    const uint32_t rows = buffers + buffer + (d * 8 + lane % 4 * 2) * PITCH + lane / 4 * 4;
                    put_shared(rows, pack_half2(v[0], v[2]));
                    put_shared(rows + PITCH, pack_half2(v[1], v[3]));
                } else {
                    store_turned(to + buffer + d * 8 * PITCH, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
                }
            }
        }
        __syncwarp();
        if (row < out.rows && (c + 2 <= CHUNKS || lane < 16)) {
            if constexpr (PARTS) {
                store_parts(parts, out.pitch, shared_u128(from + buffer));
            } else {
                put_global(y, shared_u128(from + buffer));
            }
        }
        __syncwarp();
        row += 16, y += static_cast<int64_t>(out.pitch) * 16, parts += static_cast<int64_t>(out.pitch) * 32;
    }
}

// The same as they are, y [rows, n] fp32 from its first output on: a warp stores 32 whole bytes of each of 4 rows at a time.
template <int CHUNKS, bool TURNED = false, int SUMS>
__device__ __forceinline__ void write_floats(const float (&sums)[SUMS], float* y, const WideOut& out, int lane) {
    int row = out.first_row + lane % 4 * 2;
    y += static_cast<int64_t>(row) * out.pitch + output_of_lane<TURNED>(lane, 0);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + i >= out.rows) continue;
            float* const at = y + i * out.pitch;
            if constexpr (TURNED) {
                *reinterpret_cast<float2*>(at) = make_float2(sums[4 * c + i], sums[4 * c + 2 + i]);
            } else {
                at[0] = sums[4 * c + i], at[8] = sums[4 * c + 2 + i];
            }
        }
        row += 8, y += static_cast<int64_t>(out.pitch) * 8;
    }
}
