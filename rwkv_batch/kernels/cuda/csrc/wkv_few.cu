// WKV of up to 8 rows of one token with the low ranks' exits before it, in one launch: a block per head multiplies its 64
// channels of them, then makes a step of that head of every row.
//
//   low [G, rows, D] times low_out [G, C, D] -> (v's gate,) w, a;  gate [rows, Dg] times gate_out [C, Dg] -> g
//
// G is 3, or 2 in layer 0, D and Dg multiples of 64. A warp takes up to CHUNKS pieces of 16 outputs and 64 inputs, on the
// tensor cores (m16n8k16: 8 rows at once); pieces of one output are added up in order. Then four warps share a head of a
// row, 16 value rows each; of states of 8 bits, up to 4 rows, one has it whole.
//
// Bytes: a block's share of the exits (2 * 64 * (G * D + Dg), 112 KiB at 7.2B) and the states; both are on their way
// into registers while the kernel before still runs, states of more than 4 rows after it.
#include <cuda_pipeline.h>

#include "wkv_codes.cuh"

constexpr int WARPS = 16, CHUNKS = 4, MAX_ROWS = 8, MAX_CODED_ROWS = 4;
constexpr int PIECE_OUTPUTS = 16, PIECE_INPUTS = 64, PIECE_BYTES = 2 * PIECE_OUTPUTS * PIECE_INPUTS;
constexpr int QUARTER = HEAD / 4;  // value rows of a warp

// Mirrored in cuda/library.py.
struct LowExits {
    const __half* low;
    const __half* gate;
    const __half* low_out;
    const __half* gate_out;
    int groups, rank, gate_rank;
};

// 16 outputs of one map by 64 of its inputs.
struct Piece {
    const __half* x;  // of row 0, its first input
    int rank;         // between rows of x and of the map
    const __half* weight;
    int first_input;  // of all maps' one behind the other

    __device__ __forceinline__ Piece(const LowExits& e, int number, int rows, int heads, int head) {
        const int width = heads * HEAD, depth = e.rank / PIECE_INPUTS, of_map = HEAD / PIECE_OUTPUTS * depth;
        if (number < e.groups * of_map) {
            const int map = number / of_map, output = head * HEAD + number % of_map / depth * PIECE_OUTPUTS;
            const int input = number % depth * PIECE_INPUTS;
            rank = e.rank, x = e.low + static_cast<int64_t>(map) * rows * rank + input, first_input = map * rank + input;
            weight = e.low_out + (static_cast<int64_t>(map) * width + output) * rank + input;
        } else {
            const int rest = number - e.groups * of_map, deep = e.gate_rank / PIECE_INPUTS;
            const int output = head * HEAD + rest / deep * PIECE_OUTPUTS, input = rest % deep * PIECE_INPUTS;
            rank = e.gate_rank, x = e.gate + input, first_input = e.groups * e.rank + input;
            weight = e.gate_out + static_cast<int64_t>(output) * rank + input;
        }
    }
};

__host__ __device__ inline int count_pieces(const LowExits& e) {
    return HEAD / PIECE_OUTPUTS * (e.groups * e.rank + e.gate_rank) / PIECE_INPUTS;
}

// Whether blocks of the products before and behind (wide_row.cu) stand beside this kernel's: of one row it takes at most 48
// registers a thread, and keeps KEPT_PIECES of a warp's weights there, the others in shared memory, each lane its own.
template <typename State, int ROWS>
constexpr bool STANDS_BESIDE = ROWS == 1 && !std::is_same_v<State, CodedState>;
constexpr int KEPT_PIECES = 2;

constexpr int CONSTANTS = 8;  // of a head's channels: w0, a0, v0, k_k, k_a, r_k and the norm's

template <typename State, int ROWS>
struct Shared {
    float sums[WARPS * CHUNKS][ROWS][PIECE_OUTPUTS];
    uint4 x[ROWS == 1 ? WARPS * CHUNKS * 2 : 1];  // of one row, of all maps
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD];
    float vectors[ROWS][VECS][HEAD];
    float y[ROWS][HEAD];
    float inv_square[ROWS];
};

