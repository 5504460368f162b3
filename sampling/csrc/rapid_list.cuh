// Samples truncated rows: from a short list in shared memory, or by a second pass over the row.
#pragma once

#include "rapid_sample.cuh"

namespace sampling {

constexpr int kListCapacity = 4864;  // capacity of the list: three CTAs fit an SM
constexpr int kIndexBits = 13;  // index in the list
constexpr int kMaxTopK = 1024;   // largest top_k for which the list is tried
constexpr int kBins = kThreads;
constexpr int kMassBins = 4 * kThreads;
constexpr int kFinalists = kThreads;  // one per thread
constexpr int kExpected = 64;  // expected finalists, at most
constexpr uint32_t kLongList = 3500;  // tokens; with a longer list a second pass over the row is faster

// Result of the first pass, per chunk.
struct Chunk {
  float largest;
  float mass;  // relative to `largest`
};

// Candidate tokens.
struct List {
  float value[kListCapacity + 4];  // [kListCapacity] receives entries that do not fit
  int32_t token[kListCapacity + 4];
  float score[kListCapacity];
};

// Result of the pass for finalists, per split.
struct Finalists {
  uint32_t mass[kMassBins];  // mass of tokens by value, units of 2^-31 of the row's; in the first CTA then of those in later bins
  uint64_t pair[kFinalists];  // (score, token), 0: none
  float value[kFinalists];
  int32_t token[kFinalists];
  float max_value;  // maximum and mass of the row
  uint64_t row_mass;
  int32_t size, is_requested;
};

// Shared memory of a CTA, followed by one bit per token.
struct __align__(16) Shared {
  union {
    List list;
    struct {
      unsigned char ring[kRingBytes];  // while batches are read in order
      Finalists finalists;
    };
  };
  uint16_t chunks[kMaxChunks];  // chunks to read again
  uint32_t count[kBins];  // chunk maxima by value
  uint32_t mass[kBins];  // their mass, units of 2^-20
  uint32_t extra[kBins];  // mass of tokens with entries
  uint64_t half[2][2 * kWarps];
  uint32_t found;
  int32_t size, num_chunks, chosen, reached, before;

  __device__ uint32_t* marks() { return reinterpret_cast<uint32_t*>(this + 1); }
};

// First pass over a range of a truncated row.
__device__ inline void scan_chunks(
    const Row& row, Range range, const Ring& ring, const SlotState& slot, Chunk* chunks) {
  const float scale2 = slot.scale * kLog2e;
  const bool with_mass = slot.top_p < 1;
  Chunk chunk{minus_infinity(), 0.0f};
  int left = row.chunk_batches, number = range.first / row.chunk_batches * kThreads + threadIdx.x;
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    if (row.marks || !(batch.largest() <= kMaxLogit)) clean(row, batch);
    const float before = chunk.largest;
    chunk.largest = fmaxf(before, batch.largest());
    if (with_mass && chunk.largest > minus_infinity()) {
      const auto sum_up = [&] {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4 * kBatch; ++i) sum[i % 4] += mass_of(batch.value[i], chunk.largest, scale2);
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
      };
      float sum = sum_up();
      if (sum != sum) clean(row, batch), sum = sum_up();  // NaN in the batch
      chunk.mass = chunk.mass * mass_of(before, chunk.largest, scale2) + sum;
    }
    if (--left) return;
    chunks[number] = chunk;
    chunk = Chunk{minus_infinity(), 0.0f}, left = row.chunk_batches, number += kThreads;
  });
}

// A thread's chunks of a row, and totals.
struct Summary {
  float largest[kMaxBlocks];
  uint32_t finite;  // chunks with a finite maximum
  float max_value, min_chunk_max;  // of all tokens; of the finite chunk maxima
  uint64_t mass;
};

