// "rapid": draws a token for each row of logits in one pass over them where the parameters allow, and counts it for
// the penalties. The definition is sampling/naive.py; all state is in device memory by seat, nothing is allocated and the
// host is not asked, so launches can be captured in a graph.
//
// `parts` blocks share a row. Each looks at its part of the logits and leaves its best token, or the maxima and masses of
// its chunks, in device memory; the block that comes last draws, from sm_90 on, where they are a cluster, the first. So rows
// that are done are drawn from while others are still read, and a single row is read by several multiprocessors. A cluster
// also shares the second pass over a row that top_p hardly cuts (rapid_list.cuh).
//
// Bytes: logits once; rows that are cut 8 per chunk of 32 tokens written and read, and some chunks again, or all of the row.
// Shared memory of a block: Shared | uint32 marks[words]
#include <cuda_runtime.h>

#include "early_launch.cuh"
#include "rapid_list.cuh"

namespace sampling {

struct Launch {
  const float* logits;       // [rows, vocab]
  const int32_t* seats;      // [rows]; anything outside 0 .. max_rows-1 is padding
  int64_t* tokens;           // [rows]
  Seat* table;               // [max_rows]
  Entry* entries;            // [max_rows, capacity]
  const uint8_t* penalty_exempt;  // [vocab]
  Chunk* chunks;             // [max_rows, kMaxChunks]
  uint64_t* best;            // [max_rows, kMaxBlocks]
  uint32_t* arrived;         // [max_rows], zero between launches
  int32_t rows, vocab, max_rows, capacity, parts, chunk_batches;
  int32_t clustered;  // the blocks of a row are a cluster
};

// The changed logit of a token with an entry.
__device__ __forceinline__ float value_of_entry(const Row& row, const Seat& seat, const Entry& entry) {
  float value = __fadd_rn(row.logits[entry.token], entry.bias);
  if (seat.penalised && entry.count >= 0.0f)
    value = __fsub_rn(value, __fadd_rn(__fmul_rn(entry.count, seat.frequency), seat.presence));
  return cleaned(value);
}

// An entry's count after this step, if its token is not drawn.
__device__ __forceinline__ float decayed(const Entry& entry, const Seat& seat) {
  return seat.penalised && entry.count >= 0.0f ? __fmul_rn(entry.count, seat.decay) : entry.count;
}

// The changed logits of all entries; their counts decay.
__device__ __forceinline__ void take_entries(Row& row, const Seat& seat) {
  const auto take = [&](int i, Entry& entry) {
    entry = row.entries[i];
    entry.value = value_of_entry(row, seat, entry);
    entry.count = decayed(entry, seat);
    row.entries[i] = entry;
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (static_cast<int>(threadIdx.x) + h * kThreads < row.num_entries) take(threadIdx.x + h * kThreads, row.held[h]);
  Entry entry;
  for (int i = threadIdx.x + kHeld * kThreads; i < row.num_entries; i += kThreads) take(i, entry);
}

// Counts the token, in counts that have decayed.
__device__ inline void count_token(const Row& row, Seat& stored, int token, const uint8_t* penalty_exempt, int capacity) {
  bool known = false;
  const auto look_at = [&](int i, int entry_token, float count) {
    if (entry_token != token) return;
    known = true;
    row.entries[i].count = __fadd_rn(fmaxf(count, 0.0f), penalty_exempt[token] ? 0.0f : 1.0f);
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (static_cast<int>(threadIdx.x) + h * kThreads < row.num_entries)
      look_at(threadIdx.x + h * kThreads, row.held[h].token, row.held[h].count);
  for (int i = threadIdx.x + kHeld * kThreads; i < row.num_entries; i += kThreads)
    look_at(i, row.entries[i].token, row.entries[i].count);
  known = __syncthreads_or(known);
  if (threadIdx.x == 0 && !known && row.num_entries < capacity) {
    row.entries[row.num_entries] = Entry{token, 0.0f, penalty_exempt[token] ? 0.0f : 1.0f, 0.0f};
    stored.num_entries = row.num_entries + 1;
  }
}

// True for the last of the blocks of a row; what the others wrote is visible to it (past the L1 cache).
__device__ __forceinline__ bool is_last_block(uint32_t* arrived, int parts, Shared& shared) {
  __syncthreads();
  if (parts == 1) return true;
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    if (before + 1 == static_cast<uint32_t>(parts)) *arrived = 0;
    shared.reached = static_cast<int>(before);
  }
  __syncthreads();
  return shared.reached == parts - 1;
}

// Looks at a part of a row: leaves chunks, or the best token.
__device__ inline void look(
    Row& row, Range range, const Ring& ring, const Seat& seat, Chunk* chunks, uint64_t* best_of_part,
    Shared& shared, Room& room) {
  if (row.num_entries) {
    mark_entries(row, range, shared.marks());
    row.marks = shared.marks();
  }
  if (seat.kind == kCut) return scan_chunks(row, range, ring, seat, chunks);
  uint64_t best = seat.kind == kGreedy  ? largest_logit(row, range, ring)
                  : seat.kind == kNoise ? best_score<true>(row, range, ring, seat, kBehindAll, &shared.found)
                                        : best_score<false>(row, range, ring, seat, kBehindAll, &shared.found);
  const int first_token = 4 * kBatchQuads * range.first, last_token = 4 * kBatchQuads * range.last;
  for (int i = threadIdx.x; i < row.num_entries; i += kThreads) {
    const Entry entry = row.entries[i];
    if (entry.token < first_token || entry.token >= last_token) continue;
    const float value = value_of_entry(row, seat, entry);
    if (value == minus_infinity()) continue;
    const float score = seat.kind == kGreedy ? value : exact_score(seat, entry.token, value);
    best = larger(best, pair_of(score, entry.token));
  }
  best = max_over_block(best, room);
  if (threadIdx.x == 0) *best_of_part = best;
}

// Draws from what the parts' blocks left. `cluster`: these blocks where they wait for each other.
__device__ inline int draw(
    Row& row, Range all, Range part, const Seat& seat, const Chunk* chunks, const uint64_t* best_of_parts, int parts,
    Parts cluster, Shared& shared, Room& room) {
  if (row.num_entries && (seat.kind == kCut || seat.penalised)) take_entries(row, seat);
  if (seat.kind != kCut) {
    const int lane = threadIdx.x % 32;
    const uint64_t best = max_over_warp(lane < parts ? __ldcg(best_of_parts + lane) : 0);
    return best ? token_of(best) : 0;
  }
  if (row.num_entries) {
    mark_entries(row, all, shared.marks());
    row.marks = shared.marks();
  }
  return draw_cut(row, all, part, seat, chunks, cluster, shared, room);
}

// Blocks of a multiprocessor: as many as its shared memory holds.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

__global__ void __launch_bounds__(kThreads, kBlocks) sample_rows(Launch launch) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  Room room{shared.half, 0};
  const int row_number = blockIdx.x / launch.parts, part = blockIdx.x % launch.parts;
  let_next_start();
  wait_for_inputs();
  Row row;
  row.logits = launch.logits + static_cast<int64_t>(row_number) * launch.vocab, row.vocab = launch.vocab, row.chunk_batches = launch.chunk_batches;
  row.marks = nullptr;
  const int batches = (row.quads() + kBatchQuads - 1) / kBatchQuads;
  const int blocks = (batches + row.chunk_batches - 1) / row.chunk_batches;
  const Range all{0, blocks * row.chunk_batches};
  const Range range{blocks * part / launch.parts * row.chunk_batches, blocks * (part + 1) / launch.parts * row.chunk_batches};
  const Ring ring{reinterpret_cast<Quad*>(shared.ring)};
  ring.begin(row, range);
  const int number = launch.seats[row_number];
  if (number < 0 || number >= launch.max_rows) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (part == 0 && threadIdx.x == 0) launch.tokens[row_number] = 0;
    return;
  }
  row.entries = launch.entries + static_cast<int64_t>(number) * launch.capacity;
  row.num_entries = launch.table[number].num_entries;
  Chunk* chunks = launch.chunks + static_cast<int64_t>(number) * kMaxChunks;
  uint64_t* best_of_parts = launch.best + static_cast<int64_t>(number) * kMaxBlocks;
  look(row, range, ring, launch.table[number], chunks, best_of_parts + part, shared, room);
  const Parts cluster{launch.clustered ? launch.parts : 1};
  if (launch.clustered) {
    cluster.meet();
    if (part > 0) {
      const Seat seat = launch.table[number];
      if (may_ask(seat)) help(row, range, ring, seat, cluster, shared);
      return;
    }
  } else if (!is_last_block(launch.arrived + number, launch.parts, shared)) {
    return;
  }
  const Seat seat = launch.table[number];
  const int token = draw(row, all, range, seat, chunks, best_of_parts, launch.parts, cluster, shared, room);
  if (seat.penalised)
    count_token(row, launch.table[number], token, launch.penalty_exempt, launch.capacity);
  if (threadIdx.x == 0) {
    launch.tokens[row_number] = token;
    launch.table[number].step = seat.step + 1;
  }
}

