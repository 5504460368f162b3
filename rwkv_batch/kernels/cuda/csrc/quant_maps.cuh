// What a launch of few rows over maps in small codes is given (skinny_quant.cu, wide_row.cu, wide_few.cu). Mirrored in cuda/library.py.
#pragma once

#include "norm_mix.cuh"

constexpr int MAX_MAPS = 8;
constexpr int MOST_HELD = 4096;  // inputs of a row in shared memory

struct QuantMap {
    const uint8_t* codes;
    const void* scales;  // null: the map is one of halves (MIXED)
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int warps_k;      // 1, 2, 4 or 8
    int first_block, blocks;  // of this map in the grid
};

// ffn.value transposed, [n, width] in the format of the maps, multiplied by what the only map of a launch of one row makes of n
// outputs: its rows whose input is not zero are added to `sums`.
struct RowValue {
    const uint8_t* codes;  // null: there is none
    const void* scales;
    unsigned long long* sums;  // [8][width / 8], see row_sums.cuh
    int width;
};

struct QuantArgs {
    QuantMap maps[MAX_MAPS];
    int count;
    int rows;
    int format;
    NormMix norm;  // norm.x is null, or what the one row is made of; a map's x is then its mix [k]
    RowValue value;
};
