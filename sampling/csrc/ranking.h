// Truncation by top_k and top_p. Ranking: by logit, ties by lower id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vector_math.h"

namespace sampling {

constexpr int kChunk = 64;  // tokens per chunk
constexpr int kMaxSorted = 1024;  // maximum candidates to sort directly
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t token;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// A row of logits, its maximum and chunk maxima.
struct Row {
  const float* logits;
  int vocab;
  float largest;
  float scale;                         // 1 / T
  const std::vector<float>* maxima;  // per chunk

  float mass(float logit) const { return exp_nonpositive(logit * scale - largest * scale); }
};

// Keeps ranks below top_k with less than `enough` mass before them.
struct Limits {
  int64_t top_k;
  double enough;  // top_p * total mass; infinite if top_p is off
};

// The last kept token; all tokens that rank before it are kept.
struct Cut {
  Candidate last;
  int64_t kept;

  bool keeps(float logit, int32_t token) const {
    return logit > last.logit || (logit == last.logit && token <= last.token);
  }
};

// Skips chunks of -inf.
inline double total_mass(const Row& row) {
  double lanes[16] = {};
  const float shift = row.largest * row.scale;
  int token = 0;
  for (; token + kChunk <= row.vocab; token += kChunk) {
    if ((*row.maxima)[token / kChunk] == kNegativeInfinity) continue;
    for (int at = token; at < token + kChunk; at += 16)
      for (int lane = 0; lane < 16; ++lane) lanes[lane] += exp_nonpositive(row.logits[at + lane] * row.scale - shift);
  }
  double sum = 0;
  if (row.maxima->back() != kNegativeInfinity)
    for (; token < row.vocab; ++token) sum += row.mass(row.logits[token]);
  for (double lane : lanes) sum += lane;
  return sum;
}

// Gathers all tokens with a logit of at least the `count`-th largest chunk maximum: at least `count` of them, or all
// that are finite. Returns whether it is all.
inline bool gather_head(const Row& row, int64_t count, std::vector<float>& work, std::vector<Candidate>& head) {
  const std::vector<float>& maxima = *row.maxima;
  float floor = kNegativeInfinity;
  if (count < static_cast<int64_t>(maxima.size())) {
    work = maxima;
    std::nth_element(work.begin(), work.begin() + (count - 1), work.end(), std::greater<float>());
    floor = work[count - 1];
  }
  head.clear();
  for (size_t chunk = 0; chunk < maxima.size(); ++chunk) {
    if (!(maxima[chunk] >= floor) || maxima[chunk] == kNegativeInfinity) continue;
    const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, row.vocab);
    for (int token = begin; token < end; ++token)
      if (row.logits[token] >= floor && row.logits[token] > kNegativeInfinity)
        head.push_back({row.logits[token], token});
  }
  return floor == kNegativeInfinity;
}

// Returns how many of the ranked candidates are kept. `rank` and `before` (mass) count the tokens ranked before them.
inline size_t walk(const Row& row, const std::vector<Candidate>& ranked, const Limits& limits, int64_t rank, double before) {
  size_t kept = 0;
  for (; kept < ranked.size(); ++kept, ++rank) {
    // The first token is always kept, even if `enough` is rounded down.
    if (rank > 0 && (rank >= limits.top_k || !(before < limits.enough))) break;
    before += row.mass(ranked[kept].logit);
  }
  return kept;
}

// Maps floats to integers in descending order.
inline uint32_t descending_key(float value) {
  const uint32_t raw = bits<uint32_t>(value + 0.0f);  // + 0: -0 and 0 become equal
  return raw & 0x80000000u ? raw : ~(raw | 0x80000000u);
}

// Counts and masses by 11 bits of the key.
struct Bins {
  static constexpr int kBins = 2048;
  std::vector<int64_t> counts = std::vector<int64_t>(kBins);
  std::vector<double> masses = std::vector<double>(kBins);

  static int bin_of(float logit, int shift) { return (descending_key(logit) >> shift) & (kBins - 1); }

  void fill(const Row& row, const std::vector<Candidate>& list, int shift) {
    std::fill(counts.begin(), counts.end(), 0);
    std::fill(masses.begin(), masses.end(), 0.0);
    for (const Candidate& c : list) {
      const int bin = bin_of(c.logit, shift);
      ++counts[bin];
      masses[bin] += row.mass(c.logit);
    }
  }

  // Returns the last non-empty bin that starts within the limits. Updates `rank` and `before` to its first token.
  int find_cut(const Limits& limits, int64_t& rank, double& before) const {
    int at = -1;
    int64_t next_rank = rank;
    double next_before = before;
    for (int bin = 0; bin < kBins; ++bin) {
      if (!counts[bin]) continue;
      if (at >= 0 && (next_rank >= limits.top_k || !(next_before < limits.enough))) break;
      at = bin, rank = next_rank, before = next_before;
      next_rank += counts[bin], next_before += masses[bin];
    }
    return at;
  }
};

// Truncates a row by radix selection, 11 bits of the key at a time.
inline Cut cut_by_radix(const Row& row, const Limits& limits, std::vector<Candidate>& list) {
  Bins bins;
  int64_t rank = 0;
  double before = 0;
  list.clear();
  for (int token = 0; token < row.vocab; ++token)
    if ((*row.maxima)[token / kChunk] != kNegativeInfinity) list.push_back({row.logits[token], token});
  for (const int shift : {21, 10, -1}) {
    if (shift < 0 || list.size() <= kMaxSorted) break;
    bins.fill(row, list, shift);
    const int at = bins.find_cut(limits, rank, before);
    const auto elsewhere = [&](const Candidate& c) { return Bins::bin_of(c.logit, shift) != at; };
    list.erase(std::remove_if(list.begin(), list.end(), elsewhere), list.end());
  }
  if (!std::is_sorted(list.begin(), list.end(), ranks_before)) std::sort(list.begin(), list.end(), ranks_before);
  const size_t kept = std::max<size_t>(walk(row, list, limits, rank, before), 1);
  return Cut{list[kept - 1], rank + static_cast<int64_t>(kept)};
}

}  // namespace sampling
