// The CPU sampler: the same tokens as sampling/naive.py, rows in parallel. Not thread-safe; state per request slot is
// in the Sampler behind the handle.
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  // GCC's default is 256 for many of these CPUs
#endif
#include <omp.h>

#include <memory>

#include "filters_cpu.h"
#include "philox.h"
#include "ranking.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace sampling {

enum Kind : int32_t { kGreedy = 0, kTruncated = 1, kUntruncated = 2, kNoise = 3 };
constexpr float kRoughError = 1e-3f;  // more than twice the error of a rough score

// Mirrored in sampling/cpu.py.
struct Parameters {
  double top_p;   // 1: off
  int64_t top_k;  // vocabulary size if off
  uint64_t seed;
  float scale;  // 1 / T
  float noise;
  float presence, frequency, decay;
  int32_t kind;
  int32_t penalised;
  int32_t num_bias;
};

struct SlotState {
  Parameters parameters{};
  uint64_t step = 0;
  std::vector<int32_t> bias_tokens, seen;
  std::vector<float> bias_values, counts;
  std::unique_ptr<RowFilters> filters;  // null: the row has none
};

// Scratch memory of one thread.
struct Scratch {
  RowScratch row;
  FilterScratch filters;
};

struct Sampler {
  int vocab;
  std::vector<SlotState> req_slots;
  std::vector<uint8_t> penalty_exempt;
  std::vector<Scratch> scratch;
};

void add_bias(float* logits, const SlotState& slot) {
  for (size_t i = 0; i < slot.bias_tokens.size(); ++i) logits[slot.bias_tokens[i]] += slot.bias_values[i];
}

// Calls visit(token, penalty) for the tokens with presence and frequency penalties.
template <class Visit>
void each_presence(const SlotState& slot, Visit visit) {
  if (!slot.parameters.penalised) return;
  const float presence = slot.parameters.presence, frequency = slot.parameters.frequency;
  for (size_t i = 0; i < slot.seen.size(); ++i) visit(slot.seen[i], slot.counts[i] * frequency + presence);
}

// Sets forbidden tokens among `size` to -inf, unless all are forbidden. Returns whether any is allowed. words: mask
// words of these tokens.
inline bool apply_mask(float* logits, const uint32_t* words, int size) {
  uint32_t any = 0, all = ~0u;
  for (int at = 0; at < size; at += 32) any |= words[at / 32], all &= words[at / 32];
  if (!any || all == ~0u) return any;
  for (int at = 0; at < size; at += 32) {
    const uint32_t bits = words[at / 32];
    const int count = std::min(32, size - at);
    for (int i = 0; i < count; ++i) logits[at + i] = bits >> i & 1 ? logits[at + i] : kNegativeInfinity;
  }
  return true;
}

// Returns the largest logit and fills chunk maxima. NaN becomes -inf, too large values kMaxLogit. Tokens forbidden by
// `mask` (nullable) count as -inf; they are set to -inf unless their whole chunk is forbidden.
float scan(float* logits, const uint32_t* mask, int vocab, std::vector<float>& maxima) {
  const int whole = vocab / kChunk;
  maxima.assign((vocab + kChunk - 1) / kChunk, kNegativeInfinity);
  int odd = 0;
  for (int chunk = 0; chunk < whole; ++chunk) {
    if (mask && !apply_mask(logits + chunk * kChunk, mask + chunk * (kChunk / 32), kChunk)) continue;
    maxima[chunk] = largest_of(logits + chunk * kChunk, odd);
  }
  const int rest = whole * kChunk;
  if (rest < vocab && (!mask || apply_mask(logits + rest, mask + rest / 32, vocab - rest))) {
    for (int token = rest; token < vocab; ++token) {
      maxima[whole] = logits[token] > maxima[whole] ? logits[token] : maxima[whole];
      odd |= logits[token] != logits[token];
    }
  }
  const float largest = *std::max_element(maxima.begin(), maxima.end());
  if (!odd && largest <= kMaxLogit) return largest;
  for (int token = 0; token < vocab; ++token)
    logits[token] = logits[token] != logits[token] ? kNegativeInfinity : std::min(logits[token], kMaxLogit);
  for (float& maximum : maxima) maximum = std::min(maximum, kMaxLogit);
  return std::min(largest, kMaxLogit);
}

