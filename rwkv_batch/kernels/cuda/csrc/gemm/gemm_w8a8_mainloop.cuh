// A tile of a W8A8 GEMM in a mixed launch (gemm.cuh): exact s32 sums in two segments, scaled. ../w8a8/w8a8.cuh has the formula.
#pragma once

#include "gemm_ring.cuh"
#include "../w8a8/hopper_int8.cuh"
#include "../w8a8/w8a8_args.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ int ld_global_ca(const int* p) {
    int v;
    asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Multiplies 64 outputs of a warpgroup by all stages of a tile. sums: y in fp32. The rows' scales and ratios are padded
// to whole tiles. output: the warp's first output; outputs that are not `inside` have no scales.
template <typename Tile, typename Cta>
__device__ __forceinline__ void multiply_w8a8_tile(
    float* sums, const GemmLaunch& p, const Cta& cta, PipelineState<Tile::STAGES>& pipe, int gemm, int output, bool inside, int steps, int warpgroup) {
    using namespace hopper;
    constexpr int COUNT = Tile::NUM_WGMMA * Tile::WGMMA_N / 2, CHUNKS = COUNT / 4, BATCH = CHUNKS % 4 == 0 ? 4 : 2;
    const int lane = threadIdx.x % 32, first_row = lane % 4 * 2;
    const float* const input_scales = p.input_scales[gemm];
    const int* const input_ratios = p.input_ratios[gemm];
    float of_output[2] = {};  // of wgmma's lower and upper 8 rows
    int ratio[2] = {};
#pragma unroll
    for (int up = 0; inside && up < 2; ++up) {
        of_output[up] = __ldg(p.weight_scales[gemm] + output + lane / 4 + 8 * up);
        ratio[up] = __ldg(p.weight_ratios[gemm] + output + lane / 4 + 8 * up);
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int row = 0; row < CHUNKS * 8; row += 32) ld_global_ca(input_scales + row + lane), ld_global_ca(input_ratios + row + lane);  // into L1
    int products[COUNT];
    uint32_t before = 0;
    const uint64_t weights_at = smem_descriptor(cta.ring + warpgroup * (64 * TILE_K_BYTES)), inputs_at = smem_descriptor(cta.ring + Tile::WEIGHT_BYTES);
    const auto multiply_stage = [&](int add) {
        const uint64_t weight = weights_at + pipe.stage * (Tile::BYTES >> 4), input = inputs_at + pipe.stage * (Tile::BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_K_BYTES / 32; ++j) {
#pragma unroll
            for (int half = 0; half < Tile::NUM_WGMMA; ++half)
                WgmmaInt8<Tile::WGMMA_N, false>::multiply(products + half * (Tile::WGMMA_N / 2), weight + 2 * j, input + half * (Tile::WGMMA_N * TILE_K_BYTES >> 4) + 2 * j, j > 0 ? 1 : add);
        }
        wgmma_commit();
    };
    const auto release = [&] {
        if (threadIdx.x % 128 == 0) arrive(before);
    };
    mbarrier_wait(cta.full + 8 * pipe.stage, pipe.parity);
    multiply_stage(0);
    before = cta.empty + 8 * pipe.stage;
    pipe.advance();
    wgmma_wait<0>();
    settle(products);
#pragma unroll
    for (int first = 0; first < CHUNKS; first += BATCH) {
        int of_row[BATCH][2];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) of_row[j][i] = ld_global_ca(input_ratios + 8 * (first + j) + first_row + i);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int& sum = products[4 * (first + j) + i];
                sum = in_units_of_rest(sum, of_row[j][i % 2] * ratio[i / 2]);
            }
        }
    }
    settle(products);
    for (int step = 1; step < steps; ++step) {
        mbarrier_wait(cta.full + 8 * pipe.stage, pipe.parity);
        multiply_stage(1);
        wgmma_wait<1>();
        release();
        before = cta.empty + 8 * pipe.stage;
        pipe.advance();
    }
    wgmma_wait<0>();
    settle(products);
    release();
#pragma unroll
    for (int first = 0; first < CHUNKS; first += BATCH) {
        float of_row[BATCH][2];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) of_row[j][i] = ld_global_ca(input_scales + 8 * (first + j) + first_row + i);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * (first + j) + i] = scaled_sum(products[4 * (first + j) + i], of_row[j][i % 2], of_output[i / 2]);
        }
    }
}
#endif
