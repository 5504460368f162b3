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
// GEMM: a warp has 16 outputs of one projection (mma.m16n8k16, 8 rows at once), in two sums. IN_ORDER: in one sum of
// blocks of 16 inputs, as wgmma does, so that gemm.cuh gives the same bits. WKV: four warps per head and row, 16 value rows each; int8:
// one warp, or four for one row.
// Prologue: weights and states load before the previous kernel ends (states of more than 4 rows after it).
//
// Grid: one CTA per head. It multiplies the head's 64 channels, then steps that head of every row.
// Block: 512 threads.
// Shared memory: 54 KB with one row, else 88 KB (int8 states: 80 KB): weights beyond REGISTER_PIECES (48 KB), inputs,
// sums and vectors.
// Bound: memory; per CTA 2 * 64 * (G * D + Dg) bytes of weights (112 KB at 7.2B) and its states. Share of 4.8 TB/s
// (H200, 64 heads, fp16): 1 row 19 %, 4 rows 25 %, without the overlap of its prologue: the latency of one load and of
// the sums between the two parts, 9.5 us.
// Made for: 1 to 8 rows (int8 states: 4), D % 64 == 0, Dg % 64 == 0.
#include <cuda_pipeline.h>

#include "wkv_int8.cuh"

constexpr int WARPS = 16, MAX_PIECES = 64, MAX_SMEM_PIECES = 28, MAX_ROWS = 8, MAX_INT8_ROWS = 4;  // pieces: fit 99 KB of shared memory
constexpr int PIECE_OUTPUTS = 16, PIECE_INPUTS = 64, PIECE_BYTES = 2 * PIECE_OUTPUTS * PIECE_INPUTS, BLOCK = 16, BLOCKS = PIECE_INPUTS / BLOCK;
constexpr int WARPS_PER_PROJECTION = HEAD_SIZE / PIECE_OUTPUTS, MAX_INPUTS = MAX_PIECES / WARPS_PER_PROJECTION * PIECE_INPUTS;
constexpr int QUARTER = HEAD_SIZE / 4;  // value rows per warp

// Mirrored in cuda/library.py.
struct LowRankUpArgs {
    const __half* hidden;
    const __half* gate_hidden;
    const __half* up_weight;
    const __half* gate_up_weight;
    int groups, rank, gate_rank;
    int in_order;
};

__host__ __device__ inline int max_zero(int x) { return x > 0 ? x : 0; }
// Pieces of 64 inputs: of all warps, of a low rank's warp, of a gate's warp.
__host__ __device__ inline int count_pieces(const LowRankUpArgs& e) {
    return WARPS_PER_PROJECTION * (e.groups * e.rank + e.gate_rank) / PIECE_INPUTS;
}

// With one row this kernel takes at most 56 registers per thread, so that CTAs of hopper_row.cu fit on the same SM; with
// int8 states 72, so that those with 40 registers fit, as of the next launch.
template <typename State, int ROWS>
constexpr int REGISTER_BOUND = ROWS > 1 ? 32 * WARPS : std::is_same_v<State, Int8State> ? 896 : 576;
// A warp keeps these weight pieces in registers and the others in shared memory.
constexpr int REGISTER_PIECES = 2;

// A warp's outputs: 16 of one projection. Warps beyond the projections have depth 0.
struct WarpOutputs {
    int depth;  // pieces
    int first_input;  // among all projections' inputs, concatenated
    int in_smem;  // first of its pieces in shared memory
    const __half* weight;  // of its first output
    int pitch;

    __device__ __forceinline__ WarpOutputs(const LowRankUpArgs& e, int heads, int head, int warp) {
        const int projection = warp / WARPS_PER_PROJECTION, output = head * HEAD_SIZE + warp % WARPS_PER_PROJECTION * PIECE_OUTPUTS;
        const bool is_gate = projection == e.groups;
        pitch = is_gate ? e.gate_rank : e.rank, depth = projection > e.groups ? 0 : pitch / PIECE_INPUTS;
        first_input = projection * e.rank;
        in_smem = min(warp, WARPS_PER_PROJECTION * e.groups) * max_zero(e.rank / PIECE_INPUTS - REGISTER_PIECES) +
                  (is_gate ? warp % WARPS_PER_PROJECTION * max_zero(depth - REGISTER_PIECES) : 0);
        const __half* const matrix = is_gate ? e.gate_up_weight : e.up_weight + static_cast<int64_t>(projection) * heads * HEAD_SIZE * pitch;
        weight = matrix + static_cast<int64_t>(output) * pitch;
    }
};
__host__ inline int smem_pieces(const LowRankUpArgs& e) {
    return WARPS_PER_PROJECTION * (e.groups * max_zero(e.rank / PIECE_INPUTS - REGISTER_PIECES) + max_zero(e.gate_rank / PIECE_INPUTS - REGISTER_PIECES));
}

