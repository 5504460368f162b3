// Drawing from a short list: the tokens above a threshold, in shared memory.
#pragma once

#include "rapid_draw.cuh"

namespace sampling {

constexpr int kListRoom = 4864;  // candidates that fit: three blocks fit into a multiprocessor
constexpr int kIndexBits = 13;   // of a place in the list
constexpr int kTokenBits = 18;   // of a token: sampling/rapid.py allows vocabularies up to 2^18
constexpr int kMaxTopK = 1024;   // largest top_k for which the list is tried
constexpr int kBins = kThreads;
constexpr int kMassBins = 4 * kThreads;
constexpr int kFinalists = kThreads;  // one for each thread
constexpr int kExpected = 64;         // of them, at most
constexpr uint32_t kLongList = 3500;  // tokens: a list of so many takes longer than a second pass over the row

// What the pass over a row leaves of each chunk.
struct Chunk {
  float largest;
  float mass;  // relative to `largest`
};

// Candidates for the draw.
struct List {
  float value[kListRoom + 4];  // [kListRoom] takes what finds no room
  int32_t token[kListRoom + 4];
  float score[kListRoom];
};

// What a pass for the best scores leaves of its part of a row.
struct Finals {
  uint32_t mass[kMassBins];  // of tokens by value, in units of 2^-31 of the row's; of the first part then of those in later bins
  uint64_t pair[kFinalists];  // of score and token, 0: none
  float value[kFinalists];
  int32_t token[kFinalists];
  float most;  // of the row, and its mass
  uint64_t row_mass;
  int32_t size, is_wanted;
};

// Shared memory of a block; behind it bits for all tokens.
struct __align__(16) Shared {
  union {
    List list;
    struct {
      unsigned char ring[kRingBytes];  // while batches are read in order
      Finals finals;
    };
  };
  uint16_t chunks[kMaxChunks];  // those that are read again
  uint32_t count[kBins];        // chunk maxima in a range of values
  uint32_t mass[kBins];         // theirs, in units of 2^-20
  uint32_t extra[kBins];        // of tokens with entries
  uint64_t half[2][2 * kWarps];
  uint32_t found;
  int32_t size, num_chunks, chosen, reached, before;

  __device__ uint32_t* marks() { return reinterpret_cast<uint32_t*>(this + 1); }
};

// The pass over a range of a row that is cut.
__device__ inline void scan_chunks(
    const Row& row, Range range, const Ring& ring, const Seat& seat, Chunk* chunks) {
  const float scale2 = seat.scale * kLog2e;
  const bool with_mass = seat.top_p < 1;
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
      if (sum != sum) clean(row, batch), sum = sum_up();  // there is a NaN
      chunk.mass = chunk.mass * mass_of(before, chunk.largest, scale2) + sum;
    }
    if (--left) return;
    chunks[number] = chunk;
    chunk = Chunk{minus_infinity(), 0.0f}, left = row.chunk_batches, number += kThreads;
  });
}

// A row's chunks as one thread holds them, and what they sum up to.
struct Summary {
  float largest[kMaxBlocks];
  uint32_t finite;  // chunks with a finite maximum
  float most, least;  // of all tokens, and of the finite maxima
  uint64_t mass;
};

__device__ __forceinline__ Summary summarise(
    const Row& row, int blocks, const Seat& seat, const Chunk* chunks, Room& room) {
  const float scale2 = seat.scale * kLog2e;
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
  ends = max_over_block(ends, room);
  all.most = value_of(ends.a), all.least = value_of(~ends.b);
  Tally tally{0, 0};
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    tally.count += all.largest[b] >= kLowest;
    if (mass[b] > 0.0f) tally.mass += to_fixed(mass[b] * mass_of(all.largest[b], all.most, scale2));
  }
  if (seat.top_p < 1)
    for_each_entry(row, [&](int, float value) {
      if (value > minus_infinity()) tally.mass += to_fixed(mass_of(value, all.most, scale2));
    });
  tally = sum_over_block(tally, room);
  all.mass = tally.mass, all.finite = tally.count;
  return all;
}

// Equal parts of a range of values; larger values are in the same or a later one.
struct Bins {
  float low, per_value;

  __device__ Bins(float low, float high) : low(low), per_value(kBins / (high - low)) {}
  __device__ int of(float value) const { return min(max(static_cast<int>((value - low) * per_value), 0), kBins - 1); }
};

