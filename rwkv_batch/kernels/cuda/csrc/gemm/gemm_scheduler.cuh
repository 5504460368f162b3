// Parameters of a GEMM launch, its kinds, and the tile scheduler. Also used by weight_only.cuh.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "activation.h"
#include "../common.cuh"

constexpr int MAX_HOPPER_GEMMS = 12;
constexpr int MAX_INT8_GEMMS = 3;  // W8A8
constexpr int TILE_N = 128;  // of a tile
constexpr int TILE_K_BYTES = 128;  // of one row of a stage's tile
constexpr int STAGING_PITCH = 48;  // bytes; with 32, every fourth row would share a bank

// Formats of W and x:
//   FP16, FP16_TO_FP32                  W [n, k] fp16; y fp16 or fp32
//   FP16_TRANSPOSED                     W [k, n] fp16
//   FP8, FP8_TO_FP32, FP8_TRANSPOSED    W and x e4m3; W [n, k], or [k, n]
//   TWO_PART, TWO_PART_TRANSPOSED       W 8 bits, x two-part
//   *_AND_FP16                          the first GEMMs 8 bits, the others fp16 (mixed)
//   W8A8_AND_FP16                       the first GEMMs s8 with exact sums in two segments (../w8a8/w8a8.cuh)
//   INPUT_PROJECTIONS                   fp16, scheduled like a mixed kind
enum GemmKind { GEMM_FP16, GEMM_FP16_TO_FP32, GEMM_FP16_TRANSPOSED, GEMM_FP8, GEMM_FP8_TO_FP32, GEMM_FP8_AND_FP16, GEMM_TWO_PART, GEMM_TWO_PART_AND_FP16, GEMM_INPUT_PROJECTIONS, GEMM_FP8_TRANSPOSED, GEMM_TWO_PART_TRANSPOSED, GEMM_W8A8_AND_FP16 };
template <GemmKind KIND>
constexpr bool IS_TRANSPOSED_8BIT = KIND == GEMM_FP8_TRANSPOSED || KIND == GEMM_TWO_PART_TRANSPOSED;
template <GemmKind KIND>
constexpr bool ALL_QUANTISED = IS_TRANSPOSED_8BIT<KIND> || KIND == GEMM_FP8 || KIND == GEMM_FP8_TO_FP32 || KIND == GEMM_TWO_PART;
template <GemmKind KIND>
constexpr bool HAS_TWO_PART = KIND == GEMM_TWO_PART || KIND == GEMM_TWO_PART_AND_FP16 || KIND == GEMM_TWO_PART_TRANSPOSED;
template <GemmKind KIND>
constexpr bool HAS_INT8 = KIND == GEMM_W8A8_AND_FP16;
template <GemmKind KIND>
constexpr bool HAS_QUANTISED = ALL_QUANTISED<KIND> || HAS_INT8<KIND> || KIND == GEMM_FP8_AND_FP16 || KIND == GEMM_TWO_PART_AND_FP16;
template <GemmKind KIND>
constexpr bool IS_MIXED = HAS_INT8<KIND> || KIND == GEMM_FP8_AND_FP16 || KIND == GEMM_TWO_PART_AND_FP16 || KIND == GEMM_INPUT_PROJECTIONS;
// Few registers, so that CTAs of the previous and next kernel fit on the SM and prefetch their weights.
template <int ROWS, GemmKind KIND>
constexpr bool IS_LEAN = (HAS_TWO_PART<KIND> && ROWS <= 64) || (HAS_INT8<KIND> && ROWS <= 32);
template <int ROWS, GemmKind KIND>
constexpr int OUT_ROWS = HAS_TWO_PART<KIND> ? ROWS / 2 : ROWS;

// A CTA's unit of work: a tile of outputs and rows, or one split of its k.
struct WorkTile {
    int gemm, output, row_block;
    int split, workspace_index;  // the split; its slot in the split-K workspace
    bool is_fp16, is_split;  // fp16 GEMM; other CTAs compute the other splits
    bool is_dependent;  // its inputs are outputs of this launch
};

// Kernel parameters. The tensor maps hold the addresses of W and x.
struct GemmLaunch {
    CUtensorMap weights[MAX_HOPPER_GEMMS];
    CUtensorMap inputs[MAX_HOPPER_GEMMS];
    __half* y[MAX_HOPPER_GEMMS];
    uint8_t* y_two_part[MAX_HOPPER_GEMMS];  // two-part output [rows, 2, n]; null: y
    int to_partials;  // y is fp32 split-K partials [SPLITS, rows, n]; the next kernel reduces them
    const float* weight_scales[MAX_HOPPER_GEMMS];  // 8 bits only
    const float* input_scales[MAX_HOPPER_GEMMS];
    const int* weight_ratios[MAX_INT8_GEMMS];  // W8A8 only
    const int* input_ratios[MAX_INT8_GEMMS];
    int n[MAX_HOPPER_GEMMS];
    int k[MAX_HOPPER_GEMMS];
    int activation[MAX_HOPPER_GEMMS];
    int first_tile[MAX_HOPPER_GEMMS + 1];  // of each GEMM
    int count;
    int num_full, num_independent;  // mixed kinds: GEMMs with one CTA per tile; GEMMs whose inputs exist before the launch
    int rows;
    int row_blocks;  // blocks of ROWS rows; every tile of outputs is computed for each
    float4* partials;  // split-K: [tiles][SPLITS][ROWS / 8][256]
    int* counters;  // split-K: [tiles][2], zero between launches
};

