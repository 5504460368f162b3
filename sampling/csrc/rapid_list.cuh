// Drawing from a short list: the tokens above a threshold, ranked in shared memory.
#pragma once

#include "rapid_draw.cuh"

namespace sampling {

constexpr int kListRoom = 1024;   // candidates that fit
constexpr int kMaxTopK = 768;     // largest top_k for which the list is tried
constexpr int kFirstGuess = 160;  // candidates to look at where top_p alone cuts
constexpr int kRankers = 8;       // threads that rank a candidate together

struct List {
  uint64_t mass[kListRoom];
  float value[kListRoom];
  int token[kListRoom];
  uint8_t kept[kListRoom];
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
__device__ Totals scan_chunks(const Row<T>& row, const Seat& seat, Chunk* chunks, uint64_t* room) {
  const float scale2 = seat.scale * kLog2e;
  const bool with_mass = seat.top_p < 1;
  float largest = minus_infinity();
  Chunk chunk{minus_infinity(), 0.0f};
  int current = -1;
  for_each_batch<kThreads>(row, [&](int number, const Batch& batch) {
    if (number != current) chunk = Chunk{minus_infinity(), 0.0f}, current = number;
    float most = batch.value[0];
#pragma unroll
    for (int i = 1; i < 4 * kBatch; ++i) most = fmaxf(most, batch.value[i]);
    const float before = chunk.largest;
    chunk.largest = fmaxf(before, most);
    if (with_mass && chunk.largest > minus_infinity()) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i) sum += mass_of(batch.value[i], chunk.largest, scale2);
      chunk.mass = chunk.mass * mass_of(before, chunk.largest, scale2) + sum;
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

// How many of the chunk maxima reach `floor`. Rounds of even and odd number use different room, so that one barrier
// each is enough.
template <int kThreads, class T>
__device__ __forceinline__ int chunks_from(const Row<T>& row, const Chunk* chunks, float floor, int round, int* room) {
  int count = 0;
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes)
    count += chunks[block * kLanes + threadIdx.x % kLanes].largest >= floor;
#pragma unroll
  for (int offset = 16; offset; offset /= 2) count += __shfl_xor_sync(0xffffffffu, count, offset);
  int* const mine = room + 32 * (round & 1);
  if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = count;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) total += mine[warp];
  return total;
}

// A value that at least `wanted` chunk maxima reach, if so many are finite: then at least `wanted` tokens reach it.
// Bisects until not many more do.
template <int kThreads, class T>
__device__ Floor find_floor(const Row<T>& row, const Chunk* chunks, float largest, int wanted, uint64_t* room) {
  const int lane = threadIdx.x % kLanes;
  uint64_t lowest = 0;  // of the finite maxima, as the largest of the negated ones
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes) {
    const float most = chunks[block * kLanes + lane].largest;
    if (most >= kLowest) lowest = Largest()(lowest, pair_of(-most, 0));
  }
  lowest = over_block<kThreads>(lowest, Largest(), room);
  int* const counts = reinterpret_cast<int*>(room);
  const int finite = chunks_from<kThreads>(row, chunks, kLowest, 0, counts);
  if (finite < wanted) return Floor{kLowest, finite};
  Floor low{-value_of(lowest), finite};
  float high = largest;
  for (int round = 1; round < 24 && low.chunks > wanted + wanted / 2 + 16; ++round) {
    const float middle = 0.5f * low.value + 0.5f * high;
    if (!(middle > low.value && middle < high)) break;
    const int count = chunks_from<kThreads>(row, chunks, middle, round, counts);
    if (count < wanted) {
      high = middle;
    } else {
      low = Floor{middle, count};
    }
  }
  __syncthreads();
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

// Marks which of the list are kept; returns whether some token of it is not.
template <int kThreads>
__device__ bool mark_kept(List* list, const Seat& seat, float largest, double enough) {
  const int size = list->size;
  const float scale2 = seat.scale * kLog2e;
  for (int i = threadIdx.x; i < size; i += kThreads) list->mass[i] = to_fixed(mass_of(list->value[i], largest, scale2));
  __syncthreads();
  bool some_cut = false;
  const int part = threadIdx.x % kRankers;
  for (int base = 0; base < size; base += kThreads / kRankers) {
    const int own = base + threadIdx.x / kRankers;
    int rank = 0;
    uint64_t before = 0;
    if (own < size) {
      const Place place{list->value[own], list->token[own]};
      for (int other = part; other < size; other += kRankers)
        if (place.is_after(list->value[other], list->token[other])) ++rank, before += list->mass[other];
    }
#pragma unroll
    for (int offset = kRankers / 2; offset; offset /= 2) {
      rank += __shfl_xor_sync(0xffffffffu, rank, offset);
      before += __shfl_xor_sync(0xffffffffu, before, offset);
    }
    if (own < size) {
      const bool kept = rank == 0 || (rank < seat.top_k && static_cast<double>(before) < enough);
      if (part == 0) list->kept[own] = kept;
      some_cut |= !kept;
    }
  }
  return __syncthreads_or(some_cut);
}

template <int kThreads>
__device__ int draw_kept(const List* list, const Seat& seat, uint64_t* room) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < list->size; i += kThreads)
    if (list->kept[i]) best = Largest()(best, scored(seat, list->token[i], list->value[i]));
  return token_of(over_block<kThreads>(best, Largest(), room));
}

// Draws for a row with top_k or top_p; token 0 if no logit is finite.
template <int kThreads, class T>
__device__ int draw_cut(const Row<T>& row, const Seat& seat, Chunk* chunks, List* list, uint64_t* room) {
  const Totals totals = scan_chunks<kThreads>(row, seat, chunks, room);
  if (totals.largest == minus_infinity()) return 0;
  const double enough = seat.top_p < 1 ? seat.top_p * static_cast<double>(totals.mass) : INFINITY;
  if (seat.top_k <= kMaxTopK || seat.top_p < 1) {
    const int wanted = seat.top_k <= kMaxTopK ? seat.top_k : kFirstGuess;
    const Floor floor = find_floor<kThreads>(row, chunks, totals.largest, wanted, room);
    const bool fits = floor.chunks <= kListRoom;
    if (fits) gather<kThreads>(row, chunks, floor.value, list);
    if (fits && list->size <= kListRoom) {
      const bool some_cut = mark_kept<kThreads>(list, seat, totals.largest, enough);
      // Decided if the cut lies within the list, or if nothing is left outside it.
      if (some_cut || list->size >= seat.top_k || floor.value == kLowest) return draw_kept<kThreads>(list, seat, room);
    }
  }
  __syncthreads();
  return draw_by_rounds<kThreads>(row, seat, totals.largest, enough, room);
}

}  // namespace sampling
