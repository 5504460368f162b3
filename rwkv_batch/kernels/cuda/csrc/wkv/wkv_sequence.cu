// WKV prefill, token by token: the bits of wkv_decode.cu, however a prompt is cut.
//
// in     r, w, k, v, a, g, v_gate, v_first  [T, C] fp16
//        constants  [C] fp32 (WkvArgs)
//
// inout  state      [slots, H, 64, 64] fp32, fp16 or Int8State; reads read_slots[row], writes write_slots[row]
//                   fp16 and int8 states are rounded after each token; a row that continues the one before reads no slot
//
// out    y          [T, C] fp16
//
// Two groups of warps share blocks of TOKENS tokens. State warps step through one block; they sum y of a token together
// with the next token's S * kk, so that the shuffles' latencies overlap. The others finish the block before it (group
// norm, bonus, gate) and compute the vectors of the next one, several tokens at a time. One barrier per block.
// Registers: a state warp holds 16 values x 64 keys of S. An int8 state is in shared memory, one warp steps it.
// Many rows of drafts: blocks of 4 tokens, one warp makes their vectors.
// Few heads: two CTAs, a cluster, share a head. Each carries half of the value rows, makes the vectors of half of the
// tokens for both, and finishes these tokens.
//
// Grid: (heads, rows). A CTA runs a row and those that continue it; of drafts, the CTAs that have none come last. Up to two
// CTAs per SM, of drafts all, start before the previous kernel ends.
// Block: 8 warps, of drafts 5; up to one CTA per SM 12, of which 8 carry 8 values each, or two CTAs of 8; int8 5.
// Shared memory: 57 KB (int8: 58 KB, drafts 15 KB, two CTAs per head 113 KB), vectors and y of two blocks.
// Bound: instruction issue; per head and token some 1,400 instructions of a warp. One CTA per SM: the latency of a step.
// Made for: heads of 64, rows of any length.
#include "cluster.cuh"
#include "wkv_int8.cuh"

constexpr int PADDED_BYTES[] = {116 << 10, 80 << 10};  // one CTA per SM, two: early ones do not pile up on the first free SMs
template <typename State>
constexpr bool IS_INT8 = std::is_same_v<State, Int8State>;

// Where a key's number lies in a vector: a lane's two groups of four keys are those of fp32 states, so that the octet reads
// 128 contiguous bytes.
template <typename State>
__device__ __forceinline__ int position_of(int key) { return sizeof(State) == 2 ? (key & 4) * 8 + (key >> 3) * 4 + (key & 3) : key; }

// A token's vectors, in that order but v. kk includes the factor -n^-2 (wkv.cuh).
template <typename State>
struct Token {
    float vectors[VECS][HEAD_SIZE];
    float bonus, padding[3];

    __device__ __forceinline__ void make(const HeadParams& params, const Inputs& in, int pair) {
        const int at = position_of<State>(pair);
        const PairVectors made(params, in, true);
        const StepVectors &x = made.x, &z = made.z;
        const float factor = -made.scalars.inv_square;
        bonus = made.scalars.bonus;
        store_pair(&vectors[VR][at], x.r, z.r), store_pair(&vectors[VDECAY][at], x.decay, z.decay);
        store_pair(&vectors[VKK][at], x.kk * factor, z.kk * factor), store_pair(&vectors[VKKA][at], x.kka, z.kka);
        store_pair(&vectors[VK][at], x.k, z.k), store_pair(&vectors[VV][pair], x.v, z.v);
    }
    // Copies what this lane made to the other CTA.
    __device__ __forceinline__ void send(int rank, int pair) const {
        float* const peer = cluster::peer_pointer(const_cast<float*>(vectors[0]), rank);
        const int at = position_of<State>(pair);
#pragma unroll
        for (int vec = 0; vec < VECS; ++vec) {
            const int i = vec * HEAD_SIZE + (vec == VV ? pair : at);
            *reinterpret_cast<float2*>(peer + i) = *reinterpret_cast<const float2*>(&vectors[0][i]);
        }
    }
    __device__ __forceinline__ float2 v(int pair) const { return *reinterpret_cast<const float2*>(&vectors[VV][pair]); }
};

template <>
struct Token<Int8State> {
    Int8Vectors vectors;
    Int8Scalars scalars;  // all but v
    float bonus;
    alignas(16) float value[HEAD_SIZE];

