// Residual add, LayerNorm, token shift and the mixes of one half layer, in one pass.
//
// A thread owns 8 channels. Decoding, a block owns one token; three blocks fit on a processor. As long as every block has
// a processor of its own, the norm and mix weights are loaded into registers while the kernel before still runs. Prompts:
// a block owns tokens_per_block consecutive tokens and hands h on to the next one in registers; x and delta of the next
// token are loaded while one is reduced, and weights are read again for every token, from L1.
//
//   x      [T, C]     fp16  read  (and the token before the block's first one)
//   delta  [T, C]     fp16  read  (may be null)
//   shares [S, T, C]  fp32  may be null; else, decoding, delta is their sum over S, added up in order and rounded to fp16
//   sums   of one row that decodes, what delta is the halves of (row_sums.cuh; may be null)
//   added  of one row that decodes, sums that become zero when those have been read (may be null)
//   x_out  [T, C]     fp16  written: x + delta; never x itself, a neighbour still reads it
//   mixed  [M, T, C]  fp16  written: h + (h of the token before - h) * mix[m], M = 1 or 6
//   codes  [K, T, C]  e4m3  may be null; else the first K of these (3 of 6, or the one), rounded to fp16 and then to codes
//                           with scales [K, pitch] fp32 (row_codes.cuh), and mixed has only the others and v: [4 or 0, T, C]
//                           Without scales, [K, T, 2, C] e5m2: to two parts (row_parts.cuh); in_bytes, [K, T, 2, C] s8 with
//                           [K, C / 128, pitch] pairs of fp32: to whole numbers of two bytes (row_bytes.cuh; C a multiple of 128)
//   shift  [slots, C] fp16  strided; the first token of a row reads read_slots[row], its last token's h goes to
//                           write_slots[row] when rows are single tokens, else to tail[row] (another block
//                           may still have to read that slot), from where store_rows takes it
//
// Bytes per token: 2C * (2 + 1 + M) plus 4C at the ends of a row; with codes C less. C <= 4096, a multiple of 8.
#include <type_traits>

#include "shift_mix.cuh"
#include "token_shares.cuh"

// 1 / channels of this warp.
__device__ __forceinline__ float share_of_warp(int width) {
    return 1.0f / fmaxf(channels_of(threadIdx.x >> 5, width), 1.0f);
}

// Mean and deviation of a token, 8 channels per thread (zeros from `width` on): one barrier. `scratch` may be used again
// after the next barrier.
__device__ __forceinline__ Moments moments(
    const uint4& packed, bool active, int width, float share_of_warp, float2* scratch) {
    const float2 part = part_moments(packed, active, share_of_warp);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = part;
    __syncthreads();
    return join_moments(scratch, blockDim.x >> 5, width);
}

// Decoding: a block per token. HELD: all weights are in registers before the inputs are waited for, of parts and bytes in so few
// that such a block comes up beside one of products; the mixes' only where delta is no shares, of which as much comes at once.
template <int MIXES, bool HELD, As FORM, bool SHARES>
__global__ void __launch_bounds__(512, !HELD ? 3 : FORM == As::PARTS || FORM == As::BYTES ? 2 : 1) shift_mix_rows_kernel(const ShiftMixArgs a) {
    __shared__ float2 scratch[MAX_WARPS];
    __shared__ float largest[CODED_MIXES<MIXES>][MAX_WARPS];
    constexpr int GROUP = HELD || MIXES == 1 ? MIXES : 3;  // mixes whose weights are in registers at once
    constexpr bool MIX_HELD = HELD && (!SHARES || MIXES == 1);
    const int width = a.width, channel = threadIdx.x * 8, token = blockIdx.x;
    const bool active = channel < width;
    float weight[8] = {}, bias[8] = {};
    uint4 mix[GROUP] = {};
    const auto load_mixes = [&] {
#pragma unroll
        for (int m = 0; m < GROUP; ++m) mix[m] = load16(a.mix + m * width + channel);
    };
    if (HELD && active) {
        load_floats8(a.weight + channel, weight);
        load_floats8(a.bias + channel, bias);
        if (MIX_HELD) load_mixes();
#pragma unroll
        for (int m = 0; !MIX_HELD && m < GROUP; ++m) ask_for_line(a.mix + m * width + channel);
    }
    uint4 packed = make_uint4(0, 0, 0, 0), previous = packed;
    int64_t write_at = 0;
    const auto find_slots = [&] {  // written before this step's kernels, as is the token before
        write_at = a.write_slots[token] * a.slot_stride + channel;
        if (active) previous = load16(a.shift + a.read_slots[token] * a.slot_stride + channel);
    };
    if (HELD) find_slots();
    let_next_start();
    wait_for_inputs();
    const int64_t at = static_cast<int64_t>(token) * width + channel;
    if (!HELD) find_slots();
    if (active) {
        packed = load16(a.x + at);
        if constexpr (SHARES) {
            packed = add_packed(packed, add_shares(a.shares, a.num_shares, static_cast<int64_t>(a.tokens) * width, at));
        } else if (a.delta != nullptr) {
            packed = add_packed(packed, load16(a.delta + at));
        } else if (a.sums != nullptr) {
            packed = add_packed(packed, halves_of_sums(a.sums, width, channel));
        }
        if (HELD && !MIX_HELD) load_mixes();
    }
    const Moments of = moments(packed, active, width, share_of_warp(width), scratch);
    if (!NEEDS_ALL<FORM> && !active) return;
    if (!HELD && active) {
        load_floats8(a.weight + channel, weight);
        load_floats8(a.bias + channel, bias);
    }
    float h[8], change[8];
    normalise(packed, of, weight, bias, h);
    unpack8(previous, change);
#pragma unroll
    for (int i = 0; i < 8; ++i) change[i] -= h[i];
    if (active) {
        store_early(a.x_out + at, packed);
        store_early(a.shift + write_at, pack8(h));
    }
    if (!HELD && MIXES == 1 && active) mix[0] = load16(a.mix + channel);
    write_mixed<MIXES, GROUP, FORM>(
        a, h, change, mix, token, channel, active, largest, [](__half* p, const uint4& v) { store_early(p, v); });
    if (a.added != nullptr && active) clear_sums(a.added, width, channel);
}

