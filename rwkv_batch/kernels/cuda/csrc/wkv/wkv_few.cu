// WKV decode for few rows, fused with the low ranks' up projections.
//
//   [v_gate,] w, a = hidden [G, rows, D] @ up_weight [G, C, D]^T        G = 3, or 2 in layer 0
//   g              = gate_hidden [rows, Dg] @ gate_up_weight [C, Dg]^T
//   then one WKV step as in wkv_decode.cu
//
// in     hidden          [G, rows, D] fp16 (LowRankUpArgs)
//        gate_hidden     [rows, Dg] fp16
//        up_weight       [G, C, D] fp16
//        gate_up_weight  [C, Dg] fp16
//        r, k, v, v_first  [rows, C] fp16 (WkvArgs); constants [C] fp32
//
// inout  state           as in wkv_decode.cu
//
// out    y               [rows, C] fp16
//
// GEMM: a warp takes up to PIECES_PER_WARP pieces of 16 outputs x 64 inputs (mma.m16n8k16, 8 rows at once). Pieces of
// an output are added in order. WKV: four warps per head and row, 16 value rows each; int8: one warp.
// Prologue: weights and states load before the previous kernel ends (states of more than 4 rows after it).
//
// Grid: one CTA per head. It multiplies the head's 64 channels, then steps that head of every row.
// Block: 512 threads.
// Shared memory: 58 KB with one row, else 46 KB (int8 states: 42 KB), partial sums and vectors; one row: also weights
// beyond REGISTER_PIECES.
// Bound: memory; per CTA 2 * 64 * (G * D + Dg) bytes of weights (112 KB at 7.2B) and its states. Share of 4.8 TB/s
// (H200, 64 heads, fp16): 1 row 19 %, 4 rows 25 %, without the overlap of its prologue: the latency of one load and of
// the sums between the two parts, 9.5 us.
// Made for: 1 to 8 rows (int8 states: 4), D % 64 == 0, Dg % 64 == 0.
#include <cuda_pipeline.h>

#include "wkv_int8.cuh"

constexpr int WARPS = 16, PIECES_PER_WARP = 4, MAX_ROWS = 8, MAX_INT8_ROWS = 4;
constexpr int PIECE_OUTPUTS = 16, PIECE_INPUTS = 64, PIECE_BYTES = 2 * PIECE_OUTPUTS * PIECE_INPUTS;
constexpr int QUARTER = HEAD_SIZE / 4;  // value rows per warp

// Mirrored in cuda/library.py.
struct LowRankUpArgs {
    const __half* hidden;
    const __half* gate_hidden;
    const __half* up_weight;
    const __half* gate_up_weight;
    int groups, rank, gate_rank;
};

// 16 outputs of one projection x 64 inputs.
struct Piece {
    const __half* x;  // row 0, first input
    int rank;  // row pitch of x and of the weight
    const __half* weight;
    int first_input;  // among all projections' inputs, concatenated

    __device__ __forceinline__ Piece(const LowRankUpArgs& e, int number, int rows, int heads, int head) {
        const int width = heads * HEAD_SIZE, depth = e.rank / PIECE_INPUTS, per_projection = HEAD_SIZE / PIECE_OUTPUTS * depth;
        if (number < e.groups * per_projection) {
            const int projection = number / per_projection, output = head * HEAD_SIZE + number % per_projection / depth * PIECE_OUTPUTS;
            const int input = number % depth * PIECE_INPUTS;
            rank = e.rank, x = e.hidden + static_cast<int64_t>(projection) * rows * rank + input, first_input = projection * rank + input;
            weight = e.up_weight + (static_cast<int64_t>(projection) * width + output) * rank + input;
        } else {
            const int rest = number - e.groups * per_projection, gate_depth = e.gate_rank / PIECE_INPUTS;
            const int output = head * HEAD_SIZE + rest / gate_depth * PIECE_OUTPUTS, input = rest % gate_depth * PIECE_INPUTS;
            rank = e.gate_rank, x = e.gate_hidden + input, first_input = e.groups * e.rank + input;
            weight = e.gate_up_weight + static_cast<int64_t>(output) * rank + input;
        }
    }
};

