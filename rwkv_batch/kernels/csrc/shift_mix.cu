// Residual add, LayerNorm, token shift and the mixes of one half layer, in one pass.
//
// One block owns tokens_per_block consecutive tokens and the whole width; a thread owns 8 channels and hands h on to
// the next token in registers; x and delta of the next token are loaded while one is reduced. Norm and mix weights
// are read again for every token, from L1: in registers they would leave room for only one block per processor.
//
//   x      [T, C]     fp16  read  (and the token before the block's first one)
//   delta  [T, C]     fp16  read  (may be null)
//   x_out  [T, C]     fp16  written: x + delta; never x itself, a neighbour still reads it
//   mixed  [M, T, C]  fp16  written: h + (h of the token before - h) * mix[m], M = 1 or 6
//   shift  [slots, C] fp16  strided; the first token of a row reads read_slots[row], its last token's h goes to
//                           write_slots[row] when rows are single tokens, else to tail[row] (another block
//                           may still have to read that slot), from where store_rows takes it
//
// Bytes per token: 2C * (2 + 1 + M) plus 4C at the ends of a row. C <= 4096, a multiple of 8.
#include "common.cuh"

struct ShiftMixArgs {
    const __half* x;
    const __half* delta;
    __half* x_out;
    __half* mixed;
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
    int tokens_per_block;
};

// h of one token for this thread's 8 channels; s is x + delta as stored.
__device__ __forceinline__ void normalise(
    const float (&s)[8], const float (&weight)[8], const float (&bias)[8], bool active, float inv_width,
    float* scratch, float (&h)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += active ? s[i] : 0.0f;
    const float mean = block_sum(sum, scratch) * inv_width;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += active ? (s[i] - mean) * (s[i] - mean) : 0.0f;
    const float scale = rsqrtf(block_sum(squares, scratch + 32) * inv_width + NORM_EPS);
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] = (s[i] - mean) * scale * weight[i] + bias[i];
}

__device__ __forceinline__ uint4 add_packed(const uint4& a, const uint4& b) {
    float x[8], y[8];
    unpack8(a, x);
    unpack8(b, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
    return pack8(x);
}

template <int MIXES>
__global__ void __launch_bounds__(512, 2) shift_mix_kernel(const ShiftMixArgs a) {
    __shared__ float scratch[64];
    const int width = a.width, channel = threadIdx.x * 8;
    const bool active = channel < width;
    const int first = blockIdx.x * a.tokens_per_block;
    const int last = min(first + a.tokens_per_block, a.tokens);
    const float inv_width = 1.0f / width;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 x_next = zero, delta_next = zero;
    const auto fetch = [&](int token) {
        if (!active) return;
        const int64_t at = static_cast<int64_t>(token) * width + channel;
        x_next = load16(a.x + at);
        if (a.delta != nullptr) delta_next = load16(a.delta + at);
    };
    const auto normalised = [&](const uint4& packed, float (&h)[8]) {
        float s[8], weight[8] = {}, bias[8] = {};
        unpack8(packed, s);
        if (active) {
            load_floats8(a.weight + channel, weight);
            load_floats8(a.bias + channel, bias);
        }
        normalise(s, weight, bias, active, inv_width, scratch, h);
    };
    let_next_start();
    wait_for_inputs();
    float previous[8] = {}, h[8];
    const int64_t first_row = a.token_rows == nullptr ? first : a.token_rows[first];
    if (a.cu_seqlens != nullptr && a.cu_seqlens[first_row] != first) {
        fetch(first - 1);
        normalised(add_packed(x_next, delta_next), h);
        unpack8(pack8(h), previous);
        __syncthreads();
    }
    fetch(first);
    for (int token = first; token < last; ++token) {
        const int64_t row = a.token_rows == nullptr ? token : a.token_rows[token];
        const bool starts = a.cu_seqlens == nullptr || a.cu_seqlens[row] == token;
        const bool ends = a.cu_seqlens == nullptr || a.cu_seqlens[row + 1] == token + 1;
        if (starts && active) unpack8(load16(a.shift + a.read_slots[row] * a.slot_stride + channel), previous);
        const uint4 packed = add_packed(x_next, delta_next);
        if (token + 1 < last) fetch(token + 1);
        normalised(packed, h);
        if (active) {
            const int64_t at = static_cast<int64_t>(token) * width + channel;
            store16(a.x_out + at, packed);
            const uint4 h_packed = pack8(h);
            if (ends) {
                __half* out = a.cu_seqlens == nullptr ? a.shift + a.write_slots[row] * a.slot_stride : a.tail + row * width;
                store16(out + channel, h_packed);
            }
#pragma unroll
            for (int m = 0; m < MIXES; ++m) {
                float mu[8], out[8];
                unpack8(load16(a.mix + static_cast<int64_t>(m) * width + channel), mu);
#pragma unroll
                for (int i = 0; i < 8; ++i) out[i] = h[i] + (previous[i] - h[i]) * mu[i];
                store16(a.mixed + (static_cast<int64_t>(m) * a.tokens + token) * width + channel, pack8(out));
            }
            // What a later step would find in the slot: chunked and whole prefill agree.
            unpack8(h_packed, previous);
        }
        __syncthreads();  // scratch is used again
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
    __shared__ float scratch[64];
    const int channel = threadIdx.x * 8;
    const bool active = channel < width;
    float weight[8] = {}, bias[8] = {}, s[8] = {}, h[8];
    if (active) {
        load_floats8(norm_weight + channel, weight);
        load_floats8(norm_bias + channel, bias);
    }
    let_next_start();
    wait_for_inputs();
    const int64_t row = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
    if (active) unpack8(load16(x + row * width + channel), s);
    normalise(s, weight, bias, active, 1.0f / width, scratch, h);
    if (active) store16(out + static_cast<int64_t>(blockIdx.x) * width + channel, pack8(h));
}

RWKV_API int rwkv_shift_mix(const ShiftMixArgs* a, int rows, void* stream) {
    const int threads = (a->width / 8 + 31) / 32 * 32;
    const dim3 blocks((a->tokens + a->tokens_per_block - 1) / a->tokens_per_block);
    if (a->mixes == 6) {
        launch(shift_mix_kernel<6>, blocks, threads, stream, *a);
    } else {
        launch(shift_mix_kernel<1>, blocks, threads, stream, *a);
    }
    if (a->cu_seqlens != nullptr) {
        launch(store_rows_kernel, dim3(rows), threads, stream, a->tail, a->shift, a->write_slots, a->slot_stride, a->width);
    }
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
