// A row of logits, and truncation by top_k and top_p. Ranking: by logit, ties by lower id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"
#include "vector_math.h"

namespace sampling {

constexpr int kMaxSorted = 256;  // candidates to sort directly
constexpr int kLanes = 16;  // independent sums or maxima, which vectorise

struct Candidate {
  float logit;
  int32_t token;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Scratch memory of a thread's rows.
struct RowScratch {
  std::vector<float> maxima, work, masses;
  std::vector<int32_t> ids, ranked, range;
  std::vector<double> keys;
  std::vector<Candidate> head;
};

// Keeps ranks below top_k with less than `enough` mass before them.
struct Limits {
  int64_t top_k;
  double enough;  // top_p * total mass; infinite if top_p is off

  bool allow(int64_t rank, double before) const { return rank < top_k && before < enough; }
};

// Returns the largest of kChunk logits, and sets `nans` if there are any. One loop: a second one takes as long again.
inline float largest_of(const float* logits, int& nans) {
  float largest = kNegativeInfinity;
  int found = 0;
#pragma omp simd reduction(max : largest) reduction(| : found)
  for (int i = 0; i < kChunk; ++i) {
    const float logit = logits[i];
    largest = logit > largest ? logit : largest;
    found |= logit != logit;
  }
  nans |= found;
  return largest;
}

// Adds kChunk numbers to kLanes sums. Four at a time are added in fp32: conversions to fp64 cost as much as an exp.
inline void add_chunk(const float* numbers, double* lanes) {
  static_assert(kChunk == 4 * kLanes, "four of each lane");
  float four[kLanes];
  for (int i = 0; i < kLanes; ++i)
    four[i] = (numbers[i] + numbers[i + kLanes]) + (numbers[i + 2 * kLanes] + numbers[i + 3 * kLanes]);
  for (int i = 0; i < kLanes; ++i) lanes[i] += four[i];
}

// A row's logits and chunk maxima. A chunk whose maximum is -inf is empty: its logits are not read. Once tokens were
// removed, the row has only the others, in their order, with their ids.
struct Row {
  float* s;
  const int vocab;
  float largest;
  float scale;  // 1 / T
  RowScratch& scratch;
  std::vector<float>& maxima = scratch.maxima;
  int left = vocab;  // positions that hold tokens
  int size = vocab;  // with the padding of the last chunk
  const int32_t* ids = nullptr;  // null: a position is a token

  int32_t token(int at) const { return ids ? ids[at] : at; }

  // Returns a token's position; -1 if it was removed.
  int position(int32_t token) const {
    if (!ids) return token;
    const int32_t* found = std::lower_bound(ids, ids + size, token);
    return found < ids + size && *found == token ? static_cast<int>(found - ids) : -1;
  }

  int first_of_largest() const {
    const auto found = std::find(maxima.begin(), maxima.end(), largest);
    int at = static_cast<int>(found - maxima.begin()) * kChunk;
    while (s[at] != largest) ++at;
    return at;
  }

  // Calls visit(begin, end) for each chunk with anything left whose maximum is at least `floor`.
  template <class Visit>
  void each_chunk(float floor, Visit visit) const {
    for (size_t chunk = 0; chunk < maxima.size(); ++chunk) {
      if (maxima[chunk] == kNegativeInfinity || !(maxima[chunk] >= floor)) continue;
      const int begin = static_cast<int>(chunk) * kChunk;
      visit(begin, std::min(begin + kChunk, size));
    }
  }

  // Removes the positions that is_kept(logit, position) refuses. No logit below `floor` may be kept.
  template <class IsKept>
  void keep_if(float floor, IsKept is_kept) {
    std::vector<int32_t>& memory = scratch.ids;
    memory.resize(vocab + 2 * kChunk);
    int kept = 0;
    each_chunk(floor, [&](int begin, int end) {
      float values[kChunk];
      int32_t tokens[kChunk];
      if (end - begin == kChunk) {
        const float* from = s + begin;
        for (int i = 0; i < kChunk; ++i) values[i] = is_kept(from[i], begin + i) ? from[i] : kNegativeInfinity;
        if (ids)
          std::copy_n(ids + begin, kChunk, tokens);
        else
          for (int i = 0; i < kChunk; ++i) tokens[i] = begin + i;
        // The first `begin` positions have been read.
        kept += append_finite(values, tokens, s + kept, memory.data() + kept);
        return;
      }
      for (int at = begin; at < end; ++at) {
        const float value = s[at];
        const int32_t id = token(at);
        if (!(value > kNegativeInfinity) || !is_kept(value, at)) continue;
        s[kept] = value, memory[kept++] = id;
      }
    });
    ids = memory.data();
    left = size = kept;
    while (size % kChunk && size < vocab) s[size] = kNegativeInfinity, memory[size++] = vocab;
    maxima.resize((size + kChunk - 1) / kChunk);
    find_maxima();
  }

  void find_maxima() {
    int nans = 0;  // there are none any more
    for (size_t chunk = 0; chunk < maxima.size(); ++chunk) {
      const int begin = static_cast<int>(chunk) * kChunk;
      maxima[chunk] = begin + kChunk <= size ? largest_of(s + begin, nans) : *std::max_element(s + begin, s + size);
    }
    find_largest();
  }

  void find_largest() {
    largest = maxima.empty() ? kNegativeInfinity : *std::max_element(maxima.begin(), maxima.end());
  }

  // Returns the sum of exp((s - largest) * scale).
  double total_mass() const {
    double lanes[kLanes] = {}, sum = 0;
    const float shift = largest * scale;
    each_chunk(kNegativeInfinity, [&](int begin, int end) {
      if (end - begin == kChunk) {
        const float* from = s + begin;
        float found[kChunk];
        for (int i = 0; i < kChunk; ++i) found[i] = exp_nonpositive(from[i] * scale - shift);
        add_chunk(found, lanes);
      } else {
        for (int at = begin; at < end; ++at) sum += exp_nonpositive(s[at] * scale - shift);
      }
    });
    for (double lane : lanes) sum += lane;
    return sum;
  }

