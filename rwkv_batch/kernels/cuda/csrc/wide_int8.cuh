// y = act(x @ W^T) for up to 64 rows in two bytes (row_bytes.cuh) and W of int8 (quant.cuh), several maps in one launch and maps of
// halves beside them, on Hopper's tensor cores.
//
// As wide.cuh has rows in two parts: a block makes 128 outputs of all rows; two warps keep a ring of tiles (128 of W, ROWS of x in
// both bytes, 128 of k each) filled by bulk copies; two warpgroups multiply 64 outputs each. Codes and bytes are multiplied as they
// are, into whole numbers, which are exact. 128 inputs have a scale of W and one of x, or two: after so many the sums of both bytes
// are taken out of the tensor cores, made one number, and added up in fp32.
//
// A map: W u8 [n, k] with 128 added, scales [k / 128][n] fp16; n a multiple of 16 (128 where y is in bytes), k of 128 times the
// splits; x [rows, 2, k] with its scales; y [rows, n] fp16, or likewise in bytes, or what each share of k comes to in fp32. Or W [k, n]
// of the only map (WIDE_PARTS_TURNED; turned_codes.cuh), x with a scale for 128 inputs, y not in bytes. Bytes: W
// and scales once; x 2k * rows per tile of outputs, from the L2 cache. Shared memory besides wide.cuh's: scales of a place of the
// ring; what the warps of a tile tell each other where its results are made bytes.
#pragma once

#include "wide_int8_stages.cuh"
#include "wide_maps.cuh"

struct Int8Launch {
    WideLaunch wide;  // parts: y of maps whose results are in bytes
    const __half* weight_scales[MAX_WIDE_MAPS];  // null: a map of halves
    const float2* input_scales[MAX_WIDE_MAPS];
    float2* y_scales[MAX_WIDE_MAPS];
    int pitch;   // of scales of rows
    int groups;  // of 128 inputs of a row, that have a scale: 1 or 2
    int to_shares;  // y is fp32 [SPLITS, rows, n], what each share of k comes to; the next kernel adds them up
};

// A place of the ring; scales of x [groups][pitch], then those of W [128].
template <int ROWS>
struct Int8Tile : WideRing<(OUTPUTS + 2 * ROWS) * TILE_BYTES + (ROWS <= 32 ? 1024 : 2048)> {
    using Ring = WideRing<(OUTPUTS + 2 * ROWS) * TILE_BYTES + (ROWS <= 32 ? 1024 : 2048)>;
    static constexpr int WEIGHT_BYTES = OUTPUTS * TILE_BYTES, INPUT_BYTES = 2 * ROWS * TILE_BYTES;
    static constexpr int SCALES_AT = WEIGHT_BYTES + INPUT_BYTES, WEIGHT_SCALES_AT = SCALES_AT + 2 * ROWS * 8;
    static constexpr int TOLD_BYTES = 8 * ROWS * 6;  // each warp's largest values, each warp's sums; two rooms, which take turns
    static constexpr int SHARED_BYTES = Ring::SHARED_BYTES + 2 * TOLD_BYTES;
    static_assert(WEIGHT_SCALES_AT + OUTPUTS * 2 <= Ring::BYTES && SHARED_BYTES <= 227 * 1024);
};

// Few enough registers of up to 32 rows that blocks of shift_mix come up beside it: 96 a thread, as many as 640 threads can have, which is
// how that is said; 120 of those that multiply.
template <int ROWS>
constexpr bool IS_LEAN_INT8 = ROWS <= 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int ROWS>
constexpr uint32_t INT8_TILE_CYCLES = ROWS <= 16 ? TILE_CYCLES : 2000;  // as measured (docs/notebook.md)

// One lane: W's tiles and scales of all of this block's work into the ring.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_int8(const Int8Launch& p, const Block& block) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    int in_turn = IS_BEHIND_SHIFT_MIX<SPLITS, KIND> ? Tile::STAGES - 1 : 0;
    for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
        const CUtensorMap* map = &p.wide.weights[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p.wide, work), n = p.wide.n[work.map];
        const uint32_t scale_bytes = min(OUTPUTS, n - work.output) * sizeof(__half);
        const uint32_t bytes = work.half ? Tile::WEIGHT_BYTES + ROWS * TILE_BYTES
                                         : Tile::WEIGHT_BYTES + Tile::INPUT_BYTES + scale_bytes + p.groups * p.pitch * sizeof(float2);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            expect_bytes(barrier, bytes);
            const int input = step * (work.half ? 64 : 128);
            copy_box(to, map, TURNS_CODES<KIND> ? work.output : input, TURNS_CODES<KIND> ? input : work.output, 0, barrier, EVICT_FIRST);
            if (!work.half) {
                const __half* const scales = p.weight_scales[work.map] + static_cast<int64_t>(step) * n + work.output;
                copy_line(to + Tile::WEIGHT_SCALES_AT, scales, scale_bytes, barrier);
            }
            slot.advance();
            if (in_turn > 0) wait_for_turn(block.inputs_there, INT8_TILE_CYCLES<ROWS>), --in_turn;
        }
    }
}

