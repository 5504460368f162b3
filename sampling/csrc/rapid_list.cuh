// Drawing from a short list: the tokens above a threshold, ranked in shared memory.
#pragma once

#include "rapid_draw.cuh"

namespace sampling {

constexpr int kListRoom = 1024;   // candidates that fit
constexpr int kMaxTopK = 768;     // largest top_k for which the list is tried
constexpr int kFirstGuess = 160;  // candidates to look at where top_p alone cuts

struct List {
  uint64_t mass[kListRoom];
  uint64_t score[kListRoom];  // pairs with the token
  float value[kListRoom];
  int token[kListRoom];
  int size;
};

// What one pass over a row leaves of each chunk, in shared memory.
struct Chunk {
  float largest;
  float mass;  // relative to `largest`
};

struct Totals {
  float largest;
  uint64_t mass;
};

// The pass over the row for rows that are cut.
template <int kThreads, class T>
__device__ Totals scan_chunks(const Row<T>& row, const Seat& seat, Chunk* chunks, Room& room) {
  const float scale2 = seat.scale * kLog2e;
  const bool with_mass = seat.top_p < 1;
  float largest = minus_infinity();
  Chunk chunk{minus_infinity(), 0.0f};
  int current = -1;
  for_each_batch<kThreads>(row, [&](int number, const Batch& batch) {
    if (number != current) chunk = Chunk{minus_infinity(), 0.0f}, current = number;
    const float before = chunk.largest;
    chunk.largest = fmaxf(before, batch.largest());
    if (with_mass && chunk.largest > minus_infinity()) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i) sum[i % 4] += mass_of(batch.value[i], chunk.largest, scale2);
      chunk.mass = chunk.mass * mass_of(before, chunk.largest, scale2) + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    chunks[number] = chunk;
    largest = fmaxf(largest, chunk.largest);
  });
  for_each_entry<kThreads>(row, [&](int, float value) { largest = fmaxf(largest, value); });
  Totals totals{};
  totals.largest = value_of(over_block<kThreads>(pair_of(largest, 0), Largest(), room));
  if (!with_mass || totals.largest == minus_infinity()) return totals;
  uint64_t mass = 0;
  const int lane = threadIdx.x % kLanes;
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes) {
    const Chunk own = chunks[block * kLanes + lane];
    if (own.mass > 0.0f) mass += to_fixed(own.mass * mass_of(own.largest, totals.largest, scale2));
  }
  for_each_entry<kThreads>(row, [&](int, float value) { mass += to_fixed(mass_of(value, totals.largest, scale2)); });
  totals.mass = over_block<kThreads>(mass, Sum(), room);
  return totals;
}

struct Floor {
  float value;
  int chunks;  // how many chunk maxima reach it: at least so many tokens do
};

template <int kThreads, class T>
__device__ __forceinline__ int chunks_from(const Row<T>& row, const Chunk* chunks, float floor, Room& room) {
  uint64_t count = 0;
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes)
    count += chunks[block * kLanes + threadIdx.x % kLanes].largest >= floor;
  return static_cast<int>(over_block<kThreads>(count, Sum(), room));
}

// A value that at least `wanted` chunk maxima reach, if so many are finite: then at least `wanted` tokens reach it.
// Bisects until not many more do.
template <int kThreads, class T>
__device__ Floor find_floor(const Row<T>& row, const Chunk* chunks, float largest, int wanted, Room& room) {
  const int lane = threadIdx.x % kLanes;
  uint64_t lowest = 0;  // of the finite maxima, as the largest of the negated ones
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes) {
    const float most = chunks[block * kLanes + lane].largest;
    if (most >= kLowest) lowest = Largest()(lowest, pair_of(-most, 0));
  }
  lowest = over_block<kThreads>(lowest, Largest(), room);
  const int finite = chunks_from<kThreads>(row, chunks, kLowest, room);
  if (finite < wanted) return Floor{kLowest, finite};
  Floor low{-value_of(lowest), finite};
  float high = largest;
  // Some of the chunks hold several of the tokens that are wanted: leave room for them in the list.
  const int enough = wanted + min(wanted, (kListRoom - wanted) / 4) + 16;
  for (int round = 0; round < 24 && low.chunks > enough; ++round) {
    const float middle = 0.5f * low.value + 0.5f * high;
    if (!(middle > low.value && middle < high)) break;
    const int count = chunks_from<kThreads>(row, chunks, middle, room);
    if (count < wanted) {
      high = middle;
    } else {
      low = Floor{middle, count};
    }
  }
  return low;
}

