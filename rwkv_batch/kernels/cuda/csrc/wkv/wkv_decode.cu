// WKV decode: prologue, one recurrence step and epilogue for rows of one token.
//
//   S <- S diag(decay) + (S (-kk)) (kk * a)^T + v k^T        y = S r        as in kernels/naive.py
//
// in     r, w, k, v, a, g, v_gate, v_first  [rows, C] fp16
//        constants  [C] fp32 (WkvArgs)
//
// inout  state      [slots, H, 64, 64] fp32, fp16 or Int8State; reads read_slots[row], writes write_slots[row]
//
// out    y          [rows, C] fp16, or two-part
//
// Pipeline: a ring of STAGES = 2 states per warp. One is computed in place while the next arrives, by bulk copies on
// sm_90, by cp.async on others. Everything else of a row loads while the previous row is computed. Warps never wait for
// each other.
//
// Grid: one CTA per SM; a warp has one head and processes row after row, so that the head's constants (2 KB) load once.
// The first two rows of a warp are fixed. Warps of a head claim the others by an atomic counter, because SMs get
// unequal bandwidth. With a fixed split the fastest SM ended after two thirds of the time.
// Block: up to 16 warps (int8), 12 (fp16) or 6 (fp32); fewer with few rows.
// Shared memory: all of the SM. Per warp: ring [2][64][64], vectors [6][64] fp32, y [64] fp32, 2 mbarriers; int8 also
// staged inputs. With up to 4 warps only what they need.
// Bound: memory; per head its state, read and written once (4 KB int8, 8 KB fp16, 16 KB fp32), 9 x 128 bytes of
// activations. Share of 4.8 TB/s (H200, 64 heads): 320 rows fp32 80 %, fp16 78 %, int8 69 %; 960 rows 79, 79, 78 %; 8
// rows 70, 52, 29 %.
// Made for: heads of 64, up to 64 heads.
#include <cuda_pipeline.h>

#include <atomic>

#include "wkv_int8.cuh"

constexpr int STAGES = 2;
// Maximum warps per CTA, and value rows per lane. With many rows, shared memory limits the warps and each has few
// registers. With few rows, latency counts.
template <typename State>
constexpr int MANY_WARPS = sizeof(State) == 2 ? 12 : 6;
template <>
constexpr int MANY_WARPS<Int8State> = 16;
constexpr int MANY_ROWS = 4, FEW_WARPS = 4, FEW_ROWS = 16;

template <typename State>
constexpr bool IS_INT8_STATE = false;
template <>
constexpr bool IS_INT8_STATE<Int8State> = true;
// Size of a head's state, and bytes of an element of slot_stride.
template <typename State>
constexpr int HEAD_STATES = IS_INT8_STATE<State> ? 1 : HEAD_SIZE * HEAD_SIZE;
template <typename State>
constexpr int ELEMENT_BYTES = IS_INT8_STATE<State> ? 1 : sizeof(State);

template <typename State>
struct Smem {
    alignas(128) State ring[STAGES][HEAD_STATES<State>];
    float vectors[VECS][HEAD_SIZE];
    float y[HEAD_SIZE];
    uint64_t arrived[STAGES];
};

// Inputs of the next row in shared memory, loaded while the current row is computed; they take no registers.
struct Staged {
    __half2 activations[8][32];  // r, w, k, v, a, v's gate, the first v, g
    float2 params[8][32];        // w0, a0, k_k, k_a, r_k, v0 and the norm's weight and bias
};

template <>
struct Smem<Int8State> {
    alignas(128) Int8State ring[STAGES][1];
    Int8Vectors vectors;
    Staged staged;
    uint64_t arrived[STAGES];
};

// Copies a head's state between global memory and a warp's shared memory.
template <typename State>
struct HeadCopy {
    static constexpr int BYTES = HEAD_STATES<State> * sizeof(State);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static constexpr int ARRIVALS = 1;

