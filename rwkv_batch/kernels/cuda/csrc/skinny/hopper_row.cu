// GEMV on Hopper's tensor cores for 8- and 4-bit weights: y = act(x @ W^T), one row, several weights per launch.
//
// in     qweight  [n, k] fp8, int4 or W8A8; or fp16 without scales
//        scales   fp8, W8A8 [n] fp32; int4 [k / 128, n] fp16 (scale, 1024 + zero)
//        weight_ratios, factors, order   W8A8: as in w8a8_rows.cuh
//        x        [k] fp16; or computed in every CTA from `norm` (residual add, LayerNorm, token shift, mix)
//
// out    y        [n] fp16 or fp32
//
// inout  value    optional, int4: ffn.value in the launch of ffn.key (hopper_row_value.cuh)
//
// Operand A: weights in shared memory as TMA wrote them; 8-bit weights never enter a register.
// Operand B: x split into parts, so that an fp16 input loses only bits below 1/4,000 of its group's maximum.
//   fp8    3 parts e4m3, each in units of 1/16 of the previous one; sums leave the tensor cores every 128 inputs,
//          because the fp8 units accumulate in about 14 bits
//   int4   2 bytes of a 16-bit integer; nibbles become bytes by masks, multiplied by mma.m16n8k32 per warp
//   W8A8   codes of x, rounded in every CTA (w8a8_rows.cuh); sums are exact
//   fp16   x itself. K in four quarters, one per warpgroup, added in order: the sums of gemm.cuh with four splits
// int4: a lane's weights belong to one of four adjacent groups, and so do the two non-zero columns of B. So four groups
// are summed at once, each in its own lane.
//
// Unit: 32 outputs; a CTA computes adjacent units of one GEMM. Tile: 32 outputs x 4 pieces of 128 bytes along k. Two
// adjacent pieces are operand A's 64 rows, each multiplied by its own columns of B (0 .. 3 and 4 .. 7). fp16: the pieces
// follow each other in one sum, and only the upper 32 rows count.
//
// Grid: one CTA per SM; CTAs are assigned to GEMMs by bytes.
// Block: 544 threads. 4 consumer warpgroups take a unit's tiles in turn; a producer warp loads by TMA, STAGES deep. It
// starts before the inputs exist and loads UNTHROTTLED_TILES at once. The others wait until all CTAs have issued their
// first loads, which would queue behind them.
// Shared memory: 156 KB (fp8) or 164 KB; with a value 225 KB; ring, operand B 16 KB, partial sums; with a value its
// active rows (60 KB).
// Bound: memory; W and scales once, x 2 k bytes per CTA. Share of 4.8 TB/s (H200): head [65,536, 4,096] fp8 85 %, W8A8
// 83 %; ffn.key with ffn.value int4 55 %.
// Made for: one row, k <= 4,096, k % 128 == 0 (int4: 256, fp16: 64).
//
// add_fixed_point: x_out [C] fp16 = x [C] fp16 + sums [8, C / 8] int64. One CTA of C / 8 threads, no shared memory.
// Bound: latency, 1.3 us; 12 C bytes.
#include <cuda_pipeline.h>

#include "../gemm/stage_release.cuh"
#include "../fixed_point_sums.cuh"
#include "../gemm/gemm_ring.cuh"
#include "hopper_row_operand.cuh"
#include "hopper_row_value.cuh"

constexpr int UNTHROTTLED_TILES = 2;  // measured with THROTTLE_CYCLES (docs/tries.md)

struct RowLaunch {
    CUtensorMap weights[MAX_GEMMS], scales[MAX_GEMMS];
    QuantLaunchArgs args;
    int units[MAX_GEMMS];
};

// A CTA's units, all of one GEMM.
struct CtaUnits {
    int gemm, first, last;
};

