// WKV of whole rows on tensor cores, 16 tokens at a time: one block per (head, row).
//
// Within a chunk let P_t be the product of the decays up to and with token t, and with kk, a, b as in naive.py:
//     A_t = P_{t-1} * a_t   R_t = P_t * r_t   B_t = b_t / P_t   K_t = k_t / P_t        (per key)
//     u_t = S A_t + sum_{s<t}  u_s (B_s.A_t) + v_s (K_s.A_t)                           S: the state at the chunk's start
//     y_t = S R_t + sum_{s<=t} u_s (B_s.R_t) + v_s (K_s.R_t)
//     S  <- (S + sum_s u_s B_s^T + v_s K_s^T) * P_last
// With T = (I - [B_s.A_t])^-1, a forward substitution in fp32, the sums over u go into operands that know nothing of S:
//     A' = T A   KA' = T [K_s.A_t]   R' = R + [B_s.R_t] A'   KR' = [K_s.R_t] + [B_s.R_t] KA'
//     u = S A'^T + V KA'^T   y = S R'^T + V KR'^T
//
// Four warps carry the state, and per chunk have only these two lines and the state's own left to do. Teams of four warps
// take turns in making the chunks' operands ahead of them, and in finishing y (group norm, bonus, gate) behind them. The
// products among operands take P relative to the chunk's middle, so that it stays within 0.545^8 .. 0.545^-8; what meets the
// state takes it relative to the chunk's start (A', R') or end (B, K), where it is at most 1.
//
// A warp of the state owns 16 values: their rows of S (fp32) are the accumulators of m16n8k16 (rows: values, columns: keys),
// and S and u turn from accumulators into left operands without leaving the registers. A team's operands A', R' are
// accumulators [key or s][token].
// Bytes: 9 x 128 per head and token, the state once in and out.
#include "pair.cuh"
#include "wkv_chunk_operands.cuh"
#include "wkv_chunk_state.cuh"

// A row's tokens.
struct Tokens {
    int64_t start;
    int count;

    __device__ __forceinline__ Tokens(const WkvArgs& p, int row)
        : start(p.cu_seqlens == nullptr ? row : p.cu_seqlens[row]),
          count(p.cu_seqlens == nullptr ? 1 : static_cast<int>(p.cu_seqlens[row + 1] - start)) {}
};

// The warps of the state.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void carry_state(
    const WkvArgs& p, int state_bytes, Shared<TEAMS, PAIRED>& sh, int head, int row) {
    constexpr int OWN = PAIRED ? TEAMS - 1 : TEAMS, ALL = PAIRED ? OWN + TEAMS : OWN;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const auto head_at = [&](int64_t slot) {
        const int64_t elements = state_bytes == 1 ? sizeof(CodedState) : HEAD * HEAD;
        return static_cast<char*>(p.state) + state_bytes * (slot * p.slot_stride + head * elements);
    };
    float s[8][4];
    load_state(head_at(p.read_slots[row]), state_bytes, s, warp, lane);
    const int count = Tokens(p, row).count;
    meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    int team = 0;
    uint32_t parity = 0;
    for (int done = 0; done < count; done += CHUNK) {
        if (!PAIRED || team < OWN) {
            meet(made_barrier<TEAMS>(team), 2 * TEAM);
            advance(sh.stages[team], sh.scratch[team].y, s, warp * 16, lane);
            pass(used_barrier<TEAMS>(team), 2 * TEAM);
        } else {
            Guest& guest = sh.guests[team - OWN];
            pair::wait(&guest.made, parity);
            advance(guest.stage, guest.y, s, warp * 16, lane);
            __syncwarp();
            if (lane == 0) pair::arrive_there(&sh.used[team - OWN], 1);
        }
        if (++team == ALL) team = 0, parity ^= 1;
    }
    store_state(head_at(p.write_slots[row]), head_at(p.read_slots[row]), state_bytes, s, warp, lane);
}

