// Products of W8A8 panels and rows. Sums are exact, so all instructions and tilings give the same bits.
//
// AMX                  from AMX_ROWS rows on
// AVX-512 or AVX VNNI  u8 times s8; s8 inputs get an offset, whose products are taken away
// others               products of 16-bit integers, as in int8.h
#pragma once
#include <utility>

#include "amx.h"
#include "int8.h"
#include "w8a8.h"

namespace w8a8 {

constexpr int64_t AHEAD = 4096;  // prefetch distance in bytes
constexpr int64_t AMX_ROWS = 4;  // fewer rows are bound by memory

// A panel and the rows that it is multiplied by.
struct Operands {
  const Shape& shape;
  const int8_t* panel;
  const char* rows;  // packed

  const Code* codes(int64_t row) const {
    return reinterpret_cast<const Code*>(rows + row * shape.row_bytes() + HEADER_BYTES);
  }
  const int32_t* corrections() const { return reinterpret_cast<const int32_t*>(panel) + 2 * OUTPUTS; }
  const int8_t* weights() const { return panel + PANEL_HEADER_BYTES; }
  const int8_t* rest_weights() const { return weights() + shape.large_padded * OUTPUTS; }
};

// y [OUTPUTS] of one row from its sums over the segments. In 16 bits, those of the low bytes come next.
template <int PARTS>
void combine(const Operands& o, int64_t row, const int32_t* large, const int32_t* rest, vf y[2]) {
  float scale;
  int32_t ratio;
  std::memcpy(&scale, o.rows + row * o.shape.row_bytes(), 4);
  std::memcpy(&ratio, o.rows + row * o.shape.row_bytes() + 4, 4);
  for (int v = 0; v < 2; ++v) {
    const auto* scales = reinterpret_cast<const float*>(o.panel) + v * LANES;
    const auto* ratios = reinterpret_cast<const int32_t*>(o.panel) + OUTPUTS + v * LANES;
    const vi product = load_whole(ratios) * ratio;
    const auto total = [&](int part) {
      const int64_t at = part * OUTPUTS + v * LANES;
      const vi sum = load_whole(large + at);
      // floor(product * sum / 256) without 64 bits: (product >> 8) * sum is whole, (product & 255) * sum below 2^30.
      return __builtin_convertvector((product >> 8) * sum + ((product & 255) * sum >> 8) + load_whole(rest + at), vf);
    };
    // A multiple of 2^-8 is exact, so contraction changes nothing.
    y[v] = (PARTS == 1 ? total(0) : total(0) + total(1) * 0x1p-8f) * (load(scales) * scale);
  }
}

// ---- vectors ---------------------------------------------------------------------------------

#if WITH_VNNI && defined(__AVX512F__)
using Weights = __m512i;
inline Weights load_weights(const int8_t* w) { return _mm512_loadu_si512(w); }
inline Weights spread(const Code* x, int32_t offset) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_xor_si512(_mm512_set1_epi32(four), _mm512_set1_epi32(offset));
}
inline int8::Sums accumulate(int8::Sums sum, Weights w, Weights x) { return _mm512_dpbusd_epi32(sum, x, w); }
#elif WITH_VNNI
using Weights = __m256i;
inline Weights load_weights(const int8_t* w) { return _mm256_loadu_si256((const __m256i*)w); }
inline Weights spread(const Code* x, int32_t offset) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_xor_si256(_mm256_set1_epi32(four), _mm256_set1_epi32(offset));
}
inline int8::Sums accumulate(int8::Sums sum, Weights w, Weights x) { return _mm256_dpbusd_avx_epi32(sum, x, w); }
#else
using Weights = int8::Pairs;
inline Weights load_weights(const int8_t* w) { return int8::widen(int8::load_bytes(w)); }
inline Weights spread(const Code* x, int32_t) { return int8::spread(reinterpret_cast<const uint16_t*>(x)); }
inline int8::Sums accumulate(int8::Sums sum, Weights w, Weights x) { return int8::multiply_add(sum, w, x); }
#endif

