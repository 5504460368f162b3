// Grouped GEMM on Hopper for up to 64 two-byte rows and int8 weights: y = act(x @ W^T).
//
// in     W              [n, k]        u8 (q + 128, quant.cuh), or [k, n] if transposed (one GEMM, groups == 1)
//        weight_scales  [k / 128, n]  fp16
//        x              [rows, 2, k]  s8 (rows_two_byte.cuh)
//        input_scales   [groups * k / 128, pitch] float2; groups: 1 or 2
//        fp16 GEMMs     W [n, k], x [rows, k] fp16: mixed kinds as in gemm.cuh
//
// out    y              [rows, n]     fp16; or two-byte with y_scales (n % 128 == 0)
//                                     or partials [splits, rows, n] fp32
//
// Main loop: u8 x s8 wgmma into s32, exact. Every 128 inputs (64 with groups == 2) the integers of both bytes are
// combined, scaled and added to fp32 sums.
//
// Grid: persistent, as in gemm.cuh, with its split-K. Tile: 128 outputs x 16, 32 or 64 rows.
// Block: 384 threads (16 rows: 640); warp roles as in gemm.cuh.
// Shared memory: up to 227 KB; as in gemm.cuh, and scales per stage, and the row maxima of two-byte outputs.
// Bound: memory; W and its scales once, x 2 k * rows per tile of outputs, from L2. Share of 4.8 TB/s (H200):
// ffn.key [16,384, 4,096] 8 rows 70 %, 64 rows 54 %; head [65,536, 4,096] 8 rows 82 %.
// Made for: n % 16 == 0, k a multiple of 128 * splits, up to 64 rows.
#pragma once

#include "gemm_int8_mainloop.cuh"
#include "gemm_launch.cuh"

struct Int8Launch {
    GemmLaunch base;  // y_two_part: two-byte outputs
    const __half* weight_scales[MAX_HOPPER_GEMMS];  // null: fp16 GEMM
    const float2* input_scales[MAX_HOPPER_GEMMS];
    float2* y_scales[MAX_HOPPER_GEMMS];
    int pitch;   // of scales of rows
    int groups;  // scales per 128 inputs of a row: 1 or 2
    int to_partials;  // y is fp32 partials [SPLITS, rows, n]; the next kernel reduces them
};

// Stage: W, x, scales of x [groups][pitch], scales of W [128].
template <int ROWS>
struct Int8Tile : RingLayout<(TILE_N + 2 * ROWS) * TILE_K_BYTES + (ROWS <= 32 ? 1024 : 2048)> {
    using Ring = RingLayout<(TILE_N + 2 * ROWS) * TILE_K_BYTES + (ROWS <= 32 ? 1024 : 2048)>;
    static constexpr int WEIGHT_BYTES = TILE_N * TILE_K_BYTES, INPUT_BYTES = 2 * ROWS * TILE_K_BYTES;
    static constexpr int SCALES_AT = WEIGHT_BYTES + INPUT_BYTES, WEIGHT_SCALES_AT = SCALES_AT + 2 * ROWS * 8;
    static constexpr int EXCHANGE_BYTES = 8 * ROWS * 6;  // each warp's maxima and sums; two buffers, used in turn
    static constexpr int SHARED_BYTES = Ring::SHARED_BYTES + 2 * EXCHANGE_BYTES;
    static_assert(WEIGHT_SCALES_AT + TILE_N * 2 <= Ring::BYTES && SHARED_BYTES <= 227 * 1024);
};

// Up to 32 rows: few registers, so that CTAs of shift_mix fit on the SM. 96 per thread, requested as a launch bound of
// 640 threads; consumers get 120.
template <int ROWS>
constexpr bool IS_LEAN_INT8 = ROWS <= 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int ROWS>
constexpr uint32_t INT8_THROTTLE_CYCLES = ROWS <= 16 ? THROTTLE_CYCLES : 2000;  // measured (docs/tries.md)

