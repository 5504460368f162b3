// Shared memory of hopper_row.cu, and its sizes.
#pragma once

#include "../mix/norm_mix.cuh"
#include "../quant.cuh"
#include "../w8a8/w8a8_rows.cuh"
#include "quant_args.cuh"
#include "../gemm/gemm_launch.cuh"

constexpr int OUTPUTS_PER_UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS;
constexpr int STAGES = 2 * WARPGROUPS;  // stages; a multiple of WARPGROUPS, so that a stage always belongs to the same warpgroup
constexpr int TILE_DATA_BYTES = OUTPUTS_PER_UNIT * PIECES * TILE_K_BYTES, INPUT_BYTES = MAX_CACHED_K * 4 + 256;  // 256: read past the end, unused

template <Format FORMAT>
struct RowTile {
    static constexpr bool grouped = FORMAT == INT4;
    static constexpr int GROUPS = FORMAT == INT4 ? 2 * PIECES : PIECES;  // groups of 128 inputs per tile
    static constexpr int SCALE_ITEM = 4;
    static constexpr int BYTES = TILE_DATA_BYTES + (grouped ? 1024 : 0);  // weights, then scales
};

struct RowSmem {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t requested[2];  // mbarriers: the warps have issued the loads of constants; of the row
    float scales[MAX_CACHED_K / GROUP_INPUTS];  // scales of x
    float input_sums[MAX_CACHED_K / GROUP_INPUTS];  // int4: sums of x, for weights with an offset
    float weight_scales[2][OUTPUTS_PER_UNIT];  // of a unit and the next one, 8 bits
    int weight_ratios[2][OUTPUTS_PER_UNIT];  // likewise, W8A8
    float sums[2][2 * WARPGROUPS][OUTPUTS_PER_UNIT];  // partial sums of a unit, two per warpgroup; two buffers
    MixSmem mix;
    W8A8Maxima maxima;
};