__host__ __device__ inline int count_pieces(const LowRankUpArgs& e) {
    return HEAD_SIZE / PIECE_OUTPUTS * (e.groups * e.rank + e.gate_rank) / PIECE_INPUTS;
}

// Whether CTAs of hopper_row.cu fit on the same SM. With one row this kernel takes at most 48 registers per thread. A
// warp keeps REGISTER_PIECES weight pieces in registers and the others in shared memory.
template <typename State, int ROWS>
constexpr bool SHARES_SM = ROWS == 1 && !std::is_same_v<State, Int8State>;
constexpr int REGISTER_PIECES = 2;

constexpr int CONSTANTS = 8;  // vectors per head: w0, a0, v0, k_k, k_a, r_k, norm weight and bias

template <typename State, int ROWS>
struct Smem {
    float sums[WARPS * PIECES_PER_WARP][ROWS][PIECE_OUTPUTS];
    uint4 x[ROWS == 1 ? WARPS * PIECES_PER_WARP * 2 : 1];  // one row: inputs of all projections
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD_SIZE];
    float vectors[ROWS][VECS][HEAD_SIZE];
    float y[ROWS][HEAD_SIZE];
    float inv_square[ROWS];
};

template <int ROWS>
struct Smem<Int8State, ROWS> {
    float sums[WARPS * PIECES_PER_WARP][ROWS][PIECE_OUTPUTS];
    uint4 x[ROWS == 1 ? WARPS * PIECES_PER_WARP * 2 : 1];  // one row: inputs of all projections
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD_SIZE];
    Int8State states[ROWS];
    Int8Vectors vectors[ROWS];
};

// Sums the pieces of two output channels, in order.
template <typename State, int ROWS>
__device__ __forceinline__ __half2 add_pieces(const Smem<State, ROWS>& smem, int first, int depth, int row, int pair) {
    float2 sum = make_float2(0.0f, 0.0f);
    first += pair / PIECE_OUTPUTS * depth;
    for (int i = 0; i < depth; ++i) {
        const float2 part = *reinterpret_cast<const float2*>(&smem.sums[first + i][row][pair % PIECE_OUTPUTS]);
        sum.x += part.x, sum.y += part.y;
    }
    return __floats2half2_rn(sum.x, sum.y);
}

