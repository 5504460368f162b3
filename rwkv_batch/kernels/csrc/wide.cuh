// y = act(x @ W^T) for up to 256 rows, or several times as many, several maps in one launch, on Hopper's tensor cores.
//
// A map: W [n, k] fp16, or [k, n] when it is stored transposed; x [rows, k] fp16; y [rows, n] fp16; n a multiple of 16 (64 if
// transposed), k of 64 times the splits. Or W [n, k] and x [rows, k] of e4m3 codes with a scale for each output and each
// row, k a multiple of 128 times the splits: the same bytes along k, multiplied by the fp8 units; then ROWS may be 320, two
// products of 160. Or such a W and x [rows, 2, k], two e5m2 parts of a half (row_parts.cuh), without scales: ROWS / 2 rows, whose
// first parts are a product's first columns, and whose sums are added up at the end. Codes may also lie as [k, n], n a multiple of
// 16, one map a launch: a tile's then become the wgmma's first operand in registers (turned_codes.cuh). A block makes 128 outputs of all rows, so that W is read once (of more rows than ROWS, several tiles):
// two warps keep a ring of tiles (128 of W, ROWS of x, 64 of k each) filled by bulk tensor copies, two warpgroups multiply
// 64 outputs each. W is the wgmma's first operand, so that ROWS, its second, may be any multiple of 8 up to 256 (of 16 here).
//
// Blocks stay for several tiles. Where there are fewer tiles than processors, SPLITS blocks share a tile's k and add up
// through memory (not as a cluster: an H200 has room for 30 clusters of four, not for 33). The first tiles of W are on
// their way before the kernel that makes x has ended (programmatic dependent launch).
//
// Maps in codes leave processors idle where their tiles are fewer: maps of halves may be in the launch beside them, k of a tile
// shared by SPLITS blocks, and behind these maps of halves that read their results, as blocks come to have done their tiles:
// their tiles are dealt from the first block on, so that the last maps', which ought to be the deepest, lie on blocks that
// had no tile of codes.
//
// Bytes: 2nk per map, once; x 2k * rows per tile of outputs, from the L2 cache; splits 4 * 128 * ROWS each way, likewise.
// Shared memory: ring [STAGES] of W [2][64][64] fp16 and x [ROWS][64] fp16, 128-byte swizzle; 2 x 16 rows of 16 outputs
// per warp on their way out; full and empty barriers.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "activation.h"
#include "common.cuh"
#include "row_parts.cuh"

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
#define WIDE_ON_DEVICE 1
#include "hopper.cuh"
#include "turned_codes.cuh"
#include "wide_out.cuh"
#endif

// Shared memory of a block whose ring has places of PLACE_BYTES.
template <int PLACE_BYTES>
struct WideRing {
    static constexpr int BYTES = PLACE_BYTES;
    static constexpr int STAGING_BYTES = 8 * 2 * 16 * STAGING_PITCH;
    static constexpr int ROOM = 227 * 1024 - 1024 - STAGING_BYTES - 512;
    static constexpr int STAGES = ROOM / BYTES < 12 ? ROOM / BYTES : 12;
    static constexpr int SHARED_BYTES = STAGES * BYTES + STAGING_BYTES + 512 + 1024;  // 1024: for the ring's alignment
    static_assert(STAGES >= 2);
};

template <int ROWS>
struct WideTile : WideRing<(OUTPUTS + ROWS) * TILE_BYTES> {
    static constexpr int WEIGHT_BYTES = OUTPUTS * TILE_BYTES, INPUT_BYTES = ROWS * TILE_BYTES;
    static constexpr int PARTS = ROWS > 256 ? 2 : 1, PART = ROWS / PARTS;  // rows of one wgmma and of one copy
};

#ifdef WIDE_ON_DEVICE
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
// A place in the ring and the parity of the barrier phase to wait for there.
template <int STAGES>
struct RingSlot {
    uint32_t stage, parity;