    __device__ __forceinline__ void make(const HeadParams& params, const Inputs& in, int pair) {
        const Int8Scalars made = prologue(params, in, true, vectors, pair);
        if (pair == 0) scalars = made, bonus = made.bonus;
        *reinterpret_cast<float2*>(&value[pair]) = made.v;
    }
    __device__ __forceinline__ void send(int, int) const {}
    __device__ __forceinline__ float2 v(int pair) const { return *reinterpret_cast<const float2*>(&value[pair]); }
};

template <typename State, int TOKENS>
struct Block {
    Token<State> tokens[TOKENS];
    float y[TOKENS][HEAD_SIZE];
};

template <typename State, int TOKENS>
struct Smem {
    Block<State, TOKENS> blocks[2];
};
template <int TOKENS>
struct Smem<Int8State, TOKENS> {
    Block<Int8State, TOKENS> blocks[2];
    Int8State state;
};

// A head's state, carried by its state warps.
template <typename State, int STATE_WARPS>
struct Carried {
    static constexpr int ROWS = HEAD_SIZE / (STATE_WARPS * ROW_STEP);  // value rows per lane
    float s[ROWS][KEYS];
    float kk[KEYS];  // of the next token, loaded before it is needed
    float part[ROWS];  // of the last token's y, which lies at last_y
    float* last_y;
    int first, q;  // the lane's first value row

    template <typename Shared>
    __device__ __forceinline__ void load(const State* state, Shared&, int warp, int lane) {
        first = warp * ROWS * ROW_STEP + (lane >> 3), q = lane & 7;
        RawRows<State, ROWS> raw;
        raw.load(state + first * HEAD_SIZE, q);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) raw.rows[m].unpack(s[m]);
    }
    // y: of the first token
    __device__ __forceinline__ void begin(const Token<State>& token, float* y) {
        read_keys<float>(token.vectors[VKK], q, kk);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) part[m] = 0.0f;
        last_y = y;
    }
    // Sums of the step's state with -kk, and of the last token's new state with r: their latencies overlap.
    __device__ __forceinline__ void reduce(float (&sa)[ROWS]) {
        const auto add = [&](int offset) {
#pragma unroll
            for (int m = 0; m < ROWS; ++m) sa[m] += __shfl_xor_sync(FULL_MASK, sa[m], offset);
        };
        add(1);
        if constexpr (ROWS == 2) {  // two octet sums at once, the same sums as OctetSums'
            const bool upper = q & 4;
            float sum = (upper ? part[1] : part[0]) + __shfl_xor_sync(FULL_MASK, upper ? part[0] : part[1], 4);
            add(2);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            add(4);
            last_y[first + (upper ? ROW_STEP : 0)] = sum + __shfl_xor_sync(FULL_MASK, sum, 1);
        } else {
            OctetSums sums;
            sums.add_4(part, q);
            add(2);
            sums.add_2(q);
            add(4);
            last_y[first + OctetSums::row(q) * ROW_STEP] = sums.add_1();
        }
    }
    // next: the next token; any if there is none.
    template <typename Shared>
    __device__ __forceinline__ void step(Token<State>& token, const Token<State>& next, float* y, Shared&, int) {
        KeyVectors t;
        read_keys<float>(token.vectors[VDECAY], q, t.decay);
        read_keys<float>(token.vectors[VKKA], q, t.kka);
        read_keys<float>(token.vectors[VK], q, t.k);
        read_keys<float>(token.vectors[VR], q, t.r);
        float sa[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) sa[m] = dot(s[m], kk);
        read_keys<float>(next.vectors[VKK], q, kk);
        reduce(sa);
        update_rows(s, t, sa, &token.vectors[VV][first]);
        last_y = y;
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            part[m] = dot(s[m], t.r);
            if constexpr (sizeof(State) == 2) unpack8(pack8(s[m]), s[m]);
        }
    }
    // Stores y of the last token.
    __device__ __forceinline__ void end() {
        float none[ROWS] = {};
        reduce(none);
    }
    template <typename Shared>
    __device__ __forceinline__ void store(State* state, Shared&, int) const {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) store_keys(state + (first + m * ROW_STEP) * HEAD_SIZE, q, s[m]);
    }
};

template <>
struct Carried<Int8State, 1> {
    static constexpr int PIECES = sizeof(Int8State) / sizeof(uint4);