template <int ROWS>
struct Shared<CodedState, ROWS> {
    float sums[WARPS * CHUNKS][ROWS][PIECE_OUTPUTS];
    uint4 x[ROWS == 1 ? WARPS * CHUNKS * 2 : 1];  // of one row, of all maps
    float constants[ROWS == 1 ? CONSTANTS : 1][HEAD];
    CodedState states[ROWS];
    CodedVectors vectors[ROWS];
};

// Two channels of an exit: pieces first, first + 1 .. of the 16 outputs that they are of, summed in order.
template <typename State, int ROWS>
__device__ __forceinline__ __half2 add_pieces(const Shared<State, ROWS>& sh, int first, int depth, int row, int pair) {
    float2 sum = make_float2(0.0f, 0.0f);
    first += pair / PIECE_OUTPUTS * depth;
    for (int i = 0; i < depth; ++i) {
        const float2 part = *reinterpret_cast<const float2*>(&sh.sums[first + i][row][pair % PIECE_OUTPUTS]);
        sum.x += part.x, sum.y += part.y;
    }
    return __floats2half2_rn(sum.x, sum.y);
}

template <typename State, int ROWS>
__global__ void __launch_bounds__(STANDS_BESIDE<State, ROWS> ? 640 : 32 * WARPS, STANDS_BESIDE<State, ROWS> ? 2 : 1)
wkv_few_kernel(const WkvArgs p, const LowExits e) {
    constexpr bool CODED = std::is_same_v<State, CodedState>;
    __shared__ __align__(16) Shared<State, ROWS> sh;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int pair = lane * 2, q = lane & 7, octet = lane >> 3, head = blockIdx.x, rows = p.rows;
    const bool residual = p.v_first != nullptr;
    const int pieces = count_pieces(e);

    constexpr int KEPT = ROWS == 1 ? KEPT_PIECES : CHUNKS;
    extern __shared__ __align__(16) unsigned char dynamic[];
    uint4* const beside = reinterpret_cast<uint4*>(dynamic) + warp * 128 + lane;
    uint4 weights[KEPT][2][2];  // [rows g, g + 8][inputs 8t, 32 + 8t ..]
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        const Piece piece(e, number, rows, p.heads, head);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const __half* at = piece.weight + static_cast<int64_t>(g + 8 * up) * piece.rank + 8 * t;
            if (i < KEPT) {
                weights[i][up][0] = __ldg(reinterpret_cast<const uint4*>(at));
                weights[i][up][1] = __ldg(reinterpret_cast<const uint4*>(at + 32));
            } else {
                uint4* const to = beside + (i - KEPT) * WARPS * 128 + up * 64;
                __pipeline_memcpy_async(to, at, sizeof(uint4));
                __pipeline_memcpy_async(to + 32, at + 32, sizeof(uint4));
            }
        }
    }
    const int64_t head_at = static_cast<int64_t>(head) * HEAD * HEAD;
    const auto state_of = [&](int64_t slot, int item) {
        const int first = item % 4 * QUARTER + octet;
        return static_cast<State*>(p.state) + slot * p.slot_stride + head_at + first * HEAD;
    };
    const auto pieces_of = [&](int64_t slot) {
        auto* const first = static_cast<unsigned char*>(p.state) + slot * p.slot_stride + head * sizeof(CodedState);
        return reinterpret_cast<uint4*>(first);
    };
    constexpr int STATE_PIECES = sizeof(CodedState) / sizeof(uint4);
    // A lane's keys of value rows: of one row of tokens, one.
    RawRows<std::conditional_t<CODED, __half, State>, ROWS == 1 ? 1 : 4> raw;
    const int64_t own_at = head_at + (warp * 4 + octet) * HEAD;
    if constexpr (CODED) {
        if (warp < rows) {
            const uint4* const from = pieces_of(p.read_slots[warp]);
            for (int i = lane; i < STATE_PIECES; i += 32)
                __pipeline_memcpy_async(reinterpret_cast<uint4*>(&sh.states[warp]) + i, from + i, sizeof(uint4));
        }
    } else if constexpr (ROWS == 1) {
        raw.load(static_cast<State*>(p.state) + p.read_slots[0] * p.slot_stride + own_at, q);
    } else if (warp < 4 * rows) {
        raw.load(state_of(p.read_slots[warp / 4], warp), q);
    }
    const int channel = head * HEAD + pair;
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
            if (of != nullptr) __pipeline_memcpy_async(&sh.constants[i][pair], of + channel, sizeof(float2));
        }
    } else {
        params = HeadParams(p, channel);
    }
    let_next_start();
    wait_for_inputs();

    // A warp each makes a row's vectors; what comes from memory is asked for before the exits are multiplied.
    const int64_t at = (static_cast<int64_t>(warp) * p.heads + head) * HEAD + pair;
    Inputs in;
    if (warp < rows) {
        const auto get = [&](const __half* x) { return *reinterpret_cast<const __half2*>(x + at); };
        in.r = get(p.r), in.k = get(p.k), in.v = get(p.v);
        in.gate = in.first = __floats2half2_rn(0.0f, 0.0f);
        if (residual) in.first = get(p.v_first);
    }
    uint4 x[ROWS == 1 ? 1 : CHUNKS][2];
    if constexpr (ROWS == 1) {
        const int of_low = e.groups * e.rank, c = 8 * threadIdx.x;
        if (c < of_low + e.gate_rank) sh.x[threadIdx.x] = __ldg(reinterpret_cast<const uint4*>(c < of_low ? e.low + c : e.gate + (c - of_low)));
        __pipeline_wait_prior(0);
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
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
            if (row < min(rows, ROWS)) sh.sums[number][row][g + (j >> 1) * 8] = sums[j];
        }
    };
    const auto multiply_row = [&](int number, const uint4 (&lo)[2], const uint4 (&hi)[2]) {
        const uint4* const from = &sh.x[Piece(e, number, rows, p.heads, head).first_input / 8 + t];
        const uint4 none = make_uint4(0, 0, 0, 0), x[2] = {g == 0 ? from[0] : none, g == 0 ? from[4] : none};
        multiply(number, lo, hi, x);
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        if constexpr (ROWS == 1) multiply_row(number, weights[i][0], weights[i][1]);
        else multiply(number, weights[i][0], weights[i][1], x[i]);
    }
    if constexpr (ROWS == 1) {
#pragma unroll 1
        for (int number = warp + KEPT * WARPS, i = 0; number < pieces; number += WARPS, ++i) {
            const uint4* const kept = beside + i * WARPS * 128;
            const uint4 lo[2] = {kept[0], kept[32]}, hi[2] = {kept[64], kept[96]};
            multiply_row(number, lo, hi);
        }
    }
    __syncthreads();

    __half2 gate;
    std::conditional_t<CODED, CodedScalars, Scalars> scalars;
    float2 y, v;
    if (warp < rows) {
        const int depth = e.rank / PIECE_INPUTS, of_map = HEAD / PIECE_OUTPUTS * depth;
        const auto exit_of = [&](int map) { return add_pieces(sh, map * of_map, depth, warp, pair); };
        if (residual) in.gate = exit_of(0);
        in.w = exit_of(e.groups - 2), in.a = exit_of(e.groups - 1);
        gate = add_pieces(sh, e.groups * of_map, e.gate_rank / PIECE_INPUTS, warp, pair);
        if constexpr (ROWS == 1) {
            const auto constant = [&](int i) { return *reinterpret_cast<const float2*>(&sh.constants[i][pair]); };
            params.w0 = constant(0), params.a0 = constant(1), params.k_k = constant(3), params.k_a = constant(4), params.r_k = constant(5);
            params.v0 = residual ? constant(2) : make_float2(0.0f, 0.0f);
        }
        scalars = prologue(params, in, residual, sh.vectors[warp], pair);
    }
    if constexpr (CODED) {
        if (warp >= rows) return;
        CodedState& state = sh.states[warp];
        __pipeline_wait_prior(0);
        __syncwarp();
        y = coded_step(state, sh.vectors[warp], scalars, lane), v = scalars.v;
        uint4* const to = pieces_of(p.write_slots[warp]);
        for (int i = lane; i < STATE_PIECES; i += 32) to[i] = reinterpret_cast<const uint4*>(&state)[i];
    } else {
        if (warp < rows && lane == 0) sh.inv_square[warp] = scalars.inv_square;
        __syncthreads();
        if constexpr (ROWS == 1) {
            const auto& vectors = sh.vectors[0];
            float s[KEYS], of[KEYS];
            raw.rows[0].unpack(s);
            read_keys<State>(vectors[VKK], q, of);
            const float factor = -sh.inv_square[0], value = vectors[VV][warp * 4 + octet];
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
            for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL, sum, offset);
            if (q == 0) sh.y[0][warp * 4 + octet] = sum;
        }
        for (int item = warp; ROWS > 1 && item < 4 * rows; item += WARPS) {
            const int row = item / 4, first = item % 4 * QUARTER + octet;
            if (item != warp) raw.load(state_of(p.read_slots[row], item), q);
            const auto& vectors = sh.vectors[row];
            KeyVectors v;
            read_keys<State>(vectors[VKK], q, v.kk);
            read_keys<State>(vectors[VDECAY], q, v.decay);
            read_keys<State>(vectors[VKKA], q, v.kka);
            read_keys<State>(vectors[VK], q, v.k);
            read_keys<State>(vectors[VR], q, v.r);
#pragma unroll
            for (int j = 0; j < KEYS; ++j) v.kk[j] *= -sh.inv_square[row];
            if constexpr (ROWS > 1) wkv_step<State, 4>(raw, state_of(p.write_slots[row], item), v, &vectors[VV][first], q, &sh.y[row][first]);
        }
        __syncthreads();
        if (warp >= rows) return;
        y = *reinterpret_cast<const float2*>(&sh.y[warp][pair]);
        v = *reinterpret_cast<const float2*>(&sh.vectors[warp][VV][pair]);
    }
    const auto two = [&](const float* x, int i) {
        return *reinterpret_cast<const float2*>(ROWS == 1 ? &sh.constants[i][pair] : x + channel);
    };
    const float2 out =
        wkv_epilogue(y, scalars.bonus, v, __half22float2(gate), two(p.ln_weight, 6), two(p.ln_bias, 7));
    *reinterpret_cast<__half2*>(p.y + at) = __floats2half2_rn(out.x, out.y);
}

