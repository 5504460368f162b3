// WKV prefill on tensor cores, 16 tokens per chunk.
//
// in     r, w, k, v, a, g, v_gate, v_first  [T, C] fp16
//        constants  [C] fp32 (WkvArgs)
//
// inout  state      [slots, H, 64, 64] fp32, fp16 or Int8State; reads read_slots[row], writes write_slots[row]
//                   a row that continues the one before it reads no slot
//
// out    y          [T, C] fp16
//
// Let P_t be the product of the decays up to and including token t of a chunk; kk, a, b as in kernels/naive.py. Per
// key:
//   A_t = P_{t-1} * a_t    R_t = P_t * r_t    B_t = b_t / P_t    K_t = k_t / P_t
// With S the state at the chunk's start:
//   u_t = S A_t + sum_{s<t}  u_s (B_s . A_t) + v_s (K_s . A_t)
//   y_t = S R_t + sum_{s<=t} u_s (B_s . R_t) + v_s (K_s . R_t)
//   S  <- (S + sum_s u_s B_s^T + v_s K_s^T) * P_last
// With T = (I - [B_s . A_t])^-1 (forward substitution, fp32) the sums over u move into operands independent of S:
//   A' = T A    KA' = T [K_s . A_t]    R' = R + [B_s . R_t] A'    KR' = [K_s . R_t] + [B_s . R_t] KA'
//   u  = S A'^T + V KA'^T              y  = S R'^T + V KR'^T
//
// Precision: operands are multiplied with P relative to the chunk's middle (0.545^8 .. 0.545^-8). What meets the
// state uses P relative to the chunk's start (A', R') or end (B, K), at most 1.
// Registers: a state warp holds 16 values x 64 keys of S in fp32 accumulators; S and u become left operands in place.
//
// Grid: (head, row). Few (head, row) pairs and long rows: a cluster of two CTAs per pair, the second one adds teams.
// Block: four warps that carry the state, and 2 or 4 teams of four warps. In a cluster 3, and the second CTA has four
// teams and no state: teams limit the speed, and five in a CTA get too few registers. Per chunk the state warps
// compute only u, y and the new S. Teams take chunks in turn. They compute the operands before the state is ready, and
// the epilogue (group norm, bonus, gate) after it.
// Shared memory: 60 KB with 2 teams, two CTAs per SM; 118 KB with 4; 193 KB per CTA of a cluster (wkv_chunk_smem.cuh).
// Bound: with few rows the latency of the chain of chunks, else instruction issue. Bytes: 18 * 64 per head and token,
// and the state once in and out. Share of 4.8 TB/s (H200, 64 heads, fp16): 32 rows of 512 tokens 42 %, 8 rows of 512
// 41 %, one row of 4,096 32 %, one row of 512 25 %.
// Made for: heads of 64, rows of any length.
#include "cluster.cuh"
#include "wkv_chunk_operands.cuh"
#include "wkv_chunk_state.cuh"

// Token range of a row.
struct Tokens {
    int64_t start;
    int count;

    __device__ __forceinline__ Tokens(const WkvArgs& p, int row)
        : start(p.cu_seqlens == nullptr ? row : p.cu_seqlens[row]),
          count(p.cu_seqlens == nullptr ? 1 : static_cast<int>(p.cu_seqlens[row + 1] - start)) {}
};

// A chunk of a row or of those that continue it. Each row begins a chunk.
struct Chunk {
    Tokens tokens;
    int row, first;  // first: token of the row
    bool exists = true;

    __device__ __forceinline__ Chunk(const WkvArgs& p, int row) : tokens(p, row), row(row), first(0) {}
    __device__ __forceinline__ void skip(const WkvArgs& p, int chunks) {
        first += chunks * CHUNK;
        while (exists && first >= tokens.count) {
            first -= (tokens.count + CHUNK - 1) / CHUNK * CHUNK;
            exists = continues(p, ++row);
            if (exists) tokens = Tokens(p, row);
        }
    }
};

