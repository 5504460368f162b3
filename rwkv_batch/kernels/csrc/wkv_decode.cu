// WKV with its prologue and epilogue for rows of one token. A warp takes one item, a head of a row, after another; one
// block per processor. The first two items of a warp are dealt out, all others are claimed by whoever is free, as
// processors get unequal shares of the memory's bandwidth (dealt out evenly, the first were done after two thirds of the
// time). So all of them sweep over a few neighbouring rows at a time.
//
// Memory bound: per item it reads and writes 64x64 of state (8 KiB in fp16, 16 in fp32) and touches 9 x 128 bytes of
// activations. So every warp has a ring of STAGES states in shared memory of its own: one is computed, in place, while
// the next comes in; on sm_90 the copy engine moves them whole, before it the lanes do. Whatever else an item needs is
// loaded while the one before is computed: under full load a load takes microseconds, and one that is waited for on the
// spot keeps the ring from being refilled. No two warps ever wait for each other.
//
// Shared memory per warp: ring [2][64][64], vectors [6][64] fp32, y [64] fp32, an mbarrier per stage.
#include <cuda_pipeline.h>

#include <atomic>

#include "wkv_rows.cuh"

constexpr int STAGES = 2;
// Warps of a block at most, and value rows that a lane takes at once. Many items: as many warps as fit into sm_90's
// shared memory, few registers each. Few: what counts is how soon one is done.
template <typename State>
constexpr int MANY_WARPS = sizeof(State) == 2 ? 12 : 6;
constexpr int MANY_ROWS = 4, FEW_WARPS = 4, FEW_ROWS = 16;

template <typename State>
struct Shared {
    alignas(128) State ring[STAGES][HEAD * HEAD];
    float vectors[VECS][HEAD];
    float y[HEAD];
    uint64_t arrived[STAGES];  // mbarriers
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A head's state on its way into a warp's shared memory and out of it.
template <typename State>
struct HeadCopy {
    static constexpr int BYTES = HEAD * HEAD * sizeof(State);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int ARRIVALS = 1;

    __device__ static __forceinline__ void load(State* to, const State* from, uint64_t* arrived, int lane) {
        if (lane != 0) return;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(BYTES)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_address(to)),
            "l"(from), "r"(BYTES), "r"(shared_address(arrived))
            : "memory");
    }

    // Of what the whole warp wrote.
    __device__ static __forceinline__ void store(State* to, const State* from, int lane) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane != 0) return;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                     "r"(BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // The shared memory of all stores is free again.
    __device__ static __forceinline__ void wait_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#else
    static constexpr int ARRIVALS = 32;
    static constexpr int PIECES = BYTES / (32 * sizeof(uint4));

    __device__ static __forceinline__ void load(State* to, const State* from, uint64_t* arrived, int lane) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            __pipeline_memcpy_async(reinterpret_cast<uint4*>(to) + i * 32 + lane,
                                    reinterpret_cast<const uint4*>(from) + i * 32 + lane, sizeof(uint4));
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(arrived)) : "memory");
    }

    __device__ static __forceinline__ void store(State* to, const State* from, int lane) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            reinterpret_cast<uint4*>(to)[i * 32 + lane] = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
    }

    __device__ static __forceinline__ void wait_stored() {}
#endif

    __device__ static __forceinline__ void prepare(uint64_t* arrived) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrived)), "r"(ARRIVALS) : "memory");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }

    __device__ static __forceinline__ void wait_loaded(uint64_t* arrived, int parity) {
        int done;
        do {
            asm volatile(
                "{\n"
                ".reg .pred done;\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
                "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
#else
                "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
                "selp.b32 %0, 1, 0, done;\n"
                "}"
                : "=r"(done)
                : "r"(shared_address(arrived)), "r"(parity)
                : "memory");
        } while (done == 0);
    }
};

// Of a launch: items claimed beyond those that are dealt out, and warps that have ended; the last one puts both back to
// 0. The launches take turns with many of them, so that one that starts early finds its own at 0.
struct Claims {
    int claimed, ended;
};
constexpr int TURNS = 4096;
__device__ Claims claims_of_turn[TURNS];

