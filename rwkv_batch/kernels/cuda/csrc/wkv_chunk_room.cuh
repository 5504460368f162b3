// What a block of wkv_chunk.cu has in shared memory: chunks between a team and the state's warps, a team's own, constants; and its
// barriers by number.
#pragma once

#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int TEAM = 128;                  // threads that carry the state, or make one chunk's operands
constexpr int LD = HEAD + 8;               // halves between rows of an operand: ldmatrix without conflicts
constexpr int LD_SMALL = CHUNK + 8;
constexpr int ROWS_TURNED = HEAD + CHUNK;  // of [A' KA']^T and [R' KR']^T
constexpr int PAIR_TOKENS = 64;            // of a row: fewer are not worth two blocks
constexpr int SHORT_TOKENS = 160;          // fewer: what a block begins and ends with weighs
constexpr float LOG2_E = 1.4426950409f;
constexpr uint32_t MINUS_INFINITY = 0xfc00fc00u;  // two fp16

// A chunk between a team and the state's warps.
struct __align__(16) Stage {
    __half a[ROWS_TURNED][LD_SMALL], r[ROWS_TURNED][LD_SMALL];  // [A' KA']^T, [R' KR']^T: [key, then s][t]
    __half b[CHUNK][LD], k[CHUNK][LD], v[CHUNK][LD];
    float decay[HEAD];  // of the whole chunk
};

// A team's own: the chunk that it is at.
struct __align__(16) Scratch {
    __half a[CHUNK][LD], r[CHUNK][LD];
    union {
        struct {
            __half b[CHUNK][LD], k[CHUNK][LD];
        };
        float y[CHUNK][HEAD + 4];  // what the state's warps leave
    };
    __half ka[CHUNK][LD_SMALL], br[CHUNK][LD_SMALL], kr[CHUNK][LD_SMALL];  // [t][s]
    __half inverse[CHUNK][LD_SMALL];                                       // T^T: [s][t]
    float ba[CHUNK][CHUNK + 4];
    float log_decay[4][HEAD];  // of a warp's 4 tokens
    float middle[HEAD];        // decay up to the chunk's middle
};

// What the elementwise part needs of each channel; the sigmoids' biases times -log2(e), 1 - k_a beside k_a.
struct __align__(16) Constants {
    float w0[HEAD], a0[HEAD], v0[HEAD], k_k[HEAD], k_a[HEAD], one_less_k_a[HEAD], r_k[HEAD], ln_weight[HEAD], ln_bias[HEAD];
};

// A chunk that a team of the other block of a pair made.
struct Guest {
    Stage stage;
    float y[CHUNK][HEAD + 4];
    uint64_t made;  // mbarrier: the stage is here
};

template <int TEAMS, bool PAIRED>
struct Shared {
    Stage stages[TEAMS];
    Scratch scratch[TEAMS];
    Constants constants;
    Guest guests[PAIRED ? TEAMS : 0];
    uint64_t used[PAIRED ? TEAMS : 0];  // mbarriers of the block without state: y is there
};

// Barriers by number: the block's; then each team's own; then, of each team's stage: it is made, it is used and y there.
constexpr int BLOCK_BARRIER = 0;
__device__ __forceinline__ int team_barrier(int team) { return 1 + team; }
template <int TEAMS>
__device__ __forceinline__ int made_barrier(int team) { return 1 + TEAMS + team; }
template <int TEAMS>
__device__ __forceinline__ int used_barrier(int team) { return 1 + 2 * TEAMS + team; }

__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void pass(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