    template <typename Shared>
    __device__ __forceinline__ void load(const Int8State* state, Shared& smem, int, int lane) {
        for (int i = lane; i < PIECES; i += 32) reinterpret_cast<uint4*>(&smem.state)[i] = reinterpret_cast<const uint4*>(state)[i];
        __syncwarp();
    }
    __device__ __forceinline__ void begin(const Token<Int8State>&, float*) {}
    __device__ __forceinline__ void end() {}
    template <typename Shared>
    __device__ __forceinline__ void step(Token<Int8State>& token, const Token<Int8State>&, float* y, Shared& smem, int lane) {
        Int8Scalars scalars = token.scalars;
        scalars.v = token.v(2 * lane);
        *reinterpret_cast<float2*>(y + 2 * lane) = int8_step(smem.state, token.vectors, scalars, lane);
        __syncwarp();
    }
    template <typename Shared>
    __device__ __forceinline__ void store(Int8State* state, const Shared& smem, int lane) const {
        for (int i = lane; i < PIECES; i += 32) reinterpret_cast<uint4*>(state)[i] = reinterpret_cast<const uint4*>(&smem.state)[i];
        __syncwarp();  // before another token's step
    }
};

// Rows `first` to `end` - 1: the first continues none, and each other one continues the row before it.
struct Chain {
    int first, end;
};

// The chain of CTA row n; with first == p.rows if it has none. All lanes of a warp call it.
// If the step has no rows that continue others, as far as the host knows, it is the chain that begins with row n. Else it
// is the n-th chain, so that CTAs without one come last.
__device__ __forceinline__ Chain find_chain(const WkvArgs& p, int n) {
    const int lane = threadIdx.x & 31;
    const auto lowest = [](uint32_t bits) { return __popc((bits & -bits) - 1); };
    const auto begins_chain = [&](int row) { return row < p.rows && p.read_slots[row] != CONTINUES; };
    Chain found{p.rows, p.rows};
    int base = 0, before = n;  // the row of lane 0; chains to pass over
    if (p.continuing == 0) {
        if (!begins_chain(n)) return found;
        base = n, before = 0;
    }
    bool here = begins_chain(base + lane), behind = begins_chain(base + 32 + lane);  // 64 rows cost one wait
    for (; base < p.rows && found.end == p.rows; base += 32) {
        uint32_t begins = __ballot_sync(FULL_MASK, here);
        here = behind, behind = begins_chain(base + 64 + lane);
        if (found.first == p.rows) {
            for (; before > 0 && begins != 0; --before) begins &= begins - 1;
            if (begins == 0) continue;
            found.first = base + lowest(begins);
            begins &= begins - 1;
        }
        if (begins != 0) found.end = base + lowest(begins);
    }
    return found;
}

// Slots and ends of 32 rows from `base` on, so that a state warp does not wait for them between two tokens.
struct ChainRows {
    int base, slot_of_lane, end_of_lane;

    __device__ __forceinline__ void load(const WkvArgs& p, int row) {
        const int own = min(row + static_cast<int>(threadIdx.x & 31), p.rows - 1);
        base = row, slot_of_lane = static_cast<int>(p.write_slots[own]), end_of_lane = static_cast<int>(p.cu_seqlens[own + 1]);
    }
    __device__ __forceinline__ int slot(int row) const { return __shfl_sync(FULL_MASK, slot_of_lane, row - base); }
    __device__ __forceinline__ int end(int row) const { return __shfl_sync(FULL_MASK, end_of_lane, row - base); }
};

// Waits for all threads of a head.
template <int CTAS>
__device__ __forceinline__ void sync_head() {
    if constexpr (CTAS == 2) {
        cluster::sync();
    } else {
        __syncthreads();
    }
}