// One lane of another warp: x's likewise, once the kernel that makes x has ended.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_row_bytes(const Int8Launch& p, const Block& block) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    int waiting = 0;  // blocks that wait for maps of halves, once this one has
    wait_for_inputs();
    arrive(block.inputs_there);
    for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
        if (IS_MIXED<KIND> && work.late && waiting == 0) {
            waiting = turn.waiting;
            wait_for_early<SPLITS>(p.wide);
        }
        const CUtensorMap* map = &p.wide.inputs[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p.wide, work);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            copy_box(to + Tile::WEIGHT_BYTES, map, step * (work.half ? 64 : 128), 0, 0, barrier, EVICT_LAST);
            if (!work.half) {
                const float2* const scales = p.input_scales[work.map] + step * p.groups * p.pitch;
                copy_line(to + Tile::SCALES_AT, scales, p.groups * p.pitch * sizeof(float2), barrier);
            }
            slot.advance();
        }
    }
    if (waiting > 0) put_back(late_counters(p.wide), waiting);
}
#endif

template <int ROWS, int SPLITS, WideKind KIND>
__global__ void __launch_bounds__(IS_LEAN_INT8<ROWS> ? 640 : 384, 1) wide_int8_kernel(const __grid_constant__ Int8Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const WideBlock<Tile, BLOCK_SPLITS<SPLITS, KIND>> block(dynamic, 8);  // the warps that read scales
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL, tid / 32, 0);
        if (warp == 0 && elect_lane()) {
            fetch_int8<ROWS, SPLITS, KIND>(p, block);
        } else if (warp == 1 && elect_lane()) {
            fetch_row_bytes<ROWS, SPLITS, KIND>(p, block);
        }
    } else {
        if constexpr (IS_LEAN_INT8<ROWS>) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 120;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        constexpr bool TURNED = TURNS_CODES<KIND>;
        const int half = group - 1, warp = tid / 32, lane = tid % 32, t = lane & 3;
        float sums[ROWS / 2];
        uint32_t told_room = 0;
        const uint32_t mine = block.staging + (half * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint32_t told = block.full + 512;
        // Kept in registers: nvcc makes them anew in every stage otherwise.
        Int8Places at = {static_cast<uint32_t>(describe_tile(block.ring + half * (64 * TILE_BYTES))),
                         static_cast<uint32_t>(describe_tile(block.ring + Tile::WEIGHT_BYTES)), block.ring + Tile::SCALES_AT + 16 * t,
                         block.ring + Tile::WEIGHT_SCALES_AT + (half * 64 + warp * 16 + output_of_lane<TURNED>(lane, 0)) * 2, block.full};
        TurnedCodes codes(half * 4 + warp, lane);
        if (TURNED) codes.keep();
        asm volatile("" : "+r"(at.weights), "+r"(at.inputs), "+r"(at.of_rows), "+r"(at.of_outputs), "+r"(at.full));
        RingSlot<STAGES> slot(0);
        const auto settle = [&] {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
        };
        for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
            const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
            int i = wide_steps<KIND, SPLITS>(p.wide, work);
            if (IS_MIXED<KIND> && work.half) {
                uint32_t before = 0;  // of the place whose products may still run
                settle();
                for (; i > 0; --i) {
                    wait_barrier(at.full + 8 * slot.stage, slot.parity);
                    const uint32_t weight = at.weights + slot.stage * (Tile::BYTES >> 4), input = at.inputs + slot.stage * (Tile::BYTES >> 4);
                    begin_products();
#pragma unroll
                    for (int j = 0; j < 4; ++j) multiply<ROWS, false>(sums, describe_tile(0) | (weight + j * 2), describe_tile(0) | (input + j * 2), 1);
                    commit_products();
                    wait_products<1>();
                    if (before != 0) release_place(before, lane);
                    before = at.full + 8 * (STAGES + slot.stage);
                    slot.advance();
                }
                wait_products<0>();
                settle();
                release_place(before, lane);
            }
            const auto add = [&](auto groups, auto count) {
#pragma unroll 1
                for (; i >= count.value; i -= count.value) {
                    add_stages<ROWS, groups.value, count.value, TURNED, Tile>(sums, at, slot, codes, block.ring, p.pitch, lane);
                }
            };
            constexpr std::integral_constant<int, 1> ONE;
            constexpr std::integral_constant<int, 2> TWO;
            if constexpr (TURNED) {
                add(ONE, ONE);
            } else if (p.groups == 1) {
                add(ONE, TWO);
                add(ONE, ONE);
            } else {
                add(TWO, ONE);
            }
            // A share's sums added to the others', scaled, activated and written.
            const auto finish = [&](auto splits) {
                constexpr int CHUNKS = SHARE_CHUNKS<ROWS, splits.value>;  // of 8 rows, that this block finishes
                const int first_output = work.output + half * 64 + warp * 16, n = p.wide.n[work.map];
                if (!work.half) {
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) sums[i] *= code_scale<INT8>();
                }
                if constexpr (ALL_CODES<KIND>) {
                    if (p.to_shares) {
                        const WideOut out = {nullptr, nullptr, n, 0, p.wide.rows, nullptr, nullptr};
                        float* const share = reinterpret_cast<float*>(p.wide.y[work.map]) + static_cast<int64_t>(work.split) * p.wide.rows * n;
                        if (first_output < n) write_floats<ROWS / 8, TURNED>(sums, share + first_output, out, lane);
                        return;
                    }
                }
                if constexpr (splits.value > 1) add_splits<ROWS, splits.value>(sums, p.wide, work.exchange, work.split);
                if (first_output >= n) return;  // the map's last tile may be narrower, but for results in bytes
                WideOut out = {p.wide.y[work.map] + first_output, nullptr, n, work.split * CHUNKS * 8, p.wide.rows, nullptr, nullptr};
                activate_sums<4 * CHUNKS>(sums, p.wide.activation[work.map]);
                if (TURNED || p.wide.parts[work.map] == nullptr) {
                    write_out<CHUNKS, false, TURNED>(sums, out, mine, lane);
                    return;
                }
                if constexpr (!TURNED) {
                    out.parts = p.wide.parts[work.map] + first_output;
                    float2* const items = p.y_scales[work.map] + static_cast<int64_t>(work.output / BYTES_GROUP) * p.pitch;
                    write_bytes<CHUNKS>(sums, out, items, mine, told + told_room), told_room ^= Tile::TOLD_BYTES;
                }
            };
            if (work.shared) {
                finish(std::integral_constant<int, SPLITS>());
                if (IS_MIXED<KIND> && p.wide.early < p.wide.count) tell_early_is_done(p.wide);
                if constexpr (SPLITS > 1) {
                    if (!p.to_shares) put_back_splits<SPLITS>(p.wide, work.exchange);
                }
            } else {
                finish(std::integral_constant<int, 1>());
            }
        }
    }