// Returns the position with the largest score: of noise, s + noise * u, else the Gumbel-max rule's s - log(-log(1 - u)).
// The latter can reach the best one only if u <= exp(s - best), the former if 1 - u <= (s + noise - best) / noise. So
// most chunks cost their random words and one comparison, and low ones not even that.
int best_of(const Row& row, const SlotState& slot) {
  const bool is_noise = slot.parameters.kind == kNoise;
  const float noise = slot.parameters.noise;
  const uint32_t flip = is_noise ? ~0u : 0;
  const RowWords words(slot.parameters.seed, slot.step, is_noise ? kDomainNoise : kDomainGumbel);
  const auto score_of = [&](int at, uint32_t word) {
    const float scaled = row.s[at] * row.scale, u = to_uniform(word);
    return is_noise ? scaled + u * noise : scaled + static_cast<float>(-std::log(-std::log1p(-static_cast<double>(u))));
  };
  int best = row.first_of_largest();
  float most = score_of(best, words.at(row.token(best)));
  for (size_t chunk = 0; chunk < row.maxima.size(); ++chunk) {
    if (row.maxima[chunk] == kNegativeInfinity) continue;
    const float goal = most - kRoughError - std::fabs(most) * 1e-6f;
    const float needed = std::min(row.maxima[chunk] * row.scale - goal, is_noise ? noise : 0.0f);
    const double share = !is_noise ? exp_nonpositive(needed) : noise > 0 ? static_cast<double>(noise + needed) / noise : 1;
    const double highest = share * (1 + 1e-5) * 0x1p32 + (is_noise ? 1024 : 0);
    if (highest < 0.5) continue;
    const uint32_t limit = highest < 0x1p32 - 1 ? static_cast<uint32_t>(highest) : ~0u;
    if (!row.ids && !words.any_at_most(chunk, flip, limit)) continue;
    const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, row.size);
    uint32_t all[kChunk];
    row.ids ? words.of_tokens(row.ids + begin, all) : words.of_chunk(chunk, all);
    for (int at = begin; at < end; ++at) {
      if ((all[at - begin] ^ flip) > limit) continue;
      const float score = score_of(at, all[at - begin]);
      if (score > most || (score == most && at < best)) most = score, best = at;
    }
  }
  return best;
}

int32_t sample_row(float* logits, const uint32_t* mask, int vocab, SlotState& slot, Scratch& scratch) {
  add_bias(logits, slot);
  if (!slot.filters) each_presence(slot, [&](int32_t token, float penalty) { logits[token] -= penalty; });
  const float largest = scan(logits, mask, vocab, scratch.row.maxima);
  Row row{logits, vocab, largest, slot.parameters.scale, scratch.row};
  if (slot.filters) {
    FilteredRow filtered(row, *slot.filters, scratch.filters);
    filtered.ban(slot.step);
    filtered.run(slot.parameters.seed, slot.step, [&](auto visit) { each_presence(slot, visit); });
  }
  if (row.largest == kNegativeInfinity) return 0;
  const Parameters& p = slot.parameters;
  if (p.kind == kTruncated) row.truncate(p.top_k, p.top_p);
  const int best = p.kind == kGreedy ? row.first_of_largest() : best_of(row, slot);
  if (slot.filters && slot.filters->is_mirostat()) slot.filters->learn(row.s[best], row.largest);
  return row.token(best);
}

void count(SlotState& slot, int32_t token, const std::vector<uint8_t>& penalty_exempt) {
  ++slot.step;
  if (slot.filters) slot.filters->remember(token);
  if (!slot.parameters.penalised) return;
  size_t at = slot.seen.size();
  for (size_t i = 0; i < slot.seen.size(); ++i) {
    slot.counts[i] *= slot.parameters.decay;
    if (slot.seen[i] == token) at = i;
  }
  if (at == slot.seen.size()) {
    slot.seen.push_back(token);
    slot.counts.push_back(0.0f);
  }
  if (!penalty_exempt[token]) slot.counts[at] += 1.0f;
}

}  // namespace sampling

using sampling::Sampler;

EXPORT Sampler* sampler_new(int64_t max_rows, int64_t vocab, const uint8_t* penalty_exempt) {
  auto sampler = std::make_unique<Sampler>();
  sampler->vocab = static_cast<int>(vocab);
  sampler->req_slots.resize(max_rows);
  sampler->penalty_exempt.assign(penalty_exempt, penalty_exempt + vocab);
  return sampler.release();
}

EXPORT void sampler_free(Sampler* sampler) { delete sampler; }