// Producer of W and its scales: one lane.
template <int ROWS, int SPLITS, GemmKind KIND, typename Cta>
__device__ __forceinline__ void produce_weights_int8(const Int8Launch& p, const Cta& cta) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    PipelineState<Tile::STAGES> pipe(1);
    int throttled = FOLLOWS_SHIFT_MIX<SPLITS, KIND> ? Tile::STAGES - 1 : 0;
    for (TileScheduler<KIND, SPLITS> scheduler(p.base, cta); scheduler.has_work(); scheduler.advance()) {
        const WorkTile work = work_tile<KIND, SPLITS>(p.base, scheduler.index, cta.split_index);
        const CUtensorMap* tensor_map = &p.base.weights[work.gemm];
        const int steps = num_k_steps<KIND, SPLITS>(p.base, work), n = p.base.n[work.gemm];
        const uint32_t scale_bytes = min(TILE_N, n - work.output) * sizeof(__half);
        const uint32_t bytes = work.is_fp16 ? Tile::WEIGHT_BYTES + ROWS * TILE_K_BYTES
                                         : Tile::WEIGHT_BYTES + Tile::INPUT_BYTES + scale_bytes + p.groups * p.pitch * sizeof(float2);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
            const uint32_t barrier = cta.full + 8 * pipe.stage, to = cta.ring + pipe.stage * Tile::BYTES;
            mbarrier_expect_tx(barrier, bytes);
            const int input = step * (work.is_fp16 ? 64 : 128);
            tma_load(to, tensor_map, IS_TRANSPOSED_8BIT<KIND> ? work.output : input, IS_TRANSPOSED_8BIT<KIND> ? input : work.output, 0, barrier, EVICT_FIRST);
            if (!work.is_fp16) {
                const __half* const scales = p.weight_scales[work.gemm] + static_cast<int64_t>(step) * n + work.output;
                bulk_load(to + Tile::WEIGHT_SCALES_AT, scales, scale_bytes, barrier);
            }
            pipe.advance();
            if (throttled > 0) throttle(cta.inputs_ready, INT8_THROTTLE_CYCLES<ROWS>), --throttled;
        }
    }
}

// Producer of x and its scales: one lane of another warp. Waits for the previous kernel.
template <int ROWS, int SPLITS, GemmKind KIND, typename Cta>
__device__ __forceinline__ void produce_inputs_int8(const Int8Launch& p, const Cta& cta) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    PipelineState<Tile::STAGES> pipe(1);
    int num_waiting = 0;  // CTAs that wait for dependencies; set once this one has waited
    wait_for_previous_kernel();
    arrive(cta.inputs_ready);
    for (TileScheduler<KIND, SPLITS> scheduler(p.base, cta); scheduler.has_work(); scheduler.advance()) {
        const WorkTile work = work_tile<KIND, SPLITS>(p.base, scheduler.index, cta.split_index);
        if (IS_MIXED<KIND> && work.is_dependent && num_waiting == 0) {
            num_waiting = scheduler.num_waiting;
            wait_for_dependencies<SPLITS>(p.base);
        }
        const CUtensorMap* tensor_map = &p.base.inputs[work.gemm];
        const int steps = num_k_steps<KIND, SPLITS>(p.base, work);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
            const uint32_t barrier = cta.full + 8 * pipe.stage, to = cta.ring + pipe.stage * Tile::BYTES;
            tma_load(to + Tile::WEIGHT_BYTES, tensor_map, step * (work.is_fp16 ? 64 : 128), 0, 0, barrier, EVICT_LAST);
            if (!work.is_fp16) {
                const float2* const scales = p.input_scales[work.gemm] + step * p.groups * p.pitch;
                bulk_load(to + Tile::SCALES_AT, scales, p.groups * p.pitch * sizeof(float2), barrier);
            }
            pipe.advance();
        }
    }
    if (num_waiting > 0) reset_counters(dependency_counters(p.base), num_waiting);
}
#endif

