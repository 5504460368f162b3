// What a block of wide_row.cu has in shared memory beside its ring of tiles, and the sizes of these.
#pragma once

#include "norm_mix.cuh"
#include "quant.cuh"
#include "quant_maps.cuh"
#include "wide_maps.cuh"

constexpr int UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS;
constexpr int STAGES = 2 * WARPGROUPS;  // of the ring; a multiple, so that a place always is the same warpgroup's
constexpr int TILE_ROOM = UNIT * PIECES * TILE_BYTES, INPUT_ROOM = MOST_HELD * 4 + 256;  // 256: read past, not used

template <Format FORMAT>
struct RowTile {
    static constexpr bool grouped = FORMAT != FP8;
    static constexpr int GROUPS = FORMAT == INT4 ? 2 * PIECES : PIECES;  // of 128 inputs
    static constexpr int SCALE_ITEM = FORMAT == INT4 ? 4 : 2;
    static constexpr int BYTES = TILE_ROOM + (grouped ? 1024 : 0);  // scales beside the codes
};

struct RowRoom {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t asked[2];  // whether the warps have asked for the constants that their inputs are made of, and for the rest
    float scales[MOST_HELD / GROUP_INPUTS];         // of x
    float input_sums[MOST_HELD / GROUP_INPUTS][2];  // of its upper two parts and of its third, where codes have a zero
    float sums[2][2 * WARPGROUPS][UNIT];            // of a unit, of each warpgroup two; taken in turn
    MixRoom mix;
};
