// Arguments of shift_mix.cu, and how it stores a token's mixed inputs.
#pragma once

#include "norm_mix.cuh"
#include "../continues.cuh"
#include "../rows_fp8.cuh"
#include "../rows_two_part.cuh"
#include "../w8a8/w8a8_rows.cuh"

struct ShiftMixArgs {
    const __half* x;
    const __half* delta;
    const float* partials;
    const void* sums;
    void* to_clear;
    const float *row_scales, *output_scales;  // with W8A8, of the sums
    __half* x_out;
    __half* mixed;
    uint2* quantised;
    float* scales;
    int* ratios;
    __half* shift;
    __half* last_h;
    const float* weight;
    const float* bias;
    const __half* mix;
    const int64_t* cu_seqlens;  // null: decode, one token per row
    const int64_t* token_rows;  // [T], null for decode
    const int64_t* read_slots;
    const int64_t* write_slots;
    int64_t slot_stride;
    int tokens;
    int width;
    int mixes;
    int tokens_per_cta;  // prefill
    int scale_pitch;  // scales per mix
    int num_splits;
    int token_ctas;  // CTAs per token: 1 or TOKEN_CTAS
    int are_rows_known;  // token_rows were written before the step
    const float* factors[MAX_W8A8_GEMMS];  // W8A8: of each mix, by channel
    const float* stored_factors[MAX_W8A8_GEMMS];  // the same by position
    const uint16_t* order[MAX_W8A8_GEMMS];  // null: not W8A8
};

// Format of the first mixed inputs.
enum class OutputFormat { FP16, FP8, TWO_PART, W8A8 };
// Formats whose scale needs all threads, also those without channels.
template <OutputFormat OUT>
constexpr bool NEEDS_ALL_THREADS = OUT == OutputFormat::FP8 || OUT == OutputFormat::W8A8;

// How many mixes are quantised, and the first mix stored as fp16, too: v's low rank reads it.
template <int MIXES>
constexpr int QUANTISED_MIXES = MIXES == 6 ? 3 : 1;
template <int MIXES, OutputFormat OUT>
constexpr int FIRST_FP16_MIX = OUT == OutputFormat::FP16 ? 0 : MIXES == 6 ? 2 : 1;

// In assembly: nvcc would split the store into four to save a register copy.
__device__ __forceinline__ void store_vector(void* p, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores, evict first: not read soon, and more than the cache keeps.
__device__ __forceinline__ void store_evict_first(void* p, const uint4& v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores a token's first COUNT mixed inputs as fp8. All threads call it; inactive ones pass zeros.
template <int COUNT>
__device__ __forceinline__ void write_fp8(
    const ShiftMixArgs& a, const uint4* mixed, int token, int channel, bool active, float (*scratch)[MAX_WARPS]) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    float v[8];
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        unpack8(mixed[m], v);
        const float largest = warp_max(abs_max(v));
        if (lane == 0) scratch[m][threadIdx.x >> 5] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        const Fp8RowScale row_scale = fp8_row_scale(warp_max(lane < warps ? scratch[m][lane] : 0.0f));
        if (threadIdx.x == 0) a.scales[m * a.scale_pitch + token] = row_scale.scale;
        unpack8(mixed[m], v);
        const int64_t at = (static_cast<int64_t>(m) * a.tokens + token) * a.width + channel;
        if (active) a.quantised[at / 8] = quantise_fp8(v, row_scale.inverse);
    }
}

constexpr int MAX_WIDTH = 4096;

// Transforms of a thread's channels, and the partner of its position below 128.
template <int COUNT>
struct W8A8Channels {
    W8A8Octet of[COUNT];
    int partner;

    __device__ __forceinline__ static int partner_of(const ShiftMixArgs& a, int i) { return __ldg(a.order[i / SEGMENT] + i % SEGMENT); }
    __device__ __forceinline__ void load(const ShiftMixArgs& a, int channel, bool active) {
        if (threadIdx.x < COUNT * SEGMENT) partner = partner_of(a, threadIdx.x);
#pragma unroll
        for (int m = 0; active && m < COUNT; ++m) of[m].load(a.factors[m], channel);
    }
};

