// Residual add, LayerNorm and token shift of a half layer. All kernels that use it compute the same bits.
#pragma once

#include "../common.cuh"
#include "../fixed_point_sums.cuh"

constexpr int MAX_WARPS = 16;  // warps per token, 256 channels each

// The sum in fp32 would be rounded to the same fp16.
__device__ __forceinline__ uint4 add_packed(uint4 a, const uint4& b) {
    __half2* const sums = reinterpret_cast<__half2*>(&a);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __hadd2_rn(sums[i], reinterpret_cast<const __half2*>(&b)[i]);
    return a;
}

// Every sum below says where it is fused, so that all kernels that include this give the same bits: with and without
// codes, for one row and for many.
struct Moments {
    float mean, scale;  // scale: 1 / standard deviation
};

__device__ __forceinline__ float channels_of(int warp, int width) {
    return static_cast<float>(min(max(width - 256 * warp, 0), 256));
}

// Mean of a warp's 256 channels, 8 per lane (zeros past the end), and the squared deviations. share: 1 / channels
// inside.
__device__ __forceinline__ float2 warp_moments(const uint4& packed, bool active, float share) {
    float s[8], squares = 0.0f;
    unpack8(packed, s);
    const float sum = warp_sum(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
    const float own_mean = __fmul_rn(sum, share);
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float off = __fsub_rn(s[i], own_mean);
            squares = __fmaf_rn(off, off, squares);
        }
    }
    return make_float2(own_mean, warp_sum(squares));
}

// Merges the warps' moments (Chan et al.), without cancellation. One warp calls it.
__device__ __forceinline__ Moments merge_moments(const float2* moments, int count, int width) {
    const int lane = threadIdx.x & 31;
    const float2 warp_part = lane < count ? moments[lane] : make_float2(0.0f, 0.0f);
    const float channels = lane < count ? channels_of(lane, width) : 0.0f, inv_width = 1.0f / width;
    const float mean = __fmul_rn(warp_sum(__fmul_rn(warp_part.x, channels)), inv_width), off = __fsub_rn(warp_part.x, mean);
    const float squares = warp_sum(__fmaf_rn(__fmul_rn(channels, off), off, warp_part.y));
    return Moments{mean, rsqrtf(__fmaf_rn(squares, inv_width, NORM_EPS))};
}

// The same for two tokens of at most 16 warps at once. Returns that of `moments` in lanes 0 to 15, of `second` in the
// others.
__device__ __forceinline__ Moments merge_two_moments(const float2* moments, const float2* second, int count, int width) {
    const int lane = threadIdx.x & 31, warp = lane & 15;
    const float2 warp_part = warp < count ? (lane < 16 ? moments : second)[warp] : make_float2(0.0f, 0.0f);
    const float channels = warp < count ? channels_of(warp, width) : 0.0f, inv_width = 1.0f / width;
    const auto half_sum = [](float x) {
#pragma unroll
        for (int offset = 8; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL_MASK, x, offset);
        return x;
    };
    const float mean = __fmul_rn(half_sum(__fmul_rn(warp_part.x, channels)), inv_width), off = __fsub_rn(warp_part.x, mean);
    const float squares = half_sum(__fmaf_rn(__fmul_rn(channels, off), off, warp_part.y));
    return Moments{mean, rsqrtf(__fmaf_rn(squares, inv_width, NORM_EPS))};
}

__device__ __forceinline__ void normalise(
    const uint4& packed, const Moments& stats, const float (&weight)[8], const float (&bias)[8], float (&h)[8]) {
    unpack8(packed, h);
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] = __fmaf_rn(__fmul_rn(__fsub_rn(h[i], stats.mean), stats.scale), weight[i], bias[i]);
}

// Token shift: h + change * mix.
__device__ __forceinline__ uint4 mixed_with(const float (&h)[8], const float (&change)[8], const float (&mix)[8]) {
    float mixed[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) mixed[i] = __fmaf_rn(change[i], mix[i], h[i]);
    return pack8(mixed);
}
__device__ __forceinline__ uint4 mixed_with(const float (&h)[8], const float (&change)[8], const uint4& packed_mix) {
    float mix[8];
    unpack8(packed_mix, mix);
    return mixed_with(h, change, mix);
}

// Arguments for a GEMV whose CTAs compute the one input row themselves. CTA 0 also writes x_out. The last CTA that has
// read `shift` writes the new value.
struct NormMixArgs {
    const __half* x;
    const __half* delta;  // nullable
    const unsigned long long* sums;  // delta as fixed-point sums, or null
    __half* x_out;
    __half* shift;
    const float* weight;
    const float* bias;
    const int64_t* read_slots;
    const int64_t* write_slots;
    int64_t slot_stride;
    int* counter;         // zero between launches
    int width;
};

