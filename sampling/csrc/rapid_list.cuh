// Drawing from a short list: the tokens above a threshold, in shared memory.
#pragma once

#include "rapid_draw.cuh"

namespace sampling {

constexpr int kListRoom = 4864;  // candidates that fit: three blocks fit into a multiprocessor
constexpr int kIndexBits = 13;   // of a place in the list
constexpr int kTokenBits = 18;   // of a token: sampling/rapid.py allows vocabularies up to 2^18
constexpr int kMaxTopK = 1024;   // largest top_k for which the list is tried
constexpr int kBins = kThreads;

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

// Shared memory of a block; behind it bits for all tokens.
struct __align__(16) Shared {
  union {
    List list;
    unsigned char ring[kRingBytes];  // while batches are read in order
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
    const Row& row, Range range, const Seat& seat, const Chunk* chunks, Shared& shared, Room& room) {
  shared.count[threadIdx.x] = shared.mass[threadIdx.x] = shared.extra[threadIdx.x] = 0;
  const Summary all = summarise(row, (range.last + row.chunk_batches - 1) / row.chunk_batches, seat, chunks, room);
  if (all.most == minus_infinity()) return 0;
  const float scale2 = seat.scale * kLog2e;
  const double mass = static_cast<double>(all.mass), enough = seat.top_p < 1 ? seat.top_p * mass : INFINITY;
  const bool by_count = seat.top_k <= kMaxTopK;
  if (by_count || seat.top_p < 1) {
    Floor floor;
    if (by_count) {
      floor = floor_by_count(all, static_cast<uint32_t>(seat.top_k), shared, room);
    } else {
      const double share = fmin(seat.top_p + 0.02, 0.5 + 0.5 * seat.top_p);
      const double unit = mass * 0x1p-40;
      floor = floor_by_mass(
          row, all, scale2, static_cast<float>(share * unit), static_cast<float>(seat.top_p * unit), shared, room);
    }
    const bool fits = floor.tokens < kListRoom;
    if (fits) gather(row, all, floor.value, shared);
    if (fits && shared.size <= kListRoom) {
      // What ranks after the list is cut if the list alone reaches a limit, or there is nothing.
      const uint64_t held = score_list(shared, seat, all.most, room);
      const bool whole = shared.size >= seat.top_k || static_cast<double>(held) >= enough || floor.value == kLowest;
      if (whole) return draw_from_list(shared, seat, all.most, enough, room);
    }
  }
  __syncthreads();
  const Ring ring{reinterpret_cast<Quad*>(shared.ring)};
  return draw_by_rounds(row, range, ring, seat, all.most, enough, &shared.found, room);
}

}  // namespace sampling
