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
constexpr int PIECE_OUTPUTS = 16, PIECE_INPUTS = 64;
constexpr int QUARTER = HEAD / 4;  // value rows of a warp

// Mirrored in cuda_library.py.
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

    __device__ __forceinline__ Piece(const LowExits& e, int number, int rows, int heads, int head) {
        const int width = heads * HEAD, depth = e.rank / PIECE_INPUTS, of_map = HEAD / PIECE_OUTPUTS * depth;
        if (number < e.groups * of_map) {
            const int map = number / of_map, output = head * HEAD + number % of_map / depth * PIECE_OUTPUTS;
            const int input = number % depth * PIECE_INPUTS;
            rank = e.rank, x = e.low + static_cast<int64_t>(map) * rows * rank + input;
            weight = e.low_out + (static_cast<int64_t>(map) * width + output) * rank + input;
        } else {
            const int rest = number - e.groups * of_map, deep = e.gate_rank / PIECE_INPUTS;
            const int output = head * HEAD + rest / deep * PIECE_OUTPUTS, input = rest % deep * PIECE_INPUTS;
            rank = e.gate_rank, x = e.gate + input;
            weight = e.gate_out + static_cast<int64_t>(output) * rank + input;
        }
    }
};

__host__ __device__ inline int count_pieces(const LowExits& e) {
    return HEAD / PIECE_OUTPUTS * (e.groups * e.rank + e.gate_rank) / PIECE_INPUTS;
}

template <typename State, int ROWS>
struct Shared {
    float sums[WARPS * CHUNKS][ROWS][PIECE_OUTPUTS];
    float vectors[ROWS][VECS][HEAD];
    float y[ROWS][HEAD];
    float inv_square[ROWS];
};

template <int ROWS>
struct Shared<CodedState, ROWS> {
    float sums[WARPS * CHUNKS][ROWS][PIECE_OUTPUTS];
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
__global__ void __launch_bounds__(32 * WARPS, 1) wkv_few_kernel(const WkvArgs p, const LowExits e) {
    constexpr bool CODED = std::is_same_v<State, CodedState>;
    __shared__ __align__(16) Shared<State, ROWS> sh;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int pair = lane * 2, q = lane & 7, octet = lane >> 3, head = blockIdx.x, rows = p.rows;
    const bool residual = p.v_first != nullptr;
    const int pieces = count_pieces(e);

    uint4 weights[CHUNKS][2][2];  // [rows g, g + 8][inputs 8t, 32 + 8t ..]
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        const Piece piece(e, number, rows, p.heads, head);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const __half* at = piece.weight + static_cast<int64_t>(g + 8 * up) * piece.rank + 8 * t;
            weights[i][up][0] = __ldg(reinterpret_cast<const uint4*>(at));
            weights[i][up][1] = __ldg(reinterpret_cast<const uint4*>(at + 32));
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
    RawRows<std::conditional_t<CODED, __half, State>, 4> raw;
    if constexpr (CODED) {
        if (warp < rows) {
            const uint4* const from = pieces_of(p.read_slots[warp]);
            for (int i = lane; i < STATE_PIECES; i += 32)
                __pipeline_memcpy_async(reinterpret_cast<uint4*>(&sh.states[warp]) + i, from + i, sizeof(uint4));
        }
    } else if (warp < 4 * rows) {
        raw.load(state_of(p.read_slots[warp / 4], warp), q);
    }
    const int channel = head * HEAD + pair;
    const HeadParams params(p, channel);
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
    uint4 x[CHUNKS][2];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int number = warp + i * WARPS;
        x[i][0] = x[i][1] = make_uint4(0, 0, 0, 0);
        if (number >= pieces || g >= rows) continue;
        const Piece piece(e, number, rows, p.heads, head);
        const uint4* from = reinterpret_cast<const uint4*>(piece.x + static_cast<int64_t>(g) * piece.rank + 8 * t);
        x[i][0] = __ldg(from), x[i][1] = __ldg(from + 4);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int number = warp + i * WARPS;
        if (number >= pieces) break;
        float sums[4] = {};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const uint4 &lo = weights[i][0][part], &hi = weights[i][1][part];
            mma(sums, Fragment{{lo.x, hi.x, lo.y, hi.y}}, x[i][part].x, x[i][part].y);
            mma(sums, Fragment{{lo.z, hi.z, lo.w, hi.w}}, x[i][part].z, x[i][part].w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 2 * t + (j & 1);
            if (row < min(rows, ROWS)) sh.sums[number][row][g + (j >> 1) * 8] = sums[j];
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
        for (int item = warp; item < 4 * rows; item += WARPS) {
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
            wkv_step<State, 4>(raw, state_of(p.write_slots[row], item), v, &vectors[VV][first], q, &sh.y[row][first]);
        }
        __syncthreads();
        if (warp >= rows) return;
        y = *reinterpret_cast<const float2*>(&sh.y[warp][pair]);
        v = *reinterpret_cast<const float2*>(&sh.vectors[warp][VV][pair]);
    }
    const auto two = [&](const float* x) { return *reinterpret_cast<const float2*>(x + channel); };
    const float2 out =
        wkv_epilogue(y, scalars.bonus, v, __half22float2(gate), two(p.ln_weight), two(p.ln_bias));
    *reinterpret_cast<__half2*>(p.y + at) = __floats2half2_rn(out.x, out.y);
}

template <typename State, int MOST = MAX_ROWS>
static int launch_few(const WkvArgs& p, const LowExits& e, void* stream) {
    const auto kernel = p.rows == 1 ? wkv_few_kernel<State, 1> : wkv_few_kernel<State, MOST>;
    launch(kernel, dim3(p.heads), 32 * WARPS, stream, p, e);
    return launch_result();
}

// Rows of one token, at most 8, of states of 8 bits at most 4; w, a, g and v_gate of `p` are not read. Refuses ranks that
// the warps' registers do not hold. state_bytes: of an element, 1 for codes with their scales.
RWKV_API int rwkv_wkv_few(const WkvArgs* p, const LowExits* e, int state_bytes, void* stream) {
    const int most = state_bytes == 1 ? MAX_CODED_ROWS : MAX_ROWS;
    if (p->rows > most || count_pieces(*e) > WARPS * CHUNKS) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) return launch_few<CodedState, MAX_CODED_ROWS>(*p, *e, stream);
    return state_bytes == 2 ? launch_few<__half>(*p, *e, stream) : launch_few<float>(*p, *e, stream);
}
