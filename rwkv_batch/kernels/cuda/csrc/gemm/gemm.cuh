// Grouped GEMM on Hopper: y = act(x @ W^T) for several weights in one launch.
//
// in     W              [n, k]     fp16 or e4m3; TMA, evict first. Transposed kinds: [k, n]
//        x              [rows, k]  fp16 or e4m3; or two-part [rows, 2, k] e5m2 (rows_two_part.cuh)
//        weight_scales  [n]        fp32, 8 bits only
//        input_scales   [rows]     fp32, 8 bits only; two-part rows have none
//        W8A8: W and x s8, ratios as in ../w8a8/w8a8.cuh
//
// out    y              [rows, n]  fp16 or fp32; two-part kinds also [rows, 2, n] e5m2
//                                  or split-K partials [splits, rows, n] fp32
//
// Tile: 128 outputs x ROWS rows. W is operand A and x operand B, so that ROWS may be any multiple of 16 up to 256 (320:
// two wgmmas of 160). Two-part rows: ROWS / 2 rows; columns 0 .. ROWS / 2 - 1 are the first parts.
// Prologue: W's first stages are loaded before the previous kernel ends (programmatic dependent launch).
// Transposed 8-bit W [k, n]: ldmatrix transposes operand A into registers (transposed_operand.cuh). One GEMM per
// launch.
//
// Mixed kinds (8-bit and fp16 GEMMs in one launch) use the SMs that the 8-bit tiles leave idle:
//   GEMMs 0 .. num_full - 1               8 bits, one CTA per tile
//   GEMMs num_full .. num_independent - 1 fp16, SPLITS CTAs per tile
//   the others                            fp16, their inputs are outputs of the second group; one CTA per tile
//
// Grid: persistent, at most one CTA per SM; CTAs take tiles in turn. If there are fewer tiles than SMs, SPLITS CTAs
// share a tile's k and exchange partials through global memory (gemm_split_k.cuh). A cluster would not do: an H200 has
// room for 30 clusters of four CTAs, not 33.
// Block: 384 threads. Warpgroup 0 produces: one warp loads W by TMA, one loads x. Warpgroups 1 and 2 multiply 64
// outputs each.
// Shared memory: up to 227 KB; STAGES x (W [128] + x [ROWS]) rows of 128 bytes, 128-byte swizzle; 8 warps x 2 x 16 rows
// of 48 bytes to stage the output; a full and an empty mbarrier per stage.
// Bound: memory up to some 200 rows (fp16), then tensor cores. W is read once; x per tile of outputs, from L2; partials
// 512 * ROWS bytes per split, twice, from L2. Share of 4.8 TB/s (H200, ffn.key [16,384, 4,096]): fp16 8 rows 87 %, 64
// rows 85 %; two-part rows, fp8, 8 rows 71 %, 64 rows 61 %. Share of the tensor cores (989 TFLOP/s fp16, 1,979 fp8):
// fp16 256 rows 67 %; fp8 320 rows 58 %, ffn.value 960 rows 82 %, 4,096 rows 86 %.
// Made for: n % 16 == 0 (fp16 transposed: 64), k a multiple of splits * 64 (fp16) or splits * 128 (8 bits).
#pragma once

#include "gemm_split_k.cuh"
#include "gemm_launch.cuh"
#include "gemm_ring.cuh"
#include "gemm_w8a8_mainloop.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Producer of W: one lane.
template <int ROWS, int SPLITS, GemmKind KIND, typename Cta>
__device__ __forceinline__ void produce_weights(const GemmLaunch& p, const Cta& cta) {
    using namespace hopper;
    using Tile = GemmTile<ROWS, KIND>;
    PipelineState<Tile::STAGES> pipe(1);
    const bool throttles = FOLLOWS_SHIFT_MIX<SPLITS, KIND> && (HAS_QUANTISED<KIND> || p.rows <= MAX_THROTTLED_FP16_ROWS);
    int throttled = throttles ? Tile::STAGES - 1 : 0;
    for (TileScheduler<KIND, SPLITS> scheduler(p, cta); scheduler.has_work(); scheduler.advance()) {
        const WorkTile work = work_tile<KIND, SPLITS>(p, scheduler.index, cta.split_index);
        const CUtensorMap* tensor_map = &p.weights[work.gemm];
        const int steps = num_k_steps<KIND, SPLITS>(p, work), depth = work.is_fp16 ? 64 : 128;
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
            const uint32_t barrier = cta.full + 8 * pipe.stage, to = cta.ring + pipe.stage * Tile::BYTES;
            mbarrier_expect_tx(barrier, HAS_TWO_PART<KIND> && work.is_fp16 ? Tile::BYTES - Tile::INPUT_BYTES / 2 : Tile::BYTES);
            if (IS_TRANSPOSED_8BIT<KIND>) {  // the L2 sector next to it belongs to another CTA
                tma_load(to, tensor_map, work.output, step * depth, 0, barrier, EVICT_NORMAL);
            } else if (KIND == GEMM_FP16_TRANSPOSED) {
                tma_load(to, tensor_map, 0, step * depth, work.output / 64, barrier, EVICT_FIRST);
            } else {
                tma_load(to, tensor_map, step * depth, work.output, 0, barrier, EVICT_FIRST);
            }
            pipe.advance();
            if (throttled > 0) throttle(cta.inputs_ready, THROTTLE_CYCLES), --throttled;
        }
    }
}