    __device__ static __forceinline__ void load_head(State* to, const State* from, uint64_t* arrived, int lane) {
        if (lane != 0) return;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(arrived)), "r"(BYTES)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                smem_address(to)),
            "l"(from), "r"(BYTES), "r"(smem_address(arrived))
            : "memory");
    }

    // Stores what the whole warp wrote.
    __device__ static __forceinline__ void store_head(State* to, const State* from, int lane) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane != 0) return;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)),
                     "r"(BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // Waits until the stores have read shared memory.
    __device__ static __forceinline__ void wait_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#else
    static constexpr int ARRIVALS = 32;
    static constexpr int PIECES = BYTES / sizeof(uint4);

    __device__ static __forceinline__ void load_head(State* to, const State* from, uint64_t* arrived, int lane) {
        for (int i = lane; i < PIECES; i += 32)
            __pipeline_memcpy_async(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i,
                                    sizeof(uint4));
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(arrived)) : "memory");
    }

    __device__ static __forceinline__ void store_head(State* to, const State* from, int lane) {
        __syncwarp();
        for (int i = lane; i < PIECES; i += 32)
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }

    __device__ static __forceinline__ void wait_stored() {}
#endif

    __device__ static __forceinline__ void init_arrival(uint64_t* arrived) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(arrived)), "r"(ARRIVALS) : "memory");
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
                : "r"(smem_address(arrived)), "r"(parity)
                : "memory");
        } while (done == 0);
    }
};

// Per launch: rows claimed of each head, and warps that have ended. The last warp resets them. Launches use CLAIM_SLOTS
// of them in turn, so that one that starts early finds zeros.
constexpr int MAX_HEADS = 64, CLAIM_SLOTS = 4096;
struct Claims {
    int rows[MAX_HEADS], ended;
};
__device__ Claims claims_by_launch[CLAIM_SLOTS];

