// Shared memory and named barriers of wkv_chunk.cu.
#pragma once

#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int TEAM = 128;  // threads of the state warps, or of one team
constexpr int LD = HEAD_SIZE + 8;  // row pitch in fp16: no ldmatrix conflicts
constexpr int LD_SMALL = CHUNK + 8;
constexpr int TRANSPOSED_ROWS = HEAD_SIZE + CHUNK;  // of [A' KA']^T and [R' KR']^T
constexpr int PAIR_TOKENS = 64;  // tokens per row; fewer are not worth a cluster
constexpr int SHORT_TOKENS = 160;  // tokens per row; below, a CTA's prologue and epilogue dominate
constexpr float LOG2_E = 1.4426950409f;
constexpr uint32_t MINUS_INFINITY = 0xfc00fc00u;  // two fp16

// A chunk's operands, from a team to the state warps.
struct __align__(16) ChunkOperands {
    __half a[TRANSPOSED_ROWS][LD_SMALL], r[TRANSPOSED_ROWS][LD_SMALL];  // [A' KA']^T, [R' KR']^T: [key, then s][t]
    __half b[CHUNK][LD], k[CHUNK][LD], v[CHUNK][LD];
    float decay[HEAD_SIZE];  // of the chunk
};

// A team's scratch for its current chunk.
struct __align__(16) TeamScratch {
    __half a[CHUNK][LD], r[CHUNK][LD];
    union {
        struct {
            __half b[CHUNK][LD], k[CHUNK][LD];
        };
        float y[CHUNK][HEAD_SIZE + 4];  // written by the state warps
    };
    __half ka[CHUNK][LD_SMALL], br[CHUNK][LD_SMALL], kr[CHUNK][LD_SMALL];  // [t][s]
    __half inverse[CHUNK][LD_SMALL];                                       // T^T: [s][t]
    float ba[CHUNK][CHUNK + 4];
    float log_decay[4][HEAD_SIZE];  // per warp, of its 4 tokens
    float middle[HEAD_SIZE];  // decay up to the chunk's middle
};

// Constants of the head. The sigmoid biases are stored times -log2(e).
struct __align__(16) Constants {
    float w0[HEAD_SIZE], a0[HEAD_SIZE], v0[HEAD_SIZE], k_k[HEAD_SIZE], k_a[HEAD_SIZE], one_less_k_a[HEAD_SIZE], r_k[HEAD_SIZE], ln_weight[HEAD_SIZE], ln_bias[HEAD_SIZE];
};

// A chunk computed by a team of the other CTA of a cluster.
struct RemoteChunk {
    ChunkOperands stage;
    float y[CHUNK][HEAD_SIZE + 4];
    uint64_t full;  // mbarrier: the operands have arrived
};

// Teams of the CTA without the state, which has one in place of the state warps; of both.
template <int TEAMS, bool PAIRED>
constexpr int FAR_TEAMS = PAIRED ? TEAMS + 1 : 0;
template <int TEAMS, bool PAIRED>
constexpr int ALL_TEAMS = TEAMS + FAR_TEAMS<TEAMS, PAIRED>;

// TEAMS: of the CTA that has the state.
template <int TEAMS, bool PAIRED>
struct Smem {
    ChunkOperands stages[TEAMS + PAIRED];
    TeamScratch scratch[TEAMS + PAIRED];
    Constants constants;
    RemoteChunk remote[FAR_TEAMS<TEAMS, PAIRED>];
    uint64_t used[FAR_TEAMS<TEAMS, PAIRED>];  // mbarriers of the CTA without state: y is there
};

// Named barriers: the CTA's; one per team; per team "operands are ready"; per team "operands are used and y is there".
// Teams of the CTA without the state do not use the last two.
constexpr int BLOCK_BARRIER = 0;
__device__ __forceinline__ int team_barrier(int team) { return 1 + team; }
template <int TEAMS>
__device__ __forceinline__ int full_barrier(int team) { return 1 + TEAMS + team; }
template <int TEAMS>
__device__ __forceinline__ int empty_barrier(int team) { return 1 + 2 * TEAMS + team; }

__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