    __device__ __forceinline__ explicit RingSlot(uint32_t first_parity) : stage(0), parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Where a block's ring, staging and barriers lie in shared memory, and its share of the tiles. `inputs_there`: a barrier that is
// passed once the kernel that makes the inputs has ended.
template <typename Tile, int SPLITS>
struct WideBlock {
    uint32_t ring, staging, full, empty, inputs_there;
    int my_split, first, blocks;

    // It takes `readers` arrivals to free a place of the ring. All threads; the next kernel may start after it.
    __device__ __forceinline__ WideBlock(const unsigned char* dynamic, int readers)
        : ring((hopper::shared_address(dynamic) + 1023) & ~1023u),
          staging(ring + Tile::STAGES * Tile::BYTES),
          full(staging + Tile::STAGING_BYTES),
          empty(full + 8 * Tile::STAGES),
          inputs_there(empty + 8 * Tile::STAGES),
          my_split(blockIdx.x % SPLITS),
          first(blockIdx.x / SPLITS),
          blocks(gridDim.x / SPLITS) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < Tile::STAGES; ++i) {
                hopper::init_barrier(full + 8 * i, 1);
                hopper::init_barrier(empty + 8 * i, readers);
            }
            hopper::init_barrier(inputs_there, 1);
            hopper::publish_barriers();
        }
        __syncthreads();
        let_next_start();
    }
};

// Steps of TILE_BYTES in a split's share of k, which the number of splits divides; and k of a step.
template <WideKind KIND, int SPLITS>
__device__ __forceinline__ int wide_steps(const WideLaunch& p, const WideWork& work) {
    return p.k[work.map] / ((work.half ? 64 : 128) * (work.shared ? SPLITS : 1));
}
// All 256 threads of both warpgroups.
__device__ __forceinline__ void meet_warpgroups() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// While weights stream, a way to memory and back takes a microsecond and more. So what blocks tell each other takes as few of them, one
// after the other, as can be: one thread makes known what all have stored, and counters are put back when results are out.
__device__ __forceinline__ void add_behind_stores(int* at) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(at) : "memory");
}
__device__ __forceinline__ void wait_for_number(const int* at, int wanted) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
    } while (found < wanted);
}
// One thread of each block that has seen a number: the last of `count` puts both counters back.
__device__ __forceinline__ void put_back(int* counters, int count) {
    if (atomicAdd(counters + 1, 1) == count - 1) counters[0] = counters[1] = 0;
}

// The sums of a tile's splits, exchanged through memory: each block ends with a share of the chunks of 8 rows, in sums[0 ..],
// the splits added in their order; the last shares may be smaller, or empty, and what is behind them then means nothing. All blocks of the
// launch run at once (the caller sees to it), so waiting is safe. The counters stay as they are until put_back_splits.
template <int ROWS, int SPLITS>
constexpr int SHARE_CHUNKS = (ROWS / 8 + SPLITS - 1) / SPLITS;