template <typename State, int ROWS>
static int launch_rows(const WkvArgs& p, const LowExits& e, void* stream) {
    const auto kernel = wkv_few_kernel<State, ROWS>;
    const int beside = ROWS == 1 ? max(0, count_pieces(e) - KEPT_PIECES * WARPS) * PIECE_BYTES : 0;
    static bool raised[MAX_DEVICES] = {};
    if (ROWS == 1 && !raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (CHUNKS - KEPT_PIECES) * WARPS * PIECE_BYTES);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_split(kernel, dim3(p.heads), 32 * WARPS, beside, ROWS == 1 ? 100 : -1, stream, p, e);
    return launch_result();
}

template <typename State, int MOST = MAX_ROWS>
static int launch_few(const WkvArgs& p, const LowExits& e, void* stream) {
    return p.rows == 1 ? launch_rows<State, 1>(p, e, stream) : launch_rows<State, MOST>(p, e, stream);
}

// Rows of one token, at most 8, of states of 8 bits at most 4; w, a, g and v_gate of `p` are not read. Refuses ranks that
// the warps' registers do not hold. state_bytes: of an element, 1 for codes with their scales.
RWKV_API int rwkv_wkv_few(const WkvArgs* p, const LowExits* e, int state_bytes, void* stream) {
    const int most = state_bytes == 1 ? MAX_CODED_ROWS : MAX_ROWS;
    if (p->rows > most || count_pieces(*e) > WARPS * CHUNKS) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) return launch_few<CodedState, MAX_CODED_ROWS>(*p, *e, stream);
    return state_bytes == 2 ? launch_few<__half>(*p, *e, stream) : launch_few<float>(*p, *e, stream);
}
