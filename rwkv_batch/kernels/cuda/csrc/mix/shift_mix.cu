// Residual add, LayerNorm, token shift and mix of a half layer.
//
//   x_out    = x + delta
//   h        = LayerNorm(x_out)                 eps 1e-5, fp32 statistics
//   mixed[m] = h + (h_prev - h) * mix[m]        h_prev: h of the row's previous token
//
// in     x         [T, C]      fp16
//        delta     [T, C]      fp16, nullable
//        partials  [S, T, C]   fp32, nullable; decode only: delta as split-K partials, added in order, rounded to fp16
//        sums      [8, C / 8]  int64, nullable; one decode row only: delta in fixed point (fixed_point_sums.cuh)
//                  [T, C]      with W8A8: s32, at most one token per SM: delta as a W8A8 GEMM's exact sums (w8a8.cuh)
//        row_scales [T], output_scales [C] fp32, of these
//        factors   [C] fp32    of each quantised mix by channel, with W8A8 (w8a8_rows.cuh)
//        order     [C] u16     of each quantised mix, with W8A8: the channel at a position
//        mix       [M, C]      fp16; M = 6 (time mix: r, k, v, w, a, g) or 1 (channel mix)
//        weight    [C]         fp32, of the norm
//        bias      [C]         fp32, of the norm
//
// out    x_out     [T, C]      fp16; must not alias x: the next CTA reads x
//        mixed     [M, T, C]   fp16; with `quantised` only v, w, a, g [4, T, C] (M = 6) or nothing
//        quantised             nullable; the first K = 3 or 1 mixes, rounded to fp16 and quantised:
//                  fp8         [K, T, C] e4m3, scales [K, pitch] fp32
//                  two-part    [K, T, 2, C] e5m2, no scales
//                  W8A8        [K, T, C] s8 by position, scales [K, pitch] fp32, ratios [K, pitch] s32 (w8a8_rows.cuh);
//                              C % 128 == 0; not with partials
//        to_clear  [8, C / 8]  int64, nullable; one decode row only: fixed-point sums to zero after `sums` was read
//                  [T, C]      with W8A8: s32, at most one token per SM: to zero, other sums than `sums`, and the
//                              [T, 2] words behind them
//
// inout  shift     [slots, C]  fp16; reads read_slots[row], writes write_slots[row]; of prompts, a row that continues
//                              the one before reads no slot
//
// Prefill of more tokens than SMs writes last_h [rows, C] instead of shift, and store_rows copies it: another CTA may
// still read the slot. With fewer tokens the CTA of a row's first token, which reads the slot, writes it too.
//
// Grid: decode, and prefill of at most one token per SM: one CTA per token. With at most one CTA per SM, it prefetches weights before the previous kernel ends;
// else three CTAs fit an SM. With partials and two-part output, a cluster of 4 CTAs shares a token.
// Prefill, and W8A8 decode of more than three tokens per SM: one CTA per SM, of tokens_per_cta tokens. It takes four tokens at a time and reads
// the weights once for all four: read for each token, from L2, they bound the kernel. x and delta of the next four are
// on their way to shared memory meanwhile.
// Block: C / 8 threads, one per 8 channels; in a cluster of 4 CTAs C / 32.
// Shared memory: below 1 KB, sums of the warps; W8A8: 4 KB per quantised mix more. Four tokens at a time: 66 KB; W8A8:
// 32 KB more.
// Bound: memory; 2 C (3 + M) bytes per token, plus 4 C per row. Share of 4.8 TB/s (H200, C = 4,096, fp16): M = 6: 320
// rows 66 %, prefill of 16,384 tokens 76 %; M = 1: 64 and 73 %; prefill with W8A8 58 and 68 %. Up to 64 rows: the latency
// of a launch, 2 to 3 us.
// Made for: C <= 4096, C % 8 == 0.
//
// Three small kernels follow. All have one thread per 8 channels, and no shared memory beyond sums of the warps. Bound:
// latency with few rows, then memory; shares of 4.8 TB/s as above.
//   store_rows    shift[write_slots[row]] = last_h[row]                      one CTA per row; 1.2 us
//   norm_rows     out [R, C] = LayerNorm(x[rows]), before the head           one CTA per row; 320 rows 29 %
//   sum_partials  out [T, C] = x + the sum of partials [S, T, C], in order   512 threads per CTA; 64 rows 43 %
#include <type_traits>