template <int ROWS, int SPLITS>
__device__ __forceinline__ void add_splits(float (&sums)[ROWS / 2], const WideLaunch& p, int tile, int my_split) {
    constexpr int CHUNKS = ROWS / 8, MINE = SHARE_CHUNKS<ROWS, SPLITS>;
    constexpr int BATCH = MINE % 4 == 0 ? 4 : MINE % 3 == 0 ? 3 : MINE % 2 == 0 ? 2 : 1;
    const int thread = threadIdx.x - 128;
    float4* const partial = p.partial + static_cast<int64_t>(tile) * SPLITS * CHUNKS * 256 + thread;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        if (j / MINE == my_split) continue;
        __stcg(partial + (my_split * CHUNKS + j) * 256,
               make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
    meet_warpgroups();
    if (thread == 0) {
        add_behind_stores(p.counters + 2 * tile);
        wait_for_number(p.counters + 2 * tile, SPLITS);
    }
    meet_warpgroups();
#pragma unroll
    for (int first = 0; first < MINE; first += BATCH) {
        float4 parts[SPLITS][BATCH];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int j = 4 * (s * MINE + first + b);
                if (s == my_split) {
                    if (j < ROWS / 2) parts[s][b] = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
                } else if (SPLITS * MINE == CHUNKS || my_split * MINE + first + b < CHUNKS) {
                    parts[s][b] = __ldcg(partial + (s * CHUNKS + my_split * MINE + first + b) * 256);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float4 total = parts[0][b];
#pragma unroll
            for (int s = 1; s < SPLITS; ++s) {
                total.x += parts[s][b].x, total.y += parts[s][b].y, total.z += parts[s][b].z, total.w += parts[s][b].w;
            }
            const int j = 4 * (first + b);  // of split 0: its own, or written out above
            sums[j] = total.x, sums[j + 1] = total.y, sums[j + 2] = total.z, sums[j + 3] = total.w;
        }
    }
}

template <int SPLITS>
__device__ __forceinline__ void put_back_splits(const WideLaunch& p, int tile) {
    if (threadIdx.x == 128) put_back(p.counters + 2 * tile, SPLITS);
}

// Work whose inputs are results of this launch waits until all of them are written. All that make them have a processor
// each from the start on (the caller sees to it). `counters`: shares that are done, blocks that have seen it; zero between launches.
__device__ __forceinline__ int* late_counters(const WideLaunch& p) { return p.counters + 2 * wide_shared_tiles(p); }
// All threads of a share's warpgroups, behind its stores.
__device__ __forceinline__ void tell_early_is_done(const WideLaunch& p) {
    meet_warpgroups();
    if (threadIdx.x == 128) add_behind_stores(late_counters(p));
}
template <int SPLITS>
__device__ __forceinline__ void wait_for_early(const WideLaunch& p) {
    wait_for_number(late_counters(p), wide_shared_tiles(p) * SPLITS);
    hopper::publish_to_copies();
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

// W's first tiles, asked for at once, would stand in line before what the kernel before reads: shift_mix, which waits for memory more
// than it works. So they are asked for so many cycles apart until it has ended. Where blocks share k, the kernel before is the WKV or a product.
template <int SPLITS, WideKind KIND>
constexpr bool IS_BEHIND_SHIFT_MIX = BLOCK_SPLITS<SPLITS, KIND> == 1 && !TURNS_CODES<KIND>;
constexpr int MOST_HALVES_IN_TURN = 8;  // rows; for more it was no gain
constexpr uint32_t TILE_CYCLES = 1000;

// So long, or until the barrier's first phase is over.
__device__ __forceinline__ void wait_for_turn(uint32_t inputs_there, uint32_t cycles) {
    uint32_t begun, now, over;
    asm volatile("mov.u32 %0, %clock;" : "=r"(begun)::"memory");
    do {
        asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], 0;\nselp.u32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(inputs_there)
                     : "memory");
        asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
    } while (over == 0 && now - begun < cycles);
}

// One lane: W's tiles of all of this block's work into the ring.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_weights(const WideLaunch& p, const Block& block) {
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    const bool takes_turns = IS_BEHIND_SHIFT_MIX<SPLITS, KIND> && (HAS_CODES<KIND> || p.rows <= MOST_HALVES_IN_TURN);
    int in_turn = takes_turns ? Tile::STAGES - 1 : 0;
    for (WideTurn<KIND, SPLITS> turn(p, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p, turn.number, block.my_split);
        const CUtensorMap* map = &p.weights[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p, work), depth = work.half ? 64 : 128;
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            expect_bytes(barrier, HAS_PARTS<KIND> && work.half ? Tile::BYTES - Tile::INPUT_BYTES / 2 : Tile::BYTES);
            if (TURNS_CODES<KIND>) {  // what the L2 cache brings in with it is another block's, perhaps not at once
                copy_box(to, map, work.output, step * depth, 0, barrier, EVICT_NORMAL);
            } else if (KIND == WIDE_TURNED) {
                copy_box(to, map, 0, step * depth, work.output / 64, barrier, EVICT_FIRST);
            } else {
                copy_box(to, map, step * depth, work.output, 0, barrier, EVICT_FIRST);
            }
            slot.advance();
            if (in_turn > 0) wait_for_turn(block.inputs_there, TILE_CYCLES), --in_turn;
        }
    }
}

