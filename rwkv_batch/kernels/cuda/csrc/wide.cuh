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

#include "wide_exchange.cuh"
#include "wide_maps.cuh"
#include "wide_ring.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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

template <int ROWS, int SPLITS, WideKind KIND>
int launch_wide(const WideLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const int works = wide_works<KIND, SPLITS>(p);
    const int at_once = works - wide_late_tiles(p);
    if (IS_MIXED<KIND> && (p.row_blocks > 1 || (SPLITS > 1 && at_once > this_machine().processors))) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int TOGETHER = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(wide_kernel<ROWS, SPLITS, KIND>, raised, WideTile<ROWS>::SHARED_BYTES, works, TOGETHER, p, stream);
}
