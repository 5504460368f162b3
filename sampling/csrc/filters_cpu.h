// The filters of sampling/filters.py, which is their definition, on one row of logits.
#pragma once

#include <cmath>
#include <unordered_map>

#include "filters.h"
#include "philox.h"
#include "ranking.h"

namespace sampling {

constexpr float kMaxLogit = 1e30f;
constexpr int kLanes = 16;  // independent sums or maxima, which vectorise

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

// A token, and the distance of its surprise from the entropy.
struct Typical {
  double distance;
  int32_t token;
  float logit;
};

struct FilterScratch {
  std::vector<float> work;
  std::vector<uint8_t> seen, touched;  // by token, by chunk
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

// Sums over the tokens that are left: of m(token), of m(token) * (s - largest), and their number.
struct Sums {
  double total = 0, weighted = 0;
  int64_t count = 0;
};

// A row that filters change. A chunk whose maximum is -inf is empty: its logits are not read.
class FilteredRow {
 public:
  FilteredRow(float* logits, int vocab, float largest, std::vector<float>& maxima, RowFilters& filters, FilterScratch& scratch)
      : s_(logits), vocab_(vocab), largest_(largest), maxima_(maxima), filters_(filters), p_(filters.p), scratch_(scratch) {
    scratch_.touched.assign(maxima.size(), 0);
  }

  float largest() const { return largest_; }

  void ban(uint64_t step) {
    if (static_cast<double>(step) < p_.min_tokens)
      for (const int32_t token : filters_.stops) change(token, kNegativeInfinity);
    const std::vector<int32_t>& history = filters_.history;
    for (const std::vector<int32_t>& word : filters_.bad_words) {
      const size_t before = word.size() - 1;
      if (before <= history.size() && std::equal(word.begin(), word.end() - 1, history.end() - before))
        change(word.back(), kNegativeInfinity);
    }
    refresh();
  }

  // each_presence(visit) calls visit(token, penalty) for the tokens with presence and frequency penalties.
  template <class EachPresence>
  void run(uint64_t seed, uint64_t step, const EachPresence& each_presence) {
    for (const int32_t name : filters_.steps) {
      if (largest_ == kNegativeInfinity) return;
      switch (name) {
        case kPenalties:
          penalise_repetition();
          each_presence([&](int32_t token, float penalty) { change(token, s_[token] - penalty); });
          refresh();
          break;
        case kDry: dry(), refresh(); break;
        case kTemperature: scale(); break;
        case kTopNSigma: keep_from_sigma(); break;
        case kMinP: keep_near(static_cast<float>(std::log(p_.min_p))); break;
        case kTypP: typical(); break;
        case kEpsilon: keep_from(std::log(p_.epsilon_cutoff), false); break;
        case kEta: keep_from(std::log(p_.eta_cutoff), true); break;
        case kTopP: truncate({vocab_, p_.top_p * total_mass(row())}); break;
        case kTopK: truncate({static_cast<int64_t>(p_.top_k), std::numeric_limits<double>::infinity()}); break;
        case kXtc: xtc(seed, step); break;
        case kMirostat: mirostat(); break;
      }
    }
  }

 private:
  Row row() const { return Row{s_, vocab_, largest_, 1.0f, &maxima_}; }

  // Changes one logit; `refresh` then updates its chunk.
  void change(int32_t token, float value) {
    s_[token] = std::min(value, kMaxLogit);
    scratch_.touched[token / kChunk] = 1;
  }

  void refresh() {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (!scratch_.touched[chunk]) continue;
      scratch_.touched[chunk] = 0;
      if (maxima_[chunk] == kNegativeInfinity) continue;
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, vocab_);
      maxima_[chunk] = *std::max_element(s_ + begin, s_ + end);
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  // Calls visit(begin, end) for each chunk with anything left whose maximum is at least `floor`.
  template <class Visit>
  void each_chunk(float floor, Visit visit) const {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (maxima_[chunk] == kNegativeInfinity || !(maxima_[chunk] >= floor)) continue;
      const int begin = static_cast<int>(chunk) * kChunk;
      visit(begin, std::min(begin + kChunk, vocab_));
    }
  }