  // Returns the `count`-th largest chunk maximum, which at least `count` logits reach; -inf if there are fewer chunks.
  float reached_by(int64_t count) const {
    if (count > static_cast<int64_t>(maxima.size())) return kNegativeInfinity;
    std::vector<float>& work = scratch.work;
    work = maxima;
    std::nth_element(work.begin(), work.begin() + (count - 1), work.end(), std::greater<float>());
    return work[count - 1];
  }

  // Gathers at least the `count` largest logits, or all, ranked.
  const std::vector<Candidate>& gather_head(int64_t count) const {
    std::vector<Candidate>& head = scratch.head;
    const float floor = reached_by(count);
    head.clear();
    each_chunk(floor, [&](int begin, int end) {
      for (int at = begin; at < end; ++at)
        if (s[at] >= floor && s[at] > kNegativeInfinity) head.push_back({s[at], token(at)});
    });
    std::sort(head.begin(), head.end(), ranks_before);
    return head;
  }

  // Removes logits below `floor`, and gives the others masses and keys, by which keep_ranked ranks them.
  template <class Key>
  void rank_by(Key key, float floor = kNegativeInfinity) {
    keep_if(floor, [&](float value, int) { return value >= floor; });
    scratch.keys.resize(size), scratch.masses.resize(size);
    const float shift = largest * scale;
    double* keys = scratch.keys.data();
    float* masses = scratch.masses.data();
    for (int at = 0; at < size; ++at) keys[at] = key(s[at]);
    for (int at = 0; at < size; ++at) masses[at] = exp_nonpositive(s[at] * scale - shift);
  }

  // Keeps the positions of the smallest keys, within the limits and at least one. Ties: the lower position.
  void keep_ranked(const Limits& limits);

  // Keeps the top_k most probable tokens, up to a mass of top_p.
  void truncate(int64_t top_k, double top_p) {
    double enough = std::numeric_limits<double>::infinity();
    float floor = reached_by(top_k);
    if (top_p < 1) {
      const double total = total_mass();
      enough = top_p * total;
      // All tokens up to this logit have at most the mass that top_p removes.
      const double lowest = largest + (std::log((total - enough) / size) - 1e-3) / scale;
      floor = std::max(floor, static_cast<float>(lowest - std::fabs(lowest) * 1e-6));
    }
    rank_by([](float value) { return -static_cast<double>(value); }, floor);
    keep_ranked({top_k, enough});
  }
};

inline void Row::keep_ranked(const Limits& limits) {
  constexpr int kBins = 2048;
  const double* keys = scratch.keys.data();
  const float* masses = scratch.masses.data();
  double low = keys[0], high = keys[0];
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int at = 0; at < left; ++at) {
    low = keys[at] < low ? keys[at] : low;
    high = keys[at] > high ? keys[at] : high;
  }
  int64_t rank = 0;
  double before = 0;
  std::vector<int32_t>& list = scratch.ranked;
  list.clear();
  // Counts and masses by ranges of the key find the range in which the limits end.
  for (int remaining = left; remaining > kMaxSorted && low < high; remaining = static_cast<int>(list.size())) {
    const double per_bin = (kBins - 1) / (high - low), from = low;
    // Calls visit(position, bin).
    const auto each = [&](auto visit) {
      for (int i = 0; i < remaining; i += kChunk) {
        const int end = std::min(kChunk, remaining - i);
        int32_t positions[kChunk], bins[kChunk];
        for (int k = 0; k < end; ++k) positions[k] = list.empty() ? i + k : list[i + k];
        for (int k = 0; k < end; ++k) bins[k] = static_cast<int32_t>((keys[positions[k]] - from) * per_bin);
        for (int k = 0; k < end; ++k) visit(positions[k], bins[k]);
      }
    };
    int32_t counts[kBins] = {};
    double sums[kBins] = {};
    each([&](int at, int bin) { ++counts[bin], sums[bin] += masses[at]; });
    int last = 0;
    int64_t next_rank = rank;
    double next_before = before;
    for (int bin = 0; bin < kBins && (next_rank == 0 || limits.allow(next_rank, next_before)); ++bin) {
      if (!counts[bin]) continue;
      last = bin, rank = next_rank, before = next_before;
      next_rank += counts[bin], next_before += sums[bin];
    }
    std::vector<int32_t>& range = scratch.range;
    range.clear();
    each([&](int at, int bin) {
      if (bin == last) range.push_back(at);
    });
    list.swap(range);
    low = high = keys[list[0]];
    for (const int32_t at : list) low = std::min(low, keys[at]), high = std::max(high, keys[at]);
  }
  if (list.empty()) {
    list.resize(left);
    std::iota(list.begin(), list.end(), 0);
  }
  const auto precedes = [&](int32_t a, int32_t b) { return keys[a] < keys[b] || (keys[a] == keys[b] && a < b); };
  if (!std::is_sorted(list.begin(), list.end(), precedes)) std::sort(list.begin(), list.end(), precedes);
  size_t kept = 0;
  // The first token is always kept, even if `enough` is rounded down.
  for (; kept < list.size() && (rank == 0 || limits.allow(rank, before)); ++kept, ++rank) before += masses[list[kept]];
  const int32_t last = list[std::max<size_t>(kept, 1) - 1];
  const double most = keys[last];
  keep_if(kNegativeInfinity, [&](float, int at) { return keys[at] < most || (keys[at] == most && at <= last); });
}

}  // namespace sampling