__device__ __forceinline__ Summary summarise(
    const Row& row, int blocks, const SlotState& slot, const Chunk* chunks, ReduceBuffers& buffers) {
  const float scale2 = slot.scale * kLog2e;
  Summary all;
  float mass[kMaxBlocks];
  TwoKeys ends{0, 0};
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    all.largest[b] = minus_infinity(), mass[b] = 0.0f;
    if (b < blocks) {
      const float2 own = __ldcg(reinterpret_cast<const float2*>(chunks) + b * kThreads + threadIdx.x);
      all.largest[b] = own.x, mass[b] = own.y;
    }
    ends.a = max(ends.a, ordered(all.largest[b]));
    if (all.largest[b] >= kLowest) ends.b = max(ends.b, ~ordered(all.largest[b]));
  }
  for_each_entry(row, [&](int, float value) { ends.a = max(ends.a, ordered(value)); });
  ends = max_over_block(ends, buffers);
  all.max_value = value_of(ends.a), all.min_chunk_max = value_of(~ends.b);
  Tally tally{0, 0};
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    tally.count += all.largest[b] >= kLowest;
    if (mass[b] > 0.0f) tally.mass += to_fixed(mass[b] * mass_of(all.largest[b], all.max_value, scale2));
  }
  if (slot.top_p < 1)
    for_each_entry(row, [&](int, float value) {
      if (value > minus_infinity()) tally.mass += to_fixed(mass_of(value, all.max_value, scale2));
    });
  tally = sum_over_block(tally, buffers);
  all.mass = tally.mass, all.finite = tally.count;
  return all;
}

// Equal-width bins; larger values are in the same or a later bin.
struct Bins {
  float low, per_value;

  __device__ Bins(float low, float high) : low(low), per_value(kBins / (high - low)) {}
  __device__ int of(float value) const { return min(max(static_cast<int>((value - low) * per_value), 0), kBins - 1); }
};

// The least and largest value in the chosen bin.
__device__ __forceinline__ TwoKeys ends_of_bin(
    const Summary& all, float low, float high, const Bins& bins, int chosen, ReduceBuffers& buffers) {
  TwoKeys ends{0, 0};
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    const float value = all.largest[b];
    if (!(value >= low && value <= high) || bins.of(value) != chosen) continue;
    ends = TwoKeys{max(ends.a, ~ordered(value)), max(ends.b, ordered(value))};
  }
  ends = max_over_block(ends, buffers);
  return TwoKeys{~ends.a, ends.b};
}

struct Floor {
  float value;
  uint32_t tokens;  // estimated number of tokens that reach it
};

// Returns a value that at least `target` chunk maxima reach, if so many are finite: then at least `target` tokens reach
// it.
// Refines until not many more do.
__device__ inline Floor floor_by_count(const Summary& all, uint32_t target, Shared& shared, ReduceBuffers& buffers) {
  if (all.finite < target) return Floor{kLowest, all.finite};
  const uint32_t enough = target + min(target, (kListCapacity - target) / 4) + 16;
  float low = all.min_chunk_max, high = all.max_value;
  uint32_t above = 0;
#pragma unroll 1
  for (int round = 0; round < 4; ++round) {
    const Bins bins(low, high);
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b)
      if (all.largest[b] >= low && all.largest[b] <= high) atomicAdd(&shared.count[bins.of(all.largest[b])], 1u);
    __syncthreads();
    const int own = kBins - 1 - threadIdx.x;
    const uint32_t here = shared.count[own], upto = above + sum_up_to(here, buffers);
    shared.count[own] = 0;
    if (upto >= target && upto - here < target) shared.chosen = own, shared.reached = upto, shared.before = upto - here;
    __syncthreads();
    const uint32_t reached = shared.reached;
    const TwoKeys ends = ends_of_bin(all, low, high, bins, shared.chosen, buffers);
    above = shared.before, low = value_of(ends.a), high = value_of(ends.b);
    if (reached <= enough || low == high) return Floor{low, reached};
  }
  return Floor{low, kListCapacity};
}