  // Removes the tokens that `is_kept` refuses. No token below `floor` may be kept.
  template <class IsKept>
  void keep_if(float floor, IsKept is_kept) {
    for (size_t chunk = 0; chunk < maxima_.size(); ++chunk) {
      if (maxima_[chunk] == kNegativeInfinity) continue;
      float highest[kLanes];  // of lanes: one maximum would not vectorise
      std::fill_n(highest, kLanes, kNegativeInfinity);
      const int begin = static_cast<int>(chunk) * kChunk, end = std::min(begin + kChunk, vocab_);
      const auto visit = [&](int token, int lane) {
        const float value = is_kept(token) ? s_[token] : kNegativeInfinity;
        s_[token] = value;
        highest[lane] = value > highest[lane] ? value : highest[lane];
      };
      if (maxima_[chunk] >= floor) {
        int token = begin;
        for (; token + kLanes <= end; token += kLanes)
          for (int lane = 0; lane < kLanes; ++lane) visit(token + lane, lane);
        for (; token < end; ++token) visit(token, 0);
      }
      maxima_[chunk] = *std::max_element(highest, highest + kLanes);
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  // A bound just below a value, for chunks; the exact comparison follows.
  static float just_below(double value) { return static_cast<float>(value - std::fabs(value) * 1e-6 - 1e-30); }

  void keep_near(float distance) {
    const float largest = largest_;
    keep_if(just_below(largest + distance), [&](int token) { return s_[token] - largest >= distance; });
  }

  void penalise_repetition() {
    if (p_.repetition_penalty == 1) return;
    const float factor = static_cast<float>(p_.repetition_penalty);
    int size;
    const int32_t* last = filters_.window(p_.repeat_last_n, size);
    scratch_.seen.resize(vocab_);
    for (int i = 0; i < size; ++i) {
      const float value = s_[last[i]];
      if (!scratch_.seen[last[i]]) change(last[i], value > 0 ? value / factor : value * factor);
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
      change(token, s_[token] - static_cast<float>(std::min<double>(penalty, kMaxLogit)));
    }
  }

  Sums sums() const {
    double totals[kLanes] = {}, weighted[kLanes] = {};
    int32_t counts[kLanes] = {};
    const float largest = largest_;
    Sums sums;
    each_chunk(kNegativeInfinity, [&](int begin, int end) {
      if (end - begin == kChunk) {
        const float* s = s_ + begin;
        float masses[kChunk], products[kChunk];
        for (int i = 0; i < kChunk; ++i) {
          const float distance = s[i] - largest;
          masses[i] = exp_nonpositive(distance);
          products[i] = masses[i] > 0 ? masses[i] * distance : 0.0f;
        }
        for (int at = 0; at < kChunk; at += kLanes) {
          for (int lane = 0; lane < kLanes; ++lane) totals[lane] += masses[at + lane];
          for (int lane = 0; lane < kLanes; ++lane) weighted[lane] += products[at + lane];
          for (int lane = 0; lane < kLanes; ++lane) counts[lane] += s[at + lane] > kNegativeInfinity;
        }
        return;
      }
      for (int token = begin; token < end; ++token) {
        const float distance = s_[token] - largest, mass = exp_nonpositive(distance);
        sums.total += mass;
        sums.weighted += mass > 0 ? mass * distance : 0.0f;
        sums.count += s_[token] > kNegativeInfinity;
      }
    });
    for (int lane = 0; lane < kLanes; ++lane)
      sums.total += totals[lane], sums.weighted += weighted[lane], sums.count += counts[lane];
    return sums;
  }

  void scale() {
    double temperature = p_.temperature;
    if (p_.dynatemp_range > 0) {
      const Sums all = sums();
      const double entropy = std::log(all.total) - all.weighted / all.total, most = std::log(static_cast<double>(all.count));
      const double share = std::pow(most > 0 ? std::min(std::max(entropy / most, 0.0), 1.0) : 0.0, p_.dynatemp_exponent);
      const double low = std::max(temperature - p_.dynatemp_range, 0.0);
      temperature = low + (temperature + p_.dynatemp_range - low) * share;
    }
    const float factor = static_cast<float>(1 / std::max(temperature, 1e-8));
    each_chunk(kNegativeInfinity, [&](int begin, int end) {
      for (int token = begin; token < end; ++token) s_[token] *= factor;
    });
    for (float& maximum : maxima_) maximum *= factor;
    largest_ *= factor;
  }

  void keep_from_sigma() {
    double sum[kLanes] = {}, squares[kLanes] = {};
    int32_t counts[kLanes] = {};
    const double largest = largest_;
    const auto add = [&](int token, int lane) {
      const float value = s_[token];
      const double distance = value > kNegativeInfinity ? value - largest : 0.0;
      sum[lane] += distance, squares[lane] += distance * distance, counts[lane] += value > kNegativeInfinity;
    };
    each_chunk(kNegativeInfinity, [&](int begin, int end) {
      if (end - begin == kChunk)
        for (int at = begin; at < begin + kChunk; at += kLanes)
          for (int lane = 0; lane < kLanes; ++lane) add(at + lane, lane);
      else
        for (int token = begin; token < end; ++token) add(token, 0);
    });
    for (int lane = 1; lane < kLanes; ++lane)
      sum[0] += sum[lane], squares[0] += squares[lane], counts[0] += counts[lane];
    const double mean = sum[0] / counts[0], variance = squares[0] / counts[0] - mean * mean;
    const double bound = largest_ - p_.top_n_sigma * std::sqrt(std::max(variance, 0.0));
    float floor = static_cast<float>(bound);  // the least float that is not below
    if (floor < bound) floor = std::nextafter(floor, std::numeric_limits<float>::infinity());
    keep_if(floor, [&](int token) { return s_[token] >= floor; });
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
    const double enough = p_.typical_p * all.total;
    std::vector<Typical>& found = scratch_.typical;
    // Tokens within a distance of the entropy; the distance grows until their mass is enough.
    for (double within = 1;; within *= 1.5) {
      found.clear();
      double mass = 0;
      const double lowest = largest_ + log_total - entropy - within;
      const float floor = std::max(just_below(lowest), std::numeric_limits<float>::lowest());
      each_chunk(floor, [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
          if (!(s_[token] >= floor)) continue;
          const float distance = s_[token] - largest_;
          const double from_entropy = std::fabs(log_total - distance - entropy);
          if (from_entropy > within) continue;
          found.push_back({from_entropy, token, s_[token]});
          mass += exp_nonpositive(distance);
        }
      });
      if (mass >= enough || static_cast<int64_t>(found.size()) == all.count) break;
    }
    const auto before = [](const Typical& a, const Typical& b) {
      return a.distance < b.distance || (a.distance == b.distance && a.token < b.token);
    };
    // Halves the range in which the mass becomes enough; only its last part is sorted.
    size_t first = 0, end = found.size();
    double mass = 0;
    while (end - first > 64) {
      const size_t middle = first + (end - first) / 2;
      std::nth_element(found.begin() + first, found.begin() + middle, found.begin() + end, before);
      double more = 0;
      for (size_t i = first; i < middle; ++i) more += exp_nonpositive(found[i].logit - largest_);
      if (mass + more >= enough)
        end = middle;
      else
        mass += more, first = middle;
    }
    std::sort(found.begin() + first, found.begin() + end, before);
    size_t kept = first;
    for (; kept < end && (kept == 0 || mass < enough); ++kept) mass += exp_nonpositive(found[kept].logit - largest_);
    std::fill(maxima_.begin(), maxima_.end(), kNegativeInfinity);
    for (size_t i = 0; i < kept; ++i) {
      const int chunk = found[i].token / kChunk;
      if (maxima_[chunk] == kNegativeInfinity)
        std::fill(s_ + chunk * kChunk, s_ + std::min((chunk + 1) * kChunk, vocab_), kNegativeInfinity);
      s_[found[i].token] = found[i].logit;
      maxima_[chunk] = std::max(maxima_[chunk], found[i].logit);
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
    const float floor = enough > 0 ? just_below(largest_ + std::log(enough) - 1e-5) : kNegativeInfinity, largest = largest_;
    Candidate least{std::numeric_limits<float>::infinity(), -1};
    each_chunk(floor, [&](int begin, int end) {
      for (int token = begin; token < end; ++token)
        if (s_[token] > kNegativeInfinity && s_[token] <= least.logit && exp_nonpositive(s_[token] - largest) >= enough)
          least = {s_[token], token};
    });
    if (least.token < 0) return;
    keep_if(kNegativeInfinity, [&](int token) {
      return token == least.token || s_[token] < floor || !(exp_nonpositive(s_[token] - largest) >= enough);
    });
  }

  void mirostat() {
    if (p_.mirostat == 1) {
      truncate({mirostat_top_k(), std::numeric_limits<double>::infinity()});
    } else {
      const double log_total = std::log(total_mass(row())), mu = filters_.mu;
      const float largest = largest_;
      const auto chunk = std::find(maxima_.begin(), maxima_.end(), largest) - maxima_.begin();
      int32_t best = static_cast<int32_t>(chunk) * kChunk;
      while (s_[best] != largest) ++best;
      const float floor = std::min(just_below(largest + log_total - mu * kLog2 - 1e-5), largest);
      keep_if(floor, [&](int token) { return token == best || (log_total - (s_[token] - largest)) / kLog2 <= mu; });
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