template <int ROWS, int SPLITS, GemmKind KIND>
__global__ void __launch_bounds__(IS_LEAN_INT8<ROWS> ? 640 : 384, 1) gemm_int8_kernel(const __grid_constant__ Int8Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const GemmCta<Tile, CTA_SPLITS<SPLITS, KIND>> cta(dynamic, 8);  // all consumer warps read scales
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL_MASK, tid / 32, 0);
        if (warp == 0 && elect_one()) {
            produce_weights_int8<ROWS, SPLITS, KIND>(p, cta);
        } else if (warp == 1 && elect_one()) {
            produce_inputs_int8<ROWS, SPLITS, KIND>(p, cta);
        }
    } else {
        if constexpr (IS_LEAN_INT8<ROWS>) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 120;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        constexpr bool TRANSPOSED = IS_TRANSPOSED_8BIT<KIND>;
        const int warpgroup = group - 1, warp = tid / 32, lane = tid % 32, t = lane & 3;
        float sums[ROWS / 2];
        uint32_t exchange_offset = 0;
        const uint32_t mine = cta.staging + (warpgroup * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint32_t exchange = cta.full + 512;
        // Pinned in registers: nvcc recomputes them in every stage otherwise.
        Int8Addresses at = {static_cast<uint32_t>(smem_descriptor(cta.ring + warpgroup * (64 * TILE_K_BYTES))),
                         static_cast<uint32_t>(smem_descriptor(cta.ring + Tile::WEIGHT_BYTES)), cta.ring + Tile::SCALES_AT + 16 * t,
                         cta.ring + Tile::WEIGHT_SCALES_AT + (warpgroup * 64 + warp * 16 + output_of_lane<TRANSPOSED>(lane, 0)) * 2, cta.full};
        TransposedOperand operand(warpgroup * 4 + warp, lane);
        if (TRANSPOSED) operand.keep();
        asm volatile("" : "+r"(at.weights), "+r"(at.inputs), "+r"(at.row_scales_at), "+r"(at.output_scales), "+r"(at.full));
        PipelineState<STAGES> pipe(0);
        const auto fence_sums = [&] {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
        };
        for (TileScheduler<KIND, SPLITS> scheduler(p.base, cta); scheduler.has_work(); scheduler.advance()) {
            const WorkTile work = work_tile<KIND, SPLITS>(p.base, scheduler.index, cta.split_index);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
            int i = num_k_steps<KIND, SPLITS>(p.base, work);
            if (IS_MIXED<KIND> && work.is_fp16) {
                uint32_t pending_stage = 0;  // empty barrier of the stage whose wgmmas may still run
                fence_sums();
                for (; i > 0; --i) {
                    mbarrier_wait(at.full + 8 * pipe.stage, pipe.parity);
                    const uint32_t weight = at.weights + pipe.stage * (Tile::BYTES >> 4), input = at.inputs + pipe.stage * (Tile::BYTES >> 4);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; ++j) wgmma_fp16<ROWS, false>(sums, smem_descriptor(0) | (weight + j * 2), smem_descriptor(0) | (input + j * 2), 1);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (pending_stage != 0) release_stage(pending_stage, lane);
                    pending_stage = at.full + 8 * (STAGES + pipe.stage);
                    pipe.advance();
                }
                wgmma_wait<0>();
                fence_sums();
                release_stage(pending_stage, lane);
            }
            const auto add = [&](auto groups, auto count) {
#pragma unroll 1
                for (; i >= count.value; i -= count.value) {
                    add_stages<ROWS, groups.value, count.value, TRANSPOSED, Tile>(sums, at, pipe, operand, cta.ring, p.pitch, lane);
                }
            };
            constexpr std::integral_constant<int, 1> ONE;
            constexpr std::integral_constant<int, 2> TWO;
            if constexpr (TRANSPOSED) {
                add(ONE, ONE);
            } else if (p.groups == 1) {
                add(ONE, TWO);
                add(ONE, ONE);
            } else {
                add(TWO, ONE);
            }
            // Epilogue: reduce splits, activate, store.
            const auto finish = [&](auto splits) {
                constexpr int CHUNKS = SPLIT_CHUNKS<ROWS, splits.value>;  // of 8 rows, that this CTA stores
                const int first_output = work.output + warpgroup * 64 + warp * 16, n = p.base.n[work.gemm];
                if (!work.is_fp16) {
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) sums[i] *= code_scale<INT8>();
                }
                if constexpr (ALL_QUANTISED<KIND>) {
                    if (p.to_partials) {
                        const WarpOutput out = {nullptr, nullptr, n, 0, p.base.rows, nullptr, nullptr};
                        float* const split_y = reinterpret_cast<float*>(p.base.y[work.gemm]) + static_cast<int64_t>(work.split) * p.base.rows * n;
                        if (first_output < n) write_floats<ROWS / 8, TRANSPOSED>(sums, split_y + first_output, out, lane);
                        return;
                    }
                }
                if constexpr (splits.value > 1) reduce_splits<ROWS, splits.value>(sums, p.base, work.workspace_index, work.split);
                if (first_output >= n) return;  // the last tile may be narrower, except for two-byte outputs
                WarpOutput out = {p.base.y[work.gemm] + first_output, nullptr, n, work.split * CHUNKS * 8, p.base.rows, nullptr, nullptr};
                activate_sums<4 * CHUNKS>(sums, p.base.activation[work.gemm]);
                if (TRANSPOSED || p.base.y_two_part[work.gemm] == nullptr) {
                    write_out<CHUNKS, false, TRANSPOSED>(sums, out, mine, lane);
                    return;
                }
                if constexpr (!TRANSPOSED) {
                    out.two_part = p.base.y_two_part[work.gemm] + first_output;
                    float2* const scale_items = p.y_scales[work.gemm] + static_cast<int64_t>(work.output / TWO_BYTE_GROUP) * p.pitch;
                    store_two_byte_tile<CHUNKS>(sums, out, scale_items, mine, exchange + exchange_offset), exchange_offset ^= Tile::EXCHANGE_BYTES;
                }
            };
            if (work.is_split) {
                finish(std::integral_constant<int, SPLITS>());
                if (IS_MIXED<KIND> && p.base.num_independent < p.base.count) signal_dependents(p.base);
                if constexpr (SPLITS > 1) {
                    if (!p.to_partials) reset_split_counters<SPLITS>(p.base, work.workspace_index);
                }
            } else {
                finish(std::integral_constant<int, 1>());
            }
        }
    }