// Producer of x: one lane of another warp. Waits for the previous kernel.
template <int ROWS, int SPLITS, GemmKind KIND, typename Cta>
__device__ __forceinline__ void produce_inputs(const GemmLaunch& p, const Cta& cta) {
    using namespace hopper;
    using Tile = GemmTile<ROWS, KIND>;
    const uint32_t to = cta.ring + Tile::WEIGHT_BYTES;
    PipelineState<Tile::STAGES> pipe(1);
    int num_waiting = 0;  // CTAs that wait for dependencies; set once this one has waited
    wait_for_previous_kernel();
    arrive(cta.inputs_ready);
    for (TileScheduler<KIND, SPLITS> scheduler(p, cta); scheduler.has_work(); scheduler.advance()) {
        const WorkTile work = work_tile<KIND, SPLITS>(p, scheduler.index, cta.split_index);
        if (IS_MIXED<KIND> && work.is_dependent && num_waiting == 0) wait_for_dependencies<SPLITS>(p), num_waiting = scheduler.num_waiting;
        const CUtensorMap* tensor_map = &p.inputs[work.gemm];
        const int steps = num_k_steps<KIND, SPLITS>(p, work), depth = work.is_fp16 ? 64 : 128;
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
#pragma unroll
            for (int half = 0; half < Tile::NUM_WGMMA; ++half)
                tma_load(to + pipe.stage * Tile::BYTES + half * Tile::WGMMA_N * TILE_K_BYTES, tensor_map, step * depth,
                         work.row_block * ROWS + half * Tile::WGMMA_N, 0, cta.full + 8 * pipe.stage, EVICT_LAST);
            pipe.advance();
        }
    }
    if (num_waiting > 0) reset_counters(dependency_counters(p), num_waiting);
}

// Multiplies 64 outputs by one stage of a transposed 8-bit tile. Half of operand A is transposed while wgmma reads the
// other half from registers. `release` is called once the previous stage's wgmmas are done. One group may still run.
template <typename Tile, bool TWO_PART, int SUMS, typename Release>
__device__ __forceinline__ void multiply_transposed(
    float (&sums)[SUMS], const TransposedOperand& operand, uint32_t tile, uint64_t input, int& add, const Release& release) {
    using namespace hopper;
    constexpr int STEPS = TILE_K_BYTES / TransposedOperand::STEP, CTAS_PER_TILE = STEPS / 2;
    static_assert(STEPS == 2 * CTAS_PER_TILE, "one group of products would run while its registers are written");
#pragma unroll
    for (int first = 0; first < STEPS; first += CTAS_PER_TILE) {
        uint32_t a[CTAS_PER_TILE][4];
#pragma unroll
        for (int j = 0; j < CTAS_PER_TILE; ++j) operand.read(a[j], tile, first + j);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < CTAS_PER_TILE; ++j) {
#pragma unroll
            for (int half = 0; half < Tile::NUM_WGMMA; ++half) {
                auto& mine = reinterpret_cast<float(&)[Tile::WGMMA_N / 2]>(sums[half * Tile::WGMMA_N / 2]);
                const uint64_t x = input + (half * Tile::WGMMA_N * TILE_K_BYTES + (first + j) * TransposedOperand::STEP) / 16;
                wgmma_rs<Tile::WGMMA_N, TWO_PART>(mine, a[j], x, add);
            }
            add = 1;
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (first == 0) release();
    }
}
#endif

