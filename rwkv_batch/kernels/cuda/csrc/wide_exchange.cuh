// What blocks of a launch of wide.cuh tell each other through memory: the sums of a tile whose k they share, and that what others read is written.
#pragma once

#include "wide_work.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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
#endif
