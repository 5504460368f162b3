// The filters of sampling/filters.py, which is their definition, on one row of logits.
#pragma once

#include <cmath>
#include <unordered_map>

#include "filters.h"
#include "philox.h"
#include "ranking.h"

namespace sampling {

constexpr float kMaxLogit = 1e30f;

// Filters and last tokens of one request slot.
struct RowFilters {
  FilterParameters p{};
  std::vector<int32_t> steps, history, stops;
  std::vector<std::vector<int32_t>> bad_words;
  const uint8_t* breakers = nullptr;  // [vocab]; sampling/cpu.py keeps it alive
  double mu = 0, log_total = 0;

  void remember(int32_t token) {
    if (history.size() >= 2 * kMaxWindow) history.erase(history.begin(), history.end() - kMaxWindow);
    history.push_back(token);
  }

  bool is_mirostat() const { return !steps.empty() && steps.back() == kMirostat; }

  // Mirostat: moves the bound by the surprise of the sampled token, whose logit is given.
  void learn(float logit, float largest) {
    const double error = (log_total - (logit - largest)) / kLog2 - p.mirostat_tau;
    if (std::isfinite(error)) mu -= p.mirostat_eta * error;
  }

  // The last tokens of a window; last_n -1: the largest one.
  const int32_t* window(double last_n, int& size) const {
    const double limit = last_n < 0 ? kMaxWindow : std::min<double>(last_n, kMaxWindow);
    size = static_cast<int>(std::min<double>(limit, static_cast<double>(history.size())));
    return history.data() + history.size() - size;
  }
};

struct FilterScratch {
  std::vector<uint8_t> seen, touched;  // by token, by chunk
};

// Sums over the tokens that are left: of m(token), and of m(token) * (s - largest).
struct Sums {
  double total = 0, weighted = 0;
};

// A row that filters change.
class FilteredRow {
 public:
  FilteredRow(Row& row, RowFilters& filters, FilterScratch& scratch)
      : row_(row), filters_(filters), p_(filters.p), scratch_(scratch) {
    scratch_.touched.assign(row.maxima.size(), 0);
  }

  void ban(uint64_t step) {
    if (static_cast<double>(step) < p_.min_tokens)
      for (const int32_t token : filters_.stops) ban_token(token);
    const std::vector<int32_t>& history = filters_.history;
    for (const std::vector<int32_t>& word : filters_.bad_words) {
      const size_t before = word.size() - 1;
      if (before <= history.size() && std::equal(word.begin(), word.end() - 1, history.end() - before))
        ban_token(word.back());
    }
    refresh();
  }

  // each_presence(visit) calls visit(token, penalty) for the tokens with presence and frequency penalties.
  template <class EachPresence>
  void run(uint64_t seed, uint64_t step, const EachPresence& each_presence) {
    const std::vector<int32_t>& steps = filters_.steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      const int32_t name = steps[i];
      if (row_.largest == kNegativeInfinity) return;
      if (name != kTopNSigma) multiply();
      switch (name) {
        case kPenalties:
          penalise_repetition();
          each_presence([&](int32_t token, float penalty) {
            change_by(token, [&](float value) { return value - penalty; });
          });
          refresh();
          break;
        case kDry: dry(), refresh(); break;
        case kTemperature: scale(); break;
        case kTopNSigma: {
          const bool precedes_min_p = i + 1 < steps.size() && steps[i + 1] == kMinP;
          keep_from_sigma(precedes_min_p ? just_below(row_.largest + std::log(p_.min_p)) : kNegativeInfinity);
          break;
        }
        case kMinP: keep_near(static_cast<float>(std::log(p_.min_p))); break;
        case kTypP: typical(); break;
        case kEpsilon: keep_from(std::log(p_.epsilon_cutoff), false); break;
        case kEta: keep_from(std::log(p_.eta_cutoff), true); break;
        case kTopP: row_.truncate(row_.vocab, p_.top_p); break;
        case kTopK: row_.truncate(static_cast<int64_t>(p_.top_k), 1); break;
        case kXtc: xtc(seed, step); break;
        case kMirostat: mirostat(); break;
      }
    }
    multiply();
  }

 private:
  // Changes one logit by a function of it; `refresh` then updates its chunk.
  template <class Change>
  void change_by(int32_t token, Change change) {
    const int at = row_.position(token);
    if (at < 0) return;
    row_.s[at] = std::min(change(row_.s[at]), kMaxLogit);
    scratch_.touched[at / kChunk] = 1;
  }

  void ban_token(int32_t token) {
    change_by(token, [](float) { return kNegativeInfinity; });
  }