__device__ __forceinline__ CtaUnits units_of_cta(const RowLaunch& p, int block) {
    int gemm = 0;
    while (gemm + 1 < p.args.count && block >= p.args.gemms[gemm + 1].first_block) ++gemm;
    const QuantGemmArgs& m = p.args.gemms[gemm];
    const int64_t units = p.units[gemm], mine = block - m.first_block;
    return {gemm, static_cast<int>(mine * units / m.blocks), static_cast<int>((mine + 1) * units / m.blocks)};
}

// fp16: pieces of a warpgroup's quarter of k, and its tiles. Tile `i` of a unit belongs to warpgroup i % WARPGROUPS.
struct Quarters {
    int pieces, tiles, all;

    __device__ __forceinline__ Quarters(int k) {
        all = k / 64, pieces = (all + WARPGROUPS - 1) / WARPGROUPS, tiles = (pieces + PIECES - 1) / PIECES;
    }
    __device__ __forceinline__ int first(int tile) const { return tile % WARPGROUPS * pieces + tile / WARPGROUPS * PIECES; }
    __device__ __forceinline__ int count(int tile) const {  // may be negative
        return min(min(PIECES, pieces - tile / WARPGROUPS * PIECES), all - first(tile));
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Producer: one lane.
template <Format FORMAT>
__device__ __forceinline__ void produce_tiles(const RowLaunch& p, RowSmem& smem, uint32_t ring, const CtaUnits& cta_units) {
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    const uint32_t full = smem_address(smem.full), empty = smem_address(smem.empty);
    const QuantGemmArgs& m = p.args.gemms[cta_units.gemm];
    const bool is_fp16 = m.scales == nullptr;
    const int row_bytes = is_fp16 ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k, tile_bytes = PIECES * TILE_K_BYTES;
    const Quarters quarters(m.k);
    const int steps = is_fp16 ? WARPGROUPS * quarters.tiles : (row_bytes + tile_bytes - 1) / tile_bytes;
    const uint32_t requested = smem_address(smem.requested);
    uint32_t stage = 0, parity = 1;
    int count = 0;
    // Scales of all units; later they would wait for tiles of up to 17 MB.
    for (int output = cta_units.first * OUTPUTS_PER_UNIT; !Tile::grouped && !is_fp16 && output < min(cta_units.last * OUTPUTS_PER_UNIT, m.n); output += OUTPUTS_PER_UNIT) {
        prefetch_l2(static_cast<const float*>(m.scales) + output);
        if (FORMAT == W8A8) prefetch_l2(m.weight_ratios + output);
    }
    mbarrier_wait(requested, 0);
    for (int unit = cta_units.first; unit < cta_units.last; ++unit) {
        const int output = unit * OUTPUTS_PER_UNIT;
        for (int step = 0; step < steps; ++step) {
            mbarrier_wait(empty + 8 * stage, parity);
            const uint32_t barrier = full + 8 * stage, to = ring + stage * Tile::BYTES;
            if (count >= UNTHROTTLED_TILES && count < STAGES) throttle(requested + 8, THROTTLE_CYCLES);
            ++count;
            const bool scaled = Tile::grouped && !is_fp16;
            mbarrier_expect_tx(barrier, TILE_DATA_BYTES + (scaled ? Tile::GROUPS * OUTPUTS_PER_UNIT * Tile::SCALE_ITEM : 0));
            tma_load(to, &p.weights[cta_units.gemm], 0, output, is_fp16 ? quarters.first(step) : step * PIECES, barrier, EVICT_FIRST);
            if (scaled) tma_load(to + TILE_DATA_BYTES, &p.scales[cta_units.gemm], output, step * Tile::GROUPS, 0, barrier, EVICT_FIRST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

// At most 64 registers per thread (int4), 56 (W8A8) or 48 (8 bits), so that CTAs of ffn.value and the WKV fit on the SM.
// With a value no other CTA fits anyway.
template <Format FORMAT, bool FROM_NORM, bool HAS_VALUE>
__global__ void __launch_bounds__(HAS_VALUE ? CONSUMERS + 32 : FORMAT == INT4 ? 1024 : FORMAT == W8A8 ? 576 : 640, HAS_VALUE || FORMAT == INT4 ? 1 : 2) hopper_row_kernel(const __grid_constant__ RowLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    using Mix = RowMix<CONSUMERS>;
    extern __shared__ unsigned char dynamic[];
    const uint32_t ring = (smem_address(dynamic) + 1023) & ~1023u, x = ring + STAGES * Tile::BYTES;
    RowSmem& smem = *reinterpret_cast<RowSmem*>(dynamic + (x + INPUT_BYTES - smem_address(dynamic)));
    ValueSmem& value_smem = *reinterpret_cast<ValueSmem*>(&smem + 1);
    const unsigned char* const value_rows = reinterpret_cast<const unsigned char*>(&value_smem + 1);
    const int value_bytes = p.args.value.width / 2;
    const int value_slots = HAS_VALUE ? VALUE_BYTES / value_bytes : 0;
    const CtaUnits cta_units = units_of_cta(p, blockIdx.x);
    const int warp = __shfl_sync(FULL_MASK, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane & 3;
    const uint32_t full = smem_address(smem.full), empty = smem_address(smem.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 4);
        }
        for (int i = 0; i < 2; ++i) mbarrier_init(smem_address(&smem.requested[i]), CONSUMERS / 32);
        if (HAS_VALUE) mbarrier_init(smem_address(&value_smem.full), cta_units.last - cta_units.first);
        fence_mbarrier_init();
    }
    __syncthreads();
    // The next kernel's first loads (ffn.value: 8 MB of factors in all CTAs) delay the ring's, which are needed first. So
    // it starts after the first of several units.
    const bool starts_next_at_once = HAS_VALUE || cta_units.last - cta_units.first == 1;
    if (starts_next_at_once) allow_next_kernel();
    if (warp == CONSUMERS / 32) {
        if (elect_one()) produce_tiles<FORMAT>(p, smem, ring, cta_units);
        return;
    }
    const QuantGemmArgs& m = p.args.gemms[cta_units.gemm];
    const bool is_fp16 = m.scales == nullptr;
    int arrived = 0;
    const auto arrive_requested = [&](int which) {
        if (lane == 0) arrive(smem_address(&smem.requested[which]));
    };

    RowCodes row_codes;  // W8A8
    float row_scale = 0.0f;
    int row_ratio = 0;
    if constexpr (FORMAT == W8A8) {
        static_assert(Mix::TIMES == 1);
        if (!is_fp16) row_codes.load(m, Mix::channel(0));
    }
    // Stores the row as operand B.
    const auto store_inputs = [&](int c, const uint4& values) {
        if constexpr (FORMAT == W8A8) {
            if (!is_fp16) {
                const W8A8Row<false> row = row_codes.store(x, smem.maxima, c, m.k, values, sync_consumers);
                row_scale = row.scale, row_ratio = row.ratio;
                return;
            }
        }
        if (is_fp16) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x + 2 * c), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");
        } else {
            if constexpr (FORMAT != W8A8) store_operand<FORMAT>(x, smem, c, values, c < m.k);
        }
    };
    // Loads a unit's scales, by the first warp. Complete after `__pipeline_wait_prior` and a barrier.
    const auto request_scales = [&](int unit) {
        const int at = unit * OUTPUTS_PER_UNIT + lane;
        if (Tile::grouped || is_fp16 || warp != 0 || unit >= cta_units.last || at >= m.n) return;
        __pipeline_memcpy_async(&smem.weight_scales[unit & 1][lane], static_cast<const float*>(m.scales) + at, 4);
        if (FORMAT == W8A8) __pipeline_memcpy_async(&smem.weight_ratios[unit & 1][lane], m.weight_ratios + at, 4);
    };
    request_scales(cta_units.first);
    __pipeline_commit();
    const auto finish_inputs = [&] {
        __pipeline_wait_prior(0);
        fence_proxy_async_shared();
        sync_consumers();
    };
    if constexpr (FROM_NORM) {
        Mix row(p.args.norm, m.x);
        arrive_requested(0);
        wait_for_previous_kernel();
        row.load_and_reduce(p.args.norm, smem.mix, sync_consumers, [&] { arrive_requested(1); });
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            store_inputs(c, c < m.k ? row.mixed(p.args.norm, smem.mix, i) : make_uint4(0, 0, 0, 0));
        }
        finish_inputs();
        if (threadIdx.x == 0) arrived = atomicAdd(p.args.norm.counter, 1);
    } else {
        arrive_requested(0);
        wait_for_previous_kernel();
        uint4 values[Mix::TIMES];
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            values[i] = c < m.k ? load16(m.x + c) : make_uint4(0, 0, 0, 0);
        }
        arrive_requested(1);
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) store_inputs(Mix::channel(i), values[i]);
        finish_inputs();
    }