#include "shift_mix.cuh"
#include "partials.cuh"
#include "../token_cluster.cuh"
#include "token_groups.cuh"

// Returns 1 / channels of this warp.
__device__ __forceinline__ float warp_weight(int width) {
    return 1.0f / fmaxf(channels_of(threadIdx.x >> 5, width), 1.0f);
}

// Moments of a token, 8 channels per thread (zeros past `width`). One barrier; reuse `scratch` after the next one.
__device__ __forceinline__ Moments moments(
    const uint4& packed, bool active, int width, float warp_weight, float2* scratch) {
    const float2 part = warp_moments(packed, active, warp_weight);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = part;
    __syncthreads();
    return merge_moments(scratch, blockDim.x >> 5, width);
}

// x + delta of eight channels; delta may be exact sums.
__device__ __forceinline__ uint4 load_exact_sum(const ShiftMixArgs& a, int row, int64_t at, const float (&output_scales)[8]) {
    const uint4 x = load16(a.x + at);
    if (a.delta != nullptr) return add_packed(x, load16(a.delta + at));
    return a.sums == nullptr ? x : add_packed(x, scale_exact_sums(static_cast<const int*>(a.sums) + at, a.row_scales[row], output_scales));
}
__device__ __forceinline__ void clear_exact_sums(const ShiftMixArgs& a, int row, int64_t at) {
    if (a.to_clear == nullptr) return;
    int* const sums = static_cast<int*>(a.to_clear);
    *reinterpret_cast<uint4*>(sums + at) = *reinterpret_cast<uint4*>(sums + at + 4) = make_uint4(0, 0, 0, 0);
    if (const int64_t first = static_cast<int64_t>(row) * a.width; at == first) reinterpret_cast<uint2*>(sums + static_cast<int64_t>(a.tokens) * a.width)[row] = make_uint2(0, 0);
}

