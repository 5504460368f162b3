// y = x @ W^T with int8 weights and 8-bit inputs, exact s32 sums. Hopper's tensor cores, 1 to 4,096 rows and more.
//
//   S[t, n] = floor(input_ratios[t] * weight_ratios[n] * (sum over k < 128 of x[t, k] * W[n, k]) / 256)
//             + sum over k >= 128 of x[t, k] * W[n, k]
//   y[t, n] = fp16(float(S[t, n]) * (input_scales[t] * weight_scales[n]))
//
// S is exact, and three fp32 roundings follow. So y has the same bits for any tile, split of K and number of rows
// (rwkv_batch/model/quant/w8a8.py). The first 128 columns are segment 1.
//
// in     x              [T, K]   s8, or u8 (UNSIGNED)   K % 128 == 0
//        weights        [n, K]   s8                     n % 64 == 0
//        weight_scales  [n]      fp32
//        weight_ratios  [n]      s32                    16 to 256
//        input_scales   [pitch]  fp32                   pitch: at least the rows of all tiles
//        input_ratios   [pitch]  s32                    16 to 511 (s8) or 255 (u8)
//
// out    y              [T, n]   fp16, or fp32 of the same values
//
// inout  exchange       [CTAs, outputs, ROWS] s32       with GLOBAL: sums on their way between CTAs
//        counters       [tiles, 8] s32                 with GLOBAL: a multiple of SPLITS between launches
//        fed_largest    [T, 2] u32                     with FEEDS: bits of the largest max(y, 0)^2 * |fed_factors|, of the rest
//                                                      and of segment 1, for ffn.value's rounding
//
// Inputs in two bytes are two adjacent rows of x, high bytes first, with the same scales. y has T / 2 rows then:
//   y[t / 2, n] = fp16((float(S[t, n]) + float(S[t + 1, n]) / 256) * (input_scales[t] * weight_scales[n]))
//
// Up to 3 GEMMs of the same K and T, each with its own x, form one launch.
// A CTA computes tiles of 64 * BLOCKS * WARPGROUPS outputs by ROWS rows: outputs are wgmma's M, rows its N.
// Segment 1 is the first stage of a tile: its sums are multiplied by the ratios in place, then the others are added.
// Epilogue: scale, transpose (stmatrix), store BATCH rows of 64 outputs at a time, in whole lines.
//
// Grid: persistent, one CTA per SM (LEAN: two). With SPLITS > 1, or a K of fewer stages than the ring: one CTA per tile
// and split.
// SPLITS > 1: that many CTAs share a tile's K, exchange sums, and finish SHARE rows each. They are a cluster and
// exchange through distributed shared memory, or (GLOBAL) through memory; then all CTAs of the launch must be resident.
// PAIR = 2: two CTAs with neighbouring outputs load half of the tile of x each, for both (multicast). PAIR = 4: two such
// pairs with neighbouring rows; two CTAs with the same outputs load half of the tile of W each, too.
// Block: 128 threads that load, 128 per consumer warpgroup. One warp loads W, another one x, 128 of K per stage of the
// ring. Each consumer warpgroup multiplies 64 * BLOCKS outputs.
// Shared memory: up to 227 KB (LEAN: 113 KB).
// Bound: memory up to about 128 rows (n * K bytes, once), then the tensor cores, then power. Share of 4.8 TB/s (H200,
// ffn.key [16,384, 4,096]): 1 to 32 rows 87 to 89 %, 128 rows 75 %. Share of 1,979 TOPS: 320 rows 62 %, 960 rows 67 %,
// 4,096 rows 77 %, at the power limit 68 %.
// Made for: K 4,096 and 16,384, n 4,096 to 65,536 (bench/results/w8a8.md).
#pragma once

#include "../common.cuh"
#include "hopper_int8.cuh"
#include "w8a8_rows.cuh"

constexpr int DEPTH = SEGMENT;     // of K a stage
constexpr int BLOCK_OUTPUTS = 64;  // wgmma's M

struct W8A8Gemm {
    CUtensorMap weights, inputs;
    uint8_t* y;
    const float* weight_scales;
    const int* weight_ratios;
    const float* input_scales;
    const int* input_ratios;
    int n, out_fp32, first_group;  // groups: ABREAST tiles of outputs
};

