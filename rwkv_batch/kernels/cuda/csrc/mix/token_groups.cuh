// Mixed inputs of some tokens at once, so that a CTA reads weights once for all of them.
#pragma once

#include <cuda_pipeline.h>

#include "shift_mix.cuh"

constexpr int GROUP_TOKENS = 4;
constexpr int GROUP_THREADS = MAX_WIDTH / 8;

template <int MIXES, OutputFormat OUT>
struct GroupSmem {
    static constexpr bool HAS_ROWS = OUT == OutputFormat::W8A8;
    uint4 x[GROUP_TOKENS][GROUP_THREADS], delta[GROUP_TOKENS][GROUP_THREADS];  // of the next group
    __half rows[HAS_ROWS ? GROUP_TOKENS : 1][HAS_ROWS ? MAX_WIDTH : 8];        // one mix of the tokens
    float2 moments[2][GROUP_TOKENS][MAX_WARPS];
    uint32_t largest[QUANTISED_MIXES<MIXES>][GROUP_TOKENS][MAX_WARPS];  // bits of the warps' largest |v|; W8A8: of the rest
    uint32_t large[QUANTISED_MIXES<MIXES>][GROUP_TOKENS];               // W8A8: of segment 1
};

// Rows of a group's tokens and of their neighbours: lane i + 1 has token i's.
struct GroupRows {
    int row_of_lane, read_slot_of_lane, write_slot_of_lane;
    bool has_slots;

    __device__ __forceinline__ void find(const ShiftMixArgs& a, int start) {
        const int lane = threadIdx.x & 31, token = start - 1 + lane;
        row_of_lane = -1 - (lane & 1);  // before and past all tokens
        if (lane <= GROUP_TOKENS + 1 && token >= 0 && token < a.tokens) row_of_lane = a.cu_seqlens == nullptr ? token : static_cast<int>(a.token_rows[token]);
        has_slots = lane > 0 && lane <= GROUP_TOKENS && token < a.tokens;
    }
    // Some time later, when the rows have arrived.
    __device__ __forceinline__ void find_slots(const ShiftMixArgs& a) {
        read_slot_of_lane = has_slots ? static_cast<int>(a.read_slots[row_of_lane]) : 0;
        write_slot_of_lane = has_slots && a.cu_seqlens == nullptr ? static_cast<int>(a.write_slots[row_of_lane]) : 0;
    }
    // Bit i: token i has another row than the one before.
    __device__ __forceinline__ uint32_t boundaries() const {
        return __ballot_sync(FULL_MASK, row_of_lane != __shfl_sync(FULL_MASK, row_of_lane, (threadIdx.x + 1) & 31));
    }
    // Bit i: token i reads its row's slot.
    __device__ __forceinline__ uint32_t starts(uint32_t boundaries) const {
        return boundaries & ~(__ballot_sync(FULL_MASK, read_slot_of_lane == CONTINUES) >> 1);
    }
    __device__ __forceinline__ int64_t row(int i) const { return __shfl_sync(FULL_MASK, row_of_lane, i + 1); }
    __device__ __forceinline__ int64_t read_slot(int i) const { return __shfl_sync(FULL_MASK, read_slot_of_lane, i + 1); }
    __device__ __forceinline__ int64_t write_slot(int i) const { return __shfl_sync(FULL_MASK, write_slot_of_lane, i + 1); }
};

// Stores mix m of `count` tokens as fp8. All threads call it; inactive ones pass zeros.
template <int MIXES, OutputFormat OUT, bool ALL>
__device__ __forceinline__ void write_group_fp8(
    const ShiftMixArgs& a, GroupSmem<MIXES, OUT>& smem, const uint4 (&mixed)[GROUP_TOKENS], int m, int token, int count, int channel, int places) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    float v[8];
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        unpack8(mixed[i], v);
        const float largest = warp_max(abs_max(v));
        if (lane == 0) smem.largest[m][i][warp] = __float_as_uint(largest);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        const Fp8RowScale of_row = fp8_row_scale(warp_max(lane < warps ? __uint_as_float(smem.largest[m][i][lane]) : 0.0f));
        if (threadIdx.x == 0 && (ALL || i < count)) a.scales[m * a.scale_pitch + token + i] = of_row.scale;
        unpack8(mixed[i], v);
        const int64_t at = (static_cast<int64_t>(m) * a.tokens + token + i) * a.width + channel;
        if (ALL || i < places) a.quantised[at / 8] = quantise_fp8(v, of_row.inverse);
    }
}

// What a thread needs of a matrix for W8A8: factors of its eight positions, and the partner of a position below 128.
struct W8A8Positions {
    float factors[8];
    int partner;