// sums [ROWS, OUTPUTS] = one segment of x @ its part of a panel. CHAINS independent sums per output hide latency.
// VNNI multiplies u8: s8 inputs get an offset of 128, whose products `corrections` takes away.
template <int ROWS, bool UNSIGNED>
void tile_of(const Code* x, int64_t row_bytes, const int8_t* w, const int32_t* corrections, int64_t inputs, int32_t* sums) {
  constexpr int CHAINS = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;
  constexpr bool OFFSET = WITH_VNNI && !UNSIGNED;
  const int64_t pitch = row_bytes / int64_t(sizeof(Code));
  int8::Sums of[CHAINS][ROWS][2];
#pragma GCC unroll 4
  for (int c = 0; c < CHAINS; ++c) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      of[c][r][0] = of[c][r][1] = int8::zero();
      if (OFFSET && c == 0) {
        std::memcpy(&of[0][r][0], corrections, sizeof(int8::Sums));
        std::memcpy(&of[0][r][1], corrections + LANES, sizeof(int8::Sums));
      }
    }
  }
  for (int64_t i = 0; i < inputs; i += CHAINS * DOT) {
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; ++c, w += DOT * OUTPUTS) {
      for (int64_t line = 0; line < DOT * OUTPUTS; line += 64) __builtin_prefetch(w + line + AHEAD);
      const Weights w0 = load_weights(w), w1 = load_weights(w + DOT * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const Weights a = spread(x + r * pitch + i + c * DOT, OFFSET ? int32_t(0x80808080) : 0);
        of[c][r][0] = accumulate(of[c][r][0], w0, a);
        of[c][r][1] = accumulate(of[c][r][1], w1, a);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int c = 1; c < CHAINS; ++c) {
      of[0][r][0] = int8::add(of[0][r][0], of[c][r][0]);
      of[0][r][1] = int8::add(of[0][r][1], of[c][r][1]);
    }
    std::memcpy(sums + r * OUTPUTS, &of[0][r][0], sizeof(int8::Sums));
    std::memcpy(sums + r * OUTPUTS + LANES, &of[0][r][1], sizeof(int8::Sums));
  }
}

using Tile = void (*)(const Code*, int64_t, const int8_t*, const int32_t*, int64_t, int32_t*);

template <bool UNSIGNED, int... R>
Tile tile_for(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {tile_of<R + 1, UNSIGNED>...};
  return tiles[rows - 1];
}

// Sums [rows, OUTPUTS] over each segment, of 1 to TILE_ROWS rows from `row` on.
template <bool UNSIGNED>
void tile(const Operands& o, int64_t row, int64_t rows, int32_t* large, int32_t* rest) {
  const Tile run = tile_for<UNSIGNED>(rows, std::make_integer_sequence<int, TILE_ROWS>{});
  const Shape& s = o.shape;
  const Code* x = o.codes(row);
  run(x, s.row_bytes(), o.weights(), o.corrections(), s.large_padded, large);
  run(x + s.large_padded, s.row_bytes(), o.rest_weights(), o.corrections() + OUTPUTS, s.rest_padded, rest);
}

// ---- AMX -------------------------------------------------------------------------------------

#if WITH_AMX

// A macro, as GCC's intrinsics take literal tile numbers. AMX multiplies s8 too, so there are no offsets.
#define TILE_PRODUCT(sum, x, w)   \
  do {                            \
    if constexpr (UNSIGNED) {     \
      _tile_dpbusd(sum, x, w);    \
    } else {                      \
      _tile_dpbssd(sum, x, w);    \
    }                             \
  } while (false)