// Decode: one CTA per token. PRELOADED: norm weights are loaded before the previous kernel ends, mix weights too unless
// delta is partials, which need the registers. Two-part kernels use few registers, to fit next to a GEMM's
// CTA.
// RAGGED: rows of several tokens. Each CTA also computes h of another token: that before its own, or, if its own reads
// the row's slot, the row's last, which it stores in the slot. The last token of a row that continues another stores its own.
template <int MIXES, bool PRELOADED, OutputFormat OUT, bool PARTIALS, bool RAGGED = false>
__global__ void __launch_bounds__(512, !PRELOADED ? 3 : OUT == OutputFormat::TWO_PART ? 2 : 1) shift_mix_rows_kernel(const ShiftMixArgs a) {
    __shared__ float2 scratch[MAX_WARPS], scratch_of_other[RAGGED ? MAX_WARPS : 1];
    __shared__ float largest[QUANTISED_MIXES<MIXES>][MAX_WARPS];
    static_assert(!RAGGED || (PRELOADED && !PARTIALS));
    constexpr int GROUP = PRELOADED || MIXES == 1 ? MIXES : 3;  // mixes whose weights are in registers at once
    constexpr bool MIX_PRELOADED = PRELOADED && (!PARTIALS || MIXES == 1);
    const int width = a.width, channel = threadIdx.x * 8, token = blockIdx.x;
    const bool active = channel < width;
    float weight[8] = {}, bias[8] = {}, output_scales[8] = {};
    uint4 mix[GROUP] = {};
    W8A8Channels<QUANTISED_MIXES<MIXES>> channels;
    constexpr bool READS_EXACT_SUMS = PRELOADED && OUT == OutputFormat::W8A8;
    if constexpr (READS_EXACT_SUMS) {
        channels.load(a, channel, active);
        if (a.sums != nullptr && active) load_fp32x8(a.output_scales + channel, output_scales);
    }
    const auto load_mixes = [&] {
#pragma unroll
        for (int m = 0; m < GROUP; ++m) mix[m] = load16(a.mix + m * width + channel);
    };
    if (PRELOADED && active) {
        load_fp32x8(a.weight + channel, weight);
        load_fp32x8(a.bias + channel, bias);
        if (MIX_PRELOADED) load_mixes();
#pragma unroll
        for (int m = 0; !MIX_PRELOADED && m < GROUP; ++m) prefetch_l2(a.mix + m * width + channel);
    }
    uint4 packed = make_uint4(0, 0, 0, 0), previous = packed;
    int64_t write_at = 0;
    int other = token;
    bool has_slot = true, stores = true;
    const bool early_slots = PRELOADED && (!RAGGED || a.are_rows_known);  // earlier steps wrote slots and previous h
    const auto load_slots = [&] {
        int64_t row = token;
        if (RAGGED) {
            row = a.token_rows[token];
            const bool continues = a.read_slots[row] == CONTINUES;
            const int last = static_cast<int>(a.cu_seqlens[row + 1]) - 1;
            has_slot = !continues && token == a.cu_seqlens[row];
            stores = continues ? token == last : has_slot;
            other = has_slot ? last : token - 1;
        }
        write_at = a.write_slots[row] * a.slot_stride + channel;
        if (active && has_slot) previous = load16(a.shift + a.read_slots[row] * a.slot_stride + channel);
    };
    if (early_slots) load_slots();
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t at = static_cast<int64_t>(token) * width + channel;
    if (!early_slots) load_slots();
    const auto load_token = [&](int row, int64_t from) {
        if (READS_EXACT_SUMS) return load_exact_sum(a, row, from, output_scales);
        const uint4 x = load16(a.x + from);
        if (a.delta != nullptr) return add_packed(x, load16(a.delta + from));
        if (RAGGED || a.sums == nullptr) return x;
        return add_packed(x, load_fixed_point(static_cast<const unsigned long long*>(a.sums), width, channel));
    };
    if (active) {
        if constexpr (PARTIALS) {
            packed = add_packed(load16(a.x + at), sum_partials(a.partials, a.num_splits, static_cast<int64_t>(a.tokens) * width, at));
        } else {
            packed = load_token(token, at);
        }
        if (PRELOADED && !MIX_PRELOADED) load_mixes();
    }
    uint4 packed_other = make_uint4(0, 0, 0, 0);
    if (RAGGED) {
        if (active) packed_other = load_token(other, static_cast<int64_t>(other) * width + channel);
        const float2 part = warp_moments(packed_other, active, warp_weight(width));
        if ((threadIdx.x & 31) == 0) scratch_of_other[threadIdx.x >> 5] = part;
    }
    const Moments stats = moments(packed, active, width, warp_weight(width), scratch);
    float h[8], change[8];
    uint4 to_store = packed_other;
    if (RAGGED) {
        normalise(packed_other, merge_moments(scratch_of_other, blockDim.x >> 5, width), weight, bias, h);
        to_store = pack8(h);
        if (!has_slot) previous = to_store;
    }
    if (!NEEDS_ALL_THREADS<OUT> && !active) return;
    if (!PRELOADED && active) {
        load_fp32x8(a.weight + channel, weight);
        load_fp32x8(a.bias + channel, bias);
    }
    normalise(packed, stats, weight, bias, h);
    unpack8(previous, change);
#pragma unroll
    for (int i = 0; i < 8; ++i) change[i] -= h[i];
    if (active) {
        store_evict_first(a.x_out + at, packed);
        if (stores) store_evict_first(a.shift + write_at, RAGGED && has_slot ? to_store : pack8(h));
    }
    if (!PRELOADED && MIXES == 1 && active) mix[0] = load16(a.mix + channel);
    write_mixed<MIXES, GROUP, OUT, PRELOADED>(
        a, h, change, mix, token, channel, active, largest, channels,
        [](__half* p, const uint4& v) { store_evict_first(p, v); });
    if (READS_EXACT_SUMS && active) {
        clear_exact_sums(a, token, at);
    } else if (a.to_clear != nullptr && active) {
        clear_fixed_point(static_cast<unsigned long long*>(a.to_clear), width, channel);
    }
}