EXPORT void sampler_admit(Sampler* sampler, int64_t slot, const sampling::Parameters* parameters,
                          const int32_t* bias_tokens, const float* bias_values) {
  sampling::SlotState& slot_state = sampler->req_slots[slot];
  slot_state.parameters = *parameters;
  slot_state.step = 0;
  slot_state.seen.clear();
  slot_state.counts.clear();
  slot_state.bias_tokens.assign(bias_tokens, bias_tokens + parameters->num_bias);
  slot_state.bias_values.assign(bias_values, bias_values + parameters->num_bias);
  slot_state.filters.reset();
}

// Gives the admitted row filters. numbers: one list after the other, each with its size first: steps, prompt, stops, then
// bad words.
EXPORT void sampler_set_filters(Sampler* sampler, int64_t slot, const sampling::FilterParameters* parameters,
                                const int32_t* numbers, int64_t size, const uint8_t* breakers) {
  auto filters = std::make_unique<sampling::RowFilters>();
  filters->p = *parameters;
  filters->breakers = breakers;
  filters->mu = 2 * parameters->mirostat_tau;
  const int32_t* end = numbers + size;
  const auto next = [&] {
    const int32_t* begin = numbers + 1;
    numbers = begin + *numbers;
    return std::vector<int32_t>(begin, numbers);
  };
  filters->steps = next(), filters->history = next(), filters->stops = next();
  while (numbers < end) filters->bad_words.push_back(next());
  sampler->req_slots[slot].filters = std::move(filters);
}

// logits [rows, vocab] fp32 (overwritten), masks [rows, ceil(vocab / 32)] or null, req_slots [rows] distinct -> tokens
// [rows].
EXPORT void sampler_sample(Sampler* sampler, float* logits, const uint32_t* masks, int64_t rows, const int64_t* req_slots,
                           int64_t* tokens, int32_t threads) {
  const int64_t words = (sampler->vocab + 31) / 32;
  sampler->scratch.resize(std::max<size_t>(sampler->scratch.size(), threads));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    sampling::SlotState& slot = sampler->req_slots[req_slots[row]];
    sampling::Scratch& scratch = sampler->scratch[omp_get_thread_num()];
    const uint32_t* mask = masks ? masks + row * words : nullptr;
    float* at = logits + row * sampler->vocab;
    const int32_t token = sampling::sample_row(at, mask, sampler->vocab, slot, scratch);
    sampling::count(slot, token, sampler->penalty_exempt);
    tokens[row] = token;
  }
}

// Counts tokens that were appended to a slot's row without sampling.
EXPORT void sampler_append_tokens(Sampler* sampler, int64_t slot, const int32_t* tokens, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sampling::count(sampler->req_slots[slot], tokens[i], sampler->penalty_exempt);
}

// As sampler_sample without masks, for copies of slots without filters that have counted a run of tokens. numbers: the
// offsets [rows + 1] of the runs, then their tokens.
EXPORT void sampler_sample_ahead(Sampler* sampler, float* logits, int64_t rows, const int64_t* req_slots,
                                 const int32_t* numbers, int64_t* tokens, int32_t threads) {
  sampler->scratch.resize(std::max<size_t>(sampler->scratch.size(), threads));
  const int32_t* runs = numbers + rows + 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const sampling::SlotState& from = sampler->req_slots[req_slots[row]];
    sampling::SlotState slot{from.parameters, from.step, from.bias_tokens, from.seen, from.bias_values, from.counts, {}};
    for (int32_t i = numbers[row]; i < numbers[row + 1]; ++i) sampling::count(slot, runs[i], sampler->penalty_exempt);
    sampling::Scratch& scratch = sampler->scratch[omp_get_thread_num()];
    tokens[row] = sampling::sample_row(logits + row * sampler->vocab, nullptr, sampler->vocab, slot, scratch);
  }
}

// Sets logits [rows, vocab] fp32 to -inf where the bit of masks [rows, ceil(vocab / 32)] is 0.
EXPORT void sampler_apply_masks(float* logits, const uint32_t* masks, int64_t rows, int64_t vocab, int32_t threads) {
  const int64_t words = (vocab + 31) / 32;
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < vocab; begin += sampling::kChunk) {
      float* at = logits + row * vocab + begin;
      const int size = static_cast<int>(std::min<int64_t>(sampling::kChunk, vocab - begin));
      if (!sampling::apply_mask(at, masks + row * words + begin / 32, size)) std::fill(at, at + size, sampling::kNegativeInfinity);
    }
  }
}
