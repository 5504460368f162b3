// Drawing one token of a row by a block of threads, for rows whose tokens are not cut (or not by a short list).
#pragma once

#include "rapid_row.cuh"

namespace sampling {

// The number that is added to a token's scaled logit; within 2 ulp of the definition.
__device__ __forceinline__ float gumbel_of(float u) { return -logf(-log1pf(-u)); }

// The same within 1e-4, in a fraction of the instructions.
__device__ __forceinline__ float rough_gumbel_of(float u) {
  const float series = u * (1.0f + u * (0.5f + u * 0.333333333f));
  return -__logf(u < 0.01f ? series : -__logf(1.0f - u));
}

// The draw's score, rounded as in the definition: product and sum apart.
__device__ __forceinline__ float score_of(float value, const Seat& seat, uint32_t word) {
  const float scaled = __fmul_rn(value, seat.scale), u = to_uniform(word);
  if (seat.kind == kNoise) return __fadd_rn(scaled, __fmul_rn(u, seat.noise));
  return __fadd_rn(scaled, gumbel_of(u));
}

// score_of within half of slack_of, in a fraction of the instructions.
__device__ __forceinline__ float rough_score_of(float value, const Seat& seat, uint32_t word) {
  const float scaled = value * seat.scale, u = to_uniform(word);
  return scaled + (seat.kind == kNoise ? u * seat.noise : rough_gumbel_of(u));
}

// Tokens whose rough scores are further apart than this are in the order of their exact ones.
__device__ __forceinline__ float slack_of(float rough_score) { return 1e-3f + fabsf(rough_score) * 2e-6f; }

__device__ __forceinline__ Words words_of(const Seat& seat, int quad) {
  return words_of_block(seat.seed, seat.step, quad, seat.kind == kNoise ? kDomainNoise : kDomainGumbel);
}

// Score of one token by itself.
__device__ __forceinline__ uint64_t scored(const Seat& seat, int token, float value) {
  const Words words = words_of(seat, token >> 2);
  const uint32_t low = token & 1 ? words.at[1] : words.at[0], high = token & 1 ? words.at[3] : words.at[2];
  return pair_of(score_of(value, seat, token & 2 ? high : low), token);
}

// The largest logit and its token.
template <int kThreads, class T>
__device__ uint64_t largest_logit(const Row<T>& row, Room& room) {
  float best = minus_infinity();
  int at = 0;
  for_each_batch<kThreads>(row, [&](int, const Batch& batch) {
    if (batch.largest() > best) {
      // A thread meets its tokens in rising order, so the first of equal ones stays.
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i)
        if (batch.value[i] > best) best = batch.value[i], at = batch.token(i);
    }
  });
  uint64_t pair = best == minus_infinity() ? 0 : pair_of(best, at);
  for_each_entry<kThreads>(row, [&](int token, float value) {
    if (value > minus_infinity()) pair = Largest()(pair, pair_of(value, token));
  });
  return over_block<kThreads>(pair, Largest(), room);
}

// A place in the rank order: tokens with a larger logit, or an equal one and a lower id, rank before it.
struct Place {
  float value;
  int token;

  __device__ bool is_after(float other_value, int other_token) const {
    return other_value > value || (other_value == value && other_token < token);
  }
};

constexpr Place kBehindAll{-INFINITY, -1};

// The calling thread's best rough score, its token and logit, and the second best score.
struct RoughBest {
  float best = minus_infinity(), second = minus_infinity(), value = minus_infinity();
  int token = 0;
};

template <int kThreads, class T>
__device__ RoughBest rough_best(const Row<T>& row, const Seat& seat, Place limit) {
  RoughBest rough;
  for_each_batch<kThreads>(row, [&](int, const Batch& batch) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float* value = batch.value + 4 * j;
      const float most = fmaxf(fmaxf(value[0], value[1]), fmaxf(value[2], value[3]));
      if (!(most > minus_infinity()) || !(most >= limit.value)) continue;
      const Words words = words_of(seat, batch.first + kLanes * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = batch.token(4 * j + i);
        const float found = rough_score_of(value[i], seat, words.at[i]);
        const float score = limit.is_after(value[i], token) ? found : minus_infinity();
        const bool better = score > rough.best;
        rough.second = fmaxf(rough.second, better ? rough.best : score);
        rough.best = better ? score : rough.best;
        rough.token = better ? token : rough.token;
        rough.value = better ? value[i] : rough.value;
      }
    }
  });
  return rough;
}

