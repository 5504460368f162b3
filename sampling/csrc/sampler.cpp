// The CPU sampler: the same tokens as sampling/naive.py, rows in parallel. Not thread-safe; state per request slot is
// in the Sampler behind the handle.
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
  std::vector<float> maxima, work, scores;
  std::vector<Candidate> list;
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

// Returns the largest of kSize logits without NaN; sets `nans` if there are any. The constant size vectorises.
template <int kSize>
inline float largest_of(const float* logits, int& nans) {
  float largest = kNegativeInfinity;
  int found = 0;
#pragma omp simd reduction(max : largest) reduction(| : found)
  for (int token = 0; token < kSize; ++token) {
    const float value = logits[token];
    largest = value > largest ? value : largest;
    found |= value != value;
  }
  nans |= found;
  return largest;
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
    maxima[chunk] = largest_of<kChunk>(logits + chunk * kChunk, odd);
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

// Sets chunks without an allowed token to -inf, for passes that read every logit.
void clear_empty_chunks(float* logits, int vocab, const std::vector<float>& maxima) {
  for (size_t chunk = 0; chunk < maxima.size(); ++chunk) {
    if (maxima[chunk] > kNegativeInfinity) continue;
    const int begin = static_cast<int>(chunk) * kChunk;
    std::fill(logits + begin, logits + std::min(begin + kChunk, vocab), kNegativeInfinity);
  }
}

int32_t first_of(const Row& row) {
  const auto found = std::find(row.maxima->begin(), row.maxima->end(), row.largest);
  int32_t token = static_cast<int32_t>(found - row.maxima->begin()) * kChunk;
  while (row.logits[token] != row.largest) ++token;
  return token;
}

float exact_score(const Row& row, const SlotState& slot, int32_t token) {
  const uint32_t domain = slot.parameters.kind == kNoise ? kDomainNoise : kDomainGumbel;
  const uint32_t word = words_of_block(slot.parameters.seed, slot.step, token >> 2, domain).at[token & 3];
  const float scaled = row.logits[token] * row.scale;
  if (slot.parameters.kind == kNoise) return scaled + to_uniform(word) * slot.parameters.noise;
  return scaled + static_cast<float>(-std::log(-std::log1p(-static_cast<double>(to_uniform(word)))));
}

// Returns the candidate with the largest score; ties: the lowest token.
int32_t best_of(const Row& row, const SlotState& slot, const std::vector<Candidate>& candidates) {
  Candidate best{kNegativeInfinity, 0};
  for (const Candidate& candidate : candidates) {
    const Candidate scored{exact_score(row, slot, candidate.token), candidate.token};
    if (ranks_before(scored, best)) best = scored;
  }
  return best.token;
}

// Samples among many tokens: vectorised rough scores select a few, exact scores decide.
int32_t best_of_vocab(const Row& row, const SlotState& slot, const Cut* cut, Scratch& scratch) {
  const bool noisy = slot.parameters.kind == kNoise;
  std::vector<float>& scores = scratch.scores;
  const int blocks = (row.vocab + 3) / 4;
  scores.resize(4 * static_cast<size_t>(blocks));
  for (int block = 0; block < blocks; ++block) {
    const Words words =
        words_of_block(slot.parameters.seed, slot.step, block, noisy ? kDomainNoise : kDomainGumbel);
    for (int i = 0; i < 4; ++i) scores[4 * block + i] = to_uniform(words.at[i]);
  }
  const float noise = slot.parameters.noise;
  float best = kNegativeInfinity;
  if (noisy)
    for (int token = 0; token < row.vocab; ++token) scores[token] = row.logits[token] * row.scale + scores[token] * noise;
  else
    for (int token = 0; token < row.vocab; ++token) scores[token] = row.logits[token] * row.scale + rough_gumbel(scores[token]);
  if (cut)
    for (int token = 0; token < row.vocab; ++token)
      if (!cut->keeps(row.logits[token], token)) scores[token] = kNegativeInfinity;
  for (int token = 0; token < row.vocab; ++token) best = scores[token] > best ? scores[token] : best;
  // Large scores have a coarser rounding than the logarithms.
  const float floor = best - kRoughError - std::fabs(best) * 1e-6f;
  scratch.list.clear();
  for (int token = 0; token < row.vocab; ++token)
    if (scores[token] >= floor) scratch.list.push_back({row.logits[token], token});
  return best_of(row, slot, scratch.list);
}

// A chunk's random words: word i of block b belongs to token 4 * b + i.
struct ChunkWords {
  uint32_t at[4][kChunk / 4];
};

void random_words(const SlotState& slot, int chunk, ChunkWords& words) {
  const uint64_t seed = slot.parameters.seed, step = slot.step;
#pragma omp simd
  for (int block = 0; block < kChunk / 4; ++block) {
    const Words generated = words_of_block(seed, step, chunk * (kChunk / 4) + block, kDomainGumbel);
    words.at[0][block] = generated.at[0];
    words.at[1][block] = generated.at[1];
    words.at[2][block] = generated.at[2];
    words.at[3][block] = generated.at[3];
  }
}

bool any_at_most(const ChunkWords& words, uint32_t limit) {
  uint32_t lowest = ~0u;
  const uint32_t* all = &words.at[0][0];
#pragma omp simd reduction(min : lowest)
  for (int i = 0; i < kChunk; ++i) lowest = all[i] < lowest ? all[i] : lowest;
  return lowest <= limit;
}

// Samples among all tokens. A score s - log(-log(1 - u)) can reach the best one only if u <= exp(s - best). So most
// chunks cost their random words and one comparison, and low ones not even that.
int32_t best_of_all(const Row& row, const SlotState& slot) {
  const int32_t first = first_of(row);
  Candidate best{exact_score(row, slot, first), first};
  ChunkWords words;
  for (size_t chunk = 0; chunk < row.maxima->size(); ++chunk) {
    const float goal = best.logit - kRoughError - std::fabs(best.logit) * 1e-6f;
    const float needed = std::min((*row.maxima)[chunk] * row.scale - goal, 0.0f);
    const double highest = static_cast<double>(exp_nonpositive(needed)) * (1 + 1e-5) * 0x1p32;
    if (highest < 0.5) continue;
    const uint32_t limit = highest < 0x1p32 - 1 ? static_cast<uint32_t>(highest) : ~0u;
    random_words(slot, static_cast<int>(chunk), words);
    if (!any_at_most(words, limit)) continue;
    for (int i = 0; i < kChunk; ++i) {
      const int32_t token = static_cast<int32_t>(chunk) * kChunk + i;
      if (words.at[i % 4][i / 4] > limit || token >= row.vocab) continue;
      const Candidate scored{exact_score(row, slot, token), token};
      if (ranks_before(scored, best)) best = scored;
    }
  }
  return best.token;
}

int32_t sample_truncated(float* logits, const Row& row, const SlotState& slot, Scratch& scratch) {
  const Parameters& p = slot.parameters;
  Limits limits{p.top_k, std::numeric_limits<double>::infinity()};
  if (p.top_p < 1) limits.enough = p.top_p * total_mass(row);
  std::vector<Candidate>& list = scratch.list;
  Cut cut;
  if (find_cut(row, limits, scratch.work, list, cut)) return best_of(row, slot, list);
  clear_empty_chunks(logits, row.vocab, *row.maxima);
  if (cut.kept > 2 * kMaxSorted) return best_of_vocab(row, slot, &cut, scratch);
  list.clear();
  for (int32_t token = 0; token < row.vocab; ++token)
    if (cut.keeps(row.logits[token], token)) list.push_back({row.logits[token], token});
  return best_of(row, slot, list);
}

// Applies the row's filters and returns the largest logit that they leave.
float filter(float* logits, int vocab, float largest, SlotState& slot, Scratch& scratch) {
  FilteredRow row(logits, vocab, largest, scratch.maxima, *slot.filters, scratch.filters);
  row.ban(slot.step);
  row.run(slot.parameters.seed, slot.step, [&](auto visit) { each_presence(slot, visit); });
  return row.largest();
}

int32_t sample_row(float* logits, const uint32_t* mask, int vocab, SlotState& slot, Scratch& scratch) {
  add_bias(logits, slot);
  if (!slot.filters) each_presence(slot, [&](int32_t token, float penalty) { logits[token] -= penalty; });
  float largest = scan(logits, mask, vocab, scratch.maxima);
  if (slot.filters) largest = filter(logits, vocab, largest, slot, scratch);
  if (largest == kNegativeInfinity) return 0;
  const Row row{logits, vocab, largest, slot.parameters.scale, &scratch.maxima};
  switch (slot.parameters.kind) {
    case kTruncated:
      return sample_truncated(logits, row, slot, scratch);
    case kUntruncated:
      return best_of_all(row, slot);
    case kNoise:
      clear_empty_chunks(logits, vocab, scratch.maxima);
      return best_of_vocab(row, slot, nullptr, scratch);
    default:
      return first_of(row);
  }
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
    if (slot.filters && slot.filters->is_mirostat())
      slot.filters->learn(at[token], *std::max_element(scratch.maxima.begin(), scratch.maxima.end()));
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