size_t shared_bytes(int vocab) {
  return sizeof(Shared) + (static_cast<size_t>(vocab) + 127) / 128 * 16;
}

int launch_rows(const Launch& launch, bool early, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = launch.parts, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.rows * launch.parts);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(launch.vocab);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 1 + launch.clustered : 0;
  const int code = cudaLaunchKernelEx(&config, sample_rows, launch);
  return code ? code : cudaGetLastError();
}

// Logits become -inf where the bit of a row's mask is 0; a thread takes four tokens. Masks mostly forbid nearly all of
// a row or hardly anything of it: what is allowed is neither read nor written.
__global__ void __launch_bounds__(kThreads) forbid_tokens(float* logits, const uint32_t* masks, int vocab, int words) {
  const int64_t row = blockIdx.y;
  const int quad = blockIdx.x * kThreads + threadIdx.x, first = 4 * quad;
  if (first >= vocab) return;
  const uint32_t bits = masks[row * words + quad / 8] >> quad % 8 * 4 & 15u;
  if (bits == 15u) return;
  float* at = logits + row * vocab + first;
  if (bits == 0 && vocab % 4 == 0) {
    *reinterpret_cast<float4*>(at) = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    return;
  }
  for (int i = 0; i < 4 && first + i < vocab; ++i)
    if (!(bits >> i & 1)) at[i] = -INFINITY;
}