constexpr int INPUT_PADDING = 16;  // so that 8 rows lie in different banks
constexpr int CONSTANTS = 8;  // vectors per head: w0, a0, v0, k_k, k_a, r_k, norm weight and bias

template <typename State, int ROWS>
struct Smem {
    __half x[ROWS][MAX_INPUTS + INPUT_PADDING];  // inputs of all projections
    float sums[WARPS][ROWS][PIECE_OUTPUTS];
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD_SIZE];
    float vectors[ROWS][VECS][HEAD_SIZE];
    float y[ROWS][HEAD_SIZE];
    float inv_square[ROWS];
};

template <int ROWS>
struct Smem<Int8State, ROWS> {
    __half x[ROWS][MAX_INPUTS + INPUT_PADDING];  // inputs of all projections
    float sums[WARPS][ROWS][PIECE_OUTPUTS];
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD_SIZE];
    Int8State states[ROWS];
    Int8Vectors vectors[ROWS];
    Int8Factors factors;  // with one row
};

template <typename State, int ROWS, bool IN_ORDER>
__global__ void __launch_bounds__(REGISTER_BOUND<State, ROWS>, REGISTER_BOUND<State, ROWS> == 576 ? 2 : 1)
wkv_few_kernel(const WkvArgs p, const LowRankUpArgs e) {
    constexpr bool IS_INT8 = std::is_same_v<State, Int8State>;
    __shared__ __align__(16) Smem<State, ROWS> smem;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int pair = lane * 2, q = lane & 7, octet = lane >> 3, head = blockIdx.x, rows = p.rows;
    const bool residual = p.v_first != nullptr;

    extern __shared__ __align__(16) unsigned char dynamic[];
    const WarpOutputs mine(e, p.heads, head, warp);
    uint2* const smem_weights = reinterpret_cast<uint2*>(dynamic) + mine.in_smem * (PIECE_BYTES / 8) + lane;
    uint2 weights[REGISTER_PIECES][2][BLOCKS];  // [outputs g, g + 8][inputs 4t .. of a block]
    const auto weight_at = [&](int piece, int up, int block) {
        return mine.weight + static_cast<int64_t>(g + 8 * up) * mine.pitch + piece * PIECE_INPUTS + block * BLOCK + 4 * t;
    };
#pragma unroll
    for (int i = 0; i < REGISTER_PIECES; ++i) {
        if (i >= mine.depth) break;
#pragma unroll
        for (int j = 0; j < 2 * BLOCKS; ++j) weights[i][j / BLOCKS][j % BLOCKS] = __ldg(reinterpret_cast<const uint2*>(weight_at(i, j / BLOCKS, j % BLOCKS)));
    }
    for (int i = REGISTER_PIECES; i < mine.depth; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * BLOCKS; ++j)
            __pipeline_memcpy_async(smem_weights + ((i - REGISTER_PIECES) * 2 * BLOCKS + j) * 32, weight_at(i, j / BLOCKS, j % BLOCKS), sizeof(uint2));
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
    __pipeline_commit();
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
    if (const int c = 8 * (threadIdx.x % (MAX_INPUTS / 8)), of_gate = c - e.groups * e.rank; of_gate < e.gate_rank) {
        const int projection = (c >= e.rank) + (c >= 2 * e.rank);
        for (int row = threadIdx.x / (MAX_INPUTS / 8); row < min(rows, ROWS); row += 32 * WARPS / (MAX_INPUTS / 8)) {
            const __half* const from = of_gate >= 0 ? e.gate_hidden + row * e.gate_rank + of_gate
                                                    : e.hidden + (projection * rows + row - projection) * e.rank + c;
            *reinterpret_cast<uint4*>(&smem.x[row][c]) = __ldg(reinterpret_cast<const uint4*>(from));
        }
    }
    __pipeline_wait_prior(0);
    __syncthreads();
    constexpr int CHAINS = IN_ORDER ? 1 : 2;  // each waits for its last product
    float sums[CHAINS][4] = {};
    const auto multiply = [&](int piece, int block, const uint2& low, const uint2& high) {
        uint2 x = make_uint2(0, 0);
        if (g < min(rows, ROWS)) x = *reinterpret_cast<const uint2*>(&smem.x[g][mine.first_input + piece * PIECE_INPUTS + block * BLOCK + 4 * t]);
        mma(sums[block % CHAINS], Fragment{{low.x, high.x, low.y, high.y}}, x.x, x.y);
    };
#pragma unroll
    for (int i = 0; i < REGISTER_PIECES; ++i) {
        if (i >= mine.depth) break;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply(i, block, weights[i][0][block], weights[i][1][block]);
    }
#pragma unroll 1
    for (int i = REGISTER_PIECES; i < mine.depth; ++i) {
        const uint2* const loaded = smem_weights + (i - REGISTER_PIECES) * 2 * BLOCKS * 32;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply(i, block, loaded[block * 32], loaded[(BLOCKS + block) * 32]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int row = 2 * t + (j & 1);
        float sum = sums[0][j];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) sum += sums[chain][j];
        if (row < min(rows, ROWS)) smem.sums[warp][row][g + (j >> 1) * 8] = sum;
    }
    __syncthreads();

    __half2 gate;
    std::conditional_t<IS_INT8, Int8Scalars, Scalars> scalars;
    float2 y, v;
    if (warp < rows) {
        const auto low_rank_output = [&](int projection) {
            const float* const of = &smem.sums[projection * WARPS_PER_PROJECTION + pair / PIECE_OUTPUTS][warp][pair % PIECE_OUTPUTS];
            return __floats2half2_rn(of[0], of[1]);
        };
        if (residual) in.gate = low_rank_output(0);
        in.w = low_rank_output(e.groups - 2), in.a = low_rank_output(e.groups - 1);
        gate = low_rank_output(e.groups);
        if constexpr (ROWS == 1) {
            const auto constant = [&](int i) { return *reinterpret_cast<const float2*>(&smem.constants[i][pair]); };
            params.w0 = constant(0), params.a0 = constant(1), params.k_k = constant(3), params.k_a = constant(4), params.r_k = constant(5);
            params.v0 = residual ? constant(2) : make_float2(0.0f, 0.0f);
        }
        scalars = prologue(params, in, residual, smem.vectors[warp], pair);
    }
    if constexpr (IS_INT8 && ROWS == 1) {
        Int8State& state = smem.states[0];
        float2 scale;
        if (warp == 0) {
            scale = begin_int8_step(state, smem.vectors[0], scalars, lane), v = scalars.v;
            if (lane == 0) smem.factors = scalars;
        }
        __syncthreads();
        // To memory: a warp reads the first rows' codes for its seed.
        if (warp < 4) int8_step_rows<1>(state, *reinterpret_cast<Int8State*>(pieces_of(p.write_slots[0])), smem.vectors[0], smem.factors, lane, warp);
        __syncthreads();
        if (warp > 0) return;
        y = end_int8_step(smem.vectors[0], scalars, scale, lane);
    } else if constexpr (IS_INT8) {
        if (warp >= rows) return;
        Int8State& state = smem.states[warp];
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

template <typename State, int ROWS, bool IN_ORDER>
static int launch_rows(const WkvArgs& p, const LowRankUpArgs& e, void* stream) {
    const auto kernel = wkv_few_kernel<State, ROWS, IN_ORDER>;
    const int smem_weights = smem_pieces(e) * PIECE_BYTES;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SMEM_PIECES * PIECE_BYTES);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(kernel, dim3(p.heads), 32 * WARPS, smem_weights, ROWS == 1 ? 100 : -1, stream, p, e);
    return launch_result();
}

template <typename State, int MOST = MAX_ROWS>
static int launch_few(const WkvArgs& p, const LowRankUpArgs& e, void* stream) {
    if (p.rows == 1) return e.in_order ? launch_rows<State, 1, true>(p, e, stream) : launch_rows<State, 1, false>(p, e, stream);
    return e.in_order ? launch_rows<State, MOST, true>(p, e, stream) : launch_rows<State, MOST, false>(p, e, stream);
}

// Rows of one token: at most 8, int8 4. Does not read w, a, g and v_gate of `p`. Returns an error for ranks that exceed
// the shared memory. state_bytes: per element; 1 for Int8State.
RWKV_API int rwkv_wkv_few(const WkvArgs* p, const LowRankUpArgs* e, int state_bytes, void* stream) {
    const int most = state_bytes == 1 ? MAX_INT8_ROWS : MAX_ROWS;
    if (p->rows > most || count_pieces(*e) > MAX_PIECES || smem_pieces(*e) > MAX_SMEM_PIECES) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) return launch_few<Int8State, MAX_INT8_ROWS>(*p, *e, stream);
    return state_bytes == 2 ? launch_few<__half>(*p, *e, stream) : launch_few<float>(*p, *e, stream);
}
