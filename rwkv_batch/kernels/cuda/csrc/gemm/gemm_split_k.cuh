// Communication between CTAs of one launch through global memory: split-K reduction and dependencies.
#pragma once

#include "gemm_scheduler.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// All 256 consumer threads.
__device__ __forceinline__ void sync_warpgroups() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// A round trip to global memory takes over 1 us while weights stream. So one thread publishes a CTA's stores, and
// counters are reset after the outputs are stored.
__device__ __forceinline__ void release_increment(int* at) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(at) : "memory");
}
__device__ __forceinline__ void acquire_at_least(const int* at, int count) {
    int value;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    } while (value < count);
}
// One thread per CTA calls it. The last of `count` resets both counters.
__device__ __forceinline__ void reset_counters(int* counters, int count) {
    if (atomicAdd(counters + 1, 1) == count - 1) counters[0] = counters[1] = 0;
}

// Split-K reduction. Each CTA ends with its own chunks of 8 rows in sums[0 ..], the splits added in order 0 .. SPLITS -
// 1.
// The last CTAs' chunks may be fewer; their further sums are undefined. All CTAs of the launch must be resident.
// The counters stay set until reset_split_counters.
template <int ROWS, int SPLITS>
constexpr int SPLIT_CHUNKS = (ROWS / 8 + SPLITS - 1) / SPLITS;

template <int ROWS, int SPLITS>
__device__ __forceinline__ void reduce_splits(float (&sums)[ROWS / 2], const GemmLaunch& p, int tile, int split_index) {
    constexpr int CHUNKS = ROWS / 8, OWN = SPLIT_CHUNKS<ROWS, SPLITS>;
    constexpr int BATCH = OWN % 4 == 0 ? 4 : OWN % 3 == 0 ? 3 : OWN % 2 == 0 ? 2 : 1;
    const int thread = threadIdx.x - 128;
    float4* const partials = p.partials + static_cast<int64_t>(tile) * SPLITS * CHUNKS * 256 + thread;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        if (j / OWN == split_index) continue;
        __stcg(partials + (split_index * CHUNKS + j) * 256,
               make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
    sync_warpgroups();
    if (thread == 0) {
        release_increment(p.counters + 2 * tile);
        acquire_at_least(p.counters + 2 * tile, SPLITS);
    }
    sync_warpgroups();
#pragma unroll
    for (int first = 0; first < OWN; first += BATCH) {
        float4 loaded[SPLITS][BATCH];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int j = 4 * (s * OWN + first + b);
                if (s == split_index) {
                    if (j < ROWS / 2) loaded[s][b] = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
                } else if (SPLITS * OWN == CHUNKS || split_index * OWN + first + b < CHUNKS) {
                    loaded[s][b] = __ldcg(partials + (s * CHUNKS + split_index * OWN + first + b) * 256);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float4 total = loaded[0][b];
#pragma unroll
            for (int s = 1; s < SPLITS; ++s) {
                total.x += loaded[s][b].x, total.y += loaded[s][b].y, total.z += loaded[s][b].z, total.w += loaded[s][b].w;
            }
            const int j = 4 * (first + b);  // for split 0: read above, or stored
            sums[j] = total.x, sums[j + 1] = total.y, sums[j + 2] = total.z, sums[j + 3] = total.w;
        }
    }
}

template <int SPLITS>
__device__ __forceinline__ void reset_split_counters(const GemmLaunch& p, int tile) {
    if (threadIdx.x == 128) reset_counters(p.counters + 2 * tile, SPLITS);
}

// Dependent tiles wait until all independent split tiles are stored. The caller ensures that these are resident.
// Counters: finished splits, CTAs that have seen it; zero between launches.
__device__ __forceinline__ int* dependency_counters(const GemmLaunch& p) { return p.counters + 2 * num_split_tiles(p); }
// All consumer threads, after their stores.
__device__ __forceinline__ void signal_dependents(const GemmLaunch& p) {
    sync_warpgroups();
    if (threadIdx.x == 128) release_increment(dependency_counters(p));
}
template <int SPLITS>
__device__ __forceinline__ void wait_for_dependencies(const GemmLaunch& p) {
    acquire_at_least(dependency_counters(p), num_split_tiles(p) * SPLITS);
    hopper::fence_proxy_async();
}
#endif
