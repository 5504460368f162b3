// int4 weights times rows of 8-bit integers with a scale per 128 inputs. Sums of 128 inputs are exact integers.
//
// Weights of 4 bits are off by 10 %, in a group with one large input by far more than its 8 bits are.
//
// panel  [groups of 128 inputs]: scales [OUTPUTS] fp32, zeros int16 [OUTPUTS], then [32 quads][LANES][4 inputs] bytes. A
//        byte has a number of the first half of the outputs (low) and one of the second half; the weight is number - zero
// row    [groups]: scale fp32, sum of the codes int32, then 128 int8 codes
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "int8.h"
#include "simd.h"

namespace int4 {

constexpr int64_t INPUTS = 128, OUTPUTS = 2 * LANES, QUAD_BYTES = 4 * LANES;
constexpr int64_t SCALE_BYTES = OUTPUTS * 4, ZERO_BYTES = OUTPUTS * 2;
constexpr int64_t GROUP_BYTES = SCALE_BYTES + ZERO_BYTES + OUTPUTS * INPUTS / 2;
constexpr int64_t ROW_HEADER_BYTES = 8, ROW_BYTES = ROW_HEADER_BYTES + INPUTS;  // of a group
constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes, as in fp32.h
constexpr float LARGEST = 127.f;

inline int64_t groups(int64_t in) { return (in + INPUTS - 1) / INPUTS; }

// Quantises one row of x [in]. A group with NaN or infinity gets a NaN scale.
inline void pack_row(const float* x, int64_t in, void* packed) {
  typedef int8_t Codes __attribute__((vector_size(LANES)));
  auto* to = static_cast<int8_t*>(packed);
  for (int64_t at = 0; at < in; at += INPUTS, to += ROW_BYTES) {
    float last[INPUTS] = {};
    const float* from = x + at;
    if (in - at < INPUTS) from = static_cast<float*>(std::memcpy(last, from, (in - at) * sizeof(float)));
    vf most{}, checks{};
    for (int64_t i = 0; i < INPUTS; i += LANES) {
      const vf v = load(from + i), size = (vf)((vi)v & 0x7fffffff);
      most = size > most ? size : most;
      checks += v * 0.f;
    }
    float largest = 0;
    for (int l = 0; l < LANES; ++l) largest = std::max(largest, most[l]);
    const bool is_finite = hsum(checks) == 0.f, some = is_finite && largest > 1e-30f;
    const float scale = !is_finite ? NAN : some ? largest / LARGEST : 0.f;
    const vf inverse = splat(some ? LARGEST / largest : 0.f);
    vi sums{};
    for (int64_t i = 0; i < INPUTS; i += LANES) {
      const vi codes = some ? round_to_int(load(from + i) * inverse) : vi{};
      const Codes narrow = __builtin_convertvector(codes, Codes);
      std::memcpy(to + ROW_HEADER_BYTES + i, &narrow, sizeof narrow);
      sums += codes;
    }
    int32_t sum = 0;
    for (int l = 0; l < LANES; ++l) sum += sums[l];
    std::memcpy(to, &scale, 4);
    std::memcpy(to + 4, &sum, 4);
  }
}

// Copies one output's weights into a panel. Codes are 0 to 15.
inline void pack_output(const int8_t* codes, const int8_t* zeros, const float* scales, int64_t in, int64_t o, int8_t* panel) {
  for (int64_t g = 0; g < groups(in); ++g, panel += GROUP_BYTES) {
    const int16_t zero = zeros[g];
    std::memcpy(panel + o * 4, scales + g, 4);
    std::memcpy(panel + SCALE_BYTES + 2 * o, &zero, 2);
    int8_t* bytes = panel + SCALE_BYTES + ZERO_BYTES + o % LANES * 4;
    for (int64_t i = 0; i < std::min(INPUTS, in - g * INPUTS); ++i) {
      bytes[i / 4 * QUAD_BYTES + i % 4] |= int8_t(codes[g * INPUTS + i] << (o < LANES ? 0 : 4));
    }
  }
}

typedef uint8_t Quads __attribute__((vector_size(QUAD_BYTES)));

// Sums of LANES outputs. add() takes weights 0 to 15 and four codes of a row; total() comes after BLOCK times at most.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool IN_ONE_STEP = true;
struct Sums {
  int8::Sums whole = int8::zero();
  void add(Quads w, int32_t x) {
#if defined(__AVX512F__)
    whole = _mm512_dpbusd_epi32(whole, (__m512i)w, _mm512_set1_epi32(x));
#else
    whole = _mm256_dpbusd_avx_epi32(whole, (__m256i)w, _mm256_set1_epi32(x));
#endif
  }
  void widen() {}
};
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool IN_ONE_STEP = false;
struct Sums {
  int8::Sums whole = int8::zero(), halves = int8::zero();
  // 8 times 2 * 15 * 127 fits 16 bits.
  void add(Quads w, int32_t x) {
#if defined(__AVX512F__)
    halves = _mm512_add_epi16(halves, _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x)));
#else
    halves = _mm256_add_epi16(halves, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x)));
