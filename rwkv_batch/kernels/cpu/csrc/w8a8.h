// int8 weights times rows of 8-bit integers, in two segments of the inputs: 128 large channels, then the others.
// Definition: model/quant/w8a8.py. This header packs them, w8a8_products.h multiplies.
//
// matrix  factors fp32 [channels], positions s32 [channels] (padded to whole vectors), then panels
// panel   scales fp32, ratios s32, corrections s32 [2 segments], each [OUTPUTS]; then codes [inputs / DOT][OUTPUTS][DOT]
// row     scale fp32, ratio s32, padded to 64 bytes; then codes. Each segment is padded to STEP inputs by zeros
//
// Inputs in 16 bits are two rows with the same scales: the high bytes of the codes, then the low ones.
// The result is fp32: float(sum) * (scale of the row * scale of the output). A GPU rounds it to fp16.
// A row with NaN or infinity has a result of NaN.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace w8a8 {

constexpr int64_t LARGE = 128;  // channels of segment 1
constexpr int64_t OUTPUTS = 2 * LANES, STEP = 64, HEADER_BYTES = 64;
constexpr int64_t PANEL_HEADER_BYTES = 4 * OUTPUTS * 4;

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define WITH_VNNI 1
constexpr int64_t DOT = 4;  // inputs per 32-bit sum of one instruction
using Code = uint8_t;       // bits of s8 or u8
#else
#define WITH_VNNI 0
constexpr int64_t DOT = 2;
using Code = int16_t;
#endif

inline int64_t padded(int64_t inputs) { return (inputs + STEP - 1) / STEP * STEP; }

// Inputs of a matrix: channels of each segment, and where their codes are.
struct Shape {
  int64_t in, large, rest, large_padded, rest_padded;

  explicit Shape(int64_t in)
      : in(in), large(std::min(in, LARGE)), rest(in - large), large_padded(padded(large)), rest_padded(padded(rest)) {}

  int64_t inputs() const { return large_padded + rest_padded; }
  int64_t row_bytes() const { return HEADER_BYTES + inputs() * int64_t(sizeof(Code)); }
  int64_t panel_bytes() const { return PANEL_HEADER_BYTES + inputs() * OUTPUTS; }
  int64_t head_bytes() const { return 2 * 4 * padded(in); }
  int64_t bytes(int64_t out) const { return head_bytes() + (out + OUTPUTS - 1) / OUTPUTS * panel_bytes(); }
  // Index of the code at a permuted position.
  int64_t index(int64_t position) const { return position < LARGE ? position : position - LARGE + large_padded; }
};

// ---- rows ------------------------------------------------------------------------------------

struct Units {
  float scale, inverse_large, inverse_rest;
  int32_t ratio;
};

inline float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Scales of a row from the largest magnitudes of its segments, as bits: these are ordered, NaN last. No multiplication
// has an addition behind it, so the compiler contracts nothing.
template <bool UNSIGNED>
Units units(int32_t large, int32_t rest) {
  constexpr float most = UNSIGNED ? 255.f : 127.f, max_ratio = UNSIGNED ? 255.f : 511.f;
  constexpr float per_ratio = float(16.0 / max_ratio), per_step = float(1.0 / most);
  const float of_large = from_bits(large), of_rest = from_bits(rest), unit = std::max(of_rest, of_large * per_ratio);
  if (!(of_large + of_rest <= std::numeric_limits<float>::max())) return {NAN, 0, 0, 16};
  if (unit == 0) return {0, 0, 0, 16};
  const float ratio = std::min(std::max(std::ceil(of_large / unit * 16.f), 16.f), max_ratio);
  const float step = unit * (ratio / 16.f);
  return {unit * per_step, std::min(most / step, 3e38f), std::min(most / unit, 3e38f), int32_t(ratio)};
}

// The LANES inputs from `at` on, times their factors. Zeros follow the last input.
inline vf load_inputs(const float* x, const float* factors, int64_t at, int64_t in) {
  if (at + LANES <= in) return load(x + at) * load(factors + at);
  float last[LANES] = {};
  if (at < in) std::memcpy(last, x + at, (in - at) * sizeof(float));
  return load(last) * load(factors + at);
}