template <typename State, int ROWS>
__global__ void __launch_bounds__(SHARES_SM<State, ROWS> ? 640 : 32 * WARPS, SHARES_SM<State, ROWS> ? 2 : 1)
wkv_few_kernel(const WkvArgs p, const LowRankUpArgs e) {
    constexpr bool IS_INT8 = std::is_same_v<State, Int8State>;
    __shared__ __align__(16) Smem<State, ROWS> smem;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int pair = lane * 2, q = lane & 7, octet = lane >> 3, head = blockIdx.x, rows = p.rows;
    const bool residual = p.v_first != nullptr;
    const int pieces = count_pieces(e);

    constexpr int IN_REGISTERS = ROWS == 1 ? REGISTER_PIECES : PIECES_PER_WARP;
    extern __shared__ __align__(16) unsigned char dynamic[];
    uint4* const smem_weights = reinterpret_cast<uint4*>(dynamic) + warp * 128 + lane;
    uint4 weights[IN_REGISTERS][2][2];  // [outputs g, g + 8][inputs 8t, 32 + 8t ..]
#pragma unroll
    for (int i = 0; i < PIECES_PER_WARP; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        const Piece piece(e, number, rows, p.heads, head);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const __half* at = piece.weight + static_cast<int64_t>(g + 8 * up) * piece.rank + 8 * t;
            if (i < IN_REGISTERS) {
                weights[i][up][0] = __ldg(reinterpret_cast<const uint4*>(at));
                weights[i][up][1] = __ldg(reinterpret_cast<const uint4*>(at + 32));
            } else {
                uint4* const to = smem_weights + (i - IN_REGISTERS) * WARPS * 128 + up * 64;
                __pipeline_memcpy_async(to, at, sizeof(uint4));
                __pipeline_memcpy_async(to + 32, at + 32, sizeof(uint4));
            }
        }
    }
    const int64_t head_at = static_cast<int64_t>(head) * HEAD_SIZE * HEAD_SIZE;
    const auto state_of = [&](int64_t slot, int item) {
        const int first = item % 4 * QUARTER + octet;
        return static_cast<State*>(p.state) + slot * p.slot_stride + head_at + first * HEAD_SIZE;
    };
    const auto pieces_of = [&](int64_t slot) {
        auto* const first = static_cast<unsigned char*>(p.state) + slot * p.slot_stride + head * sizeof(Int8State);
        return reinterpret_cast<uint4*>(first);
    };
    constexpr int STATE_PIECES = sizeof(Int8State) / sizeof(uint4);
    // A lane's keys of its value rows; with one row of tokens it has one.
    RawRows<std::conditional_t<IS_INT8, __half, State>, ROWS == 1 ? 1 : 4> raw;
    const int64_t own_at = head_at + (warp * 4 + octet) * HEAD_SIZE;
    if constexpr (IS_INT8) {
        if (warp < rows) {
            const uint4* const from = pieces_of(p.read_slots[warp]);
            for (int i = lane; i < STATE_PIECES; i += 32)
                __pipeline_memcpy_async(reinterpret_cast<uint4*>(&smem.states[warp]) + i, from + i, sizeof(uint4));
        }
    } else if constexpr (ROWS == 1) {
        raw.load(static_cast<State*>(p.state) + p.read_slots[0] * p.slot_stride + own_at, q);
    } else if (warp < 4 * rows) {
        raw.load(state_of(p.read_slots[warp / 4], warp), q);
    }
    const int channel = head * HEAD_SIZE + pair;
    HeadParams params;
    if constexpr (ROWS == 1) {
        if (warp >= 4 && warp < 4 + CONSTANTS) {
            const int i = warp - 4;
            const float* const of = i == 0   ? p.w0
                                    : i == 1 ? p.a0
                                    : i == 2 ? p.v0
                                    : i == 3 ? p.k_k
                                    : i == 4 ? p.k_a
                                    : i == 5 ? p.r_k
                                    : i == 6 ? p.ln_weight
                                             : p.ln_bias;
            if (of != nullptr) __pipeline_memcpy_async(&smem.constants[i][pair], of + channel, sizeof(float2));
        }
    } else {
        params = HeadParams(p, channel);
    }
    allow_next_kernel();
    wait_for_previous_kernel();

    // One warp per row computes its vectors; global loads are issued before the GEMM.
    const int64_t at = (static_cast<int64_t>(warp) * p.heads + head) * HEAD_SIZE + pair;
    Inputs in;
    if (warp < rows) {
        const auto get = [&](const __half* x) { return *reinterpret_cast<const __half2*>(x + at); };
        in.r = get(p.r), in.k = get(p.k), in.v = get(p.v);
        in.gate = in.first = __floats2half2_rn(0.0f, 0.0f);
        if (residual) in.first = get(p.v_first);
    }
    uint4 x[ROWS == 1 ? 1 : PIECES_PER_WARP][2];
    if constexpr (ROWS == 1) {
        const int low_rank_size = e.groups * e.rank, c = 8 * threadIdx.x;
        if (c < low_rank_size + e.gate_rank) smem.x[threadIdx.x] = __ldg(reinterpret_cast<const uint4*>(c < low_rank_size ? e.hidden + c : e.gate_hidden + (c - low_rank_size)));
        __pipeline_wait_prior(0);
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < PIECES_PER_WARP; ++i) {
            const int number = warp + i * WARPS;
            x[i][0] = x[i][1] = make_uint4(0, 0, 0, 0);
            if (number >= pieces || g >= rows) continue;
            const Piece piece(e, number, rows, p.heads, head);
            const uint4* from = reinterpret_cast<const uint4*>(piece.x + static_cast<int64_t>(g) * piece.rank + 8 * t);
            x[i][0] = __ldg(from), x[i][1] = __ldg(from + 4);
        }
    }
    const auto multiply = [&](int number, const uint4 (&lo)[2], const uint4 (&hi)[2], const uint4 (&x)[2]) {
        float sums[4] = {};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            mma(sums, Fragment{{lo[part].x, hi[part].x, lo[part].y, hi[part].y}}, x[part].x, x[part].y);
            mma(sums, Fragment{{lo[part].z, hi[part].z, lo[part].w, hi[part].w}}, x[part].z, x[part].w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 2 * t + (j & 1);
            if (row < min(rows, ROWS)) smem.sums[number][row][g + (j >> 1) * 8] = sums[j];
        }
    };
    const auto multiply_row = [&](int number, const uint4 (&lo)[2], const uint4 (&hi)[2]) {
        const uint4* const from = &smem.x[Piece(e, number, rows, p.heads, head).first_input / 8 + t];
        const uint4 none = make_uint4(0, 0, 0, 0), x[2] = {g == 0 ? from[0] : none, g == 0 ? from[4] : none};
        multiply(number, lo, hi, x);
    };
