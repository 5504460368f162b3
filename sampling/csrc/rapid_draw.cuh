// Drawing one token of a row, or of a part of it, by a block of threads: rows that are not cut, and those that are cut
// but not by a short list.
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

__device__ __forceinline__ uint32_t word_of(const Words& words, int token) {
  const uint32_t low = token & 1 ? words.at[1] : words.at[0], high = token & 1 ? words.at[3] : words.at[2];
  return token & 2 ? high : low;
}

// Score of one token by itself.
__device__ __forceinline__ float exact_score(const Seat& seat, int token, float value) {
  return score_of(value, seat, word_of(words_of(seat, token >> 2), token));
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

// The largest logit of a range and its token as a pair, entries apart; 0 if none is finite.
__device__ inline uint64_t largest_logit(const Row& row, Range range, const Ring& ring) {
  float best = minus_infinity(), known = minus_infinity();  // known: the largest of the warp
  int at = 0;
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    // What is marked, NaN or too large counts as a candidate first and is cleaned then.
    if (!__any_sync(kAll, batch.largest() >= known)) return;
    clean(row, batch);
    // A thread meets its tokens in rising order, so the first of equal ones stays.
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i)
      if (batch.value[i] > best) best = batch.value[i], at = batch.token(i);
    known = value_of(__reduce_max_sync(kAll, ordered(best)));
  });
  return best == minus_infinity() ? 0 : pair_of(best, at);
}

// The best rough score of a quad's tokens that rank before `limit`; -inf if there are none.
__device__ __forceinline__ float rough_best_of_quad(
    const Row& row, const Seat& seat, int quad, const Quad& raw, Place limit) {
  const Words words = words_of(seat, quad);
  const uint32_t bits = row.marks ? marked(row, quad) : 0u;
  float best = minus_infinity();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = cleaned(raw.at[i]);
    const float score = rough_score_of(value, seat, words.at[i]);
    if (!(bits >> i & 1) && limit.is_after(value, 4 * quad + i)) best = fmaxf(best, score);
  }
  return best;
}

// The best score among the tokens of a range that rank before `limit`, as a pair, for the calling thread's share;
// entries apart; 0 if there are none. The largest of all threads is the range's.
//
// A token takes part only if its score may reach what some thread has found already, which is kept in shared memory.
// That is asked in a few instructions, of a quad's largest logit and best word before its tokens: s + gumbel(u) >= t
// needs u <= -log(1 - u) <= exp(s - t), and s + noise u >= t is linear. Few tokens pass.
template <bool kNoisy>
__device__ uint64_t best_score(
    const Row& row, Range range, const Ring& ring, const Seat& seat, Place limit, uint32_t* found) {
  const float scale2 = seat.scale * kLog2e;
  if (threadIdx.x == 0) *found = 0;
  __syncthreads();
  {  // A first bar: what each thread's first quad reaches for certain.
    const int quad = range.first * kBatchQuads + static_cast<int>(threadIdx.x);
    const float rough = rough_best_of_quad(row, seat, quad, ring.arrived(range.first)[0], limit);
    const uint32_t most = __reduce_max_sync(kAll, ordered(rough - slack_of(rough)));
    if (threadIdx.x % 32 == 0) atomicMax(found, most);
  }
  __syncthreads();
  uint64_t best = 0;
  for_each_batch(row, range, ring, [&](int, const Batch& batch) {
    const uint32_t key = *const_cast<const volatile uint32_t*>(found);
    const float reached = key ? value_of(key) : minus_infinity();
    const float threshold = reached - slack_of(reached);  // -inf stays, infinity becomes NaN and lets all pass
    const float offset = -threshold * kLog2e;
    // NaN passes.
    const auto may_reach = [&](float value, uint32_t word) {
      const float one_and = __uint_as_float(word >> 9 | 0x3f800000u);  // 1 + u or up to 2^-23 less
      if constexpr (kNoisy) return !(value * seat.scale + seat.noise * (one_and - 0.9999998f) < threshold);
      return !(one_and > 1.0f + fast_exp2(fmaf(value, scale2, offset)));
    };
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float* value = batch.value + 4 * j;
      const float most = fmaxf(fmaxf(value[0], value[1]), fmaxf(value[2], value[3]));
      if (most < limit.value) continue;
      const uint32_t domain = kNoisy ? kDomainNoise : kDomainGumbel;
      const Words words = words_of_block(seat.seed, seat.step, batch.first + kThreads * j, domain);
      uint32_t lowest = words.at[0], highest = words.at[0];
#pragma unroll
      for (int i = 1; i < 4; ++i) lowest = min(lowest, words.at[i]), highest = max(highest, words.at[i]);
      if (!may_reach(most, kNoisy ? highest : lowest)) continue;
      uint32_t left = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) left |= static_cast<uint32_t>(may_reach(value[i], words.at[i])) << i;
      while (left) {
        const int i = __ffs(left) - 1, token = batch.token(4 * j) + i;
        left &= left - 1;
        const float found_value = cleaned(i & 2 ? (i & 1 ? value[3] : value[2]) : (i & 1 ? value[1] : value[0]));
        if (found_value == minus_infinity() || !limit.is_after(found_value, token) || has_entry(row, token)) continue;
        const uint64_t pair = pair_of(score_of(found_value, seat, word_of(words, i)), token);
        if (pair > best) best = pair, atomicMax(found, static_cast<uint32_t>(pair >> 32));
      }
    }
  });
  return best;
}

// The logit of a token, changed and cleaned.
__device__ inline float logit_of(const Row& row, int token) {
  if (has_entry(row, token)) {
    for (int i = 0; i < row.num_entries; ++i)
      if (row.entries[i].token == token) return row.entries[i].value;
  }
  return cleaned(row.logits[token]);
}

// How many tokens of the row rank before a place, and their mass.
__device__ inline Tally before_place(
    const Row& row, Range range, const Ring& ring, Place place, float largest, float scale2, Room& room) {
  Tally tally{0, 0};
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    clean(row, batch);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i)
      if (place.is_after(batch.value[i], batch.token(i)))
        ++tally.count, sum += mass_of(batch.value[i], largest, scale2);
    tally.mass += to_fixed(sum);
  });
  for_each_entry(row, [&](int token, float value) {
    if (place.is_after(value, token)) ++tally.count, tally.mass += to_fixed(mass_of(value, largest, scale2));
  });
  return sum_over_block(tally, room);
}

// Draws from a long list: the best score of all, unless that token is cut; then the best of those that rank before
// it, and so on. Whatever ranks after a token that is cut is cut too, so the result is exact; every round halves what
// is left on average.
__device__ inline int draw_by_rounds(
    const Row& row, Range range, const Ring& ring, const Seat& seat, float largest, double enough,
    uint32_t* found, Room& room) {
  Place limit = kBehindAll;
  while (true) {
    ring.begin(row, range);
    uint64_t best = best_score<false>(row, range, ring, seat, limit, found);
    for_each_entry(row, [&](int token, float value) {
      if (value > minus_infinity() && limit.is_after(value, token))
        best = larger(best, pair_of(exact_score(seat, token, value), token));
    });
    best = max_over_block(best, room);
    if (best == 0) return 0;
    ring.begin(row, range);
    const int token = token_of(best);
    limit = Place{logit_of(row, token), token};
    const Tally before = before_place(row, range, ring, limit, largest, seat.scale * kLog2e, room);
    const bool within_k = before.count < static_cast<uint32_t>(seat.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return token;
  }
}

}  // namespace sampling