// A team of this block. `guest`: the other block has the state.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void make_chunks(
    const WkvArgs& p, Shared<TEAMS, PAIRED>& sh, int head, int row, int team, bool guest) {
    constexpr int STEP = CHUNK * (PAIRED ? 2 * TEAMS - 1 : TEAMS);
    const Place at(threadIdx.x & (TEAM - 1));
    const int part = (at.warp + team) & 3, barrier = team_barrier(team);  // T's warps of all teams on different schedulers
    Scratch& scratch = sh.scratch[team];
    Stage& stage = sh.stages[team];
    const Tokens tokens(p, row);
    const int width = p.heads * HEAD;
    const int64_t begin = tokens.start * width + head * HEAD;
    // Of the chunk that begins with this token of the row: tokens from this thread's first one on, and where that is.
    const auto left_at = [&](int chunk) { return tokens.count - chunk - at.token; };
    const auto from = [&](int chunk) { return begin + static_cast<int64_t>(chunk + at.token) * width + at.channel; };
    int chunk = (guest ? TEAMS - 1 + team : team) * CHUNK;
    Inputs in;
    if (chunk < tokens.count) in.load(p, from(chunk), left_at(chunk));
    meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    uint32_t parity = 0;
    for (; chunk < tokens.count; chunk += STEP) {
        Kept kept;
        make_vectors(sh.constants, in, scratch, stage, kept, at, barrier);
        meet(barrier, TEAM);
        if (chunk + STEP < tokens.count) in.load(p, from(chunk + STEP), left_at(chunk + STEP));
        multiply_vectors(scratch, part, at.lane);
        meet(barrier, TEAM);
        finish_operands(scratch, stage, at, part == 3);
        const float(*y)[HEAD + 4] = scratch.y;
        if (PAIRED && guest) {
            pair::let_copy();
            meet(barrier, TEAM);
            if ((threadIdx.x & (TEAM - 1)) == 0) pair::send(stage, &sh.guests[team].stage, &sh.guests[team].made, 0);
        } else {
            pass(made_barrier<TEAMS>(team), 2 * TEAM);
        }
        uint2 gates[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gates[i] = i < left_at(chunk) ? *reinterpret_cast<const uint2*>(p.g + from(chunk) + i * width) : make_uint2(0u, 0u);
        }
        if (PAIRED && guest) {
            pair::wait(&sh.used[team], parity);
            y = *pair::twin_pointer(&sh.guests[team].y, 0);
            parity ^= 1;
        } else {
            meet(used_barrier<TEAMS>(team), 2 * TEAM);
        }
        finish_tokens(p, sh.constants, y, kept, gates, from(chunk), left_at(chunk), at);
    }
}

// BLOCKS: how many of these a processor is to hold.
template <int TEAMS, int BLOCKS, bool PAIRED>
__global__ void __launch_bounds__((1 + TEAMS) * TEAM, BLOCKS) wkv_chunk_kernel(const WkvArgs p, int state_bytes) {
    extern __shared__ __align__(16) unsigned char bytes[];
    auto& sh = *reinterpret_cast<Shared<TEAMS, PAIRED>*>(bytes);
    const int rank = PAIRED ? pair::rank() : 0;
    const int head = PAIRED ? blockIdx.x >> 1 : blockIdx.x, row = blockIdx.y;
    const int team = __shfl_sync(FULL, static_cast<int>(threadIdx.x / TEAM), 0) - 1;  // so that it is known to be a warp's
    if (PAIRED) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < TEAMS; ++i) pair::init(&sh.guests[i].made, 1), pair::init(&sh.used[i], TEAM / 32);
            pair::publish();
        }
        __syncwarp();
        pair::meet_all();
    }
    let_next_start();
    wait_for_inputs();
    if (team < 0) {
        load_constants(p, head, sh.constants);
        if (rank == 0) {
            carry_state(p, state_bytes, sh, head, row);
        } else {
            meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
        }
    } else if (PAIRED && rank == 0 && team == TEAMS - 1) {
        meet(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    } else {
        make_chunks(p, sh, head, row, team, rank != 0);
    }
    if (PAIRED) {  // neither leaves while the other may reach for it
        __syncwarp();
        pair::meet_all();
    }
}

template <int TEAMS, int BLOCKS, bool PAIRED>
int launch_kernel(const WkvArgs& p, int state_bytes, void* stream) {
    const auto kernel = wkv_chunk_kernel<TEAMS, BLOCKS, PAIRED>;
    constexpr size_t shared_bytes = sizeof(Shared<TEAMS, PAIRED>);
    constexpr int THREADS = (1 + TEAMS) * TEAM;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[this_device()]) {
        const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    // Neither comes up before the kernel before has ended: blocks that come early pile up on the first free processors.
    if (!PAIRED) {
        launch_with_shared<Start::SPREAD>(kernel, dim3(p.heads, p.rows), THREADS, shared_bytes, stream, p, state_bytes);
    } else {
        cudaLaunchAttribute pairs = {};
        pairs.id = cudaLaunchAttributeClusterDimension;
        pairs.val.clusterDim.x = 2, pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(2 * p.heads, p.rows);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &pairs;
        config.numAttrs = 1;
        cudaLaunchKernelEx(&config, kernel, p, state_bytes);
    }
    return launch_result();
}

// Which of them runs changes who makes a chunk, and no bit of what comes out.
RWKV_API int rwkv_wkv_chunk(const WkvArgs* args, int state_bytes, int64_t tokens, void* stream) {
    WkvArgs p = *args;
    if (p.v_first == nullptr) p.v_first = p.v_gate = p.v, p.v0 = p.w0;  // the first layer: v + (v - v) * anything
    const Machine& machine = this_machine();
    const auto fits = [&](size_t bytes) { return bytes <= static_cast<size_t>(machine.shared_bytes); };
    const int64_t blocks = static_cast<int64_t>(p.heads) * p.rows, mean = tokens / p.rows;
    const bool clusters = machine.early_launch && fits(sizeof(Shared<3, true>));  // both came with sm_90
    if (clusters && 2 * blocks <= machine.processors && mean >= PAIR_TOKENS) {
        return launch_kernel<3, 1, true>(p, state_bytes, stream);
    }
    const bool one_behind_another = blocks > machine.processors && mean < SHORT_TOKENS;
    if (one_behind_another || !fits(sizeof(Shared<4, false>))) return launch_kernel<2, 2, false>(p, state_bytes, stream);
    return launch_kernel<4, 1, false>(p, state_bytes, stream);
}