#pragma unroll
    for (int i = 0; i < IN_REGISTERS; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        if constexpr (ROWS == 1) multiply_row(number, weights[i][0], weights[i][1]);
        else multiply(number, weights[i][0], weights[i][1], x[i]);
    }
    if constexpr (ROWS == 1) {
#pragma unroll 1
        for (int number = warp + IN_REGISTERS * WARPS, i = 0; number < pieces; number += WARPS, ++i) {
            const uint4* const loaded = smem_weights + i * WARPS * 128;
            const uint4 lo[2] = {loaded[0], loaded[32]}, hi[2] = {loaded[64], loaded[96]};
            multiply_row(number, lo, hi);
        }
    }
    __syncthreads();

    __half2 gate;
    std::conditional_t<IS_INT8, Int8Scalars, Scalars> scalars;
    float2 y, v;
    if (warp < rows) {
        const int depth = e.rank / PIECE_INPUTS, per_projection = HEAD_SIZE / PIECE_OUTPUTS * depth;
        const auto low_rank_output = [&](int projection) { return add_pieces(smem, projection * per_projection, depth, warp, pair); };
        if (residual) in.gate = low_rank_output(0);
        in.w = low_rank_output(e.groups - 2), in.a = low_rank_output(e.groups - 1);
        gate = add_pieces(smem, e.groups * per_projection, e.gate_rank / PIECE_INPUTS, warp, pair);
        if constexpr (ROWS == 1) {
            const auto constant = [&](int i) { return *reinterpret_cast<const float2*>(&smem.constants[i][pair]); };
            params.w0 = constant(0), params.a0 = constant(1), params.k_k = constant(3), params.k_a = constant(4), params.r_k = constant(5);
            params.v0 = residual ? constant(2) : make_float2(0.0f, 0.0f);
        }
        scalars = prologue(params, in, residual, smem.vectors[warp], pair);
    }
    if constexpr (IS_INT8) {
        if (warp >= rows) return;
        Int8State& state = smem.states[warp];
        __pipeline_wait_prior(0);
        __syncwarp();
        y = int8_step(state, smem.vectors[warp], scalars, lane), v = scalars.v;
        uint4* const to = pieces_of(p.write_slots[warp]);
        for (int i = lane; i < STATE_PIECES; i += 32) to[i] = reinterpret_cast<const uint4*>(&state)[i];
    } else {
        if (warp < rows && lane == 0) smem.inv_square[warp] = scalars.inv_square;
        __syncthreads();
        if constexpr (ROWS == 1) {
            const auto& vectors = smem.vectors[0];
            float s[KEYS], of[KEYS];
            raw.rows[0].unpack(s);
            read_keys<State>(vectors[VKK], q, of);
            const float factor = -smem.inv_square[0], value = vectors[VV][warp * 4 + octet];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) of[j] *= factor;
            const float sa = octet_sum(dot(s, of));
            float decay[KEYS], k[KEYS];
            read_keys<State>(vectors[VDECAY], q, decay);
            read_keys<State>(vectors[VKKA], q, of);
            read_keys<State>(vectors[VK], q, k);
#pragma unroll
            for (int j = 0; j < KEYS; ++j) s[j] = fmaf(s[j], decay[j], fmaf(sa, of[j], value * k[j]));
            store_keys(static_cast<State*>(p.state) + p.write_slots[0] * p.slot_stride + own_at, q, s);
            read_keys<State>(vectors[VR], q, of);
            float sum = dot(s, of);
#pragma unroll
            for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, offset);
            if (q == 0) smem.y[0][warp * 4 + octet] = sum;
        }
        for (int item = warp; ROWS > 1 && item < 4 * rows; item += WARPS) {
            const int row = item / 4, first = item % 4 * QUARTER + octet;
            if (item != warp) raw.load(state_of(p.read_slots[row], item), q);
            const auto& vectors = smem.vectors[row];
            KeyVectors v;
            read_keys<State>(vectors[VKK], q, v.kk);
            read_keys<State>(vectors[VDECAY], q, v.decay);
            read_keys<State>(vectors[VKKA], q, v.kka);
            read_keys<State>(vectors[VK], q, v.k);
            read_keys<State>(vectors[VR], q, v.r);
#pragma unroll
            for (int j = 0; j < KEYS; ++j) v.kk[j] *= -smem.inv_square[row];
            if constexpr (ROWS > 1) wkv_step<State, 4>(raw, state_of(p.write_slots[row], item), v, &vectors[VV][first], q, &smem.y[row][first]);
        }
        __syncthreads();
        if (warp >= rows) return;
        y = *reinterpret_cast<const float2*>(&smem.y[warp][pair]);
        v = *reinterpret_cast<const float2*>(&smem.vectors[warp][VV][pair]);
    }
    const auto two = [&](const float* x, int i) {
        return *reinterpret_cast<const float2*>(ROWS == 1 ? &smem.constants[i][pair] : x + channel);
    };
    const float2 out =
        wkv_epilogue(y, scalars.bonus, v, __half22float2(gate), two(p.ln_weight, 6), two(p.ln_bias, 7));
    *reinterpret_cast<__half2*>(p.y + at) = __floats2half2_rn(out.x, out.y);
}

