// WKV with its prologue and epilogue for rows of one token: a block of 128 threads takes one head of several rows.
//
// Memory bound: per (head, row) it reads and writes 64x64 of state (8 KiB each in fp16, 16 in fp32) and touches
// 9 x 128 bytes of activations. So the state of the next row is on its way (in registers) while a row is computed;
// warp 0 prepares the vectors of a row, warp 1 finishes the row before, all four warps do the recurrence in between:
// one barrier per row. Shared memory: vectors [3][6][64] fp32, y [2][64] fp32.
#include "wkv.cuh"

constexpr int THREADS = 128;
template <typename State>
constexpr int BLOCKS_PER_PROCESSOR = sizeof(State) == 2 ? 5 : 4;
enum Vec { VR, VDECAY, VKK, VKKA, VK, VV, VECS };

struct Shared {
    float vectors[3][VECS][HEAD];
    float y[2][HEAD];
    float inv_square[3], bonus[3];
};

// One row's activations of a head, 2 channels a lane.
struct Inputs {
    __half2 r, w, k, v, a, gate, first;

    __device__ __forceinline__ void load(const WkvArgs& p, int64_t at) {
        const auto get = [&](const __half* x) { return *reinterpret_cast<const __half2*>(x + at); };
        r = get(p.r), w = get(p.w), k = get(p.k), v = get(p.v), a = get(p.a);
        gate = first = __floats2half2_rn(0.0f, 0.0f);
        if (p.v_first != nullptr) gate = get(p.v_gate), first = get(p.v_first);
    }
};

// The constants come out of L1 for every row: there are no registers to spare for them.
__device__ __forceinline__ void prologue(const WkvArgs& p, const Inputs& in, Shared& sh, int slot, int pair, int channel) {
    const HeadParams h(p, channel);
    const bool residual = p.v_first != nullptr;
    const float2 r = __half22float2(in.r), w = __half22float2(in.w), k = __half22float2(in.k), v = __half22float2(in.v);
    const float2 a = __half22float2(in.a), gate = __half22float2(in.gate), first = __half22float2(in.first);
    const StepVectors x = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x,
                                       h.k_k.x, h.k_a.x, h.r_k.x);
    const StepVectors z = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y,
                                       h.k_k.y, h.k_a.y, h.r_k.y);
    const auto put = [&](int vec, float lo, float hi) {
        *reinterpret_cast<float2*>(&sh.vectors[slot][vec][pair]) = make_float2(lo, hi);
    };
    put(VR, x.r, z.r), put(VDECAY, x.decay, z.decay), put(VKK, x.kk, z.kk);
    put(VKKA, x.kka, z.kka), put(VK, x.k, z.k), put(VV, x.v, z.v);
    const float squares = warp_sum(x.kk * x.kk + z.kk * z.kk), bonus = warp_sum(x.bonus + z.bonus);
    if (pair == 0) sh.inv_square[slot] = inverse_square(squares), sh.bonus[slot] = bonus;
}

template <typename State>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR<State>) wkv_decode_kernel(const WkvArgs p, int rows_per_block) {
    __shared__ __align__(16) Shared sh;
    const int head = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, pair = (tid & 31) * 2;
    const int q = tid & 3, first_row = tid >> 2, channel = head * HEAD + pair;
    const int begin = blockIdx.y * rows_per_block, end = min(begin + rows_per_block, p.rows);
    State* const states = static_cast<State*>(p.state) + static_cast<int64_t>(head) * HEAD * HEAD + first_row * HEAD;
    const int64_t stride = static_cast<int64_t>(p.heads) * HEAD;
    RawKeys<State> low, high;
    // The slot's number of one row further ahead: a load that waits for it would hold up the warp.
    int64_t next_slot = p.read_slots[begin];
    const auto fetch_state = [&](int row) {
        const State* in = states + next_slot * p.slot_stride;
        if (row + 1 < end) next_slot = p.read_slots[row + 1];
        low.load(in, q);
        high.load(in + 32 * HEAD, q);
    };
    fetch_state(begin);
    let_next_start();
    wait_for_inputs();
    Inputs in;
    __half2 gate;
    const auto fetch_inputs = [&](int row) {
        if (warp == 0) in.load(p, row * stride + channel);
    };
    const auto finish = [&](int row, int slot, int turn) {
        const float2 weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
        const float2 bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
        const float2 out = wkv_epilogue(
            *reinterpret_cast<const float2*>(&sh.y[turn][pair]), sh.bonus[slot],
            *reinterpret_cast<const float2*>(&sh.vectors[slot][VV][pair]), __half22float2(gate), weight, bias);
        *reinterpret_cast<__half2*>(p.y + row * stride + channel) = __floats2half2_rn(out.x, out.y);
    };
    fetch_inputs(begin);
    int slot = 0;
    for (int row = begin; row < end; ++row) {
        const int turn = (row - begin) & 1;
        float s[2][16];
        low.unpack(s[0]);
        high.unpack(s[1]);
        State* const out = states + p.write_slots[row] * p.slot_stride;
        if (warp == 0) prologue(p, in, sh, slot, pair, channel);
        if (row + 1 < end) {
            fetch_state(row + 1);
            fetch_inputs(row + 1);
        }
        __syncthreads();
        if (warp == 1) {
            if (row > begin) finish(row - 1, slot == 0 ? 2 : slot - 1, turn ^ 1);
            gate = *reinterpret_cast<const __half2*>(p.g + row * stride + channel);
        }
        const float(&v)[VECS][HEAD] = sh.vectors[slot];
        const TokenVectors t{v[VR], v[VDECAY], v[VKK], v[VKKA], v[VK], v[VV]};
        wkv_step<State, 2>(s, t, sh.inv_square[slot], q, first_row, 32, sh.y[turn]);
        store_keys(out, q, s[0]);
        store_keys(out + 32 * HEAD, q, s[1]);
        slot = slot == 2 ? 0 : slot + 1;
    }
    __syncthreads();
    if (warp == 1) finish(end - 1, slot == 0 ? 2 : slot - 1, (end - 1 - begin) & 1);
}

// As many blocks as fit at once, each with its share of the rows.
template <typename State>
void run(const WkvArgs& p, void* stream) {
    const int places = max(1, this_machine().processors * BLOCKS_PER_PROCESSOR<State> / p.heads);
    const int rows_per_block = (p.rows + places - 1) / places;
    const dim3 grid(p.heads, (p.rows + rows_per_block - 1) / rows_per_block);
    launch(wkv_decode_kernel<State>, grid, THREADS, stream, p, rows_per_block);
}

RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    if (state_bytes == 2) {
        run<__half>(*p, stream);
    } else {
        run<float>(*p, stream);
    }
    return launch_result();
}