// The four state warps.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void carry_state(
    const WkvArgs& p, int state_bytes, Smem<TEAMS, PAIRED>& smem, int head, int row) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const auto head_at = [&](int64_t slot) {
        const int64_t elements = state_bytes == 1 ? sizeof(Int8State) : HEAD_SIZE * HEAD_SIZE;
        return static_cast<char*>(p.state) + state_bytes * (slot * p.slot_stride + head * elements);
    };
    float s[8][4];
    int64_t from = p.read_slots[row];
    load_state(head_at(from), state_bytes, s, warp, lane);
    barrier_sync(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    int team = 0;
    uint32_t parity = 0;
    do {
        const int count = Tokens(p, row).count;
        for (int done = 0; done < count; done += CHUNK) {
            if (!PAIRED || team < TEAMS) {
                barrier_sync(full_barrier<TEAMS>(team), 2 * TEAM);
                advance_state(smem.stages[team], smem.scratch[team].y, s, warp * 16, lane);
                barrier_arrive(empty_barrier<TEAMS>(team), 2 * TEAM);
            } else {
                RemoteChunk& chunk = smem.remote[team - TEAMS];
                cluster::wait(&chunk.full, parity);
                advance_state(chunk.stage, chunk.y, s, warp * 16, lane);
                __syncwarp();
                if (lane == 0) cluster::arrive_remote(&smem.used[team - TEAMS], 1);
            }
            if (++team == ALL_TEAMS<TEAMS, PAIRED>) team = 0, parity ^= 1;
        }
        const int64_t to = p.write_slots[row];
        store_state(head_at(to), head_at(from), state_bytes, s, warp, lane);
        __syncwarp();  // the next store reads the scales of int8 states
        from = to;
    } while (continues(p, ++row));
}

// A team. is_remote: the other CTA of the cluster has the state.
template <int TEAMS, bool PAIRED>
__device__ __forceinline__ void make_chunks(
    const WkvArgs& p, Smem<TEAMS, PAIRED>& smem, int head, int row, int team, bool is_remote) {
    const ThreadPosition at(threadIdx.x & (TEAM - 1));
    const int part = (at.warp + team) & 3, barrier = team_barrier(team);  // spreads the warps that compute T over the schedulers
    TeamScratch& scratch = smem.scratch[team];
    ChunkOperands& stage = smem.stages[team];
    const int width = p.heads * HEAD_SIZE;
    // For a chunk: tokens left from this thread's first one on, and that token's offset.
    const auto left_at = [&](const Chunk& chunk) { return chunk.tokens.count - chunk.first - at.token; };
    const auto offset_of = [&](const Chunk& chunk) { return (chunk.tokens.start + chunk.first + at.token) * width + head * HEAD_SIZE + at.channel; };
    Chunk next(p, row);
    next.skip(p, is_remote ? TEAMS + team : team);
    Inputs in;
    if (next.exists) in.load(p, offset_of(next), left_at(next));
    barrier_sync(BLOCK_BARRIER, (1 + TEAMS) * TEAM);
    uint32_t parity = 0;
    while (next.exists) {
        const int64_t from = offset_of(next);
        const int left = left_at(next);
        next.skip(p, ALL_TEAMS<TEAMS, PAIRED>);
        PendingBonus kept;
        make_vectors(smem.constants, in, scratch, stage, kept, at, barrier);
        barrier_sync(barrier, TEAM);
        if (next.exists) in.load(p, offset_of(next), left_at(next));
        multiply_vectors(scratch, part, at.lane);
        barrier_sync(barrier, TEAM);
        finish_operands(scratch, stage, at, part == 3);
        const float(*y)[HEAD_SIZE + 4] = scratch.y;
        if (PAIRED && is_remote) {
            cluster::fence_proxy_async();
            barrier_sync(barrier, TEAM);
            if ((threadIdx.x & (TEAM - 1)) == 0) cluster::send(stage, &smem.remote[team].stage, &smem.remote[team].full, 0);
        } else {
            barrier_arrive(full_barrier<TEAMS>(team), 2 * TEAM);
        }
        uint2 gates[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            gates[i] = i < left ? *reinterpret_cast<const uint2*>(p.g + from + i * width) : make_uint2(0u, 0u);
        }
        if (PAIRED && is_remote) {
            cluster::wait(&smem.used[team], parity);
            y = *cluster::peer_pointer(&smem.remote[team].y, 0);
            parity ^= 1;
        } else {
            barrier_sync(empty_barrier<TEAMS>(team), 2 * TEAM);
        }
        finish_tokens(p, smem.constants, y, kept, gates, from, left, at);
    }
}