// Decode with partials, which are four times the token's other bytes. TOKEN_CTAS small CTAs share a token's channels;
// they fit next to a GEMM's CTA with all weights preloaded.
template <int MIXES, OutputFormat OUT>
__global__ void __launch_bounds__(512 / TOKEN_CTAS, 4) shift_mix_shares_kernel(const ShiftMixArgs a) {
    __shared__ float2 token_moments[MAX_WARPS];  // of all the token's warps, from all CTAs
    const int width = a.width, token = blockIdx.x / TOKEN_CTAS, block = blockIdx.x % TOKEN_CTAS;
    const int channel = block * (width / TOKEN_CTAS) + threadIdx.x * 8, lane = threadIdx.x & 31;
    const int64_t at = static_cast<int64_t>(token) * width + channel;
    float weight[8], bias[8], h[8], change[8];
    uint4 mix[MIXES];
    load_fp32x8(a.weight + channel, weight);
    load_fp32x8(a.bias + channel, bias);
#pragma unroll
    for (int m = 0; m < MIXES; ++m) mix[m] = load16(a.mix + m * width + channel);
    const int64_t write_at = a.write_slots[token] * a.slot_stride + channel;
    const uint4 previous = load16(a.shift + a.read_slots[token] * a.slot_stride + channel);
    cluster_arrive();
    allow_next_kernel();
    wait_for_previous_kernel();
    uint4 packed = load16(a.x + at);
    packed = add_packed(packed, sum_partials(a.partials, a.num_splits, static_cast<int64_t>(a.tokens) * width, at));
    cluster_wait();  // all CTAs of the cluster run
    const int warp = channel / 256;
    const float2 part = warp_moments(packed, true, 1.0f / 256);
    if (lane < TOKEN_CTAS) store_remote(token_moments + warp, lane, part);
    cluster_arrive();
    cluster_wait();
    normalise(packed, merge_moments(token_moments, width / 256, width), weight, bias, h);
    unpack8(previous, change);
#pragma unroll
    for (int i = 0; i < 8; ++i) change[i] -= h[i];
    store_evict_first(a.x_out + at, packed);
    store_evict_first(a.shift + write_at, pack8(h));
    W8A8Channels<QUANTISED_MIXES<MIXES>> channels;
    write_mixed<MIXES, MIXES, OUT, false>(
        a, h, change, mix, token, channel, true, nullptr, channels, [](__half* p, const uint4& v) { store_evict_first(p, v); });
}