  void refresh() {
    for (size_t chunk = 0; chunk < row_.maxima.size(); ++chunk) {
      if (!scratch_.touched[chunk]) continue;
      scratch_.touched[chunk] = 0;
      if (row_.maxima[chunk] == kNegativeInfinity) continue;
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, row_.size);
      row_.maxima[chunk] = *std::max_element(row_.s + begin, row_.s + end);
    }
    row_.find_largest();
  }

  // A bound just below a value, for chunks; the exact comparison follows.
  static float just_below(double value) { return static_cast<float>(value - std::fabs(value) * 1e-6 - 1e-30); }

  void keep_near(float distance) {
    const float largest = row_.largest;
    row_.keep_if(just_below(largest + distance), [&](float value, int) { return value - largest >= distance; });
  }

  void penalise_repetition() {
    if (p_.repetition_penalty == 1) return;
    const float factor = static_cast<float>(p_.repetition_penalty);
    int size;
    const int32_t* last = filters_.window(p_.repeat_last_n, size);
    scratch_.seen.resize(row_.vocab);
    for (int i = 0; i < size; ++i) {
      const auto penalise = [&](float value) { return value > 0 ? value / factor : value * factor; };
      if (!scratch_.seen[last[i]]) change_by(last[i], penalise);
      scratch_.seen[last[i]] = 1;
    }
    for (int i = 0; i < size; ++i) scratch_.seen[last[i]] = 0;
  }

  void dry() {
    int size;
    const int32_t* last = filters_.window(p_.dry_penalty_last_n, size);
    const auto is_breaker = [&](int32_t token) { return filters_.breakers && filters_.breakers[token]; };
    std::unordered_map<int32_t, int> longest;
    for (int i = 0; i + 1 < size; ++i) {
      int length = 0;
      while (length < kMaxMatch && length <= i && last[i - length] == last[size - 1 - length] && !is_breaker(last[i - length]))
        ++length;
      if (length < p_.dry_allowed_length || is_breaker(last[i + 1])) continue;
      int& known = longest[last[i + 1]];
      known = std::max(known, length);
    }
    for (const auto& [token, length] : longest) {
      const double penalty = p_.dry_multiplier * std::pow(p_.dry_base, length - p_.dry_allowed_length);
      change_by(token, [&](float value) { return value - static_cast<float>(std::min<double>(penalty, kMaxLogit)); });
    }
  }

  Sums sums() const {
    double totals[kLanes] = {}, weighted[kLanes] = {};
    const float largest = row_.largest;
    Sums sums;
    row_.each_chunk(kNegativeInfinity, [&](int begin, int end) {
      if (end - begin == kChunk) {
        const float* s = row_.s + begin;
        float masses[kChunk], products[kChunk];
        for (int i = 0; i < kChunk; ++i) {
          const float distance = s[i] - largest;
          masses[i] = exp_nonpositive(distance);
          products[i] = masses[i] > 0 ? masses[i] * distance : 0.0f;
        }
        add_chunk(masses, totals), add_chunk(products, weighted);
        return;
      }
      for (int at = begin; at < end; ++at) {
        const float distance = row_.s[at] - largest, mass = exp_nonpositive(distance);
        sums.total += mass;
        sums.weighted += mass > 0 ? mass * distance : 0.0f;
      }
    });
    for (int lane = 0; lane < kLanes; ++lane) sums.total += totals[lane], sums.weighted += weighted[lane];
    return sums;
  }

  int count_left() const {
    int count = 0;
    row_.each_chunk(kNegativeInfinity, [&](int begin, int end) {
      for (int at = begin; at < end; ++at) count += row_.s[at] > kNegativeInfinity;
    });
    return count;
  }

  void scale() {
    double temperature = p_.temperature;
    if (p_.dynatemp_range > 0) {
      const Sums all = sums();
      const double entropy = std::log(all.total) - all.weighted / all.total;
      const double most = std::log(static_cast<double>(count_left()));
      const double share = std::pow(most > 0 ? std::min(std::max(entropy / most, 0.0), 1.0) : 0.0, p_.dynatemp_exponent);
      const double low = std::max(temperature - p_.dynatemp_range, 0.0);
      temperature = low + (temperature + p_.dynatemp_range - low) * share;
    }
    factor_ = static_cast<float>(1 / std::max(temperature, 1e-8));
    for (float& maximum : row_.maxima) maximum *= factor_;
    row_.largest *= factor_;
  }

  // Multiplies the logits by the temperature's factor; top_n_sigma does it while it reads them.
  void multiply() {
    if (factor_ != 1)
      row_.each_chunk(kNegativeInfinity, [&](int begin, int end) {
        for (int at = begin; at < end; ++at) row_.s[at] *= factor_;
      });
    factor_ = 1;
  }

  // `lowest`: the next step keeps no token below it, so this one may remove them.
  void keep_from_sigma(float lowest) {
    double sum[kLanes] = {}, squares[kLanes] = {};  // fp64: logits may be 1e38 or 1e-38
    int64_t count = 0;
    const float largest = row_.largest, factor = factor_;
    row_.each_chunk(kNegativeInfinity, [&](int begin, int end) {
      float values[kChunk];
      float* s = row_.s + begin;
      int32_t found = 0;
      const auto visit = [&](int i) {
        const float value = s[i] *= factor;
        const bool is_left = value > kNegativeInfinity;
        values[i] = is_left ? value : largest;
        found += is_left;
      };
      std::fill(values, values + kChunk, largest);
      if (end - begin == kChunk)
        for (int i = 0; i < kChunk; ++i) visit(i);
      else
        for (int i = 0; i < end - begin; ++i) visit(i);
      for (int at = 0; at < kChunk; at += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
          const double distance = static_cast<double>(values[at + lane]) - largest;
          sum[lane] += distance, squares[lane] += distance * distance;
        }
      count += found;
    });
    factor_ = 1;
    for (int lane = 1; lane < kLanes; ++lane) sum[0] += sum[lane], squares[0] += squares[lane];
    const double mean = sum[0] / count, variance = squares[0] / count - mean * mean;
    const double bound = largest - p_.top_n_sigma * std::sqrt(std::max(variance, 0.0));
    float floor = static_cast<float>(bound);  // the least float that is not below
    if (floor < bound) floor = std::nextafter(floor, std::numeric_limits<float>::infinity());
    floor = std::max(floor, lowest);
    row_.keep_if(floor, [&](float value, int) { return value >= floor; });
  }

  void keep_from(double floor, bool follows_entropy) {
    const Sums all = sums();
    const double log_total = std::log(all.total), entropy = log_total - all.weighted / all.total;
    if (follows_entropy) floor = std::min(floor, floor / 2 - entropy);
    keep_near(static_cast<float>(std::min(floor + log_total, 0.0)));
  }

  void typical() {
    const Sums all = sums();
    const double log_total = std::log(all.total), entropy = log_total - all.weighted / all.total;
    row_.rank_by([&](float value) {
      const float distance = value - row_.largest;
      return std::fabs(log_total - distance - entropy);
    });
    row_.keep_ranked({row_.vocab, p_.typical_p * all.total});
  }

  void xtc(uint64_t seed, uint64_t step) {
    if (!(to_uniform(words_of_block(seed, step, 0, kDomainXtc).at[0]) < p_.xtc_probability)) return;
    const double enough = p_.xtc_threshold * row_.total_mass();
    const float largest = row_.largest;
    const float floor = enough > 0 ? just_below(largest + std::log(enough) - 1e-5) : kNegativeInfinity;
    const auto is_probable = [&](float value) {
      return value > kNegativeInfinity && value >= floor && exp_nonpositive(value - largest) >= enough;
    };
    float least = std::numeric_limits<float>::infinity();
    int last = -1;
    row_.each_chunk(floor, [&](int begin, int end) {
      for (int at = begin; at < end; ++at)
        if (row_.s[at] <= least && is_probable(row_.s[at])) least = row_.s[at], last = at;
    });
    if (last >= 0) row_.keep_if(kNegativeInfinity, [&](float value, int at) { return at == last || !is_probable(value); });
  }

  void mirostat() {
    if (p_.mirostat == 1) {
      row_.truncate(mirostat_top_k(), 1);
    } else {
      const double log_total = std::log(row_.total_mass()), mu = filters_.mu;
      const float largest = row_.largest;
      const int best = row_.first_of_largest();
      const float floor = std::min(just_below(largest + log_total - mu * kLog2 - 1e-5), largest);
      row_.keep_if(floor, [&](float value, int at) { return at == best || (log_total - (value - largest)) / kLog2 <= mu; });
    }
    filters_.log_total = std::log(row_.total_mass());
  }

  int64_t mirostat_top_k() {
    const int count = std::min(kMirostatTokens, row_.vocab);
    const std::vector<Candidate>& head = row_.gather_head(count);
    double products = 0, squares = 0;
    for (size_t i = 0; i + 1 < std::min<size_t>(head.size(), count); ++i) {
      const double t = std::log((i + 2.0) / (i + 1.0));
      products += t * (static_cast<double>(head[i].logit) - head[i + 1].logit), squares += t * t;
    }
    const double exponent = products / squares, excess = exponent - 1;
    const double vocab = row_.vocab, share = 1 - std::pow(vocab, -excess);
    const double k = std::pow(excess * std::exp2(filters_.mu) / share, 1 / exponent);
    return k >= 1 ? static_cast<int64_t>(std::min(k, vocab)) : (k < 1 ? 1 : row_.vocab);
  }

  Row& row_;
  RowFilters& filters_;
  const FilterParameters& p_;
  FilterScratch& scratch_;
  float factor_ = 1;  // by which the logits are yet to be multiplied; maxima are
};

}  // namespace sampling