// One lane of another warp: x's tiles likewise, once the kernel that makes x has ended.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_inputs(const WideLaunch& p, const Block& block) {
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    const uint32_t to = block.ring + Tile::WEIGHT_BYTES;
    RingSlot<Tile::STAGES> slot(1);
    int waiting = 0;  // blocks that wait for maps of halves, once this one has
    wait_for_inputs();
    arrive(block.inputs_there);
    for (WideTurn<KIND, SPLITS> turn(p, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p, turn.number, block.my_split);
        if (IS_MIXED<KIND> && work.late && waiting == 0) wait_for_early<SPLITS>(p), waiting = turn.waiting;
        const CUtensorMap* map = &p.inputs[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p, work), depth = work.half ? 64 : 128;
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
                copy_box(to + slot.stage * Tile::BYTES + part * Tile::PART * TILE_BYTES, map, step * depth,
                         work.row_block * ROWS + part * Tile::PART, 0, block.full + 8 * slot.stage, EVICT_LAST);
            slot.advance();
        }
    }
    if (waiting > 0) put_back(late_counters(p), waiting);
}

// 64 outputs of a tile of rows more, by codes [k, n] in shared memory at `tile` and x at `input`: half of them are turned while the
// half before is multiplied, which reads its registers meanwhile: two halves, so that neither writes the other's. `release`: called when the products of the tile before are done. One group of products may still run.
template <typename Tile, bool IN_PARTS, int SUMS, typename Release>
__device__ __forceinline__ void multiply_turned(
    float (&sums)[SUMS], const TurnedCodes& codes, uint32_t tile, uint64_t input, int& add, const Release& release) {
    using namespace hopper;
    constexpr int STEPS = TILE_BYTES / TurnedCodes::STEP, TOGETHER = STEPS / 2;
    static_assert(STEPS == 2 * TOGETHER, "one group of products would run while its registers are written");
#pragma unroll
    for (int first = 0; first < STEPS; first += TOGETHER) {
        uint32_t a[TOGETHER][4];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) codes.read(a[j], tile, first + j);
        begin_products();
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part) {
                auto& mine = reinterpret_cast<float(&)[Tile::PART / 2]>(sums[part * Tile::PART / 2]);
                const uint64_t x = input + (part * Tile::PART * TILE_BYTES + (first + j) * TurnedCodes::STEP) / 16;
                multiply_registers<Tile::PART, IN_PARTS>(mine, a[j], x, add);
            }
            add = 1;
        }
        commit_products();
        wait_products<1>();
        if (first == 0) release();
    }
}
#endif

