// Sampler "rapid": samples one token per row in one pass over the logits if the parameters allow, and counts it for
// penalties. Definition: sampling/naive.py.
//
// in     logits     [rows, vocab] fp32, read-only
//        req_slots  [rows] int32; a number outside 0 .. max_rows - 1 is padding
//
// inout  table      [max_rows] SlotState: parameters and step
//        entries    [max_rows, capacity] Entry: tokens with a bias or a count
//
// out    tokens     [rows] int64
//
// All state is in device memory per request slot. Nothing is allocated and the host is not read, so launches can be
// captured in a graph.
// Each CTA scans its split and leaves its best token, or maxima and masses of its chunks, in device memory. The last
// CTA of a row samples; from sm_90 on the splits are a cluster and its first CTA samples. So finished rows are sampled
// while others are scanned, and several SMs scan a single row. A cluster also shares the second pass over a row that
// top_p hardly truncates (rapid_list.cuh).
//
// Grid: rows x splits.
// Block: 256 threads.
// Shared memory: up to 75 KB, so that three CTAs fit an SM; Shared, then marks [vocab / 32] uint32.
// Bound: memory; logits once, 4 vocab bytes per row. Truncated rows: 8 bytes per chunk of 32 tokens, and some chunks or
// the whole row again. Share of 4.8 TB/s (H200, 320 rows): greedy 65 %, no truncation 35 %, top_k 50 with top_p 0.6
// 43 %, top_p 0.9 19 %. One row: latency, 3 to 24 us.
// Made for: vocabularies of 65,536, 1 to 1,000 rows.
//
// apply_masks    logits [rows, vocab] fp32 = -inf where masks [rows, vocab / 32] int32 has a 0. Grid (vocab / 1,024,
//                rows), 256 threads, no shared memory. Bound: memory, 4 bytes per forbidden token; 320 rows 70 %.
// append_tokens  counts tokens of rows as if they had been sampled. One CTA of 256 threads per row, no shared memory.
//                Bound: latency of one pass over a slot's entries per token, 3.3 us for 4 tokens. With `sources` it
//                first copies a slot of another table, so that rows are sampled ahead and their own slots stay.
#include <cuda_runtime.h>

#include "programmatic_launch.cuh"
#include "rapid_launch.cuh"
#include "rapid_list.cuh"