// Prefill, and W8A8 decode of many rows: one CTA takes tokens_per_cta tokens, GROUP_TOKENS at a time, so that weights
// are read once for all of a group. The next group's rows are on their way to shared memory meanwhile.
template <int MIXES, OutputFormat OUT>
__global__ void __launch_bounds__(512, 1) shift_mix_kernel(const ShiftMixArgs a) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    auto& smem = *reinterpret_cast<GroupSmem<MIXES, OUT>*>(dynamic);
    const int width = a.width, thread = threadIdx.x;
    int channel = thread * 8;
    const bool active = channel < width, is_decode = a.cu_seqlens == nullptr;
    const int first = blockIdx.x * a.tokens_per_cta, last = min(first + a.tokens_per_cta, a.tokens);
    const float weight_of_warp = warp_weight(width);
    allow_next_kernel();
    wait_for_previous_kernel();

    const auto fetch = [&](int token, int i) {  // into place i
        if (!active) return;
        const int64_t at = static_cast<int64_t>(token) * width + channel;
        __pipeline_memcpy_async(&smem.x[i][thread], a.x + at, 16);
        if (a.delta != nullptr) __pipeline_memcpy_async(&smem.delta[i][thread], a.delta + at, 16);
    };
    const auto fetch_group = [&](int start) {
#pragma unroll
        for (int i = 0; i < GROUP_TOKENS; ++i) {
            if (start + i < last) fetch(start + i, i);
        }
        __pipeline_commit();
    };
    const auto arrived = [&](int i, bool is_there) {
        const uint4 x = smem.x[i][thread], sum = add_packed(x, smem.delta[i][thread]);
        return !is_there ? make_uint4(0, 0, 0, 0) : a.delta == nullptr ? x : sum;
    };
    GroupRows next;
    next.find(a, first);
    next.find_slots(a);
    uint4 before = make_uint4(0, 0, 0, 0);  // h of the token before the group
    if ((next.boundaries() & 1) == 0 || next.read_slot(0) == CONTINUES) {
        fetch(first - 1, 0);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        const uint4 packed = arrived(0, active);
        const Moments stats = moments(packed, active, width, weight_of_warp, smem.moments[1][0]);
        if (active) {
            float weight[8], bias[8], h[8];
            load_fp32x8(a.weight + channel, weight);
            load_fp32x8(a.bias + channel, bias);
            normalise(packed, stats, weight, bias, h);
            before = pack8(h);
        }
    }
    fetch_group(first);
    int buffer = 0;
    // ALL: a whole group, and all threads have channels.
    const auto mix_group = [&](int start, auto all) {
        constexpr bool ALL = all.value;
        const int count = ALL ? GROUP_TOKENS : min(GROUP_TOKENS, last - start), places = ALL || active ? count : 0;  // what this thread stores
        const auto is_inside = [&](int i) { return ALL || i < places; };
        const int64_t at = static_cast<int64_t>(start) * width + channel;
        const GroupRows rows = next;
        const uint32_t boundaries = rows.boundaries();  // bit i: token i starts a row, so token i - 1 ended one
        next.find(a, start + GROUP_TOKENS);
        const uint32_t starts = rows.starts(boundaries);
        uint4 previous[GROUP_TOKENS] = {};  // of tokens that start a row and continue none
#pragma unroll
        for (int i = 0; i < GROUP_TOKENS; ++i) {
            if ((starts >> i & 1) == 0) continue;
            const int64_t slot = rows.read_slot(i);
            if (is_inside(i)) previous[i] = load16(a.shift + slot * a.slot_stride + channel);
        }
        float h[GROUP_TOKENS][8], change[GROUP_TOKENS][8];
        uint4 mix = make_uint4(0, 0, 0, 0);
        {
            uint4 packed[GROUP_TOKENS];
            __pipeline_wait_prior(0);
#pragma unroll
            for (int i = 0; i < GROUP_TOKENS; ++i) packed[i] = arrived(i, is_inside(i));
            fetch_group(start + GROUP_TOKENS);
            float weight[8] = {}, bias[8] = {};
            if (ALL || active) {
                load_fp32x8(a.weight + channel, weight);
                load_fp32x8(a.bias + channel, bias);
                mix = load16(a.mix + (MIXES - 1) * width + channel);
            }
            __half* x_out = a.x_out + at;
#pragma unroll
            for (int i = 0; i < GROUP_TOKENS; ++i, x_out += width) {
                if (is_inside(i)) store_vector(x_out, packed[i]);
                const float2 part = warp_moments(packed[i], ALL || active, weight_of_warp);
                if ((thread & 31) == 0) smem.moments[buffer][i][thread >> 5] = part;
            }
            __syncthreads();
            Moments merged[GROUP_TOKENS / 2];
#pragma unroll
            for (int i = 0; i < GROUP_TOKENS / 2; ++i) merged[i] = merge_two_moments(smem.moments[buffer][2 * i], smem.moments[buffer][2 * i + 1], blockDim.x >> 5, width);
            buffer ^= 1;
            next.find_slots(a);
#pragma unroll
            for (int i = 0; i < GROUP_TOKENS; ++i) {
                const int lane = i % 2 * 16;
                const Moments stats = {__shfl_sync(FULL_MASK, merged[i / 2].mean, lane), __shfl_sync(FULL_MASK, merged[i / 2].scale, lane)};
                normalise(packed[i], stats, weight, bias, h[i]);
                if ((starts >> i & 1) == 0) previous[i] = before;
                unpack8(previous[i], change[i]);
                // Rounded as a later step would read it from the slot, so that chunked and whole prefill agree.
                before = pack8(h[i]);
                if ((boundaries >> (i + 1) & 1) != 0) {
                    __half* const to = is_decode ? a.shift + rows.write_slot(i) * a.slot_stride : a.last_h + rows.row(i) * width;
                    if (is_inside(i)) store_vector(to + channel, before);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) change[i][j] -= h[i][j];
            }
        }
#pragma unroll 1
        for (int m = MIXES - 1; m >= 0; --m) {
            float of_mix[8];
            unpack8(mix, of_mix);
            if (m > 0 && (ALL || active)) mix = load16(a.mix + (m - 1) * width + channel);
            const bool is_quantised = OUT != OutputFormat::FP16 && m < QUANTISED_MIXES<MIXES>;
            W8A8Positions positions = {};
            if (OUT == OutputFormat::W8A8 && is_quantised) positions.load(a, m, channel, ALL || active);
            uint4 mixed[GROUP_TOKENS];
            const int plane = m - FIRST_FP16_MIX<MIXES, OUT>;
#pragma unroll
            for (int i = 0; i < GROUP_TOKENS; ++i) mixed[i] = mixed_with(h[i], change[i], of_mix);
            if (plane >= 0) {
                __half* out = a.mixed + static_cast<int64_t>(plane) * a.tokens * width + at;
#pragma unroll
                for (int i = 0; i < GROUP_TOKENS; ++i, out += width) {
                    if (is_inside(i)) store_vector(out, mixed[i]);
                }
            }
            if constexpr (OUT != OutputFormat::FP16) {
                if (is_quantised) write_group<MIXES, OUT, ALL>(a, smem, mixed, positions, m, start, count, channel, places);
            }
        }
    };
    const bool all_active = static_cast<int>(blockDim.x) * 8 == width;
    for (int start = first; start < last; start += GROUP_TOKENS) {
        asm volatile("" : "+r"(channel));  // otherwise nvcc holds the addresses of all weights in registers
        if (all_active && start + GROUP_TOKENS <= last) {
            mix_group(start, std::true_type());
        } else {
            mix_group(start, std::false_type());
        }
    }
}