template <typename State, int WARPS, int ROWS>
__global__ void __launch_bounds__(32 * WARPS, 1) wkv_decode_kernel(const WkvArgs p, int claim_slot) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    using Copy = HeadCopy<State>;
    constexpr bool IS_INT8 = IS_INT8_STATE<State>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = lane * 2, q = lane & 7, octet = lane >> 3;
    auto& smem = reinterpret_cast<Smem<State>*>(dynamic)[warp];
    const int warps = gridDim.x * (blockDim.x >> 5), warp_index = warp * gridDim.x + blockIdx.x;
    Claims& claims = claims_by_launch[claim_slot];
    const bool any_claims = p.rows > STAGES * max(1, warps / p.heads);

    if (lane == 0)
        for (int stage = 0; stage < STAGES; ++stage) Copy::init_arrival(&smem.arrived[stage]);
    __syncwarp();
    allow_next_kernel();
    int stage = 0, parity = 0;
    // One head per warp, unless the GPU has fewer warps than the model heads.
    for (int head = warp_index % p.heads; head < p.heads; head += warps) {
        const int warps_of_head = max(1, (warps - head + p.heads - 1) / p.heads);
        int row = warp_index / p.heads, next = row + warps_of_head;
        if (row >= p.rows) break;
        const auto state_of = [&](int64_t slot) {
            auto* const first = static_cast<unsigned char*>(p.state) + slot * p.slot_stride * ELEMENT_BYTES<State>;
            return reinterpret_cast<State*>(first) + head * HEAD_STATES<State>;
        };
        const auto load_state = [&](int to, int64_t slot) {
            Copy::load_head(smem.ring[to], state_of(slot), &smem.arrived[to], lane);
        };
        load_state(stage, p.read_slots[row]);
        if (next < p.rows) load_state(stage ^ 1, p.read_slots[next]);

        const int channel = head * HEAD_SIZE + pair;
        const auto at = [&](int of) { return static_cast<int64_t>(of) * (p.heads * HEAD_SIZE) + channel; };
        Inputs in;
        HeadParams params;
        __half2 gate;
        float2 weight, bias;
        const auto load_inputs = [&](int of) {
            if constexpr (IS_INT8) {
                const __half* const from[7] = {p.r, p.w, p.k, p.v, p.a, p.v_gate, p.v_first};
#pragma unroll
                for (int i = 0; i < 7; ++i)
                    __pipeline_memcpy_async(&smem.staged.activations[i][lane], from[i] + at(of), sizeof(__half2));
            } else {
                in.load(p, at(of));
            }
        };
        const auto load_gate = [&](int of) {
            if constexpr (IS_INT8) {
                __pipeline_memcpy_async(&smem.staged.activations[7][lane], p.g + at(of), sizeof(__half2));
            } else {
                gate = *reinterpret_cast<const __half2*>(p.g + at(of));
            }
        };
        // cp.async groups of a row: inputs, the gate, the state two rows ahead.
        const auto end_group = [&] {
            if constexpr (IS_INT8) __pipeline_commit();
        };
        if constexpr (IS_INT8) {
            const float* const from[8] = {p.w0, p.a0, p.k_k, p.k_a, p.r_k, p.v0, p.ln_weight, p.ln_bias};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                __pipeline_memcpy_async(&smem.staged.params[i][lane], from[i] + channel, sizeof(float2));
        } else {
            params = HeadParams(p, channel);
            weight = *reinterpret_cast<const float2*>(p.ln_weight + channel);
            bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
        }
        wait_for_previous_kernel();
        int64_t write_slot = p.write_slots[row];
        load_inputs(row);
        end_group();
        load_gate(row);
        end_group();
        end_group();
        int claim = 0;
        const auto claim_row = [&] {
            if (lane == 0 && next < p.rows && any_claims) claim = atomicAdd(&claims.rows[head], 1);
        };
        claim_row();

        for (; row < p.rows; parity ^= stage, stage ^= 1) {
            const bool more = next < p.rows;
            if constexpr (IS_INT8) {
                __pipeline_wait_prior(2);
                const auto& staged = smem.staged;
                in.r = staged.activations[0][lane], in.w = staged.activations[1][lane], in.k = staged.activations[2][lane];
                in.v = staged.activations[3][lane], in.a = staged.activations[4][lane];
                in.gate = staged.activations[5][lane], in.first = staged.activations[6][lane];
                params.w0 = staged.params[0][lane], params.a0 = staged.params[1][lane];
                params.k_k = staged.params[2][lane], params.k_a = staged.params[3][lane];
                params.r_k = staged.params[4][lane], params.v0 = staged.params[5][lane];
            }
            const auto scalars = prologue(params, in, IS_INT8 || p.v_first != nullptr, smem.vectors, pair);
            if (more) load_inputs(next);
            end_group();
            const int ahead = STAGES * warps_of_head + __shfl_sync(FULL_MASK, claim, 0);
            const bool refill = more && ahead < p.rows;
            int64_t ahead_slot = 0;
            if (refill) ahead_slot = p.read_slots[ahead];
            __syncwarp();
            State* const state = smem.ring[stage];
            float2 y, v;
            if constexpr (IS_INT8) {
                Copy::wait_loaded(&smem.arrived[stage], parity);
                y = int8_step(*state, smem.vectors, scalars, lane);
                v = scalars.v;
            } else {
                KeyVectors t;
                read_keys<State>(smem.vectors[VKK], q, t.kk);
                read_keys<State>(smem.vectors[VDECAY], q, t.decay);
                read_keys<State>(smem.vectors[VKKA], q, t.kka);
                read_keys<State>(smem.vectors[VK], q, t.k);
                read_keys<State>(smem.vectors[VR], q, t.r);
#pragma unroll
                for (int j = 0; j < KEYS; ++j) t.kk[j] *= -scalars.inv_square;
                Copy::wait_loaded(&smem.arrived[stage], parity);
#pragma unroll 1
                for (int i = octet; i < HEAD_SIZE; i += ROWS * ROW_STEP) {
                    RawRows<State, ROWS> raw;
                    raw.load(state + i * HEAD_SIZE, q);
                    wkv_step<State, ROWS>(raw, state + i * HEAD_SIZE, t, &smem.vectors[VV][i], q, &smem.y[i]);
                }
            }
            Copy::store_head(state_of(write_slot), state, lane);
            if (more) write_slot = p.write_slots[next];
            if constexpr (IS_INT8) {
                __pipeline_wait_prior(2);
                gate = smem.staged.activations[7][lane];
                weight = smem.staged.params[6][lane], bias = smem.staged.params[7][lane];
            } else {
                y = *reinterpret_cast<const float2*>(&smem.y[pair]);
                v = *reinterpret_cast<const float2*>(&smem.vectors[VV][pair]);
            }
            const float2 out = wkv_epilogue(y, scalars.bonus, v, __half22float2(gate), weight, bias);
            store_y(p, row, channel, out);
            if (more) load_gate(next);
            end_group();
            __syncwarp();
            if (lane == 0) Copy::wait_stored();
            if (refill) load_state(stage, ahead_slot);
            end_group();
            row = next, next = refill ? ahead : p.rows;
            claim_row();
        }
    }
    if (!any_claims) return;
    int ended = 0;
    if (lane == 0) ended = atomicAdd(&claims.ended, 1);
    if (__shfl_sync(FULL_MASK, ended, 0) != warps - 1) return;
    for (int i = lane; i < MAX_HEADS; i += 32) claims.rows[i] = 0;
    if (lane == 0) claims.ended = 0;
}