// Decoding, of shares, which are four times as much as all else that a token reads, to parts or bytes: its channels are shared by
// TOKEN_BLOCKS blocks, each of whole warps, so small that they come up beside one of products with all weights held.
template <int MIXES, As FORM>
__global__ void __launch_bounds__(512 / TOKEN_BLOCKS, 4) shift_mix_shares_kernel(const ShiftMixArgs a) {
    __shared__ float2 parts[MAX_WARPS];  // of the token's warps, those of all blocks
    const int width = a.width, token = blockIdx.x / TOKEN_BLOCKS, block = blockIdx.x % TOKEN_BLOCKS;
    const int channel = block * (width / TOKEN_BLOCKS) + threadIdx.x * 8, lane = threadIdx.x & 31;
    const int64_t at = static_cast<int64_t>(token) * width + channel;
    float weight[8], bias[8], h[8], change[8];
    uint4 mix[MIXES];
    load_floats8(a.weight + channel, weight);
    load_floats8(a.bias + channel, bias);
#pragma unroll
    for (int m = 0; m < MIXES; ++m) mix[m] = load16(a.mix + m * width + channel);
    const int64_t write_at = a.write_slots[token] * a.slot_stride + channel;
    const uint4 previous = load16(a.shift + a.read_slots[token] * a.slot_stride + channel);
    arrive_cluster();
    let_next_start();
    wait_for_inputs();
    uint4 packed = load16(a.x + at);
    packed = add_packed(packed, add_shares(a.shares, a.num_shares, static_cast<int64_t>(a.tokens) * width, at));
    wait_cluster();  // all blocks are there
    const int warp = channel / 256;
    const float2 part = part_moments(packed, true, 1.0f / 256);
    if (lane < TOKEN_BLOCKS) put_in_block(parts + warp, lane, part);
    arrive_cluster();
    wait_cluster();
    normalise(packed, join_moments(parts, width / 256, width), weight, bias, h);
    unpack8(previous, change);
#pragma unroll
    for (int i = 0; i < 8; ++i) change[i] -= h[i];
    store_early(a.x_out + at, packed);
    store_early(a.shift + write_at, pack8(h));
    write_mixed<MIXES, MIXES, FORM>(
        a, h, change, mix, token, channel, true, nullptr, [](__half* p, const uint4& v) { store_early(p, v); });
}