// Mixed kinds: tiles with split k; tiles that depend on outputs of this launch.
__host__ __device__ __forceinline__ int num_split_tiles(const GemmLaunch& p) { return p.first_tile[p.num_independent] - p.first_tile[p.num_full]; }
__host__ __device__ __forceinline__ int num_dependent_tiles(const GemmLaunch& p) { return p.first_tile[p.count] - p.first_tile[p.num_independent]; }

// Work tiles of a launch.
template <GemmKind KIND, int SPLITS>
__host__ __device__ __forceinline__ int num_work_tiles(const GemmLaunch& p) {
    const int tiles = p.first_tile[p.count] * p.row_blocks;
    return IS_MIXED<KIND> ? tiles + num_split_tiles(p) * (SPLITS - 1) : tiles;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "../hopper.cuh"
#include "transposed_operand.cuh"
#include "gemm_epilogue.cuh"

struct TileCoord {
    int gemm, output;  // the GEMM; the tile's first output
};

__device__ __forceinline__ TileCoord tile_coord(const GemmLaunch& p, int tile) {
    int gemm = 0;
    while (gemm + 1 < p.count && tile >= p.first_tile[gemm + 1]) ++gemm;
    return {gemm, (tile - p.first_tile[gemm]) * TILE_N};
}

// Returns work tile `index`. Mixed kinds: first the full tiles, then SPLITS entries per split tile, then dependent
// tiles.
template <GemmKind KIND, int SPLITS>
__device__ __forceinline__ WorkTile work_tile(const GemmLaunch& p, int index, int split_index) {
    if constexpr (IS_MIXED<KIND>) {
        const int first_split = p.first_tile[p.num_full], shared_tiles = num_split_tiles(p), share = index - first_split;
        const int tile = share < 0 ? index : share < shared_tiles * SPLITS ? first_split + share / SPLITS : index - shared_tiles * (SPLITS - 1);
        const TileCoord at = tile_coord(p, tile);
        const bool shared = tile >= first_split && tile < first_split + shared_tiles, is_fp16 = !HAS_QUANTISED<KIND> || tile >= first_split;
        return {at.gemm, at.output, 0, shared ? share % SPLITS : 0, tile - first_split, is_fp16, shared, tile >= p.first_tile[p.num_independent]};
    }
    const TileCoord at = tile_coord(p, index / p.row_blocks);
    return {at.gemm, at.output, index % p.row_blocks, split_index, index, !ALL_QUANTISED<KIND>, true, false};
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Main loop iterations of a work tile.
template <GemmKind KIND, int SPLITS>
__device__ __forceinline__ int num_k_steps(const GemmLaunch& p, const WorkTile& work) {
    return p.k[work.gemm] / ((work.is_fp16 ? 64 : 128) * (work.is_split ? SPLITS : 1));
}

// CTAs that share a tile's k are adjacent. In mixed kinds the work tile's index says which split it is.
template <int SPLITS, GemmKind KIND>
constexpr int CTA_SPLITS = IS_MIXED<KIND> ? 1 : SPLITS;

// A CTA's work tiles, in order. Dependent tiles are dealt from CTA 0 on again. For the input projections, whose full
// tiles take longest, they go to the CTAs without a full tile.
template <GemmKind KIND, int SPLITS>
struct TileScheduler {
    int index, step, dependent, dependent_index, dependent_step, end, num_waiting;

    template <typename Cta>
    __device__ __forceinline__ TileScheduler(const GemmLaunch& p, const Cta& cta)
        : index(cta.first), step(cta.blocks), end(num_work_tiles<KIND, SPLITS>(p)) {
        dependent = dependent_index = end, dependent_step = step, num_waiting = 0;
        if constexpr (IS_MIXED<KIND>) {
            const int tiles = num_dependent_tiles(p), whole = p.first_tile[p.num_full];
            dependent = end - tiles, dependent_index = dependent + index, num_waiting = min(tiles, step);
            if (KIND == GEMM_INPUT_PROJECTIONS && whole < step) {
                dependent_index = index < whole ? end : dependent + index - whole;
                dependent_step = step - whole, num_waiting = min(tiles, dependent_step);
            }
            if (index >= dependent) index = dependent_index;
        }
    }
    __device__ __forceinline__ bool has_work() const { return index < end; }
    __device__ __forceinline__ void advance() {
        const bool was_independent = index < dependent;
        index += was_independent ? step : dependent_step;
        if (IS_MIXED<KIND> && was_independent && index >= dependent) index = dependent_index;
    }
};
#endif
