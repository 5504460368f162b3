// Weight-only quantised GEMM on Hopper: y = act(x @ W^T), x fp16, W 8 or 4 bits, several weights in one launch.
//
// in     qweight  [n, k] fp8, int8 or int4 (quant.cuh), or [k, n] if transposed (int4 nibbles then run along n)
//                 or [n, k] fp16 without scales: an fp16 GEMM in the same launch
//        scales   fp8 [n] fp32; int8 [k / 128, n] fp16; int4 [k / 128, n] fp16 (scale, 1024 + zero)
//        x        [rows, k] fp16
//
// out    y        [rows, n] fp16 or fp32
//
// Main loop: consumer warps read weights from shared memory, convert them to fp16 in registers with their group's
// scale, in the layout of operand A, and multiply by x in shared memory. Transposed: a lane's two operand rows are
// adjacent outputs.
//
// Grid: persistent, as in gemm.cuh, with its split-K. Tile: 128 outputs x ROWS rows, 128 inputs per stage.
// Block: 384 threads; warp roles as in gemm.cuh.
// Shared memory: up to 227 KB; per stage W 16 KB, x [2][ROWS][64] fp16 (128-byte swizzle), scales of 128 outputs.
// Bound: memory for few rows, then conversion. W and scales are read once; x 2 k * rows per tile of outputs, from L2.
// Share of 4.8 TB/s (H200): head [65,536, 4,096] fp8 8 rows 76 %, 64 rows 64 %; ffn.key [16,384, 4,096] int4 16 rows
// 30 %. Share of 989 TFLOP/s: int8 256 rows ffn.key 56 %, head 61 %.
// Made for: up to 256 rows, n % 32 == 0, k a multiple of 128 * splits.
#pragma once

#include "weight_only_operand.cuh"
#include "../gemm/gemm_split_k.cuh"
#include "../gemm/gemm_launch.cuh"
#include "../gemm/gemm_ring.cuh"

// Stage: W, x as two tiles [ROWS][64], scales of 128 outputs.
template <typename Kind, int ROWS>
struct WeightOnlyTile : RingLayout<Kind::WEIGHT_STRIDE + ROWS * Kind::DEPTH * 2 + Kind::SCALE_STRIDE> {
    static constexpr int INPUT_BYTES = ROWS * Kind::DEPTH * 2;
};

template <typename Kind, int SPLITS>
__device__ __forceinline__ int num_k_steps(int k, bool is_fp16) { return k / ((is_fp16 ? 64 : Kind::DEPTH) * SPLITS); }

struct WeightOnlyLaunch {
    GemmLaunch base;
    const void* scales[MAX_HOPPER_GEMMS];  // null: fp16 GEMM [n, k]
    float* y_fp32[MAX_HOPPER_GEMMS];  // fp32 output, or null
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Stores a warp's 16 outputs of 8 * CHUNKS rows. sums[4c + i]: row 8c + 2t + i % 2, output i / 2 of the lane's two.
template <typename Kind, int CHUNKS, int SUMS>
__device__ __forceinline__ void write_outputs(
    float (&sums)[SUMS], const WeightOnlyLaunch& p, int gemm, int output, int first_row, uint32_t buffers, int lane) {
    const GemmLaunch& base = p.base;
    const int g = lane / 4, t = lane & 3, n = base.n[gemm];
    const bool is_fp16 = p.scales[gemm] == nullptr, transposed = Kind::transposed && !is_fp16;
    float output_scale[2];
    int out[2];
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        out[up] = transposed ? 2 * g + up : g + 8 * up;
        output_scale[up] = is_fp16 ? 1.0f : code_scale<Kind::format>();
        if (Kind::format == FP8 && !is_fp16) output_scale[up] *= __ldg(static_cast<const float*>(p.scales[gemm]) + output + out[up]);
    }
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) sums[i] *= output_scale[i % 4 / 2];
    activate_sums<4 * CHUNKS>(sums, base.activation[gemm]);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float* v = sums + 4 * c;
        if (p.y_fp32[gemm] != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + 8 * c + 2 * t + i % 2;
                if (row < base.rows) p.y_fp32[gemm][static_cast<int64_t>(row) * n + output + out[i / 2]] = v[i];
            }
            continue;
        }
        // 8 rows of 16 outputs through the warp's buffer, then 16 bytes per lane.
        const uint32_t buffer = buffers + (c & 1) * 16 * STAGING_PITCH;
        if (transposed) {
#pragma unroll
            for (int i = 0; i < 2; ++i) st_shared(buffer + (2 * t + i) * STAGING_PITCH + 4 * g, pack_half2(v[i], v[i + 2]));
        } else {
            stmatrix_transposed(buffer + (lane & 7) * STAGING_PITCH + (lane >> 3 & 1) * 16, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
        }
        __syncwarp();
        const int row = first_row + 8 * c + lane / 2;
        if (lane < 16 && row < base.rows) {
            __half* const y = base.y[gemm] + static_cast<int64_t>(row) * n + output + (lane & 1) * 8;
            st_global(y, ld_shared_u128(buffer + lane / 2 * STAGING_PITCH + (lane & 1) * 16));
        }
        __syncwarp();
    }
}