inline vi load_whole(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A code in 16 bits, as one byte of it.
enum class Byte { WHOLE, HIGH, LOW };

// Codes of inputs in steps. v is within the codes of 8 bits, so its multiple is within those of 16.
template <bool UNSIGNED, Byte BYTE>
vi code_of(vf v) {
  if (BYTE == Byte::WHOLE) return round_to_int(v);
  constexpr int32_t half = UNSIGNED ? 0 : 128;  // a low byte of s8 begins at -128
  const vi wide = round_to_int(v * 256.f) + half;
  return BYTE == Byte::HIGH ? wide >> 8 : (wide & 255) - half;
}

// Stores the codes of STEP channels from `at` on at their positions. code(at, is_large) returns LANES of them.
template <bool UNSIGNED>
struct Permuted {
  Code* large;
  Code* rest;

#if WITH_VNNI && defined(__AVX512VBMI2__)
  template <typename ToCode>
  void put(ToCode code, const int32_t* positions, int64_t at, int64_t width) {
    __m512i v[4];
    uint64_t is_large = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512i p = _mm512_loadu_si512(positions + at + i * LANES);
      const __mmask16 bits = _mm512_cmplt_epi32_mask(p, _mm512_set1_epi32(LARGE));
      is_large |= uint64_t(bits) << i * LANES;
      v[i] = (__m512i)code(at + i * LANES, (vi)_mm512_movm_epi32(bits));
    }
    const __m512i low = _mm512_packs_epi32(v[0], v[1]), high = _mm512_packs_epi32(v[2], v[3]);  // in each 128 bits
    const __m512i packed = UNSIGNED ? _mm512_packus_epi16(low, high) : _mm512_packs_epi16(low, high);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_permutexvar_epi32(order, packed);
    const uint64_t all = width < STEP ? (uint64_t(1) << width) - 1 : ~uint64_t(0);
    large = put_some(codes, is_large & all, large);
    rest = put_some(codes, ~is_large & all, rest);
  }

  static Code* put_some(__m512i codes, uint64_t which, Code* to) {
    const int count = __builtin_popcountll(which);
    const uint64_t first = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    _mm512_mask_storeu_epi8(to, first, _mm512_maskz_compress_epi8(which, codes));
    return to + count;
  }
#else
  template <typename ToCode>
  void put(ToCode code, const int32_t* positions, int64_t at, int64_t width) {
    constexpr int32_t lowest = UNSIGNED ? 0 : -128, highest = UNSIGNED ? 255 : 127;
    typedef Code Codes __attribute__((vector_size(LANES * sizeof(Code))));
    Code codes[STEP];
    for (int64_t i = 0; i < STEP; i += LANES) {
      vi v = code(at + i, load_whole(positions + at + i) < int32_t(LARGE));
      v = v > highest ? vi{} + highest : v;
      v = v < lowest ? vi{} + lowest : v;
      const Codes narrow = __builtin_convertvector(v, Codes);
      std::memcpy(codes + i, &narrow, sizeof narrow);
    }
    for (int64_t i = 0; i < width; ++i) {
      const bool is_large = positions[at + i] < LARGE;
      *(is_large ? large : rest) = codes[i];
      large += is_large, rest += !is_large;
    }
  }
#endif
};

// Quantises one row of x [in] in 8 bits, or in 16. A row with NaN or infinity has zeros and a scale of NaN.
template <bool UNSIGNED>
void pack_row(const float* x, const void* matrix, const Shape& shape, int64_t parts, void* to) {
  const auto* factors = static_cast<const float*>(matrix);
  const auto* positions = reinterpret_cast<const int32_t*>(factors + padded(shape.in));
  vi large{}, rest{};
  for (int64_t at = 0; at < shape.in; at += LANES) {
    const vi size = (vi)load_inputs(x, factors, at, shape.in) & 0x7fffffff;
    const vi is_large = load_whole(positions + at) < int32_t(LARGE);
    const vi of_large = size & is_large, of_rest = size & ~is_large;
    large = of_large > large ? of_large : large;
    rest = of_rest > rest ? of_rest : rest;
  }
  int32_t largest = 0, largest_rest = 0;
  for (int l = 0; l < LANES; ++l) largest = std::max(largest, large[l]), largest_rest = std::max(largest_rest, rest[l]);
  const Units u = units<UNSIGNED>(largest, largest_rest);
  const vf inverse_large = splat(u.inverse_large), inverse_rest = splat(u.inverse_rest);
  const auto put = [&](auto code_of, char* row) {
    std::memcpy(row, &u.scale, 4);
    std::memcpy(row + 4, &u.ratio, 4);
    auto* codes = reinterpret_cast<Code*>(row + HEADER_BYTES);
    if (u.inverse_rest == 0) {
      std::memset(codes, 0, shape.inputs() * sizeof(Code));
      return;
    }
    const auto code = [&](int64_t at, vi is_large) {
      return code_of(load_inputs(x, factors, at, shape.in) * (is_large ? inverse_large : inverse_rest));
    };
    Permuted<UNSIGNED> permuted{codes, codes + shape.large_padded};
    for (int64_t at = 0; at < shape.in; at += STEP) permuted.put(code, positions, at, std::min(STEP, shape.in - at));
    std::memset(permuted.large, 0, (shape.large_padded - shape.large) * sizeof(Code));
    std::memset(permuted.rest, 0, (shape.rest_padded - shape.rest) * sizeof(Code));
  };
  auto* row = static_cast<char*>(to);
  if (parts == 1) {
    put(code_of<UNSIGNED, Byte::WHOLE>, row);
  } else {
    put(code_of<UNSIGNED, Byte::HIGH>, row);
    put(code_of<UNSIGNED, Byte::LOW>, row + shape.row_bytes());
  }
}

// Copies one output's weights into a panel.
inline void pack_output(const int8_t* codes, float scale, int32_t ratio, const Shape& shape, int64_t o, int8_t* panel) {
  int32_t sums[2] = {};
  for (int64_t p = 0; p < shape.in; ++p) {
    const int64_t i = shape.index(p);
    panel[PANEL_HEADER_BYTES + (i / DOT * OUTPUTS + o) * DOT + i % DOT] = codes[p];
    sums[p >= LARGE] += codes[p];
  }
  const int32_t corrections[2] = {-128 * sums[0], -128 * sums[1]};
  std::memcpy(panel + o * 4, &scale, 4);
  std::memcpy(panel + (OUTPUTS + o) * 4, &ratio, 4);
  for (int s = 0; s < 2; ++s) std::memcpy(panel + ((2 + s) * OUTPUTS + o) * 4, corrections + s, 4);
}

}  // namespace w8a8