struct MixSmem {
    uint4 normed[MAX_WARPS * 32];  // h
    float2 moments[MAX_WARPS];
    bool is_last;
};

// A thread's channels of the row in a CTA of THREADS threads: TIMES x 8.
template <int THREADS>
struct RowMix {
    static constexpr int TIMES = MAX_WARPS * 32 / THREADS;
    float weight[TIMES][8], bias[TIMES][8];
    uint4 mix[TIMES], previous[TIMES], packed[TIMES];
    Moments stats;

    __device__ static __forceinline__ int channel(int i) { return (threadIdx.x + THREADS * i) * 8; }

    // Loads constants and the shift state. Called before wait_for_previous_kernel: an earlier step wrote the slot.
    __device__ __forceinline__ RowMix(const NormMixArgs& a, const __half* mix_weight) {
        const __half* const before = a.shift + a.read_slots[0] * a.slot_stride;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            const int c = channel(i);
            mix[i] = previous[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[i][j] = bias[i][j] = 0.0f;
            if (c >= a.width) continue;
            load_fp32x8(a.weight + c, weight[i]);
            load_fp32x8(a.bias + c, bias[i]);
            mix[i] = load16(mix_weight + c);
            previous[i] = load16(before + c);
        }
    }

    // Loads the row and computes its moments. sync: barrier of these threads. asked: called once the loads are issued.
    template <typename Sync, typename Asked>
    __device__ __forceinline__ void load_and_reduce(const NormMixArgs& a, MixSmem& smem, const Sync& sync, const Asked& requested) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        uint4 delta[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            packed[i] = delta[i] = make_uint4(0, 0, 0, 0);
            if (channel(i) >= a.width) continue;
            packed[i] = load16(a.x + channel(i));
            if (a.delta != nullptr) delta[i] = load16(a.delta + channel(i));
            if (a.sums != nullptr) delta[i] = load_fixed_point(a.sums, a.width, channel(i));
        }
        requested();
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            if (a.delta != nullptr || a.sums != nullptr) packed[i] = add_packed(packed[i], delta[i]);
            const float share = 1.0f / fmaxf(channels_of(warp + THREADS / 32 * i, a.width), 1.0f);
            const float2 warp_part = warp_moments(packed[i], channel(i) < a.width, share);
            if (lane == 0) smem.moments[warp + THREADS / 32 * i] = warp_part;
        }
        sync();
        stats = merge_moments(smem.moments, (a.width + 255) / 256, a.width);
    }

    // Returns the i-th 8 mixed channels; stores h and x_out.
    __device__ __forceinline__ uint4 mixed(const NormMixArgs& a, MixSmem& smem, int i) const {
        float h[8], change[8];
        normalise(packed[i], stats, weight[i], bias[i], h);
        unpack8(previous[i], change);
#pragma unroll
        for (int j = 0; j < 8; ++j) change[j] -= h[j];
        smem.normed[channel(i) / 8] = pack8(h);
        if (blockIdx.x == 0) store16(a.x_out + channel(i), packed[i]);
        return mixed_with(h, change, mix[i]);
    }

    // Stores the mixed row in shared memory; complete after the next barrier, when `shift` has been read, too.
    __device__ __forceinline__ void make_row(const NormMixArgs& a, uint4* row, MixSmem& smem) {
        load_and_reduce(a, smem, [] { __syncthreads(); }, [] {});
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            if (channel(i) < a.width) row[channel(i) / 8] = mixed(a, smem, i);
        }
    }
};

// At the end of a CTA. arrived: in thread 0, how many CTAs had read `shift` before. sync: barrier of its THREADS
// threads.
template <int THREADS, typename Sync>
__device__ __forceinline__ void store_shift_state(const NormMixArgs& a, MixSmem& smem, int arrived, int blocks, const Sync& sync) {
    if (threadIdx.x == 0) {
        smem.is_last = arrived == blocks - 1;
        if (smem.is_last) *a.counter = 0;
    }
    sync();
    if (!smem.is_last) return;
    __half* const after = a.shift + a.write_slots[0] * a.slot_stride;
#pragma unroll
    for (int i = 0; i < RowMix<THREADS>::TIMES; ++i) {
        const int c = RowMix<THREADS>::channel(i);
        if (c < a.width) store16(after + c, smem.normed[c / 8]);
    }
}
