// What the filters on a CPU (filters_cpu.h) and on a GPU (rapid_filters.cuh) share. Definition: sampling/filters.py.
#pragma once

#include <cstdint>

namespace sampling {

constexpr int kMaxWindow = 4096;
constexpr int kMaxMatch = 64;
constexpr int kMirostatTokens = 100;
constexpr uint32_t kDomainXtc = 2;
constexpr double kLog2 = 0.69314718055994530942;

// In the order of STEPS in sampling/cpu.py.
enum Step : int32_t {
  kPenalties, kDry, kTemperature, kTopNSigma, kMinP, kTypP, kEpsilon, kEta, kTopP, kTopK, kXtc, kMirostat
};

// In the order of FILTER_NUMBERS in sampling/cpu.py.
struct FilterParameters {
  double min_p, typical_p, epsilon_cutoff, eta_cutoff;
  double top_n_sigma, xtc_probability, xtc_threshold, repetition_penalty, repeat_last_n;
  double dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dynatemp_range, dynatemp_exponent;
  double mirostat, mirostat_tau, mirostat_eta, min_tokens, temperature, top_p, top_k;
};

}  // namespace sampling