// Returns a value reached by tokens of about `target` of the row's mass, or a larger one whose tokens fit the list, if
// these still have `needed` of the mass.
// N tokens spread evenly over C chunks of S hit about C (1 - (1 - N / CS)^S) chunks. So chunk maxima estimate how many
// tokens reach a value. The caller checks the estimate.
__device__ inline Floor floor_by_mass(
    const Row& row, const Summary& all, float scale2, float target, float needed, Shared& shared, ReduceBuffers& buffers) {
  constexpr float kSafeCapacity = 0.94f * kListCapacity;
  const Bins bins(all.min_chunk_max, all.max_value);
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (!(all.largest[b] >= kLowest)) continue;
    const int bin = bins.of(all.largest[b]);
    atomicAdd(&shared.count[bin], 1u);
    atomicAdd(&shared.mass[bin], __float2uint_rn(mass_of(all.largest[b], all.max_value, scale2) * 0x1p20f));
  }
  for_each_entry(row, [&](int, float value) {
    if (value >= kLowest)
      atomicAdd(&shared.extra[bins.of(value)], __float2uint_rn(mass_of(value, all.max_value, scale2) * 0x1p20f));
  });
  if (threadIdx.x == 0) shared.chosen = -1, shared.before = kBins;
  __syncthreads();
  const int own = kBins - 1 - threadIdx.x;
  const uint32_t here = shared.count[own], upto = sum_up_to(here, buffers);
  const float chunks = static_cast<float>(all.finite), each_chunk = static_cast<float>(4 * kBatch * row.chunk_batches);
  const auto tokens_in = [&](uint32_t reached) {
    const float left = 1.0f - fminf(static_cast<float>(reached), chunks - 0.5f) / chunks;
    return chunks * each_chunk * (1.0f - __powf(left, 1.0f / each_chunk));
  };
  const float tokens = tokens_in(upto);
  const float each = here ? (tokens - tokens_in(upto - here)) / static_cast<float>(here) : 0.0f;
  const float here_mass = static_cast<float>(shared.mass[own]) * each + static_cast<float>(shared.extra[own]);
  const float mass = sum_up_to(here_mass * 0x1p-20f, buffers);
  if (here && mass >= target) atomicMax(&shared.chosen, own);
  if (here && tokens <= kSafeCapacity) atomicMin(&shared.before, own);
  __syncthreads();
  const int chosen = max(shared.chosen, shared.before);
  if (chosen == kBins) return Floor{INFINITY, kListCapacity};
  if (chosen == own) shared.reached = mass >= needed && tokens <= kSafeCapacity ? static_cast<int>(tokens) : kListCapacity;
  const TwoKeys ends = ends_of_bin(all, all.min_chunk_max, all.max_value, bins, chosen, buffers);
  return Floor{value_of(ends.a), static_cast<uint32_t>(shared.reached)};
}

// Appends a warp's tokens with a value of at least `floor`.
__device__ __forceinline__ void append(Shared& shared, const Batch& batch, float floor) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll
  for (int i = 0; i < 4 * kBatch; ++i) own += batch.value[i] >= floor;
  if (!__any_sync(kAll, own)) return;
  int upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, upto, offset);
    if (lane >= offset) upto += other;
  }
  int at = 0;
  if (lane == 31) at = atomicAdd(&shared.size, upto);
  at = __shfl_sync(kAll, at, 31) + upto - own;
#pragma unroll
  for (int i = 0; i < 4 * kBatch; ++i) {
    const bool reaches = batch.value[i] >= floor;
    const int to = reaches ? min(at, kListCapacity) : kListCapacity;
    shared.list.value[to] = batch.value[i], shared.list.token[to] = batch.token(i);
    at += reaches;
  }
}