// last_h [rows, C] -> shift[write_slots[row]].
__global__ void store_rows_kernel(
    const __half* last_h, __half* shift, const int64_t* write_slots, int64_t slot_stride, int width) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int channel = threadIdx.x * 8;
    if (channel < width) {
        const int64_t row = blockIdx.x;
        store16(shift + write_slots[row] * slot_stride + channel, load16(last_h + row * width + channel));
    }
}

// out [R, C] fp16 = LayerNorm(x[rows[i]]); rows null: identity.
__global__ void __launch_bounds__(512) norm_rows_kernel(
    const __half* x, const int64_t* rows, const float* norm_weight, const float* norm_bias, __half* out, int width) {
    __shared__ float2 scratch[MAX_WARPS];
    const int channel = threadIdx.x * 8;
    const bool active = channel < width;
    float weight[8] = {}, bias[8] = {}, h[8];
    if (active) {
        load_fp32x8(norm_weight + channel, weight);
        load_fp32x8(norm_bias + channel, bias);
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t row = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (active) packed = load16(x + row * width + channel);
    normalise(packed, moments(packed, active, width, warp_weight(width), scratch), weight, bias, h);
    if (active) store16(out + static_cast<int64_t>(blockIdx.x) * width + channel, pack8(h));
}

constexpr int MAX_ROWS_PER_SM = 3;  // decode rows that have CTAs of their own, with W8A8

// Whether the CTAs of prefill tokens store the shift themselves.
bool stores_shift(const ShiftMixArgs& a) { return a.cu_seqlens == nullptr || a.tokens <= device_info().num_sms; }

template <int MIXES, OutputFormat OUT>
void launch_shift_mix(const ShiftMixArgs& a, int threads, void* stream) {
    if (a.cu_seqlens != nullptr && stores_shift(a)) {
        return launch(shift_mix_rows_kernel<MIXES, true, OUT, false, true>, dim3(a.tokens), threads, stream, a);
    }
    if (a.cu_seqlens != nullptr || (OUT == OutputFormat::W8A8 && a.tokens > MAX_ROWS_PER_SM * device_info().num_sms)) {
        constexpr int SMEM_BYTES = sizeof(GroupSmem<MIXES, OUT>);
        const auto kernel = shift_mix_kernel<MIXES, OUT>;
        static bool raised[MAX_DEVICES] = {};
        if (!raised[current_device()]) {
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES);
            raised[current_device()] = true;
        }
        const dim3 blocks((a.tokens + a.tokens_per_cta - 1) / a.tokens_per_cta);
        launch_with_smem(kernel, blocks, threads, SMEM_BYTES, stream, a);
        return;
    }
    if constexpr (OUT == OutputFormat::TWO_PART) {
        if (a.token_ctas == TOKEN_CTAS) return launch_clusters(shift_mix_shares_kernel<MIXES, OUT>, TOKEN_CTAS, dim3(a.tokens * TOKEN_CTAS), a.width / TOKEN_CTAS / 8, 0, stream, a);
    }
    const auto launch_rows = [&](auto partials) {
        if (a.tokens == 1) {
            // Same carveout as hopper_row.cu, so that both fit on one SM.
            launch_with_carveout(shift_mix_rows_kernel<MIXES, true, OUT, partials.value>, dim3(1), threads, 0, 100, stream, a);
        } else if (a.tokens <= device_info().num_sms) {
            launch(shift_mix_rows_kernel<MIXES, true, OUT, partials.value>, dim3(a.tokens), threads, stream, a);
        } else {
            launch(shift_mix_rows_kernel<MIXES, false, OUT, partials.value>, dim3(a.tokens), threads, stream, a);
        }
    };
    if (OUT == OutputFormat::W8A8 || a.partials == nullptr) {
        launch_rows(std::false_type());
    } else if constexpr (OUT != OutputFormat::W8A8) {
        launch_rows(std::true_type());
    }
}