// Prompts.
template <int MIXES, As FORM>
__global__ void __launch_bounds__(512, 2) shift_mix_kernel(const ShiftMixArgs a) {
    __shared__ float2 scratch[2][MAX_WARPS];  // used in turn: one barrier per token, with codes two
    __shared__ float largest[CODED_MIXES<MIXES>][MAX_WARPS];
    constexpr int GROUP = MIXES == 1 ? 1 : 3;
    const int width = a.width;
    int channel = threadIdx.x * 8;
    const bool active = channel < width;
    const int first = blockIdx.x * a.tokens_per_block, last = min(first + a.tokens_per_block, a.tokens);
    const float share = share_of_warp(width);
    uint4 x_next = make_uint4(0, 0, 0, 0), delta_next = x_next;
    const auto fetch = [&](int token) {
        if (!active) return;
        const int64_t at = static_cast<int64_t>(token) * width + channel;
        x_next = load16(a.x + at);
        if (a.delta != nullptr) delta_next = load16(a.delta + at);
    };
    const auto normalised = [&](const uint4& packed, const Moments& of, float (&h)[8]) {
        float weight[8], bias[8];
        load_floats8(a.weight + channel, weight);
        load_floats8(a.bias + channel, bias);
        normalise(packed, of, weight, bias, h);
    };
    let_next_start();
    wait_for_inputs();
    int turn = 0;
    uint4 previous = make_uint4(0, 0, 0, 0);
    int64_t row = a.token_rows[first];
    int end = static_cast<int>(a.cu_seqlens[row + 1]);
    bool starts = a.cu_seqlens[row] == first;
    if (!starts) {
        fetch(first - 1);
        const uint4 packed = add_packed(x_next, delta_next);
        fetch(first);
        const Moments of = moments(packed, active, width, share, scratch[turn]);
        turn ^= 1;
        if (active) {
            float h[8];
            normalised(packed, of, h);
            previous = pack8(h);
        }
    } else {
        fetch(first);
    }
    for (int token = first; token < last; ++token) {
        asm volatile("" : "+r"(channel));  // or the addresses of all weights are held in registers
        if (starts && active) previous = load16(a.shift + a.read_slots[row] * a.slot_stride + channel);
        const uint4 packed = add_packed(x_next, delta_next);
        if (token + 1 < last) fetch(token + 1);
        const int64_t at = static_cast<int64_t>(token) * width + channel;
        if (active) store_whole(a.x_out + at, packed);
        const Moments of = moments(packed, active, width, share, scratch[turn]);
        turn ^= 1;
        __half* const tail = a.tail + row * width + channel;
        const bool ends = token + 1 == end;
        starts = ends;  // the token after it
        if (ends && token + 1 < last) {
            row = a.token_rows[token + 1];
            end = static_cast<int>(a.cu_seqlens[row + 1]);
        }
        if (!NEEDS_ALL<FORM> && !active) continue;
        float h[8] = {}, change[8] = {};
        uint4 mix[GROUP] = {};
        if (active) {
            normalised(packed, of, h);
            unpack8(previous, change);
            // What a later step would find in the slot: chunked and whole prefill agree.
            previous = pack8(h);
            if (ends) store_whole(tail, previous);
#pragma unroll
            for (int i = 0; i < 8; ++i) change[i] -= h[i];
            if (MIXES == 1) mix[0] = load16(a.mix + channel);
        }
        write_mixed<MIXES, GROUP, FORM>(
            a, h, change, mix, token, channel, active, largest, [](__half* p, const uint4& v) { store_whole(p, v); });
    }
}

// tail [B, C] -> shift[write_slots[row]]
__global__ void store_rows_kernel(
    const __half* tail, __half* shift, const int64_t* write_slots, int64_t slot_stride, int width) {
    let_next_start();
    wait_for_inputs();
    const int channel = threadIdx.x * 8;
    if (channel < width) {
        const int64_t row = blockIdx.x;
        store16(shift + write_slots[row] * slot_stride + channel, load16(tail + row * width + channel));
    }
}

// x[rows[i]] (+ delta) normalised -> out[i]; rows may be null (identity). out fp16 [R, C].
__global__ void __launch_bounds__(512) norm_rows_kernel(
    const __half* x, const int64_t* rows, const float* norm_weight, const float* norm_bias, __half* out, int width) {
    __shared__ float2 scratch[MAX_WARPS];
    const int channel = threadIdx.x * 8;
    const bool active = channel < width;
    float weight[8] = {}, bias[8] = {}, h[8];
    if (active) {
        load_floats8(norm_weight + channel, weight);
        load_floats8(norm_bias + channel, bias);
    }
    let_next_start();
    wait_for_inputs();
    const int64_t row = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (active) packed = load16(x + row * width + channel);
    normalise(packed, moments(packed, active, width, share_of_warp(width), scratch), weight, bias, h);
    if (active) store16(out + static_cast<int64_t>(blockIdx.x) * width + channel, pack8(h));
}

