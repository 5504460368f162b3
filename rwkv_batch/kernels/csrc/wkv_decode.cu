// WKV with its prologue and epilogue for rows of one token. A group of 128 threads takes one head of every n-th row.
//
// Memory bound: per (head, row) it reads and writes 64x64 of state (8 KiB each in fp16, 16 in fp32) and touches 9 x 128
// bytes of activations. So the states of the next STAGES rows are on their way into a ring in shared memory (each thread
// copies and reads its own pieces, no barrier) while a row is computed; warp 0 prepares the vectors of a row, warp 1
// finishes the row before, all four warps do the recurrence in between: one barrier of the group per row. All groups
// together sweep over a few neighbouring rows at a time, as the states lie in memory. A block holds as many groups as
// fill a processor.
//
// Shared memory per group: ring [2][4][128] x 16 bytes (fp16; fp32: [1][8][128]), vectors [3][6][64] fp32, y [2][64].
#include <cuda_pipeline.h>

#include "wkv.cuh"

constexpr int THREADS = 128;  // of a group
template <typename State>
constexpr int STAGES = sizeof(State) == 2 ? 2 : 1;
template <typename State>
constexpr int GROUPS = sizeof(State) == 2 ? 5 : 4;
enum Vec { VR, VDECAY, VKK, VKKA, VK, VV, VECS };

template <typename State>
struct Shared {
    uint4 ring[STAGES<State>][ROWS * Keys<State>::PIECES][THREADS];
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
template <typename State>
__device__ __forceinline__ void prologue(const WkvArgs& p, const Inputs& in, Shared<State>& sh, int slot, int pair, int channel) {
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
__global__ void __launch_bounds__(THREADS * GROUPS<State>, 1) wkv_decode_kernel(const WkvArgs p, int rows_per_sweep) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    const int group = threadIdx.x / THREADS, tid = threadIdx.x % THREADS, warp = tid >> 5, pair = (tid & 31) * 2;
    Shared<State>& sh = reinterpret_cast<Shared<State>*>(dynamic)[group];
    const int q = tid & 7, first_row = tid >> 3, me = blockIdx.x * (blockDim.x / THREADS) + group;
    const int head = me % p.heads, begin = me / p.heads;
    if (begin >= min(rows_per_sweep, p.rows)) return;
    State* const states = static_cast<State*>(p.state) + head * (HEAD * HEAD) + first_row * HEAD;
    const int64_t width = static_cast<int64_t>(p.heads) * HEAD;
    const int channel = head * HEAD + pair;
    using K = Keys<State>;

    int ahead = begin;
    int64_t ahead_slot = p.read_slots[begin];  // known one row early: a load that waits for it would hold up the warp
    const auto fetch = [&](int stage) {
        if (ahead < p.rows) {
            const State* in = states + ahead_slot * p.slot_stride;
#pragma unroll
            for (int i = 0; i < ROWS * K::PIECES; ++i) {
                const State* at = in + (i / K::PIECES) * ROW_STEP * HEAD + K::at(q, i % K::PIECES);
                __pipeline_memcpy_async(&sh.ring[stage][i][tid], at, 16);
            }
            ahead += rows_per_sweep;
            if (ahead < p.rows) ahead_slot = p.read_slots[ahead];
        }
        __pipeline_commit();
    };
    for (int stage = 0; stage < STAGES<State>; ++stage) fetch(stage);
    let_next_start();
    wait_for_inputs();
    Inputs in;
    __half2 gate;
    if (warp == 0) in.load(p, begin * width + channel);
    const auto finish = [&](int row, int slot, int turn) {
        const float2 weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
        const float2 bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
        const float2 out = wkv_epilogue(
            *reinterpret_cast<const float2*>(&sh.y[turn][pair]), sh.bonus[slot],
            *reinterpret_cast<const float2*>(&sh.vectors[slot][VV][pair]), __half22float2(gate), weight, bias);
        *reinterpret_cast<__half2*>(p.y + row * width + channel) = __floats2half2_rn(out.x, out.y);
    };
    const auto barrier = [&] { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); };
    int row = begin, slot = 0, turn = 0, stage = 0;
    for (; row < p.rows; row += rows_per_sweep) {
        __pipeline_wait_prior(STAGES<State> - 1);
        float s[ROWS][KEYS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            RawKeys<State> raw;
#pragma unroll
            for (int i = 0; i < K::PIECES; ++i) raw.pieces[i] = sh.ring[stage][m * K::PIECES + i][tid];
            raw.unpack(s[m]);
        }
        fetch(stage);
        stage = stage + 1 == STAGES<State> ? 0 : stage + 1;
        State* const out = states + p.write_slots[row] * p.slot_stride;
        if (warp == 0) {
            prologue(p, in, sh, slot, pair, channel);
            if (row + rows_per_sweep < p.rows) in.load(p, (row + rows_per_sweep) * width + channel);
        }
        barrier();
        if (warp == 1) {
            if (row > begin) finish(row - rows_per_sweep, slot == 0 ? 2 : slot - 1, turn ^ 1);
            gate = *reinterpret_cast<const __half2*>(p.g + row * width + channel);
        }
        const float(&v)[VECS][HEAD] = sh.vectors[slot];
        const TokenVectors t{v[VR], v[VDECAY], v[VKK], v[VKKA], v[VK], v[VV]};
        wkv_step<State>(s, t, sh.inv_square[slot], q, first_row, sh.y[turn]);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) store_keys(out + m * ROW_STEP * HEAD, q, s[m]);
        slot = slot == 2 ? 0 : slot + 1;
        turn ^= 1;
    }
    barrier();
    if (warp == 1) finish(row - rows_per_sweep, slot == 0 ? 2 : slot - 1, turn ^ 1);
}

// Groups of a block that the current device's shared memory holds; raises the kernel's limit at the first call on it.
template <typename State>
int fitting_groups() {
    static int known[64] = {};
    int device = 0;
    cudaGetDevice(&device);
    if (known[device & 63] == 0) {
        int bytes = 0;
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        const int groups = min(bytes / static_cast<int>(sizeof(Shared<State>)), GROUPS<State>);
        cudaFuncSetAttribute(wkv_decode_kernel<State>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             groups * static_cast<int>(sizeof(Shared<State>)));
        known[device & 63] = groups;
    }
    return known[device & 63];
}

// One block per processor, as many groups in each as there is work for; a sweep takes whole rows.
template <typename State>
int run(const WkvArgs& p, void* stream) {
    const int fitting = fitting_groups<State>(), places = this_machine().processors;
    const int most = max(1, places * fitting / p.heads), sweeps = (p.rows + most - 1) / most;
    const int rows_per_sweep = (p.rows + sweeps - 1) / sweeps;
    const int groups = min((rows_per_sweep * p.heads + places - 1) / places, fitting);
    const dim3 blocks((rows_per_sweep * p.heads + groups - 1) / groups);
    launch_with_shared(wkv_decode_kernel<State>, blocks, groups * THREADS, groups * sizeof(Shared<State>), stream, p,
                       rows_per_sweep);
    return launch_result();
}

RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    return state_bytes == 2 ? run<__half>(*p, stream) : run<float>(*p, stream);
}