template <typename State, int STATE_WARPS, int CTAS, int TOKENS, int VECTOR_WARPS>
__global__ void __launch_bounds__(32 * (STATE_WARPS / CTAS + VECTOR_WARPS), VECTOR_WARPS == 1 ? 4 : STATE_WARPS == 1 ? 3 : STATE_WARPS == 4 ? 2 : 1)
    wkv_sequence_kernel(const WkvArgs p) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    auto& smem = *reinterpret_cast<Smem<State, TOKENS>*>(dynamic);
    constexpr int CARRIERS = STATE_WARPS / CTAS, MAKERS = VECTOR_WARPS * CTAS;  // of this CTA; of the head
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = 2 * lane;
    const int head = blockIdx.x / CTAS, rank = blockIdx.x % CTAS;
    const bool carries_state = warp < CARRIERS;
    const int channel = head * HEAD_SIZE + pair;
    HeadParams params;
    float2 weight, bias;
    if (!carries_state) {
        params = HeadParams(p, channel);
        weight = *reinterpret_cast<const float2*>(p.ln_weight + channel), bias = *reinterpret_cast<const float2*>(p.ln_bias + channel);
    }
    const auto state_of = [&](int64_t slot) {
        constexpr int ITEM = IS_INT8<State> ? 1 : sizeof(State), HEAD_ITEMS = IS_INT8<State> ? 1 : HEAD_SIZE * HEAD_SIZE;
        return reinterpret_cast<State*>(static_cast<unsigned char*>(p.state) + slot * p.slot_stride * ITEM) + head * HEAD_ITEMS;
    };
    const Chain chain = find_chain(p, blockIdx.y);
    if (chain.first == p.rows) return;
    const int64_t start = p.cu_seqlens[chain.first];
    const int count = static_cast<int>(p.cu_seqlens[chain.end] - start), blocks = (count + TOKENS - 1) / TOKENS;
    Carried<State, STATE_WARPS> carried;
    ChainRows rows;
    if (carries_state) {
        rows.load(p, chain.first);
        carried.load(state_of(p.read_slots[chain.first]), smem, rank * CARRIERS + warp, lane);  // an earlier step wrote it
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    if constexpr (CTAS == 2) cluster::sync();  // both have begun
    if (carries_state) {
        int row = chain.first, end = rows.end(row) - static_cast<int>(start);  // of the row, in the chain's tokens
        sync_head<CTAS>();  // the first block's vectors
        for (int i = 0; i < blocks; ++i) {
            auto& block = smem.blocks[i & 1];
            const int tokens = min(TOKENS, count - i * TOKENS);
            float* const own_y = CTAS == 2 ? cluster::peer_pointer(block.y[0], rank) : block.y[0];
            float* const peer_y = CTAS == 2 ? cluster::peer_pointer(block.y[0], rank ^ 1) : own_y;  // of the tokens that the other CTA finishes
            carried.begin(block.tokens[0], CTAS == 1 || rank == 0 ? own_y : peer_y);
#pragma unroll 1
            for (int t = 0; t < tokens; ++t) {
                float* const y = (t / VECTOR_WARPS % CTAS == rank ? own_y : peer_y) + t * HEAD_SIZE;
                carried.step(block.tokens[t], block.tokens[min(t + 1, TOKENS - 1)], y, smem, lane);
                if (i * TOKENS + t + 1 < end) continue;
                carried.store(state_of(rows.slot(row)), smem, lane);
                if (++row == chain.end) break;
                if (row == rows.base + 32) rows.load(p, row);
                end = rows.end(row) - static_cast<int>(start);
            }
            carried.end();
            sync_head<CTAS>();
        }
        return;
    }
    // A warp makes and finishes tokens own, own + MAKERS, ... of a block.
    constexpr int OWN = TOKENS / MAKERS;
    constexpr bool SKIPS = VECTOR_WARPS == 1;  // tokens past the last one: drafts are shorter than a block
    const int own = rank * VECTOR_WARPS + warp - CARRIERS;
    const auto token_of = [&](int i, int n) { return i * TOKENS + own + n * MAKERS; };
    const auto at = [&](int token) { return (start + token) * (p.heads * HEAD_SIZE) + channel; };
    Inputs in[OWN];  // of the next block
    __half2 gates[OWN];  // of the block that is stepped
    // Otherwise they are the last one again: without branches the tokens' latencies overlap.
    const auto load_inputs = [&](int i) {
        if (i >= blocks) return;
#pragma unroll
        for (int n = 0; n < OWN; ++n) in[n].load(p, at(min(token_of(i, n), count - 1)));
    };
    const auto load_gates = [&](int i) {
        if (i >= blocks) return;
#pragma unroll
        for (int n = 0; n < OWN; ++n) gates[n] = *reinterpret_cast<const __half2*>(p.g + at(min(token_of(i, n), count - 1)));
    };
    load_inputs(0);
    for (int i = -1; i <= blocks; ++i) {
        auto& block = smem.blocks[(i + 1) & 1];  // of the block before i and of the next one
        if (i >= 1) {
            float2 out[OWN];
#pragma unroll
            for (int n = 0; n < OWN; ++n) {
                if (SKIPS && token_of(i - 1, n) >= count) break;
                const auto& token = block.tokens[own + n * MAKERS];
                const float2 y = *reinterpret_cast<const float2*>(&block.y[own + n * MAKERS][pair]);
                out[n] = wkv_epilogue(y, token.bonus, token.v(pair), __half22float2(gates[n]), weight, bias);
            }
#pragma unroll
            for (int n = 0; n < OWN; ++n)
                if (token_of(i - 1, n) < count) *reinterpret_cast<__half2*>(p.y + at(token_of(i - 1, n))) = __floats2half2_rn(out[n].x, out[n].y);
            __syncwarp();  // all lanes have read what make() overwrites
        }
        if (i + 1 < blocks) {
#pragma unroll
            for (int n = 0; n < OWN; ++n) {
                if (SKIPS && token_of(i + 1, n) >= count) break;
                block.tokens[own + n * MAKERS].make(params, in[n], pair);
            }
            if constexpr (CTAS == 2) {
#pragma unroll
                for (int n = 0; n < OWN; ++n) block.tokens[own + n * MAKERS].send(rank ^ 1, pair);
            }
        }
        load_inputs(i + 2);
        if (i >= 0) load_gates(i);
        if (i < blocks) sync_head<CTAS>();
    }
}