// sums [32, OUTPUTS] = one segment of two tiles of rows @ its part of a panel.
template <bool UNSIGNED>
void amx_two_segment(const Code* a0, const Code* a1, int64_t row_bytes, const int8_t* w, int64_t inputs, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < inputs; i += STEP, a0 += STEP, a1 += STEP, w += STEP * OUTPUTS) {
    _tile_loadd(6, w, 128);
    _tile_loadd(4, a0, row_bytes);
    TILE_PRODUCT(0, 4, 6);
    _tile_loadd(5, a1, row_bytes);
    TILE_PRODUCT(2, 5, 6);
    _tile_loadd(7, w + 64, 128);
    TILE_PRODUCT(1, 4, 7);
    TILE_PRODUCT(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 512, 128);
  _tile_stored(3, sums + 528, 128);
}

// sums [16, OUTPUTS], of one tile of rows.
template <bool UNSIGNED>
void amx_one_segment(const Code* a, int64_t row_bytes, const int8_t* w, int64_t inputs, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < inputs; i += STEP, a += STEP, w += STEP * OUTPUTS) {
    _tile_loadd(4, a, row_bytes);
    _tile_loadd(6, w, 128);
    _tile_loadd(7, w + 64, 128);
    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 4, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
}

template <bool UNSIGNED>
void amx_two(const Operands& o, int64_t row0, int64_t row1, int32_t* large, int32_t* rest) {
  const Shape& s = o.shape;
  const Code *a0 = o.codes(row0), *a1 = o.codes(row1);
  amx_two_segment<UNSIGNED>(a0, a1, s.row_bytes(), o.weights(), s.large_padded, large);
  a0 += s.large_padded, a1 += s.large_padded;
  amx_two_segment<UNSIGNED>(a0, a1, s.row_bytes(), o.rest_weights(), s.rest_padded, rest);
}

template <bool UNSIGNED>
void amx_one(const Operands& o, int64_t row, int32_t* large, int32_t* rest) {
  const Shape& s = o.shape;
  amx_one_segment<UNSIGNED>(o.codes(row), s.row_bytes(), o.weights(), s.large_padded, large);
  amx_one_segment<UNSIGNED>(o.codes(row) + s.large_padded, s.row_bytes(), o.rest_weights(), s.rest_padded, rest);
}

#endif

// Calls finish(row, sums [OUTPUTS]) for each row of a panel's product. Rows may come twice, with the same bits.
// rows: packed ones, PARTS per row; TILE_ROWS is even
template <bool UNSIGNED, int PARTS, typename Finish>
void multiply(const Operands& o, int64_t rows, Finish finish) {
  constexpr int64_t MOST = 32;
  alignas(64) int32_t large[MOST * OUTPUTS], rest[MOST * OUTPUTS];
  const auto finish_rows = [&](int64_t row, int64_t n, int64_t at) {
    for (int64_t r = 0; r < n; r += PARTS) {
      vf sums[2];
      combine<PARTS>(o, row + r, large + (at + r) * OUTPUTS, rest + (at + r) * OUTPUTS, sums);
      finish((row + r) / PARTS, sums);
    }
  };
#if WITH_AMX
  if (rows >= AMX_ROWS && amx_allowed()) {
    configure(int(std::min(rows, int64_t(16))));
    for (int64_t done = 0; done < rows; done += 32) {
      const int64_t last = std::max(rows - 16, int64_t(0));  // the last tile is a whole one too
      if (rows - done > 16) {
        const int64_t second = std::min(done + 16, last);
        amx_two<UNSIGNED>(o, done, second, large, rest);
        finish_rows(done, 16, 0);
        finish_rows(second, 16, 16);
      } else {
        amx_one<UNSIGNED>(o, last, large, rest);
        finish_rows(last, rows - last, 0);
      }
    }
    return;
  }
#endif
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = rows / PARTS * t / tiles * PARTS, n = rows / PARTS * (t + 1) / tiles * PARTS - row;
    tile<UNSIGNED>(o, row, n, large, rest);
    finish_rows(row, n, 0);
  }
}

}  // namespace w8a8