// The best of all exact scores, for the rare row where rough ones leave it open.
template <int kThreads, class T>
__device__ uint64_t exact_best(const Row<T>& row, const Seat& seat, Place limit) {
  uint64_t pair = 0;
  for_each_batch<kThreads>(row, [&](int, const Batch& batch) {
    for (int i = 0; i < 4 * kBatch; ++i) {
      const int token = batch.token(i);
      if (limit.is_after(batch.value[i], token)) pair = Largest()(pair, scored(seat, token, batch.value[i]));
    }
  });
  return pair;
}

// The best score among the tokens that rank before `limit` (finite ones), as a pair; 0 if there are none.
// Rough scores say which threads may hold it. Only if one thread may hold it twice are all scores made exact.
template <int kThreads, class T>
__device__ uint64_t best_score(const Row<T>& row, const Seat& seat, Place limit, Room& room) {
  const RoughBest rough = rough_best<kThreads>(row, seat, limit);
  const float most = value_of(over_block<kThreads>(pair_of(rough.best, 0), Largest(), room));
  const float floor = most - slack_of(most);
  uint64_t pair = 0;
  if (__syncthreads_or(rough.second >= floor && rough.second > minus_infinity())) {
    pair = exact_best<kThreads>(row, seat, limit);
  } else if (rough.best >= floor && rough.best > minus_infinity()) {
    pair = scored(seat, rough.token, rough.value);
  }
  for_each_entry<kThreads>(row, [&](int token, float value) {
    if (value > minus_infinity() && limit.is_after(value, token)) pair = Largest()(pair, scored(seat, token, value));
  });
  return over_block<kThreads>(pair, Largest(), room);
}

// The logit of a token, changed and cleaned.
template <class T>
__device__ float logit_of(const Row<T>& row, int token) {
  if (row.marks && row.marks[token >> 5] >> (token & 31) & 1) {
    for (int i = 0; i < row.num_entries; ++i)
      if (row.entries[i].token == token) return row.entries[i].value;
  }
  return cleaned(to_float(row.logits[token]));
}

// How many tokens rank before a place, and their mass.
struct Before {
  uint64_t count, mass;
};

template <int kThreads, class T>
__device__ Before before_place(const Row<T>& row, Place place, float largest, float scale2, Room& room) {
  uint64_t count = 0, mass = 0;
  for_each_batch<kThreads>(row, [&](int, const Batch& batch) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i)
      if (place.is_after(batch.value[i], batch.token(i))) ++count, sum += mass_of(batch.value[i], largest, scale2);
    mass += to_fixed(sum);
  });
  for_each_entry<kThreads>(row, [&](int token, float value) {
    if (place.is_after(value, token)) ++count, mass += to_fixed(mass_of(value, largest, scale2));
  });
  count = over_block<kThreads>(count, Sum(), room);
  return Before{count, over_block<kThreads>(mass, Sum(), room)};
}

// Draws from a long list: the best score of all, unless that token is cut; then the best of those that rank before
// it, and so on. Whatever ranks after a token that is cut is cut too, so the result is exact; every round halves what
// is left on average.
template <int kThreads, class T>
__device__ int draw_by_rounds(const Row<T>& row, const Seat& seat, float largest, double enough, Room& room) {
  Place limit = kBehindAll;
  while (true) {
    const uint64_t best = best_score<kThreads>(row, seat, limit, room);
    if (best == 0) return 0;
    const int token = token_of(best);
    limit = Place{logit_of(row, token), token};
    const Before before = before_place<kThreads>(row, limit, largest, seat.scale * kLog2e, room);
    const bool within_k = before.count < static_cast<uint64_t>(seat.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return token;
  }
}

}  // namespace sampling
