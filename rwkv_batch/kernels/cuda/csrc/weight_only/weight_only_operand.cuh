// Operand A of wgmma (fp16, in registers) from quantised weights in shared memory; for weight_only.cuh.
#pragma once

#include "../quant.cuh"
#include "../gemm/gemm_scheduler.cuh"

template <Format FORMAT, bool TRANSPOSED>
struct WeightKind {
    static constexpr Format format = FORMAT;
    static constexpr bool transposed = TRANSPOSED, grouped = FORMAT != FP8;
    static constexpr int DEPTH = 128, BITS = FORMAT == INT4 ? 4 : 8;
    static constexpr int WEIGHT_BYTES = TILE_N * DEPTH * BITS / 8, ROW_BYTES = 128 * BITS / 8;  // of a tile of W, in either order
    static constexpr int WEIGHT_STRIDE = TILE_N * 128;  // an fp16 tile has 64 inputs
    static constexpr int SCALE_ITEM = 4, SCALE_STRIDE = grouped ? 1024 : 0;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
    const __half2 d = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&d);
}

// A lane's addresses, scales and zeros of its two operand rows. Scales and zeros are duplicated into both halves of a
// word.
template <typename Kind>
struct OperandReader {
    uint32_t at, scales[2], zeros[2];
    int g, t, chunk;

    // tile: address of the stage; warp: 0 .. 7 of the consumers
    __device__ __forceinline__ OperandReader(uint32_t tile, uint32_t scales_at, int warp, int lane) : g(lane / 4), t(lane & 3) {
        if constexpr (Kind::transposed) {
            if constexpr (Kind::format == INT4) {
                chunk = (warp / 2 ^ t) * 16 + (warp & 1) * 8 + (g / 4) * 4;  // k / 2 % 4 is t
            } else {
                chunk = warp;
            }
            at = tile + 2 * t * Kind::ROW_BYTES;
        } else {
            chunk = 0;
            at = tile + (warp * 16 + g) * Kind::ROW_BYTES;
        }
        if constexpr (Kind::grouped) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const int out = warp * 16 + (Kind::transposed ? 2 * g + up : g + 8 * up);
                const uint32_t item = ld_shared_u32(scales_at + 4 * out);
                scales[up] = __byte_perm(item, 0, 0x1010);
                zeros[up] = __byte_perm(item, 0, 0x3232);
            }
        }
    }

    // Two weights in the low bytes (int4: low nibbles of two halves) -> two fp16.
    __device__ __forceinline__ uint32_t halves(uint32_t codes, int up) const {
        if constexpr (Kind::format == FP8) return e4m3x2_to_half2(codes);
        return multiply_half2(subtract2(codes | 0x64006400u, zeros[up]), scales[up]);
    }

    // Registers of inputs 16 * step .. + 15: (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8).
    __device__ __forceinline__ void read(uint32_t (&a)[4], int step) const {
        if constexpr (!Kind::transposed) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const uint32_t row = at + up * 8 * Kind::ROW_BYTES;
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    if constexpr (Kind::format == INT4) {
                        // 64-byte rows: 16 bytes hold two steps
                        const uint32_t place = row + ((step / 2 ^ (g / 2)) << 4) + (step & 1) * 8 + right * 4;
                        a[up + 2 * right] = halves(ld_shared_u32(place) >> (4 * t) & 0x000f000fu, up);
                    } else {
                        const uint32_t codes = ld_shared_u16(row + ((step ^ g) << 4) + right * 8 + 2 * t);
                        a[up + 2 * right] = halves(codes, up);
                    }
                }
            }
        } else {
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                const uint32_t row = at + (16 * step + 8 * right) * Kind::ROW_BYTES;
                if constexpr (Kind::format == INT4) {
                    const uint32_t k0 = ld_shared_u32(row + chunk) >> (4 * (g & 3)) & 0x000f000fu;
                    const uint32_t k1 = ld_shared_u32(row + Kind::ROW_BYTES + chunk) >> (4 * (g & 3)) & 0x000f000fu;
                    a[2 * right] = halves(__byte_perm(k0, k1, 0x5410), 0);
                    a[2 * right + 1] = halves(__byte_perm(k0, k1, 0x7632), 1);
                } else {
                    const uint32_t k0 = ld_shared_u16(row + ((chunk ^ (2 * t)) << 4) + 2 * g);
                    const uint32_t k1 = ld_shared_u16(row + Kind::ROW_BYTES + ((chunk ^ (2 * t + 1)) << 4) + 2 * g);
                    const uint32_t both = __byte_perm(k0, k1, 0x5140);  // (k0, k1) of one output, then of the other
                    a[2 * right] = halves(both, 0);
                    a[2 * right + 1] = halves(both >> 16, 1);
                }
            }
        }
    }
};
#endif