// Gathers all tokens from `floor` up. If shared.size exceeds the capacity, the list is incomplete.
__device__ inline void gather(const Row& row, const Summary& all, float floor, Shared& shared) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) shared.size = 0, shared.num_chunks = 0;
  __syncthreads();
  unsigned reaching[kMaxBlocks];
  int at = 0;  // lane b: index of the warp's chunks of block b
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    reaching[b] = __ballot_sync(kAll, all.largest[b] >= floor);
    if (lane == b) at = __popc(reaching[b]);
  }
  if (at) at = atomicAdd(&shared.num_chunks, at);
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    const int own = __shfl_sync(kAll, at, b) + __popc(reaching[b] & ((1u << lane) - 1));
    if (reaching[b] >> lane & 1) shared.chunks[own] = static_cast<uint16_t>(b * kThreads + threadIdx.x);
  }
  for_each_entry(row, [&](int token, float value) {
    if (!(value >= floor)) return;
    const int at = atomicAdd(&shared.size, 1);
    if (at < kListCapacity) shared.list.value[at] = value, shared.list.token[at] = token;
  });
  __syncthreads();
  const int num_chunks = shared.num_chunks, pieces = num_chunks * row.chunk_batches;
  const auto load_piece = [&](int piece) {
    if (piece >= pieces) return load_batch(row, row.quads());  // -inf
    int batch = 0;
    while (piece >= num_chunks * (batch + 1)) ++batch;
    const int chunk = shared.chunks[piece - num_chunks * batch];
    return load_batch(row, (chunk / kThreads * row.chunk_batches + batch) * kBatchQuads + chunk % kThreads);
  };
  RawBatch next = load_piece(threadIdx.x), after = load_piece(threadIdx.x + kThreads);
#pragma unroll 1
  for (int piece = threadIdx.x; piece - lane < pieces; piece += kThreads) {
    Batch batch = next.arrived();
    next = after;
    after = load_piece(piece + 2 * kThreads);
    clean(row, batch);
    append(shared, batch, floor);
  }
  __syncthreads();
}

// Computes the list's scores and its mass.
__device__ inline uint64_t score_list(Shared& shared, const SlotState& slot, float largest, ReduceBuffers& buffers) {
  Tally tally{0, 0};
  for (int i = threadIdx.x; i < shared.size; i += kThreads) {
    tally.mass += to_fixed(mass_of(shared.list.value[i], largest, slot.scale * kLog2e));
    shared.list.score[i] = exact_score(slot, shared.list.token[i], shared.list.value[i]);
  }
  return sum_over_block(tally, buffers).mass;
}

// Samples from a list that holds all kept tokens, like sample_by_rounds in shared memory. A thread reads only its own
// scores.
__device__ inline int sample_from_list(const Shared& shared, const SlotState& slot, float largest, double enough, ReduceBuffers& buffers) {
  constexpr uint32_t kTokenMask = (1u << kTokenBits) - 1, kIndexMask = (1u << kIndexBits) - 1;
  RankPosition limit = kAfterAll;
  while (true) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < shared.size; i += kThreads) {
      const int token = shared.list.token[i];
      if (!limit.is_after(shared.list.value[i], token)) continue;
      const uint32_t low = (~static_cast<uint32_t>(token) & kTokenMask) << kIndexBits | static_cast<uint32_t>(i);
      best = larger(best, static_cast<uint64_t>(ordered(shared.list.score[i])) << 32 | low);
    }
    best = max_over_block(best, buffers);
    const int index = static_cast<int>(static_cast<uint32_t>(best) & kIndexMask);
    limit = RankPosition{shared.list.value[index], shared.list.token[index]};
    Tally before{0, 0};
    for (int i = threadIdx.x; i < shared.size; i += kThreads) {
      if (!limit.is_after(shared.list.value[i], shared.list.token[i])) continue;
      ++before.count, before.mass += to_fixed(mass_of(shared.list.value[i], largest, slot.scale * kLog2e));
    }
    before = sum_over_block(before, buffers);
    const bool within_k = before.count < static_cast<uint32_t>(slot.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return limit.token;
  }
}