// The least value that the chosen bin holds, and the largest.
__device__ __forceinline__ TwoKeys ends_of_bin(
    const Summary& all, float low, float high, const Bins& bins, int chosen, Room& room) {
  TwoKeys ends{0, 0};
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    const float value = all.largest[b];
    if (!(value >= low && value <= high) || bins.of(value) != chosen) continue;
    ends = TwoKeys{max(ends.a, ~ordered(value)), max(ends.b, ordered(value))};
  }
  ends = max_over_block(ends, room);
  return TwoKeys{~ends.a, ends.b};
}

struct Floor {
  float value;
  uint32_t tokens;  // about so many reach it
};

// A value that at least `wanted` chunk maxima reach, if so many are finite: then at least `wanted` tokens reach it.
// Looks closer until not many more do.
__device__ inline Floor floor_by_count(const Summary& all, uint32_t wanted, Shared& shared, Room& room) {
  if (all.finite < wanted) return Floor{kLowest, all.finite};
  const uint32_t enough = wanted + min(wanted, (kListRoom - wanted) / 4) + 16;
  float low = all.least, high = all.most;
  uint32_t above = 0;
#pragma unroll 1
  for (int round = 0; round < 4; ++round) {
    const Bins bins(low, high);
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b)
      if (all.largest[b] >= low && all.largest[b] <= high) atomicAdd(&shared.count[bins.of(all.largest[b])], 1u);
    __syncthreads();
    const int own = kBins - 1 - threadIdx.x;
    const uint32_t here = shared.count[own], upto = above + sum_up_to(here, room);
    shared.count[own] = 0;
    if (upto >= wanted && upto - here < wanted) shared.chosen = own, shared.reached = upto, shared.before = upto - here;
    __syncthreads();
    const uint32_t reached = shared.reached;
    const TwoKeys ends = ends_of_bin(all, low, high, bins, shared.chosen, room);
    above = shared.before, low = value_of(ends.a), high = value_of(ends.b);
    if (reached <= enough || low == high) return Floor{low, reached};
  }
  return Floor{low, kListRoom};
}

// A value that tokens of about `wanted` of the row's mass reach, as a share of the largest token's mass; a larger one
// that the list has room for if that is still `needed`, or more, of the mass.
// Of N tokens spread evenly over C chunks of S, about C (1 - (1 - N/CS)^S) chunks get one: so the chunk maxima tell how
// many tokens reach a value. That is a guess, to be checked.
__device__ inline Floor floor_by_mass(
    const Row& row, const Summary& all, float scale2, float wanted, float needed, Shared& shared, Room& room) {
  constexpr float kSafeRoom = 0.94f * kListRoom;
  const Bins bins(all.least, all.most);
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (!(all.largest[b] >= kLowest)) continue;
    const int bin = bins.of(all.largest[b]);
    atomicAdd(&shared.count[bin], 1u);
    atomicAdd(&shared.mass[bin], __float2uint_rn(mass_of(all.largest[b], all.most, scale2) * 0x1p20f));
  }
  for_each_entry(row, [&](int, float value) {
    if (value >= kLowest)
      atomicAdd(&shared.extra[bins.of(value)], __float2uint_rn(mass_of(value, all.most, scale2) * 0x1p20f));
  });
  if (threadIdx.x == 0) shared.chosen = -1, shared.before = kBins;
  __syncthreads();
  const int own = kBins - 1 - threadIdx.x;
  const uint32_t here = shared.count[own], upto = sum_up_to(here, room);
  const float chunks = static_cast<float>(all.finite), each_chunk = static_cast<float>(4 * kBatch * row.chunk_batches);
  const auto tokens_in = [&](uint32_t reached) {
    const float left = 1.0f - fminf(static_cast<float>(reached), chunks - 0.5f) / chunks;
    return chunks * each_chunk * (1.0f - __powf(left, 1.0f / each_chunk));
  };
  const float tokens = tokens_in(upto);
  const float each = here ? (tokens - tokens_in(upto - here)) / static_cast<float>(here) : 0.0f;
  const float here_mass = static_cast<float>(shared.mass[own]) * each + static_cast<float>(shared.extra[own]);
  const float mass = sum_up_to(here_mass * 0x1p-20f, room);
  if (here && mass >= wanted) atomicMax(&shared.chosen, own);
  if (here && tokens <= kSafeRoom) atomicMin(&shared.before, own);
  __syncthreads();
  const int chosen = max(shared.chosen, shared.before);
  if (chosen == kBins) return Floor{INFINITY, kListRoom};
  if (chosen == own) shared.reached = mass >= needed && tokens <= kSafeRoom ? static_cast<int>(tokens) : kListRoom;
  const TwoKeys ends = ends_of_bin(all, all.least, all.most, bins, chosen, room);
  return Floor{value_of(ends.a), static_cast<uint32_t>(shared.reached)};
}