namespace sampling {

// The adjusted logit of a token with an entry.
__device__ __forceinline__ float value_of_entry(const Row& row, const SlotState& slot, const Entry& entry) {
  if (slot.filtered) return cleaned(row.logits[entry.token]);
  float value = __fadd_rn(row.logits[entry.token], entry.bias);
  if (slot.penalised && entry.count >= 0.0f)
    value = __fsub_rn(value, __fadd_rn(__fmul_rn(entry.count, slot.frequency), slot.presence));
  return cleaned(value);
}

// An entry's count after this step, unless its token is sampled.
__device__ __forceinline__ float decayed(const Entry& entry, const SlotState& slot) {
  return slot.penalised && entry.count >= 0.0f ? __fmul_rn(entry.count, slot.decay) : entry.count;
}

// Computes the adjusted logits of all entries and decays their counts.
__device__ __forceinline__ void take_entries(Row& row, const SlotState& slot) {
  const auto take = [&](int i, Entry& entry) {
    entry = row.entries[i];
    entry.value = value_of_entry(row, slot, entry);
    entry.count = decayed(entry, slot);
    row.entries[i] = entry;
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (static_cast<int>(threadIdx.x) + h * kThreads < row.num_entries) take(threadIdx.x + h * kThreads, row.held[h]);
  Entry entry;
  for (int i = threadIdx.x + kHeld * kThreads; i < row.num_entries; i += kThreads) take(i, entry);
}

// Counts the sampled token; all counts have decayed before.
__device__ inline void count_token(const Row& row, SlotState& stored, int token, const uint8_t* penalty_exempt, int capacity) {
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

// True in the last CTA of a row; the others' writes are visible to it, past L1.
__device__ __forceinline__ bool is_last_block(uint32_t* arrived, int splits, Shared& shared) {
  __syncthreads();
  if (splits == 1) return true;
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    if (before + 1 == static_cast<uint32_t>(splits)) *arrived = 0;
    shared.reached = static_cast<int>(before);
  }
  __syncthreads();
  return shared.reached == splits - 1;
}

// Scans a split of a row: leaves chunks, or the best token.
__device__ inline void scan_row(
    Row& row, Range range, const Ring& ring, const SlotState& slot, Chunk* chunks, uint64_t* best_of_split,
    Shared& shared, ReduceBuffers& buffers) {
  if (row.num_entries) {
    mark_entries(row, range, shared.marks());
    row.marks = shared.marks();
  }
  if (slot.kind == kTruncated) return scan_chunks(row, range, ring, slot, chunks);
  uint64_t best = slot.kind == kGreedy  ? largest_logit(row, range, ring)
                  : slot.kind == kNoise ? best_score<true>(row, range, ring, slot, kAfterAll, &shared.found)
                                        : best_score<false>(row, range, ring, slot, kAfterAll, &shared.found);
  const int first_token = 4 * kBatchQuads * range.first, last_token = 4 * kBatchQuads * range.last;
  for (int i = threadIdx.x; i < row.num_entries; i += kThreads) {
    const Entry entry = row.entries[i];
    if (entry.token < first_token || entry.token >= last_token) continue;
    const float value = value_of_entry(row, slot, entry);
    if (value == minus_infinity()) continue;
    const float score = slot.kind == kGreedy ? value : exact_score(slot, entry.token, value);
    best = larger(best, pair_of(score, entry.token));
  }
  best = max_over_block(best, buffers);
  if (threadIdx.x == 0) *best_of_split = best;
}

// Samples from the results of the splits. cluster: these CTAs, where they wait for each other.
__device__ inline int sample_row(
    Row& row, Range all, Range split, const SlotState& slot, const Chunk* chunks, const uint64_t* best_of_splits, int splits,
    RowCluster cluster, Shared& shared, ReduceBuffers& buffers) {
  if (row.num_entries && (slot.kind == kTruncated || slot.penalised)) take_entries(row, slot);
  if (slot.kind != kTruncated) {
    const int lane = threadIdx.x % 32;
    const uint64_t best = max_over_warp(lane < splits ? __ldcg(best_of_splits + lane) : 0);
    return best ? token_of(best) : 0;
  }
  if (row.num_entries) {
    mark_entries(row, all, shared.marks());
    row.marks = shared.marks();
  }
  return sample_truncated(row, all, split, slot, chunks, cluster, shared, buffers);
}

__global__ void __launch_bounds__(kThreads, kBlocks) sample_rows(Launch launch) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  ReduceBuffers buffers{shared.half, 0};
  const int row_number = blockIdx.x / launch.splits, split = blockIdx.x % launch.splits;
  allow_next_kernel();
  wait_for_previous_kernel();
  Row row;
  row.logits = launch.logits + static_cast<int64_t>(row_number) * launch.vocab, row.vocab = launch.vocab, row.chunk_batches = launch.chunk_batches;
  row.marks = nullptr;
  const int batches = (row.quads() + kBatchQuads - 1) / kBatchQuads;
  const int blocks = (batches + row.chunk_batches - 1) / row.chunk_batches;
  const Range all{0, blocks * row.chunk_batches};
  const Range range{blocks * split / launch.splits * row.chunk_batches, blocks * (split + 1) / launch.splits * row.chunk_batches};
  const Ring ring{reinterpret_cast<Quad*>(shared.ring)};
  ring.begin(row, range);
  const int number = launch.req_slots[row_number];
  if (number < 0 || number >= launch.max_rows) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (split == 0 && threadIdx.x == 0) launch.tokens[row_number] = 0;
    return;
  }
  row.entries = launch.entries + static_cast<int64_t>(number) * launch.capacity;
  row.num_entries = launch.table[number].num_entries;
  Chunk* chunks = launch.chunks + static_cast<int64_t>(number) * kMaxChunks;
  uint64_t* best_of_splits = launch.best + static_cast<int64_t>(number) * kMaxBlocks;
  const int chosen = launch.table[number].filtered ? launch.filters[number].chosen : -1;
  if (chosen >= 0) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (split > 0) return;
  } else {
    scan_row(row, range, ring, launch.table[number], chunks, best_of_splits + split, shared, buffers);
  }
  const RowCluster cluster{launch.clustered ? launch.splits : 1};
  if (chosen >= 0) {
    if (row.num_entries && launch.table[number].penalised) take_entries(row, launch.table[number]);
  } else if (launch.clustered) {
    cluster.sync();
    if (split > 0) {
      const SlotState slot = launch.table[number];
      if (may_need_assist(slot)) assist(row, range, ring, slot, cluster, shared);
      return;
    }
  } else if (!is_last_block(launch.arrived + number, launch.splits, shared)) {
    return;
  }
  const SlotState slot = launch.table[number];
  const int token = chosen >= 0 ? chosen : sample_row(row, all, range, slot, chunks, best_of_splits, launch.splits, cluster, shared, buffers);
  if (slot.penalised)
    count_token(row, launch.table[number], token, launch.penalty_exempt, launch.capacity);
  if (threadIdx.x == 0) {
    launch.tokens[row_number] = token;
    launch.table[number].step = slot.step + 1;
    if (slot.filtered)
      remember(launch.filters[number], launch.history + static_cast<int64_t>(number) * kMaxWindow, token, row.logits[token]);
  }
}

size_t smem_bytes(int vocab) {
  return sizeof(Shared) + (static_cast<size_t>(vocab) + 127) / 128 * 16;
}