template <int ROWS, int SPLITS, WideKind KIND>
__global__ void __launch_bounds__(384, IS_LEAN<ROWS, KIND> ? 2 : 1) wide_kernel(const __grid_constant__ WideLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const WideBlock<Tile, BLOCK_SPLITS<SPLITS, KIND>> block(dynamic, TURNS_CODES<KIND> ? 8 : 2);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL, tid / 32, 0);
        if (warp == 0 && elect_lane()) {
            fetch_weights<ROWS, SPLITS, KIND>(p, block);
        } else if (warp == 1 && elect_lane()) {
            fetch_inputs<ROWS, SPLITS, KIND>(p, block);
        }
    } else {
        if constexpr (IS_LEAN<ROWS, KIND>) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        const int half = group - 1, warp = tid / 32, lane = tid % 32;
        float sums[ROWS / 2];
        const uint32_t mine = block.staging + (half * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint64_t weights_at = describe_tile(block.ring + half * (64 * TILE_BYTES));
        const uint64_t inputs_at = describe_tile(block.ring + Tile::WEIGHT_BYTES);
        const TurnedCodes codes(half * 4 + warp, lane);
        RingSlot<STAGES> slot(0);
        int add = 0;
        const auto release = [&](uint32_t barrier) {
            if constexpr (TURNS_CODES<KIND>) {  // each warp reads codes
                __syncwarp();
                if (lane == 0) arrive(barrier);
            } else {
                if (tid == 0) arrive(barrier);
            }
        };
        // 64 outputs of ROWS rows more; a step of k in shared memory from these places on.
        const auto multiply_tile = [&](uint64_t weight, uint64_t input, auto halves) {
            begin_products();
#pragma unroll
            for (int j = 0; j < TILE_BYTES / 32; ++j) {
                constexpr bool TURNED = KIND == WIDE_TURNED;
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part) {
                    auto& mine = reinterpret_cast<float(&)[Tile::PART / 2]>(sums[part * Tile::PART / 2]);
                    const uint64_t w = weight + j * (TURNED ? 16 * 128 : 32) / 16;
                    const uint64_t x = input + (part * Tile::PART * TILE_BYTES + j * 32) / 16;
                    if constexpr (halves.value) {  // beside parts: the later columns are of what lies there, and not used
                        multiply<Tile::PART, TURNED>(mine, w, x, add);
                    } else if constexpr (HAS_PARTS<KIND>) {
                        multiply_parts<ROWS>(sums, w, x, add);
                    } else {
                        multiply_fp8<Tile::PART>(mine, w, x, add);
                    }
                }
                add = 1;
            }
            commit_products();
            wait_products<1>();
        };
        for (WideTurn<KIND, SPLITS> turn(p, block); turn.has_work(); turn.advance()) {
            const WideWork work = wide_work<KIND, SPLITS>(p, turn.number, block.my_split);
            uint32_t before = 0;  // the slot whose products may still run
            const int first_output = work.output + half * 64 + warp * 16;
            const bool inside = first_output < p.n[work.map];  // the map's last tile may be narrower
            float of_output[2] = {};  // asked for now: at the end they would be waited for
            if (HAS_PARTS<KIND> && !work.half && inside) {
                const float* const scales = p.weight_scales[work.map] + first_output;
#pragma unroll
                for (int up = 0; up < 2; ++up) of_output[up] = __ldg(scales + output_of_lane<TURNS_CODES<KIND>>(lane, up));
            }
            for (int i = wide_steps<KIND, SPLITS>(p, work); i > 0; --i) {
                wait_barrier(block.full + 8 * slot.stage, slot.parity);
                const uint64_t weight = weights_at + slot.stage * (Tile::BYTES >> 4);
                const uint64_t input = inputs_at + slot.stage * (Tile::BYTES >> 4);
                if constexpr (TURNS_CODES<KIND>) {
                    multiply_turned<Tile, HAS_PARTS<KIND>>(sums, codes, block.ring + slot.stage * Tile::BYTES, input, add, [&] {
                        if (before != 0) release(before);
                    });
                    before = 0;
                } else if constexpr (HAS_CODES<KIND> && !ALL_CODES<KIND>) {
                    if (work.half) {
                        multiply_tile(weight, input, std::true_type());
                    } else {
                        multiply_tile(weight, input, std::false_type());
                    }
                } else {
                    multiply_tile(weight, input, std::bool_constant<!ALL_CODES<KIND>>());
                }
                if (before != 0) release(before);
                before = block.empty + 8 * slot.stage;
                slot.advance();
            }
            wait_products<0>();
            release(before);
            add = 0;
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");

            // A share's sums added to the others', scaled, activated and written.
            const auto finish = [&](auto splits) {
                constexpr int ALL = OUT_ROWS<ROWS, KIND>, CHUNKS = SHARE_CHUNKS<ALL, splits.value>;  // of 8 rows, that this block finishes
                auto& of_rows = reinterpret_cast<float(&)[ALL / 2]>(sums);
                if (HAS_PARTS<KIND> && !work.half) {
#pragma unroll
                    for (int i = 0; i < ALL / 2; ++i) of_rows[i] = fmaf(sums[ROWS / 2 - ALL / 2 + i], SECOND_PART, of_rows[i]);
                    scale_outputs<ALL / 8>(of_rows, of_output);
                }
                if constexpr (HAS_PARTS<KIND> && ALL_CODES<KIND>) {
                    if (p.to_shares) {
                        const int n = p.n[work.map];
                        const WideOut out = {nullptr, nullptr, n, 0, p.rows, nullptr, nullptr};
                        float* const share = reinterpret_cast<float*>(p.y[work.map]) + static_cast<int64_t>(work.split) * p.rows * n;
                        if (inside) write_floats<ALL / 8, TURNS_CODES<KIND>>(of_rows, share + first_output, out, lane);
                        return;
                    }
                }
                if constexpr (splits.value > 1) add_splits<ALL, splits.value>(of_rows, p, work.exchange, work.split);
                if (!inside) return;
                const int first_row = work.row_block * ALL + work.split * CHUNKS * 8;
                const int rows = min(p.rows, (work.row_block + 1) * ALL);
                WideOut out = {p.y[work.map] + first_output, nullptr, p.n[work.map], first_row, rows, nullptr, nullptr};
                if (HAS_PARTS<KIND> && p.parts[work.map] != nullptr) out.parts = p.parts[work.map] + first_output;
                if (!HAS_PARTS<KIND> && !work.half) {
                    out.weight_scales = p.weight_scales[work.map] + first_output, out.input_scales = p.input_scales[work.map];
                    scale_sums<CHUNKS, TURNS_CODES<KIND>>(of_rows, out, lane);
                }
                activate_sums<4 * CHUNKS>(of_rows, p.activation[work.map]);
                if constexpr (HAS_PARTS<KIND>) {
                    if (out.parts != nullptr) {
                        write_out<CHUNKS, true, TURNS_CODES<KIND>>(of_rows, out, mine, lane);
                        return;
                    }
                }
                if constexpr (KIND == WIDE_FP8_TO_FLOATS || KIND == WIDE_TO_FLOATS) {
                    write_floats<CHUNKS, TURNS_CODES<KIND>>(of_rows, reinterpret_cast<float*>(p.y[work.map]) + first_output, out, lane);
                } else {
                    write_out<CHUNKS, false, TURNS_CODES<KIND>>(of_rows, out, mine, lane);
                }
            };
            if (work.shared) {
                finish(std::integral_constant<int, SPLITS>());
                if (IS_MIXED<KIND> && p.early < p.count) tell_early_is_done(p);
                if constexpr (SPLITS > 1) {
                    const bool has_exchanged = !(HAS_PARTS<KIND> && ALL_CODES<KIND>) || !p.to_shares;
                    if (has_exchanged) put_back_splits<SPLITS>(p, work.exchange);
                }
            } else {
                finish(std::integral_constant<int, 1>());
            }
        }
    }
#endif
}

// As many blocks as run at once and have work; all of them at once when k is split. `raised`: on which devices the kernel
// may have its shared memory.
template <typename Params>
int launch_tiles(
    void (*kernel)(Params), bool (&raised)[MAX_DEVICES], int shared_bytes, int tiles, int splits, const Params& p, void* stream) {
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    const int units = tiles * splits, room = this_machine().processors;
    if (splits > 1 && units > room) return static_cast<int>(cudaErrorInvalidValue);
    launch_with_shared(kernel, dim3(min(units, room)), 384, shared_bytes, stream, p);
    return launch_result();
}

template <int ROWS, int SPLITS, WideKind KIND>
int launch_wide(const WideLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const int works = wide_works<KIND, SPLITS>(p);
    const int at_once = works - wide_late_tiles(p);
    if (IS_MIXED<KIND> && (p.row_blocks > 1 || (SPLITS > 1 && at_once > this_machine().processors))) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int TOGETHER = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(wide_kernel<ROWS, SPLITS, KIND>, raised, WideTile<ROWS>::SHARED_BYTES, works, TOGETHER, p, stream);
}
