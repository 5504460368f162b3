// fp32 GEMM micro-kernels: a tile of rows times a panel of outputs. Each output is one sum over the inputs in order,
// independent of the tile.
//
// fp32 panel  [in][OUTPUTS]
// bf16 panel  [steps][2 tiles][16 input pairs][16 outputs][2], STEP inputs per step; also AMX's layout. Widened in
// registers
#pragma once
#include <algorithm>
#include <utility>

#include "simd.h"

namespace fp32 {

constexpr int64_t OUTPUTS = 2 * LANES;  // per fp32 panel
constexpr int64_t BF16_OUTPUTS = 32;    // of a bf16 panel
constexpr int64_t STEP = 32, TILE = 16 * STEP;
constexpr int64_t INPUTS = 1024;  // inputs of a bf16 panel per pass: they stay in L2 for all rows
constexpr int64_t AHEAD = 2048;  // prefetch distance in elements; hardware prefetchers stop at page ends

// Rows of a bf16 tile. A sixth would leave none of 16 registers for the mask, and GCC would spill sums.
constexpr int BF16_ROWS = TILE_ROWS == 12 ? 12 : TILE_ROWS == 6 ? 5 : 4;

// With more rows than this, bf16 weights are widened once for all of them: a tile then has six rows of 16 registers.
constexpr int64_t WIDEN_ABOVE = LANES == 8 ? 24 : INT64_MAX;
constexpr int64_t WIDENED = 128;  // inputs at a time: with 32 outputs they stay in L1

// Vectors of outputs per tile. With one or two rows, more vectors hide the latency of the sums.
constexpr int bf16_vectors(int rows) { return LANES < 16 && rows <= 2 ? 4 : 2; }

// sums [ROWS, OUTPUTS] (+)= x [ROWS, in] @ panel; rows of x and of sums are `stride` and `width` apart.
template <int ROWS>
void tile(const float* x, int64_t stride, const float* w, float* sums, int64_t width, int64_t in, bool begins) {
  vf acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) acc[r][v] = begins ? vf{} : load(sums + r * width + v * LANES);
  }
  for (int64_t k = 0; k < in; ++k, w += OUTPUTS) {
    vf w0 = load(w), w1 = load(w + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      vf a = splat(x[r * stride + k]);
      acc[r][0] += a * w0;
      acc[r][1] += a * w1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) store(sums + r * width, acc[r][0]), store(sums + r * width + LANES, acc[r][1]);
}

// Sums of ROWS rows x VECTORS * LANES outputs of a bf16 panel.
template <int ROWS, int VECTORS>
struct Sums {
  vf of[ROWS][VECTORS];

  // Adds input `odd` (0 or 1) of a pair. x: [ROWS], `stride` apart; pair: the first output's weights.
  template <int odd>
  void add(const float* x, int64_t stride, const uint16_t* pair) {
    constexpr int IN_TILE = 16 / LANES;
    vf w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      vi both;
      std::memcpy(&both, pair + v / IN_TILE * TILE + v % IN_TILE * 2 * LANES, sizeof both);
      w[v] = (vf)(odd ? both & int32_t(0xffff0000) : both << 16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vf a = splat(x[r * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) of[r][v] += a * w[v];
    }
  }
};

// sums [ROWS, BF16_OUTPUTS] (+)= x [ROWS, in] @ VECTORS * LANES outputs of a bf16 panel; x's rows are `stride` apart.
template <int ROWS, int VECTORS>
void bf16_tile(const float* x, int64_t stride, const uint16_t* w, float* sums, int64_t in, bool begins) {
  Sums<ROWS, VECTORS> acc;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc.of[r][v] = begins ? vf{} : load(sums + r * BF16_OUTPUTS + v * LANES);
  }
  for (int64_t first = 0; first < in; first += STEP, x += STEP, w += 2 * TILE) {
    const int64_t inputs = std::min(STEP, in - first);
    const uint16_t* pair = w;
    int64_t k = 0;
    for (; k + 1 < inputs; k += 2, pair += 32) {
#pragma GCC unroll 4
      for (int o = 0; o < VECTORS * LANES; o += 16) __builtin_prefetch(pair + o / 16 * TILE + AHEAD);
      acc.template add<0>(x + k, stride, pair);
      asm volatile("" ::: "memory");  // reload the pair: GCC would keep it in registers that the sums need
      acc.template add<1>(x + k + 1, stride, pair);
    }
    if (k < inputs) acc.template add<0>(x + k, stride, pair);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(sums + r * BF16_OUTPUTS + v * LANES, acc.of[r][v]);
  }
}