template <int ROWS, int SPLITS, GemmKind KIND>
__global__ void __launch_bounds__(384, IS_LEAN<ROWS, KIND> ? 2 : 1) gemm_kernel(const __grid_constant__ GemmLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = GemmTile<ROWS, KIND>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const GemmCta<Tile, CTA_SPLITS<SPLITS, KIND>> cta(dynamic, IS_TRANSPOSED_8BIT<KIND> ? 8 : 2);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL_MASK, tid / 32, 0);
        if (warp == 0 && elect_one()) {
            produce_weights<ROWS, SPLITS, KIND>(p, cta);
        } else if (warp == 1 && elect_one()) {
            produce_inputs<ROWS, SPLITS, KIND>(p, cta);
        }
    } else {
        if constexpr (IS_LEAN<ROWS, KIND>) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        const int warpgroup = group - 1, warp = tid / 32, lane = tid % 32;
        float sums[ROWS / 2];
        const uint32_t mine = cta.staging + (warpgroup * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint64_t weights_at = smem_descriptor(cta.ring + warpgroup * (64 * TILE_K_BYTES));
        const uint64_t inputs_at = smem_descriptor(cta.ring + Tile::WEIGHT_BYTES);
        const TransposedOperand operand(warpgroup * 4 + warp, lane);
        PipelineState<STAGES> pipe(0);
        int add = 0;
        const auto release = [&](uint32_t barrier) {
            if constexpr (IS_TRANSPOSED_8BIT<KIND>) {  // every warp reads A itself
                __syncwarp();
                if (lane == 0) arrive(barrier);
            } else {
                if (tid == 0) arrive(barrier);
            }
        };
        // Multiplies 64 outputs by one stage.
        const auto multiply_tile = [&](uint64_t weight, uint64_t input, auto is_fp16) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < TILE_K_BYTES / 32; ++j) {
                constexpr bool TRANSPOSED = KIND == GEMM_FP16_TRANSPOSED;
#pragma unroll
                for (int half = 0; half < Tile::NUM_WGMMA; ++half) {
                    auto& mine = reinterpret_cast<float(&)[Tile::WGMMA_N / 2]>(sums[half * Tile::WGMMA_N / 2]);
                    const uint64_t w = weight + j * (TRANSPOSED ? 16 * 128 : 32) / 16;
                    const uint64_t x = input + (half * Tile::WGMMA_N * TILE_K_BYTES + j * 32) / 16;
                    if constexpr (is_fp16.value) {  // in a two-part launch, the columns of second parts are computed but not used
                        wgmma_fp16<Tile::WGMMA_N, TRANSPOSED>(mine, w, x, add);
                    } else if constexpr (HAS_TWO_PART<KIND>) {
                        wgmma_two_part<ROWS>(sums, w, x, add);
                    } else {
                        wgmma_fp8<Tile::WGMMA_N>(mine, w, x, add);
                    }
                }
                add = 1;
            }
            wgmma_commit();
            wgmma_wait<1>();
        };
        for (TileScheduler<KIND, SPLITS> scheduler(p, cta); scheduler.has_work(); scheduler.advance()) {
            const WorkTile work = work_tile<KIND, SPLITS>(p, scheduler.index, cta.split_index);
            uint32_t before = 0;  // empty barrier of the stage whose wgmmas may still run
            const int first_output = work.output + warpgroup * 64 + warp * 16;
            const bool inside = first_output < p.n[work.gemm];  // the last tile may be narrower
            float of_output[2] = {};  // loaded early: at the end the CTA would wait for it
            if (HAS_TWO_PART<KIND> && !work.is_fp16 && inside) {
                const float* const scales = p.weight_scales[work.gemm] + first_output;
#pragma unroll
                for (int up = 0; up < 2; ++up) of_output[up] = __ldg(scales + output_of_lane<IS_TRANSPOSED_8BIT<KIND>>(lane, up));
            }
            const auto multiply_work = [&] {
                if constexpr (HAS_INT8<KIND>) {  // else they would be kept while the s32 sums are in registers
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
                }
                for (int i = num_k_steps<KIND, SPLITS>(p, work); i > 0; --i) {
                    mbarrier_wait(cta.full + 8 * pipe.stage, pipe.parity);
                    const uint64_t weight = weights_at + pipe.stage * (Tile::BYTES >> 4);
                    const uint64_t input = inputs_at + pipe.stage * (Tile::BYTES >> 4);
                    if constexpr (IS_TRANSPOSED_8BIT<KIND>) {
                        multiply_transposed<Tile, HAS_TWO_PART<KIND>>(sums, operand, cta.ring + pipe.stage * Tile::BYTES, input, add, [&] {
                            if (before != 0) release(before);
                        });
                        before = 0;
                    } else if constexpr (HAS_QUANTISED<KIND> && !ALL_QUANTISED<KIND> && !HAS_INT8<KIND>) {
                        if (work.is_fp16) {
                            multiply_tile(weight, input, std::true_type());
                        } else {
                            multiply_tile(weight, input, std::false_type());
                        }
                    } else {
                        multiply_tile(weight, input, std::bool_constant<!ALL_QUANTISED<KIND>>());
                    }
                    if (before != 0) release(before);
                    before = cta.empty + 8 * pipe.stage;
                    pipe.advance();
                }
                wgmma_wait<0>();
                release(before);
                add = 0;
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
            };
            if constexpr (HAS_INT8<KIND>) {
                if (work.is_fp16) {
                    multiply_work();
                } else {
                    multiply_w8a8_tile<Tile>(sums, p, cta, pipe, work.gemm, first_output, inside, num_k_steps<KIND, SPLITS>(p, work), warpgroup);
                }
            } else {
                multiply_work();
            }

            // Epilogue: reduce splits, scale, activate, store.
            const auto finish = [&](auto splits) {
                constexpr int ALL = OUT_ROWS<ROWS, KIND>, CHUNKS = SPLIT_CHUNKS<ALL, splits.value>;  // of 8 rows, that this CTA stores
                auto& of_rows = reinterpret_cast<float(&)[ALL / 2]>(sums);
                if (HAS_TWO_PART<KIND> && !work.is_fp16) {
#pragma unroll
                    for (int i = 0; i < ALL / 2; ++i) of_rows[i] = fmaf(sums[ROWS / 2 - ALL / 2 + i], SECOND_PART_SCALE, of_rows[i]);
                    scale_outputs<ALL / 8>(of_rows, of_output);
                }
                if constexpr (HAS_TWO_PART<KIND> && ALL_QUANTISED<KIND>) {
                    if (p.to_partials) {
                        const int n = p.n[work.gemm];
                        const WarpOutput out = {nullptr, nullptr, n, 0, p.rows, nullptr, nullptr};
                        float* const split_y = reinterpret_cast<float*>(p.y[work.gemm]) + static_cast<int64_t>(work.split) * p.rows * n;
                        if (inside) write_floats<ALL / 8, IS_TRANSPOSED_8BIT<KIND>>(of_rows, split_y + first_output, out, lane);
                        return;
                    }
                }
                if constexpr (splits.value > 1) reduce_splits<ALL, splits.value>(of_rows, p, work.workspace_index, work.split);
                if (!inside) return;
                const int first_row = work.row_block * ALL + work.split * CHUNKS * 8;
                const int rows = min(p.rows, (work.row_block + 1) * ALL);
                WarpOutput out = {p.y[work.gemm] + first_output, nullptr, p.n[work.gemm], first_row, rows, nullptr, nullptr};
                if (HAS_TWO_PART<KIND> && p.y_two_part[work.gemm] != nullptr) out.two_part = p.y_two_part[work.gemm] + first_output;
                if (!HAS_TWO_PART<KIND> && !HAS_INT8<KIND> && !work.is_fp16) {
                    out.weight_scales = p.weight_scales[work.gemm] + first_output, out.input_scales = p.input_scales[work.gemm];
                    scale_sums<CHUNKS, IS_TRANSPOSED_8BIT<KIND>>(of_rows, out, lane);
                }
                activate_sums<4 * CHUNKS>(of_rows, p.activation[work.gemm]);
                if constexpr (HAS_TWO_PART<KIND>) {
                    if (out.two_part != nullptr) {
                        write_out<CHUNKS, true, IS_TRANSPOSED_8BIT<KIND>>(of_rows, out, mine, lane);
                        return;
                    }
                }
                if constexpr (KIND == GEMM_FP8_TO_FP32 || KIND == GEMM_FP16_TO_FP32) {
                    write_floats<CHUNKS, IS_TRANSPOSED_8BIT<KIND>>(of_rows, reinterpret_cast<float*>(p.y[work.gemm]) + first_output, out, lane);
                } else {
                    write_out<CHUNKS, false, IS_TRANSPOSED_8BIT<KIND>>(of_rows, out, mine, lane);
                }
            };
            if (work.is_split) {
                finish(std::integral_constant<int, SPLITS>());
                if (IS_MIXED<KIND> && p.num_independent < p.count) signal_dependents(p);
                if constexpr (SPLITS > 1) {
                    const bool used_split_counters = !(HAS_TWO_PART<KIND> && ALL_QUANTISED<KIND>) || !p.to_partials;
                    if (used_split_counters) reset_split_counters<SPLITS>(p, work.workspace_index);
                }
            } else {
                finish(std::integral_constant<int, 1>());
            }
        }
    }
#endif
}

template <int ROWS, int SPLITS, GemmKind KIND>
int launch_gemm(const GemmLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const int num_tiles = num_work_tiles<KIND, SPLITS>(p);
    const int num_resident = num_tiles - num_dependent_tiles(p);
    if (IS_MIXED<KIND> && (p.row_blocks > 1 || (SPLITS > 1 && num_resident > device_info().num_sms))) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int CTAS_PER_TILE = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(gemm_kernel<ROWS, SPLITS, KIND>, raised, GemmTile<ROWS, KIND>::SHARED_BYTES, num_tiles, CTAS_PER_TILE, p, stream);
}