    __device__ __forceinline__ static int partner_of(const ShiftMixArgs& a, int m, int p) { return __ldg(a.order[m] + p % SEGMENT); }
    __device__ __forceinline__ void load(const ShiftMixArgs& a, int m, int position, bool active) {
        if (active) load_fp32x8(a.stored_factors[m] + position, factors);
        partner = partner_of(a, m, threadIdx.x);
    }
};

// Stores mix m of `count` tokens in 8 bits. All threads call it. Rows pass through shared memory, where pairs of channels
// change their place, so that a thread has the positions of its channels afterwards.
template <int MIXES, OutputFormat OUT, bool ALL>
__device__ __forceinline__ void write_group_w8a8(
    const ShiftMixArgs& a, GroupSmem<MIXES, OUT>& smem, const uint4 (&mixed)[GROUP_TOKENS], const W8A8Positions& positions, int m, int token, int count, int channel, int places) {
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
    const bool is_large = channel < SEGMENT;
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        if (ALL || i < places) store16(&smem.rows[i][channel], mixed[i]);
    }
    __syncthreads();
    for (int i = thread; i < GROUP_TOKENS * SEGMENT; i += blockDim.x) {
        __half* const row = smem.rows[i / SEGMENT];
        const int p = i % SEGMENT, partner = i == thread ? positions.partner : positions.partner_of(a, m, p);
        const __half here = row[p], there = row[partner];
        row[p] = there, row[partner] = here;
    }
    __syncthreads();
    float v[GROUP_TOKENS][8];
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        unpack8(ALL || i < places ? load16(&smem.rows[i][channel]) : make_uint4(0, 0, 0, 0), v[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], fabsf(positions.factors[j]));
        const uint32_t largest = largest_bits(v[i]);
        const uint32_t of_rest = __reduce_max_sync(FULL_MASK, is_large ? 0 : largest);
        if (lane == 0) smem.largest[m][i][warp] = of_rest;
        if (warp != 0) continue;
        const uint32_t of_large = __reduce_max_sync(FULL_MASK, is_large ? largest : 0);
        if (lane == 0) smem.large[m][i] = of_large;
    }
    __syncthreads();
    uint32_t rest = 0;  // of the lane's token
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        const uint32_t of_rest = __reduce_max_sync(FULL_MASK, lane < warps ? smem.largest[m][i][lane] : 0);
        if (lane == i) rest = of_rest;
    }
    const W8A8Row<false> of_lane(rest, smem.large[m][lane % GROUP_TOKENS]);
    if (thread < count) {
        a.scales[m * a.scale_pitch + token + lane] = of_lane.scale;
        a.ratios[m * a.scale_pitch + token + lane] = of_lane.ratio;
    }
    uint2* codes = a.quantised + ((static_cast<int64_t>(m) * a.tokens + token) * a.width + channel) / 8;
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i, codes += a.width / 8) {
        const float of_rest = __shfl_sync(FULL_MASK, of_lane.inverse_rest, i), of_large = __shfl_sync(FULL_MASK, of_lane.inverse_large, i);
        const float inverse = is_large ? of_large : of_rest;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], inverse);
        if (ALL || i < places) *codes = make_uint2(pack_s8(v[i][0], v[i][1], v[i][2], v[i][3]), pack_s8(v[i][4], v[i][5], v[i][6], v[i][7]));
    }
}

// Stores mix m of `count` tokens in the format of the first mixes.
template <int MIXES, OutputFormat OUT, bool ALL>
__device__ __forceinline__ void write_group(
    const ShiftMixArgs& a, GroupSmem<MIXES, OUT>& smem, const uint4 (&mixed)[GROUP_TOKENS], const W8A8Positions& positions, int m, int token, int count, int channel, int places) {
    if constexpr (OUT == OutputFormat::FP8) {
        write_group_fp8<MIXES, OUT, ALL>(a, smem, mixed, m, token, count, channel, places);
    } else if constexpr (OUT == OutputFormat::W8A8) {
        write_group_w8a8<MIXES, OUT, ALL>(a, smem, mixed, positions, m, token, count, channel, places);
    } else if constexpr (OUT != OutputFormat::FP16) {
#pragma unroll
        for (int i = 0; i < GROUP_TOKENS; ++i) {
            if (i >= count) continue;
            const int64_t row = static_cast<int64_t>(m) * a.tokens + token + i;
            uint8_t* const bytes = reinterpret_cast<uint8_t*>(a.quantised) + row * 2 * a.width + channel;
            if (ALL || i < places) store_two_part(bytes, a.width, mixed[i]);
        }
    }
}