struct W8A8Launch {
    W8A8Gemm gemms[MAX_W8A8_GEMMS];
    int count, rows, k, pitch;
    int groups, row_blocks, band;  // row_blocks: of STACKED tiles; band: row blocks that all outputs are computed of before the next ones
    int4* exchange;       // GLOBAL: [tiles][FINISHERS][SPLITS - 1][SHARE / 8][THREADS]
    unsigned* counters;   // GLOBAL: [tiles][8], counted up by every launch, of 2 and of 4 splits apart
    const float* fed_factors;  // FEEDS
    unsigned* fed_largest;
    int is_two_byte;
    int lead;  // stages that each warpgroup is ahead of the next one, so that epilogues overlap with products
};

// Few rows: W's first stages are loaded so many cycles apart, so that the loads of the previous kernel, which is latency
// bound, do not wait.
constexpr int THROTTLED_ROWS = 64;
constexpr uint32_t THROTTLE_CYCLES = 1000;

template <int WARPGROUPS_, int BLOCKS_, int ROWS_, int SPLITS_, int PAIR_, bool GLOBAL_ = false>
struct W8A8Tile {
    static constexpr int WARPGROUPS = WARPGROUPS_, BLOCKS = BLOCKS_, ROWS = ROWS_, SPLITS = SPLITS_, PAIR = PAIR_;
    static constexpr bool GLOBAL = GLOBAL_;
    static constexpr int OUTPUTS = BLOCK_OUTPUTS * BLOCKS * WARPGROUPS, CLUSTER = (GLOBAL ? 1 : SPLITS) * PAIR, TOGETHER = SPLITS * PAIR, THREADS = 128 * WARPGROUPS;
    static constexpr int ABREAST = PAIR > 1 ? 2 : 1, STACKED = PAIR > 2 ? 2 : 1;  // a cluster's tiles along outputs, along rows
    static constexpr int PARTS = ROWS > 256 ? 2 : 1, PART = ROWS / PARTS;  // rows of one wgmma
    static constexpr int BOX_ROWS = PAIR > 1 ? ROWS / 2 : PART;            // rows of one copy of x
    static constexpr int BOX_OUTPUTS = OUTPUTS / STACKED;                  // outputs of one copy of W
    static constexpr int RELEASES = ABREAST + STACKED - 1;                 // CTAs whose consumers free a slot of the ring
    static constexpr int SHARE = SPLITS == 1 ? ROWS : ROWS / SPLITS < 8 ? 8 : ROWS / SPLITS;  // rows that one CTA finishes
    static constexpr int FINISHERS = ROWS / SHARE;
    static constexpr bool LEAN = ROWS <= 16;  // two CTAs on a multiprocessor
    static constexpr int WEIGHT_BYTES = OUTPUTS * DEPTH, INPUT_BYTES = ROWS * DEPTH, STAGE_BYTES = WEIGHT_BYTES + INPUT_BYTES;
    static constexpr int BATCH = SHARE % 64 == 0 ? 64 : SHARE % 80 == 0 ? 80 : SHARE;  // rows of an epilogue's step
    static constexpr int STAGING_BYTES = (BATCH < 16 ? 16 : BATCH) * BLOCK_OUTPUTS * 2, ALL_STAGING = WARPGROUPS * STAGING_BYTES;
    static constexpr int SCALE_BYTES = 2 * ROWS * 4;  // scales and ratios of a tile's rows
    static constexpr int EXCHANGE_BYTES = (SPLITS - 1) * (SHARE / 8) * THREADS * 16;
    static constexpr bool OWN_EXCHANGE = EXCHANGE_BYTES <= 32 * 1024 && !GLOBAL;  // else in the ring, or in memory
    static constexpr int BARRIER_BYTES = 256;
    static constexpr bool FEEDS = SPLITS == 1 && ROWS == 32;
    static constexpr int OTHER_BYTES = ALL_STAGING + (OWN_EXCHANGE ? EXCHANGE_BYTES : 0) + 2 * SCALE_BYTES + BARRIER_BYTES;
    static constexpr int ROOM = (LEAN ? 113 : 227) * 1024 - 1024 - OTHER_BYTES;
    static constexpr int STAGES = ROOM / STAGE_BYTES < 12 ? ROOM / STAGE_BYTES : 12;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + OTHER_BYTES + 1024;
    static_assert((SPLITS == 1 || PAIR == 1) && (BLOCKS == 1 || SPLITS * PARTS == 1));
    static_assert(STAGES >= 3 && (OWN_EXCHANGE || GLOBAL || EXCHANGE_BYTES <= STAGES * STAGE_BYTES));
    static_assert(SHARE % BATCH == 0 && (BATCH % 16 == 0 || BATCH == 8) && SHARE * FINISHERS == ROWS && FINISHERS <= SPLITS);
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int STAGES>
struct RingSlot {
    uint32_t stage = 0, parity;
    __device__ __forceinline__ explicit RingSlot(uint32_t first_parity) : parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Addresses in shared memory.
template <typename Tile>
struct Layout {
    uint32_t ring, staging, exchange, scales, full, empty, lead, inputs_ready;