// Producer of W and its scales: one lane.
template <typename Kind, int ROWS, int SPLITS>
__device__ __forceinline__ void produce_weights_quantised(const WeightOnlyLaunch& p, const GemmCta<WeightOnlyTile<Kind, ROWS>, SPLITS>& cta) {
    using namespace hopper;
    using Tile = WeightOnlyTile<Kind, ROWS>;
    PipelineState<Tile::STAGES> pipe(1);
    for (int tile = cta.first; tile < p.base.first_tile[p.base.count]; tile += cta.blocks) {
        const TileCoord at = tile_coord(p.base, tile);
        const CUtensorMap* tensor_map = &p.base.weights[at.gemm];
        const bool is_fp16 = p.scales[at.gemm] == nullptr;
        const int n = p.base.n[at.gemm], steps = num_k_steps<Kind, SPLITS>(p.base.k[at.gemm], is_fp16);
        const uint32_t scale_bytes = Kind::grouped ? min(TILE_N, n - at.output) * Kind::SCALE_ITEM : 0;
        for (int step = cta.split_index * steps; step < (cta.split_index + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
            const uint32_t barrier = cta.full + 8 * pipe.stage, to = cta.ring + pipe.stage * Tile::BYTES;
            if (is_fp16) {
                mbarrier_expect_tx(barrier, TILE_N * 128 + ROWS * 128);
                tma_load(to, tensor_map, step * 64, at.output, 0, barrier, EVICT_FIRST);
                pipe.advance();
                continue;
            }
            mbarrier_expect_tx(barrier, Kind::WEIGHT_BYTES + Tile::INPUT_BYTES + scale_bytes);
            if constexpr (Kind::transposed) {
                tma_load(to, tensor_map, at.output * Kind::BITS / 8, step * Kind::DEPTH, 0, barrier, EVICT_FIRST);
            } else {
                tma_load(to, tensor_map, step * Kind::DEPTH * Kind::BITS / 8, at.output, 0, barrier, EVICT_FIRST);
            }
            if constexpr (Kind::grouped) {
                const auto* from = static_cast<const uint8_t*>(p.scales[at.gemm]) +
                                   (static_cast<int64_t>(step) * n + at.output) * Kind::SCALE_ITEM;
                bulk_load(to + Kind::WEIGHT_STRIDE + Tile::INPUT_BYTES, from, scale_bytes, barrier);
            }
            pipe.advance();
        }
    }
}

// Producer of x: one lane of another warp. Waits for the previous kernel.
template <typename Kind, int ROWS, int SPLITS>
__device__ __forceinline__ void produce_inputs_fp16(const WeightOnlyLaunch& p, const GemmCta<WeightOnlyTile<Kind, ROWS>, SPLITS>& cta) {
    using namespace hopper;
    using Tile = WeightOnlyTile<Kind, ROWS>;
    PipelineState<Tile::STAGES> pipe(1);
    wait_for_previous_kernel();
    for (int tile = cta.first; tile < p.base.first_tile[p.base.count]; tile += cta.blocks) {
        const TileCoord at = tile_coord(p.base, tile);
        const bool is_fp16 = p.scales[at.gemm] == nullptr;
        const int steps = num_k_steps<Kind, SPLITS>(p.base.k[at.gemm], is_fp16), planes = is_fp16 ? 1 : Kind::DEPTH / 64;
        for (int step = cta.split_index * steps; step < (cta.split_index + 1) * steps; ++step) {
            mbarrier_wait(cta.empty + 8 * pipe.stage, pipe.parity);
            tma_load(cta.ring + pipe.stage * Tile::BYTES + Kind::WEIGHT_STRIDE, &p.base.inputs[at.gemm], 0, 0, step * planes,
                     cta.full + 8 * pipe.stage, EVICT_LAST);
            pipe.advance();
        }
    }
}
#endif

template <typename Kind, int ROWS, int SPLITS>
__global__ void __launch_bounds__(384, 1) weight_only_kernel(const __grid_constant__ WeightOnlyLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = WeightOnlyTile<Kind, ROWS>;
    constexpr int STAGES = Tile::STAGES, STEPS = Kind::DEPTH / 16, BATCH = 4;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const GemmCta<Tile, SPLITS> cta(dynamic, 8);  // all consumer warps read weights
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL_MASK, tid / 32, 0);
        if (warp == 0 && elect_one()) {
            produce_weights_quantised(p, cta);
        } else if (warp == 1 && elect_one()) {
            produce_inputs_fp16(p, cta);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int warp = threadIdx.x / 32 - 4, lane = tid % 32;
        float sums[ROWS / 2];
        const uint32_t mine = cta.staging + warp * 2 * 16 * STAGING_PITCH;
        PipelineState<STAGES> pipe(0);
        const auto release = [&](uint32_t barrier) {
            __syncwarp();
            if (lane == 0) arrive(barrier);
        };
        for (int tile = cta.first; tile < p.base.first_tile[p.base.count]; tile += cta.blocks) {
            const TileCoord at = tile_coord(p.base, tile);
            int add = 0;
            uint32_t pending_stage = 0;  // empty barrier of the stage whose wgmmas may still run
            const bool is_fp16 = p.scales[at.gemm] == nullptr;
            for (int i = num_k_steps<Kind, SPLITS>(p.base.k[at.gemm], is_fp16); i > 0; --i) {
                mbarrier_wait(cta.full + 8 * pipe.stage, pipe.parity);
                const uint32_t stage = cta.ring + pipe.stage * Tile::BYTES, inputs = stage + Kind::WEIGHT_STRIDE;
                const uint64_t input = smem_descriptor(inputs);
                if (is_fp16) {
                    const uint64_t weight = smem_descriptor(stage + warp / 4 * (64 * TILE_K_BYTES));
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        wgmma_fp16<ROWS, false>(sums, weight + j * 32 / 16, input + j * 32 / 16, add);
                        add = 1;
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (pending_stage != 0) release(pending_stage);
                    pending_stage = cta.empty + 8 * pipe.stage;
                    pipe.advance();
                    continue;
                }
                const OperandReader<Kind> reader(stage, inputs + Tile::INPUT_BYTES, warp, lane);
#pragma unroll
                for (int part = 0; part < STEPS; part += BATCH) {
                    uint32_t a[BATCH][4];
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) reader.read(a[j], part + j);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const int step = part + j;
                        wgmma_rs<ROWS>(sums, a[j], input + (step / 4 * ROWS * 128 + step % 4 * 32) / 16, add);
                        add = 1;
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (part == 0 && pending_stage != 0) release(pending_stage);
                }
                pending_stage = cta.empty + 8 * pipe.stage;
                pipe.advance();
            }
            wgmma_wait<0>();
            if (pending_stage != 0) release(pending_stage);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");

            constexpr int CHUNKS = ROWS / 8 / SPLITS;  // of 8 rows, that this CTA stores
            if constexpr (SPLITS > 1) reduce_splits<ROWS, SPLITS>(sums, p.base, tile, cta.split_index);
            const int output = at.output + warp * 16;
            if (output < p.base.n[at.gemm]) write_outputs<Kind, CHUNKS>(sums, p, at.gemm, output, cta.split_index * CHUNKS * 8, mine, lane);
            if constexpr (SPLITS > 1) reset_split_counters<SPLITS>(p.base, tile);
        }
    }