static std::atomic<unsigned> launches;

// Launches one CTA per SM with at most `warps` warps.
template <typename State, int WARPS, int ROWS>
int launch_kernel(const WkvArgs& p, int warps, int smem_bytes, void* stream) {
    const auto kernel = wkv_decode_kernel<State, WARPS, ROWS>;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const auto error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device_info().smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    const dim3 blocks(min(p.rows * p.heads, device_info().num_sms));
    launch_with_smem(kernel, blocks, 32 * warps, smem_bytes, stream, p, static_cast<int>(launches++ % CLAIM_SLOTS));
    return launch_result();
}

template <typename State>
int run(const WkvArgs& p, void* stream) {
    const int smem_bytes = device_info().smem_bytes, num_sms = device_info().num_sms;
    constexpr int SMEM_PER_WARP = static_cast<int>(sizeof(Smem<State>));
    const int fitting = smem_bytes / SMEM_PER_WARP, needed = (p.rows * p.heads + num_sms - 1) / num_sms;
    // Few warps: leave shared memory to the next kernel's CTAs, and to the L1 that these stream through.
    if (needed <= min(FEW_WARPS, fitting)) {
        return launch_kernel<State, FEW_WARPS, FEW_ROWS>(p, needed, needed * SMEM_PER_WARP, stream);
    }
    // Many warps: take all shared memory, or early CTAs would share an SM.
    const int warps = min(needed, min(fitting, MANY_WARPS<State>));
    return launch_kernel<State, MANY_WARPS<State>, MANY_ROWS>(p, warps, smem_bytes, stream);
}

// state_bytes: per element; 1 for Int8State.
RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    if (p->heads > MAX_HEADS) return static_cast<int>(cudaErrorInvalidValue);
    if (state_bytes == 1) {
        WkvArgs with = *p;
        // Layer 0: v + (v - v) * anything.
        if (p->v_first == nullptr) with.v_first = with.v_gate = p->v, with.v0 = p->w0;
        return run<Int8State>(with, stream);
    }
    return state_bytes == 2 ? run<__half>(*p, stream) : run<float>(*p, stream);
}
