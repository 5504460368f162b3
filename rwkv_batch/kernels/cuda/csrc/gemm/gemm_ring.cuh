// The producer/consumer ring of the Hopper GEMMs: shared memory layout, mbarriers, and the throttle of the first loads.
#pragma once

#include "gemm_scheduler.cuh"

// Shared memory of a CTA with stages of STAGE_BYTES.
template <int STAGE_BYTES, int MAX_STAGES = 12>
struct RingLayout {
    static constexpr int BYTES = STAGE_BYTES;
    static constexpr int STAGING_BYTES = 8 * 2 * 16 * STAGING_PITCH;
    static constexpr int AVAILABLE = 227 * 1024 - 1024 - STAGING_BYTES - 512;
    static constexpr int STAGES = AVAILABLE / BYTES < MAX_STAGES ? AVAILABLE / BYTES : MAX_STAGES;
    static constexpr int SHARED_BYTES = STAGES * BYTES + STAGING_BYTES + 512 + 1024;  // 1024: to align the ring
    static_assert(STAGES >= 2);
};

// W8A8 with few rows: the CTAs of wkv_few.cu, which runs next, fit on the SM, too.
template <int ROWS, GemmKind KIND>
struct GemmTile : RingLayout<(TILE_N + ROWS) * TILE_K_BYTES, HAS_INT8<KIND> && IS_LEAN<ROWS, KIND> ? 8 : 12> {
    static constexpr int WEIGHT_BYTES = TILE_N * TILE_K_BYTES, INPUT_BYTES = ROWS * TILE_K_BYTES;
    static constexpr int NUM_WGMMA = ROWS > 256 ? 2 : 1, WGMMA_N = ROWS / NUM_WGMMA;  // rows of one wgmma and of one TMA load
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A stage of the ring and the mbarrier parity to wait for.
template <int STAGES>
struct PipelineState {
    uint32_t stage, parity;

    __device__ __forceinline__ explicit PipelineState(uint32_t first_parity) : stage(0), parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Addresses of a CTA's ring, staging buffers and mbarriers, and its position in the grid.
// inputs_ready: mbarrier that completes when the previous kernel has ended.
template <typename Tile, int SPLITS>
struct GemmCta {
    uint32_t ring, staging, full, empty, inputs_ready;
    int split_index, first, blocks;

    // readers: arrivals that free a stage. All threads call it. The next kernel may start after it.
    __device__ __forceinline__ GemmCta(const unsigned char* dynamic, int readers)
        : ring((hopper::smem_address(dynamic) + 1023) & ~1023u),
          staging(ring + Tile::STAGES * Tile::BYTES),
          full(staging + Tile::STAGING_BYTES),
          empty(full + 8 * Tile::STAGES),
          inputs_ready(empty + 8 * Tile::STAGES),
          split_index(blockIdx.x % SPLITS),
          first(blockIdx.x / SPLITS),
          blocks(gridDim.x / SPLITS) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < Tile::STAGES; ++i) {
                hopper::mbarrier_init(full + 8 * i, 1);
                hopper::mbarrier_init(empty + 8 * i, readers);
            }
            hopper::mbarrier_init(inputs_ready, 1);
            hopper::fence_mbarrier_init();
        }
        __syncthreads();
        allow_next_kernel();
    }
};

// Prefetching W at full rate delays the loads of the previous kernel, shift_mix, which is latency bound. So the
// producer spaces its first loads THROTTLE_CYCLES apart until that kernel has ended.
// With split-K the previous kernel is the WKV or a GEMM (7.2B). Narrower models split behind shift_mix, too, but gain
// nothing.
template <int SPLITS, GemmKind KIND>
constexpr bool FOLLOWS_SHIFT_MIX = CTA_SPLITS<SPLITS, KIND> == 1 && !IS_TRANSPOSED_8BIT<KIND>;
constexpr int MAX_THROTTLED_FP16_ROWS = 8;  // rows; no gain with more
constexpr uint32_t THROTTLE_CYCLES = 1000;
#endif