    const int group = warp / 4, k_half = warp % 4 / 2;  // warpgroup; which of two adjacent pieces the warp's rows are
    const int output = warp % 2 * 16 + g;  // output of the unit, and the one 8 further
    const bool is_third_part = t & 1;  // its column holds the third part
    // int4: the lane's output and the one 8 further. Two lanes that load together are 4 lines apart.
    const int line = warp % 2 * 16 + (g >> 1 | (g & 1) << 2);
    constexpr bool CACHES_OPERAND = FORMAT == INT4 && HAS_VALUE;  // operand B of its tiles, in registers
    uint4 operand[CACHES_OPERAND ? 4 : 1][2];
    int cached_step = -1;  // step of the cached operand
    int stage = group, parity = 0;  // stage of the warpgroup's next tile
    // A warpgroup's tiles have indices = warpgroup modulo WARPGROUPS. To wait for a refilled stage it must have seen
    // the previous fill: a parity distinguishes only two fills.
    const auto advance_stage = [&] {
        stage += WARPGROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    int tiles_before = 0;  // tiles of earlier units
    int num_listed = 0;  // first warp: active rows of the value
    for (int unit = cta_units.first; unit < cta_units.last; ++unit) {
        const int out = unit * OUTPUTS_PER_UNIT + threadIdx.x;  // output of a thread of the first warp
        if (!starts_next_at_once && unit == cta_units.first + 1) allow_next_kernel();
        request_scales(unit + 1);
        __pipeline_commit();
        const Quarters quarters(m.k);
        constexpr int DEPTH = Tile::GROUPS * GROUP_INPUTS;
        const int steps = is_fp16 ? WARPGROUPS * quarters.tiles : (m.k + DEPTH - 1) / DEPTH;
        float sums[2] = {};
        int exact[2] = {};  // W8A8
        const int first_step = (group - tiles_before) & (WARPGROUPS - 1);  // warpgroup's first tile of the unit
        tiles_before += steps;
        int step = first_step;
        if (FORMAT == INT4 && !is_fp16) {
            const int groups = m.k / GROUP_INPUTS;
            for (; step < steps; step += WARPGROUPS) {
                // A lane's weights and sums belong to one group; operand B is zero for the others.
                const int in_tile = 2 * t + k_half, input_group = step * Tile::GROUPS + in_tile;
                const bool is_nonzero = g >> 1 == t;
                const auto load_operand = [&](uint4 (&to)[2], int quarter) {
                    const uint32_t at = operand_address(x, input_group, quarter) ^ ((g & 1) * SECOND_PART_OFFSET);
                    to[0] = ld_shared_u128_if(is_nonzero, at), to[1] = ld_shared_u128_if(is_nonzero, at + 16);
                };
                if (CACHES_OPERAND && cached_step != step) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) load_operand(operand[CACHES_OPERAND ? r : 0], (r + t) & 3);
                    cached_step = step;
                }
                mbarrier_wait(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES, codes_at = tile + t * (OUTPUTS_PER_UNIT * TILE_K_BYTES) + line * TILE_K_BYTES;
                uint32_t items[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(items[i]) : "r"(tile + TILE_DATA_BYTES + (in_tile * OUTPUTS_PER_UNIT + line + 8 * i) * Tile::SCALE_ITEM) : "memory");
                }
                int products[2][4] = {};
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int quarter = (r + t) & 3;
                    const uint32_t at = codes_at + (((k_half * 4 + quarter) ^ (line & 7)) << 4);
                    const uint4 low = ld_shared_u128(at), high = ld_shared_u128(at + 8 * TILE_K_BYTES);
                    if (!CACHES_OPERAND) load_operand(operand[0], quarter);
                    const auto& b = operand[CACHES_OPERAND ? r : 0];
                    const auto multiply_word = [&](int j, uint32_t of_line, uint32_t of_other, uint32_t b_low, uint32_t b_high) {
                        const uint32_t a[4] = {of_line << 4 & 0xf0f0f0f0u, of_other << 4 & 0xf0f0f0f0u, of_line & 0xf0f0f0f0u, of_other & 0xf0f0f0f0u};
                        mma_u8s8(products[j], a, b_low, b_high);
                    };
                    multiply_word(0, low.x, high.x, b[0].x, b[0].y);
                    multiply_word(1, low.y, high.y, b[0].z, b[0].w);
                    multiply_word(0, low.z, high.z, b[1].x, b[1].y);
                    multiply_word(1, low.w, high.w, b[1].z, b[1].w);
                }
                const int known = min(input_group, groups - 1);
                const float x_scale = input_group < groups ? smem.scales[known] : 0.0f, operand_sum = smem.input_sums[known];
                release_stage_after_loads(empty + 8 * stage, lane, items[0] | items[1] | products[0][0] | products[1][0]);
                advance_stage();
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 item = __half22float2(*reinterpret_cast<const __half2*>(&items[i]));
                    const int integer = (products[0][2 * i] + products[1][2 * i]) * 256 + products[0][2 * i + 1] + products[1][2 * i + 1];
                    sums[i] = fmaf(fmaf(1024.0f - item.y, operand_sum, static_cast<float>(integer)), x_scale * item.x, sums[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[i] += __shfl_xor_sync(FULL_MASK, sums[i], 1);
                sums[i] += __shfl_xor_sync(FULL_MASK, sums[i], 2);
            }
        } else if (is_fp16) {
            float products[4] = {};
            int add = 0;
            for (; step < steps; step += WARPGROUPS) {
                mbarrier_wait(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES, inputs = x + quarters.first(step) * 128;
                wgmma_fence();
                for (int piece = 0; piece < quarters.count(step); ++piece) {
                    const uint64_t a = smem_descriptor(tile + piece * (TILE_DATA_BYTES / PIECES)), b = smem_descriptor_rows16(inputs + piece * 128, 16, 128);
#pragma unroll
                    for (int j = 0; j < 4; ++j) wgmma_fp16_n8(products, a + 2 * j, b + 2 * j, add), add = 1;
                }
                wgmma_commit();
                wgmma_wait<0>();
                release_stage(empty + 8 * stage, lane);
                advance_stage();
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(products[i])::"memory");
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] = k_half ? -0.0f : products[2 * i];  // valid in lanes with t == 0
        } else if constexpr (FORMAT == W8A8) {
            constexpr int PAIRS = PIECES / 2;
            int ratios[2] = {};
            if (first_step == 0 && k_half == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) ratios[i] = row_ratio * smem.weight_ratios[unit & 1][output + 8 * i];
            }
            for (; step < steps; step += WARPGROUPS) {
                mbarrier_wait(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES;
                int products[PAIRS][4];
                wgmma_fence();
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    const uint64_t a = smem_descriptor(tile + pair * (TILE_DATA_BYTES / PAIRS));
                    const uint64_t b = smem_descriptor_rows16(x + (step * PAIRS + pair) * PAIR_BYTES, 128, 128);
#pragma unroll
                    for (int j = 0; j < 4; ++j) wgmma_s8s8_n8(products[pair], a + 2 * j, b + 16 * j, j);
                }
                wgmma_commit();
                wgmma_wait<0>();
                release_stage(empty + 8 * stage, lane);
                advance_stage();
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(products[pair][i])::"memory");
                    const int group = 2 * (step * PAIRS + pair) + k_half;
                    if (group >= m.k / GROUP_INPUTS) continue;
#pragma unroll
                    for (int i = 0; i < 2; ++i) exact[i] += group == 0 ? in_units_of_rest(products[pair][2 * i], ratios[i]) : products[pair][2 * i];
                }
            }
        } else if constexpr (FORMAT == FP8) {
            constexpr int PAIRS = Tile::GROUPS / 2;  // pairs of input groups
            const int groups = m.k / GROUP_INPUTS;
            for (; step < steps; step += WARPGROUPS) {
                mbarrier_wait(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES;
                float products[PAIRS][4];
                const int first_pair = step * PAIRS;
                wgmma_fence();
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    const uint64_t a = smem_descriptor(tile + pair * (TILE_DATA_BYTES / PAIRS));
                    const uint64_t b = smem_descriptor_rows16(x + (first_pair + pair) * PAIR_BYTES, 128, 128);
#pragma unroll
                    for (int j = 0; j < 4; ++j) wgmma_e4m3_n8(products[pair], a + 2 * j, b + 16 * j, j);
                }
                wgmma_commit();
                float x_scale[PAIRS];
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) x_scale[pair] = smem.scales[min(2 * (first_pair + pair) + k_half, groups - 1)];
                wgmma_wait<0>();
                release_stage(empty + 8 * stage, lane);
                advance_stage();
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(products[pair][i])::"memory");
                    if (2 * (first_pair + pair) + k_half >= groups) continue;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float one = products[pair][2 * i], other = products[pair][2 * i + 1];
                        sums[i] = fmaf(is_third_part ? one * 0x1p-8f : fmaf(other, 0x1p-4f, one), x_scale[pair], sums[i]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(FULL_MASK, sums[i], 1);
        }
        auto& unit_sums = smem.sums[unit & 1];
        const int lane_output = FORMAT == INT4 && !is_fp16 ? line : output;
        if (t == (is_fp16 || FORMAT == INT4 ? 0 : 2 * k_half)) {
            float* const to = unit_sums[2 * first_step + k_half] + lane_output;
            const bool in_integers = FORMAT == W8A8 && !is_fp16;
            to[0] = in_integers ? __int_as_float(exact[0]) : sums[0], to[8] = in_integers ? __int_as_float(exact[1]) : sums[1];
        }
        __pipeline_wait_prior(0);
        sync_consumers();
        if (warp == 0 && out < m.n) {
            float y[1] = {unit_sums[0][lane]}, scale = is_fp16 ? 1.0f : code_scale<FORMAT>();
            if (!Tile::grouped && !is_fp16) scale *= smem.weight_scales[unit & 1][lane];
#pragma unroll
            for (int i = 1; i < 2 * WARPGROUPS; ++i) y[0] += unit_sums[i][lane];
            y[0] *= scale;
            if (FORMAT == W8A8 && !is_fp16) {
                int total = 0;
#pragma unroll
                for (int i = 0; i < 2 * WARPGROUPS; ++i) total += __float_as_int(unit_sums[i][lane]);
                y[0] = __half2float(__float2half_rn(scaled_sum(total, row_scale, scale)));
            }
            activate_sums<1>(y, m.activation);
            if constexpr (HAS_VALUE) {
                const __half input = __float2half_rn(y[0]);
                const bool active = (__half_as_ushort(input) & 0x7fffu) != 0;
                const unsigned all = __ballot_sync(FULL_MASK, active);
                const int at = num_listed + __popc(all & ((1u << lane) - 1u)), end = num_listed + __popc(all);
                const uint32_t barrier = smem_address(&value_smem.full);
                if (lane == 0) mbarrier_expect_tx(barrier, max(0, min(end, value_slots) - num_listed) * value_bytes);
                __syncwarp();
                if (active) {
                    value_smem.active[at] = ActiveRow{__half2float(input), out};
                    if (at < value_slots) {
                        bulk_load(smem_address(value_rows) + at * value_bytes, p.args.value.qweight + static_cast<int64_t>(out) * value_bytes, value_bytes, barrier);
                    }
                }
                num_listed = end;
                if (lane == 0) value_smem.count = num_listed;
            } else if (m.out_fp32) {
                static_cast<float*>(m.y)[out] = y[0];
            } else {
                static_cast<__half*>(m.y)[out] = __float2half_rn(y[0]);
            }
        }
    }
    if constexpr (HAS_VALUE) {
        sync_consumers();
        using Raw = ValueSums::Raw;
        const RowValueArgs& value_args = p.args.value;
        const int c = 8 * threadIdx.x, count = value_smem.count, num_cached = min(count, value_slots);
        if (c < value_args.width) {
            ValueSums value;
            mbarrier_wait(smem_address(&value_smem.full), 0);
            const auto* const mine = reinterpret_cast<const Raw*>(value_rows) + threadIdx.x;
            const auto* const all = reinterpret_cast<const Raw*>(value_args.qweight) + threadIdx.x;
            const int pitch = value_bytes / sizeof(Raw);
#pragma unroll 4
            for (int i = 0; i < num_cached; ++i) value.add(value_smem.active[i].x, mine[i * pitch]);
#pragma unroll 4
            for (int i = num_cached; i < count; ++i) value.add(value_smem.active[i].x, __ldg(all + static_cast<int64_t>(value_smem.active[i].row) * pitch));
            float sums[8];
            value.finish(value_args.scales, cta_units.first * OUTPUTS_PER_UNIT / GROUP_INPUTS, value_args.width, c, sums);
            if (count != 0) add_fixed_point(value_args.sums, value_args.width, c, sums);
        }
    }
    if constexpr (FROM_NORM) store_shift_state<CONSUMERS>(p.args.norm, smem.mix, arrived, gridDim.x, sync_consumers);