#endif
  }
  void widen() {
    const uint16_t ones[2] = {1, 1};
    whole = int8::multiply_add(whole, halves, int8::spread(ones));
    halves = int8::zero();
  }
};
#else
constexpr bool IN_ONE_STEP = false;
struct Sums {
  vi whole{};
  void add(Quads w, int32_t x) {
    for (int k = 0; k < 4; ++k) whole += (((vi)w >> 8 * k) & 255) * int32_t(int8_t(x >> 8 * k));
  }
  void widen() {}
};
#endif
constexpr int BLOCK = 8;  // quads

// out [ROWS, OUTPUTS] = x @ panel. CHAINS independent sums per output hide latency with few rows.
template <int ROWS>
void tile_of(const int8_t* x, const int8_t* w, float* out, int64_t groups) {
  constexpr int CHAINS = !IN_ONE_STEP ? 1 : ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
  typedef int16_t Zeros __attribute__((vector_size(2 * LANES)));
  const int64_t row_bytes = groups * ROW_BYTES;
  vf total[ROWS][2] = {};
  for (int64_t g = 0; g < groups; ++g, x += ROW_BYTES, w += GROUP_BYTES) {
    Sums sums[CHAINS][ROWS][2];
    const int8_t* bytes = w + SCALE_BYTES + ZERO_BYTES;
    const int64_t next = g + 1 < groups ? ROW_BYTES : ROWS * row_bytes - g * ROW_BYTES;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      for (int64_t at = 0; at < ROW_BYTES; at += 64) __builtin_prefetch(x + r * row_bytes + next + at);
    }
    for (int64_t i = 0; i < INPUTS; i += 4 * BLOCK) {
#pragma GCC unroll 8
      for (int q = 0; q < BLOCK; ++q, bytes += QUAD_BYTES) {
        if (q * QUAD_BYTES % 64 == 0) __builtin_prefetch(bytes + AHEAD);
        Quads both;
        std::memcpy(&both, bytes, sizeof both);
        const Quads w0 = both & 15, w1 = both >> 4;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          int32_t codes;
          std::memcpy(&codes, x + r * row_bytes + ROW_HEADER_BYTES + i + 4 * q, 4);
          sums[q % CHAINS][r][0].add(w0, codes);
          sums[q % CHAINS][r][1].add(w1, codes);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) sums[0][r][0].widen(), sums[0][r][1].widen();
    }
    vf scales[2];
    vi zeros[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      Zeros some;
      std::memcpy(&some, w + SCALE_BYTES + v * sizeof some, sizeof some);
      scales[v] = load(reinterpret_cast<const float*>(w) + v * LANES), zeros[v] = __builtin_convertvector(some, vi);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      float scale;
      int32_t sum;
      std::memcpy(&scale, x + r * row_bytes, 4);
      std::memcpy(&sum, x + r * row_bytes + 4, 4);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 4
        for (int c = 1; c < CHAINS; ++c) sums[0][r][v].whole = int8::add(sums[0][r][v].whole, sums[c][r][v].whole);
        const vi exact = (vi)sums[0][r][v].whole - zeros[v] * sum;
        total[r][v] += __builtin_convertvector(exact, vf) * (scales[v] * splat(scale));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) store(out + r * OUTPUTS, total[r][0]), store(out + r * OUTPUTS + LANES, total[r][1]);
}

template <int... R>
void tile_among(int rows, const int8_t* x, const int8_t* w, float* out, int64_t groups, std::integer_sequence<int, R...>) {
  using Tile = void (*)(const int8_t*, const int8_t*, float*, int64_t);
  static constexpr Tile tiles[] = {tile_of<R + 1>...};
  tiles[rows - 1](x, w, out, groups);
}

// 1 to TILE_ROWS packed rows times one panel.
inline void tile(int rows, const void* x, const int8_t* w, float* out, int64_t groups) {
  const auto* codes = static_cast<const int8_t*>(x);
  tile_among(rows, codes, w, out, groups, std::make_integer_sequence<int, TILE_ROWS>{});
}

}  // namespace int4
