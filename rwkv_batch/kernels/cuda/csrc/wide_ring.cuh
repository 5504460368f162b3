// The ring of tiles that a block of wide.cuh, or of a kernel that is made like it, keeps filled; its barriers; when W's first tiles are asked for.
#pragma once

#include "wide_work.cuh"

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

// W's first tiles, asked for at once, would stand in line before what the kernel before reads: shift_mix, which waits for memory more
// than it works. So they are asked for so many cycles apart until it has ended. Where blocks share k, the kernel before is the WKV or a product, of
// models as wide as 7.2B; of narrower ones they share it behind shift_mix as well, where none takes turns.
template <int SPLITS, WideKind KIND>
constexpr bool IS_BEHIND_SHIFT_MIX = BLOCK_SPLITS<SPLITS, KIND> == 1 && !TURNS_CODES<KIND>;
constexpr int MOST_HALVES_IN_TURN = 8;  // rows; for more it was no gain
constexpr uint32_t TILE_CYCLES = 1000;

// So long, or until the barrier's first phase is over.
__device__ __forceinline__ void wait_for_turn(uint32_t barrier, uint32_t cycles) {
    uint32_t begun, now, over;
    asm volatile("mov.u32 %0, %clock;" : "=r"(begun)::"memory");
    do {
        asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], 0;\nselp.u32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(barrier)
                     : "memory");
        asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
    } while (over == 0 && now - begun < cycles);
}
#endif
