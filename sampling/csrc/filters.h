// The filters of sampling/filters.py, which is their definition, on one row of logits.
#pragma once

#include <cmath>
#include <unordered_map>

#include "philox.h"
#include "ranking.h"

namespace sampling {

constexpr float kMaxLogit = 1e30f;
constexpr int kMaxWindow = 4096;
constexpr int kMaxMatch = 64;
constexpr int kMirostatTokens = 100;
constexpr uint32_t kDomainXtc = 2;
constexpr double kLog2 = 0.69314718055994530942;

// In the order of STEPS in sampling/cpu.py.
enum Step : int32_t { kPenalties, kDry, kTemperature, kTopNSigma, kMinP, kTypP, kTopP, kTopK, kXtc, kMirostat };

// In the order of FILTER_NUMBERS in sampling/cpu.py.
struct FilterParameters {
  double min_p, typical_p, top_n_sigma, xtc_probability, xtc_threshold, repetition_penalty, repeat_last_n;
  double dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dynatemp_range, dynatemp_exponent;
  double mirostat, mirostat_tau, mirostat_eta, min_tokens, temperature, top_p, top_k;
};

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

  // Mirostat: moves the bound by the surprise of the sampled token, whose logit is given.
  void learn(float logit, float largest) {
    if (steps.empty() || steps.back() != kMirostat) return;
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

// A token, and the distance of its surprise from the entropy.
struct Typical {
  double distance;
  int32_t token;
  float logit;
};

struct FilterScratch {
  std::vector<float> work;
  std::vector<uint8_t> seen;
  std::vector<Typical> typical;
  std::vector<Candidate> list;
};

// Truncates a row by its limits. If it returns true, `list` has exactly the kept tokens, ranked.
inline bool find_cut(const Row& row, const Limits& limits, std::vector<float>& work, std::vector<Candidate>& list, Cut& cut) {
  const int64_t target = std::min<int64_t>(limits.top_k, kMaxSorted / 4);
  const bool is_all = gather_head(row, target, work, list);
  if (list.size() <= 4 * kMaxSorted) {
    std::sort(list.begin(), list.end(), ranks_before);
    const size_t kept = walk(row, list, limits, 0, 0.0);
    if (is_all || kept < list.size() || static_cast<int64_t>(list.size()) >= limits.top_k) {
      list.resize(kept);
      cut = Cut{list.back(), static_cast<int64_t>(kept)};
      return true;
    }
  }
  cut = cut_by_radix(row, limits, list);
  return false;
}

// A row that filters change. `maxima` has an upper bound of each chunk, -inf exactly if nothing is left of it.
class FilteredRow {
 public:
  FilteredRow(float* logits, int vocab, float largest, std::vector<float>& maxima, RowFilters& filters, FilterScratch& scratch)
      : s_(logits), vocab_(vocab), largest_(largest), maxima_(maxima), filters_(filters), p_(filters.p), scratch_(scratch) {}

  float largest() const { return largest_; }

  void ban(uint64_t step) {
    if (static_cast<double>(step) < p_.min_tokens)
      for (const int32_t token : filters_.stops) s_[token] = kNegativeInfinity;
    const std::vector<int32_t>& history = filters_.history;
    for (const std::vector<int32_t>& word : filters_.bad_words) {
      const size_t before = word.size() - 1;
      if (before <= history.size() && std::equal(word.begin(), word.end() - 1, history.end() - before))
        s_[word.back()] = kNegativeInfinity;
    }
    rescan();
  }

  template <class Presence>
  void run(uint64_t seed, uint64_t step, const Presence& subtract_presence) {
    for (const int32_t name : filters_.steps) {
      if (largest_ == kNegativeInfinity) return;
      switch (name) {
        case kPenalties: penalise_repetition(), subtract_presence(s_), rescan(); break;
        case kDry: dry(), rescan(); break;
        case kTemperature: scale(); break;
        case kTopNSigma: keep_from(sigma_floor()); break;
        case kMinP: keep_near(static_cast<float>(std::log(p_.min_p))); break;
        case kTypP: typical(); break;
        case kTopP: truncate({vocab_, p_.top_p * total_mass(row())}); break;
        case kTopK: truncate({static_cast<int64_t>(p_.top_k), std::numeric_limits<double>::infinity()}); break;
        case kXtc: xtc(seed, step); break;
        case kMirostat: mirostat(); break;
      }
    }
  }

 private:
  Row row() const { return Row{s_, vocab_, largest_, 1.0f, &maxima_}; }

  void rescan() {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, vocab_);
      float highest = kNegativeInfinity;
      for (int token = begin; token < end; ++token) {
        s_[token] = std::min(s_[token], kMaxLogit);
        highest = s_[token] > highest ? s_[token] : highest;
      }
      maxima_[chunk] = highest;
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  // Calls visit(token) for the tokens of chunks with anything left whose maximum is at least `floor`.
  template <class Visit>
  void each(float floor, Visit visit) {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (maxima_[chunk] == kNegativeInfinity || !(maxima_[chunk] >= floor)) continue;
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, vocab_);
      for (int token = begin; token < end; ++token) visit(token);
    }
  }