// Counts the tokens begins[r] .. begins[r + 1] - 1 of the seat of each row r as if they had been drawn.
__global__ void __launch_bounds__(kThreads) follow_runs(Launch launch, const int32_t* begins, const int32_t* tokens) {
  const int number = launch.seats[blockIdx.x], begin = begins[blockIdx.x], end = begins[blockIdx.x + 1];
  Seat& seat = launch.table[number];
  Entry* entries = launch.entries + static_cast<int64_t>(number) * launch.capacity;
  int num_entries = seat.num_entries;
  for (int at = begin; at < end && seat.penalised; ++at) {
    const int token = tokens[at];
    const float more = launch.penalty_exempt[token] ? 0.0f : 1.0f;
    bool known = false;
    for (int i = threadIdx.x; i < num_entries; i += kThreads) {
      float count = decayed(entries[i], seat);
      if (entries[i].token == token) known = true, count = __fadd_rn(fmaxf(count, 0.0f), more);
      entries[i].count = count;
    }
    known = __syncthreads_or(known);
    if (known || num_entries == launch.capacity) continue;
    if (threadIdx.x == 0) entries[num_entries] = Entry{token, 0.0f, more, 0.0f};
    ++num_entries;
    __syncthreads();
  }
  if (threadIdx.x) return;
  seat.num_entries = num_entries;
  seat.step += end - begin;
}

}  // namespace sampling

#define EXPORT extern "C" __attribute__((visibility("default")))

// Once per device, before the first launch: makes room for the vocabulary. A CUDA error code.
EXPORT int rapid_prepare(int32_t vocab) {
  const int bytes = static_cast<int>(sampling::shared_bytes(vocab));
  return cudaFuncSetAttribute(sampling::sample_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// `processors`: multiprocessors of the device; `early`: it can start a kernel before the one before it has ended.
// A CUDA error code.
EXPORT int rapid_sample(const sampling::Launch* launch, int32_t processors, int32_t early, void* stream) {
  using namespace sampling;
  Launch sized = *launch;
  const int batches = ((sized.vocab + 3) / 4 + kBatchQuads - 1) / kBatchQuads;
  sized.chunk_batches = (batches + kMaxBlocks - 1) / kMaxBlocks;
  if (sized.chunk_batches < 2) sized.chunk_batches = 2;
  const int blocks = (batches + sized.chunk_batches - 1) / sized.chunk_batches;
  if (sized.parts == 0) {
    sized.parts = 1;
    while (2 * sized.parts <= blocks && 2 * sized.rows * sized.parts <= processors) sized.parts *= 2;
  }
  if (sized.parts > blocks) sized.parts = blocks;
  sized.clustered = early && sized.parts > 1;
  return launch_rows(sized, early, static_cast<cudaStream_t>(stream));
}

// logits [rows, vocab] fp32; masks [rows, ceil(vocab / 32)], bit j % 32 of word j / 32 set where token j is allowed.
// A CUDA error code.
EXPORT int rapid_forbid(float* logits, const uint32_t* masks, int32_t rows, int32_t vocab, void* stream) {
  using namespace sampling;
  const dim3 grid((vocab + 4 * kThreads - 1) / (4 * kThreads), rows);
  forbid_tokens<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(logits, masks, vocab, (vocab + 31) / 32);
  return cudaGetLastError();
}

// Rows of `launch` by seat; begins [rows + 1] say which of `tokens` are whose. A CUDA error code.
EXPORT int rapid_follow(const sampling::Launch* launch, const int32_t* begins, const int32_t* tokens, void* stream) {
  using namespace sampling;
  follow_runs<<<launch->rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch, begins, tokens);
  return cudaGetLastError();
}