#endif
}

// What the caller hands over; mirrored in Python.
struct WideInt8Map {
    const void* weight;         // [n, k] u8, or [k, n], or [n, k] fp16
    const void* x;              // [rows, 2, k] s8, or [rows, k] fp16
    const void* weight_scales;  // [k / 128][n] fp16; null: halves
    const void* input_scales;   // [k / 128 * groups][pitch] pairs of fp32; null likewise
    void* y;                    // [rows, n] fp16, or [rows, 2, n] s8, or fp32 [splits, rows, n]
    void* y_scales;             // of these bytes [n / 128][pitch] pairs of fp32
    int n, k;
    int activation;
    int unused;
};

struct WideInt8Args {
    WideInt8Map maps[MAX_WIDE_MAPS];  // those in codes first, then those of halves
    int count;
    int late;  // of the last ones the inputs are results of the halves before them
    int rows;
    int tile_rows;
    int splits;  // where there are maps of halves: of these alone, of none that is late
    int pitch;   // of scales of rows
    int groups;  // of 128 inputs: 1 or 2
    int to_shares;  // y of the only map is fp32, whose sum over the splits is meant
    int turned;     // the only map's weight is [k, n]
    void* partial;  // see WideLaunch
    void* counters;
};

// The launch with its tensor maps; false: there can be none.
inline bool describe_int8(Int8Launch& p, const WideInt8Args& args) {
    if (encode_tiled() == nullptr || args.pitch % 2 != 0 || args.pitch < args.rows || args.pitch > args.tile_rows) return false;
    describe_maps(p.wide, args);
    p.wide.coded = 0, p.wide.early = args.count - args.late;
    p.pitch = args.pitch, p.groups = args.groups, p.to_shares = args.to_shares;
    for (int i = 0; i < args.count; ++i) {
        const WideInt8Map& m = args.maps[i];
        const bool half = m.weight_scales == nullptr;
        p.wide.coded += !half;
        p.wide.parts[i] = m.y_scales == nullptr ? nullptr : static_cast<uint8_t*>(m.y);
        const bool described = half ? describe_rows(&p.wide.inputs[i], m.x, HALVES, args.rows, m.k, args.tile_rows)
                                    : describe(&p.wide.inputs[i], m.x, BYTES, args.rows, m.k, 2 * m.k, 2, args.tile_rows, 2, TILE_BYTES, m.k);
        const bool weights = args.turned ? describe_turned(&p.wide.weights[i], m.weight, m.n, m.k)
                                         : describe_weights(&p.wide.weights[i], m.weight, half ? HALVES : BYTES, m.n, m.k);
        if (!described || !weights) return false;
        p.weight_scales[i] = static_cast<const __half*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float2*>(m.input_scales);
        p.y_scales[i] = static_cast<float2*>(m.y_scales);
    }
    return true;
}

template <int ROWS, int SPLITS, WideKind KIND>
int launch_int8(const Int8Launch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const WideLaunch& wide = p.wide;
    const int works = wide_works<KIND, SPLITS>(wide), at_once = works - wide_late_tiles(wide);
    if (IS_MIXED<KIND> && SPLITS > 1 && at_once > this_machine().processors) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int TOGETHER = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(wide_int8_kernel<ROWS, SPLITS, KIND>, raised, Int8Tile<ROWS>::SHARED_BYTES, works, TOGETHER, p, stream);
}