// Adds tokens of a warp to the list: those of `value` from `floor` up.
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
    const int to = reaches ? min(at, kListRoom) : kListRoom;
    shared.list.value[to] = batch.value[i], shared.list.token[to] = batch.token(i);
    at += reaches;
  }
}

// Gathers all tokens from `floor` up; shared.size may exceed the room, then the list is not whole.
__device__ inline void gather(const Row& row, const Summary& all, float floor, Shared& shared) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) shared.size = 0, shared.num_chunks = 0;
  __syncthreads();
  unsigned reaching[kMaxBlocks];
  int at = 0;  // lane b: where the warp's chunks of block b go
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
    if (at < kListRoom) shared.list.value[at] = value, shared.list.token[at] = token;
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

// Scores the list and sums its mass.
__device__ inline uint64_t score_list(Shared& shared, const Seat& seat, float largest, Room& room) {
  Tally tally{0, 0};
  for (int i = threadIdx.x; i < shared.size; i += kThreads) {
    tally.mass += to_fixed(mass_of(shared.list.value[i], largest, seat.scale * kLog2e));
    shared.list.score[i] = exact_score(seat, shared.list.token[i], shared.list.value[i]);
  }
  return sum_over_block(tally, room).mass;
}

// Draws from a list that holds all kept tokens: as draw_by_rounds, within shared memory. Each thread reads only scores
// that it wrote itself.
__device__ inline int draw_from_list(const Shared& shared, const Seat& seat, float largest, double enough, Room& room) {
  constexpr uint32_t kTokenMask = (1u << kTokenBits) - 1, kIndexMask = (1u << kIndexBits) - 1;
  Place limit = kBehindAll;
  while (true) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < shared.size; i += kThreads) {
      const int token = shared.list.token[i];
      if (!limit.is_after(shared.list.value[i], token)) continue;
      const uint32_t low = (~static_cast<uint32_t>(token) & kTokenMask) << kIndexBits | static_cast<uint32_t>(i);
      best = larger(best, static_cast<uint64_t>(ordered(shared.list.score[i])) << 32 | low);
    }
    best = max_over_block(best, room);
    const int index = static_cast<int>(static_cast<uint32_t>(best) & kIndexMask);
    limit = Place{shared.list.value[index], shared.list.token[index]};
    Tally before{0, 0};
    for (int i = threadIdx.x; i < shared.size; i += kThreads) {
      if (!limit.is_after(shared.list.value[i], shared.list.token[i])) continue;
      ++before.count, before.mass += to_fixed(mass_of(shared.list.value[i], largest, seat.scale * kLog2e));
    }
    before = sum_over_block(before, room);
    const bool within_k = before.count < static_cast<uint32_t>(seat.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return limit.token;
  }
}

// A row that top_p cuts, drawn from by one more pass over it.
//
// With Z the mass of all tokens, about kExpected of them have scores above log(Z / kExpected), whatever the logits: these
// are the finalists. The pass finds them and sums up masses by value, in bins. The best finalist that is kept is drawn, and
// whether one is kept the bins tell, but for those of the bin that the border is in: for these the mass that ranks before
// is counted exactly. A token of less than (1 - top_p) Z / V is cut: all such together are less than what is cut.
struct Scale {
  float most, scale2, lift, lowest, per_octave, bar;
  bool is_fine;  // enough to tell finalists by their masses

  __device__ __forceinline__ Scale(const Row& row, const Seat& seat, float most, uint64_t row_mass) : most(most), scale2(seat.scale * kLog2e) {
    const float total = static_cast<float>(static_cast<double>(row_mass) * 0x1p-40);
    is_fine = total >= 1.0f && fabsf(most * seat.scale) < 1e4f;
    lift = 31.0f - log2f(total), bar = most * seat.scale + logf(total * (1.0f / kExpected));
    lowest = fmaxf(log2f(static_cast<float>(1.0 - seat.top_p) * total / static_cast<float>(row.vocab)), -120.0f);
    per_octave = kMassBins / fmaxf(-lowest, 1e-3f);
  }
  __device__ __forceinline__ float octaves(float value) const { return __fmul_rn(__fsub_rn(value, most), scale2); }
  // Rises with x, which is `lowest` or more.
  __device__ __forceinline__ int bin_of(float x) const {
    return min(static_cast<int>(__fmul_rn(__fsub_rn(x, lowest), per_octave)), kMassBins - 1);
  }
  __device__ __forceinline__ uint32_t add_mass(Finals& finals, float value) const {
    const float x = octaves(value);
    const uint32_t mass = __float2uint_rn(fast_exp2(x + lift));
    if (x >= lowest) atomicAdd(&finals.mass[bin_of(x)], mass);
    return mass;
  }
};