using Tile = void (*)(const float*, int64_t, const float*, float*, int64_t, int64_t, bool);
using Bf16Tile = void (*)(const float*, int64_t, const uint16_t*, float*, int64_t, bool);

template <int... R>
constexpr Tile tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile tiles[] = {tile<R + 1>...};
  return tiles[rows - 1];
}

template <int... R>
constexpr Bf16Tile bf16_tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr Bf16Tile tiles[] = {bf16_tile<R + 1, bf16_vectors(R + 1)>...};
  return tiles[rows - 1];
}

// sums [rows, OUTPUTS] = x [rows, in] @ panel, 1 to TILE_ROWS rows.
inline void panel(int rows, const float* x, const float* w, float* sums, int64_t in) {
  tile_of(rows, std::make_integer_sequence<int, TILE_ROWS>{})(x, in, w, sums, OUTPUTS, in, true);
}

// Widens `inputs` inputs of a bf16 panel, from a whole step on: fp32 panels [BF16_OUTPUTS / OUTPUTS][WIDENED][OUTPUTS].
inline void widen(const uint16_t* w, int64_t inputs, float* to) {
  for (int64_t k = 0; k < inputs; k += 2) {
    const uint16_t* pair = w + k / STEP * 2 * TILE + k % STEP / 2 * 32;
#pragma GCC unroll 8
    for (int64_t o = 0; o < BF16_OUTPUTS; o += LANES) {
      vi both;
      const uint16_t* from = pair + o / 16 * TILE + o % 16 * 2;
      std::memcpy(&both, from, sizeof both);
      if (o % 16 == 0) __builtin_prefetch(from + AHEAD);
      float* at = to + o / OUTPUTS * WIDENED * OUTPUTS + k * OUTPUTS + o % OUTPUTS;
      store(at, (vf)(both << 16));
      store(at + OUTPUTS, (vf)(both & int32_t(0xffff0000)));
    }
  }
}

// As bf16_panel, with weights that are widened first.
template <typename Done>
void widened_panel(int64_t rows, const float* x, const uint16_t* w, float* sums, int64_t in, Done done) {
  alignas(64) float wide[WIDENED * BF16_OUTPUTS];
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t begin = 0; begin < in; begin += WIDENED, w += WIDENED * BF16_OUTPUTS) {
    const int64_t inputs = std::min(WIDENED, in - begin);
    widen(w, inputs, wide);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows * t / tiles, size = rows * (t + 1) / tiles - row;
      const Tile run = tile_of(int(size), std::make_integer_sequence<int, TILE_ROWS>{});
      for (int64_t o = 0; o < BF16_OUTPUTS; o += OUTPUTS) {
        run(x + row * in + begin, in, wide + o * WIDENED, sums + row * BF16_OUTPUTS + o, BF16_OUTPUTS, inputs, !begin);
      }
      if (begin + inputs == in) done(row, size);
    }
  }
}

// sums [rows, BF16_OUTPUTS] = x [rows, in] @ bf16 panel, any number of rows, in tiles of nearly equal size. Calls
// done(row, size) when a tile's sums are complete.
template <typename Done>
void bf16_panel(int64_t rows, const float* x, const uint16_t* w, float* sums, int64_t in, Done done) {
  if (rows > WIDEN_ABOVE) return widened_panel(rows, x, w, sums, in, done);
  const int64_t tiles = (rows + BF16_ROWS - 1) / BF16_ROWS;
  for (int64_t begin = 0; begin < in; begin += INPUTS, w += INPUTS * BF16_OUTPUTS) {
    const int64_t inputs = std::min(INPUTS, in - begin);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows * t / tiles, size = rows * (t + 1) / tiles - row;
      const Bf16Tile run = bf16_tile_of(int(size), std::make_integer_sequence<int, BF16_ROWS>{});
      for (int64_t o = 0; o < BF16_OUTPUTS; o += bf16_vectors(int(size)) * LANES) {
        run(x + row * in + begin, in, w + o / 16 * TILE + o % 16 * 2, sums + row * BF16_OUTPUTS + o, inputs, !begin);
      }
      if (begin + inputs == in) done(row, size);
    }
  }
}

}  // namespace fp32
