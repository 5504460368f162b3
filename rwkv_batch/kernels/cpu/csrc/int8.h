// int4 weights times rows of 16-bit integers. Sums of 128 inputs are exact integers, so their order does not matter.
//
// panel  [groups of 128 inputs]: scales [OUTPUTS] fp32, zeros int8 [OUTPUTS][2], then [64 pairs][OUTPUTS] bytes. A byte
//        has a number of the first half of the outputs (low) and one of the second half; the weight is number - zero.
// row    [groups]: scale fp32 (two elements), then 128 int16. 15 * 32767 * 128 fits 32 bits
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "simd.h"

namespace int8 {

constexpr int64_t INPUTS = 128, OUTPUTS = 2 * LANES;
constexpr int64_t SCALE_BYTES = OUTPUTS * 4, ZERO_BYTES = OUTPUTS * 2;
constexpr int64_t GROUP_BYTES = SCALE_BYTES + ZERO_BYTES + OUTPUTS * INPUTS / 2;
constexpr int64_t ROW_ELEMENTS = 2 + INPUTS;
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes, as in fp32.h
constexpr float LARGEST = 32767.f;

inline int64_t groups(int64_t in) { return (in + INPUTS - 1) / INPUTS; }

// Quantises one row of x [in]. A group with NaN or infinity gets a NaN scale.
inline void pack_row(const float* x, int64_t in, uint16_t* to) {
  for (int64_t at = 0; at < in; at += INPUTS, to += ROW_ELEMENTS) {
    const int64_t width = std::min(INPUTS, in - at);
    vf most{}, checks{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      const vf v = load(x + at + i), size = (vf)((vi)v & 0x7fffffff);
      most = size > most ? size : most;
      checks += v * 0.f;
    }
    float largest = 0, check = hsum(checks);
    for (int l = 0; l < LANES; ++l) largest = std::max(largest, most[l]);
    for (; i < width; ++i) {
      largest = std::max(largest, std::fabs(x[at + i]));
      check += x[at + i] * 0.f;
    }
    const bool some = largest > 1e-30f;
    float scale = check != 0.f ? NAN : some ? largest / LARGEST : 0.f;  // NaN != 0
    const float inverse = check == 0.f && some ? LARGEST / largest : 0.f;
    std::memcpy(to, &scale, 4);
    int16_t codes[INPUTS] = {};
    if (inverse != 0.f) {
      for (int64_t i = 0; i < width; ++i) codes[i] = int16_t(std::nearbyint(x[at + i] * inverse));
    }
    std::memcpy(to + 2, codes, sizeof codes);
  }
}

// Copies one output's weights into a panel. Codes are 0 to 15.
inline void pack_output(const int8_t* codes, const int8_t* zeros, const float* scales, int64_t in, int64_t o, int8_t* panel) {
  for (int64_t g = 0; g < groups(in); ++g, panel += GROUP_BYTES) {
    std::memcpy(panel + o * 4, scales + g, 4);
    std::memset(panel + SCALE_BYTES + 2 * o, zeros[g], 2);
    int8_t* bytes = panel + SCALE_BYTES + ZERO_BYTES;
    for (int64_t i = 0; i < std::min(INPUTS, in - g * INPUTS); ++i) {
      const int64_t at = 2 * o + i % 2;
      bytes[i / 2 * OUTPUTS + at % OUTPUTS] |= int8_t(codes[g * INPUTS + i] << (at < OUTPUTS ? 0 : 4));
    }
  }
}

typedef int8_t Bytes __attribute__((vector_size(OUTPUTS)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(OUTPUTS)));
inline Bytes load_bytes(const int8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

#if defined(__AVX512BW__)
using Sums = __m512i;
using Pairs = __m512i;
inline Sums zero() { return _mm512_setzero_si512(); }
inline Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Pairs widen(Bytes w) { return _mm512_cvtepi8_epi16((__m256i)w); }
inline Pairs spread(const uint16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return _mm512_set1_epi32(both);
}
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}
inline vf as_floats(Sums s) { return (vf)_mm512_cvtepi32_ps(s); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
using Sums = __m256i;
using Pairs = __m256i;
inline Sums zero() { return _mm256_setzero_si256(); }
inline Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Pairs widen(Bytes w) { return _mm256_cvtepi8_epi16((__m128i)w); }
inline Pairs spread(const uint16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return _mm256_set1_epi32(both);
}
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
inline vf as_floats(Sums s) { return (vf)_mm256_cvtepi32_ps(s); }
#else
using Sums = vi;
struct Pairs {
  vi even, odd;
};
inline Sums zero() { return vi{}; }
inline Sums add(Sums a, Sums b) { return a + b; }
inline Pairs widen(Bytes w) {
  Pairs p;
  for (int i = 0; i < LANES; ++i) p.even[i] = w[2 * i], p.odd[i] = w[2 * i + 1];
  return p;
}
inline Pairs spread(const uint16_t* pair) { return {vi{} + int16_t(pair[0]), vi{} + int16_t(pair[1])}; }
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) { return sum + w.even * x.even + w.odd * x.odd; }
inline vf as_floats(Sums s) { return __builtin_convertvector(s, vf); }
#endif

// out [ROWS, OUTPUTS] = x @ panel. CHAINS independent sums per output hide latency with few rows.
template <int ROWS>
void tile_of(const uint16_t* x, const int8_t* w, float* out, int64_t groups) {
  constexpr int CHAINS = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
  const int64_t row_size = groups * ROW_ELEMENTS;
  vf total[ROWS][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += ROW_ELEMENTS, w += GROUP_BYTES) {
    Sums sums[CHAINS][ROWS][2];
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; ++c) {
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) sums[c][r][0] = zero(), sums[c][r][1] = zero();
    }
    const int8_t* codes = w + SCALE_BYTES + ZERO_BYTES;
    const Bytes zero0 = load_bytes(w + SCALE_BYTES), zero1 = load_bytes(w + SCALE_BYTES + OUTPUTS);
    for (int64_t pair = 0; pair < INPUTS / 2; pair += CHAINS) {
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; ++c, codes += OUTPUTS) {
        if (c * OUTPUTS % 64 == 0) __builtin_prefetch(codes + AHEAD);
        const Bytes both = load_bytes(codes);
        const Pairs w0 = widen((both & 15) - zero0), w1 = widen((Bytes)((UnsignedBytes)both >> 4) - zero1);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const Pairs a = spread(x + r * row_size + 2 + 2 * (pair + c));
          sums[c][r][0] = multiply_add(sums[c][r][0], w0, a);
          sums[c][r][1] = multiply_add(sums[c][r][1], w1, a);
        }
      }
    }
    const vf scale0 = load(reinterpret_cast<const float*>(w)), scale1 = load(reinterpret_cast<const float*>(w) + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int c = 1; c < CHAINS; ++c) {
        sums[0][r][0] = add(sums[0][r][0], sums[c][r][0]);
        sums[0][r][1] = add(sums[0][r][1], sums[c][r][1]);
      }
      float scale;
      std::memcpy(&scale, x + r * row_size, 4);
      const vf of_row = splat(scale);
      total[r][0] += as_floats(sums[0][r][0]) * (scale0 * of_row);
      total[r][1] += as_floats(sums[0][r][1]) * (scale1 * of_row);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) store(out + r * OUTPUTS, total[r][0]), store(out + r * OUTPUTS + LANES, total[r][1]);
}

template <int... R>
void tile_among(int rows, const uint16_t* x, const int8_t* w, float* out, int64_t groups, std::integer_sequence<int, R...>) {
  using Tile = void (*)(const uint16_t*, const int8_t*, float*, int64_t);
  static constexpr Tile tiles[] = {tile_of<R + 1>...};
  tiles[rows - 1](x, w, out, groups);
}

// 1 to TILE_ROWS rows of x times one panel.
inline void tile(int rows, const uint16_t* x, const int8_t* w, float* out, int64_t groups) {
  tile_among(rows, x, w, out, groups, std::make_integer_sequence<int, TILE_ROWS>{});
}

}  // namespace int8