    __device__ __forceinline__ explicit Layout(const void* dynamic) {
        ring = (hopper::smem_address(dynamic) + 1023) & ~1023u;
        staging = ring + Tile::STAGES * Tile::STAGE_BYTES;
        exchange = Tile::OWN_EXCHANGE ? staging + Tile::ALL_STAGING : ring;
        scales = staging + Tile::ALL_STAGING + (Tile::OWN_EXCHANGE ? Tile::EXCHANGE_BYTES : 0);
        full = scales + 2 * Tile::SCALE_BYTES, empty = full + 8 * Tile::STAGES, lead = empty + 8 * Tile::STAGES, inputs_ready = lead + 8 * Tile::WARPGROUPS;
    }
};

struct Work {
    const W8A8Gemm* gemm;
    int output, row;  // first of the tile
};

// Row blocks run fastest, within a band: the CTAs of a wave share W's tiles and x in L2.
template <typename Tile>
__device__ __forceinline__ Work place(const W8A8Launch& p, int number, int rank) {
    const int bands_before = number / (p.groups * p.band), first_block = bands_before * p.band;
    const int in_band = number - first_block * p.groups, height = min(p.band, p.row_blocks - first_block);
    const int group = in_band / height, row_block = first_block + in_band - group * height;
    int at = 0;
    while (at + 1 < p.count && group >= p.gemms[at + 1].first_group) ++at;
    const int right = Tile::ABREAST > 1 ? rank % 2 : 0, below = Tile::STACKED > 1 ? rank / 2 : 0;
    return {&p.gemms[at], ((group - p.gemms[at].first_group) * Tile::ABREAST + right) * Tile::OUTPUTS, (row_block * Tile::STACKED + below) * Tile::ROWS};
}

// Stages of K that a CTA multiplies.
struct Stages {
    int first, end;
    template <typename Tile>
    __device__ __forceinline__ static Stages of(const W8A8Launch& p, int rank) {
        const int all = p.k / DEPTH;
        if (Tile::SPLITS == 1) return {0, all};
        return {all * rank / Tile::SPLITS, all * (rank + 1) / Tile::SPLITS};
    }
};

// One thread of each of SPLITS CTAs that run at once; what they stored before is visible after. The counter is never put back.
template <int SPLITS>
__device__ __forceinline__ void meet_ctas(unsigned* counter) {
    unsigned before, now;
    asm volatile("fence.acq_rel.gpu;\natom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    const unsigned wanted = before / SPLITS * SPLITS + SPLITS;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (static_cast<int>(now - wanted) < 0);
}

// Raises a row's largest inputs of ffn.value. Eight lanes hold 64 outputs of the row.
__device__ __forceinline__ void raise_largest(unsigned* largest, const W8A8Octet& octet, const int4& halves, bool stores) {
    float v[8];
    octet.scale<true>(*reinterpret_cast<const uint4*>(&halves), v);
    uint32_t bits = largest_bits(v);
#pragma unroll
    for (int offset = 1; offset < 8; offset <<= 1) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, offset));
    if (stores && threadIdx.x % 8 == 0) atomicMax(largest, bits);
}

template <typename Tile>
__device__ __forceinline__ void load_weights(const W8A8Launch& p, const Layout<Tile>& at, int rank) {
    using namespace hopper;
    RingSlot<Tile::STAGES> slot(1);
    const Stages stages = Stages::of<Tile>(p, rank);
    const uint64_t hint = p.row_blocks == 1 ? EVICT_FIRST : EVICT_NORMAL;
    int throttled = Tile::ROWS <= THROTTLED_ROWS && p.row_blocks == 1 ? Tile::STAGES - 1 : 0;
    for (int number = blockIdx.x / Tile::TOGETHER; number < p.groups * p.row_blocks; number += gridDim.x / Tile::TOGETHER) {
        const Work work = place<Tile>(p, number, rank);
        uint32_t bytes = Tile::STAGE_BYTES + Tile::SCALE_BYTES;
        for (int i = stages.first; i < stages.end; ++i) {
            mbarrier_wait(at.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = at.full + 8 * slot.stage;
            mbarrier_expect_tx(barrier, bytes);
            const uint32_t to = at.ring + slot.stage * Tile::STAGE_BYTES;
            if constexpr (Tile::STACKED > 1) {
                const int output = rank / 2 * Tile::BOX_OUTPUTS;
                tma_multicast(to + output * DEPTH, &work.gemm->weights, i * DEPTH, work.output + output, 0, barrier, 1 << rank | 1 << (rank ^ 2), hint);
            } else {
                tma_load(to, &work.gemm->weights, i * DEPTH, work.output, 0, barrier, hint);
            }
            bytes = Tile::STAGE_BYTES;
            slot.advance();
            if (throttled > 0) throttle(at.inputs_ready, THROTTLE_CYCLES), --throttled;
        }
    }
}

template <typename Tile>
__device__ __forceinline__ void load_inputs(const W8A8Launch& p, const Layout<Tile>& at, int rank) {
    using namespace hopper;
    RingSlot<Tile::STAGES> slot(1);
    const Stages stages = Stages::of<Tile>(p, rank);
    uint32_t scales = at.scales;  // tiles use the two places in turn
    wait_for_previous_kernel();
    arrive(at.inputs_ready);
    for (int number = blockIdx.x / Tile::TOGETHER; number < p.groups * p.row_blocks; number += gridDim.x / Tile::TOGETHER) {
        const Work work = place<Tile>(p, number, rank);
        for (int i = stages.first; i < stages.end; ++i) {
            mbarrier_wait(at.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = at.full + 8 * slot.stage, to = at.ring + slot.stage * Tile::STAGE_BYTES + Tile::WEIGHT_BYTES;
            if constexpr (Tile::PAIR > 1) {
                const int row = rank % 2 * Tile::BOX_ROWS;
                tma_multicast(to + row * DEPTH, &work.gemm->inputs, i * DEPTH, work.row + row, 0, barrier, 1 << rank | 1 << (rank ^ 1), EVICT_LAST);
            } else {
#pragma unroll
                for (int row = 0; row < Tile::ROWS; row += Tile::BOX_ROWS)
                    tma_load(to + row * DEPTH, &work.gemm->inputs, i * DEPTH, work.row + row, 0, barrier, EVICT_LAST);
            }
            if (i == stages.first) {
                const int row = min(work.row, p.pitch - Tile::ROWS);  // STACKED: a tile past all rows is not stored
                bulk_load(scales, work.gemm->input_scales + row, Tile::SCALE_BYTES / 2, barrier);
                bulk_load(scales + Tile::SCALE_BYTES / 2, work.gemm->input_ratios + row, Tile::SCALE_BYTES / 2, barrier);
            }
            slot.advance();
        }
        scales ^= at.scales ^ (at.scales + Tile::SCALE_BYTES);
    }
}
#endif

template <typename Tile, bool UNSIGNED>
__global__ void __launch_bounds__(Tile::THREADS + 128, Tile::LEAN ? 2 : 1) w8a8_kernel(const __grid_constant__ W8A8Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    constexpr int STAGES = Tile::STAGES, WARPGROUPS = Tile::WARPGROUPS, SHARE = Tile::SHARE;
    extern __shared__ unsigned char dynamic[];
    const Layout<Tile> at(dynamic);
    const int rank = Tile::TOGETHER > 1 ? blockIdx.x % Tile::TOGETHER : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(at.full + 8 * i, 1), mbarrier_init(at.empty + 8 * i, WARPGROUPS * Tile::RELEASES);
        for (int i = 0; i + 1 < WARPGROUPS; ++i) mbarrier_init(at.lead + 8 * i, 1);
        mbarrier_init(at.inputs_ready, 1);
        fence_mbarrier_init();
    }
    if constexpr (Tile::PAIR > 1) {
        sync_cluster();
    } else {
        __syncthreads();
        if constexpr (Tile::CLUSTER > 1) arrive_cluster();  // waited for before the first remote store
    }
    allow_next_kernel();
    const int group = threadIdx.x / 128 - 1, tid = threadIdx.x % 128;  // consumer warpgroup, or -1
    if (group < 0) {
        if constexpr (WARPGROUPS == 3) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        }
        const int warp = __shfl_sync(0xffffffff, tid / 32, 0);
        if (warp == 0 && elect_one()) {
            load_weights<Tile>(p, at, rank);
        } else if (warp == 1 && elect_one()) {
            load_inputs<Tile>(p, at, rank);
        }
        if constexpr (Tile::SPLITS > 1 && !Tile::GLOBAL) {
            wait_cluster();
            if constexpr (!Tile::OWN_EXCHANGE) sync_cluster();
        }
        if constexpr (Tile::CLUSTER > 1) sync_cluster();
    } else {
        if constexpr (Tile::LEAN) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
        } else if constexpr (WARPGROUPS == 3) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        const int warp = tid / 32, lane = tid % 32;
        const uint64_t weights_at = smem_descriptor(at.ring + group * (Tile::BLOCKS * BLOCK_OUTPUTS * DEPTH));
        const uint64_t inputs_at = smem_descriptor(at.ring + Tile::WEIGHT_BYTES);
        const Stages stages = Stages::of<Tile>(p, rank);
        RingSlot<STAGES> slot(0);
        uint32_t lead_parity = 0, scales = at.scales + lane % 4 * 8;
        int sums[Tile::BLOCKS * Tile::ROWS / 2];
        const auto release = [&](uint32_t barrier) {
            if (tid == 0) {
                arrive(barrier);
                if constexpr (Tile::ABREAST > 1) arrive_peer(barrier, rank ^ 1);
                if constexpr (Tile::STACKED > 1) arrive_peer(barrier, rank ^ 2);
            }
        };
        // A stage's products, asynchronous.
        const auto multiply_stage = [&](int add) {
            const uint64_t weight = weights_at + slot.stage * (Tile::STAGE_BYTES >> 4), input = inputs_at + slot.stage * (Tile::STAGE_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < DEPTH / 32; ++j) {
#pragma unroll
                for (int part = 0; part < Tile::PARTS * Tile::BLOCKS; ++part) {  // of rows or of outputs
                    const uint64_t w = weight + (Tile::BLOCKS > 1 ? part * (BLOCK_OUTPUTS * DEPTH >> 4) : 0);
                    const uint64_t x = input + (Tile::PARTS > 1 ? part * (Tile::PART * DEPTH >> 4) : 0);
                    WgmmaInt8<Tile::PART, UNSIGNED>::multiply(sums + part * (Tile::PART / 2), w + 2 * j, x + 2 * j, j > 0 ? 1 : add);
                }
            }
            wgmma_commit();
        };
        for (int number = blockIdx.x / Tile::TOGETHER; number < p.groups * p.row_blocks; number += gridDim.x / Tile::TOGETHER) {
            const Work work = place<Tile>(p, number, rank);
            const W8A8Gemm& gemm = *work.gemm;
            const int my_outputs = work.output + group * (Tile::BLOCKS * BLOCK_OUTPUTS);
            float of_output[2 * Tile::BLOCKS];  // of wgmma's lower and upper 8 rows
            int ratio[2 * Tile::BLOCKS];
#pragma unroll
            for (int i = 0; i < 2 * Tile::BLOCKS; ++i) {
                const int output = min(my_outputs + i / 2 * BLOCK_OUTPUTS + warp * 16 + lane / 4 + i % 2 * 8, gemm.n - 1);
                of_output[i] = __ldg(gemm.weight_scales + output), ratio[i] = __ldg(gemm.weight_ratios + output);
            }
            W8A8Octet octet = {};  // of the outputs that a thread stores
            if (Tile::FEEDS && p.fed_largest != nullptr && my_outputs < gemm.n) octet.load(p.fed_factors, my_outputs + tid % 8 * 8);
            if (WARPGROUPS > 1 && p.lead > 0) {
                if (group > 0) mbarrier_wait(at.lead + 8 * (group - 1), lead_parity);
                lead_parity ^= 1;
            }
            const auto signal_lead = [&](int stages_done) {
                if (stages_done == p.lead && group + 1 < WARPGROUPS && tid == 0) arrive(at.lead + 8 * group);
            };
            mbarrier_wait(at.full + 8 * slot.stage, slot.parity);
            multiply_stage(0);
            uint32_t before = at.empty + 8 * slot.stage;
            slot.advance();
            if (stages.first == 0) {
                wgmma_wait<0>();
                settle(sums);
                signal_lead(1);  // the next warpgroup multiplies while this one scales
                constexpr int CHUNKS = Tile::ROWS / 8, AT_ONCE = CHUNKS % 8 == 0 ? 8 : CHUNKS % 10 == 0 ? 10 : CHUNKS;
#pragma unroll
                for (int first = 0; first < CHUNKS; first += AT_ONCE) {
                    int of_row[AT_ONCE][2];
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) load_shared_pair(of_row[j], scales + Tile::SCALE_BYTES / 2 + 32 * (first + j));
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) {
#pragma unroll
                        for (int i = 0; i < 4 * Tile::BLOCKS; ++i) {
                            int& sum = sums[i / 4 * (Tile::ROWS / 2) + 4 * (first + j) + i % 4];
                            sum = in_units_of_rest(sum, of_row[j][i % 2] * ratio[i / 2]);
                        }
                    }
                }
                settle(sums);
            }
            for (int i = stages.first + 1; i < stages.end; ++i) {
                mbarrier_wait(at.full + 8 * slot.stage, slot.parity);
                multiply_stage(1);
                wgmma_wait<1>();
                release(before);
                before = at.empty + 8 * slot.stage;
                slot.advance();
                signal_lead(i + 1);
            }
            wgmma_wait<0>();
            settle(sums);
            release(before);