// Samples a row truncated by top_p with one more pass.
//
// Let Z be the mass of all tokens. About kExpected tokens, the finalists, have scores above log(Z / kExpected), for any
// logits.
// The pass finds them and sums masses by value in bins. The best finalist that is kept is sampled. The bins decide
// whether a finalist is kept. In the bin with the boundary, the mass that ranks before it is counted exactly. Tokens
// below (1 - top_p) Z / V are truncated: all of them together have less mass than is truncated.
struct Scale {
  float max_value, scale2, lift, lowest, per_octave, bar;
  bool is_fine;  // precise enough to select finalists by mass

  __device__ __forceinline__ Scale(const Row& row, const SlotState& slot, float max_value, uint64_t row_mass) : max_value(max_value), scale2(slot.scale * kLog2e) {
    const float total = static_cast<float>(static_cast<double>(row_mass) * 0x1p-40);
    is_fine = total >= 1.0f && fabsf(max_value * slot.scale) < 1e4f;
    lift = 31.0f - log2f(total), bar = max_value * slot.scale + logf(total * (1.0f / kExpected));
    lowest = fmaxf(log2f(static_cast<float>(1.0 - slot.top_p) * total / static_cast<float>(row.vocab)), -120.0f);
    per_octave = kMassBins / fmaxf(-lowest, 1e-3f);
  }
  __device__ __forceinline__ float octaves(float value) const { return __fmul_rn(__fsub_rn(value, max_value), scale2); }
  // Increases with x >= lowest.
  __device__ __forceinline__ int bin_of(float x) const {
    return min(static_cast<int>(__fmul_rn(__fsub_rn(x, lowest), per_octave)), kMassBins - 1);
  }
  __device__ __forceinline__ uint32_t add_mass(Finalists& finalists, float value) const {
    const float x = octaves(value);
    const uint32_t mass = __float2uint_rn(fast_exp2(x + lift));
    if (x >= lowest) atomicAdd(&finalists.mass[bin_of(x)], mass);
    return mass;
  }
};

// The pass over a split; the first CTA handles entries.
__device__ inline void find_finalists(
    const Row& row, Range range, const Ring& ring, const SlotState& slot, const Scale& scale, bool with_entries, Finalists& finalists) {
  constexpr float kWeight = 2.0f * kExpected * 1.25f;  // a random word up to this many times its token's mass may be a finalist
  constexpr uint32_t kMaxMass = static_cast<uint32_t>(4294967295.0f / kWeight) - 2;
#pragma unroll
  for (int i = 0; i < kMassBins / kThreads; ++i) finalists.mass[threadIdx.x + i * kThreads] = 0;
  if (threadIdx.x == 0) finalists.size = 0;
  ring.begin(row, range);
  __syncthreads();
  const auto enter = [&](int token, float value) {
    const int at = atomicAdd(&finalists.size, 1);
    if (at < kFinalists) finalists.value[at] = value, finalists.token[at] = token;
  };
  if (with_entries)
    for_each_entry(row, [&](int token, float value) {
      if (!(value > minus_infinity())) return;
      scale.add_mass(finalists, value);
      if (exact_score(slot, token, value) >= scale.bar) enter(token, value);
    });
  __syncthreads();
  const int changed = finalists.size;  // later finalists have no entries
  __syncthreads();
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    clean(row, batch);
    Words words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) words[j] = words_of_block(slot.seed, slot.step, batch.first + kThreads * j, kDomainGumbel);
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i) {
      const uint32_t mass = scale.add_mass(finalists, batch.value[i]);
      // s + gumbel(u) >= bar needs u <= -log(1 - u) <= exp(s - bar)
      const uint32_t reach = mass > kMaxMass ? 0xffffffffu : (mass + 1) * static_cast<uint32_t>(kWeight);
      left |= static_cast<uint32_t>(words[i / 4].at[i % 4] <= reach) << i;
    }
    while (left) {
      enter(batch.token(__ffs(left) - 1), 0.0f);
      left &= left - 1;
    }
  });
  __syncthreads();
  const int own = threadIdx.x;
  if (own >= min(finalists.size, kFinalists)) return;
  const int token = finalists.token[own];
  const bool is_plain = own >= changed;
  float value = is_plain ? minus_infinity() : finalists.value[own], score = minus_infinity();
  if (is_plain && !has_entry(row, token)) value = cleaned(row.logits[token]);
  if (value > minus_infinity()) score = exact_score(slot, token, value);
  finalists.value[own] = value, finalists.pair[own] = score >= scale.bar ? pair_of(score, token) : 0;
}