#endif
}

template <Format FORMAT, bool FROM_NORM, bool HAS_VALUE>
static int launch_row(const RowLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = hopper_row_kernel<FORMAT, FROM_NORM, HAS_VALUE>;
    const QuantGemmArgs& last = p.args.gemms[p.args.count - 1];
    const int bytes = 1024 + STAGES * RowTile<FORMAT>::BYTES + INPUT_BYTES + static_cast<int>(sizeof(RowSmem)) +
                      (HAS_VALUE ? static_cast<int>(sizeof(ValueSmem)) + VALUE_BYTES : 0);
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device_info().smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(kernel, dim3(last.first_block + last.blocks), CONSUMERS + 32, bytes, 100, stream, p);
    return launch_result();
}

// Deals CTAs to GEMMs by bytes read.
template <typename BytesOf>
static void assign_ctas(RowLaunch& p, int blocks, const BytesOf& bytes_of) {
    QuantGemmArgs* const gemms = p.args.gemms;
    for (int i = 0; i < p.args.count; ++i) gemms[i].blocks = 1;
    for (int assigned = p.args.count; assigned < blocks; ++assigned) {
        int most = 0;
        for (int i = 1; i < p.args.count; ++i) {
            if (bytes_of(i) * gemms[most].blocks > bytes_of(most) * gemms[i].blocks) most = i;
        }
        ++gemms[most].blocks;
    }
    for (int i = 0, first = 0; i < p.args.count; ++i) {
        gemms[i].blocks = min(gemms[i].blocks, p.units[i]);
        gemms[i].first_block = first, first += gemms[i].blocks;
    }
}