// TOKEN_BLOCKS blocks a token.
inline void launch_clusters(void (*kernel)(const ShiftMixArgs), const ShiftMixArgs& a, void* stream) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.tokens * TOKEN_BLOCKS);
    config.blockDim = dim3(a.width / TOKEN_BLOCKS / 8);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes, config.numAttrs = 2;
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = TOKEN_BLOCKS, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchKernelEx(&config, kernel, ShiftMixArgs(a));
}

template <int MIXES, As FORM>
void launch_shift_mix(const ShiftMixArgs& a, int threads, void* stream) {
    if (a.cu_seqlens != nullptr) {
        const dim3 blocks((a.tokens + a.tokens_per_block - 1) / a.tokens_per_block);
        launch(shift_mix_kernel<MIXES, FORM>, blocks, threads, stream, a);
        return;
    }
    if constexpr (FORM == As::PARTS || FORM == As::BYTES) {
        if (a.token_blocks == TOKEN_BLOCKS) return launch_clusters(shift_mix_shares_kernel<MIXES, FORM>, a, stream);
    }
    const auto launch_rows = [&](auto shares) {
        if (a.tokens == 1) {
            // With the split that the products of one row have, so that it comes up beside them.
            launch_with_split(shift_mix_rows_kernel<MIXES, true, FORM, shares.value>, dim3(1), threads, 0, 100, stream, a);
        } else if (a.tokens <= this_machine().processors) {
            launch(shift_mix_rows_kernel<MIXES, true, FORM, shares.value>, dim3(a.tokens), threads, stream, a);
        } else {
            launch(shift_mix_rows_kernel<MIXES, false, FORM, shares.value>, dim3(a.tokens), threads, stream, a);
        }
    };
    if (a.shares == nullptr) {
        launch_rows(std::false_type());
    } else {
        launch_rows(std::true_type());
    }
}

RWKV_API int rwkv_shift_mix(const ShiftMixArgs* a, int rows, void* stream) {
    const bool clusters = a->token_blocks == TOKEN_BLOCKS && this_machine().early_launch && a->width % (256 * TOKEN_BLOCKS) == 0;
    if (a->shares != nullptr && a->cu_seqlens != nullptr) return static_cast<int>(cudaErrorInvalidValue);
    if (a->token_blocks != 1 && (!clusters || a->shares == nullptr || a->codes == nullptr || (a->scales != nullptr && !a->in_bytes)))
        return static_cast<int>(cudaErrorInvalidValue);
    if ((a->sums != nullptr || a->added != nullptr) && (a->tokens != 1 || a->cu_seqlens != nullptr)) return static_cast<int>(cudaErrorInvalidValue);
    const int threads = (a->width / 8 + 31) / 32 * 32;
    const auto as_wanted = [&](auto mixes) {
        if (a->codes == nullptr) return launch_shift_mix<mixes.value, As::HALVES>(*a, threads, stream);
        if (a->scales == nullptr) return launch_shift_mix<mixes.value, As::PARTS>(*a, threads, stream);
        if (a->in_bytes) return launch_shift_mix<mixes.value, As::BYTES>(*a, threads, stream);
        launch_shift_mix<mixes.value, As::CODES>(*a, threads, stream);
    };
    if (a->mixes == 6) {
        as_wanted(std::integral_constant<int, 6>());
    } else {
        as_wanted(std::integral_constant<int, 1>());
    }
    if (a->cu_seqlens != nullptr) {
        launch(store_rows_kernel, dim3(rows), threads, stream, a->tail, a->shift, a->write_slots, a->slot_stride, a->width);
    }
    return launch_result();
}

// x [count], or zeros, plus shares, whose sum over S is meant.
__global__ void __launch_bounds__(512) add_shares_kernel(const __half* x, const float* shares, __half* out, int num_shares, int64_t count) {
    let_next_start();
    wait_for_inputs();
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= count) return;
    const uint4 sum = add_shares(shares, num_shares, count, at);
    store16(out + at, x == nullptr ? sum : add_packed(load16(x + at), sum));
}

// x [T, C] fp16, or null, and shares [S, T, C] fp32 -> out [T, C] fp16; count: T * C, a multiple of 8.
RWKV_API int rwkv_add_shares(const void* x, const void* shares, void* out, int num_shares, int64_t count, void* stream) {
    constexpr int THREADS = 512;
    if (num_shares > MAX_SHARES) return static_cast<int>(cudaErrorInvalidValue);
    const dim3 blocks(static_cast<unsigned>((count / 8 + THREADS - 1) / THREADS));
    launch(add_shares_kernel, blocks, THREADS, stream, static_cast<const __half*>(x), static_cast<const float*>(shares),
           static_cast<__half*>(out), num_shares, count);
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