// BLOCKS: CTAs per SM.
template <int TEAMS, int BLOCKS, bool PAIRED>
__global__ void __launch_bounds__((1 + TEAMS) * TEAM, BLOCKS) wkv_chunk_kernel(const WkvArgs p, int state_bytes) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    auto& smem = *reinterpret_cast<Smem<TEAMS, PAIRED>*>(dynamic);
    const int rank = PAIRED ? cluster::rank() : 0;
    const int head = PAIRED ? blockIdx.x >> 1 : blockIdx.x, row = blockIdx.y;
    const int team = __shfl_sync(FULL_MASK, static_cast<int>(threadIdx.x / TEAM), 0) - (rank == 0 ? 1 : 0);  // so that nvcc knows it is uniform in a warp
    if (PAIRED) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < FAR_TEAMS<TEAMS, PAIRED>; ++i) cluster::init(&smem.remote[i].full, 1), cluster::init(&smem.used[i], TEAM / 32);
            cluster::publish();
        }
        __syncwarp();
        cluster::sync();
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    if (!continues(p, row)) {  // else the CTA of the row before runs it
        load_constants(p, head, smem.constants);
        if (team < 0) {
            carry_state(p, state_bytes, smem, head, row);
        } else {
            make_chunks(p, smem, head, row, team, rank != 0);
        }
    }
    if (PAIRED) {  // neither CTA exits while the other may access its shared memory
        __syncwarp();
        cluster::sync();
    }
}

template <int TEAMS, int BLOCKS, bool PAIRED>
int launch_kernel(const WkvArgs& p, int state_bytes, void* stream) {
    const auto kernel = wkv_chunk_kernel<TEAMS, BLOCKS, PAIRED>;
    constexpr size_t smem_bytes = sizeof(Smem<TEAMS, PAIRED>);
    constexpr int THREADS = (1 + TEAMS) * TEAM;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    // Serial launch: CTAs that start early would pile up on the first free SMs.
    if (!PAIRED) {
        launch_with_smem<LaunchOrder::SERIAL>(kernel, dim3(p.heads, p.rows), THREADS, smem_bytes, stream, p, state_bytes);
    } else {
        cudaLaunchAttribute pairs = {};
        pairs.id = cudaLaunchAttributeClusterDimension;
        pairs.val.clusterDim.x = 2, pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(2 * p.heads, p.rows);
        config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = smem_bytes;
        config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &pairs;
        config.numAttrs = 1;
        cudaLaunchKernelEx(&config, kernel, p, state_bytes);
    }
    return launch_result();
}

// The choice of kernel changes which team computes a chunk, but no bit of the result.
RWKV_API int rwkv_wkv_chunk(const WkvArgs* args, int state_bytes, int64_t tokens, void* stream) {
    WkvArgs p = *args;
    if (p.v_first == nullptr) p.v_first = p.v_gate = p.v, p.v0 = p.w0;  // layer 0: v + (v - v) * anything
    const DeviceInfo& machine = device_info();
    const auto fits = [&](size_t bytes) { return bytes <= static_cast<size_t>(machine.smem_bytes); };
    const int64_t blocks = static_cast<int64_t>(p.heads) * p.rows, mean = tokens / p.rows;
    const bool clusters = machine.has_pdl && fits(sizeof(Smem<3, true>));  // both need sm_90
    if (clusters && 2 * blocks <= machine.num_sms && mean >= PAIR_TOKENS) {
        return launch_kernel<3, 1, true>(p, state_bytes, stream);
    }
    const bool has_waves = blocks > machine.num_sms && mean < SHORT_TOKENS;
    if (has_waves || !fits(sizeof(Smem<4, false>))) return launch_kernel<2, 2, false>(p, state_bytes, stream);
    return launch_kernel<4, 1, false>(p, state_bytes, stream);
}