// The pass over a part of a row; entries are the first part's.
__device__ inline void find_finalists(
    const Row& row, Range range, const Ring& ring, const Seat& seat, const Scale& scale, bool with_entries, Finals& finals) {
  constexpr float kWeight = 2.0f * kExpected * 1.25f;  // a word up to this many times its token's mass may be a finalist
  constexpr uint32_t kMostMass = static_cast<uint32_t>(4294967295.0f / kWeight) - 2;
#pragma unroll
  for (int i = 0; i < kMassBins / kThreads; ++i) finals.mass[threadIdx.x + i * kThreads] = 0;
  if (threadIdx.x == 0) finals.size = 0;
  ring.begin(row, range);
  __syncthreads();
  const auto enter = [&](int token, float value) {
    const int at = atomicAdd(&finals.size, 1);
    if (at < kFinalists) finals.value[at] = value, finals.token[at] = token;
  };
  if (with_entries)
    for_each_entry(row, [&](int token, float value) {
      if (!(value > minus_infinity())) return;
      scale.add_mass(finals, value);
      if (exact_score(seat, token, value) >= scale.bar) enter(token, value);
    });
  __syncthreads();
  const int changed = finals.size;  // those behind them have no entries
  __syncthreads();
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    clean(row, batch);
    Words words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) words[j] = words_of_block(seat.seed, seat.step, batch.first + kThreads * j, kDomainGumbel);
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i) {
      const uint32_t mass = scale.add_mass(finals, batch.value[i]);
      // u <= -log(1 - u) <= exp(s - bar) where s + gumbel(u) >= bar
      const uint32_t reach = mass > kMostMass ? 0xffffffffu : (mass + 1) * static_cast<uint32_t>(kWeight);
      left |= static_cast<uint32_t>(words[i / 4].at[i % 4] <= reach) << i;
    }
    while (left) {
      enter(batch.token(__ffs(left) - 1), 0.0f);
      left &= left - 1;
    }
  });
  __syncthreads();
  const int own = threadIdx.x;
  if (own >= min(finals.size, kFinalists)) return;
  const int token = finals.token[own];
  const bool is_plain = own >= changed;
  float value = is_plain ? minus_infinity() : finals.value[own], score = minus_infinity();
  if (is_plain && !has_entry(row, token)) value = cleaned(row.logits[token]);
  if (value > minus_infinity()) score = exact_score(seat, token, value);
  finals.value[own] = value, finals.pair[own] = score >= scale.bar ? pair_of(score, token) : 0;
}