// Stores a token's first COUNT mixed inputs in 8 bits. All threads call it. The codes pass through shared memory, where
// pairs of channels change their place. channels: read if LOADED.
template <int COUNT, bool LOADED>
__device__ __forceinline__ void write_w8a8(
    const ShiftMixArgs& a, const uint4* mixed, const W8A8Channels<COUNT>& channels, int token, int channel, bool active) {
    __shared__ __align__(8) uint8_t rows[COUNT][MAX_WIDTH];
    __shared__ W8A8Maxima maxima[COUNT];
    const auto octet_of = [&](int m) {
        W8A8Octet octet = {};
        if (LOADED) {
            octet = channels.of[m];
        } else if (active) {
            octet.load(a.factors[m], channel);
        }
        return octet;
    };
    float v[8];
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        W8A8Largest largest;
        if (active) {
            const W8A8Octet octet = octet_of(m);
            octet.template scale<false>(mixed[m], v);
            largest.add(octet, v);
        }
        maxima[m].add(largest);
    }
    __syncthreads();
    W8A8Largest mine;  // of the mix that has the lane's number
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        const W8A8Largest of_row = maxima[m].of_row();
        if (m == 0 || (threadIdx.x & 31) == m) mine = of_row;
    }
    const W8A8Row<false> of_mix(mine.rest, mine.of_large());
    if (threadIdx.x < COUNT) {
        a.scales[threadIdx.x * a.scale_pitch + token] = of_mix.scale;
        a.ratios[threadIdx.x * a.scale_pitch + token] = of_mix.ratio;
    }
#pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        const W8A8Inverses of_row = {__shfl_sync(FULL_MASK, of_mix.inverse_rest, m), __shfl_sync(FULL_MASK, of_mix.inverse_large, m)};
        if (!active) continue;
        const W8A8Octet octet = octet_of(m);
        octet.template scale<false>(mixed[m], v);
        *reinterpret_cast<uint2*>(&rows[m][channel]) = octet.template codes<false>(v, of_row);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COUNT * SEGMENT; i += blockDim.x)
        swap_codes(rows[i / SEGMENT], i % SEGMENT, LOADED && i == static_cast<int>(threadIdx.x) ? channels.partner : channels.partner_of(a, i));
    __syncthreads();
    if (!active) return;
#pragma unroll
    for (int m = 0; m < COUNT; ++m)
        a.quantised[((static_cast<int64_t>(m) * a.tokens + token) * a.width + channel) / 8] = *reinterpret_cast<const uint2*>(&rows[m][channel]);
}

// Stores a token's mixed inputs, GROUP mixes at a time, the quantised ones last. mix: weights of all, or a buffer for
// one group. channels: read with W8A8, if LOADED.
template <int MIXES, int GROUP, OutputFormat OUT, bool LOADED, typename Store>
__device__ __forceinline__ void write_mixed(
    const ShiftMixArgs& a, const float (&h)[8], const float (&change)[8], uint4 (&mix)[GROUP], int token, int channel,
    bool active, float (*scratch)[MAX_WARPS], const W8A8Channels<QUANTISED_MIXES<MIXES>>& channels, Store store) {
    static_assert(OUT == OutputFormat::FP16 || GROUP >= QUANTISED_MIXES<MIXES>);
    constexpr int FIRST = FIRST_FP16_MIX<MIXES, OUT>;
    const int64_t at = static_cast<int64_t>(token) * a.width + channel;
#pragma unroll
    for (int i = 0; i < MIXES; i += GROUP) {
        const int first = OUT != OutputFormat::FP16 ? MIXES - GROUP - i : i;
        if (GROUP < MIXES && active) {
#pragma unroll
            for (int m = 0; m < GROUP; ++m) mix[m] = load16(a.mix + (first + m) * a.width + channel);
        }
#pragma unroll
        for (int m = 0; m < GROUP; ++m) {
            mix[m] = mixed_with(h, change, mix[m]);
            if (active && first + m >= FIRST) store(a.mixed + static_cast<int64_t>(first + m - FIRST) * a.tokens * a.width + at, mix[m]);
        }
        if constexpr (OUT == OutputFormat::FP8) {
            if (first == 0) write_fp8<QUANTISED_MIXES<MIXES>>(a, mix, token, channel, active, scratch);
        }
        if constexpr (OUT == OutputFormat::W8A8) {
            if (first == 0) write_w8a8<QUANTISED_MIXES<MIXES>, LOADED>(a, mix, channels, token, channel, active);
        }
        if constexpr (OUT == OutputFormat::TWO_PART) {
#pragma unroll
            for (int m = 0; m < QUANTISED_MIXES<MIXES>; ++m) {
                const int64_t row = static_cast<int64_t>(m) * a.tokens + token;
                if (first == 0 && active) store_two_part(reinterpret_cast<uint8_t*>(a.quantised) + row * 2 * a.width + channel, a.width, mix[m]);
            }
        }
    }
}
