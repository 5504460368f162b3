// The sampler for CPUs. The definition is sampling/naive.py; this draws the same tokens, rows over threads.
// One thread calls it at a time; everything per seat lives in the Sampler behind the handle.
#include <omp.h>

#include <memory>

#include "philox.h"
#include "ranking.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace sampling {

enum Kind : int32_t { kGreedy = 0, kCut = 1, kOpen = 2, kNoise = 3 };
constexpr float kMaxLogit = 1e30f;
constexpr float kRoughness = 1e-3f;  // more than twice the error of a rough score

// Mirrored in sampling/cpu.py.
struct Parameters {
  double top_p;   // 1: off
  int64_t top_k;  // the vocabulary where off
  uint64_t seed;
  float scale;  // 1 / T
  float noise;
  float presence, frequency, decay;
  int32_t kind;
  int32_t penalised;
  int32_t num_bias;
};

struct Seat {
  Parameters parameters{};
  uint64_t step = 0;
  std::vector<int32_t> bias_tokens, seen;
  std::vector<float> bias_values, counts;
};

// Work space of one thread.
struct Scratch {
  std::vector<float> maxima, work, scores;
  std::vector<Candidate> list;
};

struct Sampler {
  int vocab;
  std::vector<Seat> seats;
  std::vector<uint8_t> penalty_exempt;
  std::vector<Scratch> scratch;
};

void adjust(float* logits, const Seat& seat) {
  for (size_t i = 0; i < seat.bias_tokens.size(); ++i) logits[seat.bias_tokens[i]] += seat.bias_values[i];
  if (!seat.parameters.penalised) return;
  const float presence = seat.parameters.presence, frequency = seat.parameters.frequency;
  for (size_t i = 0; i < seat.seen.size(); ++i) logits[seat.seen[i]] -= seat.counts[i] * frequency + presence;
}

// The largest of `size` logits, NaN left out; counts the NaN. A constant size becomes vector code.
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