RWKV_API int rwkv_shift_mix(const ShiftMixArgs* a, int rows, void* stream) {
    const bool clusters = a->token_ctas == TOKEN_CTAS && device_info().has_pdl && a->width % (256 * TOKEN_CTAS) == 0;
    const bool is_w8a8 = a->order[0] != nullptr;
    if (a->partials != nullptr && (a->cu_seqlens != nullptr || is_w8a8)) return static_cast<int>(cudaErrorInvalidValue);
    if (a->token_ctas != 1 && (!clusters || a->partials == nullptr || a->quantised == nullptr || a->scales != nullptr))
        return static_cast<int>(cudaErrorInvalidValue);
    const bool may_have_sums = is_w8a8 ? a->tokens <= device_info().num_sms : a->tokens == 1 && a->cu_seqlens == nullptr;
    if ((a->sums != nullptr || a->to_clear != nullptr) && !may_have_sums) return static_cast<int>(cudaErrorInvalidValue);
    const int threads = (a->width / 8 + 31) / 32 * 32;
    const auto launch_as = [&](auto mixes) {
        if (a->quantised == nullptr) return launch_shift_mix<mixes.value, OutputFormat::FP16>(*a, threads, stream);
        if (is_w8a8) return launch_shift_mix<mixes.value, OutputFormat::W8A8>(*a, threads, stream);
        if (a->scales == nullptr) return launch_shift_mix<mixes.value, OutputFormat::TWO_PART>(*a, threads, stream);
        launch_shift_mix<mixes.value, OutputFormat::FP8>(*a, threads, stream);
    };
    if (a->mixes == 6) {
        launch_as(std::integral_constant<int, 6>());
    } else {
        launch_as(std::integral_constant<int, 1>());
    }
    if (!stores_shift(*a)) {
        launch(store_rows_kernel, dim3(rows), threads, stream, a->last_h, a->shift, a->write_slots, a->slot_stride, a->width);
    }
    return launch_result();
}