  // Removes the tokens that `is_kept` refuses, and whole chunks where nothing can be kept.
  template <class IsKept>
  void keep_if(float floor, IsKept is_kept) {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (maxima_[chunk] == kNegativeInfinity) continue;
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, vocab_);
      float highest = kNegativeInfinity;
      if (maxima_[chunk] >= floor)
        for (int token = begin; token < end; ++token) {
          s_[token] = is_kept(token) ? s_[token] : kNegativeInfinity;
          highest = s_[token] > highest ? s_[token] : highest;
        }
      else
        std::fill(s_ + begin, s_ + end, kNegativeInfinity);
      maxima_[chunk] = highest;
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  void keep_from(double floor) {
    keep_if(static_cast<float>(floor) - std::fabs(static_cast<float>(floor)) * 1e-6f, [&](int token) { return s_[token] >= floor; });
  }

  void keep_near(float distance) {
    const float largest = largest_;
    keep_if(largest + distance - std::fabs(largest + distance) * 1e-6f, [&](int token) { return s_[token] - largest >= distance; });
  }

  void penalise_repetition() {
    if (p_.repetition_penalty == 1) return;
    const float factor = static_cast<float>(p_.repetition_penalty);
    int size;
    const int32_t* last = filters_.window(p_.repeat_last_n, size);
    scratch_.seen.resize(vocab_);
    for (int i = 0; i < size; ++i) {
      float& value = s_[last[i]];
      if (!scratch_.seen[last[i]]) value = value > 0 ? value / factor : value * factor;
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
      s_[token] -= static_cast<float>(std::min<double>(penalty, kMaxLogit));
    }
  }

  // The sum of m(token) * (s - largest), and the number of tokens that are left.
  double weighted_sum(int64_t& count) {
    double sum = 0;
    count = 0;
    each(kNegativeInfinity, [&](int token) {
      const float distance = s_[token] - largest_;
      const float mass = exp_nonpositive(distance);
      count += s_[token] > kNegativeInfinity;
      sum += mass > 0 ? static_cast<double>(mass) * distance : 0.0;
    });
    return sum;
  }

  double entropy(double& log_total, int64_t& count) {
    const double total = total_mass(row());
    log_total = std::log(total);
    return log_total - weighted_sum(count) / total;
  }

  void scale() {
    double temperature = p_.temperature;
    if (p_.dynatemp_range > 0) {
      double log_total;
      int64_t count;
      const double disorder = entropy(log_total, count), most = std::log(static_cast<double>(count));
      const double share = std::pow(most > 0 ? std::min(std::max(disorder / most, 0.0), 1.0) : 0.0, p_.dynatemp_exponent);
      const double low = std::max(temperature - p_.dynatemp_range, 0.0);
      temperature = low + (temperature + p_.dynatemp_range - low) * share;
    }
    const float factor = static_cast<float>(1 / std::max(temperature, 1e-8));
    each(kNegativeInfinity, [&](int token) { s_[token] *= factor; });
    for (float& maximum : maxima_) maximum *= factor;
    largest_ *= factor;
  }

  double sigma_floor() {
    double sum = 0, squares = 0;
    int64_t count = 0;
    each(kNegativeInfinity, [&](int token) {
      const bool is_left = s_[token] > kNegativeInfinity;
      sum += is_left ? s_[token] : 0.0;
      count += is_left;
    });
    const double mean = sum / static_cast<double>(count);
    each(kNegativeInfinity, [&](int token) {
      const double distance = s_[token] - mean;
      squares += s_[token] > kNegativeInfinity ? distance * distance : 0.0;
    });
    return largest_ - p_.top_n_sigma * std::sqrt(squares / static_cast<double>(count));
  }