// The token that is drawn, from what the pass over each part of the row left; -1 if that does not tell it, which is rare.
__device__ inline int choose_finalist(
    const Row& row, Range range, const Ring& ring, const Seat& seat, const Scale& scale, double enough, Parts parts,
    Finals& finals, Room& room) {
  const int own = threadIdx.x;
  {  // mass of the bins behind each
    const int first = kMassBins - 4 * (own + 1);
    uint32_t mass[4] = {}, sum = 0;
    for (int part = 0; part < parts.count; ++part) {
      if (parts.load(&finals.size, part) > kFinalists) return -1;
#pragma unroll
      for (int i = 0; i < 4; ++i) mass[i] += parts.load(&finals.mass[first + i], part);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += mass[i];
    uint32_t behind = sum_up_to(sum, room) - sum;
#pragma unroll
    for (int i = 3; i >= 0; --i) finals.mass[first + i] = behind, behind += mass[i];
  }
  __syncthreads();
  const float wanted = static_cast<float>(seat.top_p) * 0x1p31f, unsure = 0x1p16f + static_cast<float>(row.vocab);
  Place limit = kBehindAll;
  while (true) {
    uint64_t mine = 0;
    bool is_kept = false;
    for (int part = 0; part < parts.count; ++part) {
      if (own >= parts.load(&finals.size, part)) continue;
      const uint64_t pair = parts.load(&finals.pair[own], part);
      const float value = parts.load(&finals.value[own], part);
      if (pair <= mine || !limit.is_after(value, token_of(pair))) continue;
      const float x = scale.octaves(value);
      const int bin = x >= scale.lowest ? scale.bin_of(x) : 0;
      const float before = static_cast<float>(finals.mass[bin]);
      const float with_bin = bin > 0 ? static_cast<float>(finals.mass[bin - 1]) : INFINITY;
      if (before - unsure >= wanted) continue;
      mine = pair, is_kept = with_bin + unsure < wanted && seat.top_k >= row.vocab;
    }
    const uint64_t best = max_over_block(mine, room);
    if (best == 0) return -1;
    const int token = token_of(best);
    if (__syncthreads_or(mine == best && is_kept)) return token;
    limit = Place{logit_of(row, token), token};
    ring.begin(row, range);
    const Tally before = before_place(row, range, ring, limit, scale.most, scale.scale2, room);
    const bool within_k = before.count < static_cast<uint32_t>(seat.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return token;
  }
}

// What the blocks of a row but the first do behind their pass, where they are a cluster.
__device__ inline void help(const Row& row, Range range, const Ring& ring, const Seat& seat, Parts parts, Shared& shared) {
  parts.meet();
  Finals& finals = shared.finals;
  if (!parts.load(&finals.is_wanted, 0)) return parts.meet();
  const Scale scale(row, seat, parts.load(&finals.most, 0), parts.load(&finals.row_mass, 0));
  find_finalists(row, range, ring, seat, scale, false, finals);
  parts.meet();
  parts.meet();
}

// Tells the other blocks of a row whether their help is wanted.
__device__ __forceinline__ void ask(const Summary& all, bool is_wanted, Parts parts, Finals& finals) {
  if (parts.count == 1) return;
  if (threadIdx.x == 0) finals.most = all.most, finals.row_mass = all.mass, finals.is_wanted = is_wanted;
  parts.meet();
  if (!is_wanted) parts.meet();
}

// Whether a row may need the help of all its blocks.
__device__ __forceinline__ bool may_ask(const Seat& seat) { return seat.kind == kCut && seat.top_p < 1 && seat.top_k > kMaxTopK; }

// Marks the tokens of a row that have entries, from the batches `range`.
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

// Draws for a row with top_k or top_p from what the pass over it left; token 0 if no logit is finite.
__device__ inline int draw_cut(
    const Row& row, Range range, Range part, const Seat& seat, const Chunk* chunks, Parts parts, Shared& shared, Room& room) {
  shared.count[threadIdx.x] = shared.mass[threadIdx.x] = shared.extra[threadIdx.x] = 0;
  const Summary all = summarise(row, (range.last + row.chunk_batches - 1) / row.chunk_batches, seat, chunks, room);
  const float scale2 = seat.scale * kLog2e;
  const double mass = static_cast<double>(all.mass), enough = seat.top_p < 1 ? seat.top_p * mass : INFINITY;
  const bool by_count = seat.top_k <= kMaxTopK, is_empty = all.most == minus_infinity();
  const Ring ring{reinterpret_cast<Quad*>(shared.ring)};
  bool is_asked = false;
  if (!is_empty && (by_count || seat.top_p < 1)) {
    Floor floor;
    if (by_count) {
      floor = floor_by_count(all, static_cast<uint32_t>(seat.top_k), shared, room);
    } else {
      const double share = fmin(seat.top_p + 0.02, 0.5 + 0.5 * seat.top_p);
      const double unit = mass * 0x1p-40;
      floor = floor_by_mass(
          row, all, scale2, static_cast<float>(share * unit), static_cast<float>(seat.top_p * unit), shared, room);
    }
    is_asked = !by_count && floor.tokens >= kLongList;
    if (may_ask(seat)) ask(all, is_asked, parts, shared.finals);
    const bool fits = floor.tokens < kListRoom && !is_asked;
    if (fits) gather(row, all, floor.value, shared);
    if (fits && shared.size <= kListRoom) {
      // What ranks after the list is cut if the list alone reaches a limit, or there is nothing.
      const uint64_t held = score_list(shared, seat, all.most, room);
      const bool whole = shared.size >= seat.top_k || static_cast<double>(held) >= enough || floor.value == kLowest;
      if (whole) return draw_from_list(shared, seat, all.most, enough, room);
    }
  } else if (may_ask(seat)) {
    ask(all, false, parts, shared.finals);
  }
  if (is_empty) return 0;
  __syncthreads();
  if (seat.top_p < 1) {
    const Scale scale(row, seat, all.most, all.mass);
    if (!is_asked) parts.count = 1, part = range;
    find_finalists(row, parts.count == 1 ? range : part, ring, seat, scale, true, shared.finals);
    parts.meet();
    const int token = scale.is_fine ? choose_finalist(row, range, ring, seat, scale, enough, parts, shared.finals, room) : -1;
    parts.meet();
    if (token >= 0) return token;
  }
  return draw_by_rounds(row, range, ring, seat, all.most, enough, &shared.found, room);
}

}  // namespace sampling