// Makes what the mask forbids of `size` tokens -inf, unless that is all of them; returns whether any is allowed.
// `words`: of the mask, from the first of these tokens on.
inline bool forbid(float* logits, const uint32_t* words, int size) {
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

// The largest logit, and that of each chunk. NaN is made -inf and too large values kMaxLogit.
// What the mask forbids (null: nothing) counts as -inf; it is made so where its chunk has anything that is allowed.
float scan(float* logits, const uint32_t* mask, int vocab, std::vector<float>& maxima) {
  const int whole = vocab / kChunk;
  maxima.assign((vocab + kChunk - 1) / kChunk, kNegativeInfinity);
  int odd = 0;
  for (int chunk = 0; chunk < whole; ++chunk) {
    if (mask && !forbid(logits + chunk * kChunk, mask + chunk * (kChunk / 32), kChunk)) continue;
    maxima[chunk] = largest_of<kChunk>(logits + chunk * kChunk, odd);
  }
  const int rest = whole * kChunk;
  if (rest < vocab && (!mask || forbid(logits + rest, mask + rest / 32, vocab - rest))) {
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

// Makes all of a chunk -inf where nothing of it can be drawn, for those who read every logit.
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

float exact_score(const Row& row, const Seat& seat, int32_t token) {
  const uint32_t domain = seat.parameters.kind == kNoise ? kDomainNoise : kDomainGumbel;
  const uint32_t word = words_of_block(seat.parameters.seed, seat.step, token >> 2, domain).at[token & 3];
  const float scaled = row.logits[token] * row.scale;
  if (seat.parameters.kind == kNoise) return scaled + to_uniform(word) * seat.parameters.noise;
  return scaled + static_cast<float>(-std::log(-std::log1p(-static_cast<double>(to_uniform(word)))));
}

// The candidate with the largest score, the lowest token among equal ones.
int32_t best_of(const Row& row, const Seat& seat, const std::vector<Candidate>& candidates) {
  Candidate best{kNegativeInfinity, 0};
  for (const Candidate& candidate : candidates) {
    const Candidate scored{exact_score(row, seat, candidate.token), candidate.token};
    if (ranks_before(scored, best)) best = scored;
  }
  return best.token;
}

// Draws among many tokens: scores in vector code say which few may win, exact scores decide.
int32_t best_of_vocab(const Row& row, const Seat& seat, const Cut* cut, Scratch& scratch) {
  const bool noisy = seat.parameters.kind == kNoise;
  std::vector<float>& scores = scratch.scores;
  const int blocks = (row.vocab + 3) / 4;
  scores.resize(4 * static_cast<size_t>(blocks));
  for (int block = 0; block < blocks; ++block) {
    const Words words =
        words_of_block(seat.parameters.seed, seat.step, block, noisy ? kDomainNoise : kDomainGumbel);
    for (int i = 0; i < 4; ++i) scores[4 * block + i] = to_uniform(words.at[i]);
  }
  const float noise = seat.parameters.noise;
  float best = kNegativeInfinity;
  if (noisy)
    for (int token = 0; token < row.vocab; ++token) scores[token] = row.logits[token] * row.scale + scores[token] * noise;
  else
    for (int token = 0; token < row.vocab; ++token) scores[token] = row.logits[token] * row.scale + rough_gumbel(scores[token]);
  if (cut)
    for (int token = 0; token < row.vocab; ++token)
      if (!cut->keeps(row.logits[token], token)) scores[token] = kNegativeInfinity;
  for (int token = 0; token < row.vocab; ++token) best = scores[token] > best ? scores[token] : best;
  // Large scores are themselves rounded more coarsely than the logarithms.
  const float floor = best - kRoughness - std::fabs(best) * 1e-6f;
  scratch.list.clear();
  for (int token = 0; token < row.vocab; ++token)
    if (scores[token] >= floor) scratch.list.push_back({row.logits[token], token});
  return best_of(row, seat, scratch.list);
}

// The random words of a chunk: word i of block b belongs to token 4 * b + i of it. Vector code.
struct ChunkWords {
  uint32_t at[4][kChunk / 4];
};

void draw_words(const Seat& seat, int chunk, ChunkWords& words) {
  const uint64_t seed = seat.parameters.seed, step = seat.step;
#pragma omp simd
  for (int block = 0; block < kChunk / 4; ++block) {
    const Words drawn = words_of_block(seed, step, chunk * (kChunk / 4) + block, kDomainGumbel);
    words.at[0][block] = drawn.at[0];
    words.at[1][block] = drawn.at[1];
    words.at[2][block] = drawn.at[2];
    words.at[3][block] = drawn.at[3];
  }
}

bool any_at_most(const ChunkWords& words, uint32_t limit) {
  uint32_t lowest = ~0u;
  const uint32_t* all = &words.at[0][0];
#pragma omp simd reduction(min : lowest)
  for (int i = 0; i < kChunk; ++i) lowest = all[i] < lowest ? all[i] : lowest;
  return lowest <= limit;
}

// Draws among all tokens. A score s - log(-log(1 - u)) can only reach the best one if u <= exp(s - best), so most
// chunks cost their random words and one comparison, and those far below not even that.
int32_t best_of_all(const Row& row, const Seat& seat) {
  const int32_t first = first_of(row);
  Candidate best{exact_score(row, seat, first), first};
  ChunkWords words;
  for (size_t chunk = 0; chunk < row.maxima->size(); ++chunk) {
    const float goal = best.logit - kRoughness - std::fabs(best.logit) * 1e-6f;
    const float needed = std::min((*row.maxima)[chunk] * row.scale - goal, 0.0f);
    const double highest = static_cast<double>(exp_nonpositive(needed)) * (1 + 1e-5) * 0x1p32;
    if (highest < 0.5) continue;
    const uint32_t limit = highest < 0x1p32 - 1 ? static_cast<uint32_t>(highest) : ~0u;
    draw_words(seat, static_cast<int>(chunk), words);
    if (!any_at_most(words, limit)) continue;
    for (int i = 0; i < kChunk; ++i) {
      const int32_t token = static_cast<int32_t>(chunk) * kChunk + i;
      if (words.at[i % 4][i / 4] > limit || token >= row.vocab) continue;
      const Candidate scored{exact_score(row, seat, token), token};
      if (ranks_before(scored, best)) best = scored;
    }
  }
  return best.token;
}

int32_t draw_cut(float* logits, const Row& row, const Seat& seat, Scratch& scratch) {
  const Parameters& p = seat.parameters;
  Limits limits{p.top_k, std::numeric_limits<double>::infinity()};
  if (p.top_p < 1) limits.enough = p.top_p * total_mass(row);
  std::vector<Candidate>& list = scratch.list;
  const int64_t wanted = std::min<int64_t>(p.top_k, kHead / 4);
  const bool is_all = gather_head(row, wanted, scratch.work, list);
  if (list.size() <= 4 * kHead) {
    std::sort(list.begin(), list.end(), ranks_before);
    const size_t kept = walk(row, list, limits, 0, 0.0);
    if (is_all || kept < list.size() || static_cast<int64_t>(list.size()) >= p.top_k) {
      list.resize(kept);
      return best_of(row, seat, list);
    }
  }
  clear_empty_chunks(logits, row.vocab, *row.maxima);
  const Cut cut = cut_by_radix(row, limits, list);
  if (cut.kept > 2 * kHead) return best_of_vocab(row, seat, &cut, scratch);
  list.clear();
  for (int32_t token = 0; token < row.vocab; ++token)
    if (cut.keeps(row.logits[token], token)) list.push_back({row.logits[token], token});
  return best_of(row, seat, list);
}

int32_t draw(float* logits, const uint32_t* mask, int vocab, const Seat& seat, Scratch& scratch) {
  adjust(logits, seat);
  const float largest = scan(logits, mask, vocab, scratch.maxima);
  if (largest == kNegativeInfinity) return 0;
  const Row row{logits, vocab, largest, seat.parameters.scale, &scratch.maxima};
  switch (seat.parameters.kind) {
    case kCut:
      return draw_cut(logits, row, seat, scratch);
    case kOpen:
      return best_of_all(row, seat);
    case kNoise:
      clear_empty_chunks(logits, vocab, scratch.maxima);
      return best_of_vocab(row, seat, nullptr, scratch);
    default:
      return first_of(row);
  }
}

void count(Seat& seat, int32_t token, const std::vector<uint8_t>& penalty_exempt) {
  ++seat.step;
  if (!seat.parameters.penalised) return;
  size_t at = seat.seen.size();
  for (size_t i = 0; i < seat.seen.size(); ++i) {
    seat.counts[i] *= seat.parameters.decay;
    if (seat.seen[i] == token) at = i;
  }
  if (at == seat.seen.size()) {
    seat.seen.push_back(token);
    seat.counts.push_back(0.0f);
  }
  if (!penalty_exempt[token]) seat.counts[at] += 1.0f;
}

}  // namespace sampling

using sampling::Sampler;

EXPORT Sampler* sampler_new(int64_t max_rows, int64_t vocab, const uint8_t* penalty_exempt) {
  auto sampler = std::make_unique<Sampler>();
  sampler->vocab = static_cast<int>(vocab);
  sampler->seats.resize(max_rows);
  sampler->penalty_exempt.assign(penalty_exempt, penalty_exempt + vocab);
  return sampler.release();
}

EXPORT void sampler_free(Sampler* sampler) { delete sampler; }

EXPORT void sampler_admit(Sampler* sampler, int64_t seat, const sampling::Parameters* parameters,
                          const int32_t* bias_tokens, const float* bias_values) {
  sampling::Seat& taken = sampler->seats[seat];
  taken.parameters = *parameters;
  taken.step = 0;
  taken.seen.clear();
  taken.counts.clear();
  taken.bias_tokens.assign(bias_tokens, bias_tokens + parameters->num_bias);
  taken.bias_values.assign(bias_values, bias_values + parameters->num_bias);
}

// logits [rows, vocab] fp32 are overwritten; masks [rows, ceil(vocab / 32)] or null; seats [rows] are distinct;
// tokens [rows] is the result.
EXPORT void sampler_sample(Sampler* sampler, float* logits, const uint32_t* masks, int64_t rows, const int64_t* seats,
                           int64_t* tokens, int32_t threads) {
  const int64_t words = (sampler->vocab + 31) / 32;
  sampler->scratch.resize(std::max<size_t>(sampler->scratch.size(), threads));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    sampling::Seat& seat = sampler->seats[seats[row]];
    sampling::Scratch& scratch = sampler->scratch[omp_get_thread_num()];
    const uint32_t* mask = masks ? masks + row * words : nullptr;
    const int32_t token = sampling::draw(logits + row * sampler->vocab, mask, sampler->vocab, seat, scratch);
    sampling::count(seat, token, sampler->penalty_exempt);
    tokens[row] = token;
  }
}

// A seat's row has gone on by these tokens without a draw.
EXPORT void sampler_follow(Sampler* sampler, int64_t seat, const int32_t* tokens, int64_t size) {
  for (int64_t i = 0; i < size; ++i) sampling::count(sampler->seats[seat], tokens[i], sampler->penalty_exempt);
}

// logits [rows, vocab] fp32 become -inf where the bit of masks [rows, ceil(vocab / 32)] is 0.
EXPORT void sampler_forbid(float* logits, const uint32_t* masks, int64_t rows, int64_t vocab, int32_t threads) {
  const int64_t words = (vocab + 31) / 32;
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < vocab; begin += sampling::kChunk) {
      float* at = logits + row * vocab + begin;
      const int size = static_cast<int>(std::min<int64_t>(sampling::kChunk, vocab - begin));
      if (!sampling::forbid(at, masks + row * words + begin / 32, size)) std::fill(at, at + size, sampling::kNegativeInfinity);
    }
  }
}