#endif
}

// Arguments. Mirrored in cuda/library.py.
struct WeightOnlyGemmArgs {
    const void* qweight;  // [n, k], or [k, n] if transposed; or fp16 [n, k]
    const void* scales;  // quant.cuh; null: fp16
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16, or fp32
    int n, k;
    int activation;
    int out_fp32;
};

struct WeightOnlyLaunchArgs {
    WeightOnlyGemmArgs gemms[MAX_HOPPER_GEMMS];
    int count;
    int rows;
    int transposed;  // same for all GEMMs
    int tile_rows, splits;
    void* partials;  // see GemmLaunch
    void* counters;
};

template <typename Kind>
int launch_kind(const WeightOnlyLaunchArgs& args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WeightOnlyLaunch p = {};
    fill_launch(p.base, args);
    for (int i = 0; i < args.count; ++i) {
        const WeightOnlyGemmArgs& m = args.gemms[i];
        const int rows = Kind::transposed ? m.k : m.n, columns = (Kind::transposed ? m.n : m.k) * Kind::BITS / 8;
        const bool is_fp16 = m.scales == nullptr;
        const bool done = is_fp16 ? tensor_map_rows(&p.base.weights[i], m.qweight, FP16, m.n, m.k, TILE_N)
                               : make_tensor_map(&p.base.weights[i], m.qweight, BYTES, rows, columns, columns, 1, 128, 1, Kind::ROW_BYTES);
        if (!done || !make_tensor_map(&p.base.inputs[i], m.x, FP16, args.rows, 64, m.k, m.k / 64, args.tile_rows, is_fp16 ? 1 : 2)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.scales[i] = m.scales, p.y_fp32[i] = m.out_fp32 ? static_cast<float*>(m.y) : nullptr;
    }
    return dispatch_tile<32, 64, 128, 256>(args.tile_rows, args.splits, [&](auto rows, auto splits) {
        using Tile = WeightOnlyTile<Kind, rows.value>;
        static bool raised[MAX_DEVICES] = {};
        const auto kernel = weight_only_kernel<Kind, rows.value, splits.value>;
        return launch_tiles(kernel, raised, Tile::SHARED_BYTES, p.base.first_tile[args.count], splits.value, p, stream);
    });
}

template <Format FORMAT>
int launch_weight_only(const WeightOnlyLaunchArgs& args, void* stream) {
    return args.transposed ? launch_kind<WeightKind<FORMAT, true>>(args, stream) : launch_kind<WeightKind<FORMAT, false>>(args, stream);
}