  void typical() {
    double log_total;
    int64_t count;
    const double disorder = entropy(log_total, count);
    std::vector<Typical>& found = scratch_.typical;
    found.clear();
    double total = 0;
    each(kNegativeInfinity, [&](int token) {
      if (s_[token] == kNegativeInfinity) return;
      const float distance = s_[token] - largest_, mass = exp_nonpositive(distance);
      found.push_back({std::fabs(log_total - distance - disorder), token, s_[token]});
      total += mass;
    });
    const auto before = [](const Typical& a, const Typical& b) {
      return a.distance < b.distance || (a.distance == b.distance && a.token < b.token);
    };
    const double enough = p_.typical_p * total;
    double mass = 0;
    size_t kept = 0;
    for (size_t sorted = 0; kept == sorted && sorted < found.size();) {  // sorts only as many as needed
      const size_t end = std::min(found.size(), std::max<size_t>(256, 4 * sorted));
      std::nth_element(found.begin() + sorted, found.begin() + (end - 1), found.end(), before);
      std::sort(found.begin() + sorted, found.begin() + end, before);
      for (sorted = end; kept < end && (kept == 0 || mass < enough); ++kept) mass += exp_nonpositive(found[kept].logit - largest_);
    }
    std::fill(s_, s_ + vocab_, kNegativeInfinity);
    std::fill(maxima_.begin(), maxima_.end(), kNegativeInfinity);
    for (size_t i = 0; i < kept; ++i) {
      const Typical& one = found[i];
      s_[one.token] = one.logit;
      maxima_[one.token / kChunk] = std::max(maxima_[one.token / kChunk], one.logit);
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  void truncate(const Limits& limits) {
    Cut cut;
    find_cut(row(), limits, scratch_.work, scratch_.list, cut);
    keep_if(cut.last.logit, [&](int token) { return cut.keeps(s_[token], token); });
  }

  void xtc(uint64_t seed, uint64_t step) {
    if (!(to_uniform(words_of_block(seed, step, 0, kDomainXtc).at[0]) < p_.xtc_probability)) return;
    const double enough = p_.xtc_threshold * total_mass(row());
    Candidate least{std::numeric_limits<float>::infinity(), -1};
    const auto is_above = [&](int token) { return s_[token] > kNegativeInfinity && exp_nonpositive(s_[token] - largest_) >= enough; };
    each(kNegativeInfinity, [&](int token) {
      if (is_above(token) && s_[token] <= least.logit) least = {s_[token], token};
    });
    if (least.token < 0) return;
    const float largest = largest_;
    keep_if(kNegativeInfinity, [&](int token) {
      return token == least.token || !(exp_nonpositive(s_[token] - largest) >= enough);
    });
  }

  void mirostat() {
    if (p_.mirostat == 1) {
      truncate({mirostat_top_k(), std::numeric_limits<double>::infinity()});
    } else {
      const double log_total = std::log(total_mass(row())), mu = filters_.mu;
      const float largest = largest_;
      int32_t best = 0;
      while (s_[best] != largest) ++best;
      keep_if(kNegativeInfinity, [&](int token) {
        return token == best || (log_total - (s_[token] - largest)) / kLog2 <= mu;
      });
    }
    filters_.log_total = std::log(total_mass(row()));
  }

  int64_t mirostat_top_k() {
    std::vector<Candidate>& head = scratch_.list;
    const int count = std::min(kMirostatTokens, vocab_);
    gather_head(row(), count, scratch_.work, head);
    std::sort(head.begin(), head.end(), ranks_before);
    head.resize(std::min<size_t>(head.size(), count));
    double products = 0, squares = 0;
    for (size_t i = 0; i + 1 < head.size(); ++i) {
      const double t = std::log((i + 2.0) / (i + 1.0));
      products += t * (static_cast<double>(head[i].logit) - head[i + 1].logit), squares += t * t;
    }
    const double exponent = products / squares, excess = exponent - 1;
    const double k = std::pow(excess * std::exp2(filters_.mu) / (1 - std::pow(static_cast<double>(vocab_), -excess)), 1 / exponent);
    return k >= 1 ? static_cast<int64_t>(std::min<double>(k, vocab_)) : (k < 1 ? 1 : vocab_);
  }

  float* s_;
  int vocab_;
  float largest_;
  std::vector<float>& maxima_;
  RowFilters& filters_;
  const FilterParameters& p_;
  FilterScratch& scratch_;
};

}  // namespace sampling
