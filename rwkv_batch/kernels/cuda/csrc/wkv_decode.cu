// WKV with its prologue and epilogue for rows of one token. A warp has a head and takes one row after another, so that the
// head's constants (2 KiB) are read once; one block per processor. The first two rows of a warp are dealt out, all others
// are claimed by whoever of a head's warps is free, as processors get unequal shares of the memory's bandwidth (dealt out
// evenly, the first were done after two thirds of the time). So all of them sweep over a few neighbouring rows at a time.
//
// Memory bound: of a row it reads and writes 64x64 of state (4 KiB in 8 bits, 8 in fp16, 16 in fp32) and touches 9 x 128
// bytes of activations. So every warp has a ring of STAGES states in shared memory of its own: one is computed, in place,
// while the next comes in; on sm_90 the copy engine moves them whole, before it the lanes do. Whatever else a row needs is
// loaded while the one before is computed: under full load a load takes microseconds, and one that is waited for on the
// spot keeps the ring from being refilled. No two warps ever wait for each other.
//
// Shared memory per warp: ring [2][64][64], vectors [6][64] fp32, y [64] fp32, an mbarrier per stage; of states of 8 bits a
// token's vectors in the form of the tensor cores, and activations and constants besides.
#include <cuda_pipeline.h>

#include <atomic>

#include "wkv_codes.cuh"

constexpr int STAGES = 2;
// Warps of a block at most, and value rows that a lane takes at once. Many items: as many warps as fit into sm_90's
// shared memory, few registers each. Few: what counts is how soon one is done.
template <typename State>
constexpr int MANY_WARPS = sizeof(State) == 2 ? 12 : 6;
template <>
constexpr int MANY_WARPS<CodedState> = 16;
constexpr int MANY_ROWS = 4, FEW_WARPS = 4, FEW_ROWS = 16;

template <typename State>
constexpr bool IS_CODED = false;
template <>
constexpr bool IS_CODED<CodedState> = true;
// Of a head in memory; slots are apart by a number of elements of ITEM bytes.
template <typename State>
constexpr int HEAD_STATES = IS_CODED<State> ? 1 : HEAD * HEAD;
template <typename State>
constexpr int ITEM = IS_CODED<State> ? 1 : sizeof(State);

template <typename State>
struct Shared {
    alignas(128) State ring[STAGES][HEAD_STATES<State>];
    float vectors[VECS][HEAD];
    float y[HEAD];
    uint64_t arrived[STAGES];  // mbarriers
};

// What a lane needs of an item besides the state, on its way while the item before is computed: it takes no registers.
struct Staged {
    __half2 activations[8][32];  // r, w, k, v, a, v's gate, the first v, g
    float2 params[8][32];        // w0, a0, k_k, k_a, r_k, v0 and the norm's weight and bias
};

template <>
struct Shared<CodedState> {
    alignas(128) CodedState ring[STAGES][1];
    CodedVectors vectors;
    Staged staged;
    uint64_t arrived[STAGES];
};

// A head's state on its way into a warp's shared memory and out of it.
template <typename State>
struct HeadCopy {
    static constexpr int BYTES = HEAD_STATES<State> * sizeof(State);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int ARRIVALS = 1;

    __device__ static __forceinline__ void fetch_head(State* to, const State* from, uint64_t* arrived, int lane) {
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
    __device__ static __forceinline__ void put_head(State* to, const State* from, int lane) {
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
    static constexpr int PIECES = BYTES / sizeof(uint4);

    __device__ static __forceinline__ void fetch_head(State* to, const State* from, uint64_t* arrived, int lane) {
        for (int i = lane; i < PIECES; i += 32)
            __pipeline_memcpy_async(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i,
                                    sizeof(uint4));
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(arrived)) : "memory");
    }

    __device__ static __forceinline__ void put_head(State* to, const State* from, int lane) {
        __syncwarp();
        for (int i = lane; i < PIECES; i += 32)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }

    __device__ static __forceinline__ void wait_stored() {}
#endif