// Gathers all tokens from `floor` up; list->size may exceed the room, then the list is not whole.
template <int kThreads, class T>
__device__ void gather(const Row<T>& row, const Chunk* chunks, float floor, List* list) {
  if (threadIdx.x == 0) list->size = 0;
  __syncthreads();
  const auto add = [&](int token, float value) {
    const int at = atomicAdd(&list->size, 1);
    if (at < kListRoom) list->token[at] = token, list->value[at] = value;
  };
  const int lane = threadIdx.x % kLanes;
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes) {
    if (!(chunks[block * kLanes + lane].largest >= floor)) continue;
#pragma unroll
    for (int part = 0; part < kChunkBatches; ++part) {
      const Batch batch = load_batch(row, block * kChunkBlock + part * kLanes * kBatch + lane);
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i)
        if (batch.value[i] >= floor) add(batch.token(i), batch.value[i]);
    }
  }
  for_each_entry<kThreads>(row, [&](int token, float value) {
    if (value >= floor) add(token, value);
  });
  __syncthreads();
}

// Scores the list and sums its mass.
template <int kThreads>
__device__ uint64_t score_list(List* list, const Seat& seat, float largest, Room& room) {
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < list->size; i += kThreads) {
    const uint64_t mass = to_fixed(mass_of(list->value[i], largest, seat.scale * kLog2e));
    list->mass[i] = mass, sum += mass;
    list->score[i] = scored(seat, list->token[i], list->value[i]);
  }
  return over_block<kThreads>(sum, Sum(), room);
}

// Draws from a list that holds all kept tokens: as draw_by_rounds, within shared memory. Each thread reads only what
// it wrote to the list itself.
template <int kThreads>
__device__ int draw_from_list(const List* list, const Seat& seat, double enough, Room& room) {
  constexpr int kCountShift = 52;  // a list's mass has 51 bits, so that its size fits above
  Place limit = kBehindAll;
  while (true) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < list->size; i += kThreads)
      if (limit.is_after(list->value[i], list->token[i])) best = Largest()(best, list->score[i]);
    best = over_block<kThreads>(best, Largest(), room);
    const int token = token_of(best);
    uint64_t bits = 0;
    for (int i = threadIdx.x; i < list->size; i += kThreads)
      if (list->score[i] == best) bits = 1ull << 32 | __float_as_uint(list->value[i]);
    limit = Place{__uint_as_float(static_cast<uint32_t>(over_block<kThreads>(bits, Largest(), room))), token};
    uint64_t before = 0;
    for (int i = threadIdx.x; i < list->size; i += kThreads)
      if (limit.is_after(list->value[i], list->token[i])) before += (1ull << kCountShift) + list->mass[i];
    before = over_block<kThreads>(before, Sum(), room);
    const uint64_t count = before >> kCountShift, mass = before & ((1ull << kCountShift) - 1);
    const bool within_k = count < static_cast<uint64_t>(seat.top_k);
    if (count == 0 || (within_k && static_cast<double>(mass) < enough)) return token;
  }
}

// Draws for a row with top_k or top_p; token 0 if no logit is finite.
template <int kThreads, class T>
__device__ int draw_cut(const Row<T>& row, const Seat& seat, Chunk* chunks, List* list, Room& room) {
  const Totals totals = scan_chunks<kThreads>(row, seat, chunks, room);
  if (totals.largest == minus_infinity()) return 0;
  const double enough = seat.top_p < 1 ? seat.top_p * static_cast<double>(totals.mass) : INFINITY;
  if (seat.top_k <= kMaxTopK || seat.top_p < 1) {
    const int wanted = seat.top_k <= kMaxTopK ? seat.top_k : kFirstGuess;
    const Floor floor = find_floor<kThreads>(row, chunks, totals.largest, wanted, room);
    const bool fits = floor.chunks <= kListRoom;
    if (fits) gather<kThreads>(row, chunks, floor.value, list);
    if (fits && list->size <= kListRoom) {
      // What ranks after the list is cut if the list alone reaches a limit, or there is nothing.
      const uint64_t mass = score_list<kThreads>(list, seat, totals.largest, room);
      const bool whole = list->size >= seat.top_k || static_cast<double>(mass) >= enough || floor.value == kLowest;
      if (whole) return draw_from_list<kThreads>(list, seat, enough, room);
    }
  }
  __syncthreads();
  return draw_by_rounds<kThreads>(row, seat, totals.largest, enough, room);
}

}  // namespace sampling