int launch_rows(const Launch& launch, bool has_pdl, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = launch.splits, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.rows * launch.splits);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = smem_bytes(launch.vocab);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = has_pdl ? 1 + launch.clustered : 0;
  const int code = cudaLaunchKernelEx(&config, sample_rows, launch);
  return code ? code : cudaGetLastError();
}

// Sets logits to -inf where the mask bit is 0; four tokens per thread. Masks mostly forbid nearly all of a row or
// almost nothing. Allowed tokens are neither read nor written.
__global__ void __launch_bounds__(kThreads) apply_masks_kernel(float* logits, const uint32_t* masks, int vocab, int words) {
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

// Slots to copy first: row r's slot becomes a copy of sources[r]. Null: none is copied.
struct Sources {
  const int32_t* req_slots;
  const SlotState* table;
  const Entry* entries;
};

// Counts tokens begins[r] .. begins[r + 1] - 1 of row r's slot as if they had been sampled.
__global__ void __launch_bounds__(kThreads) append_tokens_kernel(
    Launch launch, Sources sources, const int32_t* begins, const int32_t* tokens) {
  const int number = launch.req_slots[blockIdx.x], begin = begins[blockIdx.x], end = begins[blockIdx.x + 1];
  SlotState& slot = launch.table[number];
  Entry* entries = launch.entries + static_cast<int64_t>(number) * launch.capacity;
  if (sources.req_slots) {
    const int source = sources.req_slots[blockIdx.x];
    const Entry* from = sources.entries + static_cast<int64_t>(source) * launch.capacity;
    for (int i = threadIdx.x; i < sources.table[source].num_entries; i += kThreads) entries[i] = from[i];
    if (threadIdx.x == 0) slot = sources.table[source];
    __syncthreads();
  }
  int num_entries = slot.num_entries;
  for (int at = begin; at < end && slot.penalised; ++at) {
    const int token = tokens[at];
    const float more = launch.penalty_exempt[token] ? 0.0f : 1.0f;
    bool known = false;
    for (int i = threadIdx.x; i < num_entries; i += kThreads) {
      float count = decayed(entries[i], slot);
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
  slot.num_entries = num_entries;
  slot.step += end - begin;
  for (int at = begin; at < end && slot.filtered; ++at)
    remember(launch.filters[number], launch.history + static_cast<int64_t>(number) * kMaxWindow, tokens[at], minus_infinity());
}

}  // namespace sampling

#define EXPORT extern "C" __attribute__((visibility("default")))

// Raises the kernel's shared memory limit. Call once per device. Returns a CUDA error code.
EXPORT int rapid_prepare(int32_t vocab) {
  const int bytes = static_cast<int>(sampling::smem_bytes(vocab));
  return cudaFuncSetAttribute(sampling::sample_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// num_sms: SMs of the device. has_pdl: programmatic dependent launch is available. Returns a CUDA error code.
EXPORT int rapid_sample(const sampling::Launch* launch, int32_t num_sms, int32_t has_pdl, void* stream) {
  using namespace sampling;
  Launch sized = *launch;
  const int batches = ((sized.vocab + 3) / 4 + kBatchQuads - 1) / kBatchQuads;
  sized.chunk_batches = chunk_batches_of(sized.vocab);
  const int blocks = (batches + sized.chunk_batches - 1) / sized.chunk_batches;
  if (sized.splits == 0) {
    sized.splits = 1;
    while (2 * sized.splits <= blocks && 2 * sized.rows * sized.splits <= num_sms) sized.splits *= 2;
  }
  if (sized.splits > blocks) sized.splits = blocks;
  sized.clustered = has_pdl && sized.splits > 1;
  return launch_rows(sized, has_pdl, static_cast<cudaStream_t>(stream));
}

// logits [rows, vocab] fp32; masks [rows, ceil(vocab / 32)], bit j % 32 of word j / 32 is set if token j is allowed.
// Returns a CUDA error code.
EXPORT int rapid_apply_masks(float* logits, const uint32_t* masks, int32_t rows, int32_t vocab, void* stream) {
  using namespace sampling;
  const dim3 grid((vocab + 4 * kThreads - 1) / (4 * kThreads), rows);
  apply_masks_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(logits, masks, vocab, (vocab + 31) / 32);
  return cudaGetLastError();
}

// Rows of `launch`; begins [rows + 1] delimits each row's `tokens`. source_slots [rows]: slots of `source_table` to copy
// first, or null. Returns a CUDA error code.
EXPORT int rapid_append_tokens(const sampling::Launch* launch, const int32_t* begins, const int32_t* tokens,
                               const int32_t* source_slots, const void* source_table, const void* source_entries,
                               void* stream) {
  using namespace sampling;
  const Sources sources{source_slots, static_cast<const SlotState*>(source_table),
                        static_cast<const Entry*>(source_entries)};
  append_tokens_kernel<<<launch->rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch, sources, begins, tokens);
  return cudaGetLastError();
}
