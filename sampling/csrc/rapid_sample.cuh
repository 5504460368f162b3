// Samples a token of a row, or of a split: untruncated rows, and truncated rows without a short list.
#pragma once

#include "rapid_row.cuh"

namespace sampling {

// Gumbel noise, within 2 ulp of the definition.
__device__ __forceinline__ float gumbel_of(float u) { return -logf(-log1pf(-u)); }

// Same within 1e-4, with far fewer instructions.
__device__ __forceinline__ float rough_gumbel_of(float u) {
  const float series = u * (1.0f + u * (0.5f + u * 0.333333333f));
  return -__logf(u < 0.01f ? series : -__logf(1.0f - u));
}

// The score, rounded as in the definition: product and sum separately.
__device__ __forceinline__ float score_of(float value, const SlotState& slot, uint32_t word) {
  const float scaled = __fmul_rn(value, slot.scale), u = to_uniform(word);
  if (slot.kind == kNoise) return __fadd_rn(scaled, __fmul_rn(u, slot.noise));
  return __fadd_rn(scaled, gumbel_of(u));
}

// score_of within half of slack_of, with far fewer instructions.
__device__ __forceinline__ float rough_score_of(float value, const SlotState& slot, uint32_t word) {
  const float scaled = value * slot.scale, u = to_uniform(word);
  return scaled + (slot.kind == kNoise ? u * slot.noise : rough_gumbel_of(u));
}

// Tokens whose rough scores differ by more than this are in the order of their exact scores.
__device__ __forceinline__ float slack_of(float rough_score) { return 1e-3f + fabsf(rough_score) * 2e-6f; }

__device__ __forceinline__ Words words_of(const SlotState& slot, int quad) {
  return words_of_block(slot.seed, slot.step, quad, slot.kind == kNoise ? kDomainNoise : kDomainGumbel);
}

__device__ __forceinline__ uint32_t word_of(const Words& words, int token) {
  const uint32_t low = token & 1 ? words.at[1] : words.at[0], high = token & 1 ? words.at[3] : words.at[2];
  return token & 2 ? high : low;
}

// Exact score of one token.
__device__ __forceinline__ float exact_score(const SlotState& slot, int token, float value) {
  return score_of(value, slot, word_of(words_of(slot, token >> 2), token));
}

// A position in the ranking: a larger logit, or an equal one with a lower id, ranks before it.
struct RankPosition {
  float value;
  int token;

  __device__ bool is_after(float other_value, int other_token) const {
    return other_value > value || (other_value == value && other_token < token);
  }
};

constexpr RankPosition kAfterAll{-INFINITY, -1};

// Returns the largest logit of a range and its token, without entries; 0 if none is finite.
__device__ inline uint64_t largest_logit(const Row& row, Range range, const Ring& ring) {
  float best = minus_infinity(), known = minus_infinity();  // known: the largest of the warp
  int at = 0;
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    // Marked, NaN or too large values are candidates first and are cleaned then.
    if (!__any_sync(kAll, batch.largest() >= known)) return;
    clean(row, batch);
    // A thread reads its tokens in rising order, so the first of equal ones stays.
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i)
      if (batch.value[i] > best) best = batch.value[i], at = batch.token(i);
    known = value_of(__reduce_max_sync(kAll, ordered(best)));
  });
  return best == minus_infinity() ? 0 : pair_of(best, at);
}

// Best rough score of a quad's tokens that rank before `limit`; -inf without any.
__device__ __forceinline__ float rough_best_of_quad(
    const Row& row, const SlotState& slot, int quad, const Quad& raw, RankPosition limit) {
  const Words words = words_of(slot, quad);
  const uint32_t bits = row.marks ? marked(row, quad) : 0u;
  float best = minus_infinity();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = cleaned(raw.at[i]);
    const float score = rough_score_of(value, slot, words.at[i]);
    if (!(bits >> i & 1) && limit.is_after(value, 4 * quad + i)) best = fmaxf(best, score);
  }
  return best;
}

