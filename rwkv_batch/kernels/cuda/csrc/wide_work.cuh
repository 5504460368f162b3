// What a launch of wide.cuh, and of the kernels that are made like it, is given, and how its work is dealt: kinds, maps, tiles, shares of k.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "activation.h"
#include "common.cuh"

constexpr int MAX_WIDE_MAPS = 12;
constexpr int OUTPUTS = 128;  // of a tile
constexpr int TILE_BYTES = 128;  // of a tile along k
constexpr int STAGING_PITCH = 48;  // bytes; 32 would put every fourth row into the same banks

// What W holds: halves as [n, k], of which y may be fp32, or as [k, n], or fp8 codes as [n, k], likewise; or the first maps' codes, the
// others' halves [n, k]; or codes as [k, n]. With PARTS x is in two parts where W is in codes.
// WIDE_ENTRANCE: halves, as WIDE_MIXED has codes and halves: the first maps' tiles are whole, of the next ones k is shared, and
// the last ones, whole, read what those give.
enum WideKind { WIDE_PLAIN, WIDE_TO_FLOATS, WIDE_TURNED, WIDE_FP8, WIDE_FP8_TO_FLOATS, WIDE_MIXED, WIDE_PARTS, WIDE_PARTS_MIXED, WIDE_ENTRANCE, WIDE_FP8_TURNED, WIDE_PARTS_TURNED };
template <WideKind KIND>
constexpr bool TURNS_CODES = KIND == WIDE_FP8_TURNED || KIND == WIDE_PARTS_TURNED;
template <WideKind KIND>
constexpr bool ALL_CODES = TURNS_CODES<KIND> || KIND == WIDE_FP8 || KIND == WIDE_FP8_TO_FLOATS || KIND == WIDE_PARTS;
template <WideKind KIND>
constexpr bool HAS_PARTS = KIND == WIDE_PARTS || KIND == WIDE_PARTS_MIXED || KIND == WIDE_PARTS_TURNED;
template <WideKind KIND>
constexpr bool HAS_CODES = ALL_CODES<KIND> || KIND == WIDE_MIXED || KIND == WIDE_PARTS_MIXED;
template <WideKind KIND>
constexpr bool IS_MIXED = KIND == WIDE_MIXED || KIND == WIDE_PARTS_MIXED || KIND == WIDE_ENTRANCE;
// Few enough registers that blocks of the kernels before and behind come up beside it: their weights are on their way.
template <int ROWS, WideKind KIND>
constexpr bool IS_LEAN = HAS_PARTS<KIND> && ROWS <= 64;
template <int ROWS, WideKind KIND>
constexpr int OUT_ROWS = HAS_PARTS<KIND> ? ROWS / 2 : ROWS;

// A block's piece of work: of a tile of outputs for some rows a share of k.
struct WideWork {
    int map, output, row_block;
    int split, exchange;  // which share; which place for exchanging sums
    bool half, shared;    // multiplies halves; other blocks have the other shares
    bool late;            // its inputs are results of this launch
};

// What a launch needs on the device; the tensor maps say where W and x are.
struct WideLaunch {
    CUtensorMap weights[MAX_WIDE_MAPS];
    CUtensorMap inputs[MAX_WIDE_MAPS];
    __half* y[MAX_WIDE_MAPS];
    uint8_t* parts[MAX_WIDE_MAPS];  // where y goes in two parts [rows, 2, n] instead; else null
    int to_shares;  // WIDE_PARTS: y is fp32 [SPLITS, rows, n], what each share of k comes to; the next kernel adds them up
    const float* weight_scales[MAX_WIDE_MAPS];  // fp8: of every output and every row
    const float* input_scales[MAX_WIDE_MAPS];
    int n[MAX_WIDE_MAPS];
    int k[MAX_WIDE_MAPS];
    int activation[MAX_WIDE_MAPS];
    int first_tile[MAX_WIDE_MAPS + 1];  // of each map
    int count;
    int coded, early;  // IS_MIXED: maps in codes, of halves alone those whose tiles are whole; all whose inputs are there before the launch
    int rows;
    int row_blocks;   // how many times ROWS it takes to hold the rows; each tile of outputs is made for all of them
    float4* partial;  // where k is split: [tiles][SPLITS][ROWS / 8][256]
    int* counters;    // likewise [tiles][2], zero between launches
};