// out = x (or 0) + sum of partials.
__global__ void __launch_bounds__(512) sum_partials_kernel(const __half* x, const float* partials, __half* out, int num_splits, int64_t count) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= count) return;
    const uint4 sum = sum_partials(partials, num_splits, count, at);
    store16(out + at, x == nullptr ? sum : add_packed(load16(x + at), sum));
}

// x [T, C] fp16 or null, partials [S, T, C] fp32 -> out [T, C] fp16. count: T * C, a multiple of 8.
RWKV_API int rwkv_add_partials(const void* x, const void* partials, void* out, int num_splits, int64_t count, void* stream) {
    constexpr int THREADS = 512;
    if (num_splits > MAX_SPLITS) return static_cast<int>(cudaErrorInvalidValue);
    const dim3 blocks(static_cast<unsigned>((count / 8 + THREADS - 1) / THREADS));
    launch(sum_partials_kernel, blocks, THREADS, stream, static_cast<const __half*>(x), static_cast<const float*>(partials),
           static_cast<__half*>(out), num_splits, count);
    return launch_result();
}

// out = x + y of exact sums.
__global__ void __launch_bounds__(512) add_exact_sums_kernel(const __half* x, const int* sums, const float* row_scales, const float* output_scales, __half* out, int width) {
    const int channel = threadIdx.x * 8;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * width + channel;
    float scales[8];
    if (channel < width) load_fp32x8(output_scales + channel, scales);
    allow_next_kernel();
    wait_for_previous_kernel();
    if (channel < width) store16(out + at, add_packed(load16(x + at), scale_exact_sums(sums + at, row_scales[blockIdx.x], scales)));
}

// x [T, C] fp16, sums [T, C] s32, row_scales [T] and output_scales [C] fp32 -> out [T, C] fp16.
RWKV_API int rwkv_add_exact_sums(const void* x, const void* sums, const void* row_scales, const void* output_scales, void* out, int tokens, int width, void* stream) {
    launch(add_exact_sums_kernel, dim3(tokens), (width / 8 + 31) / 32 * 32, stream, static_cast<const __half*>(x), static_cast<const int*>(sums),
           static_cast<const float*>(row_scales), static_cast<const float*>(output_scales), static_cast<__half*>(out), width);
    return launch_result();
}

RWKV_API int rwkv_norm_rows(
    const void* x, const void* rows, const void* weight, const void* bias, void* out, int count, int width, void* stream) {
    if (count == 0) return 0;
    launch(norm_rows_kernel, dim3(count), (width / 8 + 31) / 32 * 32, stream, static_cast<const __half*>(x),
           static_cast<const int64_t*>(rows), static_cast<const float*>(weight), static_cast<const float*>(bias),
           static_cast<__half*>(out), width);
    return launch_result();
}
