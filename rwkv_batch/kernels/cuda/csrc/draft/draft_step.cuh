// Arguments and memory of draft_step.cu, and how its CTAs exchange activations.
#pragma once

#include "../common.cuh"

constexpr int MAX_DRAFT_ROWS = 8, LOW_RANK = 64, GATE_RANK = 128;

struct DraftStepArgs {
    const __half* weights;  // [layers, DraftWeights::SIZE], in the order of a warp's loads: see draft_step.py
    const __half* ups;  // [layers, heads, DraftWeights::UPS]: second halves of the low-rank maps, likewise
    const float* vectors;  // [layers, NUM_VECTORS, C]
    const __half* mixes;  // [layers, NUM_MIXES, C]: of the time mix in the order r, k, v, w, a, g, and of the channel mix
    const __half *embedding, *head;  // [V, C]; the head in the order of a warp's loads
    const float *out_weight, *out_bias;  // [C]
    __half *wkv, *shift;  // of layer 0 and slot 0
    const int64_t* table;  // [steps, 3, table_rows]: slots to read and write, and tokens; -1: the row's `chosen`
    int64_t *step, *chosen, *guesses;  // [1], counted up; [table_rows]; [steps, table_rows]
    __half* exchange;  // [DraftExchange::SETS, SIZE], all bits set
    unsigned long long* keys;  // [MAX_DRAFT_ROWS, CTAs], all bits set
    float* v_first;  // [MAX_DRAFT_ROWS, C]
    int* launches;  // [1], counted modulo SETS: which set the first layer has
    int64_t wkv_slot, wkv_layer, shift_slot, shift_layer;  // halves from one to the next
    int num_layers, width, vocab, rows, table_rows;
};
enum Vector { LN1 = 0, LN2 = 2, LN_X = 4, W0 = 6, A0, V0, K_K, K_A, R_K, NUM_VECTORS };  // a norm's bias follows its weight
constexpr int NUM_MIXES = 7, CHANNEL_MIX = 6;

// A layer's maps, in tiles of 8 outputs and C inputs. ffn.value has four for the same outputs.
template <int C>
struct DraftWeights {
    static constexpr int NUM_INPUTS = 3 * C + 3 * LOW_RANK + GATE_RANK;  // r, k, v; first halves of v, w, a (0 if absent), g
    static constexpr int OUTPUT = NUM_INPUTS / 8, KEY = OUTPUT + C / 8, VALUE = KEY + C / 2, TILES = VALUE + C / 2;
    static constexpr int TILE = 8 * C, SIZE = TILES * TILE;
    static constexpr int UPS = 64 * (3 * LOW_RANK + GATE_RANK);
};

// The activations of a layer that CTAs exchange, in halves, for MAX_DRAFT_ROWS rows each. Layers use SETS buffers in
// rotation, so that they stay in L2.
template <int C>
struct DraftExchange {
    static constexpr int SETS = 3;
    static constexpr int INPUTS = DraftWeights<C>::NUM_INPUTS;
    static constexpr int Y = MAX_DRAFT_ROWS * INPUTS;  // the time mix before its output map
    static constexpr int ATT = Y + MAX_DRAFT_ROWS * C, HIDDEN = ATT + MAX_DRAFT_ROWS * C;  // its output; relu(k)^2
    static constexpr int FFN = HIDDEN + MAX_DRAFT_ROWS * 4 * C, SIZE = FFN + MAX_DRAFT_ROWS * C;
};

// A word of two halves that is not written yet. Rounding to fp16 never makes this NaN.
constexpr uint32_t EMPTY = 0xffffffffu;
constexpr unsigned long long EMPTY_KEY = ~0ull;

__device__ __forceinline__ uint4 load_exchanged(const __half* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_exchanged(__half* p, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
__device__ __forceinline__ unsigned long long load_key(const unsigned long long* p) {
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_key(unsigned long long* p, unsigned long long key) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(key) : "memory");
}

__device__ __forceinline__ bool is_written(const uint4& v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

// Prefetches contiguous bytes, a multiple of 16, into L2.
__device__ __forceinline__ void prefetch_bytes(const void* p, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