#endif
}

// Arguments. Mirrored in cuda/library.py.
struct Int8GemmArgs {
    const void* weight;         // [n, k] u8, or [k, n], or [n, k] fp16
    const void* x;              // [rows, 2, k] s8, or [rows, k] fp16
    const void* weight_scales;  // [k / 128, n] fp16; null: fp16 GEMM
    const void* input_scales;  // [k / 128 * groups, pitch] float2; null: fp16 GEMM
    void* y;  // [rows, n] fp16, or [rows, 2, n] s8, or fp32 [splits, rows, n]
    void* y_scales;  // [n / 128, pitch] float2 of two-byte outputs
    int n, k;
    int activation;
    int unused;
};

struct Int8LaunchArgs {
    Int8GemmArgs gemms[MAX_HOPPER_GEMMS];  // int8 first, then fp16
    int count;
    int dependent;  // GEMMs at the end whose inputs are outputs of the fp16 GEMMs before them
    int rows;
    int tile_rows;
    int splits;  // with fp16 GEMMs: of the independent ones only
    int pitch;   // of scales of rows
    int groups;  // scales per 128 inputs: 1 or 2
    int to_partials;  // y of the only GEMM is split-K partials
    int transposed;  // W of the only GEMM is [k, n]
    void* partials;  // see GemmLaunch
    void* counters;
};

// Fills the launch and its tensor maps. Returns false if a tensor map is refused.
inline bool fill_int8_launch(Int8Launch& p, const Int8LaunchArgs& args) {
    if (encode_tiled() == nullptr || args.pitch % 2 != 0 || args.pitch < args.rows || args.pitch > args.tile_rows) return false;
    fill_launch(p.base, args);
    p.base.num_full = 0, p.base.num_independent = args.count - args.dependent;
    p.pitch = args.pitch, p.groups = args.groups, p.to_partials = args.to_partials;
    for (int i = 0; i < args.count; ++i) {
        const Int8GemmArgs& m = args.gemms[i];
        const bool is_fp16 = m.weight_scales == nullptr;
        p.base.num_full += !is_fp16;
        p.base.y_two_part[i] = m.y_scales == nullptr ? nullptr : static_cast<uint8_t*>(m.y);
        const bool described = is_fp16 ? tensor_map_rows(&p.base.inputs[i], m.x, FP16, args.rows, m.k, args.tile_rows)
                                    : make_tensor_map(&p.base.inputs[i], m.x, BYTES, args.rows, m.k, 2 * m.k, 2, args.tile_rows, 2, TILE_K_BYTES, m.k);
        const bool weights = args.transposed ? tensor_map_transposed(&p.base.weights[i], m.weight, m.n, m.k)
                                         : tensor_map_weights(&p.base.weights[i], m.weight, is_fp16 ? FP16 : BYTES, m.n, m.k);
        if (!described || !weights) return false;
        p.weight_scales[i] = static_cast<const __half*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float2*>(m.input_scales);
        p.y_scales[i] = static_cast<float2*>(m.y_scales);
    }
    return true;
}

template <int ROWS, int SPLITS, GemmKind KIND>
int launch_int8(const Int8Launch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const GemmLaunch& base = p.base;
    const int num_tiles = num_work_tiles<KIND, SPLITS>(base), num_resident = num_tiles - num_dependent_tiles(base);
    if (IS_MIXED<KIND> && SPLITS > 1 && num_resident > device_info().num_sms) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int CTAS_PER_TILE = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(gemm_int8_kernel<ROWS, SPLITS, KIND>, raised, Int8Tile<ROWS>::SHARED_BYTES, num_tiles, CTAS_PER_TILE, p, stream);
}
