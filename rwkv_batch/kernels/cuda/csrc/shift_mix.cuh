// What shift_mix.cu is given, and a token's mixed inputs on their way out: as halves, codes, parts or bytes.
#pragma once

#include "norm_mix.cuh"
#include "row_bytes.cuh"
#include "row_codes.cuh"
#include "row_parts.cuh"

struct ShiftMixArgs {
    const __half* x;
    const __half* delta;
    const float* shares;
    const unsigned long long* sums;
    unsigned long long* added;
    __half* x_out;
    __half* mixed;
    uint2* codes;
    float* scales;
    __half* shift;
    __half* tail;
    const float* weight;
    const float* bias;
    const __half* mix;
    const int64_t* cu_seqlens;  // null: every row is one token
    const int64_t* token_rows;  // [T], null likewise
    const int64_t* read_slots;
    const int64_t* write_slots;
    int64_t slot_stride;  // elements between slots
    int tokens;
    int width;
    int mixes;
    int tokens_per_block;  // of prompts
    int scale_pitch;       // scales of one mix, or in bytes of one group
    int num_shares;
    int token_blocks;  // that share a token as a cluster: 1 or TOKEN_BLOCKS
    int in_bytes;
};

// How the first mixed inputs are wanted.
enum class As { HALVES, CODES, PARTS, BYTES };
// A thread without channels of its own takes part in what others' are made.
template <As FORM>
constexpr bool NEEDS_ALL = FORM == As::CODES || FORM == As::BYTES;

// Of codes, parts and bytes: how many, and the first that is wanted as halves beside them: v's low rank reads these.
template <int MIXES>
constexpr int CODED_MIXES = MIXES == 6 ? 3 : 1;
template <int MIXES, As FORM>
constexpr int FIRST_HALVES = FORM == As::HALVES ? 0 : MIXES == 6 ? 2 : 1;

// Written in assembly because the compiler splits a 16-byte store into four where that saves it a copy of registers.
__device__ __forceinline__ void store_whole(void* p, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A line into L2.
__device__ __forceinline__ void ask_for_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The same, to be written back to memory early: what is not read soon, and more than the cache would keep.
__device__ __forceinline__ void store_early(void* p, const uint4& v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A token's first COUNT mixed inputs, zeros of threads that are not active, as codes; all threads.
template <int COUNT>
__device__ __forceinline__ void write_codes(
    const ShiftMixArgs& a, const uint4* mixed, int token, int channel, bool active, float (*scratch)[MAX_WARPS]) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    float v[8];
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        unpack8(mixed[m], v);
        const float largest = warp_max(largest_of(v));
        if (lane == 0) scratch[m][threadIdx.x >> 5] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        const RowScale of_row = scale_of_row(warp_max(lane < warps ? scratch[m][lane] : 0.0f));
        if (threadIdx.x == 0) a.scales[m * a.scale_pitch + token] = of_row.scale;
        unpack8(mixed[m], v);
        const int64_t at = (static_cast<int64_t>(m) * a.tokens + token) * a.width + channel;
        if (active) a.codes[at / 8] = codes_of(v, of_row.inverse);
    }
}

// A token's mixed inputs: GROUP at a time, the codes' last. `mix`: the weights of all of them, or room for a group's.
template <int MIXES, int GROUP, As FORM, typename Store>
__device__ __forceinline__ void write_mixed(
    const ShiftMixArgs& a, const float (&h)[8], const float (&change)[8], uint4 (&mix)[GROUP], int token, int channel,
    bool active, float (*scratch)[MAX_WARPS], Store store) {
    static_assert(FORM == As::HALVES || GROUP >= CODED_MIXES<MIXES>);
    constexpr int FIRST = FIRST_HALVES<MIXES, FORM>;
    const int64_t at = static_cast<int64_t>(token) * a.width + channel;
#pragma unroll
    for (int i = 0; i < MIXES; i += GROUP) {
        const int first = FORM != As::HALVES ? MIXES - GROUP - i : i;
        if (GROUP < MIXES && active) {
#pragma unroll
            for (int m = 0; m < GROUP; ++m) mix[m] = load16(a.mix + (first + m) * a.width + channel);
        }
#pragma unroll
        for (int m = 0; m < GROUP; ++m) {
            mix[m] = mixed_with(h, change, mix[m]);
            if (active && first + m >= FIRST) store(a.mixed + static_cast<int64_t>(first + m - FIRST) * a.tokens * a.width + at, mix[m]);
        }
        if constexpr (FORM == As::CODES) {
            if (first == 0) write_codes<CODED_MIXES<MIXES>>(a, mix, token, channel, active, scratch);
        }
        if constexpr (FORM == As::BYTES) {
            constexpr int COUNT = CODED_MIXES<MIXES>;
            uint8_t* bytes[COUNT];
            float2* items[COUNT];
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                const int64_t group = static_cast<int64_t>(m) * (a.width / BYTES_GROUP) + channel / BYTES_GROUP;
                bytes[m] = reinterpret_cast<uint8_t*>(a.codes) + (static_cast<int64_t>(m) * a.tokens + token) * 2 * a.width + channel;
                items[m] = reinterpret_cast<float2*>(a.scales) + group * a.scale_pitch + token;
            }
            if (first == 0) store_bytes<BYTES_GROUP, COUNT>(bytes, a.width, items, mix, active);
        }
        if constexpr (FORM == As::PARTS) {
#pragma unroll
            for (int m = 0; m < CODED_MIXES<MIXES>; ++m) {
                const int64_t row = static_cast<int64_t>(m) * a.tokens + token;
                if (first == 0 && active) store_parts(reinterpret_cast<uint8_t*>(a.codes) + row * 2 * a.width + channel, a.width, mix[m]);
            }
        }
    }
}