// IS_MIXED: tiles whose k is shared, and those whose inputs are results of the launch.
__host__ __device__ __forceinline__ int wide_shared_tiles(const WideLaunch& p) { return p.first_tile[p.early] - p.first_tile[p.coded]; }
__host__ __device__ __forceinline__ int wide_late_tiles(const WideLaunch& p) { return p.first_tile[p.count] - p.first_tile[p.early]; }

// Pieces of work of a launch.
template <WideKind KIND, int SPLITS>
__host__ __device__ __forceinline__ int wide_works(const WideLaunch& p) {
    const int tiles = p.first_tile[p.count] * p.row_blocks;
    return IS_MIXED<KIND> ? tiles + wide_shared_tiles(p) * (SPLITS - 1) : tiles;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "hopper.cuh"
#include "turned_codes.cuh"
#include "wide_out.cuh"

struct WidePlace {
    int map, output;  // which map; the tile's first output
};

__device__ __forceinline__ WidePlace wide_place(const WideLaunch& p, int tile) {
    int map = 0;
    while (map + 1 < p.count && tile >= p.first_tile[map + 1]) ++map;
    return {map, (tile - p.first_tile[map]) * OUTPUTS};
}

// The work of a number. Of mixed maps codes come first, or what is whole of halves, then the tiles in SPLITS shares, then those
// whose inputs are the results of these, whole.
template <WideKind KIND, int SPLITS>
__device__ __forceinline__ WideWork wide_work(const WideLaunch& p, int number, int my_split) {
    if constexpr (IS_MIXED<KIND>) {
        const int coded = p.first_tile[p.coded], shared_tiles = wide_shared_tiles(p), share = number - coded;
        const int tile = share < 0 ? number : share < shared_tiles * SPLITS ? coded + share / SPLITS : number - shared_tiles * (SPLITS - 1);
        const WidePlace at = wide_place(p, tile);
        const bool shared = tile >= coded && tile < coded + shared_tiles, half = !HAS_CODES<KIND> || tile >= coded;
        return {at.map, at.output, 0, shared ? share % SPLITS : 0, tile - coded, half, shared, tile >= p.first_tile[p.early]};
    }
    const WidePlace at = wide_place(p, number / p.row_blocks);
    return {at.map, at.output, number % p.row_blocks, my_split, number, !ALL_CODES<KIND>, true, false};
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Steps of TILE_BYTES in a split's share of k, which the number of splits divides; and k of a step.
template <WideKind KIND, int SPLITS>
__device__ __forceinline__ int wide_steps(const WideLaunch& p, const WideWork& work) {
    return p.k[work.map] / ((work.half ? 64 : 128) * (work.shared ? SPLITS : 1));
}

// Blocks that share a tile's k lie beside each other; of mixed maps, the halves' numbers say which share is whose.
template <int SPLITS, WideKind KIND>
constexpr int BLOCK_SPLITS = IS_MIXED<KIND> ? 1 : SPLITS;

// The numbers of a block's works, one after the other. Those that are late are dealt from the first block on again; of an
// entrance, whose whole tiles take longest, to the blocks that have none of these.
template <WideKind KIND, int SPLITS>
struct WideTurn {
    int number, step, late, late_number, late_step, end, waiting;

    template <typename Block>
    __device__ __forceinline__ WideTurn(const WideLaunch& p, const Block& block)
        : number(block.first), step(block.blocks), end(wide_works<KIND, SPLITS>(p)) {
        late = late_number = end, late_step = step, waiting = 0;
        if constexpr (IS_MIXED<KIND>) {
            const int tiles = wide_late_tiles(p), whole = p.first_tile[p.coded];
            late = end - tiles, late_number = late + number, waiting = min(tiles, step);
            if (KIND == WIDE_ENTRANCE && whole < step) {
                late_number = number < whole ? end : late + number - whole;
                late_step = step - whole, waiting = min(tiles, late_step);
            }
            if (number >= late) number = late_number;
        }
    }
    __device__ __forceinline__ bool has_work() const { return number < end; }
    __device__ __forceinline__ void advance() {
        const bool was_early = number < late;
        number += was_early ? step : late_step;
        if (IS_MIXED<KIND> && was_early && number >= late) number = late_number;
    }
};
#endif
