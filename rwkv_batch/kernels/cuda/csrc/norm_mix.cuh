// The arithmetic of the entrance of a half layer: residual add, LayerNorm, mix with the token before. All kernels that make
// it give the same bits (shift_mix.cu, skinny.cuh).
#pragma once

#include "common.cuh"
#include "row_sums.cuh"

constexpr int MAX_WARPS = 16;  // that share a token, 256 channels each

__device__ __forceinline__ uint4 add_packed(const uint4& a, const uint4& b) {
    float x[8], y[8];
    unpack8(a, x);
    unpack8(b, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
    return pack8(x);
}

struct Moments {
    float mean, scale;  // scale: 1 / deviation
};

__device__ __forceinline__ float channels_of(int warp, int width) {
    return static_cast<float>(min(max(width - 256 * warp, 0), 256));
}

// Mean of a warp's 256 channels, 8 a lane (zeros from the row's end on), and the squares about it. share: 1 / those inside.
__device__ __forceinline__ float2 part_moments(const uint4& packed, bool active, float share) {
    float s[8], squares = 0.0f;
    unpack8(packed, s);
    const float own_mean = warp_sum(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))) * share;
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += (s[i] - own_mean) * (s[i] - own_mean);
    }
    return make_float2(own_mean, warp_sum(squares));
}

// A row's from those of its parts (Chan et al.): nothing cancels. A warp.
__device__ __forceinline__ Moments join_moments(const float2* parts, int count, int width) {
    const int lane = threadIdx.x & 31;
    const float2 part = lane < count ? parts[lane] : make_float2(0.0f, 0.0f);
    const float channels = lane < count ? channels_of(lane, width) : 0.0f, inv_width = 1.0f / width;
    const float mean = warp_sum(part.x * channels) * inv_width, off = part.x - mean;
    return Moments{mean, rsqrtf(warp_sum(part.y + channels * off * off) * inv_width + NORM_EPS)};
}

__device__ __forceinline__ void normalise(
    const uint4& packed, const Moments& of, const float (&weight)[8], const float (&bias)[8], float (&h)[8]) {
    unpack8(packed, h);
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] = (h[i] - of.mean) * of.scale * weight[i] + bias[i];
}

// A mixed input: h and a share of the change from the token before.
__device__ __forceinline__ uint4 mixed_with(const float (&h)[8], const float (&change)[8], const uint4& mix) {
    float mu[8];
    unpack8(mix, mu);
#pragma unroll
    for (int i = 0; i < 8; ++i) mu[i] = h[i] + change[i] * mu[i];
    return pack8(mu);
}

// What every block of a launch of products needs to make the one row that they are of by itself. The first block also
// writes x_out; the last to have read the token before, the slot.
struct NormMix {
    const __half* x;
    const __half* delta;  // may be null
    const unsigned long long* sums;  // what delta is the halves of, or null (row_sums.cuh)
    __half* x_out;
    __half* shift;
    const float* weight;
    const float* bias;
    const int64_t* read_slots;
    const int64_t* write_slots;
    int64_t slot_stride;  // elements between slots
    int* counter;         // zero between launches
    int width;
};

struct MixRoom {
    uint4 normed[MAX_WARPS * 32];  // h
    float2 parts[MAX_WARPS];
    bool is_last;
};

// A thread's channels of that row in a block of THREADS threads: TIMES times 8.
template <int THREADS>
struct RowMix {
    static constexpr int TIMES = MAX_WARPS * 32 / THREADS;
    float weight[TIMES][8], bias[TIMES][8];
    uint4 mix[TIMES], previous[TIMES], packed[TIMES];
    Moments of;

    __device__ static __forceinline__ int channel(int i) { return (threadIdx.x + THREADS * i) * 8; }

    // Before the inputs are waited for: the slot was written by an earlier step.
    __device__ __forceinline__ RowMix(const NormMix& a, const __half* of_mix) {
        const __half* const before = a.shift + a.read_slots[0] * a.slot_stride;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            const int c = channel(i);
            mix[i] = previous[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[i][j] = bias[i][j] = 0.0f;
            if (c >= a.width) continue;
            load_floats8(a.weight + c, weight[i]);
            load_floats8(a.bias + c, bias[i]);
            mix[i] = load16(of_mix + c);
            previous[i] = load16(before + c);
        }
    }

    // The row and its norm; `sync` is a barrier of these threads, `asked` is called when its loads are on their way.
    template <typename Sync, typename Asked>
    __device__ __forceinline__ void enter(const NormMix& a, MixRoom& room, const Sync& sync, const Asked& asked) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        uint4 delta[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            packed[i] = delta[i] = make_uint4(0, 0, 0, 0);
            if (channel(i) >= a.width) continue;
            packed[i] = load16(a.x + channel(i));
            if (a.delta != nullptr) delta[i] = load16(a.delta + channel(i));
            if (a.sums != nullptr) delta[i] = halves_of_sums(a.sums, a.width, channel(i));
        }
        asked();
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            if (a.delta != nullptr || a.sums != nullptr) packed[i] = add_packed(packed[i], delta[i]);
            const float share = 1.0f / fmaxf(channels_of(warp + THREADS / 32 * i, a.width), 1.0f);
            const float2 part = part_moments(packed[i], channel(i) < a.width, share);
            if (lane == 0) room.parts[warp + THREADS / 32 * i] = part;
        }
        sync();
        of = join_moments(room.parts, (a.width + 255) / 256, a.width);
    }

    // The i-th 8 of its channels mixed, and what others are given of them.
    __device__ __forceinline__ uint4 mixed(const NormMix& a, MixRoom& room, int i) const {
        float h[8], change[8];
        normalise(packed[i], of, weight[i], bias[i], h);
        unpack8(previous[i], change);
#pragma unroll
        for (int j = 0; j < 8; ++j) change[j] -= h[j];
        room.normed[channel(i) / 8] = pack8(h);
        if (blockIdx.x == 0) store16(a.x_out + channel(i), packed[i]);
        return mixed_with(h, change, mix[i]);
    }

    // The mixed row into shared memory; whole behind the next barrier, when the token before has been read as well.
    __device__ __forceinline__ void make(const NormMix& a, uint4* held, MixRoom& room) {
        enter(a, room, [] { __syncthreads(); }, [] {});
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            if (channel(i) < a.width) held[channel(i) / 8] = mixed(a, room, i);
        }
    }
};

// At a block's end. arrived: in thread 0, how many of the `blocks` had read the token before when this one had; `sync` is a
// barrier of its THREADS threads.
template <int THREADS, typename Sync>
__device__ __forceinline__ void keep_token(const NormMix& a, MixRoom& room, int arrived, int blocks, const Sync& sync) {
    if (threadIdx.x == 0) {
        room.is_last = arrived == blocks - 1;
        if (room.is_last) *a.counter = 0;
    }
    sync();
    if (!room.is_last) return;
    __half* const after = a.shift + a.write_slots[0] * a.slot_stride;
#pragma unroll
    for (int i = 0; i < RowMix<THREADS>::TIMES; ++i) {
        const int c = RowMix<THREADS>::channel(i);
        if (c < a.width) store16(after + c, room.normed[c / 8]);
    }
}
