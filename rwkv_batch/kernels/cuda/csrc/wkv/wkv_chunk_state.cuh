// The state warps of wkv_chunk.cu: load and store 16 values of a head, and advance them by a chunk.
#pragma once

#include "int8_state.cuh"
#include "../mma.cuh"
#include "wkv_chunk_smem.cuh"

// Advances this warp's 16 values by a chunk: y into `out`, s to the chunk's end.
__device__ __forceinline__ void advance_state(
    const ChunkOperands& stage, float (&out)[CHUNK][HEAD_SIZE + 4], float (&s)[8][4], int values, int lane) {
    const int g = lane >> 2, q = lane & 3;
    const Fragment v = left_operand_transposed(&stage.v[0][0], LD, values, lane);
    const Fragment own = right_operand_kn(stage.a[HEAD_SIZE], LD_SMALL, 0, lane);
    Fragment state[4];
    float u[2][4] = {}, y[2][4] = {};
    mma(u[0], v, own.x[0], own.x[1]);
    mma(u[1], v, own.x[2], own.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        state[j] = as_operand(s[2 * j], s[2 * j + 1]);
        const Fragment a = right_operand_kn(stage.a[j * 16], LD_SMALL, 0, lane);
        mma(u[0], state[j], a.x[0], a.x[1]);
        mma(u[1], state[j], a.x[2], a.x[3]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 decay = *reinterpret_cast<const float2*>(&stage.decay[n * 8 + 2 * q]);
        s[n][0] *= decay.x, s[n][1] *= decay.y, s[n][2] *= decay.x, s[n][3] *= decay.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment k = right_operand_kn(&stage.k[0][0], LD, j * 16, lane);
        mma(s[2 * j], v, k.x[0], k.x[1]);
        mma(s[2 * j + 1], v, k.x[2], k.x[3]);
    }
    const Fragment solved = as_operand(u[0], u[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment b = right_operand_kn(&stage.b[0][0], LD, j * 16, lane);
        mma(s[2 * j], solved, b.x[0], b.x[1]);
        mma(s[2 * j + 1], solved, b.x[2], b.x[3]);
    }
    const Fragment own_r = right_operand_kn(stage.r[HEAD_SIZE], LD_SMALL, 0, lane);
    mma(y[0], v, own_r.x[0], own_r.x[1]);
    mma(y[1], v, own_r.x[2], own_r.x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Fragment r = right_operand_kn(stage.r[j * 16], LD_SMALL, 0, lane);
        mma(y[0], state[j], r.x[0], r.x[1]);
        mma(y[1], state[j], r.x[2], r.x[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n * 8 + 2 * q + (i & 1)][values + g + (i >> 1) * 8] = y[n][i];
    }
}

// Loads a warp's 16 values as accumulators. state_bytes: 1 (Int8State), 2 (fp16) or 4 (fp32).
__device__ __forceinline__ void load_state(const void* head, int state_bytes, float (&s)[8][4], int warp, int lane) {
    const int first = warp * 16 + (lane >> 2);
    if (state_bytes == 1) {
        const auto& state = *static_cast<const Int8State*>(head);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const float scale = scale_of(state.scales[first + up * 8]);
            const auto* codes = reinterpret_cast<const char2*>(state.codes[first + up * 8]);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const char2 two = codes[n * 4 + (lane & 3)];
                s[n][2 * up] = two.x * scale, s[n][2 * up + 1] = two.y * scale;
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int at = (first + up * 8) * HEAD_SIZE + n * 8 + 2 * (lane & 3);
            const auto* halves = reinterpret_cast<const __half2*>(static_cast<const __half*>(head) + at);
            const auto* floats = reinterpret_cast<const float2*>(static_cast<const float*>(head) + at);
            const float2 f = state_bytes == 2 ? __half22float2(*halves) : *floats;
            s[n][2 * up] = f.x, s[n][2 * up + 1] = f.y;
        }
    }
}

// before: the state it was loaded from.
__device__ __forceinline__ void store_int8_state(
    Int8State& state, const Int8State& before, const float (&s)[8][4], int first, int lane) {
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        const int row = first + up * 8;
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) most = fmaxf(fmaxf(most, fabsf(s[n][2 * up])), fabsf(s[n][2 * up + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
        const Rescaled rescaled(most, 1.0f, scale_of(before.scales[row]));
        __syncwarp();
        if ((lane & 3) == 0) state.scales[row] = bits_of(rescaled.scale);
        const uint32_t seed = __float_as_uint(most) + __float_as_uint(s[0][2 * up]) * 0x9E3779B1u;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const uint32_t bytes = hash_bits(seed + (4 * lane + n / 2) * 0x3C6EF372u);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t lo = quantise_state(s[n + i][2 * up], rescaled.ratio, threshold(bytes, 2 * i));
                const uint32_t hi = quantise_state(s[n + i][2 * up + 1], rescaled.ratio, threshold(bytes, 2 * i + 1));
                auto* codes = reinterpret_cast<uint16_t*>(state.codes[row]);
                codes[(n + i) * 4 + (lane & 3)] = static_cast<uint16_t>(__byte_perm(lo, hi, 0x0051));
            }
        }
    }
}

__device__ __forceinline__ void store_state(
    void* head, const void* before, int state_bytes, const float (&s)[8][4], int warp, int lane) {
    const int first = warp * 16 + (lane >> 2);
    if (state_bytes == 1) {
        store_int8_state(*static_cast<Int8State*>(head), *static_cast<const Int8State*>(before), s, first, lane);
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const int at = (first + up * 8) * HEAD_SIZE + n * 8 + 2 * (lane & 3);
            const float lo = s[n][2 * up], hi = s[n][2 * up + 1];
            if (state_bytes == 2) {
                *reinterpret_cast<__half2*>(static_cast<__half*>(head) + at) = __floats2half2_rn(lo, hi);
            } else {
                *reinterpret_cast<float2*>(static_cast<float*>(head) + at) = make_float2(lo, hi);
            }
        }
    }
}