// Returns the sampled token from the splits' finalists, or -1 if they do not determine it, which is rare.
__device__ inline int choose_finalist(
    const Row& row, Range range, const Ring& ring, const SlotState& slot, const Scale& scale, double enough, RowCluster cluster,
    Finalists& finalists, ReduceBuffers& buffers) {
  const int own = threadIdx.x;
  {  // mass of the bins after each
    const int first = kMassBins - 4 * (own + 1);
    uint32_t mass[4] = {}, sum = 0;
    for (int rank = 0; rank < cluster.count; ++rank) {
      if (cluster.load(&finalists.size, rank) > kFinalists) return -1;
#pragma unroll
      for (int i = 0; i < 4; ++i) mass[i] += cluster.load(&finalists.mass[first + i], rank);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += mass[i];
    uint32_t behind = sum_up_to(sum, buffers) - sum;
#pragma unroll
    for (int i = 3; i >= 0; --i) finalists.mass[first + i] = behind, behind += mass[i];
  }
  __syncthreads();
  const float target = static_cast<float>(slot.top_p) * 0x1p31f, unsure = 0x1p16f + static_cast<float>(row.vocab);
  RankPosition limit = kAfterAll;
  while (true) {
    uint64_t mine = 0;
    bool is_kept = false;
    for (int rank = 0; rank < cluster.count; ++rank) {
      if (own >= cluster.load(&finalists.size, rank)) continue;
      const uint64_t pair = cluster.load(&finalists.pair[own], rank);
      const float value = cluster.load(&finalists.value[own], rank);
      if (pair <= mine || !limit.is_after(value, token_of(pair))) continue;
      const float x = scale.octaves(value);
      const int bin = x >= scale.lowest ? scale.bin_of(x) : 0;
      const float before = static_cast<float>(finalists.mass[bin]);
      const float with_bin = bin > 0 ? static_cast<float>(finalists.mass[bin - 1]) : INFINITY;
      if (before - unsure >= target) continue;
      mine = pair, is_kept = with_bin + unsure < target && slot.top_k >= row.vocab;
    }
    const uint64_t best = max_over_block(mine, buffers);
    if (best == 0) return -1;
    const int token = token_of(best);
    if (__syncthreads_or(mine == best && is_kept)) return token;
    limit = RankPosition{logit_of(row, token), token};
    ring.begin(row, range);
    const Tally before = tally_before(row, range, ring, limit, scale.max_value, scale.scale2, buffers);
    const bool within_k = before.count < static_cast<uint32_t>(slot.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return token;
  }
}

// Work of the other CTAs of a cluster after their scan.
__device__ inline void assist(const Row& row, Range range, const Ring& ring, const SlotState& slot, RowCluster cluster, Shared& shared) {
  cluster.sync();
  Finalists& finalists = shared.finalists;
  if (!cluster.load(&finalists.is_requested, 0)) return cluster.sync();
  const Scale scale(row, slot, cluster.load(&finalists.max_value, 0), cluster.load(&finalists.row_mass, 0));
  find_finalists(row, range, ring, slot, scale, false, finalists);
  cluster.sync();
  cluster.sync();
}

// Signals to the other CTAs of a row whether they assist.
__device__ __forceinline__ void request_assist(const Summary& all, bool is_requested, RowCluster cluster, Finalists& finalists) {
  if (cluster.count == 1) return;
  if (threadIdx.x == 0) finalists.max_value = all.max_value, finalists.row_mass = all.mass, finalists.is_requested = is_requested;
  cluster.sync();
  if (!is_requested) cluster.sync();
}

// Whether a row may need the assistance of all its CTAs.
__device__ __forceinline__ bool may_need_assist(const SlotState& slot) { return slot.kind == kTruncated && slot.top_p < 1 && slot.top_k > kMaxTopK; }

// Marks tokens of batches `range` that have entries.
__device__ inline void mark_entries(const Row& row, Range range, uint32_t* marks) {
  const int first = 4 * kBatchQuads * range.first, last = min(4 * kBatchQuads * range.last, row.vocab);
  for (int word = first / 32 + threadIdx.x; word < (last + 31) / 32; word += kThreads) marks[word] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_entries; i += kThreads) {
    const int token = row.entries[i].token;
    if (token >= first && token < last) atomicOr(&marks[token >> 5], 1u << (token & 31));
  }
  __syncthreads();
}

// Samples a row with top_k or top_p from the first pass; token 0 if no logit is finite.
__device__ inline int sample_truncated(
    const Row& row, Range range, Range rank, const SlotState& slot, const Chunk* chunks, RowCluster cluster, Shared& shared, ReduceBuffers& buffers) {
  shared.count[threadIdx.x] = shared.mass[threadIdx.x] = shared.extra[threadIdx.x] = 0;
  const Summary all = summarise(row, (range.last + row.chunk_batches - 1) / row.chunk_batches, slot, chunks, buffers);
  const float scale2 = slot.scale * kLog2e;
  const double mass = static_cast<double>(all.mass), enough = slot.top_p < 1 ? slot.top_p * mass : INFINITY;
  const bool by_count = slot.top_k <= kMaxTopK, is_empty = all.max_value == minus_infinity();
  const Ring ring{reinterpret_cast<Quad*>(shared.ring)};
  bool needs_assist = false;
  if (!is_empty && (by_count || slot.top_p < 1)) {
    Floor floor;
    if (by_count) {
      floor = floor_by_count(all, static_cast<uint32_t>(slot.top_k), shared, buffers);
    } else {
      const double share = fmin(slot.top_p + 0.02, 0.5 + 0.5 * slot.top_p);
      const double unit = mass * 0x1p-40;
      floor = floor_by_mass(
          row, all, scale2, static_cast<float>(share * unit), static_cast<float>(slot.top_p * unit), shared, buffers);
    }
    needs_assist = !by_count && floor.tokens >= kLongList;
    if (may_need_assist(slot)) request_assist(all, needs_assist, cluster, shared.finalists);
    const bool fits = floor.tokens < kListCapacity && !needs_assist;
    if (fits) gather(row, all, floor.value, shared);
    if (fits && shared.size <= kListCapacity) {
      // Later tokens are truncated if the list alone reaches a limit, or if there are none.
      const uint64_t held = score_list(shared, slot, all.max_value, buffers);
      const bool whole = shared.size >= slot.top_k || static_cast<double>(held) >= enough || floor.value == kLowest;
      if (whole) return sample_from_list(shared, slot, all.max_value, enough, buffers);
    }
  } else if (may_need_assist(slot)) {
    request_assist(all, false, cluster, shared.finalists);
  }
  if (is_empty) return 0;
  __syncthreads();
  if (slot.top_p < 1) {
    const Scale scale(row, slot, all.max_value, all.mass);
    if (!needs_assist) cluster.count = 1, rank = range;
    find_finalists(row, cluster.count == 1 ? range : rank, ring, slot, scale, true, shared.finalists);
    cluster.sync();
    const int token = scale.is_fine ? choose_finalist(row, range, ring, slot, scale, enough, cluster, shared.finalists, buffers) : -1;
    cluster.sync();
    if (token >= 0) return token;
  }
  return sample_by_rounds(row, range, ring, slot, all.max_value, enough, &shared.found, buffers);
}

}  // namespace sampling