    __device__ static __forceinline__ void prepare_arrival(uint64_t* arrived) {
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

// Of a launch: rows claimed of each head beyond those that are dealt out, and warps that have ended; the last one puts all
// back to 0. The launches take turns with many of them, so that one that starts early finds its own at 0.
constexpr int MAX_HEADS = 64, TURNS = 4096;
struct Claims {
    int rows[MAX_HEADS], ended;
};
__device__ Claims claims_of_turn[TURNS];

template <typename State, int WARPS, int ROWS>
__global__ void __launch_bounds__(32 * WARPS, 1) wkv_decode_kernel(const WkvArgs p, int turn) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    using Copy = HeadCopy<State>;
    constexpr bool CODED = IS_CODED<State>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = lane * 2, q = lane & 7, octet = lane >> 3;
    auto& sh = reinterpret_cast<Shared<State>*>(dynamic)[warp];
    const int warps = gridDim.x * (blockDim.x >> 5), own = warp * gridDim.x + blockIdx.x;
    Claims& claims = claims_of_turn[turn];
    const bool any_claims = p.rows > STAGES * max(1, warps / p.heads);

    if (lane == 0)
        for (int stage = 0; stage < STAGES; ++stage) Copy::prepare_arrival(&sh.arrived[stage]);
    __syncwarp();
    let_next_start();
    int stage = 0, parity = 0;
    // One head, but on a GPU that has fewer warps than the model heads.
    for (int head = own % p.heads; head < p.heads; head += warps) {
        const int sharers = max(1, (warps - head + p.heads - 1) / p.heads);
        int row = own / p.heads, next = row + sharers;
        if (row >= p.rows) break;
        const auto state_of = [&](int64_t slot) {
            auto* const first = static_cast<unsigned char*>(p.state) + slot * p.slot_stride * ITEM<State>;
            return reinterpret_cast<State*>(first) + head * HEAD_STATES<State>;
        };
        const auto load_state = [&](int to, int64_t slot) {
            Copy::fetch_head(sh.ring[to], state_of(slot), &sh.arrived[to], lane);
        };
        load_state(stage, p.read_slots[row]);
        if (next < p.rows) load_state(stage ^ 1, p.read_slots[next]);

        const int channel = head * HEAD + pair;
        const auto at = [&](int of) { return static_cast<int64_t>(of) * (p.heads * HEAD) + channel; };
        Inputs in;
        HeadParams params;
        __half2 gate;
        float2 weight, bias;
        const auto load_inputs = [&](int of) {
            if constexpr (CODED) {
                const __half* const from[7] = {p.r, p.w, p.k, p.v, p.a, p.v_gate, p.v_first};
#pragma unroll
                for (int i = 0; i < 7; ++i)
                    __pipeline_memcpy_async(&sh.staged.activations[i][lane], from[i] + at(of), sizeof(__half2));
            } else {
                in.load(p, at(of));
            }
        };
        const auto load_gate = [&](int of) {
            if constexpr (CODED) {
                __pipeline_memcpy_async(&sh.staged.activations[7][lane], p.g + at(of), sizeof(__half2));
            } else {
                gate = *reinterpret_cast<const __half2*>(p.g + at(of));
            }
        };
        // Of a row: inputs, then the gate, then the state that is two rows ahead, each a group of copies.
        const auto end_group = [&] {
            if constexpr (CODED) __pipeline_commit();
        };
        if constexpr (CODED) {
            const float* const from[8] = {p.w0, p.a0, p.k_k, p.k_a, p.r_k, p.v0, p.ln_weight, p.ln_bias};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                __pipeline_memcpy_async(&sh.staged.params[i][lane], from[i] + channel, sizeof(float2));
        } else {
            params = HeadParams(p, channel);
            weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
            bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
        }
        wait_for_inputs();
        int64_t write_slot = p.write_slots[row];
        load_inputs(row);
        end_group();
        load_gate(row);
        end_group();
        end_group();
        int claim = 0;
        const auto claim_one = [&] {
            if (lane == 0 && next < p.rows && any_claims) claim = atomicAdd(&claims.rows[head], 1);
        };
        claim_one();

        for (; row < p.rows; parity ^= stage, stage ^= 1) {
            const bool more = next < p.rows;
            if constexpr (CODED) {
                __pipeline_wait_prior(2);
                const auto& staged = sh.staged;
                in.r = staged.activations[0][lane], in.w = staged.activations[1][lane], in.k = staged.activations[2][lane];
                in.v = staged.activations[3][lane], in.a = staged.activations[4][lane];
                in.gate = staged.activations[5][lane], in.first = staged.activations[6][lane];
                params.w0 = staged.params[0][lane], params.a0 = staged.params[1][lane];
                params.k_k = staged.params[2][lane], params.k_a = staged.params[3][lane];
                params.r_k = staged.params[4][lane], params.v0 = staged.params[5][lane];
            }
            const auto scalars = prologue(params, in, CODED || p.v_first != nullptr, sh.vectors, pair);
            if (more) load_inputs(next);
            end_group();
            const int ahead = STAGES * sharers + __shfl_sync(FULL, claim, 0);
            const bool refill = more && ahead < p.rows;
            int64_t ahead_slot = 0;
            if (refill) ahead_slot = p.read_slots[ahead];
            __syncwarp();
            State* const state = sh.ring[stage];
            float2 y, v;
            if constexpr (CODED) {
                Copy::wait_loaded(&sh.arrived[stage], parity);
                y = coded_step(*state, sh.vectors, scalars, lane);
                v = scalars.v;
            } else {
                KeyVectors t;
                read_keys<State>(sh.vectors[VKK], q, t.kk);
                read_keys<State>(sh.vectors[VDECAY], q, t.decay);
                read_keys<State>(sh.vectors[VKKA], q, t.kka);
                read_keys<State>(sh.vectors[VK], q, t.k);
                read_keys<State>(sh.vectors[VR], q, t.r);
#pragma unroll
                for (int j = 0; j < KEYS; ++j) t.kk[j] *= -scalars.inv_square;
                Copy::wait_loaded(&sh.arrived[stage], parity);
#pragma unroll 1
                for (int i = octet; i < HEAD; i += ROWS * ROW_STEP) {
                    RawRows<State, ROWS> raw;
                    raw.load(state + i * HEAD, q);
                    wkv_step<State, ROWS>(raw, state + i * HEAD, t, &sh.vectors[VV][i], q, &sh.y[i]);
                }
            }
            Copy::put_head(state_of(write_slot), state, lane);
            if (more) write_slot = p.write_slots[next];
            if constexpr (CODED) {
                __pipeline_wait_prior(2);
                gate = sh.staged.activations[7][lane];
                weight = sh.staged.params[6][lane], bias = sh.staged.params[7][lane];
            } else {
                y = *reinterpret_cast<const float2*>(&sh.y[pair]);
                v = *reinterpret_cast<const float2*>(&sh.vectors[VV][pair]);
            }
            const float2 out = wkv_epilogue(y, scalars.bonus, v, __half22float2(gate), weight, bias);
            put_y(p, row, channel, out);
            if (more) load_gate(next);
            end_group();
            __syncwarp();
            if (lane == 0) Copy::wait_stored();
            if (refill) load_state(stage, ahead_slot);
            end_group();
            row = next, next = refill ? ahead : p.rows;
            claim_one();
        }
    }
    if (!any_claims) return;
    int ended = 0;
    if (lane == 0) ended = atomicAdd(&claims.ended, 1);
    if (__shfl_sync(FULL, ended, 0) != warps - 1) return;
    for (int i = lane; i < MAX_HEADS; i += 32) claims.rows[i] = 0;
    if (lane == 0) claims.ended = 0;
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

// state_bytes: of an element, 1 for codes with their scales.
RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    if (p->heads > MAX_HEADS) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) {
        WkvArgs with = *p;
        // The first layer: v + (v - v) * anything.
        if (p->v_first == nullptr) with.v_first = with.v_gate = p->v, with.v0 = p->w0;
        return run<CodedState>(with, stream);
    }
    return state_bytes == 2 ? run<__half>(*p, stream) : run<float>(*p, stream);
}