// Deals the units of a GEMM with a value. All CTAs are resident; each has a group of the value's inputs, or a half or
// quarter of one. Returns whether that is possible.
static bool assign_value_ctas(RowLaunch& p) {
    QuantGemmArgs& m = p.args.gemms[0];
    int cta_units = OUTPUTS_PER_UNIT;
    while (cta_units < MAX_VALUE_ROWS && m.n > cta_units * device_info().num_sms) cta_units *= 2;
    m.first_block = 0, m.blocks = m.n / cta_units;
    const bool is_alone = p.args.count == 1 && p.args.norm.x == nullptr && m.scales != nullptr;
    return is_alone && m.n % cta_units == 0 && m.blocks <= device_info().num_sms && p.args.value.width % 8 == 0 && p.args.value.width <= 8 * CONSUMERS;
}

// Scales [k / 128, n] in boxes of one tile's.
template <Format FORMAT>
static bool tensor_map_scales(CUtensorMap* tensor_map, const QuantGemmArgs& m) {
    using Tile = RowTile<FORMAT>;
    const cuuint64_t rows = m.k / GROUP_INPUTS, pitch = static_cast<cuuint64_t>(m.n) * Tile::SCALE_ITEM;
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(m.n), rows, 1}, strides[2] = {pitch, pitch * rows};
    const cuuint32_t box[3] = {OUTPUTS_PER_UNIT, Tile::GROUPS, 1}, step[3] = {1, 1, 1};
    const auto type = Tile::SCALE_ITEM == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
    return encode_tiled()(tensor_map, type, 3, const_cast<void*>(m.scales), size, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <Format FORMAT>
static int launch_format(const QuantLaunchArgs& args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    RowLaunch p = {};
    p.args = args;
    const auto row_bytes = [&](int i) {
        const QuantGemmArgs& m = args.gemms[i];
        return m.scales == nullptr ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k;
    };
    for (int i = 0; i < args.count; ++i) {
        const QuantGemmArgs& m = args.gemms[i];
        if (m.k > MAX_CACHED_K || m.k % 64 || (args.norm.x != nullptr && m.k != args.norm.width)) return static_cast<int>(cudaErrorInvalidValue);
        p.units[i] = (m.n + OUTPUTS_PER_UNIT - 1) / OUTPUTS_PER_UNIT;
        const ElementType element = m.scales == nullptr ? FP16 : BYTES;
        if (!make_tensor_map(&p.weights[i], m.qweight, element, m.n, TILE_K_BYTES / element.bytes, row_bytes(i) / element.bytes, row_bytes(i) / TILE_K_BYTES, OUTPUTS_PER_UNIT, PIECES)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        if (RowTile<FORMAT>::grouped && m.scales != nullptr && !tensor_map_scales<FORMAT>(&p.scales[i], m)) return static_cast<int>(cudaErrorInvalidValue);
    }
    if constexpr (FORMAT == INT4) {
        if (args.value.qweight != nullptr) return assign_value_ctas(p) ? launch_row<FORMAT, false, true>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    }
    if (args.value.qweight != nullptr) return static_cast<int>(cudaErrorInvalidValue);
    assign_ctas(p, device_info().num_sms, [&](int i) { return static_cast<int64_t>(row_bytes(i)) * p.units[i]; });
    return args.norm.x != nullptr ? launch_row<FORMAT, true, false>(p, stream) : launch_row<FORMAT, false, false>(p, stream);
}

// One row, k <= 4,096.
RWKV_API int rwkv_hopper_row(const QuantLaunchArgs* args, void* stream) {
    if (args->rows != 1) return static_cast<int>(cudaErrorInvalidValue);
    switch (args->format) {
        case FP8: return launch_format<FP8>(*args, stream);
        case INT4: return launch_format<INT4>(*args, stream);
        case W8A8: return launch_format<W8A8>(*args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

// x_out [C] = x [C] + sums, fp16.
__global__ void add_fixed_point_kernel(const __half* x, const unsigned long long* sums, __half* x_out, int width) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int c = 8 * threadIdx.x;
    if (c >= width) return;
    store16(x_out + c, add_packed(load16(x + c), load_fixed_point(sums, width, c)));
}

RWKV_API int rwkv_add_fixed_point(const void* x, const void* sums, void* x_out, int width, void* stream) {
    launch(add_fixed_point_kernel, dim3(1), (width / 8 + 31) / 32 * 32, stream, static_cast<const __half*>(x), static_cast<const unsigned long long*>(sums), static_cast<__half*>(x_out), width);
    return launch_result();
}