template <typename State, int WARPS, int ROWS>
__global__ void __launch_bounds__(32 * WARPS, 1) wkv_decode_kernel(const WkvArgs p, int turn) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    using Copy = HeadCopy<State>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = lane * 2, q = lane & 7, octet = lane >> 3;
    Shared<State>& sh = reinterpret_cast<Shared<State>*>(dynamic)[warp];
    // Head n % heads of row n / heads is item n; its activations begin at n * HEAD.
    const int items = p.rows * p.heads, warps = gridDim.x * (blockDim.x >> 5);
    int item = warp * gridDim.x + blockIdx.x, next = item + warps;
    if (item >= items) return;
    const auto state_of = [&](int64_t slot, int n) {
        return static_cast<State*>(p.state) + slot * p.slot_stride + n % p.heads * (HEAD * HEAD);
    };
    const auto load_state = [&](int stage, int64_t slot, int n) {
        Copy::load(sh.ring[stage], state_of(slot, n), &sh.arrived[stage], lane);
    };

    if (lane == 0)
        for (int stage = 0; stage < STAGES; ++stage) Copy::prepare(&sh.arrived[stage]);
    __syncwarp();
    load_state(0, p.read_slots[item / p.heads], item);
    if (next < items) load_state(1, p.read_slots[next / p.heads], next);
    let_next_start();

    const auto channel_of = [&](int n) { return n % p.heads * HEAD + pair; };
    HeadParams params(p, channel_of(item));
    float2 weight, bias;
    const auto load_norm = [&](int channel) {
        weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
        bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
    };
    load_norm(channel_of(item));
    wait_for_inputs();
    int64_t write_slot = p.write_slots[item / p.heads];
    Inputs in;
    __half2 gate;
    const auto activations_of = [&](int n) { return static_cast<int64_t>(n) * HEAD + pair; };
    const auto load_gate = [&](int n) { gate = *reinterpret_cast<const __half2*>(p.g + activations_of(n)); };
    in.load(p, activations_of(item));
    load_gate(item);
    Claims& claims = claims_of_turn[turn];
    int claim = 0;
    const auto claim_one = [&] {
        if (lane == 0 && next < items && items > STAGES * warps) claim = atomicAdd(&claims.claimed, 1);
    };
    claim_one();

    for (int stage = 0, parity = 0; item < items; parity ^= stage, stage ^= 1) {
        const bool more = next < items;
        const Scalars scalars = prologue(params, in, p.v_first != nullptr, sh.vectors, pair);
        if (more) in.load(p, activations_of(next)), params = HeadParams(p, channel_of(next));
        const int ahead = STAGES * warps + __shfl_sync(FULL, claim, 0);
        const bool refill = more && ahead < items;
        int64_t ahead_slot = 0;
        if (refill) ahead_slot = p.read_slots[ahead / p.heads];
        __syncwarp();
        KeyVectors t;
        read_keys<State>(sh.vectors[VKK], q, t.kk);
        read_keys<State>(sh.vectors[VDECAY], q, t.decay);
        read_keys<State>(sh.vectors[VKKA], q, t.kka);
        read_keys<State>(sh.vectors[VK], q, t.k);
        read_keys<State>(sh.vectors[VR], q, t.r);
#pragma unroll
        for (int j = 0; j < KEYS; ++j) t.kk[j] *= -scalars.inv_square;
        State* const state = sh.ring[stage];
        Copy::wait_loaded(&sh.arrived[stage], parity);
#pragma unroll 1
        for (int row = octet; row < HEAD; row += ROWS * ROW_STEP) {
            RawRows<State, ROWS> raw;
            raw.load(state + row * HEAD, q);
            wkv_step<State, ROWS>(raw, state + row * HEAD, t, &sh.vectors[VV][row], q, &sh.y[row]);
        }
        Copy::store(state_of(write_slot, item), state, lane);
        if (more) write_slot = p.write_slots[next / p.heads];
        const float2 out = wkv_epilogue(*reinterpret_cast<const float2*>(&sh.y[pair]), scalars.bonus,
                                        *reinterpret_cast<const float2*>(&sh.vectors[VV][pair]), __half22float2(gate),
                                        weight, bias);
        *reinterpret_cast<__half2*>(p.y + activations_of(item)) = __floats2half2_rn(out.x, out.y);
        if (more) load_gate(next), load_norm(channel_of(next));
        __syncwarp();
        if (lane == 0) Copy::wait_stored();
        if (refill) load_state(stage, ahead_slot, ahead);
        item = next, next = refill ? ahead : items;
        claim_one();
    }
    if (lane == 0 && items > STAGES * warps && atomicAdd(&claims.ended, 1) == warps - 1) claims = {0, 0};
}

static std::atomic<unsigned> launches;

// One block per processor, at most `warps` in each.
template <typename State, int WARPS, int ROWS>
int launch_kernel(const WkvArgs& p, int warps, int shared_bytes, void* stream) {
    const auto kernel = wkv_decode_kernel<State, WARPS, ROWS>;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[this_device()]) {
        const auto error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, this_machine().shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    const dim3 blocks(min(p.rows * p.heads, this_machine().processors));
    launch_with_shared(kernel, blocks, 32 * warps, shared_bytes, stream, p, static_cast<int>(launches++ % TURNS));
    return launch_result();
}

template <typename State>
int run(const WkvArgs& p, void* stream) {
    const int shared_bytes = this_machine().shared_bytes, processors = this_machine().processors;
    constexpr int OF_WARP = static_cast<int>(sizeof(Shared<State>));
    const int fitting = shared_bytes / OF_WARP, needed = (p.rows * p.heads + processors - 1) / processors;
    // Few warps leave shared memory to the next kernel's blocks, and to the L1 that these stream through.
    if (needed <= min(FEW_WARPS, fitting)) {
        return launch_kernel<State, FEW_WARPS, FEW_ROWS>(p, needed, needed * OF_WARP, stream);
    }
    // Many take all of it: blocks that start early would share a processor.
    const int warps = min(needed, min(fitting, MANY_WARPS<State>));
    return launch_kernel<State, MANY_WARPS<State>, MANY_ROWS>(p, warps, shared_bytes, stream);
}

RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    return state_bytes == 2 ? run<__half>(*p, stream) : run<float>(*p, stream);
}