// Best (score, token) of the calling thread among tokens of a range that rank before `limit`, without entries; 0: none.
// The maximum over the threads is the range's.
//
// A token is scored only if it may reach the best score found so far, in shared memory. The test costs few
// instructions, for a quad's largest logit and best random word first: s + gumbel(u) >= t needs u <= -log(1 - u) <=
// exp(s - t), and s + noise * u >= t is linear. Few tokens pass.
template <bool kNoisy>
__device__ uint64_t best_score(
    const Row& row, Range range, const Ring& ring, const SlotState& slot, RankPosition limit, uint32_t* found) {
  const float scale2 = slot.scale * kLog2e;
  if (threadIdx.x == 0) *found = 0;
  __syncthreads();
  {  // First threshold: a score that each thread's first quad certainly reaches.
    const int quad = range.first * kBatchQuads + static_cast<int>(threadIdx.x);
    const float rough = rough_best_of_quad(row, slot, quad, ring.arrived(range.first)[0], limit);
    const uint32_t max_value = __reduce_max_sync(kAll, ordered(rough - slack_of(rough)));
    if (threadIdx.x % 32 == 0) atomicMax(found, max_value);
  }
  __syncthreads();
  uint64_t best = 0;
  for_each_batch(row, range, ring, [&](int, const Batch& batch) {
    const uint32_t key = *const_cast<const volatile uint32_t*>(found);
    const float reached = key ? value_of(key) : minus_infinity();
    const float threshold = reached - slack_of(reached);  // -inf stays; infinity becomes NaN, which passes all
    const float offset = -threshold * kLog2e;
    // NaN passes.
    const auto may_reach = [&](float value, uint32_t word) {
      const float one_and = __uint_as_float(word >> 9 | 0x3f800000u);  // 1 + u or up to 2^-23 less
      if constexpr (kNoisy) return !(value * slot.scale + slot.noise * (one_and - 0.9999998f) < threshold);
      return !(one_and > 1.0f + fast_exp2(fmaf(value, scale2, offset)));
    };
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float* value = batch.value + 4 * j;
      const float max_value = fmaxf(fmaxf(value[0], value[1]), fmaxf(value[2], value[3]));
      if (max_value < limit.value) continue;
      const uint32_t domain = kNoisy ? kDomainNoise : kDomainGumbel;
      const Words words = words_of_block(slot.seed, slot.step, batch.first + kThreads * j, domain);
      uint32_t lowest = words.at[0], highest = words.at[0];
#pragma unroll
      for (int i = 1; i < 4; ++i) lowest = min(lowest, words.at[i]), highest = max(highest, words.at[i]);
      if (!may_reach(max_value, kNoisy ? highest : lowest)) continue;
      uint32_t left = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) left |= static_cast<uint32_t>(may_reach(value[i], words.at[i])) << i;
      while (left) {
        const int i = __ffs(left) - 1, token = batch.token(4 * j) + i;
        left &= left - 1;
        const float found_value = cleaned(i & 2 ? (i & 1 ? value[3] : value[2]) : (i & 1 ? value[1] : value[0]));
        if (found_value == minus_infinity() || !limit.is_after(found_value, token) || has_entry(row, token)) continue;
        const uint64_t pair = pair_of(score_of(found_value, slot, word_of(words, i)), token);
        if (pair > best) best = pair, atomicMax(found, static_cast<uint32_t>(pair >> 32));
      }
    }
  });
  return best;
}

// A token's logit, adjusted and cleaned.
__device__ inline float logit_of(const Row& row, int token) {
  if (has_entry(row, token)) {
    for (int i = 0; i < row.num_entries; ++i)
      if (row.entries[i].token == token) return row.entries[i].value;
  }
  return cleaned(row.logits[token]);
}

// Counts the tokens that rank before a position, and sums their mass.
__device__ inline Tally tally_before(
    const Row& row, Range range, const Ring& ring, RankPosition position, float largest, float scale2, ReduceBuffers& buffers) {
  Tally tally{0, 0};
  for_each_batch(row, range, ring, [&](int, Batch batch) {
    clean(row, batch);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i)
      if (position.is_after(batch.value[i], batch.token(i)))
        ++tally.count, sum += mass_of(batch.value[i], largest, scale2);
    tally.mass += to_fixed(sum);
  });
  for_each_entry(row, [&](int token, float value) {
    if (position.is_after(value, token)) ++tally.count, tally.mass += to_fixed(mass_of(value, largest, scale2));
  });
  return sum_over_block(tally, buffers);
}

// Samples a truncated row by rounds. Takes the best score of all, unless that token is truncated. Then takes the best
// of those that rank before it, and so on. Tokens that rank after a truncated one are truncated, too, so the result is
// exact. A round
// halves the rest on average.
__device__ inline int sample_by_rounds(
    const Row& row, Range range, const Ring& ring, const SlotState& slot, float largest, double enough,
    uint32_t* found, ReduceBuffers& buffers) {
  RankPosition limit = kAfterAll;
  while (true) {
    ring.begin(row, range);
    uint64_t best = best_score<false>(row, range, ring, slot, limit, found);
    for_each_entry(row, [&](int token, float value) {
      if (value > minus_infinity() && limit.is_after(value, token))
        best = larger(best, pair_of(exact_score(slot, token, value), token));
    });
    best = max_over_block(best, buffers);
    if (best == 0) return 0;
    ring.begin(row, range);
    const int token = token_of(best);
    limit = RankPosition{logit_of(row, token), token};
    const Tally before = tally_before(row, range, ring, limit, largest, slot.scale * kLog2e, buffers);
    const bool within_k = before.count < static_cast<uint32_t>(slot.top_k);
    if (before.count == 0 || (within_k && static_cast<double>(before.mass) < enough)) return token;
  }
}

}  // namespace sampling