template <typename State, int ROWS>
static int launch_rows(const WkvArgs& p, const LowRankUpArgs& e, void* stream) {
    const auto kernel = wkv_few_kernel<State, ROWS>;
    const int smem_weights = ROWS == 1 ? max(0, count_pieces(e) - REGISTER_PIECES * WARPS) * PIECE_BYTES : 0;
    static bool raised[MAX_DEVICES] = {};
    if (ROWS == 1 && !raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (PIECES_PER_WARP - REGISTER_PIECES) * WARPS * PIECE_BYTES);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(kernel, dim3(p.heads), 32 * WARPS, smem_weights, ROWS == 1 ? 100 : -1, stream, p, e);
    return launch_result();
}

template <typename State, int MOST = MAX_ROWS>
static int launch_few(const WkvArgs& p, const LowRankUpArgs& e, void* stream) {
    return p.rows == 1 ? launch_rows<State, 1>(p, e, stream) : launch_rows<State, MOST>(p, e, stream);
}

// Rows of one token: at most 8, int8 4. Does not read w, a, g and v_gate of `p`. Returns an error for ranks that exceed
// the warps' registers. state_bytes: per element; 1 for Int8State.
RWKV_API int rwkv_wkv_few(const WkvArgs* p, const LowRankUpArgs* e, int state_bytes, void* stream) {
    const int most = state_bytes == 1 ? MAX_INT8_ROWS : MAX_ROWS;
    if (p->rows > most || count_pieces(*e) > WARPS * PIECES_PER_WARP) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) return launch_few<Int8State, MAX_INT8_ROWS>(*p, *e, stream);
    return state_bytes == 2 ? launch_few<__half>(*p, *e, stream) : launch_few<float>(*p, *e, stream);
}