// TOKENS: of a block; VECTOR_WARPS: that make and finish them.
template <typename State, int STATE_WARPS, int CTAS, int TOKENS = 16, int VECTOR_WARPS = 4>
static int launch_sequence(const WkvArgs& p, void* stream) {
    const auto kernel = wkv_sequence_kernel<State, STATE_WARPS, CTAS, TOKENS, VECTOR_WARPS>;
    constexpr int smem_bytes = static_cast<int>(sizeof(Smem<State, TOKENS>)), THREADS = 32 * (STATE_WARPS / CTAS + VECTOR_WARPS);
    const DeviceInfo& info = device_info();
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    const dim3 grid(p.heads, p.rows);
    const int per_sm = (p.heads * (p.rows - p.continuing) + info.num_sms - 1) / info.num_sms;
    if constexpr (CTAS == 2) {
        launch_clusters(kernel, 2, dim3(2 * p.heads, p.rows), THREADS, max(smem_bytes, min(PADDED_BYTES[0], info.smem_bytes)), stream, p);
    } else if (per_sm <= 2) {
        launch_with_smem(kernel, grid, THREADS, max(smem_bytes, min(PADDED_BYTES[per_sm - 1], info.smem_bytes)), stream, p);
    } else {
        launch_with_smem<VECTOR_WARPS == 1 ? LaunchOrder::OVERLAPPED : LaunchOrder::SERIAL>(kernel, grid, THREADS, smem_bytes, stream, p);
    }
    return launch_result();
}

template <typename State>
static int launch_sequences(const WkvArgs& p, void* stream) {
    const DeviceInfo& info = device_info();
    const int heads = p.heads * (p.rows - p.continuing);
    const bool takes_cluster = info.has_pdl && info.smem_bytes >= static_cast<int>(sizeof(Smem<State, 32>));
    if (2 * heads <= info.num_sms && takes_cluster) return launch_sequence<State, 8, 2, 32>(p, stream);
    if (heads <= info.num_sms) return launch_sequence<State, 8, 1>(p, stream);
    // Drafts are short: four small CTAs per SM hide what one waits for.
    return p.continuing > 0 ? launch_sequence<State, 4, 1, 4, 1>(p, stream) : launch_sequence<State, 4, 1>(p, stream);
}

// state_bytes: per element; 1 for Int8State. The numbers of warps and CTAs change no bit of the result.
RWKV_API int rwkv_wkv_sequence(const WkvArgs* p, int state_bytes, void* stream) {
    WkvArgs with = *p;
    // Layer 0: v + (v - v) * anything, so that no branch keeps tokens apart.
    if (p->v_first == nullptr) with.v_first = with.v_gate = p->v, with.v0 = p->w0;
    if (state_bytes == 1) return launch_sequence<Int8State, 1, 1>(with, stream);
    return state_bytes == 2 ? launch_sequences<__half>(with, stream) : launch_sequences<float>(with, stream);
}