            // Scales SHARE rows of a block and stores them; `mine`: their sums, first: the first row, of the tile.
            const auto finish = [&](const int* mine, int first, int block) {
                constexpr int CHUNKS = Tile::BATCH / 8, LINES = (Tile::BATCH + 15) / 16;
                const int output = my_outputs + block * BLOCK_OUTPUTS;
                // rows of 64 outputs with the 128-byte swizzle: a warp writes 16 outputs of 16 rows at a time and reads whole rows
                const uint32_t buffer = at.staging + group * Tile::STAGING_BYTES;
                const uint32_t to = buffer + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
                const uint32_t from = buffer + tid / 8 * 128 + ((tid ^ tid / 8) & 7) * 16;
                int row = work.row + first + tid / 8;
                const int bytes = gemm.out_fp32 ? 4 : 2;
                uint8_t* y = gemm.y + (static_cast<int64_t>(row >> p.is_two_byte) * gemm.n + output + tid % 8 * 8) * bytes;
                const bool inside = output < gemm.n && (Tile::BATCH >= 16 || tid < 8 * Tile::BATCH) && (tid / 8 & p.is_two_byte) == 0;
                const float of_low = p.is_two_byte ? OF_LOW_BYTES : 0.0f;  // a thread holds both rows of an input
#pragma unroll
                for (int batch = 0; batch < SHARE; batch += Tile::BATCH) {
                    float of_row[CHUNKS][2];
#pragma unroll
                    for (int j = 0; j < CHUNKS; ++j) load_shared_pair(of_row[j], scales + (first + batch + 8 * j) * 4);
                    uint32_t pairs[2 * LINES][2] = {};
#pragma unroll
                    for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
                        for (int up = 0; up < 2; ++up) {
                            const int* const two = mine + 4 * (batch / 8 + j) + 2 * up;
                            const float scale = of_output[2 * block + up];
                            const __half2 pair = __floats2half2_rn(scaled_sum(joined_sum(two[0], two[1], of_low), of_row[j][0], scale), scaled_sum(two[1], of_row[j][1], scale));
                            pairs[j][up] = *reinterpret_cast<const uint32_t*>(&pair);
                        }
                    }
                    sync_consumers(1 + group, 128);  // the batch before has been read
#pragma unroll
                    for (int i = 0; i < LINES; ++i) stmatrix_x4_transposed(to + i * 16 * 128, pairs[2 * i][0], pairs[2 * i][1], pairs[2 * i + 1][0], pairs[2 * i + 1][1]);
                    sync_consumers(1 + group, 128);
                    int4 lines[LINES];
#pragma unroll
                    for (int i = 0; i < LINES; ++i) lines[i] = load_shared_int4(from + i * 16 * 128);
#pragma unroll
                    for (int i = 0; i < LINES; ++i) {
                        if (inside && row < p.rows) store_outputs(y, lines[i], gemm.out_fp32);
                        if (Tile::FEEDS && p.fed_largest != nullptr) raise_largest(p.fed_largest + 2 * row + (output < SEGMENT), octet, lines[i], inside && row < p.rows);
                        row += 16, y += static_cast<int64_t>(16 >> p.is_two_byte) * gemm.n * bytes;
                    }
                }
            };
            if constexpr (Tile::SPLITS == 1) {
                wait_for_previous_kernel();  // before the first write
#pragma unroll
                for (int block = 0; block < Tile::BLOCKS; ++block) finish(sums + block * (SHARE / 2), 0, block);
            } else {
                constexpr int SHARE_CHUNKS = SHARE / 8;
                const int thread = group * 128 + tid;
                // The sums of share `to` from the CTA `from`, a slot of [SHARE_CHUNKS][THREADS] of 16 bytes.
                const auto slot_of = [&](int from, int to) { return (from < to ? from : from - 1) * SHARE_CHUNKS * Tile::THREADS + thread; };
                int4* const of_tile = p.exchange + static_cast<int64_t>(number) * Tile::FINISHERS * (Tile::EXCHANGE_BYTES / 16);
                if constexpr (!Tile::GLOBAL) {
                    wait_cluster();  // all CTAs of the cluster run
                    if constexpr (!Tile::OWN_EXCHANGE) sync_cluster();  // none of them reads its ring any more
                }
#pragma unroll
                for (int to = 0; to < Tile::FINISHERS; ++to) {
                    if (to == rank) continue;
                    const uint32_t remote = Tile::GLOBAL ? 0 : peer_address(at.exchange + slot_of(rank, to) * 16, to);
                    int4* const shared = of_tile + to * (Tile::EXCHANGE_BYTES / 16) + slot_of(rank, to);
#pragma unroll
                    for (int j = 0; j < SHARE_CHUNKS; ++j) {
                        const int* v = sums + 4 * (to * SHARE_CHUNKS + j);
                        if constexpr (Tile::GLOBAL) {
                            __stcg(shared + j * Tile::THREADS, make_int4(v[0], v[1], v[2], v[3]));
                        } else {
                            store_peer(remote + j * Tile::THREADS * 16, v[0], v[1], v[2], v[3]);
                        }
                    }
                }
                if constexpr (Tile::GLOBAL) {
                    sync_consumers(1, Tile::THREADS);
                    if (thread == 0) meet_ctas<Tile::SPLITS>(p.counters + 8 * number + Tile::SPLITS);
                    sync_consumers(1, Tile::THREADS);
                } else {
                    sync_cluster();
                }
                if (rank < Tile::FINISHERS) {
                    int mine[SHARE / 2];
#pragma unroll
                    for (int to = 0; to < Tile::FINISHERS; ++to) {
                        if (to != rank) continue;
#pragma unroll
                        for (int i = 0; i < SHARE / 2; ++i) mine[i] = sums[to * (SHARE / 2) + i];
                    }
                    const int4* const given = of_tile + rank * (Tile::EXCHANGE_BYTES / 16) + thread;
#pragma unroll
                    for (int from = 0; from < Tile::SPLITS - 1; ++from) {
#pragma unroll
                        for (int j = 0; j < SHARE_CHUNKS; ++j) {
                            const int place = (from * SHARE_CHUNKS + j) * Tile::THREADS;
                            const int4 v = Tile::GLOBAL ? __ldcg(given + place) : load_shared_int4(at.exchange + (place + thread) * 16);
                            mine[4 * j] += v.x, mine[4 * j + 1] += v.y, mine[4 * j + 2] += v.z, mine[4 * j + 3] += v.w;
                        }
                    }
                    wait_for_previous_kernel();
                    finish(mine, rank * SHARE, 0);
                }
            }
            scales ^= (at.scales + lane % 4 * 8) ^ (at.scales + Tile::SCALE_BYTES + lane % 4 * 8);
        }
        if constexpr (Tile::PAIR > 1) sync_cluster();
    }
#endif
}
